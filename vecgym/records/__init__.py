"""The records of a run: its history, logs and files."""
