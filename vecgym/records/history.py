"""The history of a run: rows in the order of steps, read as columns; see `vecgym.records.columns`."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from vecgym.core import check
from vecgym.core.files import write_atomically
from vecgym.records.columns import COLUMNS, is_per_node
from vecgym.records.rows import Row, counted, data_frame


class History:
    """The rows recorded during a run, as columns. A column is None in the rows that lack it.

    Row 0 describes the start (validation only), row t the t-th step. `settings` holds the arguments of the run, and
    what was chosen automatically, such as the engine's plan.

    >>> history = History({"engine": "vmap"})
    >>> history.append({"step": 0, "val_loss": 2.0}); history.append({"step": 1, "train_loss": 1.5})
    >>> history["train_loss"], history.series("val_loss"), history.last("train_loss")
    ([None, 1.5], ([0], [2.0]), 1.5)
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.settings = dict(settings or {})
        self.rows: list[Row] = [dict(row) for row in rows]

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row."""
        self.rows.append(dict(row))

    @property
    def columns(self) -> list[str]:
        """The names of the columns that occur in any row.

        >>> history = History()
        >>> history.append({"val_loss": 2.0, "step": 0}); history.append({"step": 1, "train_loss": 1.5})
        >>> history.columns
        ['step', 'train_loss', 'val_loss']
        """
        present = {name: None for row in self.rows for name in row}
        standard = [name for name in COLUMNS if name in present]
        return standard + [name for name in present if name not in standard]

    def __getitem__(self, column: str) -> list[Any]:
        """Return one entry per row, None if the row lacks the column."""
        column = self._checked_name(column)
        return [row.get(column) for row in self.rows]

    def series(self, column: str, x: str = "step") -> tuple[list[Any], list[Any]]:
        """Return the entries of `x` and of a column in the rows that have both, ready to plot."""
        column, x = self._checked_name(column), self._checked_name(x, "x")
        rows = [row for row in self.rows if row.get(column) is not None and row.get(x) is not None]
        return [row[x] for row in rows], [row[column] for row in rows]

    def last(self, column: str) -> Any:
        """Return the last entry of a column; None if there is none."""
        column = self._checked_name(column)
        entries = (row[column] for row in reversed(self.rows) if row.get(column) is not None)
        return next(entries, None)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the columns that have one number per row. The file appears complete or not at all.

        >>> import tempfile, pathlib
        >>> history = History()
        >>> history.append({"step": 0, "val_loss": 2.0}); history.append({"step": 1, "train_loss": 1.5})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     history.to_csv(pathlib.Path(directory) / "run.csv")
        ...     (pathlib.Path(directory) / "run.csv").read_text().split()
        ['step,train_loss,val_loss', '0,,2.0', '1,1.5,']
        """
        names = [name for name in self.columns if not is_per_node(name)]
        with write_atomically(path, "w") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(self.rows)

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`, with a column for each node: "train_losses[0]".

        Raises:
            ImportError: if pandas is not installed.

        >>> history = History()
        >>> history.append({"step": 1, "train_losses": [0.5, 1.5]})
        >>> list(history.to_pandas().columns)
        ['step', 'train_losses[0]', 'train_losses[1]']
        """
        return data_frame([{name: x for column in row.items() for name, x in _numbers(*column)} for row in self.rows])

    def node_array(self, column: str = "train_losses") -> np.ndarray:
        """Return a per-node column as an array `[rows that have it, K]`.

        >>> history = History()
        >>> history.append({"step": 1, "train_losses": [1.0, 2.0]})
        >>> history.append({"step": 2, "train_losses": [0.5, 1.0]})
        >>> history.node_array()
        array([[1. , 2. ],
               [0.5, 1. ]])
        """
        rows = self.series(column)[1]
        if not rows:
            raise KeyError(f"{column!r} was not recorded: val_losses need a val_dataset, others a training step.")
        return np.stack(rows)

    def _checked_name(self, column: str, name: str = "column") -> str:
        """Return the name of a column; raise a KeyError if there is no such column."""
        check.instance(name, column, str, "the name of a column")
        if column not in COLUMNS and column not in self.columns:
            close = check.did_you_mean(column, self.columns)
            raise KeyError(f"{name}={column!r} is not a column{close} There are {', '.join(self.columns)}.")
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
