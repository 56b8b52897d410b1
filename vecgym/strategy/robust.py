"""Nodes that lie, rules that a few liars cannot move far, and nodes that blur what they send."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vecgym.compress.codecs import Codec
from vecgym.core import check, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.optim import clip_grad_norm
from vecgym.strategy.average import (
    Around,
    Average,
    Mean,
    num_participants,
    per_row,
)
from vecgym.strategy.base import Context, State
from vecgym.strategy.gathered import Codes, decode_all, gathered_codes

Attack = Callable[[Tensor], Tensor]


def median(x: Tensor) -> Tensor:
    """Take each coordinate's median over the nodes, `[R, n, *]` -> `[R, *]`; of an even number the middle two's mean.

    >>> median(torch.tensor([[1.0, 100.0, 2.0]])), median(torch.tensor([[1.0, 2.0, 4.0, 100.0]]))
    (tensor([2.]), tensor([3.]))
    """
    ordered = x.sort(1).values
    return (ordered[:, (x.shape[1] - 1) // 2] + ordered[:, x.shape[1] // 2]) / 2


class Robust(Mean):
    """A rule that a few wrong values cannot move far, on what all nodes of an island sent: `[1, n, *]` -> `[1, *]`.

    "median": of each coordinate. "trimmed_mean": of each coordinate the mean without the `trim` lowest and the `trim`
    highest. Every node sends its values to all others of its island.

    Args:
        rule: "median", "trimmed_mean", or a function of a tensor `[1, n, *]`, n nodes, which gives `[1, *]`.
        trim: for "trimmed_mean", the values left out at either end: as many liars can do no harm.
        island_size, participation: see `Mean`.

    Raises:
        ValueError: for another rule, trim < 1, `trim` with another rule; at `fit` when it leaves nothing.

    >>> from vecgym.collectives import StackedCollectives
    >>> ctx, values = Context(StackedCollectives(4)), {"w": torch.tensor([1.0, 2.0, 3.0, -600.0])}
    >>> Robust("median")(values, {}, ctx)[0], Robust("trimmed_mean", trim=1)(values, {}, ctx)[0]
    ({'w': tensor([1.5000])}, {'w': tensor([1.5000])})

    Reference: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", arXiv 1803.01498.
    """

    linear = False
    plain = False

    def __init__(
        self,
        rule: str | Attack = "median",
        trim: int | None = None,
        island_size: int | None = None,
        participation: float = 1.0,
    ) -> None:
        if not callable(rule):
            check.choice("rule", rule, ("median", "trimmed_mean"), "a function [1, n, *] -> [1, *]")
        super().__init__(island_size, participation=participation)
        if (rule == "trimmed_mean") != (trim is not None):
            raise ValueError(f"rule={rule!r} and trim={trim!r}: trim goes with 'trimmed_mean', which needs it: trim=1.")
        self.rule = rule
        self.trim = check.optional_integer("trim", trim, what="the values left out at either end")

    def check(self, num_nodes: int, max_steps: int) -> None:
        super().check(num_nodes, max_steps)
        self.check_present([num_nodes], num_nodes)

    def check_present(self, counts: Sequence[int], num_nodes: int) -> None:
        for present in counts:
            self._check_count(num_participants(self.participation, present))

    def _check_count(self, count: int) -> None:
        smallest = count if self.island_size is None else (count % self.island_size or self.island_size)
        if self.trim is not None and 2 * self.trim >= smallest:
            raise ValueError(f"trim={self.trim} at either end leaves nothing of {smallest} nodes: give a smaller one.")

    def __call__(self, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        return self._combined(ctx.comm.all_gather(values, readers=self.groups(ctx)), values, ctx), state

    def of_codes(self, codes: Codes, codec: Codec, like: Tree, ctx: Context) -> Tree:
        groups = self.groups(ctx)
        received = gathered_codes(codes, codec, lambda x: ctx.comm.all_gather(x, inplace=True, readers=groups))
        return self._combined({name: decode_all(received[name], codec, x) for name, x in like.items()}, like, ctx)

    def _combined(self, everyone: Tree, values: Tree, ctx: Context) -> Tree:
        """Apply the rule to each island: `[R, K, *]` and the nodes' own `[1 or L, *]` -> `[1 or L, *]`."""
        groups = self.groups(ctx)
        if groups is None:
            return tree.map(self._rule, everyone)
        new = {}
        for name, x in everyone.items():
            rows = values[name].expand(len(ctx.comm.node_ids), *x.shape[2:])
            for group in groups:
                inside = per_row(torch.isin(ctx.comm.node_ids, torch.tensor(group)), rows)
                members = placed(torch.tensor(group), x.device)
                rows = torch.where(inside, self._rule(x[:, members]), rows)
            new[name] = rows
        return new

    def _rule(self, x: Tensor) -> Tensor:
        if not isinstance(self.rule, str):
            return self.rule(x)
        if self.trim is None:
            return median(x)
        return x.sort(1).values[:, self.trim : x.shape[1] - self.trim].mean(1)


