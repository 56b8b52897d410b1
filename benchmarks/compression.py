"""The cost and the error of each code: bits per value, bias, distortion, time.

A matrix of 256 x 256 values on several nodes, from three distributions: normal; with heavy tails (Student's t, three
degrees of freedom); and a movement, the normal one with rows that become a thousand times smaller from first to last.
"distortion" is E|x - C(x)|^2 / |x|^2, measured over nodes and draws, and "bound" what is proven of it. "bias" is
|E C(x) - x| / |x| of the mean of all draws, and "noise" what chance alone would make of that. "fed back" is what error
feedback leaves after 100 exchanges of the same x: |mean of what was sent - x| / |x|. A run takes a minute.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workloads import header, machine, markdown

from vecgym.collectives import StackedCollectives
from vecgym.compress import (
    E3M0,
    QSGD,
    Cast,
    Chain,
    ChunkedTopK,
    Codec,
    Natural,
    Quantise,
    RandomK,
    Sign,
    StatQuantise,
    Ternary,
    TopK,
)
from vecgym.compress.codecs import Draw
from vecgym.core import rng
from vecgym.simulation import Part
from vecgym.strategy import Compressed, Mean

Bound = Callable[[int], float]  # of the number of values


def levels(s: int, n: int) -> float:
    return min(n / s**2, math.sqrt(n) / s)


CODECS: dict[str, tuple[Codec, Bound | None]] = {
    "top-k, 1.56 %": (TopK(1 / 64), lambda n: 1 - 1 / 64),
    "64 of each 64 x 64": (ChunkedTopK(64), lambda n: 1 - 1 / 64),
    "the same, 2 bits": (Chain(ChunkedTopK(64), StatQuantise(2)), None),
    "the same, 2 bits over 12 sigma": (Chain(ChunkedTopK(64), StatQuantise(2, sigmas=12.0)), None),
    "random-k, 1.56 %": (RandomK(1 / 64), lambda n: 1 - 1 / 64),
    "random-k, 1.56 %, unbiased": (RandomK(1 / 64, unbiased=True), lambda n: 63.0),
    "int8": (Quantise(8), lambda n: n / (4 * 127**2)),
    "int4": (Quantise(4), lambda n: n / (4 * 7**2)),
    "int2": (Quantise(2), lambda n: n / 4),
    "int4, at random": (Quantise(4, stochastic=True), lambda n: n / (4 * 7**2)),
    "bins, 8 bits": (StatQuantise(8), lambda n: 1.0),
    "bins, 4 bits": (StatQuantise(4), lambda n: 1.0),
    "bins, 2 bits": (StatQuantise(2), lambda n: 1.0),
    "bfloat16": (Cast("bfloat16"), lambda n: 2.0**-16),
    "floats of 8 bits": (Cast("float8_e4m3fn"), lambda n: 2.0**-8 + n / (2**10 * 448) ** 2),
    "floats of 4 bits": (E3M0(), lambda n: min(1, 1 / 9 + n / 128**2)),
    "qsgd 7": (QSGD(7), lambda n: 1 - 1 / (1 + levels(7, n))),
    "qsgd 7, buckets of 512": (QSGD(7, bucket=512), lambda n: 1 - 1 / (1 + levels(7, 512))),
    "qsgd 7, 512, unbiased": (QSGD(7, bucket=512, unbiased=True), lambda n: levels(7, 512)),
    "ternary": (Ternary(), lambda n: 1 - 1 / (1 + (math.sqrt(n) - 1) / 2)),
    "ternary, unbiased": (Ternary(unbiased=True), lambda n: (math.sqrt(n) - 1) / 2),
    "ternary, unbiased, clipped": (Ternary(unbiased=True, clip=2.5), None),
    "natural": (Natural(), lambda n: 1 / 8),
    "sign": (Sign(), lambda n: 1 - 1 / n),
}


def values(kind: str, size: int) -> Tensor:
    """`[size, size]`, of 2-norm 1."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(size, size, generator=g)
    if kind == "heavy tails":
        x = x / (torch.randn(3, size, size, generator=g).square().mean(0)).sqrt()
    if kind == "movement":
        x = x * torch.logspace(0, -3, size)[:, None]
    return x / x.norm()


