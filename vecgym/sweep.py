"""Sweeps: many configurations of one training, as few stacked programs."""

from __future__ import annotations

import copy
import csv
import difflib
import hashlib
import inspect
import itertools
import math
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from vecgym import nodes, rng, tree
from vecgym.collectives import StackedCollectives
from vecgym.data import Batches, EvalBatches, num_steps
from vecgym.errors import VecgymWarning
from vecgym.ledger import readable_bytes
from vecgym.local import Engine, check_settings
from vecgym.metrics import History
from vecgym.settings import check_counts, check_run, interrupts, kind_of, resolve_device
from vecgym.stack import Member, Stack, chosen_batches, joined_batches, optimizer_key
from vecgym.strategy import Context, Strategy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = dict[str, Any]
SETTINGS = ("num_nodes", "batch_size", "minibatch_size", "max_steps", "num_epochs", "seed", "shuffle")
# On a CPU, a stack of more arithmetic than this in a step gains nothing by being larger: what it costs is no longer
# Python, and its tensors leave the cache. It is 8 configurations of 8 nodes of an MLP with 128 hidden units: in stacks
# of 8 they took 1/1.6 of the time of single runs, in stacks of 2 1/1.2 (one thread).
MAX_FLOP_IN_STACK = 1.3e9
SAVE_INTERVAL_S = 60.0
PENDING, PARTIAL, FINISHED, DIVERGED = "pending", "interrupted", "finished", "diverged"


# --------------------------------------------------------------------------------------------------- axes


@dataclass(frozen=True)
class Uniform:
    """An axis of a random search: numbers in [low, high], each as likely as any other."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low={self.low!r} must be smaller than high={self.high!r}.")

    def draw(self, u: float) -> float:
        """The value at a random number in [0, 1)."""
        return self.low + (self.high - self.low) * u


@dataclass(frozen=True)
class LogUniform(Uniform):
    """An axis of a random search: numbers in [low, high] whose logarithms are uniform, as for learning rates.

    >>> LogUniform(1e-4, 1e-2).draw(0.5)
    0.001
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low <= 0:
            raise ValueError(f"low={self.low!r} must be > 0 for a logarithm.")

    def draw(self, u: float) -> float:
        return round(self.low ** (1 - u) * self.high**u, 15)


def _axes(grid: Any, samples: int | None) -> dict[str, list[Any] | Uniform]:
    """The axes with their values, checked."""
    if not isinstance(grid, Mapping):
        raise TypeError(
            f'grid is {kind_of(grid)}; give a dict of axes such as {{"lr": [1e-3, 3e-3], "seed": range(3)}}.'
        )
    axes: dict[str, list[Any] | Uniform] = {}
    for name, values in grid.items():
        if isinstance(values, Uniform):
            if samples is None:
                raise ValueError(f"grid[{name!r}]={values!r} has no end: say how many to draw, samples=50.")
            axes[name] = values
            continue
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(
                f"grid[{name!r}]={values!r} is {kind_of(values)}; an axis is a list of values: [{values!r}]."
            )
        axes[name] = list(values)
        if not axes[name]:
            raise ValueError(f"grid[{name!r}] is empty: give at least one value, or leave the axis out.")
    return axes


def _count(axes: Mapping[str, list[Any] | Uniform], samples: int | None) -> int:
    return samples if samples is not None else math.prod([len(_values(values)) for values in axes.values()])


def _values(axis: list[Any] | Uniform) -> list[Any]:
    assert not isinstance(axis, Uniform), "without samples, every axis is a list"
    return axis


def _points(axes: Mapping[str, list[Any] | Uniform], samples: int | None, sample_seed: int) -> Iterator[Point]:
    """Every point of the grid, as `itertools.product` orders them; or random ones."""
    if samples is None:
        yield from (dict(zip(axes, values)) for values in itertools.product(*map(_values, axes.values())))
        return
    for i in range(samples):
        point = {}
        for name, values in axes.items():
            u = float(torch.rand((), dtype=torch.float64, generator=rng.generator(sample_seed, f"sweep {name}", i)))
            point[name] = values.draw(u) if isinstance(values, Uniform) else values[int(u * len(values))]
        yield point


# ---------------------------------------------------------------------------------------- configurations


@dataclass
class Configuration:
    """One point of the sweep, and what follows from it."""

    index: int
    point: Point
    model: nn.Module
    strategy: Strategy
    settings: dict[str, Any]
    num_steps: int = 0

    @property
    def num_nodes(self) -> int:
        return self.settings["num_nodes"]


@dataclass
class Program:
    """Configurations that can be trained in one stack; in several, one after the other, where `chunks` says so."""

    configs: list[Configuration]
    chunks: list[list[int]] = field(default_factory=list)  # indices of configurations
    why: str = ""
    bytes_per_config: int = 0


