"""The benchmarks run, and their tables and files have the shape that readers expect. No figure is judged."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vecgym import VecgymWarning
from vecgym.availability import Function
from vecgym.clock import Compute
from vecgym.clock.asynchronous import AsyncPlan
from vecgym.collectives import StackedCollectives
from vecgym.simulation import Part
from vecgym.simulation.events import Stop
from vecgym.strategy import DecoupledDiLoCoStrategy, DeMoStrategy, DiLoCoStrategy

FOLDER = Path(__file__).parent


def run(script: str, *arguments: str) -> str:
    """The output of a benchmark, with one thread: other tests are running."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_quick(script: str, folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """The table and the file of a short run."""
    file = folder / "result.json"
    table = run(script, "--quick", "--threads", "1", "--json", str(file), *arguments)
    assert table.startswith("date ")
    assert "torch" in table.splitlines()[0]
    result = json.loads(file.read_text())
    assert result["machine"]["threads"] == "1"
    return table, result


def test_versions(tmp_path: Path) -> None:
    here = str(FOLDER.parent)
    table, result = run_quick("versions.py", tmp_path, here, here, "--workloads", "tiny")
    assert table.count("| tiny ") == 2
    assert all(row["ratio"] > 0 for row in result["rows"].values())


def test_meta(tmp_path: Path) -> None:
    table, result = run_quick("meta.py", tmp_path, "--figure", str(tmp_path / "learned.png"))
    assert "| constants | 24 | 4 |" in table
    assert result["rows"][0]["steps"] == 1
    assert len(result["rows"][0]["knots"]["when"]) == 4
    assert (tmp_path / "learned.png").exists()


def test_startup(tmp_path: Path) -> None:
    table, result = run_quick("startup.py", tmp_path)
    assert "| Trainer, DiLoCoStrategy |" in table
    imports = result["imports"]
    assert imports["import vecgym"]["modules"] == 1
    assert imports["import vecgym"]["modules"] < imports["vecgym price"]["modules"]
    assert imports["Trainer, DiLoCoStrategy"]["modules"] == imports["the same, uncompiled"]["modules"]
    assert all(0 <= row["garbage"] <= row["seconds"] for row in imports.values())


def test_step_time(tmp_path: Path) -> None:
    table, result = run_quick("step_time.py", tmp_path, "--workloads", "tiny", "--engines")
    assert "| ratio, or difference | target | measured | met |" in table
    assert re.search(r"- tiny, bare: (recorded|vmap) \(all nodes in one call", table)
    tiny = result["workloads"]["tiny"]
    assert {
        "loop / fit",
        "fit vmap / fit",
        "fit / floor",
        "fit / big",
        "fit allreduce / big",
        "fit / bare",
        "fit short epochs / bare",
        "beside / loop",
        "start of fit - of fit vmap, ms",
    } < set(tiny["ratios"])
    assert all(tiny["start_ms"][fit] > 0 for fit in ("fit", "fit vmap", "fit allreduce"))
    names = {"loop", "fit", "bare", "big", "fit allreduce", "beside", "bare vmap x1", "bare loop x1", "floor"}
    assert all(tiny["ms"][name] > 0 for name in names)
    # Forward pass, and the gradients of two weights and of one input: 2 * 8 * (16 * 32 + 32 * 2) * 2 + 2 * 8 * 32 * 2.
    assert tiny["rates"]["flop"] == 2 * 8 * (2 * (16 * 32 + 32 * 2) + 32 * 2)
    assert tiny["rates"]["bytes"] == 10 * 4 * 610
    # Two moments of AdamW and the parameters, 16 * 32 + 32 + 32 * 2 + 2 = 610 floats each; counts are the timetable's.
    assert tiny["state_bytes"]["bare allreduce"] == 3 * 4 * 610


def test_gpu(tmp_path: Path) -> None:
    """On a CPU, only that it works: what it measures is a GPU."""
    alternatives = ["loop", "big", "eager"]
    workloads = ["tiny", "gpt2"]
    options = ["--device", "cpu", "--workloads", *workloads, "--alternatives", *alternatives]
    table, result = run_quick("gpu.py", tmp_path, *options)
    assert table.splitlines()[0].endswith("device cpu")
    assert table.count(" of big's throughput (target") == 2
    for name, workload in result["workloads"].items():
        assert table.count(f"| {name} K=2: ") == 3
        assert set(workload["alternatives"]) == set(alternatives)
        for figures in workload["alternatives"].values():
            assert figures["flop_per_s"] == pytest.approx(workload["flop"] * figures["steps_per_s"])
            assert figures["share"] == pytest.approx(figures["flop_per_s"] / workload["rate"])
    # Forward pass, and the gradients of two weights and of one input; of both nodes.
    assert result["workloads"]["tiny"]["flop"] == 2 * 2 * 8 * (2 * (16 * 32 + 32 * 2) + 32 * 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, on which it would measure")
def test_gpu_says_that_there_is_none() -> None:
    done = subprocess.run([sys.executable, str(FOLDER / "gpu.py")], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "There is no CUDA device here, and these figures are those of one: nothing is measured.\n"


def test_baselines_do_not_import_vecgym() -> None:
    """Nor does the process that measures: what vecgym does to a process must not slow them down."""
    code = (
        "import sys, step_time, against_jax; "
        "assert not any(name.startswith('vecgym') for name in sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=FOLDER)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("turns")


def written(folder: Path, code: str) -> Path:
    """A script that can serve."""
    script = folder / "one.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\nfrom turns import serve\n{code}")
    return script


def test_turns_are_taken_in_processes_of_their_own(tmp_path: Path, turns: Any) -> None:
    script = written(
        tmp_path,
        "import os, time\nserve(lambda: {'clock': time.time(), 'seconds': float(sys.argv[1])}, process=os.getpid())",
    )
    taken = turns.take_turns({"a": [str(script), "1"], "b": [str(script), "3"]}, 0.01, 1, rounds=(4, 4))
    assert len({taken.info["a"]["process"], taken.info["b"]["process"], os.getpid()}) == 3
    assert (taken.median("a"), taken.median("b"), taken.spread("a")) == (1, 3, 0)
    first, second = taken.all("a", "clock"), taken.all("b", "clock")
    assert [a < b for a, b in zip(first, second)] == [True, False, True, False], "A B, B A, ..."
    assert taken.notes().startswith("4 rounds; half the distance of the quartiles: a 0 %, b 0 %; load by others: ")
    with pytest.raises(RuntimeError, match="status 1"):
        turns.take_turns({"a": [str(script)]}, 0, 1)


def test_turns_count_rounds_and_the_time_of_child_processes(tmp_path: Path, turns: Any) -> None:
    script = written(
        tmp_path,
        "import itertools, os, subprocess\n"
        "count = itertools.count(1)\n"
        "busy = 'import time\\nwhile time.process_time() < 0.3: pass'\n"
        "def work():\n"
        "    subprocess.run([sys.executable, '-c', busy], check=True)\n"
        "    return {'count': next(count), 'kind': os.environ['KIND'], 'threads': os.environ['OMP_NUM_THREADS']}\n"
        "serve(work)",
    )
    commands, kinds = {"a": [str(script)], "b": [str(script)]}, {"a": {"KIND": "x"}, "b": {"KIND": "y"}}
    cold = turns.take_turns(commands, None, 3, kinds, rounds=(2, 5), warm_up=False)
    assert (cold.all("a", "count"), cold.all("b", "kind"), cold.all("b", "threads")) == ([1, 2], ["y"] * 2, ["3"] * 2)
    assert all(seconds >= 0.3 for seconds in cold.all("a", "cpu"))
    one = turns.take_turns(commands, 0, 1, kinds)
    assert one.all("a", "count") == [2], "one round, after a block that is not counted"
    assert one.notes().startswith("1 round; load by others: ")


def test_an_alternative_may_have_an_interpreter_of_its_own(tmp_path: Path, turns: Any) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nWHO=other exec "{sys.executable}" "$@"\n')
    other.chmod(0o755)
    script = written(tmp_path, "import os\nserve(lambda: None, who=os.environ.get('WHO', 'this'))")
    commands = {"a": [str(script)], "b": [str(script)]}
    taken = turns.take_turns(commands, 0, 1, pythons={"b": str(other)})
    assert {name: info["who"] for name, info in taken.info.items()} == {"a": "this", "b": "other"}


def test_strategies(tmp_path: Path) -> None:
    names = ["independent", "allreduce", "fedavg", "diloco", "sparta", "gossip", "demo"]
    table, result = run_quick("strategies.py", tmp_path, "--workloads", "tiny", "--strategies", *names)
    assert "| share | target | measured | met |" in table
    tiny = result["workloads"]["tiny"]
    b, K = tiny["model_bytes"], tiny["num_nodes"]
    assert (b, K) == (4 * 610, 4)
    # What each algorithm needs: nothing for SPARTA and gossip; an outer copy and a momentum in all for DiLoCo; one
    # residual per node for DeMo, whose parameters, like AllReduce's, are stored once.
    kept = {name: parts["strategy"] for name, parts in tiny["state_bytes"].items()}
    assert [kept[name] for name in ("independent", "allreduce", "fedavg", "sparta", "gossip")] == [0] * 5
    assert (kept["diloco"], kept["demo"]) == (2 * b, K * b)
    params = {name: parts["params"] for name, parts in tiny["state_bytes"].items()}
    assert params["allreduce"] == params["demo"] == b
    assert params["diloco"] == params["sparta"] == params["gossip"] == K * b
    assert all(ms > 0 for phases in tiny["ms"].values() for ms in phases.values())
    assert tiny["demo_loop_ms"] > 0


def test_scaling(tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    table, result = run_quick("scaling.py", tmp_path, "--workloads", "tiny", "--figure", str(figure))
    assert "| K | ms / step | CPU ms / step | CPU us / node | peak MB | MB / node | estimated MB |" in table
    with Image.open(figure) as image:
        assert (image.format, image.width) == ("PNG", 900)
    assert "from the start of python to the end" in table
    rows = result["scaling"]["tiny, diloco"]
    assert [row["num_nodes"] for row in rows] == [4, 8]
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 and row["peak_bytes"] >= 0 for row in rows)
    assert rows[1]["estimated_bytes"] > rows[0]["estimated_bytes"] > 0
    assert len(result["whole_s"]) == 1


def test_processes(tmp_path: Path) -> None:
    table, result = run_quick("processes.py", tmp_path)
    assert "first step" in table
    [row] = result["runs"]
    assert (row["workload"], row["num_nodes"]) == ("tiny", 2)
    for side in ("processes", "vecgym"):
        assert set(row[side]) == {"first_step_s", "diloco_s", "allreduce_s"}
        assert all(seconds > 0 for seconds in row[side].values())


def test_backends(tmp_path: Path) -> None:
    table, result = run_quick("backends.py", tmp_path, "--device", "cpu")
    assert "| start-up | s | ratio | target | met |" in table
    assert [row["num_processes"] for row in result["runs"]] == [0, 1, 2]  # 0: stacked
    assert all(row[key] > 0 for row in result["runs"] for key in ("first_s", "diloco_s", "allreduce_s"))
    assert "spawn" in result["start_up_s"]


def test_torchrun(tmp_path: Path) -> None:
    table, result = run_quick("torchrun.py", tmp_path)
    assert "| strategy | processes | ms / step | CPU ms / step | stacked / this | MB / step |" in table
    assert "tiny, K = 4; 1 round; load by others" in table
    rows = result["rows"]
    assert list(rows) == [f"{kind} {W}" for kind in ("allreduce", "diloco") for W in ("stacked", "2")]
    assert all(row["ms"] > 0 and row["cpu_ms"] > 0 for row in rows.values())
    # A float for each of 610 parameters, at every step, or once in 20.
    assert rows["allreduce 2"]["bytes"] == 4 * 610
    assert rows["diloco 2"]["bytes"] == 4 * 610 / 20


def test_clock(tmp_path: Path) -> None:
    table, result = run_quick("clock.py", tmp_path, "--strategies", "allreduce", "diloco")
    assert "|  | collectives | s | wall s | peak MB | MB before | target | met |" in table
    found = {(row["question"], row["of"]): row for row in result["rows"]}
    collectives = {key: row["collectives"] for key, row in found.items()}
    assert collectives == {
        ("command", "vecgym price"): "-", ("price", "every step"): 200, ("price", "every 100 steps"): 2,
        ("dry run", "allreduce"): 100, ("dry run", "diloco"): 2,
    }  # fmt: skip
    assert all(
        row["wall_seconds"] > 0 and row["seconds"] > 0 and row["peak_bytes"] >= row["before_bytes"] > 0
        for row in found.values()
    )


def test_network(tmp_path: Path) -> None:
    """On links of 200 Mbit/s and 20 ms, where namespaces are allowed; else it says why not."""
    table = run("network.py", "--quick", "--json", str(tmp_path / "result.json"))
    if "Skipped: " in table:
        pytest.skip(table.splitlines()[-1])
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    models = ["", ", 75 tensors", ", 200 tensors"]
    runs = [f"{name}{of}" for of in models for name in ("DDP", "DiLoCo, H=3")]
    assert [row["what"] for row in rows] == [*runs, "64 KiB", "1 MiB"]
    assert {row["by"] for row in rows} <= {"netem", "switch"}
    assert all(row["ping"] >= 40 and row["link"] > 0 for row in rows)
    assert all(row["measured"] > 0.2 for row in rows), "each sends six times at least, and is asked before"
    several = {row["what"]: row["measured"] for row in rows}
    assert several["DDP, 75 tensors"] < 0.75 * several["DiLoCo, H=3, 75 tensors"], "two messages are under way"
    assert "| measured / gloo |" in table


def test_tuner(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="Optuna is an extra: pip install vecgym[optuna]")
    table, result = run_quick("tuner.py", tmp_path)
    assert "| trials are trained | trials | of them failed | seconds | best val loss |" in table
    assert [side["trials"] for side in result["sides"].values()] == [4, 4]
    assert result["ratio"] > 0


def test_sweep(tmp_path: Path) -> None:
    table, result = run_quick("sweep.py", tmp_path, "--cases", "tiny", "tiny allreduce")
    assert (
        "| case | strategy | C | steps | sweep s | fits s | fits / sweep | target | met | val loss gap | by hand s |"
        in table
    )
    assert "2 configurations in 1 program:" in table
    for found in result["cases"].values():
        assert (found["num_configs"], found["steps"]) == (2, 4)
        assert found["ratio"] > 0
        assert found["val_loss_gap"] < 1e-5  # float32: the two sides train the same
        assert "1 round; load by others" in found["notes"]


def test_the_loop_does_the_same_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alternatives compute the same as vecgym, outer steps included."""
    monkeypatch.syspath_prepend(FOLDER)
    step_time, workloads = importlib.import_module("step_time"), importlib.import_module("workloads")
    tiny = workloads.WORKLOADS["tiny"]
    batches = [tiny.batch(3, seed) for seed in range(5)]
    loop = step_time.Loop(tiny, num_nodes=3, H=2)
    bare = step_time.Bare(tiny, 3, step_time.make_strategy("diloco", H=2))
    for batch in batches:
        loop(batch)
        bare(batch)
    for i, model in enumerate(loop.models):
        for name, p in model.named_parameters():
            torch.testing.assert_close(bare.state.params[name][i], p.detach(), rtol=1e-4, atol=1e-6)


