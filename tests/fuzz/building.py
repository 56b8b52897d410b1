"""From settings to the two programs: a strategy of the library, and the naive twin's exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.fuzz import naive
from tests.fuzz.settings import Settings
from tests.helpers import Recording
from tests.reference import compression
from vecgym import OptimSpec
from vecgym.collectives import StackedCollectives
from vecgym.compress import RandomK, TopK
from vecgym.core import rng
from vecgym.core.objects import altered
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import (
    AllReduceStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    Compressed,
    DeMoStrategy,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    GossipStrategy,
    Mean,
    Mix,
    MostMoved,
    Outer,
    PartitionedSelector,
    RandomSelector,
    ScheduledSelector,
    Selector,
    ServerMean,
    ServerOptimizer,
    ShuffledSequentialSelector,
    SparseCommunicator,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
    StrongestCosines,
    SyncWeight,
    every,
)
from vecgym.strategy.averages import Reduction, outer_spec
from vecgym.strategy.stages import Average, Stage

CLASSES: dict[str, type[Optimizer]] = {
    name.lower(): getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD",
                 "LBFGS", "Adafactor", "Muon")
    if hasattr(torch.optim, name)
}  # fmt: skip
GROUPS: dict[str, Callable[[str, Tensor], dict[str, Any]]] = {
    "decay": lambda name, p: {} if p.dim() >= 2 else {"weight_decay": 0.0},
    "slow": lambda name, p: {} if p.dim() >= 2 else {"lr": 0.02},
    "momentum": lambda name, p: {} if p.dim() >= 2 else {"momentum": 0.5},
}
AVERAGING = ("H", "island_size", "participation", "weighting", "resting")
SHARES = {"binary": (0.0, 1.0, 0.0, 0.0, 1.0), "part": (0.0, 0.5, 1.0, 0.25)}


@dataclass(frozen=True)
class Run:
    """The facts of a run that both sides need."""

    num_nodes: int
    max_steps: int
    seed: int
    num_examples: tuple[int, ...]
    shapes: Mapping[str, torch.Size]  # of what is trained

    @property
    def facts(self) -> RunFacts:
        return RunFacts(self.num_nodes, self.max_steps, seed=self.seed, num_examples=self.num_examples)

    def part(self, number: int = 0, step: int = 0) -> Part:
        return Part.alone(StackedCollectives(self.num_nodes), number=number, step=step, seed=self.seed)


def scale(key: str, num_nodes: int) -> Tensor:
    """Each node's value of a setting, in units of the one given; some settings may be 0."""
    low = 0.0 if key in ("momentum", "weight_decay", "mu") else 0.5
    return torch.linspace(1.0, low, num_nodes, dtype=torch.float64)


def step_scale(max_steps: int) -> Tensor:
    return torch.linspace(1.0, 0.4, max_steps, dtype=torch.float64)


def shares(kind: str | None, max_steps: int) -> list[float] | None:
    return None if kind is None else [SHARES[kind][t % len(SHARES[kind])] for t in range(max_steps)]


# ------------------------------------------------------------------------------------------------- optimizers


def optim_spec(settings: Settings, num_nodes: int, max_steps: int, groups: str | None, per_step: bool) -> OptimSpec:
    options = keywords(settings)
    for key in settings.get("per_node", ()):
        factors = scale(key, num_nodes)
        value = options[key]
        options[key] = tuple(x * factors for x in value) if isinstance(value, tuple) else value * factors
    if per_step:
        lr = torch.as_tensor(options["lr"], dtype=torch.float64)
        options["lr"] = step_scale(max_steps)[:, None] * lr.reshape(1, -1)
    return OptimSpec(CLASSES[settings["name"]], param_groups=GROUPS[groups] if groups else None, **options)


def keywords(settings: Settings) -> dict[str, Any]:
    options = {key: value for key, value in settings.items() if key not in ("name", "per_node")}
    return options if "lr" in options or settings["name"] == "lbfgs" else {**options, "lr": 0.05}


def torch_optimizer(
    settings: Settings, groups: str | None, node: int, num_nodes: int, params: Mapping[str, Tensor]
) -> Optimizer:
    """torch's own, of one node, every parameter in a group of its own."""
    options = keywords(settings)
    for key in settings.get("per_node", ()):
        factor = float(scale(key, num_nodes)[node])
        value = options[key]
        options[key] = tuple(x * factor for x in value) if isinstance(value, tuple) else value * factor
    choose = GROUPS[groups] if groups else lambda name, p: {}
    made = CLASSES[settings["name"]]([{"params": [p], **choose(name, p)} for name, p in params.items()], **options)
    if settings["name"] == "nadam":  # torch keeps a product of its momenta in the default type, the library in float64
        default = torch.get_default_dtype()
        made.register_step_pre_hook(lambda *_: torch.set_default_dtype(torch.float64))
        made.register_step_post_hook(lambda *_: torch.set_default_dtype(default))
    return made


