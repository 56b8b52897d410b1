"""DeMo written for one rank, in EXO Gym's arithmetic: the signs of its updates depend on the last bits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from vecgym.compat.exogym.base import OptimizingStrategy
from vecgym.compat.exogym.communicate import all_gather
from vecgym.compat.exogym.optimizers import AnySpec, Spec
from vecgym.compat.exogym.options import Chunk, MaxNorm, NotNegative, Part, TopK, checked
from vecgym.compress import grid


class DeMoStrategy(OptimizingStrategy):
    """The k strongest cosine components of a local momentum, every step; the sign of their mean is the update.

    The learning rate is that of `optim_spec`, and `max_norm` clips each node's gradient; EXO Gym reads neither, and
    takes 0.001.
    """

    @checked
    def __init__(
        self,
        compression_decay: Part = 0.999,
        compression_topk: TopK = 32,
        compression_chunk: Chunk = 64,
        weight_decay: NotNegative = 0.0,
        optim_spec: AnySpec = None,
        max_norm: MaxNorm = None,
        **options: Any,
    ) -> None:
        self.compression_decay = compression_decay
        self.compression_topk = compression_topk
        self.compression_chunk = compression_chunk
        self.weight_decay = weight_decay
        super().__init__(optim_spec, max_norm, **options)

    @property
    def lr(self) -> Any:
        """The learning rate."""
        return self.behaviour.demo_lr(self.optim_spec)

    def _inner_spec(self) -> Spec:
        return Spec(torch.optim.SGD, lr=self.lr)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self._momentum = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
        self._bases: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        if max_norm := self.behaviour.demo_max_norm(self.max_norm):
            clip_grad_norm_(self.model.parameters(), max_norm)
        lr = self.optim.param_groups[0]["lr"]
        for p, momentum in self._momentum.items():
            if self.weight_decay:
                p.mul_(1.0 - lr * self.weight_decay)
            momentum.mul_(self.compression_decay)
            if p.grad is not None:
                momentum.add_(p.grad, alpha=lr)
            p.grad = self._exchanged(momentum).sign_()
        self.optim.step()
        super().step()

    def _exchanged(self, momentum: Tensor) -> Tensor:
        """Send the strongest components, subtract them from the momentum, and return the mean over the nodes."""
        self.behaviour.check_demo(list(momentum.shape))
        coefficients = self._encode(momentum.view(momentum.shape[0] if momentum.dim() > 1 else 1, -1))
        chunks = coefficients.flatten(2)
        index = chunks.abs().topk(min(self.compression_topk, chunks.shape[-1]), sorted=False).indices
        value = chunks.gather(-1, index)
        momentum.sub_(self._decode(self._placed(chunks, index, value), coefficients.shape).view_as(momentum))
        indices, values = ([torch.zeros_like(x) for _ in range(self.num_nodes)] for x in (index, value))
        all_gather(indices, index)
        all_gather(values, value)
        mean = self._placed(chunks, torch.cat(indices, -1), torch.cat(values, -1))
        return self._decode(mean, coefficients.shape).reshape(momentum.shape).contiguous()

    def _placed(self, like: Tensor, index: Tensor, value: Tensor) -> Tensor:
        """Put each coefficient in its place: the mean of those that were sent for it."""
        return torch.zeros_like(like).scatter_reduce_(-1, index, value, "mean", include_self=False)

    def _encode(self, x: Tensor) -> Tensor:
        """Transform each chunk: [(y h), (x w)] -> [y, x, h', w']."""
        height, width = (grid((n,), self.compression_chunk).area for n in x.shape)
        chunks = x.view(x.shape[0] // height, height, x.shape[1] // width, width)
        return torch.einsum("...ijkl, jb, ld -> ...ikbd", chunks, self._basis(height, x)[0], self._basis(width, x)[0])

    def _decode(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Invert `_encode`: coefficients in chunks of `shape` -> [(y h), (x w)]."""
        rows, columns, height, width = shape
        inverse = self._basis(height, x)[1], self._basis(width, x)[1]
        lines = torch.einsum("...ijkl, kb, ld -> ...ibjd", x.view(shape), *inverse)
        return lines.reshape(rows * height, columns * width)

    def _basis(self, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if n not in self._bases:
            self._bases[n] = (cosine_basis(n).to(like), inverse_cosine_basis(n).to(like))
        return self._bases[n]


def cosine_basis(n: int) -> Tensor:
    """Return the orthonormal DCT-II as a matrix `[n, n]` to multiply from the right, with a fast transform's rounding.

    This is Makhoul's method: even entries, then odd ones backwards; a Fourier transform; a quarter-sample turn.

    >>> basis = cosine_basis(8)
    >>> torch.allclose(basis @ basis.T, torch.eye(8), atol=1e-6)
    True
    """
    unit = torch.eye(n)
    spectrum = torch.view_as_real(torch.fft.fft(torch.cat([unit[:, ::2], unit[:, 1::2].flip(1)], 1), dim=1))
    angle = -torch.arange(n, dtype=unit.dtype)[None] * math.pi / (2 * n)
    turned = spectrum[..., 0] * angle.cos() - spectrum[..., 1] * angle.sin()
    turned[:, 0] /= math.sqrt(n) * 2
    turned[:, 1:] /= math.sqrt(n / 2) * 2
    return 2 * turned


def inverse_cosine_basis(n: int) -> Tensor:
    """Return the inverse of `cosine_basis`, computed likewise.

    >>> torch.allclose(inverse_cosine_basis(6), cosine_basis(6).T, atol=1e-6)
    True
    """
    scaled = torch.eye(n) / 2
    scaled[:, 0] *= math.sqrt(n) * 2
    scaled[:, 1:] *= math.sqrt(n / 2) * 2
    angle = torch.arange(n, dtype=scaled.dtype)[None] * math.pi / (2 * n)
    back = torch.cat([scaled[:, :1] * 0, -scaled.flip(1)[:, :-1]], 1)
    real, imaginary = scaled * angle.cos() - back * angle.sin(), scaled * angle.sin() + back * angle.cos()
    spectrum = torch.stack([real, imaginary], 2)
    order = torch.fft.irfft(torch.view_as_complex(spectrum), n=n, dim=1)
    found = torch.empty_like(order)
    found[:, ::2] = order[:, : n - n // 2]
    found[:, 1::2] = order.flip(1)[:, : n // 2]
    return found
