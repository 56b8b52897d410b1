"""The collectives: what strategies may do between nodes, whatever carries it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from vecgym import tree
from vecgym.ledger import Ledger
from vecgym.topology import Groups, Mixing
from vecgym.tree import Tree

T = TypeVar("T", Tensor, Tree)


class Collectives(ABC):
    """Operations on tensors `[L, *]`, or trees of them, of the L nodes that this process holds.

    A node dimension of size 1 may come in, meaning "the same on every node", and comes out whenever the
    result is the same on every node. All operations are differentiable, and each call writes one entry into
    the ledger, whatever the values are.

    Attributes:
        num_nodes: K, the nodes that take part.
        node_ids: the global ids of the nodes in this process, `[L]`.
        ledger: the record of what was sent.

    >>> from vecgym.collectives import StackedCollectives
    >>> comm, x = StackedCollectives(4), torch.tensor([1.0, 2.0, 3.0, 6.0])
    >>> comm.mean(x), comm.mean(x, groups=[[0, 1], [2, 3]]), comm.mean(x, weights=[1, 1, 0, 0])
    (tensor([3.]), tensor([1.5000, 1.5000, 4.5000, 4.5000]), tensor([1.5000]))
    >>> comm.sum(x), comm.server_mean(x, participants=[0, 3]), comm.broadcast(x, src=2)
    (tensor([12.]), tensor([3.5000]), tensor([3.]))
    >>> comm.all_gather(x), comm.permute(x, [3, 0, 1, 2]), comm.mix(x, torch.full((4, 4), 0.25))
    (tensor([[1., 2., 3., 6.]]), tensor([6., 1., 2., 3.]), tensor([3., 3., 3., 3.]))
    >>> comm.mean({"w": x})["w"], comm.everyone({"w": x})["w"], len(comm.ledger)
    (tensor([3.]), tensor([1., 2., 3., 6.]), 10)
    """

    num_nodes: int
    node_ids: Tensor
    ledger: Ledger

    # Whether results differ from those of one process in the last bits, since other hands add up.
    native: bool = False

    def everyone(self, x: Tree) -> Tree:
        """The values of all nodes, `[L, *] -> [K, *]`: to look at a run from outside. Not a part of it: no entry."""
        return x

    # What a backend implements, for one tensor.

    @abstractmethod
    def _sum(self, x: Tensor, groups: Groups | None, average: bool) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, src: int) -> Tensor: ...

    @abstractmethod
    def _permute(self, x: Tensor, source: Tensor) -> Tensor: ...

    @abstractmethod
    def _mix(self, x: Tensor, weights: Tensor) -> Tensor: ...

    def _mix_inplace(self, x: Tensor, mixing: Mixing) -> Tensor:
        """`_mix` where `x` may be overwritten; override it where that is faster."""
        return self._mix(x, mixing.weights)

    def _apply(self, x: T, operation: Callable[[Collectives, Tensor], Tensor]) -> T:
        """`operation(self, y)` for every tensor y of `x`. A backend that sends things may join the tensors first."""
        return map_tensors(x, lambda y: operation(self, y))

    # What strategies call.

    def mean(self, x: T, groups: Groups | None = None, weights: Sequence[float] | None = None) -> T:
        """Average over all nodes, `[L, *] -> [1, *]`; over each group of node ids, `[L, *] -> [L, *]`.

        Groups are disjoint; a node in no group keeps its own value and sends nothing. With `weights`, one number
        >= 0 for each of the K nodes: sum_i w_i x_i / sum_i w_i, over all nodes or over each group.
        """
        self._record_reduction("mean", x, groups)
        if weights is not None:
            x = self._scaled(x, _shares(weights, groups, self.num_nodes))
        return self._apply(x, lambda comm, y: comm._sum(y, groups, average=True))

    def server_mean(self, x: T, participants: Sequence[int], weights: Sequence[float] | None = None) -> T:
        """A server's (weighted) average of what the participants send it, on every node: `[L, *] -> [1, *]`.

        Each participant sends its value up once, and gets the average back.
        """
        check_groups([participants], self.num_nodes)
        payload = payload_bytes(x)
        sent = payload * len(participants) / self.num_nodes
        self.ledger.record("server_mean", payload, sent, len(participants))
        if weights is None and len(participants) == self.num_nodes:
            return self._apply(x, lambda comm, y: comm._sum(y, None, average=True))
        chosen = set(participants)
        given = [1.0] * self.num_nodes if weights is None else weights
        used = [float(w) if i in chosen else 0.0 for i, w in enumerate(given)]
        x = self._scaled(x, _shares(used, None, self.num_nodes))
        return self._apply(x, lambda comm, y: comm._sum(y, None, average=True))

    def sum(self, x: T, groups: Groups | None = None) -> T:
        """Sum over all nodes, `[L, *] -> [1, *]`, or over each group; see `mean`."""
        self._record_reduction("sum", x, groups)
        return self._apply(x, lambda comm, y: comm._sum(y, groups, average=False))

    def all_gather(self, x: T) -> T:
        """Every node's value on every node: `[L, *] -> [1, K, *]`."""
        payload = payload_bytes(x)
        self.ledger.record("all_gather", payload, float(payload if self.num_nodes > 1 else 0), self.num_nodes)
        return self._apply(x, lambda comm, y: comm._all_gather(y))

    def broadcast(self, x: T, src: int) -> T:
        """The value of node `src` on every node: `[L, *] -> [1, *]`."""
        if not 0 <= src < self.num_nodes:
            raise ValueError(f"src={src} is not a node: there are {self.num_nodes}, 0 to {self.num_nodes - 1}.")
        payload = payload_bytes(x)
        sent = payload * (self.num_nodes - 1) / self.num_nodes
        self.ledger.record("broadcast", payload, sent, self.num_nodes)
        return self._apply(x, lambda comm, y: comm._broadcast(y, src))

    def permute(self, x: T, source: Sequence[int] | Tensor) -> T:
        """Node i receives the value of node `source[i]`: `[L, *] -> [L, *]`; `source` is a permutation."""
        order = torch.as_tensor(source, dtype=torch.long)
        nodes = torch.arange(self.num_nodes)
        if order.shape != nodes.shape or not torch.equal(order.sort().values, nodes):
            raise ValueError(
                f"source={order.tolist()} must be a permutation of 0..{self.num_nodes - 1}: "
                "one source for each node, and each node sends once."
            )
        payload = payload_bytes(x)
        senders = int((order != nodes).sum())
        self.ledger.record("permute", payload, payload * senders / self.num_nodes, senders)
        return self._apply(x, lambda comm, y: comm._permute(y, order))

    def mix(self, x: T, weights: Tensor | Mixing, inplace: bool = False) -> T:
        """x_i <- sum_j W_ij x_j with `weights` W `[K, K]`: `[L, *] -> [L, *]`.

        Node j sends to each i != j with W_ij != 0. A `Mixing` is a matrix looked at beforehand, for many exchanges.
        With `inplace`, `x` may be overwritten, and no derivatives are taken.
        """
        matrix = weights.weights if isinstance(weights, Mixing) else weights
        if matrix.shape != (self.num_nodes, self.num_nodes):
            raise ValueError(
                f"weights has shape {list(matrix.shape)}; mixing {self.num_nodes} nodes takes "
                f"[{self.num_nodes}, {self.num_nodes}]."
            )
        mixing = weights if isinstance(weights, Mixing) else Mixing.of(weights)
        payload = payload_bytes(x)
        self.ledger.record("mix", payload, payload * mixing.num_links / self.num_nodes, self.num_nodes)
        if not inplace:
            return self._apply(x, lambda comm, y: comm._mix(y, matrix))
        with torch.no_grad():
            return self._apply(x, lambda comm, y: comm._mix_inplace(y, mixing))

    def _scaled(self, x: T, factors: Tensor) -> T:
        """Multiply each node's value by its factor `[K]`."""
        mine = factors[self.node_ids]
        return map_tensors(x, lambda y: y * tree.per_node(mine.to(y.device), y))

    def _record_reduction(self, operation: str, x: Tensor | Tree, groups: Groups | None) -> None:
        payload = payload_bytes(x)
        sizes = [self.num_nodes] if groups is None else check_groups(groups, self.num_nodes)
        # Each of the n members of a group sends 2 (n - 1) / n payloads in a ring; averaged over all nodes.
        sent = payload * sum(2 * (n - 1) for n in sizes) / self.num_nodes
        self.ledger.record(operation, payload, sent, sum(n for n in sizes if n > 1))


