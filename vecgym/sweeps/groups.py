"""Which configurations of a sweep are one group: those whose settings differ in numbers only.

Settings that may differ within a group are named in `numbers` of the object that has them, an algorithm or a part of
it. All others must be equal. If `numbers` are None, the code is for one configuration, which is a group by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check
from vecgym.optim import Optimizer, OptimSpec
from vecgym.optim.spec import merge_key as spec_key
from vecgym.optim.spec import merged_spec, per_configuration
from vecgym.simulation.simulation import Group
from vecgym.simulation.timetable import RunFacts


def groups_of(algorithms: Sequence[Any], runs: Sequence[RunFacts]) -> tuple[list[int], list[Group]]:
    """Merge configurations into groups.

    Args:
        algorithms, runs: of each configuration.

    Returns:
        The order of the configurations in the rows, and the groups.

    >>> from vecgym.optim import Optimizer, OptimSpec
    >>> class Local:
    ...     numbers = ()
    ...     def __init__(self, lr, H):
    ...         self.inner, self.H = Optimizer(OptimSpec("sgd", lr=lr)), H
    >>> order, groups = groups_of([Local(0.1, 5), Local(0.1, 10), Local(0.2, 5)], [RunFacts(num_nodes=4)] * 3)
    >>> order, [(group.first, group.size, group.algorithm.H) for group in groups]
    ([0, 2, 1], [(0, 2, 5), (8, 1, 10)])
    >>> groups[0].algorithm.inner.spec
    OptimSpec(SGD, lr=tensor([0.1000, 0.2000], dtype=torch.float64))
    """
    alike: dict[Any, list[int]] = {}
    for c, (algorithm, run) in enumerate(zip(algorithms, runs, strict=True)):
        alone = getattr(algorithm, "numbers", None) is None
        key = c if alone else (key_of(algorithm), *run_key(run, getattr(algorithm, "draws", True)))
        alike.setdefault(key, []).append(c)
    groups, first = list[Group](), 0
    for chosen in alike.values():
        members = tuple(algorithms[c] for c in chosen)
        seeds = tuple(runs[c].seed for c in chosen)
        groups.append(Group(merged(members), runs[chosen[0]], first, len(chosen), members, seeds))
        first += len(chosen) * runs[chosen[0]].num_nodes
    return [c for chosen in alike.values() for c in chosen], groups


def run_key(run: RunFacts, draws: bool) -> tuple[Any, ...]:
    """Runs of equal key can be one group's: their nodes are present in the same steps, and draw the same numbers.

    Args:
        draws: whether the strategy draws any.
    """
    seed = run.seed if draws else None
    return run.num_nodes, run.num_steps, seed, id(run.presence), run.num_examples, id(run.schedule), run.names


def key_of(setting: Any) -> Any:
    """Settings of equal key differ in numbers only: in those of optimizers, and those that `numbers` names.

    >>> key_of(Optimizer(OptimSpec("sgd", lr=0.1))) == key_of(Optimizer(OptimSpec("sgd", lr=0.2)))
    True
    >>> key_of([1, "ring"]) == key_of([1, "star"]), key_of(torch.ones(2)) == key_of(torch.ones(2))
    (False, True)
    """
    if isinstance(setting, (Optimizer, OptimSpec)):
        key = setting.merge_key if isinstance(setting, Optimizer) else spec_key(setting)
        return (type(setting), *key) if key is not None else object()  # equal to nothing else: it cannot be merged
    if isinstance(setting, Tensor):
        same = setting.requires_grad or setting.device.type == "meta"
        return id(setting) if same else (setting.dtype, tuple(setting.shape), tuple(setting.flatten().tolist()))
    if isinstance(setting, (list, tuple)):
        return type(setting), tuple(map(key_of, setting))
    if isinstance(setting, dict):
        return dict, tuple((name, key_of(value)) for name, value in setting.items())
    if not hasattr(setting, "numbers"):
        return _value_key(setting)
    numbers = setting.numbers
    if numbers is None:  # its code is for one configuration
        return object()
    values = {name: _form(x) if name in numbers else key_of(x) for name, x in _settings(setting).items()}
    # The merged one has the first one's private values.
    private = {name: x for name, x in vars(setting).items() if name[0] == "_" and isinstance(x, (int, float, str))}
    return type(setting), *values.items(), *private.items()


def _value_key(value: Any) -> Any:
    """Return the key of what is compared as a whole: a codec or a selector by its settings.

    >>> from vecgym.compress import TopK
    >>> _value_key(TopK(0.1)) == _value_key(TopK(0.1)), _value_key(TopK(0.1)) == _value_key(TopK(0.2))
    (True, False)
    """
    plain = type(value).__eq__ is object.__eq__ and not callable(value) and hasattr(value, "__dict__")
    if plain and type(value).__module__.startswith("vecgym."):
        return type(value), *((name, key_of(x)) for name, x in sorted(vars(value).items()))
    try:
        hash(value)
    except TypeError:  # equal to itself only
        return id(value)
    return type(value), value


def merged(members: Sequence[Any]) -> Any:
    """Merge settings of equal key into one, with values `[C]` where their numbers differ.

    >>> merged([Optimizer(OptimSpec("sgd", lr=lr)) for lr in (0.5, 0.5)])
    Optimizer(OptimSpec(SGD, lr=0.5))
    """
    first = members[0]
    if len(members) == 1:
        return first
    if isinstance(first, Optimizer):
        return Optimizer.merged(members)
    if isinstance(first, OptimSpec):
        return merged_spec(members)
    if isinstance(first, (list, tuple)) and not hasattr(first, "_fields"):
        return type(first)(merged(each) for each in zip(*members))
    if isinstance(first, dict):
        return {name: merged([x[name] for x in members]) for name in first}
    numbers = getattr(first, "numbers", None)
    if numbers is None:
        return first
    twin = copy.copy(first)
    for name in _settings(first):
        values = [vars(x)[name] for x in members]
        object.__setattr__(twin, name, _number(values) if name in numbers else merged(values))
    return twin


def _settings(x: Any) -> dict[str, Any]:
    """Return an object's settings; what begins with "_" follows from them."""
    return {name: value for name, value in vars(x).items() if not name.startswith("_")}


def _form(number: Any) -> Any:
    """Return what must be equal of numbers that may differ."""
    if isinstance(number, Tensor):
        return (tuple(number.shape), number.dtype) if not number.requires_grad else id(number)
    return "number" if check.is_number(number) else key_of(number)


def _number(values: Sequence[Any]) -> Any:
    """Return one number, or one for each configuration: `[C]`, or `[C, K]` of what each node has its own of."""
    if isinstance(values[0], Tensor) and values[0].dim() > 0:
        return torch.stack(list(values))
    if isinstance(values[0], Tensor) or check.is_number(values[0]):
        return per_configuration(values)
    return merged(values)
