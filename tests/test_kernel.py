"""`vecgym.simulation`: a timetable, and events that take rows of the state, change them and put them back."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import each_row, stacked
from tests.models import make_batches, make_model
from tests.test_availability import MADE, batches_of
from vecgym import simulation as kernel
from vecgym.availability import Facts, LocalSteps, Presence, Trace
from vecgym.collectives import StackedCollectives
from vecgym.collectives.distributed import DistributedCollectives
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.engine import Engine
from vecgym.runs import multiprocess
from vecgym.simulation import Lockstep, Mark, Part, Rounds, RunFacts, State, StateView
from vecgym.simulation.simulation import Batches
from vecgym.simulation.state import put_back
from vecgym.strategy.simulated import simulation_of

K, T = 5, 12
F64 = torch.float64


def some_table(seed: int, share: float = 0.5) -> Tensor:
    """The nodes that are there, bool [T, K]: one at least in every step."""
    table = torch.rand(T, K, generator=torch.Generator().manual_seed(seed)) < share
    table[:, 1] |= ~table.any(1)
    return table


# ------------------------------------------------------------------------------------------------------ the timetable


@pytest.mark.parametrize("seed", range(4))
def test_a_timetable_says_what_a_loop_would_do(seed: int) -> None:
    """Marks with a lag, absences, and nodes that take turns, against what is said about them in words."""
    table = some_table(seed)
    run = RunFacts(K, T, presence=Presence(Trace(table), Facts(K, T, 42)))
    odd = lambda step, rows: [row for row in rows if (row + step) % 2]  # noqa: E731
    marks = Mark("agree", 3), Mark("write", 3, lag=2, of="a"), Mark("some", who=odd)
    made = [0] * K
    for step, events in enumerate(Lockstep(run, *marks, trains=odd).ticks()):
        there = [node for node in range(K) if table[step, node]]
        training = [node for node in there if (node + step) % 2]
        expected: list[tuple[str, list[int], list[int]]] = []
        if training:
            expected.append(("train", training, [made[node] for node in training]))
        if step % 3 == 2:
            expected.append(("agree", there, [made[node] for node in there]))
        if step >= 2 and (step - 2) % 3 == 2:
            late = [node for node in there if table[step - 2, node]]
            if late:
                expected.append(("write", late, [made[node] for node in late]))
        if training:
            expected.append(("some", training, [made[node] for node in training]))
        found = [
            (event.what, *map(list, zip(*each_row(event, K)))) if event.rows != () else (event.what, [], [])
            for event in events
        ]
        assert [tuple(x) for x in found] == expected
        for event in events:
            if event.what == "write":
                assert event.info == kernel.Due(number=(step - 2) // 3, step=step - 2, of="a")
        for node in training:
            made[node] += 1


@pytest.mark.parametrize("absent", [False, True])
def test_a_timetable_starts_anywhere(absent: bool) -> None:
    presence = Presence(Trace(some_table(0), rejoin="shared"), Facts(K, T, 42)) if absent else None
    run, in_turns = RunFacts(K, T, presence=presence), lambda step, rows: rows[step % 2 :]
    whole = list(Lockstep(run, Mark("meet", 2), trains=in_turns).ticks())
    table = Lockstep(run, Mark("meet", 2), trains=in_turns)
    for start in (7, 0, 11, 3):
        assert list(table.ticks(start)) == whole[start:]


def test_nodes_that_are_done_wait_for_the_others() -> None:
    presence = Presence(LocalSteps([1, 3, 2], H=3), Facts(3, 6, 42))
    table = Lockstep(RunFacts(3, 6, presence=presence), Mark("meet", 3))
    trained = [[row for row, _ in each_row(events[0], 3)] for events in table.ticks()]
    assert trained == [[0, 1, 2], [1, 2], [1]] * 2
    assert [event.rows for event in list(table.ticks())[2] if event.what == "meet"] == [None]


def test_those_who_return_are_told_before_they_train() -> None:
    presence = Presence(Trace([[True, False], [True, True], [True, True]], rejoin="shared"), Facts(2, 3, 42))
    whats = [[event.what for event in events] for events in Lockstep(RunFacts(2, 3, presence=presence)).ticks()]
    assert whats == [["train"], ["rejoin", "train"], ["train"]]


def test_those_who_write_late_are_some_of_those_who_agreed() -> None:
    presence = Presence(Trace([[True, True, True], [False, True, True]]), Facts(3, 2, 42))
    first_two = lambda step, rows: list(rows)[:2]  # noqa: E731
    marks = Mark("agree", who=first_two), Mark("write", lag=1, who=first_two)
    whole = list(Lockstep(RunFacts(3, 2, presence=presence), *marks).ticks())
    assert [(event.what, event.rows) for event in whole[0]] == [("train", None), ("agree", (0, 1))]
    assert [(event.what, event.rows) for event in whole[1][1:]] == [("agree", (1, 2)), ("write", (1,))]


def test_counts_are_kept_for_who_reads_ahead() -> None:
    """Asking for two steps in turn does not count from the beginning again."""
    asked: list[int] = []

    def turns(step: int, rows: Any) -> Any:
        asked.append(step)
        return rows[step % 2 :]

    table = Lockstep(RunFacts(4, 400), trains=turns)
    for step in range(1, 400):
        assert table.made(step)[0] == (step + 1) // 2
        table.made(max(0, step - 50))
    assert len(asked) < 500
    counts = table.made(7)
    counts[0] = 99
    assert table.made(7)[0] != 99


# ---------------------------------------------------------------------------------------------------------- the rows


INDICES = [None, slice(1, 3), torch.tensor([0, 2, 3])]


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("index", INDICES, ids=["all", "in a row", "apart"])
def test_rows_are_taken_and_put_back(index: Any, pure: bool) -> None:
    """Against indexing by hand; in place every tensor stays where it is, and pure none is written to."""
    whole: dict[str, Any] = {"a": {"w": torch.randn(4, 3), "b": torch.randn(4)}, "c": torch.randn(4, 2)}
    before, places = copy.deepcopy(whole), [x.data_ptr() for x in tree.leaves(whole)]
    kept = dict(whole)
    rows = StateView(whole, index, 4)
    a, c = rows["a"], rows["c"]
    rows["a"] = {"w": a["w"] + c[:, :1], "b": torch.ones(1)}  # [1, *] is for every row
    rows["c"] = c.mul(2) if pure else c.mul_(2)
    rows["new"] = torch.full((len(c), 2), 7.0)
    put_back([rows], pure=pure)
    at = slice(None) if index is None else index
    expected = copy.deepcopy(before)
    expected["a"]["w"][at] += before["c"][at][:, :1]
    expected["a"]["b"][at] = 1.0
    expected["c"][at] *= 2
    expected["new"] = torch.zeros(4, 2)
    expected["new"][at] = 7.0
    for x, y in zip(tree.leaves(whole), tree.leaves(expected)):
        assert torch.equal(x, y)
    if pure:
        assert all(torch.equal(x, y) for x, y in zip(tree.leaves(kept), tree.leaves(before)))
    else:
        assert [x.data_ptr() for x in tree.leaves({name: whole[name] for name in ("a", "c")})] == places


@pytest.mark.parametrize("index", INDICES, ids=["all", "in a row", "apart"])
def test_names_never_share_memory(index: Any) -> None:
    """A value that is assigned to two names, or crosswise, is copied."""
    whole = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 10}
    rows, expected = StateView(whole, index, 4), copy.deepcopy(whole)
    rows["a"], rows["b"] = rows["b"], rows["a"]
    rows["c"] = rows["a"]
    put_back([rows], pure=False)
    at = slice(None) if index is None else index
    expected["a"][at], expected["b"][at] = expected["b"][at].clone(), expected["a"][at].clone()
    assert torch.equal(whole["a"], expected["a"])
    assert torch.equal(whole["b"], expected["b"])
    assert torch.equal(whole["c"][at], expected["a"][at])
    assert len({x.untyped_storage().data_ptr() for x in whole.values()}) == 3


def test_a_name_may_go() -> None:
    whole = {"message": torch.ones(2)}
    rows = StateView(whole, None, 2)
    assert "message" in rows
    del rows["message"]
    assert "message" not in rows
    put_back([rows], pure=False)
    assert whole == {}


def test_what_some_rows_cannot_be_given_is_refused() -> None:
    whole = {"w": torch.arange(4), "p": {"a": torch.zeros(4), "b": torch.ones(4)}}
    for new in (torch.tensor([0.5, 0.5]), torch.zeros(2, 1, dtype=torch.long), torch.zeros(3, dtype=torch.long)):
        rows = StateView(whole, slice(0, 2), 4)
        with pytest.raises(ValueError, match=r"a handler assigned 'w' as .*; expected \[2 or 1\] of torch\.int64"):
            rows["w"] = new
        rows.put_flat("w", new)  # of engine and optimizer
        with pytest.raises(ValueError, match="these rows need the same form"):
            put_back([rows], pure=False)
    rows = StateView(whole, slice(0, 2), 4)
    rows["p"] = {"a": torch.ones(2)}
    put_back([rows], pure=False)
    assert whole["p"]["a"].tolist() == [1, 1, 0, 0]  # type: ignore[index]
    assert whole["p"]["b"].tolist() == [1, 1, 1, 1]  # type: ignore[index]
    with pytest.raises(KeyError, match=r"no 'v' here; there are \['p', 'w'\]"):
        rows["v"]


# -------------------------------------------------------------------------------------------- an algorithm of one's own


class Scaffold:
    """SCAFFOLD with SGD (Karimireddy et al., arXiv 1910.06378, option II), without a server's rate."""

    def __init__(self, lr: float, H: int) -> None:
        self.lr, self.H = lr, H

    def timetable(self, run: RunFacts) -> Lockstep:
        return Lockstep(run, Mark("meet", self.H))

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        zeros = tree.map(torch.zeros_like, params)
        return {"params": params, "control": zeros}, {"start": params, "control": zeros}

    def train(self, part: Part) -> None:
        grads, own, shared = part.gradients(), part.own["control"], part.shared["control"]
        part.params = tree.map(lambda p, g, c, s: p - self.lr * (g - c + s), part.params, grads, own, shared)
        assert part.losses is not None
        part.report(part.losses)

    def meet(self, part: Part) -> None:
        start, old = part.shared["start"], part.own["control"]
        new = tree.map(
            lambda c, s, x, y: c - s + (x - y) / (self.H * self.lr), old, part.shared["control"], start, part.params
        )
        change = part.comm.mean(tree.map(torch.sub, new, old))
        part.own["control"] = new
        part.shared["control"] = tree.map(torch.add, part.shared["control"], change)
        part.params = part.shared["start"] = part.comm.mean(part.params)


