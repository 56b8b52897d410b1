"""`vecgym report`: what it says of runs of every kind, that nothing in it runs or is loaded, and how it looks."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import vecgym
from tests.browser import Browser
from tests.fitting import alone, dataset
from tests.models import make_model
from vecgym import CSVLogger, Trainer
from vecgym.cli import main
from vecgym.cli.report import table, tag
from vecgym.clock import Compute, Network
from vecgym.plot import style
from vecgym.records.runfile import checkpoints_in
from vecgym.strategy import AsyncStrategy, DiLoCoStrategy

EVIL = "<script>document.title = 'ran'</script>"
VOID = {"img", "meta"}
TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "code", "div", "table", "tr", "th", "td",
    "a", "img", "details", "summary", "footer",
}  # fmt: skip
NETWORK, COMPUTE = Network("1 Mbit/s", "50 ms", all_reduce="tree"), Compute.lognormal([0.1, 0.2], 0.3, seed=1)


class Page(HTMLParser):
    """The elements of a page with their attributes, and its tables as rows of texts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open, self.elements = list[str](), list[tuple[str, dict[str, str | None]]]()
        self.tables, self.texts = list[list[list[str]]](), list[tuple[str, str]]()
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: Any) -> None:
        self.elements.append((name, dict(attributes)))
        self.open += [] if name in VOID else [name]
        if name == "table":
            self.tables.append([])
        elif name == "tr":
            self.tables[-1].append([])
        elif name in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, text: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", text))
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += text

    def said(self, element: str) -> list[str]:
        return [text for where, text in self.texts if where == element]


def fit(strategy: Any = None, trainer: Trainer[Any] | None = None, **settings: Any) -> Trainer[Any]:
    trainer = trainer or Trainer(make_model("MLP"), dataset("MLP"), dataset("MLP"))
    strategy = strategy or DiLoCoStrategy("sgd", H=3, lr=0.1)
    trainer.fit(
        strategy,
        2,
        **{"max_steps": 8, "batch_size": 4, "val_interval": 4, "device": "cpu", "progress": False, **settings},
    )
    return trainer


