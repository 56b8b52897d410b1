"""Random settings of a run, as plain values; those that are left out have their defaults. And simpler ones.

{"num_nodes": 3, "inner": {"name": "adamw", "lr": 0.01}, "strategy": {"kind": "diloco", "H": 2}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from tests.fuzz.problems import MODELS

Settings = dict[str, Any]

DEFAULTS: Settings = {
    "model": "perceptron",
    "num_nodes": 2,
    "max_steps": 6,
    "num_epochs": None,  # in place of max_steps
    "batch_size": 3,
    "minibatch_size": None,
    "examples": 40,
    "data": "tensor",  # "python": an example at a time; "factory": each node its own; "uneven": of unlike lengths
    "shuffle": True,
    "drop_last": False,
    "engine": "auto",
    "chunk_size": None,
    "node_threads": 1,
    "exact": False,
    "val_interval": None,  # a number: with a validation set
    "inner": {"name": "sgd"},
    "groups": None,
    "per_step": False,  # the learning rate
    "schedule": None,
    "warmup_steps": 0,
    "cosine_anneal": False,
    "max_norm": None,
    "max_norm_per_node": False,
    "strategy": {"kind": "alone"},
}
KEPT = ("kind", "name")  # of nested settings

Draw = Random


def with_defaults(settings: Mapping[str, Any]) -> Settings:
    unknown = settings.keys() - DEFAULTS.keys()
    if unknown:
        raise KeyError(f"no such settings: {sorted(unknown)}")
    return {**DEFAULTS, **settings}


def some(draw: Draw, chance: float, **options: Any) -> Settings:
    """Each of the options with a chance; one that is a list: one of its values."""
    chosen = {name: draw.choice(value) if isinstance(value, list) else value for name, value in options.items()}
    return {name: value for name, value in chosen.items() if draw.random() < chance}


# ------------------------------------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, dict[str, list[Any]]] = {
    "sgd": {
        "lr": [0.3, 0.05], "momentum": [0.9, 0.4], "dampening": [0.3], "weight_decay": [0.05], "nesterov": [True],
        "maximize": [True],
    },
    "adam": {
        "lr": [0.05, 0.01], "betas": [(0.8, 0.95), (0.0, 0.9)], "eps": [1e-3], "amsgrad": [True],
        "weight_decay": [0.05],
    },
    "adamw": {
        "lr": [0.05, 0.01], "betas": [(0.8, 0.95)], "eps": [1e-3], "amsgrad": [True], "weight_decay": [0.1, 0.0],
    },
    "rmsprop": {
        "lr": [0.02], "alpha": [0.8], "eps": [1e-3], "centered": [True], "momentum": [0.5], "weight_decay": [0.05],
    },
    "adagrad": {
        "lr": [0.1], "lr_decay": [0.1], "eps": [1e-3], "initial_accumulator_value": [0.1], "weight_decay": [0.05],
    },
    "nadam": {
        "lr": [0.02], "betas": [(0.8, 0.95)], "momentum_decay": [0.01], "weight_decay": [0.05],
        "decoupled_weight_decay": [True],
    },
    "radam": {"lr": [0.02], "betas": [(0.8, 0.9)], "weight_decay": [0.05], "decoupled_weight_decay": [True]},
    "adamax": {"lr": [0.02], "betas": [(0.8, 0.9)], "eps": [1e-3], "weight_decay": [0.05]},
    "adadelta": {"lr": [1.0, 0.5], "rho": [0.8], "eps": [1e-3], "weight_decay": [0.05]},
    "rprop": {"lr": [0.02], "etas": [(0.4, 1.3)], "step_sizes": [(1e-3, 0.1)]},
    "adafactor": {"lr": [0.05], "weight_decay": [0.05], "d": [2.0]},
    "asgd": {"lr": [0.05], "lambd": [0.01], "t0": [3], "weight_decay": [0.05]},
    "muon": {"lr": [0.02], "momentum": [0.8], "weight_decay": [0.0]},
    "lbfgs": {},
}  # fmt: skip
ELEMENTWISE = ("sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adadelta", "rprop")
PER_NODE = ("lr", "momentum", "weight_decay", "betas", "eps", "alpha", "rho", "dampening")
SMOOTH = ("sgd", "adadelta", "rmsprop")  # whose first step is not of one size in all coordinates


def optimizer(draw: Draw, names: tuple[str, ...], per_node: bool = True) -> Settings:
    name = draw.choice(names)
    options = {"name": name, **some(draw, 0.45, **OPTIMIZERS[name])}
    if options.get("nesterov") and "momentum" not in options:
        options["momentum"] = 0.9
    if options.get("nesterov"):
        options.pop("dampening", None)
    scaled = [key for key in PER_NODE if key in options and draw.random() < 0.5]
    if per_node and scaled and draw.random() < 0.35:
        options["per_node"] = scaled
    return options


# --------------------------------------------------------------------------------------------------- exchanges


def average(draw: Draw) -> Settings:
    return {"kind": "average", **_average(draw)}


def _average(draw: Draw) -> Settings:
    options = some(draw, 0.35, island_size=[1, 2, 3], participation=[0.3, 0.5, 0.7], weighting="examples")
    if draw.random() < 0.2:
        return {**options, "share": draw.choice(["binary", "part"])}
    if options.get("participation") and draw.random() < 0.3:
        options["resting"] = draw.choice(["keep", "server"])
    return {**options, **some(draw, 0.8, H=[1, 2, 3])}


def server(draw: Draw) -> Settings:
    options = some(draw, 0.5, lr=[0.5, 0.05], betas=(0.7, 0.9), tau=0.01, H=[1, 2, 3])
    options |= some(draw, 0.4, participation=[0.3, 0.5, 0.7], weighting="examples")
    return {"kind": "server", "name": draw.choice(["avg", "avgm", "adam", "yogi", "adagrad"]), **options}


def diloco(draw: Draw) -> Settings:
    if draw.random() < 0.2:
        return {"kind": "diloco", "share": draw.choice(["binary", "part"]), **some(draw, 0.5, outer_lr=[0.4, 1.0])}
    options: Settings = {"kind": "diloco", "H": draw.choice([1, 2, 3, 4])}
    kind = draw.random()
    if kind < 0.4:
        options["outer"] = optimizer(draw, ELEMENTWISE + ("adafactor",), per_node=False)
    elif kind < 0.7:
        options["outer_lr"] = draw.choice([0.4, 1.0])
    return options


def sparse(draw: Draw) -> Settings:
    selector: Settings = {"name": draw.choice(["random", "scheduled", "sequential", "partitioned"])}
    selector |= some(draw, 0.7, p=[0.1, 0.3, 0.5])
    if selector["name"] == "random" and draw.random() < 0.2:
        selector["p"] = draw.choice([0.0, 1.0])
    options = some(draw, 0.35, delay=[1, 2], interval=[2, 3], bits=[8, 4])
    return {"kind": "sparse", "selector": selector, **options}


def topk_sparse(draw: Draw) -> Settings:
    return {"kind": "topk_sparse", "fraction": draw.choice([0.05, 0.3]), **some(draw, 0.3, bits=[8, 4])}


TOPOLOGIES = (
    "ring", "torus", "exponential", "complete", "one_peer_exponential", "random_matching", "matrix", "matrices",
    "function",
)  # fmt: skip


def gossip(draw: Draw) -> Settings:
    return {"kind": "gossip", "topology": draw.choice(TOPOLOGIES), **some(draw, 0.4, every=[2, 3])}


def demo(draw: Draw) -> Settings:
    return {"kind": "demo", **some(draw, 0.6, decay=[0.9, 0.5], k=[1, 2, 4], chunk=[2, 3, 8])}


def gradients(draw: Draw) -> Settings:
    return {"kind": "gradients"}


METHODS = ("topk", "randomk", "int8", "int4", "sign")


def compressed(draw: Draw) -> Settings:
    module = draw.choice([gradients, average, diloco])(draw)
    options = some(draw, 0.3, error_feedback=False, reference=[True, False])
    method = draw.choice(METHODS)
    if method in ("topk", "randomk"):
        options["fraction"] = draw.choice([0.1, 0.4])
    return {"kind": "compressed", "method": method, **options, "module": module}


def wrapped(draw: Draw) -> Settings:
    """An exchange in units of some steps, or a late one."""
    inner = draw.choice([gradients, average, server, diloco, sparse, gossip, demo, topk_sparse, compressed])(draw)
    if draw.random() < 0.5 or inner["kind"] in ("gradients", "demo"):
        return {"kind": "every", "n": draw.choice([2, 3]), "module": inner}
    inner.pop("delay", None)  # an exchange has one
    return {"kind": "delayed", "d": draw.choice([1, 2]), "module": inner}


EXCHANGES = (average, server, diloco, sparse, topk_sparse, gossip, demo, gradients, compressed, wrapped)


# -------------------------------------------------------------------------------------------------- strategies


def strategy(draw: Draw) -> Settings:
    kind = draw.choice(
        ["alone", "allreduce", "fedavg", "fedavg", "diloco", "diloco", "sparta", "sparta_diloco", "gossip", "demo",
         "composed", "composed", "composed"]
    )  # fmt: skip
    if kind == "fedavg":
        base = server(draw) if draw.random() < 0.4 else average(draw)
        if "share" not in base and draw.random() < 0.3:
            base |= {"mu": draw.choice([0.5, 0.1]), **some(draw, 0.3, mu_per_node=True)}
        if base.pop("kind") == "server":
            base["server"] = base.pop("name")
        return {"kind": kind, **base}
    if kind == "diloco":
        return {**diloco(draw), **some(draw, 0.2, compression=list(METHODS)), "kind": kind}
    if kind == "sparta":
        chosen = topk_sparse(draw) if draw.random() < 0.25 else sparse(draw)
        chosen.pop("interval", None)
        return {**chosen, "kind": kind}
    if kind == "sparta_diloco":
        outer = diloco(draw)
        outer.pop("share", None)
        chosen = sparse(draw)
        chosen.pop("bits", None)
        return {**chosen, **outer, "kind": kind}
    if kind == "gossip":
        return gossip(draw)
    if kind == "demo":
        return {**demo(draw), **some(draw, 0.4, weight_decay=[0.1])}
    if kind == "composed":
        return {"kind": kind, "modules": [draw.choice(EXCHANGES)(draw) for _ in range(draw.choice([1, 2, 2, 3]))]}
    return {"kind": kind}


def chooses(strategy: Any) -> bool:
    """Whether something takes the largest of many values, or signs: of steps of one size rounding would choose."""
    text = repr(strategy)
    return any(word in text for word in ("topk", "'sign'", "demo", "powersgd"))


def draw_settings(draw: Draw) -> Settings:
    """A run. Values that cannot work together are avoided where they are known to be refused, not all of them."""
    chosen = strategy(draw)
    sensitive = chooses(chosen)
    settings: Settings = {
        "strategy": chosen,
        "model": draw.choice(sorted(MODELS)),
        "num_nodes": draw.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 7]),
        "inner": optimizer(draw, SMOOTH if sensitive else (*ELEMENTWISE, *ELEMENTWISE, "adafactor", "asgd", "lbfgs")),
        **some(draw, 0.5, max_steps=list(range(3, 10)), batch_size=[1, 2, 4, 5]),
        **some(draw, 0.3, examples=[33, 50, 61], data=["python", "factory", "uneven"], shuffle=False),
        **some(draw, 0.25, val_interval=[1, 2, 4], num_epochs=[1, 2]),
        **some(draw, 0.2, drop_last=True, chunk_size=[1, 2, 3], node_threads=2, exact=True),
        **some(draw, 0.35, engine=["vmap", "loop", "loop"], max_norm=[0.5, 0.1]),
    }
    if settings.get("num_epochs"):  # few steps, which begin another epoch
        settings |= {"examples": draw.choice([17, 24]), "batch_size": draw.choice([2, 3])}
    if settings["model"] == "convolution" and settings.get("batch_size") == 1:
        del settings["batch_size"]
    if settings["model"] == "recurrent" and settings.get("engine") == "vmap":
        del settings["engine"]
    if settings["model"] == "matrices" and not sensitive and draw.random() < 0.5:
        settings["inner"] = optimizer(draw, ("muon",), per_node=False)
    if settings.get("max_norm") and draw.random() < 0.2:
        settings["max_norm_per_node"] = True
    if settings["model"] != "convolution" and draw.random() < 0.3:
        settings |= micro_batches(draw, settings["num_nodes"])
        settings.pop("drop_last", None)
    settings |= rates(draw, settings["inner"])
    return settings


def micro_batches(draw: Draw, num_nodes: int) -> Settings:
    """Mostly of batches that they do not divide: the last one of an epoch, or of a node that has few examples."""
    batch_size, size = draw.choice([(2, 1), (3, 1), (4, 2), (4, 2), (6, 2), (6, 3)])
    found: Settings = {"batch_size": batch_size, "minibatch_size": size}
    rest = [n for n in range(size + 1, batch_size) if n % size]
    kind = draw.random()
    if rest and kind < 0.4:
        found |= {"examples": num_nodes * (batch_size + draw.choice(rest)), "data": "tensor"}
    elif rest and kind < 0.8:  # the first node has half as many as the last
        found |= {"examples": round(1.5 * num_nodes * draw.choice(rest)), "data": "uneven"}
    return found


def rates(draw: Draw, inner: Settings) -> Settings:
    """Schedules and parameter groups."""
    found = some(draw, 0.4, schedule=["cosine", "lambda_cosine", "constant", "function"])
    if found.get("schedule") != "function":
        found |= some(draw, 0.3, warmup_steps=[1, 3], cosine_anneal=True)
    if inner["name"] in ELEMENTWISE and draw.random() < 0.15:
        found["per_step"] = True
    groups = ["decay", "slow"] + ["momentum"] * (inner["name"] == "sgd")
    if inner["name"] != "rprop" and draw.random() < 0.25:
        chosen = draw.choice(groups)
        if not (chosen == "slow" and "per_step" in found):
            found["groups"] = chosen
    return found


# -------------------------------------------------------------------------------------------------- shrinking


def simpler(value: Any) -> Iterator[Any]:
    """Values with one option less, or a simpler one, at any depth."""
    if isinstance(value, Mapping):
        for key in value:
            if key not in KEPT:
                yield {name: x for name, x in value.items() if name != key}
        if value.get("kind") in ("every", "delayed", "compressed"):
            yield value["module"]
        for key, x in value.items():
            yield from ({**value, key: smaller} for smaller in simpler(x))
    elif isinstance(value, list):
        for i, x in enumerate(value):
            if len(value) > 1:
                yield value[:i] + value[i + 1 :]
            yield from (value[:i] + [smaller] + value[i + 1 :] for smaller in simpler(x))
    elif isinstance(value, int) and not isinstance(value, bool) and 1 < value <= 12:
        yield value - 1