def scaffold_by_hand(model: nn.Module, batches: Any, lr: float, H: int) -> tuple[list[Tree], list[list[float]]]:
    """Node after node, with plain modules."""
    copies = [copy.deepcopy(model) for _ in range(K)]
    names = [name for name, _ in model.named_parameters()]
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    server = {name: torch.zeros_like(start[name]) for name in names}
    own: list[Tree] = [{name: torch.zeros_like(start[name]) for name in names} for _ in range(K)]
    losses: list[list[float]] = []
    for step, of_nodes in enumerate(batches):
        losses.append([])
        for node, batch in enumerate(of_nodes):
            loss = copies[node](batch)
            grads = torch.autograd.grad(loss, list(copies[node].parameters()))
            losses[-1].append(loss.item())
            with torch.no_grad():
                for (name, p), g in zip(copies[node].named_parameters(), grads):
                    p.sub_(lr * (g - own[node][name] + server[name]))
        if (step + 1) % H == 0:
            ends = [{name: p.detach().clone() for name, p in each.named_parameters()} for each in copies]
            news = [{n: own[i][n] - server[n] + (start[n] - ends[i][n]) / (H * lr) for n in names} for i in range(K)]
            mean = lambda each: {n: torch.stack([x[n] for x in each]).mean(0) for n in names}  # noqa: E731
            server = tree.map(torch.add, server, tree.map(torch.sub, mean(news), mean(own)))
            own, start = news, mean(ends)
            for each in copies:
                each.load_state_dict({**each.state_dict(), **start})
    return [{name: p.detach() for name, p in each.named_parameters()} for each in copies], losses


