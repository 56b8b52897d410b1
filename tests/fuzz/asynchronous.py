"""Random asynchronous runs of `Trainer.fit` against `eventloop`: who arrives when and how stale, losses, parameters.

Taken from the library as data: how long a step takes, `Compute.of_steps`; with whom a node of AD-PSGD averages,
`Neighbours`; which batch a node reads, as in `configurations`.

Settings say of what kind something is; its numbers are drawn from the case's seed. Times in powers of two tie often and
exactly, others never.
"""

from __future__ import annotations

import math
import pprint
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.fuzz import building, problems
from tests.fuzz import eventloop as loop
from tests.fuzz.common import Case, Failure, Outcome, Refusal, crash, deliberate
from tests.fuzz.configurations import NUDGE, Data, difference
from tests.fuzz.settings import Settings, optimizer, simpler, some, with_defaults
from vecgym import DivergenceError, OptimSpec, Trainer
from vecgym.clock import Compute, Network
from vecgym.strategy import (
    ADPSGDStrategy,
    AsyncStrategy,
    DecoupledDiLoCoStrategy,
    DelayedNesterov,
    FedBuff,
    HALoSStrategy,
    HeLoCo,
    OuterOptimizer,
    Server,
    Strategy,
)
from vecgym.strategy.decentralised.ad_psgd import Neighbours

NAME = "asynchronous"
TOLERANCE = 1e-9

DEFAULTS: Settings = {
    "kind": "rounds",  # "halos", "pairs", "fragments"
    "num_nodes": 2,
    "model": "perceptron",
    "inner": {"name": "sgd"},
    "batch_size": 3,
    "max_norm": None,
    "decaying": False,  # the learning rate
    "together": True,
    "engine": "auto",
    "speeds": "equal",  # "powers" of two, "uneven" in any ratio, "drawn" for each step
    "lines": None,  # "powers", "uneven", "matrix" of pairs
    "server_line": False,  # whether the server's own is bounded
    "bucket": None,  # bytes of a message; None: one carries the whole model
    "stop": "updates",  # "seconds", "steps"
    "length": 12,  # updates
    "server": {"name": "outer"},
    "H": 2,
    "rounds": "equal",  # "dylu", "given"
    "buffer": 1,
    "window": None,  # (max_wait, grace)
    "staleness": "none",  # "inverse_sqrt", "power"
    "regions": 1,
    "local_updates": 2,
    "alpha": 0.25,
    "between": None,  # as "lines"
    "defaults": False,  # the servers of HALoS are the strategy's own
    "topology": "complete",
    "mix": "after",
    "fragments": 2,
    "quorum": None,
    "overlap": 0,
    "grace": 0.0,
    "tokens": False,  # a number for each node
    "merging": "radial",
    "plain": False,  # the first tensor is
}
SERVERS = ("outer", "outer", "adam", "delayed", "delayed", "fedbuff", "heloco", "heloco")
MODELS = sorted({*problems.MODELS, *problems.ODD} - {"recurrent", "matrices", *problems.REFUSED})
SPEEDS = ("equal", "powers", "powers", "uneven", "uneven", "drawn")


@dataclass
class Seen:
    """The compared parts of a run."""

    columns: dict[str, list[float]] = field(default_factory=dict)  # [updates]
    order: list[float] = field(default_factory=list)  # of all arrivals: the node and the time, one after the other
    losses: list[list[float]] = field(default_factory=list)  # [updates][K]
    params: dict[str, Tensor] = field(default_factory=dict)
    returned: dict[str, Tensor] = field(default_factory=dict)


def cases(seed: int, count: int) -> Iterator[Case]:
    for i in range(count):
        draw = Random(f"asynchronous {seed} {i}")
        yield Case(draw_case(draw), draw.randrange(1000))


