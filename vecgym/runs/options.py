"""What a run may be given, checked before it begins; and how Ctrl-C ends one between two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from vecgym import strategy as strategies
from vecgym.core import check
from vecgym.engine import EngineName
from vecgym.strategy import Strategy

OnDivergence = Literal["raise", "warn", "ignore"]
ON_DIVERGENCE: tuple[str, ...] = get_args(OnDivergence)

CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("num_nodes", "num_epochs", "batch_size", "log_interval", "keep_checkpoints"), check.integer),
    **dict.fromkeys(("max_steps", "minibatch_size", "val_interval", "correlation_interval"), check.optional_integer),
    **dict.fromkeys(("chunk_size", "node_threads", "checkpoint_interval", "num_processes"), check.optional_integer),
    **dict.fromkeys(("shuffle", "autocast", "exact", "progress"), check.flag),
    "seed": check.seed,
    "val_size": partial(check.optional_integer, least=0, what="0 never evaluates, None takes all examples"),
    "on_divergence": partial(check.choice, allowed=ON_DIVERGENCE),
    "timeout_s": partial(check.number, within="(0, inf]", what="seconds"),
}  # fmt: skip


@dataclass(frozen=True)
class FitOptions:
    """What `Trainer.fit` was given beside strategy and nodes, the same in every process; its docstring says more."""

    num_epochs: int
    max_steps: int | None
    batch_size: int
    minibatch_size: int | None
    max_memory_usage: float | None
    shuffle: bool
    device: torch.device
    seed: int
    val_size: int | None
    val_interval: int | None
    correlation_interval: int | None
    autocast: bool
    engine: EngineName
    chunk_size: int | None
    node_threads: int | None
    on_divergence: OnDivergence
    log_interval: int
    dataloader_kwargs: Mapping[str, Any] | None
    exact: bool
    save_dir: Path | None
    checkpoint_interval: int | None
    resume: bool | str | os.PathLike[str]
    keep_checkpoints: int

    def __post_init__(self) -> None:
        for name, value in checked(vars(self)).items():
            object.__setattr__(self, name, value)

    @property
    def recorded(self) -> dict[str, Any]:
        """What a run's settings say of them."""
        names = ("batch_size", "minibatch_size", "shuffle", "seed", "autocast", "exact")
        return {name: getattr(self, name) for name in names}


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as plain Python values; an error for those that no run can be given.

    >>> checked({"batch_size": 0})
    Traceback (most recent call last):
    ...
    ValueError: batch_size=0 must be an integer >= 1.
    """
    plain = {name: CHECKS[name](name, value) if name in CHECKS else value for name, value in settings.items()}
    if plain.get("minibatch_size") is not None:
        check_parts(plain["batch_size"], plain["minibatch_size"])
    return plain


def check_strategy(strategy: Any, num_nodes: Any = None) -> None:
    """Raise a TypeError for what is no strategy, saying what the user may have meant.

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
    """The `minibatch_size` of a batch that is taken in `gradient_accumulation` equal parts.

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


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it in the middle of a step; a second one raises at once.

    Yields a list that is empty until the first Ctrl-C. Outside the main thread, where no handler can be set, it
    stays empty.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def handler(signum: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)

    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # a sub-interpreter
        yield seen
        return
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, if it is there; None: cuda, else mps, else cpu.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    present = ["cpu"]
    if torch.backends.mps.is_available():
        present.insert(0, "mps")
    if torch.cuda.is_available():
        present.insert(0, "cuda")
    if device is None:
        return torch.device(present[0])
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r} is not a device; allowed here: {', '.join(present)}, or None.") from None
    count = torch.cuda.device_count() if chosen.type == "cuda" else 1
    if chosen.type not in present or (chosen.index or 0) >= count:
        raise ValueError(f"device={str(device)!r} is not there; present: {', '.join(present)}. None takes the best.")
    return chosen
