"""Verify that a strategy gives the same numbers stacked in one process and on real processes.

`verify(strategy, model, dataset)` trains both ways, in step, with the same data and seeds, and reports the largest
difference after every step, of parameters, buffers, losses, optimizer state, strategy state and bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

from vecgym.clock import Compute
from vecgym.collectives.distributed import check_divides
from vecgym.collectives.wire import Wire
from vecgym.core import check
from vecgym.core.options import Options, function_of
from vecgym.engine import hooks
from vecgym.engine.plan import check_engine
from vecgym.records.rows import aligned, counted
from vecgym.runs import multiprocess
from vecgym.runs.lockstep import BOUNDS, Case, Check, Difference, Finding, compare
from vecgym.runs.options import Count, Present, Seconds, Seed, check_strategy
from vecgym.strategy import Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.catalogue import CATALOGUE

__all__ = ["STRATEGIES", "Check", "Difference", "Finding", "Report", "verify"]

COLUMNS = Difference._fields[1:]  # without the step
ORDER_OF_SUMS = "vecgym.guide.processes, on *native*: the exact check passes, so the strategy is the same"

# The strategies that `vecgym verify` knows by name.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    name: partial(row.make, inner_optim="adamw", lr=1e-2, max_norm=1.0) for name, row in CATALOGUE.items()
}


@dataclass(frozen=True)
class Report:
    """The result of `verify`; print it for a table.

    Attributes:
        checks: "exact": the bound is 0; "native": torch.distributed reduces.

    >>> check = Check("exact", bound=0.0, rows=(Difference(0, 0, 0, 0, 0, 0, 0),))
    >>> report = Report("FedAvgStrategy(...)", num_nodes=4, num_processes=2, dtype=torch.float64, checks=(check,))
    >>> report.passed
    True
    >>> print(report)
    FedAvgStrategy(...)
    4 nodes in 2 processes, 1 step, torch.float64
           params  buffers  losses  optimizer  strategy  ledger_bytes  bound
    exact  0       0        0       0          0         0             0      pass
    """

    strategy: str
    num_nodes: int
    num_processes: int
    dtype: torch.dtype
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(each.passed for each in self.checks)

    def __str__(self) -> str:
        lines = [["", *COLUMNS, "bound", ""]]
        for each in self.checks:
            numbers = [f"{each.worst(column):.2g}" for column in COLUMNS]
            bad = each.first_failure
            lines.append([each.name, *numbers, f"{each.bound:g}", f"FAIL at step {bad.step}" if bad else "pass"])
        how = (
            f"{counted(self.num_nodes, 'node')} in {counted(self.num_processes, 'process', 'processes')}, "
            f"{counted(len(self.checks[0].rows), 'step')}, {self.dtype}"
        )
        findings = [f"{each.name}: {each.finding}" for each in self.checks if each.finding is not None]
        return "\n".join([self.strategy, how, *aligned(lines, str.ljust), *findings])


def _precision(name: str, value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype) or value not in BOUNDS:
        raise ValueError(f"{name}={value} has no bound; allowed: {', '.join(map(str, BOUNDS))}.")
    return value


@dataclass(frozen=True)
class VerifyOptions(Options):
    """All that `verify` takes.

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
        availability: who is present in which steps; see `Trainer.fit`.
        compute: how long the nodes compute, for an availability that needs it.
    """

    strategy: Strategy
    model: Annotated[
        nn.Module, partial(check.instance, kind=nn.Module, give="an nn.Module whose forward(batch) returns a loss")
    ]
    dataset: Any
    num_nodes: Count = 4
    num_processes: Count = 2
    steps: Count = 20
    dtype: Annotated[torch.dtype, _precision] = torch.float64
    _: KW_ONLY
    batch_size: Count = 4
    seed: Seed = 42
    engine: Annotated[str, check_engine] = "loop"
    timeout_s: Seconds = 120.0
    availability: Present = None
    compute: Compute | None = None

    def __post_init__(self) -> None:
        check_strategy(self.strategy, self.num_nodes)
        check_synchronous(self.strategy)
        super().__post_init__()
        hooks.check_hooks(self.model)
        hooks.check_pickled(self.model, "verify the strategy with a model that has none")
        check_divides(self.num_processes, self.num_nodes)
        self.strategy.check(self.num_nodes, self.steps)


@function_of(VerifyOptions)
def verify(options: VerifyOptions) -> Report:
    """Train with `strategy` stacked and on W real processes, and compare them after every step, on the CPU.

    "exact": every node by itself, in one thread, and every collective on the tensors of all nodes: no difference at
    all is allowed. "native": torch.distributed adds up, as it does in a run: 1e-12 is allowed in float64 and 1e-5 in
    float32, relative to the largest value of each tensor. In both, the ledgers must be the same.

    Args:
        {arguments}

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
    [checks, *_] = multiprocess.run(
        _verify_in_process,
        options.num_processes,
        (options,),
        num_nodes=options.num_nodes,
        timeout_s=options.timeout_s,
    )
    return Report(repr(options.strategy), options.num_nodes, options.num_processes, options.dtype, tuple(checks))


def _verify_in_process(link: multiprocess.Link, options: VerifyOptions) -> list[Check]:
    torch.set_num_threads(1)
    given = {name: value for name, value in vars(options).items() if name in Case._fields}
    case = Case(**{**given, "model": copy.deepcopy(options.model).to("cpu", options.dtype)})
    wire = Wire(watch=link.beat)
    wire.announce = wire.agree  # where processes call other collectives, torch.distributed would wait, or mix them up
    [exact], [native] = (compare(case, [wire], exact=exact) for exact in (True, False))
    if exact.passed and native.finding is not None:
        native = replace(native, finding=native.finding._replace(rule=ORDER_OF_SUMS))
    return [exact, native]
