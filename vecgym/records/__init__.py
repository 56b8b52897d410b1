"""What a run leaves behind: its history, logs and files."""