def report(*runs: Path, **options: str) -> Page:
    output = Path("report.html")
    given = [x for name, value in options.items() for x in (f"--{name}", value)]
    assert main(["report", *map(str, runs), "--output", str(output), *given]) == 0
    return Page(output)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made and not drawn, which takes most of the time: for tests of what stands around them."""
    monkeypatch.setattr(style.NotebookFigure, "_repr_png_", lambda figure: b"")
    monkeypatch.setattr(style, "legend_hides_a_curve", lambda axes: False)


# ------------------------------------------------------------------------------------------------ what it says


def test_a_logged_run(folder: Path) -> None:
    trainer = fit(logger=CSVLogger("a"))
    page = report(folder / "a")
    assert page.said("h1") == ["Run a"]
    assert page.said("h3") == ["Last rows", "What was sent", "Environment"]
    results, rows, sent, environment, settings = page.tables
    last = trainer.history.rows[-1]
    assert results[0][:6] == ["run", "strategy", "nodes", "steps", "training loss", "validation loss"]
    assert results[1][:6] == ["a", "DiLoCoStrategy", "2", "8", f"{last['train_loss']:.6g}", f"{last['val_loss']:.6g}"]
    assert [row[0] for row in rows] == ["step", *map(str, range(9))]
    assert rows[-1][1] == f"{last['train_loss']:.6g}"
    assert sent[0][1] == vecgym.collectives.ledger.readable_bytes(trainer.ledger.total_bytes)
    assert ["vecgym", vecgym.__version__] in environment
    assert ["torch", torch.__version__] in environment
    assert ["seed", "42"] in settings
    assert ["hyperparameters.exchanges.[0].every", "3"] in settings
    assert len([x for x in page.elements if x[0] == "img"]) == 2  # against steps and against bytes


@pytest.mark.parametrize("kind", ["folder", "checkpoint", "saved"])
def test_a_run_with_a_ledger_and_a_network(kind: str, folder: Path) -> None:
    trainer = fit(save_dir="a", network=NETWORK, compute=COMPUTE, max_steps=20)
    trainer.save("a.pt")
    page = report({"folder": folder / "a", "checkpoint": checkpoints_in("a")[-1], "saved": folder / "a.pt"}[kind])
    size = vecgym.collectives.ledger.readable_bytes
    [payload] = {entry.payload_bytes for entry in trainer.ledger}
    total = size(trainer.ledger.total_bytes)
    assert ["mean", "6", "3 to 18", size(payload), total, total] in page.tables[2]
    assert ["in all", "6", "1 to 20", "", total, total] in page.tables[2]
    assert "Timeline" in page.said("h3")
    assert repr(trainer.timeline(NETWORK, COMPUTE)) in page.said("p")
    figures = [attributes["alt"] for name, attributes in page.elements if name == "img"]
    assert figures[-1] == "What each node did in steps 1 to 12"
    assert figures[:-1] == [
        f"The runs against {x}" for x in ("optimizer steps", "bytes sent per node", "simulated seconds")
    ]


def test_an_asynchronous_run(folder: Path) -> None:
    trainer = fit(AsyncStrategy("sgd", H=2, lr=0.1), network=NETWORK, compute=COMPUTE, save_dir="a")
    trainer.save("a.pt")
    for run in ("a", "a.pt"):
        page = report(folder / run)
        assert repr(trainer.timeline()) in page.said("p")
        assert [list(bar) for bar in trainer.timeline().bars(0, 12)] == vecgym.load(run).clock["bars"]
        assert "What each node did in steps 1 to 8" in [attributes.get("alt") for _, attributes in page.elements]


@pytest.mark.usefixtures("undrawn")
def test_settings_in_which_runs_differ(folder: Path) -> None:
    for H in (2, 4):
        fit(DiLoCoStrategy("sgd", H=H, lr=0.1), logger=CSVLogger(f"runs/H={H}"), save_dir=f"runs/H={H}")
    page = report(folder / "runs", title="Two periods", x="examples")
    assert page.said("h1") == page.said("title") == ["Two periods"]
    assert page.tables[1][0] == ["setting", "H=2", "H=4"]
    assert {row[0] for row in page.tables[1][1:]} == {"strategy", "hyperparameters.exchanges.[0].every"}
    assert ["hyperparameters.exchanges.[0].every", "2", "4"] in page.tables[1]
    links = [attributes["href"] for name, attributes in page.elements if name == "a"]
    ids = [attributes.get("id") for name, attributes in page.elements if name == "h2"]
    assert links == ["#run-0", "#run-1"] == [f"#{x}" for x in ids if x]
    assert (
        page.elements[[x[0] for x in page.elements].index("img")][1]["alt"]
        == "The runs against examples seen by all nodes"
    )


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_went_on_after_its_last_checkpoint(folder: Path) -> None:
    fit(save_dir="a", max_steps=4)
    fit(logger=CSVLogger("a"), max_steps=8)
    assert report(folder / "a").tables[0][1][3] == "8"
    fit(save_dir="b", max_steps=8)
    fit(logger=CSVLogger("b"), max_steps=4)
    assert report(folder / "b").tables[0][1][3] == "8"


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_sent_nothing_and_a_run_of_one_node(folder: Path) -> None:
    fit(alone(), save_dir="none")
    page = report(folder / "none")
    assert page.tables[2][1:] == [["in all", "0", "1 to 8", "", "0 B", "0 B"]]
    Trainer(make_model("MLP"), dataset("MLP")).fit(
        DiLoCoStrategy("sgd", H=2, lr=0.1), 1, max_steps=3, save_dir="one", network=Network(1e9), compute=Compute(1.0),
        device="cpu", progress=False,
    )  # fmt: skip
    assert report(folder / "one").tables[0][1][2] == "1"


def test_plot_and_price_take_the_same_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(save_dir="a", logger=CSVLogger("b"))
    trainer.save("c.pt")
    assert main(["plot", "a", "b/history.csv", "c.pt", "--output", "runs.png"]) == 0
    assert Path("runs.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    answers = []
    for run in ("a", "c.pt"):
        assert main(["price", run, "--bandwidth", "1 Mbit/s", "--latency", "50ms", "--step-seconds", "0.1"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


# ------------------------------------------------------------------------------------------------- the file's contents


@pytest.mark.parametrize(
    "network",
    [
        Network(torch.tensor([[float("inf"), 1e6], [2e6, float("inf")]]), 0.1, bucket_bytes=0),
        Network(up=[1e6, 2e6], down="3 Mbit/s", latency=[0.1, 0.2], all_gather="server", server_bandwidth=1e7),
    ],
)
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("compute", [Compute(0.1, overlap=False), Compute([0.1, 0.3], shares={"first.weight": 3.0})])
def test_a_file_has_the_network_and_the_ledger(network: Network, compute: Compute) -> None:
    trainer = fit(network=network, compute=compute)
    trainer.save("a.pt")
    saved = vecgym.load("a.pt")
    assert list(saved.ledger) == list(trainer.ledger)
    assert repr(trainer.timeline(network, compute)) in report(Path("a.pt")).said("p")
    expected = {"network": vars(network), "compute": vars(compute)}
    assert repr(saved.clock) == repr(expected)


@pytest.mark.usefixtures("undrawn")
def test_a_compute_of_ones_own_is_not_in_the_file(folder: Path) -> None:
    class Mine(Compute):
        pass

    mine = Mine(0.1)
    mine.why = object()  # type: ignore[attr-defined]
    fit(network=Network(1e6), compute=mine, save_dir="a")
    assert vecgym.load("a").clock == {}
    assert "Timeline" in report(folder / "a").said("h3")


@pytest.mark.usefixtures("undrawn")
def test_a_file_of_an_earlier_version(folder: Path) -> None:
    fit().save("a.pt")
    contents = torch.load("a.pt", weights_only=True)
    del contents["ledger"], contents["clock"], contents["settings"]["environment"]
    torch.save(contents, "a.pt")
    page = report(folder / "a.pt")
    assert "fit(save_dir=)" in " ".join(page.said("p"))
    assert len(vecgym.load("a.pt").ledger) == 0


# ----------------------------------------------------------------------------------------------------------- mistakes


def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    Path("a.pt").write_bytes(b"no file of vecgym")
    Path("a.txt").write_text("a")
    fit(save_dir="untrained").history.rows.clear()
    for path in checkpoints_in("untrained")[1:]:
        path.unlink()
    for run, message in (
        ("nowhere", "nowhere holds no run: there is neither a history.csv"),
        ("empty", "empty holds no run: there is neither a history.csv"),
        ("a.pt", "a.pt is damaged, or not a file of vecgym"),
        ("a.txt", "a.txt is damaged, or not a file of vecgym"),
        ("untrained", "has no step to plot: train at least one."),
    ):
        assert main(["report", run, "--output", "report.html"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("vecgym report: error: ")
        assert message in error
        assert error.count("\n") == 1
    assert not Path("report.html").exists()


# ------------------------------------------------------------------------------------------------------------- safety


def evil_run(folder: Path) -> Path:
    """A run whose names are HTML: strategy, folder, metric, network."""
    model = make_model("MLP")
    model.loss_metrics = {EVIL: lambda loss: 2 * loss}  # type: ignore[assignment]
    strategy = type(EVIL, (DiLoCoStrategy,), {})("sgd", H=3, lr=0.1)
    # A name of a file cannot have a slash.
    run = folder / "<img src=x onerror=alert(1)> $\\frac$ & \"'"
    trainer = Trainer(model, dataset("MLP"), dataset("MLP"))
    fit(strategy, trainer, logger=CSVLogger(run), save_dir=run, network=NETWORK, compute=COMPUTE)
    config = run / "config.json"
    config.write_text(config.read_text().replace('"seed": 42', f'"{EVIL}": "</table><a href=http://a.b>", "seed": 42'))
    for path in checkpoints_in(run):
        path.unlink()
    return run


def test_everything_is_escaped(folder: Path) -> None:
    page = report(evil_run(folder), title=f"</title>{EVIL}")
    assert {name for name, _ in page.elements} <= TAGS
    assert page.said("title") == page.said("h1") == [f"</title>{EVIL}"]
    assert EVIL in {cell for rows in page.tables for row in rows for cell in row} | {*page.said("code")}
    assert f"val_{EVIL}" in page.tables[1][0]
    assert [EVIL, "</table><a href=http://a.b>"] in page.tables[-1]


@pytest.mark.usefixtures("undrawn")
def test_nothing_is_loaded(folder: Path) -> None:
    page = report(evil_run(folder))
    for name, attributes in page.elements:
        assert not [key for key in attributes if key.startswith("on")]
        for key in ("src", "href", "srcset", "action", "style"):
            value = attributes.get(key) or "#"
            assert value.startswith(("#", "data:image/png;base64,")), (name, key, value)
    styles = "".join(page.said("style"))
    assert not re.search("url|@import|http", styles)
    policies = [x["content"] for name, x in page.elements if x.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_tags() -> None:
    assert tag("a", "<", tag("b", '"'), href='"><script>') == (
        '<a href="&quot;&gt;&lt;script&gt;">&lt;<b>&quot;</b></a>'
    )
    assert "<td>&lt;b&gt;</td>" in table(["<i>"], [["<b>"]])
    assert "<th>&lt;i&gt;</th>" in table(["<i>"], [["<b>"]])


# ----------------------------------------------------------------------------------------------------------- browser


@pytest.mark.parametrize("width", [1280, 480])
def test_in_a_browser(browser: Browser, folder: Path, width: int) -> None:
    for H in (2, 4):
        fit(DiLoCoStrategy("sgd", H=H, lr=0.1), save_dir=f"runs/H={H}", network=NETWORK, compute=COMPUTE)
    assert main(["report", "runs", str(evil_run(folder)), "--output", "report.html"]) == 0
    browser.open(Path("report.html"), width=width)
    assert browser.errors == []
    assert browser.evaluate("document.title") == "3 runs"
    assert browser.evaluate("document.scripts.length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") <= width  # wide tables scroll by themselves
    images = browser.evaluate("[...document.images].map(x => [x.complete, x.naturalWidth, x.alt])")
    assert len(images) == 5
    assert all(complete and pixels > 500 and alt for complete, pixels, alt in images)
    assert browser.evaluate("[...document.images].every(x => x.width >= 700)"), "too small to read"
    assert (
        browser.evaluate("performance.getEntriesByType('resource').filter(x => !x.name.startsWith('data:')).length")
        == 0
    )
    for link in browser.evaluate("[...document.links].map(x => x.getAttribute('href'))"):
        assert browser.evaluate(f"document.querySelector('{link}') !== null")
