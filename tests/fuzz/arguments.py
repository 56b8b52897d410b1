"""Bad arguments for every public callable: a call that works, with one or two arguments replaced by hostile values.

What may come of it: the call works (unless the value must be wrong by the argument's annotation), or vecgym itself
raises a `ValueError`, a `TypeError`, or an error that the docstring names under "Raises", with a message that has the
argument's name or what was given. Anything else is a failure: other errors, errors of what is underneath (torch, numpy,
Python), messages that say nothing, keywords that are swallowed, hangs.

Values that only vecgym's own code hands on, and tests of each call would cost every step of a run (trees of tensors,
states, contexts; see `HANDED_ON`), need only not hang, and calls with them take no unknown keyword.
"""

from __future__ import annotations

import ast
import contextlib
import decimal
import functools
import inspect
import random
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import vecgym
from tests.fuzz import calls
from tests.fuzz.calls import Target, targets
from tests.fuzz.common import Case, Failure, Hangs, Outcome, Refusal, time_limit
from tests.fuzz.place import a_new_folder, as_it_was
from vecgym.compress import Codec, PowerSGD
from vecgym.strategy import CommunicateOptimizeStrategy, DiLoCoStrategy, Strategy

NAME = "arguments"
LIMIT_S = 20.0  # the slowest good call takes 2

HOSTILE: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "False": lambda: False, "0": lambda: 0, "-1": lambda: -1,
    "1": lambda: 1, "3": lambda: 3, "2**62": lambda: 2**62, "10**30": lambda: 10**30, "0.5": lambda: 0.5,
    "2.0": lambda: 2.0, "2.5": lambda: 2.5, "-0.5": lambda: -0.5, "nan": lambda: float("nan"),
    "inf": lambda: float("inf"), "-inf": lambda: float("-inf"), "1e300": lambda: 1e300, "1j": lambda: 1j,
    "np.int64(2)": lambda: np.int64(2), "np.float32(0.5)": lambda: np.float32(0.5), "np.nan": lambda: np.float64("nan"),
    "np.True_": lambda: np.True_, "Decimal(1)": lambda: decimal.Decimal(1), "'abc'": lambda: "abc", "''": lambda: "",
    "'1'": lambda: "1", "'a\\0b'": lambda: "a\0b", "b'x'": lambda: b"x", "[]": list, "()": tuple, "{}": dict,
    "[1]": lambda: [1], "[1, 2, 3]": lambda: [1, 2, 3], "[nan]": lambda: [float("nan")], "['a']": lambda: ["a"],
    "[None]": lambda: [None], "{'a': 1}": lambda: {"a": 1}, "{1: 2}": lambda: {1: 2}, "set()": set,
    "range(3)": lambda: range(3), "object()": object, "a function": lambda: lambda *args: None,
    "a generator": lambda: (i for i in range(3)), "int": lambda: int, "nn.Linear": lambda: nn.Linear,
    "nn.Linear(2, 2)": lambda: nn.Linear(2, 2), "a strategy": calls.strategy, "its class": lambda: DiLoCoStrategy,
    "a trainer": calls.trained, "Path('gone/x')": lambda: Path("gone/x"), "torch.float16": lambda: torch.float16,
    "torch.device('meta')": lambda: torch.device("meta"), "tensor(2)": lambda: torch.tensor(2),
    "tensor(nan)": lambda: torch.tensor(float("nan")), "tensor([])": lambda: torch.tensor([]),
    "tensor([1., 2., 3.])": lambda: torch.tensor([1.0, 2.0, 3.0]), "tensor([True])": lambda: torch.tensor([True]),
    "tensor of complex": lambda: torch.ones(2, dtype=torch.complex64), "tensor of half": lambda: torch.ones(2).half(),
    "tensor on meta": lambda: torch.ones(2, device="meta"), "tensor of 5 dims": lambda: torch.ones(1, 2, 1, 2, 1),
    "tensor of -inf": lambda: torch.full((2, 2), float("-inf")), "np.array([1, 2])": lambda: np.array([1, 2]),
    "np.array of objects": lambda: np.array([None, "a"]), "{'w': None}": lambda: {"w": None},
}  # fmt: skip
UNKNOWN = {"seeds": 1, "batchsize": 2, "learning_rate": 0.1, "H_": 3, "deivce": "cpu", "nesterow": True}
LONG = (
    "max_steps", "num_epochs", "iterations", "steps", "num_steps", "samples", "num_tokens", "max_rounds", "timeout_s",
    "eval_iters", "max_configs", "tolerance", "count", "num_layers", "step", "num_runs", "runs_per_step", "longer",
    "more", "seconds",
)  # fmt: skip
WORK = {"2**62", "10**30", "1e300", "inf"}  # of these: as many steps, or layers, as were asked for are no hang

