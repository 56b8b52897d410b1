"""The rules of `Robust` against byzfl's: n vectors of a million coordinates become one.

    python -m venv PLACE && PLACE/bin/pip install torch numpy scipy && PLACE/bin/pip install --no-deps byzfl==0.0.11
    python benchmarks/aggregation.py --python PLACE/bin/python    # 4 minutes; without --python: vecgym only

Standard normal numbers in float32, the same on both sides, which have a process each for each K, with `--threads`.
byzfl takes torch tensors and numpy arrays: its figure is the faster of the two ("torch", "numpy"), or the one that is
named in `BY_NUMPY` where the other one takes minutes. Each figure is the shortest of `--repeats`. byzfl's nearest
neighbour mixing holds n (n - f) vectors, 240 GB of 256 nodes: there it is not run. "clipping" is followed by the mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workloads import header, machine, markdown

RULES = (
    "median", "trimmed mean", "krum", "multi-krum", "mda", "geometric median", "centred clipping", "clipping",
    "nnm, mean", "bucketing, median",
)  # fmt: skip
BY_NUMPY = ("median", "trimmed mean", "bucketing, median")  # of many nodes, where torch sorts or refuses
MANY = 64  # nodes, from which on byzfl's slower form is left out


def liars(rule: str, num_nodes: int) -> int:
    """A sixth of the nodes; one where all subsets are compared, and there are many."""
    return 1 if rule == "mda" and num_nodes > MANY else max(1, num_nodes // 6)


def vectors(num_nodes: int, size: int) -> Tensor:
    return torch.randn(num_nodes, size, generator=torch.Generator().manual_seed(0))


def ours(rule: str, f: int) -> Callable[[Any], Any]:
    from vecgym.strategy import Robust

    settings: dict[str, dict[str, Any]] = {
        "median": {}, "trimmed mean": {"rule": "trimmed_mean", "f": f}, "krum": {"rule": "krum", "f": f},
        "multi-krum": {"rule": "multi_krum", "f": f}, "mda": {"rule": "mda", "f": f},
        "geometric median": {"rule": "geometric_median"}, "centred clipping": {"rule": "centred_clipping"},
        "clipping": {"rule": "norm_clipping"}, "nnm, mean": {"rule": "mean", "nnm": True, "f": f},
        "bucketing, median": {"bucketing": 2},
    }  # fmt: skip
    return Robust(**settings[rule]).aggregate


def theirs(rule: str, f: int) -> Callable[[Any], Any]:
    """byzfl's; its own `__init__` would import torchvision and more."""
    if "byzfl" not in sys.modules:
        spec = importlib.util.find_spec("byzfl")
        assert spec is not None, "byzfl is not installed in this environment"
        sys.modules["byzfl"] = package = types.ModuleType("byzfl")
        package.__path__ = list(spec.submodule_search_locations or [])
    from byzfl.aggregators import aggregators, preaggregators

    mean = aggregators.Average()
    first: dict[str, Any] = {
        "clipping": preaggregators.Clipping(), "nnm, mean": preaggregators.NNM(f),
        "bucketing, median": preaggregators.Bucketing(2),
    }  # fmt: skip
    then: dict[str, Any] = {
        "median": aggregators.Median(), "trimmed mean": aggregators.TrMean(f), "krum": aggregators.Krum(f),
        "multi-krum": aggregators.MultiKrum(f), "mda": aggregators.MDA(f), "clipping": mean, "nnm, mean": mean,
        "geometric median": aggregators.GeometricMedian(), "bucketing, median": aggregators.Median(),
    }  # fmt: skip

    def agreed(x: Any) -> Any:
        if rule == "centred clipping":  # each object has its centre, at first 0
            return aggregators.CenteredClipping()(x)
        return then[rule](first[rule](x) if rule in first else x)

    return agreed


def one(side: str, num_nodes: int, size: int, repeats: int) -> dict[str, float]:
    """Seconds of each rule, in this process; `side` is vecgym, torch or numpy."""
    x: Any = vectors(num_nodes, size)
    found = {}
    for rule in RULES:
        many = num_nodes > MANY and side != "vecgym"
        if many and (rule == "nnm, mean" or (rule in BY_NUMPY) != (side == "numpy")):
            continue
        agreed = (ours if side == "vecgym" else theirs)(rule, liars(rule, num_nodes))
        seconds = []
        for _ in range(repeats):
            given = x.numpy().copy() if side == "numpy" else x.clone()  # "clipping" of byzfl changes it
            start = time.perf_counter()
            agreed(given)
            seconds.append(time.perf_counter() - start)
            del given
        found[rule] = min(seconds)
    return found


def measure(side: str, num_nodes: int, args: argparse.Namespace) -> dict[str, float]:
    """The same, in a fresh process of the side's environment."""
    python = sys.executable if side == "vecgym" else str(args.python)
    command = [python, __file__, "--one", side, str(num_nodes), str(args.size), str(args.repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, check=True, env=environment, timeout=900, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def row(rule: str, num_nodes: int, found: dict[str, dict[str, float]]) -> dict[str, Any]:
    times = {side: of_side[rule] for side, of_side in found.items() if rule in of_side}
    peer = min((side for side in times if side != "vecgym"), key=lambda side: times[side], default=None)
    ratio = None if peer is None else times[peer] / times["vecgym"]
    return {"rule": rule, "num_nodes": num_nodes, "f": liars(rule, num_nodes), "s": times, "peer": peer, "ratio": ratio}


def report(rows: list[dict[str, Any]]) -> str:
    cells = []
    for x in rows:
        theirs = "-" if x["peer"] is None else f"{1e3 * x['s'][x['peer']]:.0f} ({x['peer']})"
        ratio = ["-", "-"] if x["ratio"] is None else [f"{x['ratio']:.1f}", "yes" if x["ratio"] > 1 else "**no**"]
        cells.append([x["rule"], str(x["num_nodes"]), str(x["f"]), theirs, f"{1e3 * x['s']['vecgym']:.0f}", *ratio])
    return markdown(["rule", "K", "f", "ms: byzfl", "vecgym", "ratio", "faster"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, metavar="PATH", help="the Python of an environment with byzfl")
    parser.add_argument("--num-nodes", type=int, nargs="+", default=[16, 256], metavar="K", help="default 16 256")
    parser.add_argument("--size", type=int, default=1_000_000, help="coordinates (default a million)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default 1)")
    parser.add_argument("--repeats", type=int, default=2, help="of each rule (default 2)")
    parser.add_argument("--quick", action="store_true", help="few nodes and coordinates: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        side, *numbers = args.one
        print(json.dumps(one(side, *map(int, numbers))))
        return
    if args.quick:
        args.num_nodes, args.size, args.repeats = [7], 1000, 1
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    rows = []
    for num_nodes in args.num_nodes:
        sides = ["vecgym", *(["torch", "numpy"] if args.python else [])]
        found = {side: measure(side, num_nodes, args) for side in sides}
        rows += [row(rule, num_nodes, found) for rule in RULES]
    print("\n" + report(rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rules": rows}, indent=1))


if __name__ == "__main__":
    main()