class Corrupted(Around):
    """Some nodes lie: what they hand to `inner` is what an attack makes of their values.

    Args:
        inner: how the nodes agree on what they are told.
        nodes: the ids of those that lie.
        attack: of a tensor `[L, *]`, coordinate by coordinate or node by node; the sign is turned when not given.

    Raises:
        ValueError, TypeError: for what is no list of different ids; at `fit` for a node that the run does not have.

    >>> from vecgym.collectives import StackedCollectives
    >>> ctx, values = Context(StackedCollectives(3)), {"w": torch.tensor([1.0, 2.0, 3.0])}
    >>> Corrupted(Mean(), [1], lambda x: -20 * x)(values, {}, ctx)[0]
    {'w': tensor([-12.])}
    >>> Corrupted(Robust("median"), [1], lambda x: -20 * x)(values, {}, ctx)[0]
    {'w': tensor([1.])}
    """

    def __init__(self, inner: Average, nodes: Sequence[int], attack: Attack = torch.neg) -> None:
        super().__init__(inner)
        if not isinstance(nodes, (list, tuple)) or len(set(nodes)) != len(nodes):
            raise ValueError(f"nodes={nodes!r} must be a list of different node ids, such as [1].")
        self.nodes = [check.integer("nodes", node, 0, "the id of a node that lies") for node in nodes]
        if not callable(attack):
            raise TypeError(f"attack={attack!r} must be a function of a tensor, such as lambda x: -20 * x.")
        self.attack = attack

    def check(self, num_nodes: int, max_steps: int) -> None:
        super().check(num_nodes, max_steps)
        for node in self.nodes:
            check.index("node", node, num_nodes)

    def __call__(self, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        liars = torch.isin(ctx.comm.ids, torch.tensor(self.nodes, dtype=torch.long))
        told = tree.map(lambda x: torch.where(per_row(liars, x), self.attack(x), x), values)
        return self._told(told, values, state, ctx)


class Private(Around):
    """Each node's values are clipped to a 2-norm and blurred by Gaussian noise before they are sent.

    x_i <- x_i min(1, clip / |x_i|) + noise clip xi_i, xi_i ~ N(0, 1), over all tensors together. The mean over n nodes
    then has noise of standard deviation noise clip / sqrt(n) in each coordinate.

    For movements and gradients: `OuterStep(Private(Mean(), clip=1.0, noise=0.1), ...)`. The noise comes from the run's
    seed and is keyed by the node, so it is the same in every process. How private that is, is for an accountant to say.

    Args:
        inner: how the nodes agree on what they are told.
        clip: > 0, the largest 2-norm of what a node sends.
        noise: >= 0, in units of `clip`.

    >>> from vecgym.collectives import StackedCollectives
    >>> ctx, values = Context(StackedCollectives(2)), {"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}
    >>> Private(Mean(), clip=1.0, noise=0.0)(values, {}, ctx)[0]
    {'w': tensor([[0.4500, 0.6000]])}

    Reference: McMahan et al., "Learning Differentially Private Recurrent Language Models", arXiv 1710.06963. Deviation:
    each node adds its own noise, so that nobody need be trusted with the values.
    """

    def __init__(self, inner: Average, clip: float, noise: float) -> None:
        super().__init__(inner)
        self.clip = check.number("clip", clip, "(0, inf)", "the largest 2-norm of what a node sends")
        self.noise = check.number("noise", noise, "[0, inf)", "its standard deviation in units of clip")

    def __call__(self, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        clipped, _ = clip_grad_norm(values, self.clip, inplace=False)
        told = {name: self._blurred(x, name, ctx) for name, x in clipped.items()}
        return self._told(told, values, state, ctx)

    def _blurred(self, x: Tensor, name: str, ctx: Context) -> Tensor:
        if self.noise == 0:
            return x
        purpose = f"private {name}"
        drawn = [
            torch.randn(x.shape[1:], generator=ctx.generator(purpose, ctx.step, node), dtype=x.dtype)
            for node in ctx.comm.ids.tolist()
        ]
        return x + self.noise * self.clip * placed(torch.stack(drawn), x.device)