# ------------------------------------------------------------------------------------------- the library's side


def library_strategy(settings: Settings, num_nodes: int, max_steps: int) -> Strategy:
    chosen = settings["strategy"]
    make = MAKERS[chosen["kind"]]
    spec = optim_spec(settings["inner"], num_nodes, max_steps, settings["groups"], settings["per_step"])
    max_norm = settings["max_norm"]
    common = {
        "max_norm": max_norm * scale("max_norm", num_nodes) if max_norm and settings["max_norm_per_node"] else max_norm,
        "lr_scheduler": function if settings["schedule"] == "function" else settings["schedule"],
        "warmup_steps": settings["warmup_steps"],
        "cosine_anneal": settings["cosine_anneal"],
    }
    return make(chosen, num_nodes, max_steps, spec, common)


def function(step: int) -> float:
    return 0.9**step


def _alone(s: Settings, K: int, T: int, spec: OptimSpec, common: dict[str, Any]) -> Strategy:
    return CommunicateOptimizeStrategy([], spec, **common)


def _allreduce(s: Settings, K: int, T: int, spec: OptimSpec, common: dict[str, Any]) -> Strategy:
    return AllReduceStrategy(spec, **common)


def _fedavg(s: Settings, K: int, T: int, spec: OptimSpec, common: dict[str, Any]) -> Strategy:
    options: dict[str, Any] = {
        key: s[key] for key in ("H", "island_size", "participation", "weighting", "resting") if key in s
    }
    options |= {f"server_{key}": s[key] for key in ("lr", "betas", "tau") if key in s}
    if "server" in s:
        options["server_optim"] = s["server"]
    if "mu" in s:
        options["proximal_mu"] = mu_of(s, K)
    return FedAvgStrategy(spec, sync_weight=shares(s.get("share"), T), **options, **common)


def mu_of(s: Settings, num_nodes: int) -> Any:
    mu = s.get("mu", 0.3)
    return mu * scale("mu", num_nodes) if s.get("mu_per_node") else mu


def outer_of(s: Settings) -> OptimSpec | None:
    return optim_spec(s["outer"], 1, 1, None, False) if "outer" in s else None


def _diloco(s: Settings, K: int, T: int, spec: OptimSpec, common: dict[str, Any]) -> Strategy:
    options: dict[str, Any] = {key: s[key] for key in ("H", "outer_lr", "compression") if key in s}
    return DiLoCoStrategy(spec, outer_of(s), sync_weight=shares(s.get("share"), T), **options, **common)


def selector_of(s: Settings) -> Selector:
    name, p = s.get("selector", {}).get("name", "random"), s.get("selector", {}).get("p", 0.25)
    if name == "scheduled":
        return ScheduledSelector(p, H=4)
    kinds: dict[str, Any] = {
        "random": RandomSelector,
        "sequential": ShuffledSequentialSelector,
        "partitioned": PartitionedSelector,
    }
    selector: Selector = kinds[name](p)
    return selector


def _sparta(s: Settings, K: int, T: int, spec: OptimSpec, common: dict[str, Any]) -> Strategy:
    if "fraction" in s:
        return SPARTAStrategy(s["fraction"], spec, compression_method="topk", quantization_bits=s.get("bits"), **common)
    options = {"delay": s.get("delay", 0), "quantization_bits": s.get("bits")}
    return SPARTAStrategy(None, spec, index_selector=selector_of(s), **options, **common)


def _sparta_diloco(s: Settings, K: int, T: int, spec: OptimSpec, common: dict[str, Any]) -> Strategy:
    options: dict[str, Any] = {key: s[key] for key in ("H", "outer_lr", "delay") if key in s}
    return SPARTADiLoCoStrategy(
        None, s.get("interval", 1), inner_optim=spec, outer_optim=outer_of(s), index_selector=selector_of(s),
        **options, **common,
    )  # fmt: skip


def topology_of(s: Settings, num_nodes: int) -> Any:
    name = s.get("topology", "ring")
    if name == "matrix":
        return doubly_stochastic(num_nodes, 0)
    if name == "matrices":
        return torch.stack([doubly_stochastic(num_nodes, t) for t in range(2)])
    return (lambda step: doubly_stochastic(num_nodes, step)) if name == "function" else name


