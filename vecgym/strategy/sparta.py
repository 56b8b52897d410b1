"""SPARTA: at every step the nodes average a small random part of their parameters (openreview stFPf3gzq1)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.compress import Quantise, check_bits, check_fraction
from vecgym.compress.codecs import decode_all, gathered_codes, index_dtype, part_of
from vecgym.compress.dct import mean_of_senders, strongest
from vecgym.core import check, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.simulation.when import Rounds, When, as_when, check_interval
from vecgym.strategy.averages import Mean, Outer, outer_spec
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, takes_options
from vecgym.strategy.coded import Compressed, constant, straight_through
from vecgym.strategy.delivery import checked_delay
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.stages import Average, Memory, Stage, Stages

A_SELECTOR = "a Selector, such as PartitionedSelector(0.01)"

DEFAULT_RATE = 0.005  # EXO Gym's

SelectorState = dict[str, Any]
Shapes = dict[str, torch.Size]  # of one node's parameters
Indices = dict[str, Tensor]  # flat coordinates, int64 [m]; a tensor without any may be left out


@check.strict
def SparseCommunicator(  # the name that EXO Gym's users know
    index_selector: Selector | float | None = None,
    *,
    sparsification_rate: float | None = None,
    delay: int = 0,
    correct_delay: bool = False,
    interval: int = 1,
    quantization_bits: int | None = None,
) -> Exchange:
    """Return the exchange in which, every `interval` steps, theta_i[M] <- mean_j theta_j[M] on drawn coordinates M.

    M is the same on every node and comes from the seed, so it costs no bytes. With `delay` = d the mean taken at step
    t overwrites the nodes' values on M_t at step t + d; within a step the late mean is written after the new one is
    taken. Messages under way at the end of the run are lost.

    With `correct_delay` a node keeps its movement since step t:
    theta_i(t + d)[M] <- mean_j theta_j(t)[M] + theta_i(t + d)[M] - theta_i(t)[M].

    Bytes sent per node and exchange: 2 (K - 1) / K * b * m for m selected coordinates; with `quantization_bits` the
    values go to each of the K - 1 others instead: m + 4 bytes per tensor with 8 bits, ceil(m / 2) + 4 with 4.

    Args:
        index_selector: a `Selector`, such as `PartitionedSelector(0.01)`; a number is the p of a `RandomSelector`.
        sparsification_rate: another name for this number; 0.01 when neither is given.
        delay: optimizer steps until the mean is written.
        correct_delay: whether a node's movement in between is added to the mean.
        interval: optimizer steps between two exchanges.
        quantization_bits: each node sends its values in 8 or 4 bits, with one scale per tensor; None: no quantisation.

    Raises:
        ValueError, TypeError: for rates outside [0, 1], delay < 0, interval < 1, other bits, a rate that is not the
            selector's, and `correct_delay` without a delay.

    >>> SparseCommunicator(0.02, delay=3)
    Exchange(Sparse(RandomSelector(p=0.02), Mean()), delay=3)
    """
    if isinstance(index_selector, (int, float)):
        index_selector = RandomSelector(check_rate("sparsification_rate", index_selector))
    selector = _selector(index_selector, "sparsification_rate", sparsification_rate, default=0.01)
    inner: Average = Mean()
    if quantization_bits is not None:
        codec = Quantise(check_bits("quantization_bits", quantization_bits))
        inner = Compressed(inner, codec, error_feedback=False)
    if check.flag("correct_delay", correct_delay) and checked_delay(delay) == 0:
        raise ValueError("correct_delay=True without a delay has no effect: give delay=1, or more, or leave it out.")
    when = Rounds(interval, name="interval")
    return Exchange(Sparse(selector, inner), every=when, delay=delay, late="change" if correct_delay else "value")


class SPARTAStrategy(Strategy, steady=True):
    """After every optimizer step, the nodes average a small random part of their parameters.

    theta_i <- inner(theta_i, g_i); then, for a mask M of about p P coordinates, the same on all nodes,
    theta_i[M] <- 1/K sum_j theta_j[M].

    Inner optimizer state stays on its node. Bytes sent per node and step: 2 (K - 1) / K * b * p * P.

    Args:
        p_sparta: the probability of each coordinate to be exchanged in a step; 0.005 when not given.
        inner_optim: the local optimizer, AdamW when not given.
        index_selector: another choice of the coordinates, instead of `RandomSelector(p_sparta)`.
        delay: asynchronous SPARTA: the mean of a step is written that many steps later; see `SparseCommunicator`.
        correct_delay: LOSCAR: a node's movement in these steps is added to the mean.
        compression_method: "topk": each node sends the coordinates that moved most instead of random ones; see
            `MostMoved`. "random", or None: SPARTA itself.
        quantization_bits: send the values in 8 or 4 bits; None: no quantisation.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError, TypeError: for a rate outside [0, 1], delay < 0, other methods or bits, for `correct_delay` without
            a delay, and for an `index_selector` or `delay` with "topk".

    >>> SPARTAStrategy(p_sparta=0.001, inner_optim="adamw", lr=1e-4)
    SPARTAStrategy(OptimSpec(AdamW, lr=0.0001), Exchange(Sparse(RandomSelector(p=0.001), Mean())))
    >>> SPARTAStrategy(p_sparta=0.005, compression_method="topk", quantization_bits=8)
    SPARTAStrategy(OptimSpec(AdamW), Exchange(MostMoved(bits=8)))

    Reference: "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging",
    openreview stFPf3gzq1. Deviation: the mask comes from a seed that the nodes share, and is not sent. The correction
    of the delay: arXiv 2605.20866.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        p_sparta: float | None = None,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        index_selector: Selector | None = None,
        delay: int = 0,
        correct_delay: bool = False,
        compression_method: str | None = None,
        quantization_bits: int | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        if compression_method is not None:
            otherwise = "None; any average can be compressed: Compressed(average, codec)"
            check.choice("compression_method", compression_method, ("random", "topk"), otherwise)
        if compression_method == "topk":
            if index_selector is not None or checked_delay(delay) != 0 or correct_delay:
                raise ValueError(
                    'compression_method="topk" has its own choice of coordinates and exchanges at once: leave out '
                    "index_selector and delay, and so correct_delay."
                )
            bits = None if quantization_bits is None else check_bits("quantization_bits", quantization_bits)
            exchange = Exchange(MostMoved(DEFAULT_RATE if p_sparta is None else p_sparta, bits))
        else:
            selector = _selector(index_selector, "p_sparta", p_sparta, DEFAULT_RATE)
            exchange = SparseCommunicator(
                selector, delay=delay, correct_delay=correct_delay, quantization_bits=quantization_bits
            )
        super().__init__(inner_optim, [exchange], **inner)


