"""Optimizers that torch lacks, or has only in some versions, as ordinary optimizers of one model; and their steps.

A step is in place. Its `params`, `grads` and each slot are lists with an entry per parameter, `[L, *shape]`, or
`[*shape]` for a single model; `h` holds the hyperparameters as numbers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vecgym.core import check
from vecgym.core.devices import plain
from vecgym.core.tree import differentiated, root

Lists = dict[str, list[Tensor]]  # slot -> one tensor per parameter
Moment = Callable[[Any, Any, Any, Any], Any]
Triple = tuple[Any, Any, Any]

# The parts of hyperparameters that are tuples.
PARTS = {
    "betas": ("beta1", "beta2"),
    "etas": ("etaminus", "etaplus"),
    "step_sizes": ("step_size_min", "step_size_max"),
    "ns_coefficients": ("a", "b", "c"),
}
# The initial values of slots that do not start at 0, from the hyperparameters.
FIRST = {"sum": lambda h: h["initial_accumulator_value"], "second_moment": lambda h: h["tau"] ** 2}
_ADJUSTMENTS = ("original", "match_rms_adamw", "spectral_unclamped")

# The coefficients of the Newton-Schulz steps of github.com/microsoft/dion.
DION_TRIPLES: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Up to this many multiplications torch multiplies two bfloat16 matrices on the CPU with another kernel, which rounds
# differently from the batched one.
_SMALL_PRODUCT = 16**3


def in_parts(hyper: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with tuples replaced by their parts.

    >>> in_parts({"lr": 0.1, "betas": (0.9, 0.99)})
    {'lr': 0.1, 'beta1': 0.9, 'beta2': 0.99}
    """
    parts = dict(hyper)
    for name in PARTS.keys() & hyper.keys():
        parts.update(zip(PARTS[name], parts.pop(name)))
    return parts


def lion(params: list[Tensor], grads: list[Tensor], slots: Lists, h: Any) -> None:
    """Take one step of Lion; see `vecgym.optim.formulas.lion`."""
    if h.maximize:
        grads = list(torch._foreach_neg(grads))
    signs = torch._foreach_lerp(slots["exp_avg"], grads, 1 - h.beta1)
    torch._foreach_sign_(signs)
    if h.weight_decay != 0:
        torch._foreach_mul_(params, 1 - h.lr * h.weight_decay)
    torch._foreach_add_(params, signs, alpha=-h.lr)
    torch._foreach_lerp_(slots["exp_avg"], grads, 1 - h.beta2)


def adaptive(moment: Moment) -> Callable[..., None]:
    """Make the step of FedAdam, FedYogi or FedAdagrad; see `vecgym.optim.formulas.adaptive`."""

    def step(params: list[Tensor], grads: list[Tensor], slots: Lists, h: Any) -> None:
        for p, g, m, v in zip(params, grads, slots["momentum"], slots["second_moment"]):
            m.mul_(h.beta1).add_((1 - h.beta1) * g)
            v.copy_(moment(v, g * g, h.beta2, 1 - h.beta2))
            p.sub_(h.lr * m / (v.sqrt() + h.tau))

    return step


def adam_moment(v: Any, square: Any, beta: Any, rest: Any) -> Any:
    """Return v <- beta v + (1 - beta) g^2, with `rest` = 1 - beta."""
    return beta * v + rest * square


def yogi_moment(v: Any, square: Any, beta: Any, rest: Any) -> Any:
    """Return v <- v - (1 - beta) g^2 sign(v - g^2)."""
    return v - rest * square * torch.sign(v - square)


def adagrad_moment(v: Any, square: Any, beta: Any, rest: Any) -> Any:
    """Return v <- v + g^2."""
    return v + square


def muon(params: list[Tensor], grads: list[Tensor], slots: Lists, h: Any, full_precision: bool = False) -> None:
    """Take one step of Muon; see `vecgym.optim.formulas.muon`. Layers of the same shape are batched."""
    updates = list(grads)
    for i, buffer in enumerate(slots.get("momentum_buffer", [])):
        buffer.lerp_(grads[i], 1 - h.momentum)
        updates[i] = grads[i].lerp(buffer, h.momentum) if h.nesterov else buffer
    triples = [(h.a, h.b, h.c)] * check_num_steps(h.ns_steps)
    iterated = _smooth if full_precision else _newton_schulz
    _step_along(params, updates, h, lambda u: iterated(u, triples, h.eps), h.adjust_lr_fn)


