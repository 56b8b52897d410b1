"""The messages of a step: their order, when they leave and arrive, and how long they occupy the nodes' links.

A `Planner` turns transfers into messages; an exchange computes when they arrive.

`Rendezvous` is a collective among groups of nodes: it begins once the last participant is ready and all their links are
free, and occupies the links until it ends. `Mesh` is messages from node to node: each leaves once its sender is ready
and the sender's previous one has been delivered, and concurrent messages of a node share its link. Both take a sequence
of M messages in one call: a queue that serves them in order is a running maximum.

A sequence of times that follow from one another, e_m = max(e_(m-1), r_m) + d_m, is D_m + max(e_0, max_(k <= m) (r_k -
D_(k-1))) with D the running sum of d.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vecgym.collectives.base import bucketed
from vecgym.collectives.ledger import Transfer
from vecgym.collectives.topology import Islands, Links, ServerLinks

if TYPE_CHECKING:
    from vecgym.clock.compute import Compute
    from vecgym.clock.cost import Team
    from vecgym.clock.network import Routes

NEVER = -torch.inf  # the arrival of a message that is not for this node


class Passage(NamedTuple):
    """The times of a sequence of messages.

    Attributes:
        arrival: when each message arrives, `[K, M]`; -inf where a node receives none.
        up, down: until when the link of each node, and of the server, is busy, `[K + 1]`.
    """

    arrival: Tensor
    up: Tensor
    down: Tensor


def queued(ready: Tensor, service: Tensor, free: Tensor) -> Tensor:
    """Return when each of M messages in a first-in-first-out queue has been served, `[..., M]`.

    Args:
        ready: when each joins the queue, `[..., M]`.
        service: how long each is served, `[..., M]`.
        free: when the queue becomes free, `[...]`.

    >>> queued(torch.tensor([0.0, 1.0, 9.0]), torch.tensor([3.0, 1.0, 1.0]), torch.tensor(2.0))
    tensor([ 5.,  6., 10.])
    """
    total = service.cumsum(-1)
    begin = (ready - (total - service)).cummax(-1).values
    return total + torch.maximum(begin, free[..., None])


def paired(ready: Tensor, service: Tensor, carrying: Tensor, free: Tensor) -> Tensor:
    """Return when each of M messages ends, `[..., M]`, where two are in flight at a time and share a link.

    Each begins once one of the two before it has ended. They are delivered in order.

    Args:
        ready, free: as for `queued`.
        service: how long each takes by itself, `[..., M]`.
        carrying: how long each occupies the link, `[..., M]`.

    >>> ready, service, zero = torch.zeros(4), torch.full((4,), 3.0), torch.tensor(0.0)
    >>> paired(ready, service, torch.full((4,), 0.5), zero), paired(ready, service, service, zero)
    (tensor([3., 3., 6., 6.]), tensor([ 3.,  6.,  9., 12.]))
    """
    first = last = link = free
    ends = []
    for joined, alone, busy in zip(ready.unbind(-1), service.unbind(-1), carrying.unbind(-1)):
        begin = torch.maximum(joined, torch.minimum(first, last))
        link = torch.maximum(link, begin) + busy
        end = torch.maximum(begin + alone, link)
        first, last = torch.maximum(first, last), end
        ends.append(end)
    return torch.stack(ends, -1).cummax(-1).values


class Rendezvous:
    """Collectives among groups of nodes.

    Args:
        routes: of the network.
        groups: the participants of each; node K is a server.
        receivers: the nodes that need the result of a single group, participants or not; None: all participants.
        pairs: whether two messages are in flight at a time.

    Attributes:
        members: the nodes of each group, padded with its first one, `[G, n]`.
        group: the group of each node and of the server, `[K + 1]`; G: none.
        source: the group whose result each node needs, `[K]`; G: none.

    >>> from vecgym.clock.network import Network, Routes
    >>> rendezvous = Rendezvous(Routes(Network("8 bit/s"), 2), [(0, 1)])
    >>> ready, free = torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    >>> ten_bytes = rendezvous.amounts("mean", torch.tensor([10.0], dtype=torch.float64))
    >>> rendezvous.run(ready, ten_bytes, free, free).arrival
    tensor([[12.],
            [12.]], dtype=torch.float64)
    """

    def __init__(
        self, routes: Routes, groups: Sequence[Sequence[int]], receivers: Sequence[int] | None = None,
        pairs: bool = False,
    ) -> None:  # fmt: skip
        K = routes.num_nodes
        self.routes, self.num_nodes, self.pairs = routes, K, pairs
        self.groups = [tuple(group) for group in groups]
        width = max(map(len, self.groups))
        self.members = torch.tensor([[*group, *[group[0]] * (width - len(group))] for group in self.groups])  # [G, n]
        self.group = torch.full((K + 1,), len(self.groups))  # of each node and the server; G: none
        for g, group in enumerate(self.groups):
            self.group[list(group)] = g
        self.source = self.group[:K]
        if receivers is not None:
            self.source = torch.ones(K, dtype=torch.long)
            self.source[list(receivers)] = 0

    def amounts(self, operation: str, sizes: Tensor) -> Tensor:
        """Return the seconds that messages of these sizes, `[M]`, occupy the links, `[..., M]`."""

        @functools.cache  # groups with the same links share a team
        def seconds(team: Team) -> Tensor:
            if not self.pairs:
                return self.routes.seconds(operation, team, sizes)
            # Without latency: the seconds that occupy the link.
            carrying = replace(team, latency=torch.zeros_like(team.latency), server_latency=0.0)
            return torch.stack([self.routes.seconds(operation, x, sizes) for x in (team, carrying)])

        members = [tuple(node for node in group if node < self.num_nodes) for group in self.groups]
        return torch.stack([seconds(self.routes.team(nodes)) for nodes in members], -2)  # [G, M], of pairs [2, G, M]

    def run(self, ready: Tensor, amounts: Tensor, up: Tensor, down: Tensor) -> Passage:
        """Send messages, ready at the nodes at `[K, M]`, in this order, over links that are busy until `[K + 1]`."""
        server_ready = ready.new_full((1, ready.shape[1]), NEVER)
        first = torch.cat([ready, server_ready])[self.members].amax(1)
        free = torch.maximum(up, down)[self.members].amax(1)
        end = paired(first, amounts[0], amounts[1], free) if self.pairs else queued(first, amounts, free)  # [G, M]
        ends = torch.cat([end, end.new_full((1, end.shape[1]), NEVER)])  # and of no group
        busy = ends[self.group, -1]
        return Passage(ends[self.source], torch.maximum(up, busy), torch.maximum(down, busy))

    def busy(self, amounts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the seconds that messages occupy each node's link, up and down, `[K]`."""
        alone = amounts.sum(-1)
        seconds = torch.maximum(alone[0] / 2, alone[1]) if self.pairs else alone
        total = torch.cat([seconds, seconds.new_zeros(1)])[self.group[: self.num_nodes]]
        return total, total

    def seconds_of(self, amount: Tensor) -> Tensor:
        """Return the seconds that one message by itself occupies each node's link, `[K]`."""
        alone = amount[0] if self.pairs else amount
        return torch.cat([alone, alone.new_zeros(1)])[self.group[:-1]]

    def met_by(self, node: int) -> Sequence[int]:
        """Return the nodes that a node waits for."""
        group = int(self.source[node])
        return [i for i in self.groups[group] if i < self.num_nodes] if group < len(self.groups) else []


