"""Gradient tracking, D^2 and exact diffusion: neighbours alone, and yet the optimum of all nodes' data.

D-PSGD (`GossipStrategy`) with a constant rate stops at a distance from the optimum if the nodes' data differ. Here each
node corrects its steps by a vector that approaches the difference between its own step and the mean of all.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch

from vecgym.core import check, tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.strategy.base import InnerOptions, Unpack, takes_options
from vecgym.strategy.decentralised.base import Decentralised
from vecgym.strategy.decentralised.gossip import Topology, is_symmetric

Order = Literal["adapt_then_combine", "combine_then_adapt"]
SMALLEST = -1 / 3 + 1e-9  # eigenvalue that D^2 bears, and a margin for rounding


class GradientTrackingStrategy(Decentralised, batched=(), random=False, steady=True):
    """Each node steps along an estimate of the mean step of all nodes, which it exchanges with its neighbours, too.

    With u_i the step of the inner optimizer at theta_i, -gamma g_i for SGD, and c_i = 0 at first:
    s_i = u_i + c_i;  theta_i <- sum_j W_ij (theta_j + s_j);  c_i <- sum_j W_ij s_j - u_i.

    So s_i <- sum_j W_ij s_j + u_i(new) - u_i(old), and the mean of the s_i is that of the u_i at every step. With
    SGD and a constant rate, s_i = -gamma y_i with y_i <- sum_j W_ij y_j + g_i(new) - g_i(old). Nodes with non-IID data
    reach the optimum of the mean loss, where D-PSGD is biased. Since steps are tracked and not gradients, schedules,
    momentum and Adam need nothing else.

    Memory per node: c_i, and the parameters before the step: 2 b P. Bytes sent per node and step: 2 degree * b * P.
    With one node or `topology="complete"` and SGD, with or without momentum, this is data-parallel training. An absent
    node keeps its c_i, so that the mean of the s_i stays that of the u_i.

    Args:
        topology: any doubly stochastic matrix; see `Mix`.
        inner_optim: the local optimizer, AdamW when not given.
        order: "adapt_then_combine", as above; or "combine_then_adapt", theta_i <- sum_j W_ij theta_j + s_i.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: see `Mix`; for another order.

    >>> GradientTrackingStrategy("ring", inner_optim="sgd", lr=0.1, order="combine_then_adapt")
    GradientTrackingStrategy(OptimSpec(SGD, lr=0.1), Exchange(Mix()), order='combine_then_adapt')

    References: Nedic, Olshevsky and Shi, "Achieving Geometric Convergence for Distributed Optimization over
    Time-Varying Graphs" (DIGing), arXiv 1607.03218, algorithm 1, is order="combine_then_adapt"; the other order is that
    of github.com/epfml/relaysgd, algorithms.py. Deviation: DIGing tracks gradients, which is the same for SGD at a
    constant rate.
    """

    remembered = ("before", "correction")

    @takes_options(InnerOptions)
    def __init__(
        self,
        topology: Topology = "ring",
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        order: Order = "adapt_then_combine",
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(topology, inner_optim, **inner)
        self.order = check.choice("order", order, get_args(Order))

    def meet(self, part: Part) -> None:
        x, before, c = part.params, part.own["before"], part.own["correction"]
        u = tree.map(torch.sub, x, before)
        s = tree.map(torch.add, u, c)
        tracked = self.neighbours(s, part)
        if self.order == "adapt_then_combine":
            part.params = self.neighbours(tree.map(torch.add, x, c), part)
        else:
            part.params = tree.map(torch.add, self.neighbours(before, part), s)
        part.own["correction"] = tree.map(torch.sub, tracked, u)


class D2Strategy(Decentralised, batched=(), random=False, steady=True):
    """D^2: gossip, corrected by the difference between a node's last movement and its last step.

    With u_i the step of the inner optimizer at theta_i, -gamma g_i for SGD, and c_i = 0 at first:
    theta_i' = sum_j W_ij (theta_j + u_j + c_j);  c_i <- theta_i' - theta_i - u_i.

    With SGD and a constant rate this is the paper's theta(t+1) = W (2 theta(t) - theta(t-1) - gamma (g(t) - g(t-1))).
    Nodes with non-IID data reach the optimum of the mean loss, at the bytes of D-PSGD. A change of the rate leaves
    nothing behind, since the step itself is remembered and not its gradient.

    Memory per node: c_i, b P. Bytes sent per node and step: degree * b * P. With one node or `topology="complete"` and
    SGD, with or without momentum, this is data-parallel training. The mean of the c_i stays 0 if nodes are absent, too:
    these keep theirs. Rounding errors of this mean add up: in float32 the nodes leave the optimum of a quadratic by up
    to 5e-7 of the parameters in each step, in float64 by 1e-15; with gradient tracking they do not.

    Args:
        topology: W, symmetric, with eigenvalues above -1/3; see `Mix`. "ring" has -1/3 for an even number of nodes:
            `ExactDiffusionStrategy` takes (W + I) / 2 in its place.
        inner_optim: the local optimizer, AdamW when not given.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: see `Mix`; before the first step for a matrix that is not symmetric, or has an eigenvalue <= -1/3.
            A function of the step is tried at step 0 only.

    >>> D2Strategy("ring", inner_optim="sgd", lr=0.1)
    D2Strategy(OptimSpec(SGD, lr=0.1), Exchange(Mix()))

    Reference: Tang et al., "D^2: Decentralized Training over Decentralized Data", arXiv 1803.07068. Deviation: the
    remembered step has the rate that it was taken with, as in github.com/epfml/relaysgd, algorithms.py; the paper has a
    constant rate. Any optimizer in place of SGD.
    """

    remembered = ("correction",)
    lazy: ClassVar[bool] = False  # whether (W + I) / 2 is in place of W

    def check(self, num_nodes: int, max_steps: int) -> None:
        super().check(num_nodes, max_steps)
        for weights in self.graph.matrices(num_nodes):
            if not is_symmetric(weights):
                raise ValueError(
                    f"topology={self.graph.topology!r} of {num_nodes} nodes is not symmetric, and "
                    f'{type(self).__name__} may diverge: give a symmetric one, such as "ring", or '
                    "GradientTrackingStrategy, which takes any."
                )
            smallest = float(torch.linalg.eigvalsh(weights.detach().double())[0])
            if smallest <= SMALLEST and not self.lazy:
                raise ValueError(
                    f"topology={self.graph.topology!r} of {num_nodes} nodes has the eigenvalue {smallest:.4g}, and D^2 "
                    "diverges unless all are above -1/3: give ExactDiffusionStrategy, which takes (W + I) / 2 in place "
                    "of W, or a matrix with larger weights on its diagonal."
                )

    def meet(self, part: Part) -> None:
        x = part.params
        sent = tree.map(torch.add, x, part.own["correction"])
        mixed = self.neighbours(sent, part)
        # Not with the matrix (W + I) / 2: the mean of equal values is exact.
        part.params = tree.map(lambda v, w: (v + w) / 2, sent, mixed) if self.lazy else mixed
        part.own["correction"] = tree.map(torch.sub, part.params, x)


class ExactDiffusionStrategy(D2Strategy, batched=(), random=False, steady=True):
    """Exact diffusion: an adapted step, a correction, and an average with (W + I) / 2.

    With u_i the step of the inner optimizer at theta_i and psi_i(0) = theta_i(0):
    psi_i' = theta_i + u_i;  phi_i = psi_i' + theta_i - psi_i;
    theta_i <- (phi_i + sum_j W_ij phi_j) / 2;  psi_i <- psi_i'.

    This is `D2Strategy` with (W + I) / 2, which has no negative eigenvalue: any symmetric W will do. Nodes with unlike
    data reach the optimum of the mean loss.

    Memory per node: c_i = theta_i - psi_i, b P. Bytes sent per node and step: degree * b * P.

    Args:
        topology: W, symmetric; see `Mix`.
        inner_optim: the local optimizer, AdamW when not given.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: see `Mix`; before the first step for a matrix that is not symmetric.

    >>> ExactDiffusionStrategy("ring", inner_optim="sgd", lr=0.1)
    ExactDiffusionStrategy(OptimSpec(SGD, lr=0.1), Exchange(Mix()))

    Reference: Yuan, Ying, Zhao and Sayed, "Exact Diffusion for Distributed Optimization and Learning", arXiv
    1702.05122. Deviations: W is doubly stochastic, the paper's may be balanced only; any optimizer in place of SGD.
    """

    lazy = True
