"""`verify` passes what is right, and finds what is wrong: in a strategy, in the bytes, in the bound."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import vecgym
from tests.models import make_data, make_model
from vecgym import cli, launch, tree
from vecgym.collectives.distributed import Wire
from vecgym.strategy import AllReduceStrategy, CommunicateOptimizeStrategy, CommunicationModule, FedAvgStrategy
from vecgym.verify import BOUNDS, Report, Run, compare, compare_with_ddp, verify

K = 4


def data(name: str = "MLP", dtype: torch.dtype = torch.float32) -> TensorDataset:
    return TensorDataset(*make_data(name, 64, dtype=dtype))


def of(*modules: CommunicationModule) -> CommunicateOptimizeStrategy:
    return CommunicateOptimizeStrategy(modules, "sgd", lr=0.1)


def checked(strategy: Any, **settings: Any) -> Report:
    return verify(strategy, make_model("MLP"), data(), **{"num_nodes": K, "num_processes": 2, "steps": 3, **settings})


# --------------------------------------------------------------------------------------------------------------- right


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_a_right_strategy_passes(dtype: torch.dtype) -> None:
    report = checked(FedAvgStrategy("adamw", H=2, lr=1e-2), dtype=dtype)
    assert report.passed
    exact, native = report.checks
    assert (exact.bound, native.bound) == (0.0, BOUNDS[dtype])
    assert [row.step for row in exact.rows] == [0, 1, 2]
    assert all(row == (row.step, 0, 0, 0, 0, 0, 0, 0) for row in exact.rows)
    assert "pass" in str(report)
    assert "FAIL" not in str(report)


def test_a_users_own_strategy_and_model() -> None:
    class Half(CommunicationModule):
        """Moves every node half of the way to the mean."""

        def exchange_parameters(self, params: Any, state: Any, ctx: Any) -> Any:
            return tree.map(lambda p, mean: (p + mean) / 2, params, ctx.comm.mean(params)), state

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self, batch: Any) -> torch.Tensor:
            return (self.w - batch[0]).square().mean()

    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    assert vecgym.verify(of(Half()), Line(), TensorDataset(x), steps=4, num_processes=4).passed


# --------------------------------------------------------------------------------------------------------------- wrong


class SumWhenAlone(CommunicationModule):
    """Sums where it should average when all nodes are in one process."""

    def exchange_parameters(self, params: Any, state: Any, ctx: Any) -> Any:
        alone = len(ctx.comm.node_ids) == ctx.comm.num_nodes
        return (ctx.comm.sum(params) if alone else ctx.comm.mean(params)), state


class MeanOfMine(CommunicationModule):
    """Averages the rows that it sees, without a collective: right only where all nodes are in one process."""

    def exchange_parameters(self, params: Any, state: Any, ctx: Any) -> Any:
        return tree.map(lambda p: p.mean(0, keepdim=True), params), state


class FirstRow(CommunicationModule):
    """Keeps the first node of each process in its state, as if that were node 0."""

    def init(self, params: Any, ctx: Any) -> Any:
        return {"first": params}

    def exchange_parameters(self, params: Any, state: Any, ctx: Any) -> Any:
        return params, {"first": tree.map(lambda p: p[:1].clone(), params)}


class ByPlace(CommunicationModule):
    """Tells nodes apart by their row, not by their number."""

    def exchange_gradients(self, grads: Any, state: Any, ctx: Any) -> Any:
        rows = torch.arange(1, len(ctx.comm.node_ids) + 1)
        return tree.map(lambda g: g * rows.view(-1, *[1] * (g.dim() - 1)), grads), state


class MoreBytes(CommunicationModule):
    """Exchanges what the number of processes makes up: the numbers are right, the bytes are not."""

    def exchange_parameters(self, params: Any, state: Any, ctx: Any) -> Any:
        if len(ctx.comm.node_ids) < ctx.comm.num_nodes:
            ctx.comm.mean({"idle": torch.ones(len(ctx.comm.node_ids), 1)})
        return params, state


@pytest.mark.parametrize(
    ("module", "column"),
    [(SumWhenAlone, "params"), (MeanOfMine, "params"), (FirstRow, "strategy"), (ByPlace, "params"),
     (MoreBytes, "ledger_bytes")],
)  # fmt: skip
def test_a_wrong_strategy_is_found(module: type[CommunicationModule], column: str) -> None:
    report = checked(of(module()))
    assert not report.passed
    for check in report.checks:
        assert check.first_failure is not None
        assert check.first_failure.step == 0
        assert check.worst(column) > 1e-3
    assert "FAIL at step 0" in str(report)


def handed_bytes(link: launch.Link, times: int) -> list[float]:
    """`compare` on a wire that counts `times` what it is handed."""

    class Counting(Wire):
        def _count(self, x: torch.Tensor) -> None:
            self.handed_bytes += times * x.numel() * x.element_size()

    given = Run(FedAvgStrategy("sgd", H=1, lr=0.1), make_model("MLP"), data(), K, 2)
    return [check.handed_bytes for exact in (True, False) for [rows] in [compare(given, [Counting()], exact=exact)]
            for check in rows]  # fmt: skip


def test_bytes_that_the_ledger_does_not_mean_are_found() -> None:
    assert launch.run(handed_bytes, 2, (1,)) == [[0, 0, 0, 0]] * 2
    P = sum(p.numel() for p in make_model("MLP").parameters())
    # Exact: both nodes' parameters; native: their sum. Twice as much is as many bytes too much, after every step.
    assert launch.run(handed_bytes, 2, (2,)) == [[8 * P, 16 * P, 4 * P, 8 * P]] * 2


# ----------------------------------------------------------------------------------------------------------------- DDP


@pytest.mark.parametrize(("optimizer", "num_processes"), [("sgd", 2), ("adamw", 4)])
def test_allreduce_is_distributed_data_parallel(optimizer: str, num_processes: int) -> None:
    """torch's own, to 1e-12 in float64, with clipping and a schedule; a process of it may hold several nodes."""
    strategy = AllReduceStrategy(optimizer, lr=0.05, max_norm=0.5, lr_scheduler="cosine", warmup_steps=2)
    report = verify(strategy, make_model("GPT"), data("GPT"), K, num_processes, steps=5)
    assert [check.name for check in report.checks] == ["exact", "native", "DDP"]
    assert report.passed
    assert max(row.params for row in report.checks[2].rows) <= 1e-12


