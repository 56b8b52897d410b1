"""Whole training runs as differentiable functions: the gradient of the outcome.

`rollout` runs a strategy on given batches. Everything it returns can be differentiated with respect to every number
that the strategy takes, the schedule of its exchanges, the initial parameters and the batches. `optimize_schedule`
follows that gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import jvp

from vecgym.collectives import StackedCollectives
from vecgym.core import check, nodes, tree
from vecgym.core.objects import reachable
from vecgym.core.options import function_of
from vecgym.core.transforms import readable
from vecgym.core.tree import Tree
from vecgym.engine import Engine, EngineName
from vecgym.engine.contract import check_differentiable
from vecgym.engine.simulation import Simulation, State
from vecgym.engine.state import Result
from vecgym.optim.per_node import PerNodeRule
from vecgym.runs.async_rollout import run_async
from vecgym.runs.present import at_own_counts, check_rollout, presence_of
from vecgym.runs.rollout_options import JvpOptions, RolloutOptions
from vecgym.runs.segments import Record, differentiable_tensors, run, run_in_segments
from vecgym.strategy import Strategy


class Outcome(NamedTuple):
    """The result of a rollout; every tensor can be differentiated.

    Attributes:
        loss: of the average of the nodes that are there, on the evaluation batch, in eval mode: a scalar.
        losses: of each step and node on its own batch, before the update, `[T, K]`; nan where a node did not train.
        consensus_distance: root mean square distance of these nodes to their average after each step, `[T]`; where it
            is 0, its derivative is defined as 0.
        bytes: sent per node in each step, `[T]`, float64; a relaxed exchange counts by its weight, so that the
            derivative with respect to `sync_weight` is the cost of an exchange.
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


@function_of(RolloutOptions)
def rollout(options: RolloutOptions) -> Outcome:
    """Train for T steps as `Trainer.fit` does, and return what can be differentiated.

    Any number that `strategy` takes may be a tensor that requires grad (or is inside `torch.func.grad`, `hessian`,
    `jvp` ...): learning rates (`[]`, `[K]`: one per node, `[T, 1]`: one per step, `[T, K]`), momenta, betas, weight
    decay, mixing matrices `[K, K]` or `[T, K, K]`, and `sync_weight` `[T]`, see `vecgym.strategy.SyncWeight`. So may
    `params` and the floating tensors of the batches. What has no influence gets derivative 0.

    Of an asynchronous strategy the order of events is fixed, and `losses` has a row for each update of the server: the
    means over the rounds in it, nan for the other nodes.

    Treated as constants: which coordinates a mask or a top-k selects. The codes of `compressed` (rounding, top-k) pass
    derivatives straight through. Running statistics of batch norm are differentiated.

    Args:
        strategy: any `Strategy`.
        {arguments}

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
    strategy, num_nodes, segments, params = options.strategy, options.num_nodes, options.segments, options.params
    steps = as_steps(options.batches, num_nodes)
    if segments is not None and segments > len(steps):
        raise ValueError(f"segments={segments} is more than the {len(steps)} steps: give at most {len(steps)}.")
    with readable():
        strategy.check(num_nodes, len(steps))
    engine = prepared(options.model, options.engine, steps[0])
    given = {"batches": steps, "eval_batch": options.eval_batch, "params": params, "strategy": strategy}
    _check_devices(engine.device, given)
    initial = None if params is None else _initial(params, engine, num_nodes)
    inputs = differentiable_tensors(tuple(given.values()))
    _check_differentiable(strategy, inputs, segments)
    check_rollout(options.availability, strategy)
    presence = presence_of(options, len(steps), options.num_examples)
    if strategy.asynchronous:
        state, record, result = run_async(options, engine, initial, steps)
        return _evaluated(state, record, result, engine, options, inputs)
    with readable():
        simulation = Simulation(
            options.model, strategy, StackedCollectives(num_nodes), engine=engine, max_steps=len(steps),
            seed=options.seed, num_examples=options.num_examples, presence=presence,
        )  # fmt: skip
        state = simulation.init(initial)
    steps = steps if presence is None else at_own_counts(steps, presence)
    if segments is None:
        state, record = run(simulation, state, steps)
    else:
        state, record = run_in_segments(simulation, state, steps, segments)
    return _evaluated(state, record, simulation.result(state), engine, options, inputs)


@function_of(JvpOptions)
def rollout_jvp(options: JvpOptions) -> tuple[Outcome, Outcome]:
    """Compute a rollout and its derivative in one direction, in forward mode: memory does not grow with the steps.

    For few numbers over long horizons: one call for each direction. Measured: the price of about three rollouts with
    SGD inside, of six to nine with AdamW.

    Args:
        strategy: `primals` -> the strategy.
        {arguments}

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
    steps = as_steps(options.batches, options.num_nodes)
    engine = prepared(options.model, options.engine, steps[0])

    def outcome(*values: Tensor) -> Outcome:
        strategy = check.called("strategy", options.strategy, *values)
        return rollout(**{**options.common, "strategy": strategy, "batches": steps, "engine": engine})

    value, slope = jvp(outcome, tuple(options.primals), tuple(options.tangents))[:2]
    return value, slope


