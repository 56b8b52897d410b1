"""What a run costs in seconds: computed from what it sent, on any network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vecgym.clock import trace
from vecgym.clock.clock import Clock, Record
from vecgym.clock.compute import Compute
from vecgym.clock.network import Network
from vecgym.clock.trace import Bar, PerNode, Recorded
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.core import check


@dataclass(frozen=True, repr=False)
class Timeline(Recorded):
    """When the steps of a run ended on a network.

    Attributes:
        seconds: until every node had ended the last step and had what it was then sent. A tensor that can be
            differentiated where the transfers' weights can.
        utilization: computed / (computed + waited), the mean over the nodes.
        step_seconds: when every node had ended each step, `[T]`.
        step_utilization: `utilization` up to there, `[T]`.
        per_node: where the seconds of each node went.
        network, compute: what it was computed for.

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
    _run: Priced = field(compare=False)

    plot = trace.plot_timeline  # methods: they take a timeline first
    save_trace = trace.save_trace

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.step_seconds)

    @property
    def transfers(self) -> list[Transfer]:
        """The different transfers of the run."""
        return list(self._run.kinds)

    def bars(self, first: int = 0, last: int | None = None) -> list[Bar]:
        """What every node did in the steps from `first` to before `last`, as bars; see `vecgym.clock.trace.bars`.

        >>> timeline = price([[Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 3, Network(8e9), Compute(1.0))
        >>> [bar.kind for bar in timeline.bars(last=1)]
        ['forward', 'backward', 'forward', 'backward', 'send', 'send']
        """
        first, last = self._within(first, last)
        lags = [kind.lag if isinstance(kind.lag, int) else max(kind.lag) for kind in self._run.kinds]
        return trace.bars(self.records(max(0, first - 1 - max(lags, default=0)), last), first)

    def records(self, first: int = 0, last: int | None = None) -> list[Record]:
        """What the nodes did in the steps from `first` to before `last`, for figures and traces.

        >>> timeline = price([[Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 3, Network(8e9), Compute(1.0))
        >>> [float(record.end[0]) for record in timeline.records(1)]
        [3.0, 5.0]
        """
        return self._run.records(*self._within(first, last))

    def __repr__(self) -> str:
        return self._shown("steps of")


