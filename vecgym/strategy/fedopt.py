"""Server optimizers for federated averaging (Reddi et al., arXiv 2003.00295; Hsu et al., arXiv 1909.06335)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vecgym.core import check
from vecgym.optim import OptimSpec

SPECS: dict[str, Callable[[Any], OptimSpec]] = {
    "avg": lambda server: OptimSpec("sgd", lr=server.lr),
    "avgm": lambda server: OptimSpec("sgd", lr=server.lr, momentum=server.betas[0]),
    "adagrad": lambda server: OptimSpec("fedadagrad", lr=server.lr, betas=server.betas, tau=server.tau),
    "adam": lambda server: OptimSpec("fedadam", lr=server.lr, betas=server.betas, tau=server.tau),
    "yogi": lambda server: OptimSpec("fedyogi", lr=server.lr, betas=server.betas, tau=server.tau),
}


@dataclass(frozen=True)
class ServerOptimizer:
    """The optimizer of a server, whose gradient is g = theta - mean_i theta_i, by its name in federated learning.

    avg:  theta <- theta - eta g
    avgm: m <- beta_1 m + g;  theta <- theta - eta m
    adagrad, adam, yogi: m <- beta_1 m + (1 - beta_1) g;  theta <- theta - eta m / (sqrt(v) + tau), with
        adagrad: v <- v + g^2
        adam:    v <- beta_2 v + (1 - beta_2) g^2
        yogi:    v <- v - (1 - beta_2) g^2 sign(v - g^2)
        from v = tau^2, without bias correction.

    Args:
        name: "avg", "avgm", "adagrad", "adam" or "yogi".
        lr: eta.
        betas: (beta_1, beta_2), each in [0, 1).
        tau: > 0, the degree of adaptivity.

    >>> ServerOptimizer("avgm", lr=1.0, betas=(0.5, 0.99)).spec
    OptimSpec(SGD, lr=1.0, momentum=0.5)

    References: algorithm 2 of arXiv 2003.00295; "avgm" is that of arXiv 1909.06335, with the momentum not damped. No
    deviation.
    """

    name: str = "avg"
    lr: float | Tensor = 1.0
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99)
    tau: float | Tensor = 1e-3

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(
                f"server_optim is {check.kind_of(self.name)}; give one of {', '.join(map(repr, SPECS))}, with "
                "server_lr=, server_betas=, server_tau=. A server with any optimizer is that of "
                "DiLoCoStrategy(outer_optim=OptimSpec(...))."
            )
        check.choice("server_optim", self.name, SPECS)
        check.per_node("server_lr", self.lr, "[0, inf)")
        check.per_node("server_tau", self.tau, "(0, inf)")
        pair = isinstance(self.betas, (tuple, list)) and len(self.betas) == 2
        if not pair:
            raise ValueError(f"server_betas={self.betas!r} must be two numbers in [0, 1).")
        for beta in self.betas:
            check.per_node("server_betas", beta, "[0, 1)", "each of the two numbers")

    @property
    def spec(self) -> OptimSpec:
        """The optimizer that this name and these numbers stand for."""
        return SPECS[self.name](self)

    def check(self) -> None:
        """Raise a ValueError for several values of a number: a run has one server, a stack of runs one for each.

        >>> import torch
        >>> ServerOptimizer("avgm", lr=torch.tensor([0.5, 1.0])).check()
        Traceback (most recent call last):
        ...
        ValueError: server_lr has shape [2]: there is one server, give one number.
        """
        for name, value in (("lr", self.lr), ("tau", self.tau), *(("betas", beta) for beta in self.betas)):
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"server_{name} has shape {list(value.shape)}: there is one server, give one number.")
