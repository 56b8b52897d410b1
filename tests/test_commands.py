"""`vecgym run`, `vecgym sweep` and `vecgym plot`: what a shell user sees."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from vecgym.cli import main
from vecgym.logger import read_csv
from vecgym.records.columns import X_AXES

CONFIG = """
import torch
from beside import build
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy

x = torch.arange(24.0)


def config(H=2, lr=0.1, name="diloco"):
    strategy = DiLoCoStrategy("sgd", H=H, lr=lr) if name == "diloco" else AllReduceStrategy("sgd", lr=lr)
    return {"model": build(), "train_dataset": x, "val_dataset": x, "strategy": strategy, "num_nodes": 2,
            "max_steps": 4, "batch_size": 3, "device": "cpu"}


def grid(steps=3):
    return {"model": build(), "train_dataset": x, "val_dataset": x, "num_nodes": 2, "max_steps": steps,
            "strategy": lambda H, lr: DiLoCoStrategy("sgd", H=H, lr=lr), "grid": {"H": [1, 2], "lr": [0.01, 0.1]},
            "batch_size": 3, "device": "cpu"}


def wrong():
    return {**config(), "learning_rate": 3}


def incomplete():
    return {"model": build()}


def nothing():
    pass


def fails():
    return {}["model"]


def refused():
    return {**config(), "batch_size": 0}


class Broken(type(build())):
    def forward(self, x):
        return super().forward(x["no such key"])


def breaks(backend="stacked"):
    more = {"backend": "processes", "num_processes": 2} if backend == "processes" else {}
    return {**config(), "model": Broken(), **more}
"""
BESIDE = """
import torch


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return (self.w - 0.01 * x).square().mean()


