"""Nothing in a step waits for a device, nor does a run between the steps whose losses it fetches."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from tests.cards import CARDS
from tests.fitting import STRATEGIES, alone, dataset, same
from tests.models import make_batches, make_model
from tests.test_bad_input import Diverging
from tests.waits import Waits
from vecgym import DivergenceError, Logger, OptimSpec, Trainer, VecgymWarning
from vecgym.collectives import StackedCollectives
from vecgym.compress import (
    QSGD,
    Chain,
    ChunkedTopK,
    Natural,
    PowerSGD,
    Quantise,
    RandomK,
    Sign,
    StatQuantise,
    Ternary,
    TopK,
)
from vecgym.compress.dct import strongest
from vecgym.core import devices, tree
from vecgym.engine import Engine
from vecgym.runs.options import FitOptions
from vecgym.runs.recorder import Recorder
from vecgym.runs.run import Run, Task
from vecgym.simulation import Simulation, State
from vecgym.strategy import (
    EF21,
    AllToAll,
    CommunicateOptimizeStrategy,
    Compressed,
    Corrupted,
    DeMoStrategy,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    GossipStrategy,
    Mean,
    MovementPenalty,
    Outer,
    PartitionedSelector,
    Private,
    QuantisedRing,
    Ring,
    Robust,
    SparseCommunicator,
    SPARTAStrategy,
    Strategy,
    every,
)
from vecgym.strategy.catalogue import CATALOGUE
from vecgym.strategy.simulated import simulation_of

K, STEPS = 4, 7


def from_catalogue(name: str) -> Strategy:
    inner: dict[str, Any] = {} if name == "demo" else {"inner_optim": "adamw", "lr": 1e-3}
    return CATALOGUE[name].make(H=3, p=0.3, max_norm=1.0, **inner)


def composed(*exchanges: Any) -> Callable[[], Strategy]:
    return lambda: CommunicateOptimizeStrategy(list(exchanges), "sgd", lr=0.1)


def outer(average: Any) -> Callable[[], Strategy]:
    return composed(Exchange(Outer(average), every=2))


MORE: dict[str, Callable[[], Strategy]] = {
    "powersgd": lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression=PowerSGD(2)),
    "int4 stochastic": lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression=Quantise(4, stochastic=True)),
    "sign": lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression=Sign()),
    "randomk": lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression=RandomK(0.3)),
    "qsgd": lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression=QSGD(7, bucket=16)),
    "natural": lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression=Natural()),
    "ternary": lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression=Ternary(clip=2.5)),
    "chunks in bins": outer(Compressed(Mean(), Chain(ChunkedTopK(3, 6), StatQuantise(4)), momentum=0.5)),
    "estimates": outer(EF21(Mean(), TopK(0.1))),
    "a cold start": lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression=PowerSGD(2, warm_start=False)),
    "schedules": lambda: DiLoCoStrategy("adamw", lr=0.1, H=2, warmup_steps=2, lr_scheduler="cosine"),
    "a rate for each node": lambda: DiLoCoStrategy("adamw", lr=torch.linspace(0.01, 0.1, K), H=2),
    "a decay on the CPU": lambda: DeMoStrategy(lr=0.1, compression_decay=torch.tensor(0.9)),
    "late": lambda: SPARTAStrategy(0.3, "sgd", lr=0.1, delay=2),
    "most moved": lambda: SPARTAStrategy(0.3, "sgd", lr=0.1, compression_method="topk", quantization_bits=8),
    "partition": composed(SparseCommunicator(PartitionedSelector(0.3))),
    "in part": lambda: DiLoCoStrategy("sgd", lr=0.1, sync_weight=[0, 0.5, 0, 1, 0, 0, 1]),
    "weights": lambda: FedAvgStrategy("sgd", lr=0.1, H=2, weighting="examples"),
    "islands and rest": lambda: FedAvgStrategy("adam", lr=0.1, H=2, participation=0.5, island_size=2),
    "one of four": lambda: FedAvgStrategy("adam", lr=0.1, H=2, participation=0.25),
    "one peer": lambda: GossipStrategy("one_peer_exponential", every=2, inner_optim="sgd", lr=0.1),
    "every other": composed(every(2, Exchange(Mean()))),
    "proximal": lambda: FedAvgStrategy("sgd", lr=0.1, H=2, proximal_mu=0.1),
    "median of islands": composed(Exchange(Robust("median", island_size=2), every=2)),
    "liars": outer(Corrupted(Robust("trimmed_mean", trim=1), [1])),
    "krum": outer(Corrupted(Robust("krum", f=1, nnm=True), [1], "alie")),
    "centred clipping": composed(Exchange(Corrupted(Robust("centred_clipping"), [0], "ipm"), of="gradients")),
    "the rest": outer(Corrupted(Robust("mda", f=1, clip=1.0), [2], "gaussian")),
    "buckets of islands": composed(Exchange(Robust("geometric_median", bucketing=2, island_size=3), every=2)),
    "lies of those who know": outer(Corrupted(Robust("multi_krum", f=1), [1], lambda x, honest: -x)),
    "penalty": outer(MovementPenalty(Mean(), clip=1.0, skip_anomalies=True, warmup=2)),
    "private": outer(Private(Mean(), clip=1.0, noise=0.1)),
    "rings": composed(Exchange(Ring("bfloat16"), of="gradients"), Exchange(Outer(QuantisedRing()), every=2)),
    "all to all": composed(Exchange(AllToAll(), of="gradients")),
    "codes": outer(Compressed(Mean(), TopK(0.1))),
}  # fmt: skip

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True}, "adam": {"amsgrad": True}, "adamw": {}, "nadam": {}, "radam": {},
    "adamax": {}, "adagrad": {}, "rmsprop": {"momentum": 0.5, "centered": True}, "rprop": {}, "adadelta": {},
    "lion": {}, "fedyogi": {}, "muon": {"param_groups": lambda name, p: {} if p.dim() == 2 else {"optim": "sgd"}},
}  # fmt: skip


def steps_of(
    strategy: Strategy, waits: Callable[[Any], Waits], device: str = "cpu", model: str | nn.Module = "MLP",
    batches: Any = None, engine: str = "vmap", changed: Any = None, limits: Any = None, **options: Any,
) -> tuple[Waits, State]:  # fmt: skip
    """Take whole steps, all of them within `waits`."""
    module = (make_model(model) if isinstance(model, str) else model).to(device)
    if batches is None:
        each = make_batches(str(model), steps=STEPS, num_nodes=K)
        batches = [tree.map_leaves(lambda *xs: torch.stack(xs).to(device), *of_nodes) for of_nodes in each]
    simulation = simulation_of(
        module, strategy, StackedCollectives(K), engine=Engine(module, engine=engine), max_steps=STEPS,
        num_examples=(5, 6, 7, 8), **options,
    )  # fmt: skip
    names = [name for name, _ in module.named_buffers()]
    simulation.engine._stateless.learn(False, names if changed is None else changed)
    state = simulation.init()
    with waits((state.params, state.buffers, state.home["optimizer"], batches)) as block:
        for batch in batches:
            state, _ = simulation.step(state, batch, limits=limits)
    return block, state


def on_meta(values: Any) -> Waits:
    return Waits()


def cases() -> dict[str, Callable[[], Strategy]]:
    return {**{name: lambda name=name: from_catalogue(name) for name in CATALOGUE}, **MORE}  # type: ignore[misc]


# -------------------------------------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("name", cases())
def test_a_step_waits_for_nothing(name: str) -> None:
    waits, state = steps_of(cases()[name](), on_meta, "meta")
    assert waits.found == []
    assert state.step == STEPS


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU take the paths of a device: nothing is looked at because it is at hand."""
    for module in ("compress.dct", "compress.powersgd", "core.nodes", "strategy.demo", "runs.recorder"):
        monkeypatch.setattr(importlib.import_module(f"vecgym.{module}"), "on_host", lambda x: False)


