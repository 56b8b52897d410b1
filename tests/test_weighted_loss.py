"""A loss that is a mean over tokens and says over how many: `{"loss": mean, "weight": number of tokens}`."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vecgym import Trainer, estimate_memory, rollout, sweep
from vecgym.core.errors import VecgymWarning
from vecgym.data import Batches
from vecgym.engine import Engine
from vecgym.engine.contract import with_loss
from vecgym.strategy import AllReduceStrategy, Compressed, Exchange, FedAvgStrategy, Mean, Strategy

K, N, LENGTH, VOCABULARY = 3, 48, 9, 5


def tokens(empty: tuple[int, ...] = ()) -> TensorDataset:
    """Answers of unlike length; the examples `empty` have none."""
    ids = torch.randint(VOCABULARY, (N, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    for i in range(N):
        labels[i, 1 + 7 * i % (LENGTH - 1) :] = -100
    labels[list(empty)] = -100
    return TensorDataset(ids, labels)


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))
        self.double()


def of_torch(module: nn.Module, batch: Any) -> dict[str, Any]:
    ids, labels = batch
    return {"loss": F.cross_entropy(module(ids).flatten(0, 1), labels.flatten()), "weight": (labels != -100).sum()}


def divided(module: nn.Module, batch: Any) -> dict[str, Any]:
    """Its gradient over nothing is nan, too; the weight is of a floating-point type."""
    ids, labels = batch
    losses = F.cross_entropy(module(ids).flatten(0, 1), labels.flatten(), reduction="none")
    count = (labels != -100).double().sum()
    return {"loss": losses.sum() / count, "weight": count}


LOSSES: dict[str, Callable[..., Any]] = {"torch's mean": of_torch, "a division": divided}


def mean_loss(module: nn.Module, data: TensorDataset, rows: Any) -> Tensor:
    """In plain torch; 0 of no token."""
    ids, labels = data[rows]
    total = F.cross_entropy(module(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    return total / max(1, int((labels != -100).sum()))


def number(loss: Tensor) -> float:
    return float(loss.detach())


def ddp_step(data: TensorDataset, batch_size: int, lr: float) -> nn.Module:
    """The first step of data-parallel training in plain torch: the mean of the nodes' mean losses."""
    net = Net()
    nodes = [list(range(node, K * batch_size, K)) for node in range(K)]
    sum((mean_loss(net, data, rows) for rows in nodes), torch.zeros(())).div(K).backward()
    with torch.no_grad():
        for p in net.parameters():
            assert p.grad is not None
            p.sub_(lr * p.grad)
    return net


def fitted(
    strategy: Strategy, data: Any, loss: Any = of_torch, val: Any = None, **settings: Any
) -> tuple[Trainer, nn.Module]:
    given: dict[str, Any] = {
        "max_steps": 1,
        "batch_size": 8,
        "shuffle": False,
        "progress": False,
        "device": "cpu",
    } | settings
    trainer = Trainer(Net(), data, val, loss_fn=loss)
    return trainer, trainer.fit(strategy, given.pop("num_nodes", K), **given)


