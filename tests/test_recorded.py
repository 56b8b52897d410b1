"""The backend `graph`, with graphs that are replayed on the CPU (`tests.replays`)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import helpers
from tests.fitting import dataset, fit, same_run
from tests.helpers import NEEDS_LOOP, STACKS_CHECKPOINTS, assert_same_bits
from tests.models import MLP, MODELS, make_model
from tests.replays import Replayed
from tests.test_properties import NAMES, STEPS, make, run, setup
from vecgym import Trainer, VecgymWarning
from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.data import Batches
from vecgym.engine import Engine, Local, recorded
from vecgym.engine.attendance import Facts
from vecgym.engine.availability import Trace
from vecgym.engine.presence import Presence
from vecgym.engine.recorded import MAX_RECORDINGS, MEETINGS, Recorded, StepRecording
from vecgym.engine.simulation import Simulation
from vecgym.optim import OptimSpec, RecordableStep
from vecgym.strategy import AllReduceStrategy, AveragingCommunicator, Context, DiLoCoStrategy, FedAvgStrategy, Strategy
from vecgym.strategy.communication import Wrapper

K = 3
RECORDABLE = [name for name in MODELS if name not in (*NEEDS_LOOP, "Checkpointed")]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recorded, "record", Replayed)
    monkeypatch.setattr(recorded, "check_recordable", lambda device: None)
    monkeypatch.setattr(Replayed, "made", [])
    with warnings.catch_warnings():
        warnings.simplefilter("error", VecgymWarning)
        yield


def replays() -> int:
    return sum(graph.replays for graph in Replayed.made)


def passes(model: nn.Module, engine: str, batches: list[Any], mean: bool = False, **settings: Any) -> list[Local]:
    """One after the other, each from parameters that the last has moved, and the buffers that it has left."""
    computed = Engine(model, engine=engine)
    assert computed.prepare(batches[0], mean=mean).engine == engine
    Replayed.made.clear()
    num_nodes = 1 if mean else K
    params = {n: p.detach()[None].repeat(num_nodes, *[1] * p.dim()) for n, p in computed.params.items()}
    buffers = {n: b[None].repeat(K, *[1] * b.dim()) for n, b in computed.buffers.items()}
    found = []
    for step, batch in enumerate(batches):
        local = computed.gradients(params, buffers, batch, seed=1, step=step, mean=mean, **settings)
        found.append(tree.map_leaves(torch.clone, local))
        for name, p in params.items():
            p.sub_(0.1 * local.grads[name])
    return found


def batches_of(name: str, count: int = 8, size: int = 4) -> list[Any]:
    batches = Batches(dataset(name, 72, dtype=torch.float64), K, size)
    return [batches.batch(step) for step in range(count)]


def compare(name: str, num_replays: int, mean: bool = False, **settings: Any) -> None:
    model, batches = make_model(name, dtype=torch.float64), batches_of(name)
    found = passes(model, "graph", batches, mean, **settings)
    assert replays() == num_replays
    expected = passes(model, "vmap", batches, mean, **settings)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", RECORDABLE)
def test_replayed_gradients_are_those_of_vmap(name: str) -> None:
    """To the bit, from the fourth pass on: dropout and the buffers of batch norm, too."""
    compare(name, num_replays=5)


@pytest.mark.parametrize("name", ["MLP", "CNN", "Dropout"])
def test_of_the_mean_loss(name: str) -> None:
    compare(name, num_replays=5, mean=True)


def test_examples_in_parts() -> None:
    """The parts of a batch are launches of one recording, each of which writes over the gradients of the last."""
    compare("MLP", num_replays=13, minibatch_size=2)


def test_nodes_in_chunks() -> None:
    model, batches = make_model("MLP", dtype=torch.float64), batches_of("MLP")
    for mean in (False, True):
        results = []
        for engine in ("graph", "vmap"):
            computed = Engine(model, engine=engine, chunk_size=1)
            assert computed.prepare(batches[0], mean=mean).engine == engine
            Replayed.made.clear()
            num_rows = 1 if mean else K
            params = {n: p.detach()[None].repeat(num_rows, *[1] * p.dim()) for n, p in computed.params.items()}
            locals_ = [computed.gradients(params, {}, batch, seed=0, step=0, mean=mean) for batch in batches]
            assert replays() == (0 if engine == "vmap" else 21 if mean else 15)  # one recording, or one for each chunk
            results.append(locals_[-1])
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_strategies_train_to_the_same_bits(name: str) -> None:
    start, batches = setup("MLP", steps=STEPS)
    expected = run(start, make(name), batches, engine="vmap")
    found = run(start, make(name), batches, engine="graph")
    assert_same_bits(found.losses, expected.losses)
    assert_same_bits(found.state, expected.state)


def test_parameters_stay_where_they_are() -> None:
    """Exchanges leave them in place: of 20 steps of DiLoCo all but the first few are launches."""
    start, batches = setup("MLP", steps=20)
    Replayed.made.clear()
    run(start, make("diloco"), batches, engine="graph")
    assert Replayed.made[-1].replays >= 20 - 1 - MEETINGS


def test_a_whole_run_with_a_smaller_last_batch() -> None:
    def once(engine: str) -> Trainer:
        data, val = dataset("CNN", 30, dtype=torch.float64), dataset("CNN", 6, seed=1, dtype=torch.float64)
        model = make_model("CNN", dtype=torch.float64)
        return fit(model, "FedAvg", num_nodes=K, data=data, val=val, max_steps=20, batch_size=4, engine=engine)[0]

    found = once("graph")
    assert found.history.settings["engine"] == "graph"
    assert str(found.history.settings["engine_reason"]).startswith("recorded: ")
    assert len({graph.result[1].shape for graph in Replayed.made}) == 1
    assert len(Replayed.made) == 3, "of the trial, of the batches, of the smaller ones"
    assert same_run(found, once("vmap"))


def backend(engine: Engine) -> Recorded:
    found = engine._backends["graph"]
    assert isinstance(found, Recorded)
    return found


# ------------------------------------------------------------------------------------- the optimizer's step, too


def steps_launched() -> int:
    """Launches of the gradients together with the optimizer's step."""
    return sum(graph.replays for graph in Replayed.made if not graph.result[0])


