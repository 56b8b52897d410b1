"""The two rules on stacked tensors: by a formula for all nodes at once, or by one ordinary torch optimizer per node.

`ElementwiseRule` has two implementations that agree to the last bits in float64. In place, a step is one call of a
kernel on explicit state tensors, usually torch's functional one (fused if torch has that); the pure body (`formulas`)
is for differentiation, and for many small configurations at once.

`PerNodeRule` is for rules that are not elementwise because they use a whole tensor (its norm, its rank), and for a
user's own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, NoneType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from vecgym.core.devices import spread
from vecgym.core.errors import warn
from vecgym.core.tree import Tree, differentiated, leaves, map_leaves
from vecgym.optim.formulas import FORMULAS, NUMBER, OPTIONAL, STACKED_NAMES
from vecgym.optim.optimizers import FIRST, Lists, in_parts

OptState = dict[str, Any]  # {"step": int64 [1 or L], slot: Tree, ...}: nested dicts of tensors
ParamGroups = Callable[[str, Tensor], dict[str, Any]]
Gaps = Mapping[str, Collection[int]]  # parameter -> nodes
Spec = Any  # an `OptimSpec`, which is above this module

# Below this many values per run of equal nodes, one broadcast pure step is faster than a kernel call per run.
# Measured on 2 cores with 4 to 64 runs: they break even at 12,000 values (AdamW) to 60,000 (SGD).
_SMALL_RUN = 16384
_NUM_NODES = operator.methodcaller("size", 0)
CACHED_GROUPS = 256  # sets of parameters


class ElementwiseRule:
    """An optimizer with a formula, elementwise or on matrices, applied to trees of stacked parameters.

    >>> from vecgym.optim import OptimSpec
    >>> rule = OptimSpec("sgd", lr=0.5).rule()
    >>> params, grads = {"w": torch.ones(1, 2)}, {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    >>> rule.update(params, grads, rule.init(params))[0]["w"]
    tensor([[ 0.5000,  0.0000],
            [-0.5000, -1.0000]])
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self._groups_of: dict[Any, list[_Group]] = {}
        for option in ("differentiable", "capturable"):
            if spec.kwargs.get(option):
                warn(
                    f"{option}=True of {spec!r} has no effect, since updates are explicit: omit it"
                    " (inplace=False is differentiable)"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Omit the groups, which hold functions that cannot be pickled and are recreated on demand."""
        return {**vars(self), "_groups_of": {}}

    def init(self, params: Tree) -> OptState:
        """Return the initial state: `{"step": [1], slot: {name: [1 or L, *shape]}}`.

        Errors: ValueError for complex parameters.
        """
        for name, p in params.items():
            if not p.is_floating_point():
                raise ValueError(
                    f"parameter {name!r} is {p.dtype}; parameters must be floating-point: store a complex one as"
                    " torch.view_as_real(p)"
                )
        state: OptState = {"step": torch.zeros(1, dtype=torch.int64)}
        for group in self._groups(params):
            group.check_shapes(params)
            for slot in group.slots:
                state.setdefault(slot, {}).update({name: group.start(slot, params[name]) for name in group.names})
        return state

    def update(
        self, params: Tree, grads: Tree, state: OptState, lr: float | Tensor | None = None, inplace: bool = True
    ) -> tuple[Tree, OptState]:
        """Take one step: `(params, grads, state) -> (params, state)`.

        `params`, `grads`: `[1 or L, *shape]` per name; if one has size 1 and another L, the result has L.
        `lr`: this step's learning rate, a number, `[]` or `[L]` (default: the spec's). Parameter groups with
        their own learning rate keep its ratio to the spec's.
        `inplace=True` may overwrite `params`, `grads` and `state`: use only the returned values. `inplace=False`
        leaves its arguments unchanged and is differentiable in all of them, any number of times.

        Errors: ValueError if names or numbers of nodes do not match, or if `inplace=True` and a
        hyperparameter requires grad.
        """
        check_names(params, grads)
        new_params = dict(params)
        # A slot that only other nodes use is unchanged, such as a momentum buffer if the momentum of these nodes is 0.
        new_state: OptState = {slot: dict(tree) for slot, tree in state.items() if slot != "step"}
        new_state["step"] = state["step"] + 1
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inplace):
            for group in self._groups(params):
                step = group.step_in_place if inplace else group.step_pure
                tensors, slots = step(params, grads, state, lr)
                new_params |= tensors
                for slot, tree in slots.items():
                    new_state[slot] |= tree
        return new_params, new_state

    def prepared(self, params: Tree, state: OptState) -> PreparedRule | None:
        """Return steps in place of these tensors, for as long as they stay where they are; None: only `update` does.

        A setting other than the learning rate must not be a tensor, and all tensors must be contiguous, and have the
        same number of rows.
        """
        groups = self._groups(params)
        lists = [group._lists(params, params, state) for group in groups]
        tensors = [x for each in lists for some in each for x in some]
        fixed = not any(group.tensors.keys() - ({"lr"} if group.base_lr is None else {}) for group in groups)
        if not fixed or len(set(map(len, tensors))) != 1 or not all(map(Tensor.is_contiguous, tensors)):
            return None
        return PreparedRule([(group, p, dict(zip(group.slots, slots))) for group, (p, _, *slots) in zip(groups, lists)])

    def _groups(self, params: Tree) -> list[_Group]:
        key = tuple((name, p.shape[1:]) for name, p in params.items()) if self.spec.param_groups else tuple(params)
        if key not in self._groups_of:
            if len(self._groups_of) == CACHED_GROUPS:  # a model that chooses by data has many
                self._groups_of.clear()
            self._groups_of[key] = [_Group(spec, names, base_lr) for spec, names, base_lr in self.spec.groups(params)]
        return self._groups_of[key]


class PreparedRule:
    """Steps in place of tensors that stay where they are; see `ElementwiseRule.prepared`.

    >>> from vecgym.optim import OptimSpec
    >>> rule, params = OptimSpec("sgd", lr=0.5).rule(), {"w": torch.ones(1, 2)}
    >>> rule.prepared(params, rule.init(params))({"w": torch.tensor([[1.0, 2.0]])}, count=0, lr=0.5)
    >>> params["w"]
    tensor([[0.5000, 0.0000]])
    """

    def __init__(self, groups: Sequence[tuple[_Group, list[Tensor], Lists]]) -> None:
        self._groups = groups

    def __call__(self, grads: Tree, count: int, lr: float | Tensor) -> None:
        """Take a step.

        Args:
            grads: of the parameters' shapes.
            count: steps made before.
            lr: a number or `[]`.
        """
        with torch.no_grad():
            for group, params, slots in self._groups:
                step = group.formula.kernel or group._call_torch
                h = SimpleNamespace(**{**group.constants, "lr": float(group._lr(lr)), "step": count})
                step(params, [grads[name].contiguous() for name in group.names], {**slots}, h)


_signature = functools.cache(inspect.signature)


class _Group:
    """Parameters with the same hyperparameters, and everything that does not change from step to step."""

    def __init__(self, spec: Spec, names: Sequence[str], base_lr: float | Tensor | None):
        self.spec = spec
        self.names = tuple(names)
        self.base_lr = base_lr  # the rule's, if the group has its own learning rate
        if spec.cls not in FORMULAS:
            name = spec.cls.__name__
            raise ValueError(f"param_groups returned optim={name!r}, which does not run stacked: give {STACKED_NAMES}")
        self.formula = FORMULAS[spec.cls]
        self.kernel = self.formula.kernel or _functional(spec.cls)
        hyper = in_parts(spec.hyper)
        # torch 2.6 distinguishes Adam and AdamW only by class
        hyper["decoupled_weight_decay"] = hyper.get("decoupled_weight_decay", self.formula.decoupled)
        hyper.setdefault("maximize", False)
        self.choice = (hyper.pop("fused", None), hyper.pop("foreach", None))
        self.constants = {key: value for key, value in hyper.items() if not isinstance(value, Tensor)}
        # Read again at every step: their values may change, and every step needs its own graph.
        self.tensors = {key: value for key, value in hyper.items() if isinstance(value, Tensor)}
        self.slots = [slot for slot in self.formula.slots if _used(hyper.get(OPTIONAL.get(slot, ""), True))]
        parameters = _signature(self.kernel).parameters
        self.keywords = [key for key in hyper if key in parameters and key not in ("differentiable", "capturable")]
        self.takes_fused, self.takes_steps = "fused" in parameters, "state_steps" in parameters

    def check_shapes(self, params: Tree) -> None:
        """Raise a ValueError for parameters that the rule does not support."""
        for name in self.names:
            shape = list(params[name].shape[1:])
            if self.formula.of_matrices and len(shape) != 2:
                raise ValueError(
                    f"{self.spec.cls.__name__} takes matrices, but parameter {name!r} has the shape {shape}: use "
                    "another optimizer for such parameters, param_groups=lambda name, p: "
                    '{} if p.dim() == 2 else {"optim": "adamw", "lr": 3e-4}'
                )

    def start(self, slot: str, p: Tensor) -> Tensor:
        """Return the initial value of a slot, `[1 or L, *shape]`."""
        if slot == NUMBER:
            return torch.ones(1, dtype=torch.float64)
        zeros = torch.zeros_like(p, memory_format=torch.contiguous_format, requires_grad=False)
        return zeros + spread(_scalar(FIRST[slot](self.spec.hyper)), like=p) if slot in FIRST else zeros

    def _lr(self, lr: float | Tensor | None) -> Any:
        if lr is None:
            return self.spec.lr
        return lr if self.base_lr is None else lr * (self.spec.lr / self.base_lr)

    def hyper(self, lr: float | Tensor | None) -> SimpleNamespace:
        """Return the hyperparameters for the pure body: numbers, or float64 tensors `[]` or `[L]` on the CPU."""
        tensors = {key: _scalar(value) for key, value in self.tensors.items()}
        return SimpleNamespace(**{**self.constants, **tensors, "lr": _scalar(self._lr(lr))})

    def numbers(self, lr: float | Tensor | None) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """Return the hyperparameters in two groups: single numbers, and lists of L numbers."""
        numbers, columns, rate = dict(self.constants), {}, self._lr(lr)
        if self.base_lr is not None:  # without gradients, the rate of the group does not show those of its factors
            rate = next((x for x in (lr, self.base_lr) if differentiated(x)), rate)
        for key, value in {**self.tensors, "lr": rate}.items():
            if not isinstance(value, Tensor):
                numbers[key] = value
            elif differentiated(value):
                raise ValueError(
                    f"{key} requires grad, but an update in place cannot be differentiated: use inplace=False"
                )
            elif value.numel() == 1:
                numbers[key] = value.item()
            elif value.dim() > 1:
                _scalar(value)
            else:
                columns[key] = value.tolist()
        return numbers, columns

    def step_pure(self, params: Tree, grads: Tree, state: OptState, lr: Any) -> tuple[Tree, dict[str, Tree]]:
        """Take one step with the pure body, and return the group's new parameters and slots."""
        t = state["step"] + 1
        # [L] if nodes differ; fractional if a relaxed schedule takes steps in part
        t = int(t) if t.numel() == 1 and not t.is_floating_point() else t.double()
        h = self.hyper(lr)
        counts = [x.numel() for x in (t, *vars(h).values()) if isinstance(x, Tensor)]
        new: Tree = {}
        new_slots: dict[str, Tree] = {slot: {} for slot in self.slots}
        for name, p, g, *values in zip(self.names, *self._lists(params, grads, state)):
            count_nodes([*counts, *[value.shape[0] for value in (p, g, *values)]])
            x = functools.partial(spread, like=p)
            new[name], slots = self.formula.body(p, -g if h.maximize else g, dict(zip(self.slots, values)), t, h, x)
            for slot in self.slots:
                new_slots[slot][name] = slots[slot]
        return new, new_slots

    def step_in_place(self, params: Tree, grads: Tree, state: OptState, lr: Any) -> tuple[Tree, dict[str, Tree]]:
        """Take one step with the kernel, in one call, or one per run of equal nodes if nodes differ."""
        numbers, columns = self.numbers(lr)
        if len(state["step"]) == 1:
            numbers["step"] = state["step"].item()
        else:
            columns["step"] = state["step"].tolist()
        lists, runs = self._lists(params, grads, state), _runs(columns)
        if len(runs) > 1:
            small = sum(max(x.numel() for x in row) for row in zip(*lists)) < _SMALL_RUN * len(runs)
            if small or self.formula.of_matrices:  # matrix products are faster in one call
                return self.step_pure(params, grads, state, lr)
        lists = _aligned(lists, set(map(len, columns.values())))
        step = self.formula.kernel or self._call_torch
        for run, values in runs:  # of contiguous tensors, with the `step`s made before
            p, g, *slots = [[x[run] for x in tensors] for tensors in lists] if columns else lists
            step(p, g, dict(zip(self.slots, slots)), SimpleNamespace(**numbers | values))
        trees = [dict(zip(self.names, tensors)) for tensors in lists]
        return trees[0], dict(zip(self.slots, trees[2:]))

    def _lists(self, params: Tree, grads: Tree, state: OptState) -> list[list[Tensor]]:
        """Return the tensors of the names, in their order: parameters, gradients, and those of each slot."""
        try:
            trees = [params, grads, *map(state.__getitem__, self.slots)]
            return [list(map(tree.__getitem__, self.names)) for tree in trees]
        except KeyError as missing:
            raise ValueError(
                f"the state has no {missing}, which {self.spec!r} needs: create it with rule.init(params)"
            ) from None

    def _call_torch(self, params: list[Tensor], grads: list[Tensor], slots: Lists, h: SimpleNamespace) -> None:
        t = int(h.step) + 1
        if self.formula.prepare is not None:
            self.formula.prepare(slots, h, t)
        products = slots.get(NUMBER, [])  # [run] each, but torch takes one number
        if products:
            slots[NUMBER] = [product[:1] for product in products]
        fused, foreach = self.implementation(params[0])
        if fused and self.formula.fused is not None and len({p.dtype for p in params}) == 1:
            self.formula.fused(params, grads, slots, h)
            return
        keywords: dict[str, Any] = {key: getattr(h, key) for key in self.keywords}
        if self.takes_fused:
            keywords["fused"] = fused
        absent = [] if self.takes_steps else [None] * len(params)
        arguments = [slots.get(slot, absent) for slot in self.formula.slots]
        if self.takes_steps:
            device = params[0].device if fused else torch.device("cpu")
            counts = torch.full((len(params),), t - 1.0, dtype=torch.float32, device=device)
            arguments.append(list(counts.unbind()))
        self.kernel(params, grads, *arguments, foreach=foreach, **keywords)
        for product in products:
            product[1:] = product[0].item()

    def implementation(self, p: Tensor) -> tuple[bool, bool]:
        """Return (fused, foreach): the spec's choice, else fused if torch has that kernel, else foreach."""
        fused, foreach = self.choice
        if fused is None:
            name = self.spec.cls.__name__.lower()
            fused = not foreach and self.takes_fused and _has_fused(name, p.device.type, p.dtype)
        if foreach is None:
            foreach = not fused  # on the CPU at least as fast as torch's plain loop
        return fused, foreach


def _functional(cls: type) -> Callable[..., None]:
    """Return torch's functional form of an optimizer: `torch.optim.adamw.adamw` for AdamW."""
    name = cls.__name__.lower()
    return getattr(importlib.import_module(f"torch.optim.{name}"), name)


@functools.cache
def _has_fused(name: str, device: str, dtype: torch.dtype) -> bool:
    if device == "mps" and dtype not in (torch.float32, torch.float16):
        return False
    if device == "cpu" and name == "sgd" and dtype in (torch.bfloat16, torch.float16):
        return False  # torch's kernel leaves such parameters unchanged
    key = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}.get(device)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::_fused_{name}_", key)


