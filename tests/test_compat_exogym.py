"""Scripts written for EXO Gym: names, options, and the translation to vecgym's strategies."""

from __future__ import annotations

import csv
import importlib
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
from tests.reference.exogym import lambda_cosine
from vecgym import VecgymWarning, cli
from vecgym import strategy as native
from vecgym.compat import exogym as compat
from vecgym.compat.exogym import (
    CONTENTS,
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
)
from vecgym.compat.exogym.base import PerRank, vectorised
from vecgym.compat.exogym.strategies import PartitionedIndexSelector, ShuffledSequentialIndexSelector

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


def trainer(num_examples: int = 44, dtype: torch.dtype = torch.float64) -> Trainer:
    model = make_model("MLP", dtype=dtype)
    return Trainer(model, dataset("MLP", num_examples, dtype=dtype), dataset("MLP", 8, 1, dtype))


def fit(strategy: Strategy, num_nodes: int = 3, **options: Any) -> Trainer:
    made = trainer()
    settings: dict[str, Any] = {"max_steps": STEPS, "batch_size": 4, "val_size": 0, **QUIET, **options}
    made.fit(1, strategy, num_nodes, **settings)
    return made


def params(made: Any) -> Tensor:
    """[K, P]"""
    return torch.cat([p.flatten(1) for p in made.nodes.params.values()], 1)


# ----------------------------------------------------------------------------------------------- EXO Gym's own loop

KINDS: dict[str, Callable[[], Strategy]] = {
    "allreduce": lambda: SimpleReduceStrategy(ADAMW, max_norm=0.5, **SCHEDULE),
    "fedavg": lambda: FedAvgStrategy(optim_spec=ADAMW, H=3, max_norm=0.5, **SCHEDULE),
    "diloco": lambda: DiLoCoStrategy(ADAMW, H=3, max_norm=0.5, **SCHEDULE),
}


def own(base: type) -> type:
    """A subclass with code of its own, which runs rank by rank."""
    return type("Own", (base,), {"step": lambda self: base.step(self)})  # type: ignore[attr-defined]


