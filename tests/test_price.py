"""The seconds of strategies on a network, against formulas by hand; the bandwidth and H they need; `vecgym price`."""

from __future__ import annotations

import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vecgym import dry_run
from vecgym.cli import main
from vecgym.clock import Compute, Network, Prices, price, price_strategies, required, required_H, side_by_side
from vecgym.clock.dry import as_model
from vecgym.clock.required import Family
from vecgym.clock.units import count
from vecgym.core.errors import VecgymWarning
from vecgym.guide import clock
from vecgym.strategy import (
    DiLoCoStrategy,
    FedAvgStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    StreamingDiLoCoStrategy,
)

K, T, BIT_S, LATENCY = 8, 0.6, 1e8, 0.08
PARAMETERS, BYTES = 150_000_000, 4
NETWORK = Network("100 Mbit/s", "80 ms", bucket_bytes=math.inf)
COMPUTE = Compute(T)
RING_BYTES = 2 * (K - 1) / K * BYTES * PARAMETERS
RING_S = 2 * (K - 1) * LATENCY + 8 * RING_BYTES / BIT_S  # of an all-reduce in one message


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9)


def one(*names: str, **options: Any) -> list[dict[str, Any]]:
    """The rows of some strategies for one message per exchange."""
    given = {"network": NETWORK, "compute": COMPUTE, "strategies": list(names), **options}
    return price_strategies("150M", K, **given).rows


# ---------------------------------------------------------------------------------------------------- formulas by hand


def test_data_parallel_training_is_a_ring_all_reduce_in_every_step() -> None:
    [row] = one("allreduce", max_steps=10_000)
    assert (row["H"], row["bucket_bytes"], row["faster"], row["required_H"]) == (None, math.inf, 1, None)
    assert row["bytes_per_step"] == near(1.05e9) == near(RING_BYTES)
    assert row["seconds_per_step"] == near(85.72) == near(T + RING_S)  # the message leaves after the backward pass
    assert row["utilization"] == near(T / (T + RING_S))
    assert row["days"] == near(10_000 * (T + RING_S) / 86_400)


def test_each_message_pays_the_latency() -> None:
    sizes = [4 * p.numel() for p in as_model("150M").parameters()][::-1]
    messages, held = 0, 0
    for size in sizes:  # the first is complete at 1 MiB, as of gradients
        held += size
        if held >= (2**20 if messages == 0 else 25 * 2**20):
            messages, held = messages + 1, 0
    messages += held > 0
    network = Network(BIT_S, LATENCY)
    buckets, whole = one("allreduce", network=network, compute=Compute(T, overlap=False))
    assert (buckets["bucket_bytes"], whole["bucket_bytes"]) == (25 * 2**20, math.inf)
    assert messages > 10
    assert buckets["seconds_per_step"] == near(T + RING_S + (messages - 1) * 2 * (K - 1) * LATENCY)
    assert whole["seconds_per_step"] == near(T + RING_S)


@pytest.mark.parametrize("H", [20, 500])
def test_fedavg_pays_for_an_exchange_every_H_steps(H: int) -> None:
    reference, row = one("allreduce", "fedavg", H=[H], utilization=0.9)
    assert row["H"] == H
    assert row["bytes_per_step"] == near(RING_BYTES / H)
    assert row["seconds_per_step"] == near(T + RING_S / H)
    assert row["utilization"] == near(T / (T + RING_S / H))
    assert row["faster"] == near((T + RING_S) / (T + RING_S / H))
    may_wait = H * T * (1 / 0.9 - 1)  # seconds of a round
    exact = 8 * RING_BYTES / (may_wait - 2 * (K - 1) * LATENCY)
    assert exact <= row["required_bandwidth"] * (1 + 1e-9)
    assert row["required_bandwidth"] <= exact * 1.0002
    assert row["required_H"] == math.ceil(RING_S / (T * (1 / 0.9 - 1))) == 1277
    assert row["reason"] is None
    assert reference["required_bandwidth"] == math.inf
    assert reference["reason"].startswith("No bandwidth is enough for 90 % computing: the latency of 80 ms alone takes")


