"""The identity of a run: what it must have in common with a saved one to resume it, and the differences in words."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.core.errors import warn
from vecgym.data import Batches
from vecgym.engine.simulation import Simulation
from vecgym.records import runfile
from vecgym.runs.fingerprint import checksum, digest, fingerprint_of, fingerprint_of_data, is_code
from vecgym.runs.options import FitOptions
from vecgym.runs.session import Session
from vecgym.strategy import Context

VERSION = 4  # of the description of a run; earlier ones say too little
NOTHING = "nothing"
SHOWN = 6  # differences in a message
SAMPLES = 64  # steps at which learning rates are compared


class Identity:
    """What makes a run itself: only a run that has it in common may resume from its checkpoints.

    Args:
        options: of the run; they are described as they are before its first step.
        simulation, train, session: of the run.

    Attributes:
        required: what must be the same: name -> plain value.
        arithmetic: what may differ, but then the last bits do, or more: name -> plain value.
    """

    def __init__(self, options: FitOptions, simulation: Simulation, train: Batches, session: Session) -> None:
        self.strategy = options.strategy  # as the user gave it
        self.num_nodes = simulation.comm.num_nodes
        self.num_steps = simulation.max_steps
        self.length = simulation.length
        self.counted = "updates" if options.strategy.asynchronous else "steps"
        self.required = _required(options, simulation, train)
        self.arithmetic = {**_arithmetic(options, simulation, session), **_checksums(train, simulation, session)}

    def record(self) -> dict[str, Any]:
        """Return it for a file."""
        first = range(min(self.num_steps, SAMPLES // 4))
        steps = {*first, *(round(i * (self.num_steps - 1) / SAMPLES) for i in range(SAMPLES + 1))}
        rates = {step: self._learning_rates(step) for step in sorted(steps) if 0 <= step < self.num_steps}
        return {"identity": self.required, "arithmetic": self.arithmetic, "learning_rates": rates}

    def check(self, contents: Mapping[str, Any], path: Path) -> None:
        """Raise a ValueError if a file is of another run; warn if the run will not have the same bits."""
        with runfile.naming(path):
            saved = dict(contents["identity"])
        check_noted(saved, path)
        with runfile.naming(path):
            different_rates = self._different_rates(contents["learning_rates"])
            differing = differences(saved, self.required) or different_rates
            changed = differences(contents["arithmetic"], self.arithmetic)
        if differing:
            raise ValueError(
                f"{path} is of another run:\n  " + "\n  ".join(differing) + "\n"
                "Give what it was saved with, or begin anew with resume=False and another save_dir."
            )
        if contents["step"] > self.length:
            raise ValueError(
                f"{path} has {contents['step']} {self.counted} already, and max_{self.counted}={self.length} are asked "
                "for: give more."
            )
        if changed:
            warn(
                f"The run resumed from {path} will not have the bits of an uninterrupted one:\n  "
                + "\n  ".join(changed)
            )

    def _different_rates(self, saved: Mapping[int, list[float]]) -> list[str]:
        """Return, as a line, the first difference between the learning rates of the saved run and of this one."""
        for step, before in saved.items():
            now = self._learning_rates(step) if step < self.num_steps else before
            if len(now) != len(before) or not all(map(_close, before, now)):
                return [f"learning rate of step {step}: saved {_short(before)}, given {_short(now)}"]
        return []

    def _learning_rates(self, step: int) -> list[float]:
        """Return the inner learning rate at a step, or that of each node; nothing if the optimizer has none."""
        try:
            lr = self.strategy.lr(Context(StackedCollectives(self.num_nodes), step=step, max_steps=self.num_steps))
        except AttributeError:
            return []
        return torch.as_tensor(lr, dtype=torch.float64).detach().reshape(-1).tolist()


def _required(options: FitOptions, simulation: Simulation, train: Batches) -> dict[str, Any]:
    settings = ("seed", "batch_size", "shuffle", "autocast")
    model, trained = simulation.engine.model, simulation.engine.params
    parameters = {
        name: tree.form(p) + ("" if name in trained else ", not trained") for name, p in model.named_parameters()
    }
    return {
        **noted(),
        "num_nodes": simulation.comm.num_nodes,
        **{name: getattr(options, name) for name in settings},
        **fingerprint_of(options.strategy, "strategy"),
        **{f"parameter {name}": kind for name, kind in parameters.items()},
        **{f"buffer {name}": tree.form(b) for name, b in model.named_buffers()},
        "examples of each node": str(list(simulation.num_examples or ())),
        "steps per epoch": train.steps_per_epoch,
        **_order_of_events(options),
        **fingerprint_of(model, "model", weights=False),  # a checkpoint has their values
        **({} if options.availability is None else _availability(options)),
        **fingerprint_of((options.dataloader_kwargs or {}).get("collate_fn"), "collate_fn"),
    }


def _availability(options: FitOptions) -> dict[str, Any]:
    """Describe who is present, and what that may depend on."""
    return {
        **fingerprint_of(options.availability, "availability"),
        **fingerprint_of(options.compute, "compute"),
    }


def _order_of_events(options: FitOptions) -> dict[str, Any]:
    """Describe what an asynchronous run's order of events depends on; that of any other, on nothing."""
    if not options.strategy.asynchronous:
        return {}
    return {**fingerprint_of(options.compute, "compute"), **fingerprint_of(options.network, "network")}


