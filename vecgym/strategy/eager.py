"""Eager updates: DiLoCo whose averages arrive a whole round late, and do not wait (Kale et al., arXiv 2502.12996)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.optim.spec import merge_key, merged_spec
from vecgym.strategy.average import Mean
from vecgym.strategy.base import CommunicationModule, Context, State, Strategy, check_interval, optimizer_step
from vecgym.strategy.communication import counted
from vecgym.strategy.inner import InnerOptions, inner_rate, takes_options
from vecgym.strategy.modules import DEFAULT_H, Exchange, begun, outer_spec
from vecgym.strategy.when import Rounds

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EagerCommunicator(Exchange):
    """Every H steps an outer step of each node, on its own movement and what the others did a round before.

    See `EagerDiLoCoStrategy`. State, each node's own, `[L, *]`, and `[1, *]` before the first exchange: `params`, the
    outer parameters; `optimizer`; `others`, what the other nodes add to the next step, mean_j Delta_j - Delta_i / K.

    Args:
        outer_optim: "sgd" or `torch.optim.SGD` mean SGD(lr=0.7, momentum=0.9, nesterov=True); an `OptimSpec` is taken
            as it is; so is any other optimizer.
        H: inner steps between two outer steps.
        outer_lr: the outer learning rate.

    >>> from vecgym.collectives import StackedCollectives
    >>> module, ctx = EagerCommunicator(OptimSpec("sgd", lr=1.0), H=1), Context(StackedCollectives(2))
    >>> state = module.init({"w": torch.zeros(1)}, ctx)
    >>> params, state = module.exchange_parameters({"w": torch.tensor([1.0, 3.0])}, state, ctx)
    >>> params["w"], state["others"]["w"]  # half of each node's own movement; the other half of the other's comes later
    (tensor([0.5000, 1.5000]), tensor([-1.5000, -0.5000]))
    >>> params, state = module.exchange_parameters(params, state, ctx)  # nothing moved: now all have what all did
    >>> params["w"]
    tensor([2., 2.])
    """

    of_values = False
    shows_defaults = True

    def __init__(
        self,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int = DEFAULT_H,
        outer_lr: float | Tensor | None = None,
    ) -> None:
        self.outer_optim = outer_spec(outer_optim, outer_lr)
        self.H = check_interval("H", H)
        self.average = Mean()
        self.when = Rounds(H)
        self._rule = self.outer_optim.rule()

    def check(self, num_nodes: int, max_steps: int) -> None:
        self.outer_optim.check_steps(num_nodes, self.when.count(max_steps), "outer optimizer")
        super().check(num_nodes, max_steps)

    def init(self, params: Tree, ctx: Context) -> State:
        nothing = tree.map(torch.zeros_like, params)
        state = {"params": params, "optimizer": begun(self._rule, params, False, ctx), "others": nothing}
        average = self.average.init(nothing, ctx)
        return {**state, "average": average} if average else state

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        return self.when.exchange(self._outer_step, params, state, counted(self, ctx))

    def idle(self, ctx: Context) -> bool:
        return not self.when.due(ctx.step)

    def outer_learning_rate(self, ctx: Context) -> float | Tensor | None:
        exchange = self.when.count(ctx.step)
        if exchange >= self.when.count(ctx.max_steps):  # no outer step comes any more
            return None
        return self.outer_optim.at(exchange).hyper.get("lr")

    def stack_key(self) -> Hashable:
        key = merge_key(self.outer_optim)
        return (self.H, key) if key is not None and self.average.plain else None

    def stacked(self, modules: Sequence[Any], num_nodes: int) -> CommunicationModule:
        return EagerCommunicator(merged_spec([m.outer_optim for m in modules], [num_nodes] * len(modules)), self.H)

    def _outer_step(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        moved, held, K = tree.map(torch.sub, state["params"], params), state.get("average", {}), ctx.comm.num_nodes
        with ctx.comm.ledger.lagging(self.when.H):
            mean, held = self.average(moved, held, ctx.replace(inplace=False))
        delta = tree.map(lambda others, own: others + own / K, state["others"], moved)
        told = ctx.replace(own_time=False)  # its rates go by the exchange
        outer, optimizer = optimizer_step(
            self.outer_optim, self._rule, ctx.exchange, state["params"], delta, state["optimizer"], told
        )
        others = tree.map(lambda of_all, own: of_all - own / K, mean, moved)
        changed = {**state, "params": outer, "optimizer": optimizer, "others": others}
        return outer, {**changed, "average": held} if held else changed


class EagerDiLoCoStrategy(Strategy):
    """DiLoCo that uses what the other nodes did a round later, and what a node itself did at once.

    After every H steps, with Delta_i(t) = theta_outer,i - theta_i of round t, all nodes are sent Delta_i(t), and do not
    wait for the mean. Each takes the step
    Delta~_i(t) = mean_j Delta_j(t - 1) + (Delta_i(t) - Delta_i(t - 1)) / K;  Delta(-1) = 0;
    theta_outer,i <- outer_i(theta_outer,i, Delta~_i(t));  theta_i <- theta_outer,i.

    So the exchange of a round may last as long as the next one. Nodes have different outer parameters; the mean of the
    Delta~ is Delta(t) / K + (1 - 1 / K) Delta(t - 1). One node is DiLoCo. The exchange of the last round is lost.
    Evaluated is the mean of the nodes' parameters.

    Bytes sent per node and step: 2 (K - 1) / K * b * P / H.

    | kept for | bytes |
    |---|---|
    | all nodes, once | none |
    | each node | 3 b P: outer parameters, momentum (SGD's), what the others did |

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        outer_optim: SGD(lr=0.7, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        H: inner steps per round; the outer step follows every H-th optimizer step.
        lr, inner_lr: two names for the inner learning rate.
        outer_lr: the outer learning rate.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    Raises:
        ValueError, TypeError: saying what is allowed.

    >>> EagerDiLoCoStrategy("adamw", H=50, lr=3e-4)
    EagerDiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), \
EagerCommunicator(outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=50))
    >>> from vecgym import Trainer
    >>> from vecgym.models import Line
    >>> trainer, strategy = Trainer(Line(), torch.ones(64)), EagerDiLoCoStrategy("sgd", H=4, lr=0.1)
    >>> averaged = trainer.fit(strategy, num_nodes=2, max_steps=8, batch_size=4, device="cpu", progress=False)
    >>> [(entry.step, entry.transfer.lag) for entry in trainer.ledger]  # what is sent may take as long as a round
    [(3, 4), (7, 4)]

    Reference: Kale et al., "Eager Updates For Overlapped Communication and Computation in DiLoCo", arXiv 2502.12996.
    No deviation.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int = DEFAULT_H,
        *,
        inner_lr: float | Tensor | None = None,
        outer_lr: float | Tensor | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        inner["lr"] = inner_rate(inner.get("lr"), inner_lr)
        super().__init__(inner_optim, communication_modules=[EagerCommunicator(outer_optim, H, outer_lr)], **inner)
