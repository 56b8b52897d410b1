"""Stacked node state: from one module to K nodes and back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from vecgym.core import check, tree
from vecgym.core.devices import on_host, placed
from vecgym.core.tree import Tree

M = TypeVar("M", bound=nn.Module)
LOSS_FN = "vecgym_loss_fn"  # the attribute of a model that holds a function in place of its forward


def expand(values: Tree, num_nodes: int) -> Tree:
    """Expand `[1 or L, *]` to `[L, *]` without a copy; see `expanded`.

    >>> expand({"w": torch.ones(1, 2)}, 3)["w"].shape
    torch.Size([3, 2])
    """
    return tree.map(functools.partial(expanded, num_nodes=num_nodes), values)


def expanded(x: Tensor, num_nodes: int) -> Tensor:
    """Expand `[1 or L, *]` to `[L, *]` without a copy; `[C, *]`, one row for every L / C nodes, is copied.

    >>> expanded(torch.tensor([1.0, 2.0]), 4)
    tensor([1., 1., 2., 2.])
    """
    once = x.shape[0] in (1, num_nodes)
    return x.expand(num_nodes, *x.shape[1:]) if once else x.repeat_interleave(num_nodes // x.shape[0], 0)


def widened(values, num_nodes: int):
    """Expand every `[1 or C or L, *]` tensor of a nested tree to `[L, *]` in writable storage; see `expanded`.

    >>> widened({"w": torch.tensor([1.0])}, 2)
    {'w': tensor([1., 1.])}
    """
    return tree.map_leaves(lambda x: x if len(x) == num_nodes else x.repeat_interleave(num_nodes // len(x), 0), values)


def mean(values: Tree, members: Sequence[int] | None = None) -> Tree:
    """Average over the node dimension, `[L, *]` -> `[*]`, or over the nodes `members`.

    Integers and booleans are taken from the first node. The average is computed relative to that node, so that the
    average of equal nodes is exactly their value.

    >>> values = {"w": torch.tensor([[1.0], [3.0], [5.0]]), "count": torch.tensor([4, 5, 6])}
    >>> mean(values), mean(values, members=[1, 2])
    ({'w': tensor([3.]), 'count': tensor(4)}, {'w': tensor([4.]), 'count': tensor(5)})
    """
    rows = slice(None) if members is None else list(members)
    return tree.map(lambda x: x[0] if x.stride(0) == 0 or len(x) == 1 else means(x[rows], 1)[0], values)


def means(x: Tensor, number: int) -> Tensor:
    """Average `number` groups of consecutive rows, all of one size: `[L, *]` -> `[number, *]`; see `mean`.

    >>> means(torch.tensor([1.0, 3.0, 10.0, 20.0]), 2)
    tensor([ 2., 15.])
    """
    y = x.unflatten(0, (number, -1))
    if y.shape[1] == 1 or not (x.is_floating_point() or x.is_complex()):  # nothing to average, and no rounding
        return y[:, 0]
    y = y.to(tree.wider(x.dtype))
    return (y[:, 0] + (y - y[:, :1]).mean(1)).to(x.dtype)


def consensus_distance(params: Tree) -> Tensor:
    """Return the root mean square distance of the nodes to their mean: sqrt(mean_i |theta_i - mean|^2).

    >>> consensus_distance({"w": torch.tensor([[1.0, 0.0], [-1.0, 0.0]])})
    tensor(1.)
    """
    return squared_consensus_distance(params).sqrt()


def squared_consensus_distance(params: Tree, number: int | None = None) -> Tensor:
    """Average the nodes' squared distances to their mean: mean_i |theta_i - mean|^2.

    Args:
        number: of groups of consecutive rows, all of one size, which have their own means; the result is `[number]`.

    >>> squared_consensus_distance({"w": torch.tensor([[2.0, 0.0], [-2.0, 0.0]])})
    tensor(4.)
    >>> squared_consensus_distance({"w": torch.tensor([1.0, -1.0, 5.0, 1.0])}, 2)
    tensor([1., 4.])
    """

    def summed(x: Tensor) -> Tensor:
        away = x - x[:, :1]  # relative to node 0, equal nodes are at exactly 0, and so is the distance
        away = away.sub_(away.mean(1, keepdim=True))
        if tree.differentiated(away):
            return away.square().flatten(1).sum(1) / x.shape[1]
        # A sum for each group alone: how a sum over the rows of several groups is rounded depends on their number.
        return torch.stack([y.square().sum() for y in away]) / x.shape[1]

    groups = [x.unflatten(0, (number or 1, -1)) for x in params.values() if x.is_floating_point()]
    squares = [summed(x) for x in groups if x.shape[1] > 1]
    distances = torch.stack(squares, 1).sum(1) if squares else torch.zeros(number or 1)
    return distances[0] if number is None else distances


def correlation(params: Tree, num_nodes: int) -> float:
    """Return the mean Pearson correlation between the parameters of each pair of nodes; 1 if all are equal.

    >>> round(correlation({"w": torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])}, 2), 6)
    -1.0
    >>> round(correlation({"w": torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "b": torch.tensor([3.0, 3.0])}, 2), 6)
    0.5
    """
    wide = [x for x in params.values() if x.is_floating_point() and x.shape[0] > 1]
    if num_nodes == 1 or all(torch.equal(x, x[:1].expand_as(x)) for x in wide):
        return 1.0
    # The vectors are long and need not be concatenated: means and Gram matrix are sums over the tensors.
    values = [expanded(x, num_nodes).reshape(num_nodes, -1).double() for x in params.values() if x.is_floating_point()]
    length = sum(x.shape[1] for x in values)
    center = torch.stack([x.sum(1) for x in values]).sum(0, keepdim=True).T / length  # [K, 1]
    gram = torch.stack([(x - center) @ (x - center).T for x in values]).sum(0)  # [K, K]
    scale = gram.diagonal().sqrt()
    corr = gram / (scale[:, None] * scale[None, :])
    return float((corr.sum() - corr.diagonal().sum()) / (num_nodes * (num_nodes - 1)))


@dataclass
class Nodes(Generic[M]):
    """The final state of all nodes, one stacked tensor `[K, *shape]` for each parameter and buffer.

    A parameter that is the same on every node is stored once and expanded.

    Attributes:
        params, buffers: the parameters and buffers of every node.
        members: the available nodes, whose mean is the run's model; None: all.
        result: parameters `[K, *]` whose mean is the run's model if it is not the mean of `params`, such as a server's.
        trained: the nodes whose buffers' mean is the run's model's, if these are not the `members`.

    >>> weights = torch.tensor([[[1.0]], [[3.0]]])
    >>> nodes = Nodes(nn.Linear(1, 1, bias=False), num_nodes=2, params={"weight": weights}, buffers={})
    >>> nodes, len(nodes)
    (Nodes(2 x Linear, 1 parameters each), 2)
    >>> nodes.module(1).weight.item(), nodes.average().weight.item(), nodes.consensus_distance()
    (3.0, 2.0, 1.0)
    >>> nodes.averaged, Nodes(nodes.model, 2, {"weight": weights}, {}, members=[1]).averaged  # node 0 was absent
    ({'weight': tensor([[2.]])}, {'weight': tensor([[3.]])})
    """

    model: M
    num_nodes: int
    params: Tree
    buffers: Tree
    members: Sequence[int] | None = None
    result: Tree | None = None
    trained: Sequence[int] | None = None

    def __len__(self) -> int:
        return self.num_nodes

    def module(self, node: int) -> M:
        """Return a copy of the model with the parameters and buffers of one node."""
        node = check.index("node", node, self.num_nodes)
        return fill(self.model, {name: x[node] for name, x in {**self.params, **self.buffers}.items()})

    def average(self) -> M:
        """Return a copy of the run's model: the average of the nodes' parameters and floating-point buffers.

        Integer buffers (counters) are those of the first node.
        """
        return fill(self.model, self.averaged)

    @property
    def averaged(self) -> Tree:
        """The values of `average()`, `[*]`."""
        of_buffers = self.members if self.trained is None else self.trained
        return mean({**self.params, **(self.result or {})}, self.members) | mean(self.buffers, of_buffers)

    def consensus_distance(self) -> float:
        """Return the nodes' root mean square distance to their average; see `vecgym.core.nodes.consensus_distance`."""
        params = self.params if self.members is None else take_rows(self.params, torch.tensor(self.members), copy=False)
        return float(consensus_distance(params))

    def __repr__(self) -> str:
        count = sum(x[0].numel() for x in self.params.values())
        return f"Nodes({self.num_nodes} x {type(self.model).__name__}, {count:,} parameters each)"


