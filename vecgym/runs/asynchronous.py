"""Asynchronous runs: from update to update of the server."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from vecgym.clock.compute import Compute
from vecgym.collectives.base import payload_bytes
from vecgym.core import nodes
from vecgym.core.nodes import Nodes
from vecgym.engine.asynchronous import AsyncSimulation
from vecgym.engine.kinds import simulation_of
from vecgym.runs.async_plan import AsyncPlan, stop_of
from vecgym.runs.evaluation import evaluated_columns
from vecgym.runs.run import Run
from vecgym.strategy.asynchronous import EventDriven

M = TypeVar("M", bound=nn.Module)


class AsyncRun(Run[M]):
    """The asynchronous training of one model; see `Run`.

    The order of all events is known before the first step: `plan`.

    Attributes:
        plan: all events, and what follows from them.
        timeline: what every node did when.
    """

    unit = "update"

    def _simulation(self, num_examples: tuple[int, ...]) -> Any:
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

    def _begin(self) -> None:
        self.recorder.add(sim_seconds=0.0)
        self.evaluate()

    def _go(self, interrupted: list[int]) -> None:
        assert isinstance(self.simulation, AsyncSimulation)
        for events in self.plan.updates[self.state.step :]:
            state, updated = self.simulation.update(self.state, events)
            self._after(interrupted, state, updated)
            if self._stopped(interrupted, state):
                break

    def _measure(self, params: Any, tick: int) -> None:
        return  # all are measured with the server's parameters

    def _record(self, row: Any, interrupted: list[int], evaluated: bool) -> None:
        step, plan, computed = self.state.step, self.plan, row.computed
        self.recorder.step(
            step, row.metrics, epoch=plan.epoch(step, self.train), seen=plan.seen(step, self.train), fetch=evaluated,
            **plan.columns(step), nodes_per_call=sum(computed) / len(computed) if computed else None,
        )  # fmt: skip

    def _evaluates(self, step: int) -> bool:
        interval = self.options.val_seconds
        if interval is None:
            return super()._evaluates(step)
        now = float(self.timeline.update_seconds[step - 1])
        before = float(self.timeline.update_seconds[step - 2]) if step > 1 else 0.0
        return now // interval > before // interval

    def evaluate(self) -> None:
        """Record the validation loss of the server's model; without one, of the mean of the nodes and of each."""
        assert isinstance(self.simulation, AsyncSimulation)
        result = self.simulation.result(self.state)
        (columns,) = evaluated_columns(self.engine, self.state, [self.val], self.simulation.comm, result)
        if self.simulation.server is None:
            columns.pop("consensus_distance_before", None)
            self.recorder.add(**columns)
        elif shown := of_server(columns):
            self.recorder.add(**shown)

    def _final_nodes(self) -> Nodes[M]:
        """Return the parameters from which each node's present round began; without a server, the nodes' own.

        The run's model is the server's all the same.
        """
        assert isinstance(self.simulation, AsyncSimulation)
        if self.simulation.server is None:
            return super()._final_nodes()
        starts = self.state.strategy["starts"]
        params = {name: starts.get(name, x) for name, x in self._all_params().items()}
        K = self.options.num_nodes
        result = nodes.expand(self.simulation.result(self.state).params, K)
        return Nodes(self.model, K, nodes.expand(params, K), nodes.expand(self.state.buffers, K), result=result)


OF_NODES = ("val_losses", "consensus_distance", "consensus_distance_before")


def of_server(columns: dict[str, Any]) -> dict[str, Any]:
    """Leave out what an evaluation says of each node: all are measured with the server's parameters.

    >>> of_server({"val_loss": 1.0, "val_loss_local": 1.0, "val_losses": [1.0, 1.0]})
    {'val_loss': 1.0}
    """
    return {name: x for name, x in columns.items() if not name.endswith("_local") and name not in OF_NODES}
