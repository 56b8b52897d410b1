"""The interfaces of other simulators, implemented with vecgym.

`install` lets scripts import another package's names although that package is not installed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from vecgym.core.errors import warn


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if it overflows.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    return float(torch.tensor(loss, dtype=torch.float64).exp())


class StandIn(ModuleType):
    """A module of another package that contains vecgym's classes.

    Args:
        path: the full name of the module.
        contents: name -> value.
    """

    def __init__(self, path: str, contents: Mapping[str, Any]) -> None:
        super().__init__(path, f"{path}, with vecgym's classes.")
        self.__path__: list[str] = []  # a package, whose only modules are those in sys.modules
        self.__spec__ = importlib.machinery.ModuleSpec(path, None, origin=__file__, is_package=True)
        self.__all__ = list(contents)
        vars(self).update(contents)


def install(modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Make `import` find stand-ins: path -> contents, each package before its modules.

    Warns if they hide a real package.

    Raises:
        ImportError: if the real package has already been imported, since its classes may be in use.
    """
    package = next(iter(modules))
    present = sys.modules.get(package)
    if isinstance(present, StandIn):
        return
    if present is not None:
        raise ImportError(
            f"{package} has already been imported from {getattr(present, '__file__', 'somewhere')}: call install() "
            "before anything imports it."
        )
    if (real := importlib.util.find_spec(package)) is not None:
        warn(f"the {package} installed in {real.origin} is hidden: `import {package}` finds vecgym's classes.")
    for path, contents in modules.items():
        sys.modules[path] = StandIn(path, contents)
        parent, _, name = path.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, sys.modules[path])


def uninstall(package: str) -> None:
    """Undo `install`."""
    for path, module in list(sys.modules.items()):
        if isinstance(module, StandIn) and path.split(".")[0] == package:
            del sys.modules[path]
