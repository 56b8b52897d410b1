"""`vecgym run`: one run, as a function in a file describes it."""

from __future__ import annotations

import argparse
import inspect
import os

from vecgym.cli.configuration import add_options, add_output, output_of, read_configuration
from vecgym.cli.values import table

OWN = ("model", "train_dataset", "val_dataset")  # of Trainer; all others are arguments of Trainer.fit
NEEDED = ("model", "train_dataset", "strategy", "num_nodes")


def options(parser: argparse.ArgumentParser) -> None:
    """Train as a configuration says: a Python function that returns a dict of model, train_dataset, val_dataset and the
    arguments of Trainer.fit. Writes the history as CSV, a figure of it, and config.json."""
    parser.epilog = "example: vecgym run experiment.py:diloco --set H=50 max_steps=1000 --output runs/diloco-50"
    add_options(parser)
    add_output(parser)
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    from vecgym.plot import plot_runs
    from vecgym.records.loggers import CSVLogger, as_loggers
    from vecgym.runs.trainer import Trainer

    parameters = tuple(inspect.signature(Trainer.fit).parameters)[1:]
    found = read_configuration(args, NEEDED, (*OWN, *parameters))
    trainer = Trainer(*[found.pop(name, None) for name in OWN])
    loggers = as_loggers(found.pop("logger", None))
    if args.no_progress:
        found["progress"] = False
    first = os.environ.get("RANK", "0") == "0"  # of torchrun's processes, with backend="distributed"
    output = output_of(args, "history.csv", goes_on=bool(found.get("resume")) or not first)
    if first:
        from vecgym.records.rows import counted

        print(f"{found['strategy']}\n{counted(found['num_nodes'], 'node')}", flush=True)
    try:
        trainer.fit(**found, logger=[*loggers, CSVLogger(output)])
    finally:
        history = trainer.history
        if first and any(row.get("train_loss") is not None for row in history):
            plot_runs({output.name: history}, output / "run.png", title=str(type(found["strategy"]).__name__))
            names = ("step", "train_loss", "val_loss", "bytes_total", "seconds")
            rows = [[name, f"{history.last(name):.6g}"] for name in names if name in history.columns]
            print(f"{table(rows)}\nHistory: {output / 'history.csv'}\nFigure: {output / 'run.png'}")
    return 0