def test_the_loop_of_demo_does_the_same_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    plain, workloads = importlib.import_module("plain"), importlib.import_module("workloads")
    mlp = workloads.WORKLOADS["mlp"]
    loop = plain.DeMo(mlp, num_nodes=2)
    average = DeMoStrategy(lr=plain.LR).exchanges[0].how
    gradients = {name: torch.stack([one[name] for one in loop.gradients]) for name in loop.gradients[0]}
    part = Part.alone(StackedCollectives(2))
    memory = average.memory({name: g[:1] for name, g in gradients.items()}, part)
    for _ in range(2):  # the second exchanges what the first has left, too
        loop()
        for name, x in average({name: plain.LR * g for name, g in gradients.items()}, part, memory).items():
            differ = (x[0].sign() != loop.signs[name]).float().mean()
            assert differ < 1e-3, "but where rounding decides about a sign"


def test_memory(tmp_path: Path) -> None:
    table, result = run_quick("memory.py", tmp_path)
    assert "| run | K | chunk | estimated MB | in use MB | ratio | resident MB | ratio | estimate s |" in table
    [row] = result["rows"]
    assert (row["workload"], row["strategy"], row["num_nodes"]) == ("mlp", "diloco", 8)
    assert row["estimated"] > 0 < min(row["in_use"], row["resident"])


