"""The collectives: how strategies communicate between nodes, independent of the backend that moves the tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from vecgym.collectives.ledger import Islands, Ledger, Transfer
from vecgym.collectives.topology import Groups, Links, Mixing, ServerLinks
from vecgym.core import tree
from vecgym.core.check import kind_of
from vecgym.core.devices import placed
from vecgym.core.tree import Tree, wider

T = TypeVar("T", Tensor, Tree)
Operation = Callable[["Collectives"], Callable[[Tensor], Tensor]]  # what collectives do with a tensor

BUCKET_BYTES = 25 * 2**20  # as in torch's DistributedDataParallel: large messages that take little memory
FIRST_BUCKET_BYTES = 2**20  # of gradients, so that sending starts early in the backward pass


class Collectives(ABC):
    """Operations on tensors `[L, *]`, or trees of them, of the L nodes that this process holds.

    A node dimension of size 1 means "the same on every node": arguments may have it, and results have it whenever it
    applies. All operations are differentiable. A result is a new tensor, never `x` or a view of it, unless `inplace`
    allows that. Each call records one `Transfer`, which does not depend on the values.

    Attributes:
        num_nodes: K, the number of participating nodes.
        run_nodes: the number of nodes of the run.
        node_ids: the nodes in this process, `[L]`, numbered among the participants.
        ledger: the record of what was sent.
        members: the run's ids of the participants, ascending; None: all of the run's nodes.

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
    >>> comm.ids, comm.among([0, 3]).ids, comm.among([0, 3]).num_nodes, comm.among([0, 3]).run_nodes
    (tensor([0, 1, 2, 3]), tensor([0, 3]), 2, 4)
    >>> votes = comm.server_gather(x, participants=[0, 1, 3])  # a server computes the median and sends it to all
    >>> comm.server_send(votes.median(1).values), comm.server_sum(x, participants=[0, 3])
    (tensor([2.]), tensor([7.]))
    """

    num_nodes: int
    run_nodes: int
    node_ids: Tensor
    ledger: Ledger

    # Whether torch.distributed reduces, so that results may differ from those of one process in the last bits.
    native: bool = False
    # Whether tensors have shapes but no values: only the transfers are recorded.
    shapes_only: bool = False
    step = 0  # of the run, for error messages
    members: tuple[int, ...] | None = None
    _axis = 0  # the dimension of the nodes

    @property
    def ids(self) -> Tensor:
        """The run's ids of the nodes in this process, `[L]`, for example to key random numbers."""
        return self.node_ids if self.members is None else torch.tensor(self.members, dtype=torch.long)[self.node_ids]

    @abstractmethod
    def among(self, members: Sequence[int]) -> Collectives:
        """Return the collectives of some of the nodes, renumbered from 0.

        Args:
            members: the ids of these nodes, ascending. Transfers are recorded with the run's ids.

        >>> from vecgym.collectives import StackedCollectives
        >>> comm = StackedCollectives(4)
        >>> three = comm.among([0, 2, 3])
        >>> three.mean(torch.tensor([1.0, 2.0, 3.0])), three.node_ids, three.ids
        (tensor([2.]), tensor([0, 1, 2]), tensor([0, 2, 3]))
        >>> next(iter(comm.ledger)).transfer.who, three.num_nodes, three.run_nodes
        (((0, 2, 3),), 3, 4)
        """

    def _count_among(self, parent: Collectives, members: Sequence[int]) -> None:
        """Set the ids of the participants: the nodes `members` of `parent`."""
        within = range(parent.num_nodes) if parent.members is None else parent.members
        self.members, self.run_nodes = tuple(within[i] for i in members), parent.run_nodes

    def everyone(self, x: Tree) -> Tree:
        """Return the values of all nodes, `[L, *] -> [K, *]`, to observe a run. The ledger does not record it."""
        return x

    def fetched(self, x: Tree, sources: Sequence[int], receivers: Sequence[int]) -> Tree:
        """Return the values that the receivers in this process get from their sources: `[1 or L, *] -> [n, *]`.

        The ledger does not record it.

        >>> from vecgym.collectives import StackedCollectives
        >>> StackedCollectives(3).fetched({"w": torch.tensor([1.0, 3.0, 5.0])}, sources=[2, 2], receivers=[0, 1])
        {'w': tensor([5., 5.])}
        """
        order = torch.arange(self.num_nodes)
        order[list(receivers)] = torch.tensor(list(sources))
        receiving = set(receivers)
        rows = torch.tensor([i for i, node in enumerate(self.node_ids.tolist()) if node in receiving], dtype=torch.long)
        moved = self._apply(x, lambda comm: partial(comm._permute, source=order))
        return {name: y[placed(rows, y.device)] if len(y) > 1 else y for name, y in moved.items()}

    # Implemented by a backend, for one tensor.

    @abstractmethod
    def _sum(self, x: Tensor, groups: Groups | None, average: bool, weights: Tensor | None = None) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, src: int) -> Tensor: ...

    @abstractmethod
    def _permute(self, x: Tensor, source: Tensor) -> Tensor: ...

    @abstractmethod
    def _mix(self, x: Tensor, weights: Tensor) -> Tensor: ...

    def _mix_inplace(self, x: Tensor, mixing: Mixing) -> Tensor:
        """Do `_mix` and possibly overwrite `x`; override it if that is faster."""
        return self._mix(x, mixing.weights)

    def _apply(self, x: T, operation: Operation) -> T:
        """Apply an operation to every tensor of `x`. A backend that sends them may concatenate them first."""
        of_one = operation(self)
        return of_one(x) if isinstance(x, Tensor) else dict(zip(x, map(of_one, x.values())))

    # Called by strategies.

    def mean(
        self, x: T, groups: Groups | None = None, weights: Sequence[float] | None = None, *, inplace: bool = False
    ) -> T:
        """Average over all nodes, `[L, *] -> [1, *]`, or over each group of node ids, `[L, *] -> [L, *]`.

        Groups are disjoint; a node in no group keeps its own value and sends nothing. With `weights`, one number
        >= 0 per node, `[K]`: sum_i w_i x_i / sum_i w_i, over all nodes or over each group. bfloat16 and float16 are
        summed in float32 and rounded once. With `inplace`, `x` may be overwritten or returned as the result.
        """
        self._announce("mean", x, check_groups(groups, self.num_nodes))
        return self._own_storage(self._apply(x, self._reduction(groups, True, weights)), x, inplace)

    def sum(self, x: T, groups: Groups | None = None) -> T:
        """Sum over all nodes, `[L, *] -> [1, *]`, or over each group; see `mean`."""
        self._announce("sum", x, check_groups(groups, self.num_nodes))
        return self._own_storage(self._apply(x, self._reduction(groups, False)), x)

    def server_mean(self, x: T, participants: Sequence[int], weights: Sequence[float] | None = None) -> T:
        """Average the participants' values on a server, with weights, for every node: `[L, *] -> [1, *]`.

        Each participant sends its value to the server once, and receives the average.
        """
        self._announce("server_mean", x, self._server(participants, participants))
        of_all = self._participant_weights(participants, weights)
        return self._own_storage(self._apply(x, self._reduction(None, True, of_all)), x)

    def server_sum(self, x: T, participants: Sequence[int], weights: Sequence[float] | None = None) -> T:
        """Sum w_i x_i over the participants on a server, for every node: `[L, *] -> [1, *]`; not normalised.

        Each participant sends its value to the server once, and receives the sum.
        """
        self._announce("server_sum", x, self._server(participants, participants))
        of_all = self._participant_weights(participants, weights)
        return self._own_storage(self._apply(x, self._reduction(None, False, of_all)), x)

    def server_gather(self, x: T, participants: Sequence[int] | None = None) -> T:
        """Gather the values of the participants (default: all) on a server: `[L, *] -> [1, n, *]`, in their order.

        The server may then compute anything, such as a median; `server_send` sends the result to the nodes.
        """
        senders = self._nodes(participants)
        self._announce("server_gather", x, self._server(senders, []))
        gathered = self._apply(x, lambda comm: comm._all_gather)
        if len(senders) == self.num_nodes and senders == sorted(senders):
            return self._own_storage(gathered, x)
        return tree.map_leaves(lambda y: y[:, senders], gathered)

    def server_send(self, x: T, to: Sequence[int] | None = None) -> T:
        """Send a server's value `[1, *]` to the nodes `to` (default: all), and return it."""
        self._announce("server_send", x, self._server([], self._nodes(to)))
        return x

    def reduce(self, x: Tree, by: Callable[[Tree], tuple[Tree, Tree]]) -> Tree:
        """Reduce by a function of the values of all nodes, `[L, *] -> [1, *]`, which it gets as `[1 or K, *]`.

        Beside the result, it returns the codes `[1, *]` that nodes send each other on the way to it, of which the bytes
        of a `mean` are recorded.

        >>> from vecgym.collectives import StackedCollectives
        >>> comm, x = StackedCollectives(2), {"w": torch.tensor([1.0, 3.0])}
        >>> comm.reduce(x, lambda all: ({"w": all["w"].amax(0, keepdim=True)}, {"w": torch.ones(1).half()}))
        {'w': tensor([3.])}
        >>> comm.ledger.totals
        (2.0, 2.0, 2.0)
        """
        result, codes = by(self.everyone(x))
        self._announce("mean", codes)
        return result

    def all_gather(self, x: T, *, inplace: bool = False, readers: Groups | Links | None = None) -> T:
        """Give every node all values: `[L, *] -> [1, K, *]`. With `inplace`, the result may be a view of `x`.

        If a node then reads only the values of its group, or of the nodes linked to it, pass the groups or links as
        `readers`: only messages to readers are counted.
        """
        who = readers if isinstance(readers, Links) else check_groups(readers, self.num_nodes)
        self._announce("all_gather", x, who)
        return self._own_storage(self._apply(x, lambda comm: comm._all_gather), x, inplace)

    def broadcast(self, x: T, src: int) -> T:
        """Give every node the value of node `src`: `[L, *] -> [1, *]`."""
        if not 0 <= src < self.num_nodes:
            raise ValueError(f"src={src} is not a node: there are {self.num_nodes}, 0 to {self.num_nodes - 1}.")
        source_first: tuple[int, ...] = (int(src), *(node for node in range(self.num_nodes) if node != src))
        self._announce("broadcast", x, (source_first,))
        return self._own_storage(self._apply(x, lambda comm: partial(comm._broadcast, src=src)), x)

    def permute(self, x: T, source: Sequence[int] | Tensor) -> T:
        """Give node i the value of node `source[i]`: `[L, *] -> [L, *]`; `source` is a permutation."""
        order = torch.as_tensor(source, dtype=torch.long)
        nodes = torch.arange(self.num_nodes)
        if order.shape != nodes.shape or not torch.equal(order.sort().values, nodes):
            raise ValueError(
                f"source={order.tolist()} must be a permutation of 0..{self.num_nodes - 1}: "
                "one source per node, and each node sends once."
            )
        moved = order != nodes
        self._announce("permute", x, Links.of(order[moved], nodes[moved]))
        return self._own_storage(self._apply(x, lambda comm: partial(comm._permute, source=order)), x)

    def mix(self, x: T, weights: Tensor | Mixing, inplace: bool = False) -> T:
        """Mix, x_i <- sum_j W_ij x_j with `weights` W `[K, K]`: `[L, *] -> [L, *]`.

        Node j sends to each i != j with W_ij != 0. W need not be symmetric, nor doubly stochastic. A `Mixing` is a
        matrix analysed once for many exchanges. With `inplace`, `x` may be overwritten, and the result is not
        differentiable.
        """
        matrix = weights.weights if isinstance(weights, Mixing) else weights
        if matrix.shape != (self.num_nodes, self.num_nodes):
            raise ValueError(
                f"weights has shape {list(matrix.shape)}; mixing {self.num_nodes} nodes takes "
                f"[{self.num_nodes}, {self.num_nodes}]."
            )
        mixing = weights if isinstance(weights, Mixing) else Mixing.of(weights)
        self._announce("mix", x, mixing.links)
        if not inplace:
            return self._apply(x, lambda comm: partial(comm._mix, weights=matrix))
        with torch.no_grad():
            return self._apply(x, lambda comm: partial(comm._mix_inplace, mixing=mixing))

    def _announce(self, operation: str, x: Tensor | Tree, who: Islands | Links | ServerLinks | None = None) -> None:
        """Record an operation before it starts."""
        named, num_rows = {} if isinstance(x, Tensor) else x, len(self.node_ids)
        for name, value in named.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"comm.{operation} takes a tensor, or a dict of tensors by name, but {name!r} is "
                    f"{kind_of(value)}: call it for each dict."
                )
            if value.dim() <= self._axis or value.shape[self._axis] not in (1, num_rows):
                rows = f"{num_rows} rows, of this process's nodes, or 1"
                raise ValueError(f"comm.{operation} takes values with {rows}, but {name!r} is {list(value.shape)}.")
        names = None if isinstance(x, Tensor) else tuple(x)
        who = who if self.members is None else renamed(who, self.members)
        num_bytes = payload_bytes(x, self._axis + 1)
        self.ledger.record(Transfer(operation, num_bytes, self.run_nodes, who, tensors=names))

    def _reduction(self, groups: Groups | None, average: bool, weights: Sequence[float] | None = None) -> Operation:
        """Return the operation that averages or sums, after a check of the weights."""
        counted = None if weights is None else _checked_weights(weights, self.num_nodes, groups if average else [])
        return lambda comm: partial(comm._sum, groups=groups, average=average, weights=counted)

    def _nodes(self, nodes: Sequence[int] | None) -> list[int]:
        return [int(node) for node in (range(self.num_nodes) if nodes is None else nodes)]

    def _server(self, up: Sequence[int], down: Sequence[int]) -> ServerLinks:
        for members in (up, down):
            check_groups([members], self.num_nodes)
        return ServerLinks(tuple(map(int, up)), tuple(map(int, down)))

    def _participant_weights(self, participants: Sequence[int], weights: Sequence[float] | None) -> list[float] | None:
        """Return each node's weight, `[K]`, 0 if it does not participate; None: equal weights."""
        if weights is None and len(participants) == self.num_nodes:
            return None
        members = set(participants)
        weights = [1.0] * self.num_nodes if weights is None else weights
        return [float(w) if i in members else 0.0 for i, w in enumerate(weights)]

    def _own_storage(self, result: T, x: T, inplace: bool = False) -> T:
        """Clone a result that is `x` or a view of it, so that later writes to `x` do not change it."""
        return result if inplace else tree.map_leaves(_apart_from, result, x)


