"""The rows of `vecgym.guide.real_systems` that torch alone shows: what it does where a port goes wrong.

vecgym itself takes no part but to start the processes. If one of these fails with a new torch, the guide must change.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from vecgym.runs import multiprocess

K = 4
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
pytestmark = pytest.mark.skipif(VERSION < (2, 13), reason="the guide says what torch 2.13 does; older ones differ")


def outcome(function: Callable[[], Any]) -> Any:
    """The value that a function returns, or the type of its exception."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__


def reduced(x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(x, op)
    return x


# ---------------------------------------------------------------------------------------------- in four processes


def integers(rank: int) -> Any:
    return outcome(lambda: reduced(torch.tensor([rank]), dist.ReduceOp.AVG))


def halves(rank: int) -> Any:
    return reduced(torch.tensor([60000.0], dtype=torch.float16), dist.ReduceOp.AVG).item()


def own_order(rank: int) -> Any:
    torch.manual_seed(rank)
    own, all_of_them = torch.randn(1000), [torch.empty(1000) for _ in range(K)]
    dist.all_gather(all_of_them, own)
    total, (a, b, c, d) = reduced(own), all_of_them
    return (
        same_everywhere(total),
        torch.equal(total, a + b + c + d),
        torch.equal(total, torch.stack([a, b, c, d]).sum(0)),
    )


def small_steps(rank: int) -> Any:
    return reduced(torch.full((1 << 20,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)).unique().tolist()


def booleans(rank: int) -> Any:
    total = reduced(torch.tensor([True]))
    return total.view(torch.uint8).item(), torch.equal(total, torch.tensor([True]))


def left_behind(rank: int) -> Any:
    x = torch.full((1000,), 10.0**rank)
    dist.reduce(x, 0)
    return x.unique().tolist()


def column_of_a_matrix(rank: int) -> Any:
    x = torch.arange(12.0).view(3, 4)
    reduced(x[:, 0])
    return x.tolist()


def mixed_layouts(rank: int) -> Any:
    x = torch.arange(6.0).view(2, 3)
    return reduced(x.t().contiguous().t() if rank % 2 else x).tolist()


def largest_of_nan(rank: int) -> Any:
    """The share of nan in the maximum of 1, 4 and 64 elements, all of them nan on the first, second, ... rank."""

    def share(size: int, place: int) -> float:
        largest = reduced(torch.full((size,), math.nan if rank == place else 1.0), dist.ReduceOp.MAX)
        return largest.isnan().float().mean().item()

    return [[share(size, place) for place in range(K)] for size in (1, 4, 64)]


def derivative_of_a_sum(rank: int) -> Any:
    x, everyone = torch.tensor([1.0], requires_grad=True), dist.group.WORLD
    assert everyone is not None
    ((rank + 1) * functional.all_reduce(x, "sum", everyone).sum()).backward()
    return x.grad.item()  # type: ignore[union-attr]


def derivative_past_a_sum(rank: int) -> Any:
    w = torch.tensor([3.0], requires_grad=True)
    loss = (w**2).sum()
    with torch.no_grad():
        dist.all_reduce(w)
    loss.backward()
    return w.grad.item()  # type: ignore[union-attr]


def buckets(rank: int) -> Any:
    """The MiB of the buckets in three passes of 40 layers of 1 MiB."""
    sizes: list[int] = []

    def note(state, bucket):  # torch compares the annotations, which are strings here
        sizes.append(bucket.buffer().nbytes >> 20)
        future = torch.futures.Future[Tensor]()
        future.set_result(bucket.buffer())
        return future

    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(40)]))
    ddp.register_comm_hook(None, note)
    found = []
    for _ in range(3):
        ddp(torch.randn(1, 512)).sum().backward()
        found.append(sizes.copy())
        sizes.clear()
    return found


