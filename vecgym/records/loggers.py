"""Loggers receive the rows of a run while it runs."""

from __future__ import annotations

import csv
import importlib
import inspect
import io
import json
import netrc
import os
from pathlib import Path
from typing import Any, Literal, TextIO, get_args
from urllib.parse import urlsplit

import numpy as np

from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.files import is_regular, write_atomically
from vecgym.records.columns import INTEGERS, PER_NODE, SCALARS
from vecgym.records.history import History

WandbMode = Literal["online", "offline", "disabled"]


class Logger:
    """Receive the settings of a run at its start, then its rows, then its end.

    A logger that fails is reported once by a warning and not called again; it never stops the training.

    >>> class Printing(Logger):
    ...     def log(self, row):
    ...         print(row["step"], row["train_loss"])
    >>> logger = Printing()
    >>> logger.start({"num_nodes": 2}); logger.log({"step": 1, "train_loss": 0.5}); logger.finish()
    1 0.5
    """

    def start(self, settings: dict[str, Any]) -> None:
        """Begin a run."""

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Resume a run from a checkpoint, instead of `start`; `rows` are those that were logged up to there.

        A logger must drop what it kept of steps after the checkpoint: they are logged again.

        >>> class Printing(Logger):
        ...     def start(self, settings):
        ...         print("from the start")
        ...     def resume(self, settings, rows):
        ...         print(f"after step {rows[-1]['step']}")
        >>> Printing().resume({"num_nodes": 2}, rows=[{"step": 1}, {"step": 2}])
        after step 2
        """
        self.start(settings)

    def log(self, row: dict[str, Any]) -> None:
        """Log one row: values of `vecgym.records.columns.COLUMNS`, and of the model's own metrics."""

    def finish(self) -> None:
        """Finish, however the run ended."""


def as_loggers(logger: Any) -> list[Logger]:
    """Return one logger, several, or None as a list.

    Raises:
        TypeError: for anything but loggers.

    >>> as_loggers(None), len(as_loggers([Logger(), Logger()]))
    ([], 2)
    """
    loggers = [] if logger is None else list(logger) if isinstance(logger, (list, tuple)) else [logger]
    give = "a Logger object such as CSVLogger(directory), or a list of them"
    return [check.instance("logger", one, Logger, give) for one in loggers]


class CSVLogger(Logger):
    """Write `history.csv`, `train_losses.csv`, `val_losses.csv` (a column per node) and `config.json`.

    Each row is on disk as soon as it is logged. `read_csv` reads all of it back.

    Args:
        directory: created if it does not exist; files of an earlier run in it are replaced. A resumed run writes its
            rows again, so that none is lost or duplicated.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     logger = CSVLogger(directory)
    ...     logger.start({"num_nodes": 2}); logger.log({"step": 1, "train_loss": 0.5}); logger.finish()
    ...     print((Path(directory) / "history.csv").read_text().splitlines()[1].rstrip(","))
    1,,,0.5
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = check.path("directory", directory)
        self._files: dict[str, TextIO] = {}
        self._columns: list[str] = []

    def start(self, settings: dict[str, Any]) -> None:
        self.finish()
        self.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings, indent=2, default=str)
        (self.directory / "config.json").write_text(text + "\n")
        for name in PER_NODE:
            (self.directory / f"{name}.csv").unlink(missing_ok=True)
        self._columns = list(SCALARS)
        self._write("history", self._columns)

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.start(settings)
        for row in rows:
            self.log(row)

    def log(self, row: dict[str, Any]) -> None:
        if new := [name for name in row if name not in self._columns and name not in PER_NODE]:
            self._widen(new)
        self._write("history", [row.get(name, "") for name in self._columns])
        for name in PER_NODE:
            if row.get(name) is not None:
                if name not in self._files:
                    self._write(name, ["step", *(f"node_{i}" for i in range(len(row[name])))])
                self._write(name, [row["step"], *row[name]])

    def finish(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _widen(self, new: list[str]) -> None:
        """Add columns to the file: a model's own metrics are known only from the first row that has them."""
        self._files.pop("history").close()
        path = self.directory / "history.csv"
        with path.open(newline="") as file:
            rows = list(csv.reader(file))[1:]
        self._columns += new
        with write_atomically(path, "w") as file:
            csv.writer(file).writerows([self._columns, *([*row, *[""] * len(new)] for row in rows)])
        self._files["history"] = path.open("a", newline="")

    def _write(self, name: str, values: list[Any]) -> None:
        if name not in self._files:
            self._files[name] = (self.directory / f"{name}.csv").open("w", newline="")
        csv.writer(self._files[name]).writerow(values)
        self._files[name].flush()


