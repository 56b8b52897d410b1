"""`vecgym sweep`: a grid of configurations, described by a function in a file."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import vecgym
from vecgym.cli.configuration import add_run_options, output_of, read_configuration

NEEDED = ("model", "train_dataset", "grid")


def options(parser: argparse.ArgumentParser) -> None:
    """Run a sweep from a configuration: a Python function that returns a dict of the arguments of vecgym.sweep.
    Write rows.csv, table.md, explain.txt and figures."""
    parser.epilog = "example: vecgym sweep experiment.py:grid --set max_steps=200 --output runs/grid"
    add_run_options(parser)
    parser.add_argument("--resume", action="store_true", help="keep results in DIR/sweep.pt, and resume from them")


def run(args: argparse.Namespace) -> int:
    found = read_configuration(args, NEEDED, tuple(inspect.signature(vecgym.sweep).parameters))
    output = output_of(args, "rows.csv", goes_on=args.resume or bool(found.get("dry_run")))
    output.mkdir(parents=True, exist_ok=True)
    if args.resume:
        found["resume"] = output / "sweep.pt"
    result = vecgym.sweep(**found)
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


def draw(result: vecgym.SweepResult, output: Path) -> list[Path]:
    """Draw each axis with several values, a map of the first two of them, and the loss against the bytes."""
    rows = result.rows
    y = next((name for name in ("val_loss", "train_loss") if any(row.get(name) is not None for row in rows)), None)
    if y is None:
        return []
    several = [axis for axis in result.axes if len({str(row[axis]) for row in rows}) > 1 and axis != "seed"]
    paths = {what: output / f"{y}_by_{what}.png" for what in several}
    for axis, path in paths.items():
        result.plot(axis, y, path=path, best=len(several) > 1)
    if len(several) > 1:
        x, other = several[:2]
        paths["map"] = output / f"{y}_by_{x}_and_{other}.png"
        result.plot_heatmap(x, other, y, path=paths["map"], best=True)
    paths["bytes"] = output / f"{y}_by_bytes.png"
    result.plot_pareto(y, several[0] if several else None, path=paths["bytes"])
    return list(paths.values())
