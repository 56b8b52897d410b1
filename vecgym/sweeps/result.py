"""The result of a sweep: its rows, their times on networks, and the history and model of each."""

from __future__ import annotations

import csv
import itertools
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vecgym.clock import price
from vecgym.collectives.ledger import Ledger, readable_bytes
from vecgym.core import check, nodes
from vecgym.core.errors import warn
from vecgym.core.files import write_atomically
from vecgym.core.objects import same
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
    listed,
    rounded,
    select,
    with_spread,
)
from vecgym.sweeps.chunk import DIVERGED, EMPTY_ROW, FINISHED, PARTIAL, PENDING, Curve
from vecgym.sweeps.configurations import SAME_WEIGHTS, SETTINGS, Configuration, Point, varied, varied_note
from vecgym.sweeps.options import Clock, check_clock, clocks
from vecgym.sweeps.programs import explain
from vecgym.sweeps.runner import Runner
from vecgym.sweeps.saving import check_joined

if TYPE_CHECKING:
    from matplotlib.figure import Figure

File = str | os.PathLike[str]
Where = Mapping[str, Any] | None  # axis -> its value, or a condition


class SweepResult:
    """The result of a sweep, complete or partial.

    Attributes:
        rows: one dict per configuration, in the order of the grid: its axes, `status` ("finished", "diverged",
            "interrupted", "pending"), `steps`, and the last values of `train_loss`, `val_loss`, `val_loss_local`,
            `consensus_distance`, the model's metrics (such as `val_accuracy`), and `bytes_total`, sent per node. If it
            diverged, `val_*` is nan. Asynchronous runs, whose steps are updates, also have `sim_seconds`, `version`,
            `staleness`, `staleness_max`, `num_arrived` and `local_steps_total`.
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
    >>> print(result.table(column=["val_loss", "bytes_total"], where={"H": 2}))
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

    def __init__(self, runner: Runner, clocks: Sequence[Clock] = ()) -> None:
        self._runner, self._clocks = runner, list(clocks)
        # The configuration of each row, and the network and compute that it is priced for.
        self._places = [(config, clock) for config in runner.configs for clock in _clocks_of(config, clocks)]
        self._seconds: dict[tuple[int, int, int], dict[str, Any]] = {}  # columns of priced rows
        points = [*(clock.point for clock in clocks), *(config.point for config in runner.configs)]
        self.axes = list(dict.fromkeys([*runner.axes, *(name for point in points for name in point)]))

    @property
    def rows(self) -> list[Point]:
        """One dict per configuration, in the order of the grid; see the class for its columns."""
        rows = [self._row(config, clock) for config, clock in self._places]
        names = dict.fromkeys([*self.axes, *(name for row in rows for name in row)])  # all rows have all columns
        return [{name: row.get(name) for name in names} for row in rows]

    def price(self, network: Any, compute: Any) -> SweepResult:
        """Return the result with the columns `sim_seconds` and `sim_utilization`; nothing is trained again.

        If the network has a server or a store, `bytes_total` counts the bytes that a node's link carries there.

        Args:
            network, compute: a `vecgym.clock.Network` and a `vecgym.clock.Compute`. Either may be a dict {name: one}:
                then it is an axis, "network" or "compute", and each configuration has a row for each of its values.

        Raises:
            ValueError, TypeError: for other types, and for strategies that are written for one rank, or asynchronous.

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
                "network and compute determine the events of asynchronous runs: sweep again, with network= and "
                "compute=, either of which may be a dict {name: one}."
            )
        check_clock(network, compute)
        return SweepResult(self._runner, clocks(network, compute))

    def __add__(self, other: SweepResult) -> SweepResult:
        """Return the rows of both sweeps, for more seeds, or more values of an axis.

        Raises:
            ValueError: if they differ in their axes, in settings that are no axes, or in the networks of their prices;
                and if they have a configuration in common.

        >>> import torch
        >>> from vecgym.models import Line
        >>> from vecgym.strategy import DiLoCoStrategy
        >>> from vecgym.sweeps import sweep
        >>> def swept(seeds):
        ...     return sweep(
        ...         Line(), torch.arange(8.0), torch.arange(8.0), strategy=lambda H: DiLoCoStrategy("sgd", H=H, lr=0.1),
        ...         grid={"H": [1, 2], "seed": seeds}, num_nodes=2, max_steps=4, batch_size=2, device="cpu",
        ...         progress=False,
        ...     )
        >>> both = swept([0, 1, 2]) + swept([3, 4])
        >>> len(both), both.compare("H")[1]["seeds"]
        (10, 5)
        """
        if not isinstance(other, SweepResult):
            return NotImplemented
        if set(self.axes) != set(other.axes):
            different = listed(sorted(set(self.axes) ^ set(other.axes)))
            raise ValueError(f"the sweeps differ in their axes: only one has {different}. Give it to both.")
        if not same(self._clocks, other._clocks):
            raise ValueError("the prices are for different networks: add first, (a + b).price(network, compute).")
        check_joined(self._runner, other._runner)
        return SweepResult(self._runner.joined(other._runner), self._clocks)

    def _config(self, index: int) -> Configuration:
        return self._places[check.index("index", index, len(self))][0]

    def _row(self, config: Configuration, clock: Clock | None) -> Point:
        curve = self._runner.curves.get(config.index)
        measured = {"status": PENDING, **EMPTY_ROW} if curve is None else {"status": curve.status, **curve.last}
        if measured["status"] == DIVERGED:  # its last evaluation was before that
            measured |= {name: math.nan for name in measured if name.startswith("val_")}
        if config.plan is not None and measured["steps"] > 0:
            measured |= config.plan.columns(measured["steps"])
        if clock is None:
            return {**config.point, **measured}
        return {**config.point, **clock.point, **measured, **self._priced(config, clock, curve)}

    def _priced(self, config: Configuration, clock: Clock, curve: Curve | None) -> dict[str, Any]:
        """Return the columns that depend on a clock; if nodes may be absent, for the transfers so far."""
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
            # If the network takes another route than a ring, a node's link carries other bytes than in training.
            sent = {"bytes_total": ledger.routed(clock.network.routes).total_bytes} if clock.network.routes else {}
            self._seconds[key] = {**sent, "sim_seconds": timeline.seconds, "sim_utilization": timeline.utilization}
        return self._seconds[key]

    @property
    def num_pending(self) -> int:
        """The number of unfinished configurations."""
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
            largest: whether the largest value is the best. None: the name decides, such as "loss" or "accuracy".
            over: the axis to average over: the value is a mean over its runs, all of which have finished, and "runs" is
                their number. None: single runs, so that the luckiest seed wins.
            where: a choice of rows: axis -> its value, or a condition, a function of the value.

        The value is optimistic, more so with many configurations, since the same validation set and seeds made the
        choice. Runs with other seeds, or `compare(holdout=...)`, show how good the configuration is.

        Warns:
            VecgymWarning: if it has the smallest or the largest of three or more values of an axis, beyond which there
                may be better ones, and if it is a mean over only 2 seeds.

        Raises:
            ValueError: for an unknown column, or one without numbers.
        """
        rows = averaged(select(self.rows, where), over)
        finite = self._finite(column, rows)
        choose = max if _is_largest(column, largest) else min
        best = choose(finite, key=lambda row: row[column])
        tried = labelled([*rows, best])
        axes = [axis for axis in axes_of(tried) if axis != "seed"]
        notes = [*_edges([(tried[-1], "")], tried, axes, least=3), _few_seeds(best.get("runs", 0), str(over))]
        if len(rows) > 1 and any(notes) and column.startswith(("train_", "val_")):  # bytes and seconds: no news
            flatters = f"And {column}={_cell(best[column])} flatters, as it was chosen for that: see compare(holdout=)."
            warn(" ".join([*filter(None, notes), flatters]))
        return best

    def _finite(self, column: str, rows: list[Row]) -> list[Row]:
        """Return the rows that finished with a number in a column; a ValueError if there is none."""
        check.column("column", column, rows[0])
        finite = [row for row in rows if row["status"] == FINISHED and check.is_finite(row[column])]
        if not finite:
            is_missing = column.startswith("val") and self._runner.options.val_dataset is None
            hint = " Give a val_dataset." if is_missing else ""
            raise ValueError(f"no configuration that finished has a number as {column!r}.{hint}")
        return finite

    @check.strict
    def compare(
        self, axis: str, column: str = "val_loss", *, baseline: Any = None, over: str = "seed", best: bool = True,
        holdout: Iterable[Any] | None = None, paired: bool = True, largest: bool | None = None, where: Where = None,
    ) -> Comparison:  # fmt: skip
        """Compare the values of an axis with a baseline: how large is the difference, and is it more than chance?

        Configurations of one seed share the order of the data, masks and initial weights. So they are compared seed by
        seed: these differences vary far less than the losses do, and a few seeds often suffice. If the 95 % interval
        does not contain 0, the difference is hardly chance. The interval covers only the sources of chance that the
        seeds vary. A note below the table names them; without `model=lambda seed: ...`, initial weights are not among
        them.

        Args:
            axis: the axis whose values are compared.
            baseline: one of them; None: the first.
            over: the axis of repetitions.
            best: compare each value at the values of the other axes with the best mean, as for tuned learning rates;
                the table shows these. The same seeds and validation set choose and compare, which favours a value with
                more configurations to choose from. False: compare with the baseline at each value of the other axes.
            holdout: seeds for the comparison only; the other seeds choose the best configurations.
            largest: whether the highest mean is the best. None: the name of the column decides.
            paired: False: compare the means as if the seeds had nothing in common (Welch's interval).
            where: a choice of rows; see `best`.

        Returns:
            A list that prints as a table, with a row for each value, or each configuration: the axes, the mean of the
            column, the mean `difference`, its `standard_error`, the ends of its 95 % interval (Student's t) `low` and
            `high`, the numbers of `seeds` and of seeds `left_out`. Without a baseline to compare with, and in its own
            row, the differences are None. Its `notes`, printed below, name the sources of chance that the seeds vary,
            few seeds, best values at the edge of an axis, and a choice by the seeds of the comparison.

        Warns:
            VecgymWarning: if not all seeds are shared: it then compares the shared ones, or means if there are none;
                and if runs have diverged or are unfinished: it leaves their seeds out. A configuration with fewer such
                runs counts as better.

        Raises:
            ValueError: for an unknown axis, column, baseline or seed, without an axis of seeds, and if the column's
                name does not say whether its largest value is the best.

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
        <BLANKLINE>
        The seeds vary the order of the data, the partition and masks; they do not vary the initial weights.
        H=4, the best, is the largest that was tried: there may be better values beyond it.
        """
        rows = select(self.rows, where)
        check.choice("axis", axis, axes_of(rows))
        self._finite(column, rows)
        for name, value in (("best", best), ("paired", paired)):
            check.flag(name, value)
        if check_over(rows, over) is None or over == axis:
            raise ValueError(
                f"over={over!r} is not an axis besides {axis!r}: compare needs several runs of each configuration, by "
                'grid["seed"]=range(5), say.'
            )
        base = _label_of(rows[0][axis] if baseline is None else baseline, axis, rows)
        chosen = _is_largest(column, largest if best or largest is not None else False)
        apart = () if holdout is None else _apart(holdout, over, rows, best)
        choose = (max if chosen else min) if best else None
        shown = compared(labelled(rows), axis, column, base, over=over, choose=choose, holdout=apart, paired=paired)
        notes = [self._varied_note(over), _few_seeds(min((row["seeds"] for row in shown), default=0), over)]
        if best:
            notes += _edge_notes(shown, labelled(rows), axis, over, lambda row: (-1 if chosen else 1) * row[column])
            chosen_here = holdout is None and len(groups(rows, over)) > len(shown)
            notes += [FLATTERS.format(over=over)] if chosen_here else []
        return Comparison(shown, notes)

    def _varied_note(self, over: str | None) -> str:
        """Return the note on the sources of chance that the seeds vary."""
        over = over or "seed"
        return varied_note(varied(self._runner.configs, over), over) if over in self.axes else ""

    @check.strict
    def table(
        self, form: str = "markdown", *, column: str | Sequence[str] = (), over: str | None = "seed",
        where: Where = None,
    ) -> str:  # fmt: skip
        """Return the rows as text: measures as mean ± standard deviation over the seeds, the best of them in bold.

        A note below names the sources of chance that the seeds vary.

        Args:
            form: "markdown", or "latex", for its package booktabs.
            column: the measure to show, or a list of several; none: all recorded ones.
            over: the axis to average over, if the sweep has it; None: each run has a row.
            where: a choice of rows; see `best`.

        Raises:
            ValueError: for another form, or an unknown column.
        """
        bold, escaped = FORMS[check.choice("form", form, FORMS)]
        rows = labelled(select(self.rows, where))
        over, means, members = check_over(rows, over), averaged(rows, over), groups(rows, over)
        columns = [column] if isinstance(column, str) else column
        for name in check.instance("column", columns, (list, tuple), 'a name, or a list of such, as in ["val_loss"]'):
            check.column("column", name, means[0])
        axes = [name for name in self.axes if name in means[0]]
        names = [*axes, *(columns or [name for name in means[0] if name not in axes and _is_informative(name, means)])]
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
        spread = [] if over is None or runs[-1] == 1 else [f"± over {seeds}: standard deviation."]
        return _as_text(form, lines, [*spread, self._varied_note(over)])

    def to_csv(self, path: File) -> None:
        """Write the rows to a file, atomically."""
        rows = labelled(self.rows)
        with write_atomically(path, "w") as file:
            writer = csv.DictWriter(file, list(rows[0]), restval="")
            writer.writeheader()
            writer.writerows(rows)

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`; an ImportError if pandas is not installed."""
        return data_frame(labelled(self.rows))

    def plot(
        self, x: str, column: str = "val_loss", hue: str | None = None, path: File | None = None, *,
        where: Where = None, baseline: Any = None, **settings: Any,
    ) -> Figure:  # fmt: skip
        """Draw a column against an axis, a line for each value of `hue`; see `vecgym.plot.plot_axis`, and `best`.

        With `baseline`, a value of `hue` (of `x` without `hue`), it draws the differences from the baseline, with the
        95 % intervals of `compare`; see `vecgym.plot.plot_differences`. A note below the figure names the sources of
        chance that the seeds vary.
        """
        from vecgym.plot import plot_axis, plot_differences  # matplotlib takes a while to import

        if baseline is None:
            return self._noted(plot_axis, where, path, settings, x, column, hue)
        check.choice("x" if hue is None else "hue", axis := hue or x, self.axes)
        base = _label_of(baseline, axis, select(self.rows, where))
        return self._noted(plot_differences, where, path, {"baseline": base, **settings}, x, column, hue)

    def plot_heatmap(
        self, x: str, y: str, column: str = "val_loss", path: File | None = None, *,
        where: Where = None, **settings: Any,
    ) -> Figure:  # fmt: skip
        """Draw a column against two axes; see `vecgym.plot.plot_heatmap`, and `best`."""
        from vecgym.plot import plot_heatmap

        return self._noted(plot_heatmap, where, path, settings, x, y, column)

    def plot_pareto(
        self, column: str = "val_loss", hue: str | None = None, path: File | None = None, *,
        where: Where = None, **settings: Any,
    ) -> Figure:  # fmt: skip
        """Draw a column against the bytes sent, with the Pareto front; see `vecgym.plot.plot_pareto`, and `best`.

        After `price`, or `sweep(network=, compute=)`, also against seconds: `x="sim_seconds"`.
        """
        from vecgym.plot import plot_pareto

        return self._noted(plot_pareto, where, path, settings, column, hue)

    def _noted(self, draw: Any, where: Where, path: File | None, settings: dict[str, Any], *axes: Any) -> Figure:
        """Draw a figure of some rows, with the note on the seeds below it."""
        from vecgym.plot import style

        style.check_shared(path, settings.get("title"))
        figure = draw(labelled(select(self.rows, where)), *axes, **settings)
        return style.done(figure, None, path, self._varied_note(settings.get("over", "seed")))

    def explain(self) -> str:
        """Describe the programs, and why configurations are in different ones."""
        return explain(self._runner.programs)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        counts = Counter(row["status"] for row in self.rows)
        return f"SweepResult({counted(len(self), 'configuration')}: {', '.join(f'{n} {s}' for s, n in counts.items())})"


def _clocks_of(config: Configuration, clocks: Sequence[Clock]) -> Sequence[Clock | None]:
    """Return the clocks that price a configuration: all, or those with its own compute; [None]: it is not priced."""
    if config.strategy.asynchronous or not clocks:
        return [None]
    return [clock for clock in clocks if same(clock.compute, config.compute)] or clocks


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


def _apart(holdout: Any, over: str, rows: list[Row], best: bool) -> list[Any]:
    """Return the checked seeds of `holdout`."""
    if not best:
        raise ValueError("holdout sets seeds apart from those by which the best is chosen: leave out best=False.")
    seeds = list(dict.fromkeys(row[over] for row in labelled(rows)))
    if isinstance(holdout, (str, bytes, Tensor)) or not isinstance(holdout, Iterable):
        raise TypeError(f"holdout is {check.kind_of(holdout)}; give a list of values of {over!r}: {seeds[-2:]}.")
    apart = list(holdout)
    for seed in apart:
        if seed not in seeds:
            raise ValueError(f"holdout has {seed!r}, which is not a value of {over!r}: there are {listed(seeds)}.")
    if not 0 < len(set(apart)) < len(seeds):
        raise ValueError(
            f"holdout has {len(apart)} of {counted(len(seeds), over)}: set some apart, and leave some to choose by."
        )
    return apart


def _few_seeds(runs: int, over: str) -> str:
    """Return a note if there are only 1 or 2 seeds."""
    return f"{counted(runs, over)} {'is' if runs == 1 else 'are'} few: give 5 or more." if 0 < runs < 3 else ""


def _edge_notes(shown: list[Row], rows: list[Row], axis: str, over: str, key: Any) -> list[str]:
    """Return notes on best configurations, one for each value of `axis`, that are at the edge of an axis.

    For `axis` itself this takes three values: of two values, the best is always at an edge.
    """
    others = [name for name in axes_of(rows) if name not in (axis, over)]
    finite = [row for row in shown if check.is_finite(key(row))]
    of_axis = _edges([(min(finite, key=key), "")], rows, [axis], least=3) if finite else []
    return of_axis + _edges([(row, f"{axis}={_cell(row[axis])}") for row in shown], rows, others)


def _edges(points: Iterable[tuple[Row, str]], rows: list[Row], axes: Iterable[str], least: int = 2) -> list[str]:
    """Return notes on the axes of numbers of which best points have the smallest or the largest value.

    Args:
        points: each with its name.
        least: the number of values that an axis must have.

    >>> rows = [{"H": H, "lr": lr, "kind": kind} for H in (1, 5, 9) for lr in (0.1, 0.2) for kind in "ab"]
    >>> _edges([({"H": 5, "lr": 0.2, "kind": "a"}, "")], rows, ["H", "lr", "kind"])
    ['lr=0.2, the best, is the largest that was tried: there may be better values beyond it.']
    """
    tried = {axis: {row[axis] for row in rows} for axis in axes}
    numbers = {axis: v for axis, v in tried.items() if len(v) >= least and all(map(check.is_number, v))}
    found: dict[tuple[str, str], list[str]] = {}
    for (point, name), (axis, values) in itertools.product(points, numbers.items()):
        for which in [which for which, end in (("smallest", min), ("largest", max)) if point[axis] == end(values)]:
            found.setdefault((f"{axis}={_cell(point[axis])}", which), []).append(name)
    return [
        f"{value}, the best{f' for {listed(names)}' if all(names) else ''}, is the {which} that was tried: "
        "there may be better values beyond it."
        for (value, which), names in found.items()
    ]


FLATTERS = (
    "Each best configuration was chosen by the same {over}s and validation set by which it is compared, which flatters "
    "values with more to choose from: set {over}s apart, compare(holdout=...)."
)


class Comparison(list[Row]):
    """The rows of a comparison, shown as a table with notes.

    Attributes:
        notes: texts about the seeds, the edges of axes and the choice of the best.
    """

    def __init__(self, rows: Iterable[Row], notes: Iterable[str] = ()) -> None:
        super().__init__(rows)
        self.notes = list(filter(None, notes))

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
        return _as_text("markdown", lines, self.notes)


@check.strict
def compare(
    runs: Mapping[str, Iterable[History]], column: str = "val_loss", *, baseline: str | None = None, paired: bool = True
) -> Comparison:
    """Compare separate fits seed by seed, as `SweepResult.compare` does for a sweep.

    Args:
        runs: name -> the histories of its runs, one for each seed, the `seed` of `Trainer.fit`.
        column: the column whose last number in each run is compared.
        baseline: one of the names; None: the first.
        paired: False: compare the means as if the seeds had nothing in common (Welch's interval).

    Returns:
        A list that prints as a table, with a row for each name; see `SweepResult.compare`.

    Warns:
        VecgymWarning: if seeds are not shared or runs diverged, as there; if runs of one name differ in more than their
            seed; and if all seeds begin with the same validation loss, so that they do not vary the initial weights.

    Raises:
        TypeError, ValueError: for other types, a name without histories, a repeated seed, and an unknown column.

    >>> def fitted(loss, seed):
    ...     return History({"seed": seed}, [{"step": 0, "val_loss": 2.0 + seed}, {"step": 9, "val_loss": loss}])
    >>> compare({"FedAvg": [fitted(1.0, 0), fitted(1.2, 1), fitted(1.1, 2)],
    ...          "DiLoCo": [fitted(0.8, 0), fitted(1.1, 1), fitted(0.9, 2)]})
    |    run | val_loss | difference | standard error |    95 % interval | seeds |
    |-------:|---------:|-----------:|---------------:|-----------------:|------:|
    | FedAvg |    1.100 |            |                |                  |     3 |
    | DiLoCo |    0.933 |     -0.167 |          0.033 | -0.310 to -0.023 |     3 |
    <BLANKLINE>
    The seeds vary the initial weights, the order of the data and masks.
    """
    by_name = _checked_runs(runs)
    rows = [row for name, histories in by_name.items() for row in _rows_of(name, histories, column)]
    check.flag("paired", paired)
    first = next(iter(by_name)) if baseline is None else check.choice("baseline", baseline, by_name)
    shown = compared(rows, "run", column, first, over="seed", choose=None, paired=paired)
    return Comparison(shown, [_seed_note(by_name.values()), _few_seeds(min(row["seeds"] for row in shown), "seed")])


def _checked_runs(runs: Any) -> dict[str, list[History]]:
    """Check that `runs` are histories by name; warn where the runs of a name differ in more than their seeds."""
    give = 'histories by name, {"FedAvg": [history of seed 0, history of seed 1], "DiLoCo": [...]}'
    by_name = {str(name): each for name, each in check.instance("runs", runs, Mapping, give).items()}
    if len(by_name) < 2:
        raise ValueError(f"runs has {counted(len(by_name), 'name')}; compare needs two: {give}.")
    for name, each in by_name.items():
        if isinstance(each, (History, Tensor)) or not isinstance(each, Iterable):
            raise TypeError(f"runs[{name!r}] is {check.kind_of(each)}; give a list: {give}.")
        by_name[name] = [check.instance(f"runs[{name!r}][{i}]", h, History, give) for i, h in enumerate(each)]
        seeds = [history.settings.get("seed") for history in by_name[name]]
        if not seeds or None in seeds or len(set(seeds)) < len(seeds):
            raise ValueError(f"runs[{name!r}] has the seeds {seeds}; give one history for each of several seeds.")
        settings = [{k: repr(h.settings.get(k)) for k in ("strategy", *SETTINGS) if k != "seed"} for h in by_name[name]]
        if differing := [k for k in settings[0] if len({each[k] for each in settings}) > 1]:
            warn(f"the runs of {name!r} differ in {listed(differing)}, not only in their seeds: ± covers both.")
    return by_name


def _seed_note(runs: Collection[list[History]]) -> str:
    """Return the note on the seeds of separate runs, "" if unknown; warn if the initial weights do not vary."""
    starts = [[h.rows[0].get("val_loss") if h.rows and h.rows[0].get("step") == 0 else None for h in each]
              for each in runs]  # fmt: skip
    if any(len(each) < 2 or None in each for each in starts):
        return ""
    weights = any(len(set(each)) > 1 for each in starts)
    if not weights:
        warn(SAME_WEIGHTS.format(why="all runs begin with the same validation loss"))
    shuffled = any(history.settings.get("shuffle", True) for each in runs for history in each)
    return varied_note({"the initial weights": weights, "the order of the data": shuffled, "masks": True}, "seed")


def _rows_of(name: str, histories: Iterable[History], column: str) -> Iterator[Row]:
    """Yield a row for each run; one that diverged has no number."""
    for history in histories:
        check.column("column", column, history.columns)
        trained = (row for row in reversed(history.rows) if row.get("examples_per_s", 1))  # in others none has a loss
        loss = next((row["train_loss"] for row in trained if row.get("train_loss") is not None), 0.0)
        diverged = not check.is_finite(loss)
        yield {"run": name, "seed": history.settings["seed"], column: math.nan if diverged else history.last(column)}


LATEX = str.maketrans({
    **{c: f"\\{c}" for c in "&%$#_{}"}, "±": r"$\pm$", "<": "$<$", ">": "$>$", "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
})  # fmt: skip
FORMS: dict[str, tuple[str, dict[int, str]]] = {"markdown": ("**{}**", {}), "latex": (r"\textbf{{{}}}", LATEX)}


def _as_text(form: str, lines: list[list[str]], notes: Iterable[str] = ()) -> str:
    """Lay out a table, of which the first line is the header, with notes."""
    notes = list(filter(None, notes))
    if form == "latex":
        rows = [" & ".join(line) + r" \\" for line in lines]
        frame = [rf"\begin{{tabular}}{{{'r' * len(lines[0])}}}", r"\toprule", rows[0], r"\midrule", *rows[1:]]
        return "\n".join([*(f"% {note}" for note in notes), *frame, r"\bottomrule", r"\end{tabular}"])
    widths = [max(map(len, column)) for column in zip(*lines)]
    texts = ["| " + " | ".join(text.rjust(width) for text, width in zip(line, widths)) + " |" for line in lines]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([texts[0], rule, *texts[1:], *[""] * bool(notes), *notes])


def _is_informative(name: str, rows: list[Row]) -> bool:
    """Whether to show a column: a recorded measure, or the status or number of steps if rows differ in it."""
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
