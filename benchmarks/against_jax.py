"""vecgym against the program that one would write in JAX: DiLoCo of K nodes, and a sweep of it.

    python benchmarks/against_jax.py --python PATH    # an interpreter that has jax and optax; without: one is made

`in_jax.py` has the program. Both sides train the same from the same initial parameters, which is checked: losses of a
few nodes in float64 agree to 1e-7, in some steps and exchanges, and those of the timed programs, in float32, to 1e-4.
Then processes take turns, and a ratio is that of the medians.

- vecgym: `Trainer.fit` on a `TensorDataset`, with history and ledger, as in `step_time.py`; or `vecgym.sweep` without a
  validation set, from a sixth of the steps to the last. With `--compile`, and always in the sweep, also `compile=True`.
- JAX: a jitted step of all nodes, with a batch from the host, and every H steps a call for the exchange.
- JAX, scan: one call for H steps and the exchange, with all examples on the device; a sweep is a single call, with all
  batches there beforehand. Losses come back at its end: there is no evaluation, no history of anything else, and
  nothing that could look on, log, stop or resume in between.

"start" is what comes before the steps: compiling in JAX; a fit's time to its first row; what a sweep takes beside its
steps. "catches up" is the number of steps after which JAX's scan, started at the same time, is ahead. JAX's
convolutions are those that it is fastest with on a CPU (see `in_jax.py`). All cases take about eight minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from plain import LR
from step_time import FIT_BLOCKS
from torch.utils.data import TensorDataset
from turns import Alternative, Turns, serve, take_turns
from workloads import WORKLOADS, header, machine, markdown

HERE = Path(__file__).resolve()
VERSIONS = ["jax==0.10.2", "jaxlib==0.10.2", "optax==0.2.8"]
# Of losses, relative. JAX's attention has a softmax in float32, whatever it is given; else float64 agrees to 1e-15.
TOLERANCE = {"float64": 1e-7, "float32": 1e-4}
ON_CPU = {"JAX_PLATFORMS": "cpu"}
JAX = {"JAX": "steps", "JAX, scan": "rounds"}  # as `in_jax.py` names its forms


class Case(NamedTuple):
    """A workload of `workloads.py` with some nodes; or, without a number of them, the sweep."""

    workload: str
    num_nodes: int | None = None


CASES = {
    "tiny": Case("tiny", 512),
    "tiny, K = 8": Case("tiny", 8),
    "mlp": Case("mlp", 64),
    "cnn": Case("cnn", 16),
    "gpt": Case("gpt", 16),
    "sweep": Case("tiny"),
}

# ----------------------------------------------------------------------------------------- vecgym, in other processes


def write_fit(file: str, dtype: str, name: str, num_nodes: str, H: str) -> None:
    """Train two rounds; write the losses, and what another program needs to train the same."""
    from vecgym import Trainer
    from vecgym.data import Batches
    from vecgym.strategy import DiLoCoStrategy

    workload, K, num_steps = WORKLOADS[name], int(num_nodes), 2 * int(H)
    model, x, y = cast(dtype, workload.model(), *workload.data(K * workload.batch_size * 20))  # as `step_time.py`
    order = Batches(torch.arange(len(x)), K, workload.batch_size).iterate(0, num_steps)
    trainer = Trainer(model, TensorDataset(x, y))
    trainer.fit(
        DiLoCoStrategy("adamw", H=int(H), lr=LR), K, max_steps=num_steps, batch_size=workload.batch_size,
        device="cpu", progress=False,
    )  # fmt: skip
    losses = trainer.history["train_loss"][-num_steps:]
    write(file, model, x=x, y=y.int(), order=torch.stack(list(order)), losses=torch.tensor(losses, dtype=torch.float64))


class Swept:
    """`vecgym.sweep` of what `sweep.py` sweeps, without a validation set."""

    def __init__(self, dtype: str, which: str, compiled: bool = False) -> None:
        from sweep import CASES as SWEEPS
        from sweep import EXAMPLES, Setting

        setting, workload = Setting(SWEEPS["tiny"], quick=which == "quick"), WORKLOADS["tiny"]
        self.model, self.x, self.y = cast(dtype, workload.model(), *workload.data(EXAMPLES[0]))
        self.num_steps = 60 if dtype == "float64" else setting.common["max_steps"]
        self.compared = min(60, self.num_steps)  # after every H; later float32 differs by its rounding alone
        self.configs, self.batch_size, self.compiled = setting.configs, workload.batch_size, compiled

    def __call__(self) -> dict[str, Any]:
        """Seconds of a step and of all else, and the losses of all configurations in the step that is compared."""
        from sweep import STRATEGIES, K

        from vecgym import sweep

        start = time.perf_counter()
        result = sweep(
            self.model, TensorDataset(self.x, self.y), strategy=STRATEGIES["diloco"], points=self.configs, num_nodes=K,
            max_steps=self.num_steps, batch_size=self.batch_size, device="cpu", progress=False, compile=self.compiled,
        )  # fmt: skip
        whole = time.perf_counter() - start
        clock, early = result.history(0)["seconds"], max(1, self.num_steps // 6)
        step_s = (clock[-1] - clock[early - 1]) / (self.num_steps - early)
        losses = [result.history(i)["train_loss"][self.compared - 1] for i in range(len(self.configs))]
        return {"seconds": step_s, "start": whole - step_s * self.num_steps, "losses": losses}

    def write(self, file: str) -> None:
        """Write what another program needs to train the same, and the losses."""
        from sweep import K

        from vecgym.data import Batches

        examples = torch.arange(len(self.x))
        of_seeds = [Batches(examples, K, self.batch_size, seed=seed).iterate(0, self.num_steps) for seed in (0, 1)]
        order = torch.stack([torch.stack(each) for each in zip(*of_seeds)])
        axes = {axis: torch.from_numpy(np.array([c[axis] for c in self.configs])) for axis in self.configs[0]}
        losses = torch.tensor(self()["losses"], dtype=torch.float64)
        axes["compared"] = torch.tensor(self.compared)
        write(file, self.model, x=self.x, y=self.y.int(), order=order, losses=losses, **axes)


def cast(dtype: str, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Return the model and the examples in float64, if asked."""
    if dtype == "float32":
        return model, x, y
    return model.double(), x.double() if x.is_floating_point() else x, y


