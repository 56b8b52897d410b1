"""Memory: what a run takes, estimated before it begins, and batches cut so that it fits.

The estimate counts tensors. It knows nothing of Python, torch's own code (300 MB and more on a CPU), of what an
allocator keeps aside, or of operations that need room inside; `benchmarks/memory.py` measures how far off it is.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import readable_bytes
from vecgym.core import check, tree
from vecgym.data import Batches
from vecgym.engine import Engine, EngineName, Plan, check_settings, choose_plan
from vecgym.engine.contract import check_model
from vecgym.runs.options import check_strategy, checked
from vecgym.strategy import Context, Strategy
from vecgym.strategy.per_rank import is_per_rank

__all__ = ["MemoryEstimate", "Part", "estimate_memory"]

PROBE_STEPS = 3  # of a strategy on tiny tensors, to see what it keeps once for all nodes
TINY = 2  # the size of each dimension of these
MARGIN = 2.0  # whole steps of convolutions take up to 1.8 times their estimate: `benchmarks/memory.py`
NO_LIMIT = 2**60  # what cgroups say where there is none


@dataclass(frozen=True)
class Part:
    """What one kind of tensor takes: `per_node_bytes` for each of `nodes`, and `shared_bytes` once.

    >>> Part(per_node_bytes=100, shared_bytes=50, nodes=8).total_bytes
    850
    """

    per_node_bytes: int = 0
    shared_bytes: int = 0
    nodes: int = 1

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.per_node_bytes * self.nodes + self.shared_bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """What `estimate_memory` found; `str` of it is a table.

    Attributes:
        parts: "parameters", "gradients", "optimizer", "strategy", "batch", "activations", "exchange": see
            `estimate_memory`.
        num_nodes: K.
        device: where the run would be.

    >>> estimate = MemoryEstimate({"parameters": Part(40, nodes=2), "exchange": Part(40, 40, 2)}, num_nodes=2)
    >>> estimate.total_bytes, str(estimate).splitlines()[1].split()
    (200, ['parameters', '40', 'B', '2', '-', '80', 'B'])
    """

    parts: dict[str, Part]
    num_nodes: int
    device: str = "cpu"

    @property
    def total_bytes(self) -> int:
        """The peak: activations and exchange are never there together."""
        apart = ("activations", "exchange")
        lasting = sum(part.total_bytes for name, part in self.parts.items() if name not in apart)
        return lasting + max((self.parts[name].total_bytes for name in apart if name in self.parts), default=0)

    def __str__(self) -> str:
        rows = [("", "per node", "nodes", "shared", "all")]
        for name, part in self.parts.items():
            each = readable_bytes(part.per_node_bytes) if part.per_node_bytes else "-"
            shared = readable_bytes(part.shared_bytes) if part.shared_bytes else "-"
            rows.append((name, each, str(part.nodes) if part.per_node_bytes else "-", shared,
                         readable_bytes(part.total_bytes)))  # fmt: skip
        rows.append(("total (estimate)", "", "", "", readable_bytes(self.total_bytes)))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *[c.rjust(w) for c, w in zip(row[1:], widths[1:])]]) for row in rows
        ]
        missing = [] if "activations" in self.parts else ["(without data: no batch and no activations)"]
        return "\n".join([*(line.rstrip() for line in lines), *missing])


def estimate_memory(
    model: nn.Module,
    strategy: Strategy,
    num_nodes: int,
    batch_size: int = 16,
    data: Any = None,
    *,
    minibatch_size: int | None = None,
    chunk_size: int | None = None,
    engine: EngineName = "auto",
    autocast: bool = False,
    max_steps: int = 1000,
    device: torch.device | str = "cpu",
) -> MemoryEstimate:
    """The memory of a run by `Trainer.fit`, as a table, without training: only one node's forward pass is made.

    parameters: 1 or K copies; gradients: likewise, those of the nodes' mean loss or of each; optimizer: its state;
    strategy: what its modules keep (outer parameters, residuals ...); buffers; batch: the examples of a step;
    activations: what the backward pass needs of the nodes computed at a time, of `minibatch_size` examples each;
    exchange: copies that the nodes' exchange makes on the way. What is 1 copy and what K is seen by the strategy's own
    steps on tiny tensors.

    Args:
        model, strategy, num_nodes, batch_size, minibatch_size, chunk_size, engine, autocast: as for `Trainer.fit`.
        data: a dataset, or a tuple, list or dict of tensors as the model takes them: one node's batch, `[B, ...]`.
            None: the table has no batch and no activations.
        max_steps: of the run; some strategies ask.
        device: where it would run, there or not: the engine's plan depends on it.

    Raises:
        ValueError, TypeError: for what `Trainer.fit` refuses, too.
        RuntimeError: where the model fails on the data; it says with what.

    >>> from vecgym.models import Classifier
    >>> from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy
    >>> model = Classifier(nn.Linear(1000, 10))
    >>> batch = torch.zeros(16, 1000), torch.zeros(16, dtype=torch.long)
    >>> diloco = estimate_memory(model, DiLoCoStrategy("adamw", H=10), 8, 16, batch)
    >>> P = 4 * (1000 * 10 + 10)
    >>> diloco.parts["parameters"] == Part(P, nodes=8), diloco.parts["strategy"].shared_bytes >= 2 * P
    (True, True)
    >>> estimate_memory(model, AllReduceStrategy("adamw"), 8).parts["optimizer"].total_bytes // P
    2
    """
    check_model(model)
    check_strategy(strategy, num_nodes)
    given_sizes = {"num_nodes": num_nodes, "batch_size": batch_size, "minibatch_size": minibatch_size,
                   "chunk_size": chunk_size, "autocast": autocast}  # fmt: skip
    num_nodes, batch_size, minibatch_size, chunk_size, autocast = checked(given_sizes).values()
    check_settings(engine, chunk_size, None)
    max_steps = check.integer("max_steps", max_steps)
    where = _device(device)
    given = None if data is None else tree.map_leaves(lambda x: x[None], _batch_of_one(data, num_nodes, batch_size))
    one = Engine(copy.deepcopy(model).cpu(), engine="loop", autocast=autocast)
    found = Activations() if given is None else _activations(one, given, minibatch_size)
    plan = Plan("vmap")
    if one.facts is not None:
        plan = choose_plan(one.facts, num_nodes, where, torch.get_num_threads(), engine)
    if chunk_size is not None:
        plan = replace(plan, chunk_size=chunk_size)
    batch_bytes = 0 if given is None else tree.num_bytes(given)
    kept = kept_by(strategy, one.params, num_nodes, max_steps)
    parts = _parts(kept, tree.num_bytes(one.buffers), batch_bytes, found, plan, num_nodes)
    if given is None:
        del parts["batch"], parts["activations"]
    return MemoryEstimate(parts, num_nodes, str(where))


@dataclass(frozen=True)
class Activations:
    """What one node's forward and backward pass needs for a moment."""

    saved_bytes: int = 0  # kept for the backward pass
    largest_bytes: int = 0  # the largest tensor on the way


