"""Strategies written for one rank, as EXO Gym's are: `step()` sees one node's model, and talks to the others.

A subclass of `Strategy` that overrides `step` is such a strategy. Each node gets a copy of it, whose `model` has
the node's slice of the stacked state as its parameters (`p.grad` is set). Each copy has a thread, and they take
turns: one runs up to a collective of this module (`all_reduce`, `broadcast`, `all_gather`), then the next. The
collectives are those of `vecgym.collectives` underneath: same results, same ledger. Exact, slower than `[K, *]`
tensor code, and not differentiable.

What the code of a node draws from the global random generators is its own: the nodes begin from equal states, as
processes that are seeded alike do, and no node's draws depend on another's.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives
from vecgym.core import rng
from vecgym.core.objects import restore, state_of
from vecgym.core.rng import GlobalStates
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.strategy.base import Context, State, Strategy

_here = threading.local()  # .node and .meeting of the thread


class Meeting:
    """Where the nodes' threads meet. One runs at a time, node 0 first; at a meeting the last to come computes for all.

    Args:
        comm: what carries out the collectives.
        states: of the global random generators, one for each node; replaced by what the nodes leave behind.
    """

    def __init__(self, comm: Collectives, states: list[GlobalStates]) -> None:
        self.comm = comm
        self.num_nodes = comm.num_nodes
        self.states = states
        self._turns = [threading.Semaphore(0) for _ in range(self.num_nodes)]
        self._failed = False
        self._given: list[Any] = [None] * self.num_nodes
        self._result: Any = None

    def exchange(self, node: int, operation: str, value: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Stack what the nodes give, `[K, *]`, and return what `compute` makes of it."""
        what = f"{operation} of shape {list(value.shape)}"
        return self._meet(node, what, value.detach(), lambda given: compute(torch.stack(list(given))))

    def share(self, node: int, operation: str, value: Any) -> list[Any]:
        """What every node gives, whatever it is: in node order. Nothing in the ledger."""
        return self._meet(node, operation, value, list)

    def finish(self, node: int) -> None:
        """The end of a node's work, where all must meet: none may still wait in a collective."""
        self.share(node, "the end of its work", None)

    def enter(self, node: int) -> None:
        """Wait for the first turn."""
        if node == 0:
            self._turns[0].release()
        self._wait(node)

    def leave(self, node: int) -> None:
        """Give up the last turn."""
        self.states[node] = GlobalStates.now()
        if node + 1 < self.num_nodes:
            self._turns[node + 1].release()

    def abort(self) -> None:
        """Let no thread wait for one that has failed."""
        self._failed = True
        for turn in self._turns:
            turn.release()

    def _meet(self, node: int, operation: str, value: Any, compute: Callable[[Sequence[Any]], Any]) -> Any:
        self._given[node] = (operation, value)
        if node == self.num_nodes - 1:
            self._result = self._computed(compute)
        self.states[node] = GlobalStates.now()
        self._turns[(node + 1) % self.num_nodes].release()
        self._wait(node)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def _wait(self, node: int) -> None:
        self._turns[node].acquire()
        if self._failed:
            raise _AnotherFailed
        self.states[node].restore()

    def _computed(self, compute: Callable[[Sequence[Any]], Any]) -> Any:
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
            return compute([x for _, x in self._given])
        except Exception as error:  # raised in every thread
            return error


class _AnotherFailed(Exception):
    """Ends a thread that has nothing to wait for any more."""


def run_ranks(work: Callable[[int], None], meeting: Meeting, threads: Executor) -> None:
    """Run `work(node)` for all nodes, a thread each, taking turns; the first error of a node is raised here.

    The global random states are afterwards what they were.
    """

    def run(node: int) -> BaseException | None:
        _here.meeting, _here.node = meeting, node
        try:
            meeting.enter(node)
            work(node)
            meeting.finish(node)
            meeting.leave(node)
        except BaseException as error:
            meeting.abort()
            return error
        finally:
            del _here.meeting, _here.node
        return None

    before = GlobalStates.now()
    try:
        errors = list(threads.map(run, range(meeting.num_nodes)))
    finally:
        before.restore()
    for node, error in enumerate(errors):
        if error is not None and not isinstance(error, _AnotherFailed):
            raise RuntimeError(f"node {node}: {type(error).__name__}: {error}") from error


def here() -> tuple[Meeting, int]:
    """The meeting and the node of the thread that asks."""
    if not is_rank():
        raise RuntimeError("all_reduce, broadcast and all_gather of a rank work inside Strategy.step() only.")
    return _here.meeting, _here.node


def is_rank() -> bool:
    """Whether this thread is a node's."""
    return hasattr(_here, "meeting")