def dion_muon(params: list[Tensor], grads: list[Tensor], slots: Lists, h: Any) -> None:
    """Take one step of `DionMuon`; see `vecgym.optim.formulas.dion_muon`."""
    updates = list(grads)
    for i, buffer in enumerate(slots.get("momentum_buffer", [])):
        updates[i] = buffer.mul_(h.momentum).add_(grads[i])
    iterated = _smooth if h.full_precision else _newton_schulz
    _step_along(params, updates, h, lambda u: iterated(u, DION_TRIPLES, h.eps, True), "spectral_unclamped")


def _step_along(
    params: list[Tensor], updates: list[Tensor], h: Any, orthogonal: Callable[[Tensor], Tensor], adjust: str | None
) -> None:
    """Step along the orthogonal factors of updates, in one call for layers of the same shape."""
    updates = [u.reshape(u.shape[:-2].numel(), *u.shape[-2:]) for u in updates]
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, update in enumerate(updates):
        by_shape.setdefault(tuple(update.shape[1:]), []).append(i)
    for shape, layers in by_shape.items():
        joined = torch.cat([updates[i] for i in layers]) if len(layers) > 1 else updates[layers[0]]
        for i, update in zip(layers, orthogonal(joined).split([len(updates[i]) for i in layers])):
            params[i].mul_(1 - h.lr * h.weight_decay)
            params[i].add_(update.reshape(params[i].shape), alpha=-h.lr * muon_lr_ratio(adjust, *shape))


def muon_lr_ratio(adjust_lr_fn: str | None, num_rows: int, num_columns: int) -> float:
    """Return the factor of a matrix's learning rate, as in `torch.optim.Muon`.

    >>> muon_lr_ratio("original", 8, 2), muon_lr_ratio("match_rms_adamw", 25, 4)
    (2.0, 1.0)
    """
    ratio = num_rows / max(1, num_columns)
    ratios = {"match_rms_adamw": 0.2 * math.sqrt(max(num_rows, num_columns)), "spectral_unclamped": math.sqrt(ratio)}
    return ratios.get(adjust_lr_fn or "original", math.sqrt(max(1, ratio)))


def orthogonalised(
    u: Tensor, coefficients: tuple[Any, Any, Any], eps: Any, steps: Any, full_precision: bool = False
) -> Tensor:
    """Run the Newton-Schulz iteration on each matrix of `[L, m, n]`, in bfloat16 as `torch.optim.Muon` does.

    Start from X = u / max(|u|, eps), and repeat X <- a X + (b A + c A A) X, A = X X^T, `steps` times: roughly U V^T of
    u = U S V^T. A setting may have one value per node, `[L]`.

    Derivatives are those of the same polynomial in the precision of `u`: bfloat16 has 3 digits, and derivatives
    through it would have none. With `full_precision` the values have that precision, too.

    >>> u = torch.tensor([[[2.0, 0.0], [0.0, 0.1]]])
    >>> singular = torch.linalg.svdvals(orthogonalised(u, (3.4445, -4.7750, 2.0315), eps=1e-7, steps=5))
    >>> bool(((0.6 < singular) & (singular < 1.3)).all())  # 2 and 0.1 before; the digits depend on the processor
    True
    """
    settings = (*coefficients, eps, steps)
    counts = [len(x) for x in settings if isinstance(x, Tensor) and x.dim() == 1]
    if counts:
        rows = [[x[i] if isinstance(x, Tensor) and x.dim() == 1 else x for x in settings] for i in range(counts[0])]
        matrices = u.expand(counts[0], *u.shape[1:])
        return torch.cat([
            orthogonalised(m[None], (a, b, c), eps, steps, full_precision)
            for m, (a, b, c, eps, steps) in zip(matrices, rows)
        ])  # fmt: skip
    return _iterated(u, [coefficients] * check_num_steps(_constant(steps)), eps, full_precision)


