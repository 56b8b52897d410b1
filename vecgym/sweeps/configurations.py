"""From the points of a grid to configurations: a model, a strategy and settings each."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.core import check
from vecgym.engine import hooks
from vecgym.records.rows import label
from vecgym.runs.options import checked
from vecgym.strategy import Strategy
from vecgym.sweeps.axes import Point

SETTINGS = ("num_nodes", "batch_size", "minibatch_size", "max_steps", "num_epochs", "seed", "shuffle")


@dataclass
class Configuration:
    """One point of the sweep, and what follows from it."""

    index: int
    point: Point
    model: nn.Module
    strategy: Strategy
    settings: dict[str, Any]
    num_steps: int = 0

    @property
    def num_nodes(self) -> int:
        return self.settings["num_nodes"]


def _arguments(function: Any) -> tuple[set[str], set[str], bool]:
    """The names that a function takes, those that it must be given, and whether it takes any name."""
    parameters = inspect.signature(function).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p.name for p in parameters if p.name in names and p.default is p.empty}
    return names, needed, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _has_signature(function: Any) -> bool:
    """False for some that are written in C, such as int."""
    try:
        inspect.signature(function)
    except ValueError:
        return False
    return True


def check_axes(axes: Iterable[str], strategy: Any, model: Any) -> None:
    """Every axis is somebody's, and every function gets what it asks for."""
    axes = list(axes)
    if isinstance(model, Strategy) or isinstance(strategy, nn.Module):
        raise TypeError(
            "model and strategy are swapped: sweep(model, train_dataset, val_dataset, strategy=..., grid=...)."
        )
    functions = {"strategy": strategy, "model": model}
    functions = {name: f for name, f in functions.items() if not isinstance(f, (Strategy, nn.Module)) and f is not None}
    if model is None:
        raise TypeError(f"model is None; give {_WANTED['model']}.")
    for what, function in functions.items():
        if not callable(function) or not _has_signature(function):
            raise TypeError(f"{what} is {check.kind_of(function)}; give {_WANTED[what]}.")
    if strategy is None and "strategy" not in axes:
        raise ValueError("there is no strategy: give strategy=lambda lr: DiLoCoStrategy('adamw', lr=lr), say.")
    _check_names(axes, functions, strategy)
    for what, function in functions.items():
        missing = sorted(_arguments(function)[1] - set(axes))
        if missing:
            raise ValueError(
                f"{what} takes {', '.join(missing)}, which the grid does not have: its axes are {', '.join(axes)}. "
                f'Add grid["{missing[0]}"]=[...], or give the argument a default value.'
            )


def _check_names(axes: list[str], functions: dict[str, Any], strategy: Any) -> None:
    """Every axis is an argument of one of the functions, or of both, or a setting."""
    arguments = {what: _arguments(function) for what, function in functions.items()}
    allowed = {*SETTINGS, *(name for names, _, _ in arguments.values() for name in names)}
    allowed |= {"strategy"} if strategy is None else set()
    for name in axes:
        if name not in allowed and not any(takes_any for _, _, takes_any in arguments.values()):
            fixed = [what for what in ("strategy", "model") if what not in functions and strategy is not None]
            makes = f" ({' and '.join(fixed)}, given as an object, takes no axis: give a function)" if fixed else ""
            raise ValueError(
                f"grid[{name!r}] is not used: {' and '.join(functions) or 'nothing'} does not take it, and it is no "
                f"setting{makes}{check.did_you_mean(name, allowed)} Allowed: {', '.join(sorted(allowed))}."
            )


_WANTED = {
    "strategy": "a function of the axes that returns a Strategy, such as lambda lr: DiLoCoStrategy('adamw', lr=lr)",
    "model": "an nn.Module, or a function of axes that returns one",
}


def _called(what: str, function: Any, point: Point, wanted: type) -> Any:
    names, _, takes_any = _arguments(function)
    given = {name: value for name, value in point.items() if name in names or (takes_any and name not in SETTINGS)}
    shown = ", ".join(f"{name}={label(value)}" for name, value in given.items())
    try:
        made = function(**given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}({shown}): {error}") from error
    if not isinstance(made, wanted):
        raise TypeError(f"{what}({shown}) returned {made!r}; give {_WANTED[what]}.")
    return made


def make_configurations(
    points: Iterable[Point], strategy: Any, model: Any, defaults: dict[str, Any]
) -> list[Configuration]:
    configs = []
    models: dict[Any, nn.Module] = {}
    for index, point in enumerate(points):
        settings = checked({name: point.get(name, value) for name, value in defaults.items()})
        own = point["strategy"] if strategy is None else strategy
        made = own if isinstance(own, Strategy) else _called("strategy", own, point, Strategy)
        configs.append(Configuration(index, point, _model(model, point, models), made, settings))
    return configs


def _model(model: Any, point: Point, made: dict[Any, nn.Module]) -> nn.Module:
    """The model of a point; one for all points with the same values of its axes."""
    if not isinstance(model, nn.Module):
        names, _, takes_any = _arguments(model)
        key = tuple((name, repr(value)) for name, value in point.items() if name in names or takes_any)
        if key not in made:
            made[key] = _called("model", model, point, nn.Module)
        model = made[key]
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"the model, {check.kind_of(model)}, has no trainable parameter: nothing can be trained.")
    return model


def alike(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models differ in the values of their trainable parameters alone."""
    if a is b:
        return True
    for of in (nn.Module.named_parameters, nn.Module.named_buffers):
        x, y = dict(of(a)), dict(of(b))
        if x.keys() != y.keys():
            return False
        for name in x:
            one, other = x[name], y[name]
            if (one.shape, one.dtype, one.requires_grad) != (other.shape, other.dtype, other.requires_grad):
                return False
            if not one.requires_grad and not torch.equal(one, other):
                return False
    if hooks.of_parameters(a) != hooks.of_parameters(b):
        return False
    modules = list(zip(a.named_modules(), b.named_modules()))
    return len(list(a.modules())) == len(list(b.modules())) and all(_same_module(x, y) for x, y in modules)


def _same_module(a: tuple[str, nn.Module], b: tuple[str, nn.Module]) -> bool:
    held = ("_parameters", "_buffers", "_modules")
    x, y = ({k: v for k, v in vars(m).items() if k not in held} for _, m in (a, b))
    if a[0] != b[0] or type(a[1]) is not type(b[1]) or x.keys() != y.keys():
        return False
    return all(_equal(x[key], y[key]) for key in x)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    try:
        return bool(type(a) is type(b) and a == b)
    except Exception:
        return False
