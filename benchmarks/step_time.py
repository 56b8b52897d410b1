"""Time of one training step: vecgym against what one would write instead, and against what the machine can do.

For every workload each alternative runs in a process of its own, and they take turns (A B C, B C A, ...); a ratio is
that of the medians over the rounds. A turn is a block of H = 20 steps, which holds one synchronisation of DiLoCo.

- loop: K plain modules, each with fused AdamW, one after the other; every H steps DiLoCo's outer step in the obvious
  way. big: one model with fused AdamW on the K batches together. These processes do not import vecgym.
- fit: `Trainer.fit` with `DiLoCoStrategy(H)` on a `TensorDataset`, with history, ledger and progress bar (into
  nothing), without validation; fit vmap: with `engine="vmap"`, without recorded operations; fit allreduce: with
  `AllReduceStrategy`; with `--compile`, fit compiled: with `compile=True`. Timed from the first multiple of H steps to
  the last, so that what it costs to start is not counted; that is what "start" says, from the call to the first row.
- fit short epochs: with a dataset of four steps an epoch, where the others have 20.
- bare, bare allreduce: the simulation's step alone. With `--engines`, also each engine with 1 and with all threads.
- beside: the loop in a process where a vecgym engine with its node threads is alive and idle.
- floor: what the processor needs at least for K separate models (for AllReduce: one): the larger of arithmetic / rate
  of a large matrix product, and bytes / bandwidth of a copy, both measured as one of the alternatives.

loop and big cycle through the same few batches, which is a little less work than a fit's shuffled ones. All workloads
together take about twelve minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from plain import LR, Big, Loop
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from turns import Turns, serve, take_turns
from workloads import WORKLOADS, Batch, Workload, header, machine, markdown

NUM_BATCHES = 20
# Lower bounds for "times faster than the loop", upper bounds for the others; measured with 2 threads.
FASTER = {"tiny": 90, "mlp": 3.1, "cnn": 1.6, "gpt": 1.6, "gpt256": 1.12}
COMPILED = {"tiny": 130, "gpt": 2, "gpt256": 1.2}
TO_VMAP = {("tiny", 8): 1.35, ("tiny", 512): 1.15}  # times faster than with engine="vmap"; others: not slower
NOT_SLOWER = 1 / 1.02
TO_BIG = {"tiny": 1.25, "mlp": 1.1, "cnn": 1.1, "gpt": 1.1, "gpt256": 1.1}
TO_FLOOR = {"mlp": 1.2}
TO_BARE_STEP = 1.1
BESIDE = 1.05
LATER_START = "start of fit - of fit vmap, ms"
TO_START_MS = 50
FIT_BLOCKS = {"tiny": 6, "mlp": 6, "cnn": 3, "gpt": 3, "gpt256": 2}  # of H steps, the first of which is not measured

Work = Callable[[], Mapping[str, float] | None]

# --------------------------------------------------------------------------------------- in a process of its own


def blocks_of(step: Callable[[Batch], object], workload: Workload, num_nodes: int, H: int) -> Work:
    """Blocks of H steps on a few batches, again and again."""
    batches = [workload.batch(num_nodes, seed) for seed in range(NUM_BATCHES)]

    def work() -> dict[str, float]:
        start = time.perf_counter()
        for batch in itertools.islice(itertools.cycle(batches), H):
            step(batch)
        return {"seconds": (time.perf_counter() - start) / H}

    return work


def serve_loop(workload: Workload, num_nodes: int, H: int) -> None:
    serve(blocks_of(Loop(workload, num_nodes, H), workload, num_nodes, H))


def serve_big(workload: Workload, num_nodes: int, H: int) -> None:
    serve(blocks_of(Big(workload), workload, num_nodes, H))


def make_strategy(name: str, H: int) -> Any:
    from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy

    return DiLoCoStrategy("adamw", H=H, lr=LR) if name == "diloco" else AllReduceStrategy("adamw", lr=LR)


class Bare:
    """vecgym's own step, `simulation_of(...).step`."""

    def __init__(self, workload: Workload, num_nodes: int, strategy: Any, **engine: Any) -> None:
        from vecgym.collectives import StackedCollectives
        from vecgym.engine import Engine
        from vecgym.strategy.simulated import simulation_of

        model = workload.model()
        self.engine = Engine(model, **engine)
        self.plan = self.engine.prepare(workload.batch(num_nodes), mean=strategy.mean_gradient)
        self.simulation = simulation_of(
            model, strategy, StackedCollectives(num_nodes), engine=self.engine, max_steps=10**6
        )
        self.state = self.simulation.init()

    def __call__(self, batch: Batch) -> None:
        self.state, _ = self.simulation.step(self.state, batch)

    def state_bytes(self) -> int:
        """The bytes of all that evolves, DiLoCo's outer parameters included."""
        from vecgym.core import tree

        return tree.num_bytes([self.state.own, self.state.shared])


