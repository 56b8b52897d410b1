"""SPARTA: at every step the nodes average a small random part of their parameters (openreview stFPf3gzq1)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.compress import check_bits
from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.optim.schedule import Schedule
from vecgym.strategy.base import CommunicationModule, Context, State, Strategy, check_interval
from vecgym.strategy.compose import check_delay, warn_if_too_late
from vecgym.strategy.compression import TopKSparseCommunicator, quantised
from vecgym.strategy.diloco import DiLoCoCommunicator

Shapes = dict[str, torch.Size]  # of one node's parameters
Indices = dict[str, Tensor]  # flat coordinates, int64 [m]; a tensor of which nothing is selected may be left out
METHODS = ("random", "topk")

DEFAULT_RATE = 0.005  # EXO Gym's


# ------------------------------------------------------------------------------------------- selectors


class Selector(ABC):
    """Which coordinates are exchanged: the same on every node, drawn from the run's seed alone.

    Example: embeddings only, in full.

    >>> class Embeddings(Selector):
    ...     def select(self, shapes, state, exchange, ctx):
    ...         return {name: torch.arange(shape.numel()) for name, shape in shapes.items() if "emb" in name}, state
    >>> SparseCommunicator(Embeddings())
    SparseCommunicator(Embeddings(), delay=0, interval=1)
    """

    def init(self, shapes: Shapes, ctx: Context) -> State:
        """What `select` needs to keep from one exchange to the next: nested dicts of tensors.

        >>> from vecgym.collectives import StackedCollectives
        >>> ShuffledSequentialSelector(0.5).init({"w": torch.Size([2, 3])}, Context(StackedCollectives(4)))["w"].shape
        torch.Size([1, 6])
        """
        return {}

    @abstractmethod
    def select(self, shapes: Shapes, state: State, exchange: int, ctx: Context) -> tuple[Indices, State]:
        """The distinct coordinates of one exchange, as indices into each flattened tensor.

        Args:
            shapes: of one node's parameters, by name.
            state: from `init` or the exchange before.
            exchange: exchanges done before this one.
            ctx: for `ctx.generator` and `ctx.step`.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class RandomSelector(Selector):
    """Each coordinate with probability p, independently of the others and of every other exchange.

    A pure function of seed, names, sizes and number of the exchange: no state.

    Args:
        p: probability, in [0, 1].

    >>> from vecgym.collectives import StackedCollectives
    >>> ctx = Context(StackedCollectives(2))
    >>> chosen, _ = RandomSelector(0.01).select({"w": torch.Size([100, 100])}, {}, 0, ctx)
    >>> chosen["w"].shape, chosen["w"].dtype  # about 100 of 10 000
    (torch.Size([95]), torch.int64)
    """

    def __init__(self, p: float) -> None:
        self.p = _check_rate("p", p)

    def select(self, shapes: Shapes, state: State, exchange: int, ctx: Context) -> tuple[Indices, State]:
        return _bernoulli(shapes, self.p, exchange, ctx), state


class ScheduledSelector(Selector):
    """Each coordinate with a probability that rises linearly from 0 to 2p over each H steps.

    rate_t = 2 p (t mod H) / H, so p (H - 1) / H on average. With the same H as DiLoCo the nodes explore by
    themselves after an outer step and come together before the next. No state.

    Args:
        p: half of the highest probability, in [0, 0.5].
        H: optimizer steps from one rate of 0 to the next, at least 2.

    >>> from vecgym.collectives import StackedCollectives
    >>> selector, shapes = ScheduledSelector(0.5, H=4), {"w": torch.Size([100, 100])}
    >>> [len(selector.select(shapes, {}, t, Context(StackedCollectives(2), t))[0].get("w", [])) for t in range(4)]
    [0, 2536, 5032, 7499]

    Reference: diloco-sim. Deviation: there every tensor advances the ramp, so that it rises as many times faster as
    the model has tensors; here every step does.
    """

    def __init__(self, p: float, H: int) -> None:
        self.p = _check_rate("p", p, high=0.5)
        self.H = check_interval("H", H)
        if H == 1:
            raise ValueError("H=1: the rate starts each ramp of H steps at 0 and would stay there; give H >= 2.")

    def rate(self, step: int) -> float:
        """The probability at a step.

        >>> [ScheduledSelector(0.25, H=5).rate(t) for t in range(6)]
        [0.0, 0.1, 0.2, 0.3, 0.4, 0.0]
        """
        return 2 * self.p * (step % self.H) / self.H

    def select(self, shapes: Shapes, state: State, exchange: int, ctx: Context) -> tuple[Indices, State]:
        return _bernoulli(shapes, self.rate(ctx.step), exchange, ctx), state


