"""Scripts written for EXO Gym: names, options, the translation to vecgym's strategies, and its exact timing."""

from __future__ import annotations

import csv
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import vecgym
from tests.fitting import dataset
from tests.models import make_model
from tests.reference.exogym import exogym as twin
from vecgym import VecgymWarning, cli
from vecgym import strategy as native
from vecgym.compat import exogym as compat
from vecgym.compat.exogym import (
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    CommunicationModule,
    DeMoStrategy,
    DiLoCoCommunicator,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SparseCommunicator,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
    Trainer,
    all_reduce,
    modules,
)
from vecgym.compat.exogym.strategies import PartitionedIndexSelector, ShuffledSequentialIndexSelector
from vecgym.compat.exogym.vectorised import PerRank, vectorised
from vecgym.optim.schedule import lambda_cosine

ADAMW = OptimSpec(torch.optim.AdamW, lr=1e-2)
SGD = OptimSpec(torch.optim.SGD, lr=0.1)
OUTER = OptimSpec(torch.optim.SGD, lr=0.5, momentum=0.8, nesterov=True)
SCHEDULE: dict[str, Any] = {
    "lr_scheduler": "lambda_cosine",
    "lr_scheduler_kwargs": {"warmup_steps": 3, "cosine_anneal": True},
}
QUIET: dict[str, Any] = {"disable_logging": True, "device": "cpu"}
STEPS = 11


