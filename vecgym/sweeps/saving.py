"""The file in which a sweep keeps its results, and what it notes of the sweep, so that no other one continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vecgym.core import check, tree
from vecgym.core.errors import warn
from vecgym.core.files import write_atomically
from vecgym.engine import Engine
from vecgym.engine.constancy import copied
from vecgym.records import runfile
from vecgym.runs import checkpoint
from vecgym.strategy import Strategy
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.runner import Runner

RANDOM = "random"
SAMPLES = 8  # steps at which learning rates are compared


class ResultsFile:
    """The file that a sweep is saved to while it runs, and resumes from.

    Raises:
        TypeError, ValueError: for a path that cannot be written to.
    """

    def __init__(self, runner: Runner) -> None:
        self.path, self.runner = _checked(runner.options.resume), runner
        self.facts: dict[str, Any] = {
            "identity": _shared(runner), "rows": _of_rows(runner.configs), "computed": _computed(runner),
            "keep_models": runner.options.keep_models,
        }  # fmt: skip

    def save(self) -> None:
        """Write what there is; a full disk warns, and what was written before stays."""
        try:
            runfile.write(self.path, {**self.facts, "sweep": self.runner.state()})
        except OSError as error:
            warn(f"{self.path} could not be written: {error}. The sweep goes on; what is in the file stays.")

    def load(self) -> None:
        """Continue from the file, if it is there; a ValueError if it is damaged, or another sweep's."""
        if not self.path.exists():
            return
        saved, facts = runfile.read(self.path), self.facts
        if "sweep" not in saved:
            raise ValueError(f"{self.path} holds no sweep, but another run of vecgym's: give resume another path.")
        checkpoint.check_noted(saved.get("identity", {}), self.path)
        differing = (
            checkpoint.differences(saved["identity"], facts["identity"])
            or checkpoint.differences(*_first_differences(saved["rows"], facts["rows"]))
            or checkpoint.differences(saved["computed"], facts["computed"], checkpoint.TOLERANCE)
        )
        if facts["keep_models"] and not saved["keep_models"]:
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


# ------------------------------------------------------------------------------------- what is noted of a sweep


def _shared(runner: Runner) -> dict[str, Any]:
    """Return what is the same for all configurations: name -> plain value."""
    options = runner.options
    models: dict[str, Any] = {}
    for name, config in _models(runner):
        trained = [n for n, p in config.model.named_parameters() if p.requires_grad]
        models |= checkpoint.of_model(config.model, trained, name)
    return {
        "description": checkpoint.VERSION,
        "axes": ", ".join(runner.axes),
        "number of configurations": len(runner.configs),
        "val_size": options.val_size,
        "val_interval": options.val_interval,
        **models,
        **_data(options.train_dataset, "training data"),
        **_data(options.val_dataset, "validation data"),
        **checkpoint.settings_of((options.dataloader_kwargs or {}).get("collate_fn"), "collate_fn"),
    }


def _models(runner: Runner) -> list[tuple[str, Configuration]]:
    """Return the name of each distinct model, and the first configuration that has it."""
    first = {id(config.model): config for config in reversed(runner.configs)}
    configs = sorted(first.values(), key=lambda config: config.index)
    return [("model" if len(configs) == 1 else f"model of row {config.index}", config) for config in configs]


def _of_rows(configs: list[Configuration]) -> dict[str, Any]:
    """Return what is each configuration's own: all of the first one, and in what the others differ from that."""
    first_with = {id(config.model): config.index for config in reversed(configs)}
    first, *others = [_of_row(config, first_with[id(config.model)]) for config in configs]
    values = dict(first)
    for number, row in enumerate(others, 1):
        for name in {**first, **row}:
            own = row.get(name, checkpoint.NOTHING)
            if repr(own) != repr(first.get(name, checkpoint.NOTHING)):
                values[f"{name} of row {number}"] = own
    return values


def _first_differences(saved: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return each value in the first row in which it differs, saved and now, by the name to show; see `_of_rows`."""
    first: dict[str, tuple[str, Any, Any]] = {}
    for name in {**saved, **now}:
        of_all = name.partition(" of row ")[0]
        a, b = (values.get(name, values.get(of_all, checkpoint.NOTHING)) for values in (saved, now))
        if repr(a) != repr(b):
            first.setdefault(of_all, (name, a, b))
    return {name: a for name, a, _ in first.values()}, {name: b for name, _, b in first.values()}


def _of_row(config: Configuration, model: int) -> dict[str, Any]:
    """Return what is a configuration's own: name -> plain value; `model` is the first row that has its model."""
    values: dict[str, Any] = {}
    for axis, value in config.point.items():
        if not isinstance(value, Strategy):
            values |= checkpoint.settings_of(value, f"grid[{axis!r}]")
    settings = {name: value for name, value in config.shown.items() if name not in config.point}
    values |= {**settings, "number of steps": config.num_steps, "the row with the same model": model}
    for name in ("network", "compute"):
        if config.strategy.asynchronous or getattr(config, name) is not None:
            values |= checkpoint.settings_of(getattr(config, name), name)
    if (availability := config.settings["availability"]) is not None:
        values |= checkpoint.settings_of(availability, "availability")
    steps = checkpoint.sampled(config.num_steps, SAMPLES)
    rates = checkpoint.learning_rates(config.strategy, config.num_steps, steps)
    return {**values, **checkpoint.in_words(rates), **checkpoint.settings_of(config.strategy, "strategy")}


def _data(data: Any, name: str) -> dict[str, Any]:
    """Describe a dataset by its class and length, or what makes it."""
    if hasattr(data, "__len__"):
        return {name: f"{type(data).__name__} of {len(data)}"}
    return checkpoint.settings_of(data, name)


def _computed(runner: Runner) -> dict[str, Any]:
    """Return checksums of the first batches, and each distinct model's loss of node 0's, at its initial weights."""
    values: dict[str, Any] = {}
    first = {config.num_nodes: config for config in reversed(runner.configs)}
    for num_nodes, config in sorted(first.items()):
        values[f"{checkpoint.FIRST_BATCH} of {num_nodes} nodes"] = _checksum(*(config.train.batch(0) for _ in range(2)))
        if config.val is not None:
            read = (next(iter(config.val))[0] for _ in range(2))
            values[f"first batch of the validation data of {num_nodes} nodes"] = _checksum(*read)
    for name, config in _models(runner):
        if not values[f"{checkpoint.FIRST_BATCH} of {config.num_nodes} nodes"].startswith(RANDOM):
            values[f"loss of the initial {name}"] = _initial_loss(config, runner.options.device)
    return values


def _initial_loss(config: Configuration, device: Any) -> float:
    engine = Engine(copied(config.model).to(device))
    params, buffers = ({name: x[None] for name, x in each.items()} for each in (engine.params, engine.buffers))
    return checkpoint.eval_loss(engine, params, buffers, tree.map_leaves(lambda x: x[:1], config.train.batch(0)))


def _checksum(once: Any, again: Any) -> str:
    """Return a checksum of what was read twice; if it is random, its form."""
    if checkpoint.digest(once) == checkpoint.digest(again):
        return f"checksum {checkpoint.digest(once)}"
    return f"{RANDOM}, {[list(x.shape) for x in tree.leaves(once)]}"
