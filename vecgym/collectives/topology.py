"""Communication topologies: partitions of the nodes into islands, and mixing matrices.

A mixing matrix is `[K, K]`, float64; W_ij is the weight of node j's value at node i. All matrices made here are doubly
stochastic: nonnegative, with rows and columns that sum to 1, so that mixing preserves the mean of the nodes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecgym.core import check
from vecgym.core.devices import readable

Groups = Sequence[Sequence[int]]
Islands = tuple[tuple[int, ...], ...]


class Links(NamedTuple):
    """Messages between nodes: one for each pair of a sender and a receiver.

    The node ids are stored as bytes (int32), which hash and compare fast: a run has the same links in most steps.

    >>> links = Links.of(torch.tensor([0, 1]), torch.tensor([1, 2]))
    >>> len(links.senders), links.pairs
    (2, [(0, 1), (1, 2)])
    """

    sender_bytes: bytes
    receiver_bytes: bytes

    @classmethod
    def of(cls, senders: Tensor, receivers: Tensor) -> Links:
        """Create links whose message i goes from node `senders[i]` to node `receivers[i]`."""
        with readable():
            return cls(*(array("i", x.tolist()).tobytes() for x in (senders, receivers)))

    @property
    def senders(self) -> array[int]:
        """The sending node of each message.

        >>> Links.of(torch.tensor([0, 1]), torch.tensor([1, 2])).senders
        array('i', [0, 1])
        """
        return array("i", self.sender_bytes)

    @property
    def receivers(self) -> array[int]:
        """The receiving node of each message.

        >>> Links.of(torch.tensor([0, 1]), torch.tensor([1, 2])).receivers
        array('i', [1, 2])
        """
        return array("i", self.receiver_bytes)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The (sender, receiver) of each message."""
        return list(zip(self.senders, self.receivers))


class ServerLinks(NamedTuple):
    """Messages to a server from the nodes `up`, and from it to the nodes `down`.

    >>> ServerLinks(up=(0, 3), down=(0, 3)).up
    (0, 3)
    """

    up: tuple[int, ...]
    down: tuple[int, ...]


def plain_who(who: Islands | Links | ServerLinks | None) -> Any:
    """Convert participants to values that `torch.load(weights_only=True)` reads.

    >>> plain_who(((0, 1), (2,)))
    ['groups', [0, 1], [2]]
    """
    if isinstance(who, Links):
        return ["links", who.senders.tolist(), who.receivers.tolist()]
    if isinstance(who, ServerLinks):
        return ["server", list(who.up), list(who.down)]
    return None if who is None else ["groups", *map(list, who)]


def who_of(plain: Any) -> Islands | Links | ServerLinks | None:
    """Invert `plain_who`.

    >>> who_of(["server", [0, 3], [0]])
    ServerLinks(up=(0, 3), down=(0,))
    """
    kind, *parts = plain or [None]
    if kind == "links":
        return Links(*(array("i", ids).tobytes() for ids in parts))
    if kind == "server":
        return ServerLinks(*map(tuple, parts))
    return None if kind is None else tuple(map(tuple, parts))


SUM_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}  # for the row and column sums of a user's matrix

# --------------------------------------------------------------------------------------------- islands


def random_islands(nodes: Sequence[int], island_size: int, generator: torch.Generator) -> list[list[int]]:
    """Shuffle `nodes` into islands of `island_size`; the remainder forms a last, smaller island.

    The members of each island are in ascending order, so that a reduction over them has a fixed order.

    >>> islands = random_islands(range(10), 4, torch.Generator().manual_seed(0))
    >>> [len(island) for island in islands], sorted(sum(islands, []))
    ([4, 4, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    order = [nodes[i] for i in torch.randperm(len(nodes), generator=generator).tolist()]
    return [sorted(order[i : i + island_size]) for i in range(0, len(order), island_size)]


def sample_nodes(num_nodes: int, count: int, generator: torch.Generator) -> list[int]:
    """Draw `count` of `num_nodes` nodes without replacement, in ascending order.

    >>> len(sample_nodes(10, 3, torch.Generator().manual_seed(0)))
    3
    """
    return sorted(torch.randperm(num_nodes, generator=generator)[:count].tolist())


# ------------------------------------------------------------------------------------- mixing matrices


def complete(num_nodes: int) -> Tensor:
    """Connect every node with every other: W = 11^T / K, so that one exchange yields the average.

    >>> complete(2)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    num_nodes = check.integer("num_nodes", num_nodes)
    return torch.full((num_nodes, num_nodes), 1 / num_nodes, dtype=torch.float64)