def fill(model: M, values: Tree) -> M:
    """Return a copy of `model` that holds `values`; tied weights stay tied, frozen parameters frozen.

    >>> fill(nn.Linear(1, 1, bias=False), {"weight": torch.tensor([[7.0]])}).weight.item()
    7.0
    """
    filled = copy.deepcopy(model)
    vars(filled).pop(LOSS_FN, None)
    device = next(iter(values.values())).device if values else torch.device("cpu")
    filled.to(device)
    tensors = {**dict(filled.named_parameters()), **dict(filled.named_buffers())}
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)
    return filled


def take_rows(values, rows: Tensor, copy: bool = True):
    """Take rows of every `[L, *]` tensor of a nested tree; a `[1, *]` tensor is cloned if `copy`, else returned as is.

    >>> take_rows({"w": torch.tensor([1.0, 2.0, 3.0]), "step": torch.tensor([7])}, torch.tensor([0, 2]))
    {'w': tensor([1., 3.]), 'step': tensor([7])}
    """
    rows_on = functools.cache(functools.partial(placed, rows))  # one copy for each device

    def take(x: Tensor) -> Tensor:
        return x[rows_on(x.device)] if x.shape[0] > 1 else x.clone() if copy else x

    return tree.map_leaves(take, values)


def join_rows(parts, sizes: Sequence[int] | None = None):
    """Concatenate nested trees along their rows, such as one `[1, *]` tree per node. A tensor that a part lacks is 0.

    Args:
        sizes: the number of rows of each part; None: a part that lacks a tensor has as many rows as the first with it.

    >>> join_rows([{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0]), "v": torch.tensor([3.0])}])
    {'w': tensor([1., 2.]), 'v': tensor([0., 3.])}
    """
    there = next((x for x in parts if x is not None), None)
    if isinstance(there, dict):
        names = dict.fromkeys(name for x in parts if x is not None for name in x)
        new = {name: join_rows([None if x is None else x.get(name) for x in parts], sizes) for name in names}
        return new if type(there) is dict else type(there)(new)
    if not isinstance(there, Tensor):
        return tree.map_leaves(lambda *rows: torch.cat(rows), *parts)
    rows = [len(there)] * len(parts) if sizes is None else sizes
    return torch.cat([there.new_zeros(n, *there.shape[1:]) if x is None else x for x, n in zip(parts, rows)])


