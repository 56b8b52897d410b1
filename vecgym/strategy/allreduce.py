"""The mean gradient at every step: AllReduce, as in torch's DistributedDataParallel, and GPA, a smooth DiLoCo."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.devices import spread
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.optim.formulas import FORMULAS
from vecgym.simulation.simulation import Part
from vecgym.simulation.state import State
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.averages import Mean, Weighting
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, takes_options
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.stages import Average


class AllReduceStrategy(Strategy, steady=True):
    """At every step every node takes the optimizer's step with the mean gradient.

    g = 1/K sum_i g_i; clip g to `max_norm`; theta <- optimizer(theta, g).

    Parameters and optimizer state stay equal on all nodes: they are stored once, and one gradient of the mean loss is
    computed instead of K. This equals training one model on the K batches together (without batch norm, whose
    statistics each node has for itself, as with DDP). The nodes' mean losses have equal weights, as with DDP, even if
    they are means over unequal numbers of tokens, unless `weighting` says otherwise. Bytes sent per node and step:
    2 (K - 1) / K * b * P.

    Args:
        inner_optim: the optimizer, AdamW when not given.
        weighting: of the gradients, see `Mean`. With "examples" and a `loss_fn` that returns a "weight", the loss is
            the mean over the tokens of all nodes. Then K gradients are computed, and the ledger does not count the
            bytes of the weights.
        average: of the gradients, in place of `Mean`: `Ring("bfloat16")`, say, or `Robust("median")`.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: for a weighting with another average.

    >>> AllReduceStrategy("sgd", lr=0.1)
    AllReduceStrategy(OptimSpec(SGD, lr=0.1), Exchange(Mean(), of='gradients'))

    Reference: Li et al., "PyTorch Distributed", arXiv 2006.15704. Deviation: buffers are never broadcast, each
    node keeps its own batch-norm statistics; `fit` averages them at the end.
    """

    @takes_options(InnerOptions)
    def __init__(
        self, inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None, *,
        weighting: Weighting = "equal", average: Average | None = None, **inner: Unpack[InnerOptions],
    ) -> None:  # fmt: skip
        if average is not None and weighting != "equal":
            raise ValueError(
                f"weighting={weighting!r} is of a Mean, and average={average!r} takes its place: leave one of them out."
            )
        how = Mean(weighting=weighting) if average is None else average
        super().__init__(inner_optim, [Exchange(how, of="gradients")], **inner)


SimpleReduceStrategy = AllReduceStrategy  # EXO Gym's other name for it


FAST = "z"  # the name, in the state, of the parameters that the optimizer steps


class GPAStrategy(Strategy, batched=("mu_x", "mu_y"), random=False, steady=True):
    """At every step all nodes take the optimizer's step from z with the mean gradient at y; x follows z slowly.

    y = mu_y x + (1 - mu_y) z;  z <- inner(z, mean_i g_i(y));  x <- mu_x x + (1 - mu_x) z.

    A smooth DiLoCo without rounds: mu_x = 0.9^(1 / H) corresponds to H steps, 0.9967 to about 32. With mu_x = 0 it is
    AllReduce. The paper studies it with one node.

    | kept                            | shape    | bytes                                            |
    |---------------------------------|----------|--------------------------------------------------|
    | y, z and the inner optimizer's  | `[1, *]` | once for all: 2 b P, and the optimizer's, of z   |

    x is not kept: x = (y - (1 - mu_y) z) / mu_y, which `average` returns. Bytes sent per node and step:
    2 (K - 1) / K * b * P.

    Args:
        inner_optim: the optimizer, AdamW when not given; its weight decay applies to z.
        mu_x: in [0, 1), the weight of x itself in its update.
        mu_y: in (0, 1], the weight of x in y.
        decay: the effect of a decoupled weight decay wd, such as AdamW's. "paper": it is part of the step of z, and x
            follows. "code": as in the authors' program, which keeps y and not x, and shrinks z before it subtracts it
            from y: x gains mu_x (1 / mu_y - 1) lr wd z at every step.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: for mu_x outside [0, 1) or mu_y outside (0, 1], or another `decay`.

    >>> GPAStrategy("adamw", mu_x=0.9934, lr=1e-3)
    GPAStrategy(OptimSpec(AdamW, lr=0.001), Exchange(Mean(), of='gradients'), mu_x=0.9934)

    Reference: Defazio et al., "Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs", arXiv 2512.17131,
    and its code, github.com/facebookresearch/optimizers, gpa/gpa_adamw.py, which has these defaults except `decay`.
    Without weight decay both are the same. Its `use_wd_on_y=True` is not offered. Deviation: the run's model, which is
    evaluated and returned by `fit`, has the trained parameters y; the paper's has x.
    """

    of_nodes = ("mu_x", "mu_y")

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        mu_x: float | Tensor = 0.9967,
        mu_y: float | Tensor = 0.7,
        decay: Literal["paper", "code"] = "paper",
        **inner: Unpack[InnerOptions],
    ) -> None:
        self.mu_x = check.per_node("mu_x", mu_x, "[0, 1)", "the weight of x itself in its update")
        self.mu_y = check.per_node("mu_y", mu_y, "(0, 1]", "the weight of x in y")
        self.decay = check.choice("decay", decay, ("paper", "code"))
        super().__init__(inner_optim, [Exchange(Mean(), of="gradients")], **inner)

    def stored_once(self, run: RunFacts) -> bool:
        equal = all(not isinstance(mu, Tensor) or mu.numel() == 1 for mu in (self.mu_x, self.mu_y))
        return equal and super().stored_once(run)

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        (shared if "params" in shared else own)[FAST] = params
        return own, shared

    def train_jointly(self, part: Part) -> None:
        """Step z by the mean gradient at y, and move y."""
        grads, y, z = self.joint_gradients(part), part.params, part.home[FAST]
        mu_x, mu_y = self.mu_x, self.mu_y

        def slow_part(y: Tensor, z: Tensor) -> Tensor:  # mu_x mu_y x
            return part.each(mu_x, y) * (y - part.each(1 - mu_y, z) * z)

        def moved(kept: Tensor, z: Tensor) -> Tensor:
            return kept + part.each(1 - mu_x * mu_y, z) * z

        kept = tree.map(slow_part, y, z if self.decay == "paper" else self._shrunk(part, z))  # before z is stepped
        part.params = z
        part.optimize(grads)
        part.home[FAST] = part.params
        part.params = tree.map(moved, kept, part.home[FAST])
        part.report(part.losses)

    def _shrunk(self, part: Part, z: Tree) -> Tree:
        """Return z after the decoupled weight decay of this step alone."""
        rate, shrunk = part.lr, dict(z)
        for spec, names, base in self.inner_optim.at(part.tick).groups(z):
            if getattr(FORMULAS.get(spec.cls), "decoupled", spec.hyper.get("decoupled_weight_decay")):
                lr = rate if base is None else rate * (spec.lr / base)
                for name in names:
                    shrunk[name] = z[name] * (1 - spread(lr, z[name]) * part.each(spec.hyper["weight_decay"], z[name]))
        return shrunk

    def average(self, state: State) -> Tree:
        """Return x, computed from the state.

        >>> GPAStrategy("sgd", mu_y=0.5).average(State(0, {}, {"params": {"w": 6.0}, FAST: {"w": 8.0}}))
        {'w': 4.0}
        """
        return tree.map(lambda y, z: (y - (1 - self.mu_y) * z) / self.mu_y, state.params, state.home[FAST])
