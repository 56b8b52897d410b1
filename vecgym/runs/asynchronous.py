"""Asynchronous runs: from update to update of the server."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from vecgym.clock.asynchronous import AsyncTimeline, rules_of
from vecgym.clock.compute import Compute
from vecgym.collectives.base import payload_bytes
from vecgym.core import nodes
from vecgym.core.nodes import Nodes
from vecgym.engine.asynchronous import AsyncSimulation, Updated, updates_of
from vecgym.engine.events import Arrival, Stop, schedule
from vecgym.engine.simulation import Simulation
from vecgym.runs.evaluation import average, evaluated_columns
from vecgym.runs.interrupts import interrupts
from vecgym.runs.run import Run, is_due
from vecgym.strategy.asynchronous import AsyncStrategy

M = TypeVar("M", bound=nn.Module)


class AsyncRun(Run[M]):
    """The asynchronous training of one model; see `Run`.

    The order of all events is known before the first step: `timeline`.

    Attributes:
        timeline: what every node did when.
    """

    def _simulation(self, num_examples: tuple[int, ...], limits: tuple[int, ...] | None) -> Simulation:
        options, strategy, K = self.options, self.options.strategy, self.options.num_nodes
        assert isinstance(strategy, AsyncStrategy)
        assert isinstance(options.compute, Compute)
        num_bytes = sum(payload_bytes(p[None]) for p in self.engine.params.values())
        self.rules, seconds = rules_of(strategy, K, options.compute, options.network, num_bytes)
        events = schedule(self.rules, seconds, self._stop())
        self.updates = updates_of(events)
        self.num_steps = len(self.updates)
        if not self.updates:
            raise ValueError(
                f"max_seconds={options.max_seconds} ends the run before the first update of the server: give more."
            )
        self.timeline = AsyncTimeline.of(events, self.rules, seconds, options.network, options.compute)
        simulation = AsyncSimulation(
            self.model, strategy, self._read, events, K, engine=self.engine, seed=options.seed,
            minibatch_size=options.minibatch_size, num_examples=num_examples,
        )  # fmt: skip
        strategy.inner_optim.check_steps(K, simulation.max_steps, "inner optimizer")
        strategy.server.check(K, self.num_steps)
        return simulation

    def _stop(self) -> Stop:
        """Return when the run ends; without anything said, after `num_epochs`."""
        options = self.options
        given = options.max_updates is not None or options.max_seconds is not None
        steps = None if given and options.max_steps is None else self.num_steps * options.num_nodes
        return Stop(options.max_updates, options.max_seconds, steps)

    def _read(self, here: Any, steps: Any) -> tuple[Any, list[int]]:
        return self.train.at(steps, here)

    def loop(self) -> None:
        """Train: let the server make update after update; record, evaluate, log, save, and stop if interrupted."""
        recorder, checkpoints = self.recorder, self.checkpoints
        simulation = self.simulation
        assert isinstance(simulation, AsyncSimulation)
        progress = tqdm(total=self.num_steps, initial=self.state.step, disable=not self.progress, unit="update")
        try:
            with torch.enable_grad(), interrupts() as interrupted, progress as bar:
                recorder.start(self.history.settings, bar)
                checkpoints.begin()
                if checkpoints.resumed is None:
                    recorder.add(sim_seconds=0.0)
                    self.evaluate()
                    self._tell()
                    checkpoints.save_if_due(self.state, last=False)
                for events in self.updates[self.state.step :]:
                    self.state, updated = simulation.update(self.state, events)
                    last = self.state.step == self.num_steps
                    evaluated = last or self._evaluates(self.state.step)
                    self._record(updated, evaluated)
                    if evaluated:
                        self.evaluate()
                    self._tell()
                    stop = self.session.stop(interrupted)
                    checkpoints.save_if_due(self.state, last=last or stop)
                    if stop:
                        break
                recorder.flush()
                if self.session.stop(interrupted):
                    how = checkpoints.how_to_resume()
                    raise KeyboardInterrupt(f"interrupted after update {self.state.step} of {self.num_steps}{how}")
        finally:
            self.nodes = self._final_nodes()
            simulation.close()
            recorder.finish()

    def _evaluates(self, update: int) -> bool:
        """Whether the server's model is evaluated after this update."""
        interval = self.options.val_seconds
        if interval is None:
            return is_due(update, self.options.val_interval)
        now = float(self.timeline.update_seconds[update - 1])
        before = float(self.timeline.update_seconds[update - 2]) if update > 1 else 0.0
        return now // interval > before // interval

    def _record(self, updated: Updated, evaluated: bool) -> None:
        step, arrivals = self.state.step, updated.arrivals
        totals = self._totals
        stale = [arrival.staleness for arrival in arrivals]
        self.recorder.update(
            step, updated.metrics, epoch=totals[step] / self.options.num_nodes / self.train.steps_per_epoch,
            seen=sum(map(self._examples, arrivals)), fetch=evaluated,
            sim_seconds=float(self.timeline.update_seconds[step - 1]), version=step, num_arrived=len(arrivals),
            staleness=sum(stale) / len(stale), staleness_max=max(stale), local_steps_total=totals[step],
            nodes_per_call=sum(updated.computed) / len(updated.computed) if updated.computed else None,
        )  # fmt: skip

    @property
    def _totals(self) -> list[int]:
        """The local steps in the first updates, from none to all of them."""
        if "_summed" not in vars(self):
            self._summed = [0]
            for events in self.updates:
                steps = sum(event.num_steps for event in events if isinstance(event, Arrival))
                self._summed.append(self._summed[-1] + steps)
        return self._summed

    def _examples(self, arrival: Arrival) -> int:
        """How many examples a round has seen."""
        own = self.train.limits
        most = self.train.batch_size if own is None else own[arrival.node]
        steps = range(arrival.first_step, arrival.first_step + arrival.num_steps)
        return sum(min(most, self.train.width(step)) for step in steps)

    def evaluate(self) -> None:
        """Record the validation loss of the server's model."""
        (columns,) = evaluated_columns(self.engine, self.state, [self.val], self.simulation.comm)
        # All nodes are measured with the server's parameters: what is said of each is the same.
        shown = {name: x for name, x in columns.items() if not name.endswith("_local") and name not in OF_NODES}
        if shown:
            self.recorder.add(**shown)

    def average(self) -> M:
        """Return a copy of the model with the server's parameters."""
        params, buffers = (average(values, self.comm) for values in (self._all_params(), self.state.buffers))
        return nodes.fill(self.model, {**params, **buffers})

    def _final_nodes(self) -> Nodes[M]:
        """Return the parameters from which each node's present round began."""
        starts = self.state.strategy["starts"]
        params = {name: starts.get(name, x) for name, x in self._all_params().items()}
        K = self.options.num_nodes
        return Nodes(self.model, K, nodes.expand(params, K), nodes.expand(self.state.buffers, K))


OF_NODES = ("val_losses", "consensus_distance", "consensus_distance_before")