@pytest.mark.parametrize("delay", [1, 5, 160])
def test_streaming_hides_an_exchange_behind_its_delay(delay: int) -> None:
    """With one fragment and tau = delay: of c seconds, tau T are hidden."""
    H = 200
    for bits, seconds in ((None, RING_S), (4, 7 * (LATENCY + 8 * (PARAMETERS / 2 + 4 * 53) / BIT_S))):
        strategies = {
            "streaming": lambda H, bits=bits: StreamingDiLoCoStrategy(H=H, num_fragments=1, delay=delay, bits=bits)
        }
        [row] = price_strategies("150M", K, NETWORK, COMPUTE, H=[H], strategies=strategies).rows
        assert row["seconds_per_step"] == near(T + max(0, seconds - delay * T) / H)
        assert (row["utilization"] == 1) == (delay == 160)
    assert row["bytes_per_step"] == near(7 * (PARAMETERS / 2 + 4 * 53) / H)


def test_sparta_and_demo_send_a_part_in_every_step() -> None:
    sparta, demo = one("sparta", "demo")
    assert sparta["bytes_per_step"] == pytest.approx(0.005 * RING_BYTES, rel=3e-3)  # drawn
    assert sparta["seconds_per_step"] == near(T + 14 * LATENCY + 8 * sparta["bytes_per_step"] / BIT_S)
    sizes = [p.shape for p in as_model("150M").parameters()]
    assert all(rows % 64 == columns % 64 == 0 for rows, columns in sizes[1:])
    chunks = sum(rows * columns / 64**2 for rows, columns in sizes[1:])
    assert sizes[0] == (6490, 960)  # the largest divisors up to 64 are 59 and 64
    assert demo["bytes_per_step"] == near(7 * (chunks + 6490 / 59 * 960 / 64) * 32 * (8 + 4))


def test_the_steps_are_those_of_a_long_run() -> None:
    """A run repeats itself after its first round, or when the late messages have come."""
    compute, network = Compute(0.01), Network("1 Gbit/s", "2 ms")
    for H, strategy in (
        (7, StreamingDiLoCoStrategy(H=7, delay=6)),
        (10, StreamingDiLoCoStrategy(H=10, delay=1, bits=4)),
        (12, SPARTADiLoCoStrategy(0.01, 1, 12)),
        (1, SPARTAStrategy(0.5, delay=40)),
    ):
        family = Family("2M", lambda H, strategy=strategy: strategy, 4, compute)  # type: ignore[misc]
        seconds, computing = family.pace(H, network)
        half = max(20 * H, 100)
        times = price(dry_run("2M", strategy, 4, 2 * half), network, compute).step_seconds
        assert seconds == pytest.approx(float(times[-1] - times[half - 1]) / half, rel=2e-3), strategy
        assert computing == near(0.01 / seconds)
        assert seconds > 0.0101


def test_tau_is_printed_and_the_least_that_is_enough() -> None:
    slow = Network("10 Mbit/s", "80 ms", bucket_bytes=math.inf)
    asked: dict[str, Any] = {"network": slow, "compute": COMPUTE, "utilization": 0.95}

    def computing(H: int, tau: int) -> float:
        return Family("1M", lambda H: StreamingDiLoCoStrategy(H=H, delay=tau), K, COMPUTE).pace(H, slow)[1]

    prices = price_strategies("1M", K, H=[10, 20], strategies=["gossip", "streaming"], **asked)
    assert [(row["tau"], row["fragments"]) for row in prices.rows] == [(None, None)] + [(5, 2)] * 2
    *_, none, tau = (row["required_tau"] for row in prices.rows)
    assert none == math.inf
    assert computing(20, tau) >= 0.95 > max(computing(20, tau - 1), computing(10, 9))
    assert str(prices).startswith("1,000,000 parameters (4 MB) in 2 layers of width 192, 8 nodes, ")
    said = f"\nstreaming: tau = 5 steps, 2 fragments; tau for 95 %: none with H = 10, {tau} with H = 20\n"
    assert said in f"{prices}\n"
    assert " layer" not in str(price_strategies(nn.Linear(3, 3), 2, H=[5], strategies=["diloco"], **asked))


