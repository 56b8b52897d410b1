"""Run the steps of a rollout: store all of them, or segments that the backward pass computes again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from vecgym.core import nodes, tree
from vecgym.core.objects import reachable, replaced
from vecgym.core.transforms import readable
from vecgym.core.tree import differentiated
from vecgym.engine.simulation import Simulation, State
from vecgym.optim.formulas import root

Record = tuple[Tensor, Tensor, Tensor]  # losses [T, K], consensus distance [T], bytes [T]


def run(simulation: Simulation, state: State, batches: Sequence[Any]) -> tuple[State, Record]:
    """Take the steps one after the other, storing everything for the backward pass."""
    losses, distances, sent = [], [], []
    for batch in batches:
        with readable():
            state, metrics = simulation.step(state, batch, differentiable=True)
        losses.append(metrics.losses)
        members = simulation.members(state.step - 1)
        params = state.params if members is None else nodes.take_rows(state.params, torch.tensor(members), copy=False)
        distances.append(root(nodes.squared_consensus_distance(params)))
        step_bytes = sum(transfer.sent_bytes for transfer in metrics.transfers)
        sent.append(torch.as_tensor(step_bytes, dtype=torch.float64))
    return state, (torch.stack(losses), torch.stack(distances), torch.stack(sent))


def run_in_segments(
    simulation: Simulation, state: State, batches: Sequence[Any], segments: int
) -> tuple[State, Record]:
    """Take the steps in `segments` parts, storing only the states between them."""
    size = -(-len(batches) // segments)
    records = []
    for start in range(0, len(batches), size):
        part = _Part(simulation, state, batches[start : start + size])
        state, record = part.result(_Recomputed.apply(part, *part.tensors))
        records.append(record)
    losses, distances, sent = (torch.cat(parts) for parts in zip(*records))
    return state, (losses, distances, sent)


class _Part:
    """A part of a run as a function of tensors alone.

    Its inputs are `tensors`: those of the state before it, and the differentiable ones of its strategy and batches.
    Its outputs are the tensors of the state after it and of the record.
    """

    def __init__(self, simulation: Simulation, state: State, batches: Sequence[Any]) -> None:
        self.simulation = simulation
        self.step = state.step
        self.reads = simulation.strategy, list(batches)
        self.outside = differentiable_tensors(self.reads)
        held, self._before = _flatten(_trees(state))
        self.tensors = [*held, *self.outside]
        self._after: Any = None

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        new = {id(x): value for x, value in zip(self.outside, tensors[len(tensors) - len(self.outside) :])}
        simulation = copy.copy(self.simulation)
        simulation.strategy, batches = replaced(self.reads, new)
        state, record = run(simulation, State(self.step, **_filled(self._before, tensors)), batches)
        outputs, self._after = _flatten({"state": _trees(state), "record": dict(enumerate(record))})
        return outputs

    def result(self, tensors: Sequence[Tensor]) -> tuple[State, Record]:
        """Rebuild the state and the record from the tensors that a call returned."""
        after = _filled(self._after, tensors)
        return State(self.step + len(self.reads[1]), **after["state"]), tuple(after["record"].values())


class _Recomputed(torch.autograd.Function):
    """A part of a run of which only the inputs are stored: the backward pass computes it again.

    torch.utils.checkpoint cannot be used: the nodes' gradients are computed by torch.func, which does not allow hooks
    on saved tensors.
    """

    @staticmethod
    def forward(ctx: Any, part: _Part, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.part = part
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(part(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        part, tensors = ctx.part, ctx.saved_tensors
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed and tensors[i].is_floating_point()]
        sent = [i for i, g in enumerate(grads) if g is not None]

        def outputs(*values: Tensor) -> list[Tensor]:
            inputs = dict(enumerate(tensors)) | dict(zip(wanted, values))
            results = part(list(inputs.values()))
            return [results[i] for i in sent]

        given, by = [tensors[i] for i in wanted], [grads[i] for i in sent]
        derivatives: list[Tensor | None] = [None] * len(tensors)
        if not sent:
            slopes: Sequence[Tensor | None] = ()
        elif torch.is_grad_enabled():  # this will be differentiated too
            slopes = vjp(outputs, *given)[1](by)
        else:
            slopes = _slopes(outputs, [x.detach().requires_grad_() for x in given], by, check=part.step == 0)
        for i, slope in zip(wanted, slopes):
            derivatives[i] = slope
        return None, *derivatives


@torch.enable_grad()
def _slopes(
    outputs: Callable[..., list[Tensor]], given: list[Tensor], by: list[Any], check: bool
) -> Sequence[Tensor | None]:
    """Return the derivatives of sum(by * outputs) with respect to what is given."""
    pairs = [(y, g) for y, g in zip(outputs(*given), by) if y.requires_grad]
    if not pairs:
        return [None] * len(given)
    ys, gs = zip(*pairs)
    if check:
        _check_all_found(ys, given)
    return torch.autograd.grad(ys, given, gs, allow_unused=True)


def _check_all_found(outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Raise a ValueError if `outputs` depend on a leaf that requires grad and is not given."""
    known = {id(x) for x in given}
    seen: set[Any] = set()
    todo = [y.grad_fn for y in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if leaf is not None and id(leaf) not in known:
            raise ValueError(
                f"segments: the strategy reads a tensor of shape {list(leaf.shape)} that requires grad and is not "
                "held by any of its objects, nor by a function's closure: keep it in one, or give segments=None."
            )
        todo += [after for after, _ in node.next_functions]


def _trees(state: State) -> dict[str, Any]:
    return {name: x for name, x in vars(state).items() if name != "step"}


class _Slot(int):
    """The index of a tensor in a list."""


def _flatten(values: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of nested dicts, each once, and the dicts with each tensor replaced by its index."""
    tensors: list[Tensor] = []
    places: dict[int, _Slot] = {}

    def place(x: Tensor) -> Any:
        if id(x) not in places:
            places[id(x)] = _Slot(len(tensors))
            tensors.append(x)
        return places[id(x)]

    return tensors, tree.map_leaves(place, values)


def _filled(outline: Any, tensors: Sequence[Tensor]) -> Any:
    return tree.map_leaves(tensors.__getitem__, outline, kind=_Slot)


def differentiable_tensors(root: Any) -> list[Tensor]:
    """Return the tensors in an object with respect to which derivatives may be taken."""
    return [x for x in reachable(root) if differentiated(x)]
