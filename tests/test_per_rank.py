"""Strategies written for one rank, with `step` and `_init_node`, as in EXO Gym's documents."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers import stack
from tests.models import make_batches, make_model
from vecgym import OptimSpec, Trainer
from vecgym.collectives import StackedCollectives
from vecgym.engine import Engine
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, RankStrategy, Strategy
from vecgym.strategy.per_rank import all_gather, all_reduce, as_strategy, broadcast
from vecgym.strategy.simulated import simulation_of

STEPS = 12


class MyDDP(RankStrategy):
    """The form of EXO Gym's SimpleReduceStrategy."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def step(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                all_reduce(p.grad)
                p.grad /= self.num_nodes
        self.optim.step()
        super().step()

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.seen_rank = rank


class MyDiLoCo(RankStrategy):
    """DiLoCo with a master model on each rank."""

    def __init__(self, H: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.H = H

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.master = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.outer = torch.optim.SGD(self.master, lr=0.7, momentum=0.9, nesterov=True)

    def step(self) -> None:
        self.optim.step()
        super().step()
        if self.local_step % self.H == 0:
            for master, p in zip(self.master, self.model.parameters()):
                master.grad = all_reduce(master.detach() - p.detach(), op="mean")
            self.outer.step()
            for master, p in zip(self.master, self.model.parameters()):
                p.data = master.detach().clone()  # replaced, not written into


def run(strategy: Strategy, num_nodes: int, name: str = "MLP") -> tuple[dict[str, Tensor], StackedCollectives, Any]:
    model, batches = make_model(name, dtype=torch.float64), make_batches(name, STEPS, num_nodes, dtype=torch.float64)
    comm = StackedCollectives(num_nodes)
    simulation = simulation_of(model, strategy, comm, engine=Engine(model), max_steps=STEPS)
    simulation.engine.prepare(stack(batches[0]))
    state, rates = simulation.init(), []
    for batch in batches:
        state, row = simulation.step(state, stack(batch))
        comm.ledger.add(state.tick - 1, row.transfers)
        rates.append(float(simulation.algorithm.rates(simulation.timetable, row.tick - 1)[0]))
    return {n: p.expand(num_nodes, *p.shape[1:]) for n, p in state.params.items()}, comm, rates


PAIRS = {
    "ddp": (
        lambda: MyDDP(inner_optim="adamw", lr=1e-2),
        lambda: AllReduceStrategy("adamw", lr=1e-2),
    ),
    "ddp with a schedule": (
        lambda: MyDDP(inner_optim="adamw", lr=1e-2, lr_scheduler="cosine", warmup_steps=3),
        lambda: AllReduceStrategy("adamw", lr=1e-2, lr_scheduler="cosine", warmup_steps=3),
    ),
    "diloco": (
        lambda: MyDiLoCo(4, inner_optim=OptimSpec(torch.optim.SGD, lr=0.1, momentum=0.9)),
        lambda: DiLoCoStrategy(OptimSpec(torch.optim.SGD, lr=0.1, momentum=0.9), H=4),
    ),
}


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
@pytest.mark.parametrize("name", PAIRS)
def test_per_rank_code_equals_the_stacked_strategy(name: str, num_nodes: int) -> None:
    mine, native = PAIRS[name]
    params, comm, _ = run(mine(), num_nodes)
    expected, native_comm, _ = run(native(), num_nodes)
    for key, value in expected.items():
        torch.testing.assert_close(params[key], value, rtol=1e-10, atol=1e-12)
    assert comm.ledger.total_bytes == pytest.approx(native_comm.ledger.total_bytes, rel=1e-12)


def test_the_learning_rate_shown_is_the_one_used() -> None:
    mine, native = PAIRS["ddp with a schedule"]
    shown = run(mine(), 2)[2]
    assert shown[:4] == pytest.approx([0.0, 0.01 / 3, 0.02 / 3, 0.01])
    assert shown == pytest.approx(run(native(), 2)[2])


def test_broadcast_and_all_gather() -> None:
    seen: dict[int, tuple[float, list[float]]] = {}

    class Talk(RankStrategy):
        def step(self) -> None:
            own = torch.tensor([float(self.rank)])
            gathered = all_gather(own)
            broadcast(own, src=2)
            seen[self.rank] = (float(own), gathered.flatten().tolist())

    run(Talk(), 4)
    assert seen == {node: (2.0, [0.0, 1.0, 2.0, 3.0]) for node in range(4)}


def test_trainer_runs_it_and_leaves_the_users_object_alone() -> None:
    strategy = MyDDP(inner_optim="sgd", lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(10, (64,)))
    trainer = Trainer(make_model("MLP"), data)
    trainer.fit(strategy, 4, max_steps=5, batch_size=4, progress=False)
    assert not hasattr(strategy, "seen_rank")
    assert trainer.history["lr"] == pytest.approx([0.1] * 5)


class Noisy(RankStrategy):
    """Draws from every global generator, between collectives too."""

    def step(self) -> None:
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad += 0.1 * torch.randn_like(p) + 0.1 * random.random() + 0.1 * float(np.random.rand())  # noqa: NPY002
            if self.rank % 2:
                torch.rand(3)
            all_reduce(p.grad, "mean")
            p.grad += 0.1 * torch.randn_like(p)
        self.optim.step()
        super().step()


def test_what_nodes_draw_is_reproducible_and_their_own() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    first = run(Noisy("sgd", lr=0.1), 4)[0]
    assert (torch.get_rng_state() == before[0]).all()
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]  # noqa: NPY002
    torch.rand(5)
    again = run(Noisy("sgd", lr=0.1), 4)[0]
    for name, p in first.items():
        assert torch.equal(p, again[name])
        assert torch.equal(p[0], p[2])  # seeded alike, they have drawn as often
        assert not torch.equal(p[0], p[1])  # node 1 draws more


