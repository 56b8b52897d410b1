"""`vecgym verify`: compare a strategy stacked in one process with real processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import vecgym
from vecgym.cli.configuration import add_options, count, read_configuration
from vecgym.cli.run import allowed


def options(parser: argparse.ArgumentParser) -> None:
    """Train with a strategy stacked, on processes of torch.distributed, and in a stack of a sweep. Report the
    largest differences of parameters, losses, states and bytes, and the first tensor that differs. The strategy is one
    of --list, on a small GPT, or your own: a function in a file returns it, or a dict as for vecgym run, of which
    model, train_dataset, strategy, num_nodes, batch_size and seed are used. The exit code is 1 if anything differs."""
    parser.epilog = "examples: vecgym verify --strategy diloco --num-processes 4; vecgym verify experiment.py:diloco"
    add_options(parser, optional=True)
    parser.add_argument("--strategy", metavar="NAME", help="one of --list, or all (all)")
    parser.add_argument("--list", action="store_true", help="list the names of the strategies and exit")
    parser.add_argument("--num-nodes", type=count, metavar="N", help="K (4, or as the function returns)")
    parser.add_argument("--num-processes", type=count, default=2, metavar="N", help="W, which must divide K (2)")
    parser.add_argument("--steps", type=count, default=20, metavar="N", help="optimizer steps of each node (20)")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="precision (float64)")


def run(args: argparse.Namespace) -> int:
    import torch

    from vecgym.runs.verification import STRATEGIES

    if args.list:
        print("\n".join(STRATEGIES))
        return 0
    strategies, task = _from_file(args) if args.config else (_by_name(args), {})
    task |= {} if "model" in task else _small_gpt()
    task |= {"num_nodes": args.num_nodes or task.get("num_nodes", 4), "num_processes": args.num_processes}
    passed = True
    for name, make in strategies.items():
        report = vecgym.verify(make(), steps=args.steps, dtype=getattr(torch, args.dtype), **task)
        passed &= report.passed
        print(f"{name}: {'passed' if report.passed else 'FAILED'}\n{report}\n", flush=True)
    return 0 if passed else 1


def _by_name(args: argparse.Namespace) -> dict[str, Callable[[], vecgym.strategy.Strategy]]:
    from vecgym.core import check
    from vecgym.runs.verification import STRATEGIES

    if args.set:
        args.parser.error("--set needs a function in a file: give CONFIG.py[:function]")
    name = check.choice("--strategy", args.strategy or "all", ["all", *STRATEGIES])
    return STRATEGIES if name == "all" else {name: STRATEGIES[name]}


def _from_file(args: argparse.Namespace) -> tuple[dict[str, Callable[[], vecgym.strategy.Strategy]], dict[str, Any]]:
    """Return the strategy and the other arguments for `verify` from the function of a file."""
    if args.strategy:
        args.parser.error(f"--strategy {args.strategy} and {args.config} both name a strategy: give one of them")
    config = read_configuration(args, ("strategy",), allowed(), alone=("strategy", vecgym.strategy.Strategy))
    if ("model" in config) != ("train_dataset" in config):
        raise ValueError(f"{args.config}: give model and train_dataset, or neither to use a small GPT.")
    names = ("model", "loss_fn", "train_dataset", "batch_size", "seed", "num_nodes")
    task = {name.removeprefix("train_"): config[name] for name in names if name in config}
    return {args.config: lambda: config["strategy"]}, task


def _small_gpt() -> dict[str, Any]:
    import torch

    from vecgym.core import rng

    with rng.private(0):
        model = vecgym.models.GPT(vocab_size=16, context=8, num_layers=1, num_heads=2, width=16)
        return {"model": model, "dataset": vecgym.data.TokenWindows(torch.randint(16, (2000,)), context=8)}
