"""FedNova: movements of nodes that work unequally, each divided by its amount of work before they are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.devices import spread
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec, ensure_optim_spec
from vecgym.optim.moments import with_moment
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.averages import Average, Outer, Weighting
from vecgym.strategy.base import InnerOptions, Unpack, takes_options
from vecgym.strategy.exchange import DEFAULT_H
from vecgym.strategy.federated.base import Federated, checked_steps, mean_of, quotient
from vecgym.strategy.servers import one_number
from vecgym.strategy.stages import Memory

BUFFER = "momentum_buffer"  # of SGD
WORK = "amount of work"  # no name of a parameter


class Normalised(Outer):
    """An outer step of SGD at rate 1 with the mean of Delta_i / a_i, times the mean of the nodes' work.

    Args:
        inner: the average.
        momentum: of the outer step.
        even: all a_i of a round are equal unless nodes are absent: the mean of the parameters is sufficient.
        proximal: the work that is averaged is the sum of the rates, in place of a_i.
    """

    batched, random, steady = Outer.batched, Outer.random, Outer.steady

    def __init__(
        self, inner: Average, momentum: float | Tensor = 0.0, *, even: bool = False, proximal: bool = False
    ) -> None:
        own: dict[str, Any] = {"momentum": momentum} if isinstance(momentum, Tensor) or momentum else {}
        super().__init__(inner, OptimSpec("sgd", lr=1.0, **own))
        self._even, self._proximal = even and not own, proximal

    def _plain(self, part: Part) -> bool:
        return self._even and part.run.presence is None

    def send(self, x: Tree, part: Part, memory: Memory) -> Tree:
        if self._plain(part):
            return x
        done, moved = part.own["work"], super().send(x, part, memory)
        return {
            **tree.map(lambda delta: quotient(delta, done["weight"]), moved),
            WORK: done["rates" if self._proximal else "weight"],
        }

    def receive(self, y: Tree, part: Part, memory: Memory, lr: Any = None) -> Tree:
        if self._plain(part):
            memory.home["params"] = y
            return y
        mean = {name: spread(y[WORK], d) * d for name, d in y.items() if name != WORK}
        return super().receive(mean, part, memory, lr)


class FedNovaStrategy(Federated, batched=("proximal_mu", "server_momentum"), random=False, steady=True):
    """FedNova: nodes take unequally many local steps, and the average still minimises the mean loss, not another one.

    theta_i <- SGD(theta_i, g_i), H_i times from the server's theta; then, with Delta_i = theta - theta_i:
    theta <- theta - tau sum_i w_i Delta_i / a_i;  tau = sum_i w_i a_i;  sum_i w_i = 1.

    a_i is the sum of the weights of the node's gradients in Delta_i, in absolute value: Delta_i / a_i is a mean of
    gradients. With gamma_t, the rate of a step, rho, the momentum, and mu, of the proximal term mu (theta_i - theta), a
    node counts in each of its steps, from 0 in each round:
    b <- rho b + 1;  a <- |1 - gamma_t mu| a + gamma_t b;  r <- r + gamma_t.
    At a constant rate a / gamma is H for SGD, (H - rho (1 - rho^H) / (1 - rho)) / (1 - rho) with momentum, and
    (1 - (1 - gamma mu)^H) / (gamma mu) with a proximal term; then tau = sum_i w_i r_i. FedAvg, which adds up all
    Delta_i, goes to the minimum of a sum in which each loss has its weight times H_i.

    The optimizers' momenta are 0 at the beginning of a round. With equal H_i and rates, no proximal term and nobody
    absent, all a_i are equal: this is `FedAvgStrategy`, to the bit if there is no momentum. The nodes' drift within a
    round remains, as in FedAvg.

    | kept                         | shape    | bytes                                 |
    |------------------------------|----------|---------------------------------------|
    | theta_i, momentum            | `[K, *]` | per node: b P, 2 b P with a momentum  |
    | a_i, b_i, r_i                | `[K]`    | per node: 3 b                         |
    | theta, the server's momentum | `[1, *]` | once: b P, 2 b P with a momentum      |

    Bytes sent per node and round: those of FedAvg with the same participation, and of one number, if the a_i may
    differ.

    Args:
        inner_optim: "sgd", or an `OptimSpec` of SGD, which may have a momentum and a weight decay; the decay is a part
            of the gradient.
        H: local steps per round: a number, or a function of the step at which a round begins.
        participation: the fraction of the nodes, sampled anew for each round (at least one); the sums are over these.
        local_steps: in place of H, the H_i of each node, `[K]`. A round has max H_i steps; a node that has taken its
            own rests until the exchange. Its data go by its own steps, its rate by the run's.
        proximal_mu: mu, one number or one per node.
        server_momentum: beta: G <- beta G + tau sum_i w_i Delta_i / a_i;  theta <- theta - G.
        weighting: w_i: "equal", "examples", or a list of numbers > 0; see `Mean`.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    A node that is absent at an exchange keeps theta_i, its momentum and its counts, which go on when it is back. A node
    that meets the others without a step counts as one that did not move.

    Raises:
        ValueError: for another optimizer, Nesterov's momentum or dampening, groups of parameters; for a momentum and a
            proximal term together; for `max_norm` and a proximal term, which would be clipped, too; for other numbers
            of local steps than nodes.

    >>> FedNovaStrategy("sgd", local_steps=[2, 5, 5], lr=0.1)
    FedNovaStrategy(OptimSpec(SGD, lr=0.1), Exchange(Normalised(Mean()), every=5), local_steps=(2, 5, 5))

    Reference: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
    arXiv 2007.07481, and github.com/JYWa/FedNova, distoptim/FedNova.py, whose tau these are. Deviations: the program
    adds up both recursions if there are a momentum and a proximal term, and normalises Nesterov's momentum as a heavy
    ball: here both are refused. Weights of changing rates are ours; of a constant one they are the program's. Its G is
    in units of gradients, which differs where the rate changes.
    """

    of_nodes = ("proximal_mu",)

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = DEFAULT_H,
        participation: float = 1.0,
        *,
        local_steps: Sequence[int] | None = None,
        proximal_mu: float | Tensor = 0.0,
        server_momentum: float | Tensor = 0.0,
        weighting: Weighting = "equal",
        **inner: Unpack[InnerOptions],
    ) -> None:
        spec = _heavy_ball(ensure_optim_spec(inner_optim, "sgd", argument="inner_optim", lr=inner.pop("lr", None)))
        self.proximal_mu = check.per_node("proximal_mu", proximal_mu, "[0, inf)", "0 is no proximal term")
        self.server_momentum = one_number("server_momentum", server_momentum, "[0, 1)")
        self._proximal = isinstance(self.proximal_mu, Tensor) or self.proximal_mu != 0
        for name, other in (("momentum", spec.kwargs.get("momentum")), ("max_norm", inner.get("max_norm"))):
            if self._proximal and other is not None:
                raise ValueError(
                    f"{name}={other} and proximal_mu={proximal_mu}: the weights of the gradients are known with one of "
                    "them only. Leave out the other."
                )
        of_each = any(isinstance(x, Tensor) and x.numel() > 1 for x in spec.kwargs.values())
        even = len({*(checked_steps(local_steps, H) or [1])}) == 1 and not (self._proximal or of_each)
        how = Normalised(mean_of(participation, weighting), self.server_momentum, even=even, proximal=self._proximal)
        super().__init__(spec, how, H, participation, local_steps=local_steps, **inner)

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        like = next(iter(params.values()))
        zero = torch.zeros(1, dtype=tree.wider(like.dtype), device=like.device)
        return {**own, "work": {"buffer": zero, "weight": zero, "rates": zero}}, shared

    def train(self, part: Part) -> None:
        gamma, mu, done = part.lr, self.proximal_mu, part.own["work"]
        grads = part.gradients()
        if self._proximal:
            theta = self.server_params(part)
            grads = tree.map(lambda g, p, s: g + part.each(mu, p) * (p - s), grads, part.params, theta)
            part.missing = {}  # the proximal term depends on every parameter
        part.optimize(grads)
        part.report(part.losses)
        a = done["weight"]
        gamma, buffer = spread(gamma, a), part.scaled(self.inner_optim.kwargs.get("momentum", 0.0), done["buffer"]) + 1
        kept = abs(1 - gamma * part.each(mu, a))
        part.own["work"] = {"buffer": buffer, "weight": kept * a + gamma * buffer, "rates": done["rates"] + gamma}

    def meet(self, part: Part) -> None:
        super().meet(part)
        self._begin(part)

    def write(self, part: Part) -> None:
        super().write(part)
        self._begin(part)

    def _begin(self, part: Part) -> None:
        """Begin a round: nothing is done, and the momenta are 0."""
        part.own["work"] = tree.map(torch.zeros_like, part.own["work"])
        if BUFFER in part.home["optimizer"]:
            zeros = tree.map(torch.zeros_like, part.home["optimizer"][BUFFER])
            part.home["optimizer"] = with_moment(part.home["optimizer"], BUFFER, zeros)


def _heavy_ball(spec: OptimSpec) -> OptimSpec:
    """Return a spec of SGD, plain or with momentum; a ValueError for another."""
    hyper, momentum = spec.hyper, spec.kwargs.get("momentum")
    constant = not (isinstance(momentum, Tensor) and momentum.dim() > 1)
    other = "dampening" in spec.kwargs or hyper.get("nesterov") or hyper.get("maximize")
    if spec.cls is torch.optim.SGD and spec.param_groups is None and constant and not other:
        return spec
    raise ValueError(
        f"inner_optim={spec!r}: FedNova divides by the weights of SGD's gradients, plain or with a heavy ball: give "
        'inner_optim="sgd", or OptimSpec("sgd", momentum=0.9), for all parameters and steps.'
    )
