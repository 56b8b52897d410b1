"""Damaged and hostile files: a good file of every kind that vecgym reads, damaged in a random way, then read.

What may come of it: the same numbers, bit for bit, as with the good file (where a checkpoint cannot be read: from the
next older one, or from the start, with a warning); or an error that is allowed and names the file. Never wrong numbers,
another error, a hang, or anything executed that a file holds (a configuration apart, which is a program).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import os
import pickle
import random
import shutil
import socket
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import vecgym
from tests.fuzz import calls
from tests.fuzz.common import Case, Failure, Outcome, Refusal, time_limit
from tests.fuzz.place import a_new_folder, as_it_was
from tests.helpers import OneRank
from vecgym import cli
from vecgym.data import text
from vecgym.logger import CSVLogger, read_csv
from vecgym.records.columns import MEASURED
from vecgym.records.history import History
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, FedAvgStrategy, Strategy

NAME = "files"
LIMIT_S = 5.0
STEPS, SAVED = 4, 3  # of the run, and up to which there are checkpoints
MARK = "executed"  # the folder that a malicious file would make

# ------------------------------------------------------------------------------------------------- runs that save


class WithBuffer(nn.Module):
    """Counts what it has seen; half of it is not trained."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(3.0))
        self.shift = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.add_(len(x))
        return (self.w - x + self.shift).square().mean()


RUNS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Strategy]]] = {
    "DiLoCo": (calls.Line, lambda: DiLoCoStrategy("adamw", H=2, lr=0.1)),
    "DDP": (WithBuffer, lambda: AllReduceStrategy("adam", lr=0.1)),
    "FedAvg": (WithBuffer, lambda: FedAvgStrategy("sgd", H=2, participation=0.5, server_optim="adam", lr=0.1)),
    "one rank": (calls.Line, lambda: OneRank(torch.optim.ASGD, lr=0.1)),
}


def train(run: str, **settings: Any) -> vecgym.Trainer:
    model, strategy = RUNS[run]
    trainer = vecgym.Trainer(model(), calls.examples(), calls.examples(4))
    given = {**calls.SETTINGS, "max_steps": STEPS, "val_interval": 2, **settings}
    trainer.fit(strategy(), calls.K, **given)
    return trainer


def sweep(path: Path | None = None) -> vecgym.SweepResult:
    return vecgym.sweep(
        calls.Line(), calls.examples(), calls.examples(4), resume=path, num_nodes=calls.K,
        strategy=lambda H, lr: DiLoCoStrategy("sgd", H=H, lr=lr), grid={"H": [1, 2], "lr": [0.1, 0.2]},
        **calls.SETTINGS,
    )  # fmt: skip


def numbers(value: Any) -> Any:
    """The common part of two equal runs, in a form that `==` compares bit for bit."""
    if isinstance(value, vecgym.Trainer):
        tensors = {**value.nodes.params, **value.nodes.buffers}
        return numbers([tensors, value.history, value.ledger.state()])
    if isinstance(value, vecgym.SweepResult):
        return numbers([*value.rows, *(value.history(i) for i in range(len(value.rows)))])
    if isinstance(value, vecgym.Saved):
        return numbers([value.step, value.num_nodes, value.history, value.params, value.buffers, value.average,
                        [value.node(i) for i in range(value.num_nodes)]])  # fmt: skip
    if isinstance(value, History):
        return numbers([{name: x for name, x in row.items() if name not in MEASURED} for row in value])
    if isinstance(value, dict):
        return {name: numbers(x) for name, x in value.items() if name not in MEASURED}
    if isinstance(value, (list, tuple)):
        return [numbers(x) for x in value]
    if isinstance(value, (Tensor, np.ndarray)):
        array = value.detach().numpy() if isinstance(value, Tensor) else value
        return str(array.dtype), array.shape, array.tobytes()
    return struct.pack("d", value) if isinstance(value, float) else value


CONFIG = """
import torch
from tests.fuzz.calls import Line, examples
from vecgym.strategy import FedAvgStrategy


def config(lr=0.1):
    return {"model": Line(), "train_dataset": examples(), "strategy": FedAvgStrategy("sgd", lr=lr), "num_nodes": 2,
            "max_steps": 1, "batch_size": 2, "device": "cpu", "progress": False}
"""