@pytest.mark.parametrize("name", cases())
def test_the_paths_of_a_device_read_nothing_and_give_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    _, expected = steps_of(cases()[name](), lambda values: Waits(()))
    request.getfixturevalue("as_on_a_device")
    waits, state = steps_of(cases()[name](), Waits)
    assert waits.found == []
    assert same(nodes_of(state.params), nodes_of(expected.params))


def nodes_of(params: tree.Tree) -> tree.Tree:
    return {name: x.expand(K, *x.shape[1:]) for name, x in params.items()}


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("lr", [0.01, torch.linspace(0.01, 0.1, K)], ids=["one rate", "a rate each"])
def test_no_optimizer_waits(optim: str, lr: Any) -> None:
    spec = OptimSpec(optim, lr=lr, **OPTIMIZERS[optim])
    waits, _ = steps_of(CommunicateOptimizeStrategy([], spec), on_meta, "meta")
    assert waits.found == []


@pytest.mark.parametrize("model", ["CNN", "GPT", "WithFrozen"])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_no_model_waits(model: str, engine: str) -> None:
    for name in ("DiLoCo", "FedAvg participation"):
        waits, _ = steps_of(STRATEGIES[name](), on_meta, "meta", model, engine=engine)
        assert waits.found == [], name


@pytest.mark.parametrize(
    "options",
    [{"minibatch_size": 2}, {"limits": [1, 2, 2, 4]}, {"exact": True}],
    ids=lambda options: next(iter(options)),
)
def test_no_option_waits(options: dict[str, Any]) -> None:
    for name in ("AllReduce", "FedAvg participation"):
        waits, _ = steps_of(STRATEGIES[name](), on_meta, "meta", "CNN", engine="loop", **options)
        assert waits.found == [], name


