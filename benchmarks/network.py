"""Predicted beside measured: what `vecgym.clock` says, and real processes on links that are really slow.

Four processes, each in a network namespace of its own (see `links.py`), average gradients with torch's
DistributedDataParallel (DDP), or send over gloo what a dry run's ledger says that DiLoCo sends, and sleep where nodes
would compute. Nothing overlaps, and neither does it in the prediction. Models of 4 large tensors go in torch's messages
of 25 MiB, those of 75 and 200 small ones in messages of 1 MiB, 19 of each. Single messages are measured, too. All take
turns; the figures are medians. The processes run in real time, so that other programs hardly count.

First, plain sockets say what the links carry, from each node to the next, all at once: `ping`, and `link` in Mbit/s,
what headers and acknowledgements leave of the bandwidth. Where that is not what was asked for, the table says so
instead of comparing. `ring` is predicted with that bandwidth for the textbook's ring, `gloo` for the ring that gloo
really uses, `nominal` likewise with the bandwidth that was asked for.

Needs Linux, root, `ip` and `tc` (iproute2); says so and ends where namespaces are not allowed.

    python benchmarks/network.py
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from links import NODES, has_netem, inside, links, namespaces, probe, reason_not_to
from switch import DEVICE, address, in_real_time
from torch import nn
from workloads import header, machine, markdown

from vecgym import dry_run
from vecgym.clock import Compute, Network, price
from vecgym.collectives.base import BUCKET_BYTES, bucketed
from vecgym.collectives.ledger import Ledger
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy

STEP_S = 0.05
WIDTH = 1448  # 4 matrices of 8 MiB
SMALL = (75, 200)  # tensors
SMALL_BYTES, SMALL_BUCKET = 20e6, 2**20  # of all of them, and of their messages
MESSAGES = (2**16, 2**20, 2**22, 2**24)  # bytes
MBITS = (50, 200, 1000)
LATENCIES_MS = (0, 20)
WITHIN = 0.15
CARRIED, PING_MS = 0.9, 2.0  # at least so much of the bandwidth; a round trip at most so much longer
COLUMNS = ("link", "nominal", "ring", "gloo", "measured")


class Job(NamedTuple):
    """The measured seconds, and those of the clock.

    Attributes:
        steps: for each step the numbers of float32 values of each all-reduce; with torch's DistributedDataParallel, of
            each parameter.
        bucket_bytes: of its messages; 0: plain all-reduces.
    """

    name: str
    steps: list[list[int]]
    step_s: float
    bucket_bytes: int
    predict: Callable[[Network], float]


def jobs(width: int) -> list[Job]:
    """Two steps of DDP, six of DiLoCo with two exchanges, for each model; and single messages."""
    models = {"": ([width**2] * 4, BUCKET_BYTES)}
    models |= {f", {n} tensors": ([round(SMALL_BYTES / 4 / n)] * n, SMALL_BUCKET) for n in SMALL}
    found = []
    for of, (sizes, bucket_bytes) in models.items():
        with torch.device("meta"):
            model = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes)
        ddp = dry_run(model, AllReduceStrategy("sgd", lr=0.1), NODES, 2)
        found.append(Job(f"DDP{of}", [sizes] * 2, STEP_S, bucket_bytes, partial(_priced, ddp, bucket_bytes)))
        diloco = dry_run(model, DiLoCoStrategy("sgd", lr=0.1, H=3), NODES, 6)
        sent = partial(_priced, diloco, bucket_bytes)
        found.append(Job(f"DiLoCo, H=3{of}", all_reduces(diloco, bucket_bytes), STEP_S, 0, sent))
    for size in [size for size in MESSAGES if size <= 16 * width**2]:
        name = f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
        found.append(Job(name, [[size // 4]], 0.0, 0, partial(_of_one, size)))
    return found


def _priced(ledger: Ledger, bucket_bytes: int, network: Network) -> float:
    network = copy.copy(network)
    network.bucket_bytes = bucket_bytes
    return float(price(ledger, network, Compute(STEP_S, overlap=False)).seconds)


def _of_one(num_bytes: int, network: Network) -> float:
    return network.seconds("mean", num_bytes, NODES)


def all_reduces(ledger: Ledger, bucket_bytes: int) -> list[list[int]]:
    """For each step the numbers of float32 values of each all-reduce."""
    kinds, steps = ledger.by_step()
    found = []
    for step in steps:
        sizes = [[ledger.sizes[name] // 4 for name in kinds[kind].tensors or ()] for kind in step]
        found.append([sum(own[i] for i in places) for own in sizes for places in bucketed(own, bucket_bytes / 4)])
    return found


# ---------------------------------------------------------------------------------------------------- the processes


def work(rank: int, folder: Path) -> None:
    """Make the steps of all jobs in one process, and write when they were done."""
    import torch.distributed as dist

    in_real_time()
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    task = json.loads((folder / "task.json").read_text())
    dist.init_process_group("gloo", init_method=f"tcp://{address(0)}:29577", rank=rank, world_size=NODES)
    ping, link = probe(rank, task["mbit"])
    for _ in range(3):
        dist.all_reduce(torch.ones(2**20))  # connections find their speed
    seconds = [[_made(*job) for job in task["jobs"]] for _ in range(task["repeats"])]
    dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps({"ping": ping, "link": link, "seconds": seconds}))
    os._exit(0)  # as in processes.py: a normal exit aborts now and then


class Parameters(nn.Module):
    """Parameters whose gradients are there at once, the last one's first."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in sizes)

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        for x in self.values:
            total = total + x[0]
        return total


