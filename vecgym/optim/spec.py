"""Specifications of optimizers: a class and its hyperparameters, without parameters or state."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vecgym.core import check
from vecgym.core.objects import PLAIN, Settings, same
from vecgym.core.tree import Tree, differentiated, leaves, map_leaves
from vecgym.optim.formulas import FORMULAS
from vecgym.optim.optimizers import Joined
from vecgym.optim.rules import ElementwiseRule, ParamGroups, PerNodeRule, Rule

OPTIMIZERS: dict[str, type[Optimizer]] = {
    cls.__name__.lower(): cls for cls in [*FORMULAS, getattr(torch.optim, "Adafactor", None)] if cls is not None
}
Key = tuple[Any, ...]  # equal for specs that can be merged


class OptimSpec(Settings):
    """An optimizer class with its hyperparameters.

    `optim`: a `torch.optim.Optimizer` class or one of the names `adam adamw sgd rmsprop adagrad nadam radam
    adamax adadelta rprop lion muon fullprecisionmuon dionmuon fedadam fedyogi fedadagrad` (and `adafactor` if torch
    has it).
    `kwargs`: the arguments of the class; a number may be a tensor, `[]`, `[N]` (one per node), `[T, 1]` (one per step)
    or `[T, N]`, which may require grad. `param_groups(name, p)`: the hyperparameters of parameter `p` (of one node:
    `p.dim()` is the model's) that differ from the spec's; a learning rate set there keeps its ratio to the spec's under
    a schedule. A group may have another optimizer, by name or class, with its own hyperparameters,
    `{"optim": "adamw", "lr": 3e-4}`; it then inherits none from the spec.

    Errors: ValueError for an unknown name or a value that the class refuses; TypeError for an unknown keyword
    or a class that is not an optimizer.

    >>> OptimSpec("adamw", lr=3e-4)
    OptimSpec(AdamW, lr=0.0003)
    >>> OptimSpec(torch.optim.SGD, lr=0.1).replace(momentum=0.9)
    OptimSpec(SGD, lr=0.1, momentum=0.9)
    >>> spec = OptimSpec("adamw", param_groups=lambda name, p: {} if p.dim() >= 2 else {"weight_decay": 0.0})
    >>> [group["weight_decay"] for group in spec.build(torch.nn.Linear(2, 2)).param_groups]
    [0.01, 0.0]
    """

    def __init__(self, optim: str | type[Optimizer], /, param_groups: ParamGroups | None = None, **kwargs: Any) -> None:
        if param_groups is not None and not callable(param_groups):
            raise TypeError(
                f"param_groups={param_groups!r} must be a function of (name, tensor of one node), such as"
                " lambda name, p: {} if p.dim() >= 2 else {'weight_decay': 0.0}"
            )
        self.cls: type[Optimizer] = _class(optim)
        self.param_groups = param_groups
        self.kwargs = {key: tuple(v) if isinstance(v, list) else check.plain(v) for key, v in kwargs.items()}
        self._defaults = _validated(self.cls, self.kwargs)
        self.per_step = any(x.dim() == 2 for x in leaves(self.kwargs))  # whether some of these differ between steps

    @classmethod
    def from_string(cls, name: str, **kwargs: Any) -> OptimSpec:
        """Make the spec of an optimizer from its name, in upper or lower case.

        >>> OptimSpec.from_string("SGD", lr=0.1)
        OptimSpec(SGD, lr=0.1)
        """
        return cls(name, **kwargs)

    def __repr__(self) -> str:
        options = [f"{key}={value!r}" for key, value in self.kwargs.items()]
        if self.param_groups is not None:
            options.append(f"param_groups={getattr(self.param_groups, '__name__', self.param_groups)}")
        return f"OptimSpec({', '.join([self.cls.__name__, *options])})"

    @property
    def hyper(self) -> dict[str, Any]:
        """Every hyperparameter, the class's defaults included.

        >>> OptimSpec("sgd", lr=0.1, momentum=0.9).hyper["momentum"]
        0.9
        """
        return {**self._defaults, **self.kwargs}

    @property
    def lr(self) -> Any:
        """The base learning rate: a number or a tensor `[]` or `[N]`.

        >>> OptimSpec("sgd", lr=0.1).lr, OptimSpec("adamw").lr
        (0.1, 0.001)
        """
        for settings in (self.kwargs, self._defaults):
            if "lr" in settings:
                return settings["lr"]
        raise AttributeError(f"{self.cls.__name__} has no learning rate lr; it has {list(self.hyper)}")

    def lr_at(self, step: int) -> Any:
        """Return the base learning rate of one step, counted from 0: `self.at(step).lr`.

        >>> OptimSpec("sgd", lr=torch.tensor([[0.1], [0.01]])).lr_at(1)
        tensor(0.0100)
        """
        check.integer("step", step, 0, "counted from 0")
        return _at(self.lr, step)

    def replace(self, **kwargs: Any) -> OptimSpec:
        """Return the same optimizer with other hyperparameters (or `param_groups`)."""
        return OptimSpec(self.cls, **{"param_groups": self.param_groups, **self.kwargs, **kwargs})

    def build(self, model_or_params: nn.Module | Iterable[Any], node: int | None = None) -> Optimizer:
        """Build the ordinary torch optimizer of one model, or of an iterable of tensors or (name, tensor) pairs.

        `node`: the node whose value is used if a hyperparameter has one per node.

        Errors: ValueError if a hyperparameter has one value per node and `node` is None, or if
        `param_groups` is set and the parameters have no names.
        """
        pairs = list(model_or_params.named_parameters() if isinstance(model_or_params, nn.Module) else model_or_params)
        kwargs = _numbers(self.kwargs, node)
        if self.param_groups is None:
            return self.cls([p[1] if isinstance(p, tuple) else p for p in pairs], **kwargs)
        if not all(isinstance(p, tuple) for p in pairs):
            raise ValueError("param_groups needs names: give the model, or model.named_parameters()")
        groups: list[dict[str, Any]] = []
        others: list[Optimizer] = []
        for options, members in _grouped(self.param_groups, pairs):
            if "optim" in options:
                others.append(self._of_group(options).build(members, node))
            else:
                groups.append({"params": [p for _, p in members], **_numbers(options, node)})
        optimizers = [*([self.cls(groups, **kwargs)] if groups else []), *others]
        return optimizers[0] if groups and not others else Joined(optimizers, {**self._defaults, **kwargs})

    def _of_group(self, options: dict[str, Any]) -> OptimSpec:
        """Return the spec of the parameters for which `param_groups` returns these options."""
        if "optim" not in options:
            return self.replace(param_groups=None, **options)
        return OptimSpec(options["optim"], **{key: value for key, value in options.items() if key != "optim"})

    def groups(self, params: Tree) -> Iterator[tuple[OptimSpec, list[str], Any]]:
        """Yield the groups of stacked parameters as (spec, names, this spec's lr if the group has its own).

        >>> spec = OptimSpec("adamw", param_groups=lambda name, p: {} if p.dim() >= 2 else {"weight_decay": 0.0})
        >>> for group, names, lr in spec.groups({"weight": torch.zeros(4, 2, 2), "bias": torch.zeros(4, 2)}):
        ...     print(names, group.hyper["weight_decay"], lr)
        ['weight'] 0.01 None
        ['bias'] 0.0 None
        """
        if self.param_groups is None:
            yield from [(self, list(params), None)] if params else []
            return
        for options, members in _grouped(self.param_groups, [(name, p[0]) for name, p in params.items()]):
            spec = self._of_group(options)
            has_own_lr = "lr" in options or "optim" in options
            if has_own_lr and not isinstance(self.lr, Tensor) and self.lr == 0:
                raise ValueError(
                    f"param_groups returned lr={spec.lr!r}, but a schedule keeps its ratio to the spec's,"
                    " which is 0: give the spec a positive lr"
                )
            yield spec, [name for name, _ in members], self.lr if has_own_lr else None

    def at(self, step: int) -> OptimSpec:
        """Return the spec of one step, counted from 0, with row `step` of every `[T, 1]` or `[T, N]` value.

        >>> OptimSpec("sgd", lr=torch.tensor([[0.1], [0.01]]), momentum=0.9).at(1)
        OptimSpec(SGD, lr=tensor(0.0100), momentum=0.9)
        """
        return self.at_each(lambda of_step: of_step(step))

    def at_each(self, by_count: Callable[[Callable[[int], Any]], Any]) -> OptimSpec:
        """Return the spec of nodes that have taken different numbers of steps: `by_count` gathers the value of each.

        >>> spec = OptimSpec("sgd", lr=torch.tensor([[0.1], [0.01]]))
        >>> spec.at_each(lambda of_step: torch.stack([of_step(1), of_step(0)])).lr
        tensor([0.0100, 0.1000])
        """
        changes = self.per_step or self.param_groups is not None
        return self.mapped(lambda x: by_count(lambda step: _at(x, step))) if changes else self

    def mapped(self, function: Callable[[Tensor], Any]) -> OptimSpec:
        """Apply `function` to every hyperparameter that is a tensor, including those of `param_groups`.

        >>> OptimSpec("sgd", lr=torch.tensor([0.1, 0.2]), momentum=0.9).mapped(lambda x: x[1:])
        OptimSpec(SGD, lr=tensor([0.2000]), momentum=0.9)
        """
        options = self.param_groups
        groups = None if options is None else lambda name, p: map_leaves(function, options(name, p))
        return self.replace(**map_leaves(function, self.kwargs), param_groups=groups)

    def check_steps(self, num_nodes: int, num_steps: int, whose: str) -> None:
        """Raise a ValueError unless `[N]` has N = `num_nodes` values, and `[T, N]` T = `num_steps` rows.

        >>> try:
        ...     OptimSpec("sgd", lr=torch.ones(5, 1)).check_steps(num_nodes=2, num_steps=10, whose="inner optimizer")
        ... except ValueError as error:
        ...     print(str(error).split(";")[0])
        lr of the inner optimizer has shape [5, 1]
        """
        for key, value in self.kwargs.items():
            for x in leaves(value):
                if x.dim() == 1:
                    check.per_node(f"{key} of the {whose}", x, num_nodes=num_nodes)
                if x.dim() == 2 and (len(x) != num_steps or (x.shape[1] > 1 and x.shape[1] % num_nodes != 0)):
                    raise ValueError(
                        f"{key} of the {whose} has shape {list(x.shape)}; give [{num_steps}, 1], one value for each of "
                        f"its {num_steps} steps, or [{num_steps}, {num_nodes}], one per step and node."
                    )

    def rule(self) -> Rule:
        """Return the update on stacked tensors: a formula if there is one, else one torch optimizer per node.

        >>> type(OptimSpec("adamw").rule()).__name__, type(OptimSpec(torch.optim.ASGD).rule()).__name__
        ('ElementwiseRule', 'PerNodeRule')
        """
        return ElementwiseRule(self) if self.cls in FORMULAS else PerNodeRule(self)


def ensure_optim_spec(
    optim: str | OptimSpec | type[Optimizer] | None,
    default: str | OptimSpec | type[Optimizer] | None = None,
    *,
    argument: str = "optimizer",
    **kwargs: Any,
) -> OptimSpec:
    """Make an `OptimSpec` from a name, a spec, a class or None (`default`), updated with `kwargs` other than None.

    Errors, which name the `argument`: TypeError for anything else; ValueError if a spec and `kwargs` set different
    values of the same setting.

    >>> ensure_optim_spec("sgd", lr=0.1), ensure_optim_spec(None, default="adamw", lr=None)
    (OptimSpec(SGD, lr=0.1), OptimSpec(AdamW))
    """
    check.instance("argument", argument, str, "the name of the argument")
    spec = default if optim is None else optim
    settings = {key: value for key, value in kwargs.items() if value is not None}
    if not isinstance(spec, OptimSpec):
        return OptimSpec(_class(spec, argument), **settings)
    for key in settings.keys() & spec.kwargs.keys() if optim is not None else ():
        if not same(spec.kwargs[key], settings[key]):
            raise ValueError(
                f"{key} is given twice: {spec!r} and {key}={settings[key]!r}; give it once,"
                f" in the OptimSpec or as {key}=..."
            )
    return spec.replace(**settings)


def merge_key(spec: OptimSpec) -> Key | None:
    """Return a key that is equal for specs that can be merged, or None if this one cannot.

    >>> merge_key(OptimSpec("adam", lr=0.1)) == merge_key(OptimSpec("adam", lr=0.2, betas=(0.8, 0.9)))
    True
    >>> merge_key(OptimSpec("sgd", lr=0.1)) == merge_key(OptimSpec("sgd", lr=0.1, nesterov=True, momentum=0.9))
    False
    """
    if spec.cls not in FORMULAS or not all(map(_is_number, leaves(spec.kwargs))):
        return None
    fixed = tuple(sorted((key, repr(value)) for key, value in spec.hyper.items() if not _is_number(value)))
    groups = None if spec.param_groups is None else id(spec.param_groups)
    return spec.cls.__name__, groups, fixed


def merged_spec(specs: Sequence[OptimSpec]) -> OptimSpec:
    """Merge specs into one, with a value for each, `[C]`, or for each step, `[T, C]`, where hyperparameters differ.

    >>> merged_spec([OptimSpec("sgd", lr=0.5, momentum=0.9), OptimSpec("sgd", lr=0.25, momentum=0.9)])
    OptimSpec(SGD, lr=tensor([0.5000, 0.2500], dtype=torch.float64), momentum=0.9)
    """
    keys = list(dict.fromkeys(key for spec in specs for key in spec.kwargs))
    values = {key: per_configuration([spec.hyper[key] for spec in specs]) for key in keys}
    return OptimSpec(specs[0].cls, param_groups=specs[0].param_groups, **values)


def per_configuration(values: Sequence[Any]) -> Any:
    """Return the values of C configurations as `[C]`, or as `[T, C]` if one has a value for each step, `[T, 1]`.

    Equal values stay one number, unless they are differentiated: then only the same tensor stays one.

    >>> per_configuration([(0.9, 0.5), (0.9, 0.25)])
    (0.9, tensor([0.5000, 0.2500], dtype=torch.float64))
    >>> per_configuration([0.5, torch.tensor([[1.0], [2.0]])]).shape
    torch.Size([2, 2])
    """
    if isinstance(values[0], tuple):
        return tuple(per_configuration(part) for part in zip(*values))
    if any(isinstance(x, Tensor) and (x.dim() > 0 or differentiated(x)) for x in values):
        if all(x is values[0] for x in values):
            return values[0]
        each = [torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in values]
        return torch.stack(torch.broadcast_tensors(*[x.squeeze(-1) if x.dim() else x for x in each]), -1)
    plain = [x.item() if isinstance(x, Tensor) else x for x in values]
    if all(x == plain[0] for x in plain):
        return plain[0]
    return torch.tensor(plain, dtype=torch.float64)


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    if isinstance(value, Tensor):  # one for all steps, or `[T, 1]`
        return value.dim() == 0 or value.shape[1:] == (1,)
    return check.is_number(value)


def _class(optim: object, argument: str = "optimizer") -> type[Optimizer]:
    if isinstance(optim, str):
        if optim.lower() in OPTIMIZERS:
            return OPTIMIZERS[optim.lower()]
        check.choice(argument, optim, sorted(OPTIMIZERS))
    if isinstance(optim, type) and issubclass(optim, Optimizer):
        return optim
    hint = ""
    if isinstance(optim, Optimizer):
        hint = f"; an optimizer object belongs to one model: give its class, {type(optim).__name__}"
    raise TypeError(
        f"{argument} is {check.kind_of(optim)}; give a name 'adamw', a class torch.optim.AdamW, "
        f"or OptimSpec(torch.optim.AdamW, lr=3e-4){hint}"
    )


def _validated(cls: type[Optimizer], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the class's defaults, after a dummy has accepted the smallest and the largest of every value."""
    if all(isinstance(value, PLAIN) for value in kwargs.values()):  # of a sweep: many specs of few kinds
        settings = tuple((key, type(value), value) for key, value in kwargs.items())  # the type, since True == 1
        return dict(_accepted(cls, settings))  # type: ignore[arg-type]
    return _tried(cls, kwargs)


@functools.lru_cache
def _accepted(cls: type[Optimizer], settings: tuple[tuple[str, type, Any], ...]) -> dict[str, Any]:
    return _tried(cls, {key: value for key, _, value in settings})


def _tried(cls: type[Optimizer], kwargs: dict[str, Any]) -> dict[str, Any]:
    parameters = _parameters(cls)  # type: ignore[arg-type]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    allowed = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not open_ended:
        check.keywords(cls.__name__, kwargs, allowed)
    for p in parameters:
        switch = isinstance(p.default, bool) or (p.name in ("foreach", "fused") and kwargs.get(p.name) is not None)
        if switch and p.name in kwargs:
            check.flag(p.name, kwargs[p.name])
    for pick in (torch.min, torch.max) if any(isinstance(x, Tensor) for x in leaves(kwargs)) else (torch.min,):
        values = {key: map_leaves(partial(_extreme, key, pick=pick), value) for key, value in kwargs.items()}
        for key, value in values.items():
            _check_finite(key, value)
        known = {p.name: p.default for p in parameters if cls in OPTIMIZERS.values() and p.name in values}
        try:
            # two dimensions, which Muon requires and all others accept
            dummy = _dummy(cls)  # type: ignore[arg-type]
            defaults = dummy([nn.Parameter(torch.zeros(1, 1))], **values).defaults
        except (TypeError, KeyError) as error:
            raise TypeError(f"{cls.__name__} refuses {values}: {_wrong_kind(values, known) or error}") from error
        except (ValueError, RuntimeError, AssertionError, IndexError) as error:
            raise ValueError(f"{cls.__name__} refuses {values}: {error}") from error
        if "lr" in values:
            check.number("lr", values["lr"], "[0, inf)", "the learning rate")
        if wrong := _wrong_kind(values, known):
            raise ValueError(wrong)
    return dict(defaults)


def check_lr(name: str, value: Any) -> Any:
    """Return a learning rate: a number >= 0, or a tensor of them.

    >>> check_lr("outer_lr", torch.tensor([0.1, -0.1]))
    Traceback (most recent call last):
    ...
    ValueError: outer_lr=-0.10000000149011612 must be a number >= 0: a learning rate.
    """
    _check_finite(name, value)
    for pick in (torch.min, torch.max):
        check.number(name, map_leaves(partial(_extreme, name, pick=pick), value), "[0, inf)", "a learning rate")
    return value


@functools.lru_cache
def _parameters(cls: type[Optimizer]) -> list[inspect.Parameter]:
    return list(inspect.signature(cls).parameters.values())[1:]  # the first is `params`


def _check_finite(key: str, value: Any) -> None:
    """Refuse nan, which torch's own checks accept, and infinity except for Rprop's largest step."""
    for x in value if isinstance(value, tuple) else [value]:
        if isinstance(x, float) and (math.isnan(x) or (math.isinf(x) and key != "step_sizes")):
            raise ValueError(f"{key}={value!r} must be finite.")


def _wrong_kind(values: dict[str, Any], defaults: dict[str, Any]) -> str | None:
    """Describe the first value that is no number, or no tuple of the default's length: torch does not check all."""
    for key, default in defaults.items():
        value, several = values[key], isinstance(default, tuple)
        if several and not (isinstance(value, tuple) and len(value) == len(default)):
            return f"{key}={value!r} must be {len(default)} numbers, such as {default}."
        for x, part in zip(value, default) if several else [(value, default)]:
            if check.is_number(part) and not check.is_number(x):
                return f"{key}={x!r} must be a number, such as {part}."
    return None


@functools.lru_cache
def _dummy(cls: type[Optimizer]) -> type[Optimizer]:
    """Return the class without torch's `add_param_group`, which imports torch's compiler, for a second."""
    if cls.add_param_group is not Optimizer.add_param_group:
        return cls

    def add_param_group(self: Optimizer, group: dict[str, Any]) -> None:
        self.param_groups.append({**self.defaults, **group})

    return type(cls.__name__, (cls,), {"add_param_group": add_param_group})


def _extreme(key: str, value: Tensor, pick: Callable[[Tensor], Tensor]) -> Any:
    if value.dim() > 2 or value.numel() == 0:
        raise ValueError(
            f"{key} has shape {list(value.shape)}; a number, [], [N] (one per node), [T, 1] (one per step) or [T, N] is"
            " allowed"
        )
    check.has_values(key, value)
    if value.is_complex():
        raise ValueError(f"{key} is a tensor of complex numbers: give real numbers")
    return pick(value.detach()).item()


def _at(value: Any, step: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    if step >= len(value):  # of a group of parameters; others are checked before the run
        raise ValueError(f"a setting of shape {list(value.shape)} has no value for step {step}: give one for each.")
    return value[step].reshape(()) if value.shape[1] == 1 else value[step]


def _numbers(settings: dict[str, Any], node: int | None) -> dict[str, Any]:
    """Return the settings of one node as numbers, which a torch optimizer takes."""
    return {key: map_leaves(partial(_number, key, node=node), value) for key, value in settings.items()}


def _number(key: str, value: Tensor, node: int | None) -> Any:
    if value.numel() == 1:
        return value.item()
    if value.dim() == 2:
        raise ValueError(f"{key} has one value per step, but a torch optimizer takes one: build spec.at(step)")
    if node is None:
        raise ValueError(
            f"{key} has {value.numel()} values, one per node, but a torch optimizer takes one: choose a node,"
            " spec.build(model, node=0)"
        )
    return value[node].item()


def _grouped(
    param_groups: ParamGroups, pairs: Iterable[tuple[str, Tensor]]
) -> list[tuple[dict[str, Any], list[tuple[str, Tensor]]]]:
    """Return (options, members) for every distinct result of `param_groups`."""
    groups: list[tuple[dict[str, Any], list[tuple[str, Tensor]]]] = []
    for name, p in pairs:
        options = check.called("param_groups", param_groups, name, p)
        if not isinstance(options, dict):
            raise TypeError(f"param_groups({name!r}, p) returned {options!r}; return a dict of hyperparameters")
        for group_options, members in groups:
            if same(group_options, options):
                members.append((name, p))
                break
        else:
            groups.append((options, [(name, p)]))
    return groups
