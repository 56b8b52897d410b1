"""Which simulation runs an asynchronous strategy."""

from __future__ import annotations

from vecgym.engine.ad_psgd import ADPSGDSimulation
from vecgym.engine.asynchronous import AsyncSimulation
from vecgym.engine.decoupled import DecoupledSimulation
from vecgym.engine.halos import HALoSSimulation
from vecgym.strategy.ad_psgd import ADPSGDStrategy
from vecgym.strategy.asynchronous import EventDriven
from vecgym.strategy.decoupled import DecoupledDiLoCoStrategy
from vecgym.strategy.halos import HALoSStrategy

SIMULATIONS: dict[type[EventDriven], type[AsyncSimulation]] = {
    HALoSStrategy: HALoSSimulation,
    ADPSGDStrategy: ADPSGDSimulation,
    DecoupledDiLoCoStrategy: DecoupledSimulation,
}


def simulation_of(strategy: EventDriven) -> type[AsyncSimulation]:
    """Return the class of the simulation that runs a strategy.

    >>> simulation_of(HALoSStrategy()).__name__
    'HALoSSimulation'
    """
    found = (simulation for kind, simulation in SIMULATIONS.items() if isinstance(strategy, kind))
    return next(found, AsyncSimulation)
