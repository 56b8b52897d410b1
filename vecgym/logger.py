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
from vecgym.core.files import write_atomically
from vecgym.records.columns import EACH, INTEGERS, PER_NODE, SCALARS, is_per_node
from vecgym.records.history import History

WandbMode = Literal["online", "offline", "disabled"]


class Logger:
    """Receive the settings of a run when it starts, then its rows, then a call when it ends.

    A logger that fails is reported by one warning and not called again; it never stops the training. If it raises
    StopIteration, the run ends as after its last step. It gets a row when the next step has been taken, and on several
    processes some steps later: `Trainer.fit(stop=)` is exact.

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
        """Resume a run from a checkpoint, instead of `start`; `rows` are those logged before the checkpoint.

        A logger must drop the rows of steps after the checkpoint: they are logged again.

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
        """Finish, whether or not the run succeeded."""


def as_loggers(logger: Any) -> list[Logger]:
    """Return a list of loggers, given one logger, several, or None.

    Raises:
        TypeError: for anything but loggers.

    >>> as_loggers(None), len(as_loggers([Logger(), Logger()]))
    ([], 2)
    """
    loggers = [] if logger is None else list(logger) if isinstance(logger, (list, tuple)) else [logger]
    give = "a Logger object such as CSVLogger(directory), or a list of them"
    return [check.instance("logger", x, Logger, give) for x in loggers]


