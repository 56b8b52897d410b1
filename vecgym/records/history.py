"""What a run recorded: rows in the order of the steps, read as columns."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from vecgym.core import check
from vecgym.core.files import write_atomically
from vecgym.records import rows
from vecgym.records.rows import counted, data_frame, present_name

# Columns with one number a row, and what they are. Loggers write these, and for each metric that a model offers (see
# `vecgym.runs.evaluation`) `val_NAME` of the average of the nodes and `val_NAME_local`, the mean of the nodes'.
SCALARS = {
    "step": "optimizer steps done",
    "epoch": "passes over the data done",
    "examples": "examples seen by all nodes together",
    "train_loss": "mean over the nodes of the loss on their batches, before the step's update",
    "lr": "inner learning rate of the step; where nodes differ, their mean",
    "outer_lr": "learning rate of the outer or server optimizer, where the strategy has one",
    "bytes_step": "bytes sent per node in this step alone, whatever the interval of a logger",
    "bytes_total": "bytes sent per node since the start",
    "bytes_received_total": "bytes received per node since the start",
    "val_loss": "validation loss of the average of the nodes",
    "val_loss_local": "mean over the nodes of each node's validation loss",
    "consensus_distance": "root mean square distance of the nodes' parameters to their average, after the step",
    "consensus_distance_before": "the same before the step's exchange of parameters",
    "correlation": "mean correlation between the parameters of two nodes",
    "seconds": "since the start of the first step",
    "steps_per_s": "steps per second since the row before",
    "examples_per_s": "examples per second of all nodes together, since the row before",
    "bytes_per_s": "implied bandwidth: `bytes_step` / seconds of the step, as simulated here: what each node would "
    "have to send at to keep pace with this run, if it sent during the whole step",
    "memory_bytes": "the most memory of the process up to an evaluation: resident, or on CUDA allocated",
}
# Those that belong to the machine and the moment: they differ between two runs that are otherwise the same.
MEASURED = ("seconds", "steps_per_s", "examples_per_s", "bytes_per_s", "memory_bytes")
RENAMED = {"bytes": "bytes_step", "total_bytes": "bytes_total"}  # old name -> new name
# What is counted before the first step.
START = {
    "step": 0, "epoch": 0.0, "examples": 0, "bytes_step": 0.0, "bytes_total": 0.0, "bytes_received_total": 0.0,
    "seconds": 0.0,
}  # fmt: skip
# Columns with one number a node, [K].
PER_NODE = {
    "train_losses": "each node's training loss; nan where it did not train",
    "val_losses": "each node's validation loss",
}


class Row(rows.Row):
    """One row of a history: column -> value. Old names of columns still work, with a warning.

    >>> row = Row(step=1, bytes_total=400.0)
    >>> row["bytes_total"], row.get("val_loss")
    (400.0, None)
    """

    renamed = RENAMED


class History:
    """Rows recorded during a run, as columns. A column that a row does not have is None there.

    Row 0 describes the start (validation only), row t the t-th step. `settings` holds what the run was given and
    what was chosen for it, such as the engine's plan.

    >>> history = History({"engine": "vmap"})
    >>> history.append({"step": 0, "val_loss": 2.0}); history.append({"step": 1, "train_loss": 1.5})
    >>> history["train_loss"], history.series("val_loss"), history.last("train_loss")
    ([None, 1.5], ([0], [2.0]), 1.5)
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.settings = dict(settings or {})
        self.rows: list[dict[str, Any]] = []
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row. Old names of columns, from a file of an earlier version say, become the present ones."""
        self.rows.append(Row({RENAMED.get(name, name): value for name, value in row.items()}))

    @property
    def columns(self) -> list[str]:
        """The names of the columns that some row has.

        >>> history = History()
        >>> history.append({"val_loss": 2.0, "step": 0}); history.append({"step": 1, "train_loss": 1.5})
        >>> history.columns
        ['step', 'train_loss', 'val_loss']
        """
        present = {name: None for row in self.rows for name in row}
        known = [name for name in (*SCALARS, *PER_NODE) if name in present]
        return known + [name for name in present if name not in known]

    def __getitem__(self, column: str) -> list[Any]:
        """One entry per row; None where the row does not have it."""
        column = self._known(column)
        return [row.get(column) for row in self.rows]

    def series(self, column: str, x: str = "step") -> tuple[list[Any], list[Any]]:
        """The entries of a column that are there, and their `x`: ready to plot."""
        column, x = self._known(column), self._known(x, "x")
        there = [row for row in self.rows if row.get(column) is not None and row.get(x) is not None]
        return [row[x] for row in there], [row[column] for row in there]

    def last(self, column: str) -> Any:
        """The last entry of a column; None if there is none."""
        column = self._known(column)
        for row in reversed(self.rows):
            if row.get(column) is not None:
                return row[column]
        return None

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the columns with one number a row; the file appears whole or not at all.

        >>> import tempfile, pathlib
        >>> history = History()
        >>> history.append({"step": 0, "val_loss": 2.0}); history.append({"step": 1, "train_loss": 1.5})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     history.to_csv(pathlib.Path(directory) / "run.csv")
        ...     (pathlib.Path(directory) / "run.csv").read_text().split()
        ['step,train_loss,val_loss', '0,,2.0', '1,1.5,']
        """
        names = [name for name in self.columns if name not in PER_NODE]
        with write_atomically(path, "w") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(self.rows)

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`; one with a number a node becomes a column for each: "train_losses[0]".

        Raises:
            ImportError: where pandas is not installed.

        >>> history = History()
        >>> history.append({"step": 1, "train_losses": [0.5, 1.5]})
        >>> list(history.to_pandas().columns)
        ['step', 'train_losses[0]', 'train_losses[1]']
        """
        return data_frame([{name: x for column in row.items() for name, x in _numbers(*column)} for row in self.rows])

    def node_array(self, column: str = "train_losses") -> np.ndarray:
        """A per-node column as an array `[rows that have it, K]`.

        >>> history = History()
        >>> history.append({"step": 1, "train_losses": [1.0, 2.0]})
        >>> history.append({"step": 2, "train_losses": [0.5, 1.0]})
        >>> history.node_array()
        array([[1. , 2. ],
               [0.5, 1. ]])
        """
        rows = self.series(column)[1]
        if not rows:
            raise KeyError(f"{column!r} was not recorded; val_losses need a val_dataset, others a step of training.")
        return np.stack(rows)

    def _known(self, column: str, name: str = "column") -> str:
        """The present name of a column that there is."""
        column = present_name(check.instance(name, column, str, "the name of a column"), RENAMED)
        if column not in SCALARS and column not in PER_NODE and column not in self.columns:
            raise KeyError(f"{name}={column!r} is not a column; there are {', '.join(self.columns)}.")
        return column

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __repr__(self) -> str:
        return f"History({counted(len(self.rows), 'row')}: {', '.join(self.columns)})"


def _numbers(column: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, (np.ndarray, list, tuple)):
        return [(f"{column}[{node}]", x) for node, x in enumerate(value)]
    return [(column, value)]
