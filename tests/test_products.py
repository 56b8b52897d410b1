"""Products of what an exchange offers, beside other exchanges: as a loop in plain Python has them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vecgym import OptimSpec, Trainer
from vecgym.availability import Trace
from vecgym.collectives.topology import sample_nodes
from vecgym.core import rng, tree
from vecgym.core.objects import altered
from vecgym.simulation.simulation import Part
from vecgym.strategy import (
    Average,
    Eager,
    Exchange,
    Mean,
    MostMoved,
    Outer,
    ServerMean,
    Strategy,
    SyncWeight,
)
from vecgym.strategy.stages import Memory

K, STEPS, LR = 3, 8, 0.5
DATA = [[1.0] * 16, [2.0] * 16, [4.0] * 16]


class One(nn.Module):
    """A number, whose gradient on node i is `DATA[i][0]`, wherever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x.mean()


def trained(exchanges: Sequence[Exchange], steps: int = STEPS, data: Any = DATA, **options: Any) -> Trainer:
    strategy = Strategy(
        options.pop("optim", OptimSpec("sgd", lr=LR)), exchanges, max_norm=options.pop("max_norm", None)
    )
    trainer = Trainer(One(), lambda rank, num_nodes, train: torch.tensor(data[rank], dtype=torch.float64))
    trainer.fit(strategy, len(data), max_steps=steps, batch_size=2, device="cpu", progress=False, **options)
    return trainer


def ends(trainer: Trainer) -> list[float]:
    assert trainer.nodes is not None
    found: list[float] = trainer.nodes.params["w"].tolist()
    return found


# ----------------------------------------------------------------------------------------------------- in plain Python


@dataclass
class Naive:
    """An exchange of one number: `Outer(Mean(), sgd)` if it has a rate, else `Mean()`, and what it remembers."""

    every: int = 1
    rate: float | None = None
    momentum: float = 0.0
    delay: int | list[int] = 0
    late: str = "value"
    keep: float | list[float] = 0.0
    lost: float = 0.0
    participation: float = 1.0
    resting: str = "keep"
    weights: list[float] | None = None  # of a `SyncWeight`, in place of `every`
    of: str = "parameters"  # or "moments", or the name of the only one
    theta: list[float] = field(default_factory=lambda: [0.0] * K)  # of each node; where all share it, K times the same
    speed: list[float] = field(default_factory=lambda: [0.0] * K)
    sent: dict[int, tuple[list[int], dict[int, float]]] = field(default_factory=dict)  # by step: who, and the message

    @property
    def ours(self) -> Exchange:
        mean: Average = ServerMean() if self.resting == "take" else Mean()
        how = mean if self.rate is None else Outer(mean, OptimSpec("sgd", lr=self.rate, momentum=self.momentum))
        return Exchange(
            how, every=self.every if self.weights is None else SyncWeight(self.weights), of=self.of, delay=self.delay,
            late=self.late, keep=torch.tensor(self.keep) if isinstance(self.keep, list) else self.keep, lost=self.lost,
            participation=self.participation, resting=None if self.participation == 1 else self.resting,
        )  # fmt: skip

    @property
    def shared(self) -> bool:
        """Whether all have the same outer parameters."""
        return self.participation == 1 or self.resting == "take"

    def due(self, step: int) -> bool:
        if self.weights is not None and all(a in (0.0, 1.0) for a in self.weights):
            return step >= 0 and self.weights[step] == 1
        return step >= 0 and (self.weights is not None or (step + 1) % self.every == 0)

    def trains(self, step: int, present: list[list[int]], seed: int) -> list[int]:
        """The nodes that are drawn where a round begins; if all of them have left, some of the others."""
        if self.participation == 1:
            return present[step]
        number = step // self.every
        chosen = [i for i in self.drawn(number, present[number * self.every], seed) if i in present[step]]
        return chosen or self.drawn(number, present[step], seed)

    def drawn(self, number: int, there: list[int], seed: int) -> list[int]:
        draws = rng.generator(seed, "participants", number)
        return [there[i] for i in sample_nodes(len(there), max(1, round(self.participation * len(there))), draws)]

    def senders(self, step: int, present: list[list[int]], seed: int) -> list[int]:
        heard = torch.rand(K, generator=rng.generator(seed, "lost w", step))
        return [i for i in self.trains(step, present, seed) if not self.lost or heard[i] >= self.lost]

    def settled(self, moved: dict[int, float], share: float) -> list[float]:
        """Take the outer step of those with a movement, or of all; return the parameters after all of it."""
        whole = list(self.theta)
        assert self.rate is not None
        for i, delta in moved.items():
            for j in range(K) if self.shared else [i]:
                speed = self.momentum * self.speed[j] + delta
                whole[j] = self.theta[j] - self.rate * speed
                self.speed[j] += share * (speed - self.speed[j])
            if self.shared:
                break
        self.theta = [old + share * (new - old) for old, new in zip(self.theta, whole)]
        return whole

    def step(self, step: int, w: list[float], present: list[list[int]], seed: int) -> None:
        if self.due(step) and (senders := self.senders(step, present, seed)):
            takers = present[step] if self.resting == "take" and self.participation < 1 else senders
            values = w if self.rate is None else [a - b for a, b in zip(self.theta, w)]
            mean = sum(values[i] for i in senders) / len(senders)
            message = dict.fromkeys(senders, mean)
            if self.late == "change":
                share = self._share(step)
                whole = message if self.rate is None else dict(enumerate(self.settled(message, share)))
                message = {i: share * (whole[i] - w[i]) for i in senders}
            self.sent[step] = takers, message
        delays = self.delay if isinstance(self.delay, list) else [self.delay] * K
        for delay in sorted(set(delays)):
            begun = step - delay
            if not self.due(begun) or begun not in self.sent:
                continue
            takers, message = self.sent[begun]
            writers = [i for i in takers if delays[i] == delay and i in present[step]]
            if self.late == "change":
                for i in writers:
                    w[i] += message[i]
                continue
            share = self._share(begun)
            new = [next(iter(message.values()))] * K
            if self.rate is not None:
                if not self.shared:
                    message = {i: message[i] for i in writers}
                is_first = delay == min(delays) or not self.shared
                new = self.settled(message, share) if is_first else list(self.theta)
            keep = self.keep if isinstance(self.keep, list) else [self.keep] * K
            for i in writers:
                w[i] += share * (1 - keep[i]) * (new[i] - w[i])

    def _share(self, step: int) -> float:
        return 1.0 if self.weights is None else self.weights[step]


