"""Random rollouts: their trajectory is that of `Trainer.fit`, their derivatives are finite differences.

All numbers of a strategy that can be differentiated are multiplied by factors that are 1, and the initial parameters
moved along a direction: compared is the derivative in one random direction of all these. Left out is what has other
derivatives on purpose: codes, which pass them straight through, and signs. A case is set aside where the differences
do not settle: at a kink (clipping, a top-k that changes). A rollout takes all examples of a batch as a node's own, so
that no node has fewer than a batch here.

A case is six runs: one of `fit`, one with derivatives, whose trajectory is compared too, and four for the differences,
which also give the value itself without derivatives.
"""

from __future__ import annotations

import copy
import pprint
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import building, problems
from tests.fuzz.common import Case, Failure, Outcome, Refusal, crash, deliberate
from tests.fuzz.configurations import TOLERANCE, Data, difference, of_library, of_twin, rounding_decides
from tests.fuzz.settings import ELEMENTWISE, Settings, draw_settings, optimizer, simpler, with_defaults
from vecgym import DivergenceError, rollout
from vecgym import Outcome as Trained
from vecgym.data import Batches
from vecgym.engine import Engine

NAME = "rollouts"

STEP = 2e-5
SMALL_STEP = 1e-7
ROUNDING = 1e-12
GRADIENT = 1e-6
NUMBERS = {
    "inner": ("lr", "momentum", "weight_decay", "betas", "alpha", "rho", "dampening", "eps"),
    "outer": ("lr", "momentum", "weight_decay", "betas", "alpha", "rho"),
    "average": (), "sparse": (), "gossip": (), "topk_sparse": (), "gradients": (), "alone": (), "allreduce": (),
    "server": ("lr", "betas", "tau"), "fedavg": ("lr", "betas", "tau", "mu"), "proximal": ("mu",),
    "diloco": ("outer_lr",), "sparta_diloco": ("outer_lr",), "demo": ("weight_decay",), "sparta": (),
}  # fmt: skip
Path = tuple[Any, ...]


def cases(seed: int, count: int) -> Iterator[Case]:
    found, i = 0, 0
    while found < count:
        draw = Random(f"rollout {seed} {i}")
        i += 1
        settings = draw_settings(draw)
        if any(word in repr(settings["strategy"]) for word in ("'bits'", "compress", "'demo'")):
            continue
        if settings["inner"]["name"] not in ELEMENTWISE:
            settings["inner"] = optimizer(draw, ELEMENTWISE)
            settings.pop("groups", None)
        if settings.get("strategy", {}).get("outer", {}).get("name") == "adafactor":
            continue
        for name in ("exact", "chunk_size", "node_threads", "minibatch_size", "num_epochs", "val_interval"):
            settings.pop(name, None)
        settings["max_steps"] = draw.choice([3, 4, 5])
        settings["num_nodes"] = min(settings["num_nodes"], 5)
        if settings.get("engine") not in (None, "vmap", "loop") or settings["model"] == "recurrent":
            settings["engine"] = "loop"
        found += 1
        yield Case(settings, draw.randrange(1000))


def smaller(case: Case) -> Iterator[Case]:
    for settings in simpler(case.settings):
        yield Case(settings, case.seed)


def run(case: Case) -> Outcome:
    settings = with_defaults({**case.settings, "data": case.settings.get("data", "tensor")})
    settings["batch_size"] = min(
        settings["batch_size"], *Data.of(settings, case.seed).num_examples(settings["num_nodes"])
    )
    try:
        alone = of_library(settings, case.seed)
    except (ValueError, TypeError) as error:
        return Refusal(f"{type(error).__name__}: {error}") if deliberate(error) else crash(error)
    except DivergenceError:
        return Refusal("not compared: the run diverges")
    rolled = Rolled(settings, case.seed)
    factors = torch.ones(len(rolled.paths), dtype=torch.float64, requires_grad=True)
    along = torch.zeros((), dtype=torch.float64, requires_grad=True)
    try:
        outcome = rolled.outcome(factors, along)
        gaps = {
            "losses": difference(outcome.losses, alone.losses),
            "bytes": difference(outcome.bytes, alone.bytes),
            "params": difference({n: wide(p, settings["num_nodes"]) for n, p in outcome.params.items()},
                                 {n: alone.params[n] for n in outcome.params}),
        }  # fmt: skip
        if "'part'" in repr(settings["strategy"]):
            del gaps["bytes"]  # a rollout counts a relaxed exchange by its weight, a run sends all of it
        what = next((name for name, gap in gaps.items() if not gap <= TOLERANCE), None)
        if what is not None:
            if what != "bytes" and rounding_decides(settings, case.seed, of_twin(settings, case.seed), gaps):
                return Refusal("not compared: rounding decides")
            return Failure(f"trajectory, {what}: {settings['strategy']['kind']}", str(gaps))
        value = value_of(outcome)
        slope, of_params = torch.autograd.grad(value, [factors, along])
        return rolled.check_derivatives(torch.cat([slope, of_params.view(1)]), float(value.detach()))
    except (ValueError, TypeError) as error:
        return Refusal(f"{type(error).__name__}: {error}") if deliberate(error) else crash(error)


def value_of(outcome: Trained) -> Tensor:
    """The function that is differentiated."""
    return outcome.loss + 0.1 * outcome.losses.nansum() + 0.1 * outcome.consensus_distance.sum()


def wide(p: Tensor, num_nodes: int) -> Tensor:
    return p.detach().expand(num_nodes, *p.shape[1:])


