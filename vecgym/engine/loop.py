"""The backend `loop`: node after node, for models that `vmap` cannot run, for debugging, and where it is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.engine.backend import Local, NodeSlice, joined_missing, row, settle, stacked, unstacked
from vecgym.engine.contract import check_steady, naming
from vecgym.engine.stateless import StatelessModel, TwiceDifferentiable


class Loop:
    """One node after the other, each with its own random key; a model's error names the node and the step."""

    def __init__(self, model: StatelessModel) -> None:
        self.model = model

    def gradients(self, part: NodeSlice, out: Callable[[], Tree], thread: int = 0) -> Local:
        grads, losses = out(), []
        missing: dict[str, frozenset[int]] = {}
        for i in range(part.size):
            loss, gradient = self._one(part, i, thread)
            for name, g in grads.items():
                if name in gradient:
                    g[i].copy_(gradient[name])
                else:
                    g[i].zero_()
                    missing[name] = missing.get(name, frozenset()) | {i}
            losses.append(loss)
        return Local(grads, torch.stack(losses), part.buffers, missing)

    def mean_gradients(self, part: NodeSlice, num_nodes: int) -> Iterator[tuple[Tree, Tensor]]:
        for i in range(part.size):
            loss, gradient = self._one(part, i, thread=0)
            # Tensors are freed one by one, here and by the engine: together they are as large as the model.
            yield {n: (g := gradient.pop(n)).to(tree.wider(g.dtype)) / num_nodes for n in list(gradient)}, loss[None]

    def _one(self, part: NodeSlice, i: int, thread: int) -> tuple[Tensor, Tree]:
        """Compute the loss of one node, and its gradient with respect to the parameters on which it depends.

        Its rows of buffers and written parameters are overwritten.
        """
        params, buffers = row(part.params, i), row(part.buffers, i)
        leaves = {name: self.model.leaf(name, p) for name, p in params.items()}
        batch = tree.map_leaves(lambda x: x[i], part.batch)
        with self.model.seeded(*part.keys.of(i)), naming(f"node {part.keys.node_ids[i]}, step {part.keys.steps[i]}"):
            fixed = [(name, x, x._version) for name, x in (leaves | buffers).items() if not self.model.writes(name)]
            loss, after, grads = self.model.gradient(leaves, buffers, batch, thread)
            check_steady([name for name, x, version in fixed if x._version != version])
        settle(buffers, {name: b for name, b in after.items() if self.model.changes(name)})
        settle(params, {name: leaves[name] for name in self.model.written})
        return loss.detach(), {name: g for name, g in zip(leaves, grads) if g is not None}

    def pure(self, part: NodeSlice) -> Local:
        of_one = grad_and_value(self.model.noted_loss, has_aux=True)
        results, missing = [], []
        with TwiceDifferentiable(), self.model.casting():
            for i in range(part.size):
                changed, shared = self.model.split(part.buffers)
                own, used = {name: b[i].clone() for name, b in changed.items()}, set[str]()
                with self.model.seeded(*part.keys.of(i)):
                    batch = tree.map_leaves(lambda x: x[i], part.batch)  # noqa: B023
                    results.append(of_one(row(part.params, i), own, shared, batch, used))
                missing.append(([i], {name: frozenset({0}) for name in part.params if name not in used}))
        grads, values = zip(*results)
        losses, after = zip(*values)
        buffers = {**part.buffers, **stacked(after)}
        return Local(stacked(grads), torch.stack(losses), buffers, joined_missing(missing))

    def measures(self, tensors: Tree, batch: Any, own_batches: bool, size: int, several: bool) -> Tree:
        measured = []
        for i in range(size):
            examples = tree.map_leaves(lambda x: x[i], batch) if own_batches else batch  # noqa: B023
            batches = unstacked(examples) if several else [examples]
            with self.model.casting():
                of_one = [self.model.measure(row(tensors, i), one) for one in batches]
            measured.append(stacked(of_one) if several else of_one[0])
        return stacked(measured)
