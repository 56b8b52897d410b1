"""FedAvg: local steps, then the mean of the parameters (arXiv 1602.05629, algorithm 1).

    for each step t
        for each participant i:   theta_i = optimizer_i(theta_i, clip(gradient of f(theta_i)))
        after every H steps, for each island (a group of nodes):
            theta_i = sum_k n_k theta_k / sum_k n_k       over the participants k of i's island

With `server`, the paper's algorithm:

    for each round
        for each participant i:   theta_i = theta, the server's; H steps; send theta_i to the server
        theta = sum_k n_k theta_k / sum_k n_k             over the participants k

Deviations from the paper: local progress is counted in H optimizer steps, not in epochs; the optimizer may
be any, and its state stays local and is kept across rounds. Without `server` a node that does not participate
in a step keeps its parameters, and later goes on from these. Islands are vecgym's (EXO Gym's) addition; one
island of all nodes, which always take part, is the paper's algorithm with every client in every round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def fedavg(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    islands: Callable[[int], list[list[int]]] | None = None,
    participants: Callable[[int], list[int]] | None = None,
    weights: Sequence[float] | None = None,
    server: bool = False,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)

    everyone = list(range(num_nodes))
    n = list(weights) if weights is not None else [1.0] * num_nodes
    theta = copy.deepcopy(dict(common.parameters(model)))

    for step in range(len(batches)):
        present = everyone if participants is None else participants(step)

        if server and step % H == 0:
            for node in present:
                download(models[node], theta)

        for node in present:
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()

        if server and (step + 1) % H == 0:
            common.average_parameters([models[k] for k in present], [n[k] for k in present])
            theta = copy.deepcopy(dict(common.parameters(models[present[0]])))
            for node in everyone:  # what each would begin with, were it drawn next
                download(models[node], theta)
        elif (step + 1) % H == 0:
            for island in [everyone] if islands is None else islands(step):
                group = [node for node in island if node in present]
                if group:
                    common.average_parameters([models[k] for k in group], [n[k] for k in group])

    return Result(losses=losses, models=models, optimizers=optimizers)


@torch.no_grad()
def download(model: nn.Module, theta: Mapping[str, Tensor]) -> None:
    for name, param in common.parameters(model).items():
        param.copy_(theta[name])
