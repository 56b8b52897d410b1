"""Validation losses: of the average of the nodes ("global") and of each node ("local")."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vecgym import nodes
from vecgym.data import EvalBatches
from vecgym.local import Engine
from vecgym.simulate import State
from vecgym.tree import Tree


class Evaluation(NamedTuple):
    """Mean losses over the validation examples."""

    average: float  # of the averaged model
    nodes: Tensor  # [L]: of each node's own model


@torch.no_grad()
def evaluate(engine: Engine, state: State, batches: EvalBatches, num_nodes: int) -> Evaluation:
    """Evaluate in eval mode; neither the state nor any random state is changed."""
    values = state.params, state.buffers
    average = _keep(nodes.mean(state.params)), _keep(nodes.mean(state.buffers))
    same = all(x.shape[0] == 1 for tree in values for x in tree.values())
    global_sum = torch.zeros((), dtype=torch.float64)
    local_sum = torch.zeros(num_nodes, dtype=torch.float64)
    count = 0
    for batch, size in batches:
        losses = engine.losses(*average, batch, own_batches=batches.per_node).cpu().double()
        global_sum += losses.mean() * size
        if not same:
            losses = engine.losses(*values, batch, own_batches=batches.per_node).cpu().double()
        local_sum += losses * size
        count += size
    return Evaluation(float(global_sum / count), local_sum / count)


def _keep(values: Tree) -> Tree:
    return {name: x[None] for name, x in values.items()}
