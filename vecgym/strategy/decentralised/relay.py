"""RelaySum: sums of all nodes' parameters, passed along the links of a tree."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vecgym.collectives.topology import Mixing
from vecgym.core import check, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, takes_options
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.stages import Average, ExchangeFacts, Memory

Edges = tuple[tuple[int, int], ...]

# The edges of each tree of K nodes; with two trees, each has every second coordinate.
TREES: dict[str, Callable[[int], list[Edges]]] = {
    "chain": lambda K: [tuple((i - 1, i) for i in range(1, K))],
    "star": lambda K: [tuple((0, i) for i in range(1, K))],
    "binary_tree": lambda K: [tuple((i // 2, i) for i in range(1, K))],
    "double_binary_tree": lambda K: [
        tuple((i // 2, i) for i in range(1, K)),
        tuple((K - 1 - i // 2, K - 1 - i) for i in range(1, K)),
    ],
}


class Relay(NamedTuple):
    """A tree.

    Attributes:
        colours: the links of each colour; of these a node has one, at most.
        missing: for each exchange the number of other nodes that a node has not heard of, `[K]`, while there are any.
    """

    colours: list[Mixing]
    missing: list[Tensor]

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, edges: Edges, num_nodes: int) -> Relay:
        """Analyse a tree.

        >>> relay = Relay.of(((0, 1), (1, 2), (2, 3)), 4)
        >>> [mixing.links.pairs for mixing in relay.colours]
        [[(1, 0), (0, 1), (3, 2), (2, 3)], [(2, 1), (1, 2)]]
        >>> relay.missing
        [tensor([2, 1, 1, 2]), tensor([1, 0, 0, 1])]
        """
        taken: list[dict[int, int]] = [{} for _ in range(num_nodes)]  # node -> colour -> neighbour
        distance, reached = torch.full((num_nodes, num_nodes), num_nodes), [0]
        distance.fill_diagonal_(0)
        neighbours = [sorted({sum(edge) - i for edge in edges if i in edge}) for i in range(num_nodes)]
        for i in reached:  # grows, from node 0 outwards
            for j in neighbours[i]:
                if j < num_nodes and j not in reached:
                    colour = next(c for c in range(num_nodes) if c not in taken[i])
                    taken[i][colour], taken[j][colour] = j, i
                    distance[j, reached] = distance[reached, j] = distance[i, reached] + 1
                    reached.append(j)
        if len(reached) < num_nodes or len(edges) != num_nodes - 1:
            raise ValueError(
                f"topology={list(edges)} is no tree of {num_nodes} nodes, with {num_nodes - 1} edges that join all: "
                f'RelaySum would count values twice, or never. Give "chain", or {list(TREES["chain"](num_nodes)[0])}.'
            )
        colours = torch.zeros(max(map(len, taken)), num_nodes, num_nodes, dtype=torch.float64)
        for i, of_node in enumerate(taken):
            for colour, j in of_node.items():
                colours[colour, i, j] = 1
        missing = [(distance > t + 1).sum(1) for t in range(int(distance.max()) - 1)]
        return cls([Mixing.of(weights) for weights in colours], missing)


class RelaySum(Average, batched=(), random=False):
    """The mean of all nodes' values, one exchange late for each link after the first on the way to a node.

    State: `heard t.c`, per node: the last message of its neighbour in tree t along the link of colour c; `start`, the
    common initial values, once.

    >>> from vecgym.collectives import StackedCollectives
    >>> part, x = Part.alone(StackedCollectives(3)), {"w": torch.tensor([0.0, 3.0, 9.0])}
    >>> memory = RelaySum("chain").memory({"w": torch.zeros(1)}, part)
    >>> RelaySum("chain")(x, part, memory)["w"]  # the ends have not yet heard of one another
    tensor([1., 4., 4.])
    """

    common = False
    partial = False

    def __init__(self, topology: str | Sequence[tuple[int, int]] = "chain") -> None:
        if isinstance(topology, str):
            self.topology: str | Edges = check.choice("topology", topology, tuple(TREES), "edges of a tree, [(0, 1)]")
        else:
            pairs = [tuple(check.integer("topology", i, 0, "ids of nodes") for i in edge) for edge in topology]
            self.topology = tuple((min(edge), max(edge)) for edge in pairs)
            Relay.of(self.topology, len(pairs) + 1)

    def relays(self, num_nodes: int) -> list[Relay]:
        """Return one tree, or the two that share the coordinates."""
        trees = TREES[self.topology](num_nodes) if isinstance(self.topology, str) else [self.topology]
        return [Relay.of(edges, num_nodes) for edges in trees]

    def check(self, run: ExchangeFacts) -> None:
        self.relays(run.num_nodes)
        if run.fewest < run.num_nodes:
            raise ValueError(
                f"{self!r} passes messages through every node, and all behind an absent one would be missing: leave "
                "out availability and participation, or give GossipStrategy or D2Strategy."
            )

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        memory.shared["start"] = values
        relays = self.relays(run.num_nodes)
        for t, (relay, part) in enumerate(zip(relays, shared_out(values, len(relays), lead=1))):
            for c in range(len(relay.colours)):
                memory.own[f"heard {t}.{c}"] = tree.map(torch.zeros_like, part)

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        relays = self.relays(part.comm.num_nodes)
        starts = shared_out(memory.shared["start"], len(relays), part.lead)
        sums = [
            self._relayed(t, relay, z, start, part, memory)
            for t, (relay, z, start) in enumerate(zip(relays, shared_out(x, len(relays), part.lead), starts))
        ]
        return tree.map(lambda y: y / part.comm.num_nodes, put_together(sums, x, part.lead))

    def _relayed(self, t: int, relay: Relay, z: Tree, start: Tree, part: Part, memory: Memory) -> Tree:
        """Send to each neighbour the sum of the others' last messages; return the sum of all messages."""
        before = [memory.own[f"heard {t}.{c}"] for c in range(len(relay.colours))]
        everything = functools.reduce(lambda a, b: tree.map(torch.add, a, b), before, z)
        total = z
        for c, (mixing, back) in enumerate(zip(relay.colours, before)):
            heard = part.comm.mix(tree.map(torch.sub, everything, back), mixing)
            memory.own[f"heard {t}.{c}"] = heard
            total = tree.map(torch.add, total, heard)
        if part.due.number < len(relay.missing):
            missing = relay.missing[part.due.number].reshape(*[1] * (part.lead - 1), -1)
            total = tree.map(lambda y, first: y + part.each(missing, y) * first, total, start)
        return total


