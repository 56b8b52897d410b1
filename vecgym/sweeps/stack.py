"""A stack of configurations under way: trained to its end, or until it is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vecgym.core import nodes
from vecgym.engine import Engine, hooks
from vecgym.sweeps.alone import AsyncChunk
from vecgym.sweeps.chunk import DIVERGED, FINISHED, PARTIAL, Chunk, Curve
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.options import SweepOptions


@dataclass
class Work:
    """What a stack has to do.

    Attributes:
        configs: those that it begins with, or began with.
        partial: where it was left; None: it begins.
        curves: index of a configuration -> what it had recorded when it was left.
    """

    configs: list[Configuration]
    partial: dict[str, Any] | None = None
    curves: dict[int, Curve] = field(default_factory=dict)

    @property
    def indices(self) -> list[int]:
        """Those that are to be trained."""
        return [config.index for config in self.configs] if self.partial is None else list(self.partial["left"])

    @property
    def steps_done(self) -> int:
        """Steps of all configurations, in the part that was done before."""
        return 0 if self.partial is None else self.partial["steps"] * len(self.partial["left"])


class Stack:
    """Configurations that are trained together, from the start or from where they were left.

    Args:
        work: what it has to do.
        engine: prepared; see `prepared_engine`.
        curves: index of a configuration -> what it has recorded: written here.

    Attributes:
        partial: where it was left, if it did not come to its end and can be continued.
    """

    def __init__(self, work: Work, options: SweepOptions, engine: Engine, curves: dict[int, Curve]) -> None:
        self.options, self.curves = options, curves
        self.chunk = chunk = chunk_of(work.configs, engine)
        self.partial = work.partial
        if work.partial is not None:
            left = {c: config.index for c, config in enumerate(chunk.configs) if config.index in work.partial["left"]}
            chunk.load(work.partial["state"], {c: work.curves[index] for c, index in left.items()})

    def steps(self) -> Iterator[int]:
        """Train, and yield after each step how many steps of all configurations are done, or need not be done.

        It ends after the last step, or when no configuration is left. Then comes `end`, and `close` whatever happens.
        """
        chunk, interval = self.chunk, self.options.val_interval
        ticks = chunk.ticks()
        if chunk.state.step == 0:
            chunk.evaluate()
        for events in ticks:
            step, count = chunk.state.step + 1, len(chunk.left)
            evaluated = step == chunk.num_steps or (interval is not None and step % interval == 0)
            diverged = chunk.step(events, evaluated)
            for c in diverged:
                self.curves[chunk.configs[c].index] = chunk.curve(c, DIVERGED)
            if chunk.left and evaluated:
                chunk.evaluate()
            yield count + len(diverged) * (chunk.num_steps - step)
            if not chunk.left:
                return

    def end(self) -> None:
        """Record the configurations that are left: finished, or interrupted."""
        chunk = self.chunk
        if chunk.left and chunk.state.step < chunk.num_steps:
            self.keep()
            return
        for c in chunk.left:
            self.curves[chunk.configs[c].index] = chunk.curve(c, FINISHED, self.options.keep_models)
        self.partial = None

    def close(self) -> None:
        """End the threads of engine and strategies."""
        self.chunk.simulation.close()

    def keep(self) -> None:
        """Keep what has been done so far."""
        chunk = self.chunk
        begun = [config.index for config in chunk.configs]
        left = [begun[c] for c in chunk.left]
        for c, index in zip(chunk.left, left):
            self.curves[index] = chunk.curve(c, PARTIAL)
        partial = {"begun": begun, "left": left, "steps": chunk.state.step, "state": vars(chunk.state)}
        self.partial = partial if chunk.can_be_saved else None


def chunk_of(configs: list[Configuration], engine: Engine) -> Chunk:
    """Return what trains these configurations."""
    return (AsyncChunk if configs[0].strategy.asynchronous else Chunk)(configs, engine)


def prepared_engine(configs: list[Configuration], options: SweepOptions) -> Engine:
    """Return an engine for stacks of configurations like these, and of as many."""
    model = hooks.copied(configs[0].model).to(options.device)
    engine = Engine(
        model, engine=options.engine, chunk_size=options.chunk_size, node_threads=options.node_threads,
        compile=options.compile,
    )  # fmt: skip
    mean = len(configs) == 1 and configs[0].strategy.mean_gradient
    engine.prepare(nodes.join_rows([config.train.batch(0) for config in configs]), mean=mean)
    return engine
