"""The recorded backend: the bits of vmap, or vmap itself, with the reason."""

from __future__ import annotations

import copy
import functools
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fitting import STRATEGIES, dataset, same_run
from tests.models import MODELS, NO_VMAP, make_batches, make_model
from vecgym import Trainer, availability, sweep
from vecgym.core import tree
from vecgym.engine import Engine, recorded
from vecgym.engine.constancy import Uncertain, Watch
from vecgym.engine.vmap import Vmap
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy

SMALL = [name for name in MODELS if name not in NO_VMAP]
SCALE = 2.0
CENTER = torch.full((16,), 0.1)
CRITERION = nn.CrossEntropyLoss()
WEIGHTED = nn.CrossEntropyLoss(weight=torch.ones(10))


@pytest.fixture(autouse=True)
def _always_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MIN_PASSES", 1)


class Acting(Trainer):
    """A trainer that does something after step 9."""

    act: Callable[[], object] = staticmethod(lambda: None)

    def after_step(self, row: dict[str, Any]) -> None:
        if row["step"] == 9:
            self.act()


def both(
    make: Callable[[], nn.Module], data: Any, strategy: Any = "DiLoCo", before: Callable[[], object] = lambda: None,
    act: Callable[[], object] | None = None, loss_fn: Any = None, num_nodes: int = 3, **settings: Any,
) -> Trainer:  # fmt: skip
    """Train by the recorded operations, or what is taken in their place, and by vmap; compare all bits.

    Args:
        before: called before each of the two runs.
        act: called after step 9.
    """
    strategy = STRATEGIES[strategy]() if isinstance(strategy, str) else strategy
    settings = {"max_steps": 6, "batch_size": 4, "progress": False, "device": "cpu", **settings}
    trainers = []
    for engine in ("auto", "vmap"):
        before()
        trainer = Trainer(make(), data, loss_fn=loss_fn) if act is None else Acting(make(), data, loss_fn=loss_fn)
        vars(trainer)["act"] = act
        trainer.fit(strategy, num_nodes, engine=engine, **settings)
        trainers.append(trainer)
    ours, theirs = trainers
    assert theirs.history.settings["engine"] == "vmap"
    assert same_run(ours, theirs)
    assert ours.history["train_loss"] == theirs.history["train_loss"] != []
    return ours


def same_bits(name: str, strategy: Any = "DiLoCo", dtype: torch.dtype = torch.float32, **settings: Any) -> None:
    make = functools.partial(make_model, name, dtype=dtype)
    ours = both(make, dataset(name, 40, dtype=dtype), strategy, **settings)
    assert ours.history.settings["engine"] == "recorded", ours.history.settings["engine_reason"]


# ------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("strategy", ["DiLoCo", "AllReduce"])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "LSTM"])
def test_every_model(name: str, strategy: str) -> None:
    same_bits(name, strategy)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.float64},
        {"autocast": True},
        {"minibatch_size": 2},
        {"chunk_size": 2},
        {"num_epochs": 2, "max_steps": None, "batch_size": 5},  # the last batch is shorter
        {"num_nodes": 1},
        {"availability": availability.Dropout(0.4)},
        {"strategy": "FedAvg participation"},
        {"strategy": DiLoCoStrategy("adamw", H=2, lr=1e-2, max_norm=0.5)},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.parametrize("name", ["Dropout", "CNN"])
def test_every_setting(name: str, settings: dict[str, Any]) -> None:
    same_bits(name, **settings)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.second.weight = self.first.weight

    def forward(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.second(self.first(batch[0]).tanh())), batch[1])


def measured(module: nn.Module, batch: Any) -> dict[str, Tensor]:
    logits = module(batch[0])
    return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": (logits.argmax(1) == batch[1]).float().mean()}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def test_tied_weights() -> None:
    assert both(Tied, dataset("MLP", 40)).history.settings["engine"] == "recorded"


def test_a_loss_with_metrics() -> None:
    ours = both(network, dataset("MLP", 40), AllReduceStrategy(), loss_fn=measured)
    assert ours.history.settings["engine"] == "recorded"


