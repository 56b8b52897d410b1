"""A run: `Run.loop` is all of it, on one page. An `AsyncRun` advances from one update of the server to the next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from vecgym.clock.asynchronous import AsyncPlan, stop_of
from vecgym.collectives import Collectives
from vecgym.collectives.base import payload_bytes
from vecgym.core import nodes, tree
from vecgym.core.devices import environment, fetched
from vecgym.core.errors import warn
from vecgym.core.nodes import Nodes
from vecgym.core.tree import Tree
from vecgym.data import Batches, EvalBatches, num_steps
from vecgym.engine import Engine
from vecgym.engine.constancy import copied
from vecgym.engine.contract import warn_of_parts
from vecgym.records.history import History
from vecgym.runs.checkpoint import Checkpointer
from vecgym.runs.evaluation import average, correlation, distance_of, evaluated_columns, recorded_of
from vecgym.runs.memory import fitting_sizes
from vecgym.runs.multiprocess import STOP, Session, interrupts
from vecgym.runs.options import FitOptions, described, presence_of
from vecgym.runs.recorder import Loggers, Recorder, rates_of
from vecgym.simulation import Event, Simulation, State, TickRecord, run
from vecgym.simulation.simulation import Draft, warn_of_untrained, without_gradient
from vecgym.simulation.state import Metrics
from vecgym.strategy.asynchronous import EventDriven
from vecgym.strategy.simulated import asynchronous_simulation, metrics_of, simulation_of

M = TypeVar("M", bound=nn.Module)
ENOUGH_STEPS = 3  # before equal losses say something: a model of zeros has one loss for all examples at first


@dataclass(frozen=True)
class Task:
    """The model and the datasets of a run; see `vecgym.Trainer`."""

    model: Any
    train_dataset: Any
    val_dataset: Any


class Run(Generic[M]):
    """The training of one model on the nodes of `comm`; all of its processes take the same steps together.

    The constructor prepares and checks everything, and `loop` trains. After the loop, even if it was interrupted or
    failed, the run holds the state that it reached.

    Args:
        task: the model, which is copied, and the data.
        options: of the run.
        comm: the collectives of the nodes in this process.
        device: of these nodes.
        after_step: called with the complete row of each step, and before the first step with that of step 0. It needs
            the losses of every step on the host; with None they can stay on a device. StopIteration ends the run.

    Attributes:
        history, ledger: of the run.
        state: of the simulation, after the last step taken.
        nodes: the stacked final state; None until the loop has ended.
        interrupts: yields, during the loop, a list that is no longer empty once the run must end after this step: of
            signals, or `STOP`.
    """

    unit = "step"  # of progress
    interrupts: Callable[[], AbstractContextManager[list[int]]] = staticmethod(interrupts)

    def __init__(
        self, task: Task, options: FitOptions, comm: Collectives, device: torch.device,
        after_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:  # fmt: skip
        self.comm = comm
        self.session = session = Session(comm)
        self.after_step = after_step
        self._may_stop = any(x is not None for x in (after_step, options.stop, options.max_seconds, options.max_bytes))
        self.train = _training_batches(task.train_dataset, options, session, device)
        self.num_steps = num_steps(self.train, options.num_epochs, options.max_steps)
        options.strategy.check(comm.num_nodes, self.num_steps)

        self.model: M = copied(task.model).to(device)
        first = self.train.batch(0)
        self._differ = any(not torch.equal(x, x[:1].expand_as(x)) for x in tree.leaves(first))  # of several nodes
        self.engine = _engine(self.model, options, first, self.num_steps, session)
        self.options, memory = _fitted(options, self.engine, self.train, self.num_steps, session)
        if session.rank == 0:
            warn_of_parts(first, self.options.minibatch_size, self.engine.weighted)
        self.val = _validation_batches(task.val_dataset, self.options, session, device)

        num_examples = session.joined(self.train.shard_sizes)
        self.simulation = self._simulation(num_examples)
        self.ledger = self.simulation.comm.ledger
        if options.network is not None:
            self.ledger.routes = options.network.routes
        self.history = History({**self._settings(), **memory})
        loggers = Loggers(options.logger if session.rank == 0 else None, options.log_interval)
        self.recorder = Recorder(self.history, self.train, options, loggers, self.simulation)
        if self.simulation.run.presence is not None and session.rank == 0:
            self.simulation.run.presence.warn_never_present()
        if after_step is not None or options.stop is not None:
            self.recorder.interval = self.recorder.at_once = 1
        self.checkpoints = Checkpointer(self.options, self.simulation, self.recorder, session)
        self.state = self.checkpoints.start()
        if self.checkpoints.run_id:
            self.history.settings["run_id"] = self.checkpoints.run_id
        self.nodes: Nodes[M] | None = None
        self._distance_before: Tensor | None = None  # of the nodes, before the exchange of an evaluated step

    def loop(self) -> None:
        """Train: after each step record, evaluate, log, save a checkpoint, and stop if interrupted or asked to."""
        recorder, checkpoints = self.recorder, self.checkpoints
        shown = self.options.progress and self.session.rank == 0
        progress = tqdm(total=self.num_steps, initial=self.state.step, disable=not shown, unit=self.unit)
        try:
            with torch.enable_grad(), self.interrupts() as self._interrupted, progress as bar:
                at_end = checkpoints.last is not None and self._at_end()
                recorder.start(self.history.settings, bar, reopen=at_end)
                checkpoints.begin()
                if checkpoints.last is None:
                    if self.options.strategy.asynchronous:  # its first row has the time, even without a validation
                        recorder.add(sim_seconds=0.0)
                    self.evaluate()
                    self._agree(self._asked_to_end())
                    checkpoints.save_if_due(self.state, last=False)
                elif at_end:  # by a limit that was not there, or was larger
                    self.evaluate()
                if self.session.stop(self._interrupted) != STOP:
                    run(self.simulation, self.state, [self._after], before=self._observe, stop=self._stopped)
                self._tell_untrained()
                recorder.flush()
                self._warn_equal()
                if self.session.stop(self._interrupted) > STOP:
                    how = "" if checkpoints.last is None else f"; resume=True continues from {checkpoints.last}"
                    raise KeyboardInterrupt(f"interrupted after {self.unit} {self.state.step} of {self.num_steps}{how}")
        finally:
            checkpoints.close()
            self.nodes = self._final_nodes()
            self.history.settings.update(self._engine_settings())
            self.simulation.close()
            recorder.finish()

    def _tell_untrained(self) -> None:
        """Note in the history, and warn of, the parameters that never had a gradient."""
        here = without_gradient(self.state, self.simulation.timetable, self.simulation.here.start)
        each = self.session.each(here)
        if self.session.rank == 0:
            self.history.settings["without_gradient"] = warn_of_untrained(each)

    def _warn_equal(self) -> None:
        """Warn if nodes always had one loss, although they read different examples."""
        losses = [row["train_losses"] for row in self.history if row["step"]]
        if (
            self.session.rank == 0
            and self._differ
            and len(losses) >= ENOUGH_STEPS
            and all(len(set(x)) == 1 and x[0] for x in losses)  # a loss of 0 may be that of a perfect model
        ):
            warn(
                f"all {self.options.num_nodes} nodes had the same loss in each of {len(losses)} steps, and their "
                "examples differ: the model, or loss_fn, seems to ignore its batch."
            )

    def _ends(self, row: dict[str, Any]) -> bool:
        return self.options.ends(row, evaluates=self.val is not None)

    def _after(self, state: State, row: TickRecord) -> None:
        """Record a step and the measurements after it."""
        evaluated = self._is_evaluated(state.step)
        self.state = state
        self._record(row, evaluated)
        if evaluated:
            self._evaluate_step()
        asked = self._asked_to_end()
        ends = self._agree(asked or (self._may_stop and self._ends(self.recorder.row)))
        if self.recorder.loggers.stopped:
            self._interrupted.append(STOP)
        if not evaluated and (ends or self.session.stop(self._interrupted) == STOP):
            self._evaluate_step()
        self._distance_before = None

    def _stopped(self, state: State) -> bool:
        """Save a checkpoint if one is due; return whether the run ends after this step."""
        stop = self.session.stop(self._interrupted) > 0
        self.checkpoints.save_if_due(state, last=stop or state.step == self.num_steps)
        return stop

    def _record(self, row: TickRecord, evaluated: bool) -> None:
        metrics = self.session.observed(self._metrics(row), self._interrupted)
        self.recorder.step(self.state.step, metrics, fetch=evaluated)
        if is_due(self.state.step, self.options.correlation_interval):
            members = self.simulation.members(self.state.step - 1)
            self.recorder.add(correlation=correlation(self.state.params, self.comm, members))

    def _metrics(self, row: TickRecord) -> Metrics:
        simulation, once = self.simulation, self.state.home is self.state.shared
        lr, outer_lr = rates_of(simulation.algorithm, simulation.run, simulation.timetable, row.tick - 1, once)
        return Metrics(row.losses, lr, row.active, outer_lr, row.transfers)

    def _is_evaluated(self, step: int) -> bool:
        """Whether the nodes are evaluated after this step."""
        return step == self.num_steps or is_due(step, self.options.val_interval)

    def _simulation(self, num_examples: tuple[int, ...]) -> Simulation:
        options = self.options
        return simulation_of(
            self.model, options.strategy, self.comm, engine=self.engine, max_steps=self.num_steps, seed=options.seed,
            minibatch_size=options.minibatch_size, num_examples=num_examples, exact=options.exact,
            presence=presence_of(options, self.num_steps, num_examples),
            read=partial(self.train.read, shard_sizes=num_examples),
        )  # fmt: skip

    def evaluate(self) -> None:
        """Record the validation losses, and how far apart the nodes are; with a server, only its model's loss."""
        result = self.simulation.result(self.state)
        (columns,) = evaluated_columns(self.engine, self.state, [self.val], self.comm, result)
        if recorded := recorded_of(self.options.strategy, self.simulation.run, self.state.step, columns):
            self.recorder.add(**recorded)

    def _evaluate_step(self) -> None:
        self._measure(self.state, self.state.step - 1)
        if self._distance_before is not None:
            self.recorder.add(consensus_distance_before=float(fetched(self._distance_before)))
        self.evaluate()

    def average(self) -> M:
        """Return a copy of the model with the mean of the present nodes; all processes must call this."""
        result = self.simulation.result(self.state)
        params = average({**self._all_params(), **result.params}, self.comm, result.members)
        return nodes.fill(self.model, params | average(self.state.buffers, self.comm, result.of_buffers))

    def _observe(self, event: Event, draft: Draft) -> None:
        """Measure the nodes' distance before the first event after their training."""
        if not (event.reads or event.what == "rejoin"):
            self._measure(draft, draft.tick)

    def _measure(self, state: State, tick: int) -> None:
        """Measure the nodes' distance, once in a step that is evaluated or may be the last.

        In several processes that takes an exchange, which it is worth only where a step is sure to be evaluated. Of an
        asynchronous run the server's parameters are what is evaluated.
        """
        if self._distance_before is not None or self.options.strategy.asynchronous:
            return
        if self._is_evaluated(tick + 1) or (self._may_stop and self.session.num_processes == 1):
            members = self.simulation.members(tick)
            self._distance_before = distance_of(state.params, self.comm, members)

    def _asked_to_end(self) -> bool:
        """Call `after_step` with the row; return whether it asks for the end of the run."""
        try:
            if self.after_step is not None:
                self.after_step(self.recorder.row)
        except StopIteration:
            return True
        return False

    def _agree(self, stop: bool) -> bool:
        """Return whether any process asks for the end of the run."""
        return self._may_stop and self.session.agree(stop)

    def _at_end(self) -> bool:
        """Return whether a resumed run has ended, and its last step is not evaluated."""
        # A function with a memory sees the earlier rows again.
        ends = self._agree([self._ends(row) for row in self.history if row["step"]][-1:] == [True])
        last = self.history.rows[-1:]
        evaluated = any(name.startswith(("val_loss", "consensus")) for row in last for name in row)
        return (ends or self.state.step == self.num_steps) and not evaluated

    def _all_params(self) -> Tree:
        """Return all parameters, frozen ones too, `[1 or L, *]`, in the model's order."""
        values = {**self.state.params, **{name: p[None] for name, p in self.engine.frozen.items()}}
        return {name: values[name] for name, _ in self.model.named_parameters()}

    def _final_nodes(self) -> Nodes[M]:
        num_local, result, own = len(self.comm.node_ids), self.simulation.result(self.state), self.state.params
        if isinstance(self.options.strategy, EventDriven):
            own = self.options.strategy.own_parameters(self.state)
        params, buffers = (nodes.expand(x, num_local) for x in ({**self._all_params(), **own}, self.state.buffers))
        result_params = None if result.params is own else nodes.expand(result.params, num_local)
        whose = result[1:] if num_local == self.comm.num_nodes else (None, None)
        return Nodes(self.model, num_local, params, buffers, whose[0], result_params, whose[1])

    def _settings(self) -> dict[str, Any]:
        """Return the settings for the history: the user's options, and what was chosen automatically."""
        options = self.options
        return {
            "strategy": repr(options.strategy), "hyperparameters": described(options.strategy),
            "num_nodes": options.num_nodes, "max_steps": self.num_steps, **options.recorded,
            "device": str(self.engine.device), "backend": options.backend, "num_processes": self.session.num_processes,
            **self._engine_settings(), "without_gradient": [], "environment": environment(),
        }  # fmt: skip

    def _engine_settings(self) -> dict[str, Any]:
        """Return how the nodes are computed, which may change during the run."""
        plan = self.engine.plan
        return {
            "engine": plan.engine, "node_threads": plan.node_threads, "chunk_size": plan.chunk_size,
            "channels_last": plan.channels_last, "engine_reason": plan.reason,
        }  # fmt: skip


