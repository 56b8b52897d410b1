"""The file of a sweep's results, with a description of the sweep by which other sweeps are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from vecgym.core import check, tree
from vecgym.core.errors import warn
from vecgym.core.files import write_atomically
from vecgym.engine import Engine
from vecgym.engine.constancy import copied
from vecgym.records import runfile
from vecgym.records.rows import listed
from vecgym.runs import checkpoint
from vecgym.strategy import Strategy
from vecgym.sweeps.configurations import DATASETS, Configuration, arguments_of, named
from vecgym.sweeps.runner import Runner

RANDOM = "random"
SAME_MODEL = "the row with the same model"  # the first one
FORM = 3  # version of the file's contents
SAMPLES = 8  # steps at which learning rates are compared
Description = dict[str, Any]  # of a configuration: name -> plain value


class ResultsFile:
    """The file to which a sweep is saved while it runs, and from which it resumes.

    The sweep may have more configurations than the file, whose rows are found by their descriptions.

    Raises:
        TypeError, ValueError: for a path that cannot be written to.
    """

    def __init__(self, runner: Runner) -> None:
        self.path, self.runner = _checked(runner.options.resume), runner
        self.rows = _descriptions(runner.configs)
        self._computed = functools.cache(self._compute)
        self.facts: dict[str, Any] = {
            "identity": _shared(runner), "rows": runfile.packed_rows(self.rows),
            "keep_models": runner.options.keep_models,
            "computed": {row: self._computed(row) for row in _distinct(runner.configs)},
        }  # fmt: skip

    def save(self) -> None:
        """Write the results so far. If the disk is full, it warns and leaves the file unchanged."""
        try:
            runfile.write(self.path, {**self.facts, "sweep": self.runner.state()})
        except OSError as error:
            warn(f"{self.path} could not be written: {error}. The sweep goes on, and the file is unchanged.")

    def load(self) -> None:
        """Continue from the file, if it exists; a ValueError if it is damaged, or has rows that this sweep lacks."""
        if not self.path.exists():
            return
        saved, facts = runfile.read(self.path), self.facts
        if "sweep" not in saved:
            raise ValueError(f"{self.path} holds no sweep, but another run of vecgym: give resume another path.")
        checkpoint.check_noted(saved.get("identity", {}), self.path)
        differing, places = checkpoint.differences(saved["identity"], facts["identity"]), list[Any]()
        if not differing:
            rows = runfile.unpacked_rows(saved["rows"])
            places = _places(rows, self.rows)
            differing = _differences(rows, self.rows, places) if None in places else self._changes(rows, saved, places)
        if facts["keep_models"] and not saved["keep_models"]:
            differing.append("keep_models: saved False, given True")
        if differing:
            raise ValueError(
                f"{self.path} holds another sweep:\n  " + "\n  ".join(differing) + "\n"
                "Give the configurations with which it began, and as many more values and seeds as you like (seed "
                "random models and data: torch.manual_seed(0)), or give resume another path, or remove the file to "
                "start anew."
            )
        with runfile.naming(self.path):
            self.runner.load(saved["sweep"], places)

    def _changes(self, rows: list[dict[str, Any]], saved: dict[str, Any], places: list[int]) -> list[str]:
        """Describe saved rows with other data or initial weights in this sweep, where they are at `places`."""
        differing: list[str] = []
        for row, values in saved["computed"].items():
            here = _of(row, self._computed(places[row]))
            differing += checkpoint.differences(_of(row, values), here, checkpoint.TOLERANCE)
        models = [self.runner.configs[place].model for place in places]
        apart = (row for row, values in enumerate(rows) if models[row] is not models[values[SAME_MODEL]])
        return differing or [f"row {row} had the same model as row {rows[row][SAME_MODEL]}" for row in apart][:1]

    def _compute(self, row: int) -> dict[str, Any]:
        """Return checksums of a row's first batches, and its loss of node 0's batch at the initial weights."""
        config = self.runner.configs[row]
        train, of = f"{checkpoint.FIRST_BATCH} of {config.num_nodes} nodes", f"of {config.num_nodes} nodes"
        values: dict[str, Any] = {train: _checksum(*(config.train.batch(0) for _ in range(2)))}
        if config.val is not None:
            read = (next(iter(config.val))[0] for _ in range(2))
            values[f"first batch of the validation data {of}"] = _checksum(*read)
        if not values[train].startswith(RANDOM):
            values["loss of the initial model"] = _initial_loss(config, self.runner.options.device)
        return values


def _checked(path: Any) -> Path:
    path = check.path("resume", path, "the path of a file, such as 'sweep.pt', or None")
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


def check_joined(first: Runner, second: Runner) -> None:
    """Raise a ValueError if two sweeps have a configuration in common, or differ in more than the values of axes."""
    common, others = _common(first), _common(second)
    names = [name for name in {**common, **others} if repr(common.get(name)) != repr(others.get(name))]
    differing = [f"{name} ({common.get(name)} and {others.get(name)})" for name in names]
    of_seed = "seed" in arguments_of(second.options.strategy)
    seeds = {config.key("seed"): config for config in first.configs}
    for config in second.configs if "seed" in first.axes else ():
        twin = seeds.get(config.key("seed"), config)
        parts = [(_describe_model(c.model), {} if of_seed else _describe_data(c.strategy)) for c in (twin, config)]
        if repr(parts[0]) != repr(parts[1]):
            differing = [*differing, f"the strategy or the model of {named(config.point)}, but for the seed"][:4]
    if differing:
        raise ValueError(f"the sweeps differ in {listed(differing)}: only values of common axes may differ.")
    points = {config.key(): config.index for config in first.configs}
    for config in second.configs:
        if (row := points.get(config.key())) is not None:
            raise ValueError(
                f"row {config.index} of the second sweep, with {named(config.point)}, is row {row} of the first: it "
                "would count twice."
            )


def _common(runner: Runner) -> dict[str, Any]:
    """Describe the settings that are no axes, and the data, unless they are functions of axes."""
    config, options = runner.configs[0], runner.options
    settings = {name: x for name, x in config.shown.items() if name not in config.point}
    data = {name: config.dataset(name) for name in DATASETS if name not in config.datasets}
    texts = {name: _describe_data(x)[""] for name, x in data.items()}
    texts |= {
        n: f"{texts[n]}, the first with {_checksum(x[0], x[0])}" for n, x in data.items() if hasattr(x, "__len__")
    }
    return {**settings, **texts, "val_size": options.val_size, "val_interval": options.val_interval}


# ------------------------------------------------------------------------------------ the description of a sweep


def _shared(runner: Runner) -> dict[str, Any]:
    """Describe the settings that all configurations share: name -> plain value."""
    options = runner.options
    return {
        "description": checkpoint.VERSION,
        "form of the file": FORM,
        "axes": ", ".join(runner.axes),
        "val_size": options.val_size,
        "val_interval": options.val_interval,
        **checkpoint.settings_of((options.dataloader_kwargs or {}).get("collate_fn"), "collate_fn"),
    }


def _distinct(configs: list[Configuration]) -> list[int]:
    """Return the first row with each model, and with each pair of datasets and number of nodes."""
    parts = [(id(c.model), (c.num_nodes, *(id(c.dataset(name)) for name in DATASETS))) for c in reversed(configs)]
    indices = range(len(configs))[::-1]
    return sorted({row for each in zip(*parts) for row in dict(zip(each, indices)).values()})


def _descriptions(configs: list[Configuration]) -> list[Description]:
    """Describe each configuration."""
    first_with = {id(config.model): config.index for config in reversed(configs)}
    described: dict[tuple[Any, int], dict[str, Any]] = {}

    def once(describe: Callable[[Any], dict[str, Any]], x: Any) -> dict[str, Any]:
        return described.get((describe, id(x))) or described.setdefault((describe, id(x)), describe(x))

    def of(config: Configuration) -> dict[str, Any]:
        values = {**_describe_row(config), SAME_MODEL: first_with[id(config.model)]}
        values |= once(_describe_model, config.model)
        for name, what in zip(DATASETS, ("training data", "validation data")):
            values |= {what + key: value for key, value in once(_describe_data, config.dataset(name)).items()}
        return values

    return [of(config) for config in configs]


def _describe_model(model: nn.Module) -> dict[str, Any]:
    return checkpoint.of_model(model, [n for n, p in model.named_parameters() if p.requires_grad])


def _places(saved: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[Any]:
    """Return the index of each saved row among the rows; None: it is missing."""

    def key(row: dict[str, Any]) -> str:
        return repr(sorted((name, value) for name, value in row.items() if name != SAME_MODEL))

    where: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        where.setdefault(key(row), []).append(place)
    return [places.pop(0) if (places := where.get(key(row))) else None for row in saved]


def _differences(saved: list[Description], rows: list[Description], places: list[Any]) -> list[str]:
    """List the differences of the first saved row that differs from the row in its place.

    If there are more or fewer rows, compare the first saved row that is missing with the row most like it.
    """
    if len(saved) == len(rows):
        each = (checkpoint.differences(_of(row, a), _of(row, b)) for row, (a, b) in enumerate(zip(saved, rows)))
        return next(filter(None, each))
    lost = places.index(None)
    closest = min(rows, key=lambda row: sum(repr(x) != repr(row.get(name)) for name, x in saved[lost].items()))
    counts = f"number of configurations: saved {len(saved)}, given {len(rows)}, without row {lost} of the file. There:"
    return [counts, *checkpoint.differences(saved[lost], {**closest, SAME_MODEL: saved[lost][SAME_MODEL]})]


def _of(row: int, values: Description) -> Description:
    """Name the row of these values, unless it is the first."""
    return {f"{name} of row {row}": x for name, x in values.items()} if row else values


def _describe_row(config: Configuration) -> dict[str, Any]:
    """Describe the settings of a configuration."""
    values: dict[str, Any] = {}
    for axis, value in config.point.items():
        if not isinstance(value, Strategy):
            values |= checkpoint.settings_of(value, f"grid[{axis!r}]")
    settings = {name: value for name, value in config.shown.items() if name not in config.point}
    values |= {**settings, "number of steps": config.num_steps}
    for name in ("network", "compute"):
        if config.strategy.asynchronous or getattr(config, name) is not None:
            values |= checkpoint.settings_of(getattr(config, name), name)
    if (availability := config.settings["availability"]) is not None:
        values |= checkpoint.settings_of(availability, "availability")
    steps = checkpoint.sampled(config.num_steps, SAMPLES)
    rates = checkpoint.learning_rates(config.strategy, config.num_steps, steps)
    return {**values, **checkpoint.in_words(rates), **checkpoint.settings_of(config.strategy, "strategy")}


def _describe_data(data: Any) -> dict[str, Any]:
    """Describe a dataset by its class and length, a factory by its settings; "" is the name of the whole."""
    if hasattr(data, "__len__"):
        return {"": f"{type(data).__name__} of {len(data)}"}
    return checkpoint.settings_of(data, "")


def _initial_loss(config: Configuration, device: Any) -> float:
    engine = Engine(copied(config.model).to(device))
    params, buffers = ({name: x[None] for name, x in each.items()} for each in (engine.params, engine.buffers))
    return checkpoint.eval_loss(engine, params, buffers, tree.map_leaves(lambda x: x[:1], config.train.batch(0)))


def _checksum(once: Any, again: Any) -> str:
    """Return a checksum of a batch that was read twice; if it is random, its shapes."""
    if checkpoint.digest(once) == checkpoint.digest(again):
        return f"checksum {checkpoint.digest(once)}"
    return f"{RANDOM}, {[list(x.shape) for x in tree.leaves(once)]}"
