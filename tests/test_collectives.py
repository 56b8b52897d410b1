"""`StackedCollectives` against naive loops over nodes: values, derivatives, bytes and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.collectives.base import check_groups
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.collectives.stacked import GroupCollectives
from vecgym.collectives.topology import Links, Mixing, ServerLinks

K = 5
SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 3), (2, 1, 3)]  # of one node: [L] to 4-D tensors
GROUPS: dict[str, list[list[int]]] = {
    "uneven": [[3, 0], [1, 4, 2]],
    "some in none": [[4, 1]],
    "singletons": [[0], [2], [1, 3, 4]],
    "everyone": [[0, 1, 2, 3, 4]],
    "nobody": [],
}
SOURCE = [2, 0, 1, 3, 4]  # nodes 3 and 4 keep their own
SHARES = (3.0, 1.0, 4.0, 1.5, 0.0)  # of each node in a weighted mean


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHTS = draw(K, K, seed=1) * (torch.arange(K) != 2)  # nobody hears node 2


# ----------------------------------------------------------------------------- naive: a list of K tensors


def naive_mean(x: list[Tensor], groups: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    out = list(x)
    for group in [range(len(x))] if groups is None else groups:
        for i in group:
            total = torch.zeros_like(x[i])
            for j in group:
                total = total + x[j]
            out[i] = total / len(group)
    return out


def naive_sum(x: list[Tensor], groups: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    size = dict.fromkeys(range(len(x)), 1)
    for group in [range(len(x))] if groups is None else groups:
        size |= {i: len(group) for i in group}
    return [mean * size[i] for i, mean in enumerate(naive_mean(x, groups))]


def naive_weighted(x: list[Tensor], groups: Sequence[Sequence[int]]) -> list[Tensor]:
    out = list(x)
    for group in groups:
        for i in group:
            total = torch.zeros_like(x[i])
            for j in group:
                total = total + SHARES[j] * x[j]
            out[i] = total / sum(SHARES[j] for j in group)
    return out


def naive_mix(x: list[Tensor], weights: Tensor) -> list[Tensor]:
    out = []
    for i in range(len(x)):
        total = torch.zeros_like(x[i])
        for j in range(len(x)):
            total = total + weights[i, j] * x[j]
        out.append(total)
    return out


Operation = Callable[[StackedCollectives, Any], Any]
Naive = Callable[[list[Tensor]], list[Tensor]]

OPERATIONS: dict[str, tuple[Operation, Naive]] = {
    "mean": (lambda comm, x: comm.mean(x), naive_mean),
    "sum": (lambda comm, x: comm.sum(x), naive_sum),
    "all_gather": (lambda comm, x: comm.all_gather(x), lambda x: [torch.stack(x)] * len(x)),
    "broadcast": (lambda comm, x: comm.broadcast(x, 3), lambda x: [x[3]] * len(x)),
    "permute": (lambda comm, x: comm.permute(x, SOURCE), lambda x: [x[j] for j in SOURCE]),
    "mix": (lambda comm, x: comm.mix(x, WEIGHTS), lambda x: naive_mix(x, WEIGHTS)),
}
OPERATIONS |= {
    "mean weighted": (lambda comm, x: comm.mean(x, weights=SHARES), lambda x: naive_weighted(x, [range(K)])),
    "mean weighted uneven": (
        lambda comm, x: comm.mean(x, GROUPS["uneven"], SHARES),
        lambda x: naive_weighted(x, GROUPS["uneven"]),
    ),
    "server_mean": (lambda comm, x: comm.server_mean(x, range(K)), naive_mean),
    "server_mean of some": (lambda comm, x: comm.server_mean(x, [4, 1]), lambda x: [(x[1] + x[4]) / 2] * K),
    "server_mean weighted": (
        lambda comm, x: comm.server_mean(x, [4, 1], SHARES),
        lambda x: [(x[1] * SHARES[1] + x[4] * SHARES[4]) / (SHARES[1] + SHARES[4])] * K,
    ),
    "server_sum": (lambda comm, x: comm.server_sum(x, range(K)), naive_sum),
    "server_sum of some": (
        lambda comm, x: comm.server_sum(x, [4, 1], SHARES),
        lambda x: [x[1] * SHARES[1] + x[4] * SHARES[4]] * K,
    ),
    "server_gather": (lambda comm, x: comm.server_gather(x), lambda x: [torch.stack(x)] * K),
    "server_gather of some": (
        lambda comm, x: comm.server_gather(x, [4, 1]),
        lambda x: [torch.stack([x[4], x[1]])] * K,
    ),
}
for _name, _groups in GROUPS.items():
    OPERATIONS[f"mean {_name}"] = (
        lambda comm, x, g=_groups: comm.mean(x, groups=g),  # type: ignore[misc]
        lambda x, g=_groups: naive_mean(x, g),  # type: ignore[misc]
    )
    OPERATIONS[f"sum {_name}"] = (
        lambda comm, x, g=_groups: comm.sum(x, groups=g),  # type: ignore[misc]
        lambda x, g=_groups: naive_sum(x, g),  # type: ignore[misc]
    )
SAME_EVERYWHERE = (  # [L, *] -> [1, *]
    "mean", "sum", "all_gather", "broadcast", "mean weighted", "server_mean", "server_mean of some",
    "server_mean weighted", "server_sum", "server_sum of some", "server_gather", "server_gather of some",
)  # fmt: skip


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_equals_the_naive_loop(operation: str, shape: tuple[int, ...]) -> None:
    ours, naive = OPERATIONS[operation]
    x = draw(K, *shape)
    before = x.clone()
    result = ours(StackedCollectives(K), x)
    expected = torch.stack(naive(list(x)))
    assert result.shape[0] == (1 if operation in SAME_EVERYWHERE else K)
    close(result.expand_as(expected), expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_value_stored_once_acts_like_its_copies(operation: str, shape: tuple[int, ...]) -> None:
    ours, naive = OPERATIONS[operation]
    x = draw(1, *shape)
    expected = torch.stack(naive([x[0]] * K))
    result = ours(StackedCollectives(K), x)
    assert result.shape[0] in (1, K)
    close(result.expand_as(expected), expected)
    same = operation in (*SAME_EVERYWHERE, "permute") or operation in [f"mean {name}" for name in GROUPS]
    assert result.shape[0] == 1 or not same  # stays stored once


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_tree_is_its_tensors_one_by_one(operation: str) -> None:
    ours, _ = OPERATIONS[operation]
    tree = {"w": draw(K, 2, 3), "once": draw(1, 2), "scale": draw(K)}
    together = ours(StackedCollectives(K), tree)
    assert list(together) == list(tree)
    for name, x in tree.items():
        assert torch.equal(together[name], ours(StackedCollectives(K), x))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_dtype_stays(operation: str) -> None:
    ours, _ = OPERATIONS[operation]
    for dtype in (torch.float32, torch.bfloat16):
        assert ours(StackedCollectives(K), draw(K, 3).to(dtype)).dtype == dtype
        assert ours(StackedCollectives(K), draw(1, 3).to(dtype)).dtype == dtype


def test_one_node_keeps_its_value() -> None:
    comm = StackedCollectives(1)
    x = draw(1, 3)
    for result in (comm.mean(x), comm.sum(x), comm.sum(x, [[0]]), comm.broadcast(x, 0), comm.permute(x, [0])):
        assert torch.equal(result, x)
    assert torch.equal(comm.all_gather(x), x[None])
    assert torch.equal(comm.mix(x, torch.ones(1, 1)), x)
    assert comm.ledger.total_bytes == 0


def test_collectives_compose_to_known_identities() -> None:
    comm = StackedCollectives(K)
    x = draw(K, 4)
    close(comm.mix(x, torch.full((K, K), 1 / K, dtype=torch.float64)), comm.mean(x).expand_as(x))
    close(comm.mix(x, torch.eye(K)[SOURCE]), comm.permute(x, SOURCE))
    close(comm.all_gather(x).sum(1), comm.sum(x))
    inverse = torch.tensor(SOURCE).argsort()
    assert torch.equal(comm.permute(comm.permute(x, SOURCE), inverse), x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixing_in_place_and_with_a_prepared_matrix(shape: tuple[int, ...]) -> None:
    """Dense and sparse matrices, contiguous and transposed tensors, stored K times and once."""
    comm = StackedCollectives(K)
    for weights in (WEIGHTS, torch.eye(K, dtype=torch.float64)[SOURCE], draw(K, K, seed=2)):
        for prepared in (weights, Mixing.of(weights)):
            for x in (draw(K, *shape), draw(1, *shape), draw(*shape, K).movedim(-1, 0)):
                expected = comm.mix(x, weights)
                close(comm.mix(x, prepared), expected)
                close(comm.mix(x.clone(), prepared, inplace=True), expected)
                close(comm.mix({"x": x.clone()}, prepared, inplace=True)["x"], expected)
    assert len({entry.sent_bytes for entry in comm.ledger}) == 3  # one for each matrix


N = 11  # nodes
EXAMPLES = (*[251.0] * (N - 1), 240.0)
AVERAGES: dict[str, Operation] = {
    "mean": lambda comm, x: comm.mean(x, weights=EXAMPLES),
    "islands": lambda comm, x: comm.mean(x, [[0, 3, 10], [1, 2], [4, 5, 6, 7]], EXAMPLES),
    "some weigh nothing": lambda comm, x: comm.mean(x, weights=[0, 3, 0, *range(8)]),
    "server": lambda comm, x: comm.server_mean(x, range(N), EXAMPLES),
    "server of some": lambda comm, x: comm.server_mean(x, [1, 2, 10], EXAMPLES),
}
HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("operation", AVERAGES)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_a_weighted_mean_of_equal_values_is_that_value(dtype: torch.dtype, operation: str) -> None:
    """Round after round it would drift: in bfloat16 by a third in 300 rounds."""
    value = draw(1, 200).to(dtype)
    for comm, x in ((StackedCollectives(N), value), (GroupCollectives(StackedCollectives(N), 2), value[None])):
        equal = x.expand(*[2] * (x.dim() == 3), N, 200).clone()
        result = AVERAGES[operation](comm, equal)
        assert torch.equal(result.expand_as(equal), equal)
        assert torch.equal(AVERAGES[operation](comm, x.clone()).expand_as(equal), equal)  # stored once


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """The result is that of float32, rounded."""
    x, comm, doubly = draw(N, 200).to(dtype), StackedCollectives(N), torch.full((N, N), 1 / N)
    matrices = (doubly, torch.eye(N) / 3 + torch.eye(N).roll(1, 0) / 3 + torch.eye(N).roll(-1, 0) / 3)
    mixes = {f"mix {i}": lambda comm, x, W=W: comm.mix(x, W) for i, W in enumerate(matrices)}
    mixes |= {
        f"in place {i}": lambda comm, x, W=W: comm.mix(x, Mixing.of(W), inplace=True) for i, W in enumerate(matrices)
    }
    sums: dict[str, Operation] = {"sum": lambda comm, x: comm.server_sum(x, range(N), [0.1, *range(N - 1)])}
    for operation in (AVERAGES | mixes | sums).values():
        assert torch.equal(operation(comm, x.clone()), operation(comm, x.float()).to(dtype))


def test_weights_are_differentiated_where_they_are_zero_or_equal() -> None:
    x, weights = draw(3, 2), torch.tensor([0.0, 2.0, 2.0], dtype=torch.float64, requires_grad=True)
    comm = StackedCollectives(3)
    mean = comm.mean(x, weights=weights)  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(mean.sum(), weights)
    close(slope, (x - mean.detach()).sum(1) / 4)
    equal = x[:1].detach().expand(3, 2).clone().requires_grad_()  # where rounding is taken back
    (slope,) = torch.autograd.grad(comm.mean(equal, weights=[1.0, 2.0, 4.0]).sum(), equal)
    close(slope, torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64).expand(3, 2) / 7)


# --------------------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("operation", OPERATIONS)
def test_derivatives(operation: str) -> None:
    ours, _ = OPERATIONS[operation]
    for rows in (1, K):
        x = draw(rows, 2).requires_grad_()
        assert torch.autograd.gradcheck(lambda x: ours(StackedCollectives(K), x), x, check_forward_ad=True)


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_derivatives_by_the_mixing_matrix(shape: tuple[int, ...]) -> None:
    x, weights = draw(K, *shape).requires_grad_(), draw(K, K, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: StackedCollectives(K).mix(x, w), (x, weights), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x, w: StackedCollectives(K).mix(x, w), (x, weights))


# ---------------------------------------------------------------------------------------------- bytes

PAYLOAD = 4 * (6 + 2) + 8  # {"w": float32 [2, 3], "b": float32 [2], "scale": float64 []} of one node

# operation -> bytes that a node sends, averaged over the nodes, in payloads; and how many take part
BYTES: dict[str, tuple[float, int]] = {
    "mean": (2 * 4 / 5, 5),
    "sum": (2 * 4 / 5, 5),
    "all_gather": (4, 5),
    "broadcast": (4 / 5, 5),
    "permute": (3 / 5, 3),
    "mix": ((5 - 1) * 4 / 5, 5),  # of 20 links, the 4 from node 2 are unused
    "mean weighted": (2 * 4 / 5, 5),
    "mean weighted uneven": ((2 * (2 * 1 / 2) + 3 * (2 * 2 / 3)) / 5, 5),
    "server_mean": (1, 5),  # up to the server
    "server_mean of some": (2 / 5, 2),
    "server_mean weighted": (2 / 5, 2),
    "server_sum": (1, 5),
    "server_sum of some": (2 / 5, 2),
    "server_gather": (1, 5),
    "server_gather of some": (2 / 5, 2),
    # a ring of n: each of its members sends 2 (n - 1) / n
    "mean uneven": ((2 * (2 * 1 / 2) + 3 * (2 * 2 / 3)) / 5, 5),
    "mean some in none": (2 * (2 * 1 / 2) / 5, 2),
    "mean singletons": (3 * (2 * 2 / 3) / 5, 3),
    "mean everyone": (2 * 4 / 5, 5),
    "mean nobody": (0, 0),
    "sum uneven": ((2 * (2 * 1 / 2) + 3 * (2 * 2 / 3)) / 5, 5),
    "sum some in none": (2 * (2 * 1 / 2) / 5, 2),
    "sum singletons": (3 * (2 * 2 / 3) / 5, 3),
    "sum everyone": (2 * 4 / 5, 5),
    "sum nobody": (0, 0),
}
# What a node receives, where that is not what it sends.
RECEIVED = {"server_gather": 0, "server_gather of some": 0}
EVERYONE = tuple(range(K))
WHO: dict[str, Any] = {
    "permute": Links.of(torch.tensor([2, 0, 1]), torch.tensor([0, 1, 2])),
    "mix": Links.of(
        *[torch.tensor([(j, i) for i in range(K) for j in range(K) if i != j and j != 2]).T[k] for k in (0, 1)]
    ),
    "broadcast": ((3, 0, 1, 2, 4),),
    "server_mean": ServerLinks(EVERYONE, EVERYONE),
    "server_mean of some": ServerLinks((4, 1), (4, 1)),
    "server_mean weighted": ServerLinks((4, 1), (4, 1)),
    "server_sum": ServerLinks(EVERYONE, EVERYONE),
    "server_sum of some": ServerLinks((4, 1), (4, 1)),
    "server_gather": ServerLinks(EVERYONE, ()),
    "server_gather of some": ServerLinks((4, 1), ()),
    "mean weighted uneven": ((3, 0), (1, 4, 2)),
    **{f"{operation} {name}": tuple(map(tuple, g)) for operation in ("mean", "sum") for name, g in GROUPS.items()},
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bytes_equal_the_closed_form(operation: str) -> None:
    """The law holds for all values, stored once or K times."""
    sent, participants = BYTES[operation]
    for rows, factor in ((K, 1.0), (1, 1.0), (K, 0.0)):
        comm = StackedCollectives(K)
        comm.ledger.begin_step(7)
        tree = {"w": factor * draw(rows, 2, 3).float(), "b": draw(rows, 2).float(), "scale": draw(rows)}
        OPERATIONS[operation][0](comm, tree)
        (entry,) = comm.ledger
        transfer = Transfer(operation.split()[0], PAYLOAD, K, WHO.get(operation), 0, ("w", "b", "scale"))
        assert entry[:3] == (7, operation.split()[0], PAYLOAD)
        assert (entry.participants, entry.transfer) == (participants, transfer)
        assert entry.sent_bytes == pytest.approx(sent * PAYLOAD)
        assert entry.received_bytes == pytest.approx(RECEIVED.get(operation, sent) * PAYLOAD)
        assert comm.ledger.total_received_bytes == entry.received_bytes
        assert comm.ledger.step_bytes == comm.ledger.total_bytes == entry.sent_bytes


def test_a_servers_value_reaches_the_nodes_that_it_is_sent_to() -> None:
    comm = StackedCollectives(K)
    assert torch.equal(comm.server_send(draw(1, 4), to=[0, 2]), draw(1, 4))
    assert (comm.ledger.total_bytes, comm.ledger.total_received_bytes) == (0, pytest.approx(2 * 32 / K))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_saved_ledger_is_the_same(operation: str) -> None:
    comm, other = StackedCollectives(K), Ledger()
    with comm.ledger.marking(lag=2, weight=0.5):
        OPERATIONS[operation][0](comm, {"w": draw(K, 2)})
    other.load(comm.ledger.state())
    assert list(other) == list(comm.ledger)
    assert [(entry.transfer.lag, entry.transfer.weight) for entry in other] == [(2, 0.5)]
    assert other.totals == comm.ledger.totals


@pytest.mark.parametrize("num_nodes", [1, 2, K])
@pytest.mark.parametrize("stored_once", [True, False])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_result_has_storage_of_its_own(operation: str, stored_once: bool, num_nodes: int) -> None:
    """The optimizer overwrites the parameters in place: a mean that a module keeps must not change with them."""
    if num_nodes < K and operation not in ("mean", "sum", "all_gather", "server_gather"):
        call = {
            "broadcast": lambda comm, x: comm.broadcast(x, 0),
            "permute": lambda comm, x: comm.permute(x, range(num_nodes)),
            "mix": lambda comm, x: comm.mix(x, torch.eye(num_nodes)),
            "server_mean": lambda comm, x: comm.server_mean(x, range(num_nodes)),
            "server_sum": lambda comm, x: comm.server_sum(x, range(num_nodes)),
            "mean nobody": lambda comm, x: comm.mean(x, groups=[]),
            "sum nobody": lambda comm, x: comm.sum(x, groups=[]),
            "mean weighted": lambda comm, x: comm.mean(x, weights=SHARES[:num_nodes]),
        }.get(operation)
        if call is None:
            return  # names nodes that are not there
    else:
        call = OPERATIONS[operation][0]
    x = draw(1 if stored_once else num_nodes, 3)
    for given in (x.clone(), {"w": x.clone()}, {"w": torch.cat([x, x])[: len(x)]}):  # the last one is a view itself
        result = call(StackedCollectives(num_nodes), given)
        kept, result = (given, result) if isinstance(given, Tensor) else (given["w"], result["w"])
        before = result.clone()
        kept.fill_(7.0)
        assert torch.equal(result, before)


def test_the_ledger_counts_every_call() -> None:
    comm = StackedCollectives(K)
    for step in range(3):
        comm.ledger.begin_step(step)
        assert comm.ledger.step_bytes == 0
        for _ in range(2):
            comm.mean(draw(K, 10))
        comm.permute(draw(K, 1), SOURCE)
    assert [entry.step for entry in comm.ledger] == [0] * 3 + [1] * 3 + [2] * 3
    assert comm.ledger.summary() == {"mean": (6, pytest.approx(6 * 128)), "permute": (3, pytest.approx(3 * 4.8))}
    assert comm.ledger.total_bytes == pytest.approx(6 * 128 + 3 * 4.8)


# --------------------------------------------------------------------------------------------- errors

ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "no node": (lambda: StackedCollectives(0), "num_nodes=0"),
    "overlapping groups": (lambda: StackedCollectives(K).mean(draw(K), [[0, 1], [1, 2]]), "disjoint"),
    "a node twice": (lambda: StackedCollectives(K).sum(draw(K), [[0, 0]]), "disjoint"),
    "a node too many": (lambda: StackedCollectives(K).mean(draw(K), [[0, 5]]), "0 to 4"),
    "a negative node": (lambda: StackedCollectives(K).mean(draw(1), [[-1, 0]]), "0 to 4"),
    "source too large": (lambda: StackedCollectives(K).broadcast(draw(K), 5), "src=5"),
    "source negative": (lambda: StackedCollectives(K).broadcast(draw(K), -1), "src=-1"),
    "no permutation": (lambda: StackedCollectives(K).permute(draw(K), [0, 0, 1, 2, 3]), "permutation"),
    "permutation too short": (lambda: StackedCollectives(K).permute(draw(K), [1, 0]), "permutation"),
    "weights too small": (lambda: StackedCollectives(K).mix(draw(K), torch.eye(4)), r"\[4, 4\]"),
    "a share too few": (lambda: StackedCollectives(K).mean(draw(K), weights=[1.0] * 4), "5 numbers"),
    "a negative share": (lambda: StackedCollectives(K).mean(draw(K), weights=[1.0] * 4 + [-1.0]), "5 numbers"),
    "no share in a group": (lambda: StackedCollectives(K).mean(draw(K), [[4]], SHARES), "all 0"),
    "a participant too many": (lambda: StackedCollectives(K).server_mean(draw(K), [5]), "0 to 4"),
    "weights a vector": (lambda: StackedCollectives(K).mix(draw(K), torch.ones(K)), r"\[5\]"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    call, message = ERRORS[error]
    with pytest.raises(ValueError, match=message):
        call()


def test_an_error_leaves_no_entry() -> None:
    comm = StackedCollectives(K)
    with pytest.raises(ValueError, match="disjoint"):
        comm.mean(draw(K), [[0, 1], [1, 2]])
    assert len(comm.ledger) == 0


def test_group_sizes() -> None:
    assert check_groups([[3, 0], [1]], 4) == ((3, 0), (1,))
