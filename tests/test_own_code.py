"""Mistakes in a user's own strategies, stages, averages and servers: told early, or at least by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fitting import fit
from vecgym import Trainer, sweep
from vecgym.availability import LocalSteps
from vecgym.clock import Compute
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.models import Line
from vecgym.simulation.timetable import Mark
from vecgym.strategy import AsyncStrategy, Average, Exchange, FedAvgStrategy, Mean, Mix, Server, Stage, Strategy, every

STEPS = 4


def of(methods: dict[str, Any], *exchanges: Exchange) -> Callable[[], Strategy]:
    return lambda: type("Mine", (Strategy,), methods)("sgd", exchanges or [Exchange(Mean(), every=2)], lr=0.1)


def stage(**methods: Any) -> Callable[[], Strategy]:
    return of({}, Exchange(type("Mine", (Stage,), methods)(Mean()), every=2))


def marked(*marks: Any, **methods: Any) -> Callable[[], Strategy]:
    return of({"marks": lambda self, run: [*Strategy.marks(self, run), *marks], **methods})


def started(**more: Any) -> Callable[[], Strategy]:
    def init(self: Strategy, run: Any, params: Tree) -> Any:
        own, shared = Strategy.init(self, run, params)
        return {**own, **more}, shared

    return of({"init": init})


def counting(value: Any) -> Callable[[], Strategy]:
    return stage(init=lambda self, values, run, memory: memory.shared.__setitem__("n", value))


def result(change: Callable[[Tree], Any]) -> Callable[[], Strategy]:
    return of({"result": lambda self, state: change(state.params)})


MISTAKES: dict[str, tuple[Callable[[], Strategy], type[Exception], str]] = {
    "a result without the nodes": (result(lambda x: tree.map(lambda p: p.mean(0), x)), ValueError,
                                   ".result returned 'first.weight' of the parameters in shape [32, 16]; expected"),
    "a result of some nodes": (result(lambda x: tree.map(lambda p: p[:2], x)), ValueError, "shape [2, 32, 16]; expe"),
    "a result of nothing": (result(lambda x: None), TypeError, ".result returned None as parameters"),
    "a result with a strange name": (result(lambda x: {"zz": torch.ones(3, 1)}), ValueError, "with unknown zz"),
    "two of three nodes": (stage(send=lambda self, x, part, memory: tree.map(lambda p: p[:2], x)), ValueError,
                           "comm.mean takes values with 3 rows, of this process's nodes, or 1, but 'first.weight' is "),
    "a number for each node": (started(n=3), ValueError, "Mine.init gave 3 for ['n']; expected a tensor of 1 or 3"),
    "two rows for three nodes": (started(n=torch.zeros(2)), ValueError, "gave float32 [2] for ['n']; expected"),
    "no row at all": (started(n=torch.tensor(1.0)), ValueError, "gave float32 [] for ['n']; expected"),
    "a number for all nodes": (counting(0.0), ValueError, "gave 0.0 for ['0.0/n']; expected a tensor of 1 rows"),
    "three rows for all nodes": (counting(torch.zeros(3)), ValueError, "gave float32 [3] for ['0.0/n']; expected"),
    "no initial state": (of({"init": lambda self, run, params: None}), TypeError,
                         "Mine.init returned None; expected two dicts: each node's own trees, and shared ones."),
    "a number later": (of({"meet": lambda self, part: part.shared.__setitem__("n", 3)}), TypeError, "3 to 'n'; expec"),
    "training that is never called": (
        of({"train": lambda self, part: None}, Exchange(Mean(), of="gradients")), TypeError,
        "class Mine: train is never called, since nodes train jointly: override train_jointly."),
    "no losses": (of({"train": lambda self, part: part.optimize(part.gradients())}), ValueError,
                  "Mine.train reports no losses: call part.report(part.losses) in it."),
    "a mark without a method": (marked(Mark("remeber", 1000)), TypeError, "Mine has no method 'remeber', named by its"),
    "a mark before it is due": (marked(Mark("meet", 2, lag=-1)), TypeError, "a Mark(what, when) with lag >= 0"),
    "a mark that is none": (marked(("meet", 2)), TypeError, "('meet', 2) among the marks; expected a Mark("),
    "gradients at a mark": (marked(Mark("more", 1), more=lambda self, part: part.gradients()), ValueError,
                            "'more' in tick 0 reads 1 batches, but its event has reads=0: take gradients in `train`"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str) -> None:
    make, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=re.escape(message)):
        fit("MLP", make(), max_steps=STEPS)


def test_a_number_of_each_configuration_is_refused_in_a_sweep() -> None:
    """All would get the first one's."""

    class Counting(Stage, batched=("start",), random=False):
        def __init__(self, inner: Average, start: float) -> None:
            super().__init__(inner)
            self.start = start

        def init(self, values: Tree, run: Any, memory: Any) -> None:
            memory.shared["n"] = self.start

    strategy = lambda start: Strategy("sgd", [Exchange(Counting(Mean(), start), every=2)], lr=0.1)  # noqa: E731
    with pytest.raises(ValueError, match=re.escape("gave 1.0 for ['0.0/n']; expected a tensor")):
        sweep(Line(), torch.ones(8), strategy=strategy, grid={"start": [1.0, 5.0]}, num_nodes=2, max_steps=STEPS,
              batch_size=2, progress=False, device="cpu")  # fmt: skip


