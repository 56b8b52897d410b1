"""Measure all nodes, wherever they are: averages, distances, validation losses.

Averages and distances are over the nodes that were present in the last step, `members`; see `Simulation.result`. None
of this is part of the training: nothing is recorded in the ledger.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives
from vecgym.core import nodes, tree
from vecgym.core.devices import fetched
from vecgym.core.nodes import LOSS_FN
from vecgym.core.tree import Tree
from vecgym.data import EvalBatches
from vecgym.data.batches import chosen_batches, places
from vecgym.engine import Engine
from vecgym.engine.plan import batches_at_once
from vecgym.records.columns import EACH
from vecgym.simulation.state import Result
from vecgym.simulation.timetable import RunFacts

MAX_JOINED_BYTES = 2**25  # of batches that are evaluated in one call
OF_NODES = ("val_losses", "consensus_distance", "consensus_distance_before")  # columns

Piece = tuple[Sequence[Any], int, Tensor | None]  # see `_batches`
Places = list[tuple[int, Tensor | None]]  # for each batch: its size, and the rows of the nodes that read it; None: all
Measured = dict[str, list[tuple[Tensor, Tensor]]]  # by name, for each batch: of the averaged models, and of the nodes


def _measured(
    engine: Engine, values: tuple[Tree, Tree], sets: Sequence[EvalBatches], comm: Collectives, result: Result
) -> tuple[Measured, Places]:
    """Measure all batches on the model's device, `[C or L]` and `[1 or L]` each, and say whose they are.

    `values` are each node's parameters and buffers, `[1 or L, *]`.
    """
    C, num_local = len(sets), len(comm.node_ids)
    whose_means = (result.params, result.members), (values[1], result.of_buffers)
    means: Sequence[Tree] = [averages(x, C, comm, members) for x, members in whose_means]
    alone = num_local == 1 < comm.num_nodes  # [1, *] is then this node's own
    same = not alone and result.params is values[0] and all(x.shape[0] in (1, C) for x in tree.leaves(values))
    # If each node has its own validation set, the averaged model has a loss on each of them.
    if sets[0].per_node and C > 1:
        means = [nodes.expand(x, num_local) for x in means]
    each_node: Sequence[Tree] = values if C == 1 or same else [nodes.expand(x, num_local) for x in values]
    distinct, which = places(sets)
    own_batches = sets[0].per_node or len(distinct) > 1
    which, repeats = (which, 1 if sets[0].per_node else num_local // C) if own_batches else ([0], 1)
    draws = engine.facts is not None and engine.facts.random  # perhaps in eval mode, too
    if not (same or sets[0].per_node or draws) and _alike(values, C):  # as after a merge
        each_node, repeats = [tree.map(lambda x: x[:: max(1, len(x) // C)], y) for y in values], 1
    measured: Measured = {}
    whose: Places = []
    most = batches_at_once(engine.plan, engine.facts, comm.num_nodes, engine.device)
    for pieces in _at_once(_batches(distinct, C, num_local), which, repeats, most):
        several, rows = len(pieces) > 1, pieces[0][2]
        settings = {"own_batches": own_batches, "several": several}
        batch = chosen_batches(_joined(pieces, own_batches), which)
        params, buffers = _readers(means, rows)
        of_means = of_nodes = engine.measures(params, buffers, batch, **settings)
        if not same:
            params, buffers = _readers(each_node, rows)
            of_each = batch if repeats == 1 else tree.map_leaves(lambda x: x.repeat_interleave(repeats, 0), batch)
            of_nodes = engine.measures(params, buffers, of_each, **settings)
        for name, x in of_means.items():
            pair = (x, of_nodes[name])
            measured.setdefault(name, []).extend(zip(*[x.unbind(1) for x in pair]) if several else [pair])
        whose += [(size, rows) for _, size, rows in pieces]
    return measured, whose


def _alike(values: tuple[Tree, Tree], num_configs: int) -> bool:
    """Say whether all nodes of each configuration have the same parameters and buffers."""
    each = (x.unflatten(0, (num_configs, -1)) for x in tree.leaves(values) if len(x) > num_configs)
    differ = [(x != x[:, :1]).any() for x in each]
    return not (differ and fetched(torch.stack(differ)).any())


def _readers(values: Sequence[Tree], rows: Tensor | None) -> Sequence[Tree]:
    """Return the parameters and buffers of the nodes that read a batch."""
    return values if rows is None else [nodes.take_rows(x, rows, copy=False) for x in values]


def _at_once(batches: Iterator[Piece], which: Sequence[int], repeats: int, most: int) -> Iterator[list[Piece]]:
    """Group neighbouring batches of the same form: up to `most`, and up to `MAX_JOINED_BYTES` of all models."""

    def form(piece: Piece) -> list[Any]:
        leaves, rows = tree.flatten(piece[0]), piece[2]
        shapes = [(path, x.shape, x.dtype) if isinstance(x, Tensor) else (path, x) for path, x in leaves]
        return [None if rows is None else rows.tolist(), *shapes]

    for _, group in itertools.groupby(batches, key=form):
        alike = iter(group)
        for first in alike:
            of_set = [tree.num_bytes(batch) for batch in first[0]]
            small = MAX_JOINED_BYTES // max(1, repeats * sum(of_set[i] for i in which))
            yield [first, *itertools.islice(alike, max(0, min(most, small) - 1))]


def _joined(pieces: Sequence[Piece], own_batches: bool) -> Sequence[Any]:
    """Join G batches of each set: `[B, ...]` to `[G, B, ...]`, with `own_batches` `[n, B, ...]` to `[n, G, B, ...]`."""
    if len(pieces) == 1:
        return pieces[0][0]
    each, dim = zip(*[batches for batches, *_ in pieces]), int(own_batches)
    return [tree.map_leaves(lambda *x: torch.stack(x, dim), *batches) for batches in each]


def _columns_of_each(
    measured: Measured, whose: Places, sets: Sequence[EvalBatches], comm: Collectives, engine: Engine,
    members: Sequence[int] | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the columns of each configuration: means over the examples, or by the model's weights, of all nodes.

    Everything is on the host.
    """
    C, num_local, per_node = len(sets), len(comm.node_ids), sets[0].per_node
    sizes, rows = zip(*whose)
    count = local_count = torch.tensor([size for batches in sets for size in batches.sizes])  # [C or L]
    weights: Sequence[Sequence[Any]] = (sizes, sizes)  # of each batch, for the averaged models and for the nodes
    if given := measured.pop("weight", None):
        weights = [[x.double() for x in each] for each in zip(*given)]
        count, local_count = (_summed([torch.ones(())] * len(rows), x, rows, num_local) for x in weights)
    counts = everyone(count, comm, engine.device) if per_node else count
    parts: list[dict[str, tuple[float, Tensor, Tensor | None]]] = [{} for _ in sets]
    for name, batches in measured.items():
        mean, local = (_summed(x, each, rows, num_local) for x, each in zip(zip(*batches), weights))
        mean = everyone(mean, comm, engine.device) if per_node else mean
        local = nodes.expanded(local, num_local) / nodes.expanded(local_count, num_local)
        local = everyone(local, comm, engine.device)
        for part, total, examples, of_nodes in zip(parts, mean.view(C, -1), counts.view(C, -1), local.view(C, -1)):
            part[name] = float(total.sum() / examples.sum()), of_nodes, total / examples if per_node else None
    # Nodes that have something to be measured by; None, also if nobody has: all.
    some = [(x.nonzero()[:, 0].tolist() or None) if per_node and given else None for x in counts.view(C, -1)]
    return [_columns(part, engine.model, members, measurable) for part, measurable in zip(parts, some)]


