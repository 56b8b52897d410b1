"""The protocol of a backend, a way to compute losses and gradients of stacked nodes: `vmap`, `loop` and others."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vecgym.core import nodes, tree
from vecgym.core.devices import on_host, placed
from vecgym.core.tree import Tree
from vecgym.engine.contract import WEIGHT

if TYPE_CHECKING:
    from vecgym.engine.stateless import StatelessModel


Missing = Mapping[str, frozenset[int]]  # parameters on which the loss of some rows does not depend, and these rows

# The largest difference between the gradients of two backends, which take sums in another order: relative to the
# largest value of the tensor, and to that of all tensors (a gradient that is 0 in exact arithmetic is pure rounding).
# The gradients of a wrongly traced model differ by far more.
TOLERANCE = {torch.float64: (1e-10, 1e-13), torch.float32: (1e-3, 1e-6)}
LOW_PRECISION = (0.1, 1e-2)  # and autocast: fused operations keep float32 where vmap rounds between them


class Local(NamedTuple):
    """The result of the nodes' local work.

    >>> import torch
    >>> local = Local(grads={"w": torch.tensor([[2.0], [4.0]])}, losses=torch.tensor([1.0, 2.0]), buffers={})
    >>> local.grads["w"].mean(0)
    tensor([3.])
    """

    grads: Tree  # [L, *], or [1, *]: the gradient of the mean loss; 0 where there is none
    losses: Tensor  # [L]
    buffers: Tree  # [1 or L, *]
    missing: Missing = MappingProxyType({})
    weights: Tensor | None = None  # [L], of the losses, where the model gives them


class Keys(NamedTuple):
    """The keys of the random numbers of a pass."""

    seeds: Sequence[int]  # of each node, as the others
    steps: Sequence[int]
    node_ids: Sequence[int]
    start: int = 0  # first example of the part of the batch

    def of(self, row: int) -> tuple[int, str, int, int, int]:
        """Return the parts of one node's key, as `vecgym.core.rng.key` takes them."""
        return self.seeds[row], "model", self.steps[row], self.node_ids[row], self.start

    def named(self) -> str:
        """Name nodes and steps, for a message.

        >>> Keys([0] * 3, [7] * 3, [2, 3, 5]).named(), Keys([0], [7], [2]).named()
        ('one of the nodes 2 to 5 (engine="loop" says which), step 7', 'node 2, step 7')
        """
        which = ' (engine="loop" says which)' if len(self.node_ids) > 1 else ""
        return f"{_one_of('node', self.node_ids)}{which}, {_one_of('step', self.steps)}"

    def take(self, rows: Sequence[int]) -> Keys:
        """Take the keys of some nodes."""
        seeds, steps, node_ids = ([each[i] for i in rows] for each in (self.seeds, self.steps, self.node_ids))
        return Keys(seeds, steps, node_ids, self.start)


