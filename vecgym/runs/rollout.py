"""Whole training runs as differentiable functions: the gradient of the outcome.

`rollout` runs a strategy on a list of batches. Everything it returns can be differentiated with respect to every number
that the strategy takes, the schedule of its exchanges, the initial parameters and the batches. `vecgym.meta.learn`
follows that gradient, through many runs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import jvp

from vecgym.clock.asynchronous import AsyncPlan
from vecgym.collectives import StackedCollectives
from vecgym.collectives.base import payload_bytes
from vecgym.core import check, nodes, tree
from vecgym.core.check import function_of
from vecgym.core.devices import placed, readable
from vecgym.core.objects import reachable, replaced
from vecgym.core.tree import Tree, differentiated, root
from vecgym.engine import Engine, EngineName
from vecgym.engine.constancy import equal_but_weights
from vecgym.engine.contract import check_differentiable
from vecgym.optim.rules import PerNodeRule
from vecgym.runs.options import JvpOptions, RolloutOptions, presence_of
from vecgym.simulation import RunFacts, Simulation, State, TickRecord
from vecgym.simulation import run as run_ticks
from vecgym.simulation.events import Arrival, Happening, Schedule, Stop
from vecgym.simulation.stack import Stack, groups_of
from vecgym.simulation.state import Result
from vecgym.strategy.asynchronous import EventDriven
from vecgym.strategy.simulated import asynchronous_simulation, simulation_of

Record = tuple[Tensor, Tensor, Tensor]  # losses [T, K], consensus distance [T], bytes [T]; of a stack [T, C K], [T, C]
# The simulation, its initial state, the batches of each step, and the place of each run among its configurations.
Program = tuple[Simulation, State, "Sequence[Any]", list[int]]


class Outcome(NamedTuple):
    """The result of a rollout; every tensor can be differentiated.

    With `num_runs=M` every tensor has a leading dimension M.

    Attributes:
        loss: of the average of the present nodes, on the evaluation batch, in eval mode: a scalar.
        losses: of each step and node on its own batch, before the update, `[T, K]`; nan where a node did not train.
        consensus_distance: root mean square distance of these nodes to their average after each step, `[T]`; where it
            is 0, so is its derivative, by definition.
        bytes: sent per node in each step, `[T]`, float64; a relaxed exchange counts by its weight, so that the
            derivative with respect to `sync_weight` is the cost of an exchange.
        params: after the last step, `[1 or K, *]`.

    >>> from vecgym.strategy import FedAvgStrategy
    >>> from vecgym.models import Line
    >>> batches = torch.tensor([[[1.0], [3.0]]]).expand(4, 2, 1)  # T = 4 steps, K = 2 nodes, B = 1
    >>> strategy = FedAvgStrategy("sgd", H=2, lr=0.5)
    >>> outcome = rollout(Line(), strategy, batches, num_nodes=2, eval_batch=torch.tensor([2.0]))
    >>> outcome.loss, outcome.losses.shape, outcome.consensus_distance, outcome.bytes
    (tensor(0.), torch.Size([4, 2]), tensor([1., 0., 1., 0.]), tensor([0., 4., 0., 4.], dtype=torch.float64))
    """

    loss: Tensor
    losses: Tensor
    consensus_distance: Tensor
    bytes: Tensor
    params: Tree


@function_of(RolloutOptions)
def rollout(options: RolloutOptions) -> Outcome:
    """Train for T steps as `Trainer.fit` does, and return a differentiable outcome.

    Any number that `strategy` takes may be a tensor that requires grad (or is inside `torch.func.grad`, `hessian`,
    `jvp` ...): learning rates (`[]`, `[K]`: one per node, `[T, 1]`: one per step, `[T, K]`), momenta, betas, weight
    decay, mixing matrices `[K, K]` or `[T, K, K]`, and `sync_weight` `[T]`, see `vecgym.strategy.SyncWeight`. So may
    `params` and the floating tensors of the batches. The derivative with respect to what has no influence is 0.

    With an asynchronous strategy the order of events is fixed, and `losses` has a row for each update of the server:
    means over the rounds in it, nan for the other nodes.

    Treated as constants: which coordinates a mask or a top-k selects. The codes of `Compressed` (rounding, top-k) pass
    derivatives straight through. Running statistics of batch norm are differentiated.

    With `num_runs=M` M runs train side by side, as the stack of a sweep does, in a fraction of the time of M calls; the
    outcome is theirs, stacked, and `outcome.loss.mean()` is the mean over a distribution of runs. A number that differs
    from run to run is a function of it, such as `strategy=lambda run: DiLoCoStrategy(lr=lr[run])` with lr `[M]`, or
    `lr[:, run, None]` with a value for each step, `[T, M]`: a tensor that one strategy holds means the same as in one
    run, so that `[K]` is one per node and `[T]` one per step, whatever M is. Runs share all calls if their strategies
    differ in numbers only (learning rates, momenta, weights that differ in part, those that `batched` of a class
    names); otherwise they share the gradients. Dropout masks are those of the single runs with `engine="loop"` only.

    Args:
        strategy: any `Strategy`.
        {arguments}

    Raises:
        ValueError, TypeError: for what cannot be run or differentiated; the message has the fix.
        RuntimeError: if the model fails on a batch; the message says on which.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> from vecgym.models import Line
    >>> outer_lr = torch.tensor(0.5, requires_grad=True)
    >>> strategy = DiLoCoStrategy("sgd", H=2, lr=0.1, outer_lr=outer_lr)
    >>> batches = torch.ones(4, 2, 1)  # T = 4 steps, K = 2 nodes, B = 1
    >>> outcome = rollout(Line(), strategy, batches, num_nodes=2, eval_batch=torch.ones(1))
    >>> outcome.loss, torch.autograd.grad(outcome.loss, outer_lr)[0]
    (tensor(0.0825, grad_fn=<AddBackward0>), tensor(-0.6845))
    >>> lr = torch.tensor([0.1, 0.2], requires_grad=True)  # of 2 runs
    >>> outcome = rollout(Line(), lambda run: DiLoCoStrategy("sgd", H=2, lr=lr[run]), batches, num_runs=2,
    ...                   num_nodes=2, eval_batch=torch.ones(1))
    >>> outcome.loss, outcome.losses.shape, torch.autograd.grad(outcome.loss.mean(), lr)[0]
    (tensor([0.0046, 0.1161], grad_fn=<AddBackward0>), torch.Size([2, 4, 2]), tensor([-0.4221,  0.7874]))
    """
    runs, segments = options.runs, options.segments
    each = _steps_of(runs)
    num_steps = len(each[0])
    if segments is not None and segments > num_steps:
        raise ValueError(f"segments={segments} is more than the {num_steps} steps: give at most {num_steps}.")
    engine = prepared(runs[0].model, options.engine, each[0][0])
    values = {"batches": each, **{name: [vars(x)[name] for x in runs] for name in ("eval_batch", "params", "strategy")}}
    _check_devices(engine.device, values)
    initial = [None if run.params is None else _initial(run.params, engine, run.num_nodes) for run in runs]
    inputs = _differentiable_tensors(tuple(values.values()))
    _check_differentiable(values["strategy"], inputs, segments)
    with readable():
        for run in {id(run.strategy): run for run in runs}.values():
            run.strategy.check(run.num_nodes, num_steps)
        program = (_one if options.num_runs is None else _many)(options, engine, initial, each)
    simulation, state, steps, places = program
    if segments is None:
        state, record = _run(simulation, state, simulation.timetable.length)
    else:
        state, record = _run_in_segments(simulation, state, steps, segments)
    if isinstance(simulation, Stack):
        return _of_inputs(_evaluated_each(runs, simulation, state, record, places), inputs)
    return _of_inputs(_evaluated(options, simulation, state, record), inputs)


@function_of(JvpOptions)
def rollout_jvp(options: JvpOptions) -> tuple[Outcome, Outcome]:
    """Compute a rollout and its derivative in one direction, in forward mode: memory does not grow with the steps.

    For few numbers over long horizons: one call for each direction. Measured cost: about three rollouts with SGD as the
    inner optimizer, six to nine with AdamW.

    Args:
        strategy: `primals` -> the strategy.
        {arguments}

    Returns:
        The outcome, and the derivative of each of its tensors.

    Raises:
        ValueError, TypeError, RuntimeError: as `rollout`; and for primals and tangents that do not match.

    >>> from vecgym.strategy import FedAvgStrategy
    >>> from vecgym.models import Line
    >>> def strategy(lr):
    ...     return FedAvgStrategy("sgd", lr=lr)
    >>> outcome, slope = rollout_jvp(Line(), strategy, torch.ones(1, 2, 1), [torch.tensor(0.1)], [torch.tensor(1.0)],
    ...                              num_nodes=2, eval_batch=torch.ones(1))
    >>> outcome.loss, slope.loss  # (1 - 2 lr)^2 and its derivative
    (tensor(0.6400), tensor(-3.2000))
    """
    steps = as_steps(options.batches, options.num_nodes)
    engine = prepared(options.model, options.engine, steps[0])

    def outcome(*values: Tensor) -> Outcome:
        strategy = check.called("strategy", options.strategy, *values)
        return rollout(**{**options.common, "strategy": strategy, "batches": steps, "engine": engine})

    value, slope = jvp(outcome, tuple(options.primals), tuple(options.tangents))[:2]
    return value, slope


def _of_inputs(outcome: Outcome, inputs: list[Tensor]) -> Outcome:
    """Return the outcome as a function of all `inputs`, with derivative 0 for those without influence."""
    if not inputs:
        return outcome
    zero = torch.stack([x.reshape(-1)[:0].sum().to("cpu", torch.float64) for x in inputs]).sum()
    return Outcome(*tree.map_leaves(lambda x: x + zero.to(x), tuple(outcome)))


def _evaluated(options: RolloutOptions, simulation: Simulation, state: State, record: Record) -> Outcome:
    """Return the outcome of one run."""
    losses, distances, sent = record
    distances = losses.new_zeros(len(losses)) if options.strategy.asynchronous else distances
    loss = _loss(simulation.engine, state, simulation.result(state), options.eval_batch)
    return Outcome(loss, losses, distances, sent, state.params)


def _loss(engine: Engine, state: State, result: Result, eval_batch: Any) -> Tensor:
    """Return the loss of a run's model."""
    params, buffers = nodes.mean(result.params, result.members), nodes.mean(state.buffers, result.of_buffers)
    loss = engine.loss(params, buffers, eval_batch)
    if not loss.is_floating_point():
        raise ValueError(
            f"the loss of eval_batch is {loss.dtype}, and not a real number: give one of the batches' dtypes."
        )
    return loss


