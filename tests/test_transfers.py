"""A step returns the values that it sends; a module keeps its state to itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import assert_close, assert_same_bits, run, simulation
from vecgym import Trainer
from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.simulation import Part
from vecgym.strategy import (
    Average,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    Exchange,
    Mean,
    Memory,
    SPARTAStrategy,
    StrongestCosines,
    every,
)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w - x).square().mean()


def batches(num_nodes: int, steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(num_nodes, 3, 2, generator=generator, dtype=torch.float64) for _ in range(steps)]


def test_a_pure_step_taken_twice_sends_the_same_and_counts_nothing_itself() -> None:
    sim = simulation(Line(), DiLoCoStrategy("sgd", H=1, lr=0.1), batches(4))
    state = sim.init()
    _, first = sim.step(state, batches(4)[0], pure=True)
    _, second = sim.step(state, batches(4)[0], pure=True)
    assert first.transfers == second.transfers
    assert [t.operation for t in first.transfers] == ["mean"]
    assert (first.transfers[0].sent_bytes, first.transfers[0].tensors) == (24.0, ("w",))
    assert len(sim.comm.ledger) == 0


def test_the_ledger_of_a_run_is_made_of_the_transfers_of_its_steps() -> None:
    given = batches(4)
    sim = simulation(Line(), SPARTAStrategy(p_sparta=0.5, inner_optim="sgd", lr=0.1), given)
    state, transfers = sim.init(), []
    for batch in given:
        state, metrics = sim.step(state, batch)
        transfers.append(metrics.transfers)
    trainer = Trainer(Line(), torch.cat([b.flatten(0, 1) for b in given]))
    trainer.fit(SPARTAStrategy(p_sparta=0.5, inner_optim="sgd", lr=0.1), num_nodes=4, max_steps=4, batch_size=3)
    assert [e.transfer for e in trainer.ledger] == [t for of_step in transfers for t in of_step]
    assert trainer.ledger.total_bytes == sum(t.sent_bytes for of_step in transfers for t in of_step)


def test_what_is_used_later_says_how_many_steps_later() -> None:
    class Own(Average):
        def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
            return part.comm.mean(x)

    for strategy, lag in (
        (CommunicateOptimizeStrategy([Exchange(Mean(), delay=2, late="change")], "sgd", lr=0.1), 2),
        (CommunicateOptimizeStrategy([Exchange(Mean())], "sgd", lr=0.1), 0),
        (CommunicateOptimizeStrategy([Exchange(Own())], "sgd", lr=0.1), 0),
        (CommunicateOptimizeStrategy([every(2, Exchange(Mean(), delay=1))], "sgd", lr=0.1), 2),
        (SPARTAStrategy(p_sparta=0.5, inner_optim="sgd", lr=0.1, delay=3), 3),
    ):
        ledger = run(Line(), strategy, batches(2)).comm.ledger
        assert {entry.transfer.lag for entry in ledger} == {lag}


# --------------------------------------------------------------------------- what a module keeps in its state

KEPT: dict[str, Any] = {
    "what it was given": lambda comm, x: x,
    "mean": lambda comm, x: comm.mean(x),
    "mean in place": lambda comm, x: comm.mean(x, inplace=True),
    "mean over groups": lambda comm, x: comm.mean(x, groups=[[0]]),
    "sum": lambda comm, x: comm.sum(x),
    "server_mean": lambda comm, x: comm.server_mean(x, range(comm.num_nodes)),
    "server_sum": lambda comm, x: comm.server_sum(x, range(comm.num_nodes)),
    "all_gather": lambda comm, x: tree.map(lambda y: y[:, 0], comm.all_gather(x)),
    "broadcast": lambda comm, x: comm.broadcast(x, 0),
    "permute": lambda comm, x: comm.permute(x, range(comm.num_nodes)),
    "mix": lambda comm, x: comm.mix(x, torch.eye(comm.num_nodes)),
    "a view": lambda comm, x: tree.map(lambda y: y[:1], x),
}


class Keeps(Average):
    """Keep something of the gradients or of the parameters, and use what was kept in the step before."""

    common = False

    def __init__(self, what: str, of: str) -> None:
        self.what, self.of = what, of

    def init(self, values: Tree, run: Any, memory: Memory) -> None:
        memory.own["kept"] = values

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        old, kept = memory.own["kept"], KEPT[self.what](part.comm, x)
        memory.own["kept"] = kept
        if self.of == "gradients":
            return tree.map(lambda g, old: g + 0.1 * old, x, old)
        return kept if part.due.step % 2 else tree.map(lambda p, old: 0.7 * p + 0.3 * old, x, old)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("what", KEPT)
def test_what_a_module_keeps_is_never_overwritten(what: str, engine: str, num_nodes: int) -> None:
    """The pure step shares nothing; the one that overwrites its state must give the same."""
    given = batches(num_nodes, steps=6)
    for optimizer in ("adamw", "sgd"):
        strategy = CommunicateOptimizeStrategy(
            [Exchange(Keeps(what, of), of=of) for of in ("gradients", "parameters")], optimizer, lr=0.1
        )
        donating = run(Line(), strategy, given, engine=engine)
        pure = run(Line(), strategy, given, engine=engine, differentiable=True)
        assert_close(donating.state, pure.state, 1e-12)


def test_collectives_used_alone_write_into_the_ledger() -> None:
    comm = StackedCollectives(4)
    comm.mean(torch.ones(4, 2))
    assert comm.ledger.total_bytes == 12
    assert_same_bits({"x": comm.mean(torch.ones(4, 2))}, {"x": torch.ones(1, 2)})


def test_an_exchange_in_part_is_counted_as_sent_whole() -> None:
    """Only a run that is differentiated counts the part that it uses."""
    strategy = DiLoCoStrategy("sgd", sync_weight=[0.0, 0.5, 1.0, 0.25], lr=0.1)
    whole, parts = (run(Line(), strategy, batches(2), differentiable=pure).comm.ledger for pure in (False, True))
    assert (whole.total_bytes, parts.total_bytes) == (3 * 16, 1.75 * 16)


def test_gradients_that_are_one_for_all_at_some_steps_only() -> None:
    """The residual of DeMo has a row for each node by then."""
    strategy = CommunicateOptimizeStrategy(
        [Exchange(Mean(), every=2, of="gradients"), Exchange(StrongestCosines(), of="gradients")], "sgd", lr=0.1
    )
    donating, pure = (run(Line(), strategy, batches(2), differentiable=pure) for pure in (False, True))
    assert_close(donating.state, pure.state, 1e-12)
