"""Programs, the configurations of a sweep that can share a stack, and the number that fits into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vecgym.collectives.ledger import readable_bytes
from vecgym.core import tree
from vecgym.engine.constancy import equal_but_weights
from vecgym.records.rows import counted
from vecgym.runs.memory import available_bytes, passing
from vecgym.runs.options import resolve_device
from vecgym.simulation import RunFacts
from vecgym.simulation.stack import key_of
from vecgym.strategy import Strategy
from vecgym.sweeps.configurations import Configuration, examined
from vecgym.sweeps.options import SweepOptions

# On a CPU, a stack with more arithmetic per step than this is no faster: arithmetic takes the time, not Python, and the
# tensors leave the cache. This much is a step of 8 configurations of 8 nodes of an MLP with 128 hidden units. Stacks of
# 8 took 1/1.4 of the time of single runs, stacks of 4 took 1/1.2 (two threads).
MAX_FLOP_IN_STACK = 1.3e9
# A single run of AllReduce keeps one copy of the parameters, a stack one copy for each node. On a CPU, from about this
# much arithmetic per step of a configuration, the copies cost more than the Python they save: the same MLP took 1.6
# times as long.
MAX_FLOP_OF_ONE_COPY = 8e7


@dataclass
class Program:
    """Configurations that can be trained in one stack.

    Attributes:
        configs: sorted, so that equal optimizers are neighbours.
        chunks: the indices of the configurations in each chunk; chunks are trained in turn.
        reason: for this size of the chunks.
        bytes_per_config: the approximate memory of a configuration in a stack.
        engine: the engine of its last stack, and the reason for it; "" before training.
    """

    configs: list[Configuration]
    chunks: list[list[int]]
    reason: str
    bytes_per_config: int
    engine: str = ""

    def explain(self) -> str:
        """Describe the program in a line."""
        config = self.configs[0]
        stacks = f"{len(self.chunks)} stacks of up to {len(self.chunks[0])}" if len(self.chunks) > 1 else "1 stack"
        what = "update" if config.strategy.asynchronous else "step"
        strategies = sorted({type(config.strategy).__name__ for config in self.configs})
        return (
            f"{counted(len(self.configs), 'configuration')}, num_nodes={config.num_nodes}, "
            f"batch_size={config.settings['batch_size']}, {counted(config.num_steps, what)}, "
            f"{type(config.model).__name__}, {', '.join(strategies)}; {stacks} ({self.reason}), "
            f"about {readable_bytes(len(self.chunks[0]) * self.bytes_per_config)}"
            + (f"; engine: {self.engine}" if self.engine else "")
        )


def make_programs(configs: Sequence[Configuration], options: SweepOptions) -> list[Program]:
    """Group configurations into as few programs as possible."""
    groups: list[tuple[dict[str, Any], list[Configuration]]] = []
    for config in configs:
        key = _key(config)
        for of_group, group in groups:
            if of_group == key and equal_but_weights(group[0].model, config.model):
                group.append(config)
                break
        else:
            groups.append((key, [config]))
    return [_program(sorted(group, key=_sort_key), options) for _, group in groups]


def explain(programs: Sequence[Program]) -> str:
    """Describe the programs, and why configurations are in different ones."""
    num_configs = sum(len(program.configs) for program in programs)
    lines = [f"{counted(num_configs, 'configuration')} in {counted(len(programs), 'program')}:"]
    first = programs[0].configs[0]
    for i, program in enumerate(programs):
        lines.append(f"program {i}: {program.explain()}")
        if i > 0:
            config = program.configs[0]
            differences = [name for name, value in _key(first).items() if value != _key(config)[name]]
            differences += [] if equal_but_weights(first.model, config.model) else ["model"]
            lines.append(f"  not with program 0: another {' and another '.join(differences or ['sweep'])}")
    return "\n".join(lines)


def _key(config: Configuration) -> dict[str, Any]:
    """Return the properties that configurations of one program share, besides the structure of the model."""
    alone = _alone(config.strategy)
    return {
        "kind of strategy (stacked, or each by itself)": type(config.strategy) if alone else None,
        **{name: config.settings[name] for name in ("num_nodes", "batch_size", "minibatch_size")},
        "number of steps": config.num_steps,
        "form of the examples": config.form,
        "availability": config.settings["availability"] is not None,
        "plan (what happens when)": None if alone or config.plan is None else id(config.plan),
        "settings that are no numbers": None if alone or config.plan is None else key_of(config.strategy),
        "place of the parameters (one copy for all nodes, or one for each)": config.strategy.mean_gradient,
    }


def _sort_key(config: Configuration) -> tuple[str, str, int]:
    """Make equal optimizers neighbours, whose rows torch's kernel updates in one call."""
    spec = config.strategy.inner_optim
    return spec.cls.__name__, repr(sorted(spec.kwargs.items())), config.index


def _program(configs: list[Configuration], options: SweepOptions) -> Program:
    """Cut configurations into chunks, as large as memory allows and speed gains from."""
    bytes_per_config, flop = _costs(configs[0])
    size, reason = len(configs), "all in one stack"
    chosen_here = options.chunk_configs is None and size > 1 and resolve_device(options.device).type == "cpu"
    if _alone(configs[0].strategy):
        size, reason = 1, f"{type(configs[0].strategy).__name__}: each by itself"
    elif options.chunk_configs is not None and options.chunk_configs < size:
        size, reason = options.chunk_configs, f"chunk_configs={options.chunk_configs}"
    elif chosen_here and configs[0].strategy.mean_gradient and flop > MAX_FLOP_OF_ONE_COPY:
        size, reason = 1, f"{flop / 1e9:.2g} GFLOP a step with one copy of the parameters: alone they are faster"
    elif chosen_here and size * flop > MAX_FLOP_IN_STACK:
        size = max(1, int(MAX_FLOP_IN_STACK // flop))
        reason = f"{flop / 1e9:.2g} GFLOP a step each: a larger stack is not faster"
    limit = options.max_memory_bytes or available_bytes(resolve_device(options.device))
    fitting = max(1, limit // max(1, bytes_per_config))
    if fitting < size:
        size, reason = fitting, f"{readable_bytes(bytes_per_config)} each of {readable_bytes(limit)}"
    indices = [config.index for config in configs]
    number = -(-len(indices) // size)
    size = -(-len(indices) // number)  # equal parts
    chunks = [indices[i : i + size] for i in range(0, len(indices), size)]
    return Program(configs, chunks, reason, bytes_per_config)


def _alone(strategy: Strategy) -> bool:
    """Whether configurations of this strategy are trained one after the other."""
    # One of its settings may equal only itself.
    return strategy.asynchronous and bool(key_of(strategy) != key_of(strategy))


def _costs(config: Configuration) -> tuple[int, int]:
    """Estimate the bytes of a configuration in a stack, and the floating-point operations of its step."""
    engine, batch = examined(config)
    passing_bytes = passing(engine, tree.map_leaves(lambda x: x[0], batch), most=1, mean=False).peak(1)
    assert engine.facts is not None
    params = {name: p.detach()[None].clone() for name, p in engine.params.items()}
    run = RunFacts(
        config.num_nodes, config.num_steps, num_examples=tuple(config.train.shard_sizes), names=tuple(params)
    )
    own, shared = config.strategy.init(run, params)
    of_node = tree.num_bytes(params) + tree.num_bytes(own) + passing_bytes + tree.num_bytes(batch)
    recorded = config.num_steps * (9 * config.num_nodes + 32)
    total = config.num_nodes * of_node + tree.num_bytes(shared) + recorded
    return total, config.num_nodes * engine.facts.flop
