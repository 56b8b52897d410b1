"""Clients that take part in some rounds: which examples they read, at which rate, and of whom the run's model is made.

Through the loader, against plain torch: clients one after the other, each with its own batches and statistics.
"""

from __future__ import annotations

import collections
import copy
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vecgym
from vecgym import Trainer, sweep
from vecgym.availability import Availability, Dropout, Facts, LocalSteps, Presence, Sampled, Trace, drawn
from vecgym.clock import Compute
from vecgym.data import Batches
from vecgym.simulation.timetable import RunFacts
from vecgym.simulation.when import Rounds
from vecgym.strategy import (
    ADPSGDStrategy,
    AsyncStrategy,
    Exchange,
    FedAvgStrategy,
    PALSGDStrategy,
    ServerMean,
    Strategy,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*are never present")

SIZES, H, B, F64 = (6, 14, 20, 30, 9, 11), 4, 6, torch.float64
K, FRACTION = len(SIZES), 0.34  # two of six
SHARDS = [torch.randn(n, 3, generator=torch.Generator().manual_seed(i), dtype=F64) + i for i, n in enumerate(SIZES)]
EVERY = torch.cat(SHARDS)


def shard(rank: int, num_nodes: int, train: bool) -> TensorDataset:
    return TensorDataset(SHARDS[rank], SHARDS[rank].sum(1))


DATA: dict[str, Any] = {"own": shard, "dealt": TensorDataset(EVERY, EVERY.sum(1))}
VAL = TensorDataset(EVERY, EVERY.sum(1))


def cosine(step: int, steps: int) -> float:
    """The rate of a step, from 0.1 to a tenth of it."""
    return 0.1 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square().mean()


@functools.cache
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(F64)


def fit(strategy: Strategy, availability: Availability | None = None, data: Any = shard, **more: Any) -> Any:
    """The trainer, and the model that `fit` returned."""
    trainer = Trainer(network(), data, VAL, loss_fn=loss_fn)
    given: dict[str, Any] = {"batch_size": B, "progress": False, "device": "cpu", "val_interval": 1, **more}
    given |= {} if strategy.asynchronous else {"max_steps": more.get("max_steps", 10)}
    return trainer, trainer.fit(strategy, K, availability=availability, **given)


# ---------------------------------------------------------------------------------------------------------- one rule


def fedavg(**more: Any) -> Strategy:
    return FedAvgStrategy("sgd", H=H, lr=0.1, lr_scheduler="cosine", weighting="examples", **more)


SAMPLED: dict[str, Any] = {
    "fedavg": fedavg,
    "adam, fedprox, avgm": lambda **more: FedAvgStrategy(
        "adam", H=H, lr=0.02, warmup_steps=5, proximal_mu=0.3, server_optim="avgm", **more
    ),
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", SAMPLED)
def test_participation_and_sampled_are_one_run(name: str, data: str) -> None:
    """With a schedule, batch norm, and a last batch that is smaller."""
    ways = (SAMPLED[name](participation=FRACTION), None), (SAMPLED[name](), Sampled(FRACTION, H))
    runs = [fit(strategy, availability, data=DATA[data], max_steps=3 * H) for strategy, availability in ways]
    a, b = ([*trainer.history] for trainer, _ in runs)
    # Within a round the run's model is the mean of all nodes, or of those who are present.
    at_ends = {"val_loss": H, "consensus_distance": H}
    for column in ("train_losses", "train_loss", "lr", "val_loss", "bytes_total", "examples", "consensus_distance"):
        found, expected = ([row.get(column) for row in rows[:: at_ends.get(column, 1)][1:]] for rows in (a, b))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14, err_msg=column)
    for x, y in zip(runs[0][1].state_dict().values(), runs[1][1].state_dict().values()):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", ["participation", "Sampled"])
def test_it_is_what_a_naive_server_does(way: str) -> None:
    """A client goes on where its data ended, at the round's rate; its statistics are its own.

    The model has the mean of the statistics of those who have trained.
    """
    steps = 3 * H
    run = (fedavg(participation=FRACTION), None) if way == "participation" else (fedavg(), Sampled(FRACTION, H))
    trainer, averaged = fit(*run, max_steps=steps)
    batches, made = Batches(shard, K, B), [0] * K
    clients, theta = [copy.deepcopy(network()) for _ in range(K)], copy.deepcopy(network().state_dict())
    for number in range(steps // H):
        present = drawn(FRACTION, range(K), 42, number)
        for i in present:
            with torch.no_grad():
                for name, p in clients[i].named_parameters():
                    p.copy_(theta[name])
            for step in range(number * H, number * H + H):
                width = min(SIZES[i], batches.width(made[i]))
                batch = [x[i, :width] for x in batches[made[i]]]
                grads = torch.autograd.grad(loss_fn(clients[i].train(), batch), list(clients[i].parameters()))
                with torch.no_grad():
                    for p, g in zip(clients[i].parameters(), grads):
                        p.sub_(cosine(step, steps) * g)
                made[i] += 1
        for name, _ in network().named_parameters():
            weighted = [SIZES[i] * clients[i].get_parameter(name).detach() for i in present]
            theta[name] = sum(weighted) / sum(SIZES[i] for i in present)
    trained = [client for client, count in zip(clients, made) if count]
    assert len(trained) < K
    for name in ("0.running_mean", "0.running_var"):
        theta[name] = torch.stack([client.get_buffer(name) for client in trained]).mean(0)
    for name, x in averaged.state_dict().items():
        if x.is_floating_point():
            torch.testing.assert_close(x, theta[name], rtol=1e-9, atol=1e-9)
    expected = loss_fn(averaged.eval(), VAL[:]).item()
    assert trainer.history.last("val_loss") == pytest.approx(expected, rel=1e-12)


def test_a_lapse_of_a_node_is_no_round() -> None:
    """Rates of nodes that fail follow their own steps; with a sample too, the run's."""
    few = Trace(torch.tensor([[1] * K, [0] * 3 + [1] * 3] * 5).bool())
    runs = (fedavg(), few), (fedavg(participation=FRACTION), few), (fedavg(), few & Sampled(0.9, H))
    rates = [fit(*run, val_interval=None)[0].history["lr"][9] for run in runs]  # all are back, three after 4 steps
    assert rates == pytest.approx([(cosine(4, 10) + cosine(8, 10)) / 2, cosine(8, 10), cosine(8, 10)])


def test_steps_without_a_batch_are_no_absence() -> None:
    """A node that takes another kind of step passes over a batch: its count is the run's."""
    seen: list[Tensor] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach().clone())
            return (self.w - x).square().mean()

    trainer = Trainer(Watching(), torch.arange(12.0))
    given: dict[str, Any] = {"max_steps": 6, "batch_size": 2, "shuffle": False, "engine": "loop", "device": "cpu"}
    trainer.fit(PALSGDStrategy("sgd", p=0.5, H=6, lr=0.01), 1, progress=False, **given)
    run: Any = trainer.run
    made = run.simulation.timetable.made(6)[0]
    read = [int(x[0]) // 2 for x in seen[-made:]]
    assert 0 < made < 6
    assert read == [step for step, loss in enumerate(trainer.history["train_loss"]) if not math.isnan(loss)]


# --------------------------------------------------------------------------------------- of whom the model is made


def evaluated(strategy: Strategy, availability: Availability | None = None, **more: Any) -> tuple[Any, list[int]]:
    """A run in which some nodes have never trained: the trainer, and those that have."""
    trainer, averaged = fit(strategy, availability, **more)
    tracked = trainer.nodes.buffers["0.num_batches_tracked"]
    trained = tracked.nonzero().flatten().tolist()
    assert 0 < len(trained) < K
    mean = trainer.nodes.buffers["0.running_var"][trained].mean(0)
    of_present = [n for n in trained if n in (trainer.nodes.members or trained)]
    if availability is not None and not availability.sampled:
        mean = trainer.nodes.buffers["0.running_var"][of_present].mean(0)
    for model in (averaged, trainer.nodes.average()):
        torch.testing.assert_close(model.get_buffer("0.running_var"), mean, rtol=1e-12, atol=1e-12)
    found = loss_fn(averaged.eval(), VAL[:]).item()
    assert trainer.history.last("val_loss") == pytest.approx(found, rel=1e-12)
    return trainer, trained


MADE: dict[str, tuple[Any, Any]] = {
    "server": (lambda: fedavg(participation=FRACTION), None),
    "kept": (lambda: fedavg(participation=FRACTION, resting="keep"), None),
    "sampled": (fedavg, Sampled(FRACTION, H)),
    "their own": (fedavg, Sampled(FRACTION, H, rejoin="own")),
    "absent": (fedavg, Trace(torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]] * 5).bool())),
    "waiting": (fedavg, Sampled(FRACTION, H) & LocalSteps([1, 2, 3, 4, 4, 4], H)),
}


