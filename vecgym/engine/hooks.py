"""Hooks on a model's gradients: find them, copy them with the model, or refuse them.

Hooks of a parameter (`p.register_hook`) and backward hooks of a module expect one node's backward pass, so each node
needs its own: they need the engine `loop`. Hooks that run after `p.grad` is set
(`p.register_post_accumulate_grad_hook`) have nothing to run on. Forward hooks are part of the forward pass.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules
from torch.nn.parameter import is_lazy

from vecgym.core.nodes import LOSS_FN

OF_A_MODULE = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def of_parameters(model: nn.Module) -> dict[str, list[Callable[[Tensor], Tensor | None]]]:
    """Return the hooks of each parameter, in the order in which torch calls them.

    >>> model = nn.Linear(2, 1)
    >>> handle = model.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    >>> list(of_parameters(model))
    ['weight']
    """
    return {name: list(p._backward_hooks.values()) for name, p in model.named_parameters() if p._backward_hooks}


def on_gradients(model: nn.Module) -> str:
    """Describe the first hook that changes or sees a gradient; "" if there is none.

    >>> on_gradients(nn.Linear(2, 1))
    ''
    """
    for name in of_parameters(model):
        return f"parameter {name!r} has a hook on its gradient (register_hook)"
    for name, module in model.named_modules():
        kind = f"{f'module {name!r}' if name else 'the model'} has a backward hook"
        if module._backward_hooks:
            return f"{kind} (register_full_backward_hook)"
        if module._backward_pre_hooks:
            return f"{kind} (register_full_backward_pre_hook)"
    if of_all_modules._global_backward_hooks or of_all_modules._global_backward_pre_hooks:
        return "all modules have a backward hook (torch.nn.modules.module.register_module_full_backward_hook)"
    return ""


def check_hooks(model: nn.Module) -> None:
    """Raise a ValueError for hooks that cannot work as they do in a plain torch loop.

    >>> model = nn.Linear(2, 1)
    >>> handle = model.weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1, 1))
    >>> try:
    ...     check_hooks(model)
    ... except ValueError as error:
    ...     print(str(error).split(":")[0])
    parameter 'weight' has a hook on its p.grad (register_post_accumulate_grad_hook), which no node has
    """
    for name, p in model.named_parameters():
        if p._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name!r} has a hook on its p.grad (register_post_accumulate_grad_hook), which no node has: "
                'optimizer steps, clipping and decay belong to the strategy, FedAvgStrategy("sgd", max_norm=1.0), say; '
                "gradients can be changed by p.register_hook(lambda grad: ...)."
            )
    for name, hooks in of_parameters(model).items():
        if any(getattr(hook, "__module__", "") == "torch.autograd.graph" for hook in hooks):
            raise ValueError(
                f"parameter {name!r} has a hook by torch.autograd.graph.register_multi_grad_hook, which needs a "
                "backward pass into p.grad: use p.register_hook(lambda grad: ...) on each parameter."
            )
    _check_closures(model)


def _check_closures(model: nn.Module) -> None:
    """Raise a ValueError for a function in the model that holds a parameter, instead of using its argument.

    The search is one level deep. Without it, a parameter in the default of a hook's argument silently trains to zeros.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    for where, function in _functions(model):
        for reference in _references(function):
            for x in reference.parameters() if isinstance(reference, nn.Module) else [reference]:
                if id(x) in names:
                    raise ValueError(
                        f"{where} is a function that holds the model's parameter {names[id(x)]!r}, or its module: in "
                        "every step of every node it would see the value of now. Compute this in forward; a hook of "
                        "a module, and loss_fn, get that module as an argument."
                    )


