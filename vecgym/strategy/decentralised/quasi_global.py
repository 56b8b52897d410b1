"""Quasi-global momentum: made of the movements of a node's parameters, the average with its neighbours included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.devices import spread
from vecgym.optim import OptimSpec, ensure_optim_spec
from vecgym.optim.moments import with_moment
from vecgym.simulation.simulation import Part
from vecgym.strategy.base import InnerOptions, Unpack, takes_options
from vecgym.strategy.decentralised.base import Decentralised
from vecgym.strategy.decentralised.gossip import Topology

BUFFER = "momentum_buffer"  # of SGD


class QGMStrategy(Decentralised, batched=("momentum",), random=False, steady=True):
    """SGD with a momentum made of the movements of a node's parameters, in a graph of neighbours.

    b_i = mu m_i + g_i;  d_i = b_i (heavy ball), or g_i + mu b_i (Nesterov);
    theta_i' = sum_j W_ij (theta_j - gamma d_j);  m_i <- mu m_i + (1 - mu) (theta_i - theta_i') / gamma.

    m_i = 0 at first. The movement contains the average with the neighbours, so momenta on non-IID data do not drive
    the nodes apart. At a constant gradient m_i tends to g / (1 - mu), as in SGD with momentum. With gamma = 0, at the
    beginning of a warm-up, m_i stays. It is no unbiased method: for a constant gamma the nodes stop where D-PSGD
    without momentum does, and with Nesterov's form where it does at (1 + mu) gamma.

    Memory per node: m_i, a copy for the optimizer's step, and the parameters before it: 3 b P. Bytes sent per node and
    step: degree * b * P.

    Args:
        topology: any doubly stochastic matrix; see `Mix`.
        inner_optim: "sgd", or an `OptimSpec` of SGD with a learning rate and a weight decay, which is added to g_i.
        momentum: mu, in [0, 1); a number, or one per node. 0 is D-PSGD.
        nesterov: whether d_i is Nesterov's.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`; `max_norm` clips g_i.

    Raises:
        ValueError: see `Mix`; for a momentum outside [0, 1), another optimizer than SGD, one with a momentum of its
            own, or with groups of parameters.

    >>> QGMStrategy("ring", lr=0.1, nesterov=True)
    QGMStrategy(OptimSpec(SGD, momentum=0.9, nesterov=True, lr=0.1), Exchange(Mix()), nesterov=True)

    Reference: Lin et al., "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data",
    arXiv 2102.04761, algorithm 1, and github.com/epfml/quasi-global-momentum, decentralized_qg_sgd.py, whose
    `factor`, in place of 1 - mu, is 0.1 for every mu. Deviation: the case gamma = 0.
    """

    remembered = ("before", "momentum")
    of_nodes = ("momentum",)

    @takes_options(InnerOptions)
    def __init__(
        self,
        topology: Topology = "ring",
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        momentum: float | Tensor = 0.9,
        nesterov: bool = False,
        **inner: Unpack[InnerOptions],
    ) -> None:
        self.momentum = check.per_node("momentum", momentum, "[0, 1)", "of the nodes' movements, such as 0.9")
        self.nesterov = check.flag("nesterov", nesterov)
        spec = ensure_optim_spec(inner_optim, "sgd", argument="inner_optim")
        own = {"momentum", "dampening", "nesterov"} & spec.kwargs.keys()
        if spec.cls is not torch.optim.SGD or own or spec.param_groups is not None:
            raise ValueError(
                f"inner_optim={spec!r}: quasi-global momentum takes the place of SGD's, at one rate for all. "
                'Give inner_optim="sgd", lr=0.1, and momentum and nesterov to the strategy.'
            )
        form = {"nesterov": True} if self.nesterov and not _is_zero(momentum) else {}
        super().__init__(topology, spec.replace(momentum=self.momentum, **form), **inner)

    def meet(self, part: Part) -> None:
        super().meet(part)
        lr, before, after = part.lr, part.own["before"], part.params

        def moved(m: Tensor, old: Tensor, new: Tensor) -> Tensor:
            rate = spread(lr, m)
            still = rate == 0
            movement = (old - new) / _where(still, 1.0, rate)
            return _where(still, m, part.scaled(self.momentum, m) + part.scaled(1 - self.momentum, movement))

        part.own["momentum"] = tree.map(moved, part.own["momentum"], before, after)
        if not _is_zero(self.momentum):  # the next step begins with m_i; it may overwrite its buffer
            copy = tree.map(torch.clone, part.own["momentum"])
            part.home["optimizer"] = with_moment(part.home["optimizer"], BUFFER, copy)


def _is_zero(momentum: float | Tensor) -> bool:
    return not isinstance(momentum, Tensor) and momentum == 0


def _where(condition: Any, a: Any, b: Any) -> Any:
    """Choose by a number, or by each node's tensor."""
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return a if condition else b
