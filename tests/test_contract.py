"""The contract of a user's average or strategy, and the errors of a breach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fitting import dataset, fit, params
from tests.helpers import assert_close, run, stacked
from tests.models import make_batches, make_model
from vecgym import sweep
from vecgym.collectives import StackedCollectives
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation import Mark, Part, State
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import (
    Average,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    Exchange,
    Mean,
    Memory,
    Stage,
    Strategy,
    every,
)

K, STEPS = 3, 4


def strategy(*exchanges: Any, **settings: Any) -> Strategy:
    return CommunicateOptimizeStrategy(list(exchanges), **{"inner_optim": "sgd", "lr": 0.1, **settings})


def trained_by(made: Strategy, num_nodes: int = K, steps: int = STEPS) -> Any:
    batches = stacked(make_batches("MLP", steps, num_nodes, dtype=torch.float64))
    return run(make_model("MLP", dtype=torch.float64), made, batches)


def trained(*exchanges: Any, num_nodes: int = K, steps: int = STEPS, **settings: Any) -> Any:
    return trained_by(strategy(*exchanges, **settings), num_nodes, steps)


class Mine(Average):
    """A user's average, made of functions."""

    common = False

    def __init__(self, agree: Callable[..., Any], init: Callable[..., Any] | None = None) -> None:
        self._agree, self._init = agree, init

    def init(self, values: Any, run: Any, memory: Memory) -> Any:
        return self._init(values, memory) if self._init else None

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        return self._agree(x, part, memory)


class Resting(Strategy):
    """Some nodes train, by a function of the step."""

    def __init__(self, who: Callable[[int], Any], *exchanges: Any, **inner: Any) -> None:
        super().__init__(exchanges=list(exchanges), **{"inner_optim": "sgd", "lr": 0.1, **inner})
        self.who = who

    def who_trains(self, run: RunFacts) -> Any:
        return lambda step, rows: self.who(step)


# ------------------------------------------------------------------------------------------------ who trains


@pytest.mark.parametrize("unit", [1, 2])
def test_an_exchange_of_gradients_is_never_skipped_without_a_word(unit: int) -> None:
    some, gradients = AveragingCommunicator(participation=0.5), Exchange(Mean(), of="gradients")
    with pytest.raises(ValueError, match="lets some nodes sit out, and"):
        strategy(every(unit, some), every(unit, gradients))


def test_what_lets_everybody_train_goes_with_gradients() -> None:
    strategy(AveragingCommunicator(participation=1), Exchange(Mean(), of="gradients"))
    strategy(every(2, Exchange(Mean(), delay=1)), Exchange(Mean(), of="gradients"))


@pytest.mark.parametrize("nodes", [[3], [-1], [0, 7]], ids=repr)
def test_what_are_no_nodes_is_refused(nodes: Any) -> None:
    with pytest.raises(ValueError, match=r"step 0: .* names \[.*\], which are not among \[0, 1, 2\]"):
        trained_by(Resting(lambda step: nodes))


def test_integers_of_numpy_are_nodes() -> None:
    assert trained_by(Resting(lambda step: [np.int64(2), 0])).active == [(0, 2)] * STEPS


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_a_step_in_which_nobody_trains(engine: str) -> None:
    """Everything stays, losses are nan, and the exchange takes place."""
    resting = Resting(
        lambda step: [] if step in (0, 2) else [0, 2], AveragingCommunicator(H=2), inner_optim="adam", lr=0.01
    )
    seen = dataset("MLP", 12)
    trainer, _ = fit(
        "MLP", resting, num_nodes=K, max_steps=4, data=dataset("MLP", 24), val=seen, val_interval=1, engine=engine
    )
    losses = trainer.history.node_array()
    assert np.isnan(losses).tolist() == [[True] * 3, [False, True, False]] * 2
    assert np.isnan(trainer.history.series("train_loss")[1]).tolist() == [True, False] * 2
    val = trainer.history.series("val_loss")[1]
    assert np.isfinite(val).all()
    assert {entry.step for entry in trainer.ledger} == {1, 3}
    never, model = fit("MLP", Resting(lambda step: []), max_steps=3, data=seen, engine=engine)
    start = make_model("MLP")
    assert all(torch.equal(p, start.get_parameter(name)) for name, p in model.named_parameters())
    assert torch.equal(params(never), params(never)[:1].expand(3, -1))


def test_a_sweep_goes_on_where_nobody_trains() -> None:
    def make(lr: float) -> Strategy:
        return Resting(lambda step: [] if step == 0 else [0, 2], AveragingCommunicator(H=2), lr=lr)

    found = sweep(
        make_model("MLP"), dataset("MLP", 24), strategy=make, grid={"lr": [0.1, 0.2]}, num_nodes=K, max_steps=3,
        batch_size=4, device="cpu", progress=False,
    )  # fmt: skip
    assert [row["status"] for row in found.rows] == ["finished"] * 2


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
    "one name": (one_name, ValueError, "values without"),
    "another name": (lambda tree: {**tree, "other": torch.zeros(1)}, ValueError, "with unknown other; expected the"),
    "flat": (flat, ValueError, r"in shape \[\d+\]; expected \[1 or 3, \d+"),
    "two nodes of three": (two_rows, ValueError, r"in shape \[2, .*expected \[1 or 3, "),
    "numbers": (numbers, TypeError, "a float for"),
}


