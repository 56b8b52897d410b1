"""Laws of the scheduler of asynchronous runs: no tensors, only times."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest

from vecgym.simulation.events import Arrival, Restart, Rules, Stop, Update, Wires, schedule
from vecgym.simulation.events import Happening as Event


def of(events: list[Event], kind: type) -> list:
    return [event for event in events if isinstance(event, kind)]


def random_run(rng: random.Random) -> tuple[Rules, list[float], int]:
    K = rng.randint(1, 5)
    paces = [rng.choice([0.0, 0.1, 1.0]) for _ in range(3)]
    wires = Wires(2.0, [paces[0]] * K, [paces[1]] * K, [0.3] * K, paces[2]) if rng.random() < 0.5 else None
    rules = Rules(
        tuple(rng.randint(1, 4) for _ in range(K)), rng.randint(1, 2 * K), rng.choice([0.0, 0.5, 2.0, math.inf]),
        rng.choice(["full", "until_last"]), wires,
    )  # fmt: skip
    return rules, [rng.choice([0.25, 0.5, 1.0, 1.7, 4.0]) for _ in range(K)], rng.randint(1, 30)


@pytest.mark.parametrize("seed", range(300))
def test_laws(seed: int) -> None:
    rules, seconds, updates = random_run(random.Random(seed))
    events = schedule(rules, lambda node, step: seconds[node], Stop(updates=updates))
    times = [event.time for event in events]
    assert times == sorted(times), "time never runs backwards"
    assert [event.version for event in of(events, Update)] == list(range(1, updates + 1))

    version = 0
    begun: dict[int, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    arrived: dict[int, list[Arrival]] = defaultdict(list)
    since_update = 0
    for event in events:
        if isinstance(event, Update):
            version += 1
            assert since_update == event.num_arrivals == rules.buffer
            since_update = 0
        elif isinstance(event, Restart):
            assert event.version == version
            for node, begin in zip(event.nodes, event.begins):
                begun[node] = (version, begin)
                assert begin >= event.time
        elif isinstance(event, Arrival):
            since_update += 1
            assert (event.version, event.begin) == begun[event.node], "from what it was sent"
            assert event.staleness == version - event.version, "as the server counts it"
            spent = sum([seconds[event.node]] * event.num_steps)
            assert event.end == pytest.approx(event.begin + spent)
            assert event.time >= event.end
            arrived[event.node].append(event)
    for node, rounds in arrived.items():
        assert [event.round for event in rounds] == list(range(len(rounds))), "each round arrives once"
        assert [event.first_step for event in rounds] == [i * rules.num_steps[node] for i in range(len(rounds))]


@pytest.mark.parametrize("seed", range(100))
def test_permuted_nodes_give_a_permuted_run(seed: int) -> None:
    """No two arrivals tie here: of equal times the smaller id comes first."""
    rng = random.Random(seed)
    rules, _, updates = random_run(rng)
    K = len(rules.num_steps)
    seconds = [1 + 0.1 * math.sqrt(2 + node) for node in range(K)]
    order = list(range(K))
    rng.shuffle(order)
    moved = Rules(
        tuple(rules.num_steps[node] for node in order), rules.buffer, rules.max_wait, rules.grace, rules.wires
    )  # fmt: skip
    if rules.wires is not None:  # who is sent the parameters first goes by the id
        rules, moved = (Rules(r.num_steps, r.buffer, 0.0, r.grace, r.wires) for r in (rules, moved))
    plain = schedule(rules, lambda node, step: seconds[node], Stop(updates=updates))
    other = schedule(moved, lambda node, step: seconds[order[node]], Stop(updates=updates))
    found = [(event.time, order[event.node], event.round, event.staleness) for event in of(other, Arrival)]
    assert found == [(event.time, event.node, event.round, event.staleness) for event in of(plain, Arrival)]


def test_a_node_twice_as_fast_ends_twice_as_many_rounds() -> None:
    events = schedule(Rules((3, 3)), lambda node, step: [1.0, 2.0][node], Stop(seconds=600.0))
    counts = [sum(event.node == node for event in of(events, Arrival)) for node in range(2)]
    assert counts == [200, 100]


def test_equal_speeds_arrive_in_the_order_of_nodes() -> None:
    """All of a tie are handled before anybody begins again: staleness 0, 1, ..., K - 1, again and again."""
    events = schedule(Rules((2,) * 4), lambda node, step: 1.0, Stop(updates=12))
    arrivals = of(events, Arrival)
    assert [event.node for event in arrivals] == [0, 1, 2, 3] * 3
    assert [event.staleness for event in arrivals] == [0, 1, 2, 3] * 3


def test_apart_by_a_little_every_staleness_is_the_number_of_others() -> None:
    events = schedule(Rules((1,) * 4), lambda node, step: 1.0 if step else 1.0 + 0.1 * node, Stop(updates=20))
    assert [event.staleness for event in of(events, Arrival)] == [0, 1, 2, 3] + [3] * 16


def test_to_look_ahead_sends_nothing() -> None:
    """The look at node 1's message, which comes after the window closes, is a trial: the message is sent once."""
    wires = Wires(1.0, up=[0.0, 3.0], down=[0.0, 0.0], latency=[0.0, 0.0])
    rules = Rules((1, 1), max_wait=0.5, grace="until_last", wires=wires)
    events = schedule(rules, lambda node, step: [1.0, 1.2][node], Stop(updates=5))
    arrivals = [(event.node, event.time) for event in of(events, Arrival)]
    assert arrivals == [(0, 1.0), (0, 2.0), (0, 3.0), (0, 4.0), (1, pytest.approx(4.2))]