def doubly_stochastic(num_nodes: int, step: int) -> Tensor:
    """A directed one, without symmetry."""
    eye = torch.eye(num_nodes, dtype=torch.float64)
    return 0.6 * eye + 0.3 * eye.roll(1 + step % 2, 1) + 0.1 * eye.roll(2, 1)


def _gossip(s: Settings, K: int, T: int, spec: OptimSpec, common: dict[str, Any]) -> Strategy:
    return GossipStrategy(topology_of(s, K), s.get("every", 1), spec, **common)


def demo_options(s: Settings) -> dict[str, Any]:
    names = {"decay": "compression_decay", "k": "compression_topk", "chunk": "compression_chunk"}
    return {full: s[short] for short, full in names.items() if short in s}


def _demo(s: Settings, K: int, T: int, spec: OptimSpec, common: dict[str, Any]) -> Strategy:
    return DeMoStrategy(**demo_options(s), weight_decay=s.get("weight_decay", 0.0), lr=DEMO_LR, **common)


DEMO_LR = 0.01


def _composed(s: Settings, K: int, T: int, spec: OptimSpec, common: dict[str, Any]) -> Strategy:
    exchanges = [library_exchange(module, K, T) for module in s["modules"]]
    return CommunicateOptimizeStrategy(exchanges, spec, **common)


MAKERS: dict[str, Callable[..., Strategy]] = {
    "alone": _alone, "allreduce": _allreduce, "fedavg": _fedavg, "diloco": _diloco, "sparta": _sparta,
    "sparta_diloco": _sparta_diloco, "gossip": _gossip, "demo": _demo, "composed": _composed,
}  # fmt: skip