def renamed(who: Islands | Links | ServerLinks | None, members: Sequence[int]) -> Islands | Links | ServerLinks:
    """Return the participants with the ids `members` in place of 0, 1, ...; None: all members.

    >>> renamed(((0, 2),), [1, 5, 7]), renamed(None, [1, 5, 7])
    (((1, 7),), ((1, 5, 7),))
    """
    if who is None:
        return (tuple(members),)
    if isinstance(who, Links):
        ids = torch.tensor(members, dtype=torch.long)
        return Links.of(*(ids[torch.tensor(x, dtype=torch.long)] for x in (who.senders, who.receivers)))
    if isinstance(who, ServerLinks):
        return ServerLinks(*(tuple(members[i] for i in nodes) for nodes in who))
    return tuple(tuple(members[i] for i in group) for group in who)


def payload_bytes(x: Tensor | Tree, first: int = 1) -> int:
    """Count the bytes of one node's part of a `[L, *]` tensor or tree: its dimensions from `first` on.

    >>> payload_bytes({"w": torch.ones(8, 10), "b": torch.ones(1, 2, dtype=torch.float64)})
    56
    """
    num_bytes = 0
    for y in [x] if isinstance(x, Tensor) else x.values():
        num_bytes += math.prod(y.shape[first:]) * y.element_size()
    return num_bytes


