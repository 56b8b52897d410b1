"""Very small models with data that fits them, in float64: what a case trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

CLASSES = 3


class Perceptron(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, CLASSES)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.second(self.first(x).tanh()), y)


class Named(Perceptron):
    """The same, of a batch that is a dict."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward((batch["x"], batch["y"]))


class Convolution(nn.Module):
    """A convolution with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1, bias=False)  # a bias before a norm has a gradient of rounding errors
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2 * 4, CLASSES)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.norm(self.conv(x.view(-1, 1, 2, 2))).tanh()
        return F.cross_entropy(self.head(x.flatten(1)), y)


class Tied(nn.Module):
    """An embedding that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch: Any) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self.head(self.mix(self.tokens(tokens)).tanh()).flatten(0, 1), following.flatten())


class Recurrent(nn.Module):
    """An LSTM, which vmap runs as the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.lstm(x.view(-1, 2, 2))[0][:, -1]), y)


class Partly(nn.Module):
    """A frozen layer, a parameter that nothing uses, a scalar, an integer buffer and one that follows the data."""

    seen: Tensor
    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(5, CLASSES)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("center", torch.zeros(4))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.head(self.frozen(x - self.center).tanh() * self.scale), y)
        if self.training:
            with torch.no_grad():
                self.seen.add_(len(x))
                self.center.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return loss


class Matrices(nn.Module):
    """Matrices only, which is what Muon asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)
        self.second = nn.Linear(6, CLASSES, bias=False)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.second(self.first(x).tanh()), y)


class Quadratic(nn.Module):
    """|x - c|^2 / 2; batch (c,)."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(4))

    def forward(self, batch: Any) -> Tensor:
        return (self.x - batch[0]).square().sum(-1).mean() / 2


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": Perceptron,
    "named": Named,
    "convolution": Convolution,
    "tied": Tied,
    "recurrent": Recurrent,
    "partly": Partly,
    "matrices": Matrices,
    "quadratic": Quadratic,
}


# ------------------------------------------------------------------------------- models that few would think of


class Idle(Perceptron):
    """Parameters without influence, a layer, a scalar and an empty one, between those that have some."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.idle = nn.Linear(3, 2)
        self.first = nn.Linear(4, 5)
        self.idle_scale = nn.Parameter(torch.tensor(2.0))
        self.idle_none = nn.Parameter(torch.zeros(0, 3))
        self.second = nn.Linear(5, CLASSES)


class Empty(Perceptron):
    """Parameters and a buffer without elements, which the loss goes through."""

    none: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(4, 0)
        self.nothing = nn.Parameter(torch.zeros(0))
        self.register_buffer("none", torch.zeros(2, 0))

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) + self.narrow(batch[0]).sum() + self.nothing.sum() + self.none.sum()


class Turned(Perceptron):
    """A parameter that is stored in another order of its dimensions, and one of which only a view is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight = nn.Parameter(self.first.weight.detach().t().contiguous().t())
        self.wide = nn.Parameter(torch.randn(2, CLASSES))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.second(self.first(x).tanh()) + self.wide[1], y)


class Written(Perceptron):
    """The base of those that write to themselves in a forward pass of the training."""

    def forward(self, batch: Any) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.write(batch[0])
        return super().forward(batch)

    def write(self, x: Tensor) -> None:
        raise NotImplementedError


class Clamped(Written):
    """To a parameter, without a look at the data."""

    def write(self, x: Tensor) -> None:
        self.first.weight.clamp_(-0.3, 0.3)


class Centered(Written):
    """To a parameter, by the data."""

    def write(self, x: Tensor) -> None:
        self.first.weight.sub_(x.mean(0), alpha=0.01)


class Refilled(Written):
    """To a parameter, through its `data`."""

    def write(self, x: Tensor) -> None:
        self.second.bias.data = self.second.bias.data * 0.9


class Following(Written):
    """To a buffer that follows a parameter, and to one that counts."""

    slow: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slow", self.first.bias.detach().clone())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def write(self, x: Tensor) -> None:
        self.slow.lerp_(self.first.bias, 0.2)
        self.count.add_(1)

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) + (self.first.bias - self.slow).square().sum()


class Seldom(Written):
    """To a buffer, and to a parameter, in every third pass only."""

    slow: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slow", torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def write(self, x: Tensor) -> None:
        self.count.add_(1)
        if int(self.count) % 3 == 0:
            self.slow.copy_(self.first.bias)
            self.second.bias.mul_(0.9)

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) + (self.first.bias - self.slow).square().sum()


class Teacher(Written):
    """To a frozen parameter, which follows one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Parameter(torch.zeros(5), requires_grad=False)

    def write(self, x: Tensor) -> None:
        self.slow.lerp_(self.first.bias, 0.2)

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) + (self.first.bias - self.slow).square().sum()


class Normed(nn.Module):
    """An embedding whose forward pass shortens the rows that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4, max_norm=0.8)
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, batch: Any) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self.head(self.tokens(tokens).tanh()).flatten(0, 1), following.flatten())


class Counting(Perceptron):
    """It counts its calls in Python, to no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, batch: Any) -> Tensor:
        self.calls += 1
        return super().forward(batch)


ODD: dict[str, Callable[[], nn.Module]] = {
    "idle": Idle,
    "empty": Empty,
    "turned": Turned,
    "clamped": Clamped,
    "centered": Centered,
    "refilled": Refilled,
    "following": Following,
    "seldom": Seldom,
    "teacher": Teacher,
    "normed": Normed,
    "counting": Counting,
}
REFUSED = ("seldom", "teacher")  # for what all nodes hold together they would write to
UNUSED = {"partly": ("unused",), "idle": ("idle.weight", "idle.bias", "idle_scale", "idle_none")}


def unused(name: str) -> frozenset[str]:
    """The parameters that the loss does not depend on: a run leaves them out."""
    return frozenset(UNUSED.get(name, ()))


class Rows(Dataset[Any]):
    """A dataset of Python objects: an example at a time, a dict or a tuple."""

    def __init__(self, tensors: tuple[Tensor, ...], names: tuple[str, ...] | None = None) -> None:
        self.tensors = tensors
        self.names = names

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        values = tuple(x[index] for x in self.tensors)
        return dict(zip(self.names, values)) if self.names else values


def make_model(name: str, seed: int) -> nn.Module:
    """The model, with parameters that depend on the seed alone, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {**MODELS, **ODD}[name]().double()


def tensors(name: str, count: int, seed: int) -> tuple[Tensor, ...]:
    """Examples, `[count, ...]` each."""
    g = torch.Generator().manual_seed(seed)
    if name in ("tied", "normed"):
        tokens = torch.randint(6, (count, 4), generator=g)
        return tokens[:, :-1].contiguous(), (tokens[:, 1:] + tokens[:, :-1]).remainder(6).contiguous()
    x = torch.randn(count, 4, generator=g, dtype=torch.float64)
    if name == "quadratic":
        return (x,)
    return x, (x[:, :CLASSES] + 0.5 * x[:, 1:]).argmax(1)


def dataset(name: str, kind: str, count: int, seed: int) -> Dataset[Any]:
    """`kind` "tensor": read at once; "python": an example at a time."""
    data = tensors(name, count, seed)
    if name == "named":
        return Rows(data, ("x", "y"))
    return Rows(data) if kind == "python" else TensorDataset(*data)


def as_batch(name: str, tensors: tuple[Tensor, ...]) -> Any:
    """Examples as the model takes them."""
    return dict(zip(("x", "y"), tensors)) if name == "named" else tensors
