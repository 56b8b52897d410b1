"""The promises of the design beyond training: derivatives through a run, configurations in one run, own modules."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, AdamW, Optimizer

from tests.helpers import (
    Run,
    advance,
    assert_close,
    assert_same_bits,
    difference,
    run,
    stack,
    stacked,
)
from tests.models import make_batches, make_model
from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import Ledger
from vecgym.core import nodes, tree
from vecgym.core.tree import Tree
from vecgym.engine import Engine
from vecgym.engine.stateless import TwiceDifferentiable
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Batches, Part, Request
from vecgym.simulation.stack import Stack, groups_of
from vecgym.simulation.state import State
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import (
    AllReduceStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    Outer,
    Strategy,
)
from vecgym.strategy.simulated import simulation_of
from vecgym.strategy.stages import Average, Memory

K = 3
STEPS = 8
H = 4

# ------------------------------------------------------------------------------- (a) derivatives of a run

NAMES = ["inner lr", "outer lr", "momentum"]
INNER: dict[str, tuple[type[Optimizer], float]] = {"sgd": (SGD, 0.1), "adamw": (AdamW, 0.005)}


class Unroll:
    """The final loss of the averaged model as a function of (inner lr, outer lr, momentum)."""

    def __init__(self, model: str, inner: str) -> None:
        self.optimizer, lr = INNER[inner]
        self.values = (lr, 0.7, 0.9)
        self.model = make_model(model, dtype=torch.float64)
        self.batches = stacked(make_batches(model, STEPS, K, dtype=torch.float64))
        self.held_out = make_batches(model, 1, 1, batch_size=16, seed=1, dtype=torch.float64)[0][0]
        self.evaluated = copy.deepcopy(self.model).eval()
        self.engine = Engine(self.model, engine="vmap")
        self.engine.prepare(self.batches[0])

    def strategy(self, lr: Any, outer_lr: Any, momentum: Any) -> Strategy:
        outer = OptimSpec(SGD, lr=outer_lr, momentum=momentum, nesterov=True)
        return DiLoCoStrategy(OptimSpec(self.optimizer, lr=lr), outer, H=H)

    def __call__(self, *hyper: Any, differentiable: bool = True) -> Tensor:
        comm = StackedCollectives(K)
        sim = simulation_of(self.model, self.strategy(*hyper), comm, engine=self.engine, max_steps=STEPS)
        state = sim.init()
        for batch in self.batches:
            state, _ = sim.step(state, batch, pure=differentiable)
        average = {**nodes.mean(state.params), **nodes.mean(state.buffers)}
        with TwiceDifferentiable(), sdpa_kernel(SDPBackend.MATH):
            return functional_call(self.evaluated, average, (self.held_out,))

    def tensors(self) -> list[Tensor]:
        return [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in self.values]

    def slopes(self) -> list[float]:
        """Central differences of the donating step, whose code is another than that of the pure one."""
        found = []
        for i, value in enumerate(self.values):
            step = 1e-5 * value
            up, down = ([v + (s * step if j == i else 0) for j, v in enumerate(self.values)] for s in (1, -1))
            rise = self(*up, differentiable=False) - self(*down, differentiable=False)
            found.append(float(rise) / (2 * step))
        return found


unroll = functools.cache(Unroll)
EACH = pytest.mark.parametrize(("model", "inner"), [(m, i) for m in ("MLP", "GPT", "CNN") for i in INNER])


@EACH
def test_reverse_mode_equals_finite_differences(model: str, inner: str) -> None:
    f = unroll(model, inner)
    hyper = f.tensors()
    loss = f(*hyper)
    assert_close(loss, f(*f.values, differentiable=False), 1e-12)
    for name, found, expected in zip(NAMES, torch.autograd.grad(loss, hyper), f.slopes()):
        assert found.item() == pytest.approx(expected, rel=1e-6), name
        assert abs(expected) > 1e-4, f"{name} has too little effect to be tested"


@pytest.mark.parametrize(("model", "inner"), [("MLP", "sgd"), ("MLP", "adamw"), ("CNN", "sgd"), ("GPT", "adamw")])
def test_forward_mode_equals_reverse_mode(model: str, inner: str) -> None:
    """The engine is prepared outside: looking at the model takes a backward pass of its own."""
    f = unroll(model, inner)
    hyper = f.tensors()
    expected = torch.autograd.grad(f(*hyper), hyper)
    points = tuple(x.detach() for x in hyper)
    for i in range(len(points)):
        tangents = tuple(torch.ones_like(x) if j == i else torch.zeros_like(x) for j, x in enumerate(points))
        slope = jvp(f, points, tangents)[1]
        assert_close(slope, expected[i], 1e-10, NAMES[i])


@pytest.mark.parametrize(("model", "inner"), [("MLP", "sgd"), ("MLP", "adamw"), ("CNN", "adamw"), ("GPT", "sgd")])
def test_second_derivatives_equal_differences_of_first(model: str, inner: str) -> None:
    f = unroll(model, inner)

    def gradient(values: list[float]) -> Tensor:
        hyper = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values]
        return torch.stack(torch.autograd.grad(f(*hyper), hyper))

    hyper = f.tensors()
    first = torch.autograd.grad(f(*hyper), hyper, create_graph=True)
    hessian = torch.stack([torch.stack(torch.autograd.grad(g, hyper, retain_graph=True)) for g in first])
    assert_close(hessian, hessian.T, 1e-9, "symmetry")
    for i, value in enumerate(f.values):
        step = 1e-4 * value
        up, down = ([v + (s * step if j == i else 0) for j, v in enumerate(f.values)] for s in (1, -1))
        expected = (gradient(up) - gradient(down)) / (2 * step)
        torch.testing.assert_close(hessian[i], expected, rtol=1e-4, atol=1e-6)


def test_derivatives_by_the_initial_parameters() -> None:
    """State is explicit: a run can be differentiated in where it starts from, too."""
    f = unroll("MLP", "adamw")
    sim = simulation_of(f.model, f.strategy(*f.values), StackedCollectives(K), engine=f.engine, max_steps=STEPS)
    initial = {name: p.detach()[None].clone().requires_grad_() for name, p in f.model.named_parameters()}

    def final(params: Tree) -> Tensor:
        state = sim.init(params)
        for batch in f.batches:
            state, row = sim.step(state, batch, pure=True)
        return row.losses.sum()

    gradient = torch.autograd.grad(final(initial), list(initial.values()))
    towards = {
        n: torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(0)) for n, p in initial.items()
    }
    expected = sum(float((g * towards[name]).sum()) for g, name in zip(gradient, initial))
    with torch.no_grad():
        up, down = (final({n: p + s * 1e-6 * towards[n] for n, p in initial.items()}) for s in (1, -1))
    assert float(up - down) / 2e-6 == pytest.approx(expected, rel=1e-6)


def test_the_donating_step_refuses_what_it_cannot_differentiate() -> None:
    f = unroll("MLP", "sgd")
    with pytest.raises(ValueError, match="requires grad"):
        f(*f.tensors(), differentiable=False)


# -------------------------------------------------------------- (b) configurations as the rows of one run


Configured = Callable[[Any, Any], Strategy]  # (inner lr, outer lr)

FOLDED: dict[str, Configured] = {
    "allreduce": lambda optim, outer: AllReduceStrategy(optim, max_norm=0.5),
    "fedavg": lambda optim, outer: FedAvgStrategy(optim, H=3),
    "fedavg-islands": lambda optim, outer: FedAvgStrategy(optim, H=2, island_size=2, warmup_steps=3),
    "fedavg-participation": lambda optim, outer: FedAvgStrategy(optim, H=2, participation=0.7, cosine_anneal=True),
    "fedprox-participation": lambda optim, outer: FedAvgStrategy(optim, H=2, participation=0.7, proximal_mu=outer),
    "fedavg-server": lambda optim, outer: FedAvgStrategy(
        optim, H=2, participation=0.7, server_optim="adam", server_lr=outer
    ),
    "diloco": lambda optim, outer: DiLoCoStrategy(optim, OptimSpec(SGD, lr=outer, momentum=0.9, nesterov=True), H=3),
    "diloco-outer-adam": lambda optim, outer: DiLoCoStrategy(optim, OptimSpec("adam", lr=outer), H=3),
    "islands-and-diloco": lambda optim, outer: CommunicateOptimizeStrategy(
        [AveragingCommunicator(island_size=2), Exchange(Outer(Mean(), OptimSpec(SGD, lr=outer)), every=3)], optim
    ),
}
RATES: dict[str, tuple[float, float]] = {"sgd": (0.1, 0.3), "adamw": (0.003, 0.02)}
OUTER_RATES = (0.7, 0.4)


class Both(NamedTuple):
    """Two configurations in one run."""

    losses: Tensor  # [steps, 2 K]
    states: list[State]  # of each
    ledgers: list[Ledger]  # of each


def rows_of_one_run(
    strategies: Sequence[Strategy], model: nn.Module, own: list[list[Any]], *, engine: str = "vmap",
    chunk_size: int | None = None, node_threads: int | None = 1, differentiable: bool = False,
) -> Both:  # fmt: skip
    """Train both in one stack; `own[c]` are the batches of configuration c."""
    batches = [tree.map_leaves(lambda x: x.flatten(0, 1), stack(pair)) for pair in zip(*own)]  # [2 K, B, ...]
    order, groups = groups_of(strategies, [RunFacts(K, len(batches))] * 2)
    assert order == [0, 1]
    local = Engine(model, engine=engine, chunk_size=chunk_size, node_threads=node_threads)
    local.prepare(batches[0])

    def read(requests: Iterator[Request], step: int = 0) -> Batches:
        return ((tree.map_leaves(lambda x: x[rows], batches[step]), None) for rows, _ in requests)  # noqa: B023

    simulation = Stack(local, groups, StackedCollectives(K), read)
    state, losses, ledgers = simulation.init(), [], [Ledger(), Ledger()]
    for step, events in enumerate(simulation.timetable.ticks()):
        stream = read(simulation.requests(iter([events])), step)
        state, row = simulation.tick(state, events, stream, pure=differentiable)
        losses.append(row.losses)
        for c, ledger in enumerate(ledgers):
            mine = simulation.group_with(c)
            ledger.add(row.tick - 1, [t for t, group in zip(row.transfers, row.groups) if group == mine])
    return Both(torch.stack(losses), [simulation.alone(state, c) for c in range(2)], ledgers)


def fold(
    make: Configured, model: nn.Module, own: list[list[Any]], rates: tuple[float, float], **settings: Any
) -> tuple[Both, list[Run]]:
    """Both configurations in one run, and each by itself."""
    strategies = [make(rates[c], OUTER_RATES[c]) for c in range(2)]
    together = rows_of_one_run(strategies, model, own, **settings)
    return together, [run(model, strategies[c], own[c], **settings) for c in range(2)]


def check_fold(together: Both, alone: list[Run]) -> None:
    for c in range(2):
        mine, state = slice(c * K, (c + 1) * K), together.states[c]
        assert_close(together.losses[:, mine], alone[c].losses, 1e-12, f"losses of {c}")
        assert_close(nodes.expand(state.params, K), alone[c].params, 1e-12, f"params of {c}")
        assert_close(nodes.expand(state.buffers, K), alone[c].buffers, 1e-12, f"buffers of {c}")
        assert list(together.ledgers[c]) == list(alone[c].comm.ledger)  # bytes of one node of one configuration
    assert difference(alone[0].params, alone[1].params) > 1e-3


@pytest.mark.parametrize("data", ["same batches", "own batches"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", FOLDED)
def test_two_configurations_in_one_run_equal_two_runs(name: str, optimizer: str, data: str) -> None:
    own = [stacked(make_batches("CNN", 7, K, seed=s, dtype=torch.float64)) for s in (0, 0 if data[0] == "s" else 1)]
    model = make_model("CNN", dtype=torch.float64)
    make: Configured = lambda lr, outer: FOLDED[name](OptimSpec(optimizer, lr=lr), outer)  # noqa: E731
    check_fold(*fold(make, model, own, RATES[optimizer]))


@pytest.mark.parametrize(
    "settings", [{"engine": "loop"}, {"chunk_size": 2, "node_threads": 2}, {"differentiable": True}]
)
@pytest.mark.parametrize("name", ["allreduce", "fedavg-participation", "diloco"])
def test_configurations_fold_in_every_engine(name: str, settings: dict[str, Any]) -> None:
    own = [stacked(make_batches("MLP", 5, K, seed=s, dtype=torch.float64)) for s in (0, 1)]
    make: Configured = lambda lr, outer: FOLDED[name](OptimSpec("adamw", lr=lr), outer)  # noqa: E731
    check_fold(*fold(make, make_model("MLP", dtype=torch.float64), own, RATES["adamw"], **settings))


@pytest.mark.parametrize("name", FOLDED)
def test_a_configuration_has_its_own_derivative(name: str) -> None:
    """d(sum of final losses)/d(learning rates `[2]`): each entry that of its configuration's own run."""
    own = [stacked(make_batches("MLP", 5, K, seed=s, dtype=torch.float64)) for s in (0, 1)]
    model = make_model("MLP", dtype=torch.float64)
    make: Configured = lambda lr, outer: FOLDED[name](OptimSpec(SGD, lr=lr), outer)  # noqa: E731
    rates = torch.tensor(RATES["sgd"], dtype=torch.float64, requires_grad=True)
    strategies = [make(rates[c], OUTER_RATES[c]) for c in range(2)]
    result = rows_of_one_run(strategies, model, own, differentiable=True)
    (found,) = torch.autograd.grad(result.losses[-1].nansum(), rates)
    for c in range(2):
        rate = rates[c].detach().requires_grad_()
        alone = run(model, make(rate, OUTER_RATES[c]), own[c], differentiable=True)
        (expected,) = torch.autograd.grad(alone.losses[-1].nansum(), rate)
        assert_close(found[c], expected, 1e-10, f"configuration {c}")


