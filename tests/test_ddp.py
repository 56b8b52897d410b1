"""AllReduce on processes is torch's DistributedDataParallel: same model, data and optimizer, the same parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.models import make_data, make_model
from vecgym.collectives.distributed import DistributedCollectives
from vecgym.collectives.wire import Wire
from vecgym.core import tree
from vecgym.runs import multiprocess
from vecgym.runs.verification import Form, VerifyOptions, gaps
from vecgym.strategy import AllReduceStrategy

K = 4


def case(name: str, strategy: Any, steps: int) -> VerifyOptions:
    data = TensorDataset(*make_data(name, 64, dtype=torch.float64))
    return VerifyOptions(strategy, make_model(name, dtype=torch.float64), data, K, steps=steps)


def differences(link: multiprocess.Link, given: VerifyOptions) -> list[float]:
    """The largest difference of a parameter after each step, relative to the largest value of its tensor.

    A process of DDP trains on the batches of its L nodes, joined. Without dropout and batch norm that is equivalent.
    """
    wire = Wire()
    form, strategy = Form(given, DistributedCollectives(K, wire), exact=False), given.strategy
    batches = given.batches(form.comm.node_ids)
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(given.model), broadcast_buffers=False)
    optimizer = strategy.inner_optim.build(ddp.module)
    base_lr, found = optimizer.defaults["lr"], []
    with torch.enable_grad():
        for step in range(given.steps):
            form.step(step)
            lr = float(strategy.rates(form.simulation.timetable, step)[0])
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("given_lr", group["lr"]) * (lr / base_lr)
            optimizer.zero_grad()
            batch = given.converted(batches.batch(step))
            ddp(tree.map_leaves(lambda x: x.flatten(0, 1), batch)).backward()
            if strategy.inner.max_norm is not None:
                nn.utils.clip_grad_norm_(ddp.module.parameters(), float(strategy.inner.max_norm))
            optimizer.step()
            trained = {name: p.detach()[None] for name, p in ddp.module.named_parameters()}
            found.append(max(gap.largest for gap in gaps("params", trained, form.state.params, form.comm, {})))
    form.simulation.close()
    return found


@pytest.mark.parametrize(("optimizer", "num_processes"), [("sgd", 2), ("adamw", 4)])
def test_allreduce_is_distributed_data_parallel(optimizer: str, num_processes: int) -> None:
    """torch's own, to 1e-12 in float64, with clipping and a schedule; a process of it may hold several nodes."""
    strategy = AllReduceStrategy(optimizer, lr=0.05, max_norm=0.5, lr_scheduler="cosine", warmup_steps=2)
    found = multiprocess.run(differences, num_processes, (case("GPT", strategy, 5),))
    assert [len(each) for each in found] == [5] * num_processes
    assert max(map(max, found)) <= 1e-12


def test_the_comparison_with_ddp_can_fail() -> None:
    wrong = AllReduceStrategy("sgd", lr=0.1)
    wrong.inner.spec = wrong.inner.spec.replace(momentum=0.5)  # it trains by the rule that it was made with
    found = multiprocess.run(differences, 2, (case("MLP", wrong, 3),))
    assert min(each[-1] for each in found) > 1e-4