class CSVLogger(Logger):
    """Write `history.csv`, `train_losses.csv`, `val_losses.csv` (a column per node) and `config.json`.

    Each row is on disk as soon as it is logged. `read_csv` reads the files back.

    Args:
        directory: created if it does not exist. The files of an earlier run in it are replaced. A resumed run rewrites
            its rows, so that none is lost or duplicated.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     logger = CSVLogger(directory)
    ...     logger.start({"num_nodes": 2}); logger.log({"step": 1, "train_loss": 0.5}); logger.finish()
    ...     print((Path(directory) / "history.csv").read_text().splitlines()[1].rstrip(","))
    1,,,0.5
    """

    @check.strict
    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = check.path("directory", directory)
        self._files: dict[str, TextIO] = {}
        self._columns: list[str] = []

    def start(self, settings: dict[str, Any]) -> None:
        self.finish()
        self.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings, indent=2, default=str)
        (self.directory / "config.json").write_text(text + "\n")
        for path in _per_node_files(self.directory):
            path.unlink(missing_ok=True)
        self._columns = list(SCALARS)
        self._write("history", self._columns)

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.start(settings)
        for row in rows:
            self.log(row)

    def log(self, row: dict[str, Any]) -> None:
        if new := [name for name in row if name not in self._columns and not is_per_node(name)]:
            self._widen(new)
        self._write("history", [row.get(name, "") for name in self._columns])
        for name, values in row.items():
            if is_per_node(name) and values is not None:
                if name not in self._files:
                    self._write(name, ["step", *(f"node_{i}" for i in range(len(values)))])
                self._write(name, [row["step"], *values])

    def finish(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _widen(self, new: list[str]) -> None:
        """Add columns to the file: a model's own metrics appear only with the first row that has them."""
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
    """Read the history and settings that a `CSVLogger` wrote. Skip an incomplete last line, with a warning.

    Raises:
        ValueError: if the directory holds no files of a run, or unreadable ones.

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
        raise ValueError(f"{folder} holds no run: there is no history.csv, which CSVLogger({str(folder)!r}) writes.")
    try:
        config = folder / "config.json"
        history = History(json.loads(config.read_text()) if os.path.isfile(config) else {})
        for cells in _read_rows(folder / "history.csv"):
            row = {name: float(cell) for name, cell in cells.items() if cell not in ("", None)}
            history.append({**row, **{name: int(row[name]) for name in INTEGERS if name in row}})
        by_step = {row["step"]: row for row in history}
        for path in _per_node_files(folder):
            for cells in _read_rows(path):
                step = int(cells.pop("step"))
                if step in by_step:
                    by_step[step][path.stem] = np.array([float(cell) for cell in cells.values()])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, csv.Error, OSError) as error:
        raise ValueError(f"{folder} cannot be read as the files of a CSVLogger: {error}") from error
    return history


def _per_node_files(folder: Path) -> list[Path]:
    """Return where the columns with a number for each node are, or may be."""
    return [*(folder / f"{name}.csv" for name in PER_NODE), *sorted(folder.glob(f"*{EACH}.csv"))]


def _read_rows(path: Path) -> list[dict[str, str]]:
    if not os.path.isfile(path):
        return []
    with path.open(newline="") as file:
        lines, newline, cut_off = file.read().rpartition("\n")
    if cut_off:  # a truncated number is a different number
        warn(f"skipping the incomplete last line of {path}: its writer was killed, or the disk was full.")
    return list(csv.DictReader(io.StringIO(lines + newline, newline="")))


class WandbLogger(Logger):
    """Log a run to Weights & Biases: the settings as its config, the rows as its history.

    A run that is resumed from a checkpoint continues its wandb run, whose id is the setting "run_id" of runs with a
    `save_dir`. Offline, all rows are written again under the same id, so that the upload is complete.

    Metrics have the names of the columns. Columns with a number for each node become their minimum and maximum,
    `train_losses/min` and `train_losses/max`.

    Args:
        project: the project of the run.
        experiment_name, name: the run's name, given as either of them; None: wandb makes one up.
        entity: the user or team that owns the run; None: your default one.
        mode: "online"; "offline", which needs no network and no account (`wandb sync DIR` uploads the run later);
            "disabled", which writes nothing. None: that of `WANDB_MODE`; otherwise "online" if there is an API key, in
            `WANDB_API_KEY` or from `wandb login`, and "offline" if not.
        directory: the files go to its subdirectory `wandb/`; None: `WANDB_DIR`, or else the current directory.
        per_node: also log the number of each node, `train_losses/node_3`.

    Attributes:
        run: the `wandb.Run`, once the run has started: `logger.run.id`, `logger.run.dir`.

    Raises:
        ImportError: at construction, if the package is not installed: `pip install vecgym[wandb]`.
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
        parameters = inspect.signature(type(self)).parameters
        check.keywords("WandbLogger", unknown, [key for key in parameters if key != "unknown"])
        if name is not None and experiment_name is not None:
            raise ValueError(
                f"experiment_name={experiment_name!r} and name={name!r} both name the run: give one of them."
            )
        if mode is not None:
            check.choice("mode", mode, get_args(WandbMode), "or None")
        self._wandb = _import_optional("wandb", "init", "WandbLogger")
        self.project = project
        self.name = experiment_name if name is None else name
        self.entity = entity
        self.mode = mode
        self.directory = None if directory is None else check.path("directory", directory)
        self.per_node = check.flag("per_node", per_node)
        self.run: Any = None
        self._next = 0  # earlier steps were logged before the run was resumed

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Resume the run: keep the rows that wandb has, and log the others."""
        self.start(settings, resume="allow", allow_val_change=True)
        self._next = self.run.step if self.run.resumed else 0
        for row in rows:
            self.log(row)

    def start(self, settings: dict[str, Any], **options: Any) -> None:
        self.finish()
        self._next = 0
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        mode = self.mode or _default_wandb_mode()
        if mode == "offline":
            options.pop("resume", None)  # wandb would warn that it has no effect
        self.run = self._wandb.init(
            project=self.project, name=self.name, entity=self.entity, mode=mode, id=settings.get("run_id"),
            dir=str(self.directory or os.environ.get("WANDB_DIR") or Path.cwd()),
            config=json.loads(json.dumps(settings, default=str)), reinit="create_new", **options,
        )  # fmt: skip

    def log(self, row: dict[str, Any]) -> None:
        if row["step"] >= self._next:
            self.run.log(_flat(row, self.per_node), step=row["step"])

    def finish(self) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.finish()


def _default_wandb_mode() -> str | None:
    """Return a mode that neither asks nor waits for an account."""
    mode = os.environ.get("WANDB_MODE")
    if mode:  # wandb itself reads it only once per process
        return mode if mode in get_args(WandbMode) else None
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return "online" if netrc.netrc(os.environ.get("NETRC")).authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


class TensorBoardLogger(Logger):
    """Log a run to TensorBoard: a curve for each column, the settings as text. View it: `tensorboard --logdir DIR`.

    A resumed run continues its curves; points after the checkpoint are dropped.

    Args:
        directory: of this run, created if it does not exist. Give each run its own: TensorBoard merges all files in a
            directory.
        per_node: also draw the number of each node, `train_losses/node_3`, not only the minimum and maximum.

    Raises:
        ImportError: at construction, if the package is not installed: `pip install vecgym[tensorboard]`.

    >>> trainer.fit(strategy, num_nodes=8, logger=TensorBoardLogger("runs/H=100"))  # doctest: +SKIP
    """

    @check.strict
    def __init__(self, directory: str | os.PathLike[str], *, per_node: bool = False) -> None:
        _import_optional("tensorboard", "__version__", "TensorBoardLogger")
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
    """Flatten a row to numbers: of per-node columns the minimum, the maximum and, if `per_node`, each entry."""
    flat = {name: value for name, value in row.items() if not is_per_node(name) and value is not None}
    for name in filter(is_per_node, row):
        if row[name] is not None:
            values = np.asarray(row[name], np.float64)
            flat[f"{name}/min"], flat[f"{name}/max"] = float(np.fmin.reduce(values)), float(np.fmax.reduce(values))
            if per_node:
                flat.update({f"{name}/node_{i}": float(value) for i, value in enumerate(values)})
    return flat


def _import_optional(package: str, attribute: str, whose: str) -> Any:
    """Import an optional package; a folder of the same name, such as wandb writes, is not mistaken for it."""
    try:
        module = importlib.import_module(package)
        getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"{whose} needs the package {package}: pip install vecgym[{package}]") from error
    return module
