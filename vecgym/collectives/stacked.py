"""All K nodes in one tensor: a collective is a tensor reduction over the node dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vecgym.collectives.base import Collectives, factors_of, multiplied
from vecgym.collectives.ledger import Ledger
from vecgym.collectives.topology import Groups, Mixing
from vecgym.core import check
from vecgym.core.devices import placed
from vecgym.core.tree import Tree, differentiated, wider

CACHED_ELEMENTS = 1 << 17  # of a block of columns that is mixed at once: 0.5 MiB in float32


class StackedCollectives(Collectives):
    """Collectives among K nodes stacked in this process, `[K, *]`.

    >>> comm = StackedCollectives(2)
    >>> comm.mean(torch.tensor([[1.0], [3.0]]))
    tensor([[2.]])
    >>> pair = StackedCollectives(4).among([1, 3])
    >>> pair.broadcast(torch.tensor([5.0, 7.0]), src=1), pair.among([1]).members
    (tensor([7.]), (3,))
    """

    num_configs = 1  # more in a group; see `GroupCollectives`

    def __init__(self, num_nodes: int, ledger: Ledger | None = None) -> None:
        self.num_nodes = self.run_nodes = check.integer("num_nodes", num_nodes)
        self.node_ids = torch.arange(num_nodes)
        self.ledger = Ledger() if ledger is None else ledger

    def among(self, members: Sequence[int]) -> StackedCollectives:
        subset = StackedCollectives(len(members), ledger=self.ledger)
        subset._count_among(self, members)
        return subset

    def fetched(self, x: Tree, sources: Sequence[int], receivers: Sequence[int]) -> Tree:
        order = torch.tensor(list(sources), dtype=torch.long)
        return {name: y.clone() if y.shape[self._axis] == 1 else self._permute(y, order) for name, y in x.items()}

    def _sum(self, x: Tensor, groups: Groups | None, average: bool, weights: Tensor | None = None) -> Tensor:
        if x.shape[self._axis] != 1:
            if groups is not None:
                return self._islands(x, groups, average, weights)
            if weights is not None:
                return reduced(x, self._axis, average, weights)
            return (torch.mean if average else torch.sum)(x, self._axis, keepdim=True)
        if average or (self.num_nodes == 1 and weights is None):
            return x
        if groups is None and weights is None:
            return x * self.num_nodes
        times = torch.ones(self.num_nodes) if weights is None else weights.sum()[None]
        for group in groups or ():  # the number of values that each node's group adds up
            times[list(group)] = len(group)
        return multiplied(x, times, self._axis).to(x.dtype)

    def _islands(self, x: Tensor, groups: Groups, average: bool, weights: Tensor | None) -> Tensor:
        """Sum or average within each group."""
        axis, result = self._axis, x.clone()
        for group in groups:
            if len(group) > 1:
                members = placed(torch.tensor(group), x.device)
                part = x.index_select(axis, members)
                of_group = reduced(part, axis, average, None if weights is None else weights[list(group)])
                result = result.index_copy(axis, members, of_group.expand_as(part))
        return result

    def _all_gather(self, x: Tensor) -> Tensor:
        return self._expanded(x)[None]

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        return x if x.shape[self._axis] == 1 else x.narrow(self._axis, src, 1)

    def _permute(self, x: Tensor, source: Tensor) -> Tensor:
        return x if x.shape[self._axis] == 1 else x.index_select(self._axis, placed(source, x.device))

    def _mix(self, x: Tensor, weights: Tensor) -> Tensor:
        y, matrix, rest = self._expanded(x), placed(weights, x.device, wider(x.dtype)), self._axis + 1
        y = y.to(matrix.dtype)
        return (matrix @ y.flatten(rest) if y.dim() > rest else y @ matrix.T).reshape(y.shape).to(x.dtype)

    def _mix_inplace(self, x: Tensor, mixing: Mixing) -> Tensor:
        rows = math.prod(x.shape[: self._axis + 1])
        if rows != self.num_configs * self.num_nodes or not x.is_contiguous() or x.numel() == 0:
            return self._mix(x, mixing.weights)
        # Columns are mixed independently: on a CPU, a block of columns stays in its cache and saves passes over memory.
        on_cpu = x.device.type == "cpu"
        sparse = on_cpu and mixing.sparse and x.is_floating_point()
        combine = self._gather_neighbours(mixing, x) if sparse else self._product(mixing, x)
        flat = x.view(rows, -1)  # [C * K, P]
        for part in flat.split(max(256, CACHED_ELEMENTS // rows) if on_cpu else flat.shape[1], dim=1):
            part.copy_(combine(part.to(wider(x.dtype))))
        return x

    def _product(self, mixing: Mixing, like: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function from `[C * K, P]` to its product with the full matrix."""
        weights = placed(mixing.weights, like.device, wider(like.dtype))
        if self.num_configs == 1:
            return lambda part: weights @ part
        batch = weights.expand(self.num_configs, -1, -1)
        return lambda part: torch.bmm(batch, part.unflatten(0, (self.num_configs, -1))).flatten(0, 1)

    def _gather_neighbours(self, mixing: Mixing, like: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function from `[C * K, P]` to the weighted sums of the rows that each node receives."""
        configs = torch.arange(self.num_configs)[:, None]
        sources = (placed(mixing.sources, like.device) + configs * self.num_nodes).flatten()
        starts = (placed(mixing.starts, like.device) + configs * len(mixing.sources)).flatten()
        values = placed(mixing.values, like.device, wider(like.dtype)).repeat(self.num_configs)
        return lambda part: F.embedding_bag(sources, part.contiguous(), starts, mode="sum", per_sample_weights=values)

    def _expanded(self, x: Tensor) -> Tensor:
        return x.expand(*x.shape[: self._axis], self.num_nodes, *x.shape[self._axis + 1 :])


def reduced(x: Tensor, axis: int, average: bool, weights: Tensor | None = None) -> Tensor:
    """Sum or average along `axis`, whose size becomes 1, with one weight per row; see `Collectives.mean`.

    A weighted mean stays within the range of its values, so that the mean of equal values is exactly this value.
    Without weights it is torch's mean, which may differ in the last bit in float32 and float64.

    >>> x = torch.full((3,), 0.7, dtype=torch.bfloat16)
    >>> torch.equal(reduced(x, 0, True, torch.tensor([1.0, 5.0, 7.0])), x[:1])
    True
    """
    reduce, factors = (torch.mean if average else torch.sum), None
    if weights is not None:
        rows, factors = factors_of(weights, average)
        x = x if len(rows) == len(weights) else x.index_select(axis, placed(rows, x.device))
    if factors is None:
        return reduce(x, axis, keepdim=True)
    result = reduce(multiplied(x, factors, axis), axis, keepdim=True)
    if not average or result.dtype != x.dtype or x.is_complex():  # rounding restores equal values
        return result.to(x.dtype)
    values = x.detach()
    inside = result.detach().clamp(values.amin(axis, keepdim=True), values.amax(axis, keepdim=True))
    return result + (inside - result.detach()) if differentiated(result) else inside


class GroupCollectives(StackedCollectives):
    """Collectives within each of C configurations at once, on tensors `[C, K, *]`.

    A result `[1, *]` for one configuration becomes `[C, 1, *]`, and gathered values `[1, K, *]` become `[C, K, *]`.
    Each call records one `Transfer`, which stands for every configuration.

    Args:
        comm: the collectives of the nodes of one configuration.
        num_configs: C.

    >>> comm = GroupCollectives(StackedCollectives(2), num_configs=2)
    >>> x = torch.tensor([[1.0, 3.0], [10.0, 20.0]])
    >>> comm.mean(x), comm.permute(x, [1, 0])
    (tensor([[ 2.],
            [15.]]), tensor([[ 3.,  1.],
            [20., 10.]]))
    >>> comm.node_ids, comm.ledger
    (tensor([0, 1]), Ledger(2 collectives, 8 bytes sent per node))
    """

    _axis = 1

    def __init__(self, comm: StackedCollectives, num_configs: int) -> None:
        super().__init__(comm.num_nodes, comm.ledger)
        self.num_configs = num_configs
        self.node_ids, self.shapes_only = comm.node_ids, comm.shapes_only
        self.members, self.run_nodes, self._comm = comm.members, comm.run_nodes, comm

    def among(self, members: Sequence[int]) -> GroupCollectives:
        return GroupCollectives(self._comm.among(members), self.num_configs)

    def _all_gather(self, x: Tensor) -> Tensor:
        return self._expanded(x)


class DryCollectives(StackedCollectives):
    """Collectives for dry runs: they record their transfers and return tensors of the right shape, without values.

    >>> comm = DryCollectives(4)
    >>> comm.mean(torch.empty(4, 3, device="meta")).shape, comm.ledger
    (torch.Size([1, 3]), Ledger(1 collectives, 18 bytes sent per node))
    """

    shapes_only = True

    def _sum(self, x: Tensor, groups: Groups | None, average: bool, weights: Tensor | None = None) -> Tensor:
        return x[:1] if groups is None else x

    def _permute(self, x: Tensor, source: Tensor) -> Tensor:
        return x

    def _mix(self, x: Tensor, weights: Tensor) -> Tensor:
        return self._expanded(x)

    def _own_storage(self, result: Any, x: Any, inplace: bool = False) -> Any:
        return result  # nobody writes to it
