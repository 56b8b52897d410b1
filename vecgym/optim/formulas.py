"""The update rules that run stacked as pure functions, one per rule, in the order of operations of `torch.optim`.

A body is `body(p, g, s, t, h, x) -> (p, s)`:

* `p`, `g`: one parameter and its gradient `[L or 1, *shape]`; `s`: its state, slot name -> tensor;
* `t`: the number of this step, from 1: an int, or `[L]` if nodes have taken different numbers of steps;
* `h`: the hyperparameters: numbers, or float64 tensors `[]` or `[L]` on the CPU;
* `x`: reshapes such a value `[L]` to multiply `p`. Arithmetic among hyperparameters comes first, in float64,
  and `x` last: `x(1 - h.beta2)`, not `1 - x(h.beta2)`, which would lose digits in float32.

Everything is differentiable in `p`, `g`, `s` and every tensor in `h`, any number of times and in both modes.
Square roots have derivative 0 at 0 (`root`): where a second moment is exactly 0 the gradient has always been
0, the update is `0 / eps`, and the factor that multiplies the derivative of the root is 0 as well, so that 0
is the limit and not only a convention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from vecgym.core.tree import root
from vecgym.optim import optimizers
from vecgym.optim.optimizers import DionMuon, FullPrecisionMuon, Lion, Lists, Moment, Muon, muon_lr_ratio

Scalar = Any  # a number, or a tensor [] or [L]
Slots = dict[str, Tensor]


@dataclass(frozen=True)
class Formula:
    """One rule: its state, in the order in which torch's functional API takes it, and its pure body.

    `prepare(slots, h, t)` adjusts the hyperparameters or the state lists before torch's kernel takes step `t`.
    `kernel(params, grads, slots, h)` takes a step in place; None: torch's functional form. `fused` does so if torch has
    a fused kernel.
    """

    slots: tuple[str, ...]
    body: Callable[..., tuple[Tensor, Slots]]
    prepare: Callable[[Lists, Any, int], None] | None = None
    kernel: Callable[..., None] | None = None
    fused: Callable[..., None] | None = None
    decoupled: bool = False  # whether weight decay shrinks the parameter, unless set by a hyperparameter
    of_matrices: bool = False  # not elementwise: every parameter of a node must be a matrix


# A slot that exists only if an option is on, and that option.
OPTIONAL = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad", "grad_avg": "centered"}
# A slot with one number per node and parameter, [1 or L], which lives on the CPU in float64.
NUMBER = "mu_product"


def _where(condition: bool | Tensor, yes: Scalar, no: Scalar) -> Scalar:
    if not isinstance(condition, Tensor):
        return yes if condition else no
    if not isinstance(yes, Tensor):  # torch converts Python numbers to the default dtype, float32
        yes = torch.tensor(yes, dtype=torch.float64)
    return torch.where(condition, yes, no)


def _lerp(m: Tensor, g: Tensor, weight: Scalar) -> Tensor:
    return m + weight * (g - m)


def _decay(p: Tensor, g: Tensor, h: Any, x: Callable) -> tuple[Tensor, Tensor]:
    """Apply weight decay: add lambda p to the gradient, or (decoupled) shrink p."""
    if not isinstance(h.weight_decay, Tensor) and h.weight_decay == 0:
        return p, g
    if h.decoupled_weight_decay:
        return p * x(1 - h.lr * h.weight_decay), g
    return p, g + x(h.weight_decay) * p


def sgd(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
    """b <- mu b + (1 - tau) g;  p <- p - lr b  (Nesterov: p <- p - lr (g + mu b)).

    The first buffer is g itself, not (1 - tau) g; and tau does not act on nodes whose mu is 0, which have no buffer.
    Sutskever et al. 2013, "On the importance of initialization and momentum", with lr outside of the buffer.
    """
    p, g = _decay(p, g, h, x)
    if "momentum_buffer" in s:
        tau = _where(t == 1, 0.0, _where(h.momentum == 0, 0.0, h.dampening))
        b = x(h.momentum) * s["momentum_buffer"] + x(1 - tau) * g
        g = g + x(h.momentum) * b if h.nesterov else b
        s = {"momentum_buffer": b}
    return p - x(h.lr) * g, s


def adam(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
    """m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  p <- p - lr m^ / (sqrt(v^) + eps).

    m^ = m / (1 - b1^t), v^ = v / (1 - b2^t); AMSGrad: v^ = max of all v / (1 - b2^t).
    AdamW: p <- (1 - lr wd) p first. arXiv 1412.6980; AdamW 1711.05101; AMSGrad openreview ryQu7f-RZ.
    """
    p, g = _decay(p, g, h, x)
    numbers = x(1 - h.beta1), x(h.beta2), x(1 - h.beta2), x(root(1 - h.beta2**t)), x(h.lr / (1 - h.beta1**t)), x(h.eps)
    tensors = [p, g, s["exp_avg"], s["exp_avg_sq"]]
    if "max_exp_avg_sq" not in s and adam_applies(tensors):
        p, m, v = AdamStep.apply(*tensors, *numbers)
        return p, {**s, "exp_avg": m, "exp_avg_sq": v}
    m, v = adam_moments(g, s["exp_avg"], s["exp_avg_sq"], *numbers[:3])
    s = {**s, "exp_avg": m, "exp_avg_sq": v}
    if "max_exp_avg_sq" in s:
        s["max_exp_avg_sq"] = v = torch.maximum(s["max_exp_avg_sq"], v)
    return adam_moved(p, m, v, *numbers[3:]), s


def rmsprop(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
    """v <- a v + (1 - a) g^2;  p <- p - lr g / (sqrt(v) + eps).

    Centered: v - (mean of g)^2 under the root. Momentum: b <- mu b + g / (sqrt(v) + eps); p <- p - lr b.
    Hinton, lecture 6 of "Neural networks for machine learning"; centered: arXiv 1308.0850.
    """
    p, g = _decay(p, g, h, x)
    s = {**s, "square_avg": x(h.alpha) * s["square_avg"] + x(1 - h.alpha) * g * g}
    v = s["square_avg"]
    if "grad_avg" in s:
        s["grad_avg"] = _lerp(s["grad_avg"], g, x(1 - h.alpha))
        v = v - s["grad_avg"] * s["grad_avg"]
    denominator = root(v) + x(h.eps)
    if "momentum_buffer" not in s:
        return p - x(h.lr) * g / denominator, s
    s["momentum_buffer"] = x(h.momentum) * s["momentum_buffer"] + g / denominator
    return p - x(h.lr) * s["momentum_buffer"], s


def adagrad(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
    """v <- v + g^2;  p <- p - lr / (1 + (t - 1) lr_decay) g / (sqrt(v) + eps).

    Duchi et al. 2011, jmlr.org/papers/v12/duchi11a.html.
    """
    p, g = _decay(p, g, h, x)
    v = s["sum"] + g * g
    return p - x(h.lr / (1 + (t - 1) * h.lr_decay)) * g / (root(v) + x(h.eps)), {"sum": v}


def nadam(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
    """p <- p - lr [(1 - mu_t) g / (1 - P_t) + mu_{t+1} m / (1 - P_{t+1})] / (sqrt(v^) + eps).

    m and v^ as in Adam, mu_t = b1 (1 - 0.96^(t psi) / 2) with psi the momentum decay, P_t = mu_1 ... mu_t.
    P is float64 here; torch keeps it in the default dtype. Dozat 2016, openreview OM0jvwB8jIp57ZJjtNEZ.
    """
    p, g = _decay(p, g, h, x)
    mu = h.beta1 * (1.0 - 0.5 * 0.96 ** (t * h.momentum_decay))
    mu_next = h.beta1 * (1.0 - 0.5 * 0.96 ** ((t + 1) * h.momentum_decay))
    product = s["mu_product"] * mu  # [1 or L]
    m, v = adam_moments(g, s["exp_avg"], s["exp_avg_sq"], x(1 - h.beta1), x(h.beta2), x(1 - h.beta2))
    denominator = root(v / x(1 - h.beta2**t)) + x(h.eps)
    p = p - x(h.lr * (1.0 - mu) / (1.0 - product)) * g / denominator
    p = p - x(h.lr * mu_next / (1.0 - product * mu_next)) * m / denominator
    return p, {"exp_avg": m, "exp_avg_sq": v, "mu_product": product}


def radam(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
    """p <- p - lr m^ r_t sqrt(1 - b2^t) / (sqrt(v) + eps) where rho_t > 5, else p <- p - lr m^.

    m^ and v as in Adam, rho_t = rho - 2 t b2^t / (1 - b2^t), rho = 2 / (1 - b2) - 1,
    r_t = sqrt((rho_t - 4)(rho_t - 2) rho / ((rho - 4)(rho - 2) rho_t)). arXiv 1908.03265.
    """
    p, g = _decay(p, g, h, x)
    m, v = adam_moments(g, s["exp_avg"], s["exp_avg_sq"], x(1 - h.beta1), x(h.beta2), x(1 - h.beta2))
    correction = 1 - h.beta2**t
    rho = 2 / (1 - h.beta2) - 1
    rho_t = rho - 2 * t * h.beta2**t / correction
    rectified = rho_t > 5.0
    rho, rho_t = _where(rectified, rho, 6.0), _where(rectified, rho_t, 6.0)  # keeps the unused root real
    r = root((rho_t - 4) * (rho_t - 2) * rho / ((rho - 4) * (rho - 2) * rho_t))
    scale = x(_where(rectified, r * root(correction), 0.0)) / (root(v) + x(h.eps))
    update = m / x(1 - h.beta1**t) * x(h.lr) * (scale + x(_where(rectified, 0.0, 1.0)))
    return p - update, {"exp_avg": m, "exp_avg_sq": v}


def adamax(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
    """m <- b1 m + (1 - b1) g;  u <- max(b2 u, |g| + eps);  p <- p - lr / (1 - b1^t) m / u.

    arXiv 1412.6980, section 7.1, with eps inside of the maximum as in torch.
    """
    p, g = _decay(p, g, h, x)
    m = _lerp(s["exp_avg"], g, x(1 - h.beta1))
    u = torch.maximum(x(h.beta2) * s["exp_inf"], g.abs() + x(h.eps))
    return p - x(h.lr / (1 - h.beta1**t)) * m / u, {"exp_avg": m, "exp_inf": u}


def adadelta(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
    """v <- rho v + (1 - rho) g^2;  d = sqrt(u + eps) / sqrt(v + eps) g;  p <- p - lr d.

    Then u <- rho u + (1 - rho) d^2. arXiv 1212.5701 (there lr = 1).
    """
    p, g = _decay(p, g, h, x)
    v = x(h.rho) * s["square_avg"] + x(1 - h.rho) * g * g
    d = root(s["acc_delta"] + x(h.eps)) / root(v + x(h.eps)) * g
    u = x(h.rho) * s["acc_delta"] + x(1 - h.rho) * d * d
    return p - x(h.lr) * d, {"square_avg": v, "acc_delta": u}


def rprop(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
    """eta <- clamp(eta * (eta+ | eta- | 1), min, max) as g g' is (> 0 | < 0 | 0);  p <- p - eta sign(g).

    g' is the previous gradient; where g g' < 0, g is set to 0. eta starts at the learning rate of the first
    step; later values of the learning rate have no effect, as in torch. Riedmiller and Braun 1993.
    """
    sign = g * s["prev"]
    first = x(1.0 * (t == 1))
    eta = first * x(h.lr) + (1 - first) * s["step_size"]
    ones = torch.ones_like(eta)
    eta = eta * torch.where(sign > 0, x(h.etaplus), torch.where(sign < 0, x(h.etaminus), ones))
    eta = torch.where(eta < x(h.step_size_min), x(h.step_size_min), eta)
    eta = torch.where(eta > x(h.step_size_max), x(h.step_size_max), eta)
    g = torch.where(sign < 0, 0.0, g)
    return p - g.sign() * eta, {"prev": g, "step_size": eta}


def lion(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
    """p <- p - lr (sign(b1 m + (1 - b1) g) + wd p);  m <- b2 m + (1 - b2) g.

    Chen et al. 2023, arXiv 2302.06675, algorithm 2.
    """
    p, g = _decay(p, g, h, x)
    m = s["exp_avg"]
    sign = _lerp(m, g, x(1 - h.beta1)).sign()
    return p - x(h.lr) * sign, {"exp_avg": _lerp(m, g, x(1 - h.beta2))}


def adaptive(moment: Moment) -> Callable[..., tuple[Tensor, Slots]]:
    """m <- b1 m + (1 - b1) g;  p <- p - lr m / (sqrt(v) + tau), where v <- `moment(v, g^2, b2, 1 - b2)`.

    FedAdam, FedYogi and FedAdagrad of arXiv 2003.00295, algorithm 2: from v = tau^2, without bias correction.
    """

    def body(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
        m = x(h.beta1) * s["momentum"] + x(1 - h.beta1) * g
        v = moment(s["second_moment"], g * g, x(h.beta2), x(1 - h.beta2))
        return p - x(h.lr) * m / (root(v) + x(h.tau)), {"momentum": m, "second_moment": v}

    return body


def muon(
    p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable, full_precision: bool = False
) -> tuple[Tensor, Slots]:
    """m <- mu m + (1 - mu) g;  u = mu m + (1 - mu) g (Nesterov), or m;  p <- (1 - lr wd) p - lr r NS(u).

    NS: Newton-Schulz iteration, roughly the orthogonal factor of u, see `optimizers.orthogonalised`; r: sqrt(max(1,
    rows / columns)), or as set by `adjust_lr_fn`. The same as `torch.optim.Muon`.
    Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    p, u = _decay(p, g, h, x)
    if "momentum_buffer" in s:
        m = _lerp(s["momentum_buffer"], u, x(1 - h.momentum))
        s = {"momentum_buffer": m}
        u = _lerp(u, m, x(h.momentum)) if h.nesterov else m
    update = optimizers.orthogonalised(u, (h.a, h.b, h.c), h.eps, h.ns_steps, full_precision)
    return p - x(h.lr * muon_lr_ratio(h.adjust_lr_fn, *p.shape[-2:])) * update, s


