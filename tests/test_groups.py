"""Groups: configurations that differ in numbers are the rows of one simulation, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.collectives.stacked import GroupCollectives
from vecgym.collectives.topology import Mixing

C, K = 3, 5
RING = torch.tensor(
    [[0.5 if i == j else 0.25 if (i - j) % K in (1, K - 1) else 0.0 for j in range(K)] for i in range(K)]
)
GROUPS, WEIGHTS = [[0, 2], [3, 4]], [1.0, 0.5, 2.0, 3.0, 0.0]

# What takes `[K, *]` and gives `[1 or K, *]`, and in a group takes `[C, K, *]`.
OPERATIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "mean": lambda comm, x: comm.mean(x),
    "mean in place": lambda comm, x: comm.mean(x.clone(), inplace=True),
    "mean of groups": lambda comm, x: comm.mean(x, groups=GROUPS),
    "weighted mean": lambda comm, x: comm.mean(x, weights=WEIGHTS),
    "weighted mean of groups": lambda comm, x: comm.mean(x, groups=GROUPS, weights=WEIGHTS),
    "sum": lambda comm, x: comm.sum(x),
    "sum of groups": lambda comm, x: comm.sum(x, groups=GROUPS),
    "server mean": lambda comm, x: comm.server_mean(x, [0, 3], WEIGHTS),
    "server mean of all": lambda comm, x: comm.server_mean(x, range(K)),
    "server sum": lambda comm, x: comm.server_sum(x, [0, 3]),
    "server send": lambda comm, x: comm.server_send(comm.mean(x), [1, 2]),
    "broadcast": lambda comm, x: comm.broadcast(x, 3),
    "permute": lambda comm, x: comm.permute(x, [1, 2, 0, 4, 3]),
    "mix": lambda comm, x: comm.mix(x, RING),
    "mix in place": lambda comm, x: comm.mix(x.clone(), RING, inplace=True),
    "mix sparse in place": lambda comm, x: comm.mix(x.clone(), Mixing.of(RING), inplace=True),
    "everyone": lambda comm, x: comm.everyone({"x": x})["x"],
    "fetched": lambda comm, x: comm.fetched({"x": x}, [4, 0, 0], [1, 2, 3])["x"],
    "mean of a tree": lambda comm, x: comm.mean({"x": x})["x"],
}
GATHERING: dict[str, Callable[[Any, Tensor], Any]] = {
    "gather": lambda comm, x: comm.all_gather(x),
    "gather in place": lambda comm, x: comm.all_gather(x, inplace=True),
    "gather for readers": lambda comm, x: comm.all_gather(x, readers=GROUPS),
    "server gather": lambda comm, x: comm.server_gather(x, [4, 1]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 17), (40, 50)], ids=str)
@pytest.mark.parametrize("same", [False, True], ids=["each", "once"])
@pytest.mark.parametrize("name", [*OPERATIONS, *GATHERING])
def test_collectives_of_a_group_are_those_of_each_configuration(
    name: str, same: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """To the bit, with the same transfers; `[C, 1, *]` is what `[1, *]` is of one."""
    x = torch.randn(C, 1 if same else K, *shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    alone = StackedCollectives(K)
    group = GroupCollectives(StackedCollectives(K), C)
    operation = OPERATIONS.get(name) or GATHERING[name]
    found, expected = operation(group, x), torch.stack([operation(alone, x[c]) for c in range(C)])
    expected = expected[:, 0] if name in GATHERING else expected
    if "mix" in name and shape == ():  # a matrix times a matrix, not times a vector
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-15)
    else:
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
    sent = [entry.transfer for entry in alone.ledger]
    assert [entry.transfer for entry in group.ledger] == sent[: len(sent) // C]


def test_a_result_of_a_group_has_memory_of_its_own() -> None:
    group, x = GroupCollectives(StackedCollectives(K), C), torch.randn(C, K, 4)
    for name, operation in OPERATIONS.items():
        if name not in ("everyone", "server send"):
            for y in (x, x[:, :1].clone()):
                assert operation(group, y).untyped_storage().data_ptr() != y.untyped_storage().data_ptr(), name


def test_some_nodes_of_a_group() -> None:
    comm, group = StackedCollectives(K).among([0, 2, 3]), GroupCollectives(StackedCollectives(K), C).among([0, 2, 3])
    x = torch.randn(C, 3, 4)
    assert torch.equal(group.mean(x), torch.stack([comm.mean(x[c]) for c in range(C)]))
    assert (group.ids.tolist(), group.num_nodes, group.run_nodes) == ([0, 2, 3], 3, K)
    assert next(iter(group.ledger)).transfer == next(iter(comm.ledger)).transfer
    assert group.among([0, 1]).members == (0, 2)
