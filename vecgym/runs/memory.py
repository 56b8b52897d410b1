"""Estimate the memory of a run before it begins, and look up a device's memory.

The estimate counts the bytes of tensors that a step holds at its peak. `Live` tracks every tensor that an operation
returns, until its storage is freed. It watches a real forward and backward pass of one, two or three nodes (`passing`),
and the strategy's steps on all nodes, with tensors that have no values (`stepping`). What an operation allocates and
frees internally is not counted. Python, torch's own code (300 MB and more on a CPU), and the reserves of an allocator
are ignored; `benchmarks/memory.py` measures the error.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import readable_bytes
from vecgym.core import tree
from vecgym.core.check import function_of
from vecgym.core.nodes import squared_consensus_distance
from vecgym.core.tree import Tree
from vecgym.data import Batches
from vecgym.engine import Engine, EngineName, Local, Plan, choose_plan
from vecgym.engine.contract import check_model
from vecgym.engine.plan import MAX_FLOP_IN_STACK, check_engine
from vecgym.records.rows import aligned
from vecgym.runs.options import Chosen, Count, FitOptions, Flag, Modelled, OptionalCount, check_parts, check_strategy
from vecgym.simulation import Event, Simulation, State
from vecgym.simulation.simulation import Draft
from vecgym.strategy import Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.per_rank import as_strategy
from vecgym.strategy.simulated import simulation_of

__all__ = ["MemoryEstimate", "MemoryPart", "estimate_memory"]


@dataclass(frozen=True)
class MemoryPart:
    """The memory of one kind of tensor: `per_node_bytes` for each of `nodes`, and `shared_bytes` once.

    >>> MemoryPart(per_node_bytes=100, shared_bytes=50, nodes=8).total_bytes
    850
    """

    per_node_bytes: int = 0
    shared_bytes: int = 0
    nodes: int = 1

    @property
    def total_bytes(self) -> int:
        """The sum over nodes, and what is shared."""
        return self.per_node_bytes * self.nodes + self.shared_bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """The result of `estimate_memory`; its `str` is a table.

    Attributes:
        parts: "parameters", "gradients", "optimizer", "strategy", "batch", "activations", "exchange": see
            `estimate_memory`.
        num_nodes: K.
        device: where the run would be.
        notes: what could not be counted.

    >>> parts = {"parameters": MemoryPart(40, nodes=2), "exchange": MemoryPart(40, 40, 2)}
    >>> estimate = MemoryEstimate(parts, num_nodes=2)
    >>> estimate.total_bytes, str(estimate).splitlines()[1].split()
    (200, ['parameters', '40', 'B', '2', '-', '80', 'B'])
    """

    parts: dict[str, MemoryPart]
    num_nodes: int
    device: str = "cpu"
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The peak: activations and exchange never exist at the same time."""
        apart = ("activations", "exchange")
        lasting = sum(part.total_bytes for name, part in self.parts.items() if name not in apart)
        return lasting + max((self.parts[name].total_bytes for name in apart if name in self.parts), default=0)

    def __str__(self) -> str:
        rows = [["", "per node", "nodes", "shared", "all"]]
        for name, part in self.parts.items():
            per_node = [readable_bytes(part.per_node_bytes), str(part.nodes)] if part.per_node_bytes else ["-", "-"]
            shared = readable_bytes(part.shared_bytes) if part.shared_bytes else "-"
            rows.append([name, *per_node, shared, readable_bytes(part.total_bytes)])
        rows.append(["total (estimate)", "", "", "", readable_bytes(self.total_bytes)])
        return "\n".join([*aligned(rows), *(f"({note})" for note in self.notes)])


