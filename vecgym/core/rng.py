"""Random numbers keyed by what they are for: (seed, purpose, step, global node id, ...).

A key is a pure function of its parts, so nothing depends on the order in which nodes are visited, on how
they are chunked, or on what was drawn before; and no global random state is read or changed. Where other people's
code draws from the global generators, `GlobalStates` gives it states of its own.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, NamedTuple

import numpy as np
import torch


def key(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit integer that depends on every part.

    >>> key(0, "islands", 3) == key(0, "islands", 3), key(0, "islands", 3) == key(0, "islands", 4)
    (True, False)
    """
    text = ":".join([str(int(seed)), purpose, *[str(int(i)) for i in ids]])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *ids: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator seeded with `key(seed, purpose, *ids)`.

    >>> bool(torch.rand(1, generator=generator(0, "a")) == torch.rand(1, generator=generator(0, "a")))
    True
    """
    return torch.Generator(device=device).manual_seed(key(seed, purpose, *ids))


class GlobalStates(NamedTuple):
    """The states of the global generators: torch's, numpy's, Python's, and those of the GPUs in use.

    >>> before = GlobalStates.now()
    >>> GlobalStates.seeded(3).restore(); x = torch.rand(2)
    >>> GlobalStates.seeded(3).restore(); bool((torch.rand(2) == x).all())
    True
    >>> before.restore()
    """

    cpu: torch.Tensor
    cuda: list[torch.Tensor]
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> GlobalStates:
        """What the generators hold."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())  # noqa: NPY002

    @classmethod
    def seeded(cls, seed: int) -> GlobalStates:
        """What they would hold after being seeded, all alike; they are left as they are."""
        before = cls.now()
        try:
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            random.seed(seed)
            return cls.now()
        finally:
            before.restore()

    def restore(self) -> None:
        """Make the generators hold this."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(self.python)

    def packed(self) -> dict[str, Any]:
        """The same in tensors, numbers and strings, for a file.

        >>> sorted(GlobalStates.now().packed())
        ['cpu', 'cuda', 'numpy', 'python']
        """
        name, keys, *rest = self.numpy
        version, words, gauss = self.python
        return {
            "cpu": self.cpu, "cuda": self.cuda,
            "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
            "python": [version, torch.tensor(words), gauss],
        }  # fmt: skip

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> GlobalStates:
        """The inverse of `packed`.

        >>> state = GlobalStates.seeded(0)
        >>> GlobalStates.unpacked(state.packed()).python == state.python
        True
        """
        name, keys, *rest = packed["numpy"]
        version, words, gauss = packed["python"]
        numpy = (name, keys.numpy().astype(np.uint32), *rest)
        return cls(packed["cpu"], packed["cuda"], numpy, (version, tuple(words.tolist()), gauss))
