"""Plain steps: taken where they should be, with the bits of the ordinary ones, and left where they would be wrong."""

from __future__ import annotations

import signal
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from tests.fitting import Rows, dataset, same_run
from tests.models import make_data, make_model
from vecgym import OptimSpec, Trainer, availability, sweep
from vecgym.clock import Compute, Network
from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.data import Batches, source
from vecgym.engine import Engine, Plan, recorded
from vecgym.simulation.plain import Plain
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, FedAvgStrategy, SPARTAStrategy, Strategy
from vecgym.strategy.simulated import simulation_of

STEPS, K, B = 12, 3, 4
SCALE = 1.0
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "DiLoCo": lambda: DiLoCoStrategy("adamw", H=5, lr=0.01),
    "AllReduce": lambda: AllReduceStrategy("adamw", lr=0.01),
    "SPARTA": lambda: SPARTAStrategy(inner_optim="sgd", lr=0.1, p_sparta=0.1),
    "momentum": lambda: FedAvgStrategy("sgd", H=3, lr=torch.tensor(0.1), lr_scheduler="cosine"),
    "kernel": lambda: FedAvgStrategy("lion", H=3, lr=0.01),
    "foreach": lambda: FedAvgStrategy("nadam", H=3, lr=0.01),
}

Act = Callable[[Trainer, int], object]


class Watched(Trainer):
    """A trainer that does something after each step."""

    act: Act = staticmethod(lambda trainer, step: None)

    def after_step(self, row: dict[str, Any]) -> None:
        self.act(self, row["step"])


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the passes and the optimizer's steps that are plain."""
    monkeypatch.setattr(recorded, "MIN_PASSES", 1)
    counts: Counter[str] = Counter()
    passes, step = Plain.gradients, Plain.step

    def counted_passes(self: Plain, *args: Any) -> Any:
        local = passes(self, *args)
        counts["passes"] += local is not None
        return local

    def counted_step(self: Plain, *args: Any) -> bool:
        is_plain = step(self, *args)
        counts["steps"] += is_plain
        return is_plain

    monkeypatch.setattr(Plain, "gradients", counted_passes)
    monkeypatch.setattr(Plain, "step", counted_step)
    return counts


