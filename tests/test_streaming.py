"""Streaming DiLoCo and eager updates: identities, phases of other programs, the clock, what they keep and refuse.

Their naive twins are in `tests/test_twins.py`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.helpers import Run, assert_close, assert_same_bits, begun, difference, flat, run, stacked
from tests.models import make_batches, make_model
from tests.reference.streaming import by_module, e3m0, streaming
from vecgym import Trainer, dry_run
from vecgym.clock import Compute, Network, price
from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import Ledger
from vecgym.compress import E3M0, ChunkedTopK, Quantise, TopK
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.simulation.stack import groups_of
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import (
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    Eager,
    EagerDiLoCoStrategy,
    Exchange,
    Mean,
    Outer,
    Strategy,
    StreamingDiLoCoStrategy,
)
from vecgym.strategy.exchange import cut

K, F64 = 4, torch.float64
NESTEROV = OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True)
FIXTURES = "VECGYM_TORCHFT_FIXTURES"  # a folder with torchft's, which are not ours to keep


@functools.cache
def setup(model: str = "GPT", num_nodes: int = K, steps: int = 14) -> tuple[nn.Module, list[Any]]:
    return make_model(model, dtype=F64), stacked(make_batches(model, steps, num_nodes, 2, dtype=F64))


def go(strategy: Strategy, model: str = "GPT", num_nodes: int = K, steps: int = 14, **settings: Any) -> Run:
    start, batches = setup(model, num_nodes, steps)
    return run(start, strategy, batches, **settings)


# -------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
@pytest.mark.parametrize("differentiable", [False, True])
def test_one_fragment_without_delay_and_alpha_is_diloco_bit_for_bit(differentiable: bool, inner: str) -> None:
    diloco = go(DiLoCoStrategy(inner, NESTEROV, H=3, lr=0.01), differentiable=differentiable)
    ours = go(
        StreamingDiLoCoStrategy(inner, NESTEROV, H=3, num_fragments=1, delay=0, alpha=0.0, lr=0.01),
        differentiable=differentiable,
    )
    assert_same_bits(ours.params, diloco.params)
    assert torch.equal(ours.losses, diloco.losses)
    assert_same_bits(ours.state.shared, diloco.state.shared)
    assert list(ours.comm.ledger) == list(diloco.comm.ledger)


@pytest.mark.parametrize("alpha", [1.0, torch.tensor(1.0), torch.ones(K)], ids=["number", "tensor", "of each node"])
@pytest.mark.parametrize("delay", [0, 2, [0, 1, 2, 2]], ids=str)
def test_alpha_1_is_no_influence_bit_for_bit(delay: Any, alpha: Any) -> None:
    alone = go(Strategy("adamw", lr=0.01))
    ours = go(StreamingDiLoCoStrategy("adamw", H=3, num_fragments=2, delay=delay, alpha=alpha, lr=0.01))
    assert_same_bits(ours.params, alone.params)
    assert ours.comm.ledger.total_bytes > 0
    outer = [ours.state.shared[f"0.{part}/params"] for part in range(2)]
    assert difference(outer[0], {name: p[None] for name, p in setup()[0].named_parameters() if name in outer[0]}) > 1e-4


@pytest.mark.parametrize("delay", [0, 2])
def test_a_number_for_each_node_is_the_number(delay: int) -> None:
    one = go(StreamingDiLoCoStrategy("sgd", H=4, num_fragments=2, delay=delay, alpha=0.25, lr=0.1))
    each = StreamingDiLoCoStrategy("sgd", H=4, num_fragments=2, delay=[delay] * K, alpha=torch.full((K,), 0.25), lr=0.1)
    assert_same_bits(go(each).params, one.params)


def test_a_node_with_a_longer_delay_follows_later() -> None:
    """Before it does it is where it would be by itself, and from then on it knows what the others know."""
    H, late = 5, [1, 1, 1, 3]
    alone = [go(Strategy("sgd", lr=0.1), steps=t).params for t in (7, 8)]
    make = functools.partial(StreamingDiLoCoStrategy, "sgd", H=H, num_fragments=1, alpha=0.0, lr=0.1)
    runs = [go(make(delay=late), steps=t) for t in (7, 8)]
    for name in alone[0]:
        assert torch.equal(runs[0].params[name][3], alone[0][name][3])
        assert not torch.equal(runs[0].params[name][0], alone[0][name][0])
        assert torch.equal(runs[1].params[name][3], runs[1].state.shared["0.0/params"][name][0])
    same = go(make(delay=1), steps=8).state.shared
    assert_same_bits(runs[1].state.shared["0.0/params"], same["0.0/params"])


def test_eager_with_one_node_is_diloco_bit_for_bit() -> None:
    diloco = go(DiLoCoStrategy("adamw", H=3, lr=0.01), num_nodes=1)
    ours = go(EagerDiLoCoStrategy("adamw", H=3, lr=0.01), num_nodes=1)
    assert_same_bits(ours.params, diloco.params)
    assert torch.equal(ours.losses, diloco.losses)


def test_the_mean_of_eager_steps_is_a_mixture_of_two_rounds() -> None:
    """mean_i Delta~_i(t) = Delta(t) / K + (1 - 1 / K) Delta(t - 1)."""
    eager = Eager(Mean(), OptimSpec(SGD, lr=1.0))
    generator = torch.Generator().manual_seed(0)
    outer = {"w": torch.zeros(K, 5, dtype=F64)}
    memory, before = begun(eager, outer, K), torch.zeros(5, dtype=F64)
    for step in range(4):
        params = {"w": torch.randn(K, 5, dtype=F64, generator=generator)}
        now = (outer["w"] - params["w"]).mean(0)
        new = eager(params, Part.alone(StackedCollectives(K), number=step, step=step), memory)
        moved = (outer["w"] - new["w"]).mean(0)
        torch.testing.assert_close(moved, now / K + (1 - 1 / K) * before, rtol=1e-12, atol=1e-12)
        outer, before = new, now


# --------------------------------------------------------------------------------------------- fragments


NAMES = ["wte", "wpe", *(f"h.{i}.{part}" for i in range(7) for part in ("attn.w", "mlp.0.w")), "norm.w", "head.w"]
OUTSIDE = ("wte", "wpe", "norm.w", "head.w")


def layers(*numbers: int) -> tuple[str, ...]:
    return tuple(f"h.{i}.{part}" for i in numbers for part in ("attn.w", "mlp.0.w"))


LAST = ["h.2.mlp", "h.3", "h.4", "h.5", "h.6"]
CUTS: dict[str, tuple[dict[str, Any], list[tuple[str, ...]]]] = {
    "strided": ({"fragments": 4}, [OUTSIDE, layers(0, 3, 6), layers(1, 4), layers(2, 5)]),
    "sequential": (
        {"fragments": 4, "pattern": "sequential"}, [OUTSIDE, layers(0, 1, 2), layers(3, 4), layers(5, 6)]
    ),
    "by threes": ({}, [OUTSIDE, layers(0, 3, 6), layers(1, 4), layers(2, 5)]),
    "one": ({"fragments": 1}, [tuple(NAMES)]),
    "two": ({"fragments": 2}, [OUTSIDE, layers(*range(7))]),
    "more than blocks": ({"fragments": 20}, [OUTSIDE, *(layers(i) for i in range(7))]),
    "lists": (
        {"fragments": [["h.0", "wte", "wpe"], ["h.1", "h.2.attn"], [*LAST, "norm", "head"]]},
        [("wte", "wpe", *layers(0)), (*layers(1), layers(2)[0]), (layers(2)[1], *layers(3, 4, 5, 6), *OUTSIDE[2:])],
    ),
    "a function": ({"fragments": lambda name: int(name.startswith("h."))}, [OUTSIDE, layers(*range(7))]),
}  # fmt: skip


@pytest.mark.parametrize("case", CUTS)
def test_fragments(case: str) -> None:
    given, expected = CUTS[case]
    assert list(cut(NAMES, **given)) == expected


@pytest.mark.parametrize("case", CUTS)
def test_each_parameter_is_in_one_fragment(case: str) -> None:
    found = [name for names in cut(NAMES, **CUTS[case][0]) for name in names]
    assert sorted(found) == sorted(NAMES)


def test_lists_of_names_in_a_fit() -> None:
    """Settings are checked before the model is known, whose names these are."""
    model, data = make_model("MLP"), torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(10, (64,)))
    last = [name.rpartition(".")[0] for name, _ in model.named_parameters()][-1]
    first = [name for name, _ in model.named_parameters() if not name.startswith(f"{last}.")]
    found = []
    for fragments in ([first, [last]], lambda name: int(name.startswith(f"{last}."))):
        trainer, strategy = Trainer(model, data), StreamingDiLoCoStrategy("sgd", H=4, fragments=fragments, lr=0.1)
        trainer.fit(strategy, 2, max_steps=9, batch_size=4, progress=False, device="cpu")
        found.append(trainer.nodes.params)
    assert_same_bits(found[0], found[1])


def test_blocks_of_a_model_with_two_stacks() -> None:
    names = [f"{stack}.layers.{i}.w" for stack in ("encoder", "decoder") for i in range(2)]
    assert cut(names, 2) == ((names[0], names[2]), (names[1], names[3]))


def test_a_transformer_is_cut_by_its_blocks_and_equals_its_twin() -> None:
    """Embedding, positions and last norm; the two blocks."""
    H, steps = 5, 30
    start = make_model("GPT", dtype=F64)
    batches = make_batches("GPT", steps, K, 2, dtype=F64)
    names = [name for name, _ in start.named_parameters()]
    expected = [
        [name for name in names if not name.startswith("blocks.")],
        [name for name in names if name.startswith("blocks.0.")],
        [name for name in names if name.startswith("blocks.1.")],
    ]
    theirs = streaming(
        start, batches, K, H=H, fragments=lambda _: expected, offsets=[4, 1, 2], delays=[2] * K, alphas=[0.3] * K,
        inner=(SGD, {"lr": 0.1}),
    )  # fmt: skip
    strategy = StreamingDiLoCoStrategy("sgd", H=H, num_fragments=3, offsets=[4, 1, 2], delay=2, alpha=0.3, lr=0.1)
    ours = run(start, strategy, stacked(batches))
    for i, model in enumerate(theirs.models):
        for name, p in model.named_parameters():
            torch.testing.assert_close(ours.params[name][i], p.detach(), rtol=1e-10, atol=1e-10)
    assert_close(ours.losses, theirs.losses, 1e-10, "losses")


# ------------------------------------------------------------------------------- phases of other programs


def sent(strategy: Strategy, steps: int = 24) -> list[tuple[int, Any, str]]:
    """(step counted from 1, lag, the fragment's first tensor) of each transfer."""
    ledger = go(strategy, "GPT", 2, steps).comm.ledger
    return [(entry.step + 1, entry.transfer.lag, (entry.transfer.tensors or ("",))[0]) for entry in ledger]


FIRST = ["tokens.weight", "blocks.0.norm1.weight", "blocks.1.norm1.weight"]


def test_transfers_carry_their_lag_and_their_parameters() -> None:
    found = sent(StreamingDiLoCoStrategy("sgd", H=9, num_fragments=3, delay=2, lr=0.1))
    assert found == [(t, 2, FIRST[(t // 3 - 1) % 3]) for t in range(3, 25, 3)]
    coded = sent(StreamingDiLoCoStrategy("sgd", H=9, num_fragments=3, delay=2, bits=4, lr=0.1))
    assert [(step, lag, name.rpartition("/")[0]) for step, lag, name in coded] == found


def test_the_phase_of_torchft() -> None:
    """It sends at local step sync_every - delay of each interval, and applies at sync_every."""
    H, F, tau = 9, 3, 2
    offsets = [(p + 1) * H // F - tau for p in range(F)]
    found = sent(StreamingDiLoCoStrategy("sgd", H=H, num_fragments=F, delay=tau, offsets=offsets, lr=0.1))
    assert found == [(t - tau, tau, FIRST[(t // 3 - 1) % F]) for t in range(3, 27, 3) if t - tau <= 24]


def test_the_phase_of_maxtext() -> None:
    """It sends fragment (t mod F s) / s at the steps t divisible by s = H / F, and applies tau steps later."""
    H, F, tau = 9, 3, 2
    s = H // F
    offsets = [F * s, *(p * s for p in range(1, F))]
    found = sent(StreamingDiLoCoStrategy("sgd", H=H, num_fragments=F, delay=tau, offsets=offsets, lr=0.1))
    assert found == [(t, tau, FIRST[t % (F * s) // s]) for t in range(1, 25) if t % s == 0]


class Layers(nn.Module):
    """Numbers whose gradient is always 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        for p in self.parameters():
            nn.init.ones_(p)

    def forward(self, batch: Tensor) -> Tensor:
        return 2 * sum((p.sum() for p in self.parameters()), 0 * batch.sum())


# (delay, alpha) of test_diloco_mocked_updates_0 to _5: two replicas, two fragments, sync_every 6, rates 1 and 2.
TORCHFT = [(0, 0.0), (0, 0.5), (0, 1.0), (1, 0.0), (1, 0.5), (1, 1.0)]


def mocked(delay: int, alpha: float, steps: int) -> list[dict[str, Tensor]]:
    """The parameters before each step and after the last."""
    strategy = StreamingDiLoCoStrategy(
        "sgd", OptimSpec(SGD, lr=2.0), H=6, num_fragments=2, offsets=[3 - delay, 6 - delay], delay=delay, alpha=alpha,
        lr=1.0,
    )  # fmt: skip
    batches = [torch.zeros(2, 1)] * steps
    return [run(Layers(), strategy, batches[:t], max_steps=steps).params if t else initial() for t in range(steps + 1)]


def initial() -> dict[str, Tensor]:
    return {name: p.detach().expand(2, *p.shape) for name, p in Layers().named_parameters()}


@pytest.mark.skipif(FIXTURES not in os.environ, reason=f"{FIXTURES}: the folder test_fixtures of meta-pytorch/torchft")
@pytest.mark.parametrize("number", range(6))
def test_the_fixtures_of_torchft(number: int) -> None:
    found = list(Path(os.environ[FIXTURES]).glob(f"*.test_diloco_mocked_updates_{number}.json"))
    assert len(found) == 1, "give the folder test_fixtures of meta-pytorch/torchft"
    replicas = json.loads(found[0].read_text())
    assert len(replicas) == 2
    for replica, [held] in enumerate(replicas):
        history = held["history"]
        ours = mocked(*TORCHFT[number], steps=len(history) - 1)
        assert len(history) > 15
        for step, params in history.items():
            assert params.keys() == ours[0].keys()
            for name, value in params.items():
                own = ours[int(step)][name][replica]
                torch.testing.assert_close(own, torch.tensor(value), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("delay", "alpha"), TORCHFT)
def test_the_rule_of_torchfts_test(delay: int, alpha: float) -> None:
    """The rule by which torchft's own test checks its numbers, on ours: they need no fixtures."""
    history = mocked(delay, alpha, 21)
    outer = {0: torch.tensor(1.0), 1: torch.tensor(1.0)}
    for t in range(1, 22):
        for p in (0, 1):
            before, now = (float(history[i][f"layers.{p}.weight"][0]) for i in (t - 1, t))
            expected = before - 2
            if t % 6 == 3 * (p + 1) % 6:
                launched = float(history[t - delay - 1][f"layers.{p}.weight"][0]) - 2
                outer[p] = outer[p] - 2 * (outer[p] - launched)
                expected = alpha * expected + (1 - alpha) * float(outer[p])
            assert now == pytest.approx(expected, rel=1e-6)


# -------------------------------------------------------------------------------------------- the clock


def seconds(strategy: Strategy, steps: int = 24) -> float:
    """The seconds of a run where an exchange of the whole model takes about 4 steps."""
    ledger = go(strategy, "GPT", 2, steps).comm.ledger
    size = sum(p.numel() * p.element_size() for p in setup("GPT")[0].parameters())
    return float(price(ledger, Network(8 * size / 4.0), Compute(1.0)).seconds)


def test_the_clock_overlaps_what_is_late() -> None:
    """One after the other, an exchange every 6 steps adds 4 seconds to 6; a delay of 5 hides all but the last."""
    ledger_of_diloco = seconds(DiLoCoStrategy("sgd", H=6, lr=0.1))
    make = functools.partial(StreamingDiLoCoStrategy, "sgd", H=6, lr=0.1)
    at_once, late = seconds(make(num_fragments=3, delay=0)), seconds(make(num_fragments=3, delay=2))
    assert late < at_once
    assert late < 24 + 2 < ledger_of_diloco
    assert seconds(make(num_fragments=1, delay=5)) < 24 + 4.5
    eager = seconds(EagerDiLoCoStrategy("sgd", H=6, lr=0.1))
    assert eager < 24 + 4.5


def test_the_clock_knows_each_nodes_delay() -> None:
    """Of one exchange, that takes some three steps: a node's times are those that it has where all have its delay."""
    size = sum(p.numel() * p.element_size() for p in setup("GPT")[0].parameters())

    def ends(delay: Any) -> Tensor:
        strategy = StreamingDiLoCoStrategy("sgd", H=7, num_fragments=1, delay=delay, lr=0.1)
        ledger = go(strategy, "GPT", 3, 12).comm.ledger
        again = Ledger()
        again.load(ledger.state())
        assert list(again) == list(ledger)
        timeline = price(again, Network(8 * size / 2.5), Compute([1.0, 1.1, 1.2]))
        return torch.stack([record.end for record in timeline.records()])

    delays = [0, 3, 1]
    found, alike = ends(delays), torch.stack([ends(delay)[:, i] for i, delay in enumerate(delays)], 1)
    torch.testing.assert_close(found, alike)
    assert not torch.equal(found, ends(0))
    for delays in ([0, 3, 1], [2, 3, 1]):
        late = go(StreamingDiLoCoStrategy("sgd", H=7, num_fragments=1, delay=delays, lr=0.1), num_nodes=3).comm.ledger
        assert {entry.transfer.lag for entry in late} == {tuple(delays)}


def test_the_result_of_an_eager_exchange_is_used_a_round_later() -> None:
    lags = [(e.step + 1, e.transfer.lag) for e in go(EagerDiLoCoStrategy("sgd", H=4, lr=0.1)).comm.ledger]
    assert lags == [(4, 4), (8, 4), (12, 4)]


# ------------------------------------------------------------------------------------------ what is kept


def kept(strategy: Strategy, steps: int) -> tuple[int, int]:
    """(values kept once, values kept for each node) by the exchanges."""
    state = go(strategy, "GPT", K, steps).state
    own, shared = ([x for name, x in flat(kept).items() if "/" in name] for kept in (state.own, state.shared))
    return sum(x.numel() for x in shared), sum(x[0].numel() for x in own)


@pytest.mark.filterwarnings("ignore:.*never exchanges anything")  # in 3 steps
def test_bytes_kept_are_those_of_the_docstrings_table() -> None:
    P = sum(p.numel() for p in setup()[0].parameters())
    first = sum(p.numel() for name, p in setup()[0].named_parameters() if not name.startswith("blocks."))
    # Fragments are sent after 4 and 8 steps, then every 8, and arrive 3 steps later.
    under_way = {3: 0, 6: first, 7: 0, 10: P - first, 11: 0, 13: first}
    for bits in (None, 4):
        make = functools.partial(StreamingDiLoCoStrategy, "sgd", H=8, num_fragments=2, delay=3, bits=bits, lr=0.1)
        for steps, on_the_way in under_way.items():
            assert kept(make(), steps) == (2 * P + on_the_way, 0), steps
    assert kept(EagerDiLoCoStrategy("sgd", H=4, lr=0.1), 13) == (0, 3 * P)


# --------------------------------------------------------------------------------------------- the codes


def test_e3m0_takes_the_nearest_level_and_of_two_the_smaller() -> None:
    x = torch.tensor([[64.0, 48.0, 48.1, -24.0, -1.5, 1.6, 0.5, -0.51, 0.0]], dtype=F64)
    code = E3M0().encode(x)
    expected = torch.tensor([[64.0, 32.0, 64.0, -16.0, -1.0, 2.0, 0.0, -1.0, 0.0]], dtype=F64)
    assert torch.equal(E3M0().decode(code, x), expected)
    assert code["values"].shape == (1, 5)  # ceil(9 / 2) bytes
    assert code["values"].dtype == torch.uint8


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,)])
def test_e3m0_is_the_twins_within_its_bound_and_has_its_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(K, *shape, dtype=F64, generator=torch.Generator().manual_seed(1)).pow(3).to(dtype)
    code = E3M0().encode(x)
    found, n = E3M0().decode(code, x), x[0].numel()
    assert (found.shape, found.dtype) == (x.shape, dtype)
    assert sum(part[0].numel() * part.element_size() for part in code.values()) == -(-n // 2) + 4
    for row, given in zip(found, x):
        if n and dtype == F64:
            assert torch.equal(row, e3m0(given))
        if n and dtype != torch.bfloat16:
            bound = torch.maximum(given.abs() / 3, given.abs().max() / 128) * (1 + 1e-5)
            assert bool(((row - given).abs() <= bound).all())


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_e3m0_of_zeros_and_of_nan(value: float) -> None:
    x = torch.full((2, 3), value)
    assert torch.equal(E3M0().decode(E3M0().encode(x), x).nan_to_num(7.0), x.nan_to_num(7.0))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("codec", [E3M0(), Quantise(8), TopK(1.0), ChunkedTopK()], ids=repr)
def test_codes_are_summed_in_float32(codec: Any, rows: int) -> None:
    """In bfloat16 the sum of a 64 and many a 0.25 would be 64."""
    x = torch.zeros(8, 2, dtype=torch.bfloat16)
    x[:, 0] = 0.25
    x[0] = 64.0
    codes = {part: y[None].expand(rows, *y.shape) for part, y in codec.encode(x).items()}
    weights = None if rows == 1 else torch.ones(rows, 8)
    mean = codec.average(codes, x, weights)
    factor = 1 if rows > 1 else 8
    exact = torch.stack([codec.decode(codec.encode(row[None]), row[None].float())[0] for row in x]).sum(0) / factor
    assert mean.dtype == torch.bfloat16
    assert torch.equal(mean[0], exact.to(torch.bfloat16))
    assert float(exact[0]) != 64 / factor


@pytest.mark.parametrize("bits", [4, "e3m0", 8])
def test_movements_are_sent_in_bits(bits: Any) -> None:
    start, _ = setup()
    ours = go(StreamingDiLoCoStrategy("sgd", H=5, num_fragments=1, delay=1, bits=bits, lr=0.1))
    size = sum((-(-p.numel() // 2) if bits != 8 else p.numel()) + 4 for p in start.parameters())
    assert [entry.payload_bytes for entry in ours.comm.ledger] == [size] * 2
    assert {entry.operation for entry in ours.comm.ledger} == {"all_gather"}


# ---------------------------------------------------------------------------------------------- sweeps


def test_configurations_that_differ_in_the_outer_optimizer_are_one() -> None:
    def together(*strategies: Strategy) -> bool:
        return len(groups_of(strategies, [RunFacts(2, 20)] * len(strategies))[1]) == 1

    def made(average: Any = None, outer: Any = None, **given: Any) -> Strategy:
        how = Outer(average or Mean(), outer or OptimSpec(SGD, lr=0.1, momentum=0.9))
        settings: dict[str, Any] = {"every": 4, "fragments": [["a"], ["b"]], "delay": [0, 1], "keep": 0.5, **given}
        return CommunicateOptimizeStrategy([Exchange(how, **settings)], "sgd", lr=0.1)

    assert together(made(), made(outer=OptimSpec(SGD, lr=0.5, momentum=0.1)), made(keep=0.25))
    others: dict[str, Any] = {
        "every": 5, "fragments": [["b"], ["a"]], "delay": [1, 0], "pattern": "sequential", "offsets": [1, 2],
        "average": Mean(2), "outer": OptimSpec("adam"),
    }  # fmt: skip
    for name, value in others.items():
        assert not together(made(), made(**{name: value})), name
    eager = functools.partial(EagerDiLoCoStrategy, "sgd", lr=0.1)
    assert together(eager(outer_lr=0.1), eager(outer_lr=0.5))
    assert not together(eager(H=3), eager(H=4))


# --------------------------------------------------------------------------------------------- refusals


def two(**given: Any) -> Callable[[], Any]:
    return lambda: StreamingDiLoCoStrategy("sgd", **{"H": 4, "lr": 0.1, **given})


def fitted(**given: Any) -> Callable[[], Any]:
    return lambda: go(two(**given)())


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "both": (two(num_fragments=2, fragments=[["blocks"]]), ValueError, "both say how the model is cut"),
    "num_fragments": (two(num_fragments=0), ValueError, "num_fragments=0"),
    "fragments": (two(fragments="blocks"), TypeError, "fragments='blocks' must be a number, lists"),
    "an empty list": (two(fragments=[["blocks"], []]), TypeError, "must be a number, lists"),
    "pattern": (two(pattern="stride"), ValueError, "did you mean 'strided'"),
    "delay": (two(delay=4), ValueError, "delay=4 must be smaller than H=4"),
    "a delay of a node": (two(delay=[0, -1]), ValueError, "delay=-1"),
    "no delay": (two(delay=[]), ValueError, r"delay=\[\]"),
    "alpha": (two(alpha=1.5), ValueError, r"alpha=1.5 must be a number in \[0, 1\]"),
    "bits": (two(bits=2), ValueError, "bits=2 must be 4"),
    "bits that are none": (two(bits=True), ValueError, "bits=True must be 4"),
    "offsets": (two(num_fragments=2, offsets=[1]), ValueError, "one number for each of the 2 fragments"),
    "an offset": (two(num_fragments=2, offsets=[0, 1]), ValueError, "offsets=0"),
    "two rates": (two(inner_lr=0.1), ValueError, "two names"),
    "two rates, eager": (lambda: EagerDiLoCoStrategy("sgd", lr=0.1, inner_lr=0.1), ValueError, "two names"),
    "H": (lambda: EagerDiLoCoStrategy("sgd", H=0, lr=0.1), ValueError, "H=0"),
    "unknown": (lambda: EagerDiLoCoStrategy("sgd", alpha=0.5), TypeError, "alpha"),  # type: ignore[call-arg]
    "other nodes": (lambda: two(delay=[0, 1])().check(4, 10), ValueError, r"delay is for 2 nodes .* has 4"),
    "alpha of other nodes": (lambda: two(alpha=torch.ones(3))().check(4, 10), ValueError, r"alpha has shape \[3\]"),
    "too few steps": (lambda: two(delay=3)().check(4, 3), ValueError, "no result is used"),
    "offsets of another model": (fitted(offsets=[1, 2, 3]), ValueError, "3, and the model is cut into 2 fragments"),
    "names that are not there": (fitted(fragments=[["blocks"], ["wte"]]), ValueError, "'wte' is not in the model"),
    "names left out": (fitted(fragments=[["blocks"], ["norm"]]), ValueError, "leave out tokens.weight"),
    "a name twice": (fitted(fragments=[["blocks"], ["blocks.0"]]), ValueError, "a second time"),
    "numbers with a gap": (fitted(fragments=lambda name: 2 * ("blocks" in name)), ValueError, "give all of 0, 1"),
    "no numbers": (fitted(fragments=lambda name: name), ValueError, "the number of the fragment"),
    "a function of nothing": (fitted(fragments=lambda: 0), TypeError, "fragments"),
}  # fmt: skip


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_work_is_refused(setting: str) -> None:
    call, error, message = REFUSED[setting]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("H", "fragments", "offsets"), [(3, 5, [1, 1, 1, 2, 3]), (1, 3, [1, 1, 1])])
def test_a_round_has_a_step_for_each_fragment(H: int, fragments: int, offsets: list[int]) -> None:
    """Of those into which the model can be cut; several in one step are asked for by their offsets."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])

    def steps(**settings: Any) -> list[int]:
        strategy = StreamingDiLoCoStrategy("sgd", H=H, delay=0, lr=0.1, **settings)
        return [entry.step + 1 for entry in dry_run(model, strategy, num_nodes=2, max_steps=H)]

    fix = f"H={H} steps is too short for the {fragments} fragments .* H={fragments} or more, at most {H} .* offsets="
    with pytest.raises(ValueError, match=fix + re.escape(str(offsets))):
        steps(num_fragments=fragments)
    assert steps(num_fragments=fragments, offsets=offsets) == offsets
    exchange = Exchange(Outer(Mean()), every=H, fragments=fragments)
    exchange.check_present(RunFacts(2, names=("one.weight", "one.bias")))  # a model of one module
    with pytest.raises(ValueError, match=f"every={H} steps is too short"):
        exchange.in_units(4).check_present(RunFacts(2, names=tuple(dict(model.named_parameters()))))


def test_fragments_of_half_the_nodes_and_other_averages() -> None:
    """The exchange takes any average, and each node's delay with it: who takes no part keeps what it has."""
    for delay in (0, [1, 0, 2, 1]):
        exchange = Exchange(Outer(Mean(), NESTEROV), every=4, fragments=2, delay=delay, keep=0.5, participation=0.5)
        ours = go(CommunicateOptimizeStrategy([exchange], "sgd", lr=0.1), seed=3)
        assert {x.shape[0] for x in ours.params.values()} == {K}
        assert torch.isfinite(ours.losses).any(1).all()


def test_the_twins_fragments_are_by_module() -> None:
    names = [name for name, _ in make_model("MLP").named_parameters()]
    assert by_module(names, 2) == [list(part) for part in cut(names, 2)]
