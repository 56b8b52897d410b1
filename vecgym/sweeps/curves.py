"""What the configurations of a sweep record: arrays during training, the rows of a run on request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.core.tree import Tree
from vecgym.records import runfile
from vecgym.records.columns import START
from vecgym.records.history import History
from vecgym.records.rows import Row
from vecgym.runs.recorder import StepRows, add_losses
from vecgym.strategy import Context
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.merged import Metrics

PENDING, PARTIAL, FINISHED, DIVERGED = "pending", "interrupted", "finished", "diverged"
# What a result shows of a configuration that has recorded nothing, besides its point.
NOTHING: dict[str, Any] = {
    "steps": 0, "train_loss": None, "val_loss": None, "val_loss_local": None, "consensus_distance": None,
    "bytes_total": 0.0,
}  # fmt: skip


@dataclass
class Curve:
    """What one configuration recorded in T steps.

    Attributes:
        status: how it ended.
        columns: `train_losses` and `active` `[T, K]`, `lr` and `seconds` `[T]`, `bytes` `[T, 3]`, sent, received and
            handed over. Of asynchronous runs also `outer_lr`, nan where there is none, `nodes_per_call`, and `totals`
            `[T, 3]`, all bytes up to there.
        evaluations: the columns of evaluations, with the step of each, packed as the rows of a file.
        average: the parameters and buffers of the averaged model, where they are kept.
        ledger: what was sent, as `Ledger.state`, where nodes may be absent: it is not known without training.
        last: what a result shows of it.
    """

    status: str
    columns: dict[str, Tensor]
    evaluations: dict[str, Any]
    average: Tree | None
    ledger: dict[str, Any] | None = None
    last: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        losses, active = (self.columns[name].numpy() for name in ("train_losses", "active"))
        self.last = {**NOTHING, "steps": len(losses)}
        if len(losses):
            self.last["train_loss"] = float(losses[-1][active[-1]].mean()) if active[-1].any() else np.nan
            self.last["bytes_total"] = float(self.totals[-1, 0])
        for row in runfile.unpacked_rows(self.evaluations):
            self.last |= {name: row[name] for name in NOTHING if name in row}

    @property
    def totals(self) -> np.ndarray:
        """All bytes up to each step, sent, received and handed over, `[T, 3]`."""
        return self.columns["totals"].numpy() if "totals" in self.columns else self.columns["bytes"].numpy().cumsum(0)

    def history(self, settings: dict[str, Any], config: Configuration) -> History:
        """Return the rows that `Trainer.fit` alone would have recorded."""
        history, rows = History(settings), StepRows(config.train, config.train.limits)
        evaluations = {row.pop("step"): row for row in runfile.unpacked_rows(self.evaluations)}
        updates = config.plan is not None
        if 0 in evaluations or updates:
            history.append({**START, **({"sim_seconds": 0.0} if updates else {}), **evaluations.get(0, {})})
        for row in self._rows(config, rows):
            history.append({**row, **evaluations.get(row["step"], {})})
        return history

    def _rows(self, config: Configuration, rows: StepRows) -> Iterator[Row]:
        """Yield the rows of steps of all nodes, or of updates of a server, without their evaluations."""
        plan, presence = config.plan, config.presence()
        comm, examples = StackedCollectives(config.num_nodes), tuple(config.train.shard_sizes)
        sent, lrs, seconds = (self.columns[name].tolist() for name in ("bytes", "lr", "seconds"))
        total = self.totals.tolist()
        for t, (losses, active) in enumerate(zip(self.columns["train_losses"], self.columns["active"])):
            trained = None if bool(active.all()) else active.nonzero().flatten().tolist()
            metrics, num_bytes = Metrics(losses, lrs[t], trained), (sent[t][0], *total[t])
            if plan is None:
                ctx = Context(
                    comm, step=t, max_steps=config.num_steps, seed=config.settings["seed"], num_examples=examples
                )
                metrics = metrics._replace(outer_lr=config.strategy.outer_learning_rate(ctx))
                if presence is not None:
                    there, never = int(presence.row(t).sum()), presence.never_present(t)
                    metrics = metrics._replace(num_present=there, num_never_present=never)
                row = rows.of_step(t + 1, metrics, num_bytes, seconds[t])
            else:
                outer_lr, per_call = (float(self.columns[name][t]) for name in ("outer_lr", "nodes_per_call"))
                metrics = metrics._replace(outer_lr=None if np.isnan(outer_lr) else outer_lr)
                epoch, seen = plan.epoch(t + 1, config.train), plan.seen(t + 1, config.train)
                row = rows.of_step(t + 1, metrics, num_bytes, seconds[t], epoch, seen)
                row.update(plan.columns(t + 1), nodes_per_call=None if np.isnan(per_call) else per_call)
            add_losses(row, losses, trained)
            yield row

    def state(self) -> dict[str, Any]:
        """Return the same as plain values, for a file: `Curve(**state)` inverts it."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}


class Observed:
    """The records of C configurations in T steps, in arrays `[T, C, *]`; see `Curve`."""

    def __init__(self, num_steps: int, num_configs: int, num_nodes: int, updates: bool = False) -> None:
        shape = (num_steps, num_configs)
        three, one = ["bytes"], ["seconds", "lr"]  # numbers of each step
        if updates:
            three, one = [*three, "totals"], [*one, "nodes_per_call", "outer_lr"]
        self.arrays = {
            "train_losses": np.full((*shape, num_nodes), np.nan), "active": np.ones((*shape, num_nodes), dtype=bool),
            **{name: np.zeros((*shape, 3)) for name in three}, **{name: np.full(shape, np.nan) for name in one},
        }  # fmt: skip
        self.evaluations: list[dict[int, dict[str, Any]]] = [{} for _ in range(num_configs)]  # step -> columns

    def put(self, t: int, **values: Any) -> None:
        """Record step t, counting from 0."""
        for name, value in values.items():
            self.arrays[name][t] = value

    def evaluated(self, c: int, step: int, **columns: Any) -> None:
        """Record what was measured of a configuration after `step` steps."""
        self.evaluations[c].setdefault(step, {"step": step}).update(columns)

    def curve(self, c: int, num_steps: int, status: str, average: Tree | None) -> Curve:
        """Return what a configuration has recorded in its first steps."""
        columns = {name: torch.from_numpy(x[:num_steps, c].copy()) for name, x in self.arrays.items()}
        return Curve(status, columns, runfile.packed_rows(list(self.evaluations[c].values())), average)

    def load(self, c: int, curve: Curve) -> None:
        """Continue after what a configuration has recorded."""
        for name, x in curve.columns.items():
            self.arrays[name][: len(x), c] = x.numpy()
        self.evaluations[c] = {row["step"]: row for row in runfile.unpacked_rows(curve.evaluations)}