def naive(exchanges: Sequence[Naive], gradients: bool, table: Any, rejoin: str, seed: int, same: bool) -> list[float]:
    """Return where the nodes end."""
    w, momentum, rates = [0.0] * K, [0.0] * K, [1.0] * K if same else [x[0] for x in DATA]
    present = [[i for i in range(K) if table is None or table[t][i]] for t in range(STEPS)]
    for t in range(STEPS):
        if t and rejoin == "shared":
            alike = gradients and not any(x.lost or x.delay or isinstance(x.keep, list) for x in exchanges)
            outer = [x.theta[0] for x in exchanges if x.rate is not None and x.shared and x.of == "parameters"]
            begin = outer[-1] if outer else sum(w[i] for i in present[t - 1]) / len(present[t - 1])
            for i in set(present[t]) - set(present[t - 1]):
                w[i] = w[present[t - 1][0]] if alike else begin
                momentum[i] = momentum[present[t - 1][0]] if alike else momentum[i]
        training = present[t]
        for exchange in exchanges:
            training = [i for i in training if i in exchange.trains(t, present, seed)]
        mean = sum(rates[i] for i in training) / len(training)
        for i in training:
            momentum[i] = 0.5 * momentum[i] + (mean if gradients else rates[i])
            w[i] -= LR * momentum[i]
        for exchange in exchanges:
            exchange.step(t, w if exchange.of == "parameters" else momentum, present, seed)
    return w


