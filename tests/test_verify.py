"""`verify` passes what is right, and finds what is wrong: in a strategy, in the bytes, in the bound."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import vecgym
from tests.accounting import accounted
from tests.helpers import OneRank
from tests.models import make_data, make_model
from vecgym import OptimSpec, cli
from vecgym.availability import Trace, drawn
from vecgym.collectives import StackedCollectives
from vecgym.collectives.wire import Wire
from vecgym.core import tree
from vecgym.core.errors import ProcessError
from vecgym.runs import multiprocess
from vecgym.runs.verification import (
    BOUNDS,
    ORDER_OF_SUMS,
    RULES,
    Check,
    Finding,
    Report,
    VerifyOptions,
    compare_stack,
    first_of,
    gaps,
    verify,
)
from vecgym.simulation import Mark, Part, RunFacts
from vecgym.simulation.stack import Stack, halved
from vecgym.strategy import (
    Average,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    Mix,
    Outer,
    Strategy,
)
from vecgym.strategy.catalogue import CATALOGUE
from vecgym.strategy.stages import Memory

K = 4


def data(name: str = "MLP", dtype: torch.dtype = torch.float32) -> TensorDataset:
    return TensorDataset(*make_data(name, 64, dtype=dtype))


def of(how: Average, values: str = "parameters") -> CommunicateOptimizeStrategy:
    return CommunicateOptimizeStrategy([Exchange(how, of=values)], "sgd", lr=0.1)


def checked(strategy: Any, **settings: Any) -> Report:
    return verify(strategy, make_model("MLP"), data(), **{"num_nodes": K, "num_processes": 2, "steps": 3, **settings})


class Own(Average):
    """A user's average, whose result is each node's own."""

    common = False


# --------------------------------------------------------------------------------------------------------------- right


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_a_right_strategy_passes(dtype: torch.dtype) -> None:
    report = checked(FedAvgStrategy("adamw", H=2, lr=1e-2), dtype=dtype)
    assert report.passed
    exact, native, stack = report.checks
    assert (exact.bound, native.bound, stack.bound) == (0.0, BOUNDS[dtype], BOUNDS[dtype])
    assert len(stack.rows) == 3
    assert [row.step for row in exact.rows] == [0, 1, 2]
    assert all(row == (row.step, 0, 0, 0, 0, 0, 0) for row in exact.rows)
    assert "pass" in str(report)
    assert "FAIL" not in str(report)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_the_processes_would_not_have_are_refused(kind: str) -> None:
    model = make_model("MLP")
    getattr(next(model.parameters()), kind)(lambda x: None)
    with pytest.raises(ValueError, match=rf"has a hook on its .*\({kind}\)"):
        verify(FedAvgStrategy("sgd", H=2, lr=0.1), model, data())


def test_a_users_own_strategy_and_model() -> None:
    class Half(Own):
        """Moves every node half of the way to the mean."""

        def agree(self, x: Any, part: Part, memory: Memory) -> Any:
            return tree.map(lambda p, mean: (p + mean) / 2, x, part.comm.mean(x))

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self, batch: Any) -> torch.Tensor:
            return (self.w - batch[0]).square().mean()

    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    assert vecgym.verify(of(Half()), Line(), TensorDataset(x), steps=4, num_processes=4).passed


# --------------------------------------------------------------------------------------------------------------- wrong


class SumWhenAlone(Own):
    """Sums where it should average when all nodes are in one process."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        alone = len(part.comm.node_ids) == part.comm.num_nodes
        return part.comm.sum(x) if alone else part.comm.mean(x)


class MeanOfMine(Own):
    """Averages the rows that it sees, without a collective: right only where all nodes are in one process."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        return tree.map(lambda p: p.mean(0, keepdim=True), x)


class FirstRow(Own):
    """Keeps the first node of each process in its state, as if that were node 0."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        memory.shared["first"] = tree.map(lambda p: p[:1].clone(), x)
        return x


