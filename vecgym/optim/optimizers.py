"""Optimizers that torch does not have, or not in every version, as ordinary ones of one model."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from vecgym.core import check
from vecgym.optim import kernels

_ADJUSTMENTS = ("original", "match_rms_adamw", "spectral_unclamped")


class Lion(Optimizer):
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
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise ValueError(f"betas={betas!r} must be two numbers in [0, 1], such as (0.9, 0.99).")
        for beta in betas:
            check.number("betas", beta, "[0, 1]", "two of them, such as (0.9, 0.99)")
        check.flag("maximize", maximize)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        try:
            super().__init__(params, defaults)
        except (TypeError, ValueError, KeyError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"params must be what torch's optimizers take, such as model.parameters(): {error}") from error

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; `closure` computes the loss again."""
        return _step(self, closure, "exp_avg", kernels.lion, {"betas": ("beta1", "beta2")})


class Muon(Optimizer):
    """`torch.optim.Muon`, for versions of torch that do not have it: the same arguments, defaults and steps.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon.

    >>> p = torch.nn.Parameter(torch.zeros(2, 2))
    >>> p.grad = torch.tensor([[2.0, 0.0], [0.0, 0.5]])
    >>> Muon([p], lr=1.0).step()  # nearly the orthogonal factor of the gradient
    >>> bool((p.data + torch.eye(2)).abs().max() < 0.4)
    True
    """

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
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        super().__init__(params, defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.dim() != 2:
                raise ValueError(f"Muon takes matrices, and a parameter has the shape {list(p.shape)}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; `closure` computes the loss again."""
        return _step(self, closure, "momentum_buffer", kernels.muon, {"ns_coefficients": ("a", "b", "c")})


if hasattr(torch.optim, "Muon"):
    Muon = torch.optim.Muon  # type: ignore[misc, assignment]


def _step(optimizer: Optimizer, closure: Any, slot: str, kernel: Any, tuples: dict[str, tuple[str, ...]]) -> Any:
    """One step by a kernel of vecgym; `tuples` names the parts of hyperparameters that are tuples."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = check.called("closure", closure)
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            optimizer.state[p].setdefault(slot, torch.zeros_like(p))
        if params:
            parts = {part: x for name, names in tuples.items() for part, x in zip(names, group[name])}
            slots = {slot: [optimizer.state[p][slot] for p in params]}
            kernel(params, [p.grad for p in params], slots, SimpleNamespace(**group, **parts))
    return loss


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
        """One step of each; `closure` computes the loss again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = check.called("closure", closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss
