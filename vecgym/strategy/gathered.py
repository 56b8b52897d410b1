"""The codes of all nodes: gathered, read, and weighted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.collectives.topology import Groups
from vecgym.compress.codecs import Codec
from vecgym.core.tree import Tree

Codes = dict[str, Tree]  # the codes of each tensor, in parts


def shares_of(groups: Groups | None, weights: Sequence[float] | None, comm: Collectives) -> Tensor | None:
    """Return W `[1 or L, K]`, with which a node's average is sum_k W_ik x_k. None: the plain mean.

    It is what the average makes of the unit vectors, on paper: no communication.
    """
    if groups is None and weights is None:
        return None
    W = StackedCollectives(comm.num_nodes).mean(torch.eye(comm.num_nodes, dtype=torch.float64), groups, weights)
    return W[comm.node_ids] if len(W) > 1 else W


def gathered_codes(codes: Codes, codec: Codec, gather: Callable[[Tree], Tree]) -> Codes:
    """Gather every node's codes, `[1, K, ...]`, in one collective; shared parts, `[1, 1, ...]`, are not sent."""
    sent = {f"{name}/{part}": y for name, code in codes.items() for part, y in code.items() if part not in codec.shared}
    received = gather(sent)
    return {
        name: {part: received.get(f"{name}/{part}", y[:, None]) for part, y in code.items()}
        for name, code in codes.items()
    }


def decode_all(code: Tree, codec: Codec, like: Tensor) -> Tensor:
    """Decode the codes of K nodes: `[R, K, ...]` -> `[R, K, *]`."""
    sent = next(y for part, y in code.items() if part not in codec.shared)
    wide = {part: y.expand(sent.shape[0], sent.shape[1], *y.shape[2:]) for part, y in code.items()}
    return codec.decode({part: wide[part].flatten(0, 1) for part in wide}, like).unflatten(0, sent.shape[:2])