def _device(name: str, device: torch.device | str) -> torch.device:
    """Return a device, present or not."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f'{name}={device!r} is not a device, such as "cpu" or "cuda".') from None


@dataclass(frozen=True)
class MemoryOptions(Modelled):
    """The arguments of `estimate_memory`.

    Args:
        model, strategy, num_nodes, batch_size, minibatch_size, chunk_size, engine, autocast: as for `Trainer.fit`.
        data: a dataset, also a list of examples; or a tuple, list or dict of tensors as the model takes them: one
            node's batch, `[B, ...]`.
            None: the table has no batch and no activations.
        max_steps: of the run; some strategies depend on it.
        device: where it would run, present or not: the engine's plan depends on it.
    """

    model: nn.Module
    strategy: Strategy
    num_nodes: Count
    batch_size: Count = 16
    data: Any = None
    _: KW_ONLY
    minibatch_size: OptionalCount = None
    chunk_size: Chosen = None
    engine: Annotated[EngineName, check_engine] = "auto"
    autocast: Flag = False
    max_steps: Count = 1000
    device: Annotated[torch.device | str, _device] = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_model(self.model)
        check_strategy(self.strategy, self.num_nodes)
        check_synchronous(self.strategy)
        check_parts(self.batch_size, self.minibatch_size)


@function_of(MemoryOptions)
def estimate_memory(options: MemoryOptions) -> MemoryEstimate:
    """Estimate the memory of `Trainer.fit`, as a table; nothing is trained, and K nodes are never computed.

    parameters: 1 or K copies, and one of those that are not trained; gradients: 1 or K, those of the nodes' mean loss
    or of each; optimizer: its state; strategy: its modules' states (outer parameters, residuals ...); buffers; batch:
    the examples of a step; activations: the peak of a forward and backward pass of the nodes computed at a time, of
    `minibatch_size` examples each, beyond the gradients; exchange: the most that anything else in a step allocates
    temporarily.

    Activations are measured with one node, or with two and three, counting every tensor that is made or freed, and
    extrapolated linearly to the nodes computed at a time. The rest is what the strategy's own steps on all K nodes
    hold, with tensors that have shapes and no values: the first steps, and those in which it first exchanges. What an
    operation allocates and frees internally is not counted, nor what depends on values.

    If a few nodes do not fit into this machine's memory, or the model is on the device "meta", there is no pass: batch
    and activations are missing, and the table says so.

    Args:
        {arguments}

    Raises:
        ValueError, TypeError: for what `Trainer.fit` refuses.
        RuntimeError: if the model fails on the data; the message includes its error.

    >>> from vecgym.models import Classifier
    >>> from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy
    >>> model = Classifier(nn.Linear(1000, 10))
    >>> batch = torch.zeros(16, 1000), torch.zeros(16, dtype=torch.long)
    >>> diloco = estimate_memory(model, DiLoCoStrategy("adamw", H=10), 8, 16, batch)
    >>> P = 4 * (1000 * 10 + 10)
    >>> diloco.parts["parameters"] == MemoryPart(P, nodes=8), diloco.parts["strategy"].shared_bytes >= 2 * P
    (True, True)
    >>> estimate_memory(model, AllReduceStrategy("adamw"), 8).parts["optimizer"].total_bytes // P
    2
    """
    num_nodes, device, fits = options.num_nodes, torch.device(options.device), _fits(options.model)
    model = copy.deepcopy(options.model).cpu() if fits else options.model
    one = Engine(model, engine=options.engine, autocast=options.autocast)
    batch = _batch_of_one(options) if options.data is not None and fits else None
    estimator = Estimator(one, options.strategy, num_nodes, options.max_steps, batch, options.minibatch_size)
    plan = Plan("vmap")
    if one.facts is not None:
        mean = estimator.strategy.mean_gradient
        plan = choose_plan(one.facts, num_nodes, device, torch.get_num_threads(), options.engine, mean)
    if options.chunk_size is not None:
        plan = replace(plan, chunk_size=options.chunk_size)
    parts = estimator.parts(plan, options.minibatch_size)
    notes = ["a node does not fit here: no batch and no activations"] if not fits else []
    notes += ["without data: no batch and no activations"] if fits and batch is None else []
    notes += [] if estimator.complete else ["the strategy depends on values: its steps, exchanges too, are not counted"]
    return MemoryEstimate(parts, num_nodes, str(device), tuple(notes))


def _fits(model: nn.Module) -> bool:
    """Whether a few nodes, their gradients and a copy of the model fit into this machine's free memory."""
    params = list(model.parameters())
    few_nodes = 8 * sum(p.nbytes for p in params)
    return not any(p.is_meta for p in params) and few_nodes <= 2 * available_bytes(torch.device("cpu"))


