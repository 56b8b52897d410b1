"""Steps in place of the optimizers that torch has no stacked kernel for.

`params`, `grads` and each slot are lists with an entry for each parameter, `[L, *shape]` or, of one model, `[*shape]`;
`h` holds the hyperparameters, as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check
from vecgym.core.transforms import plain
from vecgym.core.tree import differentiated

Slots = dict[str, list[Tensor]]
Moment = Callable[[Any, Any, Any, Any], Any]
Triple = tuple[Any, Any, Any]

# The parts of hyperparameters that are tuples.
BETAS = {"betas": ("beta1", "beta2")}
COEFFICIENTS = {"ns_coefficients": ("a", "b", "c")}

# The Newton-Schulz steps of github.com/microsoft/dion, each with coefficients of its own.
DION_TRIPLES: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Up to this many multiplications torch computes a product of two bfloat16 matrices by another kernel on the CPU, which
# rounds differently from that of many products at once.
_SMALL_PRODUCT = 16**3


def lion(params: list[Tensor], grads: list[Tensor], slots: Slots, h: Any) -> None:
    """Take one step of Lion; `vecgym.optim.formulas.lion` says what it computes."""
    if h.maximize:
        grads = list(torch._foreach_neg(grads))
    signs = torch._foreach_lerp(slots["exp_avg"], grads, 1 - h.beta1)
    torch._foreach_sign_(signs)
    if h.weight_decay != 0:
        torch._foreach_mul_(params, 1 - h.lr * h.weight_decay)
    torch._foreach_add_(params, signs, alpha=-h.lr)
    torch._foreach_lerp_(slots["exp_avg"], grads, 1 - h.beta2)


def fused_adam(params: list[Tensor], grads: list[Tensor], slots: Slots, h: dict[str, Any]) -> None:
    """Take one step of Adam or AdamW by torch's fused kernel.

    `torch.optim`'s functional form calls it too, after it has sorted the tensors, which takes longer than a small step.
    """
    kernel = torch._fused_adamw_ if h["decoupled_weight_decay"] else torch._fused_adam_
    count = torch.full((), h["step"] + 1.0, dtype=torch.float32, device=params[0].device)
    kernel(
        params, grads, slots["exp_avg"], slots["exp_avg_sq"], slots.get("max_exp_avg_sq", []), [count] * len(params),
        lr=h["lr"], beta1=h["beta1"], beta2=h["beta2"], weight_decay=h["weight_decay"], eps=h["eps"],
        amsgrad=bool(h["amsgrad"]), maximize=bool(h["maximize"]),
    )  # fmt: skip


def fused_sgd(params: list[Tensor], grads: list[Tensor], slots: Slots, h: dict[str, Any]) -> None:
    """Take one step of SGD by torch's fused kernel; see `fused_adam`."""
    torch._fused_sgd_(
        params, grads, [] if h["momentum"] == 0 else slots["momentum_buffer"], lr=h["lr"], momentum=h["momentum"],
        weight_decay=h["weight_decay"], dampening=h["dampening"], nesterov=bool(h["nesterov"]),
        maximize=bool(h["maximize"]), is_first_step=False,
    )  # fmt: skip


def adaptive(moment: Moment) -> Callable[..., None]:
    """Make the step of FedAdam and the like; `vecgym.optim.formulas.adaptive` says what it computes."""

    def step(params: list[Tensor], grads: list[Tensor], slots: Slots, h: Any) -> None:
        for p, g, m, v in zip(params, grads, slots["momentum"], slots["second_moment"]):
            m.mul_(h.beta1).add_((1 - h.beta1) * g)
            v.copy_(moment(v, g * g, h.beta2, 1 - h.beta2))
            p.sub_(h.lr * m / (v.sqrt() + h.tau))

    return step


def adam_moment(v: Any, square: Any, beta: Any, rest: Any) -> Any:
    """v <- beta v + (1 - beta) g^2, with `rest` = 1 - beta."""
    return beta * v + rest * square


def yogi_moment(v: Any, square: Any, beta: Any, rest: Any) -> Any:
    """v <- v - (1 - beta) g^2 sign(v - g^2)."""
    return v - rest * square * torch.sign(v - square)


