"""Optimizers that torch does not have, or not in every version, as ordinary ones of one model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from vecgym.core import check
from vecgym.optim import kernels

_ADJUSTMENTS = ("original", "match_rms_adamw", "spectral_unclamped")


class KernelOptimizer(Optimizer):
    """An optimizer whose step is a kernel of vecgym.

    Attributes:
        _kernel: the step in place, see `vecgym.optim.kernels`.
        _slots: what is kept of each parameter -> its first value, from the hyperparameters.
        _pairs: the names of the parts of hyperparameters that are tuples.
    """

    _kernel: Callable[..., None]
    _slots: Mapping[str, Callable[[dict[str, Any]], float]]
    _pairs: Mapping[str, tuple[str, ...]]

    def __init__(self, params: Any, **defaults: Any) -> None:
        try:
            super().__init__(params, defaults)
        except (TypeError, ValueError, KeyError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"params must be what torch's optimizers take, such as model.parameters(): {error}") from error

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step; `closure` computes the loss again."""
        loss = _loss(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p, (slot, first) in itertools.product(params, self._slots.items()):
                if slot not in self.state[p]:
                    self.state[p][slot] = torch.full_like(p, first(group))
            if params:
                parts = {part: x for name, names in self._pairs.items() for part, x in zip(names, group[name])}
                slots = {slot: [self.state[p][slot] for p in params] for slot in self._slots}
                type(self)._kernel(params, [p.grad for p in params], slots, SimpleNamespace(**group, **parts))
        return loss


class Lion(KernelOptimizer):
    """The sign of a momentum: c = b1 m + (1 - b1) g;  p <- p - lr (sign(c) + wd p);  m <- b2 m + (1 - b2) g.

    Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675, algorithm 2, with the defaults
    of the authors' code. Steps are larger than AdamW's: the paper takes a learning rate 3 to 10 times smaller, and a
    weight decay as many times larger.

    >>> p = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> p.grad = torch.tensor([0.3, -20.0])
    >>> Lion([p], lr=0.25).step()
    >>> p.data
    tensor([ 0.7500, -0.7500])
    """

    _kernel, _slots, _pairs = kernels.lion, {"exp_avg": kernels.zero}, kernels.BETAS

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

    _slots, _pairs = {"momentum": kernels.zero, "second_moment": kernels.tau_squared}, kernels.BETAS

    def __init__(
        self, params: Any, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
    ) -> None:
        check.number("lr", lr, "[0, inf)", "the learning rate")
        _check_betas(betas, "[0, 1)")
        check.number("tau", tau, "(0, inf)", "the degree of adaptivity")
        super().__init__(params, lr=lr, betas=betas, tau=tau)


class FedAdam(AdaptiveOptimizer):
    """A server's Adam: m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  p <- p - lr m / (sqrt(v) + tau).

    From v = tau^2, and without bias correction. With g = theta - mean_i theta_i it is the server's step in
    `FedAvgStrategy(server_optim="adam")`.

    Reddi et al. 2021, "Adaptive Federated Optimization", arXiv 2003.00295, algorithm 2.

    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> p.grad = torch.tensor([1.0])
    >>> FedAdam([p], lr=0.5, betas=(0.0, 0.0), tau=1.0).step()
    >>> p.data
    tensor([-0.2500])
    """

    _kernel = kernels.adaptive(kernels.adam_moment)


class FedYogi(AdaptiveOptimizer):
    """As `FedAdam`, with v <- v - (1 - b2) g^2 sign(v - g^2), which changes v by no more than g^2.

    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> p.grad = torch.tensor([1.0])
    >>> FedYogi([p], lr=0.5, betas=(0.0, 0.0), tau=0.5).step()  # v = 0.25 + 1
    >>> p.data
    tensor([-0.3090])
    """

    _kernel = kernels.adaptive(kernels.yogi_moment)


class FedAdagrad(AdaptiveOptimizer):
    """As `FedAdam`, with v <- v + g^2; b2 has no effect.

    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> p.grad = torch.tensor([1.0])
    >>> FedAdagrad([p], lr=0.5, betas=(0.0, 0.0), tau=0.5).step()
    >>> p.data
    tensor([-0.3090])
    """

    _kernel = kernels.adaptive(kernels.adagrad_moment)


class FullPrecisionMuon(KernelOptimizer):
    """`torch.optim.Muon`, whose Newton-Schulz iteration keeps the parameters' precision: torch's rounds it to bfloat16.

    The arguments and defaults are torch's. On a processor without products in bfloat16 a step takes a tenth of the
    time; the update differs from torch's by bfloat16's rounding, about a hundredth of it.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon.

    >>> p = torch.nn.Parameter(torch.zeros(2, 2))
    >>> p.grad = torch.tensor([[2.0, 0.0], [0.0, 0.5]])
    >>> FullPrecisionMuon([p], lr=1.0, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=20).step()
    >>> p.data.round(decimals=3) + 0  # the orthogonal factor of the gradient, the unit matrix
    tensor([[-1.,  0.],
            [ 0., -1.]])
    """

    _kernel, _slots = kernels.full_precision_muon, {"momentum_buffer": kernels.zero}
    _pairs = kernels.COEFFICIENTS

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
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            check.number(name, value, "[0, inf)")
        if adjust_lr_fn is not None:
            check.choice("adjust_lr_fn", adjust_lr_fn, _ADJUSTMENTS)
        super().__init__(
            params, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
        )  # fmt: skip
        _check_matrices(self)


class DionMuon(KernelOptimizer):
    """Muon as github.com/microsoft/dion has it, which the authors of MuLoCo use.

    m <- mu m + g;  p <- (1 - lr wd) p - lr sqrt(rows / columns) NS(m), with NS five Newton-Schulz steps, each with
    coefficients of its own, in bfloat16 unless `full_precision`. `torch.optim.Muon` has Nesterov's momentum, the same
    coefficients in each step, which leave singular values between 0.7 and 1.2, and a scale that is never below 1.

    >>> p = torch.nn.Parameter(torch.zeros(2, 8))
    >>> p.grad = torch.eye(2, 8)
    >>> DionMuon([p], lr=1.0, full_precision=True).step()  # about sqrt(2 / 8)
    >>> p.data[:, :3]
    tensor([[-0.5128,  0.0000,  0.0000],
            [ 0.0000, -0.5128,  0.0000]])
    """

    _kernel, _slots, _pairs = kernels.dion_muon, {"momentum_buffer": kernels.zero}, {}

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
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            check.number(name, value, "[0, inf)")
        check.flag("full_precision", full_precision)
        super().__init__(
            params, lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps, full_precision=full_precision
        )
        _check_matrices(self)


class Muon(FullPrecisionMuon):
    """`torch.optim.Muon`, for versions of torch that do not have it: the same arguments, defaults and steps.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon.

    >>> p = torch.nn.Parameter(torch.zeros(2, 2))
    >>> p.grad = torch.tensor([[2.0, 0.0], [0.0, 0.5]])
    >>> Muon([p], lr=1.0).step()  # nearly the orthogonal factor of the gradient
    >>> bool((p.data + torch.eye(2)).abs().max() < 0.4)
    True
    """

    _kernel: Callable[..., None] = kernels.muon


if hasattr(torch.optim, "Muon"):
    Muon = torch.optim.Muon  # type: ignore[misc, assignment]


class Joined(Optimizer):
    """Several optimizers as one: each has parameters of its own, and all step together.

    Their groups and their state are seen, and may be changed, in this one.

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
        """Take one step of each; `closure` computes the loss again."""
        loss = _loss(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


def _check_matrices(optimizer: Optimizer) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.dim() != 2:
            raise ValueError(f"Muon takes matrices, and a parameter has the shape {list(p.shape)}")


def _check_betas(betas: Any, within: str) -> None:
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        raise ValueError(f"betas={betas!r} must be two numbers in {within}, such as (0.9, 0.99).")
    for beta in betas:
        check.number("betas", beta, within, "two of them, such as (0.9, 0.99)")


def _loss(closure: Any) -> Any:
    """Return the loss that a closure computes, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return check.called("closure", closure)
