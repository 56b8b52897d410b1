"""Train one strategy in two forms, in step: all nodes in one process, and a part of them in each of several."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.collectives.distributed import DistributedCollectives
from vecgym.collectives.ledger import Entry
from vecgym.collectives.wire import Disagreement, Wire
from vecgym.core import tree
from vecgym.core.rng import GlobalStates
from vecgym.data import Batches
from vecgym.engine import Engine
from vecgym.engine.simulation import Simulation, State
from vecgym.runs.accounting import AccountedCollectives
from vecgym.runs.diagnosis import KINDS, RULES, Evidence, Finding, Gap, attributes, diagnose, evidence, gaps
from vecgym.runs.present import own_batch, presence_of, simulation_of
from vecgym.strategy import Context, Strategy

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}  # relative, if torch.distributed adds up


class Difference(NamedTuple):
    """The largest differences between the two forms after one step; inf where their shapes or names differ.

    Each is relative to the largest value of its tensor; the state of a strategy, to that of the parameter it belongs
    to, where this is larger (`vecgym.runs.diagnosis.gaps`).

    >>> difference = Difference(3, 1e-16, 0, losses=2e-16, optimizer=0, strategy=0, ledger_bytes=0, handed_bytes=0)
    >>> difference.largest, difference.within(1e-12)
    (2e-16, True)
    """

    step: int
    params: float
    buffers: float
    losses: float
    optimizer: float
    strategy: float
    ledger_bytes: float  # between the two ledgers
    handed_bytes: int  # between what the ledger implies and what torch.distributed was handed

    @property
    def largest(self) -> float:
        """The largest of the numbers, without the bytes."""
        return max(self.params, self.buffers, self.losses, self.optimizer, self.strategy)

    def within(self, bound: float) -> bool:
        """Whether all numbers are within the bound, and both counts of bytes agree: nan never is."""
        return self.largest <= bound and self.ledger_bytes == self.handed_bytes == 0


@dataclass(frozen=True)
class Check:
    """One comparison: its name and bound, a `Difference` for each step, and a `finding` if it fails.

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
        """Whether every step is within the bound, and all bytes agree."""
        return self.first_failure is None

    @property
    def first_failure(self) -> Difference | None:
        """The first step that is not within the bound."""
        return next((row for row in self.rows if not row.within(self.bound)), None)

    def worst(self, column: str) -> float:
        """The largest difference of one column over all steps."""
        return max(getattr(row, column) for row in self.rows)


