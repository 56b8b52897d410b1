"""The base of decentralised strategies: a local step, then an exchange with the neighbours in a graph."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, takes_options
from vecgym.strategy.decentralised.gossip import Mix, Topology
from vecgym.strategy.exchange import Exchange


class Decentralised(Strategy, batched=(), random=False, steady=True):
    """Each node takes a step of the inner optimizer; `meet` then exchanges with the neighbours, after every step.

    Subclasses override `meet`, in which `neighbours` takes the average of any trees.

    Attributes:
        remembered: the names of the trees that each node keeps, of the parameters' shapes. They begin at 0, but for
            "before", the node's parameters before the present step.
        needs_everyone: the reason why no node may be absent, and the way out; None: nodes may be.
    """

    remembered: ClassVar[tuple[str, ...]] = ()
    needs_everyone: ClassVar[str | None] = None

    @takes_options(InnerOptions)
    def __init__(
        self,
        topology: Topology | Mix = "ring",
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        mix = topology if isinstance(topology, Mix) else Mix(topology)
        super().__init__(inner_optim, [Exchange(mix)], **inner)

    @property
    def graph(self) -> Mix:
        """The average over the neighbours."""
        return self.exchanges[0].how

    def neighbours(self, x: Tree, part: Part) -> Tree:
        """Return sum_j W_ij x_j at each node i."""
        return part.comm.mix(x, self.graph.mixing(part))

    def check_run(self, run: RunFacts) -> None:
        super().check_run(run)
        if self.needs_everyone and self.exchanges[0].facts(run).fewest < run.num_nodes:
            raise ValueError(f"{type(self).__name__} cannot lose a node: {self.needs_everyone}")

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        return {**own, **{name: tree.map(torch.zeros_like, params) for name in self.remembered}}, shared

    def train(self, part: Part) -> None:
        if "before" in self.remembered:  # the step may overwrite the parameters
            part.own["before"] = tree.map(torch.clone, part.params)
        super().train(part)