class Rolled:
    """A run as a function of some of its numbers."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings, self.seed = settings, seed
        self.data = Data.of(settings, seed)
        self.model = problems.make_model(settings["model"], seed)
        self.num_nodes = settings["num_nodes"]
        kwargs = {"drop_last": True} if settings["drop_last"] else None
        batches = Batches(
            self.data.train, self.num_nodes, settings["batch_size"], seed=seed, shuffle=settings["shuffle"],
            dataloader_kwargs=kwargs,
        )  # fmt: skip
        self.batches = [batches.batch(t) for t in range(self.data.max_steps)]
        self.num_examples = tuple(batches.shard_sizes)
        self.eval_batch = problems.as_batch(settings["model"], self.data.val_tensors)
        self.paths = chosen_paths(settings)
        self.engine = Engine(self.model, engine=settings["engine"], node_threads=1)
        self.engine.prepare(self.batches[0])
        g = torch.Generator().manual_seed(seed)
        self.direction = {n: torch.randn(p.shape, generator=g, dtype=p.dtype) for n, p in self.engine.params.items()}

    def outcome(self, factors: Tensor, along: Tensor | float = 0.0) -> Trained:
        """The run with these factors of the numbers, started `along` a direction from the model's parameters."""
        settings: Any = copy.deepcopy(self.settings)
        for i, path in enumerate(self.paths):
            place = settings
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = scaled(place[path[-1]], factors[i])
        strategy = building.library_strategy(settings, self.num_nodes, self.data.max_steps)
        params = {n: (p.detach() + along * self.direction[n])[None] for n, p in self.engine.params.items()}
        return rollout(
            self.model, strategy, self.batches, num_nodes=self.num_nodes, eval_batch=self.eval_batch,
            params=params, seed=self.seed, num_examples=self.num_examples, engine=self.engine,
        )  # fmt: skip

    def check_derivatives(self, slope: Tensor, value: float) -> Outcome:
        """Compare `slope`, the derivatives by all factors and along the initial parameters, with differences."""
        g = torch.Generator().manual_seed(self.seed)
        together = self.check_direction(slope, torch.randn(len(slope), generator=g, dtype=torch.float64), value)
        if not isinstance(together, Failure):
            return together
        for i, direction in enumerate(torch.eye(len(slope), dtype=torch.float64)):
            if isinstance(single := self.check_direction(slope, direction, value), Failure):
                path = [*self.paths, ("initial parameters",)][i]
                return Failure(f"derivative by {path[-1]}: {self.settings['strategy']['kind']}", single.message)
        return together

    def check_direction(self, slope: Tensor, direction: Tensor, value: float) -> Outcome:
        """Compare one derivative. A kink within a step (of a maximum, of clipping) is not within a small one."""
        found = self.check_step(slope, direction, value, STEP)
        return self.check_step(slope, direction, value, SMALL_STEP) if isinstance(found, Failure) else found

    def check_step(self, slope: Tensor, direction: Tensor, value: float, h: float) -> Outcome:
        derivative, kind = float(slope @ direction), self.settings["strategy"]["kind"]
        fine, coarse, middle = self.differences(direction, h)
        size = max(1.0, abs(value), abs(fine))
        if not abs(fine - coarse) <= 0.1 * GRADIENT * size:
            return Refusal("not compared: the differences do not settle")
        if not abs(middle - value) <= h * GRADIENT * size + ROUNDING * size:
            return Failure(f"value without derivatives: {kind}", f"{middle:.10g}, with them {value:.10g}")
        if abs(derivative - fine) <= GRADIENT * size:
            return None
        return Failure(f"derivative: {kind}", f"{derivative:.10g}, differences {fine:.10g}")

    @torch.no_grad()
    def differences(self, direction: Tensor, h: float) -> tuple[float, float, float]:
        """Central differences of fourth and of second order, and what they take for the value itself."""
        (low, less, more, high) = (
            float(value_of(self.outcome(1 + x * direction[:-1], x * direction[-1]))) for x in (-h, -h / 2, h / 2, h)
        )
        near, far = (more - less) / h, (high - low) / (2 * h)
        return (4 * near - far) / 3, near, (4 * (less + more) - (low + high)) / 6


def scaled(value: Any, factor: Tensor) -> Any:
    return tuple(x * factor for x in value) if isinstance(value, tuple) else value * factor


def chosen_paths(settings: Settings) -> list[Path]:
    """Every number that can be differentiated and is not 0 (there some are at the edge of what is allowed)."""
    inner = {**settings["inner"], **building.keywords(settings["inner"])}
    settings["inner"] = inner
    found = [("inner", key) for key in NUMBERS["inner"] if usable(inner.get(key))]
    found += paths_of(settings["strategy"], ("strategy",))
    return [path for path in found if not (inner.get("nesterov") and path[-1] == "dampening")]


def paths_of(s: Any, place: Path) -> list[Path]:
    found: list[Path] = []
    if isinstance(s, Mapping) and "kind" in s:
        found += [(*place, key) for key in NUMBERS.get(s["kind"], ()) if usable(s.get(key))]
        if "outer" in s:
            found += [(*place, "outer", key) for key in NUMBERS["outer"] if usable(s["outer"].get(key))]
        if "module" in s:
            found += paths_of(s["module"], (*place, "module"))
        for i, module in enumerate(s.get("modules", ())):
            found += paths_of(module, (*place, "modules", i))
    return found


def usable(value: Any) -> bool:
    return (isinstance(value, float) and value != 0) or (isinstance(value, tuple) and all(value))


def reproducer(case: Case) -> str:
    settings = pprint.pformat(dict(case.settings), width=100, sort_dicts=False)
    call = f"print(rollouts.run(Case(settings, {case.seed})))"
    return f"from tests.fuzz import Case, rollouts\n\nsettings = {settings}\n{call}"