def dion_muon(p: Tensor, g: Tensor, s: Slots, t: Scalar, h: Any, x: Callable) -> tuple[Tensor, Slots]:
    """m <- mu m + g;  p <- (1 - lr wd) p - lr sqrt(rows / columns) NS(m), with NS as `optimizers.dion_orthogonalised`.

    github.com/microsoft/dion, dion/muon.py; MuLoCo, arXiv 2505.23725.
    """
    p, u = _decay(p, g, h, x)
    if "momentum_buffer" in s:
        u = x(h.momentum) * s["momentum_buffer"] + u
        s = {"momentum_buffer": u}
    update = optimizers.dion_orthogonalised(u, h.eps, h.full_precision)
    return p - x(h.lr * muon_lr_ratio("spectral_unclamped", *p.shape[-2:])) * update, s


# ------------------------------------------------------------------------------------------ Adam's step, by hand
#
# For gradients through whole runs: autograd saves a tensor for each operation of the formula. `AdamStep` saves only
# tensors that exist anyway (the gradient, and the state before and after), in half the passes over memory.


def adam_moments(g: Tensor, m: Tensor, v: Tensor, w1: Scalar, b2: Scalar, w2: Scalar) -> tuple[Tensor, Tensor]:
    """Return m' and v' of `AdamStep`, operation by operation."""
    return m + w1 * (g - m), b2 * v + w2 * g * g


