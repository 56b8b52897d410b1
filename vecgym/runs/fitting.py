"""Cut steps so that a run fits into a device's memory: fewer nodes in one call, fewer examples at a time."""

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
from vecgym.runs.memory import Estimator, MemoryEstimate, memory_limit
from vecgym.runs.options import FitOptions

# Where nothing can be measured, of what `benchmarks/memory.py` finds: tensors take up to 1.25 times their estimate.
MARGIN = 1.25
# Of a process on the CPU, besides: Python and torch take 300 MB; glibc keeps freed pieces, up to 260 MB were seen.
RESERVED_BYTES = 2**29


@dataclass(frozen=True)
class Sizes:
    """How a step is cut so that it fits: nodes in one call, and examples at a time; None: all."""

    chunk_size: int | None
    minibatch_size: int | None
    report: dict[str, Any]


_known: dict[tuple[Any, ...], Sizes] = {}  # of this process


def fitting_sizes(engine: Engine, options: FitOptions, batch: Any, max_steps: int, num_processes: int = 1) -> Sizes:
    """Return the largest cut of a step that fits into `options.max_memory_usage`.

    Tried in this order: all nodes in one call; half of them, a quarter ... one; then parts of the batch, from the
    largest divisor of its size downwards. So the choice depends on the machine's memory, the model, the data's shapes
    and the settings alone, and is the same in every run. The batch is never cut if `minibatch_size` was given, or for
    a model whose buffers change in training (batch norm): its statistics would be those of the parts.

    On CUDA a call of `engine.gradients` is measured, by the allocator's peak. Elsewhere `estimate_memory` estimates
    the step; a quarter is added and, on a CPU, `RESERVED_BYTES`. `report["measured"]` says which. Answers
    are kept for the process.

    Args:
        engine: prepared; its plan is where the search begins.
        batch: of the nodes here, `[L, B, ...]`.
        num_processes: that share a machine's memory.

    Raises:
        MemoryError: when nothing fits, saying what would.
    """
    assert options.max_memory_usage is not None
    share = 1 if engine.device.type == "cuda" else num_processes
    limit = int(options.max_memory_usage * memory_limit(engine.device) / share)
    shapes = [(tuple(x.shape), x.dtype) for x in tree.leaves([batch, engine.params])]
    key = (limit, options.num_nodes, max_steps, options.minibatch_size, engine.autocast, str(engine.device),
           *map(repr, (options.strategy, engine.model, engine.plan, shapes)))  # fmt: skip
    if key not in _known:
        _known[key] = _search(engine, options, batch, max_steps, limit)
    return _known[key]


def _search(engine: Engine, options: FitOptions, batch: Any, max_steps: int, limit: int) -> Sizes:
    assert engine.facts is not None
    num_local, batch_size = next((x.shape[0], x.shape[1] if x.dim() > 1 else 1) for x in tree.leaves(batch))
    measured = engine.device.type == "cuda"
    estimator = _estimator(engine, options, batch, max_steps, num_local)
    needed = 0
    for plan, size in _cuts(engine, num_local, batch_size, options.minibatch_size):
        estimate = MemoryEstimate(estimator.parts(plan, size), num_local, str(engine.device))
        needed = _with_margin(estimate.total_bytes, engine.device)
        if measured:
            needed = _measured(engine, plan, batch, size, estimate)
        if needed <= limit:
            report = {"limit_bytes": limit, "needed_bytes": needed, "measured": measured}
            return Sizes(plan.chunk_size, size, report)
    cut = " The batch is not cut, since the model has batch norm or the like." if engine.facts.mutated else ""
    raise MemoryError(
        f"{options.num_nodes} nodes with batch_size={batch_size} need {readable_bytes(needed)} at least, "
        f"{'measured' if measured else 'estimated'}, and max_memory_usage allows {readable_bytes(limit)}.{cut} Give a "
        "smaller batch_size, fewer nodes, or a larger max_memory_usage; vecgym.estimate_memory shows what takes how "
        "much."
    )


def _estimator(engine: Engine, options: FitOptions, batch: Any, max_steps: int, num_local: int) -> Estimator:
    """Return an estimator with a copy of the engine, whose own plan and facts stay."""
    copied = Engine(copy.deepcopy(engine.model), engine="loop", autocast=engine.autocast)
    of_one = tree.map_leaves(lambda x: x[0], batch)
    with torch.enable_grad():
        copied.prepare(tree.map_leaves(lambda x: x[None, : options.minibatch_size], of_one))
    return Estimator(copied, options.strategy, options.num_nodes, max_steps, of_one, num_local)


def _with_margin(estimated_bytes: int, device: torch.device) -> int:
    """Return what a process needs of a device for what is estimated."""
    return round(MARGIN * estimated_bytes) + (RESERVED_BYTES if device.type == "cpu" else 0)


def _cuts(engine: Engine, num_local: int, batch_size: int, given: int | None) -> Iterator[tuple[Plan, int | None]]:
    """Yield plans and minibatch sizes, from the largest down."""
    assert engine.facts is not None
    plan = engine.plan
    yield plan, given
    if plan.engine != "loop":
        chunk = min(plan.chunk_size or num_local, num_local)
        while chunk > 1:
            chunk = -(-chunk // 2)
            yield replace(plan, chunk_size=chunk), given
        plan = replace(plan, chunk_size=1)
    if given is None and not engine.facts.mutated:
        for size in range(batch_size - 1, 0, -1):
            if batch_size % size == 0:
                yield plan, size


def _measured(engine: Engine, plan: Plan, batch: Any, minibatch_size: int | None, estimate: MemoryEstimate) -> int:
    """Return the allocator's peak in a call of `gradients`, plus what else a run keeps; endless if it does not fit."""
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
