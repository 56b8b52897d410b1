"""The backend `vmap`: all nodes of a part in one vectorised call. The only module that enters a vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.vmap import lazy_load_decompositions
from torch.func import grad_and_value

from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.engine.backend import Local, NodeSlice, apart, settle
from vecgym.engine.batching_rules import Folding, TwiceDifferentiable
from vecgym.engine.stateless import StatelessModel, gradients_within_modes, plain_attention

_load_decompositions = functools.cache(lazy_load_decompositions)  # vmap's decompositions of some operations


class Vmap:
    """All nodes at once. Their random numbers differ, and depend on which nodes are in the call."""

    def __init__(self, model: StatelessModel) -> None:
        self.model = model

    def gradients(self, part: NodeSlice, out: Callable[[], Tree], thread: int = 0) -> Local:
        with self.model.seeded(part.keys.of(0)):
            grads, losses = self._of_each(part, thread)
        return Local(grads, losses, part.buffers)

    def mean_gradients(self, part: NodeSlice, num_nodes: int) -> Iterator[tuple[Tree, Tensor]]:
        """Yield one piece, for parameters stored once: it costs as much as one model on all batches."""
        with self.model.seeded(part.keys.of(0)):
            piece = self._of_mean(part, num_nodes)
        yield piece

    def forget(self) -> None:
        """Keep nothing; see `Backend.forget`."""

    def _of_each(self, part: NodeSlice, thread: int) -> tuple[Tree, Tensor]:
        leaves = {n: p.detach().expand(part.size, *p.shape[1:]).requires_grad_() for n, p in part.params.items()}
        return self._gradients(leaves, {}, part, thread)

    def _of_mean(self, part: NodeSlice, num_nodes: int, thread: int = 0) -> tuple[Tree, Tensor]:
        leaves = {name: self.model.leaf(name, p[0]) for name, p in part.params.items()}
        return self._gradients({}, leaves, part, thread, num_nodes)

    def _gradients(
        self, own_leaves: Tree, shared_leaves: Tree, part: NodeSlice, thread: int, divisor: int = 1
    ) -> tuple[Tree, Tensor]:
        """Differentiate the sum of the losses `[n]` in `own_leaves` `[n, *]` and `shared_leaves` `[*]`.

        Return the gradients of the sum over `divisor`, and the losses; write the buffers.
        """
        changed, shared = self.model.split(part.buffers)
        leaves = {**own_leaves, **shared_leaves}
        grads: list[Tensor] = []

        def backward(losses: Tensor) -> None:
            total = losses.sum() if divisor == 1 else losses.sum() / divisor
            slopes = gradients_within_modes(total, list(leaves.values()))
            grads.extend(torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), slopes))

        def backward_within(loss: Tensor) -> None:
            level = _functorch.peek_interpreter_stack().level()
            with self.model.not_casting():
                backward(_functorch._remove_batch_dim(loss, level, part.size, 0))

        def loss_of_one(params: Tree, buffers: Tree, batch: Any) -> tuple[Tensor, Tree]:
            within = backward_within if self.model.recomputes else None
            return self.model.loss(params, buffers, {**shared, **shared_leaves}, batch, thread, within)

        with Folding(), self.model.casting():
            losses, after = on_all(loss_of_one, part.size, own_leaves, changed, part.batch)
        settle(changed, after)
        if not self.model.recomputes:
            backward(losses)
        return dict(zip(leaves, apart(grads))), losses.detach()

    def pure(self, part: NodeSlice) -> Local:
        changed, shared = self.model.split(part.buffers)
        own = {name: b.clone() for name, b in changed.items()}

        def of_one(params: Tree, buffers: Tree, batch: Any) -> tuple[Tree, tuple[Tensor, Tree]]:
            return grad_and_value(self.model.loss, has_aux=True)(params, buffers, shared, batch)

        with self.model.seeded(part.keys.of(0)), TwiceDifferentiable(), self.model.casting():
            grads, (losses, after) = on_all(of_one, part.size, part.params, own, part.batch)
        return Local(grads, losses, {**part.buffers, **after})

    def measures(self, tensors: Tree, batch: Any, own_batches: bool, size: int, several: bool) -> Tree:
        own = {name: x for name, x in tensors.items() if x.shape[0] == size > 1}
        shared = {name: x[0] for name, x in tensors.items() if name not in own}

        def of_one(own: Tree, batches: tuple[Any, ...]) -> Tree:
            examples = batches[0] if own_batches else batch
            measure = functools.partial(self.model.measure, {**shared, **own})
            return on_all(measure, len(next(tree.leaves(examples))), examples) if several else measure(examples)

        batches = (batch,) if own_batches else ()
        with Folding(), self.model.casting(), plain_attention():
            if size > 1:
                return on_all(of_one, size, own, batches)
            return tree.map(lambda x: x[None], of_one({}, tree.map_leaves(lambda x: x[0], batches)))


def on_all(fn: Callable[..., Any], size: int, *trees: Any) -> Any:
    """Call `fn` once for all nodes: `torch.func.vmap(fn, randomness="different")(*trees)`, with less overhead.

    torch's own inspects arguments and results so thoroughly that this takes as long as a small model.

    Args:
        fn: (the tensors of one node, in trees like these) -> tensors, in dicts and tuples.
        trees: of tensors `[size, *]`.

    >>> on_all(lambda x: {"sum": x["a"].sum()}, 2, {"a": torch.tensor([[1, 2], [3, 4]])})
    {'sum': tensor([3, 7])}
    """
    _load_decompositions()
    level = _functorch._vmap_increment_nesting(size, "different")
    try:
        inside = [tree.map_leaves(lambda x: _functorch._add_batch_dim(x, 0, level), values) for values in trees]
        return tree.map_leaves(lambda x: _functorch._remove_batch_dim(x, level, size, 0), fn(*inside))
    finally:
        _functorch._vmap_decrement_nesting()
