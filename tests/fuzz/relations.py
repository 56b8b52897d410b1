"""Relations that hold for every strategy, whatever it computes, between what the library says in two ways.

returned   the model that `fit` returns is the mean of the nodes that were there in the last step, or the server's; it
           is what `save` and the last checkpoint hold, what the last row has evaluated, and what the nodes are far from
priced     the history's seconds are those of `timeline`, of `price`, and of a dry run
swept      a row of a sweep is the `fit` of its configuration
conserved  without a server, nodes send as much as they receive
permuted   other names for the nodes give the same results under these names
absent     nodes that are never there are as if they were not
resumed    a run that goes on from a checkpoint is the one that was never interrupted, to the bit
engines    the loop over the nodes is all nodes at once
processes  nodes on several processes are those of one
spelled    exchanges in other words that mean the same

A relation needs no second program, and finds what both a program and its twin, written from one sheet, have wrong.
"""

from __future__ import annotations

import copy
import math
import pprint
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import vecgym
from tests.fuzz import building, problems, strategies
from tests.fuzz.common import Case, Failure, Outcome, Refusal, crash, deliberate
from tests.fuzz.configurations import difference, nudged
from tests.fuzz.place import a_new_folder
from tests.fuzz.settings import SMOOTH, Settings, optimizer, simpler, some
from vecgym import DivergenceError, OptimSpec, Trainer, dry_run, sweep
from vecgym.availability import Trace
from vecgym.clock import Compute, Network, price
from vecgym.records.columns import MEASURED
from vecgym.strategy import Strategy

NAME = "relations"
TOLERANCE = 1e-9

DEFAULTS: Settings = {
    "relation": "returned",
    "strategy": "diloco",
    "num_nodes": 3,
    "max_steps": 6,  # of an asynchronous run: updates
    "model": "perceptron",
    "inner": {"name": "sgd"},
    "H": 2,
    "p": 0.3,
    "batch_size": 3,
    "uneven": False,  # the nodes' data
    "decaying": False,
    "warmup_steps": 0,
    "max_norm": None,
    "engine": "auto",
    "availability": None,  # the part of the time that a node is there
    "never": 0,  # nodes that are never there
    "rejoin": "own",
    "clock": None,  # "one" for all, "each" node has its own, "pairs"
    "routes": {},  # of the network: "all_reduce", "all_gather", "bucket_bytes"
    "overlap": True,
    "val_interval": None,
}
MODELS = sorted({*problems.MODELS, *problems.ODD} - {"recurrent", "named", "matrices", *problems.REFUSED})
TIMED = {*MEASURED, "nodes_per_call"}


def cases(seed: int, count: int) -> Iterator[Case]:
    """Every strategy in turn, each time in another relation."""
    names, relations = list(strategies.KINDS), list(RELATIONS)
    for i in range(count):
        draw = Random(f"relation {seed} {i}")
        name, shift = names[i % len(names)], i // len(names)
        possible = [relation for relation in relations if fits(relation, name)]
        yield Case(draw_case(draw, possible[(i + shift) % len(possible)], name), draw.randrange(1000))


def fits(relation: str, name: str) -> bool:
    kind = strategies.KINDS[name]
    if relation == "conserved":
        return not kind.server and (name not in strategies.ASYNCHRONOUS or name == "ad-psgd")
    if relation == "permuted":
        return kind.nameless
    return relation != "absent" or name not in strategies.ASYNCHRONOUS


