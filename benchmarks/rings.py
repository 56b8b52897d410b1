"""The error of a mean whose sums are rounded, too: once encoded, at every hop of a ring, twice.

Each node has a matrix of 256 x 512 values. *unrelated*: normal numbers of each node by itself, as noisy gradients;
*alike*: the same normal numbers on all nodes, and a tenth of their size of each node's own, as movements. The error is
|found - mean| / |mean| with the mean in float64. "once" is `Compressed(Mean(), codec, error_feedback=False)`, "hops" is
`Ring(codec)`, "twice" is `AllToAll(codec)`; PRIME's is `QuantisedRing()`. "growth" is the slope of the error's
logarithm against that of K, from 8 nodes on: 0.5 is a square root. A run takes a minute.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor
from workloads import header, machine, markdown

from vecgym.collectives import StackedCollectives
from vecgym.simulation import Part
from vecgym.strategy import AllToAll, Average, Compressed, Mean, QuantisedRing, Ring

CODECS = {"bfloat16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}
NODES = (2, 4, 8, 16, 32, 64, 128, 256)
SIZE = (256, 512)
KINDS = ("unrelated", "alike")

Errors = dict[str, list[float]]  # way -> the error for each number of nodes


def values(kind: str, num_nodes: int, size: tuple[int, int]) -> Tensor:
    g = torch.Generator().manual_seed(num_nodes)
    own = torch.randn(num_nodes, *size, generator=g)
    return own if kind == "unrelated" else torch.randn(*size, generator=g) + own / 10


def ways(codec: str) -> dict[str, Average]:
    found: dict[str, Average] = {
        "once": Compressed(Mean(), codec, error_feedback=False), "hops": Ring(codec), "twice": AllToAll(codec),
    }  # fmt: skip
    return found | ({"PRIME": QuantisedRing()} if codec == "int8" else {})


def error(how: Average, x: Tensor, exact: Tensor) -> float:
    (found,) = how({"x": x}, Part.alone(StackedCollectives(len(x))))["x"]
    return float((found - exact).norm() / exact.norm())


def growth(errors: list[float], nodes: tuple[int, ...]) -> float:
    """The slope of the logarithms, by least squares.

    >>> round(growth([1.0, 2.0, 4.0], (8, 32, 128)), 3)
    0.5
    """
    points = [(math.log(K), math.log(e)) for K, e in zip(nodes, errors) if K >= 8]
    x, y = (sum(column) / len(points) for column in zip(*points))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def measure(kind: str, nodes: tuple[int, ...], size: tuple[int, int]) -> dict[str, Errors]:
    found: dict[str, Errors] = {name: {way: [] for way in ways(codec)} for name, codec in CODECS.items()}
    for K in nodes:
        x = values(kind, K, size)
        exact = x.double().mean(0)
        for name, codec in CODECS.items():
            for way, how in ways(codec).items():
                found[name][way].append(error(how, x, exact))
    return found


def draw(results: dict[str, dict[str, Errors]], nodes: tuple[int, ...], path: Path) -> None:
    """A row for each kind of values, and a panel for each code: the errors against the number of nodes."""
    from figures import WIDTH, save
    from matplotlib.figure import Figure

    from vecgym.plot.style import COLOURS, MARKERS, finish

    labels = {
        "once": "encoded once", "hops": "at every hop (Ring)", "twice": "twice (AllToAll)", "PRIME": "QuantisedRing",
    }  # fmt: skip
    figure = Figure(layout="constrained")
    grid, handles = figure.subplots(len(results), len(CODECS), sharex=True, sharey="row"), {}
    for row, (kind, found) in zip(grid, results.items()):
        for axes, (name, errors) in zip(row, found.items()):
            for i, (way, of_nodes) in enumerate(errors.items()):
                (handles[labels[way]],) = axes.plot(nodes, of_nodes, color=COLOURS[i], marker=MARKERS[i], markersize=5)
            root = [errors["once"][0] * math.sqrt(K / 2) for K in nodes]
            if kind == "unrelated":
                (handles["$\\sqrt{K / 2}$ times once"],) = axes.plot(nodes, root, color="0.5", linestyle=":")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(nodes, [str(K) for K in nodes])
            last, first = row is grid[-1], axes is row[0]
            finish(axes, f"{name}, {kind} values", "nodes K" if last else "", "error of the mean" if first else "")
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside lower center", ncols=5, fontsize=9)
    save(path, [(figure, (WIDTH, 560))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--quick", action="store_true", help="few nodes and values: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the errors there (PNG)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    nodes, size = ((2, 8, 16), (16, 40)) if args.quick else (NODES, SIZE)
    results = {kind: measure(kind, nodes, size) for kind in KINDS}
    rows = [
        [kind, name, way, *(f"{e:.1e}" for e in errors), f"{growth(errors, nodes):.2f}"]
        for kind, found in results.items() for name, of_ways in found.items() for way, errors in of_ways.items()
    ]  # fmt: skip
    print("\n" + markdown(["values", "code", "encoded", *(f"K = {K}" for K in nodes), "growth"], rows))
    if args.plot:
        draw(results, nodes, args.plot)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "nodes": nodes, "errors": results}, indent=1))


if __name__ == "__main__":
    main()
