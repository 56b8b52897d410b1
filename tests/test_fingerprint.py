"""What is noted of a run: the same for the same script, wherever it is; something else for another one."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from vecgym.data import TokenWindows, partition_iid
from vecgym.runs import fingerprint
from vecgym.runs.fingerprint import fingerprint_of, fingerprint_of_data, is_in_memory

SCRIPT = """
import math
import torch
from torch import nn
import torch.nn.functional as F

SCALE = 2.0
KINDS = {"b", "a", "c"}


def helper(x):
    return x * SCALE if SCALE in (1.0, 2.0) else x


class Base(nn.Module):
    def common(self, x):
        return helper(x)


class Net(Base):
    factor = 3

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.1)
        self.names = {"x": 1, "y": [torch.ones(2), None]}
        self._private = 5

    @property
    def width(self):
        return 7

    def forward(self, batch):
        total = self.common(self.net(batch))
        return F.mse_loss(self.drop(total), torch.zeros(()))


@torch.no_grad()
def groups(name, p, decay=0.1):
    return {} if p.dim() > 1 or name in KINDS or name in {"u", "v", "w"} else {"weight_decay": decay}


def scheduler(power):
    def factor(step):
        return math.exp(-step) * power
    return factor


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


HELD = {"model": Net(), "groups": groups, "scheduler": scheduler(0.5), "cycle": even}
"""


def loaded(source: str, path: str = "script.py") -> dict[str, Any]:
    """What is noted of a script."""
    module: dict[str, Any] = {"__name__": f"user_{Path(path).stem}", "__file__": path}
    exec(compile(source, path, "exec"), module)
    return fingerprint_of(module["HELD"], "script")


def changed(old: str, new: str) -> str:
    assert old in SCRIPT
    return SCRIPT.replace(old, new)


@pytest.mark.parametrize(
    "source",
    [
        "# moved down\n\n\n" + SCRIPT,
        changed("        return helper", '        """Says what it does."""\n        # and how\n        return helper'),
        changed("total", "outcome"),
        changed("        self.names =", "        self.ignored = None\n        del self.ignored\n        self.names ="),
        changed('{"b", "a", "c"}', '{"a", "c", "b"}'),
        changed('{"x": 1, "y": [torch.ones(2), None]}', '{"y": [torch.ones(2), None], "x": 1}'),
        SCRIPT + "\nUNUSED = 3\n",
    ],
)  # fmt: skip
def test_the_same_script_is_recognised(source: str) -> None:
    """With other comments, docstrings, places in the file, names of variables and orders of names; elsewhere, too."""
    assert loaded(SCRIPT) == loaded(source, "/elsewhere/renamed.py")


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("F.mse_loss", "F.l1_loss", "script['model'].forward()"),
        ("self.common(self.net(batch))", "self.common(self.net(-batch))", "script['model'].forward()"),
        ("x * SCALE", "x / SCALE", "script['model'].Base.common.helper()"),
        ("in (1.0, 2.0)", "in (1.0, 3.0)", "script['model'].Base.common.helper()"),
        ("SCALE = 2.0", "SCALE = 4.0", "script['model'].Base.common.helper.SCALE"),
        ("return 7", "return 8", "script['model'].width.fget()"),
        ("factor = 3", "factor = 4", "script['model'].factor"),
        ("nn.Dropout(0.1)", "nn.Dropout(0.2)", "script['model'].drop.p"),
        ("nn.Dropout(0.1)", "nn.Identity()", "script['model'].drop"),
        ("manual_seed(0)", "manual_seed(1)", "script['model'].net.weight"),
        ("torch.ones(2)", "torch.zeros(2)", "script['model'].names['y'][0]"),
        ("_private = 5", "_private = 6", "script['model']._private"),
        ("decay=0.1", "decay=0.2", "script['groups'].func.decay"),
        ("p.dim() > 1", "p.dim() > 2", "script['groups'].func()"),
        ('"c"}', '"d"}', "script['groups'].func.KINDS"),
        ("scheduler(0.5)", "scheduler(0.4)", "script['scheduler'].power"),
        ("math.exp", "math.cos", "script['scheduler']()"),
        ("n != 0", "n != 1", "script['cycle'].odd()"),
    ],
)
def test_what_a_script_changes_is_named(old: str, new: str, name: str) -> None:
    before, after = loaded(SCRIPT), loaded(changed(old, new))
    assert name in {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}


def test_nothing_depends_on_the_process(tmp_path: Path) -> None:
    """Not on the seed of hashes, nor on addresses; the package is not one of those that are known by name."""
    path = tmp_path / "noted.py"
    path.write_text(
        f"{SCRIPT}\nfrom vecgym.runs.fingerprint import fingerprint_of\nprint(fingerprint_of(HELD, 'script'))"
    )
    run = [sys.executable, str(path)]
    found = [
        subprocess.run(run, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        for seed in ("1", "2")
    ]
    assert found[0].stdout == found[1].stdout == f"{loaded(SCRIPT)}\n"


class Callable:
    def __init__(self, power: float) -> None:
        self.power = power

    def __call__(self, step: int) -> float:
        return self.power**step

    def other(self, step: int) -> float:
        return self.power * step


def scaled(step: int, by: float = 1.0) -> float:
    return by * step


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


LARGE = torch.arange(5000.0)
OTHER = LARGE.index_fill(0, torch.tensor([2500]), 0.0)  # which prints as LARGE does


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LARGE, OTHER),
        (LARGE.numpy(), OTHER.numpy()),
        (LARGE, LARGE.double()),
        (LARGE.bfloat16(), OTHER.bfloat16()),
        (functools.partial(scaled, by=1.0), functools.partial(scaled, by=2.0)),
        (functools.partial(scaled, 1), functools.partial(Callable(1.0), 1)),
        (Callable(0.5), Callable(0.6)),
        (Callable(0.5).other, Callable(0.6).other),
        (Callable(0.5).other, Callable(0.5).__call__),
        (Callable, scaled),
        (functools.cache(scaled), functools.cache(lambda step: step)),
        ({"a", "b"}, {"a", "c"}),
        ({1: [2]}, {1: (2,)}),
        (1, 1.0),
        (True, 1),
        (list(range(100)), [*range(99), 100]),
        ("a" * 300, "a" * 299 + "b"),
        (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
        (torch.float32, torch.float64),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (torch.sin, torch.cos),
        (max, min),
        (nn.Linear, nn.Conv1d),
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x in {"a", "b"}, lambda x: x in {"a", "c"}),
        (lambda x: LARGE[x], lambda x: OTHER[x]),
        (lambda x: [y for y in x if y > 1], lambda x: [y for y in x if y > 2]),
        (lambda x: torch.sin(x), lambda x: torch.cos(x)),
        (lambda x, *, a=1: a, lambda x, *, a=2: a),
        (lambda x, y: x, lambda y, x: x),
    ],
)  # fmt: skip
def test_what_differs_is_seen(one: Any, other: Any) -> None:
    found = [repr(fingerprint_of(x, "x")) for x in (one, one, other)]  # True equals 1
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: random.Random(3), lambda x: x.random()),
        (lambda: np.random.default_rng(3), lambda x: x.random()),
        (lambda: torch.Generator().manual_seed(3), lambda x: torch.rand(1, generator=x)),
        (lambda: Path("/a/data.txt"), lambda x: None),
        (object, lambda x: None),
    ],
)
def test_what_changes_by_use_or_place_does_not_matter(make: Any, use: Any) -> None:
    x = make()
    before = fingerprint_of(x, "x")
    use(x)
    assert fingerprint_of(x, "x") == before == fingerprint_of(make(), "x")
    assert fingerprint_of(Path("/a/data.txt"), "x") == fingerprint_of(Path("/b/data.txt"), "x")


def test_circles_and_what_is_deep_end() -> None:
    holder: list[Any] = [1]
    holder.append(holder)
    assert fingerprint_of(holder, "x") == {"x": "list of 2", "x[0]": 1, "x[1]": "see above"}
    deep: list[Any] = []
    for _ in range(1000):
        deep = [deep]
    assert len(fingerprint_of(deep, "x")) < 30
    node = Callable(0.5)
    node.power = node  # type: ignore[assignment]
    assert fingerprint_of(node, "x")["x.power"] == "see above"


class Counting(Dataset[Any]):
    """Counts what is read, and keeps it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.reads, self.cache = x, 0, {}  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        self.cache[index] = self.x[index]
        return self.cache[index]