def adagrad_moment(v: Any, square: Any, beta: Any, rest: Any) -> Any:
    """v <- v + g^2."""
    return v + square


def zero(h: dict[str, Any]) -> float:
    """Return the first value of most slots."""
    return 0.0


def tau_squared(h: dict[str, Any]) -> Any:
    """Return the first value of the second moment of FedAdam and the like."""
    return h["tau"] ** 2


def muon(params: list[Tensor], grads: list[Tensor], slots: Slots, h: Any, full_precision: bool = False) -> None:
    """Take one step of Muon; `vecgym.optim.formulas.muon` says what it computes. Equal layers are taken together."""
    updates = list(grads)
    for i, buffer in enumerate(slots.get("momentum_buffer", [])):
        buffer.lerp_(grads[i], 1 - h.momentum)
        updates[i] = grads[i].lerp(buffer, h.momentum) if h.nesterov else buffer
    triples = [(h.a, h.b, h.c)] * check_num_steps(h.ns_steps)
    iterated = _smooth if full_precision else _newton_schulz
    _go_along(params, updates, h, lambda u: iterated(u, triples, h.eps), h.adjust_lr_fn)


def dion_muon(params: list[Tensor], grads: list[Tensor], slots: Slots, h: Any) -> None:
    """Take one step of `DionMuon`; `vecgym.optim.formulas.dion_muon` says what it computes."""
    updates = list(grads)
    for i, buffer in enumerate(slots.get("momentum_buffer", [])):
        updates[i] = buffer.mul_(h.momentum).add_(grads[i])
    iterated = _smooth if h.full_precision else _newton_schulz
    _go_along(params, updates, h, lambda u: iterated(u, DION_TRIPLES, h.eps, True), "spectral_unclamped")


def _go_along(
    params: list[Tensor], updates: list[Tensor], h: Any, orthogonal: Callable[[Tensor], Tensor], adjust: str | None
) -> None:
    """Go along the orthogonal factors of updates, those of layers of one shape in one call."""
    updates = [u.reshape(u.shape[:-2].numel(), *u.shape[-2:]) for u in updates]
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, update in enumerate(updates):
        alike.setdefault(tuple(update.shape[1:]), []).append(i)
    for shape, layers in alike.items():
        joined = torch.cat([updates[i] for i in layers]) if len(layers) > 1 else updates[layers[0]]
        for i, update in zip(layers, orthogonal(joined).split([len(updates[i]) for i in layers])):
            params[i].mul_(1 - h.lr * h.weight_decay)
            params[i].add_(update.reshape(params[i].shape), alpha=-h.lr * muon_lr_ratio(adjust, *shape))


def full_precision_muon(params: list[Tensor], grads: list[Tensor], slots: Slots, h: Any) -> None:
    """Take one step of `FullPrecisionMuon`."""
    muon(params, grads, slots, h, full_precision=True)


def muon_lr_ratio(adjust_lr_fn: str | None, num_rows: int, num_columns: int) -> float:
    """Return what a matrix's learning rate is multiplied by, as `torch.optim.Muon` does.

    >>> muon_lr_ratio("original", 8, 2), muon_lr_ratio("match_rms_adamw", 25, 4)
    (2.0, 1.0)
    """
    ratio = num_rows / max(1, num_columns)
    ratios = {
        "match_rms_adamw": 0.2 * math.sqrt(max(num_rows, num_columns)),
        "spectral_unclamped": math.sqrt(ratio),
    }
    return ratios.get(adjust_lr_fn or "original", math.sqrt(max(1, ratio)))


