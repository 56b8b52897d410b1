"""Random runs of `Trainer.fit` against naive twins: parameters, buffers, losses, bytes, learning rates, validation.

What the library draws at random itself is taken from it as data: masks by `Selector.select`, matchings by
`Mix.mixing`, participants by `Exchange.who_trains`, islands as its collectives are given them, the order of a
node's own dataset by `rng.generator(seed, "data", epoch, node)`, as `vecgym.data.Batches` documents it.

A run in which rounding decides is set aside: there the twin, started from parameters that differ by 1e-14, ends further
from itself than the tolerance.
"""

from __future__ import annotations

import copy
import math
import pprint
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, TensorDataset

from tests.fuzz import building, naive, problems
from tests.fuzz.common import Case, Failure, Outcome, Refusal, crash, deliberate
from tests.fuzz.settings import Settings, draw_settings, simpler, with_defaults
from vecgym import DivergenceError, Trainer
from vecgym.core import rng
from vecgym.data import EvalBatches

NAME = "configurations"
TOLERANCE = 1e-10
NUDGE = 1e-14


@dataclass
class Seen:
    """The compared parts of a run."""

    bytes: list[float] = field(default_factory=list)  # [steps]
    lr: list[float] = field(default_factory=list)  # [steps]: the mean over the nodes
    params: dict[str, Tensor] = field(default_factory=dict)  # [K, *]
    buffers: dict[str, Tensor] = field(default_factory=dict)  # [K, *]
    losses: list[list[float]] = field(default_factory=list)  # [steps][K]
    average: dict[str, Tensor] = field(default_factory=dict)
    validation: list[list[float]] = field(default_factory=list)  # of each evaluation: of the average, of each node
    distance: list[float] = field(default_factory=list)  # at the end


def cases(seed: int, count: int) -> Iterator[Case]:
    for i in range(count):
        draw = Random(f"{seed} {i}")
        yield Case(draw_settings(draw), draw.randrange(1000))


def smaller(case: Case) -> Iterator[Case]:
    for settings in simpler(case.settings):
        yield Case(settings, case.seed)
    if case.seed:
        yield Case(case.settings, 0)


def run(case: Case) -> Outcome:
    settings = with_defaults(case.settings)
    try:
        seen: Seen | None = of_library(settings, case.seed)
    except (ValueError, TypeError) as error:
        return Refusal(f"{type(error).__name__}: {error}") if deliberate(error) else crash(error)
    except DivergenceError:
        seen = None
    twin = of_twin(settings, case.seed)
    finite = all(math.isfinite(x) or math.isnan(x) for step in twin.losses for x in step)
    if not finite or any(not bool((x.abs() <= 1e8).all()) for x in twin.params.values()):
        return Refusal("not compared: the twin diverges too")
    if seen is None:
        return Failure("a divergence that the twin does not have", "DivergenceError")
    gaps = compare(seen, twin)
    what = next((name for name, gap in gaps.items() if not gap <= TOLERANCE), None)
    if what is None:
        return None
    if what not in ("bytes", "lr") and rounding_decides(settings, case.seed, twin, gaps):
        return Refusal("not compared: rounding decides, the twin differs from itself")
    shown = ", ".join(f"{name} {gap:.2g}" for name, gap in gaps.items())
    return Failure(f"{what}: {settings['strategy']['kind']}", f"relative differences: {shown}")


def compare(a: Seen, b: Seen) -> dict[str, float]:
    """The largest difference of each part, relative to the largest value if that is above 1."""
    return {name: difference(value, getattr(b, name)) for name, value in vars(a).items()}


def difference(a: Any, b: Any) -> float:
    if isinstance(a, Mapping):
        return max((difference(a[name], b[name]) for name in a), default=0.0) if a.keys() == b.keys() else math.inf
    x, y = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    if x.shape != y.shape or not torch.equal(x.isnan(), y.isnan()):
        return math.inf
    if x.numel() == 0:
        return 0.0
    x, y = x.nan_to_num(nan=0.0), y.nan_to_num(nan=0.0)
    return float((x - y).abs().max() / y.abs().max().clamp(min=1.0))


def rounding_decides(settings: Settings, seed: int, twin: Seen, gaps: dict[str, float]) -> bool:
    """Whether the twin, started a little elsewhere, ends about as far from itself as the library does."""
    moved = [compare(of_twin(settings, seed, nudge=i + 1), twin) for i in range(8)]
    return all(gap <= TOLERANCE or gap <= 1e3 * max(found[name] for found in moved) for name, gap in gaps.items())


# ------------------------------------------------------------------------------------------- the library's side


