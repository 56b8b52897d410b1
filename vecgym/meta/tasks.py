"""The runs that numbers are learned from: drawn from a function of a seed, and trained side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from vecgym.core import check, rng, tree
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
        seeds: of each run.
        num_steps, num_nodes: of each run.
    """

    models: list[nn.Module]
    batches: list[Any]
    eval_batches: list[Any]
    sizes: list[tuple[int, ...]]
    seeds: list[int]
    num_steps: int
    num_nodes: int

    def twice(self) -> Drawn:
        """Return the runs, and the same once more."""
        models, batches, eval_batches, sizes, seeds, *kind = self
        return Drawn(models * 2, batches * 2, eval_batches * 2, sizes * 2, seeds * 2, *kind)


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
        models, batches, eval_batches, sizes = (list(x) for x in zip(*each))
        return Drawn(models, batches, eval_batches, sizes, list(seeds), num_steps, num_nodes)

    def losses(self, z: Tensor, drawn: Drawn, seed: int = 0) -> Tensor:
        """Return the final loss of each run, `[M]`, with its own coordinates, `[n, M]`, or those of all, `[n, 1]`."""
        options, K = self.options, drawn.num_nodes
        each = self.family.arguments(z, drawn.num_steps, seed)
        strategies = [check.called("strategy_of", options.strategy_of, numbers) for numbers in each]
        if K not in self._engines:
            self._engines[K] = prepared(drawn.models[0], "auto", drawn.batches[0][0])
        shared = {"engine": self._engines[K], "segments": options.segments, "availability": options.availability}
        counted = any(getattr(x, "weighting", "") == "examples" for each in strategies for x in reachable(each))
        sizes = drawn.sizes if counted else None  # runs of unequal sizes share no group: 1.5 times the time
        return rollout(
            drawn.models, strategies if len(strategies) > 1 else strategies[0], drawn.batches,
            num_runs=len(drawn.models), num_nodes=K, eval_batch=drawn.eval_batches, num_examples=sizes,
            seed=drawn.seeds, **shared,
        ).loss  # fmt: skip

    def _one(self, seed: int, num_steps: int, num_nodes: int) -> tuple[nn.Module, list[Any], Any, tuple[int, ...]]:
        """Return the model, the batches, the validation batch and the sizes of the shards of one run."""
        options = self.options
        with rng.private(seed):
            model, train, val = self._checked(check.called("runs", options.runs, seed))
            model = with_loss(model.to(options.device), options.loss_fn)
            made = {"seed": seed, "device": options.device}
            read = Batches(train, num_nodes, options.batch_size, **made)
            batches = list(read.iterate(0, num_steps))
            held_out = EvalBatches(val, options.val_size, options.val_size, num_nodes, **made)
            batch = next(iter(held_out))[0]
        batch = tree.map_leaves(lambda x: x.flatten(0, 1), batch) if held_out.per_node else batch
        return model, batches, batch, tuple(read.shard_sizes)

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
