"""Rules against numbers that the authors' own programs gave, which find an error of our reading of a paper.

`authors.json` holds these numbers: each program was run on the inputs of its test, with the settings that are given
there.

    heloco    PanocularAI/panofabric-engine, panoengine/decentralized/heloco.py: block_correct, HeLoCoOptimizer, and
              what _lookahead_snapshot sends
    templar   tplr-ai/templar, src/tplr/compress.py: batch_decompress of four nodes that send all coordinates
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.strategy import Context, HeLoCo, OuterOptimizer
from vecgym.strategy.corrections import median_norm

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


# ------------------------------------------------------------------------------------------------------- median norm


def test_the_median_norm_is_that_of_templar() -> None:
    """Their mean over nodes, tensor by tensor: only what is above the lower of the middle norms is shrunk, to it."""
    scales = {"first": [0.5, 2.0, 1.0, 8.0], "second": [3.0, 0.1, 1.0, 1.0]}
    sizes = {"first": 6, "second": 4}
    moved = {
        name: torch.stack([scales[name][k] * wave(1 + 4 * i + k, size) for k in range(4)])
        for i, (name, size) in enumerate(sizes.items())
    }
    shrunk = median_norm(moved, {}, Context(StackedCollectives(4)))
    same({name: x.mean(0) for name, x in shrunk.items()}, AUTHORS["templar"], 1e-6)
    assert torch.equal(shrunk["first"][0], moved["first"][0])  # small movements stay as they are
