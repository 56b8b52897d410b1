"""Models as people write them: what plain torch runs has the same results on every engine, or is refused."""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap
from torch.utils.data import TensorDataset

from tests.fitting import alone
from vecgym import DivergenceError, Trainer, VecgymWarning, rollout
from vecgym.engine import Engine, EngineName, contract, plan
from vecgym.engine.backend import Local
from vecgym.engine.stateless import plain_attention
from vecgym.strategy import FedAvgStrategy

K = 3
ENGINES = ("vmap", "loop", "auto")


def computed(model: nn.Module, batch: Any, engine: str = "auto", **settings: Any) -> tuple[Engine, Local]:
    """The losses and gradients of K equal nodes on batches `[K, B, ...]`, without a warning."""
    ours = Engine(model, engine=engine, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", VecgymWarning)
        ours.prepare(batch)
    params, buffers = ({n: x.detach()[None].clone() for n, x in each.items()} for each in (ours.params, ours.buffers))
    params = {name: p.repeat(K, *[1] * (p.dim() - 1)) for name, p in params.items()}
    return ours, ours.gradients(params, buffers, batch, seed=0, step=0)


def plain(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Tensor) -> list[dict[str, Tensor]]:
    """Each node's gradients by plain torch."""
    names, params = zip(*model.named_parameters())
    return [dict(zip(names, torch.autograd.grad(loss(model, of_one), params))) for of_one in batch]


def assert_plain(model: nn.Module, loss: Callable[..., Tensor], batch: Tensor, engine: str, **settings: Any) -> Engine:
    ours, local = computed(contract.with_loss(model, loss), batch, engine, **settings)
    for node, expected in enumerate(plain(model, loss, batch)):
        found = {name: g[node] for name, g in local.grads.items()}
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    return ours


# ------------------------------------------------------------------------------------------ the order in memory


class Convolving(nn.Module):
    """Two convolutions, flattened in a way that depends on the order of their outputs in memory."""

    def __init__(self, flatten: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head, self.flatten = nn.Linear(4 * 4 * 4, 3), flatten

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.second(torch.relu(self.first(x)))), 2)
        return self.head(self.flatten(x)).square().mean()


def _written_through(x: Tensor) -> Tensor:
    x.view(-1).clamp_(max=0.05)  # of what x is
    return x.flatten(1)


FLATTEN: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # and whether the channels can be last
    "view": (lambda x: x.view(x.size(0), -1), True),
    "view of a tuple": (lambda x: x.view((x.shape[0], 64)), True),
    "view of a view": (lambda x: x.flatten(2).view(x.size(0), -1), True),
    "view_as": (lambda x: x.view_as(torch.empty(x.size(0), 64)), True),
    "shuffled": (lambda x: x.view(-1, 2, 2, 4, 4).transpose(1, 2).contiguous().view(-1, 64), True),
    "as_strided": (lambda x: x.as_strided((x.shape[0], 64), (64, 1)), False),
    "written through a view": (_written_through, False),
    "reads strides": (lambda x: x.flatten(1) * (2 if x.stride(1) == 1 else 1), False),
}


@pytest.mark.parametrize("name", FLATTEN)
def test_a_model_is_examined_in_the_order_in_memory_in_which_it_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_CONVOLUTION_FLOP_IN_STACK", 0)
    torch.manual_seed(0)
    flatten, last = FLATTEN[name]
    model, batch = Convolving(flatten).double(), torch.randn(K, 4, 2, 8, 8, dtype=torch.float64)
    ours = assert_plain(model, lambda module, x: module(x), batch, "auto")
    assert (ours.plan.engine, ours.plan.channels_last) == ("loop", last)
    params = {n: p.detach()[None] for n, p in ours.params.items()}
    with torch.no_grad():  # in evaluation, too
        expected = torch.stack([model(x) for x in batch])
    torch.testing.assert_close(ours.measures(params, {}, batch, own_batches=True)["loss"], expected)


# ------------------------------------------------------------------------------------------------ evaluation