def against_another(link: launch.Link) -> float:
    """DDP with another learning rate."""
    right = AllReduceStrategy("sgd", lr=0.1)
    wrong = copy.copy(right)
    wrong.inner_optim = right.inner_optim.replace(momentum=0.5)
    model = make_model("MLP", dtype=torch.float64)
    given = Run(wrong, model, data(dtype=torch.float64), K, 3)  # trains by the rule that was made of the first
    return compare_with_ddp(given, Wire())[-1].params


def test_the_comparison_with_ddp_can_fail() -> None:
    assert min(launch.run(against_another, 2)) > 1e-4


# ------------------------------------------------------------------------------------------------------------- command


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--strategy", "gossip", "--steps", "2", "--num-processes", "2"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("gossip: passed\n")
    assert "4 nodes in 2 processes, 2 steps, torch.float64" in output
    assert cli.main(["verify", "--list"]) == 0
    assert "diloco" in capsys.readouterr().out.split()
    assert cli.main(["verify", "--strategy", "x"]) == 1
    assert "allowed: all, allreduce" in capsys.readouterr().err
    assert cli.main(["verify", "--strategy", "diloco", "--num-processes", "3"]) == 1
    assert "one of [1, 2, 4]" in capsys.readouterr().err


def test_command_fails_where_a_strategy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vecgym.verify.__globals__["STRATEGIES"], "wrong", lambda: of(MeanOfMine()))
    assert cli.main(["verify", "--strategy", "wrong", "--steps", "1"]) == 1


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"allowed: torch\.float64, torch\.float32"):
        checked(FedAvgStrategy("sgd"), dtype=torch.float16)
    with pytest.raises(ValueError, match="must divide"):
        checked(FedAvgStrategy("sgd"), num_processes=3)


def test_exact_is_exact_where_kernels_round_by_place() -> None:
    """torch's SGD fuses multiplication and addition, except in the last values of a tensor: 10 fill no register."""
    strategy = FedAvgStrategy(vecgym.OptimSpec("sgd", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1), H=3)
    report = checked(strategy, num_processes=4, steps=6, dtype=torch.float32)
    assert report.passed
    assert report.checks[0].worst("params") == report.checks[0].worst("optimizer") == 0
