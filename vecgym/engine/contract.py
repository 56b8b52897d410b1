"""The contract of a model: its type, its loss and its metrics; and the errors for a model that breaks it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import re
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from vecgym.core import check, tree
from vecgym.core.errors import ModelError, warn
from vecgym.core.nodes import LOSS_FN
from vecgym.engine import hooks

M = TypeVar("M", bound=nn.Module)
WRAPPER = """The model is called as model(batch) and must return the mean loss over the batch as one number: give
loss_fn=loss,

    def loss(module, batch):
        {body}

in place of that call, or vecgym.models.Classifier(net), which is that for classes."""
OF_A_NETWORK = "x, y = batch\n        return F.cross_entropy(module(x), y)"
OF_TRAINING_STEP = "return module.training_step(batch, 0)  # if that returns only the loss"
OF_KEYWORDS = "return module(**batch).loss  # of a transformers model with labels, say"
OF_LOSS_FN = "loss_fn(module, batch) must return the mean loss over the batch as one number, or a dict with it."
IGNORED = -100  # the label that torch's losses leave out by default
WEIGHT = ".weight"  # of a node's mean loss, among its buffers, none of which has such a name


def fix(model: nn.Module, batch: Any = None) -> str:
    """Show how to give the loss of a network for such batches, as code.

    >>> print(fix(nn.Linear(2, 1)).splitlines()[-3])
            return F.cross_entropy(module(x), y)
    """
    if LOSS_FN in vars(model):
        return OF_LOSS_FN
    of_batch = OF_KEYWORDS if isinstance(batch, Mapping) else OF_A_NETWORK
    return WRAPPER.format(body=OF_TRAINING_STEP if hasattr(model, "training_step") else of_batch)


def with_loss(model: M, loss_fn: Any) -> M:
    """Return a model whose loss is `loss_fn(model, batch)` in place of `model(batch)`; it shares everything else.

    A module or a function that `torch.compile` has wrapped is unwrapped.

    >>> model = nn.Linear(2, 1)
    >>> square = with_loss(model, lambda module, batch: module(batch).square().mean())
    >>> square is model, square.weight is model.weight
    (False, True)
    """
    while hooks.is_compiled(model):
        model = model._orig_mod  # type: ignore[assignment]
    if loss_fn is None or not isinstance(model, nn.Module):
        return model
    loss_fn = getattr(loss_fn, "_torchdynamo_orig_callable", loss_fn)
    give = "give a function of both: lambda module, batch: F.cross_entropy(module(batch[0]), batch[1])"
    if not callable(loss_fn) or isinstance(loss_fn, (nn.Module, type)):
        raise TypeError(f"loss_fn is {check.kind_of(loss_fn)}; {give}.")
    if wrong := check.misfit(loss_fn, model, None):
        raise TypeError(f"loss_fn cannot be called as loss_fn(module, batch): {wrong}; {give}.")
    new = object.__new__(type(model))  # copy.copy() refuses parametrized modules
    vars(new).update(vars(model))
    vars(new)[LOSS_FN] = loss_fn  # not a submodule, and no hindrance to an attribute of the model's own
    hooks.check_hooks(new)  # it may hold the module, instead of using its argument
    return new


def check_model(model: Any) -> None:
    """Raise an error unless a model can be trained, before it is ever called.

    >>> try:
    ...     check_model(nn.Linear(2, 1).requires_grad_(False))
    ... except ValueError as error:
    ...     print(str(error).split(":")[0])
    the model, of type Linear, has no trainable parameter
    """
    check.instance("model", model, nn.Module, "an nn.Module object whose forward(batch) returns a loss")
    for name, module in model.named_modules():
        _check_kind(module, name)
    if LOSS_FN not in vars(model):
        _check_forward(model)
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(f"the model's parameter {name!r} has no values yet: call the model once on a batch.")
    if "val_metrics" in vars(model) and LOSS_FN not in vars(model):  # it would be ignored
        raise TypeError("the model has its own val_metrics as an attribute: define it as a method of its class.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"the model, of type {type(model).__name__}, has no trainable parameter: nothing can be trained. "
            "Fix: model.requires_grad_(True), at least for a part of it."
        )
    hooks.check_ties(model)
    hooks.check_hooks(model)
    _check_train(model)


def _check_kind(module: nn.Module, name: str) -> None:
    where = f"module {name!r} of the model" if name else "the model"
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{where} is TorchScript (torch.jit.script or trace), whose parameters cannot be replaced by those of a "
            "node: give the original nn.Module; torch.jit.script(averaged) works afterwards."
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = f"model.{name}.module" if name else "model.module"
        raise TypeError(
            f"{where} is a {type(module).__name__}, which splits one batch itself; here the strategy does that: give "
            f'{inner} instead. Several processes: fit(..., backend="processes", num_processes=2).'
        )


def _check_forward(model: nn.Module) -> None:
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise TypeError(f"the model, of type {type(model).__name__}, has no forward. {fix(model)}")
    if wrong := check.misfit(model.forward, None):
        signature = inspect.signature(model.forward)
        named = {"labels", "input_ids"} & signature.parameters.keys()
        raise TypeError(
            f"the model's forward{signature} cannot be called as forward(batch): {wrong}. "
            f"{fix(model, dict.fromkeys(named) or None)}"
        )


def _check_train(model: nn.Module) -> None:
    """Raise the error for a layer that writes to its tensors in `train()` or `eval()`, as loralib merges weights."""
    own = [(path, x) for path, x in model.named_modules() if x._parameters and type(x).train is not nn.Module.train]
    for path, layer in own:
        probe = copy.deepcopy(layer, dict[int, Any](hooks.computed(layer)))
        for p in (p for p in probe.parameters() if p.is_floating_point()):
            p.data += 0.5  # the weights that are merged may be 0 at the beginning
        tensors = itertools.chain(probe.named_parameters(), probe.named_buffers())
        before = [(name, x, x.detach().nan_to_num()) for name, x in tensors]
        for mode in (False, True):
            probe.train(mode)
            if name := next((name for name, x, y in before if not torch.equal(x.nan_to_num(), y)), ""):
                raise ModelError(
                    f"{path or 'the model'}, a {type(layer).__name__}, writes to its {name!r} in train() or eval(), as "
                    "loralib does to merge weights. Nodes train on copies of the model, and are evaluated on others, "
                    "so both would be wrong. Compute them in forward: lora.Linear(..., merge_weights=False), say."
                )


def check_modes(model: nn.Module) -> None:
    """Warn about a model in training mode whose parts are all in eval mode, such as a pretrained network.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     check_modes(nn.Sequential(nn.Sequential(nn.Linear(2, 1), nn.Dropout()).eval()))
    >>> str(caught[0].message).split(",")[0]
    'all parts of the model are in eval mode'
    """
    parts = list(model.modules())[1:]
    trained = any(p.requires_grad for part in parts for p in part.parameters(recurse=False))
    if model.training and trained and not any(part.training for part in parts):
        warn(
            "all parts of the model are in eval mode, and the model itself is not: each part keeps its mode, so there "
            "is no dropout, and batch norms use their running statistics. model.train() before the run changes that."
        )


def check_loss(loss: Any, model: nn.Module, batch: Any = None) -> None:
    """Raise an error unless a model returned a scalar loss that depends on its parameters.

    >>> check_loss(torch.ones((), requires_grad=True), nn.Linear(2, 1))
    >>> try:
    ...     check_loss(torch.ones(8, requires_grad=True), nn.Linear(2, 1))
    ... except ValueError as error:
    ...     print(str(error).split(". ")[0])
    the model returned float32 [8], not a scalar tensor of a floating-point type
    """
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        raise ModelError(
            f"the model returned {form_of(loss)}, not a scalar tensor of a floating-point type. {fix(model, batch)}"
        )
    if not loss.requires_grad:
        raise ModelError(
            "the model's loss does not depend on any trainable parameter: check for .detach(), .item(), "
            "torch.no_grad() in its forward, and that some parameters have requires_grad=True."
        )


def check_written(names: Collection[str]) -> None:
    """Raise the error for a forward that writes to parameters that are not trained.

    >>> try:
    ...     check_written(["center"])
    ... except ValueError as error:
    ...     print(str(error).split(":")[0])
    the model's forward writes to 'center', a parameter that is not trained
    """
    if names:
        *_, name = min(names).split(".")
        raise ModelError(
            f"the model's forward writes to {min(names)!r}, a parameter that is not trained: the nodes share it. "
            f"Make it a buffer, of which each node has its own: register_buffer({name!r}, ...)."
        )


def check_steady(names: Collection[str]) -> None:
    """Raise an error for a forward that writes to tensors that its first pass did not change.

    >>> try:
    ...     check_steady(["center"])
    ... except ValueError as error:
    ...     print(str(error).split(",")[0])
    the model's forward writes to 'center'
    """
    if names:
        name = min(names)
        raise ModelError(
            f"the model's forward writes to {name!r}, and did not in its first pass, so the nodes share it. "
            "Write to it in every pass, the same value if nothing is due: "
            f"self.{name}.copy_(torch.where(due, new, self.{name}))."
        )


def state_error(where: str) -> ModelError:
    """Return the error for a forward whose result depends on a value that an earlier pass left somewhere.

    >>> str(state_error("the model's encoder.counts['a']")).split(",")[0], "'counts'" in str(state_error("counts[0]"))
    ("the model's forward keeps state in the model's encoder.counts['a']", True)
    """
    *_, name = re.findall(r"\w+", where.partition("[")[0])
    return ModelError(
        f"the model's forward keeps state in {where}, on which its result depends. All nodes would share it, and "
        "validation and the returned model would not see it. Keep it in a buffer, of which each node has its own: "
        f"self.register_buffer({name!r}, torch.tensor(...)), which forward may change or replace. Random numbers of "
        "torch, numpy and Python need no buffer: they depend on the run's seed, the step and the node."
    )


def warn_of_late_draws() -> None:
    """Warn about random numbers on several node threads that the first pass did not draw."""
    warn(
        "the model draws random numbers, and did not in its first pass, so its nodes were spread over threads, which "
        "mix their order up: this step cannot be repeated. Give node_threads=1. The nodes take turns from now on."
    )


def check_influence(unused: Collection[str], params: Collection[str]) -> None:
    """Raise the error for a model whose loss depends on none of its parameters."""
    if len(unused) == len(params) > 0:
        raise ModelError(
            f"the model's loss depends on none of its trainable parameters, {', '.join(sorted(unused)[:3])}: does "
            "forward replace them (self.weight = nn.Parameter(...)), or detach them? Write in place, under "
            "torch.no_grad(), or use torch.nn.utils.parametrize."
        )


def check_differentiable(model: nn.Module, written: Collection[str] = ()) -> None:
    """Raise a ValueError for a model whose gradient torch cannot differentiate, or differentiates wrongly.

    Args:
        written: parameters that its forward changes.

    >>> model = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    >>> try:
    ...     check_differentiable(model)
    ... except ValueError as error:
    ...     print(str(error).split(":")[0])
    module 'parametrizations.weight.0' has a spectral norm
    """
    if hooked := hooks.on_gradients(model):
        raise ValueError(
            f"{hooked}, through which no derivatives can be taken: remove it (handle.remove()), and do the same in "
            "forward or in the strategy."
        )
    if written:
        raise ValueError(
            f"the model's forward writes to its parameter {min(written)!r}, through which no derivatives can be taken: "
            "use torch.nn.utils.parametrize, or let the strategy do it."
        )
    for name, module in model.named_modules():
        of_hooks = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
        if of_hooks or isinstance(module, _SpectralNorm):
            raise ValueError(
                f"{f'module {name!r}' if name else 'the model'} has a spectral norm: its power iteration has no "
                "derivatives, so that those of a run would be wrong. Use weight_norm instead, of "
                "torch.nn.utils.parametrizations."
            )


def offers_metrics(model: nn.Module) -> bool:
    """Whether a model defines its own validation metrics, and no `loss_fn` is in their place; see `Engine.measures`.

    >>> class Classifier(nn.Module):
    ...     def val_metrics(self, batch):
    ...         return {"loss": self(batch), "accuracy": torch.tensor(0.5)}
    >>> offers_metrics(Classifier()), offers_metrics(nn.Linear(1, 1))
    (True, False)
    """
    return LOSS_FN not in vars(model) and callable(getattr(type(model), "val_metrics", None))


def check_val_metrics(metrics: Any, what: str = "val_metrics(batch)") -> None:
    """Raise an error unless a model's `val_metrics`, or a `loss_fn`, returned scalar metrics with a loss.

    >>> check_val_metrics({"loss": torch.tensor(1.0), "accuracy": torch.tensor(0.5)})
    >>> try:
    ...     check_val_metrics({"accuracy": torch.tensor(0.5)})
    ... except TypeError as error:
    ...     print(str(error).split(". ")[0])
    val_metrics(batch) returned {'accuracy': float32 []}; a dict with "loss" is needed
    """
    needed = (
        'Return scalar tensors, means over the batch, by name: {"loss": self(batch), "accuracy": accuracy}. For means '
        'over tokens, say, instead of examples, add their number: "weight": (labels != -100).sum().'
    )
    if not isinstance(metrics, dict) or "loss" not in metrics:
        raise ModelError(f'{what} returned {form_of(metrics)}; a dict with "loss" is needed. {needed}')
    for name, x in metrics.items():
        scalar = isinstance(x, Tensor) and x.dim() == 0 and not x.is_complex()
        weight = name == "weight" and (scalar or isinstance(x, (int, float)))
        if not weight and not (scalar and x.is_floating_point()):
            raise ModelError(f"{what} returned {form_of(x)} as {name!r}. {needed}")


def weight_of(metrics: dict[str, Any]) -> Any:
    """Return the weight of a loss that had one in the first pass.

    >>> weight_of({"loss": torch.tensor(1.0), "weight": torch.tensor(7)})
    tensor(7)
    """
    if "weight" not in metrics:
        raise ModelError('the loss had a "weight" in the first pass, and has none here: return one for every batch.')
    return metrics["weight"]


def check_weight(weight: Tensor | None) -> bool:
    """Return whether a mean loss has a weight; raise an error for a negative or infinite one.

    >>> check_weight(torch.tensor(0)), check_weight(None)
    (True, False)
    >>> try:
    ...     check_weight(torch.tensor(-1.0))
    ... except ValueError as error:
    ...     print(str(error).split(":")[0])
    the "weight" of the loss is -1.0
    """
    if weight is not None and not 0 <= float(weight) < math.inf:
        raise ModelError(
            f'the "weight" of the loss is {float(weight)}: it is the number of tokens (or examples) of which the '
            'loss is the mean, such as "weight": (labels != -100).sum().'
        )
    return weight is not None


def warn_of_parts(batch: Any, size: int | None, weighted: bool) -> None:
    """Warn if a batch with labels of -100 is computed in parts of `size` examples whose losses have no weights.

    >>> warn_of_parts({"labels": torch.tensor([[[3, -100], [1, 2]]])}, 1, weighted=True)
    """
    leaves = () if weighted or size is None else tree.flatten(batch)
    for path, x in leaves:
        whole = isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex()) and x.dim() > 1
        if whole and x.shape[1] > size and bool((x == IGNORED).any()):
            warn(
                f"labels of {IGNORED} count for nothing in most losses, and batches are computed in parts of {size} "
                "examples (gradient_accumulation, minibatch_size or max_memory_usage). A mean of the parts' means is "
                "not the mean over the tokens of the batch: let loss_fn(module, batch) return how many there are, "
                f'{{"loss": loss, "weight": (batch{tree.path_name(path)} != {IGNORED}).sum()}}.'
            )
            return


def form_of(value: Any) -> str:
    """Describe a batch or the result of a model, for a message.

    >>> form_of((torch.zeros(4, 16), {"y": torch.zeros(4, dtype=torch.long), "name": "b"}))
    "(float32 [4, 16], {'y': int64 [4], 'name': a str})"
    >>> form_of((torch.zeros(()),)), form_of([torch.zeros(2)] * 100)
    ('(float32 [],)', '[float32 [2], float32 [2], float32 [2], float32 [2], ...]')
    """
    if isinstance(value, Tensor):
        return tree.form(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {form_of(x)}" for key, x in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        inside = ", ".join([*map(form_of, value[:4]), *["..."] * (len(value) > 4)])
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    return f"a {type(value).__name__}"


# ---------------------------------------------------------------------------------- messages about errors


def vmap_error(cause: str) -> RuntimeError:
    """Return the error for a model that fails only under vmap, with the fix.

    >>> print(str(vmap_error("it asks for .item()")).splitlines()[0])
    vmap cannot run this model: it asks for .item().
    """
    return RuntimeError(
        f'vmap cannot run this model: {cause}.\nUse engine="loop" (node after node, any model), or engine="auto", '
        "which falls back to it."
    )


def slow_experts(operations: Collection[str]) -> str:
    """Explain that vmap runs a mixture of experts node by node, with the fix; "" if the operations are others.

    >>> slow_experts(["aten::histc", "aten::_grouped_mm"]).partition(":")[0]
    'vmap has no fast form of the grouped product of this model'
    """
    if "aten::_grouped_mm" not in operations:
        return ""
    return (
        "vmap has no fast form of the grouped product of this model: transformers takes it for experts unless it is "
        'loaded with experts_implementation="batched_mm" (config._experts_implementation), which runs in one call.'
    )


def derivative_error(cause: str) -> RuntimeError:
    """Return the error for a model whose gradient has no derivative."""
    return RuntimeError(
        f"the gradient of this model cannot be differentiated: {cause}.\nNo derivatives exist through activation "
        "checkpointing, .item(), or an operation with its own backward pass: leave them out of the model. Code that "
        'branches on values needs engine="loop".'
    )


def check_memory(error: Exception, num_nodes: int, model: nn.Module) -> None:
    """Raise an error with the amount that was requested, and advice, if memory ran out."""
    on_device, text = isinstance(error, torch.OutOfMemoryError), str(error)
    pythons = isinstance(error, MemoryError) and (text == "" or "nable to allocate" in text)
    if ADVICE in text or not (on_device or pythons or "allocate memory" in text):
        return
    request = re.search(r"(?:ried|nable) to allocate ([\d.]+ \wi?B|\d+ bytes)", text)
    amount = request[1] if request else "some memory"  # Python does not say how much
    if amount.endswith(" bytes"):
        amount = f"{int(amount.split()[0]) / 1e9:,.3f} GB"
    size = sum(p.numel() * p.element_size() for p in model.parameters()) * num_nodes / 1e9
    kind = torch.OutOfMemoryError if on_device else RuntimeError
    raise kind(
        f"out of memory: {amount} more, in a run of {num_nodes} nodes, whose parameters alone are {size:,.3f} GB"
        f"{_place(error.__cause__ or error)}.\n{ADVICE}"
    ) from error


ADVICE = (
    "Use a smaller chunk_size (nodes in one call) or minibatch_size (examples at a time), or fewer nodes; "
    "vecgym.estimate_memory predicts the memory of a run."
)


@contextlib.contextmanager
def counting_memory(num_nodes: int, model: nn.Module) -> Iterator[None]:
    """Explain it if memory runs out within a block; see `check_memory`."""
    try:
        yield
    except Exception as error:
        check_memory(error, num_nodes, model)
        raise


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Add the node, the step and the line of the model's code to an error of the model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from error
    except Exception as error:
        advice = f".{_batch_norm_advice(error)}" if _batch_norm_advice(error) else ""
        raise RuntimeError(f"{what}: {type(error).__name__}: {error}{_place(error)}{advice}") from error


@contextlib.contextmanager
def first_call(model: nn.Module, batch: Any) -> Iterator[None]:
    """Add the batch, and a fix, to an error of the model's first call."""
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        misused = isinstance(error, (TypeError, AttributeError, NotImplementedError))
        advice = f" {fix(model, batch)}" if misused else _batch_norm_advice(error)
        raise RuntimeError(
            f"the model fails on its first batch, {form_of(batch)}: {type(error).__name__}: {error}{_place(error)}."
            + advice
        ) from error


def _batch_norm_advice(error: Exception) -> str:
    """Return advice for a batch norm that got one example; "" for another error."""
    if "Expected more than 1 value per channel" not in str(error):
        return ""
    return (
        ' A batch norm cannot train on one example: give batch_size >= 2; dataloader_kwargs={"drop_last": True} leaves '
        "out the smaller batch at the end of an epoch; and a node with one example needs more: "
        "partition_dirichlet(..., min_size=2), say."
    )


def cause(error: Exception) -> str:
    """Describe a failure, and its place in the model's code, in one line."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    text = first_line.split(" (see ")[0].split(". ")[0][:200].rstrip(".")
    if "escaped from inside a function being vmapped" in text:
        text = "something in it runs parts of the model again, as activation checkpointing does"
    return f"{text}{_place(error)}"


def _place(error: BaseException) -> str:
    """Name the line of the model's own code that raised an error."""
    package = Path(__file__).parent.parent
    not_the_models = (str(Path(torch.__file__).parent), str(package / "engine"), str(package / "core"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(not_the_models)]
    return f', at {Path(frames[-1].filename).name}:{frames[-1].lineno}, "{frames[-1].line}"' if frames else ""
