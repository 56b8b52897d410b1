"""`vecgym sweep`: a grid of configurations, as a function in a file describes it."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from vecgym.cli.configuration import add_options, add_output, output_of, read_configuration

if TYPE_CHECKING:
    from vecgym.sweeps import SweepResult

NEEDED = ("model", "train_dataset", "grid")


def options(parser: argparse.ArgumentParser) -> None:
    """Run a sweep as a configuration says: a Python function that returns a dict of the arguments of vecgym.sweep.
    Writes rows.csv, table.md, explain.txt and figures."""
    parser.epilog = "example: vecgym sweep experiment.py:grid --set max_steps=200 --output runs/grid"
    add_options(parser)
    add_output(parser)
    parser.add_argument("--resume", action="store_true", help="keep results in DIR/sweep.pt, and go on from there")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    from vecgym.sweeps import sweep

    found = read_configuration(args, NEEDED, tuple(inspect.signature(sweep).parameters))
    output = output_of(args, "rows.csv", goes_on=args.resume or bool(found.get("dry_run")))
    output.mkdir(parents=True, exist_ok=True)
    if args.resume:
        found["resume"] = output / "sweep.pt"
    if args.no_progress:
        found["progress"] = False
    result = sweep(**found)
    (output / "explain.txt").write_text(result.explain() + "\n")
    print(result.explain())
    if found.get("dry_run"):
        return 0
    (output / "table.md").write_text(result.table() + "\n")
    result.to_csv(output / "rows.csv")
    figures = draw(result, output)
    print(f"\n{result.table()}\n\nRows: {output / 'rows.csv'}")
    print("\n".join(f"Figure: {path}" for path in figures))
    return 0


def draw(result: SweepResult, output: Path) -> list[Path]:
    """A figure for each axis with several values, a map of the first two of them, and the loss against the bytes."""
    rows = result.rows
    y = next((name for name in ("val_loss", "train_loss") if any(row.get(name) is not None for row in rows)), None)
    if y is None:
        return []
    several = [axis for axis in result.axes if len({str(row[axis]) for row in rows}) > 1 and axis != "seed"]
    drawn = []
    for axis in several:
        drawn.append(output / f"{y}_by_{axis}.png")
        result.plot(axis, y, path=drawn[-1], best=len(several) > 1)
    if len(several) > 1:
        drawn.append(output / f"{y}_by_{several[0]}_and_{several[1]}.png")
        result.plot_heatmap(several[0], several[1], y, path=drawn[-1], best=True)
    drawn.append(output / f"{y}_by_bytes.png")
    result.plot_pareto(y, several[0] if several else None, path=drawn[-1])
    return drawn