def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, take no plain step, and read each batch alone."""
    monkeypatch.setattr(Plain, "gradients", lambda *args: None)
    monkeypatch.setattr(Plain, "step", lambda *args: False)
    monkeypatch.setattr(source, "MOST_TOGETHER", 1)


def losses(trainer: Trainer) -> list[list[float | None]]:
    """Of each step and node; None where it has not trained."""
    return [[x if x == x else None for x in row["train_losses"].tolist()] for row in trainer.history if row["step"]]


Fit = Callable[..., Trainer]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Fit:
    """A fit in plain steps, which has been compared with one in ordinary steps, bit by bit."""

    def fit(
        model: str | Callable[[], nn.Module] = "MLP", strategy: Any = "DiLoCo", data: Any = None,
        act: Act | None = None,
        dtype: torch.dtype = torch.float32, **settings: Any,
    ) -> Trainer:  # fmt: skip
        trainers = []
        for is_plain in (True, False):
            with monkeypatch.context() as patch:
                if not is_plain:
                    ordinary(patch)
                module = make_model(model, dtype=dtype) if isinstance(model, str) else model()
                examples = data() if data else dataset(str(model), 200, dtype=dtype)
                trainer = (Trainer if act is None else Watched)(module, examples)
                vars(trainer)["act"] = act
                given = STRATEGIES[strategy]() if isinstance(strategy, str) else strategy()
                common = {"batch_size": B, "max_steps": STEPS, "device": "cpu", "progress": False}
                trainer.fit(given, K, **{**common, **settings})
                trainers.append(trainer)
        ours, theirs = trainers
        assert same_run(ours, theirs)
        assert losses(ours) == losses(theirs) != []
        return ours

    return fit


# ------------------------------------------------------------------------------------------ where they are taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plain_steps_are_taken(strategy: str, dtype: torch.dtype, both: Fit, taken: Counter[str]) -> None:
    both("MLP", strategy, dtype=dtype)
    assert taken == {"passes": STEPS, "steps": STEPS}


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_groups_of_parameters_and_dicts_of_tensors(lr: Any, both: Fit, taken: Counter[str]) -> None:
    def groups(name: str, p: Tensor) -> dict[str, Any]:
        return {"lr": 0.5, "weight_decay": 0.0} if p.dim() < 2 else {}

    spec = OptimSpec("adamw", lr=lr, param_groups=groups)
    both("DictBatch", lambda: DiLoCoStrategy(spec, H=5), lambda: Rows(make_data("DictBatch", 200)))
    assert taken == {"passes": STEPS, "steps": STEPS}


def test_short_epochs(both: Fit, taken: Counter[str]) -> None:
    """The last batch of an epoch is smaller, and has a list of its own."""
    both("MLP", data=lambda: dataset("MLP", 40), max_steps=None, num_epochs=3, batch_size=5)
    assert taken["passes"] > 6


def swept(grid: dict[str, Any], strategy: Any, **settings: Any) -> list[Any]:
    common = {"num_nodes": K, "batch_size": B, "max_steps": STEPS, "device": "cpu", "progress": False}
    result = sweep(make_model("MLP"), dataset("MLP", 200), strategy=strategy, grid=grid, **{**common, **settings})
    return [row["train_loss"] for row in result.rows]


@pytest.mark.parametrize(
    ("grid", "strategy", "expected"),
    [
        ({"lr": [0.1, 0.2, 0.3], "H": [2, 3]}, lambda lr, H: DiLoCoStrategy("adamw", H=H, lr=lr), (STEPS, STEPS)),
        ({"lr": [0.1, 0.2]}, lambda lr: AllReduceStrategy("sgd", lr=lr), (0, STEPS)),
        ({"optim": ["adamw", "sgd"]}, lambda optim: FedAvgStrategy(optim, H=2, lr=0.01), (STEPS, 0)),  # not as a whole
    ],
)
def test_a_sweep(
    grid: Any, strategy: Any, expected: tuple[int, int], taken: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = swept(grid, strategy)
    assert (taken["passes"], taken["steps"]) == expected
    ordinary(monkeypatch)
    assert swept(grid, strategy) == found


# ------------------------------------------------------------------------------------- where they would be wrong


class Normed(nn.Module):
    """Writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    def forward(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])


class Writing(Normed):
    """Writes to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 10))

    def forward(self, batch: Any) -> Tensor:
        loss = super().forward(batch)
        with torch.no_grad():
            next(self.parameters()).mul_(0.9)
        return loss


class Scaled(Normed):
    """Has a factor that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 10))

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) * SCALE


def hooked() -> nn.Module:
    model = Scaled()
    next(model.parameters()).register_hook(lambda g: 2 * g)
    return model