def library_exchange(s: Settings, K: int, T: int) -> Exchange:
    kind = s["kind"]
    options: dict[str, Any]
    if kind == "gradients":
        return Exchange(Mean(), of="gradients")
    if kind == "average":
        options = {key: s[key] for key in ("H", "island_size", "participation", "weighting", "resting") if key in s}
        return AveragingCommunicator(sync_weight=shares(s.get("share"), T), **options)
    if kind == "server":
        server = ServerOptimizer(s["name"], **{key: s[key] for key in ("lr", "betas", "tau") if key in s})
        average = Outer(ServerMean(s.get("weighting", "equal")), server.spec)
        return Exchange(average, every=s.get("H", 1), participation=s.get("participation", 1.0))
    if kind == "diloco":
        share, average = shares(s.get("share"), T), Outer(Mean(), outer_spec(outer_of(s), s.get("outer_lr")))
        return Exchange(average, every=s.get("H", 100) if share is None else SyncWeight(share))
    if kind == "sparse":
        options = {"delay": s.get("delay", 0), "interval": s.get("interval", 1), "quantization_bits": s.get("bits")}
        return SparseCommunicator(selector_of(s), **options)
    if kind == "topk_sparse":
        return Exchange(MostMoved(s.get("fraction", 0.2), s.get("bits")))
    if kind == "gossip":
        return Exchange(Mix(topology_of(s, K)), every=s.get("every", 1))
    if kind == "demo":
        return Exchange(StrongestCosines(**demo_options(s)), of="gradients")
    if kind == "every":
        return every(s.get("n", 2), library_exchange(s["module"], K, max(1, T // s.get("n", 2))))
    inner = library_exchange(s["module"], K, T)
    if kind == "delayed":
        return with_settings(inner, delay=s.get("d", 1), late="change" if s.get("d", 1) else "value")
    return with_settings(inner, how=coded_average(s, inner))


def with_settings(exchange: Exchange, **changes: Any) -> Exchange:
    """The same exchange with other settings."""
    names = ("how", "every", "of", "delay", "late", "participation", "resting")
    return Exchange(**{**{name: getattr(exchange, name) for name in names}, **changes})


def coded_average(s: Settings, inner: Exchange) -> Any:
    """The average of an exchange with codes in it; of parameters themselves what has changed since the last one."""
    of_values = s["module"]["kind"] == "average"
    reference = s.get("reference")
    return coded(
        inner.how, codec_of(s), error_feedback=s.get("error_feedback", True), purpose=f"compress {inner.of}",
        reference=inner.of == "parameters" and (of_values if reference is None else reference),
    )  # fmt: skip


def coded(average: Average, codec: Any, **options: Any) -> Average | None:
    """Put `Compressed` around the innermost average in `average`. None: that one cannot be taken of codes."""
    if isinstance(average, Reduction):
        return Compressed(average, codec, **options)
    if not isinstance(average, Stage):
        return None
    inner = coded(average.inner, codec, **options)
    return None if inner is None else altered(average, inner=inner)


def codec_of(s: Settings) -> Any:
    method = s.get("method", "int8")
    return {"topk": TopK, "randomk": RandomK}[method](s.get("fraction", 0.2)) if method[-1] == "k" else method


# ----------------------------------------------------------------------------------------------- the twin's side


def expanded(s: Settings) -> list[Settings]:
    """The exchanges that a strategy consists of."""
    kind = s["kind"]
    if kind == "composed":
        return list(s["modules"])
    if kind == "allreduce":
        return [{"kind": "gradients"}]
    if kind == "fedavg":
        average = {**s, "kind": "average"} if "server" not in s else {**s, "kind": "server", "name": s["server"]}
        return [average] + ([{**s, "kind": "proximal"}] if "mu" in s else [])
    if kind == "diloco" and "compression" in s:
        # What DiLoCo's argument does not say is the method's default.
        return [{"kind": "compressed", "method": s["compression"], "by_argument": True, "module": s}]
    if kind == "sparta":
        return [{**s, "kind": "topk_sparse" if "fraction" in s else "sparse"}]
    if kind == "sparta_diloco":
        return [{**s, "kind": "sparse"}, {**s, "kind": "diloco"}]
    return [] if kind == "alone" else [s]


def twin_modules(s: Settings, strategy: Strategy, run: Run) -> list[naive.Module]:
    settings, exchanges = expanded(s), list(strategy.exchanges)
    assert len([x for x in settings if x["kind"] != "proximal"]) == len(exchanges)
    return [twin_module(x, None if x["kind"] == "proximal" else exchanges.pop(0), run) for x in settings]


def twin_module(s: Settings, exchange: Any, run: Run) -> naive.Module:
    """The naive exchange; `exchange`, the library's own, is asked for what is drawn at random, and for nothing else."""
    kind, K = s["kind"], run.num_nodes
    if kind == "gradients":
        return naive.AverageGradients()
    if kind == "average":
        return _twin_average(s, exchange, run)
    if kind == "server":
        options = {key: s[key] for key in ("lr", "betas", "tau", "H", "weighting") if key in s}
        return naive.Server(s["name"], participants=participants(s, exchange, run), **options)
    if kind == "proximal":
        mu = s.get("mu", 0.3)
        return naive.Proximal((mu * scale("mu", K)).tolist() if s.get("mu_per_node") else mu, s.get("H", 1))
    if kind == "diloco":
        share = shares(s.get("share"), run.max_steps)
        return naive.DiLoCo(outer_optimizer(s), s.get("H", 100), share, s.get("outer_lr", 0.7))
    if kind == "sparse":
        return naive.Sparse(
            masks(exchange, s.get("interval", 1), run), s.get("interval", 1), s.get("delay", 0), s.get("bits")
        )
    if kind == "topk_sparse":
        return naive.TopKSparse(s.get("fraction", 0.2), s.get("bits"))
    if kind == "gossip":
        return naive.Gossip(matrices(s, exchange, run), s.get("every", 1))
    if kind == "demo":
        return naive.DeMo(s.get("decay", 0.999), s.get("k", 32), s.get("chunk", 64))
    if kind == "every":
        n = s.get("n", 2)
        inner = Run(K, max(1, run.max_steps // n), run.seed, run.num_examples, run.shapes)
        return naive.Every(n, twin_module(s["module"], library_exchange(s["module"], K, inner.max_steps), inner))
    if kind == "delayed":
        d = s.get("d", 1)
        return naive.Delayed(d, twin_module(s["module"], exchange, run))
    return _twin_compressed(s, run)


def _twin_average(s: Settings, exchange: Exchange, run: Run) -> naive.Average:
    drawn = participants(s, exchange, run)
    keeps_rounds = "island_size" not in s and "share" not in s
    at_server = drawn is not None and s.get("resting", "server" if keeps_rounds else "keep") == "server"

    def islands(t: int) -> naive.Groups:
        members = drawn(t) if drawn else list(range(run.num_nodes))
        comm = Recording(run.num_nodes)
        part = Part.alone(comm.among(members), step=t, seed=run.seed, num_examples=run.num_examples)
        exchange.how({"x": torch.zeros(len(members))}, part)
        found = comm.drawn[-1]
        assert members == sorted(node for island in found for node in island), "islands are not a partition"
        assert all(len(island) == s["island_size"] for island in found[:-1]), "an island of another size"
        return found

    options = {key: s[key] for key in ("H", "weighting") if key in s}
    return naive.Average(
        participants=drawn, islands=islands if "island_size" in s else None, server=at_server,
        share=shares(s.get("share"), run.max_steps), **options,
    )  # fmt: skip


def participants(s: Settings, exchange: Exchange, run: Run) -> Callable[[int], list[int]] | None:
    share = s.get("participation", 1.0)
    if share == 1:
        return None

    trains = exchange.who_trains(run.facts)
    assert trains is not None

    def drawn(t: int) -> list[int]:
        found = trains(t, range(run.num_nodes))
        first = trains(t - t % s.get("H", 1), range(run.num_nodes))
        assert found is not None
        assert found == first, "another sample within a round"
        assert len(set(found)) == max(1, round(share * run.num_nodes)), "a sample of another size"
        return list(found)

    return drawn


def outer_optimizer(s: Settings) -> Callable[[list[Tensor]], Optimizer]:
    if "outer" in s:
        return lambda params: torch_optimizer(s["outer"], None, 0, 1, {str(i): p for i, p in enumerate(params)})
    return lambda params: torch.optim.SGD(params, lr=s.get("outer_lr", 0.7), momentum=0.9, nesterov=True)


def masks(exchange: Any, interval: int, run: Run) -> Callable[[int], dict[str, Tensor]]:
    shapes, selector = dict(run.shapes), exchange.how.selector
    state = selector.init(shapes, run.part())

    def mask(t: int) -> dict[str, Tensor]:
        nonlocal state
        found: dict[str, Tensor]
        found, state = selector.select(shapes, state, (t + 1) // interval - 1, run.part(step=t))
        return found

    return mask


def matrices(s: Settings, exchange: Any, run: Run) -> Callable[[int, int], Tensor]:
    """By the definitions of the graphs; only random matchings are the library's."""
    K, name = run.num_nodes, s.get("topology", "ring")

    def hears(*others: int) -> Tensor:
        W = torch.zeros(K, K, dtype=torch.float64)
        for i in range(K):
            for other in {o % K for o in others}:
                W[i, (i + other) % K] = 1 / len({o % K for o in others})
        return W

    def matrix(number: int, t: int) -> Tensor:
        log = math.ceil(math.log2(K))
        if name == "ring":
            return hears(0, 1, -1)
        if name == "complete":
            return hears(*range(K))
        if name == "exponential":
            return hears(0, *(2**k for k in range(log)))
        if name == "one_peer_exponential":
            return hears(0, 2 ** (number % log)) if K > 1 else hears(0)
        if name == "torus":
            return torus(K)
        if name == "random_matching":
            return exchange.how.mixing(run.part(number, t)).weights
        return doubly_stochastic(K, {"matrix": 0, "matrices": number % 2, "function": t}[name])

    return matrix


def torus(K: int) -> Tensor:
    a = max(a for a in range(1, math.isqrt(K) + 1) if K % a == 0)
    b, W = K // a, torch.eye(K, dtype=torch.float64) / 5
    for i in range(K):
        row, column = divmod(i, b)
        for r, c in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            W[i, r % a * b + c % b] += 1 / 5
    return W


def _twin_compressed(s: Settings, run: Run) -> naive.Module:
    # What is drawn at random depends on the seed alone, and the exchange without codes says it plainly.
    inner = twin_module(s["module"], library_exchange(s["module"], run.num_nodes, run.max_steps), run)
    by_argument = s.get("by_argument", False)
    method, fraction = s.get("method", "int8"), 0.01 if by_argument else s.get("fraction", 0.2)
    compares = s["module"]["kind"] != "average"  # with a state of its own
    reference = s.get("reference")
    with_reference = (not compares if reference is None else reference) and s["module"]["kind"] != "gradients"
    error_feedback = s.get("error_feedback", True)

    def code(phase: str) -> compression.Codec:
        def coordinates(t: int, name: str, n: int, m: int) -> Tensor:
            return torch.randperm(n, generator=rng.generator(run.seed, f"compress {phase} {name}", t))[:m]

        if method == "topk":
            full = compression.topk(fraction)
        elif method == "randomk":
            full = compression.randomk(fraction, coordinates)
        else:
            full = compression.sign() if method == "sign" else compression.quantise(8 if method == "int8" else 4)
        return lambda t, name, node, p: full(t, name, node, p) if p.numel() else p

    def code_bytes(n: int) -> float:
        if method == "sign":
            return math.ceil(n / 8) + 4
        if method in ("int8", "int4"):
            return naive.quantised_bytes(n, 8 if method == "int8" else 4)
        return compression.count(fraction, n) * (naive.BYTES + (4 if method == "topk" else 0))

    return naive.Compressed(inner, code, code_bytes, error_feedback, bool(with_reference))
