"""The reference: every public name exists, has a docstring and shows an example, which the doctests run."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import vecgym

README = (Path(__file__).parent.parent / "README.md").read_text()
TEXTS = "\n".join([README, *(getattr(vecgym.guide, page).__doc__ for page in vecgym.guide.__all__)])

# What a user imports from. In a package without `__all__`, and in a module, all that it defines is public.
MODULES = (
    "vecgym",
    "vecgym.clock",
    "vecgym.collectives",
    "vecgym.compat.diloco_sim",
    "vecgym.compress",
    "vecgym.data.text",
    "vecgym.data",
    "vecgym.core.errors",
    "vecgym.runs.evaluation",
    "vecgym.runs.multiprocess",
    "vecgym.collectives.ledger",
    "vecgym.engine",
    "vecgym.availability",
    "vecgym.logger",
    "vecgym.runs.influence",
    "vecgym.runs.memory",
    "vecgym.records.history",
    "vecgym.meta",
    "vecgym.models",
    "vecgym.core.nodes",
    "vecgym.optim",
    "vecgym.plot",
    "vecgym.core.rng",
    "vecgym.runs.rollout",
    "vecgym.optim.schedule",
    "vecgym.strategy",
    "vecgym.sweeps",
    "vecgym.collectives.topology",
    "vecgym.runs.trainer",
    "vecgym.core.tree",
    "vecgym.runs.verification",
)

EXEMPT = {
    # Tables and type aliases, which cannot have a docstring of their own.
    "Batch": "of vecgym.data: a tensor, or nested dicts, lists and tuples of tensors",
    "BACKENDS": "of vecgym.engine: name -> Backend",
    "Compressor": "of vecgym.compress: Codec | PowerSGD, which have theirs",
    "ELEMENTWISE": "of vecgym.optim: optimizer class -> formulas",
    "ENGINES": "of vecgym.engine: the names that EngineName allows",
    "EngineName": "of vecgym.engine: a Literal",
    "FORMULAS": "of vecgym.optim: optimizer class -> formulas, those of ELEMENTWISE and Muon's",
    "Factory": "of vecgym.data: a function (rank, num_nodes, train) -> dataset; Batches says what it does",
    "OPTIMIZERS": "of vecgym.optim: name -> optimizer class; OptimSpec's docstring lists the names",
    "OptState": "of vecgym.optim: nested dicts of tensors",
    "Rule": "of vecgym.optim: ElementwiseRule | PerNodeRule, which have theirs",
    "STRATEGIES": "of vecgym.verify: name -> function that makes a strategy, for the command",
    # Examples that are shown and not executed.
    "TensorBoardLogger": "needs tensorboard, an extra; tests/test_logger.py runs it",
    "WandbLogger": "needs wandb, an extra; tests/test_logger.py runs it",
}


def module_of(name: str) -> ModuleType:
    importlib.import_module(name)
    return sys.modules[name]  # `vecgym.sweep` as an attribute is the function


def public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    ]


def own_docstring(value: Any) -> str:
    """Without examples that are skipped, and without the signature that a dataclass or NamedTuple has for one."""
    text = value.__doc__ or ""
    if inspect.isclass(value) and text.startswith(f"{value.__name__}("):
        return ""
    return "\n".join(line for line in text.splitlines() if "+SKIP" not in line)


def public_methods(cls: type) -> Iterator[tuple[str, str]]:
    """The public methods and properties that a class defines, with their docstrings, or those of what they override."""
    for name, value in vars(cls).items():
        plain = next((getattr(value, inner) for inner in ("fget", "func", "__func__") if hasattr(value, inner)), value)
        is_own = inspect.isroutine(plain) and getattr(plain, "__module__", "").startswith("vecgym")
        if not name.startswith("_") and is_own:
            yield name, inspect.getdoc(getattr(cls, name)) or ""


def lacking(full_name: str, value: Any) -> Iterator[str]:
    """The parts of a public name without a docstring or an example, and its methods without a docstring."""
    text = own_docstring(value)
    if ">>>" not in text:
        yield f"{full_name}: no {'example' if text else 'docstring'}"
    if inspect.isclass(value):
        yield from (f"{full_name}.{name}: no docstring" for name, found in public_methods(value) if not found)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    module = module_of(name)
    named = {public: getattr(module, public) for public in public_names(module) if public not in EXEMPT}
    assert [line for public, value in named.items() for line in lacking(f"{name}.{public}", value)] == []


def test_a_name_without_them_is_found() -> None:
    class Bare:
        def method(self) -> None: ...

    class Shown:
        """A line.

        >>> Shown().told()
        """

        def method(self) -> None: ...

        def told(self) -> None:
            """A line."""

    def function() -> None:
        """A line."""

    for function_of_class in (Bare.method, Shown.method, Shown.told):
        function_of_class.__module__ = "vecgym.x"
    assert list(lacking("Bare", Bare)) == ["Bare: no docstring", "Bare.method: no docstring"]
    assert list(lacking("Shown", Shown)) == ["Shown.method: no docstring"]
    assert list(lacking("function", function)) == ["function: no example"]


def test_every_exempted_name_is_public_and_needs_it() -> None:
    public = {name: getattr(module_of(module), name) for module in MODULES for name in public_names(module_of(module))}
    assert [name for name in EXEMPT if name not in public or not list(lacking(name, public[name]))] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_and_exports_what_exists(name: str) -> None:
    module = module_of(name)
    assert module.__doc__
    names = public_names(module)
    assert len(set(names)) == len(names) > 0
    assert [public for public in names if not hasattr(module, public)] == []


@pytest.mark.parametrize("name", ["vecgym", "vecgym.compress", "vecgym.optim", "vecgym.strategy"])
def test_the_overview_of_a_package_shows_all_of_it(name: str) -> None:
    """Every exported name is in the docstring, under a theme."""
    module = module_of(name)
    words = set(re.findall(r"\w+", module.__doc__ or ""))
    assert [public for public in module.__all__ if public not in words] == []


def test_the_names_of_the_package_are_found_by_python_and_by_type_checkers() -> None:
    """Type checkers are told the very names that are imported when they are used."""
    tests = {
        ast.unparse(node.test): node for node in ast.parse(inspect.getsource(vecgym)).body if hasattr(node, "test")
    }
    told = tests["TYPE_CHECKING"]
    homes = {alias.name: node.module for node in told.body for alias in node.names}  # type: ignore[attr-defined]
    assert homes == {
        **{name: f"vecgym.{home}" for name, home in vecgym._HOME.items()},
        **dict.fromkeys(vecgym._PACKAGES, "vecgym"),
    }
    assert set(vecgym.__all__) == {*vecgym._HOME, "availability", "guide"}
    assert homes.keys() <= set(dir(vecgym))
    for name, home in vecgym._HOME.items():
        assert getattr(vecgym, name) is getattr(importlib.import_module(f"vecgym.{home}"), name)
    units = {path.stem for path in Path(vecgym.__file__).parent.iterdir() if path.stem[0] != "_"}
    assert units - vecgym._PACKAGES == {"cli", "py"}  # py.typed
    with pytest.raises(AttributeError, match="module 'vecgym' has no attribute 'unheard_of'"):
        _ = vecgym.unheard_of  # type: ignore[attr-defined]


def test_a_new_interpreter_imports_what_it_uses() -> None:
    """A fit imports neither torch's compiler nor what that needs, which takes seconds, nor what draws.

    Modules are attributes, and a star import, pickles and help work.
    """
    code = """if True:
        import pickle, pydoc, sys
        import vecgym
        assert "torch" not in sys.modules
        from vecgym import Trainer
        from vecgym.models import Classifier, Line
        from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy
        import torch
        assert "torch._dynamo" not in sys.modules, "imported by torch itself"
        for strategy in (AllReduceStrategy("adamw", lr=0.1), DiLoCoStrategy("sgd", H=2, lr=0.1)):
            Trainer(Line(), torch.ones(64), torch.ones(8)).fit(strategy, 2, max_steps=4, device="cpu", progress=False)
        data = torch.utils.data.TensorDataset(torch.ones(64, 3), torch.zeros(64, dtype=torch.long))
        strategy = DiLoCoStrategy("adamw", H=2, lr=0.1)
        Trainer(Classifier(torch.nn.Linear(3, 2)), data, data).fit(
            strategy, 2, max_steps=4, batch_size=8, device="cpu", progress=False
        )
        slow = {"torch._dynamo", "torch._inductor", "sympy", "matplotlib", "pandas", "sklearn", "IPython"}
        assert not slow & set(sys.modules), slow & set(sys.modules)
        assert vecgym.strategy.DiLoCoStrategy and vecgym.sweep and vecgym.compat
        scope = {}
        exec("from vecgym import *", scope)
        assert set(vecgym.__all__) <= scope.keys()
        assert pickle.loads(pickle.dumps(vecgym.Trainer)) is vecgym.Trainer
        text = pydoc.plain(pydoc.render_doc(vecgym))
        assert "class Trainer" in text and "estimate_memory(" in text
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def code_blocks() -> str:
    return "\n".join(re.findall(r"```py(?:thon)?\n(.*?)```", TEXTS, re.DOTALL))


