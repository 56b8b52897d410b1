"""Golden traces: what short runs of everything gave, to the bit. `python -m tests.golden --write` writes them anew.

Each run leaves a hash of its losses, of all nodes' final parameters and of its bytes, and a few numbers for a processor
or a torch with which the last bits differ. The traces are made with the instructions that every x86 processor has, one
thread.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: libraries choose their kernels then.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip
FILE = Path(__file__).with_name("golden.json")
SHARES = 6


def computed_by() -> dict[str, str]:
    """The processor and torch of this run: bits are compared with those of the same ones."""
    import torch

    model = next((line for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    return {
        "processor": f"{model.partition(':')[2].strip()}, {platform.machine()}",
        "torch": torch.__version__,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def cases() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The name of each run, and what makes it."""
    import torch

    from tests import fitting
    from tests.models import make_model
    from vecgym import optim, rollout, strategy, sweep
    from vecgym.data import Batches

    K, steps = 4, 8
    options: dict[str, Any] = {"lr": 0.01}
    slow = optim.OptimSpec(torch.optim.SGD, lr=0.02, momentum=0.9)
    strategies: dict[str, Callable[[], Any]] = {
        "AllReduce": lambda: strategy.AllReduceStrategy("adamw", max_norm=0.5, **options),
        "FedAvg": lambda: strategy.FedAvgStrategy("adamw", H=3, **options),
        "FedAvg islands": lambda: strategy.FedAvgStrategy(slow, H=2, island_size=2),
        "FedAvg participation": lambda: strategy.FedAvgStrategy(slow, H=2, participation=0.5),
        "FedAvg server": lambda: strategy.FedAvgStrategy(slow, H=2, server_optim="adam", participation=0.5),
        "DiLoCo": lambda: strategy.DiLoCoStrategy("adamw", "sgd", H=3, warmup_steps=2, **options),
        "DiLoCo int8": lambda: strategy.DiLoCoStrategy("adamw", H=2, compression="int8", **options),
        "DiLoCo topk": lambda: strategy.DiLoCoStrategy("adamw", H=2, compression="topk", **options),
        "SPARTA": lambda: strategy.SPARTAStrategy(0.3, "adamw", **options),
        "SPARTA late": lambda: strategy.SPARTAStrategy(0.3, "adamw", delay=2, **options),
        "SPARTA topk": lambda: strategy.SPARTAStrategy(0.3, "adamw", compression_method="topk", **options),
        "SPARTA DiLoCo": lambda: strategy.SPARTADiLoCoStrategy(p_sparta=0.2, inner_optim="adamw", H=3, **options),
        "Gossip ring": lambda: strategy.GossipStrategy("ring", inner_optim="adamw", **options),
        "Gossip matching": lambda: strategy.GossipStrategy("random_matching", inner_optim=slow),
        "DeMo": lambda: strategy.DeMoStrategy(compression_topk=4, compression_chunk=8, **options),
        "composed": lambda: strategy.CommunicateOptimizeStrategy(
            [strategy.Exchange(strategy.Mean(), delay=1, late="change", unit=2),
             strategy.Exchange(strategy.Compressed(strategy.Mean(), "sign", reference=True), every=3)],
            "radam", **options,
        ),
    }  # fmt: skip
    dtypes = {"float32": torch.float32, "float64": torch.float64}

    def fitted(name: str, model: str, dtype: str, **settings: Any) -> dict[str, Any]:
        data = fitting.dataset(model, 48, dtype=dtypes[dtype])
        given = {"num_nodes": K, "max_steps": steps, "data": data, "val": data, "val_interval": 4, "node_threads": 1}
        trainer, _ = fitting.fit(model, strategies[name](), dtype=dtypes[dtype], **{**given, **settings})
        losses = [torch.as_tensor(x) for x in trainer.history.series("train_losses")[1]]
        losses += [torch.tensor(x, dtype=torch.float64) for x in trainer.history.series("val_loss")[1]]
        return trace(losses, trainer.nodes.params | trainer.nodes.buffers, trainer.ledger.total_bytes)

    def swept(name: str) -> dict[str, Any]:
        data = fitting.dataset("MLP", 48, dtype=torch.float64)

        result = sweep(
            make_model("MLP", dtype=torch.float64), data, data, strategy=lambda: strategies[name](),
            grid={"seed": [0, 1]}, num_nodes=K, max_steps=steps, batch_size=4, progress=False, device="cpu",
        )  # fmt: skip
        runs = [result.history(i) for i in range(2)]
        losses = [torch.as_tensor(x) for run in runs for x in run.series("train_losses")[1]]
        losses += [torch.tensor(run.last("val_loss"), dtype=torch.float64) for run in runs]
        return trace(losses, {}, sum(run.last("bytes_total") for run in runs))

    def unrolled(name: str) -> dict[str, Any]:
        data = fitting.dataset("MLP", 48, dtype=torch.float64)
        batches = list(Batches(data, K, 4).iterate(0, 4))
        model = make_model("MLP", dtype=torch.float64)
        outcome = rollout(model, strategies[name](), batches, num_nodes=K, eval_batch=data[:8])
        return trace([outcome.losses, outcome.loss], outcome.params, float(outcome.bytes.sum()))

    for dtype in dtypes:
        for engine in ("vmap", "loop"):
            for name in strategies:
                yield f"fit {engine} {dtype} {name}", lambda n=name, d=dtype, e=engine: fitted(n, "MLP", d, engine=e)  # type: ignore[misc]
        for model in ("CNN", "GPT", "LSTM"):
            yield f"fit auto {dtype} DiLoCo {model}", lambda m=model, d=dtype: fitted("DiLoCo", m, d)  # type: ignore[misc]
    for name in ("AllReduce", "FedAvg participation", "DiLoCo", "SPARTA", "Gossip ring", "DeMo"):
        yield f"sweep {name}", lambda n=name: swept(n)  # type: ignore[misc]
        yield f"rollout {name}", lambda n=name: unrolled(n)  # type: ignore[misc]
    for name in ("FedAvg islands", "DiLoCo", "Gossip ring"):
        settings = {"backend": "processes", "num_processes": 2, "exact": True}
        yield f"processes {name}", lambda n=name, s=settings: fitted(n, "MLP", "float64", **s)  # type: ignore[misc]