class AsyncRun(Run[M]):
    """The asynchronous training of one model; see `Run`.

    The order of all events is known before the first step: `plan`.

    Attributes:
        plan: all events, and what they imply.
        timeline: what every node did when.
    """

    unit = "update"

    def _simulation(self, num_examples: tuple[int, ...]) -> Simulation:
        options, strategy, K = self.options, self.options.strategy, self.options.num_nodes
        assert isinstance(strategy, EventDriven)
        assert options.compute is not None
        sizes = {name: payload_bytes(p[None]) for name, p in self.engine.params.items()}
        stop = stop_of(self.num_steps, K, options.max_updates, options.max_seconds, options.max_steps)
        self.plan = AsyncPlan.of(
            strategy, K, options.compute, options.network, sizes, options.seed, stop, options.availability
        )
        self.strategy, self.timeline = strategy, self.plan.timeline
        self.num_steps = len(self.plan.updates)
        return asynchronous_simulation(
            self.engine, strategy, self.plan, self.train.read, seed=options.seed, num_examples=num_examples,
            minibatch_size=options.minibatch_size,
        )  # fmt: skip

    def _metrics(self, row: TickRecord) -> Metrics:
        return metrics_of(self.strategy, self.plan, row.tick, row.losses, row.transfers)

    def _is_evaluated(self, step: int) -> bool:
        interval = self.options.val_seconds
        if interval is None or step == self.num_steps:
            return super()._is_evaluated(step)
        before, now = [0.0, *self.timeline.update_seconds[max(step - 2, 0) : step].tolist()][-2:]
        return now // interval > before // interval