def _arithmetic(options: FitOptions, simulation: Simulation, session: Session) -> dict[str, Any]:
    plan = simulation.engine.plan
    return {
        "device": simulation.engine.device.type,
        "engine": plan.engine,
        "chunk_size": plan.chunk_size,
        "node_threads": plan.node_threads,
        **({"channels_last": True} if plan.channels_last else {}),
        "minibatch_size": options.minibatch_size,
        "exact": options.exact,
        **({} if options.exact else {"num_processes": session.num_processes}),
        "torch": str(torch.__version__),
        "Python, so that the code of functions is not compared": noted()["python"],
    }


def _checksums(train: Batches, simulation: Simulation, session: Session) -> dict[str, Any]:
    """Return checksums of the training data; all processes call this."""
    batch = tree.map_leaves(lambda x: x.flatten(1) if x.dim() > 1 else x[:, None], train.batch(0))
    digests = [int(digest([x[i] for x in tree.leaves(batch)]), 16) for i in range(simulation.num_local)]
    return {
        "first batch of the training data": digest(torch.tensor(session.joined(digests))),
        "training data": checksum(fingerprint_of_data(train.dataset, "data")),
    }


def noted() -> dict[str, Any]:
    """Return the first entries of the description of a run, which say what it can be compared with."""
    return {"description": VERSION, "python": "{}.{}".format(*sys.version_info)}


def check_noted(saved: Mapping[str, Any], where: Any) -> None:
    """Raise a ValueError unless the description of a saved run can be compared with one of today."""
    if saved.get("description") != VERSION:
        raise ValueError(
            f"{where} was written by another version of vecgym, which describes runs differently: they "
            "cannot be compared. Give another path to start anew, or resume with that version of vecgym."
        )


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return the differences, a line each.

    >>> differences({"seed": 1, "strategy.H": 3}, {"seed": 1, "strategy.H": 5})
    ['strategy.H: saved 3, given 5']
    """
    names = [*saved, *(name for name in given if name not in saved)]
    pairs = [(name, saved.get(name, NOTHING), given.get(name, NOTHING)) for name in names if name != "python"]
    if saved.get("python") != given.get("python"):  # whose code differs
        pairs = [(name, a, b) for name, a, b in pairs if not (is_code(a) or is_code(b))]
    lines = [difference(name, a, b) for name, a, b in pairs if not _same(a, b)]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


def difference(name: str, saved: Any, given: Any) -> str:
    """Say what differs.

    >>> difference("strategy.H", 3, 5), difference("model.forward()", "code 0a", "code 0b")
    ('strategy.H: saved 3, given 5', 'model.forward(): other code')
    """
    both = is_code(saved) and is_code(given)
    return f"{name}: other code" if both else f"{name}: saved {saved}, given {given}"


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))


def _short(values: list[float]) -> str:
    return f"{values[0]:.6g}" if len(values) == 1 else str([float(f"{x:.6g}") for x in values[:SHOWN]])


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))
