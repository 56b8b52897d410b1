"""The figures of README and guide, into `notebooks/figures/`: under 3 minutes on two cores, of which (a) takes most.

(a) compare.png: what several strategies reach on real text, against steps and against bytes (`vecgym compare`);
(b) sweep.png: 16 configurations of DiLoCo with 4 seeds each in one program, as a heat map and with their Pareto front;
(c) schedule.png: how much the final loss changes with each exchange, and a schedule learned over many runs;
(d) equivalence.png: stacked against real processes, step by step, and a strategy that is wrong;
(e) price.png: what `vecgym price` draws for 150 million parameters on 8 nodes that are 80 ms apart;
(f) equal_time.png: the losses of three strategies in the same simulated time on such a network.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from workloads import Batch, header

import vecgym
from vecgym import cli
from vecgym.clock import Compute, Network, price_strategies
from vecgym.core import tree
from vecgym.core.files import write_atomically
from vecgym.core.tree import Tree
from vecgym.data import Batches, TokenWindows, partition_dirichlet
from vecgym.logger import read_csv
from vecgym.meta import Exchanges, learn
from vecgym.models import GPT
from vecgym.plot import plot_comparison, plot_runs, plot_sensitivity
from vecgym.plot.style import COLOURS, MARKERS
from vecgym.records.rows import counted
from vecgym.simulation import Part
from vecgym.strategy import (
    AllReduceStrategy,
    Average,
    DiLoCoStrategy,
    Exchange,
    Memory,
    OptimSpec,
    Strategy,
)

FOLDER = Path(__file__).parent.parent / "notebooks" / "figures"
WIDTH = 900  # pixels of every figure
DPI = 100  # so that the text of a figure has the size of that around it
PALETTE = 256  # colours: half the bytes or less, and nothing that the eye would miss

Size = tuple[int, int]  # pixels


def pixels(figure: Figure, size: Size) -> np.ndarray:
    """A figure laid out in `size`, as [height, width, 3] bytes."""
    figure.set_dpi(DPI)
    figure.set_size_inches(size[0] / DPI, size[1] / DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def save(path: Path, parts: Sequence[tuple[Figure, Size]], across: bool = True, colours: int = PALETTE) -> None:
    """Several figures side by side, or one below the other, as one file."""
    image = np.concatenate([pixels(*part) for part in parts], axis=1 if across else 0)
    with write_atomically(path) as file:
        Image.fromarray(image).quantize(colours, dither=Image.Dither.NONE).save(file, format="png", optimize=True)


class Classifier(nn.Module):
    """Two linear layers; batch (x [B, inputs], y [B])."""

    def __init__(self, inputs: int, hidden: int, activation: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), activation, nn.Linear(hidden, 4))

    def forward(self, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


# --------------------------------------------------------------------------------------------- (a) strategies

NAMES = {"allreduce": "AllReduce (DDP)", "fedavg": "FedAvg", "diloco": "DiLoCo", "sparta": "SPARTA", "demo": "DeMo"}


def compare(path: Path, quick: bool) -> None:
    """`vecgym compare` itself, in fewer steps, and its histories drawn for this page."""
    short = ["--num-nodes", "2", "--steps", "6", "--H", "3", "--context", "16", "--width", "16"] if quick else []
    with TemporaryDirectory() as folder:
        options = ["--strategies", *NAMES, "--steps", "400", "--output", folder, "--device", "cpu", "--no-progress"]
        if cli.main(["compare", *options, *short]) != 0:
            raise SystemExit("vecgym compare has failed: see above.")
        histories = {shown: read_csv(Path(folder, name)) for name, shown in NAMES.items()}
    figure = plot_comparison(histories, loss_label="loss (nats per character)")
    figure.suptitle("A small GPT trained on 8 nodes with five strategies, one seed")
    figure.axes[0].set_ylim(top=3.2)  # without the first steps, which are alike
    save(path, [(figure, (WIDTH, 400))])


# --------------------------------------------------------------------------------------------- (b) a sweep

OUTER = OptimSpec("sgd", lr=0.7, momentum=0.5, nesterov=True)


def products(num_examples: int) -> tuple[TensorDataset, TensorDataset]:
    """The largest of four products of two inputs: two thirds to train on, the rest to validate on."""
    x = torch.randn(num_examples, 20)
    y = (x[:, :8].view(-1, 4, 2).prod(2) + 0.3 * torch.randn(num_examples, 4)).argmax(1)
    data, part = TensorDataset(x, y), num_examples * 2 // 3
    return TensorDataset(*data[:part]), TensorDataset(*data[part:])


def sweep(path: Path, quick: bool) -> None:
    """The interval between exchanges and the inner learning rate, four seeds of each: 512 nodes at once."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Classifier(20, 32, nn.ReLU())

    torch.manual_seed(0)
    train, val = products(6144)
    shards = partition_dirichlet(train, 8, alpha=0.3, balanced=True).datasets(train)  # each its own classes
    result = vecgym.sweep(
        make, shards, val,
        strategy=lambda H, lr: DiLoCoStrategy("adamw", OUTER, H=H, lr=lr),
        grid={"H": [2, 5, 20, 50], "lr": [2e-2, 4e-2, 8e-2, 0.16], "seed": range(1 if quick else 4)},
        num_nodes=8, max_steps=20 if quick else 200, batch_size=16, device="cpu", progress=False,
    )  # fmt: skip
    print(result.best("val_loss"))
    for H in (2, 50):
        print(H, result.best("val_loss", where={"H": H}))
    seeds = len(result.rows) // 16
    cells = result.plot_heatmap(x="lr", y="H", title=f"validation loss, mean of {counted(seeds, 'seed')}")
    front = result.plot_pareto(hue="H", title=f"each point: mean of {counted(seeds, 'seed')}, and their range")
    save(path, [(cells, (430, 370)), (front, (WIDTH - 430, 370))])


