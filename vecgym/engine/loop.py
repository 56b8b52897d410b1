"""The backend `loop`: node after node, for models that `vmap` cannot run, for debugging, and where it is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.engine.backend import Local, NodeSlice, row, settle, stacked, unstacked
from vecgym.engine.contract import check_steady, naming
from vecgym.engine.stateless import StatelessModel, TwiceDifferentiable


class Loop:
    """One node after the other, each with its own random key; a model's error names the node and the step."""

    def __init__(self, model: StatelessModel) -> None:
        self.model = model

    def gradients(self, part: NodeSlice, out: Callable[[], Tree], thread: int = 0) -> Local:
        grads, losses = out(), []
        for i in range(part.size):
            loss, gradient = self._one(part, i, thread)
            for name, g in gradient.items():
                grads[name][i].copy_(g)
            losses.append(loss)
        return Local(grads, torch.stack(losses), part.buffers)

    def mean_gradients(self, part: NodeSlice, num_nodes: int) -> Iterator[tuple[Tree, Tensor]]:
        for i in range(part.size):
            loss, gradient = self._one(part, i, thread=0)
            # Tensors are freed one by one, here and by the engine: together they are as large as the model.
            yield {name: gradient.pop(name) / num_nodes for name in list(gradient)}, loss[None]

    def _one(self, part: NodeSlice, i: int, thread: int) -> tuple[Tensor, Tree]:
        """Compute the loss and gradient of one node; overwrite its rows of buffers and written parameters."""
        params, buffers = row(part.params, i), row(part.buffers, i)
        leaves = {name: self.model.leaf(name, p) for name, p in params.items()}
        batch = tree.map_leaves(lambda x: x[i], part.batch)
        with self.model.seeded(*part.keys.of(i)), naming(f"node {part.keys.node_ids[i]}, step {part.keys.steps[i]}"):
            fixed = [(name, x, x._version) for name, x in (leaves | buffers).items() if not self.model.writes(name)]
            loss, after, grads = self.model.gradient(leaves, buffers, batch, thread)
            check_steady([name for name, x, version in fixed if x._version != version])
        settle(buffers, {name: b for name, b in after.items() if self.model.changes(name)})
        settle(params, {name: leaves[name] for name in self.model.written})
        dense = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(leaves.items(), grads)}
        return loss.detach(), dense

    def pure(self, part: NodeSlice) -> Local:
        of_one = grad_and_value(self.model.loss, has_aux=True)
        results = []
        with TwiceDifferentiable(), self.model.casting():
            for i in range(part.size):
                changed, shared = self.model.split(part.buffers)
                own = {name: b[i].clone() for name, b in changed.items()}
                with self.model.seeded(*part.keys.of(i)):
                    batch = tree.map_leaves(lambda x: x[i], part.batch)  # noqa: B023
                    results.append(of_one(row(part.params, i), own, shared, batch))
        grads, values = zip(*results)
        losses, after = zip(*values)
        return Local(stacked(grads), torch.stack(losses), {**part.buffers, **stacked(after)})

    def measures(self, tensors: Tree, batch: Any, own_batches: bool, size: int, several: bool) -> Tree:
        measured = []
        for i in range(size):
            examples = tree.map_leaves(lambda x: x[i], batch) if own_batches else batch  # noqa: B023
            batches = unstacked(examples) if several else [examples]
            with self.model.casting():
                of_one = [self.model.measure(row(tensors, i), one) for one in batches]
            measured.append(stacked(of_one) if several else of_one[0])
        return stacked(measured)
