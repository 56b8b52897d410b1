"""What the configurations of a sweep record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.records.columns import START
from vecgym.records.history import History

PENDING, PARTIAL, FINISHED, DIVERGED = "pending", "interrupted", "finished", "diverged"


class Record:
    """What the configurations of one stack recorded: arrays `[T, C]` and `[T, C, K]`."""

    def __init__(self, num_steps: int, num_configs: int, num_nodes: int) -> None:
        T, C, K = num_steps, num_configs, num_nodes
        self.arrays: dict[str, np.ndarray] = {
            "train_loss": np.full((T, C), np.nan),
            "train_losses": np.full((T, C, K), np.nan),
            "lr": np.full((T, C), np.nan),
            "bytes": np.zeros((T, C)),
            "distance_before": np.full((T, C), np.nan),
            "active": np.zeros((T, C), dtype=np.int64),
            "seconds": np.full(T, np.nan),
        }
        self.steps = np.zeros(C, dtype=np.int64)  # done by each
        # step -> column -> [C] or [C, K]; "there": who was evaluated
        self.evaluations: dict[int, dict[str, np.ndarray]] = {}

    def curve(self, c: int) -> Curve:
        """What one configuration recorded."""
        steps = int(self.steps[c])
        one = {n: x[:steps] if x.ndim == 1 else x[:steps, c] for n, x in self.arrays.items()}
        found = {
            t: {n: x[c] if x.ndim > 1 else float(x[c]) for n, x in row.items() if n != "there"}
            for t, row in self.evaluations.items()
            if row["there"][c]
        }
        return Curve({n: x.copy() for n, x in one.items()}, found)

    def state(self) -> dict[str, Any]:
        evaluations = {t: {n: torch.from_numpy(x) for n, x in row.items()} for t, row in self.evaluations.items()}
        arrays = {n: torch.from_numpy(x) for n, x in self.arrays.items()}
        return {"arrays": arrays, "steps": torch.from_numpy(self.steps), "evaluations": evaluations}

    def load(self, state: dict[str, Any]) -> None:
        self.arrays = {n: x.numpy().copy() for n, x in state["arrays"].items()}
        self.steps = state["steps"].numpy().copy()
        self.evaluations = {t: {n: x.numpy() for n, x in row.items()} for t, row in state["evaluations"].items()}


@dataclass
class Curve:
    """What one configuration recorded: columns `[T]`, `[T, K]`, and evaluations by step."""

    columns: dict[str, np.ndarray]
    evaluations: dict[int, dict[str, Any]]
    status: str = PENDING
    average: dict[str, Tensor] | None = None  # the parameters and buffers of the averaged model

    def history(self, settings: dict[str, Any], steps_per_epoch: int, sizes: Callable[[int], Sequence[int]]) -> History:
        """The rows that `Trainer.fit` would have recorded."""
        history = History(settings)
        total, examples = 0.0, 0
        if 0 in self.evaluations:
            history.append({**START, **self.evaluations[0]})
        x = self.columns
        for t in range(len(x["train_loss"])):
            total += float(x["bytes"][t])
            active = [True] * x["train_losses"].shape[1]
            if int(x["active"][t]) < len(active):
                active = (~np.isnan(x["train_losses"][t])).tolist()
            examples += sum(size for size, trains in zip(sizes(t), active) if trains)
            row = {
                "step": t + 1, "epoch": (t + 1) / steps_per_epoch, "examples": examples,
                "train_loss": float(x["train_loss"][t]), "train_losses": x["train_losses"][t],
                "lr": float(x["lr"][t]), "bytes_step": float(x["bytes"][t]), "bytes_total": total,
                "seconds": float(x["seconds"][t]),
            }  # fmt: skip
            history.append({**row, **self.evaluations.get(t + 1, {})})
        return history

    def state(self) -> dict[str, Any]:
        columns = {n: torch.from_numpy(x) for n, x in self.columns.items()}
        evaluations = {
            t: {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in row.items()}
            for t, row in self.evaluations.items()
        }
        return {"columns": columns, "evaluations": evaluations, "status": self.status, "average": self.average}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Curve:
        columns = {n: x.numpy() for n, x in state["columns"].items()}
        evaluations = {
            t: {n: x.numpy() if isinstance(x, Tensor) else x for n, x in row.items()}
            for t, row in state["evaluations"].items()
        }
        return cls(columns, evaluations, state["status"], state["average"])


def selected(record: Record, chosen: list[int]) -> Record:
    """What some configurations of a stack recorded."""
    T, _, K = record.arrays["train_losses"].shape
    new = Record(T, len(chosen), K)
    new.arrays = {n: x if x.ndim == 1 else x[:, chosen] for n, x in record.arrays.items()}
    new.steps = record.steps[chosen]
    new.evaluations = {t: {n: x[chosen] for n, x in row.items()} for t, row in record.evaluations.items()}
    return new