def _used(option: Any) -> bool:
    if isinstance(option, Tensor):
        return differentiated(option) or bool((option != 0).any())
    return bool(option)


def _scalar(value: Any) -> Any:
    """Return a hyperparameter in float64 on the CPU, for arithmetic with others as with Python's numbers."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() > 1:
        raise ValueError(
            f"a setting of shape {list(value.shape)} has one value per step: select a step with spec.at(t)"
        )
    return (value.reshape(()) if value.numel() == 1 else value).cpu().double()


def check_names(params: Tree, grads: Tree) -> None:
    """Raise a ValueError unless every parameter has a gradient and vice versa."""
    if params.keys() != grads.keys():
        odd = sorted(params.keys() ^ grads.keys())
        raise ValueError(f"params and grads must have the same names; only one of them has {odd}")


def count_nodes(counts: Iterable[int]) -> int:
    """Return L, from the number of nodes of each tensor and hyperparameter: 1 matches every L."""
    several = set(counts) - {1}
    if len(several) > 1:
        raise ValueError(f"numbers of nodes do not match: {sorted(several)}; each must be 1 or the same L")
    return several.pop() if several else 1


def _aligned(lists: list[list[Tensor]], counts: set[int]) -> list[list[Tensor]]:
    """Expand the tensors of each parameter to the same number of nodes, contiguous.

    torch's fused CPU kernels ignore strides: a transposed gradient would silently go to the wrong elements, and an
    expanded one would be read out of bounds.
    """
    rows = []
    for tensors in zip(*lists):
        sizes = counts.union(map(_NUM_NODES, tensors))
        if len(sizes) > 1:
            num_nodes = count_nodes(sizes)
            tensors = tuple(x.expand(num_nodes, *x.shape[1:]) for x in tensors)
        rows.append(map(Tensor.contiguous, tensors))
    return list(map(list, zip(*rows)))


def _runs(columns: dict[str, list[float]]) -> list[tuple[slice, dict[str, float]]]:
    """Return runs of consecutive nodes with equal values, and these values."""
    if not columns:
        return [(slice(None), {})]
    rows = list(zip(*columns.values()))
    starts = [i for i in range(len(rows)) if i == 0 or rows[i] != rows[i - 1]]
    stops = [*starts[1:], len(rows)]
    return [(slice(start, stop), dict(zip(columns, rows[start]))) for start, stop in zip(starts, stops)]


# ---------------------------------------------------------------------------------------------- node by node


@functools.cache
def _of_torch() -> frozenset[str]:
    """Return the attributes of every torch optimizer; creating the first one imports torch._dynamo, for seconds."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)])))