@pytest.mark.parametrize("of", ["parameters", "gradients", "exp_avg"])
@pytest.mark.parametrize("case", TREES)
def test_a_tree_that_is_none_names_the_average_and_what_is_expected(case: str, of: str) -> None:
    spoil, error, message = TREES[case]
    mine = Mine(lambda x, part, memory: spoil(x))
    with pytest.raises(error, match=rf"Mine\(.*\) returned .*{message}"):
        trained(Exchange(mine, of=of), inner_optim="adam")


class Spoiling(Stage):
    """A stage that spoils what becomes of the result."""

    def __init__(self, inner: Average, spoil: Callable[[Any], Any]) -> None:
        super().__init__(inner)
        self._spoil = spoil

    def receive(self, y: Any, part: Part, memory: Memory) -> Any:
        return self._spoil(y)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("case", TREES)
def test_so_does_what_a_stage_makes_of_it(case: str, delay: int) -> None:
    spoil, error, message = TREES[case]
    with pytest.raises(error, match=rf"Spoiling\(.*\) returned .*{message}"):
        trained(Exchange(Spoiling(Mean(), spoil), delay=delay))


class Assigning(Strategy):
    """It assigns parameters."""

    def __init__(self, spoil: Callable[[Any], Any]) -> None:
        super().__init__("sgd", lr=0.1)
        self.spoil = spoil

    def marks(self, run: RunFacts) -> list[Mark]:
        return [Mark("pull")]

    def pull(self, part: Part) -> None:
        part.params = self.spoil(part.params)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (one_name, r"Assigning\.pull assigned parameters with other names than the model's: first\.bias"),
        (flat, r"Assigning\.pull assigned 'params\.first\.weight' as .*; expected \[3 or 1, "),
        (two_rows, r"Assigning\.pull assigned 'params\.first\.weight' as float64 \[2, .*; expected \[3 or 1, "),
        (lambda tree: {n: x.float() for n, x in tree.items()}, r"as float32 .*; expected .* of torch\.float64"),
    ],
)
def test_what_a_handler_assigns_is_checked_at_once(spoil: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained_by(Assigning(spoil))


def remember(held: str, value: Tensor) -> Callable[..., Any]:
    def agree(x: Any, part: Part, memory: Memory) -> Any:
        getattr(memory, held)["count"] = value
        return x

    return agree


@pytest.mark.parametrize(
    ("held", "value"),
    [("own", torch.tensor(3)), ("own", torch.zeros(2, 5)), ("own", torch.zeros(3, 5)), ("shared", torch.zeros(3))],
)
def test_what_an_average_remembers_keeps_its_form(held: str, value: Tensor) -> None:
    def init(values: Any, memory: Memory) -> None:
        getattr(memory, held)["count"] = torch.zeros(1)

    with pytest.raises(ValueError, match=r"\.meet assigned '0\.0/count' as .*; expected \["):
        trained(Exchange(Mine(remember(held, value), init)))


# ------------------------------------------------------------------------------------ the learning rate


class Recorder(Average):
    """It notes the learning rate that it is told."""

    common = False

    def __init__(self) -> None:
        self._seen: list[Any] = []

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        self._seen.append(part.lr)
        return x


def test_an_average_is_told_the_inner_learning_rate_of_each_step() -> None:
    """Schedule and warm-up included; inside of every(2, ...), where time counts in exchanges, that of the true step."""
    gradients, after, rare = Recorder(), Recorder(), Recorder()
    exchanges = [Exchange(gradients, of="gradients"), Exchange(after), every(2, Exchange(rare))]
    trained(*exchanges, warmup_steps=2, cosine_anneal=True, steps=6)
    made = strategy(warmup_steps=2, cosine_anneal=True)
    expected = [made.rates(made.timetable(RunFacts(K, 6)), step)[0] for step in range(6)]
    assert len(set(expected)) == 6
    assert gradients._seen == after._seen == expected
    assert rare._seen == expected[1::2]


def test_it_is_a_tensor_where_that_of_the_strategy_is_one() -> None:
    each, rates = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), torch.rand(STEPS, K, dtype=torch.float64)
    one, two = Recorder(), Recorder()
    trained(Exchange(one), inner_optim=OptimSpec("sgd", lr=each), lr=None)
    assert all(torch.equal(lr, each) for lr in one._seen)
    trained(Exchange(two, of="gradients"), inner_optim=OptimSpec("sgd", lr=rates), lr=None)
    assert all(torch.equal(lr, row) for lr, row in zip(two._seen, rates, strict=True))


