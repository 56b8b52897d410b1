"""Estimate the memory of a run before it begins, and look up that of a device.

The estimate counts tensors (`vecgym.runs.footprint`). It ignores Python, torch's own code
(300 MB and more on a CPU), and the reserves of an allocator; `benchmarks/memory.py` measures how far off it is.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from vecgym.collectives.ledger import readable_bytes
from vecgym.core import tree
from vecgym.core.options import Options, function_of
from vecgym.data import Batches
from vecgym.engine import Engine, EngineName, Plan, choose_plan
from vecgym.engine.contract import check_model
from vecgym.engine.plan import check_engine
from vecgym.records.rows import aligned
from vecgym.runs.footprint import Passing, passing, stepping
from vecgym.runs.options import Chosen, Count, Flag, OptionalCount, check_parts, check_strategy
from vecgym.strategy import Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.per_rank import as_strategy

__all__ = ["MemoryEstimate", "Part", "estimate_memory"]

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
        notes: what could not be counted.

    >>> estimate = MemoryEstimate({"parameters": Part(40, nodes=2), "exchange": Part(40, 40, 2)}, num_nodes=2)
    >>> estimate.total_bytes, str(estimate).splitlines()[1].split()
    (200, ['parameters', '40', 'B', '2', '-', '80', 'B'])
    """

    parts: dict[str, Part]
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
        check_synchronous(self.strategy)
        super().__post_init__()
        if self.minibatch_size is not None:
            check_parts(self.batch_size, self.minibatch_size)


@function_of(MemoryOptions)
def estimate_memory(options: MemoryOptions) -> MemoryEstimate:
    """Estimate the memory of a run by `Trainer.fit`, as a table; nothing is trained, and K nodes are never computed.

    parameters: 1 or K copies; gradients: likewise, those of the nodes' mean loss or of each; optimizer: its state;
    strategy: what its modules keep (outer parameters, residuals ...); buffers; batch: the examples of a step;
    activations: what a forward and backward pass of the nodes computed at a time, of `minibatch_size` examples each,
    takes at its peak beyond the gradients; exchange: the most that anything else in a step makes on the way.

    Activations are those of one node, or of two and of three, which take that pass while every tensor that is made or
    freed is counted; what they take is extrapolated linearly to the nodes computed at a time. The rest is what the
    strategy's own steps on all K nodes hold, of tensors that have shapes and no values: the first steps, and those in
    which it first exchanges. What an operation allocates and frees within itself is not seen, nor what depends on
    values.

    Of a model of which a few nodes do not fit into this machine's memory, or that is on the device "meta", there is no
    pass: batch and activations are missing, and the table says so.

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
    num_nodes, device, fits = options.num_nodes, torch.device(options.device), _fits(options.model)
    model = copy.deepcopy(options.model).cpu() if fits else options.model
    one = Engine(model, engine=options.engine, autocast=options.autocast)
    batch, plan = None, Plan("vmap")
    if options.data is not None and fits:
        batch = _batch_of_one(options)
        with torch.enable_grad():
            one.prepare(tree.map_leaves(lambda x: x[None], _examples(batch, options.minibatch_size)))
        assert one.facts is not None
        mean = as_strategy(options.strategy, options.model).mean_gradient
        plan = choose_plan(one.facts, num_nodes, device, torch.get_num_threads(), options.engine, mean)
    if options.chunk_size is not None:
        plan = replace(plan, chunk_size=options.chunk_size)
    estimator = Estimator(one, options.strategy, num_nodes, options.max_steps, batch)
    parts = estimator.parts(plan, options.minibatch_size)
    notes = ["a node does not fit here: no batch and no activations"] if not fits else []
    notes += ["without data: no batch and no activations"] if fits and batch is None else []
    notes += [] if estimator.complete else ["the strategy looks at values: without its steps, an exchange included"]
    return MemoryEstimate(parts, num_nodes, str(device), tuple(notes))


def _fits(model: nn.Module) -> bool:
    """Whether a few nodes, their gradients and a copy of the model fit into this machine's free memory."""
    params = list(model.parameters())
    needed = 8 * sum(p.nbytes for p in params)
    return not any(p.is_meta for p in params) and needed <= 2 * available_bytes(torch.device("cpu"))


def _examples(batch: Any, minibatch_size: int | None) -> Any:
    """Return the part of one node's batch, `[B, ...]`, that is computed at a time."""
    return batch if minibatch_size is None else tree.map_leaves(lambda x: x[:minibatch_size], batch)


