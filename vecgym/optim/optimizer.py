"""The optimizer of strategies, a rule with clipping and a learning-rate schedule; and clipping alone."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.devices import placed, spread
from vecgym.core.nodes import join_rows, take_rows, widened
from vecgym.core.objects import own_settings, shown
from vecgym.core.tree import Tree, leaves, root
from vecgym.optim.formulas import FORMULAS
from vecgym.optim.rules import ElementwiseRule, Gaps, PerNodeRule, PreparedRule
from vecgym.optim.schedule import Schedule, check_schedule, make_schedule
from vecgym.optim.spec import Key, OptimSpec, merge_key, merged_spec, per_configuration

# Below this many values for each rate, one call of a kernel for all rows and one more pass over the parameters are
# faster than a call for each rate. Measured with 16 rates: they break even between 50,000 and 800,000 (AdamW, SGD).
FEW = 1 << 16
CACHED_RULES = 64  # of sets of nodes
CACHES = ("_factor", "_of_nodes", "_wide", "_moved", "_factors")

Counts = int | Sequence[int]  # of all rows, or of each
Slots = dict[str, Any]  # an optimizer's state: slot -> parameter -> [1 or rows, *]
SKIPPED = "skipped"  # the slot that counts the steps without a gradient, if there were any


class Optimizer:
    """An optimizer on stacked parameters, of nodes or of a server, inner or outer.

    Its state holds no count: the number of steps that each row has made is an argument of `step`. It selects the factor
    of the schedule, and the values of hyperparameters for each step, `[T, 1]` or `[T, K]`; the rows' node ids select
    the values for each node, `[K]` or `[T, K]`.

    Args:
        spec: class and hyperparameters.
        max_norm: clip each row's gradient to this 2-norm before the step; `[K]`: a norm for each node.
        lr_scheduler: "constant", "cosine", "lambda_cosine", or a function step -> factor of the learning rate; see
            `vecgym.optim.schedule`.
        warmup_steps: steps of linear warm-up from 0.
        cosine_anneal: after the warm-up, decay to 10 % along a cosine.

    Attributes:
        scheduled: whether a schedule changes the learning rate.
        changes: whether the learning rate may differ from step to step.

    Raises:
        TypeError, ValueError: for a max_norm that is not positive, an unknown schedule, and a function together with
            `warmup_steps` or `cosine_anneal`.

    >>> optimizer = Optimizer(OptimSpec("sgd", lr=0.5, momentum=0.9), warmup_steps=2)
    >>> params, grads = {"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.0, 2.0])}
    >>> state = optimizer.init(params)
    >>> optimizer.lr(1, max_steps=10)
    0.25
    >>> optimizer.step(params, grads, state, count=1, lr=0.25)[0]
    {'w': tensor([0.7500, 0.5000])}
    """

    def __init__(
        self, spec: OptimSpec, *, max_norm: float | Tensor | None = None, lr_scheduler: str | Schedule | None = None,
        warmup_steps: int = 0, cosine_anneal: bool = False,
    ) -> None:  # fmt: skip
        self.spec = check.instance("spec", spec, OptimSpec, 'an OptimSpec, such as OptimSpec("sgd", lr=0.1)')
        self.max_norm = None if max_norm is None else check_max_norm(max_norm)
        check_schedule(lr_scheduler, warmup_steps, cosine_anneal)
        self.lr_scheduler, self.warmup_steps, self.cosine_anneal = lr_scheduler, warmup_steps, cosine_anneal
        self.scheduled = lr_scheduler is not None or bool(warmup_steps) or cosine_anneal
        self.changes = self.scheduled or spec.per_step
        self._rule = spec.rule()
        self._per_node = spec.param_groups is not None or _has_several(spec.kwargs)  # as far as known before `init`
        self._per_step = spec.param_groups is not None or spec.per_step  # likewise
        self._unit: Any = None  # of a merged one: the rule at rate 1
        self._num_rates: int | None = None  # of neighbouring rows
        self._reset_caches()

    def _reset_caches(self) -> None:
        """Reset the caches, which are filled on demand and cannot be sent to another process."""
        self._factor = functools.lru_cache(1)(self._make_factor)
        self._of_nodes = functools.lru_cache(CACHED_RULES)(self._make_of_nodes)
        self._wide: dict[int, Optimizer] = {}
        self._moved: tuple[Any, Tree] = (None, {})  # memory for the movement
        self._factors: tuple[Any, dict[Any, Any]] = (None, {})  # of the last rates

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name not in CACHES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset_caches()

    @property
    def per_node(self) -> bool:
        """Whether a setting has a value for each node, so that nodes with equal gradients drift apart."""
        return self._per_node or _has_several([self.max_norm])

    def check(self, num_nodes: int, max_steps: int, whose: str) -> None:
        """Raise a ValueError if there are not as many values as nodes or steps, or if the schedule fails."""
        self.spec.check_steps(num_nodes, max_steps, whose)
        if self.max_norm is not None:
            check.per_node("max_norm", self.max_norm, "(0, inf]", num_nodes=num_nodes)
        if callable(self.lr_scheduler):  # what is wrong with the user's function shows before the run
            self._factor(max_steps)(0)

    def init(self, params: Tree) -> Slots:
        """Return the state before the first step, for parameters `[1 or rows, *]`."""
        specs = [self.spec, *[spec for spec, _, _ in self.spec.groups(params)]]
        self._per_node, self._per_step = any(_has_several(x.kwargs) for x in specs), any(x.per_step for x in specs)
        return {slot: x for slot, x in self._rule.init(params).items() if slot != "step"}

    def lr(self, counts: Counts, max_steps: int, nodes: Sequence[int] | None = None) -> Any:
        """Return the learning rate of the next step, schedule included.

        Args:
            counts: steps made before.
            max_steps: the length of the schedule.
            nodes: the rows' node ids; None: all nodes.

        Returns:
            A number or a tensor `[]`, if it is the same for all rows; else `[rows]`.
        """
        if not self.changes and (counts or isinstance(counts, int)):
            return _own(self.spec.lr, nodes)
        if not self.scheduled:
            return of_rows(self.spec.lr_at, counts, nodes)
        factor = self._factor(max_steps)
        return of_rows(lambda count: self.spec.lr_at(count) * factor(count), counts, nodes)

    def step(
        self, params: Tree, grads: Tree, state: Slots, count: Counts, lr: Any = None, *, inplace: bool = True,
        nodes: Sequence[int] | None = None, exact: bool = False, missing: Gaps = MappingProxyType({}),
    ) -> tuple[Tree, Slots]:  # fmt: skip
        """Take a step of these rows; return their parameters and state.

        A parameter without a gradient is skipped, as torch's optimizers skip one whose `grad` is None: neither it nor
        its state moves, and it has made one step fewer from then on. The state then counts the steps that each row of
        each parameter has skipped, in the slot "skipped"; the count is negative if it has never taken one.

        Args:
            params, grads, state: `[1 or rows, *]`.
            count: steps made before.
            lr: a number, `[]` or `[rows]`, as `lr` returns it; None: that of the spec.
            inplace: `params`, `grads` and `state` may be overwritten: use only the returned values. Otherwise the step
                is pure, and can be differentiated.
            nodes: the rows' node ids; None: all nodes.
            exact: step row by row, so that the last bits of a row do not depend on the other rows.
            missing: parameter -> rows for which it has no gradient.
        """
        counts = [count] if isinstance(count, int) else _alike(list(count))
        skips = bool(missing) or SKIPPED in state
        if not (exact or skips):
            return self._step(params, grads, state, counts, lr, inplace, nodes)
        values = [lr, *leaves(self.spec.kwargs)] if nodes is None else []
        sizes = [x.shape[-1] for x in values if isinstance(x, Tensor) and x.dim() > 0]
        num_rows = max([len(counts), *map(len, leaves([params, grads, state])), *sizes])
        if num_rows == 1 or not exact:
            return self._step(params, grads, state, counts, lr, inplace, nodes, (missing, num_rows) if skips else None)
        ids = range(num_rows) if nodes is None else nodes
        # A kernel rounds the last values of a tensor, which fill no vector register, in another way than the others:
        # which values these are must not depend on the other nodes.
        stepped = []
        for i in range(num_rows):
            p, g, s = (take_rows(x, torch.tensor([i])) for x in (params, grads, state))
            gaps = ({name: [0] for name, rows in missing.items() if i in rows}, 1) if skips else None
            stepped.append(self._step(p, g, s, _of_row(counts, i), _of_row(lr, i), inplace, ids[i : i + 1], gaps))
        return join_rows([p for p, _ in stepped]), join_rows([s for _, s in stepped])

    def prepared(self, params: Tree, state: Slots) -> PreparedStep | None:
        """Return steps in place of these tensors, for as long as they stay where they are; None: only `step` does.

        >>> optimizer, params = Optimizer(OptimSpec("sgd", lr=0.5)), {"w": torch.ones(2)}
        >>> optimizer.prepared(params, {})({"w": torch.tensor([1.0, 2.0])}, count=0, lr=0.5)
        True
        >>> params
        {'w': tensor([0.5000, 0.0000])}
        """
        if self.max_norm is not None or self._per_step or SKIPPED in state or not params:
            return None
        rates = _is_rows(self.spec.lr) and self._unit is not None and self._few(params)
        rule = self._unit if rates else self._rule
        moved = tree.map(torch.zeros_like, params) if rates else params
        step = rule.prepared(moved, state) if isinstance(rule, ElementwiseRule) else None
        return None if step is None else PreparedStep(self, params, state, moved, step)

    @property
    def merge_key(self) -> Key | None:
        """A key that is equal for optimizers that can be `merged`; None: this one cannot.

        >>> Optimizer(OptimSpec("sgd", lr=0.1)).merge_key == Optimizer(OptimSpec("sgd", lr=0.2)).merge_key
        True
        >>> Optimizer(OptimSpec("sgd"), max_norm=1.0).merge_key == Optimizer(OptimSpec("sgd")).merge_key
        False
        """
        key = merge_key(self.spec)
        if key is None or (isinstance(self.max_norm, Tensor) and self.max_norm.dim() > 0):
            return None
        return *key, self.max_norm is None, self.lr_scheduler, self.warmup_steps, self.cosine_anneal

    @classmethod
    def merged(cls, optimizers: Sequence[Optimizer]) -> Optimizer:
        """Merge optimizers of equal `merge_key` into one, with a value for each, `[C]`, where their numbers differ.

        >>> Optimizer.merged([Optimizer(OptimSpec("sgd", lr=0.5)), Optimizer(OptimSpec("sgd", lr=0.25))]).wide(2).spec
        OptimSpec(SGD, lr=tensor([0.5000, 0.5000, 0.2500, 0.2500], dtype=torch.float64))
        """
        first = optimizers[0]
        norm = None if first.max_norm is None else per_configuration([x.max_norm for x in optimizers])
        merged = first.replace(merged_spec([x.spec for x in optimizers]), norm)
        merged._unit = unit_rule(merged.spec)
        return merged

    def wide(self, num_rows: int) -> Optimizer:
        """Return the same optimizer with each of its values, `[C]`, for so many rows: `[C * rows]`."""
        if num_rows not in self._wide:

            def wide(x: Any) -> Any:  # `[C]`, or `[T, C]`
                return x.repeat_interleave(num_rows, -1) if _has_several([x]) else x

            norm = wide(self.max_norm) if _has_several([self.max_norm]) else self.max_norm
            several = num_rows > 1 and (norm is not self.max_norm or _has_several(self.spec.kwargs))
            self._wide[num_rows] = self.replace(self.spec.mapped(wide), norm) if several else self
            self._wide[num_rows]._unit = self._unit
        return self._wide[num_rows]

    def replace(self, spec: OptimSpec, max_norm: float | Tensor | None) -> Optimizer:
        """Return the same with other hyperparameters."""
        return Optimizer(
            spec, max_norm=max_norm, lr_scheduler=self.lr_scheduler, warmup_steps=self.warmup_steps,
            cosine_anneal=self.cosine_anneal,
        )  # fmt: skip

    def _step(
        self, params: Tree, grads: Tree, state: Slots, counts: list[int], lr: Any, inplace: bool,
        nodes: Sequence[int] | None, gaps: tuple[Gaps, int] | None = None,
    ) -> tuple[Tree, Slots]:  # fmt: skip
        """Clip, and step where there are gradients; `gaps`: the rows without one, and the number of rows."""
        missing, num_rows = ({}, 0) if gaps is None else gaps
        params, grads, state = (params, grads, state) if gaps is None else widened((params, grads, state), num_rows)
        if self.max_norm is not None:
            gone = {name: placed(torch.tensor(sorted(x)), grads[name].device) for name, x in missing.items() if x}
            if gone:  # an exchange of codes may give values where no node has a gradient
                grads = {name: g.index_fill(0, gone[name], 0.0) if name in gone else g for name, g in grads.items()}
            grads, _ = clip_grad_norm(grads, _own(self.max_norm, nodes), inplace=inplace)
        if gaps is None:
            return self._updated(params, grads, state, (counts, counts), lr, inplace, nodes)
        skipped = {name: x.tolist() for name, x in state.pop(SKIPPED, {}).items()}
        each = counts * (num_rows if len(counts) == 1 else 1)
        made = {name: [n - abs(m) for n, m in zip(each, skipped.get(name, [0] * num_rows))] for name in params}
        if isinstance(self._rule, PerNodeRule):
            fresh = {name: frozenset(i for i, n in enumerate(steps) if n == 0) for name, steps in made.items()}
            new, slots = self._updated(
                params, grads, state, (counts, counts), lr, inplace, nodes, missing=missing, fresh=fresh
            )
        else:
            new, slots = self._step_by_count(params, grads, state, (counts, made), lr, inplace, nodes, missing)
        slots[SKIPPED] = {
            name: torch.tensor(_now_skipped(skipped.get(name, [0] * num_rows), made[name], missing.get(name, ())))
            for name in {**skipped, **missing}
        }
        return new, slots

    def _updated(
        self, params: Tree, grads: Tree, state: Slots, counts: tuple[list[int], list[int]], lr: Any, inplace: bool,
        nodes: Sequence[int] | None, **gaps: Gaps,
    ) -> tuple[Tree, Slots]:  # fmt: skip
        """Call the rule: settings go by the first counts, the rule's own arithmetic by the steps made."""
        by, made = counts
        with_step = {"step": torch.stack(made) if isinstance(made[0], Tensor) else torch.tensor(made), **state}
        if self._unit is not None and inplace and len(made) == len(by) == 1 and _is_rows(lr) and self._few(params):
            return self._scaled(params, grads, with_step, lr)
        rule = self._rule_at(by, nodes)
        params, new = rule.update(params, grads, with_step, lr=lr, inplace=inplace, **gaps)
        del new["step"]
        return params, new

    def _step_by_count(
        self, params: Tree, grads: Tree, state: Slots, counts: tuple[list[int], dict[str, list[int]]], lr: Any,
        inplace: bool, nodes: Sequence[int] | None, missing: Gaps,
    ) -> tuple[Tree, Slots]:  # fmt: skip
        """Call the rule once for the parameters with equally many steps, and restore the rows without a gradient."""
        by, made = counts
        new, slots, groups = dict(params), {slot: dict(x) for slot, x in state.items()}, dict[Any, list[str]]()
        for name, steps in made.items():
            if len(missing.get(name, ())) < len(steps):  # else there is nothing to do
                groups.setdefault(tuple(_alike(steps)), []).append(name)
        for steps, names in groups.items():
            some = [{name: x[name] for name in names if name in x} for x in (params, grads, *state.values())]
            gone = {name: torch.tensor(sorted(missing[name])) for name in names if missing.get(name)}
            kept = [{n: x[n][placed(i, x[n].device)].clone() for n, i in gone.items() if n in x} for x in some]
            held = dict(zip(state, some[2:]))
            p, s = self._updated(some[0], some[1], held, (by, list(steps)), lr, inplace, nodes)
            for target, after, before in zip((new, *slots.values()), (p, *s.values()), (kept[0], *kept[2:])):
                for name, x in after.items():
                    index = placed(gone[name], x.device) if name in before else None
                    put = x.index_copy_ if inplace else x.index_copy
                    target[name] = x if index is None else put(0, index, before[name])
        return new, slots

    def _few(self, params: Tree) -> bool:
        """Whether one more pass over the parameters takes less time than a call of the kernel for each rate."""
        if self._num_rates is None:
            self._num_rates = 1 + int((self.spec.lr.diff() != 0).sum()) if _is_rows(self.spec.lr) else 1
        return sum(p.numel() for p in params.values()) < FEW * self._num_rates

    def _scaled(self, params: Tree, grads: Tree, state: Slots, lr: Tensor) -> tuple[Tree, Slots]:
        """Step in place by one call of the kernel, at rate 1 from 0, which finds the movement u: p <- p + lr u."""
        form = [(name, p.shape, p.dtype, p.device) for name, p in params.items()]
        if self._moved[0] != form:
            empty = tree.map(lambda p: torch.empty_like(p, memory_format=torch.contiguous_format), params)
            self._moved = form, empty
        moved = tree.map(torch.Tensor.zero_, self._moved[1])
        moved, new = self._unit.update(moved, grads, state)
        self.move(params, moved, lr)
        del new["step"]
        return params, new

    @torch.no_grad()
    def move(self, params: Tree, moved: Tree, lr: Tensor) -> None:
        """Move parameters in place by `moved`, a step's movement at rate 1 from 0, times the rates, `[rows]`."""
        decay = self.spec.hyper.get("weight_decay", 0.0)
        if self._factors[0] is not lr:
            self._factors = lr, {}
        for name, p in params.items():
            key = p.dim(), p.dtype, p.device
            if key not in self._factors[1]:
                self._factors[1][key] = [spread(x, p) for x in (1 - lr * decay, lr)]
            shrink, rate = self._factors[1][key]
            (p.mul_(shrink) if decay else p).addcmul_(moved[name], rate)

    def _rule_at(self, counts: list[int], nodes: Sequence[int] | None) -> Any:
        """Return the rule with the values of these nodes and steps."""
        spec, rule = (self.spec, self._rule) if nodes is None or not self._per_node else self._of_nodes(tuple(nodes))
        if not self._per_step:
            return rule
        return spec.at_each(lambda of_step: of_rows(of_step, counts if len(counts) > 1 else counts[0])).rule()

    def _make_of_nodes(self, nodes: tuple[int, ...]) -> tuple[OptimSpec, Any]:
        """Return spec and rule with the values of these nodes."""
        spec = self.spec.mapped(lambda x: _own(x, nodes))
        return spec, spec.rule()

    def _make_factor(self, max_steps: int) -> Schedule:
        return make_schedule(self.lr_scheduler, max_steps, self.warmup_steps, self.cosine_anneal)

    @property
    def options(self) -> list[str]:
        """The options that are not at their defaults, as `name=value`.

        >>> Optimizer(OptimSpec("sgd"), warmup_steps=5).options
        ['warmup_steps=5']
        """
        return own_settings(self)[1:]  # the first is the spec

    def __repr__(self) -> str:
        return shown(self)


class PreparedStep:
    """Steps in place of tensors that stay where they are, with the bits of `step`; see `Optimizer.prepared`."""

    def __init__(self, optimizer: Optimizer, params: Tree, state: Slots, moved: Tree, step: PreparedRule) -> None:
        self.optimizer, self._params, self._moved, self._step = optimizer, params, moved, step
        self._held, self._shapes = leaves([params, state]), {name: p.shape for name, p in params.items()}

    def is_for(self, params: Tree, state: Slots) -> bool:
        """Whether these are the tensors for which this was prepared."""
        tensors = [*params.values(), *itertools.chain(*[slot.values() for slot in state.values()])]
        return len(tensors) == len(self._held) and all(map(operator.is_, tensors, self._held))

    def __call__(self, grads: Tree, count: int, lr: Any) -> bool:
        """Take a step, and return True; or do nothing, and return False: only `step` takes it.

        Args:
            grads: `[1 or rows, *]`.
            count: steps made before.
            lr: a number, `[]` or `[rows]`, as `Optimizer.lr` returns it.
        """
        at_rates = self._moved is not self._params
        if _is_rows(lr) is not at_rates or {name: g.shape for name, g in grads.items()} != self._shapes:
            return False
        if at_rates:
            tree.map(torch.Tensor.zero_, self._moved)
            self._step(grads, count, 1.0)
            self.optimizer.move(self._params, self._moved, lr)
            return True
        if isinstance(lr, Tensor) and (lr.numel() != 1 or tree.differentiated(lr)):
            return False
        self._step(grads, count, lr)
        return True


def unit_rule(spec: OptimSpec) -> Any:
    """Return the rule at rate 1 if a step is proportional to the rate, else None.

    >>> unit_rule(OptimSpec("sgd", lr=torch.tensor([0.1, 0.2]))).spec
    OptimSpec(SGD, lr=1.0)
    >>> unit_rule(OptimSpec("sgd", lr=torch.tensor([0.1, 0.2]), weight_decay=0.1)) is None
    True
    """
    numbers = {key: value for key, value in spec.hyper.items() if key != "lr"}
    linear = spec.cls in FORMULAS and spec.cls is not torch.optim.Rprop and spec.param_groups is None
    if not linear or not _is_rows(spec.hyper.get("lr")) or leaves(numbers):
        return None
    decay = numbers.get("weight_decay", 0.0)
    if decay and not numbers.get("decoupled_weight_decay", FORMULAS[spec.cls].decoupled):
        return None
    return spec.replace(lr=1.0, **({"weight_decay": 0.0} if decay else {})).rule()


def _alike(values: list[Any]) -> list[Any]:
    """Return one value if all are equal; equal tensors may have other derivatives."""
    equal = not isinstance(values[0], Tensor) and values.count(values[0]) == len(values)
    return values[:1] if equal else values


def _now_skipped(skipped: list[int], made: list[int], missing: Collection[int]) -> list[int]:
    """Return how many steps each row has skipped after this one; negative: and it has never taken one.

    >>> _now_skipped([0, 0, -2, -2], made=[0, 3, 0, 0], missing={0, 1, 2})
    [-1, 1, -3, 2]
    """
    after = [abs(n) + (i in missing) for i, n in enumerate(skipped)]
    return [-n if made[i] == 0 and i in missing else n for i, n in enumerate(after)]


def of_rows(value_at: Callable[[int], Any], counts: Counts, nodes: Sequence[int] | None = None) -> Any:
    """Return the value of a function of the count for each row: one value, if it is the same for all, or `[rows]`.

    Args:
        value_at: count -> a number, a tensor `[]`, or `[K]`, of each node.
        counts: of all rows, or of each.
        nodes: the rows' node ids; None: all nodes.

    >>> of_rows(lambda count: 10 * count, [4, 0, 2])
    tensor([40.,  0., 20.], dtype=torch.float64)
    >>> of_rows(lambda count: torch.tensor([1.0, 2.0, 3.0]), 5, nodes=[0, 2])
    tensor([1., 3.])
    """
    if isinstance(counts, int):
        return _own(value_at(counts), nodes)
    if not counts:
        return torch.empty(0, dtype=torch.float64)
    values = {count: value_at(count) for count in dict.fromkeys(counts)}
    first = values[counts[0]]
    if all(x is first or (isinstance(x, (int, float)) and x == first) for x in values.values()):
        return _own(first, nodes)
    ids = range(len(counts)) if nodes is None else nodes
    tensors = {n: x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for n, x in values.items()}
    return torch.stack([x if x.dim() == 0 else x[node] for x, node in zip(map(tensors.__getitem__, counts), ids)])


def _own(value: Any, nodes: Sequence[int] | None) -> Any:
    """Return the values of some nodes, of `[K]` or `[T, K]`; a value that all nodes share is returned unchanged."""
    if nodes is None or not isinstance(value, Tensor) or value.dim() == 0 or value.shape[-1] == 1:
        return value
    return value[..., placed(torch.as_tensor(nodes, dtype=torch.long), value.device)]


def _is_rows(lr: Any) -> bool:
    """Whether a rate has a value for each of several rows, without a derivative."""
    return isinstance(lr, Tensor) and lr.dim() == 1 and len(lr) > 1 and not lr.requires_grad


def _of_row(values: Any, i: int) -> Any:
    """Return the value of one row, of values `[rows]` or one value for all."""
    is_list = isinstance(values, list) or (isinstance(values, Tensor) and values.dim() > 0)
    return values[i : i + 1] if is_list and len(values) > 1 else values


def _has_several(settings: Any) -> bool:
    """Whether a setting has a value for each node."""
    return any(x.dim() > 0 and x.shape[-1] > 1 for x in leaves(settings))


# ---------------------------------------------------------------------------------------------------- clipping


def check_max_norm(max_norm: float | Tensor) -> float | Tensor:
    """Return `max_norm`, or raise a ValueError unless it is positive (`[L]`: on every node).

    >>> check_max_norm(1.0)
    1.0
    """
    what = "the largest norm of a node's gradient, such as 1.0; None, if allowed, does not clip"
    return check.per_node("max_norm", max_norm, "(0, inf]", what)


def clip_grad_norm(grads: Tree, max_norm: float | Tensor, inplace: bool = True) -> tuple[Tree, Tensor]:
    """Scale each node's gradient to a norm of at most `max_norm`: g <- g min(1, max_norm / (||g|| + 1e-6)).

    `grads`: `[1 or L, *shape]` per name, with ||g|| the 2-norm over a node's whole tree; `max_norm`: a number,
    `[]` or `[L]`. Returns the gradients, and the norms before clipping, `[1 or L]`. `inplace=True` may overwrite
    `grads`; `inplace=False` is pure and differentiable, with derivative 0 of the norm at 0.

    Errors: ValueError unless `max_norm` > 0.

    >>> clip_grad_norm({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}, max_norm=1.0)
    ({'w': tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])}, tensor([5.0000, 0.5000]))

    Pascanu et al., arXiv 1211.5063; as `torch.nn.utils.clip_grad_norm_` on each node.
    """
    max_norm = check_max_norm(max_norm)
    check.flag("inplace", inplace)
    check.instance("grads", grads, Mapping, "a dict of tensors by name, [1 or L, *] each")
    for name, g in grads.items():
        if not isinstance(g, Tensor) or not (g.is_floating_point() or g.is_complex()) or g.dim() == 0:
            raise TypeError(f"grads[{name!r}] is {check.kind_of(g)}; give a tensor [1 or L, *] of real numbers.")
    flat = [g.reshape(len(g), math.prod(g.shape[1:])) for g in grads.values()]
    if not flat:
        return grads, torch.zeros(1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inplace):
        if inplace:  # one pass, no copy of the gradient's size
            parts = torch.broadcast_tensors(*[torch.linalg.vector_norm(g, dim=1) for g in flat])
            norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        else:
            norms = root(functools.reduce(torch.add, [(g * g).sum(dim=1) for g in flat]))
        if len(norms) > 1:
            check.per_node("max_norm", max_norm, num_nodes=len(norms))
        factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        return {name: _scaled(g, factor, inplace) for name, g in grads.items()}, norms


def _scaled(g: Tensor, factor: Tensor, inplace: bool) -> Tensor:
    fits, factor = inplace and g.is_contiguous() and factor.shape[0] in (1, g.shape[0]), spread(factor, g)
    return g.mul_(factor) if fits else g * factor
