"""The naive twins of the asynchronous strategies against plain loops and against what can be worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import Quadratic, make_data, make_model, take
from tests.reference import common
from tests.reference.ad_psgd import ad_psgd
from tests.reference.asynchronous import (
    DelayedNesterov,
    HeLoCo,
    Network,
    OuterOptimizer,
    Params,
    Update,
    asynchronous,
    dylu,
    fedbuff,
    heloco_correction,
)
from tests.reference.common import OptimizerSpec
from tests.reference.decoupled import decoupled, merged
from tests.reference.diloco import diloco
from tests.reference.halos import halos, halos_steps

TOLERANCE = 1e-12
INF = math.inf

SGD1: OptimizerSpec = (torch.optim.SGD, {"lr": 1.0})
NESTEROV: OptimizerSpec = (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True})
ADAMW: OptimizerSpec = (torch.optim.AdamW, {"lr": 0.01})


# ------------------------------------------------------------------------------------------------------------- helpers


class Drift(nn.Module):
    """A loss whose gradient is the batch, wherever it is: theta moves by -lr times the batch."""

    def __init__(self, theta: Sequence[float] = (0.0,)) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta, dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        return (self.theta * batch).sum()


def place(node: int, step: int) -> Tensor:
    """Node i moves by its own digit: node 0 by 1, node 1 by 10, node 2 by 100. Who took part can be read off."""
    return torch.tensor([10.0**node], dtype=torch.float64)


def drift(seconds: Sequence[float], num_updates: int, num_steps: int = 1, **options: Any) -> list[Update]:
    """Nodes of these seconds per step, each moving the only parameter by -10^node per step."""
    settings: dict[str, Any] = {"server": OuterOptimizer(SGD1), "inner": SGD1}
    settings.update(options)
    return asynchronous(
        Drift(),
        place,
        len(seconds),
        num_updates=num_updates,
        num_steps=[num_steps] * len(seconds),
        step_seconds=lambda node, step: seconds[node],
        **settings,
    )


def times(updates: Sequence[Update]) -> list[float]:
    return [update.time for update in updates]


def nodes_of(updates: Sequence[Update]) -> list[list[int]]:
    return [[arrival.node for arrival in update.arrivals] for update in updates]


def staleness(updates: Sequence[Update]) -> list[int]:
    return [arrival.staleness for update in updates for arrival in update.arrivals]


def values(updates: Sequence[Update]) -> list[float]:
    return [update.params["theta"].item() for update in updates]


def mlp_batch(node: int, step: int) -> Any:
    data = make_data("MLP", 4, seed=1000 * node + step, dtype=torch.float64)
    return take(data, slice(None))


def mlp_rows(num_steps: int, num_nodes: int) -> list[list[Any]]:
    return [[mlp_batch(node, step) for node in range(num_nodes)] for step in range(num_steps)]


def mlp(seconds: Sequence[float], num_updates: int, **options: Any) -> list[Update]:
    settings: dict[str, Any] = {"num_steps": [3] * len(seconds), "inner": ADAMW, "server": OuterOptimizer(NESTEROV)}
    settings.update(options)
    return asynchronous(
        make_model("MLP", dtype=torch.float64),
        mlp_batch,
        len(seconds),
        num_updates=num_updates,
        step_seconds=lambda node, step: seconds[node],
        **settings,
    )


def assert_close(actual: Params, expected: Params) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=TOLERANCE, atol=TOLERANCE)


# ------------------------------------------------------------------------------------------- limits: synchronous, plain


@pytest.mark.parametrize("grace", ["full", "until_last"])
@pytest.mark.parametrize("seconds", [[1.0, 1.0, 1.0], [3.0, 1.0, 0.5]], ids=["equal", "unequal"])
def test_infinite_wait_and_a_full_buffer_are_diloco(grace: str, seconds: list[float]) -> None:
    """Also the times: rounds end with the slowest node."""
    H, rounds = 3, 4
    updates = mlp(seconds, rounds, server=OuterOptimizer(NESTEROV, buffer=3), max_wait=INF, grace=grace)
    for r in range(1, rounds + 1):
        model = make_model("MLP", dtype=torch.float64)
        expected = diloco(model, mlp_rows(r * H, 3), 3, H=H, inner=ADAMW, outer=NESTEROV)
        assert_close(updates[r - 1].params, expected.outer)
        assert updates[r - 1].time == pytest.approx(r * H * max(seconds))
        assert updates[r - 1].total_steps == r * H * 3
        losses = expected.losses[-H:].mean(0)
        for arrival in updates[r - 1].arrivals:
            assert arrival.loss == pytest.approx(losses[arrival.node].item(), abs=1e-12)
    assert set(staleness(updates)) == {0}


def test_one_node_is_plain_training() -> None:
    """An outer SGD(1) on theta_start - theta_end puts theta_end back: AdamW never notices."""
    updates = mlp([1.0], 5, server=OuterOptimizer(SGD1), max_norm=0.5, schedule=lambda step: 1 / (1 + step))
    model = make_model("MLP", dtype=torch.float64)
    (optimizer,) = common.make_optimizers([model], ADAMW)
    for step in range(15):
        common.backward(model, mlp_batch(0, step))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.step()
    torch.testing.assert_close(
        torch.cat([p.flatten() for p in updates[-1].params.values()]),
        torch.cat([p.detach().flatten() for p in common.parameters(model).values()]),
        rtol=1e-10,
        atol=1e-10,
    )
    assert times(updates) == [3.0, 6.0, 9.0, 12.0, 15.0]
    assert staleness(updates) == [0] * 5


# ------------------------------------------------------------------------------------------------- order and staleness


def test_equal_speeds_tie_and_begin_together() -> None:
    """All K rounds end at 1, 2, ...; within a time staleness is 0 .. K-1; all begin from the last of its versions."""
    updates = drift([1.0, 1.0, 1.0], 6)
    assert times(updates) == [1, 1, 1, 2, 2, 2]
    assert [update.version for update in updates] == [1, 2, 3, 4, 5, 6]
    assert nodes_of(updates) == [[0], [1], [2]] * 2
    assert staleness(updates) == [0, 1, 2] * 2
    assert values(updates) == [-1, -11, -111, -112, -122, -222]
    assert [update.total_steps for update in updates] == [1, 2, 3, 4, 5, 6]


def test_equal_speeds_with_outer_sgd_are_fedavg_with_k_times_the_rate() -> None:
    """K movements of one version, one after the other, sum to K times their mean."""
    updates = mlp([1.0, 1.0, 1.0], 12, server=OuterOptimizer((torch.optim.SGD, {"lr": 0.1})))
    model = make_model("MLP", dtype=torch.float64)
    expected = diloco(model, mlp_rows(12, 3), 3, H=3, inner=ADAMW, outer=(torch.optim.SGD, {"lr": 0.3}))
    assert_close(updates[-1].params, expected.outer)


def test_a_fast_node_makes_a_slow_one_stale() -> None:
    """Node 0 arrives at 1, 2, 3, node 1 at 2.5: it began from version 0 and meets version 2."""
    updates = drift([1.0, 2.5], 5)
    assert times(updates) == [1, 2, 2.5, 3, 4]
    assert nodes_of(updates) == [[0], [0], [1], [0], [0]]
    assert staleness(updates) == [0, 0, 2, 1, 0]
    assert values(updates) == [-1, -2, -12, -13, -14]


def test_a_tie_of_different_rounds_is_in_the_order_of_nodes() -> None:
    """At 2 the slow node 0 and the fast node 1 arrive: node 0 is first; both then begin from version 3."""
    updates = drift([2.0, 1.0], 6)
    assert times(updates) == [1, 2, 2, 3, 4, 4]
    assert nodes_of(updates) == [[1], [0], [1], [1], [0], [1]]
    assert [a.round for u in updates for a in u.arrivals] == [0, 0, 1, 2, 1, 3]
    assert staleness(updates) == [0, 1, 1, 0, 1, 1]


def test_a_message_without_a_way_ties_with_one_that_was_on_its_way() -> None:
    """Node 1 ends at 1 and is there at 2, when node 0 ends and is there: node 0 is first."""
    updates = drift([2.0, 1.0], 2, network=Network(latency=[0.0, 1.0]))
    assert times(updates) == [2, 2]
    assert nodes_of(updates) == [[0], [1]]


def test_seconds_may_differ_from_step_to_step() -> None:
    """A node's own step counts on from round to round: 1 + 2, then 3 + 4 seconds."""
    updates = asynchronous(
        Drift(),
        place,
        1,
        num_updates=2,
        num_steps=[2],
        step_seconds=lambda node, step: float(step + 1),
        inner=SGD1,
        server=OuterOptimizer(SGD1),
    )
    assert times(updates) == [3, 10]