def activations(engine: Engine, batch: Any, minibatch_size: int | None = None) -> Activations:
    """Of one node, on the first of the batches `[L, B, ...]`, or a part of it; the engine is prepared by it."""
    return _activations(engine, tree.map_leaves(lambda x: x[:1], batch), minibatch_size)


def _activations(one: Engine, batch: Any, minibatch_size: int | None) -> Activations:
    part = batch if minibatch_size is None else tree.map_leaves(lambda x: x[:, :minibatch_size], batch)
    own = {x.untyped_storage().data_ptr() for x in tree.leaves([one.params, one.frozen, one.buffers])}
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        one.prepare(part)
    own |= {x.untyped_storage().data_ptr() for x in tree.leaves(part)}
    assert one.facts is not None
    bytes_saved = sum(x.untyped_storage().nbytes() for at, x in saved.items() if at not in own)
    return Activations(bytes_saved, one.facts.largest_bytes)


class Kept(NamedTuple):
    """What lasts from step to step, in bytes, and of how many nodes."""

    params: Part
    optimizer: Part
    strategy: Part
    mean: bool  # one gradient, that of the mean loss


def kept_by(strategy: Strategy, params: Mapping[str, Tensor], num_nodes: int, max_steps: int = 1000) -> Kept:
    """What a run keeps of parameters, optimizer and strategy. `params`: of one node, `[*]`."""
    P = tree.num_bytes(params)
    mean = strategy.mean_gradient
    one = {name: p.detach()[None] for name, p in params.items()}
    if is_per_rank(strategy):  # a copy of everything for each node
        state = strategy.inner_optim.rule().init(one)
        return Kept(Part(P, nodes=num_nodes), Part(tree.num_bytes(state), nodes=num_nodes), Part(), False)
    tiny = {name: torch.ones(1, *[min(n, TINY) for n in p.shape[1:]], dtype=p.dtype) for name, p in one.items()}
    # Weights of examples, if it asks for them, change no size.
    ctx = Context(StackedCollectives(num_nodes), 0, max_steps, 0, inplace=False, num_examples=(1,) * num_nodes)
    optimizer, _ = strategy.init(one, ctx)
    small, slots, modules = tiny, *strategy.init(tiny, ctx)
    rows = 1 if mean else num_nodes
    for step in range(min(PROBE_STEPS, max_steps)):
        now = replace(ctx, step=step)
        grads = {name: torch.ones(rows, *p.shape[1:], dtype=p.dtype) for name, p in small.items()}
        grads, modules = strategy.exchange_gradients(grads, modules, now)
        small, slots = strategy.optimize(small, grads, slots, now)
        small, modules = strategy.exchange_parameters(small, modules, now)
    wide = _widest(small) > 1
    each = tree.num_bytes(optimizer)
    of_optimizer = Part(each, nodes=num_nodes) if _widest(slots) > 1 else Part(0, each)
    ratios = {name: p.numel() / max(1, tiny[name].numel()) for name, p in one.items()}
    whole, each_node = _state_bytes(modules, num_nodes, ratios)
    strategy_part = Part(round(each_node), round(whole), num_nodes)
    return Kept(Part(P, nodes=num_nodes) if wide else Part(0, P), of_optimizer, strategy_part, mean and not wide)


