"""An average of the coordinates that moved most, which each node chooses by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from vecgym.compress import Quantise, check_bits, check_fraction
from vecgym.compress.codecs import index_dtype, part_of, size_of
from vecgym.compress.dct import mean_of_senders, strongest
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.strategy.average import Average, flat
from vecgym.strategy.base import Context, State
from vecgym.strategy.codes import constant, straight_through
from vecgym.strategy.gathered import decode_all, gathered_codes
from vecgym.strategy.modules import Parameters
from vecgym.strategy.when import nothing


class MostMoved(Average):
    """Each node sends those of its values that moved most since they were last agreed on, and these are averaged.

    I_i = the k coordinates of each tensor with the largest |x_i - last_i|;  for every coordinate c that any node sent:
    x_j[c] <- the mean of x_i[c] over the nodes i that sent c, on all nodes j; last_j[c] <- the same. Other coordinates
    stay each node's own, and so do their `last`: a coordinate that moves slowly is sent once it has moved far enough.

    Under differentiation the choice of coordinates is a constant, and quantised values pass derivatives straight
    through.

    State: `last`, the last average of each coordinate, the same on every node, `[1, *]`; at first the initial values.
    Bytes to each of the others, per tensor of n values of b bytes: k (b + 4), k = max(1, round(fraction n)); with 8
    bits k (1 + 4) + 4; with 4 bits ceil(k / 2) + 4 k + 4.

    Args:
        fraction: of each tensor, in (0, 1].
        bits: send the values in 8, 4 or 2 bits, one scale per tensor and node; None: as they are.

    >>> from vecgym.collectives import StackedCollectives
    >>> average, ctx = MostMoved(fraction=0.5), Context(StackedCollectives(2))
    >>> state = average.init({"w": torch.zeros(1, 2)}, ctx)
    >>> average({"w": torch.tensor([[5.0, 1.0], [1.0, 3.0]])}, state, ctx)[0]["w"]  # the first sends 5, the second 3
    tensor([[5., 3.],
            [5., 3.]])
    """

    by_exchange = False

    def __init__(self, fraction: float = 0.005, bits: int | None = None) -> None:
        self.fraction = check_fraction("fraction", fraction)
        self.bits = None if bits is None else check_bits("bits", bits)

    def init(self, values: Tree, ctx: Context) -> State:
        return {"last": tree.map(torch.clone, values)}

    def __call__(self, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        agreed, state = self.agree(values, state, ctx)
        return self.write(agreed, values, ctx), state

    def agree(self, values: Tree, state: State, ctx: Context) -> tuple[State, State]:
        last = state["last"]
        chosen = {name: self._moved_most(x.detach(), last[name]) for name, x in values.items()}
        own = {name: flat(values[name]).expand(len(at), -1).gather(1, at) for name, at in chosen.items()}
        received = self._gather(own, ctx)  # [1, K, k]
        sent = ctx.comm.all_gather({name: at.to(index_dtype(size_of(values[name]))) for name, at in chosen.items()})
        mean, touched, kept = {}, {}, {}
        for name, x in values.items():
            at, shape = sent[name].long(), x.shape[1:]
            mean[name] = mean_of_senders(at[:, :, None], received[name][:, :, None], size_of(x)).view(len(at), *shape)
            touched[name] = torch.zeros(len(at), size_of(x), dtype=torch.bool, device=x.device)
            touched[name] = touched[name].scatter_(1, at.flatten(1), True).view(len(at), *shape)  # [1, *]
            kept[name] = torch.where(touched[name], mean[name], last[name]).detach()
        return {"mean": mean, "touched": touched}, {"last": kept}

    def write(self, agreed: State, values: Tree, ctx: Context) -> Tree:
        touched, mean = agreed["touched"], agreed["mean"]
        written = {name: torch.where(at, mean[name], values[name]) for name, at in touched.items() if at.numel()}
        return values | written

    def empty(self, values: Tree) -> State:
        return {"mean": nothing(values), "touched": tree.map(Tensor.bool, nothing(values))}

    def _moved_most(self, x: Tensor, last: Tensor) -> Tensor:
        """Return the coordinates that a node sends, `[L, k]`."""
        movement = flat(x - last)
        return strongest(movement, part_of(movement.shape[1], self.fraction))

    def _gather(self, values: Tree, ctx: Context) -> Tree:
        """Return what every node reads of the values `[L, k]` of all, `[1, K, k]`."""
        if self.bits is None:
            return ctx.comm.all_gather(values)
        codec = Quantise(self.bits)
        with torch.no_grad():
            codes = {name: codec.encode(x) for name, x in constant(values).items()}
            received = gathered_codes(codes, codec, ctx.comm.all_gather)
            read = {name: decode_all(code, codec, values[name]) for name, code in received.items()}
        return straight_through(read, values, ctx, lambda told: told.comm.all_gather(values))


class TopKSparseCommunicator(Parameters):
    """Every step, each node sends those of its parameters that moved most, and these are averaged; see `MostMoved`.

    For an exchange every n-th step: `every(n, TopKSparseCommunicator(...))`.

    Args:
        fraction: of each tensor, in (0, 1].
        quantization_bits: send the values in 8, 4 or 2 bits, one scale per tensor and node; None: as they are.

    Raises:
        ValueError: for a fraction outside (0, 1] and for other bits.

    >>> TopKSparseCommunicator(0.005, quantization_bits=8)
    TopKSparseCommunicator(fraction=0.005, quantization_bits=8)

    Reference: no paper defines it. It is vecgym's reading of EXO Gym's documents, which offer
    `SPARTAStrategy(compression_method='topk', quantization_bits=8)`; their code has no such arguments.
    """

    shows_defaults = True

    def __init__(self, fraction: float = 0.005, quantization_bits: int | None = None) -> None:
        if quantization_bits is not None:
            check_bits("quantization_bits", quantization_bits)
        super().__init__(MostMoved(fraction, quantization_bits))
        self.fraction, self.quantization_bits = fraction, quantization_bits