def ring(num_nodes: int) -> Tensor:
    """Connect each node with the next and the previous one, weights 1/3; two nodes: 1/2.

    Eigenvalues: 1/3 + 2/3 cos(2 pi k / K).

    >>> ring(4)[0]
    tensor([0.3333, 0.3333, 0.0000, 0.3333], dtype=torch.float64)
    """
    num_nodes = check.integer("num_nodes", num_nodes)
    return _circulant(num_nodes, sorted({0, 1 % num_nodes, -1 % num_nodes}))


def torus(num_nodes: int) -> Tensor:
    """Connect each node with its 4 neighbours on a periodic grid a x b = K, as square as possible, weights 1/5.

    Node i is in row i // b, column i % b. Eigenvalues: 1/5 + 2/5 cos(2 pi k / a) + 2/5 cos(2 pi l / b). If a = 2,
    the neighbours above and below are the same node, with weight 2/5.

    Raises:
        ValueError: if K is prime: there is no grid with a, b >= 2.

    >>> torus(6)[0]  # 2 x 3
    tensor([0.2000, 0.2000, 0.2000, 0.4000, 0.0000, 0.0000], dtype=torch.float64)
    """
    num_nodes = check.integer("num_nodes", num_nodes)
    if num_nodes == 1:
        return complete(1)
    a = _largest_factor(num_nodes)
    if a == 1:
        near = [n for n in range(max(4, num_nodes - 2), num_nodes + 3) if _largest_factor(n) > 1]
        raise ValueError(
            f'topology="torus" arranges the nodes in a x b = K with a, b >= 2, but K={num_nodes} is prime: give '
            f'num_nodes={" or ".join(map(str, near))}, or topology="ring".'
        )
    rows, columns = _cycle(a), _cycle(num_nodes // a)
    eyes = torch.eye(a, dtype=torch.float64), torch.eye(num_nodes // a, dtype=torch.float64)
    return (torch.eye(num_nodes, dtype=torch.float64) + torch.kron(rows, eyes[1]) + torch.kron(eyes[0], columns)) / 5


def ceil_log2(num_nodes: int) -> int:
    """Return the smallest m with 2^m >= K, in integer arithmetic.

    >>> [ceil_log2(n) for n in (1, 2, 3, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return (num_nodes - 1).bit_length()


def exponential(num_nodes: int) -> Tensor:
    """Connect each node with the nodes 1, 2, 4, 8, ... after it: m = ceil(log2 K) of them, weights 1 / (1 + m).

    Spectral gap: 2 / (1 + m) for even K.

    >>> exponential(6)[0]
    tensor([0.2500, 0.2500, 0.2500, 0.0000, 0.2500, 0.0000], dtype=torch.float64)
    """
    num_nodes = check.integer("num_nodes", num_nodes)
    return _circulant(num_nodes, [0, *[2**k for k in range(ceil_log2(num_nodes))]])


def one_peer_exponential(num_nodes: int, round: int) -> Tensor:
    """Connect each node with the node 2^k after it, k = `round` mod ceil(log2 K); weights 1/2.

    When K is a power of two, the product over any log2 K successive rounds is exactly the average.

    >>> one_peer_exponential(4, round=1)[0]
    tensor([0.5000, 0.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    num_nodes = check.integer("num_nodes", num_nodes)
    round = check.integer("round", round, 0)
    m = ceil_log2(num_nodes)
    return _circulant(num_nodes, [0, 2 ** (round % m)]) if m > 0 else complete(1)


def random_matching(num_nodes: int, generator: torch.Generator) -> Tensor:
    """Draw pairs of nodes uniformly among all perfect matchings; weights 1/2.

    The squared distance to the mean shrinks by the factor (K - 2) / (2 (K - 1)), on average.

    Raises:
        ValueError: if K > 1 is odd: one node would be left over.

    >>> random_matching(2, torch.Generator().manual_seed(0))
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    if num_nodes == 1:
        return complete(1)
    if num_nodes % 2 == 1:
        raise ValueError(
            f'topology="random_matching" pairs the nodes, but K={num_nodes} is odd: give num_nodes={num_nodes - 1} or '
            f'{num_nodes + 1}, or topology="one_peer_exponential", which also sends to one node.'
        )
    order = torch.randperm(num_nodes, generator=generator)
    left, right = order.view(-1, 2).unbind(1)
    weights = torch.zeros(num_nodes, num_nodes, dtype=torch.float64).fill_diagonal_(0.5)
    weights[left, right] = weights[right, left] = 0.5
    return weights


def metropolis_weights(adjacency: Tensor | Sequence[Sequence[float]]) -> Tensor:
    """Return the Metropolis-Hastings weights of any undirected graph: symmetric, hence doubly stochastic.

    W_ij = 1 / (1 + max(d_i, d_j)) for neighbours, with d_i the number of neighbours of i; W_ii is the remainder.

    Args:
        adjacency: `[K, K]`, symmetric; i and j are neighbours where it is not 0. The diagonal is ignored.

    Raises:
        ValueError: if the matrix is not square or not symmetric.

    >>> metropolis_weights([[0, 1, 0], [1, 0, 1], [0, 1, 0]])  # a path of three nodes
    tensor([[0.6667, 0.3333, 0.0000],
            [0.3333, 0.3333, 0.3333],
            [0.0000, 0.3333, 0.6667]], dtype=torch.float64)
    """
    try:
        links = torch.as_tensor(adjacency) != 0
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"adjacency is {check.kind_of(adjacency)}; give a matrix of numbers, [K, K].") from error
    if links.dim() != 2 or links.shape[0] != links.shape[1] or not torch.equal(links, links.T):
        raise ValueError(
            f"adjacency, of shape {list(links.shape)}, must be [K, K] and symmetric: links are undirected. "
            "adjacency + adjacency.T makes a square matrix symmetric."
        )
    links = links & ~torch.eye(len(links), dtype=torch.bool, device=links.device)
    degree = links.sum(1)
    weights = links.double() / (1 + torch.maximum(degree[:, None], degree[None, :]))
    return weights + torch.diag(1 - weights.sum(1))


def check_doubly_stochastic(weights: Tensor, name: str = "weights") -> None:
    """Raise a ValueError unless `weights`, `[K, K]`, is nonnegative with rows and columns that sum to 1.

    The sums may be off by 1e-9 in float64, 1e-5 in float32, 1e-2 in half precision.

    >>> check_doubly_stochastic(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    Traceback (most recent call last):
    ...
    ValueError: weights: column 0 sums to 1.5, not to 1; mixing must be doubly stochastic. For a graph use \
vecgym.collectives.topology.metropolis_weights(adjacency); for a positive matrix divide rows and columns by their \
sums, alternately, until all sums are 1 (Sinkhorn).
    """
    fix = (
        "mixing must be doubly stochastic. For a graph use vecgym.collectives.topology.metropolis_weights(adjacency); "
        "for a positive matrix divide rows and columns by their sums, alternately, until all sums are 1 (Sinkhorn)."
    )
    _check_stochastic(weights, name, (1, 0), fix)


def check_column_stochastic(weights: Tensor, name: str = "weights") -> None:
    """Raise a ValueError unless `weights`, `[K, K]`, is nonnegative with columns that sum to 1, as exactly as there.

    >>> check_column_stochastic(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
    Traceback (most recent call last):
    ...
    ValueError: weights: column 0 sums to 0.5, not to 1; column j must say how node j shares out its value. Its rows \
sum to 1: give its transpose, if row i said how node i shares out its value.
    """
    fix = "column j must say how node j shares out its value."
    try:
        _check_stochastic(weights, name, (1,), fix)
    except (TypeError, ValueError):
        pass
    else:
        fix += " Its rows sum to 1: give its transpose, if row i said how node i shares out its value."
    _check_stochastic(weights, name, (0,), fix)


def _check_stochastic(weights: Tensor, name: str, over: Sequence[int], fix: str) -> None:
    """Raise a ValueError unless the sums over these dimensions are 1: over 1 those of rows, over 0 of columns."""
    check.instance("name", name, str, "the name of the matrix in messages, a str")
    if not isinstance(weights, Tensor):
        raise TypeError(f"{name} is {check.kind_of(weights)}; a mixing matrix is a tensor [K, K].")
    if weights.dim() != 2 or weights.shape[0] != weights.shape[1] or len(weights) == 0:
        raise ValueError(f"{name} has shape {list(weights.shape)}; a mixing matrix is square, [K, K].")
    if not weights.is_floating_point():
        raise ValueError(
            f"{name} has dtype {weights.dtype}; a mixing matrix has a floating-point dtype: {name}.double()."
        )
    exact = weights.detach().double()
    if not bool((exact >= 0).all()):  # nan too
        i, j = (~(exact >= 0)).nonzero()[0].tolist()
        raise ValueError(f"{name}[{i}, {j}] = {float(exact[i, j]):.6g} is negative or not a number; {fix}")
    tolerance = SUM_TOLERANCE.get(weights.dtype, 1e-2)
    for kind, sums in ((("column", "row")[dim], exact.sum(dim)) for dim in over):
        worst = int((sums - 1).abs().argmax())
        if not abs(float(sums[worst]) - 1) <= tolerance:
            raise ValueError(f"{name}: {kind} {worst} sums to {float(sums[worst]):.9g}, not to 1; {fix}")


def second_eigenvalue(weights: Tensor) -> float:
    """Return the second largest absolute eigenvalue of a mixing matrix; 0 for a single node.

    One exchange shrinks the nodes' distance to their mean at least by this factor if W commutes with its transpose,
    as all matrices made here do; in the direction of the eigenvector exactly by this factor.

    >>> round(second_eigenvalue(ring(4)), 6)
    0.333333
    """
    check_doubly_stochastic(weights)
    # Remove the mean, whose eigenvalue is 1: the rest of the complete graph is exactly 0.
    rest = weights.detach().double().cpu() - complete(len(weights))
    eigenvalues = torch.linalg.eigvalsh if torch.equal(rest, rest.T) else torch.linalg.eigvals
    return float(eigenvalues(rest).abs().max())


def spectral_gap(weights: Tensor) -> float:
    """Return 1 - `second_eigenvalue`: 1 averages at once, 0 never.

    >>> round(spectral_gap(exponential(8)), 6)  # 2 / (1 + log2 8)
    0.5
    """
    return 1.0 - second_eigenvalue(weights)


# A dense product runs at the speed of BLAS; gathering the rows of the nonzero entries is slower per entry. Measured,
# they break even at one nonzero entry in 16 to 20.
SPARSE_DENSITY = 1 / 16


@dataclass(frozen=True)
class Mixing:
    """A mixing matrix and its nonzero entries, analysed once for any number of exchanges.

    Attributes:
        weights: `[K, K]`.
        sources: the columns of the nonzero entries, row by row.
        values: these entries, detached.
        starts: the start of each row in `sources`, `[K]`.
        links: the messages, one for each nonzero entry off the diagonal.

    >>> mixing = Mixing.of(ring(4))
    >>> mixing.sources.tolist(), mixing.starts.tolist(), len(mixing.links.senders)
    ([0, 1, 3, 0, 1, 2, 1, 2, 3, 0, 2, 3], [0, 3, 6, 9], 8)
    """

    weights: Tensor
    sources: Tensor
    values: Tensor
    starts: Tensor
    links: Links

    @classmethod
    def of(cls, weights: Tensor) -> Mixing:
        """Analyse `weights`, `[K, K]`."""
        constant = weights.detach()
        rows, columns = constant.nonzero(as_tuple=True)
        entries = torch.bincount(rows, minlength=len(weights))
        crossing = rows != columns
        links = Links.of(columns[crossing], rows[crossing])
        return cls(weights, columns, constant[rows, columns], entries.cumsum(0) - entries, links)

    @property
    def sparse(self) -> bool:
        """Whether gathering the neighbours is faster than a dense product.

        >>> Mixing.of(ring(64)).sparse, Mixing.of(complete(64)).sparse
        (True, False)
        """
        return len(self.sources) <= SPARSE_DENSITY * self.weights.numel()


def _circulant(num_nodes: int, offsets: Sequence[int]) -> Tensor:
    """Connect each node, with equal weights, with the nodes at these offsets after it."""
    weights = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    nodes = torch.arange(num_nodes)
    for offset in offsets:
        weights[nodes, (nodes + offset) % num_nodes] = 1 / len(offsets)
    return weights


def _cycle(num_nodes: int) -> Tensor:
    """Return how often each node is the next or previous one of another: once, or twice with two nodes."""
    eye = torch.eye(num_nodes, dtype=torch.float64)
    return eye.roll(1, 0) + eye.roll(-1, 0)


def _largest_factor(n: int) -> int:
    """Return the largest a with a b = n and a <= b; 1 if n is prime."""
    return next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