@pytest.mark.parametrize(
    "strategy", [lambda lr: DiLoCoStrategy("sgd", lr=lr, H=2), lambda lr: AllReduceStrategy("sgd", lr=lr)]
)
def test_a_sweep(strategy: Any) -> None:
    grid: dict[str, Any] = {"lr": [0.1, 0.2], "num_nodes": [2, 3]}
    settings: dict[str, Any] = {"max_steps": 4, "batch_size": 4, "progress": False, "device": "cpu"}
    curves = []
    for engine in ("auto", "vmap"):
        result = sweep(
            make_model("Dropout"), dataset("Dropout", 40), strategy=strategy, grid=grid,
            engine=engine, **settings,
        )  # fmt: skip
        curves.append([row["train_loss"] for row in result.rows])
    assert curves[0] == curves[1]


def test_resumed_by_vmap(tmp_path: Path) -> None:
    """A checkpoint does not say which of the two it was, since they have the same bits."""
    settings: dict[str, Any] = {"batch_size": 4, "progress": False, "device": "cpu", "num_nodes": 3}
    trainers = []
    given: Any = [("auto", "a", 3), ("vmap", "a", 6), ("auto", "b", 6)]
    for engine, save_dir, stop_after in given:
        trainers.append(Trainer(make_model("MLP"), dataset("MLP", 40)))
        trainers[-1].fit(
            DiLoCoStrategy("adamw", H=2), max_steps=6, engine=engine, save_dir=tmp_path / save_dir, resume=True,
            stop=lambda row: row["step"] == stop_after, **settings,  # noqa: B023
        )  # fmt: skip
    assert [trainer.history.settings["engine"] for trainer in trainers] == ["recorded", "vmap", "recorded"]
    assert len(trainers[1].history) == len(trainers[2].history)
    assert same_run(trainers[1], trainers[2])


def engine_of(model: nn.Module, batch: Any, engine: str = "auto") -> Engine:
    made = Engine(model, engine=engine)
    made.prepare(batch)
    return made


def gradients(engine: Engine, batch: Any, **options: Any) -> Any:
    num_nodes = len(tree.leaves(batch)[0])
    params = {name: p.detach().expand(num_nodes, *p.shape).clone() for name, p in engine.params.items()}
    buffers = {name: b[None].clone() for name, b in engine.buffers.items()}
    return engine.gradients(params, buffers, batch, seed=0, step=0, **options)


def test_sixteen_lists_and_then_vmap() -> None:
    batch = tuple(torch.stack(x) for x in zip(*make_batches("MLP", 1, 20)[0]))
    ours, theirs = (engine_of(make_model("MLP"), batch, kind) for kind in ("auto", "vmap"))
    for size in range(1, 20):
        some = tree.map_leaves(lambda x: x[:size], batch)  # noqa: B023
        a, b = gradients(ours, some), gradients(theirs, some)
        assert all(torch.equal(a.grads[name], g) for name, g in b.grads.items())
        assert torch.equal(a.losses, b.losses)
    assert len(ours._recorded._lists) == recorded.MAX_LISTS
    assert ours.plan.engine == "recorded"


def test_a_rare_shape_has_no_list_and_its_counts_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MIN_PASSES", 3)
    monkeypatch.setattr(recorded, "MAX_SHAPES", 4)
    batch = tuple(torch.stack(x) for x in zip(*make_batches("MLP", 1, 20)[0]))
    engine = engine_of(make_model("MLP"), batch)
    lists = engine._recorded._lists
    few = tree.map_leaves(lambda x: x[:7], batch)
    for expected in (1, 1, 2, 2):  # of all 20 nodes, and of 7 from the third pass on
        gradients(engine, few)
        assert len(lists) == expected
    for size in range(8, 18):
        gradients(engine, tree.map_leaves(lambda x: x[:size], batch))  # noqa: B023
    assert len(engine._recorded._passes) == 4
    assert len(lists) == 2


