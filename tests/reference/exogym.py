"""EXO Gym's training loop, one module and one optimizer per node, in the order in which its processes do things.

    a sampler that is never told the epoch: every epoch has the order of the first
    for each step t = 0, 1, ...
        for each node: the gradient (AllReduce: the mean gradient), clipped; the optimizer, with the schedule's t
        SPARTA: the mean of the coordinates that node 0 draws, from the random numbers of its process
        if t is a positive multiple of H: the average of the parameters, or DiLoCo's outer step
    (its counter is tested before it is advanced: the first exchange follows H + 1 steps)

and its mistakes: on a CPU, node 0's own tensors are DiLoCo's outer parameters, once an outer step has been taken, so
that its inner steps move them and every outer gradient is 0; `sparta_interval` is ignored; DeMo's learning rate is
always 0.001, it does not clip, and its cosines have the precision of float32, so that some signs are those of their
rounding. One node alone exchanges nothing.

`exogym_traces.json` has what its processes computed. With `as_documented`, the same loop without these mistakes: the
exchange follows every H steps, the outer parameters are a copy, and one node takes outer steps.

For models without dropout and batch norm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.reference import common
from tests.reference.common import OptimizerSpec, Result, Schedule
from tests.reference.demo import demo

OUTER: OptimizerSpec = (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True})
DEMO_LR = 1e-3
SEED = 42  # of every process


def lambda_cosine(warmup_steps: int, max_steps: int) -> Schedule:
    """A linear warm-up from 0, then a cosine down to 10 %."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        part = (step - warmup_steps) / (max_steps - warmup_steps)
        return 0.9 * 0.5 * (1 + math.cos(math.pi * part)) + 0.1

    return factor


def dealt(dataset: Any, num_nodes: int, batch_size: int, steps: int) -> list[list[Any]]:
    """`batches[step][node]`."""
    loaders = [
        DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, num_nodes, i)) for i in range(num_nodes)
    ]
    every = [list(loader) for loader in loaders]  # of every epoch
    return [[batches[t % len(batches)] for batches in every] for t in range(steps)]


def masks(model: nn.Module, p: float, batches_per_epoch: int) -> Iterator[list[Tensor]]:
    """Of each step, as node 0's process draws them: after the seeds of its iterators over the data."""
    stream = torch.Generator().manual_seed(SEED)

    def begin() -> None:
        torch.empty((), dtype=torch.int64).random_(generator=stream)

    begin()  # of the validation data
    step = 0
    while True:
        if step % batches_per_epoch == 0:
            begin()
        yield [torch.bernoulli(torch.full(q.shape, p), generator=stream).bool() for q in model.parameters()]
        step += 1


@functools.cache
def cosines(n: int) -> Tensor:
    """The orthonormal DCT-II as a matrix `[n, n]` to multiply from the right, with the rounding of a fast transform.

    Makhoul's method: even entries, then odd ones backwards; a Fourier transform; a quarter-sample turn.
    """
    unit = torch.eye(n)
    spectrum = torch.view_as_real(torch.fft.fft(torch.cat([unit[:, ::2], unit[:, 1::2].flip(1)], 1), dim=1))
    angle = -torch.arange(n, dtype=unit.dtype)[None] * math.pi / (2 * n)
    turned = spectrum[..., 0] * angle.cos() - spectrum[..., 1] * angle.sin()
    turned[:, 0] /= math.sqrt(n) * 2
    turned[:, 1:] /= math.sqrt(n / 2) * 2
    return 2 * turned


@functools.cache
def inverse_cosines(n: int) -> Tensor:
    """The inverse of `cosines`, computed likewise."""
    scaled = torch.eye(n) / 2
    scaled[:, 0] *= math.sqrt(n) * 2
    scaled[:, 1:] *= math.sqrt(n / 2) * 2
    angle = torch.arange(n, dtype=scaled.dtype)[None] * math.pi / (2 * n)
    back = torch.cat([scaled[:, :1] * 0, -scaled.flip(1)[:, :-1]], 1)
    real, imaginary = scaled * angle.cos() - back * angle.sin(), scaled * angle.sin() + back * angle.cos()
    order = torch.fft.irfft(torch.complex(real, imaginary), n=n, dim=1)
    found = torch.empty_like(order)
    found[:, ::2] = order[:, : n - n // 2]
    found[:, 1::2] = order.flip(1)[:, : n // 2]
    return found


def transformed(x: Tensor, basis: Callable[[int], Tensor]) -> Tensor:
    if x.dim() == 1:
        return x @ basis(len(x)).to(x.dtype)
    return torch.einsum("ij, ib, jd -> bd", x, *(basis(n).to(x.dtype) for n in x.shape))


ROUNDED = (functools.partial(transformed, basis=cosines), functools.partial(transformed, basis=inverse_cosines))


@torch.no_grad()
def average_where(models: list[nn.Module], chosen: list[Tensor]) -> None:
    for mask, *ps in zip(chosen, *[m.parameters() for m in models]):
        mean = common.mean([p[mask] for p in ps])
        for p in ps:
            p[mask] = mean


def outer_step(models: list[nn.Module], outer: list[Tensor], optimizer: torch.optim.Optimizer, copied: bool) -> None:
    """On parameters that have just been averaged."""
    for theta, mean in zip(outer, models[0].parameters()):
        theta.grad = theta.detach() - mean.detach()
    optimizer.step()
    for i, m in enumerate(models):
        for theta, p in zip(outer, m.parameters()):
            p.data = theta.detach().clone() if copied or i > 0 else theta.data


def exogym(
    model: nn.Module,
    dataset: Any,
    num_nodes: int,
    kind: str,  # "allreduce", "fedavg", "diloco", "sparta", "sparta_diloco" or "demo"
    *,
    steps: int,
    batch_size: int,
    inner: OptimizerSpec = (torch.optim.AdamW, {}),
    H: int = 1,
    p: float = 0.005,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
    as_documented: bool = False,
    **of_demo: Any,
) -> Result:
    batches = dealt(dataset, num_nodes, batch_size, steps)
    if kind == "demo":
        return demo(model, batches, num_nodes, lr=DEMO_LR, schedule=schedule, transforms=ROUNDED, **of_demo)
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    drawn = masks(model, p, -(-len(dataset) // num_nodes // batch_size))
    outer = [p.detach().clone().requires_grad_() for p in model.parameters()]
    outer_optimizer = common.make_optimizer(outer, OUTER)
    losses = common.empty_losses(model, steps, num_nodes)
    for t in range(steps):
        for i, m in enumerate(models):
            losses[t, i] = common.backward(m, batches[t][i])
        if kind == "allreduce":
            common.average_gradients(models)
        for m, optimizer in zip(models, optimizers):
            common.clip(m, max_norm)
            common.set_rate(optimizer, schedule, t)
            optimizer.step()
        if kind.startswith("sparta") and num_nodes > 1:
            average_where(models, next(drawn))
        due = (t + 1) % H == 0 if as_documented else (t > 0 and t % H == 0 and num_nodes > 1)
        if kind in ("fedavg", "diloco", "sparta_diloco") and due:
            common.average_parameters(models)
            if kind != "fedavg":
                outer_step(models, outer, outer_optimizer, copied=as_documented)
    return Result(losses, models, optimizers)
