"""The backend `recorded`: the operations of `vmap` on all nodes, written down once and then called one after the other.

A small model's gradient spends most of its time in modules, function modes, vmap and autograd, not in arithmetic. In
the end, these call a list of operations. Calling that list does the same arithmetic, so every result has the same bits.

This is right only for a forward that does the same in every step. `Recorded` makes sure of it:

- `Watch` reads the forward's Python code, and before every pass compares the other values that the code reads;
- an operation that hands values of tensors to Python is refused, and one that depends on where they are in memory;
- a list is made twice, from different values, with the same result, and compared with `vmap` bit by bit.

Inputs of other shapes have another list. Without a list, `vmap` computes. A list is only made where it can earn its
cost: not in a run that is too short, nor for rare shapes, nor for a large model. Nothing is timed for that: the list
leaves out work of `vmap` and adds none, and on a busy machine a trial by time is a matter of chance.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd, _functorch
from torch.utils._python_dispatch import TorchDispatchMode

from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.engine.backend import Keys, NodeSlice, first_part, sizes_of
from vecgym.engine.constancy import Uncertain, Watch
from vecgym.engine.stateless import StatelessModel, plain_attention
from vecgym.engine.vmap import Vmap

MAX_LISTS = 16
MAX_SHAPES = 1024  # after so many, no list is made any more
MIN_PASSES = 50  # that earn the cost of a list: 35 to 100 with small models of all kinds, 4 to 512 nodes
# Of a node: between these a list saves 4 to 8 % of a pass, and is earned by four times as many; with more of them, the
# operations take nearly all the time.
FEW_PARAMETERS, MAX_PARAMETERS = 100_000, 200_000

_WATCHED = threading.RLock()  # the watched structures: each serves one node thread at a time


class Recorded(Vmap):
    """All nodes at once, by lists of operations. Evaluation and derivatives of gradients are those of `vmap`.

    Attributes:
        ended: describes the change since which `vmap` computes; "" before.
    """

    def __init__(self, model: StatelessModel) -> None:
        super().__init__(model)
        self.ended = ""
        self._refusal = "its batches hold something else than tensors, or a mode of torch is entered"
        self._lists: dict[Any, Operations | None] = {}
        self._passes: Counter[Any] = Counter()  # of each shape, until it has a list
        self._watch: Watch | None = None
        self._own = 1  # the structure for this backend alone: if a pass changes it, those of `vmap` are unchanged

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "ended": "the engine is a copy", "_lists": {}, "_passes": Counter(), "_watch": None}

    @plain_attention()
    def tried(self, batch: Any, mean: bool, num_passes: int | None, sizes: Collection[int], threads: int) -> str:
        """Write down the pass of a first step; return why that is not used, or "".

        Args:
            batch: of all nodes, leaves `[L, B, ...]`.
            mean: try the gradient of the mean loss instead of those of each node.
            num_passes: that there will be; None: unknown.
            sizes: the numbers of nodes in one call.
            threads: the node threads.
        """
        num_params = sum(p.numel() for p in self.model.params.values())
        least = MIN_PASSES if num_params <= FEW_PARAMETERS else 4 * MIN_PASSES
        if num_passes is not None and num_passes < least:
            return f"fewer than {least} steps"
        if num_params > MAX_PARAMETERS:
            return f"more than {MAX_PARAMETERS:,} parameters"
        if self.model.recomputes:
            return "its backward pass runs parts of it again"
        try:
            self._own, self._watch = threads, Watch(self.model.structure(threads))
        except Uncertain as error:
            return str(error)

        for size in sizes:
            part = first_part(self.model, tree.map_leaves(lambda x: x[:size], batch), mean)  # noqa: B023
            # with the strides that parameters have in a run
            part = part._replace(params=tree.map(torch.Tensor.contiguous, part.params))
            if self._list(part, sizes_of(batch)[0] * mean, self._inputs(part), MIN_PASSES) is None:
                return self.ended or self._refusal
        return ""

    @property
    def num_operations(self) -> int:
        """The number of operations in the longest list; 0 without any."""
        return max((len(operations) for operations in self._lists.values() if operations is not None), default=0)

    def _computed(self, part: NodeSlice, num_nodes: int, thread: int = 0) -> tuple[Tree, Tensor]:
        """Compute a pass by its list, if it has one."""
        if self.ended or self._watch is None:
            return super()._computed(part, num_nodes, thread)
        inputs = self._inputs(part)
        with _WATCHED:
            operations = self._list(part, num_nodes, inputs)
            if operations is None and not self.ended:
                return super()._computed(part, num_nodes, self._own)
            self.ended = self.ended or self._watch.changed()
        if operations is None or self.ended:
            return super()._computed(part, num_nodes, thread)
        try:
            *grads, losses = operations(inputs)
        except Exception:  # of the model, such as an index out of range: vmap raises it where the model does
            return super()._computed(part, num_nodes, thread)
        return dict(zip(operations.names, grads)), losses

    def _list(self, part: NodeSlice, num_nodes: int, inputs: list[Tensor], passes: int = 1) -> Operations | None:
        """Return the list of a pass; write it down if it is worth it, and there is room."""
        key = self._key(part, num_nodes, inputs)
        room = len(self._lists) < MAX_LISTS and len(self._passes) < MAX_SHAPES
        if key is not None and key not in self._lists and room:
            self._passes[key] += passes
            if self._passes[key] >= MIN_PASSES:
                self._lists[key] = self._written_down(part, num_nodes)
        return self._lists.get(key)

    def _inputs(self, part: NodeSlice) -> list[Tensor]:
        """Return all tensors that a pass reads, except the watched ones."""
        params, buffers, frozen = part.params.values(), part.buffers.values(), self.model.frozen.values()
        return [*params, *buffers, *frozen, *tree.leaves(part.batch)]

    def _key(self, part: NodeSlice, num_nodes: int, inputs: list[Tensor]) -> Any:
        """Return the key of a pass's list: sizes, shapes, strides, dtypes; None if it cannot have a list."""
        paths = [path if isinstance(x, Tensor) else None for path, x in tree.flatten(part.batch)]
        if None in paths or self._within_a_mode():
            return None
        shapes = [(type(x), x.shape, x.stride(), x.dtype) for x in inputs]
        return num_nodes, torch.get_default_dtype(), *shapes, *paths

    def _within_a_mode(self) -> bool:
        """Whether torch is in another mode than a plain training step."""
        modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
        inside = _functorch.peek_interpreter_stack() is not None or torch.is_autocast_enabled(self.model.device.type)
        return bool(modes or inside or not torch.is_grad_enabled())

    def usable(self) -> bool:
        """Whether lists may be called now: nothing that the forward reads has changed."""
        valid = not self.ended and self._watch is not None and not self._watch.changed()
        return valid and not self._within_a_mode()

    def _written_down(self, part: NodeSlice, num_nodes: int) -> Operations | None:
        """Write down a pass twice, and compare the list with `vmap`; None, with a reason noted, if it is wrong."""
        assert self._watch is not None
        seeded, lists = functools.partial(self.model.seeded, *part.keys.of(0)), []
        try:
            for changed in (_copied, _varied):
                some = changed(part)
                with seeded(), Recording(self._inputs(some)) as recording:
                    grads, losses = super()._computed(some, num_nodes, self._own)
                if change := self._watch.changed():
                    self.ended = f"{change} during a pass"
                    return None
                lists.append(recording.operations([*grads.values(), losses], tuple(grads)))
                del recording, some, grads, losses  # all tensors of the pass, before the next ones need memory
                ours, theirs = changed(part), changed(part)
                with seeded():
                    *actual, loss = lists[0](self._inputs(ours))
                with seeded():
                    grads, losses = super()._computed(theirs, num_nodes, self._own)
                expected = [*grads.values(), losses, *theirs.buffers.values()]
                if not all(map(_same_bits, expected, [*actual, loss, *ours.buffers.values()])):
                    raise Uncertain("the list of its operations computes something else")
            if lists[0] != lists[1]:
                raise Uncertain("its operations depend on values")
        except Exception as error:  # also of the model, whose own pass then raises it
            self._refusal = str(error) if isinstance(error, Uncertain) else f"{type(error).__name__} in a pass"
            return None
        return lists[0]


