"""The record of communication: every collective of a run as a value, with its bytes, but without times.

A `Transfer` holds the operation, its bytes, its participants, and when the result is used. A training step returns
its transfers, and the `Ledger` of a run collects them.

There are two counts. `payload_bytes` counts the values that one node hands to an operation, as papers do. `sent_bytes`
and `received_bytes` count the traffic on a node's link, including values that it forwards for others. With a payload of
b bytes each of n participants sends and receives, on average,

| operation                   | sends                                      | receives       |
|-----------------------------|--------------------------------------------|----------------|
| `mean`, `sum`               | 2 (n - 1) / n * b                          | as much        |
| `all_gather`                | (n - 1) * b; to neighbours degree * b      | as much        |
| `broadcast`                 | b (n - 1) / n, on average, along a chain   | as much        |
| `permute`                   | b (to one other node)                      | b              |
| `mix`                       | degree * b (to each neighbour)             | degree * b     |
| `server_mean`, `server_sum` | b (up to the server)                       | b (the result) |
| `server_gather`             | b (up to the server)                       | nothing        |
| `server_send`               | nothing                                    | b              |

Without a server everything that is sent is received. The first three rows hold for every algorithm in which nodes
forward values (a ring, halving and doubling, a tree) or send them to each other directly, except an all-gather over a
tree, which sends more. Through a server or a store, the `route` "server", a mean is b up and b down, and an all-gather
b up and (n - 1) b down. A `vecgym.clock.Network` sets the routes: `all_reduce=` and `all_gather=`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vecgym.collectives.topology import Islands, Links, ServerLinks, plain_who, who_of

# Attributes that a file holds unchanged.
NUMBERS = ("num_nodes", "num_steps", "asynchronous", "total_bytes", "total_received_bytes", "total_payload_bytes")
Lag = int | tuple[int, ...]  # of all nodes, or one per node


class Transfer(NamedTuple):
    """One collective, as a value.

    Attributes:
        operation: the name of the collective.
        payload_bytes: the bytes that one participant hands to it.
        num_nodes: K, the number of nodes of the run.
        who: the participants: None for all nodes; groups of node ids, each exchanging among itself (the source of a
            `broadcast` first); the `Links` of messages from node to node; or a `ServerLinks`.
        lag: the number of steps until the result is used, 0 for this step; or one number per node, K of them.
        tensors: the names of the tensors that it carries, if they have names.
        weight: how often it counts, less than 1 if a relaxed schedule makes an exchange in part.
        gradients: whether it exchanges gradients, which are sent as soon as they are ready.
        route: "ring", which stands for all routes from node to node; "tree"; or "server", through a server that is not
            a node.

    >>> transfer = Transfer("all_gather", payload_bytes=400, num_nodes=4)
    >>> transfer.sent_bytes, transfer.received_bytes, transfer.num_participants  # per node, averaged over all 4
    (1200.0, 1200.0, 4)
    >>> transfer._replace(route="server").per_node  # sent, received, and handed over
    (400.0, 1200.0, 400.0)
    """

    operation: str
    payload_bytes: int
    num_nodes: int
    who: Islands | Links | ServerLinks | None = None
    lag: Lag = 0
    tensors: tuple[str, ...] | None = None
    weight: float | Tensor = 1.0
    gradients: bool = False
    route: str = "ring"

    @property
    def per_node(self) -> tuple[Any, Any, Any]:
        """Bytes that a node sends, receives and hands over, averaged over all nodes; tensors if `weight` is one."""
        counts = _counts(self)[:3]
        sent, received, handed = (self.payload_bytes * n / self.num_nodes * self.weight for n in counts)
        return sent, received, handed

    @property
    def sent_bytes(self) -> Any:
        """Bytes that a node sends, averaged over all nodes; a tensor if `weight` is one."""
        return self.per_node[0]

    @property
    def received_bytes(self) -> Any:
        """Bytes that a node receives, averaged over all nodes; a tensor if `weight` is one."""
        return self.per_node[1]

    @property
    def num_participants(self) -> int:
        """The number of participating nodes."""
        return _counts(self)[3]


def _later(lag: Any, more: Any) -> Lag:
    """Add two lags.

    >>> _later(1, 2), _later((0, 3), 1), _later(1, (0, 3))
    (3, (1, 4), (1, 4))
    """
    total = np.add(lag, more).tolist()
    return total if isinstance(total, int) else tuple(total)


def _counts(transfer: Transfer) -> tuple[int, int, int, int]:
    """Return the number of payloads that all nodes together send, receive and hand over, and of participants."""
    K, who, operation = transfer.num_nodes, transfer.who, transfer.operation
    if isinstance(who, ServerLinks):
        return len(who.up), len(who.down), len(who.up), len({*who.up, *who.down})
    if isinstance(who, Links):
        senders = who.senders
        return len(senders), len(senders), len(set(senders)), len(senders) if operation == "permute" else K
    sizes = [K] if who is None else [len(group) for group in who]
    meeting = [n for n in sizes if n > 1]
    handed = len(meeting) if operation == "broadcast" else sum(meeting)
    passed = sum(_passed(operation, n, transfer.route) for n in meeting)
    participants = sum(sizes) if operation in ("all_gather", "broadcast") else sum(meeting)
    return handed if transfer.route == "server" else passed, passed, handed, participants


def _passed(operation: str, n: int, route: str) -> int:
    """Return the number of payloads that n participants receive together."""
    if operation == "all_gather":  # up a binomial tree, each node first sends its collected values
        collected = sum(min(i & -i, n - i) for i in range(1, n)) if route == "tree" else 0
        return n * (n - 1) + collected
    if operation == "broadcast":
        return n - 1
    return n if route == "server" else 2 * (n - 1)


class Entry(NamedTuple):
    """One collective of a run, with its bytes per node, averaged over all nodes; the payload is per participant.

    >>> ledger = Ledger()
    >>> ledger.record(Transfer("mean", payload_bytes=400, num_nodes=4))
    >>> entry = next(iter(ledger))
    >>> entry.step, entry.operation, entry.sent_bytes, entry.received_bytes, entry.participants, entry.transfer.who
    (0, 'mean', 600.0, 600.0, 4, None)
    """

    step: int
    operation: str
    payload_bytes: int
    sent_bytes: float
    received_bytes: float
    participants: int
    transfer: Transfer


class Ledger:
    """The list of collectives of a run, stored compactly: 12 bytes per entry, since most transfers are equal.

    Attributes:
        num_nodes, sizes: set by `announce`; None and empty before.
        gradients: whether gradients are being exchanged; see `marking`.
        asynchronous: whether steps are updates of a server that does not wait, in an order that depends on time.
        num_steps: the number of steps begun, including steps without transfers.
        step_bytes, total_bytes, total_received_bytes: the bytes on a node's link, on average: sent in the current step,
            sent in total, and received in total.
        total_payload_bytes: the bytes that a node has handed to collectives, on average: the count of papers.
        routes: {operation: route} of transfers recorded from now on, as set by a network; see `Transfer`.

    >>> ledger = Ledger()
    >>> ledger.record(Transfer("mean", payload_bytes=400, num_nodes=4))
    >>> ledger.step_bytes, ledger.total_bytes, ledger.total_received_bytes, list(ledger)[0].operation
    (600.0, 600.0, 600.0, 'mean')
    >>> ledger.totals  # sent, received, handed over
    (600.0, 600.0, 400.0)
    """

    def __init__(self) -> None:
        self._kinds: dict[Transfer, int] = {}
        self._per_node: list[tuple[float, float, float]] = []  # of each kind
        self._kind_of_entry = array("i")
        self._step_of_entry = array("q")
        self._step = 0
        self._weight: float | Tensor | None = None
        self._lag: Lag = 0
        self._unit = 1
        self.gradients = False
        self._recording: list[Transfer] | None = None
        self._computing: dict[int, bytes] = {}  # step -> the nodes that computed, as bits, unless all did
        self.num_nodes: int | None = None
        self.sizes: dict[str, int] = {}
        self.asynchronous = False
        self.num_steps = 0
        self.step_bytes = 0.0
        self.total_bytes = 0.0
        self.total_received_bytes = 0.0
        self.total_payload_bytes = 0.0
        self.routes: Mapping[str, str] = {}

    @property
    def totals(self) -> tuple[float, float, float]:
        """The bytes that a node has sent, received and handed over in total, on average."""
        return self.total_bytes, self.total_received_bytes, self.total_payload_bytes

    def announce(self, num_nodes: int, sizes: Mapping[str, int]) -> None:
        """Set K and the sizes of a node's trainable parameters, {name: bytes}, in the model's order.

        >>> ledger = Ledger()
        >>> ledger.announce(4, {"weight": 400, "bias": 40})
        >>> ledger.num_nodes, list(ledger.sizes)
        (4, ['weight', 'bias'])
        """
        self.num_nodes, self.sizes = num_nodes, dict(sizes)

    def add(self, step: int, transfers: Iterable[Transfer], computing: Tensor | None = None) -> None:
        """Add the transfers of a step, and the nodes that computed in it, bool `[K]`; None: all.

        >>> ledger = Ledger()
        >>> ledger.add(7, [Transfer("mean", payload_bytes=400, num_nodes=4)])
        >>> [entry.step for entry in ledger]
        [7]
        """
        self.begin_step(step)
        if computing is not None and not bool(computing.all()):
            self._computing[step] = np.packbits(computing.numpy()).tobytes()
        for transfer in transfers:
            self._append(transfer)

    def begin_step(self, step: int) -> None:
        """Assign later transfers to `step`, and reset `step_bytes` to 0.

        >>> ledger = Ledger()
        >>> ledger.begin_step(7)
        >>> ledger.record(Transfer("mean", payload_bytes=400, num_nodes=4))
        >>> [entry.step for entry in ledger], ledger.step_bytes
        ([7], 600.0)
        """
        self._step = step
        self.num_steps = max(self.num_steps, step + 1)
        self.step_bytes = 0.0

    def record(self, transfer: Transfer) -> None:
        """Add one collective to the current step; inside `recording`, to its list instead."""
        if transfer.operation in self.routes:
            transfer = transfer._replace(route=self.routes[transfer.operation])
        if self._lag:
            transfer = transfer._replace(lag=_later(transfer.lag, self._lag))
        if self._weight is not None:
            transfer = transfer._replace(weight=transfer.weight * self._weight)
        if self.gradients:
            transfer = transfer._replace(gradients=True)
        if self._recording is None:
            self._append(transfer)
        else:
            self._recording.append(transfer)

    def _append(self, transfer: Transfer) -> None:
        if isinstance(transfer.weight, Tensor):
            transfer = transfer._replace(weight=transfer.weight.detach().item())
        kind = self._kinds.setdefault(transfer, len(self._kinds))
        if kind == len(self._per_node):
            self._per_node.append(transfer.per_node)
        self._kind_of_entry.append(kind)
        self._step_of_entry.append(self._step)
        self.num_steps = max(self.num_steps, self._step + 1)
        sent, received, handed = self._per_node[kind]
        self.step_bytes += sent
        self.total_bytes += sent
        self.total_received_bytes += received
        self.total_payload_bytes += handed

    def routed(self, routes: Mapping[str, str]) -> Ledger:
        """Return a ledger of the same collectives over other routes, such as `Network(...).routes`; see `Transfer`.

        >>> ledger = Ledger()
        >>> ledger.record(Transfer("all_gather", payload_bytes=400, num_nodes=4))
        >>> stored = ledger.routed({"all_gather": "server"})
        >>> ledger.total_bytes, stored.total_bytes, stored.total_received_bytes
        (1200.0, 400.0, 1200.0)
        """
        ledger, kinds = Ledger(), [kind._replace(route=routes.get(kind.operation, "ring")) for kind in self._kinds]
        for step, kind in zip(self._step_of_entry, self._kind_of_entry):
            ledger._step = step
            ledger._append(kinds[kind])
        ledger.num_nodes, ledger.sizes, ledger.routes = self.num_nodes, dict(self.sizes), dict(routes)
        ledger.num_steps, ledger.asynchronous = self.num_steps, self.asynchronous
        return ledger

    @contextmanager
    def recording(self) -> Iterator[list[Transfer]]:
        """Collect the transfers of a block in a list, and leave the ledger unchanged.

        >>> ledger = Ledger()
        >>> with ledger.recording() as transfers:
        ...     ledger.record(Transfer("mean", payload_bytes=400, num_nodes=4))
        >>> len(transfers), len(ledger)
        (1, 0)
        """
        transfers: list[Transfer] = []
        before, self._recording = self._recording, transfers
        try:
            yield transfers
        finally:
            self._recording = before

    @contextmanager
    def marking(
        self, *, weight: float | Tensor | None = None, lag: Lag = 0, unit: int = 1, gradients: bool = False
    ) -> Iterator[None]:
        """Mark the transfers of a block. Blocks within one another multiply weights and units, and add lags.

        Args:
            weight: how often each counts. If it is a tensor, the bytes are differentiable with respect to it.
            lag: steps until the results are used, one number for all nodes or one per node.
            unit: the steps in one unit of the block's lags, for exchanges that count time in units of `unit` steps.
            gradients: whether they are an exchange of gradients.

        >>> ledger = Ledger()
        >>> with ledger.marking(weight=0.25, lag=3, unit=10):
        ...     ledger.record(Transfer("mean", payload_bytes=400, num_nodes=4))
        >>> ledger.total_bytes, next(iter(ledger)).transfer.lag
        (150.0, 30)
        """
        before = self._weight, self._lag, self._unit, self.gradients
        self._unit, self.gradients = self._unit * unit, self.gradients or gradients
        if lag:
            self._lag = _later(self._lag, np.multiply(lag, self._unit))
        if weight is not None:
            self._weight = weight if self._weight is None else self._weight * weight
        try:
            yield
        finally:
            self._weight, self._lag, self._unit, self.gradients = before

    def state(self) -> dict[str, Any]:
        """Return the contents as tensors and plain values, for a file.

        >>> ledger = Ledger()
        >>> ledger.record(Transfer("mean", payload_bytes=400, num_nodes=4))
        >>> ledger.state()["kinds"], ledger.state()["total_bytes"]
        ([['mean', 400, 4, None, 0, None, 1.0, False, 'ring']], 600.0)
        """
        return {
            "kinds": [[*kind[:3], plain_who(kind.who), *kind[4:]] for kind in self._kinds],
            "kind_of_entry": torch.tensor(self._kind_of_entry, dtype=torch.int32),
            "step_of_entry": torch.tensor(self._step_of_entry, dtype=torch.int64),
            "computing": {step: list(bits) for step, bits in self._computing.items()},
            "sizes": dict(self.sizes),
            **{name: getattr(self, name) for name in NUMBERS},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Replace the contents with those of `state`.

        >>> ledger, other = Ledger(), Ledger()
        >>> ledger.record(Transfer("mean", payload_bytes=400, num_nodes=4))
        >>> other.load(ledger.state())
        >>> list(other) == list(ledger), other
        (True, Ledger(1 collectives, 600 bytes sent per node))
        """
        kinds = [Transfer(*[*kind[:3], who_of(kind[3]), *kind[4:]]) for kind in state["kinds"]]
        self._kinds = {kind: i for i, kind in enumerate(kinds)}
        self._per_node = [kind.per_node for kind in self._kinds]
        self._kind_of_entry = array("i", state["kind_of_entry"].tolist())
        self._step_of_entry = array("q", state["step_of_entry"].tolist())
        self._computing = {step: bytes(bits) for step, bits in state.get("computing", {}).items()}
        self.sizes = dict(state["sizes"])
        vars(self).update({name: state[name] for name in NUMBERS})

    def __len__(self) -> int:
        return len(self._step_of_entry)

    def __iter__(self) -> Iterator[Entry]:
        entries = [(t.operation, t.payload_bytes, *t.per_node[:2], t.num_participants, t) for t in self._kinds]
        for step, kind in zip(self._step_of_entry, self._kind_of_entry):
            yield Entry(step, *entries[kind])

    def by_step(self) -> tuple[list[Transfer], list[tuple[int, ...]]]:
        """Return the distinct transfers, and for each step the indices of its transfers, in order.

        >>> ledger = Ledger()
        >>> ledger.add(1, [Transfer("mean", payload_bytes=400, num_nodes=4)] * 2)
        >>> kinds, steps = ledger.by_step()
        >>> len(kinds), steps
        (1, [(), (0, 0)])
        """
        steps: list[tuple[int, ...]] = [()] * self.num_steps
        for step, kind in zip(self._step_of_entry, self._kind_of_entry):
            steps[step] += (kind,)
        return list(self._kinds), steps

    def computing(self) -> Tensor | None:
        """Return the nodes that computed in each step, bool `[T, K]`; None: all nodes in all steps.

        >>> ledger = Ledger()
        >>> ledger.announce(2, {})
        >>> ledger.add(1, [], computing=torch.tensor([True, False]))
        >>> ledger.computing()
        tensor([[ True,  True],
                [ True, False]])
        """
        if not self._computing:
            return None
        assert self.num_nodes is not None
        computed = torch.ones(self.num_steps, self.num_nodes, dtype=torch.bool)
        bits = np.frombuffer(b"".join(self._computing.values()), dtype=np.uint8).reshape(len(self._computing), -1)
        computed[list(self._computing)] = torch.from_numpy(np.unpackbits(bits, axis=1, count=self.num_nodes) != 0)
        return computed

    def summary(self) -> dict[str, tuple[int, float]]:
        """Return operation -> (number of calls, bytes sent per node in total).

        >>> ledger = Ledger()
        >>> ledger.add(0, [Transfer("mean", payload_bytes=400, num_nodes=4)] * 2)
        >>> ledger.summary()
        {'mean': (2, 1200.0)}
        """
        totals: dict[str, tuple[int, float]] = {}
        for entry in self:
            count, sent = totals.get(entry.operation, (0, 0.0))
            totals[entry.operation] = (count + 1, sent + entry.sent_bytes)
        return totals

    def __repr__(self) -> str:
        return f"Ledger({len(self)} collectives, {self.total_bytes:,.0f} bytes sent per node)"


def readable_bytes(num_bytes: float) -> str:
    """Format a number of bytes for reading.

    >>> readable_bytes(1234567)
    '1.23 MB'
    """
    return with_prefix(num_bytes, "B")


def with_prefix(value: float, unit: str) -> str:
    """Format a value in a unit with a fitting prefix of thousands.

    >>> with_prefix(2.5e6, "bit/s"), with_prefix(9e15, "B")
    ('2.5 Mbit/s', '9e+03 TB')
    """
    for prefix in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} T{unit}"