def prepared(model: nn.Module, engine: EngineName | Engine, batch: Any) -> Engine:
    """Return an engine that has inspected the model.

    >>> from vecgym.models import Line
    >>> prepared(Line(), "auto", torch.ones(2, 1)).plan.engine
    'vmap'
    """
    if not isinstance(engine, Engine):
        engine = Engine(model, engine=engine, node_threads=1)
    check_differentiable(engine.model)  # before the inspection, which may warn about what is refused anyway
    if engine.facts is None:
        with torch.enable_grad():  # a rollout may run under no_grad
            engine.prepare(batch, num_passes=0)
    return engine


def as_steps(batches: Any, num_nodes: int) -> list[Any]:
    """Return one batch `[K, B, ...]` for each step.

    >>> steps = as_steps(torch.zeros(5, 2, 3), num_nodes=2)  # [T, K, B]
    >>> len(steps), steps[0].shape
    (5, torch.Size([2, 3]))
    """
    if isinstance(batches, (Tensor, dict, tuple)):
        lengths = {len(x) if x.dim() > 0 else 0 for x in tree.leaves(batches)}
        if len(lengths) != 1:
            raise ValueError(
                f"batches is a {type(batches).__name__} whose tensors have leading sizes {sorted(lengths)}: each must "
                "have the same, T, as [T, K, B, ...]. A list is a sequence of T batches."
            )
        steps = [tree.map_leaves(lambda x: x[t], batches) for t in range(lengths.pop())]  # noqa: B023
    elif isinstance(batches, Iterable):
        steps = list(batches)
    else:
        raise TypeError(f"batches is {check.kind_of(batches)}; give a list of T batches [K, B, ...].")
    if not steps or not all(map(tree.leaves, steps)):
        raise ValueError("batches holds no batch, or one without a tensor: give a list of T batches [K, B, ...].")
    for t, step in enumerate(steps):
        for x in tree.leaves(step):
            if x.dim() < 1 or len(x) != num_nodes:
                raise ValueError(
                    f"the batch of step {t} has a tensor of shape {list(x.shape)}; num_nodes={num_nodes} needs "
                    f"[{num_nodes}, B, ...]. A list is a sequence of batches; a tensor, dict or tuple has a leading T."
                )
    return steps


