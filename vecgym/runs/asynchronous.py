"""Asynchronous runs: from update to update of the server."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from vecgym.clock.compute import Compute
from vecgym.collectives.base import payload_bytes
from vecgym.core import nodes
from vecgym.core.nodes import Nodes
from vecgym.engine.asynchronous import AsyncSimulation, Updated
from vecgym.engine.kinds import simulation_of
from vecgym.engine.simulation import Simulation
from vecgym.runs.async_plan import AsyncPlan, stop_of
from vecgym.runs.evaluation import average, evaluated_columns
from vecgym.runs.interrupts import interrupts
from vecgym.runs.run import Run, is_due
from vecgym.strategy.asynchronous import EventDriven

M = TypeVar("M", bound=nn.Module)


class AsyncRun(Run[M]):
    """The asynchronous training of one model; see `Run`.

    The order of all events is known before the first step: `plan`.

    Attributes:
        plan: all events, and what follows from them.
        timeline: what every node did when.
    """

    def _simulation(self, num_examples: tuple[int, ...], limits: tuple[int, ...] | None) -> Simulation:
        options, strategy, K = self.options, self.options.strategy, self.options.num_nodes
        assert isinstance(strategy, EventDriven)
        assert isinstance(options.compute, Compute)
        sizes = {name: payload_bytes(p[None]) for name, p in self.engine.params.items()}
        stop = stop_of(self.num_steps, K, options.max_updates, options.max_seconds, options.max_steps)
        self.plan = AsyncPlan.of(strategy, K, options.compute, options.network, sizes, options.seed, stop)
        self.timeline = self.plan.timeline
        self.num_steps = len(self.plan.updates)
        simulation = simulation_of(strategy)(
            self.model, strategy, self._read, self.plan.events, K, engine=self.engine, seed=options.seed,
            minibatch_size=options.minibatch_size, num_examples=num_examples,
        )  # fmt: skip
        strategy.inner_optim.check_steps(K, simulation.max_steps, "inner optimizer")
        strategy.check_updates(K, self.num_steps)
        return simulation

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
                for events in self.plan.updates[self.state.step :]:
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
        step, plan, computed = self.state.step, self.plan, updated.computed
        self.recorder.update(
            step, updated.metrics, epoch=plan.epoch(step, self.train), seen=plan.seen(step, self.train),
            fetch=evaluated, **plan.columns(step),
            nodes_per_call=sum(computed) / len(computed) if computed else None,
        )  # fmt: skip

    def evaluate(self) -> None:
        """Record the validation loss of the server's model; without one, of the mean of the nodes and of each."""
        assert isinstance(self.simulation, AsyncSimulation)
        (columns,) = evaluated_columns(self.engine, self.state, [self.val], self.simulation.comm)
        if self.simulation.server is None:
            columns.pop("consensus_distance_before", None)
            self.recorder.add(**columns)
        elif shown := of_server(columns):
            self.recorder.add(**shown)

    def average(self) -> M:
        """Return a copy of the model with the server's parameters."""
        params, buffers = (average(values, self.comm) for values in (self._all_params(), self.state.buffers))
        return nodes.fill(self.model, {**params, **buffers})

    def _final_nodes(self) -> Nodes[M]:
        """Return the parameters from which each node's present round began; without a server, the nodes' own."""
        assert isinstance(self.simulation, AsyncSimulation)
        if self.simulation.server is None:
            return super()._final_nodes()
        starts = self.state.strategy["starts"]
        params = {name: starts.get(name, x) for name, x in self._all_params().items()}
        K = self.options.num_nodes
        return Nodes(self.model, K, nodes.expand(params, K), nodes.expand(self.state.buffers, K))


OF_NODES = ("val_losses", "consensus_distance", "consensus_distance_before")


def of_server(columns: dict[str, Any]) -> dict[str, Any]:
    """Leave out what an evaluation says of each node: all are measured with the server's parameters.

    >>> of_server({"val_loss": 1.0, "val_loss_local": 1.0, "val_losses": [1.0, 1.0]})
    {'val_loss': 1.0}
    """
    return {name: x for name, x in columns.items() if not name.endswith("_local") and name not in OF_NODES}
