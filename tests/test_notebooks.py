"""The notebooks are committed as a clean kernel left them; `.ci/notebooks` executes them, here they are looked at."""

from __future__ import annotations

import ast
import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = [
    "1_quick_start",
    "2_sweep",
    "3_differentiable_schedules",
    "4_equivalence",
    "5_new_algorithm",
    "6_federated_digits",
    "7_how_long_on_my_network",
    "8_stragglers",
    "9_learning_how_to_communicate",
    "10_unlike_data_and_liars",
]
PERSONAL = ("/root", "/home/", "/Users/", "/tmp/", "C:\\", "site-packages", 'File "/')


def cells(name: str, kind: str) -> list[dict[str, Any]]:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def problems(code: list[dict[str, Any]]) -> list[str]:
    """Strings that must not be in the outputs of code cells."""
    found = []
    if [cell["execution_count"] for cell in code] != list(range(1, len(code) + 1)):
        found.append("not executed once, from top to bottom")
    outputs = [output for cell in code for output in cell["outputs"]]
    if not any("image/png" in output.get("data", {}) for output in outputs):
        found.append("no figure")
    for output in outputs:
        if output["output_type"] == "error" or output.get("name") == "stderr":
            found.append(f"an error or warning: {json.dumps(output)[:200]}")
        data = {mime: text for mime, text in output.get("data", {}).items() if mime != "image/png"}
        text = json.dumps([data, output.get("text", "")], ensure_ascii=False)
        found += [f"{word!r} in {text[:200]}" for word in (*PERSONAL, platform.node()) if word and word in text]
        found += ["a progress bar"] if re.search(r"[\d?]it/s", text) or "\\r" in text else []
    return found


def test_these_are_the_notebooks() -> None:
    assert {path.stem for path in FOLDER.iterdir() if path.suffix == ".ipynb"} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_with_its_outputs(name: str) -> None:
    code = cells(name, "code")
    assert problems(code) == []
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 400_000
    assert cells(name, "markdown")[0]["source"][0].startswith("# ")
    for cell in code:
        ast.parse("".join(cell["source"]))


def test_the_check_can_fail() -> None:
    def cell(number: int, **output: Any) -> dict[str, Any]:
        return {"execution_count": number, "outputs": [output] if output else []}

    def text(value: str, name: str = "stdout") -> dict[str, Any]:
        return cell(2, output_type="stream", name=name, text=[value])

    figure = cell(1, output_type="display_data", data={"image/png": "/root"})
    assert problems([figure, text("all is well")]) == []
    assert problems([text("all is well")]) == ["not executed once, from top to bottom", "no figure"]
    for wrong in (
        text("/root/x.py"), text(f"on {platform.node()}"), text("a warning", "stderr"), text("100 [00:01, 90it/s]"),
        cell(2, output_type="error", ename="ValueError", evalue="", traceback=[]),
    ):  # fmt: skip
        assert len(problems([figure, wrong])) == 1