class Estimator:
    """The table for one model, strategy and batch, as its steps are cut in one way or another.

    Args:
        engine: of a copy of the model on the CPU, prepared if there is a batch; its plan is not kept.
        num_nodes: K.
        batch: of one node, `[B, ...]`; None: without batch and activations.
        num_local: the nodes in this process; None: K.
    """

    def __init__(
        self, engine: Engine, strategy: Strategy, num_nodes: int, max_steps: int, batch: Any,
        num_local: int | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.batch = engine, batch
        self.strategy = as_strategy(strategy, engine.model)
        self.num_nodes, self.max_steps = num_nodes, max_steps
        self.num_local = num_nodes if num_local is None else num_local
        self.P = tree.num_bytes(engine.params)
        self.complete = True  # whether the strategy's steps could be taken
        self._pass, self._keeping = cache(self._pass), cache(self._keeping)  # type: ignore[method-assign]

    def parts(self, plan: Plan, minibatch_size: int | None) -> dict[str, Part]:
        """Return the rows of the table."""
        nodes, cut = self.num_local, minibatch_size is not None
        at_a_time = nodes_at_a_time(plan, nodes)
        in_parts = plan.engine == "loop" or at_a_time < nodes
        most = at_a_time // plan.node_threads  # in one call
        seen = None if self.batch is None else self._pass(plan.engine, min(most, 3), minibatch_size)
        parts, mean = self._keeping(frozenset() if seen is None or in_parts else seen.strided, in_parts)
        # Parts of the nodes write into storage that lasts; parts of the batch are added up beside it.
        whole = self.P if mean else self.P * nodes
        gradients = Part(0, whole) if mean else Part((2 if cut and in_parts else 1) * self.P, 0, nodes)
        adding = max(0, 4 * whole - gradients.total_bytes) if cut else 0  # two terms, one weighted, and the sum
        exchange = max(parts["exchange"], Part(0, adding), key=lambda part: part.total_bytes)
        buffers = Part(tree.num_bytes(self.engine.buffers), nodes=nodes)
        found = {"parameters": parts["parameters"], "gradients": gradients, "optimizer": parts["optimizer"],
                 "strategy": parts["strategy"], "buffers": buffers}  # fmt: skip
        if seen is not None:
            peak = plan.node_threads * seen.peak(most) + whole * (in_parts + cut)
            peak -= plan.node_threads * self.P if plan.engine == "loop" and not mean else 0
            found["batch"] = Part(tree.num_bytes(self.batch), nodes=nodes)
            found["activations"] = Part(*divmod(max(0, peak - gradients.total_bytes), at_a_time), at_a_time)
        return {**found, "exchange": exchange}

    def _pass(self, engine: str, most: int, minibatch_size: int | None) -> Passing:
        self.engine.use(Plan(engine))
        mean = self.strategy.mean_gradient and self.num_local == self.num_nodes
        return passing(self.engine, _examples(self.batch, minibatch_size), most, mean)

    def _keeping(self, strided: frozenset[str], in_parts: bool) -> tuple[dict[str, Part], bool]:
        """Return what is kept from step to step and what an exchange takes; and whether gradients are of the mean."""
        K, P, mean = self.num_nodes, self.P, False
        if not self.strategy.pure:  # a copy of everything for each node
            rule, one = self.strategy.inner_optim.rule(), {n: p.detach()[None] for n, p in self.engine.params.items()}
            optimizer = Part(tree.num_bytes(rule.init(one)))
            parts = {"parameters": Part(P), "optimizer": optimizer, "strategy": Part(), "exchange": Part(P, P)}
        else:
            seen = stepping(self.strategy, self.engine.params, K, self.max_steps, strided, in_parts)
            self.complete, mean = seen.complete, seen.rows == 1 < K
            state = seen.state
            values = {"parameters": state.params, "optimizer": state.optimizer, "strategy": state.strategy}
            parts = {name: part_of(x, K) for name, x in values.items()}
            # Whole copies of all nodes' parameters are each node's; the rest is taken once.
            copies = seen.temporary_bytes // max(1, K * P)
            parts["exchange"] = Part(copies * P, seen.temporary_bytes - copies * K * P)
        return {name: replace(part, nodes=self.num_local) for name, part in parts.items()}, mean


def part_of(values: Any, num_nodes: int) -> Part:
    """Tell what each node has, `[K, *]`, from what is stored once.

    >>> part_of({"own": torch.ones(4, 2), "shared": torch.ones(1, 2)}, num_nodes=4)
    Part(per_node_bytes=8, shared_bytes=8, nodes=4)
    """
    own = [x for x in tree.leaves(values) if x.dim() and len(x) == num_nodes > 1]
    each = tree.num_bytes(own) // num_nodes
    return Part(each, tree.num_bytes(values) - each * num_nodes, num_nodes)


def nodes_at_a_time(plan: Plan, num_nodes: int) -> int:
    """Return how many nodes are computed at the same time.

    >>> nodes_at_a_time(Plan("vmap", chunk_size=3), 8), nodes_at_a_time(Plan("loop", node_threads=2), 8)
    (3, 2)
    """
    each = 1 if plan.engine == "loop" else max(b - a for a, b in plan.chunks(num_nodes, plan.node_threads))
    return min(num_nodes, each * plan.node_threads)


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