def _arguments(function: Any) -> tuple[set[str], set[str], bool]:
    """The names that a function takes, those that it must be given, and whether it takes any name."""
    parameters = inspect.signature(function).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p.name for p in parameters if p.name in names and p.default is p.empty}
    return names, needed, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _check_axes(axes: Iterable[str], strategy: Any, model: Any) -> None:
    """Every axis is somebody's, and every function gets what it asks for."""
    axes = list(axes)
    functions = {"strategy": strategy, "model": model}
    functions = {name: f for name, f in functions.items() if not isinstance(f, (Strategy, nn.Module)) and f is not None}
    allowed, anything = set(SETTINGS), False
    for what, function in functions.items():
        if not callable(function):
            raise TypeError(f"{what} is {kind_of(function)}; give {_WANTED[what]}.")
        names, needed, takes_any = _arguments(function)
        allowed |= names
        anything |= takes_any
        missing = sorted(needed - set(axes))
        if missing:
            raise ValueError(
                f"{what} takes {', '.join(missing)}, which the grid does not have: its axes are {', '.join(axes)}. "
                f'Add grid["{missing[0]}"]=[...], or give the argument a default value.'
            )
    if strategy is None:
        if "strategy" not in axes:
            raise ValueError("there is no strategy: give strategy=lambda lr: DiLoCoStrategy('adamw', lr=lr), say.")
        allowed.add("strategy")
    for name in axes if not anything else ():
        if name not in allowed:
            close = difflib.get_close_matches(name, sorted(allowed), 1, cutoff=0.4)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"grid[{name!r}] is not used: strategy does not take it, and it is no setting. Allowed: "
                f"{', '.join(sorted(allowed))}.{hint}"
            )


_WANTED = {
    "strategy": "a function of the axes that returns a Strategy, such as lambda lr: DiLoCoStrategy('adamw', lr=lr)",
    "model": "an nn.Module, or a function of axes that returns one",
}


def _called(what: str, function: Any, point: Point, wanted: type) -> Any:
    names, _, takes_any = _arguments(function)
    given = {name: value for name, value in point.items() if name in names or (takes_any and name not in SETTINGS)}
    shown = ", ".join(f"{name}={label(value)}" for name, value in given.items())
    try:
        made = function(**given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}({shown}): {error}") from error
    if not isinstance(made, wanted):
        raise TypeError(f"{what}({shown}) returned {made!r}; give {_WANTED[what]}.")
    return made


def label(value: Any) -> Any:
    """A value of an axis as a table shows it.

    >>> label(0.1), label(Strategy)
    (0.1, 'Strategy')
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__name__", None) or str(value)


def alike(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models differ in the values of their trainable parameters alone."""
    if a is b:
        return True
    for of in (nn.Module.named_parameters, nn.Module.named_buffers):
        x, y = dict(of(a)), dict(of(b))
        if x.keys() != y.keys():
            return False
        for name in x:
            one, other = x[name], y[name]
            if (one.shape, one.dtype, one.requires_grad) != (other.shape, other.dtype, other.requires_grad):
                return False
            if not one.requires_grad and not torch.equal(one, other):
                return False
    modules = list(zip(a.named_modules(), b.named_modules()))
    return len(list(a.modules())) == len(list(b.modules())) and all(_same_module(x, y) for x, y in modules)


def _same_module(a: tuple[str, nn.Module], b: tuple[str, nn.Module]) -> bool:
    held = ("_parameters", "_buffers", "_modules")
    x, y = ({k: v for k, v in vars(m).items() if k not in held} for _, m in (a, b))
    if a[0] != b[0] or type(a[1]) is not type(b[1]) or x.keys() != y.keys():
        return False
    return all(_equal(x[key], y[key]) for key in x)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    try:
        return bool(type(a) is type(b) and a == b)
    except Exception:
        return False


# -------------------------------------------------------------------------------------------------- curves