# What only vecgym's own code hands on: of these modules everything, ...
UNDERNEATH = (
    "vecgym.collectives", "vecgym.compress", "vecgym.core.errors", "vecgym.runs.evaluation",
    "vecgym.runs.multiprocess", "vecgym.collectives.ledger", "vecgym.engine", "vecgym.runs.memory",
    "vecgym.strategy.base.",
    "vecgym.core.nodes", "vecgym.core.rng", "vecgym.core.devices",
    "vecgym.runs.rollout.", "vecgym.optim.schedule", "vecgym.simulation", "vecgym.collectives.topology",
    "vecgym.strategy.HALoSStrategy.region_of",
    "vecgym.meta.Curve.", "vecgym.meta.Exchanges.", "vecgym.meta.Mixing.",
    "vecgym.core.tree", "vecgym.runs.verification.", "vecgym.optim.ElementwiseRule", "vecgym.optim.PerNodeRule",
    "vecgym.optim.Optimizer.",
    "vecgym.plot.default_window", "vecgym.data.Batches.", "vecgym.OptimSpec.mapped",
    "vecgym.plot.pareto_front",
    "vecgym.plot.smooth", "vecgym.Ledger", "vecgym.availability.Presence", "vecgym.availability.by_rounds",
)  # fmt: skip
# ... but for these, which users call and give to a strategy, ...
ENTRANCES = {
    *(f"vecgym.compress.{name}" for name in (
        "Chain", "ChunkedTopK", "PowerSGD", "QSGD", "Quantise", "RandomK", "StatQuantise", "Ternary", "TopK",
        "make_codec")),
    *(f"vecgym.collectives.topology.{name}" for name in (
        "check_doubly_stochastic", "complete", "exponential", "metropolis_weights", "one_peer_exponential", "ring",
        "second_eigenvalue", "spectral_gap", "torus")),
    "vecgym.optim.schedule.lambda_cosine",
}  # fmt: skip
# ... the constructors of what vecgym makes and users read, ...
MADE = {
    f"vecgym.{name}" for name in (
        "clock.AsyncTimeline",
        "meta.Report",
        "DivergenceError", "History", "Influence", "MemoryEstimate", "Nodes", "ProcessError",
        "Saved", "SweepResult")
}  # fmt: skip
# ... the methods that a run calls, of what users write or give, ...
PROTOCOL = {
    "init", "active_nodes", "agree", "send", "receive", "write", "read", "within", "check_common", "through_server",
    "gather", "shares", "outer", "outer_lr", "epsilon", "agreed", "made", "following",
    "marks", "trains", "senders", "facts", "times", "parts", "numbered", "timetable", "check_run", "alike", "rates",
    "outer_rate", "drawn", "load_hidden_state", "check_optimizer", "outer_parameters",
    "optimize", "lr", "select", "encode", "decode", "average", "reduce", "compresses", "update",
    "mixing", "residual", "step_bytes", "exchange", "check", "check_steps", "check_present", "idle",
    "start", "resume", "log", "finish", "append", "forward", "logits", "val_metrics", "rate", "groups", "rule", "at",
    "after_step", "own", "count", "draw", "of", "correct", "steps_of_rounds", "check_updates",
    "server_of", "fragments_of", "regions_of",
    "recordable", "recordable_step",
    "weight", "in_units",
    "build", "batch", "iterate", "due", "gap", "round", "part", "of_codes", "take_rows", "put_rows", "get_indices",
}  # fmt: skip
# ... and arguments with these annotations.
HANDED_ON = {"Tree", "State", "Part", "Memory", "Code", "Draw", "Shapes", "Slots", "SelectorState", "ServerState",
             "OptState", "T", "Engine",
             "Collectives", "Runner", "Groups", "Exchange", "Mixing", "Batches", "RunFacts", "Facts",
             "Presence"}  # fmt: skip
