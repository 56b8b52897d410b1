"""The worth of each message: how the final loss changes if it is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from vecgym.core import check, tree
from vecgym.core.check import Options, function_of
from vecgym.core.devices import spread
from vecgym.core.errors import warn
from vecgym.core.objects import altered
from vecgym.core.tree import Tree
from vecgym.data import Batches
from vecgym.engine import Engine
from vecgym.engine.contract import with_loss
from vecgym.runs.options import Count, OptionalCount, check_constant, check_eval_batch, check_strategy
from vecgym.runs.rollout import prepared, rollout
from vecgym.simulation.simulation import Part
from vecgym.strategy import Average, Exchange, Mean, ServerMean, Strategy
from vecgym.strategy.averages import Reduction, check_weighting, relative
from vecgym.strategy.stages import ExchangeFacts, Memory, chain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

What = Literal["exchanges", "nodes", "messages"]
Method = Literal["auto", "exact", "derivative", "integrated"]
MANY = 1000  # messages, above which "auto" takes the derivative
MAX_ROWS = 512  # nodes of all runs that are trained as one program
LOW = 0.5  # rank correlation, below which the derivative is not to be trusted
POINTS = 16  # of the quadrature from no exchange to all


class Heard(Reduction, batched=("weights",), random=False):
    """A mean in which each message has a weight: of node k in the r-th exchange of the run w_rk.

    Args:
        weights: `[R, K]`; 0: the message is left out, 1: it is not.
        weighting: of the nodes; see `Mean`.

    >>> from vecgym.collectives import StackedCollectives
    >>> part, values = Part.alone(StackedCollectives(3), number=1), {"w": torch.tensor([1.0, 2.0, 6.0])}
    >>> Heard(torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]))(values, part)
    {'w': tensor([1.5000])}
    """

    linear = True

    def __init__(self, weights: Tensor, weighting: str | Sequence[float] = "equal") -> None:
        self.weights, self.weighting = weights, weighting

    def check(self, run: ExchangeFacts) -> None:
        check_weighting(self.weighting, run)

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        weights, of_nodes = self.weights[..., part.due.number, part.nodes], part.weights(self.weighting)
        if of_nodes is not None:
            weights = weights * torch.tensor(of_nodes, dtype=weights.dtype)
        shares = relative(weights, None)  # `[K]`, or `[C, K]`
        return part.comm.mean(tree.map(lambda y: spread(shares, y) * y, part.wide(x)), inplace=part.inplace)


@dataclass(frozen=True)
class InfluenceOptions(Options):
    """The arguments of `influence`.

    Args:
        model: as for `Trainer`, or a function of the seed that returns one.
        strategy: with one exchange. Exchanges may be left out of any schedule; messages, of `Mean` and `ServerMean`,
            within stages such as `Outer`.
        dataset: as for `Trainer`; its order is drawn from the seed of each run.
        num_nodes: K.
        max_steps: T.
        batch_size: B.
        eval_batch: one ordinary batch `[B, ...]`, whose loss is explained.
        loss_fn: as for `Trainer`.
        of: "exchanges", whole ones, R of them; "nodes", all messages of a node; or "messages", one by one: the other
            nodes' values are then averaged, and the node receives the average too.
        method: "exact": a run without each, all as few programs; "derivative": by the derivative of the loss by a
            weight of each, from one backward pass; "integrated": its integral from no exchange to all, which adds up
            to the gain of communicating, for `of="exchanges"`; "auto": exact below about 1000 messages.
        seeds: a number of runs, or the seed of each: their data, and the model if it is a function.
        sample: with "derivative", so many messages are also left out exactly, to see whether it ranks them alike.
        segments: of the backward pass; see `rollout`.

    >>> from vecgym.models import Line
    >>> options = InfluenceOptions(
    ...     Line(), Strategy("sgd", [Exchange(Mean(), every=4)]), torch.ones(64), num_nodes=2, max_steps=8,
    ...     batch_size=2, eval_batch=torch.ones(4), seeds=3)
    >>> options.seeds, options.of
    ((0, 1, 2), 'exchanges')
    """

    model: nn.Module | Callable[[int], nn.Module]
    strategy: Strategy
    dataset: Any
    _: KW_ONLY
    num_nodes: Count
    max_steps: Count
    batch_size: Count
    eval_batch: Any
    loss_fn: Callable[[nn.Module, Any], Any] | None = None
    of: Annotated[What, partial(check.choice, allowed=get_args(What))] = "exchanges"
    method: Annotated[Method, partial(check.choice, allowed=get_args(Method))] = "auto"
    seeds: Any = 1
    sample: Count = 32
    segments: OptionalCount = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_strategy(self.strategy)
        check_constant(self.strategy)
        check_eval_batch("eval_batch", self.eval_batch)
        several = isinstance(self.seeds, (list, tuple, range))
        given = self.seeds if several else range(check.integer("seeds", self.seeds))
        if not given:
            raise ValueError("seeds is empty: give a number of runs, such as seeds=8, or the seed of each.")
        self.settle(seeds=tuple(check.seed("seeds", seed) for seed in given))
        if self.method == "integrated" and self.of != "exchanges":
            raise ValueError(
                f"method='integrated' with of={self.of!r}: a mean of messages that all weigh half is the same mean, so "
                'nothing leads from no message to all. Give of="exchanges", or another method.'
            )
        _weighted(self, torch.ones(1))  # which checks the strategy


@dataclass(frozen=True)
class Influence:
    """The worth of messages: how much higher the final loss is without each.

    Attributes:
        values: the mean over the runs, `[R]` of exchanges, `[K]` of nodes, or `[R, K]` of messages. At a negative one
            the loss is lower without it.
        errors: the standard error of each value, nan with one run. An attribution of one run does not carry to others.
        each: of each run, `[S, *]`.
        loss: the final loss with all messages, its mean over the runs.
        steps: the optimizer steps after which there is an exchange, counted from 1, R of them.
        num_steps: T.
        of, method: "exchanges", "nodes" or "messages", and how the values were found.
        agreement: the rank correlation with values that were found exactly, on a sample; None: all were.
        strategy: the one that was explained.

    >>> found = Influence(
    ...     torch.tensor([0.5, -0.1]), torch.tensor([0.1, 0.1]), torch.zeros(2, 2), 1.0, (4, 8), 8, "exchanges",
    ...     "exact", None, Strategy("sgd", [Exchange(Mean(), every=4)]))
    >>> found.thin(1).exchanges
    (Exchange(Mean(), every=SyncWeight([1, 0], every=4)),)
    >>> print(found)
    the final loss, 1, without each of 2 exchanges (exact): most higher +0.5 +- 0.1 (exchange after step 4), least \
