"""The ways to compute the nodes agree: vmap, loop, chunks and threads, for every kind of model that users bring."""

from __future__ import annotations

import contextlib
import inspect
import platform
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.fitting import STRATEGIES, alone, dataset, fit, params, same, same_run
from tests.helpers import NEEDS_LOOP
from tests.models import MODELS, RANDOM, Table, make_model
from vecgym import OptimSpec, Trainer, VecgymWarning
from vecgym.data import Batches
from vecgym.engine import Engine, EngineName, Local, ModelFacts, Plan, choose_plan, plan, recorded
from vecgym.engine.backend import NodeSlice
from vecgym.engine.loop import Loop
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, FedAvgStrategy

ENGINES = ["vmap", "loop", "auto"]
FALL_BACK = NEEDS_LOOP
EXACT = [name for name in MODELS if name not in FALL_BACK and name not in RANDOM]


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def untrained(name: str) -> contextlib.AbstractContextManager[Any]:
    """Parameters that a model does not use are named at the end."""
    if name not in ("unused", "batch norm with fixed statistics"):
        return contextlib.nullcontext()
    return pytest.warns(VecgymWarning, match="never had a gradient")


def assert_equal_runs(a: Trainer, b: Trainer, tolerance: float = 1e-10) -> None:
    ours, theirs = ({**x.nodes.params, **x.nodes.buffers} for x in (a, b))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    np.testing.assert_allclose(a.history.node_array(), b.history.node_array(), rtol=0, atol=tolerance)
    np.testing.assert_allclose(a.history.series("val_loss")[1], b.history.series("val_loss")[1], rtol=0, atol=tolerance)


def run(model: str | nn.Module, strategy: Any = "FedAvg", num_nodes: int = 5, **settings: Any) -> Trainer:
    """Three steps in float64 with validation, so that both directions of an engine run."""
    if isinstance(model, str):
        settings.setdefault("data", dataset(model, 40, dtype=torch.float64))
        settings.setdefault("val", dataset(model, 6, seed=1, dtype=torch.float64))
        model = make_model(model, dtype=torch.float64)
    settings = {"max_steps": 3, "batch_size": 3, "val_interval": 2, **settings}
    return fit(model, strategy, num_nodes=num_nodes, **settings)[0]


# ------------------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg", "FedAvg participation", "DiLoCo"])
@pytest.mark.parametrize("model", EXACT)
def test_the_engines_agree(model: str, strategy: str) -> None:
    expected = run(model, strategy, engine="loop")
    for engine in ENGINES if strategy == "FedAvg" else ["vmap", "auto"]:
        with no_warnings():
            found = run(model, strategy, engine=engine)
        assert_equal_runs(found, expected)
        assert found.history.settings["engine"] in ("recorded", "vmap", "loop")
        if engine in ("vmap", "loop"):
            assert found.history.settings["engine"] == engine


@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg"])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 99])
def test_chunks_agree(chunk_size: int, engine: str, strategy: str) -> None:
    expected = run("CNN", strategy, engine="loop")
    found = run("CNN", strategy, engine=engine, chunk_size=chunk_size)
    assert_equal_runs(found, expected)
    assert found.history.settings["chunk_size"] == chunk_size


@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg", "FedAvg participation"])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("model", ["CNN", "GPT"])
def test_threads_agree(model: str, engine: str, strategy: str) -> None:
    expected = run(model, strategy, engine="loop")
    for settings in ({"node_threads": 1}, {"node_threads": 2}, {"node_threads": 2, "chunk_size": 2}):
        found = run(model, strategy, engine=engine, **settings)
        assert_equal_runs(found, expected)
        assert found.history.settings["node_threads"] == settings["node_threads"]