def adam_moved(p: Tensor, m: Tensor, v: Tensor, c2: Scalar, a: Scalar, eps: Scalar) -> Tensor:
    """Return p' of `AdamStep`, given m' and v'."""
    return p - a * m / (root(v) / c2 + eps)


class AdamStep(torch.autograd.Function):
    """Map p, g, m, v and w1, b2, w2, c2, a, eps to p', m', v'; the tensors must be such that `adam_applies` is true.

    m' = m + w1 (g - m);  v' = b2 v + w2 g^2;  p' = p - a m' / (sqrt(v') / c2 + eps). The order of operations is the
    formula's, and so are the bits. The gradient can itself be differentiated, any number of times.

    >>> g, zero = torch.tensor([2.0], requires_grad=True), torch.zeros(1)
    >>> p, m, v = AdamStep.apply(torch.tensor([1.0]), g, zero, zero, 0.5, 0.5, 0.5, 1.0, 0.1, 0.0)
    >>> p.item(), torch.autograd.grad((p + m + v).sum(), g)[0]  # m' / sqrt(v') does not depend on g here
    (0.9292893409729004, tensor([2.5000]))
    """

    @staticmethod
    def forward(ctx: Any, p: Tensor, g: Tensor, m: Tensor, v: Tensor, *scalars: Scalar) -> tuple[Tensor, ...]:
        w1, b2, w2, c2, a, eps = scalars
        new_m = (g - m).mul_(w1).add_(m)
        new_v = (b2 * v).add_((w2 * g).mul_(g))
        new_p = p - (a * new_m).div_(new_v.sqrt().div_(c2).add_(eps))
        tensors = [x for x in scalars if isinstance(x, Tensor)]
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in scalars]
        ctx.save_for_backward(g, m, v, new_m, new_v, *tensors)
        ctx.set_materialize_grads(False)
        return new_p, new_m, new_v

    @staticmethod
    def backward(ctx: Any, *by: Tensor | None) -> Any:
        g, m, v, new_m, new_v, *tensors = ctx.saved_tensors
        tensor_scalars = iter(tensors)
        scalars = [next(tensor_scalars) if x is None else x for x in ctx.numbers]
        return _adam_slopes((g, m, v, new_m, new_v), scalars, ctx.needs_input_grad, by)


