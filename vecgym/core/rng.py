"""Random numbers keyed by their purpose: (seed, purpose, step, global node id, ...).

A key is a pure function of its parts, so nothing depends on the order in which nodes are visited, on how
they are chunked, or on earlier draws; no global random state is read or changed. User code that
draws from the global generators gets its own states from `GlobalStates`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


def key(seed: int, purpose: str, *ids: int) -> int:
    """Return a 63-bit integer that depends on every part.

    >>> key(0, "islands", 3) == key(0, "islands", 3), key(0, "islands", 3) == key(0, "islands", 4)
    (True, False)
    """
    text = ":".join([str(int(seed)), purpose, *[str(int(i)) for i in ids]])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """Return a new generator, seeded with `key(seed, purpose, *ids)`.

    >>> bool(torch.rand(1, generator=generator(0, "a")) == torch.rand(1, generator=generator(0, "a")))
    True
    """
    return torch.Generator().manual_seed(key(seed, purpose, *ids))


class GlobalStates(NamedTuple):
    """The states of the global generators: torch's, numpy's, Python's, and those of the accelerators in use.

    >>> before = GlobalStates.now()
    >>> GlobalStates.seeded(3).restore(); x = torch.rand(2)
    >>> GlobalStates.seeded(3).restore(); bool((torch.rand(2) == x).all())
    True
    >>> before.restore()
    """

    cpu: torch.Tensor
    numpy: Any
    python: Any
    accelerators: list[torch.Tensor]

    @classmethod
    def now(cls, accelerators: bool = True) -> GlobalStates:
        """Return the current states; without those of the accelerators if nothing draws from them."""
        states = _accelerator_states() if accelerators else []
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate(), states)  # noqa: NPY002

    @classmethod
    def seeded(cls, seed: int) -> GlobalStates:
        """Return the states after seeding all generators with `seed`, and leave the generators unchanged."""
        before = cls.now()
        try:
            torch.manual_seed(seed)
            seed_cpu(seed)
            return cls.now()
        finally:
            before.restore()

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(self.python)
        if self.accelerators and torch.cuda.is_available():
            for device, state in zip(range(torch.cuda.device_count()), self.accelerators):
                torch.cuda.set_rng_state(state, device)
        elif self.accelerators and torch.backends.mps.is_available():
            torch.mps.set_rng_state(self.accelerators[0])

    def packed(self) -> list[Any]:
        """Return the states as tensors, arrays, numbers and strings, for a file.

        >>> len(GlobalStates.now().packed())
        4
        """
        return list(self)

    @classmethod
    def unpacked(cls, packed: list[Any]) -> GlobalStates:
        """Invert `packed`. An invalid state raises the error of the generator's `set_state`.

        >>> state = GlobalStates.seeded(0)
        >>> GlobalStates.unpacked(state.packed()).python == state.python
        True
        """
        cpu, numpy, python, accelerators = packed
        torch.Generator().set_state(cpu)
        np.random.RandomState().set_state(numpy)
        random.Random().setstate(python)
        return cls(cpu, numpy, python, accelerators)


@contextmanager
def private(seed: int | None = None) -> Iterator[None]:
    """Restore the CPU's global generators after a block in which user code may draw from them.

    Args:
        seed: the seed of all of them within the block; None: they continue from their current states.

    >>> with private(3):
    ...     x = torch.rand(2)
    >>> with private(3):
    ...     bool((torch.rand(2) == x).all())
    True
    """
    before = GlobalStates.now(accelerators=False)
    try:
        if seed is not None:
            seed_cpu(seed)
        yield
    finally:
        before.restore()


def host_states() -> tuple[Any, ...]:
    """Return the states of numpy's and Python's global generators, to be compared.

    >>> with private():
    ...     before = host_states()
    ...     same, x = before == host_states(), random.random()
    ...     same, before == host_states()
    (True, False)
    """
    _, words, *rest = np.random.get_state()  # noqa: NPY002
    return np.asarray(words).tobytes(), rest, random.getstate()


def seed_cpu(seed: int) -> None:
    """Seed the global generators of the CPU: torch's, numpy's and Python's.

    >>> with private():
    ...     seed_cpu(3)
    """
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which is slow: it seeds the accelerators too
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def _accelerator_states() -> list[torch.Tensor]:
    if torch.cuda.is_initialized():
        return torch.cuda.get_rng_state_all()
    return [torch.mps.get_rng_state()] if torch.backends.mps.is_available() else []
