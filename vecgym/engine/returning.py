"""What nodes that return begin with, and who sends it; see `vecgym.engine.availability`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
from vecgym.strategy import Gradients, Mean, ServerMean, Strategy
from vecgym.strategy.average import Around
from vecgym.strategy.communication import Wrapper
from vecgym.strategy.modules import Exchange


class Shared(NamedTuple):
    """What the nodes share that were there in the step before.

    Attributes:
        outer: parameters that are held once for all, `[1, *]`.
        agreed: the names of those of which all of these nodes have the same, since they have just exchanged.

    >>> Shared({}, set()).apart({"w": torch.zeros(2), "b": torch.zeros(1)}, once=["b"])
    ['w']
    """

    outer: Tree
    agreed: set[str]

    def apart(self, params: Tree, once: Any) -> list[str]:
        """Return the parameters of which these nodes have different values."""
        return [name for name in params if name not in self.outer and name not in self.agreed and name not in once]


def rejoined(state: State, presence: Presence, shared: Shared, comm: Collectives, inplace: bool) -> State:
    """Return the state before the step that it is at, with the parameters of those that return.

    What they are sent is recorded.
    """
    back = presence.returning(state.step)
    if not back or presence.rejoin == "own":
        return state
    sources = sources_of(back, presence, state.step)
    given = nodes.take_rows(state.params, torch.tensor(sources))
    if presence.rejoin == "shared":
        once = [name for name, x in state.params.items() if len(x) == 1]
        wide = {name: state.params[name] for name in shared.apart(state.params, once)}
        given |= shared.outer | _mean(wide, _ids(presence.row(state.step - 1)), comm)
    for names, among, counted in messages(list(given), shared, back, presence, state.step):
        if counted:
            links = Links.of(torch.tensor([sources[back.index(node)] for node in among]), torch.tensor(among))
            payload = payload_bytes({name: state.params[name] for name in names})
            comm.ledger.record(Transfer("permute", payload, comm.run_nodes, links, tensors=tuple(names)))
    own = {name: x for name, x in given.items() if len(state.params[name]) > 1}
    put = nodes.put_rows(state.params, torch.tensor(back), own, len(state.node_steps), inplace)
    return replace(state, params={**state.params, **put})


def messages(
    names: Sequence[str], shared: Shared, back: Sequence[int], presence: Presence, step: int
) -> Iterator[tuple[list[str], list[int], bool]]:
    """Yield which parameters are sent to which nodes that return, and whether that counts.

    What a server sends after an exchange is for those who are there next: as many of them as have left need nothing
    besides.

    >>> from vecgym.engine.availability import Facts, Sampled
    >>> presence = Presence(Sampled(0.5, H=1), Facts(num_nodes=4, num_steps=2, seed=42))
    >>> presence.present(0), presence.present(1)
    ((1, 2), (0, 2))
    >>> [list(messages(["w"], Shared({}, agreed), [0], presence, step=1)) for agreed in (set(), {"w"})]
    [[(['w'], [0], True)], [(['w'], [0], False)]]
    """
    sent = shared.agreed if presence.server else set()
    left = int((presence.row(step - 1) & ~presence.row(step)).sum())
    other, told = [[name for name in names if (name in sent) is inside] for inside in (False, True)]
    for chosen, among, counted in ((other, back, True), (told, back[left:], True), (told, back[:left], False)):
        if chosen and among:
            yield chosen, list(among), counted


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


def through_server(strategy: Strategy) -> Strategy:
    """Return a strategy whose means over all nodes, of their parameters or movements, are a server's.

    >>> from vecgym.strategy import CommunicateOptimizeStrategy, Compressed, Parameters
    >>> from vecgym.compress import TopK
    >>> modules = [Parameters(Compressed(Mean(), TopK(0.1)), every=2), Parameters(Mean(island_size=2))]
    >>> through_server(CommunicateOptimizeStrategy(modules, "sgd")).communication_modules
    (Parameters(Compressed(ServerMean(), TopK(fraction=0.1, k=None)), every=2), Parameters(Mean(island_size=2)))
    """
    twin = copy.copy(strategy)
    twin.communication_modules = tuple(map(_through_server, strategy.communication_modules))
    return twin


def _through_server(module: Any) -> Any:
    if isinstance(module, Wrapper):
        twin = copy.copy(module)
        twin.module = _through_server(module.module)
        return twin
    return module.around(_server_mean(module.average)) if _averages_values(module) else module


def _averages_values(module: Any) -> bool:
    return isinstance(module, Exchange) and not isinstance(module, Gradients)


def _server_mean(average: Any) -> Any:
    if isinstance(average, Around):
        return average.around(_server_mean(average.inner))
    return ServerMean(average.weighting) if type(average) is Mean and average.shared else average


def _mean(wide: Tree, members: list[int], comm: Collectives) -> Tree:
    """Average over some nodes, `[1, *]`: of equal ones exactly their value."""
    if wide and len(members) > 1:
        record = Transfer("mean", payload_bytes(wide), comm.run_nodes, (tuple(members),), tensors=tuple(wide))
        comm.ledger.record(record)
    rows = nodes.take_rows(wide, torch.tensor(members))
    return tree.map(lambda x: nodes.means(x, 1), rows)


def _ids(there: Tensor) -> list[int]:
    found: list[int] = there.nonzero().flatten().tolist()
    return found
