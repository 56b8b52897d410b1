"""Availability: who is there in which step; those present train and exchange as if there were no others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cards import CARDS
from tests.fitting import dataset, fit
from tests.helpers import (
    assert_same_bits,
    difference,
    each_row,
    flat,
    reordered,
    simulation,
    stacked,
)
from tests.models import make_batches, make_model
from tests.reference import common
from tests.test_properties import STRATEGIES
from vecgym import OptimSpec, rollout, sweep
from vecgym.availability import (
    Availability,
    Both,
    Deadline,
    Dropout,
    Facts,
    Function,
    LocalSteps,
    Presence,
    Sampled,
    Trace,
)
from vecgym.clock import Compute, Network
from vecgym.collectives import StackedCollectives
from vecgym.collectives import topology as graphs
from vecgym.collectives.topology import Links, exponential
from vecgym.compress import TopK
from vecgym.core import rng
from vecgym.core.objects import altered
from vecgym.core.tree import Tree
from vecgym.simulation import Part
from vecgym.simulation.returning import sent
from vecgym.simulation.state import State
from vecgym.strategy import (
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    Compressed,
    DiLoCoStrategy,
    Eager,
    Exchange,
    FedAvgStrategy,
    GossipStrategy,
    Mean,
    Mix,
    Outer,
    RankStrategy,
    Robust,
    ServerMean,
    Strategy,
)
from vecgym.strategy.catalogue import CATALOGUE
from vecgym.strategy.simulated import simulation_of
from vecgym.strategy.stages import Average, Memory

K, STEPS, H = 5, 7, 3
F64 = torch.float64

# Every strategy of the catalogue, and those of the table of properties, in small.
MADE: dict[str, Callable[[], Strategy]] = {
    **{name: partial(row.make, H=H, p=0.3, inner_optim="adamw", lr=0.01) for name, row in CATALOGUE.items()},
}  # fmt: skip
MADE |= {
    name: partial(row.make, inner_optim="adamw", lr=0.01) for name, row in STRATEGIES.items() if name not in CATALOGUE
}
EVEN = {name for name, card in CARDS.items() if card.even}
EVERYONE = {name for name, card in CARDS.items() if card.everyone}  # tests/test_decentralised.py has their refusals


def batches_of(num_nodes: int = K, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> list[Any]:
    return stacked(make_batches("MLP", steps, num_nodes, batch_size=4, dtype=dtype))


class Taken:
    """A run of `Simulation`, step by step, in which each node reads the batch of its own count."""

    def __init__(
        self, strategy: Strategy, batches: Sequence[Any], availability: Availability | None, *, model: nn.Module,
        engine: str = "vmap", seed: int = 42, examples: Any = None,
    ) -> None:  # fmt: skip
        self.batches = batches
        num_nodes = len(batches[0][0])
        base = simulation(model, strategy, batches, engine=engine, seed=seed, num_examples=examples)
        presence = None
        if availability is not None:
            presence = Presence(availability, Facts(num_nodes, len(batches), seed))
        self.simulation = simulation_of(
            model, strategy, base.comm, engine=base.engine, max_steps=len(batches), seed=seed, presence=presence,
            num_examples=examples,
        )  # fmt: skip
        self.state = self.simulation.init()
        self.counts = [0] * num_nodes  # batches that each node has read
        self.losses: list[Tensor] = []
        self.rows: list[Any] = []
        self.states: list[State] = []
        self.counted: list[list[int]] = []

    def run(self, steps: int = STEPS, keep: bool = False) -> Taken:
        for _ in range(steps):
            events = next(self.simulation.timetable.ticks(self.state.tick))
            requests = list(self.simulation.requests(iter([events])))
            self.state, row = self.simulation.tick(self.state, events, map(self._batch, requests))
            self.simulation.comm.ledger.add(self.state.tick - 1, row.transfers)
            self.losses.append(row.losses)
            self.rows.append(row)
            if keep:
                self.states.append(copy.deepcopy(self.state))
                self.counted.append(list(self.counts))
        return self

    def _batch(self, request: Any) -> Any:
        rows, counts = request
        of_each = {row: self.counts[row] for row in rows}
        asked = [counts] * len(rows) if isinstance(counts, int) else counts
        if getattr(self.simulation.timetable, "reads_ahead", False):
            of_each = dict(zip(rows, asked))
        elif self.simulation.run.presence is not None:
            assert list(of_each.values()) == asked
        for row in rows:
            self.counts[row] += 1
        leaves = range(len(self.batches[0]))
        return tuple(torch.stack([self.batches[n][leaf][row] for row, n in of_each.items()]) for leaf in leaves), None


def rows_of(state: State, members: Sequence[int], num_nodes: int) -> dict[str, Tensor]:
    """The rows of some nodes of everything in the state; what is stored once, or equal on them, once."""
    found = {}
    for name, x in flat({**state.shared, **state.own}).items():
        own = x[list(members)] if len(x) == num_nodes > 1 else x
        found[name] = own[:1] if len(own) and torch.equal(own, own[:1].expand_as(own)) else own
    return found


@pytest.fixture
def model() -> nn.Module:
    return make_model("MLP")


@pytest.mark.parametrize("name", MADE)
def test_a_trace_of_ones_is_no_trace(name: str, model: nn.Module) -> None:
    count = K + 1 if name in EVEN else K
    examples = (3, 1, 4, 1, 5, 9)[:count]
    batches = batches_of(count)
    ones = Trace(torch.ones(STEPS, count, dtype=torch.bool))
    a = Taken(MADE[name](), batches, None, model=model, examples=examples).run()
    b = Taken(MADE[name](), batches, ones, model=model, examples=examples).run()
    assert_same_bits(a.state, b.state)
    assert_same_bits({"losses": torch.stack(a.losses)}, {"losses": torch.stack(b.losses)})
    assert list(a.simulation.comm.ledger) == list(b.simulation.comm.ledger)


def test_the_rate_is_that_of_the_step_whoever_is_there(model: nn.Module) -> None:
    """Each node's own count before the step, where most are there and all train at once, and where few are."""
    few = Trace(torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 1, 0], [1, 1, 0, 1], [1, 1, 1, 1]]).bool())
    strategy = Strategy("sgd", lr=1.0, lr_scheduler=lambda step: 0.5**step)
    run = Taken(strategy, batches_of(4, steps=5), few, model=model).run(5)
    timetable = run.simulation.timetable
    there = [few.table[tick].nonzero().flatten().tolist() for tick in range(5)]
    rates = [torch.as_tensor(strategy.rates(timetable, tick, nodes)[0]).tolist() for tick, nodes in enumerate(there)]
    assert rates == [1.0, 0.5, [0.5, 0.25], 0.25, 0.125]


