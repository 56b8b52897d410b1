"""Strategies written for one rank, as EXO Gym's are: `step()` sees one node's model, and talks to the others.

A subclass of `Strategy` that overrides `step` is such a strategy. Each node gets a copy of it, whose `model` has
the node's slice of the stacked state as its parameters (`p.grad` is set); all copies run `step()` at once, a
thread each, and meet in the collectives of this module (`all_reduce`, `broadcast`, `all_gather`), which are
those of `vecgym.collectives` underneath: same results, same ledger. Exact, slower than `[K, *]` tensor code,
and not differentiable.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives
from vecgym.contents import contents, fill
from vecgym.optim import OptimSpec
from vecgym.strategy.base import Context, State, Strategy
from vecgym.tree import Tree

_here = threading.local()  # .node and .meeting of the thread


class Meeting:
    """Where the nodes' threads meet: the last to come computes for all."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.num_nodes = comm.num_nodes
        self._barrier = threading.Barrier(self.num_nodes)
        self._given: list[Any] = [None] * self.num_nodes
        self._result: Any = None

    def exchange(self, node: int, operation: str, value: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Stack what the nodes give, `[K, *]`, and return what `compute` makes of it."""
        self._given[node] = (f"{operation} of shape {list(value.shape)}", value.detach())
        if self._barrier.wait() == 0:
            self._result = self._computed(compute)
        self._barrier.wait()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def _computed(self, compute: Callable[[Tensor], Tensor]) -> Tensor | Exception:
        places: dict[str, int] = {}
        for node, (operation, _) in enumerate(self._given):
            places.setdefault(operation, node)
        if len(places) > 1:
            which = ", ".join(f"node {node} in {operation}" for operation, node in places.items())
            return RuntimeError(
                f"the nodes are not at the same place: {which}. Every node must call the same collectives in the "
                "same order."
            )
        try:
            return compute(torch.stack([x for _, x in self._given]))
        except Exception as error:  # raised in every thread
            return error

    def finish(self, node: int) -> None:
        """The end of a node's work, where all must meet: none may still wait in a collective."""
        self.exchange(node, "the end of step()", torch.zeros(0), lambda x: x)

    def abort(self) -> None:
        """Let no thread wait for one that has failed."""
        self._barrier.abort()


def _meeting() -> tuple[Meeting, int]:
    if not hasattr(_here, "meeting"):
        raise RuntimeError("all_reduce, broadcast and all_gather of a rank work inside Strategy.step() only.")
    return _here.meeting, _here.node


def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """Replace `tensor` by its sum (or `op="mean"`: its mean) over all nodes, in place, and return it."""
    if op not in ("sum", "mean"):
        raise ValueError(f'op={op!r} is not known; allowed: "sum", "mean".')
    meeting, node = _meeting()
    reduce = meeting.comm.sum if op == "sum" else meeting.comm.mean
    with torch.no_grad():
        return tensor.copy_(meeting.exchange(node, f"all_reduce {op}", tensor, reduce)[0])


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """Replace `tensor` by that of node `src`, in place, and return it."""
    meeting, node = _meeting()
    found = meeting.exchange(node, f"broadcast from {src}", tensor, lambda x: meeting.comm.broadcast(x, src))
    with torch.no_grad():
        return tensor.copy_(found[0])


def all_gather(tensor: Tensor) -> Tensor:
    """Every node's tensor: `[K, *]`."""
    meeting, node = _meeting()
    return meeting.exchange(node, "all_gather", tensor, meeting.comm.all_gather)[0].clone()


class PerRankStrategy(Strategy):
    """Runs a strategy written for one rank on every node.

    Its state lives in the copies of the user's object and in their optimizers, not in the simulation's state.
    """

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        super().__init__(strategy.inner_optim)
        self.strategy = strategy
        self._model = model
        self._ranks: list[Strategy] = []
        self._threads: ThreadPoolExecutor | None = None
        self._lr: float | Tensor = strategy.inner_optim.lr

    def check(self, num_nodes: int, max_steps: int) -> None:
        self.strategy.check(num_nodes, max_steps)

    def init(self, params: Tree, ctx: Context) -> tuple[State, State]:
        num_nodes = ctx.comm.num_nodes
        if len(ctx.comm.node_ids) != num_nodes:
            raise ValueError(
                f"{type(self.strategy).__name__} overrides step() and so is written for one rank: all "
                f"{num_nodes} nodes must be in one process and one configuration."
            )
        self._ranks = [copy.deepcopy(self.strategy) for _ in range(num_nodes)]
        self._threads = ThreadPoolExecutor(num_nodes, "vecgym-rank")
        meeting = Meeting(ctx.comm)

        def start(node: int) -> None:
            rank = self._ranks[node]
            rank.max_steps = ctx.max_steps
            rank._init_node(copy.deepcopy(self._model), node, num_nodes)

        self._run(start, meeting)
        return {}, {}

    def optimize(self, params: Tree, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        if not ctx.inplace:
            raise ValueError(
                f"{type(self.strategy).__name__} overrides step() and cannot be differentiated: write it as a "
                "CommunicationModule on [K, *] tensors."
            )
        num_nodes = ctx.comm.num_nodes
        stacked = {
            n: p if p.shape[0] == num_nodes else p.expand(num_nodes, *p.shape[1:]).clone() for n, p in params.items()
        }

        def step(node: int) -> None:
            own = dict(self._ranks[node].model.named_parameters())
            for name, p in stacked.items():
                own[name].data = p[node]
                own[name].grad = grads[name][node].clone()
            self._ranks[node].step()

        groups = getattr(getattr(self._ranks[0], "optim", None), "param_groups", None)
        self._lr = groups[0]["lr"] if groups else self.inner_optim.lr
        self._run(step, Meeting(ctx.comm))
        # A rank may have replaced a parameter's data by another tensor instead of writing into it.
        for node, rank in enumerate(self._ranks):
            own = dict(rank.model.named_parameters())
            for name, p in stacked.items():
                if own[name].data_ptr() != p[node].data_ptr():
                    p[node].copy_(own[name].detach())
        return stacked, {}

    def state(self) -> list[dict[str, Any]]:
        """What the copies hold, a tree each, for a file; their models' parameters are the simulation's.

        Raises:
            TypeError: for something in them that cannot be saved, naming it.
        """
        return [contents(rank, self._kept_elsewhere(rank), self._name(node)) for node, rank in enumerate(self._ranks)]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Go on from there; `init` has made the copies."""
        for node, (rank, held) in enumerate(zip(self._ranks, state)):
            fill(rank, held, self._kept_elsewhere(rank), self._name(node))

    def _kept_elsewhere(self, rank: Strategy) -> dict[str, Tensor]:
        return dict(rank.model.named_parameters())

    def _name(self, node: int) -> str:
        return f"{type(self.strategy).__name__} of node {node}: self"

    def lr(self, ctx: Context) -> float | Tensor:
        return self._lr  # of the step just made: its end has already set the next one

    def _run(self, work: Callable[[int], None], meeting: Meeting) -> None:
        """Run `work(node)` for all nodes, a thread each; the first error of a node is raised here."""

        def run(node: int) -> BaseException | None:
            _here.meeting, _here.node = meeting, node
            try:
                work(node)
                meeting.finish(node)
            except BaseException as error:
                meeting.abort()
                return error
            finally:
                del _here.meeting, _here.node
            return None

        assert self._threads is not None
        errors = list(self._threads.map(run, range(meeting.num_nodes)))
        # Those that only waited for the node that failed have a BrokenBarrierError.
        for node, error in enumerate(errors):
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise RuntimeError(f"node {node}: {type(error).__name__}: {error}") from error


def is_per_rank(strategy: Strategy) -> bool:
    """Whether a strategy is written for one rank: it overrides `step`."""
    return type(strategy).step is not Strategy.step


__all__ = ["Meeting", "OptimSpec", "PerRankStrategy", "all_gather", "all_reduce", "broadcast", "is_per_rank"]