def draw_case(draw: Random) -> Settings:
    kind = draw.choice(["rounds", "rounds", "rounds", "halos", "halos", "pairs", "fragments"])
    settings: Settings = {
        "kind": kind, "num_nodes": draw.choice([1, 2, 3, 3, 4, 4, 5, 6]), "model": draw.choice(MODELS),
        "inner": optimizer(draw, ("sgd", "sgd", "adam", "adamw", "rmsprop", "adagrad"), per_node=draw.random() < 0.4),
        "speeds": draw.choice(SPEEDS), "length": draw.choice([3, 8, 15, 25]), "H": draw.choice([1, 2, 3, 5]),
        **some(draw, 0.3, batch_size=[1, 2, 4], max_norm=[0.5, 0.1], decaying=True, together=False, engine="loop"),
        **some(draw, 0.65, lines=["powers", "uneven", "uneven", "matrix"]), **some(draw, 0.5, server_line=True),
        **some(draw, 0.25, stop=["seconds", "steps"], bucket=[0, 100, 200]),
        **DRAWN[kind](draw),
    }  # fmt: skip
    if settings["model"] == "convolution":
        settings["batch_size"] = draw.choice([2, 3, 4])
    if kind in ("pairs", "fragments") and settings.get("lines") == "matrix":
        settings["lines"] = "uneven"
    return settings


def _server(draw: Random) -> Settings:
    name = draw.choice(SERVERS)
    options = {"lr": [0.3, 0.1, 0.7], "momentum": [0.5, 0.9], "size": [1, 2, 3, 5], "c": [0.5, 1.0]}
    return {"name": name, **some(draw, 0.6, **options)}


def _rounds(draw: Random) -> Settings:
    waits = draw.choice([0.0, 0.25, 0.5, 1.0, 2.0, math.inf])
    found = some(draw, 0.5, rounds=["dylu", "given"], buffer=[1, 2, 3, 5], staleness=["inverse_sqrt", "power"])
    found |= {"server": _server(draw)}
    return found | ({"window": (waits, draw.choice(["full", "until_last"]))} if draw.random() < 0.5 else {})


def _halos(draw: Random) -> Settings:
    found = some(draw, 0.5, rounds=["dylu", "given"], staleness=["inverse_sqrt", "power"], alpha=[0.0, 0.5, 1.0])
    found |= some(draw, 0.6, between=["powers", "uneven"], local_updates=[1, 3, 5], regions=[2, 2, 3])
    return found | some(draw, 0.5, defaults=True, server=_server(draw))


def _pairs(draw: Random) -> Settings:
    return some(draw, 0.5, topology=["ring", "complete", "exponential"], mix="before")


def _fragments(draw: Random) -> Settings:
    found = some(draw, 0.6, fragments=[1, 2, 3, 9], quorum=[1, 2, 3], overlap=[0, 1, 2], alpha=[0.0, 0.5])
    return found | some(draw, 0.4, grace=[0.5, 2.0], tokens=True, merging="mean", plain=True, server=_server(draw))


DRAWN: dict[str, Callable[[Random], Settings]] = {
    "rounds": _rounds, "halos": _halos, "pairs": _pairs, "fragments": _fragments,
}  # fmt: skip


def smaller(case: Case) -> Iterator[Case]:
    for settings in simpler(case.settings):
        yield Case(settings, case.seed)


def reproducer(case: Case) -> str:
    settings = pprint.pformat(dict(case.settings), width=100, sort_dicts=False)
    call = f"print(asynchronous.run(Case(settings, {case.seed})))"
    return f"from math import inf\nfrom tests.fuzz import Case, asynchronous\n\nsettings = {settings}\n{call}"


