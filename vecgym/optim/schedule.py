"""Learning-rate schedules: functions step -> factor.

A schedule is a function of the 0-based index of an optimizer step; its value multiplies the optimizer's learning rate.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from torch import Tensor

from vecgym.core import check

Schedule = Callable[[int], Any]  # step -> factor, a number or a tensor

NAMES = ("constant", "cosine", "lambda_cosine")


def lambda_cosine(
    max_steps: int, warmup_steps: int = 0, cosine_anneal: bool = False, final_factor: float = 0.1
) -> Schedule:
    """Warm up linearly from 0 over `warmup_steps`, then stay constant or, with `cosine_anneal`, follow a cosine.

    t < w: f = t / w;  then f = 1, or f = m + (1 - m) (1 + cos(pi (t - w) / (T - w))) / 2, which reaches
    m = `final_factor` at t = T = `max_steps`.

    >>> schedule = lambda_cosine(max_steps=100, warmup_steps=10, cosine_anneal=True)
    >>> [round(schedule(t), 3) for t in (0, 5, 10, 55, 100)]
    [0.0, 0.5, 1.0, 0.55, 0.1]
    """
    check.integer("max_steps", max_steps)
    check.integer("warmup_steps", warmup_steps, 0)
    check.flag("cosine_anneal", cosine_anneal)
    check.number("final_factor", final_factor)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        if not cosine_anneal:
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        return final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def check_schedule(name: str | Schedule | None, warmup_steps: int = 0, cosine_anneal: bool = False) -> None:
    """Raise the same errors as `make_schedule`, before the number of steps is known.

    >>> check_schedule("cosin")
    Traceback (most recent call last):
    ...
    ValueError: lr_scheduler='cosin' is not known; did you mean 'cosine'? Allowed: 'constant', 'cosine', \
'lambda_cosine', a function step -> factor, or None.
    """
    check.integer("warmup_steps", warmup_steps, 0, "optimizer steps")
    check.flag("cosine_anneal", cosine_anneal)
    if isinstance(name, str):
        check.choice("lr_scheduler", name, NAMES, "a function step -> factor, or None")
    elif name is not None and not callable(name):
        raise TypeError(
            f"lr_scheduler={name!r} is a {type(name).__name__}; give a name {NAMES}, "
            "a function such as lambda step: 0.99**step, or None."
        )
    if callable(name) and (warmup_steps or cosine_anneal):
        raise ValueError(
            "warmup_steps and cosine_anneal have no effect if lr_scheduler is a function: "
            'include the warm-up in the function, or use lr_scheduler="lambda_cosine".'
        )


def make_schedule(
    name: str | Schedule | None, max_steps: int, warmup_steps: int = 0, cosine_anneal: bool = False
) -> Schedule:
    """Make a schedule from a name, `"constant"`, `"cosine"` or `"lambda_cosine"`, from a function, or from None.

    Every named schedule starts with `warmup_steps`; `"cosine"` is `"lambda_cosine"` with `cosine_anneal=True`.

    >>> make_schedule("cosine", max_steps=10)(10)
    0.1
    """
    check_schedule(name, warmup_steps, cosine_anneal)
    if callable(name):
        return lambda step: _factor(check.called("lr_scheduler", name, step), step)
    return lambda_cosine(max_steps, warmup_steps, cosine_anneal or name == "cosine")


def _factor(value: Any, step: int) -> Any:
    """Return the value of a user's schedule if it is a number, or a tensor as in a differentiable run."""
    if isinstance(value, (numbers.Real, Tensor)):
        return value
    raise TypeError(
        f"lr_scheduler({step}) returned {value!r}; a schedule returns the learning rate's factor, a number."
    )