def test_a_dataset_is_what_it_is_made_of() -> None:
    data = Counting(LARGE)
    before = fingerprint_of_data(data, "data")
    assert data[3] == 3.0
    assert fingerprint_of_data(data, "data") == before != fingerprint_of_data(Counting(OTHER), "data")
    assert not is_in_memory(data)
    shards = [partition_iid(range(20), 2, seed=seed).datasets(TensorDataset(LARGE[:20])) for seed in (0, 1)]
    for one, other in [
        (LARGE, OTHER),
        (TensorDataset(LARGE, LARGE), TensorDataset(LARGE, OTHER)),
        (Subset(TensorDataset(LARGE), range(40)), Subset(TensorDataset(LARGE), range(1, 41))),
        (ConcatDataset([TensorDataset(LARGE)]), ConcatDataset([TensorDataset(OTHER)])),
        ([(x, 0) for x in LARGE[:50]], [(x, 1) for x in LARGE[:50]]),
        (TokenWindows(LARGE.long(), 4), TokenWindows(OTHER.long(), 4)),
        (TokenWindows(LARGE.long(), 4), TokenWindows(LARGE.long(), 5)),
        shards,
    ]:  # fmt: skip
        assert is_in_memory(one)
        assert (
            fingerprint_of_data(one, "data") == fingerprint_of_data(one, "data") != fingerprint_of_data(other, "data")
        )


def test_of_what_is_too_large_parts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "MAX_BYTES", 4000)
    monkeypatch.setattr(fingerprint, "CHUNK_BYTES", 400)
    x = torch.arange(10_000, dtype=torch.uint8)
    whole = fingerprint_of(x, "x")
    ends, unread = x.clone(), x.clone()
    ends[-1] += 1
    unread[500] += 1
    assert fingerprint_of(ends, "x") != whole == fingerprint_of(unread, "x")


def test_what_torch_hangs_on_a_class_when_it_is_used_is_not_noted() -> None:
    class Inherits(torch.optim.Adagrad):
        pass

    class Overrides(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    for cls in (Inherits, Overrides):
        before = fingerprint_of(cls, "optimizer")
        cls([torch.zeros(1, requires_grad=True)]).step()
        assert fingerprint_of(cls, "optimizer") == before
    assert any("step" in name for name in fingerprint_of(Overrides, "optimizer"))