-0.1 +- 0.1 (exchange after step 8)
    """

    values: Tensor
    errors: Tensor
    each: Tensor
    loss: float
    steps: tuple[int, ...]
    num_steps: int
    of: str
    method: str
    agreement: float | None
    strategy: Strategy

    def thin(self, n: int) -> Strategy:
        """Return the strategy without the n exchanges that are worth least; with messages, summed over the nodes.

        Try it on other runs, where an exchange may matter that is worth little on these.
        """
        if self.of == "nodes":
            raise ValueError('thin leaves out exchanges, and these values are of nodes: give of="exchanges".')
        worth = self.values if self.of == "exchanges" else self.values.sum(1)
        if check.integer("n", n, 0, "exchanges to leave out") >= len(worth):
            raise ValueError(f"n={n} would leave none of the {len(worth)} exchanges: give at most {len(worth) - 1}.")
        exchange = self.strategy.exchanges[0]
        numbers = _numbers(exchange, self.num_steps)
        weights = torch.ones(_count(exchange, self.num_steps), dtype=torch.float64)
        weights[[numbers[i] for i in worth.argsort(stable=True)[:n].tolist()]] = 0.0
        return altered(self.strategy, exchanges=(exchange.weighted(weights),))

    def plot(self, path: Any = None, *, title: str | None = None) -> Figure:
        """Draw the values: bars, or of messages a heat map, node against exchange; see `plot_influence`."""
        from vecgym.plot import plot_influence  # matplotlib takes a while to import

        steps = None if self.of == "nodes" else self.steps
        return plot_influence(self.values, steps, None if self.of == "messages" else self.errors, path, title=title)

    def __str__(self) -> str:
        order = self.values.flatten().argsort(descending=True)

        def shown(i: int) -> str:
            r, k = divmod(i, self.values.shape[-1]) if self.of == "messages" else (i, i)
            where = f"exchange after step {self.steps[r]}" if self.of != "nodes" else f"node {k}"
            error = "" if len(self.each) == 1 else f" +- {self.errors.flatten()[i]:.3g}"
            return f"{self.values.flatten()[i]:+.3g}{error} ({f'node {k}, ' if self.of == 'messages' else ''}{where})"

        trust = "" if self.agreement is None else f"; rank correlation with the exact values {self.agreement:.2f}"
        return (
            f"the final loss, {self.loss:.4g}, without each of {self.values.numel()} {self.of} ({self.method}{trust}): "
            f"most higher {shown(int(order[0]))}, least {shown(int(order[-1]))}"
        )


@function_of(InfluenceOptions)
def influence(options: InfluenceOptions) -> Influence:
    """Find the worth of each exchange, node or message of a strategy: the final loss without it, less that with all.

    The loss is that of the average of the nodes on `eval_batch`, as in `rollout`. Each is left out alone, and all other
    exchanges keep their numbers and their steps, as do the gradients that `MimeStrategy` sends between two exchanges. A
    derivative is measured against the exact values on a sample, and a warning says if it ranks them otherwise, as it
    does for large steps.

    Args:
        {arguments}

    Raises:
        ValueError, TypeError: for a strategy without a single exchange of that kind; the message has the fix.

    Example: node 2 of 4 has other targets, and the loss is lower without its messages.

    >>> from vecgym.models import Line
    >>> from vecgym.strategy import FedAvgStrategy
    >>> def dataset(rank, num_nodes, train):
    ...     return torch.full((64,), -1.0 if rank == 2 else 1.0)
    >>> found = influence(
    ...     Line(), FedAvgStrategy("sgd", H=4, lr=0.1), dataset, num_nodes=4, max_steps=8, batch_size=4,
    ...     eval_batch=torch.ones(16), of="nodes")
    >>> found.values
    tensor([ 0.1812,  0.1812, -0.3128,  0.1812], dtype=torch.float64)

    References: leaving one out, as in influence functions; integrated gradients: Sundararajan et al., "Axiomatic
    Attribution for Deep Networks", arXiv 1703.01365.
    """
    runs = _Runs(options)
    method = options.method
    if method == "auto":
        method = "exact" if runs.ones.numel() <= MANY else "derivative"
    with torch.no_grad():
        base = runs.losses([(seed, runs.ones) for seed in range(len(options.seeds))])
    agreement = None
    if method == "exact":
        each = runs.without(range(len(runs.places))) - base[:, None]
    else:
        each = runs.slopes() if method == "derivative" else runs.integrated()
        agreement = runs.agreement(each, base) if method == "derivative" else None
    each = each.unflatten(1, runs.shape)
    error = each.std(0) / len(each) ** 0.5 if len(each) > 1 else torch.full_like(each[0], torch.nan)
    return Influence(
        each.mean(0), error, each, float(base.mean()), runs.steps, options.max_steps, options.of, method, agreement,
        options.strategy,
    )  # fmt: skip


class _Runs:
    """The runs of all seeds, as functions of the weights of messages or exchanges.

    Attributes:
        ones: the weights with which nothing is left out: `[N]` of exchanges or nodes, `[N, K]` of messages.
        places: the indices of `ones` that are left out in turn, some of the flat ones.
        shape: of the values.
        steps: after which there is an exchange, counted from 1.
    """

    def __init__(self, options: InfluenceOptions) -> None:
        self.options, K, T = options, options.num_nodes, options.max_steps
        exchange = options.strategy.exchanges[0]
        numbers, count = _numbers(exchange, T), _count(exchange, T)
        if not numbers:
            raise ValueError(f"{exchange!r} never exchanges anything in {T} steps: give more steps.")
        self.steps = tuple(t + 1 for t in range(T) if exchange.times(())[0].due(t))
        shape = {"exchanges": (count,), "nodes": (K,), "messages": (count, K)}[options.of]
        self.ones, flat = torch.ones(shape, dtype=torch.float64), torch.arange(math.prod(shape)).view(shape)
        chosen = flat if options.of == "nodes" else flat[numbers]
        self.places, self.shape = chosen.flatten().tolist(), tuple(chosen.shape)
        self.models, self.batches = list[nn.Module](), list[list[Any]]()
        for seed in options.seeds:
            model: Any = options.model
            made = model if isinstance(model, nn.Module) else check.called("model", model, seed)
            self.models.append(with_loss(made, options.loss_fn))
            device = next(iter(made.parameters())).device
            data = Batches(options.dataset, K, options.batch_size, seed=seed, device=device)
            self.batches.append(list(data.iterate(0, T)))
        self.num_examples, self.limits = data.shard_sizes, data.limits
        self.engine: Engine = prepared(self.models[0], "auto", self.batches[0][0])

    def losses(self, chosen: Sequence[tuple[int, Tensor]], segments: int | None = None) -> Tensor:
        """Return the final losses of runs: of which seed, by its index, and with which weights."""
        options, size = self.options, max(1, MAX_ROWS // self.options.num_nodes)
        found = []
        for start in range(0, len(chosen), size):
            seeds, weights = zip(*chosen[start : start + size])
            outcome = rollout(
                [self.models[s] for s in seeds], [_weighted(options, w) for w in weights],
                [self.batches[s] for s in seeds], num_runs=len(seeds), num_nodes=options.num_nodes,
                eval_batch=[options.eval_batch] * len(seeds), engine=self.engine, num_examples=self.num_examples,
                limits=self.limits, seed=[options.seeds[s] for s in seeds], segments=segments,
            )  # fmt: skip
            found.append(outcome.loss.double())
        return torch.cat(found)

    @torch.no_grad()
    def without(self, chosen: Sequence[int]) -> Tensor:
        """Return the final loss of each seed without each of some messages, `[S, number]`."""
        lacking = [self.ones.clone() for _ in chosen]
        for weights, i in zip(lacking, chosen):
            weights.view(-1)[self.places[i]] = 0.0
        runs = [(seed, weights) for seed in range(len(self.batches)) for weights in lacking]
        return self.losses(runs).view(-1, len(chosen))

    def slopes(self, scale: float = 1.0) -> Tensor:
        """Return the change of the loss without each message by its derivative, `[S, number]`."""
        weights = [(scale * self.ones).requires_grad_() for _ in self.batches]
        loss = self.losses(list(enumerate(weights)), self.options.segments).sum()
        return -torch.stack([x.flatten()[self.places] for x in torch.autograd.grad(loss, weights)])

    def integrated(self) -> Tensor:
        """Return the integral of the derivative from no exchange to all, `[S, number]`."""
        points, shares = np.polynomial.legendre.leggauss(POINTS)
        each = [share / 2 * self.slopes((x + 1) / 2) for x, share in zip(points.tolist(), shares.tolist())]
        return torch.stack(each).sum(0)

    def agreement(self, each: Tensor, base: Tensor) -> float:
        """Return the rank correlation of values with exact ones on a sample, and warn if it is low."""
        count = min(self.options.sample, len(self.places))
        chosen = torch.randperm(len(self.places), generator=torch.Generator().manual_seed(0))[:count].tolist()
        exact = (self.without(chosen) - base[:, None]).mean(0)
        found = _rank_correlation(each.mean(0)[chosen], exact)
        if found < LOW:
            warn(
                f"the derivative ranks {self.options.of} otherwise than leaving them out does (rank correlation "
                f'{found:.2f} on {count} of them): steps are too large for a first derivative. Give method="exact".'
            )
        return found


def _rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's rank correlation of two lists; nan if there are fewer than two values.

    >>> _rank_correlation(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.1, 0.3, 0.2]))
    0.5
    """
    ranks = torch.stack([values.argsort().argsort().double() for values in (x, y)])
    return float(torch.corrcoef(ranks)[0, 1])


