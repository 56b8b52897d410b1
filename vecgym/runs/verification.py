"""Equivalence as a product: a strategy gives the same numbers stacked in one process and on real processes.

`verify(strategy, model, dataset)` trains both ways, in step, with the same data and seeds, and reports the largest
difference after every step, of parameters, buffers, losses, optimizer state, strategy state and bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from vecgym.collectives.distributed import Wire, check_divides
from vecgym.core.check import integer, kind_of
from vecgym.engine import check_settings, hooks
from vecgym.records.rows import counted
from vecgym.runs import links, multiprocess
from vecgym.runs.diagnosis import KINDS, Finding
from vecgym.runs.lockstep import BOUNDS, Case, Check, Difference, compare, compare_with_ddp
from vecgym.runs.options import check_strategy, checked
from vecgym.strategy import AllReduceStrategy, Strategy
from vecgym.strategy.catalogue import CATALOGUE

__all__ = ["STRATEGIES", "Check", "Difference", "Finding", "Report", "verify"]

COLUMNS = ("params", "buffers", "losses", "optimizer", "strategy", "ledger_bytes", "handed_bytes")
ORDER_OF_SUMS = (
    "The exact check passes, so the strategy is the same; torch.distributed adds up in another order, and a value that "
    "is rounded, ranked or compared can fall to the other side by that. float64 makes it rare."
)

# What `vecgym verify` knows by name.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    name: partial(row.make, inner_optim="adamw", lr=1e-2, max_norm=1.0) for name, row in CATALOGUE.items()
}


@dataclass(frozen=True)
class Report:
    """What `verify` found; print it for a table.

    Attributes:
        checks: "exact": the bound is 0; "native": torch.distributed reduces; "DDP", for AllReduce: against
            torch's DistributedDataParallel, parameters only.

    >>> check = Check("exact", bound=0.0, rows=(Difference(0, 0, 0, 0, 0, 0, 0, 0),))
    >>> report = Report("FedAvgStrategy(...)", num_nodes=4, num_processes=2, dtype=torch.float64, checks=(check,))
    >>> report.passed
    True
    >>> print(report)
    FedAvgStrategy(...)
    4 nodes in 2 processes, 1 step, torch.float64
           params  buffers  losses  optimizer  strategy  ledger_bytes  handed_bytes  bound
    exact  0       0        0       0          0         0             0             0      pass
    """

    strategy: str
    num_nodes: int
    num_processes: int
    dtype: torch.dtype
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        lines = [["", *COLUMNS, "bound", ""]]
        for check in self.checks:
            numbers = [f"{check.worst(column):.2g}" for column in COLUMNS]
            bad = check.first_failure
            lines.append(
                [check.name, *numbers, f"{check.bound:g}", "pass" if bad is None else f"FAIL at step {bad.step}"]
            )
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        how = (
            f"{counted(self.num_nodes, 'node')} in {counted(self.num_processes, 'process', 'processes')}, "
            f"{counted(len(self.checks[0].rows), 'step')}, {self.dtype}"
        )
        findings = [f"{check.name}: {check.finding}" for check in self.checks if check.finding is not None]
        return "\n".join([self.strategy, how, *table, *findings])


def verify(
    strategy: Strategy,
    model: nn.Module,
    dataset: Any,
    num_nodes: int = 4,
    num_processes: int = 2,
    steps: int = 20,
    dtype: torch.dtype = torch.float64,
    *,
    batch_size: int = 4,
    seed: int = 42,
    engine: str = "loop",
    timeout_s: float = 120.0,
) -> Report:
    """Train with `strategy` stacked and on W real processes, and compare them after every step, on the CPU.

    "exact": every node by itself, in one thread, and every collective on the tensors of all nodes: no difference at
    all is allowed. "native": as a run is, torch.distributed adds up: 1e-12 is allowed in float64 and 1e-5 in float32,
    relative to the largest value of each tensor. In both, the ledgers must be the same, and the bytes handed to
    torch.distributed, counted where they are, those that the ledger's payload means (`DistributedCollectives`). An
    `AllReduceStrategy` is also compared with `torch.nn.parallel.DistributedDataParallel`.

    Args:
        strategy: any, your own too.
        model: `forward(batch)` returns the mean loss; it is converted to `dtype`, and so are batches.
        dataset: as for `vecgym.Trainer`.
        num_nodes, num_processes: K and W, which divides K.
        steps: to compare.
        dtype: float64 or float32.
        batch_size: examples per node and step.
        seed: of data order, dropout and everything else that is random.
        engine: "loop" keys dropout by the node; "vmap" by the nodes that are computed together, which are others in
            other processes: models with dropout then differ in the native check.
        timeout_s: see `vecgym.runs.multiprocess.run`.

    Returns:
        A `Report`; `report.passed`, and `print(report)`. A check that fails names the first step, tensor and node that
        differ, and the rule of the contract that is most probably broken, see
        `vecgym.guide.writing_a_strategy`: `check.finding`.

    Raises:
        ValueError, TypeError: for arguments that cannot work.
        ProcessError: when the strategy fails, or its processes do not make the same calls of `ctx.comm`; the error says
            which process called what at which step.

    >>> from vecgym.models import Line
    >>> from vecgym.strategy import FedAvgStrategy
    >>> report = verify(FedAvgStrategy("sgd", H=2, lr=0.1), Line(), torch.arange(32.0), steps=4)
    >>> report.passed, [check.name for check in report.checks], report.checks[0].worst("params")
    (True, ['exact', 'native'], 0.0)
    """
    check_strategy(strategy, num_nodes)
    settings = {"num_nodes": num_nodes, "batch_size": batch_size, "seed": seed, "timeout_s": timeout_s}
    num_nodes, batch_size, seed, timeout_s = checked(settings).values()
    num_processes, steps = integer("num_processes", num_processes), integer("steps", steps)
    check_settings(engine, None, None)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {kind_of(model)}; give an nn.Module whose forward(batch) returns a loss.")
    hooks.check_hooks(model)
    hooks.check_pickled(model, "verify the strategy with a model that has none")
    if not isinstance(dtype, torch.dtype) or dtype not in BOUNDS:
        raise ValueError(f"dtype={dtype} has no bound; allowed: {', '.join(map(str, BOUNDS))}.")
    check_divides(num_processes, num_nodes)
    strategy.check(num_nodes, steps)
    per_process = num_nodes // num_processes
    [checks, *_] = multiprocess.run(
        _verify_in_process,
        num_processes,
        (Case(strategy, model, dataset, num_nodes, steps, batch_size, seed, engine), dtype),
        labels=lambda rank: f"nodes {rank * per_process}-{(rank + 1) * per_process - 1}",
        timeout_s=timeout_s,
    )
    return Report(repr(strategy), num_nodes, num_processes, dtype, tuple(checks))


def _verify_in_process(link: multiprocess.Link, given: Case, dtype: torch.dtype) -> list[Check]:
    torch.set_num_threads(1)
    wire = Wire(watch=links.watch, announce=links.announce)
    given = given._replace(model=copy.deepcopy(given.model).to("cpu", dtype))
    [exact], [native] = (compare(given, [wire], exact=exact) for exact in (True, False))
    if exact.passed and native.finding is not None and native.finding.kind in KINDS:
        native = replace(native, finding=native.finding._replace(cause=ORDER_OF_SUMS, rule=""))
    checks = [exact, native]
    if isinstance(given.strategy, AllReduceStrategy):
        checks.append(Check("DDP", BOUNDS[dtype], compare_with_ddp(given, wire)))
    return checks