def of_library(settings: Settings, seed: int) -> Seen:
    data = Data.of(settings, seed)
    strategy = building.library_strategy(settings, settings["num_nodes"], data.max_steps)
    trainer = Trainer(
        problems.make_model(settings["model"], seed), data.train, data.val, loss_fn=problems.loss_fn(settings["model"])
    )
    length = {"num_epochs": settings["num_epochs"]} if settings["num_epochs"] else {"max_steps": data.max_steps}
    average = trainer.fit(
        strategy, settings["num_nodes"], **length, seed=seed, device="cpu", progress=False,
        dataloader_kwargs={"drop_last": True} if settings["drop_last"] else None,
        **{key: settings[key] for key in ("batch_size", "minibatch_size", "shuffle", "engine", "chunk_size",
                                          "node_threads", "exact", "val_interval")},
    )  # fmt: skip
    rows = trainer.history.rows
    seen = Seen(
        bytes=[row["bytes_step"] for row in rows if row["step"] > 0],
        lr=[row["lr"] for row in rows if row["step"] > 0],
        params=dict(trainer.nodes.params),
        buffers=dict(trainer.nodes.buffers),
        losses=[np.asarray(row["train_losses"]).tolist() for row in rows if row["step"] > 0],
        average=dict(average.state_dict()),
        validation=[[row["val_loss"], *row["val_losses"].tolist()] for row in rows if "val_loss" in row],
        distance=[rows[-1]["consensus_distance"]],
    )
    assert math.isclose(sum(seen.bytes), trainer.ledger.total_bytes), "the ledger's sum is not that of its steps"
    return seen


@dataclass
class Data:
    """The datasets, and which examples each node reads at each step."""

    tensors: tuple[Tensor, ...]  # of all training examples
    train: Any  # what Trainer is given
    val: Any
    val_tensors: tuple[Tensor, ...]
    own: list[list[int]] | None  # the examples of each node's own dataset; None: dealt out
    max_steps: int

    @classmethod
    def of(cls, settings: Settings, seed: int) -> Data:
        name, kind, count = settings["model"], settings["data"], settings["examples"]
        dataset = problems.dataset(name, kind, count, seed)
        own: list[list[int]] | None = None
        train: Any = dataset
        if kind in ("factory", "uneven"):
            own = deal(count, settings["num_nodes"], kind == "uneven")
            train = Factory(dataset, own)
        val = problems.dataset(name, "tensor", 7, seed + 1) if settings["val_interval"] else None
        data = cls(problems.tensors(name, count, seed), train, val, problems.tensors(name, 7, seed + 1), own, 0)
        per_epoch = data.steps_per_epoch(settings)
        data.max_steps = settings["num_epochs"] * per_epoch if settings["num_epochs"] else settings["max_steps"]
        return data

    def num_examples(self, num_nodes: int) -> tuple[int, ...]:
        if self.own is not None:
            return tuple(len(examples) for examples in self.own)
        return tuple(len(range(node, len(self.tensors[0]), num_nodes)) for node in range(num_nodes))

    def longest(self, num_nodes: int) -> int:
        return max(self.num_examples(num_nodes))

    def batch_size(self, settings: Settings) -> int:
        """Never more than a shard of a dataset that is dealt out."""
        longest = self.longest(settings["num_nodes"])
        return min(settings["batch_size"], longest) if self.own is None else settings["batch_size"]

    def steps_per_epoch(self, settings: Settings) -> int:
        whole, rest = divmod(self.longest(settings["num_nodes"]), self.batch_size(settings))
        return whole if settings["drop_last"] else whole + (rest > 0)

    def order(self, epoch: int, node: int, settings: Settings, seed: int) -> list[int]:
        """The examples that a node reads in an epoch."""
        num_nodes, shuffle = settings["num_nodes"], settings["shuffle"]
        if self.own is None:
            examples: Any = range(len(self.tensors[0]))
            sampler: DistributedSampler[int] = DistributedSampler(examples, num_nodes, node, shuffle, seed)
            sampler.set_epoch(epoch)
            return list(sampler)
        examples = self.own[node]
        places = list(range(len(examples)))
        if shuffle:
            places = torch.randperm(len(examples), generator=rng.generator(seed, "data", epoch, node)).tolist()
        return [examples[places[i % len(places)]] for i in range(self.longest(num_nodes))]

    def batches(self, settings: Settings, seed: int) -> list[list[tuple[Tensor, ...]]]:
        """`batches[step][node]`."""
        per_epoch, size = self.steps_per_epoch(settings), self.batch_size(settings)
        shards = self.num_examples(settings["num_nodes"])
        found = []
        for t in range(self.max_steps):
            epoch, place = divmod(t, per_epoch)
            orders = [self.order(epoch, node, settings, seed) for node in range(settings["num_nodes"])]
            here = [order[place * size : (place + 1) * size] for order in orders]
            if self.own is not None:  # a node that has fewer sees all of them in each step
                here = [chosen[:shard] for chosen, shard in zip(here, shards)]
            found.append([tuple(x[chosen] for x in self.tensors) for chosen in here])
        return found


