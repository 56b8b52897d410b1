"""A module imports only its own package and the floors below; some things are done in one place only, or never."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import vecgym

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vecgym"

# Every module, or package, of vecgym and its floor; a new one has to be put here.
FLOORS = [
    "core guide",
    "data models collectives compress optim",
    "engine availability records",
    "simulation logger",
    "strategy plot",
    "clock",
    "runs",
    "sweeps meta",
    "compat",
    "cli",
    "__main__",
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
FACADE = "vecgym"  # vecgym/__init__.py shows what is there up to the trainer: for the commands above it
FLOOR[FACADE] = FLOOR["sweeps"]

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def floor(name: str) -> int:
    """The floor of a module, that of its package; above all where it has none."""
    return FLOOR.get(name.split(".")[0], 99)


def unit(path: Path) -> str:
    """The module, or the package, directly in vecgym that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


parsed = functools.cache(ast.parse)


def imported(source: str) -> Iterator[tuple[str, str]]:
    """(`a.b.c`, name) for each `from vecgym.a.b.c import name`, wherever it stands; (`a`, "") for `import vecgym.a`."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((a.name.removeprefix("vecgym."), "") for a in node.names if a.name.split(".")[0] == "vecgym")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            if module == "vecgym":  # from vecgym import tree: a module; from vecgym import Trainer: the facade
                yield from ((a.name if a.name in FLOOR else FACADE, a.name) for a in node.names)
            elif module.startswith("vecgym."):
                yield from ((module.removeprefix("vecgym."), a.name) for a in node.names)


def wrong_imports(name: str, source: str) -> list[str]:
    """The units that `source`, the module `name`, must not import."""
    others = {module.split(".")[0] for module, _ in imported(source)} - {name.split(".")[0]}
    return sorted(other for other in others if floor(other) >= floor(name))


def name_of(path: Path) -> str:
    """`strategy/base.py` is strategy.base, `strategy/__init__.py` strategy."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """File -> the files that it imports, wherever the import stands: in a function, or for type checkers only."""
    return {
        file: {full if (full := f"{module}.{name}") in sources else module for module, name in imported(source)}
        for file, source in sources.items()
    }


def test_every_module_has_a_floor() -> None:
    missing = {unit(path) for path in FILES} - set(FLOOR)
    gone = set(FLOOR) - {unit(path) for path in FILES} - {FACADE}
    assert not gone, f"{sorted(gone)} have a floor and are not there"
    assert not missing, f"put {sorted(missing)} on a floor in {Path(__file__).name}"
    assert len(FLOOR) == sum(len(names.split()) for names in FLOORS) + 1, "a module is on two floors"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_below(path: Path) -> None:
    name = name_of(path)
    wrong = wrong_imports(name, path.read_text())
    assert not wrong, f"vecgym.{name} is on floor {floor(name)} and imports {', '.join(wrong)}"


def test_imports_make_no_circle() -> None:
    files = graph({name_of(path): path.read_text() for path in FILES})
    list(graphlib.TopologicalSorter(files).static_order())  # raises a CycleError that names the circle


def test_the_check_can_fail() -> None:
    assert wrong_imports("core", "from vecgym.runs.trainer import Trainer") == ["runs"]
    assert wrong_imports("core", "def f():\n    from vecgym import data") == ["data"]
    assert wrong_imports("core", "import vecgym.data") == ["data"]
    assert wrong_imports("runs", "from vecgym import Logger") == ["vecgym"]
    assert wrong_imports("cli", "from vecgym import Logger") == []
    assert wrong_imports("runs", "from vecgym.unheard_of import x") == ["unheard_of"]
    assert wrong_imports("strategy", "from vecgym.strategy.base import Strategy\nfrom vecgym.core import tree") == []
    assert wrong_imports("data", "from vecgym.collectives import Collectives") == ["collectives"], "on one floor"
    assert wrong_imports("simulation.run", "from vecgym.strategy.exchange import Exchange") == ["strategy"]
    assert wrong_imports("simulation.run", "from vecgym.simulation import state") == []
    assert wrong_imports("strategy.exchange", "from vecgym.simulation import Mark") == []


def test_the_check_of_circles_can_fail() -> None:
    first = "if TYPE_CHECKING:\n    from vecgym.optim.spec import OptimSpec"
    files = graph({"optim.merge": first, "optim.spec": "def f():\n    from vecgym.optim import merge"})
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(files).static_order())


# ------------------------------------------------------------------------------------------ what is done nowhere else


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """The dotted name of everything that is called, `torch.load` say, and the call."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            yield ast.unparse(node.func), node


