"""The backend `graph`: that of `vmap`, whose kernels are recorded as a CUDA graph, which one call launches.

A small model's step is short for a GPU, which then waits for Python. Recorded, it waits once a pass, and runs the very
kernels that `vmap` does. Where gradients go to the optimizer as they are, its step is recorded with them. Whether a
model can be recorded is tried before training: `Recorded.tried` compares the gradients of a recording, with other
batches than the recorded one, with those of `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vecgym.core import tree
from vecgym.core.errors import warn
from vecgym.core.tree import Tree
from vecgym.engine.backend import Local, Part
from vecgym.engine.contract import cause
from vecgym.engine.stateless import StatelessModel
from vecgym.engine.trial import Trial, Tried, difference, first_line, first_part, timed, turned
from vecgym.engine.vmap import Vmap
from vecgym.optim import OptState, RecordableStep

MAX_RECORDINGS = 8  # chunks, and the last, smaller batch of an epoch, have their own
# Passes over the same memory before it is recorded: what is used for a moment is rarely met so often.
MEETINGS = 3

# Operations that wait for values, which a capture does not survive.
WAITING = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount",
}  # fmt: skip

Result = tuple[Tree, Tensor]


class Graph(Protocol):
    """The operations of a function, and what it returned: tensors that every replay writes anew, in the same memory."""

    result: Result

    def replay(self) -> None: ...


class CUDAGraph:
    """Records the kernels that a function launches, without running them; the function must not wait for the GPU.

    Graphs share the memory of what is computed in between, `pool`.
    """

    def __init__(self, fn: Callable[[], Result], device: torch.device, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            before, own = torch.cuda.current_stream(), torch.cuda.Stream()
            try:
                # Other threads may do as they like meanwhile.
                with torch.cuda.graph(self._graph, pool=pool, stream=own, capture_error_mode="thread_local"):
                    self.result = fn()
            finally:
                torch.cuda.set_stream(before)  # a capture that fails does not go back to it

    def replay(self) -> None:
        self._graph.replay()


record: Callable[[Callable[[], Result], torch.device, Any], Graph] = CUDAGraph


class Watch(TorchDispatchMode):
    """Notes what a function waits for, and which tensors it takes from outside.

    Attributes:
        waits: the name of an operation that waits; "" if there is none.
        outside: the first tensor in each memory that the function has not made itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = ""
        self.outside: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def outside_of(self, values: Any) -> list[Tensor]:
        """Return the tensors from outside that are not among `values` either."""
        given = {x.untyped_storage().data_ptr() for x in tensors_in(values)}
        return [x for memory, x in self.outside.items() if memory not in given]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in WAITING:
            self.waits = name
        for x in tensors_in((args, kwargs or {})):
            if (memory := x.untyped_storage().data_ptr()) not in self._made:
                self.outside.setdefault(memory, x)
        results = func(*args, **(kwargs or {}))
        self._made.update(x.untyped_storage().data_ptr() for x in tensors_in(results))
        return results


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in the arguments or results of an operation."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


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
    """A pass over tensors that stay where they are, and over batches that are copied to one place.

    Attributes:
        last: the pass that used it last.
        held: what it reads besides, which the model may drop: a mask that it has made for this length, say.
    """

    def __init__(
        self,
        part: Part,
        compute: Callable[[Part], Result],
        device: torch.device,
        pool: Any,
        moments: OptState | None = None,
    ) -> None:
        self.last = 0
        self._batch = tree.map_leaves(torch.clone, part.batch)
        with Watch() as watch:
            self._graph = record(lambda: compute(part._replace(batch=self._batch)), device, pool)
        self.held = watch.outside_of((part.params, part.buffers, self._batch, moments))

    def launch(self, batch: Any, done: int = 0) -> Result:
        """Compute with another batch of the same shape, after `done` steps of the optimizer."""
        tree.map_leaves(Tensor.copy_, self._batch, batch)
        self._graph.replay()
        return self._graph.result


class StepRecording(Recording):
    """A pass, and the optimizer's step with its gradients, which are not returned."""

    def __init__(
        self, part: Part, update: RecordableStep, compute: Callable[[Part], Result], device: torch.device, pool: Any
    ) -> None:
        count = self._count = torch.zeros((), dtype=torch.float32, device=device)
        self._counted = 0  # the value of `_count`, the steps made before the next launch, without asking the device

        def trained(some: Part) -> Result:
            grads, losses = compute(some)
            params, state = update.take(some.params, grads, count)
            if _places((params, _moments(state))) != _places((some.params, _moments(update.state))):
                raise RuntimeError("the optimizer does not leave its state where it is")
            count.add_(1)
            return {}, losses

        super().__init__(part, trained, device, pool, _moments(update.state))

    def launch(self, batch: Any, done: int = 0) -> Result:
        """Take the step after `done` others."""
        if done != self._counted:
            self._count.fill_(done)
        self._counted = done + 1
        return super().launch(batch)