@pytest.mark.parametrize(
    ("grace", "max_wait", "begins"),
    [("full", 0.0, [1.0, 2.0]), ("full", 0.5, [1.5, 1.5]), ("until_last", 0.5, [1.4, 1.4]),
     ("full", 2.0, [2.6, 2.6]), ("until_last", 1.0, [1.4, 1.4]), ("full", math.inf, [2.6, 2.6])],
)  # fmt: skip
def test_grace(grace: str, max_wait: float, begins: list[float]) -> None:
    """Nodes that end after 1, 1.4 and 2.6 s: when the first begins again; a window of 2 s ends when all are there."""
    rules = Rules((1, 1, 1), 1, max_wait, grace)  # type: ignore[arg-type]
    events = schedule(rules, lambda node, step: [1.0, 1.4, 2.6][node], Stop(updates=8))
    node = [begin for event in of(events, Restart) for i, begin in zip(event.nodes, event.begins) if i == 0]
    assert node[0] == begins[0]
    if max_wait == 0:
        assert node[:2] == begins


def test_links_serve_one_message_at_a_time() -> None:
    """Two nodes end at 1 s; each message takes 2 s at the server's link and is under way for 0.5 s."""
    wires = Wires(1.0, [0.5, 0.5], [0.25, 0.25], [0.5, 0.5], server=2.0)
    events = schedule(Rules((1, 1), wires=wires), lambda node, step: 1.0, Stop(updates=3))
    assert [event.time for event in of(events, Arrival)] == [3.5, 5.5, 9.5]
    assert [event.begins for event in of(events, Restart)] == [(6.0,), (8.0,)]


def test_each_end_is_taken_for_its_own_time() -> None:
    """Both end at 1 s. Node 0's link takes 4 s a message and the server's 1 s: node 1's is there at 3 s, not at 6 s."""
    wires = Wires(1.0, up=[4.0, 0.5], down=[0.5, 4.0], latency=[0.25, 0.0], server=1.0)
    events = schedule(Rules((1, 1), wires=wires), lambda node, step: 1.0, Stop(updates=3))
    assert [(event.node, event.time) for event in of(events, Arrival)] == [(1, 3.0), (0, 5.25), (1, 9.5)]
    assert [event.begins for event in of(events, Restart)] == [(7.0,), (6.5,)]


def test_a_message_of_a_later_round_does_not_overtake() -> None:
    """Node 1's movement waits for the window to close; node 0 begins again, ends earlier, and sends first."""
    wires = Wires(1.0, [0.0] * 3, [0.0] * 3, [3.0, 0.0, 0.0], server=5.0)
    events = schedule(Rules((1, 1, 1), wires=wires), lambda node, step: [1.0, 5.5, 0.5][node], Stop(updates=12))
    ends = sorted(of(events, Arrival), key=lambda event: event.end)
    by_server = [event.time - wires.latency[event.node] for event in ends]
    assert by_server == sorted(by_server), "the server's link takes them in the order in which they are ready"


def test_stops() -> None:
    def seconds(node: int, step: int) -> float:
        return 1.0 + node

    assert len(of(schedule(Rules((2, 2)), seconds, Stop(steps=9)), Arrival)) == 5
    assert schedule(Rules((2, 2)), seconds, Stop(updates=50, seconds=4.0))[-1].time == 4.0
    assert schedule(Rules((2, 2)), seconds, Stop(seconds=1.0)) == []
    for stop in (Stop(seconds=1e30), Stop(updates=10**15), Stop(steps=10**12, seconds=1e9)):
        with pytest.raises(ValueError, match=r"a run of .* events, the first 4096 of them in .* planned in advance"):
            schedule(Rules((2, 2)), seconds, stop)
    assert schedule(Rules((2, 2)), seconds, Stop(updates=10**15, seconds=1e4))[-1].time == 1e4
    with pytest.raises(ValueError, match="rounds that take no time never end"):
        schedule(Rules((2, 2)), lambda node, step: 0.0, Stop(seconds=1.0))
    with pytest.raises(ValueError, match=r"events at 10\.0 s: rounds that take no time never end"):
        schedule(Rules((2, 2)), lambda node, step: 1.0 if step < 10 else 0.0, Stop(seconds=99.0))
