"""The loggers as packages of their own would read them back, and what a run records for them."""

from __future__ import annotations

import csv
import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import vecgym
from tests.fitting import Rows, alone, dataset, fit, same_run
from tests.models import MLP, make_data
from vecgym import CSVLogger, Logger, TensorBoardLogger, Trainer, VecgymWarning, WandbLogger
from vecgym.data import partition_dirichlet
from vecgym.logger import _default_wandb_mode, read_csv
from vecgym.models import GPT, Classifier
from vecgym.optim import OptimSpec
from vecgym.records.columns import PER_NODE, SCALARS
from vecgym.runs.options import described
from vecgym.strategy import (
    AllReduceStrategy,
    Average,
    CommunicateOptimizeStrategy,
    Compressed,
    Corrupted,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    Outer,
    Private,
    Strategy,
    every,
)

WITHOUT_WANDB = "needs wandb: pip install vecgym[wandb]"
WITHOUT_TENSORBOARD = "needs tensorboard: pip install vecgym[tensorboard]"


class Tagger(nn.Module):
    """A classifier of the MLP's data, with metrics of its own."""

    loss_metrics = {"perplexity": torch.exp}  # noqa: RUF012

    def __init__(self, features: int = 5, classes: int = 3) -> None:
        super().__init__()
        self.net = nn.Linear(features, classes)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def val_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        hits = (self.net(batch[0]).argmax(1) == batch[1]).float()
        return {"loss": self(batch), "accuracy": hits.mean(), "largest": self.net.weight.abs().max()}


def tagged(num_examples: int = 24, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_examples, 5, generator=generator)
    return Rows((x, x[:, :3].argmax(1)))


@pytest.fixture
def quiet_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """wandb without an account or a network, or anything on the screen."""
    wandb = pytest.importorskip("wandb", reason=WITHOUT_WANDB)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    return wandb


