"""The interfaces of other simulators, implemented with vecgym."""

import math


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if it overflows.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