class PerNodeRule:
    """K ordinary optimizers with explicit state: the interface of `ElementwiseRule`, without a pure body.

    State: `{"step": [1 or L], "tensors": {slot: Tree}, "numbers": {slot: Tree}, "attributes": {...}}`: the
    tensors and the Python numbers of the optimizers' `.state`, and (place -> key -> `[L]`) the numbers among
    their attributes and parameter groups that differ from those of a new optimizer. Values that it stores
    anywhere else are lost between steps. A node whose `step` is 0 starts with a new optimizer, whatever the state
    holds for it: if only some nodes train, others may already have state.

    There is one optimizer per node, not one for all, since a rule may use all parameters (LAMB-like, D-adaptation).

    >>> from vecgym.optim import OptimSpec
    >>> class SignSGD(torch.optim.SGD):
    ...     def step(self):
    ...         for p in self.param_groups[0]["params"]:
    ...             p.data -= self.param_groups[0]["lr"] * p.grad.sign()
    >>> rule = OptimSpec(SignSGD, lr=0.5).rule()
    >>> params, grads = {"w": torch.ones(1, 2)}, {"w": torch.tensor([[1.0, 2.0], [-3.0, 4.0]])}
    >>> rule.update(params, grads, rule.init(params))[0]["w"]
    tensor([[0.5000, 0.5000],
            [1.5000, 0.5000]])
    """

    def __init__(self, spec: Spec):
        closure = inspect.signature(spec.cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{spec.cls.__name__} evaluates the loss again inside of step(closure), which is not supported:"
                f" use one of {STACKED_NAMES}, or a class whose step() needs no closure"
            )
        self.spec = spec
        # {the parameters' form: their optimizers}, at most one: building an optimizer takes longer than its step
        self._cache: dict[tuple[Any, ...], list[_Node]] = {}

    def __reduce__(self) -> Any:
        return PerNodeRule, (self.spec,)

    def init(self, params: Tree) -> OptState:
        """Return the initial state; most optimizers add to it in their first step."""
        num_nodes = self._num_nodes(params, None)
        params = _spread(params, num_nodes)
        state: OptState = {"tensors": {}, "numbers": {}, "attributes": {}}
        with self._nodes(params, num_nodes) as nodes:
            return {"step": torch.zeros(1, dtype=torch.int64), **_collect(nodes, state)}

    def update(
        self, params: Tree, grads: Tree, state: OptState, lr: float | Tensor | None = None, inplace: bool = True, *,
        missing: Gaps = MappingProxyType({}), fresh: Gaps = MappingProxyType({}),
    ) -> tuple[Tree, OptState]:  # fmt: skip
        """Take one step, with the arguments of `ElementwiseRule.update`; `inplace=False` works on copies.

        `missing`: the nodes for which a parameter has no gradient: its `grad` is None. `fresh`: those for which it has
        never had one, and so no state.

        Errors: ValueError if the update would have to be differentiated.
        """
        check_names(params, grads)
        settings = [lr, list(self.spec.kwargs.values())]
        tensors = leaves(settings if inplace else [settings, params, grads, state])
        if any(_differentiated(x) for x in tensors):
            raise ValueError(
                f"{self.spec.cls.__name__} has no pure body and cannot be differentiated: use one of"
                f" {STACKED_NAMES}, or detach what requires grad"
            )
        if "tensors" not in state:
            raise ValueError(f"a state of {list(state)} is not for {self.spec!r}: create it with rule.init(params)")
        with torch.no_grad():
            if not inplace:
                params, grads, state = map_leaves(torch.clone, (params, grads, state))
            num_nodes = self._num_nodes([params, grads, state], lr)
            params, grads = _spread(params, num_nodes), _spread(grads, num_nodes)
            slots = _spread({kind: state[kind] for kind in ("tensors", "numbers", "attributes")}, num_nodes)
            steps = state["step"].expand(num_nodes).tolist()
            with self._nodes(params, num_nodes) as nodes:
                for node, num_steps in zip(nodes, steps):
                    if num_steps > 0:
                        node.load(slots, fresh)
                    node.step(grads, lr, missing)
                return params, {"step": state["step"] + 1, **_collect(nodes, slots)}

    @contextmanager
    def _nodes(self, params: Tree, num_nodes: int) -> Iterator[list[_Node]]:
        """Provide a new optimizer for each node, on views of the stacked parameters."""
        form = (num_nodes, *((name, p.shape[1:], p.dtype, p.device) for name, p in params.items()))
        nodes = self._cache.get(form) or [_Node(self.spec, params, i) for i in range(num_nodes)]
        self._cache = {}
        for node in nodes:
            node.begin(params)
        yield nodes
        for node in nodes:
            node.end()
        self._cache = {form: nodes} if nodes[0].renewable else {}

    def _num_nodes(self, trees: Any, lr: float | Tensor | None) -> int:
        settings = leaves([lr, list(self.spec.kwargs.values())])
        return count_nodes([*[x.shape[0] for x in leaves(trees)], *[x.numel() for x in settings]])


