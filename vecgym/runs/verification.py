"""Equivalence as a product: a strategy gives the same numbers stacked in one process and on real processes.

`verify(strategy, model, dataset)` trains both ways, in step, with the same data and seeds, and reports the largest
difference after every step, of parameters, buffers, losses, optimizer state, strategy state and bytes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.collectives.base import T, payload_bytes
from vecgym.collectives.distributed import (
    Disagreement,
    DistributedCollectives,
    Wire,
    check_divides,
)
from vecgym.collectives.ledger import Entry
from vecgym.collectives.topology import Groups, Mixing
from vecgym.compress.codecs import TopK
from vecgym.core import tree
from vecgym.core.check import integer, kind_of
from vecgym.core.rng import GlobalStates
from vecgym.data import Batches
from vecgym.engine import Engine, check_settings, hooks
from vecgym.engine.simulation import Simulation, State
from vecgym.records.rows import counted
from vecgym.runs import links, multiprocess
from vecgym.runs.diagnosis import KINDS, RULES, Evidence, Finding, Gap, attributes, diagnose, evidence, gaps
from vecgym.runs.options import check_strategy, checked
from vecgym.strategy import (
    AllReduceStrategy,
    Context,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    GossipStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
)

__all__ = ["STRATEGIES", "Check", "Difference", "Finding", "Report", "verify"]

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}  # relative, where torch.distributed adds up
COLUMNS = ("params", "buffers", "losses", "optimizer", "strategy", "ledger_bytes", "handed_bytes")
ORDER_OF_SUMS = (
    "The exact check passes, so the strategy is the same; torch.distributed adds up in another order, and a value that "
    "is rounded, ranked or compared can fall to the other side by that. float64 makes it rare."
)

# What `vecgym verify` knows by name: every way to communicate that the strategies have.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "allreduce": lambda: AllReduceStrategy("adamw", lr=1e-2, max_norm=1.0),
    "fedavg": lambda: FedAvgStrategy("adamw", H=3, lr=1e-2),
    "fedavg-islands": lambda: FedAvgStrategy("adamw", H=3, island_size=2, lr=1e-2),
    "fedavg-participation": lambda: FedAvgStrategy("sgd", H=3, participation=0.5, lr=0.1),
    "fedavg-server": lambda: FedAvgStrategy("sgd", H=3, server_optim="adam", server_lr=0.01, lr=0.1),
    "diloco": lambda: DiLoCoStrategy("adamw", H=3, lr=1e-2),
    "diloco-topk": lambda: DiLoCoStrategy("adamw", H=3, lr=1e-2, compression=TopK(0.1)),
    "demo": lambda: DeMoStrategy(compression_topk=8, compression_chunk=16, lr=1e-3),
    "sparta": lambda: SPARTAStrategy(0.1, "adamw", lr=1e-2),
    "sparta-diloco": lambda: SPARTADiLoCoStrategy(0.1, 2, 3, "adamw", lr=1e-2),
    "gossip": lambda: GossipStrategy("ring", inner_optim="adamw", lr=1e-2),
    "gossip-matching": lambda: GossipStrategy("random_matching", inner_optim="adamw", lr=1e-2),
}


class Difference(NamedTuple):
    """After one step, the largest differences between the two forms; inf where their shapes or names differ.

    Each relative to the largest value of its tensor; what a strategy keeps, to that of the parameter it belongs to
    where this is larger (`vecgym.runs.diagnosis.gaps`).

    >>> Difference(3, 1e-16, 0, losses=2e-16, optimizer=0, strategy=0, ledger_bytes=0, handed_bytes=0).largest
    2e-16
    """

    step: int
    params: float
    buffers: float
    losses: float
    optimizer: float
    strategy: float
    ledger_bytes: float  # between the two ledgers
    handed_bytes: int  # between what the ledger's payload says and what torch.distributed was handed, all processes

    @property
    def largest(self) -> float:
        """Of the numbers, without the bytes."""
        return max(self.params, self.buffers, self.losses, self.optimizer, self.strategy)


@dataclass(frozen=True)
class Check:
    """One comparison: `name`, its `bound`, a `Difference` for each step, and a `finding` where it fails.

    >>> equal = Difference(0, 0, 0, 0, 0, 0, ledger_bytes=0, handed_bytes=0)
    >>> check = Check("native", bound=1e-12, rows=(equal, equal._replace(step=1, params=1e-3)))
    >>> check.passed, check.first_failure.step, check.worst("params"), check.worst("losses")
    (False, 1, 0.001, 0)
    """

    name: str
    bound: float
    rows: tuple[Difference, ...]
    finding: Finding | None = None

    @property
    def passed(self) -> bool:
        """Whether every step is within the bound, and no byte is counted otherwise."""
        return all(row.largest <= self.bound and row.ledger_bytes == row.handed_bytes == 0 for row in self.rows)

    @property
    def first_failure(self) -> Difference | None:
        """The first step that is not within the bound."""
        bad = (r for r in self.rows if not r.largest <= self.bound or r.ledger_bytes != 0 or r.handed_bytes != 0)
        return next(bad, None)

    def worst(self, column: str) -> float:
        """The largest difference of one column over all steps."""
        return max(getattr(row, column) for row in self.rows)


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

    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
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


# --------------------------------------------------------------------------------------- in every process alike


class Case(NamedTuple):
    """What is trained in both forms."""

    strategy: Strategy
    model: nn.Module
    dataset: Any
    num_nodes: int
    steps: int
    batch_size: int = 4
    seed: int = 42
    engine: str = "loop"
    num_examples: tuple[int, ...] | None = None

    def simulation(self, comm: Collectives, exact: bool) -> tuple[Simulation, Batches]:
        """The training of the nodes of `comm`, and their batches."""
        batches = Batches(self.dataset, self.num_nodes, self.batch_size, seed=self.seed, node_ids=comm.node_ids)
        chunk_size = 1 if exact and self.engine == "vmap" else None
        engine = Engine(self.model, engine=self.engine, chunk_size=chunk_size, node_threads=1)
        # Every process looks at the same batch of node 0, and so comes to the same view of the model.
        probe = Batches(self.dataset, self.num_nodes, self.batch_size, seed=self.seed, node_ids=[0])
        with torch.enable_grad():
            engine.prepare(self.converted(probe.batch(0)))
        simulation = Simulation(
            self.model,
            self.strategy,
            comm,
            engine=engine,
            max_steps=self.steps,
            seed=self.seed,
            num_examples=self.num_examples or self._num_examples(),
            exact=exact,
        )
        return simulation, batches

    def converted(self, batch: Any) -> Any:
        """A batch in the model's precision."""
        dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        return tree.map_leaves(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)

    def _num_examples(self) -> tuple[int, ...]:
        return tuple(Batches(self.dataset, self.num_nodes, self.batch_size, seed=self.seed).shard_sizes)