@pytest.fixture
def exogym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import exogym` finds vecgym; files go to a directory of the test's own."""
    monkeypatch.chdir(tmp_path)
    compat.install()
    yield
    compat.uninstall()


def trainer(strict: bool = False, model: nn.Module | None = None, dtype: torch.dtype = torch.float64) -> Trainer:
    model = make_model("MLP", dtype=dtype) if model is None else model
    return Trainer(model, dataset("MLP", 44, dtype=dtype), dataset("MLP", 8, 1, dtype), strict_timing=strict)


def fit(strategy: Strategy, num_nodes: int = 3, strict: bool = False, **options: Any) -> Trainer:
    made = trainer(strict)
    settings: dict[str, Any] = {"max_steps": STEPS, "batch_size": 4, "val_size": 0, **QUIET, **options}
    made.fit(1, strategy, num_nodes, **settings)
    return made


def params(made: Any) -> Tensor:
    """[K, P]"""
    return torch.cat([p.flatten(1) for p in made.nodes.params.values()], 1)


# --------------------------------------------------------------------------------------------------- strict timing

KINDS: dict[str, Callable[[], Strategy]] = {
    "allreduce": lambda: SimpleReduceStrategy(ADAMW, max_norm=0.5, **SCHEDULE),
    "fedavg": lambda: FedAvgStrategy(optim_spec=ADAMW, H=3, max_norm=0.5, **SCHEDULE),
    "diloco": lambda: DiLoCoStrategy(ADAMW, H=3, max_norm=0.5, **SCHEDULE),
}


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_strict_timing_equals_a_loop_over_the_nodes(kind: str, num_nodes: int) -> None:
    made = fit(KINDS[kind](), num_nodes, strict=True)
    expected = twin(
        make_model("MLP", dtype=torch.float64), dataset("MLP", 44, dtype=torch.float64), num_nodes, kind,
        inner=(torch.optim.AdamW, {"lr": 1e-2}), steps=STEPS, batch_size=4, H=3, max_norm=0.5,
        schedule=lambda_cosine(STEPS, 3, True),
    )  # fmt: skip
    rows = torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in expected.models])
    torch.testing.assert_close(params(made), rows, rtol=1e-10, atol=1e-12)
    losses = torch.tensor(made.history.node_array())
    torch.testing.assert_close(losses, expected.losses, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["fedavg", "diloco"])
def test_without_it_the_nodes_exchange_after_every_h_steps(kind: str) -> None:
    steps = {strict: fit(KINDS[kind](), 2, strict).ledger for strict in (False, True)}
    assert sorted({entry.step for entry in steps[False]}) == [2, 5, 8]
    assert sorted({entry.step for entry in steps[True]}) == [3, 6, 9]


class Probe(nn.Module):
    """Writes down what each forward pass draws, and in which mode."""

    seen: list[tuple[float, bool]]

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.seen = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((float(torch.rand(())), self.training))
        return (self.w - x).square().mean()

    def __deepcopy__(self, memo: Any) -> Probe:
        new = Probe()
        new.w, new.seen = nn.Parameter(self.w.detach().clone()), self.seen if self.seen is SHARED else []
        COPIES.append(new)
        return new


SHARED: list[Any] = []
COPIES: list[Probe] = []


def test_strict_random_numbers_are_those_of_processes_seeded_alike() -> None:
    COPIES.clear()
    made = Trainer(Probe(), torch.arange(12.0), None, strict_timing=True)
    before = torch.get_rng_state()
    made.fit(1, SimpleReduceStrategy(SGD), 2, max_steps=3, batch_size=2, seed=5, **QUIET)
    assert torch.equal(torch.get_rng_state(), before)
    # A process: seeded, it draws the seed of its DataLoader's workers, then what the model draws.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        torch.empty((), dtype=torch.int64).random_()
        expected = [(float(torch.rand(())), True) for _ in range(3)]
    drawn = [copy.seen for copy in COPIES if copy.seen]
    assert drawn == [expected, expected]


def test_strict_node_0_stays_in_eval_mode_after_the_first_evaluation() -> None:
    COPIES.clear()
    data = torch.arange(12.0)
    Trainer(Probe(), data, data, strict_timing=True).fit(
        1, SimpleReduceStrategy(SGD), 3, max_steps=2, batch_size=2, val_size=2, val_interval=9, **QUIET
    )
    modes = [[training for _, training in copy.seen] for copy in COPIES if copy.seen]
    # Node 0: evaluation, two steps, evaluation; a copy of the average on node 1, at the start and at the end.
    assert sorted(modes) == [[False], [False], [False] * 4, [True] * 2, [True] * 2]


def test_strict_data_of_a_factory_and_minibatches() -> None:
    drawn: list[tuple[int, int, bool]] = []

    def factory(rank: int, num_nodes: int, train_dataset: bool) -> Any:
        drawn.append((rank, num_nodes, train_dataset))
        return torch.utils.data.Subset(dataset("MLP", 24), range(rank, 24, num_nodes))

    made = Trainer(make_model("MLP"), factory, factory, strict_timing=True)
    made.fit(
        2, FedAvgStrategy(optim_spec=SGD), 2, batch_size=4, minibatch_size=2, val_size=4, val_interval=3,
        correlation_interval=1, autocast=True, **QUIET,
    )  # fmt: skip
    assert drawn == [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]
    assert made.history.series("val_loss")[0] == [0, 3, 6]
    assert made.history.last("step") == 6  # 2 epochs of 12 examples a node
    correlations = made.history.series("correlation")[1]  # the first step is not followed by an exchange
    assert 0.9 < correlations[0] < 1 - 1e-6
    assert correlations[1:] == pytest.approx([1.0] * 5)


def test_strict_ignores_what_exo_gym_ignores_and_says_so() -> None:
    with pytest.warns(VecgymWarning, match=r"inner_optim=OptimSpec\(SGD, lr=0.1\): it trains with OptimSpec\(AdamW\)"):
        strict = fit(FedAvgStrategy(inner_optim=SGD, H=2), strict=True)
    assert strict.history["lr"] == [1e-3] * STEPS
    assert fit(FedAvgStrategy(inner_optim=SGD, H=2)).history["lr"] == [0.1] * STEPS
    ignoring = {
        "async_sparta_delay=2": SPARTAStrategy(SGD, async_sparta_delay=2),
        "sparta_interval=2": SPARTADiLoCoStrategy(SGD, sparta_interval=2),
        "learning rate 0.1": DeMoStrategy(optim_spec=SGD),
        "outer_lr=0.5": DiLoCoStrategy(SGD, outer_lr=0.5),
        "'sgd' as the outer optimizer": DiLoCoStrategy(SGD, "sgd"),
    }
    for text, strategy in ignoring.items():
        with pytest.warns(VecgymWarning, match=text):
            fit(strategy, strict=True, max_steps=1)


def test_strict_needs_a_whole_batch_to_evaluate() -> None:
    with pytest.raises(ValueError, match="val_size=3 is less than batch_size=4"):
        fit(SimpleReduceStrategy(SGD), strict=True, val_size=3)


def test_strict_demo_is_demo() -> None:
    """In EXO Gym's arithmetic: the signs are those of vecgym's where what is decoded is no rounding error."""
    strategy = DeMoStrategy(compression_topk=8, compression_chunk=8, weight_decay=0.1)
    settings: dict[str, Any] = {"max_steps": 4, "shuffle": False, "batch_size": 22, "num_nodes": 2}
    strict, whole = params(fit(strategy, strict=True, **settings)), params(fit(strategy, **settings))
    assert (strict - whole).abs().gt(1e-9).double().mean() < 0.01
    assert (strict - params(fit(strategy, **{**settings, "max_steps": 3}))).abs().gt(1e-9).all()
    images = Trainer(make_model("CNN"), dataset("CNN"), None, strict_timing=True)
    with pytest.raises(RuntimeError, match="more than two dimensions"):
        images.fit(1, DeMoStrategy(), 2, max_steps=1, **QUIET)


def test_strict_run_ends_whole_after_an_interrupt() -> None:
    class Interrupts(SimpleReduceStrategy):
        def step(self) -> None:
            super().step()
            if self.rank == 1 and self.local_step == 4:
                os.kill(os.getpid(), signal.SIGINT)

    made = trainer(strict=True)
    with pytest.raises(KeyboardInterrupt):
        made.fit(1, Interrupts(SGD), 2, max_steps=10**6, val_size=0, **QUIET)
    assert made.history.last("step") >= 4
    assert params(made).shape[0] == 2


# --------------------------------------------------------------------------- EXO Gym's strategies become vecgym's

TRANSLATED: list[tuple[Strategy, native.Strategy]] = [
    (
        SimpleReduceStrategy(ADAMW, max_norm=1.0, **SCHEDULE),
        native.AllReduceStrategy(ADAMW, max_norm=1.0, lr_scheduler="lambda_cosine", warmup_steps=3, cosine_anneal=True),
    ),
    (SimpleReduceStrategy("sgd"), native.AllReduceStrategy("sgd")),
    (FedAvgStrategy(inner_optim=SGD, H=5, island_size=2), native.FedAvgStrategy(SGD, 5, 2)),
    (FedAvgStrategy(inner_optim_spec=SGD, H=5, island_size=4), native.FedAvgStrategy(SGD, 5)),
    (DiLoCoStrategy(ADAMW, OUTER, H=7), native.DiLoCoStrategy(ADAMW, OUTER, 7)),
    (
        DiLoCoStrategy(inner_optim="adamw", outer_optim="sgd", H=100, lr=3e-4),
        native.DiLoCoStrategy("adamw", "sgd", 100, lr=3e-4),
    ),
    (
        SPARTAStrategy(ADAMW, p_sparta=0.1, async_sparta_delay=3),
        native.SPARTAStrategy(0.1, ADAMW, delay=3),
    ),
    (
        SPARTADiLoCoStrategy(ADAMW, OUTER, 0.1, 2, 7),
        native.SPARTADiLoCoStrategy(0.1, 2, 7, ADAMW, OUTER),
    ),
    (
        DeMoStrategy(0.9, 8, 16, 0.1, optim_spec=ADAMW, max_norm=1.0),
        native.DeMoStrategy(0.9, 8, 16, 0.1, lr=1e-2, max_norm=1.0),
    ),
    (
        CommunicateOptimizeStrategy(
            communication_modules=[SparseCommunicator(sparsification_rate=0.01), AveragingCommunicator(island_size=2)],
            inner_optim="adamw",
        ),
        native.CommunicateOptimizeStrategy([native.SparseCommunicator(0.01), native.AveragingCommunicator(2)], "adamw"),
    ),
    (
        CommunicateOptimizeStrategy([SparseCommunicator(PartitionedIndexSelector(0.5)), DiLoCoCommunicator(H=3)]),
        native.CommunicateOptimizeStrategy(
            [native.SparseCommunicator(native.PartitionedSelector(0.5)), native.DiLoCoCommunicator(H=3)]
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), TRANSLATED, ids=lambda s: type(s).__name__)
def test_vectorised(theirs: Strategy, ours: native.Strategy) -> None:
    found = vectorised(theirs, num_nodes=4, max_steps=20)
    assert repr(found).replace("lr=None", "") == repr(ours)


def test_a_run_of_it_is_vecgyms_own() -> None:
    made = fit(KINDS["diloco"](), 4)
    ours = vecgym.Trainer(make_model("MLP", dtype=torch.float64), dataset("MLP", 44, dtype=torch.float64))
    strategy = native.DiLoCoStrategy(
        ADAMW, H=3, max_norm=0.5, lr_scheduler="lambda_cosine", warmup_steps=3, cosine_anneal=True
    )
    ours.fit(strategy, 4, max_steps=STEPS, batch_size=4, device="cpu", progress=False)
    assert torch.equal(params(made), params(ours))


@pytest.mark.parametrize(
    "make",
    [
        lambda own: own(SimpleReduceStrategy)(ADAMW, max_norm=0.5, **SCHEDULE),
        lambda own: own(FedAvgStrategy)(optim_spec=ADAMW, H=3, **SCHEDULE),
        lambda own: own(DiLoCoStrategy)(ADAMW, H=3, **SCHEDULE),
        lambda own: own(DeMoStrategy)(compression_topk=64, compression_chunk=8, weight_decay=0.1, optim_spec=ADAMW),
        lambda own: own(SimpleReduceStrategy)(
            ADAMW, lr_scheduler=torch.optim.lr_scheduler.ExponentialLR, lr_scheduler_kwargs={"gamma": 0.9}
        ),
    ],
    ids=["allreduce", "fedavg", "diloco", "demo", "a scheduler of torch"],
)
def test_rank_by_rank_is_the_same(make: Callable[[Any], Strategy]) -> None:
    """A subclass with code of its own runs rank by rank, and the base classes then do what vecgym's do."""

    def own(base: type) -> type:
        return type("Own", (base,), {"step": lambda self: base.step(self)})  # type: ignore[attr-defined]

    strategy = make(own)
    assert isinstance(vectorised(strategy, 3, STEPS), PerRank)
    plain = make(lambda base: base)
    if isinstance(plain.lr_scheduler, type):
        expected = fit(SimpleReduceStrategy(ADAMW), max_steps=1)
        assert fit(strategy, max_steps=3).history["lr"] == pytest.approx([0.01, 0.009, 0.0081])
        torch.testing.assert_close(params(fit(strategy, max_steps=1)), params(expected), rtol=1e-9, atol=1e-11)
    else:
        assert not isinstance(vectorised(plain, 3, STEPS), PerRank)
        torch.testing.assert_close(params(fit(strategy)), params(fit(plain)), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("cls", [ShuffledSequentialIndexSelector, PartitionedIndexSelector])
def test_selectors_take_every_coordinate_in_turn(cls: Any) -> None:
    param, selector = nn.Parameter(torch.zeros(5, 5)), cls(0.25)
    for cycle in range(2):
        masks = [selector.get_indices(param, 4 * cycle + i) for i in range(4)]
        assert torch.equal(torch.stack(masks).sum(0), torch.ones(5, 5, dtype=torch.long))


def test_sparta_rank_by_rank_averages_the_mask_of_node_0() -> None:
    class Own(SPARTAStrategy):
        def step(self) -> None:
            super().step()

    sparse = fit(Own(SGD, p_sparta=0.5), max_steps=1)
    same = (params(sparse) == params(sparse)[:1]).all(0).double().mean()
    assert 0.4 < float(same) < 0.6
    assert torch.equal(params(fit(Own(SGD, p_sparta=0.5), max_steps=1)), params(sparse))  # reproducible
    masks = [e for e in sparse.ledger if e.operation == "broadcast"]
    assert sum(e.payload_bytes for e in masks) == params(sparse).shape[1]  # a byte for each parameter, as there


def test_a_schedule_that_ends_early() -> None:
    scheduler: dict[str, Any] = {"lr_scheduler": "cosine", "lr_scheduler_kwargs": {"warmup_steps": 0, "max_steps": 4}}
    rates = fit(SimpleReduceStrategy(SGD, **scheduler)).history["lr"]
    assert rates[4:] == pytest.approx([0.01] * (STEPS - 4))
    again = fit(SimpleReduceStrategy(SGD, **scheduler), strict=True).history["lr"]
    assert again[:5] == pytest.approx(rates[:5])
    assert again[8] == pytest.approx(0.1)  # there it rises again


# -------------------------------------------------------------------------------------------- a user's own classes


def test_a_users_strategy() -> None:
    class Mine(Strategy):
        def __init__(self, optim_spec: Any = None, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.optim_spec = optim_spec

        def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
            super()._init_node(model, rank, num_nodes)
            self._setup_scheduler()

        def step(self) -> None:
            assert self.flavour == "plain"  # type: ignore[attr-defined]
            if self.rank == 0:
                assert self.max_steps == STEPS
            for p in self.model.parameters():
                if p.grad is not None:
                    all_reduce(p.grad)
                    p.grad.div_(self.num_nodes)
            self.optim.step()
            super().step()

    for strict in (False, True):
        mine = fit(Mine(ADAMW, flavour="plain", **SCHEDULE), strict=strict)
        torch.testing.assert_close(
            params(mine), params(fit(SimpleReduceStrategy(ADAMW, **SCHEDULE), strict=strict)), rtol=1e-9, atol=1e-11
        )


def test_a_users_communication_module() -> None:
    class Halfway(CommunicationModule):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
            self.rank = rank

        def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
            assert rank == self.rank
            self.seen.append(local_step)
            assert self.seen == list(range(self.strategy.local_step + 1))
            for p in model.parameters():
                mean = p.data.clone()
                all_reduce(mean)
                p.data = 0.5 * (p.data + mean / num_nodes)

    class Twin(native.CommunicationModule):
        def exchange_parameters(self, params: Any, state: Any, ctx: Any) -> Any:
            mean = ctx.comm.mean(params)
            return {name: 0.5 * (p + mean[name]) for name, p in params.items()}, state

    made = fit(CommunicateOptimizeStrategy([Halfway()], SGD))
    ours = vecgym.Trainer(make_model("MLP", dtype=torch.float64), dataset("MLP", 44, dtype=torch.float64))
    ours.fit(
        native.CommunicateOptimizeStrategy([Twin()], SGD),
        3,
        max_steps=STEPS,
        batch_size=4,
        progress=False,
        device="cpu",
    )
    torch.testing.assert_close(params(made), params(ours), rtol=1e-10, atol=1e-12)


def test_a_users_zero_grad_keeps_gradients() -> None:
    class EverySecond(SimpleReduceStrategy):
        """The optimizer's step on the sum of two steps' gradients."""

        def zero_grad(self) -> None:
            if self.local_step % 2 == 0:
                super().zero_grad()

        def step(self) -> None:
            if self.local_step % 2 == 1:
                self.optim.step()
            Strategy.step(self)

    whole = fit(SimpleReduceStrategy(OptimSpec(torch.optim.SGD, lr=0.2)), 1, max_steps=2, batch_size=8, shuffle=False)
    one = fit(EverySecond(OptimSpec(torch.optim.SGD, lr=0.1)), 1, max_steps=4, shuffle=False)
    torch.testing.assert_close(params(one), params(whole), rtol=1e-10, atol=1e-12)


class CallsTorch(Strategy):
    """Talks through torch.distributed itself."""

    def __init__(self) -> None:
        super().__init__()
        self.optim_spec = SGD

    def step(self) -> None:
        assert dist.is_initialized()
        assert (dist.get_rank(), dist.get_world_size()) == (self.rank, self.num_nodes)
        own = torch.tensor([float(self.rank)])
        gathered = [torch.zeros(1) for _ in range(self.num_nodes)]
        dist.all_gather(gathered, own, async_op=True).wait()
        assert [float(x) for x in gathered] == [0.0, 1.0, 2.0]
        for op, expected in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVG, 1.0), (dist.ReduceOp.MAX, 2.0)):
            found = own.clone()
            dist.all_reduce(found, op=op)
            assert float(found) == expected
        objects = [self.rank, "x"] if self.rank == 2 else [None, None]
        dist.broadcast_object_list(objects, src=2)
        assert objects == [2, "x"]
        dist.barrier()
        super().step()


@pytest.mark.parametrize("strict", [False, True])
def test_calls_of_torch_distributed_inside_a_strategy(strict: bool) -> None:
    original = dist.all_reduce
    fit(CallsTorch(), strict=strict, max_steps=2)
    assert dist.all_reduce is original


# ---------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimpleReduceStrategy(SGD, H=20), "H=20 has no effect: this strategy exchanges at every step"),
        (lambda: SPARTAStrategy(SGD, p=0.05), "p=0.05 has no effect: .* p_sparta"),
        (lambda: DiLoCoStrategy(SGD, p=0.05), "p=0.05 has no effect"),
        (lambda: Trainer(make_model("MLP"), dataset("MLP"), None, start_port=15000), "start_port=15000 has no effect"),
        (lambda: fit(SimpleReduceStrategy(SGD), devices=[0]), "devices=.* has no effect"),
        (lambda: fit(SimpleReduceStrategy(SGD), 2, True, checkpoint_interval=5), "checkpoint_interval has no effect"),
        (lambda: fit(SimpleReduceStrategy(SGD), 2, True, gradient_accumulation=2), "EXO Gym ignores it"),
        (lambda: fit(SimpleReduceStrategy(SGD), batch_size=5, minibatch_size=2), "leave 4 examples a step"),
    ],
)
def test_an_option_without_effect_warns(make: Callable[[], Any], message: str) -> None:
    with pytest.warns(VecgymWarning, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiLoCoStrategy(SGD, h=5), "no argument 'h'; did you mean 'H'|no argument 'h'"),
        (lambda: SimpleReduceStrategy(SGD, maxnorm=1), "no argument 'maxnorm'; did you mean 'max_norm'"),
        (lambda: FedAvgStrategy(inner_optim=SGD, optim_spec=ADAMW), "twice"),
        (lambda: DiLoCoStrategy(SGD, OUTER, outer_optim="sgd"), "twice"),
        (lambda: SimpleReduceStrategy(lr_scheduler="cosine", lr_scheduler_kwargs={"warmup": 1}), "argument 'warmup'"),
        (lambda: fit(SimpleReduceStrategy(SGD), max_step=5), "no argument 'max_step'; did you mean 'max_steps'"),
        (lambda: trainer().fit(1, SimpleReduceStrategy(SGD)), "needs num_nodes"),
        (lambda: trainer().fit(1, native.AllReduceStrategy(), 2), "exogym.strategy"),  # type: ignore[arg-type]
        (lambda: CallsTorch.__mro__[1](), "abstract"),
    ],
)  # fmt: skip
def test_a_mistake_is_a_type_error(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_memory_options_of_the_documents() -> None:
    made = fit(SimpleReduceStrategy(SGD), gradient_accumulation=2, max_memory_usage=0.8)
    assert made.history.settings["minibatch_size"] == 2


def test_values_that_cannot_work() -> None:
    with pytest.raises(ValueError, match="lambda_cosine"):
        SimpleReduceStrategy(SGD, lr_scheduler="cosin")
    with pytest.raises(ValueError, match="must not be larger than batch_size=4"):
        fit(SimpleReduceStrategy(SGD), minibatch_size=8)


# ---------------------------------------------------------------------------------------------------------- logging


@pytest.mark.parametrize("strict", [False, True])
def test_tables_as_exo_gym_writes_them(strict: bool, exogym: None) -> None:
    made = trainer(strict)
    made.fit(
        num_epochs=5, strategy=FedAvgStrategy(optim_spec=SGD, H=2), num_nodes=2, max_steps=5, batch_size=4, val_size=8,
        val_interval=2, run_name="mine", kwargs={"dataset_name": "x"}, device="",
    )  # fmt: skip
    train, val = (
        list(csv.DictReader(Path("logs", "mine", name).read_text().splitlines()))
        for name in ("train.csv", "validation.csv")
    )
    assert [row["step"] for row in train] == list("01234")
    assert [row["examples_trained"] for row in train] == ["8", "16", "24", "32", "40"]
    assert [row["step"] for row in val] == list("0245")
    assert [float(row["global_loss"]) for row in val] == made.history.series("val_loss")[1]
    assert val[0]["global_loss"] == pytest.approx(val[0]["local_loss"]) or strict  # there, of other batches
    assert set(val[0]) == {"step", "local_loss", "local_perplexity", "global_loss", "global_perplexity"}
    assert '"dataset_name": "x"' in Path("logs", "mine", "config.json").read_text()


def test_checkpoints(exogym: None) -> None:
    fit(SimpleReduceStrategy(SGD), checkpoint_interval=5, save_dir="kept", run_name="mine")
    assert vecgym.load(sorted(Path("kept", "mine").iterdir())[-1]).history["step"][-1] == STEPS


def test_wandb_missing_means_tables(exogym: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(VecgymWarning, match="wandb is not installed"):
        fit(SimpleReduceStrategy(SGD), max_steps=1, disable_logging=False, wandb_project="p", run_name="r")
    assert Path("logs", "r", "train.csv").exists()


def test_what_wandb_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[int, dict[str, Any]]] = []

    class Wandb:
        def init(self, **settings: Any) -> Wandb:
            assert (settings["project"], settings["name"]) == ("p", "r")
            return self

        def log(self, row: dict[str, Any], step: int) -> None:
            logged.append((step, row))

        def finish(self) -> None:
            logged.append((-1, {}))

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    fit(
        SimpleReduceStrategy(SGD), 2, max_steps=2, disable_logging=False, wandb_project="p", run_name="r",
        log_x_axis="examples", val_size=8,
    )  # fmt: skip
    assert [step for step, _ in logged] == [0, 8, 16, 16, -1]
    assert set(logged[1][1]) == {"train_loss", "train_perplexity", "lr"}
    assert set(logged[0][1]) == {"local_loss", "local_perplexity", "global_loss", "global_perplexity"}


# ------------------------------------------------------------------------------------------------- import exogym


@pytest.mark.parametrize("path", modules.CONTENTS)
def test_every_module_of_exo_gym_is_there(path: str, exogym: None) -> None:
    module = importlib.import_module(path)
    for name in modules.CONTENTS[path]:
        assert getattr(module, name) is modules.CONTENTS[path][name]


def test_imports_as_scripts_write_them(exogym: None) -> None:
    compat.install()  # once more
    scope: dict[str, Any] = {}
    exec(
        "import exogym.strategy.diloco\nfrom exogym import LocalTrainer, TrainNode\n"
        "from exogym.strategy import *\nfrom exogym.aux.utils import get_device, LogModule, extract_config\n"
        "from exogym.logger import CSVLogger\n",
        scope,
    )
    assert scope["LocalTrainer"] is Trainer
    assert scope["exogym"].strategy.diloco.DiLoCoStrategy is DiLoCoStrategy
    assert scope["CSVLogger"] is vecgym.CSVLogger
    assert scope["get_device"]() in ("cpu", "cuda", "mps")
    with pytest.raises(ModuleNotFoundError, match=r"exogym\.strategy\.dgc"):
        exec("from exogym.strategy.dgc import DGCStrategy")
    with pytest.raises(ImportError, match="there are no processes"):
        exec("from exogym.utils import init_process_group_portsafe")
    with pytest.raises(ImportError, match="cannot import name"):
        exec("from exogym.strategy import Nothing")
    compat.uninstall()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("exogym")


def test_an_installed_exogym_is_not_hidden_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exogym").mkdir()
    (tmp_path / "exogym" / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.warns(VecgymWarning, match="is hidden"):
        compat.install()
    assert not hasattr(sys.modules["exogym"], "real")
    compat.uninstall()
    assert importlib.import_module("exogym").real
    try:
        with pytest.raises(ImportError, match="imported already"):
            compat.install()
    finally:
        del sys.modules["exogym"]


def test_strict_timing_of_install_reaches_the_trainers(exogym: None) -> None:
    compat.install(strict_timing=True)
    made = Trainer(make_model("MLP"), dataset("MLP"), None)
    made.fit(1, FedAvgStrategy(optim_spec=SGD, H=2), 2, max_steps=3, **QUIET)
    assert sorted({entry.step for entry in made.ledger}) == [2]


# -------------------------------------------------------------------------------------------------- vecgym exogym

SCRIPT = """
import sys
from exogym.trainer import Trainer
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.optim import OptimSpec
from local_package_of_the_script import Line, data

if __name__ == "__main__":
    steps = int(sys.argv[1])
    trainer = Trainer(Line(), data, data)
    trainer.fit(num_epochs=1, strategy=DiLoCoStrategy(OptimSpec(lr=0.1), H=2), num_nodes=2, max_steps=steps,
                run_name="run", val_size=2, batch_size=2)
    print("steps with an exchange:", sorted({entry.step for entry in trainer.ledger}))
    if "--fail" in sys.argv:
        raise KeyError("oops")
    sys.exit(steps)
"""
PACKAGE = """
import torch
data = torch.arange(16.0)
class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
    def forward(self, x):
        return (self.w - x).square().mean()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "example"
    (folder / "local_package_of_the_script").mkdir(parents=True)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "local_package_of_the_script" / "__init__.py").write_text(PACKAGE)
    yield "example/script.py"
    sys.modules.pop("local_package_of_the_script", None)


@pytest.mark.parametrize(("option", "steps"), [([], "[1, 3]"), (["--strict-timing"], "[2, 4]")])
def test_command(option: list[str], steps: str, script: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = list(sys.path), list(sys.argv)
    with pytest.raises(SystemExit) as ended:
        cli.main(["exogym", *option, script, "5", "--an-option", "-x"])
    assert ended.value.code == 5
    assert f"steps with an exchange: {steps}" in capfd.readouterr().out
    assert Path("logs", "run", "train.csv").exists()
    assert (sys.path, sys.argv) == before
    assert "exogym" not in sys.modules


def test_command_shows_the_scripts_own_error(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["exogym", script, "3", "--fail"]) == 1
    err = capfd.readouterr().err
    assert "KeyError: 'oops'" in err
    assert "runpy" not in err
    assert 'raise KeyError("oops")' in err


def test_command_without_a_script(capfd: pytest.CaptureFixture[str]) -> None:
    for given in (["exogym"], ["exogym", "nowhere.py"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(given)
        assert ended.value.code == 2
    assert "can't open file 'nowhere.py'" in capfd.readouterr().err


def test_a_run_is_silent_apart_from_what_it_is_asked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(KINDS["diloco"]())
        fit(KINDS["diloco"](), strict=True)


MPS = SCRIPT.replace("run_name=", "device='mps', run_name=")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="the device that must not be there is")
@pytest.mark.parametrize("option", [[], ["--strict-timing"]])
def test_command_takes_a_script_to_another_device(
    option: list[str], script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(script).write_text(MPS)
    for _ in range(2):  # the option is for its own run
        assert cli.main(["exogym", *option, script, "5"]) == 1
        err = capfd.readouterr().err
        assert "device='mps' is not there; present: cpu" in err
        assert "vecgym exogym --device cpu SCRIPT" in err
        with pytest.raises(SystemExit) as ended:
            cli.main(["exogym", "--device", "cpu", *option, script, "5"])
        assert ended.value.code == 5