def _one_of(what: str, numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{what} {low}" if low == high else f"one of the {what}s {low} to {high}"


class NodeSlice(NamedTuple):
    """Some of the nodes, n of them, and some of their examples: all that their gradients depend on."""

    params: Tree  # [1 or n, *]
    buffers: Tree  # [1 or n, *]; those that training changes are [n, *], and overwritten
    batch: Any  # leaves [n, B, ...]
    keys: Keys

    @property
    def size(self) -> int:
        return len(self.keys.node_ids)

    def nodes(self, a: int, b: int) -> NodeSlice:
        """View nodes a to b."""
        if (a, b) == (0, self.size):
            return self
        batch = tree.map_leaves(lambda x: x[a:b], self.batch)
        return NodeSlice(rows(self.params, a, b), rows(self.buffers, a, b), batch, self.keys.take(range(a, b)))

    def examples(self, start: int, stop: int) -> NodeSlice:
        """View examples start to stop of each node."""
        batch = tree.map_leaves(lambda x: x[:, start:stop], self.batch)
        return self._replace(batch=batch, keys=self.keys._replace(start=start))

    def take(self, indices: Tensor, batch_size: int) -> NodeSlice:
        """Copy the first examples of some nodes."""
        batch = tree.map_leaves(lambda x: x[placed(indices, x.device), :batch_size], self.batch)
        params, buffers = nodes.take_rows(self.params, indices), nodes.take_rows(self.buffers, indices, copy=False)
        return NodeSlice(params, buffers, batch, self.keys.take(indices.tolist()))


class Backend(Protocol):
    """A way to compute stacked nodes. A new one is a class in a file, and its name in `vecgym.engine.plan.BACKENDS`.

    It holds no state but the model and memory that it reuses. It may raise anything: the engine adds the nodes and the
    step to the message.
    """

    def __init__(self, model: StatelessModel) -> None: ...

    def gradients(self, part: NodeSlice, out: Callable[[], Tree], thread: int = 0) -> Local:
        """Compute the loss and gradient of every node, and its buffers afterwards.

        Args:
            part: its buffers may be overwritten.
            out: returns tensors `[n, *]` into which the gradients may be written.
            thread: the index of the calling node thread.
        """

    def mean_gradients(self, part: NodeSlice, num_nodes: int) -> Iterator[tuple[Tree, Tensor]]:
        """Yield these nodes' share of the gradient `[*]` of the mean of `num_nodes` losses, and their losses `[n]`.

        There may be as many pieces as suit the backend; the caller empties them. The parameters are `[1, *]`. A
        parameter on which none of the losses depends is left out.
        """

    def pure(self, part: NodeSlice) -> Local:
        """Compute gradients that can be differentiated. No input is overwritten; parameters are `[n, *]`."""

    def measures(self, tensors: Tree, batch: Any, own_batches: bool, size: int, several: bool) -> Tree:
        """Compute the validation metrics of `size` nodes in eval mode, `[size]` each.

        Args:
            tensors: parameters and buffers, `[1 or size, *]`.
            batch: one ordinary batch for all, or with `own_batches` leaves `[size, B, ...]`.
            several: the leaves are `[G, B, ...]` or `[size, G, B, ...]`, and the metrics `[size, G]`.
        """


def rows(values: Tree, a: int, b: int) -> Tree:
    """View nodes a to b; a tensor that is the same on every node stays `[1, *]`."""
    return {name: x[a:b] if x.shape[0] > 1 else x for name, x in values.items()}


def row(values: Tree, i: int) -> Tree:
    """Take one node, `[*]`."""
    return {name: x[i if x.shape[0] > 1 else 0] for name, x in values.items()}


def stacked(trees: Sequence[Tree], dim: int = 0) -> Tree:
    """Stack the results of several calls."""
    return {name: torch.stack([values[name] for values in trees], dim) for name in trees[0]}


def unstacked(batch: Any, dim: int = 0) -> list[Any]:
    """Split stacked batches, `[n, *]`, or `[L, n, *]` along `dim` 1."""
    count = tree.leaves(batch)[0].shape[dim]
    return [tree.map_leaves(lambda x: x.select(dim, i), batch) for i in range(count)]  # noqa: B023


def dense(grads: Tree, params: Tree, size: int) -> tuple[Tree, Missing]:
    """Return gradients `[size, *]` of all parameters, 0 for those without one, and the names of the latter.

    They have the order of the parameters, which processes need to join the same ones into a message.

    >>> grads, missing = dense({"w": torch.ones(2, 1)}, {"v": torch.ones(1, 1), "w": torch.ones(1, 1)}, size=2)
    >>> grads["v"].tolist(), missing
    ([[0.0], [0.0]], {'v': frozenset({0, 1})})
    >>> list(dense({"w": torch.ones(2, 1), "v": torch.ones(2, 1)}, {"v": torch.ones(1), "w": torch.ones(1)}, size=2)[0])
    ['v', 'w']
    """
    missing = dict.fromkeys([name for name in params if name not in grads], frozenset(range(size)))
    zeros = {name: params[name].new_zeros(size, *params[name].shape[1:]) for name in missing}
    return {name: zeros[name] if name in zeros else grads[name] for name in params}, missing


def missing_in_all(parts: Sequence[Missing]) -> Missing:
    """Return which parameters have no gradient in any part of the batch.

    >>> missing_in_all([{"v": frozenset({0, 1}), "w": frozenset({0})}, {"v": frozenset({1})}])
    {'v': frozenset({1})}
    """
    rows = {name: frozenset.intersection(*[part.get(name, frozenset()) for part in parts]) for name in parts[0]}
    return {name: some for name, some in rows.items() if some}


def apart(grads: Sequence[Tensor]) -> list[Tensor]:
    """Clone gradients that share memory, as those of a and b in f(a + b) do: each is changed in place later."""
    addresses: set[int] = set()
    separate = []
    for g in grads:
        address = g.untyped_storage().data_ptr()
        separate.append(g.clone() if address in addresses else g)
        addresses.add(address)
    return separate


def settle(buffers: Tree, after: Tree) -> None:
    """Write the buffers after a pass into their storage, unless the model changed them in place."""
    for name, new in after.items():
        if new.data_ptr() != buffers[name].data_ptr():
            buffers[name].copy_(new.detach())


Compute = Callable[[NodeSlice], Local]


def sizes_of(batch: Any) -> tuple[int, int]:
    """Return (L, B) of a batch whose leaves are `[L, B, ...]`.

    >>> sizes_of({"x": torch.zeros(4, 8, 3)})
    (4, 8)
    """
    shape = tree.leaves(batch)[0].shape
    return shape[0], shape[1] if len(shape) > 1 else 1


def in_minibatches(part: NodeSlice, size: int | None, compute: Compute) -> Local:
    """Accumulate the gradient of the batch, `size` examples at a time, weighted by their number.

    If the model returns weights, they are used instead. A part of weight 0 has loss and gradient 0, since a mean over
    nothing may be nan. bfloat16 and float16 are summed in float32 and rounded once.
    """
    if size is None or size >= (batch_size := sizes_of(part.batch)[1]):
        return _without_nothing(compute(part))
    total: Any = None
    missing: list[Missing] = []
    weight = part.buffers.get(WEIGHT)
    weight = None if weight is None else torch.zeros_like(weight)
    for start in range(0, batch_size, size):
        stop = min(batch_size, start + size)
        local = compute(part.examples(start, stop))
        part = part._replace(buffers=local.buffers)
        missing.append(local.missing)
        share: float | Tensor = (stop - start) / batch_size
        if weight is not None:
            share = local.buffers[WEIGHT].to(weight.dtype)
            weight = weight + share
        weighted = _weighted(local, share)
        total = weighted if total is None else tree.map_leaves(torch.add, total, weighted)
        dtypes = tree.map_leaves(lambda x: x.dtype, local._replace(buffers={}))
        del local, weighted  # before the next pass needs memory
    if weight is not None:
        total = _weighted(total, weight.where(weight > 0, torch.inf).reciprocal())
        part = part._replace(buffers={**part.buffers, WEIGHT: weight})
    total = tree.map_leaves(lambda x, dtype: x.to(dtype), total, dtypes)
    return Local(total.grads, total.losses, part.buffers, missing_in_all(missing))


def _weighted(local: Local, share: float | Tensor) -> Local:
    """Multiply by a share, or by the share of each node, `[n]`; where it is 0, the result is 0 even for nan."""

    def times(x: Tensor) -> Tensor:
        x = x.to(tree.wider(x.dtype))
        if isinstance(share, float):
            return x * share
        each = share.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
        return (x * each).masked_fill(each == 0, 0.0)

    return Local(tree.map(times, local.grads), times(local.losses), {})


def _without_nothing(local: Local) -> Local:
    """Set loss and gradient to 0 for the nodes whose loss has weight 0."""
    weight = local.buffers.get(WEIGHT)
    if weight is None or not may_be_nothing(weight):
        return local

    def fill(x: Tensor) -> Tensor:
        nothing = (weight == 0).view(-1, *[1] * (x.dim() - 1))
        return x.masked_fill(nothing, 0.0) if tree.differentiated(x) else x.masked_fill_(nothing, 0.0)

    of_each = {name: fill(g) if len(g) == len(weight) else g for name, g in local.grads.items()}
    return local._replace(grads=of_each, losses=fill(local.losses))


def may_be_nothing(weight: Tensor) -> bool:
    """Whether a node's loss may have weight 0; on a device, where the weight is not read, it may.

    >>> may_be_nothing(torch.tensor([3.0, 0.0])), may_be_nothing(torch.tensor([3.0, 1.0]))
    (True, False)
    """
    return not on_host(weight) or tree.differentiated(weight) or not bool((weight > 0).all())


def by_batch_size(
    part: NodeSlice, limits: Sequence[int], compute: Compute, mean: bool, inplace: bool, written: Collection[str] = ()
) -> Local:
    """Compute the gradients of nodes with only `limits` examples each, together for nodes with equally many.

    Args:
        written: parameters, `[n, *]`, that the passes change.

    Raises:
        ValueError: if the batch cannot be cut.
    """
    batch_size = sizes_of(part.batch)[1]
    if any(x.dim() < 2 or x.shape[1] != batch_size for x in tree.leaves(part.batch)):
        raise ValueError(
            f"a node has {min(limits)} examples, fewer than the {batch_size} of a batch, which cannot be cut: its "
            f"tensors are not all [nodes, {batch_size}, ...]. Give batch_size={min(limits)}, or another collate_fn."
        )
    sizes = [min(limit, batch_size) for limit in limits]
    groups = [torch.tensor([i for i, s in enumerate(sizes) if s == size]) for size in sorted(set(sizes))]
    results = []
    for group in groups:
        some = part.take(group, sizes[group[0]])
        local = compute(some)
        for name in written:
            part.params[name].index_copy_(0, placed(group, some.params[name].device), some.params[name])
        part = part._replace(buffers=nodes.put_rows(part.buffers, group, local.buffers, part.size, inplace))
        share = len(group) / part.size if mean else 1.0
        results.append(Local(tree.map(lambda g: g * share, local.grads), local.losses, {}, local.missing))  # noqa: B023
    back = torch.cat(groups).argsort()
    losses = torch.cat([local.losses for local in results])

    def joined(*grads: Tensor) -> Tensor:
        return functools.reduce(torch.add, grads) if mean else torch.cat(grads)[placed(back, grads[0].device)]

    grads = tree.map(joined, *[local.grads for local in results])
    each = [local.missing for local in results]
    missing = missing_in_all(each) if mean else joined_missing(zip(map(torch.Tensor.tolist, groups), each))
    return Local(grads, losses[placed(back, losses.device)], part.buffers, missing)


def missing_within(missing: Missing, a: int, b: int) -> Missing:
    """Return which of the rows a to b, counted from a, have no gradient.

    >>> missing_within({"w": frozenset({0, 2, 3})}, 2, 4)
    {'w': frozenset({0, 1})}
    """
    return {name: frozenset(i - a for i in rows if a <= i < b) for name, rows in missing.items()}


def joined_missing(parts: Iterable[tuple[Sequence[int], Missing]]) -> Missing:
    """Join the parameters without gradient of several groups of rows.

    Args:
        parts: the rows of each group, and its parameters without gradient.

    >>> joined_missing([([0, 2], {"w": frozenset({1})}), ([1, 3], {"w": frozenset({0, 1})})])
    {'w': frozenset({1, 2, 3})}
    """
    joined: dict[str, frozenset[int]] = {}
    for rows, missing in parts:
        for name, some in missing.items():
            joined[name] = joined.get(name, frozenset()) | {rows[i] for i in some}
    return joined


# ---------------------------------------------------------------------------------- trials before training


def first_part(model: StatelessModel, batch: Any, mean: bool) -> NodeSlice:
    """Return the inputs of a first step; buffers are copies.

    Args:
        batch: of the nodes in one call, leaves `[n, B, ...]`.
        mean: for the gradient of the mean loss instead of each node's.
    """
    size, _ = sizes_of(batch)
    params = {name: p.detach()[None] for name, p in model.params.items()}
    buffers = {name: b[None].clone() for name, b in model.buffers.items()}
    params = params if mean else nodes.expand(params, size)
    return NodeSlice(params, model.own_buffers(buffers, size, False), batch, Keys([0] * size, [0] * size, range(size)))


def timed(backend: Backend, part: NodeSlice, mean: bool) -> tuple[Local, float]:
    """Compute one pass; return its result and the seconds that it took."""
    start = time.perf_counter()
    if mean:
        ((grads, losses),) = backend.mean_gradients(part, part.size)
        local = Local(grads, losses, part.buffers)
    else:
        local = backend.gradients(part, dict)
    if local.losses.device.type == "cuda":
        torch.cuda.synchronize(local.losses.device)
    return local, time.perf_counter() - start


def difference(expected: Local, actual: Local, loosely: bool) -> str:
    """Describe the first wrong tensor of `actual`; "" if none is wrong.

    Args:
        loosely: allow for rounding in low precision.

    >>> a, b = (Local({"w": torch.tensor([[2.0, x]])}, torch.ones(1), {}) for x in (1.0, 1.1))
    >>> difference(a, a, False), difference(a, b, False)
    ('', 'the gradient of w is off by 1.0e-01, where rounding explains at most 2.0e-03')
    """
    largest = max([_largest(g) for g in expected.grads.values()], default=0.0)
    for name, a, b in [
        ("the loss", expected.losses, actual.losses),
        *((f"the gradient of {name}", g, actual.grads[name]) for name, g in expected.grads.items()),
        *((f"the buffer {name}", x, actual.buffers[name]) for name, x in expected.buffers.items()),
    ]:
        of_tensor, of_model = LOW_PRECISION if loosely else TOLERANCE.get(a.dtype, LOW_PRECISION)
        allowed = of_tensor * _largest(a) + of_model * largest if a.is_floating_point() else 0
        if not torch.allclose(a.double(), b.double(), rtol=0, atol=allowed, equal_nan=True):
            off = _largest(a.double() - b.double())
            return f"{name} is off by {off:.1e}, where rounding explains at most {allowed:.1e}"
    return ""


def _largest(x: Tensor) -> float:
    return x.abs().nan_to_num().amax().item() if x.numel() else 0.0
