"""The functions of `exogym.aux.utils`: descriptions of objects as plain data, and the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vecgym.runs.options import resolve_device

MAX_ITEMS, MAX_KEYS = 10, 50  # described of a sequence, and of a dict or object


class LogModule:
    """An object that describes its settings: `__config__()` is a dict of its attributes as plain data."""

    def __config__(self, remove_keys: Sequence[str] | None = None) -> dict[str, Any]:
        hidden = set(remove_keys or ())
        return {name: value for name, value in extract_config(self).items() if name not in hidden}


def extract_config(obj: Any, max_depth: int = 10, current_depth: int = 0) -> Any:
    """Describe `obj` as plain data for JSON: numbers, strings, lists, dicts, and `<...>` for everything else.

    >>> extract_config({"lr": 0.1, "shape": (2, 3), "model": nn.Linear(1, 1), "x": torch.zeros(2)})
    {'lr': 0.1, 'shape': [2, 3], 'model': '<Module Linear>', 'x': '<Tensor [2]>'}
    """
    if obj is None or isinstance(obj, (bool, int, float, str)):
        return obj
    if current_depth >= max_depth:
        return type(obj).__name__

    def inside(values: dict[Any, Any]) -> dict[str, Any]:
        items = [(k, v) for k, v in values.items() if isinstance(k, str)][:MAX_KEYS]
        return {k: extract_config(v, max_depth, current_depth + 1) for k, v in items}

    if isinstance(obj, (list, tuple)):
        return [extract_config(x, max_depth, current_depth + 1) for x in obj[:MAX_ITEMS]]
    if isinstance(obj, dict):
        return inside(obj)
    if isinstance(obj, torch.device):
        return str(obj)
    if isinstance(obj, torch.Tensor):
        return f"<Tensor {list(obj.shape)}>"
    for kind in (nn.Module, torch.optim.Optimizer):
        if isinstance(obj, kind):
            return f"<{kind.__name__} {type(obj).__name__}>"
    if callable(obj):
        return f"<function {getattr(obj, '__name__', 'unknown')}>"
    if hasattr(obj, "__dict__"):
        return inside({k: v for k, v in vars(obj).items() if not k.startswith("_")})
    return f"<{type(obj).__name__}>"


def create_config(
    model: nn.Module | None, strategy: Any, train_node: Any, extra_config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Describe the settings of a run as plain data."""
    config: dict[str, Any] = {}
    if strategy is not None and hasattr(strategy, "__config__"):
        config["strategy"] = strategy.__config__()
    if train_node is not None and hasattr(train_node, "__config__"):
        config.update(train_node.__config__())
    if model is not None:
        config.update(model_name=type(model).__name__, model_parameters=_count(model) / 1e6)  # in millions
    return {**config, **{key: extract_config(value) for key, value in (extra_config or {}).items()}}


def get_device() -> str:
    """Return the best available device: "cuda", else "mps", else "cpu"."""
    return resolve_device(None).type


def _count(model: nn.Module) -> int:
    count = getattr(model, "get_num_params", None)
    return int(count()) if callable(count) else sum(p.numel() for p in model.parameters())
