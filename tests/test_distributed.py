"""The same strategies stacked in one process and on real processes: the same numbers, bytes and random masks.

Four processes are started once and go through all cases together. A case of W < 4 processes runs in the first W.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.accounting import accounted
from tests.models import make_data, make_model
from tests.test_properties import STRATEGIES, WithEmpty, make_per_node
from vecgym import strategy
from vecgym.collectives import StackedCollectives
from vecgym.collectives.distributed import DistributedCollectives, buckets, check_divides, in_buckets
from vecgym.collectives.ledger import Ledger
from vecgym.collectives.wire import Wire
from vecgym.core import tree
from vecgym.runs import multiprocess
from vecgym.runs.verification import VerifyOptions
from vecgym.strategy import (
    EF21,
    AllToAll,
    Average,
    CommunicateOptimizeStrategy,
    Corrupted,
    DiLoCoStrategy,
    Exchange,
    Mean,
    OptimSpec,
    Outer,
    Private,
    QuantisedRing,
    RankStrategy,
    Ring,
    Robust,
    Stage,
    Strategy,
    StreamingDiLoCoStrategy,
)
from vecgym.strategy.catalogue import CATALOGUE

K = 4
STEPS = 4  # one more than H in the table
LAYOUTS = {1: 4, 2: 2, 4: 1}  # W: L
EXAMPLES = (3, 1, 4, 2)  # what each node's shard is said to hold


# Those that take a value of each node another way than the rest.
PER_NODE = ["allreduce", "fedprox-participation", "diloco", "gossip", "demo", "demo-momentum"]
PER_NODE += ["noloco", "gpa", "palsgd"]
EMPTY = ", and parameters without elements"
SEVERAL = ["allreduce", "fedavg-islands", "sparta-topk-int8", "gossip", "demo"]  # one for each collective
CASES: dict[str, Callable[[], Strategy]] = {
    **{name: partial(row.make, inner_optim=OptimSpec("adamw", lr=1e-2)) for name, row in CATALOGUE.items()},
    **{name: partial(row.make, inner_optim=OptimSpec("adamw", lr=1e-2)) for name, row in STRATEGIES.items()},
    "diloco-scheduled": lambda: DiLoCoStrategy("adamw", sync_weight=[0, 0.5, 0, 1], lr=1e-2),  # a weight for each step
    "bricks": lambda: CommunicateOptimizeStrategy(
        [Exchange(Mean(island_size=2), every=2), Exchange(Outer(Mean()), every=3)], "adamw", lr=1e-2
    ),
    "corrected brick": lambda: CommunicateOptimizeStrategy(
        [Exchange(Outer(Mean(), correct="median_norm"), every=3)], "adamw", lr=1e-2
    ),
    "rounds of a function": lambda: DiLoCoStrategy("adamw", H=lambda step: 1 + step, lr=1e-2),
    "streaming, a delay and alpha for each node": lambda: StreamingDiLoCoStrategy(
        "adamw", H=3, num_fragments=2, delay=[1, 0, 2, 1], alpha=torch.tensor([0.0, 0.5, 0.25, 1.0]), lr=1e-2
    ),
    "median of the gradients": lambda: CommunicateOptimizeStrategy(
        [Exchange(Robust("median"), of="gradients")], "adamw", lr=1e-2
    ),
    "lost, and late": lambda: CommunicateOptimizeStrategy(
        [Exchange(Mean(), lost=0.4), Exchange(Outer(Mean()), every=2, delay=1, late="change")], "adamw", lr=1e-2
    ),
    "ef21": lambda: CommunicateOptimizeStrategy([Exchange(Outer(EF21(Mean(), "topk")), every=2)], "adamw", lr=1e-2),
    "a liar": lambda: CommunicateOptimizeStrategy([Exchange(Corrupted(Mean(), [1]), every=2)], "adamw", lr=1e-2),
    "rings": lambda: CommunicateOptimizeStrategy(
        [Exchange(Ring("bfloat16"), of="gradients"), Exchange(QuantisedRing(), every=2), Exchange(AllToAll(), every=3)],
        "adamw",
        lr=1e-2,
    ),
    "private": lambda: CommunicateOptimizeStrategy(
        [Exchange(Outer(Private(Mean(), clip=0.1, noise=0.1)), every=2)], "adamw", lr=1e-2
    ),
    **{f"{name}, a value for each node": partial(make_per_node, name, K) for name in PER_NODE},
    **{f"{name}{EMPTY}": partial(STRATEGIES[name].make, inner_optim=OptimSpec("adamw", lr=1e-2)) for name in SEVERAL},
}


def wires(link: multiprocess.Link) -> dict[int, Wire]:
    """The wires of 1, 2 and 4 processes that this process belongs to."""
    found = {}
    for W in LAYOUTS:
        group = dist.new_group(list(range(W)))  # called by all
        if link.rank < W:
            found[W] = Wire(group, watch=link.beat)
    return found


def every_case(link: multiprocess.Link, steps: int) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    mine = wires(link)
    found: dict[str, dict[str, Any]] = {}
    for name, make in CASES.items():
        for exact in (True, False):
            # Dropout: its masks must be those of the stacked run, too.
            model = make_model("Dropout", dtype=torch.float64)
            model = WithEmpty(model) if name.endswith(EMPTY) else model
            data = TensorDataset(*make_data("Dropout", 64, dtype=torch.float64))
            given = VerifyOptions(make(), model, data, K, steps=steps, num_examples=EXAMPLES)
            for W, wire in mine.items():
                check = accounted(given, wire, exact=exact)
                assert check.bound == (0.0 if exact else 1e-12)
                found[f"{name} W={W} {check.name}"] = {"passed": check.passed, "first": check.finding}
    return found


@pytest.mark.slow
def test_every_strategy_gives_the_same_numbers_on_processes() -> None:
    """Every strategy x W x L: no difference at all in exact mode, rounding otherwise; bytes as the ledger has them."""
    [found, *_] = multiprocess.run(every_case, max(LAYOUTS), (STEPS,), timeout_s=120)
    assert len(found) == len(CASES) * len(LAYOUTS) * 2
    wrong = {name: case["first"] for name, case in found.items() if not case["passed"]}
    assert not wrong


def test_the_table_has_every_strategy_and_average() -> None:
    """Every exported strategy is in some row of the table: a new one is tested here once it is there."""
    exported = {x for x in vars(strategy).values() if isinstance(x, type)}
    wanted = {x for x in exported if issubclass(x, (Strategy, Average))} - {Strategy, Average, Stage}
    wanted -= {RankStrategy}  # in one process only
    wanted = {x for x in wanted if not getattr(x, "asynchronous", False)}  # likewise
    seen: set[type] = set()

    def look(x: Any) -> None:
        if isinstance(x, (Strategy, Average, Exchange)) and type(x) not in seen:
            seen.add(type(x))
        for value in vars(x).values() if isinstance(x, (Strategy, Average, Exchange)) else ():
            for y in value if isinstance(value, (list, tuple)) else [value]:
                look(y)

    for make in CASES.values():
        look(make())
    assert wanted <= seen


# ------------------------------------------------------------------------------------------------ the collectives


def values(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Odd sizes, of all nodes: `[K, *]`; one is empty, one the same on every node."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(K, 7, 3), (K,), (K, 0), (K, 129), (1, 5)]
    found = {str(i): torch.randn(shape, generator=g, dtype=torch.float64) * 10 for i, shape in enumerate(shapes)}
    return {name: x.to(dtype) for name, x in found.items()}


def mixed() -> dict[str, Tensor]:
    """Several types in one tree."""
    types = [torch.float64, torch.float32, torch.int64, torch.uint8, torch.bool, torch.bfloat16]
    return {f"{name} {dtype}": x for dtype in types for name, x in values(dtype).items()}


ISLANDS = [[0, 3], [1, 2]]
RING = torch.tensor([[0.5, 0.25, 0, 0.25], [0.25, 0.5, 0.25, 0], [0, 0.25, 0.5, 0.25], [0.25, 0, 0.25, 0.5]])
SWAP = torch.eye(K)[[1, 0, 2, 3]]

Operation = Callable[[Any, dict[str, Tensor]], dict[str, Tensor]]
REDUCTIONS: dict[str, Operation] = {
    "mean": lambda comm, x: comm.mean(x),
    "sum": lambda comm, x: comm.sum(x),
    "mean in islands": lambda comm, x: comm.mean(x, groups=ISLANDS),
    "sum in islands": lambda comm, x: comm.sum(x, groups=[[0, 1, 2]]),
    "weighted mean": lambda comm, x: comm.mean(x, weights=[1, 2, 3, 4]),
    "weighted in islands": lambda comm, x: comm.mean(x, groups=ISLANDS, weights=[1, 2, 3, 4]),
    "server_mean": lambda comm, x: comm.server_mean(x, [1, 3], weights=[1, 2, 3, 4]),
    "mix ring": lambda comm, x: comm.mix(x, RING),
    "mix a pair": lambda comm, x: comm.mix(x, SWAP, inplace=True),
}
MOVES: dict[str, Operation] = {
    "all_gather": lambda comm, x: comm.all_gather(x),
    "broadcast": lambda comm, x: comm.broadcast(x, 2),
    "permute": lambda comm, x: comm.permute(x, [2, 0, 1, 3]),
}


def every_collective(link: multiprocess.Link) -> list[str]:
    """The values that differ from the stacked collectives."""
    wrong = []
    for W, wire in wires(link).items():
        for exact in (True, False):
            for bucket_bytes in (2**20, 100, 1):
                comm = DistributedCollectives(K, wire, exact=exact, bucket_bytes=bucket_bytes)
                here = slice(comm.first, comm.first + comm.num_local)
                cases = {name: (op, values(torch.float64)) for name, op in REDUCTIONS.items()}
                cases |= {f"{name} in half": (op, values(torch.bfloat16)) for name, op in REDUCTIONS.items()}
                cases |= {name: (op, mixed()) for name, op in MOVES.items()}
                for name, (op, given) in cases.items():
                    stacked, comm.ledger = StackedCollectives(K), Ledger()
                    expected = op(stacked, {n: x.clone() for n, x in given.items()})
                    found = op(comm, {n: x[here].clone() if len(x) == K else x.clone() for n, x in given.items()})
                    for n, x in expected.items():
                        own = x if len(x) == 1 else x[here]
                        # What was the same on every node may have become each node's own, or the reverse.
                        y, own = torch.broadcast_tensors(found[n], own)
                        rounding = 2**-8 if name.endswith("in half") else 1e-13
                        tolerance = 0.0 if exact or name in MOVES else rounding
                        same = found[n].dtype == own.dtype and torch.allclose(y, own, rtol=tolerance, atol=tolerance)
                        lone = comm.num_local == 1 and len(given[n]) == 1 and name.startswith("sum")
                        if not same and not lone:
                            wrong.append(f"{name} of {n}, W={W}, exact={exact}, {bucket_bytes} bytes")
                    if list(stacked.ledger) != list(comm.ledger):
                        wrong.append(f"ledger of {name}, W={W}")
                wrong += [f"{name} of equal values, W={W}, exact={exact}" for name in means_that_move(comm)]
    return wrong


def means_that_move(comm: DistributedCollectives) -> list[str]:
    """The means of equal values that are not these values."""
    half = {n: x[:1].expand(comm.num_local, *x.shape[1:]) for n, x in values(torch.bfloat16).items()}
    means = {name: op for name, op in REDUCTIONS.items() if "sum" not in name}
    thirds = {"islands of 3": lambda comm, x: comm.mean(x, [[0, 1, 3]], [3, 0, 5, 7])}
    thirds |= {"mix thirds": lambda comm, x: comm.mix(x, torch.full((K, K), 1 / 3) - torch.eye(K)[[1, 2, 3, 0]] / 3)}
    found = {name: op(comm, tree.map(torch.clone, half)) for name, op in {**means, **thirds}.items()}
    return [name for name, x in found.items() if any((y != half[n]).any() for n, y in x.items())]


def test_every_collective_with_one_and_with_many_buckets_of_mixed_types() -> None:
    found = multiprocess.run(every_collective, max(LAYOUTS), timeout_s=60)
    assert not [text for part in found for text in part]


def test_buckets_keep_order_types_and_shapes() -> None:
    given = mixed()
    for bucket_bytes in (1, 64, 2**20):
        names = [name for bucket in buckets(given, bucket_bytes) for name in bucket]
        assert sorted(names) == sorted(given)
        joined = in_buckets(given, bucket_bytes, lambda x: x)
        assert list(joined) == list(given)
        assert all(x.dtype == given[n].dtype and torch.equal(x, given[n]) for n, x in joined.items())
    assert len(list(buckets(given, 2**20))) == 12  # six types, each with tensors of K rows and of one


def handed(link: multiprocess.Link) -> list[int]:
    """Bytes handed to torch.distributed by this process, for one collective after the other."""
    comm = DistributedCollectives(K)
    x = {"a": torch.ones(1, 10), "b": torch.ones(1, 3, dtype=torch.float64)}  # 64 bytes a node
    found = []
    for op in (*REDUCTIONS.values(), *MOVES.values()):
        before = comm.wire.handed_bytes
        op(comm, x)
        found.append(comm.wire.handed_bytes - before)
    return found


def test_bytes_handed_over_are_the_ledgers_payload_with_a_node_per_process() -> None:
    found = torch.tensor(multiprocess.run(handed, K, timeout_s=60)).sum(0).tolist()
    payload = 64
    # Every node hands its payload to a reduction in which it takes part; to a mix and a permutation for each node
    # that takes it; to a broadcast the source alone does.
    times = [K, K, K, 3, K, K, K, 8, 2, K, 1, 3]
    assert found == [payload * n for n in times]


def refusals(link: multiprocess.Link) -> list[str]:
    comm = DistributedCollectives(K)
    with pytest.raises(RuntimeError, match="gradients do not cross") as grad:
        comm.mean(torch.ones(2, 3, requires_grad=True))
    with pytest.raises(ValueError, match="must divide") as divide:
        DistributedCollectives(3)
    return [str(grad.value), str(divide.value)]


def test_what_cannot_work_is_refused() -> None:
    multiprocess.run(refusals, 2, timeout_s=60)
    with pytest.raises(ValueError, match=r"num_processes=3 must divide num_nodes=4"):
        check_divides(3, 4)
    with pytest.raises(RuntimeError, match="there is no process group"):
        Wire()


def many_islands(link: multiprocess.Link) -> float:
    """More sets of processes than process groups are kept: old ones are ended, and made anew when they come back."""
    comm = DistributedCollectives(K)
    worst = 0.0
    stacked = StackedCollectives(K)
    whole = torch.arange(4.0)[:, None]
    pairs = [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]], [[0, 1, 2]], [[1, 2, 3]], [[0, 1], [2, 3]]]
    for groups in pairs:
        found = comm.mean(whole[link.rank : link.rank + 1], groups=groups)
        worst = max(worst, float((found - stacked.mean(whole, groups=groups)[link.rank]).abs().max()))
    return worst


def test_process_groups_of_islands_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vecgym.collectives.wire.MAX_SUBGROUPS", 2)  # forked processes inherit it
    assert multiprocess.run(many_islands, K, timeout_s=60) == [0.0] * K
