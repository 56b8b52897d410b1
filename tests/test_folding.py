"""Operations done on the whole stack equal those done node by node, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from vecgym.engine.plan import Observer
from vecgym.engine.stateless import TwiceDifferentiable
from vecgym.engine.vmap import Folding

L, N, IN, OUT = 3, 5, 32, 16


def both(fn: Callable[..., Tensor], given: list[Tensor], in_dims: tuple[int | None, ...]) -> None:
    """Compare values and gradients of a folded call with those of a loop over the nodes."""
    results = []
    for folded in (True, False):
        leaves = [x.clone().requires_grad_() for x in given]
        if folded:
            with Folding():
                out = vmap(fn, in_dims)(*leaves)
        else:
            rows = [[x if d is None else x.select(d, i) for x, d in zip(leaves, in_dims)] for i in range(L)]
            out = torch.stack([fn(*row) for row in rows])
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for mine, expected in zip(*results):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("middle", [(), (N,), (2, N)])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (None, 0, 0), (0, None, None), (0, 0, None), (0, None, 0), (1, 2, 1)])
def test_linear(in_dims: tuple[int | None, ...], middle: tuple[int, ...]) -> None:
    if in_dims[0] == 1 and not middle:
        in_dims = (0, 2, 1)

    def stacked(dim: int | None, *shape: int) -> Tensor:
        return draw(*shape) if dim is None else draw(L, *shape).movedim(0, dim).contiguous()

    given = [stacked(in_dims[0], *middle, IN), stacked(in_dims[1], OUT, IN), stacked(in_dims[2], OUT)]
    both(F.linear, given, in_dims)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [15, 16, 64, 65])
def test_linear_with_long_sums(num_rows: int, bias: bool) -> None:
    given = [draw(L, num_rows, 512), draw(L, 70, 512), *([draw(L, 70)] if bias else [])]
    both(F.linear, given, (0,) * len(given))


def test_linear_without_bias_and_its_contiguous_gradient() -> None:
    x, weight = draw(L, N, IN), draw(L, OUT, IN).requires_grad_()
    with Folding():
        out = vmap(F.linear)(x, weight)
    (grad,) = torch.autograd.grad(out.square().sum(), weight)
    assert grad.is_contiguous()
    torch.testing.assert_close(grad, 2 * (x @ weight.mT).mT @ x, rtol=1e-12, atol=1e-12)


class Weights(TorchDispatchMode):
    """Note whether each layer norm is computed with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_layer_norm.default:
            self.noted.append(args[2] is not None)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("in_dims", [(0, 0), (0, 0, 0), (1, 1, 1), (None, 0, 0), (0, None)])
