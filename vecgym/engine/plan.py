"""Observe a model, and choose how its nodes are computed: the backend, the nodes in one call, the node threads.

`examine` observes a forward and backward pass of one node before training. `choose_plan` is a deterministic function of
these facts and the machine, so the same script gives the same bits in every run.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch
from torch.overrides import TorchFunctionMode

from vecgym.core import check, rng, tree
from vecgym.core.errors import warn
from vecgym.core.tree import Tree
from vecgym.engine import hooks
from vecgym.engine.backend import Backend, Local, difference, first_part, timed
from vecgym.engine.constancy import Snapshot
from vecgym.engine.contract import (
    WEIGHT,
    cause,
    check_influence,
    check_modes,
    check_weight,
    check_written,
    first_call,
    state_error,
    vmap_error,
)
from vecgym.engine.loop import Loop
from vecgym.engine.stateless import ChannelsLast, StatelessModel, plain_attention, seeded
from vecgym.engine.vmap import Vmap

EngineName = Literal["auto", "vmap", "loop"]
ENGINES: tuple[str, ...] = get_args(EngineName)
BACKENDS: dict[str, type[Backend]] = {"vmap": Vmap, "loop": Loop}

# Calibrated by benchmarks/step_time.py. Splitting the nodes over threads costs two thread hand-overs and twice the
# Python of one vectorised call: it pays off from about this much arithmetic per step and thread.
MIN_FLOP_PER_THREAD = 1e9
# On a CPU, a node with more arithmetic than this in a step is computed faster alone, within the cache.
MAX_FLOP_IN_STACK = 2e9
# Stacking gains nothing for convolutions of images: from this much of them in a node's step, a loop over the nodes with
# the channels last in memory is faster, despite its Python.
MAX_CONVOLUTION_FLOP_IN_STACK = 1e8
# On a CPU, memory for a larger tensor is mapped anew in every operation (glibc's allocator does not keep it), and the
# page faults cost as much as the arithmetic: so nodes are computed in chunks whose largest tensor is smaller.
MAX_TENSOR_BYTES = 2**25 - 2**16
# An evaluation takes several batches in one call, up to this much arithmetic and this large a tensor: beyond, the
# overhead of a call is small, and on a CPU the tensors leave the cache.
MAX_EVALUATION = {"cpu": (2e9, 2**22), "other": (1e12, 2**30)}
# On a CPU, compiled code saves operations and passes over memory, and costs a wrapper of Python. With less arithmetic
# than this in a step of all nodes, a recorded list of at most so many operations is as fast, and is made in a
# thousandth of the time.
MIN_FLOP_COMPILED, MAX_OPERATIONS_LISTED = 30e6, 64
FAR = (720_720, 720_719)  # steps of a pass's counter: a multiple of 1 to 16, and the one before
HOST_RANDOM = "it draws random numbers of numpy or Python, which would be the same on all nodes (torch's are not)"


Results = list[Tensor | None] | None
# ---------------------------------------------------------------------------------------------- facts about a model


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model, as one forward and backward pass of one node shows them.

    >>> facts = ModelFacts(unused=frozenset(), mutated=frozenset(), random=True, flop=1000)  # a model with dropout
    >>> facts.random, facts.vmap_error is None
    (True, True)
    """

    unused: frozenset[str]  # parameters without a gradient in this pass
    mutated: frozenset[str]  # buffers that a training step changes
    random: bool  # draws random numbers (dropout)
    host_random: bool = False  # some of them are numpy's or Python's
    may_draw: bool = False  # its code mentions random numbers of numpy or Python
    written: frozenset[str] = frozenset()  # parameters that its forward changes under torch.no_grad()
    chooses: bool = True  # which parameters get a gradient may depend on the data; not where vmap can run the model
    hooked: bool = False  # has hooks on its gradients
    shared: str = ""  # an object outside the model that its code could change, or has changed
    flop: int = 0  # floating-point operations of one node's forward and backward pass
    convolution_flop: int = 0  # the part of them in convolutions of images
    largest_bytes: int = 0  # of a tensor of one node, a parameter or the output of an operation
    output_bytes: int = 0  # the largest output of an operation
    any_layout: bool = True  # whether its results are the same with the channels last in memory
    at_once: bool = True  # whether several batches can be evaluated in one call; False after a failed try
    vmap_error: Exception | None = None
    vmap_slow: tuple[str, ...] = ()  # operations that vmap runs node by node, serially


