"""The options of differentiable runs, written down once: for `rollout`, `rollout_jvp` and `optimize_schedule`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Annotated, Any

from torch import Tensor, nn

from vecgym.clock import Compute, Network
from vecgym.core import check, tree
from vecgym.core.options import Options
from vecgym.core.tree import Tree
from vecgym.engine import Engine, EngineName
from vecgym.runs.options import (
    Count,
    OptionalCount,
    Present,
    Seed,
    check_clocks,
    check_compute,
    check_left_out,
    check_strategy,
    optional_number,
)
from vecgym.strategy import Strategy
from vecgym.strategy.per_rank import as_strategy

Segments = Annotated[int | None, partial(check.optional_integer, what="None stores every step")]
OF_PRIMALS = "rollout_jvp takes a function of the primals, such as lambda outer_lr: DiLoCoStrategy(outer_lr=outer_lr)"
OF_WEIGHTS = "give a function of the weights, such as lambda w: DiLoCoStrategy(sync_weight=w)"
Budget = Annotated[float | None, partial(optional_number, within="(0, inf)", what="per node in the whole run")]


def _tensors(name: str, values: Any) -> tuple[Tensor, ...]:
    """Return the tensors in a list; at least one, and all floating."""
    check.instance(name, values, (list, tuple), "a list of tensors")
    for x in values:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} has {x!r}; give a list of floating tensors, such as [torch.tensor(0.1)].")
    if not values:
        raise ValueError(f"{name} is empty: give at least one tensor, such as [torch.tensor(0.1)].")
    return tuple(values)


def _maker(name: str, value: Any, take: str, refused: tuple[type, ...] = (Strategy, nn.Module)) -> Any:
    """Return a function that makes a strategy."""
    if isinstance(value, refused) or not callable(value):
        raise TypeError(f"{name} is {check.kind_of(value)}; {take}.")
    return value


def _pair(name: str, value: Any) -> Any:
    if value is not None and not (isinstance(value, (tuple, list)) and len(value) == 2):
        raise TypeError(f"{name} is {check.kind_of(value)}; give a pair (batches, eval_batch).")
    return value


@dataclass(frozen=True)
class DifferentiableRun(Options):
    """What is trained, on which batches, and how it is evaluated.

    Args:
        model: as for `Trainer`; its own parameters are the initial ones, and it is never changed.
        batches: a list of T batches, leaves `[K, B, ...]`; or a tensor, a dict or a tuple whose leaves have a leading
            T, `[T, K, B, ...]`. All B examples count, also those that `vecgym.data.Batches` repeats for a node that has
            fewer: give a B that every node has.
        num_nodes: K.
        eval_batch: one ordinary batch `[B, ...]`.
        params: initial parameters, `[1 or K, *]`, in place of the model's.
        seed: of dropout, masks and everything else that is random.
        num_examples: of each node, for `weighting="examples"`.
        engine: "auto", "vmap" or "loop"; or an `Engine` that was prepared before, so that the model is not inspected
            again in every call.
        availability: who is present in which steps; see `Trainer.fit`. Node i takes row i of batch t as its own step t.
    """

    model: nn.Module
    strategy: Any
    batches: Any
    _: KW_ONLY
    num_nodes: Count
    eval_batch: Any
    params: Tree | None = None
    seed: Seed = 42
    num_examples: tuple[int, ...] | None = None
    engine: EngineName | Engine = "auto"
    availability: Present = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.params is not None:
            check.instance("params", self.params, Mapping, "{name: tensor [1 or K, *]}, or None")
        if self.num_examples is not None:
            self.settle(num_examples=self._checked_examples(self.num_examples))

    def _checked_examples(self, num_examples: Any) -> tuple[int, ...]:
        if not isinstance(num_examples, (tuple, list)) or len(num_examples) != self.num_nodes:
            raise ValueError(
                f"num_examples={num_examples!r} must be a tuple of {self.num_nodes} integers, "
                "the examples of each node."
            )
        return tuple(check.integer(f"num_examples[{i}]", count) for i, count in enumerate(num_examples))

    @property
    def common(self) -> dict[str, Any]:
        """The options that all three functions have, by name."""
        return {field.name: vars(self)[field.name] for field in fields(DifferentiableRun)}


@dataclass(frozen=True)
class RolloutOptions(DifferentiableRun):
    """All that `rollout` takes.

    Args:
        segments: the number of parts to cut the run into. Only the states between them are stored, and each part is
            computed again in the backward pass: memory O(T / segments + segments) for less than twice the time; about
            sqrt(T) parts need least. For reverse mode through `torch.autograd`. None: everything is stored.
        compute, network: of an asynchronous run; see `Trainer.fit`. Node i takes row i of batch t as its own step t.
        max_updates: of an asynchronous run: updates of the server; None: as many as there are batches for.
    """

    strategy: Strategy
    _: KW_ONLY
    segments: Segments = None
    compute: Compute | None = None
    network: Network | None = None
    max_updates: OptionalCount = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_strategy(self.strategy)
        self._check_asynchronous()
        if not as_strategy(self.strategy, self.model).pure:
            raise ValueError(
                f"{type(self.strategy).__name__} is written for one rank and runs on threads, through which no "
                "derivatives can be taken: write it as a CommunicationModule."
            )
        if not any(True for _ in tree.leaves(self.eval_batch)):
            raise ValueError("eval_batch holds no tensor: give one ordinary batch [B, ...], as the model takes it.")

    def _check_asynchronous(self) -> None:
        check_clocks(self.num_nodes, self.network, self.compute)
        if self.strategy.asynchronous:
            check_compute(self.strategy, self.compute)
            check_left_out(self.strategy, "segments", self.segments, None)
            return
        given = [option for option in ("compute", "network", "max_updates") if vars(self)[option] is not None]
        if given:
            name = type(self.strategy).__name__
            raise ValueError(f"{given[0]} is of asynchronous runs, and {name} takes steps of all nodes: leave it out.")


@dataclass(frozen=True)
class JvpOptions(DifferentiableRun):
    """All that `rollout_jvp` takes.

    Args:
        primals, tangents: where, and in which direction.
    """

    strategy: Annotated[Callable[..., Strategy], partial(_maker, take=OF_PRIMALS)]
    primals: Annotated[Sequence[Tensor], _tensors]
    tangents: Annotated[Sequence[Tensor], _tensors]

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = [[list(x.shape) for x in values] for values in (self.primals, self.tangents)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"primals have the shapes {shapes[0]} and tangents {shapes[1]}: give one tangent for each."
            )


@dataclass(frozen=True)
class ScheduleOptions(DifferentiableRun):
    """All that `optimize_schedule` takes.

    Args:
        H: the budget is that of an exchange every H steps;
        budget_bytes: or this, per node in the whole run. (A matrix has bytes of its own, which must not exceed it.)
        budget_seconds: or this, of the whole run: as many exchanges as there is time for, if they are spread evenly,
            and no schedule that takes longer.
        network, compute: a `vecgym.clock.Network` and a `vecgym.clock.Compute`, for which the seconds are computed.
        mixing: the matrix, or matrices, to begin with, doubly stochastic.
        iterations: the most gradients of the relaxed run; after them, as many trials of a pair.
        held_out: (batches, eval_batch).
        segments: see `rollout`.
    """

    model: Annotated[nn.Module, partial(check.instance, kind=nn.Module, give="an nn.Module object")]
    strategy: Annotated[Callable[[Tensor], Strategy], partial(_maker, take=OF_WEIGHTS, refused=(Strategy, type))]
    _: KW_ONLY
    H: OptionalCount = None
    budget_bytes: Budget = None
    budget_seconds: Annotated[float | None, partial(optional_number, within="(0, inf)", what="of the whole run")] = None
    network: Network | None = None
    compute: Compute | None = None
    mixing: Tensor | None = None
    iterations: Count = 30
    held_out: Annotated[tuple[Any, Any] | None, _pair] = None
    segments: Segments = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("network", "compute"):
            value = vars(self)[name]
            if (value is None) != (self.budget_seconds is None):
                raise ValueError(
                    f"budget_seconds={self.budget_seconds!r} and {name}={value!r}: a budget of seconds needs "
                    "network=vecgym.clock.Network(1e9, 0.05) and compute=vecgym.clock.Compute(0.4)."
                )
        check_clocks(self.num_nodes, self.network, self.compute)
        if self.budget_seconds is not None and self.availability is not None:
            raise ValueError(
                f"budget_seconds={self.budget_seconds!r} and availability={self.availability!r}: what nodes that may "
                "be absent send is not known before they train. Give H or budget_bytes, or leave availability out."
            )
