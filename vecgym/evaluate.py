"""What is measured of all nodes, wherever they are: averages, distances, validation losses.

Nothing here is a part of the training: no entry goes to the ledger.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecgym import nodes, tree
from vecgym.collectives import Collectives
from vecgym.data import EvalBatches
from vecgym.ledger import Ledger
from vecgym.local import Engine
from vecgym.simulate import State
from vecgym.tree import Tree


class Evaluation(NamedTuple):
    """Mean losses over the validation examples.

    >>> Evaluation(average=0.5, nodes=torch.tensor([1.0, 2.0])).nodes.mean()
    tensor(1.5000)
    """

    average: float  # of the averaged model ("global")
    nodes: Tensor  # [K]: of each node's own model ("local")


@torch.no_grad()
def evaluate(engine: Engine, state: State, batches: EvalBatches, comm: Collectives) -> Evaluation:
    """Evaluate in eval mode; neither the state nor any random state is changed.

    >>> from vecgym.collectives import StackedCollectives
    >>> class Line(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = torch.nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> state = State(0, {"w": torch.tensor([1.0, 3.0])}, {}, {}, {})
    >>> batches = EvalBatches(torch.tensor([2.0, 2.0]), batch_size=2)
    >>> evaluate(Engine(Line()), state, batches, StackedCollectives(2))
    Evaluation(average=0.0, nodes=tensor([1., 1.], dtype=torch.float64))
    """
    values = state.params, state.buffers
    means = [tree.map(lambda x: x[None], average(x, comm)) for x in values]
    num_local = len(comm.node_ids)
    lone = num_local == 1 < comm.num_nodes  # [1, *] is then this node's own
    same = not lone and all(x.shape[0] == 1 for x in tree.leaves(values))
    # With a validation set of its own for each node, the averaged model has a loss on each.
    global_sum = torch.zeros(num_local if batches.per_node else 1, dtype=torch.float64)
    local_sum = torch.zeros(num_local, dtype=torch.float64)
    count = 0
    for batch, size in batches:
        losses = engine.losses(means[0], means[1], batch, own_batches=batches.per_node).cpu().double()
        global_sum += losses * size
        if not same:
            losses = engine.losses(*values, batch, own_batches=batches.per_node).cpu().double()
        local_sum += losses * size
        count += size
    if batches.per_node:
        global_sum = everyone(global_sum, comm, engine.device)
    return Evaluation(float(global_sum.mean() / count), everyone(local_sum / count, comm, engine.device))


def everyone(x: Tensor, comm: Collectives, device: torch.device | None = None) -> Tensor:
    """A value of each node here, `[L, ...]`, as one of all nodes, `[K, ...]`, in every process and on the CPU.

    >>> from vecgym.collectives import StackedCollectives
    >>> everyone(torch.tensor([1.0, 3.0]), StackedCollectives(2))
    tensor([1., 3.])
    """
    return comm.everyone({"": x.to(device)})[""].cpu()


@torch.no_grad()
def average(values: Tree, comm: Collectives) -> Tree:
    """The mean over all nodes, `[*]`; integers: those of node 0. See `vecgym.nodes.mean`.

    >>> from vecgym.collectives import StackedCollectives
    >>> average({"w": torch.tensor([1.0, 3.0])}, StackedCollectives(2))
    {'w': tensor(2.)}
    """
    if not comm.native:
        return nodes.mean(comm.everyone(values))
    aside = _unrecorded(comm)
    first = aside.broadcast(values, 0)
    moved = {name: x - first[name] for name, x in values.items() if x.is_floating_point() or x.is_complex()}
    shift = aside.mean(moved)
    return {name: (x + shift[name] if name in shift else x)[0] for name, x in first.items()}


@torch.no_grad()
def consensus_distance(params: Tree, comm: Collectives) -> float:
    """See `vecgym.nodes.consensus_distance`; between processes only sums cross.

    >>> from vecgym.collectives import StackedCollectives
    >>> consensus_distance({"w": torch.tensor([1.0, 3.0])}, StackedCollectives(2))
    1.0
    """
    if not comm.native:
        return float(nodes.consensus_distance(comm.everyone(params)))
    aside = _unrecorded(comm)
    floats = {name: x for name, x in params.items() if x.is_floating_point()}
    seen = tree.map(torch.sub, floats, aside.broadcast(floats, 0))
    away = tree.map(torch.sub, seen, aside.mean(seen))
    squares = [x.reshape(len(x), -1).square().sum(1) for x in away.values()]  # [1 or L] each
    return float(aside.mean(sum(squares, torch.zeros_like(squares[0])))[0].sqrt()) if squares else 0.0


def correlation(params: Tree, comm: Collectives) -> float:
    """See `vecgym.nodes.correlation`; every process gathers the parameters of all nodes.

    >>> from vecgym.collectives import StackedCollectives
    >>> round(correlation({"w": torch.tensor([[1.0, 2.0], [2.0, 1.0]])}, StackedCollectives(2)), 6)
    -1.0
    """
    return nodes.correlation(comm.everyone(params), comm.num_nodes)


def _unrecorded(comm: Collectives) -> Collectives:
    twin: Any = copy.copy(comm)
    twin.ledger = Ledger()
    return twin
