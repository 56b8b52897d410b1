"""The interfaces of other simulators, on vecgym."""

import math


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity where a float cannot hold it.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
