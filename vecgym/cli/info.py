"""`vecgym info`: the environment of a run, for bug reports."""

from __future__ import annotations

import argparse
import contextlib

from vecgym.cli.compare import strategy_names
from vecgym.cli.configuration import ENGINES

OPTIONAL = ("wandb", "tensorboard", "torchvision", "scikit-learn")


def options(parser: argparse.ArgumentParser) -> None:
    """Show versions, devices, threads and engines, for a run or a bug report."""


def run(args: argparse.Namespace) -> int:
    import torch

    from vecgym.core.devices import environment

    facts = {
        **environment(),
        "threads": f"{torch.get_num_threads()} of torch on the CPU",
        "engines": ", ".join(ENGINES),
        "extras": ", ".join(extras()) or "none",
        "strategies": ", ".join(strategy_names()),
    }
    print("\n".join(f"{name:<12}{value}" for name, value in facts.items()))
    return 0


def extras() -> list[str]:
    """Return the optional packages that are installed, with their versions."""
    from importlib import metadata

    versions = []
    for package in OPTIONAL:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return versions
