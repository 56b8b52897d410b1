"""Do measured slowdowns by crashes follow from the clock and who is present alone, without training?

Setting: 4 nodes and the authors' schedule: crashes at 25, 50 and 75 % of 26.7 M tokens, each a pause of 30 s for all; DDP
goes back to its last checkpoint, one a minute; DiLoCo's victim is absent from the round. A step lasts as in the runs
without crashes; these had 407 steps (DDP), or 69, 13, 7 and 2 rounds, as 0.752 s a step and 6.2 s an evaluation in 30 s
give. Two answers: with crashes the target needs as many rounds ("rounds"), or as many merged steps of nodes ("steps").
Claim: 124 M parameters to a loss of 2.5: DDP takes 675 s with crashes and 356 s without, 1.90 times as many; DiLoCo 1.13,
1.15, 1.16, 1.57 at H = 10, 50, 100, 500 (beau-lilly/diloco-vs-ddp-failures, project/scripts/plot_from_numbers.py).
Verdict: AGREES if each measured ratio lies between the two answers, give or take 0.05 (DDP has one answer, "steps");
ORDER ONLY if "steps" has their order; DISAGREES otherwise.
"""

import torch
from study import Answer, Study, difference
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
    500: (2, (764.48, 765.00), (1202.02, 1201.54)),
}  # fmt: skip


def with_crashes(H: int, rounds: int, step: float, merged: bool) -> float:
    """The seconds until as many rounds, or merged steps of nodes, are done as without crashes."""
    there, tokens, crashes, saved, saved_at = [], 0, 0, 0, 0.0  # saved: DDP's checkpoint
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
    return trainer.history.last("sim_seconds") + 30 * crashes


def ask(study: Study) -> Answer:
    rows, outside, order = {}, [], []
    for H, (rounds, without, crashed) in MEASURED.items():
        step, name = sum(without) / 2 / (rounds * H), f"H = {H}" if H > 1 else "DDP"
        found = {
            merged: with_crashes(H, rounds, step, merged) / (step * rounds * H) for merged in (False, True)[H == 1 :]
        }
        ratios = [b / a for a, b in zip(without, crashed)]
        rows |= {f"{name}: measured - {('rounds', 'steps')[m]}": difference(ratios, [x] * 2) for m, x in found.items()}
        order.append((found[True], sum(ratios) / 2))
        if not min(found.values()) - 0.05 <= sum(ratios) / 2 <= max(found.values()) + 0.05:
            outside.append(name)
    told = ", ".join(f"{computed:.2f} ({ratio:.2f})" for computed, ratio in order)
    why = (
        f"Of equal steps, DDP and H = 10 to 500: {told}, measured in brackets; outside: {', '.join(outside) or 'none'}."
    )
    ranked = sorted(order) == sorted(order, key=lambda pair: pair[1])
    return Answer("DISAGREES" if outside and not ranked else "ORDER ONLY" if outside else "AGREES", why, rows)
