"""Rules against numbers that the authors' own programs gave, which find an error of our reading of a paper.

`authors.json` holds these numbers: each program was run on the inputs of its test, with the settings that are given
there.

    heloco    PanocularAI/panofabric-engine, panoengine/decentralized/heloco.py: block_correct, HeLoCoOptimizer, and
              what _lookahead_snapshot sends
    gpa       facebookresearch/optimizers, gpa/gpa_adamw.py: GPAAdamW, in float32
    halos     utnslab/halos, src/halos/simulation/exec_halos.py: HalosSimulator, whose workers are those of the test
    muloco    bentherien/muloco-1, muloco/pytorch/muloco.py: MuLoCo1; "exact": with float64 in the place of bfloat16
    templar   tplr-ai/templar, src/tplr/compress.py: batch_decompress of four nodes that send all coordinates
    prime     PrimeIntellect-ai/prime, src/zeroband/C/csrc/collectives.cpp: ring_allreduce on three processes
    torchft   meta-pytorch/torchft, torchft/quantization.py: fused_quantize_into_fp8, fused_reduce_fp8 and
              fused_dequantize_from_fp8 of three nodes, in Triton's interpreter with the GPU's rounding to eight bits
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import run
from vecgym.collectives import StackedCollectives
from vecgym.engine import Engine
from vecgym.simulation import RunFacts, Simulation
from vecgym.simulation.events import Schedule, Stop, schedule, updates_of
from vecgym.simulation.simulation import Part
from vecgym.strategy import (
    AllToAll,
    GPAStrategy,
    HALoSStrategy,
    HeLoCo,
    MuLoCoStrategy,
    OptimSpec,
    OuterOptimizer,
    QuantisedRing,
)
from vecgym.strategy.corrections import median_norm
from vecgym.strategy.halos import RegionRules, delivered

F64 = torch.float64
AUTHORS: dict[str, Any] = json.loads(Path(__file__).with_name("authors.json").read_text())


def wave(seed: int, *shape: int) -> Tensor:
    """Numbers between -1 and 1 that nobody needs a generator for."""
    n = torch.Size(shape).numel()
    return torch.sin(0.7 * torch.arange(n, dtype=F64) ** 1.5 + 1.9 * seed**1.5).reshape(shape)


def same(found: dict[str, Tensor], theirs: dict[str, list[float]], tolerance: float) -> None:
    assert found.keys() == theirs.keys()
    for name, values in theirs.items():
        torch.testing.assert_close(found[name].flatten(), torch.tensor(values, dtype=F64), rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------------------------------ HeLoCo


def test_heloco_is_that_of_its_authors() -> None:
    """lr 0.7, momentum 0.9, rho 1 / sqrt(3); 16 arrivals, with 30 cosines in all three ranges."""
    params = {"weight": wave(0, 1, 4, 3), "bias": wave(1, 1, 4)}
    server = HeLoCo().of(num_nodes=3)
    state = server.init(params)
    for t in range(16):
        movement = {n: wave(2 + 2 * t + i, *p.shape) * (0.5 + t % 3) for i, (n, p) in enumerate(params.items())}
        params, state = server.update(params, server.correct(movement, state), state, t)
        if str(t + 1) in AUTHORS["heloco"]["params"]:
            same(params, AUTHORS["heloco"]["params"][str(t + 1)], 2e-5)  # theirs are of float32
    same(server.start(params, state), AUTHORS["heloco"]["start"], 2e-5)


def test_heloco_goes_1_point_9_times_a_movement_that_stays_the_same() -> None:
    """And a node begins eta mu m further on. Torch's Nesterov, whose momentum is a sum, goes 10 times."""
    steps = {}
    for server in (HeLoCo(1.0, 0.9).of(num_nodes=1), OuterOptimizer(lr=1.0)):
        params, delta = {"w": torch.zeros(1, 1, dtype=F64)}, {"w": torch.ones(1, 1, dtype=F64)}
        state = server.init(params)
        for t in range(400):
            before = params["w"].clone()
            params, state = server.update(params, server.correct(delta, state), state, t)
        steps[type(server)] = float(before - params["w"]), float(params["w"] - server.start(params, state)["w"])
    assert steps[HeLoCo] == pytest.approx((1.9, 0.9))
    assert steps[OuterOptimizer] == pytest.approx((10.0, 0.0))