def matrices(name: str, p: Tensor) -> dict[str, Any]:
    return {} if p.dim() == 2 else {"optim": "adamw", "lr": 0.01}


UPDATES: dict[str, OptimSpec] = {
    "adamw": OptimSpec("adamw", lr=0.01),
    "adam": OptimSpec("adam", lr=0.01, amsgrad=True, weight_decay=0.1, maximize=True),
    "sgd": OptimSpec("sgd", lr=0.1),
    "damped": OptimSpec("sgd", lr=0.1, momentum=0.9, dampening=0.5),
    "nesterov": OptimSpec("sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": OptimSpec("lion", lr=0.01),
    "fedadam": OptimSpec("fedadam", lr=0.01),
    "muon": OptimSpec("fullprecisionmuon", lr=0.01, param_groups=matrices),
    "groups": OptimSpec("adamw", lr=0.01, param_groups=lambda name, p: {"lr": 0.1} if p.dim() == 1 else {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", UPDATES)
def test_the_optimizer_is_in_the_recording(name: str, dtype: torch.dtype) -> None:
    """To the bit, and all but the first few steps are single launches."""
    model = make_model("MLP", dtype=dtype)
    batches = [tree.map_leaves(lambda x: x.to(dtype) if x.is_floating_point() else x, b) for b in batches_of("MLP", 12)]
    expected = run(model, DiLoCoStrategy(UPDATES[name], H=5, max_norm=0.7), batches, engine="vmap")
    found = run(model, DiLoCoStrategy(UPDATES[name], H=5, max_norm=0.7), batches, engine="graph")
    assert_same_bits(found.losses, expected.losses)
    assert_same_bits(found.state, expected.state)
    assert steps_launched() >= len(batches) - 1 - MEETINGS


@pytest.mark.parametrize("model", ["CNN", "Dropout"])
def test_buffers_and_random_numbers_are_those_of_each_step(model: str) -> None:
    start, batches = setup(model, steps=10)
    expected, found = (run(start, make("diloco"), batches, engine=engine) for engine in ("vmap", "graph"))
    assert_same_bits(found.losses, expected.losses)
    assert_same_bits(found.state, expected.state)
    assert steps_launched() >= 5


def halved(step: int) -> float:
    return 1.0 if step < 9 else 0.5


@pytest.mark.parametrize(
    ("settings", "launched"),
    [
        ({"lr_scheduler": "cosine"}, 0),
        ({"lr_scheduler": halved}, 5 + 6),
        ({"lr_scheduler": "cosine", "max_norm": 0.1}, 0),
    ],
    ids=["every step", "once", "clipped"],
)
def test_other_learning_rates_are_not_those_of_the_recording(settings: dict[str, Any], launched: int) -> None:
    """A rate that stays for a while has a recording; where it changes at each step, the gradients have one."""
    start, batches = setup("MLP", steps=18)
    strategies = [DiLoCoStrategy("adamw", lr=0.01, H=50, **settings) for _ in range(2)]
    expected, found = (run(start, s, batches, engine=engine) for s, engine in zip(strategies, ("vmap", "graph")))
    assert_same_bits(found.state, expected.state)
    assert steps_launched() == launched
    assert replays() - steps_launched() >= 3


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (lambda: AllReduceStrategy("adamw", lr=0.01), {}),
        (lambda: DiLoCoStrategy("rmsprop", lr=0.01, H=3), {}),
        (lambda: DiLoCoStrategy(OptimSpec("adamw", lr=torch.linspace(0.01, 0.02, 5)), H=3), {}),
        (lambda: DiLoCoStrategy("adamw", lr=0.01, H=3, max_norm=torch.linspace(0.1, 0.5, 5)), {}),
        (lambda: FedAvgStrategy("adamw", lr=0.01, H=3, proximal_mu=0.1), {}),
        (lambda: FedAvgStrategy("adamw", lr=0.01, H=3, participation=0.7), {}),
        (lambda: DiLoCoStrategy("adamw", lr=0.01, H=3), {"minibatch_size": 2}),
        (lambda: DiLoCoStrategy("adamw", lr=0.01, H=3), {"chunk_size": 1}),
    ],
    ids=["exchange", "kernel", "rates", "norms", "proximal", "participation", "minibatches", "chunks"],
)
def test_what_is_recorded_without_the_optimizer(strategy: Callable[[], Strategy], settings: dict[str, Any]) -> None:
    start, batches = setup("MLP", steps=12)
    expected, found = (run(start, strategy(), batches, engine=engine, **settings) for engine in ("vmap", "graph"))
    assert_same_bits(found.state, expected.state)
    assert steps_launched() == 0


class Own(Strategy):
    """Does something else with gradients, at every third step."""

    def __init__(self, method: str) -> None:
        super().__init__("adamw", lr=0.01)
        setattr(type(self), method, getattr(Own, f"_{method}"))

    def _optimize(self, params: Tree, grads: Tree, state: Any, ctx: Context) -> tuple[Tree, Any]:
        return Strategy.optimize(self, params, self._turned(grads, ctx), state, ctx)

    def _exchange_gradients(self, grads: Tree, state: Any, ctx: Context) -> tuple[Tree, Any]:
        return self._turned(grads, ctx), state

    def _local_gradients(self, grads: Tree, params: Tree, state: Any, ctx: Context) -> Tree:
        return self._turned(grads, ctx)

    def _turned(self, grads: Tree, ctx: Context) -> Tree:
        return tree.map(torch.neg, grads) if ctx.step % 3 == 0 else grads


@pytest.mark.parametrize("method", ["optimize", "exchange_gradients", "local_gradients"])
def test_strategies_with_a_step_of_their_own(method: str) -> None:
    start, batches = setup("MLP", steps=12)
    mine = type("Mine", (Own,), {})
    expected, found = (run(start, mine(method), batches, engine=engine) for engine in ("vmap", "graph"))
    assert_same_bits(found.state, expected.state)
    assert steps_launched() == 0


class Turning(Wrapper):
    """Does something to gradients on the way to a module that does nothing to them."""

    def exchange_gradients(self, grads: Tree, state: Any, ctx: Context) -> tuple[Tree, Any]:
        return tree.map(torch.neg, grads), state


def replaced(owner: str) -> Strategy:
    """A strategy with a method of its own on the object, or on a module."""
    module = AveragingCommunicator(H=4)
    strategy = Strategy("adamw", lr=0.01, communication_modules=[module])
    if owner == "strategy":
        usual = strategy.optimize
        setattr(strategy, "optimize", lambda p, g, s, ctx: usual(p, tree.map(torch.neg, g), s, ctx))  # noqa: B010
    elif owner == "module":
        setattr(module, "exchange_gradients", lambda g, s, ctx: (tree.map(torch.neg, g), s))  # noqa: B010
    else:
        return Strategy("adamw", lr=0.01, communication_modules=[Turning(module)])
    return strategy


@pytest.mark.parametrize("owner", ["strategy", "module", "wrapper"])
def test_methods_of_an_object_or_around_a_module(owner: str) -> None:
    start, batches = setup("MLP", steps=12)
    expected, found = (run(start, replaced(owner), batches, engine=engine) for engine in ("vmap", "graph"))
    assert_same_bits(found.state, expected.state)
    assert steps_launched() == 0


@pytest.mark.parametrize("changed", ["max_norm", "weight_decay", "class"])
def test_other_settings_have_a_recording_of_their_own(changed: str) -> None:
    """Memory and learning rate are those of the recording, and something else is not."""
    start, batches = setup("MLP", steps=24)
    others = {
        "weight_decay": DiLoCoStrategy(OptimSpec("adamw", lr=0.01, weight_decay=0.5), H=50, max_norm=1.0),
        "class": DiLoCoStrategy("adam", lr=0.01, H=50, max_norm=1.0),
    }
    found = []
    for engine in ("vmap", "graph"):
        strategy = DiLoCoStrategy("adamw", lr=0.01, H=50, max_norm=1.0)
        simulation = helpers.simulation(start, strategy, batches, engine=engine)
        half = helpers.advance(simulation, simulation.init(), batches[:12])
        strategy.max_norm = 0.01 if changed == "max_norm" else 1.0
        simulation.strategy = others.get(changed, strategy)
        found.append(helpers.advance(simulation, half.state, batches[12:]))
    assert_same_bits(found[1].losses, found[0].losses)
    assert_same_bits(found[1].state, found[0].state)
    assert steps_launched() >= 2 * (12 - 1 - MEETINGS)


def test_runs_that_take_turns_on_one_engine() -> None:
    """Each has counted its own steps, also where one goes on with other moments, another count, or anew."""
    start, batches = setup("MLP", steps=24)
    results = []
    for engine in ("vmap", "graph"):
        strategy = DiLoCoStrategy(OptimSpec("sgd", lr=0.1, momentum=0.9, dampening=0.5), H=4)
        if engine == "graph":
            Replayed.made.clear()
        simulations = [
            helpers.simulation(start, each, batches, engine=engine)
            for each in (DiLoCoStrategy("adamw", lr=0.01, H=4), strategy)
        ]
        simulations[1].engine = simulations[0].engine
        states = [simulation.init() for simulation in simulations]
        for step, batch in enumerate(batches):
            if step == 12:
                states[0].optimizer["step"] += 7
                states[1].optimizer["step"].zero_()
            if step == 18:
                states[0] = replace(states[0], optimizer=tree.map_leaves(torch.clone, states[0].optimizer))
            for i in range(2 if step % 3 else 1):
                states[i], _ = simulations[i].step(states[i], batch)
        results.append(states)
    assert_same_bits(results[1][0], results[0][0])
    assert_same_bits(results[1][1], results[0][1])
    assert steps_launched() >= 24
    kept = [each for each in backend(simulations[0].engine)._recordings.values() if isinstance(each, StepRecording)]
    assert kept
    assert all(x.numel() == 1 for each in kept for x in each.held), "moments that are no longer used"


def test_nodes_that_still_share_their_parameters() -> None:
    """The same first step again and again: its result has other memory."""
    start, batches = setup("MLP", steps=2)
    found = []
    for engine in ("vmap", "graph"):
        simulation = helpers.simulation(start, Strategy("adamw", lr=0.01), batches, engine=engine)
        state = simulation.init()
        state.optimizer["step"] += 1
        found += [simulation.step(state, batches[0])[0] for _ in range(MEETINGS + 2)][-1:]
    assert_same_bits(found[1], found[0])


def test_absent_nodes() -> None:
    """Some in every third step: the others are recorded where they are."""
    start, batches = setup("MLP", steps=18)
    trace = Trace([[step % 3 > 0 or node != 1 for node in range(5)] for step in range(18)])
    found = []
    for engine in ("vmap", "graph"):
        local = Engine(start, engine=engine)
        local.prepare(batches[0])
        simulation = Simulation(
            start, DiLoCoStrategy("adamw", lr=0.01, H=4), StackedCollectives(5), engine=local, max_steps=18,
            presence=Presence(trace, Facts(5, 18, seed=0)),
        )  # fmt: skip
        found.append(helpers.advance(simulation, simulation.init(), batches))
    assert_same_bits(found[1].losses, found[0].losses)
    assert_same_bits(found[1].state, found[0].state)


class Moving(Strategy):
    """Says that its step can be recorded, and gives back other memory."""

    def recordable_step(self, params: Tree, state: dict[str, Any], ctx: Context) -> RecordableStep | None:
        update = super().recordable_step(params, state, ctx)
        if update is None:
            return None
        take = update.take
        return update._replace(take=lambda p, g, count: (tree.map(torch.clone, take(p, g, count)[0]), state))


def test_an_optimizer_that_moves_its_memory_is_refused() -> None:
    """The gradients are recorded without it."""
    start, batches = setup("MLP", steps=12)
    expected = run(start, Strategy("adamw", lr=0.01), batches, engine="vmap")
    with pytest.warns(
        VecgymWarning, match="is not recorded with the gradients: the optimizer does not leave its state"
    ):
        found = run(start, Moving("adamw", lr=0.01), batches, engine="graph")
    assert_same_bits(found.state, expected.state)
    assert steps_launched() == 0
    assert replays() >= 5


# ------------------------------------------------------------------------------------------- what is not recorded


class Waiting(MLP):
    """Looks at a value that is the same on every node, which vmap allows and a recording does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(batch) * self.get_buffer("scale").item()


class Counting(MLP):
    """Computes something else at each call, by Python's means."""

    calls = 0

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        Counting.calls += 1
        return super().forward(batch) * (1 + Counting.calls % 7)


@pytest.mark.parametrize(
    ("model", "why"), [(Waiting(), r"it waits for values \(_local_scalar_dense\)"), (Counting(), "off by")]
)
def test_what_cannot_be_recorded_runs_without(model: nn.Module, why: str) -> None:
    engine = Engine(model.double(), engine="graph")
    with pytest.warns(VecgymWarning, match=rf'engine="graph" has no effect, the model runs without a graph: .*{why}'):
        assert engine.prepare(batches_of("MLP")[0]).engine == "vmap"


def test_what_vmap_cannot_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match="vmap cannot run this model"):
        Engine(make_model("DataDependent", dtype=torch.float64), engine="graph").prepare(batches_of("MLP")[0])


@pytest.mark.skipif(not STACKS_CHECKPOINTS, reason="this torch's checkpoint() cannot run under vmap")
def test_activation_checkpointing_runs_without() -> None:
    """It asks the GPU for the state of the random numbers, which is not permitted while it is recorded."""
    engine = Engine(make_model("Checkpointed", dtype=torch.float64), engine="graph")
    with pytest.warns(VecgymWarning, match="without a graph: its backward pass runs parts of it again"):
        assert engine.prepare(batches_of("Checkpointed")[0]).engine == "vmap"


class Masking(MLP):
    """Keeps a tensor of the last batch's length, and makes another where that changes."""

    mask: Tensor | None = None

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if self.mask is None or len(self.mask) != len(y):
            self.mask = torch.linspace(0, 1, len(y), dtype=x.dtype)
        return (F.cross_entropy(self.second(self.first(x).relu()), y, reduction="none") * self.mask).mean()


def test_what_the_model_drops_is_held() -> None:
    """The memory of a tensor that a recording reads must not become another's."""
    model, batches = Masking().double(), batches_of("MLP")
    engine = Engine(model, engine="graph")
    engine.prepare(batches[0])
    params = {n: p.detach()[None].clone() for n, p in engine.params.items()}
    for batch in batches:
        engine.gradients(params, {}, batch, seed=0, step=0)
    (recording,) = backend(engine)._recordings.values()
    assert [x.tolist() for x in recording.held] == [torch.linspace(0, 1, 4, dtype=torch.float64).tolist()]


class Told(MLP):
    """Looks at a leaf of the batch that is no tensor."""

    def forward(self, batch: tuple[Tensor, Tensor, str]) -> Tensor:  # type: ignore[override]
        x, y, kind = batch
        return super().forward((x, y)) * (2 if kind == "twice" else 1)


def test_leaves_of_a_batch_that_are_no_tensors() -> None:
    """Each value has a recording of its own."""
    model, (x, y) = Told().double(), batches_of("MLP")[0]
    engines = [Engine(model, engine=kind) for kind in ("graph", "vmap")]
    params = {n: p.detach()[None].clone() for n, p in engines[0].params.items()}
    for engine in engines:
        engine.prepare((x, y, "once"))
    for kind in ["once", "twice"] * (MEETINGS + 2):
        ours, theirs = (engine.gradients(params, {}, (x, y, kind), seed=0, step=0) for engine in engines)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert len(backend(engines[0])._recordings) == 2


def test_other_memory_is_not_recorded_and_old_recordings_make_room() -> None:
    model, batch = make_model("MLP", dtype=torch.float64), batches_of("MLP")[0]
    engine = Engine(model, engine="graph")
    engine.prepare(batch)
    Replayed.made.clear()
    sets = [{n: p.detach()[None].clone() for n, p in engine.params.items()} for _ in range(MAX_RECORDINGS + 1)]
    for params in sets * MEETINGS:
        engine.gradients(params, {}, batch, seed=0, step=0)
    assert not Replayed.made, "met too rarely"
    for params in sets:
        engine.gradients(params, {}, batch, seed=0, step=0)
    assert len(Replayed.made) == MAX_RECORDINGS, "there is no room for the last"
    for _ in range(16 * MAX_RECORDINGS + 2):
        engine.gradients(sets[-1], {}, batch, seed=0, step=0)
    assert len(Replayed.made) == MAX_RECORDINGS + 1
    assert len(backend(engine)._recordings) == MAX_RECORDINGS
    engine.release()
    assert not backend(engine)._recordings


def test_each_recording_is_taken_for_what_it_computes() -> None:
    """The same parameters, but now other buffers, now the mean of the losses."""
    model, batch = make_model("CNN", dtype=torch.float64), batches_of("CNN")[0]
    kinds = [(0, False), (1, False), (0, True)]  # what is added to the buffers, and whether it is the mean
    results: dict[str, list[Local]] = {}
    for kind in ("graph", "vmap"):
        engine = Engine(model, engine=kind)
        engine.prepare(batch)
        params = {n: p.detach()[None].clone() for n, p in engine.params.items()}
        sets = {x: {n: (b + x)[None].repeat(K, *[1] * b.dim()) for n, b in engine.buffers.items()} for x in (0, 1)}
        results[kind] = [
            tree.map_leaves(torch.clone, engine.gradients(params, sets[x], batch, seed=0, step=0, mean=mean))
            for _ in range(MEETINGS + 2)
            for x, mean in kinds
        ]
    for ours, theirs in zip(results["graph"], results["vmap"]):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert replays() >= 6


def test_a_recording_that_computes_with_an_old_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(self: recorded.Recording, batch: Any) -> Any:
        self._graph.replay()
        return self._graph.result

    monkeypatch.setattr(recorded.Recording, "launch", launch)
    engine = Engine(make_model("MLP", dtype=torch.float64), engine="graph")
    with pytest.warns(VecgymWarning, match="the loss is off by"):
        engine.prepare(batches_of("MLP")[0])


def test_a_failure_in_the_middle_of_a_run_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = make_model("MLP", dtype=torch.float64), batches_of("MLP")
    engine = Engine(model, engine="graph")
    engine.prepare(batches[0])

    def failing(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(recorded, "record", failing)
    params = {n: p.detach()[None].clone() for n, p in engine.params.items()}
    expected = Engine(model, engine="vmap").gradients(params, {}, batches[0], seed=0, step=0)
    once = functools.partial(engine.gradients, params, {}, batches[0], seed=0, step=0)
    for _ in range(MEETINGS):
        torch.testing.assert_close(once(), expected)
    with pytest.warns(VecgymWarning, match="without a graph: out of memory"):
        torch.testing.assert_close(once(), expected)
    torch.testing.assert_close(once(), expected)  # and no second warning


def test_there_are_graphs_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r'engine="graph" records CUDA graphs, and the model is on cpu'):
        Engine(make_model("MLP"), engine="graph")
    with pytest.raises(ValueError, match=r'engine="graph" records CUDA graphs, and the model is on cpu'):
        fit(make_model("MLP"), "FedAvg", data=dataset("MLP"), engine="graph")
    with pytest.raises(ValueError, match=r"node_threads=2 is of CPUs"):
        Engine(make_model("MLP"), engine="graph", node_threads=2)
    with pytest.raises(ValueError, match="compile=True compiles all nodes at once"):
        Engine(make_model("MLP"), engine="graph", compile=True)
