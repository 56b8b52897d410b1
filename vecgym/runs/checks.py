"""Checks of options that belong together, for all functions that run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vecgym import strategy as strategies
from vecgym.core import check
from vecgym.strategy import Strategy


def check_strategy(strategy: Any, num_nodes: Any = None) -> None:
    """Raise a TypeError for anything but a strategy, saying what the user may have meant.

    >>> check_strategy("diloco")
    Traceback (most recent call last):
    ...
    TypeError: strategy='diloco' is of type str; did you mean DiLoCoStrategy()? Give a Strategy object such as \
DiLoCoStrategy('adamw', H=100).
    """
    if isinstance(strategy, Strategy):
        return
    given, fix = f"strategy is {check.kind_of(strategy)}", "; "
    if isinstance(num_nodes, Strategy):
        fix = " and num_nodes a Strategy: they have changed places, fit(strategy, num_nodes). "
    elif isinstance(strategy, type) and issubclass(strategy, Strategy):
        fix = f"; did you mean an object of it, {strategy.__name__}()? "
    elif isinstance(strategy, str):
        names = {name.removesuffix("Strategy"): name for name in strategies.__all__ if name.endswith("Strategy")}
        close = check.closest(strategy, names)
        given = f"strategy={strategy!r} is of type str"
        fix = f"; did you mean {names[close]}()? " if close else fix
    give = "give" if fix == "; " else "Give"
    raise TypeError(f"{given}{fix}{give} a Strategy object such as DiLoCoStrategy('adamw', H=100).")


def check_parts(batch_size: int, parts: int, name: str = "minibatch_size") -> None:
    """Raise a ValueError unless `parts` divides the batch."""
    if batch_size % parts != 0:
        divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ValueError(f"{name}={parts} must divide batch_size={batch_size}: one of {divisors}.")


def accumulated(batch_size: Any, minibatch_size: int | None, gradient_accumulation: int | None) -> int | None:
    """Return the `minibatch_size` of a batch that is computed in `gradient_accumulation` equal parts.

    >>> accumulated(32, None, gradient_accumulation=4), accumulated(32, 16, gradient_accumulation=None)
    (8, 16)
    """
    if gradient_accumulation is None:
        return minibatch_size
    batch_size = check.integer("batch_size", batch_size)
    gradient_accumulation = check.integer("gradient_accumulation", gradient_accumulation)
    if minibatch_size is not None:
        raise ValueError(
            f"gradient_accumulation={gradient_accumulation} and minibatch_size={minibatch_size} both say how a batch "
            "is divided: give one of them."
        )
    check_parts(batch_size, gradient_accumulation, "gradient_accumulation")
    return batch_size // gradient_accumulation


def check_compute(strategy: Strategy, compute: Any) -> None:
    """Raise a ValueError for an asynchronous strategy without `compute`.

    >>> from vecgym.clock import Compute
    >>> from vecgym.strategy import AsyncStrategy
    >>> check_compute(AsyncStrategy(), Compute(0.4))
    """
    if compute is None:
        raise ValueError(
            f"{type(strategy).__name__} needs compute=: which node meets which version of the server depends on how "
            "long each computes. Give compute=vecgym.clock.Compute([1.0, 2.0, ...]), seconds of a step of each node."
        )


def check_left_out(strategy: Strategy, option: str, given: Any, default: Any) -> None:
    """Raise a ValueError for an option that this strategy does not have."""
    if given != default:
        raise ValueError(f"{option}={given!r} is not there for {type(strategy).__name__}: leave it out.")


def check_availability(dataloader_kwargs: Mapping[str, Any] | None) -> None:
    """Raise a ValueError for what a run in which nodes may be absent cannot have.

    >>> check_availability(None)
    """
    if (dataloader_kwargs or {}).get("num_workers"):
        raise ValueError(
            "availability with num_workers in dataloader_kwargs: each node reads the batch of its own count of steps, "
            "which workers cannot read ahead. Leave num_workers out."
        )


def checked_folder(name: str, value: Any) -> Path | None:
    """Return the folder as an absolute path, or None.

    >>> checked_folder("save_dir", None) is None
    True
    """
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={value!r} must be the path of a folder, or None.")
    folder = Path(value).absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{name}={str(value)!r} is a file; give a folder.")
    return folder


def checked_resume(name: str, value: Any) -> bool | str | os.PathLike[str]:
    """Return what to resume from, if it can be that.

    >>> checked_resume("resume", True)
    True
    """
    if not isinstance(value, (bool, str, os.PathLike)):
        raise TypeError(f"{name}={value!r} must be True, False, or the path of a checkpoint or a folder of them.")
    return value
