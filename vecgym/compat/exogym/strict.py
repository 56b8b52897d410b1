"""A run exactly as EXO Gym's processes make it, in one process: the same batches, random numbers and moments.

Each node is a thread with global random states of its own, and they take turns, so that the nodes' draws (data order
of factories, random transforms, dropout, masks) are those that as many processes would make.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from tqdm.auto import tqdm

from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import Ledger
from vecgym.compat.exogym.communicate import torch_distributed_calls
from vecgym.compat.exogym.strategies import Strategy
from vecgym.compat.exogym.utils import LogModule
from vecgym.core import nodes
from vecgym.core.nodes import Nodes
from vecgym.core.rng import GlobalStates
from vecgym.records.history import History
from vecgym.runs.interrupts import interrupts
from vecgym.runs.recorder import Loggers
from vecgym.strategy import per_rank

PROCESS_SEED = torch.Generator().initial_seed()  # of torch in a process that nobody has seeded


@dataclass
class TrainConfig:
    """What a run is given, under EXO Gym's names."""

    model: nn.Module
    train_dataset: Any
    val_dataset: Any
    strategy: Strategy
    num_nodes: int
    rank: int | None = None
    device: Any = None
    devices: list[int] | None = None
    port: int = 12355
    num_epochs: int = 1
    max_steps: float | None = None
    batch_size: int = 16
    minibatch_size: int = 16
    shuffle: bool = True
    val_size: int = 64
    val_interval: int = 100
    autocast: bool = False
    checkpoint_interval: int | None = None
    correlation_interval: int | None = None
    save_dir: str = "./checkpoints"
    dataloader_kwargs: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class StrictRun:
    """What came of a run."""

    history: History
    ledger: Ledger
    nodes: Nodes


class StrictRecorder:
    """What the nodes observe, as rows; node 0 writes them."""

    def __init__(self, history: History, ledger: Ledger, loggers: Loggers, bar: tqdm, num_nodes: int) -> None:
        self.history = history
        self.ledger = ledger
        self.loggers = loggers
        self.bar = bar
        self.losses = np.full(num_nodes, np.nan)
        self.interrupted: list[int] = []
        self.stop = False

    def row(self, **values: Any) -> None:
        """One row, to the history and to the loggers."""
        self.history.append(values)
        self.loggers.log(values)

    def step(self, **values: Any) -> None:
        """The row of a step; Ctrl-C ends the run after it."""
        sent = {"bytes_step": self.ledger.step_bytes, "bytes_total": self.ledger.total_bytes}
        self.row(**values, train_loss=float(self.losses[0]), train_losses=self.losses.copy(), **sent)
        self.stop = bool(self.interrupted)
        self.bar.update()


