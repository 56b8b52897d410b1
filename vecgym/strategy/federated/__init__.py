"""Federated algorithms besides FedAvg: a sample of the nodes takes local steps, and a server takes a step with theirs.

`base` has the rounds; `vecgym.strategy.federated_averaging` has FedAvg and the servers' optimizers.
"""

from vecgym.strategy.federated.dynamic import FedDynStrategy
from vecgym.strategy.federated.mime import MimeStrategy
from vecgym.strategy.federated.normalised import FedNovaStrategy
from vecgym.strategy.federated.scaffnew import ScaffnewStrategy
from vecgym.strategy.federated.scaffold import SCAFFOLDStrategy

__all__ = ["FedDynStrategy", "FedNovaStrategy", "MimeStrategy", "SCAFFOLDStrategy", "ScaffnewStrategy"]