def read_csv(directory: str | os.PathLike[str]) -> History:
    """Read the history that a `CSVLogger` wrote, with its settings; warn of an incomplete last line, and skip it.

    Raises:
        ValueError: for a directory without the files of a run, or with unreadable ones.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     logger = CSVLogger(directory)
    ...     logger.start({"num_nodes": 2}); logger.log({"step": 1, "train_losses": [0.5, 0.25]}); logger.finish()
    ...     history = read_csv(directory)
    >>> history.settings, history.node_array("train_losses")
    ({'num_nodes': 2}, array([[0.5 , 0.25]]))
    """
    folder = check.path("directory", directory)
    if not (folder / "history.csv").is_file():
        raise ValueError(
            f"{folder} holds no run: there is no history.csv in it, which CSVLogger({str(folder)!r}) writes."
        )
    try:
        config = folder / "config.json"
        history = History(json.loads(config.read_text()) if is_regular(config) else {})
        for cells in _rows_of(folder / "history.csv"):
            row = {name: float(cell) for name, cell in cells.items() if cell not in ("", None)}
            history.append({**row, **{name: int(row[name]) for name in INTEGERS if name in row}})
        by_step = {row["step"]: row for row in history}
        for name in PER_NODE:
            for cells in _rows_of(folder / f"{name}.csv"):
                step = int(cells.pop("step"))
                if step in by_step:
                    by_step[step][name] = np.array([float(cell) for cell in cells.values()])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, csv.Error, OSError) as error:
        raise ValueError(f"{folder} cannot be read as the files of a CSVLogger: {error}") from error
    return history


def _rows_of(path: Path) -> list[dict[str, str]]:
    if not is_regular(path):
        return []
    with path.open(newline="") as file:
        lines, newline, cut_off = file.read().rpartition("\n")
    if cut_off:  # what is left of a number is another number
        warn(f"{path} ends within a line, which is left out: its writer was killed, or the disk was full.")
    return list(csv.DictReader(io.StringIO(lines + newline, newline="")))


