"""`vecgym price`: how long a recorded run takes on other networks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vecgym.clock import Compute, Timeline

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
    parser.add_argument(
        "--output", type=Path, default=Path("vecgym-runs/price.png"), metavar="FILE", help="(%(default)s)"
    )


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
    compute = _compute(Compute, args, history)
    found = {a: {b: price(ledger, Network(b, a, **options), compute) for b in bandwidths} for a in latencies}
    print(f"{ledger.num_steps} steps of {ledger.num_nodes} nodes, {compute}")
    print(table(found))
    for a in latencies:
        question = Question(ledger, compute, wanted, a, options=options)
        needed = question.bandwidth()
        enough = f"For {100 * wanted:g} % computing with a latency of {readable_time(a)}: {readable_bandwidth(needed)}."
        print(question.why_none() if needed == float("inf") else enough)
    plot_networks(found, args.output, title=str(args.run_folder))
    print(f"Figure: {args.output}")
    return 0


def recorded(path: Path) -> tuple[Any, Any]:
    """The ledger and the history of a run."""
    from vecgym.collectives.ledger import Ledger
    from vecgym.records import runfile
    from vecgym.records.history import History
    from vecgym.runs.checkpoint import FORM

    if path.is_dir():
        present = runfile.checkpoints_in(path)
        if not present:
            raise ValueError(f"there is no checkpoint in {path}: fit(save_dir={str(path)!r}) writes one at the end.")
        path = present[-1]
    contents = runfile.read(path, FORM)
    ledger, history = Ledger(), History()
    ledger.load(contents["ledger"])
    history.settings.update(contents["settings"])
    for row in runfile.unpacked_rows(contents["rows"]):
        history.append(row)
    return ledger, history


def table(found: dict[float, dict[float, Timeline]]) -> str:
    """Seconds and utilization: a row for each bandwidth, columns for each latency.

    >>> print(table({}))
    bandwidth
    """
    from vecgym.clock.units import readable_bandwidth, readable_time

    rows = [["bandwidth", *(f"{readable_time(a)} latency" for a in found)]]
    for b in next(iter(found.values()), {}):
        cells = [f"{readable_time(t[b].seconds)}, {100 * t[b].utilization:.1f} %" for t in found.values()]
        rows.append([readable_bandwidth(b), *cells])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def _compute(kind: type[Compute], args: argparse.Namespace, history: Any) -> Compute:
    overlap = not args.no_overlap
    if args.step_seconds is None:
        return kind.measured(history, overlap=overlap)
    return kind(_number(args.step_seconds), overlap=overlap)


def _number(text: str) -> str | float:
    """A number as it is; everything else is a text with a unit."""
    try:
        return float(text)
    except ValueError:
        return text