def shared_out(x: Tree, count: int, lead: int) -> list[Tree]:
    """Deal out the coordinates of all tensors, counted through, to `count` trees; one tree gets the tensors themselves.

    >>> shared_out({"a": torch.tensor([[0, 1, 2]]), "b": torch.tensor([[3, 4]])}, 2, lead=1)
    [{'a': tensor([[0, 2]]), 'b': tensor([[4]])}, {'a': tensor([[1]]), 'b': tensor([[3]])}]
    """
    if count == 1:
        return [x]
    parts: list[Tree] = [{} for _ in range(count)]
    for name, flat, firsts in _counted(x, count, lead):
        for part, first in zip(parts, firsts):
            part[name] = flat[..., first::count]
    return parts


def put_together(parts: Sequence[Tree], like: Tree, lead: int) -> Tree:
    """Invert `shared_out`."""
    if len(parts) == 1:
        return parts[0]
    whole: Tree = {}
    for name, flat, firsts in _counted(like, len(parts), lead):
        places = torch.cat([torch.arange(flat.shape[-1])[first :: len(parts)] for first in firsts]).argsort()
        y = torch.cat([part[name] for part in parts], -1)
        whole[name] = y[..., placed(places, y.device)].reshape(*y.shape[:lead], *like[name].shape[lead:])
    return whole


def _counted(x: Tree, count: int, lead: int) -> list[tuple[str, Tensor, list[int]]]:
    """Return each tensor flat, with the first of its coordinates that goes to each of `count` trees."""
    found, offset = [], 0
    for name, y in x.items():
        flat = y.reshape(*y.shape[:lead], math.prod(y.shape[lead:]))
        found.append((name, flat, [(t - offset) % count for t in range(count)]))
        offset += flat.shape[-1]
    return found


class RelaySumStrategy(Strategy):
    """RelaySum/Model: a local step, then the mean of all nodes' parameters, as late as they are links away in a tree.

    With z_i = theta_i + u_i, u_i the step of the inner optimizer, node i sends to its neighbour j
    M_ij = z_i + sum_{k != j} M_ki, of the messages of the step before; then, with those of this step,
    theta_i <- (z_i + sum_j M_ji + theta(0) m_i) / K, where m_i counts the nodes that it has not heard of yet.

    So theta_i is the mean of z_k(t - d_ik + 1), d_ik the number of links between them: each node counts once, whatever
    the graph. Nodes with non-IID data reach the optimum of the mean loss. With two nodes, or all in one place, this is
    the mean of all parameters after each step; on longer ways values are late, also of equal nodes.

    Memory per node: one message for each link, of the node with the most: max degree * b P; theta(0), once. Bytes sent
    per node and step: 2 (K - 1) / K * b * P on average, degree * b * P of one node. The counts m_i are known from the
    tree and not sent.

    Args:
        topology: "chain", 0 - 1 - 2 - ...; "star" around node 0; "binary_tree", with the link 0 - 1, and from there on
            w - 2 w and w - 2 w + 1; "double_binary_tree", that for the coordinates 0, 2, 4, ... of all parameters
            together, and its mirror image, K - 1 - w for w, for the others, so that no node has all the traffic; or the
            links of a tree, [(0, 1), (1, 2), ...].
        inner_optim: the local optimizer, AdamW when not given.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: for another name; before the first step for links that are no tree, and if nodes may be absent.

    >>> RelaySumStrategy("binary_tree", "sgd", lr=0.1)
    RelaySumStrategy(OptimSpec(SGD, lr=0.1), Exchange(RelaySum(topology='binary_tree')))

    Reference: Vogels et al., "RelaySum for Decentralized Deep Learning on Heterogeneous Data", arXiv 2110.04175, and
    github.com/epfml/relaysgd. Deviations: any optimizer in place of SGD; the program sends the counts, and counts the
    bytes of the node that sends most.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        topology: str | Sequence[tuple[int, int]] = "chain",
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, [Exchange(RelaySum(topology))], **inner)
