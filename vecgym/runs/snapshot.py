"""What a checkpoint holds of a run, taken and put back.

It has everything that evolves: the simulation's state of all nodes, the ledger, the history, the states of the global
random generators. Batches and a model's own random numbers are functions of (seed, step, node), so that the step says
where they are. What a run is given (model, data, strategy, settings) is not in it: it is given again, and checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.core import tree
from vecgym.core.errors import warn
from vecgym.engine.simulation import Simulation, State
from vecgym.records import runfile
from vecgym.runs.fingerprint import checksum, described_data, digest
from vecgym.runs.identity import arithmetic, check_learning_rates, check_noted, differences, identity, learning_rates
from vecgym.runs.options import FitOptions
from vecgym.runs.recorder import Recorder
from vecgym.runs.session import Session
from vecgym.strategy.per_rank import PerRankStrategy

FORM: dict[str, Any] = {
    **runfile.FORM,
    "identity": dict,
    "arithmetic": dict,
    "learning_rates": dict,
    "state": {"optimizer": object, "strategy": object},
    "ranks": object,
    "ledger": {"kinds": list, "kind_of_entry": Tensor, "step_of_entry": Tensor, "total_bytes": (int, float)},
    "recorder": {"examples": int, "seconds": (int, float)},
    "random": list,
}


class Snapshots:
    """Takes snapshots of a run, and resumes from them.

    Args:
        simulation, recorder: what evolves.
        options: what the run was given; made before anything has changed, it is noted in each snapshot.
    """

    def __init__(self, options: FitOptions, simulation: Simulation, recorder: Recorder, session: Session) -> None:
        self.strategy = options.strategy  # as the user has given it
        self.simulation = simulation
        self.recorder = recorder
        self.session = session
        self.engine = simulation.engine
        self.device = simulation.engine.device
        train = recorder.data
        batch = tree.map_leaves(lambda x: x.flatten(1) if x.dim() > 1 else x[:, None], train.batch(0))
        digests = [int(digest([x[i] for x in tree.leaves(batch)]), 16) for i in range(simulation.num_local)]
        data = {
            "first batch of the training data": digest(torch.tensor(session.joined(digests))),
            "training data": checksum(described_data(train.dataset, "data")),
        }
        self.identity = identity(self.strategy, self.engine.model, simulation, train, options)
        self.arithmetic = arithmetic(simulation, options, self.device, session.num_processes, data)

    def take(self, state: State) -> dict[str, Any] | None:
        """Return all that evolves, for a file; None in processes other than the first. All processes call it."""
        names = ("params", "buffers", "optimizer", "strategy")
        everyone = self.session.gathered({name: vars(state)[name] for name in names}, self.device)
        random_states = self.session.each(_random_states(self.device))
        if everyone is None:
            return None
        params = {**everyone.pop("params"), **self._frozen()}
        strategy = self.simulation.strategy
        num_nodes, num_steps = self.simulation.comm.num_nodes, self.simulation.max_steps
        return {
            **runfile.record(
                self.engine.model, num_nodes, state.step, params, everyone.pop("buffers"), self.recorder.history
            ),
            "identity": self.identity,
            "arithmetic": self.arithmetic,
            "learning_rates": learning_rates(self.strategy, num_steps, num_nodes),
            "state": everyone,
            "ranks": strategy.state() if isinstance(strategy, PerRankStrategy) else None,
            "ledger": self.recorder.ledger.state(),
            "recorder": self.recorder.state(),
            "random": random_states,
        }

    def check(self, contents: Mapping[str, Any], path: Path) -> None:
        """Raise a ValueError if a snapshot is of another run; warn where the run will not have the same bits."""
        num_nodes, steps = self.simulation.comm.num_nodes, self.simulation.max_steps
        with runfile.naming(path):
            noted = dict(contents["identity"])
        check_noted(noted, path)
        with runfile.naming(path):
            differing = differences(noted, self.identity)
            rates = check_learning_rates(contents["learning_rates"], self.strategy, steps, num_nodes)
            differing = differing or [*filter(None, [rates])]
            changed = differences(contents["arithmetic"], self.arithmetic)
        if differing:
            raise ValueError(
                f"{path} is of another run:\n  " + "\n  ".join(differing) + "\n"
                "Give what it was saved with, or begin anew with resume=False and another save_dir."
            )
        if contents["step"] > steps:
            raise ValueError(
                f"{path} has {contents['step']} steps already, and max_steps={steps} are asked for: give more."
            )
        if changed:
            warn(
                f"The run resumed from {path} will not have the bits of an uninterrupted one:\n  "
                + "\n  ".join(changed)
            )

    def restore(self, contents: Mapping[str, Any], template: State) -> State:
        """Resume from a snapshot: put back everything but the random generators, which are set last."""
        comm, frozen = self.simulation.comm, self.engine.frozen
        models = contents["models"]
        expected = {"params": {**template.params, **self._frozen()}, "buffers": template.buffers}
        _check_alike({kind: models[kind] for kind in expected}, expected, comm.num_nodes)
        trained = {name: models["params"][name] for name in template.params}
        values = runfile.restored({"params": trained, "buffers": models["buffers"], **contents["state"]})
        placed = _placed(self.session.rows_here(values), vars(template), self.device)
        # At its start an optimizer may have less. Its "numbers" are Python's, which may become floats.
        started = {slot: x for slot, x in template.optimizer.items() if slot != "numbers"}
        _check_alike({"optimizer": placed["optimizer"]}, {"optimizer": started}, len(comm.node_ids), more=True)
        _check_random_states(self._random_states(contents), self.device)
        rows = runfile.unpacked_rows(contents["rows"])
        self.recorder.ledger.load(contents["ledger"])
        if isinstance(self.simulation.strategy, PerRankStrategy):
            self.simulation.strategy.load(runfile.restored(contents["ranks"]))
        for name, p in frozen.items():
            p.copy_(models["params"][name][0])
        self.recorder.load(contents["recorder"], rows)
        return State(contents["step"], **placed)

    def set_random_states(self, contents: Mapping[str, Any]) -> None:
        """Set the global random generators, just before the first step."""
        _set_random_states(self._random_states(contents), self.device)

    def _frozen(self) -> dict[str, Tensor]:
        return {name: p[None] for name, p in self.engine.frozen.items()}

    def _random_states(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        states, rank = contents["random"], self.session.rank
        return runfile.restored(states[rank] if len(states) == self.session.num_processes else states[0])


def _check_alike(values: Any, template: Any, num_nodes: int, *, more: bool = False) -> None:
    """Raise an error unless all tensors have the names, dtypes and shapes of the template's; rows: 1 or all."""
    if wrong := runfile.difference(runfile.form(values, num_nodes), runfile.form(template, num_nodes), more=more):
        raise ValueError(wrong)


