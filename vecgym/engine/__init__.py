"""What the nodes compute by themselves: losses and gradients, by one of several backends.

Engine:     Engine, with its Plan (choose_plan, check_settings, EngineName, ENGINES), ModelFacts and Local
Backends:   Backend, the protocol; Vmap and Loop; a new one is a file and a name in BACKENDS of vecgym.engine.plan
"""

from vecgym.engine.backend import Backend, Local
from vecgym.engine.engine import Engine
from vecgym.engine.loop import Loop
from vecgym.engine.observe import ModelFacts
from vecgym.engine.plan import BACKENDS, ENGINES, EngineName, Plan, check_settings, choose_plan
from vecgym.engine.vmap import Vmap

__all__ = [
    "BACKENDS",
    "ENGINES",
    "Backend",
    "Engine",
    "EngineName",
    "Local",
    "Loop",
    "ModelFacts",
    "Plan",
    "Vmap",
    "check_settings",
    "choose_plan",
]
