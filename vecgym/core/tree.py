"""Arithmetic on trees: `dict[str, Tensor]`, one entry per parameter or buffer.

Every per-node tensor has the node dimension first, `[L, *shape]`. A node dimension of size 1 means
"the same on every node"; broadcasting makes the two kinds mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

Tree = dict[str, Tensor]


def map(fn: Callable[..., Tensor], *trees: Tree) -> Tree:
    """Apply `fn` to the tensors of equal name of each tree.

    >>> import torch
    >>> map(torch.add, {"w": torch.ones(1)}, {"w": torch.ones(1)})
    {'w': tensor([2.])}
    """
    first, *rest = trees
    return {name: fn(value, *[tree[name] for tree in rest]) for name, value in first.items()}


def leaves(tree: object) -> Iterable[Tensor]:
    """Every tensor of nested dicts, lists and tuples, in order.

    >>> import torch
    >>> [int(x) for x in leaves({"a": torch.tensor(1), "b": [torch.tensor(2), {"c": torch.tensor(3)}]})]
    [1, 2, 3]
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)


def map_leaves(fn: Callable[[Tensor], Any], tree):
    """Apply `fn` to every tensor of nested dicts, lists and (named) tuples; other leaves stay.

    >>> import torch
    >>> map_leaves(lambda x: x + 1, {"a": torch.tensor(1), "b": (torch.tensor(2), "text")})
    {'a': tensor(2), 'b': (tensor(3), 'text')}
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        new = {key: map_leaves(fn, value) for key, value in tree.items()}
        return new if type(tree) is dict else type(tree)(new)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[map_leaves(fn, value) for value in tree])
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_leaves(fn, value) for value in tree])
    return tree


def differentiated(x: object) -> bool:
    """Whether derivatives by `x` may be taken: it requires grad, or is inside a transform of `torch.func`.

    It does not depend on whether gradients are being recorded just now.

    >>> import torch
    >>> differentiated(torch.ones(1)), differentiated(torch.ones(1, requires_grad=True)), differentiated(1.0)
    (False, True, False)
    """
    if not isinstance(x, Tensor):
        return False
    if x.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return forward_ad.unpack_dual(x).tangent is not None


def num_bytes(tree: object) -> int:
    """Bytes that the tensors of a tree hold, an expanded dimension counted once.

    >>> import torch
    >>> num_bytes({"w": torch.ones(2, 3), "b": torch.ones(1).expand(100)})
    28
    """
    return sum(_stored(x) * x.element_size() for x in leaves(tree))


def _stored(x: Tensor) -> int:
    count = 1
    for size, stride in zip(x.shape, x.stride()):
        count *= size if stride != 0 else 1
    return count


def per_node(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number, or one number per node `[L]`, shaped to multiply a `[L, *]` tensor.

    >>> import torch
    >>> per_node(torch.ones(3), torch.ones(3, 4, 5)).shape
    torch.Size([3, 1, 1])
    """
    if isinstance(value, Tensor) and value.dim() == 1:
        return value.to(like.dtype).reshape(-1, *[1] * (like.dim() - 1))
    return value