def _functions(model: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each plain function in the model, which copies of the model share, after its place."""
    for name, hooks in of_parameters(model).items():
        for hook in hooks:
            # Unlike a module's hook, it is never copied with the model: a method stays bound to the original.
            yield f"the hook of parameter {name!r}", hook
    for name, module in model.named_modules():
        of = f"module {name!r}" if name else "the model"
        for hook in (f for kind in OF_A_MODULE for f in getattr(module, kind).values()):
            if isinstance(hook, types.FunctionType):
                yield f"a hook of {of}", hook
        if is_compiled(module):
            continue
        for key, value in vars(module).items():
            if isinstance(value, types.FunctionType) and key != "_compiled_call_impl":
                yield "loss_fn" if key == LOSS_FN else f"{key!r} of {of}", value


def _references(function: Callable[..., Any]) -> list[Any]:
    """Return all values that a function refers to directly: outer variables, globals, defaults, arguments, object."""
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), *_references(function.func)]
    owner = [function.__self__] if isinstance(function, types.MethodType) else []
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, types.FunctionType):
        return [*owner, *getattr(function, "__dict__", {}).values()]
    try:
        outer = inspect.getclosurevars(function)
    except ValueError:  # a variable of an outer function is unset
        return owner
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*owner, *outer.nonlocals.values(), *outer.globals.values(), *defaults]


def check_ties(model: nn.Module, changing: Collection[str] = ()) -> None:
    """Raise a ValueError for tensors of a model that share memory and that training changes: nodes have each apart.

    One object in several places is one tensor. Parts of a tensor that do not overlap may share its memory, and an
    attribute may hold the whole tensor.

    Args:
        changing: buffers that training changes, besides the parameters with `requires_grad`.

    >>> model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6))
    >>> model[1].weight = nn.Parameter(model[0].weight.t())
    >>> try:
    ...     check_ties(model)
    ... except ValueError as error:
    ...     print(str(error).split(":")[0])
    '0.weight' and '1.weight' of the model share memory
    """
    trained = {name for name, p in model.named_parameters() if p.requires_grad} | set(changing)
    registered = {name for kind in (model.named_parameters(), model.named_buffers()) for name, _ in kind}
    tensors = sorted(_tensors(model), key=lambda entry: (str(entry[1].device), entry[1].data_ptr()))
    for i, (name, x) in enumerate(tensors):
        end = x.data_ptr() + _span(x)
        for other, y in itertools.takewhile(lambda entry: entry[1].data_ptr() < end, tensors[i + 1 :]):  # noqa: B023
            first, second = ((x, name), (y, other)) if name in trained else ((y, other), (x, name))
            of_parts = second[1] not in registered and _span(second[0]) > _span(first[0])
            if first[1] in trained and not of_parts and x.device == y.device and _overlap(x, y):
                raise ValueError(_shared(*first, *second))
        if name in trained and is_expanded(x):
            raise ValueError(
                f"{name!r} of the model is expanded: several of its elements share memory, which no optimizer can "
                "update. Give each its own, nn.Parameter(x.clone()), or let forward expand a smaller parameter."
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with memory once: parameters, buffers, and attributes, unless a hook sets them."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = {key: x for key, x in vars(module).items() if f"{key}_orig" not in module._parameters}
        for key, x in (*module._parameters.items(), *module._buffers.items(), *own.items()):
            if isinstance(x, Tensor) and id(x) not in seen and x.layout == torch.strided and not is_lazy(x):
                seen.add(id(x))
                with contextlib.suppress(RuntimeError):  # within a transform it has no memory
                    if x.numel() and x.data_ptr():
                        yield f"{path}.{key}" if path else key, x


def is_expanded(x: Tensor) -> bool:
    """Whether elements share memory, as far as strides and size show it."""
    zero = any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride()))
    return zero or x.numel() * x.element_size() > _span(x)


def _span(x: Tensor) -> int:
    """Return how many bytes lie between the beginning of a tensor's first element and the end of its last one."""
    return x.element_size() * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share the memory of an element; `a` does not begin after `b`."""
    unit, start = min(a.element_size(), b.element_size()), a.data_ptr()
    memory = torch.zeros(max(_span(a), b.data_ptr() - start + _span(b)) // unit + 1, dtype=torch.bool)

    def elements(x: Tensor) -> Tensor:
        size = x.element_size() // unit
        shape = [n if stride else 1 for n, stride in zip(x.shape, x.stride())]
        return memory.as_strided((*shape, size), (*[s * size for s in x.stride()], 1), (x.data_ptr() - start) // unit)

    elements(a).fill_(True)
    return bool(elements(b).any())


def _shared(x: Tensor, name: str, y: Tensor, other: str) -> str:
    if not isinstance(y, nn.Parameter):
        fix = f"let forward compute it from self.{name}, or keep the values of now: self.{name}.detach().clone()"
    elif (x.shape, x.stride()) == (y.shape, y.stride()):
        fix = f"give one nn.Parameter object in both places: self.{other} = self.{name}"
    else:
        fix = f"use one in both places: F.linear(x, self.{name}.t()) in forward, say"
    return (
        f"{name!r} and {other!r} of the model share memory: in plain torch a change of one changes both, but each node "
        f"has its own of both, and they would part. Instead, {fix}."
    )


def is_compiled(model: Any) -> bool:
    """Whether `model` is the wrapper that `torch.compile(module)` returns, with the module as `_orig_mod`.

    >>> is_compiled(nn.Linear(2, 1))
    False
    """
    return isinstance(model, nn.Module) and "_orig_mod" in model._modules


def uncompiled(copy: nn.Module, model: nn.Module) -> nn.Module:
    """Replace the wrappers of `torch.compile` in a copy of a model by the modules and functions that they wrap.

    >>> from copy import deepcopy
    >>> model = nn.Sequential(torch.compile(nn.Linear(2, 1)))
    >>> uncompiled(deepcopy(model), model)
    Sequential(
      (0): Linear(in_features=2, out_features=1, bias=True)
    )
    """
    rebind(copy, model)
    around = nn.ModuleDict({"model": copy})
    for module in around.modules():
        for key, part in module._modules.items():
            while is_compiled(part):
                part = module._modules[key] = part._modules["_orig_mod"]  # type: ignore[union-attr]
    return around["model"]


def rebind(copy: nn.Module, model: nn.Module) -> None:
    """Give a copy its own methods in place of compiled ones, such as `model.forward`, which are the model's."""
    own = {id(a): b for a, b in zip(model.modules(), copy.modules())}
    for module in [module for module in copy.modules() if not is_compiled(module)]:
        for key, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
                inner = value._torchdynamo_orig_callable
                if isinstance(inner, types.MethodType):
                    inner = types.MethodType(inner.__func__, own.get(id(inner.__self__), module))
                vars(module)[key] = inner


def check_pickled(model: nn.Module, fix: str) -> None:
    """Raise a ValueError, with `fix`, for hooks that pickle drops: another process would not have them."""
    hooked = [f"parameter {name!r} has a hook on its gradient (register_hook)" for name in of_parameters(model)]
    if any(getattr(of_all_modules, f"_global{kind}") for kind in OF_A_MODULE):
        hooked.append("all modules have a hook (torch.nn.modules.module.register_module_...)")
    if hooked:
        raise ValueError(f"{hooked[0]}, which would be missing in the processes that are started: {fix}.")


def computed(model: nn.Module) -> dict[int, Tensor]:
    """Detach the tensors that a forward pass left in the model, by id: `copy.deepcopy` refuses tensors with a graph.

    An example is the weight that `torch.nn.utils.weight_norm` computes in each forward pass.
    """
    tensors = [x for module in model.modules() for x in vars(module).values() if isinstance(x, Tensor)]
    return {id(x): x.detach().clone() for x in tensors if x.grad_fn is not None}
