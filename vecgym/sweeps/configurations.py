"""The configurations of a sweep, made from the points of its grid: a model, a strategy, settings and data each."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from vecgym.clock import Compute, Network, dry_run
from vecgym.clock.asynchronous import AsyncPlan, stop_of
from vecgym.collectives.base import payload_bytes
from vecgym.collectives.ledger import Ledger
from vecgym.core import check, tree
from vecgym.core.check import checks_of
from vecgym.core.errors import warn
from vecgym.data import Batches, EvalBatches, num_steps
from vecgym.data.checks import is_factory
from vecgym.engine import Engine
from vecgym.engine.constancy import equal_but_weights
from vecgym.engine.contract import with_loss
from vecgym.records.rows import label, listed
from vecgym.runs.options import (
    FitOptions,
    check_clocks,
    check_compute,
    check_constant,
    check_left_out,
    check_parts,
    presence_of,
)
from vecgym.simulation import RunFacts
from vecgym.strategy import Strategy
from vecgym.strategy.asynchronous import AsyncStrategy, EventDriven, check_synchronous
from vecgym.sweeps.options import Point, SweepOptions, check_clock, clocks, point_key

OF_UPDATES = ("max_updates", "max_seconds")  # settings of asynchronous runs only
SETTINGS = (
    "num_nodes", "batch_size", "minibatch_size", "max_steps", "num_epochs", *OF_UPDATES, "seed", "shuffle",
    "availability",
)  # fmt: skip


class Data:
    """The batches and plans of a sweep; configurations with equal settings share them."""

    def __init__(self, options: SweepOptions) -> None:
        self.options = options
        self._batches: dict[Any, Any] = {}
        self.form = functools.cache(self._form)
        self.plans: dict[Any, AsyncPlan] = {}

    def batches(self, kind: Callable[..., Any], dataset: Any, **settings: Any) -> Any:
        """Return the batches of a dataset, one object for equal settings."""
        key = kind, id(dataset), *settings.items()
        if key not in self._batches:
            common = {"device": self.options.device, "dataloader_kwargs": self.options.dataloader_kwargs}
            self._batches[key] = kind(dataset, **settings, **common)
        return self._batches[key]

    def _form(self, batches: Batches) -> Any:
        """Return the shapes and dtypes of the first batch."""
        return [(x.shape[1:], x.dtype) for x in tree.leaves(batches.batch(0))]


@dataclass(frozen=True, eq=False)
class Configuration:
    """One point of the sweep, with its model, strategy, settings and data.

    Attributes:
        datasets: the datasets that functions of axes have returned for this point, by "train_dataset", "val_dataset".
        network, compute: they determine the events of an asynchronous run; `compute` may determine absences.
    """

    index: int
    point: Point
    model: nn.Module
    strategy: Strategy
    settings: dict[str, Any]
    data: Data
    datasets: dict[str, Any] = field(default_factory=dict)
    network: Network | None = None
    compute: Compute | None = None

    @property
    def num_nodes(self) -> int:
        return self.settings["num_nodes"]

    @property
    def shown(self) -> dict[str, Any]:
        """The settings for people and files."""
        plain = dict(self.settings)
        availability = plain.pop("availability")
        return plain if availability is None else {**plain, "availability": repr(availability)}

    def facts(self) -> RunFacts:
        """Return the facts that its strategy may know before the first step."""
        shards, presence = tuple(self.train.shard_sizes), None
        if self.plan is None:
            loader = self.data.options.dataloader_kwargs
            options = SimpleNamespace(**self.settings, compute=self.compute, dataloader_kwargs=loader)
            presence = presence_of(options, self.num_steps, shards)
        return RunFacts(self.num_nodes, self.num_steps, self.settings["seed"], presence, shards, self.plan)

    def key(self, but: str = "") -> Any:
        """Return a key of the values of all axes except `but`."""
        return point_key({name: value for name, value in self.point.items() if name != but})

    @cached_property
    def train(self) -> Batches:
        settings = {name: self.settings[name] for name in ("num_nodes", "batch_size", "seed", "shuffle")}
        settings["own_epochs"] = getattr(self.settings["availability"], "own_epochs", False)
        return self.data.batches(Batches, self.dataset("train_dataset"), **settings)

    @cached_property
    def val(self) -> EvalBatches | None:
        dataset, val_size = self.dataset("val_dataset"), self.data.options.val_size
        if dataset is None or val_size == 0:
            return None
        settings = {"num_nodes": self.num_nodes, "seed": self.settings["seed"], "val_size": val_size}
        size = self.settings["minibatch_size"] or self.settings["batch_size"]
        return self.data.batches(EvalBatches, dataset, batch_size=size, **settings)

    def dataset(self, name: str) -> Any:
        """Return one of its datasets, "train_dataset" or "val_dataset"."""
        return self.datasets[name] if name in self.datasets else vars(self.data.options)[name]

    @property
    def form(self) -> Any:
        """The form of the batches, equal within a stack; None: all configurations have the same dataset."""
        return self.data.form(self.train) if "train_dataset" in self.datasets else None

    @cached_property
    def ledger(self) -> Ledger:
        """The transfers of the whole run, if no node is ever absent."""
        return dry_run(self.model, self.strategy, self.num_nodes, self.num_steps, seed=self.settings["seed"])

    @cached_property
    def num_steps(self) -> int:
        """The number of steps, or of updates by the server of an asynchronous run."""
        return self._steps_of_epochs if self.plan is None else len(self.plan.updates)

    @property
    def _steps_of_epochs(self) -> int:
        return num_steps(self.train, self.settings["num_epochs"], self.settings["max_steps"])

    @cached_property
    def plan(self) -> AsyncPlan | None:
        """The events of an asynchronous run, shared by runs with equal times and rules; None: it is synchronous."""
        strategy, compute, network = self.strategy, self.compute, self.network
        if not isinstance(strategy, EventDriven):
            return None
        assert compute is not None
        trained = {name: p.detach()[None] for name, p in self.model.named_parameters() if p.requires_grad}
        sizes = {name: payload_bytes(p) for name, p in trained.items()}
        of_run = {name: self.settings[name] for name in (*OF_UPDATES, "max_steps")}
        stop = stop_of(self._steps_of_epochs, self.num_nodes, **of_run)
        key: Any = ("events of its own", self.index)
        availability = self.settings["availability"]
        if isinstance(strategy, AsyncStrategy) and availability is None:
            rounds = strategy.steps_of_rounds(compute.seconds.expand(self.num_nodes).tolist())
            key = (
                rounds, strategy.buffer, strategy.max_wait, strategy.grace, strategy.delay_threshold,
                tuple(sizes.items()), id(compute), id(network), stop,
            )  # fmt: skip
        if key not in self.data.plans:
            self.data.plans[key] = AsyncPlan.of(
                strategy, self.num_nodes, compute, network, sizes, self.settings["seed"], stop, availability
            )
        return self.data.plans[key]

    def check(self, options: SweepOptions) -> None:
        """Raise a ValueError if the strategy cannot work for this run."""
        K, strategy = self.num_nodes, self.strategy
        check_clocks(K, self.network, self.compute)
        if isinstance(strategy, EventDriven):
            check_compute(strategy, self.compute)
            check_left_out(strategy, "compile", options.compile, False)
        else:
            check_synchronous(strategy)
            self.facts()  # which checks the availability
        check_constant(strategy)
        strategy.check(K, self.num_steps)
        if self.plan is not None and isinstance(strategy, EventDriven):
            strategy.check_updates(K, self.num_steps)
            strategy.inner_optim.check_steps(K, self.plan.max_steps, "inner optimizer")


def examined(config: Configuration) -> tuple[Engine, Any]:
    """Return an engine that has examined the model of a configuration, and its first batch, `[1, B, ...]`."""
    engine = Engine(copy.deepcopy(config.model), engine="loop")
    batch = tree.map_leaves(lambda x: x[:1].to(engine.device), config.train.batch(0))
    with torch.enable_grad():
        engine.prepare(batch)
    return engine, batch


# --------------------------------------------------------------------------------- the user's functions of axes

DATASETS = ("train_dataset", "val_dataset")
WANTED = {
    **dict.fromkeys(DATASETS, "a dataset, a factory (rank, num_nodes, train) -> Dataset, or a function of axes"),
    "strategy": "a function of the axes that returns a Strategy, such as lambda lr: DiLoCoStrategy('adamw', lr=lr)",
    "model": "an nn.Module, or a function of axes that returns one",
}


class Arguments(NamedTuple):
    """The arguments of a function of axes."""

    names: frozenset[str]
    required: frozenset[str]
    takes_any: bool  # it has **kwargs

    @classmethod
    def of(cls, function: Any) -> Arguments:
        """Read the signature. Some functions that are written in C, such as int, are a ValueError."""
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = frozenset(p.name for p in named if p.default is p.empty)
        return cls(frozenset(p.name for p in named), required, any(p.kind is p.VAR_KEYWORD for p in parameters))

    def among(self, point: Point) -> Point:
        """Return the axes that the function takes."""
        return {n: x for n, x in point.items() if n in self.names or (self.takes_any and n not in SETTINGS)}


def datasets_of_axes(options: SweepOptions, axes: Iterable[str]) -> dict[str, Any]:
    """Return the datasets that are given as functions of axes: name -> function."""
    return {name: vars(options)[name] for name in DATASETS if _is_of_axes(vars(options)[name], set(axes))}


def _is_of_axes(data: Any, axes: set[str]) -> bool:
    """Whether `data` is a function of axes, called with keywords, and no factory, called (rank, num_nodes, train)."""
    if not is_factory(data):
        return False
    try:
        signature, arguments = inspect.signature(data), Arguments.of(data)
    except ValueError:  # a class written in C
        return False
    if list(signature.parameters)[:2] == ["rank", "num_nodes"]:
        return False
    if arguments.names & axes and arguments.required <= axes:
        return True
    if not arguments.names or arguments.names & {"rank", "num_nodes", "train"}:
        return False
    # An axis may be missing, which `check_axes` reports.
    several = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    return not several and not (len(arguments.names) >= 3 and len(arguments.required) in (2, 3))


def arguments_of(part: Any) -> frozenset[str]:
    """Return the names of the arguments of a function of axes; a strategy or a model has none."""
    return Arguments.of(part).names if callable(part) and not isinstance(part, (Strategy, nn.Module)) else frozenset()


def check_axes(options: SweepOptions, axes: Iterable[str], source: str = "grid") -> None:
    """Check that every axis of the `source` is used, and that every function gets the arguments that it requires."""
    strategy, model = options.strategy, options.model
    axes = [check.instance(f"the axis {name!r} of {source}", name, str, "a text, such as 'lr'") for name in axes]
    if isinstance(model, Strategy) or isinstance(strategy, nn.Module):
        raise TypeError(
            "model and strategy are swapped: sweep(model, train_dataset, val_dataset, strategy=..., grid=...)."
        )
    functions: dict[str, Arguments] = {}
    for what, value in {"strategy": strategy, "model": model, **datasets_of_axes(options, axes)}.items():
        if not isinstance(value, (Strategy, nn.Module)) and not (what == "strategy" and value is None):
            try:
                functions[what] = Arguments.of(value)
            except (TypeError, ValueError):
                raise TypeError(f"{what} is {check.kind_of(value)}; give {WANTED[what]}.") from None
    if strategy is None and "strategy" not in axes:
        raise ValueError("there is no strategy: give, for example, strategy=lambda lr: DiLoCoStrategy('adamw', lr=lr).")
    _check_names(axes, functions, strategy, source)
    for what, arguments in functions.items():
        missing = sorted(arguments.required - set(axes))
        if missing:
            raise ValueError(
                f"{what} takes {', '.join(missing)}, which is not an axis: there are {', '.join(axes)}. "
                f'Add {source}["{missing[0]}"]=..., or give the argument a default value.'
            )


def _check_names(axes: list[str], functions: dict[str, Arguments], strategy: Any, source: str) -> None:
    """Check that every axis is an argument of a function, or a setting."""
    allowed = {*SETTINGS}.union({"strategy"} if strategy is None else (), *[x.names for x in functions.values()])
    if any(arguments.takes_any for arguments in functions.values()):
        return
    for name in axes:
        if name not in allowed:
            could = ("strategy", "model", "train_dataset")
            fixed = [what for what in could if what not in functions and strategy is not None]
            takes = f" ({listed(fixed, 'or')} may be a function of it: {fixed[0]}=lambda {name}: ...)" if fixed else ""
            of = f"no argument of {' and '.join(functions)} and " if functions else ""
            raise ValueError(
                f"{source}[{name!r}] is not used: it is {of}no setting{takes}{check.did_you_mean(name, allowed)} "
                f"Allowed: {', '.join(sorted(allowed))}."
            )


def named(point: Point) -> str:
    """Format the values of axes for a message.

    >>> named({"lr": 0.1, "kind": max})
    'lr=0.1, kind=max'
    """
    return ", ".join(f"{name}={label(value)}" for name, value in point.items())


def _called(what: str, function: Any, point: Point, wanted: type) -> Any:
    """Call a function of axes with the axes that it takes."""
    axes = Arguments.of(function).among(point)
    call = f"{what}({named(axes)})"
    try:
        result = function(**axes)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # a subclass may need other arguments
        raise kind(f"{call}: {error}") from error
    if not isinstance(result, wanted):
        raise TypeError(f"{call} returned {result!r}; give {WANTED[what]}.")
    return result


def make_configurations(points: Iterable[Point], options: SweepOptions) -> list[Configuration]:
    """Make and check a configuration for each point, and for each clock on which its results depend.

    The results of asynchronous runs depend on network and compute. Absences may depend on compute.
    """
    configs: list[Configuration] = []
    made: dict[Any, Any] = {}
    data = Data(options)
    each_compute, each_clock = clocks(None, options.compute), clocks(options.network, options.compute)
    for point in points:
        settings = _settings(point, options)
        strategy = point["strategy"] if options.strategy is None else options.strategy
        if not isinstance(strategy, Strategy):
            strategy = _called("strategy", strategy, point, Strategy)
        model: Any = options.model
        if not isinstance(model, nn.Module):
            model = _made("model", model, point, nn.Module, made, lambda made: with_loss(made, options.loss_fn))
        of_axes = datasets_of_axes(options, point)
        datasets = {name: _made(name, function, point, object, made) for name, function in of_axes.items()}
        if strategy.asynchronous:
            each = each_clock
        else:
            each = clocks(None, None) if settings["availability"] is None else each_compute
            settings = {name: value for name, value in settings.items() if name not in OF_UPDATES}
        parts = (model, strategy, settings, data, datasets)
        configs += [
            Configuration(i, {**point, **clock.point}, *parts, *clock[1:]) for i, clock in enumerate(each, len(configs))
        ]
    _check_settings(configs, options)
    for config in configs:
        config.check(options)
    return configs


def _settings(point: Point, options: SweepOptions) -> dict[str, Any]:
    """Return the checked settings of a point; those that are no axes come from `options`."""
    checks = checks_of(FitOptions)
    settings = {name: checks[name](name, point.get(name, vars(options)[name])) for name in SETTINGS}
    check_parts(settings["batch_size"], settings["minibatch_size"])
    return settings


def _check_settings(configs: Iterable[Configuration], options: SweepOptions) -> None:
    """Raise a ValueError for settings that no configuration uses."""
    synchronous = [config for config in configs if not config.strategy.asynchronous]
    everyone = len(synchronous) == len(list(configs))
    absent = any(config.settings["availability"] is not None for config in synchronous)
    if everyone and (options.network is not None or (options.compute is not None and not absent)):
        check_clock(options.network, options.compute)
    for config in synchronous:
        for name in OF_UPDATES:
            if name in config.point or (everyone and vars(options)[name] is not None):
                raise ValueError(
                    f"{name} ends asynchronous runs of a sweep only, and {type(config.strategy).__name__} is "
                    f"synchronous: leave out {name}, and give max_steps."
                )


def _made(
    what: str, function: Any, point: Point, wanted: type, made: dict[Any, Any], then: Callable[[Any], Any] = lambda x: x
) -> Any:
    """Call a function of axes for a point, once for all points with equal values of its axes."""
    key = id(function), point_key(Arguments.of(function).among(point))
    if key not in made:
        made[key] = then(_called(what, function, point, wanted))
    return made[key]


# ----------------------------------------------------------------------------- the sources of chance in the seeds


SAME_WEIGHTS = (
    "the seeds do not vary the initial weights: {why}. ± and intervals over the seeds leave out their effect, often "
    "the largest, and are too narrow. Fix: a model for each seed, in a sweep model=lambda seed: make(seed), where make "
    "calls torch.manual_seed(seed) and returns a new model. (They are right if the weights are always the same, such "
    "as pretrained ones.)"
)


def varied(configs: Sequence[Configuration], over: str) -> dict[str, bool]:
    """Return source of chance -> whether it varies among configurations that differ only in the axis `over`.

    It is empty if there are no two such configurations.
    """
    first: dict[Any, Configuration] = {}
    of_over = [config for config in configs if over in config.point]
    pairs = [(a, b) for b in of_over if (a := first.setdefault(b.key(over), b)) is not b]
    masks = any(a.settings["seed"] != b.settings["seed"] for a, b in pairs)
    order = any(a.settings["shuffle"] and a.settings["seed"] != b.settings["seed"] for a, b in pairs)
    data = [(a.dataset("train_dataset"), b.dataset("train_dataset")) for a, b in pairs]
    return {
        "the initial weights": any(not _same_weights(a.model, b.model) for a, b in pairs),
        "the order of the data": order,
        "the partition": any(not equal_but_weights(a, b) for a, b in data) or (order and not is_factory(data[0][0])),
        "masks": masks,
    } if pairs else {}  # fmt: skip


def varied_note(varied: Mapping[str, bool], over: str) -> str:
    """Write the result of `varied` as a sentence.

    >>> varied_note({"the initial weights": False, "the order of the data": True, "masks": True}, "seed")
    'The seeds vary the order of the data and masks; they do not vary the initial weights.'
    """
    yes, no = ([what for what, differs in varied.items() if differs is which] for which in (True, False))
    text = f"vary {listed(yes)}" if yes else ""
    text += f"{'; they ' * bool(yes)}do not vary {listed(no, 'or')}" if no else ""
    return f"The {over}s {text}." if text else ""


def warn_of_equal_weights(configs: Sequence[Configuration], model: Any) -> None:
    """Warn if runs that differ only in their seeds begin with the same random weights."""
    weights = [p for p in configs[0].model.parameters() if p.requires_grad]
    random = any(p.numel() > 1 and p.device.type != "meta" and bool((p != p.flatten()[0]).any()) for p in weights)
    if not random or varied(configs, "seed").get("the initial weights", True):
        return
    if isinstance(model, nn.Module):
        why = "all runs begin with those of the one model that was given"
    elif "seed" in arguments_of(model):
        why = "model= returns the same ones for every seed"
    else:
        why = "model= is a function that does not take the seed"
    warn(SAME_WEIGHTS.format(why=why))


def _same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same trainable parameters."""
    others = dict(b.named_parameters())
    return a is b or all(
        name in others and torch.equal(p, others[name]) for name, p in a.named_parameters() if p.requires_grad
    )


# ------------------------------------------------------------------------------------- models that can share a stack
