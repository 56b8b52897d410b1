"""The models and synthetic batches that the benchmarks share, and what they print about the machine."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # inputs and targets, [B, ...] or [L, B, ...]


class MLP(nn.Module):
    """Two linear layers with ReLU; batch (x [B, inputs], y [B])."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class CNN(nn.Module):
    """Two 3x3 convolutions with 2x2 max-pools, two linear layers; batch (x [B, 1, 28, 28], y [B])."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # [B, 16, 14, 14]
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # [B, 32, 7, 7]
            nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class GPT(nn.Module):
    """nanoGPT's architecture without dropout; batch (tokens [B, T], targets [B, T]). It is `vecgym.models.GPT`, written
    here once more, so that the baselines run without vecgym."""

    def __init__(self, context: int, num_layers: int, num_heads: int, width: int, vocab_size: int = 65) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([_Block(width, num_heads) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, batch: Batch) -> Tensor:
        tokens, targets = batch
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]  # [B, T, C]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # the embedding is also the head
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for y in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, T, C / heads]
        x = x + self.project(attended.transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def _dense(inputs: tuple[int, ...], classes: int) -> Callable[[int, torch.Generator], Batch]:
    def draw(n: int, generator: torch.Generator) -> Batch:
        return torch.randn(n, *inputs, generator=generator), torch.randint(classes, (n,), generator=generator)

    return draw


def _tokens(context: int, vocab_size: int) -> Callable[[int, torch.Generator], Batch]:
    def draw(n: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(vocab_size, (n, context + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return draw


@dataclass(frozen=True)
class Workload:
    """A model, its data, and the number of nodes it is measured with."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    batch_size: int  # of one node
    num_nodes: int

    def model(self) -> nn.Module:
        """The model, always with the same initial parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()

    def data(self, num_examples: int, seed: int = 0) -> Batch:
        """Examples `[num_examples, ...]`."""
        return self.draw(num_examples, torch.Generator().manual_seed(seed))

    def batch(self, num_nodes: int, seed: int = 0) -> Batch:
        """The batches of all nodes in one step, `[K, B, ...]`."""
        x, y = self.data(num_nodes * self.batch_size, seed)
        return x.unflatten(0, (num_nodes, -1)), y.unflatten(0, (num_nodes, -1))


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in [
        Workload("tiny", lambda: MLP(16, 32, 2), _dense((16,), 2), batch_size=8, num_nodes=512),
        Workload("mlp", lambda: MLP(784, 128, 10), _dense((784,), 10), batch_size=32, num_nodes=64),
        Workload("cnn", CNN, _dense((1, 28, 28), 10), batch_size=32, num_nodes=16),
        Workload("gpt", lambda: GPT(64, 2, 4, 64), _tokens(64, 65), batch_size=8, num_nodes=16),
        Workload("gpt256", lambda: GPT(128, 4, 8, 256), _tokens(128, 65), batch_size=4, num_nodes=4),
    ]
}


def machine() -> dict[str, str]:
    """The circumstances of figures: date, versions, threads, processor."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "cpu": _cpu(),
    }


def header() -> str:
    """`machine()` in one line."""
    return ", ".join(f"{name} {value}" for name, value in machine().items())


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table: the first column to the left, the others to the right.

    >>> print(markdown(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|--:|
    | x | 1 |
    """
    rule = "|---|" + "--:|" * (len(columns) - 1)
    return "\n".join([_line(columns), rule, *map(_line, rows)])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
