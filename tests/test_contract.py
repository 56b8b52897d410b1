"""What a user's module may do, and what it is told when it does something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fitting import dataset, fit, params
from tests.helpers import CommunicationModule, Context, assert_close, run, stacked
from tests.models import make_batches, make_model
from vecgym import sweep
from vecgym.collectives import StackedCollectives
from vecgym.optim import OptimSpec
from vecgym.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import (
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    Exchange,
    Mean,
    Strategy,
    every,
)

K, STEPS = 3, 4


def strategy(*modules: Any, **settings: Any) -> Strategy:
    return CommunicateOptimizeStrategy(list(modules), **{"inner_optim": "sgd", "lr": 0.1, **settings})


def trained(*modules: Any, num_nodes: int = K, steps: int = STEPS, **settings: Any) -> Any:
    batches = stacked(make_batches("MLP", steps, num_nodes, dtype=torch.float64))
    return run(make_model("MLP", dtype=torch.float64), strategy(*modules, **settings), batches)


class Mine(CommunicationModule):
    """A user's module, made of functions."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self._methods = methods

    def init(self, params: Any, ctx: Any) -> Any:
        return self._methods["init"](params, ctx) if "init" in self._methods else {}

    def local_gradients(self, grads: Any, params: Any, state: Any, ctx: Any) -> Any:
        own = self._methods.get("local_gradients")
        return own(grads, params, state, ctx) if own else grads

    def exchange_parameters(self, params: Any, state: Any, ctx: Any) -> Any:
        own = self._methods.get("exchange_parameters")
        return own(params, state, ctx) if own else (params, state)


class Gradients(Mine):
    def exchange_gradients(self, grads: Any, state: Any, ctx: Any) -> Any:
        own = self._methods.get("exchange_gradients")
        return own(grads, state, ctx) if own else (grads, state)


class Resting(Mine):
    def active_nodes(self, ctx: Any) -> Any:
        return self._methods["active_nodes"](ctx)


# ------------------------------------------------------------------------------------------------ who trains


class Both(Resting, Gradients):
    pass


