"""A run exactly as EXO Gym's processes make it, in one process: the same batches, random numbers and moments.

Each node is a thread with global random states of its own, and the nodes take turns. So their draws (data order of
factories, random transforms, dropout, masks) are those that as many processes would make.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from tqdm.auto import tqdm

from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import Ledger
from vecgym.compat.exogym.communicate import torch_distributed_calls
from vecgym.compat.exogym.config import TrainConfig
from vecgym.compat.exogym.strict.behaviour import AsExoGym
from vecgym.core import nodes
from vecgym.core.nodes import Nodes
from vecgym.core.rng import GlobalStates
from vecgym.records.history import History
from vecgym.runs.interrupts import interrupts
from vecgym.runs.recorder import Loggers
from vecgym.strategy import per_rank

PROCESS_SEED = torch.Generator().initial_seed()  # of torch in a process that nobody has seeded


class StrictRun:
    """One run.

    Attributes:
        history, ledger, nodes: the results; after an interrupt, as far as it came.
    """

    def __init__(self, config: TrainConfig, loggers: Loggers, progress: bool) -> None:
        self.config, self.loggers, self.progress = config, loggers, progress
        self.history = History({"num_nodes": config.num_nodes, "batch_size": config.batch_size, "strict_timing": True})
        self.ledger = Ledger()
        self.nodes = Nodes(copy.deepcopy(config.model), config.num_nodes, {}, {})
        self.losses = np.full(config.num_nodes, np.nan)
        self.stop = False
        self._models: dict[int, nn.Module] = {}

    def loop(self) -> None:
        """Train.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after the step in progress.
        """
        num_nodes = self.config.num_nodes
        comm = StackedCollectives(num_nodes, ledger=self.ledger)
        meeting = per_rank.Meeting(comm, [GlobalStates.seeded(PROCESS_SEED)] * num_nodes)
        with (
            torch_distributed_calls(),
            ThreadPoolExecutor(num_nodes, "vecgym-rank") as threads,
            interrupts() as self._interrupted,
            tqdm(disable=not self.progress, unit="step") as self.bar,
        ):
            try:
                self.loggers.start(self.history.settings)
                per_rank.run_ranks(self._train_node, meeting, threads)
            finally:
                self.loggers.finish()
                self._gather()
        if self.stop:
            raise KeyboardInterrupt(f"interrupted after step {len(self.history)}")

    def _train_node(self, rank: int) -> None:
        model = copy.deepcopy(self.config.model).to(self.config.device)
        strategy = copy.deepcopy(self.config.strategy)
        strategy.behaviour = AsExoGym()
        strategy._init_node(model, rank, self.config.num_nodes)
        node = TrainNode(replace(self.config, rank=rank, model=model, strategy=strategy), self)
        self._models[rank] = model
        node.train()

    def _record(self, row: dict[str, Any]) -> None:
        """Record a row; node 0 does it for all."""
        self.history.append(row)
        self.loggers.log(row)

    def _record_step(self, row: dict[str, Any]) -> None:
        """Record the row of a step; Ctrl-C ends the run after it."""
        names = ("bytes_step", "bytes_total", "bytes_received_total", "bytes_payload_total")
        sent = dict(zip(names, (self.ledger.step_bytes, *self.ledger.totals)))
        self._record({**row, "train_loss": float(self.losses[0]), "train_losses": self.losses.copy(), **sent})
        self.stop = bool(self._interrupted)
        self.bar.update()

    def _gather(self) -> None:
        if len(self._models) == self.config.num_nodes:
            models = [self._models[rank] for rank in range(self.config.num_nodes)]
            self.nodes.params = _stacked([dict(model.named_parameters()) for model in models])
            self.nodes.buffers = _stacked([dict(model.named_buffers()) for model in models])


def _stacked(each: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([values[name].detach() for values in each]) for name in each[0]}


class TrainNode:
    """One node: its model, data and strategy, and its training loop. A `StrictRun` makes it in the node's thread."""

    def __init__(self, config: TrainConfig, run: StrictRun | None = None) -> None:
        if run is None:
            raise TypeError("a TrainNode is a part of a run: call Trainer(...).fit(..., num_nodes=K).")
        self.config, self.run = config, run
        self.model, self.strategy, self.device = config.model, config.strategy, torch.device(config.device or "cpu")
        self.rank, self.num_nodes, self.local_step = config.rank, config.num_nodes, 0
        self.minibatch_size = config.minibatch_size or config.batch_size
        self.accumulation = config.batch_size // self.minibatch_size
        torch.manual_seed(config.seed)
        np.random.seed(config.seed)  # noqa: NPY002
        self._build_loaders()
        if self.num_nodes > 1:
            for p in self.model.parameters():
                self._aside("the first broadcast", p.data, lambda x: x[:1])

    def _build_loaders(self) -> None:
        """Build the loaders. The sampler's epoch is never set: every epoch has the order of the first."""
        config = self.config
        given = {"train": config.train_dataset, "val": config.val_dataset}
        found = {
            name: x(self.rank, self.num_nodes, train_dataset=name == "train") if callable(x) else x
            for name, x in given.items()
        }
        sampler: DistributedSampler[Any] | None = None
        if not callable(config.train_dataset):
            sampler = DistributedSampler(found["train"], self.num_nodes, self.rank, shuffle=config.shuffle)
        kwargs: dict[str, Any] = {"batch_size": self.minibatch_size, **(config.dataloader_kwargs or {})}
        self._loaders = {"train": DataLoader(found["train"], sampler=sampler, shuffle=sampler is None, **kwargs)}
        if found["val"] is not None:
            self._loaders["val"] = DataLoader(found["val"], shuffle=True, **kwargs)
        self._iterators = {name: iter(loader) for name, loader in self._loaders.items()}

    def _loss(self, model: nn.Module, name: str) -> Tensor:
        """Return the loss of the next batch of a loader."""
        batch = next(self._iterators[name], None)
        if batch is None:
            self._iterators[name] = iter(self._loaders[name])
            batch = next(self._iterators[name])
        several = isinstance(batch, (tuple, list))
        batch = tuple(x.to(self.device) for x in batch) if several else batch.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.autocast):
            return model(batch)

    def train(self) -> None:
        """Train, and evaluate when it is due."""
        config = self.config
        steps = config.max_steps or config.num_epochs * self._steps_per_epoch
        self.strategy.max_steps = self.run.bar.total = steps
        row: dict[str, Any] = {"step": 0, "epoch": 0.0, "examples": 0, "bytes_total": 0.0}
        while self.local_step < steps and not self.run.stop:
            if self.local_step % config.val_interval == 0:
                self._evaluate(row)
            row = self._step()
        self._evaluate(row)

    @property
    def _steps_per_epoch(self) -> float:
        return len(self._loaders["train"]) / self.accumulation

    def _step(self) -> dict[str, Any]:
        """Make a step, and return its place in the run."""
        config = self.config
        lr = self._train_step()
        self.local_step += 1
        per_rank.barrier()
        examples = self.local_step * config.batch_size * self.num_nodes
        row = {"step": self.local_step, "epoch": self.local_step / self._steps_per_epoch, "examples": examples}
        more = {}
        if config.correlation_interval is not None and self.local_step % config.correlation_interval == 0:
            more["correlation"] = self._correlation()
        if self.rank == 0:
            self.run._record_step({**row, "lr": lr, **more})
        per_rank.barrier()
        return row

    def _train_step(self) -> Any:
        """Compute gradients, and let the strategy make its step; return the learning rate."""
        self.strategy.zero_grad()
        for _ in range(self.accumulation):
            loss = self._loss(self.model, "train")
            loss.backward()
        for p in self.model.parameters():
            if p.requires_grad and p.grad is not None:
                p.grad /= self.accumulation
        lr = self.strategy.optim.param_groups[0]["lr"] if hasattr(self.strategy, "optim") else None
        if self.rank == 0:
            self.run.ledger.begin_step(self.local_step)
        self.strategy.step()
        self.run.losses[self.rank] = loss.item()
        return lr

    def _evaluate(self, row: dict[str, Any]) -> None:
        """Evaluate: node 0 its own model, which it leaves in eval() mode, and node 1 the average of the nodes."""
        config = self.config
        if config.val_size == 0 or "val" not in self._loaders:
            return
        average = copy.deepcopy(self.model)
        for p in average.parameters():
            self._aside("an evaluation", p.data, lambda x: x.sum(0, keepdim=True) / self.num_nodes)
        mean = 0.0
        if self.rank in (0, 1):
            model = (self.model if self.rank == 0 else average).eval()
            with torch.no_grad():
                count = int(config.val_size / config.batch_size) * self.accumulation
                for _ in range(count):
                    mean += float(self._loss(model, "val")) / count
        found = per_rank.here()[0].share(self.rank, "the result of an evaluation", mean)
        if self.rank == 0:
            self.run._record({**row, "val_loss": found[min(1, self.num_nodes - 1)], "val_losses": np.array(found[:1])})

    def _correlation(self) -> float:
        flat = [p.detach() for p in self.model.parameters()]
        every = per_rank.here()[0].share(self.rank, "a correlation", flat)
        return nodes.correlation({str(i): torch.stack(x) for i, x in enumerate(zip(*every))}, self.num_nodes)

    def _aside(self, operation: str, value: Tensor, compute: Callable[[Tensor], Tensor]) -> None:
        """Make a collective that is no part of the training, and not in the ledger."""
        value.copy_(per_rank.here()[0].exchange(self.rank, operation, value, compute)[0])
