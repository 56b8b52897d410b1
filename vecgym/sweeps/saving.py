"""The file in which a sweep keeps its results, and what it notes of the sweep, so that no other one continues it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vecgym.core import tree
from vecgym.core.errors import warn
from vecgym.core.files import write_atomically
from vecgym.records import runfile
from vecgym.runs.fingerprint import digest, fingerprint_of, fingerprint_of_data, is_in_memory
from vecgym.runs.identity import check_noted, differences, noted
from vecgym.strategy import Strategy
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.runner import Runner

MISSING = "nothing"
Columns = dict[str, list[Any]]  # of all configurations: name -> [one value], if all have it, or a value each


class ResultsFile:
    """The file that a sweep is saved to while it runs, and resumes from.

    Raises:
        TypeError, ValueError: for a path that cannot be written to.
    """

    def __init__(self, runner: Runner) -> None:
        self.path = _checked(runner.options.resume)
        self.runner = runner
        self.sweep = _shared(runner)
        self.rows = _of_rows(runner.configs)

    def save(self) -> None:
        """Write what there is; a full disk warns, and what was written before stays."""
        noted_of_it = {"identity": self.sweep, "rows": self.rows, "keep_models": self.runner.options.keep_models}
        try:
            runfile.write(self.path, {**noted_of_it, "sweep": self.runner.state()})
        except OSError as error:
            warn(f"{self.path} could not be written: {error}. The sweep goes on; what is in the file stays.")

    def load(self) -> None:
        """Continue from the file, if it is there; a ValueError if it is damaged, or another sweep's."""
        if not self.path.exists():
            return
        saved = runfile.read(self.path)
        if "sweep" not in saved:
            raise ValueError(f"{self.path} holds no sweep, but another run of vecgym's: give resume another path.")
        identity, python = saved.get("identity", {}), {"python": self.sweep["python"]}
        check_noted(identity, self.path)
        before = {"python": identity["python"]}
        if before != python:
            warn(
                f"{self.path} was written with Python {before['python']}; this is {python['python']}: whether "
                "the code of functions is the same has not been checked."
            )
        differing = differences(identity, self.sweep)
        if not differing:
            rows_before, rows = _first_differences(saved["rows"], self.rows)
            differing = differences({**before, **rows_before}, {**python, **rows})
        if self.runner.options.keep_models and not saved["keep_models"]:
            differing.append("keep_models: saved False, given True")
        if differing:
            raise ValueError(
                f"{self.path} holds another sweep:\n  " + "\n  ".join(differing) + "\n"
                "Give what it was begun with (and where models or data are random, seed them: torch.manual_seed(0)), "
                "or give resume another path, or remove the file to start anew."
            )
        with runfile.naming(self.path):
            self.runner.load(saved["sweep"])


def _checked(path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"resume={path!r} must be the path of a file, such as 'sweep.pt', or None.")
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"resume={str(path)!r} is a folder; give a file, such as {str(path / 'sweep.pt')!r}.")
    probe = path.with_name(path.name + ".probe")
    try:
        with write_atomically(probe):
            pass
        probe.unlink()
    except OSError as error:
        raise ValueError(f"resume={str(path)!r} cannot be written to: {error}") from None
    return path


# ------------------------------------------------------------------------------------- what is noted of a sweep


def _shared(runner: Runner) -> dict[str, Any]:
    """Return what is the same for all configurations: name -> plain value."""
    options = runner.options
    models: dict[str, Any] = {}
    first = {id(config.model): config for config in reversed(runner.configs)}
    for config in sorted(first.values(), key=lambda config: config.index):
        models |= fingerprint_of(config.model, "model" if len(first) == 1 else f"model of row {config.index}")
    return {
        **noted(),
        "axes": ", ".join(runner.axes),
        "number of configurations": len(runner.configs),
        "val_size": options.val_size,
        "val_interval": options.val_interval,
        **models,
        **fingerprint_of_data(options.train_dataset, "training data"),
        **fingerprint_of_data(options.val_dataset, "validation data"),
        **dict(_examples(runner)),
        **fingerprint_of((options.dataloader_kwargs or {}).get("collate_fn"), "collate_fn"),
    }


def _of_rows(configs: list[Configuration]) -> Columns:
    """Return what is each configuration's own, in columns."""
    first = {id(config.model): config.index for config in reversed(configs)}
    rows = [_of_row(config, first[id(config.model)]) for config in configs]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name, MISSING) for row in rows] for name in names}
    return {name: values[:1] if len(set(map(repr, values))) == 1 else values for name, values in columns.items()}


def _of_row(config: Configuration, model: int) -> dict[str, Any]:
    """Return what is a configuration's own: name -> plain value; `model` is the first row that has its model."""
    values: dict[str, Any] = {}
    for axis, value in config.point.items():
        if not isinstance(value, Strategy):
            values |= fingerprint_of(value, f"grid[{axis!r}]")
    settings = {name: value for name, value in config.shown.items() if name not in config.point}
    values |= {**settings, "number of steps": config.num_steps, "the row with the same model": model}
    for name in ("network", "compute"):
        if config.strategy.asynchronous or getattr(config, name) is not None:
            values |= fingerprint_of(getattr(config, name), name)
    if (availability := config.settings["availability"]) is not None:
        values |= fingerprint_of(availability, "availability")
    return {**values, **fingerprint_of(config.strategy, "strategy")}


def _examples(runner: Runner) -> Iterator[tuple[str, str]]:
    """Yield checksums of some batches, where the data are not tensors, which are read whole."""
    first = {config.num_nodes: config for config in reversed(runner.configs)}
    for num_nodes, config in sorted(first.items()):
        if not is_in_memory(runner.options.train_dataset):
            train, steps = config.train, (0, config.train.steps_per_epoch // 2)
            once, again = ([train.batch(step) for step in steps] for _ in range(2))
            yield f"examples of the training data of {num_nodes} nodes", _checksum(once, again)
        if config.val is not None and not is_in_memory(runner.options.val_dataset):
            once, again = ([next(iter(config.val))[0]] for _ in range(2))
            yield f"examples of the validation data of {num_nodes} nodes", _checksum(once, again)


def _checksum(once: list[Any], again: list[Any]) -> str:
    """Return a checksum of what was read twice; if it is random, its form."""
    if digest(once) == digest(again):
        return f"checksum {digest(once)}"
    return f"random, {[list(x.shape) for x in tree.leaves(once)]}"


def _first_differences(saved: Columns, given: Columns) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of each column in the first row in which they differ, saved and given, by the name to show."""
    differing: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for name in dict.fromkeys([*saved, *given]):
        a, b = saved.get(name, [MISSING]), given.get(name, [MISSING])
        number = max(len(a), len(b))
        for row, (x, y) in enumerate(zip(a * (number // len(a)), b * (number // len(b)))):
            if repr(x) != repr(y):
                where = name if number == 1 else f"{name} of row {row}"
                differing[0][where], differing[1][where] = x, y
                break
    return differing