class Case(NamedTuple):
    """The run that is made in both forms."""

    strategy: Strategy
    model: nn.Module
    dataset: Any
    num_nodes: int
    steps: int
    batch_size: int = 4
    seed: int = 42
    engine: str = "loop"
    num_examples: tuple[int, ...] | None = None
    compile: bool = False
    availability: Any = None
    compute: Any = None

    def simulation(self, comm: Collectives, exact: bool) -> Simulation:
        """Return the training of the nodes of `comm`."""
        chunk_size = 1 if exact and self.engine == "vmap" else None
        threads = None if self.compile else 1
        engine = Engine(
            self.model, engine=self.engine, chunk_size=chunk_size, node_threads=threads, compile=self.compile
        )
        # Every process inspects the model on the same batch of node 0, with the same result.
        with torch.enable_grad():
            engine.prepare(self.converted(self.batches([0]).batch(0)))
        num_examples = self.num_examples or tuple(self.batches().shard_sizes)
        presence = presence_of(self, self.steps, num_examples)
        return simulation_of(presence, comm)(
            self.model, self.strategy, comm, engine=engine, max_steps=self.steps, seed=self.seed,
            num_examples=num_examples, exact=exact, presence=presence,
        )  # fmt: skip

    def batches(self, node_ids: Any = None) -> Batches:
        """Return the batches of these nodes; None: of all."""
        return Batches(self.dataset, self.num_nodes, self.batch_size, seed=self.seed, node_ids=node_ids)

    def converted(self, batch: Any) -> Any:
        """Return a batch in the model's precision."""
        dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        return tree.map_leaves(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


def compare(case: Case, wires: Sequence[Wire], *, exact: bool) -> list[Check]:
    """Step the stacked form and, in the processes of each wire, the distributed form; return a `Check` for each wire.

    Every process of every wire calls this, and must belong to all the wires that it gives.
    """
    before = attributes(case.strategy)
    stacked = Form(case, StackedCollectives(case.num_nodes), exact)
    forms = [Form(case, AccountedCollectives(case.num_nodes, wire, exact=exact), exact) for wire in wires]
    rounding = BOUNDS[next(iter(case.model.parameters())).dtype]
    comparisons = [_Comparison(form, 0.0 if exact else rounding) for form in forms]
    with torch.enable_grad():
        for step in range(case.steps):
            stacked.step(step)
            for form, comparison in zip(forms, comparisons):
                form.step_as_part(step)
                comparison.add(step, stacked)
    checks = []
    for comparison, wire in zip(comparisons, wires):
        seen = comparison.evidence
        if seen is not None:
            after = attributes(case.strategy)
            changed = tuple(name for name in after if before.get(name) != after[name])
            seen = seen._replace(changed=changed, random=_draws(case, exact, seen.step))
        wire.agree(f"nothing more, after {case.steps} steps")
        everyone = wire.all_gather_object(([tuple(row) for row in comparison.rows], seen))
        finding = diagnose([seen for _, seen in everyone], exact, rounding)
        name, rows = "exact" if exact else "native", _over_processes([rows for rows, _ in everyone])
        checks.append(Check(name, comparison.bound, rows, finding))
    for form in (stacked, *forms):
        form.simulation.close()
    return checks


def compare_compiled(case: Case) -> Check:
    """Step the stacked form by `vmap`, and compiled, in this process; raise a ValueError for what is not compiled."""
    compiled = Form(case._replace(engine="auto", compile=True), StackedCollectives(case.num_nodes), exact=False)
    if (plan := compiled.simulation.engine.plan).engine != "compiled":
        raise ValueError(f"compile=True: the model cannot be compiled, as the warning says; it runs as {plan}.")
    plain = Form(case._replace(engine="vmap"), StackedCollectives(case.num_nodes), exact=False)
    rows = []
    with torch.enable_grad():
        for step in range(case.steps):
            plain.step(step)
            compiled.step(step)
            largest = _largest(list(_all_gaps(plain, compiled)))
            bytes_apart = abs(plain.comm.ledger.total_bytes - compiled.comm.ledger.total_bytes)
            rows.append(Difference(step, **largest, ledger_bytes=bytes_apart, handed_bytes=0))
    for form in (plain, compiled):
        form.simulation.close()
    return Check("compiled", BOUNDS[next(iter(case.model.parameters())).dtype], tuple(rows))


class Form:
    """One of the two forms, and its state so far."""

    def __init__(self, case: Case, comm: Any, exact: bool) -> None:
        self.case = case
        self.comm = comm
        self.simulation, self.batches = case.simulation(comm, exact), case.batches(comm.node_ids)
        self.state: State = self.simulation.init()
        self.losses = torch.empty(0)

    def step(self, step: int) -> None:
        presence, limits = self.simulation.presence, None
        if presence is None:
            batch = self.batches.batch(step)
        else:
            batch, limits = own_batch(self.batches, presence, self.state, self.simulation.beside)
        self.state, metrics = self.simulation.step(self.state, self.case.converted(batch), limits=limits)
        self.comm.ledger.add(step, metrics.transfers)
        self.losses = metrics.losses

    def step_as_part(self, step: int) -> None:
        """Take a step in one of several processes, after the stacked form has taken it."""
        try:
            self.step(step)
        except Disagreement:
            raise
        except (RuntimeError, IndexError) as error:
            raise RuntimeError(
                f"step {step}: the strategy works with all {self.case.num_nodes} nodes in one process and fails with "
                f"the {self.comm.num_local} of this one: {error}. The contract: {RULES['own']}; {RULES['comm']}."
            ) from error


class _Comparison:
    """Compare a distributed form with the stacked one: a row for each step, and the first difference."""

    def __init__(self, form: Form, bound: float) -> None:
        self.form = form
        self.bound = bound
        self.rows: list[Difference] = []
        self.evidence: Evidence | None = None

    def add(self, step: int, stacked: Form) -> None:
        form, comm = self.form, self.form.comm
        all_gaps = list(_all_gaps(stacked, form))
        largest = _largest(all_gaps)
        entries, entries_here = ([e for e in f.comm.ledger if e.step == step] for f in (stacked, form))
        ledger = 0.0 if entries == entries_here else math.inf
        ledger += abs(stacked.comm.ledger.total_bytes - comm.ledger.total_bytes)
        handed = comm.wire.handed_bytes - comm.handed_before - comm.expected_bytes
        row = Difference(step, **largest, ledger_bytes=ledger, handed_bytes=handed)
        self.rows.append(row)
        if self.evidence is None and not row.within(self.bound):
            calls = ""
            if entries != entries_here:
                calls = f"{_calls(entries)} with all in one, {_calls(entries_here)} with a part of them"
            self.evidence = evidence(step, all_gaps, self.bound, calls, comm)


def _all_gaps(stacked: Form, form: Form) -> Iterator[Gap]:
    """Yield the gaps of everything that a step computes."""
    a, b = ({**vars(f.state), "losses": f.losses} for f in (stacked, form))
    sizes = {name: float(p.nan_to_num().abs().max()) for name, p in stacked.state.params.items() if p.numel()}
    for kind in KINDS:
        yield from gaps(kind, a[kind], b[kind], form.comm, sizes)


def _largest(all_gaps: Sequence[Gap]) -> dict[str, float]:
    """Return the largest gap of each kind."""
    return {kind: max((gap.largest for gap in all_gaps if gap.kind == kind), default=0.0) for kind in KINDS}


def _calls(entries: Sequence[Entry]) -> str:
    return ", ".join(f"{e.operation} of {e.payload_bytes} bytes" for e in entries) or "none"


def _draws(case: Case, exact: bool, last_step: int) -> bool:
    """Whether stacked runs depend on the states of the global generators."""
    before = GlobalStates.now()
    forms = []
    for seed in (1, 2):
        GlobalStates.seeded(seed).restore()
        forms.append(Form(case, StackedCollectives(case.num_nodes), exact))
        with torch.enable_grad():
            for step in range(last_step + 1):
                forms[-1].step(step)
        forms[-1].simulation.close()
    before.restore()
    return any(gap.largest > 0 for gap in _all_gaps(*forms))


def _over_processes(everyone: Sequence[Sequence[tuple[Any, ...]]]) -> tuple[Difference, ...]:
    """Return the largest differences of all processes; excess bytes of one do not offset missing ones of another."""
    return tuple(
        Difference(int(values[0][0]), *[max(column, key=abs) for column in list(zip(*values))[1:]])
        for values in zip(*everyone)
    )


# ----------------------------------------------------------------------------- against DistributedDataParallel


def compare_with_ddp(case: Case, wire: Wire) -> tuple[Difference, ...]:
    """Compare AllReduce's parameters with those of torch's DistributedDataParallel: same model, data and optimizer.

    A process of DDP trains on the batches of its L nodes, joined. Without dropout and batch norm that is equivalent.
    """
    form = Form(case, DistributedCollectives(case.num_nodes, wire), exact=False)
    strategy = case.strategy
    facts = form.simulation.engine.facts
    unused = facts is not None and bool(facts.unused)
    ddp = nn.parallel.DistributedDataParallel(
        copy.deepcopy(case.model), process_group=wire.group, broadcast_buffers=False, find_unused_parameters=unused
    )
    optimizer = strategy.inner_optim.build(ddp.module)
    base_lr = optimizer.defaults["lr"]
    rows = []
    with torch.enable_grad():
        for step in range(case.steps):
            form.step(step)
            lr = float(strategy.lr(Context(form.comm, step=step, max_steps=case.steps, seed=case.seed)))
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("given_lr", group["lr"]) * (lr / base_lr)
            optimizer.zero_grad()
            batch = case.converted(form.batches.batch(step))
            ddp(tree.map_leaves(lambda x: x.flatten(0, 1), batch)).backward()
            if strategy.max_norm is not None:
                nn.utils.clip_grad_norm_(ddp.module.parameters(), float(strategy.max_norm))
            optimizer.step()
            trained = {name: p.detach()[None] for name, p in ddp.module.named_parameters() if p.requires_grad}
            trained = {name: trained[name] for name in form.state.params}
            gap = max(gap.largest for gap in gaps("params", trained, form.state.params, form.comm, {}))
            rows.append(Difference(step, gap, 0.0, 0.0, 0.0, 0.0, 0.0, 0))
    form.simulation.close()
    return _over_processes(wire.all_gather_object([tuple(row) for row in rows]))
