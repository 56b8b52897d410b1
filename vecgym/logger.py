"""The documents' name for `vecgym.records.loggers`."""

from vecgym.records.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger", "WandbLogger"]
