"""diloco-sim's interface: its arguments, hooks, checkpoints, and the trajectory of its algorithm."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from vecgym import Logger, VecgymWarning
from vecgym.compat import diloco_sim
from vecgym.compat.diloco_sim import DilocoSimulator, DilocoSimulatorConfig, EvalStats, TrainStats


class Net(nn.Module):
    """Starts the same each time."""

    def __init__(self, width: int = 5, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, width, dtype=dtype), nn.Linear(width, 3, dtype=dtype)
        self.drop = nn.Dropout(dropout)
        for i, p in enumerate(self.parameters()):
            nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(i))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.a(x))))


def examples(n: int = 48, seed: int = 0, dtype: torch.dtype = torch.float32) -> TensorDataset:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return TensorDataset(x, x[:, :3].argmax(1))


def arguments(**changed: Any) -> dict[str, Any]:
    """Six local steps of two nodes, an outer step before the third and the fifth."""
    small = {
        "model_cls": Net, "loss_fn": F.cross_entropy, "train_dataset": examples(), "num_nodes": 2, "batch_size": 4,
        "diloco_interval": 2, "optimizer_kwargs": {"lr": 0.05}, "eval_iters": 2, "devices": [], "progress": False,
    }  # fmt: skip
    return {**small, **changed}


def run(**changed: Any) -> DilocoSimulator:
    simulator = DilocoSimulator(**arguments(**changed))
    simulator.train()
    return simulator


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ------------------------------------------------------------------------------------------------- the algorithm


def twin(config: DilocoSimulatorConfig) -> tuple[list[nn.Module], list[Tensor]]:
    """The original's loop over separate modules, its outer step and its delays mended. With p_sparta 0 or 1 only.

    The nodes at the end, and the parameters after each outer step.
    """
    nodes: list[Any] = [config.model_cls(**config.model_kwargs) for _ in range(config.num_nodes)]
    optims = [config.optimizer_cls(m.parameters(), **config.optimizer_kwargs) for m in nodes]
    master = copy.deepcopy(nodes[0])
    outer = config.outer_optimizer_cls(master.parameters(), **config.outer_optimizer_kwargs)
    last = config.num_local_steps

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return step / config.warmup_steps
        if not config.cosine_anneal:
            return 1.0
        part = (step - config.warmup_steps) / (last - config.warmup_steps)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2

    schedules = [torch.optim.lr_scheduler.LambdaLR(o, factor) for o in optims]
    loaders = []
    for i in range(config.num_nodes):
        sampler: Any = DistributedSampler(config.train_dataset, config.num_nodes, i, drop_last=True)
        loaders.append(iter(DataLoader(config.train_dataset, config.batch_size, sampler=sampler)))
    late: list[list[Tensor]] = []
    outer_steps: list[Tensor] = []
    for step in range(last):
        with torch.no_grad():
            if config.p_sparta and step % config.sparta_interval == 0:
                late.append([torch.stack(ps).mean(0) for ps in zip(*[m.parameters() for m in nodes])])
                if len(late) > config.async_sparta_delay:
                    means = late.pop(0)
                    for m in nodes:
                        for p, mean in zip(m.parameters(), means):
                            p.copy_(mean)
            if step and step % config.diloco_interval == 0:
                for q, *ps in zip(master.parameters(), *[m.parameters() for m in nodes]):
                    q.grad = q - torch.stack(ps).mean(0)
                outer.step()
                for m in nodes:
                    m.load_state_dict(master.state_dict())
                outer_steps.append(vector(master))
        for m, optim, schedule, loader in zip(nodes, optims, schedules, loaders):
            x, y = next(loader)
            optim.zero_grad()
            config.loss_fn(m(x), y).backward()  # type: ignore[misc]
            if config.max_norm:
                nn.utils.clip_grad_norm_(m.parameters(), config.max_norm)
            optim.step()
            schedule.step()
    return nodes, outer_steps


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"max_local_step": 4},  # an outer step would follow the last
        {"outer_optimizer_cls": torch.optim.Adam, "outer_optimizer_kwargs": {"lr": 0.1}, "num_nodes": 3},
        {"optimizer_cls": torch.optim.SGD, "max_norm": 0.1, "warmup_steps": 2, "cosine_anneal": True},
        {"p_sparta": 1.0, "sparta_interval": 3, "diloco_interval": 100},
        {"p_sparta": 1.0, "async_sparta_delay": 3, "diloco_interval": 4},
        {"p_sparta": 1.0, "sparta_interval": 2, "async_sparta_delay": 1, "diloco_interval": 3},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:diloco_interval=100")
def test_the_trajectory_is_the_originals(changed: dict[str, Any]) -> None:
    double = {"model_kwargs": {"dtype": torch.float64}, "train_dataset": examples(dtype=torch.float64)}
    simulator = run(**double, **changed)
    assert simulator.trainer is not None
    for i, module in enumerate(twin(simulator.config)[0]):
        ours = simulator.trainer.nodes.module(i)
        torch.testing.assert_close(vector(ours), vector(module), rtol=0, atol=1e-12)


def test_sparse_exchanges_take_the_fraction_asked_for() -> None:
    simulator = run(model_kwargs={"width": 500}, p_sparta=0.25, sparta_interval=2, max_local_step=5, diloco_interval=4)
    count = sum(p.numel() for p in Net(500).parameters())
    # Before steps 0, 2 and 4; what is exchanged before step 0 counts to it, before the others to the step before.
    sparse = [entry for entry in simulator.ledger if entry.payload_bytes < 4 * count]
    assert [entry.step for entry in sparse] == [0, 1, 3]
    for entry in sparse:
        assert entry.payload_bytes / 4 / count == pytest.approx(0.25, abs=0.04)
    assert [entry.step for entry in simulator.ledger if entry.payload_bytes == 4 * count] == [3]


def test_minibatches_accumulate_the_mean() -> None:
    with pytest.warns(VecgymWarning, match="diloco_interval=500 is larger than the run's 3 steps"):
        whole, parts = (run(max_minibatch_size=n, diloco_interval=500, max_local_step=3) for n in (None, 3))
    assert parts.history.settings["minibatch_size"] == 2  # the largest divisor of 4 that is not more than 3
    torch.testing.assert_close(vector(whole.master_model), vector(parts.master_model))


# ---------------------------------------------------------------------------------------------------- arguments


def test_a_config_is_the_same_as_keywords() -> None:
    models = [
        DilocoSimulator(DilocoSimulatorConfig(**arguments())).train(),
        DilocoSimulator(config=DilocoSimulatorConfig(**arguments())).train(),
        DilocoSimulator(**arguments()).train(),
    ]
    assert torch.equal(vector(models[0]), vector(models[1]))
    assert torch.equal(vector(models[0]), vector(models[2]))


def test_defaults_and_their_order() -> None:
    """The original's, and those of its document: `eval_iters`, and that model and optimizer need no keywords."""
    expected = {
        "model_kwargs": {}, "optimizer_kwargs": {"lr": 0.001}, "optimizer_cls": torch.optim.AdamW, "batch_size": 16,
        "eval_dataset": None, "ckpt_interval": None, "corr_interval": None, "eval_iters": 50, "eval_interval": 1000,
        "save_dir": None, "num_epochs": 1, "p_sparta": 0.0, "sparta_interval": 1, "cosine_anneal": False,
        "warmup_steps": 0, "model_path": None, "num_nodes": 4, "diloco_interval": 500,
        "outer_optimizer_cls": torch.optim.SGD,
        "outer_optimizer_kwargs": {"lr": 0.7, "nesterov": True, "momentum": 0.9}, "max_local_step": None,
        "wandb_project": None, "max_minibatch_size": None, "port": 12355, "devices": None, "max_norm": None,
        "async_sparta_delay": 0, "wandb_name": None, "train_loss_hook": None, "eval_loss_hook": None,
    }  # fmt: skip
    config = DilocoSimulatorConfig(model_cls=Net, loss_fn=F.cross_entropy, train_dataset=examples(64))
    assert {name: getattr(config, name) for name in expected} == expected
    names = list(inspect.signature(DilocoSimulatorConfig).parameters)
    assert names[:5] == ["model_cls", "model_kwargs", "loss_fn", "train_dataset", "optimizer_kwargs"]
    assert set(names) - set(expected) == {"model_cls", "loss_fn", "train_dataset", "seed", "progress"}


