"""The result of a sweep: its rows, what they take on networks, and the history and model of each."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from vecgym.clock import dry_run, price
from vecgym.collectives.ledger import Ledger
from vecgym.core import check, nodes
from vecgym.core.files import write_atomically
from vecgym.records.history import History
from vecgym.records.rows import Row, averaged, counted, data_frame, label, labelled, select
from vecgym.sweeps.chunk import FINISHED, NOTHING, PARTIAL, PENDING, Curve
from vecgym.sweeps.configurations import Configuration, Point
from vecgym.sweeps.options import check_clock, clocks
from vecgym.sweeps.programs import explain
from vecgym.sweeps.runner import Runner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

File = str | os.PathLike[str]
Where = Mapping[str, Any] | None  # axis -> its value, or a condition


class Prices:
    """Seconds of configurations, for each network and each compute; remembered.

    Args:
        network, compute: one, or {name: one}: an axis of the rows.

    >>> from vecgym.clock import Compute, Network
    >>> prices = Prices({"fast": Network(1e9), "slow": Network(1e6)}, Compute(0.4))
    >>> prices.points
    [{'network': 'fast'}, {'network': 'slow'}]
    """

    def __init__(self, network: Any, compute: Any) -> None:
        check_clock(network, compute)
        self._clocks = clocks(network, compute)
        self.points = [clock.point for clock in self._clocks]
        self.axes = list(self.points[0])
        self._ledgers: dict[int, Ledger] = {}
        self._found: dict[tuple[int, int, int], dict[str, Any]] = {}

    def places(self, config: Configuration) -> list[int]:
        """The points that a configuration is priced at: all; of its own compute, if that is among them."""
        own = [place for place, clock in enumerate(self._clocks) if clock.compute is config.compute]
        return own or list(range(len(self._clocks)))

    def row(self, config: Configuration, place: int, curve: Curve | None) -> dict[str, Any]:
        """The columns of a configuration at one of the points, and what it has recorded so far."""
        ledger = self._ledger(config, curve)
        if ledger is None:
            return {**self.points[place], "sim_seconds": None, "sim_utilization": None}
        key = config.index, place, ledger.num_steps
        if key not in self._found:
            network, compute = self._clocks[place][1:]
            assert network is not None
            assert compute is not None
            timeline = price(ledger, network, compute)
            columns = {"sim_seconds": timeline.seconds, "sim_utilization": timeline.utilization}
            # Where the network takes another route than a ring, a node's link carries other bytes than in training.
            sent = {"bytes_total": ledger.routed(network.routes).total_bytes} if network.routes else {}
            self._found[key] = {**self.points[place], **sent, **columns}
        return self._found[key]

    def _ledger(self, config: Configuration, curve: Curve | None) -> Ledger | None:
        """What a configuration sends in all; where nodes may be absent, what it has sent: nobody knows it before."""
        if config.settings["availability"] is not None:
            if curve is None or curve.ledger is None:
                return None
            ledger = Ledger()
            ledger.load(curve.ledger)
            return ledger
        if config.index not in self._ledgers:
            self._ledgers[config.index] = dry_run(
                config.model, config.strategy, config.num_nodes, config.num_steps, seed=config.settings["seed"],
                unused=config.unused,
            )  # fmt: skip
        return self._ledgers[config.index]


class SweepResult:
    """The result of a sweep, complete or as far as it came.

    Attributes:
        rows: one dict per configuration, in the order of the grid: its axes, `status` ("finished", "diverged",
            "interrupted", "pending"), `steps`, and the last of `train_loss`, `val_loss`, `val_loss_local`,
            `consensus_distance`, and `bytes_total`, sent per node; of asynchronous runs, whose steps are updates, also
            `sim_seconds`, `version`, `staleness`, `staleness_max`, `num_arrived` and `local_steps_total`.
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
    >>> result.table().splitlines()[0]
    '| H |   lr |   status | steps | train_loss | val_loss | val_loss_local | consensus_distance | bytes_total |'
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

    def __init__(self, runner: Runner, prices: Prices | None = None) -> None:
        self._runner = runner
        self._prices = prices
        self._asynchronous = any(config.strategy.asynchronous for config in runner.configs)
        # The configuration of each row, and the network and compute that it is priced for.
        self._places = [
            (config, place)
            for config in runner.configs
            for place in ([None] if prices is None or config.strategy.asynchronous else prices.places(config))
        ]
        clocks = [] if prices is None else prices.axes
        self.axes = list(dict.fromkeys([*runner.axes, *clocks, *(name for c in runner.configs for name in c.point)]))

    @property
    def rows(self) -> list[Point]:
        """One dict per configuration, in the order of the grid; see the class for what is in it."""
        rows = [self._row(config, place) for config, place in self._places]
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
        if self._asynchronous:
            raise ValueError(
                "asynchronous runs go in the order of their own network's and nodes' times: sweep again, with network= "
                "and compute=, of which either may be a dict, {name: one}."
            )
        return SweepResult(self._runner, Prices(network, compute))

    def _config(self, index: int) -> Configuration:
        return self._places[check.index("index", index, len(self))][0]

    def _row(self, config: Configuration, place: int | None) -> Point:
        curve = self._runner.curves.get(config.index)
        measured = {"status": PENDING, **NOTHING} if curve is None else {"status": curve.status, **curve.last}
        if config.plan is not None and measured["steps"] > 0:
            measured |= config.plan.columns(measured["steps"])
        if self._prices is None or place is None:
            return {**config.point, **measured}
        priced = self._prices.row(config, place, curve)
        return {**config.point, **self._prices.points[place], **measured, **priced}

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

    def best(self, column: str = "val_loss", *, over: str | None = "seed", where: Where = None) -> Point:
        """Return the configuration with the smallest value of a column, among those that finished.

        Args:
            over: the axis to average over: the value is a mean over its runs, all of which finished, and "runs" how
                many they are. None: each run by itself, so that the luckiest seed wins.
            where: of these rows only: axis -> its value, or a function of a value that is true.

        Raises:
            ValueError: for a column that is not there or has no number.
        """
        rows = select(self.rows, where)
        check.column("column", column, rows[0])
        finished = [row for row in averaged(rows, over) if row["status"] == FINISHED]
        finite = [row for row in finished if check.is_finite(row.get(column))]
        if not finite:
            is_missing = column.startswith("val") and self._runner.options.val_dataset is None
            hint = " Give a val_dataset." if is_missing else ""
            raise ValueError(f"no configuration that finished has a number as {column!r}.{hint}")
        return min(finite, key=lambda row: row[column])

    def table(self) -> str:
        """Return the rows as text, in Markdown."""
        rows = labelled(self.rows)
        columns = [name for name in rows[0] if name in self.axes or any(row[name] is not None for row in rows)]
        cells = [columns, *[[_cell(row[name]) for name in columns] for row in rows]]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        lines = ["| " + " | ".join(text.rjust(width) for text, width in zip(line, widths)) + " |" for line in cells]
        rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
        return "\n".join([lines[0], rule, *lines[1:]])

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
        where: Where = None, **settings: Any,
    ) -> Figure:  # fmt: skip
        """Draw a column against an axis, a line for each value of `hue`; see `vecgym.plot.plot_axis`, and `best`."""
        from vecgym.plot import plot_axis  # matplotlib takes a while to import

        return plot_axis(self._shown(where), x, y, hue, path, **settings)

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
        counts: dict[str, int] = {}
        for row in self.rows:
            counts[row["status"]] = counts.get(row["status"], 0) + 1
        return f"SweepResult({counted(len(self), 'configuration')}: {', '.join(f'{n} {s}' for s, n in counts.items())})"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