# --------------------------------------------------------------------------------------------- (c) a schedule


def schedule(path: Path, quick: bool) -> None:
    """The gradient of the final loss by the weight of each exchange; six exchanges where they help most."""
    num_nodes, H, T = 4, 8, 16 if quick else 48
    torch.manual_seed(0)
    model = Classifier(10, 16, nn.Tanh()).double()
    x = torch.randn(4096, 10, dtype=torch.float64)
    y = (x @ torch.randn(10, 4, dtype=torch.float64)).argmax(1)
    train, val = TensorDataset(x[:3072], y[:3072]), TensorDataset(x[3072:], y[3072:])
    shards = partition_dirichlet(train, num_nodes, alpha=1.0, balanced=True).datasets(train)
    batches = list(Batches(shards, num_nodes, batch_size=16, seed=0).iterate(0, T))

    def strategy(weights: Tensor) -> Strategy:
        return DiLoCoStrategy("sgd", lr=1.0, sync_weight=weights)

    weights = torch.zeros(T, dtype=torch.float64)
    weights[H - 1 :: H] = 1.0
    weights.requires_grad_()
    outcome = vecgym.rollout(model, strategy(weights), batches, num_nodes=num_nodes, eval_batch=val[:512])
    (gradient,) = torch.autograd.grad(outcome.loss, weights)
    upper = plot_sensitivity(gradient, weights.detach())
    upper.suptitle(f"DiLoCo, an exchange every {H} steps")
    upper.axes[0].set_ylabel("d final loss / d weight")  # there is little height
    even = {f"every {H} steps": {"when": Exchanges(H, knots=0)}}
    for name, knots, steps, seeds in (("one run", 12, 60, [0]), ("fresh runs", 4, 24, None)):
        found = learn(
            lambda n: strategy(n.when.weights), {"when": Exchanges(H, knots, at_end=False)}, num_nodes=num_nodes,
            runs=lambda seed: (model, shards, val), max_steps=T, batch_size=16, val_size=512, lr=0.2, device="cpu",
            steps=2 if quick else steps, estimator="gradient", seeds=seeds,
        )  # fmt: skip
        print(name, found, found.report(2 if quick else 64, even, longer=None, more=None), sep="\n")
        losses = [
            float(vecgym.rollout(model, strategy(w), batches, num_nodes=num_nodes, eval_batch=val[:512]).loss)
            for w in (weights.detach(), found.numbers(T).when.weights)
        ]
        print(f"in run 0: {losses[0] - losses[1]:+.3f} over every {H} steps")
    lower = found.plot(T)
    lower.suptitle("The same number of exchanges, learned over many runs")
    save(path, [(upper, (WIDTH, 340)), (lower, (WIDTH, 380))], across=False)


# --------------------------------------------------------------------------------------------- (d) equivalence


class WrongMean(Average):
    """A mean over the nodes of this process only: all of them when stacked, and too few on processes."""

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        return tree.map(lambda v: v.mean(0, keepdim=True), x)  # right: part.comm.mean(x)