def test_layer_norm(in_dims: tuple[int | None, ...], dtype: torch.dtype) -> None:
    """The bits of vmap, by torch's kernel with a weight: without one it is not vectorised."""
    shapes = [(2, N, 2, IN), (2, IN), (2, IN)]
    given = [draw(*s) if d is None else draw(L, *s).movedim(0, d).contiguous() for s, d in zip(shapes, in_dims)]

    def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, (2, IN), weight, bias)

    both(norm, given, in_dims)
    results = []
    for mode in (Folding(), contextlib.nullcontext()):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        with Weights() as weights, mode:
            out = vmap(norm, in_dims)(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert weights.noted == [isinstance(mode, Folding) or in_dims[1] is None]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("fn", [F.linear, F.scaled_dot_product_attention], ids=["linear", "attention"])
def test_a_call_on_nothing_but_shared_tensors(fn: Callable[..., Tensor]) -> None:
    given = [draw(N, IN), draw(OUT, IN), draw(OUT)]
    if fn is F.scaled_dot_product_attention:
        given = [draw(2, 2, 4, 8), draw(2, 2, 6, 8) + 1, draw(2, 2, 6, 8)]
    both(lambda scale, *tensors: scale * fn(*tensors), [draw(L), *given], (0, None, None, None))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (None, 0, 0), (0, None, None)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_attention(options: dict, in_dims: tuple[int | None, ...]) -> None:
    given = [draw(L, 2, 2, 4, 8) if d == 0 else draw(2, 2, 4, 8) for d in in_dims]
    both(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), given, in_dims)


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (1, 1)])
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_cross_entropy(ignore_index: int, in_dims: tuple[int | None, int | None]) -> None:
    """Also where a node leaves more examples out than another."""
    logits = draw(N, 4) if in_dims[0] is None else draw(L, N, 4).movedim(0, in_dims[0]).contiguous()
    classes = torch.randint(4, (L, N), generator=torch.Generator().manual_seed(0))
    assert len({int(n) for n in (classes == 2).sum(1)}) > 1
    target = classes[0] if in_dims[1] is None else classes.movedim(0, in_dims[1])
    found = []
    for folded in (True, False):
        leaf = logits.clone().requires_grad_()
        with Folding() if folded else contextlib.nullcontext():
            losses = vmap(lambda x, y: F.cross_entropy(x, y, ignore_index=ignore_index), in_dims)(leaf, target)
        found.append([losses, *torch.autograd.grad((losses * torch.arange(1.0, L + 1)).sum(), leaf)])
    for mine, expected in zip(*found):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_other_cross_entropies_are_left_to_torch() -> None:
    """Weights, smoothing, probabilities as targets, other reductions, images."""
    logits, image, p = draw(L, N, 4), draw(L, N, 4, 3), draw(L, N, 4).softmax(-1)
    y, ys = torch.ones(L, N, dtype=torch.long), torch.ones(L, N, 3, dtype=torch.long)
    cases: list[tuple[Tensor, Tensor, dict]] = [
        (logits, y, {"weight": draw(4).square()}),
        (logits, y, {"label_smoothing": 0.1}),
        (logits, y, {"reduction": "sum"}),
        (logits, p, {}),
        (image, ys, {}),
    ]
    for x, target, options in cases:
        with Folding():
            ours = vmap(lambda a, b: F.cross_entropy(a, b, **options))(x, target)  # noqa: B023
        expected = torch.stack([F.cross_entropy(a, b, **options) for a, b in zip(x, target)])
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_attention_dropout_differs_between_nodes() -> None:
    ones = torch.ones(L, 2, 2, 4, 8)
    with Folding():
        out = vmap(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), randomness="different")(ones)
    assert out.shape == ones.shape
    assert len({tuple(x.flatten().tolist()) for x in out}) == L


def test_observer_counts_arithmetic() -> None:
    with Observer({}) as observer:
        F.linear(draw(N, 3), draw(4, 3))
    assert observer.flop == 2 * N * 3 * 4
    with Observer({}) as observer:
        draw(N, 3) @ draw(3, 4)
        torch.addmm(draw(4), draw(N, 3), draw(3, 4))
        F.conv2d(draw(2, 3, 8, 8), draw(4, 3, 3, 3))
    assert observer.flop == 2 * (2 * N * 3 * 4) + 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    with Observer({}) as observer:
        F.scaled_dot_product_attention(draw(2, 2, 4, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8))
    assert observer.flop == 2 * (2 * 2 * 2 * 4 * 6 * 8)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["layer", "group", "batch"])
def test_normalisations_equal_torch_and_so_do_their_second_derivatives(name: str, training: bool) -> None:
    x, weight, bias = draw(4, 6, 5), draw(6) + 2, draw(6) - 1
    running = [draw(6), draw(6).square() + 1]

    def norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        if name == "layer":
            return F.layer_norm(x.mT, (6,), weight, bias)
        if name == "group":
            return F.group_norm(x, 3, weight, bias)
        return F.batch_norm(x, mean, var, weight, bias, training=training, momentum=0.3)

    found = []
    for elementary in (True, False):
        leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
        buffers = [value.clone() for value in running]
        with TwiceDifferentiable() if elementary else contextlib.nullcontext():
            out = norm(*leaves, *buffers)
        first = torch.autograd.grad((out**3).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(torch.stack([(g**2).sum() for g in first]).sum(), leaves)
        found.append([out, *first, *second, *buffers])
    for mine, expected in zip(*found):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


def test_padding_gets_no_gradient_under_vmap() -> None:
    tokens, table = torch.tensor([[0, 2, 2], [1, 0, 0], [2, 1, 0]]), draw(L, 4, 3)
    both(lambda t: F.embedding(tokens, t, padding_idx=0), [table], (0,))
    both(lambda t: F.embedding(tokens, t, padding_idx=-2), [table], (0,))


def test_observer_names_what_vmap_does_wrong() -> None:
    with Observer({}) as observer:
        F.embedding(torch.tensor([1]), draw(4, 3), scale_grad_by_freq=True)
    assert "scale_grad_by_freq" in observer.unsafe