def _examples(batch: Any, minibatch_size: int | None) -> Any:
    """Return the part of one node's batch, `[B, ...]`, that is computed at a time."""
    return batch if minibatch_size is None else tree.map_leaves(lambda x: x[:minibatch_size], batch)


class Estimator:
    """The table for one model, strategy and batch, for any way to cut its steps.

    Args:
        engine: of a copy of the model on the CPU, prepared here if there is a batch; its plan changes.
        num_nodes: K.
        batch: of one node, `[B, ...]`; None: without batch and activations.
        minibatch_size: the examples to prepare the engine with; None: all.
        num_local: the nodes in this process; None: K.
    """

    def __init__(
        self, engine: Engine, strategy: Strategy, num_nodes: int, max_steps: int, batch: Any,
        minibatch_size: int | None, num_local: int | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.batch = engine, batch
        self.strategy = as_strategy(strategy, engine.model)
        if batch is not None:
            of_one = tree.map_leaves(lambda x: x[None], _examples(batch, minibatch_size))
            with torch.enable_grad():
                engine.prepare(of_one, mean=self.strategy.mean_gradient, num_passes=0)
        self.num_nodes, self.max_steps = num_nodes, max_steps
        self.num_local = num_nodes if num_local is None else num_local
        self.P, self.frozen_bytes = tree.num_bytes(engine.params), tree.num_bytes(engine.frozen)
        self.complete = True  # whether the strategy's steps could be taken
        self._passed: dict[tuple[Any, ...], Passing] = {}  # not functools.cache, which would keep the model alive
        self._lasting: dict[tuple[Any, ...], tuple[dict[str, MemoryPart], bool]] = {}

    def parts(self, plan: Plan, minibatch_size: int | None) -> dict[str, MemoryPart]:
        """Return the rows of the table."""
        nodes, cut = self.num_local, minibatch_size is not None
        at_a_time = nodes_at_a_time(plan, nodes)
        in_parts = plan.engine == "loop" or at_a_time < nodes
        most = at_a_time // plan.node_threads  # in one call
        sample = None if self.batch is None else self._pass(plan.engine, min(most, 3), minibatch_size)
        layout = frozenset() if sample is None or in_parts else sample.strided, in_parts
        if layout not in self._lasting:
            self._lasting[layout] = self._stepping(*layout)
        parts, mean = self._lasting[layout]
        # Parts of the nodes write into storage that lasts; parts of the batch are added up beside it.
        whole = self.P if mean else self.P * nodes
        gradients = MemoryPart(0, whole) if mean else MemoryPart((2 if cut and in_parts else 1) * self.P, 0, nodes)
        # Weights of parts are known afterwards, so that each node's gradient is added up by itself.
        summed = self.P * at_a_time if mean and self.engine.weighted else whole
        adding = max(0, 4 * summed - gradients.total_bytes) if cut else 0  # two terms, one weighted, and the sum
        exchange = max(parts["exchange"], MemoryPart(0, adding), key=lambda part: part.total_bytes)
        buffers = MemoryPart(tree.num_bytes(self.engine.buffers), nodes=nodes)
        kept = replace(parts["parameters"], shared_bytes=parts["parameters"].shared_bytes + self.frozen_bytes)
        table = {"parameters": kept, "gradients": gradients, "optimizer": parts["optimizer"],
                 "strategy": parts["strategy"], "buffers": buffers}  # fmt: skip
        if sample is not None:
            peak = plan.node_threads * sample.peak(most) + whole * (in_parts + cut)
            peak -= plan.node_threads * self.P if plan.engine == "loop" and not mean else 0
            table["batch"] = MemoryPart(tree.num_bytes(self.batch), nodes=nodes)
            table["activations"] = MemoryPart(*divmod(max(0, peak - gradients.total_bytes), at_a_time), at_a_time)
        return {**table, "exchange": exchange}

    def _pass(self, *key: Any) -> Passing:
        if key not in self._passed:
            engine, most, minibatch_size = key
            self.engine.use(Plan("loop" if engine == "loop" else "vmap"))  # compiled code is not watched
            apart = self.engine.weighted and minibatch_size is not None
            mean = self.strategy.mean_gradient and self.num_local == self.num_nodes and not apart
            self._passed[key] = passing(self.engine, _examples(self.batch, minibatch_size), most, mean)
        return self._passed[key]

    def _stepping(self, strided: frozenset[str], in_parts: bool) -> tuple[dict[str, MemoryPart], bool]:
        """Return what lasts from step to step and what an exchange takes; and whether gradients are of the mean."""
        K, P, mean = self.num_nodes, self.P, False
        if not self.strategy.pure:  # a copy of everything for each node
            rule, one = self.strategy.inner_optim.rule(), {n: p.detach()[None] for n, p in self.engine.params.items()}
            parts = {"parameters": MemoryPart(P), "optimizer": MemoryPart(tree.num_bytes(rule.init(one)))}
            parts |= {"strategy": MemoryPart(), "exchange": MemoryPart(P, P)}
        else:
            steps = stepping(self.strategy, self.engine.params, K, self.max_steps, strided, in_parts)
            self.complete, mean = steps.complete, steps.rows == 1 < K
            state = steps.state
            parts = {"parameters": part_of(state, {"params"}), "optimizer": part_of(state, {"optimizer"})}
            others = {*state.own, *state.shared} - {"params", "optimizer", "buffers"}
            parts["strategy"] = part_of(state, others)
            # Whole copies of all nodes' parameters count for each node; the rest counts once.
            copies = steps.temporary_bytes // max(1, K * P)
            parts["exchange"] = MemoryPart(copies * P, steps.temporary_bytes - copies * K * P)
        return {name: replace(part, nodes=self.num_local) for name, part in parts.items()}, mean


def part_of(state: State, chosen: Collection[str]) -> MemoryPart:
    """Return the memory of what nodes have of their own and of what they share, of the names that are chosen.

    >>> state = State(0, own={"params": {"w": torch.ones(4, 2)}}, shared={"outer": {"w": torch.ones(1, 2)}})
    >>> part_of(state, {"params", "outer"})
    MemoryPart(per_node_bytes=8, shared_bytes=8, nodes=4)
    """
    own, shared = ({name: x for name, x in held.items() if name in chosen} for held in (state.own, state.shared))
    rows = max((len(x) for x in tree.leaves(state.own)), default=1)
    return MemoryPart(tree.num_bytes(own) // rows, tree.num_bytes(shared), rows)


def nodes_at_a_time(plan: Plan, num_nodes: int) -> int:
    """Return how many nodes are computed at the same time.

    >>> nodes_at_a_time(Plan("vmap", chunk_size=3), 8), nodes_at_a_time(Plan("loop", node_threads=2), 8)
    (3, 2)
    """
    per_thread = 1 if plan.engine == "loop" else max(b - a for a, b in plan.chunks(num_nodes, plan.node_threads))
    return min(num_nodes, per_thread * plan.node_threads)


def _batch_of_one(options: MemoryOptions) -> Any:
    """Return one node's batch, `[B, ...]`, of a dataset; or `data` if it is a batch."""
    data = options.data
    of_examples = isinstance(data, list) and data and not any(isinstance(x, Tensor) for x in data)
    if isinstance(data, (tuple, list, Mapping)) and not of_examples:
        if not tree.leaves(data):
            raise ValueError("data holds no tensor: give one node's batch [B, ...], as the model takes it.")
        return data
    batches = Batches(data, options.num_nodes, options.batch_size, shuffle=False, node_ids=[0], name="data")
    return tree.map_leaves(lambda x: x[0], batches.batch(0))


# ------------------------------------------------------------------------------------- a device's memory


def memory_limit(device: torch.device) -> int:
    """Return the memory of a device; on a CPU, what this process may use, even in a container.

    >>> memory_limit(torch.device("cpu")) > 2**28
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    total = _memory("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max", if there is no limit
            total = min(total, int(Path(file).read_text()))
    return total


def available_bytes(device: torch.device) -> int:
    """Return half of the free memory: what a sweep may use by default."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return _memory("SC_AVPHYS_PAGES") // 2


def _memory(pages: str) -> int:
    """Return the bytes of `pages`, as the operating system counts them; 8 GiB if it does not."""
    try:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not Linux
        return 8 * 2**30


# ------------------------------------------------------------------------------------------------- counting bytes


class Live(TorchDispatchMode):
    """Count the bytes of the storages that operations make, until they are freed.

    Attributes:
        now, peak: bytes.
        trace: the bytes after each operation that made a storage.

    >>> with Live() as live:
    ...     x = torch.ones(1000).exp()  # the ones are freed
    ...     y = x.view(10, 100)  # nothing new
    >>> live.now, live.peak
    (4000, 8000)
    """

    def __init__(self, ignored: object = ()) -> None:
        """Ignore the storages of `ignored`, nested tensors that exist already, and for as long as this watches."""
        super().__init__()
        self.now = self.peak = 0
        self.trace: list[int] = []
        # By the storage's address. The reference's callback removes the entry, so the entry keeps the reference alive.
        self._alive: dict[int, object] = {x.untyped_storage()._cdata: None for x in tree.leaves(ignored)}

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


# ----------------------------------------------------------------------------------------- the nodes' gradients


@dataclass(frozen=True)
class Passing:
    """The memory of a forward and backward pass of n nodes in one call, their gradients among it.

    `traces` has the bytes after each operation, for one or two numbers of nodes. Each operation's bytes grow linearly
    in n, so which of them is the peak may depend on n.

    >>> Passing({2: (10, 8), 3: (11, 12)}).peak(2), Passing({2: (10, 8), 3: (11, 12)}).peak(10)
    (10, 40)
    """

    traces: Mapping[int, tuple[int, ...]]
    strided: frozenset[str] = frozenset()  # whose gradients are not contiguous: the optimizer copies them

    def peak(self, num_nodes: int) -> int:
        """Return the peak in bytes."""
        (n, small), *larger = sorted(self.traces.items())
        if not larger:
            return max(small, default=0) * num_nodes // n
        [(m, large)] = larger
        if len(small) != len(large):  # operations that depend on the number of nodes
            small, large = (max(small),), (max(large),)
        return max((b + (b - a) * (num_nodes - m) // (m - n) for a, b in zip(small, large)), default=0)


def passing(engine: Engine, batch: Any, most: int, mean: bool) -> Passing:
    """Watch a prepared engine, whose plan is a loop or vmap, compute the gradients of a few nodes.

    It takes two and three nodes, since `vmap` of one may run other operations; one node with the loop, or with a model
    of much arithmetic. Gradients are dropped.

    Args:
        batch: of each node, `[B, ...]`.
        most: the nodes in one call of the run; it takes no more.
        mean: whether the run needs the gradient of the mean loss only.
    """
    large = engine.facts is not None and engine.facts.flop > MAX_FLOP_IN_STACK
    few = [1] if engine.plan.engine == "loop" or large else [min(most, n) for n in (2, 3)]
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
    """The memory that a strategy keeps, and the memory that it needs temporarily.

    Attributes:
        state: after the steps, of tensors without values.
        rows: of gradients: all nodes, or 1 for their mean loss.
        temporary_bytes: the most that a step allocates temporarily, besides gradients and state.
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

    The steps are the first two, and the first in which each module exchanges, or in which a delayed exchange arrives.
    Each step measures the nodes' distance before their exchange, as in a run that evaluates.

    Args:
        shapes: the parameters of one node, `[*]`, with values or without.
        strided: the parameters whose gradients are not contiguous, which the optimizer copies.
        lasting: whether the engine keeps the storage of the gradients from step to step, as it does if it takes the
            nodes in parts.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> peak = stepping(DiLoCoStrategy("sgd", H=500), {"w": torch.empty(10**9, device="meta")}, 8, max_steps=1000)
    >>> peak.state.params["w"].shape, peak.state.shared["0.0/params"]["w"].nbytes, peak.temporary_bytes > 0
    (torch.Size([8, 1000000000]), 4000000000, True)
    """
    with FakeTensorMode(allow_non_fake_inputs=True):  # on the CPU, so that its code paths are taken
        params = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in shapes.items()}
        batch = torch.empty(num_nodes, 1)
    engine = _Shapes(params, strided, lasting)
    # Weights by examples, if the strategy asks for them, change no size.
    simulation = simulation_of(
        nn.Module(), strategy, StackedCollectives(num_nodes), engine=cast(Engine, engine), max_steps=max_steps,
        num_examples=(1,) * num_nodes,
    )  # fmt: skip
    with torch.no_grad(), _WithoutValues([params, batch]) as live:
        state = simulation.init()
        try:
            for step in _watched_steps(simulation, max_steps):
                state, _ = simulation.step(replace(state, tick=step), batch, before=_distance)
        except Exception:  # whatever a strategy does with tensors that have no values
            return Stepping(simulation.init(), num_nodes, 0, complete=False)
    gradients = 0 if lasting else engine.rows * tree.num_bytes(params)  # lasting ones are still allocated
    return Stepping(state, engine.rows, max(0, live.peak - live.now - gradients))


class _WithoutValues(Live):
    """Watch tensors without values: `.item()` is 0; fused kernels, which allocate nothing, are skipped."""

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.startswith("_fused_"):
            return None
        if name.startswith("_local_scalar_dense") and args[0].untyped_storage().device.type == "meta":
            return args[0].dtype.is_floating_point and 0.0
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Shapes:
    """A stand-in for an engine: its gradients have no values, but the layout of the model's."""

    written: frozenset[str] = frozenset()
    plan = None  # nothing is prepared

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
        if name in self._strided:  # in reverse order in memory
            return self.params[name].new_empty(shape[::-1]).permute(*reversed(range(len(shape))))
        return self.params[name].new_empty(shape)


def _distance(event: Event, draft: Draft) -> None:
    """Measure the nodes' distance before their exchange, beside the gradients, as a run does at an evaluation."""
    if not event.reads:
        squared_consensus_distance(draft.params)


def _watched_steps(simulation: Simulation, max_steps: int) -> list[int]:
    """Return the steps to watch; see `stepping`."""
    steps = {0, 1}
    for mark in getattr(simulation.timetable, "marks", ()):
        first = next((step for step in range(max_steps) if mark.when.due(step)), 0)
        steps |= {first, first + mark.lag}
    return sorted(step for step in steps if step < max_steps)


# From `benchmarks/memory.py`, if nothing can be measured: tensors take up to 1.25 times their estimate.
MARGIN = 1.25
# Also for a process on the CPU: Python and torch take 300 MB; glibc keeps freed memory, up to 260 MB were observed.
RESERVED_BYTES = 2**29


def fitting_sizes(
    engine: Engine, options: FitOptions, batch: Any, max_steps: int, num_processes: int
) -> tuple[int | None, int | None, dict[str, Any]]:
    """Return the nodes in one call and the examples at a time, None: all, that fit into `options.max_memory_usage`.

    The last of three is a report of the bytes.

    It tries in this order: all nodes in one call; half of them, a quarter ... one; then parts of the batch, from the
    largest divisor of its size downwards. So the choice depends only on the machine's memory, the model, the data's
    shapes and the settings, and is the same in every run. The batch is never cut if the user sets `minibatch_size`, or
    if the model's buffers change in training (batch norm): its statistics would be those of the parts.

    On CUDA it measures a call of `engine.gradients`, by the allocator's peak. Elsewhere `estimate_memory` estimates the
    step; a quarter is added and, on a CPU, `RESERVED_BYTES`. `report["measured"]` says which.

    Args:
        engine: prepared; its plan is where the search begins.
        batch: of the nodes here, `[L, B, ...]`.
        num_processes: processes that share a machine's memory.

    Raises:
        MemoryError: if nothing fits; it says what to change.
    """
    assert options.max_memory_usage is not None
    assert engine.facts is not None
    measured = engine.device.type == "cuda"
    share = 1 if measured else num_processes
    limit = int(options.max_memory_usage * memory_limit(engine.device) / share)
    num_local, batch_size = next((x.shape[0], x.shape[1] if x.dim() > 1 else 1) for x in tree.leaves(batch))
    copied = Engine(copy.deepcopy(engine.model), engine="loop", autocast=engine.autocast)
    of_one, part = tree.map_leaves(lambda x: x[0], batch), options.minibatch_size
    estimator = Estimator(copied, options.strategy, options.num_nodes, max_steps, of_one, part, num_local)
    num_bytes = 0
    for plan, size in _cuts(engine, num_local, batch_size, part):
        estimate = MemoryEstimate(estimator.parts(plan, size), num_local, str(engine.device))
        if measured:
            num_bytes = _measured(engine, plan, batch, size, estimate)
        else:
            num_bytes = round(MARGIN * estimate.total_bytes) + (RESERVED_BYTES if engine.device.type == "cpu" else 0)
        if num_bytes <= limit:
            report = {"limit_bytes": limit, "needed_bytes": num_bytes, "measured": measured}
            return plan.chunk_size, size, report
    cut = " The batch is not cut, since the model has batch norm or the like." if engine.facts.mutated else ""
    raise MemoryError(
        f"{options.num_nodes} nodes with batch_size={batch_size} need at least {readable_bytes(num_bytes)}, "
        f"{'measured' if measured else 'estimated'}, and max_memory_usage allows {readable_bytes(limit)}.{cut} Give a "
        "smaller batch_size, fewer nodes, or a larger max_memory_usage; vecgym.estimate_memory shows what uses how "
        "much."
    )


def _cuts(engine: Engine, num_local: int, batch_size: int, fixed: int | None) -> Iterator[tuple[Plan, int | None]]:
    """Yield plans and minibatch sizes, from the largest down; `fixed`: the user's minibatch size."""
    assert engine.facts is not None
    plan = engine.plan
    yield plan, fixed
    if plan.engine != "loop":
        chunk = min(plan.chunk_size or num_local, num_local)
        while chunk > 1:
            chunk = -(-chunk // 2)
            yield replace(plan, chunk_size=chunk), fixed
        plan = replace(plan, chunk_size=1)
    if fixed is None and not engine.facts.mutated:
        for size in range(batch_size - 1, 0, -1):
            if batch_size % size == 0:
                yield plan, size


def _measured(engine: Engine, plan: Plan, batch: Any, minibatch_size: int | None, estimate: MemoryEstimate) -> int:
    """Return the allocator's peak in a call of `gradients`, plus what else a run keeps; huge if it does not fit."""
    device, parts, num_local = engine.device, estimate.parts, estimate.num_nodes
    params = {name: p.detach()[None].expand(num_local, *p.shape).clone() for name, p in engine.params.items()}
    buffers = {name: b[None].clone() for name, b in engine.buffers.items()}
    plan_before = engine.plan
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        engine.use(plan)
        engine.gradients(params, buffers, batch, seed=0, step=0, minibatch_size=minibatch_size)
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError:
        return sys.maxsize
    finally:
        engine.use(plan_before)
        engine.release()
        del params
        torch.cuda.empty_cache()
    passing = torch.cuda.max_memory_allocated(device) - before
    lasting = sum(parts[name].total_bytes for name in ("parameters", "optimizer", "strategy", "batch", "buffers"))
    return lasting + max(passing, parts["gradients"].total_bytes + parts["exchange"].total_bytes)