# Each argument with a value that changes the outcome: here of the averaged model.
CHANGES: dict[str, Any] = {
    "model_cls": type("Other", (Net,), {"forward": lambda self, x: self.b(self.a(x))}),
    "model_kwargs": {"dropout": 0.5},
    "loss_fn": nn.CrossEntropyLoss(label_smoothing=0.2),
    "train_dataset": examples(seed=1),
    "optimizer_kwargs": {"lr": 0.1},
    "optimizer_cls": torch.optim.SGD,
    "batch_size": 2,
    "num_epochs": 2,
    "p_sparta": 0.5,
    "cosine_anneal": True,
    "warmup_steps": 3,
    "num_nodes": 3,
    "diloco_interval": 3,
    "outer_optimizer_cls": torch.optim.AdamW,
    "outer_optimizer_kwargs": {"lr": 0.2},
    "max_local_step": 3,
    "max_norm": 0.01,
    "seed": 1,
}


@pytest.fixture(scope="module")
def plain() -> Tensor:
    return vector(run().master_model)


@pytest.mark.parametrize("name", CHANGES)
def test_every_argument_changes_something(name: str, plain: Tensor) -> None:
    more = {"outer_optimizer_kwargs": {"lr": 0.1}} if name == "outer_optimizer_cls" else {}
    assert not torch.equal(vector(run(**{name: CHANGES[name], **more}).master_model), plain)