class Mesh:
    """Messages from node to node, over the links of a graph.

    A node sends to all its neighbours in parallel. Over one link of B bytes per second, d messages take d S / B and
    arrive together; over a link for each pair, each takes its own time. The node's next messages leave after that.

    The methods are those of `Rendezvous`.

    Args:
        routes: of the network.
        senders, receivers: of each message.

    >>> from vecgym.clock.network import Network, Routes
    >>> mesh = Mesh(Routes(Network("8 bit/s"), 2), [0], [1])
    >>> ready, free = torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    >>> mesh.run(ready, mesh.amounts("permute", torch.tensor([10.0], dtype=torch.float64)), free, free).arrival
    tensor([[-inf],
            [11.]], dtype=torch.float64)
    """

    def __init__(self, routes: Routes, senders: Sequence[int], receivers: Sequence[int]) -> None:
        K = self.num_nodes = routes.num_nodes
        self.senders, self.receivers = list(senders), list(receivers)
        j, i = torch.tensor(self.senders), torch.tensor(self.receivers)
        latency, pace = routes.links(j, i)
        out, into = (torch.bincount(x, minlength=K).to(torch.float64) for x in (j, i))
        if routes.pace is None:
            self.tx, self.rx = routes.up * out, routes.down * into  # seconds per byte of a message, [K]
            pace = self.tx[j]
        else:
            zero = pace.new_zeros(K)
            self.tx, self.rx = (zero.scatter_reduce(0, x, pace, "amax") for x in (j, i))
        self._from, self._to, self._latency, self._pace = j, i, latency[:, None], pace[:, None]
        self._sends, self._receives = out > 0, into > 0
        self.lag = torch.zeros(K, dtype=torch.float64).scatter_reduce(0, j, latency, "amax")  # until all have it

    def amounts(self, operation: str, sizes: Tensor) -> Tensor:
        return sizes

    def run(self, ready: Tensor, amounts: Tensor, up: Tensor, down: Tensor) -> Passage:
        K = self.num_nodes
        receiving = self.rx[:, None] * amounts
        sending = self.tx[:, None] * amounts + self.lag[:, None]  # [K, M]
        sent = queued(ready, sending, up[:K])
        begin = torch.maximum(ready, torch.cat([up[:K, None], sent[:, :-1]], 1))
        arriving = begin[self._from] + self._latency  # of each link, [E, M]
        at = self._to[:, None].expand_as(arriving)
        first_byte = torch.full_like(ready, torch.inf).scatter_reduce(0, at, arriving, "amin")
        last_byte = torch.full_like(ready, NEVER).scatter_reduce(0, at, arriving + self._pace * amounts, "amax")
        received = queued(torch.maximum(last_byte - receiving, first_byte), receiving, down[:K])
        sends, receives = self._sends, self._receives
        return Passage(
            received.masked_fill(~receives[:, None], NEVER),
            torch.cat([torch.where(sends, sent[:, -1], up[:K]), up[K:]]),
            torch.cat([torch.where(receives, received[:, -1], down[:K]), down[K:]]),
        )

    def busy(self, amounts: Tensor) -> tuple[Tensor, Tensor]:
        return self.tx * amounts.sum(), self.rx * amounts.sum()

    def seconds_of(self, amount: Tensor) -> Tensor:
        """Return the seconds that messages of a size occupy each node's link, `[K]`."""
        return torch.maximum(self.tx, self.rx) * amount

    def met_by(self, node: int) -> Sequence[int]:
        return sorted({j for j, i in zip(self.senders, self.receivers) if i == node})