def test_busy(tmp_path: Path) -> None:
    table, result = run_quick("busy.py", tmp_path, "--load", "1")
    assert "| tiny, K = 8 | ms per step alone | busy | ratio |" in table
    assert "beside: 1 busy processes" in table
    assert len(result["settings"]) == 6
    assert all(row["alone_s"] > 0 < row["busy_s"] for row in result["settings"].values())


def test_optimizers(tmp_path: Path) -> None:
    table, result = run_quick("optimizers.py", tmp_path)
    assert "| ratio | target | met |" in table
    assert set(result["optimizers"]) == {"muon", "fullprecisionmuon", "lion", "adamw"}
    assert all(row["stacked_s"] > 0 < row["each_s"] for row in result["optimizers"].values())


def test_compression(tmp_path: Path) -> None:
    table, result = run_quick("compression.py", tmp_path)
    assert "| code | bits | distortion, normal | distortion, heavy tails | distortion, movement | bound |" in table
    codecs = result["codecs"]
    bits = {name: row["kinds"]["normal"]["bits"] for name, row in codecs.items()}
    assert bits["the same, 2 bits"] == 0.21875 + 8 * 16 / 64**2, "12 bits for a place, 2 for a value; the bins' means"
    assert bits["ternary"] == 8 * (820 + 4) / 64**2, "five values to a byte"
    for name, row in codecs.items():
        for found in row["kinds"].values():
            assert 0 < found["distortion"] < 1.5 * (row["bound"] or 1), name  # of few draws
            assert min(found["encode_s"], found["decode_s"]) > 0
    assert [name for name, row in codecs.items() if row["fed_back"] is None] == [
        "random-k, 1.56 %, unbiased", "qsgd 7, 512, unbiased",
    ]  # fmt: skip