def adam_applies(tensors: list[Tensor]) -> bool:
    """Whether `AdamStep` supports these tensors: all of one shape, outside of forward mode and of `torch.func`."""
    plain = _functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0
    return plain and torch.is_grad_enabled() and len({x.shape for x in tensors}) == 1


def _adam_slopes(saved: tuple[Tensor, ...], scalars: list[Scalar], needed: Any, by: Any) -> tuple[Tensor | None, ...]:
    """Return the derivatives with respect to p, g, m, v and the scalars, given those with respect to p', m', v'.

    They are themselves differentiable: where a derivative is 0 by definition, no infinity is multiplied by it.
    """
    g, m, v, new_m, new_v = saved
    w1, b2, w2, c2, a, eps = scalars
    by_p, by_m, by_v = (torch.zeros_like(g) if x is None else x for x in by)
    twice = torch.is_grad_enabled()
    root_v = root(new_v) if twice else new_v.sqrt()
    denominator = (root_v / c2).add_(eps)
    over = by_p / denominator
    by_m = by_m - a * over
    by_denominator = (over * new_m).div_(denominator).mul_(a)
    # The root has derivative 0 at 0, as in the formula.
    still = new_v == 0
    divisor = root_v.masked_fill(still, 1) if twice else root_v
    by_v = by_v + (by_denominator / (2 * c2)).div_(divisor).masked_fill_(still, 0)
    slopes: list[Tensor | None] = [
        by[0],
        (w1 * by_m).addcmul_(w2 * g, by_v, value=2) if needed[1] else None,
        by_m - w1 * by_m if needed[2] else None,
        b2 * by_v if needed[3] else None,
    ]
    of_scalars = (
        lambda: by_m * (g - m),
        lambda: by_v * v,
        lambda: by_v * g * g,
        lambda: by_denominator * root_v / (-c2 * c2),
        lambda: -over * new_m,
        lambda: by_denominator,
    )
    for x, is_needed, slope in zip(scalars, needed[4:], of_scalars):
        slopes.append(slope().sum_to_size(_wide(x, g)).view_as(x).to(x.dtype) if is_needed else None)
    return tuple(slopes)


