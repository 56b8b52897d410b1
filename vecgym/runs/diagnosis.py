"""Explain why a strategy differs between one process and several: what differs first, and which rule it breaks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.strategy import Strategy

# In the order in which a step computes them: the first that differs is closest to the cause.
KINDS = ("losses", "buffers", "optimizer", "params", "strategy")

# Rules of the contract, in the words of `vecgym.guide.writing_a_strategy`.
RULES = {
    "comm": "Other nodes only through `ctx.comm`",
    "self": "what evolves in the state; nothing is assigned after `__init__`",
    "own": "A hyperparameter of each node, `[K]`, through `ctx.own(value)`",
    "random": "Random numbers from `ctx.generator(purpose, *ids)`, with the step among the ids",
    "bytes": "Hand to a collective what a node would send",
    "exact": "With `ctx.exact`, work node by node where that changes bits",
}


class Gap(NamedTuple):
    """The distance of one tensor in a process from that of the stacked form.

    >>> Gap("params", "weight", torch.tensor([0.0, 0.3]), shared=True, uniform=False).largest
    0.30000001192092896
    """

    kind: str
    tensor: str
    rows: Tensor | None  # of each node here, relative; None: names or shapes differ
    shared: bool = False  # the same on every node in the stacked form
    uniform: bool = False  # the same on every node here

    @property
    def largest(self) -> float:
        """inf where names or shapes differ."""
        return math.inf if self.rows is None else float(self.rows.max()) if len(self.rows) else 0.0


def gaps(
    kind: str, a: Any, b: Any, comm: Collectives, sizes: Mapping[str, float], path: tuple[str, ...] = ()
) -> Iterator[Gap]:
    """Yield the gaps between nested values of all nodes and those of the nodes here, relative to their largest values.

    The state of a strategy is made of parameters, often as a difference of two that are nearly equal (a residual, a
    movement). However small it is, it has their rounding errors. So its gap is relative to the largest value of the
    parameter of the same name, or else of all parameters, where that is larger.

    Args:
        sizes: the largest value of each parameter.
    """
    if isinstance(a, dict):
        if not isinstance(b, dict) or a.keys() != b.keys():
            yield Gap(kind, ".".join(path), None)
            return
        for key in a:
            yield from gaps(kind, a[key], b[key], comm, sizes, (*path, str(key)))
        return
    a, b = torch.atleast_1d(a, b)
    shared = len(a) == 1 or bool((a == a[:1]).all())
    if len(a) == comm.num_nodes:
        a = a[comm.node_ids]
    if a.shape[1:] != b.shape[1:] or not {len(a), len(b)} <= {1, len(comm.node_ids)}:
        yield Gap(kind, ".".join(path), None)
        return
    x, y = torch.broadcast_tensors(a.detach().double(), b.detach().double())
    if x.numel() == 0:
        return
    distance = torch.where(x.isnan() & y.isnan(), 0.0, (x - y).abs()).nan_to_num(nan=math.inf)
    distance = distance.reshape(len(x), -1).amax(1)
    scale = float(x.nan_to_num().abs().max())
    if kind == "strategy":
        scale = max(scale, sizes.get(path[-1], max(sizes.values(), default=0.0)))
    uniform = len(b) == 1 or bool((b == b[:1]).all())
    yield Gap(kind, ".".join(path), distance / scale if scale > 0 else distance, shared, uniform)


class Evidence(NamedTuple):
    """What a process observes at the first step at which it differs from the stacked form."""

    step: int
    kind: str  # of KINDS, or "ledger", "handed bytes"
    tensor: str
    nodes: tuple[int, ...]  # whose values differ; all nodes here if the shapes do
    gap: float
    shared: bool
    uniform: bool
    calls: str  # which collectives were called, where these differ
    changed: tuple[str, ...] = ()  # attributes of the strategy that the run changed
    random: bool = False  # another stacked run differs too


def evidence(step: int, all_gaps: Sequence[Gap], bound: float, calls: str, comm: Collectives) -> Evidence:
    """Return the evidence of the first tensor that is not within the bound; if all are, of the calls."""
    here = tuple(comm.node_ids.tolist())
    gap = next((gap for gap in all_gaps if not gap.largest <= bound), None)
    if gap is None:
        return Evidence(step, "ledger" if calls else "handed bytes", "", here, 0.0, False, False, calls)
    nodes = here
    if gap.rows is not None and len(gap.rows) == len(here):
        nodes = tuple(node for node, row in zip(here, gap.rows.tolist()) if not row <= bound)
    return Evidence(step, gap.kind, gap.tensor, nodes, gap.largest, gap.shared, gap.uniform, calls)


class Finding(NamedTuple):
    """The first thing that differs, and the most probable cause.

    Attributes:
        kind: "losses", "buffers", "optimizer", "params", "strategy", "ledger" or "handed bytes".
        tensor, node: the first that differ; "" for the bytes.
        gap: the relative difference; inf: in name or shape.
        cause: the most probable one.
        rule: of the contract in `vecgym.guide.writing_a_strategy`; "" if none is broken.

    >>> print(Finding(3, "params", "net.0.weight", node=2, gap=0.25, cause="Rows are mixed.", rule=RULES["comm"]))
    step 3, params net.0.weight of node 2: differs by 0.25. Rows are mixed. The contract: Other nodes only through \
