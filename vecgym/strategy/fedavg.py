"""FedAvg: local steps, then an average of the parameters (McMahan et al., arXiv 1602.05629)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vecgym.collectives.topology import random_islands, sample_nodes
from vecgym.core import check, tree
from vecgym.core.errors import warn
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.optim.schedule import Schedule
from vecgym.strategy.base import CommunicationModule, Context, State, Strategy, check_interval
from vecgym.strategy.fedopt import ServerOptimizer
from vecgym.strategy.relaxed import SyncWeight, make_sync_weight

Weighting = Literal["equal", "examples"]  # of the nodes in a mean


class AveragingCommunicator(CommunicationModule):
    """Every H steps: theta_i <- sum_k w_k theta_k / sum_k w_k over the nodes, or over the island, that i is in.

    With `participation` < 1 a server does the averaging, over the nodes S that took part in the round:
    theta <- sum_{k in S} w_k theta_k / sum_{k in S} w_k, and all nodes begin the next round from theta.

    Args:
        island_size: nodes per island; None: all in one. At each exchange the nodes are shuffled (seeded) into
            islands; when `island_size` does not divide their number, the last island is smaller.
        H: optimizer steps between two exchanges.
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
    ...     print(module.exchange_parameters(params, {}, Context(StackedCollectives(4), step))[0]["w"])
    tensor([1., 2., 3., 4.])
    tensor([2.5000])
    """

    def __init__(
        self,
        island_size: int | None = None,
        H: int = 1,
        participation: float = 1.0,
        weighting: Weighting = "equal",
        sync_weight: Tensor | Sequence[float] | SyncWeight | None = None,
        resting: str | None = None,
    ) -> None:
        self.island_size = check.optional_integer("island_size", island_size, what="None is one island")
        self.H = check_interval("H", H)
        self.participation = check_participation(participation)
        self.weighting = check_weighting(weighting)
        self.sync_weight = make_sync_weight(sync_weight, self.H, default=1)
        rounds_of_all = island_size is None and sync_weight is None
        resting = check_resting(resting, rounds_of_all or participation == 1)
        self.resting = resting if participation < 1 else None

    def check(self, num_nodes: int, max_steps: int) -> None:
        if self.sync_weight is not None:
            self.sync_weight.check(max_steps)
        count = num_participants(self.participation, num_nodes)
        if self.island_size is not None and self.island_size > count:
            raise ValueError(
                f"island_size={self.island_size} is larger than the {count} nodes that take part in a round: "
                f"give island_size <= {count}, or None for one island of all."
            )
        warn_if_never(self.H, max_steps)

    def active_nodes(self, ctx: Context) -> list[int] | None:
        return participants(self.participation, self.H, ctx) if self.participation < 1 else None

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        if self.sync_weight is not None:
            return self.sync_weight.exchange(self._average, params, state, ctx)
        return self._average(params, state, ctx) if (ctx.step + 1) % self.H == 0 else (params, state)

    def stack_key(self) -> Hashable:
        usual = self.island_size is None and self.participation == 1 and self.weighting == "equal"
        return self.H if usual and self.sync_weight is None else None

    def stacked(self, modules: Sequence[Any], num_nodes: int) -> AveragingCommunicator:
        return self

    def _average(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        weights = node_weights(self.weighting, ctx)
        if self.island_size is None and self.participation == 1:
            return ctx.comm.mean(params, weights=weights), state
        nodes = participants(self.participation, self.H, ctx)
        if self.resting == "server":
            return ctx.comm.server_mean(params, nodes, weights), state
        islands = random_islands(nodes, self.island_size or len(nodes), ctx.generator("islands", ctx.step))
        return ctx.comm.mean(params, groups=islands, weights=weights), state


class ServerCommunicator(CommunicationModule):
    """Every H steps, a server moves theta by the mean movement of the nodes that took part.

    Delta = sum_{k in S} w_k (theta_k - theta) / sum_{k in S} w_k;  theta <- server(theta, Delta);  theta_i <- theta.

    State: `params` (theta) and the server optimizer's slots, `[1, *]`: stored once for all nodes. Bytes sent per
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

    def __init__(
        self,
        server: ServerOptimizer,
        H: int = 1,
        participation: float = 1.0,
        weighting: Weighting = "equal",
    ) -> None:
        self.server = check.instance("server", server, ServerOptimizer, "a ServerOptimizer('adam', lr=0.1)")
        self.H = check_interval("H", H)
        self.participation = check_participation(participation)
        self.weighting = check_weighting(weighting)

    def check(self, num_nodes: int, max_steps: int) -> None:
        warn_if_never(self.H, max_steps)
        self.server.check()

    def init(self, params: Tree, ctx: Context) -> State:
        return {"params": params, "slots": self.server.init(params)}

    def active_nodes(self, ctx: Context) -> list[int] | None:
        return participants(self.participation, self.H, ctx) if self.participation < 1 else None

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        if (ctx.step + 1) % self.H != 0:
            return params, state
        chosen = participants(self.participation, self.H, ctx)
        movement = tree.map(torch.sub, params, state["params"])
        delta = ctx.comm.server_mean(movement, chosen, node_weights(self.weighting, ctx))  # [1, *]
        theta, slots = self.server.update(state["params"], delta, state["slots"])
        return theta, {"params": theta, "slots": slots}

    def outer_learning_rate(self, ctx: Context) -> float | Tensor | None:
        return self.server.lr


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

    def __init__(self, mu: float | Tensor, H: int = 1) -> None:
        self.mu = check.per_node("proximal_mu", mu, "[0, inf)", "0 is no proximal term")
        self.H = check_interval("H", H)

    def check(self, num_nodes: int, max_steps: int) -> None:
        check.per_node("proximal_mu", self.mu, "[0, inf)", num_nodes=num_nodes)

    def init(self, params: Tree, ctx: Context) -> State:
        return {"start": params}

    def local_gradients(self, grads: Tree, params: Tree, state: State, ctx: Context) -> Tree:
        mu = ctx.own(self.mu)
        return tree.map(lambda g, p, start: g + tree.per_node(mu, p) * (p - start), grads, params, state["start"])

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        if (ctx.step + 1) % self.H != 0:
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
        H: local steps per round.
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

    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int = 1,
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
        lr: float | Tensor | None = None,
        max_norm: float | Tensor | None = None,
        lr_scheduler: str | Schedule | None = None,
        warmup_steps: int = 0,
        cosine_anneal: bool = False,
    ) -> None:
        modules: list[CommunicationModule]
        given = {"lr": server_lr, "betas": server_betas, "tau": server_tau}
        has_mu = not isinstance(proximal_mu, (int, float)) or proximal_mu != 0
        if sync_weight is not None and (server_optim is not None or has_mu):
            other = "proximal_mu" if has_mu else "server_optim"
            raise ValueError(f"{other} works in rounds of H steps, and sync_weight has none: give H, or no {other}.")
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if server_optim is None:
            if options:
                names = ", ".join(f"server_{name}" for name in options)
                raise ValueError(f'{names} without server_optim has no effect: give server_optim="avgm", say.')
            modules = [AveragingCommunicator(island_size, H, participation, weighting, sync_weight, resting)]
        else:
            if island_size is not None:
                raise ValueError(
                    f"island_size={island_size} and server_optim={server_optim!r}: a server has no islands."
                )
            if check_resting(resting, rounds_of_all=True) == "keep":
                raise ValueError(
                    f'resting="keep" and server_optim={server_optim!r}: all nodes begin a round from the server\'s '
                    "parameters. Leave one of them out."
                )
            modules = [ServerCommunicator(ServerOptimizer(server_optim, **options), H, participation, weighting)]
        if has_mu:
            modules.append(ProximalTerm(proximal_mu, H))
        super().__init__(
            inner_optim,
            communication_modules=modules,
            lr=lr,
            max_norm=max_norm,
            lr_scheduler=lr_scheduler,
            warmup_steps=warmup_steps,
            cosine_anneal=cosine_anneal,
        )