@pytest.mark.parametrize("name", MADE)
def test_statistics_are_of_those_who_have_trained(name: str, tmp_path: Path) -> None:
    """Evaluated, returned, saved and resumed, and in a sweep."""
    make, availability = MADE[name]
    trainer, _ = evaluated(make(), availability, save_dir=tmp_path, checkpoint_interval=5)
    saved = vecgym.load(tmp_path / "step-000000010.pt")
    for key, x in trainer.nodes.averaged.items():
        assert torch.equal(saved.average[key], x)
    later, _ = evaluated(make(), availability, resume=tmp_path / "step-000000005.pt")
    assert later.history["val_loss"] == trainer.history["val_loss"]
    result = sweep(
        network(), shard, VAL, strategy=make, loss_fn=loss_fn, availability=availability, grid={"batch_size": [B, 5]},
        num_nodes=K, max_steps=10, device="cpu", progress=False, keep_models=True,
    )  # fmt: skip
    row = result.rows[0]
    assert row["val_loss"] == pytest.approx(trainer.history.last("val_loss"), rel=1e-12)
    for x, y in zip(result.model(0).buffers(), trainer.nodes.average().buffers()):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", [AsyncStrategy("sgd", H=2, lr=0.05), ADPSGDStrategy("sgd", lr=0.05)], ids=repr)