@pytest.mark.parametrize("num_nodes", [1, 4, 9])
def test_an_arrival_of_heloco_counts_one_over_the_root_of_the_nodes(num_nodes: int) -> None:
    server, params = HeLoCo(1.0, 0.0).of(num_nodes), {"w": torch.zeros(1, 1)}
    movement = server.correct({"w": torch.ones(1, 1)}, server.init(params))
    assert float(movement["w"]) == pytest.approx(num_nodes**-0.5)


# ------------------------------------------------------------------------------------------------------------- HALoS


class Towards(nn.Module):
    """Half the square distance of w from where the node wants it, which is its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=F64))

    def forward(self, batch: Tensor) -> Tensor:
        return ((self.w - batch) ** 2).sum() / 2


def test_halos_is_that_of_its_authors() -> None:
    """The rates of their script, alpha 0.25, messages that take no time, of every third arrival; DyLU with H = 4."""
    speeds = [1.0, 0.73, 0.47, 0.31]
    strategy = HALoSStrategy("sgd", 2, local_updates=3, H=4, lr=0.1)
    steps = strategy.steps_of_rounds([1 / speed for speed in speeds])
    rules = RegionRules(steps, 3, regions=strategy.regions_of(4))
    events = schedule(rules, lambda node, step: 1 / speeds[node], Stop(updates=14))
    wanted = torch.tensor([[node + 1.0, -(float(node) ** 2)] for node in range(4)], dtype=F64)
    read = lambda requests: ((wanted[rows, None], None) for rows, _ in requests)  # noqa: E731
    facts = RunFacts(4, schedule=Schedule(rules, updates_of(events)))
    simulation = Simulation(Engine(Towards()), strategy, facts, StackedCollectives(4), read)
    batches = read(simulation.requests(simulation.timetable.ticks()))
    state, ticks = simulation.init(), simulation.timetable.ticks()
    for part, theirs in zip(updates_of(events), AUTHORS["halos"], strict=True):
        state, _ = simulation.tick(state, next(ticks), batches)
        assert part[-1].time == pytest.approx(theirs["time"], abs=1e-3)
        sent = [message.region for message in delivered(part)]
        assert sent == [theirs["region"]]
        assert state.params["w"][0].tolist() == pytest.approx(theirs["params"], rel=1e-9)
        region = state.shared["regions"][str(theirs["region"])]  # before the reply
        assert region["params"]["w"][0].tolist() == pytest.approx(theirs["regions"][theirs["region"]], rel=1e-9)


def test_an_arrival_moves_halos_by_the_papers_rates() -> None:
    """A movement of 1 moves the region by 0.2, a message of 1 the global model by 0.15, until there is momentum."""
    strategy = HALoSStrategy()
    for server, rate in ((strategy.local_server, 0.2), (strategy.global_server, 0.15)):
        params = {"w": torch.zeros(1, 1, dtype=F64)}
        moved, _ = server.update(params, {"w": torch.ones(1, 1, dtype=F64)}, server.init(params), 0)
        assert float(moved["w"]) == pytest.approx(-rate)


# ------------------------------------------------------------------------------------------------------------ MuLoCo


class Given(nn.Module):
    """A model whose gradients are the batch."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, nn.Parameter(wave(i, *shape)))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return sum((p * batch[name]).sum() for name, p in self.named_parameters())  # type: ignore[return-value]


def gradients(shapes: dict[str, tuple[int, ...]], steps: int) -> list[dict[str, Tensor]]:
    n = len(shapes)
    return [{name: wave(n + n * t + i, 1, 1, *s) for i, (name, s) in enumerate(shapes.items())} for t in range(steps)]


