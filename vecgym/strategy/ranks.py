"""Where the nodes' threads meet: one runs at a time, from one collective to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.core.rng import GlobalStates

_here = threading.local()  # .node and .meeting of the thread


class RankMeeting:
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
        """Return what every node gives, in node order; nothing goes to the ledger."""
        return self._meet(node, operation, value, list)

    def finish(self, node: int) -> None:
        """End a node's work, where all must meet: none may still wait in a collective."""
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
        """Release all threads: none must wait for one that has failed."""
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


def run_ranks(work: Callable[[int], None], meeting: RankMeeting, threads: Executor) -> None:
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


def here() -> tuple[RankMeeting, int]:
    """Return the meeting and the node of the thread that asks."""
    if not is_rank():
        raise RuntimeError("all_reduce, broadcast and all_gather of a rank work inside Strategy.step() only.")
    return _here.meeting, _here.node


def is_rank() -> bool:
    """Whether this thread is a node's."""
    return hasattr(_here, "meeting")