@pytest.mark.parametrize("lr", [0.01, torch.arange(1.0, 6.0, dtype=F64) / 100], ids=["one rate", "own rates"])
@pytest.mark.parametrize("name", ["diloco", "local-adam", "gossip", "fedavg"])
def test_rows_apart_step_in_place_as_in_copies(name: str, lr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes of a large model step where they are, each run of consecutive ones at its own counts."""
    table = Trace(torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 1, 1], [1, 1, 0, 1, 1], [1, 0, 0, 0, 1], [1] * 5]).bool())
    calls: list[Tree] = []
    runs = Part._optimize_runs

    def counted(part: Part, grads: Tree, lr: Any) -> None:
        calls.append(grads)
        runs(part, grads, lr)

    monkeypatch.setattr(Part, "_optimize_runs", counted)
    found: dict[int, dict[str, Tensor]] = {}
    for large in (0, 1 << 30):
        monkeypatch.setattr("vecgym.simulation.simulation.LARGE", large)
        strategy = CATALOGUE[name].make(H=2, p=0.3, inner_optim="adamw", lr=lr, warmup_steps=3)
        state = Taken(strategy, batches_of(5, 5, F64), table, model=make_model("MLP", dtype=F64)).run(5).state
        found[large] = flat({**state.shared, **state.own})
        assert len(calls) == (0 if large else 4)
        calls.clear()
    assert difference(found[0], found[1 << 30]) < 1e-14


def renamed(told: Callable[..., Any], members: Sequence[int], *given: Any, **more: Any) -> Any:
    """A part whose nodes have other ids, by which codes draw."""
    part, memory = told(*given, **more)
    return altered(part, place=part.place._replace(nodes=[members[node] for node in part.place.nodes])), memory


@pytest.mark.parametrize("rejoin", ["own", "shared"])
@pytest.mark.parametrize("name", [name for name in MADE if name not in EVERYONE | {"matcha"}])
def test_nodes_that_are_never_there_are_as_if_they_were_not(name: str, rejoin: Any) -> None:
    """The run of nodes 0, 2 and 3 alone, to the bit where these have parameters of their own there, too.

    Nodes that exchange gradients share them there, and the mean of their gradients is rounded in another way. MATCHA
    has one graph for all nodes, with those that are never there.
    """
    shared = rejoin == "own" and any(exchange.of == "gradients" for exchange in MADE[name]().exchanges)
    dtype = F64 if shared else torch.float32
    count = K + 1 if name in EVEN else K
    model, batches, examples = (
        make_model("MLP", dtype=dtype),
        batches_of(count, dtype=dtype),
        (3, 1, 4, 1, 5, 9)[:count],
    )
    members = [0, 2, 3, 4] if name in EVEN else [0, 2, 3]
    table = torch.zeros(STEPS, count, dtype=torch.bool)
    table[:, members] = True
    some = Taken(MADE[name](), batches, Trace(table, rejoin=rejoin), model=model, examples=examples).run()
    fewer = Taken(
        MADE[name](), reordered(batches, members), None, model=model, examples=tuple(examples[i] for i in members)
    )  # fmt: skip
    fewer.simulation.comm.members = tuple(members)
    for exchange in fewer.simulation.algorithm.exchanges:
        exchange._view = partial(renamed, exchange._view, members)
    fewer.run()
    there, alone = rows_of(some.state, members, count), rows_of(fewer.state, range(len(members)), len(members))
    losses = {"losses": torch.stack(some.losses)[:, members]}, {"losses": torch.stack(fewer.losses)}
    for a, b in ((there, alone), losses):
        if shared:
            assert difference(a, b) < 1e-9
        else:
            assert_same_bits(a, b)
    sent, by_fewer = (x.simulation.comm.ledger.total_bytes for x in (some, fewer))
    assert sent * count == pytest.approx(by_fewer * len(members))


# --------------------------------------------------------------------------------------------- the absent


@pytest.mark.parametrize("name", ["allreduce", "diloco", "diloco-topk", "gossip", "local-adam", "sparta"])
def test_the_absent_keep_all_they_have(name: str, model: nn.Module) -> None:
    table = torch.rand(STEPS, K, generator=torch.Generator().manual_seed(3)) < 0.6
    table[:, 1] |= ~table.any(1)
    taken = Taken(MADE[name](), batches_of(), Trace(table), model=model).run(keep=True)
    for before, after in pairwise(taken.states):
        for node in (~table[before.step]).nonzero().flatten().tolist():
            assert taken.counted[before.step - 1][node] == taken.counted[after.step - 1][node]
            assert torch.isnan(taken.losses[before.step][node])
            for kind in ("params", "buffers", "optimizer"):
                old, new = (flat({**state.shared, **state.own}[kind]) for state in (before, after))
                for key, x in old.items():
                    assert torch.equal(x[node if len(x) > 1 else 0], new[key][node if len(new[key]) > 1 else 0]), key
    assert [len(each_row(row.events[-1], K)) for row in taken.rows] == table.sum(1).tolist()


def test_the_residual_of_the_absent_is_kept(model: nn.Module) -> None:
    table = torch.ones(STEPS, K, dtype=torch.bool)
    table[H - 1, 0] = table[2 * H - 1, 2] = False  # at the exchanges
    taken = Taken(MADE["diloco-topk"](), batches_of(), Trace(table), model=model).run(keep=True)
    for before, after, node in ((taken.states[H - 2], taken.states[H - 1], 0), (taken.states[4], taken.states[5], 2)):
        for key, x in flat(after).items():
            if "residual" in key:
                old = flat(before)[key]
                assert torch.equal(x[node], old[node if len(old) > 1 else 0])
                assert not torch.equal(x[1], old[1 if len(old) > 1 else 0])


# ------------------------------------------------------------------------------------------- naive twins


class Naive:
    """K models and optimizers of torch, one after the other; who is absent does nothing."""

    def __init__(self, model: nn.Module, batches: Any, table: Tensor, rejoin: str) -> None:
        self.models = common.copy_model(model, K)
        self.optimizers = common.make_optimizers(self.models, (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}))
        self.thetas = [common.parameters(m) for m in self.models]
        self.batches, self.table, self.rejoin = batches, table, rejoin
        self.counts = [0] * K

    def present(self, step: int) -> list[int]:
        return self.table[step].nonzero().flatten().tolist()

    def begin(self, step: int, outer: dict[str, Tensor] | None = None) -> list[int]:
        """A node that returns takes the outer parameters, or the mean of the nodes that were there before."""
        there, before = self.present(step), self.present(step - 1) if step else self.present(0)
        if self.rejoin == "shared":
            for name in self.thetas[0]:
                mean = common.mean([self.thetas[i][name].detach() for i in before])
                mean = mean if outer is None else outer[name]
                for i in set(there) - set(before):
                    self.thetas[i][name].data.copy_(mean)
        return there

    def gradient(self, node: int) -> None:
        common.backward(self.models[node], self.batches[self.counts[node]][node])
        self.counts[node] += 1


def naive_allreduce(naive: Naive) -> None:
    for step in range(STEPS):
        there = naive.begin(step)
        for i in there:
            naive.gradient(i)
        common.average_gradients([naive.models[i] for i in there])
        for i in there:
            naive.optimizers[i].step()


def naive_diloco(naive: Naive) -> None:
    """The outer parameters are those of the network: whoever is there takes the outer step together."""
    outer = {name: p.detach().clone() for name, p in naive.thetas[0].items()}
    optimizer = torch.optim.SGD(list(outer.values()), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        there = naive.begin(step, outer)
        for i in there:
            naive.gradient(i)
            naive.optimizers[i].step()
        if (step + 1) % H == 0:
            for name, p in outer.items():
                p.grad = common.mean([p - naive.thetas[i][name].detach() for i in there])
            optimizer.step()
            for i in there:
                for name, p in outer.items():
                    naive.thetas[i][name].data.copy_(p)


@pytest.mark.parametrize("rejoin", ["own", "shared"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("which", ["allreduce", "diloco"])
def test_it_is_what_a_naive_loop_does(which: str, seed: int, rejoin: Any) -> None:
    model = make_model("MLP", dtype=F64)
    lists = make_batches("MLP", STEPS, K, batch_size=4, dtype=F64)
    table = torch.rand(STEPS, K, generator=torch.Generator().manual_seed(seed)) < 0.6
    table[:, 1] |= ~table.any(1)
    inner: dict[str, Any] = {"inner_optim": OptimSpec("sgd", lr=0.1, momentum=0.9)}
    strategy = AllReduceStrategy(**inner) if which == "allreduce" else DiLoCoStrategy(H=H, **inner)
    taken = Taken(strategy, stacked(lists), Trace(table, rejoin=rejoin), model=model).run()
    naive = Naive(model, lists, table, rejoin)
    if which == "allreduce":
        if rejoin == "shared":  # what is stored once is shared: the momentum of those who were there
            share_optimizer(naive)
        naive_allreduce(naive)
    else:
        naive_diloco(naive)
    shown = range(K) if not (rejoin == "shared" and which == "allreduce") else naive.present(STEPS - 1)
    for node in shown:
        for name, p in naive.thetas[node].items():
            x = taken.state.params[name]
            torch.testing.assert_close(x[node if len(x) > 1 else 0], p.detach(), rtol=1e-12, atol=1e-12)
    assert taken.counts == naive.counts


@pytest.mark.parametrize("rejoin", ["own", "shared"])
def test_what_a_node_has_of_its_own_goes_by_its_own_count(rejoin: Any) -> None:
    """AllReduce with a rate for each node, and a warm-up: parameters, moments, rates and counts are each node's own.

    Node 1 is there alone at first, nodes 0 and 2 only later, which changes nothing of what these begin with.
    """
    model, lists = make_model("MLP", dtype=F64), make_batches("MLP", STEPS, K, batch_size=4, dtype=F64)
    table = torch.ones(STEPS, K, dtype=torch.bool)
    table[:2] = torch.arange(K) == 1
    table[:4, 2] = table[5, 0] = False
    rates = [0.01, 0.02, 0.03, 0.04, 0.05]
    strategy = AllReduceStrategy("adam", lr=torch.tensor(rates, dtype=F64), warmup_steps=4)
    taken = Taken(strategy, stacked(lists), Trace(table, rejoin=rejoin), model=model).run(keep=True)
    for state in taken.states[:2]:  # nobody but node 1 has moved
        for p in state.params.values():
            wide = p.expand(K, *p.shape[1:])
            assert torch.equal(wide[0], wide[2])
    naive = Naive(model, lists, table, rejoin)
    naive.optimizers = [torch.optim.Adam(m.parameters(), lr=lr) for m, lr in zip(naive.models, rates)]
    for step in range(STEPS):
        there = naive.begin(step)
        for i in there:
            naive.optimizers[i].param_groups[0]["lr"] = rates[i] * min(1.0, naive.counts[i] / 4)
            naive.gradient(i)
        common.average_gradients([naive.models[i] for i in there])
        for i in there:
            naive.optimizers[i].step()
    for node in range(K):
        for name, p in naive.thetas[node].items():
            torch.testing.assert_close(taken.state.params[name][node], p.detach(), rtol=1e-9, atol=1e-9)
    assert taken.counts == naive.counts


@pytest.mark.parametrize("which", ["diloco", "eager"])
def test_rates_of_an_outer_optimizer_go_by_the_exchange(which: str) -> None:
    """One rate for each exchange: node 2, which is there for the last ones only, takes the last rates."""
    table, rates = torch.ones(8, 3, dtype=torch.bool), torch.tensor([[0.0], [0.0], [0.0], [1.0]], dtype=F64)
    table[:5, 2] = False
    outer = OptimSpec("sgd", lr=rates)
    module = Exchange((Outer if which == "diloco" else Eager)(Mean(), outer), every=2)
    strategy = CommunicateOptimizeStrategy([module], "sgd", lr=0.1)
    model = make_model("MLP", dtype=F64)
    taken = Taken(strategy, batches_of(3, 8, F64), Trace(table), model=model).run(8, keep=True)
    for name, p in taken.states[5].params.items():  # after three exchanges at rate 0 it is where all began
        torch.testing.assert_close(p, dict(model.named_parameters())[name].detach().expand_as(p))
    assert not all(torch.equal(p[2], taken.states[5].params[name][-1]) for name, p in taken.state.params.items())


def share_optimizer(naive: Naive) -> None:
    """A node that returns takes the momentum of one that was there."""
    begin = naive.begin

    def sharing(step: int) -> list[int]:
        there, before = begin(step), naive.present(step - 1) if step else naive.present(0)
        for i in set(there) - set(before):
            state = copy.deepcopy(naive.optimizers[before[0]].state_dict())
            naive.optimizers[i].load_state_dict(state)
        return there

    naive.begin = sharing  # type: ignore[assignment,method-assign]


# -------------------------------------------------------------------------------------------------- bytes


def sizes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("name", ["demo", "diloco-topk"])
def test_what_one_node_alone_keeps_is_its_own(name: str, model: nn.Module) -> None:
    """In the first exchange only node 1 is there: its residual is not that of the others."""
    table = torch.ones(4, 3, dtype=torch.bool)
    table[:2] = torch.tensor([False, True, False])
    strategy = CATALOGUE[name].make(H=1, p=0.3, inner_optim="sgd", lr=0.1)
    taken = Taken(strategy, batches_of(3, 4), Trace(table), model=model).run(2)
    found = [x for path, x in flat(taken.state).items() if "residual" in path]
    residuals = [x.expand(3, *x.shape[1:]) for x in found]
    assert all(bool((x[[0, 2]] == 0).all()) for x in residuals)
    assert any(bool(x[1].any()) for x in residuals)


def held(own: dict[str, Any]) -> dict[str, Any]:
    """The memory of exchanges for each node."""
    return {name: x for name, x in own.items() if name not in ("params", "buffers", "optimizer")}


def test_what_those_present_agree_on_is_not_what_the_absent_have(model: nn.Module) -> None:
    """Two of three nodes are NoLoCo's one group, so that they end equal; the third keeps its outer parameters."""
    table = torch.ones(4, 3, dtype=torch.bool)
    table[2:, 0] = False
    strategy = CATALOGUE["noloco"].make(H=2, inner_optim="sgd", lr=0.1)
    taken = Taken(strategy, batches_of(3, 4), Trace(table), model=model).run(4, keep=True)
    before, after = (flat(held(state.own)) for state in (taken.states[1], taken.states[3]))
    for path, x in after.items():
        assert torch.equal(x[0], before[path][0 if len(before[path]) > 1 else -1])
        assert not torch.equal(x[1], before[path][1 if len(before[path]) > 1 else -1])


@pytest.mark.parametrize("name", ["allreduce", "diloco"])
def test_bytes_of_three_of_four(name: str, model: nn.Module) -> None:
    """A ring of 3 nodes: each sends 2 * 2 / 3 of the model, on average over the 4 nodes 1 time the model."""
    table = torch.ones(STEPS, 4, dtype=torch.bool)
    table[:, 1] = False
    taken = Taken(MADE[name](), batches_of(4), Trace(table), model=model).run()
    exchanges = STEPS if name == "allreduce" else STEPS // H
    ledger = taken.simulation.comm.ledger
    assert ledger.total_bytes == pytest.approx(exchanges * 3 * (2 * 2 / 3) / 4 * sizes(model))
    assert {entry.transfer.who for entry in ledger} == {((0, 2, 3),)}
    assert {entry.transfer.num_nodes for entry in ledger} == {4}
    assert {entry.participants for entry in ledger} == {3}


def test_bytes_of_who_returns(model: nn.Module) -> None:
    """AllReduce, DiLoCo: the model, from one node to the one that returns. FedAvg: and the mean of the others before,
    unless these have just averaged."""
    table = torch.ones(4, 4, dtype=torch.bool)
    table[1, 2] = False
    fedavg = partial(FedAvgStrategy, "sgd", lr=0.1)
    for strategy, means in ((AllReduceStrategy("sgd", lr=0.1), 4), (DiLoCoStrategy("sgd", H=10, lr=0.1), 0),
                            (fedavg(H=10), 1), (fedavg(H=2), 2)):  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            taken = Taken(strategy, batches_of(4, 4), Trace(table, rejoin="shared"), model=model).run(4)
        links = [e.transfer for e in taken.simulation.comm.ledger if e.operation == "permute"]
        assert [(x.payload_bytes, x.who.pairs) for x in links] == [(sizes(model), [(0, 2)])]  # type: ignore[union-attr]
        of_three = [e for e in taken.simulation.comm.ledger if e.transfer.who == ((0, 1, 3),)]
        assert len(of_three) == min(means, 1)
        assert len([e for e in taken.simulation.comm.ledger if e.operation == "mean"]) == means


@pytest.mark.parametrize("H", [1, 4])
def test_a_node_that_returns_is_sent_the_outer_parameters_once(H: int, model: nn.Module) -> None:
    """Bytes: the rings of those who exchange, and the model for each return. What is sent is what it begins with."""
    table = torch.rand(12, 4, generator=torch.Generator().manual_seed(1)) < 0.7
    table[:, 0] |= ~table.any(1)
    strategy = DiLoCoStrategy("sgd", H=H, lr=0.0)
    taken = Taken(strategy, batches_of(4, 12), Trace(table, rejoin="shared"), model=model).run(12, keep=True)
    returns = int((table[1:] & ~table[:-1]).sum())
    rings = sum(2 * (n - 1) for n in table.sum(1)[H - 1 :: H].tolist())
    assert returns > 5
    assert taken.simulation.comm.ledger.total_bytes * 4 == pytest.approx((rings + returns) * sizes(model))
    for before, after in pairwise(taken.states):
        for node in (table[before.step] & ~table[before.step - 1]).nonzero().flatten().tolist():
            if after.step % H:
                for name, x in before.shared["0.0/params"].items():
                    assert torch.equal(after.params[name][node if len(after.params[name]) > 1 else 0], x[0])


PARTICIPATION: dict[str, Callable[[float], Strategy]] = {
    "fedavg": lambda p: FedAvgStrategy("sgd", H=H, participation=p, lr=0.1),
    "weighted": lambda p: FedAvgStrategy("sgd", H=H, participation=p, weighting="examples", lr=0.1),
    "fedavgm": lambda p: FedAvgStrategy("sgd", H=H, participation=p, server_optim="avgm", lr=0.1),
    "fedprox": lambda p: FedAvgStrategy("sgd", H=H, participation=p, proximal_mu=0.1, lr=0.1),
    "codes": lambda p: CommunicateOptimizeStrategy(
        [Exchange(Outer(Compressed(ServerMean(), TopK(0.1), error_feedback=False)), every=H, participation=p)],
        "sgd", lr=0.1,
    ),
    "diloco": lambda p: CommunicateOptimizeStrategy(
        [Exchange(Outer(Mean() if p == 1 else ServerMean()), every=H, participation=p)], "sgd", lr=0.1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTICIPATION)
@pytest.mark.parametrize("fraction", [0.1, 0.4, 0.9])
def test_participation_and_sampled_send_the_same(name: str, fraction: float, model: nn.Module) -> None:
    """One route for both, through a server: the same nodes, losses and bytes, up and down."""
    found = []
    for strategy, availability in (
        (PARTICIPATION[name](fraction), None), (PARTICIPATION[name](1.0), Sampled(fraction, H)),
    ):  # fmt: skip
        taken = Taken(strategy, batches_of(10, 12, F64), availability, model=make_model("MLP", dtype=F64),
                      examples=tuple(range(1, 11))).run(12)  # fmt: skip
        ledger = taken.simulation.comm.ledger
        found.append((torch.stack(taken.losses), ledger.total_bytes, ledger.total_received_bytes))
    (a, *sent), (b, *again) = found
    torch.testing.assert_close(a, b, equal_nan=True)
    assert sent == pytest.approx(again)
    assert sent[0] > 0


def test_nodes_are_sampled_once() -> None:
    with pytest.raises(ValueError, match=r"Sampled.* and participation=0.5 both sample the nodes, .* leave one"):
        fit("MLP", PARTICIPATION["fedavg"](0.5), num_nodes=4, max_steps=H, availability=Sampled(0.5, H) & Dropout(0.1))
    fit("MLP", PARTICIPATION["fedavg"](0.5), num_nodes=4, max_steps=H, availability=Dropout(0.1))


def test_who_returns_in_a_round_is_sent_the_model_all_the_same(model: nn.Module) -> None:
    """Sampled in rounds of 1 step, and the exchange after every second: every other return is in a round."""
    availability = Sampled(0.4, H=1)
    taken = Taken(FedAvgStrategy("sgd", H=2, lr=0.1), batches_of(5, 12), availability, model=model).run(12)
    table = availability.present(Facts(5, 12, 42))(0, 12)
    returns = (table[1:] & ~table[:-1]).sum(1)
    sent = [0] * 12
    for entry in taken.simulation.comm.ledger:
        if entry.operation == "permute":
            sent[entry.step] += len(entry.transfer.who.pairs)  # type: ignore[union-attr]
    assert sent == [0, *[int(n) * (step % 2 == 1) for step, n in enumerate(returns.tolist(), 1)]]


def test_collectives_of_some_nodes_are_those_of_a_smaller_run() -> None:
    four, two = StackedCollectives(4), StackedCollectives(2)
    some, x, W = four.among([1, 3]), torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.full((2, 2), 0.5)
    calls: list[Callable[[Any], Any]] = [
        lambda c: c.mean(x), lambda c: c.sum(x), lambda c: c.mean(x, weights=[1, 3]), lambda c: c.all_gather(x),
        lambda c: c.broadcast(x, src=1), lambda c: c.permute(x, [1, 0]), lambda c: c.mix(x, W),
        lambda c: c.server_mean(x, [1]), lambda c: c.server_sum(x, [0, 1]), lambda c: c.server_gather(x, [0]),
        lambda c: c.mean(x, groups=[[0], [1]]), lambda c: c.server_send(x[:1], [1]),
    ]  # fmt: skip
    for call in calls:
        assert torch.equal(call(some), call(two))
    named = {0: 1, 1: 3}
    for a, b in zip(four.ledger, two.ledger):
        assert a.sent_bytes * 4 == b.sent_bytes * 2
        assert a.received_bytes * 4 == b.received_bytes * 2
        assert a.operation == b.operation
        if isinstance(b.transfer.who, Links):
            assert a.transfer.who.pairs == [(named[i], named[j]) for i, j in b.transfer.who.pairs]  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------- who is there


def facts(num_nodes: int = 4, num_steps: int = 10, seed: int = 0, **more: Any) -> Facts:
    return Facts(num_nodes, num_steps, seed, **more)


def test_dropout_is_the_chain_that_it_says() -> None:
    run = facts(num_nodes=40, num_steps=20_000)
    there = Dropout(0.3, mean_steps=8).present(run)(0, 20_000)
    assert bool(there[0].all())
    assert float((~there).double().mean()) == pytest.approx(0.3, abs=0.01)
    leaves, comes = (there[:-1] & ~there[1:]).sum(), (~there[:-1] & there[1:]).sum()
    assert float(leaves / there[:-1].sum()) == pytest.approx(0.3 / 0.7 / 8, rel=0.05)
    assert float(comes / (~there[:-1]).sum()) == pytest.approx(1 / 8, rel=0.05)
    # A chain has no memory: how long a node has been away says nothing.
    away = ~there[:-2] & ~there[1:-1]
    assert float((away & there[2:]).sum() / away.sum()) == pytest.approx(1 / 8, rel=0.07)


@pytest.mark.parametrize(
    "availability", [Dropout(0.4, 5), Sampled(0.5, H=3), Dropout(0.9, 9), Dropout(0.4, 1), Dropout(0.0)]
)
def test_who_is_there_is_a_function_of_the_step(availability: Availability) -> None:
    whole = availability.present(facts(num_steps=500))(0, 500)
    parts = [availability.present(facts(num_steps=500))(first, first + 7) for first in range(0, 490, 7)]
    assert torch.equal(torch.cat(parts), whole[:490])
    assert torch.equal(availability.present(facts(num_steps=200))(0, 200), whole[:200])  # of a longer run, the first
    other = availability.present(facts(num_steps=500, seed=1))(0, 500)
    assert torch.equal(other, whole) == (availability.rejoin == "own" and availability.rate == 0)  # type: ignore[attr-defined]


def test_blocks_of_steps_make_no_difference() -> None:
    there = Dropout(0.2, 30)
    presence = Presence(there, facts(num_nodes=12, num_steps=3000))
    whole = there.present(facts(num_nodes=12, num_steps=3000))(0, 3000)
    for step in (0, 1023, 1024, 2047, 2999, 5):
        assert torch.equal(presence.is_present(step), whole[step])
        returning = () if step == 0 else tuple((whole[step] & ~whole[step - 1]).nonzero().flatten().tolist())
        assert presence.returning(step) == returning


def test_deadline_leaves_out_who_is_late() -> None:
    run = facts(num_nodes=3, num_steps=6, compute=Compute([0.1, 0.5, 1.0]))
    assert Deadline(1.2, H=3).present(run)(0, 6).tolist() == [[True, False, False]] * 6
    assert Deadline(1.5, H=3).present(run)(4, 5).tolist() == [[True, True, False]]
    jittery = facts(num_nodes=8, num_steps=60, compute=Compute.lognormal(1.0, 0.5, seed=1))
    took = jittery.compute.of_steps(60, 8).view(20, 3, 8).sum(1)
    assert torch.equal(Deadline(4.0, H=3).present(jittery)(0, 60)[::3], took <= 4.0)


def test_sampled_is_participation(model: nn.Module) -> None:
    """Of FedAvg: the same nodes, rounds and models; only those who rest are told later."""
    batches, losses = batches_of(steps=9), []
    for strategy, availability in (
        (FedAvgStrategy("sgd", H=H, participation=0.6, lr=0.1), None),
        (FedAvgStrategy("sgd", H=H, lr=0.1), Sampled(0.6, H)),
    ):
        taken = Taken(strategy, batches, availability, model=model).run(9)
        losses.append(torch.stack(taken.losses))
    assert torch.equal(losses[0].isnan(), losses[1].isnan())
    assert losses[0].isnan().any()
    torch.testing.assert_close(losses[0], losses[1], equal_nan=True)


def test_local_steps_wait_for_the_exchange(model: nn.Module) -> None:
    """By hand: FedAvg whose nodes take 1, 2, 3 local steps; as if the others' gradients were 0."""
    lists = make_batches("MLP", 6, 3, batch_size=4, dtype=F64)
    model = make_model("MLP", dtype=F64)
    taken = Taken(
        FedAvgStrategy("sgd", H=3, lr=0.1), stacked(lists), LocalSteps([1, 2, 3], H=3), model=model
    ).run(6)  # fmt: skip
    models = common.copy_model(model, 3)
    optimizers = common.make_optimizers(models, (torch.optim.SGD, {"lr": 0.1}))
    counts = [0, 0, 0]
    for _ in range(2):
        for node in range(3):
            for _ in range(node + 1):
                common.backward(models[node], lists[counts[node]][node])
                optimizers[node].step()
                counts[node] += 1
        common.average_parameters(models)
    for name, p in common.parameters(models[0]).items():
        torch.testing.assert_close(taken.state.params[name][0], p.detach(), rtol=1e-12, atol=1e-12)
    assert taken.counts == counts == [2, 4, 6]
    assert [event.rows for row in taken.rows for event in row.events if event.what == "meet"] == [None] * 2


def test_epochs_of_shards_of_unequal_size() -> None:
    run = facts(num_nodes=3, num_steps=10, num_examples=(3, 16, 17), batch_size=8)
    assert LocalSteps(epochs=2, H=6).training(run)(0, 6).sum(0).tolist() == [2, 4, 6]


def test_together_is_both() -> None:
    table = torch.tensor([[True, True], [False, True]])
    both = Trace(table, rejoin="shared") & LocalSteps([2, 1], H=2)
    presence = Presence(both, facts(num_nodes=2, num_steps=2))
    assert (presence.present(0), presence.training(0)) == (None, None)
    assert (presence.present(1), presence.training(1)) == ((1,), ())
    assert presence.rejoin == "shared"
    third = Both(both, LocalSteps([1, 2], H=2)).training(facts(num_nodes=2, num_steps=2))
    assert third is not None
    assert third(0, 2).tolist() == [[True, True], [False, False]]


def test_parameters_stay_in_the_models_order(model: nn.Module) -> None:
    """By which they are cut into fragments, also where a node returns that takes some of them from a server."""
    table = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]]).bool()
    taken = Taken(MADE["streaming"](), batches_of(4, 3), None, model=model)
    params = {name: p.expand(4, *p.shape[1:]) for name, p in taken.state.params.items()}
    presence = Presence(Trace(table, rejoin="shared"), Facts(4, 3, 42))
    some = dict(list(taken.state.params.items())[1::2])
    begun = sent(params, presence, some, set(), taken.simulation.comm, 2, once=[])
    assert list(begun) == list(params)