def _wide(x: Tensor, like: Tensor) -> list[int]:
    """Return the shape of x, with leading ones up to the dimensions of `like`."""
    return [1] * (like.dim() - x.dim()) + list(x.shape)


# -------------------------------------------------------------------------------------------------- kernels


def _undamped_first(slots: Lists, h: Any, t: int) -> None:
    if t == 1:
        h.dampening = 0.0  # then mu * 0 + g = g, torch's first buffer


def _first_step_size(slots: Lists, h: Any, t: int) -> None:
    if t == 1:
        for eta in slots["step_size"]:
            eta.fill_(h.lr)


def _fused_adam(params: list[Tensor], grads: list[Tensor], slots: Lists, h: Any) -> None:
    """Take one step of Adam or AdamW with torch's fused kernel.

    `torch.optim`'s functional form calls it after sorting the tensors, which takes longer than a small step.
    """
    kernel = torch._fused_adamw_ if h.decoupled_weight_decay else torch._fused_adam_
    count = torch.full((), h.step + 1.0, dtype=torch.float32, device=params[0].device)
    kernel(
        params, grads, slots["exp_avg"], slots["exp_avg_sq"], slots.get("max_exp_avg_sq", []), [count] * len(params),
        lr=h.lr, beta1=h.beta1, beta2=h.beta2, weight_decay=h.weight_decay, eps=h.eps,
        amsgrad=bool(h.amsgrad), maximize=bool(h.maximize),
    )  # fmt: skip


