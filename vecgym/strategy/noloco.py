"""NoLoCo: outer steps over random groups of nodes, without an all-reduce (Kolehmainen et al., arXiv 2506.10911)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.strategy.average import Mean, shown
from vecgym.strategy.base import CommunicationModule, Context, State, Strategy
from vecgym.strategy.inner import InnerOptions, takes_options
from vecgym.strategy.when import When, as_when

if TYPE_CHECKING:
    from typing_extensions import Unpack


class NoLoCoCommunicator(CommunicationModule):
    """Every H steps the nodes are matched at random in groups, and each takes an outer step with its group.

    With Delta_j = theta_j - phi_j, in groups of n nodes:
    delta_i <- mu delta_i + (eta / n) sum_group Delta_j - gamma (phi_i - mean_group phi);
    phi_i <- phi_i + delta_i;  theta_i <- phi_i.

    State: `params` (phi) and `momentum` (delta), each node's own, `[L, *]`; `[1, *]` where all nodes are in one group.

    Bytes sent per node and exchange: Delta and phi in a ring of n nodes, 4 (n - 1) / n b P: 2 b P in pairs.

    Args:
        H: inner steps between two outer steps, as a number, a function of the step, or a `When`.
        group_size: n. Where it does not divide the number of nodes, the last group is smaller; from all nodes on there
            is one group.
        outer_lr: eta, one for all or one for each node.
        momentum: mu, likewise.
        gamma: how far a node goes to the mean phi of its group, likewise.

    Raises:
        ValueError: for H or group_size < 1, outer_lr or gamma < 0, a momentum outside [0, 1); at `check` for a group of
            more nodes than there are.

    >>> from vecgym.collectives import StackedCollectives
    >>> module, ctx = NoLoCoCommunicator(H=1, outer_lr=0.5), Context(StackedCollectives(2))
    >>> state = module.init({"w": torch.tensor([0.0, 4.0])}, ctx)
    >>> params, state = module.exchange_parameters({"w": torch.tensor([1.0, 7.0])}, state, ctx)
    >>> params["w"]  # 2, the mean phi, + 0.5 (1 + 3) / 2
    tensor([3., 3.])
    """

    def __init__(
        self,
        H: int | When | Callable[[int], int] = 50,
        group_size: int = 2,
        outer_lr: float | Tensor = 0.7,
        momentum: float | Tensor = 0.5,
        gamma: float | Tensor = 1.0,
    ) -> None:
        self.when = as_when(H, "H")
        self.H = self.when if callable(H) else H
        self.group_size = check.integer("group_size", group_size, what="the nodes that take an outer step together")
        self.outer_lr = check.per_node("outer_lr", outer_lr, "[0, inf)")
        self.momentum = check.per_node("momentum", momentum, "[0, 1)", "of the outer steps")
        self.gamma = check.per_node("gamma", gamma, "[0, inf)", "how far a node goes to the mean of its group")

    def check(self, num_nodes: int, max_steps: int) -> None:
        self.when.check(max_steps, self)
        for name in ("outer_lr", "momentum", "gamma"):
            check.per_node(name, getattr(self, name), num_nodes=num_nodes)
        if self.group_size > max(2, num_nodes):  # pairs are the default, also of a node that is alone
            raise ValueError(
                f"group_size={self.group_size} is larger than the {num_nodes} nodes: give group_size <= {num_nodes}, "
                "which is one group of all."
            )

    def init(self, params: Tree, ctx: Context) -> State:
        return {"params": params, "momentum": tree.map(torch.zeros_like, params)}

    def idle(self, ctx: Context) -> bool:
        return not self.when.due(ctx.step)

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        return self.when.exchange(self._outer_step, params, state, ctx)

    def outer_learning_rate(self, ctx: Context) -> float | Tensor | None:
        left = self.when.count(ctx.step) < self.when.count(ctx.max_steps)
        return self.outer_lr if left else None

    def _outer_step(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        ctx = ctx.replace(inplace=False)
        average = Mean(self.group_size if self.group_size < ctx.comm.num_nodes else None)
        moved = tree.map(torch.sub, params, state["params"])
        together, _ = average(moved, {}, ctx)
        middle, _ = average(state["params"], {}, ctx)  # of the same groups: the step draws them
        mu, eta, gamma = (ctx.own(x) for x in (self.momentum, self.outer_lr, self.gamma))

        def faster(delta: Tensor, movement: Tensor, phi: Tensor, mean: Tensor) -> Tensor:
            inertia, pull = tree.per_node(mu, delta) * delta, tree.per_node(gamma, phi) * (phi - mean)
            return inertia + tree.per_node(eta, movement) * movement - pull

        momentum = tree.map(faster, state["momentum"], together, state["params"], middle)
        outer = tree.map(torch.add, state["params"], momentum)
        return outer, {"params": outer, "momentum": momentum}

    def __repr__(self) -> str:
        return shown(self, every=True)


class NoLoCoStrategy(Strategy):
    """H local steps on every node, then an outer step with a random partner: nobody waits for all.

    theta_i <- inner(theta_i, g_i), H times; then, with Delta_j = theta_j - phi_j in random groups of n nodes,
    delta_i <- mu delta_i + (eta / n) sum_group Delta_j - gamma (phi_i - mean_group phi);
    phi_i <- phi_i + delta_i;  theta_i <- phi_i.

    In groups of one size, the mean of phi over the nodes moves as with a heavy ball in DiLoCo, and gamma brings the
    nodes together. With one group of all nodes phi is the same on each: that is DiLoCo with a heavy ball.

    | kept                   | shape    | bytes                                        |
    |------------------------|----------|----------------------------------------------|
    | theta, inner optimizer | `[K, *]` | per node: b P and the optimizer's            |
    | phi, delta             | `[K, *]` | per node: 2 b P; of one group once, `[1, *]` |

    Bytes sent per node and step: 2 b P / H in pairs, 4 (n - 1) / n b P / H in groups of n.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        H: inner steps per round.
        group_size: n, the nodes that take an outer step together.
        outer_lr, momentum, gamma: eta, mu and gamma; see `NoLoCoCommunicator`. The authors' code has gamma = eta.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    Raises:
        ValueError: see `NoLoCoCommunicator`.

    >>> NoLoCoStrategy("adamw", H=50, lr=3e-4)
    NoLoCoStrategy(OptimSpec(AdamW, lr=0.0003), \
NoLoCoCommunicator(H=50, group_size=2, outer_lr=0.7, momentum=0.5, gamma=1.0))

    Reference: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", arXiv
    2506.10911, and github.com/gensyn-ai/noloco, src/noloco/sparse_optimizer_c.py, whose gamma is its outer learning
    rate: gamma=0.7 is what its runs have, with outer_lr 0.7, momentum 0.5 and H 50. Deviations: the movement is counted
    upwards, Delta = theta - phi, so that its term has a plus; gamma is 1 unless it is given, in the middle of the
    paper's bounds (for pairs and mu = 0.5: 0.5 and 1.5); pipeline stages and the random routes
    between them are not part of it; a node that is left alone in its group goes on with its own movement.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | When | Callable[[int], int] = 50,
        group_size: int = 2,
        *,
        outer_lr: float | Tensor = 0.7,
        momentum: float | Tensor = 0.5,
        gamma: float | Tensor = 1.0,
        **inner: Unpack[InnerOptions],
    ) -> None:
        module = NoLoCoCommunicator(H, group_size, outer_lr, momentum, gamma)
        super().__init__(inner_optim, communication_modules=[module], **inner)
