"""Checkpoints: save a run from time to time, and resume it as if it had never stopped.

A checkpoint holds everything that evolves: the simulation's state of all nodes, the ledger, the history, the states of
the global random generators. Batches and a model's own random numbers are functions of (seed, step, node), so the step
determines them. The inputs of a run (model, data, strategy, settings) are not saved: they are given again, and checked.
All processes of a run must be able to read the folder; the first of them writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vecgym.core.devices import placed_as
from vecgym.core.errors import Damaged, warn
from vecgym.core.files import Lock, is_regular, remove_partial
from vecgym.core.nodes import Nodes
from vecgym.core.rng import GlobalStates
from vecgym.engine.simulation import Simulation, State
from vecgym.records import runfile
from vecgym.runs.identity import Identity
from vecgym.runs.options import FitOptions
from vecgym.runs.recorder import Recorder
from vecgym.runs.session import Session

NAME = "step-{:09d}.pt"
LOCK = ".run.lock"  # there while a run goes on
FORM: dict[str, Any] = {
    **runfile.FORM,
    "identity": dict,
    "arithmetic": dict,
    "learning_rates": dict,
    "loss": float,
    "state": {"optimizer": object, "strategy": object},
    "ranks": object,
    "ledger": {"kinds": list, "kind_of_entry": Tensor, "step_of_entry": Tensor, "total_bytes": int | float},
    "recorder": {"examples": int, "seconds": int | float},
    "random": list,
}


class Snapshots:
    """Take snapshots of a run, and restore them.

    Args:
        simulation, recorder: what evolves.
        session: of the run.
    """

    def __init__(self, simulation: Simulation, recorder: Recorder, session: Session) -> None:
        self.simulation = simulation
        self.recorder = recorder
        self.session = session
        self.engine = simulation.engine

    def take(self, state: State) -> dict[str, Any] | None:
        """Return everything that evolves, for a file; None except in the first process. All processes call this."""
        names, result = ("params", "buffers", "optimizer", "strategy"), self.simulation.result(state)
        own = None if result.params is state.params else result.params
        everyone = self.session.gathered({"result": own, **{name: vars(state)[name] for name in names}})
        node_steps = torch.tensor(self.session.joined(state.node_steps.tolist()))
        random_states = self.session.each(GlobalStates.now().packed())
        if everyone is None:
            return None
        params = {**everyone.pop("params"), **self._frozen()}
        buffers, own, num_nodes = everyone.pop("buffers"), everyone.pop("result"), self.simulation.comm.num_nodes
        saved = Nodes(self.engine.model, num_nodes, params, buffers, result.members, own)
        return {
            **runfile.record(saved, state.step, self.recorder.history),
            "state": {**everyone, "node_steps": node_steps},
            "ranks": self.simulation.strategy.hidden_state(),
            "ledger": self.recorder.ledger.state(),
            "recorder": self.recorder.state(),
            "random": random_states,
        }

    def restore(self, contents: Mapping[str, Any], template: State) -> State:
        """Resume from a snapshot: restore everything but the random generators, which are set last."""
        comm, frozen = self.simulation.comm, self.engine.frozen
        models = contents["models"]
        expected = {"params": {**template.params, **self._frozen()}, "buffers": template.buffers}
        _check_alike({kind: models[kind] for kind in expected}, expected, comm.num_nodes)
        trained = {name: models["params"][name] for name in template.params}
        values = runfile.restored({"params": trained, "buffers": models["buffers"], **contents["state"]})
        placed = placed_as(self.session.rows_here(values), vars(template), self.engine.device)
        # At its start an optimizer may hold less. Its "numbers" are Python's, and may become floats.
        started = {slot: x for slot, x in template.optimizer.items() if slot != "numbers"}
        _check_alike({"optimizer": placed["optimizer"]}, {"optimizer": started}, len(comm.node_ids), more=True)
        self.random_states(contents)
        rows = runfile.unpacked_rows(contents["rows"])
        self.recorder.ledger.load(contents["ledger"])
        if contents["ranks"] is not None:
            self.simulation.strategy.load_hidden_state(runfile.restored(contents["ranks"]))
        for name, p in frozen.items():
            p.copy_(models["params"][name][0])
        self.recorder.load(contents["recorder"], rows)
        return State(contents["step"], **placed)

    def random_states(self, contents: Mapping[str, Any]) -> GlobalStates:
        """Return those of the global random generators; they are set just before the first step."""
        states, rank = contents["random"], self.session.rank
        return GlobalStates.unpacked(states[rank] if len(states) == self.session.num_processes else states[0])

    def _frozen(self) -> dict[str, Tensor]:
        return {name: p[None] for name, p in self.engine.frozen.items()}


def checkpoints_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in a folder, intact or not, in the order of steps. A pipe, say, is not one."""
    paths = [path for path in Path(folder).glob("step-*.pt") if re.fullmatch(r"step-[0-9]+\.pt", path.name)]
    return sorted((path for path in paths if is_regular(path)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


class Checkpointer:
    """Decide when a run is saved, what is kept, and what it resumes from. Without a folder nothing is saved.

    A write that fails (on a full disk) warns; the run continues, and earlier checkpoints stay.

    Attributes:
        last: the newest checkpoint from which this run can resume.
        run_id: names the run in other places, such as wandb; a resumed run keeps it. None: nothing is saved.
        resumed: the state to resume from, of the newest intact checkpoint; None: the run starts.
    """

    def __init__(self, options: FitOptions, simulation: Simulation, recorder: Recorder, session: Session) -> None:
        self.options = options
        self.folder = None if options.save_dir is None else Path(options.save_dir)
        self.simulation = simulation
        self.recorder = recorder
        self.session = session
        self.last: Path | None = None
        self.run_id: str | None = None
        self.resumed: State | None = None
        self._contents: dict[str, Any] | None = None  # of the checkpoint that the run resumes from
        self._lock = None if self.folder is None else Lock(self.folder / LOCK)
        if self.folder is None and options.resume is False:
            return
        session.first(self._take_folder)
        with self.kept():
            self._snapshots = Snapshots(simulation, recorder, session)
            self._identity = Identity(options, simulation, recorder.data, session)
            if options.resume is not False:
                self.resumed = self._load()
            session.first(self._check_folder)
            self.run_id = session.first(self._make_run_id)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the folder, unless the block raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other runs have the folder."""
        if self._lock is not None:
            self._lock.release()

    def begin(self) -> None:
        """Set the global random generators, just before the first step."""
        if self._contents is not None:
            self._snapshots.random_states(self._contents).restore()
            self._contents = None

    def save_if_due(self, state: State, last: bool) -> None:
        """Save at the start, every `checkpoint_interval` steps, and at the end, also that of an interrupted run."""
        interval = self.options.checkpoint_interval
        due = state.step == 0 or last or (interval is not None and state.step % interval == 0)
        if self.folder is None or not due:
            return
        self.recorder.flush()
        contents = self._snapshots.take(state)
        if contents is None:
            return
        path = self.folder / NAME.format(state.step)
        try:
            runfile.write(path, {**contents, **self._identity.record(state)})
        except OSError as error:
            kept = f"the newest checkpoint is {self.last}" if self.last else "this run has no checkpoint"
            warn(f"{path} could not be written: {error}. The run continues; {kept}.")
            return
        self.last = path
        self._remove_old(state.step)

    def how_to_resume(self) -> str:
        """Return the end of a message that says where an interrupted run can be resumed."""
        return "" if self.last is None else f"; resume=True goes on from {self.last}"

    def _load(self) -> State | None:
        """Restore the newest checkpoint that all processes can; None: the folder has none."""
        template: State | None = None
        paths = self.session.first(self._candidates)
        for path in paths:
            state, wrong = None, ""
            try:
                contents = self._read(path)
                self._identity.check(contents, path)
                template = template or self.simulation.init()
                with runfile.naming(path):
                    state = self._snapshots.restore(contents, template)
            except Damaged as error:
                wrong = str(error)
            if not (wrongs := [*filter(None, self.session.each(wrong))]):
                assert state is not None
                self._identity.check_loss(contents, state, path)
                self._contents, self.last = contents, path
                return state
            if self._searched is None:
                raise Damaged(wrongs[0])
            if self.session.rank == 0:
                warn(f"{wrongs[0].rstrip('.')}. The next older checkpoint is taken, if there is one.")
        if paths:
            raise ValueError(
                f"none of the checkpoints in {self._searched} can be read. Give resume=False and another save_dir."
            )
        return None

    @property
    def _searched(self) -> Path | None:
        """The folder to search for checkpoints; None: a file was asked for."""
        resume = self.options.resume
        folder = self.folder if isinstance(resume, bool) else Path(resume).absolute()
        return folder if resume is True or (folder is not None and folder.is_dir()) else None

    def _candidates(self) -> list[Path]:
        """Return the checkpoints to resume from, the newest first."""
        folder, resume = self._searched, self.options.resume
        if folder is None:
            assert not isinstance(resume, bool)
            return [Path(resume).absolute()]
        paths = checkpoints_in(folder)[::-1]
        if not paths and resume is not True:
            raise ValueError(f"resume={str(resume)!r}: there is no checkpoint in this folder.")
        return paths

    def _read(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint. Of several processes the first checks it, and each reads only what it uses."""
        if self.session.num_processes == 1:
            return runfile.read(path, FORM)
        self.session.first(lambda: bool(runfile.read(path, FORM)))  # a map would not show that a part is too short
        return runfile.read(path, mmap=True, check=False)

    def _take_folder(self) -> None:
        """Lock the folder, until the run ends: two that were begun together would mix their checkpoints."""
        if self.folder is None or self._lock is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            holder = self._lock.take()
        except OSError as error:
            raise ValueError(f"save_dir={str(self.folder)!r} cannot be written to: {error}") from None
        if holder is not None:
            raise ValueError(
                f"save_dir={str(self.folder)!r} is in use by another run: {holder} writes its checkpoints there. Give "
                "another save_dir, or wait until it has ended."
            )

    def _check_folder(self) -> None:
        """Check, before the first step, that the folder holds no other run's checkpoints."""
        if self.folder is None:
            return
        present = checkpoints_in(self.folder)
        if self.last is not None and self.last.parent == self.folder:
            # Those that resume=True has skipped cannot be read, and are overwritten when the run gets there.
            present = [p for p in present if _step_of(p) > _step_of(self.last) and self.options.resume is not True]
        if present:
            raise ValueError(
                f"save_dir={str(self.folder)!r} has checkpoints already, up to {present[-1].name}, which would be "
                "mixed with those of this run. Fix: resume=True to resume from them, another save_dir, or remove them."
            )
        remove_partial(self.folder, "step*")

    def _make_run_id(self) -> str:
        elsewhere = self.folder is not None and self.last is not None and self.last.parent != self.folder
        saved = "" if self._contents is None or elsewhere else str(self._contents["settings"].get("run_id"))
        return saved if re.fullmatch("[0-9a-f]{16}", saved) else secrets.token_hex(8)

    def _remove_old(self, step: int) -> None:
        """Remove old checkpoints; never one that is newer than the one just written, which is known to be good."""
        older = [path for path in checkpoints_in(self.folder or "") if _step_of(path) <= step]
        for path in older[: -self.options.keep_checkpoints]:
            with contextlib.suppress(OSError):
                path.unlink()


def _check_alike(values: Any, template: Any, num_nodes: int, *, more: bool = False) -> None:
    """Raise an error unless all tensors have the names, dtypes and shapes of the template's, with 1 row or all."""
    if wrong := runfile.difference(runfile.form(values, num_nodes), runfile.form(template, num_nodes), more=more):
        raise ValueError(wrong)
