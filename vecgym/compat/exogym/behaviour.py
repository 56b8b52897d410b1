"""What strategies written for EXO Gym do with their arguments: here, what these say."""

from __future__ import annotations

from typing import Any, NamedTuple

from vecgym import optim as vecgym_optim


class Choice(NamedTuple):
    """An optimizer that was asked for, and what EXO Gym makes of the same arguments."""

    asked: vecgym_optim.OptimSpec
    read: vecgym_optim.OptimSpec  # what EXO Gym takes
    unread: tuple[str, ...] = ()  # what it ignores


class AsAsked:
    """What the arguments say, with vecgym's timing; `vecgym.compat.exogym.strict.AsExoGym` does what EXO Gym does.

    >>> [t for t in range(12) if AsAsked().is_due(t, 4)]
    [3, 7, 11]
    """

    def is_due(self, local_step: int, H: int) -> bool:
        """Whether the nodes exchange after the step that `local_step` counts from 0: after every H steps."""
        return (local_step + 1) % H == 0

    def is_sparta_due(self, local_step: int, interval: int) -> bool:
        """The same of the sparse exchanges beside DiLoCo."""
        return self.is_due(local_step, interval)

    def steps_alone(self) -> bool:
        """Whether DiLoCo's outer optimizer steps in a run of one node."""
        return True

    def spec(self, given: vecgym_optim.OptimSpec, choice: Choice) -> vecgym_optim.OptimSpec:
        """Return the optimizer to train with; `given` is the present one, which the user may have set."""
        return given

    def annealed(self, progress: float) -> float:
        """Return how far the cosine is, in its half turns, after a part of the steps."""
        return min(1.0, progress)

    def demo_lr(self, spec: vecgym_optim.OptimSpec) -> Any:
        """Return the learning rate of DeMo's signs."""
        return spec.lr

    def demo_max_norm(self, max_norm: float | None) -> float | None:
        """Return the norm to which DeMo clips."""
        return max_norm

    def check_demo(self, shape: list[int]) -> None:
        """Raise a ValueError for a tensor that DeMo cannot train."""
