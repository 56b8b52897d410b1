"""Estimate the memory of a run before it begins, and look up that of a device.

The estimate counts tensors, by watching few nodes (`vecgym.runs.footprint`). It ignores Python, torch's own code
(300 MB and more on a CPU), and the reserves of an allocator; `benchmarks/memory.py` measures how far off it is.
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

from vecgym.collectives.ledger import readable_bytes
from vecgym.core import tree
from vecgym.core.options import Options, function_of
from vecgym.data import Batches
from vecgym.engine import Engine, EngineName, Plan, choose_plan
from vecgym.engine.contract import check_model
from vecgym.engine.plan import check_engine
from vecgym.records.rows import aligned
from vecgym.runs.footprint import Passing, exchanging, passing, state_bytes, widest
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
    strategy's own steps on K nodes hold, of a model cut down to four million parameters in all, in its first steps and
    in those in which it first exchanges; bytes are extrapolated linearly to the whole model. What an operation
    allocates and frees within itself is not seen.

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
    one = Engine(copy.deepcopy(options.model).cpu(), engine=options.engine, autocast=options.autocast)
    batch, plan = None, Plan("vmap")
    if options.data is not None:
        batch = _batch_of_one(options)
        with torch.enable_grad():
            one.prepare(tree.map_leaves(lambda x: x[None], _examples(batch, options.minibatch_size)))
        assert one.facts is not None
        mean = as_strategy(options.strategy, options.model).mean_gradient
        plan = choose_plan(one.facts, num_nodes, device, torch.get_num_threads(), options.engine, mean)
    if options.chunk_size is not None:
        plan = replace(plan, chunk_size=options.chunk_size)
    estimator = Estimator(one, options.strategy, num_nodes, options.max_steps, batch)
    return MemoryEstimate(estimator.parts(plan, options.minibatch_size), num_nodes, str(device))


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
        self._passing: dict[tuple[Any, ...], Passing] = {}
        self._kept: dict[frozenset[str], Kept] = {}

    def parts(self, plan: Plan, minibatch_size: int | None) -> dict[str, Part]:
        """Return the rows of the table."""
        at_a_time = nodes_at_a_time(plan, self.num_local)
        seen = None if self.batch is None else self._pass(plan, at_a_time, minibatch_size)
        in_parts = plan.engine == "loop" or at_a_time < self.num_local
        strided = frozenset[str]() if seen is None or in_parts else seen.strided
        if strided not in self._kept:
            kept = kept_by(self.strategy, self.engine.params, self.num_nodes, self.max_steps, strided)
            self._kept[strided] = kept.on(self.num_local)
        batch_bytes = tree.num_bytes(self.batch)
        cut = minibatch_size is not None
        parts = parts_of(self._kept[strided], tree.num_bytes(self.engine.buffers), batch_bytes, seen, plan,
                         self.num_local, cut)  # fmt: skip
        if seen is None:
            del parts["batch"], parts["activations"]
        return parts

    def _pass(self, plan: Plan, at_a_time: int, minibatch_size: int | None) -> Passing:
        most = at_a_time // plan.node_threads
        key = (plan.engine, min(most, 3), minibatch_size)
        if key not in self._passing:
            self.engine.use(plan)
            examples = _examples(self.batch, minibatch_size)
            mean = self.strategy.mean_gradient and self.num_local == self.num_nodes
            self._passing[key] = passing(self.engine, examples, most, mean)
        return self._passing[key]


def nodes_at_a_time(plan: Plan, num_nodes: int) -> int:
    """Return how many nodes are computed at the same time.

    >>> nodes_at_a_time(Plan("vmap", chunk_size=3), 8), nodes_at_a_time(Plan("loop", node_threads=2), 8)
    (3, 2)
    """
    each = 1 if plan.engine == "loop" else max(b - a for a, b in plan.chunks(num_nodes, plan.node_threads))
    return min(num_nodes, each * plan.node_threads)


class Kept(NamedTuple):
    """What is kept from step to step, and what exchanges take on the way, in bytes, and for how many nodes."""

    params: Part
    optimizer: Part
    strategy: Part
    exchange: Part
    mean: bool  # one gradient, that of the mean loss

    def on(self, num_local: int) -> Kept:
        """Return that of a process with these nodes; the others are in other processes."""
        params, optimizer, strategy, exchange = (replace(part, nodes=min(part.nodes, num_local)) for part in self[:4])
        return Kept(params, optimizer, strategy, exchange, self.mean)


def kept_by(
    strategy: Strategy, params: Mapping[str, Tensor], num_nodes: int, max_steps: int = 1000,
    strided: frozenset[str] = frozenset(),
) -> Kept:  # fmt: skip
    """Return what a run keeps of parameters, optimizer and strategy, given the parameters of one node, `[*]`.

    Args:
        strided: the parameters whose gradients are not contiguous, which the optimizer copies.
    """
    P = tree.num_bytes(params)
    params = {name: p.detach() for name, p in params.items()}
    one = {name: p[None] for name, p in params.items()}
    if not strategy.pure:  # a copy of everything for each node
        state = strategy.inner_optim.rule().init(one)
        each = Part(tree.num_bytes(state), nodes=num_nodes)
        return Kept(Part(P, nodes=num_nodes), each, Part(), Part(P, P, num_nodes), False)
    seen = exchanging(strategy, params, num_nodes, max_steps, strided)
    wide = widest(seen.state.params) > 1
    bytes_of = tree.num_bytes(strategy.inner_optim.rule().init(one))
    of_optimizer = Part(bytes_of, nodes=num_nodes) if widest(seen.state.optimizer) > 1 else Part(0, bytes_of)
    ratios = {name: p.numel() / max(1, seen.params[name].numel()) for name, p in params.items()}
    shared, each_node = state_bytes(seen.state.strategy, num_nodes, ratios)
    # Whole copies of all nodes' parameters are each node's; the rest is taken once.
    copies = seen.temporary_bytes // max(1, num_nodes * P)
    exchange = Part(copies * P, seen.temporary_bytes - copies * num_nodes * P, num_nodes)
    return Kept(
        Part(P, nodes=num_nodes) if wide else Part(0, P), of_optimizer,
        Part(round(each_node), round(shared), num_nodes), exchange, seen.rows == 1 < num_nodes,
    )  # fmt: skip


def parts_of(
    kept: Kept, buffer_bytes: int, batch_bytes: int, seen: Passing | None, plan: Plan, num_nodes: int, cut: bool
) -> dict[str, Part]:  # fmt: skip
    """Return the rows of the table: `batch_bytes` are those of one node; `cut`: its batch is computed in parts."""
    P = kept.params.per_node_bytes + kept.params.shared_bytes
    at_a_time = nodes_at_a_time(plan, num_nodes)
    in_parts = plan.engine == "loop" or at_a_time < num_nodes
    # Parts of the nodes write into storage that lasts; parts of the batch are added up beside it.
    copies = 2 if cut and in_parts and not kept.mean else 1
    gradients = Part(0, P) if kept.mean else Part(copies * P, 0, num_nodes)
    whole = P if kept.mean else P * num_nodes  # the gradients
    most = 0
    if seen is not None:
        most = plan.node_threads * seen.peak(at_a_time // plan.node_threads)
        if in_parts:
            most += whole - (plan.node_threads * P if plan.engine == "loop" and not kept.mean else 0)
        most += whole if cut else 0
    above = max(0, most - gradients.total_bytes)
    adding = max(0, 4 * whole - gradients.total_bytes) if cut else 0  # two terms, one weighted, and the sum
    each, rest = divmod(above, at_a_time)
    exchange = kept.exchange if kept.exchange.total_bytes >= adding else Part(0, adding)
    return {
        "parameters": kept.params,
        "gradients": gradients,
        "optimizer": kept.optimizer,
        "strategy": kept.strategy,
        "buffers": Part(buffer_bytes, nodes=num_nodes),
        "batch": Part(batch_bytes, nodes=num_nodes),
        "activations": Part(each, rest, at_a_time),
        "exchange": exchange,
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