def bucketed(sizes: Sequence[float], bucket_bytes: float, gradients: bool = False) -> list[list[int]]:
    """Group tensors of these sizes in bytes into messages, starting with the last, whose gradient is ready first.

    A message ends with the tensor that takes it to `bucket_bytes` or beyond. The first message of gradients ends at
    1 MiB, as in torch's DistributedDataParallel. 0: a message per tensor; `math.inf`: one message.

    >>> bucketed([40, 30, 20, 10], bucket_bytes=30), bucketed([40, 30, 20, 10], 0)
    ([[3, 2], [1], [0]], [[3], [2], [1], [0]])
    >>> bucketed([40, 30, 20, 10], math.inf), bucketed([8 * 2**20] * 5, 25 * 2**20, gradients=True)
    ([[3, 2, 1, 0]], [[4], [3, 2, 1, 0]])
    """
    first = min(bucket_bytes, FIRST_BUCKET_BYTES) if gradients and bucket_bytes < math.inf else bucket_bytes
    buckets: list[list[int]] = []
    room = 0.0
    for i in reversed(range(len(sizes))):
        if room <= 0:
            room = bucket_bytes if buckets else first
            buckets.append([])
        buckets[-1].append(i)
        room -= sizes[i]
    return buckets


def check_groups(groups: Groups | None, num_nodes: int) -> Islands | None:
    """Return disjoint groups of node ids as tuples, or raise a ValueError. None: all nodes."""
    if groups is None:
        return None
    islands = tuple(tuple(map(int, group)) for group in groups)
    members = [node for group in islands for node in group]
    if len(set(members)) != len(members) or any(not 0 <= node < num_nodes for node in members):
        raise ValueError(
            f"groups={[list(group) for group in groups]} must be disjoint lists of node ids, 0 to {num_nodes - 1}."
        )
    return islands