def _made(steps: list[list[int]], step_s: float, bucket_bytes: int) -> float:
    """Seconds of some steps, from a time that all processes begin at."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if bucket_bytes:
        # With a size of one's own, torch's first message is as large as the others.
        cap = None if bucket_bytes == BUCKET_BYTES else bucket_bytes / 2**20
        model = DistributedDataParallel(Parameters(steps[0]), bucket_cap_mb=cap, gradient_as_bucket_view=True)
        for _ in range(2):  # it looks for the order of its messages
            model().backward()
    else:
        tensors = [[torch.ones(size) for size in step] for step in steps]
    start = torch.tensor([time.monotonic() + 0.3], dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, float(start) - time.monotonic()))
    for t in range(len(steps)):
        time.sleep(step_s)
        if bucket_bytes:
            model().backward()
            continue
        for x in tensors[t]:
            dist.all_reduce(x)
    return time.monotonic() - float(start)


def measured(given: list[Job], mbit: float, repeats: int, timeout_s: float) -> dict[str, Any]:
    """Median seconds of each job, until the last process was done, and what plain sockets say."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = [(job.steps, job.step_s, job.bucket_bytes) for job in given]
        task = {"mbit": mbit, "repeats": repeats, "jobs": asked}
        (folder / "task.json").write_text(json.dumps(task))
        command = [sys.executable, "-W", "ignore", __file__, "--work", name]
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        running = [
            subprocess.Popen([*inside(rank).split(), *command, "--rank", str(rank)], env=quiet) for rank in range(NODES)
        ]
        try:
            for process in running:
                if process.wait(timeout_s):
                    raise RuntimeError(f"a process ended with status {process.returncode}")
        finally:
            for process in running:
                process.kill()
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NODES)]
    last = torch.tensor([one["seconds"] for one in found], dtype=torch.float64).amax(0)  # [repeats, jobs]
    links_say = {key: statistics.median(one[key] for one in found) for key in ("ping", "link")}
    return {**links_say, "seconds": [statistics.median(row) for row in last.T.tolist()]}


def compare(given: list[Job], by: str, mbit: float, latency_ms: float, repeats: int) -> list[dict[str, Any]]:
    """One row for each job on a network."""
    latency = latency_ms / 1e3
    nominal = Network(mbit * 1e6, latency, all_reduce="gloo")
    with links(by, mbit, latency_ms):
        found = measured(given, mbit, repeats, 120 + 3 * repeats * sum(job.predict(nominal) for job in given))
    ring, gloo = (Network(found["link"], latency, all_reduce=name) for name in ("ring", "gloo"))
    networks = {"nominal": nominal, "ring": ring, "gloo": gloo}
    about = {
        "Mbit/s": mbit, "ms": latency_ms, "by": by, "ping": 1e3 * found["ping"], "link": found["link"] / 1e6,
        "load": os.getloadavg()[0],
    }  # fmt: skip
    about["carried"] = (
        CARRIED * mbit <= about["link"] <= mbit / CARRIED and abs(about["ping"] - 2 * latency_ms) <= PING_MS
    )
    return [
        {"what": job.name, **about, **{key: job.predict(at) for key, at in networks.items()}, "measured": seconds}
        for job, seconds in zip(given, found["seconds"])
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each row; of what was not carried, what was."""
    cells = []
    for row in rows:
        figures = [f"{row[key]:.0f}" if key == "link" else f"{row[key]:.3g}" for key in COLUMNS]
        ratio = f"{row['measured'] / row['gloo']:.2f}"
        if not row["carried"]:
            figures, ratio = [figures[0], *["not carried"] * (len(COLUMNS) - 1)], "-"
        asked = [f"{row['Mbit/s']:g}", f"{row['ms']:g}", row["by"], f"{row['ping']:.1f}"]
        cells.append([row["what"], *asked, *figures, ratio])
    return markdown(["", "Mbit/s", "ms", "by", "ping", *COLUMNS, "measured / gloo"], cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=list(MBITS))
    parser.add_argument("--latency-ms", type=float, nargs="+", default=list(LATENCIES_MS), help="one way")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--switch", action="store_true", help="in user space, also where netem is there or not needed")
    parser.add_argument("--quick", action="store_true", help="a small model, 200 Mbit/s, 20 ms, once: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        work(args.rank, args.work)
        return 0
    print(header(), flush=True)
    if reason := reason_not_to():
        print(f"Skipped: {reason}.")
        return 0
    if args.quick:
        args.mbit, args.latency_ms, args.repeats = [200.0], [20.0], 1
    rows = []
    with namespaces():
        slow = "netem" if has_netem() and not args.switch else "switch"
        for mbit, latency_ms in itertools.product(args.mbit, args.latency_ms):
            by = slow if latency_ms or args.switch else "tbf"
            if by == "switch" and not os.access(DEVICE, os.R_OK | os.W_OK):
                print(f"{mbit:g} Mbit/s, {latency_ms:g} ms skipped: the kernel has no netem, and there is no {DEVICE}.")
                continue
            rows += compare(jobs(256 if args.quick else WIDTH), by, mbit, latency_ms, args.repeats)
            print(f"{mbit:g} Mbit/s, {latency_ms:g} ms: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    print("\n" + table(rows))
    carried = [row for row in rows if row["carried"]]
    near = [row for row in carried if abs(row["measured"] / row["gloo"] - 1) <= WITHIN]
    print(f"\n{len(near)} of {len(carried)} within {100 * WITHIN:g} %, {len(rows) - len(carried)} not carried.")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