def equivalence(path: Path, quick: bool) -> None:
    """`vecgym.verify`: the largest relative difference of a parameter after every step, stacked against processes."""
    torch.manual_seed(0)
    model = GPT(vocab_size=16, context=8, num_layers=1, num_heads=2, width=16)
    data = TokenWindows(torch.randint(3, (4000,)).cumsum(0) % 16, context=8)
    right: Strategy = DiLoCoStrategy("adamw", H=10, lr=1e-2)
    wrong: Strategy = Strategy("adamw", [Exchange(WrongMean(), every=10)], lr=1e-2)
    curves: dict[tuple[Strategy, str], list[float]] = {}
    for strategy, num_processes in ((right, 4), (wrong, 2)):
        report = vecgym.verify(strategy, model, data, 4, num_processes, steps=12 if quick else 60)
        print(report)
        curves.update({(strategy, check.name): [row.params for row in check.rows] for check in report.checks})
    labels = {
        (wrong, "native"): "a mean that never leaves its process: wrong",
        (right, "native"): "DiLoCo, H = 10, 4 processes",
        (right, "exact"): "the same with exact=True",
    }
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for (key, label), colour, marker in zip(labels.items(), (COLOURS[1], COLOURS[2], COLOURS[0]), MARKERS):
        steps = range(1, len(curves[key]) + 1)
        axes.plot(steps, curves[key], color=colour, marker=marker, markersize=3.5, linewidth=1, label=label)
    axes.set_yscale("symlog", linthresh=1e-17, linscale=0.5)
    axes.set_yticks([0, 1e-16, 1e-12, 1e-8, 1e-4, 1], ["0", *(f"$10^{{{n}}}$" for n in (-16, -12, -8, -4)), "1"])
    axes.set_ylim(-3e-18, 10)
    axes.set(xlabel="optimizer steps", ylabel="largest relative difference")
    axes.set_title("Parameters of 4 nodes on real processes, against stacked (float64)")
    axes.legend(frameon=False, loc="center right")
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    save(path, [(figure, (WIDTH, 380))])


# ------------------------------------------------------------------------------------------ (e, f) networks


def price(path: Path, quick: bool) -> None:
    """The days of 100,000 steps at 100 Mbit/s, and how much of them is computing."""
    network = Network("100 Mbit/s", latency="80 ms")
    prices = price_strategies("150M", 8, network, Compute(0.6), H=[100] if quick else [20, 100, 500])
    print(prices)
    title = "150 million parameters on 8 nodes: 100 Mbit/s, 80 ms apart, 0.6 s of computing a step"
    save(path, [(prices.plot(title=title), (WIDTH, 580))])


def equal_time(path: Path, quick: bool) -> None:
    """Data-parallel training and DiLoCo with two H for 60 s, against steps and against these seconds."""
    torch.manual_seed(0)
    trainer, histories = vecgym.Trainer(Classifier(20, 64, nn.ReLU()), *products(12288)), {}
    strategies = {f"DiLoCo, H = {H}": DiLoCoStrategy("adamw", OUTER, H=H, lr=1e-2) for H in (5, 20)}
    for name, strategy in {"AllReduce (DDP)": AllReduceStrategy("adamw", lr=1e-2), **strategies}.items():
        trainer.fit(
            strategy, num_nodes=8, max_steps=1000, max_seconds=20 if quick else 60, batch_size=16, val_interval=10,
            network=Network("100 Mbit/s", latency="80 ms"), compute=Compute(0.2), device="cpu", progress=False,
        )  # fmt: skip
        last = trainer.history.rows[-1]
        print(f"{name}: {last['step']} steps, {last['sim_seconds']:.1f} s, loss {last['val_loss']:.3f}")
        histories[name] = trainer.history
    for_steps, for_seconds = (plot_runs(histories, x=x, panels=["val_loss"]) for x in ("step", "sim_seconds"))
    for_steps.axes[0].title.set_text("validation loss (one seed) against steps")
    for_seconds.axes[0].title.set_text("the same against simulated seconds")
    save(path, [(for_steps, (WIDTH // 2, 360)), (for_seconds, (WIDTH // 2, 360))])


FIGURES: dict[str, Callable[[Path, bool], None]] = {
    "compare": compare, "sweep": sweep, "schedule": schedule, "equivalence": equivalence,
    "price": price, "equal_time": equal_time,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="+", default=list(FIGURES), choices=FIGURES, metavar="NAME",
                        help=f"any of {', '.join(FIGURES)}; default: all")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--quick", action="store_true", help="few steps: does it work? Nothing to look at")
    parser.add_argument("--output", type=Path, default=FOLDER, metavar="DIR", help="default: notebooks/figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    start = time.perf_counter()
    for name in args.figures:
        begin, path = time.perf_counter(), args.output / f"{name}.png"
        FIGURES[name](path, args.quick)
        size = path.stat().st_size / 1e3
        print(f"{path}: {size:.0f} kB, {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