def is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def _training_batches(dataset: Any, options: FitOptions, session: Session, device: torch.device) -> Batches:
    return Batches(
        dataset, options.num_nodes, options.batch_size, shuffle=options.shuffle, seed=options.seed, device=device,
        node_ids=session.comm.node_ids, dataloader_kwargs=options.dataloader_kwargs,
        agree=lambda longest: max(session.each(longest)),
        own_epochs=getattr(options.availability, "own_epochs", False),
    )  # fmt: skip


def _validation_batches(
    dataset: Any, options: FitOptions, session: Session, device: torch.device
) -> EvalBatches | None:
    if dataset is None or options.val_size == 0:
        return None
    size = options.minibatch_size or options.batch_size
    return EvalBatches(
        dataset, size, options.val_size, options.num_nodes, seed=options.seed, device=device,
        node_ids=session.comm.node_ids, dataloader_kwargs=options.dataloader_kwargs,
    )  # fmt: skip


def _engine(model: nn.Module, options: FitOptions, batch: Any, num_steps: int, session: Session) -> Engine:
    """Return an engine that has inspected the model."""
    kind, chunk_size, node_threads = options.engine, options.chunk_size, options.node_threads
    if options.exact:
        kind, chunk_size, node_threads = ("vmap", 1, 1) if kind == "vmap" else ("loop", None, 1)
    engine = Engine(
        model, engine=kind, chunk_size=chunk_size, node_threads=node_threads, autocast=options.autocast,
        compile=options.compile,
    )  # fmt: skip
    num_passes = None if options.strategy.asynchronous else num_steps
    with torch.enable_grad():
        engine.prepare(batch, session.facts, options.strategy.mean_gradient, num_passes)
    return engine


def _fitted(
    options: FitOptions, engine: Engine, train: Batches, max_steps: int, session: Session
) -> tuple[FitOptions, dict[str, Any]]:
    """Cut the engine's plan and the batch so that the run fits into memory, in the same way in every process."""
    if options.max_memory_usage is None:
        return options, {}
    chunk, part, report = fitting_sizes(engine, options, train.batch(0), max_steps, session.num_processes)
    # The smallest chunk with its part: a batch is cut only once nodes are computed one by one.
    chunk_size, minibatch_size = min(session.each((chunk or options.num_nodes, part or options.batch_size)))
    if chunk is not None:
        engine.use(replace(engine.plan, chunk_size=chunk_size))
    if minibatch_size < options.batch_size:
        options = replace(options, minibatch_size=minibatch_size)
    return options, {"memory": report}
