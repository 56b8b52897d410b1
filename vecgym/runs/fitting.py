"""Steps cut so that a run fits into a device's memory: fewer nodes in one call, fewer examples at a time."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from vecgym.collectives.ledger import readable_bytes
from vecgym.core import tree
from vecgym.engine import Engine, Plan
from vecgym.runs.memory import Activations, Kept, MemoryEstimate, activations, kept_by, memory_limit, parts_of
from vecgym.strategy import Strategy
from vecgym.strategy.per_rank import as_strategy

MARGIN = 2.0  # whole steps of convolutions take up to 1.8 times their estimate: `benchmarks/memory.py`


@dataclass(frozen=True)
class Sizes:
    """How a step is cut so that it fits: nodes in one call, and examples at a time; None: all."""

    chunk_size: int | None
    minibatch_size: int | None
    report: dict[str, Any]


_known: dict[tuple[Any, ...], Sizes] = {}  # of this process


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
    """Return the largest cut of a step that fits into `fraction` of the device's memory.

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
    if key not in _known:
        _known[key] = _search(engine, strategy, batch, num_nodes, max_steps, limit, minibatch_size)
    return _known[key]


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
    kept = kept_by(as_strategy(strategy, engine.model), engine.params, num_nodes, max_steps)
    # Other nodes are in other processes.
    params, optimizer, modules = (replace(part, nodes=min(part.nodes, num_local)) for part in kept[:3])
    kept = Kept(params, optimizer, modules, kept.mean)
    measured = engine.device.type == "cuda"
    buffers, of_one = tree.num_bytes(engine.buffers), tree.num_bytes(batch) // num_local
    passing: dict[int | None, Activations] = {}
    needed = 0
    for plan, size in _cuts(engine, num_local, batch_size, minibatch_size):
        if size not in passing:
            passing[size] = _activations_of(engine, batch, size)
        estimate = MemoryEstimate(
            parts_of(kept, buffers, of_one, passing[size], plan, num_local), num_local, str(engine.device)
        )
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
    """Yield plans and minibatch sizes, from the largest down."""
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


def _activations_of(engine: Engine, batch: Any, minibatch_size: int | None) -> Activations:
    """Return `activations` by a copy of an engine, whose own plan and facts stay."""
    model = copy.deepcopy(engine.model)
    return activations(Engine(model, engine="loop", autocast=engine.autocast), batch, minibatch_size)


def _measured(engine: Engine, plan: Plan, batch: Any, minibatch_size: int | None, estimate: MemoryEstimate) -> int:
    """Return the allocator's peak over a call of `gradients`, and what else a run keeps; too much: no end."""
    device, parts, num_local = engine.device, estimate.parts, estimate.num_nodes
    params = {name: p.detach()[None].expand(num_local, *p.shape).clone() for name, p in engine.params.items()}
    buffers = {name: b[None].clone() for name, b in engine.buffers.items()}
    usual = engine.plan
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
        engine.use(usual)
        engine.release()
        del params
        torch.cuda.empty_cache()
    passing = torch.cuda.max_memory_allocated(device) - before
    lasting = sum(parts[name].total_bytes for name in ("parameters", "optimizer", "strategy", "batch", "buffers"))
    return lasting + max(passing, parts["gradients"].total_bytes + parts["exchange"].total_bytes)