def test_a_short_run_has_no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MIN_PASSES", 6)
    engines = {}
    for steps in (5, 6):
        trainer = both(functools.partial(make_model, "MLP"), dataset("MLP", 40), max_steps=steps)
        engines[steps] = trainer.history.settings["engine"], "fewer than 6 steps" in str(trainer.history.settings)
    assert engines == {5: ("vmap", True), 6: ("recorded", False)}


class Auto(nn.Module):
    """A linear autoencoder of 4 numbers; batch (input, target)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: Any) -> Tensor:
        return F.mse_loss(self.layer(batch[0]), batch[1])


def test_a_batch_with_one_tensor_twice() -> None:
    """Its list could not tell the two apart in a later batch."""
    x, y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    ours, theirs = (engine_of(Auto(), (x[:, :1], y[:, :1]), kind) for kind in ("auto", "vmap"))
    assert ours.plan.engine == "recorded"
    for batch in ((x, x), (x, y), (y, y)):
        assert torch.equal(gradients(ours, batch).losses, gradients(theirs, batch).losses)


def test_lists_are_compared() -> None:
    """Lists differ by the operations called, by their inputs, and by the constants."""

    def written(compute: Callable[[Tensor], Tensor]) -> recorded.Operations:
        x = torch.ones(2)
        with recorded.Recording([x]) as recording:
            y = compute(x)
        return recording.operations([y])

    assert written(lambda x: 2 * x + 1) == written(lambda x: 2 * x + 1)
    assert written(lambda x: x * torch.tensor(3.0)) == written(lambda x: x * torch.tensor(3.0))
    assert written(lambda x: 2 * x + 1) != written(lambda x: 2 * x - 1)
    assert written(lambda x: 2 * x) != written(lambda x: 3 * x)
    assert written(lambda x: x * torch.tensor(3.0)) != written(lambda x: x * torch.tensor(4.0))


@pytest.mark.parametrize(
    "settings", [{}, {"num_nodes": 5}, {"chunk_size": 1}, {"num_epochs": 2, "max_steps": None, "batch_size": 5}],
    ids=lambda settings: "-".join(settings),
)  # fmt: skip
@pytest.mark.parametrize("name", ["MLP", "CNN"])
def test_on_node_threads(name: str, settings: dict[str, Any]) -> None:
    same_bits(name, node_threads=2, **settings)


def test_node_threads_call_lists_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one has more nodes than the other: each number of nodes has a list before the first step."""
    computed, given = [], Vmap._computed
    monkeypatch.setattr(Vmap, "_computed", lambda self, *args: computed.append(args) or given(self, *args))  # type: ignore[func-returns-value]
    batch = torch.randn(5, 3, 16), torch.zeros(5, 3, dtype=torch.long)
    engine = Engine(make_model("MLP"), node_threads=2)
    assert str(engine.prepare(batch)).startswith("recorded, 2 node threads")
    computed.clear()
    found = gradients(engine, batch)
    assert not computed
    engine.use(replace(engine.plan, engine="vmap"))
    expected = gradients(engine, batch)
    assert len(computed) == 2
    assert all(map(torch.equal, tree.leaves(found.grads), tree.leaves(expected.grads)))
    engine.close()


def test_a_value_that_changes_under_node_threads() -> None:
    scale: Any = globals()

    def before() -> None:
        scale.update(SCALE=2.0)

    ours = both(OfAGlobal, dataset("MLP", 40), before=before, max_steps=14, node_threads=2,
                act=lambda: scale.update(SCALE=0.25))  # fmt: skip
    before()
    assert "'SCALE' has changed" in ours.history.settings["engine_reason"]


def test_a_larger_model_needs_more_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "FEW_PARAMETERS", 10)
    batch = torch.randn(2, 3, 16), torch.zeros(2, 3, dtype=torch.long)
    engine = Engine(make_model("MLP"))
    assert "fewer than 4 steps" in engine.prepare(batch, num_passes=3).reason
    assert engine.prepare(batch, num_passes=4).engine == "recorded"


