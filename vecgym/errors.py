"""The warning that vecgym gives."""

from __future__ import annotations


class VecgymWarning(UserWarning):
    """A setting has no effect, or not the one that its name suggests."""
