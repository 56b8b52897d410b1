"""Observe a forward and backward pass of one node before training: what the model uses and does."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.engine import hooks
from vecgym.engine.backend import Backend, Keys, NodeSlice
from vecgym.engine.contract import cause, check_influence, check_written, first_call, vmap_error
from vecgym.engine.stateless import StatelessModel, clones, seeded


@dataclass(frozen=True)
class ModelFacts:
    """What one forward and backward pass of one node shows about the model.

    >>> facts = ModelFacts(unused=frozenset(), mutated=frozenset(), random=True, flop=1000)  # a model with dropout
    >>> facts.random, facts.vmap_error is None
    (True, True)
    """

    unused: frozenset[str]  # parameters that get no gradient: as in torch, they are never updated
    mutated: frozenset[str]  # buffers that a training step changes
    random: bool  # draws random numbers (dropout)
    written: frozenset[str] = frozenset()  # parameters that its forward changes under torch.no_grad()
    hooked: bool = False  # has hooks on its gradients
    flop: int = 0  # floating-point operations of one node's forward and backward pass
    convolution_flop: int = 0  # those in convolutions of images
    largest_bytes: int = 0  # of one node's tensors: parameters and outputs of operations
    output_bytes: int = 0  # the largest output of an operation
    at_once: bool = True  # whether several batches can be evaluated in one call; False after a failed try
    vmap_error: Exception | None = None
    vmap_slow: tuple[str, ...] = ()  # operations that vmap runs node by node, serially


def examine(model: StatelessModel, batch: Any, stacked: Backend | None, required: bool = False) -> ModelFacts:
    """Run one node forward and backward on a batch `[B, ...]`: check what the model returns, and record what it does.

    Args:
        stacked: also try whether this backend can run two nodes; the model then learns its facts.
        required: raise the error of that try, instead of recording it.
    """
    hooked = hooks.on_gradients(model.model)
    # Copies, since a forward pass may write to them.
    params = {name: p.detach().clone().requires_grad_() for name, p in model.params.items()}
    observer = Observer({**params, **model.frozen})
    with seeded(0, model.device), observer, first_call(model.model, batch):
        facts = _facts(model, params, batch)
    largest = max(observer.largest_bytes, *(p.numel() * p.element_size() for p in model.params.values()))
    model.recomputes = observer.recomputes
    # A backward pass costs about two forward passes.
    written = observer.written()
    check_influence(facts.unused, params)
    check_written(written - params.keys() | written & facts.unused)
    facts = replace(
        facts, written=written, hooked=bool(hooked), flop=3 * observer.flop,
        convolution_flop=3 * observer.convolution_flop, largest_bytes=largest, output_bytes=observer.largest_bytes,
    )  # fmt: skip
    if stacked is None:
        return facts
    writes = f"its forward writes to its parameter {min(written)!r}" if written else ""
    if unsafe := observer.unsafe or writes or (hooked and f"{hooked}, which sees one node at a time"):
        return replace(facts, vmap_error=vmap_error(unsafe))
    model.learn(facts.random, facts.mutated)
    try:
        return replace(facts, vmap_slow=_slow_operations(model, batch, stacked, facts.unused))
    except Exception as error:  # whatever the model's code raises: the loop can run it
        refusal = vmap_error(cause(error))
        if required:
            raise refusal from error
        return replace(facts, vmap_error=refusal)


def _facts(model: StatelessModel, params: Tree, batch: Any) -> ModelFacts:
    before, own = clones(model.buffers), clones(model.buffers)
    states = torch.get_rng_state(), _device_rng_state(model.device)
    _, after, grads = model.gradient(params, own, batch)
    random = not (_same(states[0], torch.get_rng_state()) and _same(states[1], _device_rng_state(model.device)))
    return ModelFacts(
        unused=frozenset(name for name, g in zip(params, grads) if g is None),
        # Even by writing the same value, such as the running mean of something that has not moved yet.
        mutated=frozenset(
            n for n, b in after.items() if n not in before or b is not own[n] or b._version or not _same(b, before[n])
        ),
        random=random,
    )


def _slow_operations(model: StatelessModel, batch: Any, stacked: Backend, unused: frozenset[str]) -> tuple[str, ...]:
    """Run two equal nodes at once; return the operations that torch warns it runs node by node."""

    def twice(x: Tensor) -> Tensor:
        return torch.stack([x, x])

    params: Tree = {name: twice(p) for name, p in model.params.items() if name not in unused}
    buffers = {name: twice(b) if model.changes(name) else b[None] for name, b in model.buffers.items()}
    part = NodeSlice(params, buffers, tree.map_leaves(twice, batch), Keys([0, 0], 0, [0, 1]))
    with warnings.catch_warnings(record=True) as caught, seeded(0, model.device):
        warnings.simplefilter("always")
        stacked.gradients(part, lambda: tree.map(torch.empty_like, params))
    messages = [str(w.message) for w in caught if "batching rule for " in str(w.message)]
    return tuple(dict.fromkeys(text.split("batching rule for ")[1].split(".")[0] for text in messages))


def _device_rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


class Observer(TorchFunctionMode):
    """Count the arithmetic of matrix products and convolutions, and find the largest tensor.

    Attributes:
        flop: floating-point operations of the observed calls.
        convolution_flop: those in convolutions of images.
        largest_bytes: of the tensors that the calls returned.
        recomputes: whether the backward pass ran parts of the model again.
        unsafe: what vmap would silently do wrong; empty if nothing.

    Args:
        watched: tensors for `written`.
    """

    def __init__(self, watched: Tree) -> None:
        super().__init__()
        self._names = {x.data_ptr(): name for name, x in watched.items() if x.numel()}
        # Each of them, and each `.data` of it, counts its changes in place.
        self._watched = [(name, x, x._version, x.data_ptr()) for name, x in watched.items()]
        self.flop = self.convolution_flop = 0
        self.largest_bytes = 0
        self.recomputes = False
        self.unsafe = ""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func == _DATA and (name := self._names.get(out.data_ptr())) is not None:
            self._watched.append((name, out, out._version, out.data_ptr()))
        if torch._C._current_graph_task_id() != -1:  # in the backward pass, in which an operation keeps no graph
            self.recomputes |= torch.is_grad_enabled()
            return out
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
