"""Agreement of nodes of which some lie: `Robust`, an average, and `Corrupted`, a stage with liars.

`rules` has the rules on whole vectors, `vectors` the norms, distances, sums and orders of which they are made.
"""

from vecgym.strategy.robust.attacks import Corrupted
from vecgym.strategy.robust.average import Robust
from vecgym.strategy.robust.rules import median

__all__ = ["Corrupted", "Robust", "median"]
