"""Optimizers on stacked tensors: every parameter is `[L, *shape]`, and L = 1 means the same on every node."""

from vecgym.optim.clip import check_max_norm, clip_grad_norm
from vecgym.optim.elementwise import ElementwiseRule, OptState
from vecgym.optim.formulas import ELEMENTWISE
from vecgym.optim.per_node import PerNodeRule
from vecgym.optim.spec import OPTIMIZERS, OptimSpec, Rule, ensure_optim_spec

__all__ = [
    "ELEMENTWISE",
    "OPTIMIZERS",
    "ElementwiseRule",
    "OptState",
    "OptimSpec",
    "PerNodeRule",
    "Rule",
    "check_max_norm",
    "clip_grad_norm",
    "ensure_optim_spec",
]