def write(file: str, model: torch.nn.Module, **arrays: torch.Tensor) -> None:
    named = {f"param {key}": p.detach() for key, p in model.named_parameters()}
    np.savez(file, **{key: x.numpy() for key, x in (arrays | named).items()})  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- in the parent


@contextlib.contextmanager
def interpreter(given: str | None) -> Iterator[str]:
    """Yield an interpreter that has jax and optax: the one given, or one of a temporary environment."""
    if given is not None:
        check = subprocess.run([given, "-c", "import jax, optax"], capture_output=True, text=True)
        if check.returncode != 0:
            raise SystemExit(f"--python {given} cannot import jax and optax:\n{check.stderr}")
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        print(f"installing {', '.join(VERSIONS)} into a temporary environment", flush=True)
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        subprocess.run([python, "-m", "pip", "install", "-q", *VERSIONS], check=True)
        yield python


def measure(name: str, python: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per step of all alternatives, what comes before the steps, and how far the losses are apart."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "given.npz"))
        checked = commands_of(CASES[name], "float64", file, args)
        gaps = {"float64": {side: gap(name, side, "float64", file, info)
                            for side, info in trained(checked, file, python).items()}}  # fmt: skip
        commands = commands_of(CASES[name], "float32", file, args)
        subprocess.run([sys.executable, *commands.pop("write")], check=True)
        jax = [side for side in commands if side in JAX]
        turns = take_turns(
            commands, 0 if args.quick else None, args.threads, rounds=(args.repeats, args.repeats),
            environments={side: {**ON_CPU, "NPROC": str(args.threads)} for side in jax},
            pythons=dict.fromkeys(jax, python),
        )  # fmt: skip
        gaps["float32"] = {side: gap(name, side, "float32", file, turns.info[side]) for side in jax}
    return {
        "num_nodes": CASES[name].num_nodes,
        "ms": {side: 1e3 * turns.median(side) for side in commands},
        "start_s": {side: start(turns, side) for side in commands},
        "gap": {dtype: max(of_sides.values()) for dtype, of_sides in gaps.items()},
        "versions": {package: turns.info[jax[0]][package] for package in ("jax", "optax")},
        "notes": turns.notes(),
    }


def trained(commands: dict[str, list[str]], file: str, python: str) -> dict[str, dict[str, Any]]:
    """The reports of JAX's programs after their first rounds, in float64."""
    subprocess.run([sys.executable, *commands["write"]], check=True)
    found = {}
    for side in (side for side in commands if side in JAX):
        with Alternative(commands[side], 1, {**ON_CPU, "JAX_ENABLE_X64": "1"}, python) as one:
            found[side] = one.info
    return found


def commands_of(case: Case, dtype: str, file: str, args: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each alternative, and of what writes the file; in float64, of few nodes."""
    program, which = str(HERE.with_name("in_jax.py")), "quick" if args.quick else "all"
    if case.num_nodes is None:
        return {
            "write": [str(HERE), "--serve", "write sweep", file, dtype, which],
            "vecgym": [str(HERE), "--serve", "sweep", dtype, which],
            **({} if args.quick else {"compiled": [str(HERE), "--serve", "sweep", dtype, which, "compiled"]}),
            "JAX, scan": [program, "sweep", case.workload, file, "0"],
        }
    K, H = (4, 2) if args.quick or dtype == "float64" else (case.num_nodes, 20)
    fit = [str(HERE.with_name("step_time.py")), "--serve", "fit", case.workload, str(K), str(H), "diloco"]
    fit.append(str(H * (2 if args.quick else FIT_BLOCKS[case.workload])))
    return {
        "write": [str(HERE), "--serve", "write fit", file, dtype, case.workload, str(K), str(H)],
        "vecgym": fit,
        **({"compiled": [*fit, "compiled"]} if args.compile else {}),
        **{side: [program, form, case.workload, file, str(H)] for side, form in JAX.items()},
    }


def start(turns: Turns, side: str) -> float:
    return float(turns.info[side]["compile_s"]) if side in JAX else turns.median(side, "start")


def gap(name: str, side: str, dtype: str, file: str, info: dict[str, Any]) -> float:
    """The largest difference of a program's losses from vecgym's, as a part of these.

    Raises:
        SystemExit: if it is too large, since then the programs are not the same.
    """
    difference = float(np.abs(np.asarray(info["losses"]) / np.load(file)["losses"] - 1).max())
    if not difference <= TOLERANCE[dtype]:
        raise SystemExit(
            f"{name}: {side} does not train what vecgym trains: losses differ by {difference:.1e}, {dtype}."
        )
    return difference


def catches_up(result: dict[str, Any]) -> str:
    """The steps after which JAX's scan, started at the same time, is ahead."""
    ms, start_s = result["ms"], result["start_s"]
    a_step = ms["vecgym"] - ms["JAX, scan"]
    later = 1e3 * (start_s["JAX, scan"] - start_s["vecgym"])
    return "never" if a_step <= 0 else f"{max(0.0, later / a_step):.0f}"


def report(results: dict[str, dict[str, Any]]) -> str:
    """The table, and what was checked."""
    rows = []
    for name, result in results.items():
        ms, start_s = result["ms"], result["start_s"]
        cells = [f"{ms[side]:.2f}" if side in ms else "" for side in ("vecgym", "compiled", *JAX)]
        ratios = [f"{ms[side] / ms['vecgym']:.2f}" if side in ms else "" for side in JAX]
        starts = [f"{start_s[side]:.2f}" for side in ("vecgym", "JAX, scan")]
        rows.append([name, *cells, *ratios, *starts, catches_up(result)])
    columns = ["ms per step", "vecgym", "compiled", *JAX, *[f"{side} / vecgym" for side in JAX]]
    notes = [f"- {name}: {checked(result)}; {result['notes']}" for name, result in results.items()]
    starts = ["start, s: vecgym", "JAX, scan", "catches up, steps"]
    return "\n\n".join([markdown([*columns, *starts], rows), "\n".join(notes)])


def checked(result: dict[str, Any]) -> str:
    """Say that the programs train the same."""
    gaps = " and ".join(f"{value:.0e} of them in {dtype}" for dtype, value in result["gap"].items())
    versions = " and ".join(f"{package} {version}" for package, version in result["versions"].items())
    return f"JAX's losses are vecgym's up to {gaps} ({versions})"


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", metavar="PATH", help="an interpreter that has jax and optax; without: "
                        f"{', '.join(VERSIONS)} are installed into a temporary environment")  # fmt: skip
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME",
                        help=f"any of {', '.join(map(repr, CASES))}; default: all")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="measure fits with compile=True, too")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch, and of XLA (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--quick", action="store_true", help="few nodes and steps, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser.parse_args(arguments)


def main() -> None:
    warnings.simplefilter("ignore", UserWarning)  # equal initial weights, and H that never exchange in short runs
    if sys.argv[1:2] == ["--serve"]:
        what, *more = sys.argv[2:]
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        if what == "write fit":
            return write_fit(*more)
        if what == "write sweep":
            file, dtype, which = more
            return Swept(dtype, which).write(file)
        dtype, which, *compiled = more
        return serve(Swept(dtype, which, compiled=bool(compiled)))
    args = parsed(sys.argv[1:])
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    results: dict[str, dict[str, Any]] = {}
    with interpreter(args.python) as python:
        for name in args.cases:
            results[name] = measure(name, python, args)
            print(f"{name}: {checked(results[name])}; {results[name]['notes']}", flush=True)
            if args.json:
                args.json.write_text(json.dumps({"machine": machine(), "cases": results}, indent=1))
    print("\n" + report(results))


if __name__ == "__main__":
    main()