class ByPlace(Own):
    """Tells nodes apart by their row, not by their number."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        rows = torch.arange(1, len(part.comm.node_ids) + 1)
        return tree.map(lambda g: g * rows.view(-1, *[1] * (g.dim() - 1)), x)


class MoreBytes(Own):
    """Exchanges what the number of processes makes up: the numbers are right, the bytes are not."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        if len(part.comm.node_ids) < part.comm.num_nodes:
            part.comm.mean({"idle": torch.ones(len(part.comm.node_ids), 1)})
        return x


class Noise(Own):
    """Draws from torch's global generator."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        return tree.map(lambda g: g + torch.randn(g.shape), x)


class Counts(Own):
    """Keeps what evolves on itself."""

    calls = 1

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        self.calls = self.calls + 1
        return tree.map(lambda g: g / self.calls, x)


class AllAtOnce(Own):
    """One matrix product over all nodes, which rounds in another way than one over some."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        tiny = torch.tensor([1.0 + 4e-16 * len(part.comm.node_ids)], dtype=torch.float64)
        return tree.map(lambda g: g * tiny, x)


class AsManyAsHere(Own):
    """Keeps a number for each node that is in its process."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        memory.shared["seen"] = torch.zeros(1, len(part.comm.node_ids))
        return x


GENERAL = ("comm", "random", "self")


@pytest.mark.parametrize(
    ("how", "column", "rules", "kind", "node"),
    [
        (SumWhenAlone, "params", GENERAL, "params first.weight", 0),
        (MeanOfMine, "params", GENERAL, "params first.weight", 0),
        (FirstRow, "strategy", GENERAL, "strategy 0.0/first.first.weight", 2),
        (ByPlace, "params", GENERAL, "params first.weight", 2),
        (MoreBytes, "ledger_bytes", ("comm",), "ledger nothing with all in one process, mean of 4 bytes with", 0),
        (Noise, "params", GENERAL, "params first.weight", 0),
        (Counts, "params", GENERAL, "params first.weight", 0),
        (AsManyAsHere, "strategy", ("own", "comm"), "strategy 0.0/seen", 0),
    ],
)
def test_a_wrong_strategy_is_found_and_its_rules_named(
    how: type[Average], column: str, rules: tuple[str, ...], kind: str, node: int
) -> None:
    report = checked(of(how(), "gradients" if how in (ByPlace, Noise, Counts) else "parameters"))
    assert not report.passed
    for check in report.checks[:2]:
        assert check.first_failure is not None
        assert check.finding is not None
        assert check.first_failure.step == check.finding.step == 0
        assert check.worst(column) > 1e-3
        assert (check.finding.node, check.finding.rule) == (node, "; ".join(RULES[rule] for rule in rules))
        assert str(check.finding).startswith(f"step 0, {kind}")
        assert str(check.finding) in str(report)
    assert "FAIL at step 0" in str(report)


def test_a_difference_of_the_last_bits_is_one_of_exactness() -> None:
    """An operation on all nodes at once rounds in another way; in native mode it is within the bound."""
    exact, native, _ = checked(of(AllAtOnce(), "gradients")).checks
    assert exact.finding is not None
    assert exact.finding.gap < 1e-14
    assert exact.finding.rule == RULES["exact"]
    assert native.passed


HUGE = torch.tensor([[1e16], [1.0], [-1e16], [1.0]], dtype=torch.float64)  # the sum, in this order 1, of pairs 0


class Ranks(Own):
    """Compares a sum with a number."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        factor = 1 + (part.comm.sum(HUGE[part.comm.node_ids]) > 0.5).double()
        return tree.map(lambda g: g * factor.view(-1, *[1] * (g.dim() - 1)), x)


def test_a_sum_in_another_order_is_no_broken_rule() -> None:
    """The exact check passes: a value that is compared falls to the other side."""
    exact, native, _ = checked(of(Ranks(), "gradients")).checks
    assert exact.passed
    assert native.finding is not None
    assert native.finding.rule == ORDER_OF_SUMS


def test_the_first_difference_of_all_processes() -> None:
    """Of the first step, then of the first kind, whichever process has seen it."""
    late = Finding(3, "losses", "", 0, 0.5, "")
    early = late._replace(step=1, kind="params", tensor="w", node=2)
    assert first_of([late, early]) == early
    assert first_of([early._replace(node=0), late._replace(step=1, node=3)]) == late._replace(step=1, node=3)
    assert first_of([early, early._replace(node=1)]) == early._replace(node=1)
    assert first_of([None, late]) == late
    assert first_of([None, None]) is None


