"""`vecgym plot`: draw logged runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import vecgym
from vecgym.cli.values import add_output
from vecgym.records.columns import X_AXES


def options(parser: argparse.ArgumentParser) -> None:
    """Draw one or several runs logged by a CSVLogger: losses with their spread over the nodes, and the consensus
    distance. A directory without a run stands for the runs in its subdirectories, such as those of vecgym compare."""
    parser.epilog = "example: vecgym plot vecgym-runs/compare --x bytes --output comparison.png"
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="the directory of a CSVLogger")
    parser.add_argument("--x", choices=X_AXES, default="step", help="the horizontal axis (step)")
    add_output(parser, "vecgym-runs/plot.png", "FILE")
    parser.add_argument("--title", help="a title above the figure")
    parser.add_argument("--panels", nargs="+", metavar="COLUMN", help="what to draw side by side: loss, or columns")
    parser.add_argument("--log-x", action=argparse.BooleanOptionalAction, help="make the horizontal axis logarithmic")
    parser.add_argument("--xlim", nargs=2, type=float, metavar=("FIRST", "LAST"), help="ends of the horizontal axis")
    parser.add_argument("--legend", choices=("inside", "outside"), help="where the legend is (inside if it is short)")


def run(args: argparse.Namespace) -> int:
    from vecgym.records.loggers import read_csv

    folders = [run for directory in args.directories for run in runs_in(directory)]
    histories = {name: read_csv(folder) for name, folder in by_name(folders).items()}
    looks = {name: getattr(args, name) for name in ("x", "title", "panels", "log_x", "xlim", "legend")}
    vecgym.plot.plot_runs(histories, args.output, **looks)
    print(f"Figure: {args.output}")
    return 0


def runs_in(directory: Path) -> list[Path]:
    """Return the directory if it holds a run, otherwise its subdirectories that do."""
    if (directory / "history.csv").is_file() or not directory.is_dir():
        return [directory]
    return sorted(path.parent for path in directory.glob("*/history.csv")) or [directory]


def by_name(folders: list[Path]) -> dict[str, Path]:
    """Name runs by the shortest ends of their paths that distinguish them.

    >>> list(by_name([Path("a/diloco"), Path("b/diloco")])), list(by_name([Path("a/x"), Path("a/y")]))
    (['a/diloco', 'b/diloco'], ['x', 'y'])
    """
    folders = list(dict.fromkeys(folder.resolve() if folder.name in ("", "..") else folder for folder in folders))
    length, runs = 0, dict[str, Path]()
    while len(runs) < len(folders):
        length += 1
        runs = {"/".join(folder.parts[-length:]): folder for folder in folders}
    return runs
