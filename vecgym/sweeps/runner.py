"""A sweep under way: its programs are trained, chunk after chunk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tqdm.auto import tqdm

from vecgym.engine import Engine
from vecgym.runs.multiprocess import interrupts
from vecgym.sweeps.chunk import PARTIAL, PENDING, Curve
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.dispatch import Dispatch
from vecgym.sweeps.options import SweepOptions
from vecgym.sweeps.programs import make_programs
from vecgym.sweeps.stack import Stack, Work, prepared_engine

SAVE_INTERVAL_S = 60.0


class Runner:
    """A sweep under way.

    Attributes:
        options: of the sweep.
        axes: name -> values.
        configs: one for each point, in order.
        programs: the configurations that can be stacked.
        curves: index of a configuration -> what it has recorded.
    """

    def __init__(self, options: SweepOptions, axes: Mapping[str, Any], configs: list[Configuration]) -> None:
        self.options = options
        self.axes = axes
        self.configs = configs
        self.programs = make_programs(configs, options)
        self.curves: dict[int, Curve] = {}
        self._engines: dict[tuple[int, int], Engine] = {}
        self._partials: list[dict[str, Any]] = []  # the chunks that were left unfinished

    def run(self, save: Callable[[], None]) -> bool:
        """Train all that is not finished; return whether it came to the end, or was interrupted."""
        total = sum(config.num_steps for config in self.configs)
        shown = tqdm(total=total, disable=not self.options.progress, unit="step")
        try:
            with torch.enable_grad(), interrupts() as interrupted, shown as bar:
                works = [work for program in self.programs for chunk in program.chunks if (work := self._work(chunk))]
                bar.update(total - sum(self.configs[i].num_steps for work in works for i in work.indices))
                bar.update(sum(work.steps_done for work in works))
                if self.options.executor is not None:
                    return self._dispatch(works, interrupted, save, bar)
                for work in works:
                    self._train(work, interrupted, save, bar)
                    if interrupted:
                        return False
                    save()
            return True
        finally:
            self._close()

    def _work(self, chunk: list[int]) -> Work | None:
        """Return what is left to do of a chunk, from the start or from where it was left."""
        todo = [i for i in chunk if i not in self.curves or self.curves[i].status in (PENDING, PARTIAL)]
        partial = next((each for each in self._partials if each["left"] == todo), None)
        if partial is None:
            return Work([self.configs[i] for i in todo]) if todo else None
        return Work([self.configs[i] for i in partial["begun"]], partial, {i: self.curves[i] for i in todo})

    def _train(self, work: Work, interrupted: list[int], save: Callable[[], None], bar: tqdm) -> None:
        """Train a stack here."""
        stack = Stack(work, self.options, self._engine(work.configs), self.curves)
        saved = time.perf_counter()
        with contextlib.closing(stack):
            for done in stack.steps():
                bar.update(done)
                if interrupted:
                    break
                if time.perf_counter() - saved > SAVE_INTERVAL_S:
                    stack.keep()
                    self._leave(work, stack.partial)
                    save()
                    saved = time.perf_counter()
        stack.end()
        self._leave(work, stack.partial)

    def _dispatch(self, works: list[Work], interrupted: list[int], save: Callable[[], None], bar: tqdm) -> bool:
        """Have the stacks trained by the workers of an executor."""

        def record(work: Work, found: dict[str, Any]) -> None:
            self.curves |= found["curves"]
            self.programs[self._program(work.configs)].engine = found["engine"]
            self._leave(work, found["partial"])
            bar.update(sum(self.configs[i].num_steps for i in work.indices) - work.steps_done)
            save()

        return Dispatch(self.options, works, record).run(interrupted) if works else True

    def _leave(self, work: Work, partial: dict[str, Any] | None) -> None:
        """Note where a stack was left; None: it has come to its end, or cannot be continued."""
        others = [each for each in self._partials if not set(each["left"]) & set(work.indices)]
        self._partials = others if partial is None else [*others, partial]

    def _engine(self, chunk: list[Configuration]) -> Engine:
        """Return the engine of a chunk; chunks of equal size of a program share one."""
        program = self._program(chunk)
        key = program, len(chunk)
        if key not in self._engines:
            with torch.enable_grad():
                self._engines[key] = prepared_engine(chunk, self.options)
                self.programs[program].engine = str(self._engines[key].plan)
        return self._engines[key]

    def _program(self, chunk: list[Configuration]) -> int:
        return next(i for i, one in enumerate(self.programs) if any(chunk[0] is config for config in one.configs))

    def _close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def state(self) -> dict[str, Any]:
        """Return what has been done, for a file."""
        return {
            "chunks": [program.chunks for program in self.programs],
            "curves": {index: curve.state() for index, curve in self.curves.items()},
            "partial": self._partials,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` has returned."""
        for program, chunks in zip(self.programs, state["chunks"]):
            program.chunks = chunks
        self.curves = {index: Curve(**saved) for index, saved in state["curves"].items()}
        partial = state["partial"]  # in older files one, or None
        self._partials = partial if isinstance(partial, list) else [] if partial is None else [partial]