def test_nan_is_no_difference_where_both_forms_have_it() -> None:
    one, other = torch.tensor([[float("nan")], [2.0]]), torch.tensor([[1.0], [2.0]])
    comm = StackedCollectives(2)
    assert [gap.largest for gap in gaps("params", {"w": one}, {"w": one.clone()}, comm, {})] == [0.0]
    assert [gap.largest > 1 for gap in gaps("params", {"w": one}, {"w": other}, comm, {})] == [True]


@pytest.mark.parametrize(
    "here", [{}, {"w": torch.ones(K, 2), "more": torch.ones(K, 2)}, {"w": torch.ones(K, 3)}, {"w": torch.ones(2, 2)}]
)
def test_other_names_shapes_and_rows_are_a_difference_without_a_size(here: Any) -> None:
    found = gaps("strategy", {"w": torch.ones(K, 2)}, here, StackedCollectives(K), {})
    assert max(gap.largest for gap in found) == math.inf


class Keeping(Own):
    """Keeps a count and a longer and longer list; `wrong`: not the same in each process."""

    def __init__(self, *, wrong: bool) -> None:
        self.wrong = wrong

    def init(self, values: Any, run: Any, memory: Memory) -> None:
        memory.shared["kept"] = {"count": torch.zeros(1), "list": [torch.zeros(1, 2)]}

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        kept = memory.shared["kept"]
        count = kept["count"] + (len(part.comm.node_ids) if self.wrong else 1)
        memory.shared["kept"] = {"count": count, "list": [*kept["list"], torch.ones(1, 2)]}
        return part.comm.mean(x)


@pytest.mark.parametrize("wrong", [False, True])
def test_nested_values_in_a_state_are_compared_too(wrong: bool) -> None:
    report = checked(of(Keeping(wrong=wrong)), steps=2)
    assert report.passed is not wrong
    if wrong:
        assert "step 0, strategy 0.0/kept.count of node 0: differs by 0.5" in str(report)


def test_a_value_of_all_nodes_where_only_some_are() -> None:
    """An error that only the parts of a process see."""

    class Unequal(Own):
        def agree(self, x: Any, part: Part, memory: Memory) -> Any:
            rates = torch.arange(1.0, K + 1)
            return tree.map(lambda g: g * rates.view(-1, *[1] * (g.dim() - 1)), x)

    with pytest.raises(
        ProcessError, match=r"step 0: .* all 4 nodes .* fails with the 2 .*`part\.each` or `part\.scaled`"
    ):
        checked(of(Unequal(), "gradients"))


class SomeOnly(Own):
    """A collective that only the process of node 0 calls, at step 1."""

    def __init__(self, *, instead: bool) -> None:
        self.instead = instead

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        if part.due.step == 1 and 0 in part.comm.node_ids.tolist():
            return part.comm.mean(x)
        return part.comm.broadcast(x, 1) if self.instead else x


@pytest.mark.parametrize("instead", [True, False])
def test_processes_that_do_not_call_the_same_are_named(instead: bool) -> None:
    """Otherwise torch.distributed waits, aborts or mixes them up."""
    calls = ["nothing more, after 2 steps", "broadcast at step 1 of 4 tensors, "]
    with pytest.raises(ProcessError, match="do not make the same calls") as caught:
        checked(of(SomeOnly(instead=instead)), steps=2)
    text = str(caught.value)
    assert "process 0: mean at step 1 of 4 tensors, 6992 bytes a node: first.weight [32, 16], " in text
    assert "; process 1: " + calls[instead] in text


def test_rules_are_those_of_the_guide() -> None:
    page = vecgym.guide.writing_a_strategy.__doc__
    assert page is not None
    contract = page.split("## The contract")[1]
    assert [rule for rule in RULES.values() if rule not in contract] == []


