"""Old import paths, kept for one version: `from vecgym.trainer import Trainer` warns and works."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from vecgym.core.errors import warn

MOVED = {
    "check": "core.check",
    "checkpoint": "runs.checkpoint",
    "corpus": "data.text",
    "errors": "core.errors",
    "evaluate": "runs.evaluation",
    "launch": "runs.multiprocess",
    "ledger": "collectives.ledger",
    "local": "engine",
    "logger": "records.loggers",
    "memory": "runs.memory",
    "metrics": "records.history",
    "nodes": "core.nodes",
    "optimize": "runs.optimize",
    "partition": "data.partition",
    "rng": "core.rng",
    "rollout": "runs.rollout",
    "saved": "records.runfile",
    "schedule": "optim.schedule",
    "simulate": "engine.simulation",
    "strategy.relaxed": "strategy.when",
    "sweep": "sweeps",
    "topology": "collectives.topology",
    "trainer": "runs.trainer",
    "tree": "core.tree",
    "verify": "runs.verification",
}
SHORT = {"availability": "engine.availability"}  # names that stay, for modules that live on another floor


class Moved(types.ModuleType):
    """A module under its old name, or a short one. It imports the real one when something is taken from it."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(old, f"See `{new}`.")
        self.new = new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(importlib.import_module(self.new), name)
        if self.__name__.partition(".")[2] in SHORT:
            return value
        warn(f"{self.__name__} is now {self.new}: import {name} from there.", DeprecationWarning)
        return value


def install(package: types.ModuleType) -> None:
    """Register the old and the short names. Where `package` has something of that name, it stays what the attribute is.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     from vecgym.topology import ring
    >>> ring.__module__, str(caught[0].message)
    ('vecgym.collectives.topology', 'vecgym.topology is now vecgym.collectives.topology: import ring from there.')
    >>> from vecgym.availability import Dropout
    >>> Dropout.__module__
    'vecgym.engine.availability'
    """
    for old, new in {**MOVED, **SHORT}.items():
        module = Moved(f"{package.__name__}.{old}", f"{package.__name__}.{new}")
        sys.modules[module.__name__] = module
        if "." not in old and old not in dir(package):
            setattr(package, old, module)
