"""A model as a function of its tensors: every call passes parameters, buffers and random numbers."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from vecgym.core import rng, tree
from vecgym.core.devices import unwrapped
from vecgym.core.nodes import LOSS_FN
from vecgym.core.tree import Tree, wider
from vecgym.engine import hooks
from vecgym.engine.constancy import shared
from vecgym.engine.contract import WEIGHT, check_loss, check_val_metrics, offers_metrics, weight_of


def outcome(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return a model's loss on a batch, and the metrics and the weight that its `loss_fn` returns, by name."""
    loss_fn = vars(model).get(LOSS_FN)
    if loss_fn is None:
        return {"loss": model(batch)}
    result = loss_fn(model, batch)
    if not isinstance(result, dict):
        return {"loss": result}
    return _checked(result, "loss_fn(module, batch)")


def _checked(metrics: Any, what: str) -> dict[str, Any]:
    check_val_metrics(metrics, what)
    if "weight" not in metrics:
        return dict(metrics)
    return {**metrics, "weight": torch.as_tensor(metrics["weight"], device=metrics["loss"].device).detach()}


class Skeleton:
    """The model's structure, called with the tensors of one node, or of all.

    It is a `torch.func.functional_call` for repeated calls, which looks up the places of each tensor once (tied tensors
    have several). Between calls it shares the model's own tensors, and never uses them. It returns the buffers as the
    call leaves them, changed in place or replaced.

    Args:
        training: put a model that is in eval mode into training mode. If the model itself trains, each part keeps its
            mode: a batch norm or a teacher in eval mode stays so, as in plain torch. False: put all into eval mode.
    """

    def __init__(self, model: nn.Module, training: bool) -> None:
        tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
        self.model = copy.deepcopy(model, tensors | shared(model))
        if not (training and model.training):
            self.model.train(training)
        names = {id(x): name for name, x in (*model.named_buffers(), *model.named_parameters())}
        self.model = hooks.uncompiled(self.model, model)  # a node's loss is not compiled alone
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in (*names.values(), WEIGHT)}
        self.paths: dict[str, list[str]] = {name: [] for name in (*names.values(), WEIGHT)}  # of its places, each once
        for path, module in self.model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                module.sparse = False  # stacked gradients are dense
            for holder in (module._parameters, module._buffers):
                for key, x in holder.items():
                    if x is not None:
                        self._places[names[id(x)]].append((holder, key))
                        self.paths[names[id(x)]].append(f"{path}.{key}" if path else key)
        self._buffers = [name for name, _ in model.named_buffers()]

    def call(
        self, tensors: dict[str, Any], batch: Any, backward: Callable[[Tensor], Any] | None
    ) -> tuple[Tensor, Tree, Any]:
        """Return the loss, the buffers after it, and the result of `backward(loss)`.

        The weight of the loss is among the buffers, if it is among the tensors; None there: it may be missing.

        Activation checkpointing runs the model again in the backward pass, which must find these tensors.
        """
        with self._holding(tensors):
            metrics = outcome(self.model, batch)
            loss = metrics["loss"]
            result = backward(loss) if backward else None
            places = {name: self._places[name][0] for name in self._buffers}
            after = {name: holder[key] for name, (holder, key) in places.items()}
            if WEIGHT in tensors:
                after[WEIGHT] = metrics.get("weight") if tensors[WEIGHT] is None else weight_of(metrics)
            return loss, after, result

    def measure(self, tensors: Tree, batch: Any) -> Tree:
        """Return the validation metrics: the result of `loss_fn`, or else of the model's `val_metrics`, or the loss."""
        with self._holding(tensors):
            if not offers_metrics(self.model):
                return outcome(self.model, batch)
            return _checked(self.model.val_metrics(batch), "val_metrics(batch)")  # type: ignore[operator]

    @contextlib.contextmanager
    def _holding(self, tensors: Tree) -> Iterator[None]:
        """Put other tensors in place within a block."""
        before = [(holder, key, holder[key]) for name in tensors for holder, key in self._places[name]]
        try:
            for name, x in tensors.items():
                for holder, key in self._places[name]:
                    holder[key] = x
            yield
        finally:
            for holder, key, x in before:
                holder[key] = x