class Residual(Own):
    """8 bits of each node's change, with the rounding error carried over: differences of nearly equal numbers."""

    def init(self, values: Any, run: Any, memory: Memory) -> None:
        memory.shared["agreed"], memory.own["error"] = values, tree.map(torch.zeros_like, values)

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        change = tree.map(lambda p, s, e: p - s + e, x, memory.shared["agreed"], memory.own["error"])
        sent = tree.map(lambda y: (y * 1e4).round() / 1e4, change)
        memory.shared["agreed"] = tree.map(torch.add, memory.shared["agreed"], part.comm.mean(sent))
        memory.own["error"] = tree.map(torch.sub, change, sent)
        return dict(memory.shared["agreed"])


class WrongResidual(Residual):
    """Forgets the error of one node: nothing is wrong with the parameters of this step."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        agreed = super().agree(x, part, memory)
        keep = (part.comm.node_ids != 3).to(torch.float64) if len(part.comm.node_ids) < K else torch.ones(K)
        memory.own["error"] = tree.map(lambda e: e * keep.view(-1, *[1] * (e.dim() - 1)), memory.own["error"])
        return agreed


def test_a_residual_has_the_rounding_of_what_it_is_a_difference_of() -> None:
    """It is ten thousand times smaller than the parameters; an error of its own size is found all the same."""
    report = checked(of(Residual()), steps=10)
    assert report.passed
    assert 0 < report.checks[1].worst("strategy") < 1e-14
    wrong = checked(of(WrongResidual()), steps=2)
    for check in wrong.checks[:2]:
        assert check.finding is not None
        assert (check.finding.step, check.finding.tensor, check.finding.node) == (0, "0.0/error.first.weight", 3)


def with_a_wire(link: multiprocess.Link, times: int) -> list[bool]:
    """Compare on a wire that counts `times` what it is handed."""

    class Counting(Wire):
        def _count(self, x: torch.Tensor) -> None:
            self.handed_bytes += times * x.numel() * x.element_size()

    strategy = FedAvgStrategy("sgd", H=1, lr=0.1)
    given = VerifyOptions(strategy, make_model("MLP"), data(), K, steps=2, dtype=torch.float32)
    return [accounted(given, Counting(), exact=exact).passed for exact in (True, False)]


def test_bytes_that_the_ledger_does_not_mean_are_found() -> None:
    """The proof of the bytes of all strategies, in `test_distributed` and `test_absent_apart`, can fail."""
    assert multiprocess.run(with_a_wire, 2, (1,)) == [[True, True]] * 2
    P = sum(p.numel() for p in make_model("MLP").parameters())
    # Exact: both nodes' parameters. Twice as much is as many bytes too much, at the exchange of the next step.
    with pytest.raises(ProcessError, match=f"before mean at step 1: {8 * P} bytes"):
        multiprocess.run(with_a_wire, 2, (2,))


# ----------------------------------------------------------------------------------------------------------- in a stack


def in_a_stack(strategy: Any, **settings: Any) -> Check:
    """The third check, without processes."""
    given = {"num_nodes": K, "steps": 4, **settings}
    return compare_stack(VerifyOptions(strategy, make_model("MLP", dtype=torch.float64), data(), **given))


def exchanging(how: Average, every: int = 2) -> Strategy:
    return Strategy("sgd", [Exchange(how, every)], lr=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_every_strategy_is_in_a_stack_what_it_is_alone(dtype: torch.dtype) -> None:
    each = {name: row.make(H=2, p=0.3, inner_optim="adamw", lr=0.01) for name, row in CATALOGUE.items()}
    each |= {
        "own rates": DiLoCoStrategy("sgd", H=2, lr=torch.arange(1.0, 5.0) / 100),
        "own shares": Strategy("sgd", [Exchange(Mean(), 2, keep=torch.rand(K))], lr=0.1),
        "one share": Strategy("sgd", [Exchange(Mix("ring"), keep=0.5, delay=1)], lr=0.1),
    }
    found = {}
    for name, strategy in each.items():
        model = make_model("MLP", dtype=dtype)
        found[name] = compare_stack(VerifyOptions(strategy, model, data(), K, steps=5, dtype=dtype))
    assert {name: check for name, check in found.items() if not check.passed} == {}


def test_half_of_all_that_may_differ() -> None:
    """Of the strategy, its exchanges, their averages, and their optimizers."""
    exchange, before = (
        Exchange(Outer(Scaled(0.5), OptimSpec("sgd", lr=0.8)), every=2, keep=torch.full((K,), 0.5)) for _ in range(2)
    )
    other = halved(FedAvgStrategy("sgd", H=2, lr=0.1, proximal_mu=0.4))
    assert (other.inner_optim.lr, other.proximal_mu) == (0.05, 0.2)
    other = halved(Strategy("sgd", [exchange], lr=torch.full((K,), 0.1)))
    half: Any = other.exchanges[0]
    assert other.inner_optim.lr.tolist() == [pytest.approx(0.05)] * K
    assert half.delivery.keep.tolist() == [0.25] * K
    assert (half.every, half.how.optim.spec.lr, half.how.inner.factor) == (2, 0.4, 0.25)
    assert exchange == before


class Scaled(Average, batched=("factor",), random=False):
    """The mean times a factor, one for all nodes or one for each."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def agree(self, x: Any, part: Any, memory: Any) -> Any:
        return tree.map(lambda v: part.scaled(self.factor, v), part.comm.mean(x))