def test_neighbours_give_a_copy(model: nn.Module) -> None:
    table = torch.ones(3, 4, dtype=torch.bool)
    table[1, 2] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = Taken(
            DiLoCoStrategy("sgd", H=10, lr=0.0), batches_of(4, 3), Trace(table, rejoin="neighbour"), model=model
        )  # fmt: skip
        params = {name: torch.arange(4.0).view(4, *[1] * (p.dim() - 1)).expand(4, *p.shape[1:]).clone()
                  for name, p in taken.state.params.items()}  # fmt: skip
        taken.state.own["params"].update(params)
        taken.run(3)
    found = {float(p[2].flatten()[0]) for p in taken.state.params.values()}
    assert len(found) == 1
    assert found <= {0.0, 1.0, 3.0}
    sent = [e.transfer.who.pairs for e in taken.simulation.comm.ledger]  # type: ignore[union-attr]
    assert sent == [[(int(found.pop()), 2)]]


# ---------------------------------------------------------------------------------------------- of a fit


def settings(**more: Any) -> dict[str, Any]:
    return {"num_nodes": 4, "max_steps": 12, "val": dataset("MLP"), **more}


@pytest.mark.parametrize("name", ["allreduce", "diloco", "diloco-topk", "gossip", "demo"])
@pytest.mark.parametrize("rejoin", ["own", "shared", "neighbour"])
def test_a_resumed_run_is_an_uninterrupted_one(name: str, rejoin: Any, tmp_path: Path) -> None:
    options = settings(availability=Dropout(0.4, 3, rejoin=rejoin), checkpoint_interval=1, keep_checkpoints=50)
    whole, _ = fit("MLP", MADE[name](), save_dir=tmp_path / "a", **options)
    later, _ = fit("MLP", MADE[name](), resume=tmp_path / "a" / "step-000000005.pt", **{
        **options, "checkpoint_interval": None})  # fmt: skip
    assert_same_bits(whole.state, later.state)
    assert whole.history["num_present"] == later.history["num_present"]
    assert list(whole.ledger) == list(later.ledger)
    with pytest.raises(ValueError, match=r"availability\.rate: saved 0\.4, given 0\.5"):
        fit("MLP", MADE[name](), resume=tmp_path / "a" / "step-000000005.pt", **{
            **options, "checkpoint_interval": None, "availability": Dropout(0.5, 3, rejoin=rejoin)})  # fmt: skip
    with pytest.raises(ValueError, match="availability: saved Dropout, given nothing"):
        fit("MLP", MADE[name](), resume=tmp_path / "a" / "step-000000005.pt", **{
            **options, "checkpoint_interval": None, "availability": None})  # fmt: skip