def test_a_buffer_that_nobody_changes_is_not_compared_and_stays_stored_once() -> None:
    module = make_model("MLP")
    module.register_buffer("constant", torch.ones(3))
    each = make_batches("MLP", steps=STEPS, num_nodes=K)
    batches = [tree.map_leaves(lambda *xs: torch.stack(xs).to("meta"), *of_nodes) for of_nodes in each]
    for limits in (None, [1, 2, 2, 4]):
        strategy = STRATEGIES["FedAvg participation"]()
        waits, state = steps_of(strategy, on_meta, "meta", module, batches, changed=[], limits=limits)
        assert waits.found == []
        assert state.buffers["constant"].shape == (1, 3)


def test_ties_are_broken_alike_without_looking(as_on_a_device: None) -> None:
    """Many ties, nan and infinities among them: the sets are those of a stable sort."""
    x = torch.randint(-3, 4, (50, 40), generator=torch.Generator().manual_seed(0)).double()
    x[0, :3], x[1, ::2] = torch.tensor([torch.nan, torch.inf, -torch.inf]), torch.inf
    for k in (1, 5, 39):
        expected = (
            x.abs().nan_to_num(nan=torch.inf, posinf=1e9).sort(dim=-1, descending=True, stable=True).indices[..., :k]
        )
        assert torch.equal(strongest(x, k).sort(-1).values, expected.sort(-1).values)
        assert torch.equal(strongest(x.view(5, 10, 40), k).view(50, k), strongest(x, k))


# ------------------------------------------------------------------------------------------------- what is seen at all


