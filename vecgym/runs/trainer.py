"""The trainer: when to step, evaluate, log and stop. It knows no algorithm."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import torch
from torch import nn
from tqdm.auto import tqdm

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.collectives.distributed import DistributedCollectives, Wire, check_divides
from vecgym.collectives.ledger import Ledger
from vecgym.core import check, nodes
from vecgym.core.errors import DivergenceError
from vecgym.core.nodes import Nodes
from vecgym.core.tree import Tree
from vecgym.data import Batches, EvalBatches, num_steps
from vecgym.data.checks import check_dataset
from vecgym.engine import Engine, EngineName, check_settings, hooks
from vecgym.engine.contract import check_model
from vecgym.engine.simulation import Simulation, State
from vecgym.records import runfile
from vecgym.records.history import History
from vecgym.records.loggers import Logger
from vecgym.runs import multiprocess
from vecgym.runs.checkpoint import Checkpoints, Run, check_checkpoints
from vecgym.runs.evaluation import average, consensus_distance, correlation, evaluate
from vecgym.runs.memory import check_fraction, fitting_sizes, peak_bytes
from vecgym.runs.options import (
    FitOptions,
    OnDivergence,
    accumulated,
    check_strategy,
    checked,
    interrupts,
    resolve_device,
)
from vecgym.runs.recorder import Loggers, Recorder, show
from vecgym.runs.session import Together, one_thread
from vecgym.strategy import Strategy
from vecgym.strategy.described import described

if TYPE_CHECKING:
    from matplotlib.figure import Figure

M = TypeVar("M", bound=nn.Module)
Backend = Literal["stacked", "processes", "distributed"]


class Trainer(Generic[M]):
    """Train one model on K simulated nodes.

    Args:
        model: its `forward(batch)` returns the mean loss over the batch, a scalar. It is never changed.
        train_dataset: a map-style dataset, dealt to the nodes, or a factory
            `(rank, num_nodes, train_dataset) -> Dataset`, called once per node; see `vecgym.data.Batches`.
        val_dataset: likewise, the same for all nodes when it is a dataset; None: no validation.

    Attributes, after (or during, or after an interrupted) `fit`:
        history: what was recorded, as columns; see `vecgym.records.history`.
        nodes: the stacked final state, `nodes.params[name]` is `[K, *shape]`, likewise `nodes.buffers`; with
            `backend="distributed"` that of this process's nodes.
        ledger: every collective with its bytes.
        state: the state of the simulation itself, in which what is the same on every node is `[1, *]`; with
            `backend="distributed"` that of this process's nodes, with `backend="processes"` None.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> trainer = Trainer(Line(), torch.arange(8.0))
    >>> strategy = DiLoCoStrategy("sgd", H=2, inner_lr=0.1, outer_lr=0.5)
    >>> averaged = trainer.fit(strategy, num_nodes=2, batch_size=2, num_epochs=2, progress=False)
    >>> averaged.w.shape, trainer.nodes.params["w"].shape, trainer.history["step"]
    (torch.Size([]), torch.Size([2]), [1, 2, 3, 4])
    """

    def __init__(self, model: M, train_dataset: Any, val_dataset: Any = None) -> None:
        if isinstance(train_dataset, nn.Module) and not isinstance(model, nn.Module):
            raise TypeError(f"model is {check.kind_of(model)}; the model comes first, Trainer(model, train_dataset).")
        check_model(model)
        self.model = model
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        check_dataset(train_dataset, "train_dataset")
        if val_dataset is not None:
            check_dataset(val_dataset, "val_dataset")
        self.history = History()
        self.ledger = Ledger()
        self.state: State | None = None
        self._nodes: Nodes[M] | None = None
        self._training = False

    @property
    def nodes(self) -> Nodes[M]:
        """The stacked state of all nodes at the end of the last `fit`."""
        if self._nodes is None:
            raise AttributeError("trainer.nodes is there once fit() has begun.")
        return self._nodes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the average of the nodes, each node's model, history and settings to a file: see `vecgym.load`.

        Raises:
            AttributeError: before `fit`.
            ValueError: after `backend="distributed"`, where each process has its own nodes only.

        >>> import tempfile
        >>> from pathlib import Path
        >>> import vecgym
        >>> from vecgym.strategy import FedAvgStrategy
        >>> class Line(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = nn.Parameter(torch.zeros(()))
        ...     def forward(self, x):
        ...         return (self.w - x).square().mean()
        >>> trainer = Trainer(Line(), torch.arange(8.0))
        >>> strategy = FedAvgStrategy("sgd", lr=0.1)
        >>> averaged = trainer.fit(strategy, num_nodes=2, batch_size=2, device="cpu", progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer.save(Path(folder, "run.pt"))
        ...     saved = vecgym.load(Path(folder, "run.pt"))
        >>> saved, torch.equal(runfile.average["w"], averaged.w)
        (Saved(2 nodes after step 2, 2 rows), True)
        """
        nodes = self.nodes
        num_nodes = self.history.settings["num_nodes"]
        if len(nodes) < num_nodes:
            raise ValueError(
                f"this process has {len(nodes)} of {num_nodes} nodes: give fit a save_dir, and vecgym.load the "
                "checkpoint at its end, which has all of them."
            )
        step = self.history.last("step") or 0
        runfile.write(path, runfile.record(self.model, num_nodes, step, nodes.params, nodes.buffers, self.history))

    def plot(self, path: str | os.PathLike[str] | None = None, *, x: str = "step", title: str | None = None) -> Figure:
        """Draw the last run: losses with the nodes' spread, and the consensus distance; see `vecgym.plot.plot_runs`.

        Args:
            path: where to save the figure as well, such as "run.png".
            x: "step", "examples", "bytes" or "seconds".
            title: above the figure.

        >>> from vecgym.strategy import FedAvgStrategy
        >>> class Line(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = nn.Parameter(torch.zeros(()))
        ...     def forward(self, x):
        ...         return (self.w - x).square().mean()
        >>> trainer, strategy = Trainer(Line(), torch.arange(8.0)), FedAvgStrategy("sgd", lr=0.1)
        >>> averaged = trainer.fit(strategy, num_nodes=2, batch_size=2, device="cpu", progress=False)
        >>> [axes.get_xlabel() for axes in trainer.plot().axes if axes.get_xlabel()]
        ['optimizer steps', 'optimizer steps']
        """
        from vecgym.plot import plot_runs  # matplotlib takes a while to import

        return plot_runs({"run": self.history}, path, x=x, title=title)

    def fit(
        self,
        strategy: Strategy,
        num_nodes: int,
        *,
        num_epochs: int = 1,
        max_steps: int | None = None,
        batch_size: int = 16,
        minibatch_size: int | None = None,
        max_memory_usage: float | None = None,
        gradient_accumulation: int | None = None,
        shuffle: bool = True,
        device: str | torch.device | None = None,
        seed: int = 42,
        val_size: int | None = None,
        val_interval: int | None = 100,
        correlation_interval: int | None = None,
        autocast: bool = False,
        engine: EngineName = "auto",
        chunk_size: int | None = None,
        node_threads: int | None = None,
        on_divergence: OnDivergence = "raise",
        logger: Logger | Sequence[Logger] | None = None,
        log_interval: int = 1,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
        backend: Backend = "stacked",
        num_processes: int | None = None,
        exact: bool = False,
        timeout_s: float = multiprocess.TIMEOUT_S,
        save_dir: str | os.PathLike[str] | None = None,
        checkpoint_interval: int | None = None,
        resume: bool | str | os.PathLike[str] = False,
        keep_checkpoints: int = 2,
    ) -> M:
        """Train, and return a model that holds the average of the nodes.

        Args:
            strategy: what the nodes do and exchange, e.g. `DiLoCoStrategy(H=100)`.
            num_nodes: K.
            num_epochs: passes over the data, unless `max_steps` is given.
            max_steps: optimizer steps; the data repeats as needed.
            batch_size: examples per node and step; of a node that has fewer, all that it has. Each node's loss is the
                mean over its own. All make the same number of steps: local epochs, of as many steps as a node's own
                data gives, there are none yet.
            minibatch_size: examples at a time, whose gradients are accumulated; must divide `batch_size`.
            max_memory_usage: a part of the device's memory, such as 0.8: `chunk_size`, and then `minibatch_size` unless
                it is given, are chosen so that the run fits; see `vecgym.runs.memory.fitting_sizes`. Measured on CUDA,
                estimated elsewhere; `history.settings["memory"]` says what was found.
            gradient_accumulation: the same said in parts: N means `minibatch_size=batch_size / N`.
            shuffle: a new order in each epoch.
            device: "cpu", "cuda", "mps"; None: the best one present.
            seed: of data order, dropout and everything else that is random.
            val_size: validation examples; None: all; 0: never evaluate.
            val_interval: steps between evaluations, besides one at the start and one at the end; None: only those.
            correlation_interval: steps between measurements of the nodes' correlation; None: never.
            autocast: mixed precision in the forward passes.
            engine: "auto", "vmap", "loop" or "fastest"; see `vecgym.engine`. The choice is in `history.settings`.
            chunk_size: the most nodes computed in one call, to bound memory.
            node_threads: CPU threads over nodes; None: chosen by rule.
            on_divergence: when a loss is NaN or infinite, "raise" a `DivergenceError`, "warn" once, or "ignore".
            logger: one or several `Logger`s.
            log_interval: steps between the rows that loggers get; the history has every step.
            dataloader_kwargs: for `torch.utils.data.DataLoader` (workers, collate_fn, drop_last ...).
            progress: show a progress bar.
            backend: "stacked": all nodes in this process; "processes": in `num_processes` processes that are started
                here, for this run (see `vecgym.runs.multiprocess`); "distributed": in the processes of the
                torch.distributed group that exists, or of torchrun, each of which calls `fit`. The first logs;
                all return the same.
            num_processes: W, which divides `num_nodes`; each process holds K / W nodes, stacked.
            exact: on a CPU, give the same bits with any backend and any W: node by node, in one thread, and each
                collective on all nodes in one place. Slow; for proof. Otherwise they differ by rounding.
            timeout_s: with "processes", how long one may keep all others waiting before the run is ended.
            save_dir: a folder for checkpoints, files `step-000000100.pt` from which the run can go on as if it had
                never stopped; see `vecgym.runs.checkpoint`. One is written at the start and one at the end, and on
                Ctrl-C.
            checkpoint_interval: steps between further checkpoints; None: only those.
            resume: True: go on from the newest checkpoint in `save_dir` that is whole; begin anew if it has none. Or
                the path of a checkpoint, or of another folder of them.
            keep_checkpoints: how many are kept; older ones are removed.

        Returns:
            A copy of the model with the mean over the nodes of parameters and floating buffers.

        Raises:
            ValueError, TypeError: for what cannot work, before training starts.
            DivergenceError: see `on_divergence`.
            ProcessError: when a process of `backend="processes"` raises, dies or hangs; all are ended, and `history`
                holds the run so far.
            KeyboardInterrupt: on Ctrl-C, after the step in progress; `history` and `nodes` hold the run so far.
            FileNotFoundError: for a path to resume from that is not there.
        """
        check_model(self.model)  # it may have changed
        check_strategy(strategy, num_nodes)
        num_nodes, progress = check.integer("num_nodes", num_nodes), check.flag("progress", progress)
        minibatch_size = accumulated(batch_size, minibatch_size, gradient_accumulation)
        check_settings(engine, chunk_size, node_threads)
        check_fraction(max_memory_usage)
        num_processes = _check_backend(backend, num_processes, num_nodes, timeout_s)
        folder = check_checkpoints(save_dir, checkpoint_interval, resume)
        where = resolve_device(device)
        options = FitOptions(
            num_epochs=num_epochs, max_steps=max_steps, batch_size=batch_size, minibatch_size=minibatch_size,
            max_memory_usage=max_memory_usage,
            shuffle=shuffle, device=where, seed=seed, val_size=val_size, val_interval=val_interval,
            correlation_interval=correlation_interval, autocast=autocast, engine=engine, chunk_size=chunk_size,
            node_threads=node_threads, on_divergence=on_divergence, log_interval=log_interval,
            dataloader_kwargs=dataloader_kwargs, exact=exact, save_dir=folder, checkpoint_interval=checkpoint_interval,
            resume=resume, keep_checkpoints=keep_checkpoints,
        )  # fmt: skip
        loggers = Loggers(logger, options.log_interval)
        if backend == "processes":
            hooks.check_pickled(self.model)
            with self._alone():
                return self._fit_processes(strategy, num_nodes, num_processes, options, loggers, progress, timeout_s)
        with (
            self._alone(),
            multiprocess.joined(where) if backend == "distributed" else nullcontext(where) as here,
            one_thread() if exact else nullcontext(),
        ):
            comm: Collectives = StackedCollectives(num_nodes)
            if backend == "distributed":
                wire = Wire(watch=multiprocess.watch, announce=multiprocess.announce)
                comm = DistributedCollectives(num_nodes, wire, exact=exact)
                if wire.rank > 0:
                    loggers, progress = Loggers(None, 1), False
            return self._fit(strategy, comm, here, backend, options, loggers, progress)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One run at a time: its state is this object's."""
        if self._training:
            raise RuntimeError(
                "this Trainer is in the middle of a run, whose state a second one would overwrite: fit() was called "
                "from within after_step or from another thread. Give the second run a Trainer of its own."
            )
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def _fit(
        self,
        strategy: Strategy,
        comm: Collectives,
        where: torch.device,
        backend: str,
        options: FitOptions,
        loggers: Loggers,
        progress: bool,
    ) -> M:
        """`fit`, with the nodes of `comm`; all processes of it go through the same steps together."""
        together = Together(comm)
        train, val = self._data(comm, together, where, options)
        steps = num_steps(train, options.num_epochs, options.max_steps)
        strategy.check(comm.num_nodes, steps)

        model = hooks.copied(self.model).to(where)
        local = _engine(model, options)
        with torch.enable_grad():
            local.prepare(train.batch(0), together.facts)
        options, memory = _fitting(options, strategy, local, train, val, steps, together)
        plan, num_examples = local.plan, together.joined(train.shard_sizes)
        limits = train.limits_of(num_examples)
        simulation = Simulation(
            model, strategy, comm, engine=local, max_steps=steps, seed=options.seed,
            minibatch_size=options.minibatch_size, num_examples=num_examples, limits=limits, exact=options.exact,
        )  # fmt: skip
        settings = {
            "strategy": repr(strategy), "hyperparameters": described(strategy), "num_nodes": comm.num_nodes,
            "max_steps": steps,
            **options.recorded, "device": str(where), "backend": backend, "num_processes": together.num_processes,
            "engine": plan.engine, "node_threads": plan.node_threads, "chunk_size": plan.chunk_size,
            "engine_reason": plan.reason, **memory,
        }  # fmt: skip
        self.ledger = comm.ledger
        self.history = History(settings)
        recorder = Recorder(self.history, comm.ledger, train, options.on_divergence, loggers, limits)
        run = Run(strategy, model, simulation, recorder, train, options, together, where)
        checkpoints = Checkpoints(run)
        resumed = checkpoints.resumed()
        if checkpoints.run_id is not None:
            settings["run_id"] = self.history.settings["run_id"] = checkpoints.run_id
        self.state = resumed or simulation.init()
        try:
            with (
                torch.enable_grad(),
                interrupts() as interrupted,
                tqdm(total=steps, initial=self.state.step, disable=not progress, unit="step") as bar,
            ):
                recorder.start(settings, bar)
                checkpoints.begin()
                if resumed is None:
                    self._evaluate(recorder, local, val, comm)
                    self.after_step(recorder.row)
                    checkpoints.save_if_due(self.state, last=False)
                for batch in train.iterate(self.state.step, steps):
                    done = self.state.step + 1
                    is_evaluated = done == steps or (options.val_interval and done % options.val_interval == 0)
                    before = _DistanceBefore(comm) if is_evaluated else None
                    self.state, metrics = simulation.step(self.state, batch, observe=before)
                    metrics = together.observed(metrics, interrupted)
                    recorder.step(self.state, metrics)
                    if options.correlation_interval and done % options.correlation_interval == 0:
                        recorder.add(correlation=correlation(self.state.params, comm))
                    if before is not None:
                        recorder.add(consensus_distance_before=before.distance)
                        self._evaluate(recorder, local, val, comm)
                    self.after_step(recorder.row)
                    stop = together.stop(interrupted)
                    checkpoints.save_if_due(self.state, last=stop or done == steps)
                    if stop:
                        break
                recorder.flush()
                if together.stop(interrupted):
                    raise KeyboardInterrupt(
                        f"interrupted after step {self.state.step} of {steps}{checkpoints.how_to_go_on()}"
                    )
        finally:
            self._nodes = self._final_nodes(model, local, len(comm.node_ids))
            local.close()
            recorder.finish()
        return nodes.fill(model, {**average(self._trained(model, local), comm), **average(self.state.buffers, comm)})

    def after_step(self, row: dict[str, Any]) -> None:
        """For subclasses: called with the row of each step once it is complete, and before the first with that of 0.

        Not with `backend="processes"`, where the steps are made elsewhere.

        >>> from vecgym.strategy import FedAvgStrategy
        >>> class Line(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = nn.Parameter(torch.zeros(()))
        ...     def forward(self, x):
        ...         return (self.w - x).square().mean()
        >>> class Telling(Trainer):
        ...     def after_step(self, row):
        ...         print(row["step"], row.get("train_loss"))
        >>> strategy, data = FedAvgStrategy("sgd", lr=0.5), torch.ones(8)
        >>> averaged = Telling(Line(), data).fit(strategy, num_nodes=2, batch_size=2, device="cpu", progress=False)
        0 None
        1 1.0
        2 0.0
        """

    def _data(
        self, comm: Collectives, together: Together, where: torch.device, options: FitOptions
    ) -> tuple[Batches, EvalBatches | None]:
        """The batches of the nodes here, for training and for validation."""
        common: dict[str, Any] = {
            "seed": options.seed, "device": where, "node_ids": comm.node_ids,
            "dataloader_kwargs": options.dataloader_kwargs,
        }  # fmt: skip
        train = Batches(
            self.train_dataset, comm.num_nodes, options.batch_size, shuffle=options.shuffle, agree=together.largest,
            **common,
        )  # fmt: skip
        if self.val_dataset is None or options.val_size == 0:
            return train, None
        size = options.minibatch_size or options.batch_size
        val = EvalBatches(
            self.val_dataset, size, options.val_size, comm.num_nodes, agree=together.smallest, **common
        )  # fmt: skip
        return train, val

    def _fit_processes(
        self,
        strategy: Strategy,
        num_nodes: int,
        num_processes: int,
        options: FitOptions,
        loggers: Loggers,
        progress: bool,
        timeout_s: float,
    ) -> M:
        """`fit` in processes of its own: what the first of them records arrives here, row by row."""
        per_process = num_nodes // num_processes
        self.history, self.ledger, self.state, self._nodes = History(), Ledger(), None, None

        def label(rank: int) -> str:
            first, last = rank * per_process, (rank + 1) * per_process - 1
            return f"node {first}" if first == last else f"nodes {first}-{last}"

        def on_message(rank: int, message: tuple[str, Any]) -> None:
            what, value = message
            if what == "start":
                settings, rows = {**value[0], "backend": "processes"}, value[1]
                self.history = History(settings)
                self.history.rows = rows
                loggers.start(settings, rows)
                bar.total = settings["max_steps"]
                bar.update(rows[-1]["step"] if rows else 0)
            else:
                self.history.append(value)
                loggers.log(value)
                if (bar.update(value["step"] - bar.n) or bar.n == bar.total) and "train_loss" in value:
                    show(bar, value["train_loss"], value["bytes_total"])

        try:
            with tqdm(disable=not progress, unit="step") as bar:
                found = multiprocess.run(
                    _fit_in_process, num_processes,
                    (self.model, self.train_dataset, self.val_dataset, strategy, num_nodes, options),
                    device=options.device, labels=label, on_message=on_message, timeout_s=timeout_s,
                )  # fmt: skip
        finally:
            loggers.finish()
        self.ledger = found[0]["ledger"]
        params, buffers = (_joined([part[kind] for part in found]) for kind in ("params", "buffers"))
        self._nodes = Nodes(copy.deepcopy(self.model), num_nodes, params, buffers)
        diverged, interrupted = found[0]["diverged"], found[0]["interrupted"]
        if diverged is not None:
            raise DivergenceError(*diverged)
        if interrupted is not None:
            raise KeyboardInterrupt(interrupted)
        return self._nodes.average()

    def _evaluate(self, recorder: Recorder, engine: Engine, val: EvalBatches | None, comm: Collectives) -> None:
        assert self.state is not None
        found: dict[str, Any] = {}
        if val is not None:
            found = evaluate(engine, self.state, val, comm).columns
        if self.state.step > 0:
            found["consensus_distance"] = consensus_distance(self.state.params, comm)
        if found:
            recorder.add(**found, memory_bytes=peak_bytes(engine.device))

    def _trained(self, model: nn.Module, engine: Engine) -> Tree:
        """All parameters, the frozen ones too, `[1 or L, *]`, in the model's order."""
        assert self.state is not None
        trained = {**self.state.params, **{name: p[None] for name, p in engine.frozen.items()}}
        return {name: trained[name] for name, _ in model.named_parameters()}

    def _final_nodes(self, model: nn.Module, engine: Engine, num_nodes: int) -> Nodes:
        assert self.state is not None
        params = nodes.expand(self._trained(model, engine), num_nodes)
        return Nodes(model, num_nodes, params, nodes.expand(self.state.buffers, num_nodes))


