"""Groups: configurations that differ in numbers are the rows of one simulation, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vecgym.availability import Facts, Presence, Trace
from vecgym.collectives import StackedCollectives
from vecgym.collectives.stacked import GroupCollectives
from vecgym.collectives.topology import Mixing
from vecgym.core import tree
from vecgym.core.devices import spread
from vecgym.core.tree import Tree
from vecgym.engine import Engine
from vecgym.optim import Optimizer, OptimSpec
from vecgym.simulation import Lockstep, Mark, Part, RunFacts, Simulation, State, TickRecord, run
from vecgym.simulation.simulation import Batches, LocalTraining
from vecgym.simulation.stack import Stack, groups_of

C, K = 3, 5
RING = torch.tensor(
    [[0.5 if i == j else 0.25 if (i - j) % K in (1, K - 1) else 0.0 for j in range(K)] for i in range(K)]
)
GROUPS, WEIGHTS = [[0, 2], [3, 4]], [1.0, 0.5, 2.0, 3.0, 0.0]

# What takes `[K, *]` and gives `[1 or K, *]`, and in a group takes `[C, K, *]`.
OPERATIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "mean": lambda comm, x: comm.mean(x),
    "mean in place": lambda comm, x: comm.mean(x.clone(), inplace=True),
    "mean of groups": lambda comm, x: comm.mean(x, groups=GROUPS),
    "weighted mean": lambda comm, x: comm.mean(x, weights=WEIGHTS),
    "weighted mean of groups": lambda comm, x: comm.mean(x, groups=GROUPS, weights=WEIGHTS),
    "sum": lambda comm, x: comm.sum(x),
    "sum of groups": lambda comm, x: comm.sum(x, groups=GROUPS),
    "server mean": lambda comm, x: comm.server_mean(x, [0, 3], WEIGHTS),
    "server mean of all": lambda comm, x: comm.server_mean(x, range(K)),
    "server sum": lambda comm, x: comm.server_sum(x, [0, 3]),
    "server send": lambda comm, x: comm.server_send(comm.mean(x), [1, 2]),
    "broadcast": lambda comm, x: comm.broadcast(x, 3),
    "permute": lambda comm, x: comm.permute(x, [1, 2, 0, 4, 3]),
    "mix": lambda comm, x: comm.mix(x, RING),
    "mix in place": lambda comm, x: comm.mix(x.clone(), RING, inplace=True),
    "mix sparse in place": lambda comm, x: comm.mix(x.clone(), Mixing.of(RING), inplace=True),
    "everyone": lambda comm, x: comm.everyone({"x": x})["x"],
    "fetched": lambda comm, x: comm.fetched({"x": x}, [4, 0, 0], [1, 2, 3])["x"],
    "mean of a tree": lambda comm, x: comm.mean({"x": x})["x"],
}
GATHERING: dict[str, Callable[[Any, Tensor], Any]] = {
    "gather": lambda comm, x: comm.all_gather(x),
    "gather in place": lambda comm, x: comm.all_gather(x, inplace=True),
    "gather for readers": lambda comm, x: comm.all_gather(x, readers=GROUPS),
    "server gather": lambda comm, x: comm.server_gather(x, [4, 1]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 17), (40, 50)], ids=str)
@pytest.mark.parametrize("same", [False, True], ids=["each", "once"])
@pytest.mark.parametrize("name", [*OPERATIONS, *GATHERING])
def test_collectives_of_a_group_are_those_of_each_configuration(
    name: str, same: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """To the bit, with the same transfers; `[C, 1, *]` is what `[1, *]` is of one."""
    x = torch.randn(C, 1 if same else K, *shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    alone = StackedCollectives(K)
    group = GroupCollectives(StackedCollectives(K), C)
    operation = OPERATIONS.get(name) or GATHERING[name]
    found, expected = operation(group, x), torch.stack([operation(alone, x[c]) for c in range(C)])
    expected = expected[:, 0] if name in GATHERING else expected
    if "mix" in name and shape == ():  # a matrix times a matrix, not times a vector
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-15)
    else:
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
    sent = [entry.transfer for entry in alone.ledger]
    assert [entry.transfer for entry in group.ledger] == sent[: len(sent) // C]


def test_a_result_of_a_group_has_memory_of_its_own() -> None:
    group, x = GroupCollectives(StackedCollectives(K), C), torch.randn(C, K, 4)
    for name, operation in OPERATIONS.items():
        if name not in ("everyone", "server send"):
            for y in (x, x[:, :1].clone()):
                assert operation(group, y).untyped_storage().data_ptr() != y.untyped_storage().data_ptr(), name


def test_some_nodes_of_a_group() -> None:
    comm, group = StackedCollectives(K).among([0, 2, 3]), GroupCollectives(StackedCollectives(K), C).among([0, 2, 3])
    x = torch.randn(C, 3, 4)
    assert torch.equal(group.mean(x), torch.stack([comm.mean(x[c]) for c in range(C)]))
    assert (group.ids.tolist(), group.num_nodes, group.run_nodes) == ([0, 2, 3], 3, K)
    assert next(iter(group.ledger)).transfer == next(iter(comm.ledger)).transfer
    assert group.among([0, 1]).members == (0, 2)


# ---------------------------------------------------------------------------------------------------------- a stack


class Local(LocalTraining):
    """Nodes that train by themselves; what all test algorithms have."""

    batched: tuple[str, ...] | None = ()

    def __init__(self, lr: float = 0.05, H: int = 2, optim: str = "adamw", inner: Any = None, **settings: Any) -> None:
        schedule = {key: settings.pop(key) for key in ("cosine_anneal", "max_norm") if key in settings}
        self.inner, self.H = Optimizer(OptimSpec(optim, lr=lr, **(inner or {})), **schedule), H
        vars(self).update(settings)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def timetable(self, run: RunFacts) -> Lockstep:
        return Lockstep(run, Mark("meet", self.H))

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"params": params, "optimizer": self.inner.init(params)}, {}

    def meet(self, part: Part) -> None:
        part.params = part.comm.mean(part.params)


class DiLoCo(Local):
    """An outer optimizer with momentum."""

    batched = ("outer_lr", "momentum")

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, _ = super().init(run, params)
        return own, {"outer": params, "buffer": tree.map(torch.zeros_like, params)}

    def meet(self, part: Part) -> None:
        outer, mean = part.shared["outer"], part.comm.mean(part.params)
        buffer = tree.map(
            lambda b, x, y: spread(self.momentum, b) * b + (x - y),
            part.shared["buffer"],
            outer,
            mean,
        )
        part.shared["buffer"] = buffer
        part.shared["outer"] = tree.map(lambda x, b: x - spread(self.outer_lr, b) * b, outer, buffer)
        part.params = part.shared["outer"]


class AllReduce(Local):
    """Parameters and optimizer are shared."""

    def timetable(self, run: RunFacts) -> Lockstep:
        return Lockstep(run, train="step")

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        return shared, own

    def step(self, part: Part) -> None:
        part.optimize(part.comm.mean(part.gradients(mean=True)))
        part.report(part.losses)


class SharedTrain(AllReduce):
    """The same by the name `train`, which is asked for together with others'."""

    def timetable(self, run: RunFacts) -> Lockstep:
        return Lockstep(run)

    def train(self, part: Part) -> None:
        self.step(part)