def _evaluated(
    state: State, record: Record, result: Result, engine: Engine, options: RolloutOptions, inputs: list[Tensor]
) -> Outcome:
    params, buffers = (nodes.mean(values, result.members) for values in (result.params, state.buffers))
    loss = engine.loss(params, buffers, options.eval_batch)
    return _connected(Outcome(loss, *record, state.params), inputs)


def _connected(outcome: Outcome, tensors: list[Tensor]) -> Outcome:
    """Make the outcome a function of all `tensors`; the derivative by those without influence is 0."""
    if not tensors:
        return outcome
    zero = torch.stack([x.reshape(-1)[:0].sum().to("cpu", torch.float64) for x in tensors]).sum()
    return Outcome(*tree.map_leaves(lambda x: x + zero.to(x), tuple(outcome)))


def prepared(model: nn.Module, engine: EngineName | Engine, batch: Any) -> Engine:
    """Return an engine that has inspected the model.

    >>> from vecgym.models import Line
    >>> prepared(Line(), "auto", torch.ones(2, 1)).plan.engine
    'vmap'
    """
    if not isinstance(engine, Engine):
        engine = Engine(model, engine=engine, node_threads=1)
    check_differentiable(engine.model)  # before the inspection, which may warn of what is refused anyway
    if engine.facts is None:
        with torch.enable_grad():  # a rollout whose derivatives nobody wants may be under no_grad
            engine.prepare(batch)
    return engine


def as_steps(batches: Any, num_nodes: int) -> list[Any]:
    """Return one batch `[K, B, ...]` for each step.

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


def _check_devices(device: torch.device, given: dict[str, Any]) -> None:
    """Raise a ValueError for a tensor that is not on the model's device; a strategy's numbers may be on the CPU."""
    for name, value in given.items():
        allowed = {device.type, "cpu"} if name == "strategy" else {device.type}
        for x in reachable(value):
            if isinstance(x, Tensor) and x.device.type not in allowed:
                raise ValueError(
                    f"{name} has a tensor of shape {list(x.shape)} on {x.device}, and the model is on {device}: move "
                    f"one of them, tensor.to({str(device)!r})."
                )


def _initial(params: Tree, engine: Engine, num_nodes: int) -> Tree:
    """Return the initial values of the parameters that training changes, checked."""
    known = {**engine.params, **engine.frozen}
    missing, unknown = engine.params.keys() - params.keys(), params.keys() - known.keys()
    if missing or unknown:
        wrong = sorted(params.keys() ^ known.keys())
        raise ValueError(f"params must have the names of the model's parameters; only one of them has {wrong}.")
    for name, value in params.items():
        shape = list(known[name].shape)
        if list(value.shape[1:]) != shape or value.dim() == 0 or len(value) not in (1, num_nodes):
            raise ValueError(
                f"params[{name!r}] has shape {list(value.shape)}; [{num_nodes}, *] or [1, *] (the same on every node) "
                f"with * = {shape} is needed: p[None] for the model's own p."
            )
    return {name: params[name] for name in engine.params}


def _check_differentiable(strategy: Strategy, inputs: list[Tensor], segments: int | None) -> None:
    """Raise a ValueError if the run cannot be differentiated with respect to `inputs`, or not in segments."""
    for rule in reachable(strategy) if inputs else ():
        if isinstance(rule, PerNodeRule):
            raise ValueError(
                f"{rule.spec.cls.__name__} runs as it is, node by node, and has no pure body that could be "
                "differentiated: use SGD, Adam, AdamW or another of vecgym.optim's elementwise optimizers, or let "
                "nothing require grad."
            )
    if segments is not None and any(not x.requires_grad or is_functorch_wrapped_tensor(x) for x in inputs):
        raise ValueError(
            f"segments={segments} is for reverse mode through torch.autograd: inside a transform of torch.func, and in "
            "forward mode (which stores nothing), give segments=None."
        )