def test_a_larger_tau_is_among_the_remedies() -> None:
    """A message of a fragment takes 1.12 s of latency: more than a step, and less than two."""
    asked: dict[str, Any] = {"compute": COMPUTE, "H": [20], "strategies": ["streaming"]}
    row = price_strategies("1M", K, NETWORK, tau=1, **asked).rows[0]
    assert "2 times fewer exchanges, given enough bandwidth; tau = 2 steps in place of 1" in row["reason"]
    assert price_strategies("1M", K, NETWORK, tau=2, **asked).rows[0]["required_bandwidth"] < math.inf


# ------------------------------------------------------------------------------------------------------- which H


@pytest.mark.parametrize(
    ("strategy", "utilization"),
    [("diloco", 0.9), ("diloco", 0.3), ("streaming", 0.9), ("streaming-4-bits", 0.5), ("fedavg", 0.001)],
)
def test_the_H_that_is_needed_is_enough_and_no_more(strategy: str, utilization: float) -> None:
    H = int(required_H("150M", strategy, K, NETWORK, COMPUTE, utilization))
    family = Family("150M", strategy, K, COMPUTE)
    assert family.pace(H, NETWORK)[1] >= utilization
    assert H == 1 or family.pace(H - 1, NETWORK)[1] < utilization
    assert (H > 256) == (utilization == 0.9)  # computed from shorter rounds
    assert (H == 1) == (strategy == "fedavg")


def test_where_no_H_is_enough_it_says_why() -> None:
    slow = Compute([T] * 7 + [1.2])
    with pytest.warns(VecgymWarning, match="90 % computing: waiting for the slowest node takes 525 ms of 1.2 s a step"):
        assert required_H("150M", "diloco", K, NETWORK, slow, utilization=0.9) == math.inf
    assert required_H("150M", "diloco", K, NETWORK, slow, utilization=0.5) < math.inf
    both = lambda H: SPARTADiLoCoStrategy(0.01, 1, H)  # noqa: E731
    network = Network("1 Mbit/s", "80 ms")
    with pytest.warns(
        VecgymWarning, match="what is exchanged in every step, with any H, takes 1.18 s of 1.78 s a step"
    ):
        assert required_H("100k", both, 8, network, COMPUTE, utilization=0.9) == math.inf
    [row] = price_strategies("100k", 8, network, COMPUTE, H=[10], strategies={"both": both}).rows[:1]
    assert row["required_H"] == math.inf
    assert "No H is enough for 95 % computing: what is exchanged" in row["reason"]


def test_an_H_below_the_delay_is_not_tried_in_vain() -> None:
    late = lambda H: StreamingDiLoCoStrategy(H=H, delay=20)  # noqa: E731
    assert required_H("100k", late, 2, Network(1e9), COMPUTE, utilization=0.9) == 21
    with pytest.raises(ValueError, match="delay=20 must be smaller than H=5"):
        price_strategies("100k", 2, Network(1e9), COMPUTE, H=[5], strategies={"late": late})


def test_times_that_are_drawn_are_averaged_over_many_steps() -> None:
    drawn = Compute.lognormal(T, 0.3)
    family = Family("1M", "diloco", 4, drawn)
    assert family.ledger(20)[0].num_steps == 1024
    seconds, computing = family.pace(20, NETWORK)
    assert seconds == pytest.approx(
        float(drawn.of_steps(20_000, 4).view(1000, 20, 4).sum(1).amax(1).mean()) / 20 + 0.048, rel=0.03
    )
    assert computing == pytest.approx(T * math.exp(0.3**2 / 2) / seconds, rel=0.02)


# ------------------------------------------------------------------------------------------------- how it is found


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """The second arguments with which a function or method is called from now on."""
    calls, function = list[Any](), getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        calls.append(args[1:2])
        return function(*args, **options)

    monkeypatch.setattr(owner, name, call)
    return calls


