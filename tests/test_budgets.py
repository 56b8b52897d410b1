"""Budgets of size: what is over them is named here, one by one."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.slow import SLOW

PACKAGE = Path(__file__).parent.parent / "vecgym"
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

MAX_UNITS = 16  # modules and packages directly in vecgym; the clock is the 16th
MAX_MODULE = 400  # lines
MAX_FUNCTION = 40  # lines, without its docstring
MAX_PARAMETERS = 8
# Of the whole package, of the clock with what shows its seconds elsewhere, of sweeps on executors, of estimates that
# watch live tensors, of asynchronous runs, of nodes that may be absent, of asynchronous regions, pairs and fragments,
# of sweeps of asynchronous strategies, of absent nodes on real processes, of streaming and eager DiLoCo, of codes that
# round at random, of chunks and of bins, EF21 and SparseLoCo, of the rest of DiLoCo's family: eight algorithms,
# corrections of movements, rounds of a function; of Adam's derivatives by hand, and of channels that are last; of
# batches of an evaluation at once, of CUDA graphs, of recordings that are not compiled, of Muon in full precision, of
# optimizers that are recorded, too, and of process groups that end with their run.
MAX_CODE_LINES = (
    17_300 + 1_900 + 350 + 150 + 1_150 + 850 + 1_050 + 500 + 350 + 440 + 350 + 600 + 100 + 60 + 260 + 115 + 15
)

NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)

# What is longer, and why.
LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
# What users call with keywords, each documented. (Constructors of strategies may have many anyway.)
MANY_PARAMETERS = {
    "data/batches.py:Batches.__init__",
    "data/batches.py:EvalBatches.__init__",
    "engine/asynchronous.py:AsyncSimulation.__init__",
    "engine/engine.py:Engine.gradients",
    "engine/simulation.py:Simulation.__init__",
    "optim/optimizers.py:FullPrecisionMuon.__init__",
}


def functions(source: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """`Class.method` or `function`, and its definition; functions within functions too."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            name = f"{prefix}{child.name}" if named else prefix  # type: ignore[attr-defined]
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield name, child  # type: ignore[misc]
            yield from walk(child, f"{name}." if named else prefix)

    return walk(ast.parse(source), "")


def length(function: ast.FunctionDef) -> int:
    """Its lines, from `def` on, without the docstring."""
    first = function.body[0]
    is_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def code_lines(source: str) -> int:
    """Lines of code: without docstrings, comments and blanks."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def num_parameters(function: ast.FunctionDef) -> int:
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([x for x in given if x.arg not in ("self", "cls")])


def test_units() -> None:
    units = {name.split("/")[0] for name in FILES} - {"__init__.py", "__main__.py"}
    assert len(units) <= MAX_UNITS, sorted(units)


def test_code_lines() -> None:
    assert sum(map(code_lines, FILES.values())) <= MAX_CODE_LINES


def test_modules() -> None:
    long = {name for name, source in FILES.items() if len(source.splitlines()) > MAX_MODULE}
    assert long == set(LONG_MODULES)


def test_functions() -> None:
    found = {f"{file}:{name}": f for file, source in FILES.items() for name, f in functions(source)}
    assert {name for name, f in found.items() if length(f) > MAX_FUNCTION} == set(LONG_FUNCTIONS)
    assert len(LONG_FUNCTIONS) <= 10
    many = {name for name, f in found.items() if num_parameters(f) > MAX_PARAMETERS}
    assert {name for name in many if not is_constructor_of_strategy(name)} == MANY_PARAMETERS


def is_constructor_of_strategy(name: str) -> bool:
    return name.startswith("strategy/") and name.endswith(("Strategy.__init__", "Communicator.__init__"))


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


def test_what_is_called_slow_is_there() -> None:
    for file, name, cases in SLOW:
        module = ast.parse((Path(__file__).parent / f"{file}.py").read_text())
        tests = [node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"]
        found = [test for test in tests if re.search(name, test)]
        assert found, f"tests/slow.py: no test of {file} is called {name!r}"
        assert re.compile(cases)