def close(a: nn.Module, b: nn.Module) -> None:
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("empty", [(), (0, 5), tuple(range(0, N, K))], ids=["all", "some examples", "a node"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("make", [AllReduceStrategy, FedAvgStrategy])
def test_accumulation_is_the_mean_over_the_tokens_of_the_batch(make: Any, engine: str, loss: str, empty: Any) -> None:
    """Of each node; examples, parts and nodes without a token count for nothing."""
    data = tokens(empty)
    expected = ddp_step(data, 8, lr=1.0)
    for parts in (None, 2, 8):
        strategy = make("sgd", lr=1.0)
        trainer, found = fitted(strategy, data, LOSSES[loss], engine=engine, gradient_accumulation=parts)
        close(found, expected)
        rows = [list(range(node, K * 8, K)) for node in range(K)]
        losses = [number(mean_loss(Net(), data, some)) for some in rows]
        assert trainer.history["train_loss"][-1] == pytest.approx(sum(losses) / K, rel=1e-12)


@pytest.mark.parametrize(
    "settings",
    [{"chunk_size": 2}, {"node_threads": 2}, pytest.param({"compile": True}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("make", [AllReduceStrategy, FedAvgStrategy])
def test_in_chunks_in_threads_and_compiled(make: Any, settings: dict[str, Any]) -> None:
    data = tokens((0, 5))
    for parts in (None, 4):
        close(fitted(make("sgd", lr=1.0), data, gradient_accumulation=parts, **settings)[1], ddp_step(data, 8, lr=1.0))


@pytest.mark.parametrize("make", [AllReduceStrategy, FedAvgStrategy])
@pytest.mark.parametrize("size", [None, 4])
def test_written_down(make: Any, size: int | None) -> None:
    """A run that is long enough for lists of operations has the numbers of vmap."""
    found = [
        fitted(make("sgd", lr=0.5), tokens((3,)), engine=engine, max_steps=60, minibatch_size=size)
        for engine in ("auto", "vmap")
    ]
    assert found[0][0].history.settings["engine"] == "recorded"
    close(found[0][1], found[1][1])


def test_a_node_with_fewer_examples_than_a_batch() -> None:
    """The sizes of the nodes' batches differ, and so do their weights."""
    data = tokens()
    shards = [range(5), range(5, 29), range(29, N)]
    factory = lambda rank, num_nodes, train: torch.utils.data.Subset(data, shards[rank])  # noqa: E731
    found = [fitted(AllReduceStrategy("sgd", lr=1.0), factory, minibatch_size=size)[1] for size in (None, 4, 1)]
    expected = Net()
    rows = [list(some)[:8] for some in shards]
    sum((mean_loss(expected, data, some) for some in rows), torch.zeros(())).div(K).backward()
    with torch.no_grad():
        for p in expected.parameters():
            assert p.grad is not None
            p.sub_(p.grad)
    for net in found:
        close(net, expected)


class Metrics(Net):
    """A model with metrics of its own; `loss_fn` is not given."""

    def forward(self, batch: Any) -> Tensor:
        ids, labels = batch
        return F.cross_entropy(super().forward(ids).flatten(0, 1), labels.flatten())

    def val_metrics(self, batch: Any) -> dict[str, Any]:
        return {"loss": self(batch), "weight": int((batch[1] != -100).sum())} | accuracy(super().forward, batch)


def accuracy(net: Any, batch: Any) -> dict[str, Tensor]:
    kept = batch[1] != -100
    right = (net(batch[0]).argmax(-1) == batch[1]) & kept
    return {"accuracy": right.double().sum() / kept.sum()}


def with_accuracy(module: nn.Module, batch: Any) -> dict[str, Any]:
    return of_torch(module, batch) | accuracy(module, batch)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("empty", [(), (0, 1, 2, 3, 17)], ids=["all", "some examples"])
def test_a_validation_loss_is_the_mean_over_the_tokens(empty: Any, engine: str) -> None:
    """The loss is the same for each batch size; and so is every metric. The weight is no metric."""
    data = tokens(empty)
    for batch_size in (2, 16):
        settings = {"batch_size": batch_size, "engine": engine, "max_steps": 3}
        trainer, net = fitted(FedAvgStrategy("sgd", H=2, lr=0.1), data, with_accuracy, data, **settings)
        columns = trainer.history
        assert columns.last("val_loss") == pytest.approx(number(mean_loss(net, data, range(N))), rel=1e-12)
        assert columns.last("val_accuracy") == pytest.approx(float(accuracy(net, data[:])["accuracy"]), rel=1e-12)
        of_nodes = [number(mean_loss(trainer.nodes.module(node), data, range(N))) for node in range(K)]
        assert list(columns.last("val_losses")) == pytest.approx(of_nodes, rel=1e-12)
        assert not [name for name in columns if "weight" in name]


@pytest.mark.parametrize("batch_size", [2, 16])
def test_each_node_has_its_own_validation_set(batch_size: int) -> None:
    """The run's model has the mean over all nodes' tokens."""
    data = tokens((0, 1))
    shards = [range(5), range(5, 29), range(29, N)]
    factory = lambda rank, num_nodes, train: torch.utils.data.Subset(data, shards[rank])  # noqa: E731
    trainer, net = fitted(AllReduceStrategy("sgd", lr=0.1), factory, with_accuracy, factory, batch_size=batch_size)
    assert trainer.history.last("val_loss") == pytest.approx(number(mean_loss(net, data, range(N))), rel=1e-12)
    each = [number(mean_loss(net, data, list(some))) for some in shards]
    assert list(trainer.history.last("val_loss_each")) == pytest.approx(each, rel=1e-12)


def test_a_node_without_a_token_to_be_measured_by_is_left_out() -> None:
    """Of means, quantiles and tenths over the nodes."""
    data = tokens(tuple(range(5)))
    shards = [range(5), range(5, 29), range(29, N)]
    factory = lambda rank, num_nodes, train: torch.utils.data.Subset(data, shards[rank])  # noqa: E731
    trainer, net = fitted(AllReduceStrategy("sgd", lr=0.1), factory, with_accuracy, factory)
    rows = trainer.history
    each = [number(mean_loss(net, data, list(some))) for some in shards[1:]]
    assert list(rows.last("val_loss_each")) == pytest.approx([math.nan, *each], rel=1e-12, nan_ok=True)
    assert rows.last("val_loss") == pytest.approx(number(mean_loss(net, data, range(N))), rel=1e-12)
    assert rows.last("val_loss_local") == pytest.approx(sum(each) / 2, rel=1e-12)
    assert rows.last("val_loss_lowest_tenth") == pytest.approx(min(each), rel=1e-12)
    assert rows.last("val_loss_p50") == pytest.approx(sum(each) / 2, rel=1e-12)


def test_the_models_own_metrics_may_have_a_weight() -> None:
    data = tokens()
    trainer = Trainer(Metrics(), data, data)
    trainer.fit(
        AllReduceStrategy("sgd", lr=0.1), 1, max_steps=1, batch_size=4, progress=False, device="cpu", engine="loop"
    )
    plain = Net()
    plain.load_state_dict(trainer.nodes.module(0).state_dict())
    assert trainer.history.last("val_loss") == pytest.approx(number(mean_loss(plain, data, range(N))), rel=1e-12)


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_processes(exact: bool) -> None:
    data = tokens((0, 1))
    settings: dict[str, Any] = {"num_nodes": 4, "max_steps": 3, "gradient_accumulation": 4, "exact": exact}
    for make in (AllReduceStrategy, FedAvgStrategy):
        (here, net), (there, other) = (
            fitted(make("sgd", lr=0.5), data, of_torch, data, backend=backend, num_processes=W, **settings)
            for backend, W in (("stacked", None), ("processes", 2))
        )
        close(net, other)
        assert here.history.last("val_loss") == pytest.approx(there.history.last("val_loss"), rel=1e-12)


def test_a_sweep_and_a_resumed_run(tmp_path: Any) -> None:
    data, strategy = tokens((0, 1)), FedAvgStrategy("sgd", H=2, lr=0.5)
    settings: dict[str, Any] = {
        "max_steps": 4,
        "batch_size": 8,
        "minibatch_size": 2,
        "progress": False,
        "device": "cpu",
    }
    result = sweep(
        Net(), data, data, strategy=lambda lr: FedAvgStrategy("sgd", H=2, lr=lr), grid={"lr": [0.5, 0.1]}, num_nodes=K,
        loss_fn=of_torch, **settings,
    )  # fmt: skip
    whole = Trainer(Net(), data, data, loss_fn=of_torch)
    whole.fit(strategy, K, **settings)
    assert result.history(0).last("val_loss") == pytest.approx(whole.history.last("val_loss"), rel=1e-12)
    for steps, resume in ((2, False), (4, True)):
        trainer = Trainer(Net(), data, data, loss_fn=of_torch)
        trainer.fit(strategy, K, **settings | {"max_steps": steps}, save_dir=tmp_path, resume=resume)
    assert trainer.history.last("val_loss") == whole.history.last("val_loss")


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_differentiable_gradients_are_weighted(engine: str) -> None:
    """Second derivatives, too, against those of the whole batch."""
    data = tokens((0, 5))
    ids, labels = data[: 2 * 8]
    batch = ids.view(2, 8, LENGTH), labels.view(2, 8, LENGTH)
    model = with_loss(Net(), of_torch)
    results = []
    for size in (None, 2):
        worker = Engine(model, engine=engine)
        worker.prepare(batch, num_passes=0)
        params = {n: p.detach()[None].expand(2, *p.shape).clone().requires_grad_() for n, p in worker.params.items()}
        local = worker.gradients(params, {}, batch, seed=0, step=0, minibatch_size=size, differentiable=True)
        assert not local.buffers
        norm = sum(g.square().sum() for g in local.grads.values()) + local.losses.sum()
        results.append([local.losses, *local.grads.values(), *torch.autograd.grad(norm, list(params.values()))])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_a_rollout_is_the_run() -> None:
    data = tokens()
    ids, labels = data[: K * 8 * 2]
    batches = [(ids[i].view(K, 8, LENGTH), labels[i].view(K, 8, LENGTH)) for i in (slice(0, 24), slice(24, 48))]
    strategy = FedAvgStrategy("sgd", H=2, lr=0.5)
    outcome = rollout(Net(), strategy, batches, num_nodes=K, eval_batch=data[:], loss_fn=of_torch)
    net = Net()
    net.load_state_dict({name: x[0].detach() for name, x in outcome.params.items()})
    assert float(outcome.loss) == pytest.approx(number(mean_loss(net, data, range(N))), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_parts_in_half_precision_are_summed_in_float32(engine: str, dtype: torch.dtype) -> None:
    """The gradient of eleven equal parts, and of eleven equal nodes, is that of one."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(0.3, 2.0, 50).to(dtype))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w.float() * x.float()).square().mean()

    x = torch.linspace(0.5, 3.0, 50).expand(11, 11, 50).clone()
    worker = Engine(Line(), engine=engine)
    params = {"w": worker.params["w"].detach()[None]}
    (expected,) = worker.gradients(params, {}, x[:1, :1], seed=0, step=0).grads.values()
    for size, mean in ((1, False), (2, True), (None, True)):
        (found,) = worker.gradients(params, {}, x, seed=0, step=0, minibatch_size=size, mean=mean).grads.values()
        assert found.dtype == dtype
        assert torch.equal(found, expected.expand_as(found)), (size, mean)


def test_node_threads_write_their_weights_while_others_compute() -> None:
    def slow(module: nn.Module, batch: Any) -> dict[str, Any]:
        time.sleep(0.02 * float(batch[0].sum() % 3))  # the threads end one after the other
        return of_torch(module, batch)

    trained = [
        fitted(FedAvgStrategy("sgd", lr=0.5), tokens(), slow, engine="loop", node_threads=n, max_steps=3)[1]
        for n in (1, 2)
    ]
    close(*trained)


# -------------------------------------------------------------------------------------------- of the nodes


WEIGHTINGS: dict[str, dict[str, Any]] = {
    "a mean": {}, "a server's": {"participation": 0.99}, "islands": {"island_size": 2}, "some": {"participation": 0.67},
}  # fmt: skip


ON_PROCESSES = {"backend": "processes", "num_processes": K}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("settings", [{}, {"minibatch_size": 2}, {"engine": "loop"}, ON_PROCESSES], ids=str)
def test_gradients_are_averaged_by_the_tokens_of_the_step(loss: Any, settings: dict[str, Any]) -> None:
    """The step of the mean over all tokens of all nodes, in plain torch; a node has none."""
    data = tokens(empty=tuple(range(0, N, K)))
    strategy = AllReduceStrategy("sgd", lr=0.5, weighting="examples")
    model = Trainer(Net(), data, loss_fn=loss).fit(
        strategy, K, batch_size=8, max_steps=4, device="cpu", progress=False, **settings
    )
    expected, batches = Net(), Batches(data, K, 8, seed=42)
    for step in range(4):
        found = of_torch(expected, [x.flatten(0, 1) for x in batches.batch(step)])
        expected.zero_grad()
        found["loss"].backward()
        with torch.no_grad():
            for p in expected.parameters():
                p.sub_(p.grad, alpha=0.5)  # type: ignore[arg-type]
    for a, b in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_islands_sweeps_and_codes_of_gradients_by_tokens() -> None:
    settings: dict[str, Any] = {"num_nodes": K, "batch_size": 8, "device": "cpu", "progress": False, "max_steps": 3}

    def made(lr: float, **how: Any) -> Strategy:
        return Strategy("sgd", [Exchange(Mean(weighting="examples", **how), of="gradients")], lr=lr)

    of_one: list[Any] = [Trainer(Net(), tokens(), loss_fn=of_torch) for _ in range(2)]
    whole, _ = (trainer.fit(made(0.5, island_size=n), **settings) for trainer, n in zip(of_one, (None, 1)))
    swept = sweep(Net(), tokens(), strategy=lambda lr: made(lr), grid={"lr": [0.1, 0.5]}, loss_fn=of_torch,
                  keep_models=True, **settings)  # fmt: skip
    close(swept.model(1), whole)
    local = Trainer(Net(), tokens(), loss_fn=of_torch)
    local.fit(Strategy("sgd", lr=0.5), **settings)
    for name, p in local.nodes.params.items():  # an island of one node
        torch.testing.assert_close(of_one[1].nodes.params[name], p, rtol=0, atol=1e-14)
    coded = Strategy("sgd", [Exchange(Compressed(Mean(weighting="examples"), "int8"), of="gradients")], lr=0.5)
    with pytest.raises(ValueError, match="gradients that are not compressed"):
        Trainer(Net(), tokens(), loss_fn=of_torch).fit(coded, **settings)


@pytest.mark.parametrize("settings", WEIGHTINGS.values(), ids=WEIGHTINGS)
def test_nodes_are_averaged_by_numbers_such_as_their_tokens(settings: dict[str, Any]) -> None:
    """Averages by the numbers of examples are the same, if these are given."""
    data, sizes = tokens(), [7, 24, 17]
    shards = [range(7), range(7, 31), range(31, N)]
    factory = lambda rank, num_nodes, train: torch.utils.data.Subset(data, shards[rank])  # noqa: E731
    found = []
    given: list[Any] = ["examples", sizes, torch.tensor(sizes), "equal"]
    for weighting in given:
        strategy = FedAvgStrategy("sgd", H=2, lr=0.5, weighting=weighting, **settings)
        found.append(fitted(strategy, factory, max_steps=4, batch_size=7)[1])
    close(found[0], found[1])
    close(found[0], found[2])
    with pytest.raises(AssertionError):
        close(found[0], found[3])


def test_a_sweep_of_weightings_and_processes() -> None:
    data = tokens()
    weightings: list[Any] = [(1.0, 2.0, 3.0, 4.0), "equal", (4.0, 3.0, 2.0, 1.0)]
    settings: dict[str, Any] = {"num_nodes": 4, "max_steps": 4, "batch_size": 4, "progress": False, "device": "cpu"}
    result = sweep(
        Net(), data, data, strategy=lambda weighting: FedAvgStrategy("sgd", H=2, lr=0.5, weighting=weighting),
        grid={"weighting": weightings}, loss_fn=of_torch, **settings,
    )  # fmt: skip
    for i, weighting in enumerate(weightings):
        trainer = Trainer(Net(), data, data, loss_fn=of_torch)
        processes: dict[str, Any] = {"backend": "processes", "num_processes": 2} if i == 0 else {}
        trainer.fit(FedAvgStrategy("sgd", H=2, lr=0.5, weighting=weighting), **settings, **processes)
        assert result.history(i).last("val_loss") == pytest.approx(trainer.history.last("val_loss"), rel=1e-12)


@pytest.mark.parametrize(
    ("weighting", "message"),
    [
        ("tokens", "weighting='tokens' is not known. Allowed: 'equal', 'examples', a list of a number > 0"),
        ([1.0, 0.0, 2.0], r"weighting\[1\]=0.0 must be a number > 0"),
        ([1.0, 2.0], "weighting has numbers for 2 nodes and the run has 3: give one for each"),
    ],
)  # fmt: skip
def test_what_is_no_weighting_is_refused(weighting: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(FedAvgStrategy("sgd", lr=0.1, weighting=weighting), tokens())


# --------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda labels: (labels != -100).sum(1), r'returned int64 \[8\] as \'weight\''),
        (lambda labels: "many", r'returned a str as \'weight\''),
        (lambda labels: torch.tensor(1j), r'returned complex64 \[\] as \'weight\''),
        (lambda labels: torch.tensor(-2), r'the "weight" of the loss is -2.0: it is the number of tokens'),
        (lambda labels: torch.tensor(math.nan), r'the "weight" of the loss is nan'),
    ],
)  # fmt: skip
def test_what_is_no_weight_is_refused(weight: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(FedAvgStrategy("sgd", lr=0.1), tokens(), lambda m, b: of_torch(m, b) | {"weight": weight(b[1])})


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_a_weight_in_some_passes_only_is_refused(engine: str) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        given = of_torch(module, batch)
        return given if len(batch[0]) > 1 else given["loss"]

    with pytest.raises(ValueError, match='had a "weight" in the first pass, and has none here'):
        fitted(FedAvgStrategy("sgd", lr=0.1), tokens(), loss, engine=engine, minibatch_size=1)


def test_a_number_is_a_weight() -> None:
    """Such as how many examples there are, which is what counts without one."""
    data = tokens()
    loss = lambda m, b: {"loss": of_torch(m, b)["loss"], "weight": len(b[0])}  # noqa: E731
    for engine in ("vmap", "loop"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = fitted(FedAvgStrategy("sgd", lr=1.0), data, lambda m, b: loss(m, b)["loss"], minibatch_size=2)
        close(fitted(FedAvgStrategy("sgd", lr=1.0), data, loss, minibatch_size=2, engine=engine)[1], plain[1])


PARTS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation": 4}, "minibatches": {"minibatch_size": 2},
}  # fmt: skip


@pytest.mark.parametrize("settings", PARTS.values(), ids=PARTS)
def test_ignored_labels_in_parts_of_a_batch_without_a_weight_are_warned_of(settings: dict[str, Any]) -> None:
    data, strategy = tokens(), FedAvgStrategy("sgd", lr=0.1)
    fix = r"return how many there are, \{\"loss\": loss, \"weight\": \(batch\[1\] != -100\).sum\(\)\}"
    with pytest.warns(VecgymWarning, match=fix):
        fitted(strategy, data, lambda m, b: of_torch(m, b)["loss"], **settings)
    with pytest.warns(VecgymWarning, match=fix):
        sweep(
            Net(), data, strategy=strategy, grid={"seed": [0]}, num_nodes=2, max_steps=1,
            loss_fn=lambda m, b: of_torch(m, b)["loss"], batch_size=8, minibatch_size=2, progress=False, device="cpu",
        )  # fmt: skip
    fitted(strategy, data, of_torch, **settings)  # without a warning, and so is this:
    fitted(strategy, data, lambda m, b: of_torch(m, b)["loss"])


def test_a_batch_that_a_memory_limit_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vecgym.runs.run.fitting_sizes", lambda *given: (None, 2, {}))
    data, strategy = tokens(), AllReduceStrategy("sgd", lr=1.0)
    close(fitted(strategy, data, of_torch, max_memory_usage=0.5)[1], ddp_step(data, 8, lr=1.0))
    with pytest.warns(VecgymWarning, match="in parts of 2 examples"):
        fitted(strategy, data, lambda m, b: of_torch(m, b)["loss"], max_memory_usage=0.5)


def test_the_weight_of_a_part_is_known_afterwards_so_that_gradients_of_nodes_are_added_up() -> None:
    """The estimate of a batch in parts counts them, also where one gradient of the mean loss is enough otherwise."""
    net = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY))
    bytes_of = {}
    for name, loss in {"weighted": of_torch, "plain": lambda m, b: of_torch(m, b)["loss"]}.items():
        for size in (None, 2):
            estimate = estimate_memory(
                net, AllReduceStrategy("sgd", lr=0.1), 8, 4, tokens()[:4], loss_fn=loss, minibatch_size=size
            )
            bytes_of[name, size] = estimate.parts["exchange"].total_bytes
    assert bytes_of["weighted", 2] - bytes_of["plain", 2] == 4 * 7 * sum(p.nbytes for p in net.parameters())
    assert bytes_of["weighted", None] == bytes_of["plain", None]