def run(case: Case) -> Outcome:
    s = Run.of(case)
    try:
        seen = s.of_library()
    except (ValueError, TypeError) as error:
        return Refusal(f"{type(error).__name__}: {error}") if deliberate(error) else crash(error)
    except DivergenceError:
        return Refusal("not compared: the run diverges")
    expected = s.of_loop()
    if any(not bool((x.abs() <= 1e6).all()) for x in expected.params.values()):
        return Refusal("not compared: the run diverges")
    gaps = compare(seen, expected)
    what = next((name for name, gap in gaps.items() if not gap <= TOLERANCE), None)
    if what is None:
        return None
    if what in ("losses", "params", "returned"):
        moved = compare(s.of_loop(NUDGE), expected)
        if gaps[what] <= 1e3 * moved[what]:
            return Refusal("not compared: rounding decides, the loop differs from itself")
    shown = ", ".join(f"{name} {gap:.2g}" for name, gap in gaps.items() if gap > 0)
    return Failure(f"{what}: {s.label}", f"relative differences: {shown}")


def compare(a: Seen, b: Seen) -> dict[str, float]:
    columns = {f"column {name}": difference(a.columns.get(name, []), x) for name, x in b.columns.items()}
    return columns | {name: difference(getattr(a, name), getattr(b, name)) for name in list(vars(a))[1:]}


# --------------------------------------------------------------------------------------------------------- one run


