"""How EXO Gym itself interprets its strategies' arguments, and what it ignores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vecgym import optim as vecgym_optim
from vecgym.compat.exogym.behaviour import AsAsked, Choice
from vecgym.compat.exogym.demo import DeMoStrategy
from vecgym.compat.exogym.strategies import (
    DiLoCoCommunicator,
    OptimizingStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
)

DEMO_LR = 1e-3


class AsExoGym(AsAsked):
    """Do what EXO Gym does.

    >>> [t for t in range(12) if AsExoGym().is_due(t, 4)]
    [4, 8]
    """

    def is_due(self, local_step: int, H: int) -> bool:
        """Return True first after H + 1 steps: EXO Gym tests the counter before it advances it."""
        return local_step > 0 and local_step % H == 0

    def is_sparta_due(self, local_step: int, interval: int) -> bool:
        return True

    def steps_alone(self) -> bool:
        return False

    def spec(self, given: vecgym_optim.OptimSpec, choice: Choice) -> vecgym_optim.OptimSpec:
        return choice.read if given is choice.asked else given

    def annealed(self, progress: float) -> float:
        return progress

    def demo_lr(self, spec: vecgym_optim.OptimSpec) -> Any:
        return DEMO_LR

    def demo_max_norm(self, max_norm: float | None) -> float | None:
        return None

    def check_demo(self, shape: list[int]) -> None:
        if len(shape) > 2:
            raise ValueError(
                f"EXO Gym's DeMo cannot train tensors of more than two dimensions, such as {shape}. "
                "Without strict timing vecgym's own does."
            )


def ignored(strategy: Any) -> Iterator[str]:
    """Yield, in words, what was asked for and EXO Gym does not do."""
    if isinstance(strategy, OptimizingStrategy):
        yield from (f"{text}: it trains with {strategy._choice.read!r}" for text in strategy._choice.unread)
    for module in getattr(strategy, "communication_modules", ()):
        if isinstance(module, DiLoCoCommunicator):
            yield from (f"{text}: the outer optimizer is {module._choice.read!r}" for text in module._choice.unread)
    if isinstance(strategy, SPARTAStrategy) and strategy.async_sparta_delay:
        yield f"async_sparta_delay={strategy.async_sparta_delay}"
    if isinstance(strategy, SPARTADiLoCoStrategy) and strategy.sparta_interval != 1:
        yield f"sparta_interval={strategy.sparta_interval}: SPARTA acts at every step"
    if isinstance(strategy, DeMoStrategy):
        if strategy.optim_spec.lr != DEMO_LR:
            yield f"the learning rate {strategy.optim_spec.lr} of the optimizer: DeMo's is {DEMO_LR}"
        if strategy.max_norm:
            yield f"max_norm={strategy.max_norm}"