class _Node:
    """Node i's optimizer; from `begin` to `end` its parameters are views of the stacked ones."""

    def __init__(self, spec: Spec, params: Tree, i: int):
        self.i = i
        self.params = {name: nn.Parameter(p.detach()[i]) for name, p in params.items()}
        self.optimizer = spec.build(self.params.items(), node=i)
        self.fresh = {place: _numbers(values) for place, values in self.places().items()}
        self.views: Tree = {}
        self.loaded: dict[tuple[str, str], Tensor] = {}  # (slot, name) -> view of the stacked state
        self._changing = [*self.places().values(), self.optimizer.defaults]
        self._new = [dict(values) for values in self._changing]
        added, groups = {key: x for key, x in vars(self.optimizer).items() if key not in _of_torch()}, self._new[1:]
        values = [*added.values(), *(x for group in groups for key, x in group.items() if key != "params")]
        # Whether `begin` can reset everything that a step may change.
        self.renewable = all(isinstance(x, (bool, int, float, str, tuple, NoneType)) for x in values)

    def begin(self, params: Tree) -> None:
        """Reset the optimizer to its initial state, with these parameters."""
        for values, new in zip(self._changing, self._new):
            values.clear()
            values.update(new)
        self.views = {name: p.detach()[self.i] for name, p in params.items()}
        for name, p in self.params.items():
            p.data = self.views[name]

    def end(self) -> None:
        """Release all tensors of the run."""
        self.optimizer.state.clear()
        self.views, self.loaded = {}, {}
        for p in self.params.values():
            p.data, p.grad = p.data.new_empty(0), None

    def places(self) -> dict[str, dict[str, Any]]:
        """Return the places where an optimizer may store numbers that belong to no parameter."""
        groups = {f"group{j}": group for j, group in enumerate(self.optimizer.param_groups)}
        return {"optimizer": vars(self.optimizer), **groups}

    def load(self, state: OptState, fresh: Gaps) -> None:
        """Load the explicit state into the optimizer, tensors as views."""
        self.optimizer.state.clear()
        for kind in ("tensors", "numbers"):
            for slot, tree in state[kind].items():
                for name in [name for name in tree if self.i not in fresh.get(name, ())]:
                    value = tree[name][self.i] if kind == "tensors" else tree[name][self.i].item()
                    self.loaded[slot, name] = self.optimizer.state[self.params[name]][slot] = value
        places = self.places()
        for place, values in state["attributes"].items():
            places[place].update({key: x[self.i].item() for key, x in values.items()})

    def step(self, grads: Tree, lr: float | Tensor | None, missing: Gaps) -> None:
        """Take one step on the views. A group with its own learning rate keeps its ratio to the base rate."""
        if lr is not None:
            lr = lr.reshape(-1)[self.i if lr.numel() > 1 else 0].item() if isinstance(lr, Tensor) else lr
            base = self.optimizer.defaults["lr"]
            for group in self.optimizer.param_groups:
                group["lr"] = lr if group["lr"] == base else lr * (group["lr"] / base)
        for name, p in self.params.items():
            p.grad = None if self.i in missing.get(name, ()) else grads[name][self.i]
        self.optimizer.step()
        for name, p in self.params.items():
            if p.data_ptr() != self.views[name].data_ptr():  # the optimizer has replaced p.data
                self.views[name].copy_(p)


