"""The messages of a step: which leave when, in which order, who waits for whom on the nodes' links, and until when.

A `Planner` makes messages of transfers, an exchange says how they pass.

`Meeting` is a collective of groups of nodes: it begins when the last participant is there and all their links are free,
and holds these until its end. `Mesh` is messages from node to node: each leaves when its sender is ready and its last
one is there, and what a node sends and receives at once shares its link. Both take a sequence of M messages in one
call: a queue that serves them in order is a running maximum.

A sequence of times that follow from one another, e_m = max(e_(m-1), r_m) + d_m, is D_m + max(e_0, max_(k <= m) (r_k -
D_(k-1))) with D the running sum of d.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vecgym.clock.compute import Compute
from vecgym.clock.cost import Team
from vecgym.clock.network import Routes
from vecgym.collectives.base import bucketed
from vecgym.collectives.ledger import Transfer
from vecgym.collectives.topology import Links, Server

NEVER = -torch.inf  # the arrival of what a node is not sent


class Passed(NamedTuple):
    """What came of a sequence of messages.

    Attributes:
        arrival: when each is there, `[K or 1, M]`; -inf where a node receives none.
        up, down: until when each node's link is taken, and the server's, `[K + 1]`.
    """

    arrival: Tensor
    up: Tensor
    down: Tensor


def queued(ready: Tensor, took: Tensor, free: Tensor) -> Tensor:
    """The ends of M messages in a queue, one after the other, `[..., M]`.

    Args:
        ready: from when each can be served, `[..., M]`.
        took: how long each is served, `[..., M]`.
        free: from when the queue is, `[...]`.

    >>> queued(torch.tensor([0.0, 1.0, 9.0]), torch.tensor([3.0, 1.0, 1.0]), torch.tensor(2.0))
    tensor([ 5.,  6., 10.])
    """
    total = took.cumsum(-1)
    begun = (ready - (total - took)).cummax(-1).values
    return total + torch.maximum(begun, free[..., None])


def paired(ready: Tensor, took: Tensor, carried: Tensor, free: Tensor) -> Tensor:
    """The ends of M messages of which two are under way at a time, and share a link, `[..., M]`.

    Each begins when one of the two before it has ended. They are handed on in order.

    Args:
        ready, took, free: as of `queued`; `took`: alone.
        carried: how long the link is busy with each.

    >>> ready, took = torch.zeros(4), torch.tensor([3.0, 3.0, 3.0, 3.0])
    >>> paired(ready, took, torch.full((4,), 0.5), torch.tensor(0.0)), paired(ready, took, took, torch.tensor(0.0))
    (tensor([3., 3., 6., 6.]), tensor([ 3.,  6.,  9., 12.]))
    """
    first = last = link = free
    ends = []
    for there, alone, busy in zip(ready.unbind(-1), took.unbind(-1), carried.unbind(-1)):
        begun = torch.maximum(there, torch.minimum(first, last))
        link = torch.maximum(link, begun) + busy
        end = torch.maximum(begun + alone, link)
        first, last = torch.maximum(first, last), end
        ends.append(end)
    return torch.stack(ends, -1).cummax(-1).values


class Meeting:
    """Collectives of groups of nodes.

    Args:
        routes: of the network.
        groups: the participants of each; node K is a server.
        receivers: the nodes that need the result, of one group, others too; None: all participants.
        pairs: whether two are under way at a time.

    Attributes:
        members: the nodes of each group, the first repeated, `[G, n]`.
        group: of each node and the server, `[K + 1]`; G: of none.
        heard: the group whose result each node needs, `[K]`; G: none.

    >>> from vecgym.clock.network import Network
    >>> meeting = Meeting(Routes(Network(8.0), 2), [(0, 1)])
    >>> ready, free = torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    >>> ten_bytes = meeting.amounts("mean", torch.tensor([10.0], dtype=torch.float64))
    >>> meeting.run(ready, ten_bytes, free, free).arrival
    tensor([[12.]], dtype=torch.float64)
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
        self.group = torch.full((K + 1,), len(self.groups))  # of each node and the server; G: of none
        for g, group in enumerate(self.groups):
            self.group[list(group)] = g
        self.heard = self.group[:K]
        if receivers is not None:
            self.heard = torch.ones(K, dtype=torch.long)
            self.heard[list(receivers)] = 0
        self.everyone = len(self.groups) == 1 and not bool(self.heard.any())

    def amounts(self, operation: str, sizes: Tensor) -> Tensor:
        """What each message of so many bytes, `[M]`, takes of the links, `[..., M]`."""
        found: dict[Team, Tensor] = {}  # groups of equal size on equal links take equally long
        rows = []
        for group in self.groups:
            team = self.routes.team(tuple(node for node in group if node < self.num_nodes))
            if team not in found:
                # What the link is busy with.
                carried = replace(team, latency=torch.zeros_like(team.latency), server_latency=0.0)
                teams = (team, carried) if self.pairs else (team,)
                found[team] = torch.stack([self.routes.seconds(operation, each, sizes) for each in teams])
            rows.append(found[team])
        both = torch.stack(rows, -2)  # alone, and of pairs what the link carries: [1 or 2, G, M]
        return both if self.pairs else both[0]

    def run(self, ready: Tensor, amounts: Tensor, up: Tensor, down: Tensor) -> Passed:
        """Send messages that are ready at each node at `[K, M]`, in this order, over links taken until `[K + 1]`."""
        there = torch.cat([ready, ready.new_full((1, ready.shape[1]), NEVER)])
        taken = torch.maximum(up, down)
        first, free = there[self.members].amax(1), taken[self.members].amax(1)
        end = paired(first, amounts[0], amounts[1], free) if self.pairs else queued(first, amounts, free)  # [G, M]
        known = torch.cat([end, end.new_full((1, end.shape[1]), NEVER)])
        held = known[self.group, -1]
        arrival = end if self.everyone else known[self.heard]
        return Passed(arrival, torch.maximum(up, held), torch.maximum(down, held))

    def busy(self, amounts: Tensor) -> tuple[Tensor, Tensor]:
        """How long each node's link is taken by messages, up and down, `[K]`."""
        alone = amounts.sum(-1)
        seconds = torch.maximum(alone[0] / 2, alone[1]) if self.pairs else alone
        total = torch.cat([seconds, seconds.new_zeros(1)])[self.group[: self.num_nodes]]
        return total, total

    def seconds_of(self, amount: Tensor) -> Tensor:
        """How long each node's link is taken by one message that takes so much, alone, `[K]`."""
        alone = amount[0] if self.pairs else amount
        return torch.cat([alone, alone.new_zeros(1)])[self.group[:-1]]

    def met_by(self, node: int) -> Sequence[int]:
        """The nodes that a node waits for."""
        group = int(self.heard[node])
        return [i for i in self.groups[group] if i < self.num_nodes] if group < len(self.groups) else []


