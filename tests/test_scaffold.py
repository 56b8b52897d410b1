"""SCAFFOLD against its naive twin, its fixed points on quadratics, its identities, absences and bytes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.fitting import fit
from tests.helpers import assert_close, difference, run, stacked
from tests.models import make_batches, make_model
from tests.reference import common
from tests.reference.scaffold import scaffold
from tests.test_availability import Taken
from tests.test_decentralised import Valley, Valleys, schedule
from vecgym import Trainer
from vecgym.availability import Dropout, LocalSteps, Sampled, drawn
from vecgym.core import tree
from vecgym.simulation import State
from vecgym.strategy import AllReduceStrategy, FedAvgStrategy, OptimSpec, SCAFFOLDStrategy

F64 = torch.float64
K, STEPS, H = 5, 40, 4
WEIGHTS = [1.0, 4.0, 2.0, 0.5, 3.0]
COUNTS = [1, 4, 2, 3, 4]


def sample(step: int) -> list[int]:
    return list(drawn(0.6, range(K), 42, step // H))


# name -> (for vecgym, for the twin)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "everyone": ({"H": H}, {}),
    "a schedule": ({"H": H, "warmup_steps": 6, "cosine_anneal": True}, {"schedule": schedule}),
    "a round at rate 0": (
        {"H": H, "lr_scheduler": lambda step: float(step // H != 3)}, {"schedule": lambda step: float(step // H != 3)},
    ),
    "a sample": ({"H": H, "participation": 0.6}, {"participants": sample}),
    "a sample, weighted, a schedule, a rate of the server": (
        {"H": H, "participation": 0.6, "weighting": WEIGHTS, "server_lr": 0.7, "warmup_steps": 6,
         "cosine_anneal": True},
        {"participants": sample, "weights": WEIGHTS, "eta": 0.7, "schedule": schedule},
    ),
    "examples": ({"H": H, "weighting": "examples"}, {"weights": [3, 1, 4, 1, 5]}),
    "unequal steps": ({"local_steps": COUNTS}, {"local_steps": COUNTS}),
    "unequal steps of a sample, decay": (
        {"local_steps": COUNTS, "participation": 0.6, "inner_optim": OptimSpec(SGD, weight_decay=0.3)},
        {"local_steps": COUNTS, "participants": sample, "weight_decay": 0.3},
    ),
}  # fmt: skip


@functools.cache
def data(model: str, num_nodes: int = K) -> list[list[Any]]:
    return make_batches(model, STEPS, num_nodes, 3, dtype=F64)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_its_twin(case: str, engine: str) -> None:
    """Losses, the parameters of all nodes and all control variates, 40 steps in float64."""
    ours, theirs = CASES[case]
    start = make_model("MLP", dtype=F64)
    result = run(
        start, SCAFFOLDStrategy(lr=0.1, **ours), stacked(data("MLP")), engine=engine, num_examples=(3, 1, 4, 1, 5)
    )
    twin = scaffold(start, data("MLP"), K, H=H, lr=0.1, **theirs)
    assert_close(result.losses, twin.losses, 1e-10, "losses")
    params = [common.parameters(model) for model in twin.models]
    assert_close(result.params, {name: torch.stack([p[name] for p in params]) for name in params[0]}, 1e-10, "params")
    assert_close(result.state.shared["control"], tree.map(lambda x: x[None], twin.c), 1e-10, "c")
    each = {name: torch.stack([c[name] for c in twin.c_i]) for name in twin.c}
    assert_close(result.state.own["control"], each, 1e-10, "c_i")
    assert difference(result.state.own["control"], result.state.shared["control"]) > 1e-3


# ------------------------------------------------------------------------------------------ fixed points on quadratics


EXACT: dict[str, Callable[[], SCAFFOLDStrategy]] = {
    "everyone": lambda: SCAFFOLDStrategy("sgd", H, lr=0.1),
    "a sample": lambda: SCAFFOLDStrategy("sgd", H, participation=0.4, lr=0.1),
    "one at a time": lambda: SCAFFOLDStrategy("sgd", H, participation=0.2, lr=0.1),
    "unequal steps": lambda: SCAFFOLDStrategy("sgd", local_steps=COUNTS, lr=0.1),
    "unequal steps of a sample": lambda: SCAFFOLDStrategy("sgd", local_steps=COUNTS, participation=0.6, lr=0.1),
    "rounds that grow": lambda: SCAFFOLDStrategy("sgd", lambda step: 1 + step // 200, lr=0.1),
    "a slow server": lambda: SCAFFOLDStrategy("sgd", H, participation=0.6, server_lr=0.5, lr=0.1),
    "rates of the nodes": lambda: SCAFFOLDStrategy("sgd", H, lr=torch.linspace(0.04, 0.12, K, dtype=F64)),
}


@pytest.mark.parametrize("name", EXACT)
def test_it_reaches_the_optimum_of_unlike_quadratics(name: str) -> None:
    valleys = Valleys()
    strategy = EXACT[name]()
    result = valleys.train(strategy, 1200)
    assert_close(result.params["x"], valleys.optimum.expand(K, -1), 1e-9)
    assert_close(result.state.shared["control"]["x"], torch.zeros(1, 3, dtype=F64), 1e-9)
    fedavg = valleys.train(FedAvgStrategy("sgd", H, participation=strategy.exchanges[0].participation, lr=0.1), 200)
    assert difference(fedavg.params, {"x": valleys.optimum}) > 1e-2


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_weights_move_the_optimum(participation: float) -> None:
    """(sum w A)^-1 sum w b; with a weight decay of mu, (sum w A + mu I)^-1 sum w b."""
    valleys, w = Valleys(), torch.tensor(WEIGHTS, dtype=F64) / sum(WEIGHTS)
    A, b = torch.tensordot(w, valleys.A, 1) + 0.2 * torch.eye(3, dtype=F64), w @ valleys.b
    inner = OptimSpec(SGD, lr=0.1, weight_decay=0.2)
    result = valleys.train(SCAFFOLDStrategy(inner, H, participation, weighting=WEIGHTS), 1000)
    assert_close(result.params["x"], torch.linalg.solve(A, b).expand(K, -1), 1e-9)


def test_a_change_of_the_rate_leaves_nothing_behind() -> None:
    """Within a round, too: the divisor is the sum of the rates, not H times one of them."""
    valleys = Valleys()
    strategy = SCAFFOLDStrategy("sgd", H, lr=0.1, lr_scheduler=lambda step: 1.0 if step < 1002 else 0.1)
    before, after = (valleys.train(strategy, steps, max_steps=2000) for steps in (1000, 1200))
    for result in (before, after):
        assert_close(result.params["x"], valleys.optimum.expand(K, -1), 1e-9)
        gradients = (valleys.A @ valleys.optimum) - valleys.b
        assert_close(result.state.own["control"]["x"], gradients, 1e-8)


# ---------------------------------------------------------------------------------------------------------- identities


def test_one_step_of_everyone_is_data_parallel_training() -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data("MLP"))
    options: dict[str, Any] = {"warmup_steps": 6, "cosine_anneal": True}
    one = run(start, SCAFFOLDStrategy("sgd", 1, lr=0.2, server_lr=0.5, **options), batches)
    parallel = run(start, AllReduceStrategy("sgd", lr=0.1, **options), batches)
    assert_close(one.params, parallel.params, 1e-12)


def test_equal_nodes_take_plain_steps() -> None:
    start, batches = make_model("MLP", dtype=F64), stacked([[of_nodes[0]] * K for of_nodes in data("MLP")])
    corrected = run(start, SCAFFOLDStrategy("sgd", H, lr=0.1), batches)
    alone = run(start, FedAvgStrategy("sgd", H, lr=0.1), batches)
    assert_close(corrected.params, alone.params, 1e-12)


def averages(states: list[State], weights: list[float]) -> None:
    """c is the mean of all c_i."""
    w = torch.tensor(weights, dtype=F64) / sum(weights)
    for state in states:
        mean = tree.map(lambda x: torch.tensordot(w, x, 1)[None], state.own["control"])
        assert_close(mean, state.shared["control"], 1e-12)
    assert len(states) > 5
    assert difference(states[-1].own["control"], states[-1].shared["control"]) > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_the_mean_of_all_controls_is_that_of_the_server(case: str) -> None:
    ours, theirs = CASES[case]
    batches, states = stacked(data("MLP")), list[State]()
    for steps in range(1, STEPS, 3):
        strategy = SCAFFOLDStrategy(lr=0.1, **ours)
        states.append(run(make_model("MLP", dtype=F64), strategy, batches[:steps], num_examples=(3, 1, 4, 1, 5)).state)
    averages(states[4:], theirs.get("weights", [1.0] * K))


def valley_batches(valleys: Valleys, steps: int) -> list[Any]:
    return [(valleys.A[:, None], valleys.b[:, None])] * steps


@pytest.mark.parametrize("rejoin", ["own", "shared", "neighbour"])
@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_absent_nodes_keep_their_controls(participation: float, rejoin: Any) -> None:
    """The mean stays that of all, and the optimum is reached, with whatever parameters nodes return."""
    valleys, states = Valleys(), list[State]()
    strategy = SCAFFOLDStrategy("sgd", H, participation=participation, lr=0.1)
    taken = Taken(strategy, valley_batches(valleys, 1000), Dropout(0.1, 4, rejoin=rejoin), model=Valley())
    for steps in (7, 3, 3, 13, 13, 17, 4):
        states.append(copy.deepcopy(taken.run(steps).state))
    taken.run(1000 - taken.state.tick)
    averages(states, [1.0] * K)
    assert_close(taken.state.params["x"], valleys.optimum.expand(K, -1), 1e-9)


def as_available(strategy: Any, availability: Any) -> Trainer:
    trainer, _ = fit("MLP", strategy, num_nodes=4, max_steps=48, availability=availability, dtype=F64)
    return trainer


def test_sampled_nodes_are_a_sample() -> None:
    """`availability=Sampled` draws the same nodes."""
    some = as_available(SCAFFOLDStrategy("sgd", H, participation=0.5, lr=0.1), None)
    others = as_available(SCAFFOLDStrategy("sgd", H, lr=0.1), Sampled(0.5, H))
    assert some.history["train_loss"] == pytest.approx(others.history["train_loss"], rel=1e-12)
    assert some.ledger.total_bytes == others.ledger.total_bytes


def test_nodes_that_rest_have_done_their_steps() -> None:
    """`availability=LocalSteps` lets them do as many."""
    own = as_available(SCAFFOLDStrategy("sgd", local_steps=[1, 4, 2, 3], lr=0.1), None)
    others = as_available(SCAFFOLDStrategy("sgd", 4, lr=0.1), LocalSteps([1, 4, 2, 3], H=4))
    assert own.history["train_loss"] == pytest.approx(others.history["train_loss"], rel=1e-12)
    last: Any = own.run
    assert last.simulation.timetable.made(48) == [12, 48, 24, 36]


def test_bytes_are_twice_those_of_fedavg() -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data("MLP"))
    ledgers = [
        run(start, make("sgd", H, participation=0.6, lr=0.1), batches).comm.ledger
        for make in (SCAFFOLDStrategy, FedAvgStrategy)
    ]
    assert ledgers[0].total_bytes == pytest.approx(2 * ledgers[1].total_bytes, rel=1e-12)
    assert ledgers[0].total_received_bytes == pytest.approx(2 * ledgers[1].total_received_bytes, rel=1e-12)
    who = [entry.transfer.who for entry in ledgers[0]]
    assert [links.up for links in who[::2]] == [links.up for links in who[1::2]]  # type: ignore[union-attr]
    assert [sorted(links.up) for links in who[::2]] == [sample(step) for step in range(0, STEPS, H)]  # type: ignore[union-attr]


class Sometimes(Valley):
    """A valley, on which the loss of a node without any does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(1, dtype=F64))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        own = self.other.square().sum()
        return own + super().forward(batch) if bool(batch[0].any()) else own


