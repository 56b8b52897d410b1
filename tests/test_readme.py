"""The Python of the README runs, and what the README links to exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tests.test_floors import FLOORS
from vecgym.strategy import CommunicationModule

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_code_blocks_run_in_order(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where what they write goes
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    assert "```py\n" not in TEXT, "every block of Python runs"
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict[str, object] = {"__name__": "readme"}
    for i, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {i}", "exec"), namespace)
    assert namespace["trainer"].nodes.num_nodes == 64  # type: ignore[attr-defined]


def test_links_and_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_links_to_sections_lead_somewhere() -> None:
    """... under the names that GitHub gives them, and the contents have every section."""
    sections = re.findall(r"^##+ (.*)", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL), re.MULTILINE)
    names = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in sections}
    linked = set(re.findall(r"\]\(#([^)]+)\)", TEXT))
    assert linked <= names
    contents = re.search(r"^On this page: .*?\n\n", TEXT, re.MULTILINE | re.DOTALL)
    assert contents is not None
    assert re.findall(r"\[([^]]+)\]", contents[0]) == re.findall(r"^## (.*)", TEXT, re.MULTILINE)


def test_figures_are_described_and_small() -> None:
    figures = re.findall(r"^!\[(.*)\]\((.*)\)$", TEXT, re.MULTILINE)
    assert [Path(path).stem for _, path in figures] == ["compare", "sweep", "schedule", "equivalence", "shakespeare"]
    for about, path in figures:
        data = (ROOT / path).read_bytes()
        assert len(about) > 40, path
        assert len(data) < 80_000, path
        assert int.from_bytes(data[16:20], "big") == 900, path  # the width, in the first chunk of a PNG


def test_the_floors_are_those_that_are_tested() -> None:
    rows = re.findall(r"^\| (\d) \| (.*) \|$", TEXT.split("\n## Architecture\n")[1].split("\n## ")[0], re.MULTILINE)
    named = [{name.rstrip("/") for name in re.findall(r"`(\w+/?)`", modules)} for _, modules in rows]
    assert named == [set(names.split()) for names in FLOORS if names != "__main__"]


CONTRIBUTING = TEXT.split("\n## Contributing\n")[1].split("\n## ")[0]


def test_the_contract_has_every_method() -> None:
    methods = dict(inspect.getmembers(CommunicationModule, inspect.isfunction))
    public = {name: list(inspect.signature(f).parameters)[1:] for name, f in methods.items() if name[0] != "_"}
    table = CONTRIBUTING.split("### The contract")[1].split("\n\n")[2]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = {name: args.split(", ") for name, args in re.findall(r"`(\w+)\((.*?)\)`", " ".join(cells))}
    assert named == {name: args or [""] for name, args in public.items()}


def test_where_to_add_what_exists() -> None:
    """Every file that the section names, but for those that are to be written."""
    paths = re.findall(r"`([\w.]+/[\w./]+)`", CONTRIBUTING)
    assert len(paths) > 25
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []
    for name, path in re.findall(r"`([A-Z]+)` (?:in|of) `([\w./]+)`", CONTRIBUTING):
        assert re.search(rf"^{name}\b", (ROOT / path).read_text(), re.MULTILINE), f"{name} is not in {path}"