def reading(batches: list[Any]) -> Any:
    """Requests -> batches, each row at its own count."""

    def read(requests: Iterator[tuple[list[int], Any]]) -> Batches:
        for rows, counts in requests:
            each = [counts] * len(rows) if isinstance(counts, int) else counts
            own = [tree.map_leaves(lambda x: x[row], batches[n]) for row, n in zip(rows, each)]  # noqa: B023
            yield tree.map_leaves(lambda *x: torch.stack(x), *own), None

    return read


def kernel_of(
    algorithm: Any, dtype: torch.dtype = F64, presence: Any = None, num_nodes: int = K
) -> tuple[kernel.Simulation, list[Any]]:
    batches = stacked(make_batches("MLP", T, num_nodes, batch_size=4, dtype=dtype))
    engine = Engine(make_model("MLP", dtype=dtype), node_threads=1)
    engine.prepare(batches[0])
    run = RunFacts(num_nodes, T, presence=presence)
    return kernel.Simulation(engine, algorithm, run, StackedCollectives(num_nodes), reading(batches)), batches


def test_an_algorithm_is_its_handlers() -> None:
    simulation, _ = kernel_of(Scaffold(lr=0.05, H=3))
    rows: list[kernel.TickRecord] = []
    state = kernel.run(simulation, simulation.init(), [lambda state, row: rows.append(row)])
    nodes, losses = scaffold_by_hand(
        make_model("MLP", dtype=F64), make_batches("MLP", T, K, batch_size=4, dtype=F64), 0.05, 3
    )
    for name, x in state.own["params"].items():
        torch.testing.assert_close(x, torch.stack([node[name] for node in nodes]), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.stack([row.losses for row in rows]), torch.tensor(losses, dtype=F64))
    size = sum(p.numel() * 8 for p in simulation.engine.params.values())
    sent = sum(transfer.sent_bytes for row in rows for transfer in row.transfers)
    assert sent == pytest.approx(4 * 2 * 2 * (K - 1) / K * size)  # a node: 4 meetings, two means, a ring


