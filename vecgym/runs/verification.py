"""Verify that a strategy gives the same numbers in one process, on real processes, and in a stack of a sweep.

`verify(strategy, model, dataset)` trains in these ways, in step, with the same data and seeds, and reports the largest
difference after every step, of parameters, buffers, losses, optimizer state, strategy state and bytes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from vecgym.clock import Compute, dry_run
from vecgym.collectives import Collectives, StackedCollectives
from vecgym.collectives.distributed import DistributedCollectives, check_divides
from vecgym.collectives.ledger import Entry, Ledger
from vecgym.collectives.wire import Disagreement, Wire
from vecgym.core import check, tree
from vecgym.core.check import function_of
from vecgym.core.objects import altered, same
from vecgym.data import Batches
from vecgym.engine import Engine, hooks
from vecgym.engine.contract import check_model
from vecgym.engine.plan import check_engine
from vecgym.records.rows import aligned, counted
from vecgym.runs import multiprocess
from vecgym.runs.options import Count, Modelled, Present, Seconds, Seed, check_strategy, checked_examples, presence_of
from vecgym.simulation import Simulation, State
from vecgym.simulation.simulation import Request, TickRecord
from vecgym.simulation.stack import BatchReader, Stack, groups_of, halved
from vecgym.strategy import Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.catalogue import CATALOGUE
from vecgym.strategy.per_rank import as_strategy
from vecgym.strategy.simulated import simulation_of

Stream = Iterator[tuple[Any, "list[int] | None"]]  # of batches, and how many of the examples are each row's own

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}  # relative, if torch.distributed adds up

# In the order in which a step computes them: the first difference is closest to the cause.
KINDS = ("losses", "buffers", "optimizer", "params", "strategy")

# Rules of the contract, in the words of `vecgym.guide.writing_a_strategy`.
RULES = {
    "comm": "Other nodes only through `comm`",
    "self": "what evolves in the state; nothing is assigned after `__init__`",
    "own": "A setting of each node, `[K]`, through `part.each` or `part.scaled`",
    "random": "Random numbers from `generator(purpose, *ids)`, with the step among the ids",
    "stack": "What a stack requires",
    "seeds": "Seeds share a stack only where nothing is drawn",
    "exact": "With `exact`, work node by node where that changes bits",
}
# The configurations of a stack: a gap -> the rules that they may break.
CONFIGURATIONS: dict[str, Callable[[Any], list[str]]] = {
    "": lambda gap: [RULES["stack"]],
    "with half the numbers": lambda gap: [RULES["stack"]],
    "with another seed": lambda gap: [RULES["seeds"], RULES["stack"]],
}


class Difference(NamedTuple):
    """The largest differences between the two forms after one step; inf where their shapes or names differ.

    Each is relative to the largest value of its tensor; the state of a strategy, to that of the parameter it belongs
    to, if that is larger (`gaps`).

    >>> difference = Difference(3, 1e-16, 0, losses=2e-16, optimizer=0, strategy=0, ledger_bytes=0)
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

    @property
    def largest(self) -> float:
        """The largest of the numbers, without the bytes."""
        return max(self.params, self.buffers, self.losses, self.optimizer, self.strategy)

    def within(self, bound: float) -> bool:
        """Whether all numbers are within the bound, and the ledgers agree: nan never is."""
        return self.largest <= bound and self.ledger_bytes == 0


class Finding(NamedTuple):
    """The first difference, and which rule to read.

    Attributes:
        kind: "losses", "buffers", "optimizer", "params", "strategy" or "ledger".
        tensor: the first that differs; for a ledger, what each form called.
        node: the first whose value differs.
        gap: the relative difference; inf: in name or shape.
        rule: of the contract in `vecgym.guide.writing_a_strategy`, one or several.
        config: of a stack, how the configuration differs from the strategy that was given.

    >>> print(Finding(3, "params", "net.0.weight", node=2, gap=0.25, rule=RULES["comm"]))
    step 3, params net.0.weight of node 2: differs by 0.25. Read: Other nodes only through `comm`.
    """

    step: int
    kind: str
    tensor: str
    node: int
    gap: float
    rule: str
    config: str = ""

    def __str__(self) -> str:
        how = {math.inf: "has another name, shape or count"}.get(self.gap, f"differs by {self.gap:.2g}")
        what = " ".join(filter(None, (self.kind, self.tensor, f"of node {self.node}", self.config)))
        return f"step {self.step}, {what}: {how}. Read: {self.rule}."