@functools.cache
def good_files() -> Path:
    """A folder of all good files, made once in each process and removed at its end."""
    holder = tempfile.TemporaryDirectory(prefix="vecgym-fuzz-good-")
    good_files.holder = holder  # type: ignore[attr-defined]  # as long as the process lives
    folder = Path(holder.name)
    for run in RUNS:
        where = folder / "checkpoints" / run
        trainer = train(run, save_dir=where, checkpoint_interval=1, keep_checkpoints=99)
        trainer.save(folder / "run" / f"{run}.pt")
        (where / f"step-{STEPS:09d}.pt").unlink()
        logger = CSVLogger(folder / "csv" / run)
        train(run, logger=logger)
    (folder / "sweep").mkdir()
    sweep(folder / "sweep" / "sweep.pt")
    (folder / "config").mkdir()
    (folder / "config" / "config.py").write_text(CONFIG)
    (folder / "text").mkdir()
    (folder / "text" / "text.txt").write_text("Damage shows in many ways. " * 100)
    (folder / "state").mkdir()
    torch.save(nn.Linear(calls.DIM, 1).state_dict(), folder / "state" / "state.pt")
    return folder


# ------------------------------------------------------------------------------------------------------- readers


def read_resume(file: Path, run: str) -> Any:
    return train(run, save_dir=file.parent, resume=True, checkpoint_interval=1, keep_checkpoints=99)


def read_resume_by_name(file: Path, run: str) -> Any:
    return train(run, resume=file)


def read_resume_in_processes(file: Path, run: str) -> Any:
    return train(run, resume=file, backend="processes", num_processes=2, exact=True, timeout_s=LIMIT_S)


def read_load(file: Path, run: str) -> Any:
    return vecgym.load(file)


def read_sweep(file: Path, run: str) -> Any:
    return sweep(file)


def read_history(file: Path, run: str) -> Any:
    return read_csv(file.parent)


def read_plot(file: Path, run: str) -> Any:
    return command("plot", str(file.parent), "--output", "plot.png")


def read_config(file: Path, run: str) -> Any:
    return command("run", str(file), "--output", "out", "--no-progress")


def read_text(file: Path, run: str) -> Any:
    return text.read_text(file)


def read_state(file: Path, run: str) -> Any:
    simulator = calls.simulator()
    simulator.load_model(file)
    return dict(simulator.master_model.state_dict())


class Refused(Exception):
    """A command said no, in one line."""


