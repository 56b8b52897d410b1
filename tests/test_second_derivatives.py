"""The gradient of one step can itself be differentiated: operations of torch.nn.functional, through both engines.

Expected are central differences of the gradients, in float64. What torch's own second derivatives get wrong under vmap
or everywhere is computed by elementary operations there; see `vecgym.engine.stateless.TwiceDifferentiable`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from vecgym.engine import Engine
from vecgym.runs.rollout import rollout
from vecgym.strategy import FedAvgStrategy

K, STEP = 2, 1e-6
Function = Callable[..., Tensor]


def draw(name: str, *shape: int) -> Tensor:
    """Numbers in (-1.5, 1.5), always the same for a name; none is near 0, where some operations have a kink."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    x = torch.rand(shape, generator=generator, dtype=torch.float64) * 3 - 1.5
    return x + 0.05 * x.sign()


class Applied(nn.Module):
    """An operation on parameters, or a module on fixed inputs; the batch scales them, so that nodes differ."""

    def __init__(self, name: str, operation: Function | nn.Module, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        given = [draw(f"{name} {i}", *shape) for i, shape in enumerate(shapes)]
        self.operation = operation
        if isinstance(operation, nn.Module):
            for i, x in enumerate(given):
                self.register_buffer(f"x{i}", x)
            for key, p in operation.double().named_parameters():
                p.data = draw(key, *p.shape)
        else:
            for i, x in enumerate(given):
                self.register_parameter(f"x{i}", nn.Parameter(x))
        self.count = len(given)

    def forward(self, batch: Tensor) -> Tensor:
        out = self.operation(*[getattr(self, f"x{i}") * (1 + 0.1 * batch) for i in range(self.count)])
        weights = (1.7 * torch.arange(out.numel(), dtype=out.dtype) + 0.3).sin().view(out.shape)
        return (weights * out).sum() + 0.3 * (weights.cos() * out * out).mean()


CLASSES, PLACES = torch.tensor([0, 2, 1, -100]), torch.tensor([[1, 2, 2], [0, 3, 1]])
MASK = torch.ones(4, 4).tril().bool()
sdpa = F.scaled_dot_product_attention
HEADS = ((2, 2, 4, 3),) * 3

CASES: dict[str, tuple[Function | Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    **{name: (getattr(F, name), ((4, 6),)) for name in (
        "celu", "elu", "gelu", "glu", "hardswish", "leaky_relu", "logsigmoid", "mish", "normalize", "relu", "selu",
        "silu", "softplus", "softsign", "tanhshrink",
    )},
    **{name: (getattr(F, name), ((4, 6), (4, 6))) for name in (
        "cosine_similarity", "huber_loss", "l1_loss", "mse_loss", "pairwise_distance", "smooth_l1_loss",
    )},
    "prelu": (lambda x, w: F.prelu(x, w), ((4, 3, 2), (3,))),
    "softmax": (lambda x: x.softmax(1), ((4, 6),)),
    "log_softmax": (lambda x: x.log_softmax(1), ((4, 6),)),
    "cross entropy": (lambda x: F.cross_entropy(x, CLASSES), ((4, 5),)),
    "cross entropy, smoothed": (lambda x: F.cross_entropy(x, CLASSES, label_smoothing=0.1), ((4, 5),)),
    "cross entropy of probabilities": (lambda x, y: F.cross_entropy(x, y.softmax(1)), ((4, 5), (4, 5))),
    "binary": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), ((4, 5), (4, 5))),
    "kl": (lambda x, y: F.kl_div(x.log_softmax(1), y.log_softmax(1), log_target=True), ((4, 5), (4, 5))),
    "triplet": (lambda x, y, z: F.triplet_margin_loss(x, y, z), ((4, 5),) * 3),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), ((4, 6), (6,), (6,))),
    "rms norm": (lambda x, w: F.rms_norm(x, (6,), w), ((4, 6), (6,))),
    "group norm": (lambda x, w, b: F.group_norm(x, 3, w, b), ((4, 6, 5), (6,), (6,))),
    "instance norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), ((4, 6, 5), (6,), (6,))),
    "instance norm with statistics": (
        lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
        ((2, 3, 4),),
    ),
    "batch norm": (lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)), ((2, 3, 4),)),
    "local response": (lambda x: F.local_response_norm(x, 3, alpha=0.5), ((2, 5, 4),)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 4)), ((5, 6),)),
    "weight norm, last": (lambda: parametrizations.weight_norm(nn.Linear(6, 4), dim=1), ((5, 6),)),
    "weight norm, all": (lambda: parametrizations.weight_norm(nn.Linear(6, 4), dim=None), ((5, 6),)),  # type: ignore[arg-type]
    "weight norm, convolution": (lambda: parametrizations.weight_norm(nn.Conv2d(2, 3, 2)), ((2, 2, 4, 4),)),
    "weight norm by a hook": (lambda: nn.utils.weight_norm(nn.Linear(6, 4)), ((5, 6),)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), ((5, 4),)),
    "linear": (lambda x, w, b: F.linear(x, w, b).tanh(), ((4, 3), (2, 3), (2,))),
    "bilinear": (lambda x, y, w: F.bilinear(x, y, w), ((4, 3), (4, 2), (5, 3, 2))),
    "conv1d": (lambda x, w: F.conv1d(x, w, stride=2, padding=1, dilation=2, groups=2), ((2, 4, 9), (4, 2, 3))),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), ((2, 3, 5, 5), (4, 3, 3, 3), (4,))),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2, dilation=2), ((1, 2, 3, 3), (2, 3, 2, 2))),
    "unfold": (lambda x: F.unfold(x, 2, padding=1), ((2, 2, 3, 3),)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, stride=1, padding=1), ((2, 3, 4, 4),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2, padding=1, count_include_pad=False), ((2, 3, 4, 4),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), ((2, 3, 5, 5),)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), ((2, 3, 5, 5),)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x.exp(), 3, 2), ((2, 3, 4, 4),)),
    "embedding": (lambda w: F.embedding(PLACES, w).tanh(), ((5, 3),)),
    "attention": (lambda q, k, v: sdpa(q, k, v, is_causal=True), HEADS),
    "attention with a learned mask": (lambda q, k, v, m: sdpa(q, k, v, m), (*HEADS, (4, 4))),
    "attention in three dimensions": (lambda q, k, v: sdpa(q, k, v, MASK), ((2, 4, 3),) * 3),
    "grouped attention": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), ((1, 4, 4, 3), (1, 2, 4, 3), (1, 2, 4, 3))),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), ((2, 4, 6),)),
    "reflect": (lambda x: F.pad(x, (1, 2), mode="reflect"), ((2, 3, 5),)),
    "replicate": (lambda x: F.pad(x, (1, 2, 1, 1), mode="replicate"), ((2, 3, 5, 4),)),
    "circular": (lambda x: F.pad(x, (1, 2), mode="circular"), ((2, 3, 5),)),
    "bilinear interpolation": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), ((1, 2, 3, 3),)),
    "bicubic interpolation": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"), ((1, 2, 4, 4),)),
    "grid_sample": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), ((1, 2, 4, 4), (1, 3, 3, 2))),
    "dropout": (lambda x: F.dropout(x, 0.4).tanh(), ((4, 6),)),
    "cumprod": (lambda x: x.cumprod(1), ((4, 5),)),
    "logsumexp": (lambda x: x.logsumexp(1), ((4, 5),)),
    "norm": (lambda x: x.norm(dim=1), ((4, 5),)),
    "GRUCell": (lambda: nn.GRUCell(4, 3), ((2, 4),)),
}  # fmt: skip
MODULES = {
    name for name, (make, _) in CASES.items() if getattr(make, "__code__", None) and not make.__code__.co_argcount
}
FORWARD_TOO = ("instance norm", "instance norm with statistics", "weight norm", "weight norm by a hook", "batch norm")