class Step(NamedTuple):
    """An operation: a function, the places of its arguments and its result, and the places that are free afterwards."""

    function: Callable[..., Any]
    reads: list[int]
    writes: int
    over: tuple[int, ...] = ()


class Operations:
    """A list of operations on numbered places, which hold the inputs first, and constants. Two may be equal.

    `names`: the parameters whose gradients are the first results.
    """

    def __init__(
        self, places: list[Any], steps: list[Step], results: list[int], text: list[Any], names: tuple[str, ...] = ()
    ) -> None:
        self._places, self._results, self._text = places, results, text
        self._steps = [(step.function, _taking(step.reads), step.writes, step.over) for step in steps]
        self.names = names

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        places = self._places.copy()
        places[: len(inputs)] = inputs
        with _AutoDispatchBelowAutograd():
            for function, take, writes, over in self._steps:
                places[writes] = function(*take(places))
                for i in over:  # so that its memory serves the next one
                    places[i] = None
        return list(map(places.__getitem__, self._results))

    def __len__(self) -> int:
        return len(self._steps)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Operations)
        return self._text == other._text and all(map(_same_value, self._places, other._places))


class Recording(TorchDispatchMode):
    """Write down the operations that are called while it is entered.

    Each tensor has a place. A view with the same geometry has the place of the tensor that it views.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._problem = ""
        self._places: list[Any] = [None] * len(inputs)
        self._place_of = {id(x): i for i, x in enumerate(inputs)}
        self._kept: list[Any] = list(inputs)  # so that no other tensor gets their ids
        self._steps: list[tuple[Step, bool]] = []  # and whether it does more than to return its result
        self._text: list[Any] = []  # the operations and their places, to compare

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, torch imports its compiler here, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            self._problem = f"it hands values of tensors to Python ({func})"
        if func._schema.name.startswith("aten::as_strided"):
            self._problem = f"its views depend on the place of a tensor in memory ({func})"
        with torch._C.DisableTorchFunction():
            function, out = _called(func, args, kwargs)
        self._kept.append((args, kwargs, out))
        if isinstance(out, Tensor) and _is_alias(func, args, out):
            self._place_of.setdefault(id(out), self._place(args[0]))
            return out
        reads = [self._place(x) for x in (*args, *kwargs.values())]
        self._text.append((func, tuple(kwargs), reads))
        acts = func._schema.is_mutable or not func._schema.returns or torch.Tag.nondeterministic_seeded in func.tags
        self._write(_with_names(function, list(kwargs)) if kwargs else function, reads, out, acts)
        return out

    def _write(self, function: Callable[..., Any], reads: list[int], out: Any, acts: bool = False) -> int:
        """Write down a call, and further ones that unpack its results; return the place of its result."""
        place = self._new(None)
        self._steps.append((Step(function, reads, place), acts))
        if isinstance(out, Tensor):  # a tensor that was changed in place has a place already
            self._place_of.setdefault(id(out), place)
        elif isinstance(out, (list, tuple)):
            for i, x in enumerate(out):
                self._write(operator.itemgetter(i), [place], x)
        return place

    def _place(self, value: Any) -> int:
        """Return the place of an argument; other values than tensors, and unknown tensors, are constants."""
        if isinstance(value, (list, tuple)) and tree.leaves(value):
            return self._write(lambda *values: list(values), [self._place(x) for x in value], None)
        if not isinstance(value, Tensor):
            return self._new(value)
        if id(value) not in self._place_of:
            self._place_of[id(value)] = self._new(value)
        return self._place_of[id(value)]

    def _new(self, value: Any) -> int:
        self._places.append(value)
        return len(self._places) - 1

    def operations(self, results: list[Tensor], names: tuple[str, ...] = ()) -> Operations:
        """Return the operations that were written down, without those that do not affect these results."""
        if self._problem or not all(id(x) in self._place_of for x in results):
            raise Uncertain(self._problem or "its gradients are computed elsewhere")
        of_results = [self._place_of[id(x)] for x in results]
        needed, steps = set(of_results), []
        for step, acts in reversed(self._steps):
            if acts or step.writes in needed:
                touched = {*step.reads, step.writes}
                over = [i for i in touched - needed if self._places[i] is None]
                steps.append(step._replace(over=tuple(over)))
                needed |= touched
        return Operations(self._places, steps[::-1], of_results, self._text, names)


class PreparedPass:
    """The gradients at parameters that stay where they are, by the lists of `Recorded`.

    It has the bits of `Engine.gradients`, and looks up once all that is the same in every step; see `Engine.prepared`.

    Args:
        params: `[num_nodes, *]`; with `mean` `[1, *]`.
        mean: compute the gradient of the nodes' mean loss, `[1, *]`.
    """

    def __init__(self, recorded: Recorded, params: Tree, num_nodes: int, mean: bool) -> None:
        self._recorded, self._params, self._num_nodes, self._mean = recorded, params, num_nodes, mean
        self._lists: dict[Any, Operations] = {}  # by the form of the batch

    def is_for(self, params: Tree) -> bool:
        """Whether these are the parameters for which this was prepared."""
        return len(params) == len(self._params) and all(map(operator.is_, params.values(), self._params.values()))

    def gradients(self, batch: Any) -> tuple[Tree, Tensor] | None:
        """Return gradients and losses; None: `Engine.gradients` must compute them."""
        if not self._recorded.usable():
            return None
        inside = batch.values() if type(batch) is dict else batch if isinstance(batch, (list, tuple)) else [batch]
        names = tuple(batch) if type(batch) is dict else type(batch)
        if not all(type(x) is Tensor for x in inside):
            return None
        form = (names, torch.get_default_dtype(), *[(x.shape, x.stride(), x.dtype) for x in inside])
        operations = self._lists.get(form) or self._found(form, batch)
        if operations is None:
            return None
        try:
            *grads, losses = operations([*self._params.values(), *self._recorded.model.frozen.values(), *inside])
        except Exception:  # of the model: `Engine.gradients` raises it where the model does
            return None
        return dict(zip(self._params, [g[None] for g in grads] if self._mean else grads)), losses

    def _found(self, form: Any, batch: Any) -> Operations | None:
        """Look up the list for a form of batch; it is made by `Engine.gradients`."""
        each = range(self._num_nodes)
        part = NodeSlice(self._params, {}, batch, Keys(each, each, each))
        key = self._recorded._key(part, self._num_nodes if self._mean else 0, self._recorded._inputs(part))
        operations = self._recorded._lists.get(key)
        if operations is not None and operations.names == tuple(self._params):  # a gradient for each
            self._lists[form] = operations
        return self._lists.get(form)


def _taking(reads: list[int]) -> Callable[[list[Any]], Any]:
    """Return a function that takes the values at these places."""
    some: Any = slice(reads[0], reads[0] + 1) if reads else slice(0)  # an index alone would give no sequence
    return operator.itemgetter(*reads) if len(reads) > 1 else operator.itemgetter(some)


def _with_names(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Return a function of positional arguments, the last of which are passed on by these names."""

    def call(*values: Any) -> Any:
        return function(*values[: -len(names)], **dict(zip(names, values[-len(names) :])))

    return call