def draw_case(draw: Random, relation: str, name: str) -> Settings:
    choosy, late = strategies.KINDS[name].choosy, name in strategies.ASYNCHRONOUS
    inner: tuple[str, ...] = SMOOTH if choosy else ("sgd", "adam", "adamw", "rmsprop", "adagrad")
    if strategies.needs_moments(name):
        inner = ("adam", "adamw")
    s: Settings = {
        "relation": relation, "strategy": name, "num_nodes": draw.choice([2, 3, 4, 4, 5, 6]),
        "model": draw.choice(MODELS), "H": draw.choice([1, 2, 3]), "p": draw.choice([0.1, 0.3, 0.5]),
        "inner": optimizer(draw, inner, per_node=False),
        **some(draw, 0.5, max_steps=[4, 7, 9, 12], batch_size=[2, 4], val_interval=[2, 3]),
        **some(draw, 0.3, uneven=True, decaying=True, max_norm=[0.5, 0.1], warmup_steps=[1, 3], engine="loop"),
        **some(draw, 0.8 if relation == "priced" or late else 0.4, clock=["one", "each", "each", "pairs"]),
    }  # fmt: skip
    if s.get("clock") and relation != "conserved" and draw.random() < 0.5:  # a store is no node
        reduces = ["ring", "tree", "halving_doubling", "gloo", "server"]
        s["routes"] = some(draw, 0.6, bucket_bytes=[0, 100, math.inf], all_gather=["ring", "direct", "server", "tree"])
        s["routes"] |= {} if late else some(draw, 0.6, all_reduce=reduces)
        if relation == "permuted":  # in a tree nodes have places
            s["routes"] = some(draw, 0.6, bucket_bytes=[0, 100, math.inf], all_reduce=["ring", "server"])
    if s["model"] == "convolution":
        s["batch_size"] = draw.choice([2, 3, 4])
    if not late:
        s |= some(draw, 0.5, availability=[0.5, 0.7, 0.9], rejoin=["own", "shared"])
        s |= some(draw, 0.3, never=[1, 2], overlap=False)
        if draw.random() < 0.2 and relation not in ("permuted", "absent"):  # a neighbour is drawn by its number
            s["rejoin"] = "neighbour"
    if relation == "permuted":
        if late and s.get("clock") == "one":  # who comes at one time is in the order of the names
            s["clock"] = "each"
        if s.get("clock"):  # which node sends to one that returns is a matter of names
            s.pop("rejoin", None)
    if relation == "absent":
        s["never"] = draw.choice([1, 1, 2])
        if name == "noloco" and s["num_nodes"] == 2:  # one group of all, which have what they remember together
            s["num_nodes"] = 3
        by_server = strategies.KINDS[name].server or "server" in s.get("routes", {}).values()
        if by_server and s.get("clock") == "pairs":  # a server is as far as from the farthest node
            s["clock"] = "each"
    if strategies.needs_even(name):
        s["num_nodes"], s["never"] = 4 + s.get("never", 0), s.get("never", 0)
        s.pop("availability", None)
    if s.get("decaying"):
        s.pop("warmup_steps", None)
    return s


def smaller(case: Case) -> Iterator[Case]:
    for settings in simpler(case.settings):
        if {"relation", "strategy"} <= settings.keys():
            yield Case(settings, case.seed)


def reproducer(case: Case) -> str:
    settings = pprint.pformat(dict(case.settings), width=100, sort_dicts=False)
    call = f"print(relations.run(Case(settings, {case.seed})))"
    return f"from math import inf\nfrom tests.fuzz import Case, relations\n\nsettings = {settings}\n{call}"


def run(case: Case) -> Outcome:
    unknown = case.settings.keys() - DEFAULTS.keys()
    if unknown:
        raise KeyError(f"no such settings: {sorted(unknown)}")
    s = {**DEFAULTS, **case.settings}
    try:
        world = WORLDS[type(s["strategy"])].of(s, case.seed)
        world.fit()
    except (ValueError, TypeError) as error:
        return Refusal(f"{type(error).__name__}: {error}") if deliberate(error) else crash(error)
    except DivergenceError:
        return Refusal("not compared: the run diverges")
    with a_new_folder() as folder:
        try:
            gaps = {**RELATIONS, **FURTHER}[s["relation"]](world, folder)
        except (ValueError, TypeError) as error:
            said = f"{type(error).__name__}: {error}"
            if deliberate(error) and s["relation"] in ("permuted", "absent"):  # fewer nodes may be too few
                return Refusal(said)
            return Failure(f"{s['relation']} refuses what fit trains", said) if deliberate(error) else crash(error)
    what = next((name for name, gap in gaps.items() if not gap <= TOLERANCE), None)
    if what is None:
        return None
    if s["relation"] in ("permuted", "absent", "swept") and gaps[what] <= 1e3 * world.rounding():
        return Refusal("not compared: rounding decides, the run differs from itself")
    shown = ", ".join(f"{name} {gap:.2g}" for name, gap in gaps.items() if gap > 0)
    with_absent = " with absent nodes" if world.table is not None and s["relation"] != "absent" else ""
    return Failure(f"{s['relation']}, {what}: {named(s)}{with_absent}", f"relative differences: {shown}")


