"""Small models for the tests, each `forward(batch) -> scalar loss`, and synthetic data that fits them.

    model = make_model("GPT", dtype=torch.float64)              # always the same initial parameters
    data = make_data("GPT", 100, seed=0, dtype=torch.float64)   # a tree of tensors [100, ...]
    batches = make_batches("GPT", steps=5, num_nodes=4)         # batches[step][node]

No gradient is zero by symmetry (no convolution bias before a batch norm, no bias on attention keys): sign and
Adam updates would otherwise follow rounding noise, and no two programs would agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Data = tuple[Tensor, ...] | dict[str, Tensor]  # every tensor [examples, ...]


class MLP(nn.Module):
    """16 -> 32 -> 10 with ReLU; batch (x [B, 16], y [B])."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.second(self.first(x).relu()), y)


class CNN(nn.Module):
    """Two convolutions with batch norm and max-pool; batch (x [B, 1, 8, 8], y [B])."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 2 * 2, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        x = F.max_pool2d(self.norm1(self.conv1(x)).relu(), 2)  # [B, 4, 4, 4]
        x = F.max_pool2d(self.norm2(self.conv2(x)).relu(), 2)  # [B, 8, 2, 2]
        return F.cross_entropy(self.head(x.flatten(1)), y)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.num_heads, C // self.num_heads).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )  # [B, heads, T, C / heads]
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(B, T, C)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Tiny GPT whose embedding and head share one weight; batch (tokens [B, 8], next tokens [B, 8])."""

    def __init__(
        self,
        num_layers: int = 2,
        width: int = 16,
        num_heads: int = 2,
        context: int = 8,
        vocab: int = 17,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, num_heads, dropout) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight  # tied
        nn.init.normal_(self.head.weight, std=0.2)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # [B, T, vocab]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LSTM(nn.Module):
    """One nn.LSTM layer, the last output classified; batch (x [B, 6, 5], y [B])."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, num_layers=1, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        outputs, _ = self.lstm(x)
        return F.cross_entropy(self.head(outputs[:, -1]), y)


class Quadratic(nn.Module):
    """a/2 mean_b ||x - c_b||^2; batch c [B, dim], or the one-tuple (c,) that a TensorDataset gives."""

    def __init__(self, dim: int = 5, a: float = 1.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(dim))
        self.a = a

    def forward(self, batch: Tensor | tuple[Tensor]) -> Tensor:
        c = batch if isinstance(batch, Tensor) else batch[0]
        return self.a / 2 * (self.x - c).square().sum(-1).mean()


class Table(nn.Module):
    """The mean of the rows of an embedding that a batch of tokens names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 1)

    def forward(self, index: Tensor) -> Tensor:
        return self.table(index).mean()


class WithFrozen(nn.Module):
    """An MLP with a frozen first layer, an integer buffer (examples seen) and a float one (mean)."""

    seen: Tensor
    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32).requires_grad_(False)
        self.second = nn.Linear(32, 10)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("center", torch.zeros(16))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.second(self.first(x - self.center).relu()), y)
        if self.training:
            with torch.no_grad():
                self.seen.add_(len(x))
                self.center.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return loss


class Dropout(nn.Module):
    """An MLP with dropout; batch (x [B, 16], y [B])."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(32, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.second(self.dropout(self.first(x).relu())), y)


class Checkpointed(MLP):
    """An MLP that recomputes its activations in the backward pass: torch.func.vmap cannot run it."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        hidden = checkpoint(lambda x: self.first(x).relu(), x, use_reentrant=False)
        return F.cross_entropy(self.second(hidden), y)


class DataDependent(MLP):
    """An MLP whose Python control flow looks at the loss: vmap cannot run it."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().forward(batch)
        if loss.item() > 2.3:
            loss = 0.5 * loss
        return loss


class DictBatch(MLP):
    """An MLP whose batch is a dict: {"features": [B, 16], "labels": [B]}."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward((batch["features"], batch["labels"]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": MLP,
    "CNN": CNN,
    "GPT": GPT,
    "LSTM": LSTM,
    "Quadratic": Quadratic,
    "WithFrozen": WithFrozen,
    "Dropout": Dropout,
    "Checkpointed": Checkpointed,
    "DataDependent": DataDependent,
    "DictBatch": DictBatch,
}

NO_VMAP = ("Checkpointed", "DataDependent")  # torch.func.vmap raises on these
RANDOM = ("Dropout",)  # these draw random numbers in forward


def make_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model `name` with initial parameters that depend on `seed` only (the same in every dtype)."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback for the devices
        return MODELS[name]().to(dtype)


def mlp_data(n: int, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return labelled(torch.randn(n, 16, generator=g, dtype=torch.float64), g, dtype)


def cnn_data(n: int, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return labelled(torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64), g, dtype)


def gpt_data(n: int, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Arithmetic progressions modulo the vocabulary: what comes next can be learned."""
    start = torch.randint(17, (n, 1), generator=g)
    stride = torch.randint(1, 4, (n, 1), generator=g)
    tokens = (start + stride * torch.arange(8 + 1)) % 17  # [n, context + 1]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def lstm_data(n: int, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return labelled(torch.randn(n, 6, 5, generator=g, dtype=torch.float64), g, dtype)


def quadratic_data(n: int, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randn(n, 5, generator=g, dtype=torch.float64).to(dtype),)


def dict_data(n: int, g: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    x, y = mlp_data(n, g, dtype)
    return {"features": x, "labels": y}


def labelled(x: Tensor, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x with one of 10 labels from a random linear teacher: (x [n, ...], y [n])."""
    teacher = torch.randn(x[0].numel(), 10, generator=g, dtype=torch.float64)
    return x.to(dtype), (x.flatten(1) @ teacher).argmax(1)


DATA: dict[str, Callable[[int, torch.Generator, torch.dtype], Data]] = {
    "MLP": mlp_data,
    "CNN": cnn_data,
    "GPT": gpt_data,
    "LSTM": lstm_data,
    "Quadratic": quadratic_data,
    "WithFrozen": mlp_data,
    "Dropout": mlp_data,
    "Checkpointed": mlp_data,
    "DataDependent": mlp_data,
    "DictBatch": dict_data,
}


def make_data(name: str, num_examples: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Data:
    """A data set for the model `name`: a tuple of tensors [num_examples, ...], or a dict of them.

    The numbers depend on `seed` only: in every dtype the same ones, rounded; integers stay integers.
    """
    return DATA[name](num_examples, torch.Generator().manual_seed(seed), dtype)


def take(data: Data, index: Any) -> Any:
    """The batch of these examples, a tree like `data`."""
    if isinstance(data, dict):
        return {key: value[index] for key, value in data.items()}
    return tuple(value[index] for value in data)


def make_batches(
    name: str,
    steps: int,
    num_nodes: int,
    batch_size: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[list[Any]]:
    """`batches[step][node]`: fresh examples for each node at each step, no example twice."""
    data = make_data(name, steps * num_nodes * batch_size, seed, dtype)
    index = torch.arange(steps * num_nodes * batch_size).view(steps, num_nodes, batch_size)
    return [[take(data, index[step, node]) for node in range(num_nodes)] for step in range(steps)]