class Factory:
    """Each node's own dataset."""

    def __init__(self, dataset: Any, own: list[list[int]]) -> None:
        self.dataset = dataset
        self.own = own

    def __call__(self, rank: int, num_nodes: int, train: bool) -> Any:
        return torch.utils.data.Subset(self.dataset, self.own[rank])


def deal(count: int, num_nodes: int, uneven: bool) -> list[list[int]]:
    """Blocks of the examples; uneven: the first node has half as many as the last."""
    shares = [1 + node / max(1, num_nodes - 1) if uneven else 1.0 for node in range(num_nodes)]
    ends = [round(count * sum(shares[: node + 1]) / sum(shares)) for node in range(num_nodes)]
    return [list(range(start, end)) for start, end in zip([0, *ends], ends)]


# ----------------------------------------------------------------------------------------------- the twin's side


def of_twin(settings: Settings, seed: int, nudge: int = 0) -> Seen:
    data, num_nodes = Data.of(settings, seed), settings["num_nodes"]
    model = nudged(problems.make_model(settings["model"], seed), nudge)
    shapes = {name: p.shape for name, p in naive.trained(model).items()}
    run = building.Run(num_nodes, data.max_steps, seed, data.num_examples(num_nodes), shapes)
    strategy = building.library_strategy(settings, num_nodes, data.max_steps)  # for what is drawn at random
    seen, base = Seen(), base_rates(settings)
    factor = [schedule(settings, t, data.max_steps) for t in range(data.max_steps)]
    is_demo = settings["strategy"]["kind"] == "demo"
    max_norm = settings["max_norm"]
    norms = building.scale("max_norm", num_nodes) if settings["max_norm_per_node"] else torch.ones(num_nodes)

    def optimizer(node: int, params: dict[str, Tensor]) -> torch.optim.Optimizer:
        if is_demo:
            decay = settings["strategy"].get("weight_decay", 0.0)
            return torch.optim.SGD(params.values(), lr=building.DEMO_LR, weight_decay=decay)
        return building.torch_optimizer(settings["inner"], settings["groups"], node, num_nodes, params)

    def observe(done: int, models: list[nn.Module], whose: naive.Whose) -> None:
        interval = settings["val_interval"]
        if interval and (done % interval == 0 or done == data.max_steps):
            seen.validation.append(validation(settings, seed, models, data, whose))

    plan = naive.Plan(
        model, [[problems.as_batch(settings["model"], x) for x in step] for step in data.batches(settings, seed)],
        run.num_examples, building.twin_modules(settings["strategy"], strategy, run), optimizer,
        rates=lambda t, node: factor[t], parts=lambda batch: parts(settings, batch),
        max_norm=[max_norm * float(x) for x in norms] if max_norm else None,
        sign=(lambda t, node: building.DEMO_LR * factor[t]) if is_demo else None, observe=observe,
        blur=blurring(nudge), drawing=partial(drawing if settings["model"] in problems.DRAWING else nothing, seed),
    )  # fmt: skip
    result = naive.train(plan)
    seen.bytes, seen.losses = result.sent, result.losses
    seen.lr = [sum(base) / len(base) * f for f in factor]
    seen.params = stacks([dict(m.named_parameters()) for m in result.models])
    seen.buffers = stacks([dict(m.named_buffers()) for m in result.models])
    seen.average = dict(mean_model(result.models, result.whose).state_dict())
    seen.distance = [distance([result.models[node] for node in result.whose.parameters], shapes)]
    return seen


