"""The state of a run, and what is measured of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from vecgym.collectives.ledger import Transfer
from vecgym.core.tree import Tree


@dataclass(frozen=True)
class State:
    """All that evolves in a run. A node dimension of size 1 means "the same on every node".

    Where the L nodes are those of C configurations, parameters may be `[C, *]`: one row for L / C nodes each.

    Attributes:
        step: optimizer steps done.
        params: trainable parameters, `[1 or L, *]`.
        buffers: `[1 or L, *]`.
        optimizer: the inner optimizer's state.
        strategy: the communication modules' states.
        node_steps: optimizer steps that each node has done, `[L]`.

    >>> from torch import nn
    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.engine.simulation import Simulation
    >>> from vecgym.strategy import DiLoCoStrategy
    >>> state = Simulation(nn.Linear(2, 1), DiLoCoStrategy("sgd", lr=0.1), StackedCollectives(4)).init()
    >>> state.step, state.params["weight"].shape, state.strategy["0"]["params"]["bias"].shape
    (0, torch.Size([1, 1, 2]), torch.Size([1, 1]))
    """

    step: int
    params: Tree
    buffers: Tree
    optimizer: dict[str, Any]
    strategy: dict[str, Any]
    node_steps: Tensor


class Result(NamedTuple):
    """The run's model: the mean of parameters, and of buffers, over the nodes that are its members.

    Attributes:
        params: `[1 or L, *]`; see `vecgym.strategy.Strategy.result`.
        members: the nodes that were there in the last step, ascending; None: all.

    >>> Result({}).members is None
    True
    """

    params: Tree
    members: tuple[int, ...] | None = None


class Metrics(NamedTuple):
    """The measurements of a step.

    >>> import torch
    >>> Metrics(losses=torch.tensor([1.0, 3.0]), lr=0.1).losses.mean()
    tensor(2.)
    """

    losses: Tensor  # [L], before the update; nan where a node did not train
    lr: float | Tensor
    active: list[int] | None = None  # the nodes that trained; None: all
    outer_lr: float | Tensor | None = None  # of the strategy's other optimizer, if it has one
    transfers: tuple[Transfer, ...] = ()  # what was sent in the step, in order
    num_present: int | None = None  # nodes that were there, where some may be absent
    num_never_present: int | None = None  # nodes that have not been there in any step so far
