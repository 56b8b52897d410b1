"""SparseLoCo: against its naive twin, and what must be so of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from tests.helpers import assert_close, begun, difference, run, stacked
from tests.models import make_batches, make_model
from tests.reference import common
from tests.reference.sparseloco import payload, sparseloco
from vecgym.collectives import StackedCollectives
from vecgym.simulation.simulation import Part
from vecgym.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec, SparseLoCoStrategy

DOUBLE = torch.float64
STEPS, K, H = 30, 4, 4
INNER: tuple[Any, dict[str, Any]] = (AdamW, {"lr": 0.01})


@functools.cache
def data(num_nodes: int = K, model: str = "MLP") -> list[list[Any]]:
    return make_batches(model, STEPS, num_nodes, 3, dtype=DOUBLE)


def ours(strategy: Any, num_nodes: int = K, model: str = "MLP", **settings: Any) -> Any:
    return run(make_model(model, dtype=DOUBLE), strategy, stacked(data(num_nodes, model)), **settings)


@pytest.mark.parametrize("num_nodes", [1, 2, K])
@pytest.mark.parametrize("average", ["all", "senders"])
@pytest.mark.parametrize(("k", "chunk", "bits", "model"), [(5, 8, 2, "MLP"), (3, 6, None, "MLP"), (40, 64, 2, "CNN")])
def test_it_equals_its_twin(k: int, chunk: int, bits: int | None, model: str, average: Any, num_nodes: int) -> None:
    if model == "CNN" and num_nodes != 2:
        pytest.skip("its loops are slow")
    settings: dict[str, Any] = {"k": k, "chunk": chunk, "bits": bits}
    found = ours(SparseLoCoStrategy("adamw", H, lr=0.01, average=average, outer_lr=0.9, **settings), num_nodes, model)
    start = make_model(model, dtype=DOUBLE)
    theirs = sparseloco(
        start, data(num_nodes, model), num_nodes, H=H, inner=INNER, alpha=0.9, senders=average == "senders", **settings
    )
    assert_close(found.losses, theirs.losses, 1e-10, "losses")
    params = [common.parameters(m) for m in theirs.models]
    assert_close(found.params, {name: torch.stack([p[name] for p in params]) for name in params[0]}, 1e-10, "params")
    assert_close(found.state.shared["0.0/params"], {name: x[None] for name, x in theirs.outer.items()}, 1e-10, "outer")
    residuals = {name: torch.stack([of_node[name] for of_node in theirs.residuals]) for name in params[0]}
    assert_close(found.state.own["0.0/residual"], residuals, 1e-10, "residual")
    assert max(float(x.abs().max()) for x in residuals.values()) > 1e-3
    shapes = [tuple(p.shape) for p in params[0].values()]
    sent = STEPS // H * sum(payload(shape, k, chunk, bits, 8) for shape in shapes)
    assert found.comm.ledger.total_payload_bytes == (sent if num_nodes > 1 else 0)
    assert found.comm.ledger.total_bytes == (num_nodes - 1) * sent


@pytest.mark.parametrize("average", ["all", "senders"])
def test_sending_everything_is_diloco_without_momentum(average: Any) -> None:
    everything: dict[str, Any] = {"k": 64 * 64, "bits": None, "average": average, "H": H, "lr": 0.01}
    plain = ours(DiLoCoStrategy("adamw", OptimSpec(SGD, lr=0.7), H=H, lr=0.01))
    assert_close(ours(SparseLoCoStrategy("adamw", outer_lr=0.7, **everything)).params, plain.params, 1e-12)
    averaged = ours(FedAvgStrategy("adamw", H=H, lr=0.01))
    assert_close(ours(SparseLoCoStrategy("adamw", **everything)).params, averaged.params, 1e-12)


def test_who_counts_matters_where_some_did_not_send() -> None:
    found = [ours(SparseLoCoStrategy("adamw", H, lr=0.01, k=3, chunk=8, average=x)) for x in ("all", "senders")]
    assert difference(found[0].params, found[1].params) > 1e-3
    alone = [ours(SparseLoCoStrategy("adamw", H, lr=0.01, k=3, chunk=8, average=x), 1) for x in ("all", "senders")]
    assert_close(alone[0].params, alone[1].params, 1e-15)


def test_what_is_handed_over_is_what_the_ledger_says() -> None:
    """0.21875 bits per parameter, and the means of four bins per tensor; 8 times less than top-k as it is."""
    handed: list[int] = []

    class Watched(StackedCollectives):
        def all_gather(self, x: Any, **how: Any) -> Any:
            handed.append(sum(part[0].nbytes for part in x.values()))
            return super().all_gather(x, **how)

    comm = Watched(3)
    outer = SparseLoCoStrategy(H=1).exchanges[0].how
    params = {"w": torch.zeros(1, 128, 128), "b": torch.zeros(1, 4096)}
    moved = {
        name: torch.randn(3, *x.shape[1:], generator=torch.Generator().manual_seed(0)) for name, x in params.items()
    }
    outer(moved, Part.alone(comm), begun(outer, params, 3))
    parameters = 128 * 128 + 4096
    assert handed == [parameters // 4096 * 64 * (2 + 12) // 8 + 2 * 16]
    assert comm.ledger.total_payload_bytes == handed[0]
    assert comm.ledger.total_bytes == 2 * handed[0]  # to two others
    assert (handed[0] - 32) * 8 / parameters == 0.21875


def test_derivatives_of_the_outer_learning_rate() -> None:
    """Exact where everything is sent; where not, those of what was sent as if it had been all that there was."""

    def loss(lr: torch.Tensor, k: int, bits: int | None) -> torch.Tensor:
        strategy = SparseLoCoStrategy("sgd", H, lr=0.1, outer_lr=lr, k=k, chunk=8, bits=bits)
        batches = stacked(data())[:13]
        return run(make_model("MLP", dtype=DOUBLE), strategy, batches, differentiable=True).losses[-1].sum()

    lr = torch.tensor(0.8, dtype=DOUBLE, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(lr, 64, None), lr)
    by_differences = (loss(lr.detach() + 1e-5, 64, None) - loss(lr.detach() - 1e-5, 64, None)) / 2e-5
    assert slope.item() == pytest.approx(by_differences.item(), rel=1e-6)
    (slope,) = torch.autograd.grad(loss(lr, 4, 2), lr)
    assert bool(slope.isfinite())
    assert slope.item() != 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"H": 0}, "H=0"), ({"k": 0}, "k=0"), ({"chunk": 0}, "chunk=0"), ({"bits": 3}, "bits=3"),
        ({"decay": 0.0}, "decay=0.0"), ({"average": "sender"}, "did you mean 'senders'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseLoCoStrategy(**settings)