build = Line
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "experiment.py").write_text(CONFIG)
    (tmp_path / "beside.py").write_text(BESIDE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    return str(tmp_path / "experiment.py")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than these runs."""
    monkeypatch.setattr("vecgym.plot.plot_runs", lambda *args, **kwargs: None)


# -------------------------------------------------------------------------------------------------------- run


def test_run_writes_history_figure_and_settings(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", config, "--output", "out", "--no-progress"]) == 0
    printed = capsys.readouterr()
    assert "DiLoCoStrategy(OptimSpec(SGD, lr=0.1)" in printed.out
    assert re.search(r"step +4\n", printed.out)
    assert printed.err == ""
    history = read_csv("out")
    assert history["step"] == [0, 1, 2, 3, 4]
    assert history.settings["hyperparameters"]["exchanges"][0]["every"] == 2
    assert Path("out/run.png").read_bytes().startswith(b"\x89PNG")


def test_set_gives_arguments_and_replaces_items(config: str, undrawn: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["run", f"{config}:config", "--no-progress", "--set", "name=allreduce", "lr=0.5", "--set", "max_steps=2"])
        == 0
    )
    settings = json.loads(Path("vecgym-runs/experiment/config.json").read_text())
    assert settings["strategy"].startswith("AllReduceStrategy(OptimSpec(SGD, lr=0.5)")
    assert settings["max_steps"] == 2


def test_run_shows_its_progress(config: str, undrawn: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", config, "--output", "out"]) == 0
    assert "4/4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.py"], "nowhere.py is not a file; give a Python file, or FILE.py:function."),
        (["experiment.py:nowhere"], "has no function 'nowhere'; it has config, grid, wrong"),
        (["experiment.py:wrong"], "returned 'learning_rate'; allowed: model, train_dataset"),
        (["experiment.py:incomplete"], "returned no 'train_dataset'; it must return model, train_dataset, strategy"),
        (["experiment.py:nothing"], "returned a NoneType; it must return a dict of arguments by name."),
        (["experiment.py:fails"], "experiment.py:34: KeyError: 'model'"),
        (["experiment.py:refused"], "batch_size=0 must be an integer >= 1"),
        (["experiment.py", "--set", "h=3"], "--set h=...: experiment.py:config takes H, lr, name, and its result may"),
        (["experiment.py", "--set", "H=0"], "experiment.py:10: H=0 must be an integer >= 1"),
        (["experiment.py", "--set", "num_nodes=0"], "num_nodes=0 must be an integer >= 1"),
    ],
)
def test_mistakes_are_one_line(config: str, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(["run", *argv, "--no-progress"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("vecgym run: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("backend", ["stacked", "processes"])
def test_an_error_in_the_users_code_names_its_line(
    config: str, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    line = 1 + CONFIG.splitlines().index('        return super().forward(x["no such key"])')
    argv = ["run", f"{config}:breaks", "--set", f"backend={backend}", "--no-progress", "--output", "out"]
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"vecgym run: error: {config}:{line}: ")
    assert error.endswith("(--traceback shows where)\n")
    assert error.count("\n") == 1
    assert main([*argv, "--traceback", "--overwrite"]) == 1
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert 'x["no such key"]' in error
    assert "runs/run.py" in error


def test_another_runs_results_are_not_replaced(
    config: str, undrawn: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["run", config, "--output", "out", "--no-progress", "--set", "save_dir=saved"]
    assert main(argv) == 0
    before = Path("out/history.csv").read_text()
    assert main([*argv, "max_steps=2"]) == 1
    assert "out holds the results of another run. Fix: give --output DIR, or --overwrite" in capsys.readouterr().err
    assert Path("out/history.csv").read_text() == before
    assert main([*argv, "max_steps=5", "resume=True"]) == 0
    assert len(read_csv("out")) == 6
    assert main(["run", config, "--output", "out", "--no-progress", "--set", "max_steps=2", "--overwrite"]) == 0
    assert len(read_csv("out")) == 3
    monkeypatch.setattr("vecgym.cli.sweep.draw", lambda *args: [])
    argv = ["sweep", f"{config}:grid", "--output", "grid", "--no-progress"]
    assert [main(argv), main(argv), main([*argv, "--overwrite"]), main([*argv, "--resume"])] == [0, 1, 0, 0]


def test_a_broken_file_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (("x = 1\nx +", "broken.py:2: SyntaxError"), ("\nimport no_such", "broken.py:2: No module")):
        (tmp_path / "broken.py").write_text(text)
        assert main(["run", str(tmp_path / "broken.py")]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["run"], ["run", "x.py", "--set", "3=4"], ["run", "x.py", "--set", "lr"], ["plot"]])
def test_usage_errors_exit_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2


def test_divergence_keeps_what_there_is(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", config, "--set", "lr=1e30", "--output", "out", "--no-progress"]) == 1
    assert "vecgym run: error: the loss of " in capsys.readouterr().err
    assert len(read_csv("out")) > 1
    assert Path("out/run.png").exists()


# ------------------------------------------------------------------------------------------------------ sweep


def test_sweep_writes_rows_figures_and_explains(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", f"{config}:grid", "--set", "steps=2", "--output", "out", "--no-progress", "--resume"]) == 0
    printed = capsys.readouterr().out
    assert "4 configurations" in printed
    assert "finished" in printed
    with Path("out/rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["H"], row["lr"]) for row in rows] == [("1", "0.01"), ("1", "0.1"), ("2", "0.01"), ("2", "0.1")]
    assert {row["steps"] for row in rows} == {"2"}
    assert Path("out/explain.txt").read_text().strip() in printed
    assert {path.name for path in Path("out").iterdir()} == {
        "rows.csv", "table.md", "explain.txt", "sweep.pt", "val_loss_by_H.png", "val_loss_by_lr.png",
        "val_loss_by_H_and_lr.png", "val_loss_by_bytes.png",
    }  # fmt: skip


def test_sweep_that_is_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", config, "--output", "out"]) == 1
    assert "give either grid=" in capsys.readouterr().err
    assert not Path("out").exists()


# ------------------------------------------------------------------------------------------------------- plot


def test_plot_draws_what_was_logged(config: str, undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["run", config, "--output", "runs/a", "--no-progress"])
    main(["run", config, "--output", "runs/b", "--no-progress", "--set", "H=4"])
    seen: dict[str, Any] = {}

    def plot_runs(histories, path, **options):
        seen.update(histories=histories, path=path, **options)

    monkeypatch.setattr("vecgym.plot.plot_runs", plot_runs)
    for x in X_AXES:
        assert main(["plot", "runs", "--x", x, "--output", "both.png", "--title", "two"]) == 0
        assert list(seen["histories"]) == ["a", "b"]
        assert (seen["path"], seen["x"], seen["title"]) == (Path("both.png"), x, "two")
    assert main(["plot", "runs/b", "runs/a"]) == 0
    assert list(seen["histories"]) == ["b", "a"]
    assert [seen[name] for name in ("panels", "log_x", "xlim", "legend")] == [None] * 4
    look = ["--panels", "loss", "val_loss", "--no-log-x", "--xlim", "1", "4", "--legend", "outside"]
    assert main(["plot", "runs", *look]) == 0
    assert [seen[name] for name in ("panels", "log_x", "xlim", "legend")] == [
        ["loss", "val_loss"], False, [1, 4], "outside"
    ]  # fmt: skip


def test_plot_as_a_file(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", config, "--output", "a", "--no-progress"])
    assert main(["plot", "a", "--output", "made/figure.png"]) == 0
    assert "Figure: made/figure.png" in capsys.readouterr().out
    assert Path("made/figure.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", "nowhere"]) == 1
    assert "vecgym plot: error: nowhere holds no run: " in capsys.readouterr().err


def test_info_names_the_extras(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert re.search(r"^extras +\S", capsys.readouterr().out, re.MULTILINE)


def test_info_of_a_run_says_which_engine_and_why(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", config, "--output", "a", "--no-progress"])
    capsys.readouterr()
    assert main(["info", "a"]) == 0
    shown = capsys.readouterr().out
    settings = read_csv("a").settings
    assert shown.startswith("a\n")
    for name in ("strategy", "num_nodes", "engine", "engine_reason"):
        assert re.search(rf"^{name} +{re.escape(str(settings[name]))}$", shown, re.MULTILINE)
    assert "hyperparameters" not in shown
    assert main(["info", "nowhere"]) == 1
    assert "vecgym info: error: nowhere holds no run: " in capsys.readouterr().err