class Mesh:
    """Messages from node to node, over the links of a graph.

    A node's messages to its neighbours go side by side: over one link, of B bytes a second, d of them take d S / B, and
    all are there when the last is; over a link for each pair, each takes its own time. Its next ones leave then.

    Its methods are those of `Meeting`.

    Args:
        routes: of the network.
        senders, receivers: of each message.

    >>> from vecgym.clock.network import Network
    >>> mesh = Mesh(Routes(Network(8.0), 2), [0], [1])
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
            self.tx, self.rx = routes.up * out, routes.down * into  # seconds a byte of a message, [K]
            pace = self.tx[j]
        else:
            zero = pace.new_zeros(K)
            self.tx, self.rx = (zero.scatter_reduce(0, x, pace, "amax") for x in (j, i))
        self._sources, self._latency, self._pace = _padded(i, (j, latency, pace), K)  # of each receiver, [K, D]
        self._sends, self._hears = out > 0, into > 0
        self.lag = torch.zeros(K, dtype=torch.float64).scatter_reduce(0, j, latency, "amax")  # until all have it

    def amounts(self, operation: str, sizes: Tensor) -> Tensor:
        return sizes

    def run(self, ready: Tensor, amounts: Tensor, up: Tensor, down: Tensor) -> Passed:
        K = self.num_nodes
        receiving = self.rx[:, None] * amounts
        sending = self.tx[:, None] * amounts + self.lag[:, None]  # [K, M]
        sent = queued(ready, sending, up[:K])
        begun = torch.maximum(ready, torch.cat([up[:K, None], sent[:, :-1]], 1))
        coming = begun[self._sources] + self._latency[..., None]  # [K, D, M]
        there = (coming + self._pace[..., None] * amounts).amax(1)
        first = (begun[self._sources] + self._latency[..., None].abs()).amin(1)  # padded entries are +inf here
        received = queued(torch.maximum(there - receiving, first), receiving, down[:K])
        sends, hears = self._sends, self._hears
        return Passed(
            received.masked_fill(~hears[:, None], NEVER),
            torch.cat([torch.where(sends, sent[:, -1], up[:K]), up[K:]]),
            torch.cat([torch.where(hears, received[:, -1], down[:K]), down[K:]]),
        )

    def busy(self, amounts: Tensor) -> tuple[Tensor, Tensor]:
        return self.tx * amounts.sum(), self.rx * amounts.sum()

    def seconds_of(self, amount: Tensor) -> Tensor:
        """How long each node's link is taken by the messages of such a size, `[K]`."""
        return torch.maximum(self.tx, self.rx) * amount

    def met_by(self, node: int) -> Sequence[int]:
        return sorted({j for j, i in zip(self.senders, self.receivers) if i == node})