def _collect(nodes: list[_Node], state: OptState) -> OptState:
    """Stack the optimizers' state; views of `state` are not copied."""
    new: OptState = {"tensors": {}, "numbers": {}, "attributes": {}}
    for name in nodes[0].params:
        states = [node.optimizer.state.get(node.params[name], {}) for node in nodes]
        for slot, first in {slot: value for node_state in states for slot, value in node_state.items()}.items():
            nothing = torch.zeros_like(first) if isinstance(first, Tensor) else type(first)()  # of a fresh parameter
            values = [node_state.get(slot, nothing) for node_state in states]
            if all(isinstance(value, Tensor) for value in values):
                views = all(value is node.loaded.get((slot, name)) for value, node in zip(values, nodes))
                stacked = state["tensors"][slot][name] if views else torch.stack(values).detach()
                new["tensors"].setdefault(slot, {})[name] = stacked
            elif all(isinstance(value, (bool, int, float)) for value in values):
                new["numbers"].setdefault(slot, {})[name] = _stack_numbers(values)
            else:
                raise ValueError(
                    f"{type(nodes[0].optimizer).__name__} keeps a {type(values[0]).__name__} in"
                    f" state[{name!r}][{slot!r}]; allowed are tensors and numbers, which can be saved in a checkpoint"
                )
    for place in nodes[0].fresh:
        current = [_numbers(node.places()[place]) for node in nodes]
        pairs = [(numbers, node.fresh[place]) for numbers, node in zip(current, nodes)]
        changed = [key for key in current[0] if any(numbers[key] != fresh.get(key) for numbers, fresh in pairs)]
        if changed:
            new["attributes"][place] = {key: _stack_numbers([numbers[key] for numbers in current]) for key in changed}
    return new


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "lr" and isinstance(value, (bool, int, float))}


def _stack_numbers(values: list[Any]) -> Tensor:
    """Stack Python numbers as `[L]`: bool, int64 or float64, which convert back without loss."""
    return torch.tensor(values, dtype=torch.float64 if any(isinstance(v, float) for v in values) else None)


def _spread(tree: Any, num_nodes: int) -> Any:
    """Expand every tensor to `num_nodes` nodes, in contiguous storage."""
    return map_leaves(lambda x: x.expand(num_nodes, *x.shape[1:]).contiguous(), tree)


def _differentiated(x: Tensor) -> bool:
    """Whether an update that uses `x` would be differentiated; `no_grad` only disables backward mode."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None


Rule: TypeAlias = ElementwiseRule | PerNodeRule