def num_participants(participation: float, num_nodes: int) -> int:
    """Nodes that train in a round: at least one."""
    return max(1, round(participation * num_nodes))


def participants(participation: float, H: int, ctx: Context) -> list[int]:
    """The nodes of the present round of H steps, ascending: all, or a sample drawn for the round."""
    count = num_participants(participation, ctx.comm.num_nodes)
    if participation == 1:
        return list(range(count))
    return sample_nodes(ctx.comm.num_nodes, count, ctx.generator("participants", ctx.step // H))


def node_weights(weighting: str, ctx: Context) -> tuple[float, ...] | None:
    """The weight of each node in an average; None: all alike."""
    if weighting == "equal":
        return None
    if ctx.num_examples is None:
        raise ValueError(
            'weighting="examples" needs the number of examples of each node: Simulation(num_examples=...).'
        )
    return tuple(float(n) for n in ctx.num_examples)


def check_participation(participation: float) -> float:
    return check.number("participation", participation, "(0, 1]", "the fraction of nodes that trains in a round")


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


def check_weighting(weighting: Weighting) -> str:
    return check.choice("weighting", weighting, get_args(Weighting))


def warn_if_never(H: int, max_steps: int) -> None:
    """Warn when a run is too short for a single exchange."""
    if max_steps < H:
        warn(f"H={H} is larger than the run's {max_steps} steps: the nodes never exchange anything.")