def bisected(question: required.Question) -> float:
    """The answer by halving alone."""
    if not question.reached() or question.reached(required.LOWEST):
        return math.inf if not question.reached() else required.LOWEST
    low, high = required.LOWEST, required.HIGHEST
    while high > low * (1 + required.PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if question.reached(middle) else (middle, high)
    return high


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("latency", [0.0, 0.001, 0.08])
@pytest.mark.parametrize(
    "strategy", ["allreduce", "diloco", "streaming", "streaming-4-bits", "gossip", "sparta", "eager"]
)
def test_the_bandwidth_is_the_one_that_halving_finds_with_fewer_prices(
    strategy: str, latency: float, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, least = Family("1M", strategy, 4, Compute(0.1, overlap=overlap)), 0
    asked = noted(monkeypatch, required.Question, "pace")
    for bucket_bytes, utilization, all_reduce in ((1e6, 0.95, "ring"), (math.inf, 0.5, "gloo"), (0, 0.999, "tree")):
        network = Network(1e9, latency, bucket_bytes=bucket_bytes, all_reduce=all_reduce)
        ledger, first = family.ledger(10)
        question = required.Question(ledger, family.compute, utilization, network, first=first)
        asked.clear()
        bandwidth = question.bandwidth()
        least += len(asked)
        assert bandwidth == bisected(question)
    assert least <= 3 * 14, "halving takes 21 or more for each"


def test_what_is_sent_by_several_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = noted(monkeypatch, required, "price")
    asked: dict[str, Any] = {"network": NETWORK, "compute": COMPUTE, "H": [20, 40]}
    alone = price_strategies("1M", K, strategies=["fedavg"], **asked)
    number = len(networks)
    both = price_strategies("1M", K, strategies=["fedavg", "diloco"], **asked)
    assert len(networks) == 2 * number
    different = {"strategy", "faster"}
    each = [[{name: x for name, x in row.items() if name not in different} for row in rows]
            for rows in (alone.rows, both.rows[:2], both.rows[2:])]  # fmt: skip
    assert each[0] == each[1] == each[2]


def test_progress_is_shown_on_a_terminal_where_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> str:
        price_strategies("1M", 2, NETWORK, COMPUTE, H=[5], strategies=["allreduce", "fedavg"])
        return capsys.readouterr().err

    monkeypatch.setattr(side_by_side, "SOON", 0.0)
    assert shown() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert "Prices:   0%" in shown()
    monkeypatch.setattr(side_by_side, "SOON", 60.0)
    assert shown() == ""


# --------------------------------------------------------------------------------------------- what is asked, and how


@pytest.mark.parametrize("number", [1, 2, 63, 64, 65, 1000, 49_152, 150_000, 150_000_000, 7_000_000_000])
def test_a_number_of_parameters_is_a_model_of_that_size(number: int) -> None:
    model = as_model(number)
    assert sum(p.numel() for p in model.parameters()) == number
    assert all(p.is_meta for p in model.parameters())
    assert dry_run(number, DiLoCoStrategy(H=1), 2, 1).total_bytes == 4 * number


def test_counts_as_text() -> None:
    texts = ["150M", "1.5 B", "2k", "2K", "1e3", "3G", "1T", "12"]
    assert [count("model", x) for x in texts] == [150e6, 1.5e9, 2000, 2000, 1000, 3e9, 1e12, 12]
    for wrong in ("150 Mb", "M", "-1M", "0.4", "0", 0, 1.5):
        with pytest.raises(ValueError, match=r"model=.*(is not a count|must be an integer >= 1)"):
            count("model", wrong)


def test_one_node_sends_nothing() -> None:
    prices = price_strategies("1M", 1, NETWORK, COMPUTE, H=[5])
    assert {row["bytes_per_step"] for row in prices.rows} == {0}
    assert all((row["seconds_per_step"], row["utilization"]) == (near(T), near(1)) for row in prices.rows)
    required = {row["strategy"]: row["required_H"] for row in prices.rows}
    in_fragments = {required.pop(name) for name in list(required) if name.startswith("streaming")}
    assert in_fragments == {2}  # a step for each of two fragments
    assert set(required.values()) == {None, 1}


@pytest.mark.parametrize(
    "model",
    [nn.Linear(3, 3), nn.LSTM(4, 5), nn.ParameterList([nn.Parameter(torch.zeros(()))]), nn.Conv2d(3, 8, 3).bfloat16()],
)
def test_odd_models(model: nn.Module) -> None:
    prices = price_strategies(model, 3, NETWORK, COMPUTE, H=[2])
    assert len(prices.rows) == 7
    assert prices.rows[0]["bytes_per_step"] == near(4 / 3 * sum(p.nbytes for p in model.parameters()))


def test_links_that_differ_and_a_server() -> None:
    regions = Network.regions([4, 4], inside=("10 Gbit/s", 1e-4), between=(BIT_S, LATENCY), bucket_bytes=math.inf)
    [row] = one("allreduce", network=regions)
    assert row["seconds_per_step"] == near(T + RING_S)  # the ring's slowest link
    assert "0 s to 80 ms" not in row["reason"]
    assert "the latency of [8, 8] of 100 us to 80 ms alone takes" in row["reason"]
    [served] = one("allreduce", network=Network(BIT_S, all_reduce="server", bucket_bytes=math.inf))
    assert served["bytes_per_step"] == near(BYTES * PARAMETERS)
    assert served["seconds_per_step"] == near(T + 2 * 8 * BYTES * PARAMETERS / BIT_S)


def test_the_figure(tmp_path: Path) -> None:
    prices = price_strategies("1M", 2, Network(1e8, 0.01), COMPUTE, H=[5, 10], strategies=["allreduce", "diloco"])
    figure: Any = prices.plot(tmp_path / "prices.png", title="here")
    assert (tmp_path / "prices.png").stat().st_size > 5000
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["allreduce", "diloco, H = 5", "diloco, H = 10"]
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [prices.rows[0]["days"], prices.rows[3]["days"]]
    assert [bar.get_width() for bar in figure.axes[1].patches] == [100 * row["utilization"] for row in prices.rows]


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"model": math.inf}, TypeError, "model is .*; give an nn.Module"),
        ({"model": 1.5}, TypeError, "model is .*; give an nn.Module, or its number of parameters"),
        ({"model": "150X"}, ValueError, "model='150X' is not a count"),
        ({"num_nodes": 0}, ValueError, "num_nodes=0 must be an integer >= 1"),
        ({"network": 1e8}, TypeError, "network is of type float; give a Network"),
        ({"compute": 0.6}, TypeError, "compute is of type float; give a Compute"),
        ({"compute": Compute([1.0, 2.0])}, ValueError, "Compute has seconds for 2 nodes and the run has 4"),
        ({"H": 100}, TypeError, "H is of type int; give a list"),
        ({"H": []}, ValueError, "give at least one of each"),
        ({"H": [0]}, ValueError, "H=0 must be an integer >= 1"),
        ({"strategies": "diloco"}, TypeError, "strategies is of type str; give a list"),
        ({"strategies": 5}, TypeError, "strategies is of type int; give a list of names"),
        ({"strategies": ["dilocoo"]}, ValueError, "'dilocoo'.*'diloco'"),
        ({"strategies": {"x": lambda H: None}}, TypeError, "strategy is of type NoneType"),
        ({"max_steps": 0}, ValueError, "max_steps=0 must be"),
        ({"tau": 20}, ValueError, "tau=20 must be less than every H"),
        ({"compute": Compute(0.0)}, ValueError, "takes no time has no utilization"),
        ({"utilization": 1}, ValueError, "utilization=1 must be a number in"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"model": "1M", "num_nodes": 4, "network": NETWORK, "compute": COMPUTE, **wrong}
    with pytest.raises(error, match=text):
        price_strategies(**given)