@pytest.mark.parametrize(
    ("model", "settings", "passes"),
    [
        ("Dropout", {}, 0),
        (Normed, {}, 0),
        (Writing, {}, 0),
        (hooked, {}, 0),
        ("MLP", {"chunk_size": 2}, 0),
        ("MLP", {"minibatch_size": 2}, 0),
        ("MLP", {"engine": "vmap"}, 0),
        ("MLP", {"autocast": True}, STEPS),
    ],
)
@pytest.mark.parametrize("strategy", ["DiLoCo", "AllReduce"])
def test_models_and_settings(
    model: Any, settings: dict[str, Any], passes: int, strategy: str, both: Fit, taken: Counter[str]
) -> None:
    if (model, strategy) == (Writing, "AllReduce"):
        pytest.skip("refused: what it writes differs between the nodes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models that vmap cannot run
        both(model, strategy, lambda: dataset("MLP", 200), **settings)
    assert taken["passes"] == passes


def test_clipping_and_settings_of_nodes(both: Fit, taken: Counter[str]) -> None:
    both("MLP", lambda: DiLoCoStrategy("adamw", H=5, lr=0.01, max_norm=0.1))
    both("MLP", lambda: DiLoCoStrategy("adamw", H=5, lr=torch.tensor([0.01, 0.02, 0.03])))
    both("MLP", lambda: DiLoCoStrategy("adamw", H=5, lr=torch.linspace(0.01, 0.1, STEPS)[:, None]))
    assert taken == {"passes": 3 * STEPS, "steps": 0}


@pytest.mark.parametrize("strategy", ["DiLoCo", "AllReduce"])
def test_absent_nodes(strategy: str, both: Fit, taken: Counter[str]) -> None:
    """Plain where all are there or, if nodes share their parameters, for each number of nodes."""
    who = availability.Dropout(0.5, mean_steps=2, rejoin="shared")
    numbers = [K - each.count(None) for each in losses(both("MLP", strategy, availability=who, max_steps=16))]
    first = {number: numbers.index(number) for number in numbers}  # each has a list from its second step on
    shared = 16 - sum(first[number] == step and number < K for step, number in enumerate(numbers))
    assert len(first) == K
    assert taken["passes"] == (shared if strategy == "AllReduce" else numbers.count(K))


def test_a_node_with_fewer_examples_than_a_batch(both: Fit, taken: Counter[str]) -> None:
    data = TensorDataset(*make_data("MLP", 40))
    shards = [range(3), range(3, 20), range(20, 40)]
    both("MLP", data=lambda: lambda rank, num_nodes, train: Subset(data, shards[rank]))
    assert taken["passes"] == 0


def test_a_model_that_changes_within_a_run(both: Fit, taken: Counter[str]) -> None:
    def act(trainer: Trainer, step: int) -> None:
        globals()["SCALE"] = 0.5 if 7 <= step < STEPS else 1.0

    changed = losses(both(Scaled, "DiLoCo", lambda: dataset("MLP", 200), act))
    assert taken["passes"] == 7
    same = losses(both(Scaled, "DiLoCo", lambda: dataset("MLP", 200)))
    assert [a == b for a, b in zip(changed, same)] == [True] * 7 + [False] * 5


@pytest.mark.parametrize("replace", [False, True])
def test_a_dataset_that_changes_within_a_block(replace: bool, both: Fit, taken: Counter[str]) -> None:
    """Each step reads what the dataset is then."""

    def act(trainer: Trainer, step: int) -> None:
        held: Any = trainer.train_dataset
        if step == 5 and replace:
            held.tensors = (2 * held.tensors[0], held.tensors[1])
        elif step == 5:
            held.tensors[0].mul_(2.0)

    changed = losses(both("MLP", "DiLoCo", act=act))
    assert taken["passes"] == 12
    same = losses(both("MLP", "DiLoCo"))
    assert [a == b for a, b in zip(changed, same)] == [True] * 5 + [False] * 7


class Meddling(DiLoCoStrategy):
    """Changes its parameters before it trains: in place, or by new tensors."""

    def __init__(self, how: str) -> None:
        super().__init__("adamw", H=5, lr=0.01)
        self.kind = how

    def train(self, part: Any) -> None:
        if part.tick in (3, 8):
            change = (lambda p: p.mul_(0.5)) if self.kind == "in place" else (lambda p: p * 0.5)
            part.params = tree.map(change, part.params)
        super().train(part)


@pytest.mark.parametrize("how", ["in place", "new"])
def test_parameters_that_a_handler_changes(how: str, both: Fit, taken: Counter[str]) -> None:
    both("MLP", lambda: Meddling(how))
    assert taken == {"passes": STEPS, "steps": STEPS}


def stepped(change: Callable[[Any, int], Any], monkeypatch: pytest.MonkeyPatch, is_plain: bool) -> list[Tensor]:
    """The parameters after steps by hand, with a state that is changed after each."""
    with monkeypatch.context() as patch:
        if not is_plain:
            ordinary(patch)
        data = Batches(dataset("MLP", 200), K, B)
        engine = Engine(make_model("MLP"))
        engine.prepare(next(iter(data)))
        simulation = simulation_of(
            make_model("MLP"), STRATEGIES["DiLoCo"](), StackedCollectives(K), max_steps=STEPS, engine=engine
        )
        state = simulation.init()
        for step, batch in zip(range(STEPS), data):
            state, _ = simulation.step(state, batch)
            state = change(state, step)
            if step == 6:
                engine.use(Plan("vmap"))
    return list(state.params.values())


def replaced(state: Any, step: int) -> Any:
    """A state like a loaded one: equal, in other tensors; or a slot of it."""
    if step == 2:
        return type(state)(state.tick, *tree.map_leaves(torch.clone, (state.own, state.shared)))
    if step == 4:
        slots = state.own["optimizer"]
        slots["exp_avg"] = tree.map(lambda x: 0.5 * x, slots["exp_avg"])
    return state


def test_a_state_that_is_replaced_and_an_engine_with_another_plan(
    monkeypatch: pytest.MonkeyPatch, taken: Counter[str]
) -> None:
    ours = stepped(replaced, monkeypatch, True)
    assert taken == {"passes": 7, "steps": STEPS}
    theirs = stepped(replaced, monkeypatch, False)
    assert all(map(torch.equal, ours, theirs))


# ------------------------------------------------------------------------------------------------ within a block


def resumed(folder: Path, act: Act | None, **settings: Any) -> Trainer:
    """A run that ends after step 5, and goes on from its checkpoint."""
    for last in (False, True):
        trainer = Watched(make_model("MLP"), dataset("MLP", 200))
        if act is not None and not last:
            vars(trainer)["act"] = act
        common: dict[str, Any] = {"batch_size": B, "max_steps": STEPS, "device": "cpu", "progress": False}
        try:
            trainer.fit(
                STRATEGIES["DiLoCo"](), K, save_dir=folder, resume=True, **common, **({} if last else settings)
            )  # fmt: skip
        except KeyboardInterrupt:
            assert act is not None
        assert len(trainer.history) == (STEPS if last else 5)
    return trainer


def interrupt(trainer: Trainer, step: int) -> None:
    if step == 5:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("end", ["stop", "Ctrl-C", "max_seconds"])
def test_an_end_within_a_block(end: str, both: Fit, tmp_path: Path) -> None:
    """Nothing is lost, and the resumed run, whose blocks begin elsewhere, has the bits of one without an end."""
    expected = both("MLP", "DiLoCo")
    if end == "stop":
        found = resumed(tmp_path, None, stop=lambda row: row["step"] == 5)
    elif end == "Ctrl-C":
        found = resumed(tmp_path, interrupt)
    else:
        clock: Any = {"network": Network("1 Gbit/s", "1 ms"), "compute": Compute(0.4)}
        found = resumed(tmp_path, None, max_seconds=1.9, **clock)
    assert same_run(found, expected)
    assert losses(found) == losses(expected)


@pytest.mark.parametrize("shape", [(3,), (16,)])
def test_batches_of_a_block_are_those_that_are_read_alone(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin where new memory would, since the last bits of a sum may depend on that."""
    data = TensorDataset(torch.randn(100, *shape), torch.arange(100, dtype=torch.int16))
    calls, gather = [], source._gather

    def counted(dataset: Any, index: Tensor) -> Any:
        calls.append(index)
        return gather(dataset, index)

    monkeypatch.setattr(source, "_gather", counted)
    together = list(zip(range(40), Batches(data, K, B)))
    count = len(calls)
    monkeypatch.setattr(source, "MOST_TOGETHER", 1)
    for (_, ours), theirs in zip(together, Batches(data, K, B)):
        for x, y in zip(ours, theirs):
            assert torch.equal(x, y)
            assert (x.stride(), x.data_ptr() % source.ALIGNMENT) == (y.stride(), 0)
    assert count < 12 < len(calls) - count


class Windows(nn.Module):
    """Reads its batch by an operation that knows where a tensor begins in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layer(x.as_strided((4, 4), (4, 1))), y)


def test_places_in_memory(both: Fit, taken: Counter[str]) -> None:
    """A list would read the examples of the first batch again."""
    trainer = both(
        Windows,
        data=lambda: TensorDataset(
            torch.randn(144, 4, generator=torch.Generator().manual_seed(0)), torch.arange(144) % 2
        ),
    )
    assert "place of a tensor in memory" in trainer.history.settings["engine_reason"]
    assert taken["passes"] == 0
