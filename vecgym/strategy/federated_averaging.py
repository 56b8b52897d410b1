"""FedAvg: local steps, then an average of the parameters (McMahan et al., arXiv 1602.05629)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.simulation.when import SyncWeight, When, as_when, rounds_or_weights
from vecgym.strategy.averages import Mean, Outer, ServerMean, Weighting
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, takes_options
from vecgym.strategy.delivery import Participation
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.servers import one_number


@check.strict
def AveragingCommunicator(  # the name that EXO Gym's users know
    island_size: int | None = None,
    H: int | When | Callable[[int], int] = 1,
    participation: float = 1.0,
    weighting: Weighting = "equal",
    sync_weight: Tensor | Sequence[float] | SyncWeight | None = None,
    resting: str | None = None,
    private: str | Sequence[str] = (),
    sampling: str = "fixed",
) -> Exchange:
    """Return the exchange in which, every H steps, theta_i <- sum_k w_k theta_k / sum_k w_k.

    With `participation` < 1 a server averages over the nodes S that took part in the round:
    theta <- sum_{k in S} w_k theta_k / sum_{k in S} w_k, and all nodes begin the next round with theta.

    Args:
        island_size: nodes per island; None: all in one. At each exchange the nodes are shuffled (seeded) into
            islands; if `island_size` does not divide their number, the last island is smaller.
        H: optimizer steps between two exchanges: a number, or a function of the step at which a round begins.
        participation: the fraction of the nodes, sampled anew for each round of H steps (at least one), that trains
            and averages in it; the others keep optimizer state and buffers. `help(vecgym.availability)` describes the
            data and rates of a node that is sampled again, and the buffers of the run's model.
        weighting: "equal"; "examples": w_k is the number of examples of node k; or w_k itself, one number > 0 for each
            node, such as the tokens of its examples.
        sync_weight: `[T]`, in place of H: a_t, one for each step, theta_i <- (1 - a_t) theta_i + a_t mean theta; see
            `SyncWeight`.
        resting: with `participation` < 1, the parameters with which a node that sat out begins its next round:
            "server", the server's theta; "keep", its own, while the participants average among themselves. None:
            "server", but "keep" with islands or `sync_weight`, which have no common theta.
        private: parameters that stay on their node, such as "head.*"; see `Exchange`.
        sampling: "fixed": as many nodes in each round; "bernoulli": each by itself, perhaps none; see `Exchange`.

    Raises:
        ValueError: for H or island_size < 1, participation outside (0, 1], resting="server" with islands or
            `sync_weight`; at `fit` for an island larger than the number of nodes that take part.

    >>> AveragingCommunicator(H=2), AveragingCommunicator(participation=0.5)
    (Exchange(Mean(), every=2), Exchange(ServerMean(), participation=0.5))
    """
    when = rounds_or_weights(H, sync_weight, usual=1)
    participation = Participation(participation).fraction
    check_resting(resting)
    rounds_of_all = island_size is None and sync_weight is None
    if resting == "server" and participation < 1 and not rounds_of_all:
        raise ValueError(
            'resting="server" needs one server and rounds of H steps: leave out island_size and sync_weight, or give '
            'resting="keep".'
        )
    served = participation < 1 and rounds_of_all and resting != "keep"
    average = ServerMean(weighting) if served else Mean(island_size, weighting)
    return Exchange(average, every=when, participation=participation, private=private, sampling=sampling)


class FedAvgStrategy(Strategy, batched=("proximal_mu",), random=False, steady=True):
    """H local steps on every node, then the average of the parameters.

    theta_i <- inner(theta_i, g_i), H times; then theta_i <- sum_{k in island(i)} w_k theta_k / sum w_k.

    With `participation` < 1 it is the paper's algorithm: in each round a sample S of the nodes begins with the
    server's theta, and theta <- sum_{k in S} w_k theta_k / sum w_k. After every exchange all nodes hold theta; within a
    round, nodes that sit out still do. With `server_optim` the server's optimizer takes a step of theta instead: see
    `ServerOptimizer`.

    Inner optimizer state stays on its node and is kept until the node takes part again. (The paper's clients run plain
    SGD, which has none.) Bytes sent per node and round: 2 (n - 1) / n * b * P with islands of n nodes; with a server,
    b * P up for each participant, and as many down.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        H: local steps per round: a number, or a function of the step at which a round begins (post-local SGD).
        island_size, participation, weighting, sync_weight, resting, private, sampling: see `AveragingCommunicator`.
            With `private` layers this is FedPer, and FedBN if these are the batch norms.
        proximal_mu: FedProx's mu, one number or one per node: mu / 2 |theta_i - theta_i(start of the round)|^2 is
            added to a node's loss (Li et al., arXiv 1812.06127, with a fixed number of steps).
        server_optim: None, "avg", "avgm" (FedAvgM), "adam" (FedAdam), "yogi" (FedYogi) or "adagrad" (FedAdagrad).
        server_lr, server_betas, server_tau: of the server's optimizer.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    >>> FedAvgStrategy("sgd", H=5, island_size=4, lr=0.01)
    FedAvgStrategy(OptimSpec(SGD, lr=0.01), \
Exchange(Mean(island_size=4), every=5))

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    arXiv 1602.05629. Deviations: progress is counted in steps, not in epochs; nodes have equal weights unless
    `weighting` is given; with islands and with `resting="keep"`, nodes that sit out keep their own parameters.
    """

    of_nodes = ("proximal_mu",)

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | When | Callable[[int], int] = 1,
        island_size: int | None = None,
        participation: float = 1.0,
        *,
        weighting: Weighting = "equal",
        sync_weight: Tensor | Sequence[float] | SyncWeight | None = None,
        resting: str | None = None,
        private: str | Sequence[str] = (),
        sampling: str = "fixed",
        proximal_mu: float | Tensor = 0.0,
        server_optim: str | None = None,
        server_lr: float | Tensor | None = None,
        server_betas: tuple[float | Tensor, float | Tensor] | None = None,
        server_tau: float | Tensor | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        self.proximal_mu = check.per_node("proximal_mu", proximal_mu, "[0, inf)", "0 is no proximal term")
        self._proximal = not isinstance(proximal_mu, (int, float)) or proximal_mu != 0
        if sync_weight is not None and (server_optim is not None or self._proximal):
            other = "proximal_mu" if self._proximal else "server_optim"
            raise ValueError(f"{other} works in rounds of H steps, and sync_weight has none: give H, or no {other}.")
        who: dict[str, Any] = {"participation": participation, "private": private, "sampling": sampling}
        options: dict[str, Any] = {"lr": server_lr, "betas": server_betas, "tau": server_tau}
        options = {name: value for name, value in options.items() if value is not None}
        if server_optim is not None:
            server = ServerOptimizer(server_optim, **options)
            _check_server(server, island_size, resting)
            outer = Outer(ServerMean(weighting), server.spec)
            exchange = Exchange(outer, every=as_when(H, "H"), **who)
        elif options:
            names = ", ".join(f"server_{option}" for option in options)
            raise ValueError(f'{names} without server_optim has no effect: give server_optim="avgm", say.')
        else:
            rest: dict[str, Any] = {"weighting": weighting, "sync_weight": sync_weight, "resting": resting}
            exchange = AveragingCommunicator(island_size, H, **rest, **who)
        super().__init__(inner_optim, [exchange], **inner)

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        if self._proximal:
            (shared if self._begin_alike else own)["start"] = params
        return own, shared

    @property
    def train_method(self) -> str:
        return "train_near" if self._proximal else super().train_method

    def train_near(self, part: Part) -> None:
        """Take a step with the gradient of the loss and the proximal term."""
        start, mu = (part.shared if self._begin_alike else part.own)["start"], self.proximal_mu
        grads = tree.map(lambda g, p, s: g + part.each(mu, p) * (p - s), part.gradients(), part.params, start)
        part.missing = {}  # the proximal term depends on every parameter
        part.optimize(grads)
        part.report(part.losses)

    def meet(self, part: Part) -> None:
        super().meet(part)
        self._begin(part)

    def write(self, part: Part) -> None:
        super().write(part)
        self._begin(part)

    @property
    def _begin_alike(self) -> bool:
        """Whether all nodes begin a round with equal parameters."""
        return self.exchanges[0].same and not self.exchanges[0].private

    def _begin(self, part: Part) -> None:
        """Store the parameters with which a round begins."""
        if self._proximal:
            (part.shared if self._begin_alike else part.own)["start"] = part.params


def check_resting(resting: str | None) -> None:
    """Raise a ValueError for an unknown `resting`."""
    if resting is not None:
        check.choice("resting", resting, ("server", "keep"), "None")


def _check_server(server: ServerOptimizer, island_size: int | None, resting: str | None) -> None:
    """Raise a ValueError for settings that a server excludes."""
    if island_size is not None:
        raise ValueError(f"island_size={island_size} and server_optim={server.name!r}: a server has no islands.")
    check_resting(resting)
    if resting == "keep":
        raise ValueError(
            f'resting="keep" and server_optim={server.name!r}: all nodes begin a round from the server\'s parameters. '
            "Leave one of them out."
        )


NAMES = ("avg", "avgm", "adagrad", "adam", "yogi")


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

    References: algorithm 2 of arXiv 2003.00295; "avgm" is arXiv 1909.06335's, without dampening. No deviation.
    """

    name: str = "avg"
    lr: float | Tensor = 1.0
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99)
    tau: float | Tensor = 1e-3

    def __post_init__(self) -> None:
        give = (
            f"one of {', '.join(map(repr, NAMES))}, with server_lr=, server_betas=, server_tau=. A server with any "
            "optimizer is DiLoCoStrategy(outer_optim=OptimSpec(...))"
        )
        check.instance("server_optim", self.name, str, give)
        check.choice("server_optim", self.name, NAMES)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ValueError(f"server_betas={self.betas!r} must be two numbers in [0, 1).")
        one_number("server_lr", self.lr, "[0, inf)")
        one_number("server_tau", self.tau, "(0, inf)")
        for beta in self.betas:
            one_number("server_betas", beta, "[0, 1)", "each of the two numbers")

    @property
    def spec(self) -> OptimSpec:
        """The `OptimSpec` of this name and these numbers."""
        if self.name in ("avg", "avgm"):
            momentum: dict[str, Any] = {"momentum": self.betas[0]} if self.name == "avgm" else {}
            return OptimSpec("sgd", lr=self.lr, **momentum)
        return OptimSpec(f"fed{self.name}", lr=self.lr, betas=self.betas, tau=self.tau)