def dion_orthogonalised(u: Tensor, eps: Any, full_precision: bool) -> Tensor:
    """Run the iteration of `DionMuon` on each matrix of `[L, m, n]`, with derivatives as in `orthogonalised`.

    Start from X = u / (|u| + eps), and apply X <- a X + (b A + c A A) X, A = X X^T, for each of five triples. eps: a
    number, or `[L]`.

    >>> u = torch.tensor([[[2.0, 0.0], [0.0, 0.1]]])
    >>> torch.linalg.svdvals(dion_orthogonalised(u, 1e-8, full_precision=True))
    tensor([[1.0112, 0.9809]])
    """
    if isinstance(eps, Tensor) and eps.dim() == 1:
        eps = eps.view(-1, 1, 1)
    return _iterated(u, DION_TRIPLES, eps, full_precision, True)


def _iterated(u: Tensor, triples: Sequence[Triple], eps: Any, full_precision: bool, plus: bool = False) -> Tensor:
    """Return the values in bfloat16, unless `full_precision`, with the derivatives in the precision of `u`."""
    if full_precision:
        return _smooth(u, triples, eps, plus)
    a_b_c: list[Any] = [tuple(map(_constant, triple)) for triple in triples]
    rounded = _newton_schulz(u.detach(), a_b_c, _constant(eps), plus).to(u.dtype)
    if not any(differentiated(x) for x in (u, eps, *itertools.chain(*triples))):
        return rounded
    smooth = _smooth(u, triples, eps, plus)
    return smooth + (rounded - smooth).detach()


def _constant(x: Any) -> Any:
    """Return a setting without derivatives, as a number unless it has a value per node."""
    x = plain(x) if isinstance(x, Tensor) else x
    return x.item() if isinstance(x, Tensor) and x.dim() == 0 else x


def check_num_steps(value: Any) -> int:
    """Return the number of Newton-Schulz steps if `torch.optim.Muon` allows it: 0 to 99.

    >>> check_num_steps(5.0)  # stacked settings are floats
    5
    >>> check_num_steps(100)
    Traceback (most recent call last):
    ...
    ValueError: ns_steps=100 must be an integer from 0 to 99: Newton-Schulz steps, usually 5.
    """
    if check.is_finite(value) and value == int(value) and 0 <= value < 100:
        return int(value)
    raise ValueError(f"ns_steps={value!r} must be an integer from 0 to 99: Newton-Schulz steps, usually 5.")


def _newton_schulz(u: Tensor, triples: Sequence[Triple], eps: Any, plus: bool = False) -> Tensor:
    x = u.bfloat16()
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / ((norm + eps).to(x.dtype) if plus else norm.clamp(min=eps))
    tall = u.shape[-2] > u.shape[-1]
    x = x.mT if tall else x
    for a, b, c in triples:
        gram = _product(x, x.mT)
        x = _product(_product(gram, gram, gram, b, c), x, x, a)
    return x.mT if tall else x