@pytest.mark.parametrize(("name", "value"), [("sparta_interval", 2), ("async_sparta_delay", 1)])
def test_every_argument_of_sparta_changes_something(name: str, value: int) -> None:
    sparse, changed = (run(p_sparta=0.5, **more).master_model for more in ({}, {name: value}))
    assert not torch.equal(vector(sparse), vector(changed))


def test_no_argument_is_without_a_test() -> None:
    elsewhere = {
        "eval_dataset", "eval_iters", "eval_interval", "eval_loss_hook", "train_loss_hook", "ckpt_interval", "save_dir",
        "model_path", "corr_interval", "max_minibatch_size", "port", "devices", "wandb_project", "wandb_name",
        "sparta_interval", "async_sparta_delay", "progress",
    }  # fmt: skip
    assert {f.name for f in dataclasses.fields(DilocoSimulatorConfig)} == elsewhere | set(CHANGES)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_nodes": 0}, "num_nodes=0 must be an integer >= 1"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be an integer >= 1"),
        ({"diloco_interval": -1}, "diloco_interval=-1"),
        ({"eval_iters": 0}, "eval_iters=0"),
        ({"num_epochs": True}, "num_epochs=True"),
        ({"ckpt_interval": 2}, "ckpt_interval=2 needs a directory: give save_dir="),
        ({"ckpt_interval": -2, "save_dir": "x"}, "ckpt_interval=-2"),
        ({"max_local_step": -1}, "max_local_step=-1"),
        ({"p_sparta": 1.5}, r"1.5 must be a number in \[0, 1\]"),
        ({"p_sparta": 0.1, "async_sparta_delay": -1}, "delay=-1"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"max_norm": -1.0}, "max_norm=-1.0"),
        ({"optimizer_kwargs": {"lr": -1.0}}, "AdamW refuses"),
        ({"batch_size": 25}, "48 examples, too few for one step of num_nodes=2 with batch_size=25"),
    ],
)
def test_bad_values(changed: dict[str, Any], message: str) -> None:
    for make in (DilocoSimulatorConfig, DilocoSimulator):
        with pytest.raises(ValueError, match=message):
            make(**arguments(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"diloco_intervall": 3}, "no argument 'diloco_intervall'; did you mean 'diloco_interval'?"),
        ({"model_cls": Net()}, "model_cls is of type Net; give a subclass"),
        ({"model_cls": None}, "model_cls"),
        ({"loss_fn": None}, "loss_fn=None: give a function"),
        ({"train_dataset": None}, r"train_dataset is a NoneType, without length: .*give a dataset of \(x, y\)"),
        ({"optimizer_kwargs": {"learning_rate": 1.0}}, "AdamW has no argument 'learning_rate'"),
        ({"outer_optimizer_kwargs": [1]}, "outer_optimizer_kwargs is of type list"),
        ({"eval_loss_hook": 3}, "eval_loss_hook=3: give a function"),
    ],
)
def test_wrong_types(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message.replace("?", r"\?")):
        DilocoSimulator(**arguments(**changed))


