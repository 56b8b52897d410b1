"""The conditions of all tests: one thread per process, which of them are slow, and a browser.

The tests run in parallel, and threads that wait for each other's cores crawl.
"""

import gc
import importlib
import os
from collections import defaultdict
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # also for the processes that tests start

import pytest
import torch

from tests.browser import MISSING, Browser, find
from tests.slow import COLLECTED, NAMED, slow_rows, thinned

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow ones, before pytest leaves out what `-m` says."""
    files, named = config.stash.setdefault(COLLECTED, set()), config.stash.setdefault(NAMED, set())
    others: dict[tuple[str, str], dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        test, _, case = item.name.partition("[")
        files.add(item.path.stem)
        if rows := slow_rows(item.path.stem, test, case[:-1]):
            item.add_marker(pytest.mark.slow)
            named |= rows
        elif case and not item.get_closest_marker("slow"):
            others[item.path.stem, test][case] = item
    for (file, test), cases in others.items():
        for case in thinned(file, test, list(cases)):
            cases[case].add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Set aside what every test has in common.

    Each collection of garbage would go through half a million objects, and each process that a test forks copy them.
    The first optimizer imports torch's compiler: once here rather than in every such process.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        importlib.import_module("torch._dynamo")
    gc.freeze()


@pytest.fixture
def compiled_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compile=True compile small models, too, in place of their lists of operations."""
    monkeypatch.setattr("vecgym.engine.plan.MIN_FLOP_COMPILED", 0)


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A headless Chromium; without one the test is skipped, and says so."""
    if find() is None:
        pytest.skip(MISSING)
    with Browser() as opened:
        yield opened
