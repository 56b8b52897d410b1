"""PALSGD: DiLoCo with random steps towards the outer parameters (Naganuma et al., arXiv 2504.18454)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.strategy.average import Mean, kept
from vecgym.strategy.base import Context, State, Strategy
from vecgym.strategy.inner import InnerOptions, takes_options
from vecgym.strategy.modules import DEFAULT_H, OuterStep, outer_spec
from vecgym.strategy.when import When

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PALSGDCommunicator(OuterStep):
    """A DiLoCo in which a node, at a step drawn with probability p, takes no gradient but goes towards theta_outer.

    theta_i <- theta_i - (gamma / p) c (theta_i - theta_outer), with gamma the inner learning rate of the step; the
    draws are each node's own. Every H steps: DiLoCo's outer step, of all nodes.

    A node that is drawn does not train in this step: it keeps its optimizer's state, and its loss is nan. The rate of
    the steps with a gradient is gamma / (1 - p), which `PALSGDStrategy` sees to.

    State: as `DiLoCoCommunicator`'s, `[1, *]`. Bytes: those of its outer steps; a pull costs none.

    Args:
        p: in [0, 1).
        pull: c, one for all or one for each node.
        outer_optim, H, outer_lr: see `DiLoCoCommunicator`; H may be a `When`.

    Raises:
        ValueError: for p outside [0, 1), pull < 0, H < 1.

    >>> from vecgym.collectives import StackedCollectives
    >>> module, ctx = PALSGDCommunicator(p=0.5, H=10), Context(StackedCollectives(4), step=1, lr=0.2, seed=1)
    >>> module.drawn(ctx), module.active_nodes(ctx)
    (tensor([False,  True,  True, False]), [0, 3])
    >>> state = module.init({"w": torch.zeros(1)}, ctx)
    >>> module.exchange_parameters({"w": torch.ones(4)}, state, ctx)[0]  # gamma is 0.2 (1 - p)
    {'w': tensor([1.0000, 0.8000, 0.8000, 1.0000])}
    """

    shows_defaults = True

    def __init__(
        self,
        p: float = 0.1,
        pull: float | Tensor = 1.0,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | When | Callable[[int], int] = DEFAULT_H,
        outer_lr: float | Tensor | None = None,
    ) -> None:
        self.p = check.number("p", p, "[0, 1)", "the probability of a step towards the outer parameters")
        self.pull = check.per_node("pull", pull, "[0, inf)", "how strong such a step is")
        super().__init__(Mean(), outer_spec(outer_optim, outer_lr), H)

    @property
    def lets_rest(self) -> bool:  # type: ignore[override]
        return self.p > 0

    def check(self, num_nodes: int, max_steps: int) -> None:
        super().check(num_nodes, max_steps)
        check.per_node("pull", self.pull, num_nodes=num_nodes)

    def drawn(self, ctx: Context) -> Tensor:
        """Return which of the nodes go towards the outer parameters in this step, bool `[K]`."""
        return torch.rand(ctx.comm.num_nodes, generator=ctx.generator("pull", ctx.step)) < self.p

    def active_nodes(self, ctx: Context) -> list[int] | None:
        drawn = self.drawn(ctx)
        return (~drawn).nonzero().flatten().tolist() if bool(drawn.any()) else None

    def idle(self, ctx: Context) -> bool:
        return super().idle(ctx) and not bool(self.drawn(ctx).any())

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        drawn = self.drawn(ctx)
        if bool(drawn.any()):
            if ctx.lr is None:
                raise ValueError(f"{self!r} goes by the inner learning rate, and the strategy has none.")
            # The rate of the steps with a gradient is gamma / (1 - p).
            share = ctx.own(ctx.lr) * ((1 - self.p) / self.p) * ctx.own(self.pull)
            pulled = tree.map(lambda x, outer: x - tree.per_node(share, x) * (x - outer), params, state["params"])
            params = kept(~drawn[ctx.comm.node_ids], params, pulled)
        return super().exchange_parameters(params, state, ctx)

    def stack_key(self) -> Hashable:
        return None  # nodes are drawn at random


class PALSGDStrategy(Strategy):
    """DiLoCo whose nodes, at random steps, go towards the outer parameters instead of along a gradient.

    At each step of a node, with probability p: theta_i <- theta_i - (gamma / p) c (theta_i - theta_outer); otherwise
    theta_i <- inner(theta_i, g_i) with the learning rate gamma / (1 - p). Every H steps: Delta = mean_i(theta_outer -
    theta_i), theta_outer <- outer(theta_outer, Delta), theta_i <- theta_outer.

    The nodes stay near one another without a byte, so that H may be larger. p = 0 is DiLoCo.

    | kept                            | shape    | bytes                                        |
    |---------------------------------|----------|----------------------------------------------|
    | theta, inner optimizer          | `[K, *]` | per node: b P and the optimizer's            |
    | theta_outer, the outer momentum | `[1, *]` | once for all: 2 b P                          |

    Bytes sent per node and step: 2 (K - 1) / K * b * P / H.

    Args:
        inner_optim: the local optimizer, AdamW when not given. Its learning rate is gamma; the history has
            gamma / (1 - p), the rate of the steps with a gradient.
        p: the probability of a step towards the outer parameters, in [0, 1).
        pull: c, how strong such a step is, one for all or one for each node.
        outer_optim: SGD(lr=0.7, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        H: steps per round, of both kinds.
        outer_lr: the outer learning rate.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    Raises:
        ValueError: see `PALSGDCommunicator`.

    >>> PALSGDStrategy("adamw", p=0.2, H=64, lr=1e-3).communication_modules[0]
    PALSGDCommunicator(p=0.2, pull=1.0, outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=64)

    Reference: Naganuma et al., "Pseudo-Asynchronous Local SGD: Robust and Efficient Data-Parallel Training", arXiv
    2504.18454. Deviation: with `vecgym.availability.LocalSteps`, a node that waits for the exchange is drawn too. The
    defaults of p, pull and H are ours: no program of the authors was found to compare with.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        p: float = 0.1,
        H: int | When | Callable[[int], int] = DEFAULT_H,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        pull: float | Tensor = 1.0,
        outer_lr: float | Tensor | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        module = PALSGDCommunicator(p, pull, outer_optim, H, outer_lr)
        super().__init__(inner_optim, communication_modules=[module], **inner)
        self._p = module.p

    def lr(self, ctx: Context) -> float | Tensor:
        """Return the rate of the steps with a gradient, gamma / (1 - p)."""
        return super().lr(ctx) / (1 - self._p)
