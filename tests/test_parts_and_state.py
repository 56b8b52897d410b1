"""The state of a model besides its tensors: the mode of each part, attributes, outer variables, random numbers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import random
import threading
import warnings
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fitting import alone, same
from vecgym import Trainer, VecgymWarning, sweep
from vecgym.core import rng
from vecgym.data import Batches
from vecgym.engine import Engine
from vecgym.engine.stateless import StatelessModel
from vecgym.models import Classifier

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def fit(model: nn.Module, loss_fn: Any = None, steps: int = 6, **settings: Any) -> tuple[Trainer, Any]:
    trainer = Trainer(model, X, X[:8], loss_fn=loss_fn)
    options = {"batch_size": 4, "device": "cpu", "progress": False, "max_steps": steps, **settings}
    return trainer, trainer.fit(alone("sgd", lr=0.1), options.pop("num_nodes", 2), **options)


def off(trainer: Trainer, model: nn.Module, loss_fn: Any, steps: int = 6) -> float:
    """Train a copy of the model for each node, in torch's own way; return the largest difference of the tensors."""
    num_nodes, largest = trainer.nodes.num_nodes, 0.0
    batches = Batches(X, num_nodes, 4, seed=42)
    for node in range(num_nodes):
        module = copy.deepcopy(model)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            loss_fn(module, batches.batch(step)[node]).backward()
            optimizer.step()
        for name, x in module.state_dict().items():
            ours = (trainer.nodes.params | trainer.nodes.buffers)[name]
            largest = max(largest, float((ours[node] - x).abs().max()))
    return largest


def square(module: nn.Module, batch: Tensor) -> Tensor:
    return (module(batch)[:, 0] - batch[:, 0]).square().mean()


# -------------------------------------------------------------------------------------------------- parts in eval mode


def frozen_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.ReLU(), nn.Linear(8, 1)).double()
    net.get_buffer("1.running_mean").fill_(0.3)
    net[1].eval()
    net[2].eval()
    return net


