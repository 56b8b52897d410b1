"""From EXO Gym's strategies to vecgym's: the same for all nodes at once, where nothing in them is a user's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from vecgym import strategy as vecgym_strategy
from vecgym.compat.exogym import strategies as theirs
from vecgym.compat.exogym.demo import DeMoStrategy
from vecgym.optim.schedule import lambda_cosine

# What a user's class may override to do something of its own.
BEHAVIOUR = {
    "step", "zero_grad", "communicate", "get_indices", "num_parts", "_init_node", "_communicate", "_setup_scheduler",
    "_lr_factor", "_inner_spec", "_select_partners", "_average_models", "_outer_step", "_exchanged",
}  # fmt: skip


def vectorised(strategy: theirs.Strategy, num_nodes: int, max_steps: int | None) -> vecgym_strategy.Strategy:
    """The strategy of vecgym for a run of `max_steps`; None: as many as the epochs have.

    What has no form for all nodes at once, such as a user's own `step`, is run rank by rank.

    >>> vectorised(theirs.DiLoCoStrategy(theirs.OptimSpec(lr=0.1), H=5), num_nodes=2, max_steps=10)
    DiLoCoStrategy(OptimSpec(AdamW, lr=0.1), \
DiLoCoCommunicator(outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=5))
    """
    schedule, build = _schedule(strategy, max_steps), _builder(strategy, STRATEGIES)
    made = None
    if schedule is not None and build is not None:
        common = {"max_norm": getattr(strategy, "max_norm", None) or None, **schedule}
        made = build(strategy, num_nodes, common)
    return PerRank(strategy) if made is None else made


class PerRank(vecgym_strategy.RankStrategy):
    """Runs a strategy written for EXO Gym on every rank; see `vecgym.strategy.per_rank`."""

    def __init__(self, strategy: theirs.Strategy) -> None:
        super().__init__()
        self.theirs = strategy

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        self.model = model
        self.theirs.max_steps = self.max_steps
        self.theirs._init_node(model, rank, num_nodes)
        if hasattr(self.theirs, "optim"):
            self.optim = self.theirs.optim  # whose learning rate is recorded
        self._left: dict[str, Any] = {}

    def step(self) -> None:
        """The gradients of this step on top of what `zero_grad` leaves of the last one's; then the user's step."""
        params = dict(self.model.named_parameters())
        fresh = {name: p.grad for name, p in params.items() if p.requires_grad}
        for name in fresh:
            params[name].grad = self._left.get(name)
        self.theirs.zero_grad()
        for name, grad in fresh.items():
            kept = params[name].grad
            params[name].grad = grad if kept is None or grad is None else kept.add_(grad)
        self.theirs.step()
        self._left = {name: p.grad for name, p in params.items()}

    def __repr__(self) -> str:
        settings = {name: x for name, x in self.theirs.__config__().items() if name not in ("kwargs", "strategy")}
        return f"{type(self.theirs).__name__}({', '.join(f'{name}={x!r}' for name, x in settings.items())})"


def _schedule(strategy: theirs.Strategy, max_steps: int | None) -> dict[str, Any] | None:
    """The arguments of vecgym that give the same learning rates; None: there are none."""
    kwargs = strategy.lr_scheduler_kwargs
    if strategy.lr_scheduler is None:
        return {}
    if not isinstance(strategy.lr_scheduler, str):
        return None
    warmup, anneal = (
        kwargs.get("warmup_steps", 1),
        kwargs.get("cosine_anneal", False) or strategy.lr_scheduler == "cosine",
    )
    if kwargs.get("max_steps") is None:
        return {"lr_scheduler": "lambda_cosine", "warmup_steps": warmup, "cosine_anneal": anneal}
    if max_steps is None:
        return None
    return {"lr_scheduler": lambda_cosine(min(kwargs["max_steps"], max_steps), warmup, anneal)}


def _builder(value: Any, table: dict[type, Callable[..., Any]]) -> Callable[..., Any] | None:
    """How to make vecgym's of it, if its behaviour is all EXO Gym's."""
    for cls in type(value).__mro__:
        if cls in table:
            return table[cls]
        if BEHAVIOUR & vars(cls).keys():
            return None
    return None


def _modules(strategy: Any, num_nodes: int) -> list[vecgym_strategy.CommunicationModule] | None:
    made = []
    for module in strategy.communication_modules:
        build = _builder(module, MODULES)
        one = None if build is None else build(module, num_nodes)
        if one is None:
            return None
        made.append(one)
    return made


def _all_reduce(s: Any, num_nodes: int, common: dict[str, Any]) -> Any:
    return vecgym_strategy.AllReduceStrategy(s.optim_spec, **common)


def _has(s: Any, *builders: Callable[..., Any]) -> bool:
    """Whether its modules are still those that its constructor has made."""
    return [_builder(module, MODULES) for module in s.communication_modules] == list(builders)


def _fedavg(s: Any, num_nodes: int, common: dict[str, Any]) -> Any:
    if not _has(s, _averaging):
        return None
    size = _island(s.communication_modules[0].island_size, num_nodes)
    return vecgym_strategy.FedAvgStrategy(s.optim_spec, s.H, size, **common)


def _diloco(s: Any, num_nodes: int, common: dict[str, Any]) -> Any:
    if not _has(s, _outer):
        return _composed(s, num_nodes, common)
    (module,) = s.communication_modules
    return vecgym_strategy.DiLoCoStrategy(s.optim_spec, module.outer_optim_spec, module.H, **common)


def _sparta(s: Any, num_nodes: int, common: dict[str, Any]) -> Any:
    selector = _selector(s.communication_modules[0].index_selector) if _has(s, _sparse) else None
    if selector is None:
        return None
    return vecgym_strategy.SPARTAStrategy(
        inner_optim=s.optim_spec, index_selector=selector, delay=s.async_sparta_delay, **common
    )


def _sparta_diloco(s: Any, num_nodes: int, common: dict[str, Any]) -> Any:
    selector = _selector(s.sparse_comm.index_selector) if _has(s, _sparse, _outer) else None
    if selector is None:
        return None
    return vecgym_strategy.SPARTADiLoCoStrategy(
        None, s.sparta_interval, s.diloco_comm.H, s.optim_spec, s.diloco_comm.outer_optim_spec,
        index_selector=selector, **common,
    )  # fmt: skip


def _demo(s: Any, num_nodes: int, common: dict[str, Any]) -> Any:
    return vecgym_strategy.DeMoStrategy(
        s.compression_decay, s.compression_topk, s.compression_chunk, s.weight_decay, lr=s.lr, **common
    )


def _composed(s: Any, num_nodes: int, common: dict[str, Any]) -> Any:
    modules = _modules(s, num_nodes)
    return None if modules is None else vecgym_strategy.CommunicateOptimizeStrategy(modules, s.optim_spec, **common)


def _averaging(m: Any, num_nodes: int) -> Any:
    return vecgym_strategy.AveragingCommunicator(_island(m.island_size, num_nodes))


def _outer(m: Any, num_nodes: int) -> Any:
    return vecgym_strategy.DiLoCoCommunicator(m.outer_optim_spec, m.H)


def _sparse(m: Any, num_nodes: int) -> Any:
    selector = _selector(m.index_selector)
    return None if selector is None else vecgym_strategy.SparseCommunicator(selector)


def _selector(selector: Any) -> Any:
    build = _builder(selector, SELECTORS)
    return None if build is None else build(selector.p)


def _island(size: int | None, num_nodes: int) -> int | None:
    return None if size is None or size >= num_nodes else size


STRATEGIES: dict[type, Callable[..., Any]] = {
    theirs.SimpleReduceStrategy: _all_reduce,
    theirs.FedAvgStrategy: _fedavg,
    theirs.DiLoCoStrategy: _diloco,
    theirs.SPARTAStrategy: _sparta,
    theirs.SPARTADiLoCoStrategy: _sparta_diloco,
    DeMoStrategy: _demo,
    theirs.CommunicateOptimizeStrategy: _composed,
}
MODULES: dict[type, Callable[..., Any]] = {
    theirs.AveragingCommunicator: _averaging,
    theirs.DiLoCoCommunicator: _outer,
    theirs.SparseCommunicator: _sparse,
}
SELECTORS: dict[type, Callable[..., Any]] = {
    theirs.RandomIndexSelector: vecgym_strategy.RandomSelector,
    theirs.ShuffledSequentialIndexSelector: vecgym_strategy.ShuffledSequentialSelector,
    theirs.PartitionedIndexSelector: vecgym_strategy.PartitionedSelector,
}
