"""The command `vecgym`.

A subcommand is a pair of functions: `_x_options(parser)` adds its options, `_x(args)` runs it and returns the exit
code; `_parser` names the pair. Nothing heavy is imported until a command runs, so that help and errors come at once.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vecgym import __version__
from vecgym.errors import DivergenceError, ProcessError

if TYPE_CHECKING:
    from torch import nn

    from vecgym.data import TokenWindows
    from vecgym.metrics import History
    from vecgym.strategy import Strategy

STRATEGIES = ("allreduce", "fedavg", "diloco")  # what `vecgym compare` compares
MORE_STRATEGIES = (*STRATEGIES, "sparta", "sparta-diloco", "gossip", "demo")  # what it can
ENGINES = ("auto", "vmap", "loop", "fastest")  # those of vecgym.local, which would import torch

# What `vecgym compare` takes for the options that are not given, and what it takes with --quick.
DEFAULTS: dict[str, Any] = {
    "steps": 700, "batch_size": 4, "context": 64, "width": 64, "layers": 2, "heads": 2, "H": 20, "lr": 6e-3,
    "outer_lr": 0.7, "outer_momentum": 0.6,
}  # fmt: skip
QUICK: dict[str, Any] = {**DEFAULTS, "steps": 200, "context": 32, "width": 32, "H": 10}

NUM_EVALUATIONS = 10  # in a run, besides the one at the start
VAL_SIZE = 128  # windows of text in an evaluation


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: the program's own) and return its exit code.

    0: done; 1: it cannot be done, for a reason in one line on stderr; 130: interrupted with Ctrl-C. As argparse
    does, a command line that makes no sense raises `SystemExit(2)`, and one that asks for help `SystemExit(0)`.

    >>> main(["info"])  # doctest: +ELLIPSIS
    vecgym      0.1.0
    ...
    0
    """
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    if unknown:  # reported by the subcommand, whose usage line shows what is allowed
        args.parser.error(f"there is no option {' '.join(unknown)}; see {args.parser.prog} --help")
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, DivergenceError, ProcessError) as error:
        print(f"{args.parser.prog}: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vecgym",
        description="Distributed training of one model on K nodes, simulated as one program in one process.",
        epilog="example: vecgym compare --strategies allreduce diloco --H 50",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vecgym {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def add(name: str, options: Callable[[argparse.ArgumentParser], None], run: Callable[..., int], about: str) -> None:
        command = commands.add_parser(name, help=about, description=options.__doc__, allow_abbrev=False)
        command.set_defaults(parser=command, run=run)
        options(command)

    add("compare", _compare_options, _compare, "train a small GPT with several strategies, and compare them")
    add("verify", _verify_options, _verify, "show that strategies give the same numbers on real processes")
    add("exogym", _exogym_options, _exogym, "run a script that was written for EXO Gym")
    add("info", _info_options, _info, "show versions, devices, threads and engines")
    return parser


# --------------------------------------------------------------------------------------------- vecgym compare


def _compare_options(parser: argparse.ArgumentParser) -> None:
    """Train a small GPT, character by character, on 8 nodes with each strategy; print what validation loss each
    reaches and how many bytes each node sends for it; draw both as curves. By default in one to two minutes."""
    parser.epilog = "example: vecgym compare --text book.txt --strategies allreduce diloco --H 50"

    def add(option: str, kind: Callable[[str], Any], about: str) -> None:
        name = option.lstrip("-").replace("-", "_")
        default, quick = DEFAULTS[name], QUICK[name]
        shown = f"{default:g}" if default == quick else f"{default:g}; with --quick {quick:g}"
        parser.add_argument(option, type=kind, metavar="X" if kind is _positive else "N", help=f"{about} ({shown})")

    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to train on (Python's standard library)")
    parser.add_argument(
        "--strategies", nargs="+", choices=MORE_STRATEGIES, default=STRATEGIES, metavar="NAME",
        help=f"what to compare: any of {', '.join(MORE_STRATEGIES)} (the first {len(STRATEGIES)})",
    )  # fmt: skip
    parser.add_argument("--num-nodes", type=_count, default=8, metavar="N", help="K (8)")
    add("--steps", _count, "optimizer steps of every node")
    add("--batch-size", _count, "examples per node and step")
    add("--context", _count, "characters that the model sees at once")
    add("--width", _count, "size of the vector of a character")
    add("--layers", _count, "transformer blocks")
    add("--heads", _count, "attention heads; must divide the width")
    add("--H", _count, "steps between two exchanges of fedavg and diloco")
    add("--lr", _positive, "largest learning rate of AdamW, after a warm-up and before a cosine")
    add("--outer-lr", _positive, "learning rate of diloco's outer optimizer, SGD with Nesterov momentum")
    add("--outer-momentum", _positive, "its momentum; the paper's 0.9 is for longer runs")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of initialisation and data order (0)")
    parser.add_argument("--device", help="cpu, cuda or mps (the best one present)")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="how the nodes are computed (auto)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("vecgym-runs/compare"),
        metavar="DIR",
        help="where the results go (%(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps: some seconds")
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")


@dataclass(frozen=True)
class Run:
    """What one strategy did, and how long it took to simulate."""

    history: History
    seconds: float


def _compare(args: argparse.Namespace) -> int:
    for name, value in (QUICK if args.quick else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    strategies = {name: make_strategy(name, args) for name in dict.fromkeys(args.strategies)}
    train, val, vocab_size = _data(args)
    model = _model(args, vocab_size)
    num_params = sum(p.numel() for p in model.parameters())
    args.output.mkdir(parents=True, exist_ok=True)
    print(
        f"{args.num_nodes} nodes, {args.steps} steps of {args.batch_size} x {args.context} characters per node.\n"
        f"GPT of {num_params:,} parameters on {args.text or 'the source text of Python itself'}."
    )
    runs: dict[str, Run] = {}
    stopped: KeyboardInterrupt | DivergenceError | None = None
    for name, strategy in strategies.items():
        print(f"\n{strategy}", flush=True)
        try:
            runs[name] = _train(strategy, model, train, val, args.output / name, args)
        except (KeyboardInterrupt, DivergenceError) as reason:
            stopped = reason
            break
    if runs:
        _report(runs, allreduce_bytes(args.num_nodes, num_params, args.steps), args)
    if stopped is not None:
        print(f"\n{name} stopped early; what was recorded of it is in {args.output / name}", file=sys.stderr)
        raise stopped
    return 0


def make_strategy(name: str, args: argparse.Namespace) -> Strategy:
    """One of `MORE_STRATEGIES`, all with the same inner optimizer: AdamW, a warm-up, then a cosine down to a tenth.

    Only DeMo has none: its steps are signs, and a sixth of AdamW's learning rate suits them.
    """
    import torch

    from vecgym.strategy import (
        AllReduceStrategy,
        DeMoStrategy,
        DiLoCoStrategy,
        FedAvgStrategy,
        GossipStrategy,
        OptimSpec,
        SPARTADiLoCoStrategy,
        SPARTAStrategy,
    )

    adamw = OptimSpec(torch.optim.AdamW, lr=args.lr, betas=(0.9, 0.99))  # a short memory for a short run
    inner: dict[str, Any] = {"warmup_steps": args.steps // 20, "cosine_anneal": True, "max_norm": 1.0}
    if name == "allreduce":
        return AllReduceStrategy(adamw, **inner)
    if name == "fedavg":
        return FedAvgStrategy(adamw, H=args.H, **inner)
    outer = OptimSpec(torch.optim.SGD, lr=args.outer_lr, momentum=args.outer_momentum, nesterov=True)
    if name == "diloco":
        return DiLoCoStrategy(adamw, outer, H=args.H, **inner)
    if name == "sparta":
        return SPARTAStrategy(0.005, adamw, **inner)
    if name == "sparta-diloco":
        return SPARTADiLoCoStrategy(0.005, 1, args.H, adamw, outer, **inner)
    if name == "gossip":
        return GossipStrategy("ring", 1, adamw, **inner)
    if name == "demo":
        return DeMoStrategy(lr=args.lr / 6, **inner)
    raise ValueError(f"strategy {name!r} is not known; allowed: {', '.join(MORE_STRATEGIES)}.")


def _data(args: argparse.Namespace) -> tuple[TokenWindows, TokenWindows, int]:
    """Windows to train on, windows to validate on, and the number of different characters."""
    from vecgym.corpus import read_text, split_text, standard_library_text
    from vecgym.data import TokenWindows, encode_text

    text = read_text(args.text) if args.text else standard_library_text()
    vocabulary = "".join(sorted(set(text)))
    train, val = (TokenWindows(encode_text(part, vocabulary)[0], args.context) for part in split_text(text))
    return train, val, len(vocabulary)


def _model(args: argparse.Namespace, vocab_size: int) -> nn.Module:
    import torch

    from vecgym.models import GPT

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        return GPT(vocab_size, args.context, args.layers, args.heads, args.width)


def _train(
    strategy: Strategy, model: nn.Module, train: TokenWindows, val: TokenWindows, output: Path, args: argparse.Namespace
) -> Run:
    from vecgym.logger import CSVLogger
    from vecgym.trainer import Trainer

    start = time.perf_counter()
    trainer = Trainer(model, train, val)
    trainer.fit(
        strategy,
        args.num_nodes,
        max_steps=args.steps,
        batch_size=args.batch_size,
        val_size=VAL_SIZE,
        val_interval=max(1, args.steps // NUM_EVALUATIONS),
        seed=args.seed,
        device=args.device,
        engine=args.engine,
        logger=CSVLogger(output),
        progress=not args.no_progress,
    )
    return Run(trainer.history, time.perf_counter() - start)


def _report(runs: dict[str, Run], reference_bytes: float, args: argparse.Namespace) -> None:
    """The table and the figure."""
    from vecgym.plot import plot_comparison

    print(f"\n{comparison_table(runs, reference_bytes)}\n")
    print("val loss: nats per character; sent: by each node, in all; less: than allreduce, with as many steps")
    figure = args.output / "comparison.png"
    plot_comparison(
        {name: run.history for name, run in runs.items()},
        figure,
        title=f"A small GPT trained on {args.num_nodes} nodes, H = {args.H}",
        loss_label="loss (nats per character)",
    )
    print(f"Figure: {figure}\nHistories: {', '.join(str(args.output / name / 'history.csv') for name in runs)}")


def comparison_table(runs: dict[str, Run], reference_bytes: float) -> str:
    """One line per run; `reference_bytes` is what AllReduce sends per node.

    >>> from vecgym.metrics import History
    >>> history = History()
    >>> history.append({"val_loss": 2.0, "val_loss_local": 2.1, "total_bytes": 5e6})
    >>> print(comparison_table({"fedavg": Run(history, seconds=3.0)}, reference_bytes=1e8))
    strategy  val loss  val loss of nodes    sent  less  seconds
    fedavg      2.0000             2.1000  5.0 MB   20x      3.0
    """
    from matplotlib.ticker import EngFormatter

    rows = [["strategy", "val loss", "val loss of nodes", "sent", "less", "seconds"]]
    for name, run in runs.items():
        average, nodes, sent = map(run.history.last, ("val_loss", "val_loss_local", "total_bytes"))
        less = f"{reference_bytes / sent:.3g}x" if sent else "-"
        sent = EngFormatter(unit="B", places=1)(sent)
        rows.append([name, f"{average:.4f}", f"{nodes:.4f}", sent, less, f"{run.seconds:.1f}"])
    return _aligned(rows)


def allreduce_bytes(num_nodes: int, num_params: int, steps: int) -> float:
    """Bytes that a node sends when float32 gradients are averaged at every step, by a ring all-reduce.

    >>> allreduce_bytes(num_nodes=8, num_params=1000, steps=10)
    70000.0
    """
    return 2 * (num_nodes - 1) / num_nodes * 4 * num_params * steps


def _aligned(rows: list[list[str]]) -> str:
    """A table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    )


# ---------------------------------------------------------------------------------------------- vecgym verify


def _verify_options(parser: argparse.ArgumentParser) -> None:
    """Train a small GPT with a strategy twice, stacked in one process and on real processes of torch.distributed, and
    report the largest differences of parameters, losses, states and bytes. The exit code is 1 if any is too large."""
    parser.epilog = "example: vecgym verify --strategy diloco --num-nodes 4 --num-processes 2"
    parser.add_argument("--strategy", default="all", metavar="NAME", help="one that --list shows, or all (all)")
    parser.add_argument("--list", action="store_true", help="show the names of the strategies, and do nothing else")
    parser.add_argument("--num-nodes", type=_count, default=4, metavar="N", help="K (4)")
    parser.add_argument("--num-processes", type=_count, default=2, metavar="N", help="W, which divides K (2)")
    parser.add_argument("--steps", type=_count, default=20, metavar="N", help="optimizer steps of every node (20)")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="precision (float64)")


def _verify(args: argparse.Namespace) -> int:
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


# ---------------------------------------------------------------------------------------------- vecgym exogym


def _exogym_options(parser: argparse.ArgumentParser) -> None:
    """Run a script written for EXO Gym, unmodified, as python would: "import exogym" finds vecgym's classes under EXO
    Gym's names. The exit code is the script's."""
    parser.epilog = "example: vecgym exogym example/nanogpt_train.py --dataset shakespeare --strategy diloco"
    parser.add_argument(
        "--strict-timing", action="store_true",
        help="train exactly as EXO Gym's processes do: its batches, random numbers, moments and quirks",
    )  # fmt: skip
    parser.add_argument("script", metavar="SCRIPT", help="the script")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its command line")


def _exogym(args: argparse.Namespace) -> int:
    from vecgym.compat.exogym import run_script

    if not os.path.isfile(args.script):
        args.parser.error(f"can't open file {args.script!r}: there is no such file")
    try:
        run_script(args.script, args.args, args.strict_timing)
    except Exception as error:  # as python shows it: from the script's own lines on
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != args.script:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        return 1
    return 0


# ------------------------------------------------------------------------------------------------ vecgym info


def _info_options(parser: argparse.ArgumentParser) -> None:
    """Show what matters for a run or a bug report: versions, devices, threads, engines."""


def _info(args: argparse.Namespace) -> int:
    import torch

    devices = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    devices += ["mps"] * torch.backends.mps.is_available() + [f"cpu ({os.cpu_count()} logical cores)"]
    facts = {
        "vecgym": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "devices": ", ".join(devices),
        "threads": f"{torch.get_num_threads()} of torch on the CPU",
        "engines": ", ".join(ENGINES),
        "strategies": ", ".join(MORE_STRATEGIES),
    }
    print("\n".join(f"{name:<12}{value}" for name, value in facts.items()))
    return 0


# -------------------------------------------------------------------------------------- values of the options


def _count(text: str) -> int:
    """A whole number from 1 on."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return value


def _positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number > 0")
    return value