class Scaffold(Local):
    """SCAFFOLD, with the inner rate in its controls."""

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, zeros = super().init(run, params)[0], tree.map(torch.zeros_like, params)
        return {**own, "control": zeros}, {"start": params, "control": zeros}

    def train(self, part: Part) -> None:
        correct = lambda g, c, s: g - c + s  # noqa: E731
        part.optimize(tree.map(correct, part.gradients(), part.own["control"], part.shared["control"]))
        part.report(part.losses)

    def meet(self, part: Part) -> None:
        start, old, rate = part.shared["start"], part.own["control"], part.lr
        new = tree.map(
            lambda c, s, x, y: c - s + (x - y) / spread(self.H * rate, c),
            old, part.shared["control"], start, part.params,
        )  # fmt: skip
        part.own["control"] = new
        change = part.comm.mean(tree.map(torch.sub, new, old))
        part.shared["control"] = tree.map(torch.add, part.shared["control"], change)
        part.params = part.shared["start"] = part.comm.mean(part.params)


class Tracking(Local):
    """Gradient tracking on a ring."""

    def timetable(self, run: RunFacts) -> Lockstep:
        return Lockstep(run, train="step")

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, zeros = super().init(run, params)[0], tree.map(torch.zeros_like, params)
        return {**own, "tracker": zeros, "last": zeros}, {}

    def step(self, part: Part) -> None:
        n = part.comm.num_nodes
        weights = torch.eye(n).roll(1, 0) / 2 + torch.eye(n) / 2 if n > 1 else torch.eye(1)
        grads = tree.map(torch.clone, part.gradients())
        tracker = part.comm.mix(part.own["tracker"], weights)
        tracker = tree.map(lambda y, g, h: y + g - h, tracker, grads, part.own["last"])
        part.own["tracker"], part.own["last"] = tracker, grads
        part.params = part.comm.mix(part.params, weights)
        part.optimize(tree.map(torch.clone, tracker))
        part.report(part.losses)


