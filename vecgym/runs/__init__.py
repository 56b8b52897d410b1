"""Whole runs: training, checkpoints, processes, verification, differentiable rollouts."""
