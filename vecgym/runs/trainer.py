"""The trainer: a model and its data, `fit`, and the results. `_ProcessesRun` is a run in processes of its own."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from torch import nn
from tqdm.auto import tqdm

from vecgym.clock import AsyncTimeline, Compute, Network, Timeline, price
from vecgym.collectives.ledger import Ledger
from vecgym.core import check, tree
from vecgym.core.check import takes
from vecgym.core.errors import DivergenceError
from vecgym.core.nodes import Nodes, join_rows
from vecgym.data.checks import check_dataset
from vecgym.engine import hooks
from vecgym.engine.contract import check_model, counting_memory, with_loss
from vecgym.logger import Logger
from vecgym.records import runfile
from vecgym.records.history import History
from vecgym.runs import multiprocess
from vecgym.runs.checkpoint import clock_of
from vecgym.runs.multiprocess import Link, check_alone, joined_nodes
from vecgym.runs.options import FitOptions, resolve_device
from vecgym.runs.recorder import Loggers, advance
from vecgym.runs.run import AsyncRun, Run, Task
from vecgym.simulation import State

if TYPE_CHECKING:
    from matplotlib.figure import Figure

M = TypeVar("M", bound=nn.Module)
WAY_OUT = 'give backend="stacked", or backend="distributed" under torchrun, where each process builds the model itself'


class Trainer(Generic[M]):
    """Train one model on K simulated nodes.

    Args:
        model: `forward(batch)` returns the mean loss over the batch, a scalar. It is never changed. Parts in eval mode,
            as a frozen batch norm or a teacher, stay so; a model in eval mode is trained in training mode.
        train_dataset: a map-style dataset, dealt to the nodes, or a factory
            `(rank, num_nodes, train_dataset) -> Dataset`, called once per node; see `vecgym.data.Batches`.
        val_dataset: likewise, the same for all nodes when it is a dataset; None: no validation.
        loss_fn: a function (module, batch) -> the mean loss, or a dict of it, as "loss", and metrics for validation: it
            replaces the model's `forward(batch)`, and `val_metrics`. If the loss is a mean over something else than
            examples, such as tokens, the dict says over how many, as "weight": see `vecgym.guide.data_and_models`.

    Attributes, after (or during, or after an interrupted) `fit`:
        run: the run itself.
        history: the recorded columns; see `vecgym.records.history`.
        nodes: the stacked final state, after `fit` only; `nodes.params[name]` is `[K, *shape]`, likewise
            `nodes.buffers`; with `backend="distributed"` that of this process's nodes.
        ledger: every collective, with its bytes.
        state: the simulation's state, in which a value that is the same on every node is `[1, *]`; with
            `backend="distributed"` that of this process's nodes, with `backend="processes"` None.

    >>> import torch
    >>> from vecgym.strategy import DiLoCoStrategy
    >>> from vecgym.models import Line
    >>> trainer = Trainer(Line(), torch.arange(8.0))
    >>> strategy = DiLoCoStrategy("sgd", H=2, inner_lr=0.1, outer_lr=0.5)
    >>> averaged = trainer.fit(strategy, num_nodes=2, batch_size=2, num_epochs=2, progress=False)
    >>> averaged.w.shape, trainer.nodes.params["w"].shape, trainer.history["step"]
    (torch.Size([]), torch.Size([2]), [1, 2, 3, 4])
    >>> trainer.ledger, trainer.state.step
    (Ledger(2 collectives, 8 bytes sent per node), 4)
    """

    @check.strict
    def __init__(
        self, model: M, train_dataset: Any, val_dataset: Any = None, *,
        loss_fn: Callable[[M, Any], Any] | None = None,
    ) -> None:  # fmt: skip
        if isinstance(train_dataset, nn.Module) and not isinstance(model, nn.Module):
            raise TypeError(f"model is {check.kind_of(model)}; the model comes first, Trainer(model, train_dataset).")
        check_model(with_loss(model, loss_fn))
        self.model = model
        self.loss_fn = loss_fn
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        check_dataset(train_dataset, "train_dataset")
        if val_dataset is not None:
            check_dataset(val_dataset, "val_dataset")
        self.run: Run[M] | _ProcessesRun[M] | None = None  # the last one
        self._training = False

    @property
    def history(self) -> History:
        """The history of the last `fit`."""
        return History() if self.run is None else self.run.history

    @property
    def ledger(self) -> Ledger:
        """Every collective of the last `fit`."""
        return Ledger() if self.run is None else self.run.ledger

    @property
    def state(self) -> State | None:
        """The state of the last `fit`'s simulation."""
        return None if self.run is None else self.run.state

    @property
    def nodes(self) -> Nodes[M]:
        """The stacked state of all nodes at the end of the last `fit`."""
        if self.run is None or self.run.nodes is None:
            raise AttributeError("trainer.nodes exists only after fit(); during it there is trainer.state.")
        return self.run.nodes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the model that `fit` returned, each node's, the history, the ledger and the settings; see `vecgym.load`.

        Raises:
            AttributeError: before `fit`.
            ValueError: after `backend="distributed"`, where each process has only its own nodes.

        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> import vecgym
        >>> from vecgym.strategy import FedAvgStrategy
        >>> from vecgym.models import Line
        >>> trainer = Trainer(Line(), torch.arange(8.0))
        >>> strategy = FedAvgStrategy("sgd", lr=0.1)
        >>> averaged = trainer.fit(strategy, num_nodes=2, batch_size=2, device="cpu", progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer.save(Path(folder, "run.pt"))
        ...     saved = vecgym.load(Path(folder, "run.pt"))
        >>> saved, torch.equal(saved.average["w"], averaged.w)
        (Saved(2 nodes after step 2, 2 rows), True)
        """
        nodes = self.nodes
        num_nodes = self.history.settings["num_nodes"]
        if len(nodes) < num_nodes:
            raise ValueError(
                f"this process has only {len(nodes)} of {num_nodes} nodes: give fit a save_dir, and vecgym.load the "
                "checkpoint at its end, which has all of them."
            )
        step = self.history.last("step") or 0
        assert self.run is not None
        clock = clock_of(self.run.options, getattr(self.run, "simulation", None))
        runfile.write(path, runfile.record(replace(nodes, model=self.model), step, self.history, self.ledger, clock))

    @overload
    def timeline(self) -> AsyncTimeline: ...

    @overload
    def timeline(self, network: Network, compute: Compute) -> Timeline: ...

    def timeline(self, network: Any = None, compute: Any = None) -> Timeline | AsyncTimeline:
        """Return how long the last run takes on a network: `vecgym.clock.price(trainer.ledger, network, compute)`.

        An asynchronous run has only the timeline that it was trained with: its order of events depends on both.

        >>> import torch
        >>> from vecgym.clock import Compute, Network
        >>> from vecgym.models import Line
        >>> from vecgym.strategy import FedAvgStrategy
        >>> trainer, strategy = Trainer(Line(), torch.arange(8.0)), FedAvgStrategy("sgd", H=1, lr=0.1)
        >>> averaged = trainer.fit(strategy, num_nodes=2, batch_size=2, device="cpu", progress=False)
        >>> trainer.timeline(Network("1 Gbit/s", latency="50 ms"), Compute(0.4))
        Timeline(2 steps of 2 nodes: 1 s, 80.0 % computing)
        """
        if isinstance(self.run, AsyncRun):
            if network is not None or compute is not None:
                raise ValueError(
                    "the order of an asynchronous run depends on its network and compute: leave both out here, or "
                    "train again with fit(network=, compute=)."
                )
            return self.run.timeline
        if self.run is None:
            raise ValueError("there is no run yet whose time could be told: call fit() first.")
        return price(self.ledger, network, compute)

    def plot(
        self, path: str | os.PathLike[str] | None = None, *, x: str = "step", title: str | None = None, **look: Any
    ) -> Figure:
        """Draw the last run: losses with the nodes' spread, and consensus distance; see `vecgym.plot.plot_runs`.

        Args:
            path: where to save the figure as well, such as "run.png".
            x: "step", "examples", "bytes", "payload", "seconds", or after `fit(network=, compute=)` "sim_seconds".
            title: of the figure.
            look: `panels`, `log_x`, `xlim`, `legend`, `loss_label`, `window` of `plot_runs`.

        >>> import torch
        >>> from vecgym.strategy import FedAvgStrategy
        >>> from vecgym.models import Line
        >>> trainer, strategy = Trainer(Line(), torch.arange(8.0)), FedAvgStrategy("sgd", H=2, lr=0.1)
        >>> averaged = trainer.fit(strategy, num_nodes=2, batch_size=2, device="cpu", progress=False)
        >>> [axes.get_xlabel() for axes in trainer.plot().axes if axes.get_xlabel()]
        ['optimizer steps', 'optimizer steps']
        """
        from vecgym.plot import plot_runs  # matplotlib takes a while to import

        return plot_runs({"run": self.history}, path, x=x, title=title, **look)

    @takes(FitOptions)
    def fit(self, options: FitOptions) -> M:
        """Train, and return a model with the average of the nodes.

        Args:
            {arguments}

        Returns:
            A copy of the model with the mean of parameters and floating buffers over the nodes that are present in the
            last step; with an asynchronous strategy, with its server's parameters.

        Raises:
            ValueError, TypeError: for invalid options, before training starts.
            DivergenceError: see `on_divergence`.
            ProcessError: when a process of `backend="processes"` raises, dies or hangs; all are ended, and `history`
                holds the run so far.
            KeyboardInterrupt: on Ctrl-C, after the step in progress; `history` and `nodes` hold the run so far.
            FileNotFoundError: if the path to resume from does not exist.
        """
        model = with_loss(self.model, self.loss_fn)
        check_model(model)  # it may have changed
        if options.backend != "distributed":
            check_alone(f'a run with backend="{options.backend}"', 'give backend="distributed", or ')
        task = Task(model, self.train_dataset, self.val_dataset)
        overridden = getattr(self.after_step, "__func__", None) is not Trainer.after_step
        with self._alone(), counting_memory(options.num_nodes, self.model):
            if overridden and options.backend == "processes":
                raise ValueError('after_step is not called with backend="processes": give logger= or stop= instead.')
            if options.backend == "processes":
                self.run = _ProcessesRun(task, options)
                self.run.loop()
                return self.run.average()
            with joined_nodes(options) as (comm, device):
                kind: type[Run[M]] = AsyncRun if options.strategy.asynchronous else Run
                self.run = kind(task, options, comm, device, self.after_step if overridden else None)
                self.run.loop()
                return self.run.average()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Allow one run at a time, since its state is kept in this object."""
        if self._training:
            raise RuntimeError(
                "this Trainer is in the middle of a run, whose state a second one would overwrite: fit() was called "
                "from after_step or from another thread. Use another Trainer for the second run."
            )
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def after_step(self, row: dict[str, Any]) -> None:
        """Override this: it is called with the complete row of each step, and before the first step.

        If it raises StopIteration, the run ends after this step. An override is refused with `backend="processes"`,
        where other processes take the steps: give `logger=` or `stop=` instead.

        >>> import torch
        >>> from vecgym.strategy import FedAvgStrategy
        >>> from vecgym.models import Line
        >>> class Telling(Trainer):
        ...     def after_step(self, row):
        ...         print(row["step"], row.get("train_loss"))
        >>> strategy, data = FedAvgStrategy("sgd", lr=0.5), torch.ones(8)
        >>> averaged = Telling(Line(), data).fit(strategy, num_nodes=2, batch_size=2, device="cpu", progress=False)
        0 None
        1 1.0
        2 0.0
        """


LocalTrainer = Trainer  # EXO Gym's name for it


# ------------------------------------------------------------------------------- in processes of its own


class _ProcessesRun(Generic[M]):
    """A `Run` in `options.num_processes` new processes, with the same attributes.

    Its `state` is None: each process has its own.
    """

    def __init__(self, task: Task, options: FitOptions) -> None:
        hooks.check_pickled(task.model, WAY_OUT)
        self.task = task
        self.options = options
        self.history = History()
        self.ledger = Ledger()
        self.state = None
        self.nodes: Nodes[M] | None = None
        self._loggers = Loggers(options.logger, options.log_interval)

    def loop(self) -> None:
        """Train, and fetch the final state of all nodes."""
        options = self.options
        # All rows arrive here, and this process selects those to log.
        child_options = replace(
            options, backend="distributed", num_processes=None, logger=None, log_interval=1, progress=False
        )
        try:
            with tqdm(disable=not options.progress, unit="step") as bar:
                parts = multiprocess.run(
                    _run_part, options.num_processes or 1, (self.task, child_options), timeout_s=options.timeout_s,
                    device=resolve_device(options.device), num_nodes=options.num_nodes,
                    on_message=partial(self._receive, bar),
                )  # fmt: skip
        finally:
            self._loggers.finish()
        self.ledger, (members, trained), ended = (parts[0][name] for name in ("ledger", "whose", "ended"))
        self.history.settings.update({**parts[0]["settings"], "backend": "processes"})
        final = join_rows([part["final"] for part in parts])
        self.nodes = Nodes(copy.deepcopy(self.task.model), options.num_nodes, **final, members=members, trained=trained)
        if ended is not None:
            raise ended

    def average(self) -> M:
        """Return a copy of the model with the mean of the present nodes."""
        assert self.nodes is not None
        return self.nodes.average()

    def _receive(self, bar: tqdm, message: tuple[dict[str, Any], Sequence[dict[str, Any]] | None]) -> None:
        """Record what the first process sends: the settings and rows at the start of the run, or a row."""
        row, before = message
        if before is None:
            self.history.append(row)
            self._loggers.log(row)
            advance(bar, row)
            if self._loggers.stopped:
                raise StopIteration
        else:
            settings = {**row, "backend": "processes"}
            self.history = History(settings, before)
            self._loggers.start(settings, self.history.rows)
            bar.total = settings["max_steps"]
            bar.update(before[-1]["step"] if before else 0)


def _run_part(link: Link, task: Task, options: FitOptions) -> dict[str, Any]:
    """Run the part of one process, and return the final state of its nodes."""
    ended: BaseException | None = None
    options = replace(options, logger=_Relay(link))
    with joined_nodes(options, link.beat) as (comm, device):
        run: Run[nn.Module] = Run(task, options, comm, device)
        run.interrupts = lambda: nullcontext(link.interrupted)
        try:
            run.loop()
        except (DivergenceError, KeyboardInterrupt) as error:
            ended = error
    assert run.nodes is not None
    final = {"params": run.nodes.params, "buffers": run.nodes.buffers, "result": run.nodes.result or {}}
    return {
        # Copies: a view would be sent with its whole storage.
        "final": tree.map_leaves(lambda x: x.detach().cpu().clone(), final), "ended": ended,
        "ledger": run.ledger if link.rank == 0 else None, "whose": run.simulation.result(run.state)[1:],
        "settings": run.history.settings,
    }  # fmt: skip


class _Relay(Logger):
    """Send rows to the process that started this one."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def start(self, settings: dict[str, Any], rows: Sequence[dict[str, Any]] = ()) -> None:
        self.link.send((settings, rows))

    resume = start

    def log(self, row: dict[str, Any]) -> None:
        self.link.send((row, None))
