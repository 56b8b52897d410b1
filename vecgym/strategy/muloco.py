"""MuLoCo: DiLoCo whose inner optimizer is Muon (Thérien et al., arXiv 2505.23725)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vecgym.compress import Compressor
from vecgym.core import check
from vecgym.optim import OptimSpec
from vecgym.strategy.averages import Mean, Outer, outer_spec
from vecgym.strategy.base import Strategy
from vecgym.strategy.coded import Compressed
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.settings import StepOptions, takes_options
from vecgym.strategy.when import as_when

if TYPE_CHECKING:
    from typing_extensions import Unpack

OUTER = OptimSpec(torch.optim.SGD, lr=0.8, momentum=0.9, nesterov=True)


def is_hidden_matrix(name: str, p: Tensor) -> bool:
    """Whether a parameter is a matrix and, by its name, neither an embedding nor a head.

    A part of the name says so that has "emb", "token" or "position" in it, is "wte", "wpe" or "head", or ends in
    "_head".

    >>> w = torch.zeros(4, 4)
    >>> [is_hidden_matrix(name, w) for name in ("blocks.0.mlp.weight", "tok_emb.weight", "lm_head.weight")]
    [True, False, False]
    """
    parts = name.lower().split(".")
    words, names = ("emb", "token", "position"), ("wte", "wpe", "head")
    outside = any(x in names or x.endswith("_head") or any(word in x for word in words) for x in parts)
    return p.dim() == 2 and not outside


@dataclass(frozen=True)
class _Groups:
    """Which parameters Muon takes, and what AdamW takes the others with: the `param_groups` of an `OptimSpec`."""

    matrices: Callable[[str, Tensor], bool]
    adamw_lr: float | Tensor
    weight_decay: float | Tensor

    def __call__(self, name: str, p: Tensor) -> dict[str, Any]:
        if check.called("matrices", self.matrices, name, p):
            return {}
        return {"optim": "adamw", "lr": self.adamw_lr, "weight_decay": self.weight_decay}


class MuLoCoStrategy(Strategy):
    """H local steps of Muon on every node, then one step of an outer optimizer on their mean movement.

    theta_i <- Muon(theta_i, g_i), H times; then Delta = mean_i(theta_outer - theta_i),
    theta_outer <- outer(theta_outer, Delta), theta_i <- theta_outer.

    Muon, for hidden matrices, is that of the paper's authors, `vecgym.optim.DionMuon`: m <- mu m + g; O = five
    Newton-Schulz steps on m, each with coefficients of its own, nearly m's orthogonal factor;
    theta <- theta (1 - lr wd) - lr sqrt(rows / columns) O. Vectors, tensors of more dimensions, embeddings and the head
    take AdamW. Layers of one shape, and all nodes, are orthogonalised together.

    | kept                            | shape    | bytes                               |
    |---------------------------------|----------|-------------------------------------|
    | theta, Muon's m, AdamW's u, v   | `[K, *]` | per node: 2 b P of matrices, else 3 |
    | theta_outer, the outer momentum | `[1, *]` | once for all: 2 b P                 |

    Bytes sent per node and step: 2 (K - 1) / K * b * P / H.

    Args:
        outer_optim: SGD(lr=0.8, momentum=0.9, nesterov=True) when not given, the paper's for 8 nodes; of a single one
            it has 0.7 and 0.6.
        H: inner steps per round.
        lr: Muon's learning rate.
        adamw_lr: AdamW's; a schedule of the learning rate moves both.
        momentum: mu, Muon's.
        weight_decay: wd, of both.
        muon: "dion", the authors'; or "torch", `torch.optim.Muon`: Nesterov's momentum, one triple of coefficients in
            all steps, and a scale sqrt(max(1, rows / columns)).
        full_precision: keep the parameters' precision in Muon's Newton-Schulz steps, where the paper rounds to
            bfloat16: ten times faster on a processor without products in bfloat16.
        matrices: a function of a parameter's name and tensor: whether Muon takes it. None: a matrix that by its name is
            neither embedding nor head.
        outer_lr: the outer learning rate, if `outer_optim` does not have it.
        compression: how each node sends its movement; see `DiLoCoStrategy`.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizers; see `Strategy`.

    Raises:
        ValueError, TypeError: for what the optimizers refuse, and lr = 0; for `matrices` that is no function; before
            the first step where it chooses what is no matrix.

    >>> strategy = MuLoCoStrategy(H=30, lr=0.02)
    >>> strategy.exchanges[0].how.optim.spec
    OptimSpec(SGD, lr=0.8, momentum=0.9, nesterov=True)
    >>> params = {"up.weight": torch.zeros(1, 8, 4), "up.bias": torch.zeros(1, 8), "head.weight": torch.zeros(1, 3, 8)}
    >>> [(group.cls.__name__, names) for group, names, _ in strategy.inner_optim.groups(params)]
    [('DionMuon', ['up.weight']), ('AdamW', ['up.bias', 'head.weight'])]

    Reference: Thérien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo", arXiv 2505.23725, and
    github.com/facebookresearch/MuLoCo, torchtitan/torchtitan/experiments/dion_optimizer/muon.py. Deviations: what is
    not a hidden matrix is told by its name and shape, by other words than theirs, unless `matrices` says it; AdamW has
    a rate of its own and torch's betas, where theirs has Muon's rate, and 0.9 and 0.99.
    """

    @takes_options(StepOptions)
    def __init__(
        self,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = 30,
        *,
        lr: float | Tensor = 0.02,
        adamw_lr: float | Tensor = 3e-4,
        momentum: float | Tensor = 0.9,
        weight_decay: float | Tensor = 0.0,
        muon: Literal["dion", "torch"] = "dion",
        full_precision: bool = False,
        matrices: Callable[[str, Tensor], bool] | None = None,
        outer_lr: float | Tensor | None = None,
        compression: str | Compressor | None = None,
        **inner: Unpack[StepOptions],
    ) -> None:
        chosen = is_hidden_matrix if matrices is None else matrices
        if not callable(chosen):
            raise TypeError(
                f"matrices={matrices!r} must be a function of a parameter's name and tensor, such as "
                'lambda name, p: p.dim() == 2 and "emb" not in name, or None.'
            )
        if check.is_number(lr) and lr == 0:
            raise ValueError(
                "lr=0: under a schedule AdamW's rate keeps its ratio to Muon's, which must be positive. To train with "
                "AdamW alone give matrices=lambda name, p: False."
            )
        OptimSpec("adamw", lr=adamw_lr, weight_decay=weight_decay)  # refuses what AdamW refuses
        groups = _Groups(chosen, adamw_lr, weight_decay)
        check.flag("full_precision", full_precision)
        check.choice("muon", muon, ("dion", "torch"))
        kind = "dionmuon" if muon == "dion" else "fullprecisionmuon" if full_precision else "muon"
        more: dict[str, Any] = {"full_precision": True} if full_precision and muon == "dion" else {}
        own = OptimSpec(kind, lr=lr, momentum=momentum, weight_decay=weight_decay, param_groups=groups, **more)
        if outer_optim is None:
            outer = OUTER if outer_lr is None else OUTER.replace(lr=outer_lr)
        else:
            outer = outer_spec(outer_optim, outer_lr)
        average = Mean() if compression is None else Compressed(Mean(), compression, purpose="compress parameters")
        super().__init__(own, [Exchange(Outer(average, outer), every=as_when(H, "H"))], **inner)
