"""Very small models with data that fits them, in float64: what a case trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
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


# ----------------------------------------------------------------------------------------- models as people write them


class Experts(nn.Module):
    """A mixture of experts: a loop over those that an example of the batch has chosen, each its strongest `top`."""

    top = 1

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, CLASSES) for _ in range(4))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        weights, chosen = self.gate(3 * x).softmax(1).topk(self.top)
        out = x.new_zeros(len(x), CLASSES)
        for i in chosen.unique().tolist():
            rows, place = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, weights[rows, place, None] * self.experts[i](x[rows]))
        return F.cross_entropy(out, y)


class ExpertPairs(Experts):
    """Two experts for each example."""

    top = 2


class Heads(Perceptron):
    """A head for each task, which the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(5, CLASSES) for _ in range(3))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        head = self.heads[int(x[0, 0].abs() * 10) % 3]
        return F.cross_entropy(head(self.first(x).tanh()) + self.second(x.new_ones(5)), y)


class Modality(Perceptron):
    """A branch for batches that have something, and none for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(4, CLASSES)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        out = self.second(self.first(x).tanh())
        if bool(x.mean() > 0.1):
            out = out + self.more(x)
        return F.cross_entropy(out, y)


class Joining(Perceptron):
    """A layer that joins after some passes, by a buffer that counts; and one that leaves."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early = nn.Linear(5, 5), nn.Linear(5, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        if self.training:
            self.calls += 1
        hidden = self.first(x).tanh()
        hidden = hidden + (self.late if self.calls > 3 else self.early)(hidden)
        return F.cross_entropy(self.second(hidden), y)


class Thawed(Perceptron):
    """Its trunk is detached in every other pass."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        if self.training:
            self.calls += 1
        hidden = self.first(x).tanh()
        return F.cross_entropy(self.second(hidden if self.calls % 2 else hidden.detach()), y)


CHOOSING: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts, "expert_pairs": ExpertPairs, "heads": Heads, "modality": Modality, "joining": Joining,
    "thawed": Thawed,
}  # fmt: skip


class Hidden(Perceptron):
    """A hidden state that goes from batch to batch, in a buffer that is replaced."""

    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.zeros(5))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        state = (self.first(x) + self.hidden).tanh()
        if self.training:
            self.hidden = state.detach().mean(0)
        return F.cross_entropy(self.second(state), y)


class Queue(Perceptron):
    """Contrast with a queue of earlier features, and a pointer into it that moves on the device."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(6, 5))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        features = self.first(x).tanh()
        loss = F.cross_entropy(self.second(features), y) + (features @ self.queue.clone().t()).logsumexp(1).mean()
        if self.training:
            self.remember(features.detach().mean(0))
        return loss

    def remember(self, x: Tensor) -> None:
        self.queue = self.queue.index_copy(0, self.place, x[None])
        self.place.add_(1).remainder_(6)


class QueueOfPython(Queue):
    """The same with a pointer that is read."""

    def remember(self, x: Tensor) -> None:
        place = int(self.place)
        self.queue[place] = x
        self.place[0] = (place + 1) % 6


class Annealed(Perceptron):
    """A weight that grows with a buffer that counts, and a running mean that is corrected by it."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        corrected = self.mean / (1 - 0.9 ** self.calls.clamp(min=1))
        weight = (self.calls / 8).clamp(max=1)
        out = self.second(self.first(x - corrected).tanh())
        return F.cross_entropy(out, y) + weight * out.square().mean()


class Bootstrapped(Perceptron):
    """A target network in buffers, which follows the trained one."""

    target: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("target", self.first.weight.detach().clone())

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        features = self.first(x).tanh()
        loss = F.cross_entropy(self.second(features), y) + (features - (x @ self.target.t()).tanh()).square().mean()
        if self.training:
            with torch.no_grad():
                self.target.mul_(0.8).add_(self.first.weight, alpha=0.2)
        return loss


class Spectral(Perceptron):
    """A spectral norm, whose vectors are buffers."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.first)


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "hidden": Hidden, "queue": Queue, "queue_of_python": QueueOfPython, "annealed": Annealed,
    "bootstrapped": Bootstrapped, "spectral": Spectral,
}  # fmt: skip


class Mixup(Perceptron):
    """Examples are mixed, by numbers of numpy."""

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        if not self.training:
            return super().forward(batch)
        share = float(np.random.beta(0.4, 0.4))  # noqa: NPY002
        order = torch.from_numpy(np.random.permutation(len(x)))  # noqa: NPY002
        out = self.second(self.first(share * x + (1 - share) * x[order]).tanh())
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])


