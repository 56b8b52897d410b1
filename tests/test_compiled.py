"""The compiled backend: the same gradients, or a reason why not."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.fitting import alone, dataset, fit
from tests.helpers import NEEDS_LOOP
from tests.models import MODELS, NO_VMAP, make_model
from vecgym import Trainer, VecgymWarning, sweep
from vecgym.core import tree
from vecgym.data import Batches
from vecgym.engine import Engine, compiled
from vecgym.engine.backend import Local
from vecgym.engine.compiled import Compiled, first_part
from vecgym.engine.stateless import StatelessModel
from vecgym.models import Classifier
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, Strategy

pytestmark = pytest.mark.usefixtures("compiled_always")
TRACED = [name for name in MODELS if name not in (*NO_VMAP, "LSTM")]
K = 3


@pytest.fixture
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and differentiate as `torch.compile` does, and run the graph without generating code: a second a model."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()


def computed(engine: Engine, batch: Any, mean: bool = False) -> Local:
    params = {name: p.detach()[None].clone() for name, p in engine.params.items()}
    buffers = {name: b[None].clone() for name, b in engine.buffers.items()}
    return engine.gradients(params, buffers, batch, seed=0, step=0, mean=mean)


def compare(name: str, mean: bool = False) -> None:
    model = make_model(name, dtype=torch.float64)
    batch = Batches(dataset(name, 40, dtype=torch.float64), K, 4).batch(0)
    ours, theirs = Engine(model, compile=True), Engine(model, engine="vmap")
    with warnings.catch_warnings():
        warnings.simplefilter("error", VecgymWarning)
        plan = ours.prepare(batch, mean=mean)
    theirs.prepare(batch)
    assert plan.engine == "compiled"
    assert plan.reason.startswith("compiled in ")
    for _ in range(2):
        found, expected = computed(ours, batch, mean), computed(theirs, batch, mean)
        torch.testing.assert_close(found.grads, expected.grads, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.buffers, expected.buffers, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "GPT" else n for n in TRACED])
def test_traced_gradients_are_those_of_vmap(name: str) -> None:
    compare(name)


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize("name", ["MLP", pytest.param("GPT", marks=pytest.mark.slow)])
def test_traced_gradients_of_the_mean_loss(name: str) -> None:
    compare(name, mean=True)


@pytest.mark.slow
def test_sums_are_not_spread_over_the_threads_for_each_node() -> None:
    """Of a bias of three classes, say: the compiler would start its threads once for each of the 512 nodes."""
    from torch._inductor import config, metrics  # only here: it takes a second to import

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with config.patch(force_disable_caches=True):
            metrics.reset()
            batch = Batches(dataset("MLP", 4096), 512, 8).batch(0)
            assert Engine(make_model("MLP"), compile=True).prepare(batch).engine == "compiled"
    finally:
        torch.set_num_threads(before)
    assert metrics.generated_kernel_count > 0
    assert metrics.parallel_reduction_count == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MLP", "CNN", "GPT"])
def test_compiled_gradients_are_those_of_vmap(name: str) -> None:
    compare(name)
    if name == "MLP":
        compare(name, mean=True)


@pytest.mark.parametrize("mean", [False, True])
def test_too_little_work_stays_a_list(mean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's operations decide, without a clock and a compiler; in runs too short for a list, they do not."""
    tried: list[int] = []

    def counted(*given: Any) -> tuple[str, str]:
        tried.append(1)
        return "", "compiled"

    monkeypatch.setattr(Compiled, "tried", counted)
    batch = Batches(dataset("MLP", 40), K, 4).batch(0)
    engine = Engine(make_model("MLP"))
    assert engine.prepare(batch, mean=mean).engine == "recorded"
    assert engine.facts is not None
    work = engine.facts.flop * K
    for bound, name in ((work, "compiled"), (work + 1, "recorded")):
        monkeypatch.setattr("vecgym.engine.plan.MIN_FLOP_COMPILED", bound)
        tried.clear()
        chosen = Engine(make_model("MLP"), compile=True).prepare(batch, mean=mean)
        assert (chosen.engine, len(tried)) == (name, int(name == "compiled"))
        assert ("too little work to gain by compile=True" in chosen.reason) == (name == "recorded")
    length = engine._recorded.num_operations
    for longest, name in ((length - 1, "compiled"), (length, "recorded")):
        monkeypatch.setattr("vecgym.engine.plan.MAX_OPERATIONS_LISTED", longest)
        assert Engine(make_model("MLP"), compile=True).prepare(batch, mean=mean).engine == name
    assert Engine(make_model("MLP"), compile=True).prepare(batch, mean=mean, num_passes=10).engine == "compiled"
    assert Engine(make_model("MLP"), compile=True, engine="vmap").prepare(batch, mean=mean).engine == "compiled"


