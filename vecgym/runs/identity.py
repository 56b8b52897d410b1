"""The identity of a run: what it must have in common with a saved one to resume it, and the differences in words.

Compared are:

- Settings: numbers, texts and tensors by value, functions and classes by their qualified names, other objects by their
  class and what their attributes hold, or by their `repr`. Learning rates at some steps show what schedules compute.
- The model: its modules, the shapes and dtypes of its parameters and buffers, and the loss of node 0's first batch, by
  the plain module in eval mode. A checkpoint holds that loss at its own parameters, so any initialisation resumes.
- The data: how many examples there are, and a digest of the first batch.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import math
import re
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from vecgym.collectives import StackedCollectives
from vecgym.core import rng, tree
from vecgym.core.errors import warn
from vecgym.core.objects import GENERATORS
from vecgym.core.tree import Tree
from vecgym.data import Batches
from vecgym.engine import Engine
from vecgym.engine.simulation import Simulation
from vecgym.engine.state import State
from vecgym.records import runfile
from vecgym.runs.options import FitOptions
from vecgym.runs.session import Session
from vecgym.strategy import Context, Strategy

VERSION = 5  # of the description of a run; earlier ones say something else
NOTHING = "nothing"
SHOWN = 6  # differences in a message
SAMPLES = 64  # steps at which learning rates are compared
TOLERANCE, OF_LOW_PRECISION = 1e-3, 3e-2  # of a loss, relative
FIRST_BATCH = "first batch of the training data"
LONG = 32  # entries; longer containers become a checksum
LONG_TEXT = 200  # characters; longer texts do too
MAX_DEPTH = 16
_PLAIN = (bool, int, float, str, type(None))


class Identity:
    """What makes a run itself: only a run that has it in common may resume from its checkpoints.

    Args:
        options: of the run; they are described as they are before its first step.
        simulation, train, session: of the run.

    Attributes:
        required: what must be the same: name -> plain value.
        arithmetic: what may differ, but then the last bits do, or more: name -> plain value.
    """

    def __init__(self, options: FitOptions, simulation: Simulation, train: Batches, session: Session) -> None:
        self.strategy = options.strategy  # as the user gave it
        self.simulation, self.session = simulation, session
        self.length = simulation.length
        self.counted = "updates" if options.strategy.asynchronous else "steps"
        first = train.batch(0)
        self.batch = tree.map_leaves(lambda x: x[:1].clone(), first)  # of node 0, in the first process
        rows = ([x[i] for x in tree.leaves(first)] for i in range(simulation.num_local))
        self.required = _required(options, simulation, train)
        self.arithmetic = {
            **_arithmetic(options, simulation, session),
            FIRST_BATCH: digest(torch.tensor(session.joined([int(digest(row), 16) for row in rows]))),
        }

    def record(self, state: State) -> dict[str, Any]:
        """Return it for a file, with the loss at the parameters of a state; the first process calls this."""
        return {
            "identity": self.required,
            "arithmetic": self.arithmetic,
            "learning_rates": self._learning_rates(sampled(self.simulation.max_steps, SAMPLES)),
            "loss": self._loss(state),
        }

    def check(self, contents: Mapping[str, Any], path: Path) -> None:
        """Raise a ValueError if a file is of another run; warn if the run will not have the same bits."""
        with runfile.naming(path):
            saved = dict(contents["identity"])
        check_noted(saved, path)
        with runfile.naming(path):
            differing = differences(saved, self.required) or self._different_rates(contents["learning_rates"])
            changed = differences(contents["arithmetic"], self.arithmetic)
        if differing:
            raise another_run(path, differing)
        if contents["step"] > self.length:
            raise ValueError(
                f"{path} has {contents['step']} {self.counted} already, and max_{self.counted}={self.length} are asked "
                "for: give more."
            )
        if changed:
            warn(
                f"The run resumed from {path} will not have the bits of an uninterrupted one:\n  "
                + "\n  ".join(changed)
            )

    def check_loss(self, contents: Mapping[str, Any], state: State, path: Path) -> None:
        """Raise a ValueError if the model, with the parameters of a file, does not have the file's loss.

        Nothing is known of other data; on another device a model may draw other random numbers, and a warning says so.
        """
        if contents["arithmetic"][FIRST_BATCH] != self.arithmetic[FIRST_BATCH]:
            return
        given = self.session.first(lambda: self._loss(state))
        engine = self.simulation.engine
        is_low = engine.autocast or any(p.element_size() < 4 for p in engine.params.values())
        if same_loss(contents["loss"], given, OF_LOW_PRECISION if is_low else TOLERANCE):
            return
        line = f"loss of node 0's first batch at the saved parameters: saved {contents['loss']:.6g}, given {given:.6g}"
        if contents["arithmetic"]["device"] == self.arithmetic["device"]:
            raise another_run(path, [line])
        warn(f"{path} may be of another run:\n  {line}")

    def _loss(self, state: State) -> float:
        first = {name: x[:1] for name, x in {**state.params, **state.buffers}.items()}
        params = {name: first.pop(name) for name in state.params}
        return eval_loss(self.simulation.engine, params, first, self.batch)

    def _different_rates(self, saved: Mapping[int, list[float]]) -> list[str]:
        """Return, as a line, the first difference between the learning rates of the saved run and of this one."""
        given = self._learning_rates(step for step in saved if step < self.simulation.max_steps)
        return differences(in_words({step: saved[step] for step in given}), in_words(given))[:1]

    def _learning_rates(self, steps: Iterable[int]) -> dict[int, list[float]]:
        return learning_rates(self.strategy, self.simulation.comm.num_nodes, self.simulation.max_steps, steps)


def another_run(path: Path, differing: list[str]) -> ValueError:
    return ValueError(
        f"{path} is of another run:\n  " + "\n  ".join(differing) + "\n"
        "Give what it was saved with, or begin anew with resume=False and another save_dir."
    )


def _required(options: FitOptions, simulation: Simulation, train: Batches) -> dict[str, Any]:
    settings = ("seed", "batch_size", "shuffle", "autocast")
    given = {"collate_fn": (options.dataloader_kwargs or {}).get("collate_fn")}
    if options.strategy.asynchronous:  # the order of its events depends on them
        given |= {"compute": options.compute, "network": options.network}
    if options.availability is not None:  # it may ask how long the nodes compute
        given |= {"availability": options.availability, "compute": options.compute}
    return {
        "description": VERSION,
        "num_nodes": simulation.comm.num_nodes,
        **{name: getattr(options, name) for name in settings},
        **settings_of(options.strategy, "strategy"),
        **of_model(simulation.engine.model, simulation.engine.params),
        "examples of each node": str(list(simulation.num_examples or ())),
        "steps per epoch": train.steps_per_epoch,
        **dict(item for name, value in given.items() for item in settings_of(value, name).items()),
    }


def _arithmetic(options: FitOptions, simulation: Simulation, session: Session) -> dict[str, Any]:
    plan = simulation.engine.plan
    return {
        "device": simulation.engine.device.type,
        "engine": plan.engine,
        "chunk_size": plan.chunk_size,
        "node_threads": plan.node_threads,
        **({"channels_last": True} if plan.channels_last else {}),
        "minibatch_size": options.minibatch_size,
        "exact": options.exact,
        **({} if options.exact else {"num_processes": session.num_processes}),
        "torch": str(torch.__version__),
    }


def check_noted(saved: Mapping[str, Any], where: Any) -> None:
    """Raise a ValueError unless the description of a saved run can be compared with one of today."""
    if saved.get("description") != VERSION:
        raise ValueError(
            f"{where} was written by another version of vecgym, which describes runs differently: they "
            "cannot be compared. Give another path to start anew, or resume with that version of vecgym."
        )


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are the same: 1 is not 1.0, and nan is nan."""
    return type(a) is type(b) and (a == b or (a != a and b != b))


