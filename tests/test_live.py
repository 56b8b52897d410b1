"""`fit(live=True)`: the figure that a notebook shows while a run trains."""

from __future__ import annotations

import itertools
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import vecgym.plot.runs
from tests.fitting import dataset, same_run
from tests.models import make_model
from vecgym import Trainer, VecgymWarning
from vecgym.plot.runs import LiveFigure
from vecgym.strategy import AsyncStrategy, DiLoCoStrategy


def trained(**settings: Any) -> Trainer[Any]:
    trainer = Trainer(make_model("MLP"), dataset("MLP"), dataset("MLP"))
    given = {"max_steps": 8, "batch_size": 4, "val_interval": 4, "device": "cpu", "progress": False, **settings}
    trainer.fit(given.pop("strategy", None) or DiLoCoStrategy("sgd", H=3, lr=0.1), 2, **given)
    return trainer


class Cell:
    """The output below a cell: figures in the order in which they were there, and the number of new ones."""

    def __init__(self) -> None:
        self.figures, self.begun = list[Any](), 0

    def display(self, figure: Any, display_id: bool) -> Any:
        assert display_id
        self.begun += 1
        self.figures.append(figure)
        return types.SimpleNamespace(update=self.figures.append)

    @property
    def titles(self) -> list[str]:
        return [figure.get_suptitle() for figure in self.figures]


def ipython(monkeypatch: pytest.MonkeyPatch, shell: Any, display: Any = None) -> None:
    package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.get_ipython = lambda: shell  # type: ignore[attr-defined]
    package.version_info = (9, 0)  # type: ignore[attr-defined]  # which matplotlib reads
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """The code runs in a notebook."""
    cell = Cell()
    ipython(monkeypatch, types.SimpleNamespace(kernel=object()), cell.display)
    return cell


@pytest.mark.parametrize("where", ["a script", "a script that has imported IPython", "IPython in a terminal"])
def test_outside_of_a_notebook(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    if where != "a script":
        ipython(monkeypatch, None if "imported" in where else types.SimpleNamespace(kernel=None))
    trainer = Trainer(make_model("MLP"), dataset("MLP"))
    with pytest.raises(
        ValueError, match=r"live=True draws in a notebook, and this is none: leave it out.*trainer.plot"
    ):
        trainer.fit(DiLoCoStrategy("sgd", H=3, lr=0.1), 2, live=True)
    assert trainer.run is None


def test_another_value() -> None:
    with pytest.raises(TypeError, match="live='loss'"):
        trained(live="loss")


def test_ipython_is_not_imported_without_need() -> None:
    code = "import sys; from tests.test_live import trained; trained(); assert 'IPython' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_a_short_run_is_drawn_at_its_end(cell: Cell) -> None:
    trainer = trained(live=True)
    sent = vecgym.collectives.ledger.readable_bytes(trainer.ledger.total_bytes)
    assert cell.titles == [f"step 8 of 8, {sent} sent per node"]
    by_step, by_bytes = cell.figures[0].axes
    assert list(by_step.lines[0].get_xdata()) == list(range(1, 9))
    assert by_bytes.get_xlabel() == "bytes sent per node"
    assert cell.figures[0]._repr_png_().startswith(b"\x89PNG")


def test_one_figure_is_drawn_anew(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveFigure, "LEAST", 0.0)
    monkeypatch.setattr(LiveFigure, "SHARE", 1.0)
    trained(live=True)
    assert [title.split(",")[0] for title in cell.titles] == [f"step {n} of 8" for n in [*range(1, 9), 8]]
    assert cell.begun == 1
    trained(live=True, log_interval=3)
    assert [title.split(",")[0] for title in cell.titles[9:]] == [f"step {n} of 8" for n in (3, 4, 6, 8, 8)]
    assert cell.begun == 2, "each run has a figure of its own"


def test_drawing_takes_a_twentieth_of_the_time(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn = 100.0, list[float]()

    def draw(*args: Any, **options: Any) -> None:
        nonlocal now
        drawn.append(now)
        now += cost

    monkeypatch.setattr(vecgym.plot.runs, "time", types.SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(vecgym.plot.runs, "plot_comparison", draw)
    for cost, most in ((0.4, 1 + 0.05 * 105 / 0.4), (0.001, 100)):
        logger, begin = LiveFigure(), now
        drawn.clear()
        logger.start({"max_steps": 10_000})
        for step in range(1, 10_001):  # 100 s without drawing
            now += 0.01
            logger.log({"step": step, "train_loss": 1.0, "bytes_total": 0.0})
        assert most * 0.9 < len(drawn) <= most
        assert (len(drawn) - 1) * cost <= 0.05 * (now - begin), "beside the first"
        assert drawn[0] - begin >= 1.0
        assert min(b - a for a, b in itertools.pairwise(drawn)) >= 1.0


def test_the_run_is_the_same(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveFigure, "LEAST", 0.0)
    same_run(trained(), trained(live=True))


def test_a_display_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython(monkeypatch, types.SimpleNamespace(kernel=object()), display=None)
    with pytest.warns(VecgymWarning, match="LiveFigure failed and is dropped"):
        trainer = trained(live=True)
    assert trainer.history["step"][-1] == 8


def test_beside_other_loggers(cell: Cell, tmp_path: Path) -> None:
    trained(live=True, logger=vecgym.CSVLogger(tmp_path))
    assert (tmp_path / "history.csv").is_file()
    assert len(cell.figures) == 1


def test_a_resumed_run_shows_what_was_before(cell: Cell, tmp_path: Path) -> None:
    trained(save_dir=tmp_path, max_steps=4)
    trained(live=True, save_dir=tmp_path, resume=True)
    assert list(cell.figures[-1].axes[0].lines[0].get_xdata()) == list(range(1, 9))


def test_other_runs(cell: Cell) -> None:
    trained(live=True, strategy=AsyncStrategy("sgd", H=2, lr=0.1), compute=vecgym.clock.Compute([1.0, 2.0]))
    assert cell.titles[0].startswith("step 8 of 8, ")
    with pytest.raises(vecgym.DivergenceError):
        trained(live=True, strategy=DiLoCoStrategy("sgd", H=3, lr=1e30))
    assert len(cell.figures) == 2, "a run that fails is drawn as far as it went"


@pytest.mark.slow
def test_processes(cell: Cell) -> None:
    trained(live=True, backend="processes", num_processes=2)
    assert [title.split(",")[0] for title in cell.titles] == ["step 8 of 8"]


@pytest.mark.slow
def test_in_a_kernel(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient: pip install vecgym[examples]")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install vecgym[examples]")
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install vecgym[examples]")
    code = "from tests.test_live import trained\ntrainer = trained(live=True)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": Path(__file__).parent.parent}}
    ).execute()
    [output] = notebook.cells[0].outputs
    assert output.output_type == "display_data"
    assert output.data["image/png"].startswith("iVBOR")