class Mixing(Scaled, batched=("factor",), random=False):
    """Takes the mean of the factors of all configurations."""

    def agree(self, x: Any, part: Any, memory: Any) -> Any:
        return tree.map(lambda v: v * torch.as_tensor(self.factor).mean(), part.comm.mean(x))


class Unshaped(Scaled, batched=("factor",), random=False):
    """Multiplies `[C, 1, *]` by `[C]`."""

    def agree(self, x: Any, part: Any, memory: Any) -> Any:
        return tree.map(lambda v: v * self.factor, part.comm.mean(x))


class AcrossNodes(Average, batched=(), random=False):
    """Divides by a norm over all dimensions but the first: of one node alone, of all nodes in a stack."""

    def agree(self, x: Any, part: Any, memory: Any) -> Any:
        norms = {name: v.flatten(1).norm(dim=1) for name, v in x.items()}
        return part.comm.mean({name: v / norms[name].view(-1, *[1] * (v.dim() - 1)) for name, v in x.items()})


class Idle(Average, batched=(), random=False):
    """Sends in a stack what it does not use."""

    def agree(self, x: Any, part: Any, memory: Any) -> Any:
        if part.size > 1:
            part.comm.sum(x)
        return part.comm.mean(x)


class Draws(Average, batched=(), random=False):
    def agree(self, x: Any, part: Any, memory: Any) -> Any:
        draw = torch.rand(1, generator=part.generator("draws", part.due.step)).item()
        return tree.map(lambda v: (1 - draw) * v, part.comm.mean(x))


class DrawingStrategy(Strategy, batched=(), random=False):
    def marks(self, run: RunFacts) -> list[Mark]:
        return [Mark("shake", 2)]

    def shake(self, part: Any) -> None:
        draw = torch.rand(1, generator=part.generator("shake", part.tick)).item()
        part.params = tree.map(lambda p: (1 - draw) * p, part.params)


