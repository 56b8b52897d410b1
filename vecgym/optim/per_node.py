"""Any torch optimizer on stacked tensors: one ordinary optimizer per node on views of the stacked storage.

For rules that are not elementwise because they use a whole tensor (its norm, its rank), and for a user's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from vecgym.core.tree import Tree, leaves, map_leaves
from vecgym.optim.elementwise import OptState, Spec, check_names, count_nodes
from vecgym.optim.formulas import stacked_names


@functools.cache
def _of_torch() -> frozenset[str]:
    """Return the attributes of every torch optimizer; creating the first one imports torch._dynamo, for seconds."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)])))


class PerNodeRule:
    """K ordinary optimizers with explicit state: the interface of `ElementwiseRule`, without a pure body.

    State: `{"step": [1 or L], "tensors": {slot: Tree}, "numbers": {slot: Tree}, "attributes": {...}}`: the
    tensors and the Python numbers of the optimizers' `.state`, and (place -> key -> `[L]`) the numbers among
    their attributes and parameter groups that differ from those of a new optimizer. What an optimizer stores
    anywhere else is lost between steps. A node whose `step` is 0 starts with a new optimizer, whatever the state
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
                f" use one of {stacked_names()}, or a class whose step() needs no closure"
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
        self,
        params: Tree,
        grads: Tree,
        state: OptState,
        lr: float | Tensor | None = None,
        inplace: bool = True,
    ) -> tuple[Tree, OptState]:
        """Take one step, with the arguments of `ElementwiseRule.update`; `inplace=False` works on copies.

        Errors: ValueError if the update would have to be differentiated.
        """
        check_names(params, grads)
        settings = [lr, list(self.spec.kwargs.values())]
        tensors = leaves(settings if inplace else [settings, params, grads, state])
        if any(_differentiated(x) for x in tensors):
            raise ValueError(
                f"{self.spec.cls.__name__} has no pure body and cannot be differentiated: use one of"
                f" {stacked_names()}, or detach what requires grad"
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
                for node, done in zip(nodes, steps):
                    if done > 0:
                        node.load(slots)
                    node.step(grads, lr)
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

    def load(self, state: OptState) -> None:
        """Load the explicit state into the optimizer, tensors as views."""
        self.optimizer.state.clear()
        for slot, tree in state["tensors"].items():
            for name, x in tree.items():
                self.loaded[slot, name] = self.optimizer.state[self.params[name]][slot] = x[self.i]
        for slot, tree in state["numbers"].items():
            for name, x in tree.items():
                self.optimizer.state[self.params[name]][slot] = x[self.i].item()
        places = self.places()
        for place, values in state["attributes"].items():
            places[place].update({key: x[self.i].item() for key, x in values.items()})

    def step(self, grads: Tree, lr: float | Tensor | None) -> None:
        """Take one step on the views. A group with its own learning rate keeps its ratio to the base rate."""
        if lr is not None:
            lr = lr.reshape(-1)[self.i if lr.numel() > 1 else 0].item() if isinstance(lr, Tensor) else lr
            base = self.optimizer.defaults["lr"]
            for group in self.optimizer.param_groups:
                group["lr"] = lr if group["lr"] == base else lr * (group["lr"] / base)
        for name, p in self.params.items():
            p.grad = grads[name][self.i]
        self.optimizer.step()
        for name, p in self.params.items():
            if p.data_ptr() != self.views[name].data_ptr():  # the optimizer has replaced p.data
                self.views[name].copy_(p)


def _collect(nodes: list[_Node], state: OptState) -> OptState:
    """Stack the optimizers' state; what is still a view of `state` is not copied."""
    new: OptState = {"tensors": {}, "numbers": {}, "attributes": {}}
    for name in nodes[0].params:
        states = [node.optimizer.state.get(node.params[name], {}) for node in nodes]
        for slot in states[0]:
            values = [node_state[slot] for node_state in states]
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
