"""Budgets of size: what is over them is named here, one by one."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fitting import dataset
from tests.models import make_model
from tests.slow import COLLECTED, NAMED, SLOW
from vecgym import Trainer
from vecgym.engine import recorded
from vecgym.logger import Logger
from vecgym.simulation.simulation import Simulation
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, Strategy

PACKAGE = Path(__file__).parent.parent / "vecgym"
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

MAX_UNITS = 20  # modules and packages directly in vecgym; the last is `meta`, for which `runs` has no room
MAX_FUNCTION = 40  # lines, without its docstring
MAX_PARAMETERS = 8
MAX_CODE_LINES = 28_280  # of the whole package
MAX_MODULES = 170  # that hold code
MAX_CLAUSES = 0  # docstrings that begin with a clause, such as "What is sent." for "The message."
# Modules in a package, and floors: modules in the longest chain of imports inside it. What is above that is named.
MAX_MODULES_IN_A_PACKAGE = 12
MAX_FLOORS_IN_A_PACKAGE = 6
MORE_MODULES = {"strategy": 24}
MORE_FLOORS: dict[str, int] = {}

MAX_FILES_OF_A_WALK = 28  # of the package, in which a step of DiLoCo in a plain fit calls a function
# In one tick with an exchange: calls of the package's functions, and classes of the objects whose methods these are.
MAX_CALLS = {"DiLoCo": 265, "AllReduce": 210}
MAX_CLASSES = {"DiLoCo": 30, "AllReduce": 28}
MAX_FRAMES_TO_THE_MEAN = 13  # of the package, from `fit` to torch's mean over the nodes

NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)

# What is longer, and why.
LONG_FUNCTIONS: dict[str, str] = {}
# What users call with keywords, each documented. (Constructors of strategies and exchanges may have many anyway.)
MANY_PARAMETERS = {
    "clock/side_by_side.py:price_strategies",
    "data/batches.py:Batches.__init__",
    "data/batches.py:EvalBatches.__init__",
    "engine/engine.py:Engine.gradients",
    "engine/stateless.py:_batch_norm",  # F.batch_norm's own, and one
    "optim/optimizer.py:Optimizer.step",
    "optim/optimizers.py:FullPrecisionMuon.__init__",
    "simulation/simulation.py:Part.alone",
    "strategy/robust/average.py:Robust.__init__",
    "strategy/simulated.py:simulation_of",
    "sweeps/result.py:SweepResult.compare",
}


parsed = cache(ast.parse)


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """The syntax trees of the package are read by several tests, and in the way of all later ones."""
    yield
    parsed.cache_clear()


def functions(source: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """`Class.method` or `function`, and its definition; functions within functions too."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            name = f"{prefix}{child.name}" if named else prefix  # type: ignore[attr-defined]
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield name, child  # type: ignore[misc]
            yield from walk(child, f"{name}." if named else prefix)

    return walk(parsed(source), "")


def length(function: ast.FunctionDef) -> int:
    """Its lines, from `def` on, without the docstring."""
    first = function.body[0]
    is_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


@cache
def code_lines(source: str) -> int:
    """Lines of code: without docstrings, comments and blanks."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


@cache
def modules() -> set[str]:
    """The files that hold code."""
    return {name for name, source in FILES.items() if code_lines(source) and not name.startswith("guide/")}


def imported(source: str) -> set[str]:
    """Full names of what a module imports when it runs: modules, and what is taken from them."""
    module = parsed(source)
    checks = [n for n in ast.walk(module) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    unreal = {inner for check in checks for statement in check.body for inner in ast.walk(statement)}
    names: set[str] = set()
    for node in set(ast.walk(module)) - unreal:
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def num_floors(package: str) -> int:
    """Modules in the longest chain of imports inside a package. (What its `__init__` shows is no floor.)"""
    files = {name: source for name, source in FILES.items() if name.startswith(f"{package}/")}
    inside = {dotted(name): imported(source) for name, source in files.items() if not name.endswith("__init__.py")}

    @cache
    def floor(name: str) -> int:
        return 1 + max(map(floor, inside[name] & inside.keys() - {name}), default=0)

    return max(map(floor, inside), default=0)


def dotted(name: str) -> str:
    return ".".join(("vecgym", *Path(name).with_suffix("").parts))


def num_parameters(function: ast.FunctionDef) -> int:
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([x for x in given if x.arg not in ("self", "cls")])


def test_units() -> None:
    units = {name.split("/")[0] for name in FILES} - {"__init__.py", "__main__.py"}
    assert len(units) <= MAX_UNITS, sorted(units)


def test_code_lines() -> None:
    assert sum(map(code_lines, FILES.values())) <= MAX_CODE_LINES


def test_modules() -> None:
    counts = Counter(str(Path(name).parent) for name in modules() if "/" in name)
    assert len(modules()) <= MAX_MODULES
    assert {name: n for name, n in counts.items() if n > MORE_MODULES.get(name, MAX_MODULES_IN_A_PACKAGE)} == {}


def test_floors_inside_packages() -> None:
    floors = {package: num_floors(package) for package in {name.split("/")[0] for name in modules() if "/" in name}}
    assert {name: n for name, n in floors.items() if n > MORE_FLOORS.get(name, MAX_FLOORS_IN_A_PACKAGE)} == {}


class Walk(Logger):
    """Notes in which files of the package functions are called, from one row to the next."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.files: set[str] = set()

    def log(self, row: dict[str, Any]) -> None:
        """A row is logged as that of the next step begins."""
        sys.setprofile(self.note if row["step"] == self.step - 2 else None)

    def note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))


