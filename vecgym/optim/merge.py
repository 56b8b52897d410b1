"""One optimizer for the rows of several: a hyperparameter has a value for each row where theirs differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check
from vecgym.core.tree import leaves
from vecgym.optim.formulas import FORMULAS
from vecgym.optim.spec import OptimSpec

Key = tuple[Any, ...]


def merge_key(spec: OptimSpec) -> Key | None:
    """Return a key: specs of equal key can be merged. None: this one cannot.

    >>> merge_key(OptimSpec("adam", lr=0.1)) == merge_key(OptimSpec("adam", lr=0.2, betas=(0.8, 0.9)))
    True
    >>> merge_key(OptimSpec("sgd", lr=0.1)) == merge_key(OptimSpec("sgd", lr=0.1, nesterov=True, momentum=0.9))
    False
    """
    if spec.cls not in FORMULAS or any(x.dim() > 0 or x.requires_grad for x in leaves(spec.kwargs)):
        return None
    fixed = tuple(sorted((key, repr(value)) for key, value in spec.hyper.items() if not _is_number(value)))
    groups = None if spec.param_groups is None else id(spec.param_groups)
    return spec.cls.__name__, groups, fixed


def merged_spec(specs: Sequence[OptimSpec], counts: Sequence[int]) -> OptimSpec:
    """Merge specs into one whose hyperparameters have a value for each row where the given ones differ.

    >>> merged_spec([OptimSpec("sgd", lr=0.5, momentum=0.9), OptimSpec("sgd", lr=0.25, momentum=0.9)], [1, 2])
    OptimSpec(SGD, lr=tensor([0.5000, 0.2500, 0.2500], dtype=torch.float64), momentum=0.9)
    """
    keys = list(dict.fromkeys(key for spec in specs for key in spec.kwargs))
    values = {key: per_row([spec.hyper[key] for spec in specs], counts) for key in keys}
    return OptimSpec(specs[0].cls, param_groups=specs[0].param_groups, **values)


def per_row(values: Sequence[Any], counts: Sequence[int]) -> Any:
    """Repeat a value for each configuration to one for each row, `[sum of counts]`; equal ones stay as they are.

    >>> per_row([(0.9, 0.5), (0.9, 0.25)], [1, 1])
    (0.9, tensor([0.5000, 0.2500], dtype=torch.float64))
    """
    if isinstance(values[0], tuple):
        return tuple(per_row(part, counts) for part in zip(*values))
    plain = [x.item() if isinstance(x, Tensor) else x for x in values]
    if all(x == plain[0] for x in plain):
        return plain[0]
    return torch.tensor(plain, dtype=torch.float64).repeat_interleave(torch.tensor(list(counts)))


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    if isinstance(value, Tensor):
        return value.dim() == 0
    return check.is_number(value)