Exchange = Rendezvous | Mesh


class Messages(NamedTuple):
    """The messages of one transfer, each with some of the parameters.

    Attributes:
        transfer: the transfer.
        exchange: computes when they arrive.
        layers: the first layer of each, `[M]`, descending; a message leaves after the backward pass of that layer.
        last: the last layer of each, `[M]`.
        sizes: bytes of each, `[M]`.
        amounts: how long each occupies the links, see `Rendezvous.amounts`, `[..., M]`.
    """

    transfer: Transfer
    exchange: Exchange
    layers: Tensor
    last: Tensor
    sizes: Tensor
    amounts: Tensor


# Consecutive messages of a plan with the same exchange: the exchange, their places, and their amounts.
Burst = tuple[Exchange, slice, Tensor]


class MessagePlan(NamedTuple):
    """The messages of a step that have the same weight, in the order in which they leave.

    Attributes:
        transfers: the messages of each transfer.
        weight: see `Transfer`.
        order: (transfer, its message) of each message in turn.
        bursts: the same, consecutive messages of one exchange together.
        leaves: the fraction of the backward pass after which each leaves, `[M]`.
        needs: for each lag and each exchange: steps until needed, the place of the last message needed then, the
            fraction of the forward pass that needs it, and by which nodes, `[K]`; None: by all. Messages leave last
            layer first and arrive in order, so a node only ever waits for the last one.
        busy: seconds that each node's link is busy, up and down, `[K]`.
    """

    transfers: tuple[Messages, ...]
    weight: float | Tensor
    order: tuple[tuple[int, int], ...]
    bursts: tuple[Burst, ...]
    leaves: Tensor
    needs: tuple[tuple[int, int, float, Tensor | None], ...]
    busy: tuple[Tensor, Tensor]