class Distilled(nn.Module):
    """A student, and a teacher that an override of `train` keeps in eval mode, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(4, 3).double()
        self.teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) - self.teacher(x)


@pytest.mark.parametrize("engine", ["vmap", "loop", "auto"])
@pytest.mark.parametrize("make", [frozen_batch_norm, Distilled])
def test_a_part_in_eval_mode_stays_so_while_the_model_trains(make: Any, engine: str) -> None:
    model, steps = make(), 60 if engine == "auto" else 6
    modes = [part.training for part in model.modules()]
    trainer, averaged = fit(model, square, steps, engine=engine)
    assert off(trainer, model, square, steps) < 1e-12
    assert [part.training for part in averaged.modules()] == modes == [part.training for part in model.modules()]


def test_a_model_in_eval_mode_trains_in_training_mode_and_is_returned_as_given() -> None:
    model = frozen_batch_norm()
    trainer, averaged = fit(model.eval(), square)
    assert not averaged[1].training
    assert trainer.nodes.buffers["1.num_batches_tracked"].tolist() == [6, 6]
    vars(model.get_submodule("2"))["p"] = 0.0
    trainer, _ = fit(model, square)
    assert off(trainer, copy.deepcopy(model).train(), square) < 1e-12


def test_validation_is_in_eval_mode_whatever_the_parts_are_in() -> None:
    model = frozen_batch_norm()
    trainer, averaged = fit(model, square, num_nodes=1, max_steps=3)
    assert trainer.history.series("val_loss")[1][-1] == pytest.approx(square(averaged.eval(), X[:8]).item(), abs=1e-14)


def test_a_trained_part_in_eval_mode_within_a_fresh_module_is_told() -> None:
    net = nn.Sequential(nn.Linear(4, 1), nn.Dropout()).double().eval()
    with pytest.warns(VecgymWarning, match="all parts of the model are in eval mode"):
        fit(nn.Sequential(net), square)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(nn.Sequential(net, nn.Linear(1, 1).double()), square)
        assert not Classifier(net).training  # so that all of it trains
        assert Classifier(net.train()).training


# ----------------------------------------------------------------------------------------------- state in attributes


class Scaled(nn.Module):
    """A linear layer whose output is scaled by what an attribute, `kept`, says."""

    def __init__(self, kept: Any = None, scale: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kept = nn.Linear(4, 1).double(), kept
        if scale is not None:
            vars(self)["scale"] = scale

    def scale(self, me: Any, x: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale(self, x)).square().mean()


def counted(me: Any, x: Tensor) -> float:
    me.kept += 1
    return min(1.0, float(me.kept) / 100)


def warmed_up(me: Any, x: Tensor) -> float:
    me.kept += me.training
    return 1.0 if me.kept > 500 else 0.5


def every_tenth(me: Any, x: Tensor) -> float:
    me.kept["count"] += 1
    return 1.0 if me.kept["count"] % 10 else 0.5


def every_seventh(me: Any, x: Tensor) -> float:
    me.kept.count += 1
    return 1.0 if (me.kept.count - 1) % 7 else 0.5


def of_a_long_list(me: Any, x: Tensor) -> float:
    me.kept.append(1)
    return 1.0 if len(me.kept) > 5000 else 0.5


def of_a_queue(me: Any, x: Tensor) -> Tensor:
    me.kept.append(x.mean())
    return torch.stack(list(me.kept)).detach().mean()


def hidden(me: Any, x: Tensor) -> Tensor:
    me.kept = torch.tanh(x.mean(1, keepdim=True) + (0.0 if me.kept is None else me.kept)).detach()
    return me.kept


def running_mean_for_validation(me: Any, x: Tensor) -> Tensor:
    if not me.training:
        return me.kept
    me.kept = 0.9 * me.kept + 0.1 * x.mean().detach()
    return x.mean()


def last_mean_for_validation(me: Any, x: Tensor) -> Tensor:
    if me.training:
        me.kept = x.mean().detach()
    return me.kept


def of_the_first_batch(me: Any, x: Tensor) -> Tensor:
    if me.kept is None:
        me.kept = x.std().detach()
    return me.kept


def once(me: Any, x: Tensor) -> float:
    was, me.kept = me.kept, True
    return 1.0 if was else 0.5


def drawn(me: Any, x: Tensor) -> float:
    return float(me.kept.random())


def drawn_by_torch(me: Any, x: Tensor) -> Tensor:
    return torch.rand((), generator=me.kept)


STATES: dict[str, tuple[Any, Any]] = {
    "a counter": (lambda: 0, counted),
    "a counter in a tensor": (lambda: torch.zeros(()), counted),
    "a counter in an array": (lambda: np.zeros(()), warmed_up),
    "a warm-up": (lambda: 0, warmed_up),
    "a period": (lambda: {"count": 0}, every_tenth),
    "a period of an object": (lambda: SimpleNamespace(count=0), every_seventh),
    "a long list": (list, of_a_long_list),
    "a queue": (lambda: deque(maxlen=3), of_a_queue),
    "a hidden state": (lambda: None, hidden),
    "a running mean": (lambda: torch.zeros(()), running_mean_for_validation),
    "what training left": (lambda: torch.zeros(()), last_mean_for_validation),
    "the first batch": (lambda: None, of_the_first_batch),
    "a flag": (lambda: False, once),
    "an iterator": (lambda: itertools.cycle([1.0, 0.5]), lambda me, x: next(me.kept)),
    "a generator of numpy": (lambda: np.random.default_rng(0), drawn),
    "a generator of Python": (lambda: random.Random(0), drawn),
    "a generator of torch": (torch.Generator, drawn_by_torch),
}


@pytest.mark.parametrize("state", STATES)
def test_state_in_an_attribute_is_refused_with_the_fix(state: str) -> None:
    kept, scale = STATES[state]
    engine = Engine(nn.Sequential(Scaled(kept(), scale)), engine="loop" if "counter" in state else "auto")
    with pytest.raises(ValueError, match=r"keeps state in the model's 0\.kept.*self\.register_buffer\('(kept|count)'"):
        engine.prepare(X[None, :8])


NUMBERS, OBJECT = {"count": 0}, SimpleNamespace(count=0)
TOTAL = 0


def by_a_global(me: Any, x: Tensor) -> float:
    global TOTAL
    TOTAL += 1
    return 1.0 if TOTAL > 500 else 0.5


def by_a_dict(me: Any, x: Tensor) -> float:
    NUMBERS["count"] += 1
    return 1.0 if NUMBERS["count"] > 500 else 0.5


def by_an_object(me: Any, x: Tensor) -> float:
    OBJECT.count += 1
    return 1.0 if OBJECT.count > 500 else 0.5


def by_its_class(me: Any, x: Tensor) -> float:
    type(me).total += 1
    return 1.0 if me.total > 500 else 0.5


def by_itself(me: Any, x: Tensor) -> float:
    by_itself.total = vars(by_itself).get("total", 0) + 1  # type: ignore[attr-defined]
    return 1.0 if by_itself.total > 500 else 0.5  # type: ignore[attr-defined]


class Totalled(Scaled):
    total = 0


def by_a_closure() -> Any:
    total = 0

    def scale(me: Any, x: Tensor) -> float:
        nonlocal total
        total += 1
        return 1.0 if total > 500 else 0.5

    return scale


OUTSIDE = {
    "the outer variable TOTAL": by_a_global,
    r"the outer variable NUMBERS\['count'\]": by_a_dict,
    r"the outer variable OBJECT\.count": by_an_object,
    r"the class attribute Totalled\.total": by_its_class,
    r"the function's attribute by_itself\.total": by_itself,
    "the outer variable total": by_a_closure(),
}


@pytest.mark.parametrize("where", OUTSIDE)
def test_state_outside_is_refused_and_left_as_it_was(where: str) -> None:
    engine = Engine(Totalled(scale=OUTSIDE[where]))
    with pytest.raises(ValueError, match=f"keeps state in {where}"):
        engine.prepare(X[None, :8])
    assert TOTAL == NUMBERS["count"] == OBJECT.count == Totalled.total == 0


def test_state_of_a_loss_fn_is_refused() -> None:
    calls = [0]

    def annealed(module: nn.Module, batch: Tensor) -> Tensor:
        calls[0] += 1
        return square(module, batch) * min(1.0, calls[0] / 100)

    with pytest.raises(ValueError, match=r"keeps state in the outer variable calls\[0\]"):
        fit(nn.Linear(4, 1).double(), annealed)
    assert calls == [0]


class Buffered(Scaled):
    """The advice of the error."""

    def __init__(self) -> None:
        super().__init__()
        del self.kept
        self.register_buffer("kept", torch.tensor(0))

    def scale(self, me: Any, x: Tensor) -> Any:
        self.kept += 1
        return self.kept / 100


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_a_buffer_keeps_what_an_attribute_must_not(engine: str) -> None:
    trainer, _ = fit(Buffered(), engine=engine, num_nodes=3, node_threads=2)
    assert trainer.nodes.buffers["kept"].tolist() == [6, 6, 6]
    assert off(trainer, Buffered(), lambda module, batch: module(batch)) < 1e-14


def mask(me: Any, x: Tensor) -> Tensor:
    if me.kept is None or me.kept.shape[0] != x.shape[0]:
        me.kept = torch.arange(x.shape[0], dtype=x.dtype)[:, None]
    return me.kept


def mask_of_the_batch(me: Any, x: Tensor) -> Tensor:
    if me.kept is None:
        me.kept = torch.full_like(x[:, :1], 2.0)  # under vmap it is of the nodes of one call
    return me.kept


def by_shape(me: Any, x: Tensor) -> Tensor:
    return me.kept.setdefault(x.shape, torch.arange(len(x), dtype=x.dtype)[:, None])


def features(me: Any, x: Tensor) -> float:
    me.kept, me.last = x.mean().detach(), len(x)
    return 1.0


def logged(me: Any, x: Tensor) -> float:
    me.kept.append(x.mean().detach())
    return 1.0


CACHES: dict[str, tuple[Any, Any]] = {
    "a mask": (lambda: None, mask),
    "a mask of the batch": (lambda: None, mask_of_the_batch),
    "by shape": (dict, by_shape),
    "features": (lambda: None, features),
    "a log": (list, logged),
}


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.filterwarnings("ignore:vmap cannot run this model")
def test_what_has_no_effect_on_later_passes_may_stay_in_attributes(cache: str, engine: str) -> None:
    kept, scale = CACHES[cache]
    model = Scaled(kept(), scale)
    trainer, averaged = fit(model, engine=engine, chunk_size=2, num_nodes=3)
    assert off(trainer, model, lambda module, batch: module(batch)) < 1e-14
    assert repr(averaged.kept) == repr(kept()) == repr(model.kept)


class Merging(nn.Module):
    """Computes its weights once for all evaluations between two passes in training mode."""

    merged: Tensor | None = None

    def __init__(self, merges: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.merges = nn.Linear(4, 1).double(), merges

    def train(self, mode: bool = True) -> Merging:
        self.merged = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not self.merges:
            return self.layer(x).square().mean()
        if self.merged is None:
            self.merged = self.layer.weight.detach().clone()
        return (x @ self.merged.T + self.layer.bias).square().mean()


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_an_evaluation_begins_without_what_another_one_has_left(engine: str) -> None:
    ours, right = (fit(Merging(merges), engine=engine, val_interval=2)[0].history for merges in (True, False))
    for column in ("val_loss", "val_loss_local"):
        np.testing.assert_allclose(ours.series(column)[1], right.series(column)[1], rtol=1e-13)


class Lora(nn.Linear):
    """Merges its weights where it is put into eval mode, as loralib does, which begins with B = 0."""

    def __init__(self, merges: bool) -> None:
        super().__init__(4, 1, dtype=torch.float64)
        self.a, self.b = (nn.Parameter(x.double()) for x in (torch.ones(2, 4), torch.zeros(1, 2)))
        self.merges, self.merged = merges, False
        self.weight.requires_grad_(False)

    def train(self, mode: bool = True) -> Lora:
        if self.merges and self.merged == mode:
            self.weight.data += (-1 if mode else 1) * (self.b @ self.a)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.merged else y + x @ self.a.T @ self.b.T


def test_weights_that_are_merged_in_place_in_eval_mode_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0, a Lora, writes to its 'weight' in train.* merge_weights=False"):
        fit(nn.Sequential(Lora(merges=True)), square)
    trainer, averaged = fit(Lora(merges=False), square)
    assert trainer.history.last("val_loss") == pytest.approx(float(square(averaged, X[:8]).detach()), rel=1e-12)


def test_a_count_without_effect_is_told() -> None:
    def count(me: Any, x: Tensor) -> float:
        me.kept += 1
        return 1.0

    with pytest.warns(VecgymWarning, match=r"changes the model's kept, on which its results do not depend"):
        assert fit(Scaled(0, count))[1].kept == 0


def test_a_count_of_a_loss_fn_counts_all_passes() -> None:
    meter = SimpleNamespace(passes=0)

    def loss_fn(module: nn.Module, batch: Tensor) -> Tensor:
        meter.passes += 1
        return square(module, batch)

    fit(nn.Linear(4, 1).double(), loss_fn, engine="loop", steps=2)
    assert meter.passes > 6


# ------------------------------------------------------------------------------------- what node threads would share


class Recorder:
    out = torch.zeros(())

    def hook(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.out = out


def hooked(by: str) -> tuple[nn.Module, Any]:
    """A loss of features that a hook puts outside of the model: into a dict, an object, a global, a module."""
    torch.manual_seed(0)
    model, found, recorder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double(), {"h": X}, Recorder()
    probe = nn.Identity()

    def into_a_module(module: nn.Module, args: Any, out: Tensor) -> None:
        vars(probe)["out"] = out

    into_a_dict: Any = lambda module, args, out: found.__setitem__("h", out)  # noqa: E731
    hook = {"dict": into_a_dict, "object": recorder.hook, "module": into_a_module}[by]
    model[0].register_forward_hook(hook)

    def loss_fn(module: nn.Module, batch: Tensor) -> Tensor:
        loss = square(module, batch)
        out = {"dict": found["h"], "object": recorder.out, "module": vars(probe).get("out")}[by]
        assert out is not None
        return loss + out.square().mean()

    return model, loss_fn


def plainly(module: nn.Module, batch: Tensor) -> Tensor:
    return square(module, batch) + module.get_submodule("0")(batch).square().mean()


@pytest.mark.parametrize("by", ["dict", "object", "module"])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_what_is_written_outside_is_not_shared_by_node_threads(by: str, engine: str) -> None:
    model, loss_fn = hooked(by)
    with pytest.warns(VecgymWarning, match="node_threads=2 has no effect: the model can write to the outer variable"):
        trainer, _ = fit(model, loss_fn, engine=engine, node_threads=2, num_nodes=4)
    assert trainer.history.settings["node_threads"] == 1
    for layer in model:  # type: ignore[attr-defined]
        layer._forward_hooks.clear()
    assert off(trainer, model, plainly) < 1e-14


@dataclasses.dataclass
class Config:
    width: int = 4


SETTINGS = {"scale": 0.1}


class Configured(nn.Module):
    """Has the usual configuration, and is decorated by torch, which keep sets and lists for themselves."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.layer = config, nn.Linear(config.width, 1).double()
        self.scale = SETTINGS["scale"] * random.random()
        self.checkpoint = functools.partial(checkpoint, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.checkpoint(self.layer, x[:, : self.config.width]) * self.scale


def test_what_python_and_torch_keep_for_themselves_is_no_hindrance() -> None:
    trainer, _ = fit(Configured(Config()), square, node_threads=2, engine="loop")
    assert trainer.history.settings["node_threads"] == 2


def test_what_is_only_read_outside_is_no_hindrance() -> None:
    teacher = nn.Sequential(nn.Conv1d(1, 1, 3), nn.BatchNorm1d(1)).double().eval()
    weights = (0.5, torch.ones(()))

    def loss_fn(module: nn.Module, batch: Tensor) -> Tensor:
        return weights[0] * square(module, batch) + weights[1] * teacher(batch[:, None]).mean()

    assert fit(nn.Linear(4, 1).double(), loss_fn, node_threads=2)[0].history.settings["node_threads"] == 2
    teacher.train()  # its statistics move
    with pytest.warns(VecgymWarning, match="node_threads=2 has no effect"):
        fit(nn.Linear(4, 1).double(), loss_fn, node_threads=2, engine="loop")


# ------------------------------------------------------------------------------- random numbers of numpy and Python


class Mixed(nn.Module):
    """Mixup: a share for each batch, which a buffer notes."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.w, self.draw = nn.Parameter(torch.zeros((), dtype=torch.float64)), draw
        self.register_buffer("share", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        share = self.draw()
        self.get_buffer("share").fill_(share)
        return (self.w - share * x - (1 - share) * x.flip(0)).square().mean() + share


def beta() -> float:
    return float(np.random.beta(0.4, 0.4))  # noqa: NPY002


def layer_drop() -> float:
    return 1.0 if random.random() < 0.3 else random.gauss(0, 1)


@pytest.mark.parametrize("draw", [beta, layer_drop])
@pytest.mark.filterwarnings("ignore:vmap cannot run this model")
def test_random_numbers_of_numpy_and_python_depend_on_seed_step_and_node(draw: Any) -> None:
    def shares(**settings: Any) -> list[float]:
        trainer = fit(Mixed(draw), **{"seed": 7, "num_nodes": 3, "steps": 4, **settings})[0]
        return trainer.nodes.buffers["share"].tolist() + trainer.history.series("val_loss")[1]

    before = rng.host_states()
    expected = []
    for node in range(3):
        with rng.private(rng.key(rng.key(7, "model", 3, node, 0), "host")):
            expected.append(draw())
    assert before == rng.host_states()
    ours = shares()
    assert ours[:3] == expected
    assert before == rng.host_states()
    random.random(), np.random.rand()  # noqa: NPY002
    assert shares(engine="loop") == ours
    assert shares(steps=3)[:3] != ours[:3] != shares(seed=8)[:3]


class Late(nn.Module):
    """Draws where the first example of a batch is negative."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.w, self.draw = nn.Parameter(torch.ones((), dtype=torch.float64)), draw

    def forward(self, x: Tensor) -> Tensor:
        loss = (self.w * x).square().mean()
        return loss * self.draw() if x[0, 0] < 0 else loss


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), beta, random.random], ids=["torch", "numpy", "Python"])
@pytest.mark.filterwarnings("ignore:vmap cannot run this model")
def test_random_numbers_that_the_first_pass_does_not_draw_depend_on_the_seed_too(draw: Any) -> None:
    data = X.clone()
    data[Batches(X, 1, 4, seed=7).batch(0)[0][0, 0] == data[:, 0], 0] = 1.0
    trained = [Trainer(Late(draw), data) for _ in range(2)]
    for trainer in trained:
        trainer.fit(alone("sgd", lr=0.1), 1, batch_size=4, max_steps=8, seed=7, device="cpu", progress=False)
    assert torch.equal(trained[0].nodes.params["w"], trained[1].nodes.params["w"])
    assert any(x[0, 0] < 0 for step in range(8) for x in Batches(data, 1, 4, seed=7).batch(step))


