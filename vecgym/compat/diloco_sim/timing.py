"""When diloco-sim exchanges: before a local step."""

from __future__ import annotations

from typing import Any

from vecgym.core.errors import warn
from vecgym.core.tree import Tree
from vecgym.strategy import CommunicationModule, Context, SparseCommunicator


class BeforeSteps(CommunicationModule):
    """Exchange before each step, not after the one before it.

    This differs only at the two ends of a run: nothing follows the last step, and sparse values that are exchanged
    before the first, when all nodes are equal, are written when their delay is over.
    """

    def __init__(self, module: CommunicationModule, name: str, interval: int) -> None:
        self.module = module
        self._interval = (name, interval)

    def check(self, num_nodes: int, max_steps: int) -> None:
        name, interval = self._interval
        if interval >= max_steps:
            warn(f"{name}={interval} in a run of {max_steps} steps: it never exchanges anything.")
        else:
            self.module.check(num_nodes, max_steps - 1)

    def init(self, params: Tree, ctx: Context) -> dict[str, Any]:
        state = self.module.init(params, ctx)
        if not isinstance(self.module, SparseCommunicator):
            return state  # the outer step needs a local one before it
        return self.module.exchange_parameters(params, state, ctx.replace(step=-1))[1]

    def exchange_parameters(self, params: Tree, state: dict[str, Any], ctx: Context) -> tuple[Tree, dict[str, Any]]:
        if ctx.step + 1 == ctx.max_steps:
            return params, state
        return self.module.exchange_parameters(params, state, ctx)