class Late(Local):
    """Agreed values are a message, each node's own, until they are written, two steps later."""

    batched = ("keep",)

    def timetable(self, run: RunFacts) -> Lockstep:
        return Lockstep(run, Mark("agree", self.H), Mark("write", self.H, lag=self.lag))

    def agree(self, part: Part) -> None:
        noise = torch.randn((), generator=part.generator("noise", part.tick), dtype=F64) / 100
        part.own[f"message {part.event.info.number}"] = tree.map(
            lambda x, y: x - y + noise, part.comm.mean(part.params), part.params
        )

    def write(self, part: Part) -> None:
        name = f"message {part.event.info.number}"
        part.params = tree.map(
            lambda p, m: p + spread(self.keep, m) * m,
            part.params,
            part.own[name],
        )
        del part.own[name]
        assert name not in part.own


class Net(nn.Module):
    """With batch norm and a buffer that stays."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.b(self.dropout(self.norm(self.a(x * self.scale)).tanh()))[:, 0] - y).square().mean()


T = 9
F64 = torch.float64


def batch_of(config: int, node: int, count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * config + 100 * node + count), dtype=F64)
    return x, x.sum(1).sin() + node


def reading(configs: list[int], asked: list[Any] | None = None) -> Any:
    """Requests -> batches: every node of every configuration has its own data."""

    def read(requests: Iterator[tuple[list[int], Any]]) -> Batches:
        for rows, counts in requests:
            if asked is not None:
                asked.append((rows, counts))
            each = [counts] * len(rows) if isinstance(counts, int) else counts
            own = [batch_of(configs[row // K], row % K, n) for row, n in zip(rows, each)]
            yield tuple(torch.stack(x) for x in zip(*own)), None

    return read


def engine_of(dropout: float = 0.0) -> Engine:
    """Masks depend on which nodes share a call, so with dropout node after node."""
    torch.manual_seed(0)
    engine = Engine(Net(dropout).double(), node_threads=1, engine="loop" if dropout else "auto")
    engine.prepare(tuple(torch.stack([x] * K) for x in batch_of(0, 0, 0)))
    return engine


def some_present() -> Presence:
    table = torch.rand(T, K, generator=torch.Generator().manual_seed(3)) < 0.6
    table[:, 1] |= ~table.any(1)
    return Presence(Trace(table), Facts(K, T, 42))


CASES: dict[str, list[tuple[Any, int]]] = {  # (algorithm, seed) of each configuration
    "numbers": [(DiLoCo(lr, outer_lr=o, momentum=m), 1) for lr, o, m in
                [(0.05, 0.7, 0.9), (0.1, 0.7, 0.0), (0.02, 1.0, 0.5), (0.05, 0.3, 0.9)]],
    "H": [(DiLoCo(0.05, H=H, outer_lr=o, momentum=0.5), 1) for H, o in [(2, 0.7), (3, 0.7), (2, 0.5), (4, 1.0)]],
    "seeds": [(DiLoCo(lr, outer_lr=0.7, momentum=0.5), s) for lr, s in [(0.1, 1), (0.1, 2), (0.05, 1), (0.1, 3)]],
    "schedules": [(Local(lr, optim="sgd", inner={"momentum": m}, cosine_anneal=True, max_norm=n), 1) for lr, m, n in
                  [(0.1, 0.9, 1.0), (0.2, 0.0, 1.0), (0.1, 0.5, 0.5), (0.1, 0.9, 1.0)]],
    "allreduce": [(AllReduce(lr), 1) for lr in (0.05, 0.1, 0.1, 0.02)],
    "scaffold": [(Scaffold(lr, H, "sgd"), 1) for lr, H in [(0.05, 2), (0.1, 3), (0.1, 2), (0.02, 3)]],
    "tracking": [(Tracking(lr, optim="sgd"), 1) for lr in (0.02, 0.03, 0.03, 0.01)],
    "late": [(Late(0.05, H, keep=k, lag=lag), s) for H, k, lag, s in
             [(2, 0.5, 2, 1), (2, 0.2, 2, 1), (2, 0.5, 3, 1), (3, 0.5, 1, 2)]],
    "mixed": [(DiLoCo(0.05, outer_lr=0.7, momentum=0.9), 1), (AllReduce(0.05), 1), (Scaffold(0.1, 3, "sgd"), 2),
              (AllReduce(0.1), 1)],
    "mixed, one of them shared": [(SharedTrain(0.05), 1), (Local(0.05), 1), (SharedTrain(0.1), 1), (Local(0.1), 1)],
    "optimizers": [(Local(0.05, optim=o), 1) for o in ("adamw", "sgd", "rmsprop", "adamw")],
}  # fmt: skip


def stack_of(
    cases: list[tuple[Any, int]], presence: Any = None, asked: Any = None, dropout: float = 0.0
) -> tuple[Stack, list[int]]:
    runs = [RunFacts(K, T, seed, presence) for _, seed in cases]
    order, groups = groups_of([algorithm for algorithm, _ in cases], runs)
    return Stack(engine_of(dropout), groups, StackedCollectives(K), reading(order, asked)), order


def alone(
    case: tuple[Any, int], config: int, presence: Any = None, dropout: float = 0.0
) -> tuple[Simulation, State, list[TickRecord]]:
    rows: list[TickRecord] = []
    run_facts = RunFacts(K, T, case[1], presence)
    simulation = Simulation(engine_of(dropout), case[0], run_facts, StackedCollectives(K), reading([config]))
    return simulation, run(simulation, simulation.init(), [lambda state, row: rows.append(row)]), rows


def assert_close(found: Any, expected: Any, where: str, tol: float = 1e-14) -> None:
    """Nested trees of the same names; those of a joint optimizer may have slots that one of them alone has not."""
    for path, x in tree.flatten(expected):
        if not isinstance(x, Tensor):
            continue
        y = found
        for _, name in path:
            y = y[name]
        y = y.expand_as(x) if isinstance(y, Tensor) else y
        torch.testing.assert_close(y, x, rtol=tol, atol=tol, equal_nan=True, msg=lambda m: f"{where}, {path}: {m}")  # noqa: B023


@pytest.mark.parametrize("absent", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("case", CASES)
def test_a_stack_computes_what_each_configuration_does_alone(case: str, absent: bool) -> None:
    presence = some_present() if absent else None
    stack, order = stack_of(CASES[case], presence)
    rows: list[TickRecord] = []
    state = run(stack, stack.init(), [lambda state, row: rows.append(row)])
    for place, config in enumerate(order):
        _, expected, rows_alone = alone(CASES[case][config], config, presence)
        mine = stack.alone(state, place)
        assert_close(mine.own, expected.own, f"own of {config}", 2e-14)
        assert_close(mine.shared, expected.shared, f"shared of {config}", 2e-14)
        at, group = slice(place * K, place * K + K), stack.group_with(place)
        for row, row_alone in zip(rows, rows_alone, strict=True):
            torch.testing.assert_close(row.losses[at], row_alone.losses, rtol=1e-13, atol=1e-13, equal_nan=True)
            assert row.sent_by(group) == row_alone.transfers
            trained = range(len(stack.here)) if row.active is None else row.active
            of_one = range(K) if row_alone.active is None else row_alone.active
            assert [i - at.start for i in trained if at.start <= i < at.stop] == list(of_one)


@pytest.mark.parametrize("absent", [False, True])
def test_dropout_is_keyed_by_the_seed_and_the_node_of_each_configuration(absent: bool) -> None:
    presence = some_present() if absent else None
    stack, order = stack_of(CASES["seeds"], presence, dropout=0.25)
    state = run(stack, stack.init())
    for place, config in enumerate(order):
        _, expected, _ = alone(CASES["seeds"][config], config, presence, dropout=0.25)
        assert_close(stack.alone(state, place).own, expected.own, f"{config}", 2e-14)
    other = alone((CASES["seeds"][0][0], 7), 0, presence, dropout=0.25)[1]
    assert not torch.allclose(other.own["params"]["a.weight"], stack.alone(state, 0).own["params"]["a.weight"])


@pytest.mark.parametrize("case", ["numbers", "late", "mixed", "optimizers"])
@pytest.mark.parametrize("absent", [False, True])
def test_a_stack_goes_on_where_it_was(case: str, absent: bool, tmp_path: Any) -> None:
    presence = some_present() if absent else None
    stack, _ = stack_of(CASES[case], presence)
    whole = run(stack, stack.init())
    half = run(stack, stack.init(), stop=lambda state: state.tick == 5)
    torch.save(vars(half), tmp_path / "state.pt")
    again = run(stack_of(CASES[case], presence)[0], State(**torch.load(tmp_path / "state.pt", weights_only=True)))
    for (path, a), (_, b) in zip(tree.flatten(vars(whole)), tree.flatten(vars(again)), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, path


@pytest.mark.parametrize("case", CASES)
def test_in_place_every_tensor_of_a_stack_stays_where_it_is(case: str) -> None:
    stack, _ = stack_of(CASES[case], some_present())
    state = stack.init()
    where = lambda s: {p: x.data_ptr() for p, x in tree.flatten([s.own, s.shared]) if isinstance(x, Tensor)}  # noqa: E731
    places = where(state)
    after = run(stack, state)
    found = where(after)
    assert {path: found[path] for path in places} == places
    pure = run(stack_of(CASES[case], some_present())[0], stack_of(CASES[case])[0].init(), pure=True)
    assert_close([pure.own, pure.shared], [after.own, after.shared], "pure", 1e-12)


def test_groups_train_in_one_call() -> None:
    """One request of all rows, where the groups of a stack train each by itself; in the order of the events."""
    asked: list[Any] = []
    stack, _ = stack_of(CASES["H"], asked=asked)
    run(stack, stack.init())
    assert asked == [(list(range(4 * K)), step) for step in range(T)]
    assert stack.whole is not None
    asked.clear()
    stack, _ = stack_of(CASES["mixed"], asked=asked)
    run(stack, stack.init())
    assert [rows for rows, _ in asked[:2]] == [[*range(K), *range(3 * K, 4 * K)], list(range(K, 3 * K))]
    assert stack.whole is None


def test_a_diverged_configuration_is_nan_and_the_others_are_not() -> None:
    cases = [(DiLoCo(lr, optim="sgd", outer_lr=0.7, momentum=0.5), 1) for lr in (0.05, 1e200, 0.1, 0.02)]
    stack, order = stack_of(cases)
    rows: list[TickRecord] = []
    state = run(stack, stack.init(), [lambda state, row: rows.append(row)])
    assert rows[-1].losses[K : 2 * K].isnan().all()
    for place in (0, 2, 3):
        assert_close(stack.alone(state, place).own, alone(cases[place], place)[1].own, f"{place}")
    assert order == [0, 1, 2, 3]


def test_initial_parameters_of_each_configuration() -> None:
    cases = CASES["H"]
    stack, order = stack_of(cases)
    start = {n: torch.stack([p.detach() * (1 + c) for c in order]) for n, p in stack.engine.params.items()}
    state = run(stack, stack.init(start))
    for place, config in enumerate(order):
        simulation = alone(cases[config], config)[0]
        expected = run(simulation, simulation.init({name: p[place : place + 1] for name, p in start.items()}))
        assert_close(stack.alone(state, place).own, expected.own, f"{config}")
        assert stack.result(stack.alone(state, place), place).params["a.weight"].shape == (K, 6, 3)


def test_gradients_elsewhere_have_another_name() -> None:
    class Ahead(Local):
        def train(self, part: Part) -> None:
            part.optimize(part.gradients(at=tree.map(lambda p: p + 1, part.params)))

    stack, _ = stack_of([(Ahead(H=2), 1), (Ahead(H=3), 1)])
    with pytest.raises(TypeError, match=r'give the method another name, .* train_method = "local"'):
        run(stack, stack.init())


def test_one_call_for_all_rates() -> None:
    """The movement at rate 1, scaled: as the rule of each alone, and in the state's own tensors."""
    settings: dict[str, dict[str, Any]] = {
        "sgd": {"momentum": 0.9},
        "adamw": {"weight_decay": 0.1},
        "lion": {"weight_decay": 0.1},
    }
    for optim in ("sgd", "adamw", "adam", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adadelta", "lion",
                  "fedadam", "fedyogi", "fedadagrad", "rprop", "muon"):  # fmt: skip
        kwargs: dict[str, Any] = {"momentum": 0.9, "nesterov": True} if optim == "muon" else settings.get(optim, {})
        each = [Optimizer(OptimSpec(optim, lr=lr, **kwargs), cosine_anneal=True) for lr in (0.1, 0.02, 0.05)]
        wide, generator = Optimizer.merged(each).wide(2), torch.Generator().manual_seed(0)
        assert (wide._unit is None) == (optim == "rprop")
        draw = lambda: {"w": torch.randn(6, 3, 2, dtype=F64, generator=generator)}  # noqa: B023, E731
        params = draw()
        expected = [tree.map(lambda p: p[2 * c : 2 * c + 2].clone(), params) for c in range(3)]  # noqa: B023
        slots, states, place = wide.init(params), [o.init(p) for o, p in zip(each, expected)], params["w"].data_ptr()
        for step in range(6):
            grads = draw()
            for c, one in enumerate(each):
                mine = {"w": grads["w"][2 * c : 2 * c + 2].clone()}
                expected[c], states[c] = one.step(expected[c], mine, states[c], step, one.lr(step, 6))
            new, slots = wide.step(params, grads, slots, step, wide.lr(step, 6))
            assert optim == "rprop" or new["w"].data_ptr() == place
            params = new
        torch.testing.assert_close(params["w"], torch.cat([x["w"] for x in expected]), rtol=1e-13, atol=1e-14)


