"""What is measured of all nodes, wherever they are: averages, distances, validation losses.

Nothing here is a part of the training: no entry goes to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives
from vecgym.core import nodes, tree
from vecgym.core.tree import Tree
from vecgym.data import EvalBatches
from vecgym.engine import Engine
from vecgym.engine.simulation import State


class Evaluation(NamedTuple):
    """Means over the validation examples.

    >>> accuracy = (0.75, torch.tensor([0.5, 1.0]))
    >>> found = Evaluation(average=0.5, nodes=torch.tensor([1.0, 2.0]), more={"accuracy": accuracy})
    >>> found.columns["val_loss_local"], found.columns["val_accuracy"], found.columns["val_accuracy_local"]
    (1.5, 0.75, 0.75)
    """

    average: float  # loss of the averaged model ("global")
    nodes: Tensor  # [K]: loss of each node's own model ("local")
    more: dict[str, tuple[float, Tensor]]  # the same two of everything else that the model offers, by name

    @property
    def columns(self) -> dict[str, Any]:
        """What the history records of it."""
        local = self.nodes.numpy()
        found = {"val_loss": self.average, "val_loss_local": float(local.mean()), "val_losses": local}
        for name, (average, each) in self.more.items():
            found |= {f"val_{name}": average, f"val_{name}_local": float(each.mean())}
        return found


@torch.no_grad()
def evaluate(engine: Engine, state: State, batches: EvalBatches, comm: Collectives) -> Evaluation:
    """Evaluate in eval mode; neither the state nor any random state is changed.

    Measured are the loss; what the model's `val_metrics(batch)` gives beside it, each a mean over the examples (see
    `Engine.measures`); and the functions of the mean loss in its attribute `loss_metrics`, a dict such as
    `{"perplexity": torch.exp}`.

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
    Evaluation(average=0.0, nodes=tensor([1., 1.], dtype=torch.float64), more={})
    """
    values = state.params, state.buffers
    means = [tree.map(lambda x: x[None], average(x, comm)) for x in values]
    num_local = len(comm.node_ids)
    lone = num_local == 1 < comm.num_nodes  # [1, *] is then this node's own
    same = not lone and all(x.shape[0] == 1 for x in tree.leaves(values))
    # With a validation set of its own for each node, the averaged model has a loss on each.
    totals: dict[str, list[Tensor]] = {}  # of the averaged model, [1 or L], and of each node, [L]
    count = 0
    for batch, size in batches:
        found = engine.measures(means[0], means[1], batch, own_batches=batches.per_node)
        own = found if same else engine.measures(*values, batch, own_batches=batches.per_node)
        for name, x in found.items():
            mean, each = totals.setdefault(name, [torch.zeros((), dtype=torch.float64)] * 2)
            totals[name] = [mean + x.cpu().double() * size, each + own[name].cpu().double() * size]
        count += size
    result: dict[str, tuple[float, Tensor]] = {}
    for name, (mean, each) in totals.items():
        if batches.per_node:
            mean = everyone(mean, comm, engine.device)
        result[name] = float(mean.mean() / count), everyone(each.expand(num_local) / count, comm, engine.device)
    loss, losses = result.pop("loss")
    for name, function in loss_metrics(engine.model).items():
        result[name] = float(function(torch.tensor(loss, dtype=torch.float64))), function(losses)
    if wrong := [name for name in result if name in ("loss_local", "losses")]:
        raise ValueError(f"the model offers a metric called {wrong[0]!r}, which is a column already: rename it.")
    return Evaluation(loss, losses, result)


def loss_metrics(model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """The functions of the mean validation loss that a model offers, such as its perplexity.

    >>> model = nn.Linear(1, 1)
    >>> model.loss_metrics = {"perplexity": torch.exp}
    >>> loss_metrics(model)["perplexity"](torch.zeros(2)), loss_metrics(nn.Linear(1, 1))
    (tensor([1., 1.]), {})
    """
    found = getattr(model, "loss_metrics", {})
    if not isinstance(found, dict) or not all(isinstance(k, str) and callable(f) for k, f in found.items()):
        raise TypeError(
            f"the model's loss_metrics is {found!r}; it must be a dict of functions of a tensor of mean losses, such "
            'as {"perplexity": torch.exp}.'
        )
    return found


def everyone(x: Tensor, comm: Collectives, device: torch.device | None = None) -> Tensor:
    """A value of each node here, `[L, ...]`, as one of all nodes, `[K, ...]`, in every process and on the CPU.

    >>> from vecgym.collectives import StackedCollectives
    >>> everyone(torch.tensor([1.0, 3.0]), StackedCollectives(2))
    tensor([1., 3.])
    """
    return comm.everyone({"": x.to(device)})[""].cpu()


@torch.no_grad()
def average(values: Tree, comm: Collectives) -> Tree:
    """Return the mean over all nodes, `[*]`; integers: those of node 0. See `vecgym.core.nodes.mean`.

    >>> from vecgym.collectives import StackedCollectives
    >>> average({"w": torch.tensor([1.0, 3.0])}, StackedCollectives(2))
    {'w': tensor(2.)}
    """
    if not comm.native:
        return nodes.mean(comm.everyone(values))
    with comm.ledger.recording():  # not counted
        first = comm.broadcast(values, 0)
        moved = {name: x - first[name] for name, x in values.items() if x.is_floating_point() or x.is_complex()}
        shift = comm.mean(moved)
    return {name: (x + shift[name] if name in shift else x)[0] for name, x in first.items()}


@torch.no_grad()
def consensus_distance(params: Tree, comm: Collectives) -> float:
    """Return `vecgym.core.nodes.consensus_distance`; between processes only sums cross.

    >>> from vecgym.collectives import StackedCollectives
    >>> consensus_distance({"w": torch.tensor([1.0, 3.0])}, StackedCollectives(2))
    1.0
    """
    if not comm.native:
        return float(nodes.consensus_distance(comm.everyone(params)))
    floats = {name: x for name, x in params.items() if x.is_floating_point()}
    if not floats:
        return 0.0
    with comm.ledger.recording():  # not counted
        seen = tree.map(torch.sub, floats, comm.broadcast(floats, 0))
        away = tree.map(torch.sub, seen, comm.mean(seen))
        squares = [x.reshape(len(x), -1).square().sum(1) for x in away.values()]  # [1 or L] each
        return float(comm.mean(sum(squares, torch.zeros_like(squares[0])))[0].sqrt())


def correlation(params: Tree, comm: Collectives) -> float:
    """Return `vecgym.core.nodes.correlation`; every process gathers the parameters of all nodes.

    >>> from vecgym.collectives import StackedCollectives
    >>> round(correlation({"w": torch.tensor([[1.0, 2.0], [2.0, 1.0]])}, StackedCollectives(2)), 6)
    -1.0
    """
    return nodes.correlation(comm.everyone(params), comm.num_nodes)