def mentioned_names() -> dict[str, list[str]]:
    """The modules of the names in README and guide: module -> names."""
    found: dict[str, list[str]] = {}
    for module, names in re.findall(r"^\s*from (vecgym[\w.]*) import ([\w, ]+)", code_blocks(), re.MULTILINE):
        found.setdefault(module, []).extend(name.strip() for name in names.split(","))
    for path in re.findall(r"\bvecgym(?:\.[A-Za-z_]\w*)+", TEXTS):
        if not path.endswith((".py", ".com", ".git")):
            module, _, name = path.rpartition(".")
            found.setdefault(module, []).append(name)
    return found


def test_what_readme_and_guide_mention_exists() -> None:
    found = mentioned_names()
    assert len(found) >= 4
    missing = [f"{module}.{name}" for module, names in found.items() for name in names if not exists(module, name)]
    assert missing == []


def exists(module: str, name: str) -> bool:
    """`name` is there: in a module, a class of the package (`vecgym.Trainer.fit`), or as a module."""
    try:
        value: Any = module_of(module)
    except ModuleNotFoundError:
        outer, _, inner = module.rpartition(".")
        value = getattr(module_of(outer), inner, None)
    if hasattr(value, name):
        return True
    try:
        module_of(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def test_the_classes_and_functions_in_readme_and_guide_exist() -> None:
    """`FedAvgStrategy(...)` and the like in its prose and tables are names of some public module."""
    prose = re.sub(r"```.*?```", "", TEXTS, flags=re.DOTALL)
    mentioned = {
        name for code in re.findall(r"`([^`\n]+)`", prose) for name in re.findall(r"\b([A-Z]\w*[a-z]\w*)\(", code)
    }
    public = {name for module in (*MODULES, "vecgym.simulation") for name in public_names(module_of(module))}
    assert len(mentioned) >= 8
    assert sorted(mentioned - public - set(dir(builtins))) == []