# ----------------------------------------------------------------------------------------------------- the command

ASKED = ["price", "--nodes", "4", "--step-seconds", "0.6", "--bandwidth", "100 Mbit/s", "--latency", "80ms"]


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*ASKED, *argv]) == 0
    return capsys.readouterr().out


def test_the_command_prints_what_the_function_returns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    network = Network("100 Mbit/s", "80ms")
    names = ["diloco", "streaming"]
    options = ["--H", "10", "30", "--strategies", *names]
    prices = price_strategies("1M", 4, network, Compute(0.6), H=[10, 30], strategies=names)
    assert said(capsys, "--parameters", "1M", *options) == f"{prices}\n"
    figure = tmp_path / "out" / "price.png"
    printed = said(
        capsys, "--parameters", "1M", *options, "--tau", "2", "--steps", "5000", "--utilization", "0.8",
        "--bucket-bytes", "1e6", "--all-reduce", "tree", "--no-overlap", "--plot", str(figure),
    )  # fmt: skip
    strategies: dict[str, Any] = {"diloco": "diloco", "streaming": lambda H: StreamingDiLoCoStrategy(H=H, delay=2)}
    network = Network("100 Mbit/s", "80ms", all_reduce="tree", bucket_bytes=1e6)
    prices = price_strategies(
        "1M", 4, network, Compute(0.6, overlap=False), H=[10, 30], strategies=strategies, max_steps=5000,
        utilization=0.8,
    )  # fmt: skip
    assert printed == f"{prices}\nFigure: {figure}\n"
    assert figure.stat().st_size > 5000


