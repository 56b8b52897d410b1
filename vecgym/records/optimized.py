"""The result of `vecgym.optimize_schedule`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class OptimizedSchedule:
    """An optimised schedule of exchanges, compared with the uniform one.

    Attributes:
        schedule: the schedule to train with: `[T]` of 0 and 1, or mixing matrices.
        weights: the best weights before rounding, `[T]` in [0, 1]; for matrices the same as `schedule`.
        uniform: an exchange every H steps at the same bytes, `[T]` of 0 and 1; for matrices the initial ones.
        loss, relaxed_loss, uniform_loss: the final losses of `schedule`, `weights` and `uniform`.
        held_out_loss, held_out_uniform_loss: of `schedule` and `uniform` on held-out batches; None without any.
        total_bytes: bytes sent over a node's link in the whole run, by `schedule` and `uniform` alike.
        losses: the loss at each accepted step of the descent, before rounding.

    >>> import torch
    >>> late, uniform = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    >>> optimized = OptimizedSchedule(
    ...     late, weights=late, uniform=uniform, loss=1.0, relaxed_loss=1.0, uniform_loss=1.5, total_bytes=800.0,
    ...     losses=(1.5, 1.0), held_out_loss=1.25, held_out_uniform_loss=1.5,
    ... )
    >>> optimized.gain, optimized.held_out_gain
    (0.5, 0.25)
    >>> print(optimized)
    2 exchanges in 4 steps, 800 bytes per node: loss 1, of every H 1.5; gained 0.5; on held-out batches gained 0.25
    """

    schedule: Tensor
    weights: Tensor
    uniform: Tensor
    loss: float
    relaxed_loss: float
    uniform_loss: float
    total_bytes: float
    losses: tuple[float, ...]
    held_out_loss: float | None = None
    held_out_uniform_loss: float | None = None

    @property
    def gain(self) -> float:
        """The reduction of the loss compared with `uniform`, at equal bytes; 0 if there is none."""
        return self.uniform_loss - self.loss

    @property
    def held_out_gain(self) -> float | None:
        """The gain on the held-out batches, which the descent did not use; it may be negative."""
        if self.held_out_loss is None or self.held_out_uniform_loss is None:
            return None
        return self.held_out_uniform_loss - self.held_out_loss

    def __str__(self) -> str:
        of_steps = self.schedule.dim() == 1
        what = f"{int(self.schedule.sum())} exchanges in {len(self.schedule)} steps" if of_steps else "mixing matrices"
        other = "every H" if of_steps else "the start"
        text = (
            f"{what}, {self.total_bytes:,.0f} bytes per node: loss {self.loss:.6g}, of {other} {self.uniform_loss:.6g}"
        )
        text += f"; gained {self.gain:.3g}" if self.gain > 0 else "; NOTHING gained"
        if self.held_out_gain is None:
            return f"{text} (on the batches that were optimised on)"
        gain = f"gained {self.held_out_gain:.3g}" if self.held_out_gain > 0 else f"LOST {-self.held_out_gain:.3g}"
        return f"{text}; on held-out batches {gain}"