class Counting(nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(1, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.layer(x) - x).square().mean() + 0 * self.calls


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.filterwarnings("ignore:the model's forward changes the model's calls")
def test_what_every_step_would_compile_anew_is_not_compiled() -> None:
    with pytest.warns(VecgymWarning, match=r"compile=True has no effect.*self.calls \+= 1, at .*test_compiled.*buffer"):
        trainer, _ = fit(Counting(), "FedAvg", data=torch.ones(24, 1), max_steps=20, compile=True)
    assert trainer.history.settings["engine"] == "vmap"


@pytest.mark.usefixtures("_traced_only")
def test_a_process_may_compile_more_models_than_torch_counts() -> None:
    """And a model for more sizes: torch's limit is eight of both together."""
    for width in range(1, 11):
        model = Classifier(nn.Linear(4, width))
        data = TensorDataset(torch.ones(24, 4), torch.zeros(24, dtype=torch.long))
        trainer, _ = fit(model, alone(), data=data, max_steps=1, compile=True)
        assert trainer.history.settings["engine"] == "compiled", width
    engine = Engine(model, compile=True)
    batch = lambda size: (torch.ones(2, size, 4), torch.zeros(2, size, dtype=torch.long))  # noqa: E731
    engine.prepare(batch(1))
    for size in range(1, 11):
        assert computed(engine, batch(size)).losses.isfinite().all()


@pytest.mark.usefixtures("_traced_only")
def test_only_a_new_size_has_the_settings_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entering them takes as long as a small model's gradients."""
    entered: list[Any] = []
    engine, data = Engine(make_model("MLP"), compile=True), dataset("MLP", 40)
    engine.prepare(Batches(data, K, 4).batch(0))
    given = compiled.sdpa_kernel

    def noted(backend: Any) -> Any:
        entered.append(backend)
        return given(backend)

    monkeypatch.setattr(compiled, "sdpa_kernel", noted)
    for step in range(3):
        computed(engine, Batches(data, K, 4).batch(step))
    assert not entered
    for step in range(3):
        computed(engine, Batches(data, K, 3).batch(step))
    assert len(entered) == 1


class Factor:
    """A value outside of a model."""

    now = 1.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (Factor.now * self.layer(x)).square().mean()


@pytest.mark.usefixtures("_traced_only")
def test_a_value_that_changes_more_often_than_torch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batch = Engine(Scaled(), compile=True), torch.randn(K, 4, 2)
    assert engine.prepare(batch).engine == "compiled"
    first = computed(engine, batch).losses
    for factor in range(2, 12):
        monkeypatch.setattr(Factor, "now", float(factor))
        torch.testing.assert_close(computed(engine, batch).losses, factor**2 * first)


def both_fits(strategy: Strategy) -> tuple[Trainer, Trainer]:
    """A run compiled, and one by vmap."""
    ours, theirs = (
        fit(make_model("MLP", dtype=torch.float64), strategy, data=dataset("MLP", 40, dtype=torch.float64),
            max_steps=5, compile=compile, engine="auto" if compile else "vmap")[0]
        for compile in (True, False)
    )  # fmt: skip
    assert (ours.history.settings["engine"], theirs.history.settings["engine"]) == ("compiled", "vmap")
    return ours, theirs


def assert_same_state(ours: Trainer, theirs: Trainer) -> None:
    for kind in ("own", "shared"):
        a, b = (getattr(trainer.state, kind) for trainer in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize("strategy", [DiLoCoStrategy("adamw", H=2, lr=0.01), AllReduceStrategy("adamw", lr=0.01)])
def test_a_fit_compiled_is_that_of_vmap(strategy: Strategy) -> None:
    ours, theirs = both_fits(strategy)
    assert_same_state(ours, theirs)
    assert [row["bytes_total"] for row in ours.history] == [row["bytes_total"] for row in theirs.history]


@pytest.mark.usefixtures("_traced_only")
def test_a_difference_between_the_fits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Compiled.gradients

    def off(self: Compiled, *args: Any) -> Local:
        local = given(self, *args)
        return local._replace(grads={name: g * (1 + 1e-10) for name, g in local.grads.items()})

    monkeypatch.setattr(Compiled, "gradients", off)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_state(*both_fits(DiLoCoStrategy("sgd", H=2, lr=0.1)))


@pytest.mark.usefixtures("_traced_only")
def test_a_sweep_compiled_is_that_of_vmap() -> None:
    data = dataset("MLP", 40, dtype=torch.float64)
    ours, theirs = (
        sweep(make_model("MLP", dtype=torch.float64), data, data, strategy=lambda lr: DiLoCoStrategy("sgd", H=2, lr=lr),
              grid={"lr": [0.1, 0.01]}, num_nodes=2, max_steps=4, batch_size=4, device="cpu", progress=False,
              compile=compile)
        for compile in (True, False)
    )  # fmt: skip
    for a, b in zip(ours.rows, theirs.rows):
        assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-12)


def test_compile_and_exact_cannot_be_combined() -> None:
    trainer = Trainer(make_model("MLP"), dataset("MLP", 40))
    with pytest.raises(ValueError, match="exact=True computes node by node, and compile=True all at once"):
        trainer.fit(DiLoCoStrategy("sgd", H=2, lr=0.1), 2, exact=True, compile=True, device="cpu")


class Broken(nn.Module):
    """Cannot be traced whole."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return (self.w * x).square().mean()


def test_a_model_that_cannot_be_compiled_runs_and_says_why() -> None:
    batch = torch.randn(K, 4, 2)
    engine = Engine(Broken(), compile=True)
    with pytest.warns(VecgymWarning, match=r"compile=True has no effect, the model runs uncompiled: .*graph_break"):
        plan = engine.prepare(batch)
    assert plan.engine == "vmap"
    assert computed(engine, batch).losses.shape == (K,)


@pytest.mark.parametrize("name", NEEDS_LOOP[:1])
def test_a_model_that_vmap_cannot_run_is_not_compiled(name: str) -> None:
    engine = Engine(make_model(name), compile=True)
    with pytest.warns(VecgymWarning, match=r"(?s)vmap cannot run"):
        assert engine.prepare(Batches(dataset(name, 40), K, 4).batch(0)).engine == "loop"


@pytest.mark.usefixtures("_traced_only")
def test_a_model_that_is_traced_wrongly_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    right = compiled.Compiled.gradients

    def wrong(self: compiled.Compiled, *args: Any) -> Local:
        local = right(self, *args)
        local.grads["first.weight"][1, 0] *= 1.01
        return local

    monkeypatch.setattr(compiled.Compiled, "gradients", wrong)
    engine = Engine(make_model("MLP", dtype=torch.float64), compile=True)
    with pytest.warns(VecgymWarning, match=r"compiled, the gradient of first\.weight is off by"):
        plan = engine.prepare(Batches(dataset("MLP", 40, dtype=torch.float64), K, 4).batch(0))
    assert plan.engine == "vmap"


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def missing(*args: Any) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr(compiled.Compiled, "gradients", missing)
    engine = Engine(make_model("MLP"), compile=True)
    with pytest.raises(RuntimeError, match=r"compile=True needs a C\+\+ compiler.*install one.*leave out compile=True"):
        engine.prepare(Batches(dataset("MLP", 40), K, 4).batch(0))


@pytest.mark.parametrize("settings", [{"engine": "loop"}, {"node_threads": 2}])
def test_what_cannot_be_combined(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="compile=True"):
        Engine(make_model("MLP"), compile=True, **settings)


class Graph:
    """The behaviour of a CUDA graph, on a CPU: after the first call it computes with the memory of that call.

    Args:
        stale: what is given later is not copied there, as if it had been recorded wrongly.
    """

    def __init__(self, fn: Callable[..., Any], stale: bool = False, **settings: Any) -> None:
        self.fn, self.stale, self.settings = fn, stale, settings
        self.given: Any = None

    def __call__(self, *given: Any) -> Any:
        if self.given is None or not self.stale:
            self.given = tree.map_leaves(torch.clone, given)
        return self.fn(*self.given)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("stale", [False, True])
def test_a_recording_that_computes_with_what_it_was_first_given_is_refused(
    stale: bool, mean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(Graph, stale=stale))
    engine = Engine(make_model("MLP", dtype=torch.float64), compile=True)
    batch = Batches(dataset("MLP", 40, dtype=torch.float64), K, 4).batch(0)
    if not stale:
        assert engine.prepare(batch, mean=mean).engine == "compiled"
        return
    with pytest.warns(VecgymWarning, match="uncompiled: compiled, the loss is off by"):
        assert engine.prepare(batch, mean=mean).engine == "vmap"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_gradients_are_recorded_as_a_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step begins before each call, so that the results of the last one may be written over."""
    calls = []
    monkeypatch.setattr(torch, "compile", Graph)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: calls.append("begun"))
    model = StatelessModel(make_model("MLP"))
    model.device = torch.device(device)
    backend = Compiled(model)
    for graph in (backend._compiled_each, backend._compiled_mean):
        assert graph.settings["options"]["triton.cudagraphs"] == (device == "cuda")  # type: ignore[attr-defined]
    model.device = torch.device("cpu")
    batch = Batches(dataset("MLP", 40), K, 4).batch(0)
    for _ in range(2):
        backend.gradients(first_part(model, batch, mean=False), dict)
    assert calls == ["begun"] * (2 if device == "cuda" else 0)
