"""Read the labels, or the number of examples, of whatever holds data."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from vecgym.core import check


def read(data: Any, num_nodes: int) -> tuple[np.ndarray | None, int]:
    """Return (labels `[n]` or None, n)."""
    if not hasattr(data, "__len__") or getattr(data, "ndim", 1) == 0:  # a tensor of no dimension has no length
        raise TypeError(f"data is {check.kind_of(data)}, without length: give the labels, or a map-style dataset.")
    n = len(data)
    if check.integer("num_nodes", num_nodes) > n:
        raise ValueError(f"num_nodes={num_nodes} is more than the {n} examples: every node needs at least one.")
    return labels_of(data), n


def labels_of(data: Any) -> np.ndarray | None:
    """Return the labels `[n]`, int64, if there are any."""
    if isinstance(data, Subset):
        labels = labels_of(data.dataset)
        return None if labels is None else labels[np.asarray(data.indices)]
    if isinstance(data, TensorDataset):
        return labels_of(data.tensors[-1])
    if hasattr(data, "targets"):  # torchvision's datasets
        return labels_of(data.targets)
    if isinstance(data, (Tensor, np.ndarray, list, tuple, range)):
        if isinstance(data, (list, tuple)) and not all(hasattr(value, "__index__") for value in data):
            return None  # a list of examples
        labels = np.asarray(data.cpu() if isinstance(data, Tensor) else data)
        if labels.ndim == 1 and labels.dtype.kind in "iu":
            return labels.astype(np.int64)
    return None
