"""Random grids: what a row of `vecgym.sweep` records is what `Trainer.fit` records of its configuration alone.

Of each strategy in a grid one row is compared, of a batch size and a seed at random: with these it is in the stack all
the same. What only more nodes or steps bring is the business of `configurations`, where they are cheaper.
"""

from __future__ import annotations

import pprint
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
from torch import nn

from tests.fuzz import building, problems
from tests.fuzz.common import Case, Failure, Outcome, Refusal, crash, deliberate
from tests.fuzz.configurations import TOLERANCE, Data, difference, nudged
from tests.fuzz.settings import Settings, draw_settings, simpler, with_defaults
from vecgym import DivergenceError, History, Trainer, sweep

NAME = "sweeps"

OF_STRATEGY = (
    "strategy", "inner", "groups", "per_step", "schedule", "warmup_steps", "cosine_anneal", "max_norm",
    "max_norm_per_node",
)  # fmt: skip
COLUMNS = (
    "step", "epoch", "examples", "train_loss", "train_losses", "lr", "bytes_step", "bytes_total", "val_loss",
    "val_loss_local", "val_losses", "consensus_distance",
)  # fmt: skip
NUMBERS = ("lr", "momentum", "weight_decay", "alpha", "rho", "outer_lr", "mu", "tau", "fraction", "max_norm", "decay")


def cases(seed: int, count: int) -> Iterator[Case]:
    for i in range(count):
        draw = Random(f"sweep {seed} {i}")
        first = draw_settings(draw)
        rows = [rows_of(first)]
        while len(rows) < draw.choice([2, 3, 4]):
            # Most grids vary the numbers of one strategy; a stack may hold quite different ones too.
            rows.append(varied(draw, rows[0]) if draw.random() < 0.7 else rows_of(draw_settings(draw)))
        run = {key: value for key, value in first.items() if key not in OF_STRATEGY}
        run |= {"num_nodes": min(run["num_nodes"], 4), "max_steps": min(run.get("max_steps", 5), 6)}
        if run["model"] != "matrices":
            rows = [row for row in rows if row["inner"]["name"] != "muon"]
        run.pop("exact", None)
        run.setdefault("val_interval", draw.choice([2, 3]))
        settings: Settings = {"run": run, "rows": rows}
        if draw.random() < 0.4:
            settings["seeds"] = 2
        if draw.random() < 0.3:
            settings["chunk_configs"] = draw.choice([1, 2])
        if draw.random() < 0.2 and not run.get("minibatch_size") and not run.get("num_epochs"):
            settings["batch_sizes"] = [2, 3]
        yield Case(settings, draw.randrange(1000))


def rows_of(settings: Settings) -> Settings:
    return {key: value for key, value in settings.items() if key in OF_STRATEGY}


def varied(draw: Random, value: Any, key: str = "") -> Any:
    """The same with other numbers."""
    if isinstance(value, Mapping):
        return {name: varied(draw, x, name) for name, x in value.items()}
    if isinstance(value, list):
        return [varied(draw, x) for x in value]
    if key == "H" and draw.random() < 0.5:
        return value + 1
    if key in NUMBERS and isinstance(value, float) and draw.random() < 0.7:
        return value * draw.choice([0.5, 0.8])
    return value


def smaller(case: Case) -> Iterator[Case]:
    for settings in simpler(case.settings):
        if settings.get("rows") and "run" in settings:
            yield Case(settings, case.seed)


def run(case: Case) -> Outcome:
    try:
        alone = {i: of_fit(case, points(case)[i]) for i in compared(case)}
    except (ValueError, TypeError) as error:
        return Refusal(f"{type(error).__name__}: {error}") if deliberate(error) else crash(error)
    except DivergenceError:
        return Refusal("not compared: a configuration diverges")
    try:
        together = of_sweep(case)
    except (ValueError, TypeError) as error:
        return refused(case, crash(error))
    for i, (history, model) in alone.items():
        if together[i] is None:
            return Failure("status", f"row {i} is not finished")
        gaps = compare(together[i], (history, model))
        what = next((name for name, gap in gaps.items() if not gap <= TOLERANCE), None)
        if what is None:
            continue
        moved = [compare(of_fit(case, points(case)[i], nudge=n + 1), (history, model)) for n in range(3)]
        if what.startswith("bytes") or gaps[what] > 1e3 * max(found[what] for found in moved):
            kind = points(case)[i]["strategy"]["kind"]
            shown = ", ".join(f"{name} {gap:.2g}" for name, gap in gaps.items() if gap > 0)
            return Failure(f"{what}: {kind}", f"row {i}, relative differences: {shown}")
        return Refusal("not compared: rounding decides, the run alone differs from itself")
    return None


