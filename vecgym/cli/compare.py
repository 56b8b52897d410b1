"""`vecgym compare`: train the same small GPT with several strategies."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import Any

import vecgym
from vecgym.cli.configuration import ENGINES, add_output, count, positive
from vecgym.core.errors import DivergenceError

STRATEGIES = ("allreduce", "fedavg", "diloco")  # by default

# Option -> its kind, its default, that of --quick, and its help.
OPTIONS: dict[str, tuple[Callable[[str], Any], float, float, str]] = {
    "steps": (count, 700, 200, "optimizer steps of each node"),
    "batch_size": (count, 4, 4, "examples per node and step"),
    "context": (count, 64, 32, "characters that the model sees at once"),
    "width": (count, 64, 32, "size of the embedding of a character"),
    "layers": (count, 2, 2, "transformer blocks"),
    "heads": (count, 2, 2, "attention heads; must divide the width"),
    "H": (count, 20, 10, "steps between exchanges of fedavg and diloco"),
    "lr": (positive, 6e-3, 6e-3, "peak learning rate of AdamW, with warm-up and cosine decay"),
    "outer_lr": (positive, 0.7, 0.7, "learning rate of diloco's outer optimizer, SGD with Nesterov momentum"),
    "outer_momentum": (positive, 0.6, 0.6, "its momentum; the paper's 0.9 suits longer runs"),
}
NUM_EVALUATIONS = 10  # of a run, besides the one at the start
VAL_SIZE = 128  # windows of text per evaluation


def options(parser: argparse.ArgumentParser) -> None:
    """Train a small character-level GPT on 8 nodes with each strategy. Print the validation loss of each strategy and
    the bytes that each node sends, and draw both as curves. By default this takes one to two minutes."""
    parser.epilog = "example: vecgym compare --text book.txt --strategies allreduce diloco --H 50"
    parser.add_argument(
        "--text", metavar="FILE", help="UTF-8 text to train on (the source of Python's standard library)"
    )
    parser.add_argument(
        "--strategies", nargs="+", type=strategy_name, default=STRATEGIES, metavar="NAME",
        help=f"the strategies to compare ({' '.join(STRATEGIES)}); vecgym info lists all of them",
    )  # fmt: skip
    parser.add_argument("--num-nodes", type=count, default=8, metavar="N", help="K (8)")
    for name, (kind, default, quick, about) in OPTIONS.items():
        about += f" ({default:g})" if default == quick else f" ({default:g}; with --quick {quick:g})"
        metavar = "X" if kind is positive else "N"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=about)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of initialisation and data order (0)")
    parser.add_argument(
        "--seeds", type=count, default=1, metavar="N",
        help="train each strategy with so many seeds, from --seed on, which takes as many times as long (1)",
    )  # fmt: skip
    parser.add_argument("--device", help="cpu, cuda or mps (the best one available)")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="how nodes are computed (auto)")
    parser.add_argument("--compile", action="store_true", help="compile the gradients, which takes seconds per run")
    add_output(parser, "vecgym-runs/compare")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps: a few seconds")
    parser.add_argument("--no-progress", action="store_true", help="do not show progress bars")


def run(args: argparse.Namespace) -> int:
    for name, (_, default, quick, _) in OPTIONS.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else default)
    strategies = {name: make_strategy(name, args) for name in dict.fromkeys(args.strategies)}
    trainers = {seed: _trainer(args, seed) for seed in range(args.seed, args.seed + args.seeds)}
    num_params = sum(p.numel() for p in trainers[args.seed].model.parameters())
    sent = allreduce_bytes(args.num_nodes, num_params, args.steps)
    args.output.mkdir(parents=True, exist_ok=True)
    print(
        f"{args.num_nodes} nodes, {args.steps} steps of {args.batch_size} x {args.context} characters per node.\n"
        f"GPT of {num_params:,} parameters on {args.text or 'the source text of Python itself'}."
    )
    runs: dict[str, dict[int, vecgym.History]] = {}
    try:
        for (seed, trainer), (name, strategy) in itertools.product(trainers.items(), strategies.items()):
            folder = args.output / (name if seed == args.seed else f"{name}-seed-{seed}")
            print(f"\n{strategy}{f', seed {seed}' if args.seeds > 1 else ''}", flush=True)
            trainer.fit(
                strategy, args.num_nodes, max_steps=args.steps, batch_size=args.batch_size, val_size=VAL_SIZE,
                val_interval=max(1, args.steps // NUM_EVALUATIONS), seed=seed, device=args.device,
                engine=args.engine, compile=args.compile, logger=vecgym.CSVLogger(folder),
                progress=not args.no_progress,
            )  # fmt: skip
            runs.setdefault(name, {})[seed] = trainer.history
    except (KeyboardInterrupt, DivergenceError):
        print(f"\n{name} stopped early; its history so far is in {folder}", file=sys.stderr)
        raise
    finally:
        if runs:
            _report(runs, sent, args)
    return 0


def strategy_names() -> list[str]:
    """Return the names of the strategies that can be compared."""
    from vecgym.strategy.catalogue import CATALOGUE

    return [name for name, row in CATALOGUE.items() if row.compared]


def strategy_name(text: str) -> str:
    """Parse one of `strategy_names`."""
    if text not in (names := strategy_names()):
        raise argparse.ArgumentTypeError(f"{text!r} (choose from {', '.join(map(repr, names))})")
    return text


def make_strategy(name: str, args: argparse.Namespace) -> vecgym.strategy.Strategy:
    """Make a strategy. All have the same inner optimizer: AdamW with warm-up and cosine decay to a tenth."""
    from vecgym.strategy.catalogue import CATALOGUE

    return CATALOGUE[name].make(
        H=args.H,
        p=0.005,
        outer_optim=vecgym.OptimSpec("sgd", lr=args.outer_lr, momentum=args.outer_momentum, nesterov=True),
        inner_optim=vecgym.OptimSpec("adamw", lr=args.lr, betas=(0.9, 0.99)),  # a short memory for a short run
        warmup_steps=args.steps // 20,
        cosine_anneal=True,
        max_norm=1.0,
    )


def _trainer(args: argparse.Namespace, seed: int) -> vecgym.Trainer[vecgym.models.GPT]:
    """Return a trainer for the GPT on windows of the text."""
    from vecgym.core import rng
    from vecgym.data.text import read_text, split_text, standard_library_text

    text = read_text(args.text) if args.text else standard_library_text()
    vocabulary = "".join(sorted(set(text)))
    tokens = [vecgym.data.encode_text(part, vocabulary)[0] for part in split_text(text)]
    with rng.private(seed):
        model = vecgym.models.GPT(len(vocabulary), args.context, args.layers, args.heads, args.width)
    return vecgym.Trainer(model, *(vecgym.data.TokenWindows(part, args.context) for part in tokens))


def _report(runs: dict[str, dict[int, vecgym.History]], reference_bytes: float, args: argparse.Namespace) -> None:
    """Print the table and, of several seeds, the differences; draw the figure."""
    print(f"\n{comparison_table(runs, reference_bytes)}\n")
    print("val loss: nats per character; sent: by each node in total; less: than allreduce with as many steps")
    print(why_behind(runs, args.steps // args.H), end="")
    title = f"A small GPT trained on {args.num_nodes} nodes, H = {args.H}"
    if args.seeds == 1:
        print("One seed: small differences may be chance. --seeds 5 says how large they are.\n")
    else:
        losses = vecgym.compare({name: of_seeds.values() for name, of_seeds in runs.items()}) if len(runs) > 1 else ""
        print(f"± over {args.seeds} seeds: standard deviation\n\n{losses}\n")
        title += f", seed {args.seed} of {args.seeds}"
    figure, firsts = args.output / "comparison.png", {name: of_seeds[args.seed] for name, of_seeds in runs.items()}
    vecgym.plot.plot_comparison(firsts, figure, title=title, loss_label="loss (nats per character)")
    print(f"Figure: {figure}\nHistories: {', '.join(str(args.output / name / 'history.csv') for name in runs)}")


def why_behind(runs: dict[str, dict[int, vecgym.History]], exchanges: int) -> str:
    """Return a line that says why diloco is behind fedavg in a short run, if it is.

    >>> history = vecgym.History()
    >>> why_behind({"fedavg": {0: history}}, exchanges=20)
    ''
    """
    usual = int(OPTIONS["steps"][1] // OPTIONS["H"][1])
    if exchanges >= usual or not {"fedavg", "diloco"} <= runs.keys():
        return ""
    losses = ([history.last("val_loss") for history in runs[name].values()] for name in ("fedavg", "diloco"))
    fedavg, diloco = (sum(of_seeds) / len(of_seeds) for of_seeds in losses)
    if not diloco > fedavg:  # also if one has diverged
        return ""
    return (
        "diloco is behind fedavg: its outer momentum builds up from exchange to exchange, and this run has "
        f"{exchanges}. With the default settings, {usual}, it is ahead.\n"
    )


def comparison_table(runs: dict[str, dict[int, vecgym.History]], reference_bytes: float) -> str:
    """Format a table with a line per strategy; `reference_bytes` are those that AllReduce sends per node.

    Args:
        runs: name -> seed -> history; of several seeds, the line has means, and losses with the standard deviation.

    >>> history = vecgym.History()
    >>> history.append({"val_loss": 2.0, "val_loss_local": 2.1, "bytes_total": 5e6, "seconds": 3.0})
    >>> print(comparison_table({"fedavg": {0: history}}, reference_bytes=1e8))
    strategy  val loss  val loss of nodes    sent  less  seconds
    fedavg      2.0000             2.1000  5.0 MB   20x      3.0
    """
    from matplotlib.ticker import EngFormatter

    from vecgym.records.rows import aligned, with_spread

    rows = [["strategy", "val loss", "val loss of nodes", "sent", "less", "seconds"]]
    for name, of_seeds in runs.items():
        columns = ("val_loss", "val_loss_local", "bytes_total", "seconds")
        averages, nodes, sent, seconds = ([history.last(c) for history in of_seeds.values()] for c in columns)
        less = f"{reference_bytes / sent[0]:.3g}x" if sent[0] else "-"
        losses = [f"{x[0]:.4f}" if len(x) == 1 else with_spread(x) for x in (averages, nodes)]
        took = f"{sum(seconds) / len(seconds):.1f}"
        rows.append([name, *losses, EngFormatter(unit="B", places=1)(sent[0]), less, took])
    return "\n".join(aligned(rows))


def allreduce_bytes(num_nodes: int, num_params: int, steps: int) -> float:
    """Return the bytes that a node sends if a ring all-reduce averages float32 gradients at every step.

    >>> allreduce_bytes(num_nodes=8, num_params=1000, steps=10)
    70000.0
    """
    return 2 * (num_nodes - 1) / num_nodes * 4 * num_params * steps