@pytest.mark.parametrize("rank_by_rank", [False, True])
@pytest.mark.parametrize("num_nodes", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_exo_gyms_loop_without_its_mistakes(kind: str, num_nodes: int, rank_by_rank: bool) -> None:
    """Of one epoch, in the order of its sampler's seed. What its processes compute is in `tests/reference`."""
    strategy = KINDS[kind]()
    if rank_by_rank:
        strategy.__class__ = own(type(strategy))
    made = trainer(num_examples=4 * STEPS * num_nodes)
    made.fit(1, strategy, num_nodes, batch_size=4, val_size=0, seed=0, **QUIET)
    expected = twin(
        make_model("MLP", dtype=torch.float64), dataset("MLP", 4 * STEPS * num_nodes, dtype=torch.float64), num_nodes,
        kind, inner=(torch.optim.AdamW, {"lr": 1e-2}), steps=STEPS, batch_size=4, H=3, max_norm=0.5,
        schedule=lambda_cosine(3, STEPS), as_documented=True,
    )  # fmt: skip
    rows = torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in expected.models])
    torch.testing.assert_close(params(made), rows, rtol=1e-10, atol=1e-12)
    losses = torch.tensor(made.history.node_array())
    torch.testing.assert_close(losses, expected.losses, rtol=1e-10, atol=1e-12)
    if kind != "allreduce" and num_nodes > 1:
        assert sorted({entry.step for entry in made.ledger}) == [2, 5, 8]


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
            [
                native.SparseCommunicator(native.PartitionedSelector(0.5)),
                native.Exchange(native.Outer(native.Mean()), every=3),
            ]
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), TRANSLATED, ids=lambda s: type(s).__name__)
def test_vectorised(theirs: Strategy, ours: native.Strategy) -> None:
    """All but the name of the class."""
    found, expected = (repr(s).partition("(")[2] for s in (vectorised(theirs, num_nodes=4, max_steps=20), ours))
    assert found == expected


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

    mine = fit(Mine(ADAMW, flavour="plain", **SCHEDULE))
    torch.testing.assert_close(
        params(mine), params(fit(SimpleReduceStrategy(ADAMW, **SCHEDULE))), rtol=1e-9, atol=1e-11
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

    made = fit(CommunicateOptimizeStrategy([Halfway()], SGD))
    ours = vecgym.Trainer(make_model("MLP", dtype=torch.float64), dataset("MLP", 44, dtype=torch.float64))
    ours.fit(
        native.CommunicateOptimizeStrategy([native.Exchange(native.Mean(), keep=0.5)], SGD),
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


class Plain(Strategy):
    """A strategy that leaves its optimizer to the option `optim_spec`, and its schedule to `super().step()`."""

    def step(self) -> None:
        self.optim.step()
        super().step()


@pytest.mark.parametrize("spec", ["sgd", OptimSpec(torch.optim.SGD)])
def test_a_schedule_of_a_users_strategy_begins_by_itself(spec: Any) -> None:
    trainer = fit(Plain(optim_spec=spec, lr_scheduler="cosine", warmup_steps=2), max_steps=4)
    rates = trainer.history["lr"]
    assert [rate / rates[2] for rate in rates] == pytest.approx([0.0, 0.5, 1.0, 0.55])


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


def test_calls_of_torch_distributed_inside_a_strategy() -> None:
    original = dist.all_reduce
    fit(CallsTorch(), max_steps=2)
    assert dist.all_reduce is original


# ---------------------------------------------------------------------------------------------------------- options


def test_a_strategy_without_an_optimizer_says_so() -> None:
    with pytest.raises(RuntimeError, match="node 0: TypeError: Plain has no optimizer: give it optim_spec="):
        fit(Plain())


class Connected(Trainer):
    def _build_connection(self) -> None:
        raise AssertionError("there are no processes")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimpleReduceStrategy(SGD, H=20), "H=20 has no effect: this strategy exchanges at every step"),
        (lambda: SPARTAStrategy(SGD, p=0.05), "p=0.05 has no effect: .* p_sparta"),
        (lambda: DiLoCoStrategy(SGD, p=0.05), "p=0.05 has no effect"),
        (lambda: Trainer(make_model("MLP"), dataset("MLP"), None, start_port=15000), "start_port=15000 has no effect"),
        (lambda: Connected(make_model("MLP"), dataset("MLP"), None), "_build_connection is never called"),
        (lambda: fit(SimpleReduceStrategy(SGD), devices=[0]), "devices=.* has no effect"),
        (lambda: fit(SimpleReduceStrategy(SGD), batch_size=5, minibatch_size=2), "use only 4 examples per step"),
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
        (lambda: DiLoCoStrategy(inner_optm="adam"), "no argument 'inner_optm'; did you mean 'inner_optim'"),
        (lambda: FedAvgStrategy(inner_optim=SGD, optim_spec=ADAMW), "twice"),
        (lambda: DiLoCoStrategy(SGD, OUTER, outer_optim="sgd"), "twice"),
        (lambda: SPARTADiLoCoStrategy(SGD, optim_spec=ADAMW), "twice"),
        (lambda: SimpleReduceStrategy(lr_scheduler="cosine", lr_scheduler_kwargs={"warmup": 1}), "argument 'warmup'"),
        (lambda: fit(SimpleReduceStrategy(SGD), max_step=5), "no argument 'max_step'; did you mean 'max_steps'"),
        (lambda: trainer().fit(1, SimpleReduceStrategy(SGD)), "needs num_nodes"),
        (lambda: trainer().fit(1, native.AllReduceStrategy(), 2), "exogym.strategy"),  # type: ignore[arg-type]
        (lambda: CallsTorch.__mro__[1](), "abstract"),
        (lambda: compat.install(strict_timing=True), "strict_timing"),  # type: ignore[call-arg]
    ],
)  # fmt: skip
def test_a_mistake_is_a_type_error(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("options", [
    {"compression_method": "topk", "quantization_bits": 8}, {"compression_method": "random"}, {"quantization_bits": 4},
    {"quantization_bits": 8, "async_sparta_delay": 2},
])  # fmt: skip
def test_compressed_sparta_of_the_documents(options: dict[str, Any]) -> None:
    found = fit(SPARTAStrategy(SGD, 0.1, **options))
    delay = options.pop("async_sparta_delay", 0)
    ours = native.SPARTAStrategy(0.1, SGD, delay=delay, **options)
    same = vecgym.Trainer(make_model("MLP", dtype=torch.float64), dataset("MLP", 44, dtype=torch.float64))
    same.fit(ours, 3, max_steps=STEPS, batch_size=4, device="cpu", progress=False)
    assert torch.equal(params(found), params(same))
    assert found.ledger.total_payload_bytes == same.ledger.total_payload_bytes


def test_compressed_sparta_is_checked() -> None:
    with pytest.raises(ValueError, match="compression_method='top'"):
        SPARTAStrategy(SGD, compression_method="top")
    with pytest.raises(ValueError, match="quantization_bits=7"):
        SPARTAStrategy(SGD, quantization_bits=7)
    with pytest.raises(RuntimeError, match="quantization_bits need all nodes at once"):
        fit(OfMyOwn(SGD, quantization_bits=8))
    with pytest.raises(RuntimeError, match="async_sparta_delay, compression_method"):
        fit(OfMyOwn(SGD, async_sparta_delay=2))


def test_memory_options_of_the_documents() -> None:
    made = fit(SimpleReduceStrategy(SGD), gradient_accumulation=2, max_memory_usage=0.8)
    assert made.history.settings["minibatch_size"] == 2


def test_values_that_cannot_work() -> None:
    with pytest.raises(ValueError, match="lambda_cosine"):
        SimpleReduceStrategy(SGD, lr_scheduler="cosin")
    with pytest.raises(ValueError, match="must not be larger than batch_size=4"):
        fit(SimpleReduceStrategy(SGD), minibatch_size=8)


# ---------------------------------------------------------------------------------------------------------- logging


def test_tables_as_exo_gym_writes_them(exogym: None) -> None:
    made = trainer()
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
    assert val[0]["global_loss"] == pytest.approx(val[0]["local_loss"])
    assert set(val[0]) == {"step", "local_loss", "local_perplexity", "global_loss", "global_perplexity"}
    assert '"dataset_name": "x"' in Path("logs", "mine", "config.json").read_text()


def test_runs_that_begin_in_the_same_second_have_logs_and_checkpoints_of_their_own(exogym: None) -> None:
    for steps in (1, 2, 3):
        fit(SimpleReduceStrategy(SGD), max_steps=steps, disable_logging=False, checkpoint_interval=1)
    tables = [folder / "train.csv" for folder in sorted(Path("logs").iterdir())]
    assert [len(table.read_text().splitlines()) for table in tables] == [2, 3, 4]
    assert len(list(Path("checkpoints").iterdir())) == 3


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
            assert (settings["project"], settings["name"], settings["mode"]) == ("p", "r", "offline")
            return self

        def log(self, row: dict[str, Any], step: int) -> None:
            logged.append((step, row))

        def finish(self) -> None:
            logged.append((-1, {}))

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    monkeypatch.setenv("WANDB_MODE", "offline")
    fit(
        SimpleReduceStrategy(SGD), 2, max_steps=2, disable_logging=False, wandb_project="p", run_name="r",
        log_x_axis="examples", val_size=8,
    )  # fmt: skip
    assert [step for step, _ in logged] == [0, 8, 16, 16, -1]
    assert set(logged[1][1]) == {"train_loss", "train_perplexity", "lr"}
    assert set(logged[0][1]) == {"local_loss", "local_perplexity", "global_loss", "global_perplexity"}


# ------------------------------------------------------------------------------------------------- import exogym


@pytest.mark.parametrize("path", CONTENTS)
def test_every_module_of_exo_gym_is_there(path: str, exogym: None) -> None:
    module = importlib.import_module(path)
    for name in CONTENTS[path]:
        assert getattr(module, name) is CONTENTS[path][name]


def test_imports_as_scripts_write_them(exogym: None) -> None:
    compat.install()  # once more
    scope: dict[str, Any] = {}
    exec(
        "import exogym.strategy.diloco\nfrom exogym import LocalTrainer, TrainNode\n"
        "from exogym.common import TrainConfig\n"
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
        with pytest.raises(ImportError, match="already been imported"):
            compat.install()
        before = [*sys.argv], [*sys.path]
        with pytest.raises(ImportError, match="already been imported"):
            compat.run_script(tmp_path / "script.py", ["--steps", "3"])
        assert before == (sys.argv, sys.path)
    finally:
        del sys.modules["exogym"]


def test_what_a_process_is_given_can_be_made_and_the_process_cannot() -> None:
    """Scripts that import them run; trainer.nodes has what a TrainNode has."""
    task = {"model": make_model("MLP"), "train_dataset": dataset("MLP"), "val_dataset": None}
    config = CONTENTS["exogym.common"]["TrainConfig"](strategy=SimpleReduceStrategy(SGD), num_nodes=2, **task)
    assert (config.num_nodes, config.batch_size, config.rank) == (2, 16, None)
    with pytest.raises(TypeError, match=r"trainer\.nodes"):
        CONTENTS["exogym"]["TrainNode"](config)


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


def test_command(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = list(sys.path), list(sys.argv)
    with pytest.raises(SystemExit) as ended:
        cli.main(["exogym", script, "5", "--an-option", "-x"])
    assert ended.value.code == 5
    assert "steps with an exchange: [1, 3]" in capfd.readouterr().out
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


MPS = SCRIPT.replace("run_name=", "device='mps', run_name=")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="the device that must not be there is")
def test_command_takes_a_script_to_another_device(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path(script).write_text(MPS)
    for _ in range(2):  # the option is for its own run
        assert cli.main(["exogym", script, "5"]) == 1
        err = capfd.readouterr().err
        assert "device='mps' is not available; present: cpu" in err
        assert "vecgym exogym --device cpu SCRIPT" in err
        with pytest.raises(SystemExit) as ended:
            cli.main(["exogym", "--device", "cpu", script, "5"])
        assert ended.value.code == 5


class OfMyOwn(SPARTAStrategy):
    """Runs rank by rank: what a selector keeps is keyed by the rank's parameters."""

    def step(self) -> None:
        super().step()


@pytest.mark.parametrize("selector", [ShuffledSequentialIndexSelector, PartitionedIndexSelector])
def test_a_selector_goes_on_after_a_resume(selector: Any, tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(10, (64,)))

    def run(steps: int, **options: Any) -> torch.Tensor:
        strategy = OfMyOwn(OptimSpec(torch.optim.Adam, lr=0.1), p_sparta=0.3, lr_scheduler="lambda_cosine")
        strategy.index_selector = strategy.communication_modules[0].index_selector = selector(0.3)
        trainer = vecgym.Trainer(make_model("MLP"), data)
        trainer.fit(PerRank(strategy), 3, max_steps=steps, batch_size=4, progress=False, device="cpu", **options)
        return torch.cat([p.flatten() for p in trainer.nodes.params.values()])

    whole = run(6, save_dir=tmp_path, checkpoint_interval=3, keep_checkpoints=9)
    assert torch.equal(run(6, resume=tmp_path / "step-000000003.pt"), whole)
