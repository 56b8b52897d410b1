"""The products of a timeline: bars, traces, figures, the bandwidth that is needed, the command."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.test_clock import cases, random_compute, random_network
from vecgym import Trainer, dry_run
from vecgym.cli import main
from vecgym.clock import Compute, Network, price, required_bandwidth
from vecgym.clock.required import Question
from vecgym.clock.units import bits_per_second, seconds
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.collectives.topology import Links
from vecgym.core.errors import VecgymWarning
from vecgym.models import Line
from vecgym.strategy import DiLoCoStrategy

SIZES = {f"layer{i}": 10**8 for i in range(4)}
STEP = [Transfer("mean", 4 * 10**8, 3, tensors=tuple(SIZES))]


@pytest.mark.filterwarnings("ignore:.*give a unit")
def test_the_bars_of_a_node_follow_one_another_and_add_up() -> None:
    for seed, (steps, sizes, K) in enumerate(cases()):
        timeline = price(
            steps, random_network(seed, K), random_compute(seed, K, seed % 2 > 0), sizes=sizes, num_nodes=K
        )
        found = timeline.bars()
        for node in range(K):
            own = [bar for bar in found if bar.node == node and bar.kind != "send"]
            for before, after in itertools.pairwise(own):
                assert before.end <= after.begin + 1e-9
            computed = sum(bar.end - bar.begin for bar in own if bar.kind in ("forward", "backward"))
            assert computed == pytest.approx(float(timeline.per_node.computed[node]), abs=1e-9)
            waited = sum(bar.end - bar.begin for bar in own if bar.kind == "wait")
            assert waited <= float(timeline.per_node.waited[node]) + 1e-9  # some wait after their last step too
            for link in [bar for bar in found if bar.node == node and bar.kind == "send"]:
                assert link.end <= timeline.seconds + 10 or link.step >= len(steps) - 3  # late ones may be lost


def test_who_waits_for_whom() -> None:
    found = price([STEP] * 3, Network("100 Gbit/s"), Compute([1.0, 1.0, 3.0]), sizes=SIZES).bars()
    assert {bar.waits_for for bar in found if bar.kind == "wait" and bar.node < 2} == {2}
    ring = Links.of(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))
    gossip = [Transfer("mix", 10**8, 3, ring, tensors=tuple(SIZES))]
    found = price([gossip] * 2, Network("100 Gbit/s"), Compute([1.0, 1.0, 3.0]), sizes=SIZES).bars()
    assert {bar.node: bar.waits_for for bar in found if bar.kind == "wait" and bar.step == 1} == {0: 2, 1: None}
    slow = price([STEP] * 3, Network("1 Gbit/s"), Compute(1.0), sizes=SIZES).bars()
    assert {bar.waits_for for bar in slow if bar.kind == "wait"} == {None}


def test_a_trace_is_one_that_viewers_read(tmp_path: Path) -> None:
    timeline = price([STEP] * 5, Network("8 Gbit/s"), Compute.lognormal(1.0, 0.3), sizes=SIZES)
    timeline.save_trace(tmp_path / "run.json", first=2)
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["step"] for event in spans} == {2, 3, 4}
    assert {event["cat"] for event in spans} == {"forward", "backward", "wait", "send"}
    assert all(event["dur"] >= 0 for event in spans)
    assert {(event["pid"], event["tid"]) for event in spans} == {
        (node, thread) for node in range(3) for thread in (0, 1)
    }


def test_the_figure_of_a_timeline(tmp_path: Path) -> None:
    timeline = price([STEP] * 50, Network("8 Gbit/s"), Compute([1.0, 1.0, 2.0]), sizes=SIZES)
    figure = timeline.plot(tmp_path / "gantt.png", title="three nodes")
    assert (tmp_path / "gantt.png").stat().st_size > 5000
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["node 0", "node 1", "node 2"]
    assert "node 2" in {text.get_text() for text in figure.axes[0].texts}


# ------------------------------------------------------------------------------------------------------- bandwidth


def test_the_bandwidth_that_is_needed_is_enough_and_no_more() -> None:
    for compute in (Compute(1.0), Compute.lognormal(1.0, 0.02)):
        bandwidth = required_bandwidth([STEP] * 30, compute, 0.9, sizes=SIZES)
        reached, below = (
            price([STEP] * 30, Network(b), compute, sizes=SIZES).utilization for b in (bandwidth, bandwidth * 0.999)
        )
        assert below < 0.9 <= reached
    with pytest.warns(VecgymWarning, match=r"for 95 % computing: nodes wait for the slowest, and compute for 55.6 %"):
        assert required_bandwidth([STEP] * 30, Compute([1.0, 1.0, 3.0]), sizes=SIZES) == math.inf
    assert required_bandwidth([[]] * 30 + [STEP], Compute("1e12 s"), sizes=SIZES) == 1.0
    with pytest.raises(ValueError, match="utilization=1 must be a number in"):
        required_bandwidth([STEP], Compute(1.0), 1)


def diloco(H: int, rounds: int = 2) -> Ledger:
    """152 M parameters in 75 tensors, 8 nodes."""
    with torch.device("meta"):
        model = nn.ParameterList(nn.Parameter(torch.empty(152_000_000 // 75)) for _ in range(75))
    return dry_run(model, DiLoCoStrategy("adamw", H=H), num_nodes=8, max_steps=H * rounds)


@pytest.mark.parametrize(("H", "mbit"), [(100, 1535), (500, 264), (1000, 130)])
def test_where_no_bandwidth_is_enough_it_says_why_and_what_one_message_needs(H: int, mbit: int) -> None:
    """A message for each tensor takes 84 s of latency, 75 * 14 * 80 ms; one 1.12 s."""
    ledger, asked = diloco(H), {"utilization": 0.9, "latency": "80 ms"}
    assert round(required_bandwidth(ledger, Compute(0.6), **asked, bucket_bytes=math.inf) / 1e6) == mbit  # type: ignore
    with pytest.warns(VecgymWarning) as warned:
        assert required_bandwidth(ledger, Compute(0.6), **asked, bucket_bytes=0) == math.inf  # type: ignore[arg-type]
    text = str(warned[0].message)
    figure = "1.53 Gbit/s" if mbit > 1000 else f"{mbit} Mbit/s"
    rarer = {100: 13, 500: 3, 1000: 2}[H]
    assert text.startswith("No bandwidth is enough for 90 % computing: the latency of 80 ms alone takes 2.79 min of ")
    assert f"{rarer} times fewer exchanges" in text
    assert f"one message per exchange, bucket_bytes=math.inf: {figure}" in text
    assert ("all_reduce='tree'" in text) == (H == 1000)
    assert required_bandwidth(diloco(H * rarer), Compute(0.6), **asked, bucket_bytes=0) < math.inf  # type: ignore


def test_overlap_helps_where_it_is_missing() -> None:
    slow = Question(diloco(1), Compute(60.0, overlap=False), 0.99, Network(1e9, 0.004, all_reduce="tree"))
    assert slow.bandwidth() < math.inf
    late = replace(slow, network=Network(1e9, 0.1, all_reduce="tree"))
    assert late.bandwidth() == math.inf
    assert late.why_none().endswith("; overlap, Compute(overlap=True).")
    assert replace(late, compute=Compute(60.0)).bandwidth() < math.inf


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 Gbit/s", 1e9), ("1Gb/s", 1e9), ("2.5 Mbps", 2.5e6), ("100 MB/s", 8e8), ("64 kbit/s", 64e3),
        ("50 GiB/s", 50 * 8 * 2**30), ("1e3 bit/s", 1e3), (1e9, 1e9), (math.inf, math.inf),
    ],
)  # fmt: skip
def test_bandwidths_as_text(text: str | float, value: float) -> None:
    assert bits_per_second("bandwidth", text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("50 ms", 0.05), ("50ms", 0.05), ("1.5 s", 1.5), ("20 us", 2e-5), ("500 ns", 5e-7), ("3 s", 3.0)],
)
def test_times_as_text(text: str, value: float) -> None:
    assert seconds("latency", text) == value


# ----------------------------------------------------------------------------------------------------- the command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Trainer[nn.Module] = Trainer(Line(), torch.ones(64))
    trainer.fit(
        DiLoCoStrategy("sgd", H=5, lr=0.1), 4, max_steps=20, device="cpu", progress=False, save_dir=tmp_path / "run"
    )
    figure = tmp_path / "price.png"
    given = [str(tmp_path / "run"), "--step-seconds", "0.4", "--output", str(figure)]
    assert main(["price", *given, "--bandwidth", "1 Mbit/s", "1e9", "--latency", "50ms", "--utilization", "0.8"]) == 0
    printed = capsys.readouterr().out
    seconds = trainer.timeline(Network("1 Gbit/s", "50 ms"), Compute(0.4)).seconds
    assert re.search(rf"1 Gbit/s +{seconds:.3g} s, {100 * 20 * 0.4 / seconds:.1f} %", printed)
    assert "20 steps of 4 nodes, Compute(400 ms)" in printed
    assert "For 80 % computing with a latency of 50 ms: " in printed
    assert figure.stat().st_size > 5000
    assert main(["price", *given, "--latency", "2 s", "--bucket-bytes", "0", "--all-reduce", "tree"]) == 0
    assert "computing: the latency of 2 s alone takes 32 s of 40 s. Possible remedies: " in capsys.readouterr().out
    assert main(["price", *given, "--latency", "0.05", "1e-3"]) == 0
    assert "50 ms latency" in capsys.readouterr().out
    assert main(["price", *given, "--latency", "80"]) == 1
    assert '--latency=80.0 is 80 s for every message; give at most 10 s. For milliseconds, give "80 ms"' in (
        capsys.readouterr().err
    )
    assert main(["price", str(tmp_path / "run"), "--output", str(figure)]) == 0  # as long as it took here
    assert main(["price", str(tmp_path), "--output", str(figure)]) == 1
    assert "is not a file, but a folder without checkpoints; fit(save_dir=) writes them." in capsys.readouterr().err
    assert main(["price", *given, "--bandwidth", "1 GB"]) == 1
    assert "--bandwidth='1 GB' is not a bandwidth" in capsys.readouterr().err


def test_a_ledger_keeps_what_the_clock_needs() -> None:
    ledger, other = Ledger(), Ledger()
    ledger.announce(3, SIZES)
    for step in range(10):
        ledger.add(step, STEP if step == 4 else [])
    other.load(ledger.state())
    assert (other.num_nodes, other.sizes, other.num_steps) == (3, SIZES, 10)
    assert list(other.sizes) == list(SIZES)
    network, compute = Network(1e9), Compute(1.0)
    assert price(other, network, compute).seconds == price(ledger, network, compute).seconds > 10


# ------------------------------------------------------------------------------------------------- without a unit


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Network(200, 0.06), 'bandwidth=200 is 200 bit/s: give a unit, such as "200 Mbit/s"'),
    (lambda: Network([1e9, 400.0]), "bandwidth=400 is 400 bit/s"),
    (lambda: Network(up=100, down="1 Gbit/s"), "up=100 is 100 bit/s"),
    (lambda: Network(1e9, server_bandwidth=1000), "server_bandwidth=1000 is 1 kbit/s"),
    (lambda: Network("100 Mbit/s", 5), 'latency=5 is 5 s for every message: give a unit, such as "5 ms"'),
    (lambda: Network(1e9, torch.full((2, 2), 5.0)), "latency=5 is 5 s"),
    (lambda: Network.regions([2, 2], (1e9, 0.0), (100, 0.1)), "between=100 is 100 bit/s"),
    (lambda: Compute(1100), 'seconds=1100 is 18.3 min for every step: give a unit, such as "1100 ms"'),
    (lambda: Compute([0.4, 1100.0]), "seconds=1100 is"),
    (lambda: Compute.lognormal(1100, 0.1), "median=1100 is"),
])  # fmt: skip
def test_a_number_that_is_probably_in_another_unit_is_said(make: Callable[[], Any], said: str) -> None:
    with pytest.warns(VecgymWarning, match=re.escape(said)):
        make()


def test_many_numbers_in_another_unit_are_one_warning() -> None:
    bandwidths = torch.arange(1.0, 101.0).view(10, 10).fill_diagonal_(0.0)
    with pytest.warns(VecgymWarning) as said:
        Network(bandwidths)
    assert [str(x.message).split(":")[0] for x in said] == ["bandwidth=2 is 2 bit/s"]


def test_a_unit_is_taken_at_its_word() -> None:
    Network("200 bit/s", "5 s")
    Network.regions([2, 2], ("1 kbit/s", "2 s"), ("64 bit/s", "9 s"))
    Network(1e5, 0.99)
    for compute in (Compute("20 min"), Compute.lognormal("20 min", 0.1), Compute(600.0), Compute.from_flop(1e20, 1e12)):
        assert compute.seconds >= 600
    assert Compute.measured([700.0, 700.0]).seconds == 700  # nobody has typed it
    with pytest.raises(ValueError, match="'1e400 Gbit/s' is not"):
        Network("1e400 Gbit/s")
