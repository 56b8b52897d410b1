"""FedAvg: local steps, then an average of the parameters (McMahan et al., arXiv 1602.05629)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from vecgym.errors import VecgymWarning
from vecgym.optim import OptimSpec
from vecgym.schedule import Schedule
from vecgym.strategy.base import CommunicationModule, Context, State, Strategy, check_interval
from vecgym.topology import random_islands, sample_nodes
from vecgym.tree import Tree


class AveragingCommunicator(CommunicationModule):
    """Every H steps: theta_i <- mean of theta over the nodes, or over the island, that i is in.

    Args:
        island_size: nodes per island; None: all in one. At each exchange the nodes are shuffled (seeded) into
            islands; when `island_size` does not divide their number, the last island is smaller.
        H: optimizer steps between two exchanges.
        participation: the fraction of the nodes, drawn anew for each round of H steps (at least one), that
            trains and averages in it; the others keep parameters and optimizer state.

    Raises:
        ValueError: for H or island_size < 1, participation outside (0, 1]; at `fit` for an island larger than
            the number of nodes that take part.
    """

    def __init__(self, island_size: int | None = None, H: int = 1, participation: float = 1.0) -> None:
        if island_size is not None and (
            isinstance(island_size, bool) or not isinstance(island_size, int) or island_size < 1
        ):
            raise ValueError(f"island_size={island_size!r} must be an integer >= 1, or None for one island.")
        if isinstance(participation, bool) or not 0 < participation <= 1:
            raise ValueError(
                f"participation={participation!r} must be in (0, 1]: the fraction of nodes that trains in a round."
            )
        self.island_size = island_size
        self.H = check_interval("H", H)
        self.participation = participation

    def num_participants(self, num_nodes: int) -> int:
        """Nodes that train in a round."""
        return max(1, round(self.participation * num_nodes))

    def check(self, num_nodes: int, max_steps: int) -> None:
        count = self.num_participants(num_nodes)
        if self.island_size is not None and self.island_size > count:
            raise ValueError(
                f"island_size={self.island_size} is larger than the {count} nodes that take part in a round: "
                f"give island_size <= {count}, or None for one island of all."
            )
        warn_if_never(self.H, max_steps)

    def participants(self, ctx: Context) -> list[int]:
        """The nodes of the present round, ascending."""
        count = self.num_participants(ctx.comm.num_nodes)
        return sample_nodes(ctx.comm.num_nodes, count, ctx.generator("participants", ctx.step // self.H))

    def active_nodes(self, ctx: Context) -> list[int] | None:
        return self.participants(ctx) if self.participation < 1 else None

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        if (ctx.step + 1) % self.H != 0:
            return params, state
        if self.island_size is None and self.participation == 1:
            return ctx.comm.mean(params), state
        nodes = self.participants(ctx) if self.participation < 1 else range(ctx.comm.num_nodes)
        islands = random_islands(nodes, self.island_size or len(nodes), ctx.generator("islands", ctx.step))
        return ctx.comm.mean(params, groups=islands), state


class FedAvgStrategy(Strategy):
    """H local steps on every node, then the average of the parameters.

    theta_i <- inner(theta_i, g_i), H times; then theta_i <- 1/n sum_{k in island(i)} theta_k.

    Inner optimizer state stays on its node. Bytes sent per node and round: 2 (n - 1) / n * b * P with islands
    of n nodes.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        H: local steps per round.
        island_size, participation: see `AveragingCommunicator`.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    >>> FedAvgStrategy("sgd", H=5, island_size=4, lr=0.01)
    FedAvgStrategy(OptimSpec(SGD, lr=0.01), AveragingCommunicator(island_size=4, H=5, participation=1.0))

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    arXiv 1602.05629. Deviations: nodes exchange among themselves without a server; every node counts alike
    (equal shards); nodes that do not take part in a round keep their own parameters.
    """

    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int = 1,
        island_size: int | None = None,
        participation: float = 1.0,
        *,
        lr: float | Tensor | None = None,
        max_norm: float | None = None,
        lr_scheduler: str | Schedule | None = None,
        warmup_steps: int = 0,
        cosine_anneal: bool = False,
    ) -> None:
        super().__init__(
            inner_optim,
            communication_modules=[AveragingCommunicator(island_size, H, participation)],
            lr=lr,
            max_norm=max_norm,
            lr_scheduler=lr_scheduler,
            warmup_steps=warmup_steps,
            cosine_anneal=cosine_anneal,
        )


def warn_if_never(H: int, max_steps: int) -> None:
    """Warn when a run is too short for a single exchange."""
    if max_steps < H:
        warnings.warn(
            f"H={H} is larger than the run's {max_steps} steps: the nodes never exchange anything.",
            VecgymWarning,
            stacklevel=2,
        )