def refused(case: Case, found: Failure) -> Outcome:
    """The sweep says no: so must `fit`, to one of the rows."""
    try:
        for point in points(case):
            of_fit(case, point)
    except (ValueError, TypeError) as error:
        if deliberate(error):
            return Refusal(f"{type(error).__name__}: {error}")
    return Failure(f"the sweep refuses what fit trains: {found.cause}", found.message)


def compare(a: Any, b: Any) -> dict[str, float]:
    gaps = {column: difference(columns(a[0], column), columns(b[0], column)) for column in COLUMNS}
    return {**gaps, "model": difference(dict(a[1].state_dict()), dict(b[1].state_dict()))}


def columns(history: History, name: str) -> Any:
    if name not in history.columns:
        return []
    rows = [torch.as_tensor(x, dtype=torch.float64) for x in history[name] if x is not None]
    return torch.stack(rows) if rows else []


def points(case: Case) -> list[Settings]:
    """The settings of every row, in the order of the grid."""
    run = case.settings["run"]
    sizes = case.settings.get("batch_sizes", [run.get("batch_size", with_defaults({})["batch_size"])])
    seeds = range(case.settings.get("seeds", 1))
    return [
        {**with_defaults({**run, **row, "batch_size": size}), "seed": case.seed + seed}
        for row in case.settings["rows"]
        for size in sizes
        for seed in seeds
    ]


def compared(case: Case) -> list[int]:
    """The rows of the grid that are compared."""
    draw, number = Random(case.seed), len(case.settings["rows"])
    each = len(points(case)) // number
    return [row * each + draw.randrange(each) for row in range(number)]


def fit_settings(settings: Settings) -> dict[str, Any]:
    names = ("shuffle", "engine", "chunk_size", "node_threads", "val_interval")
    kwargs = {"drop_last": True} if settings["drop_last"] else None
    return {"dataloader_kwargs": kwargs, "device": "cpu", "progress": False, **{key: settings[key] for key in names}}


def of_fit(case: Case, point: Settings, nudge: int = 0) -> tuple[History, nn.Module]:
    settings = {key: value for key, value in point.items() if key != "seed"}
    data, model = Data.of(settings, case.seed), problems.make_model(settings["model"], case.seed)
    strategy = building.library_strategy(settings, settings["num_nodes"], data.max_steps)
    trainer = Trainer(nudged(model, nudge), data.train, data.val)
    average = trainer.fit(
        strategy, settings["num_nodes"], max_steps=data.max_steps, seed=point["seed"],
        batch_size=settings["batch_size"], minibatch_size=settings["minibatch_size"], **fit_settings(settings),
    )  # fmt: skip
    return trainer.history, average


def of_sweep(case: Case) -> list[tuple[History, nn.Module] | None]:
    first = points(case)[0]
    settings = {key: value for key, value in first.items() if key != "seed"}
    data, num_nodes = Data.of(settings, case.seed), settings["num_nodes"]
    rows = [with_defaults({**case.settings["run"], **row}) for row in case.settings["rows"]]
    strategies = [building.library_strategy(row, num_nodes, data.max_steps) for row in rows]
    grid: dict[str, Any] = {"strategy": strategies}
    if "batch_sizes" in case.settings:
        grid["batch_size"] = case.settings["batch_sizes"]
    grid["seed"] = [case.seed + seed for seed in range(case.settings.get("seeds", 1))]
    common = fit_settings(settings)
    if "batch_sizes" not in case.settings:
        common["batch_size"] = settings["batch_size"]
    result = sweep(
        problems.make_model(settings["model"], case.seed), data.train, data.val, grid=grid, num_nodes=num_nodes,
        max_steps=data.max_steps, minibatch_size=settings["minibatch_size"], keep_models=True,
        chunk_configs=case.settings.get("chunk_configs"), **common,
    )  # fmt: skip
    return [
        (result.history(i), result.model(i)) if row["status"] == "finished" else None
        for i, row in enumerate(result.rows)
    ]


def reproducer(case: Case) -> str:
    settings = pprint.pformat(dict(case.settings), width=100, sort_dicts=False)
    return (
        f"from tests.fuzz import Case, sweeps\n\nsettings = {settings}\nprint(sweeps.run(Case(settings, {case.seed})))"
    )