def _state_bytes(state: Any, num_nodes: int, ratios: Mapping[str, float], name: str = "") -> tuple[float, float]:
    """(shared, per node) bytes of modules' states on tiny parameters, at the size that the real ones have."""
    if isinstance(state, Tensor):
        found = state.numel() * state.element_size() * ratios.get(name, 1.0)
        wide = state.dim() > 0 and state.shape[0] == num_nodes > 1
        return (0.0, found / num_nodes) if wide else (found, 0.0)
    items = state.items() if isinstance(state, Mapping) else ((name, x) for x in state)
    parts = [_state_bytes(x, num_nodes, ratios, key) for key, x in items]
    return sum(shared for shared, _ in parts), sum(each for _, each in parts)


def _widest(values: Any) -> int:
    return max((x.shape[0] for x in tree.leaves(values) if x.dim()), default=1)


def _parts(
    kept: Kept, buffer_bytes: int, batch_bytes: int, found: Activations, plan: Plan, num_nodes: int
) -> dict[str, Part]:
    """The rows of the table: `batch_bytes` are those of one node."""
    P = kept.params.per_node_bytes + kept.params.shared_bytes
    chunk = min(plan.chunk_size or num_nodes, num_nodes)
    threads = min(plan.node_threads, num_nodes)
    at_a_time = threads if plan.engine == "loop" else min(num_nodes, chunk * threads)
    # A part of the nodes has gradients of its own before they are copied to where all are.
    parts = at_a_time < num_nodes
    gradients = Part(0, P + parts * P) if kept.mean else Part(P, parts * at_a_time * P, num_nodes)
    passing = Part(found.saved_bytes + 2 * found.largest_bytes, 0, at_a_time)
    wide = kept.params.nodes if kept.params.per_node_bytes else 0
    return {
        "parameters": kept.params,
        "gradients": gradients,
        "optimizer": kept.optimizer,
        "strategy": kept.strategy,
        "buffers": Part(buffer_bytes, nodes=num_nodes),
        "batch": Part(batch_bytes, nodes=num_nodes),
        "activations": passing,
        "exchange": Part(P, P, wide) if wide else Part(0, P),
    }