class Around(Gradients):
    """A user's wrapper, which has its own exchange of gradients."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    "modules",
    [
        [AveragingCommunicator(participation=0.5), Gradients()],
        [Resting(active_nodes=lambda ctx: [0]), Exchange(Mean(), of="gradients")],
        [every(2, Resting(active_nodes=lambda ctx: [0])), every(2, Exchange(Mean(), of="gradients"))],
        [Both(active_nodes=lambda ctx: [0])],
        [AveragingCommunicator(participation=0.5), Around(AveragingCommunicator())],
    ],
    ids=lambda modules: "-".join(type(module).__name__ for module in modules),
)
def test_an_exchange_of_gradients_is_never_skipped_without_a_word(modules: list[Any]) -> None:
    with pytest.raises(ValueError, match="lets some nodes sit out, and"):
        strategy(*modules)


def test_what_lets_everybody_train_goes_with_gradients() -> None:
    strategy(AveragingCommunicator(participation=1), Exchange(Mean(), of="gradients"))
    strategy(every(2, Exchange(Mean(), delay=1)), Gradients())


@pytest.mark.parametrize(
    "nodes", [[3], [-1], [0, 0], [0.0], [True, False], "01", 1, [None], torch.tensor([0, 1]), {0, 1}], ids=repr
)
def test_what_are_no_nodes_is_refused(nodes: Any) -> None:
    with pytest.raises(ValueError, match=r"Resting\(\)\.active_nodes returned .* node ids, 0 to 2"):
        trained(Resting(active_nodes=lambda ctx: nodes))


def test_integers_of_numpy_are_nodes() -> None:
    result = trained(Resting(active_nodes=lambda ctx: [np.int64(2), 0]))
    assert result.active == [(0, 2)] * STEPS


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_a_step_in_which_nobody_trains(engine: str) -> None:
    """Everything stays, losses are nan, and the exchange takes place."""
    resting = Resting(active_nodes=lambda ctx: [] if ctx.step in (0, 2) else [0, 2])
    seen = dataset("MLP", 12)
    trainer, _ = fit(
        "MLP", strategy(resting, AveragingCommunicator(H=2), inner_optim="adam", lr=0.01), num_nodes=K, max_steps=4,
        data=dataset("MLP", 24), val=seen, val_interval=1, engine=engine,
    )  # fmt: skip
    losses = trainer.history.node_array()
    assert np.isnan(losses).tolist() == [[True] * 3, [False, True, False]] * 2
    assert np.isnan(trainer.history.series("train_loss")[1]).tolist() == [True, False] * 2
    val = trainer.history.series("val_loss")[1]
    assert np.isfinite(val).all()
    never, model = fit("MLP", strategy(Resting(active_nodes=lambda ctx: [])), max_steps=3, data=seen, engine=engine)
    start = make_model("MLP")
    assert all(torch.equal(p, start.get_parameter(name)) for name, p in model.named_parameters())
    assert torch.equal(params(never), params(never)[:1].expand(3, -1))


def test_two_modules_may_leave_nobody() -> None:
    result = trained(Resting(active_nodes=lambda ctx: [0]), Resting(active_nodes=lambda ctx: [1, 2]))
    assert result.losses.isnan().all()
    assert result.active == [()] * STEPS


def test_nobody_communicates_while_some_rest() -> None:
    talks = Mine(local_gradients=lambda grads, params, state, ctx: ctx.comm.mean(grads))
    trained(talks)
    with pytest.raises(ValueError, match=r"Mine\(\)\.local_gradients calls ctx\.comm\.mean in a step"):
        trained(talks, AveragingCommunicator(participation=0.5))
    asks = Mine(local_gradients=lambda grads, params, state, ctx: grads if ctx.comm.num_nodes == K else None)
    trained(asks, AveragingCommunicator(participation=0.5))


# -------------------------------------------------------------------------------------------- what comes back


def one_name(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"first.weight": tree["first.weight"]}


def flat(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.flatten() for name, x in tree.items()}


def two_rows(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x[:1].expand(2, *x.shape[1:]) for name, x in tree.items()}


def numbers(tree: dict[str, Tensor]) -> dict[str, Any]:
    return dict.fromkeys(tree, 1.0)


TREES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "nothing": (lambda tree: None, TypeError, "None as"),
    "a list": (lambda tree: list(tree.values()), TypeError, "a list as"),
    "one name": (one_name, ValueError, "leaves out"),
    "another name": (lambda tree: {**tree, "other": torch.zeros(1)}, ValueError, "adds other; expected the names"),
    "flat": (flat, ValueError, r"in shape \[\d+\]; expected \[1 or 3, \d+"),
    "two nodes of three": (two_rows, ValueError, r"in shape \[2, .*expected \[1 or 3, "),
    "numbers": (numbers, TypeError, "a float for"),
}
STATES: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (None, TypeError, "None as state; a state is a dict of tensors"),
    "a tensor": (torch.zeros(1), TypeError, "a Tensor as state"),
    "no nodes": ({"count": torch.tensor(3)}, ValueError, r"state\['count'\] in shape \[\]"),
    "two nodes of three": ({"count": torch.zeros(2, 5)}, ValueError, r"shape \[2, 5\] with L = 3"),
}


@pytest.mark.parametrize("method", ["local_gradients", "exchange_gradients", "exchange_parameters"])
@pytest.mark.parametrize("case", TREES)
def test_a_tree_that_is_none_names_module_method_and_what_is_expected(case: str, method: str) -> None:
    spoil, error, message = TREES[case]
    with_state = method != "local_gradients"

    def own(tree: Any, *others: Any) -> Any:
        return (spoil(tree), others[0]) if with_state else spoil(tree)

    module = Gradients(**{method: own}) if method == "exchange_gradients" else Mine(**{method: own})
    with pytest.raises(error, match=rf"{type(module).__name__}\(\)\.{method} returned .*{message}"):
        trained(module)


@pytest.mark.parametrize("method", ["exchange_gradients", "exchange_parameters"])
@pytest.mark.parametrize("wrong", [None, {}, [{}, {}], ({},), ({}, {}, {})], ids=repr)
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: every(1, m), lambda m: every(2, m)])
def test_an_exchange_that_gives_no_pair(wrong: Any, method: str, wrap: Any) -> None:
    module = Gradients(**{method: lambda tree, state, ctx: wrong})
    with pytest.raises(TypeError, match=rf"Gradients\(\)\)?\.{method} returned .*tuple of two"):
        trained(wrap(module))


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("method", ["init", "exchange_parameters"])
def test_a_state_that_is_none(case: str, method: str) -> None:
    state, error, message = STATES[case]
    own = (lambda params, ctx: state) if method == "init" else (lambda params, old, ctx: (params, state))
    with pytest.raises(error, match=rf"Mine\(\)\.{method}.*{message}"):
        trained(Mine(**{method: own}))


def test_a_state_may_hold_plain_values() -> None:
    def own(params: Any, state: Any, ctx: Any) -> Any:
        return params, {"count": state["count"] + 1, "of": {3: "a text"}}

    result = trained(Mine(init=lambda params, ctx: {"count": 0, "of": {}}, exchange_parameters=own))
    assert result.state.shared["0/state"] == {"count": STEPS, "of": {3: "a text"}}


def test_with_participation_local_gradients_are_of_those_who_train() -> None:
    def own(grads: Any, params: Any, state: Any, ctx: Any) -> Any:
        return {name: x[:1].expand(3, *x.shape[1:]) for name, x in grads.items()}

    with pytest.raises(ValueError, match=r"expected \[1 or 2, "):
        trained(Mine(local_gradients=own), AveragingCommunicator(participation=0.6))


# ------------------------------------------------------------------------------------ the learning rate


class Recorder(CommunicationModule):
    """It notes the learning rate that it is told, wherever it is asked something."""

    def __init__(self) -> None:
        self._seen: dict[str, list[Any]] = {}

    def _note(self, what: str, ctx: Context) -> None:
        self._seen.setdefault(what, []).append(ctx.lr)

    def init(self, params: Any, ctx: Any) -> Any:
        self._note("init", ctx)
        return {}

    def local_gradients(self, grads: Any, params: Any, state: Any, ctx: Any) -> Any:
        self._note("local_gradients", ctx)
        return grads

    def exchange_gradients(self, grads: Any, state: Any, ctx: Any) -> Any:
        self._note("exchange_gradients", ctx)
        return grads, state

    def exchange_parameters(self, params: Any, state: Any, ctx: Any) -> Any:
        self._note("exchange_parameters", ctx)
        return params, state


def test_a_module_is_told_the_inner_learning_rate_of_each_step() -> None:
    """Schedule and warm-up included; inside of every(2, ...), where time counts in exchanges, that of the true step."""
    module, rare = Recorder(), Recorder()
    trained(module, every(2, rare), warmup_steps=2, cosine_anneal=True, steps=6)
    made = strategy(warmup_steps=2, cosine_anneal=True)
    expected = [made.rates(made.timetable(RunFacts(K, 6)), step)[0] for step in range(6)]
    assert len(set(expected)) == 6
    phases = ["local_gradients", "exchange_gradients", "exchange_parameters"]
    assert set(module._seen.pop("init")) == {expected[0]}
    assert module._seen == dict.fromkeys(phases, expected)
    assert rare._seen["exchange_parameters"] == expected[1::2]


def test_it_is_a_tensor_where_that_of_the_strategy_is_one() -> None:
    each, rates = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), torch.rand(STEPS, K, dtype=torch.float64)
    one, two = Recorder(), Recorder()
    trained(one, inner_optim=OptimSpec("sgd", lr=each), lr=None)
    assert all(torch.equal(lr, each) for lr in one._seen["exchange_parameters"])
    trained(two, inner_optim=OptimSpec("sgd", lr=rates), lr=None)
    assert all(torch.equal(lr, row) for lr, row in zip(two._seen["local_gradients"], rates))


def test_with_it_a_module_can_take_the_inner_step_itself() -> None:
    """Plain SGD, written as a module, from the optimizer's own rate: an optimizer of rate 0 in every other way."""

    def step(params: Any, state: Any, ctx: Any) -> Any:
        lr = ctx.own(ctx.lr).view(-1, *[1] * 0)
        return {n: p + lr.view(-1, *[1] * (p.dim() - 1)) for n, p in params.items()}, state

    each = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    moved = trained(Mine(exchange_parameters=step), inner_optim=OptimSpec("sgd", lr=each), lr=None, steps=1)
    plain = trained(inner_optim=OptimSpec("sgd", lr=each), lr=None, steps=1)
    expected = {n: p + each.view(-1, *[1] * (p.dim() - 1)) for n, p in plain.params.items()}
    assert_close(moved.params, expected, 1e-14)