def payload_bytes(x: Tensor | Tree) -> int:
    """Bytes of one node's part of a `[L, *]` tensor or tree.

    >>> payload_bytes({"w": torch.ones(8, 10), "b": torch.ones(1, 2, dtype=torch.float64)})
    56
    """
    values = [x] if isinstance(x, Tensor) else x.values()
    return sum(math.prod(y.shape[1:]) * y.element_size() for y in values)


def check_groups(groups: Groups, num_nodes: int) -> list[int]:
    """The sizes of disjoint groups of node ids; a ValueError for anything else."""
    members = [int(node) for group in groups for node in group]
    if len(set(members)) != len(members) or any(not 0 <= node < num_nodes for node in members):
        raise ValueError(
            f"groups={[list(group) for group in groups]} must be disjoint lists of node ids, 0 to {num_nodes - 1}."
        )
    return [len(group) for group in groups]


def _shares(weights: Sequence[float], groups: Groups | None, num_nodes: int) -> Tensor:
    """Factors `[K]`, float64, that turn an average over a group into the weighted average."""
    given = torch.as_tensor(weights, dtype=torch.float64)
    if given.shape != (num_nodes,) or bool((given < 0).any()):
        raise ValueError(f"weights={given.tolist()} must be {num_nodes} numbers >= 0, one for each node.")
    factors = torch.ones(num_nodes, dtype=torch.float64)
    for group in [list(range(num_nodes))] if groups is None else groups:
        members = list(group)
        total = given[members].sum()
        if total <= 0:
            raise ValueError(f"the weights of nodes {members} are all 0: nothing to average.")
        factors[members] = given[members] * len(members) / total
    return factors


def map_tensors(x: T, fn: Callable[[Tensor], Tensor]) -> T:
    """`fn` of a tensor, or of each tensor of a tree."""
    if isinstance(x, Tensor):
        return fn(x)
    return {name: fn(value) for name, value in x.items()}
