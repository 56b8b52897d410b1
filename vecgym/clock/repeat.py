"""Many steps that send the same, in groups: the clock without the times of single messages.

Of M messages in a queue only the end of the last counts, E = max(free + D_M, max_m (r_m + D_M - D_(m-1))), with D the
running sum of what they take. Message m is ready at r_m = f + u c_m on a node whose forward pass ends at f and whose
backward pass takes u seconds, of which the part c_m is done by then; so E - f is a maximum of straight lines in u, of
which few are ever the highest. They are found once, and a step is then a handful of operations on K numbers.
"""

from __future__ import annotations

import numpy as np

from vecgym.clock.exchange import Meeting
from vecgym.clock.plan import Plan

Floats = np.ndarray


class Repeated:
    """A plan whose messages are all collectives of the same groups.

    Attributes:
        held: seconds that the messages up to each place that counts take of a group's links, `[places, G]`.
        places: of the messages after which someone waits, and of the last.
    """

    def __init__(self, plan: Plan, meeting: Meeting) -> None:
        self.plan, self.meeting = plan, meeting
        last = len(plan.order) - 1
        self.places = sorted({*(place for _, place, *_ in plan.needs), last})
        took, done = plan.amounts.numpy(), plan.done.numpy()  # [G, M], [M]
        total = took.cumsum(1)
        self.held = total[:, self.places].T
        self._members = meeting.members.numpy()
        group = meeting.group.numpy()[:-1]  # of each node; G: none
        rows, kinds = np.unique(took, axis=0, return_inverse=True)  # groups of equal size are alike
        kind = np.append(kinds.reshape(-1), -1)[group]
        self._nodes = [np.flatnonzero(kind == k) for k in range(len(rows))]
        self._tops = [[_highest(done[: p + 1], row[: p + 1]) for row in rows] for p in self.places]

    def after(self, backward: Floats) -> list[Floats]:
        """For each place, from the end of a node's forward pass to that of the queue if it alone counted, `[n, K]`."""
        found = []
        for tops in self._tops:
            result = np.full_like(backward, -np.inf)
            for nodes, lines in zip(self._nodes, tops):
                part = backward[:, nodes]
                highest = np.full_like(part, -np.inf)
                for slope, start in lines:
                    np.maximum(highest, part * slope + start, out=highest)
                result[:, nodes] = highest
            found.append(result)
        return found

    def ends(self, ready: list[Floats], taken: Floats) -> list[Floats]:
        """For each place, when the queue of each group has ended, `[G]`; of no group, the last: -inf.

        Args:
            ready: when each node would let it end, `[K]`, for each place.
            taken: until when each node's link is taken, and the server's, `[K + 1]`.
        """
        free = taken[self._members].max(1)
        never = np.array([-np.inf])
        return [
            np.concatenate([np.maximum(free + held, np.append(x, -np.inf)[self._members].max(1)), never])
            for held, x in zip(self.held, ready)
        ]


def _highest(slopes: Floats, took: Floats) -> list[tuple[float, float]]:
    """(slope, start) of the lines `slopes[m] u + took[m:].sum()` that are the highest for some u >= 0."""
    starts = took[::-1].cumsum()[::-1]
    lines: list[tuple[float, float]] = []
    for slope, start in sorted(zip(slopes.tolist(), starts.tolist())):
        while lines and (lines[-1][1] <= start or _below(lines, slope, start)):
            lines.pop()
        lines.append((slope, start))
    return lines


def _below(lines: list[tuple[float, float]], slope: float, start: float) -> bool:
    """Whether the last line is nowhere above both the one before it and a new, steeper one."""
    if len(lines) < 2:
        return False
    (s0, b0), (s1, b1) = lines[-2:]
    return (b0 - b1) * (slope - s0) >= (b0 - start) * (s1 - s0)
