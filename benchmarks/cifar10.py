"""The strategies on CIFAR-10, 4 nodes, as torchvision has it on disk.

A CNN of three convolutions, 32 images a node and step, 1200 steps (3 passes over the data); about 15 minutes on two
cores. --quick takes random images where the data is not there: that shows that it runs, and nothing else.

python benchmarks/cifar10.py --data DIR
"""

from __future__ import annotations

from comparison import begin, finish, parser, seeded, strategies, train
from images import accuracy, add_options, cnn, load

from vecgym.optim import OptimSpec

K = 4


def main() -> None:
    options = parser(__doc__, "cifar10.png")
    add_options(options)
    args = options.parse_args()
    start = begin(args)
    images = load(args, "CIFAR10", stand_in=(3, 32, 32))
    steps, warmup, H = (4, 1, 2) if args.quick else (1200, 60, 50)
    model = seeded(args.seed, lambda: cnn(images, 32, 64, 64))
    compared = strategies(
        OptimSpec("adamw", lr=2e-3), 2e-3, H, p=0.01, outer_momentum=0.6, warmup_steps=warmup, cosine_anneal=True
    )
    runs = [
        train(
            name, strategy, model, (images.train, images.test), K, steps=steps, batch_size=8 if args.quick else 32,
            seed=args.seed, val_size=32 if args.quick else 1024, score=lambda m: accuracy(m, images),
        )
        for name, strategy in compared.items()
    ]  # fmt: skip
    finish(runs, args, start, f"{images.name}, {K} nodes, H = {H}", "cross-entropy")


if __name__ == "__main__":
    main()
