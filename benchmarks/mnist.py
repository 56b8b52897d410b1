"""The strategies on handwritten digits, 8 nodes: MNIST where torchvision has it on disk, else scikit-learn's digits.

MNIST: a CNN (two convolutions), 32 images a node and step, 300 steps (1.3 passes over the data); about 6 minutes on two
cores. The digits (8 x 8 pixels, 1438 of them): an MLP, 16 images, 300 steps (27 passes); 10 seconds.

python benchmarks/mnist.py [--data DIR] [--download]
"""

from __future__ import annotations

from comparison import begin, finish, parser, seeded, strategies, train
from images import accuracy, add_options, cnn, load, mlp

from vecgym.optim import OptimSpec

K = 8


def main() -> None:
    options = parser(__doc__, "mnist.png")
    add_options(options)
    args = options.parse_args()
    start = begin(args)
    images = load(args, "MNIST", "digits", stand_in=(1, 8, 8))
    steps, warmup, H = (10, 2, 5) if args.quick else (300, 15, 20)
    small = images.shape[-1] == 8
    model = seeded(args.seed, lambda: mlp(images, 64) if small else cnn(images, 16, 32))
    compared = strategies(
        OptimSpec("adamw", lr=3e-3), 3e-3, H, p=0.02, outer_momentum=0.6, warmup_steps=warmup, cosine_anneal=True
    )
    runs = [
        train(
            name, strategy, model, (images.train, images.test), K, steps=steps, batch_size=16 if small else 32,
            seed=args.seed, val_size=32 if args.quick else 512, score=lambda m: accuracy(m, images),
        )
        for name, strategy in compared.items()
    ]  # fmt: skip
    finish(runs, args, start, f"{images.name}, {K} nodes, H = {H}", "cross-entropy")


if __name__ == "__main__":
    main()
