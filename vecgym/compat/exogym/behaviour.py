"""How EXO Gym's strategies interpret their arguments: here, as they say."""

from __future__ import annotations

from typing import Any, NamedTuple

from vecgym import optim as vecgym_optim


class Choice(NamedTuple):
    """An optimizer that was asked for, and the one that EXO Gym takes instead."""

    asked: vecgym_optim.OptimSpec
    read: vecgym_optim.OptimSpec  # by EXO Gym
    unread: tuple[str, ...] = ()  # the arguments that it ignores


class AsAsked:
    """Do what the arguments say, with vecgym's timing; `vecgym.compat.exogym.strict.AsExoGym` does what EXO Gym does.

    >>> [t for t in range(12) if AsAsked().is_due(t, 4)]
    [3, 7, 11]
    """

    def is_due(self, local_step: int, H: int) -> bool:
        """Return whether the nodes exchange after step `local_step`, counted from 0: after every H steps."""
        return (local_step + 1) % H == 0

    def is_sparta_due(self, local_step: int, interval: int) -> bool:
        """Return the same for SPARTA's exchanges in addition to DiLoCo's."""
        return self.is_due(local_step, interval)

    def steps_alone(self) -> bool:
        """Return whether DiLoCo's outer optimizer takes steps in a run of one node."""
        return True

    def spec(self, given: vecgym_optim.OptimSpec, choice: Choice) -> vecgym_optim.OptimSpec:
        """Return the optimizer to train with; `given` is the current one, which the user may have set."""
        return given

    def annealed(self, progress: float) -> float:
        """Return where on its half turn the cosine is after this fraction of the steps."""
        return min(1.0, progress)

    def demo_lr(self, spec: vecgym_optim.OptimSpec) -> Any:
        """Return DeMo's learning rate."""
        return spec.lr

    def demo_max_norm(self, max_norm: float | None) -> float | None:
        """Return the norm to which DeMo clips gradients."""
        return max_norm

    def check_demo(self, shape: list[int]) -> None:
        """Raise a ValueError for a tensor that DeMo cannot train."""
