"""EDiT: DiLoCo whose nodes count less, or not at all, where they have moved too far (arXiv 2412.07210)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.devices import placed, spread
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec, clip_grad_norm
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.simulation.when import When, as_when
from vecgym.strategy.averages import Mean, Outer, outer_spec
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, inner_rate, takes_options
from vecgym.strategy.corrections import nonzero, row_norms
from vecgym.strategy.exchange import DEFAULT_H, Exchange
from vecgym.strategy.stages import Average, Memory, Stage, chain

FAR = 1e6  # added to the norm of an anomaly
STILL = 1e-6  # a sum of absolute values below which a tensor makes no outer step


class MovementPenalty(Stage, batched=("clip", "threshold", "alpha", "temperature"), random=False, steady=True):
    """EDiT's penalty of movements: large ones count less, anomalies do not count, and the agreed one is clipped.

    Tensor by tensor, with n_i = |Delta_i|, the 2-norm of node i's movement:

    w_i = exp(-n_i / T) / sum_j exp(-n_j / T);  Delta = sum_i w_i Delta_i;
    then over all tensors together Delta <- Delta min(1, clip / (|Delta| + 1e-6)).

    The weights depend on the scale of the norms: with a temperature T far below their differences the node that has
    moved least decides alone. T = inf is the plain mean.

    With `skip_anomalies` each node remembers mean m and variance v of its own norms, m <- m + a d,
    v <- (1 - a) (v + a d d'), with d = n - m before and d' = n - m after the mean's move; and the scores
    z = (n - m) / sqrt(v) of its last W exchanges (W = `warmup`), taken after the move. After W of them it is an anomaly
    if z = (n - m) / sqrt(v) > threshold max(1, s), with s the standard deviation of the remembered scores. Then
    Delta_i = 0, n_i + 1e6 is in the place of n_i in the weights, and nothing is remembered of it. A tensor whose Delta
    sums up to less than 1e-6 in absolute value makes no outer step, nor does its momentum: above all where all nodes
    are anomalies.

    For movements, `Outer(MovementPenalty(Mean()))`, and gradients. The inner average gets K w_i Delta_i.

    State, per node, with `skip_anomalies`: `norms`, W + 3 numbers a tensor. Bytes: those of `inner`, and one number per
    tensor and node in an all-gather.

    Args:
        inner: the mean of the weighted movements, the same on all nodes.
        clip: > 0, the largest 2-norm of Delta; None: no limit.
        skip_anomalies: whether anomalies are left out.
        warmup: W >= 2, the exchanges of a node before its first anomaly.
        threshold: > 0, in standard deviations.
        alpha: a, in (0, 1].
        temperature: T, in (0, inf].

    Raises:
        ValueError: for other values; for an `inner` whose result differs between nodes.

    >>> from vecgym.collectives import StackedCollectives
    >>> part, moved = Part.alone(StackedCollectives(2)), {"w": torch.tensor([[3.0, 4.0], [30.0, 40.0]])}
    >>> MovementPenalty(Mean())(moved, part), MovementPenalty(Mean(), clip=1.0, temperature=torch.inf)(moved, part)
    ({'w': tensor([[3., 4.]])}, {'w': tensor([[0.6000, 0.8000]])})

    Reference: Cheng et al., "EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models",
    arXiv 2412.07210, and github.com/intelligent-machine-learning/atorch, atorch/local_sgd/DDP. Deviations: the weights
    are not rounded to float32. The paper, and the code for FSDP, take a module of the model where this takes a tensor,
    and the code clips each module by itself there.
    """

    def __init__(
        self, inner: Average, clip: float | Tensor | None = None, skip_anomalies: bool = False, warmup: int = 120,
        threshold: float | Tensor = 3.0, alpha: float | Tensor = 0.02, temperature: float | Tensor = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(inner)
        one = {"num_nodes": 1}
        self.clip = None if clip is None else check.per_node("clip", clip, "(0, inf]", "of the agreed movement", **one)
        self.skip_anomalies = check.flag("skip_anomalies", skip_anomalies)
        self.warmup = check.integer("warmup", warmup, 2, "exchanges of a node before its first anomaly")
        self.threshold = check.per_node("threshold", threshold, "(0, inf)", "in standard deviations", **one)
        self.alpha = check.per_node("alpha", alpha, "(0, 1]", "the weight of a new norm in its mean", **one)
        self.temperature = check.per_node("temperature", temperature, "(0, inf]", "inf is the plain mean", **one)
        if not all(average.common for average in chain(self.inner)):
            raise ValueError(f"{inner!r}: the weights are of all nodes that meet: leave out islands and graphs.")

    @property
    def partial(self) -> bool:  # type: ignore[override]
        return not self.skip_anomalies

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        if self.skip_anomalies:
            zero = _norms(values)
            scores = zero[..., None].repeat(1, 1, self.warmup)
            memory.own["norms"] = {"count": zero, "mean": zero, "variance": zero, "scores": scores}

    def send(self, x: Tree, part: Part, memory: Memory) -> Tree:
        size = part.apart({"": _norms(part.flat(x))})[""]  # [.., rows, tensors]
        skipped = self._anomalies(size, part, memory) if self.skip_anomalies else torch.zeros_like(size)
        everyone = part.comm.all_gather(size + FAR * skipped).squeeze(-3)
        shares = (-everyone / part.each(self.temperature, everyone)).softmax(-2)
        here = placed(part.comm.node_ids, everyone.device)
        factors = (part.comm.num_nodes * shares.index_select(-2, here)).unbind(-1)
        return {
            name: torch.where(spread(gone, v) > 0, 0.0, spread(factor, v) * v)
            for (name, v), factor, gone in zip(x.items(), factors, skipped.unbind(-1))
        }

    def receive(self, y: Tree, part: Part, memory: Memory) -> Tree:
        if self.skip_anomalies:
            memory.notes["still"] = tree.map(lambda v: part.coordinates(v).abs().sum(-1) < STILL, y)
        return y if self.clip is None else part.apart(clip_grad_norm(part.flat(y), self.clip, inplace=False)[0])

    def _anomalies(self, size: Tensor, part: Part, memory: Memory) -> Tensor:
        """Return 1 for each norm `[.., rows, tensors]` that is an anomaly, else 0; remember the others."""
        past = memory.own["norms"]
        limit = part.scaled(self.threshold, past["scores"].std(-1).clamp(min=1))
        skipped = self._score(size, past) > limit
        ahead, a = size - past["mean"], part.each(self.alpha, size)
        mean = past["mean"] + a * ahead
        variance = (1 - a) * (past["variance"] + a * ahead * (size - mean))
        new = {"count": (past["count"] + 1).clamp(max=self.warmup), "mean": mean, "variance": variance}
        new["scores"] = torch.cat([past["scores"][..., 1:], self._score(size, new)[..., None]], -1)
        memory.own["norms"] = tree.map(lambda old, x: torch.where(spread(skipped, x) > 0, old, x), past, new)
        return skipped.to(size.dtype)

    def _score(self, size: Tensor, past: Tree) -> Tensor:
        """Return the distance to the mean in standard deviations; 0 in the warm-up, and where nothing varies."""
        known = (past["variance"] > 0) & (past["count"] >= self.warmup)
        return torch.where(known, (size - past["mean"]) / nonzero(past["variance"]).sqrt(), 0.0)


def _norms(values: Tree) -> Tensor:
    """Return the 2-norm of each row of each tensor, `[L, *]` -> `[L, tensors]`."""
    return torch.stack([row_norms(x).reshape(len(x)) for x in values.values()], 1)


class EDiTStrategy(Strategy, steady=True):
    """DiLoCo whose outer step is taken on a penalised mean of the movements; see `MovementPenalty`.

    theta_i <- inner(theta_i, g_i), H times; then Delta_i = theta_outer - theta_i, and tensor by tensor
    Delta = sum_i w_i Delta_i, w_i = exp(-|Delta_i| / T) / sum_j exp(-|Delta_j| / T), clipped as a whole;
    theta_outer <- outer(theta_outer, Delta), theta_i <- theta_outer.

    With `skip_anomalies` a node whose movement is far above its earlier ones does not count; if all are, there is no
    outer step. `temperature=inf` without `clip` and `skip_anomalies` is DiLoCo.

    Bytes sent per node and step: 2 (K - 1) / K * b * P / H, and (K - 1) b / H for each tensor.

    | kept for | bytes |
    |---|---|
    | all nodes, once | 2 b P: outer parameters and momentum (SGD's) |
    | each node | with `skip_anomalies` (W + 3) b for each tensor |

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        outer_optim: SGD(lr=0.7, momentum=0.8, nesterov=True) when not given; "sgd" is DiLoCo's, of momentum 0.9.
        H: inner steps per round: a number, or a function of the step at which a round begins.
        clip, skip_anomalies, warmup, threshold, alpha, temperature: see `MovementPenalty`.
        lr, inner_lr: two names for the inner learning rate.
        outer_lr: the outer learning rate.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    >>> EDiTStrategy("adamw", "sgd", H=100, clip=10.0, skip_anomalies=True, lr=3e-4)
    EDiTStrategy(OptimSpec(AdamW, lr=0.0003), Exchange(Outer(MovementPenalty(Mean(), clip=10.0, \
skip_anomalies=True)), every=100))

    Reference: Cheng et al., arXiv 2412.07210, and github.com/intelligent-machine-learning/atorch, atorch/local_sgd/DDP;
    the outer optimizer is that of its docs. Deviations: those of `MovementPenalty`; an outer optimizer that counts its
    steps also counts those that are left out; the steps of the paper's warm-up, after each of which all nodes average,
    are an H of 1: `H=lambda step: 1 if step < 100 else 128`.
    """

    @takes_options(InnerOptions)
    def __init__(
        self, inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | When | Callable[[int], int] = DEFAULT_H, clip: float | Tensor | None = None,
        skip_anomalies: bool = False, warmup: int = 120, threshold: float | Tensor = 3.0,
        alpha: float | Tensor = 0.02, temperature: float | Tensor = 1.0, *, inner_lr: float | Tensor | None = None,
        outer_lr: float | Tensor | None = None, **inner: Unpack[InnerOptions],
    ) -> None:  # fmt: skip
        inner["lr"] = inner_rate(inner.get("lr"), inner_lr)
        optim = outer_spec(outer_optim, outer_lr)
        if outer_optim is None:
            optim = OptimSpec("sgd", lr=optim.lr, momentum=0.8, nesterov=True)
        penalty = MovementPenalty(Mean(), clip, skip_anomalies, warmup, threshold, alpha, temperature)
        super().__init__(inner_optim, [Exchange(Outer(penalty, optim), every=as_when(H, "H"))], **inner)