def command(*argv: str) -> int:
    """The command `vecgym`, without what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(argv)
        except SystemExit as stop:
            code = 2 if stop.code == 2 else 0
    if code:
        raise Refused(err.getvalue().strip() or f"exit code {code}")
    return code


READERS: dict[str, tuple[str, Callable[[Path, str], Any]]] = {
    # what reads -> the kind of file, and how
    "resume": ("checkpoints", read_resume),
    "resume by name": ("checkpoints", read_resume_by_name),
    "resume in processes": ("checkpoints", read_resume_in_processes),
    "load": ("run", read_load),
    "load a checkpoint": ("checkpoints", read_load),
    "sweep": ("sweep", read_sweep),
    "read_csv": ("csv", read_history),
    "vecgym plot": ("csv", read_plot),
    "vecgym run": ("config", read_config),
    "read_text": ("text", read_text),
    "load_model": ("state", read_state),
}
ALLOWED = (ValueError, TypeError, FileNotFoundError, OSError, Refused)


def victims(kind: str, folder: Path, run: str, draw: random.Random) -> Path:
    """The file to damage: of several of a kind, one that is read."""
    if kind == "checkpoints":
        return folder / f"step-{SAVED:09d}.pt"
    if kind == "run":
        return folder / f"{run}.pt"
    if kind == "csv":
        return folder / draw.choice(["history.csv", "history.csv", "train_losses.csv", "val_losses.csv", "config.json"])
    return next(folder.iterdir())


@functools.cache
def expected(reader: str, run: str) -> Any:
    """The result of the good file; of checkpoints, that of the run that was never interrupted."""
    kind, read = READERS[reader]
    if reader in ("resume", "resume by name"):
        return numbers(train(run))
    if reader == "resume in processes":
        return numbers(train(run, exact=True))
    if reader == "sweep":
        return numbers(sweep())
    with a_new_folder(), as_it_was():
        file = copied(kind, run)
        return numbers(read(victims(kind, file, run, random.Random(0)), run))


def copied(kind: str, run: str) -> Path:
    """A copy of the good files of a kind, here."""
    source = good_files() / kind
    source = source / run if kind in ("checkpoints", "csv") else source
    return Path(shutil.copytree(source, Path("files").absolute()))


# ------------------------------------------------------------------------------------------- damage to any file


def truncated(file: Path, draw: random.Random) -> None:
    size = file.stat().st_size
    os.truncate(file, draw.choice([0, 1, size - 1, draw.randrange(size)]))


def flipped(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 2, 8, 100])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def zeroed(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    start = draw.randrange(len(data))
    length = min(draw.choice([1, 16, 512, 4096, len(data)]), len(data) - start)
    data[start : start + length] = bytes(length)
    file.write_bytes(data)


def swapped(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    cuts = sorted(draw.randrange(len(data)) for _ in range(3))
    a, b, c = cuts
    file.write_bytes(data[:a] + data[b:c] + data[a:b] + data[c:])


def appended(file: Path, draw: random.Random) -> None:
    with file.open("ab") as out:
        out.write(draw.choice([b"\0", b"x", b"\n", draw.randbytes(1000), file.read_bytes()]))


def garbage(file: Path, draw: random.Random) -> None:
    kinds = [
        b"\0" * 1000, draw.randbytes(3000), b"PK\x03\x04" + draw.randbytes(100), b"\n" * 9, b"\x80\x05.",
        b"\xff\xfe" + "text".encode("utf-16-le"), b"PK\x05\x06" + bytes(18),
    ]  # fmt: skip
    file.write_bytes(draw.choice(kinds))


def removed(file: Path, draw: random.Random) -> None:
    file.unlink()


def directory(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.mkdir()
    if draw.random() < 0.5:
        (file / "x").write_text("x")


def fifo(file: Path, draw: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def linked(file: Path, draw: random.Random) -> None:
    file.unlink()
    target = draw.choice(
        ["gone", file.name, "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", ".", "/dev/stdin"]
    )
    file.symlink_to(target)


def a_socket(file: Path, draw: random.Random) -> None:
    file.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(file.parent)  # a socket's path must be short
        listener.bind(file.name)
        os.chdir("..")


def other_kind(file: Path, draw: random.Random) -> None:
    others = [path for path in sorted(good_files().rglob("*.*")) if path.is_file() and path.name != file.name]
    shutil.copyfile(draw.choice(others), file)


def of_another_run(file: Path, draw: random.Random) -> None:
    others = sorted(path for path in good_files().rglob(file.name) if path.is_file())
    shutil.copyfile(draw.choice(others), file)


def sparse(file: Path, draw: random.Random) -> None:
    os.truncate(file, draw.choice([1 << 31, 1 << 33]))


ANY: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": truncated, "flipped": flipped, "zeroed": zeroed, "swapped": swapped, "appended": appended,
    "garbage": garbage, "removed": removed, "a directory": directory, "a FIFO": fifo, "a link": linked,
    "a socket": a_socket, "of another kind": other_kind, "of another run": of_another_run, "huge": sparse,
}  # fmt: skip

# ------------------------------------------------------------------------------------- damage to what torch saves


class Malicious:
    """Makes a folder, were it ever unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def malicious(file: Path, draw: random.Random) -> None:
    bad = Malicious(os.mkdir, str(Path(MARK).absolute()))
    if draw.random() < 0.3:
        bad = Malicious(eval, f"__import__('os').mkdir({str(Path(MARK).absolute())!r})")
    how = draw.choice(["bare", "inside", "protocol 0", "with torch", "old torch", "first part"])
    held = torch.load(file, weights_only=True)
    if how == "bare":
        file.write_bytes(pickle.dumps(bad))
    elif how == "protocol 0":
        file.write_bytes(pickle.dumps({"format": "vecgym", "version": 1, "x": bad}, protocol=0))
    elif how == "with torch":
        torch.save(bad, file)
    elif how == "old torch":
        torch.save({**held, "x": bad}, file, _use_new_zipfile_serialization=False)
    elif how == "inside":
        tree, key = draw.choice(list(_places(held)))
        tree[key] = bad
        torch.save(held, file)
    else:
        with zipfile.ZipFile(file) as parts:
            kept = {name: parts.read(name) for name in parts.namelist()}
        first = next(name for name in kept if name.endswith("data.pkl"))
        kept[first] = pickle.dumps(bad, protocol=2)
        _zipped(file, kept)


