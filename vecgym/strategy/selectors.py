"""Which coordinates of the parameters are exchanged: drawn from the run's seed, the same on every node."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.core import check, rng
from vecgym.strategy.when import check_interval

State = dict[str, Any]  # nested dicts of tensors
Shapes = dict[str, torch.Size]  # of one node's parameters
Indices = dict[str, Tensor]  # flat coordinates, int64 [m]; a tensor of which nothing is selected may be left out


@dataclass(frozen=True)
class Draws:
    """The random numbers of an exchange, the same on every node.

    Attributes:
        step: optimizer steps before the exchange.

    >>> a, b = (torch.rand(1, generator=Draws(seed=1).generator("mask", 5)) for _ in range(2))
    >>> a == b
    tensor([True])
    """

    seed: int = 0
    step: int = 0

    def generator(self, purpose: str, *ids: int) -> torch.Generator:
        """Return a generator keyed by the run's seed, the purpose and the ids."""
        return rng.generator(self.seed, purpose, *ids)


class Selector(ABC):
    """Which coordinates are exchanged: the same on every node, drawn from the run's seed alone.

    Example: embeddings only, in full.

    >>> from vecgym.strategy import SparseCommunicator
    >>> class Embeddings(Selector):
    ...     def select(self, shapes, state, exchange, at):
    ...         return {name: torch.arange(shape.numel()) for name, shape in shapes.items() if "emb" in name}, state
    >>> SparseCommunicator(Embeddings())
    Exchange(Sparse(Embeddings(), Mean()))
    """

    p: float | None = None  # the fraction of the coordinates, where it is one number

    def init(self, shapes: Shapes, at: Draws) -> State:
        """Return what `select` needs to keep from one exchange to the next: nested dicts of tensors.

        >>> ShuffledSequentialSelector(0.5).init({"w": torch.Size([2, 3])}, Draws())["w"].shape
        torch.Size([1, 6])
        """
        return {}

    @abstractmethod
    def select(self, shapes: Shapes, state: State, exchange: int, at: Draws) -> tuple[Indices, State]:
        """Return the distinct coordinates of one exchange, as indices into each flattened tensor.

        Args:
            shapes: of one node's parameters, by name.
            state: from `init` or the exchange before.
            exchange: exchanges done before this one.
            at: for `at.generator` and `at.step`.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class RandomSelector(Selector):
    """Each coordinate with probability p, independently of the others and of every other exchange.

    A pure function of seed, names, sizes and number of the exchange: no state.

    Args:
        p: probability, in [0, 1].

    >>> at = Draws()
    >>> chosen, _ = RandomSelector(0.01).select({"w": torch.Size([100, 100])}, {}, 0, at)
    >>> chosen["w"].shape, chosen["w"].dtype  # about 100 of 10 000
    (torch.Size([95]), torch.int64)
    """

    def __init__(self, p: float) -> None:
        self.p: float = check_rate("p", p)

    def select(self, shapes: Shapes, state: State, exchange: int, at: Draws) -> tuple[Indices, State]:
        return _bernoulli(shapes, self.p, exchange, at), state


class ScheduledSelector(Selector):
    """Each coordinate with a probability that rises linearly from 0 to 2p over each H steps.

    rate_t = 2 p (t mod H) / H, so p (H - 1) / H on average. With the same H as DiLoCo the nodes explore by
    themselves after an outer step and come together before the next. No state.

    Args:
        p: half of the highest probability, in [0, 0.5].
        H: optimizer steps from one rate of 0 to the next, at least 2.

    >>> selector, shapes = ScheduledSelector(0.5, H=4), {"w": torch.Size([100, 100])}
    >>> [len(selector.select(shapes, {}, t, Draws(step=t))[0].get("w", [])) for t in range(4)]
    [0, 2536, 5032, 7499]

    Reference: diloco-sim. Deviation: there every tensor advances the ramp, so that it rises as many times faster as
    the model has tensors; here every step does.
    """

    def __init__(self, p: float, H: int) -> None:
        self.p: float = check_rate("p", p, high=0.5)
        self.H = check_interval("H", H)
        if H == 1:
            raise ValueError("H=1: the rate starts each ramp of H steps at 0 and would stay there; give H >= 2.")

    def rate(self, step: int) -> float:
        """Return the probability at a step.

        >>> [ScheduledSelector(0.25, H=5).rate(t) for t in range(6)]
        [0.0, 0.1, 0.2, 0.3, 0.4, 0.0]
        """
        return 2 * self.p * (step % self.H) / self.H

    def select(self, shapes: Shapes, state: State, exchange: int, at: Draws) -> tuple[Indices, State]:
        return _bernoulli(shapes, self.rate(at.step), exchange, at), state


class ShuffledSequentialSelector(Selector):
    """One fixed random order of each tensor's coordinates, cut into ceil(1/p) chunks that are taken in turn.

    Every coordinate is exchanged exactly once in ceil(1/p) exchanges. Chunks differ by at most one coordinate; of a
    tensor with fewer coordinates than chunks, some are empty.

    State: the order of each tensor, int64 `[1, n]`, 8 bytes a parameter for all nodes together. (To draw it anew at
    every exchange would be as pure but slow: 0.5 ms for 10^5 coordinates, 0.6 s for 10^7.)

    Args:
        p: the fraction exchanged at a time, in (0, 1].

    >>> selector, shapes, at = ShuffledSequentialSelector(0.5), {"w": torch.Size([6])}, Draws()
    >>> state = selector.init(shapes, at)
    >>> parts = [selector.select(shapes, state, exchange, at)[0]["w"] for exchange in range(4)]
    >>> sorted(torch.cat(parts[:2]).tolist()), torch.equal(parts[0], parts[2])  # each once, then the same order again
    ([0, 1, 2, 3, 4, 5], True)
    """

    def __init__(self, p: float) -> None:
        self.p: float = check_rate("p", p)
        if p == 0:
            raise ValueError(f"p=0 would take infinitely many turns: {type(self).__name__} takes p in (0, 1].")

    @property
    def num_parts(self) -> int:
        """ceil(1/p), where 1/p is an integer up to rounding: exactly that.

        >>> ShuffledSequentialSelector(1 / 49).num_parts, ShuffledSequentialSelector(0.3).num_parts
        (49, 4)
        """
        return math.ceil(1 / self.p * (1 - 1e-12))

    def init(self, shapes: Shapes, at: Draws) -> State:
        return self._orders(shapes, 0, at)

    def select(self, shapes: Shapes, state: State, exchange: int, at: Draws) -> tuple[Indices, State]:
        turn, parts = exchange % self.num_parts, self.num_parts
        chunks = {
            name: order[0, order.shape[1] * turn // parts : order.shape[1] * (turn + 1) // parts]
            for name, order in state.items()
        }
        # Cloned, or an exchange under way would keep, and save, the whole order.
        return {name: chunk.clone() for name, chunk in chunks.items() if len(chunk)}, state

    def _orders(self, shapes: Shapes, cycle: int, at: Draws) -> State:
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

    >>> selector, shapes, at = PartitionedSelector(0.5), {"w": torch.Size([100])}, Draws()
    >>> state, parts = selector.init(shapes, at), []
    >>> for exchange in range(4):
    ...     chosen, state = selector.select(shapes, state, exchange, at)
    ...     parts.append(chosen["w"])
    >>> torch.cat(parts[2:]).unique().numel(), torch.equal(parts[0], parts[2])  # each once, in another order
    (100, False)
    """

    def select(self, shapes: Shapes, state: State, exchange: int, at: Draws) -> tuple[Indices, State]:
        cycle, turn = divmod(exchange, self.num_parts)
        if turn == 0 and cycle > 0:  # that of cycle 0 is drawn by init
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


def _bernoulli(shapes: Shapes, rate: float, exchange: int, at: Draws) -> Indices:
    """Draw once over all tensors, laid end to end in the order of their names, and split.

    Tensor by tensor it takes 0.55 ms instead of 0.09 ms for a transformer of 29 tensors and 10^5 parameters.
    """
    names = sorted(shapes)
    sizes = np.array([shapes[name].numel() for name in names], dtype=np.int64)
    ends = sizes.cumsum()
    index = bernoulli_indices(int(sizes.sum()), rate, at.generator("sparta", exchange))
    counts = np.diff(index.numpy().searchsorted(ends), prepend=0)
    index -= torch.from_numpy(np.repeat(ends - sizes, counts))
    return {name: part for name, part in zip(names, index.split(counts.tolist())) if len(part)}


def check_rate(name: str, value: Any, high: float = 1.0) -> float:
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