class TrainNode(LogModule):
    """One node: its model, data and strategy, and its training loop. Made in the node's thread by `run`."""

    def __init__(self, config: TrainConfig, recorder: StrictRecorder | None = None) -> None:
        if recorder is None:
            raise TypeError("a TrainNode is a part of a run: call Trainer(...).fit(..., num_nodes=K).")
        assert config.rank is not None
        self.config, self.recorder = config, recorder
        self.model, self.strategy, self.device = config.model, config.strategy, config.device
        self.rank, self.num_nodes = config.rank, config.num_nodes
        self.batch_size, self.minibatch_size = config.batch_size, config.minibatch_size
        self.accumulation = self.batch_size // self.minibatch_size
        seed = config.kwargs.get("seed", 42)
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        self._build_loaders()
        if self.num_nodes > 1:
            for p in self.model.parameters():
                self._aside("the first broadcast", p.data, lambda x: x[:1])
        self.local_step = 0
        self.epoch = 0

    def _build_loaders(self) -> None:
        """The sampler's epoch is never set: every epoch has the order of the first."""
        config = self.config
        sampler: DistributedSampler[Any] | None = None
        self.train_dataset, self.val_dataset = config.train_dataset, config.val_dataset
        if callable(self.train_dataset):
            self.train_dataset = self.train_dataset(self.rank, self.num_nodes, train_dataset=True)
        else:
            sampler = DistributedSampler(self.train_dataset, self.num_nodes, self.rank, shuffle=config.shuffle)
        if callable(self.val_dataset):
            self.val_dataset = self.val_dataset(self.rank, self.num_nodes, train_dataset=False)
        kwargs: dict[str, Any] = {"batch_size": self.minibatch_size, **config.dataloader_kwargs}
        self.train_dataloader = DataLoader(self.train_dataset, sampler=sampler, shuffle=sampler is None, **kwargs)
        self.train_data_iter = iter(self.train_dataloader)
        if self.val_dataset is not None:
            self.val_dataloader = DataLoader(self.val_dataset, shuffle=True, **kwargs)
            self.val_data_iter = iter(self.val_dataloader)

    def _get_batch(self, eval: bool = False) -> Any:
        which = "val" if eval else "train"
        try:
            batch = next(getattr(self, f"{which}_data_iter"))
        except StopIteration:
            self.epoch += not eval
            setattr(self, f"{which}_data_iter", iter(getattr(self, f"{which}_dataloader")))
            batch = next(getattr(self, f"{which}_data_iter"))
        if isinstance(batch, (tuple, list)):
            return tuple(x.to(self.device) for x in batch)
        return batch.to(self.device)

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.config.autocast):
            return model(batch)

    def _train_step(self) -> None:
        self.strategy.zero_grad()
        for _ in range(self.accumulation):
            loss = self._loss(self.model, self._get_batch())
            loss.backward()
        for p in self.model.parameters():
            if p.requires_grad and p.grad is not None:
                p.grad /= self.accumulation
        self.lr = getattr(self.strategy, "optim", None) and self.strategy.optim.param_groups[0]["lr"]
        if self.rank == 0:
            self.recorder.ledger.begin_step(self.local_step)
        self.strategy.step()
        self.recorder.losses[self.rank] = loss.item()

    def _evaluate(self) -> dict[str, Any]:
        """Node 0 evaluates its own model, and leaves it in eval() mode; node 1 the average of the nodes."""
        config = self.config
        if config.val_size == 0 or self.val_dataset is None:
            return {}
        average = copy.deepcopy(self.model)
        for p in average.parameters():
            self._aside("an evaluation", p.data, lambda x: x.sum(0, keepdim=True) / self.num_nodes)
        mean = 0.0
        if self.rank in (0, 1):
            model = (self.model if self.rank == 0 else average).eval()
            with torch.no_grad():
                count = int(config.val_size / self.batch_size)
                for _ in range(count * self.accumulation):
                    mean += float(self._loss(model, self._get_batch(eval=True))) / (count * self.accumulation)
        found = per_rank.here()[0].share(self.rank, "the result of an evaluation", mean)
        return {"val_loss": found[min(1, self.num_nodes - 1)], "val_losses": np.array(found[:1])}

    def train(self) -> None:
        """The run of this node."""
        config = self.config
        steps = config.max_steps
        if steps is None:
            steps = config.num_epochs * len(self.train_dataloader) / self.accumulation
        self.strategy.max_steps = steps
        self.recorder.bar.total = steps
        examples = 0
        pending: dict[str, Any] = {"step": 0, "epoch": 0.0, "examples": 0, "bytes_total": 0.0}
        while self.local_step < steps and not self.recorder.stop:
            if self.local_step % config.val_interval == 0:
                found = self._evaluate()
                if self.rank == 0 and found:
                    self.recorder.row(**{**pending, **found})
            self._train_step()
            self.local_step += 1
            examples += self.batch_size * self.num_nodes
            per_rank.barrier()
            epoch = self.local_step * self.accumulation / len(self.train_dataloader)
            pending = {"step": self.local_step, "epoch": epoch, "examples": examples}
            more = {"correlation": self._correlation()} if self._correlation_due() else {}
            if self.rank == 0:
                self.recorder.step(**pending, lr=self.lr, **more)
            per_rank.barrier()
        found = self._evaluate()
        if self.rank == 0 and found:
            self.recorder.row(**{**pending, **found})

    def _correlation_due(self) -> bool:
        interval = self.config.correlation_interval
        return interval is not None and self.local_step % interval == 0

    def _correlation(self) -> float:
        flat = [p.detach() for p in self.model.parameters()]
        every = per_rank.here()[0].share(self.rank, "a correlation", flat)
        return nodes.correlation({str(i): torch.stack(x) for i, x in enumerate(zip(*every))}, self.num_nodes)

    def _aside(self, operation: str, value: Tensor, compute: Callable[[Tensor], Tensor]) -> None:
        """A collective that is no part of the training: not in the ledger."""
        value.copy_(per_rank.here()[0].exchange(self.rank, operation, value, compute)[0])

    def __config__(self, remove_keys: Sequence[str] | None = None) -> dict[str, Any]:
        hidden = ("config", "recorder", "model", "strategy", "train_dataloader", "val_dataloader", *(remove_keys or ()))
        return super().__config__(hidden)


def run(config: TrainConfig, loggers: Loggers, settings: dict[str, Any], progress: bool, result: StrictRun) -> None:
    """Train, and put what comes of it into `result`, also when it is interrupted."""
    num_nodes = config.num_nodes
    comm = StackedCollectives(num_nodes, ledger=result.ledger)
    trained: list[TrainNode | None] = [None] * num_nodes
    meeting = per_rank.Meeting(comm, [GlobalStates.seeded(PROCESS_SEED)] * num_nodes)
    with (
        torch_distributed_calls(),
        ThreadPoolExecutor(num_nodes, "vecgym-rank") as threads,
        interrupts() as interrupted,
        tqdm(disable=not progress, unit="step") as bar,
    ):
        recorder = StrictRecorder(result.history, comm.ledger, loggers, bar, num_nodes)
        recorder.interrupted = interrupted

        def work(rank: int) -> None:
            model = copy.deepcopy(config.model).to(config.device)
            strategy = copy.deepcopy(config.strategy)
            strategy.strict_timing = True
            strategy._init_node(model, rank, num_nodes)
            own = copy.copy(config)
            own.rank, own.model, own.strategy = rank, model, strategy
            trained[rank] = TrainNode(own, recorder)
            trained[rank].train()  # type: ignore[union-attr]

        try:
            loggers.start(settings)
            per_rank.run_ranks(work, meeting, threads)
        finally:
            loggers.finish()
            _gather(config, trained, result)
    if recorder.stop:
        raise KeyboardInterrupt(f"interrupted after step {len(result.history)}")


def _gather(config: TrainConfig, trained: list[TrainNode | None], result: StrictRun) -> None:
    models = [node.model for node in trained if node is not None]
    if len(models) == config.num_nodes:
        for kind in ("params", "buffers"):
            named = [dict(getattr(m, f"named_{'parameters' if kind == 'params' else kind}")()) for m in models]
            stacked = {name: torch.stack([own[name].detach() for own in named]) for name in named[0]}
            setattr(result.nodes, kind, stacked)
