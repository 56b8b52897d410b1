"""GPA, generalized primal averaging: DiLoCo's slow average, moved at every step (Defazio et al., arXiv 2512.17131)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.optim.formulas import FORMULAS
from vecgym.strategy.allreduce import GradientAveraging
from vecgym.strategy.base import Context, State, Strategy
from vecgym.strategy.inner import InnerOptions, takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

FAST = "z"  # what the optimizer's state calls the parameters that it steps


class GPAStrategy(Strategy):
    """Every step, all nodes take the optimizer's step from z with the mean gradient at y; x follows z slowly.

    y = mu_y x + (1 - mu_y) z;  z <- inner(z, mean_i g_i(y));  x <- mu_x x + (1 - mu_x) z.

    A smooth DiLoCo without rounds: mu_x = 0.9^(1 / H) is what H is there, 0.9967 about 32 steps. With mu_x = 0 it is
    AllReduce. With one node it is what the paper is about.

    | kept                            | shape    | bytes                                            |
    |---------------------------------|----------|--------------------------------------------------|
    | y, z and the inner optimizer's  | `[1, *]` | once for all: 2 b P, and the optimizer's, of z   |

    x is not kept: x = (y - (1 - mu_y) z) / mu_y, which `average` gives. Bytes sent per node and step:
    2 (K - 1) / K * b * P.

    Args:
        inner_optim: the optimizer, AdamW when not given; its weight decay is that of z.
        mu_x: in [0, 1), what x keeps of itself in a step.
        mu_y: in (0, 1], the part of x in y.
        decay: what a decoupled weight decay wd, such as AdamW's, does. "paper": it is part of the step of z, and x
            follows. "code": as in the authors' program, which keeps y and not x, and shrinks z before it takes it out
            of y: x gains mu_x (1 / mu_y - 1) lr wd z at every step.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: for mu_x outside [0, 1) or mu_y outside (0, 1], or another `decay`.

    >>> GPAStrategy("adamw", mu_x=0.9934, lr=1e-3)
    GPAStrategy(OptimSpec(AdamW, lr=0.001), GradientAveraging(), mu_x=0.9934, mu_y=0.7)

    Reference: Defazio et al., "Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs", arXiv 2512.17131,
    and its code, github.com/facebookresearch/optimizers, gpa/gpa_adamw.py, whose defaults these are but for `decay`.
    Without weight decay both are the same. Its `use_wd_on_y=True` is not offered. Deviation: evaluations, and the model
    that `fit` returns, are those of y, the parameters that are trained; the paper has those of x.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        mu_x: float | Tensor = 0.9967,
        mu_y: float | Tensor = 0.7,
        decay: Literal["paper", "code"] = "paper",
        **inner: Unpack[InnerOptions],
    ) -> None:
        self.mu_x = check.per_node("mu_x", mu_x, "[0, 1)", "what x keeps of itself in a step")
        self.mu_y = check.per_node("mu_y", mu_y, "(0, 1]", "the part of x in y")
        check.choice("decay", decay, ("paper", "code"))
        self.decay = decay
        super().__init__(inner_optim, communication_modules=[GradientAveraging()], **inner)

    def check(self, num_nodes: int, max_steps: int) -> None:
        super().check(num_nodes, max_steps)
        for name in ("mu_x", "mu_y"):
            check.per_node(name, getattr(self, name), num_nodes=num_nodes)

    def init(self, params: Tree, ctx: Context) -> tuple[State, State]:
        optimizer, modules = super().init(params, ctx)
        return {**optimizer, FAST: tree.map(torch.clone, params)}, modules

    def optimize(self, params: Tree, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Step z by the gradients, which are those at `params` = y, and move y."""
        mu_x, mu_y = ctx.own(self.mu_x), ctx.own(self.mu_y)

        def slow_part(y: Tensor, z: Tensor) -> Tensor:  # mu_x mu_y x
            return tree.per_node(mu_x, y) * (y - tree.per_node(1 - mu_y, z) * z)

        def moved(kept: Tensor, z: Tensor) -> Tensor:
            return kept + tree.per_node(1 - mu_x * mu_y, z) * z

        fast = state[FAST] if self.decay == "paper" else self._shrunk(state[FAST], ctx)
        kept = tree.map(slow_part, params, fast)  # before z is stepped, perhaps in place
        held = {slot: x for slot, x in state.items() if slot != FAST}
        fast, optimizer = super().optimize(state[FAST], grads, held, ctx)
        # The two must not share storage: the next step may write into either.
        return tree.map(moved, kept, fast), {**optimizer, FAST: fast}

    def _shrunk(self, z: Tree, ctx: Context) -> Tree:
        """Return z after a decoupled weight decay of this step alone."""
        rate, shrunk = ctx.own(self.lr(ctx) if ctx.lr is None else ctx.lr), dict(z)
        for spec, names, base in self.inner_optim.at(ctx.step).groups(z):
            if getattr(FORMULAS.get(spec.cls), "decoupled", spec.hyper.get("decoupled_weight_decay")):
                lr = rate if base is None else rate * (ctx.own(spec.lr) / base)
                part = lr * ctx.own(spec.hyper["weight_decay"])
                shrunk.update({name: z[name] * tree.per_node(1 - part, z[name]) for name in names})
        return shrunk

    def average(self, params: Tree, optimizer: State, ctx: Context) -> Tree:
        """Return x, from y and the state of the optimizer.

        >>> from vecgym.collectives import StackedCollectives
        >>> strategy, ctx = GPAStrategy("sgd", mu_x=0.5, mu_y=0.5, lr=1.0), Context(StackedCollectives(1))
        >>> y = {"w": torch.tensor([0.0])}
        >>> y, optimizer = strategy.optimize(y, {"w": torch.tensor([-8.0])}, strategy.init(y, ctx)[0], ctx)
        >>> y["w"], optimizer["z"]["w"], strategy.average(y, optimizer, ctx)["w"]
        (tensor([6.]), tensor([8.]), tensor([4.]))
        """
        mu = ctx.own(self.mu_y)
        return tree.map(lambda y, z: (y - tree.per_node(1 - mu, z) * z) / tree.per_node(mu, y), params, optimizer[FAST])

    def __repr__(self) -> str:
        more = "" if self.decay == "paper" else f", decay={self.decay!r}"
        return f"{super().__repr__()[:-1]}, mu_x={self.mu_x!r}, mu_y={self.mu_y!r}{more})"