def test_what_the_constructor_refuses() -> None:
    config = DilocoSimulatorConfig(**arguments())
    with pytest.raises(TypeError, match="not both: num_nodes"):
        DilocoSimulator(config, num_nodes=2)
    with pytest.raises(TypeError, match="config is of type dict"):
        DilocoSimulator(arguments())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model_cls is missing"):
        DilocoSimulator()
    with pytest.raises(TypeError, match="unexpected keyword argument 'lr'"):
        DilocoSimulatorConfig(**arguments(lr=0.1))
    config.num_nodes = 0
    with pytest.raises(ValueError, match="num_nodes=0"):
        DilocoSimulator(config)
    own = type("Own", (DilocoSimulator,), {"_train_step": lambda self: None})
    with pytest.raises(TypeError, match="_train_step would never be called"):
        own(**arguments())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"port": 1}, "port=1 has no effect"),
        ({"devices": [0, 1]}, r"devices=\[0, 1\]: all nodes use the first"),
        ({"sparta_interval": 2}, "sparta_interval=2 has no effect without p_sparta"),
        ({"async_sparta_delay": 2}, "async_sparta_delay=2 has no effect without p_sparta"),
    ],
)
def test_what_has_no_effect_warns(changed: dict[str, Any], message: str) -> None:
    with pytest.warns(VecgymWarning, match=message) as found:
        DilocoSimulator(**arguments(**changed))
    assert found[0].filename == __file__


def test_zero_means_none_as_in_the_original() -> None:
    config = DilocoSimulatorConfig(**arguments(ckpt_interval=0, corr_interval=0, max_norm=0.0, max_local_step=0))
    assert (config.ckpt_interval, config.corr_interval, config.max_norm, config.max_local_step) == (None,) * 4


# -------------------------------------------------------------------------------------------------------- hooks


def test_hooks_are_called_at_the_originals_times() -> None:
    """Evaluation before a step, with the local steps done; no evaluation after the last."""
    calls: list[tuple[int, Any]] = []
    simulator = DilocoSimulator(**arguments(eval_interval=3, eval_dataset=examples(8, seed=1)))
    simulator.config.train_loss_hook = lambda stats: calls.append((simulator.local_step, stats))
    simulator.config.eval_loss_hook = lambda stats: calls.append((simulator.local_step, stats))
    simulator.train()
    kinds = [(step, "train" if isinstance(s, TrainStats) else "all" if s.glob else "own") for step, s in calls]
    first = [(0, "own"), (0, "all"), (1, "train"), (2, "train"), (3, "train"), (3, "own"), (3, "all")]
    assert kinds == [*first, (4, "train"), (5, "train"), (6, "train")]
    for _, stats in calls:
        assert stats.perplexity == pytest.approx(math.exp(stats.loss))
    assert [s.loss for _, s in calls if isinstance(s, TrainStats)] == simulator.history.series("train_loss")[1]
    losses = [s.loss for _, s in calls if isinstance(s, EvalStats)]
    x, y = examples(8, seed=1).tensors  # 2 batches of 4: all of them
    assert losses[:2] == pytest.approx([F.cross_entropy(Net()(x), y).item()] * 2)
    assert losses[2] > losses[3]  # after step 3 the nodes differ, and their average is better than they are


def test_evaluation_without_a_dataset_is_on_training_examples_which_stay(plain: Tensor) -> None:
    found: list[EvalStats] = []
    simulator = run(eval_interval=1, eval_iters=12, eval_loss_hook=found.append)  # 12 batches of 4: all of them
    x, y = examples().tensors
    assert [s.loss for s in found[:2]] == pytest.approx([F.cross_entropy(Net()(x), y).item()] * 2)
    assert torch.equal(vector(simulator.master_model), plain)


def test_one_node_has_its_own_loss_only() -> None:
    found: list[EvalStats] = []
    run(num_nodes=1, eval_interval=6, eval_loss_hook=found.append)
    assert [s.glob for s in found] == [False, False]


def test_an_error_in_a_hook_ends_the_run() -> None:
    def fail(stats: TrainStats) -> None:
        raise LookupError(stats.loss)

    simulator = DilocoSimulator(**arguments(train_loss_hook=fail))
    with pytest.raises(LookupError):
        simulator.train()
    assert simulator.local_step == 1
    assert len(simulator.history) == 2  # what was recorded stays


def test_correlation_is_recorded() -> None:
    steps, values = run(corr_interval=3, diloco_interval=3).history.series("correlation")
    assert steps == [3, 6]
    assert values[0] == 1.0  # just averaged
    assert 0.5 < values[1] < 1


def test_wandb_gets_what_the_original_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wandb(Logger):
        def __init__(self, project: str, name: str | None) -> None:
            self.project, self.name = project, name
            self.rows: list[dict[str, Any]] = []
            made.append(self)

        def log(self, row: dict[str, Any]) -> None:
            self.rows.append(row)

    made: list[Any] = []
    monkeypatch.setattr("vecgym.compat.diloco_sim.WandbLogger", Wandb)
    run()
    assert made == []
    run(wandb_project="owt", wandb_name="dlc2", eval_interval=3, corr_interval=3)
    (logger,) = made
    assert (logger.project, logger.name) == ("owt", "dlc2")
    assert [row["step"] for row in logger.rows] == [0, 1, 2, 3, 4, 5, 6]
    assert {"train_loss", "lr", "val_loss", "val_perplexity", "correlation"} <= set(logger.rows[3])
    assert logger.rows[3]["val_perplexity"] == pytest.approx(math.exp(logger.rows[3]["val_loss"]))


