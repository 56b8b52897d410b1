"""Random numbers keyed by what they are for: (seed, purpose, step, global node id, ...).

A key is a pure function of its parts, so nothing depends on the order in which nodes are visited, on how
they are chunked, or on what was drawn before; and no global random state is read or changed.
"""

from __future__ import annotations

import hashlib

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