@plain_attention()
def examine(model: StatelessModel, batch: Any, stacked: Backend | None, required: bool, mean: bool) -> ModelFacts:
    """Run one node forward and backward on a batch `[B, ...]`: check its results, and record facts.

    Args:
        stacked: also try whether this backend can run two nodes; the model then learns its facts.
        required: raise the error of that try, instead of recording it.
        mean: whether the run needs the gradient of the nodes' mean loss, at parameters that they share.
    """
    check_modes(model.model)
    # Copies, since a forward pass may write to them.
    params = {name: p.detach().clone().requires_grad_() for name, p in model.params.items()}
    observer = Observer({**params, **model.frozen})
    with seeded(0, model.device, host=True), observer, first_call(model.model, batch):
        before, own = tree.map(torch.clone, model.buffers), tree.map(torch.clone, model.buffers)
        states, host_states = _rng_states(model.device), rng.host_states()
        start = Snapshot(model.structure(0))  # before the pass
        loss, after, grads = model.gradient(params, {**own, WEIGHT: None}, batch)
        model.weighted = check_weight(after.pop(WEIGHT))
        host_random = host_states != rng.host_states()
        random = not all(map(torch.equal, states, _rng_states(model.device)))
        # Even by writing the same value, such as the running mean of something that has not moved yet.
        mutated = {n for n, b in after.items() if b is not own[n] or b._version or not torch.equal(b, before[n])}
    left = _check_state(model, batch, [loss, *after.values(), *params.values(), *grads], start)
    host_random = host_random and _always_draws(model, batch)
    random |= host_random
    model.recomputes, model.forgets = observer.recomputes, _forgets(model, batch, start)
    unused, written = frozenset(name for name, g in zip(params, grads) if g is None), observer.written()
    check_influence(unused, params)
    check_written(written - params.keys() | written & unused)
    hooks.check_ties(model.model, mutated)
    hooked = hooks.on_gradients(model.model)
    facts = ModelFacts(  # a backward pass costs about two forward passes
        unused=unused, mutated=frozenset(mutated), random=random, host_random=host_random, may_draw=start.draws,
        written=written, hooked=bool(hooked),
        shared=start.shared or next((name for name, outer in left.items() if outer), ""),
        flop=3 * observer.flop, convolution_flop=3 * observer.convolution_flop, output_bytes=observer.largest_bytes,
        largest_bytes=max(observer.largest_bytes, *(p.numel() * p.element_size() for p in model.params.values())),
    )  # fmt: skip
    if stacked is None:
        return facts
    of_one = _local(model, loss, after, grads)
    facts = replace(facts, any_layout=required or _any_layout(model, batch, facts, of_one))
    alone = f"its forward writes to its parameter {min(written)!r}" if written else HOST_RANDOM * host_random
    if unsafe := observer.unsafe or alone or (hooked and f"{hooked}, which sees one node at a time"):
        return replace(facts, vmap_error=vmap_error(unsafe))
    expected = of_one if observer.transforms and not random else None
    return _in_one_call(model, batch, stacked, facts, expected, required, bool(left), mean)


def _in_one_call(
    model: StatelessModel, batch: Any, stacked: Backend, facts: ModelFacts, expected: Local | None, required: bool,
    keeps: bool, mean: bool,
) -> ModelFacts:  # fmt: skip
    """Add to the facts whether vmap can run the model, and which operations it runs node by node.

    Args:
        keeps: a pass leaves values in attributes: also run three nodes, for which those of two must fit.
    """
    model.learn(facts.random, facts.mutated)
    try:
        slow = [_slow_operations(model, batch, stacked, expected, n, mean) for n in ((2, 3) if keeps else (2,))]
        return replace(facts, vmap_slow=slow[0], chooses=False)
    except Exception as error:  # whatever the model's code raises: the loop can run it
        refusal = vmap_error(cause(error))
        if required:
            raise refusal from error
        return replace(facts, vmap_error=refusal)
    finally:
        if keeps:
            model.renew()


