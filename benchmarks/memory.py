"""The error of the estimate of memory: `vecgym.estimate_memory` against the peak of a process that trains.

Each figure is of a fresh process, with one thread, that takes three steps with `Simulation.step`, or with `Trainer.fit`
where it says so. The peak is that of its resident memory, less what it was just before: then torch and vecgym were
loaded, two nodes had taken these steps, freed memory had been given back (`malloc_trim`), and the data were there. The
batch, which is in the estimate, is added.

*in use*: glibc is told to give freed memory back at once (`MALLOC_MMAP_THRESHOLD_` and others): this is what tensors
and the workspace of operations take, and what the estimate is of. *resident*: glibc as it is. It keeps freed pieces of
up to 32 MB, and its heap has gaps between them. On a GPU both are the allocator's. Linux only.

A second table has the peak of a sweep, whose configurations are one stack, against the bytes of its state, of a
gradient of all its nodes, and of their batches.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from workloads import WORKLOADS, header, machine, markdown

STRATEGIES = ("allreduce", "diloco", "demo")
CASES = [
    ("tiny", 5000, None), ("mlp", 64, None), ("mlp", 64, 8), ("cnn", 16, None), ("cnn", 64, 2),
    ("gpt", 16, None), ("gpt", 64, 4), ("gpt256", 4, None),
]  # fmt: skip
FITS = [("mlp", 64, None), ("cnn", 16, None), ("gpt", 16, None)]  # with DiLoCo
QUICK = [("mlp", 8, None)]
SWEPT, SWEPT_NODES = 64, 8  # configurations of a sweep, and the nodes of each
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "4096"}


class Peak:
    """The most resident bytes of this process, or allocated ones of a GPU, since this was made; less those before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self.before = _status("VmRSS")

    def bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else _status("VmHWM")
        return peak - self.before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def make_strategy(name: str) -> Any:
    from vecgym.strategy import AllReduceStrategy, DeMoStrategy, DiLoCoStrategy

    made: dict[str, Any] = {"allreduce": AllReduceStrategy, "diloco": lambda: DiLoCoStrategy(H=2), "demo": DeMoStrategy}
    return made[name]()


def observe(event: Any, draft: Any) -> None:
    """The work of a run in a step that an evaluation follows."""
    from vecgym.core.nodes import squared_consensus_distance

    if not event.reads:
        squared_consensus_distance(draft.params)


def take_steps(name: str, strategy: str, num_nodes: int, chunk_size: int | None, device: torch.device) -> int:
    """The peak of three steps."""
    from vecgym.collectives import StackedCollectives
    from vecgym.engine import Engine
    from vecgym.strategy.simulated import simulation_of

    workload = WORKLOADS[name]
    model, (x, y) = workload.model().to(device), workload.batch(num_nodes)
    batch = (x.to(device), y.to(device))
    peak = Peak(device)
    engine = Engine(model, chunk_size=chunk_size)
    engine.prepare(batch, mean=strategy == "allreduce")
    comm = StackedCollectives(num_nodes)
    simulation = simulation_of(model, make_strategy(strategy), comm, engine=engine, max_steps=4)
    state = simulation.init()
    for _ in range(3):
        state, _ = simulation.step(state, batch, before=observe)
    engine.close()
    return peak.bytes()


def take_fit(name: str, strategy: str, num_nodes: int, chunk_size: int | None, device: torch.device) -> int:
    """The peak of a run of four steps, with batches from a dataset of as many, and an evaluation at its end."""
    from vecgym import Trainer

    workload = WORKLOADS[name]
    data = torch.utils.data.TensorDataset(*workload.data(4 * num_nodes * workload.batch_size))
    val = torch.utils.data.Subset(data, range(workload.batch_size))
    peak = Peak(device)
    Trainer(workload.model(), data, val).fit(
        make_strategy(strategy), num_nodes, batch_size=workload.batch_size, max_steps=4, chunk_size=chunk_size,
        device=device, progress=False,
    )  # fmt: skip
    return peak.bytes()


def take_sweep(name: str, strategy: str, num_configs: int, chunk_size: int | None, device: torch.device) -> int:
    """The peak of a sweep of four steps with two evaluations, whose configurations differ in their rates."""
    from vecgym import sweep
    from vecgym.strategy import DiLoCoStrategy

    workload = WORKLOADS[name]
    data = torch.utils.data.TensorDataset(*workload.data(4 * SWEPT_NODES * workload.batch_size))
    val = torch.utils.data.Subset(data, range(workload.batch_size))
    points = [{"lr": 1e-3 * (1 + i % 8), "outer_lr": 0.3 + i / num_configs} for i in range(num_configs)]
    peak = Peak(device)
    sweep(
        workload.model(), data, val, points=points, num_nodes=SWEPT_NODES, batch_size=workload.batch_size, max_steps=4,
        strategy=lambda lr, outer_lr: DiLoCoStrategy("adamw", H=2, lr=lr, outer_lr=outer_lr), val_interval=2,
        chunk_configs=num_configs, chunk_size=chunk_size, device=device, progress=False,
    )  # fmt: skip
    return peak.bytes()


