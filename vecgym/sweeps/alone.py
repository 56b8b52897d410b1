"""Asynchronous configurations of a sweep: those in which the same happens at the same time are groups of one stack."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vecgym.collectives.ledger import bytes_of
from vecgym.runs.async_plan import last_steps, recorded_of
from vecgym.simulation import Event
from vecgym.strategy.asynchronous import EventDriven
from vecgym.sweeps.chunk import Chunk, Curve, Observed


class AsyncChunk(Chunk):
    """Asynchronous configurations of one plan; see `Chunk`. Their steps are updates of the server."""

    def _observed(self, num_nodes: int) -> Observed:
        return Observed(self.num_steps, len(self.configs), num_nodes, updates=True)

    def _begin(self) -> None:
        super()._begin()
        self.pure = True
        self.simulation.comm.ledger.asynchronous = True
        for ledger in self.ledgers:
            ledger.asynchronous = True

    def step(self, events: Sequence[Event], measured: bool) -> list[int]:
        """Let the servers make an update, and return which configurations have diverged in it.

        Args:
            events: those up to it.
            measured: has no meaning here: all nodes are measured with the server's parameters.
        """
        self.state, row = self.simulation.tick(self.state, events, self._batches)
        sent = [row.sent_by(number) for number in self._groups]
        for ledger, transfers in zip(self.ledgers, sent):
            ledger.add(row.tick - 1, transfers)
        plan: Any = self.configs[0].plan
        arrivals, table = plan.arrivals(row.tick), self.simulation.tables[0]
        losses = row.losses.cpu().double().view(len(self.configs), -1).numpy()
        active: np.ndarray = np.zeros(losses.shape, dtype=bool)
        active[:, [arrival.node for arrival in arrivals]] = True
        per_call = table.columns(row.tick)["nodes_per_call"]
        self.observed.put(
            row.tick - 1, train_losses=losses, active=active, bytes=[bytes_of(transfers) for transfers in sent],
            totals=[ledger.totals for ledger in self.ledgers], seconds=time.perf_counter() - self._start,
            nodes_per_call=np.nan if per_call is None else per_call, **self._each_rates(plan, row.tick),
        )  # fmt: skip
        return self._diverged(losses, active)

    def _each_rates(self, plan: Any, tick: int) -> dict[str, list[float]]:
        """Return the learning rates of each configuration, of the nodes and of the server; nan where there is none."""
        found = dict[str, list[float]](lr=[], outer_lr=[])
        for group in self.simulation.groups:
            strategy: EventDriven = group.algorithm
            steps, nodes = last_steps(plan.arrivals(tick))
            if group.size == 1:
                lr = strategy.inner.lr(steps, plan.max_steps, nodes)
            else:
                lr = strategy.inner.wide(len(nodes)).lr(steps * group.size, plan.max_steps)
            outer_lr = strategy.server_rate(plan.updates[tick - 1], group.run.num_nodes)
            found["lr"] += _means(lr, group.size)
            found["outer_lr"] += _means(np.nan if outer_lr is None else outer_lr, group.size)
        return found

    def _shown(self, columns: dict[str, Any]) -> dict[str, Any]:
        return recorded_of(self.configs[0].strategy, self.configs[0].num_nodes, columns)

    def _load_state(self, state: dict[str, Any], curves: dict[int, Curve]) -> None:
        super()._load_state(state, curves)
        for c, curve in curves.items():
            if len(curve.totals):
                ledger, last = self.ledgers[c], curve.totals[-1]
                ledger.total_bytes, ledger.total_received_bytes, ledger.total_payload_bytes = map(float, last)


def _means(rates: Any, size: int) -> list[float]:
    """Return the mean rate of each configuration, of a number or of `[C]` or `[C rows]`."""
    each = torch.as_tensor(rates, dtype=torch.float64).detach().reshape(-1)
    return each.expand(size).tolist() if len(each) == 1 else each.reshape(size, -1).mean(1).tolist()
