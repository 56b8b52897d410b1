"""`vecgym price`: how long a recorded run takes on other networks."""

from __future__ import annotations

import argparse
from pathlib import Path

import vecgym
from vecgym.cli.values import add_output, table

BANDWIDTHS = ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"]
LATENCIES = ["0 ms", "50 ms"]


def options(parser: argparse.ArgumentParser) -> None:
    """Price a run on a grid of networks: seconds, and the part of them in which nodes compute. Nothing is trained: a
    checkpoint, which fit(save_dir=RUN) leaves at the end of the run, says what was sent."""
    parser.epilog = 'example: vecgym price runs/a --bandwidth "1 Gbit/s" "10 Gbit/s" --latency 50ms --step-seconds 0.4'
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the save_dir of a run, or one of its checkpoints")
    parser.add_argument("--bandwidth", nargs="+", default=BANDWIDTHS, metavar="B", help='of a node\'s link: "1 Gbit/s"')
    parser.add_argument("--latency", nargs="+", default=LATENCIES, metavar="A", help="of a message: 50ms")
    parser.add_argument("--step-seconds", metavar="S", help="of one node; if not given, as measured here in the run")
    parser.add_argument(
        "--all-reduce", default="ring", help="ring, halving_doubling, tree, server or gloo (%(default)s)"
    )
    parser.add_argument(
        "--bucket-bytes", type=float, default=25 * 2**20, metavar="N",
        help="of a message; 0: one for each tensor, inf: one for each exchange (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--no-overlap", action="store_true", help="nodes do not compute while they send")
    parser.add_argument("--utilization", type=float, default=0.95, help="say what bandwidth it needs (%(default)s)")
    add_output(parser, "vecgym-runs/price.png", "FILE")


def run(args: argparse.Namespace) -> int:
    from vecgym.clock import Compute, Network, price
    from vecgym.clock.required import Question
    from vecgym.clock.trace import plot_networks
    from vecgym.clock.units import bits_per_second, latency, readable_bandwidth, readable_time
    from vecgym.core import check

    bandwidths = [bits_per_second("--bandwidth", _number(x)) for x in args.bandwidth]
    latencies = [latency("--latency", x) for x in args.latency]
    wanted = check.number("--utilization", args.utilization, "(0, 1)", "the part of the time in which nodes compute")
    options = {"all_reduce": args.all_reduce, "bucket_bytes": args.bucket_bytes}
    ledger, history = recorded(args.run_folder)
    taken, overlap = args.step_seconds, not args.no_overlap
    compute = Compute.measured(history, overlap=overlap) if taken is None else Compute(_number(taken), overlap=overlap)
    found = {a: {b: price(ledger, Network(b, a, **options), compute) for b in bandwidths} for a in latencies}
    print(f"{ledger.num_steps} steps of {ledger.num_nodes} nodes, {compute}")
    print(priced_table(found))
    for a in latencies:
        question = Question(ledger, compute, wanted, a, options=options)
        needed = question.bandwidth()
        enough = f"For {100 * wanted:g} % computing with a latency of {readable_time(a)}: {readable_bandwidth(needed)}."
        print(question.why_none() if needed == float("inf") else enough)
    plot_networks(found, args.output, title=str(args.run_folder))
    print(f"Figure: {args.output}")
    return 0


def recorded(path: Path) -> tuple[vecgym.Ledger, vecgym.History]:
    """Return the ledger and the history of a run."""
    from vecgym.records import runfile
    from vecgym.runs.checkpoint import FORM

    if path.is_dir():
        present = runfile.checkpoints_in(path)
        if not present:
            raise ValueError(f"there is no checkpoint in {path}: fit(save_dir={str(path)!r}) writes one at the end.")
        path = present[-1]
    contents = runfile.read(path, FORM)
    ledger = vecgym.Ledger()
    ledger.load(contents["ledger"])
    return ledger, vecgym.History(contents["settings"], runfile.unpacked_rows(contents["rows"]))


def priced_table(found: dict[float, dict[float, vecgym.clock.Timeline]]) -> str:
    """Lay out seconds and utilization: a row for each bandwidth, columns for each latency.

    >>> print(priced_table({}))
    bandwidth
    """
    from vecgym.clock.units import readable_bandwidth, readable_time

    rows = [["bandwidth", *(f"{readable_time(a)} latency" for a in found)]]
    for b in next(iter(found.values()), {}):
        cells = [f"{readable_time(t[b].seconds)}, {100 * t[b].utilization:.1f} %" for t in found.values()]
        rows.append([readable_bandwidth(b), *cells])
    return table(rows)


def _number(text: str) -> str | float:
    """Parse a number; everything else is a text with a unit."""
    try:
        return float(text)
    except ValueError:
        return text