class WandbLogger(Logger):
    """Log a run to Weights & Biases: the settings as its config, the rows as its history.

    A training that is resumed from a checkpoint continues its wandb run, whose id is the setting "run_id" of runs with
    a `save_dir`. Offline all rows are written once more, under the same id, so that the upload is complete.

    Names are those of the columns; of columns with a number for each node the lowest and the highest,
    `train_losses/min` and `train_losses/max`.

    Args:
        project: to which the run belongs.
        experiment_name, name: two ways to give the run's name; None: wandb makes one up.
        entity: the user or team that owns it; None: your own.
        mode: "online"; "offline", which needs no network and no account (`wandb sync DIR` uploads the run later);
            "disabled", which writes nothing. None: that of `WANDB_MODE`; else "online" with an API key, in
            `WANDB_API_KEY` or from `wandb login`, and "offline" without.
        directory: the files go to `wandb/` in it; None: `WANDB_DIR`, or else the current directory.
        per_node: log each node's number as well, `train_losses/node_3`.

    Attributes:
        run: wandb's own object, once the run has begun: `logger.run.id`, `logger.run.dir`.

    Raises:
        ImportError: at construction, without the package: `pip install vecgym[wandb]`.
        ValueError: for two names, or an unknown mode.

    >>> logger = WandbLogger("diloco", name="H=100", mode="offline")  # doctest: +SKIP
    >>> trainer.fit(strategy, num_nodes=8, logger=logger)  # doctest: +SKIP
    """

    def __init__(
        self,
        project: str | None = None,
        experiment_name: str | None = None,
        *,
        name: str | None = None,
        entity: str | None = None,
        mode: WandbMode | None = None,
        directory: str | os.PathLike[str] | None = None,
        per_node: bool = False,
        **unknown: Any,
    ) -> None:
        known = inspect.signature(type(self)).parameters
        check.keywords("WandbLogger", unknown, [key for key in known if key != "unknown"])
        if name is not None and experiment_name is not None:
            raise ValueError(
                f"experiment_name={experiment_name!r} and name={name!r} are two names for the run's name: give one."
            )
        if mode is not None:
            check.choice("mode", mode, get_args(WandbMode), "or None")
        self._wandb = _optional("wandb", "init", "WandbLogger")
        self.project = project
        self.name = experiment_name if name is None else name
        self.entity = entity
        self.mode = mode
        self.directory = None if directory is None else check.path("directory", directory)
        self.per_node = check.flag("per_node", per_node)
        self.run: Any = None
        self._next = 0  # earlier steps were logged before the run was resumed

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Resume the run: the rows that wandb has stay, and the others follow."""
        self.start(settings, resume="allow", allow_val_change=True)
        self._next = self.run.step if self.run.resumed else 0
        for row in rows:
            self.log(row)

    def start(self, settings: dict[str, Any], **how: Any) -> None:
        self.finish()
        self._next = 0
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        mode = self.mode or _default_wandb_mode()
        if mode == "offline":
            how.pop("resume", None)  # wandb would say that it has no effect there
        self.run = self._wandb.init(
            project=self.project, name=self.name, entity=self.entity, mode=mode, id=settings.get("run_id"),
            dir=str(self.directory or os.environ.get("WANDB_DIR") or Path.cwd()),
            config=json.loads(json.dumps(settings, default=str)), reinit="create_new", **how,
        )  # fmt: skip

    def log(self, row: dict[str, Any]) -> None:
        if row["step"] >= self._next:
            self.run.log(_flat(row, self.per_node), step=row["step"])

    def finish(self) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.finish()


def _default_wandb_mode() -> str | None:
    """Return a mode that never asks, or waits, for an account."""
    mode = os.environ.get("WANDB_MODE")
    if mode:  # wandb itself reads it only once in a process
        return mode if mode in get_args(WandbMode) else None
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return "online" if netrc.netrc(os.environ.get("NETRC")).authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


class TensorBoardLogger(Logger):
    """Log a run to TensorBoard: a curve for each column, the settings as text; `tensorboard --logdir DIR` shows it.

    Args:
        directory: of this run; created if it does not exist. Give each run its own: TensorBoard joins all files in
            one directory.
        per_node: draw each node's number, `train_losses/node_3`, besides the lowest and the highest.

    A resumed run continues its curves; points after the checkpoint are dropped.

    Raises:
        ImportError: at construction, without the package: `pip install vecgym[tensorboard]`.

    >>> trainer.fit(strategy, num_nodes=8, logger=TensorBoardLogger("runs/H=100"))  # doctest: +SKIP
    """

    def __init__(self, directory: str | os.PathLike[str], *, per_node: bool = False) -> None:
        _optional("tensorboard", "__version__", "TensorBoardLogger")
        self._writer: Any = None
        self.directory = check.path("directory", directory)
        self.per_node = check.flag("per_node", per_node)

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.start(settings, purge_step=max((row["step"] for row in rows), default=-1) + 1)

    def start(self, settings: dict[str, Any], purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.finish()
        self._writer = SummaryWriter(str(self.directory), purge_step=purge_step)
        text = json.dumps(settings, indent=2, default=str)
        self._writer.add_text("settings", "\n".join("    " + line for line in text.splitlines()), 0)

    def log(self, row: dict[str, Any]) -> None:
        for name, value in _flat(row, self.per_node).items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def finish(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _flat(row: dict[str, Any], per_node: bool) -> dict[str, float]:
    """Flatten a row to numbers: of per-node columns the lowest and the highest, and each node's if asked for."""
    flat = {name: value for name, value in row.items() if name not in PER_NODE and value is not None}
    for name in PER_NODE:
        if row.get(name) is not None:
            values = np.asarray(row[name], np.float64)
            flat[f"{name}/min"], flat[f"{name}/max"] = float(np.fmin.reduce(values)), float(np.fmax.reduce(values))
            if per_node:
                flat.update({f"{name}/node_{i}": float(value) for i, value in enumerate(values)})
    return flat


def _optional(package: str, attribute: str, whose: str) -> Any:
    """Import an optional package. A folder of the same name, such as the one that wandb writes, is not the package."""
    try:
        module = importlib.import_module(package)
        getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"{whose} needs the package {package}: pip install vecgym[{package}]") from error
    return module
