"""The same strategies stacked in one process and on real processes: the same numbers, bytes and random masks.

Four processes are started once and go through all cases together. A case of W < 4 processes runs in the first W.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.models import make_data, make_model
from tests.test_properties import STRATEGIES
from vecgym import launch, strategy, tree
from vecgym.collectives import StackedCollectives
from vecgym.collectives.distributed import DistributedCollectives, Wire, buckets, check_divides, in_buckets
from vecgym.strategy import CommunicationModule, Strategy
from vecgym.verify import BOUNDS, Check, Run, compare

K = 4
STEPS = 5
LAYOUTS = {1: 4, 2: 2, 4: 1}  # W: L
EXAMPLES = (3, 1, 4, 2)  # what each node's shard is said to hold


def wires(link: launch.Link) -> dict[int, Wire]:
    """The wires of 1, 2 and 4 processes that this process belongs to."""
    found = {}
    for W in LAYOUTS:
        group = dist.new_group(list(range(W)))  # called by all
        if link.rank < W:
            found[W] = Wire(group, watch=launch.watch)
    return found


def every_case(link: launch.Link, steps: int) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    mine = wires(link)
    found: dict[str, dict[str, Any]] = {}
    for name, row in STRATEGIES.items():
        for exact in (True, False):
            # Dropout: its masks must be those of the stacked run, too.
            model = make_model("Dropout", dtype=torch.float64)
            data = TensorDataset(*make_data("Dropout", 64, dtype=torch.float64))
            given = Run(row.make(inner_optim="adamw", lr=1e-2), model, data, K, steps, num_examples=EXAMPLES)
            for W, rows in zip(mine, compare(given, list(mine.values()), exact=exact)):
                check = Check(f"{name} W={W} {'exact' if exact else 'native'}", 0.0 if exact else 1e-12, rows)
                found[check.name] = {"passed": check.passed, "first": check.first_failure}
    return found
