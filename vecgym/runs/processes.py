"""A run in processes of its own: the rows that the first of them records arrive here, one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from vecgym.collectives.ledger import Ledger
from vecgym.core.errors import DivergenceError
from vecgym.core.nodes import Nodes
from vecgym.core.tree import Tree
from vecgym.engine import hooks
from vecgym.records.history import History
from vecgym.records.loggers import Logger
from vecgym.runs import multiprocess
from vecgym.runs.links import Link
from vecgym.runs.options import FitOptions, resolve_device
from vecgym.runs.recorder import Loggers, advance
from vecgym.runs.run import Run, Task
from vecgym.runs.session import joined_nodes
from vecgym.runs.supervisor import node_labels

M = TypeVar("M", bound=nn.Module)
WAY_OUT = 'give backend="stacked", or backend="distributed" under torchrun, where each process builds the model itself'


class ProcessesRun(Generic[M]):
    """A `Run` in `options.num_processes` processes that are started for it, with the same attributes.

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
        self._loggers = Loggers(options.loggers, options.log_interval)

    def loop(self) -> None:
        """Train, and fetch the final state of all nodes."""
        options, num_processes = self.options, self.options.num_processes or 1
        # All rows arrive here, and this process chooses those that are logged.
        theirs = replace(
            options, backend="distributed", num_processes=None, logger=None, log_interval=1, progress=False
        )

        def on_message(rank: int, message: tuple[str, Any]) -> None:
            self._receive(*message, bar)

        try:
            with tqdm(disable=not options.progress, unit="step") as bar:
                parts = multiprocess.run(
                    _run_part, num_processes, (self.task, theirs), device=resolve_device(options.device),
                    labels=node_labels(options.num_nodes, num_processes), on_message=on_message,
                    timeout_s=options.timeout_s,
                )  # fmt: skip
        finally:
            self._loggers.finish()
        first = parts[0]
        self.ledger = first["ledger"]
        params, buffers, result = (_joined([part[kind] for part in parts]) for kind in ("params", "buffers", "result"))
        model = copy.deepcopy(self.task.model)
        self.nodes = Nodes(model, options.num_nodes, params, buffers, first["members"], result)
        if first["diverged"] is not None:
            raise DivergenceError(*first["diverged"])
        if first["interrupted"] is not None:
            raise KeyboardInterrupt(first["interrupted"])

    def average(self) -> M:
        """Return a copy of the model with the mean of the nodes that are there."""
        assert self.nodes is not None
        return self.nodes.average()

    def _receive(self, kind: str, value: Any, bar: tqdm) -> None:
        """Record what the first process sends: the start of the run, or a row."""
        if kind == "start":
            settings, rows = {**value[0], "backend": "processes"}, value[1]
            self.history = History(settings, rows)
            self._loggers.start(settings, self.history.rows)
            bar.total = settings["max_steps"]
            bar.update(rows[-1]["step"] if rows else 0)
        else:
            self.history.append(value)
            self._loggers.log(value)
            advance(bar, value)


def _run_part(link: Link, task: Task, options: FitOptions) -> dict[str, Any]:
    """Run the part of one process, and return the final state of its nodes."""
    ended: dict[str, Any] = {"diverged": None, "interrupted": None}
    options = replace(options, logger=_Relay(link))
    with joined_nodes(options) as (comm, device):
        run: Run[nn.Module] = Run(task, options, comm, device)
        try:
            run.loop()
        except DivergenceError as error:
            ended["diverged"] = error.step, error.nodes, error.loss, error.told
        except KeyboardInterrupt as error:
            if not error.args:  # a second Ctrl-C, of which the others know nothing: they wait for this process
                raise
            ended["interrupted"] = str(error)
    assert run.nodes is not None
    ledger = run.ledger if link.rank == 0 else None
    members, result = run.simulation.result(run.state).members, run.nodes.result or {}
    return {
        **ended, "params": run.nodes.params, "buffers": run.nodes.buffers, "result": result, "members": members,
        "ledger": ledger,
    }  # fmt: skip


class _Relay(Logger):
    """Send rows to the process that started this one."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def start(self, settings: dict[str, Any]) -> None:
        self.link.send(("start", (settings, [])))

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.link.send(("start", (settings, rows)))

    def log(self, row: dict[str, Any]) -> None:
        self.link.send(("row", row))


def _joined(parts: Sequence[Tree]) -> Tree:
    """Join the `[L, *]` trees of all processes into one of `[K, *]`."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
