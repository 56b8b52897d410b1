"""What a run may be given, checked before it begins; and how Ctrl-C ends one between two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vecgym.strategy import Strategy

ON_DIVERGENCE = ("raise", "warn", "ignore")


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
    engine: str
    chunk_size: int | None
    node_threads: int | None
    on_divergence: str
    log_interval: int
    dataloader_kwargs: Mapping[str, Any] | None
    exact: bool
    save_dir: Path | None
    checkpoint_interval: int | None
    resume: bool | str | os.PathLike[str]
    keep_checkpoints: int

    @property
    def recorded(self) -> dict[str, Any]:
        """What a run's settings say of them."""
        names = ("batch_size", "minibatch_size", "shuffle", "seed", "autocast", "exact")
        return {name: getattr(self, name) for name in names}


def check_run(
    strategy: Any, num_nodes: Any, batch_size: Any, minibatch_size: Any, val_size: Any, on_divergence: Any
) -> None:
    """Raise an error for settings of a run that cannot work."""
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy is {kind_of(strategy)}; give a Strategy object such as DiLoCoStrategy('adamw', H=100)."
        )
    check_counts(num_nodes=num_nodes, batch_size=batch_size)
    check_counts(or_none=True, minibatch_size=minibatch_size)
    if minibatch_size is not None and batch_size % minibatch_size != 0:
        divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ValueError(f"minibatch_size={minibatch_size} must divide batch_size={batch_size}: one of {divisors}.")
    if val_size is not None and (isinstance(val_size, bool) or not isinstance(val_size, int) or val_size < 0):
        raise ValueError(
            f"val_size={val_size!r} must be an integer >= 0 (0: never evaluate), or None for all examples."
        )
    if on_divergence not in ON_DIVERGENCE:
        allowed = ", ".join(map(repr, ON_DIVERGENCE))
        raise ValueError(f"on_divergence={on_divergence!r} is not known; allowed: {allowed}.")


def accumulated(batch_size: Any, minibatch_size: int | None, gradient_accumulation: int | None) -> int | None:
    """The `minibatch_size` of a batch that is taken in `gradient_accumulation` equal parts.

    >>> accumulated(32, None, gradient_accumulation=4), accumulated(32, 16, gradient_accumulation=None)
    (8, 16)
    """
    if gradient_accumulation is None:
        return minibatch_size
    check_counts(batch_size=batch_size, gradient_accumulation=gradient_accumulation)
    if minibatch_size is not None:
        raise ValueError(
            f"gradient_accumulation={gradient_accumulation} and minibatch_size={minibatch_size} both say how a batch "
            "is divided: give one of them."
        )
    if batch_size % gradient_accumulation != 0:
        divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ValueError(
            f"gradient_accumulation={gradient_accumulation} must divide batch_size={batch_size}: one of {divisors}."
        )
    return batch_size // gradient_accumulation


def check_counts(or_none: bool = False, **values: Any) -> None:
    """Raise a ValueError unless each value is an integer >= 1 (or None, if allowed)."""
    for name, value in values.items():
        if or_none and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer >= 1{', or None' if or_none else ''}.")


def check_flags(**values: Any) -> None:
    """Raise a TypeError unless each value is True or False: "no" would count as True."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be True or False.")


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


def kind_of(value: Any) -> str:
    """What a wrong argument is, for a message.

    >>> kind_of(3), kind_of(Strategy)
    ('of type int', 'the class Strategy')
    """
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
