"""`vecgym run`: a run configured by a function in a file."""

from __future__ import annotations

import argparse
import inspect
import os

import vecgym
from vecgym.cli.configuration import add_run_options, output_of, read_configuration

OF_TRAINER = ("model", "train_dataset", "val_dataset", "loss_fn")  # all other keys are arguments of Trainer.fit
NEEDED = ("model", "train_dataset", "strategy", "num_nodes")


def allowed() -> tuple[str, ...]:
    """Return the keys that a configuration may have."""
    return (*OF_TRAINER, *tuple(inspect.signature(vecgym.Trainer.fit).parameters)[1:])


def options(parser: argparse.ArgumentParser) -> None:
    """Train as configured by a Python function that returns a dict of model, train_dataset, val_dataset, loss_fn and
    the arguments of Trainer.fit. Write the history as CSV, a figure of it, and config.json."""
    parser.epilog = "example: vecgym run experiment.py:diloco --set H=50 max_steps=1000 --output runs/diloco-50"
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    from vecgym.logger import as_loggers
    from vecgym.records.rows import aligned, counted

    config = read_configuration(args, NEEDED, allowed())
    trainer = vecgym.Trainer(**{name: config.pop(name, None) for name in OF_TRAINER})
    loggers = as_loggers(config.pop("logger", None))
    first = os.environ.get("RANK", "0") == "0"  # the first of torchrun's processes, with backend="distributed"
    output = output_of(args, "history.csv", resumes=bool(config.get("resume")) or not first)
    if first:
        print(f"{config['strategy']}\n{counted(config['num_nodes'], 'node')}", flush=True)
    try:
        trainer.fit(**config, logger=[*loggers, vecgym.CSVLogger(output)])
    finally:
        history = trainer.history
        if first and any(row.get("train_loss") is not None for row in history):
            vecgym.plot.plot_runs({output.name: history}, output / "run.png", title=type(config["strategy"]).__name__)
            names = ("step", "train_loss", "val_loss", "bytes_total", "seconds")
            rows = [[name, f"{history.last(name):.6g}"] for name in names if name in history.columns]
            print(*aligned(rows), f"History: {output / 'history.csv'}", f"Figure: {output / 'run.png'}", sep="\n")
    return 0