class Recorded(Tried):
    """All nodes at once, launched as one CUDA graph; evaluation and derivatives of gradients as `vmap` does them.

    Training leaves parameters and buffers where they are in memory, so a recording reads and writes them there. It is
    made when a pass has met the same memory a few times; a pass over other memory, such as that of a few nodes that
    train by themselves, runs as under `vmap`. The next launch writes over the gradients of the last.

    Python code of the model runs when a pass is recorded, not when it is launched: what it counts, or draws by other
    means than torch, stays as it was.
    """

    name, option, otherwise = "graph", 'engine="graph"', "without a graph"

    def __init__(self, model: StatelessModel) -> None:
        check_recordable(model.device)
        super().__init__(model)
        self.refusal = ""  # why nothing more is recorded
        self._warns = self._with_steps = True
        self.forget()

    def forget(self) -> None:
        """Free the recordings and their memory."""
        self._recordings: dict[Any, Recording] = {}
        self._met: dict[Any, int] = {}  # how often the last passes that were not recorded were met
        self._watched: set[Any] = set()  # what has been looked at for operations that wait
        self._passes = 0
        self._pool = torch.cuda.graph_pool_handle() if self.model.device.type == "cuda" else None

    def gradients(self, part: Part, out: Callable[[], Tree], thread: int = 0) -> Local:
        update = part.update() if self._with_steps and part.update is not None else None
        losses = None if update is None else self._step(part, update)
        return super().gradients(part, out, thread) if losses is None else Local({}, losses, part.buffers)

    def _step(self, part: Part, update: RecordableStep) -> Tensor | None:
        """Launch the gradients with the optimizer's step; None: nothing was done, since that is not recorded."""
        places, device = _places((part.params, part.buffers, _moments(update.state))), self.model.device
        each = super()._of_each
        with self.model.seeded(part.keys.of(0)):
            recording = self._recording(
                ("step", _form(part.batch), places, update.settings),
                lambda: StepRecording(part, update, lambda some: each(some, 0), device, self._pool),
                with_step=True,
            )
            done = int(update.state["step"])  # on the CPU
            return None if recording is None else recording.launch(part.batch, done)[1].clone()

    def _of_each(self, part: Part, thread: int) -> Result:
        grads, losses = self._launched("each", part, lambda some: super(Recorded, self)._of_each(some, thread))
        return grads, losses.clone()  # losses are read some steps later

    def _of_mean(self, part: Part, num_nodes: int) -> Result:
        grads, losses = self._launched(num_nodes, part, lambda some: super(Recorded, self)._of_mean(some, num_nodes))
        # Those of one chunk are added to those of the next, which may be another launch of the same recording.
        return (grads if part.size == num_nodes else tree.map(torch.clone, grads)), losses.clone()

    def _launched(self, kind: Any, part: Part, compute: Callable[[Part], Result]) -> Result:
        form = (kind, _form(part.batch))
        key = (form, _places((part.params, part.buffers)))
        recording = self._recording(key, lambda: Recording(part, compute, self.model.device, self._pool))
        return self._watching(form, part, compute) if recording is None else recording.launch(part.batch)

    def _recording(self, key: Any, make: Callable[[], Recording], with_step: bool = False) -> Recording | None:
        """Return the recording of what has been met often enough; None: it is not recorded, or cannot be."""
        self._passes += 1
        if key not in self._recordings:
            if self.refusal or not self._often(key) or not self._has_room():
                return None
            try:
                self._recordings[key] = make()
            except Exception as error:  # whatever cannot be recorded runs without it
                why = first_line(cause(error), type(error).__name__)
                if with_step:
                    self._with_steps = False
                    warn(f"From here on the optimizer's step is not recorded with the gradients: {why}.")
                else:
                    self._refuse(why)
                return None
        self._recordings[key].last = self._passes
        return self._recordings[key]

    def _often(self, key: Any) -> bool:
        """Whether this memory has been met often enough; note that it was once more."""
        count = self._met.pop(key, 0)
        self._met[key] = count + 1
        while len(self._met) > 4 * MAX_RECORDINGS:
            del self._met[next(iter(self._met))]
        return count >= MEETINGS

    def _watching(self, form: Any, part: Part, compute: Callable[[Part], Result]) -> Result:
        """Compute; the first time refuse to record what would wait, which a capture does not survive."""
        if self.refusal or form in self._watched:
            return compute(part)
        self._watched.add(form)
        with Watch() as watch:
            result = compute(part)
        if watch.waits:
            self._refuse(f"it waits for values ({watch.waits})")
        return result

    def _refuse(self, why: str) -> None:
        self.refusal = why
        if self._warns:
            warn(f"From here on the model runs {self.otherwise}: {why}.")

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
        if self.model.recomputes:
            return Trial("its backward pass runs parts of it again, and asks for the state of the random numbers", "")
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
        for examples in (*[batch] * (MEETINGS + 1), turned(batch), batch):  # as it is, recorded and launched, launched
            (expected, plain_s), (found, launched_s) = (
                timed(backend, part._replace(batch=examples), mean) for backend, part in zip(backends, parts)
            )
            if refusal := self.refusal or difference(expected, found, autocast):
                return Trial(refusal, "")
            seconds.append((plain_s, launched_s))
        plain_ms, launched_ms = (1e3 * min(each[-2:]) for each in zip(*seconds))
        return Trial("", f"recorded: {launched_ms:.2g} ms a pass, {plain_ms:.2g} without")


def _form(batch: Any) -> tuple[Any, ...]:
    """Say what the leaves of a batch are: of a tensor its shape and type, of others the value, too."""
    found = tree.flatten(batch)
    return tuple((path, x.shape, x.dtype) if isinstance(x, Tensor) else (path, repr(x)) for path, x in found)


def _places(values: Any) -> tuple[Any, ...]:
    """Say where tensors are and how they lie there."""
    found = tree.flatten(values)
    return tuple((path, x.data_ptr(), x.shape, x.stride(), x.dtype) for path, x in found if isinstance(x, Tensor))


def _moments(state: OptState) -> OptState:
    """Return what a step of an optimizer changes on the device: all but the number of steps."""
    return {slot: values for slot, values in state.items() if slot != "step"}