def kind_of(s: Settings) -> strategies.Kind:
    """The strategy's kind: one of those that have names, or of what exchanges are given as settings."""
    strategy = s["strategy"]
    return strategies.KINDS[strategy] if isinstance(strategy, str) else strategies.product_kind(strategy)


def named(s: Settings) -> str:
    strategy = s["strategy"]
    return strategy if isinstance(strategy, str) else " x ".join(exchange["kind"] for exchange in strategy)


# ------------------------------------------------------------------------------------------------------------- a run


@dataclass
class World:
    """The inputs of a run. `order`: the case's node that each node is; a part of them, or others in their places."""

    settings: Settings
    seed: int
    order: list[int]
    table: Tensor | None  # bool [T, K of the case]: who is there
    compute: Compute
    network: Network | None
    trainer: Any = None
    average: Any = None

    @classmethod
    def of(cls, s: Settings, seed: int) -> World:
        K, draw = s["num_nodes"] + s["never"], Random(f"world {seed}")
        return cls(s, seed, list(range(K)), table_of(s, K, draw), *clock_of(s, K, draw))

    def other(self, order: Sequence[int]) -> World:
        """The same run of some of these nodes, or in another order."""
        members = torch.tensor([self.order[i] for i in order])
        table = None if self.table is None else self.table[:, members]
        if table is not None and bool(table.all()) and not kind_of(self.settings).resting:
            table = None
        compute = self.compute
        if compute.num_nodes is not None:
            compute = Compute(compute.seconds[members], overlap=compute.overlap)
        network = None if self.network is None else self.network.within(members.tolist())
        return type(self)(self.settings, self.seed, members.tolist(), table, compute, network)

    @property
    def late(self) -> bool:
        return kind_of(self.settings).late

    def model(self) -> nn.Module:
        return problems.make_model(self.settings["model"], self.seed)

    def data(self, rank: int, num_nodes: int, train: bool) -> Any:
        """Each node has its own examples, whatever it is called; they are read in their order."""
        node, uneven = self.order[rank], self.settings["uneven"]
        start = 13 * node
        size = 12 - 2 * (node % 3) if uneven else 12
        whole = problems.dataset(self.settings["model"], "tensor", start + size, self.seed)
        return Subset(whole, range(start, start + size))

    def validation(self) -> Any:
        return problems.dataset(self.settings["model"], "tensor", 7, self.seed + 1)

    def strategy(self, lr: float = 1.0) -> Any:
        s = self.settings
        options = building.keywords(s["inner"])
        spec = OptimSpec(building.CLASSES[s["inner"]["name"]], **{**options, "lr": lr * options["lr"]})
        return strategies.make(
            s["strategy"], s["H"], s["p"], inner_optim=spec, max_norm=s["max_norm"], warmup_steps=s["warmup_steps"],
            lr_scheduler=decaying if s["decaying"] else None,
        )  # fmt: skip

    def options(self) -> dict[str, Any]:
        """Of `fit` and of `sweep`."""
        s = self.settings
        found = {"max_updates" if self.late else "max_steps": s["max_steps"], "batch_size": s["batch_size"]}
        found |= {"shuffle": False, "device": "cpu", "progress": False, "node_threads": 1, "engine": s["engine"]}
        if self.table is not None:
            found["availability"] = Trace(self.table, rejoin=s["rejoin"])
        if self.network is not None or self.late:
            found |= {"network": self.network, "compute": self.compute}
        return {**found, "val_interval": s["val_interval"]}

    def fit(self, nudge: int = 0, **more: Any) -> World:
        """Train, and keep the trainer and the model that is returned."""
        self.trainer = Trainer(nudged(self.model(), nudge), self.data, self.validation())
        self.average = self.trainer.fit(self.strategy(), len(self.order), seed=self.seed, **self.options(), **more)
        return self

    @property
    def num_steps(self) -> int:
        return len(self.trainer.history.rows) - 1

    def column(self, name: str) -> list[float]:
        """Its records after each step."""
        rows = self.trainer.history.rows[1:]
        return [float(row[name]) for row in rows if row.get(name) is not None]

    def losses(self) -> Tensor:
        """Of each step and node, `[T, K]`."""
        return torch.stack([torch.as_tensor(row["train_losses"]) for row in self.trainer.history.rows[1:]])

    def rows(self) -> str:
        """The history but for what depends on the moment."""
        rows = self.trainer.history.rows
        return str([sorted((name, str(x)) for name, x in row.items() if name not in TIMED) for row in rows])

    def of_nodes(self) -> dict[str, Tensor]:
        """Parameters and floating buffers of the nodes, `[K, *]`."""
        values = {**self.trainer.nodes.params, **self.trainer.nodes.buffers}
        return {name: x for name, x in values.items() if x.is_floating_point()}

    def returned(self) -> dict[str, Tensor]:
        return floating(dict(self.average.state_dict()))

    def rounding(self) -> float:
        """The distance at which the run ends from itself if its parameters begin 1e-14 away."""
        mine, moved = self.returned(), [self.other(range(len(self.order))).fit(nudge=n).returned() for n in (1, 2)]
        return max(difference(x, mine) for x in moved)


