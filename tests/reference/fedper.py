"""FedPer: federated averaging of base layers, with personalization layers that never leave a client (arXiv 1912.00818,
algorithms 1 and 2); FedBN (arXiv 2102.07623, algorithm 1) is the same with the batch norms as these layers.

    the server has W_B; each client i has its own W_P_i
    for each round
        for each participant i:   (W_B_i, W_P_i) = SGD of H steps from (W_B, W_P_i); send W_B_i
        W_B = sum_i n_i W_B_i / sum_i n_i             over the participants i

Deviations from the papers: local progress is counted in H steps, not in epochs; the optimizer may be any, and its
state stays local; a round may sample its clients. With `mu`, a client's loss has mu / 2 |W - W(start of the round)|^2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result


def fedper(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    personal: Callable[[str], bool],
    inner: OptimizerSpec,
    participants: Callable[[int], list[int]] | None = None,
    weights: Sequence[float] | None = None,
    mu: float = 0.0,
) -> Result:
    clients = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(clients, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    n = [1.0] * num_nodes if weights is None else weights
    base = {name: p.detach().clone() for name, p in common.parameters(model).items() if not personal(name)}

    for first in range(0, len(batches), H):
        chosen = list(range(num_nodes)) if participants is None else participants(first)
        for i in chosen:
            theta = common.parameters(clients[i])
            with torch.no_grad():
                for name, value in base.items():
                    theta[name].copy_(value)
            start = {name: p.detach().clone() for name, p in theta.items()}
            for step in range(first, first + H):
                losses[step, i] = common.backward(clients[i], batches[step][i])
                for name, p in theta.items():
                    common.gradient(p).add_(p.detach() - start[name], alpha=mu)
                optimizers[i].step()
        base = {
            name: common.mean([common.parameters(clients[i])[name].detach() for i in chosen], [n[i] for i in chosen])
            for name in base
        }
        with torch.no_grad():
            for client in clients:  # what each would begin with, were it drawn next
                for name, value in base.items():
                    common.parameters(client)[name].copy_(value)
    return Result(losses=losses, models=clients, optimizers=optimizers)
