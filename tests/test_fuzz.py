"""A small fixed share of the fuzzing campaigns, and what they have found: `python -m tests.fuzz` runs them at length.

A campaign that can find nothing would pass too: `test_planted_faults_are_found` wants it to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz import Case, Failure, configurations, rollouts, sweeps
from vecgym.collectives import StackedCollectives, base
from vecgym.core import tree
from vecgym.strategy import AveragingCommunicator, DiLoCoCommunicator, average, fedopt

pytestmark = pytest.mark.filterwarnings("ignore")  # of settings without effect: many are drawn


@pytest.mark.parametrize("seed", range(4))
def test_random_configurations_equal_their_twins(seed: int) -> None:
    for case in configurations.cases(seed, 10):
        outcome = configurations.run(case)
        assert not isinstance(outcome, Failure), f"{outcome}\n{configurations.reproducer(case)}"


# What campaigns have found, each shrunk.
FOUND: dict[str, dict[str, Any]] = {
    # One module keeps what it returns, the next one writes into it.
    "written over outer parameters": {
        "strategy": {"kind": "composed", "modules": [{"kind": "diloco", "H": 3}, {"kind": "sparse", "delay": 1}]}
    },
    "written over a server's parameters": {
        "strategy": {"kind": "composed", "modules": [{"kind": "server", "name": "adam"}, {"kind": "sparse", "bits": 4}]}
    },
    # A node whose own momentum is 0, looked at by itself, uses no buffer; the others' must stay.
    "a buffer that one node does not use": {
        "inner": {"name": "rmsprop", "momentum": 0.5, "per_node": ["momentum"]},
        "exact": True,
    },
    "a buffer that those who train do not use": {
        "num_nodes": 3,
        "max_steps": 8,
        "inner": {"name": "sgd", "momentum": 0.9, "per_node": ["momentum"]},
        "strategy": {"kind": "fedavg", "participation": 0.3},
    },
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    assert configurations.run(Case(FOUND[name])) is None


FOUND_SWEEPS: dict[str, dict[str, Any]] = {
    # An optimizer with a value for each node makes the parameters, one copy for all nodes until then, differ.
    "a value for each node next to numbers": {
        "run": {"num_nodes": 3},
        "rows": [
            {"strategy": {"kind": "allreduce"}, "inner": {"name": "adam", "lr": lr, **more}}
            for lr, more in ((0.05, {}), (0.01, {}), (0.05, {"per_node": ["lr"]}), (0.02, {"per_node": ["lr"]}))
        ],
    },
}


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_random_grids_equal_their_runs(seed: int) -> None:
    for case in sweeps.cases(seed, 2):
        outcome = sweeps.run(case)
        assert not isinstance(outcome, Failure), f"{outcome}\n{sweeps.reproducer(case)}"


def test_random_rollouts_are_their_runs_and_have_the_derivatives_of_differences() -> None:
    for case in rollouts.cases(0, 4):
        outcome = rollouts.run(case)
        assert not isinstance(outcome, Failure), f"{outcome}\n{rollouts.reproducer(case)}"


@pytest.mark.parametrize("name", FOUND_SWEEPS)
def test_what_was_found_of_sweeps_stays_mended(name: str) -> None:
    assert sweeps.run(Case(FOUND_SWEEPS[name])) is None


def wrong_sign(patch: pytest.MonkeyPatch) -> None:
    right = DiLoCoCommunicator._outer_step

    def step(self: Any, params: Any, state: Any, ctx: Any) -> Any:
        mirrored = tree.map(lambda outer, p: 2 * outer - p, state["params"], params)
        return right(self, mirrored, state, ctx)

    patch.setattr(DiLoCoCommunicator, "_outer_step", step)


def one_step_late(patch: pytest.MonkeyPatch) -> None:
    def exchange(self: Any, params: Any, state: Any, ctx: Any) -> Any:
        return self.average(params, state, ctx) if ctx.step and ctx.step % self.H == 0 else (params, state)

    patch.setattr(AveragingCommunicator, "exchange_parameters", exchange)


def wrong_weight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(average, "node_weights", lambda weighting, ctx: None)


def wrong_bytes(patch: pytest.MonkeyPatch) -> None:
    right = base.payload_bytes
    patch.setattr(base, "payload_bytes", lambda x: right(x) // 2)


def stale_sample(patch: pytest.MonkeyPatch) -> None:
    """Those who train are the sample of the round, those who are averaged the first one."""
    right = StackedCollectives.server_mean
    first: list[Any] = []

    def server_mean(self: Any, x: Any, participants: Any, weights: Any = None) -> Any:
        first.append(participants)
        return right(self, x, first[0], weights)

    patch.setattr(StackedCollectives, "server_mean", server_mean)


def yogi_as_adam(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(fedopt.SPECS, "yogi", fedopt.SPECS["adam"])


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any], str]] = {
    "sign": (wrong_sign, {"strategy": {"kind": "diloco", "H": 2}}, "params"),
    "period": (one_step_late, {"strategy": {"kind": "fedavg", "H": 2}}, "bytes"),
    "weight": (wrong_weight, {"strategy": {"kind": "fedavg", "weighting": "examples"}, "examples": 41}, "params"),
    "bytes": (wrong_bytes, {"strategy": {"kind": "allreduce"}}, "bytes"),
    "sample": (stale_sample, {"strategy": {"kind": "fedavg", "participation": 0.5}, "num_nodes": 4}, "params"),
    "server": (yogi_as_adam, {"strategy": {"kind": "fedavg", "server": "yogi"}}, "params"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, chosen, what = FAULTS[name]
    assert configurations.run(Case(chosen)) is None
    plant(monkeypatch)
    found = configurations.run(Case(chosen))
    assert isinstance(found, Failure)
    assert found.cause.startswith(what), found