@dataclass
class Product(World):
    """A run of exchanges that are given as settings."""

    spelling: int = 0  # another way to say the same

    def strategy(self, lr: float = 1.0) -> Any:
        s = self.settings
        options = building.keywords(s["inner"])
        spec = OptimSpec(building.CLASSES[s["inner"]["name"]], **{**options, "lr": lr * options["lr"]})
        return Strategy(
            spec, [strategies.exchange(x, self.order, self.spelling) for x in s["strategy"]], max_norm=s["max_norm"],
            warmup_steps=s["warmup_steps"], lr_scheduler=decaying if s["decaying"] else None,
        )  # fmt: skip


WORLDS: dict[type, type[World]] = {str: World, list: Product}


def table_of(s: Settings, num_nodes: int, draw: Random) -> Tensor | None:
    """The nodes that are there, some in each step. Nodes that never are have no more data than others."""
    if not (s["availability"] or s["never"]) or kind_of(s).late:
        return None
    chance = s["availability"] or 1.0
    rows = [[draw.random() < chance for _ in range(num_nodes)] for _ in range(s["max_steps"])]
    for node in never(s, num_nodes, draw):
        for row in rows:
            row[node] = False
    there = [node for node in range(num_nodes) if node not in never(s, num_nodes, draw)]
    for row in rows:
        row[draw.choice(there)] |= not any(row)
    return torch.tensor(rows)


def never(s: Settings, num_nodes: int, draw: Random) -> list[int]:
    """The last ones, where nodes have names; else any of them but the first, which has the most data."""
    if not kind_of(s).nameless:
        return list(range(s["num_nodes"], num_nodes))
    return Random(f"never {num_nodes} {s['never']} {s['H']}").sample(range(1, num_nodes), s["never"])


def clock_of(s: Settings, num_nodes: int, draw: Random) -> tuple[Compute, Network | None]:
    seconds = [draw.uniform(0.3, 2.0) for _ in range(num_nodes)]
    compute = Compute(1.0 if s["clock"] == "one" else seconds, overlap=s["overlap"])
    paces = [[draw.uniform(1e3, 1e4) for _ in range(num_nodes)] for _ in range(num_nodes)]
    lags = [[draw.uniform(0.0, 0.2) for _ in range(num_nodes)] for _ in range(num_nodes)]
    if s["clock"] is None:
        return compute, None
    if s["clock"] == "one":
        return compute, Network(4e3, 0.1, **s["routes"])
    if s["clock"] == "each":
        return compute, Network(up=paces[0], down=paces[-1], latency=lags[0], **s["routes"])
    return compute, Network(paces, lags, **s["routes"])


def decaying(step: int) -> float:
    return 0.9**step


def floating(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in values.items() if isinstance(x, Tensor) and x.is_floating_point()}


# ---------------------------------------------------------------------------------------------------- the relations