def compare(given: Case, wires: Sequence[Wire], *, exact: bool) -> list[Check]:
    """Step the stacked form and, in the processes of each wire, the distributed form; a `Check` for each wire.

    Every process of every wire calls it; this process must belong to all wires that it gives.
    """
    before = attributes(given.strategy)
    stacked = _Form(given, StackedCollectives(given.num_nodes), exact)
    forms = [_Form(given, _Accounted(given.num_nodes, wire, exact=exact), exact) for wire in wires]
    rounding = BOUNDS[next(iter(given.model.parameters())).dtype]
    comparisons = [_Comparison(form, 0.0 if exact else rounding) for form in forms]
    with torch.enable_grad():
        for step in range(given.steps):
            stacked.step(step)
            for form, comparison in zip(forms, comparisons):
                form.step_as_part(step)
                comparison.add(step, stacked)
    checks = []
    for comparison, wire in zip(comparisons, wires):
        seen = comparison.evidence
        if seen is not None:
            after = attributes(given.strategy)
            changed = tuple(name for name in after if before.get(name) != after[name])
            seen = seen._replace(changed=changed, random=_draws(given, exact, seen.step))
        wire.agree(f"nothing more, after {given.steps} steps")
        everyone = wire.all_gather_object(([tuple(row) for row in comparison.rows], seen))
        finding = diagnose([seen for _, seen in everyone], exact, rounding)
        name, rows = "exact" if exact else "native", _over_processes([rows for rows, _ in everyone])
        checks.append(Check(name, comparison.bound, rows, finding))
    for form in (stacked, *forms):
        form.simulation.engine.close()
    return checks


