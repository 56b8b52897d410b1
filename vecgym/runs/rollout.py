"""Whole training runs as differentiable functions: the gradient of the outcome.

`rollout` runs a strategy on given batches, and everything it returns can be differentiated by every number that the
strategy takes, by the schedule of its exchanges, by the initial parameters and by the batches. `optimize_schedule`
follows that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import jvp

from vecgym.collectives import StackedCollectives
from vecgym.core import check, nodes, tree
from vecgym.core.objects import reachable
from vecgym.core.transforms import Readable
from vecgym.core.tree import Tree
from vecgym.engine import Engine, EngineName
from vecgym.engine.contract import check_differentiable
from vecgym.engine.simulation import Simulation
from vecgym.optim.per_node import PerNodeRule
from vecgym.runs.segments import differentiable_tensors, run, run_in_segments
from vecgym.strategy import Strategy
from vecgym.strategy.per_rank import as_strategy


class Outcome(NamedTuple):
    """What a rollout came to; every tensor can be differentiated.

    Attributes:
        loss: of the average of the nodes, on the evaluation batch, in eval mode: a scalar.
        losses: of each step and node on its own batch, before the update, `[T, K]`; nan where a node did not train.
        consensus_distance: root mean square distance of the nodes to their average after each step, `[T]`; where it is
            0 its derivative is taken as 0.
        bytes: sent per node in each step, `[T]`, float64; a relaxed exchange counts by its weight, so that the
            derivative by `sync_weight` is what an exchange costs.
        params: after the last step, `[1 or K, *]`.

    >>> from vecgym.strategy import FedAvgStrategy
    >>> from vecgym.models import Line
    >>> batches = torch.tensor([[[1.0], [3.0]]]).expand(4, 2, 1)  # T = 4 steps, K = 2 nodes, B = 1
    >>> strategy = FedAvgStrategy("sgd", H=2, lr=0.5)
    >>> outcome = rollout(Line(), strategy, batches, num_nodes=2, eval_batch=torch.tensor([2.0]))
    >>> outcome.loss, outcome.losses.shape, outcome.consensus_distance, outcome.bytes
    (tensor(0.), torch.Size([4, 2]), tensor([1., 0., 1., 0.]), tensor([0., 4., 0., 4.], dtype=torch.float64))
    """

    loss: Tensor
    losses: Tensor
    consensus_distance: Tensor
    bytes: Tensor
    params: Tree


def rollout(
    model: nn.Module,
    strategy: Strategy,
    batches: Any,
    *,
    num_nodes: int,
    eval_batch: Any,
    segments: int | None = None,
    params: Tree | None = None,
    seed: int = 42,
    num_examples: tuple[int, ...] | None = None,
    engine: EngineName | Engine = "auto",
) -> Outcome:
    """Train for T steps as `Trainer.fit` does, and return what can be differentiated.

    Any number that `strategy` takes may be a tensor that requires grad (or is inside `torch.func.grad`, `hessian`,
    `jvp` ...): learning rates (`[]`, `[K]`: one per node, `[T, 1]`: one per step, `[T, K]`), momenta, betas, weight
    decay, mixing matrices `[K, K]` or `[T, K, K]`, and `sync_weight` `[T]`, see `vecgym.strategy.SyncWeight`. So may
    `params` and the floating tensors of the batches. What has no influence gets derivative 0.

    Constants for derivatives: which coordinates a mask or a top-k takes. Codes (rounding, top-k) of `compressed` pass
    derivatives straight through. Running statistics of batch norm are differentiated.

    Args:
        model: as for `Trainer`; its own parameters are the initial ones, and it is never changed.
        strategy: any `Strategy`.
        batches: a list of T batches, leaves `[K, B, ...]`; or a tensor, a dict or a tuple whose leaves have a leading
            T, `[T, K, B, ...]`. All B examples count, also those that `vecgym.data.Batches` repeats for a node that has
            fewer: give a B that every node has.
        num_nodes: K.
        eval_batch: one ordinary batch `[B, ...]`.
        segments: the number of parts to cut the run into, of which only the states between are stored, and each part is
            computed again in the backward pass: memory O(T / segments + segments) for less than twice the time; about
            sqrt(T) parts need least. For reverse mode through `torch.autograd`. None: all is stored.
        params: initial parameters, `[1 or K, *]`, in place of the model's.
        seed: of dropout, masks and everything else that is random.
        num_examples: of each node, for `weighting="examples"`.
        engine: "auto", "vmap" or "loop"; or an `Engine` that was prepared before, so that the model is not looked at
            again in every call.

    Raises:
        ValueError, TypeError: for what cannot be run or differentiated, with the way out.
        RuntimeError: where the model fails on a batch; it says with which.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> from vecgym.models import Line
    >>> outer_lr = torch.tensor(0.5, requires_grad=True)
    >>> strategy = DiLoCoStrategy("sgd", H=2, lr=0.1, outer_lr=outer_lr)
    >>> batches = torch.ones(4, 2, 1)  # T = 4 steps, K = 2 nodes, B = 1
    >>> outcome = rollout(Line(), strategy, batches, num_nodes=2, eval_batch=torch.ones(1))
    >>> outcome.loss, torch.autograd.grad(outcome.loss, outer_lr)[0]
    (tensor(0.0825, grad_fn=<AddBackward0>), tensor(-0.6845))
    """
    num_nodes, seed = check.integer("num_nodes", num_nodes), check.seed("seed", seed)
    num_examples = _checked_examples(num_examples, num_nodes)
    steps = as_steps(batches, num_nodes)
    _check(model, strategy, steps, eval_batch, num_nodes, segments)
    with Readable():
        strategy.check(num_nodes, len(steps))
    local = prepared(model, engine, steps[0])
    _check_devices(local.device, {"batches": steps, "eval_batch": eval_batch, "params": params, "strategy": strategy})
    initial = None if params is None else _initial(params, local, num_nodes)
    outside = differentiable_tensors((strategy, steps, eval_batch, params))
    if outside:
        _check_rules(strategy)
    if segments is not None and any(not x.requires_grad or is_functorch_wrapped_tensor(x) for x in outside):
        raise ValueError(
            f"segments={segments} is for reverse mode through torch.autograd: inside a transform of torch.func, and in "
            "forward mode (which stores nothing), give segments=None."
        )
    with Readable():
        simulation = Simulation(
            model, strategy, StackedCollectives(num_nodes), engine=local, max_steps=len(steps), seed=seed,
            num_examples=num_examples,
        )  # fmt: skip
        state = simulation.init(initial)
    if segments is None:
        state, record = run(simulation, state, steps)
    else:
        state, record = run_in_segments(simulation, state, steps, segments)
    loss = local.loss(nodes.mean(state.params), nodes.mean(state.buffers), eval_batch)
    return _connected(Outcome(loss, *record, state.params), outside)


def rollout_jvp(
    model: nn.Module,
    strategy: Callable[..., Strategy],
    batches: Any,
    primals: Sequence[Tensor],
    tangents: Sequence[Tensor],
    *,
    num_nodes: int,
    eval_batch: Any,
    engine: EngineName | Engine = "auto",
    **settings: Any,
) -> tuple[Outcome, Outcome]:
    """A rollout and its derivative in one direction, in forward mode: no memory grows with the number of steps.

    For few numbers over long horizons: one call for each direction. Measured: the price of about three rollouts with
    SGD inside, of six to nine with AdamW.

    Args:
        strategy: `primals` -> the strategy.
        primals, tangents: where, and in which direction.
        settings: of `rollout`: `params`, `seed`, `num_examples`.
        model, batches, num_nodes, eval_batch, engine: see `rollout`.

    Returns:
        The outcome, and the derivative of each of its tensors.

    Raises:
        ValueError, TypeError, RuntimeError: as `rollout`; and for primals and tangents that do not belong together.

    >>> from vecgym.strategy import FedAvgStrategy
    >>> from vecgym.models import Line
    >>> def strategy(lr):
    ...     return FedAvgStrategy("sgd", lr=lr)
    >>> outcome, slope = rollout_jvp(Line(), strategy, torch.ones(1, 2, 1), [torch.tensor(0.1)], [torch.tensor(1.0)],
    ...                              num_nodes=2, eval_batch=torch.ones(1))
    >>> outcome.loss, slope.loss  # (1 - 2 lr)^2 and its derivative
    (tensor(0.6400), tensor(-3.2000))
    """
    if isinstance(strategy, (Strategy, nn.Module)) or not callable(strategy):
        raise TypeError(
            f"strategy is of type {type(strategy).__name__}; rollout_jvp takes a function of the primals, such as "
            "lambda outer_lr: DiLoCoStrategy(outer_lr=outer_lr)."
        )
    _check_names(settings)
    num_nodes = check.integer("num_nodes", num_nodes)
    primals, tangents = _tensors("primals", primals), _tensors("tangents", tangents)
    shapes = [[list(x.shape) for x in values] for values in (primals, tangents)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"primals have the shapes {shapes[0]} and tangents {shapes[1]}: give one tangent for each.")
    local = prepared(model, engine, as_steps(batches, num_nodes)[0])

    def outcome(*values: Tensor) -> Outcome:
        made = check.called("strategy", strategy, *values)
        return rollout(model, made, batches, num_nodes=num_nodes, eval_batch=eval_batch, engine=local, **settings)

    value, slope = jvp(outcome, primals, tangents)[:2]
    return value, slope


def _connected(outcome: Outcome, tensors: list[Tensor]) -> Outcome:
    """The outcome, as a function of all `tensors`: of those without influence, one with derivative 0."""
    if not tensors:
        return outcome
    zero = torch.stack([x.reshape(-1)[:0].sum().to("cpu", torch.float64) for x in tensors]).sum()
    return Outcome(*tree.map_leaves(lambda x: x + zero.to(x), tuple(outcome)))


def prepared(model: nn.Module, engine: EngineName | Engine, batch: Any) -> Engine:
    """An engine that has looked at the model.

    >>> from vecgym.models import Line
    >>> prepared(Line(), "auto", torch.ones(2, 1)).plan.engine
    'vmap'
    """
    local = engine if isinstance(engine, Engine) else Engine(model, engine=engine, node_threads=1)
    check_differentiable(local.model)  # before the engine looks, which may warn of what is refused anyway
    if local.facts is None:
        with torch.enable_grad():  # a run whose derivatives nobody wants may be under no_grad
            local.prepare(batch)
    return local


def as_steps(batches: Any, num_nodes: int) -> list[Any]:
    """One tree `[K, B, ...]` for each step.

    >>> steps = as_steps(torch.zeros(5, 2, 3), num_nodes=2)  # [T, K, B]
    >>> len(steps), steps[0].shape
    (5, torch.Size([2, 3]))
    """
    if isinstance(batches, (Tensor, dict, tuple)):
        lengths = {len(x) if x.dim() > 0 else 0 for x in tree.leaves(batches)}
        if len(lengths) != 1:
            raise ValueError(
                f"batches is a {type(batches).__name__} whose tensors have leading sizes {sorted(lengths)}: each must "
                "have the same, T, as [T, K, B, ...]. A list is a sequence of T batches."
            )
        steps = [tree.map_leaves(lambda x: x[t], batches) for t in range(lengths.pop())]  # noqa: B023
    elif isinstance(batches, Iterable):
        steps = list(batches)
    else:
        raise TypeError(f"batches is {check.kind_of(batches)}; give a list of T batches [K, B, ...].")
    if not steps or not all(any(True for _ in tree.leaves(step)) for step in steps):
        raise ValueError("batches holds no batch, or one without a tensor: give a list of T batches [K, B, ...].")
    for t, step in enumerate(steps):
        for x in tree.leaves(step):
            if x.dim() < 1 or len(x) != num_nodes:
                raise ValueError(
                    f"the batch of step {t} has a tensor of shape {list(x.shape)}; num_nodes={num_nodes} asks for "
                    f"[{num_nodes}, B, ...]. A list is a sequence of batches; a tensor, dict or tuple has a leading T."
                )
    return steps


def _check(model: nn.Module, strategy: Any, steps: list[Any], eval_batch: Any, num_nodes: int, segments: Any) -> None:
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy is of type {type(strategy).__name__}; give a Strategy such as DiLoCoStrategy(H=10).")
    if not as_strategy(strategy, model).pure:
        raise ValueError(
            f"{type(strategy).__name__} is written for one rank and runs on threads, through which no derivatives can "
            "be taken: write it as a CommunicationModule."
        )
    if not any(True for _ in tree.leaves(eval_batch)):
        raise ValueError("eval_batch holds no tensor: give one ordinary batch [B, ...], as the model takes it.")
    check.optional_integer("segments", segments, what="None stores every step")
    if segments is not None and segments > len(steps):
        raise ValueError(f"segments={segments} is more than the {len(steps)} steps: give at most {len(steps)}.")


def _checked_examples(num_examples: Any, num_nodes: int) -> tuple[int, ...] | None:
    if num_examples is None:
        return None
    if not isinstance(num_examples, (tuple, list)) or len(num_examples) != num_nodes:
        raise ValueError(
            f"num_examples={num_examples!r} must be a tuple of {num_nodes} integers, the examples of each node."
        )
    return tuple(check.integer(f"num_examples[{i}]", count) for i, count in enumerate(num_examples))


def _check_devices(device: torch.device, given: dict[str, Any]) -> None:
    """Raise a ValueError for a tensor on another device than the model; numbers may also be on the CPU."""
    for name, value in given.items():
        tensors = [x for x in reachable(value) if isinstance(x, Tensor)]
        allowed = {device.type, "cpu"} if name == "strategy" else {device.type}
        for x in tensors:
            if x.device.type not in allowed:
                raise ValueError(
                    f"{name} has a tensor of shape {list(x.shape)} on {x.device}, and the model is on {device}: move "
                    f"one of them, tensor.to({str(device)!r})."
                )


def _initial(params: Tree, engine: Engine, num_nodes: int) -> Tree:
    """Checked initial parameters, those that training changes."""
    known = {**engine.params, **engine.frozen}
    wrong = sorted(set(params) ^ set(known)) if set(params) - set(known) or set(engine.params) - set(params) else []
    if wrong:
        raise ValueError(f"params must have the names of the model's parameters; only one of them has {wrong}.")
    for name, value in params.items():
        shape = list(known[name].shape)
        if list(value.shape[1:]) != shape or value.dim() == 0 or len(value) not in (1, num_nodes):
            raise ValueError(
                f"params[{name!r}] has shape {list(value.shape)}; [{num_nodes}, *] or [1, *] (the same on every node) "
                f"with * = {shape} is needed: p[None] for the model's own p."
            )
    return {name: params[name] for name in engine.params}


def _check_rules(strategy: Strategy) -> None:
    """Raise a ValueError for an optimizer that cannot be differentiated."""
    for rule in reachable(strategy):
        if isinstance(rule, PerNodeRule):
            raise ValueError(
                f"{rule.spec.cls.__name__} runs as it is, node by node, and has no pure body that could be "
                "differentiated: use SGD, Adam, AdamW or another of vecgym.optim's elementwise optimizers, or let "
                "nothing require grad."
            )


def _tensors(name: str, values: Any) -> tuple[Tensor, ...]:
    """At least one floating tensor."""
    check.instance(name, values, (list, tuple), "a list of tensors")
    for x in values:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} has {x!r}; give a list of floating tensors, such as [torch.tensor(0.1)].")
    if not values:
        raise ValueError(f"{name} is empty: give at least one tensor, such as [torch.tensor(0.1)].")
    return tuple(values)


def _check_names(settings: dict[str, Any]) -> None:
    unknown = sorted(set(settings) - {"params", "seed", "num_examples"})
    if unknown:
        raise TypeError(f"rollout_jvp has no argument {unknown[0]!r}; there are also params, seed and num_examples.")
