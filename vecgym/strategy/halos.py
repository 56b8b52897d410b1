"""HALoS: a server in each region takes what its nodes send, and a global one what the regions send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vecgym.core import check
from vecgym.optim import OptimSpec
from vecgym.strategy.asynchronous import EventDriven, agreed, countable, counts_of
from vecgym.strategy.inner import InnerOptions, takes_options
from vecgym.strategy.servers import DelayedNesterov, Server, Staleness, StalenessName, one_number, staleness_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack

Regions = tuple[tuple[int, ...], ...]


class HALoSStrategy(EventDriven):
    """Nodes send to the server of their region, regions to a global server, and nobody waits.

    A node trains in rounds as in `AsyncStrategy`, with its region's server in place of the one server: of each movement
    that arrives, the region's server makes an update, x <- local_server(x, w(s) Delta), and adds what it has moved,
    x before - x after, to A. After every `local_updates` arrivals it sends A to the global server and starts another A;
    it goes on while the message is under way. The global server makes an update, z <- global_server(z, A), and sends z
    back; on the reply, x <- (1 - alpha) x + alpha z.

    A run is measured in updates of the global server, whose model is the one that is evaluated. A row of the history is
    of the movements in the message of that update; `staleness` counts versions of the region's server; `region` and
    `region_staleness`, versions of the global server, are of the message. Order, learning rates, data, randomness and
    the optimizers' states: as in `AsyncStrategy`.

    Bytes per round: b * P up and as many down; per message of a region b * P, and as many for the reply. In the ledger
    the server of region r has the id K + r, and the global one K + R.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        regions: the nodes of each, every node in one, such as [[0, 1], [2, 3]]; or how many: the first gets the first
            nodes, and sizes differ by at most 1.
        local_server: of each region, DelayedNesterov(lr=0.2 * 16, momentum=0.9, buffer=16) when not given: an arrival
            moves the region by 0.2 times its movement, and the momentum comes with every 16th. A buffer of None is the
            number of the region's nodes.
        global_server: DelayedNesterov(lr=0.15 * 2, momentum=0.5, buffer=2) when not given, likewise. A buffer of None
            is the number of regions.
        H: local steps of a round of the fastest node.
        local_updates: arrivals at a region's server of which it sends a message.
        alpha: in [0, 1], how far a region goes to the global model on a reply.
        dylu: H_i = max(1, ceil(H v_i / max v)), with v_i the speed of node i. False: H for all.
        local_steps: H_i of each node, `[K]`, in place of H and dylu.
        staleness: w: "none", 1; "inverse_sqrt", (1 + s)^(-1/2); or a function of s.
        between: the network of the servers, a `vecgym.clock.Network` of R nodes, or a pair (bandwidth, latency); None:
            their messages take no time. `fit(network=)` is that of the nodes: with a matrix, a node's link to its
            server is that of its slowest way within the region.
        together: as for `AsyncStrategy`.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`. A schedule is
            as long as the most steps that a node makes.

    Raises:
        ValueError, TypeError: saying what is allowed.

    >>> from vecgym import Trainer
    >>> from vecgym.clock import Compute
    >>> from vecgym.models import Line
    >>> trainer, strategy = Trainer(Line(), torch.ones(64)), HALoSStrategy("sgd", 2, local_updates=2, H=2, lr=0.1)
    >>> compute = Compute([1.0, 2.0, 2.0, 4.0])
    >>> model = trainer.fit(strategy, 4, max_updates=4, compute=compute, device="cpu", progress=False)
    >>> [(row["sim_seconds"], row["region"], row["local_steps_total"]) for row in trainer.history.rows[1:]]
    [(2.0, 0, 3), (4.0, 0, 6), (4.0, 1, 8), (6.0, 0, 11)]

    Reference: Kim et al., "HALoS: Hierarchical Asynchronous Local SGD over Slow Networks for Geo-Distributed Large
    Language Model Training", arXiv 2506.04531, and github.com/utnslab/halos, whose run_halos.sh has the defaults; its
    rates, too, are multiplied by the buffer. Deviations: A starts anew when it is sent; the paper's code does so on
    the reply, so that what moves in between never leaves the region, and counts the arrivals from there. Nodes keep
    their shard of the data and their optimizer's state.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        regions: int | Sequence[Sequence[int]] = 2,
        local_server: Server | None = None,
        global_server: Server | None = None,
        *,
        H: int = 8,
        local_updates: int = 32,
        alpha: float | Tensor = 0.25,
        dylu: bool = True,
        local_steps: Sequence[int] | Tensor | None = None,
        staleness: StalenessName | Staleness = "none",
        between: Any = None,
        together: bool = True,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, **inner)
        self.regions = _regions(regions)
        self.local_server = _of_each_message("local_server", local_server, DelayedNesterov(0.2 * 16, 0.9, 16))
        self.global_server = _of_each_message("global_server", global_server, DelayedNesterov(0.15 * 2, 0.5, 2))
        self.H = countable("H", check.integer("H", H, what="optimizer steps of a round"))
        local_updates = check.integer("local_updates", local_updates, what="arrivals of which a region sends")
        self.local_updates = countable("local_updates", local_updates)
        self.alpha = one_number("alpha", alpha, "[0, 1]", "how far a region goes to the global model")
        self.dylu = check.flag("dylu", dylu)
        self.local_steps = None if local_steps is None else counts_of(local_steps)
        self.staleness = agreed("staleness", staleness, "none", self.local_server.staleness)
        self.weight = staleness_weight("staleness", self.staleness)
        self.region_weight = staleness_weight("staleness", self.global_server.staleness or "none")
        self.between = between
        self.together = check.flag("together", together)

    def check(self, num_nodes: int, max_steps: int) -> None:
        """Raise a ValueError if the strategy cannot work for this run."""
        self.regions_of(num_nodes)
        self.check_rounds(self.local_steps, num_nodes)

    def check_updates(self, num_nodes: int, num_updates: int) -> None:
        regions = self.regions_of(num_nodes)
        self.global_server.check(len(regions), num_updates)
        for region in regions:
            self.local_server.check(len(region), num_updates * self.local_updates)

    def server_of(self, num_nodes: int) -> Server:
        return self.global_server.of(len(self.regions_of(num_nodes)))

    def regions_of(self, num_nodes: int) -> Regions:
        """Return the nodes of each region.

        >>> HALoSStrategy(regions=2).regions_of(5)
        ((0, 1, 2), (3, 4))
        """
        if isinstance(self.regions, int):
            if self.regions > num_nodes:
                raise ValueError(
                    f"regions={self.regions} is more than the {num_nodes} nodes: give at most {num_nodes}."
                )
            return tuple(tuple(part.tolist()) for part in torch.arange(num_nodes).tensor_split(self.regions))
        if sorted(node for region in self.regions for node in region) != list(range(num_nodes)):
            raise ValueError(
                f"regions={[list(region) for region in self.regions]} and the run has nodes 0 to {num_nodes - 1}: put "
                "every node into one region."
            )
        return self.regions

    def steps_of_rounds(self, step_seconds: Sequence[float]) -> tuple[int, ...]:
        """Return H_i of each node, whose steps take so long.

        >>> HALoSStrategy(H=8).steps_of_rounds([0.1, 0.25, 9.0])
        (8, 4, 1)
        """
        if self.local_steps is not None:
            return self.local_steps
        if not self.dylu:
            return (self.H,) * len(step_seconds)
        fastest = min(step_seconds)
        # A share that is whole but for rounding is whole: -(-x // 1) is the ceiling.
        return tuple(max(1, int(-(-(self.H * (fastest / s if s > 0 else 1.0) - 1e-9) // 1))) for s in step_seconds)


def _regions(given: Any) -> int | Regions:
    if isinstance(given, int) and not isinstance(given, bool):
        return check.integer("regions", given, what="or the list of each region's nodes")
    if not isinstance(given, (list, tuple)) or not all(isinstance(part, (list, tuple)) and part for part in given):
        raise TypeError(
            f"regions={given!r} must be a number of regions, or the nodes of each, such as [[0, 1], [2, 3]]."
        )
    return tuple(tuple(check.integer("regions", node, 0, what="ids of nodes") for node in part) for part in given)


def _of_each_message(name: str, given: Server | None, default: Server) -> Server:
    """Return a server that makes an update of each movement."""
    if given is None:
        return default
    found: Server = check.instance(name, given, Server, "a server such as DelayedNesterov(lr=0.2, buffer=16)")
    if found.buffer not in (None, 1):
        raise ValueError(
            f"{name}={found!r} waits for {found.buffer} movements, and here each makes an update: give buffer=1, or "
            "DelayedNesterov, whose momentum waits."
        )
    return found