def _padded(rows: Tensor, values: tuple[Tensor, Tensor, Tensor], num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Senders, latencies and paces of each receiver's messages, `[K, D]`; where there is none, a latency of -inf."""
    order = rows.argsort(stable=True)
    count = torch.bincount(rows, minlength=num_rows)
    place = torch.arange(len(rows)) - (count.cumsum(0) - count)[rows[order]]
    width = max(1, int(count.max()))
    fills = 0, NEVER, 0.0
    found = []
    for x, fill in zip(values, fills):
        table = x.new_full((num_rows, width), fill)
        table[rows[order], place] = x[order]
        found.append(table)
    return found[0], found[1], found[2]


Exchange = Meeting | Mesh


class Part(NamedTuple):
    """The messages of one transfer, each of some parameters.

    Attributes:
        transfer: it.
        exchange: how they pass.
        layers: the first layer of each, after whose backward pass it leaves, `[M]`, falling.
        last: the last layer of each, `[M]`.
        sizes: bytes of each, `[M]`.
        amounts: what each takes of the links, `[..., M]`.
    """

    transfer: Transfer
    exchange: Exchange
    layers: Tensor
    last: Tensor
    sizes: Tensor
    amounts: Tensor


class Run(NamedTuple):
    """Messages of a plan that follow one another and pass alike: an exchange, their places, and what they take."""

    exchange: Exchange
    places: slice
    amounts: Tensor


class Plan(NamedTuple):
    """Messages of a step in the order in which they leave: all of them, or those that count equally often.

    Attributes:
        parts: of each transfer.
        weight: how often they count; see `Transfer`.
        order: (part, its message) in turn.
        runs: the same, those together that pass alike.
        done: the part of the backward pass after which each leaves, `[M]`.
        needs: for each lag and each exchange: steps until needed, the place of the last message needed then, the rest
            of the forward pass that needs it, and by which nodes, `[K]`; None: by all. Messages leave last layer first
            and arrive in order, so that nobody waits for another than the last.
        busy: seconds that each node's link is taken, up and down, `[K]`.
    """

    parts: tuple[Part, ...]
    weight: float | Tensor
    order: tuple[tuple[int, int], ...]
    runs: tuple[Run, ...]
    done: Tensor
    needs: tuple[tuple[int, int, float, Tensor | None], ...]
    busy: tuple[Tensor, Tensor]


class Planner:
    """Makes the plans of a run's steps; what is alike is made once.

    Args:
        routes: of the network.
        sizes: bytes of each parameter, by name, in the order of the forward pass: each counts as a layer. Without any,
            there is one for all.
        compute: of the nodes.

    Attributes:
        rest: the part of the forward pass from each layer's begin on, and of the backward pass up to its end, `[L]`.

    >>> from vecgym.clock.network import Network
    >>> Planner(Routes(Network(1e9), 2), {"a": 300, "b": 100}, Compute(1.0)).rest
    tensor([1.0000, 0.2500], dtype=torch.float64)
    """

    def __init__(self, routes: Routes, sizes: Mapping[str, float], compute: Compute) -> None:
        sizes = sizes or {"": 1.0}
        self.routes, self.overlap = routes, compute.overlap
        rest = compute.shares_of(sizes).flip(0).cumsum(0).flip(0)
        self.rest = rest if compute.overlap else torch.ones_like(rest)
        self._place = {name: i for i, name in enumerate(sizes)}
        self._bytes = torch.tensor([float(x) for x in sizes.values()], dtype=torch.float64)
        self._exchanges: dict[object, Exchange | None] = {}

    def plans(self, transfers: Sequence[Transfer]) -> tuple[Plan, ...]:
        """The messages of a step's transfers; those that count equally often leave together, in the order of layers."""
        together: dict[object, list[Part]] = {}
        for transfer in transfers:
            key = id(transfer.weight) if isinstance(transfer.weight, Tensor) else transfer.weight
            part = self._part(transfer)
            together.setdefault(key, []).extend([] if part is None else [part])
        return tuple(self._plan(tuple(parts)) for parts in together.values() if parts)

    def _plan(self, parts: tuple[Part, ...]) -> Plan:
        # Last layer first; of one layer, the first transfer's first. (Of a layer each has one message at most.)
        keys = [(-layer, q, m) for q, part in enumerate(parts) for m, layer in enumerate(part.layers.tolist())]
        order = tuple((q, m) for _, q, m in sorted(keys))
        layers = [int(parts[q].layers[m]) for q, m in order]
        last = {}
        for place, (q, _) in enumerate(order):
            for lag, nodes in self._lags(parts[q].transfer):
                last[lag, nodes, parts[q].exchange] = place
        needs = tuple(
            (lag, place, float(self.rest[layers[place]]), None if nodes is None else torch.tensor(nodes))
            for (lag, nodes, _), place in last.items()
        )
        weight = parts[0].transfer.weight
        busy = [part.exchange.busy(part.amounts) for part in parts]
        up, down = (weight * torch.stack(found).sum(0) for found in zip(*busy))
        return Plan(parts, weight, order, tuple(_runs(parts, order)), self.rest[layers], needs, (up, down))

    def _lags(self, transfer: Transfer) -> list[tuple[int, tuple[bool, ...] | None]]:
        """After how many steps a transfer is needed, each with the nodes that need it then; None: all."""
        lag = transfer.lag if self.overlap else 0
        if isinstance(lag, int):
            return [(lag, None)]
        return [(steps, tuple(own == steps for own in lag)) for steps in sorted(set(lag))]

    def _part(self, transfer: Transfer) -> Part | None:
        exchange = self._exchange(transfer)
        if exchange is None:
            return None
        layers = self._layers(transfer.tensors)
        sizes = self._bytes[layers]
        total = sizes.sum()
        shares = sizes / total if total > 0 else torch.full_like(sizes, 1 / len(sizes))
        sizes = transfer.payload_bytes * shares
        messages = bucketed(sizes.tolist(), self.routes.network.bucket_bytes, transfer.gradients)
        first, last = (layers[[message[end] for message in messages]] for end in (-1, 0))
        sizes = torch.stack([sizes[message].sum() for message in messages])
        return Part(transfer, exchange, first, last, sizes, exchange.amounts(transfer.operation, sizes))

    def _layers(self, tensors: tuple[str, ...] | None) -> Tensor:
        """The layers of what a transfer carries, in their order; of what has no known name, the first layer.

        A part of a parameter's code is called "parameter/part".
        """
        found = set()
        for name in tensors or ("",):
            known = name if name in self._place else name.rpartition("/")[0]
            found.add(self._place.get(known, 0))
        return torch.tensor(sorted(found))

    def _exchange(self, transfer: Transfer) -> Exchange | None:
        # torch's DistributedDataParallel has two all-reduces of gloo under way; those of NCCL wait for one another.
        all_reduce = transfer.operation in ("mean", "sum") and self.routes.network.all_reduce
        key = transfer.who, transfer.gradients and all_reduce == "gloo"
        if key not in self._exchanges:
            self._exchanges[key] = self._made(transfer, pairs=key[1])
        return self._exchanges[key]

    def _made(self, transfer: Transfer, pairs: bool) -> Exchange | None:
        K, who = transfer.num_nodes, transfer.who
        if isinstance(who, Links):
            return Mesh(self.routes, who.senders, who.receivers) if len(who.senders) else None
        if isinstance(who, Server):
            group = [*sorted({*who.up, *who.down}), K]
            # Who sits out begins a later round from what the server has sent, so nobody may run ahead of this one.
            receivers = range(K) if who.down else ()
            return Meeting(self.routes, [group], receivers) if len(group) > 1 else None
        groups = [g for g in ([tuple(range(K))] if who is None else who) if len(g) > 1]
        return Meeting(self.routes, groups, pairs=pairs) if groups else None


def _runs(parts: tuple[Part, ...], order: tuple[tuple[int, int], ...]) -> Iterator[Run]:
    """Messages that pass alike, and follow one another, to be sent in one call."""
    first = 0
    for exchange, messages in itertools.groupby(order, lambda message: parts[message[0]].exchange):
        amounts = torch.stack([parts[q].amounts[..., m] for q, m in messages], -1)
        yield Run(exchange, slice(first, first + amounts.shape[-1]), amounts)
        first += amounts.shape[-1]
