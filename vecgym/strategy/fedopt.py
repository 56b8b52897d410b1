"""Server optimizers for federated averaging (Reddi et al., arXiv 2003.00295; Hsu et al., arXiv 1909.06335)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.tree import Tree

Slots = dict[str, Tree]


def _momentum(v: Tensor, delta: Tensor, beta: float | Tensor) -> Tensor:
    return beta * v + delta


def _adagrad(v: Tensor, delta: Tensor, beta: float | Tensor) -> Tensor:
    return v + delta.square()


def _adam(v: Tensor, delta: Tensor, beta: float | Tensor) -> Tensor:
    return beta * v + (1 - beta) * delta.square()


def _yogi(v: Tensor, delta: Tensor, beta: float | Tensor) -> Tensor:
    square = delta.square()
    return v - (1 - beta) * square * torch.sign(v - square)


SECOND_MOMENTS: dict[str, Callable[[Tensor, Tensor, float | Tensor], Tensor]] = {
    "adagrad": _adagrad,
    "adam": _adam,
    "yogi": _yogi,
}
SERVER_OPTIMIZERS = ("avg", "avgm", *SECOND_MOMENTS)


@dataclass(frozen=True)
class ServerOptimizer:
    """What a server does with the nodes' mean movement Delta = mean_i theta_i - theta.

    avg:  theta <- theta + eta Delta
    avgm: m <- beta_1 m + Delta;  theta <- theta + eta m
    adagrad, adam, yogi: m <- beta_1 m + (1 - beta_1) Delta;  theta <- theta + eta m / (sqrt(v) + tau), with
        adagrad: v <- v + Delta^2
        adam:    v <- beta_2 v + (1 - beta_2) Delta^2
        yogi:    v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)
        from v = tau^2, without bias correction.

    Args:
        name: one of `SERVER_OPTIMIZERS`.
        lr: eta.
        betas: (beta_1, beta_2), each in [0, 1).
        tau: > 0, the degree of adaptivity.

    >>> server = ServerOptimizer("avgm", lr=1.0, betas=(0.5, 0.99))
    >>> params, slots = {"w": torch.zeros(1)}, server.init({"w": torch.zeros(1)})
    >>> for _ in range(2):
    ...     params, slots = server.update(params, {"w": torch.ones(1)}, slots)
    >>> params["w"]
    tensor([2.5000])

    Reference: algorithm 2 of arXiv 2003.00295; "avgm" of arXiv 1909.06335, with the momentum not damped. No
    deviation.
    """

    name: str = "avg"
    lr: float | Tensor = 1.0
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99)
    tau: float | Tensor = 1e-3

    def __post_init__(self) -> None:
        check.choice("server_optim", self.name, SERVER_OPTIMIZERS)
        check.per_node("server_lr", self.lr, "[0, inf)")
        check.per_node("server_tau", self.tau, "(0, inf)")
        pair = isinstance(self.betas, (tuple, list)) and len(self.betas) == 2
        if not pair:
            raise ValueError(f"server_betas={self.betas!r} must be two numbers in [0, 1).")
        for beta in self.betas:
            check.per_node("server_betas", beta, "[0, 1)", "each of the two numbers")

    def check(self) -> None:
        """Raise a ValueError for several values of a number: a run has one server, a stack of runs one for each.

        >>> ServerOptimizer("avgm", lr=torch.tensor([0.5, 1.0])).check()
        Traceback (most recent call last):
        ...
        ValueError: server_lr has shape [2]: there is one server, give one number.
        """
        for name, value in (("lr", self.lr), ("tau", self.tau), *(("betas", beta) for beta in self.betas)):
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"server_{name} has shape {list(value.shape)}: there is one server, give one number.")

    def init(self, params: Tree) -> Slots:
        """The slots before the first round, `[1, *]`."""
        if self.name == "avg":
            return {}
        zeros = tree.map(torch.zeros_like, params)
        if self.name == "avgm":
            return {"momentum": zeros}
        return {"momentum": zeros, "second_moment": tree.map(lambda z: z + self.tau**2, zeros)}

    def update(self, params: Tree, delta: Tree, slots: Slots) -> tuple[Tree, Slots]:
        """One step; nothing given is changed."""
        if self.name == "avg":
            return tree.map(lambda p, d: p + self._lr(p) * d, params, delta), slots
        beta_1, beta_2 = self.betas
        if self.name == "avgm":
            momentum = tree.map(lambda m, d: _momentum(m, d, beta_1), slots["momentum"], delta)
            return tree.map(lambda p, m: p + self._lr(p) * m, params, momentum), {"momentum": momentum}
        momentum = tree.map(lambda m, d: beta_1 * m + (1 - beta_1) * d, slots["momentum"], delta)
        rule = SECOND_MOMENTS[self.name]
        second = tree.map(lambda v, d: rule(v, d, beta_2), slots["second_moment"], delta)
        new = tree.map(lambda p, m, v: p + self._lr(p) * m / (v.sqrt() + self.tau), params, momentum, second)
        return new, {"momentum": momentum, "second_moment": second}

    def _lr(self, like: Tensor) -> float | Tensor:
        return tree.per_node(self.lr, like)