def _device(device: torch.device | str) -> torch.device:
    """It need not be there."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f'device={device!r} is not a device, such as "cpu" or "cuda".') from None


def _batch_of_one(data: Any, num_nodes: int, batch_size: int) -> Any:
    """One node's batch, `[B, ...]`, of a dataset; or what was given as one."""
    if isinstance(data, (tuple, list, Mapping)):
        if not any(True for _ in tree.leaves(data)):
            raise ValueError("data holds no tensor: give one node's batch [B, ...], as the model takes it.")
        return data
    batches = Batches(data, num_nodes, batch_size, shuffle=False, node_ids=[0], name="data")
    return tree.map_leaves(lambda x: x[0], batches.batch(0))


# ------------------------------------------------------------------------------------------- what fits


@dataclass(frozen=True)
class Sizes:
    """How a step is cut so that it fits: nodes in one call, and examples at a time; None: all."""

    chunk_size: int | None
    minibatch_size: int | None
    report: dict[str, Any]


_FOUND: dict[tuple[Any, ...], Sizes] = {}  # of this process


def fitting_sizes(
    engine: Engine,
    strategy: Strategy,
    batch: Any,
    num_nodes: int,
    max_steps: int,
    fraction: float,
    minibatch_size: int | None = None,
    num_processes: int = 1,
) -> Sizes:
    """The largest cut of a step that fits into `fraction` of the device's memory.

    Tried in this order: all nodes in one call; half of them, a quarter ... one; then parts of the batch, of the largest
    divisor of its size downwards. So the choice depends on the machine's memory, the model, the data's shapes and
    the settings alone, and is the same at every run. The batch is never cut for a model whose buffers change in
    training (batch norm): its statistics would be of the parts.

    On CUDA a call of `engine.gradients` is measured, in what the allocator gave out at most; elsewhere it is estimated,
    and `report["measured"]` says so. Answers are kept for the process.

    Args:
        engine: prepared; its plan is where the search begins.
        batch: of the nodes here, `[L, B, ...]`.
        num_nodes: K.
        fraction: of the memory, `max_memory_usage`.
        minibatch_size: given by the user: then only the nodes are cut.
        num_processes: that share a machine's memory.

    Raises:
        MemoryError: when nothing fits, saying what would.
    """
    limit = int(fraction * memory_limit(engine.device) / (1 if engine.device.type == "cuda" else num_processes))
    shapes = [(tuple(x.shape), x.dtype) for x in tree.leaves([batch, engine.params])]
    key = (limit, num_nodes, max_steps, minibatch_size, engine.autocast, str(engine.device),
           *map(repr, (strategy, engine.model, engine.plan, shapes)))  # fmt: skip
    if key not in _FOUND:
        _FOUND[key] = _search(engine, strategy, batch, num_nodes, max_steps, limit, minibatch_size)
    return _FOUND[key]


