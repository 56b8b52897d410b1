"""Models whose backward pass runs parts of them again (`torch.utils.checkpoint`), all nodes at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fitting import fit, same_run
from tests.helpers import STACKS_CHECKPOINTS
from vecgym import Trainer, VecgymWarning
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.engine import Engine, Local, Plan
from vecgym.runs.memory import passing
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy

pytestmark = pytest.mark.skipif(not STACKS_CHECKPOINTS, reason="this torch's checkpoint() cannot run under vmap")
K, WIDTH = 6, 16


class Block(nn.Module):
    def __init__(self, width: int, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """Blocks and a head; `recompute`: "no", "each" block, or all of them in "nested" checkpoints."""

    def __init__(
        self, recompute: str = "each", dropout: float = 0.0, batch_norm: bool = False, width: int = WIDTH
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.blocks = nn.ModuleList([Block(width, dropout, batch_norm) for _ in range(4)])
        self.head = nn.Linear(width, 10)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.recompute == "no" else checkpoint(block, x, use_reentrant=False)
        return x

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        nested = self.recompute == "nested"
        x = checkpoint(self.hidden, x, use_reentrant=False) if nested else self.hidden(x)
        return F.cross_entropy(self.head(x), y)


class Penalised(Blocks):
    """A loss with a part that is the same on every node, whose parameters also take part in what is run again."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(batch) + checkpoint(lambda: self.head.weight.square().mean(), use_reentrant=False)


def batches(num_nodes: int = K, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_nodes, size, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 10, (num_nodes, size), generator=generator)


def gradients(model: nn.Module, engine: str, mean: bool = False, plan: Plan | None = None) -> Local:
    """Two calls with the same numbers, of which the second may overwrite what the first has kept."""
    model.double()
    computed = Engine(model, engine=engine)
    computed.prepare(batches(), mean=mean)
    if plan is not None:
        computed.use(plan)
    params: Tree = {n: p.detach()[None] for n, p in model.named_parameters()}
    if not mean:
        params = {n: torch.cat([p * (1 + i / 10) for i in range(K)]) for n, p in params.items()}
    buffers = {name: b[None].clone() for name, b in model.named_buffers()}
    for _ in range(2):
        local = computed.gradients(params, buffers, batches(), seed=3, step=7, mean=mean)
    computed.close()
    return local