class DrawingWho(Strategy, batched=(), random=False):
    """Draws before the run, for its timetable."""

    def who_trains(self, run: RunFacts) -> Any:
        return lambda step, rows: drawn(0.5, rows, run.seed, step)


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (exchanging(Mixing(0.9)), "step 1, params first.weight of node 0: differs by 0.17"),
        (exchanging(AcrossNodes()), "step 1, params first.weight of node 0: differs by 0.5"),
        (exchanging(Draws()), "step 1, params first.weight of node 0 with another seed: differs by"),
        (DrawingStrategy("sgd", lr=0.05), "step 1, params first.weight of node 0 with another seed: differs by"),
        (DrawingWho("sgd", lr=0.05), "step 0, losses of node 0 with another seed: has another"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_promise_that_the_code_does_not_keep_is_found(strategy: Strategy, wanted: str) -> None:
    """`batched=` of code that mixes configurations, and `random=False` of code that draws."""
    check = in_a_stack(strategy)
    assert not check.passed
    assert str(check.finding).startswith(wanted)
    rules = (RULES["seeds"],) if "seed" in wanted else ()
    assert str(check.finding).endswith(f"Read: {'; '.join((*rules, RULES['stack']))}.")
    assert check.first_failure is not None
    assert check.first_failure.step == int(wanted[5])


def test_what_does_not_send_the_same_always_is_found() -> None:
    class More(Mean, batched=(), random=False, steady=True):
        def agree(self, x: Any, part: Any, memory: Any) -> Any:
            for _ in range(part.due.number):
                part.comm.all_gather(x)
            return super().agree(x, part, memory)

    class Asked(More, batched=(), random=False):
        pass

    assert in_a_stack(exchanging(Asked())).passed
    with pytest.raises(
        ValueError, match=r"Exchange\(More\(\), every=2\)\) does not always send the same: leave out stea"
    ):
        in_a_stack(exchanging(More()))


def test_the_same_without_the_promise_is_right() -> None:
    """Its configurations are no group: each has its handlers called for itself."""

    class Apart(Mixing):
        def agree(self, x: Any, part: Any, memory: Any) -> Any:
            return super().agree(x, part, memory)

    class Random(DrawingStrategy, batched=()):
        def shake(self, part: Any) -> None:
            super().shake(part)

    assert (Apart.batched, Random.batched, Random.random) == (None, (), True)
    assert in_a_stack(exchanging(Apart(0.9))).passed
    assert in_a_stack(Random("sgd", lr=0.05)).passed


@pytest.mark.parametrize("factor", [0.9, torch.tensor([0.6, 0.7, 0.8, 0.9])])
def test_a_setting_of_each_node_in_a_stack(factor: Any) -> None:
    assert in_a_stack(exchanging(Scaled(factor))).passed


def test_what_only_a_stack_refuses_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"step 1: .* but fails in a stack .*\. The contract: What a stack"):
        in_a_stack(exchanging(Unshaped(0.9)))


def test_other_bytes_in_a_stack_are_found() -> None:
    check = in_a_stack(exchanging(Idle()))
    assert (check.worst("params"), check.worst("ledger_bytes")) == (0, math.inf)
    assert "ledger mean of 6992 bytes with all in one process, sum of 6992 bytes, mean" in str(check.finding)


class Shrunk(Strategy, batched=("share",), random=False):
    """The run's model is a part of what the nodes train."""

    def __init__(self, share: float, **inner: Any) -> None:
        super().__init__("sgd", [Exchange(Mean(), every=2)], **inner)
        self.share = share

    def result(self, state: Any) -> Any:
        return tree.map(lambda p: p * self.share, state.params)


def test_a_result_of_its_own_is_that_of_each_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_a_stack(Shrunk(0.5, lr=0.1)).passed
    assert checked(Shrunk(0.5, lr=0.1)).passed
    of_first = lambda self, state, config=0: self._result(0, state, self.groups[0].members[0])  # noqa: E731
    monkeypatch.setattr(Stack, "result", of_first)
    finding = in_a_stack(Shrunk(0.5, lr=0.1)).finding
    assert str(finding).startswith("step 0, strategy result.first.weight of node 0 with half the numbers: differs by")


def test_absent_nodes_in_a_stack() -> None:
    table = torch.rand(4, K, generator=torch.Generator().manual_seed(1)) < 0.6
    table[:, 0] |= ~table.any(1)
    strategy = Strategy("sgd", [Exchange(Outer(Scaled(0.9)), every=2, delay=1)], lr=0.05)
    assert in_a_stack(strategy, availability=Trace(table, rejoin="shared")).passed


def test_a_strategy_for_one_rank_in_a_stack() -> None:
    """Its state is in its copies: the stack has others than each configuration alone."""
    check = in_a_stack(OneRank("adamw", lr=0.1))
    assert check.passed
    assert len(check.rows) == 4


