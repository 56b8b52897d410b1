"""The file that a sweep keeps its results in, and what is noted of the sweep, so that no other one goes on from it."""

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

Columns = dict[str, Any]  # of all configurations: name -> [one value], if all have it, or a value each


class ResultsFile:
    """What is written while a sweep runs, and read when it goes on.

    Raises:
        TypeError, ValueError: for a path that cannot be written to.
    """

    def __init__(self, runner: Runner, path: Any) -> None:
        self.path = _checked(path)
        self.runner = runner
        self.sweep = _shared(runner)
        first = {id(config.model): config.index for config in reversed(runner.configs)}
        self.rows = _columns([_of_row(config, first[id(config.model)]) for config in runner.configs])

    def save(self) -> None:
        """Write what there is; a full disk warns, and what was written before stays."""
        try:
            noted_of_it = {"identity": self.sweep, "rows": self.rows, "keep_models": self.runner.keep_models}
            runfile.write(self.path, {**noted_of_it, "sweep": self.runner.state()})
        except OSError as error:
            warn(f"{self.path} could not be written: {error}. The sweep goes on; what is in the file stays.")

    def load(self) -> None:
        """Go on from what is in the file, if it is there; a ValueError if that is another sweep's, or damaged."""
        if not self.path.exists():
            return
        held = runfile.read(self.path)
        if "sweep" not in held:
            raise ValueError(f"{self.path} holds no sweep, but another run of vecgym's: give resume another path.")
        identity = held.get("identity", {})
        check_noted(identity, self.path)
        if identity["python"] != self.sweep["python"]:
            warn(
                f"{self.path} was written with Python {identity['python']}; this is {self.sweep['python']}: whether "
                "the code of functions is the same has not been checked."
            )
        found = differences(identity, self.sweep)
        if not found:
            before, now = _first_differences(held["rows"], self.rows)
            found = differences({"python": identity["python"], **before}, {"python": self.sweep["python"], **now})
        if self.runner.keep_models and not held["keep_models"]:
            found.append("keep_models: saved False, given True")
        if found:
            raise ValueError(
                f"{self.path} holds another sweep:\n  " + "\n  ".join(found) + "\n"
                "Give what it was begun with (and where models or data are random, seed them: torch.manual_seed(0)), "
                "or give resume another path, or remove the file to start anew."
            )
        with runfile.naming(self.path):
            self.runner.load(held["sweep"])


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
    """What is the same for all configurations: name -> plain value."""
    first = {id(config.model): config for config in reversed(runner.configs)}
    several = len(first) > 1
    models: dict[str, Any] = {}
    for config in sorted(first.values(), key=lambda config: config.index):
        models |= fingerprint_of(config.model, f"model of row {config.index}" if several else "model")
    return {
        **noted(),
        "axes": ", ".join(runner.axes),
        "number of configurations": len(runner.configs),
        "val_size": runner.val_size,
        "val_interval": runner.val_interval,
        **models,
        **fingerprint_of_data(runner.train_dataset, "training data"),
        **fingerprint_of_data(runner.val_dataset, "validation data"),
        **dict(_examples(runner)),
        **fingerprint_of((runner.dataloader_kwargs or {}).get("collate_fn"), "collate_fn"),
    }


def _of_row(config: Configuration, model: int) -> dict[str, Any]:
    """What is a configuration's own: name -> plain value; `model` is the first row that has its model."""
    values: dict[str, Any] = {}
    for axis, value in config.point.items():
        if not isinstance(value, Strategy):
            values |= fingerprint_of(value, f"grid[{axis!r}]")
    settings = {name: value for name, value in config.settings.items() if name not in config.point}
    values |= {**settings, "number of steps": config.num_steps, "the row with the same model": model}
    return {**values, **fingerprint_of(config.strategy, "strategy")}


def _examples(runner: Runner) -> Iterator[tuple[str, str]]:
    """Checksums of some batches, where the data are not tensors that have been read whole."""
    first = {config.num_nodes: config for config in reversed(runner.configs)}
    for num_nodes, config in sorted(first.items()):
        train, val = runner.batches(config), runner.val_batches(config)
        if not is_in_memory(runner.train_dataset):
            steps = (0, train.steps_per_epoch // 2)
            read = [train.batch(step) for step in (*steps, *steps)]
            yield f"examples of the training data of {num_nodes} nodes", _same_at_every_read(read)
        if val is not None and not is_in_memory(runner.val_dataset):
            read = [next(iter(val))[0] for _ in range(2)]
            yield f"examples of the validation data of {num_nodes} nodes", _same_at_every_read(read)


def _same_at_every_read(read: list[Any]) -> str:
    """A checksum of what was read twice; of what is random, its form."""
    once, again = read[: len(read) // 2], read[len(read) // 2 :]
    if digest(once) == digest(again):
        return f"checksum {digest(once)}"
    return f"random, {[list(x.shape) for x in tree.leaves(once)]}"


_MISSING = "nothing"


def _columns(rows: list[dict[str, Any]]) -> Columns:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name, _MISSING) for row in rows] for name in names}
    return {name: each[:1] if len(set(map(repr, each))) == 1 else each for name, each in columns.items()}


def _first_differences(before: Columns, now: Columns) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of each column the values in the first row in which they differ, saved and given, by the name to show."""
    found: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for name in dict.fromkeys([*before, *now]):
        a, b = before.get(name, [_MISSING]), now.get(name, [_MISSING])
        number = max(len(a), len(b))
        for row, (x, y) in enumerate(zip(a * (number // len(a)), b * (number // len(b)))):
            if repr(x) != repr(y):
                where = name if number == 1 else f"{name} of row {row}"
                found[0][where], found[1][where] = x, y
                break
    return found