def _called(func: Any, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any]:
    """Call an operation by torch's own Python function, if there is one: it takes half as long."""
    if func is torch.ops.aten.lift_fresh.default:  # of a constant, which later operations may write to
        return torch.clone, torch.clone(args[0])
    name = func._schema.name.removeprefix("aten::")
    for holder in (torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn):
        if (function := getattr(holder, name, None)) is not None:
            with contextlib.suppress(TypeError):
                return function, function(*args, **kwargs)
    return func._op, func(*args, **kwargs)


def _is_alias(func: Any, args: Any, out: Tensor) -> bool:
    """Whether an operation returns its first argument unchanged."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x is out or func._schema.is_mutable:
        return False
    return _geometry(x) == _geometry(out) and x.untyped_storage()._cdata == out.untyped_storage()._cdata


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.storage_offset()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    same = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    return same and torch.equal(a.detach().reshape(-1).view(torch.uint8), b.detach().reshape(-1).view(torch.uint8))


def _same_value(a: Any, b: Any) -> bool:
    return _same_bits(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else repr(a) == repr(b)


def _copied(part: NodeSlice) -> NodeSlice:
    """Copy the tensors that a pass may write to, with the same strides."""
    batch = tree.map_leaves(lambda x: _remade(x, torch.clone), part.batch)
    return part._replace(buffers=tree.map(lambda x: _remade(x, torch.clone), part.buffers), batch=batch)


def _varied(part: NodeSlice) -> NodeSlice:
    """Return other values: smaller parameters and buffers, and the batch's in another order."""

    def smaller(x: Tensor) -> Tensor:
        return _remade(x, lambda flat: flat * 0.9 if x.is_floating_point() else flat.clone())

    batch = tree.map_leaves(lambda x: _remade(x, lambda flat: flat.flip(0)), part.batch)
    return part._replace(params=tree.map(smaller, part.params), buffers=tree.map(smaller, part.buffers), batch=batch)


def _remade(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change the values of a tensor into new memory, with the same strides."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) if x.numel() else 0
    return change(x.as_strided((span,), (1,))).as_strided(x.shape, x.stride())
