"""From transfers to messages: what leaves in a step, in which order, and which forward pass needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vecgym.clock.compute import Compute
from vecgym.clock.exchange import Exchange, Meeting, Mesh
from vecgym.clock.network import Routes
from vecgym.collectives.base import bucketed
from vecgym.collectives.ledger import Transfer
from vecgym.collectives.topology import Links, Server


class Layers(NamedTuple):
    """The parameters in the order of the forward pass; each counts as a layer.

    Attributes:
        sizes: bytes of each, by name.
        rest: the part of the forward pass from each layer's begin on, `[L]`.
        done: the part of the backward pass up to each layer's end, `[L]`.

    >>> Layers.of({"a": 300, "b": 100}, Compute(1.0))[1:]
    (tensor([1.0000, 0.2500], dtype=torch.float64), tensor([1.0000, 0.2500], dtype=torch.float64))
    """

    sizes: Mapping[str, float]
    rest: Tensor
    done: Tensor

    @classmethod
    def of(cls, sizes: Mapping[str, float], compute: Compute) -> Layers:
        """The layers of parameters of so many bytes; without any, one for all."""
        sizes = sizes or {"": 1.0}
        rest = compute.shares_of(sizes).flip(0).cumsum(0).flip(0)
        return cls(sizes, rest, rest if compute.overlap else torch.ones_like(rest))


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


class Plan(NamedTuple):
    """Messages of a step in the order in which they leave: all of them, or those that count equally often.

    Attributes:
        parts: of each transfer.
        weight: how often they count; see `Transfer`.
        exchange: how all of them pass, if they pass alike; None: each its own way.
        order: (part, its message) in turn.
        done: the part of the backward pass after which each leaves, `[M]`.
        amounts: what each takes of the links, `[..., M]`, where they pass alike.
        needs: for each lag, and where messages do not pass alike each part: steps until needed, the place of the last
            message needed then, the rest of the forward pass that needs it, and by which nodes, `[K]`; None: by all.
            Messages leave last layer first and arrive in order, so that nobody waits for another than the last.
        busy: seconds that each node's link is taken, up and down, `[K]`.
    """

    parts: tuple[Part, ...]
    weight: float | Tensor
    exchange: Exchange | None
    order: tuple[tuple[int, int], ...]
    done: Tensor
    amounts: Tensor
    needs: tuple[tuple[int, int, float, Tensor | None], ...]
    busy: tuple[Tensor, Tensor]

    @property
    def whole(self) -> bool:
        """Whether the messages count once."""
        return not isinstance(self.weight, Tensor) and self.weight == 1


class Planner:
    """Makes the plans of a run's steps; what is alike is made once.

    Args:
        routes: of the network.
        layers: of the model.
        overlap: see `Compute`.
    """

    def __init__(self, routes: Routes, layers: Layers, overlap: bool) -> None:
        self.routes, self.layers, self.overlap = routes, layers, overlap
        self._place = {name: i for i, name in enumerate(layers.sizes)}
        self._bytes = torch.tensor([float(x) for x in layers.sizes.values()], dtype=torch.float64)
        self._exchanges: dict[object, Exchange] = {}

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
        done = torch.stack([self.layers.done[parts[q].layers[m]] for q, m in order])
        alike = all(part.exchange is parts[0].exchange for part in parts)
        amounts = torch.stack([parts[q].amounts[..., m] for q, m in order], -1) if alike else done
        last = {}
        for place, (q, _) in enumerate(order):
            for lag, nodes in self._lags(parts[q].transfer):
                last[lag, nodes, 0 if alike else q] = place
        needs = tuple(
            (lag, place, self._rest(parts, order[place]), None if nodes is None else torch.tensor(nodes))
            for (lag, nodes, _), place in last.items()
        )
        weight = parts[0].transfer.weight
        busy = [part.exchange.busy(part.amounts) for part in parts]
        up, down = (weight * torch.stack(found).sum(0) for found in zip(*busy))
        return Plan(parts, weight, parts[0].exchange if alike else None, order, done, amounts, needs, (up, down))

    def _lags(self, transfer: Transfer) -> list[tuple[int, tuple[bool, ...] | None]]:
        """After how many steps a transfer is needed, each with the nodes that need it then; None: all."""
        lag = transfer.lag if self.overlap else 0
        if isinstance(lag, int):
            return [(lag, None)]
        return [(steps, tuple(own == steps for own in lag)) for steps in sorted(set(lag))]

    def _rest(self, parts: tuple[Part, ...], message: tuple[int, int]) -> float:
        q, m = message
        return float(self.layers.rest[parts[q].layers[m]]) if self.overlap else 1.0

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
            found = self._made(transfer, pairs=key[1])
            if found is None:
                return None
            self._exchanges[key] = found
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