`ctx.comm`.
    """

    step: int
    kind: str
    tensor: str
    node: int
    gap: float
    cause: str
    rule: str

    def __str__(self) -> str:
        if self.kind not in KINDS:
            return f"step {self.step}: {self.cause} The contract: {self.rule}."
        what = f"{self.kind} {self.tensor} of node {self.node}".replace("  ", " ")
        how = (
            "another name or shape" if self.gap == math.inf else f"differs by {self.gap:.2g}" if self.gap else "differs"
        )
        rule = f" The contract: {self.rule}." if self.rule else ""
        return f"step {self.step}, {what}: {how}. {self.cause}{rule}"


def diagnose(each: Sequence[Evidence | None], exact: bool, rounding: float) -> Finding | None:
    """Return what differs first in any process, given the evidence of each; None: nothing does.

    Args:
        rounding: differences up to this one can come from another order of summation.
    """
    present = [e for e in each if e is not None]
    if not present:
        return None
    step = min(e.step for e in present)
    order = (*KINDS, "ledger", "handed bytes")
    first = min((e for e in present if e.step == step), key=lambda e: (order.index(e.kind), e.nodes))
    elsewhere = each[0] is None or each[0].step > step  # the process that has node 0 sees no difference
    cause, rule = _cause(first, elsewhere, exact, rounding)
    return Finding(step, first.kind, first.tensor, first.nodes[0], first.gap, cause, RULES[rule])


def _cause(first: Evidence, elsewhere: bool, exact: bool, rounding: float) -> tuple[str, str]:
    """Return the most probable cause, and the rule; the most certain ones come first."""
    if first.changed:
        return f"The run has changed {', '.join(first.changed)}.", "self"
    if first.random:
        return "Two runs in one process differ as well: random numbers come from a global generator.", "random"
    if first.calls:
        return f"The collectives depend on how many nodes are in a process: {first.calls}.", "comm"
    if first.kind == "handed bytes":
        return "torch.distributed was handed another number of bytes than the ledger says.", "bytes"
    if first.gap == math.inf:
        return "It depends on how many nodes are in a process; perhaps a value of all K nodes met the L here.", "own"
    if exact and first.gap <= rounding:
        return "Only the last bits differ: an operation on all nodes at once rounds in another way.", "exact"
    if first.shared and first.uniform:
        return (
            "It is the same on all nodes of a process, but not between processes: perhaps x.mean(0) or x[:1].",
            "comm",
        )
    if elsewhere:
        return (
            "Only nodes beyond the first process differ: perhaps rows are numbered from 0, or drawn as one [L, *], "
            "in place of ctx.comm.node_ids.",
            "comm",
        )
    return "It depends on which nodes are together in a process: perhaps a reduction over the rows, or len(x).", "comm"


def attributes(strategy: Strategy) -> dict[str, Any]:
    """Return the attributes of a strategy and its modules, to compare them later.

    >>> from vecgym.strategy import FedAvgStrategy
    >>> attributes(FedAvgStrategy("sgd", H=5))["AveragingCommunicator.H"]
    '5'
    """
    return {
        f"{type(owner).__name__}.{name}": value.tolist() if isinstance(value, Tensor) else repr(value)
        for owner in (strategy, *strategy.communication_modules)
        for name, value in vars(owner).items()
    }