def _fused_sgd(params: list[Tensor], grads: list[Tensor], slots: Lists, h: Any) -> None:
    """Take one step of SGD with torch's fused kernel; see `_fused_adam`."""
    torch._fused_sgd_(
        params, grads, [] if h.momentum == 0 else slots["momentum_buffer"], lr=h.lr, momentum=h.momentum,
        weight_decay=h.weight_decay, dampening=h.dampening, nesterov=bool(h.nesterov),
        maximize=bool(h.maximize), is_first_step=False,
    )  # fmt: skip


def _adaptive(moment: Moment) -> Formula:
    return Formula(("momentum", "second_moment"), adaptive(moment), kernel=optimizers.adaptive(moment))


# The classes with an elementwise rule, which is exact on stacked tensors. Their subclasses are not included: they may
# have changed the rule.
_ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
ELEMENTWISE: dict[type[torch.optim.Optimizer], Formula] = {
    torch.optim.SGD: Formula(("momentum_buffer",), sgd, prepare=_undamped_first, fused=_fused_sgd),
    torch.optim.Adam: Formula(_ADAM, adam, fused=_fused_adam),
    torch.optim.AdamW: Formula(_ADAM, adam, fused=_fused_adam, decoupled=True),
    torch.optim.RMSprop: Formula(("square_avg", "grad_avg", "momentum_buffer"), rmsprop),
    torch.optim.Adagrad: Formula(("sum",), adagrad),
    torch.optim.NAdam: Formula(("exp_avg", "exp_avg_sq", "mu_product"), nadam),
    torch.optim.RAdam: Formula(("exp_avg", "exp_avg_sq"), radam),
    torch.optim.Adamax: Formula(("exp_avg", "exp_inf"), adamax),
    torch.optim.Adadelta: Formula(("square_avg", "acc_delta"), adadelta),
    torch.optim.Rprop: Formula(("prev", "step_size"), rprop, prepare=_first_step_size),
    Lion: Formula(("exp_avg",), lion, kernel=optimizers.lion, decoupled=True),
    optimizers.FedAdam: _adaptive(optimizers.adam_moment),
    optimizers.FedYogi: _adaptive(optimizers.yogi_moment),
    optimizers.FedAdagrad: _adaptive(optimizers.adagrad_moment),
}
_MUON = Formula(("momentum_buffer",), muon, kernel=optimizers.muon, decoupled=True, of_matrices=True)
_PRECISE: dict[str, Any] = {"body": functools.partial(muon, full_precision=True), "kernel": FullPrecisionMuon._kernel}
# All classes that run stacked.
FORMULAS: dict[type[torch.optim.Optimizer], Formula] = {
    **ELEMENTWISE,
    Muon: _MUON,
    FullPrecisionMuon: replace(_MUON, **_PRECISE),
    DionMuon: replace(_MUON, body=dion_muon, kernel=optimizers.dion_muon),
}


STACKED_NAMES = ", ".join(cls.__name__ for cls in FORMULAS)  # for messages