def _weighted(options: InfluenceOptions, weights: Tensor) -> Strategy:
    """Return the strategy with weights of its exchanges, `[R]`, of its nodes, `[K]`, or of its messages, `[R, K]`."""
    strategy = options.strategy
    if len(strategy.exchanges) != 1 or strategy.asynchronous:
        raise ValueError(
            f"{strategy!r} has {len(strategy.exchanges)} exchanges, and the influence is that of one: give a strategy "
            "with a single Exchange, such as DiLoCoStrategy or FedAvgStrategy."
        )
    (exchange,) = strategy.exchanges
    if exchange.fragments != 1:
        raise ValueError(f"{exchange!r} exchanges fragments at different steps: give a strategy without fragments.")
    if options.of == "exchanges":
        if exchange.of == "gradients":
            raise ValueError(
                f"{exchange!r}: nodes that exchange gradients in every step would go apart without one. Give a "
                'strategy that exchanges parameters, or of="nodes" or of="messages".'
            )
        if getattr(strategy, "_proximal", False):
            raise ValueError(
                f"{strategy!r}: proximal_mu works in rounds of H steps, and without an exchange a round has no start. "
                'Give of="nodes" or of="messages".'
            )
        if exchange.stages.partial and not weights.requires_grad:  # 0 and 1 are exact in part, too: one group of runs
            weights = weights.clone().requires_grad_()
        return altered(strategy, exchanges=(exchange.weighted(weights),))
    R = _count(exchange, options.max_steps)
    how = _heard(exchange.how, exchange, weights.expand(R, -1) if options.of == "nodes" else weights)
    return altered(strategy, exchanges=(altered(exchange, how=how),))


def _heard(how: Average, exchange: Exchange, weights: Tensor) -> Average:
    """Return an average in which each message has a weight."""
    inner = getattr(how, "inner", None)
    if isinstance(how, ServerMean) or (type(how) is Mean and how.island_size is None):
        return Heard(weights, how.weighting)
    if inner is None or not all(average.partial and not average.overlaps for average in chain(how)):
        raise ValueError(
            f"{exchange!r}: messages can be left out of Mean() and ServerMean(), in stages without a code or a delay "
            'of a round. Give such an average, or of="exchanges".'
        )
    return altered(how, inner=_heard(inner, exchange, weights))


def _numbers(exchange: Exchange, num_steps: int) -> list[int]:
    """Return the number of each exchange of a run, which is its index in weights."""
    when = exchange.times(())[0]
    return [when.count(t) for t in range(num_steps) if when.due(t)]


def _count(exchange: Exchange, num_steps: int) -> int:
    """Return the number of weights that the exchanges of a run need."""
    return exchange.times(())[0].count(num_steps)