def price(
    transfers: Ledger | Sequence[Sequence[Transfer]],
    network: Network,
    compute: Compute,
    *,
    num_nodes: int | None = None,
    sizes: Mapping[str, float] | None = None,
) -> Timeline:
    """Say how long a run takes on a network: as often as you like, for nothing is trained again.

    What overlaps: see `vecgym.guide.clock`.

    Args:
        transfers: the ledger of a run, `trainer.ledger` or `vecgym.dry_run(...)`, which knows who was absent; or the
            transfers of each step.
        network: the links between the nodes.
        compute: how long they compute.
        num_nodes: K; a ledger, and transfers, know it.
        sizes: the bytes of each parameter, {name: bytes} in the model's order, of which one message each is sent; a
            ledger knows them. Without, each transfer is one message at the end of the backward pass.

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
                "the ledger is of an asynchronous run, whose order of events depends on the network: see "
                "trainer.timeline(), or train again, fit(network=, compute=)."
            )
        num_nodes, sizes = num_nodes or transfers.num_nodes, sizes or transfers.sizes
        kinds, steps = transfers.by_step()
        computing = transfers.computing()
    else:
        kinds, steps = _numbered(transfers)
    K = _num_nodes(kinds, network, compute, num_nodes)
    return Priced(network, compute, K, sizes or {}, kinds, steps, computing).timeline()


@dataclass(frozen=True)
class Priced:
    """A run and what it is priced for: the different transfers, which each step has, and who computes in it."""

    network: Network
    compute: Compute
    num_nodes: int
    sizes: Mapping[str, float]
    kinds: list[Transfer]
    steps: list[tuple[int, ...]]
    computing: Tensor | None

    def timeline(self) -> Timeline:
        """Go through all steps."""
        clock, computed = self._begun(len(self.steps))
        ends = torch.cat([computed[:0], *self._ends(clock, computed)])  # [T, K]
        used = torch.where(ends > 0, computed.cumsum(0) / ends, 1.0).mean(1)
        step_seconds = ends.amax(1)
        total = (step_seconds[-1], used[-1]) if len(ends) else (0.0, 1.0)
        seconds, utilization = total if ends.requires_grad else map(float, total)
        return Timeline(
            seconds, utilization, PerNode(clock.computed, clock.ends - clock.computed, clock.sent, clock.received),
            self.compute, step_seconds, used, self.network, self,
        )  # fmt: skip

    def records(self, first: int, last: int) -> list[Record]:
        """What the nodes did in these steps."""
        clock, computed = self._begun(last)
        for _ in self._ends(clock, computed[:first]):
            pass
        clock.records = []
        for step in range(first, last):
            clock.advance(computed[step], clock.plans(self._transfers(step)))
        return clock.records

    def _begun(self, num_steps: int) -> tuple[Clock, Tensor]:
        """A clock at the beginning, and for how long each node computes in each of the first steps, `[T, K]`."""
        found = self.compute.of_steps(num_steps, self.num_nodes)
        if self.computing is not None:  # not while it is absent
            found = found.where(self.computing[:num_steps], 0.0)
        return Clock(self.network, self.compute, self.num_nodes, self.sizes), found

    def _ends(self, clock: Clock, computed: Tensor) -> Iterator[Tensor]:
        """When each node ended each step, `[n, K]` at a time: between exchanges nothing happens."""
        while clock.step < len(computed):
            step = clock.step
            alike = self._alike(step, len(computed))
            planned = clock.plans(self._transfers(step))
            if planned:
                yield clock.repeat(computed[step : step + alike], planned)
                continue
            # The last step before something is due ends when that is there.
            until = step + alike if clock.next_due is None else min(step + alike, clock.next_due - 1)
            if until > step:
                yield clock.idle(computed[step:until])
            else:
                clock.advance(computed[step])
                yield clock.ends[None]

    def _alike(self, step: int, end: int) -> int:
        """How many steps from this one on send the same."""
        last = step + 1
        while last < end and self.steps[last] == self.steps[step]:
            last += 1
        return last - step

    def _transfers(self, step: int) -> list[Transfer]:
        return [self.kinds[kind] for kind in self.steps[step]]


def _numbered(transfers: Sequence[Sequence[Transfer]]) -> tuple[list[Transfer], list[tuple[int, ...]]]:
    """The different transfers, and which each step has. One whose weight is a tensor is different from all others."""
    give = "a Ledger, or for each step a list of Transfers"
    kinds: list[Transfer] = []
    known: dict[object, int] = {}
    steps = []
    for step in check.instance("transfers", transfers, (list, tuple), give):
        made = []
        for transfer in check.instance("transfers", step, (list, tuple), give):
            check.instance("transfers", transfer, Transfer, give)
            key = id(transfer) if isinstance(transfer.weight, Tensor) else transfer
            made.append(known.setdefault(key, len(kinds)))
            if made[-1] == len(kinds):
                kinds.append(transfer)
        steps.append(tuple(made))
    return kinds, steps


def _num_nodes(kinds: list[Transfer], network: Network, compute: Compute, given: int | None) -> int:
    found = {kind.num_nodes for kind in kinds} | ({given} if given is not None else set())
    if len(found) > 1:
        raise ValueError(f"the transfers are of runs of {sorted(found)} nodes: price one run at a time.")
    known = [*found, network.num_nodes, compute.num_nodes]
    num_nodes = next((n for n in known if n is not None), None)
    if num_nodes is None:
        raise ValueError("nothing was sent, and nothing says how many nodes there are: give num_nodes.")
    network.check(num_nodes)
    return num_nodes