def drawn(seed: int) -> tuple[list[Naive], dict[str, Any]]:
    """Draw exchanges and a run."""
    draw = random.Random(seed)
    gradients = draw.random() < 0.5
    table = None if draw.random() < 0.5 else [[draw.random() < 0.6 for _ in range(K)] for _ in range(STEPS)]
    if table is not None:
        table = [row if any(row) else [True] * K for row in table]
    exchanges: list[Naive] = []
    for _ in range(draw.choice([1, 1, 2])):
        one = Naive(every=draw.choice([1, 2, 3]), rate=draw.choice([None, 0.7]), momentum=draw.choice([0.0, 0.5]))
        kind = draw.choice(["lost", "delay", "delays", "change", "keep", "keeps", "part", "rests", "late part", "all"])
        if kind in ("delay", "late part", "all"):
            one.delay = draw.choice([1, 2])
        if kind == "delays" or (kind == "all" and draw.random() < 0.7):
            delays = [draw.choice([0, 1, 2]) for _ in range(K)]
            one.every, one.delay = 3, delays if len(set(delays)) > 1 else delays[0]
        if kind == "change":
            one.delay, one.late = draw.choice([1, 2]), "change"
        if kind == "keep":
            one.keep = 0.25
        if kind == "keeps" or (kind == "all" and draw.random() < 0.3):
            one.keep = [0.0, 0.25, 0.5]
        if kind in ("lost", "all"):
            one.lost = 0.5
        if kind in ("part", "late part"):
            one.weights = [draw.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(STEPS)]
        if kind == "rests" and not gradients:
            one.participation, one.resting = draw.choice([0.4, 0.7]), draw.choice(["keep", "take"])
            one.every = next((x.every for x in exchanges if x.participation < 1), one.every)
            one.delay = draw.choice([0, 1])
        elif draw.random() < 0.3:
            one.of = "momentum_buffer" if one.rate is not None else draw.choice(["momentum_buffer", "moments"])
        exchanges.append(one)
    run = {
        "gradients": gradients,
        "table": table,
        "rejoin": draw.choice(["own", "shared"]),
        "same": draw.random() < 0.3,
    }
    return exchanges, {**run, "seed": seed}


def assert_as_naive(seed: int) -> None:
    exchanges, run = drawn(seed)
    ours = [Exchange(Mean(), of="gradients")] if run["gradients"] else []
    ours += [exchange.ours for exchange in exchanges]
    availability = None if run["table"] is None else Trace(run["table"], rejoin=run["rejoin"])
    data = [[1.0] * 16] * K if run["same"] else DATA
    optim = OptimSpec("sgd", lr=LR, momentum=0.5)
    trainer = trained(ours, data=data, availability=availability, seed=seed, optim=optim)
    found = ends(trainer)
    wanted = naive(exchanges, **run)
    there = [i for i in range(K) if run["table"] is None or run["table"][-1][i]]  # what is stored once has no absentees
    assert trainer.state is not None
    sent = [int(name.split()[1]) for name in (*trainer.state.own, *trainer.state.shared) if "message" in name]
    assert all(step >= STEPS - 2 for step in sent)  # the longest delay
    assert [found[i] for i in there] == pytest.approx([wanted[i] for i in there], abs=1e-9), (seed, ours, run)


@pytest.mark.filterwarnings("ignore::vecgym.VecgymWarning")  # of what never happens in so few steps
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(40, 1000, 40))])
def test_products_of_exchanges(first: int) -> None:
    for seed in range(first, first + 40):
        assert_as_naive(seed)


# ---------------------------------------------------------------------------------------------------- one by one


@pytest.mark.parametrize(("options", "once"), [
    ({"lost": 0.5}, False), ({"delay": [0, 1, 1]}, False), ({"keep": torch.tensor([0.0, 0.2, 0.4])}, False),
    ({"delay": 1}, True), ({"delay": 1, "late": "change"}, True), ({"keep": 0.2}, True),
    ({"lost": 0.5, "of": "momentum_buffer"}, False),
])  # fmt: skip
def test_parameters_are_stored_once_only_if_no_exchange_lets_nodes_differ(options: dict[str, Any], once: bool) -> None:
    outer, optim = Outer(Mean(), OptimSpec("sgd", lr=0.5)), OptimSpec("sgd", lr=LR, momentum=0.5)
    other, data = Exchange(outer, every=2, **options), [[1.0] * 16] * K
    apart = trained([other], data=data, seed=2, optim=optim)
    both = trained([Exchange(Mean(), of="gradients"), other], data=data, seed=2, optim=optim)
    assert ends(both) == pytest.approx(ends(apart), abs=1e-12)
    assert both.state is not None
    assert ("params" in both.state.shared) == once == (len(set(ends(apart))) == 1)
    assert not once or {len(x) for _, x in tree.flatten(both.state.shared) if isinstance(x, Tensor)} == {1}