def test_a_node_thread_uses_one_thread_in_its_operations() -> None:
    """Else each of N node threads would compute with N threads, and their waiting would take the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model, batch = make_model("MLP"), Batches(dataset("MLP"), 4, 3).batch(0)
        engine = Engine(model, engine="loop", node_threads=2)
        engine.prepare(batch)
        assert engine._pool is None  # no threads before there is work
        params = {name: p.detach()[None] for name, p in model.named_parameters()}
        engine.gradients(params, {}, batch, seed=0, step=0, node_ids=range(4))
        assert engine._pool is not None
        both = threading.Barrier(2)  # so that each thread answers once
        answers = list(engine._pool.map(lambda _: (both.wait(20), torch.get_num_threads())[1], range(2)))
        engine.close()
        assert answers == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_more_threads_than_nodes() -> None:
    found = run("MLP", num_nodes=2, engine="loop", node_threads=8)
    assert_equal_runs(found, run("MLP", num_nodes=2, engine="loop"))
    assert found.history.settings["node_threads"] <= 2


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_threads_repeat_bit_for_bit(engine: str) -> None:
    a, b = (run("CNN", engine=engine, node_threads=2) for _ in range(2))
    assert same_run(a, b)


def test_accumulation_with_chunks_and_threads() -> None:
    data = dataset("GPT", 40, dtype=torch.float64)
    expected = run("GPT", data=data, engine="loop", batch_size=4)
    for settings in ({"chunk_size": 2}, {"node_threads": 2}, {"engine": "loop", "node_threads": 2}):
        assert_equal_runs(run("GPT", data=data, batch_size=4, minibatch_size=2, **settings), expected)


@pytest.mark.parametrize("model", ["MLP", "CNN", "GPT"])
def test_the_engines_agree_under_autocast(model: str) -> None:
    """Half precision is for products; a loss stays in float32, whatever computes it."""
    data = dataset(model, 40)
    a, b = (
        fit(make_model(model), data=data, max_steps=2, autocast=True, engine=engine)[0] for engine in ("vmap", "loop")
    )
    # bfloat16 has 8 bits of mantissa, and vmap's cross-entropy stays in it.
    np.testing.assert_allclose(a.history.node_array()[0], b.history.node_array()[0], rtol=2**-8)


# ---------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize("model", [name for name in MODELS if name not in FALL_BACK])
def test_the_choice_is_deterministic_and_recorded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MIN_PASSES", 1)
    names = ("engine", "node_threads", "chunk_size", "engine_reason")
    plans = [{name: run(model).history.settings[name] for name in names} for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0]["engine"] in ("recorded", "vmap" if model == "Checkpointed" else "loop")
    assert isinstance(plans[0]["engine_reason"], str)
    assert plans[0]["engine_reason"]


def test_threads_for_a_model_that_draws_random_numbers() -> None:
    with pytest.warns(VecgymWarning, match=r"node_threads=2 has no effect.*random"):
        found = run("Dropout", node_threads=2)
    assert same_run(found, run("Dropout"))


CAUSES = {
    "Checkpointed": r"checkpoint\(",  # the line of the model; older torch
    "DataDependent": r"\.item\(\)",
    "LSTM": r"lstm",
}


@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg"])
@pytest.mark.parametrize("model", FALL_BACK)
def test_models_that_vmap_cannot_run_fall_back_with_one_warning(model: str, strategy: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(model, strategy)
    assert [w.category for w in caught] == [VecgymWarning]
    message = str(caught[0].message)
    assert 'engine="loop"' in message
    with pytest.raises(AssertionError, match=CAUSES[model]):
        raise AssertionError(message)
    assert found.history.settings["engine"] == "loop"
    with no_warnings():
        expected = run(model, strategy, engine="loop")
    assert same_run(found, expected)


def test_the_warning_points_at_the_call_of_fit() -> None:
    with pytest.warns(VecgymWarning) as caught:
        Trainer(make_model("DataDependent"), dataset("DataDependent")).fit(
            alone(), 2, max_steps=1, progress=False, device="cpu", batch_size=4
        )
    assert caught[0].filename == __file__


@pytest.mark.parametrize("model", FALL_BACK)
def test_models_that_vmap_cannot_run_under_engine_vmap(model: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=CAUSES[model]) as raised:
        run(model, engine="vmap")
    assert 'engine="loop"' in str(raised.value)


def test_an_error_in_the_model_itself_is_not_blamed_on_vmap() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)  # the data has 16 features

        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.layer(batch[0]).mean()

    for engine in ENGINES:
        with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
            fit(Wrong(), data=dataset("MLP"), engine=engine)
        assert "vmap" not in str(raised.value)


def test_what_the_model_raises_in_the_middle_of_a_run() -> None:
    tokens = torch.cat([torch.zeros(8, dtype=torch.long), torch.full((4,), 99)])
    trainer = Trainer(Table(), tokens)
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        trainer.fit(alone(), 2, batch_size=2, shuffle=False, engine="loop", progress=False, device="cpu")
    assert len(trainer.history) == 2  # the third step failed
    assert trainer.nodes.params["table.weight"].shape == (2, 10, 1)


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("strategy", [alone, AllReduceStrategy])
@pytest.mark.parametrize("token", [-1, 10])
def test_no_node_reads_the_table_of_another(token: int, strategy: Callable[[], Any], engine: str) -> None:
    """Of a token that is out of range on a node, whose row vmap would look up in the next node's table."""

    good, bad = torch.zeros(16, dtype=torch.long), torch.zeros(16, dtype=torch.long)
    bad[13] = token  # on node 1 of 4, in the second step
    run: dict[str, Any] = {"batch_size": 2, "shuffle": False, "engine": engine, "progress": False, "device": "cpu"}
    trainer = Trainer(Table(), bad)
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        trainer.fit(strategy(), 4, max_steps=2, **run)
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        Trainer(Table(), good, bad).fit(strategy(), 4, max_steps=1, **run)


# ------------------------------------------------------------------------------------------------------- storage


@pytest.mark.parametrize("optim", ["sgd", "adamw"])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("num_nodes", [1, 2, 7])
def test_all_reduce_stores_everything_once(num_nodes: int, engine: str, optim: str) -> None:
    trainer = run(
        "CNN",
        AllReduceStrategy(optim, lr=0.01),
        num_nodes=num_nodes,
        engine=engine,
        data=dataset("CNN", 42, dtype=torch.float64),
    )
    assert trainer.state is not None
    assert {p.shape[0] for p in trainer.state.params.values()} == {1}
    stored = [x for x in leaves(trainer.state.home["optimizer"]) if x.dim() > 0]
    assert {x.shape[0] for x in stored} <= {1}
    assert stored or optim == "sgd"
    assert {p.shape[0] for p in trainer.nodes.params.values()} == {num_nodes}
    assert trainer.state.buffers["norm1.running_mean"].shape[0] == num_nodes


