"""Optimizers on stacked tensors: every parameter is `[L, *shape]`, and L = 1 means the same on every node.

Given:     OptimSpec, or what ensure_optim_spec makes one of: a name in OPTIMIZERS, or a torch.optim.Optimizer class
Run:       a Rule: ElementwiseRule, all nodes in one call, for the classes in ELEMENTWISE; PerNodeRule, one torch
           optimizer per node, for any other. What evolves is an OptState
Clipping:  clip_grad_norm, check_max_norm
"""

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