def test_random_numbers_on_threads_are_told_if_the_first_pass_draws_none() -> None:
    data = X.clone()
    data[:, 0] = data[:, 0].abs()
    data[Batches(X, 3, 4, seed=42).batch(1)[2][0, 1] == data[:, 1], 0] = -1.0
    model = Late(lambda: torch.rand(()))
    settings: dict[str, Any] = {"engine": "loop", "node_threads": 3, "device": "cpu", "progress": False}
    with pytest.warns(VecgymWarning, match="draws random numbers, and did not in its first pass"):
        Trainer(model, data).fit(alone("sgd", lr=0.1), 3, batch_size=4, max_steps=8, **settings)


def test_a_model_that_draws_from_numpy_takes_the_loop_on_one_thread() -> None:
    with pytest.warns(VecgymWarning, match="vmap cannot run this model: it draws random numbers of numpy or Python"):
        trainer, _ = fit(Mixed(beta))
    assert trainer.history.settings["engine"] == "loop"
    with pytest.raises(RuntimeError, match="it draws random numbers of numpy or Python"):
        fit(Mixed(beta), engine="vmap")
    with pytest.warns(VecgymWarning, match="node_threads=2 has no effect: the model draws random numbers"):
        fit(Mixed(beta), engine="loop", node_threads=2)


