"""What the configurations of a sweep record: arrays during training, the rows of a run on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.core.tree import Tree
from vecgym.engine.simulation import Metrics
from vecgym.records import runfile
from vecgym.records.columns import START
from vecgym.records.history import History
from vecgym.runs.recorder import StepRows
from vecgym.strategy import Context
from vecgym.sweeps.configurations import Configuration

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
        columns: `train_losses` and `active` `[T, K]`, `lr` and `seconds` `[T]`, `bytes` `[T, 2]`, sent and received.
        evaluations: the columns of evaluations, with the step of each, packed as the rows of a file.
        average: the parameters and buffers of the averaged model, where they are kept.
        last: what a result shows of it.
    """

    status: str
    columns: dict[str, Tensor]
    evaluations: dict[str, Any]
    average: Tree | None
    last: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        losses, active, sent = (self.columns[name].numpy() for name in ("train_losses", "active", "bytes"))
        self.last = {**NOTHING, "steps": len(losses)}
        if len(losses):
            self.last["train_loss"] = float(losses[-1][active[-1]].mean()) if active[-1].any() else np.nan
            self.last["bytes_total"] = float(np.cumsum(sent[:, 0])[-1])
        for row in runfile.unpacked_rows(self.evaluations):
            self.last |= {name: row[name] for name in NOTHING if name in row}

    def history(self, settings: dict[str, Any], config: Configuration) -> History:
        """Return the rows that `Trainer.fit` alone would have recorded."""
        history, rows = History(settings), StepRows(config.train, config.train.limits)
        evaluations = {row.pop("step"): row for row in runfile.unpacked_rows(self.evaluations)}
        if 0 in evaluations:
            history.append({**START, **evaluations[0]})
        presence = config.presence()
        comm, examples = StackedCollectives(config.num_nodes), tuple(config.train.shard_sizes)
        sent, total = self.columns["bytes"].tolist(), self.columns["bytes"].numpy().cumsum(0).tolist()
        lrs, seconds = self.columns["lr"].tolist(), self.columns["seconds"].tolist()
        for t, (losses, active) in enumerate(zip(self.columns["train_losses"], self.columns["active"])):
            ctx = Context(comm, step=t, max_steps=config.num_steps, seed=config.settings["seed"], num_examples=examples)
            trained = None if bool(active.all()) else active.nonzero().flatten().tolist()
            there = None if presence is None else int(presence.row(t).sum())
            metrics = Metrics(losses, lrs[t], trained, config.strategy.outer_learning_rate(ctx), num_present=there)
            row = rows.of_step(t + 1, metrics, (sent[t][0], *total[t]), seconds[t])
            history.append({**row, **evaluations.get(t + 1, {})})
        return history

    def state(self) -> dict[str, Any]:
        """Return the same as plain values, for a file."""
        return {name: getattr(self, name) for name in SAVED}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Curve:
        """Invert `state`."""
        return cls(*[state[name] for name in SAVED])


SAVED = ("status", "columns", "evaluations", "average")


class Observed:
    """The records of C configurations in T steps, in arrays `[T, C, *]`; see `Curve`."""

    def __init__(self, num_steps: int, num_configs: int, num_nodes: int) -> None:
        shape = (num_steps, num_configs)
        self.arrays = {
            "train_losses": np.full((*shape, num_nodes), np.nan),
            "active": np.ones((*shape, num_nodes), dtype=bool),
            "lr": np.full(shape, np.nan),
            "bytes": np.zeros((*shape, 2)),
            "seconds": np.full(shape, np.nan),
        }
        self.evaluations: list[dict[int, dict[str, Any]]] = [{} for _ in range(num_configs)]  # step -> columns

    def put(self, t: int, **values: Any) -> None:
        """Record step t, counting from 0."""
        for name, value in values.items():
            self.arrays[name][t] = value

    def evaluated(self, c: int, step: int, **columns: Any) -> None:
        """Record what was measured of a configuration after `step` steps."""
        self.evaluations[c].setdefault(step, {"step": step}).update(columns)

    def keep(self, chosen: Sequence[int]) -> None:
        """Continue with some of the configurations only."""
        self.arrays = {name: x[:, list(chosen)] for name, x in self.arrays.items()}
        self.evaluations = [self.evaluations[c] for c in chosen]

    def curve(self, c: int, num_steps: int, status: str, average: Tree | None) -> Curve:
        """Return what a configuration has recorded in its first steps."""
        columns = {name: torch.from_numpy(x[:num_steps, c].copy()) for name, x in self.arrays.items()}
        return Curve(status, columns, runfile.packed_rows(list(self.evaluations[c].values())), average)

    def load(self, c: int, curve: Curve) -> None:
        """Continue after what a configuration has recorded."""
        for name, x in curve.columns.items():
            self.arrays[name][: len(x), c] = x.numpy()
        self.evaluations[c] = {row["step"]: row for row in runfile.unpacked_rows(curve.evaluations)}
