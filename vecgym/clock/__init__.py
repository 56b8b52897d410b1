"""The time of a run on your network: train once, price everywhere.

A run's ledger records what was sent. How long the run takes is a pure function of the ledger, the network and the
compute times:

>>> import torch
>>> from vecgym import Trainer
>>> from vecgym.clock import Compute, Network, price
>>> from vecgym.models import Line
>>> from vecgym.strategy import FedAvgStrategy
>>> trainer = Trainer(Line(), torch.ones(64))
>>> averaged = trainer.fit(FedAvgStrategy("sgd", H=5, lr=0.1), num_nodes=4, max_steps=10, device="cpu", progress=False)
>>> price(trainer.ledger, Network("1 Gbit/s", latency="50 ms"), Compute(0.4))
Timeline(10 steps of 4 nodes: 4.6 s, 87.0 % computing)

`vecgym.guide.clock` explains what overlaps with what; `vecgym.clock.cost` has the formulas.
"""

from vecgym.clock.asynchronous import AsyncTimeline
from vecgym.clock.compute import Compute
from vecgym.clock.dry import dry_run
from vecgym.clock.network import Network
from vecgym.clock.required import required_bandwidth, required_H
from vecgym.clock.side_by_side import Prices, price_strategies
from vecgym.clock.timeline import Timeline, price
from vecgym.clock.trace import PerNode

__all__ = [
    "AsyncTimeline", "Compute", "Network", "PerNode", "Prices", "Timeline", "dry_run", "price", "price_strategies",
    "required_H", "required_bandwidth",
]  # fmt: skip
