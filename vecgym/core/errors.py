"""vecgym's own warning and errors; all other errors are `ValueError` and `TypeError`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parent.parent)


class Damaged(ValueError):
    """A file is damaged, or was not written by vecgym; the message names it.

    >>> isinstance(Damaged("run.pt is damaged"), ValueError)
    True
    """


class VecgymWarning(UserWarning):
    """A setting has no effect, or another effect than its name suggests.

    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", VecgymWarning)  # turn a setting without effect into an error
    ...     warn("H=100 is larger than the run's 10 steps.")
    Traceback (most recent call last):
    ...
    vecgym.core.errors.VecgymWarning: H=100 is larger than the run's 10 steps.
    """


def warn(message: str, category: type[Warning] = VecgymWarning) -> None:
    """Warn, pointing at the line outside of vecgym that led here, however deep the call.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn("H=100 is larger than the run's 10 steps.")
    >>> caught[0].category.__name__, str(caught[0].message)
    ('VecgymWarning', "H=100 is larger than the run's 10 steps.")
    """
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class DivergenceError(ArithmeticError):
    """A node's loss became NaN or infinite. The trainer keeps its history and nodes.

    Attributes:
        step: the number of optimizer steps done when the loss was computed.
        nodes: the ids of the nodes whose loss is not finite.
        loss: the loss of the first of these nodes.
        noticed: the number of steps done when the loss was read, if that was later: losses on a device are fetched
            every `log_interval` steps. None: it was read at once.
        in_data: whether the batches of that step hold NaN or infinite values.

    >>> error = DivergenceError(step=12, nodes=[3], loss=float("nan"))
    >>> error.step, error.nodes, str(error).split(".")[0]
    (12, [3], 'the loss of node 3 is nan at step 12')
    """

    def __init__(
        self, step: int, nodes: list[int], loss: float, noticed: int | None = None, in_data: bool = False
    ) -> None:
        self.step = step
        self.nodes = nodes
        self.loss = loss
        self.noticed = noticed
        self.in_data = in_data
        which = f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes[:8]))}"
        more = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
        delay = f", which was noticed after step {noticed}: on a device losses are fetched every log_interval steps"
        advice = "Lower the learning rate, set max_norm=1.0, or"
        if in_data:
            advice = (
                "The batches of this step hold NaN or infinite values, so look for these in the data: the learning "
                "rate is not the cause. Or"
            )
        elif step == 0:
            advice = (
                "No step has been taken yet, so the learning rate is not the cause: look at the initial weights, and "
                "for a logarithm of 0 or a division by 0 in the forward, or"
            )
        super().__init__(
            f"the loss of {which}{more} is {loss} at step {step}{'' if noticed is None else delay}. trainer.history "
            f"and trainer.nodes hold the run up to step {step if noticed is None else noticed}. {advice} continue "
            'with on_divergence="warn" or "ignore".'
        )

    def __reduce__(self) -> tuple[type[DivergenceError], tuple[Any, ...]]:
        return DivergenceError, (self.step, self.nodes, self.loss, self.noticed, self.in_data)  # for other processes


class ModelError(ValueError, TypeError):
    """The model does not return a scalar loss or a dict of scalar metrics.

    >>> error = ModelError("the model returned a tuple, not a scalar tensor")
    >>> isinstance(error, ValueError), isinstance(error, TypeError)
    (True, True)
    """


class ProcessError(RuntimeError):
    """One of a run's processes raised an error, died or hung; the others were ended.

    Attributes:
        rank: the rank of the process.
        nodes: the nodes it simulated, such as "nodes 2-3".
        traceback: the traceback of the process as text, or "" if it is not known.

    >>> error = ProcessError(rank=1, nodes="nodes 2-3", what="KeyError: 'x'", traceback="...")
    >>> error.rank, error.nodes, str(error).splitlines()[0]
    (1, 'nodes 2-3', "process 1 (nodes 2-3): KeyError: 'x'")
    """

    def __init__(self, rank: int, nodes: str, what: str, traceback: str = "") -> None:
        self.rank = rank
        self.nodes = nodes
        self.traceback = traceback
        holding = f" ({nodes})" if nodes else ""
        colon = "" if what.startswith(("hangs", "was ", "ended ")) else ":"
        where = f"\n\nThere:\n{traceback.rstrip()}" if traceback else ""
        super().__init__(f"process {rank}{holding}{colon} {what}{where}")
