"""Shared by the tests: run a `Simulation` on the batches that the naive twins take, and compare trees."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _CheckpointFrame

from vecgym.collectives import StackedCollectives
from vecgym.collectives.base import T
from vecgym.collectives.topology import Groups
from vecgym.core import nodes, tree
from vecgym.core.tree import Tree
from vecgym.engine import Engine
from vecgym.simulation import Simulation, State
from vecgym.simulation.simulation import Part
from vecgym.simulation.stack import Stack, groups_of
from vecgym.simulation.timetable import Event, RunFacts
from vecgym.strategy import Average, RankStrategy, Strategy, all_reduce
from vecgym.strategy.simulated import nothing_to_read, simulation_of
from vecgym.strategy.stages import Memory

# Activation checkpointing under vmap needs a torch whose checkpoint() keeps its arguments without an autograd.Function.
STACKS_CHECKPOINTS = hasattr(_CheckpointFrame, "save_inputs")
# The models that vmap cannot run.
NEEDS_LOOP = (*(() if STACKS_CHECKPOINTS else ("Checkpointed",)), "DataDependent", "LSTM")


# --------------------------------------------------------------------------------------------- batches


def stack(batches: Sequence[Any]) -> Any:
    """K batches, trees of `[B, ...]`, as one tree of `[K, B, ...]`."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.stack(list(batches))
    if isinstance(first, dict):
        return {key: stack([batch[key] for batch in batches]) for key in first}
    return type(first)(stack(parts) for parts in zip(*batches))


def stacked(batches: Sequence[Sequence[Any]]) -> list[Any]:
    """The twins' `batches[step][node]` as one tree `[K, B, ...]` for each step."""
    return [stack(of_nodes) for of_nodes in batches]