@dataclass
class Run:
    """A case with its numbers."""

    settings: Settings
    seed: int
    data: Data
    compute: Compute
    network: Network | None
    lines: loop.Lines | None
    between: tuple[Network, loop.Lines] | None
    num_bytes: int

    @classmethod
    def of(cls, case: Case) -> Run:
        unknown = case.settings.keys() - DEFAULTS.keys()
        if unknown:
            raise KeyError(f"no such settings: {sorted(unknown)}")
        s = {**DEFAULTS, **case.settings}
        K = s["num_nodes"]
        data = Data.of(with_defaults({"model": s["model"], "num_nodes": K, "examples": 40 + K}), case.seed)
        names = loop.trained(problems.make_model(s["model"], case.seed))
        num_bytes = sum(p.numel() * p.element_size() for p in names.values())
        compute = compute_of(s["speeds"], K, case.seed)
        network = lines = between = None
        if s["lines"]:
            groups = regions_of(s) if s["kind"] == "halos" else [range(K)]
            draw = Random(f"lines {case.seed}")
            network, lines = network_of(s["lines"], K, draw, s["server_line"], num_bytes, groups, s["bucket"])
            lines.messages = messages([p.numel() * p.element_size() for p in names.values()], s["bucket"])
        if s["between"] and s["kind"] == "halos":
            R = len(regions_of(s))
            between = network_of(s["between"], R, Random(f"between {case.seed}"), False, num_bytes, [range(R)])
        return cls(s, case.seed, data, compute, network, lines, between, num_bytes)

    @property
    def label(self) -> str:
        s = self.settings
        wired = " with lines" if s["lines"] or self.between else ""
        of = f" of {self.options()['name']}" if s["kind"] in ("rounds", "halos") else ""
        return f"{s['kind']}{of}{wired}"

    # ------------------------------------------------------------------------------------------- the library's side

    def of_library(self) -> Seen:
        s, K = self.settings, self.settings["num_nodes"]
        trainer = Trainer(problems.make_model(s["model"], self.seed), self.data.train)
        average = trainer.fit(
            self.strategy(), K, **self.stop(), seed=self.seed, device="cpu", progress=False, network=self.network,
            compute=self.compute, batch_size=s["batch_size"], engine=s["engine"], val_interval=None, node_threads=1,
        )  # fmt: skip
        rows = trainer.history.rows[1:]
        assert trainer.state is not None
        names = list(loop.trained(average))
        if s["kind"] == "pairs":
            params = {name: x.mean(0) for name, x in trainer.nodes.params.items()}
        else:
            params = {name: x[0] for name, x in trainer.state.params.items()}
        values = dict(average.named_parameters())
        return Seen(
            columns={name: [row[name] for row in rows] for name in COLUMNS if name in rows[0]} | self.counts(trainer),
            losses=[np.asarray(row["train_losses"]).tolist() for row in rows],
            params={name: params[name] for name in names},
            returned={name: values[name].detach() for name in names},
            order=arrivals(trainer) if s["kind"] in ("rounds", "pairs") else [],
        )

    def counts(self, trainer: Any) -> dict[str, list[float]]:
        """The numbers of messages of `num_bytes` that nodes have sent, and were sent, in all."""
        if self.settings["kind"] == "fragments":
            return {}
        K, ledger = self.settings["num_nodes"], trainer.ledger
        if self.settings["kind"] == "halos":  # apart from the servers'
            return {"sent": [sum(e.sent_bytes for e in ledger if e.operation == "server_gather") * K / self.num_bytes]}
        sent, received = ledger.total_bytes, ledger.total_received_bytes
        return {"sent": [sent * K / self.num_bytes], "received": [received * K / self.num_bytes]}

    def stop(self) -> dict[str, Any]:
        s = self.settings
        if s["stop"] == "updates":
            return {"max_updates": s["length"]}
        if s["stop"] == "steps":
            return {"max_steps": s["length"]}
        return {"max_seconds": 1.5 * s["length"] + 3.0}

    def strategy(self) -> Strategy:
        s, K = self.settings, self.settings["num_nodes"]
        common = {key: s[key] for key in ("max_norm", "together")}
        common["lr_scheduler"] = factor if s["decaying"] else None
        inner = building.optim_spec(s["inner"], K, 1, None, False)
        if s["kind"] == "pairs":
            return ADPSGDStrategy(inner, s["topology"], mix=s["mix"], **common)
        if s["kind"] == "fragments":
            return DecoupledDiLoCoStrategy(
                inner, self.server(self.size()), s["quorum"] and min(s["quorum"], K), s["fragments"], s["grace"],
                H=s["H"], overlap=s["overlap"], alpha=s["alpha"], tokens=self.tokens() if s["tokens"] else 1.0,
                merging=s["merging"], plain=self.plain(), **common,
            )  # fmt: skip
        common |= {"H": s["H"], "dylu": s["rounds"] == "dylu", "staleness": self.staleness()}
        if s["rounds"] == "given":
            common["local_steps"] = self.num_steps()
        if s["kind"] == "halos":
            servers: Any = {} if s["defaults"] else {"local_server": self.server(1), "global_server": self.server(1)}
            return HALoSStrategy(
                inner, [list(x) for x in regions_of(s)], **servers, local_updates=s["local_updates"], alpha=s["alpha"],
                between=self.between[0] if self.between else None, **common,
            )  # fmt: skip
        wait, grace = self.window()
        buffer: Any = {} if s["server"]["name"] == "fedbuff" else {"buffer": self.size()}
        return AsyncStrategy(inner, self.server(self.size()), max_wait=wait, grace=grace, **buffer, **common)

    def window(self) -> tuple[float, Any]:
        return self.settings["window"] or (0.0, "full")

    def staleness(self) -> Any:
        s = self.settings
        if s["kind"] == "rounds" and s["server"]["name"] == "fedbuff":
            return "inverse_sqrt"
        return power if s["staleness"] == "power" else s["staleness"]

    def size(self) -> int:
        """Movements of which an update is made, where it is not each."""
        s = self.settings
        if s["kind"] != "rounds":
            return 1
        return int(s["server"].get("size", 2)) if s["server"]["name"] == "fedbuff" else int(s["buffer"])

    def options(self) -> Settings:
        o = self.settings["server"]
        elsewhere = {"rounds": (), "halos": ("fedbuff",)}.get(self.settings["kind"], ("fedbuff", "heloco"))
        name = "outer" if o["name"] in elsewhere else o["name"]
        size = o.get("size")
        c = o.get("c", 0.0) / max(size or 8, 8)
        return {"name": name, "lr": o.get("lr", 0.2), "momentum": o.get("momentum", 0.6), "size": size, "c": c}

    def server(self, size: int) -> Server:
        o = self.options()
        if o["name"] == "delayed":
            return DelayedNesterov(o["lr"], o["momentum"], o["size"], o["c"])
        if o["name"] == "fedbuff":
            return FedBuff(size, o["lr"])
        if o["name"] == "heloco":
            return HeLoCo(o["lr"], o["momentum"])
        if o["name"] == "adam":
            return OuterOptimizer(OptimSpec("adam", lr=0.02, eps=1e-3))
        return OuterOptimizer(OptimSpec("sgd", lr=o["lr"], momentum=o["momentum"], nesterov=True))

    # ---------------------------------------------------------------------------------------------- the loop's side

    def of_loop(self, nudge: float = 0.0) -> Seen:
        s, K = self.settings, self.settings["num_nodes"]
        versions: list[loop.Version] = []
        for version in self.versions(nudge):
            if s["stop"] == "seconds" and version.time > self.stop()["max_seconds"]:
                break
            versions.append(version)
            if (s["stop"] == "updates" and len(versions) == s["length"]) or (
                s["stop"] == "steps" and version.steps >= s["length"] * K
            ):
                break
        last = versions[-1]
        known = {name: of for name, of in COLUMNS.items() if of(last) is not None}
        columns = {name: [float(of(x)) for x in versions] for name, of in known.items()}
        if s["kind"] != "fragments":
            columns["sent"] = [float(last.sent)]
        if s["kind"] in ("rounds", "pairs"):
            columns["received"] = [float(last.received)]
        order = [(x.node, x.time) for version in versions for x in version.taken]
        return Seen(
            columns=columns,
            losses=[losses_of(version, K) for version in versions],
            params=last.params,
            returned=last.params,
            order=[x for pair in order for x in pair] if s["kind"] in ("rounds", "pairs") else [],
        )

    def versions(self, nudge: float) -> Iterator[loop.Version]:
        return self.twin(self.training(nudge)).versions()

    def twin(self, training: loop.Training) -> loop.Loop:
        s, K, lines = self.settings, self.settings["num_nodes"], again(self.lines)
        if s["kind"] == "rounds":
            server = self.center(), self.weight(), self.size()
            return loop.Rounds(training, self.num_steps(), *server, *self.window(), lines)
        if s["kind"] == "halos":
            return self.two_levels(training)
        if s["kind"] == "pairs":
            strategy = self.strategy()
            assert isinstance(strategy, ADPSGDStrategy)
            neighbour = Neighbours(strategy.weights(K), self.seed)
            return loop.Pairs(training, K, neighbour, s["mix"] == "before", lines)
        parts, sizes = (
            self.parts(training),
            {name: x.numel() * x.element_size() for name, x in training.start().items()},
        )
        sent = [messages([sizes[name] for name in sizes if name in part], s["bucket"]) for part in parts]
        rules = loop.Merging(
            parts, sent, self.center, min(s["quorum"] or K, K), s["H"], s["overlap"], s["alpha"], self.grace,
            self.tokens() if s["tokens"] else [1.0] * K, s["merging"], self.plain(),
        )  # fmt: skip
        return loop.Fragments(training, K, rules, lines)

    def two_levels(self, training: loop.Training) -> loop.Loop:
        s, K = self.settings, self.settings["num_nodes"]
        local, top = self.center, self.center()
        if s["defaults"]:  # a movement of 1 moves a region's model by 0.2, and the global one by 0.15
            local = partial(loop.DelayedNesterov, 0.2 * 16, 0.9, 16)
            top = loop.DelayedNesterov(0.15 * 2, 0.5, 2)
        regions = {tuple(x): (local(), again(self.lines) or loop.no_lines(K)) for x in regions_of(s)}
        between = again(self.between[1]) if self.between else None
        return loop.TwoLevels(
            training, self.num_steps(), regions, top, self.weight(), s["local_updates"], s["alpha"], between
        )  # fmt: skip

    def training(self, nudge: float) -> loop.Training:
        s, K = self.settings, self.settings["num_nodes"]
        seconds = self.compute.of_steps(4096, K).tolist()
        return loop.Training(
            problems.make_model(s["model"], self.seed),
            lambda node, params: building.torch_optimizer(s["inner"], None, node, K, params),
            self.batch, lambda node, step: seconds[step][node], factor if s["decaying"] else lambda step: 1.0,
            s["max_norm"], nudge,
        )  # fmt: skip

    def batch(self, node: int, step: int) -> Any:
        s = self.settings
        same = {key: s[key] for key in ("model", "num_nodes", "batch_size")}
        reads = with_defaults({**same, "examples": 40 + s["num_nodes"]})
        per_epoch, size = self.data.steps_per_epoch(reads), self.data.batch_size(reads)
        epoch, place = divmod(step, per_epoch)
        chosen = self.data.order(epoch, node, reads, self.seed)[place * size : (place + 1) * size]
        return problems.as_batch(s["model"], tuple(x[chosen] for x in self.data.tensors))

    def num_steps(self) -> list[int]:
        s, K = self.settings, self.settings["num_nodes"]
        draw, nominal = Random(f"steps {self.seed}"), self.compute.seconds.expand(K).tolist()
        if s["rounds"] == "given":
            return [draw.choice([1, 2, 3, 4]) for _ in range(K)]
        if s["rounds"] == "equal":
            return [s["H"]] * K
        shares = [s["H"] * min(nominal) / x for x in nominal]
        down = s["kind"] == "rounds"
        return [max(1, math.floor(x + 1e-9) if down else math.ceil(x - 1e-9)) for x in shares]

    def weight(self) -> Callable[[int], float]:
        name = self.staleness()
        if name == "none":
            return lambda stale: 1.0
        return power if name is power else lambda stale: float((1 + stale) ** -0.5)

    def center(self) -> loop.Center:
        o = self.options()
        if o["name"] == "delayed":
            return loop.DelayedNesterov(o["lr"], o["momentum"], o["size"], o["c"])
        if o["name"] == "heloco":
            return loop.HeLoCo(o["lr"], o["momentum"])
        if o["name"] == "adam":
            return loop.Optimized(lambda theta: torch.optim.Adam(theta, lr=0.02, eps=1e-3))
        momentum = {} if o["name"] == "fedbuff" else {"momentum": o["momentum"], "nesterov": True}
        return loop.Optimized(lambda theta: torch.optim.SGD(theta, lr=o["lr"], **momentum))

    def parts(self, training: loop.Training) -> list[list[str]]:
        """The largest tensor first, each into the smallest fragment so far."""
        sizes = {name: x.numel() for name, x in training.start().items()}
        parts: list[list[str]] = [[] for _ in range(min(self.settings["fragments"], len(sizes)))]
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            min(parts, key=lambda part: sum(sizes[x] for x in part)).append(name)
        return parts

    def grace(self, wait: float) -> float:
        s = self.settings
        nominal = self.compute.seconds.expand(s["num_nodes"]).tolist()
        return float(s["grace"]) * max(0.0, s["overlap"] * (sum(nominal) / len(nominal)) - wait)

    def tokens(self) -> list[float]:
        draw = Random(f"tokens {self.seed}")
        return [draw.choice([1.0, 2.0, 3.0]) for _ in range(self.settings["num_nodes"])]

    def plain(self) -> list[str]:
        names = loop.trained(problems.make_model(self.settings["model"], self.seed))
        return [next(iter(names))] if self.settings["plain"] else []


