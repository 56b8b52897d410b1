"""The warning and the errors that are vecgym's own; all others are `ValueError` and `TypeError`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)


class VecgymWarning(UserWarning):
    """A setting has no effect, or not the one that its name suggests."""


def warn(message: str) -> None:
    """Warn, pointing at the line outside of vecgym that led here, however deep inside it was noticed."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, VecgymWarning, stacklevel=level)


class DivergenceError(ArithmeticError):
    """A node's loss became NaN or infinite; the trainer's history and nodes are kept.

    Attributes:
        step: optimizer steps done when the loss was computed.
        nodes: the ids of the nodes whose loss is not finite.
        loss: that of the first of them.
    """

    def __init__(self, step: int, nodes: list[int], loss: float) -> None:
        self.step = step
        self.nodes = nodes
        self.loss = loss
        which = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes[:8]))}"
        more = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
        super().__init__(
            f"the loss of {which}{more} is {loss} at step {step}. trainer.history and trainer.nodes hold the run up "
            'to there. Lower the learning rate, set max_norm=1.0, or go on with on_divergence="warn" or "ignore".'
        )


class ProcessError(RuntimeError):
    """A process of a run in several processes raised, died or hung; the others were ended.

    Attributes:
        rank: of the process.
        nodes: what it held: "nodes 2-3".
        traceback: where it was, as text; "" where that is not known.
    """

    def __init__(self, rank: int, nodes: str, what: str, traceback: str = "") -> None:
        self.rank = rank
        self.nodes = nodes
        self.traceback = traceback
        holding = f" ({nodes})" if nodes else ""
        colon = "" if what.startswith(("hangs", "was ", "ended ")) else ":"
        where = f"\n\nThere:\n{traceback.rstrip()}" if traceback else ""
        super().__init__(f"process {rank}{holding}{colon} {what}{where}")
