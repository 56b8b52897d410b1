"""Short runs of everything give what they gave before; see `tests.golden`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests import golden

TOLERANCE = {"float32": 1e-4, "float64": 1e-9}  # relative, with another processor or torch


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """To the bit with the processor and torch that wrote them; others may round in another way."""
    exact = found["computed_by"] == expected["computed_by"]
    wrong = []
    for name, new in found["traces"].items():
        trace = expected["traces"][name]
        if exact and new != trace:
            wrong.append(f"{name}: {[key for key in trace if new[key] != trace[key]]}")
        relative = TOLERANCE["float32" if "float32" in name else "float64"]
        if new["bytes"] != trace["bytes"] or new["norms"] != pytest.approx(trace["norms"], rel=relative):
            wrong.append(f"{name}: bytes {new['bytes']} for {trace['bytes']}, or parameters far from before")
    return wrong


@pytest.mark.parametrize("share", range(1, golden.SHARES + 1))
def test_the_traces_are_those_of_before(share: int) -> None:
    environment = {**os.environ, **golden.PORTABLE}
    command = [sys.executable, "-m", "tests.golden", "--share", str(share)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found, expected = json.loads(done.stdout), json.loads(golden.FILE.read_text())
    assert list(found["traces"]) == list(expected["traces"])[share - 1 :: golden.SHARES]
    wrong = differences(found, expected)
    assert not wrong, "python -m tests.golden --write, and explain in CHANGELOG:\n" + "\n".join(wrong)


@pytest.mark.parametrize("other", [{}, {"processor": "another"}, {"torch": "2.6.0"}], ids=str)
def test_bits_are_compared_with_the_same_processor_and_torch(other: dict[str, str]) -> None:
    before = {"losses": "6388fcc8", "params": "e685bfc6", "bytes": 64.0, "last_loss": 1.5, "norms": [1.0, 2.0]}
    expected = {"computed_by": golden.computed_by(), "traces": {"fit float64": before}}

    def with_(**changed: Any) -> list[str]:
        found = {"computed_by": golden.computed_by() | other, "traces": {"fit float64": before | changed}}
        return differences(found, expected)

    assert not with_()
    assert bool(with_(params="00000000")) == (not other)
    assert with_(norms=[1.0, 2.0001])
    assert with_(bytes=65.0)
