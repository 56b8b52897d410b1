"""The seconds that a run takes on any network, computed from what it sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vecgym.clock import trace
from vecgym.clock.clock import Clock, StepRecord
from vecgym.clock.compute import Compute
from vecgym.clock.network import Network
from vecgym.clock.trace import Bar, PerNode, TimelineBase
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.core import check


@dataclass(frozen=True, repr=False)
class Timeline(TimelineBase):
    """When the steps of a run ended on a network.

    Attributes:
        seconds: until every node had ended the last step and received its messages. A differentiable tensor if the
            transfers' weights are.
        utilization: computed / (computed + waited), averaged over the nodes.
        step_seconds: when every node had ended each step, `[T]`.
        step_utilization: `utilization` up to the end of each step, `[T]`.
        per_node: how each node spent its time.
        network, compute: as given to `price`.

    >>> from vecgym.collectives.ledger import Transfer
    >>> steps = [[], [], [Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 2
    >>> timeline = price(steps, Network("8 Gbit/s"), Compute(1.0))
    >>> timeline
    Timeline(6 steps of 2 nodes: 8 s, 75.0 % computing)
    >>> timeline.num_nodes, timeline.num_steps, len(timeline.transfers), timeline.network
    (2, 6, 1, Network(8 Gbit/s))
    >>> timeline.step_seconds, timeline.per_node.waited
    (tensor([1., 2., 4., 5., 6., 8.], dtype=torch.float64), tensor([2., 2.], dtype=torch.float64))
    """

    step_seconds: Tensor
    step_utilization: Tensor
    network: Network
    _run: PricedRun = field(compare=False)

    plot = trace.plot_timeline  # as methods: their first argument is a timeline
    save_trace = trace.save_trace

    @property
    def num_steps(self) -> int:
        """T, the number of steps."""
        return len(self.step_seconds)

    @property
    def transfers(self) -> list[Transfer]:
        """The distinct transfers of the run."""
        return list(self._run.kinds)

    def bars(self, first: int = 0, last: int | None = None) -> list[Bar]:
        """Return what every node did in the steps from `first` to before `last`; see `vecgym.clock.trace.bars`.

        >>> timeline = price([[Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 3, Network(8e9), Compute(1.0))
        >>> [bar.kind for bar in timeline.bars(last=1)]
        ['forward', 'backward', 'forward', 'backward', 'send', 'send']
        """
        first, last = self._within(first, last)
        lags = [kind.lag if isinstance(kind.lag, int) else max(kind.lag) for kind in self._run.kinds]
        return trace.bars(self.records(max(0, first - 1 - max(lags, default=0)), last), first)

    def records(self, first: int = 0, last: int | None = None) -> list[StepRecord]:
        """Return what the nodes did in the steps from `first` to before `last`, for figures and traces.

        >>> timeline = price([[Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 3, Network(8e9), Compute(1.0))
        >>> [float(record.end[0]) for record in timeline.records(1)]
        [3.0, 5.0]
        """
        return self._run.records(*self._within(first, last))

    def __repr__(self) -> str:
        return self._describe("steps of")


def price(
    transfers: Ledger | Sequence[Sequence[Transfer]],
    network: Network,
    compute: Compute,
    *,
    num_nodes: int | None = None,
    sizes: Mapping[str, float] | None = None,
) -> Timeline:
    """Compute how long a run takes on a network. Nothing is trained, so price a run on as many networks as you like.

    `vecgym.guide.clock` explains what overlaps with what.

    Args:
        transfers: the ledger of a run, `trainer.ledger` or `vecgym.dry_run(...)`, which also records absent nodes; or
            the transfers of each step.
        network: the links between the nodes.
        compute: how long the nodes compute.
        num_nodes: K; only needed if neither the transfers nor the network nor the compute times determine it.
        sizes: the bytes of each parameter, {name: bytes} in the model's order, which determine the messages; a ledger
            contains them. Without them, each transfer is one message at the end of the backward pass.

    Raises:
        ValueError, TypeError: for a network or compute times of another number of nodes.

    >>> import torch
    >>> from vecgym import Trainer
    >>> from vecgym.models import Line
    >>> from vecgym.strategy import AllReduceStrategy
    >>> trainer = Trainer(Line(), torch.ones(64))
    >>> averaged = trainer.fit(AllReduceStrategy("sgd", lr=0.1), num_nodes=4, max_steps=5, device="cpu", progress=False)
    >>> price(trainer.ledger, Network("1 Gbit/s", latency="50 ms"), Compute(0.4))
    Timeline(5 steps of 4 nodes: 3.5 s, 57.1 % computing)
    """
    check.instance("network", network, Network, "a Network, such as Network(1e9, 0.05)")
    check.instance("compute", compute, Compute, "a Compute, such as Compute(0.4)")
    if num_nodes is not None:
        check.integer("num_nodes", num_nodes)
    computing = None
    if isinstance(transfers, Ledger):
        if transfers.asynchronous:
            raise ValueError(
                "price does not support asynchronous runs: their order of events depends on the network. Use "
                "trainer.timeline(), or train again with fit(network=, compute=)."
            )
        num_nodes, sizes = num_nodes or transfers.num_nodes, sizes or transfers.sizes
        kinds, steps = transfers.by_step()
        computing = transfers.computing()
    else:
        kinds, steps = _numbered(transfers)
    K = _num_nodes(kinds, network, compute, num_nodes)
    return PricedRun(network, compute, K, sizes or {}, kinds, steps, computing).timeline()


@dataclass(frozen=True)
class PricedRun:
    """A run to be priced: its distinct transfers, those of each step, and which nodes compute in each step."""

    network: Network
    compute: Compute
    num_nodes: int
    sizes: Mapping[str, float]
    kinds: list[Transfer]
    steps: list[tuple[int, ...]]
    computing: Tensor | None

    def timeline(self) -> Timeline:
        """Advance the clock through all steps."""
        clock, computed = self._start(len(self.steps))
        ends = torch.cat([computed[:0], *self._ends(clock, computed)])  # [T, K]
        step_utilization = torch.where(ends > 0, computed.cumsum(0) / ends, 1.0).mean(1)
        step_seconds = ends.amax(1)
        total = (step_seconds[-1], step_utilization[-1]) if len(ends) else (0.0, 1.0)
        seconds, utilization = total if ends.requires_grad else map(float, total)
        return Timeline(
            seconds, utilization, PerNode(clock.computed, clock.ends - clock.computed, clock.sent, clock.received),
            self.compute, step_seconds, step_utilization, self.network, self,
        )  # fmt: skip

    def records(self, first: int, last: int) -> list[StepRecord]:
        """Return what the nodes did in these steps."""
        clock, computed = self._start(last)
        for _ in self._ends(clock, computed[:first]):
            pass
        clock.records = []
        for step in range(first, last):
            clock.advance(computed[step], clock.plans(self._transfers(step)))
        return clock.records

    def _start(self, num_steps: int) -> tuple[Clock, Tensor]:
        """Return a new clock, and how long each node computes in each of the first steps, `[T, K]`."""
        computed = self.compute.of_steps(num_steps, self.num_nodes)
        if self.computing is not None:  # absent nodes do not compute
            computed = computed.where(self.computing[:num_steps], 0.0)
        return Clock(self.network, self.compute, self.num_nodes, self.sizes), computed

    def _ends(self, clock: Clock, computed: Tensor) -> Iterator[Tensor]:
        """Yield when each node ended each step, `[n, K]` for several steps at a time."""
        while clock.step < len(computed):
            step = clock.step
            repeats = self._num_repeats(step, len(computed))
            plans = clock.plans(self._transfers(step))
            if plans:
                yield clock.repeat(computed[step : step + repeats], plans)
                continue
            # The step before a message is due ends when the message arrives, so it is made by itself.
            until = step + repeats if clock.next_due is None else min(step + repeats, clock.next_due - 1)
            if until > step:
                yield clock.idle(computed[step:until])
            else:
                clock.advance(computed[step])
                yield clock.ends[None]

    def _num_repeats(self, step: int, end: int) -> int:
        """Return how many steps from this one on send the same."""
        last = step + 1
        while last < end and self.steps[last] == self.steps[step]:
            last += 1
        return last - step

    def _transfers(self, step: int) -> list[Transfer]:
        return [self.kinds[kind] for kind in self.steps[step]]


def _numbered(transfers: Sequence[Sequence[Transfer]]) -> tuple[list[Transfer], list[tuple[int, ...]]]:
    """Return the distinct transfers, and their indices for each step. Those whose weight is a tensor are distinct."""
    give = "a Ledger, or for each step a list of Transfers"
    kinds: list[Transfer] = []
    index: dict[object, int] = {}
    steps = []
    for step in check.instance("transfers", transfers, (list, tuple), give):
        numbers = []
        for transfer in check.instance("transfers", step, (list, tuple), give):
            check.instance("transfers", transfer, Transfer, give)
            key = id(transfer) if isinstance(transfer.weight, Tensor) else transfer
            numbers.append(index.setdefault(key, len(kinds)))
            if numbers[-1] == len(kinds):
                kinds.append(transfer)
        steps.append(tuple(numbers))
    return kinds, steps


def _num_nodes(kinds: list[Transfer], network: Network, compute: Compute, num_nodes: int | None) -> int:
    counts = {kind.num_nodes for kind in kinds} | ({num_nodes} if num_nodes is not None else set())
    if len(counts) > 1:
        raise ValueError(f"the transfers are of runs of {sorted(counts)} nodes: price one run at a time.")
    candidates = [*counts, network.num_nodes, compute.num_nodes]
    num_nodes = next((n for n in candidates if n is not None), None)
    if num_nodes is None:
        raise ValueError("the number of nodes is unknown, since nothing was sent: give num_nodes.")
    network.check(num_nodes)
    return num_nodes