WAITING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0, 0].item(),
    "a branch": lambda x: bool(x.any()),
    "float": lambda x: float(x.sum()),
    "equal": lambda x: torch.equal(x, x + 1),
    "a mask": lambda x: x[x > 0],
    "a mask that is written to": lambda x: x.clone().index_put_((x > 0,), x.sum(0, keepdim=True)[0, :1]),
    "nonzero": lambda x: x.nonzero(),
    "select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat": lambda x: x.repeat_interleave((x[0] > 0).long(), 0),
}
ON_META: dict[str, Callable[[Tensor], Any]] = {
    "to the host": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "from the host": lambda x: torch.ones(3).to(x.device),
    "into a tensor": lambda x: x.copy_(torch.ones(3, 3)),
    "a list": lambda x: torch.tensor([1, 2], device=x.device),
    "a list as an index": lambda x: x[[0, 1]],
    "an index on the host": lambda x: x[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("name", WAITING)
def test_each_way_to_wait_is_seen_on_the_cpu(name: str) -> None:
    x = torch.eye(3)
    with Waits(x) as waits:
        WAITING[name](2 * x)
    assert waits.found != []


@pytest.mark.parametrize("name", list(WAITING | ON_META))
def test_each_way_to_wait_is_seen_on_meta(name: str) -> None:
    x = torch.ones(3, 3, device="meta")
    ways = WAITING | ON_META
    with Waits() as waits:
        try:
            ways[name](2 * x)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            waits.found.append(str(error))
    assert waits.found != []


def test_what_does_not_wait_is_not_seen() -> None:
    x, index = torch.ones(3, 3, device="meta"), torch.tensor([0, 2])
    with Waits() as waits:
        y = torch.where(x > 0, x, -x)[devices.placed(index, "meta")] + devices.placed(torch.ones(3), "meta")
        y = y.sum(0) * torch.tensor(2.0) + index.tolist()[0]
        bool(index.any())
    assert waits.found == []


# ------------------------------------------------------------------------------------------------------- a whole run


class Fetching:
    """Stand in for `fetched`: count, and give zeros for what a device without values has."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.run: Any = None

    def __call__(self, values: Any) -> Any:
        if any(x.is_meta for x in tree.leaves(values)):
            self.steps.append(self.run.state.step)
        return tree.map_leaves(lambda x: torch.zeros_like(x, device="cpu") if x.is_meta else x, values)


def run_on_meta(strategy: Strategy, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Fetching, Waits, Any]:
    """Run the loop of `fit` on the device "meta"."""
    data, val = dataset("MLP", 64), dataset("MLP", 10, seed=1)
    given = FitOptions(strategy, K, max_steps=12, batch_size=4, progress=False, device="cpu", **options)
    run: Run[nn.Module] = Run(Task(make_model("MLP"), data, val), given, StackedCollectives(K), torch.device("cpu"))
    module = make_model("MLP").to("meta")
    run.engine = Engine(module)
    run.engine._stateless.learn(False, [])
    run.simulation = simulation_of(
        module, strategy, run.comm, engine=run.engine, max_steps=12, num_examples=(16,) * K, read=run.train.read
    )
    run.state = run.simulation.init()
    for batches in (run.train, run.val):
        assert batches is not None
        batches._source.device = "meta"
    fetching = Fetching()
    fetching.run = run
    for module_name in ("recorder", "evaluation", "run"):
        monkeypatch.setattr(f"vecgym.runs.{module_name}.fetched", fetching)
    with Waits() as waits:
        run.loop()
    return fetching, waits, run


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_run_waits_only_where_it_fetches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetching, waits, run = run_on_meta(from_catalogue(name), monkeypatch, log_interval=5, val_interval=6)
    assert waits.found == []
    assert run.history["step"] == list(range(13))
    # At 5 and 10 the losses; with an evaluation the losses, how far apart the nodes were before they exchanged
    # parameters, whether they still are (they are not where these are stored once), and all that it measured.
    each = 2 if CARDS[name].replicated else 4
    assert fetching.steps == [0, 5, *[6] * each, 10, *[12] * each]


def test_by_default_the_losses_are_fetched_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fetching, _, _ = run_on_meta(from_catalogue("diloco"), monkeypatch, val_interval=None)
    assert fetching.steps == [0, *range(1, 12), 12, 12, 12, 12]


# ------------------------------------------------------------------------------- rows whose losses are on a device yet


@pytest.fixture
def fetches(as_on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have a recorder treat losses as if they were on a device; return how many it has fetched each time."""
    counts: list[int] = []

    def fetched(values: Any) -> Any:
        if values:
            counts.append(len(values))
        return devices.fetched(values)

    monkeypatch.setattr("vecgym.runs.recorder.fetched", fetched)
    return counts


class Listener(Logger):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(dict(row))


MEASURED = ("seconds", "steps_per_s", "examples_per_s", "bytes_per_s", "memory_bytes")


def numbers(rows: Any) -> list[dict[str, Any]]:
    """Rows without what the clock on the wall says, their keys in order."""
    return [
        {k: x.tolist() if isinstance(x, np.ndarray) else x for k, x in row.items() if k not in MEASURED} for row in rows
    ]


def fit(trainer: Trainer | None = None, strategy: str = "DiLoCo", **settings: Any) -> Trainer:
    trainer = trainer or Trainer(make_model("MLP"), dataset("MLP"), dataset("MLP", 8, seed=1))
    settings = {"max_steps": 11, "batch_size": 4, "val_interval": 7, "device": "cpu", "progress": False, **settings}
    trainer.fit(STRATEGIES[strategy](), 3, **settings)
    return trainer


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_history_is_the_same_however_rarely_losses_are_fetched(
    strategy: str, request: pytest.FixtureRequest
) -> None:
    expected_log, log = Listener(), Listener()
    expected = fit(strategy=strategy, logger=expected_log, log_interval=4)
    fetches = request.getfixturevalue("fetches")
    trainer = fit(strategy=strategy, logger=log, log_interval=4)
    assert fetches == [4, 3, 1, 3]  # at steps 4, 7 (an evaluation), 8 and 11 (the last)
    assert repr(numbers(trainer.history.rows)) == repr(numbers(expected.history.rows))
    assert list(map(list, trainer.history.rows)) == list(map(list, expected.history.rows))  # columns in the same order
    assert repr(numbers(log.rows)) == repr(numbers(expected_log.rows))
    assert same(trainer.nodes.params, expected.nodes.params)


def test_losses_on_the_host_are_read_at_once() -> None:
    class Watching(Listener):
        def log(self, row: dict[str, Any]) -> None:
            super().log(row)
            lengths.append(len(trainer.history))

    lengths: list[int] = []
    trainer = Trainer(make_model("MLP"), dataset("MLP"))
    fit(trainer, max_steps=6, log_interval=3, logger=Watching(), val_interval=None)
    assert lengths == [3, 6]


def diverge(dtype: torch.dtype = torch.float32, **settings: Any) -> Trainer:
    """Train three nodes on batches of 1; node 1 meets nan in the third step, at step 2."""
    data = torch.arange(36.0, dtype=dtype)
    data[7] = torch.nan
    trainer = Trainer(Diverging().to(dtype), data)
    options: dict[str, Any] = {"max_steps": 12, "log_interval": 5, **settings}
    try:
        trainer.fit(alone(), 3, batch_size=1, shuffle=False, progress=False, device="cpu", **options)
    except DivergenceError as error:
        trainer.error = error  # type: ignore[attr-defined]
    return trainer


def test_divergence_is_told_at_the_next_fetch_and_names_the_first_step(fetches: list[int]) -> None:
    trainer = diverge()
    error = trainer.error  # type: ignore[attr-defined]
    assert (error.step, error.nodes, error.noticed) == (2, [1], 5)
    assert np.isnan(error.loss)
    message = str(error)
    for part in ("node 1 is nan at step 2", "noticed after step 5", "log_interval", "up to step 5"):
        assert part in message, f"{part!r} is not in {message!r}"
    assert trainer.history["step"] == [1, 2, 3, 4, 5]
    assert np.isfinite(trainer.history.node_array()).sum(1).tolist() == [3, 3, 2, 2, 2]
    assert trainer.state is not None
    assert trainer.state.step == 5


@pytest.mark.parametrize("late", [False, True])
def test_divergence_that_is_seen_at_once_does_not_say_that_it_is_late(late: bool, fetches: list[int]) -> None:
    error = diverge(log_interval=3 if late else 1).error  # type: ignore[attr-defined]
    assert (error.step, error.noticed) == (2, None)
    assert "noticed" not in str(error)
    assert "up to step 2" in str(error)


def test_late_divergence_warns_once(fetches: list[int]) -> None:
    with pytest.warns(VecgymWarning, match=r"node 1 is nan at step 2, which was noticed after step 5") as caught:
        trainer = diverge(on_divergence="warn")
    assert len(caught) == 1
    assert trainer.history["step"] == list(range(1, 13))


def test_a_checkpoint_is_complete_and_no_diverged_step_is_saved(fetches: list[int], tmp_path: Path) -> None:
    trainer = diverge(log_interval=100, save_dir=tmp_path, checkpoint_interval=2, keep_checkpoints=9)
    assert trainer.error.noticed == 4  # type: ignore[attr-defined]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000.pt", "step-000000002.pt"]
    assert trainer.history["step"] == [1, 2, 3, 4]


def test_a_resumed_run_has_the_rows_of_one_that_was_not_interrupted(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fit(log_interval=4)
    fetches = request.getfixturevalue("fetches")

    at_step(5, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    trainer = Trainer(make_model("MLP"), dataset("MLP"), dataset("MLP", 8, seed=1))
    with pytest.raises(KeyboardInterrupt, match="after step 6"):
        fit(trainer, log_interval=4, save_dir=tmp_path)
    monkeypatch.undo()
    assert fetches == [4, 2]
    assert repr(numbers(trainer.history.rows)) == repr(numbers(expected.history.rows[:7]))
    resumed = Trainer(make_model("MLP"), dataset("MLP"), dataset("MLP", 8, seed=1))
    fit(resumed, log_interval=4, save_dir=tmp_path, resume=True)
    for row, same_row in zip(numbers(resumed.history.rows), numbers(expected.history.rows), strict=True):
        assert repr(sorted(row.items())) == repr(sorted(same_row.items()))


def at_step(step: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something while the step after `step` steps is taken."""
    take = Simulation.tick

    def acting(self: Simulation, state: State, *args: Any, **kwargs: Any) -> Any:
        if state.tick == step:
            act()
        return take(self, state, *args, **kwargs)

    monkeypatch.setattr(Simulation, "tick", acting)


def break_down() -> None:
    raise OSError("the disk is gone")


def test_after_an_error_the_rows_up_to_there_have_their_losses(
    fetches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, trainer = Listener(), Trainer(make_model("MLP"), dataset("MLP"))
    at_step(6, break_down, monkeypatch)
    with pytest.raises(OSError, match="the disk is gone"):
        fit(trainer, log_interval=4, logger=log, val_interval=None)
    assert fetches == [4, 2]
    assert trainer.history["step"] == [1, 2, 3, 4, 5, 6]
    assert np.isfinite(trainer.history["train_loss"]).all()
    assert [row["step"] for row in log.rows] == [4]


def test_a_device_that_breaks_does_not_hide_what_broke_it(fetches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(values: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    trainer = Trainer(make_model("MLP"), dataset("MLP"))
    at_step(6, break_down, monkeypatch)
    monkeypatch.setattr("vecgym.runs.recorder.fetched", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        fit(trainer, log_interval=100, val_interval=None)
    assert trainer.history["step"] == [1, 2, 3, 4, 5, 6]
    assert trainer.history["train_loss"] == [None] * 6
    assert trainer.history["bytes_total"][-1] > 0


def test_after_step_gets_complete_rows(fetches: list[int]) -> None:
    class Watching(Trainer[nn.Module]):
        def after_step(self, row: dict[str, Any]) -> None:
            rows.append(dict(row))

    rows: list[dict[str, Any]] = []
    fit(Watching(make_model("MLP"), dataset("MLP")), log_interval=100, val_interval=None)
    assert fetches == [1] * 11
    assert all(np.isfinite(row["train_loss"]) for row in rows[1:])


def test_a_progress_bar_moves_between_fetches(fetches: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    fit(log_interval=100, val_interval=None, progress=True)
    shown = capsys.readouterr().err
    assert "11/11" in shown
    assert "loss" in shown


# ------------------------------------------------------------------------------ rows on the host that nobody waits for


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have losses on the host read four rows at a time; return how many were read each time."""
    counts: list[int] = []
    fetch = Recorder._fetch

    def counted(self: Recorder) -> None:
        if self._unread:
            counts.append(len(self._unread))
        fetch(self)

    monkeypatch.setattr("vecgym.runs.recorder.ROWS_AT_ONCE", 4)
    monkeypatch.setattr(Recorder, "_fetch", counted)
    return counts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_history_is_the_same_whether_or_not_somebody_reads_along(strategy: str, reads: list[int]) -> None:
    expected = fit(strategy=strategy, logger=Listener())
    assert reads == [1] * 11
    reads.clear()
    trainer = fit(strategy=strategy)
    # After steps 4, 7 (an evaluation) and 11; at once where not all nodes train.
    assert reads == ([1] * 11 if "participation" in strategy else [4, 3, 4])
    assert repr(numbers(trainer.history.rows)) == repr(numbers(expected.history.rows))
    assert list(map(list, trainer.history.rows)) == list(map(list, expected.history.rows))  # columns in the same order
    assert same(trainer.nodes.params, expected.nodes.params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_divergence_on_the_host_is_noticed_in_its_step(dtype: torch.dtype, reads: list[int]) -> None:
    trainer = diverge(dtype)
    error = trainer.error  # type: ignore[attr-defined]
    assert (error.step, error.nodes, error.noticed) == (2, [1], None)
    assert (trainer.history["step"], reads) == ([1, 2, 3], [3])
    assert trainer.state is not None
    assert trainer.state.step == 3


def test_losses_whose_sum_overflows_have_not_diverged(reads: list[int]) -> None:
    trainer = Trainer(Diverging(), torch.full((36,), 1.5e19))  # losses of 2.25e38: the sum of three is inf
    trainer.fit(alone(), 3, max_steps=12, batch_size=1, progress=False, device="cpu")
    assert reads[0] == 1
    assert np.isfinite(trainer.history["train_loss"]).all()


def test_divergence_on_the_host_warns_once_or_not_at_all(reads: list[int]) -> None:
    with pytest.warns(VecgymWarning, match="node 1 is nan at step 2") as caught:
        warned = diverge(on_divergence="warn")
    assert len(caught) == 1
    assert warned.history["step"] == list(range(1, 13))
    assert reads == [3, 4, 4, 1]
    reads.clear()
    assert repr(numbers(diverge(on_divergence="ignore").history)) == repr(numbers(warned.history))
    assert reads == [4, 4, 4]


@pytest.mark.parametrize("how", ["interrupt", "error"])
def test_no_row_is_lost_within_a_block(how: str, reads: list[int], tmp_path: Path) -> None:
    expected = fit(logger=Listener())
    trainer = Trainer(make_model("MLP"), dataset("MLP"), dataset("MLP", 8, seed=1))
    with pytest.MonkeyPatch.context() as patch:
        at_step(6, (lambda: signal.raise_signal(signal.SIGINT)) if how == "interrupt" else break_down, patch)
        with pytest.raises((KeyboardInterrupt, OSError)):
            fit(trainer, save_dir=tmp_path, checkpoint_interval=3)
    reached = 7 if how == "interrupt" else 6
    assert trainer.history["step"] == list(range(reached + 1))
    assert np.isfinite(trainer.history["train_loss"][1:]).all()
    resumed = Trainer(make_model("MLP"), dataset("MLP"), dataset("MLP", 8, seed=1))
    fit(resumed, save_dir=tmp_path, resume=True)
    for row, same_row in zip(numbers(resumed.history.rows), numbers(expected.history.rows), strict=True):
        assert repr(sorted(row.items())) == repr(sorted(same_row.items()))


def test_after_step_and_stop_get_complete_rows_on_the_host(reads: list[int]) -> None:
    class Watching(Trainer[nn.Module]):
        def after_step(self, row: dict[str, Any]) -> None:
            rows.append(dict(row))

    rows: list[dict[str, Any]] = []
    fit(Watching(make_model("MLP"), dataset("MLP")), val_interval=None)
    fit(val_interval=None, stop=lambda row: rows.append(dict(row)))
    assert reads == [1] * 22
    assert all(np.isfinite(row["train_loss"]) for row in rows if row["step"])


def test_a_progress_bar_has_the_loss_of_the_step_that_it_shows(
    reads: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vecgym.runs.run.tqdm", partial(tqdm, mininterval=0, miniters=2))
    fit(val_interval=None, progress=True)
    assert reads == [2] * 5 + [1]
    assert "loss" in capsys.readouterr().err