LocalTrainer = Trainer  # EXO Gym's name for it


def _fit_in_process(
    link: multiprocess.Link,
    model: nn.Module,
    train_dataset: Any,
    val_dataset: Any,
    strategy: Strategy,
    num_nodes: int,
    options: FitOptions,
) -> dict[str, Any]:
    """What a process of `backend="processes"` does: its part of the run, and the final state of its nodes."""
    trainer = Trainer(model, train_dataset, val_dataset)
    found: dict[str, Any] = {"diverged": None, "interrupted": None}
    logger = _Relay(link) if link.rank == 0 else None
    try:
        every_row = replace(options, log_interval=1)  # of which the process that has started this one chooses
        trainer.fit(strategy, num_nodes, backend="distributed", logger=logger, progress=False, **vars(every_row))
    except DivergenceError as error:
        found["diverged"] = error.step, error.nodes, error.loss
    except KeyboardInterrupt as error:
        if trainer._nodes is None:  # before the first step
            raise
        found["interrupted"] = str(error)
    found.update(params=trainer.nodes.params, buffers=trainer.nodes.buffers)
    return {**found, "ledger": trainer.ledger if link.rank == 0 else None}


class _Relay(Logger):
    """Hands rows to the process that has started this one."""

    def __init__(self, link: multiprocess.Link) -> None:
        self.link = link

    def start(self, settings: dict[str, Any]) -> None:
        self.link.send(("start", (settings, [])))

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.link.send(("start", (settings, rows)))

    def log(self, row: dict[str, Any]) -> None:
        self.link.send(("row", row))


