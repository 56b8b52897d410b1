"""The place of a hostile case: a folder of its own, with bounded memory, and everything put back afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

MEMORY_BYTES = 2 << 30  # that a case may take: a huge count must not bring the machine down


@contextlib.contextmanager
def a_new_folder() -> Iterator[Path]:
    """Work in a folder of its own, which is removed at the end."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="vecgym-fuzz-", ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


@contextlib.contextmanager
def as_it_was() -> Iterator[None]:
    """Put back what a call may change in this process, and bound its memory."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    threads, gradients, dtype = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, limits[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        _close_figures()


def _close_figures() -> None:
    import matplotlib.pyplot as plt  # which takes a while to import

    plt.close("all")