class Padded(nn.Module):
    """An encoder that is told which positions are padding; its loss is over these, too."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(6, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.head(self.encoder(batch[0], src_key_padding_mask=batch[1])) - 1).square().mean()


def test_an_encoder_is_evaluated_as_it_is_trained_on_every_engine() -> None:
    """torch's fast form for evaluation has other values at padded positions, and vmap cannot take it."""
    torch.manual_seed(0)
    model = Padded()
    batch = torch.randn(K, 4, 5, 6), torch.arange(5).ge(3).expand(K, 4, 5).clone()
    expected = torch.stack([model((x, mask)) for x, mask in zip(*batch)]).detach()  # in training mode, without dropout
    for engine in ENGINES:
        ours = Engine(model, engine=engine)
        ours.prepare(batch)
        params = {n: p.detach()[None] for n, p in ours.params.items()}
        stored = {n: p.repeat(K, *[1] * (p.dim() - 1)) for n, p in params.items()}
        for held in (params, stored):
            found = ours.measures(held, {}, batch, own_batches=True)["loss"]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        alone = ours.measures(params, {}, (batch[0][0], batch[1][0]))["loss"]
        torch.testing.assert_close(alone, expected[:1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            ours.loss(dict(model.named_parameters()), {}, (batch[0][0], batch[1][0])), expected[0]
        )
    assert torch.backends.mha.get_fastpath_enabled()


def test_of_two_runs_at_once_the_last_one_allows_the_fast_form_again() -> None:
    first, second = plain_attention(), plain_attention()
    with first:
        second.__enter__()
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_losses_of_equal_nodes_are_the_loss_of_their_average() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 5, 6), torch.arange(5).ge(3).expand(16, 5).clone())
    trainer = Trainer(Padded(), data, data)
    trainer.fit(alone(lr=0.0), 2, max_steps=1, batch_size=4, device="cpu", progress=False)
    row = {name: trainer.history.last(name) for name in ("val_loss", "val_losses")}
    assert row["val_losses"] == pytest.approx(row["val_loss"], rel=1e-6)


class Guarded(nn.Linear):
    """Looks at values in validation only."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.training and y.isnan().any():
            raise ArithmeticError("nan")
        return y


def test_a_model_that_only_vmap_cannot_validate_is_validated_node_after_node() -> None:
    def history(engine: EngineName) -> Any:
        torch.manual_seed(0)
        x = torch.randn(24, 2)
        trainer = Trainer(Guarded(2, 1), x, x[:8], loss_fn=lambda m, batch: m(batch).square().mean())
        trainer.fit(alone(), 3, max_steps=4, batch_size=2, val_interval=2, engine=engine, device="cpu", progress=False)
        return trainer.history

    with pytest.warns(VecgymWarning, match="In validation, vmap cannot run") as caught:
        ours = history("auto")
    assert len(caught) == 1
    assert ours.settings["engine"] != "loop"
    for column in ("val_loss", "val_loss_local"):
        assert ours.series(column)[1] == pytest.approx(history("loop").series(column)[1], rel=1e-5)


# ------------------------------------------------------------------------------------------------- precision


class Precise(nn.Module):
    """Notes the types in which its layers compute."""

    def __init__(self, layer: nn.Module, own: bool) -> None:
        super().__init__()
        self.layer, self.own = layer, own
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        own = torch.autocast("cpu", enabled=self.own or torch.is_autocast_enabled("cpu"))
        with own:
            out = self.layer(x)
        self.seen.append(out.dtype)
        return out.float().square().mean()


class Attention(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.layer, self.weights = nn.MultiheadAttention(8, 2, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=self.weights)[0]


class Losing(nn.Module):
    """A loss of half precision."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(8, 8), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x), torch.sigmoid(x).bfloat16())


def _convolution(kind: Callable[..., nn.Module]) -> nn.Module:
    dims = int(kind.__name__[-2])
    return nn.Sequential(nn.Flatten(0, -2), nn.Unflatten(-1, (2, *[1] * (dims - 1), 4)), kind(2, 3, 1))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(8, 4),
    "no bias": lambda: nn.Linear(8, 4, bias=False),
    **{
        kind.__name__: functools.partial(_convolution, kind)
        for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
    },
    "PReLU": lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU()),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.Flatten(0, -2), nn.BatchNorm1d(8)),
    "LayerNorm": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
    "GroupNorm": lambda: nn.Sequential(nn.Linear(8, 8), nn.Flatten(0, -2), nn.GroupNorm(2, 8)),
    "attention": lambda: Attention(weights=False),
    "attention with weights": lambda: Attention(weights=True),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True),
    **{
        loss.__name__: functools.partial(Losing, loss)
        for loss in (F.l1_loss, F.mse_loss, F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.cross_entropy)
    },
}