def _placed(values: Any, template: Any, device: torch.device) -> Any:
    """Put tensors from a file where the run has them; `template` is the state at its start, which may have less."""
    if isinstance(values, Tensor):
        return values.to(template.device if isinstance(template, Tensor) else device, copy=True)
    if isinstance(values, dict):
        known = template if isinstance(template, dict) else {}
        return {key: _placed(x, known.get(key), device) for key, x in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(_placed(x, None, device) for x in values)
    return values


# ------------------------------------------------------------------------------------------- random generators


def _random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators, from which a user's logger, strategy or data may draw."""
    own: Callable[[], Tensor] | None = getattr(getattr(torch, device.type, None), "get_rng_state", None)
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "python": random.getstate(),
        device.type: own() if own is not None and device.type != "cpu" else None,
    }


def _check_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Raise an error for what no generator can be set to."""
    torch.Generator().set_state(states["torch"])
    np.random.RandomState().set_state(states["numpy"])
    random.Random().setstate(states["python"])
    if device.type != "cpu" and states.get(device.type) is not None:
        torch.Generator(device=device).set_state(states[device.type])


def _set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    random.setstate(states["python"])
    if device.type != "cpu" and states.get(device.type) is not None:
        getattr(torch, device.type).set_rng_state(states[device.type])