def test_with_it_an_average_can_move_each_node_by_its_rate() -> None:
    def step(x: Any, part: Part, memory: Memory) -> Any:
        return {n: p + part.scaled(part.lr, torch.ones_like(p)) for n, p in x.items()}

    each = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    moved = trained(Exchange(Mine(step)), inner_optim=OptimSpec("sgd", lr=each), lr=None, steps=1)
    plain = trained(inner_optim=OptimSpec("sgd", lr=each), lr=None, steps=1)
    expected = {n: p + each.view(-1, *[1] * (p.dim() - 1)) for n, p in plain.params.items()}
    assert_close(moved.params, expected, 1e-14)


# -------------------------------------------------------------------------------------------- what is kept

KEPT: dict[str, Callable[[Any, Part], Any]] = {
    "what was given": lambda x, part: x,
    "everyone": lambda x, part: part.comm.everyone(x),
    "mean": lambda x, part: part.comm.mean(x),
    "mean of a group": lambda x, part: part.comm.mean(x, groups=[[0]]),
    "sum": lambda x, part: part.comm.sum(x),
    "server_mean": lambda x, part: part.comm.server_mean(x, [0]),
    "broadcast": lambda x, part: part.comm.broadcast(x, 0),
    "permute": lambda x, part: part.comm.permute(x, list(range(part.comm.num_nodes))),
    "mix": lambda x, part: part.comm.mix(x, torch.eye(part.comm.num_nodes, dtype=torch.float64)),
    "all_gather": lambda x, part: part.comm.all_gather(x),
    "a view": lambda x, part: {name: y.view_as(y) for name, y in part.comm.mean(x).items()},
}


class Keeps(Average):
    """It keeps what a collective gave, and a copy of that; both must still be the same when it is asked again."""

    common = False

    def __init__(self, what: str, returns: bool) -> None:
        self._collective, self._returns = KEPT[what], returns
        self._checked = 0

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        kept = self._collective(x, part)
        home = memory.shared if all(len(y) == 1 for y in kept.values()) else memory.own
        if "kept" in home:
            for name, before in home["kept"].items():
                assert torch.equal(before, home["copy"][name]), f"{name} was overwritten before step {part.due.step}"
            self._checked += 1
        home["kept"], home["copy"] = kept, {name: y.clone() for name, y in kept.items()}
        shown = kept if self._returns and all(y.dim() == x[name].dim() for name, y in kept.items()) else x
        return dict(shown)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("of", ["parameters", "gradients"])
@pytest.mark.parametrize("what", KEPT)
def test_what_an_average_keeps_is_never_overwritten(what: str, of: str, num_nodes: int) -> None:
    for returns in (True, False):
        how = Keeps(what, returns)
        module = Exchange(how, of=of)
        beside = [AveragingCommunicator(H=2)] if of == "gradients" else [AveragingCommunicator(participation=0.5)]
        for settings in ({"max_norm": 0.1}, {"inner_optim": OptimSpec("sgd", lr=0.1, momentum=0.9), "lr": None}):
            trained(module, num_nodes=num_nodes, **settings)
            trained(module, *beside, num_nodes=num_nodes, **settings)
            trained(*beside, every(2, module), num_nodes=num_nodes, **settings)
        assert how._checked == 2 * (2 * (STEPS - 1) + STEPS // 2 - 1)


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


class Cut(Strategy):
    """Its gradients have another shape than the parameters."""

    def train(self, part: Part) -> None:
        gradients = part.gradients()
        part.report(part.losses)
        part.optimize({name: g[..., :1] for name, g in gradients.items()})


@pytest.mark.parametrize("optim", ["sgd", "adam", "adamw", "adagrad", "rmsprop"])
def test_a_gradient_of_another_shape_is_refused(optim: str) -> None:
    with pytest.raises(ValueError, match=r"returned 'first.weight' of the gradients in shape .*1\]; expected \[1 or 3"):
        fit("MLP", Cut(optim, lr=0.1), num_nodes=3, max_steps=2)


class Partial(Strategy):
    """Its model has the nodes' mean, but for one parameter, which is 0."""

    def result(self, state: State) -> Tree:
        return {"first.weight": torch.zeros_like(state.params["first.weight"])}


def test_names_that_a_result_leaves_out_are_the_nodes() -> None:
    """The evaluated model is the returned one, in a fit and in a sweep."""
    val = dataset("MLP", 8, seed=1)
    trainer, model = fit("MLP", Partial("sgd", lr=0.1), num_nodes=3, max_steps=3, val=val)
    with torch.no_grad():
        loss = float(model.eval()(val[:8]))
    assert trainer.history.last("val_loss") == pytest.approx(loss, rel=1e-5)
    result = sweep(
        make_model("MLP"), dataset("MLP"), val, strategy=lambda lr: Partial("sgd", lr=lr), grid={"lr": [0.1, 0.2]},
        num_nodes=3, max_steps=3, batch_size=4, progress=False, device="cpu",
    )  # fmt: skip
    assert result.rows[0]["val_loss"] == pytest.approx(loss, rel=1e-5)
