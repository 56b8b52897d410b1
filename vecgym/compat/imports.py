"""Let scripts import another package's names, with nothing installed under that name."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from vecgym.core.errors import warn


class StandIn(ModuleType):
    """A module of another package, made of vecgym's classes.

    Args:
        path: its full name.
        contents: name -> value.
        absent: name -> why it is not there.
    """

    def __init__(self, path: str, contents: Mapping[str, Any], absent: Mapping[str, str]) -> None:
        super().__init__(path, f"{path}, made of vecgym's classes.")
        self.__path__: list[str] = []  # a package, whose only modules are those in sys.modules
        self.__spec__ = importlib.machinery.ModuleSpec(path, None, origin=__file__, is_package=True)
        self.__all__ = list(contents)
        self._absent = absent
        vars(self).update(contents)

    def __getattr__(self, name: str) -> Any:
        if name in self._absent:
            raise ImportError(f"{self.__name__}.{name} is not there: {self._absent[name]}.")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def install(modules: Mapping[str, Mapping[str, Any]], absent: Mapping[str, str] | None = None) -> None:
    """Make `import` find stand-ins: path -> contents, the package first and each before its modules.

    Warns of a real package, which they hide.

    Raises:
        ImportError: where the real package has been imported already: its classes may be in use.
    """
    package = next(iter(modules))
    present = sys.modules.get(package)
    if isinstance(present, StandIn):
        return
    if present is not None:
        raise ImportError(
            f"{package} is imported already, from {getattr(present, '__file__', 'somewhere')}: call install() before "
            "anything imports it."
        )
    if (real := importlib.util.find_spec(package)) is not None:
        warn(f"the {package} that is installed in {real.origin} is hidden: `import {package}` finds vecgym's classes.")
    for path, contents in modules.items():
        sys.modules[path] = StandIn(path, contents, absent or {})
        parent, _, name = path.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, sys.modules[path])


def uninstall(package: str) -> None:
    """Undo `install`."""
    for path, module in list(sys.modules.items()):
        if isinstance(module, StandIn) and path.split(".")[0] == package:
            del sys.modules[path]