@pytest.mark.parametrize("absent", [False, True])
def test_a_run_goes_on_where_it_was(absent: bool) -> None:
    """To the bit, from a state that was saved."""
    presence = Presence(Trace(some_table(3)), Facts(K, T, 42)) if absent else None
    simulation, _ = kernel_of(Scaffold(0.05, 3), torch.float32, presence)
    whole = kernel.run(simulation, simulation.init())
    saved: list[State] = []
    kernel.run(
        simulation,
        simulation.init(),
        [lambda state, row: saved.append(copy.deepcopy(state))],
        stop=lambda s: s.tick == 7,
    )
    assert [state.tick for state in saved] == list(range(1, 8))
    again = kernel.run(simulation, State(**vars(saved[-1])))
    for a, b in zip(tree.leaves(vars(whole)), tree.leaves(vars(again))):
        assert torch.equal(a, b)


def test_in_place_every_tensor_stays_where_it_is() -> None:
    simulation, _ = kernel_of(Scaffold(0.05, 3), presence=Presence(Trace(some_table(1)), Facts(K, T, 42)))
    state = simulation.init()
    places = [x.data_ptr() for x in tree.leaves([state.own, state.shared])]
    after = kernel.run(simulation, state)
    assert [x.data_ptr() for x in tree.leaves([after.own, after.shared])] == places


def test_a_pure_run_can_be_differentiated() -> None:
    """The derivative by the control of node 0 is the slope."""
    simulation, _ = kernel_of(Scaffold(0.05, 3), presence=Presence(Trace(some_table(1)), Facts(K, T, 42)))
    name = next(iter(simulation.engine.params))

    def loss(shift: Tensor) -> Tensor:
        state = simulation.init()
        control = state.own["control"]
        moved = {**control, name: control[name] + shift}
        state = State(0, {**state.own, "control": moved}, state.shared)
        last: list[Tensor] = []
        kernel.run(simulation, state, [lambda state, row: last.append(row.losses.nansum())], pure=True)
        return last[-1]

    x = torch.zeros((), dtype=F64, requires_grad=True)
    [slope] = torch.autograd.grad(loss(x), x)
    h = 1e-5
    with torch.no_grad():
        assert float(slope) == pytest.approx(float(loss(x + h) - loss(x - h)) / (2 * h), rel=1e-6)
    assert slope != 0


def test_who_reads_what_is_known_beforehand() -> None:
    """The requests of the whole run, before its first tick, are those that the run makes."""
    table = some_table(2)
    simulation, _ = kernel_of(Scaffold(0.05, 3), presence=Presence(Trace(table), Facts(K, T, 42)))
    ahead = list(simulation.requests(simulation.timetable.ticks()))
    assert [rows for rows, _ in ahead] == [row.nonzero().flatten().tolist() for row in table]
    counts = (table.long().cumsum(0) - table.long())[table].tolist()
    assert list(itertools.chain(*([n] * len(rows) if isinstance(n, int) else n for rows, n in ahead))) == counts


class Reads(Scaffold):
    """Handlers that read another number of batches than their event says."""

    def __init__(self, count: int, who: Any = None, when: Any = 3) -> None:
        super().__init__(0.05, 3)
        self.count, self.who, self.when = count, who, when

    def timetable(self, run: RunFacts) -> Lockstep:
        return Lockstep(run, Mark("meet", self.when), trains=self.who)

    def train(self, part: Part) -> None:
        for _ in range(self.count):
            part.gradients()


