"""What a strategy sends, without training and without memory."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from vecgym.collectives.ledger import Ledger
from vecgym.collectives.stacked import Announced
from vecgym.core import check
from vecgym.engine.exchanges import exchanges
from vecgym.strategy import Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.per_rank import as_strategy


def dry_run(
    model: nn.Module, strategy: Strategy, num_nodes: int, max_steps: int, *, seed: int = 42,
    unused: Collection[str] = (),
) -> Ledger:  # fmt: skip
    """The ledger of a run, from the exchanges alone: their tensors have shapes and no values.

    It equals that of `Trainer.fit` with this `seed`. Nothing is computed and nothing stored, so the model may be of any
    size, on the device "meta" too.

    Args:
        model: its trainable parameters are what nodes exchange.
        strategy: must not look at the values of what it exchanges, as every strategy here; one that is written for one
            rank cannot run dry.
        num_nodes: K.
        max_steps: steps.
        seed: of the run: which nodes meet, and which coordinates are drawn, depends on it.
        unused: the names of parameters that have no influence on the loss: a run, which has seen that, leaves them out.

    Raises:
        ValueError, TypeError: for what no run would take, and for strategies that look at values.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(100_000, 100_000, dtype=torch.bfloat16)  # 10 billion parameters
    >>> dry_run(model, DiLoCoStrategy("adamw", H=100), num_nodes=8, max_steps=500)
    Ledger(5 collectives, 175,001,750,000 bytes sent per node)
    """
    check.instance("model", model, nn.Module, "an nn.Module")
    check.instance("strategy", strategy, Strategy, "a Strategy object such as DiLoCoStrategy('adamw', H=100)")
    strategy = as_strategy(strategy, model)
    K, T = check.integer("num_nodes", num_nodes), check.integer("max_steps", max_steps)
    if not strategy.pure:
        raise ValueError(
            f"{type(strategy).__name__} is written for one rank, and its step needs values: train a few steps, and "
            "price trainer.ledger."
        )
    check_synchronous(strategy)
    strategy.check(K, T)
    comm = Announced(K)
    params = {n: _like(p)[None] for n, p in model.named_parameters() if p.requires_grad and n not in unused}
    comm.ledger.announce(K, {name: p.nbytes for name, p in params.items()})
    wide = {name: p.expand(K, *p.shape[1:]) for name, p in params.items()}  # as of nodes that have moved apart
    try:
        for _ in exchanges(strategy, params, wide, comm, T, check.seed("seed", seed)):
            pass
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise ValueError(
            f"{strategy!r} looks at the values of what it exchanges, and in a dry run there are none: train a few "
            "steps, and price trainer.ledger."
        ) from error
    return comm.ledger


def _like(p: Tensor) -> Tensor:
    return torch.empty_like(p, device="meta", requires_grad=False)