def differences(
    saved: Mapping[str, Any], given: Mapping[str, Any], same: Callable[[Any, Any], bool] = same
) -> list[str]:
    """Return the differences, a line each.

    >>> differences({"seed": 1, "strategy.H": 3}, {"seed": 1, "strategy.H": 5})
    ['strategy.H: saved 3, given 5']
    """
    pairs = {name: (saved.get(name, NOTHING), given.get(name, NOTHING)) for name in {**saved, **given}}
    lines = [f"{name}: saved {a}, given {b}" for name, (a, b) in pairs.items() if not same(a, b)]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


# ------------------------------------------------------------------------------------------------- what is computed


def sampled(num_steps: int, number: int) -> list[int]:
    """Return the first steps, and others evenly spaced up to the last.

    >>> sampled(100, 4)
    [0, 25, 50, 74, 99]
    """
    steps = {*range(number // 4), *(round(i * (num_steps - 1) / number) for i in range(number + 1))}
    return sorted(step for step in steps if 0 <= step < num_steps)


def learning_rates(strategy: Strategy, num_nodes: int, num_steps: int, steps: Iterable[int]) -> dict[int, list[float]]:
    """Return the inner learning rate at some steps, or that of each node; nothing if the optimizer has none.

    >>> from vecgym.strategy import FedAvgStrategy
    >>> learning_rates(FedAvgStrategy("sgd", lr=0.5, warmup_steps=2), 4, 10, [0, 1, 2])
    {0: [0.0], 1: [0.25], 2: [0.5]}
    """
    comm, found = StackedCollectives(num_nodes), {}
    for step in steps:
        try:
            lr = strategy.lr(Context(comm, step=step, max_steps=num_steps))
        except AttributeError:
            return {}
        found[step] = torch.as_tensor(lr, dtype=torch.float64).detach().reshape(-1).tolist()
    return found


def in_words(rates: Mapping[int, list[float]]) -> dict[str, str]:
    """Return learning rates as plain values by name, to nine digits.

    >>> in_words({3: [0.1, 0.2]})
    {'learning rate of step 3': '0.1, 0.2'}
    """
    return {f"learning rate of step {step}": ", ".join(f"{lr:.9g}" for lr in each) for step, each in rates.items()}


def eval_loss(engine: Engine, params: Tree, buffers: Tree, batch: Any) -> float:
    """Return the loss of one node, everything `[1, *]`, by the plain module in eval mode; nan if it has none there.

    >>> from vecgym.models import Line
    >>> eval_loss(Engine(Line()), {"w": torch.tensor([1.0])}, {}, torch.tensor([[3.0]]))
    4.0
    """
    with rng.private(0):
        try:
            return float(engine.measures(params, buffers, batch, own_batches=True)["loss"])
        except Exception:  # a model may be made for training alone: then its loss is not compared
            return math.nan


def same_loss(saved: float, given: float, tolerance: float = TOLERANCE) -> bool:
    """Whether two losses of a model are the same up to rounding, or there was none to compare with.

    >>> same_loss(2.0, 2.001), same_loss(2.0, 2.01), same_loss(math.nan, 2.0)
    (True, False, True)
    """
    return math.isnan(saved) or math.isclose(saved, given, rel_tol=tolerance, abs_tol=1e-6)


# ----------------------------------------------------------------------------------------------------------- settings


def of_model(model: nn.Module, trained: Collection[str], name: str = "model") -> dict[str, Any]:
    """Describe a model without the values of its tensors: name -> plain value.

    >>> of_model(nn.Linear(1, 2, bias=False), ["weight"])["model, parameter weight"]
    'float32 [2, 1]'
    """
    forms = {f"parameter {n}": tree.form(p) + ("" if n in trained else ", not trained")
             for n, p in model.named_parameters()}  # fmt: skip
    forms |= {f"buffer {n}": tree.form(b) for n, b in model.named_buffers()}
    return {**settings_of(model, name), **{f"{name}, {which}": form for which, form in forms.items()}}


def settings_of(x: Any, name: str, seen: dict[int, Any] | None = None, depth: int = 0) -> dict[str, Any]:
    """Describe what an object holds: name -> plain value. Nothing depends on addresses, or on the order of names.

    >>> class Spec:
    ...     def __init__(self):
    ...         self.H, self.lr = 3, [0.1, None]
    >>> settings_of(Spec(), "spec")
    {'spec': 'Spec', 'spec.H': 3, 'spec.lr': 'list of 2', 'spec.lr[0]': 0.1, 'spec.lr[1]': None}
    >>> settings_of(torch.zeros(2), "x") == settings_of(torch.ones(2), "x")
    False
    """
    seen = {} if seen is None else seen  # id -> the object, which stays alive: no other gets its id
    what, held = _described(x)
    if held and (id(x) in seen or depth > MAX_DEPTH):
        return {name: "see above"}
    seen[id(x)] = x
    is_long = len(held) > LONG
    inner: dict[str, Any] = {}
    for part, value in held.items():
        inner |= settings_of(value, part if is_long else name + part, seen, depth + 1)
    if not hasattr(x, "__dict__"):  # a list may be shared, or an equal one: no matter
        del seen[id(x)]
    if is_long:
        return {name: f"{what} with checksum {_hashed(repr(sorted(inner.items())).encode())}"}
    return {name: what, **inner}


def _described(x: Any) -> tuple[Any, dict[str, Any]]:
    """Return what an object is, as a plain value, and what it holds, by the ends of their names."""
    kind = type(x).__name__
    if isinstance(x, str) and len(x) > LONG_TEXT:
        return f"text of {len(x)} characters with checksum {_hashed(x.encode())}", {}
    if type(x) in _PLAIN:
        return x, {}
    if isinstance(x, (Tensor, np.ndarray, np.generic)):
        return _shown(x), {}
    if isinstance(x, GENERATORS):  # whose state changes with every use
        return kind + (f" of seed {x.initial_seed()}" if isinstance(x, torch.Generator) else ""), {}
    if isinstance(x, nn.Module):
        return (f"{kind}({x.extra_repr()})" if x.extra_repr() else kind), _named(dict(x.named_children()))
    if isinstance(x, Dataset):
        return kind + (f" of {len(x)}" if hasattr(x, "__len__") else ""), {}
    if isinstance(x, (Mapping, list, tuple, deque)):
        entries = x.items() if isinstance(x, Mapping) else enumerate(x)
        return f"{kind} of {len(x)}", {f"[{key!r}]": value for key, value in entries}
    if isinstance(x, (set, frozenset)):
        return f"{kind} of {sorted(map(repr, x))}", {}
    if isinstance(x, functools.partial):
        return kind, {".func": x.func, ".args": x.args, ".keywords": x.keywords}
    if (called := getattr(x, "__qualname__", None)) is not None:
        return called, ({".self": x.__self__} if isinstance(x, types.MethodType) else {})
    if isinstance(x, PurePath):  # files may move
        return x.name, {}
    if hasattr(x, "__dict__") and not isinstance(x, (enum.Enum, types.ModuleType)):
        return kind, _named({key: value for key, value in vars(x).items() if not _is_private(x, key, value)})
    return re.sub(r" at 0x[0-9a-f]+", "", repr(x)), {}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f".{key}": value for key, value in sorted(values.items())}


def _is_private(x: Any, key: str, value: Any) -> bool:
    """Whether an attribute belongs to how a library's object works, and is no setting."""
    return key.startswith("_") and any(type(y).__module__.startswith(("vecgym.", "torch.")) for y in (x, value))


def _shown(x: Any) -> str:
    form = tree.form(x)
    if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_meta):
        return form
    return f"{x.item()}, {form}" if math.prod(x.shape) == 1 else f"{form} with checksum {digest(x)}"


def digest(values: Any) -> str:
    """Return a checksum of all tensors, or arrays, in nested dicts, lists and tuples.

    >>> digest(torch.ones(2)) == digest([torch.ones(2)]), digest(torch.ones(2)) == digest(torch.zeros(2))
    (True, False)
    """
    return _hashed(*map(_bytes_of, [values] if isinstance(values, np.ndarray) else tree.leaves(values)))


def _bytes_of(x: Any) -> Any:
    if isinstance(x, Tensor):
        x = x.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _hashed(*parts: Any) -> str:
    checksum = hashlib.blake2b(digest_size=7)
    for part in parts:
        checksum.update(part)
    return checksum.hexdigest()