DECORATION = (
    "title",
    "loss_label",
    "name",
    "project",
    "entity",
    "experiment_name",
    "wandb_project",
    "wandb_name",
)  # any object can be written as text

# ------------------------------------------------------------------------------------------------------- the cases


def tried() -> dict[str, Target]:
    """All public callables, except for those that cannot be called."""
    return {
        name: target
        for name, target in targets().items()
        if name not in calls.UNCALLED and not inspect.isabstract(target.function)
    }


def cases(seed: int, count: int) -> Iterator[Case]:
    """All callables in turn, so that each is there in a small share too, where a new one changes no other's cases."""
    names = sorted(tried())
    for i in range(count):
        name, turn = names[i % len(names)], i // len(names)
        yield Case(_drawn(name, random.Random(f"{seed} {turn} {name}")), seed + i)


def _drawn(name: str, draw: random.Random) -> dict[str, Any]:
    parameters = [
        key for key, p in targets()[name].parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    kind = draw.random()
    if not parameters or kind < 0.08:
        return {
            "call": name,
            "unknown": draw.choice([*UNKNOWN, *(key + "s" for key in parameters if key + "s" not in parameters)]),
        }
    if len(parameters) > 1 and kind < 0.13:
        return {"call": name, "swap": tuple(draw.sample(parameters, 2))}
    chosen = draw.sample(parameters, min(len(parameters), 1 if kind < 0.8 else 2))
    return {"call": name, "given": {key: draw.choice(sorted(_values_for(key))) for key in chosen}}


def _values_for(parameter: str) -> set[str]:
    return set(HOSTILE) - WORK if parameter in LONG else set(HOSTILE)


def smaller(case: Case) -> Iterator[Case]:
    given = case.settings.get("given", {})
    if len(given) > 1:
        for key in given:
            yield Case({**case.settings, "given": {key: given[key]}}, case.seed)


def reproducer(case: Case) -> str:
    call, given = case.settings["call"], case.settings.get("given", {})
    shown = [f"{key}={value}" for key, value in given.items()]
    if "unknown" in case.settings:
        shown = [f"{case.settings['unknown']}=1"]
    if "swap" in case.settings:
        shown = [" and ".join(case.settings["swap"]) + " swapped"]
    return f"{call}(..., {', '.join(shown)})\nfrom tests.fuzz import Case, arguments\nprint(arguments.run({case!r}))"


# ----------------------------------------------------------------------------------------------------- one of them


def run(case: Case) -> Outcome:
    target = targets()[case.settings["call"]]
    with a_new_folder(), as_it_was(), time_limit(LIMIT_S):
        try:
            given = calls.good_arguments(target)
            unknown = {}
            if "swap" in case.settings:
                a, b = case.settings["swap"]
                changed = {a: _good(target, given, b), b: _good(target, given, a)}
            elif "unknown" in case.settings:
                changed, name = {}, case.settings["unknown"]
                unknown = {name: UNKNOWN.get(name, 1)}
            else:
                changed = {key: HOSTILE[value]() for key, value in case.settings["given"].items()}
            receiver = calls.receiver(target)
        except Hangs:
            raise
        except Exception as error:
            raise AssertionError(f"the good call of {target.name} cannot be made: {error}") from error
        given.update(changed)
        try:
            result = calls.call(target, given, unknown, receiver)
            _use(result)
        except Exception as error:
            return _judged(target, {**changed, **unknown}, error, bool(unknown))
        if unknown:
            return Failure(f"{target.name}: an unknown keyword is swallowed", str(unknown))
        return _accepted(target, changed, "swap" in case.settings)


def _good(target: Target, given: dict[str, Any], name: str) -> Any:
    if name in given:
        return given[name]
    default = target.parameters[name].default
    if default is not inspect.Parameter.empty and default is not None:
        return default
    with contextlib.suppress(calls.NoValue):
        return calls.good_value(target, name)
    return default


def _use(result: Any) -> None:
    """An object that refuses a value only when it is used must refuse it in the same way."""
    chosen: Any = None
    model = calls.Matrix() if isinstance(result, vecgym.OptimSpec) else calls.Line()
    if isinstance(result, Strategy):
        chosen = result
    elif isinstance(result, vecgym.OptimSpec):
        chosen = CommunicateOptimizeStrategy([], result)
    elif isinstance(result, (Codec, PowerSGD)):
        chosen = DiLoCoStrategy("sgd", H=1, lr=0.1, compression=result)
    if chosen is None or type(chosen).__module__.startswith("vecgym.compat"):
        return
    with contextlib.suppress(vecgym.DivergenceError):
        timed: dict[str, Any] = {"compute": vecgym.clock.Compute([1.0, 2.0])} if chosen.asynchronous else {}
        vecgym.Trainer(model, calls.examples()).fit(chosen, calls.K, **calls.SETTINGS, **timed)


# ----------------------------------------------------------------------------------------------------- the judgment


def _judged(target: Target, changed: dict[str, Any], error: Exception, unknown: bool) -> Outcome:
    kind, where = type(error).__name__, _place(error)
    if unknown:
        if isinstance(error, TypeError) and (any(name in str(error) for name in changed) or "takes no" in str(error)):
            return Refusal(f"{target.name}: {error}")
        return Failure(f"{target.name}: an unknown keyword ends in {kind} at {where}", _text(error))
    if _lenient(target, changed):
        return Refusal(f"{target.name}: {kind}")
    if isinstance(error, (MemoryError, OverflowError)) or any(
        word in str(error).lower() for word in ("allocate", "too large", "overflow")
    ):
        return Refusal(f"{target.name}: {kind}, for a size that no machine has")
    if f"at {Path(calls.__file__).name}:" in str(error):
        return Refusal(f"{target.name}: the model's own {kind}, with its line")
    arguments = ", ".join(changed)
    if not isinstance(error, allowed_errors(target)):
        return Failure(f"{target.name}({arguments}): {kind} at {where}", _text(error))
    if not raised_by_vecgym(error):
        return Failure(f"{target.name}({arguments}): {kind} of something underneath, at {where}", _text(error))
    if not _tells(str(error), changed):
        return Failure(f"{target.name}({arguments}): its {kind} names neither argument nor value", _text(error))
    return Refusal(f"{target.name}: {error}")


def _accepted(target: Target, changed: dict[str, Any], swapped: bool) -> Outcome:
    if _lenient(target, changed) or _is_record(target):
        return None
    wrong = {name: value for name, value in changed.items() if must_be_refused(target.parameters[name], value)}
    if wrong and not swapped:
        kind = _annotation(target.parameters[next(iter(wrong))])
        shown = ", ".join(f"{name}={value!r:.60}" for name, value in wrong.items())
        return Failure(f"{target.name}({', '.join(wrong)}): accepts what is no {kind}", f"accepted: {shown}")
    return None


SIMPLE = {"int", "float", "bool", "str", "None", "os.PathLike[str]"}
NUMBERS = {"int", "float"}


def must_be_refused(parameter: inspect.Parameter, value: Any) -> bool:
    """Whether a value is wrong by the annotation alone; where that leaves room, it may be either."""
    kinds = set(_annotation(parameter).split(" | "))
    if parameter.name in DECORATION:
        return False
    if not kinds or not kinds <= SIMPLE:
        return False
    if value is None:
        return "None" not in kinds and parameter.default is not None
    if isinstance(value, (bool, np.bool_)):
        return isinstance(value, bool) and "bool" not in kinds
    if isinstance(value, (int, np.integer)):
        return not kinds & NUMBERS
    if isinstance(value, (float, np.floating)):
        return "float" not in kinds or (value != value and parameter.name not in MAY_BE_NAN)
    if isinstance(value, str):
        return "str" not in kinds
    if isinstance(value, Path):
        return "os.PathLike[str]" not in kinds
    if isinstance(value, decimal.Decimal):
        return "float" not in kinds
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0:
        return not kinds & NUMBERS
    return True


MAY_BE_NAN = ("loss", "perplexity", "num_bytes", "u", "what")


def _annotation(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    if isinstance(annotation, typing.ForwardRef):
        return str(annotation.__forward_arg__)
    return annotation if isinstance(annotation, str) else ""


def _lenient(target: Target, changed: dict[str, Any]) -> bool:
    """Whether all that was changed is what vecgym hands on to itself."""
    if target.name in MADE or (target.name.startswith(UNDERNEATH) and target.name not in ENTRANCES):
        return True
    words = [
        set(re.findall(r"\w+", _annotation(target.parameters[name]))) for name in changed if name in target.parameters
    ]
    protocol = bool(target.owner) and target.name.rpartition(".")[2] in PROTOCOL
    return protocol or any(found & HANDED_ON for found in words)


def _is_record(target: Target) -> bool:
    """A class that only holds what it is given."""
    cls = target.function
    return inspect.isclass(cls) and (
        issubclass(cls, (tuple, BaseException))
        or (hasattr(cls, "__dataclass_fields__") and not hasattr(cls, "__post_init__"))
    )


@functools.cache
def _named_errors(doc: str) -> tuple[type[BaseException], ...]:
    section = re.search(r"Raises:\n(.*?)(\n\s*\n|\Z)", doc, re.DOTALL)
    import builtins

    names = re.findall(r"\b\w+(?:Error|Interrupt)\b", section.group(1)) if section else []
    found = [getattr(builtins, name, None) or getattr(vecgym, name, None) for name in names]
    return tuple(error for error in found if error is not None)


def allowed_errors(target: Target) -> tuple[type[BaseException], ...]:
    """ValueError, TypeError, what the docstring names, KeyError and IndexError where something is looked up, and where
    there are paths, what the file system says."""
    doc = inspect.getdoc(target.function) or ""
    named = _named_errors(doc)
    paths = any("PathLike" in _annotation(p) for p in target.parameters.values())
    return (ValueError, TypeError, ImportError, LookupError, *named, *((OSError,) if paths else ()))


@functools.cache
def _raises(file: str) -> set[int]:
    """The lines of a file's raise statements."""
    tree = ast.parse(Path(file).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return {line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def raised_by_vecgym(error: BaseException) -> bool:
    """By a raise statement of vecgym's, or by Python when it bound the arguments of the call itself."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = frames[-1]
    if inner.filename == calls.__file__:
        return True
    if isinstance(error, OSError):
        return True  # of the file system: it names the path
    return "/vecgym/" in inner.filename and inner.lineno in _raises(inner.filename)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/vecgym/" in frame.filename]
    frame = (inside or list(frames))[-1]
    return f"{Path(frame.filename).name}:{frame.name}"


# What messages call an argument, where that is not its name.
CALLED = {
    "data": "examples", "dataset": "examples", "train_dataset": "examples", "directory": "history.csv",
    "text": "characters", "tokens": "length", "indices": "example", "rows": "row", "weights": "sync_weight",
}  # fmt: skip


def _tells(message: str, changed: dict[str, Any]) -> bool:
    """Whether a message has one of the arguments' names, or something of the values."""
    for name, value in changed.items():
        words = {name, CALLED.get(name, name), *(part for part in name.split("_") if len(part) > 1)}
        shown = {repr(value)[:25], repr(value).strip("'")[:25], str(value)[:25], type(value).__name__} - {""}
        if isinstance(value, types.FunctionType):
            shown.add("function")
        named = any(re.search(rf"(?<![^\W_]){re.escape(word)}", message, re.IGNORECASE) for word in words)
        if named or any(text in message for text in shown):
            return True
    return False


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
