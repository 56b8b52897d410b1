"""Arithmetic on trees: `dict[str, Tensor]`, one entry per parameter or buffer.

Every per-node tensor has the node dimension first, `[L, *shape]`. A node dimension of size 1 means
"the same on every node"; the two kinds mix by broadcasting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import starmap
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

Tree = dict[str, Tensor]
Path = tuple[tuple[type, Any], ...]  # the path to a leaf of nested values: (dict, key), (list, index) ...


def map(fn: Callable[..., Tensor], *trees: Tree) -> Tree:
    """Apply `fn` to the tensors of the same name in all trees.

    >>> import torch
    >>> map(torch.add, {"w": torch.ones(1)}, {"w": torch.ones(1)})
    {'w': tensor([2.])}
    """
    names = trees[0].keys()
    return dict(zip(names, starmap(fn, zip(*[[tree[name] for name in names] for tree in trees]))))


def flatten(tree: Any) -> list[tuple[Path, Any]]:
    """Return the leaves of nested dicts, lists and tuples in order, with their paths; empty containers are leaves.

    >>> [(path_name(path), x) for path, x in flatten({"a": 1, "b": [2, {"c": 3}]})]
    [("['a']", 1), ("['b'][0]", 2), ("['b'][1]['c']", 3)]
    """
    found, todo = list[tuple[Path, Any]](), list[tuple[Path, Any]]([((), tree)])
    while todo:
        path, x = todo.pop()
        if isinstance(x, (dict, list, tuple)) and x:
            kind, inner = (dict, x.items()) if isinstance(x, dict) else (type(x), enumerate(x))
            todo += [((*path, (kind, key)), value) for key, value in inner][::-1]
        else:
            found.append((path, x))
    return found


def unflatten(leaves: Mapping[Path, Any]) -> Any:
    """Build the tree with these leaves, in this order.

    >>> unflatten(dict(flatten({"a": 1, "b": [2, {"c": 3}]})))
    {'a': 1, 'b': [2, {'c': 3}]}
    """
    if () in leaves:
        return leaves[()]
    parts: dict[Any, dict[Path, Any]] = {}
    for path, value in leaves.items():
        parts.setdefault(path[0], {})[path[1:]] = value
    (kind, _), *_ = parts
    values = {key: unflatten(part) for (_, key), part in parts.items()}
    return values if kind is dict else _sequence(kind, values.values())


def path_name(path: Path) -> str:
    """Return a path in Python's notation.

    >>> [path_name(path) for path, _ in flatten({"a": [1, 2]})]
    ["['a'][0]", "['a'][1]"]
    """
    return "".join(f"[{key!r}]" for _, key in path)


def leaves(tree: object) -> list[Tensor]:
    """Return every tensor of nested dicts, lists and tuples, in order.

    >>> import torch
    >>> [int(x) for x in leaves({"a": torch.tensor(1), "b": [torch.tensor(2), {"c": torch.tensor(3)}]})]
    [1, 2, 3]
    """
    found, todo = list[Tensor](), [tree]
    while todo:
        x = todo.pop()
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (dict, list, tuple)):
            todo += [*(x.values() if isinstance(x, dict) else x)][::-1]
    return found


def map_leaves(fn: Callable[..., Any], tree: Any, *others: Any, kind: type = Tensor) -> Any:
    """Apply `fn` to every tensor of nested dicts, lists and (named) tuples, and to its counterparts in other trees.

    Args:
        fn: (leaf, *its counterparts in `others`, None where there is none) -> anything.
        kind: the type of the leaves; leaves of other types stay as they are.

    >>> import torch
    >>> map_leaves(lambda x: x + 1, {"a": torch.tensor(1), "b": (torch.tensor(2), "text")})
    {'a': tensor(2), 'b': (tensor(3), 'text')}
    >>> map_leaves(lambda x, y: (x, y), {"a": 1, "b": [2]}, {"b": [3]}, kind=int)
    {'a': (1, None), 'b': [(2, 3)]}
    """
    if isinstance(tree, kind):
        return fn(tree, *others)
    if not isinstance(tree, (dict, list, tuple)):
        return tree
    form, pairs = (dict, tree.items()) if isinstance(tree, dict) else ((list, tuple), enumerate(tree))
    if others:
        new = {key: map_leaves(fn, x, *[_at(y, form, key) for y in others], kind=kind) for key, x in pairs}
    else:  # many times in every step: an eighth of the time
        new = {key: fn(x) if isinstance(x, kind) else map_leaves(fn, x, kind=kind) for key, x in pairs}
    if form is not dict:
        return _sequence(type(tree), new.values())
    return new if type(tree) is dict else type(tree)(new)


def _at(tree: Any, kind: Any, key: Any) -> Any:
    """Return the value of a tree at a key or index, or None if there is none."""
    if not isinstance(tree, kind):
        return None
    return tree.get(key) if isinstance(tree, dict) else tree[key] if key < len(tree) else None


def _sequence(kind: Any, values: Iterable[Any]) -> Any:
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def form(x: Any) -> str:
    """Describe the type and shape of a tensor or array.

    >>> import torch
    >>> form(torch.ones(2, 3))
    'float32 [2, 3]'
    """
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def differentiated(x: object) -> bool:
    """Whether `x` may be differentiated: it requires grad, or is inside a transform of `torch.func`.

    This does not depend on whether autograd is recording.

    >>> import torch
    >>> differentiated(torch.ones(1)), differentiated(torch.ones(1, requires_grad=True)), differentiated(1.0)
    (False, True, False)
    """
    if not isinstance(x, Tensor):
        return False
    if x.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return forward_ad.unpack_dual(x).tangent is not None


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values are summed: float32 for bfloat16 and float16, else their own.

    >>> import torch
    >>> wider(torch.bfloat16), wider(torch.float64), wider(torch.int64)
    (torch.float32, torch.float64, torch.int64)
    """
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def root(x: Any) -> Any:
    """Take the square root of a number or tensor, with derivative 0 at 0.

    >>> import torch
    >>> root(torch.tensor([0.0, 4.0]))
    tensor([0., 2.])
    """
    if not isinstance(x, Tensor):
        return x**0.5
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def num_bytes(tree: object) -> int:
    """Return the bytes that the tensors of a tree occupy, counting an expanded dimension once.

    >>> import torch
    >>> num_bytes({"w": torch.ones(2, 3), "b": torch.ones(1).expand(100)})
    28
    """
    return sum(
        x.element_size() * math.prod(n for n, stride in zip(x.shape, x.stride()) if stride) for x in leaves(tree)
    )


def places(values: Iterable[Tensor]) -> list[int]:
    """Return the address of each tensor's storage; without values (meta, FakeTensor) an id of the storage.

    >>> import torch
    >>> (x, y), (a, b) = torch.ones(2, 3), (torch.empty(3, device="meta") for _ in range(2))
    >>> len(set(places([x, x[1:], y]))), len(set(places([a, a[1:], b])))
    (1, 2)
    """
    storages = [x.untyped_storage() for x in values]
    return [storage._cdata if storage.device.type == "meta" else storage.data_ptr() for storage in storages]
