"""The cost of asking the clock: pricing a long run, and the dry run of a large model.

- price: 10,000 steps of 64 nodes that compute for log-normal times and average 30 parameters at every step, or at every
  hundredth.
- dry run: a model of 100 billion bfloat16 parameters on the device "meta", 128 nodes, 200 steps, with each strategy of
  the catalogue whose exchanges need no values.
- command: `vecgym price` as in the README, from after `import torch` to its end, vecgym's own imports included; every
  repeat is a process of its own.

Each row is a process of its own. Seconds are those of the processor, the median over the repeats, so that other
programs hardly count; those of the wall are beside them. Memory is the peak resident memory of the process, and what it
had before, with torch imported.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from workloads import header, machine, markdown

from vecgym import dry_run
from vecgym.clock import Compute, Network, price
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.strategy.catalogue import CATALOGUE

LAYERS = 108  # matrices of the large model
H, P = 50, 1e-7  # of its strategies
TARGETS = {"price": (2.0, None), "dry run": (30.0, 1e9), "command": (2.0, None)}  # seconds, bytes
README = Path(__file__).parent.parent / "README.md"
BEYOND_TORCH = """
import json, resource, sys, time
import torch
torch.set_num_threads(1)
before, cpu, wall = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), time.perf_counter()
from vecgym.cli import main
main(sys.argv[1:])
seconds, wall = time.process_time() - cpu, time.perf_counter() - wall
peak, unit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 1 if sys.platform == "darwin" else 1024
print(json.dumps({"seconds": seconds, "wall_seconds": wall, "peak_bytes": peak * unit, "before_bytes": before * unit}))
"""


class Size(NamedTuple):
    """The sizes of the questions."""

    price_steps: int = 10_000
    price_nodes: int = 64
    parameters: float = 1e11
    num_nodes: int = 128
    num_steps: int = 200


FULL, QUICK = Size(), Size(200, 4, 1e9, 4, 100)


def cases(strategies: list[str]) -> list[tuple[str, str]]:
    """(question, of what)."""
    prices = [("command", "vecgym price"), ("price", "every step"), ("price", "every 100 steps")]
    return [*prices, *(("dry run", name) for name in strategies)]


def question(kind: str, name: str, size: Size) -> Callable[[], int]:
    """The question, ready to be measured; it returns the number of collectives."""
    if kind == "price":
        ledger = averages(size, every=1 if name == "every step" else 100)
        network, compute = Network(1e9, 1e-3), Compute.lognormal(0.4, 0.3)
        return lambda: len(ledger) if price(ledger, network, compute).num_steps == size.price_steps else 0
    width = round((size.parameters / LAYERS / 12) ** 0.5)
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(width, 12 * width, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS))
    inner: dict[str, Any] = {} if name == "demo" else {"inner_optim": "adamw", "lr": 1e-3}
    return lambda: len(dry_run(model, CATALOGUE[name].make(H=H, p=P, **inner), size.num_nodes, size.num_steps))


def averages(size: Size, every: int) -> Ledger:
    """The ledger of a run that averages 30 parameters."""
    ledger, sizes = Ledger(), {f"layer{i}": 133_333 for i in range(30)}
    ledger.announce(size.price_nodes, sizes)
    transfer = Transfer("mean", sum(sizes.values()), size.price_nodes, tensors=tuple(sizes))
    for step in range(size.price_steps):
        ledger.add(step, [transfer] if (step + 1) % every == 0 else [])
    return ledger


def peak_bytes() -> int:
    """The most resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_here(kind: str, name: str, size: Size, repeats: int) -> dict[str, Any]:
    """Seconds, bytes and collectives of one question, in this process."""
    torch.set_num_threads(1)
    before = peak_bytes()
    ask = question(kind, name, size)
    seconds, walls, collectives = [], [], 0
    for _ in range(repeats):
        start, began = time.process_time(), time.perf_counter()
        try:
            collectives = ask()
        except ValueError as error:
            return {"refused": str(error)}
        seconds.append(time.process_time() - start)
        walls.append(time.perf_counter() - began)
    return {
        "seconds": statistics.median(seconds), "wall_seconds": statistics.median(walls), "collectives": collectives,
        "peak_bytes": peak_bytes(), "before_bytes": before,
    }  # fmt: skip


def measure_command(quick: bool, repeats: int) -> dict[str, Any]:
    """The time of the README's command beyond `import torch`, each time in a new process."""
    found = re.search(r"^vecgym (price --parameters .*)$", README.read_text(), re.MULTILINE)
    assert found is not None
    argv = shlex.split(found[1]) + ["--parameters", "1M", "--H", "20"] * quick
    command, rows = [sys.executable, "-c", BEYOND_TORCH, *argv], []
    for _ in range(repeats):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    return {"collectives": "-", **{name: statistics.median(row[name] for row in rows) for name in rows[0]}}


def measure(kind: str, name: str, quick: bool, repeats: int) -> dict[str, Any]:
    """The same in a process of its own."""
    if kind == "command":
        return {"question": kind, "of": name, **measure_command(quick, repeats)}
    command = [sys.executable, __file__, "--one", kind, name, "--repeats", str(repeats), *["--quick"] * quick]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    return {"question": kind, "of": name, **json.loads(done.stdout)}


def report(rows: list[dict[str, Any]]) -> str:
    """One line for each question, with its targets."""
    cells = []
    for row in rows:
        seconds, most = TARGETS[row["question"]]
        what, targets = (
            f"{row['question']}, {row['of']}",
            f"< {seconds:g} s" + (f", < {most / 1e9:g} GB" if most else ""),
        )
        if "refused" in row:
            cells.append([what, "-", "refused", "-", "-", "-", targets, "-"])
            continue
        met = row["seconds"] < seconds and (most is None or row["peak_bytes"] < most)
        memory = [f"{row[key] / 1e6:.0f}" for key in ("peak_bytes", "before_bytes")]
        times = [f"{row[key]:.2f}" for key in ("seconds", "wall_seconds")]
        cells.append([what, str(row["collectives"]), *times, *memory, targets, "yes" if met else "**no**"])
    return markdown(["", "collectives", "s", "wall s", "peak MB", "MB before", "target", "met"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=list(CATALOGUE), choices=list(CATALOGUE), metavar="NAME",
                        help=f"any of {', '.join(CATALOGUE)}; default: all")  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="of this process; those that measure have one")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement (default 3)")
    parser.add_argument("--quick", action="store_true", help="small ones, once: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, name = args.one
        print(json.dumps(measure_here(kind, name, QUICK if args.quick else FULL, args.repeats)))
        return
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    rows = []
    for kind, name in cases(args.strategies):
        rows.append(row := measure(kind, name, args.quick, 1 if args.quick else args.repeats))
        print(f"{kind}, {name}: {row.get('seconds', float('nan')):.2f} s", file=sys.stderr, flush=True)
    print("\n" + report(rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