def test_numbers_that_another_thread_draws_are_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[float] = []
    gradient, over = StatelessModel.gradient, threading.Event()

    def disturbed(*args: Any) -> Any:
        passed.append(random.random()) if not passed else None  # as a thread of Dask would, now and then
        return gradient(*args)

    monkeypatch.setattr(StatelessModel, "gradient", disturbed)
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        trainer, _ = fit(nn.Linear(4, 1, dtype=torch.float64), square)
    finally:
        over.set()
        other.join()
    assert trainer.history.settings["engine"] == "vmap"


@pytest.mark.filterwarnings("ignore:vmap cannot run this model")
def test_a_sweep_and_a_resumed_run_draw_the_same(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "device": "cpu", "progress": False, "max_steps": 4, "seed": 7}
    alone_, _ = fit(Mixed(beta), seed=7, num_nodes=3, steps=4)
    swept = sweep(
        Mixed(beta), X, X[:8], strategy=lambda lr: alone("sgd", lr=lr), grid={"lr": [0.1, 0.2]}, num_nodes=3, **settings
    )
    for column in ("train_loss", "val_loss"):
        assert swept.history(0).series(column) == alone_.history.series(column)
    save: dict[str, Any] = {"save_dir": tmp_path, "checkpoint_interval": 2, "num_nodes": 3, "seed": 7}
    fit(Mixed(beta), steps=2, **save)
    resumed, _ = fit(Mixed(beta), steps=4, resume=True, **save)
    assert same(resumed.nodes.params, alone_.nodes.params)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:vmap cannot run this model")
def test_processes_draw_the_same() -> None:
    processes: dict[str, Any] = {"backend": "processes", "num_processes": 2}
    ours, theirs = (fit(Mixed(beta), num_nodes=4, **more)[0] for more in ({}, processes))
    assert same(ours.nodes.params, theirs.nodes.params)
    assert same(ours.nodes.buffers, theirs.nodes.buffers)