def nudged(model: nn.Module, nudge: int) -> nn.Module:
    """The model with parameters that differ by 1e-14; 0: as it is."""
    g = torch.Generator().manual_seed(nudge)
    with torch.no_grad():
        for p in model.parameters() if nudge else ():
            p.mul_(1 + NUDGE * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return model


def blurring(nudge: int) -> Callable[[Tensor], Tensor]:
    """Rounding as it could be: relative differences of 1e-15; 0: none."""
    g = torch.Generator().manual_seed(nudge)

    def blur(x: Tensor) -> Tensor:
        return x * (1 + 0.1 * NUDGE * torch.randn(x.shape, generator=g, dtype=x.dtype)) if nudge else x

    return blur


def parts(settings: Settings, batch: Any) -> list[tuple[Any, float, int]]:
    """The micro-batches of a batch, which share of it each is, and where it begins."""
    name, leaves = settings["model"], batch if isinstance(batch, tuple) else tuple(batch.values())
    count, size = len(leaves[0]), settings["minibatch_size"] or len(leaves[0])
    cut = [tuple(x[i : i + size] for x in leaves) for i in range(0, count, size)]
    weights = [problems.weight(name, x) for x in cut]
    starts = range(0, count, size)
    total = max(1, sum(weights))
    return [(problems.as_batch(name, x), weight / total, i) for x, weight, i in zip(cut, weights, starts)]


@contextmanager
def drawing(seed: int, step: int, node: int, first: int) -> Iterator[None]:
    """The global generators of torch, numpy and Python, as a run sets them for a pass of one node."""
    key = rng.key(seed, "model", step, node, first)
    with torch.random.fork_rng(devices=[]), rng.private(rng.key(key, "host")):
        torch.default_generator.manual_seed(key)
        yield


def nothing(seed: int, step: int, node: int, first: int) -> AbstractContextManager[None]:
    return nullcontext()


def base_rates(settings: Settings) -> list[float]:
    """Each node's learning rate before any schedule."""
    num_nodes, inner = settings["num_nodes"], settings["inner"]
    if settings["strategy"]["kind"] == "demo":
        return [building.DEMO_LR] * num_nodes
    lr = float(building.keywords(inner).get("lr", 1.0))
    return (lr * building.scale("lr", num_nodes)).tolist() if "lr" in inner.get("per_node", ()) else [lr] * num_nodes


def schedule(settings: Settings, t: int, max_steps: int) -> float:
    """The factor of the learning rate at a step: a warm-up from 0, then constant or a cosine down to a tenth."""
    per_step = settings["per_step"] and settings["strategy"]["kind"] != "demo"
    own = float(building.step_scale(max_steps)[t]) if per_step else 1.0
    if settings["schedule"] == "function":
        return own * building.function(t)
    warmup = settings["warmup_steps"]
    if t < warmup:
        return own * t / warmup
    if settings["schedule"] != "cosine" and not settings["cosine_anneal"]:
        return own
    angle = math.pi * min(1.0, (t - warmup) / max(1, max_steps - warmup))
    return own * (0.1 + 0.9 * (1 + math.cos(angle)) / 2)


def validation(
    settings: Settings, seed: int, models: Sequence[nn.Module], data: Data, whose: naive.Whose
) -> list[float]:
    """The loss of the average, and of each node."""
    name, whole = settings["model"], [data.val_tensors]
    if name in problems.BATCHWISE:
        size = settings["minibatch_size"] or settings["batch_size"]
        read = EvalBatches(TensorDataset(*data.val_tensors), size, seed=seed)
        whole = [tuple(batch) for batch, _ in read]
    weights = [problems.weight(name, x) for x in whole]
    found = []
    with torch.no_grad():
        for model in (mean_model(models, whose), *models):
            evaluated = copy.deepcopy(model).eval()  # which may write to itself
            losses = [float(evaluated(problems.as_batch(name, x))) for x in whole]
            found.append(sum(loss * w for loss, w in zip(losses, weights) if w) / max(1, sum(weights)))
    return found


def mean_model(models: Sequence[nn.Module], whose: naive.Whose) -> nn.Module:
    """The mean of parameters and floating buffers; integers: the first node's."""
    average = copy.deepcopy(models[0])
    parameters = dict(average.named_parameters())
    with torch.no_grad():
        for name, x in average.state_dict(keep_vars=True).items():
            nodes = whose.parameters if name in parameters else whose.buffers
            values = [models[node].state_dict()[name] for node in nodes]
            x.copy_(sum(values[1:], values[0].clone()) / len(values) if x.is_floating_point() else values[0])
    return average


def distance(models: Sequence[nn.Module], names: Mapping[str, Any]) -> float:
    """The root of the mean over the nodes of the squared distance to the average."""
    rows = torch.stack([torch.cat([dict(m.named_parameters())[n].detach().flatten() for n in names]) for m in models])
    return float((rows - rows.mean(0)).square().sum(1).mean().sqrt())


def stacks(of_nodes: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([values[name].detach() for values in of_nodes]) for name in of_nodes[0]}


# --------------------------------------------------------------------------------------------------- reproducer


def reproducer(case: Case) -> str:
    settings = pprint.pformat(dict(case.settings), width=100, sort_dicts=False)
    strategy: Any
    try:
        full = with_defaults(case.settings)
        data = Data.of(full, case.seed)
        strategy = building.library_strategy(full, full["num_nodes"], data.max_steps)
    except (ValueError, TypeError) as error:
        strategy = error
    return (
        f"# {strategy!r}\nfrom tests.fuzz import Case, configurations\n\n"
        f"settings = {settings}\nprint(configurations.run(Case(settings, seed={case.seed})))"
    )