class _Called(nn.Module):
    """A model, or its `loss_fn`, as a module that returns the loss, and a dict that may have its weight."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        metrics = outcome(self.model, batch)
        return metrics["loss"], metrics


class StatelessModel:
    """The model of one node as a function of its tensors, which every backend calls.

    Attributes:
        params: the trained parameters.
        frozen: the others, without `requires_grad`.
        buffers: before training.
        device: of the model, and so of everything that is computed.
        written: parameters that its forward changes.
        unused: parameters that got no gradient in the first pass.
        random: whether it draws random numbers in training; True until `learn`.
        host_random: whether it draws some of numpy's or Python's; False until `learn`.
        weighted: whether its loss comes with a weight, which is then a buffer of each node, `WEIGHT`.
        forgets: whether each evaluation uses a new structure, without values that another one left in attributes.
        recomputes: whether its backward pass runs parts of it again, as activation checkpointing does, and must find
            everything as it was in the forward pass.

    >>> model = StatelessModel(nn.Linear(2, 1).requires_grad_(True))
    >>> list(model.params), model.device, model.changes("bias")
    (['weight', 'bias'], device(type='cpu'), True)
    """

    def __init__(self, model: nn.Module, autocast: bool = False) -> None:
        self.model = model
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        self.buffers = {name: b.detach() for name, b in model.named_buffers()}
        self.device = next(iter(self.params.values())).device
        self.random, self.host_random = True, False
        self.written: Collection[str] = ()
        self.unused: Collection[str] = ()
        self.recomputes = self.weighted = self.forgets = False
        self.autocast = autocast
        self._mutated: Collection[str] | None = None
        self._hooks = hooks.of_parameters(model)
        self._train = [Skeleton(model, training=True)]
        self._eval = Skeleton(model, training=False)
        self._called = _Called(self._train[0].model)
        # nn.Embedding with max_norm scales rows of its weight in every forward pass, also in eval mode.
        self._writes_params = any(getattr(module, "max_norm", None) is not None for module in model.modules())

    # ------------------------------------------------------------------------------------ facts about the model

    def structure(self, thread: int) -> nn.Module:
        """Return the structure that a thread calls in training."""
        self.serve(thread + 1)
        return self._train[thread].model

    def learn(
        self, random: bool, mutated: Collection[str], written: Collection[str] = (), unused: Collection[str] = (),
        host_random: bool = False,
    ) -> None:  # fmt: skip
        """Record whether a training step draws random numbers, the tensors it changes, and those without gradient."""
        self.random, self._mutated, self.written, self.unused = random, mutated, written, unused
        self.host_random = host_random

    def changes(self, name: str) -> bool:
        """Whether a training step may change this buffer."""
        return self._mutated is None or name in self._mutated or name == WEIGHT

    def writes(self, name: str) -> bool:
        """Whether a training step may write to this parameter or buffer."""
        return name in self.written or name == WEIGHT or (name in self.buffers and self.changes(name))

    def serve(self, num_threads: int) -> None:
        """Make a structure for each thread: a call changes it temporarily."""
        while len(self._train) < num_threads:
            self._train.append(Skeleton(self.model, training=True))

    def renew(self) -> None:
        """Make the structures anew, without the values that passes left in attributes."""
        self._train = [Skeleton(self.model, training=True) for _ in self._train]
        self._called = _Called(self._train[0].model)

    # -------------------------------------------------------------------------------------------- training

    def split(self, buffers: Tree) -> tuple[Tree, Tree]:
        """Split the buffers into those that training changes, `[n, *]`, and the others, `[*]`."""
        shared = {name: b[0] for name, b in buffers.items() if not self.changes(name)}
        return {name: b for name, b in buffers.items() if name not in shared}, shared

    def loss(
        self, params: Tree, changed: Tree, shared: Tree, batch: Any, thread: int = 0,
        backward: Callable[[Tensor], Any] | None = None,
    ) -> tuple[Tensor, Tree]:  # fmt: skip
        """Compute the loss in training mode, and the buffers `changed` after it.

        Args:
            shared: all other tensors.
            backward: called with the loss, while the model still holds these tensors.
        """
        tensors = {**self.frozen, **shared, **changed, **params}
        loss, after, _ = self._train[thread].call(tensors, batch, backward)
        return loss, {name: after[name] for name in changed}

    def noted_loss(self, params: Tree, changed: Tree, shared: Tree, batch: Any, used: set[str]) -> tuple[Tensor, Tree]:
        """`loss`, whose backward pass adds the parameters that get a gradient to `used`."""
        for name, p in params.items():
            p.register_hook(lambda g, name=name: used.add(name))
        return self.loss(params, changed, shared, batch)

    def traceable_loss(self, params: Tree, changed: Tree, shared: Tree, batch: Any) -> tuple[Tensor, Tree]:
        """`loss` in a form that torch.compile can follow; buffers must be changed in place.

        Args:
            shared: all other tensors, the frozen parameters too.
        """
        after, paths = {name: b for name, b in changed.items() if name != WEIGHT}, self._train[0].paths
        values = {f"model.{path}": x for name, x in {**shared, **after, **params}.items() for path in paths[name]}
        # With tie_weights=True it would not restore the tensors of a module that is in two places.
        loss, metrics = torch.func.functional_call(self._called, values, (batch,), tie_weights=False)
        return loss, {**after, WEIGHT: weight_of(metrics)} if WEIGHT in changed else after

    def gradient(self, leaves: Tree, buffers: dict[str, Any], batch: Any, thread: int = 0) -> tuple[Tensor, Tree, Any]:
        """Compute the loss in training mode, buffers after it, and the gradient of each of `leaves`; None: unused."""

        def backward(loss: Any) -> tuple[Tensor | None, ...]:
            check_loss(loss, self.model, batch)
            with self.not_casting():
                grads = gradients_within_modes(loss, list(leaves.values()))
            # An embedding may return a sparse gradient, which does not fit stacked storage.
            return tuple(g.to_dense() if g is not None and g.layout == torch.sparse_coo else g for g in grads)

        with self.casting():
            return self._train[thread].call({**leaves, **self.frozen, **buffers}, batch, backward)

    def leaf(self, name: str, p: Tensor) -> Tensor:
        """Return one node's parameter as a leaf of the graph, with the parameter's hooks."""
        leaf = p.detach().requires_grad_()
        for hook in self._hooks.get(name, ()):
            leaf.register_hook(hook)
        return leaf

    def own_buffers(self, buffers: Tree, num_nodes: int, differentiable: bool) -> Tree:
        """Give each node its own storage for the buffers that training changes, and for the weight of its loss."""

        def own(name: str, b: Tensor) -> Tensor:
            if not self.changes(name) or b.shape[0] == num_nodes > 1:
                return b
            wide = b.expand(num_nodes, *b.shape[1:])
            return wide if differentiable else wide.clone()

        of_nodes = {name: own(name, b) for name, b in buffers.items()}
        if self.weighted:
            dtype = wider(next(iter(self.params.values())).dtype)
            of_nodes[WEIGHT] = torch.zeros(num_nodes, dtype=dtype, device=self.device)
        return of_nodes

    # ------------------------------------------------------------------------------------------ evaluation

    def _evaluating(self) -> Skeleton:
        return Skeleton(self.model, training=False) if self.forgets else self._eval

    def eval_loss(self, params: Tree, buffers: Tree, batch: Any) -> Tensor:
        """Compute the loss in eval mode."""
        return self._evaluating().call({**params, **self.frozen, **tree.map(torch.clone, buffers)}, batch, None)[0]

    def measure(self, tensors: Tree, batch: Any, trained: bool = False) -> Tree:
        """Return the validation metrics of one node in eval mode: name -> scalar.

        Args:
            trained: evaluate the structure that trains, and leave it in eval mode.
        """
        if trained and self._train[0].model.training:
            self._train[0].model.train(False)
        return (self._train[0] if trained else self._evaluating()).measure({**tensors, **self.frozen}, batch)

    def spared(self, params: Tree, buffers: Tree) -> tuple[Tree, Tree]:
        """Copy the tensors that a forward pass in eval mode may change."""
        params = tree.map(torch.clone, params) if self._writes_params or self.written else params
        return params, tree.map(torch.clone, buffers)

    # --------------------------------------------------------------------------------------------- around a call

    def casting(self) -> contextlib.AbstractContextManager:
        """Enter the precision of the forward pass."""
        return torch.autocast(self.device.type) if self.autocast else contextlib.nullcontext()

    def not_casting(self) -> contextlib.AbstractContextManager:
        """Leave the precision of `casting` for the backward pass, whose operations have that of the forward ones."""
        return torch.autocast(self.device.type, enabled=False) if self.autocast else contextlib.nullcontext()

    def seeded(self, seed: int, purpose: str, *ids: int) -> contextlib.AbstractContextManager:
        """Seed the random numbers of a pass by their key; do nothing for a model that draws none."""
        if not self.random:
            return contextlib.nullcontext()
        return seeded(rng.key(seed, purpose, *ids), self.device, self.host_random)


def gradients_within_modes(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradient of a scalar with respect to each of `leaves`; None: unused.

    torch.autograd.grad leaves all function modes, which the parts that a model recomputes in the backward pass need.
    Its checks of arguments also take as long as a small model.
    """
    return _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False
    )