def _checked_weights(weights: Sequence[float], num_nodes: int, groups: Groups | None) -> Tensor:
    """Return the weights `[K]` in float64, after checking that each group has one > 0."""
    tensor = torch.as_tensor(weights, dtype=torch.float64)
    if tensor.shape != (num_nodes,) or not bool((tensor >= 0).all()):
        raise ValueError(f"weights={tensor.tolist()} must be {num_nodes} numbers >= 0, one per node.")
    for members in map(list, [range(num_nodes)] if groups is None else groups):
        if tensor[members].sum() <= 0:
            raise ValueError(f"the weights of nodes {members} are all 0: nothing to average.")
    return tensor


def factors_of(weights: Tensor, average: bool) -> tuple[Tensor, Tensor | None]:
    """Return the rows with a weight > 0, and their factors in a sum or mean of these rows; None: all factors are 1.

    >>> factors_of(torch.tensor([3.0, 0.0, 1.0]), average=True), factors_of(torch.tensor([2.0, 0.0, 2.0]), True)[1]
    ((tensor([0, 2]), tensor([1.5000, 0.5000])), None)
    """
    if tree.differentiated(weights):  # weights of 0, and equal ones, have gradients too
        return torch.arange(len(weights)), weights * (len(weights) / weights.sum() if average else 1)
    rows = weights.nonzero()[:, 0]
    some = weights[rows]
    if bool((some == (some[:1] if average else 1)).all()):
        return rows, None
    return rows, some * len(some) / some.sum() if average else some


def multiplied(x: Tensor, factors: Tensor, axis: int = 0) -> Tensor:
    """Multiply by one factor for each row along `axis`, in the dtype in which values are summed.

    >>> multiplied(torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor([0.1, 2.0]))
    tensor([[0.1000, 0.1000],
            [2.0000, 2.0000]])
    """
    return x * placed(factors, x.device, wider(x.dtype)).view(-1, *[1] * (x.dim() - axis - 1))


def _apart_from(result: Tensor, x: Tensor) -> Tensor:
    """Clone a result if it shares storage with `x`."""
    base = result._base if result._is_view() else result
    return result.clone() if base is x or (x._is_view() and base is x._base) else result