def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """Replace `tensor` by its sum over all nodes, in place, and return it.

    `op` is "sum" or "mean", or "max", "min" or "product", for which every node gets all values.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.engine.simulation import Simulation
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> class DDP(Strategy):
    ...     def step(self):
    ...         for p in self.model.parameters():
    ...             all_reduce(p.grad, op="mean")
    ...         self.optim.step()
    ...         super().step()
    >>> simulation = Simulation(Line(), DDP("sgd", lr=0.5), StackedCollectives(2))
    >>> state, _ = simulation.step(simulation.init(), torch.tensor([[1.0], [3.0]]))
    >>> state.params["w"]
    tensor([2., 2.])
    """
    if op not in _REDUCTIONS:
        raise ValueError(f"op={op!r} is not known; allowed: {', '.join(map(repr, _REDUCTIONS))}.")
    meeting, node = here()
    reduce = _REDUCTIONS[op]
    with torch.no_grad():
        return tensor.copy_(meeting.exchange(node, f"all_reduce {op}", tensor, lambda x: reduce(meeting.comm, x))[0])


_REDUCTIONS: dict[str, Callable[[Collectives, Tensor], Tensor]] = {
    "sum": lambda comm, x: comm.sum(x),
    "mean": lambda comm, x: comm.mean(x),
    "max": lambda comm, x: comm.all_gather(x).amax(1),
    "min": lambda comm, x: comm.all_gather(x).amin(1),
    "product": lambda comm, x: comm.all_gather(x).prod(1),
}


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """Replace `tensor` by that of node `src`, in place, and return it.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.engine.simulation import Simulation
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> class OfNodeOne(Strategy):
    ...     def step(self):
    ...         self.optim.step()
    ...         for p in self.model.parameters():
    ...             broadcast(p, src=1)
    ...         super().step()
    >>> simulation = Simulation(Line(), OfNodeOne("sgd", lr=0.5), StackedCollectives(2))
    >>> state, _ = simulation.step(simulation.init(), torch.tensor([[1.0], [3.0]]))
    >>> state.params["w"]
    tensor([3., 3.])
    """
    meeting, node = here()
    found = meeting.exchange(node, f"broadcast from {src}", tensor, lambda x: meeting.comm.broadcast(x, src))
    with torch.no_grad():
        return tensor.copy_(found[0])


def all_gather(tensor: Tensor) -> Tensor:
    """Every node's tensor: `[K, *]`.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.engine.simulation import Simulation
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> class Median(Strategy):
    ...     def step(self):
    ...         for p in self.model.parameters():
    ...             p.grad = all_gather(p.grad).median(0).values  # [K, *] -> [*]
    ...         self.optim.step()
    ...         super().step()
    >>> simulation = Simulation(Line(), Median("sgd", lr=0.5), StackedCollectives(3))
    >>> state, _ = simulation.step(simulation.init(), torch.tensor([[1.0], [3.0], [50.0]]))
    >>> state.params["w"]
    tensor([3., 3., 3.])
    """
    meeting, node = here()
    return meeting.exchange(node, "all_gather", tensor, meeting.comm.all_gather)[0].clone()


def barrier() -> None:
    """Wait for all nodes."""
    meeting, node = here()
    meeting.share(node, "a barrier", None)


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
        self._states: list[GlobalStates] = []
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
        self._states = [GlobalStates.seeded(rng.key(ctx.seed, "per rank"))] * num_nodes

        def start(node: int) -> None:
            rank = self._ranks[node]
            rank.max_steps = ctx.max_steps
            rank._init_node(copy.deepcopy(self._model), node, num_nodes)

        run_ranks(start, Meeting(ctx.comm, self._states), self._threads)
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
        assert self._threads is not None
        run_ranks(step, Meeting(ctx.comm, self._states), self._threads)
        # A rank may have replaced a parameter's data by another tensor instead of writing into it.
        for node, rank in enumerate(self._ranks):
            own = dict(rank.model.named_parameters())
            for name, p in stacked.items():
                if own[name].data_ptr() != p[node].data_ptr():
                    p[node].copy_(own[name].detach())
        return stacked, {}

    def state(self) -> list[dict[str, Any]]:
        """What the copies hold, and their random states, a tree each, for a file; parameters are the simulation's.

        Raises:
            TypeError: for something in them that cannot be saved, naming it.
        """
        return [
            {"held": state_of(rank, self._kept_elsewhere(rank), self._name(node)), "random": states.packed()}
            for node, (rank, states) in enumerate(zip(self._ranks, self._states))
        ]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Go on from there; `init` has made the copies."""
        for node, (rank, saved) in enumerate(zip(self._ranks, state)):
            restore(rank, saved["held"], self._kept_elsewhere(rank), self._name(node))
            self._states[node] = GlobalStates.unpacked(saved["random"])

    def _kept_elsewhere(self, rank: Strategy) -> dict[str, Tensor]:
        return dict(rank.model.named_parameters())

    def _name(self, node: int) -> str:
        return f"{type(self.strategy).__name__} of node {node}: self"

    def lr(self, ctx: Context) -> float | Tensor:
        return self._lr  # of the step just made: its end has already set the next one


def is_per_rank(strategy: Strategy) -> bool:
    """Whether a strategy is written for one rank: it overrides `step`."""
    return type(strategy).step is not Strategy.step


__all__ = [
    "Meeting",
    "OptimSpec",
    "PerRankStrategy",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "here",
    "is_per_rank",
    "is_rank",
    "run_ranks",
]