MODEL = """
import torch

def model(width=200_000):
    return torch.nn.Linear(width, width, dtype=torch.bfloat16)

def number():
    return 3
"""


def test_the_guide_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    command, printed = re.findall(r"^```(?:bash|text)\n(.*?)\n```$", str(clock.__doc__), re.DOTALL | re.MULTILINE)[:2]
    program, *argv = shlex.split(command.replace("\\\n", ""))
    assert program == "vecgym"
    assert main(argv) == 0
    assert capsys.readouterr().out == printed + "\n"


def test_the_command_takes_a_module_of_any_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MODEL)
    given = ["--H", "500", "--strategies", "diloco"]
    assert said(capsys, "--model", f"{file}:model", *given).startswith("40,000,200,000 parameters (80 GB), 4 nodes, ")
    assert said(capsys, "--model", f"{file}:model", "--set", "width=2", *given).startswith("6 parameters (12 B), ")
    for function, why in (("number", "returned a int; it must return a Module"), ("other", "has no function 'other'")):
        assert main([*ASKED, "--model", f"{file}:{function}"]) == 1
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        ([], 2, "one of the arguments RUN --parameters --model is required"),
        (["--parameters", "1M", "--", "RUN"], 2, "not allowed with argument"),
        (["--parameters", "1M", "--bandwidth", "1e8", "1e9"], 2, 'give one --bandwidth, such as "100 Mbit/s"'),
        (["--parameters", "150 X"], 1, "--parameters='150 X' is not a count: give a whole number >= 1, or a text"),
        (["--parameters", "1M", "--latency", "80"], 1, "latency=80.0 is 80 s for every message"),
        (["--parameters", "1M", "--strategies", "adam"], 1, "strategy='adam'"),
        (["--parameters", "1M", "--H", "0"], 2, "'0' is not a whole number >= 1"),
        (["--parameters", "1M", "--set", "width=3"], 2, "--set needs --model FILE.py:function"),
    ],
)
def test_wrong_options(argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found = main([*ASKED, *argv])
    except SystemExit as error:
        found = int(str(error.code))
    assert found == code
    assert text in capsys.readouterr().err


def test_a_network_must_be_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for missing, place in (("--nodes", 1), ("--step-seconds", 3), ("--bandwidth", 5), ("--latency", 7)):
        with pytest.raises(SystemExit):
            main([*ASKED[:place], *ASKED[place + 2 :], "--parameters", "1M"])
        assert f"give one {missing}, such as" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["price", str(tmp_path), "--H", "20"])
    assert "--H is of --parameters and --model: what" in capsys.readouterr().err


def test_prices_are_named() -> None:
    prices = price_strategies(
        "1k", 2, NETWORK, COMPUTE, H=range(1, 3), strategies={"mine": lambda H: FedAvgStrategy(H=H)}
    )
    assert isinstance(prices, Prices)
    assert [(row["strategy"], row["H"]) for row in prices.rows] == [("mine", 1), ("mine", 2)]