@pytest.mark.parametrize("own", [False, True], ids=["fit's", "the model's own"])
@pytest.mark.parametrize("name", LAYERS)
def test_autocast_has_the_same_types_under_vmap(name: str, own: bool) -> None:
    torch.manual_seed(0)
    model, batch = Precise(LAYERS[name](), own), torch.randn(K, 4, 5, 8)
    types = {}
    for engine in ("loop", "vmap"):
        model.seen.clear()
        ours, local = computed(model, batch, engine, autocast=not own)
        ours.measures({n: p.detach()[None] for n, p in ours.params.items()},
                      {n: b[None] for n, b in ours.buffers.items()}, batch[0])  # fmt: skip
        types[engine] = set(model.seen), {n: g.dtype for n, g in local.grads.items()}, local.losses
    assert types["vmap"][:2] == types["loop"][:2]
    torch.testing.assert_close(types["vmap"][2], types["loop"][2], rtol=2**-7, atol=2**-9)


# ------------------------------------------------------------------------------- what a tensor says of itself


class Asking(nn.Module):
    """Lets its loss depend on what its tensors say of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.layer(x)) + self.frozen(x)
        tensors = (x, self.layer.weight, self.frozen.weight, out, out.detach())
        said = [say(t) for t in tensors for say in (lambda t: t.requires_grad, lambda t: t.is_leaf)]
        said += [t.grad_fn is None for t in tensors]
        return out.square().mean() * sum(2.0**-i for i, yes in enumerate(said) if yes)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_tensor_says_of_itself_is_the_same_on_every_engine(engine: str) -> None:
    torch.manual_seed(0)
    model, batch = Asking().double(), torch.randn(K, 4, 4, dtype=torch.float64)
    _, local = computed(model, batch, engine)
    torch.testing.assert_close(local.losses, torch.stack([model(x) for x in batch]).detach())


# -------------------------------------------------------------------------------- torch.func within the forward


def _adapted(model: nn.Module, x: Tensor) -> Tensor:
    """The loss after a step on half of the batch, as in MAML."""
    params = dict(model.named_parameters())
    loss = lambda params, x: functional_call(model, params, (x,)).square().mean()  # noqa: E731
    grads = grad(loss)(params, x[:2])
    return loss({name: p - 0.1 * grads[name] for name, p in params.items()}, x[2:])


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "vmap of grad": lambda m, x: vmap(grad(lambda z: m(z).sum()))(x).square().mean(),
    "grad": lambda m, x: grad(lambda z: m(z).sum())(x).square().mean(),
    "grad of vmap": lambda m, x: grad(lambda z: vmap(m)(z).sum())(x).square().mean(),
    "hessian": lambda m, x: vmap(hessian(lambda z: m(z).sum()))(x).square().mean(),
    "vjp": lambda m, x: vjp(m, x)[1](torch.ones(len(x), 1, dtype=x.dtype))[0].square().mean(),
    "jvp": lambda m, x: jvp(m, (x,), (torch.ones_like(x),))[1].square().mean(),
    "vmap": lambda m, x: vmap(m)(x).square().mean(),
    "MAML": _adapted,
}
BODIES: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1, bias=False)),
    "layer norm": lambda: nn.Sequential(
        nn.Linear(4, 5, bias=False), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1, False)
    ),
}


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_within_a_loss(name: str, body: str, engine: str) -> None:
    torch.manual_seed(0)
    ours = assert_plain(BODIES[body]().double(), TRANSFORMS[name], torch.randn(K, 4, 4, dtype=torch.float64), engine)
    assert ours.plan.engine in (("loop",) if engine == "loop" else ("vmap", "recorded"))


def test_torch_func_that_vmap_would_change_runs_in_a_loop() -> None:
    """A difference of any cause is found by comparing."""
    torch.manual_seed(0)
    level = lambda: len(torch._C._functorch.get_interpreter_stack() or ())  # noqa: E731
    loss = lambda m, x: vmap(lambda z: m(z).sum() * (1.0 if level() == 1 else 2.0))(x).square().mean()  # noqa: E731
    model, batch = contract.with_loss(BODIES["MLP"](), loss), torch.randn(K, 4, 4)
    with pytest.warns(
        VecgymWarning, match="vmap cannot run this model: its use of torch.func has other results within"
    ):
        assert Engine(model).prepare(batch).engine == "loop"
    with pytest.raises(RuntimeError, match="other results within vmap: the loss is off by"):
        Engine(model, engine="vmap").prepare(batch)


# ------------------------------------------------------------------------------------------- torch.compile


class Compiled(nn.Module):
    """Parts that are compiled in one way or another."""

    def __init__(self, how: str, whole: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.whole = nn.Linear(4, 4), nn.Linear(4, 1), whole
        self.act: Callable[[Tensor], Tensor] = torch.tanh
        if how == "a part":
            self.layer = torch.compile(self.layer, backend="eager")  # type: ignore[assignment]
        if how == "a part in place":
            self.layer.compile(backend="eager")
        if how == "a function":
            self.act = torch.compile(torch.tanh, backend="eager")
        if how == "its forward":
            self.forward = torch.compile(self.forward, backend="eager")  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        assert self.whole or not torch.compiler.is_compiling()
        return self.head(self.act(self.layer(x))).square().mean()


@pytest.fixture
def _reset() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_reset")
@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("how", ["the model", "a part", "a part in place", "a function", "its forward"])
def test_what_torch_compile_has_wrapped_is_taken_out(how: str, engine: EngineName) -> None:
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    results = []
    for wrapped in (how, ""):
        torch.manual_seed(0)
        model = inner = Compiled(wrapped)
        if wrapped == "the model":
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        trainer = Trainer(model, data)
        averaged = trainer.fit(alone(), 2, max_steps=2, batch_size=4, engine=engine, device="cpu", progress=False)
        assert type(averaged) is Compiled
        assert averaged.state_dict().keys() == inner.state_dict().keys()
        results.append((trainer.history["train_loss"], list(averaged.state_dict().values()), averaged))
    (losses, tensors, averaged), (expected, same, plain) = results
    assert losses == expected
    assert all(map(torch.equal, tensors, same))
    x = torch.ones(1, 4)
    with torch.no_grad():
        assert torch.equal(Compiled.forward(averaged, x), Compiled.forward(plain, x))
        if how == "its forward":  # the copy's own, with what it has learnt
            assert torch.equal(averaged(x), plain(x))


@pytest.mark.usefixtures("_reset")
def test_a_compiled_network_and_loss() -> None:
    net, x = nn.Linear(4, 1), torch.randn(24, 4)
    loss = torch.compile(lambda module, batch: module(batch).square().mean(), backend="eager")
    wrapped: Any = torch.compile(net, backend="eager")
    averaged = Trainer(wrapped, x, loss_fn=loss).fit(
        alone(), 2, max_steps=1, batch_size=4, device="cpu", progress=False
    )
    assert type(averaged) is nn.Linear
    assert list(averaged.state_dict()) == ["weight", "bias"]


def _shared() -> nn.Module:
    act, norm = nn.PReLU(), nn.BatchNorm1d(4)
    tied = nn.Linear(4, 4)
    tied.weight = (first := nn.Linear(4, 4)).weight
    return nn.Sequential(first, norm, act, tied, norm, act, nn.Linear(4, 1))


@pytest.mark.usefixtures("_reset", "compiled_always")
@pytest.mark.parametrize(
    "make", [_shared, lambda: Compiled("a part", whole=True)], ids=["modules in two places", "a compiled part"]
)
def test_compile_of(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    compile = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile)
    torch.manual_seed(0)
    model = contract.with_loss(make().double(), lambda module, x: module(x).square().mean())
    batch = torch.randn(K, 4, 4, dtype=torch.float64)
    (ours, a), (_, b) = computed(model, batch, compile=True), computed(model, batch, "loop")
    assert ours.plan.engine == "compiled"
    torch.testing.assert_close(a.grads, b.grads, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(a.buffers, b.buffers)
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.usefixtures("_reset", "compiled_always")
def test_a_backend_that_fails_is_named_with_its_cause_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(graph: Any, inputs: Any, **settings: Any) -> Any:
        raise NotImplementedError("no storage for a TensorWrapper")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=failing))
    with pytest.warns(VecgymWarning, match="compile=True has no effect.*uncompiled: no storage for a TensorWrapper"):
        plan = Engine(Compiled("", whole=True), compile=True).prepare(torch.ones(K, 4, 4))
    assert plan.engine == "vmap"
    with pytest.warns(VecgymWarning, match="uncompiled: Observed exception: raised exception AssertionError"):
        Engine(Compiled(""), compile=True).prepare(torch.ones(K, 4, 4))


# ------------------------------------------------------------------------------------------- tensors in one memory


class Memory(nn.Module):
    """Two layers, and what `share` lets them share."""

    def __init__(self, share: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 2), nn.Linear(2, 4)
        share(self)

    def forward(self, x: Tensor) -> Tensor:
        if "counted" in self._buffers:
            self.get_buffer("counted").add_(1)
        more = sum((p.square().mean() for p in self.parameters() if p.requires_grad), torch.zeros(()))
        return self.last(torch.tanh(self.first(x))).square().mean() + more


def put(owner: Any, name: str, value: Any) -> Any:
    setattr(owner, name, value)
    return owner


def _parts(cut: Callable[[Tensor], tuple[Tensor, Tensor]], keep: bool = False) -> Callable[[Any], None]:
    def share(m: Any) -> None:
        whole = torch.randn(6, 6)
        if keep:
            m.whole = whole
        m.a, m.b = map(nn.Parameter, cut(whole))

    return share


def _buffers(cut: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Any], None]:
    def share(m: Any) -> None:
        for name, b in zip(("counted", "other"), cut(torch.zeros(6, 6))):
            m.register_buffer(name, b)

    return share


def _data(m: Any) -> None:
    m.last.weight.data = m.first.weight.data.t()


APART: dict[str, Callable[[Any], Any]] = {
    "one object": lambda m: put(put(m, "two", nn.Linear(4, 2)).two, "weight", m.first.weight),
    "slices": _parts(lambda x: (x[:2], x[2:])),
    "slices of an attribute": _parts(lambda x: (x[:2], x[2:]), keep=True),
    "columns": _parts(lambda x: (x[:, :2], x[:, 2:])),
    "every second": _parts(lambda x: (x.view(-1)[::2], x.view(-1)[1::2])),
    "frozen": lambda m: (put(m.last, "weight", nn.Parameter(m.first.weight.t())), m.first.requires_grad_(False),
                         m.last.requires_grad_(False), put(m, "own", nn.Parameter(torch.ones(1)))),
    "a buffer that is a copy": lambda m: m.register_buffer("start", m.first.weight.detach().clone()),
    "an expanded buffer": lambda m: m.register_buffer("position", torch.zeros(1).expand(6)),
    "buffers apart": _buffers(lambda x: (x[:2], x[2:])),
    "buffers that stay": lambda m: (m.register_buffer("a", x := torch.zeros(6)), m.register_buffer("b", x[:3])),
    "spectral norm": lambda m: nn.utils.spectral_norm(m.first),
    "pruned": lambda m: torch.nn.utils.prune.l1_unstructured(m.first, "weight", 0.5),
}  # fmt: skip
TIED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a parameter of a view": (
        lambda m: put(m.last, "weight", nn.Parameter(m.first.weight.t())),
        r"'first.weight' and 'last.weight' of the model share memory.*F.linear\(x, self.first.weight.t\(\)\)",
    ),
    "data": (_data, r"'first.weight' and 'last.weight'.*F.linear"),
    "the same data": (
        lambda m: put(put(m, "two", nn.Linear(4, 2)).two.weight, "data", m.first.weight.data),
        r"one nn.Parameter object in both places: self.two.weight = self.first.weight",
    ),
    "numpy": (
        lambda m: put(m, "two", nn.Parameter(torch.from_numpy(m.first.weight.detach().numpy()))),
        "'first.weight' and 'two'|'two' and 'first.weight'",
    ),
    "overlapping slices": (_parts(lambda x: (x[:3], x[2:])), "'a' and 'b'"),
    "overlapping columns": (_parts(lambda x: (x[:, :3], x[:, 2:])), "'a' and 'b'"),
    "a buffer": (
        lambda m: m.register_buffer("start", m.first.weight.data[0]),
        r"'first.weight' and 'start'.*self.first.weight.detach\(\).clone\(\)",
    ),
    "a frozen parameter": (
        lambda m: put(m, "f", nn.Parameter(m.first.weight.data, False)),
        "'first.weight' and 'f'",
    ),
    "an attribute": (lambda m: put(m, "w", m.first.weight.t()), "'first.weight' and 'w'"),
    "buffers": (_buffers(lambda x: (x[:3], x[2:])), "'counted' and 'other'"),
    "expanded": (
        lambda m: put(m.last, "bias", nn.Parameter(torch.zeros(1).expand(4))),
        r"'last.bias' of the model is expanded.*nn.Parameter\(x.clone\(\)\)",
    ),
}


@pytest.mark.filterwarnings("ignore:vmap cannot run this model")  # a spectral norm
@pytest.mark.parametrize("name", [*APART, *TIED])
def test_what_shares_memory_is_refused_and_what_does_not_overlap_is_not(name: str) -> None:
    share, message = TIED[name] if name in TIED else (APART[name], "")
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with refused:
        trainer = Trainer(Memory(share), torch.randn(12, 4))
        assert not message or name == "buffers", "before it is trained, if that shows"
        trainer.fit(alone(), 2, max_steps=1, batch_size=4, device="cpu", progress=False)


# -------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("engine", ENGINES)
def test_one_hot_in_a_rollout(engine: EngineName) -> None:
    """It looks at values only where torch does: here the number of classes is known."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4).double(), torch.randn(2, K, 5, 3).double(), torch.randint(0, 4, (2, K, 5))
    found = []
    for encode in (lambda y: F.one_hot(y, 4), lambda y: torch.eye(4)[y]):
        lr = torch.tensor(0.1, requires_grad=True, dtype=torch.float64)
        outcome = rollout(
            model, FedAvgStrategy("sgd", H=2, lr=lr), list(zip(x, y)), num_nodes=K, eval_batch=(x[0, 0], y[0, 0]),
            engine=engine, loss_fn=lambda m, batch: (m(batch[0]) - encode(batch[1])).square().mean(),  # noqa: B023
        )  # fmt: skip
        found.append((outcome.loss.detach(), *torch.autograd.grad(outcome.loss, lr)))
    torch.testing.assert_close(*found)


