"""DeMo: exchange only the strongest cosine components of a local momentum (Peng et al., arXiv 2411.19870)."""

from __future__ import annotations

import torch
from torch import Tensor

from vecgym.compress.dct import (
    Grid,
    accumulate_dct_,
    dct,
    from_chunks,
    grid,
    inverse_dct,
    mean_of_senders,
    strongest,
    to_chunks,
    topk_bytes,
)
from vecgym.core import check, tree
from vecgym.core.devices import on_host, placed, spread
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec, check_max_norm, clip_grad_norm
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.base import StepOptions, Strategy, Unpack, takes_options
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.stages import Average, Memory


class StrongestCosines(Average, batched=(), steady=True):
    """An average of the strongest cosine components of a momentum of the nodes' values.

    delta_i <- decay delta_i + x_i;  q_i = the k coefficients of largest magnitude in each chunk of DCT(delta_i);
    delta_i <- delta_i - DCT^-1(q_i);  Q = for each coefficient the mean of q_i over the nodes i that sent it;
    the average is DCT^-1(Q), `[1, *]`.

    State: `residual`, DCT(delta_i) of each tensor, `[L, chunks, chunk area]`: one per node (`[1, ...]` before
    the first exchange). Stored as coefficients, it is exactly 0 where something was sent, and only the mean is
    transformed back. Bytes sent per node, to each of the K - 1 others: sum over tensors of
    chunks * min(k, chunk area) * (8 + b), with 64-bit indices.

    Under differentiation the choice of the coefficients is a constant; their values have derivatives.

    Args:
        compression_decay: decay of the momentum, in [0, 1).
        compression_topk: k, the coefficients sent of each chunk; all of them if a chunk has fewer.
        compression_chunk: the longest side of a chunk: each dimension is cut into chunks of its largest divisor
            that is not larger.

    Raises:
        ValueError: for a decay outside [0, 1), k < 1 or a chunk < 1.

    Example: DiLoCo that exchanges its movements as DeMo exchanges gradients.

    >>> from vecgym.strategy import Outer
    >>> Exchange(Outer(StrongestCosines(compression_decay=0.9, compression_topk=8)), every=50)
    Exchange(Outer(StrongestCosines(compression_decay=0.9, compression_topk=8)), every=50)

    Reference: Peng et al., arXiv 2411.19870; `DeMoStrategy` names the deviations.
    """

    def __init__(
        self, compression_decay: float | Tensor = 0.999, compression_topk: int = 32, compression_chunk: int = 64
    ) -> None:
        one = isinstance(compression_decay, Tensor) and compression_decay.dim() == 0
        self.compression_decay = (check.per_node if one else check.number)(
            "compression_decay", compression_decay, "[0, 1)", "the factor of the momentum at each step, such as 0.999"
        )
        self.compression_topk = check.integer(
            "compression_topk", compression_topk, what="the coefficients sent of each chunk"
        )
        self.compression_chunk = check.integer(
            "compression_chunk", compression_chunk, what="the longest side of a chunk"
        )

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        memory.own["residual"] = tree.map(self._zeros, values)

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        if part.comm.shapes_only:
            return self._announced(x, part)
        rows, held = part.flat(x), part.flat(memory.own["residual"])
        residual, indices, sent = {}, {}, {}
        for name, old in held.items():
            # Residuals that are the same on all nodes, `[1, *]`, differ between nodes from here on.
            num_rows = max(len(old), len(rows[name]))
            old, new = (y.expand(num_rows, *y.shape[1:]) for y in (old, rows[name]))
            updated = self._update_in_place(old, new, part.exact) if memory.inplace else self._update(old, new)
            residual[name], indices[name], sent[name] = updated
        memory.own["residual"] = part.apart(residual)
        # [1, K, chunks, k]
        indices, sent = (part.comm.all_gather(part.apart(y), inplace=True) for y in (indices, sent))
        return part.apart({name: self._decode(indices[name], sent[name], y) for name, y in rows.items()})

    def _announced(self, values: Tree, part: Part) -> Tree:
        """Exchange tensors without values: even for these, the transforms of a large model would take minutes."""
        grids = {name: (len(x), *self._zeros(x).shape[1:]) for name, x in values.items()}
        sent = {name: (*shape[:2], min(self.compression_topk, shape[2])) for name, shape in grids.items()}
        for dtype in (torch.int64, None):  # indices, and values
            part.comm.all_gather({name: x.new_empty(sent[name], dtype=dtype) for name, x in values.items()})
        return {name: x[:1] for name, x in values.items()}

    def step_bytes(self, params: Tree) -> int:
        """Return a node's payload in an exchange, in bytes: sum over tensors of chunks * min(k, chunk area) * (8 + b).

        That is the paper's count. A node's link carries this payload K - 1 times, to each of the others.

        >>> params = {"w": torch.zeros(1, 128, 64)}  # 2 chunks
        >>> StrongestCosines(compression_topk=8).step_bytes(params)  # 2 * 8 * (8 + 4)
        192
        """
        k, limit = self.compression_topk, self.compression_chunk
        return sum(topk_bytes(p.shape[1:], k, limit, p.element_size()) for p in params.values())

    def residual(self, held: Tree, values: Tree) -> Tree:
        """Return delta of each node, `[K, *]`, in the shapes of `values`, `[1 or K, *]`.

        >>> from vecgym.collectives import StackedCollectives
        >>> average = StrongestCosines(compression_topk=1)
        >>> x = {"w": torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]])}
        >>> part = Part.alone(StackedCollectives(2))
        >>> memory = average.memory({"w": torch.zeros(1, 4)}, part)
        >>> _ = average(x, part, memory)
        >>> average.residual(memory.own["residual"], x)["w"][1]  # the constant part, the strongest, was sent
        tensor([-1.5000, -0.5000,  0.5000,  1.5000])
        """
        return {name: self._to_tensors(X, values[name]) for name, X in held.items()}

    def _grid(self, x: Tensor) -> Grid:
        return grid(tuple(x.shape[1:]), self.compression_chunk)

    def _zeros(self, p: Tensor) -> Tensor:
        cut = self._grid(p)
        return p.new_zeros(1, cut.chunks, cut.area)

    def _update(self, residual: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (residual, indices, values) after one gradient; pure."""
        momentum = self.compression_decay * residual + dct(to_chunks(g, self._grid(g))).flatten(2)
        indices = strongest(momentum, self.compression_topk)
        return momentum.scatter(-1, indices, 0.0), indices, momentum.gather(-1, indices)

    def _update_in_place(self, residual: Tensor, g: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Do the same in the storage of the residual, in blocks of strips of `height` rows of any node.

        With `exact` a block is of one node, since a matrix product may round differently as part of a larger one.
        """
        cut = self._grid(g)
        strip, num_strips = Grid(1, *cut[1:]), g.shape[0] * cut.rows
        residual = residual.contiguous()
        momenta = residual.view(num_strips, strip.chunks, strip.area)
        strips = g.reshape(num_strips, strip.height, strip.columns * strip.width)
        length = cut.rows if exact else max(1, _block_bytes(g) // max(1, strips[:1].nbytes))
        sent: list[tuple[Tensor, Tensor]] = []
        decay = self.compression_decay
        if isinstance(decay, Tensor) and not on_host(decay):  # to read it would wait for the device
            momenta.mul_(decay.detach())
            decay = 1.0
        decay = torch.as_tensor(decay, dtype=torch.float64).item()
        for momentum, block in zip(momenta.split(length), strips.split(length)):
            accumulate_dct_(momentum, block, strip, decay)
            indices = strongest(momentum, self.compression_topk)
            sent.append((indices, momentum.gather(-1, indices)))
            momentum.scatter_(-1, indices, 0.0)
        indices, values = (torch.cat(parts).reshape(*residual.shape[:2], parts[0].shape[-1]) for parts in zip(*sent))
        return residual, indices, values

    def _decode(self, indices: Tensor, values: Tensor, like: Tensor) -> Tensor:
        """Decode what all nodes sent, `[1, K, chunks, k]`, as one tensor `[1, *]`."""
        return self._to_tensors(mean_of_senders(indices, values, self._grid(like).area), like)

    def _to_tensors(self, coefficients: Tensor, like: Tensor) -> Tensor:
        """Transform coefficients back: `[L, chunks, area]` -> `[L, *]`."""
        cut = self._grid(like)
        return from_chunks(inverse_dct(coefficients.unflatten(-1, (cut.height, cut.width))), cut, like.shape[1:])


class DeMoStrategy(Strategy, batched=(), random=False, steady=True):
    """Steps along the sign of the mean of the nodes' strongest cosine components, taken from local momenta.

    For each parameter: theta <- theta (1 - lr wd); delta_i <- decay delta_i + lr g_i; q_i = the k coefficients of
    largest magnitude in each chunk of DCT(delta_i); delta_i <- delta_i - DCT^-1(q_i); Q = for each coefficient the
    mean of q_i over the nodes i that sent it; theta <- theta - lr sign(DCT^-1(Q)).

    The optimizer is plain SGD with weight decay on that sign: theta - lr (s + wd theta). Parameters and optimizer
    state are stored once, `[1, *]`; the residuals DCT(delta_i) once per node. Bytes sent per node and step: (K - 1)
    times the paper's count, the sum over tensors of chunks * min(k, chunk area) * (8 + b), with 64-bit indices.

    The learning rate scales the gradients before they are accumulated, as well as the step. In the momentum a constant
    rate has no effect, and a schedule weights the gradients of different steps.

    The derivative of the sign is 0: under differentiation only theta <- theta (1 - lr wd) - lr s
    is differentiated, with s a constant, and no graph of the exchange is kept.

    Args:
        compression_decay, compression_topk, compression_chunk: see `StrongestCosines`.
        weight_decay: wd, decoupled.
        lr: the learning rate; every coordinate moves by it at every step, unless its decoded value is 0.
        max_norm: clip each node's gradient to this 2-norm, before it is accumulated.
        lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: as `StrongestCosines` and `Strategy`; for a negative lr or weight_decay.

    >>> strategy = DeMoStrategy(compression_topk=8, lr=3e-4)
    >>> strategy.exchanges[0].how.step_bytes({"w": torch.zeros(1, 128, 64)})  # 2 chunks, 8 pairs, 12 bytes
    192

    Reference: Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", arXiv 2411.19870, and its code,
    github.com/bloc97/DeMo, which scales the gradient by lr and takes the sign. Deviations: tensors of more than two
    dimensions, which fail there, are folded into matrices; the first of equal coefficients are sent; the residual
    is stored as coefficients, and is 0, not rounding noise, where something was sent; zeros of a wave (in the middle of
    an odd chunk every second one has one) are exactly 0, so that a coordinate with only such waves does not move by lr
    in the direction of a rounding error.
    """

    @takes_options(StepOptions)
    def __init__(
        self,
        compression_decay: float | Tensor = 0.999,
        compression_topk: int = 32,
        compression_chunk: int = 64,
        weight_decay: float | Tensor = 0.0,
        *,
        lr: float | Tensor = 1e-3,
        **inner: Unpack[StepOptions],
    ) -> None:
        spec = OptimSpec(torch.optim.SGD, lr=lr, weight_decay=weight_decay)
        cosines = StrongestCosines(compression_decay, compression_topk, compression_chunk)
        max_norm = inner.pop("max_norm", None)  # of the gradients, which are clipped before the exchange
        super().__init__(spec, [Exchange(cosines, of="gradients")], **inner)
        self.max_norm = None if max_norm is None else check_max_norm(max_norm)

    def check(self, num_nodes: int, max_steps: int) -> None:
        super().check(num_nodes, max_steps)
        if self.max_norm is not None:
            check.per_node("max_norm", self.max_norm, "(0, inf]", num_nodes=num_nodes)

    def train_jointly(self, part: Part) -> None:
        """Accumulate lr times each node's clipped gradient, and step along the sign of the exchanged average."""
        grads = part.gradients()
        with torch.no_grad():  # the derivative of the sign is 0
            if self.max_norm is not None:
                grads = self._clipped(part, grads, self.max_norm)
            grads = tree.map(lambda g: _scaled(g, part.lr, part.inplace), grads)
            signs = tree.map(torch.sign, self.exchanges[0].exchange_gradients(part, grads))
        part.optimize(signs)
        part.report(part.losses)

    def _clipped(self, part: Part, grads: Tree, max_norm: float | Tensor) -> Tree:
        """Clip the gradient of each node, in each configuration of a group."""
        norm = part.here(max_norm)
        norm = norm.repeat(part.size) if isinstance(norm, Tensor) and norm.dim() else norm
        return part.apart(clip_grad_norm(part.flat(grads), norm, inplace=part.inplace)[0])


def _scaled(g: Tensor, lr: float | Tensor, inplace: bool) -> Tensor:
    factor = spread(placed(lr, g.device) if isinstance(lr, Tensor) else lr, g)
    return g.mul_(factor) if inplace and g.is_contiguous() else g * factor


def _block_bytes(x: Tensor) -> int:
    """Return the size of temporaries: on a CPU they stay in its cache; other devices want few large operations."""
    return 2**22 if x.device.type == "cpu" else 2**28