def test_a_context_without_a_strategy_has_none() -> None:
    assert Context(StackedCollectives(K)).lr is None


def test_a_sweep_goes_on_where_nobody_trains() -> None:
    def make(lr: float) -> Strategy:
        resting = Resting(active_nodes=lambda ctx: [] if ctx.step == 0 else [0, 2])
        return strategy(resting, AveragingCommunicator(H=2), lr=lr)

    found = sweep(
        make_model("MLP"), dataset("MLP", 24), strategy=make, grid={"lr": [0.1, 0.2]}, num_nodes=K, max_steps=3,
        batch_size=4, device="cpu", progress=False,
    )  # fmt: skip
    assert [row["status"] for row in found.rows] == ["finished"] * 2


# -------------------------------------------------------------------------------------------- what is kept

KEPT: dict[str, Callable[[Any, Context], Any]] = {
    "what was given": lambda x, ctx: x,
    "everyone": lambda x, ctx: ctx.comm.everyone(x),
    "mean": lambda x, ctx: ctx.comm.mean(x),
    "mean of a group": lambda x, ctx: ctx.comm.mean(x, groups=[[0]]),
    "sum": lambda x, ctx: ctx.comm.sum(x),
    "server_mean": lambda x, ctx: ctx.comm.server_mean(x, [0]),
    "broadcast": lambda x, ctx: ctx.comm.broadcast(x, 0),
    "permute": lambda x, ctx: ctx.comm.permute(x, list(range(ctx.comm.num_nodes))),
    "mix": lambda x, ctx: ctx.comm.mix(x, torch.eye(ctx.comm.num_nodes, dtype=torch.float64)),
    "all_gather": lambda x, ctx: ctx.comm.all_gather(x),
    "a view": lambda x, ctx: {name: y.view_as(y) for name, y in ctx.comm.mean(x).items()},
}