def test_a_function_of_the_step(model: nn.Module) -> None:
    a, _ = fit("MLP", "FedAvg", availability=lambda step: {step % 3, 2}, max_steps=6, batch_size=4)
    b, _ = fit("MLP", "FedAvg", availability=lambda step: [i in (step % 3, 2) for i in range(3)]
               if step % 3 != 2 else torch.tensor([False, False, True]), max_steps=6, batch_size=4)  # fmt: skip
    assert a.history["num_present"] == [2, 2, 1, 2, 2, 1]
    assert_same_bits(a.state, b.state)
    assert "function" in a.history.settings["availability"].lower()


def test_nodes_read_the_batches_of_their_own_count() -> None:
    """A node that misses two steps reads, when it is back, what it would have read then."""
    seen: list[Tensor] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach().clone())
            return (self.w - x).square().mean()

    def read(availability: Any) -> list[Tensor]:
        seen.clear()
        strategy = CommunicateOptimizeStrategy([], "sgd", lr=0.1)
        fit(Watching(), strategy, data=torch.arange(24.0), num_nodes=2, max_steps=5, batch_size=2,
            availability=availability, engine="loop")  # fmt: skip
        return list(seen)

    plain = read(None)[-10:]
    absent = read(lambda step: [0] if step in (1, 2) else [0, 1])[-8:]
    assert all(torch.equal(a, plain[i]) for a, i in zip(absent, (0, 1, 2, 4, 6, 3, 8, 5)))


