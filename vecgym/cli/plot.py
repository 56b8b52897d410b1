"""`vecgym plot`: draw saved runs; and where saved runs are, for `vecgym report` too."""

from __future__ import annotations

import argparse
from pathlib import Path

import vecgym
from vecgym.cli.configuration import add_output
from vecgym.records.columns import X_AXES


def options(parser: argparse.ArgumentParser) -> None:
    """Draw one or several saved runs: losses with their spread over the nodes, and the consensus distance. A folder
    without a run stands for the runs in it, such as those of vecgym compare."""
    parser.epilog = "example: vecgym plot vecgym-runs/compare --x bytes --output comparison.png"
    add_options(parser, "vecgym-runs/plot.png")
    parser.add_argument("--panels", nargs="+", metavar="COLUMN", help="what to draw side by side: loss, or columns")
    parser.add_argument("--log-x", action=argparse.BooleanOptionalAction, help="make the horizontal axis logarithmic")
    parser.add_argument("--xlim", nargs=2, type=float, metavar=("FIRST", "LAST"), help="ends of the horizontal axis")
    parser.add_argument("--legend", choices=("inside", "outside"), help="where the legend is (inside if it is short)")


def add_options(parser: argparse.ArgumentParser, output: str) -> None:
    """Add RUN and what a figure of runs takes."""
    about = "the folder of a CSVLogger, vecgym run or fit(save_dir=), a checkpoint, or a file of trainer.save"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=about)
    parser.add_argument("--x", choices=X_AXES, default="step", help="the horizontal axis (step)")
    add_output(parser, output, "FILE")
    parser.add_argument("--title", help="a title above the figure")


def run(args: argparse.Namespace) -> int:
    histories = {name: history for name, (history, _) in read_runs(args.runs).items()}
    looks = {name: getattr(args, name) for name in ("x", "title", "panels", "log_x", "xlim", "legend")}
    vecgym.plot.plot_runs(histories, args.output, **looks)
    print(f"Figure: {args.output}")
    return 0


def read_runs(paths: list[Path]) -> dict[str, tuple[vecgym.History, vecgym.Saved | None]]:
    """Read the runs in some folders and files: by name the history, and what else a file of vecgym holds."""
    return {name: _read(path) for name, path in by_name([run for path in paths for run in runs_in(path)]).items()}


def runs_in(path: Path) -> list[Path]:
    """Return the path if it is a run, otherwise the runs in this folder."""
    if is_run(path) or not path.is_dir():
        return [path.parent if path.name == "history.csv" else path]
    return sorted(filter(is_run, path.iterdir())) or [path]


def is_run(path: Path) -> bool:
    """Whether a path is a folder with a history or checkpoints, or may be a file of vecgym."""
    if path.is_dir():
        return (path / "history.csv").is_file() or any(path.glob("step-*.pt"))
    return path.suffix == ".pt"


def _read(path: Path) -> tuple[vecgym.History, vecgym.Saved | None]:
    from vecgym.logger import read_csv
    from vecgym.records.runfile import checkpoints_in

    saved = vecgym.load(path) if path.is_file() or checkpoints_in(path) else None
    if saved is None and not (path / "history.csv").is_file():
        raise ValueError(
            f"{path} holds no run: there is neither a history.csv, which CSVLogger({str(path)!r}) writes, nor a "
            "checkpoint, which fit(save_dir=) writes, and it is no file of trainer.save."
        )
    logged = [read_csv(path)] if (path / "history.csv").is_file() else []
    histories = [saved.history, *logged] if saved is not None else logged
    return max(histories, key=lambda history: history.last("step") or 0), saved  # a run may have gone on after saving


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