# ------------------------------------------------------------------------------------------------------- which groups


def test_what_is_a_group() -> None:
    def sizes(*algorithms: Any, seeds: Any = None) -> list[int]:
        runs = [RunFacts(K, T, seed) for seed in seeds or [1] * len(algorithms)]
        return [group.size for group in groups_of(algorithms, runs)[1]]

    assert sizes(Local(0.1), Local(0.2), Local(0.1)) == [3]
    assert sizes(Local(0.1), Local(0.2, H=5), Local(0.1)) == [2, 1]
    assert sizes(Local(0.1), AllReduce(0.2)) == [1, 1]
    assert sizes(Local(0.1), Local(0.1, optim="sgd")) == [1, 1]
    assert sizes(Local(0.1), Local(0.1, cosine_anneal=True)) == [1, 1]
    assert sizes(Local(0.1, max_norm=1.0), Local(0.1, max_norm=2.0), Local(0.1)) == [2, 1]
    assert sizes(Local(0.1), Local(0.1), seeds=[1, 2]) == [1, 1]
    one = Local(0.1)
    one.batched = None
    assert sizes(one, one) == [1, 1]
    part = Local(0.1)
    vars(part)["of"] = one
    assert sizes(part, part) == [1, 1]
    assert sizes(Local(0.1, optim="adafactor"), Local(0.1, optim="adafactor")) == [1, 1]


def test_numbers_are_merged() -> None:
    cases = [DiLoCo(lr, outer_lr=o, momentum=0.9) for lr, o in [(0.1, 0.5), (0.2, 0.7)]]
    _, (group,) = groups_of(cases, [RunFacts(K, T)] * 2)
    assert group.algorithm.outer_lr.tolist() == [0.5, 0.7]
    assert group.algorithm.momentum == 0.9
    assert group.algorithm.inner.spec.lr.tolist() == [0.1, 0.2]
    assert (cases[0].outer_lr, cases[1].outer_lr) == (0.5, 0.7)
