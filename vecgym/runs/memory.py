"""Estimate the memory of a run before it begins, and look up that of a device.

The estimate counts tensors. It ignores Python, torch's own code (300 MB and more on a CPU), the reserves of an
allocator, and the workspace of operations; `benchmarks/memory.py` measures how far off it is.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import readable_bytes
from vecgym.core import tree
from vecgym.core.options import Options, function_of
from vecgym.data import Batches
from vecgym.engine import Engine, EngineName, Plan, choose_plan
from vecgym.engine.contract import check_model
from vecgym.engine.plan import check_engine
from vecgym.records.rows import aligned
from vecgym.runs.checks import check_parts, check_strategy
from vecgym.runs.options import Chosen, Count, Flag, OptionalCount
from vecgym.strategy import Context, Strategy
from vecgym.strategy.per_rank import as_strategy

__all__ = ["MemoryEstimate", "Part", "estimate_memory"]

PROBE_STEPS = 3  # of a strategy on tiny tensors, to see what it stores once for all nodes
TINY = 2  # the size of each of their dimensions
NO_LIMIT = 2**60  # cgroups report at least this if there is no limit


@dataclass(frozen=True)
class Part:
    """The memory of one kind of tensor: `per_node_bytes` for each of `nodes`, and `shared_bytes` once.

    >>> Part(per_node_bytes=100, shared_bytes=50, nodes=8).total_bytes
    850
    """

    per_node_bytes: int = 0
    shared_bytes: int = 0
    nodes: int = 1

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.per_node_bytes * self.nodes + self.shared_bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """The result of `estimate_memory`; its `str` is a table.

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
        missing = [] if "activations" in self.parts else ["(without data: no batch and no activations)"]
        return "\n".join([*aligned(rows), *missing])


def _device(name: str, device: torch.device | str) -> torch.device:
    """Return a device, which need not be present."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f'{name}={device!r} is not a device, such as "cpu" or "cuda".') from None


@dataclass(frozen=True)
class MemoryOptions(Options):
    """All that `estimate_memory` takes.

    Args:
        model, strategy, num_nodes, batch_size, minibatch_size, chunk_size, engine, autocast: as for `Trainer.fit`.
        data: a dataset, or a tuple, list or dict of tensors as the model takes them: one node's batch, `[B, ...]`.
            None: the table has no batch and no activations.
        max_steps: of the run; some strategies ask.
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
        check_model(self.model)
        check_strategy(self.strategy, self.num_nodes)
        super().__post_init__()
        if self.minibatch_size is not None:
            check_parts(self.batch_size, self.minibatch_size)


@function_of(MemoryOptions)
def estimate_memory(options: MemoryOptions) -> MemoryEstimate:
    """Estimate the memory of a run by `Trainer.fit`, as a table; only one node's forward pass is made.

    parameters: 1 or K copies; gradients: likewise, those of the nodes' mean loss or of each; optimizer: its state;
    strategy: what its modules keep (outer parameters, residuals ...); buffers; batch: the examples of a step;
    activations: what the backward pass needs of the nodes computed at a time, of `minibatch_size` examples each;
    exchange: copies that the nodes' exchange makes on the way. Which of them are stored once and which K times is found
    by taking the strategy's own steps on tiny tensors.

    Args:
        {arguments}

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
    num_nodes, device = options.num_nodes, torch.device(options.device)
    one = Engine(copy.deepcopy(options.model).cpu(), engine="loop", autocast=options.autocast)
    batch, passing = None, Activations()
    if options.data is not None:
        batch = tree.map_leaves(lambda x: x[None], _batch_of_one(options))
        passing = activations(one, batch, options.minibatch_size)
    plan = Plan("vmap")
    if one.facts is not None:
        plan = choose_plan(one.facts, num_nodes, device, torch.get_num_threads(), options.engine)
    if options.chunk_size is not None:
        plan = replace(plan, chunk_size=options.chunk_size)
    kept = kept_by(as_strategy(options.strategy, one.model), one.params, num_nodes, options.max_steps)
    parts = parts_of(kept, tree.num_bytes(one.buffers), tree.num_bytes(batch), passing, plan, num_nodes)
    if batch is None:
        del parts["batch"], parts["activations"]
    return MemoryEstimate(parts, num_nodes, str(device))


@dataclass(frozen=True)
class Activations:
    """The temporary memory of one node's forward and backward pass."""

    saved_bytes: int = 0  # kept for the backward pass
    largest_bytes: int = 0  # the largest intermediate tensor


def activations(engine: Engine, batch: Any, minibatch_size: int | None = None) -> Activations:
    """Measure one node on the first of the batches `[L, B, ...]`, or a part of it; this prepares the engine."""
    part = tree.map_leaves(lambda x: x[:1] if minibatch_size is None else x[:1, :minibatch_size], batch)
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    known = [engine.params, engine.frozen, engine.buffers]
    before = {x.untyped_storage().data_ptr() for x in tree.leaves(known)}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        engine.prepare(part)
    before |= {x.untyped_storage().data_ptr() for x in tree.leaves(part)}
    assert engine.facts is not None
    saved_bytes = sum(x.untyped_storage().nbytes() for at, x in saved.items() if at not in before)
    return Activations(saved_bytes, engine.facts.largest_bytes)