def test_what_nodes_draw_goes_on_after_a_resume(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(10, (64,)))

    def fit(steps: int, **options: Any) -> Tensor:
        trainer = Trainer(make_model("MLP"), data)
        trainer.fit(Noisy("sgd", lr=0.1), 3, max_steps=steps, batch_size=4, progress=False, device="cpu", **options)
        return torch.cat([p.flatten() for p in trainer.nodes.params.values()])

    whole = fit(6)
    fit(3, save_dir=tmp_path)
    assert torch.equal(fit(6, save_dir=tmp_path, resume=True), whole)


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 6.0), ("mean", 1.5), ("max", 3.0), ("min", 0.0), ("product", 24.0)]
)
def test_reductions(op: str, expected: float) -> None:
    seen: list[float] = []

    class Reduce(RankStrategy):
        def step(self) -> None:
            own = torch.tensor([self.rank + 1.0 if op == "product" else float(self.rank)])
            seen.append(float(all_reduce(own, op)))

    run(Reduce(), 4)
    assert set(seen) == {expected}


class Uneven(RankStrategy):
    """Node 0 leaves the others alone in a collective."""

    def step(self) -> None:
        if self.rank != 0:
            all_reduce(torch.zeros(1))


class Mixed(RankStrategy):
    def step(self) -> None:
        all_reduce(torch.zeros(1 + self.rank))


class Failing(RankStrategy):
    def step(self) -> None:
        if self.rank == 2:
            raise KeyError("oops")
        all_reduce(torch.zeros(1))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Uneven(), "node 0 in the end of its work"),
        (Mixed(), r"all_reduce sum of shape \[1\]"),
        (Failing(), "node 2: KeyError: 'oops'"),
    ],
    ids=["uneven", "mixed", "failing"],
)
def test_a_mistake_is_an_error_and_never_a_hang(strategy: Strategy, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(strategy, 3)


def test_collectives_of_a_rank_need_a_step() -> None:
    with pytest.raises(RuntimeError, match=r"inside Strategy\.step"):
        all_reduce(torch.zeros(1))


class Documented(Strategy):
    """The form of EXO Gym's documents: `step` and `_init_node` of a subclass of Strategy."""

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)  # type: ignore[misc]
        self.is_first = rank == 0

    def step(self) -> None:
        for p in self.model.parameters():  # type: ignore[attr-defined]
            all_reduce(p.grad, op="mean")
        self.optim.step()  # type: ignore[attr-defined]
        super().step()  # type: ignore[misc]


class Derived(Documented):
    """A class of a class, which says the same once more."""

    def step(self) -> None:
        super().step()


@pytest.mark.parametrize("cls", [Documented, Derived])
def test_a_strategy_with_a_step_is_one_for_a_rank(cls: type[Documented]) -> None:
    schedule: dict[str, Any] = {"lr": 0.01, "lr_scheduler": "cosine", "warmup_steps": 3}
    mine, other = run(cls("adamw", **schedule), 3), run(MyDDP(inner_optim="adamw", **schedule), 3)
    assert all(torch.equal(p, other[0][n]) for n, p in mine[0].items())
    assert mine[2] == other[2]
    strategy = cls("adamw", **schedule)
    ranks = as_strategy(strategy, make_model("MLP"))
    ranks.init(RunFacts(num_nodes=2), {})
    assert not ranks.pure
    assert type(strategy) is cls
    assert [rank["held"] is not None for rank in ranks.hidden_state()] == [True, True]


def test_a_strategy_without_a_step_stays_as_it_is() -> None:
    strategy = AllReduceStrategy("sgd", lr=0.1)
    assert as_strategy(strategy, make_model("MLP")) is strategy
    assert strategy.pure
    assert not hasattr(strategy, "step")


def test_it_cannot_be_differentiated() -> None:
    model, batches = make_model("MLP"), make_batches("MLP", 1, 2)
    simulation = simulation_of(model, MyDDP(), StackedCollectives(2))
    with pytest.raises(ValueError, match="cannot be differentiated: write it with exchanges"):
        simulation.step(simulation.init(), stack(batches[0]), pure=True)
