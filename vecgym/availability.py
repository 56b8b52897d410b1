"""The short name of `vecgym.simulation.availability`: which nodes are there in which steps.

>>> from vecgym.availability import Dropout
>>> Dropout.__module__
'vecgym.simulation.availability'
"""

from vecgym.simulation.availability import Availability, Deadline, Dropout, Facts, Function, LocalSteps, Sampled, Trace

__all__ = ["Availability", "Deadline", "Dropout", "Facts", "Function", "LocalSteps", "Sampled", "Trace"]