def test_not_above_a_size() -> None:
    batch = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)

    class Wide(nn.Sequential):
        def forward(self, batch: Any) -> Tensor:
            return F.cross_entropy(super().forward(batch[0]), batch[1])

    engine = engine_of(Wide(nn.Linear(4, 40_000), nn.Linear(40_000, 2)), batch)
    assert "more than 200,000 parameters" in engine.plan.reason
    assert engine_of(Wide(nn.Linear(4, 2)), batch).plan.engine == "recorded"


# ------------------------------------------------------------------------- what could be frozen: right, or with vmap


class Trap(nn.Module):
    """A classifier of 16 numbers whose loss is multiplied by `factor`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 10)
        self.scale = 1.0
        self.calls = 0

    def forward(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1]) * self.factor()

    def factor(self) -> Any:
        return self.scale


class Counting(Trap):
    def factor(self) -> Any:
        self.calls += 1
        return 1.0 if self.calls % 4 else 0.5


@dataclass
class Counter:
    count: int = 0

    def next(self) -> int:
        self.count += 1
        return self.count


class CountingInAnObject(Trap):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def factor(self) -> Any:
        return 1.0 if self.counter.next() % 4 else 0.5


class CountingInItsClass(Trap):
    total = 0

    def factor(self) -> Any:
        type(self).total += 1
        return 1.0 if self.total % 4 else 0.5


class CountingInADefault(Trap):
    def factor(self, counts: list[int] = []) -> Any:  # noqa: B006
        counts.append(1)
        return 1.0 if len(counts) % 4 else 0.5


class Drawing(Trap):
    def factor(self) -> Any:
        return random.random()


class DrawingByNumpy(Trap):
    def factor(self) -> Any:
        return float(np.random.rand())  # noqa: NPY002


class DrawingFromItsOwn(Trap):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def factor(self) -> Any:
        return self.generator.random()


class Importing(Trap):
    def factor(self) -> Any:
        from random import random as draw

        return draw()


class Timing(Trap):
    def factor(self) -> Any:
        return 1.0 if time.perf_counter() > 0 else 0.5


class BySeed(Trap):
    def factor(self) -> Any:
        return 1.0 if torch.initial_seed() % 2 else 0.5


class ByMode(Trap):
    def factor(self) -> Any:
        return (1.0 if self.training else 0.5) * (1.0 if torch.is_grad_enabled() else 0.5)


class OfAGlobal(Trap):
    def factor(self) -> Any:
        return SCALE


class OfAGlobalTensor(Trap):
    def factor(self) -> Any:
        return CENTER.sum()


class OfAModuleOutside(Trap):
    def forward(self, batch: Any) -> Tensor:
        return CRITERION(self.layer(batch[0]), batch[1])


class OfItsClass(Trap):
    weight = 2.0

    def factor(self) -> Any:
        return self.weight


class Below(OfItsClass):
    """Has the attribute of the class above it."""


class OfAFunction(Trap):
    def factor(self) -> Any:
        return of_function.scale  # type: ignore[attr-defined]


def of_function() -> None:
    """Have an attribute."""


class OfAValue(Trap):
    def factor(self) -> Any:
        return WEIGHTED.weight.tolist()[0]  # type: ignore[union-attr]


class ByAName(Trap):
    def factor(self) -> Any:
        return getattr(self, "_" + "drawn")()

    def _drawn(self) -> float:
        return random.random()


class Printing(Trap):
    def factor(self) -> Any:
        print("a step")
        return 1.0


class Reading(Trap):
    """Reads the value of a tensor in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.tensor(0.5))

    def factor(self) -> Any:
        return 2.0 if self.threshold.item() > 0 else 1.0  # type: ignore[operator]


