"""FedDyn: a linear term in each node's loss, which learns its gradient at the optimum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.devices import spread
from vecgym.core.objects import altered
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.simulation.state import Labelled, State
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.base import InnerOptions, Unpack, takes_options
from vecgym.strategy.exchange import DEFAULT_H
from vecgym.strategy.federated.base import Federated, mean_of, weight_of_all
from vecgym.strategy.servers import one_number
from vecgym.strategy.stages import Average, Memory, Stage

Evaluated = Literal["server", "participants"]


class Dynamic(Stage, batched=("alpha",), random=False, steady=True):
    """A mean, from which the server goes on in the direction of all movements so far.

    h <- h - alpha (1 / K) sum_S (theta_i - theta);  theta <- mean_S theta_i - h / alpha.

    State, `[1, *]`: `params`, theta; `slope`, h. Used at once, so that late results would change nothing.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Mean
    >>> how, part = Dynamic(Mean(), alpha=0.5), Part.alone(StackedCollectives(2))
    >>> memory = how.memory({"w": torch.zeros(1)}, part)
    >>> how({"w": torch.tensor([1.0, 3.0])}, part, memory)["w"], memory.shared["slope"]["w"]
    (tensor([4.]), tensor([-1.]))
    """

    def __init__(self, inner: Average, alpha: float | Tensor) -> None:
        super().__init__(inner)
        self.alpha = alpha

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        memory.home["params"], memory.home["slope"] = values, tree.map(torch.zeros_like, values)

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        share, home = part.comm.num_nodes / weight_of_all("equal", part.run), memory.home
        mean = self.inner.agree(x, altered(part, inplace=False), memory)

        def moved(h: Tensor, y: Tensor, theta: Tensor) -> Tensor:
            return h - share * part.scaled(self.alpha, y - theta)

        home["slope"] = tree.map(moved, home["slope"], mean, home["params"])
        home["params"] = tree.map(lambda y, h: y - h / spread(self.alpha, h), mean, home["slope"])
        return home["params"]


class FedDynStrategy(Federated, batched=("alpha",), random=False, steady=True):
    """FedDyn: local steps on a loss with a linear and a quadratic term, whose minima are those of the mean loss.

    theta_i <- inner(theta_i, g_i - G_i + alpha (theta_i - theta)), H times from the server's theta; then, of the nodes
    S that took part, G_i <- G_i - alpha (theta_i - theta), and at the server
    h <- h - alpha (1 / K) sum_S (theta_i - theta);  theta <- mean_S theta_i - h / alpha.

    G_i and h are 0 at first, and h is the mean of all G_i at all times. Where all is at rest, theta_i = theta, G_i is
    the gradient of node i, and h = 0: the optimum of the mean loss, with non-IID data, few local steps and samples of
    the nodes, too. A large alpha keeps the nodes near theta; a small one lets theta go far, and diverges sooner.

    | kept                   | shape    | bytes                             |
    |------------------------|----------|-----------------------------------|
    | theta_i, inner state   | `[K, *]` | per node: b P and the optimizer's |
    | G_i, absent ones' too  | `[K, *]` | per node: b P                     |
    | theta, h               | `[1, *]` | once: 2 b P                       |

    Bytes sent per node and round: those of FedAvg with the same participation.

    Args:
        inner_optim: the local optimizer, AdamW when not given; its state is kept from round to round.
        H: local steps per round: a number, or a function of the step at which a round begins.
        participation: the fraction of the nodes, sampled anew for each round (at least one).
        alpha: > 0, the strength of the quadratic term; the authors have 0.01 to 0.1.
        evaluated: the run's model: "server", theta at the end of a round; or "participants", the mean_S theta_i of the
            last round, theta + h / alpha, which is less noisy early in a run, and the authors' curve.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`; `max_norm` clips the sum of the terms.

    A node that is absent at an exchange keeps theta_i and G_i, and goes on from there when it is back; one that is
    never there does not count.

    Raises:
        ValueError: for alpha <= 0, or one for each node; for another `evaluated`.

    >>> FedDynStrategy("sgd", H=5, alpha=0.05, lr=0.1)
    FedDynStrategy(OptimSpec(SGD, lr=0.1), Exchange(Dynamic(Mean(), 0.05), every=5), alpha=0.05)

    Reference: Acar et al., "Federated Learning Based on Dynamic Regularization", arXiv 2111.04263, and
    github.com/alpemreacar/FedDyn, whose variables are -G_i / alpha. Deviations: H steps in place of an exact minimum,
    as in the program; one alpha for all nodes, where the program divides by the relative number of examples; no
    clipping of the linear term alone; any optimizer in place of SGD.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = DEFAULT_H,
        participation: float = 1.0,
        *,
        alpha: float | Tensor = 0.1,
        evaluated: Evaluated = "server",
        **inner: Unpack[InnerOptions],
    ) -> None:
        self.alpha = one_number("alpha", alpha, "(0, inf)", "the strength of the quadratic term")
        self.evaluated = check.choice("evaluated", evaluated, get_args(Evaluated))
        how = Dynamic(mean_of(participation), self.alpha)
        super().__init__(inner_optim, how, H, participation, **inner)

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        return {**own, "gradient": tree.map(torch.zeros_like, params)}, shared

    def train(self, part: Part) -> None:
        def corrected(g: Tensor, pull: Tensor, G: Tensor) -> Tensor:
            return g + pull - G

        grads = tree.map(corrected, part.gradients(), self._pull(part), part.own["gradient"])
        part.missing = {}  # the terms depend on every parameter
        part.optimize(grads)
        part.report(part.losses)

    def before_exchange(self, part: Part) -> None:
        part.own["gradient"] = tree.map(torch.sub, part.own["gradient"], self._pull(part))

    def _pull(self, part: Part) -> Tree:
        """Return alpha (theta_i - theta), the gradient of the quadratic term."""
        theta = self.server_params(part)
        return tree.map(lambda p, s: part.scaled(self.alpha, p - s), part.params, theta)

    def result(self, state: State) -> Tree:
        if self.evaluated == "server":
            return state.params
        held = Labelled(state.shared, "0.0/")
        return tree.map(lambda theta, h: theta + h / self.alpha, held["params"], held["slope"])
