"""Predicted beside measured: what `vecgym.clock` says, and real processes on links that are really slow.

Four processes, each in a network namespace of its own, are joined by a bridge; `tc` gives the link of each a bandwidth
(tbf) and a latency (netem). They send over gloo what a dry run's ledger says that the strategy sends, one all-reduce
for each parameter, and sleep where nodes would compute. Nothing overlaps, and neither does it in the prediction.

`link` is the bandwidth that one message alone gets between two of the processes, in Mbit/s, as iperf would say: what
headers and acknowledgements leave. `predicted` are the seconds with it, `nominal` those with the bandwidth given to tc.
Where the kernel has no netem, there is no latency, which is said.

Needs Linux, root, `ip` and `tc` (iproute2); says so and ends where namespaces are not allowed.

    python benchmarks/network.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vecgym import dry_run
from vecgym.clock import Compute, Network, price
from vecgym.collectives.ledger import Ledger
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy

NODES = 4
STEP_S = 0.05
LAYERS, WIDTH = 4, 1448  # 4 matrices of 8 MiB
MBITS = (50, 200, 1000)
LATENCIES_MS = (0, 20)
WITHIN = 0.15
PREFIX = "vgnet"
SECONDS = ("link", "nominal", "predicted", "measured")


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def ledgers() -> dict[str, Ledger]:
    """What the strategies send in six steps."""
    return {
        "AllReduce": dry_run(model(), AllReduceStrategy("sgd", lr=0.1), NODES, 2),
        "DiLoCo, H=3": dry_run(model(), DiLoCoStrategy("sgd", lr=0.1, H=3), NODES, 6),
    }


def messages(ledger: Ledger) -> list[list[int]]:
    """For each step the numbers of float32 values of each all-reduce, last parameter first."""
    kinds, steps = ledger.by_step()
    found = []
    for step in steps:
        sizes = [ledger.sizes[name] for kind in step for name in reversed(kinds[kind].tensors or ())]
        found.append([size // 4 for size in sizes])
    return found


# ------------------------------------------------------------------------------------------------------ the network


def reason_not_to() -> str:
    """Why there can be no namespaces here; "": they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    tried = subprocess.run(["ip", "netns", "add", f"{PREFIX}-try"], capture_output=True, text=True)
    if tried.returncode:
        return tried.stderr.strip()
    subprocess.run(["ip", "netns", "del", f"{PREFIX}-try"], check=False)
    return ""


def do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def inside(node: int) -> str:
    return f"ip netns exec {PREFIX}{node}"


@contextmanager
def namespaces() -> Iterator[None]:
    """A namespace for each node, with a link to a bridge in one more."""
    hub = f"{PREFIX}-hub"
    names = [hub, *(f"{PREFIX}{node}" for node in range(NODES))]
    try:
        for name in names:
            do(f"ip netns add {name}")
        do(f"ip netns exec {hub} ip link add br0 type bridge")
        do(f"ip netns exec {hub} ip link set br0 up")
        for node in range(NODES):
            do(f"ip link add {PREFIX}e{node} type veth peer name {PREFIX}p{node}")
            do(f"ip link set {PREFIX}e{node} netns {PREFIX}{node} name eth0")
            do(f"ip link set {PREFIX}p{node} netns {hub}")
            do(f"ip netns exec {hub} ip link set {PREFIX}p{node} master br0 up")
            do(f"{inside(node)} ip addr add 10.77.0.{node + 1}/24 dev eth0")
            do(f"{inside(node)} ip link set lo up")
            do(f"{inside(node)} ip link set eth0 up")
            # As on hosts for training: connections stay fast when they have been idle, and hold what is under way.
            do(f"{inside(node)} sysctl -qw net.ipv4.tcp_slow_start_after_idle=0")
            for buffer in ("tcp_wmem", "tcp_rmem"):
                setting = f"net.ipv4.{buffer}=4096 4194304 67108864"
                subprocess.run([*inside(node).split(), "sysctl", "-qw", setting], check=False)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def shape(mbit: float, latency_ms: float) -> None:
    """Give every node's link a bandwidth and a latency, on its way out."""
    for node in range(NODES):
        subprocess.run(f"{inside(node)} tc qdisc del dev eth0 root".split(), check=False, capture_output=True)
        burst = max(32, mbit)  # kB: what may leave at once
        do(f"{inside(node)} tc qdisc add dev eth0 root handle 1: tbf rate {mbit}mbit burst {burst}kb latency 2000ms")
        if latency_ms:
            do(f"{inside(node)} tc qdisc add dev eth0 parent 1:1 handle 10: netem delay {latency_ms}ms limit 100000")