def _search(
    engine: Engine,
    strategy: Strategy,
    batch: Any,
    num_nodes: int,
    max_steps: int,
    limit: int,
    minibatch_size: int | None,
) -> Sizes:
    assert engine.facts is not None
    num_local, batch_size = next((x.shape[0], x.shape[1] if x.dim() > 1 else 1) for x in tree.leaves(batch))
    all_of_it = kept_by(strategy, engine.params, num_nodes, max_steps)
    # Other nodes are in other processes.
    params, optimizer, modules = (replace(part, nodes=min(part.nodes, num_local)) for part in all_of_it[:3])
    kept = Kept(params, optimizer, modules, all_of_it.mean)
    measured = engine.device.type == "cuda"
    buffers, of_one = tree.num_bytes(engine.buffers), tree.num_bytes(batch) // num_local
    passing: dict[int | None, Activations] = {}
    needed = 0
    for plan, size in _cuts(engine, num_local, batch_size, minibatch_size):
        if size not in passing:
            passing[size] = activations_of(engine, batch, size)
        parts = _parts(kept, buffers, of_one, passing[size], plan, num_local)
        estimate = MemoryEstimate(parts, num_local, str(engine.device))
        needed = _measured(engine, plan, batch, size, estimate) if measured else round(MARGIN * estimate.total_bytes)
        if needed <= limit:
            report = {"limit_bytes": limit, "needed_bytes": needed, "measured": measured}
            return Sizes(plan.chunk_size, size, report)
    cut = " The batch is not cut, since the model has batch norm or the like." if engine.facts.mutated else ""
    raise MemoryError(
        f"{num_nodes} nodes with batch_size={batch_size} need {readable_bytes(needed)} at least, "
        f"{'measured' if measured else 'estimated'}, and max_memory_usage allows {readable_bytes(limit)}.{cut} Give a "
        "smaller batch_size, fewer nodes, or a larger max_memory_usage; vecgym.estimate_memory shows what takes how "
        "much."
    )


def _cuts(engine: Engine, num_local: int, batch_size: int, given: int | None) -> Iterator[tuple[Plan, int | None]]:
    """Plans and minibatch sizes, from the largest down."""
    assert engine.facts is not None
    plan = engine.plan
    yield plan, given
    if plan.engine == "vmap":
        chunk = min(plan.chunk_size or num_local, num_local)
        while chunk > 1:
            chunk = -(-chunk // 2)
            yield replace(plan, chunk_size=chunk), given
        plan = replace(plan, chunk_size=1)
    if given is None and not engine.facts.mutated:
        for size in range(batch_size - 1, 0, -1):
            if batch_size % size == 0:
                yield plan, size


def activations_of(engine: Engine, batch: Any, minibatch_size: int | None) -> Activations:
    """`activations` by a copy of an engine, whose own plan and facts stay."""
    model = copy.deepcopy(engine.model)
    return activations(Engine(model, engine="loop", autocast=engine.autocast), batch, minibatch_size)


def _measured(engine: Engine, plan: Plan, batch: Any, minibatch_size: int | None, estimate: MemoryEstimate) -> int:
    """The allocator's peak over one call of `gradients`, and what else a run keeps; too much for the device: no end."""
    device, parts = engine.device, estimate.parts
    num_local = estimate.num_nodes
    params = {name: p.detach()[None].expand(num_local, *p.shape).clone() for name, p in engine.params.items()}
    buffers = {name: b[None].clone() for name, b in engine.buffers.items()}
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, usual = torch.cuda.memory_allocated(device), engine.plan
    try:
        engine.use(plan)
        engine.gradients(params, buffers, batch, seed=0, step=0, minibatch_size=minibatch_size)
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError:
        return sys.maxsize
    finally:
        engine.use(usual)
        engine.release()
        del params
        torch.cuda.empty_cache()
    passing = torch.cuda.max_memory_allocated(device) - before
    lasting = sum(parts[name].total_bytes for name in ("parameters", "optimizer", "strategy", "batch", "buffers"))
    return lasting + max(passing, parts["gradients"].total_bytes + parts["exchange"].total_bytes)


def check_fraction(max_memory_usage: Any) -> None:
    """Raise a ValueError for what is no part of the memory."""
    if max_memory_usage is not None:
        what = "the part of the device's memory that the run may take, such as 0.8"
        check.number("max_memory_usage", max_memory_usage, "(0, 1]", what)


def memory_limit(device: torch.device) -> int:
    """All memory of a device; of a CPU what this process may have, in a container too.

    >>> memory_limit(torch.device("cpu")) > 2**28
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        whole = 8 * 2**30
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < NO_LIMIT:
            whole = min(whole, int(text))
    return whole


def available_bytes(device: torch.device) -> int:
    """Half of the memory that is free: what a sweep may use when nothing is said."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # not Linux
        return 4 * 2**30


def peak_bytes(device: torch.device) -> int:
    """The most memory so far: allocated on a CUDA device, else resident in this process; on MPS held by its driver now.

    >>> peak_bytes(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