@dataclass(frozen=True)
class Check:
    """One comparison: its name and bound, a `Difference` for each step, and a `finding` if it fails.

    >>> equal = Difference(0, 0, 0, 0, 0, 0, ledger_bytes=0)
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
        """Whether every step is within the bound, and the ledgers agree."""
        return self.first_failure is None

    @property
    def first_failure(self) -> Difference | None:
        """The first step that is not within the bound."""
        return next((row for row in self.rows if not row.within(self.bound)), None)

    def worst(self, column: str) -> float:
        """The largest difference of one column over all steps."""
        return max(getattr(row, column) for row in self.rows)


def _precision(name: str, value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype) or value not in BOUNDS:
        raise ValueError(f"{name}={value} has no bound; allowed: {', '.join(map(str, BOUNDS))}.")
    return value


@dataclass(frozen=True)
class VerifyOptions(Modelled):
    """The arguments of `verify`.

    Args:
        strategy: any strategy, including your own.
        model: `forward(batch)` returns the mean loss; it is converted to `dtype`, as are the batches.
        dataset: as for `vecgym.Trainer`.
        num_nodes, num_processes: K and W, which divides K.
        steps: number of steps to compare.
        dtype: float64 or float32.
        batch_size: examples per node and step.
        seed: of data order, dropout and everything else that is random.
        engine: "loop" keys dropout by the node; "vmap" by the nodes that are computed together, which depend on the
            processes: models with dropout then differ in the native check.
        timeout_s: see `vecgym.runs.multiprocess.run`.
        num_examples: of each node, for weights in proportion to them; None: as many as the dataset has.
        availability: which nodes are present in which steps; see `Trainer.fit`.
        compute: how long the nodes compute, for an availability that needs it.
    """

    strategy: Strategy
    model: nn.Module
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
    num_examples: tuple[int, ...] | None = None
    availability: Present = None
    compute: Compute | None = None

    def __post_init__(self) -> None:
        check_strategy(self.strategy, self.num_nodes)
        check_synchronous(self.strategy)
        super().__post_init__()
        self.settle(num_examples=checked_examples(self.num_examples, self.num_nodes))
        check_model(self.model)
        hooks.check_pickled(self.model, "verify the strategy with a model that has none")
        check_divides(self.num_processes, self.num_nodes)
        self.strategy.check(self.num_nodes, self.steps)

    def simulation(self, comm: Collectives, exact: bool) -> Simulation:
        """Return the training of the nodes of `comm`."""
        chunk_size = 1 if exact and self.engine == "vmap" else None
        engine = Engine(self.model, engine=self.engine, chunk_size=chunk_size, node_threads=1)
        # Every process inspects the model on the same batch of node 0, with the same result.
        with torch.enable_grad():
            engine.prepare(self.converted(self.batches([0]).batch(0)), None, self.strategy.mean_gradient, self.steps)
        num_examples = self.num_examples or tuple(self.batches().shard_sizes)
        return simulation_of(
            self.model, self.strategy, comm, engine=engine, max_steps=self.steps, seed=self.seed,
            num_examples=num_examples, exact=exact, presence=presence_of(self, self.steps, num_examples),
            read=self.reading(self.batches(comm.node_ids).read),
        )  # fmt: skip

    def reading(self, read: Callable[[Iterator[Request]], Stream]) -> Callable[[Iterator[Request]], Stream]:
        """Return what reads the same in the precision of the comparison."""
        return lambda requests: ((self.converted(batch), limits) for batch, limits in read(requests))

    def batches(self, node_ids: Any = None) -> Batches:
        """Return the batches of these nodes; None: of all."""
        own = getattr(self.availability, "own_epochs", False)
        return Batches(self.dataset, self.num_nodes, self.batch_size, seed=self.seed, node_ids=node_ids, own_epochs=own)

    def converted(self, batch: Any) -> Any:
        """Return a batch in the precision of the comparison."""
        return tree.map_leaves(lambda x: x.to(self.dtype) if x.is_floating_point() else x, batch)


def compare(options: VerifyOptions, wire: Wire, *, exact: bool) -> Check:
    """Step the stacked form, and the distributed form in the processes of the wire, each of which calls this."""
    stacked = Form(options, StackedCollectives(options.num_nodes), exact)
    part = DistributedForm(options, DistributedCollectives(options.num_nodes, wire, exact=exact), exact)
    rounding = BOUNDS[options.dtype]
    here = Comparison(stacked, part, 0.0 if exact else rounding, partial(rules_of_processes, rounding=rounding))
    with torch.enable_grad():
        for step in range(options.steps):
            stacked.step(step)
            part.step(step)
            here.add(step)
    wire.agree(f"nothing more, after {options.steps} steps")
    each = wire.all_gather_object((here.rows, here.finding))
    for form in (stacked, part):
        form.simulation.close()
    return check_of("exact" if exact else "native", here.bound, each)


def compare_stack(options: VerifyOptions, beat: Callable[[], None] = lambda: None) -> Check:
    """Step three configurations in one stack, as a sweep does, and each by itself.

    The second has half the numbers, and the third another seed: one group of them all, if nothing draws random numbers.

    Args:
        beat: called after each step.
    """
    other = altered(halved(options.strategy), inner=halved(options.strategy.inner))
    each = [options, altered(options, strategy=other), altered(options, seed=options.seed + 1)]
    alone = [Form(one, StackedCollectives(options.num_nodes), exact=False) for one in each]
    stack = StackForm(each, alone)
    comparisons = [
        Comparison(form, InStack(stack, c), BOUNDS[options.dtype], rules_of, config)
        for c, (form, (config, rules_of)) in enumerate(zip(alone, CONFIGURATIONS.items()))
    ]
    with torch.enable_grad():
        for step in range(options.steps):
            for form in (*alone, stack, *(one.found for one in comparisons)):
                form.step(step)
            for one in comparisons:
                one.add(step)
            beat()
    check_steady(options, alone[0].comm.ledger)
    for form in (*alone, stack):
        form.simulation.close()
    return check_of("stack", BOUNDS[options.dtype], [(one.rows, one.finding) for one in comparisons])


def check_steady(options: VerifyOptions, ledger: Ledger) -> None:
    """Raise a ValueError if the strategy is said to send the same always, and has not in the run of this ledger."""
    if options.strategy.repeats_itself and options.availability is None:
        once = dry_run(options.model, options.strategy, options.num_nodes, options.steps, seed=options.seed)
        if list(once) != list(ledger):
            raise ValueError(f"{options.strategy!r} does not always send the same: leave out steady= of its classes.")


def check_of(name: str, bound: float, each: Sequence[tuple[list[Difference], Finding | None]]) -> Check:
    """Return the largest differences of several comparisons, and the first finding."""
    rows, findings = zip(*each)
    return Check(name, bound, tuple(Difference(*map(max, zip(*of_step))) for of_step in zip(*rows)), first_of(findings))


class Form:
    """One of the forms that are compared, and its state so far."""

    how = "with all in one process"
    which: tuple[int, ...] = ()  # the configuration of a stack

    def __init__(self, options: VerifyOptions, comm: Any, exact: bool, simulation: Any = None) -> None:
        self.comm = comm
        self.simulation: Any = options.simulation(comm, exact) if simulation is None else simulation
        self.state: State = self.simulation.init()
        self.losses = torch.empty(0)
        ticks, ahead = itertools.tee(self.simulation.timetable.ticks())
        self._ticks, self._batches = ticks, self.simulation.read(self.simulation.requests(ahead))

    def step(self, step: int) -> TickRecord:
        """Take a step."""
        self.state, row = self.simulation.tick(self.state, next(self._ticks), self._batches)
        self.comm.ledger.add(step, row.transfers)
        self.losses = row.losses
        return row

    @property
    def values(self) -> dict[str, Any]:
        """The results of a step, by kind."""
        state, algorithm = self.state, self.simulation.algorithm
        rest = {n: x for n, x in {**state.shared, **state.own}.items() if n not in ("params", "buffers", "optimizer")}
        if type(algorithm).result is not Strategy.result:
            rest["result"] = self.simulation.result(self.state, *self.which).params
        return {"params": state.params, "buffers": state.buffers, "losses": self.losses,
                "optimizer": state.home["optimizer"], "strategy": rest}  # fmt: skip


class DistributedForm(Form):
    """The form in one of several processes, compared with the stacked one."""

    how = "with a part of them"

    def step(self, step: int) -> TickRecord:
        """Take a step that the stacked form has taken."""
        try:
            return super().step(step)
        except Disagreement:
            raise
        except (RuntimeError, IndexError) as error:
            raise RuntimeError(
                f"step {step}: the strategy works with all {self.comm.num_nodes} nodes in one process but fails with "
                f"the {self.comm.num_local} of this one: {error}. The contract: {RULES['own']}; {RULES['comm']}."
            ) from error


class StackForm(Form):
    """Several configurations in one stack.

    Args:
        each: their options.
        alone: each by itself, of which the first has the engine for all.

    Attributes:
        order: the configurations in the order of the rows.
    """

    def __init__(self, each: Sequence[VerifyOptions], alone: Sequence[Form]) -> None:
        options, comm = each[0], StackedCollectives(each[0].num_nodes)
        strategies = [as_strategy(one.strategy, one.model) for one in each]  # one for a rank has what evolves in copies
        self.order, groups = groups_of(strategies, [form.simulation.run for form in alone])
        read = BatchReader([each[c].batches() for c in self.order], range(len(each)), options.num_nodes)
        stack = Stack(alone[0].simulation.engine, groups, comm, options.reading(read))
        super().__init__(options, comm, exact=False, simulation=stack)

    def step(self, step: int) -> TickRecord:
        """Take a step that each configuration has taken by itself."""
        try:
            self.row = super().step(step)
        except Exception as error:
            raise RuntimeError(
                f"step {step}: the strategy works by itself but fails in a stack with two others, as in a sweep: "
                f"{str(error).rstrip('.')}. The contract: {RULES['stack']}. Or leave out batched= of its class: then "
                "its configurations are no group."
            ) from error
        return self.row


class InStack(Form):
    """One configuration of a stack."""

    how = "in a stack"

    def __init__(self, stack: StackForm, config: int) -> None:
        self.stack, self.place, self.comm = stack, stack.order.index(config), StackedCollectives(stack.comm.num_nodes)
        self.simulation, self.which = stack.simulation, (self.place,)

    def step(self, step: int) -> TickRecord:
        """Take what the stack has made of this configuration in a step."""
        stack, K = self.stack, self.comm.num_nodes
        self.state = self.simulation.alone(stack.state, self.place)
        self.losses = stack.losses[self.place * K :][:K]
        self.comm.ledger.add(step, stack.row.sent_by(self.simulation.group_with(self.place)))
        return stack.row


class Comparison:
    """The differences of a form from the one that it should equal.

    Args:
        expected, found: both have taken the same step when it is added.
        bound: for all kinds of values.
        rules_of: a gap -> the rules of the contract that may be broken.
        config: which configuration it is, for a finding.

    Attributes:
        rows: the differences after each step.
        finding: the first of them that is not within the bound.
    """

    def __init__(
        self, expected: Form, found: Form, bound: float, rules_of: Callable[[Gap], Sequence[str]], config: str = ""
    ) -> None:
        self.expected, self.found, self.bound, self.rules_of, self.config = expected, found, bound, rules_of, config
        self.rows: list[Difference] = []
        self.finding: Finding | None = None

    def add(self, step: int) -> None:
        """Add the differences after a step."""
        forms, comm = (self.expected, self.found), self.found.comm
        a, b = (form.values for form in forms)
        sizes = {name: float(p.nan_to_num().abs().max()) for name, p in a["params"].items() if p.numel()}
        all_gaps = [gap for kind in KINDS for gap in gaps(kind, a[kind], b[kind], comm, sizes)]
        largest = {kind: max((gap.largest for gap in all_gaps if gap.kind == kind), default=0.0) for kind in KINDS}
        calls, calls_here = ([entry for entry in form.comm.ledger if entry.step == step] for form in forms)
        bytes_apart = abs(self.expected.comm.ledger.total_bytes - comm.ledger.total_bytes)
        row = Difference(step, **largest, ledger_bytes=bytes_apart if calls == calls_here else math.inf)
        self.rows.append(row)
        if self.finding is None and not row.within(self.bound):
            text = f"{_calls(calls)} {self.expected.how}, {_calls(calls_here)} {self.found.how},"
            all_gaps.append(Gap("ledger", text, DIFFERENT))
            gap = next(gap for gap in all_gaps if not gap.largest <= self.bound)
            nodes = comm.node_ids.tolist()
            node = next((node for node, x in zip(nodes, gap.rows.tolist()) if not x <= self.bound), nodes[0])
            rules = "; ".join(self.rules_of(gap))
            self.finding = Finding(step, gap.kind, gap.tensor, node, gap.largest, rules, self.config)


def rules_of_processes(gap: Gap, rounding: float) -> list[str]:
    """Return the rules that a strategy may break which differs on processes."""
    if gap.kind == "ledger":
        return [RULES["comm"]]
    if gap.largest == math.inf:
        return [RULES["own"], RULES["comm"]]
    if gap.largest <= rounding:  # in exact mode
        return [RULES["exact"]]
    return [RULES["comm"], RULES["random"], RULES["self"]]


def first_of(findings: Sequence[Finding | None]) -> Finding | None:
    """Return the finding of the first step, then of what a step computes first, then of the first node."""
    order = (*KINDS, "ledger")
    failures = [finding for finding in findings if finding is not None]
    return min(failures, key=lambda f: (f.step, order.index(f.kind), f.node), default=None)


class Gap(NamedTuple):
    """The distance of one tensor in a process from that of the stacked form.

    >>> Gap("params", "weight", torch.tensor([0.0, 0.3])).largest
    0.30000001192092896
    """

    kind: str
    tensor: str
    rows: Tensor  # of each node here, relative, or `[1]`; inf: names or shapes differ

    @property
    def largest(self) -> float:
        """inf where names or shapes differ."""
        return float(self.rows.max())


DIFFERENT = torch.tensor([math.inf])  # rows of a gap in names, shapes or calls


def gaps(kind: str, a: Any, b: Any, comm: Collectives, sizes: Mapping[str, float]) -> Iterator[Gap]:
    """Yield the gaps between nested values of all nodes and those of the nodes here, relative to their largest values.

    The state of a strategy is made of parameters, often as a difference of two that are nearly equal (a residual, a
    movement). However small it is, it has their rounding errors. So its gap is relative to the largest value of the
    parameter of the same name, or else of all parameters, if that is larger.

    Args:
        sizes: the largest value of each parameter.
    """
    everywhere, here = (
        {
            path: torch.as_tensor(x) if check.is_number(x) else x
            for path, x in tree.flatten(values)
            if not isinstance(x, dict)  # without any leaf
        }
        for values in (a, b)
    )
    for path in {**everywhere, **here}:
        x, y = everywhere.get(path), here.get(path)
        there = y if x is None else x
        if kind == "optimizer" and isinstance(there, Tensor):  # a parameter that has not had a gradient has no state
            x, y = (torch.zeros_like(there[:1]) if z is None else z for z in (x, y))
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            least = sizes.get(path[-1][1], max(sizes.values(), default=0.0)) if kind == "strategy" else 0.0
            rows = _distances(x, y, comm, least)
        else:
            rows = torch.zeros(1) if same(x, y) else DIFFERENT
        yield Gap(kind, ".".join(str(key) for _, key in path), rows)


def _distances(a: Tensor, b: Tensor, comm: Collectives, least: float) -> Tensor:
    """Return the distance of each node here, relative to the largest value of all, or `least` if that is larger."""
    a, b = torch.atleast_1d(a, b)
    if len(a) == comm.num_nodes:
        a = a[comm.node_ids]
    if a.shape[1:] != b.shape[1:] or not {len(a), len(b)} <= {1, len(comm.node_ids)}:
        return DIFFERENT
    x, y = torch.broadcast_tensors(a.detach().double(), b.detach().double())
    if x.numel() == 0:
        return torch.zeros(1)
    distance = torch.where(x.isnan() & y.isnan(), 0.0, (x - y).abs()).nan_to_num(nan=math.inf)
    distance = distance.reshape(len(x), -1).amax(1)
    scale = max(float(x.nan_to_num().abs().max()), least)
    return distance / scale if scale > 0 else distance


def _calls(entries: Sequence[Entry]) -> str:
    return ", ".join(f"{e.operation} of {e.payload_bytes} bytes" for e in entries) or "nothing"


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
        checks: "exact": the bound is 0; "native": torch.distributed reduces; "stack": several configurations together.

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
        return all(one.passed for one in self.checks)

    def __str__(self) -> str:
        lines = [["", *COLUMNS, "bound", ""]]
        for one in self.checks:
            numbers = [f"{one.worst(column):.2g}" for column in COLUMNS]
            bad = one.first_failure
            lines.append([one.name, *numbers, f"{one.bound:g}", f"FAIL at step {bad.step}" if bad else "pass"])
        how = (
            f"{counted(self.num_nodes, 'node')} in {counted(self.num_processes, 'process', 'processes')}, "
            f"{counted(len(self.checks[0].rows), 'step')}, {self.dtype}"
        )
        findings = [f"{one.name}: {one.finding}" for one in self.checks if one.finding is not None]
        return "\n".join([self.strategy, how, *aligned(lines, str.ljust), *findings])


@function_of(VerifyOptions)
def verify(options: VerifyOptions) -> Report:
    """Train with `strategy` stacked and on W real processes, and compare them after every step, on the CPU.

    "exact": every node by itself, in one thread, and every collective on the tensors of all nodes; no difference is
    allowed. "native": torch.distributed reduces, as in a run; differences of 1e-12 are allowed in float64 and 1e-5 in
    float32, relative to the largest value of each tensor. "stack", within the same bounds: in one stack as in a sweep,
    and each by itself, the strategy, one with half of its learning rates and of the numbers that `batched` names, and
    one with another seed. It finds what `batched` or `random` of a class promise and the code does not keep. In all
    three, the ledgers must be the same; and that of a dry run, which `steady` of a class makes short.

    Args:
        {arguments}

    Raises:
        ValueError, TypeError: for invalid arguments, and for an asynchronous strategy, which has no steps to compare.
        ProcessError: if the strategy fails, or its processes do not make the same calls of `comm`; the error says
            which process called what at which step. Also if a class is not as `steady` as it says.

    >>> from vecgym.models import Line
    >>> from vecgym.strategy import FedAvgStrategy
    >>> report = verify(FedAvgStrategy("sgd", H=2, lr=0.1), Line(), torch.arange(32.0), steps=4)
    >>> report.passed, [check.name for check in report.checks], report.checks[0].worst("params")
    (True, ['exact', 'native', 'stack'], 0.0)
    """
    [checks, *_] = multiprocess.run(
        _verify_in_process, options.num_processes, (options,), num_nodes=options.num_nodes, timeout_s=options.timeout_s
    )
    return Report(repr(options.strategy), options.num_nodes, options.num_processes, options.dtype, tuple(checks))


def _verify_in_process(link: multiprocess.Link, options: VerifyOptions) -> list[Check]:
    torch.set_num_threads(1)
    options.settle(model=copy.deepcopy(options.model).to("cpu", options.dtype))
    wire = Wire(watch=link.beat)
    wire.announce = wire.agree  # if processes call different collectives, torch.distributed would wait, or mix them up
    exact, native = (compare(options, wire, exact=exact) for exact in (True, False))
    if exact.passed and native.finding is not None:
        native = replace(native, finding=native.finding._replace(rule=ORDER_OF_SUMS))
    return [exact, native, *([compare_stack(options, link.beat)] if link.rank == 0 else [])]