def mentions(source: str) -> set[str]:
    """Every name and attribute, and every imported module and name."""
    found: set[str] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(alias.name.split(".")[0] for alias in node.names)
            found.update((getattr(node, "module", "") or "").split("."))
    return found


def unsafe_loads(source: str) -> list[str]:
    return [
        ast.unparse(call)
        for name, call in calls(source)
        if name in ("torch.load", "load")
        and not any(
            k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
            for k in call.keywords
        )
        and "json" not in name
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_no_module_does(path: Path) -> None:
    source = path.read_text()
    assert not unsafe_loads(source), "torch.load without weights_only=True runs what is in the file"
    pickles = mentions(source) & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal"}
    assert not pickles or path.name == "multiprocess.py", "only processes of one run trust what they send each other"
    called = {name for name, _ in calls(source)}
    assert not called & {"eval", "exec", "os.system"}
    if path.name != "rng.py" and FLOOR[unit(path)] < FLOOR["compat"]:
        assert not called & {"torch.manual_seed", "torch.cuda.manual_seed_all"}, "use vecgym.core.rng"


def test_only_the_engine_calls_vmap() -> None:
    found = {unit(path) for path in FILES if "vmap" in mentions(path.read_text())}
    assert found <= {"engine"}, f"{found - {'engine'}} call vmap: per-node work belongs into vecgym.engine"
    assert "engine" in found


def test_these_checks_can_fail() -> None:
    assert unsafe_loads("torch.load(path)") == ["torch.load(path)"]
    assert unsafe_loads("torch.load(path, weights_only=False)")
    assert not unsafe_loads("torch.load(path, weights_only=True)")
    assert "vmap" in mentions("from torch.func import vmap")
    assert "vmap" in mentions("torch.func.vmap(f)")
    assert "pickle" in mentions("import pickle")
    assert "pickle" in mentions("from pickle import loads")


# -------------------------------------------------------------------------------------------------------- strategies


def private_names(source: str) -> list[str]:
    """Names that are imported from another file of the strategies although they begin with an underscore."""
    modules = [f"{module}.{name}" for module, name in imported(source) if module.startswith("strategy")]
    names = [name for name in modules if any(part.startswith("_") for part in name.split("."))]
    aliases = {module.split(".")[-1] for module, _ in imported(source) if module.startswith("strategy")}
    aliases |= {name for module, name in imported(source) if module == "strategy" and name}
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            names += [f"{node.value.id}.{node.attr}"] if node.attr.startswith("_") else []
    return names


@pytest.mark.parametrize("path", sorted((PACKAGE / "strategy").glob("*.py")), ids=lambda path: path.name)
def test_strategies_do_not_use_one_anothers_internals(path: Path) -> None:
    assert not private_names(path.read_text())


@pytest.mark.parametrize("path", sorted((PACKAGE / "strategy").glob("*.py")), ids=lambda path: path.name)
def test_strategies_know_no_device_process_or_engine(path: Path) -> None:
    below = {module.split(".")[0] for module, _ in imported(path.read_text())}
    assert "local" not in below
    assert not mentions(path.read_text()) & {"distributed", "get_rank", "get_world_size", "cuda", "functional_call"}


def test_the_check_of_internals_can_fail() -> None:
    assert private_names("from vecgym.strategy.diloco import _outer_spec") == ["strategy.diloco._outer_spec"]
    assert private_names("from vecgym.strategy import diloco\ndiloco._outer_spec()") == ["diloco._outer_spec"]
    assert private_names("from vecgym.strategy.base import Strategy\nself._rule.update()") == []


def test_the_reference_implementations_import_nothing_from_vecgym() -> None:
    for path in sorted((ROOT / "tests" / "reference").glob("*.py")):
        assert not list(imported(path.read_text())), path.name


# ---------------------------------------------------------------------------------------------------------- versions


def test_the_lowest_torch_that_is_admitted_is_tested() -> None:
    admitted = re.search(r'^dependencies = \["torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    tested = re.search(r"for version in ([\d. ]+);", (ROOT / ".ci" / "run").read_text())
    assert admitted is not None
    assert tested is not None
    assert admitted[1] == "2.6"
    assert tested[1].split()[0] == f"{admitted[1]}.0"


def test_the_version_is_that_of_the_changelog() -> None:
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == vecgym.__version__
    assert 'version = { attr = "vecgym.__version__" }' in (ROOT / "pyproject.toml").read_text()


def test_the_changes_of_a_version_can_be_read() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1].rstrip("\n").split("\n")
    assert len(newest) <= 150, "shorten it: the rest is in the history"
    assert max(map(len, newest)) <= 120
