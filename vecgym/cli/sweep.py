"""`vecgym sweep`: a sweep configured by a function in a file."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import vecgym
from vecgym.cli.configuration import add_run_options, output_of, read_configuration

NEEDED = ("model", "train_dataset")


def options(parser: argparse.ArgumentParser) -> None:
    """Run a sweep as configured by a Python function that returns a dict of the arguments of vecgym.sweep. Write
    rows.csv, table.md, explain.txt and figures."""
    parser.epilog = "example: vecgym sweep experiment.py:grid --set max_steps=200 --output runs/grid"
    add_run_options(parser)
    parser.add_argument("--resume", action="store_true", help="save results in DIR/sweep.pt and resume from them")


def run(args: argparse.Namespace) -> int:
    config = read_configuration(args, NEEDED, tuple(inspect.signature(vecgym.sweep).parameters))
    if ("grid" in config) == ("points" in config):
        raise ValueError(f"{args.config}: give either grid=, or points=, as vecgym.sweep takes them.")
    output = output_of(args, "rows.csv", resumes=args.resume or bool(config.get("dry_run")))
    output.mkdir(parents=True, exist_ok=True)
    if args.resume:
        config["resume"] = output / "sweep.pt"
    result = vecgym.sweep(**config)
    (output / "explain.txt").write_text(result.explain() + "\n")
    print(result.explain())
    if config.get("dry_run"):
        return 0
    (output / "table.md").write_text(result.table() + "\n")
    result.to_csv(output / "rows.csv")
    figures = draw(result, output)
    print(f"\n{result.table()}\n\n{result}\nRows: {output / 'rows.csv'}")
    print("\n".join(f"Figure: {path}" for path in figures))
    return 0


def draw(result: vecgym.SweepResult, output: Path) -> list[Path]:
    """Draw the loss against each axis with several values, against the first two, and against the bytes."""
    rows = result.rows
    y = next((name for name in ("val_loss", "train_loss") if any(row.get(name) is not None for row in rows)), None)
    if y is None:
        return []
    several = [axis for axis in result.axes if len({str(row[axis]) for row in rows}) > 1 and axis != "seed"]
    paths = {axis: output / f"{y}_by_{axis}.png" for axis in several}
    for axis, path in paths.items():
        result.plot(axis, y, path=path, best=len(several) > 1)
    if len(several) > 1:
        x, other = several[:2]
        paths["map"] = output / f"{y}_by_{x}_and_{other}.png"
        result.plot_heatmap(x, other, y, path=paths["map"], best=True)
    paths["bytes"] = output / f"{y}_by_bytes.png"
    result.plot_pareto(y, several[0] if several else None, path=paths["bytes"])
    return list(paths.values())