def test_a_class_that_one_hot_does_not_have_is_an_error_in_a_rollout() -> None:
    batch = torch.zeros(2, K, 2, 3), torch.tensor([0, 4]).view(2, 1, 1).expand(2, K, 2)  # in the second step
    with pytest.raises(RuntimeError, match=r"a class of F\.one_hot is not one of 0 to 3"):
        rollout(
            nn.Linear(3, 4), alone(), list(zip(*batch)), num_nodes=K, eval_batch=(batch[0][0, 0], batch[1][0, 0] * 0),
            engine="vmap", loss_fn=lambda m, b: (m(b[0]) - F.one_hot(b[1], 4)).square().mean(),
        )  # fmt: skip


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_batch_norm_of_one_example_says_what_to_do(batch_size: int, engine: EngineName) -> None:
    model = contract.with_loss(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), lambda m, x: m(x).square().mean())
    trainer = Trainer(model, torch.randn(10, 2))  # 5 examples a node: a batch of 4, and one of 1
    settings: dict[str, Any] = {"num_nodes": 2, "num_epochs": 1, "device": "cpu", "progress": False, "engine": engine}
    with pytest.raises(
        RuntimeError, match=r'train on one example: give batch_size >= 2; dataloader_kwargs=.*"drop_last"'
    ):
        trainer.fit(alone(), batch_size=batch_size, **settings)
    trainer.fit(alone(), batch_size=4, dataloader_kwargs={"drop_last": True}, **settings)


def test_a_loss_that_is_not_finite_is_told_with_its_cause() -> None:
    x = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
    hurt = x.clone()
    hurt[20, 0] = math.nan
    loss: Callable[..., Tensor] = lambda m, batch: m(batch).square().mean()  # noqa: E731
    cases: list[tuple[Any, Callable[..., Tensor], float, str]] = [
        (
            hurt,
            loss,
            0.1,
            "at step [0-9].*batches of this step hold NaN or infinite values, so look for these in the data",
        ),
        (
            x,
            lambda m, batch: loss(m, batch).log() * math.inf,
            0.1,
            "step 0.*No step has been taken yet, so the learning",
        ),
        (x, loss, 1e20, "at step [1-9].*Lower the learning rate"),
    ]
    for data, of, lr, message in cases:
        trainer = Trainer(nn.Linear(2, 1), data, loss_fn=of)
        with pytest.raises(DivergenceError, match=message) as caught:
            trainer.fit(alone(lr=lr), 2, num_epochs=1, batch_size=4, device="cpu", progress=False)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.in_data) == (str(caught.value), data is hurt)
