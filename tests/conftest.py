"""What holds for all tests: one thread per process, and which of them are slow.

The tests run in parallel, and threads that wait for each other's cores crawl.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # also for the processes that tests start

import pytest
import torch

from tests.slow import is_slow

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow ones, before pytest leaves out what `-m` says."""
    for item in items:
        test, _, case = item.name.partition("[")
        if is_slow(item.path.stem, test, case[:-1]):
            item.add_marker(pytest.mark.slow)