def serve_bare(
    workload: Workload, num_nodes: int, H: int, strategy: str, engine: str = "auto", node_threads: str | None = None
) -> None:
    threads = None if node_threads is None else int(node_threads)
    bare = Bare(workload, num_nodes, make_strategy(strategy, H), engine=engine, node_threads=threads)
    work = blocks_of(bare, workload, num_nodes, H)
    serve(work, plan=str(bare.plan), state_bytes=bare.state_bytes())


def serve_beside(workload: Workload, num_nodes: int, H: int) -> None:
    """The loop, next to a live engine that has its node threads."""
    alive = Bare(workload, num_nodes, make_strategy("diloco", H), engine="vmap", node_threads=torch.get_num_threads())
    alive(workload.batch(num_nodes))
    serve(blocks_of(Loop(workload, num_nodes, H), workload, num_nodes, H), plan=str(alive.plan))


def serve_fit(workload: Workload, num_nodes: int, H: int, strategy: str, steps: str, how: str = "") -> None:
    """Whole fits; the time per step from the first synchronisation to the last."""
    from vecgym import Trainer

    class Timed(Trainer):
        def after_step(self, row: dict[str, Any]) -> None:
            if row["step"] in marks:
                marks[row["step"]] = time.perf_counter()

    marks = {0: 0.0, H: 0.0, int(steps): 0.0}
    steps_per_epoch = 4 if how == "short epochs" else NUM_BATCHES
    trainer = Timed(workload.model(), TensorDataset(*workload.data(num_nodes * workload.batch_size * steps_per_epoch)))

    def work() -> dict[str, float]:
        called = time.perf_counter()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            trainer.fit(
                make_strategy(strategy, H), num_nodes, max_steps=int(steps), batch_size=workload.batch_size,
                device="cpu", compile=how == "compiled", engine="vmap" if how == "vmap" else "auto",
            )  # fmt: skip
        return {"seconds": (marks[int(steps)] - marks[H]) / (int(steps) - H), "start": marks[0] - called}

    serve(work)


