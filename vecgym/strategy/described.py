"""A strategy's hyperparameters as plain data, for loggers: numbers, texts, lists and dicts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.optim import OptimSpec
from vecgym.strategy.base import Strategy
from vecgym.strategy.communication import CommunicationModule
from vecgym.strategy.hooks import Hooks
from vecgym.strategy.inner import StepOptions
from vecgym.strategy.settings import Settings

OPTIONS = tuple(StepOptions.__annotations__)  # of the inner optimizer
MAX_VALUES = 64  # of a tensor: a larger one is described by its shape
MAX_DEPTH = 8  # of what is nested, which may hold itself


def described(value: Any, depth: int = 0) -> Any:
    """Describe what a strategy holds as nested dicts, which `json.dumps` takes.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> found = described(DiLoCoStrategy("sgd", H=20, lr=0.1, max_norm=1.0))
    >>> found["class"], found["inner_optim"]["lr"], found["exchanges"][0]["every"], found["max_norm"]
    ('DiLoCoStrategy', 0.1, 20, 1.0)
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        x = torch.as_tensor(value)
        return x.tolist() if x.numel() <= MAX_VALUES else f"{x.dtype} {list(x.shape)}"
    depth += 1
    if depth > MAX_DEPTH:
        return f"{type(value).__name__} ..."
    if isinstance(value, dict):
        return {str(key): described(x, depth) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(x, depth) for x in value]
    if isinstance(value, OptimSpec):
        groups = {} if value.param_groups is None else {"param_groups": described(value.param_groups, depth)}
        return {"class": value.cls.__name__, **described(value.hyper, depth), **groups}
    if isinstance(value, Hooks):
        return described(value.module, depth - 1)
    if isinstance(value, (Strategy, CommunicationModule, Settings)) or type(value).__module__.startswith("vecgym."):
        own = {name: x for name, x in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
        if isinstance(value, Strategy):  # as its arguments are named
            inner: Any = own.pop("inner")
            own = {"inner_optim": inner.spec, **{name: getattr(inner, name) for name in OPTIONS}, **own}
        return {"class": type(value).__name__, **{name: described(x, depth) for name, x in own.items()}}
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:200]
