"""Checkpoints: a run saved from time to time, and gone on with as if it had never stopped.

A checkpoint has everything that evolves: the simulation's state of all nodes, the ledger, the history, the states of
the global random generators. Batches and a model's own random numbers are functions of (seed, step, node), so that the
step says where they are. What a run is given (model, data, strategy, settings) is not in it: it is given again, and
checked. The folder must be seen by all processes of a run; the first of them writes.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vecgym.core import tree
from vecgym.core.errors import warn
from vecgym.core.files import is_regular, remove_partial, write_atomically
from vecgym.data import Batches
from vecgym.engine.simulation import Simulation, State
from vecgym.records import runfile
from vecgym.runs.fingerprint import checksum, described_data, digest
from vecgym.runs.identity import arithmetic, check_learning_rates, check_noted, differences, identity, learning_rates
from vecgym.runs.options import FitOptions
from vecgym.runs.recorder import Recorder
from vecgym.runs.session import Together
from vecgym.strategy import Strategy

NAME = "step-{:09d}.pt"
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


def check_checkpoints(save_dir: Any, checkpoint_interval: Any, resume: Any) -> Path | None:
    """The folder of a run's checkpoints, if any; an error for what cannot work."""
    if not isinstance(resume, (bool, str, os.PathLike)):
        raise TypeError(f"resume={resume!r} must be True, False, or the path of a checkpoint or a folder of them.")
    if save_dir is None:
        if resume is True:
            raise ValueError("resume=True needs save_dir, the folder in which a run's checkpoints are.")
        if checkpoint_interval is not None:
            raise ValueError(f"checkpoint_interval={checkpoint_interval} needs save_dir, the folder to save them in.")
        return None
    if not isinstance(save_dir, (str, os.PathLike)):
        raise TypeError(f"save_dir={save_dir!r} must be the path of a folder, or None.")
    folder = Path(save_dir).absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"save_dir={str(save_dir)!r} is a file; give a folder.")
    return folder


