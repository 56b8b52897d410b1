"""The field's algorithms on a text, at equal tokens: loss, bytes, and seconds on a network of 1 Gbit/s.

A character-level GPT of 2 layers, 2 heads, width 48, context 32 (63 thousand parameters); K nodes read 4 windows each a
step, for 300 steps, with 20 steps of warm-up and a cosine to 10 %, gradients clipped at 1, rounds of H = 15 steps. Each
algorithm takes the best of three learning rates of its inner optimizer, by the validation loss of one seed, and is then
trained with three other seeds, of initial parameters and data. Outer optimizers are those of the papers. Seconds: with
50 ms of computing a step; the network has 1 Gbit/s and 10 ms, scaled so that a message takes as long as that of a model
with 100 million parameters.

At the end: findings of the papers, and whether they appear here, where differences are larger than the seeds'.

About half an hour on one core: python benchmarks/zoo.py --text tinyshakespeare.txt
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from comparison import seeded, whole
from torch import nn
from workloads import header, machine, markdown

from vecgym import OptimSpec, sweep
from vecgym.clock import Compute, Network
from vecgym.collectives.base import BUCKET_BYTES
from vecgym.collectives.ledger import readable_bytes
from vecgym.core.tree import Tree
from vecgym.data import TokenWindows, encode_text
from vecgym.data.text import read_text
from vecgym.models import GPT
from vecgym.simulation import Part, RunFacts
from vecgym.strategy import (
    AllReduceStrategy,
    Average,
    DeMoStrategy,
    DESLOCStrategy,
    EagerDiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    GossipStrategy,
    GPAStrategy,
    LocalAdamStrategy,
    Mean,
    Memory,
    MuLoCoStrategy,
    NoLoCoStrategy,
    Outer,
    PALSGDStrategy,
    SparseLoCoStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)

K, H, STEPS, WARMUP, BATCH, VAL_SIZE = 4, 15, 300, 20, 4, 96
CONTEXT, LAYERS, HEADS, WIDTH = 32, 2, 2, 48
ADAMW, MUON, SIGNS = (2e-3, 6e-3, 2e-2), (5e-3, 2e-2, 6e-2), (3e-4, 1e-3, 3e-3)
SEEDS = (1, 2, 3)
STEP_SECONDS, BANDWIDTH, LATENCY, LIKE_PARAMETERS = 0.05, 1e9, 0.01, 100e6
NESTEROV = OptimSpec("sgd", lr=0.7, momentum=0.9, nesterov=True)

Make = Callable[[Any], Strategy]


class Case(NamedTuple):
    """An algorithm: how it is made of a learning rate, and which are tried; with how many nodes."""

    make: Make
    rates: tuple[float, ...] = ADAMW
    num_nodes: int = K


def cases(H: int, steps: int, warmup: int) -> dict[str, Case]:
    """The algorithms by name."""
    inner: dict[str, Any] = {"max_norm": 1.0, "warmup_steps": warmup, "cosine_anneal": True}

    def adamw(lr: Any) -> dict[str, Any]:
        return {"inner_optim": OptimSpec("adamw", lr=lr, betas=(0.9, 0.95), weight_decay=0.1), **inner}

    def diloco(lr: Any, average: Average | None = None) -> Strategy:
        return Strategy(exchanges=[Exchange(Outer(average or Mean(), NESTEROV), every=H)], **adamw(lr))

    def streaming(**more: Any) -> Make:
        return lambda lr: StreamingDiLoCoStrategy(H=H, num_fragments=3, **{"alpha": 0.5, **more}, **adamw(lr))

    late = {f"Streaming, tau={tau}": Case(streaming(delay=tau)) for tau in (1, 5)}
    scaled = {
        f"{name}, K={n}": Case(make, rates, n)
        for name, make, rates in (
            ("DiLoCo", diloco, ADAMW),
            ("MuLoCo", lambda lr: MuLoCoStrategy(H=H, lr=lr, adamw_lr=6e-3, **inner), MUON),
        )
        for n in (1, 8)
    }
    return {
        "AllReduce": Case(lambda lr: AllReduceStrategy(**adamw(lr))),
        "FedAvg": Case(lambda lr: FedAvgStrategy(H=H, **adamw(lr))),
        "DiLoCo": Case(diloco),
        "DiLoCo, mean a round late": Case(lambda lr: diloco(lr, RoundBefore())),
        "Eager DiLoCo": Case(lambda lr: EagerDiLoCoStrategy(H=H, **adamw(lr))),
        "Streaming": Case(streaming(delay=0, alpha=0.0)),
        **late,
        "Streaming, 4 bits": Case(streaming(delay=0, alpha=0.0, bits=4)),
        "SparseLoCo": Case(lambda lr: SparseLoCoStrategy(H=H, **adamw(lr))),
        "MuLoCo": Case(lambda lr: MuLoCoStrategy(H=H, lr=lr, adamw_lr=6e-3, **inner), MUON),
        **scaled,
        "GPA": Case(lambda lr: GPAStrategy(**adamw(lr))),
        "NoLoCo": Case(lambda lr: NoLoCoStrategy(H=H, **adamw(lr))),
        "Local Adam": Case(lambda lr: LocalAdamStrategy(H=H, **adamw(lr))),
        "DES-LOC": Case(lambda lr: DESLOCStrategy(H=H, **adamw(lr))),
        "PALSGD": Case(lambda lr: PALSGDStrategy(H=H, **adamw(lr))),
        "SPARTA": Case(lambda lr: SPARTAStrategy(0.01, **adamw(lr))),
        "SPARTA + DiLoCo": Case(lambda lr: SPARTADiLoCoStrategy(0.01, H=H, **adamw(lr))),
        "Gossip, ring": Case(lambda lr: GossipStrategy("ring", **adamw(lr))),
        "DeMo": Case(lambda lr: DeMoStrategy(lr=lr, **inner), SIGNS),
    }


class RoundBefore(Average):
    """The mean of the round before: the naive way to let the exchange last as long as a round. At first 0."""

    overlaps = True

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        memory.shared["last"] = values

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        last: Tree = memory.shared["last"]
        memory.shared["last"] = part.comm.mean(x)
        return last


@dataclass
class Result:
    """The outcome of an algorithm."""

    num_nodes: int
    rate: float
    tried: dict[float, float | None]  # rate -> validation loss
    losses: list[float]  # of the seeds
    sent_bytes: float
    seconds: float

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.losses) if len(self.losses) > 1 else 0.0


def trained(case: Case, data: tuple[Any, Any], build: Callable[[int], nn.Module], args: argparse.Namespace) -> Result:
    """Choose the learning rate, then train with each seed."""
    P = sum(p.numel() for p in build(0).parameters())
    common: dict[str, Any] = {
        "num_nodes": case.num_nodes, "max_steps": args.steps, "batch_size": BATCH, "val_size": VAL_SIZE,
        "val_interval": args.steps, "device": "cpu", "progress": False,
    }  # fmt: skip
    search = sweep(build(0), *data, strategy=case.make, grid={"lr": list(case.rates)}, seed=0, **common)
    tried = {row["lr"]: row["val_loss"] for row in whole(search).rows}
    rate = min((lr for lr, loss in tried.items() if loss is not None and loss == loss), key=lambda lr: tried[lr])
    # A message of this model takes as long as one of a model with LIKE_PARAMETERS does at BANDWIDTH.
    scale = P / LIKE_PARAMETERS
    network = Network(BANDWIDTH * scale, latency=LATENCY, bucket_bytes=BUCKET_BYTES * scale)
    runs = sweep(
        lambda seed: build(seed), *data, strategy=case.make(rate), grid={"seed": list(args.seeds)}, network=network,
        compute=Compute(STEP_SECONDS), **common,
    )  # fmt: skip
    return Result(
        case.num_nodes, rate, tried, [row["val_loss"] for row in whole(runs).rows], runs.rows[0]["bytes_total"],
        runs.rows[0]["sim_seconds"],
    )  # fmt: skip


def findings(found: Mapping[str, Result]) -> list[list[str]]:
    """The findings of the papers: the two sides, their difference, and yes or no."""

    def compared(a: str, b: str) -> tuple[float, float]:
        """The difference of the losses, and its standard error over the seeds."""
        x, y = found[a], found[b]
        return x.mean - y.mean, ((x.spread**2 + y.spread**2) / len(x.losses)) ** 0.5

    rows = []
    about_equal = [
        ("Streaming about equals DiLoCo", "Streaming", "DiLoCo"),
        ("overlap costs little at tau = 1", "Streaming, tau=1", "Streaming"),
        ("overlap costs little at tau = 5", "Streaming, tau=5", "Streaming"),
        ("4-bit outer gradients lose nothing", "Streaming, 4 bits", "Streaming"),
    ]
    for claim, a, b in about_equal:
        if a in found and b in found:
            difference, error = compared(a, b)
            rows.append([claim, f"{difference:+.3f} ± {error:.3f}", "yes" if difference < 0.02 + 2 * error else "no"])
    if {"Eager DiLoCo", "DiLoCo, mean a round late"} <= set(found):
        difference, error = compared("Eager DiLoCo", "DiLoCo, mean a round late")
        rows.append(
            ["eager beats naive delay", f"{difference:+.3f} ± {error:.3f}", "yes" if difference < -2 * error else "no"]
        )
    if {"DiLoCo, K=1", "DiLoCo, K=8", "MuLoCo, K=1", "MuLoCo, K=8"} <= set(found):
        (own, e1), (other, e2) = compared("MuLoCo, K=8", "MuLoCo, K=1"), compared("DiLoCo, K=8", "DiLoCo, K=1")
        error = (e1**2 + e2**2) ** 0.5
        shown = f"{own - other:+.3f} ± {error:.3f}"
        rows.append(
            [
                "MuLoCo degrades less with K (8 against 1) than DiLoCo",
                shown,
                "yes" if own - other < -2 * error else "no",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, metavar="FILE", help="Tiny Shakespeare, or any other text")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the algorithms, by name, in place of all")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--quick", action="store_true", help="few steps of a small model, one seed: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    context, width, interval, warmup, args.seeds = CONTEXT, WIDTH, H, WARMUP, SEEDS
    if args.quick:
        context, width, interval, warmup, args.steps, args.seeds = 16, 16, 6, 2, 12, SEEDS[:1]
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    start = time.perf_counter()

    tokens, vocabulary = encode_text(read_text(args.text))
    split = int(0.9 * len(tokens))
    data = TokenWindows(tokens[:split], context), TokenWindows(tokens[split:], context)
    every = cases(interval, args.steps, warmup)
    if args.only and set(args.only) - set(every):
        parser.error(f"--only takes some of {', '.join(map(repr, every))}")

    def build(seed: int) -> nn.Module:
        return seeded(seed, lambda: GPT(len(vocabulary), context, LAYERS, HEADS, width))

    found: dict[str, Result] = {}
    for name in args.only or every:
        began = time.perf_counter()
        found[name] = trained(every[name], data, build, args)
        print(
            f"{name}: {found[name].mean:.3f}, rates {found[name].tried}, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        if args.json:
            of_each = {each: vars(x) for each, x in found.items()}
            args.json.write_text(json.dumps({"machine": machine(), "algorithms": of_each}, indent=1))
    rows = [
        [
            name,
            str(x.num_nodes),
            f"{x.rate:g}",
            f"{x.mean:.3f} ± {x.spread:.3f}",
            readable_bytes(x.sent_bytes),
            f"{x.seconds:.0f}",
        ]
        for name, x in found.items()
    ]
    print("\n" + markdown(["algorithm", "K", "rate", "validation loss", "sent per node", "seconds"], rows))
    print("\n" + markdown(["finding", "difference", "here"], findings(found)))
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