def _check_devices(device: torch.device, values: dict[str, Any]) -> None:
    """Raise a ValueError for a tensor that is not on the model's device; a strategy's numbers may be on the CPU."""
    for name, value in values.items():
        allowed = {device.type, "cpu"} if name == "strategy" else {device.type}
        for x in reachable(value):
            if isinstance(x, Tensor) and x.device.type not in allowed:
                raise ValueError(
                    f"{name} has a tensor of shape {list(x.shape)} on {x.device}, but the model is on {device}: move "
                    f"one of them, tensor.to({str(device)!r})."
                )


def _initial(params: Tree, engine: Engine, num_nodes: int) -> Tree:
    """Check the initial parameters, and return those that training changes."""
    own = {**engine.params, **engine.frozen}
    if not engine.params.keys() <= params.keys() <= own.keys():
        wrong = sorted(map(str, params.keys() ^ own.keys()))
        raise ValueError(f"params must have the names of the model's parameters; only one of them has {wrong}.")
    for name, value in params.items():
        shape = list(own[name].shape)
        check.instance(f"params[{name!r}]", value, Tensor, f"a tensor [{num_nodes}, *] or [1, *] with * = {shape}")
        if list(value.shape[1:]) != shape or value.dim() == 0 or len(value) not in (1, num_nodes):
            raise ValueError(
                f"params[{name!r}] has shape {list(value.shape)}; [{num_nodes}, *] or [1, *] (the same on every node) "
                f"with * = {shape} is needed: p[None] for the model's own p."
            )
    return {name: params[name] for name in engine.params}


