"""The backend `graph`: that of `vmap`, whose kernels are recorded as a CUDA graph, which one call launches.

A small model's step is short for a GPU, which then waits for Python. Recorded, it waits once a pass, and runs the very
kernels that `vmap` does. Whether a model can be recorded is tried before training: `Recorded.tried` compares the
gradients of a recording, with other batches than the recorded one, with those of `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from vecgym.core import tree
from vecgym.core.errors import warn
from vecgym.core.tree import Tree
from vecgym.engine.backend import Part
from vecgym.engine.contract import cause
from vecgym.engine.stateless import StatelessModel
from vecgym.engine.trial import Trial, Tried, difference, first_line, first_part, timed, turned
from vecgym.engine.vmap import Vmap

MAX_RECORDINGS = 8  # each holds the memory of a pass: its chunks and the last, smaller batch of an epoch have their own

Result = tuple[Tree, Tensor]


class Graph(Protocol):
    """The operations of a function, and what it returned: tensors that every replay writes anew, in the same memory."""

    result: Result

    def replay(self) -> None: ...


class CUDAGraph:
    """Records the kernels that a function launches, without running them; the function must not wait for the GPU."""

    def __init__(self, fn: Callable[[], Result]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.result = fn()

    def replay(self) -> None:
        self._graph.replay()


record: Callable[[Callable[[], Result]], Graph] = CUDAGraph


def check_recordable(device: torch.device) -> None:
    """Raise a ValueError for a device that has no CUDA graphs.

    >>> check_recordable(torch.device("cpu"))
    Traceback (most recent call last):
    ...
    ValueError: engine="graph" records CUDA graphs, and the model is on cpu: use engine="auto", or device="cuda".
    """
    if device.type != "cuda":
        raise ValueError(
            f'engine="graph" records CUDA graphs, and the model is on {device.type}: use engine="auto", or '
            'device="cuda".'
        )


class Recording:
    """A pass over tensors that stay where they are, and over batches that are copied to one place."""

    def __init__(self, part: Part, compute: Callable[[Part], Result]) -> None:
        self.last = 0  # the pass that used it last
        self._batch = tree.map_leaves(torch.clone, part.batch)
        self._graph = record(lambda: compute(part._replace(batch=self._batch)))

    def launch(self, batch: Any) -> Result:
        """Compute with another batch of the same shape."""
        tree.map_leaves(Tensor.copy_, self._batch, batch)
        self._graph.replay()
        return self._graph.result


class Recorded(Tried):
    """All nodes at once, launched as one CUDA graph; evaluation and derivatives of gradients as `vmap` does them.

    Training leaves parameters and buffers where they are in memory, so a recording reads and writes them there. It is
    made when a pass meets the same memory for the second time; a pass over other memory, such as that of a few nodes
    that train by themselves, runs as under `vmap`. The next launch writes over the gradients of the last.

    Python code of the model runs when a pass is recorded, not when it is launched: what it counts, or draws by other
    means than torch, stays as it was.
    """

    name, option, otherwise = "graph", 'engine="graph"', "without a graph"

    def __init__(self, model: StatelessModel) -> None:
        check_recordable(model.device)
        super().__init__(model)
        self.refusal = ""  # why nothing more is recorded
        self._warns = True
        self.forget()

    def forget(self) -> None:
        """Free the recordings and their memory."""
        self._recordings: dict[Any, Recording] = {}
        self._met: dict[Any, None] = {}  # the last keys of passes that were not recorded
        self._passes = 0

    def _of_each(self, part: Part, thread: int) -> Result:
        grads, losses = self._launched("each", part, lambda some: super(Recorded, self)._of_each(some, thread))
        return grads, losses.clone()  # losses are read some steps later

    def _of_mean(self, part: Part, num_nodes: int) -> Result:
        grads, losses = self._launched(num_nodes, part, lambda some: super(Recorded, self)._of_mean(some, num_nodes))
        # Those of one chunk are added to those of the next, which may be another launch of the same recording.
        return (grads if part.size == num_nodes else tree.map(torch.clone, grads)), losses.clone()

    def _launched(self, kind: Any, part: Part, compute: Callable[[Part], Result]) -> Result:
        self._passes += 1
        batch = tuple((path, x.shape, x.dtype) for path, x in tree.flatten(part.batch))
        key = (kind, _places(part.params), _places(part.buffers), batch)
        recording = self._recordings.get(key)
        if recording is None:
            if self.refusal or key not in self._met or not self._has_room():
                self._met = dict.fromkeys([*[k for k in self._met if k != key][1 - 4 * MAX_RECORDINGS :], key])
                return compute(part)
            try:
                recording = Recording(part, compute)
            except Exception as error:  # whatever cannot be recorded runs without it
                self.refusal = first_line(cause(error), type(error).__name__)
                if self._warns:
                    warn(f"From here on the model runs {self.otherwise}: {self.refusal}.")
                return compute(part)
            self._recordings[key] = recording
        recording.last = self._passes
        return recording.launch(part.batch)

    def _has_room(self) -> bool:
        """Make room for one more recording, if there is one that has long not been used."""
        if len(self._recordings) < MAX_RECORDINGS:
            return True
        oldest = min(self._recordings, key=lambda key: self._recordings[key].last)
        if self._passes - self._recordings[oldest].last < 16 * MAX_RECORDINGS:
            return False
        del self._recordings[oldest]
        return True

    def tried(self, batch: Any, mean: bool, autocast: bool) -> Trial:
        """Record, compare with `vmap`, also with another batch than the recorded one, and time both."""
        self.refusal, self._warns = "", False
        try:
            return self._compared(batch, mean, autocast)
        finally:
            self._warns = True
            self.forget()

    def _compared(self, batch: Any, mean: bool, autocast: bool) -> Trial:
        seconds = []
        backends = Vmap(self.model), self
        parts = [first_part(self.model, batch, mean) for _ in backends]
        for examples in (batch, batch, turned(batch), batch):  # as it is, recorded and launched, launched, launched
            (expected, plain_s), (found, launched_s) = (
                timed(backend, part._replace(batch=examples), mean) for backend, part in zip(backends, parts)
            )
            if refusal := self.refusal or difference(expected, found, autocast):
                return Trial(refusal, "")
            seconds.append((plain_s, launched_s))
        plain_ms, launched_ms = (1e3 * min(each[2:]) for each in zip(*seconds))
        return Trial("", f"recorded: {launched_ms:.2g} ms a pass, {plain_ms:.2g} without")


def _places(values: Tree) -> tuple[Any, ...]:
    """Say where tensors are and how they lie there."""
    return tuple((name, x.data_ptr(), x.shape, x.stride()) for name, x in values.items())
