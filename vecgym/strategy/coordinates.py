"""An average of some coordinates: those that a selector draws, or those that moved most."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vecgym.compress import Quantise, check_bits, check_fraction
from vecgym.compress.codecs import index_dtype, part_of
from vecgym.compress.dct import mean_of_senders, strongest
from vecgym.core import check
from vecgym.core.devices import placed
from vecgym.core.rng import generator
from vecgym.core.tree import Tree
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.averages import Around, Average, State, decode_all, gathered_codes
from vecgym.strategy.coded import constant, straight_through
from vecgym.strategy.meeting import Meeting
from vecgym.strategy.selectors import RandomSelector, Selector


class Sparse(Around):
    """`inner` on the coordinates that a selector draws; all others stay each node's own.

    x_i[M] <- inner(x_j[M]). M is the same on every node and comes from the seed, so it costs no bytes.

    State: what `inner` remembers, for all coordinates, of which those in M are used and changed; `selector`, the
    selector's, and `index`, M from `agree` to `write`, of all.

    Args:
        selector: a `Selector`, such as `PartitionedSelector(0.01)`; a number is the p of a `RandomSelector`.
        inner: how the nodes agree on these coordinates. What it keeps must be a value for each coordinate, such as the
            residual of a code.

    Raises:
        ValueError: before the first step, for an average that keeps something else, such as PowerSGD's matrices.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy.averages import Mean
    >>> from vecgym.strategy.meeting import Meeting
    >>> sparse, values = Sparse(0.5, Mean()), {"w": torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])}
    >>> sparse(values, Meeting(StackedCollectives(2), *sparse.init(values, RunFacts(2))))["w"]
    tensor([[1., 3., 3.],
            [3., 3., 5.]])
    """

    common = False

    def __init__(self, selector: Selector | float, inner: Average) -> None:
        super().__init__(inner)
        selector = RandomSelector(selector) if isinstance(selector, (int, float)) else selector
        self.selector = check.instance("selector", selector, Selector, "a Selector, such as PartitionedSelector(0.01)")

    def init(self, values: Tree, run: RunFacts) -> tuple[State, State]:
        own, shared = self.inner.init(values, run)
        shapes = {name: x.shape[1:] for name, x in values.items()}
        for held in (*own.values(), *shared.values()):
            flat = isinstance(held, dict) and all(isinstance(x, Tensor) for x in held.values())
            if not flat or {name: x.shape[1:] for name, x in held.items()} != shapes:
                raise ValueError(
                    f"{self!r} averages other coordinates each time, and {self.inner!r} keeps something that is not a "
                    "value for each coordinate: give an average without a state, or a codec such as TopK or Quantise."
                )
        state = self.selector.init(shapes, _Beginning(run))
        return own, {**shared, "selector": state} if state else shared

    def agree(self, values: Tree, at: Meeting) -> Any:
        index = self._drawn(values, at)
        at.shared[f"index {at.step}"] = at.for_all({name: where[None] for name, where in index.items()})
        return self.inner.agree(at.taken(values, index), at.of(index))

    def settle(self, message: Any, at: Meeting) -> None:
        self.inner.settle(message, at.of(self._index(at)))

    def write(self, message: Any, values: Tree, at: Meeting) -> Tree:
        index = self._index(at)
        if at.last:
            del at.shared[f"index {at.step}"]
        new = self.inner.write(message, at.taken(values, index), at.of(index))
        return {**values, **at.written(values, index, new)}

    def change(self, values: Tree, at: Meeting) -> Tree:
        index = self._drawn(values, at)
        at.shared[f"index {at.step}"] = at.for_all({name: where[None] for name, where in index.items()})
        return self.inner.change(at.taken(values, index), at.of(index))

    def changed(self, change: Tree, values: Tree, at: Meeting) -> Tree:
        index = self._index(at)
        if at.last:
            del at.shared[f"index {at.step}"]
        new = self.inner.changed(change, at.taken(values, index), at.of(index))
        return {**values, **at.written(values, index, new)}

    def _drawn(self, values: Tree, at: Meeting) -> Tree:
        """Draw the coordinates of this exchange, the same in all configurations of a group."""
        held = at.of_one(at.shared["selector"]) if "selector" in at.shared else {}
        index, state = self.selector.select(at.shapes(values), held, at.exchange, at)
        if state is not held:
            at.shared["selector"] = at.for_all(state)
        return {name: placed(where, values[name].device) for name, where in index.items()}

    def _index(self, at: Meeting) -> Tree:
        return {name: where[0] for name, where in at.of_one(at.shared[f"index {at.step}"]).items()}


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
    >>> from vecgym.strategy.meeting import Meeting
    >>> average = MostMoved(fraction=0.5)
    >>> at = Meeting(StackedCollectives(2), *average.init({"w": torch.zeros(1, 2)}, RunFacts(2)))
    >>> average({"w": torch.tensor([[5.0, 1.0], [1.0, 3.0]])}, at)["w"]  # the first sends 5, the second 3
    tensor([[5., 3.],
            [5., 3.]])

    Reference: no paper defines it. It is vecgym's reading of EXO Gym's documents, which offer
    `SPARTAStrategy(compression_method='topk', quantization_bits=8)`; their code has no such arguments.
    """

    common = False
    one_message = True

    def __init__(self, fraction: float = 0.005, bits: int | None = None) -> None:
        self.fraction = check_fraction("fraction", fraction)
        self.bits = None if bits is None else check_bits("bits", bits)

    def init(self, values: Tree, run: RunFacts) -> tuple[State, State]:
        return {}, {"last": values}

    def agree(self, values: Tree, at: Meeting) -> Any:
        last, shapes, wide = at.shared["last"], at.shapes(values), at.wide(values)
        chosen = {name: self._moved_most(x.detach(), last[name], at) for name, x in values.items()}
        received = self._gather({name: at.flat(wide[name]).gather(-1, c) for name, c in chosen.items()}, at)
        sent = at.comm.all_gather({name: c.to(index_dtype(shapes[name].numel())) for name, c in chosen.items()})
        message: dict[str, Tree] = {"mean": {}, "touched": {}}
        for name, shape in shapes.items():  # of all nodes: [C, K, k]
            c, n = sent[name].long(), shape.numel()
            mean = mean_of_senders(c[:, :, None], received[name][:, :, None], n).view(len(c), *shape)
            touched = torch.zeros(len(c), n, dtype=torch.bool, device=c.device).scatter_(1, c.flatten(1), True)
            message["mean"][name], message["touched"][name] = mean, touched.view(len(c), *shape)
        message = {kind: at.apart(x) for kind, x in message.items()}
        at.shared["last"] = {name: x.detach() for name, x in _over(message, last).items()}
        return message

    def write(self, message: Any, values: Tree, at: Meeting) -> Tree:
        return _over(message, values)

    def _moved_most(self, x: Tensor, last: Tensor, at: Meeting) -> Tensor:
        """Return the coordinates that a node sends, `[K, k]`."""
        movement = at.flat(x - last)
        where = strongest(movement, part_of(movement.shape[-1], self.fraction))
        return where.expand(*where.shape[: at.lead - 1], len(at.comm.node_ids), -1)

    def _gather(self, values: Tree, at: Meeting) -> Tree:
        """Return what every node reads of the values `[K, k]` of all, `[1, K, k]`."""
        if self.bits is None:
            return at.comm.all_gather(values)
        codec = Quantise(self.bits)
        with torch.no_grad():
            rows = at.rows(constant(values))
            codes = {name: codec.encode(x) for name, x in rows.items()}
            received = gathered_codes(codes, codec, lambda x: at.comm.all_gather(at.apart(x)))
            read = {name: decode_all(code, codec, rows[name]) for name, code in received.items()}
        return straight_through(read, values, at, lambda told: told.comm.all_gather(values))


def _over(message: Any, values: Tree) -> Tree:
    """Return the values with the means where any node has sent."""
    return {name: torch.where(message["touched"][name], message["mean"][name], x) for name, x in values.items()}


class _Beginning:
    """What a selector may ask before the first step."""

    step = exchange = 0

    def __init__(self, run: RunFacts) -> None:
        self.seed = run.seed

    def generator(self, purpose: str, *ids: int) -> torch.Generator:
        return generator(self.seed, purpose, *ids)
