"""The result of a sweep: its rows, what they take on networks, and the history and model of each."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from vecgym.clock import price
from vecgym.collectives.ledger import Ledger, readable_bytes
from vecgym.core import check, nodes
from vecgym.core.files import write_atomically
from vecgym.records.columns import column_label, larger_is_better
from vecgym.records.history import History
from vecgym.records.rows import (
    MeanDifference,
    Row,
    averaged,
    axes_of,
    check_over,
    compared,
    counted,
    data_frame,
    groups,
    is_measure,
    label,
    labelled,
    rounded,
    select,
    with_spread,
)
from vecgym.sweeps.chunk import DIVERGED, FINISHED, NOTHING, PARTIAL, PENDING, Curve
from vecgym.sweeps.configurations import Configuration, Point
from vecgym.sweeps.options import Timing, check_clock, clocks
from vecgym.sweeps.programs import explain
from vecgym.sweeps.runner import Runner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

File = str | os.PathLike[str]
Where = Mapping[str, Any] | None  # axis -> its value, or a condition


class SweepResult:
    """The result of a sweep, complete or as far as it came.

    Attributes:
        rows: one dict per configuration, in the order of the grid: its axes, `status` ("finished", "diverged",
            "interrupted", "pending"), `steps`, and the last of `train_loss`, `val_loss`, `val_loss_local`,
            `consensus_distance`, the model's metrics (`val_accuracy` and the like), and `bytes_total`, sent per node;
            of one that diverged, `val_*` is nan;
            of asynchronous runs, whose steps are updates, also `sim_seconds`, `version`, `staleness`,
            `staleness_max`, `num_arrived` and `local_steps_total`.
        axes: the names of the axes.

    >>> import tempfile, pathlib
    >>> import torch
    >>> from vecgym.strategy import DiLoCoStrategy
    >>> from vecgym.sweeps import sweep
    >>> from vecgym.models import Line
    >>> result = sweep(
    ...     Line(), torch.arange(8.0), torch.arange(8.0), strategy=lambda H, lr: DiLoCoStrategy("sgd", H=H, lr=lr),
    ...     grid={"H": [1, 2], "lr": [0.01, 0.1]}, num_nodes=2, max_steps=4, batch_size=2, device="cpu", progress=False,
    ...     keep_models=True,
    ... )
    >>> result
    SweepResult(4 configurations: 4 finished)
    >>> {row["H"]: row["bytes_total"] for row in result.rows}, result.num_pending
    ({1: 16.0, 2: 8.0}, 0)
    >>> result.best("val_loss")["lr"], result.history(0)["step"], type(result.model(0)).__name__
    (0.1, [0, 1, 2, 3, 4], 'Line')
    >>> print(result.table(columns=["val_loss", "bytes_total"], where={"H": 2}))
    | H |   lr |    val_loss | bytes_total |
    |--:|-----:|------------:|------------:|
    | 2 | 0.01 |     14.6333 |         8 B |
    | 2 |  0.1 | **5.34088** |         8 B |
    >>> result.explain().splitlines()[0]
    '4 configurations in 1 program:'
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     result.to_csv(pathlib.Path(directory) / "sweep.csv")
    ...     len((pathlib.Path(directory) / "sweep.csv").read_text().splitlines())
    5
    >>> figures = result.plot("H", hue="lr"), result.plot_heatmap("H", "lr"), result.plot_pareto(hue="lr")
    >>> [figure.axes[0].get_xlabel() for figure in figures]
    ['H', 'H', 'bytes sent per node']
    >>> result.to_pandas().shape
    (4, 9)
    """

    def __init__(self, runner: Runner, clocks: Sequence[Timing] = ()) -> None:
        self._runner = runner
        # The configuration of each row, and the network and compute that it is priced for.
        self._places = [(config, clock) for config in runner.configs for clock in _clocks_of(config, clocks)]
        self._seconds: dict[tuple[int, int, int], dict[str, Any]] = {}  # columns of what has been priced
        points = [*(clock.point for clock in clocks), *(config.point for config in runner.configs)]
        self.axes = list(dict.fromkeys([*runner.axes, *(name for point in points for name in point)]))

    @property
    def rows(self) -> list[Point]:
        """One dict per configuration, in the order of the grid; see the class for what is in it."""
        rows = [self._row(config, clock) for config, clock in self._places]
        names = dict.fromkeys([*self.axes, *(name for row in rows for name in row)])  # all rows have all columns
        return [{name: row.get(name) for name in names} for row in rows]

    def price(self, network: Any, compute: Any) -> SweepResult:
        """The same on a network: with the columns `sim_seconds` and `sim_utilization`, and nothing trained again.

        On a network with a server or a store, `bytes_total` is what then goes over a node's link.

        Args:
            network, compute: a `vecgym.clock.Network` and a `vecgym.clock.Compute`; or of either several, {name: one}:
                then it is an axis, "network" or "compute", and each configuration has a row for each of them.

        Raises:
            ValueError, TypeError: for other kinds, and for strategies that are written for one rank, or asynchronous.

        >>> import torch
        >>> from vecgym.clock import Compute, Network
        >>> from vecgym.models import Line
        >>> from vecgym.strategy import DiLoCoStrategy
        >>> from vecgym.sweeps import sweep
        >>> result = sweep(
        ...     Line(), torch.arange(8.0), strategy=lambda H: DiLoCoStrategy("sgd", H=H, lr=0.1), grid={"H": [1, 4]},
        ...     num_nodes=2, max_steps=4, batch_size=2, device="cpu", progress=False,
        ... )
        >>> priced = result.price({"near": Network(1e9), "far": Network(1e9, "50 ms")}, Compute(0.5))
        >>> [(row["H"], row["network"], round(row["sim_seconds"], 2)) for row in priced.rows]
        [(1, 'near', 2.0), (1, 'far', 2.4), (4, 'near', 2.0), (4, 'far', 2.1)]
        """
        if any(config.strategy.asynchronous for config in self._runner.configs):
            raise ValueError(
                "asynchronous runs go in the order of their own network's and nodes' times: sweep again, with network= "
                "and compute=, of which either may be a dict, {name: one}."
            )
        check_clock(network, compute)
        return SweepResult(self._runner, clocks(network, compute))

    def _config(self, index: int) -> Configuration:
        return self._places[check.index("index", index, len(self))][0]

    def _row(self, config: Configuration, clock: Timing | None) -> Point:
        curve = self._runner.curves.get(config.index)
        measured = {"status": PENDING, **NOTHING} if curve is None else {"status": curve.status, **curve.last}
        if measured["status"] == DIVERGED:  # its last evaluation was before that
            measured |= {name: math.nan for name in measured if name.startswith("val_")}
        if config.plan is not None and measured["steps"] > 0:
            measured |= config.plan.columns(measured["steps"])
        if clock is None:
            return {**config.point, **measured}
        return {**config.point, **clock.point, **measured, **self._priced(config, clock, curve)}

    def _priced(self, config: Configuration, clock: Timing, curve: Curve | None) -> dict[str, Any]:
        """Return the columns that depend on a clock; where nodes may be absent, of what has been sent so far."""
        if config.settings["availability"] is None:
            ledger = config.ledger
        elif curve is not None and curve.ledger is not None:
            ledger = Ledger()
            ledger.load(curve.ledger)
        else:
            return {"sim_seconds": None, "sim_utilization": None}
        key = config.index, id(clock), ledger.num_steps
        if key not in self._seconds:
            timeline = price(ledger, clock.network, clock.compute)
            # Where the network takes another route than a ring, a node's link carries other bytes than in training.
            sent = {"bytes_total": ledger.routed(clock.network.routes).total_bytes} if clock.network.routes else {}
            self._seconds[key] = {**sent, "sim_seconds": timeline.seconds, "sim_utilization": timeline.utilization}
        return self._seconds[key]

    @property
    def num_pending(self) -> int:
        """How many configurations are not finished."""
        return sum(row["status"] in (PENDING, PARTIAL) for row in self.rows)

    def history(self, index: int) -> History:
        """Return the history of the configuration of row `index`, as `Trainer.fit` alone would have recorded it."""
        runner, config = self._runner, self._config(index)
        settings = {
            **{name: label(value) for name, value in config.point.items()},
            "strategy": repr(config.strategy), **config.shown, "max_steps": config.num_steps,
        }  # fmt: skip
        curve = runner.curves.get(config.index)
        return History(settings) if curve is None else curve.history(settings, config)

    def model(self, index: int) -> nn.Module:
        """Return the average of the nodes at the end of the configuration of row `index`; needs `keep_models=True`."""
        config = self._config(index)
        curve = self._runner.curves.get(config.index)
        if curve is None or curve.average is None:
            raise ValueError(
                f"the model of row {index} was not kept: give keep_models=True, and let the configuration finish."
            )
        return nodes.fill(config.model, curve.average)

    def best(
        self, column: str = "val_loss", *, largest: bool | None = None, over: str | None = "seed", where: Where = None
    ) -> Point:
        """Return the configuration with the best value of a column, among those that finished.

        Args:
            largest: whether the largest value is the best. None: as the name says, "loss" or "accuracy", say.
            over: the axis to average over: the value is a mean over its runs, all of which finished, and "runs" how
                many they are. None: each run by itself, so that the luckiest seed wins.
            where: of these rows only: axis -> its value, or a function of a value that is true.

        Raises:
            ValueError: for a column that is not there or has no number.
        """
        rows = averaged(select(self.rows, where), over)
        finite = self._finite("column", column, rows)
        choose = max if _is_largest(column, largest) else min
        return choose(finite, key=lambda row: row[column])

    def _finite(self, name: str, column: str, rows: list[Row]) -> list[Row]:
        """Return the rows that finished with a number in a column; a ValueError if there is none."""
        check.column(name, column, rows[0])
        finite = [row for row in rows if row["status"] == FINISHED and check.is_finite(row[column])]
        if not finite:
            is_missing = column.startswith("val") and self._runner.options.val_dataset is None
            hint = " Give a val_dataset." if is_missing else ""
            raise ValueError(f"no configuration that finished has a number as {column!r}.{hint}")
        return finite

    def compare(
        self, axis: str, metric: str = "val_loss", *, baseline: Any = None, over: str = "seed", best: bool = True,
        paired: bool = True, largest: bool | None = None, where: Where = None,
    ) -> Comparison:  # fmt: skip
        """Compare the values of an axis with a baseline: how large is the difference, and is it more than chance?

        Configurations of one seed share initial weights, the order of the data and masks. So they are compared seed by
        seed: these differences vary far less than the losses do, and a few seeds often suffice. If the 95 % interval
        does not contain 0, the difference is hardly chance.

        Args:
            axis: its values are compared.
            baseline: one of them; None: the first.
            over: the axis of what is repeated.
            best: compare each value at its best, the values of the other axes with the best mean, as one does with
                tuned learning rates; these are shown. The choice is by the same seeds, so a value with more
                configurations to choose from is favoured: if that matters, compare the chosen ones with new seeds.
                False: compare with the baseline at each value of the other axes.
            largest: whether the highest mean is the best. None: as the name of the metric says.
            paired: False: compare the means as if the seeds had nothing in common (Welch's interval).
            where: of these rows only; see `best`.

        Returns:
            A list that prints as a table, with a row for each value, or each configuration: the axes, the mean of the
            metric, the mean `difference`, its `standard_error`, the ends of its 95 % interval (Student's t) `low` and
            `high`, `seeds`, and those `left_out`. In the row of the baseline, and where there is none, they are None.

        Warns:
            VecgymWarning: if not all seeds are shared: then it is over those that are, or not paired if none is; and if
                runs have diverged, or not finished: such a seed is left out. A configuration with fewer of them is
                better than any other.

        Raises:
            ValueError: for an unknown axis, metric or baseline, without an axis of seeds, and if the metric's name does
                not say whether its largest value is the best.

        >>> import torch
        >>> from vecgym.models import Line
        >>> from vecgym.strategy import DiLoCoStrategy
        >>> from vecgym.sweeps import sweep
        >>> result = sweep(
        ...     Line(), torch.randn(64, generator=torch.Generator().manual_seed(0)), torch.zeros(1),
        ...     strategy=lambda H: DiLoCoStrategy("sgd", H=H, lr=0.1), grid={"H": [1, 2, 4], "seed": range(4)},
        ...     num_nodes=2, max_steps=4, batch_size=2, device="cpu", progress=False,
        ... )
        >>> result.compare("H", baseline=4)
        | H | val_loss | difference | standard error |    95 % interval | seeds |
        |--:|---------:|-----------:|---------------:|-----------------:|------:|
        | 1 |    0.096 |     +0.065 |          0.029 | -0.027 to +0.156 |     4 |
        | 2 |    0.062 |     +0.031 |          0.020 | -0.034 to +0.096 |     4 |
        | 4 |    0.031 |            |                |                  |     4 |
        """
        rows = select(self.rows, where)
        check.choice("axis", axis, axes_of(rows))
        self._finite("metric", metric, rows)
        for name, value in (("best", best), ("paired", paired)):
            check.flag(name, value)
        if over == axis or check_over(rows, over) is None:
            raise ValueError(
                f"over={over!r} is not an axis besides {axis!r}: compare needs several runs of each configuration, by "
                'grid["seed"]=range(5), say.'
            )
        base = _label_of(rows[0][axis] if baseline is None else baseline, axis, rows)
        chosen = _is_largest(metric, largest if best or largest is not None else False)
        settings: dict[str, Any] = {"over": over, "best": best, "paired": paired, "largest": chosen}
        return Comparison(compared(labelled(rows), axis, metric, base, **settings))

    def table(
        self, form: str = "markdown", *, columns: Sequence[str] = (), over: str | None = "seed", where: Where = None
    ) -> str:
        """Return the rows as text: measures as mean ± standard deviation over the seeds, the best of them in bold.

        Args:
            form: "markdown", or "latex", for its package booktabs.
            columns: the measures to show; none: all that were recorded.
            over: the axis to average over, if it is there; None: each run has a row.
            where: of these rows only; see `best`.

        Raises:
            ValueError: for another form, or an unknown column.
        """
        bold, escaped = FORMS[check.choice("form", form, FORMS)]
        rows = labelled(select(self.rows, where))
        over, means, members = check_over(rows, over), averaged(rows, over), groups(rows, over)
        for name in check.instance("columns", columns, (list, tuple), 'a list of names, such as ["val_loss"]'):
            check.column("columns", name, means[0])
        axes = [name for name in self.axes if name in means[0]]
        names = [*axes, *(columns or [name for name in means[0] if name not in axes and _tells(name, means)])]
        finished = [row for row in means if row["status"] == FINISHED]
        better = {n: max if larger_is_better(n) else min for n in names if "loss" in n or larger_is_better(n)}
        ends = {n: better[n]((row[n] for row in finished if check.is_finite(row[n])), default=math.nan) for n in better}
        lines = [[(column_label(name) if escaped else name).translate(escaped) for name in names]]
        for mean, group in zip(means, members):
            best = {name for name, end in ends.items() if mean[name] == end}
            texts = {name: _measured(name, mean[name], [row[name] for row in group]) for name in names}
            shown = {name: text.translate(escaped) for name, text in texts.items()}
            lines.append([bold.format(text) if name in best else text for name, text in shown.items()])
        runs = sorted({len(group) for group in members})
        seeds = f"{runs[0]} to {counted(runs[-1], str(over))}" if runs[1:] else counted(runs[0], str(over))
        return _as_text(form, lines, "" if over is None or runs[-1] == 1 else f"± over {seeds}: standard deviation")

    def to_csv(self, path: File) -> None:
        """Write the rows; the file appears whole or not at all."""
        rows = labelled(self.rows)
        with write_atomically(path, "w") as file:
            writer = csv.DictWriter(file, list(rows[0]), restval="")
            writer.writeheader()
            writer.writerows(rows)

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`; ImportError where pandas is not installed."""
        return data_frame(labelled(self.rows))

    def plot(
        self, x: str, y: str = "val_loss", hue: str | None = None, path: File | None = None, *,
        where: Where = None, baseline: Any = None, **settings: Any,
    ) -> Figure:  # fmt: skip
        """Draw a column against an axis, a line for each value of `hue`; see `vecgym.plot.plot_axis`, and `best`.

        With `baseline`, a value of `hue`, or without hue of `x`: draw the differences to it with their 95 % intervals,
        those of `compare`; see `vecgym.plot.plot_differences`.
        """
        from vecgym.plot import plot_axis, plot_differences  # matplotlib takes a while to import

        if baseline is None:
            return plot_axis(self._shown(where), x, y, hue, path, **settings)
        check.choice("x" if hue is None else "hue", axis := hue or x, self.axes)
        base = _label_of(baseline, axis, select(self.rows, where))
        return plot_differences(self._shown(where), x, y, hue, path, baseline=base, **settings)

    def plot_heatmap(
        self, x: str, y: str, value: str = "val_loss", path: File | None = None, *, where: Where = None, **settings: Any
    ) -> Figure:
        """Draw a column against two axes; see `vecgym.plot.plot_heatmap`, and `best`."""
        from vecgym.plot import plot_heatmap

        return plot_heatmap(self._shown(where), x, y, value, path, **settings)

    def plot_pareto(
        self, y: str = "val_loss", hue: str | None = None, path: File | None = None, *,
        where: Where = None, **settings: Any,
    ) -> Figure:  # fmt: skip
        """Draw a column against the bytes sent, with the Pareto front; see `vecgym.plot.plot_pareto`, and `best`.

        After `price`, or `sweep(network=, compute=)`, also against seconds: `x="sim_seconds"`.
        """
        from vecgym.plot import plot_pareto

        return plot_pareto(self._shown(where), y, hue, path, **settings)

    def explain(self) -> str:
        """Say which configurations share a program, and why the others do not."""
        return explain(self._runner.programs)

    def _shown(self, where: Where) -> list[Row]:
        return labelled(select(self.rows, where))

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        counts = Counter(row["status"] for row in self.rows)
        return f"SweepResult({counted(len(self), 'configuration')}: {', '.join(f'{n} {s}' for s, n in counts.items())})"


def _clocks_of(config: Configuration, clocks: Sequence[Timing]) -> Sequence[Timing | None]:
    """Return what a configuration is priced for: all clocks, or those of its own compute; None: it is not priced."""
    if config.strategy.asynchronous or not clocks:
        return [None]
    return [clock for clock in clocks if clock.compute is config.compute] or clocks


def _label_of(value: Any, axis: str, rows: list[Row]) -> Any:
    """Return the label of a baseline, which is a value of an axis or its label."""
    labels = {id(row[axis]): shown[axis] for row, shown in zip(rows, labelled(rows))}
    shown = labels.get(id(value), label(value))
    if shown not in labels.values():
        there = ", ".join(map(_cell, dict.fromkeys(labels.values())))
        raise ValueError(f"baseline={shown!r} is not a value of {axis!r}, which has {there}.")
    return shown


def _is_largest(name: str, largest: bool | None) -> bool:
    """Whether the largest value of a measure is the best."""
    largest = larger_is_better(name) if largest is None else check.flag("largest", largest)
    if largest is None:
        raise ValueError(
            f"{name!r} does not say which value is the best: give largest=True, as for an accuracy, or largest=False, "
            "as for a loss."
        )
    return largest


class Comparison(list[Row]):
    """The rows of `SweepResult.compare`, shown as a table."""

    def __repr__(self) -> str:
        *axes, metric = (name for name in self[0] if name not in MeanDifference._fields)
        finest = min((row["standard_error"] for row in self if check.is_finite(row["standard_error"])), default=0.0)
        lines = [[*axes, metric, "difference", "standard error", "95 % interval", "seeds"]]
        for row in self:
            gap, error = row["difference"], row["standard_error"]
            texts = [rounded(gap, error, "+") if check.is_finite(gap) else "", "", ""]
            if check.is_finite(error):
                low, high = (rounded(row[end], error, "+") for end in ("low", "high"))
                texts[1:] = rounded(error, error), f"{low} to {high}"
            out = f" ({row['left_out']} left out)" if row["left_out"] else ""
            mean = rounded(row[metric], finest)
            lines.append([*[_cell(row[name]) for name in axes], mean, *texts, f"{row['seeds']}{out}"])
        return _as_text("markdown", lines)


LATEX = str.maketrans({
    **{c: f"\\{c}" for c in "&%$#_{}"}, "±": r"$\pm$", "<": "$<$", ">": "$>$", "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
})  # fmt: skip
FORMS: dict[str, tuple[str, dict[int, str]]] = {"markdown": ("**{}**", {}), "latex": (r"\textbf{{{}}}", LATEX)}


def _as_text(form: str, lines: list[list[str]], note: str = "") -> str:
    """Lay out a table, of which the first line is the header."""
    if form == "latex":
        rows = [" & ".join(line) + r" \\" for line in lines]
        frame = [rf"\begin{{tabular}}{{{'r' * len(lines[0])}}}", r"\toprule", rows[0], r"\midrule", *rows[1:]]
        return "\n".join([*([f"% {note}"] if note else []), *frame, r"\bottomrule", r"\end{tabular}"])
    widths = [max(map(len, column)) for column in zip(*lines)]
    texts = ["| " + " | ".join(text.rjust(width) for text, width in zip(line, widths)) + " |" for line in lines]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([texts[0], rule, *texts[1:], *(["", note] if note else [])])


def _tells(name: str, rows: list[Row]) -> bool:
    """Whether a column is worth its place: a measure that was recorded, or how runs have ended if not all are alike."""
    values = {row[name] for row in rows}
    if is_measure(name):
        return values != {None}
    return (name == "status" and values != {FINISHED}) or (name == "steps" and len(values) > 1)


def _measured(name: str, mean: Any, values: list[Any]) -> str:
    """Format the mean of a measure with its standard deviation, if it has one."""
    if name.startswith("bytes") and check.is_finite(mean):
        return readable_bytes(mean)
    return with_spread(values) if all(map(check.is_finite, values)) else _cell(mean)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