class Constant(Trap):
    """Has a part of the loss that does not depend on anything."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) + torch.tensor(1.0)


def of_a_closure() -> tuple[Callable[[], nn.Module], Callable[[float], None]]:
    value = torch.tensor(2.0)

    class Closing(Trap):
        def factor(self) -> Any:
            return value

    def put(new: float) -> None:
        nonlocal value
        value = torch.tensor(new)

    return Closing, put


UNSTEADY: dict[type[Trap], str] = {  # the engine refuses them, or takes the loop: this is another safeguard
    Counting: "factor sets 'calls'",
    CountingInAnObject: "next sets 'count'",
    CountingInItsClass: "factor sets 'total'",
    CountingInADefault: "a default of factor is a list",
    Drawing: "the global 'random.random'",
    DrawingByNumpy: "the global 'np.random.rand'",
    DrawingFromItsOwn: "'random', which may do something else each time",
    Importing: "factor imports 'random'",
    ByAName: "the global 'random.random'",
}


@pytest.mark.parametrize("trap", UNSTEADY, ids=lambda trap: trap.__name__)
def test_state_and_random_numbers_are_not_written_down(trap: type[Trap]) -> None:
    with pytest.raises(Uncertain, match=UNSTEADY[trap]):
        Watch(trap())


REFUSED: dict[type[Trap], str] = {
    Timing: "the global 'time.perf_counter'",
    BySeed: "the global 'torch.initial_seed'",
    OfAGlobalTensor: "the global 'CENTER' is a Tensor",
    OfAValue: "hands values of tensors to Python (tolist)",
    Printing: "'print'",
    Reading: "hands values of tensors to Python",
}


@pytest.mark.parametrize("trap", REFUSED, ids=lambda trap: trap.__name__)
def test_what_a_forward_must_not_do(trap: type[Trap], capsys: pytest.CaptureFixture[str]) -> None:
    ours = both(trap, dataset("MLP", 40), max_steps=12)
    assert ours.history.settings["engine"] == "vmap"
    assert REFUSED[trap] in ours.history.settings["engine_reason"]


@pytest.mark.parametrize("model", [ByMode, OfAGlobal, OfAModuleOutside, OfItsClass, Constant])
def test_what_it_may(model: type[Trap]) -> None:
    assert both(model, dataset("MLP", 40)).history.settings["engine"] == "recorded"


def test_a_callback_changes_what_the_forward_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on vmap computes, with the new value."""
    here = globals()
    module = nn.CrossEntropyLoss(label_smoothing=0.3)
    for model, act, name in [
        (OfAGlobal, lambda: here.update(SCALE=0.25), "SCALE"),
        (OfAModuleOutside, lambda: here.update(CRITERION=module), "CRITERION"),
        (OfAModuleOutside, lambda: setattr(CRITERION, "label_smoothing", 0.7), "label_smoothing"),
        (OfAModuleOutside, lambda: setattr(CRITERION, "weight", torch.linspace(0, 1, 10)), "weight"),
        (OfItsClass, lambda: setattr(OfItsClass, "weight", 0.25), "weight"),
        (Below, lambda: setattr(Below, "weight", 0.25), "an attribute or an entry was added"),
        (OfAFunction, lambda: setattr(of_function, "scale", 0.25), "scale"),
        (ByMode, lambda: setattr(ByMode, "factor", OfAGlobal.factor), "factor"),
    ]:
        with monkeypatch.context() as changes:
            for holder, key in [(OfItsClass, "weight"), (ByMode, "factor")]:
                changes.setattr(holder, key, vars(holder)[key])

            def before() -> None:
                here.update(SCALE=2.0, CRITERION=nn.CrossEntropyLoss())
                of_function.scale = 2.0  # type: ignore[attr-defined]
                if "weight" in vars(Below):
                    del Below.weight
                OfItsClass.weight = 2.0
                ByMode.factor = factor  # type: ignore[method-assign]  # noqa: B023

            factor = ByMode.factor
            ours = both(model, dataset("MLP", 40), before=before, max_steps=14, act=act)
            plain = both(model, dataset("MLP", 40), before=before, max_steps=14)
        assert (f"{name!r} has changed" if " " not in name else name) in ours.history.settings["engine_reason"]
        assert not same_run(ours, plain)
        before()


def test_a_callback_replaces_a_tensor_of_a_closure() -> None:
    make, put = of_a_closure()
    ours = both(make, dataset("MLP", 40), before=lambda: put(2.0), max_steps=14, act=lambda: put(0.5))
    assert "the outer variable 'value'" in ours.history.settings["engine_reason"]


