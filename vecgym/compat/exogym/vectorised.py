"""From EXO Gym's strategies to vecgym's, which do the same for all nodes at once, where a user overrides nothing."""

from __future__ import annotations

from typing import Any

from torch import nn

from vecgym import strategy as vecgym_strategy
from vecgym.compat.exogym import demo
from vecgym.compat.exogym import strategies as theirs
from vecgym.compat.exogym.base import PACKAGE
from vecgym.optim.schedule import lambda_cosine

# What a user's class may override to do something of its own.
BEHAVIOUR = {
    "step", "zero_grad", "communicate", "get_indices", "num_parts", "_init_node", "_communicate", "_setup_scheduler",
    "_lr_factor", "_inner_spec", "_select_partners", "_average_models", "_outer_step", "_exchanged", "_optimize",
    "_is_due",
}  # fmt: skip
SELECTORS: dict[type | None, Any] = {
    theirs.RandomIndexSelector: vecgym_strategy.RandomSelector,
    theirs.ShuffledSequentialIndexSelector: vecgym_strategy.ShuffledSequentialSelector,
    theirs.PartitionedIndexSelector: vecgym_strategy.PartitionedSelector,
}


def vectorised(strategy: theirs.Strategy, num_nodes: int, max_steps: int | None) -> vecgym_strategy.Strategy:
    """Return vecgym's strategy for a run of `max_steps`; None: as many as the epochs have.

    What cannot be written for all nodes at once, such as a user's own `step`, runs rank by rank.

    >>> vectorised(theirs.DiLoCoStrategy(theirs.OptimSpec(lr=0.1), H=5), num_nodes=2, max_steps=10)
    DiLoCoStrategy(OptimSpec(AdamW, lr=0.1), \
DiLoCoCommunicator(outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=5))
    """
    schedule = _schedule(strategy, max_steps)
    if schedule is not None:
        common = {"max_norm": getattr(strategy, "max_norm", None) or None, **schedule}
        translated = _translated(strategy, num_nodes, common)
        if translated is not None:
            return translated
    return PerRank(strategy)


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
        """Add this step's gradients to what `zero_grad` leaves of the last step's, then run the user's step."""
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
    """Return the arguments of vecgym that give the same learning rates; None: there are none."""
    kwargs = strategy.lr_scheduler_kwargs
    if strategy.lr_scheduler is None:
        return {}
    if not isinstance(strategy.lr_scheduler, str):
        return None
    warmup = kwargs.get("warmup_steps", 1)
    anneal = kwargs.get("cosine_anneal", False) or strategy.lr_scheduler == "cosine"
    if kwargs.get("max_steps") is None:
        return {"lr_scheduler": "lambda_cosine", "warmup_steps": warmup, "cosine_anneal": anneal}
    if max_steps is None:
        return None
    return {"lr_scheduler": lambda_cosine(min(kwargs["max_steps"], max_steps), warmup, anneal)}


def _behaves_as(value: Any) -> type | None:
    """Return the class of EXO Gym that `value` behaves as; None: it does something of its own."""
    for cls in type(value).__mro__:
        if cls.__module__.startswith(PACKAGE):
            return cls
        if BEHAVIOUR & vars(cls).keys():
            return None
    return None


def _translated(s: Any, num_nodes: int, common: dict[str, Any]) -> vecgym_strategy.Strategy | None:
    """Return the strategy of vecgym that does what `s` does; None: there is none."""
    modules: list[Any] = getattr(s, "communication_modules", [])  # a user may have put in others than the constructor
    match [_behaves_as(x) for x in (s, *modules)]:
        case [theirs.SimpleReduceStrategy]:
            return vecgym_strategy.AllReduceStrategy(s.optim_spec, **common)
        case [demo.DeMoStrategy]:
            return vecgym_strategy.DeMoStrategy(
                s.compression_decay, s.compression_topk, s.compression_chunk, s.weight_decay, lr=s.lr, **common
            )
        case [theirs.FedAvgStrategy, theirs.AveragingCommunicator]:
            return vecgym_strategy.FedAvgStrategy(s.optim_spec, s.H, _island_size(modules[0], num_nodes), **common)
        case [theirs.DiLoCoStrategy, theirs.DiLoCoCommunicator]:
            return vecgym_strategy.DiLoCoStrategy(s.optim_spec, modules[0].outer_optim_spec, modules[0].H, **common)
        case [theirs.SPARTAStrategy, theirs.SparseCommunicator] if selector := _selector(modules[0]):
            return vecgym_strategy.SPARTAStrategy(
                None, s.optim_spec, index_selector=selector, delay=s.async_sparta_delay, **common
            )
        case [theirs.SPARTADiLoCoStrategy, theirs.SparseCommunicator, theirs.DiLoCoCommunicator] if (
            selector := _selector(modules[0])
        ):
            outer = modules[1]
            return vecgym_strategy.SPARTADiLoCoStrategy(
                None,
                s.sparta_interval,
                outer.H,
                s.optim_spec,
                outer.outer_optim_spec,
                index_selector=selector,
                **common,
            )
        case [theirs.CommunicateOptimizeStrategy | theirs.DiLoCoStrategy, *_]:
            made = [found for module in modules if (found := _module(module, num_nodes)) is not None]
            if len(made) == len(modules):
                return vecgym_strategy.CommunicateOptimizeStrategy(made, s.optim_spec, **common)
    return None


def _module(module: Any, num_nodes: int) -> vecgym_strategy.CommunicationModule | None:
    kind = _behaves_as(module)
    if kind is theirs.AveragingCommunicator:
        return vecgym_strategy.AveragingCommunicator(_island_size(module, num_nodes))
    if kind is theirs.DiLoCoCommunicator:
        return vecgym_strategy.DiLoCoCommunicator(module.outer_optim_spec, module.H)
    if kind is theirs.SparseCommunicator and (selector := _selector(module)):
        return vecgym_strategy.SparseCommunicator(selector)
    return None


def _selector(module: Any) -> vecgym_strategy.Selector | None:
    make = SELECTORS.get(_behaves_as(module.index_selector))
    return None if make is None else make(module.index_selector.p)


def _island_size(module: Any, num_nodes: int) -> int | None:
    return None if module.island_size is None or module.island_size >= num_nodes else module.island_size