def test_diloco_stores_the_outer_state_once() -> None:
    trainer = run("MLP", DiLoCoStrategy("adamw", H=2, lr=0.01))
    assert trainer.state is not None
    assert trainer.state.shared.keys() - {"buffers"} == {"0.0/params", "0.0/outer"}
    assert {x.shape[0] for x in leaves(trainer.state.shared)} == {1}
    assert {x.shape[0] for x in leaves(trainer.state.params)} == {5}


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [x for value in values for x in leaves(value)]


# ----------------------------------------------------------------------------------------------------- attention


class Attention(nn.Module):
    """Two heads of width 4 over `[B, 6, 8]`; `call(q, k, v)` is what is tried out."""

    def __init__(self, call: Callable[..., Tensor], kv_heads: int = 2) -> None:
        super().__init__()
        self.call = call
        self.kv_heads = kv_heads
        self.q = nn.Linear(8, 8)
        self.kv = nn.Linear(8, 8 * kv_heads)
        self.head = nn.Linear(8, 3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        B, T, _ = x.shape
        q = self.q(x).view(B, T, 2, 4).transpose(1, 2)
        k, v = self.kv(x).view(B, T, 2, self.kv_heads, 4).permute(2, 0, 3, 1, 4)
        out = self.call(q, k, v, x).transpose(1, 2).reshape(B, T, 8)
        return F.cross_entropy(self.head(out).mean(1), y)


def sequences(num_examples: int = 40, seed: int = 0) -> Any:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_examples, 6, 8, generator=g, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, torch.randint(3, (num_examples,), generator=g))


TRIANGLE = torch.ones(6, 6, dtype=torch.bool).tril()
PLACES = torch.stack([TRIANGLE, TRIANGLE.T, torch.eye(6, dtype=torch.bool)])[:, None]  # [3, 1, T, T]
sdpa = F.scaled_dot_product_attention


def padding(x: Tensor) -> Tensor:
    """The positions of each example that are there, `[B, T]`: from the data, so they differ between nodes."""
    return torch.cat([torch.ones_like(x[..., :1], dtype=torch.bool)[:, :1, 0], x[:, 1:, 0] > -1], 1)


ATTENTION: dict[str, Callable[..., Tensor]] = {
    "plain": lambda q, k, v, x: sdpa(q, k, v),
    "is_causal": lambda q, k, v, x: sdpa(q, k, v, is_causal=True),
    "keywords": lambda q, k, v, x: sdpa(query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=True),
    "scale": lambda q, k, v, x: sdpa(q, k, v, scale=0.3),
    "bool [T,T]": lambda q, k, v, x: sdpa(q, k, v, TRIANGLE),
    "float [T,T]": lambda q, k, v, x: sdpa(q, k, v, torch.zeros(6, 6).double().masked_fill(~TRIANGLE, -1e9)),
    "bool [1,1,T,T]": lambda q, k, v, x: sdpa(q, k, v, attn_mask=TRIANGLE[None, None]),
    "bool [B,1,T,T]": lambda q, k, v, x: sdpa(q, k, v, padding(x)[:, None, None, :] & TRIANGLE),
    "bool [B,1,1,T]": lambda q, k, v, x: sdpa(q, k, v, padding(x)[:, None, None, :]),
    "bool [B,H,T,T]": lambda q, k, v, x: sdpa(q, k, v, padding(x)[:, None, None, :].expand(-1, 2, 6, 6)),
    "float [B,H,T,T]": lambda q, k, v, x: sdpa(q, k, v, x[:, None, :, :6].expand(-1, 2, -1, -1)),
    "float [B,1,T,T]": lambda q, k, v, x: sdpa(q, k, v, x[:, None, :, :6] - 1.0),
    "float of parameters [H,T,T]": lambda q, k, v, x: sdpa(q, k, v, (q[0] @ k[0].transpose(-2, -1))),
    "one mask for each place in the batch": lambda q, k, v, x: sdpa(q, k, v, PLACES[: len(x)]),
    "three dimensions": lambda q, k, v, x: sdpa(q[:, 0], k[:, 0], v[:, 0])[:, None].expand(-1, 2, -1, -1),
    "folded heads": lambda q, k, v, x: sdpa(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).view(q.shape),
    "shorter query": lambda q, k, v, x: sdpa(q[:, :, :1], k, v).expand(-1, -1, 6, -1),
    "shared keys": lambda q, k, v, x: sdpa(q, k[:1], v[:1]),
    "other value width": lambda q, k, v, x: torch.cat([sdpa(q, k, v[..., :3]), q[..., :1]], -1),
}