class Layout:
    """The cut of a model's parameters into messages and their order, which depend on no link.

    Args:
        sizes: (name, bytes) of each parameter.
        compute, bucket_bytes: see `Planner` and `Network`.

    >>> from vecgym.clock import Compute
    >>> first, last, sizes = Layout((("a", 300), ("b", 100)), Compute(1.0), 100).cut(("a", "b"), 40, False)
    >>> first, last, sizes
    (tensor([0]), tensor([1]), tensor([40.], dtype=torch.float64))
    """

    def __init__(self, sizes: tuple[tuple[str, float], ...], compute: Compute, bucket_bytes: float) -> None:
        rest = compute.shares_of(dict(sizes)).flip(0).cumsum(0).flip(0)
        self.rest, self.bucket_bytes = rest if compute.overlap else torch.ones_like(rest), bucket_bytes
        self._place = {name: i for i, (name, _) in enumerate(sizes)}
        self._bytes = torch.tensor([float(x) for _, x in sizes], dtype=torch.float64)
        self.cut, self.order = functools.cache(self._cut), functools.cache(self._order)

    def _cut(self, tensors: tuple[str, ...] | None, payload_bytes: float, gradients: bool) -> tuple[Tensor, ...]:
        """Return the first layer, the last layer and the bytes of each message of a transfer."""
        layers = self._layers(tensors)
        sizes = self._bytes[layers]
        total = sizes.sum()
        shares = sizes / total if total > 0 else torch.full_like(sizes, 1 / len(sizes))
        sizes = payload_bytes * shares
        buckets = bucketed(sizes.tolist(), self.bucket_bytes, gradients)
        first, last = (layers[[bucket[end] for bucket in buckets]] for end in (-1, 0))
        return first, last, torch.stack([sizes[bucket].sum() for bucket in buckets])

    def _layers(self, tensors: tuple[str, ...] | None) -> Tensor:
        """Return the layers of a transfer's tensors, in order. A tensor of unknown name counts to the first layer.

        A part of a parameter's code is called "parameter/part".
        """
        parameters = (name if name in self._place else name.rpartition("/")[0] for name in tensors or ("",))
        return torch.tensor(sorted({self._place.get(name, 0) for name in parameters}))

    def _order(self, transfers: tuple[Tensor, ...]) -> tuple[tuple[tuple[int, int], ...], list[int]]:
        """Return (transfer, its message) of each message in turn, and its layer, from the layers of each transfer.

        Last layer first; within a layer, in the order of the transfers, which have at most one message for it each.
        """
        keys = sorted((-layer, q, m) for q, x in enumerate(transfers) for m, layer in enumerate(x.tolist()))
        return tuple((q, m) for _, q, m in keys), [-layer for layer, _, _ in keys]


layout_of = functools.lru_cache(maxsize=8)(Layout)  # a run is priced on many networks