_GENERATORS = threading.RLock()  # the global generators, while a run has seeded them: two runs may share a process


@contextlib.contextmanager
def seeded(seed: int, device: torch.device, host: bool = False) -> Iterator[None]:
    """Seed torch's global generators within a block, with `host` those of numpy and Python too, and restore them."""
    devices = [device] if device.type == "cuda" else []
    # Of another key: with one seed, numpy's numbers are made of the same bits as torch's.
    others = rng.private(rng.key(seed, "host")) if host else contextlib.nullcontext()
    with _GENERATORS, others, torch.random.fork_rng(devices=devices, device_type="cuda"):
        # Not torch.manual_seed, which also seeds unused devices: a hundred times slower, with a traceback for each.
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            getattr(torch, device.type).manual_seed(seed)
        yield


_ATTENTION = threading.Lock()
_FAST_FORMS: list[bool] = []  # whether they were allowed when each block of `plain_attention` began


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Keep `nn.TransformerEncoder` and `nn.MultiheadAttention` from a fast form for evaluation.

    vmap cannot take it, and it computes other values where positions are masked: all engines leave it out, so that a
    model is evaluated as it is trained.
    """
    with _ATTENTION:
        _FAST_FORMS.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _ATTENTION:
            if len(_FAST_FORMS) == 1:  # of two runs at once, the last to leave restores the first setting
                torch.backends.mha.set_fastpath_enabled(_FAST_FORMS[0])
            _FAST_FORMS.pop()


class ChannelsLast(TorchFunctionMode):
    """Make convolutions return images `[B, C, H, W]` with the channels adjacent in memory.

    Later operations keep that order, in which a CPU computes most of them faster: a convolution by a third, pooling
    several times. Values are the same up to rounding. A `view` that this order forbids is a copy, as by `reshape`.

    >>> images = torch.zeros(2, 3, 8, 8)
    >>> with ChannelsLast():
    ...     out = F.max_pool2d(F.conv2d(images, torch.zeros(4, 3, 3, 3)), 2)
    >>> out.shape, out.is_contiguous(memory_format=torch.channels_last)
    (torch.Size([2, 4, 3, 3]), True)
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.conv2d and args and args[0].dim() == 4:
            args = (args[0].to(memory_format=torch.channels_last), *args[1:])
        elif func in _RESHAPING and len(args) > 1 and not isinstance(args[1], torch.dtype):
            func = _RESHAPING[func]
        return func(*args, **(kwargs or {}))