class SPARTADiLoCoStrategy(Strategy, steady=True):
    """SPARTA every `sparta_interval` steps, and DiLoCo every H.

    theta_i <- inner(theta_i, g_i); every `sparta_interval` steps theta_i[M] <- mean_j theta_j[M]; every H steps
    Delta = mean_i(theta_outer - theta_i), theta_outer <- outer(theta_outer, Delta), theta_i <- theta_outer.

    At a step with both, SPARTA comes first. With `delay`, SPARTA's messages under way at an outer step are still
    written after it. Bytes sent per node and step: 2 (K - 1) / K * b * P * (p / sparta_interval + 1 / H).

    Args:
        p_sparta: the probability of each coordinate to be exchanged; 0.005 when not given.
        sparta_interval: optimizer steps between two sparse exchanges.
        H: optimizer steps between two outer steps.
        inner_optim: the local optimizer, AdamW when not given.
        outer_optim: SGD(lr=0.7, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        index_selector, delay, correct_delay: see `SPARTAStrategy`.
        lr: the inner learning rate.
        outer_lr: the outer learning rate.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    >>> SPARTADiLoCoStrategy(p_sparta=0.005, sparta_interval=2, H=50, inner_optim="adamw", lr=3e-4)
    SPARTADiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), Exchange(Sparse(RandomSelector(p=0.005), Mean()), every=2), \
Exchange(Outer(Mean()), every=50))

    References: openreview stFPf3gzq1 and arXiv 2311.08105. Deviation from EXO Gym: there `sparta_interval` has no
    effect, and the outer step comes after H + 1 steps the first time.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        p_sparta: float | None = None,
        sparta_interval: int = 1,
        H: int | When | Callable[[int], int] = 100,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        index_selector: Selector | None = None,
        delay: int = 0,
        correct_delay: bool = False,
        outer_lr: float | Tensor | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        selector = _selector(index_selector, "p_sparta", p_sparta, DEFAULT_RATE)
        check_interval("sparta_interval", sparta_interval)
        sparse = SparseCommunicator(selector, delay=delay, correct_delay=correct_delay, interval=sparta_interval)
        diloco = Exchange(Outer(Mean(), outer_spec(outer_optim, outer_lr)), every=as_when(H, "H"))
        super().__init__(inner_optim, [sparse, diloco], **inner)


def _selector(selector: Selector | None, name: str, rate: float | None, default: float) -> Selector:
    """Return the given selector, or a random one with this rate."""
    if selector is None:
        return RandomSelector(default if rate is None else check_rate(name, rate))
    check.instance("index_selector", selector, Selector, A_SELECTOR)
    if rate is not None and rate != selector.p:
        raise ValueError(
            f"{name}={rate!r} and index_selector={selector!r} say different things about the exchanged coordinates: "
            "give one of them."
        )
    return selector


class Sparse(Stage, batched=(), random=True):
    """Apply `inner` to the coordinates that a selector draws; nodes keep their values of all others.

    x_i[M] <- inner(x_j[M]). M is the same on every node and comes from the seed, so it costs no bytes.

    State: the memory of `inner` for all coordinates, of which an exchange uses and changes those in M; `selector`, the
    selector's state, `[1, *]`.

    Args:
        selector: a `Selector`, such as `PartitionedSelector(0.01)`; a number is the p of a `RandomSelector`.
        inner: the average on these coordinates. Its memory must have one value per coordinate, such as the residual of
            a code.

    Raises:
        ValueError: before the first step, for an average with another memory, such as PowerSGD's matrices.

    >>> sparse, values = Sparse(0.5, Mean()), {"w": torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])}
    >>> sparse(values, Part.alone(StackedCollectives(2)))["w"]
    tensor([[1., 3., 3.],
            [3., 3., 5.]])
    """

    def __init__(self, selector: Selector | float, inner: Average) -> None:
        super().__init__(inner)
        selector = RandomSelector(selector) if isinstance(selector, (int, float)) else selector
        self.selector = check.instance("selector", selector, Selector, A_SELECTOR)

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        later, shapes = Memory(), {name: x.shape[1:] for name, x in values.items()}
        Stages(self.inner).init(values, run, later)
        for held in (*later.own.values(), *later.shared.values()):
            flat = isinstance(held, dict) and all(isinstance(x, Tensor) for x in held.values())
            if not flat or {name: x.shape[1:] for name, x in held.items()} != shapes:
                raise ValueError(
                    f"{self!r} averages other coordinates each time, and {self.inner!r} keeps state that is not one "
                    "value per coordinate: give an average without a state, or a codec such as TopK or Quantise."
                )
        state = self.selector.init(shapes, Part.alone(StackedCollectives(run.num_nodes), seed=run.seed))
        if state:
            memory.shared["selector"] = state

    def send(self, x: Tree, part: Part, memory: Memory) -> Tree:
        """Draw the coordinates of this exchange, the same in all configurations of a group, and note them."""
        shapes = {name: y.shape[part.lead :] for name, y in x.items()}
        held = of_one(memory.shared["selector"], part) if "selector" in memory.shared else {}
        index, state = self.selector.select(shapes, held, part.due.number, part)
        if state is not held:
            memory.shared["selector"] = for_all(state, part)
        index = {name: placed(where, x[name].device) for name, where in index.items()}
        memory.notes["index"] = for_all({name: where[None] for name, where in index.items()}, part)
        return taken(x, index, part)

    def read(self, x: Tree, part: Part, memory: Memory) -> Tree:
        return taken(x, self._index(part, memory), part)

    def write(self, y: Tree, x: Tree, part: Part, memory: Memory) -> Tree:
        return {**x, **written(x, self._index(part, memory), y, part, part.inplace)}

    def within(self, part: Part, memory: Memory) -> Memory:
        own, shared = (OfCoordinates(x, self._index(part, memory), part, memory) for x in (memory.own, memory.shared))
        return Memory(own, shared, memory.common, memory.inplace, memory.notes)

    def _index(self, part: Part, memory: Memory) -> Tree:
        return {name: where[0] for name, where in of_one(memory.notes["index"], part).items()}


class OfCoordinates:
    """A memory restricted to some coordinates: reads and writes concern only these."""

    def __init__(self, held: Any, index: Tree, part: Part, memory: Memory) -> None:
        self.held, self.index, self.part, self.inplace = held, index, part, memory.inplace

    def __contains__(self, name: str) -> bool:
        return name in self.held

    def __getitem__(self, name: str) -> Any:
        return taken(self.held[name], self.index, self.part)

    def __setitem__(self, name: str, value: Tree) -> None:
        whole = self.held[name]
        self.held[name] = {**whole, **written(whole, self.index, value, self.part, self.inplace)}


def taken(values: Tree, index: Tree, part: Part) -> Tree:
    """Take the flat coordinates `index`, `[m]`, of each tensor `[.., K, *]`: `[.., K, m]`.

    >>> part, x = Part.alone(StackedCollectives(2)), {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    >>> taken(x, {"w": torch.tensor([1])}, part)["w"].tolist()
    [[2.0], [4.0]]
    """
    return {name: part.coordinates(values[name]).index_select(-1, where) for name, where in index.items()}


def written(values: Tree, index: Tree, new: Tree, part: Part, inplace: bool) -> Tree:
    """Write `new`, `[.., K, m]`, into tensors `[.., K, *]` at the flat coordinates `index`, `[m]`.

    >>> part, x = Part.alone(StackedCollectives(2)), {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    >>> written(x, {"w": torch.tensor([1])}, {"w": torch.zeros(2, 1)}, part, inplace=False)["w"].tolist()
    [[1.0, 0.0], [3.0, 0.0]]
    """
    return {name: _written(values[name], where, new[name], part, inplace) for name, where in index.items()}


def _written(x: Tensor, where: Tensor, new: Tensor, part: Part, inplace: bool) -> Tensor:
    lead = part.lead
    shape = np.broadcast_shapes(x.shape[:lead], new.shape[:lead])  # torch's imports sympy, which takes half a second
    new = new.expand(*shape, -1)
    if inplace and x.shape[:lead] == shape and x.is_contiguous():
        part.coordinates(x).index_copy_(-1, where, new)
        return x
    wide = x.expand(*shape, *x.shape[lead:])
    return part.coordinates(wide).index_copy(-1, where, new).view(wide.shape)


def of_one(drawn: Any, part: Part) -> Any:
    """Return the values of one configuration, from values that all configurations share."""
    return drawn if part.size == 1 else tree.map_leaves(lambda x: x[0], drawn)


def for_all(drawn: Any, part: Part) -> Any:
    """Return values of one configuration for each configuration of the group."""
    return drawn if part.size == 1 else tree.map_leaves(lambda x: x.expand(part.size, *x.shape), drawn)


class MostMoved(Average, batched=(), steady=True):
    """Average, of each node's values, the ones that moved most since their last average.

    I_i = the k coordinates of each tensor with the largest |x_i - last_i|;  for every coordinate c that any node sent:
    x_j[c] <- the mean of x_i[c] over the nodes i that sent c, on all nodes j; last_j[c] <- the same. Other coordinates
    and their `last` do not change: a coordinate that moves slowly is sent once it has moved far enough.

    Under differentiation the choice of coordinates is a constant, and quantised values pass derivatives straight
    through.

    State: `last`, the last average of each coordinate, the same on every node, `[1, *]`; at first the initial values.
    Bytes to each of the others, per tensor of n values of b bytes: k (b + 4), k = max(1, round(fraction n)); with 8
    bits k (1 + 4) + 4; with 4 bits ceil(k / 2) + 4 k + 4.

    Args:
        fraction: of each tensor, in (0, 1].
        bits: send the values in 8, 4 or 2 bits, one scale per tensor and node; None: no quantisation.

    >>> average, part = MostMoved(fraction=0.5), Part.alone(StackedCollectives(2))
    >>> memory = average.memory({"w": torch.zeros(1, 2)}, part)
    >>> average({"w": torch.tensor([[5.0, 1.0], [1.0, 3.0]])}, part, memory)["w"]  # the first sends 5, the second 3
    tensor([[5., 3.],
            [5., 3.]])

    Reference: no paper defines it. It is our reading of EXO Gym's documents, which offer
    `SPARTAStrategy(compression_method='topk', quantization_bits=8)`; their code has no such arguments.
    """

    def __init__(self, fraction: float = 0.005, bits: int | None = None) -> None:
        self.fraction = check_fraction("fraction", fraction)
        self.bits = None if bits is None else check_bits("bits", bits)

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        memory.shared["last"] = values

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        last, shapes, wide = memory.shared["last"], {name: y.shape[part.lead :] for name, y in x.items()}, part.wide(x)
        chosen = {name: self._moved_most(y.detach(), last[name], part) for name, y in x.items()}
        values = {name: part.coordinates(wide[name]).gather(-1, c) for name, c in chosen.items()}
        received = self._gather(values, part, memory)
        sent = part.comm.all_gather({name: c.to(index_dtype(shapes[name].numel())) for name, c in chosen.items()})
        means, touched = Tree(), Tree()
        for name, shape in shapes.items():  # of all nodes: [C, K, k]
            c, n = sent[name].long(), shape.numel()
            means[name] = mean_of_senders(c[:, :, None], received[name][:, :, None], n).view(len(c), *shape)
            of_any = torch.zeros(len(c), n, dtype=torch.bool, device=c.device).scatter_(1, c.flatten(1), True)
            touched[name] = of_any.view(len(c), *shape)
        means, touched = part.apart(means), part.apart(touched)
        memory.notes["touched"] = touched
        memory.shared["last"] = {name: y.detach() for name, y in _over(touched, means, last).items()}
        return means

    def write(self, y: Tree, x: Tree, part: Part, memory: Memory) -> Tree:
        return _over(memory.notes["touched"], y, x)

    def _moved_most(self, x: Tensor, last: Tensor, part: Part) -> Tensor:
        """Return the coordinates that a node sends, `[K, k]`."""
        movement = part.coordinates(x - last)
        where = strongest(movement, part_of(movement.shape[-1], self.fraction))
        return where.expand(*where.shape[: part.lead - 1], len(part.comm.node_ids), -1)

    def _gather(self, values: Tree, part: Part, memory: Memory) -> Tree:
        """Return all nodes' values `[K, k]` as every node reads them, `[1, K, k]`."""
        if self.bits is None:
            return part.comm.all_gather(values)
        codec = Quantise(self.bits)
        with torch.no_grad():
            rows = part.flat(constant(values))
            codes = {name: codec.encode(x) for name, x in rows.items()}
            received = gathered_codes(codes, codec, lambda x: part.comm.all_gather(part.apart(x)))
            read = {name: decode_all(code, codec, rows[name]) for name, code in received.items()}
        return straight_through(read, values, part, memory, lambda unrecorded: unrecorded.comm.all_gather(values))


def _over(touched: Tree, means: Tree, values: Tree) -> Tree:
    """Return the means where any node has sent a value, else the values."""
    return {name: torch.where(touched[name], means[name], x) for name, x in values.items()}


# ------------------------------------------------------------------------------------------------- which coordinates


class Selector(ABC):
    """A choice of the exchanged coordinates: the same on every node, drawn from the run's seed alone.

    Example: embeddings only, in full.

    >>> from vecgym.strategy import SparseCommunicator
    >>> class Embeddings(Selector):
    ...     def select(self, shapes, state, exchange, at):
    ...         return {name: torch.arange(shape.numel()) for name, shape in shapes.items() if "emb" in name}, state
    >>> SparseCommunicator(Embeddings())
    Exchange(Sparse(Embeddings(), Mean()))
    """

    p: float | None = None  # the fraction of the coordinates, where it is one number

    def init(self, shapes: Shapes, at: Part) -> SelectorState:
        """Return the state that `select` passes from one exchange to the next: nested dicts of tensors.

        >>> at = Part.alone(StackedCollectives(2))
        >>> ShuffledSequentialSelector(0.5).init({"w": torch.Size([2, 3])}, at)["w"].shape
        torch.Size([1, 6])
        """
        return {}

    @abstractmethod
    def select(self, shapes: Shapes, state: SelectorState, exchange: int, at: Part) -> tuple[Indices, SelectorState]:
        """Return the distinct coordinates of one exchange, as indices into each flattened tensor.

        Args:
            shapes: of one node's parameters, by name.
            state: from `init` or the exchange before.
            exchange: the index of the exchange, from 0.
            at: the event; use only `at.generator` and `at.due.step`: all else may differ between processes.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class RandomSelector(Selector):
    """Choose each coordinate with probability p, independently of the others and of every other exchange.

    A pure function of seed, names, sizes and the index of the exchange: no state.

    Args:
        p: probability, in [0, 1].

    >>> at = Part.alone(StackedCollectives(2))
    >>> chosen, _ = RandomSelector(0.01).select({"w": torch.Size([100, 100])}, {}, 0, at)
    >>> chosen["w"].shape, chosen["w"].dtype  # about 100 of 10 000
    (torch.Size([95]), torch.int64)
    """

    def __init__(self, p: float) -> None:
        self.p: float = check_rate("p", p)

    def select(self, shapes: Shapes, state: SelectorState, exchange: int, at: Part) -> tuple[Indices, SelectorState]:
        return _bernoulli(shapes, self.p, exchange, at), state


class ScheduledSelector(Selector):
    """Choose each coordinate with a probability that rises linearly from 0 to 2p over each H steps.

    rate_t = 2 p (t mod H) / H, so p (H - 1) / H on average. With the same H as DiLoCo the nodes explore independently
    after an outer step and come together before the next. No state.

    Args:
        p: half of the highest probability, in [0, 0.5].
        H: optimizer steps from one rate of 0 to the next, at least 2.

    >>> selector, shapes = ScheduledSelector(0.5, H=4), {"w": torch.Size([100, 100])}
    >>> at = Part.alone(StackedCollectives(2))
    >>> [len(selector.select(shapes, {}, t, Part.alone(at.comm, step=t))[0].get("w", [])) for t in range(4)]
    [0, 2536, 5032, 7499]

    Reference: diloco-sim. Deviation: there every tensor advances the ramp, so that it rises as many times faster as
    the model has tensors; here every step does.
    """

    def __init__(self, p: float, H: int) -> None:
        self.p: float = check_rate("p", p, "[0, 0.5]")
        self.H = check.integer("H", H, 2, "the steps of a ramp, in the first of which the rate is 0")

    def rate(self, step: int) -> float:
        """Return the probability at a step.

        >>> [ScheduledSelector(0.25, H=5).rate(t) for t in range(6)]
        [0.0, 0.1, 0.2, 0.3, 0.4, 0.0]
        """
        return 2 * self.p * (step % self.H) / self.H

    def select(self, shapes: Shapes, state: SelectorState, exchange: int, at: Part) -> tuple[Indices, SelectorState]:
        return _bernoulli(shapes, self.rate(at.due.step), exchange, at), state


class ShuffledSequentialSelector(Selector):
    """One fixed random order of each tensor's coordinates, cut into ceil(1/p) chunks that are taken in turn.

    Every coordinate is exchanged exactly once in ceil(1/p) exchanges. Chunks differ by at most one coordinate; of a
    tensor with fewer coordinates than chunks, some are empty.

    State: the order of each tensor, int64 `[1, n]`, 8 bytes per parameter for all nodes together. (Drawing it anew at
    every exchange would need no state, but is slow: 0.5 ms for 10^5 coordinates, 0.6 s for 10^7.)

    Args:
        p: the fraction exchanged at a time, in (0, 1].

    >>> selector, part = ShuffledSequentialSelector(0.5), Part.alone(StackedCollectives(2))
    >>> shapes = {"w": torch.Size([6])}
    >>> state = selector.init(shapes, part)
    >>> parts = [selector.select(shapes, state, exchange, part)[0]["w"] for exchange in range(4)]
    >>> sorted(torch.cat(parts[:2]).tolist()), torch.equal(parts[0], parts[2])  # each once, then the same order again
    ([0, 1, 2, 3, 4, 5], True)
    """

    def __init__(self, p: float) -> None:
        self.p: float = check_rate("p", p, "(0, 1]")

    @property
    def num_parts(self) -> int:
        """ceil(1/p), where 1/p may be an integer up to rounding.

        >>> ShuffledSequentialSelector(1 / 49).num_parts, ShuffledSequentialSelector(0.3).num_parts
        (49, 4)
        """
        return math.ceil(1 / self.p * (1 - 1e-12))

    def init(self, shapes: Shapes, at: Part) -> SelectorState:
        return self._orders(shapes, 0, at)

    def select(self, shapes: Shapes, state: SelectorState, exchange: int, at: Part) -> tuple[Indices, SelectorState]:
        turn, parts = exchange % self.num_parts, self.num_parts
        chunks = {
            name: order[0, order.shape[1] * turn // parts : order.shape[1] * (turn + 1) // parts]
            for name, order in state.items()
        }
        # Cloned, or an exchange under way would keep, and save, the whole order.
        return {name: chunk.clone() for name, chunk in chunks.items() if len(chunk)}, state

    def _orders(self, shapes: Shapes, cycle: int, at: Part) -> SelectorState:
        return {
            name: torch.randperm(shape.numel(), generator=at.generator(f"sparta order {name}", cycle))[None]
            for name, shape in shapes.items()
        }


class PartitionedSelector(ShuffledSequentialSelector):
    """A random partition of each tensor's coordinates into ceil(1/p) parts, taken in turn; then another partition.

    As `ShuffledSequentialSelector`, but with a new order after each cycle of ceil(1/p) exchanges.

    Deviation from EXO Gym and diloco-sim: there a tensor with fewer coordinates than parts has one part per coordinate,
    and so shorter cycles.

    Args:
        p: the fraction exchanged at a time, in (0, 1].

    >>> selector, shapes, at = PartitionedSelector(0.5), {"w": torch.Size([100])}, Part.alone(StackedCollectives(2))
    >>> state, parts = selector.init(shapes, at), []
    >>> for exchange in range(4):
    ...     chosen, state = selector.select(shapes, state, exchange, at)
    ...     parts.append(chosen["w"])
    >>> torch.cat(parts[2:]).unique().numel(), torch.equal(parts[0], parts[2])  # each once, in another order
    (100, False)
    """

    def select(self, shapes: Shapes, state: SelectorState, exchange: int, at: Part) -> tuple[Indices, SelectorState]:
        cycle, turn = divmod(exchange, self.num_parts)
        if turn == 0 and cycle > 0:  # init draws the order of cycle 0
            state = self._orders(shapes, cycle, at)
        return super().select(shapes, state, exchange, at)


def bernoulli_indices(n: int, p: float, generator: torch.Generator) -> Tensor:
    """Draw indices in 0..n-1, each with probability p, independently; ascending, int64.

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
    # In numpy: some of torch's operations wake a second thread even for few numbers, and then wait for it.
    parts, last = [np.empty(0)], -1.0
    while p > 0 and last < n:
        expected = (n - last) * p
        count = int(expected + 5 * math.sqrt(expected)) + 8  # a second round is very rare
        uniform = torch.rand(count, dtype=torch.float64, generator=generator).numpy()
        parts.append(last + np.ceil(np.log(uniform) / math.log1p(-p)).cumsum())
        last = float(parts[-1][-1])
    positions = np.concatenate(parts)
    return torch.from_numpy(positions[: positions.searchsorted(n)].astype(np.int64))


def _bernoulli(shapes: Shapes, rate: float, exchange: int, at: Part) -> Indices:
    """Draw once over all tensors, laid end to end in the order of their names, and split the result.

    Drawing tensor by tensor takes 0.55 ms instead of 0.09 ms for a transformer of 29 tensors and 10^5 parameters.
    """
    names = sorted(shapes)
    sizes = np.array([shapes[name].numel() for name in names], dtype=np.int64)
    ends = sizes.cumsum()
    index = bernoulli_indices(int(sizes.sum()), rate, at.generator("sparta", exchange))
    counts = np.diff(index.numpy().searchsorted(ends), prepend=0)
    index -= torch.from_numpy(np.repeat(ends - sizes, counts))
    return {name: part for name, part in zip(names, index.split(counts.tolist())) if len(part)}


def check_rate(name: str, value: Any, within: str = "[0, 1]") -> float:
    if isinstance(value, Tensor):
        raise ValueError(
            f"{name}={value!r}: there is no derivative with respect to the rate at which coordinates are drawn, since "
            f"a coordinate is either drawn or not. Give a number, such as {name}=0.005; sync_weight of "
            "AveragingCommunicator is a weight that can be differentiated."
        )
    what = f"the fraction of the parameters that is exchanged, such as {name}=0.005"
    return check.number(name, value, within, what)