class _Form:
    """One of the two forms, as far as it has got."""

    def __init__(self, given: Case, comm: Any, exact: bool) -> None:
        self.given = given
        self.comm = comm
        self.simulation, self.batches = given.simulation(comm, exact)
        self.state: State = self.simulation.init()
        self.losses = torch.empty(0)

    def step(self, step: int) -> None:
        batch = self.given.converted(self.batches.batch(step))
        self.state, metrics = self.simulation.step(self.state, batch)
        self.comm.ledger.add(step, metrics.transfers)
        self.losses = metrics.losses

    def step_as_part(self, step: int) -> None:
        """`step` in one of several processes, after the stacked form has made it."""
        try:
            self.step(step)
        except Disagreement:
            raise
        except (RuntimeError, IndexError) as error:
            raise RuntimeError(
                f"step {step}: the strategy works with all {self.given.num_nodes} nodes in one process and fails with "
                f"the {self.comm.num_local} of this one: {error}. The contract: {RULES['own']}; {RULES['comm']}."
            ) from error


class _Comparison:
    """A distributed form beside the stacked one: a row for each step, and what differs first."""

    def __init__(self, form: _Form, bound: float) -> None:
        self.form = form
        self.bound = bound
        self.rows: list[Difference] = []
        self.evidence: Evidence | None = None

    def add(self, step: int, stacked: _Form) -> None:
        form, comm = self.form, self.form.comm
        found = list(_all_gaps(stacked, form))
        largest = {kind: max((gap.largest for gap in found if gap.kind == kind), default=0.0) for kind in KINDS}
        entries, here = ([e for e in f.comm.ledger if e.step == step] for f in (stacked, form))
        ledger = 0.0 if entries == here else math.inf
        ledger += abs(stacked.comm.ledger.total_bytes - comm.ledger.total_bytes)
        handed = comm.wire.handed_bytes - comm.handed_before - comm.expected_bytes
        row = Difference(step, **largest, ledger_bytes=ledger, handed_bytes=handed)
        self.rows.append(row)
        if self.evidence is None and not (row.largest <= self.bound and ledger == handed == 0):
            calls = "" if entries == here else f"{_calls(entries)} with all in one, {_calls(here)} with a part of them"
            self.evidence = evidence(step, found, self.bound, calls, comm)


def _all_gaps(stacked: _Form, form: _Form) -> Iterator[Gap]:
    """Of everything that a step computes."""
    a, b = ({**vars(f.state), "losses": f.losses} for f in (stacked, form))
    sizes = {name: float(p.nan_to_num().abs().max()) for name, p in stacked.state.params.items() if p.numel()}
    for kind in KINDS:
        yield from gaps(kind, a[kind], b[kind], form.comm, sizes)


def _calls(entries: Sequence[Entry]) -> str:
    return ", ".join(f"{e.operation} of {e.payload_bytes} bytes" for e in entries) or "none"


def _draws(given: Case, exact: bool, last_step: int) -> bool:
    """Whether stacked runs differ when the global generators do."""
    before = GlobalStates.now()
    forms = []
    for seed in (1, 2):
        GlobalStates.seeded(seed).restore()
        forms.append(_Form(given, StackedCollectives(given.num_nodes), exact))
        with torch.enable_grad():
            for step in range(last_step + 1):
                forms[-1].step(step)
        forms[-1].simulation.engine.close()
    before.restore()
    return any(gap.largest > 0 for gap in _all_gaps(*forms))


def _over_processes(everyone: Sequence[Sequence[tuple[Any, ...]]]) -> tuple[Difference, ...]:
    """The largest of all processes; excess bytes of one do not make up for missing ones of another."""
    return tuple(
        Difference(int(values[0][0]), *[max(column, key=abs) for column in list(zip(*values))[1:]])
        for values in zip(*everyone)
    )


