"""Messages that are lost: an average of those that arrive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vecgym.core import nodes
from vecgym.core.tree import Tree
from vecgym.strategy.average import Around, Average, ServerMean
from vecgym.strategy.base import Context, State


def arrived(lost: float, values: Tree, ctx: Context) -> Tensor | None:
    """Draw which of the nodes' messages arrive in this exchange, bool `[L]`; None: all.

    >>> from vecgym.collectives import StackedCollectives
    >>> arrived(0.5, {"w": torch.zeros(4)}, Context(StackedCollectives(4), step=1, seed=2))
    tensor([False,  True, False, False])
    """
    if len(ctx.comm.node_ids) < ctx.comm.num_nodes:
        raise ValueError(f"lost={lost}: messages may be lost only where all nodes are in one process.")
    generator = ctx.generator(f"lost {next(iter(values), '')}", ctx.step)
    heard = torch.rand(ctx.comm.run_nodes, generator=generator)[ctx.comm.ids] >= lost
    return None if bool(heard.all()) else heard


def average_among(
    average: Average, values: Tree, state: State, heard: Tensor | None, ctx: Context
) -> tuple[Tree, State]:  # fmt: skip
    """Average the values of the nodes that are heard, bool `[L]`, as if there were no others; None: all.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Mean
    >>> ctx, heard = Context(StackedCollectives(3)), torch.tensor([True, True, False])
    >>> average_among(Mean(), {"w": torch.tensor([1.0, 2.0, 9.0])}, {}, heard, ctx)[0]
    {'w': tensor([1.5000])}
    """
    if heard is None:
        return average(values, state, ctx)
    rows = heard.nonzero().flatten()
    members, given = rows.tolist(), ctx.num_examples
    examples = None if given is None else tuple(given[i] for i in members)
    told = ctx.of_rows(rows).replace(comm=ctx.comm.among(members), num_examples=examples, inplace=False)
    agreed, changed = average(nodes.take_rows(values, rows), nodes.take_rows(state, rows), told)
    return agreed, nodes.put_together(state, rows, changed, len(heard), inplace=False)


def is_everyones(average: Average) -> bool:
    """Whether all nodes are given the same, those too that take no part.

    >>> from vecgym.strategy import Mean
    >>> is_everyones(Mean()), is_everyones(Mean(participation=0.5)), is_everyones(ServerMean(participation=0.5))
    (True, False, True)
    """
    return isinstance(innermost(average), ServerMean) or is_shared(average)


def innermost(average: Any) -> Average:
    """Return the average that all others are around."""
    while isinstance(average, Around) or hasattr(average, "inner"):
        average = average.inner
    found: Average = average
    return found


def is_shared(average: Average) -> bool:
    """Whether an average is one of all nodes, the same on each.

    >>> from vecgym.strategy import Mean
    >>> is_shared(Mean()), is_shared(Mean(island_size=2)), is_shared(Mean(participation=0.5))
    (True, False, False)
    """
    return innermost(average).everyone and getattr(innermost(average), "shared", False)