_RESHAPING: dict[Callable, Callable] = {Tensor.view: Tensor.reshape, Tensor.view_as: Tensor.reshape_as}


# ---------------------------------------------------------------------------------------------- to differentiate twice


class TwiceDifferentiable(TorchFunctionMode):
    """For a gradient that is itself differentiated: embeddings as in `Folding`, and normalisations made of elementary
    operations. Under vmap, second derivatives of torch's own normalisations lose the terms through the mean and the
    variance; those of its weight norm are always wrong.
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ELEMENTARY.get(func, func)(*args, **(kwargs or {}))


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Look rows up as `F.embedding` does, where vmap forgets that `padding_idx` gets no gradient.

    It also looks all nodes up in one table, in which a token that is out of range would find the row of another node:
    that is an IndexError; on CUDA the device raises it, as for any embedding.
    """
    num_rows = weight.shape[0]
    if padding_idx is not None:
        row = torch.arange(num_rows, device=weight.device) == padding_idx % num_rows
        weight = torch.where(row[:, None], weight.detach(), weight)
    if is_batchedtensor(input):
        tokens = unwrapped(input)
        try:
            torch._assert_async((tokens.clamp(0, num_rows - 1) == tokens).all())
        except RuntimeError:
            raise IndexError(f"index out of range: the embedding has {num_rows} rows") from None
    return F.embedding(input, weight, None, *args, **kwargs)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    return _affine(_normalised(input, dims, eps), weight, bias)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    groups = input.unflatten(1, (num_groups, -1))  # [B, G, C / G, ...]
    dims = tuple(range(2, groups.dim()))
    return _affine(_normalised(groups, dims, eps).flatten(1, 2), *_by_channel(input, weight, bias))


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    over: tuple[int, ...] = (0,),
) -> Tensor:  # fmt: skip
    """Normalise by the statistics over `over` and space, and track them, or by the tracked ones."""
    dims = (*over, *range(2, input.dim()))
    if not training:
        mean, var = _by_channel(input, running_mean, running_var)
        normalised = (input - mean) * (var + eps).rsqrt()
    else:
        if running_mean is not None and running_var is not None:
            # The unbiased variance, as torch tracks it; unlike torch's, these statistics can be differentiated.
            for tracked, now in ((running_mean, input.mean(dims)), (running_var, input.var(dims))):
                tracked.mul_(1 - momentum).add_(momentum * (now.mean(0) if now.dim() > 1 else now))  # [B, C], or [C]
        normalised = _normalised(input, dims, eps)
    return _affine(normalised, *_by_channel(input, weight, bias))


def _instance_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    return _batch_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps, over=())


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return `g v / |v|`, the norm over all dimensions but `dim`, as `torch._weight_norm`; -1: over all."""
    over = [i for i in range(v.dim()) if dim == -1 or i != dim % v.dim()]
    return v * (g / v.square().sum(over, keepdim=True).sqrt())


def _normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _by_channel(input: Tensor, *values: Tensor | None) -> list[Any]:
    """Shape `[C]` to multiply `[B, C, ...]`."""
    return [None if x is None else x.view(-1, *[1] * (input.dim() - 2)) for x in values]


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return `F.one_hot(...)`, also within nested transforms, which refuse the original since it reads values."""
    if num_classes < 1 or not is_functorch_wrapped_tensor(tensor):
        return F.one_hot(tensor, num_classes)
    classes = unwrapped(tensor)
    if not ((classes >= 0) & (classes < num_classes)).all():
        raise IndexError(f"a class of F.one_hot is not one of 0 to {num_classes - 1}")
    return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()


NORMALISATIONS: dict[Callable, Callable] = {
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    torch._weight_norm: _weight_norm,
}
_ELEMENTARY: dict[Callable, Callable] = {F.embedding: embedding, F.one_hot: _one_hot, **NORMALISATIONS}