@pytest.mark.parametrize("max_wait", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("grace", ["full", "until_last"])
@pytest.mark.parametrize("network", [None, Network(10.0, [0.01, 0.02, 0.05, 0.01], 0.03, 0.02, [0.1, 0.0, 0.3, 0.2])])
def test_time_never_runs_backwards_and_each_round_arrives_once(
    max_wait: float, grace: str, network: Network | None
) -> None:
    updates = drift([1.0, 0.37, 2.2, 1.3], 60, num_steps=2, max_wait=max_wait, grace=grace, network=network)
    arrivals = [arrival for update in updates for arrival in update.arrivals]
    assert times(updates) == sorted(times(updates))
    assert [update.version for update in updates] == list(range(1, 61))
    for node in range(4):
        assert [a.round for a in arrivals if a.node == node] == list(range(sum(a.node == node for a in arrivals)))
    assert all(0 <= arrival.staleness < 60 for arrival in arrivals)
    assert [update.total_steps for update in updates] == [2 * n for n in range(1, 61)]
    # each arrival moved the parameter by its own digit, whatever it was stale by
    assert updates[-1].params["theta"].item() == -sum(2 * 10.0**arrival.node for arrival in arrivals)


# --------------------------------------------------------------------------------------------------- weights and buffer


def test_weights_are_of_the_staleness_at_arrival() -> None:
    updates = drift([1.0, 1.0, 1.0], 3, staleness_function="inverse_sqrt")
    weights = [update.arrivals[0].weight for update in updates]
    assert weights == pytest.approx([1, 2**-0.5, 3**-0.5])
    assert values(updates) == pytest.approx([-1, -1 - 10 * 2**-0.5, -1 - 10 * 2**-0.5 - 100 * 3**-0.5])


def test_any_function_of_staleness() -> None:
    updates = drift([1.0, 1.0, 1.0], 3, staleness_function=lambda s: 1.0 if s < 2 else 0.0)
    assert values(updates) == [-1, -11, -11]


def test_a_buffer_divides_by_its_size_not_by_its_weights() -> None:
    """fedbuff(M = 2) with speeds 1, 1, 3. Arrivals: 0, 1 | 0, 1 | 0, 1 and, at 3, node 2 | ..."""
    updates = drift([1.0, 1.0, 3.0], 4, **fedbuff(lr=2.0, buffer=2))
    assert times(updates) == [1, 2, 3, 4]
    assert nodes_of(updates) == [[0, 1], [0, 1], [0, 1], [2, 0]]
    assert staleness(updates) == [0, 0, 0, 0, 0, 0, 3, 0]
    # lr 2 / M = 1: the sum of w_i 10^i; node 2 began from version 0 and meets version 3
    assert values(updates) == pytest.approx([-11, -22, -33, -33 - 100 / 2 - 1])


# --------------------------------------------------------------------------------------------------------------- grace


def test_grace_full_waits_to_the_end_of_the_window() -> None:
    """Speeds 1, 1.25, 4; max_wait 0.5. Window [1, 1.5] has nodes 0, 1; both begin at 1.5; then [2.5, 3] and 3 + 1."""
    updates = drift([1.0, 1.25, 4.0], 7, max_wait=0.5, grace="full")
    assert times(updates) == [1, 1.25, 2.5, 2.75, 4, 4, 4.25]
    assert nodes_of(updates) == [[0], [1], [0], [1], [0], [2], [1]]
    assert staleness(updates) == [0, 1, 0, 1, 0, 5, 2]


def test_grace_until_last_waits_for_the_last_that_comes() -> None:
    """The same nodes: they begin again at 1.25 and 2.5, when the last one came; the third round arrives at 3.5."""
    updates = drift([1.0, 1.25, 4.0], 7, max_wait=0.5, grace="until_last")
    assert times(updates) == [1, 1.25, 2.25, 2.5, 3.5, 3.75, 4]
    assert nodes_of(updates) == [[0], [1], [0], [1], [0], [1], [2]]
    assert staleness(updates) == [0, 1, 0, 1, 0, 1, 6]


def test_full_ends_as_soon_as_all_wait() -> None:
    updates = drift([1.0, 1.25], 4, max_wait=100.0, grace="full")
    assert times(updates) == [1, 1.25, 2.25, 2.5]


def test_the_end_of_a_window_belongs_to_it() -> None:
    """Node 1 arrives at 1 + 0.5 exactly; node 2 at 1.625, too late, and waits for its own window's end, 2.125."""
    updates = drift([1.0, 1.5, 1.625], 6, max_wait=0.5, grace="full")
    assert times(updates)[:3] == [1, 1.5, 1.625]
    assert times(updates)[3:] == [2.5, 3.0, 3.75]


def test_after_until_last_a_node_may_come_again_before_the_window_would_have_ended() -> None:
    """max_wait 10, speeds 1, 1.5, 100: {0, 1} begin again at 1.5 as node 2 does not come by 11. So every 1.5 s."""
    updates = drift([1.0, 1.5, 100.0], 6, max_wait=10.0, grace="until_last")
    assert times(updates) == [1, 1.5, 2.5, 3, 4, 4.5]


def test_until_last_waits_for_messages_not_for_rounds() -> None:
    """Node 1's round ends within the window, but its message comes after it: node 0 does not wait."""
    updates = drift([1.0, 1.25], 3, max_wait=0.5, grace="until_last", network=Network(latency=[0.0, 0.5]))
    assert times(updates) == [1, 1.75, 2]


# -------------------------------------------------------------------------------------------------------------- network


def test_uploads_share_the_servers_link_and_downloads_too() -> None:
    """4 bytes at 0.25 s per byte: 1 s a message. K = 2, rounds of 2 s: worked out by hand.

    Up: ready 2 and 2, sent 2-3 and 3-4, arrive at 3 and 4 (latency 0). Down: node 0 3-4, node 1 4-5.
    Rounds end at 6 and 7, sent 6-7 and 7-8.
    """
    updates = drift([2.0, 2.0], 4, network=Network(4.0, 0.25, 0.25, 0.25))
    assert times(updates) == [3, 4, 7, 8]
    assert staleness(updates) == [0, 1, 1, 1]


def test_downloads_of_those_who_begin_together_are_in_the_order_of_nodes() -> None:
    """All wait for node 0, the last; 4 bytes, 1 s each way. Up: 1-2, 2-3; 3-4. Down, from 4: 4-5, 5-6, 6-7."""
    updates = drift([3.0, 1.0, 1.0], 6, max_wait=INF, network=Network(4.0, 0.25, 0.25, 0.25))
    assert times(updates)[:3] == [2, 3, 4]
    assert nodes_of(updates)[:3] == [[1], [2], [0]]
    # begin 5 (node 0), 6, 7; end 8, 7, 8; up: 7-8, then the tie of 8 in the order of nodes: 8-9, 9-10
    assert times(updates)[3:] == [8, 9, 10]
    assert nodes_of(updates)[3:] == [[1], [0], [2]]


def test_each_end_of_a_link_is_taken_for_its_own_time_and_latency_takes_none() -> None:
    """Node 0 has 0.5 s per byte up, the server 0.25; 4 bytes. Latency 10 s of node 0 does not keep node 1 waiting."""
    network = Network(4.0, up_pace=[0.5, 0.0], down_pace=0.0, server_pace=0.25, latency=[10.0, 0.0])
    updates = drift([1.0, 1.0], 3, network=network)
    # ready 1, 1: the server has node 0's at 2, its link at 3, there at 13; node 1's at 3. Down 3-4, round 4-5, up 5-6;
    # down 6-7, round 7-8, up 8-9
    assert times(updates) == [3, 6, 9]
    assert nodes_of(updates) == [[1], [1], [1]]


def test_a_download_carries_what_the_server_had_when_it_was_sent() -> None:
    """Latency 1 for node 0: its message of 1 is there at 2, the reply, version 1, at 3, though version 2 is of 2.5."""
    updates = drift([1.0, 2.5], 4, network=Network(latency=[1.0, 0.0]))
    # node 0: arrives 2, begins 3, ends 4, arrives 5. node 1: arrives 2.5 and 5 (tie with node 0)
    assert times(updates) == [2, 2.5, 5, 5]
    assert nodes_of(updates) == [[0], [1], [0], [1]]
    assert staleness(updates) == [0, 1, 1, 1]


# --------------------------------------------------------------------------------------------------- the server's rules


def random_params(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


SHAPES = {"weight": (3, 2), "bias": (4,)}


def nesterov(movements: list[Params], lr: float, momentum: float) -> Params:
    """The parameters after these steps from random_params(0)."""
    theta = random_params(0)
    optimizer = torch.optim.SGD(list(theta.values()), lr=lr, momentum=momentum, nesterov=True)
    for movement in movements:
        for name, param in theta.items():
            param.grad = movement[name]
        optimizer.step()
    return theta


def after(server: Any, movements: list[Params]) -> Params:
    theta = random_params(0)
    server.start(theta)
    for movement in movements:
        server.receive(movement, 1.0)
    return theta


def mean(movements: list[Params]) -> Params:
    return {name: torch.stack([m[name] for m in movements]).mean(0) for name in SHAPES}


def test_delayed_nesterov_of_one_is_nesterov_at_each_arrival() -> None:
    movements = [random_params(seed) for seed in range(1, 6)]
    for c in (0.0, 0.5, 1.0):
        assert_close(after(DelayedNesterov(0.3, 0.9, 1, c), movements), nesterov(movements, 0.3, 0.9))


def test_delayed_nesterov_without_c_is_nesterov_on_the_mean_of_n() -> None:
    movements = [random_params(seed) for seed in range(1, 13)]
    means = [mean(movements[i : i + 4]) for i in (0, 4, 8)]
    assert_close(after(DelayedNesterov(0.3, 0.9, 4), movements), nesterov(means, 0.3, 0.9))


def test_delayed_nesterov_in_a_run_is_synchronous_diloco() -> None:
    """c = 0, N = K and everybody waits: every K arrivals are one synchronous Nesterov step, at unequal speeds too."""
    server = DelayedNesterov(0.7, 0.9, 3)
    updates = mlp([3.0, 1.0, 2.0], 12, server=server, max_wait=INF)
    model = make_model("MLP", dtype=torch.float64)
    expected = diloco(model, mlp_rows(12, 3), 3, H=3, inner=ADAMW, outer=NESTEROV)
    assert_close(updates[-1].params, expected.outer)
    assert staleness(updates) == [0, 1, 2] * 4


def test_delayed_nesterov_with_c_spreads_the_momentum_over_the_arrivals() -> None:
    """By hand: N = 2, c = 1/2, beta 1/2, eta 1 and g = 4, 8, 4, 8 from 0. m = 6, then 3 + 6 = 9.

    1: -4/2. 2: m = 6, -(1 - 1 + 1/2) 3 - 8/2. 3: -(1/2) 3 - 2. 4: m = 9, -(1/2) 4.5 - 4.
    """
    theta = {"x": torch.zeros(1, dtype=torch.float64)}
    server = DelayedNesterov(1.0, 0.5, 2, 0.5)
    server.start(theta)
    seen = []
    for g in (4.0, 8.0, 4.0, 8.0):
        assert server.receive({"x": torch.tensor([g], dtype=torch.float64)}, 1.0)
        seen.append(theta["x"].item())
    assert seen == [-2, -7.5, -11, -17.25]


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_heloco_leaves_what_agrees() -> None:
    Delta, m = vector(1.0, 2.0), vector(3.0, 0.0)
    assert heloco_correction(Delta, m) is Delta  # cosine 0.447


def test_heloco_takes_out_some_of_what_goes_against_the_momentum() -> None:
    """Delta = (-3, 4), m = (5, 0): cos = -0.6, conf = 5 / 20, strength 0.5 * 0.6 / 4 = 0.075; -3 (1 - 0.075), 4."""
    corrected = heloco_correction(vector(-3.0, 4.0), vector(5.0, 0.0))
    torch.testing.assert_close(corrected, vector(-3 * (1 - 0.075), 4.0), rtol=1e-8, atol=0)


def test_heloco_turns_what_is_across_towards_the_momentum() -> None:
    """Delta = (0, 6), m = (2, 0): cos 0, conf 6 / 12, l = 1/2: 45 degrees, norm 6."""
    corrected = heloco_correction(vector(0.0, 6.0), vector(2.0, 0.0))
    torch.testing.assert_close(corrected, vector(6 * 0.5**0.5, 6 * 0.5**0.5), rtol=1e-8, atol=0)


def test_heloco_corrects_each_tensor_by_the_momentum_of_before() -> None:
    """First arrival: m = 0, as it is. Second: `weight` agrees, `bias` goes against m and is corrected. Nesterov."""
    first = random_params(1)
    second = {"weight": first["weight"] * 2, "bias": -first["bias"]}
    corrected = {"weight": second["weight"], "bias": heloco_correction(second["bias"], first["bias"])}
    assert not torch.equal(corrected["bias"], second["bias"])
    assert_close(after(HeLoCo(0.7, 0.9), [first, second]), nesterov([first, corrected], 0.7, 0.9))


def test_heloco_without_a_movement_or_a_momentum_is_as_it_is() -> None:
    nothing = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    movements = [nothing, random_params(1), nothing]
    assert_close(after(HeLoCo(0.7, 0.9), movements), nesterov(movements, 0.7, 0.9))


def test_heloco_corrects_before_it_weighs() -> None:
    theta = random_params(0)
    server = HeLoCo(0.7, 0.9)
    server.start(theta)
    first, second = random_params(1), random_params(2)
    server.receive(first, 1.0)
    server.receive(second, 0.5)
    weighted = {name: 0.5 * heloco_correction(second[name], first[name]) for name in SHAPES}
    assert_close(theta, nesterov([first, weighted], 0.7, 0.9))


# ----------------------------------------------------------------------------------------------------------------- DyLU


@pytest.mark.parametrize(
    ("H", "seconds", "expected"),
    [
        (20, [0.58, 0.75, 1.51, 3.33], [20, 15, 7, 3]),
        (4, [1.0, 100.0], [4, 1]),
        (8, [0.5, 0.5], [8, 8]),
        (31, [0.3, 0.3], [31, 31]),  # 31 * 0.3 / 0.3 is 30.999999999999996 in floats
        (9, [0.9, 2.7], [9, 3]),
        (98, [1.0, 49.0], [98, 2]),  # 98 * (1 / 49) is 1.9999999999999998
    ],
)
def test_dylu(H: int, seconds: list[float], expected: list[int]) -> None:
    assert dylu(H, seconds) == expected


def test_unequal_rounds_take_their_own_steps() -> None:
    """DyLU at speeds 1, 2, H = 4: rounds of 4 and 2 steps, both 4 s; each node's batches go on where they ended."""
    seen: list[tuple[int, int]] = []

    def batch(node: int, step: int) -> Tensor:
        seen.append((node, step))
        return place(node, step)

    steps: Callable[[int, int], float] = lambda node, step: [1.0, 2.0][node]  # noqa: E731
    updates = asynchronous(
        Drift(),
        batch,
        2,
        num_updates=4,
        num_steps=dylu(4, [1.0, 2.0]),
        step_seconds=steps,
        inner=SGD1,
        server=OuterOptimizer(SGD1),
    )
    assert times(updates) == [4, 4, 8, 8]
    assert values(updates) == [-4, -24, -28, -48]
    assert [update.total_steps for update in updates] == [4, 6, 10, 12]
    assert [step for node, step in seen if node == 0] == list(range(12))
    assert [step for node, step in seen if node == 1] == list(range(6))


# -------------------------------------------------------------------------------------------------------------- AD-PSGD


def ring(node: int, step: int) -> int:
    return (node + 1) % 3


@pytest.mark.parametrize(("mix", "expected"), [("after", [1, 3, 3.75]), ("before", [2, 5, 4])])
def test_ad_psgd_applies_a_gradient_to_where_the_node_is_by_then(mix: Any, expected: list[float]) -> None:
    """x - 4 at node 0 (1 s a step), x - 8 at node 1 (1.5 s), rate 1/2, from 0. Worked out by hand, "after":

    1:   node 0: 0 + 2 = 2, mean with 0: both 1. Node 0 begins at 1: gradient -3.
    1.5: node 1: its gradient -8 is of 0; 1 + 4 = 5, mean with 1: both 3.
    2:   node 0: 3 + 1.5 = 4.5, mean with 3: 3.75.
    "before", 1: mean 0, node 0: 0 + 2 = 2, where it begins: gradient -2. 1.5: mean of 0 and 2: both 1, node 1:
    1 + 4 = 5. 2: mean of 1 and 5: both 3, node 0: 3 + 1 = 4.
    """
    model = Quadratic(1).double()
    nn.init.zeros_(model.x)
    steps, _ = ad_psgd(
        model,
        lambda node, step: torch.full((1, 1), 4.0 * (node + 1), dtype=torch.float64),
        2,
        total_steps=3,
        neighbour=lambda node, step: 1 - node,
        step_seconds=lambda node, step: [1.0, 1.5][node],
        mix=mix,
        inner=(torch.optim.SGD, {"lr": 0.5}),
    )
    assert [(step.time, step.node, step.own_step) for step in steps] == [(1, 0, 0), (1.5, 1, 0), (2, 0, 1)]
    assert [step.params["x"].item() for step in steps] == expected


@pytest.mark.parametrize("mix", ["after", "before"])
def test_averages_of_ad_psgd_conserve_the_sum(mix: Any) -> None:
    steps, models = ad_psgd(
        Drift(),
        place,
        3,
        total_steps=50,
        neighbour=ring,
        step_seconds=lambda node, step: [1.0, 0.37, 2.2][node],
        mix=mix,
        inner=SGD1,
    )
    total = sum(common.parameters(model)["theta"].item() for model in models)
    assert total == pytest.approx(-sum(10.0**step.node for step in steps), rel=1e-12)
    assert [step.time for step in steps] == sorted(step.time for step in steps)
    assert [step.total_steps for step in steps] == list(range(1, 51))
    for node in range(3):
        own = [step.own_step for step in steps if step.node == node]
        assert own == list(range(len(own)))


def test_ad_psgd_without_neighbours_is_plain_training_on_each_node() -> None:
    _, models = ad_psgd(
        make_model("MLP", dtype=torch.float64),
        mlp_batch,
        2,
        total_steps=10,
        neighbour=lambda node, step: node,
        step_seconds=lambda node, step: 1.0,
        inner=ADAMW,
        max_norm=0.5,
    )
    for node in range(2):
        model = make_model("MLP", dtype=torch.float64)
        (optimizer,) = common.make_optimizers([model], ADAMW)
        for step in range(5):
            common.backward(model, mlp_batch(node, step))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        for name, param in common.parameters(model).items():
            assert torch.equal(common.parameters(models[node])[name], param)


def test_ad_psgd_at_equal_speeds_ends_all_steps_before_the_next_begin() -> None:
    """x - c from 0 with c = 4, 8 and rate 1/2, both end at 1. Node 0: 2, both 1. Node 1: 5, both 3. Both begin at 3.

    At 2: node 0: 3 + 1/2 = 3.5, both 3.25; node 1: 3.25 + 2.5 = 5.75, both 4.5.
    """
    model = Quadratic(1).double()
    nn.init.zeros_(model.x)
    steps, _ = ad_psgd(
        model,
        lambda node, step: torch.full((1, 1), 4.0 * (node + 1), dtype=torch.float64),
        2,
        total_steps=4,
        neighbour=lambda node, step: 1 - node,
        step_seconds=lambda node, step: 1.0,
        inner=(torch.optim.SGD, {"lr": 0.5}),
    )
    assert [step.params["x"].item() for step in steps] == [1, 3, 3.25, 4.5]


# ---------------------------------------------------------------------------------------------------------------- HALoS


def halos_drift(seconds: Sequence[float], regions: list[list[int]], num_updates: int, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "make_local": lambda: OuterOptimizer(SGD1),
        "global_server": OuterOptimizer(SGD1),
        "inner": SGD1,
        "num_steps": [1] * len(seconds),
    }
    settings.update(options)
    return halos(
        Drift(), place, regions, num_updates=num_updates, step_seconds=lambda node, step: seconds[node], **settings
    )


def test_halos_of_one_node_a_region_that_takes_over_the_global_model_is_asynchronous() -> None:
    """Each arrival goes on to the global server, and the reply replaces the local model: no tie, so the same run."""
    seconds = [1.0, 0.37, 2.21]
    expected = mlp(seconds, 12, server=HeLoCo(0.3, 0.9))
    updates, _ = halos(
        make_model("MLP", dtype=torch.float64),
        mlp_batch,
        [[0], [1], [2]],
        num_updates=12,
        num_steps=[3] * 3,
        step_seconds=lambda node, step: seconds[node],
        inner=ADAMW,
        make_local=lambda: OuterOptimizer(SGD1),
        global_server=HeLoCo(0.3, 0.9),
        local_updates=1,
        merge=1.0,
    )
    assert times(updates) == times(expected)
    for ours, theirs in zip(updates, expected):
        assert ours.arrivals[0].node == theirs.arrivals[0].node
        assert ours.staleness == theirs.arrivals[0].staleness
        assert ours.arrivals[0].loss == pytest.approx(theirs.arrivals[0].loss, abs=1e-12)
        torch.testing.assert_close(ours.params, theirs.params, rtol=1e-9, atol=1e-9)


def test_halos_of_one_region_that_hears_nothing_is_asynchronous_with_the_local_rule() -> None:
    """merge = 0; the global server, SGD(1), adds the movements up: it is where the local one was when it sent."""
    seconds = [1.0, 0.37, 2.21]
    expected = mlp(seconds, 12, server=DelayedNesterov(0.2, 0.9, 4, 0.1))
    updates, local_thetas = halos(
        make_model("MLP", dtype=torch.float64),
        mlp_batch,
        [[0, 1, 2]],
        num_updates=4,
        num_steps=[3] * 3,
        step_seconds=lambda node, step: seconds[node],
        inner=ADAMW,
        make_local=lambda: DelayedNesterov(0.2, 0.9, 4, 0.1),
        global_server=OuterOptimizer(SGD1),
        local_updates=3,
        merge=0.0,
    )
    for update, last in zip(updates, expected[2::3]):
        assert update.time == last.time
        assert update.total_steps == last.total_steps
        torch.testing.assert_close(update.params, last.params, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(local_thetas[0], expected[11].params, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("since", "when", "rounds", "local"),
    [("send", [3.25, 5.25], [[0, 1], [2, 3]], -4), ("merge", [3.25, 7.25], [[0, 1], [4, 5]], -6)],
)
def test_halos_between_a_message_and_its_reply(since: Any, when: list[float], rounds: Any, local: float) -> None:
    """One node that moves by -1 at 1, 2, 3, ...; 2 arrivals a message, 1.25 s each way, merge 1/2.

    2: x = -2, sends 2. 3.25: z = -2. 4: x = -4; "send" sends 2 again. 4.5: the reply of 3.25: x = (-4 - 2) / 2 = -3.
    "send": 5: -4, 5.25: z = -4. "merge", from 4.5 on: 5: -4, 6: -5, sends 2; 7: -6, 7.25: z = -4.
    """
    updates, local_thetas = halos_drift(
        [1.0], [[0]], 2, local_updates=2, merge=0.5, since=since, global_network=Network(latency=1.25)
    )
    assert times(updates) == when
    assert values(updates) == [-2, -4]
    assert [[arrival.round for arrival in update.arrivals] for update in updates] == rounds
    # "send": the second message left at 4, before the first reply was merged
    assert [update.staleness for update in updates] == [0, 1 if since == "send" else 0]
    assert local_thetas[0]["theta"].item() == local


def test_halos_sends_what_the_arrival_made_that_filled_the_message() -> None:
    """Three nodes at once, 2 arrivals a message: node 2 is of the next one. Messages: 11 at 1; 101 and 110 at 2."""
    updates, _ = halos_drift([1.0, 1.0, 1.0], [[0, 1, 2]], 3, local_updates=2, merge=0.0)
    assert times(updates) == [1, 2, 2]
    assert values(updates) == [-11, -112, -222]
    assert nodes_of(updates) == [[0, 1], [2, 0], [1, 2]]


def test_halos_messages_of_one_time_are_in_the_order_of_regions() -> None:
    """Region 0 is node 1, region 1 is node 0; 4 bytes at 1/4 s on the global server's link: 1-2 and 2-3."""
    network = Network(4.0, 0.0, 0.0, 0.25)
    updates, _ = halos_drift([1.0, 1.0], [[1], [0]], 2, local_updates=1, global_network=network)
    assert [(update.time, update.region) for update in updates] == [(2, 0), (3, 1)]
    assert values(updates) == [-10, -11]


def test_halos_of_two_regions_by_hand() -> None:
    """Regions {0, 1} and {2}; nodes 0, 1 at 1 s, node 2 at 2 s; 2 arrivals a message, merge 1/4, SGD(1) everywhere.

    1: region 0 at -11, sends 11. Global -11, reply: -11 3/4 - 11/4 = -11: nodes 0, 1 go on from there.
    2: region 0 at -22, sends 11 (global -22, reply: -22); region 1 at -100, its first.
    3: the same: -33. 4: -44, and region 1 at -200 sends 200: first region 0's (-44), then region 1's (-244).
    """
    updates, _ = halos_drift([1.0, 1.0, 2.0], [[0, 1], [2]], 5, local_updates=2, merge=0.25)
    assert times(updates) == [1, 2, 3, 4, 4]
    assert values(updates) == [-11, -22, -33, -44, -244]
    assert [update.region for update in updates] == [0, 0, 0, 0, 1]
    assert [update.staleness for update in updates] == [0, 0, 0, 0, 4]
    assert nodes_of(updates) == [[0, 1]] * 4 + [[2, 2]]
    assert [update.total_steps for update in updates] == [2, 4, 6, 8, 10]


def test_halos_merges_a_part_of_the_global_model_before_its_nodes_begin() -> None:
    """One region; outer SGD(1/2) at the global server. -8 there, -4 here: -8 + (1/4) 4 = -7, where the nodes begin."""
    starts: list[float] = []

    class Seen(Drift):
        def forward(self, batch: Tensor) -> Tensor:
            starts.append(self.theta.item())
            return (self.theta * 8).sum()

    halos(
        Seen(),
        place,
        [[0]],
        num_updates=3,
        num_steps=[1],
        step_seconds=lambda node, step: 1.0,
        inner=SGD1,
        make_local=lambda: OuterOptimizer(SGD1),
        global_server=OuterOptimizer((torch.optim.SGD, {"lr": 0.5})),
        local_updates=1,
        merge=0.25,
    )
    # from -7: to -15, global -8, 3/4 (-15) + 1/4 (-8) = -13.25
    assert starts == [0, -7, -13.25]


def test_halos_replies_carry_what_the_global_server_had_when_it_sent_them() -> None:
    """Region 0 (2 s away) and 1 (1/2 s); 1 s a step, a message an arrival, merge 1.

    Region 1: sends at 1, 10 there at 1.5, z = -10, the reply at 2. By 3 s z is -10 (1.5), -20 (2.5), then -21 by region
    0's first message, whose reply, -21, is there at 5, after z = -31 of 3.5 and more.
    """
    updates, local_thetas = halos_drift(
        [1.0, 1.0], [[0], [1]], 6, local_updates=1, merge=1.0, global_network=Network(latency=[2.0, 0.5])
    )
    assert times(updates) == [1.5, 2.5, 3, 3.5, 4, 4.5]
    assert values(updates) == [-10, -20, -21, -31, -32, -42]
    assert local_thetas[0]["theta"].item() == -4
    updates, local_thetas = halos_drift(
        [1.0, 1.0], [[0], [1]], 8, local_updates=1, merge=1.0, global_network=Network(latency=[2.0, 0.5])
    )
    assert times(updates)[6:] == [5, 5.5]
    assert local_thetas[0]["theta"].item() == -21


def test_halos_weighs_nodes_by_the_versions_of_their_own_server_on_links_of_their_own() -> None:
    """Regions {0, 1}, {2}; 4 bytes, 1 s a message on a server's link: node 0 is heard at 2, 1 at 3, 2 at 2.

    Node 1 meets version 1: weight 1/2. In region 0 node 0's reply is there at 3, node 1's at 4; node 2's at 3. They end
    at 4, 5, 4 and arrive at 5 (staleness 1: node 1 came at 3), 6 (1) and 5 (0).
    """
    updates, _ = halos_drift(
        [1.0, 1.0, 1.0],
        [[0, 1], [2]],
        6,
        local_updates=1,
        merge=0.0,
        network=Network(4.0, 0.0, 0.0, 0.25),
        staleness_function=lambda s: 1 / (1 + s),
    )
    assert [(update.time, *nodes_of([update])[0]) for update in updates] == [
        (2, 0), (2, 2), (3, 1), (5, 0), (5, 2), (6, 1)
    ]  # fmt: skip
    assert staleness(updates) == [0, 0, 1, 1, 0, 1]
    assert values(updates) == [-1, -101, -106, -106.5, -206.5, -211.5]


def test_halos_steps_round_up() -> None:
    assert halos_steps(8, [1.0, 3.0, 0.5, 100.0]) == [4, 2, 8, 1]
    assert halos_steps(33, [0.3, 0.9]) == [33, 11]
    assert halos_steps(3, [0.1, 0.3]) == [3, 1]  # 3 * 0.1 / 0.3 is 1.0000000000000002


# ----------------------------------------------------------------------------------------------------- Decoupled DiLoCo


def decoupled_drift(seconds: Sequence[float], num_updates: int, **options: Any) -> Any:
    settings: dict[str, Any] = {"inner": SGD1, "outer": SGD1, "merging": "mean", "tau": 0, "fragments": [["theta"]]}
    settings.update(options)
    return decoupled(
        Drift(),
        place,
        len(seconds),
        num_updates=num_updates,
        step_seconds=lambda node, step: seconds[node],
        **settings,
    )


def mlp_names() -> list[str]:
    return list(common.parameters(make_model("MLP")))


def test_decoupled_with_one_fragment_and_all_learners_is_diloco() -> None:
    model = make_model("MLP", dtype=torch.float64)
    options: dict[str, Any] = {"max_norm": 0.5, "schedule": lambda step: 1 / (1 + step)}
    updates = decoupled(
        model,
        mlp_batch,
        3,
        num_updates=4,
        fragments=[mlp_names()],
        quorum=3,
        H=3,
        tau=0,
        merging="mean",
        inner=ADAMW,
        step_seconds=lambda node, step: 1.0,
        **options,
    )
    expected = diloco(model, mlp_rows(12, 3), 3, H=3, inner=ADAMW, **options)
    assert_close(updates[-1].params, expected.outer)
    assert times(updates) == [3, 6, 9, 12]
    assert [update.total_steps for update in updates] == [9, 18, 27, 36]
    assert {arrival.num_steps for update in updates for arrival in update.arrivals} == {3}


def streaming(rounds: int, fragments: list[list[str]], H: int, tau: int, alpha: float) -> Params:
    """Streaming DiLoCo as a plain loop: fragment p is sent after its step and its mean is merged tau steps later."""
    model = make_model("MLP", dtype=torch.float64)
    models = common.copy_model(model, 2)
    optimizers = common.make_optimizers(models, ADAMW)
    outer = {name: param.detach().clone() for name, param in common.parameters(model).items()}
    outer_optimizers = [common.make_optimizer([outer[name] for name in names], NESTEROV) for names in fragments]
    due: dict[int, list[int]] = {}
    for step in range(1, rounds * H + 1):
        for node in range(2):
            common.backward(models[node], mlp_batch(node, step - 1))
            optimizers[node].step()
        for p, names in enumerate(fragments):
            if step % H == (p + 1) * H // len(fragments) % H:
                for name in names:
                    sent = [outer[name] - common.parameters(m)[name].detach() for m in models]
                    outer[name].grad = (sent[0] + sent[1]) / 2
                outer_optimizers[p].step()
                due.setdefault(step + tau, []).append(p)
        for p in due.pop(step, []):
            with torch.no_grad():
                for name in fragments[p]:
                    for m in models:
                        theta = common.parameters(m)[name]
                        theta.copy_(alpha * theta + (1 - alpha) * outer[name])
    return outer


@pytest.mark.parametrize(("tau", "alpha"), [(0, 0.0), (1, 0.5), (2, 0.0), (3, 0.25)])
def test_decoupled_at_equal_speeds_is_streaming_diloco(tau: int, alpha: float) -> None:
    """Its fragments are at the server at once, and merged tau steps later, as if they had taken so long."""
    names = mlp_names()
    fragments = [names[:1], names[1:]]
    updates = decoupled(
        make_model("MLP", dtype=torch.float64),
        mlp_batch,
        2,
        num_updates=6,
        fragments=fragments,
        quorum=2,
        H=4,
        tau=tau,
        alpha=alpha,
        merging="mean",
        inner=ADAMW,
        outer=NESTEROV,
        step_seconds=lambda node, step: 1.0,
    )
    assert [(update.time, update.fragment) for update in updates] == [(2, 0), (4, 1), (6, 0), (8, 1), (10, 0), (12, 1)]
    assert_close(updates[-1].params, streaming(3, fragments, 4, tau, alpha))


def test_decoupled_goes_on_with_a_quorum_and_drops_who_is_late() -> None:
    """H = 2, speeds 1, 1, 3: 0 and 1 close at 2, 4, 6. Node 2 begins its steps from -11 and -33, and is always late."""
    updates = decoupled_drift([1.0, 1.0, 3.0], 4, quorum=2, H=2)
    assert times(updates) == [2, 4, 6, 8]
    assert nodes_of(updates) == [[0, 1]] * 4
    assert values(updates) == [-11, -22, -33, -44]
    assert [update.total_steps for update in updates] == [4, 9, 14, 18]


def test_decoupled_takes_all_of_one_time_in_the_order_of_learners() -> None:
    equal = decoupled_drift([1.0, 1.0, 1.0], 1, quorum=2, H=1)
    assert (nodes_of(equal), values(equal)) == ([[0, 1, 2]], [-37])
    assert nodes_of(decoupled_drift([1.25, 1.0], 1, quorum=2, H=1)) == [[0, 1]]


def test_decoupled_messages_and_replies_under_way_keep_their_order() -> None:
    """H = 1, a quorum of 2 of 3. Nodes 0 and 1 take 1 s, 1 s, 10 s; node 2 takes 1 s and is 1.5 s away.

    Closings at 1 and 2 are at node 2 at 2.5 and 3.5. It merges version 1 at 3, sends at 4 (there at 5.5: too late),
    merges version 2 at 4, sends at 5: there at 6.5, in time for the closing at 12.
    """
    updates = decoupled(
        Drift(),
        place,
        3,
        num_updates=3,
        fragments=[["theta"]],
        quorum=2,
        H=1,
        tau=0,
        merging="mean",
        inner=SGD1,
        outer=SGD1,
        step_seconds=lambda node, step: 10.0 if node < 2 and step == 2 else 1.0,
        network=Network(latency=[0.0, 0.0, 1.5]),
    )
    # node 2 is the first at the third closing's version; node 0 makes the quorum at 12, where node 1 is too
    assert times(updates) == [1, 2, 12]
    assert nodes_of(updates) == [[0, 1], [0, 1], [0, 1, 2]]
    assert [arrival.time for arrival in updates[2].arrivals] == [12, 12, 6.5]
    assert values(updates) == [-5.5, -11, -48]


def test_decoupled_waits_for_its_quorum() -> None:
    updates = decoupled_drift([1.0, 1.0, 3.0], 2, quorum=3, H=2)
    # 0 and 1 have sent at 2 and take 4 steps more that tau = 0, alpha = 0 discard
    assert times(updates) == [6, 12]
    assert values(updates) == [-74, -148]
    assert [update.total_steps for update in updates] == [14, 28]


def test_decoupled_grace_is_what_is_left_of_tau_steps() -> None:
    """Speeds 1, 1.25, 10; H = 1, tau 2, a quorum of 2: by 1.25, wait 1/4. Closes at 1.25 + 2 - 1/4 - 1/2 = 2.5: -5.5.

    Node 0 merges at 3 (2 steps after its message), sends at 4; node 1 merges at 3.75, sends at 5: wait 1, closes at
    5 + 2 - 1 - 1/2 = 5.5: -11.
    """
    updates = decoupled_drift([1.0, 1.25, 10.0], 2, quorum=2, H=1, tau=2, gamma=1.0, step=1.0, sync=0.5)
    assert times(updates) == [2.5, 5.5]
    assert values(updates) == [-5.5, -11]
    assert [arrival.time for update in updates for arrival in update.arrivals] == [1, 1.25, 4, 5]
    # with gamma = 1/2 the first closes at 1.25 + 1.25 / 2; with a third of 2 s it takes all three
    assert times(decoupled_drift([1.0, 1.25, 10.0], 1, quorum=2, H=1, tau=2, gamma=0.5, step=1.0, sync=0.5)) == [1.875]
    assert times(decoupled_drift([1.0, 1.25, 10.0], 1, quorum=2, H=1, tau=2, gamma=1.0, step=1.0, sync=9.0)) == [1.25]
    three = decoupled_drift([1.0, 1.25, 2.0], 1, quorum=2, H=1, tau=2, gamma=1.0, step=1.0, sync=0.5)
    assert (times(three), values(three)) == ([2], [-37])


def test_decoupled_weights_are_tokens_squared_per_step() -> None:
    """Speeds 1, 2; H = 2. At 4 node 1 has done 2 steps of 3 tokens: 36 / 2; node 0 sent at 2: 4 / 2."""
    updates = decoupled_drift([1.0, 2.0], 1, quorum=2, H=2, tokens_per_step=[1.0, 3.0])
    assert [arrival.weight for arrival in updates[0].arrivals] == [2, 18]
    assert values(updates) == [-(2 * 2 + 18 * 20) / 20]


def test_decoupled_fragments_have_their_share_of_the_bytes() -> None:
    """Fragments of 3 and 1 numbers, 8 bytes, 1 s per byte on the server's link: 6 s and 2 s. H = 2, one learner.

    Fragment 0 after step 1: sent 1-7, update at 7, back 7-13. Fragment 1 after step 2: ready 2, sent 7-9, update at 9,
    back 13-15. Fragment 0, merged at 13, is due after step 15, 2 steps: 15-21. Fragment 1, merged at 15, after step
    16, 1 step: ready 16, 21-23.
    """

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(3, dtype=torch.float64))
            self.b = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, batch: Tensor) -> Tensor:
            return self.a.sum() + self.b.sum()

    updates = decoupled(
        Two(),
        place,
        1,
        num_updates=4,
        fragments=[["a"], ["b"]],
        quorum=1,
        H=2,
        tau=0,
        inner=SGD1,
        outer=SGD1,
        step_seconds=lambda node, step: 1.0,
        network=Network(8.0, 0.0, 0.0, 1.0),
    )
    assert [(update.time, update.fragment) for update in updates] == [(7, 0), (9, 1), (21, 0), (23, 1)]
    assert [update.params["a"].tolist() for update in updates] == [[-1.0] * 3, [-1.0] * 3, [-3.0] * 3, [-3.0] * 3]
    assert [update.params["b"].item() for update in updates] == [0, -2, -2, -3]


def test_radial_merging_averages_lengths_and_directions_apart() -> None:
    """Lengths 1 and 3 at right angles, weights 1, 1: length 2 at 45 degrees. The mean has length 1.58."""
    vectors = [vector(1.0, 0.0), vector(0.0, 3.0)]
    torch.testing.assert_close(merged(vectors, [1.0, 1.0], "radial"), vector(2**0.5, 2**0.5))
    torch.testing.assert_close(merged(vectors, [1.0, 1.0], "mean"), vector(0.5, 1.5))
    # weights 3, 1: length 1.5, direction (3, 1) / sqrt(10)
    torch.testing.assert_close(merged(vectors, [3.0, 1.0], "radial"), vector(4.5, 1.5) / 10**0.5)
    same = [vector(1.0, 2.0)] * 3
    torch.testing.assert_close(merged(same, [1.0, 2.0, 3.0], "radial"), same[0])
    opposite = [vector(1.0, 0.0), vector(-1.0, 0.0)]
    assert merged(opposite, [1.0, 1.0], "radial").tolist() == [0, 0]


def test_decoupled_merges_plain_names_by_the_mean() -> None:
    """Both learners' tensors move in opposite directions by 1 and 3: the mean is -1, radial is 0."""
    options: dict[str, Any] = {"quorum": 2, "H": 1, "merging": "radial"}

    def run(**more: Any) -> float:
        updates = decoupled(
            Drift(),
            lambda node, step: torch.tensor([[1.0], [-3.0]][node], dtype=torch.float64),
            2,
            num_updates=1,
            fragments=[["theta"]],
            inner=SGD1,
            outer=SGD1,
            step_seconds=lambda node, step: 1.0,
            **options,
            **more,
        )
        return updates[0].params["theta"].item()

    assert run() == 0
    assert run(plain=["theta"]) == 1
