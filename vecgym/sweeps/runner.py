"""A sweep under way: which configurations share a program, and their training."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm

from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import readable_bytes
from vecgym.core import tree
from vecgym.data import Batches, EvalBatches, num_steps
from vecgym.data.chosen import combined
from vecgym.engine import Engine, hooks
from vecgym.records.rows import counted
from vecgym.runs.interrupts import interrupts
from vecgym.runs.memory import activations
from vecgym.strategy import Context
from vecgym.sweeps.chunk import Chunk
from vecgym.sweeps.configurations import Configuration, alike
from vecgym.sweeps.curves import DIVERGED, FINISHED, PARTIAL, PENDING, Curve
from vecgym.sweeps.parts import exchange_key, has_own, lets_rest, optimizer_key

# On a CPU, a stack of more arithmetic than this in a step gains nothing by being larger: what it costs is no longer
# Python, and its tensors leave the cache. It is 8 configurations of 8 nodes of an MLP with 128 hidden units: in stacks
# of 8 they took 1/1.6 of the time of single runs, in stacks of 2 1/1.2 (one thread).
MAX_FLOP_IN_STACK = 1.3e9
SAVE_INTERVAL_S = 60.0


@dataclass
class Program:
    """Configurations that can be trained in one stack; in several, one after the other, where `chunks` says so."""

    configs: list[Configuration]
    chunks: list[list[int]] = field(default_factory=list)  # indices of configurations
    why: str = ""
    bytes_per_config: int = 0


class Runner:
    """A sweep under way: its configurations, its programs, and what they recorded."""

    def __init__(
        self,
        train_dataset: Any,
        val_dataset: Any,
        axes: Mapping[str, Any],
        configs: list[Configuration],
        *,
        device: torch.device,
        val_size: int | None,
        val_interval: int | None,
        engine: tuple[str, int | None, int | None],
        dataloader_kwargs: Mapping[str, Any] | None,
        chunk_configs: int | None,
        max_memory_bytes: int,
        keep_models: bool,
    ) -> None:
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.axes = axes
        self.configs = configs
        self.device = device
        self.val_size, self.val_interval = val_size, val_interval
        self.engine_settings = engine
        self.dataloader_kwargs = dataloader_kwargs
        self.chunk_configs = chunk_configs
        self.max_memory_bytes = max_memory_bytes
        self.keep_models = keep_models
        self.curves: dict[int, Curve] = {}
        self._engines: dict[tuple[int, int], Engine] = {}
        self._partial: dict[str, Any] | None = None  # the chunk that was left unfinished
        self._batches: dict[tuple[Any, ...], Batches] = {}
        self._val_batches: dict[tuple[Any, ...], EvalBatches] = {}
        for config in configs:
            data = self.batches(config)
            config.num_steps = num_steps(data, config.settings["num_epochs"], config.settings["max_steps"])
            config.strategy.check(config.num_nodes, config.num_steps)
        self._resting = any(lets_rest(config.strategy) for config in configs)
        self.programs = self._programs()

    # data

    def batches(self, config: Configuration) -> Batches:
        s = config.settings
        key = (s["num_nodes"], s["batch_size"], s["seed"], s["shuffle"])
        if key not in self._batches:
            self._batches[key] = Batches(
                self.train_dataset, s["num_nodes"], s["batch_size"], seed=s["seed"], shuffle=s["shuffle"],
                device=self.device, dataloader_kwargs=self.dataloader_kwargs,
            )  # fmt: skip
        return self._batches[key]

    def val_batches(self, config: Configuration) -> EvalBatches | None:
        if self.val_dataset is None or self.val_size == 0:
            return None
        s = config.settings
        size = s["minibatch_size"] or s["batch_size"]
        key = (s["num_nodes"], size, s["seed"])
        if key not in self._val_batches:
            self._val_batches[key] = EvalBatches(
                self.val_dataset, size, self.val_size, s["num_nodes"], seed=s["seed"], device=self.device,
                dataloader_kwargs=self.dataloader_kwargs,
            )  # fmt: skip
        return self._val_batches[key]

    # which configurations go together

    def _programs(self) -> list[Program]:
        groups: list[tuple[tuple[Any, ...], list[Configuration]]] = []
        for config in self.configs:
            key = self._key(config)
            for known, members in groups:
                if known == key and alike(members[0].model, config.model):
                    members.append(config)
                    break
            else:
                groups.append((key, [config]))
        programs = [Program(sorted(members, key=_place)) for _, members in groups]
        for program in programs:
            self._cut(program)
        return programs

    def _key(self, config: Configuration) -> tuple[Any, ...]:
        s = config.settings
        # A step in which nodes of some configurations sit out has no exchange of gradients.
        of_gradients = config.strategy.mean_gradient, self._resting and has_own(config.strategy, "exchange_gradients")
        return s["num_nodes"], s["batch_size"], s["minibatch_size"], config.num_steps, *of_gradients

    def _cut(self, program: Program) -> None:
        """Into as few stacks as memory allows, and of no more configurations than is faster."""
        first = program.configs[0]
        K = first.num_nodes
        batch = tree.map_leaves(lambda x: x[0], self.batches(first).batch(0))
        program.bytes_per_config, flop = _costs(first, batch, self.engine_settings[0])
        size, why = len(program.configs), "all in one stack"
        if self.chunk_configs is not None and self.chunk_configs < size:
            size, why = self.chunk_configs, f"chunk_configs={self.chunk_configs}"
        elif self.chunk_configs is None and self.device.type == "cpu" and size * K * flop > MAX_FLOP_IN_STACK:
            best = max(1, int(MAX_FLOP_IN_STACK // (K * flop)))
            if best < size:
                size, why = best, f"{K * flop / 1e9:.2g} GFLOP a step each: a larger stack is not faster"
        fitting = max(1, self.max_memory_bytes // max(1, program.bytes_per_config))
        if fitting < size:
            each, all_of_it = readable_bytes(program.bytes_per_config), readable_bytes(self.max_memory_bytes)
            size, why = fitting, f"{each} each of {all_of_it}"
        indices = [config.index for config in program.configs]
        number = -(-len(indices) // size)
        size = -(-len(indices) // number)  # equal parts
        program.chunks = [indices[i : i + size] for i in range(0, len(indices), size)]
        program.why = why

    def explain(self) -> str:
        lines = [f"{counted(len(self.configs), 'configuration')} in {counted(len(self.programs), 'program')}:"]
        for i, program in enumerate(self.programs):
            config = program.configs[0]
            s = config.settings
            stacks = f"{len(program.chunks)} stacks of up to {len(program.chunks[0])}"
            stacks = "1 stack" if len(program.chunks) == 1 else stacks
            shared = sorted({type(c.strategy).__name__ for c in program.configs})
            lines.append(
                f"program {i}: {counted(len(program.configs), 'configuration')}, num_nodes={s['num_nodes']}, "
                f"batch_size={s['batch_size']}, {counted(config.num_steps, 'step')}, {type(config.model).__name__}, "
                f"{', '.join(shared)}; {stacks} ({program.why}), "
                f"about {readable_bytes(len(program.chunks[0]) * program.bytes_per_config)}"
            )
            if i > 0:
                lines.append(f"  not with program 0: another {' and another '.join(self._differences(program))}")
        return "\n".join(lines)

    def _differences(self, program: Program) -> list[str]:
        names = ("num_nodes", "batch_size", "minibatch_size", "number of steps", "place of the parameters "
                 "(one copy for all nodes, or one for each)", "kind of exchange (of gradients, where nodes of other "
                 "configurations sit out)")  # fmt: skip
        first, config = self.programs[0].configs[0], program.configs[0]
        found = [name for name, a, b in zip(names, self._key(first), self._key(config)) if a != b]
        return found if alike(first.model, config.model) else [*found, "model"]

    def estimate(self, num_configs: int) -> tuple[float, float]:
        """Seconds and bytes for so many configurations like the first ones, from a few timed steps."""
        program = self.programs[0]
        chunk = self._chunk(program.chunks[0])
        chunk.start()
        seconds = []
        try:
            for batches in itertools.islice(chunk.batches(), 3):  # the first warms up
                start = time.perf_counter()
                chunk.step(batches, False)
                seconds.append(time.perf_counter() - start)
        finally:
            self._close()
        each = min(seconds[1:] or seconds) / len(chunk.configs) * chunk.num_steps
        return each * num_configs, min(num_configs * program.bytes_per_config, self.max_memory_bytes)

    # training

    def run(self, save: Callable[[], None] | None, progress: bool) -> bool:
        """Train all that is not at its end; whether it came to the end, or was interrupted."""
        try:
            return self._run(save, progress)
        finally:
            self._close()

    def _run(self, save: Callable[[], None] | None, progress: bool) -> bool:
        total = sum(config.num_steps for config in self.configs)
        with (
            torch.enable_grad(),
            interrupts() as interrupted,
            tqdm(total=total, disable=not progress, unit="step") as bar,
        ):
            for program in self.programs:
                for chunk in program.chunks:
                    todo = [i for i in chunk if self._is_open(i)]
                    bar.update(sum(self.configs[i].num_steps for i in chunk if i not in todo))
                    if todo:
                        self._run_chunk(todo, interrupted, save, bar)
                    if interrupted:
                        return False
                    if todo and save is not None:
                        save()
        return True

    def _is_open(self, index: int) -> bool:
        return index not in self.curves or self.curves[index].status in (PENDING, PARTIAL)

    def _chunk(self, indices: list[int]) -> Chunk:
        configs = [self.configs[i] for i in indices]
        train, val = map(self.batches, configs), map(self.val_batches, configs)
        return Chunk(configs, self._engine(configs), list(train), list(val))

    def _engine(self, chunk: list[Configuration]) -> Engine:
        """The engine of a chunk; chunks of equal size of a program share one."""
        program = next(i for i, one in enumerate(self.programs) if any(chunk[0] is config for config in one.configs))
        key = program, len(chunk)
        if key not in self._engines:
            kind, chunk_size, node_threads = self.engine_settings
            model = hooks.copied(chunk[0].model).to(self.device)
            engine = Engine(model, engine=kind, chunk_size=chunk_size, node_threads=node_threads)
            with torch.enable_grad():
                engine.prepare(
                    combined(lambda x: torch.cat(list(x)), [self.batches(config).batch(0) for config in chunk])
                )
            self._engines[key] = engine
        return self._engines[key]

    def _close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _run_chunk(self, todo: list[int], interrupted: list[int], save: Callable[[], None] | None, bar: tqdm) -> None:
        """Train configurations together, from the start or from where they were left."""
        chunk = self._resumed(todo) or self._chunk(todo)
        bar.update(chunk.state.step * len(todo))
        try:
            self._train_chunk(chunk, interrupted, save, bar)
        finally:
            chunk.simulation.close()

    def _train_chunk(self, chunk: Chunk, interrupted: list[int], save: Callable[[], None] | None, bar: tqdm) -> None:
        chunk.start()
        saved = time.perf_counter()
        if chunk.state.step == 0:
            chunk.evaluate()
        for batches in chunk.batches():
            is_evaluated = self._is_evaluated(chunk.state.step + 1, chunk.num_steps)
            bar.update(len(chunk.configs))
            self._leave(chunk, chunk.step(batches, is_evaluated), bar)
            if not chunk.configs:
                break
            if is_evaluated:
                chunk.evaluate()
            if interrupted:
                break
            if save is not None and time.perf_counter() - saved > SAVE_INTERVAL_S:
                self._keep_partial(chunk)
                save()
                saved = time.perf_counter()
        if chunk.configs and chunk.state.step < chunk.num_steps:
            self._keep_partial(chunk)
            return
        for c, config in enumerate(chunk.configs):
            self.curves[config.index] = chunk.curve(c, FINISHED, self.keep_models)
        self._partial = None

    def _leave(self, chunk: Chunk, diverged: list[int], bar: tqdm) -> None:
        """The configurations that have diverged end here."""
        for c in diverged:
            self.curves[chunk.configs[c].index] = chunk.curve(c, DIVERGED)
            bar.update(chunk.num_steps - chunk.state.step)
        if diverged:
            chunk.keep([c for c in range(len(chunk.configs)) if c not in diverged])

    def _is_evaluated(self, done: int, num_steps: int) -> bool:
        """Whether the models are evaluated after `done` steps."""
        return done == num_steps or bool(self.val_interval and done % self.val_interval == 0)

    def _keep_partial(self, chunk: Chunk) -> None:
        for c, config in enumerate(chunk.configs):
            self.curves[config.index] = chunk.curve(c, PARTIAL)
        left = [config.index for config in chunk.configs]
        held = {"begun": chunk.begun, "left": left, "state": vars(chunk.state)}
        self._partial = held if chunk.can_be_saved else None

    def _resumed(self, todo: list[int]) -> Chunk | None:
        """What was left unfinished, if these are the configurations of it."""
        held = self._partial
        if held is None or held["left"] != todo:
            return None
        chunk = self._chunk(held["begun"])
        chunk.keep([held["begun"].index(i) for i in todo])
        chunk.load(held["state"], [self.curves[i] for i in todo])
        return chunk

    # saving

    def state(self) -> dict[str, Any]:
        return {
            "chunks": [program.chunks for program in self.programs],
            "curves": {index: curve.state() for index, curve in self.curves.items()},
            "partial": self._partial,
        }

    def load(self, state: dict[str, Any]) -> None:
        for program, chunks in zip(self.programs, state["chunks"]):
            program.chunks = chunks
        self.curves = {index: Curve.of(held) for index, held in state["curves"].items()}
        self._partial = state["partial"]


def _place(config: Configuration) -> tuple[str, str, str, int]:
    """In a stack, equal optimizers are neighbours: each run of equal rows is one call of torch's kernel. Among them
    those are neighbours that can exchange in one call."""
    spec = config.strategy.inner_optim
    return (
        repr(optimizer_key(config.strategy)),
        repr(sorted(spec.kwargs.items())),
        repr(exchange_key(config.strategy)),
        config.index,
    )


def _costs(config: Configuration, batch: Any, engine: str) -> tuple[int, int]:
    """Bytes of a configuration in a stack, roughly, and the floating-point operations of one node's step.

    Args:
        batch: of one node, `[B, ...]`.
    """
    one = Engine(copy.deepcopy(config.model), engine="loop")
    needed = activations(one, tree.map_leaves(lambda x: x[None].to(one.device), batch))
    assert one.facts is not None
    params = {name: p.detach()[None].clone() for name, p in one.params.items()}
    ctx = Context(StackedCollectives(config.num_nodes), max_steps=config.num_steps, seed=config.settings["seed"])
    optimizer, modules = config.strategy.init(params, ctx)
    of_node = 3 * tree.num_bytes(params) + tree.num_bytes(optimizer) + needed.saved_bytes + tree.num_bytes(batch)
    recorded = config.num_steps * (9 * config.num_nodes + 32)
    return config.num_nodes * of_node + tree.num_bytes(modules) + recorded, one.facts.flop
