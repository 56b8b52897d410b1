"""Memory: what a run takes."""

from __future__ import annotations

import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """The most memory so far: allocated on a CUDA device, else resident in this process; on MPS held by its driver now.

    >>> peak_bytes(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
