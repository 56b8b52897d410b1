"""`vecgym info`: the environment of a run, for bug reports, and what a saved run was given and chose."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vecgym.cli.compare import strategy_names
from vecgym.cli.configuration import ENGINES

OPTIONAL = ("wandb", "tensorboard", "torchvision", "scikit-learn", "transformers", "optuna")


def options(parser: argparse.ArgumentParser) -> None:
    """Show versions, devices, threads and engines, for a bug report; or the settings of saved runs, with the engine
    that computed their gradients, and why it was chosen."""
    about = "the folder or file of a run, whose settings are shown in place of what is here"
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=about)


def run(args: argparse.Namespace) -> int:
    if not args.runs:
        print_table(here().items())
        return 0
    from vecgym.cli.plot import read_runs
    from vecgym.cli.report import flat

    for name, (history, _) in read_runs(args.runs).items():
        print(name)  # its strategy says the hyperparameters in one line
        print_table(flat({key: value for key, value in history.settings.items() if key != "hyperparameters"}))
    return 0


def here() -> dict[str, Any]:
    """Return what a run would have on this machine."""
    import torch

    from vecgym.core.devices import environment

    return {
        **environment(),
        "threads": f"{torch.get_num_threads()} of torch on the CPU",
        "engines": f"{', '.join(ENGINES)}; auto may record small models",
        "extras": ", ".join(extras()) or "none",
        "strategies": ", ".join(strategy_names()),
    }


def print_table(facts: Iterable[tuple[str, Any]]) -> None:
    from vecgym.records.rows import aligned

    print(*aligned([[name, str(value)] for name, value in facts], str.ljust), sep="\n")


def extras() -> list[str]:
    """Return the optional packages that are installed, with their versions."""
    from importlib import metadata

    versions = []
    for package in OPTIONAL:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return versions