class WithMetrics(nn.Linear):
    """Has an attribute of its own, whose name means something to vecgym."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.loss_metrics = [0.5]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.loss_metrics[0]


def test_the_users_model_stays_as_it_is() -> None:
    simulator = run(model_cls=WithMetrics, model_kwargs={"in_features": 4, "out_features": 3})
    assert simulator.master_model.loss_metrics == [0.5]
    assert "val_perplexity" in simulator.history.columns


# -------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_every_so_many_outer_steps_and_at_the_end(tmp_path: Path) -> None:
    double = {"model_kwargs": {"dtype": torch.float64}, "train_dataset": examples(dtype=torch.float64)}
    simulator = run(**double, max_local_step=5, ckpt_interval=2, save_dir=tmp_path / "made" / "here")
    files = sorted((tmp_path / "made" / "here").iterdir())
    assert [file.name for file in files] == ["4.pt", "5.pt"]  # outer steps come before steps 2 and 4
    second, end = (torch.load(file, weights_only=True) for file in files)
    assert all(torch.equal(x, end[name]) for name, x in simulator.master_model.state_dict().items())
    nodes, outer_steps = twin(simulator.config)
    for found, expected in ((second, outer_steps[1]), (end, torch.stack([vector(m) for m in nodes]).mean(0))):
        flat = torch.cat([x.flatten() for x in found.values()])
        torch.testing.assert_close(flat, expected, rtol=0, atol=1e-12)


def test_a_checkpoint_is_the_start_of_another_run(tmp_path: Path) -> None:
    first = run(save_dir=tmp_path)
    later = DilocoSimulator(**arguments())
    later.load_model(tmp_path / "6.pt")
    assert torch.equal(vector(later.master_model), vector(first.master_model))
    by_path = DilocoSimulator(**arguments(model_path=tmp_path / "6.pt"))
    seen: list[TrainStats] = []
    by_path.config.train_loss_hook = seen.append
    assert torch.equal(vector(by_path.train()), vector(later.train()))
    assert seen[0].loss < first.history["train_loss"][1]


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt is damaged, or holds no state_dict of this model.*Missing key"):
        DilocoSimulator(**arguments(model_path=tmp_path / "other.pt"))
    torch.save(Net(), tmp_path / "pickled.pt")  # would run what the file says
    with pytest.raises(ValueError, match=r"pickled\.pt is damaged.*Weights only load failed"):
        DilocoSimulator(**arguments(model_path=tmp_path / "pickled.pt"))


def test_tied_weights_are_saved_under_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    run(model_cls=Tied, ckpt_interval=1, save_dir=tmp_path)
    for file in ("2.pt", "6.pt"):
        found = torch.load(tmp_path / file, weights_only=True)
        assert torch.equal(found["a.weight"], found["b.weight"])


# --------------------------------------------------------------------------------------------- unmodified scripts

SCRIPT = """
from diloco_sim import DilocoSimulator, DilocoSimulatorConfig
from diloco_sim.diloco import TrainStats
from diloco_sim.eval import EvalStats
import diloco_sim.config

simulator = DilocoSimulator(diloco_sim.config.DilocoSimulatorConfig(**arguments))
simulator.train()
"""


def test_scripts_run_unmodified(monkeypatch: pytest.MonkeyPatch, plain: Tensor) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "diloco_sim"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError):
        exec(SCRIPT, {"arguments": arguments()})
    diloco_sim.install()
    diloco_sim.install()  # as often as one likes
    names: dict[str, Any] = {"arguments": arguments()}
    exec(SCRIPT, names)
    assert torch.equal(vector(names["simulator"].master_model), plain)
    assert (names["TrainStats"], names["EvalStats"]) == (TrainStats, EvalStats)


def test_another_diloco_sim_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diloco_sim", type(sys)("diloco_sim"))
    with pytest.raises(ImportError, match="already been imported"):
        diloco_sim.install()


def test_before_train_there_is_no_history() -> None:
    simulator = DilocoSimulator(**arguments())
    assert (len(simulator.history), len(simulator.ledger)) == (0, 0)
    with pytest.raises(AttributeError, match="after fit"):
        _ = simulator.nodes
