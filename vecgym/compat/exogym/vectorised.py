"""A run's strategy: what does for all nodes at once what EXO Gym's does, or EXO Gym's itself on every rank."""

from __future__ import annotations

from typing import Any

from torch import nn

from vecgym import strategy as native
from vecgym.compat.exogym.base import Strategy, as_written


def vectorised(strategy: Strategy, num_nodes: int, max_steps: int | None) -> native.Strategy:
    """Return vecgym's strategy for a run of `max_steps`; None: as many as the epochs have.

    What cannot be written for all nodes at once, such as a user's own `step`, runs rank by rank.

    >>> from vecgym.compat.exogym import DiLoCoStrategy, OptimSpec
    >>> vectorised(DiLoCoStrategy(OptimSpec(lr=0.1), H=5), num_nodes=2, max_steps=10)
    DiLoCoStrategy(OptimSpec(AdamW, lr=0.1), \
DiLoCoCommunicator(outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=5))
    """
    schedule = _schedule(strategy, max_steps)
    found = None
    if schedule is not None and as_written(strategy) is not None:
        found = strategy._vectorised(num_nodes, max_norm=getattr(strategy, "max_norm", None) or None, **schedule)
    return PerRank(strategy) if found is None else found


def _schedule(strategy: Strategy, max_steps: int | None) -> dict[str, Any] | None:
    """Return the arguments of vecgym that give the same learning rates; None: there are none."""
    if strategy.lr_scheduler is None:
        return {}
    if not isinstance(strategy.lr_scheduler, str):
        return None
    if strategy.lr_scheduler_kwargs.get("max_steps") is None:
        return {"lr_scheduler": "lambda_cosine", **strategy._form}
    return None if max_steps is None else {"lr_scheduler": strategy._schedule(max_steps)}


class PerRank(native.RankStrategy):
    """Runs a strategy written for EXO Gym on every rank; see `vecgym.strategy.per_rank`."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.theirs = strategy

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        self.model = model
        self.theirs.max_steps = self.max_steps
        self.theirs._init_node(model, rank, num_nodes)
        if hasattr(self.theirs, "optim"):
            self.optim = self.theirs.optim  # whose learning rate is recorded
        self._left: dict[str, Any] = {}

    def step(self) -> None:
        """Add this step's gradients to what `zero_grad` leaves of the last step's, then run the user's step."""
        params = dict(self.model.named_parameters())
        fresh = {name: p.grad for name, p in params.items() if p.requires_grad}
        for name in fresh:
            params[name].grad = self._left.get(name)
        self.theirs.zero_grad()
        for name, grad in fresh.items():
            kept = params[name].grad
            params[name].grad = grad if kept is None or grad is None else kept.add_(grad)
        self.theirs.step()
        self._left = {name: p.grad for name, p in params.items()}

    def __repr__(self) -> str:
        settings = {name: x for name, x in self.theirs.__config__().items() if name not in ("kwargs", "strategy")}
        return f"{type(self.theirs).__name__}({', '.join(f'{name}={x!r}' for name, x in settings.items())})"
