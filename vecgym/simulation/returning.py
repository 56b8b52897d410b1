"""The parameters with which nodes return, and the transfers that bring them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from vecgym.availability import Presence, ids_of
from vecgym.collectives import Collectives
from vecgym.collectives.topology import Links
from vecgym.core import nodes, rng
from vecgym.core.tree import Tree


def sent(
    params: Tree, presence: Presence, outer: Tree, agreed: set[str], comm: Collectives, step: int, once: Sequence[str]
) -> Tree:  # fmt: skip
    """Return the parameters with which returning nodes begin a step, `[1 or n, *]`, and record the transfers.

    After an exchange a server sends its result to the nodes of the next step. As many returning nodes as have left get
    the parameters in this way, without another message.

    Args:
        params: of the nodes in this process, `[1 or L, *]`.
        outer: parameters that are stored once for all nodes besides, `[1, *]`, such as DiLoCo's.
        agreed: the names of the parameters that all nodes present in the step before have just made equal.
        once: the names of the parameters that are stored once for all nodes.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.availability import Facts, Trace
    >>> presence = Presence(Trace([[True, True, False], [True] * 3], rejoin="shared"), Facts(3, 2, seed=0))
    >>> sent({"w": torch.tensor([1.0, 3.0, 9.0])}, presence, {}, set(), StackedCollectives(3), 1, once=[])
    {'w': tensor([2.])}
    """
    back = presence.returning(step)
    sources, common = sources_of(back, presence, step), Tree()
    if presence.rejoin == "shared":
        wide = {name: x for name, x in params.items() if name not in {*outer, *agreed, *once}}
        common = outer | _mean(wide, ids_of(presence.is_present(step - 1)), comm)
    num_left = int((presence.is_present(step - 1) & ~presence.is_present(step)).sum())
    on_server = agreed if presence.server else set()
    for served, first in ((False, 0), (True, num_left)):
        message = {name: x for name, x in params.items() if (name in on_server) is served}
        if message and back[first:]:
            comm._announce("permute", message, Links.of(torch.tensor(sources[first:]), torch.tensor(back[first:])))
    rest = {name: x for name, x in params.items() if name not in common}
    values = {**common, **(comm.fetched(rest, sources, back) if rest else {})}
    return {name: values[name] for name in params}  # in the model's order, which determines the fragments


def sources_of(back: Sequence[int], presence: Presence, step: int) -> list[int]:
    """Return the sender for each returning node: with "shared" one node for all, else a node drawn for each.

    >>> from vecgym.availability import Facts, Trace
    >>> presence = Presence(Trace([[False, True, True], [True, True, True]], rejoin="shared"), Facts(3, 2, seed=0))
    >>> sources_of([0], presence, step=1)
    [1]
    """
    present, before = presence.is_present(step), presence.is_present(step - 1)
    staying = ids_of(present & before) or ids_of(before)
    if presence.rejoin == "shared":
        return [staying[0]] * len(back)
    draws = [rng.generator(presence.run.seed, "neighbour", step, node) for node in back]
    return [staying[int(torch.randint(len(staying), (), generator=draw))] for draw in draws]


def _mean(wide: Tree, members: list[int], comm: Collectives) -> Tree:
    """Average over some nodes, `[1, *]`; the mean of equal values is exact. A single node needs no mean: {}."""
    if not wide or len(members) == 1:
        return {}
    some, ids = comm.among(members), set(members)
    here = [i for i, node in enumerate(comm.node_ids.tolist()) if node in ids]
    rows = nodes.take_rows(wide, torch.tensor(here or [0]))
    some._announce("mean", rows)
    exact = lambda among: partial(nodes.means, number=1)  # noqa: E731
    means = some._apply(rows, some._reduction(None, True) if some.native else exact)
    return {name: x[:1] for name, x in means.items()}
