"""A run in its own processes: the rows that the first of them records arrive here one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from vecgym.collectives.ledger import Ledger
from vecgym.core import tree
from vecgym.core.errors import DivergenceError
from vecgym.core.nodes import Nodes
from vecgym.core.tree import Tree
from vecgym.engine import hooks
from vecgym.records.history import History
from vecgym.records.loggers import Logger
from vecgym.runs import multiprocess
from vecgym.runs.multiprocess import Link, joined_nodes
from vecgym.runs.options import FitOptions, resolve_device
from vecgym.runs.recorder import Loggers, advance
from vecgym.runs.run import Run, Task

M = TypeVar("M", bound=nn.Module)
WAY_OUT = 'give backend="stacked", or backend="distributed" under torchrun, where each process builds the model itself'


class ProcessesRun(Generic[M]):
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
        self.ledger, members, ended = (parts[0][name] for name in ("ledger", "members", "ended"))
        params, buffers, result = (_joined([part[kind] for part in parts]) for kind in ("params", "buffers", "result"))
        self.nodes = Nodes(copy.deepcopy(self.task.model), options.num_nodes, params, buffers, members, result)
        if ended is not None:
            raise ended

    def average(self) -> M:
        """Return a copy of the model with the mean of the present nodes."""
        assert self.nodes is not None
        return self.nodes.average()

    def _receive(self, bar: tqdm, message: tuple[dict[str, Any], list[dict[str, Any]] | None]) -> None:
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
        **tree.map_leaves(lambda x: x.detach().cpu().clone(), final), "ended": ended,
        "ledger": run.ledger if link.rank == 0 else None, "members": run.simulation.result(run.state).members,
    }  # fmt: skip


class _Relay(Logger):
    """Send rows to the process that started this one."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def start(self, settings: dict[str, Any]) -> None:
        self.link.send((settings, []))

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.link.send((settings, rows))

    def log(self, row: dict[str, Any]) -> None:
        self.link.send((row, None))


def _joined(parts: Sequence[Tree]) -> Tree:
    """Join the `[L, *]` trees of all processes into one of `[K, *]`."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
