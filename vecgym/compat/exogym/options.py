"""Options that EXO Gym's scripts and documents give, and that do nothing in the place where they stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vecgym.core.errors import warn

# Of a strategy: EXO Gym stores whatever it is given, so that its own examples give some options to all strategies.
OF_STRATEGIES = {
    "H": "this strategy exchanges at every step",
    "p": "EXO Gym never reads it; SPARTA's fraction is p_sparta",
    "p_sparta": "this strategy is not SPARTA",
    "sparta_interval": "this strategy is not SPARTA with DiLoCo",
    "async_sparta_delay": "this strategy is not SPARTA",
    "island_size": "this strategy has no islands",
    "outer_optim": "this strategy has no outer optimizer",
    "outer_optim_spec": "this strategy has no outer optimizer",
    "outer_lr": "this strategy has no outer optimizer",
    "compression_decay": "this strategy is not DeMo",
    "compression_topk": "this strategy is not DeMo",
    "compression_chunk": "this strategy is not DeMo",
    "weight_decay": "give it to the OptimSpec",
    "max_norm": "this strategy does not clip",
    "optim_spec": "this strategy has no optimizer of its own",
    "communication_modules": "this strategy has modules of its own",
}

# Of `fit` and `Trainer`.
OF_RUNS = {
    "start_port": "there are no processes, and so no ports",
    "port": "there are no processes, and so no ports",
    "devices": "all nodes are on one device; give device='cuda:1', say",
    "force_minibatch_recalculate": "nothing is probed: batches are computed whole unless minibatch_size is given",
}


def warn_without_effect(whose: str, given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Warn for each option given (not None) that has a reason to do nothing."""
    for name, value in given.items():
        if value is not None and name in reasons:
            warn(f"{whose}: {name}={value!r} has no effect: {reasons[name]}.")
