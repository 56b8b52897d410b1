"""AD-PSGD: a node that ends a step averages with one neighbour, and nobody waits (Lian et al., arXiv 1710.06952)."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from vecgym.core import check, rng
from vecgym.optim import OptimSpec
from vecgym.strategy.asynchronous import EventDriven
from vecgym.strategy.gossip import FIXED
from vecgym.strategy.inner import InnerOptions, takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

Order = Literal["after", "before"]
BLOCK = 64  # neighbours that are drawn at a time


class ADPSGDStrategy(EventDriven):
    """Every node trains by itself, and after each step averages with one neighbour, whatever that one is doing.

    Node i computes the gradient g_i at the parameters that it has when it begins a step. When it ends:
    theta_i <- optimizer_i(theta_i, g_i), where theta_i may have been averaged since; then
    theta_i, theta_j <- (theta_i + theta_j) / 2 with a random neighbour j, which goes on with the step that it is in:
    the gradient of where it began is applied to what its parameters are by then. An average is atomic.

    With `fit(network=)` the two send each other their parameters first, both ways at once, when both their links are
    free. Node i waits for that, node j computes on. Node i's optimizer step and the average happen at the end of it,
    with what the parameters are by then. Without a network averages take no time.

    There is no server. An *update* is as many steps as there are nodes, K, of whichever nodes; a run is measured in
    them, `fit(max_updates=)`, which is the mean number of steps of a node, as `max_steps=`. A row of the history is for
    an update: a node's loss is the mean over its steps in it, nan without any; `staleness` counts the averages that
    have changed a node's parameters while it computed its gradient. What is evaluated is the mean of the nodes.

    Ties in time go by the node's id; all steps that end at one time are ended before any of these nodes begins its
    next. Learning rate, data, randomness and neighbours of a node go by its own count of steps. Bytes per step: b * P
    from i to j and as many back.

    Args:
        inner_optim: the optimizer, AdamW when not given; its state stays on its node.
        topology: "complete", "ring", "torus" or "exponential"; or a matrix `[K, K]` of weights >= 0: node i draws j
            with a probability in proportion to W_ij, j other than i. A node without neighbours trains alone.
        mix: "after": step, then average, as above; "before": average, then step: j gets the mean without g_i.
        together: compute all gradients whose steps have begun in one call when one of them is needed. False: one by
            one, for proof: the same numbers, to the last bit with `engine="loop"`.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`. A schedule is
            as long as the most steps that a node makes.

    Raises:
        ValueError, TypeError: saying what is allowed.

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
        check.choice("mix", mix, get_args(Order))
        self.mix: Order = mix
        self.together = check.flag("together", together)

    def check(self, num_nodes: int, max_steps: int) -> None:
        """Raise a ValueError if the strategy cannot work for this run."""
        self.check_rounds(None, num_nodes)
        self.weights(num_nodes)

    def weights(self, num_nodes: int) -> Tensor:
        """Return what the probabilities of neighbours are in proportion to, `[K, K]`.

        >>> ADPSGDStrategy(topology=[[0, 1], [1, 0]]).weights(num_nodes=2).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
        """
        if isinstance(self.topology, str):
            return FIXED[self.topology](num_nodes)
        if len(self.topology) != num_nodes:
            raise ValueError(
                f"topology is for {len(self.topology)} nodes and the run has {num_nodes}: give [{num_nodes}, "
                f'{num_nodes}], or a name such as "ring".'
            )
        return self.topology


class Neighbours:
    """With whom each node averages after each of its steps: a function of (node, its own count of steps).

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


def _topology(given: Any) -> str | Tensor:
    if isinstance(given, str):
        return check.choice("topology", given, tuple(FIXED), "a matrix [K, K] of weights")
    allowed = 'topology must be a name such as "ring", or a matrix [K, K] of weights >= 0'
    try:
        weights = torch.as_tensor(given, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{allowed}, and is {given!r}.") from error
    if (
        weights.dim() != 2
        or weights.shape[0] != weights.shape[1]
        or not bool((weights >= 0).all() & weights.isfinite().all())
    ):
        raise ValueError(f"{allowed}, and is {weights.tolist()}.")
    return weights