def test_who_was_absent_when_the_others_agreed_does_not_take_what_is_late() -> None:
    """Beside an exchange of gradients, too, where each node then has its own parameters."""
    table = [[True, True, False], [True, True, True]]
    exchanges = [Exchange(Mean(), of="gradients"), Exchange(Outer(Mean(), OptimSpec("sgd", lr=2.0)), every=1, delay=1)]
    trainer = trained(exchanges, steps=2, availability=Trace(table, rejoin="shared"), optim=OptimSpec("sgd", lr=1.0))
    # Step 0: gradients of 1 and 2, so -1.5, and a message of 1.5. Then node 2 begins with the outer parameters, 0.
    assert ends(trainer) == pytest.approx([-3.0, -3.0, -7 / 3])


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize(("delay", "wanted"), [(1, [-3.0, -2.0]), ([0, 1], [-3.0, -2.0]), ([1, 0], [-3.0, -3.0])])
def test_whoever_writes_first_makes_the_outer_step(delay: Any, wanted: list[float], absent: bool) -> None:
    """After step 1 node 0 is not heard, or not there; its delay may be the shortest."""
    options = {"availability": Trace([[True, True], [False, True], [True, True]])} if absent else {}
    outer = Outer(Mean(), OptimSpec("sgd", lr=1.0))
    exchange = Exchange(outer, every=2, delay=delay, lost=0.0 if absent else 0.5)
    assert torch.rand(2, generator=rng.generator(2, "lost w", 1)).ge(0.5).tolist() == [False, True]
    trainer = trained([exchange], 3, [[1.0] * 16] * 2, seed=2, optim=OptimSpec("sgd", lr=1.0), **options)
    assert ends(trainer) == [wanted[0] + absent, wanted[1]]  # who is absent misses a step
    assert trainer.state is not None
    assert trainer.state.shared["0.0/params"]["w"].item() == -2.0
    assert not [name for name in (*trainer.state.own, *trainer.state.shared) if "message" in name]


@pytest.mark.parametrize("delay", [1, [0, 1, 2]])
def test_moments_that_come_late_are_those_of_the_slots_by_name(delay: Any) -> None:
    found = []
    for of in ("moments", ["exp_avg", "exp_avg_sq"]):
        trainer = trained([Exchange(Mean(), every=3, of=of, delay=delay)], optim=OptimSpec("adamw", lr=0.1))
        assert trainer.state is not None
        found.append([x.tolist() for _, x in tree.flatten(trainer.state.own["optimizer"])] + [ends(trainer)])
    assert found[0] == found[1]


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_an_exchange_in_part_of_which_no_node_is_left_changes_what_all_share_in_part(weight: float) -> None:
    exchange = Exchange(Outer(Mean(), OptimSpec("sgd", lr=1.0)), every=SyncWeight([0, weight, 0]), delay=1)
    table = Trace([[True, True], [True, False], [False, True]])
    trainer = trained([exchange], 3, [[1.0] * 16] * 2, optim=OptimSpec("sgd", lr=1.0), availability=table)
    assert trainer.state is not None
    assert trainer.state.shared["0.0/params"]["w"].item() == -2.0 * weight
    assert ends(trainer) == [-2.0, -2.0]


@pytest.mark.parametrize("late", [{}, {"delay": 1}, {"delay": 1, "late": "change"}], ids=str)
@pytest.mark.parametrize("weight", [0.0, 1e-6, 0.25, 1.0])
def test_what_an_average_remembers_of_an_exchange_in_part_changes_in_part(weight: float, late: dict[str, Any]) -> None:
    exchange = Exchange(MostMoved(1.0), every=SyncWeight([weight, 0, 0]), **late)
    trainer = trained([exchange], 3, [[1.0] * 16] * 2, optim=OptimSpec("sgd", lr=1.0))
    assert trainer.state is not None
    assert trainer.state.shared["0.0/last"]["w"].item() == pytest.approx(-weight, abs=1e-12)


