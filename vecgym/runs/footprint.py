"""Count the bytes of tensors that a step holds at its peak, while few nodes take it.

Two parts of a step are taken for real and watched by `Live`, which sees every tensor that an operation gives and notes
when its storage is freed: the forward and backward pass of one, two and three nodes (`passing`), and the strategy's
steps on all nodes of a model cut down to a few million values in all (`exchanging`). What an operation allocates and
frees within itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.core.nodes import squared_consensus_distance
from vecgym.core.tree import Tree
from vecgym.engine import Engine, Local, Plan
from vecgym.engine.plan import MAX_FLOP_IN_STACK
from vecgym.engine.simulation import Simulation, State
from vecgym.strategy import Strategy
from vecgym.strategy.communication import innermost

FIRST_STEPS = 3  # of a strategy, to see what it stores once for all nodes
MAX_PROBE_ELEMENTS = 2**22  # of all nodes' parameters in these steps: 16 MB, more than the blocks that DeMo works in


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
        with _watched(engine, batch, n, mean) as (live, local):
            traces[n] = tuple(live.trace)
        strided = {name for name, g in local.grads.items() if not g.is_contiguous()}
        engine.release()
        del local
    return Passing(traces, frozenset(strided))


@contextmanager
def _watched(engine: Engine, batch: Any, num_nodes: int, mean: bool) -> Iterator[tuple[Live, Local]]:
    rows = 1 if mean else num_nodes
    params = {name: p.detach()[None].repeat(rows, *[1] * p.dim()) for name, p in engine.params.items()}
    buffers = {name: b[None].clone() for name, b in engine.buffers.items()}
    batch = tree.map_leaves(lambda x: x[None].repeat(num_nodes, *[1] * x.dim()), batch)
    with torch.enable_grad(), Live([params, buffers, batch, engine.frozen]) as live:
        local = engine.gradients(params, buffers, batch, seed=0, step=0, mean=mean)
    yield live, local


# ----------------------------------------------------------------------------------------- the strategy's steps


@dataclass(frozen=True)
class Exchanging:
    """What a strategy keeps and what it needs on the way, seen in its own steps.

    Attributes:
        state: of the cut-down model, after these steps.
        params: the cut-down parameters of one node, `[1, *]`.
        rows: gradients: those of all nodes, or that of their mean loss.
        temporary_bytes: the most that a step of the whole model makes on the way, besides gradients and state.
    """

    state: State
    params: Tree
    rows: int
    temporary_bytes: int


def exchanging(
    strategy: Strategy, params: Mapping[str, Tensor], num_nodes: int, max_steps: int, strided: frozenset[str]
) -> Exchanging:
    """Watch a strategy take steps on all nodes, of a model cut down to `MAX_PROBE_ELEMENTS` for all of them.

    If anything is cut, it is cut to two sizes, and bytes are extrapolated linearly from them. The gradients are noise:
    nothing is trained. The steps are the first ones, and those in which a module exchanges for the first time; in each
    the nodes' distance is taken before their exchange, as in a run that evaluates.
    """
    size = sum(p.numel() for p in params.values())
    share = min(1.0, MAX_PROBE_ELEMENTS / max(1, size * num_nodes))
    large = _probed(strategy, _cut(params, share), num_nodes, max_steps, strided)
    if share == 1.0:
        return large
    small = _probed(strategy, _cut(params, share / 2), num_nodes, max_steps, strided)
    sizes = [sum(p.numel() for p in found.params.values()) for found in (small, large)]
    slope = (large.temporary_bytes - small.temporary_bytes) / max(1, sizes[1] - sizes[0])
    return replace(large, temporary_bytes=round(large.temporary_bytes + max(0.0, slope) * (size - sizes[1])))


class _Noise:
    """Stands in for an engine: its gradients are noise, the same on every node, laid out as the model's are.

    Zeros would not do: codes that look for the largest values take other ways where many are equal.
    """

    written: frozenset[str] = frozenset()

    def __init__(self, params: Mapping[str, Tensor], strided: frozenset[str]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params, self.buffers, self._strided = params, dict[str, Tensor](), strided
        self._noise = {name: torch.randn(p.shape, generator=generator).to(p) for name, p in params.items()}
        self.rows = 1

    def gradients(self, params: Tree, buffers: Tree, batch: Any, *, mean: bool, **settings: Any) -> Local:
        num_nodes = len(batch)
        self.rows = 1 if mean else num_nodes
        grads = {name: self._gradient(name, self.rows) for name in params}
        return Local(grads, batch.new_zeros(num_nodes), buffers)

    def _gradient(self, name: str, rows: int) -> Tensor:
        noise, shape = self._noise[name], (rows, *self._noise[name].shape)
        if name in self._strided:  # the other way round in memory
            return noise.new_empty(shape[::-1]).permute(*reversed(range(len(shape)))).copy_(noise)
        return noise.new_empty(shape).copy_(noise)


def _probed(
    strategy: Strategy, params: Tree, num_nodes: int, max_steps: int, strided: frozenset[str]
) -> Exchanging:  # fmt: skip
    engine, batch = _Noise(params, strided), torch.zeros(num_nodes, 1)
    # Weights by examples, if the strategy asks for them, change no size.
    simulation = Simulation(
        nn.Module(), strategy, StackedCollectives(num_nodes), engine=cast(Engine, engine), max_steps=max_steps,
        num_examples=(1,) * num_nodes,
    )  # fmt: skip
    with torch.no_grad(), Live([params, batch]) as live:
        state = simulation.init()
        for step in _telling_steps(strategy, max_steps):
            state, _ = simulation.step(replace(state, step=step), batch, observe=_distance)
    gradients = engine.rows * tree.num_bytes(params)
    params = {name: p[None] for name, p in params.items()}
    return Exchanging(state, params, engine.rows, max(0, live.peak - live.now - gradients))


def _distance(params: Tree) -> None:
    """Take what a run takes at an evaluation: the distance of the nodes before their exchange, beside the gradients."""
    squared_consensus_distance(params)


def _telling_steps(strategy: Strategy, max_steps: int) -> list[int]:
    """Return the first steps of a run, and the first in which each module exchanges, as far as it says when."""
    steps = set(range(FIRST_STEPS))
    for module in map(innermost, strategy.communication_modules):
        when = getattr(module, "when", module)
        H = getattr(when, "H", getattr(module, "every", 1))
        if isinstance(H, int):
            steps |= {H - 1, H - 1 + int(getattr(module, "delay", 0) or 0)}
    return sorted(step for step in steps if 0 <= step < max_steps)


def state_bytes(state: Any, num_nodes: int, ratios: Mapping[str, float]) -> tuple[float, float]:
    """Return (shared, per node) bytes of modules' states on tiny parameters, scaled to the real ones."""
    shared = each = 0.0
    for path, x in tree.flatten(state):
        if isinstance(x, Tensor):
            name = next((key for kind, key in reversed(path) if kind is dict), "")
            size = x.numel() * x.element_size() * ratios.get(name, 1.0)
            if x.dim() > 0 and x.shape[0] == num_nodes > 1:
                each += size / num_nodes
            else:
                shared += size
    return shared, each


def widest(values: Any) -> int:
    """Return the largest number of rows."""
    return max((x.shape[0] for x in tree.leaves(values) if x.dim()), default=1)


def _cut(params: Mapping[str, Tensor], share: float) -> Tree:
    """Return ones in place of the parameters, of the same shapes or with their longest sides halved until they fit."""
    return {
        name: torch.ones(_halved(tuple(p.shape), share), dtype=p.dtype, device=p.device) for name, p in params.items()
    }


def _halved(shape: tuple[int, ...], share: float) -> tuple[int, ...]:
    """Halve the longest sides.

    >>> _halved((64, 3, 100), 0.2)
    (32, 3, 50)
    """
    sides, size = list(shape), share * torch.Size(shape).numel()
    while torch.Size(sides).numel() > max(1.0, 1.5 * size):
        longest = max(range(len(sides)), key=sides.__getitem__)
        sides[longest] = -(-sides[longest] // 2)
    return tuple(sides)