# --------------------------------------------------------------------------- (c) a user's own average


class QuantisedAverage(Average):
    """The nodes average what they have moved since the last exchange, rounded to multiples of `step`.

    theta <- theta_0 + mean_i Q(theta_i - theta_0), with the rounding passed over by derivatives.
    """

    def __init__(self, step: float) -> None:
        self.step = step

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        memory.shared["last"] = values

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        moved = tree.map(torch.sub, x, memory.shared["last"])
        rounded = tree.map(lambda y: y + ((y / self.step).round() * self.step - y).detach(), moved)
        memory.shared["last"] = tree.map(torch.add, memory.shared["last"], part.comm.mean(rounded))
        return dict(memory.shared["last"])


def quantised(lr: Any, outer: Any = None) -> Strategy:
    return CommunicateOptimizeStrategy([Exchange(QuantisedAverage(0.01), every=2)], OptimSpec(SGD, lr=lr, momentum=0.9))


@pytest.mark.parametrize("settings", [{}, {"engine": "loop"}, {"chunk_size": 1}, {"differentiable": True}])
def test_an_own_average_runs_stacked(settings: dict[str, Any]) -> None:
    """... and gives what the loop over modules gives that a user would write to check it."""
    model = make_model("MLP", dtype=torch.float64)
    batches = make_batches("MLP", 5, K, dtype=torch.float64)
    result = run(model, quantised(0.1), stacked(batches), **settings)
    modules = [make_model("MLP", dtype=torch.float64) for _ in range(K)]
    optimizers = [SGD(node.parameters(), lr=0.1, momentum=0.9) for node in modules]
    last = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step, of_nodes in enumerate(batches):
        for node, optimizer, batch in zip(modules, optimizers, of_nodes):
            optimizer.zero_grad()
            node(batch).backward()
            optimizer.step()
        if (step + 1) % 2 == 0:
            with torch.no_grad():
                for name in last:
                    moves = [((node.get_parameter(name) - last[name]) / 0.01).round() * 0.01 for node in modules]
                    last[name] = last[name] + sum(moves) / K
                    for node in modules:
                        node.get_parameter(name).copy_(last[name])
    assert_close(result.params, {n: torch.stack([node.get_parameter(n) for node in modules]) for n in last}, 1e-12)
    assert {entry.step for entry in result.comm.ledger} == {1, 3}