def test_asynchronous(tmp_path: Path) -> None:
    table, result = run_quick("asynchronous.py", tmp_path)
    assert "| workload | nodes per call | together s | one by one s | plain s | one by one / together |" in table
    assert result["events_per_s"] > 0
    assert set(result["workloads"]["quick"]) == {"together", "one by one", "plain"}
    assert result["workloads"]["quick"]["one by one"][0]["nodes_per_call"] == 1


def test_availability(tmp_path: Path) -> None:
    table, result = run_quick("availability.py", tmp_path)
    assert "| ms per step | without | all present | a tenth absent | fewer | all present / without" in table
    assert set(result["rows"]) == {"tiny, diloco", "tiny, allreduce"}
    assert all(ms > 0 for row in result["rows"].values() for ms in row["ms"].values())


def test_rings(tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    table, result = run_quick("rings.py", tmp_path, "--plot", str(figure))
    assert "| values | code | encoded | K = 2 | K = 8 | K = 16 | growth |" in table
    assert figure.stat().st_size > 10_000
    for found in result["errors"].values():
        assert set(found) == {"bfloat16", "int8", "fp8"}
        assert all(0 < e < 1 for of_ways in found.values() for errors in of_ways.values() for e in errors)


def test_goodput(tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    only = ["DiLoCo", "Decoupled, quorum 4"]
    table, result = run_quick("goodput.py", tmp_path, "--plot", str(figure), "--only", *only)
    assert "| algorithm | absent | seconds | goodput | relative | computing | loss at the end |" in table
    assert figure.stat().st_size > 10_000
    runs = {(run["algorithm"], run["rate"]): run for run in result["runs"]}
    assert len(runs) == 6
    for run in runs.values():
        assert 0 < run["goodput"] < 1.05 * run["computing"] < 1.06, "what is merged has been computed"
    elastic, waiting = (runs["DiLoCo, elastic", 0.0], runs["DiLoCo, waiting", 0.0])
    assert elastic["seconds"] == waiting["seconds"], "without failures nobody waits"
    assert runs["DiLoCo, waiting", 0.1]["goodput"] < runs["DiLoCo, elastic", 0.1]["goodput"]


@pytest.mark.parametrize("H", [1, 3, 4])
def test_goodput_counts_as_a_loop_does(H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    goodput = importlib.import_module("goodput")
    there = torch.rand(90, 3, generator=torch.Generator().manual_seed(H)) < 0.8
    merged, since, total = [], [0, 0, 0], 0
    for step in range(90 // H * H):
        since = [n + 1 if here else 0 for n, here in zip(since, there[step].tolist())]
        if step % H == H - 1:
            total, since = total + sum(since), [0, 0, 0]
            merged.append(total)
    assert goodput.merged_steps(there, H).tolist() == merged

    ends, done = [], [0, 0, 0]
    for interval in range(90):
        done = [min(H, n + here) for n, here in zip(done, there[interval].tolist())]
        if min(done) == H:
            ends.append(interval + 1)
            done = [0, 0, 0]
    assert len(ends) > 5
    assert goodput.waiting_ends(there, H, len(ends)) == ends
    with pytest.raises(SystemExit, match="rounds of"):
        goodput.waiting_ends(there, H, len(ends) + 1)


@pytest.mark.parametrize("overlap", [0, 2])
def test_goodput_where_nobody_fails(overlap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal nodes, no network: what a node does between a message and what it merges for that is overwritten."""
    monkeypatch.syspath_prepend(FOLDER)
    goodput = importlib.import_module("goodput")
    strategy = DecoupledDiLoCoStrategy(fragments=2, H=20, overlap=overlap)
    plan = AsyncPlan.of(strategy, 4, Compute(1.0), None, {"a": 12, "b": 4}, 0, Stop(seconds=100.0))
    assert goodput.merged_updates(plan, [1.0, 0.0])[-1] == 4 * (10 + 4 * (20 - overlap))  # sent at 10, 30, 50 ...
    assert goodput.merged_updates(plan, [0.0, 1.0])[-1] == 4 * (20 + 4 * (20 - overlap))  # at 20, 40, 60 ...


@pytest.mark.parametrize(("quorum", "seconds", "after"), [(4, 10, 0.85), (8, 10, 0.55), (4, 20, 0.9), (8, 20, 0.9)])
def test_who_is_out_of_step_lowers_the_goodput_for_good(
    quorum: int, seconds: int, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide's figures of Decoupled DiLoCo: H = 20, and node 0 is away for half a round, or for a whole one."""
    monkeypatch.syspath_prepend(FOLDER)
    goodput = importlib.import_module("goodput")
    strategy = DecoupledDiLoCoStrategy(fragments=1, H=20, quorum=quorum)
    away = Function(lambda step: list(range(1 if 100 <= step < 100 + seconds else 0, 8)))
    merged = [
        goodput.merged_updates(AsyncPlan.of(strategy, 8, Compute(1.0), None, {"w": 4}, 0, Stop(seconds=end), away), [1])
        for end in (300.0, 1300.0)
    ]
    assert merged[1][-1] - merged[0][-1] == pytest.approx(after * 8 * 1000)


def test_rollout(tmp_path: Path) -> None:
    table, result = run_quick("rollout.py", tmp_path)
    assert "| loss + gradient | T | plain ms / step | forward / plain | all / plain | peak MB |" in table
    assert "tiny, sgd, segments, T = 10: time / plain" in table
    assert [row["mode"] for row in result["rows"]] == ["stored", "segments", "forward mode"]
    for row in result["rows"]:
        assert 0 < row["forward"] <= row["all"]
        assert row["plain"] > 0


def test_zoo(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be: that is the question. " * 60)
    only = ["DiLoCo", "Streaming", "Streaming, 4 bits"]
    table, result = run_quick("zoo.py", tmp_path, "--text", str(text), "--only", *only)
    assert "| algorithm | K | rate | validation loss | sent per node | seconds |" in table
    assert "4-bit outer gradients lose nothing" in table
    assert list(result["algorithms"]) == only
    assert all(row["sent_bytes"] > 0 for row in result["algorithms"].values())


# ------------------------------------------------------------------------------------- comparisons of training

SIX = ["AllReduce", "FedAvg", "DiLoCo", "SPARTA", "SPARTA + DiLoCo", "DeMo"]


def compare_quick(script: str, folder: Path, *arguments: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """The output, and the runs by name; the figure is there."""
    figure = folder / "figure.png"
    printed, result = run_quick(script, folder, "--figure", str(figure), *arguments)
    assert figure.stat().st_size > 10_000
    assert re.search(r"^\d+ s in all$", printed, re.MULTILINE)
    runs = {found["name"]: found for found in result["runs"]}
    for name, found in runs.items():
        assert f"| {name} | {found['num_nodes']} | {found['batch_size']} |" in printed
        assert found["train_loss"]["step"] == list(range(1, found["steps"] + 1))
        assert found["val_loss"]["step"][-1] == found["steps"]
    return printed, runs


def test_shakespeare(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 100)
    _, runs = compare_quick("shakespeare.py", tmp_path, "--text", str(text))
    assert list(runs) == ["one node", *SIX]
    assert {found["num_nodes"] * found["batch_size"] for found in runs.values()} == {12}, "not the same tokens"
    # 4 nodes that exchange gradients at every step are one node with the whole batch
    for column in ("val_loss", "train_loss"):
        one, four = (runs[name][column][column] for name in ("one node", "AllReduce"))
        torch.testing.assert_close(torch.tensor(one), torch.tensor(four), rtol=1e-4, atol=1e-4)
    sent = {name: found["bytes_total"]["bytes_total"][-1] for name, found in runs.items()}
    assert sent["one node"] == 0
    assert sent["AllReduce"] == 5 * sent["FedAvg"] == 5 * sent["DiLoCo"]  # H = 5
    assert sent["SPARTA"] < sent["DeMo"] < sent["AllReduce"]


def test_mnist(tmp_path: Path) -> None:
    printed, runs = compare_quick("mnist.py", tmp_path, "--data", str(tmp_path))
    assert list(runs) == SIX
    assert "MNIST is not in" in printed or "MNIST needs torchvision" in printed
    assert all(0 <= found["scores"]["accuracy"] <= 1 for found in runs.values())


def test_cifar10(tmp_path: Path) -> None:
    printed, runs = compare_quick("cifar10.py", tmp_path, "--data", str(tmp_path))
    assert "Instead, to see that it runs: random images." in printed
    assert list(runs) == SIX


def test_cifar10_without_data_says_so() -> None:
    command = [sys.executable, str(FOLDER / "cifar10.py"), "--data", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr == "Nothing was trained.\n"
    assert "CIFAR10" in done.stdout


def test_federated(tmp_path: Path) -> None:
    printed, runs = compare_quick(
        "federated.py", tmp_path, "--num-clients", "12", "--island-size", "3", "--participation", "0.5"
    )
    assert "Partition(12 nodes" in printed
    assert (tmp_path / "figure_partition.png").exists()
    assert {found["num_nodes"] for found in runs.values()} == {12}
    assert len(runs) == 7


def test_diloco_scaling(tmp_path: Path) -> None:
    _, runs = compare_quick("diloco_scaling.py", tmp_path)
    assert [(found["num_nodes"], found["batch_size"]) for found in runs.values()] == [
        (2, 8), (1, 16), (2, 8),
    ]  # fmt: skip


def test_figures(tmp_path: Path) -> None:
    printed = run("figures.py", "--quick", "--threads", "1", "--output", str(tmp_path))
    assert re.search(r"^\d+ s in all$", printed, re.MULTILINE)
    for name in ("compare", "sweep", "schedule", "equivalence", "price", "equal_time"):
        assert f"{name}.png: " in printed
        with Image.open(tmp_path / f"{name}.png") as image:
            assert (image.format, image.width) == ("PNG", 900)
            assert len(image.convert("RGB").getcolors(1 << 20) or []) > 20, "nothing is drawn"
    assert len(list(tmp_path.iterdir())) == 6
    # what a wrong strategy is drawn for: verify finds it on processes, not in a stack, and passes the other
    assert (printed.count("  pass\n"), printed.count("  FAIL at step 9\n")) == (4, 2)


def test_images_have_channels_first_and_unit_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    images = importlib.import_module("images")
    x = torch.randint(256, (20, 6, 6, 3), dtype=torch.uint8)  # as CIFAR-10 comes
    found = images._images("x", (x, torch.arange(20)), (x[:5], torch.arange(5)))
    assert found.shape == (3, 6, 6)
    got = found.train.tensors[0]
    assert torch.allclose(got.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(got.std((0, 2, 3)), torch.ones(3), atol=1e-5)
    green = x[..., 1].float()
    torch.testing.assert_close(got[:, 1], (green - green.mean()) / green.std())
    assert torch.equal(found.test.tensors[0], got[:5])  # scaled by the images to train on
    assert images._images("x", (x[..., 0], torch.arange(20)), (x[:5, ..., 0], torch.arange(5))).shape == (1, 6, 6)


def test_images_come_from_torchvision_where_it_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    images = importlib.import_module("images")

    class CIFAR10:  # the interface of torchvision.datasets.CIFAR10
        def __init__(self, root: str, train: bool, download: bool) -> None:
            if root != str(tmp_path):
                raise RuntimeError("Dataset not found or corrupted.")
            n = 8 if train else 3
            self.data, self.targets = (
                np.zeros((n, 32, 32, 3), dtype=np.uint8) + np.arange(n)[:, None, None, None],
                [1] * n,
            )

    fake = types.ModuleType("torchvision")
    fake.datasets = types.SimpleNamespace(CIFAR10=CIFAR10)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    found = images.torchvision_images("CIFAR10", tmp_path, download=False)
    assert (found.shape, len(found.train), len(found.test)) == ((3, 32, 32), 8, 3)
    with pytest.raises(images.Missing, match=r"CIFAR10 is not in .*nowhere: --data says where it is"):
        images.torchvision_images("CIFAR10", tmp_path / "nowhere", download=False)


def test_aggregation(tmp_path: Path) -> None:
    """vecgym's side of it; the other one needs an environment with byzfl."""
    table, result = run_quick("aggregation.py", tmp_path)
    assert "| rule | K | f | ms: byzfl | vecgym | ratio | faster |" in table
    assert len(result["rules"]) == 10
    assert all(row["s"]["vecgym"] > 0 and row["peer"] is None for row in result["rules"])


def test_against_exogym(tmp_path: Path) -> None:
    """vecgym's side of it; for the other one needs a checkout of EXO Gym."""
    table, result = run_quick("against_exogym.py", tmp_path)
    assert "| workload | K | first step, s: EXO Gym | vecgym | ms / step: EXO Gym | vecgym | ratio |" in table
    [row] = result["runs"]
    assert all(row["vecgym"][key] > 0 for key in ("first_step_s", "step_s"))


@pytest.mark.parametrize("name", ["tiny", "cnn", "gpt", "sweep"])
def test_against_jax(name: str, tmp_path: Path) -> None:
    python = os.environ.get("JAX_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import jax, optax"], capture_output=True).returncode != 0:
        pytest.skip(f"{python} has no jax and optax: JAX_PYTHON=PATH names an interpreter that does")
    table, result = run_quick("against_jax.py", tmp_path, "--python", python, "--cases", name)
    assert re.search(rf"^\| {name} \|", table, re.MULTILINE)
    assert f"- {name}: JAX's losses are vecgym's up to " in table
    case = result["cases"][name]
    assert case["gap"]["float64"] < (1e-7 if name == "gpt" else 1e-13), "JAX's attention has a softmax in float32"
    assert case["gap"]["float32"] < 1e-5, "4 steps"
    assert all(case["ms"][side] > 0 for side in ("vecgym", "JAX, scan"))
    assert case["start_s"]["JAX, scan"] > 0


@pytest.fixture
def against_jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("against_jax")


def test_the_table_beside_jax(against_jax: Any) -> None:
    fit = {
        "ms": {"vecgym": 4.0, "JAX": 6.0, "JAX, scan": 2.0},
        "start_s": {"vecgym": 0.5, "JAX": 2.0, "JAX, scan": 2.5},
        "gap": {"float64": 2e-13, "float32": 3e-7}, "versions": {"jax": "1", "optax": "2"}, "notes": "1 round",
    }  # fmt: skip
    sweep = {
        "ms": {"vecgym": 2.0, "compiled": 3.0, "JAX, scan": 5.0}, "start_s": {"vecgym": 0.1, "JAX, scan": 4.0},
        "gap": {"float64": 0.0, "float32": 1e-6}, "versions": {"jax": "1", "optax": "2"}, "notes": "1 round",
    }  # fmt: skip
    table = against_jax.report({"mlp": fit, "sweep": sweep})
    # the scan is 2 ms faster a step, and starts 2 s later: it catches up after 1000 steps
    assert "| mlp | 4.00 |  | 6.00 | 2.00 | 1.50 | 0.50 | 0.50 | 2.50 | 1000 |" in table
    assert "| sweep | 2.00 | 3.00 |  | 5.00 |  | 2.50 | 0.10 | 4.00 | never |" in table
    same = "JAX's losses are vecgym's up to 2e-13 of them in float64 and 3e-07 of them in float32 (jax 1 and optax 2)"
    assert f"- mlp: {same}; 1 round" in table


def test_programs_that_train_something_else_are_not_compared(against_jax: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "given.npz")
    np.savez(file, losses=[1.0, 2.0])
    assert against_jax.gap("mlp", "JAX", "float32", file, {"losses": [1.0, 2.0001]}) == pytest.approx(5e-5)
    for dtype, found in (("float64", 2.0001), ("float32", 2.001), ("float32", float("nan"))):
        with pytest.raises(SystemExit, match="mlp: JAX does not train what vecgym trains: losses differ by"):
            against_jax.gap("mlp", "JAX", dtype, file, {"losses": [1.0, found]})


def test_options_against_jax(against_jax: Any, tmp_path: Path) -> None:
    args = against_jax.parsed(["--cases", "mlp", "--compile", "--threads", "1"])
    commands = against_jax.commands_of(against_jax.CASES["mlp"], "float32", "file", args)
    assert {side: Path(command[0]).name for side, command in commands.items()} == {
        "write": "against_jax.py", "vecgym": "step_time.py", "compiled": "step_time.py", "JAX": "in_jax.py",
        "JAX, scan": "in_jax.py",
    }  # fmt: skip
    assert commands["JAX, scan"][1:] == ["rounds", "mlp", "file", "20"]
    few = against_jax.commands_of(against_jax.CASES["mlp"], "float64", "file", args)
    assert few["write"][2:] == ["write fit", "file", "float64", "mlp", "4", "2"]
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\necho No module named jax >&2\nexit 1\n")
    without.chmod(0o755)
    with (
        pytest.raises(SystemExit, match=r"python cannot import jax and optax:\nNo module named jax"),
        against_jax.interpreter(str(without)),
    ):
        pass
    with pytest.raises(SystemExit):
        against_jax.parsed(["--cases", "unheard of"])


@pytest.mark.parametrize("some", ["reproductions/0", "reproductions/1", "atlas/0", "atlas/1"])
def test_the_questions_of_what_holds(some: str, tmp_path: Path) -> None:
    """Each question is asked with few steps: its head has all parts, and its answer a verdict."""
    run("what_holds.py", some, "--quick", "--results", str(tmp_path))
    files = sorted(tmp_path.glob("*/*.json"))
    assert len(files) == len([*FOLDER.glob(f"{some}[0-9]_*.py")])
    expected = "Claim" if some.startswith("reproductions") else "Expected"
    for file in files:
        found = json.loads(file.read_text())
        assert {"Question", "Setting", "Verdict", expected} <= set(found["head"]), file
        assert found["answers"]["tiny"]["why"], file
        assert found["answers"]["tiny"]["rows"], file


def test_a_question_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["what_holds.py", "atlas/01", "atlas/99"])
    with pytest.raises(SystemExit):
        importlib.import_module("what_holds").main()
    assert "no question begins with atlas/99. There are: reproductions/01_merges" in capsys.readouterr().err


def test_questions_are_short() -> None:
    for file in [*FOLDER.glob("atlas/*.py"), *FOLDER.glob("reproductions/*.py")]:
        assert len(file.read_text().splitlines()) <= 60, file


def test_the_guide_has_the_answers() -> None:
    """Its tables are those that `--page` writes from the files of `results/`."""
    what_holds = importlib.import_module("what_holds")
    page = what_holds.PAGE.read_text()
    assert page == what_holds.page_with(page, FOLDER / "results")


@pytest.mark.parametrize("walks", [True, False])
def test_an_arm_is_tuned_where_no_neighbour_is_better(walks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid's lists are too high; the second seed moves the best rate by one value."""
    monkeypatch.syspath_prepend(FOLDER)
    study = importlib.import_module("study")
    trained: list[dict[str, Any]] = []

    def losses(
        self: Any, strategy: Any, points: list[dict[str, Any]], measure: Any, settings: dict[str, Any]
    ) -> list[list[float]]:
        trained.extend(points)
        best = {100: -3.0, 101: -4.4}  # the exponents of 10; the mean's is -4, of the nearest value
        bowl = [(np.log10(p["lr"]) - best.get(p["seed"], 0.0)) ** 2 + (p["momentum"] - 0.5) ** 2 for p in points]
        return [[5.0, 1.0 + float(x)] for x in bowl]

    monkeypatch.setattr(study.Study, "_sweep", losses)
    asked = study.Study(dataclasses.replace(study.SCALES["gpt"], walks=walks))
    arm = asked.arm("bowl", DeMoStrategy, {"lr": [1e-2, 1e-1, 1.0], "momentum": (0.0, 0.5, 0.8, 0.9)})
    assert arm.best == {"lr": 1e-4, "momentum": 0.5}
    assert arm.edge == ""
    assert len(trained) == len({str(point) for point in trained}) == (19 if walks else 48) + 8


def test_a_walk_leaves_rates_at_which_all_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    study = importlib.import_module("study")

    def losses(self: Any, strategy: Any, points: list[dict[str, Any]], *_: Any) -> list[list[float]]:
        return [[math.inf] if p["lr"] > 2e-3 else [abs(math.log(p["lr"] / 1e-3)) + p["outer_lr"]] for p in points]

    monkeypatch.setattr(study.Study, "_sweep", losses)
    arm = study.Study(study.SCALES["gpt"]).arm("cliff", DeMoStrategy, {"lr": [0.004, 0.008, 0.016], "outer_lr": (1, 2)})
    assert arm.best == {"lr": 1e-3, "outer_lr": 1}


def test_a_walk_does_not_end_where_high_rates_are_noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    study = importlib.import_module("study")
    found = {0.001: 2.5, 0.002: 2.4, 0.004: 2.6, 0.008: 2.9, 0.016: 2.8, 0.032: 2.9}

    def losses(self: Any, strategy: Any, points: list[dict[str, Any]], *_: Any) -> list[list[float]]:
        return [[found[p["lr"]]] for p in points]

    monkeypatch.setattr(study.Study, "_sweep", losses)
    arm = study.Study(study.SCALES["gpt"]).arm("plateau", DeMoStrategy, {"lr": [0.008, 0.016, 0.032]})
    assert arm.best == {"lr": 0.002}


def test_a_walk_follows_a_valley_in_which_one_rate_makes_up_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    study = importlib.import_module("study")

    def losses(self: Any, strategy: Any, points: list[dict[str, Any]], *_: Any) -> list[list[float]]:
        return [[10 * abs(math.log(p["lr"] * p["outer_lr"] / 0.008)) + abs(math.log(p["lr"] / 1e-3))] for p in points]

    monkeypatch.setattr(study.Study, "_sweep", losses)
    grid = {"lr": [0.002, 0.004, 0.008], "outer_lr": [1.0, 2.0, 4.0]}
    assert study.Study(study.SCALES["gpt"]).arm("valley", DeMoStrategy, grid).best == {"lr": 1e-3, "outer_lr": 8.0}


def test_a_walk_begins_where_the_last_one_with_the_same_list_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    study = importlib.import_module("study")
    trained: list[dict[str, Any]] = []

    def losses(self: Any, strategy: Any, points: list[dict[str, Any]], *_: Any) -> list[list[float]]:
        trained.extend(points)
        return [[abs(math.log(p["lr"] / 1e-4)) + abs(p["H"] - 8) + abs(p["beta"] - 0.8)] for p in points]

    monkeypatch.setattr(study.Study, "_sweep", losses)
    asked = study.Study(study.SCALES["gpt"])
    grid = {"lr": [1e-2, 1e-1, 1.0], "H": [64, 128], "beta": (0.5, 0.8)}
    best = {"lr": 1e-4, "H": 8, "beta": 0.8}
    assert asked.arm("one", DeMoStrategy, grid).best == best
    counts = [len(trained)]
    for name, other in (("two", grid), ("three", grid | {"lr": [2e-2, 2e-1]})):
        trained.clear()
        assert asked.arm(name, DeMoStrategy, other).best["H"] == 8
        counts.append(len(trained))
        assert trained[0] == best | {"lr": 1e-4 if other is grid else 2e-2, "seed": 100}
    assert counts[1] == 2 * 8 + 8  # the point, three axes' and the diagonal's neighbours, two seeds; the compared ones
    assert counts[1] < counts[2] < counts[0]


def test_seeds_in_which_one_arm_alone_diverges_count_against_it() -> None:
    study = importlib.import_module("study")
    lost = study.difference([math.inf] * 5 + [1.0] * 3, [2.0] * 8)
    assert (lost.mean, lost.seeds, lost.diverged, lost.lost, lost.sign) == (-1.0, 3, 5, 5, 1)
    both = study.difference([math.inf] * 5 + [1.0, 1.1, 1.2], [math.inf] * 5 + [2.0] * 3)
    assert (both.diverged, both.lost, both.sign) == (5, 0, -1)
    few = study.difference([math.inf] * 2 + [1.0, 1.1] * 3, [2.0] * 8)
    assert (few.lost, few.sign) == (2, -1)


class Cut(DiLoCoStrategy):
    """Ctrl-C comes once, in the first round."""

    pressed = False

    def meet(self, part: Part) -> None:
        if not Cut.pressed:
            Cut.pressed = True
            signal.raise_signal(signal.SIGINT)
        super().meet(part)


def test_the_loss_of_an_interrupted_run_is_no_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    study = importlib.import_module("study")
    monkeypatch.setattr(Cut, "pressed", False)
    asked = study.Study(study.SCALES["tiny"], tmp_path / "kept.json", quick=True)
    asked.arm("whole", lambda: DiLoCoStrategy("sgd", lr=0.1, H=2))
    with pytest.raises(KeyboardInterrupt), pytest.warns(VecgymWarning, match="interrupted"):
        asked.arm("cut", lambda: Cut("sgd", lr=0.1, H=2))
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [key.split()[0] for key in kept] == ["whole", "whole"]


def test_a_walk_says_where_it_had_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    study = importlib.import_module("study")
    monkeypatch.setattr(study.Study, "_sweep", lambda self, strategy, points, *_: [[point["lr"]] for point in points])
    arm = study.Study(study.SCALES["gpt"]).arm("slope", DeMoStrategy, {"lr": [0.1, 0.2]})
    assert arm.best == {"lr": pytest.approx(0.1 / 2**4)}
    assert arm.edge == "lr"