def _summed(values: Sequence[Tensor], weights: Sequence[Any], rows: Sequence[Tensor | None], num_local: int) -> Tensor:
    """Sum over the examples, or tokens, from means over batches with these weights, in the order of the batches."""
    total = torch.zeros((), dtype=torch.float64)
    for x, weight, at in zip(values, weights, rows):
        sums = x.double() * weight
        if isinstance(weight, Tensor):
            sums = sums.masked_fill(weight == 0, 0.0)  # a mean over nothing may be nan
        total = total + (sums if at is None else sums.new_zeros(num_local).index_copy(0, at, sums))
    return total


def _columns(
    measured: dict[str, tuple[float, Tensor, Tensor | None]], model: nn.Module, members: Sequence[int] | None,
    some: Sequence[int] | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the columns of means over the examples, by name: of the averaged model, and of each node, `[K]`.

    The third is the averaged model's on each node's own examples, `[K]`, if nodes have their own.
    """
    if some is not None:
        members = [node for node in some if members is None or node in members]
    loss, losses, of_each = measured["loss"]
    for name, function in loss_metrics(model).items():
        if name in measured:
            raise ValueError(f"the model has two metrics called {name!r}, one of them in loss_metrics: rename it.")
        value = float(function(torch.tensor(loss, dtype=torch.float64)))
        measured[name] = value, function(losses), None if of_each is None else function(of_each)
    columns: dict[str, Any] = {"val_loss": loss, "val_loss_local": None, "val_losses": losses.numpy()}  # in this order
    for name, (average, per_node, each) in measured.items():
        local = float((per_node if members is None else per_node[list(members)]).mean())
        new = {f"val_{name}": average, f"val_{name}_local": local}
        new |= {} if each is None else spread_columns(f"val_{name}", each.numpy(), some)
        if name != "loss" and (taken := new.keys() & columns.keys()):
            raise ValueError(f"the model's metric {name!r} makes the column {min(taken)}, which exists: rename it.")
        columns |= new
    return columns


def spread_columns(name: str, values: np.ndarray, some: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the columns of a metric that the run's model has on each node's own examples, `[K]`.

    The values themselves; their 10th, 50th and 90th percentile; and the means of the lowest and the highest tenth of
    the nodes, at least one: the worst decile is the lowest of an accuracy, and the highest of a loss. All but the
    values are of the nodes `some`; None: of all.

    >>> columns = spread_columns("val_accuracy", np.linspace(0.0, 1.0, 21))
    >>> list(columns)[:3], [round(float(x), 3) for x in list(columns.values())[1:]]
    (['val_accuracy_each', 'val_accuracy_p10', 'val_accuracy_p50'], [0.1, 0.5, 0.9, 0.025, 0.975])
    """
    counting = values if some is None else values[list(some)]
    ordered, tenth = np.sort(counting), max(1, round(len(counting) / 10))
    ends = {"lowest_tenth": ordered[:tenth], "highest_tenth": ordered[-tenth:]}
    quantiles = dict(zip(("p10", "p50", "p90"), np.quantile(counting, [0.1, 0.5, 0.9]).tolist()))
    summaries = {**quantiles, **{end: float(some.mean()) for end, some in ends.items()}}
    return {f"{name}{EACH}": values, **{f"{name}_{key}": value for key, value in summaries.items()}}


def _batches(distinct: Sequence[EvalBatches], num_configs: int, num_local: int) -> Iterator[Piece]:
    """Yield a batch of each distinct set, their size, and the rows of the nodes that read them; None: all.

    If models have their own batches, they are `[n, B, ...]`: one for each node, or `[1, B, ...]` for all.
    """
    num_nodes, per_node = num_local // num_configs, distinct[0].per_node
    # To the end of each set, which then keeps its batches.
    for *batches_and_sizes, at in zip(*distinct, distinct[0].places, strict=True):
        batches, (size, *_) = zip(*batches_and_sizes)
        if len(distinct) > 1 and not per_node:
            batches = tuple(tree.map_leaves(lambda x: x[None], batch) for batch in batches)
        rows = None if at is None else torch.tensor([num_nodes * c + row for c in range(num_configs) for row in at])
        yield batches, size, rows


def averages(values: Tree, num_configs: int, comm: Collectives, members: Sequence[int] | None = None) -> Tree:
    """Return the average of each of C configurations, `[C, *]`; see `average`. `members` belong to a single one.

    >>> from vecgym.collectives import StackedCollectives
    >>> averages({"w": torch.tensor([1.0, 3.0, 4.0, 6.0])}, 2, StackedCollectives(4))
    {'w': tensor([2., 5.])}
    """
    if num_configs == 1:
        return tree.map(lambda x: x[None], average(values, comm, members))
    return tree.map(lambda x: x if len(x) in (1, num_configs) else nodes.means(x, num_configs), values)


def distances_of(params: Tree, comm: Collectives, members: Sequence[Sequence[int] | None]) -> list[Tensor]:
    """Return the `distance_of` the nodes of each of C configurations, where the parameters are.

    Args:
        members: of each configuration, of whose nodes `comm` is then; None: all.

    >>> from vecgym.collectives import StackedCollectives
    >>> distances_of({"w": torch.tensor([1.0, 3.0, 4.0, 6.0])}, StackedCollectives(2), [None, [1]])
    [tensor(1.), tensor(0.)]
    """
    if not (comm.native or any(some is not None for some in members)):
        return list(nodes.squared_consensus_distance(comm.everyone(params), len(members)).sqrt())
    parts = zip(*[x.chunk(len(members)) for x in params.values()])
    return [distance_of(dict(zip(params, part)), comm, some) for part, some in zip(parts, members)]


def evaluated_columns(
    engine: Engine, state: Any, sets: Sequence[EvalBatches | None], comm: Collectives, result: Result | None = None
) -> list[dict[str, Any]]:
    """Return the columns that an evaluation adds to the history of each of C configurations, measured together.

    It measures in eval mode, without changing the state or any random state: the loss; the metrics that the model's
    `val_metrics(batch)` returns, each a mean over the examples, or over what their "weight" counts (see
    `Engine.measures`); and the functions of the mean loss in the model's attribute `loss_metrics`, a dict such as
    `{"perplexity": torch.exp}`. Where nodes have their own validation sets, the means of the run's model are over the
    examples of all, and there are `spread_columns`.

    Args:
        state: has the `step`, and each node's `params` and `buffers`, `[1 or L, *]`.
        sets: the validation batches of each configuration. Their nodes are those of `comm`, one configuration after the
            other; if C > 1, all of them are in this process.
        result: what the run's model is the mean of; None: of all nodes' parameters.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.models import Line
    >>> from vecgym.simulation import State
    >>> params = {"w": torch.tensor([1.0, 3.0, 4.0, 6.0])}  # two configurations of two nodes
    >>> state = State(1, own={"params": params, "buffers": {}}, shared={"buffers": {}})
    >>> batches = EvalBatches(torch.tensor([2.0, 2.0]), batch_size=2)
    >>> rows = evaluated_columns(Engine(Line()), state, [batches] * 2, StackedCollectives(4))
    >>> [(columns["val_loss"], columns["val_loss_local"], columns["consensus_distance"]) for columns in rows]
    [(0.0, 1.0, 1.0), (9.0, 10.0, 1.0)]
    """
    val_sets = [batches for batches in sets if batches is not None]
    params, buffers = state.params, state.buffers
    result = result or Result(params)
    if state.step == 0 and result.params is params:  # all nodes of a configuration begin alike
        params, buffers = (tree.map(lambda x: x[:: max(1, len(x) // len(sets))], y) for y in (params, buffers))
        result = result._replace(params=params)
    with torch.no_grad():
        measured, whose = _measured(engine, (params, buffers), val_sets, comm, result) if val_sets else ({}, [])
        distances = distances_of(params, comm, [result.members] * len(sets)) if state.step > 0 else []
        measured, distances = fetched((measured, distances))
        rows: list[dict[str, Any]] = [{} for _ in sets]
        if val_sets:
            rows = _columns_of_each(measured, whose, val_sets, comm, engine, result.of_local)
    for columns, distance in zip(rows, distances):
        columns["consensus_distance"] = float(distance)
    memory = peak_bytes(engine.device)
    return [{**columns, "memory_bytes": memory} if columns else columns for columns in rows]


def loss_metrics(model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the functions of the mean validation loss that a model, or its `loss_fn`, defines, such as its perplexity.

    >>> model = nn.Linear(1, 1)
    >>> model.loss_metrics = {"perplexity": torch.exp}
    >>> loss_metrics(model)["perplexity"](torch.zeros(2)), loss_metrics(nn.Linear(1, 1))
    (tensor([1., 1.]), {})
    """
    metrics = getattr(vars(model).get(LOSS_FN), "loss_metrics", getattr(model, "loss_metrics", {}))
    if not isinstance(metrics, dict) or not all(isinstance(k, str) and callable(f) for k, f in metrics.items()):
        raise TypeError(
            f"the model's loss_metrics is {metrics!r}; it must be a dict of functions of a tensor of mean losses, such "
            'as {"perplexity": torch.exp}.'
        )
    return metrics


def everyone(x: Tensor, comm: Collectives, device: torch.device | None = None) -> Tensor:
    """Gather a value of all nodes, `[K, ...]`, in every process and on the CPU, from that of the nodes here.

    >>> from vecgym.collectives import StackedCollectives
    >>> everyone(torch.tensor([1.0, 3.0]), StackedCollectives(2))
    tensor([1., 3.])
    """
    if len(comm.node_ids) >= comm.num_nodes:  # all are here
        return x.cpu()
    return comm.everyone({"": x.to(device)})[""].cpu()


def among(values: Tree, comm: Collectives, members: Sequence[int] | None) -> tuple[Tree, Collectives]:
    """Return the values of some of the nodes, and the collectives among them; None: of all.

    >>> from vecgym.collectives import StackedCollectives
    >>> values, comm = among({"w": torch.tensor([1.0, 3.0, 5.0])}, StackedCollectives(3), [0, 2])
    >>> values, comm.num_nodes
    ({'w': tensor([1., 5.])}, 2)
    """
    if members is None:
        return values, comm
    ids = set(members)
    here = [row for row, node in enumerate(comm.node_ids.tolist()) if node in ids]
    # A process without any of them makes the same calls, with a row that nobody reads.
    return nodes.take_rows(values, torch.tensor(here or [0]), copy=False), comm.among(members)


@torch.no_grad()
def average(values: Tree, comm: Collectives, members: Sequence[int] | None = None) -> Tree:
    """Return the mean over the nodes `members`, `[*]`; integers are the first node's. See `vecgym.core.nodes.mean`.

    >>> from vecgym.collectives import StackedCollectives
    >>> values = {"w": torch.tensor([1.0, 3.0, 8.0])}
    >>> average(values, StackedCollectives(3)), average(values, StackedCollectives(3), members=[0, 1])
    ({'w': tensor(4.)}, {'w': tensor(2.)})
    """
    values, comm = among(values, comm, members)
    if not comm.native:
        return nodes.mean(comm.everyone(values))
    with comm.ledger.recording():  # not counted
        first = comm.broadcast(values, 0)
        wide = {
            name: x.to(tree.wider(x.dtype)) for name, x in values.items() if x.is_floating_point() or x.is_complex()
        }
        shift = comm.mean({name: x - first[name] for name, x in wide.items()})
    return {name: (x + shift[name] if name in shift else x)[0].to(x.dtype) for name, x in first.items()}


@torch.no_grad()
def distance_of(params: Tree, comm: Collectives, members: Sequence[int] | None = None) -> Tensor:
    """Return `consensus_distance` where the parameters are, `[]`: on a device, without waiting for it.

    >>> from vecgym.collectives import StackedCollectives
    >>> distance_of({"w": torch.tensor([1.0, 3.0])}, StackedCollectives(2))
    tensor(1.)
    """
    params, comm = among(params, comm, members)
    if not comm.native:
        return nodes.consensus_distance(comm.everyone(params))
    floats = {name: x for name, x in params.items() if x.is_floating_point()}
    if not floats:
        return torch.zeros(())
    with comm.ledger.recording():  # not counted
        shifted = tree.map(torch.sub, floats, comm.broadcast(floats, 0))
        away = tree.map(torch.sub, shifted, comm.mean(shifted))
        squares = [x.reshape(len(x), -1).square().sum(1) for x in away.values()]  # [1 or L] each
        return comm.mean(sum(squares, torch.zeros_like(squares[0])))[0].sqrt()


def correlation(params: Tree, comm: Collectives, members: Sequence[int] | None = None) -> float:
    """Return `vecgym.core.nodes.correlation`; every process gathers the parameters of all nodes.

    >>> from vecgym.collectives import StackedCollectives
    >>> round(correlation({"w": torch.tensor([[1.0, 2.0], [2.0, 1.0]])}, StackedCollectives(2)), 6)
    -1.0
    """
    params, comm = among(params, comm, members)
    return nodes.correlation(comm.everyone(params), comm.num_nodes)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory: allocated on CUDA, else resident in this process; on MPS the driver's current memory.

    >>> peak_bytes(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    import resource  # does not exist on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def recorded_of(strategy: Any, run: RunFacts, steps: int, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded columns of an evaluation after so many steps, with the privacy spent, if it is counted.

    Of an asynchronous run with a server none of each node, since all have its parameters.

    >>> from vecgym.strategy import ADPSGDStrategy, AsyncStrategy
    >>> columns = {"val_loss": 1.0, "val_loss_local": 1.0, "val_losses": [1.0, 1.0], "consensus_distance_before": 0.0}
    >>> run = RunFacts(num_nodes=2)
    >>> recorded_of(AsyncStrategy(), run, 1, columns), list(recorded_of(ADPSGDStrategy(), run, 1, columns))
    ({'val_loss': 1.0}, ['val_loss', 'val_loss_local', 'val_losses'])
    """
    if not strategy.asynchronous:
        epsilon = strategy.epsilon(run, steps)
        return columns if epsilon is None else {"epsilon": epsilon, **columns}
    if strategy.server_of(run.num_nodes) is None:
        return {name: x for name, x in columns.items() if name != "consensus_distance_before"}
    return {name: x for name, x in columns.items() if not name.endswith("_local") and name not in OF_NODES}