class Keeps(CommunicationModule):
    """It keeps what a collective gave, and a copy of that; both must still be the same when it is asked again."""

    def __init__(self, what: str, returns: bool) -> None:
        self._collective, self._returns = KEPT[what], returns
        self._checked = 0

    def init(self, params: Any, ctx: Any) -> Any:
        return {"kept": params, "copy": {name: p.clone() for name, p in params.items()}}

    def _keep(self, x: Any, state: Any, ctx: Any) -> Any:
        for name, kept in state["kept"].items():
            assert torch.equal(kept, state["copy"][name]), f"{name} was overwritten before step {ctx.step}"
        self._checked += 1
        kept = self._collective(x, ctx)
        shown = kept if self._returns and all(y.dim() == x[name].dim() for name, y in kept.items()) else x
        return dict(shown), {"kept": kept, "copy": {name: y.clone() for name, y in kept.items()}}

    def exchange_parameters(self, params: Any, state: Any, ctx: Any) -> Any:
        return self._keep(params, state, ctx)


class KeepsGradients(Keeps):
    exchange_parameters = CommunicationModule.exchange_parameters

    def exchange_gradients(self, grads: Any, state: Any, ctx: Any) -> Any:
        return self._keep(grads, state, ctx)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("kind", [Keeps, KeepsGradients])
@pytest.mark.parametrize("what", KEPT)
def test_what_a_module_keeps_is_never_overwritten(what: str, kind: type[Keeps], num_nodes: int) -> None:
    for returns in (True, False):
        module = kind(what, returns)
        beside = [AveragingCommunicator(H=2)] if kind is KeepsGradients else [AveragingCommunicator(participation=0.5)]
        for settings in ({"max_norm": 0.1}, {"inner_optim": OptimSpec("sgd", lr=0.1, momentum=0.9), "lr": None}):
            trained(module, num_nodes=num_nodes, **settings)
            trained(module, *beside, num_nodes=num_nodes, **settings)
            trained(*beside, every(2, module), num_nodes=num_nodes, **settings)
        assert module._checked == 2 * (STEPS + STEPS + STEPS // 2)


# ---------------------------------------------------------------------------------- strategies with their own methods


def test_a_method_of_ones_own_is_called_without_being_named() -> None:
    """`train_jointly`, of a strategy without an exchange of gradients."""

    class Signs(Strategy):
        def train_jointly(self, part: Part) -> None:
            signs = {name: g.sign() for name, g in part.gradients().items()}
            part.optimize(part.comm.mean(signs))
            part.report(part.losses)

    trainer, _ = fit("MLP", Signs("sgd", lr=0.1), max_steps=2)
    assert {entry.operation for entry in trainer.ledger} == {"mean"}


def test_a_setting_cannot_hide_a_method() -> None:
    class Named(Strategy):
        def __init__(self, rates: float) -> None:
            super().__init__("sgd", lr=0.1)
            self.outer_lr = 0.7  # no method
            self.rates = rates  # type: ignore[method-assign, assignment]

    with pytest.raises(TypeError, match=r"Named cannot have a setting 'rates', since that is a method: .* 'own_rates'"):
        Named(0.5)


def test_a_collective_takes_tensors_by_name() -> None:
    comm: Any = StackedCollectives(2)
    for operation in (comm.mean, comm.sum, comm.all_gather):
        with pytest.raises(TypeError, match=f"comm.{operation.__name__} takes .*'a' is of type dict: call it for each"):
            operation({"a": {"w": torch.ones(2)}})