def serve_rates(workload: Workload, num_nodes: int, H: int) -> None:
    """The rates of the processor: products of large matrices, and copies."""
    x, y = torch.randn(2, 1024, 1024).unbind()
    source = torch.randn(2**25)  # 128 MiB: more than any cache
    target = torch.empty_like(source)

    def timed(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def work() -> dict[str, float]:
        gemm_s = min(timed(lambda: x @ y) for _ in range(10))
        copy_s = min(timed(lambda: target.copy_(source)) for _ in range(5))
        return {"flop_per_s": 2 * 1024**3 / gemm_s, "bytes_per_s": 2 * source.nbytes / copy_s}

    serve(work, **floor_counts(workload))


def floor_counts(workload: Workload) -> dict[str, int]:
    """The least that one node needs for a step: FLOP of forward and backward pass, and bytes to and from memory.

    Of each parameter's 4 bytes: read in the forward and in the backward pass, its gradient written, then AdamW reads
    parameter, gradient and two moments and writes three: 10 times. Activations, inputs and outer steps are left out.
    """
    model = workload.model()
    x, y = workload.batch(1)
    with FlopCounterMode(display=False) as counter:
        model((x[0], y[0])).backward()
    return {"flop": counter.get_total_flops(), "bytes": 10 * sum(p.nbytes for p in model.parameters())}


SERVERS: dict[str, Callable[..., None]] = {
    "loop": serve_loop,
    "big": serve_big,
    "bare": serve_bare,
    "beside": serve_beside,
    "fit": serve_fit,
    "rates": serve_rates,
}


# ---------------------------------------------------------------------------------------------------- in the parent


def commands(
    name: str, num_nodes: int, H: int, steps: int, engines: list[tuple[str, int]], compiled: bool
) -> dict[str, list[str]]:
    """The command of each alternative."""

    def command(server: str, *more: Any) -> list[str]:
        return [str(Path(__file__).resolve()), "--serve", server, name, str(num_nodes), str(H), *map(str, more)]

    return {
        "loop": command("loop"),
        "fit": command("fit", "diloco", steps),
        "fit short epochs": command("fit", "diloco", steps, "short epochs"),
        "fit vmap": command("fit", "diloco", steps, "vmap"),
        "bare": command("bare", "diloco"),
        "big": command("big"),
        "fit allreduce": command("fit", "allreduce", steps),
        "bare allreduce": command("bare", "allreduce"),
        "beside": command("beside"),
        "rates": command("rates"),
        **({"fit compiled": command("fit", "diloco", steps, "compiled")} if compiled else {}),
        **{f"bare {engine} x{threads}": command("bare", "diloco", engine, threads) for engine, threads in engines},
    }


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every alternative on one workload: milliseconds per step, floors, ratios, plans, bytes."""
    workload = WORKLOADS[name]
    num_nodes = args.nodes or workload.num_nodes
    num_nodes, H = (min(num_nodes, 4), 2) if args.quick else (num_nodes, 20)
    counts = sorted({1, args.threads})
    engines = [(engine, count) for engine in ("vmap", "loop") for count in counts] if args.engines else []
    steps = H * (2 if args.quick else FIT_BLOCKS[name])
    budget_s = 0 if args.quick else args.seconds
    turns = take_turns(commands(name, num_nodes, H, steps, engines, args.compile), budget_s, args.threads)
    assert not any(turns.info[plain]["vecgym"] for plain in ("loop", "big"))
    timed = [alternative for alternative in turns.info if alternative != "rates"]
    ms = {alternative: 1e3 * turns.median(alternative) for alternative in timed}
    ms |= floors(turns, num_nodes)
    started = {fit: 1e3 * turns.median(fit, "start") for fit in ("fit", "fit vmap", "fit allreduce")}
    return {
        "num_nodes": num_nodes,
        "ms": ms,
        "ratios": ratios(ms) | {LATER_START: started["fit"] - started["fit vmap"]},
        "start_ms": started,
        "rates": turns.info["rates"] | {rate: turns.median("rates", rate) for rate in ("flop_per_s", "bytes_per_s")},
        "plans": {alternative: info["plan"] for alternative, info in turns.info.items() if "plan" in info},
        "state_bytes": {name: turns.info[name]["state_bytes"] for name in ("bare", "bare allreduce")},
        "notes": turns.notes(),
        "seconds_per_step": {alternative: turns.all(alternative) for alternative in timed},
    }  # fmt: skip


def floors(turns: Turns, num_nodes: int) -> dict[str, float]:
    """Milliseconds that a step of K separate models, and of one, takes at least."""
    counts = turns.info["rates"]
    arithmetic_s = num_nodes * counts["flop"] / turns.median("rates", "flop_per_s")
    copy_s = counts["bytes"] / turns.median("rates", "bytes_per_s")
    return {"floor": 1e3 * max(arithmetic_s, num_nodes * copy_s), "floor allreduce": 1e3 * max(arithmetic_s, copy_s)}


def ratios(ms: dict[str, float]) -> dict[str, float]:
    compiled = {"loop / fit compiled": ms["loop"] / ms["fit compiled"]} if "fit compiled" in ms else {}
    return {
        "loop / fit": ms["loop"] / ms["fit"],
        "fit vmap / fit": ms["fit vmap"] / ms["fit"],
        "fit / floor": ms["fit"] / ms["floor"],
        "fit / big": ms["fit"] / ms["big"],
        "fit allreduce / big": ms["fit allreduce"] / ms["big"],
        "fit allreduce / floor": ms["fit allreduce"] / ms["floor allreduce"],
        "fit / bare": ms["fit"] / ms["bare"],
        "fit short epochs / bare": ms["fit short epochs"] / ms["bare"],
        "beside / loop": ms["beside"] / ms["loop"],
        **compiled,
    }


def targets(workload: str, num_nodes: int) -> dict[str, float]:
    """The least of the first ratios, and the most of the others."""
    found = {
        "loop / fit": FASTER[workload], "fit vmap / fit": TO_VMAP.get((workload, num_nodes), NOT_SLOWER),
        "fit allreduce / big": TO_BIG[workload], "fit / bare": TO_BARE_STEP, "fit short epochs / bare": TO_BARE_STEP,
        "beside / loop": BESIDE, LATER_START: TO_START_MS,
    }  # fmt: skip
    if workload in COMPILED:
        found["loop / fit compiled"] = COMPILED[workload]
    return found | ({"fit / floor": TO_FLOOR[workload]} if workload in TO_FLOOR else {})


def judged(workload: str, num_nodes: int, measured: dict[str, float]) -> list[list[str]]:
    """Rows of a table: ratio, target, measured, met."""
    rows = []
    for ratio, value in measured.items():
        target = targets(workload, num_nodes).get(ratio)
        if target is None:
            rows.append([f"{workload}: {ratio}", "", f"{value:.2f}", ""])
        else:
            at_least = ratio.startswith(("loop / fit", "fit vmap"))
            met = value >= target if at_least else value <= target
            asked = f"{'>=' if at_least else '<='} {target:.3g}"
            rows.append([f"{workload}: {ratio}", asked, f"{value:.2f}", "yes" if met else "**no**"])
    return rows


def report(results: dict[str, dict[str, Any]]) -> str:
    """Tables of ratios and of milliseconds, plans, and how the floors come about."""
    rows = [row for name, result in results.items() for row in judged(name, result["num_nodes"], result["ratios"])]
    names = list(next(iter(results.values()))["ms"])
    figures = [
        [f"{name} K={result['num_nodes']}", *[f"{result['ms'][column]:.2f}" for column in names]]
        for name, result in results.items()
    ]
    plans = [
        f"- {name}, {which}: {plan}" for name, result in results.items() for which, plan in result["plans"].items()
    ]
    return "\n\n".join(
        [
            markdown(["ratio, or difference", "target", "measured", "met"], rows),
            "ms per step (median):\n\n" + markdown(["workload", *names], figures),
            "Floors:\n\n" + "\n".join(f"- {name}: {floor_in_words(result)}" for name, result in results.items()),
            "Plans:\n\n" + "\n".join(plans),
            "\n".join(f"- {name}: {result['notes']}" for name, result in results.items()),
        ]
    )


def floor_in_words(result: dict[str, Any]) -> str:
    rates = result["rates"]
    return (
        f"{result['num_nodes']} x {rates['flop'] / 1e6:.3g} MFLOP at {rates['flop_per_s'] / 1e9:.0f} GFLOP/s, "
        f"{result['num_nodes']} x {rates['bytes'] / 1e6:.3g} MB (10 x 4 bytes a parameter) at "
        f"{rates['bytes_per_s'] / 1e9:.1f} GB/s"
    )


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        server, name, num_nodes, H, *more = sys.argv[2:]
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return SERVERS[server](WORKLOADS[name], int(num_nodes), int(H), *more)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="NAME",
                        help=f"any of {', '.join(WORKLOADS)}; default: all")  # fmt: skip
    parser.add_argument("--nodes", type=int, metavar="K", help="nodes, in place of each workload's own number")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--engines", action="store_true", help="measure each engine, not only the chosen one")
    parser.add_argument("--compile", action="store_true", help="measure compile=True too, which compiles for minutes")
    parser.add_argument("--seconds", type=float, default=120, help="about how long for each workload (default 120)")
    parser.add_argument("--quick", action="store_true", help="few nodes, short blocks, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    results: dict[str, dict[str, Any]] = {}
    for name in args.workloads:
        results[name] = measure(name, args)
        shown = ", ".join(f"{what} {value:.2f}" for what, value in results[name]["ms"].items())
        print(f"{name}: ms per step: {shown}; {results[name]['notes']}", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"machine": machine(), "workloads": results}, indent=1))
    print("\n" + report(results))


if __name__ == "__main__":
    main()
