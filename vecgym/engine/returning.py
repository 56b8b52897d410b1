"""What nodes that return begin with; see `vecgym.engine.availability`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.collectives.base import payload_bytes
from vecgym.collectives.ledger import Transfer
from vecgym.collectives.topology import Links
from vecgym.core import nodes, rng, tree
from vecgym.core.tree import Tree
from vecgym.engine.presence import Presence
from vecgym.engine.state import State


def rejoined(state: State, presence: Presence, comm: Collectives, inplace: bool) -> State:
    """Return the state before the step that it is at, with the parameters of those that return.

    What they are sent is recorded.
    """
    back = presence.returning(state.step)
    if not back or presence.rejoin == "own":
        return state
    there, before = presence.row(state.step), presence.row(state.step - 1)
    staying = _ids(there & before) or _ids(before)
    if presence.rejoin == "shared":
        sources = [staying[0]] * len(back)
        given = _mean(state.params, _ids(before), comm)
    else:
        seed = presence.run.seed
        draws = [rng.generator(seed, "neighbour", state.step, node) for node in back]
        sources = [staying[int(torch.randint(len(staying), (), generator=draw))] for draw in draws]
        given = nodes.take_rows(state.params, torch.tensor(sources))
    links = Links.of(torch.tensor(sources), torch.tensor(back))
    comm.ledger.record(Transfer("permute", payload_bytes(state.params), comm.run_nodes, links, tensors=tuple(given)))
    own = {name: x for name, x in given.items() if len(state.params[name]) > 1}
    put = nodes.put_rows(state.params, torch.tensor(back), own, len(state.node_steps), inplace)
    return replace(state, params={**state.params, **put})


def _mean(params: Tree, members: list[int], comm: Collectives) -> Tree:
    """Average over some nodes, `[1, *]`: of equal ones exactly their value."""
    wide = {name: x for name, x in params.items() if len(x) > 1}
    if wide and len(members) > 1:
        record = Transfer("mean", payload_bytes(wide), comm.run_nodes, (tuple(members),), tensors=tuple(wide))
        comm.ledger.record(record)
    rows = nodes.take_rows(params, torch.tensor(members))
    return tree.map(lambda x: nodes.means(x, 1), rows)


def _ids(there: Tensor) -> list[int]:
    found: list[int] = there.nonzero().flatten().tolist()
    return found
