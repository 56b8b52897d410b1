"""Corrections of the nodes' movements before these are averaged: HeLoCo's, and the median norm; see `Outer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vecgym.core import tree
from vecgym.core.devices import spread
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.optim.optimizer import Slots
from vecgym.simulation.simulation import Part

Correction = Callable[[Tree, Slots, Part], Tree]  # (movements, the outer optimizer's state, the event) -> movements

_TINY = 1e-8


def heloco(moved: Tree, optimizer: Slots, part: Part, momentum: float | Tensor = 0.9) -> Tree:
    """Correct each node's movement, tensor by tensor, by the mean of past movements; see `vecgym.strategy.HeLoCo`.

    That mean is (1 - momentum) times torch's momentum buffer, which is a sum.

    >>> from vecgym.collectives import StackedCollectives
    >>> moved, held = {"w": torch.tensor([[-1.0, 1.0], [1.0, 1.0]])}, {"w": torch.tensor([[2.0, 0.0]])}
    >>> heloco(moved, {"momentum_buffer": held}, Part.alone(StackedCollectives(2)), momentum=0.5)["w"]
    tensor([[-0.8867,  1.0000],
            [ 1.0000,  1.0000]])
    """
    means = tree.map(lambda m: spread(1 - momentum, m) * m, optimizer["momentum_buffer"])
    return tree.map(corrected, moved, means)


def corrected(delta: Tensor, momentum: Tensor) -> Tensor:
    """Correct movements `[L, *]` by the momentum `[1 or L, *]` of the same tensor, without a copy to the host.

    >>> corrected(torch.tensor([[-1.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([[-0.8867,  1.0000]])
    """
    size, pull = row_norms(delta), row_norms(momentum)
    toward, along = delta / nonzero(size), momentum / nonzero(pull)
    cosine = _total(toward * along)
    confidence = size / (size + 3 * pull + _TINY)
    away = delta - (-0.5 * cosine * confidence).clamp(max=0.5) * cosine * size * along
    turn = ((1 - cosine) * confidence).clamp(max=1)
    mixed = (1 - turn) * toward + turn * along
    turned = size * mixed / nonzero(row_norms(mixed))
    by_angle = torch.where(cosine < 0, away, torch.where(cosine < 0.2, turned, delta))
    return torch.where((size < _TINY) | (pull < _TINY), delta, by_angle)


def row_norms(x: Tensor) -> Tensor:
    """Return the 2-norm of each row, `[L, *]` -> `[L, 1, ...]`; its derivative at 0 is 0."""
    square = _total(x * x)
    return torch.where(square > 0, nonzero(square).sqrt(), 0.0)


def _total(x: Tensor) -> Tensor:
    """Sum each row, `[L, *]` -> `[L, 1, ...]`."""
    return x[:, None].flatten(1).sum(1).view(-1, *[1] * (x.dim() - 1))


def nonzero(x: Tensor) -> Tensor:
    """Replace values <= 0 by 1: a safe divisor."""
    return torch.where(x > 0, x, 1.0)


def median_norm(moved: Tree, optimizer: Slots, part: Part) -> Tree:
    """Shrink each node's movement, tensor by tensor, to the median of the nodes' norms, if its own is larger.

    For an even number of nodes the median is the lower of the middle two, as in `torch.median`. Each node sends one
    number per tensor.

    >>> from vecgym.collectives import StackedCollectives
    >>> moved = {"w": torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 100.0]])}
    >>> median_norm(moved, {}, Part.alone(StackedCollectives(3)))["w"]
    tensor([[ 3.,  4.],
            [ 6.,  8.],
            [ 0., 10.]])
    """
    squares = torch.stack([(x * x).reshape(len(x), -1).sum(1) for x in moved.values()], 1)
    size = squares.where(squares > 0, 1.0).sqrt()  # if a tensor has not moved, its movement stays 0
    ordered = part.comm.all_gather(size * (squares > 0)).sort(1).values  # [1, K, tensors]
    factors = (ordered[:, (ordered.shape[1] - 1) // 2] / size).clamp(max=1)
    return {name: x * spread(f, x) for (name, x), f in zip(moved.items(), factors.unbind(1))}


CORRECTIONS: dict[str, Correction] = {"heloco": heloco, "median_norm": median_norm}


def momentum_of(optim: OptimSpec, what: str = 'correct="heloco"') -> Any:
    """Return the momentum of an outer optimizer, which "heloco" and restarts need.

    >>> momentum_of(OptimSpec("sgd", lr=0.7, momentum=0.9))
    0.9
    """
    hyper = optim.hyper
    momentum = hyper.get("momentum", 0)
    has_momentum = isinstance(momentum, Tensor) or momentum > 0
    if optim.cls is not torch.optim.SGD or hyper["dampening"] != 0 or not has_momentum:
        raise ValueError(
            f"{what} needs the outer momentum, and {optim!r} has none, or dampens it: give SGD with "
            'momentum, such as OptimSpec("sgd", lr=0.7, momentum=0.9, nesterov=True).'
        )
    return momentum
