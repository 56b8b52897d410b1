"""Images to train on: torchvision's, where they are on disk; scikit-learn's digits; random ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Images(NamedTuple):
    """A data set: `(x [n, channels, size, size], y [n])` to train on and to test on."""

    name: str
    train: TensorDataset
    test: TensorDataset
    num_classes: int = 10

    @property
    def shape(self) -> torch.Size:
        """Of one image."""
        return self.train.tensors[0].shape[1:]


class Missing(Exception):
    """A data set is not here; the message says what to do about it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path("vecgym-runs/data"), metavar="DIR",
                        help="where torchvision keeps its data sets (default: %(default)s)")  # fmt: skip
    parser.add_argument("--download", action="store_true", help="let torchvision download what is not there")


def torchvision_images(name: str, folder: Path, download: bool) -> Images:
    """`MNIST` or `CIFAR10` as torchvision reads it."""
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:  # RuntimeError: one that was built for another torch
        raise Missing(
            f"{name} needs torchvision, which cannot be imported: {error}. pip install torchvision?"
        ) from error
    try:
        parts = [getattr(torchvision.datasets, name)(str(folder), train=train, download=download)
                 for train in (True, False)]  # fmt: skip
    except RuntimeError as error:
        raise Missing(f"{name} is not in {folder}: --data says where it is, --download fetches it.") from error
    return _images(name, *[(torch.as_tensor(part.data), torch.as_tensor(part.targets)) for part in parts])


def digits() -> Images:
    """The 1797 digits of 8 x 8 pixels that come with scikit-learn: every fifth to test on."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Missing("the digits need scikit-learn, which is not installed: pip install scikit-learn.") from error
    found = load_digits()
    x, y = torch.from_numpy(found.images), torch.from_numpy(found.target)
    tested = torch.arange(len(x)) % 5 == 4
    return _images("digits", (x[~tested], y[~tested]), (x[tested], y[tested]))


def load(args: argparse.Namespace, *names: str, stand_in: tuple[int, int, int]) -> Images:
    """The first of the data sets that is here. With --quick at last random images of a shape: which is said."""
    for name in names:
        try:
            return digits() if name == "digits" else torchvision_images(name, args.data, args.download)
        except Missing as missing:  # noqa: PERF203
            print(missing, flush=True)
    if not args.quick:
        raise SystemExit("Nothing was trained.")
    print("Instead, to see that it runs: random images.", flush=True)
    return random_images(stand_in)


def random_images(shape: tuple[int, int, int], num_train: int = 512, num_test: int = 128) -> Images:
    """A stand-in that needs no file: noise around one random image for each of 10 classes."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, *shape, generator=generator)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(10, (n,), generator=generator)
        return centres[y] + 2 * torch.randn(n, *shape, generator=generator), y

    return _images("random images", draw(num_train), draw(num_test))


def _images(name: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Images:
    """Channels first; each channel with mean 0 and variance 1 over the images to train on."""
    x, x_test = (_channels_first(part[0]).float() for part in (train, test))
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    train_set, test_set = (TensorDataset((a - mean) / std, b[1].long()) for a, b in ((x, train), (x_test, test)))
    return Images(name, train_set, test_set)


def _channels_first(x: Tensor) -> Tensor:
    if x.dim() == 3:
        return x[:, None]
    return x if x.shape[1] == 3 else x.movedim(-1, 1)


# ------------------------------------------------------------------------------------------------ models


class Classifier(nn.Module):
    """A network as vecgym wants it: batch (x, y) -> the mean cross-entropy."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def val_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}


def mlp(images: Images, hidden: int) -> Classifier:
    """One hidden layer."""
    inputs = images.shape.numel()
    return Classifier(
        nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, images.num_classes))
    )


def cnn(images: Images, *widths: int, hidden: int = 64) -> Classifier:
    """A 3x3 convolution and a 2x2 max-pool for each width, and two linear layers."""
    layers: list[nn.Module] = []
    channels, size, _ = images.shape
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels, size = width, size // 2
    head = [nn.Flatten(), nn.Linear(channels * size**2, hidden), nn.ReLU(), nn.Linear(hidden, images.num_classes)]
    return Classifier(nn.Sequential(*layers, *head))


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> dict[str, float]:
    """The share of the images to test on that a `Classifier` gets right."""
    assert isinstance(model, Classifier)
    x, y = images.test.tensors
    right = sum(int((model.net(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500)))
    return {"accuracy": right / len(y)}