def sweep_needs(name: str, num_configs: int) -> dict[str, int]:
    """The bytes of a sweep's state, of a gradient of all its nodes, and of their batches."""
    size = sum(p.nbytes for p in WORKLOADS[name].model().parameters())
    of_nodes, of_all = 3, 2  # parameters and AdamW's moments; outer parameters and momentum
    return {
        "state": num_configs * (of_nodes * SWEPT_NODES + of_all) * size,
        "gradient": num_configs * SWEPT_NODES * size,
        "batches": num_configs * sum(x.nbytes for x in WORKLOADS[name].batch(SWEPT_NODES)),
    }


def measure_here(kind: str, name: str, strategy: str, num_nodes: int, chunk_size: int | None, device: str) -> int:
    """Measured bytes of one configuration, in this process."""
    torch.set_num_threads(1)
    take = {"fit": take_fit, "step": take_steps, "sweep": take_sweep}[kind]
    for few in (1, 2):  # torch imports much of itself when it is first used
        take(name, strategy, few, chunk_size, torch.device(device))
    measured = take(name, strategy, num_nodes, chunk_size, torch.device(device))
    batch_bytes = sum(x.nbytes for x in WORKLOADS[name].batch(1)) * num_nodes
    return measured + (batch_bytes if kind == "step" else 0)


def estimate_here(name: str, strategy: str, num_nodes: int, chunk_size: int | None, device: str) -> dict[str, float]:
    """The estimate, and the seconds of this thread that a second one takes."""
    from vecgym import estimate_memory

    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    model, one = workload.model(), tuple(x[0] for x in workload.batch(1))
    for _ in range(2):
        start = time.thread_time()
        estimate = estimate_memory(
            model, make_strategy(strategy), num_nodes, workload.batch_size, one, chunk_size=chunk_size, device=device
        )
        seconds = time.thread_time() - start
    return {"estimated": estimate.total_bytes, "seconds": seconds}


def answer(case: tuple[Any, ...], environment: Mapping[str, str] | None = None) -> Any:
    """The result of a process of its own."""
    command = [sys.executable, __file__, "--case", *[str(x or 0) for x in case]]
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(kind: str, name: str, strategy: str, num_nodes: int, chunk_size: int | None, device: str) -> dict[str, Any]:
    """A row: the estimate and both measurements, each from a process of its own."""
    case = name, strategy, num_nodes, chunk_size, device
    return {
        "kind": kind, "workload": name, "strategy": strategy, "num_nodes": num_nodes, "chunk_size": chunk_size,
        **answer(("estimate", *case)), "in_use": answer((kind, *case), GIVE_BACK), "resident": answer((kind, *case)),
    }  # fmt: skip


def measure_sweep(num_configs: int, device: str) -> dict[str, Any]:
    """A row of the second table."""
    case = "sweep", "mlp", "diloco", num_configs, None, device
    measured = {"in_use": answer(case, GIVE_BACK), "resident": answer(case)}
    return {"configurations": num_configs, **sweep_needs("mlp", num_configs), **measured}


def sweep_table(row: dict[str, Any]) -> str:
    needed = row["state"] + row["gradient"] + row["batches"]
    columns = ["state", "gradient", "batches", "in_use", "resident"]
    cells = [f"mlp, diloco, {row['configurations']} x {SWEPT_NODES}", *[f"{row[name] / 1e6:.1f}" for name in columns]]
    ratios = [f"{row[name] / needed:.2f}" for name in columns[3:]]
    names = [f"{name.replace('_', ' ')} MB" for name in columns]
    return markdown(["sweep", *names, "in use / needed", "resident / needed"], [[*cells, *ratios]])


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each configuration."""
    cells = [
        [
            f"{row['workload']}, {row['strategy']}{', fit' if row['kind'] == 'fit' else ''}", str(row["num_nodes"]),
            str(row["chunk_size"] or "-"), f"{row['estimated'] / 1e6:.1f}", f"{row['in_use'] / 1e6:.1f}",
            f"{row['estimated'] / max(1, row['in_use']):.2f}", f"{row['resident'] / 1e6:.1f}",
            f"{row['estimated'] / max(1, row['resident']):.2f}", f"{row['seconds']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["run", "K", "chunk", "estimated MB", "in use MB", "ratio", "resident MB", "ratio", "estimate s"]
    return markdown(columns, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small configuration: does it work?")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--threads", type=int, default=1, help="ignored: one thread, so that nothing is spread")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--case", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        kind, name, strategy, num_nodes, chunk_size, device = args.case
        given = name, strategy, int(num_nodes), int(chunk_size) or None, device
        print(json.dumps(estimate_here(*given) if kind == "estimate" else measure_here(kind, *given)))
        return
    torch.set_num_threads(1)
    print(header() + "\n", flush=True)
    cases = [("step", s, *case) for case in CASES for s in STRATEGIES] + [("fit", "diloco", *case) for case in FITS]
    if args.quick:
        cases = [("step", "diloco", *case) for case in QUICK]
    rows = []
    for kind, strategy, name, num_nodes, chunk_size in cases:
        rows.append(measure(kind, name, strategy, num_nodes, chunk_size, args.device))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows) + "\n", flush=True)
    swept = measure_sweep(4 if args.quick else SWEPT, args.device)
    print(sweep_table(swept))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows, "sweep": swept}, indent=2) + "\n")


if __name__ == "__main__":
    main()