def hooks(rank: int) -> Any:
    """Are plain DDP, a hook that does the same, and the mean of three gradients equal to the last bit?"""
    three: Any = dist.new_group([0, 1, 2])
    if rank == 3:
        return None
    grads = []
    for hook in (None, default_hooks.allreduce_hook):
        torch.manual_seed(rank)
        ddp = DistributedDataParallel(nn.Linear(64, 64), process_group=three)
        if hook is not None:
            ddp.register_comm_hook(three, hook)
        own = copy.deepcopy(ddp.module)
        x = torch.randn(8, 64)
        ddp(x).square().sum().backward()
        grads.append(ddp.module.weight.grad)
    own(x).square().sum().backward()
    each = [torch.empty(64, 64) for _ in range(3)]
    dist.all_gather(each, own.weight.grad, group=three)
    plain, hooked, mean = *grads, torch.stack(each).mean(0)
    torch.testing.assert_close([plain, hooked], [mean, mean])
    return torch.equal(plain, hooked), torch.equal(plain, mean), torch.equal(hooked, mean)


def kept_gradients(rank: int) -> Any:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), gradient_as_bucket_view=True)
    weight, found = next(ddp.parameters()), []
    kept: Any = None
    content: Any = None
    for _ in range(4):
        ddp.zero_grad(set_to_none=True)
        ddp(torch.randn(8, 4)).square().sum().backward()
        if kept is not None:
            found.append(not torch.equal(kept, content))
        kept = weight.grad
        content = kept.clone()
    return found


def averages(rank: int) -> Any:
    levels = OrderedDict([(2, 2), (4, 4)])
    each: list[Any] = [
        averagers.PeriodicModelAverager(4),
        averagers.PeriodicModelAverager(4, warmup_steps=3),
        hierarchical_model_averager.HierarchicalModelAverager(levels, warmup_steps=3),
    ]
    found = []
    for averager in each:
        steps = []
        for step in range(1, 15):
            weight = nn.Parameter(torch.tensor([float(rank)]))
            weight.grad = torch.zeros(1)
            averager.average_parameters([weight])
            steps += [step] if weight.item() == 1.5 else []
        found.append(steps)
    return found


def unused_layers(rank: int) -> Any:
    torch.manual_seed(rank)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0](torch.randn(3, 2)).sum().backward()
    optimizer.step()
    averagers.PeriodicModelAverager(2).average_parameters(list(model.parameters()))  # it does so in the first call
    same = [same_everywhere(parameters_to_vector(layer.parameters())) for layer in model]
    optimizer.zero_grad()
    return same, outcome(lambda: averagers.PeriodicModelAverager(2).average_parameters(list(model.parameters())))


def same_everywhere(x: Tensor) -> bool:
    largest, least = (reduced(x.detach().clone(), op) for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN))
    return torch.equal(largest, least)


def adapters_of_zero(rank: int) -> Any:
    """The passes of four, counted from 0, in which the gradients of two layers are not finite, if the second is 0."""
    return [not_finite(rank, epsilon) for epsilon in (0.0, 1e-8)]


def not_finite(rank: int, epsilon: float) -> list[list[int]]:
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)))
    with torch.no_grad():
        ddp.module[1].weight.zero_()
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, orthogonalization_epsilon=epsilon
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    found: list[list[int]] = [[], []]
    for number in range(4):
        ddp.zero_grad()
        ddp(torch.randn(8, 64)).sum().backward()
        for layer, passes in zip(ddp.module, found):
            passes += [] if layer.weight.grad.isfinite().all() else [number]
    return found


SHARED = (
    integers, halves, own_order, small_steps, booleans, left_behind, column_of_a_matrix, mixed_layouts, largest_of_nan,
    derivative_of_a_sum, derivative_past_a_sum, buckets, hooks, kept_gradients, averages, unused_layers,
    adapters_of_zero,
)  # fmt: skip