def checkpoints_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, by steps; whole or not. What is no file, such as a pipe, is none."""
    paths = [path for path in Path(folder).glob("step-*.pt") if re.fullmatch(r"step-[0-9]+\.pt", path.name)]
    return sorted((path for path in paths if is_regular(path)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


@dataclass
class Run:
    """What a checkpoint is of: the objects of a run that evolve, and what it must be given again.

    Attributes:
        strategy: as the user has given it.
        model: that of this run, in which parameters that are not trained are kept.
        device: of this process's nodes.
    """

    strategy: Strategy
    model: nn.Module
    simulation: Simulation
    recorder: Recorder
    train: Batches
    options: FitOptions
    together: Together
    device: torch.device
    identity: dict[str, Any] = field(default_factory=dict)
    arithmetic: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> None:
        """Say what the run is given, before anything in it has changed."""
        batch = tree.map_leaves(lambda x: x.flatten(1) if x.dim() > 1 else x[:, None], self.train.batch(0))
        digests = [int(digest([x[i] for x in tree.leaves(batch)]), 16) for i in range(self.simulation.num_local)]
        data = {
            "first batch of the training data": digest(torch.tensor(self.together.joined(digests))),
            "training data": checksum(described_data(self.train.dataset, "data")),
        }
        self.identity = identity(self.strategy, self.model, self.simulation, self.train, self.options)
        self.arithmetic = arithmetic(self.simulation, self.options, self.device, self.together.num_processes, data)

    def held(self, state: State) -> dict[str, Any] | None:
        """All of it, for a file; None in processes other than the first. All processes call it."""
        evolving = {name: x for name, x in vars(state).items() if name != "step"}
        everyone = self.together.gathered(evolving, self.device)
        random_states = self.together.each(_random_states(self.device))
        if everyone is None:
            return None
        params = {**everyone.pop("params"), **{n: p[None] for n, p in self.simulation.engine.frozen.items()}}
        history = self.recorder.history
        num_nodes, num_steps = self.simulation.comm.num_nodes, self.simulation.max_steps
        return {
            **runfile.record(self.model, num_nodes, state.step, params, everyone.pop("buffers"), history),
            "identity": self.identity,
            "arithmetic": self.arithmetic,
            "learning_rates": learning_rates(self.strategy, num_steps, num_nodes),
            "state": everyone,
            "ranks": self.simulation.strategy.hidden_state(),
            "ledger": self.recorder.ledger.state(),
            "recorder": self.recorder.state(),
            "random": random_states,
        }

    def check(self, held: Mapping[str, Any], path: Path) -> None:
        """Raise a ValueError if the checkpoint is of another run; warn where the run will not have the same bits."""
        num_nodes, steps = self.simulation.comm.num_nodes, self.simulation.max_steps
        with runfile.naming(path):
            noted = dict(held["identity"])
        check_noted(noted, path)
        with runfile.naming(path):
            found = differences(noted, self.identity)
            rates = check_learning_rates(held["learning_rates"], self.strategy, steps, num_nodes)
            found = found or [*filter(None, [rates])]
            changed = differences(held["arithmetic"], self.arithmetic)
        if found:
            raise ValueError(
                f"{path} is of another run:\n  " + "\n  ".join(found) + "\n"
                "Give what it was saved with, or begin anew with resume=False and another save_dir."
            )
        if held["step"] > steps:
            raise ValueError(
                f"{path} has {held['step']} steps already, and max_steps={steps} are asked for: give more."
            )
        if changed:
            warn(
                f"The run resumed from {path} will not have the bits of an uninterrupted one:\n  "
                + "\n  ".join(changed)
            )

    def load(self, held: Mapping[str, Any], template: State) -> State:
        """Go on from there: everything but the random generators, which are set last."""
        models, own = held["models"], self.together.own
        frozen, comm = self.simulation.engine.frozen, self.simulation.comm
        given = {"params": {**template.params, **{name: p[None] for name, p in frozen.items()}},
                 "buffers": template.buffers}  # fmt: skip
        _check_alike({kind: models[kind] for kind in given}, given, comm.num_nodes)
        trained = {name: models["params"][name] for name in template.params}
        values = runfile.restored({"params": trained, "buffers": models["buffers"], **held["state"]})
        # Files of earlier versions do not say it; one row where all nodes, of a process each, have done the same.
        values["node_steps"] = values.get("node_steps", torch.tensor([held["step"]])).expand(comm.num_nodes).clone()
        placed = _placed(own(values), vars(template), self.device)
        # At its start an optimizer may have less. Its "numbers" are Python's, which may become floats.
        started = {slot: x for slot, x in template.optimizer.items() if slot != "numbers"}
        _check_alike({"optimizer": placed["optimizer"]}, {"optimizer": started}, len(comm.node_ids), more=True)
        _check_random_states(self._random_states(held), self.device)
        rows = runfile.unpacked_rows(held["rows"])
        self.recorder.ledger.load(held["ledger"])
        if held["ranks"] is not None:
            self.simulation.strategy.load_hidden_state(runfile.restored(held["ranks"]))
        for name, p in frozen.items():
            p.copy_(models["params"][name][0])
        self.recorder.history.rows = rows
        self.recorder.load(held["recorder"])
        return State(held["step"], **placed)

    def set_random_states(self, held: Mapping[str, Any]) -> None:
        _set_random_states(self._random_states(held), self.device)

    def _random_states(self, held: Mapping[str, Any]) -> dict[str, Any]:
        states, rank = held["random"], self.together.rank
        return runfile.restored(states[rank] if len(states) == self.together.num_processes else states[0])


class Checkpoints:
    """When a run is saved, what is kept, and what it goes on from. Without a folder nothing is saved.

    A write that fails (a full disk) warns; the run and what was saved before stay as they are.
    """

    def __init__(self, run: Run) -> None:
        options = run.options
        self.run = run
        self.folder = options.save_dir
        self.interval = options.checkpoint_interval
        self.keep = options.keep_checkpoints
        self.together = run.together
        self.last: Path | None = None  # the newest from which this run can go on
        self.run_id: str | None = None  # of what others keep of the run, such as wandb; one that goes on keeps it
        self._held: dict[str, Any] | None = None

    def resumed(self) -> State | None:
        """The state to go on from, of the newest checkpoint that is whole; None: the run begins."""
        resume = self.run.options.resume
        if self.folder is None and resume is False:
            return None
        self.run.describe()
        state = None if resume is False else self._loaded()
        self.together.first(lambda: self._make_folder(self.last))
        self.run_id = self.together.first(self._run_id)
        return state

    def _run_id(self) -> str:
        elsewhere = self.folder is not None and self.last is not None and self.last.parent != self.folder
        held = "" if self._held is None or elsewhere else str(self._held["settings"].get("run_id"))
        return held if re.fullmatch("[0-9a-f]{16}", held) else secrets.token_hex(8)

    def _loaded(self) -> State | None:
        template: State | None = None
        passed: Path | None = None
        while (path := self.together.first(partial(self._found, passed))) is not None:
            held = runfile.read(path, mmap=self.together.num_processes > 1, check=False)
            state, wrong = None, ""
            try:
                self.run.check(held, path)
                template = template or self.run.simulation.init()
                with runfile.naming(path):
                    state = self.run.load(held, template)
            except runfile.Damaged as error:
                wrong = str(error)
            if not (wrongs := [*filter(None, self.together.each(wrong))]):
                self._held, self.last = held, path
                return state
            if self._folder is None:
                raise runfile.Damaged(wrongs[0])
            self.together.first(partial(_warn_passed, wrongs[0]))
            passed = path
        return None

    def begin(self) -> None:
        """Just before the first step."""
        if self._held is not None:
            self.run.set_random_states(self._held)
            self._held = None

    def save_if_due(self, state: State, last: bool) -> None:
        """Save the start, every `checkpoint_interval` steps, and the end, also that of an interrupted run."""
        due = state.step == 0 or last or (self.interval is not None and state.step % self.interval == 0)
        if self.folder is None or not due:
            return
        self.run.recorder.flush()
        held = self.run.held(state)
        if held is None:
            return
        path = self.folder / NAME.format(state.step)
        try:
            runfile.write(path, held)
        except OSError as error:
            kept = f"the newest checkpoint is {self.last}" if self.last else "this run has no checkpoint"
            warn(f"{path} could not be written: {error}. The run goes on; {kept}.")
            return
        self.last = path
        self._remove_old(state.step)

    def how_to_go_on(self) -> str:
        return "" if self.last is None else f"; resume=True goes on from {self.last}"

    def _remove_old(self, step: int) -> None:
        """Only what is not newer than what was just written: that one is good."""
        older = [path for path in checkpoints_in(self.folder or "") if _step_of(path) <= step]
        for path in older[: -self.keep]:
            with contextlib.suppress(OSError):
                path.unlink()

    @property
    def _folder(self) -> Path | None:
        """Where checkpoints are looked for; None: one was asked for by name."""
        resume = self.run.options.resume
        folder = self.folder if isinstance(resume, bool) else Path(resume).absolute()
        return folder if resume is True or (folder is not None and folder.is_dir()) else None

    def _found(self, passed: Path | None) -> Path | None:
        """The newest checkpoint, older than `passed`, that can be read; None: there was none in the folder."""
        folder, resume = self._folder, self.run.options.resume
        if folder is None:
            assert not isinstance(resume, bool)
            path = Path(resume).absolute()
            runfile.read(path, FORM)  # not as a map, which would not see that a part is too short
            return path
        there = checkpoints_in(folder)
        for path in reversed(there):
            if passed is not None and _step_of(path) >= _step_of(passed):
                continue
            try:
                runfile.read(path, FORM)
                return path
            except runfile.Damaged as error:
                _warn_passed(str(error))
        if there:
            raise ValueError(
                f"none of the checkpoints in {folder} can be read. Give resume=False and another save_dir."
            )
        if resume is not True:
            raise ValueError(f"resume={str(resume)!r}: there is no checkpoint in this folder.")
        return None

    def _make_folder(self, resumed: Path | None) -> None:
        """See before the first step that it can be written to, and that no other run's checkpoints are in it."""
        if self.folder is None:
            return
        there = checkpoints_in(self.folder)
        if resumed is not None and resumed.parent == self.folder:
            # Those that resume=True has passed over cannot be read, and are written anew when the run gets there.
            there = [
                path for path in there if _step_of(path) > _step_of(resumed) and self.run.options.resume is not True
            ]
        if there:
            raise ValueError(
                f"save_dir={str(self.folder)!r} has checkpoints already, up to {there[-1].name}, which would be mixed "
                "with those of this run. Fix: resume=True to go on from them, another save_dir, or remove them."
            )
        try:
            remove_partial(self.folder, "step*")
            with write_atomically(self.folder / "step.probe"):
                pass
            (self.folder / "step.probe").unlink()
        except OSError as error:
            raise ValueError(f"save_dir={str(self.folder)!r} cannot be written to: {error}") from None


def _warn_passed(wrong: str) -> None:
    warn(f"{wrong.rstrip('.')}. The next older checkpoint is taken, if there is one.")


def _check_alike(held: Any, template: Any, num_nodes: int, *, more: bool = False) -> None:
    """Raise an error unless all tensors have the names, dtypes and shapes of the template's; rows: 1 or all."""
    if wrong := runfile.difference(runfile.form(held, num_nodes), runfile.form(template, num_nodes), more=more):
        raise ValueError(wrong)


def _placed(values: Any, template: Any, device: torch.device) -> Any:
    """Tensors from a file where the run has them; `template` is the state at its start, which may have less."""
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
    """Of the global generators, from which a user's logger, strategy or data may draw."""
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