# ------------------------------------------------------------------------------------------------------- wandb


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: a header of 7 bytes, then blocks of 32 KiB as in LevelDB's log.

    Each part of a record has a checksum (4 bytes), its length (2) and its kind (1): 1 all, 2 first, 3 middle, 4 last.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 2**15 - at % 2**15
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def read_wandb(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """Config, history rows and the run of the only offline run in a directory."""
    [file] = directory.glob("wandb/offline-run-*/run-*.wandb")
    config: dict[str, Any] = {}
    rows, run = [], None
    for _ in range(600):  # wandb's own process writes it
        records = list(wandb_records(file))
        if records and records[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.1)
    for record in records:
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            config |= {item.key: json.loads(item.value_json) for item in run.config.update}
        elif kind == "config":
            config |= {item.key: json.loads(item.value_json) for item in record.config.update}
        elif kind == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return config, rows, run


def test_wandb_offline_reads_back(quiet_wandb: Any, tmp_path: Path) -> None:
    logger = WandbLogger(project="research", experiment_name="diloco", directory=tmp_path / "made", per_node=True)
    trainer, _ = fit("MLP", "DiLoCo", max_steps=3, val=dataset("MLP", 8), val_interval=2, logger=logger)
    config, rows, run = read_wandb(tmp_path / "made")
    assert (run.project, run.display_name) == ("research", "diloco")
    settings = trainer.history.settings
    assert {name: config[name] for name in settings} == settings
    assert config["hyperparameters"]["exchanges"][0]["how"]["optim"]["spec"]["lr"] == 0.7
    assert [row["_step"] for row in rows] == [0, 1, 2, 3]
    for found, row in zip(rows, trainer.history):
        for name, value in row.items():
            if name in PER_NODE:
                assert [found[f"{name}/node_{i}"] for i in range(3)] == pytest.approx(value.tolist())
                assert found[f"{name}/min"] == pytest.approx(value.min())
                assert found[f"{name}/max"] == pytest.approx(value.max())
            else:
                assert found[name] == pytest.approx(value), name


class Online:
    """The records of runs on wandb's server: id -> rows by step. It takes no step twice."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, dict[str, Any]]] = {}
        self.resumed = False
        self.id = ""

    def init(self, *, id: str | None, resume: str | None = None, **settings: Any) -> Online:
        self.id = str(id)
        self.resumed = resume == "allow" and self.id in self.rows
        self.rows[self.id] = self.rows[self.id] if self.resumed else {}
        return self

    @property
    def step(self) -> int:
        return max(self.rows[self.id], default=-1) + 1

    def log(self, row: dict[str, Any], step: int) -> None:
        assert step >= self.step, "wandb drops rows of earlier steps, with a warning"
        self.rows[self.id][step] = row

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("lost", [False, True])
def test_wandb_goes_on_with_its_run(lost: bool, tmp_path: Path, quiet_wandb: Any) -> None:
    """Steps after the checkpoint are there already; where wandb has lost the run, all of it is logged."""
    server = Online()

    def train(folder: str, **settings: Any) -> Trainer:
        logger = WandbLogger("p", mode="online")
        logger._wandb = server
        given: dict[str, Any] = {"save_dir": tmp_path / folder, "checkpoint_interval": 2, "keep_checkpoints": 9}
        return fit("MLP", max_steps=6, logger=logger, **{**given, **settings})[0]

    first = train("saved").history
    for step in (4, 6):
        (tmp_path / "saved" / f"step-{step:09d}.pt").unlink()
    if lost:
        server.rows.clear()
    again = train("saved", resume=True).history
    assert list(server.rows) == [first.settings["run_id"]] == [again.settings["run_id"]]
    rows = server.rows[again.settings["run_id"]]
    assert [row["train_loss"] for row in rows.values()] == first["train_loss"]
    fork = train("fork", resume=tmp_path / "saved" / "step-000000002.pt").history
    assert fork.settings["run_id"] != first.settings["run_id"]
    assert len(server.rows) == 2


def test_wandb_two_runs_with_one_logger(quiet_wandb: Any, tmp_path: Path) -> None:
    logger = WandbLogger("p", name="n", directory=tmp_path)
    for _ in range(2):
        fit("MLP", max_steps=2, logger=logger)
    assert logger.run is None
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


@pytest.mark.parametrize(
    ("environment", "netrc", "mode"),
    [
        ({}, None, "offline"),
        ({"WANDB_API_KEY": "0" * 40}, None, "online"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "0" * 40}, None, "disabled"),
        ({"WANDB_MODE": "dryrun"}, None, None),  # a name that only wandb knows
        ({}, "machine api.wandb.ai login user password secret", "online"),
        ({"WANDB_BASE_URL": "https://wandb.here:8080"}, "machine api.wandb.ai login user password secret", "offline"),
        ({"WANDB_BASE_URL": "https://wandb.here:8080"}, "machine wandb.here login user password secret", "online"),
        ({}, "what is this", "offline"),
    ],
)
def test_wandb_is_online_only_with_an_account(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], netrc: str | None, mode: str | None
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if netrc is not None:
        (tmp_path / "netrc").write_text(netrc)
        (tmp_path / "netrc").chmod(0o600)
    assert _default_wandb_mode() == mode


def test_wandb_arguments() -> None:
    pytest.importorskip("wandb", reason=WITHOUT_WANDB)
    with pytest.raises(ValueError, match=r"experiment_name='a' and name='b'.*give one"):
        WandbLogger("p", "a", name="b")
    with pytest.raises(ValueError, match=r"mode='on'.*'online', 'offline', 'disabled', or None"):
        WandbLogger("p", mode="on")  # type: ignore[arg-type]
    logger = WandbLogger("p", name="b", entity="us", mode="disabled")
    assert (logger.project, logger.name, logger.entity, logger.mode) == ("p", "b", "us", "disabled")


# ------------------------------------------------------------------------------------------------- tensorboard


def test_tensorboard_reads_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason=WITHOUT_TENSORBOARD)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path / "run", per_node=True)
    trainer, _ = fit("MLP", "DiLoCo", max_steps=3, val=dataset("MLP", 8), val_interval=2, logger=logger)
    found = EventAccumulator(str(tmp_path / "run"))
    found.Reload()
    history = trainer.history
    scalars = set(history.columns) - set(PER_NODE) - {"step"}
    each = {f"{name}/{part}" for name in PER_NODE for part in ("min", "max", "node_0", "node_1", "node_2")}
    assert set(found.Tags()["scalars"]) == scalars | each
    for name in scalars:
        events = found.Scalars(name)
        assert [event.step for event in events] == history.series(name)[0]
        assert [event.value for event in events] == pytest.approx(history.series(name)[1]), name
    losses = history.node_array("val_losses")
    assert [event.value for event in found.Scalars("val_losses/min")] == pytest.approx(losses.min(1).tolist())
    assert [event.value for event in found.Scalars("val_losses/node_2")] == pytest.approx(losses[:, 2].tolist())
    [text] = found.Tensors("settings/text_summary")
    assert '"num_nodes": 3' in text.tensor_proto.string_val[0].decode()


@pytest.mark.parametrize("name", ["csv", "wandb", "tensorboard"])
def test_a_resumed_run_is_whole(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every step once, although the first run went on after its last checkpoint."""
    if name == "wandb":
        request.getfixturevalue("quiet_wandb")
    at = tmp_path / name
    given: dict[str, Any] = {"save_dir": tmp_path / "saved", "checkpoint_interval": 2, "keep_checkpoints": 9}
    fit("MLP", max_steps=4, logger=make_logger(name, at), **given)
    if name == "wandb":
        at = tmp_path / "again"
    (tmp_path / "saved" / "step-000000004.pt").unlink()
    history = fit("MLP", max_steps=4, logger=make_logger(name, at), resume=True, **given)[0].history
    expected = dict(zip(*history.series("train_loss")))
    assert list(expected) == [1, 2, 3, 4]
    if name == "csv":
        found = dict(zip(*read_csv(at).series("train_loss")))
    elif name == "wandb":
        _, rows, run = read_wandb(at)
        found = {row["_step"]: row["train_loss"] for row in rows}
        assert run.run_id == history.settings["run_id"] == read_wandb(tmp_path / name)[2].run_id
    else:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(at))
        events.Reload()
        found = {event.step: event.value for event in events.Scalars("train_loss")}
        assert len(events.Scalars("train_loss")) == 4
    assert found == pytest.approx(expected)