@pytest.mark.parametrize(("algorithm", "said"), [
    (Reads(0), "'train' in tick 0 reads 0 batches, but its event has reads=1"),
    (Reads(2), "'train' in tick 0 reads 2 batches, but its event has reads=1"),
    (Reads(1, who=lambda step, rows: [2, 7]), r"names \[7\], which are not among \[0, 1, 2, 3, 4\]"),
])  # fmt: skip
def test_mistakes_of_an_algorithm_are_named(algorithm: Any, said: str) -> None:
    simulation, _ = kernel_of(algorithm)
    with pytest.raises(ValueError, match=said):
        kernel.run(simulation, simulation.init())


def test_a_handler_that_is_missing_and_rows_that_are_none() -> None:
    simulation, _ = kernel_of(Scaffold(0.05, 3))
    tick = lambda event: simulation.tick(simulation.init(), [event], iter(()))  # noqa: E731
    with pytest.raises(TypeError, match="Scaffold has no method 'odd', named by its timetable"):
        tick(kernel.Event("odd"))
    for rows in ((3, 1), (0, 0), (0, K)):
        with pytest.raises(ValueError, match="must be distinct, ascending and from 0 to 4"):
            tick(kernel.Event("meet", rows))
    with pytest.raises(ValueError, match="H=0 must be an integer >= 1"):
        Rounds(0)


def test_several_batches_of_an_event_have_masks_of_their_own() -> None:
    """With the same batch twice, the losses of a model with dropout differ, and are those of the next step."""
    losses: list[Tensor] = []

    class Twice(Scaffold):
        def timetable(self, run: RunFacts) -> Any:
            return type(
                "Table",
                (),
                {"length": 1, "max_steps": 2, "ticks": lambda self, start=0: iter([[kernel.Event("train", reads=2)]])},
            )()

        def train(self, part: Part) -> None:
            for _ in range(2):
                part.gradients()
                assert part.losses is not None
                losses.append(part.losses.clone())

    batch = stacked(make_batches("Dropout", 1, 2, batch_size=4, dtype=F64))[0]
    engine = Engine(make_model("Dropout", dtype=F64), engine="loop", node_threads=1)
    engine.prepare(batch)
    simulation = kernel.Simulation(
        engine, Twice(0.05, 3), RunFacts(2), StackedCollectives(2), lambda requests: ((batch, None) for _ in requests)
    )
    kernel.run(simulation, simulation.init())
    own = {name: p[None] for name, p in engine.params.items()}
    for step in range(2):
        expected = engine.gradients(own, {}, batch, seed=42, step=step, node_ids=[0, 1]).losses
        assert torch.equal(losses[step], expected)
    assert not torch.equal(*losses)


class Began(Scaffold):
    """The same, and each node keeps what it began with."""

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        return {**own, "began": params}, shared


def test_names_of_one_node_share_no_memory() -> None:
    """Of one node, what is given under several names has its shape already, and is copied all the same."""
    simulation, _ = kernel_of(Began(0.05, 3), num_nodes=1)
    after = kernel.run(simulation, simulation.init(), stop=lambda state: state.tick == 2)
    for name, p in simulation.engine.params.items():
        assert torch.equal(after.shared["start"][name][0], p)
        assert torch.equal(after.own["began"][name][0], p)
        assert not torch.equal(after.own["params"][name][0], p)


def ticks_in_a_process(link: multiprocess.Link, name: str) -> dict[str, Tensor]:
    """The last parameters of the nodes of this process."""
    comm = DistributedCollectives(6)
    return on_kernel(name, comm)


def on_kernel(name: str, comm: Any) -> dict[str, Tensor]:
    batches, model = batches_of(6, dtype=F64), make_model("MLP", dtype=F64)
    ids = comm.node_ids
    engine = Engine(model, engine="loop", node_threads=1)
    engine.prepare(tree.map_leaves(lambda x: x[ids], batches[0]))
    simulation = simulation_of(
        model, MADE[name](), comm, engine=engine, max_steps=len(batches), num_examples=(3, 1, 4, 1, 5, 9)
    )
    state = simulation.init()
    for batch in batches:
        state, _ = simulation.step(state, tree.map_leaves(lambda x: x[ids], batch))
    return {name: x.expand(len(ids), *x.shape[1:]).clone() for name, x in state.params.items()}


@pytest.mark.parametrize(
    "name", ["allreduce", "fedavg-weighted", "diloco", "demo", "gossip", "palsgd", "fedavg-islands"]
)
def test_the_kernel_in_two_processes(name: str) -> None:
    parts = multiprocess.run(ticks_in_a_process, 2, (name,))
    whole = on_kernel(name, StackedCollectives(6))
    for key, x in whole.items():
        torch.testing.assert_close(torch.cat([part[key] for part in parts]), x, rtol=1e-12, atol=1e-13)