def _joined(parts: Sequence[Tree]) -> Tree:
    """The `[L, *]` trees of all processes as one of `[K, *]`."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _engine(model: nn.Module, options: FitOptions) -> Engine:
    kind, chunk_size, node_threads = options.engine, options.chunk_size, options.node_threads
    if options.exact:
        kind, chunk_size, node_threads = ("vmap", 1, 1) if kind == "vmap" else ("loop", None, 1)
    return Engine(model, engine=kind, chunk_size=chunk_size, node_threads=node_threads, autocast=options.autocast)


class _DistanceBefore:
    """Measures how far the nodes are apart just before they exchange their parameters."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.distance = 0.0

    def __call__(self, params: Tree) -> None:
        self.distance = consensus_distance(params, self.comm)


def _fitting(
    options: FitOptions,
    strategy: Strategy,
    engine: Engine,
    train: Batches,
    val: EvalBatches | None,
    max_steps: int,
    together: Together,
) -> tuple[FitOptions, dict[str, Any]]:
    """The options, and the engine's plan, cut so that the run fits into memory; the same in every process."""
    if options.max_memory_usage is None:
        return options, {}
    found = fitting_sizes(
        engine, strategy, train.batch(0), together.comm.num_nodes, max_steps, options.max_memory_usage,
        options.minibatch_size, together.num_processes,
    )  # fmt: skip
    chunk_size = together.smallest(found.chunk_size or together.comm.num_nodes)
    minibatch_size = together.smallest(found.minibatch_size or options.batch_size)
    if found.chunk_size is not None:
        engine.use(replace(engine.plan, chunk_size=chunk_size))
    if val is not None:
        val.batch_size = min(val.batch_size, minibatch_size)
    cut = minibatch_size if minibatch_size < options.batch_size else options.minibatch_size
    return replace(options, minibatch_size=cut), {"memory": found.report}


def _check_backend(backend: Any, num_processes: Any, num_nodes: int, timeout_s: Any) -> int:
    """The number of processes that this one is to start."""
    check.choice("backend", backend, get_args(Backend))
    if backend != "distributed":
        multiprocess.check_alone(f'a run with backend="{backend}"', 'give backend="distributed", or ')
    plain = checked({"num_processes": num_processes, "timeout_s": timeout_s})
    if plain["num_processes"] is None:
        if backend == "processes":
            raise ValueError(f'backend="processes" needs num_processes=W, a divisor of num_nodes={num_nodes}.')
        return 0
    if backend != "processes":
        raise ValueError(
            f'num_processes={num_processes} with backend={backend!r} has no effect: give backend="processes"; '
            "torchrun --nproc-per-node says how many it starts."
        )
    check_divides(plain["num_processes"], num_nodes)
    return plain["num_processes"]