@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg"])
@pytest.mark.parametrize("call", ATTENTION)
def test_attention_under_vmap(call: str, strategy: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Attention(ATTENTION[call]).double()

    settings: dict[str, Any] = {"data": sequences(), "val": sequences(6, 1)}
    expected = run(model(), strategy, engine="loop", **settings)
    with no_warnings():  # torch warns where vmap falls back to a slow loop of its own
        found = run(model(), strategy, engine="vmap", **settings)
    assert_equal_runs(found, expected)


@pytest.mark.skipif("enable_gqa" not in (sdpa.__doc__ or ""), reason="this torch has no grouped-query attention")
def test_grouped_query_attention_under_vmap() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Attention(lambda q, k, v, x: sdpa(q, k, v, is_causal=True, enable_gqa=True), kv_heads=1).double()

    settings: dict[str, Any] = {"data": sequences(), "val": sequences(6, 1)}
    expected = run(model(), engine="loop", **settings)
    with no_warnings():
        assert_equal_runs(run(model(), engine="vmap", **settings), expected)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_attention_dropout_differs_between_nodes(engine: str) -> None:
    torch.manual_seed(0)
    model = Attention(lambda q, k, v, x: sdpa(q, k, v, dropout_p=0.5))
    x = torch.randn(1, 6, 8).expand(12, 6, 8).clone()  # every node has the same example, over and over
    data = torch.utils.data.TensorDataset(x, torch.zeros(12, dtype=torch.long))
    trainer, _ = fit(model, alone(lr=0.0), data=data, max_steps=3, engine=engine)
    losses = trainer.history.node_array().flatten().tolist()
    assert len(set(losses)) == len(losses)


# ------------------------------------------------------------------------------------------- models of all kinds


class Sequence(nn.Module):
    """`[B, 6, 8]` through a body, then a classifier."""

    def __init__(self, body: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, 3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        out = self.body(x)
        out = out[0] if isinstance(out, tuple) else out
        return F.cross_entropy(self.head(out.mean(1)), y)


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, **self.options)[0]


class Transposed(nn.Module):
    """Channels first for what wants `[B, C, T]`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Tokens(nn.Module):
    """An embedding of the tokens 0, 1, 2, 3."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[..., 0] > 0).long() * 2 + (x[..., 1] > 0).long())


class FunctionalPadding(Tokens):
    def forward(self, x: Tensor) -> Tensor:
        return F.embedding((x[..., 0] > 0).long(), self.table.weight, 1)


class Masked(nn.Module):
    """A buffer that never changes, as causal masks and positions are."""

    mask: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(6, 8).tril(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.mask


class FrozenNorm(nn.Module):
    """Batch norm that uses its statistics and leaves them alone, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.layer(x), self.norm.running_mean, self.norm.running_var)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ParameterList([torch.randn(8), torch.randn(8)])
        self.named = nn.ParameterDict({"a": torch.randn(8)})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.some[0] + self.some[1] * self.named["a"]


class Unused(nn.Module):
    """A layer that no forward pass touches."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class WrittenCopy(nn.Module):
    """The input is added in place to a copy of a parameter: one copy for all nodes where they share it."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        copy = self.offset.expand_as(x).clone()
        copy += x
        return copy


class PlainTensor(nn.Module):
    """A tensor that is no buffer, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = torch.arange(8).double()
        self.shifts = [torch.ones(8).double()]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale + self.shifts[0])


class RunningMean(nn.Module):
    """Keeps a mean of what it saw, and a count: by replacing the buffers, or in place."""

    mean: Tensor
    count: Tensor

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("unchanged", torch.ones(8))
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            seen = x.detach().mean((0, 1))
            if self.inplace:
                self.mean.lerp_(seen, 0.5)
                self.count += 1
            else:
                self.mean = 0.5 * self.mean + 0.5 * seen
                self.count = self.count + 1
        return self.layer(x - self.mean)


BODIES: dict[str, Callable[[], nn.Module]] = {
    "MultiheadAttention": SelfAttention,
    "MultiheadAttention, no weights": lambda: SelfAttention(need_weights=False),
    "MultiheadAttention, mask": lambda: SelfAttention(attn_mask=~TRIANGLE, need_weights=False),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
        2,
        enable_nested_tensor=False,
    ),
    "GRU": lambda: nn.GRU(8, 8, batch_first=True),
    "RNN": lambda: nn.RNN(8, 8, batch_first=True),
    "Embedding, padding_idx": lambda: Tokens(padding_idx=0),
    "F.embedding, padding_idx": FunctionalPadding,
    "Embedding, scale_grad_by_freq": lambda: Tokens(scale_grad_by_freq=True),
    "Embedding, frozen": lambda: Tokens(padding_idx=0).requires_grad_(False),
    "ParameterList": Lists,
    "LayerNorm": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
    "GroupNorm": lambda: Transposed(nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8))),
    "BatchNorm1d": lambda: Transposed(nn.Sequential(nn.Conv1d(8, 8, 3, padding=1, bias=False), nn.BatchNorm1d(8))),
    "InstanceNorm1d": lambda: Transposed(nn.InstanceNorm1d(8, affine=True, track_running_stats=True)),
    "Conv1d, groups": lambda: Transposed(nn.Conv1d(8, 8, 3, padding=1, groups=4)),
    "PReLU": lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU()),
    "ReLU in place": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)),
    "weight_norm": lambda: weight_norm(nn.Linear(8, 8)),
    "spectral_norm": lambda: spectral_norm(nn.Linear(8, 8)),
    "plain tensor": PlainTensor,
    "copy of a parameter in place": WrittenCopy,
    "unused": Unused,
    "constant buffer": lambda: Masked(persistent=True),
    "constant buffer, not persistent": lambda: Masked(persistent=False),
    "batch norm with fixed statistics": FrozenNorm,
    "replaced buffers": lambda: RunningMean(inplace=False),
    "buffers in place": lambda: RunningMean(inplace=True),
}
MAY_FALL_BACK = {
    "GRU", "RNN", "weight_norm", "spectral_norm", "Embedding, scale_grad_by_freq", "copy of a parameter in place",
}  # fmt: skip


