"""The base of federated strategies: rounds of local steps, of equal or unequal number, by all nodes or a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.availability import ids_of
from vecgym.core import check
from vecgym.core.devices import spread
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec, ensure_optim_spec
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import Lockstep, RunFacts, Timetable, Who
from vecgym.simulation.when import as_when
from vecgym.strategy.averages import Mean, Reduction, ServerMean, Weighting
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, takes_options
from vecgym.strategy.exchange import DEFAULT_H, Exchange
from vecgym.strategy.stages import Average


class Federated(Strategy, batched=(), random=False, steady=True):
    """In each round the nodes that are drawn take local steps, and then exchange parameters through a server.

    Args:
        how: the exchange at the end of a round, such as `Outer(ServerMean(), "sgd")`.
        H: local steps per round: a number, or a function of the step at which a round begins.
        participation: the fraction of the nodes, sampled anew for each round; see `Exchange`.
        local_steps: in place of H, the local steps of each node, `[K]`. A round has as many steps as the most; a node
            that has done its own rests until the exchange. Its data go by its own steps, its rate by the run's.

    Raises:
        ValueError: for no list of numbers >= 1, and for H besides; before the first step for another number of nodes.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None,
        how: Average,
        H: int | Callable[[int], int] = DEFAULT_H,
        participation: float = 1.0,
        *,
        local_steps: Sequence[int] | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        self.local_steps = checked_steps(local_steps, H)
        when = as_when(H if self.local_steps is None else max(self.local_steps), "H")
        super().__init__(inner_optim, [Exchange(how, every=when, participation=participation)], **inner)

    def check(self, num_nodes: int, max_steps: int) -> None:
        super().check(num_nodes, max_steps)
        if self.local_steps is not None:
            check.fits("local_steps has numbers for", len(self.local_steps), num_nodes, "one for each")

    def who_trains(self, run: RunFacts) -> Who | None:
        drawn, counts = super().who_trains(run), self.local_steps
        if counts is None:
            return drawn

        def who(step: int, rows: Sequence[int]) -> list[int]:
            chosen = (drawn(step, rows) if drawn else None) or rows
            return [node for node in chosen if step % max(counts) < counts[node]]

        return who

    def timetable(self, run: RunFacts) -> Timetable:
        if self.local_steps is None:
            return super().timetable(run)
        # "take": data go by a node's own steps, as where nodes are drawn.
        return Lockstep(run, *self.marks(run), trains=self.who_trains(run), train=self.train_method, resting="take")

    def before_exchange(self, part: Part) -> None:
        """Let the nodes of a round learn from it, before they exchange parameters, or send them to arrive later."""

    def meet(self, part: Part) -> None:
        self.before_exchange(part)
        super().meet(part)

    def agree(self, part: Part) -> None:
        self.before_exchange(part)
        super().agree(part)

    def server_params(self, part: Part) -> Tree:
        """Return the parameters `[1, *]` with which the round has begun, of a `how` that keeps them for all nodes."""
        return self.outer_parameters(part.shared, list(part.params))


def plain_sgd(
    inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None, max_norm: object, who: str
) -> OptimSpec:
    """Return an optimizer whose step is -lr (g + weight_decay theta), SGD when not given; a ValueError for another.

    >>> plain_sgd("sgd", None, "SCAFFOLD")
    OptimSpec(SGD)
    >>> plain_sgd(OptimSpec("sgd", momentum=0.9), None, "SCAFFOLD")
    Traceback (most recent call last):
    ...
    ValueError: inner_optim=OptimSpec(SGD, momentum=0.9): SCAFFOLD needs the mean of a round's gradients, and takes \
it from plain steps: give inner_optim="sgd", lr=0.1, without momentum, at one rate for all parameters.
    """
    spec = ensure_optim_spec(inner_optim, "sgd", argument="inner_optim")
    is_plain = spec.cls is torch.optim.SGD and spec.param_groups is None
    if not is_plain or any(_is_set(spec.hyper[name]) for name in ("momentum", "maximize")):
        raise ValueError(
            f"inner_optim={spec!r}: {who} needs the mean of a round's gradients, and takes it from plain steps: give "
            'inner_optim="sgd", lr=0.1, without momentum, at one rate for all parameters.'
        )
    decay = spec.hyper["weight_decay"]
    if isinstance(decay, Tensor) and decay.dim() > 1:
        raise ValueError(f"weight_decay of {spec!r} changes from step to step: give {who} a number, or one per node.")
    if max_norm is not None:
        raise ValueError(f"max_norm={max_norm!r}: {who} corrects gradients, and clipped ones are biased: leave it out.")
    return spec


def weight_of_all(weighting: str | Sequence[float], run: RunFacts) -> float:
    """Return the sum of the weights of all nodes, without those that are never present; see `Mean`.

    >>> weight_of_all("examples", RunFacts(num_nodes=3, num_examples=(3, 1, 4))), weight_of_all("equal", RunFacts(3))
    (8, 3)
    """
    each: Any = run.num_examples if weighting == "examples" else weighting
    each = (1,) * run.num_nodes if weighting == "equal" else each
    presence = run.presence
    if presence is not None and not presence.sampled:  # those that are not drawn are there
        each = [each[node] for node in ids_of(presence.first < run.num_steps)]
    return sum(each)


def mean_of(participation: float, weighting: Weighting = "equal") -> Reduction:
    """Return the mean of a round: that of a server where it is sent to nodes that have taken no part."""
    return ServerMean(weighting) if check.is_number(participation) and participation < 1 else Mean(None, weighting)


def quotient(x: Tensor, by: Any) -> Tensor:
    """Return x / by, for a number or a number of each node, and 0 where `by` is 0; derivatives are finite.

    >>> quotient(torch.ones(2, 2), torch.tensor([0.0, 2.0]))
    tensor([[0.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    by = spread(by, x)
    if not isinstance(by, Tensor):
        return x / by if by else torch.zeros_like(x)
    return torch.where(by == 0, 0.0, x / torch.where(by == 0, 1.0, by))


def _is_set(value: object) -> bool:
    return isinstance(value, Tensor) or bool(value)


def checked_steps(local_steps: Any, H: object) -> tuple[int, ...] | None:
    """Return the local steps of each node, unless H gives those of all."""
    if local_steps is None:
        return None
    values = local_steps.tolist() if isinstance(check.has_values("local_steps", local_steps), Tensor) else local_steps
    if not isinstance(values, (list, tuple)) or not values:
        raise TypeError(f"local_steps={values!r:.60} must be a list of the local steps of each node, such as [5, 10].")
    counts = tuple(check.integer(f"local_steps[{i}]", n) for i, n in enumerate(values))
    if H not in (DEFAULT_H, max(counts)):
        raise ValueError(f"H={H!r} and local_steps={list(counts)}: a round has {max(counts)} steps. Leave out H.")
    return counts
