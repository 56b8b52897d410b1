"""A sweep under way: which configurations share a program, and their training."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import readable_bytes
from vecgym.core import nodes, tree
from vecgym.data import Batches, EvalBatches, num_steps
from vecgym.engine import Engine, hooks
from vecgym.records.rows import counted
from vecgym.runs.interrupts import interrupts
from vecgym.runs.memory import activations
from vecgym.strategy import Context
from vecgym.sweeps.configurations import Configuration, alike
from vecgym.sweeps.curves import DIVERGED, FINISHED, PARTIAL, PENDING, Curve, Record, selected
from vecgym.sweeps.stack import Member, Stack, chosen_batches, exchange_key, joined_batches, optimizer_key

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
        self._partial: tuple[list[int], list[int], Record, dict[str, Any]] | None = None
        self._batches: dict[tuple[Any, ...], Batches] = {}
        self._val_batches: dict[tuple[Any, ...], EvalBatches] = {}
        for config in configs:
            data = self.batches(config)
            config.num_steps = num_steps(data, config.settings["num_epochs"], config.settings["max_steps"])
            config.strategy.check(config.num_nodes, config.num_steps)
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
        return s["num_nodes"], s["batch_size"], s["minibatch_size"], config.num_steps, config.strategy.mean_gradient

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
                 "(one copy for all nodes, or one for each)")  # fmt: skip
        first, config = self.programs[0].configs[0], program.configs[0]
        found = [name for name, a, b in zip(names, self._key(first), self._key(config)) if a != b]
        return found if alike(first.model, config.model) else [*found, "model"]

    def estimate(self, num_configs: int) -> tuple[float, float]:
        """Seconds and bytes for so many configurations like the first ones, from a few timed steps."""
        program = self.programs[0]
        chunk = [self.configs[i] for i in program.chunks[0]]
        stack = self._stack(chunk)
        try:
            seconds = []
            for step in range(3):  # the first warms up
                start = time.perf_counter()
                stack.step(joined_batches([self.batches(c).batch(step) for c in chunk]))
                seconds.append(time.perf_counter() - start)
        finally:
            self._close()
        each = min(seconds[1:]) / len(chunk) * chunk[0].num_steps
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
                        self._run_chunk(chunk, todo, interrupted, save, bar)
                    if interrupted:
                        return False
                    if todo and save is not None:
                        save()
        return True

    def _is_open(self, index: int) -> bool:
        return index not in self.curves or self.curves[index].status in (PENDING, PARTIAL)

    def _stack(self, chunk: list[Configuration]) -> Stack:
        first = chunk[0]
        engine = self._engine(chunk)
        members = [
            Member(
                config.model if self.device.type == "cpu" else copy.deepcopy(config.model).to(self.device),
                config.strategy, config.settings["seed"], StackedCollectives(config.num_nodes),
                tuple(self.batches(config).shard_sizes), self.batches(config).limits,
            )
            for config in chunk
        ]  # fmt: skip
        return Stack(members, engine, max_steps=first.num_steps, minibatch_size=first.settings["minibatch_size"])

    def _engine(self, chunk: list[Configuration]) -> Engine:
        """The engine of a stack; stacks of equal size of a program share one."""
        program = next(i for i, one in enumerate(self.programs) if any(chunk[0] is config for config in one.configs))
        key = program, len(chunk)
        if key not in self._engines:
            kind, chunk_size, node_threads = self.engine_settings
            model = hooks.copied(chunk[0].model).to(self.device)
            engine = Engine(model, engine=kind, chunk_size=chunk_size, node_threads=node_threads)
            with torch.enable_grad():
                engine.prepare(joined_batches([self.batches(config).batch(0) for config in chunk]))
            self._engines[key] = engine
        return self._engines[key]

    def _close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _run_chunk(
        self, chunk: list[int], todo: list[int], interrupted: list[int], save: Callable[[], None] | None, bar: tqdm
    ) -> None:
        """Train the configurations of one stack, from the start or from where they were left."""
        configs = [self.configs[i] for i in todo]
        held = self._partial if self._partial is not None and self._partial[0] == todo else None
        record = Record(configs[0].num_steps, len(configs), configs[0].num_nodes)
        alive = list(range(len(configs)))
        if held is not None:
            alive, record = held[1], held[2]
        stack = self._stack([configs[c] for c in alive])
        if held is not None:
            stack.load(held[3])
        bar.update(stack.done * len(alive))
        T = configs[0].num_steps
        start = saved = time.perf_counter()
        before = float(record.arrays["seconds"][stack.done - 1]) if stack.done else 0.0
        if stack.done == 0:
            self._evaluate(stack, record, configs, alive)
        sources, which = self._sources([configs[c] for c in alive])
        for each in zip(*[source.iterate(stack.done, T) for source in sources]):
            alive, diverged = self._step(stack, record, each, which, alive)
            record.arrays["seconds"][stack.done - 1] = before + time.perf_counter() - start
            bar.update(len(alive))
            if diverged:
                for c in diverged:
                    self._finish(configs[c], record, c, DIVERGED)
                    bar.update(T - int(record.steps[c]) + 1)
                which = self._which([configs[c] for c in alive], sources)
                if not alive:
                    break
            if self._is_evaluated(stack.done, T):
                self._evaluate(stack, record, configs, alive)
            if interrupted:
                break
            if save is not None and time.perf_counter() - saved > SAVE_INTERVAL_S:
                self._keep_partial(todo, alive, record, stack, configs)
                save()
                saved = time.perf_counter()
        if alive and stack.done < T:
            self._keep_partial(todo, alive, record, stack, configs)
            return
        for place, c in enumerate(alive):
            self._finish(configs[c], record, c, FINISHED, stack, place)
        self._partial = None

    def _step(
        self, stack: Stack, record: Record, each: tuple[Any, ...], which: Tensor, alive: list[int]
    ) -> tuple[list[int], list[int]]:
        """One step of a stack; those that go on, and those that diverged."""
        t = stack.done
        is_evaluated = self._is_evaluated(t + 1, len(record.arrays["train_loss"]))
        metrics = stack.step(chosen_batches(list(each), which), measure_distance=is_evaluated)
        losses = metrics.losses.to("cpu", torch.promote_types(metrics.losses.dtype, torch.float32)).numpy()
        arrays = record.arrays
        arrays["train_losses"][t, alive] = losses
        arrays["lr"][t, alive] = metrics.lrs
        arrays["bytes"][t, alive] = metrics.sent_bytes
        if metrics.distances is not None:
            arrays["distance_before"][t, alive] = metrics.distances
        if all(chosen is None for chosen in metrics.active):
            means = losses.mean(axis=1, dtype=np.float64)
            arrays["active"][t, alive] = losses.shape[1]
        else:
            own = [x if chosen is None else x[chosen] for x, chosen in zip(losses, metrics.active)]
            means = np.array([x.mean(dtype=np.float64) if len(x) else np.nan for x in own])
            arrays["active"][t, alive] = [len(x) for x in own]
        arrays["train_loss"][t, alive] = means
        record.steps[alive] = t + 1
        finite = np.isfinite(means) | (arrays["active"][t, alive] == 0)  # where nobody trained, nothing diverged
        if finite.all():
            return alive, []
        going = np.flatnonzero(finite).tolist()
        if going:
            stack.keep(going)
        return [alive[i] for i in going], [alive[i] for i in np.flatnonzero(~finite).tolist()]

    def _is_evaluated(self, done: int, num_steps: int) -> bool:
        """Whether the models are evaluated after `done` steps."""
        return done == num_steps or bool(self.val_interval and done % self.val_interval == 0)

    def _evaluate(self, stack: Stack, record: Record, configs: list[Configuration], alive: list[int]) -> None:
        C, K = len(configs), stack.num_nodes
        row: dict[str, np.ndarray] = {}
        sets = [self.val_batches(configs[c]) for c in alive]
        if sets[0] is not None:
            found = stack.evaluate(sets)  # type: ignore[arg-type]
            local = found.nodes.numpy()
            row = {n: np.full(C, np.nan) for n in ("val_loss", "val_loss_local")}
            row["val_losses"] = np.full((C, K), np.nan)
            row["val_loss"][alive] = found.average.numpy()
            row["val_loss_local"][alive] = local.mean(axis=1)
            row["val_losses"][alive] = local
        if stack.done > 0:
            row["consensus_distance_before"] = record.arrays["distance_before"][stack.done - 1].copy()
            row["consensus_distance"] = np.full(C, np.nan)
            row["consensus_distance"][alive] = stack.consensus_distance()
        if row:
            row["there"] = np.isin(np.arange(C), alive)
            record.evaluations[stack.done] = row

    def _sources(self, configs: list[Configuration]) -> tuple[list[Batches], Tensor]:
        """The different batches of a stack, and which of them each configuration reads."""
        sources = list({id(data): data for data in map(self.batches, configs)}.values())
        return sources, self._which(configs, sources)

    def _which(self, configs: list[Configuration], sources: list[Batches]) -> Tensor:
        places = {id(data): i for i, data in enumerate(sources)}
        return torch.tensor([places[id(self.batches(config))] for config in configs], dtype=torch.long)

    def _finish(
        self, config: Configuration, record: Record, c: int, status: str, stack: Stack | None = None, place: int = 0
    ) -> None:
        curve = record.curve(c)
        curve.status = status
        if stack is not None and self.keep_models:
            held = {**nodes.mean(stack.own_params(place)), **nodes.mean(stack.own_buffers(place))}
            curve.average = {n: x.detach().to("cpu", copy=True) for n, x in held.items()}
        self.curves[config.index] = curve

    def _keep_partial(
        self, todo: list[int], alive: list[int], record: Record, stack: Stack, configs: list[Configuration]
    ) -> None:
        for c in alive:
            self._finish(configs[c], record, c, PARTIAL)
        going = [todo[c] for c in alive]
        if stack.can_be_saved:
            self._partial = ([*going], list(range(len(alive))), selected(record, alive), stack.state())
        else:
            self._partial = None

    # saving

    def state(self) -> dict[str, Any]:
        partial = None
        if self._partial is not None:
            todo, alive, record, stack = self._partial
            partial = {"todo": todo, "alive": alive, "record": record.state(), "stack": stack}
        return {
            "chunks": [program.chunks for program in self.programs],
            "curves": {index: curve.state() for index, curve in self.curves.items()},
            "partial": partial,
        }

    def load(self, state: dict[str, Any]) -> None:
        for program, chunks in zip(self.programs, state["chunks"]):
            program.chunks = chunks
        self.curves = {index: Curve.of(held) for index, held in state["curves"].items()}
        if state["partial"] is not None:
            held = state["partial"]
            first = self.configs[held["todo"][0]]
            record = Record(first.num_steps, len(held["todo"]), first.num_nodes)
            record.load(held["record"])
            stack = tree.map_leaves(lambda x: x.to(self.device), held["stack"])
            self._partial = (held["todo"], held["alive"], record, stack)


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
    ctx = Context(StackedCollectives(config.num_nodes), 0, config.num_steps, config.settings["seed"])
    optimizer, modules = config.strategy.init(params, ctx)
    of_node = 3 * tree.num_bytes(params) + tree.num_bytes(optimizer) + needed.saved_bytes + tree.num_bytes(batch)
    recorded = 8 * config.num_steps * (config.num_nodes + 5)
    return config.num_nodes * of_node + tree.num_bytes(modules) + recorded, one.facts.flop
