"""FedAvg: local steps, then an average of the parameters (McMahan et al., arXiv 1602.05629)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.strategy.average import Mean, ServerMean, Weighting
from vecgym.strategy.base import CommunicationModule, Context, State, Strategy
from vecgym.strategy.fedopt import ServerOptimizer
from vecgym.strategy.inner import InnerOptions, takes_options
from vecgym.strategy.modules import OuterStep, Parameters
from vecgym.strategy.when import SyncWeight, as_when, interval, make_sync_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AveragingCommunicator(Parameters):
    """Every H steps: theta_i <- sum_k w_k theta_k / sum_k w_k over the nodes, or over the island, that i is in.

    With `participation` < 1 a server does the averaging, over the nodes S that took part in the round:
    theta <- sum_{k in S} w_k theta_k / sum_{k in S} w_k, and all nodes begin the next round from theta.

    Args:
        island_size: nodes per island; None: all in one. At each exchange the nodes are shuffled (seeded) into
            islands; when `island_size` does not divide their number, the last island is smaller.
        H: optimizer steps between two exchanges: a number, or a function of the step at which a round begins.
        participation: the fraction of the nodes, drawn anew for each round of H steps (at least one), that
            trains and averages in it; the others keep optimizer state and buffers.
        weighting: "equal", or "examples": w_k is the number of examples of node k.
        sync_weight: `[T]`, in place of H: a_t, one for each step, theta_i <- (1 - a_t) theta_i + a_t mean theta; see
            `SyncWeight`.
        resting: with `participation` < 1, what a node that sat out begins with when it is drawn again: "server", the
            server's theta; "keep", the parameters that it had, since those who take part average among themselves.
            None: "server", but "keep" with islands or `sync_weight`, which have no theta of all.

    Raises:
        ValueError: for H or island_size < 1, participation outside (0, 1], resting="server" with islands or
            `sync_weight`; at `fit` for an island larger than the number of nodes that take part.

    >>> from vecgym.collectives import StackedCollectives
    >>> module, params = AveragingCommunicator(H=2), {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    >>> for step in range(2):
    ...     print(module.exchange_parameters(params, {}, Context(StackedCollectives(4), step=step))[0]["w"])
    tensor([1., 2., 3., 4.])
    tensor([2.5000])
    """

    shows_defaults = True

    def __init__(
        self,
        island_size: int | None = None,
        H: int | Callable[[int], int] = 1,
        participation: float = 1.0,
        weighting: Weighting = "equal",
        sync_weight: Tensor | Sequence[float] | SyncWeight | None = None,
        resting: str | None = None,
    ) -> None:
        mean = Mean(island_size, weighting, participation)
        self.H = interval(H, "H")
        self.sync_weight = make_sync_weight(sync_weight, self.H, default=1)
        rounds_of_all = island_size is None and sync_weight is None
        resting = check_resting(resting, rounds_of_all or participation == 1)
        self.island_size, self.participation, self.weighting = mean.island_size, mean.participation, mean.weighting
        self.resting = resting if participation < 1 else None
        average = ServerMean(weighting, participation) if self.resting == "server" else mean
        super().__init__(average, as_when(self.H, "H") if self.sync_weight is None else self.sync_weight)


class ServerCommunicator(OuterStep):
    """Every H steps, a server moves theta by the mean movement of the nodes that took part.

    g = sum_{k in S} w_k (theta - theta_k) / sum_{k in S} w_k;  theta <- server(theta, g);  theta_i <- theta.

    State: `params` (theta) and `optimizer`, the server optimizer's, `[1, *]`: stored once for all nodes. Bytes sent per
    participant and round: b * P up (and as many down from the server).

    Args:
        server: the server's optimizer.
        H, participation, weighting: as in `AveragingCommunicator`. All nodes, those that sat out too, begin the
            next round from theta.

    >>> from vecgym.collectives import StackedCollectives
    >>> module, ctx = ServerCommunicator(ServerOptimizer("avg", lr=0.5)), Context(StackedCollectives(2))
    >>> state = module.init({"w": torch.zeros(1)}, ctx)
    >>> module.exchange_parameters({"w": torch.tensor([1.0, 3.0])}, state, ctx)[0]  # half of the mean movement
    {'w': tensor([1.])}
    """

    shows_defaults = True

    def __init__(
        self,
        server: ServerOptimizer,
        H: int | Callable[[int], int] = 1,
        participation: float = 1.0,
        weighting: Weighting = "equal",
    ) -> None:
        self.server = check.instance("server", server, ServerOptimizer, "a ServerOptimizer('adam', lr=0.1)")
        mean = ServerMean(weighting, participation)
        super().__init__(mean, server.spec, H)
        self.participation, self.weighting = mean.participation, mean.weighting

    def check(self, num_nodes: int, max_steps: int) -> None:
        self.server.check()
        super().check(num_nodes, max_steps)

    def outer_learning_rate(self, ctx: Context) -> float | Tensor | None:
        return self.server.lr  # also after the last round


class ProximalTerm(CommunicationModule):
    """FedProx: each node's loss gets mu / 2 |theta_i - theta_i(start of the round)|^2, so g_i += mu (theta_i - start).

    Put it after the module that averages, with the same H: the start is then what that gave, the server's theta.
    State: the start of the round, `[1 or L, *]`.

    >>> from vecgym.collectives import StackedCollectives
    >>> module, ctx = ProximalTerm(mu=0.5), Context(StackedCollectives(2))
    >>> state = module.init({"w": torch.tensor([1.0])}, ctx)
    >>> module.local_gradients({"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 3.0])}, state, ctx)
    {'w': tensor([0., 1.])}

    Reference: Li et al., "Federated Optimization in Heterogeneous Networks", arXiv 1812.06127. Deviation: the
    number of local steps is fixed.
    """

    def __init__(self, mu: float | Tensor, H: int | Callable[[int], int] = 1) -> None:
        self.mu = check.per_node("proximal_mu", mu, "[0, inf)", "0 is no proximal term")
        self.H = interval(H, "H")
        self._when = as_when(self.H, "H")

    def check(self, num_nodes: int, max_steps: int) -> None:
        check.per_node("proximal_mu", self.mu, "[0, inf)", num_nodes=num_nodes)

    def init(self, params: Tree, ctx: Context) -> State:
        return {"start": params}

    def local_gradients(self, grads: Tree, params: Tree, state: State, ctx: Context) -> Tree:
        mu = ctx.own(self.mu)
        return tree.map(lambda g, p, start: g + tree.per_node(mu, p) * (p - start), grads, params, state["start"])

    def idle(self, ctx: Context) -> bool:
        return not self._when.due(ctx.step)

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        if not self._when.due(ctx.step):
            return params, state
        return params, {"start": tree.map(torch.clone, params)}  # the next step overwrites params


class FedAvgStrategy(Strategy):
    """H local steps on every node, then the average of the parameters.

    theta_i <- inner(theta_i, g_i), H times; then theta_i <- sum_{k in island(i)} w_k theta_k / sum w_k.

    With `participation` < 1 it is the paper's algorithm: in each round a sample S of the nodes begins from the
    server's theta, and theta <- sum_{k in S} w_k theta_k / sum w_k. After every exchange all nodes hold theta; within a
    round, those that sit out still do. With `server_optim` theta takes a step of the server's optimizer instead: see
    `ServerOptimizer`.

    Inner optimizer state stays on its node and is kept until the node takes part again. (The paper's clients run plain
    SGD, which has none.) Bytes sent per node and round: 2 (n - 1) / n * b * P with islands of n nodes; with a server,
    b * P up for each participant, and as many down.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        H: local steps per round: a number, or a function of the step at which a round begins (post-local SGD).
        island_size, participation, weighting, sync_weight, resting: see `AveragingCommunicator`.
        proximal_mu: FedProx's mu; 0: none.
        server_optim: None, "avg", "avgm" (FedAvgM), "adam" (FedAdam), "yogi" (FedYogi) or "adagrad" (FedAdagrad).
        server_lr, server_betas, server_tau: of the server's optimizer.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    >>> FedAvgStrategy("sgd", H=5, island_size=4, lr=0.01)
    FedAvgStrategy(OptimSpec(SGD, lr=0.01), \
AveragingCommunicator(island_size=4, H=5, participation=1.0, weighting='equal'))

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    arXiv 1602.05629. Deviations: progress is counted in steps, not in epochs; nodes count alike unless
    `weighting="examples"`; with islands and with `resting="keep"`, nodes that sit out keep their own parameters.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = 1,
        island_size: int | None = None,
        participation: float = 1.0,
        *,
        weighting: Weighting = "equal",
        sync_weight: Tensor | Sequence[float] | SyncWeight | None = None,
        resting: str | None = None,
        proximal_mu: float | Tensor = 0.0,
        server_optim: str | None = None,
        server_lr: float | Tensor | None = None,
        server_betas: tuple[float | Tensor, float | Tensor] | None = None,
        server_tau: float | Tensor | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        has_mu = not isinstance(proximal_mu, (int, float)) or proximal_mu != 0
        if sync_weight is not None and (server_optim is not None or has_mu):
            other = "proximal_mu" if has_mu else "server_optim"
            raise ValueError(f"{other} works in rounds of H steps, and sync_weight has none: give H, or no {other}.")
        options = {"lr": server_lr, "betas": server_betas, "tau": server_tau}
        server = _server(server_optim, {name: value for name, value in options.items() if value is not None})
        modules: list[CommunicationModule]
        if server is None:
            modules = [AveragingCommunicator(island_size, H, participation, weighting, sync_weight, resting)]
        else:
            _check_server(server, island_size, resting)
            modules = [ServerCommunicator(server, H, participation, weighting)]
        if has_mu:
            modules.append(ProximalTerm(proximal_mu, H))
        super().__init__(inner_optim, communication_modules=modules, **inner)


def check_resting(resting: str | None, rounds_of_all: bool) -> str:
    """ "server" or "keep", as asked for; None: "server" where rounds of all nodes have one."""
    if resting is not None:
        check.choice("resting", resting, ("server", "keep"), "None")
    if resting == "server" and not rounds_of_all:
        raise ValueError(
            'resting="server" needs one server and rounds of H steps: leave out island_size and sync_weight, or give '
            'resting="keep".'
        )
    return resting or ("server" if rounds_of_all else "keep")


def _server(name: str | None, options: dict[str, Any]) -> ServerOptimizer | None:
    """Return the server's optimizer; None: there is none."""
    if name is not None:
        return ServerOptimizer(name, **options)
    if options:
        names = ", ".join(f"server_{option}" for option in options)
        raise ValueError(f'{names} without server_optim has no effect: give server_optim="avgm", say.')
    return None


def _check_server(server: ServerOptimizer, island_size: int | None, resting: str | None) -> None:
    """Raise a ValueError for what a server cannot have."""
    if island_size is not None:
        raise ValueError(f"island_size={island_size} and server_optim={server.name!r}: a server has no islands.")
    if check_resting(resting, rounds_of_all=True) == "keep":
        raise ValueError(
            f'resting="keep" and server_optim={server.name!r}: all nodes begin a round from the server\'s parameters. '
            "Leave one of them out."
        )