KINDS = ("normal", "heavy tails", "movement")


def draw(num_nodes: int, step: int) -> Draw:
    return Draw(functools.partial(rng.generator, 0, "benchmark", step), torch.arange(num_nodes))


def measure(codec: Codec, x: Tensor, num_nodes: int, draws: int) -> dict[str, float]:
    many, mean, distortion = x.expand(num_nodes, *x.shape), torch.zeros_like(x), 0.0
    seconds: dict[str, list[float]] = {"encode": [], "decode": []}
    for step in range(draws):
        own, start = draw(num_nodes, step), time.perf_counter()
        code = codec.encode(many, own)
        middle = time.perf_counter()
        read = codec.decode(code, many)
        seconds["encode"].append(middle - start)
        seconds["decode"].append(time.perf_counter() - middle)
        distortion += float((read - x).square().sum()) / num_nodes / draws
        mean += read.mean(0) / draws
    num_bytes = sum(part[0].nbytes for name, part in code.items() if name not in codec.shared)
    independent = draws * (1 if isinstance(codec, RandomK) else num_nodes)
    return {
        "bits": 8 * num_bytes / x.numel(),
        "distortion": distortion,
        "bias": float((mean - x).norm()),
        "noise": math.sqrt(distortion / independent),
        **{f"{what}_s": min(taken) for what, taken in seconds.items()},
    }


def fed_back(codec: Codec, x: Tensor, exchanges: int) -> float | None:
    """The distance of x from the mean of its many messages, with error feedback."""
    if not codec.contractive:
        return None
    average, total = Compressed(Mean(), codec), torch.zeros_like(x)
    values, comm = {"x": x[None]}, StackedCollectives(1)
    memory = average.memory(values, Part.alone(comm))
    for step in range(exchanges):
        total += average(values, Part.alone(comm, number=step, step=step), memory)["x"][0] / exchanges
    return float((total - x).norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, help="rows and columns (default 256)")
    parser.add_argument("--nodes", type=int, default=8, help="that draw by themselves (default 8)")
    parser.add_argument("--draws", type=int, default=12, help="of each node (default 12)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--quick", action="store_true", help="64 x 64, two nodes, four draws: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(header())
    size, num_nodes, draws, exchanges = (64, 2, 4, 5) if args.quick else (args.size, args.nodes, args.draws, 100)
    results: dict[str, dict[str, Any]] = {}
    for name, (codec, bound) in CODECS.items():
        found = {kind: measure(codec, values(kind, size), num_nodes, draws) for kind in KINDS}
        back = fed_back(codec, values("heavy tails", size), exchanges)
        results[name] = {"kinds": found, "bound": bound and bound(size * size), "fed_back": back}
    columns = ["code", "bits", *(f"distortion, {kind}" for kind in KINDS), "bound", "bias", "noise", "fed back"]
    rows = []
    for name, result in results.items():
        first = result["kinds"]["normal"]
        shown = [result["bound"], first["bias"], first["noise"], result["fed_back"]]
        measured = [result["kinds"][kind]["distortion"] for kind in KINDS]
        times = [f"{1e3 * first[key]:.2f}" for key in ("encode_s", "decode_s")]
        rows.append(
            [name, f"{first['bits']:.3f}", *("" if x is None else f"{x:.3g}" for x in (*measured, *shown)), *times]
        )
    print(markdown([*columns, "ms encode", "ms decode"], rows))
    print(f"\n{size} x {size} values, {num_nodes} nodes, {draws} draws; bias, noise and times of the normal ones.")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "codecs": results}, indent=1))


if __name__ == "__main__":
    main()
