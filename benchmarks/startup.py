"""The time until vecgym is there: processor seconds beyond `import torch`, in fresh interpreters that take turns.

A copy of the package is compiled once, as `pip install` does it; "uncompiled" is the first import of a checkout, and
every import where `PYTHONDONTWRITEBYTECODE` is set. "garbage" is the part in which Python looks through the objects
that torch has made, which it does at some moment after `import torch` anyway. All together take about two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from workloads import header, machine, markdown

PACKAGE = Path(__file__).parent.parent / "vecgym"
TRAINER, UNCOMPILED = "Trainer, DiLoCoStrategy", "the same, uncompiled"
NEEDED = "from vecgym import Trainer; from vecgym.strategy import DiLoCoStrategy"
IMPORTS = {
    "import vecgym": "import vecgym",
    TRAINER: NEEDED,
    UNCOMPILED: NEEDED,
    "vecgym price": "import vecgym.cli; from vecgym.clock import price_strategies",
    "every public name": "from vecgym import *",
}
TARGET_S = {TRAINER: 0.2}
MEASURED = """if True:
    import gc, json, sys, time
    import torch
    began, spent = [0.0], [0.0]
    def note(phase, info):
        if phase == "start":
            began[0] = time.process_time()
        else:
            spent[0] += time.process_time() - began[0]
    gc.callbacks.append(note)
    before, start = set(sys.modules), time.process_time()
    exec(sys.argv[1])
    seconds, new = time.process_time() - start, set(sys.modules) - before
    ours = sum(name.split(".")[0] == "vecgym" for name in new)
    print(json.dumps({"seconds": seconds, "garbage": spent[0], "modules": ours, "others": len(new) - ours}))
"""


def measure(rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """The medians of each import; who comes first changes from round to round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in IMPORTS}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("compiled", "uncompiled"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PACKAGE, Path(folder) / kind / "vecgym", ignore=ignored)
        subprocess.run([sys.executable, "-m", "compileall", "-q", f"{folder}/compiled"], check=True)
        for number in range(rounds):
            first = number % len(IMPORTS)
            for name in [*IMPORTS][first:] + [*IMPORTS][:first]:
                place = f"{folder}/{'uncompiled' if name == UNCOMPILED else 'compiled'}"
                said = {"PYTHONPATH": place, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": str(threads)}
                command = [sys.executable, "-c", MEASURED, IMPORTS[name]]
                environment = {**os.environ, **said}
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, cwd=place)
                found[name].append(json.loads(done.stdout))
    return {
        name: {figure: statistics.median(x[figure] for x in figures) for figure in figures[0]}
        for name, figures in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")
    parser.add_argument("--quick", action="store_true", help="one round")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = measure(1 if args.quick else args.rounds, args.threads)
    print(header())
    rows = [
        [
            name,
            f"{x['seconds']:.3f}",
            f"{x['garbage']:.3f}",
            f"{x['modules']:.0f}",
            f"{x['others']:.0f}",
            str(TARGET_S.get(name, "")),
        ]
        for name, x in found.items()
    ]
    print(markdown(["after `import torch`", "CPU seconds", "of which garbage", "modules", "others'", "target"], rows))
    if args.json:
        result: dict[str, Any] = {"machine": machine(), "imports": found}
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