def test_a_parameter_without_a_gradient_is_corrected_all_the_same() -> None:
    """A node whose loss does not depend on it moves along c, as one whose gradient is 0."""
    valleys = Valleys()
    valleys.A[0], valleys.b[0] = 0, 0
    batches = valley_batches(valleys, 3 * H - 1)
    zero = run(Valley(), SCAFFOLDStrategy("sgd", H, lr=0.1), batches)
    none = run(Sometimes(), SCAFFOLDStrategy("sgd", H, lr=0.1), batches, engine="loop")
    assert_close(none.params["x"], zero.params["x"], 1e-12)


def test_half_precision_sums_its_rates_in_float32() -> None:
    batches = [(x.bfloat16(), y) for x, y in stacked(data("MLP"))]
    result = run(make_model("MLP", dtype=torch.bfloat16), SCAFFOLDStrategy("sgd", 100, lr=0.01), batches)
    assert result.state.own["rates"].tolist() == pytest.approx([0.4] * K, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SCAFFOLDStrategy("adam"), r"inner_optim=OptimSpec\(Adam\): SCAFFOLD needs.*give inner_optim=\"sgd\""),
        (lambda: SCAFFOLDStrategy(OptimSpec(SGD, momentum=0.9)), "without momentum"),
        (lambda: SCAFFOLDStrategy(OptimSpec(SGD, momentum=torch.tensor(0.0))), "without momentum"),
        (lambda: SCAFFOLDStrategy(OptimSpec(SGD, maximize=True)), "plain steps"),
        (lambda: SCAFFOLDStrategy(OptimSpec(SGD, param_groups=lambda name, p: {})), "one rate"),
        (lambda: SCAFFOLDStrategy(OptimSpec(SGD, weight_decay=torch.ones(9, 1))), "weight_decay"),
        (lambda: SCAFFOLDStrategy(max_norm=1.0), "max_norm=1.0.*leave it out"),
        (lambda: SCAFFOLDStrategy(H=5, local_steps=[1, 2]), "a round has 2 steps. Leave out H"),
        (lambda: SCAFFOLDStrategy(local_steps=[1, 0]), r"local_steps\[1\]=0"),
        (lambda: SCAFFOLDStrategy(local_steps=[1, 2]).check(3, 10), "local_steps has numbers for 2"),
        (lambda: SCAFFOLDStrategy(weighting=[1.0, 2.0]).check(3, 200), "weighting has numbers for 2"),
        (lambda: SCAFFOLDStrategy(server_lr=-1.0), "server_lr=-1.0"),
        (lambda: SCAFFOLDStrategy(participation=0.0), "participation=0.0"),
    ],
)
def test_it_refuses(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_plain_steps_may_be_said_in_words() -> None:
    assert SCAFFOLDStrategy(OptimSpec(SGD, momentum=0.0), lr=0.1).inner_optim.lr == 0.1
    with pytest.raises(TypeError, match="must be a list of the local steps"):
        SCAFFOLDStrategy(local_steps=3)  # type: ignore[arg-type]
    assert SCAFFOLDStrategy(local_steps=Tensor([1, 2]).long()).local_steps == (1, 2)  # type: ignore[arg-type]
