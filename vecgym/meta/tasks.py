"""The runs that numbers are learned from: drawn from a function of a seed, and trained side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from vecgym.core import check, nodes, rng, tree
from vecgym.core.objects import reachable
from vecgym.data import Batches, EvalBatches
from vecgym.data.checks import is_factory
from vecgym.engine import Engine
from vecgym.engine.contract import with_loss
from vecgym.meta.curves import Family
from vecgym.runs.rollout import prepared, rollout

HELD_OUT = 10  # of a dataset without another for validation, every tenth example
SEEDS = 2**31  # below it, so that every library takes them
GIVE = "give runs=lambda seed: (model, dataset), or (model, dataset, val_dataset)"


class Drawn(NamedTuple):
    """Some runs: the model, the batches and the validation batch of each.

    Attributes:
        sizes: of each run, the number of examples of each node.
        limits: of each run, `Batches.limits`.
        seeds: of each run.
        num_steps, num_nodes: of each run.
    """

    models: list[nn.Module]
    batches: list[Any]
    eval_batches: list[Any]
    sizes: list[tuple[int, ...]]
    limits: list[tuple[int, ...] | None]
    seeds: list[int]
    num_steps: int
    num_nodes: int

    def times(self, n: int) -> Drawn:
        """Return the runs n times, one after the other."""
        return Drawn._make([*(x * n for x in self[:-2]), self.num_steps, self.num_nodes])


class Tasks:
    """A distribution of runs, and the loss at the end of each of them under a strategy.

    Args:
        options: of `learn`.
        family: coordinates -> the numbers of a strategy.
    """

    def __init__(self, options: Any, family: Family) -> None:
        self.options, self.family = options, family
        self._engines: dict[int, Engine] = {}  # by the number of nodes

    def seeds(self, purpose: str, *ids: int, count: int) -> list[int]:
        """Return the seeds of some runs: those of a step of learning, or some never seen in it."""
        return [rng.key(self.options.seed, f"meta {purpose}", *ids, i) % SEEDS for i in range(count)]

    def draw(self, seeds: Sequence[int], num_steps: int, num_nodes: int) -> Drawn:
        """Make the runs of these seeds."""
        each = [self._one(seed, num_steps, num_nodes) for seed in seeds]
        return Drawn._make([*map(list, zip(*each)), list(seeds), num_steps, num_nodes])

    def losses(self, z: Tensor, drawn: Drawn) -> Tensor:
        """Return the final loss of each run, `[M]`, with its own coordinates, `[n, M]`, or those of all, `[n, 1]`."""
        options = self.options
        each = self.family.arguments(z, drawn.num_steps, drawn.seeds)
        strategies = [check.called("strategy_of", options.strategy_of, numbers) for numbers in each]
        shared = {"engine": self._engine(drawn), "segments": options.segments, "availability": options.availability}
        counted = any(getattr(x, "weighting", "") == "examples" for each in strategies for x in reachable(each))
        sizes = drawn.sizes if counted else None  # runs of unequal sizes share no group: 1.5 times the time
        return rollout(
            drawn.models, strategies if len(strategies) > 1 else strategies[0], drawn.batches,
            num_runs=len(drawn.models), num_nodes=drawn.num_nodes, eval_batch=drawn.eval_batches, num_examples=sizes,
            limits=drawn.limits, seed=drawn.seeds, **shared,
        ).loss  # fmt: skip

    @torch.no_grad()
    def untrained(self, drawn: Drawn) -> float:
        """Return the median loss of the runs before training, a scale that goes with the unit of the loss."""
        engine, pairs = self._engine(drawn), zip(drawn.models, drawn.eval_batches)
        losses = [engine.loss(dict(model.named_parameters()), dict(engine.buffers), batch) for model, batch in pairs]
        scale = float(torch.stack(losses).abs().median())
        return scale if 0 < scale < math.inf else 1.0

    def _engine(self, drawn: Drawn) -> Engine:
        if drawn.num_nodes not in self._engines:
            self._engines[drawn.num_nodes] = prepared(drawn.models[0], "auto", drawn.batches[0][0])
        return self._engines[drawn.num_nodes]

    def _one(self, seed: int, num_steps: int, num_nodes: int) -> tuple[Any, ...]:
        """Return the model, the batches, the validation batch, the sizes of the shards and the limits of one run."""
        options = self.options
        with rng.private(seed):
            model, train, val = self._checked(check.called("runs", options.runs, seed))
            model = with_loss(model.to(options.device), options.loss_fn)
            made = {"seed": seed, "device": options.device}
            read = Batches(train, num_nodes, options.batch_size, **made)
            batches = list(read.iterate(0, num_steps))
            held_out = EvalBatches(val, options.val_size, options.val_size, num_nodes, **made)
            parts = [batch for batch, _ in held_out]
        if held_out.per_node:  # one part for the nodes that have equally many left
            parts = [tree.map_leaves(lambda x: x.flatten(0, 1), part) for part in parts]
        return model, batches, nodes.join_rows(parts), tuple(read.shard_sizes), read.limits

    def _checked(self, made: Any) -> tuple[nn.Module, Any, Any]:
        """Return a run's model, training set and validation set."""
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
            raise TypeError(f"runs returned {made!r}; {GIVE}.")
        model, train, *rest = made
        if rest:
            return model, train, rest[0]
        if is_factory(train):  # which makes validation sets, too
            return model, train, train
        where = torch.arange(len(train)) % HELD_OUT == HELD_OUT - 1
        if not where.any():
            raise ValueError(f"a dataset of {len(train)} examples is too small to hold out every tenth: {GIVE}.")
        return model, Subset(train, (~where).nonzero()[:, 0].tolist()), Subset(train, where.nonzero()[:, 0].tolist())
