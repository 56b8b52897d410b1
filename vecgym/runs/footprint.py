"""Count the bytes of tensors that a step holds at its peak.

`Live` sees every tensor that an operation gives, and notes when its storage is freed. It watches the forward and
backward pass of one, two or three nodes, which is taken for real (`passing`), and the strategy's steps on all nodes, of
tensors without values (`stepping`). What an operation allocates and frees within itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.core.nodes import squared_consensus_distance
from vecgym.core.tree import Tree
from vecgym.engine import Engine, Local, Plan
from vecgym.engine.plan import MAX_FLOP_IN_STACK
from vecgym.engine.simulation import Simulation, State
from vecgym.strategy import Context, Strategy
from vecgym.strategy.communication import innermost
from vecgym.strategy.when import When


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, until they are freed.

    Attributes:
        now, peak: bytes.
        trace: the bytes after each operation that has made a storage.

    >>> with Live() as live:
    ...     x = torch.ones(1000).exp()  # the ones are freed
    ...     y = x.view(10, 100)  # nothing new
    >>> live.now, live.peak
    (4000, 8000)
    """

    def __init__(self, known: object = ()) -> None:
        """`known`: nested tensors that were there before."""
        super().__init__()
        self.now = self.peak = 0
        self.trace: list[int] = []
        # By the address of the storage. The reference ends the entry, and so lives as long as it.
        self._alive: dict[int, object] = {x.untyped_storage()._cdata: None for x in tree.leaves(known)}
        self._known = known

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree.leaves(out):
            if x.layout == torch.strided:
                self._see(x.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        at, num_bytes = storage._cdata, storage.nbytes()
        if at in self._alive:
            return

        def freed(_: object) -> None:
            del self._alive[at]
            self.now -= num_bytes

        self._alive[at] = weakref.ref(storage, freed)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        self.trace.append(self.now)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._known = ()


# ----------------------------------------------------------------------------------------- the nodes' gradients


@dataclass(frozen=True)
class Passing:
    """The memory of a forward and backward pass of n nodes in one call, their gradients among it.

    `traces` has, for one or two numbers of nodes, the bytes after each operation. Each operation's grow linearly in n,
    and so which of them is the peak may depend on n.

    >>> Passing({2: (10, 8), 3: (11, 12)}).peak(2), Passing({2: (10, 8), 3: (11, 12)}).peak(10)
    (10, 40)
    """

    traces: Mapping[int, tuple[int, ...]]
    strided: frozenset[str] = frozenset()  # whose gradients are not contiguous: the optimizer copies them

    def peak(self, num_nodes: int) -> int:
        """Return the most bytes at a time."""
        (n, small), *larger = sorted(self.traces.items())
        if not larger:
            return max(small, default=0) * num_nodes // n
        [(m, large)] = larger
        if len(small) != len(large):  # operations that depend on the number of nodes
            small, large = (max(small),), (max(large),)
        return max((b + (b - a) * (num_nodes - m) // (m - n) for a, b in zip(small, large)), default=0)


def passing(engine: Engine, batch: Any, most: int, mean: bool) -> Passing:
    """Watch an engine that is prepared take the gradients of few nodes, each with the batch `[B, ...]`.

    Two and three nodes, since `vmap` of one may run other operations; one by the loop, and of a model with much
    arithmetic. Gradients are dropped.

    Args:
        most: the nodes in one call of the run; no more are taken.
        mean: whether the run needs the gradient of the mean loss only.
    """
    kind = "loop" if engine.plan.engine == "loop" else "vmap"  # compiled code is not watched
    large = engine.facts is not None and engine.facts.flop > MAX_FLOP_IN_STACK
    few = [1] if kind == "loop" or large else [min(most, n) for n in (2, 3)]
    engine.use(Plan(kind))
    traces: dict[int, tuple[int, ...]] = {}
    strided: set[str] = set()
    for n in dict.fromkeys(few):
        rows = 1 if mean else n
        params = {name: p.detach()[None].repeat(rows, *[1] * p.dim()) for name, p in engine.params.items()}
        buffers = {name: b[None].clone() for name, b in engine.buffers.items()}
        batches = tree.map_leaves(lambda x, n=n: x[None].repeat(n, *[1] * x.dim()), batch)
        with torch.enable_grad(), Live([params, buffers, batches, engine.frozen]) as live:
            local = engine.gradients(params, buffers, batches, seed=0, step=0, mean=mean)
        traces[n] = tuple(live.trace)
        strided = {name for name, g in local.grads.items() if not g.is_contiguous()}
        engine.release()
        del local
    return Passing(traces, frozenset(strided))


# ----------------------------------------------------------------------------------------- the strategy's steps


@dataclass(frozen=True)
class Stepping:
    """What a strategy keeps, and what it needs on the way.

    Attributes:
        state: after the steps, of tensors without values.
        rows: gradients: those of all nodes, or that of their mean loss.
        temporary_bytes: the most that a step makes on the way, besides gradients and state.
        complete: whether the steps were taken; else `temporary_bytes` is 0.
    """

    state: State
    rows: int
    temporary_bytes: int
    complete: bool = True


def stepping(
    strategy: Strategy, shapes: Mapping[str, Tensor], num_nodes: int, max_steps: int,
    strided: frozenset[str] = frozenset(), lasting: bool = False,
) -> Stepping:  # fmt: skip
    """Watch a strategy take steps on all nodes, with tensors that have shapes and no values.

    The steps are the first two, and the first in which each module exchanges, or what was late arrives. In each the
    nodes' distance is taken before their exchange, as in a run that evaluates.

    Args:
        shapes: the parameters of one node, `[*]`, with values or without.
        strided: the parameters whose gradients are not contiguous, which the optimizer copies.
        lasting: whether the engine keeps the storage of the gradients from step to step, as it does where it takes the
            nodes in parts.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> seen = stepping(DiLoCoStrategy("sgd", H=500), {"w": torch.empty(10**9, device="meta")}, 8, max_steps=1000)
    >>> seen.state.params["w"].shape, seen.state.strategy["0"]["params"]["w"].nbytes, seen.temporary_bytes > 0
    (torch.Size([8, 1000000000]), 4000000000, True)
    """
    with FakeTensorMode(allow_non_fake_inputs=True):  # on the CPU, so that its ways are taken
        params = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in shapes.items()}
        batch = torch.empty(num_nodes, 1)
    engine = _Shapes(params, strided, lasting)
    # Weights by examples, if the strategy asks for them, change no size.
    simulation = Simulation(
        nn.Module(), strategy, StackedCollectives(num_nodes), engine=cast(Engine, engine), max_steps=max_steps,
        num_examples=(1,) * num_nodes,
    )  # fmt: skip
    with torch.no_grad(), _WithoutValues([params, batch]) as live:
        state = simulation.init()
        try:
            for step in _telling_steps(strategy, num_nodes, max_steps):
                state, _ = simulation.step(replace(state, step=step), batch, observe=_distance)
        except Exception:  # whatever a strategy does with tensors that have no values
            wide = {name: p[None].repeat(num_nodes, *[1] * p.dim()) for name, p in params.items()}
            kept = replace(simulation.init(), params=wide, optimizer=strategy.inner_optim.rule().init(wide))
            return Stepping(kept, num_nodes, 0, complete=False)
    gradients = 0 if lasting else engine.rows * tree.num_bytes(params)  # those that last are still there
    return Stepping(state, engine.rows, max(0, live.peak - live.now - gradients))


class _WithoutValues(Live):
    """Watches tensors without values: numbers asked for are 0; fused kernels, which make nothing, are left out."""

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.startswith("_fused_"):
            return None
        if name.startswith("_local_scalar_dense") and args[0].untyped_storage().device.type == "meta":
            return args[0].dtype.is_floating_point and 0.0
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Shapes:
    """Stands in for an engine: its gradients have no values, and are laid out as the model's are."""

    written: frozenset[str] = frozenset()

    def __init__(self, params: Tree, strided: frozenset[str], lasting: bool) -> None:
        self.params, self.buffers, self.rows = params, Tree(), 1
        self._strided, self._lasting = strided, lasting
        self._grads = Tree()

    def gradients(self, params: Tree, buffers: Tree, batch: Any, *, mean: bool, **settings: Any) -> Local:
        self.rows = 1 if mean else len(batch)
        grads = self._grads or {name: self._gradient(name) for name in params}
        self._grads = grads if self._lasting else self._grads
        return Local(dict(grads), batch.new_zeros(len(batch)), buffers)

    def _gradient(self, name: str) -> Tensor:
        shape = (self.rows, *self.params[name].shape)
        if name in self._strided:  # the other way round in memory
            return self.params[name].new_empty(shape[::-1]).permute(*reversed(range(len(shape))))
        return self.params[name].new_empty(shape)


def _distance(params: Tree) -> None:
    """Take what a run takes at an evaluation: the distance of the nodes before their exchange, beside the gradients."""
    squared_consensus_distance(params)


def _telling_steps(strategy: Strategy, num_nodes: int, max_steps: int) -> list[int]:
    """Return the steps to watch; see `stepping`."""

    def first(due: Callable[[int], bool]) -> int:
        return next((step for step in range(max_steps) if due(step)), 0)

    ctx = Context(StackedCollectives(num_nodes), max_steps=max_steps)
    steps = {0, 1, first(lambda step: not strategy.idle(ctx.replace(step=step)))}
    for module in map(innermost, strategy.communication_modules):
        if isinstance(when := getattr(module, "when", None), When):
            steps |= {at := first(when.due), at + int(getattr(module, "delay", 0) or 0)}
    return sorted(step for step in steps if step < max_steps)
