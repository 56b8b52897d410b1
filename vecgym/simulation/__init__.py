"""A run is a timetable and handlers.

The timetable says what happens when, and to which rows. An algorithm has a method for each kind of event. An event
takes its rows out of the state, its method changes them, and they are put back. A run does nothing else.
"""

from vecgym.core.devices import spread
from vecgym.simulation.simulation import Algorithm, Group, LocalTraining, Part, Place, Simulation, TickRecord, run
from vecgym.simulation.stack import Stack
from vecgym.simulation.state import State, StateView
from vecgym.simulation.timetable import Due, Event, Lockstep, Mark, RunFacts, Timetable
from vecgym.simulation.when import Rounds, RoundsOf, When

__all__ = [
    "Algorithm", "Due", "Event", "Group", "LocalTraining", "Lockstep", "Mark", "Part", "Place", "Rounds", "RoundsOf",
    "RunFacts", "Simulation", "Stack", "State", "StateView", "TickRecord", "Timetable", "When", "run", "spread",
]  # fmt: skip