def model(name: str) -> Applied:
    make, shapes = CASES[name]
    return Applied(name, make() if name in MODULES else make, shapes)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["vmap", "loop"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_an_operation_can_be_differentiated(name: str, kind: str) -> None:
    engine = Engine(model(name), engine=kind)
    batch = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    engine.prepare(batch)
    params = {n: torch.stack([p.detach()] * K) for n, p in engine.params.items()}
    along, by = ({n: draw(f"{what} {n}", *p.shape) for n, p in params.items()} for what in ("along", "by"))

    def gradients(values: Any) -> Any:
        buffers = {n: b[None].clone() for n, b in engine.buffers.items()}
        return engine.gradients(values, buffers, batch, seed=3, step=0, differentiable=True)

    def moved(step: float) -> tuple[Tensor, Tensor]:
        local = gradients({n: p + step * along[n] for n, p in params.items()})
        return local.losses.sum(), sum((g * by[n]).sum() for n, g in local.grads.items())

    (loss_up, up), (loss_down, down) = moved(STEP), moved(-STEP)
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    grads = gradients(leaves).grads
    first = sum((g * along[n]).sum() for n, g in grads.items())
    close(first, (loss_up - loss_down) / (2 * STEP))
    total = sum((g * by[n]).sum() for n, g in grads.items())
    if name == "grid_sample" and not torch_differentiates_grid_sample_twice():  # 2.6 does not, and says so
        with pytest.raises(RuntimeError, match="derivative for aten::grid_sampler_2d_backward is not implemented"):
            torch.autograd.grad(total, list(leaves.values()))
        return
    slopes = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    close(sum((s * along[n]).sum() for n, s in zip(leaves, slopes)), (up - down) / (2 * STEP))
    if name in FORWARD_TOO:
        tangent = torch.func.jvp(lambda values: gradients(values).grads, (params,), (along,))[1]
        close(sum((g * by[n]).sum() for n, g in tangent.items()), (up - down) / (2 * STEP))


def torch_differentiates_grid_sample_twice() -> bool:
    x, grid = torch.ones(1, 1, 2, 2, requires_grad=True), torch.zeros(1, 1, 1, 2, requires_grad=True)
    first = torch.autograd.grad(F.grid_sample(x, grid, align_corners=False).sum(), x, create_graph=True)[0]
    try:
        torch.autograd.grad(first.square().sum(), grid)
    except RuntimeError:
        return False
    return True


def close(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_a_spectral_norm_trains_and_is_not_differentiated(norm: Callable[[nn.Module], nn.Module]) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = norm(nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).square().mean()

    with pytest.raises(ValueError, match=r"'layer.*spectral norm"):
        rollout(Normed(), FedAvgStrategy("sgd"), torch.ones(1, K, 3, 2), num_nodes=K, eval_batch=torch.ones(3, 2))
    engine = Engine(Normed(), engine="loop")
    engine.prepare(torch.ones(K, 3, 2))
    params = {n: p.detach()[None] for n, p in engine.params.items()}
    buffers = {n: b[None] for n, b in engine.buffers.items()}
    assert engine.gradients(params, buffers, torch.ones(K, 3, 2), seed=0, step=0).losses.shape == (K,)
