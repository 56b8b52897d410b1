"""Do measured slowdowns by crashes follow from the clock and who is present alone, without training?

Setting: 4 nodes and the authors' schedule: crashes at 25, 50 and 75 % of 26.7 M tokens, each a pause of 30 s for all;
DDP goes back to its last checkpoint, one a minute; DiLoCo's victim is absent from the round. A step lasts as without
crashes; there DDP needs 407 steps, DiLoCo 69, 13, 7 or 2 rounds (0.752 s a step, 6.2 s an evaluation in 30 s). Two
answers: with crashes the target needs as many rounds ("rounds"), or as many merged steps of nodes ("steps").
Claim: 124 M parameters to a loss of 2.5: DDP takes 675 s with crashes and 356 s without, 1.90 times; DiLoCo 1.13,
1.15, 1.16, 1.57 at H = 10, 50, 100, 500 (beau-lilly/diloco-vs-ddp-failures, project/scripts/plot_from_numbers.py).
Verdict: AGREES if each measured ratio lies between the two answers, give or take 0.05 (DDP has one answer, "steps");
ORDER ONLY if "steps" has their order; DISAGREES otherwise.
"""

import torch
from study import Answer, Difference, Study, difference
from torch import nn
from torch.utils.data import TensorDataset

from vecgym import Trainer
from vecgym.availability import Trace
from vecgym.clock import Compute, Network
from vecgym.strategy import FedAvgStrategy

SCALES, TOKENS = ("tiny",), 32 * 512  # of a node's step
CRASHES = [share * 407 * 4 * TOKENS for share in (0.25, 0.5, 0.75)]
MEASURED = {  # H -> rounds, and of two seeds seconds without crashes and seconds with them; 1: DDP
    1: (407, (356.15, 355.92), (674.19, 675.48)), 10: (69, (615.10, 641.85), (709.37, 705.13)),
    50: (13, (572.08, 570.03), (657.38, 659.03)), 100: (7, (570.20, 570.23), (659.35, 660.53)),
    500: (2, (764.48, 765.00), (1202.02, 1201.54))}  # fmt: skip


def slowdown(H: int, rounds: int, seconds: float, merged: bool) -> float:
    step = seconds / (H * rounds)
    tokens, crashes, saved, saved_at, there = 0, 0, 0, 0.0, list[list[bool]]()  # saved: DDP's checkpoint
    while tokens < 4 * H * rounds * TOKENS if merged else len(there) < H * rounds:
        crash = crashes < 3 and tokens >= CRASHES[crashes]
        crashes += crash
        there += [[not crash or H == 1, True, True, True]] * H
        tokens = saved if crash and H == 1 else tokens + sum(there[-1]) * H * TOKENS
        if len(there) * step + 30 * crashes - saved_at >= 60:
            saved, saved_at = tokens, len(there) * step + 30 * crashes
    trainer = Trainer(nn.Linear(1, 1), TensorDataset(torch.ones(8, 1)), loss_fn=lambda model, x: model(x[0]).mean())
    trainer.fit(FedAvgStrategy("sgd", lr=0.1, H=H), 4, max_steps=len(there), availability=Trace(there, "shared"),
                compute=Compute(step), network=Network("2.4 Tbit/s"), val_interval=None, progress=False)  # fmt: skip
    return (trainer.history.last("sim_seconds") + 30 * crashes) / seconds


def ask(study: Study) -> Answer:
    rows, order, outside = dict[str, Difference](), [], list[str]()
    for H, (rounds, without, crashed) in MEASURED.items():
        seconds, name = sum(without) / 2, f"H = {H}" if H > 1 else "DDP"
        ratios = [b / a for a, b in zip(without, crashed)]
        found = [slowdown(H, rounds, seconds, merged) for merged in (True, False)[: 1 + (H > 1)]]
        rows |= {f"{name}: measured - {w}": difference(ratios, [x] * 2) for w, x in zip(("steps", "rounds"), found)}
        order.append((found[0], sum(ratios) / 2))
        outside += [name] if not min(found) - 0.05 <= sum(ratios) / 2 <= max(found) + 0.05 else []
    told = ", ".join(f"{computed:.2f} ({ratio:.2f})" for computed, ratio in order)
    why = f"By merged steps (measured), DDP and H = 10 to 500: {told}; outside both: {', '.join(outside) or 'none'}."
    ranked = sorted(order) == sorted(order, key=lambda pair: pair[1])
    return Answer("ORDER ONLY" if outside and ranked else "DISAGREES" if outside else "AGREES", why, rows)
