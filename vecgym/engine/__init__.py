"""The local work of the nodes: losses and gradients.

- Engine: Engine, its settings (check_settings, EngineName, ENGINES), the facts that it observes of a model
  (ModelFacts), its way to compute (Plan, choose_plan) and its results (Local)
- Backends: vecgym.engine.backend.Backend is the protocol of `vmap` and `loop`, of `recorded`, which engine="auto" takes
  for small models, and of `compiled`, which compile=True adds; another one is a file and a name in BACKENDS
"""

from vecgym.engine.backend import Local
from vecgym.engine.engine import Engine
from vecgym.engine.plan import BACKENDS, ENGINES, EngineName, ModelFacts, Plan, check_settings, choose_plan

__all__ = [
    "BACKENDS", "ENGINES", "Engine", "EngineName", "Local", "ModelFacts", "Plan", "check_settings", "choose_plan",
]  # fmt: skip