class Kept(NamedTuple):
    """What is kept from step to step, in bytes, and for how many nodes."""

    params: Part
    optimizer: Part
    strategy: Part
    mean: bool  # one gradient, that of the mean loss


def kept_by(strategy: Strategy, params: Mapping[str, Tensor], num_nodes: int, max_steps: int = 1000) -> Kept:
    """Return what a run keeps of parameters, optimizer and strategy, given the parameters of one node, `[*]`."""
    P = tree.num_bytes(params)
    mean = strategy.mean_gradient
    one = {name: p.detach()[None] for name, p in params.items()}
    if not strategy.pure:  # a copy of everything for each node
        state = strategy.inner_optim.rule().init(one)
        return Kept(Part(P, nodes=num_nodes), Part(tree.num_bytes(state), nodes=num_nodes), Part(), False)
    tiny = {name: torch.ones(1, *[min(n, TINY) for n in p.shape[1:]], dtype=p.dtype) for name, p in one.items()}
    # Weights by examples, if the strategy asks for them, change no size.
    ctx = Context(StackedCollectives(num_nodes), max_steps=max_steps, num_examples=(1,) * num_nodes)
    optimizer, _ = strategy.init(one, ctx)
    small, slots, modules = tiny, *strategy.init(tiny, ctx)
    rows = 1 if mean else num_nodes
    for step in range(min(PROBE_STEPS, max_steps)):
        now = replace(ctx, step=step, node_steps=ctx.node_steps + step)
        grads = {name: torch.ones(rows, *p.shape[1:], dtype=p.dtype) for name, p in small.items()}
        grads, modules = strategy.exchange_gradients(grads, modules, now)
        small, slots = strategy.optimize(small, grads, slots, now)
        small, modules = strategy.exchange_parameters(small, modules, now)
    wide = _widest(small) > 1
    each = tree.num_bytes(optimizer)
    of_optimizer = Part(each, nodes=num_nodes) if _widest(slots) > 1 else Part(0, each)
    ratios = {name: p.numel() / max(1, tiny[name].numel()) for name, p in one.items()}
    shared, each_node = _state_bytes(modules, num_nodes, ratios)
    strategy_part = Part(round(each_node), round(shared), num_nodes)
    return Kept(Part(P, nodes=num_nodes) if wide else Part(0, P), of_optimizer, strategy_part, mean and not wide)


def _state_bytes(state: Any, num_nodes: int, ratios: Mapping[str, float]) -> tuple[float, float]:
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


def _widest(values: Any) -> int:
    return max((x.shape[0] for x in tree.leaves(values) if x.dim()), default=1)


def parts_of(
    kept: Kept, buffer_bytes: int, batch_bytes: int, passing: Activations, plan: Plan, num_nodes: int
) -> dict[str, Part]:
    """Return the rows of the table: `batch_bytes` are those of one node."""
    P = kept.params.per_node_bytes + kept.params.shared_bytes
    chunk = min(plan.chunk_size or num_nodes, num_nodes)
    threads = min(plan.node_threads, num_nodes)
    at_a_time = threads if plan.engine == "loop" else min(num_nodes, chunk * threads)
    # A part of the nodes has gradients of its own before they are copied to where all are.
    parts = at_a_time < num_nodes
    gradients = Part(0, P + parts * P) if kept.mean else Part(P, parts * at_a_time * P, num_nodes)
    wide = kept.params.nodes if kept.params.per_node_bytes else 0
    return {
        "parameters": kept.params,
        "gradients": gradients,
        "optimizer": kept.optimizer,
        "strategy": kept.strategy,
        "buffers": Part(buffer_bytes, nodes=num_nodes),
        "batch": Part(batch_bytes, nodes=num_nodes),
        "activations": Part(passing.saved_bytes + 2 * passing.largest_bytes, 0, at_a_time),
        "exchange": Part(P, P, wide) if wide else Part(0, P),
    }


def _batch_of_one(options: MemoryOptions) -> Any:
    """Return one node's batch, `[B, ...]`, of a dataset; or what was given as one."""
    data = options.data
    if isinstance(data, (tuple, list, Mapping)):
        if not any(True for _ in tree.leaves(data)):
            raise ValueError("data holds no tensor: give one node's batch [B, ...], as the model takes it.")
        return data
    batches = Batches(data, options.num_nodes, options.batch_size, shuffle=False, node_ids=[0], name="data")
    return tree.map_leaves(lambda x: x[0], batches.batch(0))


# ------------------------------------------------------------------------------------- what a device has


def memory_limit(device: torch.device) -> int:
    """Return the memory of a device; of a CPU what this process may use, in a container too.

    >>> memory_limit(torch.device("cpu")) > 2**28
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    total = _memory("SC_PHYS_PAGES", otherwise=8 * 2**30)
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < NO_LIMIT:
            total = min(total, int(text))
    return total


def available_bytes(device: torch.device) -> int:
    """Return half of the memory that is free: what a sweep may use unless told otherwise."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return _memory("SC_AVPHYS_PAGES", otherwise=8 * 2**30) // 2


def _memory(pages: str, otherwise: int) -> int:
    """Return the bytes of so many pages, as the operating system counts them; `otherwise` where it does not."""
    try:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not Linux
        return otherwise


def peak_bytes(device: torch.device) -> int:
    """Return the peak: allocated on a CUDA device, else resident in this process; on MPS the driver's current memory.

    >>> peak_bytes(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    import resource  # does not exist on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