def put_rows(values, rows: Tensor, new, num_nodes: int, inplace: bool):
    """Replace rows of `values`, `[1 or L, *]`, with those of `new`, and return `[L, *]`.

    A tensor that is `[1, *]` in both and has not changed stays `[1, *]`. On a device, where values are not read, only
    the same object counts as unchanged. A tensor that is only in `new` is 0 in the other rows.

    >>> put_rows({"w": torch.tensor([5.0])}, torch.tensor([1]), {"w": torch.tensor([9.0])}, 3, inplace=True)
    {'w': tensor([5., 9., 5.])}
    """
    rows_on = functools.cache(functools.partial(placed, rows))  # one copy for each device

    def put(x: Tensor, old: Tensor | None) -> Tensor:
        if num_nodes == 1:  # all rows are new; `old` may share the storage
            return x
        if old is None:
            old = torch.zeros_like(x[:1])
        elif old.shape[0] == x.shape[0] == 1 and (old is x or (on_host(x) and torch.equal(old, x))):
            return old
        index = rows_on(x.device)
        source = x.expand(len(rows), *x.shape[1:])
        if old.shape[0] == num_nodes and inplace:
            return old.index_copy_(0, index, source)
        wide = old.expand(num_nodes, *old.shape[1:])
        return wide.clone().index_copy_(0, index, source) if inplace else wide.index_copy(0, index, source)

    return tree.map_leaves(put, new, values)


def unshared(state: Any, overwritten: Any) -> Any:
    """Clone the tensors of a tree that share memory with another.

    >>> params = {"w": torch.ones(2)}
    >>> unshared({"kept": params["w"][:1]}, params)["kept"].data_ptr() == params["w"].data_ptr()
    False
    """
    memory = set(tree.places(x for x in tree.leaves(overwritten) if x.numel()))
    return tree.map_leaves(lambda x: x.clone() if memory.intersection(tree.places([x])) else x, state)
