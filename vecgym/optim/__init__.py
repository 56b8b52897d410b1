"""Optimizers on stacked tensors: every parameter is `[L, *shape]`, and L = 1 means the same on every node.

- Settings: OptimSpec; ensure_optim_spec makes one from a name in OPTIMIZERS or a torch.optim.Optimizer class
- Steps: Optimizer, a spec with clipping and a schedule; its caller counts the steps
- Updates: a Rule, by OptimSpec.rule: ElementwiseRule, all nodes in one call, for the classes in FORMULAS (ELEMENTWISE
  and Muon's); PerNodeRule, one torch optimizer per node, for any other. Their state is an OptState
- Classes: Lion, Muon (torch's if it has one), FullPrecisionMuon, DionMuon, FedAdam, FedYogi, FedAdagrad: beyond
  torch.optim
- Clipping: clip_grad_norm, check_max_norm
"""

from vecgym.optim.formulas import ELEMENTWISE, FORMULAS
from vecgym.optim.optimizer import Optimizer, check_max_norm, clip_grad_norm
from vecgym.optim.optimizers import DionMuon, FedAdagrad, FedAdam, FedYogi, FullPrecisionMuon, Lion, Muon
from vecgym.optim.rules import ElementwiseRule, OptState, PerNodeRule, Rule
from vecgym.optim.spec import OPTIMIZERS, OptimSpec, ensure_optim_spec

__all__ = [
    "ELEMENTWISE", "FORMULAS", "OPTIMIZERS", "DionMuon", "ElementwiseRule", "FedAdagrad", "FedAdam", "FedYogi",
    "FullPrecisionMuon", "Lion", "Muon", "OptState", "OptimSpec", "Optimizer", "PerNodeRule", "Rule", "check_max_norm",
    "clip_grad_norm", "ensure_optim_spec",
]  # fmt: skip