def all_of(link: multiprocess.Link) -> dict[str, Any]:
    with torch.enable_grad():
        return {function.__name__: function(link.rank) for function in SHARED}


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """The observations of each of four processes."""
    return multiprocess.run(all_of, K)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (integers, "RuntimeError"), (halves, math.inf), (own_order, (True, False, False)),
        (small_steps, [256.0, 260.0]), (booleans, (4, True)),
        (largest_of_nan, [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]),
        (derivative_of_a_sum, 10.0), (derivative_past_a_sum, 2.0 * 12.0), (buckets, [[40], [1, 25, 14], [1, 25, 14]]),
        (kept_gradients, [False, True, True]), (averages, [[1, 5, 9, 13], [4, 8, 12], [5, 9, 13]]),
        (unused_layers, ([True, False], "ValueError")), (adapters_of_zero, [[[2, 3], []], [[], []]]),
    ],
)  # fmt: skip
def test_every_process_sees(function: Callable[..., Any], expected: Any, seen: list[dict[str, Any]]) -> None:
    assert [each[function.__name__] for each in seen] == [expected] * K


def test_a_reduce_leaves_partial_sums_on_the_others(seen: list[dict[str, Any]]) -> None:
    whole, *others = (each["left_behind"] for each in seen)
    assert whole == [1111.0]
    for rank, values in enumerate(others, 1):
        assert 10.0**rank in values
        assert len(values) == K


def test_a_hook_in_place_of_none_has_other_bits(seen: list[dict[str, Any]]) -> None:
    assert [each["hooks"] for each in seen] == [(False, False, False)] * 3 + [None]


def test_strides_are_ignored(seen: list[dict[str, Any]]) -> None:
    """Contiguous memory is summed from where the tensor begins, whatever its elements are."""
    for each in seen:
        assert each["column_of_a_matrix"][0] == [0.0, 4.0, 8.0, 3.0]  # not the column, but three of a row
    by_rows, by_columns = seen[0]["mixed_layouts"], seen[1]["mixed_layouts"]
    mixed = 2 * torch.arange(6.0) + 2 * torch.arange(6.0).view(2, 3).t().flatten()
    assert by_rows == mixed.view(2, 3).tolist()
    assert by_columns == mixed.view(3, 2).t().tolist()


# ------------------------------------------------------------------------------------------------- in one process


@pytest.mark.parametrize(
    ("make", "slot"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum_buffer"),
        (torch.optim.Adam, "exp_avg"), (torch.optim.Adam, "step"),
    ],
)  # fmt: skip
def test_a_loaded_optimizer_shares_its_state(make: Callable[..., torch.optim.Optimizer], slot: str) -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    first, second = (make([weight]) for weight in weights)

    def step(grad: float) -> None:
        weights[0].grad = torch.full((3,), grad)
        first.step()

    step(1.0)
    second.load_state_dict(first.state_dict())
    before = second.state[weights[1]][slot].clone()
    step(5.0)
    assert not torch.equal(second.state[weights[1]][slot], before)


@pytest.mark.parametrize(
    ("make", "moves"), [(torch.optim.Adam, 0.0744), (torch.optim.ASGD, 0.0), (torch.optim.Rprop, 1e-6)]
)
@pytest.mark.parametrize("asked", [False, True])
def test_asking_for_the_state_of_an_optimizer_is_a_step(make: Any, moves: float, asked: bool) -> None:
    net = nn.Linear(1, 1, bias=False)
    optimizer = make(net.parameters(), 0.1)
    with torch.no_grad():
        net.weight.zero_()
    if asked:
        get_optimizer_state_dict(net, optimizer)
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert -net.weight.item() == pytest.approx(moves if asked else 0.1, rel=1e-3)


def test_an_averaged_model_averages_a_count_of_batches() -> None:
    net = nn.BatchNorm1d(2)
    average = AveragedModel(net, use_buffers=True)
    for _ in range(4):
        net(torch.randn(3, 2))
        average.update_parameters(net)
    counts = [model.state_dict()["num_batches_tracked"].item() for model in (net, average.module)]
    assert counts == [4, 1]


