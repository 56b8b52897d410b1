"""README and guide: their Python runs, what they link to exists, and their tables are those of the code.

The `>>>` examples of the guide are doctests of its modules. A block of Python in it is a whole file, and runs here.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import vecgym
from tests.test_floors import FLOORS
from vecgym.simulation import Part
from vecgym.strategy import Memory, Stage, Strategy

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDE = {name: getattr(vecgym.guide, name).__doc__ for name in vecgym.guide.__all__}
TEXTS = {"README": README, **GUIDE}


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.hf) if name == "hugging_face" else name


@pytest.mark.parametrize("name", [marked(name) for name, text in TEXTS.items() if python_blocks(text)])
def test_code_blocks_run_in_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where what they write goes
    for module in re.findall(
        r"^(?:import|from) (optuna|transformers)\b", "".join(python_blocks(TEXTS[name])), re.MULTILINE
    ):
        extra = {"transformers": "hf"}.get(module, module)
        pytest.importorskip(module, reason=f"{module} is an extra: pip install vecgym[{extra}]")
    namespace: dict[str, object] = {"__name__": name.lower()}
    for i, block in enumerate(python_blocks(TEXTS[name])):
        exec(compile(block, f"{name}, block {i}", "exec"), namespace)
    if name == "README":
        assert namespace["trainer"].nodes.num_nodes == 16  # type: ignore[attr-defined]


def test_every_block_of_python_runs() -> None:
    assert len(python_blocks(README)) >= 4
    assert "```py\n" not in "".join(TEXTS.values())
    assert sum(text.count(">>> ") for text in GUIDE.values()) > 100
    assert not [name for name, text in GUIDE.items() if "+SKIP" in text]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 250
    assert max(map(len, README.splitlines())) <= 200


def test_twelve_lines_are_twelve() -> None:
    [block] = python_blocks(README.split("\n## Twelve lines\n")[1].split("\n## ")[0])
    assert len([line for line in block.splitlines() if line]) == 12


@pytest.mark.parametrize("name", GUIDE)
def test_a_page_of_the_guide_is_one_docstring_with_a_title(name: str) -> None:
    source = (ROOT / "vecgym" / "guide" / f"{name}.py").read_text()
    assert [type(statement) for statement in ast.parse(source).body] == [ast.Expr]
    title, empty, *_ = GUIDE[name].splitlines()
    assert ": " in title
    assert not empty


def test_every_page_is_in_the_contents() -> None:
    """... of the guide, and of the README, which link to it."""
    pages = sorted(path.stem for path in (ROOT / "vecgym" / "guide").glob("*.py") if path.stem != "__init__")
    assert sorted(GUIDE) == pages
    assert sorted(re.findall(r"^- `vecgym\.guide\.(\w+)`: ", vecgym.guide.__doc__ or "", re.MULTILINE)) == pages
    table = README.split("\n## Guide\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \[(\w+)\]\(vecgym/guide/(\w+)\.py\) \|", table, re.MULTILINE)
    assert sorted(rows) == [(page, page) for page in pages]


# --------------------------------------------------------------------------------------------------------------- links


@pytest.fixture(scope="module")
def check_links() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_links", ROOT / ".ci" / "check_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_readme_lead_somewhere(check_links: ModuleType) -> None:
    """To files, and to sections under the names that GitHub gives them."""
    assert list(check_links.broken_in_markdown(ROOT / "README.md")) == []
    assert README.count("](") > 40


def test_the_contents_have_every_section() -> None:
    contents = re.search(r"^On this page: .*?\n\n", README, re.MULTILINE | re.DOTALL)
    assert contents is not None
    assert re.findall(r"\[([^]]+)\]", contents[0]) == re.findall(r"^## (.*)", README, re.MULTILINE)


def test_broken_links_are_found(check_links: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="#top"></a><a href="sub/page.html#there"></a><a href="https://example.org/x"></a>'
        '<a href="#nowhere"></a><a href="none.html"></a><a href="sub/page.html#not"></a><img src="none.png">'
    )
    (tmp_path / "sub" / "page.html").write_text('<p id="there"></p><a href="../index.html"></a>')
    assert [line.split(": ")[1] for line in check_links.broken_in_site(tmp_path)] == [
        "#nowhere", "none.html", "sub/page.html#not", "none.png",
    ]  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text(
        "# EXO Gym's `x`\n[1](#exo-gyms-x) [2](sub) [3](#nowhere) [4](none.md) ![5](none.png)\n```\n[6](no)\n```\n"
    )
    assert [line.split(": ")[1] for line in check_links.broken_in_markdown(page)] == ["#nowhere", "none.md", "none.png"]
    command = [sys.executable, str(ROOT / ".ci" / "check_links.py"), str(tmp_path), str(page)]
    assert subprocess.run(command, capture_output=True).returncode == 1


def test_a_site_without_pages_is_no_site(check_links: ModuleType, tmp_path: Path) -> None:
    assert list(check_links.broken_in_site(tmp_path)) != []


def test_figures_are_described_and_small() -> None:
    folders = {"README": ROOT}
    figures = [
        (about, (folders.get(name, ROOT / "vecgym" / "guide") / path).resolve())
        for name, text in TEXTS.items()
        for about, path in re.findall(r"^!\[(.*)\]\((.*)\)$", text, re.MULTILINE)
    ]
    assert sorted(path.stem for _, path in figures) == [
        "atlas", "compare", "equal_time", "equivalence", "goodput", "meta", "price", "reproductions", "rings",
        "scaling", "schedule", "shakespeare", "sweep",
    ]  # fmt: skip
    for about, path in figures:
        data = path.read_bytes()
        assert len(about) > 40, path
        assert len(data) < 80_000, path
        assert int.from_bytes(data[16:20], "big") == 900, path  # the width, in the first chunk of a PNG


# -------------------------------------------------------------------------------------------------------------- tables


def test_the_floors_are_those_that_are_tested() -> None:
    section = GUIDE["contributing"].split("\n## Floors\n")[1].split("\n## ")[0]
    rows = re.findall(r"^ ?(\d+) \| ([a-z_ ]+) \| ", section, re.MULTILINE)
    floors = [{name for name in names.split() if "." not in name} for names in FLOORS if names != "__main__"]
    floors = [names for names in floors if names]  # single modules have no row
    assert [int(floor) for floor, _ in rows] == list(reversed(range(len(floors))))
    assert [set(names.split()) for _, names in reversed(rows)] == floors


def test_the_contract_names_what_there_is() -> None:
    """Methods with their arguments; of a `Part` and a `Memory` every attribute."""
    text = GUIDE["writing_a_strategy"].split("## The contract\n")[1]
    tables = dict(re.findall(r"^\| .*?of .*?`(\w+)` \|.*?\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE))
    assert tables.keys() == {"Strategy", "Stage", "Part"}
    for cls in (Strategy, Stage):  # a stage has every method of an average
        cells = " ".join(re.findall(r"^\| (`.*?) \|", tables[cls.__name__], re.MULTILINE))
        named = {name: args.split(", ") for name, args in re.findall(r"`(\w+)\((.*?)\)`", cells)}
        methods = {name: list(inspect.signature(getattr(cls, name)).parameters)[1:] for name in named}
        assert named == {name: args or [""] for name, args in methods.items()}
        assert len(named) > 5
    shown = set(re.findall(r"`[Pp]art\.(\w+)", tables["Part"]))
    made = set(re.findall(r"self\.(\w+)", inspect.getsource(Part.__init__)))
    internal = {"check_reads", "next_batch", "num_read", "place", "precomputed", "put", "read_at", "stays"}
    assert public({*dir(Part), *made}) == shown | internal | {"share_missing", "simulation"}
    assert public(dir(Memory())) == set(re.findall(r"`memory\.(\w+)", GUIDE["writing_a_strategy"]))


def public(names: Iterable[str]) -> set[str]:
    return {name for name in names if name[0] != "_"}


def test_where_to_add_what_exists() -> None:
    """Every file that the guide names, but for those that are to be written or belong to other programs."""
    text = GUIDE["contributing"] + GUIDE["writing_a_strategy"]
    paths = re.findall(r"`([\w.]+/[\w./]+)`", text)
    assert len(paths) > 25
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []
    for name, path in re.findall(r"`([A-Z]+)` (?:in|of) `([\w./]+)`", text):
        assert re.search(rf"^{name}\b", (ROOT / path).read_text(), re.MULTILINE), f"{name} is not in {path}"


def test_scripts_that_the_texts_name_exist() -> None:
    scripts = re.findall(r"\b((?:benchmarks|notebooks)/\w+\.(?:py|ipynb))", "".join(TEXTS.values()))
    assert len(set(scripts)) > 15
    assert [path for path in scripts if path != "benchmarks/NAME.py" and not (ROOT / path).exists()] == []
