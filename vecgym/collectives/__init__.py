"""Communication between nodes: one interface, several backends."""

from vecgym.collectives.base import Collectives
from vecgym.collectives.stacked import StackedCollectives

__all__ = ["Collectives", "StackedCollectives"]
