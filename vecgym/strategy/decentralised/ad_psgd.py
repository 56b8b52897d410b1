"""AD-PSGD: after each step a node averages with one neighbour, without waiting (Lian et al., arXiv 1710.06952)."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vecgym.collectives.topology import Links as Messages
from vecgym.core import check, rng, tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.events import Arrival, Happening, Restart, Rules, StepSeconds, Times, Traffic, Wires
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.asynchronous import EventDriven
from vecgym.strategy.base import InnerOptions, Unpack, takes_options
from vecgym.strategy.decentralised.gossip import FIXED, as_matrix

Order = Literal["after", "before"]
BLOCK = 64  # neighbours drawn at a time


class ADPSGDStrategy(EventDriven):
    """Every node trains independently, and after each step averages with one neighbour, without waiting for it.

    Node i computes the gradient g_i at its parameters at the start of a step. At the end of the step:
    theta_i <- optimizer_i(theta_i, g_i), where theta_i may have been averaged since; then
    theta_i, theta_j <- (theta_i + theta_j) / 2 with a random neighbour j. Node j continues its step: its gradient is
    taken at the parameters of the start, and applied to those of the end. An average is atomic.

    With `fit(network=)` the two first send each other their parameters, both ways at once, when both their links are
    free. Node i waits for the transfer, and node j continues to compute. Node i's optimizer step and the average happen
    at its end, with the parameters of that time. Without a network averages take no time.

    There is no server. An *update* is K steps of any nodes; the length of a run is a number of updates,
    `fit(max_updates=)`, which is the mean number of steps of a node, as `max_steps=`. The history has a row for each
    update: a node's loss is the mean over its steps in it, nan without any; `staleness` counts the averages that have
    changed a node's parameters while it computed its gradient. The mean of the nodes is evaluated.

    Ties in time go by the node's id; all steps that end at one time are ended before any of these nodes begins its
    next. Learning rate, data, randomness and neighbours of a node go by its own step count. Bytes per step: b * P
    from i to j and as many back.

    Args:
        inner_optim: the optimizer, AdamW when not given; its state stays on its node.
        topology: "complete", "ring", "torus" or "exponential"; or a matrix `[K, K]` of weights >= 0: node i draws j
            with a probability proportional to W_ij, for j other than i. A node without neighbours trains alone.
        mix: "after": step, then average, as above; "before": average, then step: j gets the mean without g_i.
        together: compute all gradients whose steps have begun in one call when one of them is needed. False: one by
            one, for tests: the same numbers, to the last bit with `engine="loop"`.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`. A schedule is
            as long as the largest number of steps of a node.

    Raises:
        ValueError, TypeError: for invalid arguments.

    >>> from vecgym import Trainer
    >>> from vecgym.clock import Compute
    >>> from vecgym.models import Line
    >>> trainer, strategy = Trainer(Line(), torch.ones(64)), ADPSGDStrategy("sgd", "ring", lr=0.1)
    >>> compute = Compute([1.0, 2.0, 2.0, 4.0])
    >>> model = trainer.fit(strategy, 4, max_updates=3, compute=compute, device="cpu", progress=False)
    >>> [(row["sim_seconds"], row["staleness_max"], row["local_steps_total"]) for row in trainer.history.rows[1:]]
    [(2.0, 0, 4), (4.0, 1, 8), (6.0, 4, 12)]

    Reference: Lian, Zhang, Zhang and Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", arXiv
    1710.06952, algorithm 1. Deviations: its order is mix="before"; the nodes need not be a bipartite graph, which
    avoids deadlocks there, since an average is atomic here; any inner optimizer in place of SGD.
    """

    H = 1
    nodes_have = "params"

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        topology: str | Tensor | Sequence[Sequence[float]] = "complete",
        *,
        mix: Order = "after",
        together: bool = True,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, **inner)
        self.topology = _topology(topology)
        self.mix = check.choice("mix", mix, get_args(Order))
        self.together = check.flag("together", together)

    def check(self, num_nodes: int, max_steps: int) -> None:
        super().check(num_nodes, max_steps)
        self.weights(num_nodes)

    def weights(self, num_nodes: int) -> Tensor:
        """Return the weights `[K, K]`, which the probabilities of neighbours are proportional to.

        >>> ADPSGDStrategy(topology=[[0, 1], [1, 0]]).weights(num_nodes=2).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
        """
        if isinstance(self.topology, str):
            return FIXED[self.topology](num_nodes)
        give = f'[{num_nodes}, {num_nodes}], or a name such as "ring"'
        check.fits("topology is for", len(self.topology), num_nodes, give)
        return self.topology

    def rules(self, times: Times) -> PairRules:
        K = len(times.nominal)
        neighbour, first = Neighbours(self.weights(K), times.seed), self.mix == "before"
        return PairRules(
            (1,) * K, K, wires=times.wires(), absences=times.absences, neighbour=neighbour, average_first=first
        )

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return each node's `params`, `start`, its parameters at the start of its step, and `grads`, taken there."""
        own, shared = super().init(run, params)
        return {**own, "params": params, "start": params, "grads": tree.map(torch.zeros_like, params)}, shared

    def train(self, part: Part) -> None:
        """Compute gradients at the parameters of the start of the steps."""
        if written := part.simulation.engine.written:
            raise ValueError(
                f"the model's forward writes to its parameter {min(written)!r}, and in AD-PSGD a node's parameters "
                "change while its gradient is computed: use another strategy, or a forward that does not write."
            )
        part.own["grads"] = part.gradients(at=part.own["start"])
        part.own["loss"] = part.losses
        if part.missing or "missing" in part.own:
            rows = {name: [i in part.missing.get(name, ()) for i in range(len(part.rows))] for name in part.params}
            part.own["missing"] = part.apart({name: torch.tensor(some) for name, some in rows.items()})

    def arrive(self, part: Part) -> None:
        """Apply the gradient, taken at the start of the step, to the node's present parameters."""
        if "missing" in part.own:
            rows = part.flat(part.own["missing"])
            part.missing = {name: frozenset(some.nonzero()[:, 0].tolist()) for name, some in rows.items() if some.any()}
        part.params = self.optimized(part, part.params, part.own["grads"], part.counts)
        part.report(part.own["loss"])

    def average(self, part: Part) -> None:
        """Give both nodes their mean."""
        part.params = tree.map(lambda x: (x[:1] + x[1:]) / 2, part.params)
        pair = torch.tensor([part.event.info.node, part.event.info.neighbour])
        self.send(part, "average", Messages.of(pair, pair.flip(0)))

    def restart(self, part: Part) -> None:
        """Let nodes begin a step with their own present parameters."""
        part.own["start"] = part.params


class Neighbours:
    """The neighbour with which a node averages after a step: a function of (node, its own step count).

    >>> from vecgym.collectives.topology import ring
    >>> neighbour = Neighbours(ring(4), seed=0)
    >>> [neighbour(1, step) for step in range(8)]
    [0, 2, 0, 0, 0, 2, 0, 2]
    """

    def __init__(self, weights: Tensor, seed: int) -> None:
        self.seed = seed
        self.others, self.sums = [], []
        for node, row in enumerate(weights.tolist()):
            others = [other for other, weight in enumerate(row) if weight > 0 and other != node]
            self.others.append(others)
            self.sums.append(list(itertools.accumulate(row[other] for other in others)))
        self.drawn: dict[tuple[int, int], list[float]] = {}

    def __call__(self, node: int, step: int) -> int:
        others, sums = self.others[node], self.sums[node]
        if not others:
            return node
        block, place = divmod(step, BLOCK)
        if (node, block) not in self.drawn:
            generator = rng.generator(self.seed, "neighbour", node, block)
            self.drawn[node, block] = torch.rand(BLOCK, generator=generator, dtype=torch.float64).tolist()
        return others[min(bisect.bisect_right(sums, self.drawn[node, block][place] * sums[-1]), len(others) - 1)]


class Averaged(NamedTuple):
    """A node that ends a step averages with another."""

    time: float
    node: int
    neighbour: int
    what: str = "average"

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(sorted((self.node, self.neighbour)))


@dataclass(frozen=True)
class PairRules(Rules):
    """Rules of nodes that end each step with an average; `num_steps` is 1 each, and `buffer` the steps per update.

    The staleness of an `Arrival` counts the averages that have changed the node's parameters since it began.

    Attributes:
        neighbour: (node, its own step count) -> the node to average with; the node itself: no average.
        average_first: whether a node averages before its step.

    >>> from vecgym.simulation.events import Stop, schedule
    >>> rules = PairRules(num_steps=(1, 1), buffer=2, neighbour=lambda node, step: 1 - node)
    >>> for event in schedule(rules, lambda node, step: [1.0, 1.5][node], Stop(updates=1)):
    ...     print(event)
    Arrival(time=1.0, node=0, round=0, version=0, staleness=0, first_step=0, num_steps=1, begin=0.0, end=1.0)
    Averaged(time=1.0, node=0, neighbour=1, what='average')
    Restart(time=1.0, nodes=(0,), version=0, begins=(1.0,))
    Arrival(time=1.5, node=1, round=0, version=0, staleness=1, first_step=0, num_steps=1, begin=0.0, end=1.5)
    Averaged(time=1.5, node=1, neighbour=0, what='average')
    Update(time=1.5, version=1, num_arrivals=2)
    """

    neighbour: Callable[[int, int], int] = lambda node, step: node
    average_first: bool = False

    def partner(self, node: int, step: int, time: float) -> int:
        """Return the node with which `node` averages at the end of a step: itself, if its neighbour is absent."""
        other = self.neighbour(node, step)
        return other if self.absences is None or self.absences.is_there(other, time) else node

    def arrives(self, links: Traffic, node: int, end: float, first_step: int) -> float:
        """Let a node and its neighbour send each other their parameters."""
        other = self.partner(node, first_step, end)
        return end if other == node else links.swap(node, other, end)

    def begins(self, links: Traffic, node: int, time: float) -> float:
        return time

    def taken(self, event: Happening, wires: Wires) -> tuple[dict[int, float], dict[int, float]]:
        if not isinstance(event, Averaged):
            return {}, {}
        pair = dict.fromkeys((event.node, event.neighbour), wires.swapping(event.node, event.neighbour))
        return pair, pair

    def events(self, step_seconds: StepSeconds) -> Iterator[Happening]:
        changed = [0] * len(self.num_steps)
        for event in super().events(step_seconds):
            if isinstance(event, Restart):
                for node in event.nodes:
                    changed[node] = 0
            if isinstance(event, Arrival):
                yield from self._ended(event, changed)
            else:
                yield event

    def _ended(self, event: Arrival, changed: list[int]) -> list[Happening]:
        other = self.partner(event.node, event.first_step, event.end)
        step = event._replace(staleness=changed[event.node])
        if other == event.node:
            return [step]
        changed[other] += 1
        average = Averaged(event.time, event.node, other)
        return [average, step] if self.average_first else [step, average]


def _topology(topology: Any) -> str | Tensor:
    if isinstance(topology, str):
        return check.choice("topology", topology, tuple(FIXED), "a matrix [K, K] of weights")
    allowed = 'give a name such as "ring", or a matrix [K, K] of weights >= 0.'
    weights = check.has_values("topology", as_matrix(topology, "topology", allowed)).double()
    square = weights.dim() == 2 and weights.shape[0] == weights.shape[1]
    if not square or not bool((weights >= 0).all() & weights.isfinite().all()):
        raise ValueError(f"topology={weights.tolist()}: {allowed}")
    return weights