def returned(world: World, folder: Path) -> dict[str, float]:
    trainer, mine = world.trainer, world.returned()
    trainer.save(folder / "run.pt")
    saved = vecgym.load(folder / "run.pt")
    gaps = {"saved": difference(floating(saved.average), mine)}
    last = len(world.order) - 1
    node = floating(saved.node(last))
    own = floating(dict(trainer.nodes.module(last).state_dict()))
    gaps["saved node"] = difference(node, own)
    world.fit(save_dir=folder / "run")
    gaps["checkpoint"] = difference(floating(vecgym.load(sorted((folder / "run").glob("step-*.pt"))[-1]).average), mine)
    gaps["evaluated"] = difference(world.column("val_loss")[-1], evaluated(world))
    there = world.of_nodes()
    if world.table is not None:
        there = {name: x[world.table[world.num_steps - 1]] for name, x in there.items()}
    elif trainer.nodes.members is not None:  # without a server who was never drawn is not in the model
        there = {name: x[list(trainer.nodes.members)] for name, x in there.items()}
    names = [name for name, x in there.items() if name in mine]
    if world.late and world.settings["strategy"] != "ad-psgd":
        server = {name: x[0] for name, x in trainer.state.params.items()}
        gaps["the server's"] = difference(of_model(world, server), server)
    elif not kind_of(world.settings).shared and not (world.table is not None and kind_of(world.settings).resting):
        gaps["the mean"] = difference({n: there[n].mean(0) for n in names}, {n: mine[n] for n in names})
        apart = [there[n] - there[n].mean(0, keepdim=True) for n in names if n in trainer.nodes.params]
        far = math.sqrt(sum(float(x.square().sum()) / len(x) for x in apart))
        gaps["consensus distance"] = difference(world.column("consensus_distance")[-1], far)
    return gaps


def of_model(world: World, names: Any) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in world.average.named_parameters() if name in names}


def evaluated(world: World) -> float:
    """The mean loss of the returned model over the validation set."""
    data = problems.tensors(world.settings["model"], 7, world.seed + 1)
    with torch.no_grad():  # of a copy, which may write to itself
        return float(copy.deepcopy(world.average).eval()(problems.as_batch(world.settings["model"], data)))


def priced(world: World, folder: Path) -> dict[str, float]:
    trainer = world.trainer
    if world.late:
        timeline = trainer.timeline()
        return {"timeline": difference(timeline.update_seconds.tolist(), world.column("sim_seconds"))}
    if world.network is None:
        return {}
    seconds, used = world.column("sim_seconds"), world.column("sim_utilization")
    timeline = trainer.timeline(world.network, world.compute)
    gaps = {
        "timeline": difference(timeline.step_seconds.tolist(), seconds),
        "price": difference(float(price(trainer.ledger, world.network, world.compute).seconds), seconds[-1]),
        "utilization": difference(timeline.step_utilization.tolist(), used),
    }
    if world.table is None:
        dry = dry_run(world.model(), world.strategy(), len(world.order), world.num_steps, seed=world.seed)
        gaps["dry run"] = difference(float(price(dry, world.network, world.compute).seconds), seconds[-1])
        gaps["dry bytes"] = difference(dry.routed(world.network.routes).total_bytes, trainer.ledger.total_bytes)
    return gaps


def swept(world: World, folder: Path) -> dict[str, float]:
    rates = [1.0, 0.5]
    result = sweep(
        world.model(), world.data, world.validation(), grid={"strategy": [world.strategy(lr) for lr in rates]},
        num_nodes=len(world.order), seed=world.seed, keep_models=True, **world.options(),
    )  # fmt: skip
    if any(row["status"] != "finished" for row in result.rows):
        return {"status": math.inf}
    history, row = result.history(0), result.rows[0]
    # What a network says is in the rows, of which there may be several for one history.
    of_network = ["sim_seconds", "sim_utilization"] if world.network is not None and not world.late else []
    if world.network is not None and world.network.routes:
        of_network += ["bytes_step", "bytes_total", "bytes_received_total"]
    gaps = {}
    for name in world.trainer.history.columns:
        if name in TIMED or name in of_network:
            continue
        found = [torch.as_tensor(x, dtype=torch.float64) for x in history[name] if x is not None]
        own = [torch.as_tensor(x, dtype=torch.float64) for x in world.trainer.history[name] if x is not None]
        gaps[name] = difference(torch.stack(found), torch.stack(own)) if found and own else float(found != own)
    for name in ("sim_seconds", "bytes_total") if world.network is not None else ():
        gaps[f"row's {name}"] = difference(float(row[name]), world.column(name)[-1])
    gaps["model"] = difference(floating(dict(result.model(0).state_dict())), world.returned())
    return gaps


