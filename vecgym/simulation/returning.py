"""What returning nodes begin with, and who sends it; see `vecgym.simulation.availability`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.collectives.topology import Links
from vecgym.core import nodes, rng
from vecgym.core.tree import Tree
from vecgym.simulation.presence import Presence


class Shared(NamedTuple):
    """What the nodes that were present in the step before share.

    Attributes:
        outer: parameters that are stored once for all, `[1, *]`.
        agreed: names of the parameters that are equal on all of these nodes, which have just exchanged them.

    >>> Shared({}, set()).apart({"w": torch.zeros(2), "b": torch.zeros(1)}, once=["b"])
    ['w']
    """

    outer: Tree
    agreed: set[str]

    def apart(self, params: Tree, once: Any) -> list[str]:
        """Return the names of the parameters that differ between these nodes."""
        return [name for name in params if name not in self.outer and name not in self.agreed and name not in once]


def sent(
    params: Tree, presence: Presence, shared: Shared, comm: Collectives, step: int, once: Sequence[str]
) -> Tree:  # fmt: skip
    """Return the parameters that returning nodes begin a step with, `[1 or n, *]`, and record what is sent.

    Args:
        params: of the nodes here, `[1 or L, *]`.
        once: the names of the parameters that all nodes share.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.simulation.availability import Facts, Trace
    >>> presence = Presence(Trace([[True, True, False], [True] * 3], rejoin="shared"), Facts(3, 2, seed=0))
    >>> sent({"w": torch.tensor([1.0, 3.0, 9.0])}, presence, Shared({}, set()), StackedCollectives(3), 1, once=[])
    {'w': tensor([2.])}
    """
    back = presence.returning(step)
    sources, common = sources_of(back, presence, step), Tree()
    if presence.rejoin == "shared":
        wide = {name: params[name] for name in shared.apart(params, once)}
        common = shared.outer | _mean(wide, _ids(presence.row(step - 1)), comm)
    for names, among, counted in messages(list(params), shared, back, presence, step):
        if counted:
            senders = [sources[back.index(node)] for node in among]
            links = Links.of(torch.tensor(senders), torch.tensor(among))
            comm._announce("permute", {name: params[name] for name in names}, links)
    rest = {name: x for name, x in params.items() if name not in common}
    values = {**common, **(comm.fetched(rest, sources, back) if rest else {})}
    return {name: values[name] for name in params}  # in the model's order, by which fragments are cut


def messages(
    names: Sequence[str], shared: Shared, back: Sequence[int], presence: Presence, step: int
) -> Iterator[tuple[list[str], list[int], bool]]:
    """Yield which parameters are sent to which returning nodes, and whether that counts as traffic.

    What a server sends after an exchange is for the nodes that are present next: as many of them as have left need
    nothing more.

    >>> from vecgym.simulation.availability import Facts, Sampled
    >>> presence = Presence(Sampled(0.5, H=1), Facts(num_nodes=4, num_steps=2, seed=42))
    >>> presence.present(0), presence.present(1)
    ((1, 2), (0, 2))
    >>> [list(messages(["w"], Shared({}, agreed), [0], presence, step=1)) for agreed in (set(), {"w"})]
    [[(['w'], [0], True)], [(['w'], [0], False)]]
    """
    on_server = shared.agreed if presence.server else set()
    left = int((presence.row(step - 1) & ~presence.row(step)).sum())
    rest, served = [[name for name in names if (name in on_server) is inside] for inside in (False, True)]
    for some, among, counted in ((rest, back, True), (served, back[left:], True), (served, back[:left], False)):
        if some and among:
            yield some, list(among), counted


def sources_of(back: Sequence[int], presence: Presence, step: int) -> list[int]:
    """Return the node that sends parameters to each returning node: with "shared" one, else one drawn for each.

    >>> from vecgym.simulation.availability import Facts, Trace
    >>> presence = Presence(Trace([[False, True, True], [True, True, True]], rejoin="shared"), Facts(3, 2, seed=0))
    >>> sources_of([0], presence, step=1)
    [1]
    """
    present, before = presence.row(step), presence.row(step - 1)
    staying = _ids(present & before) or _ids(before)
    if presence.rejoin == "shared":
        return [staying[0]] * len(back)
    draws = [rng.generator(presence.run.seed, "neighbour", step, node) for node in back]
    return [staying[int(torch.randint(len(staying), (), generator=draw))] for draw in draws]


def _mean(wide: Tree, members: list[int], comm: Collectives) -> Tree:
    """Average over some nodes, `[1, *]`; the mean of equal values is exact. One node alone needs no mean: empty."""
    if not wide or len(members) == 1:
        return {}
    some, ids = comm.among(members), set(members)
    some.step = comm.step
    some._announce("mean", wide)
    here = [i for i, node in enumerate(comm.node_ids.tolist()) if node in ids]
    rows = nodes.take_rows(wide, torch.tensor(here or [0]))
    means = some._apply(rows, lambda among, x: among._sum(x, None, True) if among.native else nodes.means(x, 1))
    return {name: x[:1] for name, x in means.items()}


def _ids(present: Tensor) -> list[int]:
    ids: list[int] = present.nonzero().flatten().tolist()
    return ids
