"""A sweep under way: its programs are trained, chunk after chunk."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tqdm.auto import tqdm

from vecgym.core import nodes
from vecgym.engine import Engine, hooks
from vecgym.runs.interrupts import interrupts
from vecgym.sweeps.chunk import Chunk
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.curves import DIVERGED, FINISHED, PARTIAL, PENDING, Curve
from vecgym.sweeps.options import SweepOptions
from vecgym.sweeps.programs import make_programs, max_memory_bytes

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
        self._partial: dict[str, Any] | None = None  # the chunk that was left unfinished

    def estimate(self, num_configs: int) -> tuple[float, float]:
        """Return seconds and bytes for so many configurations like the first ones, from a few timed steps."""
        program = self.programs[0]
        chunk = self._chunk(program.chunks[0])
        seconds = []
        try:
            for batches in itertools.islice(chunk.batches(), 3):  # the first warms up
                start = time.perf_counter()
                chunk.step(batches, False)
                seconds.append(time.perf_counter() - start)
        finally:
            self._close()
        each = min(seconds[1:] or seconds) / len(chunk.configs) * chunk.num_steps
        return each * num_configs, min(num_configs * program.bytes_per_config, max_memory_bytes(self.options))

    def run(self, save: Callable[[], None]) -> bool:
        """Train all that is not finished; return whether it came to the end, or was interrupted."""
        total = sum(config.num_steps for config in self.configs)
        shown = tqdm(total=total, disable=not self.options.progress, unit="step")
        try:
            with torch.enable_grad(), interrupts() as interrupted, shown as bar:
                for indices in [chunk for program in self.programs for chunk in program.chunks]:
                    todo = [i for i in indices if self._is_open(i)]
                    bar.update(sum(self.configs[i].num_steps for i in indices if i not in todo))
                    if todo:
                        self._run_chunk(todo, interrupted, save, bar)
                    if interrupted:
                        return False
                    if todo:
                        save()
            return True
        finally:
            self._close()

    def _is_open(self, index: int) -> bool:
        return index not in self.curves or self.curves[index].status in (PENDING, PARTIAL)

    def _chunk(self, indices: list[int]) -> Chunk:
        configs = [self.configs[i] for i in indices]
        return Chunk(configs, self._engine(configs))

    def _engine(self, chunk: list[Configuration]) -> Engine:
        """Return the engine of a chunk; chunks of equal size of a program share one."""
        program = next(i for i, one in enumerate(self.programs) if any(chunk[0] is config for config in one.configs))
        key = program, len(chunk)
        if key not in self._engines:
            options = self.options
            model = hooks.copied(chunk[0].model).to(options.device)
            engine = Engine(
                model, engine=options.engine, chunk_size=options.chunk_size, node_threads=options.node_threads,
                compile=options.compile,
            )  # fmt: skip
            with torch.enable_grad():
                engine.prepare(nodes.join_rows([config.train.batch(0) for config in chunk]))
            self._engines[key] = engine
        return self._engines[key]

    def _close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _run_chunk(self, todo: list[int], interrupted: list[int], save: Callable[[], None], bar: tqdm) -> None:
        """Train configurations together, from the start or from where they were left."""
        chunk = self._resumed(todo) or self._chunk(todo)
        bar.update(chunk.state.step * len(todo))
        try:
            self._train(chunk, interrupted, save, bar)
        finally:
            chunk.simulation.close()
        if chunk.configs and chunk.state.step < chunk.num_steps:
            self._keep_partial(chunk)
            return
        for c, config in enumerate(chunk.configs):
            self.curves[config.index] = chunk.curve(c, FINISHED, self.options.keep_models)
        self._partial = None

    def _train(self, chunk: Chunk, interrupted: list[int], save: Callable[[], None], bar: tqdm) -> None:
        """Train a chunk to its end, or until an interrupt, or until no configuration is left."""
        interval = self.options.val_interval
        all_batches = chunk.batches()
        saved = time.perf_counter()
        if chunk.state.step == 0:
            chunk.evaluate()
        for batches in all_batches:
            step = chunk.state.step + 1
            evaluated = step == chunk.num_steps or (interval is not None and step % interval == 0)
            bar.update(len(chunk.configs))
            self._end_diverged(chunk, chunk.step(batches, evaluated), bar)
            if not chunk.configs:
                break
            if evaluated:
                chunk.evaluate()
            if interrupted:
                break
            if time.perf_counter() - saved > SAVE_INTERVAL_S:
                self._keep_partial(chunk)
                save()
                saved = time.perf_counter()

    def _end_diverged(self, chunk: Chunk, diverged: list[int], bar: tqdm) -> None:
        """End the configurations that have diverged, and continue with the others."""
        for c in diverged:
            self.curves[chunk.configs[c].index] = chunk.curve(c, DIVERGED)
            bar.update(chunk.num_steps - chunk.state.step)
        if diverged:
            chunk.keep([c for c in range(len(chunk.configs)) if c not in diverged])

    def _keep_partial(self, chunk: Chunk) -> None:
        """Keep what a chunk has done so far."""
        for c, config in enumerate(chunk.configs):
            self.curves[config.index] = chunk.curve(c, PARTIAL)
        left = [config.index for config in chunk.configs]
        partial = {"begun": chunk.begun, "left": left, "state": vars(chunk.state)}
        self._partial = partial if chunk.can_be_saved else None

    def _resumed(self, todo: list[int]) -> Chunk | None:
        """Return the chunk that was left unfinished, if it has these configurations."""
        partial = self._partial
        if partial is None or partial["left"] != todo:
            return None
        chunk = self._chunk(partial["begun"])
        chunk.keep([partial["begun"].index(i) for i in todo])
        chunk.load(partial["state"], [self.curves[i] for i in todo])
        return chunk

    def state(self) -> dict[str, Any]:
        """Return what has been done, for a file."""
        return {
            "chunks": [program.chunks for program in self.programs],
            "curves": {index: curve.state() for index, curve in self.curves.items()},
            "partial": self._partial,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` has returned."""
        for program, chunks in zip(self.programs, state["chunks"]):
            program.chunks = chunks
        self.curves = {index: Curve.of(saved) for index, saved in state["curves"].items()}
        self._partial = state["partial"]