def conserved(world: World, folder: Path) -> dict[str, float]:
    ledger = world.trainer.ledger
    gaps = {"total": difference(ledger.total_bytes, ledger.total_received_bytes)}
    gaps["history"] = difference(world.column("bytes_total")[-1], ledger.total_bytes)
    gaps["history, received"] = difference(world.column("bytes_received_total")[-1], ledger.total_received_bytes)
    gaps["entries"] = max((difference(x.sent_bytes, x.received_bytes) for x in ledger), default=0.0)
    return gaps


def permuted(world: World, folder: Path) -> dict[str, float]:
    order = list(range(len(world.order)))
    Random(f"order {world.seed}").shuffle(order)
    return compare(world, world.other(order).fit(), order)


def absent(world: World, folder: Path) -> dict[str, float]:
    assert world.table is not None
    there = [node for node in range(len(world.order)) if bool(world.table[:, node].any())]
    return compare(world, world.other(there).fit(), there)


def compare(world: World, other: World, order: Sequence[int]) -> dict[str, float]:
    """Node i of the other run is node `order[i]` of this one, which may have further ones that are never there."""
    gaps = {name: difference(other.column(name), world.column(name)) for name in ("val_loss", "sim_seconds")}
    gaps["train_losses"] = difference(other.losses(), world.losses()[:, list(order)])
    mine = {name: x[list(order)] for name, x in world.of_nodes().items()}
    if not world.late:  # those under way at the end are computed in other numbers
        gaps["nodes"] = difference(other.of_nodes(), mine)
    else:
        gaps["state"] = difference(dict(other.trainer.state.params), dict(world.trainer.state.params))
    gaps["model"] = difference(of_model(other, other.trainer.nodes.params), of_model(world, world.trainer.nodes.params))
    for name in ("bytes_total", "bytes_received_total"):
        gaps[name] = difference(other.column(name)[-1] * len(order), world.column(name)[-1] * len(world.order))
    return gaps


def resumed(world: World, folder: Path) -> dict[str, float]:
    saving = {"checkpoint_interval": 1, "keep_checkpoints": 100}
    whole = world.other(range(len(world.order))).fit(save_dir=folder / "whole", **saving)
    at = Random(f"at {world.seed}").randrange(whole.num_steps)
    again = world.other(range(len(world.order)))
    again.fit(save_dir=folder / "again", resume=folder / "whole" / f"step-{at:09d}.pt", **saving)
    gaps = {
        "saving": exact(whole.returned(), world.returned()),
        "model": exact(again.returned(), whole.returned()),
        "nodes": exact(again.of_nodes(), whole.of_nodes()),
        "ledger": float(list(again.trainer.ledger) != list(whole.trainer.ledger)),
    }
    gaps["rows"] = float(again.rows() != whole.rows())
    return gaps


def exact(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """0 for the same bits, inf for others."""
    return 0.0 if a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items()) else math.inf


def engines(world: World, folder: Path) -> dict[str, float]:
    """The other engine."""
    settings = {**world.settings, "engine": "auto" if world.settings["engine"] == "loop" else "loop"}
    return same(world, replace(world, settings=settings).fit())


def processes(world: World, folder: Path) -> dict[str, float]:
    """Nodes on as many processes as divide them."""
    count = len(world.order)
    number = next(n for n in (2, 3, 5, count) if count % n == 0)
    return same(world, world.other(range(count)).fit(backend="processes", num_processes=number))


def spelled(world: World, folder: Path) -> dict[str, float]:
    """Exchanges in other words that mean the same, such as a delay for each node that is the same for all."""
    assert isinstance(world, Product)
    other = replace(world, spelling=1).fit()
    if world.table is not None and len({"params" in x.trainer.state.shared for x in (world, other)}) > 1:
        return {}  # a returning node takes more where parameters are stored once for all: vecgym.availability says so
    return same(world, other)


def same(world: World, other: World) -> dict[str, float]:
    return compare(world, other, range(len(world.order)))


RELATIONS: dict[str, Callable[[World, Path], dict[str, float]]] = {
    "returned": returned,
    "priced": priced,
    "swept": swept,
    "conserved": conserved,
    "permuted": permuted,
    "absent": absent,
    "resumed": resumed,
}
FURTHER = {"engines": engines, "processes": processes, "spelled": spelled}  # fmt: skip