@pytest.mark.parametrize(("kind", "tolerance"), [("exact", 1e-8), ("rounded", 8e-3)])
def test_muloco_is_that_of_its_authors(kind: str, tolerance: float) -> None:
    """One node, H = 3, Muon with 0.05, mu 0.9 and weight decay 0.1, AdamW with 0.01, an outer step with 0.7 and 0.6."""
    outer = OptimSpec(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)
    strategy = MuLoCoStrategy(
        outer, 3, lr=0.05, momentum=0.9, weight_decay=0.1, adamw_lr=0.01, full_precision=kind == "exact"
    )
    shapes: dict[str, tuple[int, ...]] = {"tall": (5, 3), "wide": (3, 4), "bias": (4,)}
    batches = gradients(shapes, 7)
    for steps, theirs in AUTHORS["muloco"][kind].items():
        same(run(Given(shapes), strategy, batches[: int(steps)]).params, theirs, tolerance)
    torchs = run(
        Given(shapes), MuLoCoStrategy(outer, 3, lr=0.05, weight_decay=0.1, adamw_lr=0.01, muon="torch"), batches
    )
    assert abs(torchs.params["tall"][0] - torch.tensor(theirs["tall"]).view(5, 3)).max() > 0.05


# --------------------------------------------------------------------------------------------------------------- GPA


def test_gpa_with_weight_decay_is_that_of_its_authors() -> None:
    """AdamW(lr=0.1, weight_decay=0.1), mu_x 0.9, mu_y 0.7. The paper's formula is elsewhere after 50 steps."""
    shapes: dict[str, tuple[int, ...]] = {"weight": (3, 2), "bias": (3,)}
    batches, adamw = gradients(shapes, 50), OptimSpec("adamw", lr=0.1, weight_decay=0.1)
    for steps, theirs in AUTHORS["gpa"]["y"].items():
        strategy = GPAStrategy(adamw, mu_x=0.9, mu_y=0.7, decay="code")
        found = run(Given(shapes), strategy, batches[: int(steps)])
        same(found.params, theirs, 1e-5)
    same(strategy.average(found.state), AUTHORS["gpa"]["x"], 1e-5)
    paper = run(Given(shapes), GPAStrategy(adamw, mu_x=0.9, mu_y=0.7), batches)
    assert max((paper.params[name] - x).abs().max() for name, x in found.params.items()) > 0.01


# ------------------------------------------------------------------------------------------------------- median norm


def test_the_median_norm_is_that_of_templar() -> None:
    """Their mean over nodes, tensor by tensor: only what is above the lower of the middle norms is shrunk, to it."""
    scales = {"first": [0.5, 2.0, 1.0, 8.0], "second": [3.0, 0.1, 1.0, 1.0]}
    sizes = {"first": 6, "second": 4}
    moved = {
        name: torch.stack([scales[name][k] * wave(1 + 4 * i + k, size) for k in range(4)])
        for i, (name, size) in enumerate(sizes.items())
    }
    shrunk = median_norm(moved, {}, Part.alone(StackedCollectives(4)))
    same({name: x.mean(0) for name, x in shrunk.items()}, AUTHORS["templar"], 1e-6)
    assert torch.equal(shrunk["first"][0], moved["first"][0])  # small movements stay as they are


# -------------------------------------------------------------------------------------------------------- all-reduces


def test_prime_and_torchft_add_codes_like_this() -> None:
    """A code that differed by one step would change a value by a thousandth or more."""
    three = Part.alone(StackedCollectives(3))
    x = torch.stack([wave(k, 240) * (1 + 0.3 * k) for k in range(3)]).float()
    same({"x": QuantisedRing()({"x": x}, three)["x"].double()}, {"x": AUTHORS["prime"]}, 2e-7)
    shapes = {"w": (7, 12), "v": (5,)}
    values = {
        name: torch.stack([wave(10 * i + k, *shape) * (1 + 0.3 * k) for k in range(3)]).float()
        for i, (name, shape) in enumerate(shapes.items())
    }
    same({name: x.double() for name, x in AllToAll()(values, three).items()}, AUTHORS["torchft"], 2e-7)