@pytest.mark.filterwarnings("ignore:.*are never present")
def test_the_clock_does_not_wait_for_the_absent() -> None:
    clock: dict[str, Any] = {"compute": Compute([0.1, 0.1, 5.0]), "network": Network(1e15)}
    for availability, seconds in ((None, 20.0), (Deadline(1.0), 0.4)):
        trainer, _ = fit("MLP", "AllReduce", max_steps=4, availability=availability, **clock)
        assert trainer.history["sim_seconds"][-1] == pytest.approx(seconds, rel=1e-3)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nobody there": (lambda: fit(availability=Trace(torch.zeros(6, 3).bool()), max_steps=6), ValueError,
                     r"no node is present in step 0 \(counted from 0\)"),
    "nobody there later": (lambda: fit(availability=lambda step: [0] if step < 4 else [], max_steps=6), ValueError,
                           "no node is present in step 4"),
    "too short a trace": (lambda: fit(availability=Trace([[True] * 3]), max_steps=6), ValueError, "1 steps of 3 nodes"),
    "a trace of other nodes": (lambda: fit(availability=Trace([[True] * 4] * 6), max_steps=6), ValueError,
                               r"of 4 nodes, and the run has 6 steps of 3: give a row for each step, \[6, 3\]"),
    "a trace of numbers": (lambda: Trace([[1, 0]]), ValueError, "truth values"),
    "a trace of anything": (lambda: Trace("abc"), TypeError, "truth values"),
    "a class": (lambda: fit(availability=Dropout), TypeError, "give Dropout"),
    "a number": (lambda: fit(availability=0.5), TypeError, "availability is"),
    "an id that is none": (lambda: fit(availability=lambda step: [3], max_steps=6), ValueError, "0 to 2"),
    "an id twice": (lambda: fit(availability=lambda step: [1, 1], max_steps=6), ValueError, "distinct node ids"),
    "a rate of 1": (lambda: Dropout(1.0), ValueError, "rate=1.0"),
    "too short absences": (lambda: Dropout(0.9, 2), ValueError, "mean_steps >= 9"),
    "rejoin": (lambda: Dropout(0.1, rejoin="theirs"), ValueError, "rejoin='theirs'"),  # type: ignore[arg-type]
    "fraction": (lambda: Sampled(0.0), ValueError, "fraction=0.0"),
    "deadline without compute": (lambda: fit(availability=Deadline(1.0), max_steps=6), ValueError, "give compute="),
    "local steps of a gradient exchange": (lambda: fit("MLP", "AllReduce", availability=LocalSteps([1, 1, 2], H=2),
                                                       max_steps=6), ValueError, "exchanges gradients"),
    "local steps beyond H": (lambda: fit(availability=LocalSteps([1, 5, 2], H=4), max_steps=6), ValueError,
                             "node 1 takes 5 steps"),
    "local steps of others": (lambda: fit(availability=LocalSteps([1, 2], H=4), max_steps=6), ValueError, "2 numbers"),
    "local steps and epochs": (lambda: LocalSteps([1], epochs=1), ValueError, "give one of them"),
    "no local steps": (lambda: LocalSteps(H=2), ValueError, "give one of them"),
    "a matrix that is not symmetric": (
        lambda: fit("MLP", GossipStrategy(exponential(4), inner_optim="sgd"), num_nodes=4, max_steps=6,
                    availability=lambda step: [0, 1]), ValueError, "not symmetric"),
    "too few for trim": (
        lambda: fit("MLP", Strategy("sgd", [Exchange(Robust("trimmed_mean", trim=1), of="gradients")], lr=0.1),
                    max_steps=6, availability=lambda step: [0, 1]), ValueError, "leaves out all values of 2 nodes"),
    "one rank": (lambda: fit("MLP", PerRank("sgd", lr=0.1), availability=Dropout(0.1), max_steps=6), ValueError,
                 "written for one rank"),
}  # fmt: skip


