"""MuLoCo: DiLoCo with Muon for hidden matrices and AdamW for all else (arXiv 2505.23725).

    theta_outer = a copy of theta
    for each step t
        for each node i:
            hidden matrices: Muon(theta_i);  all other parameters: AdamW(theta_i)
        after every H steps:
            Delta = mean_i (theta_outer - theta_i)
            m = mu m + Delta;  theta_outer = theta_outer - eta (Delta + mu m);  theta_i = theta_outer

AdamW is torch's. Muon is the authors' (`optimizers.DionMuon`), or torch's: `make_muon`. One of each for every node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference import common, optimizers
from tests.reference.common import Batch, Result

MUON: Any = getattr(torch.optim, "Muon", optimizers.Muon)


def muloco(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    is_matrix: Callable[[str], bool],
    lr: float,
    adamw_lr: float,
    momentum: float,
    weight_decay: float,
    outer_lr: float,
    outer_momentum: float,
    make_muon: Any = optimizers.DionMuon,
    max_norm: float | None = None,
    factor: Callable[[int], float] = lambda step: 1.0,
) -> Result:
    models = common.copy_model(model, num_nodes)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    muons, adamws = [], []
    for theta in thetas:
        matrices = [p for name, p in theta.items() if is_matrix(name)]
        others = [p for name, p in theta.items() if not is_matrix(name)]
        muons.append(make_muon(matrices, lr=lr, momentum=momentum, weight_decay=weight_decay))
        adamws.append(torch.optim.AdamW(others, lr=adamw_lr, weight_decay=weight_decay))

    theta_outer = {name: p.detach().clone() for name, p in thetas[0].items()}
    m: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in theta_outer.items()}

    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            for optimizer, rate in ((muons[node], lr), (adamws[node], adamw_lr)):
                optimizer.param_groups[0]["lr"] = rate * factor(step)
                optimizer.step()

        if (step + 1) % H == 0:
            for name, outer in theta_outer.items():
                Delta = common.mean([outer - theta[name].detach() for theta in thetas])
                m[name] = outer_momentum * m[name] + Delta
                theta_outer[name] = outer - outer_lr * (Delta + outer_momentum * m[name])
                for theta in thetas:
                    with torch.no_grad():
                        theta[name].copy_(theta_outer[name])

    return Result(losses=losses, models=models, outer=theta_outer)
