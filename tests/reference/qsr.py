"""The steps after which nodes exchange by the quadratic synchronisation rule (arXiv 2310.14423; hmgxr128/QSR).

Step by step, as localopt.py counts: h is set before the first step, and after each exchange, from the rate of the step
that comes next.

    h: in the warm-up, or if alpha = 0:   H
       else:                              max(1, min(max(H, floor((alpha / lr)^power)), steps that are left))
"""

from __future__ import annotations

from collections.abc import Callable


def qsr(
    lr: Callable[[int], float], total_steps: int, *, alpha: float, H: int, warmup_steps: int = 0, power: float = 2
) -> list[int]:
    def adjusted(done: int) -> int:
        if done < warmup_steps or alpha == 0:
            return H
        return max(1, min(max(int((alpha / lr(done)) ** power), H), total_steps - done))

    exchanges, local, h = [], 0, adjusted(0)
    for step in range(total_steps):
        local += 1
        if local >= h:
            exchanges.append(step)
            local = 0
            if step + 1 < total_steps:
                h = adjusted(step + 1)
    return exchanges
