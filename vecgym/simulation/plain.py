"""Plain steps: engine and optimizer look up tensors and kernels once, as long as the tensors stay where they are."""

from __future__ import annotations

from typing import Any

from vecgym.core.tree import Tree
from vecgym.engine import Engine, Local
from vecgym.engine.recorded import PreparedPass
from vecgym.optim.optimizer import Optimizer, PreparedStep, Slots


class Plain:
    """The gradients and optimizer steps that were prepared in a run, by the group of rows."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._gradients: dict[Any, tuple[Any, PreparedPass | None]] = {}
        self._steps: dict[Any, PreparedStep] = {}

    def gradients(self, group: int | None, params: Tree, batch: Any, num_rows: int, mean: bool) -> Local | None:
        """Compute the gradients of all rows of a group; None: `Engine.gradients` must compute them."""
        key = group, num_rows, mean
        plan, prepared = self._gradients.get(key, (None, None))
        if plan is not self.engine.plan or (prepared is not None and not prepared.is_for(params)):
            prepared = self.engine.prepared(params, num_rows, mean)
            self._gradients[key] = self.engine.plan, prepared
        computed = None if prepared is None else prepared.gradients(batch)
        return None if computed is None else Local(*computed, {})

    def step(self, optimizer: Optimizer, trees: tuple[Tree, Slots], grads: Tree, count: Any, lr: Any) -> bool:
        """Take a step of all rows of a group in place, and return True; False: `Optimizer.step` must take it."""
        if not isinstance(count, int) or type(optimizer) is not Optimizer:  # a subclass may have its own `step`
            return False
        prepared = self._steps.get(id(optimizer))
        if prepared is None or prepared.optimizer is not optimizer or not prepared.is_for(*trees):
            prepared = optimizer.prepared(*trees)
            if prepared is None:
                return False
            self._steps[id(optimizer)] = prepared
        return prepared(grads, count, lr)