def _product(left: Tensor, right: Tensor, add: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return `beta add + alpha left right`, rounded once, each matrix as if it were alone."""
    if left.device.type == "cpu" and left.shape[-2:].numel() * right.shape[-1] <= _SMALL_PRODUCT:
        pairs = zip(left, right)
        if add is None:
            return torch.stack([x @ y for x, y in pairs])
        return torch.stack([torch.addmm(z, x, y, beta=beta, alpha=alpha) for z, (x, y) in zip(add, pairs)])
    return left @ right if add is None else torch.baddbmm(add, left, right, beta=beta, alpha=alpha)


def _smooth(u: Tensor, triples: Sequence[Triple], eps: Any, plus: bool = False) -> Tensor:
    norm = root((u * u).sum((-2, -1), keepdim=True))
    x = u / ((norm + eps).to(u.dtype) if plus else torch.where(norm > eps, norm, eps))
    tall = u.shape[-2] > u.shape[-1]
    x = x.mT if tall else x
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class KernelOptimizer(Optimizer):
    """An optimizer whose step is a kernel of vecgym.

    Attributes:
        _kernel: the step, in place.
        _slots: the names of the state tensors of each parameter.
    """

    _kernel: Callable[..., None]
    _slots: tuple[str, ...] = ("momentum_buffer",)

    def __init__(self, params: Any, **defaults: Any) -> None:
        try:
            super().__init__(params, defaults)
        except (TypeError, ValueError, KeyError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"params must be as for torch's optimizers, such as model.parameters(): {error}") from error

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step; `closure` recomputes the loss."""
        loss = _loss(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p, slot in itertools.product(params, self._slots):
                if slot not in self.state[p]:
                    self.state[p][slot] = torch.full_like(p, FIRST[slot](group) if slot in FIRST else 0.0)
            if params:
                slots = {slot: [self.state[p][slot] for p in params] for slot in self._slots}
                type(self)._kernel(params, [p.grad for p in params], slots, SimpleNamespace(**in_parts(group)))
        return loss


class Lion(KernelOptimizer):
    """The sign of a momentum: c = b1 m + (1 - b1) g;  p <- p - lr (sign(c) + wd p);  m <- b2 m + (1 - b2) g.

    Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675, algorithm 2, with the defaults
    of the authors' code. Steps are larger than AdamW's: the paper uses a learning rate 3 to 10 times smaller, and a
    weight decay larger by the same factor.

    >>> p = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> p.grad = torch.tensor([0.3, -20.0])
    >>> Lion([p], lr=0.25).step()
    >>> p.data
    tensor([ 0.7500, -0.7500])
    """

    _kernel, _slots = lion, ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        check.number("lr", lr, "[0, inf)", "the learning rate")
        check.number("weight_decay", weight_decay, "[0, inf)")
        _check_betas(betas, "[0, 1]")
        check.flag("maximize", maximize)
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)


class AdaptiveOptimizer(KernelOptimizer):
    """The optimizers of arXiv 2003.00295, which differ in their second moment."""

    _slots = ("momentum", "second_moment")

    def __init__(
        self, params: Any, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
    ) -> None:
        check.number("lr", lr, "[0, inf)", "the learning rate")
        _check_betas(betas, "[0, 1)")
        check.number("tau", tau, "(0, inf)", "the degree of adaptivity")
        super().__init__(params, lr=lr, betas=betas, tau=tau)


class FedAdam(AdaptiveOptimizer):
    """A server's Adam: m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  p <- p - lr m / (sqrt(v) + tau).

    It starts from v = tau^2, without bias correction. With g = theta - mean_i theta_i it is the server's step in
    `FedAvgStrategy(server_optim="adam")`.

    Reddi et al. 2021, "Adaptive Federated Optimization", arXiv 2003.00295, algorithm 2.

    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> p.grad = torch.tensor([1.0])
    >>> FedAdam([p], lr=0.5, betas=(0.0, 0.0), tau=1.0).step()
    >>> p.data
    tensor([-0.2500])
    """

    _kernel = adaptive(adam_moment)


class FedYogi(AdaptiveOptimizer):
    """`FedAdam` with v <- v - (1 - b2) g^2 sign(v - g^2), which changes v by at most g^2.

    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> p.grad = torch.tensor([1.0])
    >>> FedYogi([p], lr=0.5, betas=(0.0, 0.0), tau=0.5).step()  # v = 0.25 + 1
    >>> p.data
    tensor([-0.3090])
    """

    _kernel = adaptive(yogi_moment)


class FedAdagrad(AdaptiveOptimizer):
    """`FedAdam` with v <- v + g^2; b2 has no effect.

    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> p.grad = torch.tensor([1.0])
    >>> FedAdagrad([p], lr=0.5, betas=(0.0, 0.0), tau=0.5).step()
    >>> p.data
    tensor([-0.3090])
    """

    _kernel = adaptive(adagrad_moment)


class MatrixOptimizer(KernelOptimizer):
    """The optimizers whose parameters are matrices, with momentum: the forms of Muon."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            check.number(name, defaults[name], "[0, inf)")
        super().__init__(params, **defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.dim() != 2:
                raise ValueError(f"Muon takes matrices, but a parameter has the shape {list(p.shape)}")


class FullPrecisionMuon(MatrixOptimizer):
    """`torch.optim.Muon` with the Newton-Schulz iteration in the parameters' precision, where torch rounds to bfloat16.

    The arguments and defaults are torch's. On a processor without bfloat16 arithmetic a step takes a tenth of the
    time; the update differs from torch's by the rounding to bfloat16, about 1 %.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon.

    >>> p = torch.nn.Parameter(torch.zeros(2, 2))
    >>> p.grad = torch.tensor([[2.0, 0.0], [0.0, 0.5]])
    >>> FullPrecisionMuon([p], lr=1.0, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=20).step()
    >>> p.data.round(decimals=3) + 0  # the orthogonal factor of the gradient, the unit matrix
    tensor([[-1.,  0.],
            [ 0., -1.]])
    """

    _kernel: Callable[..., None] = functools.partial(muon, full_precision=True)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        check.flag("nesterov", nesterov)
        check_num_steps(ns_steps)
        if adjust_lr_fn is not None:
            check.choice("adjust_lr_fn", adjust_lr_fn, _ADJUSTMENTS)
        super().__init__(
            params, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
        )  # fmt: skip


class DionMuon(MatrixOptimizer):
    """Muon as in github.com/microsoft/dion, which the authors of MuLoCo use.

    m <- mu m + g;  p <- (1 - lr wd) p - lr sqrt(rows / columns) NS(m), with NS five Newton-Schulz steps, each with
    its own coefficients, in bfloat16 unless `full_precision`. `torch.optim.Muon` has Nesterov momentum, the same
    coefficients in each step, which leave singular values between 0.7 and 1.2, and a scale that is never below 1.

    >>> p = torch.nn.Parameter(torch.zeros(2, 8))
    >>> p.grad = torch.eye(2, 8)
    >>> DionMuon([p], lr=1.0, full_precision=True).step()  # about sqrt(2 / 8)
    >>> p.data[:, :3]
    tensor([[-0.5128,  0.0000,  0.0000],
            [ 0.0000, -0.5128,  0.0000]])
    """

    _kernel = dion_muon

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        eps: float = 1e-8,
        *,
        full_precision: bool = False,
    ) -> None:
        check.flag("full_precision", full_precision)
        super().__init__(
            params, lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps, full_precision=full_precision
        )


class Muon(FullPrecisionMuon):
    """`torch.optim.Muon`, for versions of torch that do not have it: the same arguments, defaults and steps.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon.

    >>> p = torch.nn.Parameter(torch.zeros(2, 2))
    >>> p.grad = torch.tensor([[2.0, 0.0], [0.0, 0.5]])
    >>> Muon([p], lr=1.0).step()  # nearly the orthogonal factor of the gradient
    >>> bool((p.data + torch.eye(2)).abs().max() < 0.4)
    True
    """

    _kernel = muon


if hasattr(torch.optim, "Muon"):
    Muon = torch.optim.Muon  # type: ignore[misc, assignment]


class Joined(Optimizer):
    """Several optimizers as one: each has its own parameters, and all step together.

    This optimizer exposes the groups and state of all, which may be changed here.

    >>> w, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    >>> w.grad = b.grad = torch.ones(1)
    >>> Joined([torch.optim.SGD([w], lr=0.5), torch.optim.Adam([b], lr=0.25)], {"lr": 0.5}).step()
    >>> w.item(), round(b.item(), 6)
    (0.5, 0.75)
    """

    def __init__(self, optimizers: Sequence[Optimizer], defaults: dict[str, Any]) -> None:
        super().__init__([{"params": list(p)} for p in (o.param_groups[0]["params"] for o in optimizers)], defaults)
        self.optimizers = list(optimizers)
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for optimizer in optimizers:
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step of each; `closure` recomputes the loss."""
        loss = _loss(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


def _check_betas(betas: Any, within: str) -> None:
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        raise ValueError(f"betas={betas!r} must be two numbers in {within}, such as (0.9, 0.99).")
    for beta in betas:
        check.number("betas", beta, within, "two of them, such as (0.9, 0.99)")


def _loss(closure: Any) -> Any:
    """Return the loss of a closure, computed with gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return check.called("closure", closure)