def _check_differentiable(strategies: Any, inputs: list[Tensor], segments: int | None) -> None:
    """Raise a ValueError if the run cannot be differentiated with respect to `inputs`, or not in segments."""
    for rule in reachable(strategies) if inputs else ():
        if isinstance(rule, PerNodeRule):
            raise ValueError(
                f"{rule.spec.cls.__name__} runs as it is, node by node, and has no pure form that can be "
                "differentiated: use SGD, Adam, AdamW or another of vecgym.optim's elementwise optimizers, or let "
                "nothing require grad."
            )
    if segments is not None and any(not x.requires_grad or is_functorch_wrapped_tensor(x) for x in inputs):
        raise ValueError(
            f"segments={segments} is for reverse mode through torch.autograd: inside a transform of torch.func, and in "
            "forward mode (which stores nothing), give segments=None."
        )


def _one(options: RolloutOptions, engine: Engine, initial: Sequence[Tree | None], each: Sequence[Any]) -> Program:
    """Return the program of one run."""
    strategy, steps = options.strategy, each[0]
    if strategy.asynchronous:
        simulation = _updates(options, engine, initial[0], steps)
    else:
        simulation = simulation_of(
            options.model, strategy, StackedCollectives(options.num_nodes), engine=engine, max_steps=len(steps),
            seed=options.seed, num_examples=options.num_examples,
            read=partial(batches_at, steps, limits=options.limits),
            presence=presence_of(options, len(steps), options.num_examples),
        )  # fmt: skip
    return simulation, simulation.init(initial[0]), steps, [0]