def _check_state(model: StatelessModel, batch: Any, first: Results, before: Snapshot) -> dict[str, bool]:
    """Raise an error for a model whose result depends on values that an earlier pass left in attributes or outside.

    Three comparisons show it: of the first pass with a second one on the same batch; of a pass on another batch, and of
    an evaluation, with the same of a model that has not trained; and of the first pass with one before which all
    numbers that every pass moves were set far away, beyond the end of a schedule or to the beginning of a period.

    Returns:
        each place that a pass changes, and whether it is outside the model.
    """
    after, other = Snapshot(model.structure(0)), tree.map_leaves(_repeated, batch)
    if not (left := after.changed(before)):
        return {}
    again = _results(model, batch)
    moving = Snapshot(model.structure(0)).changed(after)
    late, evaluated = _results(model, other), _results(model, batch, evaluate=True)

    def renew() -> None:
        model.renew()
        before.restore({*left, *moving})

    renew()
    pairs = [(again, first), (late, _results(model, other))]
    renew()
    pairs.append((evaluated, _results(model, batch, evaluate=True)))
    for far in FAR if moving and all(starmap(_alike, pairs)) else ():
        renew()
        _results(model, batch)  # some places exist only now
        Snapshot(model.structure(0)).move(moving, far, after)
        pairs.append((_results(model, batch), first))
        Snapshot(model.structure(0)).move(moving, far, after)
        pairs.append((_results(model, batch, evaluate=True), pairs[2][1]))
    renew()
    if not all(starmap(_alike, pairs)):
        raise state_error((moving or left)[0])
    places = {**before.places, **after.places}
    # A number within the model is counted by each copy; one outside counts all passes.
    within = (name for name in moving if (place := places.get(name)) and not place.outer)
    if counts := [name for name in within if type(places[name].value) in (int, float)]:
        warn(
            f"the model's forward changes {counts[0]}, on which its results do not depend. Copies of the model train, "
            "each for several nodes: the returned model has it as it was. A buffer would be trained with the model."
        )
    return {name: places[name].outer > 0 for name in left}


def _always_draws(model: StatelessModel, batch: Any) -> bool:
    """Whether each pass draws numbers of numpy or Python: if not, another thread (Dask's or Jupyter's) drew one."""
    if threading.active_count() == 1:
        return True
    params = {name: p.detach().clone().requires_grad_() for name, p in model.params.items()}
    for _ in range(3):
        with seeded(0, model.device, host=True):
            before = rng.host_states()
            model.gradient(params, tree.map(torch.clone, model.buffers), batch)
            drawn = before != rng.host_states()
        model.renew()
        if not drawn:
            return False
    return True


def _forgets(model: StatelessModel, batch: Any, before: Snapshot) -> bool:
    """Whether an evaluation depends on values that an earlier one left in the model, such as weights that it merged."""
    if not before.sets:
        return False
    start = Snapshot(model.structure(0).eval())
    _results(model, batch, evaluate=True)
    if not Snapshot(model.structure(0)).changed(start):
        model.renew()
        return False
    late = _results(model, batch, evaluate=True, scale=0.9)
    model.renew()
    right = _results(model, batch, evaluate=True, scale=0.9)
    model.renew()
    return not _alike(late, right)


def _results(model: StatelessModel, batch: Any, evaluate: bool = False, scale: float = 1.0) -> Results:
    """Return all results of a pass of one node on a batch `[B, ...]`; None if it fails.

    Args:
        evaluate: evaluate the structure that trains, as training left it; renew it afterwards.
        scale: of the parameters.
    """
    params = {name: p.detach() * scale for name, p in model.params.items()}
    own = tree.map(torch.clone, model.buffers)
    with seeded(0, model.device, host=True):
        try:
            if evaluate:
                with torch.no_grad(), model.casting():
                    return list(model.measure({**params, **own}, batch, trained=True).values())
            leaves = {name: p.requires_grad_() for name, p in params.items()}
            loss, after, grads = model.gradient(leaves, own, batch)
            return [loss, *after.values(), *leaves.values(), *grads]
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever the model's code raises
            return None


def _alike(ours: Results, right: Results) -> bool:
    """Whether results are equal up to rounding; if there are no right ones, any are."""
    if ours is None or right is None:
        return right is None
    return len(ours) == len(right) and all(map(_close, ours, right))