COLUMNS: dict[str, Callable[[loop.Version], Any]] = {
    "sim_seconds": lambda x: x.time,
    "num_arrived": lambda x: len(x.taken),
    "staleness": lambda x: sum(one.staleness for one in x.taken) / len(x.taken),
    "staleness_max": lambda x: max(one.staleness for one in x.taken),
    "local_steps_total": lambda x: x.steps,
    "region": lambda x: x.more.get("region"),
    "region_staleness": lambda x: x.more.get("region_staleness"),
    "fragment": lambda x: x.more.get("fragment"),
}


def losses_of(version: loop.Version, num_nodes: int) -> list[float]:
    found = []
    for node in range(num_nodes):
        own = [one.loss for one in version.taken if one.node == node]
        found.append(sum(own) / len(own) if own else math.nan)
    return found


def arrivals(trainer: Any) -> list[float]:
    """The node and the time of each arrival, one after the other."""
    from vecgym.simulation.events import Arrival

    found = [(event.node, event.time) for event in trainer.timeline().events if isinstance(event, Arrival)]
    return [x for pair in found for x in pair]


def factor(step: int) -> float:
    return 0.95**step


def power(staleness: int) -> float:
    return 0.8**staleness


def regions_of(settings: Mapping[str, Any]) -> list[list[int]]:
    """The nodes of each region, dealt out in turn."""
    count = min(settings["regions"], settings["num_nodes"])
    return [list(range(r, settings["num_nodes"], count)) for r in range(count)]