def test_a_callback_sets_an_attribute_of_the_model() -> None:
    """The engine has a copy, whichever it is."""
    made: list[Trap] = []

    def make() -> Trap:
        made.append(Trap())
        return made[-1]

    def act() -> None:
        made[-1].scale = 0.1

    ours = both(make, dataset("MLP", 40), max_steps=14, act=act)
    assert ours.history.settings["engine"] == "recorded"


def test_a_hook_of_a_module_is_part_of_the_forward() -> None:
    def doubled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return 2 * out

    def drawn(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return (1.0 if time.perf_counter() > 0 else 0.5) * out

    def hooked(hook: Any) -> nn.Module:
        model = Trap()
        model.layer.register_forward_hook(hook)
        return model

    data = dataset("MLP", 40)
    assert both(lambda: hooked(doubled), data).history.settings["engine"] == "recorded"
    assert both(lambda: hooked(drawn), data).history.settings["engine"] == "vmap"


def test_an_autocast_around_a_run_is_seen() -> None:
    """It changes operations that are no longer in the list."""

    class Cosine(Auto):
        def forward(self, batch: Any) -> Tensor:
            return F.cosine_embedding_loss(self.layer(batch[0]), batch[1], torch.ones(len(batch[0])))

    batch = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    ours, theirs = (engine_of(Cosine(), batch, kind) for kind in ("auto", "vmap"))
    assert ours.plan.engine == "recorded"
    with torch.autocast("cpu"):
        a, b = gradients(ours, batch), gradients(theirs, batch)
    assert a.losses.dtype == b.losses.dtype
    assert torch.equal(a.losses, b.losses)
    assert not torch.equal(a.losses, gradients(theirs, batch).losses)


def test_a_copied_engine_has_no_lists() -> None:
    batch = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    ours = engine_of(Auto(), batch)
    copied = copy.deepcopy(ours)
    assert torch.equal(gradients(copied, batch).losses, gradients(ours, batch).losses)
    assert (ours.plan.engine, copied.plan.engine) == ("recorded", "vmap")


def test_an_error_names_the_line_of_the_model() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens).square().mean()

    engine = engine_of(Looking(), torch.zeros(2, 3, dtype=torch.long))
    assert engine.plan.engine == "recorded"
    with pytest.raises(RuntimeError, match=r"one of the nodes 0 to 1 .*step 0.*self\.table\(tokens\)"):
        gradients(engine, torch.full((2, 3), 7))


def test_derivatives_of_gradients_are_those_of_vmap() -> None:
    batch = torch.randn(2, 3, 16), torch.zeros(2, 3, dtype=torch.long)
    ours = engine_of(Trap(), batch)
    params = {name: p.detach().expand(2, *p.shape).clone().requires_grad_() for name, p in ours.params.items()}
    local = ours.gradients(params, {}, batch, seed=0, step=0, differentiable=True)
    theirs = Engine(ours.model, engine="vmap")
    theirs.prepare(batch)
    expected = theirs.gradients(params, {}, batch, seed=0, step=0, differentiable=True)
    assert ours.plan.engine == "recorded"
    for name, g in local.grads.items():
        second, wanted = (
            torch.autograd.grad(x.square().sum(), params[name], retain_graph=True)[0] for x in (g, expected.grads[name])
        )
        assert torch.equal(second, wanted)


def test_the_watch_is_short() -> None:
    watch = Watch(make_model("MLP"))
    assert watch.changed() == ""
    assert len(watch._items) + len(watch._sizes) < 100


def test_two_runs_at_once() -> None:
    """In two threads of a process, each of which writes its operations down."""
    expected = both(Trap, dataset("MLP", 40))
    found = [Trainer(Trap(), dataset("MLP", 40)) for _ in range(2)]

    def train(trainer: Trainer) -> None:
        trainer.fit(STRATEGIES["DiLoCo"](), 3, max_steps=6, batch_size=4, progress=False, device="cpu")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, found))
    assert all(same_run(trainer, expected) for trainer in found)