@pytest.mark.parametrize("shape", [(128, 64), (64, 128)])
def test_muon_scales_tall_matrices_only(shape: tuple[int, int]) -> None:
    """By sqrt(max(1, rows / columns)) of a weight `[out, in]`; optax does so for kernels `[in, out]`."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape)
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0).step()
    rank = min(shape)
    size = float(weight.detach().norm()) / math.sqrt(rank)  # the root mean square of the singular values
    assert size == pytest.approx(math.sqrt(max(1.0, shape[0] / shape[1])), rel=0.2)


def test_amsgrad_takes_the_largest_moment_before_its_bias_is_corrected() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=0.1, amsgrad=True)
    m = v = largest = corrected = 0.0
    by_torch = by_optax = 0.0
    for t, grad in enumerate([1.0] + [0.1] * 19, 1):
        weight.grad = torch.full_like(weight, grad)
        optimizer.step()
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        largest, corrected = max(largest, v), max(corrected, v / (1 - 0.999**t))
        by_torch -= 0.1 * m / (1 - 0.9**t) / (math.sqrt(largest / (1 - 0.999**t)) + 1e-8)
        by_optax -= 0.1 * m / (1 - 0.9**t) / (math.sqrt(corrected) + 1e-8)
    assert weight.item() == pytest.approx(by_torch, rel=1e-12)
    assert by_torch / by_optax == pytest.approx(2.29, abs=0.01)


def test_parameters_of_one_vector_share_its_memory() -> None:
    nets = [nn.Linear(3, 3) for _ in range(3)]
    mean = torch.stack([parameters_to_vector(net.parameters()).detach() for net in nets]).mean(0)
    for net in nets:
        vector_to_parameters(mean, net.parameters())
    before = nets[1].weight.detach().clone()
    nets[0](torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(nets[0].parameters(), lr=0.1).step()
    assert not torch.equal(nets[1].weight.detach(), before)


@pytest.mark.parametrize(
    ("options", "moves"),
    [({}, True), ({"shuffle": True}, True), ({"shuffle": True, "generator": torch.Generator()}, False)],
)
def test_a_loader_moves_the_global_generator(options: dict[str, Any], moves: bool) -> None:
    before = torch.get_rng_state()
    assert sorted(torch.cat(list(DataLoader(range(8), batch_size=4, **options))).tolist()) == list(range(8))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before) is not moves


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)
        self.recomputes = True

    def block(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.recomputes else self.block(x)


def test_a_checkpoint_under_functional_call_recomputes_with_other_weights() -> None:
    torch.manual_seed(0)
    net, x = Checkpointed(), torch.randn(5, 3)
    grads = []
    for net.recomputes in (True, False):
        params = {name: (p.detach() + 1).requires_grad_() for name, p in net.named_parameters()}
        torch.func.functional_call(net, params, (x,)).sum().backward()
        grads.append(params["first.weight"].grad)
    with_checkpoint, without = grads
    assert not torch.allclose(with_checkpoint, without)  # type: ignore[arg-type]
    net(x).sum().backward()
    torch.testing.assert_close(with_checkpoint, net.first.weight.grad)  # those of the module's own weights
    inside = {name: p.detach() for name, p in net.named_parameters()}
    net.recomputes = True
    grad = torch.func.grad(lambda params: torch.func.functional_call(net, params, (x,)).sum())
    assert outcome(lambda: grad(inside)) == "RuntimeError"


def test_a_row_is_copied_and_saved_with_its_whole_stack() -> None:
    row = torch.randn(100, 10)[3]
    sizes = [copy.deepcopy(row).untyped_storage().nbytes(), row.clone().untyped_storage().nbytes()]
    assert sizes == [4 * 1000, 4 * 10]


def test_rows_of_random_numbers_are_not_drawn_one_after_the_other() -> None:
    def equal(size: int) -> bool:
        torch.manual_seed(0)
        together = torch.randn(4, size)
        torch.manual_seed(0)
        return torch.equal(together, torch.stack([torch.randn(size) for _ in range(4)]))

    assert [size for size in (8, 15, 16, 20, 24, 32, 40) if equal(size)] == [16, 32]