class ShuffledSequentialSelector(Selector):
    """One fixed random order of each tensor's coordinates, cut into ceil(1/p) chunks that are taken in turn.

    Every coordinate is exchanged exactly once in ceil(1/p) exchanges. Chunks differ by at most one coordinate; of a
    tensor with fewer coordinates than chunks, some are empty.

    State: the order of each tensor, int64 `[1, n]`, 8 bytes a parameter for all nodes together. (To draw it anew at
    every exchange would be as pure but slow: 0.5 ms for 10^5 coordinates, 0.6 s for 10^7.)

    Args:
        p: the fraction exchanged at a time, in (0, 1].

    >>> from vecgym.collectives import StackedCollectives
    >>> selector, shapes, ctx = ShuffledSequentialSelector(0.5), {"w": torch.Size([6])}, Context(StackedCollectives(2))
    >>> state = selector.init(shapes, ctx)
    >>> parts = [selector.select(shapes, state, exchange, ctx)[0]["w"] for exchange in range(4)]
    >>> sorted(torch.cat(parts[:2]).tolist()), torch.equal(parts[0], parts[2])  # each once, then the same order again
    ([0, 1, 2, 3, 4, 5], True)
    """

    def __init__(self, p: float) -> None:
        self.p = _check_rate("p", p)
        if p == 0:
            raise ValueError(f"p=0 would take infinitely many turns: {type(self).__name__} takes p in (0, 1].")

    @property
    def num_parts(self) -> int:
        """ceil(1/p), where 1/p is an integer up to rounding: exactly that.

        >>> ShuffledSequentialSelector(1 / 49).num_parts, ShuffledSequentialSelector(0.3).num_parts
        (49, 4)
        """
        return math.ceil(1 / self.p * (1 - 1e-12))

    def init(self, shapes: Shapes, ctx: Context) -> State:
        return self._orders(shapes, 0, ctx)

    def select(self, shapes: Shapes, state: State, exchange: int, ctx: Context) -> tuple[Indices, State]:
        turn, parts = exchange % self.num_parts, self.num_parts
        chunks = {
            name: order[0, order.shape[1] * turn // parts : order.shape[1] * (turn + 1) // parts]
            for name, order in state.items()
        }
        # Cloned, or an exchange under way would keep, and save, the whole order.
        return {name: chunk.clone() for name, chunk in chunks.items() if len(chunk)}, state

    def _orders(self, shapes: Shapes, cycle: int, ctx: Context) -> State:
        return {
            name: torch.randperm(shape.numel(), generator=ctx.generator(f"sparta order {name}", cycle))[None]
            for name, shape in shapes.items()
        }


class PartitionedSelector(ShuffledSequentialSelector):
    """A random partition of each tensor's coordinates into ceil(1/p) parts, taken in turn; then another partition.

    As `ShuffledSequentialSelector`, but with a new order after each cycle of ceil(1/p) exchanges.

    Deviation from EXO Gym and diloco-sim: there a tensor with fewer coordinates than parts has one part per coordinate,
    and so shorter cycles.

    Args:
        p: the fraction exchanged at a time, in (0, 1].

    >>> from vecgym.collectives import StackedCollectives
    >>> selector, shapes, ctx = PartitionedSelector(0.5), {"w": torch.Size([100])}, Context(StackedCollectives(2))
    >>> state, parts = selector.init(shapes, ctx), []
    >>> for exchange in range(4):
    ...     chosen, state = selector.select(shapes, state, exchange, ctx)
    ...     parts.append(chosen["w"])
    >>> torch.cat(parts[2:]).unique().numel(), torch.equal(parts[0], parts[2])  # each once, in another order
    (100, False)
    """

    def select(self, shapes: Shapes, state: State, exchange: int, ctx: Context) -> tuple[Indices, State]:
        cycle, turn = divmod(exchange, self.num_parts)
        if turn == 0 and cycle > 0:  # that of cycle 0 is drawn by init
            state = self._orders(shapes, cycle, ctx)
        return super().select(shapes, state, exchange, ctx)


def bernoulli_indices(n: int, p: float, generator: torch.Generator) -> Tensor:
    """The indices in 0..n-1 of which each is in with probability p, independently; ascending, int64.

    The gaps between successes of a Bernoulli process are geometric: ceil(log U / log(1 - p)), U uniform. So only
    about n p numbers are drawn, in float64, instead of n. One thread, ms:

    | n    | p     | gaps | rand(n) < p | bernoulli(n) |
    |------|-------|------|-------------|--------------|
    | 10^5 | 0.005 | 0.04 | 0.6         | 0.7          |
    | 10^6 | 0.005 | 0.08 | 6.7         | 8.7          |
    | 10^7 | 0.005 | 0.9  | 120         | 98           |
    | 10^5 | 0.3   | 0.4  | 0.9         | 1.6          |
    | 10^5 | 0.9   | 1.8  | 0.8         | 1.1          |

    >>> bernoulli_indices(1000, 0.004, torch.Generator().manual_seed(0)).tolist()
    [7, 94, 289, 310, 420, 479, 909]
    """
    if p == 1:
        return torch.arange(n)
    # In numpy: some of torch's operations wake a second thread even for so few numbers, and then wait for it.
    parts, last = [np.empty(0)], -1.0
    while p > 0 and last < n:
        expected = (n - last) * p
        count = int(expected + 5 * math.sqrt(expected)) + 8  # a second round is very rare
        uniform = torch.rand(count, dtype=torch.float64, generator=generator).numpy()
        parts.append(last + np.ceil(np.log(uniform) / math.log1p(-p)).cumsum())
        last = float(parts[-1][-1])
    positions = np.concatenate(parts)
    return torch.from_numpy(positions[: positions.searchsorted(n)].astype(np.int64))


def _bernoulli(shapes: Shapes, rate: float, exchange: int, ctx: Context) -> Indices:
    """One draw over all tensors, laid end to end in the order of their names, then split.

    Tensor by tensor it takes 0.55 ms instead of 0.09 ms for a transformer of 29 tensors and 10^5 parameters.
    """
    names = sorted(shapes)
    sizes = np.array([shapes[name].numel() for name in names], dtype=np.int64)
    ends = sizes.cumsum()
    index = bernoulli_indices(int(sizes.sum()), rate, ctx.generator("sparta", exchange))
    counts = np.diff(index.numpy().searchsorted(ends), prepend=0)
    index -= torch.from_numpy(np.repeat(ends - sizes, counts))
    return {name: part for name, part in zip(names, index.split(counts.tolist())) if len(part)}


# ---------------------------------------------------------------------------------------- the exchange


class SparseCommunicator(CommunicationModule):
    """Every `interval` steps: theta_i[M] <- mean_j theta_j[M] on the coordinates M that a selector draws.

    M is the same on every node and comes from the seed, so it costs no bytes. With `delay` = d the mean taken at step
    t is written at step t + d, over whatever the nodes hold on M_t by then; within a step the new mean is taken first,
    then the late one is written. What is still under way when the run ends is lost.

    State: `selector`, the selector's; `queue`, due step -> the `index` and `mean` of each tensor, `[1, m]`: d times m
    indices and values.

    Bytes sent per node and exchange: 2 (K - 1) / K * b * m for m selected coordinates; with `quantization_bits` the
    values go through an all-gather instead: m + 4 bytes per tensor with 8 bits, ceil(m / 2) + 4 with 4.

    Args:
        index_selector: a `Selector`, such as `PartitionedSelector(0.01)`; a number is the p of a `RandomSelector`.
        sparsification_rate: another name for this number; 0.01 when neither is given.
        delay: optimizer steps until the mean is written.
        interval: optimizer steps between two exchanges.
        quantization_bits: each node sends its values in 8 or 4 bits, with one scale per tensor; None: as they are.

    Raises:
        ValueError, TypeError: for rates outside [0, 1], delay < 0, interval < 1, other bits, and a rate that is not the
            selector's.

    >>> SparseCommunicator(0.02)
    SparseCommunicator(RandomSelector(p=0.02), delay=0, interval=1)
    """

    def __init__(
        self,
        index_selector: Selector | float | None = None,
        *,
        sparsification_rate: float | None = None,
        delay: int = 0,
        interval: int = 1,
        quantization_bits: int | None = None,
    ) -> None:
        if isinstance(index_selector, (int, float)):
            index_selector = RandomSelector(_check_rate("sparsification_rate", index_selector))
        self.index_selector = _selector(index_selector, "sparsification_rate", sparsification_rate, default=0.01)
        self.delay = check_delay("delay", delay)
        self.interval = check_interval("interval", interval)
        self.quantization_bits = (
            None if quantization_bits is None else check_bits("quantization_bits", quantization_bits)
        )

    def check(self, num_nodes: int, max_steps: int) -> None:
        warn_if_too_late(self, "delay", self.delay, max_steps)
        if max_steps < self.interval:
            warn(
                f"interval={self.interval} in {self!r} is larger than the run's {max_steps} steps: "
                "it never exchanges anything."
            )

    def init(self, params: Tree, ctx: Context) -> State:
        return {"selector": self.index_selector.init(_shapes(params), ctx), "queue": {}}

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        selector, queue = state["selector"], dict(state["queue"])
        if (ctx.step + 1) % self.interval == 0:
            index, selector = self.index_selector.select(_shapes(params), selector, ctx.step // self.interval, ctx)
            index = {name: where.to(params[name].device) for name, where in index.items()}
            values = {name: _flat(params[name]).index_select(1, where) for name, where in index.items()}
            with ctx.comm.ledger.lagging(self.delay):
                mean = self._mean(values, ctx)
            # [1, m]: as all state, with the node dimension first.
            queue[str(ctx.step + self.delay)] = {"index": {name: x[None] for name, x in index.items()}, "mean": mean}
        due = queue.pop(str(ctx.step), None)
        if due is not None:
            written = {
                name: _write(params[name], due["index"][name][0], x, ctx.inplace) for name, x in due["mean"].items()
            }
            params = {**params, **written}
        return params, {"selector": selector, "queue": queue}

    def _mean(self, values: Tree, ctx: Context) -> Tree:
        """The nodes' average of the selected values: `[L, m]` -> `[1, m]`."""
        if self.quantization_bits is None:
            return ctx.comm.mean(values)
        return quantised(values, self.quantization_bits, ctx)

    def __repr__(self) -> str:
        bits = "" if self.quantization_bits is None else f", quantization_bits={self.quantization_bits}"
        return f"SparseCommunicator({self.index_selector!r}, delay={self.delay}, interval={self.interval}{bits})"


def _write(param: Tensor, index: Tensor, values: Tensor, inplace: bool) -> Tensor:
    """`param`, `[1 or L, *]`, with `values`, `[1 or L, m]`, at the flat coordinates `index`, `[m]`."""
    num_rows = max(len(param), len(values))
    values = values.expand(num_rows, -1)
    if inplace and len(param) == num_rows and param.is_contiguous():
        _flat(param).index_copy_(1, index, values)
        return param
    wide = param.expand(num_rows, *param.shape[1:])
    return _flat(wide).index_copy(1, index, values).view(wide.shape)


def _flat(x: Tensor) -> Tensor:
    """`[L, *shape] -> [L, numel]`, a view where `x` is contiguous."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def _shapes(params: Tree) -> Shapes:
    return {name: p.shape[1:] for name, p in params.items()}


# ----------------------------------------------------------------------------------------- strategies


class SPARTAStrategy(Strategy):
    """After every optimizer step, the nodes average a small random part of their parameters.

    theta_i <- inner(theta_i, g_i); then, for a mask M of about p P coordinates, the same on all nodes,
    theta_i[M] <- 1/K sum_j theta_j[M].

    Inner optimizer state stays on its node. Bytes sent per node and step: 2 (K - 1) / K * b * p * P.

    Args:
        p_sparta: the probability of each coordinate to be exchanged in a step; 0.005 when not given.
        inner_optim: the local optimizer, AdamW when not given.
        index_selector: another choice of the coordinates, instead of `RandomSelector(p_sparta)`.
        delay: asynchronous SPARTA: the mean of a step is written that many steps later; see `SparseCommunicator`.
        compression_method: "topk": each node sends the coordinates that moved most instead of random ones; see
            `TopKSparseCommunicator`. "random", or None: SPARTA itself.
        quantization_bits: send the values in 8 or 4 bits; None: as they are.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError, TypeError: for a rate outside [0, 1], delay < 0, other methods or bits, and for an `index_selector`
            or `delay` with "topk".

    >>> SPARTAStrategy(p_sparta=0.001, inner_optim="adamw", lr=1e-4)
    SPARTAStrategy(OptimSpec(AdamW, lr=0.0001), SparseCommunicator(RandomSelector(p=0.001), delay=0, interval=1))
    >>> SPARTAStrategy(p_sparta=0.005, compression_method="topk", quantization_bits=8)
    SPARTAStrategy(OptimSpec(AdamW), TopKSparseCommunicator(fraction=0.005, quantization_bits=8))

    Reference: "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging",
    openreview stFPf3gzq1. Deviation: the mask comes from a seed that the nodes share; nobody sends it.
    """

    def __init__(
        self,
        p_sparta: float | None = None,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        index_selector: Selector | None = None,
        delay: int = 0,
        compression_method: str | None = None,
        quantization_bits: int | None = None,
        lr: float | Tensor | None = None,
        max_norm: float | Tensor | None = None,
        lr_scheduler: str | Schedule | None = None,
        warmup_steps: int = 0,
        cosine_anneal: bool = False,
    ) -> None:
        module: CommunicationModule
        if compression_method not in (None, *METHODS):
            allowed = ", ".join(map(repr, METHODS))
            raise ValueError(
                f"compression_method={compression_method!r} is not known; allowed: {allowed}, or None. Any average can "
                "be compressed: compressed(module, method)."
            )
        if compression_method == "topk":
            if index_selector is not None or delay != 0:
                raise ValueError(
                    'compression_method="topk" chooses the coordinates by itself and exchanges at once: leave out '
                    "index_selector and delay."
                )
            module = TopKSparseCommunicator(DEFAULT_RATE if p_sparta is None else p_sparta, quantization_bits)
        else:
            selector = _selector(index_selector, "p_sparta", p_sparta, DEFAULT_RATE)
            module = SparseCommunicator(selector, delay=delay, quantization_bits=quantization_bits)
        super().__init__(
            inner_optim,
            communication_modules=[module],
            lr=lr,
            max_norm=max_norm,
            lr_scheduler=lr_scheduler,
            warmup_steps=warmup_steps,
            cosine_anneal=cosine_anneal,
        )


class SPARTADiLoCoStrategy(Strategy):
    """SPARTA every `sparta_interval` steps, and DiLoCo every H.

    theta_i <- inner(theta_i, g_i); every `sparta_interval` steps theta_i[M] <- mean_j theta_j[M]; every H steps
    Delta = mean_i(theta_outer - theta_i), theta_outer <- outer(theta_outer, Delta), theta_i <- theta_outer.

    At a step with both, SPARTA comes first. With `delay`, what SPARTA has under way at an outer step is still written
    after it. Bytes sent per node and step: 2 (K - 1) / K * b * P * (p / sparta_interval + 1 / H).

    Args:
        p_sparta: the probability of each coordinate to be exchanged; 0.005 when not given.
        sparta_interval: optimizer steps between two sparse exchanges.
        H: optimizer steps between two outer steps.
        inner_optim: the local optimizer, AdamW when not given.
        outer_optim: SGD(lr=0.7, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        index_selector, delay: see `SPARTAStrategy`.
        lr: the inner learning rate.
        outer_lr: the outer learning rate.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    >>> SPARTADiLoCoStrategy(p_sparta=0.005, sparta_interval=2, H=50, inner_optim="adamw", lr=3e-4)
    SPARTADiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), SparseCommunicator(RandomSelector(p=0.005), delay=0, \
interval=2), DiLoCoCommunicator(outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=50))

    References: openreview stFPf3gzq1 and arXiv 2311.08105. Deviation from EXO Gym: there `sparta_interval` has no
    effect, and the outer step comes after H + 1 steps the first time.
    """

    def __init__(
        self,
        p_sparta: float | None = None,
        sparta_interval: int = 1,
        H: int = 100,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        index_selector: Selector | None = None,
        delay: int = 0,
        lr: float | Tensor | None = None,
        outer_lr: float | Tensor | None = None,
        max_norm: float | Tensor | None = None,
        lr_scheduler: str | Schedule | None = None,
        warmup_steps: int = 0,
        cosine_anneal: bool = False,
    ) -> None:
        selector = _selector(index_selector, "p_sparta", p_sparta, DEFAULT_RATE)
        check_interval("sparta_interval", sparta_interval)
        super().__init__(
            inner_optim,
            communication_modules=[
                SparseCommunicator(selector, delay=delay, interval=sparta_interval),
                DiLoCoCommunicator(outer_optim, H, outer_lr),
            ],
            lr=lr,
            max_norm=max_norm,
            lr_scheduler=lr_scheduler,
            warmup_steps=warmup_steps,
            cosine_anneal=cosine_anneal,
        )


def _check_rate(name: str, value: Any, high: float = 1.0) -> float:
    if isinstance(value, Tensor):
        unread = value.device.type == "meta" or value.is_complex()
        rate = 0.005 if unread else float(value.detach().double().mean())
        raise ValueError(
            f"{name} is a tensor: no derivative can be taken by a rate at which coordinates are drawn, since a "
            f"coordinate is either drawn or not. Give the number, {name}={rate:g}; how much is "
            "averaged can be differentiated by sync_weight of AveragingCommunicator."
        )
    what = f"the fraction of the parameters that is exchanged, such as {name}=0.005"
    return check.number(name, value, f"[0, {high:g}]", what)


def _selector(selector: Selector | None, name: str, rate: float | None, default: float) -> Selector:
    """The selector given, or a random one of this rate."""
    if selector is None:
        return RandomSelector(default if rate is None else _check_rate(name, rate))
    if not isinstance(selector, Selector):
        raise TypeError(
            f"index_selector={selector!r} is a {type(selector).__name__}; give a Selector, such as "
            "PartitionedSelector(0.01)."
        )
    if rate is not None and rate != getattr(selector, "p", None):
        raise ValueError(
            f"{name}={rate!r} and index_selector={selector!r} say different things about what is exchanged: "
            "give one of them."
        )
    return selector