# ---------------------------------------------------------------------------------------------------- the processes


def work(rank: int, steps: list[list[int]], output: str) -> None:
    """Make the steps in one process, and write how long they took."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://10.77.0.1:29577", rank=rank, world_size=NODES)
    tensors = [[torch.ones(size) for size in step] for step in steps]
    largest = torch.ones(max(map(max, filter(None, steps))))
    dist.all_reduce(largest)  # connections find their speed
    goodput = _goodput(rank, largest)
    dist.barrier()
    start = time.perf_counter()
    for step in tensors:
        time.sleep(STEP_S)
        for x in step:
            dist.all_reduce(x)
    seconds = time.perf_counter() - start
    dist.barrier()
    if rank == 0:
        Path(output).write_text(json.dumps([seconds, goodput]))
    dist.destroy_process_group()


def _goodput(rank: int, x: torch.Tensor) -> float:
    """Bit/s of values from process 0 to process 1: what is left of the link beside headers."""
    import torch.distributed as dist

    start = time.perf_counter()
    if rank == 0:
        dist.send(x, 1)
        dist.recv(torch.ones(1), 1)
    elif rank == 1:
        dist.recv(x, 0)
        dist.send(torch.ones(1), 0)
    return 8 * x.nbytes / (time.perf_counter() - start)


def measured(steps: list[list[int]], timeout_s: float) -> tuple[float, float]:
    """The seconds of these steps in four processes, and the bit/s of one message between two of them."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "seconds.json")
        command = [sys.executable, __file__, "--work", json.dumps([steps, str(output)])]
        running = [subprocess.Popen([*inside(rank).split(), *command, "--rank", str(rank)]) for rank in range(NODES)]
        try:
            for process in running:
                process.wait(timeout_s)
        finally:
            for process in running:
                process.kill()
        seconds, goodput = json.loads(output.read_text())
        return seconds, goodput


def compare(mbits: list[float], latencies_ms: list[float]) -> list[dict[str, Any]]:
    """Predicted and measured seconds of each strategy on each network."""
    rows = []
    for mbit in mbits:
        for latency_ms in latencies_ms:
            try:
                shape(mbit, latency_ms)
            except RuntimeError as error:
                print(f"{mbit:7g} {latency_ms:4g}  skipped: {error}", flush=True)
                continue
            for name, ledger in ledgers().items():
                rows.append(row := _compared(name, ledger, mbit, latency_ms))
                shown = " ".join(f"{row[key]:9.2f}" for key in SECONDS)
                ratio = row["measured"] / row["predicted"]
                print(f"{mbit:7g} {latency_ms:4g}  {name:12} {shown} {ratio:6.2f}", flush=True)
    return rows


def _compared(name: str, ledger: Ledger, mbit: float, latency_ms: float) -> dict[str, Any]:
    compute = Compute(STEP_S, overlap=False)
    nominal = price(ledger, Network(mbit * 1e6, latency_ms / 1e3), compute).seconds
    found, goodput = measured(messages(ledger), 60 + 10 * nominal)
    # A message alone takes a latency, and the answer another, beside its bits.
    bits = 8 * 4 * max(map(max, filter(None, messages(ledger))))
    link = min(mbit * 1e6, bits / max(1e-9, bits / goodput - 2 * latency_ms / 1e3))
    predicted = price(ledger, Network(link, latency_ms / 1e3), compute).seconds
    return {
        "Mbit/s": mbit, "ms": latency_ms, "strategy": name, "link": link / 1e6,
        "nominal": nominal, "predicted": predicted, "measured": found,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=list(MBITS))
    parser.add_argument("--latency-ms", type=float, nargs="+", default=list(LATENCIES_MS))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        steps, output = json.loads(args.work)
        work(args.rank, steps, output)
        return 0
    if reason := reason_not_to():
        print(f"Skipped: {reason}.")
        return 0
    print(f"{'Mbit/s':>7} {'ms':>4}  {'strategy':12} {' '.join(f'{key:>9}' for key in SECONDS)}  ratio")
    with namespaces():
        rows = compare(args.mbit, args.latency_ms)
    far = [row for row in rows if abs(row["measured"] / row["predicted"] - 1) > WITHIN]
    print(f"{len(rows) - len(far)} of {len(rows)} within {100 * WITHIN:g} %.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
