"""The strategies on Tiny Shakespeare, at the same tokens: nanoGPT's configuration for a CPU.

A character-level GPT of 4 layers, 4 heads, width 128, context 64 (0.8 million parameters) reads 12 windows a step, for
2000 steps: AdamW with lr 1e-3, betas (0.9, 0.99), weight decay 0.1 on matrices only, 100 steps of warm-up, a cosine
down to 1e-4, gradients clipped at 1. No dropout. nanoGPT reports a validation loss of 1.88 for it. "one node" is that
run; then K = 4 nodes with 3 windows each, so that every row has seen the same number of tokens.

The first nine tenths of the text are for training. The column "all of val" is the loss on the whole rest, in windows
that do not overlap; "val loss", during the run, on a few of them.

About half an hour on one core: python benchmarks/shakespeare.py --text tinyshakespeare.txt
"""

from __future__ import annotations

from typing import Any

import torch
from comparison import begin, finish, parser, seeded, strategies, train
from torch import Tensor, nn

from vecgym.data import TokenWindows, encode_text
from vecgym.data.text import read_text
from vecgym.models import GPT
from vecgym.optim import OptimSpec
from vecgym.strategy import AllReduceStrategy

K = 4
BATCH = 12  # windows a step, of all nodes together
STEPS, WARMUP, H = 2000, 100, 50
CONTEXT, LAYERS, HEADS, WIDTH = 64, 4, 4, 128
LR, DEMO_LR = 1e-3, 1e-3
VAL_SIZE = 96  # windows in an evaluation during the run


def decay_matrices_only(name: str, p: Tensor) -> dict[str, float]:
    return {} if p.dim() >= 2 else {"weight_decay": 0.0}


@torch.no_grad()
def whole_loss(model: nn.Module, tokens: Tensor, context: int) -> float:
    """The mean loss of every character that a window of its own predicts, `[n]` tokens without overlap."""
    windows = tokens[: (len(tokens) - 1) // context * context + 1]
    inputs, targets = windows[:-1].view(-1, context), windows[1:].view(-1, context)
    total = sum(float(model((x, y))) * len(x) for x, y in zip(inputs.split(64), targets.split(64)))
    return total / len(inputs)


def main() -> None:
    options = parser(__doc__, "shakespeare.png")
    options.add_argument("--text", required=True, metavar="FILE", help="Tiny Shakespeare, or any other text")
    options.add_argument("--only", nargs="+", metavar="NAME", help="some of the strategies, by name, in place of all")
    args = options.parse_args()
    steps, warmup, interval, context, layers, width = STEPS, WARMUP, H, CONTEXT, LAYERS, WIDTH
    if args.quick:
        steps, warmup, interval, context, layers, width = 10, 2, 5, 16, 1, 16
    val_size = 12 if args.quick else VAL_SIZE
    start = begin(args)

    tokens, vocabulary = encode_text(read_text(args.text))
    split = int(0.9 * len(tokens))
    data = TokenWindows(tokens[:split], context), TokenWindows(tokens[split:], context)
    model = seeded(args.seed, lambda: GPT(len(vocabulary), context, layers, HEADS, width))
    inner = OptimSpec("adamw", lr=LR, betas=(0.9, 0.99), weight_decay=0.1, param_groups=decay_matrices_only)
    recipe: dict[str, Any] = {"max_norm": 1.0, "warmup_steps": warmup, "cosine_anneal": True}

    compared = strategies(inner, DEMO_LR, interval, **recipe)
    cases = {"one node": (AllReduceStrategy(inner, **recipe), 1), **{name: (s, K) for name, s in compared.items()}}
    if args.only and set(args.only) - set(cases):
        options.error(f"--only takes some of {', '.join(map(repr, cases))}")
    runs = [
        train(
            name, strategy, model, data, num_nodes, steps=steps, batch_size=BATCH // num_nodes, seed=args.seed,
            val_size=val_size,
            score=lambda m: {"all of val": whole_loss(m, tokens[split:], context)},
        )
        for name, (strategy, num_nodes) in cases.items() if name in (args.only or cases)
    ]  # fmt: skip
    title = f"nanoGPT's small GPT, {steps} steps of {BATCH} windows, 1 and {K} nodes, H = {interval}, one seed"
    print(f"\nval loss, and the markers of the figure: on {val_size} windows; all of val: see vecgym.guide.performance")
    finish(runs, args, start, f"{title}; markers: {val_size} validation windows", "loss (nats per character)")


if __name__ == "__main__":
    main()
