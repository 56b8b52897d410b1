"""What was sent: every collective of a run, with its bytes. No time is in it.

`payload_bytes` is what one node hands to the operation. `sent_bytes` is what one node then puts on the
network, averaged over all nodes, with the usual algorithm of each operation among n participants:

| operation          | bytes sent per participant for a payload of b bytes |
|--------------------|------------------------------------------------------|
| `mean`, `sum`      | 2 (n - 1) / n * b (ring all-reduce)                   |
| `server_mean`      | b (up to the server; each gets b back)                |
| `all_gather`       | b (n > 1): each node contributes its payload once    |
| `broadcast`        | b (n - 1) / n (the source sends, along a pipeline)    |
| `permute`          | b (to one other node)                                |
| `mix`              | degree * b (to each neighbour)                       |
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Entry(NamedTuple):
    """One collective: `operation` at `step`, `payload_bytes` of each participant, `sent_bytes` per node.

    >>> ledger = Ledger()
    >>> ledger.record("mean", payload_bytes=400, sent_bytes=600.0, participants=4)
    >>> next(iter(ledger))
    Entry(step=0, operation='mean', payload_bytes=400, sent_bytes=600.0, participants=4)
    """

    step: int
    operation: str
    payload_bytes: int
    sent_bytes: float
    participants: int


class Ledger:
    """The list of collectives of a run, stored compactly (12 bytes an entry).

    >>> ledger = Ledger()
    >>> ledger.begin_step(0)
    >>> ledger.record("mean", payload_bytes=400, sent_bytes=600.0, participants=4)
    >>> ledger.step_bytes, ledger.total_bytes, list(ledger)[0].operation
    (600.0, 600.0, 'mean')
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int, float, int], int] = {}  # most entries of a run are alike
        self._kind_of_entry = array("i")
        self._step_of_entry = array("q")
        self._step = 0
        self._weight: float | Tensor = 1.0
        self.step_bytes: float | Tensor = 0.0
        self.total_bytes = 0.0

    def begin_step(self, step: int) -> None:
        """Entries from here on belong to `step`; `step_bytes` starts at 0."""
        self._step = step
        self.step_bytes = 0.0

    def record(self, operation: str, payload_bytes: int, sent_bytes: float, participants: int) -> None:
        """Add one collective to the present step."""
        weighted = sent_bytes * self._weight
        sent_bytes = weighted.detach().item() if isinstance(weighted, Tensor) else weighted
        kind = self._kinds.setdefault((operation, payload_bytes, sent_bytes, participants), len(self._kinds))
        self._kind_of_entry.append(kind)
        self._step_of_entry.append(self._step)
        self.step_bytes = self.step_bytes + weighted
        self.total_bytes += sent_bytes

    @contextmanager
    def weighted(self, weight: float | Tensor) -> Iterator[None]:
        """Count what is sent meanwhile `weight` times.

        With a tensor, `step_bytes` is one too, and can be differentiated by it.

        >>> ledger = Ledger()
        >>> with ledger.weighted(0.25):
        ...     ledger.record("mean", payload_bytes=400, sent_bytes=600.0, participants=4)
        >>> ledger.total_bytes
        150.0
        """
        before = self._weight
        self._weight = before * weight
        try:
            yield
        finally:
            self._weight = before

    def state(self) -> dict[str, Any]:
        """Everything that it holds, as tensors and plain values: for a file.

        >>> ledger = Ledger()
        >>> ledger.record("mean", payload_bytes=400, sent_bytes=600.0, participants=4)
        >>> ledger.state()["kinds"], ledger.state()["total_bytes"]
        ([['mean', 400, 600.0, 4]], 600.0)
        """
        return {
            "kinds": [list(kind) for kind in self._kinds],
            "kind_of_entry": torch.tensor(self._kind_of_entry, dtype=torch.int32),
            "step_of_entry": torch.tensor(self._step_of_entry, dtype=torch.int64),
            "total_bytes": self.total_bytes,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Hold what `state` says, and nothing else.

        >>> ledger, other = Ledger(), Ledger()
        >>> ledger.record("mean", payload_bytes=400, sent_bytes=600.0, participants=4)
        >>> other.load(ledger.state())
        >>> list(other) == list(ledger), other
        (True, Ledger(1 collectives, 600 bytes sent per node))
        """
        self._kinds = {(kind[0], kind[1], kind[2], kind[3]): i for i, kind in enumerate(state["kinds"])}
        self._kind_of_entry = array("i", state["kind_of_entry"].tolist())
        self._step_of_entry = array("q", state["step_of_entry"].tolist())
        self.total_bytes = state["total_bytes"]

    def __len__(self) -> int:
        return len(self._step_of_entry)

    def __iter__(self) -> Iterator[Entry]:
        kinds = list(self._kinds)
        for step, kind in zip(self._step_of_entry, self._kind_of_entry):
            operation, payload_bytes, sent_bytes, participants = kinds[kind]
            yield Entry(step, operation, payload_bytes, sent_bytes, participants)

    def summary(self) -> dict[str, tuple[int, float]]:
        """Operation -> (number of calls, bytes sent per node in all).

        >>> ledger = Ledger()
        >>> ledger.record("mean", payload_bytes=400, sent_bytes=600.0, participants=4)
        >>> ledger.record("mean", payload_bytes=400, sent_bytes=600.0, participants=4)
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
    """A number of bytes as a person reads it.

    >>> readable_bytes(1234567)
    '1.23 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