class Planner:
    """Make the plans of a run's steps. Equal exchanges are made once.

    Args:
        routes: of the network.
        sizes: bytes of each parameter, by name, in the order of the forward pass: each counts as a layer. If empty,
            there is a single layer.
        compute: of the nodes.

    Attributes:
        rest: the fraction of the forward pass from each layer on, and of the backward pass down to it, `[L]`.

    >>> from vecgym.clock import Compute
    >>> from vecgym.clock.network import Network, Routes
    >>> Planner(Routes(Network(1e9), 2), {"a": 300, "b": 100}, Compute(1.0)).rest
    tensor([1.0000, 0.2500], dtype=torch.float64)
    """

    def __init__(self, routes: Routes, sizes: Mapping[str, float], compute: Compute) -> None:
        self.routes, self.overlap = routes, compute.overlap
        self.layout = layout_of(tuple(sizes.items()) or (("", 1.0),), compute, routes.network.bucket_bytes)
        self.rest = self.layout.rest
        # By type: islands may equal a server's links.
        self._exchange_of = functools.lru_cache(None, typed=True)(self._new_exchange)

    def plans(self, transfers: Sequence[Transfer]) -> tuple[MessagePlan, ...]:
        """Return the messages of a step's transfers; those of equal weight leave together, in the order of layers."""
        by_weight: defaultdict[object, list[Messages]] = defaultdict(list)
        for transfer in transfers:
            group = by_weight[id(transfer.weight) if isinstance(transfer.weight, Tensor) else transfer.weight]
            exchange = self._exchange(transfer)
            if exchange is not None:
                group.append(self._messages(transfer, exchange))
        return tuple(self._plan(tuple(group)) for group in by_weight.values() if group)

    def _plan(self, transfers: tuple[Messages, ...]) -> MessagePlan:
        order, layers = self.layout.order(tuple(x.layers for x in transfers))
        last = {}
        for place, (q, _) in enumerate(order):
            for lag, nodes in self._lags(transfers[q].transfer):
                last[lag, nodes, transfers[q].exchange] = place
        needs = tuple(
            (lag, place, float(self.rest[layers[place]]), None if nodes is None else torch.tensor(nodes))
            for (lag, nodes, _), place in last.items()
        )
        weight = transfers[0].transfer.weight
        up, down = (weight * torch.stack(x).sum(0) for x in zip(*(x.exchange.busy(x.amounts) for x in transfers)))
        bursts, leaves = tuple(_bursts(transfers, order)), self.rest[layers]
        return MessagePlan(transfers, weight, order, bursts, leaves, needs, (up, down))

    def _lags(self, transfer: Transfer) -> list[tuple[int, tuple[bool, ...] | None]]:
        """Return after how many steps a transfer is needed, each with the nodes that need it then; None: all."""
        lag = transfer.lag if self.overlap else 0
        if isinstance(lag, int):
            return [(lag, None)]
        return [(steps, tuple(x == steps for x in lag)) for steps in sorted(set(lag))]

    def _messages(self, transfer: Transfer, exchange: Exchange) -> Messages:
        first, last, sizes = self.layout.cut(transfer.tensors, transfer.payload_bytes, transfer.gradients)
        return Messages(transfer, exchange, first, last, sizes, exchange.amounts(transfer.operation, sizes))

    def _exchange(self, transfer: Transfer) -> Exchange | None:
        # DistributedDataParallel has two all-reduces of gloo in flight; those of NCCL run one after the other.
        all_reduce = transfer.operation in ("mean", "sum") and self.routes.network.all_reduce
        return self._exchange_of(transfer.who, transfer.gradients and all_reduce == "gloo")

    def _new_exchange(self, who: Islands | Links | ServerLinks | None, pairs: bool) -> Exchange | None:
        """Return the exchange among these participants; None: nobody sends anything."""
        K = self.routes.num_nodes
        if isinstance(who, Links):
            return Mesh(self.routes, who.senders, who.receivers) if len(who.senders) else None
        if isinstance(who, ServerLinks):
            group = [*sorted({*who.up, *who.down}), K]
            # A node that sits out begins a later round from what the server has sent, so none may run ahead of it.
            receivers = range(K) if who.down else ()
            return Rendezvous(self.routes, [group], receivers) if len(group) > 1 else None
        groups = [g for g in ([tuple(range(K))] if who is None else who) if len(g) > 1]
        return Rendezvous(self.routes, groups, pairs=pairs) if groups else None


def _bursts(transfers: tuple[Messages, ...], order: tuple[tuple[int, int], ...]) -> Iterator[Burst]:
    """Group consecutive messages of one exchange, to be sent in one call."""
    first = 0
    for exchange, places in itertools.groupby(order, lambda place: transfers[place[0]].exchange):
        amounts = torch.stack([transfers[q].amounts[..., m] for q, m in places], -1)
        yield exchange, slice(first, first + amounts.shape[-1]), amounts
        first += amounts.shape[-1]