def test_who_returns_after_a_late_exchange_is_sent_the_mean_of_those_present() -> None:
    """Node 2 was not there when nodes 0, 1 and 3 agreed, so that it has something else in the step before."""
    table = [[True, True, False, True], [True, True, True, False], [True] * 4]
    data = [[-1.0] * 16, [-2.0] * 16, [-3.0] * 16, [-4.0] * 16]
    exchange = Exchange(Mean(), every=4, delay=1, offsets=[1])
    availability = Trace(table, rejoin="shared")
    trainer = trained([exchange], 3, data, optim=OptimSpec("sgd", lr=1.0), availability=availability)
    mean = (1 + 2 + 4) / 3
    before = [mean, mean, mean + 3]
    assert ends(trainer) == pytest.approx([mean + 1, mean + 2, mean + 6, sum(before) / 3 + 4])


def test_an_outer_step_of_each_node_is_none_of_a_server() -> None:
    """A node that sits out keeps its value: a message of each node's own has nothing for it."""
    optim = OptimSpec("sgd", lr=1.0, momentum=0.9)
    of_each = [Eager(ServerMean(), optim), Outer(ServerMean(), OptimSpec("sgd", lr=torch.tensor([1.0, 0.5, 1.0])))]
    for how in of_each:
        found = [ends(trained([Exchange(x, participation=0.5)], 6, seed=1)) for x in (how, altered(how, inner=Mean()))]
        assert found[0] == found[1]
        with pytest.raises(ValueError, match="needs a server that sends one result to all"):
            Exchange(how, participation=0.5, resting="take")
    Exchange(Outer(ServerMean(), optim), participation=0.5, resting="take")


class Slow(Average):
    """A running mean, which is returned as it is remembered."""

    def init(self, values: tree.Tree, run: Any, memory: Memory) -> None:
        memory.shared["mean"] = values

    def agree(self, x: tree.Tree, part: Part, memory: Memory) -> Any:
        memory.shared["mean"] = tree.map(lambda a, b: 0.5 * a + 0.5 * b, memory.shared["mean"], part.comm.mean(x))
        return memory.shared["mean"]


class Last(Average):
    """The node's own gradient, which is remembered."""

    common = False

    def init(self, values: tree.Tree, run: Any, memory: Memory) -> None:
        memory.own["last"] = values

    def agree(self, x: tree.Tree, part: Part, memory: Memory) -> Any:
        memory.own["last"] = x
        return x


@pytest.mark.parametrize("rejoin", [None, "shared", "own"])
def test_clipping_leaves_what_an_average_remembers(rejoin: Any) -> None:
    table = [[True, True, True], [True, False, True], [True] * 3, [True] * 3]
    availability = None if rejoin is None else Trace(table, rejoin=rejoin)
    mean = 7 / 3 * 15 / 16 + (0.0 if rejoin is None else (5 / 2 - 7 / 3) / 8)
    for how, name, wanted in ((Slow(), "mean", [mean]), (Last(), "last", [1.0, 2.0, 4.0])):
        exchanges = [Exchange(how, of="gradients")]
        for max_norm in (None, 0.5):
            trainer = trained(exchanges, 4, max_norm=max_norm, availability=availability)
            assert trainer.state is not None
            held = {**trainer.state.own, **trainer.state.shared}[f"0.0/{name}"]["w"].tolist()
            assert held == pytest.approx(wanted)


def test_nodes_that_train_are_drawn_for_the_same_rounds() -> None:
    first = Exchange(Mean(), every=2, participation=0.5)
    for every in (3, lambda step: 2):
        with pytest.raises(ValueError, match=r"in some steps no node is in both samples: give both the same every"):
            Strategy("sgd", [first, Exchange(Mean(), every=every, participation=0.5, of="momentum_buffer")])
    Strategy("sgd", [first, Exchange(Mean(), every=2, participation=0.7)])
    Strategy("sgd", [first, Exchange(Mean(), every=3)])