class _Accounted(DistributedCollectives):
    """Says, from payloads and partitions alone, how many bytes this process must hand to torch.distributed."""

    def __init__(self, num_nodes: int, wire: Wire, *, exact: bool) -> None:
        super().__init__(num_nodes, wire, exact=exact)
        self.expected_bytes = 0
        self.handed_before = wire.handed_bytes

    def _say(self, text: str) -> None:
        """Every process must be about to exchange the same: torch.distributed would wait, or mix it up, or abort."""
        super()._say(text)
        self.wire.agree(text)

    def _expect(self, x: Any, times: int, wide: bool = False) -> None:
        """The payload of what is not the same on every node, so often; with `exact`, that of each node here."""
        tensors = [x] if isinstance(x, Tensor) else list(x.values())
        own = {str(i): y for i, y in enumerate(tensors) if wide or not self._same_on_all(y)}
        if self.wire.num_processes > 1:
            self.expected_bytes += payload_bytes(own) * (self.num_local if self.exact else times)

    def _islands(self, groups: Groups | None) -> int:
        """The groups that have members here and elsewhere."""
        if groups is None:
            return 1
        here = [[self._is_here(int(node)) for node in group] for group in groups]
        return sum(any(members) and not all(members) for members in here)

    def mean(
        self, x: T, groups: Groups | None = None, weights: Sequence[float] | None = None, *, inplace: bool = False
    ) -> T:
        self._expect(x, self._islands(groups), wide=weights is not None)
        return super().mean(x, groups, weights, inplace=inplace)

    def server_mean(self, x: T, participants: Sequence[int], weights: Sequence[float] | None = None) -> T:
        self._expect(x, 1, wide=weights is not None or len(participants) < self.num_nodes)
        return super().server_mean(x, participants, weights)

    def server_sum(self, x: T, participants: Sequence[int], weights: Sequence[float] | None = None) -> T:
        self._expect(x, 1, wide=weights is not None or len(participants) < self.num_nodes)
        return super().server_sum(x, participants, weights)

    def server_gather(self, x: T, participants: Sequence[int] | None = None) -> T:
        self._expect(x, self.num_local)
        return super().server_gather(x, participants)

    def sum(self, x: T, groups: Groups | None = None) -> T:
        self._expect(x, self._islands(groups))
        return super().sum(x, groups)

    def all_gather(self, x: T, *, inplace: bool = False) -> T:
        self._expect(x, self.num_local)
        return super().all_gather(x, inplace=inplace)

    def broadcast(self, x: T, src: int) -> T:
        self._expect(x, int(self._is_here(src)))
        return super().broadcast(x, src)

    def permute(self, x: T, source: Sequence[int] | Tensor) -> T:
        order = torch.as_tensor(source).tolist()
        self._expect(x, sum(self._is_here(j) and not self._is_here(i) for i, j in enumerate(order)))
        return super().permute(x, source)

    def mix(self, x: T, weights: Tensor | Mixing, inplace: bool = False) -> T:
        matrix = weights.weights if isinstance(weights, Mixing) else weights
        takers = {(j, i // self.num_local) for i, j in matrix.nonzero().tolist() if not self._is_here(i)}
        self._expect(x, sum(self._is_here(j) for j, _ in takers))
        return super().mix(x, weights, inplace)


# ----------------------------------------------------------------------------- against DistributedDataParallel


def compare_with_ddp(given: Case, wire: Wire) -> tuple[Difference, ...]:
    """AllReduce's parameters against those of torch's DistributedDataParallel: same model, data and optimizer.

    A process of DDP trains on the batches of its L nodes, joined. Without dropout and batch norm, that is the same.
    """
    form = _Form(given, DistributedCollectives(given.num_nodes, wire), exact=False)
    strategy = given.strategy
    facts = form.simulation.engine.facts
    ddp = nn.parallel.DistributedDataParallel(
        copy.deepcopy(given.model),
        process_group=wire.group,
        broadcast_buffers=False,
        find_unused_parameters=facts is not None and bool(facts.unused),
    )
    optimizer = strategy.inner_optim.build(ddp.module)
    base_lr = optimizer.defaults["lr"]
    rows = []
    with torch.enable_grad():
        for step in range(given.steps):
            form.step(step)
            lr = float(strategy.lr(Context(form.comm, step, given.steps, given.seed)))
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("given_lr", group["lr"]) * (lr / base_lr)
            optimizer.zero_grad()
            batch = given.converted(form.batches.batch(step))
            ddp(tree.map_leaves(lambda x: x.flatten(0, 1), batch)).backward()
            if strategy.max_norm is not None:
                nn.utils.clip_grad_norm_(ddp.module.parameters(), float(strategy.max_norm))
            optimizer.step()
            trained = {name: p.detach()[None] for name, p in ddp.module.named_parameters() if p.requires_grad}
            trained = {name: trained[name] for name in form.state.params}
            gap = max(gap.largest for gap in gaps("params", trained, form.state.params, form.comm, {}))
            rows.append(Difference(step, gap, 0.0, 0.0, 0.0, 0.0, 0.0, 0))
    form.simulation.engine.close()
    return _over_processes(wire.all_gather_object([tuple(row) for row in rows]))
