"""Asynchronous runs, which advance from one update of the server to the next."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from vecgym.clock.compute import Compute
from vecgym.collectives.base import payload_bytes
from vecgym.core import nodes
from vecgym.core.nodes import Nodes
from vecgym.core.tree import Tree
from vecgym.runs.async_plan import AsyncPlan, Updates, stop_of
from vecgym.runs.evaluation import evaluated_columns
from vecgym.runs.run import Run
from vecgym.simulation import Row
from vecgym.simulation.availability import Availability
from vecgym.strategy.asynchronous import EventDriven

M = TypeVar("M", bound=nn.Module)


class AsyncRun(Run[M]):
    """The asynchronous training of one model; see `Run`.

    The order of all events is known before the first step: `plan`.

    Attributes:
        plan: all events, and what they imply.
        timeline: what every node did when.
    """

    unit = "update"

    def _simulation(self, num_examples: tuple[int, ...]) -> Any:
        options, strategy, K = self.options, self.options.strategy, self.options.num_nodes
        assert isinstance(strategy, EventDriven)
        assert isinstance(options.compute, Compute)
        sizes = {name: payload_bytes(p[None]) for name, p in self.engine.params.items()}
        stop = stop_of(self.num_steps, K, options.max_updates, options.max_seconds, options.max_steps)
        assert options.availability is None or isinstance(options.availability, Availability)
        self.plan = AsyncPlan.of(
            strategy, K, options.compute, options.network, sizes, options.seed, stop, options.availability
        )
        self.timeline = self.plan.timeline
        self.num_steps = len(self.plan.updates)
        return Updates(
            self.engine, strategy, self.plan, self.train.read, seed=options.seed, num_examples=num_examples,
            minibatch_size=options.minibatch_size,
        )  # fmt: skip

    def _begin(self) -> None:
        self.recorder.add(sim_seconds=0.0)
        self.evaluate()

    @property
    def _updates(self) -> Updates:
        assert isinstance(self.simulation, Updates)
        return self.simulation

    def _measure(self, params: Tree, tick: int) -> None:
        return  # the server's parameters are what is evaluated

    def _record(self, row: Row, interrupted: list[int], evaluated: bool) -> None:
        step, plan = row.tick, self.plan
        self.recorder.step(
            step, self._updates.metrics(row), epoch=plan.epoch(step, self.train), seen=plan.seen(step, self.train),
            fetch=evaluated, **self._updates.timetable.columns(step),
        )  # fmt: skip

    def _evaluates(self, step: int) -> bool:
        interval = self.options.val_seconds
        if interval is None:
            return super()._evaluates(step)
        now = float(self.timeline.update_seconds[step - 1])
        before = float(self.timeline.update_seconds[step - 2]) if step > 1 else 0.0
        return now // interval > before // interval

    def evaluate(self) -> None:
        """Record the validation loss of the server's model; without a server, of the nodes' mean and of each node."""
        result = self.simulation.result(self.state)
        (columns,) = evaluated_columns(self.engine, self.state, [self.val], self.simulation.comm, result)
        if recorded := recorded_of(self.options.strategy, self.options.num_nodes, columns):
            self.recorder.add(**recorded)

    def _final_nodes(self) -> Nodes[M]:
        """Return the nodes with the strategy's `own_parameters`; the run's model is still the server's."""
        K, strategy, state = self.options.num_nodes, self._updates.strategy, self.state
        params: Tree = {**self._all_params(), **strategy.own_parameters(state)}
        result = self.simulation.result(state).params
        of_nodes = result is strategy.own_parameters(state)
        expanded = nodes.expand(params, K), nodes.expand(state.buffers, K)
        return Nodes(self.model, K, *expanded, result=None if of_nodes else nodes.expand(result, K))


OF_NODES = ("val_losses", "consensus_distance", "consensus_distance_before")


def recorded_of(strategy: Any, num_nodes: int, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded columns of an evaluation: with a server, none of each node, since all have its parameters.

    >>> from vecgym.strategy import ADPSGDStrategy, AsyncStrategy
    >>> columns = {"val_loss": 1.0, "val_loss_local": 1.0, "val_losses": [1.0, 1.0], "consensus_distance_before": 0.0}
    >>> recorded_of(AsyncStrategy(), 2, columns), list(recorded_of(ADPSGDStrategy(), 2, columns))
    ({'val_loss': 1.0}, ['val_loss', 'val_loss_local', 'val_losses'])
    """
    if strategy.server_of(num_nodes) is None:
        return {name: x for name, x in columns.items() if name != "consensus_distance_before"}
    return {name: x for name, x in columns.items() if not name.endswith("_local") and name not in OF_NODES}
