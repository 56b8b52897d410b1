"""The backend `vmap`: all nodes of a part in one vectorised call. The only module that calls `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from vecgym.core.tree import Tree
from vecgym.engine.backend import Local, Part, settle
from vecgym.engine.batching_rules import Folding, TwiceDifferentiable
from vecgym.engine.stateless import StatelessModel, plain_attention


class Vmap:
    """All nodes at once. Their random numbers differ, and depend on which nodes are in the call."""

    def __init__(self, model: StatelessModel) -> None:
        self.model = model

    def gradients(self, part: Part, out: Callable[[], Tree], thread: int = 0) -> Local:
        leaves = {n: p.detach().expand(part.size, *p.shape[1:]).requires_grad_() for n, p in part.params.items()}
        with self.model.seeded(part.keys.of(0)):
            losses = self._losses(leaves, {}, part, thread)
            grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        return Local(dict(zip(leaves, grads)), losses.detach(), part.buffers)

    def mean_gradients(self, part: Part, num_nodes: int) -> Iterator[tuple[Tree, Tensor]]:
        """Yield one piece, of parameters stored once: the cost of one model on all batches."""
        leaves = {name: self.model.leaf(name, p[0]) for name, p in part.params.items()}
        with self.model.seeded(part.keys.of(0)):
            losses = self._losses({}, leaves, part, thread=0)
            share = losses.new_full(losses.shape, 1 / num_nodes)
            grads = torch.autograd.grad(losses, list(leaves.values()), share, materialize_grads=True)
        yield dict(zip(leaves, grads)), losses.detach()

    def _losses(self, leaves: Tree, shared_leaves: Tree, part: Part, thread: int) -> Tensor:
        """Return losses `[n]`, differentiable in `leaves` `[n, *]` and `shared_leaves` `[*]`; write the buffers."""
        changed, shared = self.model.split(part.buffers)

        def loss_of_one(params: Tree, buffers: Tree, batch: Any) -> tuple[Tensor, Tree]:
            return self.model.loss(params, buffers, {**shared, **shared_leaves}, batch, thread)

        with Folding(), self.model.casting():
            losses, after = vmap(loss_of_one, randomness="different")(leaves, changed, part.batch)
        settle(changed, after)
        return losses

    def pure(self, part: Part) -> Local:
        changed, shared = self.model.split(part.buffers)
        own = {name: b.clone() for name, b in changed.items()}
        of_one = grad_and_value(self.model.loss, has_aux=True)
        with self.model.seeded(part.keys.of(0)), TwiceDifferentiable(), self.model.casting():
            of_all = vmap(of_one, in_dims=(0, 0, None, 0), randomness="different")
            grads, (losses, after) = of_all(part.params, own, shared, part.batch)
        return Local(grads, losses, {**part.buffers, **after})

    def measures(self, tensors: Tree, batch: Any, own_batches: bool, size: int) -> Tree:
        dims = {name: 0 if x.shape[0] == size else None for name, x in tensors.items()}
        given = {name: x if dims[name] == 0 else x[0] for name, x in tensors.items()}
        with Folding(), self.model.casting(), plain_attention():
            of_all = vmap(self.model.measure, in_dims=(dims, 0 if own_batches else None), randomness="different")
            return of_all(given, batch)
