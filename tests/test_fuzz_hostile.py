"""A share of the campaigns of bad arguments, damaged files and killed runs; and that each finds a planted fault.

All of it: `python -m tests.fuzz --campaign arguments files kills --cases 10000`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.fuzz import Case, Failure, arguments, calls, files, kills
from tests.fuzz.common import attempt
from vecgym.records import runfile

# Cases that have failed once.
ONCE: dict[ModuleType, list[Case]] = {
    kills: [
        Case({"what": what, "run": "DDP", "happens": [(how, at, 1)]})
        for what, how, at in [
            ("save", "SIGKILL", ("write", 300)),  # left a partial file
            ("sweep", "SIGKILL", ("write", 300)),
            ("fit", "SIGKILL", ("sync", 1)),  # while it tried whether the folder can be written to
            ("save", "SIGINT", ("write", 30)),  # ended in an error of torch's writer
            ("keep one", "power", ("rename", 4)),
        ]
    ] + [
        # A run that had come to its end failed because a temporary file could not be removed.
        Case({"what": "processes", "run": "DiLoCo", "happens": [("full", ("remove", 4), 300)]}, 125),
    ],
    files: [
        *(Case({"reader": reader, "run": "DDP", "damage": "a FIFO"}, seed)
          for reader in ("load", "sweep", "read_text", "load_model", "read_csv") for seed in range(2)),
        *(Case({"reader": "load_model", "run": "DDP", "damage": damage}, 1)
          for damage in ("truncated", "malicious", "of another kind", "garbage")),
        *(Case({"reader": "read_csv", "run": "DDP", "damage": "other cell"}, seed) for seed in range(8)),
    ],
    arguments: [
        Case({"call": call, "given": {name: value}})
        for call, name, value in [
            ("vecgym.Trainer.save", "path", "2.5"),
            ("vecgym.load", "path", "'a\\0b'"),
            ("vecgym.CSVLogger", "directory", "[]"),
            ("vecgym.logger.read_csv", "directory", "None"),
            ("vecgym.History.to_csv", "path", "{}"),
            ("vecgym.data.text.read_text", "path", "object()"),
            ("vecgym.data.text.standard_library_text", "num_chars", "2.5"),
            ("vecgym.optim.schedule.lambda_cosine", "warmup_steps", "'abc'"),
            ("vecgym.collectives.topology.ring", "num_nodes", "tensor(2)"),
            ("vecgym.collectives.topology.torus", "num_nodes", "2.5"),
            ("vecgym.collectives.topology.exponential", "num_nodes", "True"),
            ("vecgym.collectives.topology.one_peer_exponential", "round", "0.5"),
            ("vecgym.collectives.topology.second_eigenvalue", "weights", "'abc'"),
            ("vecgym.compat.diloco_sim.DilocoSimulator.load_model", "path", "3"),
            ("vecgym.compat.exogym.run_script", "path", "nan"),
            ("vecgym.History.last", "column", "[1]"),
            ("vecgym.LogUniform", "low", "None"),
            ("vecgym.SweepResult.best", "over", "np.array([1, 2])"),
            ("vecgym.SweepResult.history", "index", "'abc'"),
            ("vecgym.SweepResult.plot", "x", "None"),
            ("vecgym.Trainer.plot", "path", "3"),
            ("vecgym.data.Partition", "indices", "3"),
            ("vecgym.data.text.decode_text", "vocabulary", "{}"),
            ("vecgym.models.GPT.generate", "tokens", "'abc'"),
            ("vecgym.optim.clip_grad_norm", "inplace", "'abc'"),
            ("vecgym.plot.plot_comparison", "window", "0"),
            ("vecgym.plot.plot_heatmap", "best", "'abc'"),
            ("vecgym.plot.plot_pareto", "rows", "3"),
            ("vecgym.plot.plot_numbers", "matrices", "3"),
            ("vecgym.meta.Mixing", "start", "3"),
            ("vecgym.meta.learn", "seeds", "3"),
            ("vecgym.rollout_jvp", "primals", "3"),
            ("vecgym.strategy.RandomSelector", "p", "tensor(2)"),
            ("vecgym.strategy.FedAvgStrategy", "server_optim", "3"),
            ("vecgym.optim.Optimizer", "spec", "object()"),
            ("vecgym.OptimSpec", "param_groups", "nn.Linear(2, 2)"),
            ("vecgym.compat.diloco_sim.DilocoSimulatorConfig", "ckpt_interval", "set()"),
            ("vecgym.compat.diloco_sim.DilocoSimulatorConfig", "port", "a strategy"),
            ("vecgym.compat.exogym.AveragingCommunicator", "island_size", "2.0"),
            ("vecgym.compat.exogym.CommunicateOptimizeStrategy", "communication_modules", "[1]"),
            ("vecgym.compat.exogym.SimpleReduceStrategy", "max_norm", "a function"),
            ("vecgym.compat.exogym.Trainer.fit", "dataloader_kwargs", "['a']"),
            ("vecgym.compress.Quantise", "bits", "np.array([1, 2])"),
            ("vecgym.data.num_steps", "num_epochs", "torch.float16"),
            ("vecgym.data.partition_iid", "data", "tensor(2)"),
            ("vecgym.load", "path", "''"),
            ("vecgym.optim.clip_grad_norm", "max_norm", "tensor([1., 2., 3.])"),
            ("vecgym.rollout_jvp", "strategy", "its class"),
            ("vecgym.strategy.CommunicateOptimizeStrategy", "lr_scheduler", "a function"),
            ("vecgym.strategy.Mix", "topology", "nn.Linear(2, 2)"),
            ("vecgym.strategy.GossipStrategy", "topology", "a function"),
            ("vecgym.sweep", "strategy", "int"),
            ("vecgym.collectives.topology.check_doubly_stochastic", "name", "tensor(2)"),
            ("vecgym.verify", "dtype", "['a']"),
            ("vecgym.strategy.Exchange", "delay", "2**62"),  # built a queue without end
            ("vecgym.strategy.SPARTAStrategy", "delay", "10**30"),
            ("vecgym.compat.exogym.SPARTAStrategy", "async_sparta_delay", "2**62"),
            ("vecgym.strategy.Exchange", "fragments", "2**62"),
            ("vecgym.strategy.RankStrategy", "lr_scheduler", "nn.Linear(2, 2)"),  # an error of a node's thread
            ('vecgym.OptimSpec("muon")', "ns_steps", "2**62"),  # made that many steps
        ]
    ],
}  # fmt: skip
SHARES = {arguments: len(arguments.tried()), files: 24, kills: 8}


def failures(campaign: ModuleType, cases: Iterator[Case]) -> list[str]:
    found = []
    for case in cases:
        outcome = attempt(campaign, case)
        if isinstance(outcome, Failure):
            found.append(f"{outcome.cause}\n{outcome.message}\n{campaign.__name__}.run({case!r})")
    return found


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("campaign", SHARES, ids=lambda campaign: campaign.NAME)
def test_a_share_of_each_campaign(campaign: ModuleType, part: int) -> None:
    assert failures(campaign, islice(campaign.cases(0, SHARES[campaign]), part, None, 4)) == []


@pytest.mark.parametrize("campaign", ONCE, ids=lambda campaign: campaign.NAME)
def test_what_has_failed_once(campaign: ModuleType) -> None:
    assert failures(campaign, iter(ONCE[campaign])) == []


# ----------------------------------------------------------------------------------------------- bad arguments


def test_every_public_callable_is_called() -> None:
    """A new callable has a value for each of its arguments, or a reason in `UNCALLED`, which has no others."""
    assert calls.broken_calls() == {}
    assert [name for name in calls.UNCALLED if name not in calls.targets()] == []
    assert [name for name in (*calls.VALUES_OF, *calls.OBJECTS) if name not in calls.targets()] == []
    assert len(calls.UNCALLED) < 40 < 300 < len(arguments.tried())


def swallowing(lr: float = 0.1, **more: Any) -> float:
    """Takes any keyword."""
    return lr


def careless(H: int = 1, lr: float = 0.1, shuffle: bool = True) -> int:
    """Checks nothing."""
    return H.bit_length() + (lr > 0) + int(bool(shuffle))


def waiting(H: int = 1) -> None:
    """Waits."""
    if H == 3:
        time.sleep(1000)


def judged(function: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> str:
    """The cause of the failure of a call, "" if there is none."""
    target = calls.Target("vecgym.planted", "", function, True)
    monkeypatch.setattr(arguments, "targets", lambda: {"vecgym.planted": target})
    monkeypatch.setattr(arguments, "LIMIT_S", 0.2)
    outcome = attempt(arguments, Case({"call": "vecgym.planted", **settings}))
    return outcome.cause if isinstance(outcome, Failure) else ""


@pytest.mark.parametrize(
    ("function", "settings", "cause"),
    [
        (swallowing, {"unknown": "lrs"}, "an unknown keyword is swallowed"),
        (careless, {"unknown": "lrs"}, ""),
        (careless, {"given": {"H": "'abc'"}}, "AttributeError at"),
        (careless, {"given": {"lr": "'abc'"}}, "TypeError of something underneath"),
        (careless, {"given": {"lr": "nan"}}, "accepts what is no float"),
        (careless, {"given": {"lr": "0.5"}}, ""),
        (careless, {"given": {"H": "True"}}, "accepts what is no int"),
        (careless, {"given": {"shuffle": "'abc'"}}, "accepts what is no bool"),
        (waiting, {"given": {"H": "3"}}, "hangs"),
    ],
)
def test_careless_calls_are_found(
    function: Any, settings: dict[str, Any], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = judged(function, monkeypatch, **settings)
    assert cause in found
    assert bool(cause) == bool(found)


# ----------------------------------------------------------------------------------------------- damaged files


def found_by(campaign: ModuleType, cases: Iterator[Case]) -> str:
    """The cause of the first failure; "" where there is none."""
    for case in cases:
        outcome = attempt(campaign, case)
        if isinstance(outcome, Failure):
            return outcome.cause
    return ""


def test_a_reader_that_executes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch.load

    def unsafe(*args: Any, **settings: Any) -> Any:
        return load(*args, **{**settings, "weights_only": False})

    tried = [Case({"reader": "load", "run": "DDP", "damage": "malicious"}, seed) for seed in range(8)]
    assert found_by(files, iter(tried)) == ""
    monkeypatch.setattr(runfile.torch, "load", unsafe)
    assert "executes what a file says" in found_by(files, iter(tried))


def test_a_reader_without_checksums_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = [Case({"reader": "load", "run": "DDP", "damage": "flipped"}, seed) for seed in range(400)]
    files.expected("load", "DDP")  # of the good file
    monkeypatch.setattr(runfile.zipfile.ZipFile, "testzip", lambda self: None)
    assert found_by(files, iter(tried))


# ------------------------------------------------------------------------------------------------- killed runs


@contextlib.contextmanager
def unsynced(path: Any, mode: str = "wb") -> Iterator[Any]:
    """A writer that renames what may not be on the disk."""
    partial = Path(path).with_name(f".{Path(path).name}.partial")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with partial.open(mode) as file:
        yield file
    os.replace(partial, path)


@contextlib.contextmanager
def in_place(path: Any, mode: str = "wb") -> Iterator[Any]:
    """A writer without a second file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open(mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize(("writer", "how"), [(unsynced, "power"), (in_place, "torn write")])
def test_a_careless_writer_is_found(writer: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = ("write", 1000) if how == "torn write" else ("open", 8)
    tried = [Case({"what": "keep one", "run": "DDP", "happens": [(how, at, 1)]}, seed) for seed in range(12)]
    assert found_by(kills, iter(tried[:3])) == ""
    monkeypatch.setattr(runfile, "write_atomically", writer)
    assert found_by(kills, iter(tried))


def test_a_run_that_forgets_its_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run that begins its optimizer anew has other numbers."""
    tried = [Case({"what": "fit", "run": "DiLoCo", "happens": [("SIGKILL", ("rename", 5), 1)]})]
    assert found_by(kills, iter(tried)) == ""
    restored = runfile.restored

    def forgetful(value: Any) -> Any:
        found = restored(value)
        if isinstance(found, dict) and "optimizer" in found:
            found["optimizer"] = torch.utils._pytree.tree_map(lambda x: x * 0, found["optimizer"])
        return found

    monkeypatch.setattr(runfile, "restored", forgetful)
    assert "not the numbers" in found_by(kills, iter(tried))
