"""Shared by several commands: values of options, and configurations, functions in a Python file."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

DEFAULT_FUNCTION = "config"
ENGINES = ("auto", "vmap", "loop")  # as in vecgym.engine, whose import would import torch


def _above_0(kind: Callable[[str], float], what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < (value := kind(text)) < math.inf:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


count = _above_0(int, "a whole number >= 1")
positive = _above_0(float, "a number > 0")


def add_output(parser: argparse.ArgumentParser, default: str, metavar: str = "DIR") -> None:
    """Add --output; its default is None if it depends on a NAME."""
    path = None if "NAME" in default else Path(default)
    about = f"where the results go ({default})"
    parser.add_argument("--output", type=Path, default=path, metavar=metavar, help=about)


def add_options(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Add CONFIG and --set."""
    parser.add_argument(
        "config", metavar="CONFIG.py[:function]", nargs="?" if optional else None,
        help=f"a Python file, and the function in it ({DEFAULT_FUNCTION})",
    )  # fmt: skip
    add_set(parser, "an argument for the function or, if it has no such parameter, an item to replace in its result")


def add_set(parser: argparse.ArgumentParser, about: str) -> None:
    """Add --set."""
    values: Any = {"nargs": "+", "action": "extend", "default": [], "metavar": "KEY=VALUE", "type": assignment}
    parser.add_argument("--set", **values, help=about)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, --set, --output, --overwrite and --no-progress."""
    add_options(parser)
    add_output(parser, "vecgym-runs/NAME")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results")
    parser.add_argument("--no-progress", action="store_true", help="do not show a progress bar")


def assignment(text: str) -> tuple[str, Any]:
    """Parse a key and a value, which is a Python literal or else a string.

    >>> assignment("lr=1e-3"), assignment("name=diloco"), assignment("betas=(0.9, 0.95)")
    (('lr', 0.001), ('name', 'diloco'), ('betas', (0.9, 0.95)))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def read_configuration(
    args: argparse.Namespace, required: tuple[str, ...], allowed: tuple[str, ...], alone: tuple[str, type] | None = None
) -> dict[str, Any]:
    """Call the function of `args.config` with the settings of `args.set`, and return its result.

    Args:
        required, allowed: keys of the dict that the function returns.
        alone: the key and the class of an item that the function may return instead of a dict.

    Raises:
        ValueError: for a missing file or function, a missing key of `required`, or a key that is not `allowed`. Errors
            in the file propagate.
    """
    path, function = _function(args.config)
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {key: value for key, value in args.set if key in parameters or takes_all}
    items = {key: value for key, value in args.set if key not in arguments}
    where = f"{path}:{function.__name__}"
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
    config = function(**arguments)
    if alone is not None and isinstance(config, alone[1]):
        config = {alone[0]: config}
    if not isinstance(config, dict):
        either = f"a {alone[1].__name__}, or " if alone is not None else ""
        kind = type(config).__name__
        raise ValueError(f"{where} returned a {kind}; it must return {either}a dict of arguments by name.")
    if wrong := [key for key in items if key not in allowed]:
        raise ValueError(
            f"--set {wrong[0]}=...: {where} takes {', '.join(parameters) or 'no arguments'}, and its result may have "
            f"{', '.join(allowed)}."
        )
    if wrong := [key for key in config if key not in allowed]:
        raise ValueError(f"{where} returned {wrong[0]!r}; allowed: {', '.join(allowed)}.")
    config = {**config, **items, **({"progress": False} if getattr(args, "no_progress", False) else {})}
    if missing := [key for key in required if key not in config]:
        raise ValueError(f"{where} returned no {missing[0]!r}; it must return {', '.join(required)}.")
    return config


def output_of(args: argparse.Namespace, mark: str, resumes: bool) -> Path:
    """Return the folder of the results.

    Args:
        mark: the file whose presence shows that there are results already.
        resumes: whether the run resumes from them.

    Raises:
        ValueError: if there are results that are neither replaced nor resumed from.
    """
    output = args.output or Path("vecgym-runs") / Path(args.config.rpartition(":")[0] or args.config).stem
    if (output / mark).exists() and not (args.overwrite or resumes):
        raise ValueError(
            f"{output} holds the results of another run. Fix: give --output DIR, or --overwrite to replace them."
        )
    return output


def _function(text: str) -> tuple[Path, Callable[..., Any]]:
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        file, name = text, DEFAULT_FUNCTION
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{file} is not a file; give a Python file, or FILE.py:function.")
    module = _import(path)
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]
        raise ValueError(f"{file} has no function {name!r}; it has {', '.join(names) or 'none'}. Give {file}:function.")
    return path, function


def _import(path: Path) -> ModuleType:
    """Import a file as a module; as for a script, its own folder comes first on the path."""
    sys.path.insert(0, str(path.resolve().parent))
    name = path.stem if path.stem not in sys.modules else f"vecgym_config_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
