"""The results of EXO Gym's own processes (`exogym_traces.json`), and how that was found: by the model that they train.

    PYTHONPATH=.:path/to/gym python -m tests.reference.exogym_traces      # exo-explore/gym at 9fa323c, on Linux

That it starts takes two things: the name of the network interface (it asks for "lo0", which Linux does not have), and a
`minibatch_size`, so that it does not search for one.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import TensorDataset

from tests.models import make_data, make_model
from tests.reference.common import OptimizerSpec
from tests.reference.exogym import OUTER

FILE = Path(__file__).with_suffix(".json")
NUM_NODES = (1, 2, 4)
STEPS, BATCH_SIZE, H, P, MAX_NORM = 11, 4, 3, 0.25, 0.5
INNER: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-2})
WARMUP_STEPS = 3  # then a cosine down to 10 %
DEMO: dict[str, Any] = {"k": 8, "chunk": 8, "weight_decay": 0.1}
KINDS = ("allreduce", "fedavg", "diloco", "sparta", "sparta_diloco", "demo")


def dataset() -> TensorDataset:
    """So small that 4 nodes begin it four times."""
    return TensorDataset(*make_data("MLP", 44, 0, torch.float64))


def seen(model: nn.Module) -> float:
    """Every parameter in one number."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return float(flat @ torch.arange(len(flat), dtype=flat.dtype).cos())


class Watched(nn.Module):
    """Writes down, before each step, its loss and its parameters."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = make_model("MLP", dtype=torch.float64)
        self.folder = folder
        self.rows: list[tuple[float, float]] = []

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(batch)
        self.rows.append((loss.item(), seen(self)))
        Path(self.folder, f"{dist.get_rank()}.json").write_text(json.dumps(self.rows))
        return loss


def strategy(kind: str) -> Any:
    module = importlib.import_module
    spec, strategies = module("exogym.strategy.optim").OptimSpec, module("exogym.strategy")
    inner, outer = (spec(cls, **kwargs) for cls, kwargs in (INNER, OUTER))
    common: dict[str, Any] = {
        "lr_scheduler": "lambda_cosine", "max_norm": MAX_NORM,
        "lr_scheduler_kwargs": {"warmup_steps": WARMUP_STEPS, "cosine_anneal": True, "max_steps": STEPS},
    }  # fmt: skip
    if kind == "allreduce":
        return module("exogym.strategy.strategy").SimpleReduceStrategy(inner, **common)
    if kind == "fedavg":
        return strategies.FedAvgStrategy(optim_spec=inner, H=H, **common)
    if kind == "diloco":
        return strategies.DiLoCoStrategy(inner, outer, H, **common)
    if kind == "sparta":
        return strategies.SPARTAStrategy(inner, p_sparta=P, **common)
    if kind == "sparta_diloco":
        return strategies.SPARTADiLoCoStrategy(inner, outer, P, 2, H, **common)
    compression = {"compression_topk": DEMO["k"], "compression_chunk": DEMO["chunk"]}
    return strategies.DeMoStrategy(optim_spec=inner, weight_decay=DEMO["weight_decay"], **compression, **common)


def connect(backend: str, rank: int, world_size: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(backend, rank=rank, world_size=world_size)


def trace(kind: str, num_nodes: int, port: int) -> dict[str, Any]:
    """Loss of each step and node, and each node's parameters after the last of them (which one more step sees)."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = importlib.import_module("exogym.trainer").Trainer(Watched(folder), dataset(), dataset(), port)
        trainer.fit(
            1, strategy(kind), num_nodes, max_steps=STEPS + 1, batch_size=BATCH_SIZE, minibatch_size=BATCH_SIZE,
            val_size=0, device="cpu", disable_logging=True,
        )  # fmt: skip
        rows = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_nodes)]
    losses = [[row[t][0] for row in rows] for t in range(STEPS)]
    return {"kind": kind, "num_nodes": num_nodes, "losses": losses, "seen": [row[STEPS][1] for row in rows]}


def main() -> None:
    traces = [trace(kind, K, 20000 + 20 * i + 5 * K) for i, kind in enumerate(KINDS) for K in NUM_NODES]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, traces)) + "\n]\n")


if __name__ in ("__main__", "__mp_main__"):
    importlib.import_module("exogym.trainer").init_process_group_portsafe = connect  # type: ignore[attr-defined]
if __name__ == "__main__":
    main()