class Each:
    """Short runs of one strategy in every way in which there are runs; see `tests.fuzz.strategies.KINDS`."""

    K, STEPS = 4, 6
    WAYS = ("fit", "absent", "rejoining", "resumed", "sweep", "rollout", "processes")

    def __init__(self, name: str) -> None:
        import torch

        from tests import fitting
        from tests.fuzz.strategies import ASYNCHRONOUS
        from tests.models import make_model
        from vecgym.clock import Compute

        self.name, self.late = name, name in ASYNCHRONOUS
        self.data = fitting.dataset("MLP", 48, dtype=torch.float64)
        self.val = torch.utils.data.Subset(self.data, range(8))
        self.model = make_model("MLP", dtype=torch.float64)
        self.options: dict[str, Any] = {"batch_size": 4, "progress": False, "device": "cpu"}
        self.options["max_updates" if self.late else "max_steps"] = self.STEPS
        if self.late:
            self.options["compute"] = Compute([1.0, 1.3, 1.9, 2.7])

    def strategy(self) -> Any:
        from tests.fuzz.strategies import make

        return make(self.name, H=2, p=0.3, inner_optim="adamw", lr=0.01, warmup_steps=2)

    def run(self, way: str) -> dict[str, Any]:
        """The remains of a run; of a refused one, the refusal."""
        try:
            found: dict[str, Any] = getattr(self, way)()
        except ValueError as error:
            return {
                "losses": f"refused: {type(error).__name__}",
                "params": "",
                "bytes": 0.0,
                "last_loss": 0.0,
                "norms": [],
            }
        return found

    def fit(self, **settings: Any) -> dict[str, Any]:
        import torch

        from vecgym import Trainer

        trainer = Trainer(self.model, self.data, self.val)
        average = trainer.fit(self.strategy(), self.K, val_interval=3, **{**self.options, **settings})
        losses = [torch.as_tensor(x) for x in trainer.history.series("train_losses")[1]]
        losses += [torch.tensor(x, dtype=torch.float64) for x in trainer.history.series("val_loss")[1]]
        values = {**trainer.nodes.params, **{f"{name} of all": p.detach() for name, p in average.named_parameters()}}
        return trace(losses, values, trainer.ledger.total_bytes)

    def absent(self, rejoin: Any = "own") -> dict[str, Any]:
        import torch

        from vecgym.availability import Trace

        there = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 1, 0]])
        return self.fit(availability=Trace(there.bool(), rejoin=rejoin))

    def rejoining(self) -> dict[str, Any]:
        return self.absent("shared")

    def resumed(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            self.fit(save_dir=folder, checkpoint_interval=3)
            return self.fit(resume=Path(folder) / "step-000000003.pt")

    def processes(self) -> dict[str, Any]:
        return self.fit(backend="processes", num_processes=2, exact=True)

    def sweep(self) -> dict[str, Any]:
        import torch

        from vecgym import sweep

        result = sweep(
            self.model, self.data, self.val, strategy=self.strategy, grid={"seed": [0, 1]}, num_nodes=self.K,
            **self.options,
        )  # fmt: skip
        runs = [result.history(i) for i in range(2)]
        losses = [torch.as_tensor(x) for run in runs for x in run.series("train_losses")[1]]
        losses += [torch.tensor(run.last("val_loss"), dtype=torch.float64) for run in runs]
        return trace(losses, {}, sum(run.last("bytes_total") for run in runs))

    def rollout(self) -> dict[str, Any]:
        from vecgym import rollout
        from vecgym.data import Batches

        given = {"compute": self.options["compute"], "max_updates": 3} if self.late else {"num_examples": (5, 2, 3, 2)}
        count = 12 if self.late else 4
        batches = list(Batches(self.data, self.K, 4).iterate(0, count))
        outcome = rollout(self.model, self.strategy(), batches, num_nodes=self.K, eval_batch=self.data[:8], **given)
        return trace([outcome.losses, outcome.loss], outcome.params, float(outcome.bytes.sum()))


def every_strategy() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every strategy in every way."""
    from tests.fuzz.strategies import KINDS

    for name in KINDS:
        for way in Each.WAYS:
            yield f"{way} {name}", lambda n=name, w=way: Each(n).run(w)  # type: ignore[misc]


def trace(losses: list[Any], values: dict[str, Any], num_bytes: float) -> dict[str, Any]:
    """The bits of a run as hashes, and numbers that tell how far another run is from it."""
    return {
        "losses": _hash(losses),
        "params": _hash([values[name] for name in sorted(values)]),
        "bytes": float(num_bytes),
        "last_loss": float(losses[-1].double().mean()),
        "norms": [float(values[name].double().norm()) for name in sorted(values)],
    }


def _hash(tensors: list[Any]) -> str:
    import torch

    digest = hashlib.sha256()
    for x in tensors:
        digest.update(f"{x.dtype} {list(x.shape)}".encode())
        digest.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"into {FILE.name}, in place of standard output")
    about = "compute only every sixth trace, from this one on"
    parser.add_argument("--share", type=int, choices=range(1, SHARES + 1), help=about)
    args = parser.parse_args()
    os.environ.update(PORTABLE)
    import warnings

    from vecgym.engine import recorded

    warnings.simplefilter("ignore")
    recorded.MIN_PASSES = 1  # lists of operations have the bits of vmap, also in runs that are too short for them
    everything = itertools.chain(cases(), every_strategy())
    share = itertools.islice(everything, args.share - 1, None, SHARES) if args.share else everything
    traces = {name: make() for name, make in share}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(trace)}" for name, trace in traces.items())
    text = f'{{\n "computed_by": {json.dumps(computed_by())},\n "traces": {{\n{lines}\n }}\n}}'
    if args.write:
        FILE.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
