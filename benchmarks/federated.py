"""Federated learning on handwritten digits: many nodes, each with its own kind of data, and few there at a time.

The data (MNIST where torchvision has it on disk, else scikit-learn's digits) is divided as --partition says, and a
fifth of each node's examples is held out: the table has the accuracy on all of these and on those of the worst tenth of
the nodes, and a second figure its percentiles over the nodes. In a round of 10 local steps all nodes take part, or some
of them (--participation), which average at a server from which all begin the next round (FedAvg), among themselves, or
in random islands. 60 rounds.

python benchmarks/federated.py --num-clients 100 --island-size 10 [--partition shards]
"""

from __future__ import annotations

from typing import Any

from comparison import begin, finish, parser, seeded, train
from images import accuracy, add_options, load, mlp

from vecgym.data import partition_dirichlet, partition_iid, partition_shards
from vecgym.optim import OptimSpec
from vecgym.plot import plot_partition, plot_runs
from vecgym.strategy import FedAvgStrategy

H = 10
LR = 0.1


def main() -> None:
    options = parser(__doc__, "federated.png")
    add_options(options)
    options.add_argument("--num-clients", "--num_clients", type=int, default=100, metavar="K", help="nodes (100)")
    options.add_argument("--island-size", "--island_size", type=int, default=10, metavar="N", help="that average (10)")
    options.add_argument("--participation", type=float, default=0.2, metavar="C", help="of a round (default 0.2)")
    options.add_argument("--partition", choices=("iid", "dirichlet", "shards"), default="dirichlet")
    options.add_argument("--alpha", type=float, default=0.3, help="of the Dirichlet distribution (default 0.3)")
    args = options.parse_args()
    start = begin(args)
    images, K = load(args, "MNIST", "digits", stand_in=(1, 8, 8)), args.num_clients
    partition = {
        "iid": lambda: partition_iid(images.train, K, seed=args.seed),
        "dirichlet": lambda: partition_dirichlet(images.train, K, args.alpha, min_size=2, seed=args.seed),
        "shards": lambda: partition_shards(images.train, K, seed=args.seed),
    }[args.partition]()
    shown = args.figure.with_stem(args.figure.stem + "_partition")
    plot_partition(partition, shown)
    print(f"{images.name}: {partition}\nFigure: {shown}", flush=True)

    def fedavg(**kwargs: Any) -> FedAvgStrategy:
        return FedAvgStrategy(OptimSpec("sgd", lr=LR), H=H, weighting="examples", **kwargs)

    some: dict[str, Any] = {"participation": args.participation}
    compared = {
        "all average": fedavg(),
        "islands": fedavg(island_size=args.island_size),
        "some, server": fedavg(**some),
        "some, server with momentum": fedavg(server_optim="avgm", server_lr=0.3, **some),
        "some, server, FedProx": fedavg(proximal_mu=0.1, **some),
        "some, among themselves": fedavg(resting="keep", **some),
        "some, islands": fedavg(island_size=args.island_size, **some),
    }
    model = seeded(args.seed, lambda: mlp(images, 64))
    shards = partition.datasets(images.train, held_out=0.2)
    runs = [
        train(
            name, strategy, model, (shards, shards), K, steps=H * (1 if args.quick else 60), batch_size=10,
            seed=args.seed, score=lambda m: accuracy(m, images),
        )
        for name, strategy in compared.items()
    ]  # fmt: skip
    for run in runs:
        run.scores["held out"], run.scores["worst tenth"] = map(
            run.history.last, ("val_accuracy", "val_accuracy_lowest_tenth")
        )
    shown = args.figure.with_stem(args.figure.stem + "_nodes")
    panels = ["val_accuracy_each", "val_accuracy_lowest_tenth"]
    plot_runs({run.name: run.history for run in runs}, shown, panels=panels, legend="outside")
    print(f"Figure: {shown}")
    finish(runs, args, start, f"{images.name}, {K} nodes, {args.partition}, H = {H}", "cross-entropy")


if __name__ == "__main__":
    main()
