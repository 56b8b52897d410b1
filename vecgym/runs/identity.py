"""The identity of a run: what it must have in common with a saved one to resume it, and the differences in words."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.data import Batches
from vecgym.engine.simulation import Simulation
from vecgym.runs.fingerprint import fingerprint_of, is_code
from vecgym.runs.options import FitOptions
from vecgym.strategy import Context, Strategy

VERSION = 3  # of the description of a run; earlier ones say too little
NOTHING = "nothing"
SHOWN = 6  # differences in a message
SAMPLES = 64  # steps at which learning rates are compared


def identity(simulation: Simulation, train: Batches, options: FitOptions) -> dict[str, Any]:
    """Return what must be the same: name -> plain value."""
    settings = ("seed", "batch_size", "shuffle", "autocast")
    model, trained = simulation.engine.model, simulation.engine.params
    parameters = {
        name: tree.form(p) + ("" if name in trained else ", not trained") for name, p in model.named_parameters()
    }
    return {
        **noted(),
        "num_nodes": simulation.comm.num_nodes,
        **{name: getattr(options, name) for name in settings},
        **fingerprint_of(options.strategy, "strategy"),
        **{f"parameter {name}": kind for name, kind in parameters.items()},
        **{f"buffer {name}": tree.form(b) for name, b in model.named_buffers()},
        "examples of each node": str(list(simulation.num_examples or ())),
        "steps per epoch": train.steps_per_epoch,
        **fingerprint_of(model, "model", weights=False),  # a checkpoint has their values
        **fingerprint_of((options.dataloader_kwargs or {}).get("collate_fn"), "collate_fn"),
    }


def noted() -> dict[str, Any]:
    """Return the first entries of the description of a run, which say what it can be compared with."""
    return {"description": VERSION, "python": "{}.{}".format(*sys.version_info)}


def check_noted(saved: Mapping[str, Any], where: Any) -> None:
    """Raise a ValueError unless the description of a saved run can be compared with one of today."""
    if saved.get("description") != VERSION:
        raise ValueError(
            f"{where} was written by another version of vecgym, which describes runs differently: whether it is "
            "this one cannot be told. Give another path to begin anew, or use that version of vecgym to go on."
        )


def arithmetic(
    simulation: Simulation, options: FitOptions, num_processes: int, data: Mapping[str, str]
) -> dict[str, Any]:
    """Return what may differ, but then the last bits do, or more: name -> plain value."""
    plan = simulation.engine.plan
    return {
        "device": simulation.engine.device.type,
        "engine": plan.engine,
        "chunk_size": plan.chunk_size,
        "node_threads": plan.node_threads,
        "minibatch_size": options.minibatch_size,
        "exact": options.exact,
        **({} if options.exact else {"num_processes": num_processes}),
        "torch": str(torch.__version__),
        "Python, so that the code of functions is not compared": noted()["python"],
        **data,
    }


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return the differences, a line each.

    >>> differences({"seed": 1, "strategy.H": 3}, {"seed": 1, "strategy.H": 5})
    ['strategy.H: saved 3, given 5']
    """
    names = [*saved, *(name for name in given if name not in saved)]
    pairs = [(name, saved.get(name, NOTHING), given.get(name, NOTHING)) for name in names if name != "python"]
    if saved.get("python") != given.get("python"):  # whose code differs
        pairs = [(name, a, b) for name, a, b in pairs if not (is_code(a) or is_code(b))]
    lines = [difference(name, a, b) for name, a, b in pairs if not _same(a, b)]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


def difference(name: str, saved: Any, given: Any) -> str:
    """Say what differs.

    >>> difference("strategy.H", 3, 5), difference("model.forward()", "code 0a", "code 0b")
    ('strategy.H: saved 3, given 5', 'model.forward(): other code')
    """
    both = is_code(saved) and is_code(given)
    return f"{name}: other code" if both else f"{name}: saved {saved}, given {given}"


def learning_rates(
    strategy: Strategy, max_steps: int, num_nodes: int, steps: Iterable[int] | None = None
) -> dict[int, list[float]]:
    """Return the inner learning rate at these steps, as far as the run has them; None: at a sample of its steps."""
    if steps is None:
        first = range(min(max_steps, SAMPLES // 4))
        steps = {*first, *(round(i * (max_steps - 1) / SAMPLES) for i in range(SAMPLES + 1))}
    chosen = sorted(step for step in steps if 0 <= step < max_steps)
    return {step: _lr(strategy, step, max_steps, num_nodes) for step in chosen}


def _lr(strategy: Strategy, step: int, max_steps: int, num_nodes: int) -> list[float]:
    try:
        lr = strategy.lr(Context(StackedCollectives(num_nodes), step=step, max_steps=max_steps))
    except AttributeError:  # an optimizer without one
        return []
    return torch.as_tensor(lr, dtype=torch.float64).detach().reshape(-1).tolist()


def check_learning_rates(
    saved: Mapping[int, list[float]], strategy: Strategy, max_steps: int, num_nodes: int
) -> list[str]:
    """Return, as a line, the first difference between the learning rates of the saved run and of this one."""
    for step, now in learning_rates(strategy, max_steps, num_nodes, saved).items():
        before = saved[step]
        if len(now) != len(before) or not all(map(_close, before, now)):
            return [f"learning rate of step {step}: saved {_short(before)}, given {_short(now)}"]
    return []


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))


def _short(values: list[float]) -> str:
    return f"{values[0]:.6g}" if len(values) == 1 else str([float(f"{x:.6g}") for x in values[:SHOWN]])


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))