def test_the_walk_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MIN_PASSES", 1)  # as in a long run
    walk, strategy = Walk(step=4), DiLoCoStrategy("adamw", H=4, lr=0.1)
    trainer = Trainer(make_model("MLP"), dataset("MLP"))
    try:
        trainer.fit(strategy, 4, max_steps=5, batch_size=4, device="cpu", progress=False, logger=walk, log_interval=1)
    finally:
        sys.setprofile(None)
    assert {"data/source.py", "strategy/averages.py", "optim/rules.py", "records/history.py"} <= walk.files
    assert len(walk.files) <= MAX_FILES_OF_A_WALK, sorted(walk.files)
    assert f" {len(walk.files)} files" in FILES["guide/contributing.py"]


def clauses(source: str) -> Iterator[str]:
    """The first lines of docstrings that begin with a clause, in place of a noun or a verb."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            first, *_ = (ast.get_docstring(node) or "").splitlines() or [""]
            if first.split(" ")[0] in ("What", "Which", "Who", "How", "When", "Where", "Whose", "That", "Those"):
                yield first


def test_docstrings_name_their_subject() -> None:
    found = [f"{file}: {first}" for file, source in FILES.items() for first in clauses(source)]
    assert len(found) <= MAX_CLAUSES, found


class Tick:
    """Counts the calls of the package's functions in one tick of a fit, those of generators and comprehensions too."""

    def __init__(self, number: int) -> None:
        self.until = number  # ticks before it
        self.inside = False
        self.calls: Counter[str] = Counter()  # by file and function
        self.classes: set[str] = set()  # of the objects whose methods are called
        self.frames: list[int] = []  # to each mean over the nodes

    def note(self, frame: Any, event: str, argument: Any) -> None:
        if frame.f_code is Simulation.tick.__code__ and event in ("call", "return"):
            self.until -= event == "call"
            self.inside = event == "call" and self.until == 0
        if self.inside and event == "call" and is_ours(frame):
            self.calls[f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_code.co_name}"] += 1
            owner = type(frame.f_locals.get("self"))
            self.classes |= {owner.__name__} if owner.__module__.startswith("vecgym.") else set()
        elif self.inside and event == "c_call" and argument is torch.mean and "collectives" in frame.f_code.co_filename:
            self.frames.append(sum(is_ours(outer) for outer, _ in traceback.walk_stack(frame)))


def is_ours(frame: Any) -> bool:
    return frame.f_code.co_filename.startswith(str(PACKAGE))


@pytest.mark.parametrize("strategy", [DiLoCoStrategy("adamw", H=1, lr=0.1), AllReduceStrategy("adamw", lr=0.1)])
def test_the_calls_of_a_tick(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MIN_PASSES", 1)  # as in a long run
    tick, name = Tick(number=6), type(strategy).__name__.removesuffix("Strategy")
    sys.setprofile(tick.note)
    try:
        Trainer(make_model("MLP"), dataset("MLP")).fit(
            strategy, 4, max_steps=7, batch_size=4, device="cpu", progress=False
        )
    finally:
        sys.setprofile(None)
    assert {"simulation/simulation.py:tick", "engine/recorded.py:__call__"} <= tick.calls.keys()
    assert {"Simulation", "Recorded", "StateView", "Mean", "StackedCollectives"} <= tick.classes
    assert tick.calls.total() <= MAX_CALLS[name]
    assert len(tick.classes) <= MAX_CLASSES[name], sorted(tick.classes)
    assert bool(tick.frames) == (name == "DiLoCo")  # the mean of gradients is that of the mean loss
    assert max(tick.frames, default=0) <= MAX_FRAMES_TO_THE_MEAN


def test_functions() -> None:
    found = {f"{file}:{name}": f for file, source in FILES.items() for name, f in functions(source)}
    assert {name for name, f in found.items() if length(f) > MAX_FUNCTION} == set(LONG_FUNCTIONS)
    assert len(LONG_FUNCTIONS) <= 10
    many = {name for name, f in found.items() if num_parameters(f) > MAX_PARAMETERS}
    assert {name for name in many if not may_have_many(name)} == MANY_PARAMETERS


def may_have_many(name: str) -> bool:
    return name.startswith("strategy/") and name.endswith(("Strategy.__init__", "Exchange.__init__"))


def test_the_measures() -> None:
    source = '''
def f(a, *, b):
    """Two lines

    of text, and a blank one."""
    x = """a string

    of three lines"""
    # a comment
    return x
'''
    [(name, function)] = functions(source)
    assert (name, length(function), num_parameters(function), code_lines(source)) == ("f", 6, 2, 5)
    assert [name for name, _ in functions("class A:\n  def f(self):\n    def g(): pass")] == ["A.f", "A.f.g"]
    assert list(clauses('"""What is sent."""\ndef f():\n  """The message."""')) == ["What is sent."]


def test_what_is_called_slow_is_there(request: pytest.FixtureRequest) -> None:
    if any("::" in argument for argument in request.config.args):
        pytest.skip("only some cases of a file were collected")
    files, named = request.config.stash[COLLECTED], request.config.stash[NAMED]
    unknown = [row for i, row in enumerate(SLOW) if row[0] in files and i not in named]
    assert not unknown, f"tests/slow.py: no case is called {unknown}"
    assert {row[0] for row in SLOW} <= {path.stem for path in Path(__file__).parent.glob("*.py")}
