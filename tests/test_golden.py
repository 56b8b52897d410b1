"""Short runs of everything give what they gave before; see `tests.golden`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import golden

TOLERANCE = {"float32": 1e-4, "float64": 1e-9}  # relative, on another processor


def test_the_traces_are_those_of_before() -> None:
    """To the bit on the processor that wrote them; elsewhere kernels of other libraries may round in another way."""
    environment = {**os.environ, **golden.PORTABLE}
    done = subprocess.run([sys.executable, "-m", "tests.golden"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found, expected = json.loads(done.stdout), json.loads(golden.FILE.read_text())
    assert found["traces"].keys() == expected["traces"].keys()
    exact = found["processor"] == expected["processor"]
    wrong = []
    for name, trace in expected["traces"].items():
        new = found["traces"][name]
        if exact and new != trace:
            wrong.append(f"{name}: {[key for key in trace if new[key] != trace[key]]}")
        relative = TOLERANCE["float32" if "float32" in name else "float64"]
        if new["bytes"] != trace["bytes"] or new["norms"] != pytest.approx(trace["norms"], rel=relative):
            wrong.append(f"{name}: bytes {new['bytes']} for {trace['bytes']}, or parameters far from before")
    assert not wrong, "python -m tests.golden --write, and explain in CHANGELOG:\n" + "\n".join(wrong)