class PerRank(RankStrategy):
    def step(self) -> None:
        self.optim.step()


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_work_is_refused(setting: str) -> None:
    call, error, message = REFUSED[setting]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("topology", ["ring", "torus", "exponential", "complete", "one_peer_exponential",
                                      "random_matching", "matrix", "function"])  # fmt: skip
def test_gossip_keeps_the_mean_of_those_present(topology: str) -> None:
    given: Any = {"matrix": graphs.ring(8), "function": lambda step: graphs.ring(8)}.get(topology, topology)
    average = Mix(given)
    for members in ([0, 1, 2, 3, 4, 6, 7], [0, 3, 4], [1, 6], [5], [0, 1, 2, 5, 6, 7]):
        some = StackedCollectives(8).among(members)
        x = {"w": torch.rand(len(members), 3, dtype=F64)}
        mixed = average(x, Part.alone(some, number=2, step=2))
        torch.testing.assert_close(mixed["w"].mean(0), x["w"].mean(0), rtol=1e-12, atol=1e-12)
        assert (mixed["w"] - mixed["w"].mean(0)).norm() <= (x["w"] - x["w"].mean(0)).norm() + 1e-12


@pytest.mark.parametrize("make", [
    lambda: [Exchange(Mean(), every=2, delay=1)],
    lambda: [Exchange(Outer(Mean()), every=2, delay=1)],
    lambda: [Exchange(Outer(Mean()), every=2, delay=[0, 1, 1])],
    lambda: [Exchange(Mean(), every=2, delay=1, late="change")],
])  # fmt: skip
def test_what_is_late_reaches_only_who_was_there(make: Callable[[], Any], model: nn.Module) -> None:
    """Node 2 misses the exchange at step 1, whose result is written after step 2 where node 2 is back."""
    table = torch.ones(4, 3, dtype=torch.bool)
    table[1, 2] = False
    strategy = CommunicateOptimizeStrategy(make(), "sgd", lr=0.1)
    taken = Taken(strategy, batches_of(3, 4), Trace(table), model=model).run(3, keep=True)
    alone = Taken(CommunicateOptimizeStrategy([], "sgd", lr=0.1), batches_of(3, 4), Trace(table), model=model).run(3)
    for name, p in taken.state.params.items():
        torch.testing.assert_close(p[2], alone.state.params[name][2], rtol=1e-6, atol=1e-7)
        assert not torch.allclose(p[0], alone.state.params[name][0], rtol=1e-6, atol=1e-7)