def test_what_is_not_training_need_not_report() -> None:
    remembered: list[int] = []
    strategy = marked(Mark("more", 2), more=lambda self, part: remembered.append(part.tick))()
    fit("MLP", strategy, max_steps=STEPS)
    assert remembered == [1, 3]


@pytest.mark.parametrize("H", [[3, 3, 3, 2, 2], {0: 3, 3: 2}], ids=["list", "dict"])
def test_a_table_of_rounds_need_not_go_beyond_the_run(H: Any) -> None:
    trainer, _ = fit("MLP", FedAvgStrategy("sgd", H=H.__getitem__, lr=0.1), max_steps=5)
    assert [entry.step for entry in trainer.ledger] == [2, 4]
    ends = Strategy("sgd", [Exchange(Mean(), every=lambda step: min(4, 5 - step))], lr=0.1)
    assert [entry.step for entry in fit("MLP", ends, max_steps=5)[0].ledger] == [3, 4]


def test_a_table_of_topologies_need_not_have_steps_without_an_exchange() -> None:
    W = {1: torch.full((3, 3), 1 / 3), 3: torch.full((3, 3), 1 / 3)}
    trainer, _ = fit("MLP", Strategy("sgd", [Exchange(Mix(W.__getitem__), every=2)], lr=0.1), max_steps=STEPS)
    assert [entry.step for entry in trainer.ledger] == [1, 3]
    with pytest.raises(ValueError, match="topology mixes 3 nodes, and the run has num_nodes=2"):
        fit("MLP", Strategy("sgd", [Exchange(Mix(W.__getitem__), every=2)], lr=0.1), num_nodes=2, max_steps=STEPS)


def test_local_steps_of_the_same_round_in_other_words() -> None:
    for every_step in (every(2, Exchange(Mean(), every=2)), Exchange(Mean(), every=lambda step: 4)):
        fit("MLP", Strategy("sgd", [every_step], lr=0.1), max_steps=STEPS, availability=LocalSteps([1, 2, 4], H=4))


@pytest.mark.parametrize("H", [2, 3])
def test_local_steps_of_another_round_are_refused(H: int) -> None:
    if H == 2:
        fit("MLP", FedAvgStrategy("sgd", H=2, lr=0.1), max_steps=STEPS, availability=LocalSteps([1, 2, 2], H=2))
    else:
        with pytest.raises(
            ValueError, match=re.escape("LocalSteps(H=3, steps=[1, 2, 2], epochs=None) has rounds of 3 steps, and ")
        ):
            fit("MLP", FedAvgStrategy("sgd", H=2, lr=0.1), max_steps=STEPS, availability=LocalSteps([1, 2, 2], H=3))


@pytest.mark.parametrize(("returned", "kind", "message"), [
    (lambda params, state: None, TypeError, "Mine().update returned None; expected a tuple, (parameters, state)."),
    (lambda params, state: params, TypeError, "Mine().update returned a dict; expected a tuple, (parameters, state)."),
    (lambda params, state: ({}, state), ValueError, "Mine().update returned parameters without w; expected"),
    (lambda params, state: ({"w": torch.ones(2)}, state), ValueError, "Mine().update returned 'w' of the parameters"),
])  # fmt: skip
def test_a_servers_mistake_is_told(returned: Any, kind: Any, message: str) -> None:
    update = lambda self, params, movement, state, update, inplace=False: returned(params, state)  # noqa: E731
    server = type("Mine", (Server,), {"update": update})()
    with pytest.raises(kind, match=re.escape(message)):
        Trainer(Line(), torch.ones(8)).fit(
            AsyncStrategy("sgd", server, H=2, lr=0.1), num_nodes=2, max_updates=3, compute=Compute(1.0), batch_size=2,
            progress=False, device="cpu",
        )  # fmt: skip


def test_a_lazy_model_is_named() -> None:
    model = torch.nn.LazyLinear(3)
    with pytest.raises(ValueError, match="parameter 'weight' has no values yet: call the model once on a batch"):
        Trainer(model, torch.ones(8, 2), loss_fn=lambda m, x: m(x).mean()).fit(FedAvgStrategy(), num_nodes=2)


def test_metrics_of_an_object_are_refused_unless_a_loss_fn_replaces_them() -> None:
    model = Line()
    model.val_metrics = lambda batch: {"loss": batch.mean()}  # type: ignore[assignment]
    with pytest.raises(TypeError, match="its own val_metrics as an attribute: define it as a method of its class"):
        Trainer(model, torch.ones(8)).fit(FedAvgStrategy(), num_nodes=2, device="cpu", progress=False)
    trainer = Trainer(model, torch.ones(8), loss_fn=lambda m, x: m(x))
    trainer.fit(FedAvgStrategy(), num_nodes=2, max_steps=1, batch_size=2, device="cpu", progress=False)
    assert trainer.history.last("step") == 1