def assert_same(found: Local, expected: Local, tolerance: float = 0.0) -> None:
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("recompute", ["each", "nested"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_gradients_are_those_without_checkpoints(recompute: str, dropout: float, mean: bool) -> None:
    """To the bit: the same operations are run again, with the same random numbers."""
    found = gradients(Blocks(recompute, dropout), "vmap", mean)
    assert_same(found, gradients(Blocks("no", dropout), "vmap", mean))


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("model", [Blocks("each"), Blocks("nested"), Penalised()])
def test_all_nodes_at_once_are_one_after_the_other(model: nn.Module, mean: bool) -> None:
    assert_same(gradients(model, "vmap", mean), gradients(model, "loop", mean), 1e-12)


def test_statistics_of_batch_norm_move_twice_as_in_torch() -> None:
    """A block that is run again writes its buffers again: torch does so too, and so does the loop."""
    model = Blocks(batch_norm=True)
    found, expected = (gradients(model, engine) for engine in ("vmap", "loop"))
    assert_same(found, expected, 1e-12)
    assert found.buffers["blocks.3.norm.num_batches_tracked"].tolist() == [2] * K
    assert dict(model.named_buffers())["blocks.3.norm.num_batches_tracked"] == 0, "the model's own are not touched"


@pytest.mark.parametrize("plan", [Plan("vmap", chunk_size=4), Plan("vmap", node_threads=2)])
def test_in_chunks_and_on_threads(plan: Plan) -> None:
    assert_same(gradients(Blocks(), "vmap", plan=plan), gradients(Blocks("no"), "vmap", plan=plan))


def run(recompute: str, strategy: Any, **settings: Any) -> Trainer:
    x, y = batches(1, 64)
    data = torch.utils.data.TensorDataset(x[0], y[0])
    model = Blocks(recompute).double()
    return fit(
        model, strategy, num_nodes=K, data=data, val=data, batch_size=8, max_steps=6, val_interval=3, **settings
    )[0]


@pytest.mark.parametrize("strategy", [DiLoCoStrategy("adamw", H=2, lr=1e-3), AllReduceStrategy("adamw", lr=1e-3)])
def test_whole_runs(strategy: Any) -> None:
    found = run("each", strategy)
    assert found.history.settings["engine"] == "vmap"
    assert same_run(found, run("no", strategy))


def test_fewer_activations_are_alive() -> None:
    """Tensors from the insides of blocks go: of 4 K blocks those of K, one of each node, remain."""
    peaks = {}
    for recompute in ("no", "each"):
        engine = Engine(Blocks(recompute).double(), engine="vmap")
        engine.prepare(batches(1, 64))
        peaks[recompute] = passing(engine, tree.map_leaves(lambda x: x[0], batches(1, 64)), 3, False).peak(K)
    inside = 8 * 64 * 4 * WIDTH * K  # bytes of one `up` of all nodes; its gelu keeps as much again
    assert peaks["no"] - peaks["each"] > 3 * 2 * inside


class Doubled(torch.autograd.Function):
    """Computes in its backward pass, but runs nothing of the model."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mul(2)


class Linear(torch.autograd.Function):
    """Its backward pass calls a function that vecgym computes for all nodes at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return F.linear(grad, weight.T), grad.T @ x


def test_an_operation_that_calls_functions_in_its_backward_pass_runs_nothing_again() -> None:
    class Own(Blocks):
        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(Linear.apply(self.hidden(batch[0]), self.head.weight) + self.head.bias, batch[1])

    assert_same(gradients(Own("no"), "vmap"), gradients(Blocks("no"), "vmap"), 1e-14)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_the_backward_pass_is_not_cast(engine: str) -> None:
    """Operations that compute in float32 under autocast have gradients of that precision."""

    class Precise(Blocks):
        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(batch)

    results = []
    for autocast in (True, False):
        computed = Engine(Precise(), engine=engine, autocast=autocast)
        batch = tree.map_leaves(lambda x: x.float() if x.is_floating_point() else x, batches())
        computed.prepare(batch)
        params = {n: p.detach()[None] for n, p in computed.params.items()}
        results.append(computed.gradients(params, {}, batch, seed=0, step=0))
    assert_same(results[0], results[1])


@pytest.mark.parametrize("mean", [False, True])
def test_operations_with_a_backward_pass_in_python(mean: bool) -> None:
    class Own(Blocks):
        def hidden(self, x: Tensor) -> Tensor:
            return Doubled.apply(super().hidden(x))

    class Plain(Blocks):
        def hidden(self, x: Tensor) -> Tensor:
            return 2 * super().hidden(x)

    for recompute in ("no", "each"):
        assert_same(gradients(Own(recompute), "vmap", mean), gradients(Plain("no"), "vmap", mean), 1e-14)


def test_a_rollout_says_that_there_are_no_derivatives() -> None:
    engine = Engine(Blocks().double(), engine="vmap")
    engine.prepare(batches())
    params = {n: p.detach()[None].repeat(K, *[1] * p.dim()) for n, p in engine.params.items()}
    with pytest.raises(RuntimeError, match="No derivatives exist through activation"):
        engine.gradients(params, {}, batches(), seed=0, step=0, differentiable=True)


def test_what_fails_in_spite_of_that_falls_back() -> None:
    class Looking(Blocks):
        def hidden(self, x: Tensor) -> Tensor:
            if self.training and torch._C._current_graph_task_id() != -1:  # in the second run only
                assert x.sum().item() != 0
            return super().hidden(x)

    engine = Engine(Looking("nested").double())
    with pytest.warns(VecgymWarning, match="vmap cannot run this model"):
        assert engine.prepare(batches()).engine == "loop"
