"""What two runs must have in common for one to go on where the other stopped, and what differs, said in words."""

from __future__ import annotations

import functools
import hashlib
import math
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vecgym import tree
from vecgym.collectives import StackedCollectives
from vecgym.data import Batches
from vecgym.settings import FitOptions
from vecgym.simulate import Simulation
from vecgym.strategy import Context, Strategy

NOTHING = "nothing"
SHOWN = 6  # differences in a message
SAMPLES = 64  # steps at which learning rates are compared


def identity(
    strategy: Strategy, model: nn.Module, simulation: Simulation, train: Batches, options: FitOptions
) -> dict[str, Any]:
    """What must be the same: name -> plain value."""
    settings = ("seed", "batch_size", "shuffle", "autocast")
    trained = simulation.engine.params
    parameters = {name: _form(p) + ("" if name in trained else ", not trained") for name, p in model.named_parameters()}
    return {
        "num_nodes": simulation.comm.num_nodes,
        **{name: getattr(options, name) for name in settings},
        **dict(described(strategy, "strategy")),
        **{f"parameter {name}": kind for name, kind in parameters.items()},
        **{f"buffer {name}": _form(b) for name, b in model.named_buffers()},
        "examples of each node": str(list(simulation.num_examples or ())),
        "steps per epoch": train.steps_per_epoch,
    }


def arithmetic(
    simulation: Simulation, options: FitOptions, device: torch.device, num_processes: int, first_batch: str
) -> dict[str, Any]:
    """What may differ, but then the last bits do, or more: name -> plain value."""
    plan = simulation.engine.plan
    return {
        "device": device.type,
        "engine": plan.engine,
        "chunk_size": plan.chunk_size,
        "node_threads": plan.node_threads,
        "minibatch_size": options.minibatch_size,
        "exact": options.exact,
        **({} if options.exact else {"num_processes": num_processes}),
        "torch": str(torch.__version__),
        "first batch of the training data": first_batch,
    }


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """What differs, a line each.

    >>> differences({"seed": 1, "strategy.H": 3}, {"seed": 1, "strategy.H": 5})
    ['strategy.H: saved 3, given 5']
    """
    names = [*saved, *(name for name in given if name not in saved)]
    pairs = [(name, saved.get(name, NOTHING), given.get(name, NOTHING)) for name in names]
    found = [f"{name}: saved {a}, given {b}" for name, a, b in pairs if not _same(a, b)]
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return found[:SHOWN] + more


def learning_rates(strategy: Strategy, max_steps: int, num_nodes: int) -> dict[int, list[float]]:
    """The inner learning rate at some of a run's steps."""
    first = min(max_steps, SAMPLES // 4)
    steps = {*range(first), *(round(i * (max_steps - 1) / SAMPLES) for i in range(SAMPLES + 1))}
    return {step: _lr(strategy, step, max_steps, num_nodes) for step in sorted(steps) if 0 <= step < max_steps}


def check_learning_rates(saved: Mapping[int, list[float]], strategy: Strategy, max_steps: int, num_nodes: int) -> str:
    """ "" where the given strategy has the learning rates of the saved run; else what differs."""
    for step, before in saved.items():
        if step >= max_steps:
            continue
        now = _lr(strategy, step, max_steps, num_nodes)
        alike = len(now) == len(before) and all(
            math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b)) for a, b in zip(before, now)
        )
        if not alike:
            return f"learning rate of step {step}: saved {_short(before)}, given {_short(now)}"
    return ""


def _lr(strategy: Strategy, step: int, max_steps: int, num_nodes: int) -> list[float]:
    try:
        lr = strategy.lr(Context(StackedCollectives(num_nodes), step, max_steps))
    except AttributeError:  # an optimizer without one
        return []
    return torch.as_tensor(lr, dtype=torch.float64).detach().reshape(-1).tolist()


def _short(values: list[float]) -> str:
    return f"{values[0]:.6g}" if len(values) == 1 else str([float(f"{x:.6g}") for x in values[:SHOWN]])


def described(x: Any, name: str, seen: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Everything that an object holds, as (name, plain value), but for attributes that begin with "_".

    >>> class Spec:
    ...     def __init__(self):
    ...         self.H, self.lr = 3, [0.1, None]
    >>> list(described(Spec(), "spec"))
    [('spec', 'Spec'), ('spec.H', 3), ('spec.lr', 'list of 2'), ('spec.lr[0]', 0.1), ('spec.lr[1]', None)]
    """
    if x is None or type(x) in (bool, int, float, str):
        yield name, x
    elif id(x) in seen:
        yield name, "see above"
    else:
        seen = (*seen, id(x))
        yield name, _kind(x)
        for part, value in _parts(x):
            yield from described(value, name + part, seen)


def _parts(x: Any) -> list[tuple[str, Any]]:
    if isinstance(x, (Tensor, np.ndarray, type, types.ModuleType, types.BuiltinFunctionType, torch.dtype)):
        return []
    if isinstance(x, dict):
        return [(f"[{key!r}]", value) for key, value in x.items()]
    if isinstance(x, (list, tuple)):
        return [(f"[{i}]", value) for i, value in enumerate(x)]
    if isinstance(x, functools.partial):
        return _numbers({"func": x.func, **dict(enumerate(x.args)), **x.keywords})
    if isinstance(x, types.MethodType):
        return []
    if isinstance(x, types.FunctionType):
        held: dict[Any, Any] = {**dict(enumerate(x.__defaults__ or ())), **(x.__kwdefaults__ or {})}
        held |= {name: _closed_over(cell) for name, cell in zip(x.__code__.co_freevars, x.__closure__ or ())}
        return _numbers(held)
    public = {key: value for key, value in getattr(x, "__dict__", {}).items() if not key.startswith("_")}
    return [(f".{key}", value) for key, value in public.items()]


def _numbers(held: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Of what a function holds, what is simple: it may close over a whole script's settings."""
    simple = (bool, int, float, str, Tensor, types.FunctionType)
    return [(f".{name}", value) for name, value in held.items() if isinstance(value, simple)]


def _closed_over(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _kind(x: Any) -> str:
    """What an object is, by its class or contents, in a few words."""
    if isinstance(x, Tensor):
        return f"{x.item()}, {_form(x)}" if x.numel() == 1 else f"{_form(x)} with checksum {digest(x)}"
    if isinstance(x, np.ndarray):
        return _kind(torch.from_numpy(np.ascontiguousarray(x))) if x.dtype.kind in "biuf" else _words(x)
    if isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType)):
        return x.__qualname__
    if isinstance(x, (dict, list, tuple)):
        return f"{type(x).__name__} of {len(x)}"
    return type(x).__name__ if hasattr(x, "__dict__") else _words(x)


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _words(x: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(x))


def digest(values: Any) -> str:
    """A checksum of all tensors in nested dicts, lists and tuples.

    >>> digest(torch.ones(2)) == digest([torch.ones(2)]), digest(torch.ones(2)) == digest(torch.zeros(2))
    (True, False)
    """
    found = hashlib.blake2b(digest_size=7)
    for x in tree.leaves(values):
        found.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))