def test_nodes_whose_first_round_has_not_ended_have_no_statistics(strategy: Strategy) -> None:
    _, trained = evaluated(strategy, compute=Compute([1.0, 1.0, 1.0, 1.0, 100.0, 100.0]), max_updates=12)
    assert set(trained) == {0, 1, 2, 3}


def test_parameters_of_nodes_that_were_never_drawn_are_not_in_the_model() -> None:
    trainer, averaged = fit(fedavg(participation=FRACTION, resting="keep"))
    trained = (trainer.nodes.buffers["0.num_batches_tracked"] > 0).nonzero().flatten().tolist()
    assert tuple(trained) == tuple(trainer.nodes.members)
    assert len(trained) < K
    weight = trainer.nodes.params["1.weight"]
    torch.testing.assert_close(averaged[1].weight.detach(), weight[trained].mean(0), rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------------------------- local epochs


def rounds_of(data: Any, epochs: int, steps: int, strategy: Strategy, num_rounds: int = 3, **more: Any) -> Any:
    """The batches that were read in each round, and the trainer."""
    seen: list[list[int]] = []
    found: list[list[list[int]]] = []

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=F64))

        def forward(self, batch: Tensor) -> Tensor:
            seen.append(batch.long().tolist())
            return (self.w - batch).square().mean()

    class Watched(Trainer):
        def after_step(self, row: dict[str, Any]) -> None:
            if row["step"] % steps == 0:
                found.append(list(seen))
                seen.clear()

    trainer = Watched(Reads(), data)
    availability = LocalSteps(epochs=epochs, H=steps)
    given: dict[str, Any] = {"batch_size": B, "max_steps": num_rounds * steps, "device": "cpu", "progress": False}
    given |= {"engine": "loop", "node_threads": 1, "availability": availability, **more}
    trainer.fit(strategy, K, **given)
    return found[1:], trainer


def ids_of(rank: int, num_nodes: int, train: bool) -> Tensor:
    return 100.0 * rank + torch.arange(SIZES[rank], dtype=F64)


