"""DiLoCo on 1, 2, 4 and 8 nodes at equal tokens: the batch of a step is divided among the nodes.

A GPT of 2 layers and width 64 reads 16 windows of 64 characters a step, for 700 steps, on the source text of Python's
standard library (or --text FILE). K = 1 is one node with an outer optimizer over its own steps. "AllReduce" is the same
batch with an exchange at every step. About 3 minutes on two cores.

python benchmarks/diloco_scaling.py [--text FILE] [--H 20 100]
"""

from __future__ import annotations

from typing import Any

from comparison import begin, finish, parser, seeded, train

from vecgym.data import TokenWindows, encode_text
from vecgym.data.text import read_text, split_text, standard_library_text
from vecgym.models import GPT
from vecgym.optim import OptimSpec
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, Strategy

NODES = (1, 2, 4, 8)
BATCH = 16  # windows a step, of all nodes together
LR = 6e-3
VAL_SIZE = 128


def main() -> None:
    options = parser(__doc__, "diloco_scaling.png")
    options.add_argument("--text", metavar="FILE", help="UTF-8 text to train on (Python's standard library)")
    options.add_argument("--H", type=int, nargs="+", default=[20], help="inner steps of a round (default 20)")
    args = options.parse_args()
    start = begin(args)
    steps, warmup, context, width, nodes = (10, 2, 16, 16, NODES[:2]) if args.quick else (700, 35, 64, 64, NODES)
    text = read_text(args.text) if args.text else standard_library_text()
    vocabulary = "".join(sorted(set(text)))
    parts = [TokenWindows(encode_text(part, vocabulary)[0], context) for part in split_text(text)]
    model = seeded(args.seed, lambda: GPT(len(vocabulary), context, 2, 2, width))
    inner = OptimSpec("adamw", lr=LR, betas=(0.9, 0.99))
    outer = OptimSpec("sgd", lr=0.7, momentum=0.6, nesterov=True)
    recipe: dict[str, Any] = {"max_norm": 1.0, "warmup_steps": warmup, "cosine_anneal": True}

    cases: dict[str, tuple[Strategy, int]] = {"AllReduce": (AllReduceStrategy(inner, **recipe), nodes[-1])}
    for H in [5] if args.quick else args.H:
        for K in nodes:
            cases[f"DiLoCo, H={H}, K={K}"] = DiLoCoStrategy(inner, outer, H=H, **recipe), K
    runs = [
        train(
            name, strategy, model, (parts[0], parts[1]), K, steps=steps, batch_size=BATCH // K, seed=args.seed,
            val_size=16 if args.quick else VAL_SIZE,
        )
        for name, (strategy, K) in cases.items()
    ]  # fmt: skip
    finish(runs, args, start, f"DiLoCo at equal tokens: {BATCH} windows a step in all", "loss (nats per character)")


if __name__ == "__main__":
    main()