def test_who_is_absent_in_between_keeps_what_is_on_its_way() -> None:
    """Gossip of step 0 is written after step 3; node 2 is absent in step 1 or 2, and there again in step 3."""
    model, batches = make_model("MLP", dtype=F64), batches_of(3, 5, F64)
    for away in (1, 2):
        table = torch.ones(5, 3, dtype=torch.bool)
        table[away, 2] = False
        strategy = CommunicateOptimizeStrategy([Exchange(Mix("complete"), delay=3, late="change")], "sgd", lr=0.1)
        taken = Taken(strategy, batches, Trace(table), model=model).run(4, keep=True)
        own = CommunicateOptimizeStrategy([], "sgd", lr=0.1)
        alone = Taken(own, batches, Trace(table), model=model).run(4, keep=True)
        for name, p in taken.state.params.items():
            mine, first = (x.params[name] for x in (alone.states[3], alone.states[0]))
            late = mine + first.mean(0) - first  # they have moved alike besides, but for what was late
            torch.testing.assert_close(p, late, rtol=1e-12, atol=1e-12)


def test_an_outer_optimizer_of_islands_goes_by_the_exchange() -> None:
    """Adam's step from zero moments has a length that only rate and count decide: here that of the fifth exchange."""
    table, model = torch.ones(5, 3, dtype=torch.bool), make_model("MLP", dtype=F64)
    table[:4, 2] = False
    outer = OptimSpec("adam", lr=0.25, eps=1e-30)
    length = 0.25 * (0.1 / (1 - 0.9**5)) / (0.001 / (1 - 0.999**5)) ** 0.5
    for how in (Outer(Mean(island_size=2), outer), Eager(Mean(), outer)):
        strategy = CommunicateOptimizeStrategy([Exchange(how)], "sgd", lr=0.1)
        taken = Taken(strategy, batches_of(3, 5, F64), Trace(table), model=model).run(5, keep=True)
        moved = [taken.states[4].params[name][2] - taken.states[3].params[name][2] for name in taken.state.params]
        lengths = torch.cat([x.flatten() for x in moved]).abs()
        assert bool(((lengths - length).abs() < 1e-9).logical_or(lengths == 0).all())
        assert float(lengths.max()) > 0


class Counts(Average):
    """A count of each node's own, and one that they have together."""

    common = False

    def init(self, values: Any, run: Any, memory: Memory) -> None:
        memory.own["count"], memory.shared["count"] = torch.zeros(1), torch.zeros(1)

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        for held in (memory.own, memory.shared):
            held["count"] = held["count"] + 1
        return x


def test_a_count_of_each_nodes_own_has_a_row_for_each(model: nn.Module) -> None:
    table = torch.ones(4, 3, dtype=torch.bool)
    table[:3, 2] = table[1, 0] = False
    strategy = CommunicateOptimizeStrategy([Exchange(Counts())], "sgd", lr=0.1)
    taken = Taken(strategy, batches_of(3, 4), Trace(table), model=model)
    state = taken.run(4).state
    assert state.own["0.0/count"].tolist() == taken.counts == [3, 4, 1]
    assert state.shared["0.0/count"].tolist() == [4]


# ---------------------------------------------------------------------------------------------- rollouts


@pytest.mark.parametrize("rejoin", ["own", "shared"])
@pytest.mark.parametrize("name", ["diloco", "allreduce", "gossip"])
def test_a_rollout_is_the_run_and_its_derivative_the_slope(name: str, rejoin: Any) -> None:
    model, batches = make_model("MLP", dtype=F64), batches_of(dtype=F64)
    table = torch.rand(STEPS, K, generator=torch.Generator().manual_seed(1)) < 0.6
    table[:, 1] |= ~table.any(1)
    make: dict[str, Callable[[Any], Strategy]] = {
        "diloco": lambda lr: DiLoCoStrategy("sgd", H=H, lr=lr),
        "allreduce": lambda lr: AllReduceStrategy("sgd", lr=lr),
        "gossip": lambda lr: GossipStrategy("ring", inner_optim="sgd", lr=lr),
    }
    given: dict[str, Any] = {"num_nodes": K, "eval_batch": tuple(x[0] for x in batches[0])}

    def outcome(lr: Any, **more: Any) -> Any:
        return rollout(model, make[name](lr), batches, availability=Trace(table, rejoin), **given, **more)

    lr = torch.tensor(0.1, dtype=F64, requires_grad=True)
    found = outcome(lr)
    taken = Taken(make[name](0.1), batches, Trace(table, rejoin), model=model).run()
    torch.testing.assert_close(found.losses.detach(), torch.stack(taken.losses), rtol=1e-12, atol=1e-12, equal_nan=True)
    assert float(found.bytes.sum()) == pytest.approx(taken.simulation.comm.ledger.total_bytes)
    (slope,) = torch.autograd.grad(found.loss, lr)
    up, down = (float(outcome(0.1 + e).loss) for e in (1e-6, -1e-6))
    assert float(slope) == pytest.approx((up - down) / 2e-6, rel=1e-6)
    (again,) = torch.autograd.grad(outcome(lr, segments=3).loss, lr)
    assert float(again) == pytest.approx(float(slope), rel=1e-12)


def test_rollouts_refuse_what_has_no_meaning() -> None:
    batches = batches_of()
    given: dict[str, Any] = {"num_nodes": K, "eval_batch": tuple(x[0] for x in batches[0])}
    with pytest.raises(ValueError, match="both say who sits out"):
        rollout(make_model("MLP"), FedAvgStrategy("sgd", participation=0.5, lr=0.1), batches,
                availability=Dropout(0.1), **given)  # fmt: skip
    x, y = batches[1]
    for other in ((x[..., :8], y), (x[:, :2], y)):
        with pytest.raises(ValueError, match="as many in each tensor of a batch: these have different shapes"):
            rollout(make_model("MLP"), AllReduceStrategy("sgd", lr=0.1), [batches[0], other],
                    availability=lambda step: [0] if step == 0 else range(K), **given)  # fmt: skip
    with pytest.raises(TypeError, match="function is of type int"):
        Function(3)  # type: ignore[arg-type]


def test_who_was_absent_reads_a_batch_of_another_size() -> None:
    """By hand: node 0 alone, then node 0 on its second batch, of two examples, and the others on their first."""
    first, second = (tuple(x.double() if x.is_floating_point() else x for x in batch) for batch in batches_of()[:2])
    second = tuple(x[:, :2] for x in second)
    model, evaluated = make_model("MLP", dtype=F64), tuple(x[0] for x in first)
    found = rollout(model, AllReduceStrategy("sgd", lr=0.1), [first, second], num_nodes=K, eval_batch=evaluated,
                    availability=lambda step: [0] if step == 0 else range(K))  # fmt: skip
    models = common.copy_model(model, K)
    for read in ({0: first}, {0: second, **dict.fromkeys(range(1, K), first)}):
        losses = [models[node](tuple(x[node] for x in batch)) for node, batch in read.items()]
        of_nodes = [torch.autograd.grad(loss, list(models[node].parameters())) for node, loss in zip(read, losses)]
        mean = [torch.stack(grads).mean(0) for grads in zip(*of_nodes)]
        with torch.no_grad():
            for node in read:
                for p, g in zip(models[node].parameters(), mean):
                    p.sub_(0.1 * g)
    [by_hand] = common.copy_model(model, 1)
    with torch.no_grad():
        for p, *of_each in zip(by_hand.parameters(), *(m.parameters() for m in models)):
            p.copy_(torch.stack(of_each).mean(0))
    torch.testing.assert_close(found.loss, by_hand(evaluated), rtol=1e-12, atol=0)


# ----------------------------------------------------------------------------------------- lost messages


def lossy(lost: float, **more: Any) -> Strategy:
    return CommunicateOptimizeStrategy([Exchange(Outer(Mean()), every=2, lost=lost, **more)], "sgd", lr=0.1)


