"""Runs a campaign on several processes."""

from __future__ import annotations

import importlib
import multiprocessing
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from types import ModuleType
from typing import Any

import torch

from tests.fuzz.common import Failure, attempt, reproducer, shrink
from tests.fuzz.report import Found, Report
from vecgym.engine import recorded


def campaign(name: str) -> ModuleType:
    return importlib.import_module(f"tests.fuzz.{name}")


def work(name: str, seed: int, count: int, worker: int, workers: int, seconds: float) -> Report:
    """Every `workers`-th case of a campaign, until they or the seconds are used up."""
    torch.set_num_threads(1)
    recorded.MIN_PASSES = 3  # so that cases, which are short, go by lists of operations
    warnings.simplefilter("ignore")
    module, report, start = campaign(name), Report(name), time.monotonic()
    tally: Any = getattr(module, "tally", Counter())
    for case in islice(module.cases(seed, count), worker, None, workers):
        outcome = attempt(module, case)
        if report.add(outcome) and isinstance(outcome, Failure):
            counted = Counter(tally)
            small = shrink(module, case, outcome)
            tally.clear()  # what was tried while shrinking does not count
            tally.update(counted)
            report.failures[outcome.cause] = Found(1, outcome.message, small, reproducer(module, small))
        if time.monotonic() - start > seconds:
            break
    report.seconds, report.tally = time.monotonic() - start, Counter(tally)
    return report


def run(name: str, seed: int, count: int, workers: int, seconds: float) -> Report:
    """A campaign on several processes."""
    tasks = [(name, seed, count, worker, workers, seconds) for worker in range(workers)]
    if workers == 1:
        return work(*tasks[0])
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        first, *others = pool.map(work, *zip(*tasks))
    for other in others:
        first.merge(other)
    return first