def _updates(options: RolloutOptions, engine: Engine, initial: Tree | None, steps: Sequence[Any]) -> Simulation:
    """Return the updates for which there are batches; node i takes row i of batch t as its own step t."""
    strategy, K = options.strategy, options.num_nodes
    assert isinstance(strategy, EventDriven)
    assert options.compute is not None
    if strategy.server_of(K) is not None and any(len(p) > 1 for p in (initial or {}).values()):
        raise ValueError(
            f"params differ between nodes, but in {type(strategy).__name__} all start from the server's: give [1, *]."
        )
    sizes = {name: payload_bytes(p[None]) for name, p in engine.params.items()}
    stop = Stop(updates=K * len(steps) if options.max_updates is None else options.max_updates)
    plan = AsyncPlan.of(strategy, K, options.compute, options.network, sizes, options.seed, stop)

    def has_batches(events: list[Happening]) -> bool:
        return all(x.first_step + x.num_steps <= len(steps) for x in events if isinstance(x, Arrival))

    updates = list(itertools.takewhile(has_batches, plan.updates))
    if not updates:
        raise ValueError(
            f"{len(steps)} batches are too few for a first update: a round has {max(plan.rules.num_steps)} steps."
        )
    return asynchronous_simulation(
        engine, strategy, Schedule(plan.rules, updates), partial(batches_at, steps, limits=options.limits),
        seed=options.seed, num_examples=options.num_examples,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- many runs, as one program


def _steps_of(runs: Sequence[RolloutOptions]) -> list[list[Any]]:
    """Return the batches of each run, equally many and of one form; runs that share theirs share the list."""
    lists = {id(run.batches): run.batches for run in runs}
    steps = {key: as_steps(batches, runs[0].num_nodes) for key, batches in lists.items()}
    each = [steps[id(run.batches)] for run in runs]
    forms = [[tree.map_leaves(tree.form, batch) for batch in steps] for steps in each]
    for i, form in enumerate(forms):
        if form != forms[0]:
            t = next((t for t, (a, b) in enumerate(zip(form, forms[0])) if a != b), None)
            why = f"{len(form)} batches and run 0 has {len(forms[0])}" if t is None else f"{form[t]} in step {t} and "
            raise ValueError(
                f"batches: run {i} has {why}{'' if t is None else f'run 0 has {forms[0][t]}'}: with num_runs all runs "
                "need equally many batches of one form."
            )
    return each


def _many(options: RolloutOptions, engine: Engine, initial: Sequence[Tree | None], each: Sequence[Any]) -> Program:
    """Return the program of all runs: the stack of a sweep with a configuration for each."""
    runs, strategies, facts = options.runs, [], []
    presences = {(run.seed, run.num_examples): presence_of(run, len(each[0]), run.num_examples) for run in runs}
    for i, run in enumerate(runs):
        if not equal_but_weights(runs[0].model, run.model):
            raise ValueError(
                f"the models of runs 0 and {i} differ in more than the values of their trainable parameters, and "
                "num_runs trains all runs as one program: call rollout for each."
            )
        presence = presences[run.seed, run.num_examples]
        server = presence is not None and presence.server
        strategies.append(run.strategy.through_server() if server else run.strategy)
        facts.append(RunFacts(run.num_nodes, len(each[0]), run.seed, presence, run.num_examples))
    order, groups = groups_of(strategies, facts)
    lists = [each[i] for i in order]
    steps = [tree.map_leaves(lambda *x: torch.cat(x), *batches) for batches in zip(*lists)]
    limits = None
    if any(run.limits for run in runs):
        limits = [limit for i in order for limit in runs[i].limits or (sys.maxsize,) * options.num_nodes]
    stack = Stack(engine, groups, StackedCollectives(options.num_nodes), partial(batches_at, steps, limits=limits))
    same = isinstance(options.model, nn.Module)
    own = [engine.params if same else dict(run.model.named_parameters()) for run in runs]
    first = [{n: own[i][n].detach()[None] for n in engine.params} if x is None else x for i, x in enumerate(initial)]
    return stack, stack.init([first[i] for i in order]), steps, [order.index(i) for i in range(len(runs))]


def _evaluated_each(
    runs: Sequence[RolloutOptions], stack: Stack, state: State, record: Record, places: list[int]
) -> Outcome:
    """Return the outcomes of all runs, stacked."""
    alone = [stack.alone(state, c) for c in places]
    results = [stack.result(one, c) for one, c in zip(alone, places)]
    losses = [_loss(stack.engine, x, result, run.eval_batch) for x, result, run in zip(alone, results, runs)]
    by_node, distances, sent = [x.unflatten(1, (len(runs), -1)).transpose(0, 1)[places] for x in record]
    rows = max(len(x) for one in alone for x in one.params.values())
    params = [nodes.expand(one.params, rows) for one in alone]
    stacked = {name: torch.stack([x[name] for x in params]) for name in params[0]}
    return Outcome(torch.stack(losses), by_node, distances[..., 0], sent[..., 0], stacked)


# ------------------------------------------------------------------------- the steps, stored or computed again


def batches_at(
    steps: Sequence[Any], requests: Iterable[tuple[Sequence[int], Any]], limits: Sequence[int] | None = None
) -> Iterator[tuple[Any, list[int] | None]]:  # fmt: skip
    """Yield what nodes read, each its row of the batch `[K, B, ...]` at its own step, and how many examples each has.

    The examples of a smaller batch fill the first places, and repeat. None: all have equally many.

    Args:
        limits: how many examples of each row are a node's own at most; see `rollout`.

    Raises:
        ValueError: for examples of different shapes, or tensors of a batch with unequally many.

    >>> steps = [torch.tensor([[1], [2]]), torch.tensor([[3], [4]])]
    >>> [batch for batch, _ in batches_at(steps, [([0, 1], 1), ([0, 1], [1, 0])])]
    [tensor([[3],
            [4]]), tensor([[3],
            [2]])]
    """
    for rows, counts in requests:
        if isinstance(counts, int):
            whole = steps[counts]
            complete = len(rows) == len(tree.leaves(whole)[0])
            some = None if limits is None else [limits[row] for row in rows]
            yield whole if complete else nodes.take_rows(whole, torch.tensor(rows)), some
            continue
        own = [tree.map_leaves(lambda x: x[row], steps[n]) for row, n in zip(rows, counts)]  # noqa: B023
        sizes: list[int] | None = None
        shapes = [[x.shape for x in tree.leaves(batch)] for batch in own]
        if any(shape != shapes[0] for shape in shapes):
            if len({tuple(x[1:] for x in s) for s in shapes}) > 1 or any(len({x[:1] for x in s}) > 1 for s in shapes):
                raise ValueError(
                    "nodes that were absent, or are slower, read other batches than the rest, and all need examples of "
                    "one shape, as many in each tensor of a batch: these have different shapes."
                )
            sizes = [shape[0][0] for shape in shapes]
            places = [torch.arange(max(sizes)) % size for size in sizes]
            own = [tree.map_leaves(lambda x: x[placed(at, x.device)], b) for b, at in zip(own, places)]  # noqa: B023
        if limits is not None:
            sizes = [min(n, limits[row]) for n, row in zip(sizes or [shape[0][0] for shape in shapes], rows)]
        yield tree.map_leaves(lambda *x: torch.stack(x), *own), sizes


def _run(simulation: Simulation, state: State, until: int) -> tuple[State, Record]:
    """Take the steps before `until`, storing everything for the backward pass."""
    losses, distances, sent = [], [], []

    def record(state: State, row: TickRecord) -> None:
        losses.append(row.losses)
        distances.append(_distances(simulation, state))
        sent.append(_sent(simulation, row))

    with readable():
        state = run_ticks(simulation, state, [record], pure=True, stop=lambda state: state.tick == until)
    return state, (torch.stack(losses), torch.stack(distances), torch.stack(sent))


def _distances(simulation: Simulation, state: State) -> Tensor:
    """Return the distance of the nodes to their mean after a step, `[]`, or of each configuration of a stack, `[C]`."""
    if not isinstance(simulation, Stack):
        return root(nodes.squared_consensus_distance(_members(state.params, simulation.members(state.tick - 1))))
    configs = range(simulation.num_configs)
    each = [simulation.members(state.tick - 1, simulation.group_with(c)) for c in configs]
    if all(members is None for members in each):
        params = simulation.parameters(state.own, state.shared)
        return root(nodes.squared_consensus_distance(params, len(configs)))
    params_of = [_members(simulation.alone(state, c).params, members) for c, members in enumerate(each)]
    return root(torch.stack([nodes.squared_consensus_distance(params) for params in params_of]))


def _members(params: Tree, members: Sequence[int] | None) -> Tree:
    return params if members is None else nodes.take_rows(params, torch.tensor(members), copy=False)


def _sent(simulation: Simulation, row: TickRecord) -> Tensor:
    """Return the bytes that a node has sent in a step, `[]`, or a node of each configuration of a stack, `[C]`."""
    if not isinstance(simulation, Stack):
        return torch.as_tensor(sum(transfer.sent_bytes for transfer in row.transfers), dtype=torch.float64)
    each = [sum(transfer.sent_bytes for transfer in row.sent_by(g)) for g in range(len(simulation.groups))]
    wide = [torch.as_tensor(x, dtype=torch.float64).expand(group.size) for x, group in zip(each, simulation.groups)]
    return torch.cat(wide)


def _run_in_segments(simulation: Simulation, state: State, steps: Sequence[Any], segments: int) -> tuple[State, Record]:
    """Take the steps in `segments` parts, storing only the states between them."""
    size = -(-len(steps) // segments)
    records = []
    for start in range(0, len(steps), size):
        part = _Segment(simulation, state, steps, min(start + size, len(steps)))
        state, record = part.result(_Recomputed.apply(part, *part.tensors))
        records.append(record)
    losses, distances, sent = (torch.cat(parts) for parts in zip(*records))
    return state, (losses, distances, sent)


class _Segment:
    """A part of a run as a function of tensors alone.

    Its inputs are `tensors`: those of the state before it, and the differentiable ones of its strategy and batches.
    Its outputs are the tensors of the state after it and of the record.
    """

    def __init__(self, simulation: Simulation, state: State, steps: Sequence[Any], until: int) -> None:
        self.simulation, self.until = simulation, until
        self.step = state.tick
        # A node that sat out a step reads batches of earlier ones.
        first = state.tick if all(getattr(table, "all_train", False) for table in simulation.tables) else 0
        ahead = any(getattr(table, "reads_ahead", False) for table in simulation.tables)
        own = [step if first <= t and (ahead or t < until) else None for t, step in enumerate(steps)]
        self.reads, read = (simulation.settings, own), cast("partial[Any]", simulation.read)
        self.limits = read.keywords["limits"]
        self.outside = _differentiable_tensors(self.reads)
        tensors, self._before = _flatten(vars(state))
        self.tensors = [*tensors, *self.outside]
        self._after: Any = None

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        new = {id(x): value for x, value in zip(self.outside, tensors[len(tensors) - len(self.outside) :])}
        settings, steps = replaced(self.reads, new)
        simulation = self.simulation.of(settings, partial(batches_at, steps, limits=self.limits))
        state, record = _run(simulation, State(**_filled(self._before, tensors)), self.until)
        outputs, self._after = _flatten({"state": vars(state), "record": record})
        return outputs

    def result(self, tensors: Sequence[Tensor]) -> tuple[State, Record]:
        """Rebuild the state and the record from the tensors that a call returned."""
        after = _filled(self._after, tensors)
        return State(**after["state"]), after["record"]


class _Recomputed(torch.autograd.Function):
    """A part of a run that stores only its inputs: the backward pass recomputes it.

    torch.utils.checkpoint cannot be used: the nodes' gradients are computed by torch.func, which does not allow hooks
    on saved tensors.
    """

    @staticmethod
    def forward(ctx: Any, part: _Segment, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.part = part
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(part(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        part, tensors = ctx.part, ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        again = torch.is_grad_enabled()  # the derivative will be differentiated too

        def start(x: Tensor) -> Tensor:
            return x.view_as(x) if again else x.detach().requires_grad_()

        with torch.enable_grad():
            inputs = [start(x) if wants else x for x, wants in zip(tensors, wanted)]
            pairs = [(y, g) for y, g in zip(part(inputs), grads) if g is not None and y.requires_grad]
            if not pairs:
                return None, *[None] * len(tensors)
            ys, gs = zip(*pairs)
            if part.step == 0 and not again:
                _check_leaves(ys, inputs)
            slopes = torch.autograd.grad(
                ys, [x for x, wants in zip(inputs, wanted) if wants], gs, allow_unused=True, create_graph=again
            )
        places = iter(slopes)
        return None, *(next(places) if wants else None for wants in wanted)


def _check_leaves(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise a ValueError if `outputs` depend on a leaf that requires grad and is not among the inputs."""
    ids = {id(x) for x in inputs}
    visited: set[Any] = set()
    todo = [y.grad_fn for y in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if leaf is not None and id(leaf) not in ids:
            raise ValueError(
                f"segments: the strategy reads a tensor of shape {list(leaf.shape)} that requires grad, but none "
                "of its objects or closures holds it: store it in one of them, or give segments=None."
            )
        todo += [after for after, _ in node.next_functions]


class _Slot(int):
    """The index of a tensor in a list."""


def _flatten(values: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of nested dicts, each once, and the dicts with each tensor replaced by its index."""
    tensors: list[Tensor] = []
    places: dict[int, _Slot] = {}

    def place(x: Tensor) -> Any:
        if id(x) not in places:
            places[id(x)] = _Slot(len(tensors))
            tensors.append(x)
        return places[id(x)]

    return tensors, tree.map_leaves(place, values)


def _filled(outline: Any, tensors: Sequence[Tensor]) -> Any:
    return tree.map_leaves(tensors.__getitem__, outline, kind=_Slot)


def _differentiable_tensors(root: Any) -> list[Tensor]:
    """Return the tensors in an object with respect to which derivatives may be taken."""
    return [x for x in reachable(root) if differentiated(x)]