def joined(batches: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The batches of all nodes as one batch `[K * B, ...]` of a single node: `joined[step][0]`."""
    return [[tree.map_leaves(lambda x: x.flatten(0, 1), batch)] for batch in stacked(batches)]


# -------------------------------------------------------------------------------------------- running


def each_row(event: Event, num_nodes: int) -> list[tuple[int, int]]:
    """Every row of an event with its count."""
    rows = range(num_nodes) if event.rows is None else event.rows
    counts = [event.counts] * len(rows) if isinstance(event.counts, int) else event.counts
    return list(zip(rows, counts, strict=True))


class Recording(StackedCollectives):
    """Collectives that remember over which groups they averaged."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)
        self.drawn: list[Groups] = []

    def mean(
        self, x: T, groups: Groups | None = None, weights: Sequence[float] | None = None, *, inplace: bool = False
    ) -> T:
        if groups is not None:
            self.drawn.append([[node if self.members is None else self.members[node] for node in g] for g in groups])
        return super().mean(x, groups, weights, inplace=inplace)

    def among(self, members: Sequence[int]) -> Recording:
        subset = Recording(len(members))
        subset.ledger, subset.drawn = self.ledger, self.drawn
        subset._count_among(self, members)
        return subset


@dataclass
class Run:
    """The remains of a run of `Simulation`, for each of its K nodes."""

    simulation: Simulation
    losses: Tensor  # [steps, K]
    state: State
    params: Tree  # [K, *]
    buffers: Tree  # [K, *]
    comm: StackedCollectives
    active: list[tuple[int, ...] | None]  # per step: the nodes that trained; None: all
    groups: list[tuple[tuple[int, ...], ...] | None]  # per step: the islands that averaged


def simulation(
    model: nn.Module,
    strategy: Strategy,
    batches: Sequence[Any],
    *,
    engine: str = "vmap",
    chunk_size: int | None = None,
    node_threads: int | None = 1,
    comm: StackedCollectives | None = None,
    max_steps: int | None = None,
    seed: int = 42,
    minibatch_size: int | None = None,
    num_examples: tuple[int, ...] | None = None,
    exact: bool = False,
    compile: bool = False,
) -> Simulation:
    """A simulation, ready to step, of as many nodes as `batches[step]`, `[K, B, ...]`, has."""
    threads = None if compile else node_threads
    local = Engine(model, engine=engine, chunk_size=chunk_size, node_threads=threads, compile=compile)
    local.prepare(batches[0], mean=strategy.mean_gradient)
    return simulation_of(
        model,
        strategy,
        comm or Recording(next(iter(tree.leaves(batches[0]))).shape[0]),
        engine=local,
        max_steps=max_steps or len(batches),
        seed=seed,
        minibatch_size=minibatch_size,
        num_examples=num_examples,
        exact=exact,
    )


def run(
    model: nn.Module,
    strategy: Strategy,
    batches: Sequence[Any],
    *,
    state: State | None = None,
    differentiable: bool = False,
    **settings: Any,
) -> Run:
    """Train on `batches`, `[K, B, ...]` each, from `state` or from the beginning; see `simulation`."""
    sim = simulation(model, strategy, batches, **settings)
    try:
        first = sim.init()
        return advance(sim, first if state is None else state, batches, differentiable=differentiable)
    finally:
        sim.engine.close()


def advance(sim: Simulation, state: State, batches: Sequence[Any], *, differentiable: bool = False) -> Run:
    """Step through `batches`; `state` is given up unless `differentiable`."""
    assert isinstance(sim.comm, StackedCollectives)
    drawn = sim.comm.drawn if isinstance(sim.comm, Recording) else []
    losses, active, groups = [], [], []
    for batch in batches:
        drawn.clear()
        state, row = sim.step(state, batch, pure=differentiable)
        sim.comm.ledger.add(state.step - 1, row.transfers)
        losses.append(row.losses)
        active.append(None if row.active is None else tuple(row.active))
        groups.append(tuple(tuple(island) for island in drawn[-1]) if drawn else None)
    num_rows = len(sim.comm.node_ids)
    params, buffers = nodes.expand(state.params, num_rows), nodes.expand(state.buffers, num_rows)
    return Run(sim, torch.stack(losses), state, params, buffers, sim.comm, active, groups)


@dataclass
class StackRun:
    """The remains of a run of several configurations in one program."""

    losses: Tensor  # [steps, C, K]
    state: State
    params: list[Tree]  # of each configuration, [K, *]
    comm: StackedCollectives


def run_stack(
    model: nn.Module, strategies: Sequence[Strategy], batches: Sequence[Any], num_nodes: int, engine: str = "vmap",
    differentiable: bool = False,
) -> StackRun:  # fmt: skip
    """Train several configurations, in the order of their groups, on `batches`, `[C K, B, ...]` each."""
    C, K = len(strategies), num_nodes
    order, groups = groups_of(strategies, [RunFacts(K, len(batches), 42)] * C)
    assert order == list(range(C))
    local, comm = Engine(model, engine=engine, node_threads=1), StackedCollectives(K)
    local.prepare(batches[0], mean=False)
    stack = Stack(local, groups, comm, nothing_to_read)
    state, losses = stack.init(), []
    for batch in batches:
        state, row = stack.step(state, batch, pure=differentiable)
        losses.append(row.losses.reshape(C, K))
        comm.ledger.add(state.tick - 1, row.transfers)
    each: list[Tree] = []
    for number, group in enumerate(groups):
        held = state.shared[str(number)].get("params")
        for c in range(group.size):
            first = group.first + c * K
            rows = slice(c, c + 1) if held else slice(first, first + K)
            of_one = {name: x[rows] for name, x in (held or state.own["params"]).items()}
            each.append({name: x.expand(K, *x.shape[1:]) for name, x in of_one.items()})
    return StackRun(torch.stack(losses), state, each, comm)


def begun(how: Average, values: Tree, num_nodes: int, inplace: bool = False) -> Memory:
    """The memory of K nodes before their first exchange; `values`, `[1 or K, *]`, are the first node's."""
    part = Part.alone(StackedCollectives(num_nodes), seed=42, inplace=inplace)
    return how.memory(tree.map(lambda x: x[:1], values), part)


# ------------------------------------------------------------------------------------------ comparing


def flat(values: Any, path: str = "") -> dict[str, Tensor]:
    """Every tensor of nested dicts under its path, "optimizer.exp_avg.weight"."""
    if isinstance(values, Tensor):
        return {path: values}
    if isinstance(values, State):
        values = {"own": values.own, "shared": values.shared}
    assert isinstance(values, Mapping), f"{path} is a {type(values).__name__}"
    found: dict[str, Tensor] = {}
    for key, value in values.items():
        found |= flat(value, f"{path}.{key}" if path else key)
    return found


def difference(a: Any, b: Any) -> float:
    """The largest difference between two trees, `[1, *]` tensors broadcast; nan equals nan. Inf if names differ."""
    x, y = flat(a), flat(b)
    if x.keys() != y.keys():
        return torch.inf
    gaps = [_gap(x[name], y[name]) for name in x]
    return max(gaps, default=0.0)


def _gap(x: Tensor, y: Tensor) -> float:
    x, y = torch.broadcast_tensors(x.detach().double(), y.detach().double())
    gap = torch.where(x.isnan() & y.isnan(), 0.0, (x - y).abs())
    return float(gap.nan_to_num(nan=torch.inf).max()) if gap.numel() else 0.0


def assert_close(a: Any, b: Any, tolerance: float, what: str = "") -> None:
    """Every tensor of `a` equals that of `b` up to `tolerance`, absolutely and relatively."""
    x, y = flat(a), flat(b)
    assert x.keys() == y.keys(), f"{what}: only one side has {sorted(x.keys() ^ y.keys())}"
    for name in x:
        left, right = torch.broadcast_tensors(x[name].detach(), y[name].detach())
        try:
            torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{what} {name}: {error}") from None


def assert_same_bits(a: Any, b: Any, what: str = "") -> None:
    """Every tensor of `a` equals that of `b`, shape and all bits."""
    x, y = flat(a), flat(b)
    assert x.keys() == y.keys(), f"{what}: only one side has {sorted(x.keys() ^ y.keys())}"
    for name in x:
        same = x[name].shape == y[name].shape and torch.equal(
            x[name].nan_to_num(nan=7e77), y[name].nan_to_num(nan=7e77)
        )
        assert same, f"{what} {name} differs by {_gap(x[name], y[name]) if x[name].shape == y[name].shape else 'shape'}"


def rows(values: Tree, order: Sequence[int]) -> Tree:
    """The given nodes of a `[K, *]` tree, in this order."""
    return {name: x[list(order)] for name, x in values.items()}


def reordered(batches: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """The batches of those nodes: node i gets what node `order[i]` had."""
    return [tree.map_leaves(lambda x: x[list(order)], batch) for batch in batches]


def saved(state: State) -> State:
    """A copy that shares nothing with the run that goes on."""
    return copy.deepcopy(state)


class OneRank(RankStrategy):
    """DDP with the optimizer's own step, as written for one rank."""

    def step(self) -> None:
        for p in self.model.parameters():
            assert p.grad is not None
            all_reduce(p.grad, op="mean")
        self.optim.step()
        super().step()
