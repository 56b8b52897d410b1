"""Every strategy against its naive twin (`tests/reference`): 50 steps in float64, to 1e-10.

What agrees: the loss of every node at every step, every node's parameters, buffers and inner optimizer state, and
what the strategy itself keeps. Nothing is drawn twice: the twin gets the islands and participants that vecgym drew.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, RMSprop

from tests.helpers import NEEDS_LOOP, Run, assert_close, run, stacked
from tests.models import make_batches, make_model
from tests.reference import common
from tests.reference.allreduce import allreduce
from tests.reference.common import Result
from tests.reference.diloco import diloco
from tests.reference.eager import eager
from tests.reference.fedavg import fedavg
from tests.reference.local_adam import local_adam
from tests.reference.sign_momentum import sign_momentum
from tests.reference.streaming import by_module, e3m0, streaming
from vecgym.strategy import (
    AllReduceStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    DSMStrategy,
    EagerDiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    OptimSpec,
    Strategy,
    StreamingDiLoCoStrategy,
    every,
)

TOLERANCE = 1e-10
STEPS = 50
K = 5
BATCH_SIZE = 3
WARMUP = 8
EXAMPLES = (7, 1, 4, 2, 6)  # what each node's shard is said to hold


def warm_cosine(step: int) -> float:
    """Linear from 0 over WARMUP steps, then a cosine down to 10 % at step STEPS."""
    if step < WARMUP:
        return step / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def warm(step: int) -> float:
    return min(1.0, step / WARMUP)


@dataclass(frozen=True)
class Case:
    make: Callable[[], Strategy]
    twin: Callable[..., Result]  # (model, batches, num_nodes, **who takes part)


CASES: dict[str, Case] = {
    "allreduce-adamw": Case(
        lambda: AllReduceStrategy("adamw", lr=0.01),
        functools.partial(allreduce, inner=(AdamW, {"lr": 0.01})),
    ),
    "allreduce-momentum-clipped-cosine": Case(
        lambda: AllReduceStrategy(
            OptimSpec(SGD, lr=0.1, momentum=0.9), max_norm=0.3, warmup_steps=WARMUP, cosine_anneal=True
        ),
        functools.partial(allreduce, inner=(SGD, {"lr": 0.1, "momentum": 0.9}), max_norm=0.3, schedule=warm_cosine),
    ),
    "fedavg-adamw-warm": Case(
        lambda: FedAvgStrategy("adamw", H=4, lr=0.01, warmup_steps=WARMUP),
        functools.partial(fedavg, H=4, inner=(AdamW, {"lr": 0.01}), schedule=warm),
    ),
    "fedavg-islands-momentum-clipped": Case(
        lambda: FedAvgStrategy(OptimSpec(SGD, lr=0.1, momentum=0.9), H=3, island_size=2, max_norm=0.3),
        functools.partial(fedavg, H=3, inner=(SGD, {"lr": 0.1, "momentum": 0.9}), max_norm=0.3),
    ),
    "fedavg-participation-adamw-cosine": Case(
        lambda: FedAvgStrategy("adamw", H=4, participation=0.6, lr=0.01, warmup_steps=WARMUP, lr_scheduler="cosine"),
        functools.partial(fedavg, H=4, inner=(AdamW, {"lr": 0.01}), schedule=warm_cosine, server=True),
    ),
    "fedavg-participation-weighted-sgd": Case(
        lambda: FedAvgStrategy("sgd", H=3, participation=0.4, weighting="examples", lr=0.1),
        functools.partial(fedavg, H=3, inner=(SGD, {"lr": 0.1}), weights=EXAMPLES, server=True),
    ),
    "fedavg-participation-kept-momentum": Case(
        lambda: FedAvgStrategy(OptimSpec(SGD, lr=0.1, momentum=0.9), H=4, participation=0.6, resting="keep"),
        functools.partial(fedavg, H=4, inner=(SGD, {"lr": 0.1, "momentum": 0.9})),
    ),
    "fedavg-islands-of-participants-rmsprop": Case(
        lambda: FedAvgStrategy("rmsprop", H=2, island_size=2, participation=0.8, lr=0.003, max_norm=0.3),
        functools.partial(fedavg, H=2, inner=(RMSprop, {"lr": 0.003}), max_norm=0.3),
    ),
    "fedavg-weighted-momentum": Case(
        lambda: FedAvgStrategy(OptimSpec(SGD, lr=0.1, momentum=0.9), H=4, weighting="examples"),
        functools.partial(fedavg, H=4, inner=(SGD, {"lr": 0.1, "momentum": 0.9}), weights=EXAMPLES),
    ),
    "diloco-adamw-clipped-cosine": Case(
        lambda: DiLoCoStrategy("adamw", H=5, lr=0.01, max_norm=0.3, warmup_steps=WARMUP, cosine_anneal=True),
        functools.partial(diloco, H=5, inner=(AdamW, {"lr": 0.01}), max_norm=0.3, schedule=warm_cosine),
    ),
    "diloco-momentum-outer-adam": Case(
        lambda: DiLoCoStrategy(OptimSpec(SGD, lr=0.05, momentum=0.9), OptimSpec(Adam, lr=0.02), H=4),
        functools.partial(diloco, H=4, inner=(SGD, {"lr": 0.05, "momentum": 0.9}), outer=(Adam, {"lr": 0.02})),
    ),
    "diloco-rmsprop-outer-sgd": Case(
        lambda: DiLoCoStrategy("rmsprop", OptimSpec(SGD, lr=0.8), H=7, lr=0.003),
        functools.partial(diloco, H=7, inner=(RMSprop, {"lr": 0.003}), outer=(SGD, {"lr": 0.8})),
    ),
    "diloco-restarts-adamw-cosine": Case(
        lambda: DiLoCoStrategy("adamw", H=4, lr=0.01, restart=3, warmup_steps=WARMUP, cosine_anneal=True),
        functools.partial(diloco, H=4, restart=3, inner=(AdamW, {"lr": 0.01}), schedule=warm_cosine),
    ),
    "sign-momentum-adamw-clipped-cosine": Case(
        lambda: DSMStrategy("adamw", H=4, lr=0.01, max_norm=0.3, warmup_steps=WARMUP, cosine_anneal=True),
        functools.partial(sign_momentum, H=4, inner=(AdamW, {"lr": 0.01}), max_norm=0.3, schedule=warm_cosine),
    ),
    "sign-momentum-of-momentum": Case(
        lambda: DSMStrategy(
            OptimSpec(SGD, lr=0.05, momentum=0.9), 3, outer_lr=0.5, betas=(0.8, 0.9), weight_decay=0.0,
            lr_scheduler=lambda step: 0.97**step,
        ),
        functools.partial(
            sign_momentum, H=3, outer_lr=0.5, betas=(0.8, 0.9), weight_decay=0.0,
            inner=(SGD, {"lr": 0.05, "momentum": 0.9}), schedule=lambda step: 0.97**step,
        ),
    ),
    "streaming-adamw-clipped-cosine": Case(
        lambda: StreamingDiLoCoStrategy(
            "adamw", H=6, num_fragments=2, delay=2, lr=0.01, max_norm=0.3, warmup_steps=WARMUP, cosine_anneal=True
        ),
        functools.partial(
            streaming, H=6, fragments=functools.partial(by_module, num_fragments=2), delays=[2] * K,
            alphas=[0.5] * K, inner=(AdamW, {"lr": 0.01}), max_norm=0.3, schedule=warm_cosine,
        ),
    ),
    "streaming-a-delay-and-alpha-for-each-node-outer-adam": Case(
        lambda: StreamingDiLoCoStrategy(
            OptimSpec(SGD, lr=0.05, momentum=0.9), OptimSpec(Adam, lr=0.02), H=5, num_fragments=2,
            delay=[1, 0, 4, 1, 3], alpha=torch.tensor([0.0, 0.2, 0.5, 0.9, 1.0]),
        ),
        functools.partial(
            streaming, H=5, fragments=functools.partial(by_module, num_fragments=2),
            delays=[1, 0, 4, 1, 3], alphas=torch.tensor([0.0, 0.2, 0.5, 0.9, 1.0]).double().tolist(),
            inner=(SGD, {"lr": 0.05, "momentum": 0.9}), outer=(Adam, {"lr": 0.02}),
        ),
    ),
    "streaming-4-bits-rmsprop": Case(
        lambda: StreamingDiLoCoStrategy("rmsprop", H=4, num_fragments=2, delay=1, alpha=0.25, bits=4, lr=0.003),
        functools.partial(
            streaming, H=4, fragments=functools.partial(by_module, num_fragments=2), delays=[1] * K,
            alphas=[0.25] * K, code=e3m0, inner=(RMSprop, {"lr": 0.003}),
        ),
    ),
    "eager-adamw-clipped-cosine": Case(
        lambda: EagerDiLoCoStrategy("adamw", H=5, lr=0.01, max_norm=0.3, warmup_steps=WARMUP, cosine_anneal=True),
        functools.partial(eager, H=5, inner=(AdamW, {"lr": 0.01}), max_norm=0.3, schedule=warm_cosine),
    ),
    "eager-momentum-outer-adam": Case(
        lambda: EagerDiLoCoStrategy(OptimSpec(SGD, lr=0.05, momentum=0.9), OptimSpec(Adam, lr=0.02), H=4),
        functools.partial(eager, H=4, inner=(SGD, {"lr": 0.05, "momentum": 0.9}), outer=(Adam, {"lr": 0.02})),
    ),
    "local-adam-clipped-warm": Case(
        lambda: CommunicateOptimizeStrategy(
            [AveragingCommunicator(H=4), every(4, Exchange(Mean(), of="moments"))],
            "adamw",
            lr=0.01,
            max_norm=0.3,
            warmup_steps=WARMUP,
        ),
        functools.partial(
            local_adam,
            H=4,
            moments={"exp_avg": 4, "exp_avg_sq": 4},
            inner=(AdamW, {"lr": 0.01}),
            max_norm=0.3,
            schedule=warm,
        ),
    ),
    "des-loc": Case(
        lambda: CommunicateOptimizeStrategy(
            [
                Exchange(Mean(), every=3, of="exp_avg"),
                Exchange(Mean(), every=6, of="exp_avg_sq"),
                AveragingCommunicator(H=2),
            ],
            "adam",
            lr=0.01,
        ),
        functools.partial(local_adam, H=2, moments={"exp_avg": 3, "exp_avg_sq": 6}, inner=(Adam, {"lr": 0.01})),
    ),
}  # fmt: skip
ONE_OF_EACH = [
    "allreduce-momentum-clipped-cosine",
    "fedavg-islands-of-participants-rmsprop",
    "diloco-adamw-clipped-cosine",
]
LIGHT = ["MLP", "CNN", "WithFrozen", "DataDependent"]
OTHERS = ["GPT", "LSTM", "DictBatch", "Checkpointed"]  # slow, or like another one
ENGINES = ["vmap", "loop"]


def runnable(models: list[str]) -> list[tuple[str, str]]:
    """(model, engine) for each engine that can run the model."""
    return [(model, engine) for model in models for engine in ENGINES if engine == "loop" or model not in NEEDS_LOOP]


@functools.cache
def data(model: str, num_nodes: int) -> list[list[Any]]:
    return make_batches(model, STEPS, num_nodes, BATCH_SIZE, dtype=torch.float64)


@functools.cache
def twin(case: str, model: str, num_nodes: int, groups: Any, active: Any) -> Result:
    """The naive run, once for all engines."""
    who: dict[str, Any] = {}
    if any(groups):
        who["islands"] = lambda step: [list(island) for island in groups[step]]
    if any(active):
        who["participants"] = lambda step: list(active[step])
    start = make_model(model, dtype=torch.float64)
    return CASES[case].twin(start, data(model, num_nodes), num_nodes, **who)


def check(case: str, model: str, num_nodes: int, **settings: Any) -> Run:
    """Run vecgym and the twin, and compare all that they hold."""
    start = make_model(model, dtype=torch.float64)
    batches = stacked(data(model, num_nodes))
    ours = run(start, CASES[case].make(), batches, num_examples=EXAMPLES[:num_nodes], **settings)
    theirs = twin(case, model, num_nodes, tuple(ours.groups), tuple(ours.active))
    assert_close(ours.losses, theirs.losses, TOLERANCE, "losses")
    params = [common.parameters(m) for m in theirs.models]
    assert_close(ours.params, {name: torch.stack([p[name] for p in params]) for name in params[0]}, TOLERANCE, "params")
    buffers = [dict(m.named_buffers()) for m in theirs.models]
    assert_close(ours.buffers, {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]}, TOLERANCE)
    for i, (p, optimizer) in enumerate(zip(params, theirs.optimizers)):
        held = {
            slot: {name: node(x, i) for name, x in values.items()}
            for slot, values in ours.state.home["optimizer"].items()
        }
        expected = {slot: {name: optimizer.state[p[name]][slot] for name in p} for slot in held}
        assert_close(held, expected, TOLERANCE, f"inner optimizer of node {i}")
    if theirs.outer:
        assert theirs.outer_optimizer is not None
        outer = {name: ours.state.shared[f"0.0/{name}"] for name in ("params", "outer")}
        assert_close({name: x[0] for name, x in outer["params"].items()}, theirs.outer, TOLERANCE, "outer parameters")
        held = {slot: {name: x[0] for name, x in values.items()} for slot, values in outer["outer"].items()}
        state = theirs.outer_optimizer.state
        expected = {slot: {name: state[p][slot] for name, p in theirs.outer.items()} for slot in held}
        assert_close(held, expected, TOLERANCE, "outer optimizer")
    return ours


def node(x: Tensor, i: int) -> Tensor:
    return x[i if x.shape[0] > 1 else 0]


@pytest.mark.parametrize(("model", "engine"), runnable(LIGHT))
@pytest.mark.parametrize("case", CASES)
def test_every_strategy_equals_its_twin(case: str, model: str, engine: str) -> None:
    check(case, model, K, engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "engine"), runnable(OTHERS))
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_strategies_on_other_models_equal_their_twins(case: str, model: str, engine: str) -> None:
    check(case, model, K, engine=engine)


@pytest.mark.parametrize("model", NEEDS_LOOP)
def test_what_vmap_cannot_run_is_refused_with_the_way_out(model: str) -> None:
    with pytest.raises(RuntimeError, match='engine="loop"'):
        check("allreduce-adamw", model, 2, engine="vmap")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", ["MLP", "CNN"])
@pytest.mark.parametrize(
    ("case", "num_nodes"),
    [(case, K) for case in ONE_OF_EACH for K in (1, 2) if K == 2 or "islands" not in case],  # of two nodes
)
def test_few_nodes_equal_their_twins(case: str, num_nodes: int, model: str, engine: str) -> None:
    check(case, model, num_nodes, engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk_size", "node_threads"), [(None, 1), (1, 1), (2, 1), (None, 2), (1, 2), (2, 2)])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("case", "model"), [(case, "MLP") for case in ONE_OF_EACH] + [(ONE_OF_EACH[1], "CNN")])
def test_chunks_and_threads_equal_the_twin(
    case: str, model: str, engine: str, chunk_size: int | None, node_threads: int
) -> None:
    check(case, model, K, engine=engine, chunk_size=chunk_size, node_threads=node_threads)


@pytest.mark.parametrize("engine", ENGINES)
def test_chunks_and_threads_on_attention_equal_the_twin(engine: str) -> None:
    check(ONE_OF_EACH[2], "GPT", K, engine=engine, chunk_size=2, node_threads=2)


@pytest.mark.parametrize("case", ["fedavg-islands-momentum-clipped", "fedavg-islands-of-participants-rmsprop"])
def test_what_was_drawn_is_what_was_asked_for(case: str) -> None:
    """Islands of two partition those who take part, who stay the same for a round; each round draws anew."""
    ours = check(case, "MLP", K)
    H = 3 if "momentum" in case else 2
    for step in range(STEPS):
        present = ours.active[step] or tuple(range(K))
        assert len(present) == (K if "momentum" in case else 4)
        assert present == (ours.active[step - step % H] or present)
        islands = ours.groups[step]
        assert (islands is not None) == ((step + 1) % H == 0)
        if islands is not None:
            assert sorted(sum(islands, ())) == list(present)
            assert sorted(len(island) for island in islands) == ([1, 2, 2] if len(present) == 5 else [2, 2])
    assert len(set(ours.groups)) > 5
    assert "participants" not in case or len(set(ours.active)) > 3


# ------------------------------------------------------------------------------- gradient accumulation


@pytest.mark.parametrize(
    ("model", "engine", "minibatch_size"),
    [(*pair, size) for pair in runnable(["MLP", "DictBatch"]) for size in (1, 2, 3)]
    + [(*pair, 3) for pair in runnable(["GPT", "LSTM"])],  # 3 leaves a part of 1, which weighs less
)
@pytest.mark.parametrize(
    "case", ["allreduce-adamw", "fedavg-participation-adamw-cosine", "diloco-adamw-clipped-cosine"]
)
def test_accumulated_gradients_equal_those_of_the_whole_batch(
    case: str, model: str, engine: str, minibatch_size: int
) -> None:
    start = make_model(model, dtype=torch.float64)
    batches = stacked(make_batches(model, 8, 3, 4, dtype=torch.float64))
    whole = run(start, CASES[case].make(), batches, engine=engine)
    parts = run(start, CASES[case].make(), batches, engine=engine, minibatch_size=minibatch_size)
    assert_close(parts.losses, whole.losses, TOLERANCE, "losses")
    assert_close(parts.state, whole.state, TOLERANCE, "state")
