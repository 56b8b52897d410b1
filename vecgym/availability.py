"""The short name of `vecgym.engine.availability`: which nodes are there in which steps.

>>> from vecgym.availability import Dropout
>>> Dropout.__module__
'vecgym.engine.availability'
"""

from vecgym.engine.availability import Availability, Deadline, Dropout, Facts, Function, LocalSteps, Sampled, Trace

__all__ = ["Availability", "Deadline", "Dropout", "Facts", "Function", "LocalSteps", "Sampled", "Trace"]
