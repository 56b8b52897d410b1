"""`vecgym price`: how long a recorded run takes on other networks."""

from __future__ import annotations

import argparse
from pathlib import Path

import vecgym
from vecgym.cli.values import add_output, table

BANDWIDTHS = ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"]
LATENCIES = ["0 ms", "50 ms"]


def options(parser: argparse.ArgumentParser) -> None:
    """Price a run on a grid of networks: the seconds, and the fraction of them in which nodes compute. Nothing is
    trained: a checkpoint, which fit(save_dir=RUN) writes at the end of the run, records what was sent."""
    parser.epilog = 'example: vecgym price runs/a --bandwidth "1 Gbit/s" "10 Gbit/s" --latency 50ms --step-seconds 0.4'
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the save_dir of a run, or one of its checkpoints")
    parser.add_argument("--bandwidth", nargs="+", default=BANDWIDTHS, metavar="B", help='of each link: "1 Gbit/s"')
    parser.add_argument("--latency", nargs="+", default=LATENCIES, metavar="A", help="latencies of a message: 50ms")
    parser.add_argument("--step-seconds", metavar="S", help="seconds of a step of one node (as measured in the run)")
    parser.add_argument(
        "--all-reduce", default="ring", help="ring, halving_doubling, tree, server or gloo (%(default)s)"
    )
    parser.add_argument(
        "--bucket-bytes", type=float, default=25 * 2**20, metavar="N",
        help="bytes of a message; 0: one per tensor, inf: one per exchange (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--no-overlap", action="store_true", help="let nodes wait while they send")
    parser.add_argument("--utilization", type=float, default=0.95, help="report the bandwidth for it (%(default)s)")
    add_output(parser, "vecgym-runs/price.png", "FILE")


def run(args: argparse.Namespace) -> int:
    from vecgym.clock import Compute, Network, price
    from vecgym.clock.required import Question
    from vecgym.clock.trace import plot_networks
    from vecgym.clock.units import bits_per_second, latency, readable_bandwidth, readable_time
    from vecgym.core import check

    bandwidths = [bits_per_second("--bandwidth", _number(x)) for x in args.bandwidth]
    latencies = [latency("--latency", x) for x in args.latency]
    check.number("--utilization", args.utilization, "(0, 1)", "the fraction of the time in which nodes compute")
    options = {"all_reduce": args.all_reduce, "bucket_bytes": args.bucket_bytes}
    ledger, history = read_run(args.run_folder)
    time, overlap = args.step_seconds, not args.no_overlap
    compute = Compute.measured(history, overlap=overlap) if time is None else Compute(_number(time), overlap=overlap)
    timelines = {a: {b: price(ledger, Network(b, a, **options), compute) for b in bandwidths} for a in latencies}
    print(f"{ledger.num_steps} steps of {ledger.num_nodes} nodes, {compute}")
    print(price_table(timelines))
    for a in latencies:
        question = Question(ledger, compute, args.utilization, a, options=options)
        needed = question.bandwidth()
        goal = f"For {100 * args.utilization:g} % computing with a latency of {readable_time(a)}"
        print(question.why_none() if needed == float("inf") else f"{goal}: {readable_bandwidth(needed)}.")
    plot_networks(timelines, args.output, title=str(args.run_folder))
    print(f"Figure: {args.output}")
    return 0


def read_run(path: Path) -> tuple[vecgym.Ledger, vecgym.History]:
    """Read the ledger and the history of a run."""
    from vecgym.records.runfile import checkpoints_in

    if path.is_dir() and not checkpoints_in(path):
        raise ValueError(f"there is no checkpoint in {path}: fit(save_dir={str(path)!r}) writes one at the end.")
    saved = vecgym.load(path)
    return saved.ledger, saved.history


def price_table(timelines: dict[float, dict[float, vecgym.clock.Timeline]]) -> str:
    """Format seconds and utilization as a table: a row per bandwidth, a column per latency.

    >>> print(price_table({}))
    bandwidth
    """
    from vecgym.clock.units import readable_bandwidth, readable_time

    rows = [["bandwidth", *(f"{readable_time(a)} latency" for a in timelines)]]
    for b in next(iter(timelines.values()), {}):
        cells = [f"{readable_time(t[b].seconds)}, {100 * t[b].utilization:.1f} %" for t in timelines.values()]
        rows.append([readable_bandwidth(b), *cells])
    return table(rows)


def _number(text: str) -> str | float:
    """Parse a number; return any other text, which has a unit, unchanged."""
    try:
        return float(text)
    except ValueError:
        return text
