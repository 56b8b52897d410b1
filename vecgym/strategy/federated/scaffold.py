"""SCAFFOLD: local steps, corrected by the difference between a node's gradient and that of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.core import tree
from vecgym.core.devices import spread
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.averages import Outer, ServerMean, Weighting
from vecgym.strategy.base import InnerOptions, Unpack, takes_options
from vecgym.strategy.exchange import DEFAULT_H
from vecgym.strategy.federated.base import Federated, plain_sgd, weight_of_all
from vecgym.strategy.servers import one_number


class SCAFFOLDStrategy(Federated, batched=(), random=False, steady=True):
    """Local steps whose drift is corrected: clients with non-IID data reach the optimum of the mean loss.

    In a round each participant i of S begins with the server's theta, y_i = theta, and takes its steps
    y_i <- y_i - gamma_t (g_i - c_i + c). Then
    c_i+ = c_i - c + (theta - y_i) / sum_t gamma_t;  theta <- theta + eta mean_S (y_i - theta);
    c <- c + 1/K sum_S (c_i+ - c_i);  c_i <- c_i+.

    So c_i+ is the mean of the round's gradients, each weighted by its rate, and is computed from these (option II of
    the paper). At a constant rate the divisor is H gamma; schedules and unequal numbers of steps leave nothing behind.
    All c are 0 at first, and c is the mean of all c_i at all times; nodes that sit out keep theirs, and so do all in a
    round at rate 0, the beginning of a warm-up. FedAvg at a constant rate stops at a distance from the optimum if the
    nodes' data differ; here theta reaches it, also with sampled clients. With H = 1, all nodes and eta = 1 this is
    data-parallel SGD.

    With weights w_i of the nodes in place of equal ones, theta takes the weighted mean over S, and
    c <- c + sum_S w_i (c_i+ - c_i) / sum_i w_i: the optimum is that of the weighted mean of the losses.

    | kept for | bytes |
    |---|---|
    | all nodes, once | 2 b P: theta, c |
    | each node | 2 b P: c_i, the sum of its round's gradients |

    Bytes sent per participant and round: 2 b P up, of y_i and of c_i+ - c_i, and as many down: twice those of FedAvg.
    An absent node keeps its c_i and its sum, to which it adds when it returns; one that is never there does not count.

    Args:
        inner_optim: "sgd", when not given, or an `OptimSpec` of SGD with a learning rate and a weight decay, which is
            part of g_i.
        H: local steps per round: a number, or a function of the step at which a round begins.
        participation: the fraction of the nodes, sampled anew for each round (at least one).
        weighting: "equal"; "examples": w_i is the number of examples of node i; or w_i itself, one for each node.
        server_lr: eta.
        local_steps: in place of H, the local steps of each node in a round, `[K]`. A round has as many steps as the
            most; a node that has done its own rests until the exchange.
        lr, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: for another optimizer than plain SGD, groups of parameters, and `max_norm`; for H and local_steps;
            before the first step for another number of nodes in `local_steps` or `weighting`.

    >>> from vecgym import Trainer
    >>> from vecgym.models import Line
    >>> strategy = SCAFFOLDStrategy("sgd", H=5, participation=0.5, lr=0.1)
    >>> strategy
    SCAFFOLDStrategy(OptimSpec(SGD, lr=0.1), Exchange(Outer(ServerMean(), optim=OptimSpec(SGD, lr=1.0)), every=5, \
participation=0.5))
    >>> trainer = Trainer(Line(), torch.arange(8.0))
    >>> model = trainer.fit(strategy, num_nodes=4, max_steps=10, batch_size=2, device="cpu", progress=False)
    >>> [(entry.step, entry.transfer.operation, entry.transfer.payload_bytes) for entry in trainer.ledger][:2]
    [(4, 'server_sum', 4), (4, 'server_mean', 4)]

    Reference: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", arXiv 1910.06378,
    algorithm 1 with option II. Deviations: the divisor is the sum of the rates; weights. The program of
    github.com/alpemreacar/FedDyn, train_SCAFFOLD, divides by the first rate of the run, so that c_i is too small after
    the rate has fallen, and clips gradients.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = DEFAULT_H,
        participation: float = 1.0,
        *,
        weighting: Weighting = "equal",
        server_lr: float | Tensor = 1.0,
        local_steps: Sequence[int] | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        spec = plain_sgd(inner_optim, inner.get("max_norm"), "SCAFFOLD")
        how = Outer(ServerMean(weighting), OptimSpec("sgd", lr=one_number("server_lr", server_lr, "[0, inf)")))
        super().__init__(spec, how, H, participation, local_steps=local_steps, **inner)

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        zeros, like = tree.map(torch.zeros_like, params), next(iter(params.values()))
        rates = torch.zeros(1, dtype=tree.wider(like.dtype), device=like.device)
        return {**own, "control": zeros, "gradients": zeros, "rates": rates}, {**shared, "control": zeros}

    def train(self, part: Part) -> None:
        """Take a step with the corrected gradient."""
        grads, lr, decay = part.gradients(), part.lr, self.inner_optim.hyper["weight_decay"]
        c, own, rates = part.shared["control"], part.own["control"], part.own["rates"]

        def summed(total: Tensor, g: Tensor, y: Tensor) -> Tensor:
            return total + spread(lr, g) * (g + part.scaled(decay, y))

        part.own["gradients"] = tree.map(summed, part.own["gradients"], grads, part.params)
        part.own["rates"] = rates + spread(lr, rates)
        part.missing = {}  # the correction concerns every parameter
        part.optimize(tree.map(lambda g, c, own: g + (c - own), grads, c, own))
        part.report(part.losses)

    def before_exchange(self, part: Part) -> None:
        """Let the participants' control variates become the means of their gradients, and move the mean of all."""
        rates, how = part.own["rates"], self.exchanges[0].how
        moved = rates > 0

        def change(total: Tensor, own: Tensor) -> Tensor:
            return spread(moved, own) * (total / spread(torch.where(moved, rates, 1.0), own) - own)

        delta = tree.map(change, part.own["gradients"], part.own["control"])
        sums = part.comm.server_sum(delta, range(part.comm.num_nodes), part.weights(how.inner.weighting))
        total = weight_of_all(how.inner.weighting, part.run)
        part.own["control"] = tree.map(torch.add, part.own["control"], delta)
        part.shared["control"] = tree.map(lambda c, x: c + x / total, part.shared["control"], sums)
        part.own["gradients"] = tree.map(torch.zeros_like, delta)
        part.own["rates"] = torch.zeros_like(rates)