def body(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Sequence(BODIES[name]()).double()


@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg"])
@pytest.mark.parametrize("name", BODIES)
def test_models_of_all_kinds(name: str, strategy: str) -> None:
    """`auto` and `loop` agree, and only what vmap cannot run falls back, with one warning."""
    settings: dict[str, Any] = {"data": sequences(), "val": sequences(6, 1)}
    with no_warnings(), untrained(name):
        expected = run(body(name), strategy, engine="loop", **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with untrained(name):
            found = run(body(name), strategy, engine="auto", **settings)
    fell_back = [w.category for w in caught] == [VecgymWarning]
    assert fell_back or not caught, [str(w.message) for w in caught]
    assert not fell_back or name in MAY_FALL_BACK, str(caught[0].message)
    assert_equal_runs(found, expected)
    first, last = expected.history.series("train_loss")[1][::2]
    assert first != last


@pytest.mark.parametrize(
    ("name", "engine"), [(n, e) for n in BODIES for e in ("auto", "loop") if e == "loop" or n not in MAY_FALL_BACK]
)
def test_one_node_of_every_kind_is_plain_training(name: str, engine: str) -> None:
    """The loop, against a plain module and a plain optimizer: parameters, buffers, losses."""
    plain, losses = body(name), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.5)
    for batch in Batches(sequences(), 1, 4, seed=42).iterate(0, 4):
        optimizer.zero_grad()
        loss = plain([x[0] for x in batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    strategy = FedAvgStrategy(OptimSpec("adamw", lr=1e-2, weight_decay=0.5))
    with untrained(name):
        trainer, result = fit(body(name), strategy, num_nodes=1, data=sequences(), max_steps=4, engine=engine)
    torch.testing.assert_close(result.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(trainer.history["train_loss"], losses, rtol=1e-10)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg", "DiLoCo"])
def test_an_unused_parameter_keeps_its_value(strategy: str, engine: str) -> None:
    """As in torch, where a parameter without a gradient is skipped, weight decay or not (adamw has 0.01)."""
    with pytest.warns(VecgymWarning, match=r"never had a gradient.*: body.unused.weight, body.unused.bias\."):
        trainer, result = fit(body("unused"), strategy, data=sequences(), max_steps=3, engine=engine)
    for name in ("body.unused.weight", "body.unused.bias"):
        given = trainer.model.get_parameter(name)
        assert torch.equal(result.get_parameter(name), given)
        assert torch.equal(trainer.nodes.params[name], given.expand(3, *given.shape))
        assert result.get_parameter(name).requires_grad
    assert not torch.equal(result.get_parameter("body.used.weight"), trainer.model.get_parameter("body.used.weight"))


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg"])
def test_batch_norm_statistics_belong_to_each_node(strategy: str, engine: str) -> None:
    chosen = FedAvgStrategy("sgd") if strategy == "FedAvg" else strategy
    trainer, result = fit("CNN", chosen, max_steps=1, engine=engine, dtype=torch.float64)

    batch = Batches(dataset("CNN", dtype=torch.float64), 3, 4, seed=42).batch(0)
    for i in range(3):
        alone_ = make_model("CNN", dtype=torch.float64)
        alone_(tuple(x[i] for x in batch))
        for name, b in alone_.named_buffers():
            torch.testing.assert_close(trainer.nodes.buffers[name][i], b, rtol=1e-10, atol=1e-12)
    means = trainer.nodes.buffers["norm1.running_mean"]
    assert not torch.equal(means[0], means[1])
    torch.testing.assert_close(result.get_buffer("norm1.running_mean"), means.mean(0))


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("name", ["replaced buffers", "buffers in place"])
@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg", "FedAvg participation"])
def test_buffers_by_hand(strategy: str, name: str, engine: str) -> None:
    trainer, _ = fit(body(name), strategy, data=sequences(), num_nodes=4, max_steps=3, engine=engine)
    took_part = np.isfinite(trainer.history.node_array())
    expected, counts = torch.zeros(4, 8).double(), [0] * 4
    batches = [x for x, _ in Batches(sequences(), 4, 4, seed=42).iterate(0, 3)]
    for step in range(3):
        for i in np.flatnonzero(took_part[step]):  # each reads its own next batch
            expected[i] = 0.5 * expected[i] + 0.5 * batches[counts[i]][i].mean((0, 1))
            counts[i] += 1
    torch.testing.assert_close(trainer.nodes.buffers["body.mean"], expected)
    assert trainer.nodes.buffers["body.count"].tolist() == counts
    assert bool((trainer.nodes.buffers["body.unchanged"] == 1).all())


def test_padding_stays_zero() -> None:
    trainer, _ = fit(body("Embedding, padding_idx"), AllReduceStrategy("sgd", lr=0.5), data=sequences(), max_steps=4)
    table = trainer.nodes.params["body.table.weight"]
    assert bool((table[:, 0] == 0).all())
    assert not torch.equal(table[0], trainer.model.get_parameter("body.table.weight"))


# -------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg"])
def test_dropout_under_loop_does_not_depend_on_chunks(strategy: str, chunk_size: int) -> None:
    a = run("Dropout", strategy, engine="loop")
    b = run("Dropout", strategy, engine="loop", chunk_size=chunk_size)
    assert same_run(a, b)


def test_dropout_under_loop_is_keyed_by_the_node() -> None:
    """Node 1's masks are its own, whoever else is there: with fewer nodes, or with only some taking part."""

    def factory(rank: int, num_nodes: int, train: bool) -> Any:
        return dataset("Dropout", 12, seed=rank)

    many, few = (
        fit(make_model("Dropout"), alone(), data=factory, num_nodes=K, max_steps=4, engine="loop")[0] for K in (5, 2)
    )
    torch.testing.assert_close(params(many)[:2], params(few), rtol=0, atol=1e-7)
    never = FedAvgStrategy("sgd", lr=0.0, H=2, participation=0.5)
    some, _ = fit(make_model("Dropout"), never, data=factory, num_nodes=5, max_steps=4, engine="loop")
    still, _ = fit(make_model("Dropout"), alone(lr=0.0), data=factory, num_nodes=5, max_steps=4, engine="loop")
    losses = some.history.node_array().T
    here = np.isfinite(losses)
    assert 0 < here.sum() < here.size
    for mine, took_part, alone_ in zip(losses, here, still.history.node_array().T):  # masks go by a node's own steps
        np.testing.assert_allclose(mine[took_part], alone_[: took_part.sum()], rtol=1e-6)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_dropout_is_off_in_evaluation_and_on_afterwards(engine: str) -> None:
    found = run("Dropout", alone(lr=0.0), engine=engine, val_interval=1)
    values = found.history.series("val_loss")[1]
    assert max(values) == pytest.approx(min(values), rel=1e-12)
    losses = found.history.node_array()
    assert len(np.unique(losses)) == losses.size


def test_every_strategy_runs_under_loop_without_a_warning() -> None:
    for name in STRATEGIES:
        with no_warnings():
            run("DataDependent", name, engine="loop")


def test_the_defaults_that_users_see() -> None:
    defaults = {name: p.default for name, p in inspect.signature(Trainer.fit).parameters.items()}
    assert defaults["engine"] == "auto"
    assert defaults["chunk_size"] is None
    assert defaults["node_threads"] is None


@pytest.mark.parametrize("model", ["Checkpointed", "LSTM"])
def test_a_model_for_loop_learns_as_plain_training_does(model: str) -> None:
    data, plain = dataset(model, 12, dtype=torch.float64), make_model(model, dtype=torch.float64)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in Batches(data, 1, 4, seed=42).iterate(0, 4):
        optimizer.zero_grad()
        plain([x[0] for x in batch]).backward()
        optimizer.step()
    _, result = fit(model, alone(), num_nodes=1, data=data, max_steps=4, engine="loop", dtype=torch.float64)
    torch.testing.assert_close(result.state_dict(), plain.state_dict(), rtol=1e-10, atol=1e-12)


# -------------------------------------------------------------------------------------------------- the rule

SMALL = ModelFacts(frozenset(), frozenset(), random=False, flop=10**6, largest_bytes=2**10)
BUSY = replace(SMALL, flop=2 * 10**8)


@pytest.mark.parametrize(
    ("facts", "num_nodes", "num_threads", "device", "expected"),
    [
        (SMALL, 512, 2, "cpu", ("vmap", 1, None)),
        (BUSY, 16, 2, "cpu", ("vmap", 2, None)),  # 3.2 GFLOP a step
        (BUSY, 8, 2, "cpu", ("vmap", 1, None)),  # 1.6
        (BUSY, 16, 1, "cpu", ("vmap", 1, None)),
        (BUSY, 16, 8, "cpu", ("vmap", 1, None)),  # not enough for eight threads
        (BUSY, 16, 2, "cuda", ("vmap", 1, None)),
        (replace(BUSY, random=True), 16, 2, "cpu", ("vmap", 1, None)),
        (replace(SMALL, flop=10**10), 4, 2, "cpu", ("loop", 2, None)),
        (replace(SMALL, flop=10**10), 4, 2, "cuda", ("vmap", 1, None)),
        (replace(SMALL, vmap_slow=("aten::lstm",)), 4, 2, "cpu", ("loop", 1, None)),
        (replace(BUSY, vmap_error=RuntimeError("no")), 16, 2, "cpu", ("loop", 2, None)),
        (replace(SMALL, largest_bytes=2**20), 31, 1, "cpu", ("vmap", 1, None)),
        (replace(SMALL, largest_bytes=2**20), 32, 1, "cpu", ("vmap", 1, 31)),
        (replace(SMALL, largest_bytes=2**20), 32, 1, "cuda", ("vmap", 1, None)),
        (replace(BUSY, largest_bytes=2**20), 62, 2, "cpu", ("vmap", 2, None)),  # 31 nodes a thread
        (replace(BUSY, largest_bytes=2**20), 64, 2, "cpu", ("vmap", 2, 31)),
        (replace(SMALL, largest_bytes=2**30), 4, 1, "cpu", ("vmap", 1, 1)),
        (replace(BUSY, convolution_flop=10**8), 16, 2, "cpu", ("vmap", 2, None)),
        (replace(BUSY, convolution_flop=10**8 + 1), 16, 2, "cpu", ("loop", 2, None)),
        (replace(BUSY, convolution_flop=2 * 10**8), 16, 2, "cuda", ("vmap", 1, None)),
    ],
)
def test_the_rule_of_auto(facts: ModelFacts, num_nodes: int, num_threads: int, device: str, expected: Any) -> None:
    plan = choose_plan(facts, num_nodes, torch.device(device), num_threads, "auto")
    assert (plan.engine, plan.node_threads, plan.chunk_size) == expected
    assert plan.reason


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_channels_are_last_where_the_rule_takes_a_loop_for_the_convolutions(engine: EngineName) -> None:
    convolving = replace(BUSY, convolution_flop=2 * 10**8)
    assert choose_plan(convolving, 16, torch.device("cpu"), 2, engine).channels_last == (engine == "auto")
    assert not choose_plan(convolving, 16, torch.device("cpu"), 2, engine, mean=True).channels_last


@pytest.mark.parametrize("node_threads", [1, 2])
@pytest.mark.parametrize("strategy", ["DiLoCo", "FedAvg", "FedAvg participation"])
def test_channels_last_change_nothing_but_rounding(
    strategy: str, node_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run("CNN", strategy, engine="loop")
    monkeypatch.setattr(plan, "MAX_CONVOLUTION_FLOP_IN_STACK", 0)
    seen = []
    pooled = F.max_pool2d

    def watched(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(x.stride(1) == 1)
        return pooled(x, *args, **kwargs)

    monkeypatch.setattr(F, "max_pool2d", watched)
    found = run("CNN", strategy, engine="auto", node_threads=node_threads)
    assert_equal_runs(found, expected)
    assert found.history.settings["channels_last"]
    assert not expected.history.settings["channels_last"]
    # The first passes only look at the model; then it pools twice for each node and step, and in evaluations.
    assert sum(seen) >= 2 * 3 * 5
    assert all(seen[-10:])


def test_the_arithmetic_of_convolutions_is_counted_by_itself() -> None:
    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x).mean((2, 3))).square().mean()

    engine = Engine(Seeing())
    engine.prepare(torch.zeros(3, 8, 2, 6, 6))
    assert engine.facts is not None
    assert engine.facts.convolution_flop == 3 * 2 * 8 * (4 * 4 * 4) * (2 * 3 * 3)
    assert engine.facts.flop == engine.facts.convolution_flop + 3 * 2 * 8 * 4 * 3


@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg", "FedAvg participation"])
def test_chunks_that_keep_tensors_small_change_nothing(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("CNN", strategy, engine="auto")
    monkeypatch.setattr(plan, "MAX_TENSOR_BYTES", 20_000)
    chunked = run("CNN", strategy, engine="auto")
    assert whole.history.settings["chunk_size"] is None
    assert 1 <= chunked.history.settings["chunk_size"] < 5
    assert_equal_runs(chunked, whole)


def test_what_the_rule_knows_of_a_model() -> None:
    """Of one node: three times the arithmetic of its forward pass, and the largest tensor that there is."""
    for width, largest in ((64, 64 * 16), (1, 8 * 16)):  # the weight; the input, copied

        class Wide(nn.Module):
            def __init__(self, width: int = width) -> None:
                super().__init__()
                self.layer = nn.Linear(16, width)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x + 1).square().mean()

        engine = Engine(Wide())
        engine.prepare(torch.zeros(3, 8, 16))
        assert engine.facts is not None
        assert engine.facts.flop == 3 * 2 * 8 * 16 * width
        assert engine.facts.largest_bytes == 4 * largest


class Counting(nn.Module):
    """Writes to itself in every forward pass, in eval mode too: a counter, and rows of an embedding."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 4, **settings)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return (self.embedding(tokens).sum(-1) - 1).square().mean()


@pytest.mark.parametrize(
    ("settings", "engine"),  # vmap would compute max_norm wrongly, and is refused
    [({}, "vmap"), ({}, "loop"), ({"sparse": True}, "vmap"), ({"sparse": True}, "loop"), ({"max_norm": 0.5}, "loop")],
)
@pytest.mark.parametrize("strategy", [AllReduceStrategy, DiLoCoStrategy], ids=lambda s: s.__name__)
def test_validation_has_no_part_in_the_training(strategy: Any, settings: dict[str, Any], engine: EngineName) -> None:
    """Nor is a sparse gradient another one."""
    tokens = torch.randint(0, 20, (24, 3), generator=torch.Generator().manual_seed(1))

    def trained(val_interval: int | None, **given: Any) -> Trainer:
        trainer = Trainer(Counting(**given), tokens, tokens)
        made = strategy("adamw", H=3, lr=0.1) if strategy is DiLoCoStrategy else strategy("adamw", lr=0.1)
        trainer.fit(made, 2, max_steps=6, batch_size=4, val_interval=val_interval, val_size=8, engine=engine,
                    device="cpu", progress=False)  # fmt: skip
        return trainer

    if "max_norm" in settings and strategy is AllReduceStrategy:  # each node would scale other rows
        with pytest.raises(ValueError, match=r"writes to its parameter 'embedding.weight'"):
            trained(None, **settings)
        return
    often, never = trained(1, **settings), trained(None, **settings)
    assert torch.equal(often.nodes.params["embedding.weight"], never.nodes.params["embedding.weight"])
    assert never.nodes.buffers["calls"].tolist() == often.nodes.buffers["calls"].tolist() == [6.0, 6.0]
    if "sparse" in settings:
        dense = trained(None)
        torch.testing.assert_close(never.nodes.params["embedding.weight"], dense.nodes.params["embedding.weight"])


class Counted(Loop):
    """A third backend: what `loop` does, and how often."""

    calls = 0

    def gradients(self, part: NodeSlice, out: Any, thread: int = 0) -> Local:
        Counted.calls += 1
        return super().gradients(part, out, thread)


def test_a_third_backend_is_one_class_and_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("MLP", engine="loop")
    monkeypatch.setitem(plan.BACKENDS, "counted", Counted)
    found = run("MLP", engine="counted")
    assert found.history.settings["engine"] == "counted"
    assert Counted.calls > 0
    assert same_run(found, expected)
    with pytest.raises(ValueError, match=r"did you mean 'counted'"):
        run("MLP", engine="countet")


def test_threads_start_with_the_first_gradients_and_again_after_a_close() -> None:
    """So that a run which is refused after its engine has been prepared leaves none behind."""

    def alive() -> int:
        return sum(thread.name.startswith("vecgym-node") for thread in threading.enumerate())

    before = alive()
    engine = Engine(make_model("MLP"), engine="loop", node_threads=2)
    batch = Batches(dataset("MLP"), 4, 3).batch(0)
    engine.prepare(batch)
    assert alive() == before
    params = {name: p.detach()[None] for name, p in engine.params.items()}
    first = {n: g.clone() for n, g in engine.gradients(params, {}, batch, seed=0, step=0).grads.items()}
    assert alive() == before + 2
    engine.close()
    assert alive() == before
    engine.release()
    assert same(engine.gradients(params, {}, batch, seed=0, step=0).grads, first)
    engine.close()


def test_a_plan_is_given() -> None:
    engine = Engine(make_model("MLP"), engine="vmap")
    batch = Batches(dataset("MLP"), 4, 3).batch(0)
    engine.prepare(batch)
    params = {name: p.detach()[None] for name, p in engine.params.items()}
    whole = engine.gradients(params, {}, batch, seed=0, step=0).grads
    engine.use(Plan("loop", node_threads=2, chunk_size=1))
    assert engine.plan.engine == "loop"
    torch.testing.assert_close(engine.gradients(params, {}, batch, seed=0, step=0).grads, whole)
    engine.close()


class Rounded(nn.Module):
    """Its loss is the sum of sixteen weights, each of which bfloat16 rounds from 1 + 2^-10 to 1: no other rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1, bias=False)
        nn.init.constant_(self.layer.weight, 1 + 2**-10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).float().mean()


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_validation_is_cast_however_many_nodes_there_are(num_rows: int, engine: EngineName) -> None:
    """With weights that tell a cast pass from another one exactly, whatever order the processor adds in."""
    for autocast, loss in ((True, 16.0), (False, 16 + 2**-6)):
        local = Engine(Rounded(), engine=engine, autocast=autocast)
        local.prepare(torch.ones(3, 4, 16))
        params = {n: p.detach()[None].expand(num_rows, *p.shape) for n, p in local.params.items()}
        assert local.measures(params, {}, torch.ones(4, 16))["loss"].tolist() == [loss] * num_rows
        assert local.loss({n: p[0] for n, p in params.items()}, {}, torch.ones(4, 16)).item() == loss


class Sum(nn.Module):
    """Autograd gives a and b the same tensor as their gradients, and c a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.linspace(i, 1, n).double()) for i, n in enumerate((4, 4, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a + self.b + torch.cat([self.c, self.c.detach()])).square().sum() * x.mean()


@pytest.mark.parametrize("strategy", [AllReduceStrategy, FedAvgStrategy])
def test_gradients_that_are_one_tensor_are_clipped_once(strategy: Any) -> None:
    batch, params = torch.rand(3, 2, 1).double(), {}
    for engine in ("vmap", "loop"):
        trainer = Trainer(Sum(), batch.flatten(0, 1))
        trainer.fit(strategy("sgd", lr=0.1, max_norm=0.05), 3, max_steps=4, batch_size=2, engine=engine, device="cpu",
                    progress=False)  # fmt: skip
        params[engine] = trainer.nodes.params
    torch.testing.assert_close(params["vmap"], params["loop"], rtol=0, atol=1e-14)


FAULTS = """
import ctypes, resource, sys, torch
from vecgym.engine.plan import keep_memory

class Info(ctypes.Structure):  # malloc.h: the fourth is the number of mapped blocks
    _fields_ = [(name, ctypes.c_int) for name in ("arena", "ordblks", "smblks", "hblks", "e", "f", "g", "h", "i", "j")]

allocator = ctypes.CDLL(None)
allocator.mallinfo.restype = Info

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [torch.zeros(2**21) for _ in range(6)]  # 48 MiB
    del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    keep_memory()
before = allocator.mallinfo().hblks
x = torch.zeros(2**21)
mapped = allocator.mallinfo().hblks - before
del x
print(mapped, [faults() for _ in range(8)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator has other rules")
def test_memory_is_kept_from_step_to_step() -> None:
    """Large tensors lie on the heap, which is not given back. (In the end it may not be without, by chance, either.)"""
    (mapped, _), (kept, faults) = (
        map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        for command in ([sys.executable, "-c", FAULTS, which] for which in ("without", "kept"))
    )
    assert (mapped, kept) == (1, 0)
    assert faults < 100
