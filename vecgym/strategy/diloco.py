"""DiLoCo: many local steps, then one step of an outer optimizer (Douillard et al., arXiv 2311.08105)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.compress import Compressor
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec, ensure_optim_spec
from vecgym.optim.merge import merge_key, merged_spec
from vecgym.optim.schedule import Schedule
from vecgym.strategy.base import CommunicationModule, Context, State, Strategy, check_interval, optimizer_step
from vecgym.strategy.compression import with_compression
from vecgym.strategy.fedavg import warn_if_never
from vecgym.strategy.relaxed import SyncWeight, make_sync_weight

OUTER_DEFAULTS: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # the paper's
DEFAULT_H = 100


class DiLoCoCommunicator(CommunicationModule):
    """Every H steps, the mean movement of the nodes is the gradient of an outer optimizer.

    Delta = mean_i(theta_outer - theta_i);  theta_outer <- outer(theta_outer, Delta);  theta_i <- theta_outer.

    State: `params` (theta_outer) and `optimizer` (the outer momentum), both `[1, *]`: stored once for all nodes.

    Args:
        outer_optim: "sgd" or `torch.optim.SGD` mean the paper's SGD(lr=0.7, momentum=0.9, nesterov=True); an
            `OptimSpec` is taken as it is; so is any other optimizer.
        H: inner steps between two outer steps.
        outer_lr: the outer learning rate.
        sync_weight: `[T]`, in place of H: how far the outer step is taken after each inner step; see `SyncWeight`.

    >>> from vecgym.collectives import StackedCollectives
    >>> module, ctx = DiLoCoCommunicator(H=2), Context(StackedCollectives(2), step=1)
    >>> state = module.init({"w": torch.zeros(1)}, ctx)
    >>> params, state = module.exchange_parameters({"w": torch.tensor([1.0, 3.0])}, state, ctx)
    >>> params["w"]  # 0.7 (2 + 0.9 * 2), on both nodes
    tensor([2.6600])
    """

    def __init__(
        self,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int = DEFAULT_H,
        outer_lr: float | Tensor | None = None,
        sync_weight: Tensor | Sequence[float] | SyncWeight | None = None,
    ) -> None:
        self.outer_optim = _outer_spec(outer_optim, outer_lr)
        self.H = check_interval("H", H)
        self.sync_weight = make_sync_weight(sync_weight, self.H, DEFAULT_H)
        if self.sync_weight is not None:
            self.H = 1
        self._rule = self.outer_optim.rule()

    def check(self, num_nodes: int, max_steps: int) -> None:
        self.outer_optim.check_steps(num_nodes, max_steps // self.H, "outer optimizer")
        if self.sync_weight is not None:
            self.sync_weight.check(max_steps)
        warn_if_never(self.H, max_steps)

    def init(self, params: Tree, ctx: Context) -> State:
        return {"params": params, "optimizer": self._rule.init(params)}

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        if self.sync_weight is not None:
            return self.sync_weight.exchange(self._outer_step, params, state, ctx)
        return self._outer_step(params, state, ctx) if (ctx.step + 1) % self.H == 0 else (params, state)

    def outer_learning_rate(self, ctx: Context) -> float | Tensor | None:
        if ctx.step // self.H >= ctx.max_steps // self.H:  # no outer step comes any more
            return None
        return self.outer_optim.at(ctx.step // self.H).hyper.get("lr")

    def stack_key(self) -> Hashable:
        key = merge_key(self.outer_optim)
        return None if key is None or self.sync_weight is not None else (self.H, key)

    def stacked(self, modules: Sequence[Any], num_nodes: int) -> DiLoCoCommunicator:
        outer = merged_spec([module.outer_optim for module in modules], [num_nodes] * len(modules))
        return DiLoCoCommunicator(outer, self.H)

    def _outer_step(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        delta = ctx.comm.mean(tree.map(torch.sub, state["params"], params), inplace=True)  # [1, *]
        outer, optimizer = optimizer_step(
            self.outer_optim, self._rule, ctx.step // self.H, state["params"], delta, state["optimizer"], ctx
        )
        return outer, {"params": outer, "optimizer": optimizer}


class DiLoCoStrategy(Strategy):
    """H local steps on every node, then one step of an outer optimizer on their mean movement.

    theta_i <- inner(theta_i, g_i), H times; then Delta = mean_i(theta_outer - theta_i),
    theta_outer <- outer(theta_outer, Delta), theta_i <- theta_outer.

    With the paper's outer optimizer: m <- mu m + Delta; theta_outer <- theta_outer - eta (Delta + mu m). Inner
    optimizer state stays on its node and is kept across rounds. Bytes sent per node and step:
    2 (K - 1) / K * b * P / H.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        outer_optim: SGD(lr=0.7, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        H: inner steps per round; the outer step follows every H-th optimizer step.
        sync_weight: `[T]`, in place of H: how far the outer step is taken after each inner step; see `SyncWeight`.
        lr, inner_lr: two names for the inner learning rate.
        outer_lr: the outer learning rate.
        compression: how each node sends its movement theta_outer - theta_i: "topk", "randomk", "int8", "int4", "sign",
            "powersgd", or a codec of `vecgym.compress` such as `TopK(0.05)`; with error feedback, see `compressed`.
            None: as it is.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    >>> DiLoCoStrategy("adamw", "sgd", H=100, lr=3e-4)
    DiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), \
DiLoCoCommunicator(outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=100))

    Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv
    2311.08105. No deviation.
    """

    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int = DEFAULT_H,
        *,
        sync_weight: Tensor | Sequence[float] | SyncWeight | None = None,
        lr: float | Tensor | None = None,
        inner_lr: float | Tensor | None = None,
        outer_lr: float | Tensor | None = None,
        compression: str | Compressor | None = None,
        max_norm: float | Tensor | None = None,
        lr_scheduler: str | Schedule | None = None,
        warmup_steps: int = 0,
        cosine_anneal: bool = False,
    ) -> None:
        if lr is not None and inner_lr is not None:
            raise ValueError("lr and inner_lr are two names for the inner learning rate: give one of them.")
        super().__init__(
            inner_optim,
            communication_modules=[
                with_compression(DiLoCoCommunicator(outer_optim, H, outer_lr, sync_weight), compression)
            ],
            lr=inner_lr if lr is None else lr,
            max_norm=max_norm,
            lr_scheduler=lr_scheduler,
            warmup_steps=warmup_steps,
            cosine_anneal=cosine_anneal,
        )


def _outer_spec(
    optim: str | OptimSpec | type[torch.optim.Optimizer] | None, outer_lr: float | Tensor | None
) -> OptimSpec:
    by_name = optim is None or optim is torch.optim.SGD or (isinstance(optim, str) and optim.lower() == "sgd")
    if by_name:
        lr = OUTER_DEFAULTS["lr"] if outer_lr is None else outer_lr
        return OptimSpec(torch.optim.SGD, **{**OUTER_DEFAULTS, "lr": lr})
    return ensure_optim_spec(optim, lr=outer_lr)
