"""What nodes that return begin with; see `vecgym.engine.availability`."""

from __future__ import annotations

from collections.abc import Sequence
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
    sources = sources_of(back, presence, state.step)
    if presence.rejoin == "shared":
        given = _mean(state.params, _ids(presence.row(state.step - 1)), comm)
    else:
        given = nodes.take_rows(state.params, torch.tensor(sources))
    links = Links.of(torch.tensor(sources), torch.tensor(back))
    comm.ledger.record(Transfer("permute", payload_bytes(state.params), comm.run_nodes, links, tensors=tuple(given)))
    own = {name: x for name, x in given.items() if len(state.params[name]) > 1}
    put = nodes.put_rows(state.params, torch.tensor(back), own, len(state.node_steps), inplace)
    return replace(state, params={**state.params, **put})


def sources_of(back: Sequence[int], presence: Presence, step: int) -> list[int]:
    """Return the node that sends parameters to each of those that return: with "shared" one, else one drawn for each.

    >>> from vecgym.engine.availability import Facts, Trace
    >>> presence = Presence(Trace([[False, True, True], [True, True, True]], rejoin="shared"), Facts(3, 2, seed=0))
    >>> sources_of([0], presence, step=1)
    [1]
    """
    there, before = presence.row(step), presence.row(step - 1)
    staying = _ids(there & before) or _ids(before)
    if presence.rejoin == "shared":
        return [staying[0]] * len(back)
    draws = [rng.generator(presence.run.seed, "neighbour", step, node) for node in back]
    return [staying[int(torch.randint(len(staying), (), generator=draw))] for draw in draws]


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
