"""`vecgym price`: how long strategies, or a recorded run, take on a network."""

from __future__ import annotations

import argparse
from pathlib import Path

import vecgym
from vecgym.cli.configuration import add_set, count, read_configuration

BANDWIDTHS = ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"]
LATENCIES = ["0 ms", "50 ms"]
OF_STRATEGIES = ("nodes", "H", "strategies", "tau", "steps")  # options that a recorded run does not have


def options(parser: argparse.ArgumentParser) -> None:
    """Price strategies on a network, or a recorded run on a grid of networks. Nothing is trained. Of a model, given by
    its number of parameters or as a function in a file, the table has seconds of a step, the fraction of them in which
    nodes compute, bytes and days for each strategy and H, and the bandwidth and H that are required. Of a run, a
    checkpoint, which fit(save_dir=RUN) writes at the end, records what was sent."""
    parser.epilog = (
        'examples: vecgym price --parameters 150M --nodes 8 --step-seconds 0.6 --bandwidth "100 Mbit/s" --latency 80ms'
        '; vecgym price runs/a --bandwidth "1 Gbit/s" "10 Gbit/s" --latency 50ms --step-seconds 0.4'
    )
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument(
        "run_folder", type=Path, nargs="?", metavar="RUN", help="the save_dir of a run, or one of its checkpoints"
    )
    of.add_argument("--parameters", metavar="P", help="trainable parameters of a transformer, in float32: 150M, 7B")
    of.add_argument(
        "--model", dest="config", metavar="FILE.py:function", help="returns a module; it is called on the device meta"
    )
    parser.add_argument("--nodes", type=count, metavar="K", help="the number of nodes")
    parser.add_argument("--step-seconds", metavar="S", help="seconds of a step of one node (of a run: as measured)")
    parser.add_argument("--bandwidth", nargs="+", metavar="B", help='of each link: "1 Gbit/s"; of a run: several')
    parser.add_argument("--latency", nargs="+", metavar="A", help="one way, half of a ping: 50ms; of a run: several")
    parser.add_argument("--H", nargs="+", type=count, metavar="H", help="steps between exchanges (20 100 500)")
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="of the catalogue; the first is the reference")
    parser.add_argument("--tau", type=count, metavar="T", help="steps that an exchange of streaming may take (5)")
    parser.add_argument("--steps", type=count, metavar="N", help="of the run, for its days (100000)")
    add_set(parser, "an argument for the function of --model")
    parser.add_argument(
        "--all-reduce", default="ring", help="ring, halving_doubling, tree, server or gloo (%(default)s)"
    )
    parser.add_argument(
        "--bucket-bytes", type=float, default=25 * 2**20, metavar="N",
        help="bytes of a message; 0: one per tensor, inf: one per exchange (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--no-overlap", action="store_true", help="let nodes wait while they send")
    parser.add_argument(
        "--utilization", type=float, default=0.95, help="report the bandwidth, and H, for it (%(default)s)"
    )
    parser.add_argument("--plot", "--output", type=Path, metavar="FILE", help="draw a figure")


def run(args: argparse.Namespace) -> int:
    if args.set and args.config is None:
        args.parser.error("--set needs --model FILE.py:function")
    if args.run_folder is None:
        return _price_strategies(args)
    for name in OF_STRATEGIES:
        if getattr(args, name) is not None:
            args.parser.error(f"--{name} is of --parameters and --model: what {args.run_folder} sent is recorded")
    return _price_run(args)


def _price_strategies(args: argparse.Namespace) -> int:
    """Print a table of strategies."""
    import torch

    from vecgym.clock import Compute, Network, price_strategies, units
    from vecgym.clock.side_by_side import STRATEGIES

    for name, example in (("nodes", "8"), ("step_seconds", "0.6"), ("bandwidth", '"100 Mbit/s"'), ("latency", "80ms")):
        value = getattr(args, name)
        if value is None or (isinstance(value, list) and len(value) > 1):
            args.parser.error(f"give one --{name.replace('_', '-')}, such as {example}")
    if args.config is None:
        model = units.count("--parameters", args.parameters)
    else:
        with torch.device("meta"):
            model = read_configuration(args, ("model",), ("model",), alone=("model", torch.nn.Module))["model"]
    prices = price_strategies(
        model, args.nodes,
        Network(*map(_number, (args.bandwidth[0], args.latency[0])), all_reduce=args.all_reduce,
                bucket_bytes=args.bucket_bytes),
        Compute(_number(args.step_seconds), overlap=not args.no_overlap),
        H=args.H or [20, 100, 500], tau=args.tau, max_steps=args.steps or 100_000, utilization=args.utilization,
        strategies=args.strategies or STRATEGIES,
    )  # fmt: skip
    print(prices)
    if args.plot:
        prices.plot(args.plot)
        print(f"Figure: {args.plot}")
    return 0


def _price_run(args: argparse.Namespace) -> int:
    """Print a table of networks."""
    from vecgym.clock import Compute, Network, price
    from vecgym.clock.required import Question
    from vecgym.clock.trace import plot_networks
    from vecgym.clock.units import bits_per_second, latency, readable_bandwidth, readable_time
    from vecgym.core import check

    bandwidths = {bits_per_second("--bandwidth", x): x for x in map(_number, args.bandwidth or BANDWIDTHS)}
    latencies = {latency("--latency", x): x for x in map(_number, args.latency or LATENCIES)}
    check.number("--utilization", args.utilization, "(0, 1)", "the fraction of the time in which nodes compute")
    options = {"all_reduce": args.all_reduce, "bucket_bytes": args.bucket_bytes}
    saved = vecgym.load(args.run_folder)
    ledger, history = saved.ledger, saved.history
    time, overlap = args.step_seconds, not args.no_overlap
    compute = Compute.measured(history, overlap=overlap) if time is None else Compute(_number(time), overlap=overlap)
    timelines = {
        a: {b: price(ledger, Network(x, y, **options), compute) for b, x in bandwidths.items()}
        for a, y in latencies.items()
    }
    print(f"{ledger.num_steps} steps of {ledger.num_nodes} nodes, {compute}")
    print(price_table(timelines))
    for a in latencies:
        question = Question(ledger, compute, args.utilization, Network(float("inf"), latencies[a], **options))
        bandwidth = question.bandwidth()
        goal = f"For {100 * args.utilization:g} % computing with a latency of {readable_time(a)}"
        print(question.why_none() if bandwidth == float("inf") else f"{goal}: {readable_bandwidth(bandwidth)}.")
    if args.plot:
        plot_networks(timelines, args.plot, title=str(args.run_folder))
        print(f"Figure: {args.plot}")
    return 0


def price_table(timelines: dict[float, dict[float, vecgym.clock.Timeline]]) -> str:
    """Format seconds and utilization as a table: a row per bandwidth, a column per latency.

    >>> print(price_table({}))
    bandwidth
    """
    from vecgym.clock.units import readable_bandwidth, readable_time
    from vecgym.records.rows import aligned

    rows = [["bandwidth", *(f"{readable_time(a)} latency" for a in timelines)]]
    for b in next(iter(timelines.values()), {}):
        cells = [f"{readable_time(t[b].seconds)}, {100 * t[b].utilization:.1f} %" for t in timelines.values()]
        rows.append([readable_bandwidth(b), *cells])
    return "\n".join(aligned(rows))


def _number(text: str) -> str | float:
    """Parse a number; return any other text, which has a unit, unchanged."""
    try:
        return float(text)
    except ValueError:
        return text
