"""EXO Gym's name for `vecgym.strategy.fedavg`."""

from vecgym.strategy.fedavg import AveragingCommunicator, FedAvgStrategy

__all__ = ["AveragingCommunicator", "FedAvgStrategy"]