class Record:
    """What the configurations of one stack recorded: arrays `[T, C]` and `[T, C, K]`."""

    def __init__(self, num_steps: int, num_configs: int, num_nodes: int) -> None:
        T, C, K = num_steps, num_configs, num_nodes
        self.arrays: dict[str, np.ndarray] = {
            "train_loss": np.full((T, C), np.nan),
            "train_losses": np.full((T, C, K), np.nan),
            "lr": np.full((T, C), np.nan),
            "bytes": np.zeros((T, C)),
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

    def history(self, settings: dict[str, Any], steps_per_epoch: int, sizes: Callable[[int], int]) -> History:
        """The rows that `Trainer.fit` would have recorded."""
        history = History(settings)
        total, examples = 0.0, 0
        if 0 in self.evaluations:
            start = {"step": 0, "epoch": 0.0, "examples": 0, "bytes": 0.0, "total_bytes": 0.0, "seconds": 0.0}
            history.append({**start, **self.evaluations[0]})
        x = self.columns
        for t in range(len(x["train_loss"])):
            total += float(x["bytes"][t])
            examples += sizes(t) * int(x["active"][t])
            row = {
                "step": t + 1, "epoch": (t + 1) / steps_per_epoch, "examples": examples,
                "train_loss": float(x["train_loss"][t]), "train_losses": x["train_losses"][t],
                "lr": float(x["lr"][t]), "bytes": float(x["bytes"][t]), "total_bytes": total,
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


# -------------------------------------------------------------------------------------------------- result


class SweepResult:
    """What a sweep found; complete, or as far as it came.

    Attributes:
        rows: one dict per configuration, in the order of the grid: its axes, `status` ("finished", "diverged",
            "interrupted", "pending"), `steps`, and the last of `train_loss`, `val_loss`, `val_loss_local`,
            `consensus_distance`, and `bytes`, sent per node in all.
        axes: the names of the axes.
    """

    def __init__(self, runner: _Runner) -> None:
        self._runner = runner
        self.axes = list(runner.axes)

    @property
    def rows(self) -> list[Point]:
        return [self._row(config) for config in self._runner.configs]

    def _row(self, config: Configuration) -> Point:
        curve = self._runner.curves.get(config.index)
        row: Point = {**config.point, "status": PENDING if curve is None else curve.status, "steps": 0}
        last: dict[str, Any] = dict.fromkeys(("train_loss", "val_loss", "val_loss_local", "consensus_distance"))
        if curve is not None:
            row["steps"] = len(curve.columns["train_loss"])
            if row["steps"]:
                last["train_loss"] = float(curve.columns["train_loss"][-1])
            for found in curve.evaluations.values():
                last.update({n: x for n, x in found.items() if n in last})
        sent = 0.0 if curve is None else float(curve.columns["bytes"].sum())
        return {**row, **last, "bytes": sent}

    @property
    def num_pending(self) -> int:
        """Configurations that are not at their end."""
        return sum(row["status"] in (PENDING, PARTIAL) for row in self.rows)

    def history(self, index: int) -> History:
        """The history of the configuration of row `index`, as `Trainer.fit` alone would have recorded it."""
        runner = self._runner
        config = runner.configs[index]
        settings = {
            **{name: label(value) for name, value in config.point.items()},
            "strategy": repr(config.strategy), **config.settings, "max_steps": config.num_steps,
        }  # fmt: skip
        curve = runner.curves.get(config.index)
        if curve is None:
            return History(settings)
        data = runner.batches(config)

        def size(step: int) -> int:
            place = step % data.steps_per_epoch
            return min(data.batch_size, data.epoch_length - place * data.batch_size)

        return curve.history(settings, data.steps_per_epoch, size)

    def model(self, index: int) -> nn.Module:
        """The average of the nodes at the end of the configuration of row `index`; needs `keep_models=True`."""
        config = self._runner.configs[index]
        curve = self._runner.curves.get(config.index)
        if curve is None or curve.average is None:
            raise ValueError(
                f"the model of row {index} was not kept: give keep_models=True, and let the configuration finish."
            )
        return nodes.fill(config.model, curve.average)

    def best(self, column: str = "val_loss") -> Point:
        """The row with the smallest value of a column, among the configurations that finished.

        Errors: ValueError for a column that is not there or has no number.
        """
        rows = self.rows
        if column not in rows[0]:
            raise ValueError(f"{column!r} is not a column; there are {', '.join(rows[0])}.")
        there = [row for row in rows if row["status"] == FINISHED and _is_finite(row[column])]
        if not there:
            hint = " Give a val_dataset." if column.startswith("val") and self._runner.val_dataset is None else ""
            raise ValueError(f"no configuration that finished has a number as {column!r}.{hint}")
        return min(there, key=lambda row: row[column])

    def table(self) -> str:
        """The rows as text, in Markdown."""
        rows = [{name: label(value) for name, value in row.items()} for row in self.rows]
        columns = [name for name in rows[0] if name in self.axes or any(row[name] is not None for row in rows)]
        cells = [columns, *[[_cell(row[name]) for name in columns] for row in rows]]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        lines = ["| " + " | ".join(text.rjust(width) for text, width in zip(line, widths)) + " |" for line in cells]
        rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
        return "\n".join([lines[0], rule, *lines[1:]])

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows; the file appears whole or not at all."""
        rows = [{name: label(value) for name, value in row.items()} for row in self.rows]
        with _appearing(Path(path), "w") as file:
            writer = csv.DictWriter(file, list(rows[0]), restval="")
            writer.writeheader()
            writer.writerows(rows)

    def plot(
        self,
        x: str,
        y: str = "val_loss",
        hue: str | None = None,
        path: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> Figure:
        """A column against an axis, a line for each value of `hue`; see `vecgym.plot.plot_axis`."""
        from vecgym.plot import plot_axis

        return plot_axis(self._plain_rows(), x, y, hue, path, **settings)

    def plot_heatmap(
        self, x: str, y: str, value: str = "val_loss", path: str | os.PathLike[str] | None = None, **settings: Any
    ) -> Figure:
        """A column against two axes; see `vecgym.plot.plot_heatmap`."""
        from vecgym.plot import plot_heatmap

        return plot_heatmap(self._plain_rows(), x, y, value, path, **settings)

    def plot_pareto(
        self,
        y: str = "val_loss",
        hue: str | None = None,
        path: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> Figure:
        """A column against the bytes sent, with the Pareto front; see `vecgym.plot.plot_pareto`."""
        from vecgym.plot import plot_pareto

        return plot_pareto(self._plain_rows(), y, hue, path, **settings)

    def explain(self) -> str:
        """Which configurations share a program, and why the others do not."""
        return self._runner.explain()

    def _plain_rows(self) -> list[Point]:
        return [{name: label(value) for name, value in row.items()} for row in self.rows]

    def __len__(self) -> int:
        return len(self._runner.configs)

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for row in self.rows:
            counts[row["status"]] = counts.get(row["status"], 0) + 1
        return f"SweepResult({len(self)} configurations: {', '.join(f'{n} {s}' for s, n in counts.items())})"


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@contextmanager
def _appearing(path: Path, mode: str) -> Iterator[Any]:
    """A file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    newline = "" if "b" not in mode else None
    with tempfile.NamedTemporaryFile(mode, dir=path.parent, newline=newline, delete=False) as file:
        try:
            yield file
        except BaseException:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


# ------------------------------------------------------------------------------------------------- running


class _Runner:
    """A sweep under way: its configurations, its programs, and what they recorded."""

    def __init__(
        self,
        train_dataset: Any,
        val_dataset: Any,
        axes: Mapping[str, Any],
        configs: list[Configuration],
        *,
        device: torch.device,
        val_size: int | None,
        val_interval: int | None,
        engine: tuple[str, int | None, int | None],
        dataloader_kwargs: Mapping[str, Any] | None,
        chunk_configs: int | None,
        max_memory_bytes: int,
        keep_models: bool,
    ) -> None:
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.axes = axes
        self.configs = configs
        self.device = device
        self.val_size, self.val_interval = val_size, val_interval
        self.engine_settings = engine
        self.dataloader_kwargs = dataloader_kwargs
        self.chunk_configs = chunk_configs
        self.max_memory_bytes = max_memory_bytes
        self.keep_models = keep_models
        self.curves: dict[int, Curve] = {}
        self._engines: dict[tuple[int, int], Engine] = {}
        self._partial: tuple[list[int], list[int], Record, dict[str, Any]] | None = None
        self._batches: dict[tuple[Any, ...], Batches] = {}
        self._val_batches: dict[tuple[Any, ...], EvalBatches] = {}
        for config in configs:
            data = self.batches(config)
            config.num_steps = num_steps(data, config.settings["num_epochs"], config.settings["max_steps"])
            config.strategy.check(config.num_nodes, config.num_steps)
        self.programs = self._programs()

    # data

    def batches(self, config: Configuration) -> Batches:
        s = config.settings
        key = (s["num_nodes"], s["batch_size"], s["seed"], s["shuffle"])
        if key not in self._batches:
            self._batches[key] = Batches(
                self.train_dataset, s["num_nodes"], s["batch_size"], seed=s["seed"], shuffle=s["shuffle"],
                device=self.device, dataloader_kwargs=self.dataloader_kwargs,
            )  # fmt: skip
        return self._batches[key]

    def val_batches(self, config: Configuration) -> EvalBatches | None:
        if self.val_dataset is None or self.val_size == 0:
            return None
        s = config.settings
        size = s["minibatch_size"] or s["batch_size"]
        key = (s["num_nodes"], size, s["seed"])
        if key not in self._val_batches:
            self._val_batches[key] = EvalBatches(
                self.val_dataset, size, self.val_size, s["num_nodes"], seed=s["seed"], device=self.device,
                dataloader_kwargs=self.dataloader_kwargs,
            )  # fmt: skip
        return self._val_batches[key]

    # which configurations go together

    def _programs(self) -> list[Program]:
        groups: list[tuple[tuple[Any, ...], list[Configuration]]] = []
        for config in self.configs:
            key = self._key(config)
            for known, members in groups:
                if known == key and alike(members[0].model, config.model):
                    members.append(config)
                    break
            else:
                groups.append((key, [config]))
        programs = [Program(sorted(members, key=_place)) for _, members in groups]
        for program in programs:
            self._cut(program)
        return programs

    def _key(self, config: Configuration) -> tuple[Any, ...]:
        s = config.settings
        return s["num_nodes"], s["batch_size"], s["minibatch_size"], config.num_steps, config.strategy.mean_gradient

    def _cut(self, program: Program) -> None:
        """Into as few stacks as memory allows, and of no more configurations than is faster."""
        first = program.configs[0]
        K = first.num_nodes
        batch = tree.map_leaves(lambda x: x[0], self.batches(first).batch(0))
        program.bytes_per_config, flop = _costs(first, batch, self.engine_settings[0])
        size, why = len(program.configs), "all in one stack"
        if self.chunk_configs is not None and self.chunk_configs < size:
            size, why = self.chunk_configs, f"chunk_configs={self.chunk_configs}"
        elif self.chunk_configs is None and self.device.type == "cpu" and size * K * flop > MAX_FLOP_IN_STACK:
            best = max(1, int(MAX_FLOP_IN_STACK // (K * flop)))
            if best < size:
                size, why = best, f"{K * flop / 1e9:.2g} GFLOP a step each: a larger stack is not faster"
        fitting = max(1, self.max_memory_bytes // max(1, program.bytes_per_config))
        if fitting < size:
            each, all_of_it = readable_bytes(program.bytes_per_config), readable_bytes(self.max_memory_bytes)
            size, why = fitting, f"{each} each of {all_of_it}"
        indices = [config.index for config in program.configs]
        number = -(-len(indices) // size)
        size = -(-len(indices) // number)  # equal parts
        program.chunks = [indices[i : i + size] for i in range(0, len(indices), size)]
        program.why = why

    def explain(self) -> str:
        lines = [f"{len(self.configs)} configurations in {len(self.programs)} programs:"]
        for i, program in enumerate(self.programs):
            config = program.configs[0]
            s = config.settings
            stacks = f"{len(program.chunks)} stacks of up to {len(program.chunks[0])}"
            stacks = "1 stack" if len(program.chunks) == 1 else stacks
            shared = sorted({type(c.strategy).__name__ for c in program.configs})
            lines.append(
                f"program {i}: {len(program.configs)} configurations, num_nodes={s['num_nodes']}, "
                f"batch_size={s['batch_size']}, {config.num_steps} steps, {type(config.model).__name__}, "
                f"{', '.join(shared)}; {stacks} ({program.why}), "
                f"about {readable_bytes(len(program.chunks[0]) * program.bytes_per_config)}"
            )
            if i > 0:
                lines.append(f"  not with program 0: another {' and another '.join(self._differences(program))}")
        return "\n".join(lines)

    def _differences(self, program: Program) -> list[str]:
        names = ("num_nodes", "batch_size", "minibatch_size", "number of steps", "place of the parameters "
                 "(one copy for all nodes, or one for each)")  # fmt: skip
        first, config = self.programs[0].configs[0], program.configs[0]
        found = [name for name, a, b in zip(names, self._key(first), self._key(config)) if a != b]
        return found if alike(first.model, config.model) else [*found, "model"]

    def estimate(self, num_configs: int) -> tuple[float, float]:
        """Seconds and bytes for so many configurations like the first ones, from a few timed steps."""
        program = self.programs[0]
        chunk = [self.configs[i] for i in program.chunks[0]]
        stack = self._stack(chunk)
        try:
            seconds = []
            for step in range(3):  # the first warms up
                start = time.perf_counter()
                stack.step(joined_batches([self.batches(c).batch(step) for c in chunk]))
                seconds.append(time.perf_counter() - start)
        finally:
            self._close()
        each = min(seconds[1:]) / len(chunk) * chunk[0].num_steps
        return each * num_configs, min(num_configs * program.bytes_per_config, self.max_memory_bytes)

    # training

    def run(self, save: Callable[[], None] | None, progress: bool) -> bool:
        """Train all that is not at its end; whether it came to the end, or was interrupted."""
        try:
            return self._run(save, progress)
        finally:
            self._close()

    def _run(self, save: Callable[[], None] | None, progress: bool) -> bool:
        total = sum(config.num_steps for config in self.configs)
        with (
            torch.enable_grad(),
            interrupts() as interrupted,
            tqdm(total=total, disable=not progress, unit="step") as bar,
        ):
            for program in self.programs:
                for chunk in program.chunks:
                    todo = [i for i in chunk if self._is_open(i)]
                    bar.update(sum(self.configs[i].num_steps for i in chunk if i not in todo))
                    if todo:
                        self._run_chunk(chunk, todo, interrupted, save, bar)
                    if interrupted:
                        return False
                    if todo and save is not None:
                        save()
        return True

    def _is_open(self, index: int) -> bool:
        return index not in self.curves or self.curves[index].status in (PENDING, PARTIAL)

    def _stack(self, chunk: list[Configuration]) -> Stack:
        first = chunk[0]
        engine = self._engine(chunk)
        members = [
            Member(
                config.model if self.device.type == "cpu" else copy.deepcopy(config.model).to(self.device),
                config.strategy, config.settings["seed"], StackedCollectives(config.num_nodes),
                tuple(self.batches(config).shard_sizes),
            )
            for config in chunk
        ]  # fmt: skip
        return Stack(members, engine, max_steps=first.num_steps, minibatch_size=first.settings["minibatch_size"])

    def _engine(self, chunk: list[Configuration]) -> Engine:
        """The engine of a stack; stacks of equal size of a program share one."""
        program = next(i for i, one in enumerate(self.programs) if any(chunk[0] is config for config in one.configs))
        key = program, len(chunk)
        if key not in self._engines:
            kind, chunk_size, node_threads = self.engine_settings
            model = copy.deepcopy(chunk[0].model).to(self.device)
            engine = Engine(model, engine=kind, chunk_size=chunk_size, node_threads=node_threads)
            with torch.enable_grad():
                engine.prepare(joined_batches([self.batches(config).batch(0) for config in chunk]))
            self._engines[key] = engine
        return self._engines[key]

    def _close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _run_chunk(
        self, chunk: list[int], todo: list[int], interrupted: list[int], save: Callable[[], None] | None, bar: tqdm
    ) -> None:
        """Train the configurations of one stack, from the start or from where they were left."""
        configs = [self.configs[i] for i in todo]
        held = self._partial if self._partial is not None and self._partial[0] == todo else None
        record = Record(configs[0].num_steps, len(configs), configs[0].num_nodes)
        alive = list(range(len(configs)))
        if held is not None:
            alive, record = held[1], held[2]
        stack = self._stack([configs[c] for c in alive])
        if held is not None:
            stack.load(held[3])
        bar.update(stack.done * len(alive))
        T = configs[0].num_steps
        start = saved = time.perf_counter()
        before = float(record.arrays["seconds"][stack.done - 1]) if stack.done else 0.0
        if stack.done == 0:
            self._evaluate(stack, record, configs, alive)
        sources, which = self._sources([configs[c] for c in alive])
        for each in zip(*[source.iterate(stack.done, T) for source in sources]):
            alive, diverged = self._step(stack, record, each, which, alive)
            record.arrays["seconds"][stack.done - 1] = before + time.perf_counter() - start
            bar.update(len(alive))
            if diverged:
                for c in diverged:
                    self._finish(configs[c], record, c, DIVERGED)
                    bar.update(T - int(record.steps[c]) + 1)
                which = self._which([configs[c] for c in alive], sources)
                if not alive:
                    break
            if stack.done == T or (self.val_interval and stack.done % self.val_interval == 0):
                self._evaluate(stack, record, configs, alive)
            if interrupted:
                break
            if save is not None and time.perf_counter() - saved > SAVE_INTERVAL_S:
                self._keep_partial(todo, alive, record, stack, configs)
                save()
                saved = time.perf_counter()
        if alive and stack.done < T:
            self._keep_partial(todo, alive, record, stack, configs)
            return
        for place, c in enumerate(alive):
            self._finish(configs[c], record, c, FINISHED, stack, place)
        self._partial = None

    def _step(
        self, stack: Stack, record: Record, each: tuple[Any, ...], which: Tensor, alive: list[int]
    ) -> tuple[list[int], list[int]]:
        """One step of a stack; those that go on, and those that diverged."""
        t = stack.done
        metrics = stack.step(chosen_batches(list(each), which))
        losses = metrics.losses.to("cpu", torch.promote_types(metrics.losses.dtype, torch.float32)).numpy()
        arrays = record.arrays
        arrays["train_losses"][t, alive] = losses
        arrays["lr"][t, alive] = metrics.lrs
        arrays["bytes"][t, alive] = [member.comm.ledger.step_bytes for member in stack.members]
        if all(chosen is None for chosen in metrics.active):
            means = losses.mean(axis=1, dtype=np.float64)
            arrays["active"][t, alive] = losses.shape[1]
        else:
            own = [x if chosen is None else x[chosen] for x, chosen in zip(losses, metrics.active)]
            means = np.array([x.mean(dtype=np.float64) for x in own])
            arrays["active"][t, alive] = [len(x) for x in own]
        arrays["train_loss"][t, alive] = means
        record.steps[alive] = t + 1
        finite = np.isfinite(means)
        if finite.all():
            return alive, []
        going = np.flatnonzero(finite).tolist()
        if going:
            stack.keep(going)
        return [alive[i] for i in going], [alive[i] for i in np.flatnonzero(~finite).tolist()]

    def _evaluate(self, stack: Stack, record: Record, configs: list[Configuration], alive: list[int]) -> None:
        C, K = len(configs), stack.num_nodes
        row: dict[str, np.ndarray] = {}
        sets = [self.val_batches(configs[c]) for c in alive]
        if sets[0] is not None:
            found = stack.evaluate(sets)  # type: ignore[arg-type]
            local = found.nodes.numpy()
            row = {n: np.full(C, np.nan) for n in ("val_loss", "val_loss_local")}
            row["val_losses"] = np.full((C, K), np.nan)
            row["val_loss"][alive] = found.average.numpy()
            row["val_loss_local"][alive] = local.mean(axis=1)
            row["val_losses"][alive] = local
        if stack.done > 0:
            row["consensus_distance"] = np.full(C, np.nan)
            row["consensus_distance"][alive] = stack.consensus_distance()
        if row:
            row["there"] = np.isin(np.arange(C), alive)
            record.evaluations[stack.done] = row

    def _sources(self, configs: list[Configuration]) -> tuple[list[Batches], Tensor]:
        """The different batches of a stack, and which of them each configuration reads."""
        sources = list({id(data): data for data in map(self.batches, configs)}.values())
        return sources, self._which(configs, sources)

    def _which(self, configs: list[Configuration], sources: list[Batches]) -> Tensor:
        places = {id(data): i for i, data in enumerate(sources)}
        return torch.tensor([places[id(self.batches(config))] for config in configs], dtype=torch.long)

    def _finish(
        self, config: Configuration, record: Record, c: int, status: str, stack: Stack | None = None, place: int = 0
    ) -> None:
        curve = record.curve(c)
        curve.status = status
        if stack is not None and self.keep_models:
            held = {**nodes.mean(stack.own_params(place)), **nodes.mean(stack.own_buffers(place))}
            curve.average = {n: x.detach().to("cpu", copy=True) for n, x in held.items()}
        self.curves[config.index] = curve

    def _keep_partial(
        self, todo: list[int], alive: list[int], record: Record, stack: Stack, configs: list[Configuration]
    ) -> None:
        for c in alive:
            self._finish(configs[c], record, c, PARTIAL)
        going = [todo[c] for c in alive]
        if stack.can_be_saved:
            self._partial = ([*going], list(range(len(alive))), _selected(record, alive), stack.state())
        else:
            self._partial = None

    # saving

    def state(self, fingerprint: str) -> dict[str, Any]:
        partial = None
        if self._partial is not None:
            todo, alive, record, stack = self._partial
            partial = {"todo": todo, "alive": alive, "record": record.state(), "stack": stack}
        return {
            "format": 1,
            "fingerprint": fingerprint,
            "chunks": [program.chunks for program in self.programs],
            "curves": {index: curve.state() for index, curve in self.curves.items()},
            "partial": partial,
        }

    def load(self, state: dict[str, Any]) -> None:
        for program, chunks in zip(self.programs, state["chunks"]):
            program.chunks = chunks
        self.curves = {index: Curve.of(held) for index, held in state["curves"].items()}
        if state["partial"] is not None:
            held = state["partial"]
            first = self.configs[held["todo"][0]]
            record = Record(first.num_steps, len(held["todo"]), first.num_nodes)
            record.load(held["record"])
            self._partial = (held["todo"], held["alive"], record, held["stack"])


def _place(config: Configuration) -> tuple[str, str, int]:
    """In a stack, equal optimizers are neighbours: each run of equal rows is one call of torch's kernel."""
    spec = config.strategy.inner_optim
    return repr(optimizer_key(config.strategy)), repr(sorted(spec.kwargs.items())), config.index


def _costs(config: Configuration, batch: Any, engine: str) -> tuple[int, int]:
    """Bytes of a configuration in a stack, roughly, and the floating-point operations of one node's step.

    Args:
        batch: of one node, `[B, ...]`.
    """
    one = Engine(copy.deepcopy(config.model), engine="loop")
    saved: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        saved[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        one.prepare(tree.map_leaves(lambda x: x[None].to(one.device), batch))
    assert one.facts is not None
    params = {name: p.detach()[None].clone() for name, p in one.params.items()}
    ctx = Context(StackedCollectives(config.num_nodes), 0, config.num_steps, config.settings["seed"])
    optimizer, modules = config.strategy.init(params, ctx)
    of_node = 3 * tree.num_bytes(params) + tree.num_bytes(optimizer) + sum(saved.values()) + tree.num_bytes(batch)
    recorded = 8 * config.num_steps * (config.num_nodes + 5)
    return config.num_nodes * of_node + tree.num_bytes(modules) + recorded, one.facts.flop


def _selected(record: Record, chosen: list[int]) -> Record:
    """What some configurations of a stack recorded."""
    T, _, K = record.arrays["train_losses"].shape
    new = Record(T, len(chosen), K)
    new.arrays = {n: x if x.ndim == 1 else x[:, chosen] for n, x in record.arrays.items()}
    new.steps = record.steps[chosen]
    new.evaluations = {t: {n: x[chosen] for n, x in row.items()} for t, row in record.evaluations.items()}
    return new


def _fingerprint(runner: _Runner) -> str:
    """What must be the same for a file of results to be this sweep's."""
    parts: list[Any] = [list(runner.axes), runner.val_size, runner.val_interval]
    for config in runner.configs:
        shapes = [(name, tuple(p.shape)) for name, p in config.model.named_parameters()]
        parts.append([config.point, config.settings, config.num_steps, config.strategy, shapes])
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", repr(parts)).encode()).hexdigest()


def _saver(runner: _Runner, path: Path) -> Callable[[], None]:
    fingerprint = _fingerprint(runner)

    def save() -> None:
        with _appearing(path, "wb") as file:
            torch.save(runner.state(fingerprint), file)

    return save


def _load(runner: _Runner, path: Path) -> None:
    held = torch.load(path, map_location=runner.device, weights_only=True)
    if held.get("format") != 1 or held.get("fingerprint") != _fingerprint(runner):
        raise ValueError(
            f"{path} holds another sweep: its grid, strategies, settings or model differ from those given. Give "
            "resume another path, or remove the file to start anew."
        )
    runner.load(held)


def available_bytes(device: torch.device) -> int:
    """Memory that a sweep may use when nothing is said: half of what is free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # not Linux
        return 4 * 2**30


def sweep(
    model: nn.Module | Callable[..., nn.Module],
    train_dataset: Any,
    val_dataset: Any = None,
    *,
    strategy: Strategy | Callable[..., Strategy] | None = None,
    grid: Mapping[str, Iterable[Any] | Uniform],
    num_nodes: int | None = None,
    samples: int | None = None,
    sample_seed: int = 0,
    num_epochs: int = 1,
    max_steps: int | None = None,
    batch_size: int = 16,
    minibatch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 42,
    device: str | torch.device | None = None,
    val_size: int | None = None,
    val_interval: int | None = 100,
    engine: str = "auto",
    chunk_size: int | None = None,
    node_threads: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
    chunk_configs: int | None = None,
    max_memory_bytes: int | None = None,
    max_configs: int = 10_000,
    keep_models: bool = False,
    resume: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> SweepResult:
    """Train every configuration of a grid, or a random choice, in as few stacked programs as possible.

    Each configuration's curve is that of `Trainer.fit` for it alone, up to rounding (and dropout masks). All those
    with equal `num_nodes`, batch sizes, number of steps and model structure are stacked, whatever their strategies;
    those whose parameters are one copy for all nodes, as in AllReduce, are stacked apart from the others.

    Args:
        model: an `nn.Module`, or a function of axes that returns one, such as `lambda seed: make(seed)`.
        train_dataset, val_dataset: see `vecgym.Trainer`.
        strategy: a function of axes that returns a `Strategy`; or a `Strategy`; None: the grid has an axis
            "strategy" of strategies.
        grid: axis -> its values. Axes are arguments of `strategy` and `model`, and the settings "num_nodes",
            "batch_size", "minibatch_size", "max_steps", "num_epochs", "seed" and "shuffle".
        num_nodes: K, unless it is an axis.
        samples: draw so many random points, each axis by itself, from its values or from a `Uniform` or
            `LogUniform` range; None: all points of the grid.
        sample_seed: of these draws.
        chunk_configs: the most configurations in one stack; None: chosen by memory and arithmetic.
        max_memory_bytes: what a stack may take, roughly; None: half of what is free. A larger one is split.
        max_configs: refuse a grid of more.
        keep_models: keep each configuration's averaged model: `result.model(i)`.
        resume: a file in which results are kept (written whole, every minute and at the end of each stack); if it is
            there already, the sweep goes on from it.
        dry_run: train nothing: look at `result.explain()`.
        num_epochs, max_steps, batch_size, minibatch_size, shuffle, seed, device, val_size, val_interval, engine,
            chunk_size, node_threads, dataloader_kwargs, progress: see `Trainer.fit`.

    Returns:
        A `SweepResult`. A configuration whose loss becomes NaN or infinite ends there, marked "diverged". On Ctrl-C
        all end after the step in progress, and the result holds what there is.

    Raises:
        ValueError, TypeError: for what cannot work, before training starts.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> result = sweep(
    ...     Line(), torch.arange(8.0), torch.arange(8.0), strategy=lambda H, lr: DiLoCoStrategy("sgd", H=H, lr=lr),
    ...     grid={"H": [1, 2], "lr": [0.01, 0.1]}, num_nodes=2, max_steps=4, batch_size=2, device="cpu", progress=False,
    ... )
    >>> len(result.rows), result.best("val_loss")["H"], result.history(0)["step"]
    (4, 2, [0, 1, 2, 3, 4])
    """
    axes = _axes(grid, samples)
    _check_axes(axes, strategy, model)
    check_settings(engine, chunk_size, node_threads)
    optional = {"samples": samples, "val_interval": val_interval, "chunk_configs": chunk_configs,
                "max_memory_bytes": max_memory_bytes}  # fmt: skip
    check_counts(or_none=True, **optional)
    check_counts(max_configs=max_configs)
    if ("num_nodes" in axes) == (num_nodes is not None):
        raise ValueError('give the number of nodes once: num_nodes=8, or an axis grid["num_nodes"]=[4, 8].')
    settings = {
        "num_nodes": num_nodes, "batch_size": batch_size, "minibatch_size": minibatch_size, "max_steps": max_steps,
        "num_epochs": num_epochs, "seed": seed, "shuffle": shuffle,
    }  # fmt: skip
    where = resolve_device(device)
    memory = available_bytes(where) if max_memory_bytes is None else max_memory_bytes

    def runner_of(points: Iterable[Point]) -> _Runner:
        return _Runner(
            train_dataset, val_dataset, axes, _configurations(points, strategy, model, settings, val_size),
            device=where, val_size=val_size, val_interval=val_interval,
            engine=(engine, chunk_size, node_threads), dataloader_kwargs=dataloader_kwargs,
            chunk_configs=chunk_configs, max_memory_bytes=memory, keep_models=keep_models,
        )  # fmt: skip

    count = _count(axes, samples)
    if count > max_configs:
        few = runner_of(itertools.islice(_points(axes, samples, sample_seed), 8))
        seconds, needed = few.estimate(count)
        raise ValueError(
            f"the grid has {count:,} configurations, more than max_configs={max_configs:,}: about "
            f"{duration(seconds)} and {readable_bytes(needed)} here, going by a few steps of the first ones. Give "
            f"samples=100 for a random choice, shorter axes, or max_configs={count}."
        )
    runner = runner_of(_points(axes, samples, sample_seed))
    save = None
    if resume is not None:
        path = Path(resume)
        if path.exists():
            _load(runner, path)
        save = _saver(runner, path)
    result = SweepResult(runner)
    if dry_run:
        return result
    try:
        finished = runner.run(save, progress)
    finally:
        if save is not None:
            save()
    if not finished:
        on = "" if resume is not None else " With resume=path it would go on from here."
        warnings.warn(f"interrupted: {result!r}.{on}", VecgymWarning, stacklevel=2)
    return result


def _configurations(
    points: Iterable[Point], strategy: Any, model: Any, defaults: dict[str, Any], val_size: Any
) -> list[Configuration]:
    configs = []
    models: dict[Any, nn.Module] = {}
    for index, point in enumerate(points):
        settings = {name: point.get(name, value) for name, value in defaults.items()}
        own = point["strategy"] if strategy is None else strategy
        made = own if isinstance(own, Strategy) else _called("strategy", own, point, Strategy)
        check_run(made, settings["num_nodes"], settings["batch_size"], settings["minibatch_size"], val_size, "raise")
        check_counts(num_epochs=settings["num_epochs"])
        check_counts(or_none=True, max_steps=settings["max_steps"])
        configs.append(Configuration(index, point, _model(model, point, models), made, settings))
    return configs


def _model(model: Any, point: Point, made: dict[Any, nn.Module]) -> nn.Module:
    """The model of a point; one for all points with the same values of its axes."""
    if not isinstance(model, nn.Module):
        names, _, takes_any = _arguments(model)
        key = tuple((name, repr(value)) for name, value in point.items() if name in names or takes_any)
        if key not in made:
            made[key] = _called("model", model, point, nn.Module)
        model = made[key]
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"the model, {kind_of(model)}, has no trainable parameter: nothing can be trained.")
    return model


def duration(seconds: float) -> str:
    """A time as a person reads it.

    >>> duration(5400.0)
    '1.5 hours'
    """
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"