def test_an_own_module_is_differentiable() -> None:
    model = make_model("MLP", dtype=torch.float64)
    batches = stacked(make_batches("MLP", 5, K, dtype=torch.float64))

    def final(lr: Any, differentiable: bool = True) -> Tensor:
        return run(model, fine(lr), batches, differentiable=differentiable).losses[-1].sum()

    def fine(lr: Any) -> Strategy:  # so fine a grid that the rounding passed over does not matter
        exchange = Exchange(QuantisedAverage(1e-13), every=2)
        return CommunicateOptimizeStrategy([exchange], OptimSpec(SGD, lr=lr, momentum=0.9))

    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(final(lr), lr)
    expected = float(final(0.1 + 1e-5, False) - final(0.1 - 1e-5, False)) / 2e-5
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_own_modules_are_groups_of_their_own_in_a_stack() -> None:
    own = [stacked(make_batches("MLP", 7, K, seed=s, dtype=torch.float64)) for s in (0, 1)]
    check_fold(*fold(quantised, make_model("MLP", dtype=torch.float64), own, (0.02, 0.1)))


def test_an_own_module_continues_from_a_saved_state() -> None:
    model = make_model("MLP", dtype=torch.float64)
    batches = stacked(make_batches("MLP", 7, K, dtype=torch.float64))
    whole = run(model, quantised(0.1), batches)
    first = run(model, quantised(0.1), batches[:3], max_steps=7)
    engine = Engine(model)
    engine.prepare(batches[0])
    sim = simulation_of(model, quantised(0.1), StackedCollectives(K), engine=engine, max_steps=7)
    sim.init()
    assert_same_bits(advance(sim, first.state, batches[3:]).state, whole.state)
