"""Random sweeps against `Trainer.fit` of each of their configurations: every column of the history, and the average.

A case is a run, further optimizers and strategies that share a stack with it where they can, and two seeds. A
configuration in which rounding decides is set aside: there `fit`, started from parameters that differ by 1e-14, ends
further from itself than the tolerance.
"""

from __future__ import annotations

import copy
import math
import pprint
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import nn

from tests.fuzz import building, problems
from tests.fuzz.common import Case, Failure, Outcome, Refusal
from tests.fuzz.configurations import TOLERANCE, Data, difference
from tests.fuzz.settings import Settings, draw_settings, simpler, with_defaults
from vecgym import DivergenceError, SweepResult, Trainer, VecgymWarning, sweep

NAME = "sweeps"
NUDGE = 1e-14
OF_STRATEGY = ("strategy", "inner", "groups", "per_step", "schedule", "warmup_steps", "cosine_anneal", "max_norm",
               "max_norm_per_node")  # fmt: skip
COLUMNS = ("step", "epoch", "examples", "train_loss", "train_losses", "lr", "bytes", "total_bytes", "val_loss",
           "val_loss_local", "val_losses", "consensus_distance")  # fmt: skip
LARGE = 1e8  # losses that are on their way to infinity


def cases(seed: int, count: int) -> Iterator[Case]:
    for i in range(count):
        draw = Random(f"sweep {seed} {i}")
        base = {name: value for name, value in draw_settings(draw).items() if name != "exact"}
        drawn = [draw_settings(draw) for _ in range(draw.choice([1, 2, 3]))]
        others = [{name: value for name, value in one.items() if name in OF_STRATEGY} for one in drawn]
        yield Case({"run": base, "others": others}, draw.randrange(1000))


def smaller(case: Case) -> Iterator[Case]:
    run, others = case.settings["run"], case.settings["others"]
    for i in range(len(others)):
        yield Case({"run": run, "others": [*others[:i], *others[i + 1 :]]}, case.seed)
    for settings in simpler(run):
        yield Case({"run": settings, "others": others}, case.seed)


def run(case: Case) -> Outcome:
    base = with_defaults(case.settings["run"])
    data = Data.of(base, case.seed)
    strategies = list(_strategies(base, case.settings["others"], data.max_steps))
    if not strategies:
        return Refusal("no strategy can be made")
    length = {"num_epochs": base["num_epochs"]} if base["num_epochs"] else {"max_steps": data.max_steps}
    names = ("batch_size", "minibatch_size", "shuffle", "engine", "chunk_size", "node_threads", "val_interval")
    given = {**length, **{name: base[name] for name in names}, "device": "cpu", "progress": False}
    given["dataloader_kwargs"] = {"drop_last": True} if base["drop_last"] else None
    model = problems.make_model(base["model"], case.seed)
    grid = {"strategy": strategies, "seed": [case.seed, case.seed + 1]}
    try:
        with _quiet():
            result = sweep(
                model, data.train, data.val, grid=grid, num_nodes=base["num_nodes"], keep_models=True, **given
            )
    except (ValueError, TypeError) as error:
        return Refusal(f"{type(error).__name__}: {error}")
    found = (_wrong(result, i, model, data, given) for i in range(len(result)))
    return next((wrong for wrong in found if wrong is not None), None)


def _strategies(base: Settings, others: list[Settings], max_steps: int) -> Iterator[Any]:
    """Those that can be made and work for so many nodes and steps."""
    matrices = base["model"] == "matrices"  # Muon takes no other
    own = {name: value for name, value in base.items() if name in OF_STRATEGY}
    for one in (own, *others):
        if one["inner"]["name"] == "muon" and not matrices:
            continue
        settings = with_defaults({**{n: x for n, x in base.items() if n not in OF_STRATEGY}, **one})
        try:
            with _quiet():
                made = building.library_strategy(settings, base["num_nodes"], max_steps)
                made.check(base["num_nodes"], max_steps)
        except (ValueError, TypeError):
            continue
        yield made


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of settings without effect are not what is tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VecgymWarning)
        yield


def _wrong(result: SweepResult, index: int, model: nn.Module, data: Data, given: dict[str, Any]) -> Failure | None:
    row, config = result.rows[index], result._runner.configs[index]
    alone = _fit(config, model, data, given)
    kind = type(config.strategy).__name__
    if alone is None:
        return None if row["status"] == "diverged" else Failure(f"status: {kind}", f"{row['status']}, alone diverged")
    trainer, average = alone
    if max(map(abs, trainer.history["train_loss"][-1:] or [0.0])) > LARGE:
        return None
    if row["status"] != "finished":
        return Failure(f"status: {kind}", f"{row['status']}, alone finished")
    history = result.history(index)
    gaps = {name: _gap(history, trainer.history, name) for name in COLUMNS}
    gaps["average"] = difference(dict(result.model(index).state_dict()), average)
    what = next((name for name, gap in gaps.items() if not gap <= TOLERANCE), None)
    if what is None or _rounding_decides(config, model, data, given, trainer, average):
        return None
    shown = ", ".join(f"{name} {gap:.2g}" for name, gap in gaps.items() if gap > 0)
    return Failure(f"{what}: {kind}", f"row {index}, {config.strategy}: {shown}")


def _fit(config: Any, model: nn.Module, data: Data, given: dict[str, Any]) -> tuple[Trainer, dict[str, Any]] | None:
    trainer = Trainer(model, data.train, data.val)
    try:
        with _quiet():
            average = trainer.fit(config.strategy, config.num_nodes, seed=config.settings["seed"], **given)
    except DivergenceError:
        return None
    return trainer, dict(average.state_dict())


def _gap(a: Any, b: Any, name: str) -> float:
    x, y = ([value for value in history[name] if value is not None] for history in (a, b))
    if len(x) != len(y):
        return math.inf
    return difference([torch.as_tensor(v).tolist() for v in x], [torch.as_tensor(v).tolist() for v in y])


def _rounding_decides(
    config: Any, model: nn.Module, data: Data, given: dict[str, Any], trainer: Trainer, average: dict[str, Any]
) -> bool:
    """Whether the run alone, started a little elsewhere, ends elsewhere too."""
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for p in moved.parameters():
                p.mul_(1 + sign * NUDGE)
        other = _fit(config, moved, data, given)
        if other is None or difference(other[1], average) > TOLERANCE:
            return True
        if _gap(other[0].history, trainer.history, "train_losses") > TOLERANCE:
            return True
    return False


def reproducer(case: Case) -> str:
    """A test that shows the failure."""
    shown = pprint.pformat(dict(case.settings), width=100, sort_dicts=False)
    imports = "from tests.fuzz import sweeps\nfrom tests.fuzz.common import Case\n"
    return f"{imports}\nassert sweeps.run(Case({shown}, {case.seed})) is None\n"
