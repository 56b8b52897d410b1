"""The Python of README and notebooks runs, and what the README links to exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_code_blocks_run_in_order(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where what they write goes
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict[str, object] = {"__name__": "readme"}
    for i, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {i}", "exec"), namespace)
    assert namespace["trainer"].nodes.num_nodes == 8  # type: ignore[attr-defined]


def test_links_and_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_the_quick_start_notebook_runs() -> None:
    cells = json.loads((ROOT / "notebooks" / "quick_start.ipynb").read_text())["cells"]
    namespace: dict[str, object] = {"__name__": "notebook"}
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {i}", "exec"), namespace)
    histories: dict = namespace["histories"]  # type: ignore[assignment]
    assert set(histories) == {"allreduce", "fedavg", "diloco"}
    for history in histories.values():
        assert history.last("val_loss") < history.series("val_loss")[1][0]