# ------------------------------------------------------------------------------------------------- times and lines


def compute_of(kind: str, num_nodes: int, seed: int) -> Compute:
    draw = Random(f"compute {seed}")
    if kind == "equal":
        return Compute(draw.choice([0.5, 1.0]))
    if kind == "powers":
        return Compute([draw.choice([0.5, 1.0, 1.0, 1.5, 2.0, 4.0]) for _ in range(num_nodes)])
    seconds = [draw.uniform(0.3, 3.0) for _ in range(num_nodes)]
    return Compute.lognormal(seconds, sigma=0.4, seed=seed) if kind == "drawn" else Compute(seconds)


def network_of(
    kind: str, num_nodes: int, draw: Random, server: bool, num_bytes: int, groups: Any, bucket: float | None = None
) -> tuple[Network, loop.Lines]:
    """A network, and the same as lines; a message takes from an eighth of a second to two.

    With a matrix the line of a node, within its group, is that of its slowest way.
    """

    def some_pace() -> float:  # seconds a byte
        if kind == "powers":
            return float(2.0 ** -draw.choice([7, 8, 9, 10, 11]))
        return draw.uniform(0.1, 2.0) / num_bytes

    def some_latency() -> float:
        return draw.choice([0.0, 0.0, 0.25, 1.0]) if kind == "powers" else draw.choice([0.0, 1.0]) * draw.uniform(0, 1)

    server_pace = some_pace() / 2 if server else 0.0
    options: dict[str, Any] = {"server_bandwidth": 8 / server_pace} if server else {}
    if bucket is not None:
        options["bucket_bytes"] = bucket
    if kind == "matrix":
        paces, lags = ([[f() for _ in range(num_nodes)] for _ in range(num_nodes)] for f in (some_pace, some_latency))
        up, down, latency = [0.0] * num_nodes, [0.0] * num_nodes, [0.0] * num_nodes
        for members in groups:
            for i in members:
                others = [j for j in members if j != i]
                up[i] = max((paces[i][j] for j in others), default=0.0)
                down[i] = max((paces[j][i] for j in others), default=0.0)
                latency[i] = max((lags[i][j] for j in others), default=0.0)
        network = Network([[8 / x for x in row] for row in paces], lags, **options)
    else:
        up, down, latency = ([f() for _ in range(num_nodes)] for f in (some_pace, some_pace, some_latency))
        network = Network(up=[8 / x for x in up], down=[8 / x for x in down], latency=latency, **options)
    return network, loop.Lines(num_bytes, up, down, latency, server_pace)


def again(lines: loop.Lines | None) -> loop.Lines | None:
    """The same lines, all free."""
    return None if lines is None else replace(lines, free={})


def messages(sizes: Sequence[int], bucket: float | None) -> int:
    """The number of messages of tensors of these bytes, from the last on: one that has reached a size is complete."""
    count, filled = 0, math.inf
    for size in reversed(sizes):
        if filled >= (math.inf if bucket is None else bucket):
            count, filled = count + 1, 0
        filled += size
    return count