# --------------------------------------------------------------------------------------------------------- csv


def test_read_csv_is_the_history(tmp_path: Path) -> None:
    trainer, _ = fit(
        Tagger(), "DiLoCo", data=tagged(), val=tagged(8, 1), max_steps=4, val_interval=2, correlation_interval=2,
        logger=CSVLogger(tmp_path),
    )  # fmt: skip
    found = read_csv(tmp_path)
    assert found.settings == trainer.history.settings
    assert set(found.columns) == set(trainer.history.columns)
    assert "val_accuracy_local" in found.columns
    for name in found.columns:
        for read, kept in zip(found[name], trainer.history[name]):
            if kept is None:
                assert read is None, name
            else:  # each node's losses are written as float32
                assert np.array_equal(np.asarray(read).astype(np.asarray(kept).dtype), np.asarray(kept)), name


def test_csv_columns_that_come_late(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.start({})
    logger.log({"step": 0, "train_loss": 1.0})
    logger.log({"step": 1, "val_new": 2.0})
    logger.log({"step": 2, "val_newer": 3.0, "val_new": 4.0})
    logger.finish()
    with (tmp_path / "history.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == [*SCALARS, "val_new", "val_newer"]
    assert [row[-2:] for row in rows] == [["", ""], ["2.0", ""], ["4.0", "3.0"]]
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "history.csv"}


def test_columns_of_each_node_are_logged_and_read_again(tmp_path: Path) -> None:
    """A user's own metric, in a history that begins anew in the folder of one that had other columns."""
    log = CSVLogger(tmp_path)
    shards = partition_dirichlet(torch.arange(60) % 3, 4, 0.3, min_size=3).datasets(dataset("MLP", 60), held_out=0.3)
    trainer, _ = fit("MLP", "FedAvg", num_nodes=4, data=shards, val=shards, max_steps=2, logger=log)
    read = read_csv(tmp_path)
    np.testing.assert_allclose(read.last("val_loss_each"), trainer.history.last("val_loss_each"))
    assert read.last("val_loss_p50") == trainer.history.last("val_loss_p50")
    assert "val_loss_each" not in (tmp_path / "history.csv").read_text()
    assert trainer.history.to_pandas()["val_loss_each[3]"].notna().any()
    fit("MLP", "FedAvg", num_nodes=4, max_steps=2, logger=log)
    assert "val_loss_each" not in read_csv(tmp_path).columns


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no run: there is no history.csv"),
        ({"history.csv": "step\n1\n", "config.json": "{"}, "cannot be read as the files of a CSVLogger"),
        ({"history.csv": "step,train_loss\n1,much\n"}, "could not convert string to float: 'much'"),
    ],
)
def test_read_csv_refuses_what_is_no_run(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_csv(tmp_path)


# ------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(("file", "column"), [("history.csv", "train_loss"), ("train_losses.csv", "train_losses")])
def test_read_csv_leaves_a_line_that_was_cut_off_out(file: str, column: str, tmp_path: Path) -> None:
    """Of 12.25 what is left may be 12: another number."""
    logger = CSVLogger(tmp_path)
    logger.start({"num_nodes": 2})
    for step in (1, 2):
        logger.log({"step": step, "train_loss": 12.25, "train_losses": [0.5, 12.25]})
    logger.finish()
    whole = (tmp_path / file).read_text()
    (tmp_path / file).write_text(whole[: whole.rindex("12.25") + 2])
    with pytest.warns(VecgymWarning, match=rf"skipping the incomplete last line of .*{file}: its writer was killed"):
        history = read_csv(tmp_path)
    assert [column in row for row in history.rows] == ([True] if file == "history.csv" else [True, False])
    assert float(np.max(history.rows[0][column])) == 12.25


def make_logger(name: str, directory: Path) -> Logger:
    if name == "csv":
        return CSVLogger(directory)
    if name == "wandb":
        pytest.importorskip("wandb", reason=WITHOUT_WANDB)
        return WandbLogger("p", directory=directory)
    pytest.importorskip("tensorboard", reason=WITHOUT_TENSORBOARD)
    return TensorBoardLogger(directory)


@pytest.mark.parametrize("method", ["start", "log", "finish"])
@pytest.mark.parametrize("name", ["csv", "wandb", "tensorboard"])
def test_a_failing_logger_warns_and_the_training_goes_on(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one fails where its own machinery does, and a CSVLogger beside it gets everything."""
    logger, beside = make_logger(name, tmp_path / "broken"), CSVLogger(tmp_path / "sound")

    class Broken:
        """A run, a writer or a file that works up to `method`."""

        def __getattr__(self, called: str) -> Any:
            fails = {"log": ("log", "add_scalar", "write"), "finish": ("finish", "close"), "start": ()}[method]

            def call(*args: Any, **kwargs: Any) -> None:
                if called in fails:
                    raise OSError("no space left")

            return call

    def begin(*args: Any, **kwargs: Any) -> Broken:
        if method == "start":
            raise OSError("no space left")
        return Broken()

    if isinstance(logger, WandbLogger):
        monkeypatch.setattr(logger, "_wandb", type("wandb", (), {"init": staticmethod(begin)}))
    elif isinstance(logger, TensorBoardLogger):
        monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", begin)
    elif method == "start":
        (tmp_path / "broken").write_text("a file where the directory should be")
    else:
        real = CSVLogger.log if method == "log" else CSVLogger.finish

        def broken(self: CSVLogger, *args: Any) -> None:
            real(self, *args)
            if self is logger and (method == "log" or self._columns):
                self._columns = []
                raise OSError("no space left")

        monkeypatch.setattr(CSVLogger, method, broken)
        if method == "finish":
            logger.start({})
            logger._columns = []  # type: ignore[attr-defined]

    with pytest.warns(VecgymWarning, match=rf"{type(logger).__name__} failed and is dropped") as caught:
        trainer, _ = fit("MLP", max_steps=2, logger=[logger, beside])
    ours = [warning for warning in caught if issubclass(warning.category, VecgymWarning)]
    assert len(ours) == 1, [str(warning.message) for warning in caught]
    assert len(read_csv(tmp_path / "sound")) == 2
    assert same_run(trainer, fit("MLP", max_steps=2)[0])


@pytest.mark.parametrize(("name", "package"), [("WandbLogger", "wandb"), ("TensorBoardLogger", "tensorboard")])
@pytest.mark.parametrize("left", ["nothing", "a folder of its name"])
def test_a_missing_package_is_named(
    name: str, package: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where wandb has left its files: Python takes a folder for a package."""
    for module in [m for m in sys.modules if m.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    if left == "nothing":
        monkeypatch.setitem(sys.modules, package, None)
    else:
        monkeypatch.setitem(sys.modules, package, type(sys)(package))
    with pytest.raises(ImportError, match=rf"{name} needs the package {package}: pip install vecgym\[{package}\]"):
        getattr(vecgym, name)("x")


def test_vecgym_imports_none_of_them() -> None:
    code = "import sys, vecgym; assert not {'wandb', 'tensorboard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -------------------------------------------------------------------------------------------- what is recorded


def accuracy(model: nn.Module, data: Rows) -> float:
    x, y = data.data
    with torch.no_grad():
        return float((model.net(x).argmax(1) == y).float().mean())  # type: ignore[operator]


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", ["DiLoCo", "AllReduce"])
def test_metrics_of_a_model(engine: str, strategy: str) -> None:
    """Of the averaged model, and the mean over the nodes', whatever the size of the last batch."""
    torch.manual_seed(0)
    val = tagged(11, seed=1)
    trainer, average = fit(
        Tagger(), strategy, data=tagged(), val=val, max_steps=3, val_interval=3, engine=engine
    )  # fmt: skip
    history = trainer.history
    each = [trainer.nodes.module(i) for i in range(3)]
    assert history.last("val_accuracy") == pytest.approx(accuracy(average, val))
    assert history.last("val_accuracy_local") == pytest.approx(np.mean([accuracy(m, val) for m in each]))
    assert history.last("val_largest") == pytest.approx(float(average.net.weight.detach().abs().max()))  # type: ignore[union-attr, operator]
    assert history.last("val_perplexity") == pytest.approx(np.exp(history.last("val_loss")))
    losses = history.node_array("val_losses")[-1]
    assert history.last("val_perplexity_local") == pytest.approx(np.exp(losses).mean())
    plain, _ = fit(Plain(trainer.model), strategy, data=tagged(), val=val, max_steps=3, val_interval=3, engine=engine)
    np.testing.assert_allclose(plain.history.series("val_loss")[1], history.series("val_loss")[1], rtol=1e-6)
    assert not [name for name in plain.history.columns if "accuracy" in name or "perplexity" in name]


class Plain(nn.Module):
    """A model without its metrics."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model.net

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])  # type: ignore[operator]


def test_own_models_offer_perplexity_and_accuracy() -> None:
    data = make_data("GPT", 12)
    vocab = int(max(x.max() for x in data)) + 1  # type: ignore[union-attr]
    gpt = GPT(vocab, context=16, num_layers=1, num_heads=1, width=4)
    history = fit(gpt, data=Rows(data), val=Rows(data), max_steps=2)[0].history
    assert history.last("val_perplexity") == pytest.approx(np.exp(history.last("val_loss")))
    model = Classifier(nn.Linear(5, 3))
    trainer, average = fit(model, data=tagged(), val=tagged(), max_steps=2)
    assert trainer.history.last("val_accuracy") == pytest.approx(accuracy(average, tagged()))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: {"accuracy": loss}, r'returned {\'accuracy\': float32 \[\]}; a dict with "loss" is needed'),
        (lambda loss: loss, r'returned float32 \[\]; a dict with "loss"'),
        (lambda loss: {"loss": loss, "hits": torch.ones(2)}, r"returned float32 \[2\] as 'hits'"),
        (lambda loss: {"loss": loss, "hits": (loss > 0).sum()}, r"returned int64 \[\] as 'hits'"),
        (lambda loss: {"loss": loss, "hits": 1.0}, "a float as 'hits'"),
        (lambda loss: {"loss": loss, "losses": loss}, "metric 'losses' makes the column val_losses, which exists"),
        (
            lambda loss: {"loss": loss, "a": loss, "a_local": loss},
            "'a_local' makes the column val_a_local, which exists",
        ),
    ],
)
def test_wrong_metrics_are_refused(returned: Any, message: str) -> None:
    class Wrong(Tagger):
        def val_metrics(self, batch: Any) -> Any:
            return returned(self(batch))

    with pytest.raises((TypeError, ValueError), match=message):
        fit(Wrong(), alone(), data=tagged(), val=tagged(), max_steps=1)


def test_metrics_of_one_name_are_refused() -> None:
    model = Tagger()
    model.loss_metrics = {"loss": torch.exp}
    with pytest.raises(ValueError, match="two metrics called 'loss', one of them in loss_metrics: rename it"):
        fit(model, alone(), data=tagged(), val=tagged(), max_steps=1)
    shards = lambda rank, num_nodes, train: Subset(tagged(), range(rank, 12, num_nodes))  # noqa: E731
    trainer = Trainer(Tagger(), shards, shards, loss_fn=lambda m, b: {"loss": m(b), "loss_p10": m(b)})
    with pytest.raises(ValueError, match="metric 'loss_p10' makes the column val_loss_p10, which exists: rename it"):
        trainer.fit(alone(), num_nodes=2, max_steps=1, batch_size=2, progress=False, device="cpu")


def test_wrong_loss_metrics_are_refused() -> None:
    model = Tagger()
    model.loss_metrics = ["perplexity"]  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"loss_metrics is \['perplexity'\]; it must be a dict of functions"):
        fit(model, alone(), data=tagged(), val=tagged(), max_steps=1)


def test_rates_are_of_the_step() -> None:
    trainer, _ = fit("MLP", "AllReduce", max_steps=3, val=dataset("MLP", 8))
    for row in trainer.history.rows[1:]:
        seconds = 1 / row["steps_per_s"]
        assert row["bytes_per_s"] == pytest.approx(row["bytes_step"] / seconds)
        assert row["examples_per_s"] == pytest.approx(3 * 4 / seconds)
        assert row["bytes_step"] > 0
    memory = trainer.history.series("memory_bytes")
    assert memory[0] == trainer.history.series("val_loss")[0]  # with the evaluations, no oftener
    assert min(memory[1]) > 2**20


def outer(lr: Any, average: Average | None = None) -> Outer:
    return Outer(average or Mean(), OptimSpec("sgd", lr=lr, momentum=0.9, nesterov=True))


T1 = torch.tensor([[0.5], [0.25]])  # an outer learning rate for each of two outer steps


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (lambda: DiLoCoStrategy("sgd", H=2, lr=0.1, outer_lr=0.4), [0.4] * 4 + [None]),
        (lambda: DiLoCoStrategy("sgd", H=2, lr=0.1, outer_lr=T1), [0.5, 0.5, 0.25, 0.25, None]),
        (lambda: FedAvgStrategy("sgd", H=2, lr=0.1, server_optim="avgm", server_lr=0.3), [0.3] * 4 + [None]),
        (lambda: AllReduceStrategy("sgd", lr=0.1), [None] * 5),
        (lambda: _composed(every(2, Exchange(outer(T1)))), [0.5, 0.5, 0.25, 0.25, None]),
        (lambda: _composed(Exchange(outer(0.2), every=2, delay=1, late="change")), [0.2] * 4 + [None]),
        (lambda: _composed(Exchange(outer(0.2, Compressed(Mean(), "int8")), every=2)), [0.2] * 4 + [None]),
        (lambda: _composed(Exchange(Mean(), every=2), Exchange(outer(0.2), every=2)), [0.2] * 4 + [None]),
    ],
)  # fmt: skip
def test_outer_learning_rate_is_recorded(strategy: Any, expected: list[float | None]) -> None:
    history = fit("MLP", strategy(), max_steps=5)[0].history
    assert [row.get("outer_lr") for row in history] == [x if x is None else pytest.approx(x) for x in expected]


def _composed(*exchanges: Exchange) -> Strategy:
    return CommunicateOptimizeStrategy(exchanges, "sgd", lr=0.1)


def test_hyperparameters_are_plain_data() -> None:
    def schedule(step: int) -> float:
        return 1.0

    strategy = DiLoCoStrategy(
        OptimSpec("adamw", lr=torch.tensor([0.1, 0.2]), betas=(0.8, 0.9), param_groups=lambda name, p: {}),
        H=7, max_norm=1.0, lr_scheduler=schedule, compression="int8",
    )  # fmt: skip
    found = described(strategy)
    assert json.loads(json.dumps(found)) == found
    inner = found["inner_optim"]
    assert (inner["class"], inner["betas"], inner["eps"]) == ("AdamW", [0.8, 0.9], 1e-8)
    assert inner["lr"] == pytest.approx([0.1, 0.2])
    assert "lambda" in inner["param_groups"]
    [exchange] = found["exchanges"]
    assert (exchange["every"], exchange["how"]["optim"]["spec"]["momentum"]) == (7, 0.9)
    assert exchange["how"]["inner"]["codec"] == {"class": "Quantise", "bits": 8, "stochastic": False}
    assert found["max_norm"] == 1.0
    assert "schedule" in found["lr_scheduler"]


def test_hyperparameters_of_anything() -> None:
    class Odd(Mean):
        def __init__(self) -> None:
            super().__init__()
            self.me = self
            self.many = torch.zeros(1000)
            self.device = torch.device("cpu")
            self.numpy = np.float32(0.5)
            self.model = MLP()

    text = json.dumps(described(CommunicateOptimizeStrategy([Exchange(Odd(), every=2)], "sgd", lr=0.1)))
    for part in ('"numpy": 0.5', "torch.float32 [1000]", "Odd ...", "device(type='cpu')", "MLP("):
        assert part in text


def test_an_optimizer_deep_within_averages_is_described() -> None:
    how = Corrupted(Private(Outer(Mean()), clip=1.0, noise=0.1), [1])
    text = json.dumps(described(CommunicateOptimizeStrategy([Exchange(how, every=2)], "sgd", lr=0.1)))
    assert '{"class": "SGD", "lr": 0.7, "momentum": 0.9, ' in text


# ---------------------------------------------------------------------------------------------- progress bar


def test_progress_bar_shows_loss_bytes_and_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vecgym.runs.run.tqdm.monitor_interval", 0, raising=False)
    trainer = Trainer(MLP(), dataset("MLP"))
    trainer.fit(alone(), 3, max_steps=40, batch_size=4, device="cpu", progress=True)
    shown = capsys.readouterr().err
    assert "40/40" in shown
    assert "step/s" in shown
    assert "loss " in shown
    assert "per node" in shown
    trainer.fit(alone(), 3, max_steps=2, batch_size=4, device="cpu", progress=False)
    assert capsys.readouterr() == ("", "")