@pytest.mark.parametrize(("alpha", "delay"), [(0.0, 0), (0.25, 0), (0.25, 1), (0.0, 3)])
def test_a_lost_message_does_not_count_and_its_node_goes_on(alpha: float, delay: int) -> None:
    """By hand: DiLoCo with the draws of the seed."""
    lists, model = make_batches("MLP", 8, K, batch_size=4, dtype=F64), make_model("MLP", dtype=F64)
    taken = Taken(lossy(0.5, keep=alpha, delay=delay), stacked(lists), None, model=model, seed=3)
    taken.batches = taken.batches[:8]
    taken.run(8)
    models = common.copy_model(model, K)
    thetas = [common.parameters(m) for m in models]
    optimizers = common.make_optimizers(models, (torch.optim.SGD, {"lr": 0.1}))
    outer = {name: p.detach().clone() for name, p in thetas[0].items()}
    optimizer = torch.optim.SGD(list(outer.values()), lr=0.7, momentum=0.9, nesterov=True)
    numbers = []
    late = dict[int, tuple[list[int], dict[str, Tensor]]]()
    for step in range(8):
        for i in range(K):
            common.backward(models[i], lists[step][i])
            optimizers[i].step()
        if step % 2 == 1:
            drawn = torch.rand(K, generator=rng.generator(3, f"lost {next(iter(outer))}", step))
            heard = [i for i in range(K) if drawn[i] >= 0.5]
            numbers.append(len(heard))
            if heard:
                moved = {n: common.mean([p - thetas[i][n].detach() for i in heard]) for n, p in outer.items()}
                late[step + delay] = heard, moved
        if step in late:
            heard, moved = late[step]
            for name, p in outer.items():
                p.grad = moved[name]
            optimizer.step()
            for i in heard:
                for name, p in outer.items():
                    thetas[i][name].data.lerp_(p, 1 - alpha)
    assert 0 < min(numbers) < max(numbers)
    for i in range(K):
        for name, p in thetas[i].items():
            torch.testing.assert_close(taken.state.params[name][i], p.detach(), rtol=1e-12, atol=1e-12)
    sent = [entry.participants for entry in taken.simulation.comm.ledger]
    assert sent == [n if n > 1 else 0 for n in numbers if n]


def test_nothing_lost_is_the_same_run_and_residuals_of_the_lost_are_kept(model: nn.Module) -> None:
    a, b = (Taken(lossy(lost), batches_of(), None, model=model).run() for lost in (0.0, 1e-12))
    assert_same_bits(a.state, b.state)
    strategy = CommunicateOptimizeStrategy([Exchange(Outer(Compressed(Mean(), TopK(0.3))), lost=0.5)], "sgd", lr=0.1)
    taken = Taken(strategy, batches_of(), None, model=model).run(keep=True)
    name = next(iter(taken.state.params))
    for before, after in pairwise(taken.states):
        drawn = torch.rand(K, generator=rng.generator(42, f"lost {name}", before.step))
        old, new = (s.own["0.0/residual"][name] for s in (before, after))
        for i in range(K):
            assert torch.equal(old[i if len(old) > 1 else 0], new[i if len(new) > 1 else 0]) == bool(drawn[i] < 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Exchange(Outer(Mean()), lost=1.0),
        lambda: Exchange(Outer(ServerMean()), participation=0.5, lost=0.1),
    ],
)
def test_lost_messages_that_cannot_be_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="lost="):
        make()


# -------------------------------------------------------------------------------------------------- sweeps


@pytest.mark.parametrize("seed", [1, 2])
def test_a_row_of_a_sweep_is_the_fit(seed: int, tmp_path: Path) -> None:
    model, data = make_model("MLP"), dataset("MLP")
    given: dict[str, Any] = {"num_nodes": 4, "max_steps": 9, "batch_size": 4, "device": "cpu", "progress": False}
    grid: dict[str, Any] = {
        "availability": [None, Dropout(0.4, 3, rejoin="shared"), LocalSteps([1, 2, 3, 3], H=3)],
        "lr": [0.1, 0.2],
    }

    def made(lr: float) -> Strategy:
        return DiLoCoStrategy("sgd", H=3, lr=lr)

    def swept(**more: Any) -> Any:
        return sweep(model, data, dataset("MLP"), strategy=made, grid=grid, seed=seed, **given, **more)

    result = swept(resume=tmp_path / "sweep.pt")
    for i, row in enumerate(result.rows):
        trainer, _ = fit("MLP", made(row["lr"]), num_nodes=4, max_steps=9, seed=seed, val=dataset("MLP"),
                         availability=grid["availability"][i // 2])  # fmt: skip
        history = result.history(i)
        for name in ("train_loss", "bytes_total", "val_loss", "consensus_distance", "num_present", "lr", "examples"):
            assert (name in trainer.history.columns) == (name in history.columns), name
            if name in history.columns:
                found, expected = ([x for x in h[name] if x is not None] for h in (history, trainer.history))
                assert found == pytest.approx(expected, rel=1e-5, nan_ok=True), (i, name)
    assert "1 stack (all in one stack)" in result.explain()
    assert [row["val_loss"] for row in swept(resume=tmp_path / "sweep.pt").rows] == [r["val_loss"] for r in result.rows]
    one: dict[str, Any] = {"strategy": made, "grid": {"lr": [0.1, 0.2]}, "resume": tmp_path / "other", **given}
    sweep(model, data, availability=Dropout(0.1), **one)
    with pytest.raises(ValueError, match="availability"):
        sweep(model, data, availability=Dropout(0.2), **one)


def test_rates_of_parameters_that_are_stored_once() -> None:
    """They follow the run's steps, whoever is there, in a row of a sweep too."""
    model, data = make_model("MLP"), dataset("MLP")
    given: dict[str, Any] = {"num_nodes": 4, "max_steps": 8, "batch_size": 4, "device": "cpu", "progress": False}
    given["availability"] = Dropout(0.4, 3, rejoin="shared")

    def made(lr: float) -> Strategy:
        return AllReduceStrategy("sgd", lr=lr, lr_scheduler="cosine")

    trainer, _ = fit("MLP", made(0.1), num_nodes=4, max_steps=8, availability=given["availability"])
    assert sweep(model, data, strategy=made, grid={"lr": [0.1]}, **given).history(0)["lr"] == trainer.history["lr"]


@pytest.mark.filterwarnings("ignore:the seeds do not vary")
@pytest.mark.parametrize("name", [
    "allreduce", "fedavg", "diloco", "streaming", "eager", "sparta", "gossip", "demo", "noloco", "sparseloco",
    "local-adam",
])  # fmt: skip
def test_configurations_of_a_stack_are_the_runs_of_each(name: str) -> None:
    """Each with absences of its own: seeds, rules, and what returning nodes begin with."""
    model, data = make_model("MLP", dtype=torch.float64), dataset("MLP", dtype=torch.float64)
    grid: dict[str, Any] = {"availability": [Dropout(0.4, 2, rejoin="shared"), Dropout(0.3, 2, rejoin="own"), None],
                            "lr": [0.01, 0.02], "seed": [1, 2]}  # fmt: skip
    if name == "allreduce":
        grid["availability"].pop(1)  # gradients need what is shared

    def made(lr: float) -> Strategy:
        return CATALOGUE[name].make(inner_optim="adamw", lr=lr)

    result = sweep(model, data, data, strategy=made, grid=grid, num_nodes=4, max_steps=8, batch_size=4,
                   device="cpu", progress=False)  # fmt: skip
    for i, row in enumerate(result.rows):
        trainer, _ = fit(model, made(row["lr"]), num_nodes=4, max_steps=8, seed=row["seed"], data=data, val=data,
                         availability=grid["availability"][i // 4])  # fmt: skip
        expected = trainer.history.last("val_loss")
        assert (row["val_loss"], row["bytes_total"]) == (
            pytest.approx(expected, rel=1e-9),
            trainer.ledger.total_bytes,
        ), i