def averaging(steps: int, **more: Any) -> Strategy:
    return FedAvgStrategy("sgd", H=steps, lr=0.1, weighting="examples", **more)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_local_epoch_reads_each_example_once(epochs: int) -> None:
    steps = epochs * 5
    found, trainer = rounds_of(ids_of, epochs, steps, averaging(steps))
    orders = set()
    for batches in found:
        for rank, size in enumerate(SIZES):
            own = [batch for batch in batches if batch[0] // 100 == rank]
            assert [len(batch) for batch in own] == ([B] * (size // B) + [size % B] * (size % B > 0)) * epochs
            for e in range(epochs):
                read = [x % 100 for batch in own[e * -(-size // B) : (e + 1) * -(-size // B)] for x in batch]
                assert sorted(read) == list(range(size))
                orders.add((rank, *read))
    assert len(orders) == 3 * epochs * K  # shuffled anew in each
    assert trainer.history["examples"][steps - 1 :: steps] == [epochs * sum(SIZES) * n for n in (1, 2, 3)]


@pytest.mark.parametrize("more", [{"participation": FRACTION}, {"sampled": True}], ids=str)
def test_who_takes_part_passes_over_its_own(more: dict[str, Any]) -> None:
    given = {"availability": Sampled(FRACTION, 5) & LocalSteps(epochs=1, H=5)} if more.pop("sampled", None) else {}
    found, trainer = rounds_of(ids_of, 1, 5, averaging(5, **more), num_rounds=6, **given)
    examples = 0
    for number, batches in enumerate(found):
        read = collections.Counter(x for batch in batches for x in batch)
        present = drawn(FRACTION, range(K), 42, number)
        assert read == collections.Counter(100 * rank + i for rank in present for i in range(SIZES[rank]))
        examples += sum(SIZES[rank] for rank in present)
    assert trainer.history["examples"][-1] == examples


def test_a_local_epoch_of_one_dataset_is_over_what_was_dealt() -> None:
    """Between them the nodes read all of it once."""
    steps = 3
    found, _ = rounds_of(torch.arange(75, dtype=F64), 1, steps, averaging(steps))
    for batches in found:
        assert sorted(x for batch in batches for x in batch) == list(range(75))
    assert sorted(map(len, found[0])) == [1] * 3 + [6] * 12  # 13 for each of three nodes, 12 for the others


@pytest.mark.parametrize("settings", [{"drop_last": True}, {"num_workers": 2}], ids=str)
def test_local_epochs_and_the_loader(settings: dict[str, Any]) -> None:
    plain, _ = rounds_of(ids_of, 1, 5, averaging(5))
    found, _ = rounds_of(ids_of, 1, 5, averaging(5), dataloader_kwargs=settings)
    full = [[batch for batch in batches if len(batch) == B] for batches in plain]
    for batches, expected in zip(found, full if "drop_last" in settings else plain):
        assert [len(batch) for batch in batches] == [len(batch) for batch in expected]
        assert "drop_last" in settings or sorted(batches) == sorted(expected)


def test_local_epochs_are_those_of_plain_torch_in_every_engine() -> None:
    """FedAvg by hand: each client's passes, one after the other, and the mean by the number of examples."""
    ends = []
    for given in ({"engine": "vmap"}, {"engine": "loop"}, {"engine": "loop", "node_threads": 2}):
        model = nn.Linear(3, 1).to(F64)
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.zero_()
        trainer = Trainer(model, shard, loss_fn=loss_fn)
        more: dict[str, Any] = {"max_steps": 10, "batch_size": B, "device": "cpu", "progress": False, **given}
        ends.append(trainer.fit(averaging(5), K, availability=LocalSteps(epochs=1, H=5), **more).state_dict())
    theta = {"weight": torch.full((1, 3), 0.1, dtype=F64), "bias": torch.zeros(1, dtype=F64)}
    batches = Batches(shard, K, B, own_epochs=True)
    for number in range(2):
        clients = []
        for rank, size in enumerate(SIZES):
            model = nn.Linear(3, 1).to(F64)
            model.load_state_dict(theta)
            optimizer, count = torch.optim.SGD(model.parameters(), lr=0.1), -(-size // B)
            for step in range(number * count, (number + 1) * count):
                [(batch, limits)] = batches.read(iter([([rank], [step])]))
                width = (limits or [B])[0]
                optimizer.zero_grad()
                loss_fn(model, [x[0, :width] for x in batch]).backward()
                optimizer.step()
            clients.append(model.state_dict())
        theta = {name: sum(n * c[name] for n, c in zip(SIZES, clients)) / sum(SIZES) for name in theta}
    for end in ends:
        for name, x in theta.items():
            torch.testing.assert_close(end[name], x, rtol=1e-10, atol=1e-12)


def test_steps_in_a_pass_are_known_before_the_first() -> None:
    facts = Facts(3, 10, 0, num_examples=(3, 16, 17), batch_size=8)
    assert LocalSteps(epochs=2, H=6).training(facts)(0, 6).sum(0).tolist() == [2, 4, 6]
    assert LocalSteps(epochs=2, H=6).training(facts._replace(drop_last=True))(0, 6).sum(0).tolist() == [2, 4, 4]
    assert (Dropout(0.1) & LocalSteps(epochs=1, H=6)).own_epochs


@pytest.mark.parametrize("every", [4, lambda step: 4, Rounds(4, offset=2)], ids=["number", "function", "offset"])
def test_who_fails_within_a_round_is_not_replaced(every: Any) -> None:
    """The sample is of those who are there when the round begins: who of it is still there trains, and averages."""
    exchange, nodes = Exchange(ServerMean(), every=every, participation=0.4), 20
    presence = Presence(Dropout(0.15, mean_steps=3), Facts(nodes, 24, seed=1))
    table = Strategy("sgd", [exchange], lr=0.1).timetable(RunFacts(nodes, 24, 1, presence))
    first, began, changed = -1, set[int](), 0
    for step, events in enumerate(table.ticks()):
        number = exchange.times([])[0].count(step)
        (train,) = (event for event in events if event.what == "train")
        if number != first:
            there = presence.present(step)
            first, began = number, set(drawn(0.4, range(nodes) if there is None else there, 1, number))
        left = began.intersection(presence.is_present(step).nonzero().flatten().tolist())
        assert set(train.rows or ()) == left != set()
        assert all(set(event.rows or ()) == left for event in events if event.what == "agree")
        changed += left != began
    assert changed > 4
