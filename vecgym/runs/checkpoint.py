"""Checkpoints: a run saved from time to time, and resumed as if it had never stopped.

What is in one says `vecgym.runs.snapshot`. The folder must be seen by all processes of a run; the first of them writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from functools import partial
from pathlib import Path
from typing import Any

from vecgym.core.errors import Damaged, warn
from vecgym.core.files import is_regular, remove_partial, write_atomically
from vecgym.engine.simulation import Simulation, State
from vecgym.records import runfile
from vecgym.runs.options import FitOptions
from vecgym.runs.recorder import Recorder
from vecgym.runs.session import Session
from vecgym.runs.snapshot import FORM, Snapshots

NAME = "step-{:09d}.pt"


def checkpoints_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in a folder, by steps; whole or not. What is no file, such as a pipe, is none."""
    paths = [path for path in Path(folder).glob("step-*.pt") if re.fullmatch(r"step-[0-9]+\.pt", path.name)]
    return sorted((path for path in paths if is_regular(path)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


class Checkpointer:
    """When a run is saved, what is kept, and what it resumes from. Without a folder nothing is saved.

    A write that fails (a full disk) warns; the run and what was saved before stay as they are.

    Attributes:
        last: the newest checkpoint from which this run can resume.
        run_id: of what others keep of the run, such as wandb; a run that is resumed keeps it. None: nothing is saved.
        resumed: the state to resume from, of the newest checkpoint that is whole; None: the run begins.
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
        if self.folder is None and options.resume is False:
            return
        self._snapshots = Snapshots(options, simulation, recorder, session)
        if options.resume is not False:
            self.resumed = self._load()
        session.first(self._make_folder)
        self.run_id = session.first(self._make_run_id)

    def begin(self) -> None:
        """Set the global random generators, just before the first step."""
        if self._contents is not None:
            self._snapshots.set_random_states(self._contents)
            self._contents = None

    def save_if_due(self, state: State, last: bool) -> None:
        """Save the start, every `checkpoint_interval` steps, and the end, also that of an interrupted run."""
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
            runfile.write(path, contents)
        except OSError as error:
            kept = f"the newest checkpoint is {self.last}" if self.last else "this run has no checkpoint"
            warn(f"{path} could not be written: {error}. The run goes on; {kept}.")
            return
        self.last = path
        self._remove_old(state.step)

    def how_to_resume(self) -> str:
        """Return the end of a message that says where an interrupted run can be resumed."""
        return "" if self.last is None else f"; resume=True goes on from {self.last}"

    def _load(self) -> State | None:
        """Restore the newest checkpoint that all processes can; None: there is none in the folder."""
        template: State | None = None
        passed: Path | None = None
        while (path := self.session.first(partial(self._newest, passed))) is not None:
            contents = runfile.read(path, mmap=self.session.num_processes > 1, check=False)
            state, wrong = None, ""
            try:
                self._snapshots.check(contents, path)
                template = template or self.simulation.init()
                with runfile.naming(path):
                    state = self._snapshots.restore(contents, template)
            except Damaged as error:
                wrong = str(error)
            if not (wrongs := [*filter(None, self.session.each(wrong))]):
                self._contents, self.last = contents, path
                return state
            if self._searched is None:
                raise Damaged(wrongs[0])
            self.session.first(partial(_warn_passed, wrongs[0]))
            passed = path
        return None

    @property
    def _searched(self) -> Path | None:
        """The folder in which checkpoints are looked for; None: one was asked for by name."""
        resume = self.options.resume
        folder = self.folder if isinstance(resume, bool) else Path(resume).absolute()
        return folder if resume is True or (folder is not None and folder.is_dir()) else None

    def _newest(self, passed: Path | None) -> Path | None:
        """Return the newest checkpoint, older than `passed`, that can be read; None: there was none in the folder."""
        folder, resume = self._searched, self.options.resume
        if folder is None:
            assert not isinstance(resume, bool)
            path = Path(resume).absolute()
            runfile.read(path, FORM)  # not as a map, which would not see that a part is too short
            return path
        present = checkpoints_in(folder)
        for path in reversed(present):
            if passed is not None and _step_of(path) >= _step_of(passed):
                continue
            try:
                runfile.read(path, FORM)
                return path
            except Damaged as error:
                _warn_passed(str(error))
        if present:
            raise ValueError(
                f"none of the checkpoints in {folder} can be read. Give resume=False and another save_dir."
            )
        if resume is not True:
            raise ValueError(f"resume={str(resume)!r}: there is no checkpoint in this folder.")
        return None

    def _make_folder(self) -> None:
        """See before the first step that it can be written to, and that no other run's checkpoints are in it."""
        if self.folder is None:
            return
        present = checkpoints_in(self.folder)
        if self.last is not None and self.last.parent == self.folder:
            # Those that resume=True has passed over cannot be read, and are written anew when the run gets there.
            present = [p for p in present if _step_of(p) > _step_of(self.last) and self.options.resume is not True]
        if present:
            raise ValueError(
                f"save_dir={str(self.folder)!r} has checkpoints already, up to {present[-1].name}, which would be "
                "mixed with those of this run. Fix: resume=True to go on from them, another save_dir, or remove them."
            )
        try:
            remove_partial(self.folder, "step*")
            with write_atomically(self.folder / "step.probe"):
                pass
            (self.folder / "step.probe").unlink()
        except OSError as error:
            raise ValueError(f"save_dir={str(self.folder)!r} cannot be written to: {error}") from None

    def _make_run_id(self) -> str:
        elsewhere = self.folder is not None and self.last is not None and self.last.parent != self.folder
        saved = "" if self._contents is None or elsewhere else str(self._contents["settings"].get("run_id"))
        return saved if re.fullmatch("[0-9a-f]{16}", saved) else secrets.token_hex(8)

    def _remove_old(self, step: int) -> None:
        """Remove only what is not newer than what was just written: that one is good."""
        older = [path for path in checkpoints_in(self.folder or "") if _step_of(path) <= step]
        for path in older[: -self.options.keep_checkpoints]:
            with contextlib.suppress(OSError):
                path.unlink()


def _warn_passed(wrong: str) -> None:
    warn(f"{wrong.rstrip('.')}. The next older checkpoint is taken, if there is one.")
