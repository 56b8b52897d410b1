"""`vecgym verify`: a strategy, stacked and on real processes."""

from __future__ import annotations

import argparse

from vecgym.cli.values import count


def options(parser: argparse.ArgumentParser) -> None:
    """Train a small GPT with a strategy twice, stacked in one process and on real processes of torch.distributed, and
    report the largest differences of parameters, losses, states and bytes. The exit code is 1 if any is too large."""
    parser.epilog = "example: vecgym verify --strategy diloco --num-nodes 4 --num-processes 2"
    parser.add_argument("--strategy", default="all", metavar="NAME", help="one that --list shows, or all (all)")
    parser.add_argument("--list", action="store_true", help="show the names of the strategies, and do nothing else")
    parser.add_argument("--num-nodes", type=count, default=4, metavar="N", help="K (4)")
    parser.add_argument("--num-processes", type=count, default=2, metavar="N", help="W, which divides K (2)")
    parser.add_argument("--steps", type=count, default=20, metavar="N", help="optimizer steps of every node (20)")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="precision (float64)")


def run(args: argparse.Namespace) -> int:
    import torch

    from vecgym.data import TokenWindows
    from vecgym.models import GPT
    from vecgym.verify import STRATEGIES, verify

    if args.list:
        print("\n".join(STRATEGIES))
        return 0
    if args.strategy != "all" and args.strategy not in STRATEGIES:
        raise ValueError(f"--strategy {args.strategy} is not known; allowed: all, {', '.join(STRATEGIES)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(vocab_size=16, context=8, num_layers=1, num_heads=2, width=16)
        data = TokenWindows(torch.randint(16, (2000,)), context=8)
    passed = True
    for name in STRATEGIES if args.strategy == "all" else [args.strategy]:
        report = verify(
            STRATEGIES[name](), model, data, args.num_nodes, args.num_processes, args.steps, getattr(torch, args.dtype)
        )
        passed &= report.passed
        print(f"{name}: {'passed' if report.passed else 'FAILED'}\n{report}\n", flush=True)
    return 0 if passed else 1