# ------------------------------------------------------------------------------------------------------------- command


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--strategy", "gossip", "--steps", "2", "--num-processes", "2"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("gossip: passed\n")
    assert "4 nodes in 2 processes, 2 steps, torch.float64" in output
    assert cli.main(["verify", "--list"]) == 0
    assert "diloco" in capsys.readouterr().out.split()
    assert cli.main(["verify", "--strategy", "x"]) == 1
    assert "Allowed: 'all', 'independent', 'allreduce'" in capsys.readouterr().err
    assert cli.main(["verify", "--strategy", "diloco", "--num-processes", "3"]) == 1
    assert "one of [1, 2, 4]" in capsys.readouterr().err


OWN = """
import torch
from tests.test_verify import MeanOfMine, data, make_model, of
from vecgym.strategy import FedAvgStrategy

def config(H=2):
    return FedAvgStrategy("sgd", H=H, lr=0.1)

def whole(right=True):
    strategy = config() if right else of(MeanOfMine())
    return {"model": make_model("MLP"), "train_dataset": data(), "strategy": strategy, "num_nodes": 6, "max_steps": 100}

def half():
    return {"model": make_model("MLP"), "strategy": config()}

def number():
    return 3
"""


def test_command_for_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", sys.path[:])
    (tmp_path / "own.py").write_text(OWN)
    file = str(tmp_path / "own.py")
    assert cli.main(["verify", file, "--steps", "3", "--set", "H=3"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{file}: passed\nFedAvgStrategy(")
    assert "every=3" in output
    assert cli.main(["verify", f"{file}:whole", "--steps", "2", "--num-processes", "3"]) == 0
    assert "6 nodes in 3 processes, 2 steps" in capsys.readouterr().out
    assert cli.main(["verify", f"{file}:whole", "--steps", "2", "--set", "right=False", "--num-nodes", "4"]) == 1
    output = capsys.readouterr().out
    assert f"{file}:whole: FAILED" in output
    assert "exact: step 0, params first.weight of node 0: differs by" in output
    for function, message in (("half", "give model and train_dataset"), ("number", "a Strategy, or a dict")):
        assert cli.main(["verify", f"{file}:{function}"]) == 1
        assert message in capsys.readouterr().err
    for argv in (["verify", file, "--strategy", "diloco"], ["verify", "--set", "H=3"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(argv)
        assert exit_.value.code == 2


def test_command_fails_where_a_strategy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vecgym.runs.verification.STRATEGIES, "wrong", lambda: of(MeanOfMine()))
    assert cli.main(["verify", "--strategy", "wrong", "--steps", "1"]) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_processes": 0}, "num_processes=0 must be an integer >= 1"),
        ({"num_processes": 1.0}, "num_processes=1.0 must be an integer >= 1"),
        ({"steps": -1}, "steps=-1 must be an integer >= 1"),
        ({"num_nodes": 0}, "num_nodes=0 must be an integer >= 1"),
        ({"batch_size": 0}, "batch_size=0 must be an integer >= 1"),
        ({"engine": "steam"}, "Allowed: 'auto', 'vmap'"),
        ({"timeout_s": 0}, "timeout_s=0 must be a number"),
    ],
)
def test_bad_numbers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(FedAvgStrategy("sgd"), **settings)


def test_bad_settings() -> None:
    with pytest.raises(TypeError, match="strategy is the class FedAvgStrategy"):
        checked(FedAvgStrategy)
    with pytest.raises(TypeError, match="model is of type str; give"):
        verify(FedAvgStrategy("sgd"), "MLP", data())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"allowed: torch\.float64, torch\.float32"):
        checked(FedAvgStrategy("sgd"), dtype=torch.float16)
    with pytest.raises(ValueError, match="must divide"):
        checked(FedAvgStrategy("sgd"), num_processes=3)


def test_exact_is_exact_where_kernels_round_by_place() -> None:
    """torch's SGD fuses multiplication and addition, except in the last values of a tensor: 10 fill no register."""
    strategy = FedAvgStrategy(vecgym.OptimSpec("sgd", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1), H=3)
    report = checked(strategy, num_processes=4, steps=6, dtype=torch.float32)
    assert report.passed
    assert report.checks[0].worst("params") == report.checks[0].worst("optimizer") == 0