class LayerDrop(Perceptron):
    """Layers are left out at random, by Python's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.first(x).tanh()
        for layer in self.layers:
            if not (self.training and random.random() < 0.4):
                hidden = hidden + layer(hidden).tanh()
        return F.cross_entropy(self.second(hidden), y)


class Noisy(Perceptron):
    """Noise of numpy, Python and torch in one pass."""

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        if self.training:
            x = x + 0.1 * random.gauss(0, 1) + torch.from_numpy(np.random.normal(0, 0.1, 4))  # noqa: NPY002
            x = F.dropout(x, 0.3) + 0.1 * torch.rand(4, dtype=x.dtype)
        return super().forward((x, y))


class Chosen(Heads):
    """A head that is drawn."""

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        heads = [random.choice(list(self.heads))] if self.training else self.heads
        hidden = self.first(x).tanh()
        return sum((F.cross_entropy(self.second(hidden) + head(hidden), y) for head in heads), x.new_zeros(()))


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "mixup": Mixup, "layer_drop": LayerDrop, "noisy": Noisy, "chosen": Chosen,
}  # fmt: skip


class FrozenNorm(nn.Module):
    """Two batch norms, of which the first is in eval mode and its weights are trained."""

    body: nn.Sequential

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5, bias=False))
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, CLASSES)
        self.body[1].register_buffer("running_mean", torch.randn(5))
        self.body[1].register_buffer("running_var", torch.rand(5) + 0.5)
        self.body[1].eval()

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.norm(self.body(x)).tanh()), y)


class OwnMode(FrozenNorm):
    """A `train` of its own that keeps the norms of the body in eval mode."""

    def train(self, mode: bool = True) -> OwnMode:
        super().train(mode)
        self.body[1].eval()
        return self


class Taught(Perceptron):
    """A frozen teacher in eval mode, with dropout and a batch norm; its trunk is trained where the student's is not."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, CLASSES))
        self.teacher.eval().requires_grad_(False)

    def forward(self, batch: Any) -> Tensor:
        x, _ = batch
        with torch.no_grad():
            right = self.teacher(x).softmax(1)
        return F.cross_entropy(self.second(self.first(x).tanh()), right)


class WithoutDropout(Perceptron):
    """A trained part in eval mode, whose dropout is none."""

    drop: nn.Sequential

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return super().forward((self.drop(x), y))


class PartOfParts(WithoutDropout):
    """A part in training mode within one in eval mode, which has a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)))
        self.drop.eval()
        self.drop[1].train()


MODES: dict[str, Callable[[], nn.Module]] = {
    "frozen_norm": FrozenNorm, "own_mode": OwnMode, "taught": Taught, "without_dropout": WithoutDropout,
    "part_of_parts": PartOfParts,
}  # fmt: skip
NORMED = ("convolution", "frozen_norm", "own_mode", "part_of_parts")  # which need two examples

IGNORED = -100


class Labelled(nn.Module):
    """Tokens of which only some have a label, in some examples none; the loss is the mean over those that have."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)

    def forward(self, batch: Any) -> Tensor:
        tokens, labels = batch
        return F.cross_entropy(self.head(self.tokens(tokens)).tanh().flatten(0, 1), labels.flatten())


class Chooser(Labelled):
    """The same, with a layer that some batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(4, 6)

    def forward(self, batch: Any) -> Tensor:
        tokens, labels = batch
        if int(tokens[0, 0]) % 2:
            return super().forward(batch)
        out = self.more(self.tokens(tokens).tanh())
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def counted(module: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": module(batch), "weight": (batch[1] != IGNORED).sum()}


def counted_with_accuracy(module: nn.Module, batch: Any) -> dict[str, Any]:
    """A weight of a floating-point type, between other metrics."""
    kept = (batch[1] != IGNORED).double()
    return {"weight": kept.sum(), "loss": module(batch), "share": kept.mean()}


WEIGHTED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "labelled": (Labelled, counted), "labelled_float": (Labelled, counted_with_accuracy), "chooser": (Chooser, counted),
}  # fmt: skip
WRITTEN: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "chooses": CHOOSING, "keeps state": STATEFUL, "draws": DRAWING, "modes": MODES,
    "weights": {name: make for name, (make, _) in WEIGHTED.items()},
}  # fmt: skip
"""Models as people write them, by what they do."""
BATCHWISE = {*CHOOSING, "chooser"}  # whose loss on a batch is not the mean of its examples
ALL = {**MODELS, **ODD, **{name: make for models in WRITTEN.values() for name, make in models.items()}}


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
        return ALL[name]().double()


def tensors(name: str, count: int, seed: int) -> tuple[Tensor, ...]:
    """Examples, `[count, ...]` each."""
    g = torch.Generator().manual_seed(seed)
    if name in ("tied", "normed"):
        tokens = torch.randint(6, (count, 4), generator=g)
        return tokens[:, :-1].contiguous(), (tokens[:, 1:] + tokens[:, :-1]).remainder(6).contiguous()
    if name in WEIGHTED:
        tokens, length = torch.randint(6, (count, 4), generator=g), torch.randint(5, (count, 1), generator=g)
        return tokens, tokens.roll(1, 1).masked_fill(torch.arange(4) >= length, IGNORED)
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


def weight(name: str, tensors: tuple[Tensor, ...]) -> int:
    """Of how much the loss of a batch is the mean: its tokens or its examples."""
    return int((tensors[1] != IGNORED).sum()) if name in WEIGHTED else len(tensors[0])


def loss_fn(name: str) -> Callable[..., Any] | None:
    """Of the library's side; None: the model returns its loss."""
    return WEIGHTED[name][1] if name in WEIGHTED else None


def as_batch(name: str, tensors: tuple[Tensor, ...]) -> Any:
    """Examples as the model takes them."""
    return dict(zip(("x", "y"), tensors)) if name == "named" else tensors