def _close(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    if x.shape != y.shape or not y.is_floating_point():
        return x.shape == y.shape and torch.equal(x, y)
    allowed = torch.finfo(y.dtype).eps ** 0.5 * (y.abs().nan_to_num().amax().item() if y.numel() else 0.0)
    return torch.allclose(x, y, rtol=0, atol=allowed, equal_nan=True)


def _repeated(x: Tensor) -> Tensor:
    """Return a batch of the same shape that repeats its first example."""
    same = x[:1].expand(x.shape).clone() if x.dim() else x
    return same * 0.9 if x.is_floating_point() else same


def _any_layout(model: StatelessModel, batch: Any, facts: ModelFacts, expected: Local) -> bool:
    """Whether one node has the results `expected` with the channels last in memory; True if that order is not used.

    Its code may depend on strides: `view`, `as_strided`, `.numpy()`. Random numbers may come in another order.
    """
    if model.device.type != "cpu" or facts.convolution_flop <= MAX_CONVOLUTION_FLOP_IN_STACK:
        return True
    params = {name: p.detach().clone().requires_grad_() for name, p in model.params.items()}
    try:
        with seeded(0, model.device), ChannelsLast():
            actual = _local(model, *model.gradient(params, tree.map(torch.clone, model.buffers), batch))
        return facts.random or not difference(expected, actual, loosely=True)
    except Exception:  # whatever the model's code raises: it runs in the order in which its tensors come
        return False


def _local(model: StatelessModel, loss: Tensor, after: Tree, grads: Any) -> Local:
    """Return the results of one node in the form of stacked nodes."""
    used = {name: g for name, g in zip(model.params, grads) if g is not None}
    return Local(*tree.map_leaves(lambda x: x.detach()[None], (used, loss, after)))


def _slow_operations(
    model: StatelessModel, batch: Any, stacked: Backend, expected: Local | None, size: int, mean: bool
) -> tuple[str, ...]:
    """Run equal nodes at once; return the operations that torch warns it runs node by node.

    Parameters that the nodes share, for the gradient of the mean loss, are no batch to vmap: an operation that writes
    into a copy of them works only at each node's own.

    Raises:
        RuntimeError: if they differ from the `expected` results of a forward with transforms of torch.func.
    """
    batches = tree.map_leaves(lambda x: torch.stack([x] * size), batch)
    with warnings.catch_warnings(record=True) as caught, seeded(0, model.device):
        warnings.simplefilter("always")
        for shared in sorted({mean, mean and expected is None and not model.weighted}, reverse=True):
            local, _ = timed(stacked, first_part(model, batches, shared), shared)
    if expected is not None and (off := difference(expected, local, model.autocast)):
        raise RuntimeError(f"its use of torch.func has other results within vmap: {off}")
    messages = [str(w.message) for w in caught if "batching rule for " in str(w.message)]
    return tuple(dict.fromkeys(text.split("batching rule for ")[1].split(".")[0] for text in messages))


def _rng_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


class Observer(TorchFunctionMode):
    """Count the arithmetic of matrix products and convolutions, and find the largest tensor.

    Attributes:
        flop: floating-point operations of the observed calls.
        convolution_flop: the part of them in convolutions of images.
        largest_bytes: of the tensors that the calls returned.
        recomputes: whether the backward pass ran parts of the model again.
        transforms: whether the forward uses transforms of torch.func.
        unsafe: describes an operation that vmap would silently compute wrongly; "" if there is none.

    Args:
        watched: tensors for `written`.
    """

    def __init__(self, watched: Tree) -> None:
        super().__init__()
        self._names = {x.data_ptr(): name for name, x in watched.items() if x.numel()}
        # Each of them, and each `.data` of it, counts its changes in place.
        self._watched = [(name, x, x._version, x.data_ptr()) for name, x in watched.items()]
        self.flop = self.convolution_flop = self.largest_bytes = 0
        self.recomputes = self.transforms = False
        self.unsafe = ""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func == _DATA and (name := self._names.get(out.data_ptr())) is not None:
            self._watched.append((name, out, out._version, out.data_ptr()))
        if torch._C._current_graph_task_id() != -1:  # in the backward pass, in which an operation keeps no graph
            self.recomputes |= torch.is_grad_enabled()
            return out
        self.transforms |= _functorch.peek_interpreter_stack() is not None
        if isinstance(out, Tensor):
            self.largest_bytes = max(self.largest_bytes, out.numel() * out.element_size())
        if func is F.scaled_dot_product_attention:
            query, key = args[:2] if len(args) > 1 else (kwargs["query"], kwargs["key"])
            self.flop += 4 * query.numel() * key.shape[-2]
        elif func is F.embedding:
            bound = _EMBEDDING.bind(*args, **(kwargs or {})).arguments
            for option in ("max_norm", "scale_grad_by_freq"):
                if bound.get(option):
                    self.unsafe = f"its gradient of an embedding with {option} would be wrong"
        elif func is Tensor.register_hook:
            self.unsafe = "its forward puts a hook on a tensor's gradient (register_hook), which would be left out"
        elif isinstance(out, Tensor) and func in _PRODUCTS:
            flop = _PRODUCTS[func](out, [x for x in args if isinstance(x, Tensor)])
            self.flop += flop
            self.convolution_flop += flop if func is F.conv2d else 0
        return out

    def written(self) -> frozenset[str]:
        """Return which of the watched tensors were changed, in place or by replacing their `.data`."""
        return frozenset(name for name, x, version, at in self._watched if (x._version, x.data_ptr()) != (version, at))


def _contraction(out: Tensor, inputs: list[Tensor]) -> int:
    """Return 2 M N K of a product [M, K] x [K, N] -> [M, N], from the numbers of elements."""
    if len(inputs) < 2 or out.numel() == 0:
        return 0
    a, b = inputs[-2:]
    return round(2 * math.sqrt(out.numel() * a.numel() * b.numel()))


def _weighted(out: Tensor, inputs: list[Tensor]) -> int:
    """Count a product with one row of the weight `[out, ...]` for each output value."""
    return 2 * out.numel() * inputs[1][:1].numel() if len(inputs) > 1 and inputs[1].dim() > 0 else 0


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_EMBEDDING = inspect.signature(F.embedding)
_PRODUCTS: dict[Callable, Callable[[Tensor, list[Tensor]], int]] = {
    **dict.fromkeys([F.linear, F.conv1d, F.conv2d, F.conv3d], _weighted),
    **dict.fromkeys([torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum], _contraction),
    **dict.fromkeys([Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__], _contraction),
    **dict.fromkeys([F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d], _contraction),
}


# ------------------------------------------------------------------------------------------ how the nodes are computed


@dataclass(frozen=True)
class Plan:
    """A way to compute the nodes: `engine`, nodes per call, and threads over nodes.

    `engine`: "vmap" or "loop"; `Engine.prepare` puts "recorded" or "compiled" in place of "vmap".

    `channels_last`: the memory order of each node's images from its first convolution on; see `ChannelsLast`.

    >>> print(Plan("loop", node_threads=2, reason="asked for"))
    loop, 2 node threads (asked for)
    >>> with Plan("loop", channels_last=True).layout() as mode:
    ...     type(mode).__name__
    'ChannelsLast'
    """

    engine: str
    node_threads: int = 1
    chunk_size: int | None = None
    reason: str = ""
    channels_last: bool = False

    def chunks(self, num_nodes: int, num_threads: int) -> list[tuple[int, int]]:
        """Cut the nodes into equal parts, (first, after last): one for each thread, or more to respect `chunk_size`.

        >>> Plan("vmap", chunk_size=2).chunks(num_nodes=5, num_threads=1)
        [(0, 2), (2, 4), (4, 5)]
        """
        size = min(-(-num_nodes // num_threads), self.chunk_size or num_nodes)
        return [(a, min(a + size, num_nodes)) for a in range(0, num_nodes, size)]

    def layout(self) -> contextlib.AbstractContextManager:
        """Enter the memory order of tensors, in the computing thread."""
        return ChannelsLast() if self.channels_last else contextlib.nullcontext()

    def __str__(self) -> str:
        threads = f", {self.node_threads} node threads" if self.node_threads > 1 else ""
        chunk = f", chunks of {self.chunk_size}" if self.chunk_size else ""
        layout = ", channels last" if self.channels_last else ""
        return f"{self.engine}{threads}{chunk}{layout}" + (f" ({self.reason})" if self.reason else "")


def choose_plan(
    facts: ModelFacts, num_nodes: int, device: torch.device, num_threads: int, engine: str, mean: bool = False
) -> Plan:
    """Choose how to compute the nodes from facts about the model and the machine; nothing is measured.

    1. `loop` if vmap cannot run the model, or would run part of it node by node anyway; and on CPU if each node has
       much arithmetic (`MAX_FLOP_IN_STACK`), above all in convolutions (`MAX_CONVOLUTION_FLOP_IN_STACK`), whose
       channels are then last in memory. That does not speed up the gradient of the mean loss, `mean`.
    2. On CPU the nodes are spread over the threads if each gets enough arithmetic (`MIN_FLOP_PER_THREAD`), unless the
       model draws random numbers, whose order threads would mix up.
    3. On CPU `vmap` takes only as many nodes at a time as keep its tensors small (`MAX_TENSOR_BYTES`).

    >>> facts = ModelFacts(unused=frozenset(), mutated=frozenset(), random=False, flop=10**9)
    >>> print(choose_plan(facts, num_nodes=8, device=torch.device("cpu"), num_threads=2, engine="auto"))
    vmap, 2 node threads (all nodes in one call; 8 GFLOP a step are worth 2 node threads)
    """
    many_convolutions = facts.convolution_flop > MAX_CONVOLUTION_FLOP_IN_STACK and device.type == "cpu" and not mean
    if engine in BACKENDS:
        backend, reason = engine, "asked for"
    elif facts.vmap_error is not None:
        backend, reason = "loop", "vmap cannot run the model"
    elif facts.vmap_slow:
        backend, reason = "loop", f"vmap has no fast form of {', '.join(facts.vmap_slow)}"
    elif device.type == "cpu" and facts.flop > MAX_FLOP_IN_STACK:
        backend, reason = "loop", f"{facts.flop / 1e9:.2g} GFLOP a node and step"
    elif many_convolutions:
        backend, reason = "loop", f"{facts.convolution_flop / 1e9:.2g} GFLOP of convolutions a node and step"
    else:
        backend, reason = "vmap", "all nodes in one call"
    flop = facts.flop * num_nodes
    threads = min(num_threads, num_nodes)
    if one_thread(facts, device) or flop < MIN_FLOP_PER_THREAD * threads:
        threads = 1
    if threads > 1:
        reason += f"; {flop / 1e9:.2g} GFLOP a step are worth {threads} node threads"
    chunk_size = None
    if device.type == "cpu" and backend != "loop" and facts.largest_bytes * num_nodes > MAX_TENSOR_BYTES * threads:
        chunk_size = max(1, MAX_TENSOR_BYTES // facts.largest_bytes)
    last = many_convolutions and engine not in BACKENDS and facts.any_layout
    return Plan(backend, threads, chunk_size, reason, channels_last=last)


def stays_listed(facts: ModelFacts, num_nodes: int, device: torch.device, num_operations: int = 0) -> bool:
    """Whether a step has too little work for compiled code to be faster than a list of so many recorded operations.

    Like `choose_plan`, this depends on the model and K, and measures nothing.

    >>> facts, cpu = ModelFacts(unused=frozenset(), mutated=frozenset(), random=False, flop=10**5), torch.device("cpu")
    >>> [stays_listed(facts, K, cpu, num_operations=40) for K in (8, 1000)], stays_listed(facts, 8, cpu, 200)
    ([True, False], False)
    """
    little = facts.flop * num_nodes < MIN_FLOP_COMPILED and num_operations <= MAX_OPERATIONS_LISTED
    return device.type == "cpu" and little


def batches_at_once(plan: Plan, facts: ModelFacts | None, num_nodes: int, device: torch.device) -> int:
    """Choose how many batches of an evaluation of all nodes to compute in one call.

    Small models wait for Python, not for arithmetic. Like `choose_plan`, this depends only on the model and K: a
    validation loss has the same bits in every process and on every machine of a kind.

    >>> facts = ModelFacts(unused=frozenset(), mutated=frozenset(), random=False, flop=10**6, output_bytes=2**12)
    >>> [batches_at_once(Plan("vmap"), facts, K, torch.device("cpu")) for K in (1, 100, 10_000)]
    [1024, 10, 1]
    >>> batches_at_once(Plan("loop"), facts, 1, torch.device("cpu"))
    1
    """
    if facts is None or facts.random or not facts.at_once or plan.engine == "loop" or plan.chunk_size == 1:
        return 1
    most_flop, most_bytes = MAX_EVALUATION["cpu" if device.type == "cpu" else "other"]
    flop, largest = max(1, facts.flop / 3 * num_nodes), max(1, facts.output_bytes * num_nodes)  # of a forward pass
    return max(1, int(min(most_flop / flop, most_bytes / largest)))


def check_engine(name: str, value: Any) -> str:
    """Return `value` if it is "auto", or names a backend that is in `BACKENDS` now.

    >>> check_engine("engine", "lop")
    Traceback (most recent call last):
    ...
    ValueError: engine='lop' is not known; did you mean 'loop'? Allowed: 'auto', 'vmap', 'loop'.
    """
    return check.choice(name, value, ("auto", *BACKENDS))


def check_settings(engine: str, chunk_size: int | None, node_threads: int | None, compile: bool = False) -> None:
    """Raise a ValueError for invalid settings of the engine.

    >>> check_settings("vmap", chunk_size=0, node_threads=None)
    Traceback (most recent call last):
    ...
    ValueError: chunk_size=0 must be an integer >= 1, or None: None lets vecgym choose.
    """
    check_engine("engine", engine)
    for name, value in (("chunk_size", chunk_size), ("node_threads", node_threads)):
        check.optional_integer(name, value, what="None lets vecgym choose")
    if compile and engine not in ("auto", "vmap"):
        raise ValueError(f'compile=True compiles all nodes at once, and engine={engine!r} does not: use engine="auto".')
    if compile and node_threads is not None:
        raise ValueError(
            f"node_threads={node_threads} with compile=True: compiled code uses torch's own threads. "
            "Leave one of them out."
        )


def one_thread(facts: ModelFacts, device: torch.device) -> str:
    """Say why the nodes cannot be spread over threads; "" if they can.

    >>> one_thread(ModelFacts(frozenset(), frozenset(), random=True), torch.device("cpu"))
    'draws random numbers'
    """
    if device.type != "cpu":
        return f"runs on {device.type}"
    if facts.hooked:
        return "has hooks, which are called node after node"
    if facts.shared:
        return f"can write to {facts.shared}, which threads would share"
    return "draws random numbers" if facts.random or facts.may_draw else ""


_settled = False


def settle_threads() -> None:
    """On a busy machine, let the threads of torch's operations sleep while they wait for one another; warn once.

    `vecgym` sets this in the environment, which torch reads when it is loaded. If torch was loaded before, something
    else has the same effect: GNU's OpenMP stops spinning in a process with more threads than the machine has cores.
    Therefore as many idle threads are started here. No bit depends on how threads wait.
    """
    global _settled
    busy, cores = programs_running() - 1, os.cpu_count() or 1
    if _settled or torch.get_num_threads() == 1 or 2 * busy < cores:  # one thread waits for none
        return
    _settled = True
    if busy >= cores:
        warn(
            f"the machine is busy: {busy} other threads want its {cores} cores, and in every operation torch's "
            f"{torch.get_num_threads()} threads wait for the last of them. torch.set_num_threads(1) may be faster "
            "here; sums are then rounded in another order."
        )
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():  # see `vecgym/__init__.py`
        return
    before, started = torch.get_num_threads(), threading.Event()

    def start() -> None:
        torch.get_num_threads()  # see `_take_one_thread`
        torch.set_num_threads(cores + 1)
        torch.zeros((cores + 1) << 15, dtype=torch.uint8).add_(1)  # each thread gets a share
        started.set()
        threading.Event().wait()  # forever: a thread's threads end with it

    threading.Thread(target=start, name="vecgym-idle", daemon=True).start()
    started.wait()
    torch.set_num_threads(before)


def keep_memory() -> None:
    """Let glibc's allocator keep up to 64 MiB of freed memory on its heap, from one step to the next.

    It gives free memory back to the system from twice the size of the largest mapped block that was ever freed, up to
    32 MiB; the next step then faults in all its pages anew, which is 7 % of the time of a small GPT. Such a
    block is therefore freed here; none of its pages was touched.
    """
    torch.empty(MAX_TENSOR_BYTES, dtype=torch.uint8)


def programs_running() -> int:
    """Return how many threads of all programs run now and ran in the last minute; 0 if unknown."""
    try:
        average, *_, running, _ = Path("/proc/loadavg").read_text().split()
        return min(round(float(average)), int(running.split("/")[0]))
    except (OSError, ValueError):
        return 0


def start_threads(count: int) -> ThreadPoolExecutor | None:
    """Start the node threads; return None if the caller's thread is the only one.

    >>> start_threads(1) is None
    True
    """
    if count == 1:
        return None
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, "vecgym-node", initializer=_take_one_thread)
    list(pool.map(time.sleep, [0.01] * count))  # start every thread now
    torch.set_num_threads(before)  # set_num_threads in a thread changes the default for later threads too
    return pool


def _take_one_thread() -> None:
    """Let this thread's operations use one thread: nodes are spread over threads, not their operations."""
    torch.get_num_threads()  # a thread's first query sets its number, which would undo an earlier setting
    torch.set_num_threads(1)