def _zipped(file: Path, parts: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(file, "w", how) as out:
        for name, data in parts.items():
            out.writestr(name, data)


def parts_changed(file: Path, draw: random.Random) -> None:
    """The archive's parts, each whole: one gone, there twice, shortened, compressed, or under another name."""
    with zipfile.ZipFile(file) as parts:
        kept = {name: parts.read(name) for name in parts.namelist()}
    name = draw.choice(list(kept))
    how = draw.choice(["gone", "shorter", "longer", "compressed", "path", "twice", "big"])
    if how == "gone":
        del kept[name]
    elif how == "shorter":
        kept[name] = kept[name][:-1] if draw.random() < 0.5 else b""
    elif how == "longer":
        kept[name] += b"\1" * draw.choice([1, 1000])
    elif how == "path":
        kept["../" * 3 + MARK] = b"x"
    elif how == "big":
        kept[name] = bytes(200 << 20)
    _zipped(file, kept, zipfile.ZIP_DEFLATED if how in ("compressed", "big") else zipfile.ZIP_STORED)
    if how == "twice":
        with warnings.catch_warnings(), zipfile.ZipFile(file, "a") as out:
            warnings.simplefilter("ignore")
            out.writestr(name, b"other")


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in nested dicts and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


OF_TORCH: dict[str, Callable[[Path, random.Random], None]] = {
    "malicious": malicious, "parts changed": parts_changed,
}  # fmt: skip

# --------------------------------------------------------------------------------- damage to tables and programs

CELLS = (
    "abc",
    "nan",
    "inf",
    "1e999",
    "",
    "0x10",
    "1,5",
    "1_000",
    " 1",
    "9" * 400,
    "x" * 200_000,
    '"',
    "-1",
    "1.5",
    "True",
)


def other_cell(file: Path, draw: random.Random) -> None:
    if file.suffix == ".json":
        texts = ("[]", "null", "3", "{", '{"num_nodes": NaN}', "[" * 100_000, '{"a": 1, "a": 2}', '"text"', "{}x")
        file.write_text(draw.choice(texts))
        return
    rows = list(csv.reader(file.open(newline="")))
    row = draw.choice(rows)
    how = draw.random()
    if how < 0.5:
        row[draw.randrange(len(row))] = draw.choice(CELLS)
    elif how < 0.6:
        row.append(draw.choice(CELLS))
    elif how < 0.7:
        row.pop()
    elif how < 0.8:
        rows.remove(row)
    else:
        rows.insert(draw.randrange(len(rows)), list(row))
    with file.open("w", newline="") as out:
        if draw.random() < 0.2:
            out.write("\ufeff")
        csv.writer(out).writerows(rows)


def other_program(file: Path, draw: random.Random) -> None:
    text = file.read_text()
    changes: list[Callable[[], str]] = [
        lambda: text.replace("return {", "return [{", 1), lambda: text.replace('"num_nodes": 2', '"num_nodes": "two"'),
        lambda: text.replace("def config", "def other"), lambda: text + "\nraise RuntimeError('x')\n",
        lambda: text.replace('"model": Line()', '"model": Line'), lambda: text.replace('"model"', "3"),
        lambda: text.replace("import torch", "import gone_module"), lambda: text + "\nraise AssertionError\n",
        lambda: text.replace("    return", "    raise KeyError('x')\n    return"), lambda: text + "\x00",
        lambda: text.replace("    return", "    return config()\n    return"), lambda: "config = 3\n", lambda: "",
        lambda: text.replace('"max_steps": 1', '"max_stepz": 1'), lambda: text.replace("lr=0.1", "*"),
        lambda: text.replace("    return", "    return None\n    return"), lambda: text.replace("examples()", "3"),
        lambda: text.replace("def config(lr=0.1)", "def config(needed)"), lambda: text + "config = int\n",
        lambda: text.replace('FedAvgStrategy("sgd", lr=lr)', "object()"), lambda: text + "config = type\n",
    ]  # fmt: skip
    file.write_text(draw.choice(changes)())


OWN: dict[str, dict[str, Callable[[Path, random.Random], None]]] = {
    "checkpoints": OF_TORCH, "run": OF_TORCH, "sweep": OF_TORCH, "state": {"malicious": malicious},
    "csv": {"other cell": other_cell}, "config": {"other program": other_program}, "text": {},
}  # fmt: skip


def damages(kind: str) -> dict[str, Callable[[Path, random.Random], None]]:
    known = {**ANY, **OWN[kind]}
    if kind in ("csv", "text", "config"):
        del known["huge"]  # it would be read, and is what it says
    return known


# ------------------------------------------------------------------------------------------------------- the cases


def cases(seed: int, count: int) -> Iterator[Case]:
    draw = random.Random(f"files {seed}")
    for i in range(count):
        reader = draw.choice([*READERS, "resume", "resume by name", "load", "sweep"])
        while reader == "resume in processes" and draw.random() < 0.8:  # they take a second
            reader = draw.choice(list(READERS))
        kind = READERS[reader][0]
        own = list(OWN[kind])
        damage = draw.choice(own) if own and draw.random() < 0.5 else draw.choice(list(damages(kind)))
        run = draw.choice(list(RUNS))
        if reader == "resume in processes" and run == "one rank":  # all its nodes must be in one process
            run = "DDP"
        yield Case({"reader": reader, "run": run, "damage": damage}, seed * 1_000_003 + i)


def run(case: Case) -> Outcome:
    reader, name, damage = (case.settings[key] for key in ("reader", "run", "damage"))
    kind, read = READERS[reader]
    good = expected(reader, name)
    draw = random.Random(case.seed)
    with a_new_folder(), as_it_was():
        folder = copied(kind, name)
        file = victims(kind, folder, name, draw)
        damages(kind)[damage](file, draw)
        Path("elsewhere").mkdir()
        with time_limit(LIMIT_S), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = read(file, name)
            except ALLOWED as error:
                outcome: Outcome = _refused(case, file, error)
            else:
                outcome = _given(case, file, found, good, [str(w.message) for w in caught])
        if Path(MARK).exists() or Path("../..", MARK).exists():
            return Failure(f"{reader}: executes what a file says", damage)
        return outcome


def _refused(case: Case, file: Path, error: Exception) -> Outcome:
    reader, text = case.settings["reader"], str(error)
    program = (
        isinstance(error, Refused) and case.settings["reader"] == "vecgym run" and text.startswith("vecgym run: error")
    )
    if program or file.name in text or str(file.parent) in text or file.parent.name in text:
        if "Traceback" in text:
            return Failure(f"{reader}: a traceback in place of a message", text[:1000])
        return Refusal(f"{reader}: {type(error).__name__}: {text.splitlines()[0].replace(str(file.parent), '')}"[:200])
    return Failure(
        f"{reader}, {case.settings['damage']}: its {type(error).__name__} does not name the file", text[:500]
    )


def _given(case: Case, file: Path, found: Any, good: Any, warned: list[str]) -> Outcome:
    reader, damage = case.settings["reader"], case.settings["damage"]
    if reader in ("vecgym plot", "vecgym run") or (reader.startswith("load") and damage.startswith("of another")):
        return None
    if reader in ("read_csv", "read_text", "load_model"):
        return _partly(case, file, found, good)
    if numbers(found) == good:
        return None
    return Failure(f"{reader}, {damage}: wrong numbers", f"{file.name}, warned: {warned}")


def _partly(case: Case, file: Path, found: Any, good: Any) -> Outcome:
    """Text has no checksum: of a file that was cut, all that is read must have been in it."""
    if case.settings["damage"] != "truncated" or file.name == "config.json":
        return None
    if case.settings["reader"] == "read_csv":
        rows = numbers(found)
        names = {"history.csv": None, "train_losses.csv": "train_losses", "val_losses.csv": "val_losses"}[file.name]
        for row, whole in zip(rows, good):
            for name, x in row.items():
                if name in whole and x != whole[name] and (names is None or name == names):
                    return Failure(
                        "read_csv: a number that was cut off is read as another one", f"{name} of {file.name}"
                    )
        return None
    if case.settings["reader"] == "load_model" and numbers(found) != good:
        return Failure("load_model, truncated: wrong numbers", file.name)
    return None