def orthogonalised(
    u: Tensor, coefficients: tuple[Any, Any, Any], eps: Any, steps: Any, full_precision: bool = False
) -> Tensor:
    """Run the Newton-Schulz iteration on each matrix of `[L, m, n]`, in bfloat16 as `torch.optim.Muon` does.

    With X = u / max(|u|, eps), `steps` times X <- a X + (b A + c A A) X, A = X X^T: U V^T roughly, of u = U S V^T.
    A setting may have a value for each node, `[L]`.

    Derivatives are those of the same polynomial in the precision of `u`: bfloat16 has 3 digits, and a derivative
    through it would have none. With `full_precision` the values are, too.

    >>> u = torch.tensor([[[2.0, 0.0], [0.0, 0.1]]])
    >>> singular = torch.linalg.svdvals(orthogonalised(u, (3.4445, -4.7750, 2.0315), eps=1e-7, steps=5))
    >>> bool(((0.6 < singular) & (singular < 1.3)).all())  # 2 and 0.1 before; the digits depend on the processor
    True
    """
    settings = (*coefficients, eps, steps)
    counts = [len(x) for x in settings if isinstance(x, Tensor) and x.dim() == 1]
    if counts:
        each = [[x[i] if isinstance(x, Tensor) and x.dim() == 1 else x for x in settings] for i in range(counts[0])]
        matrices = u.expand(counts[0], *u.shape[1:])
        return torch.cat([
            orthogonalised(m[None], (a, b, c), eps, steps, full_precision)
            for m, (a, b, c, eps, steps) in zip(matrices, each)
        ])  # fmt: skip
    a, b, c, least, count = (plain(x).item() if isinstance(x, Tensor) else x for x in settings)
    count = check_num_steps(count)
    if full_precision:
        return _smooth(u, [coefficients] * count, eps)
    rounded = _newton_schulz(u.detach(), [(a, b, c)] * count, least).to(u.dtype)
    if not any(differentiated(x) for x in (u, *settings)):
        return rounded
    smooth = _smooth(u, [coefficients] * count, eps)
    return smooth + (rounded - smooth).detach()


def dion_orthogonalised(u: Tensor, eps: Any, full_precision: bool) -> Tensor:
    """Run the iteration of `DionMuon` on each matrix of `[L, m, n]`; derivatives as those of `orthogonalised`.

    With X = u / (|u| + eps), for each of five triples X <- a X + (b A + c A A) X, A = X X^T. eps: one, or `[L]`.

    >>> u = torch.tensor([[[2.0, 0.0], [0.0, 0.1]]])
    >>> torch.linalg.svdvals(dion_orthogonalised(u, 1e-8, full_precision=True))
    tensor([[1.0112, 0.9809]])
    """
    if isinstance(eps, Tensor) and eps.dim() == 1:
        eps = eps.view(-1, 1, 1)
    if full_precision:
        return _smooth(u, DION_TRIPLES, eps, True)
    rounded = _newton_schulz(u.detach(), DION_TRIPLES, plain(eps) if isinstance(eps, Tensor) else eps, True)
    if not any(differentiated(x) for x in (u, eps)):
        return rounded.to(u.dtype)
    smooth = _smooth(u, DION_TRIPLES, eps, True)
    return smooth + (rounded.to(u.dtype) - smooth).detach()


def check_num_steps(value: Any) -> int:
    """Return `value`, Newton-Schulz steps, if it is what `torch.optim.Muon` takes: 0 to 99.

    >>> check_num_steps(5.0)  # in a stack they are floats
    5
    >>> check_num_steps(100)
    Traceback (most recent call last):
    ...
    ValueError: ns_steps=100 must be an integer from 0 to 99: Newton-Schulz steps, of which 5 are usual.
    """
    if check.is_finite(value) and value == int(value) and 0 <= value < 100:
        return int(value)
    raise ValueError(f"ns_steps={value!r} must be an integer from 0 to 99: Newton-Schulz steps, of which 5 are usual.")


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
    """Return `beta add + alpha left right`, rounded once, each matrix as it is by itself."""
    if left.device.type == "cpu" and left.shape[-2:].numel() * right.shape[-1] <= _SMALL_PRODUCT:
        pairs = zip(left, right)
        if add is None:
            return torch.stack([x @ y for x, y in pairs])
        return torch.stack([torch.addmm(z, x, y, beta=beta, alpha=alpha) for z, (x, y) in zip(add, pairs)])
    return left @ right if add is None else torch.baddbmm(add, left, right, beta=beta, alpha=alpha)


def _smooth(u: Tensor, triples: Sequence[Triple], eps: Any, plus: bool = False) -> Tensor:
    square = (u * u).sum((-2, -1), keepdim=True)
    norm = torch.where(square == 0, 0.0, torch.where(square == 0, 1.0, square).sqrt())
    x = u / ((norm + eps).to(u.dtype) if plus else torch.where(norm > eps, norm, eps))
    tall = u.shape[-2] > u.shape[-1]
    x = x.mT if tall else x
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
