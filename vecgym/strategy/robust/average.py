"""`Robust`, the average that a few wrong values cannot move far."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from vecgym.compress.codecs import Codec, Codes, decode_all, gathered_codes
from vecgym.core import check, tree
from vecgym.core.devices import placed
from vecgym.core.objects import same
from vecgym.core.tree import Tree, wider
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.averages import Mean
from vecgym.strategy.robust import rules
from vecgym.strategy.robust.vectors import by_coordinate
from vecgym.strategy.stages import ExchangeFacts, Memory

Rule = Callable[[Tensor], Tensor]
COUNTING = ("trimmed_mean", "krum", "multi_krum", "mda")  # rules that need the number of liars
GOES_WITH = {
    "trim": ("trimmed_mean",), "m": ("multi_krum",), "neighbours": ("krum", "multi_krum"), "nu": ("geometric_median",),
    "tau": ("centred_clipping",), "iterations": ("geometric_median", "centred_clipping"),
}  # fmt: skip


class Robust(Mean, batched=("nu", "tau", "clip")):
    """A rule that a few wrong values cannot move far, over the nodes of an island.

    Each of n nodes has one vector x_i of all coordinates of the exchange: norms, distances and choices are of all
    tensors together. f is the number of liars that the rule must bear, 2 f < n.

    | rule | result |
    |---|---|
    | "median" | of each coordinate; for even n the mean of the middle two |
    | "trimmed_mean" | of each coordinate the mean without the f lowest and the f highest values |
    | "krum" | the x_i with the smallest sum of squared distances to its n - f - 1 nearest others; of equals the first |
    | "multi_krum" | the mean of the m vectors of the smallest such sums; m = n - f |
    | "mda" | the mean of those n - f vectors whose largest distance is smallest, at most 100,000 sets of them |
    | "geometric_median" | from z = 0, so many times: z <- sum_i w_i x_i / sum_i w_i, w_i = 1 / max(nu, \\|x_i - z\\|) \
(after 3 `iterations` near the geometric median, but not there) |
    | "centred_clipping" | from the last result, so many times: v <- v + mean_i (x_i - v) min(1, tau / \\|x_i - v\\|) |
    | "norm_clipping" | the mean of x_i min(1, clip / \\|x_i\\|) |
    | "sign_majority" | of each coordinate sign(sum_i sign(x_i)), 0 for a tie |
    | "mean" | the mean, to be used after `nnm`, for example |

    Before any rule, in this order: `clip` shrinks each x_i to a norm of at most `clip`; `bucketing` takes means of s
    nodes at a time, in an order that is drawn anew for each exchange, and the rule must then bear f of ceil(n / s)
    vectors; `nnm` replaces each vector by the mean of its n - f nearest ones, itself included.

    A node whose norm is not finite is infinitely far from all others, and has weight 0 in a mean of vectors; of a
    single coordinate nan counts as the largest value. Choices are constants under differentiation.

    State: `centre` of "centred_clipping", v, `[1, *]`, for all nodes, whoever is present: 0 at first, but the initial
    parameters in an exchange of parameters.

    Bytes sent per node: an all-gather, (n - 1) times those of the values; with a `server` those of the values, and as
    many down from the server. ("sign_majority" needs one bit per coordinate: put it into a `Compressed` of "sign".)

    Args:
        rule: a name, or a function of a tensor `[1, n, *]`, n nodes, which returns `[1, *]`.
        trim: the f of "trimmed_mean", under its former name.
        island_size: see `Mean`.
        f: the number of liars; needed by "trimmed_mean", "krum", "multi_krum", "mda", and by `nnm`.
        m: of "multi_krum": the number of vectors in the mean; None: n - f.
        neighbours: of "krum" and "multi_krum": "n-f-1", or "n-f-2" as in the paper, which needs 2 f + 2 < n.
        nu: of "geometric_median".
        tau: of "centred_clipping".
        iterations: of "geometric_median", 3 if None, and of "centred_clipping", 1.
        clip: the largest norm of a node's vector; None: no clipping, but 2 for "norm_clipping".
        bucketing: s, the number of nodes in a bucket.
        nnm: whether to take means of nearest neighbours first (nearest neighbour mixing).
        whole: whether a function as `rule` gets all tensors in one, `[1, n, P]`, in place of one after the other.
        server: whether the nodes send their values to a server, in place of each other.

    Raises:
        ValueError: for another rule, a setting that the rule does not have, one that it needs; before the first step if
            so few nodes may meet that f of them are too many.

    >>> from vecgym.collectives import StackedCollectives
    >>> part, values = Part.alone(StackedCollectives(4)), {"w": torch.tensor([1.0, 2.0, 3.0, -600.0])}
    >>> Robust("median")(values, part), Robust("trimmed_mean", f=1)(values, part), Robust("krum", f=1)(values, part)
    ({'w': tensor([1.5000])}, {'w': tensor([1.5000])}, {'w': tensor([2.])})
    >>> Robust("median", f=1, nnm=True).aggregate(torch.tensor([[1.0], [2.0], [6.0], [-600.0]]))
    tensor([3.])

    References: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", arXiv
    1803.01498 (median, trimmed mean); Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", NeurIPS 2017 (Krum); El Mhamdi et al., "Genuinely Distributed Byzantine Machine Learning", PODC 2020
    (MDA); Pillutla et al., "Robust Aggregation for Federated Learning", arXiv 1912.13445 (geometric
    median); Karimireddy et al., "Learning from History for Byzantine Robust Optimization", arXiv 2012.10333 (centred
    clipping), and "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", arXiv 2006.09365; Allouah et
    al., "Fixing by Mixing", arXiv 2302.01772 (nnm); Bernstein et al., "signSGD with Majority Vote", arXiv 1810.05291.
    Defaults, and the n - f - 1 of Krum, are those of github.com/LPD-EPFL/byzfl. Deviations: the first centre of
    parameters is not 0; norms that are not finite.
    """

    linear, steady = False, Mean.steady

    def __init__(
        self, rule: str | Rule = "median", trim: int | None = None, island_size: int | None = None, *,
        f: int | None = None, m: int | None = None, neighbours: str = "n-f-1", nu: Any = 0.1, tau: Any = 100.0,
        iterations: int | None = None, clip: Any = None, bucketing: int | None = None, nnm: bool = False,
        whole: bool = False, server: bool = False,
    ) -> None:  # fmt: skip
        self.rule = rule if callable(rule) else check.choice("rule", rule, RULES, "a function [1, n, *] -> [1, *]")
        super().__init__(island_size)
        self.trim = check.optional_integer("trim", trim, what="the values left out at either end")
        self.f = check.optional_integer("f", f, 0, "the number of liars")
        self.m = check.optional_integer("m", m, what="the vectors in the mean")
        self.neighbours = check.choice("neighbours", neighbours, ("n-f-1", "n-f-2"))
        self.nu = check.per_node("nu", nu, "(0, inf)", num_nodes=1)
        self.tau = check.per_node("tau", tau, "(0, inf)", num_nodes=1)
        self.iterations = check.optional_integer("iterations", iterations)
        limit = 2.0 if clip is None and rule == "norm_clipping" else clip
        self.clip = None if limit is None else check.per_node("clip", limit, "(0, inf)", num_nodes=1)
        self.bucketing = check.optional_integer("bucketing", bucketing, what="the nodes in a bucket")
        self.nnm, self.whole = check.flag("nnm", nnm), check.flag("whole", whole)
        self.server = self.served = check.flag("server", server)
        self.remembers, self._liars = rule == "centred_clipping", f or trim or 0
        self._check_together()

    def _check_together(self) -> None:
        """Raise a ValueError for settings that exclude one another, or need another one."""
        for name, owners in GOES_WITH.items():
            if self.rule not in owners and not same(getattr(self, name), signature(Robust).parameters[name].default):
                raise ValueError(
                    f"rule={self.rule!r} and {name}={getattr(self, name)!r}: {name} goes with {' and '.join(owners)}."
                )
        if self.whole and not callable(self.rule):
            raise ValueError(f"whole=True goes with a function as rule: {self.rule!r} sees the whole vector anyway.")
        if self.trim is not None and self.f not in (None, self.trim):
            raise ValueError(f"trim={self.trim} and f={self.f} are two names of one number: give f={self.f} alone.")
        if self.f is None and self.trim is None and (self.rule in COUNTING or self.nnm):
            needs = "nnm=True" if self.nnm else f"rule={self.rule!r}"
            raise ValueError(f"{needs} needs the number of liars: give f=1, or trim=1 to a trimmed mean.")
        if self.island_size is not None and (self.server or self.remembers):
            shared = "a server" if self.server else "the centre of rule='centred_clipping'"
            raise ValueError(f"{shared} is one for all nodes: leave out island_size={self.island_size}.")

    @property
    def random(self) -> bool:  # type: ignore[override]
        return self.island_size is not None or self.bucketing is not None

    def check(self, run: ExchangeFacts) -> None:
        super().check(run)
        for count in run.counts or (run.num_nodes,):
            rest = 0 if self.island_size is None else count % self.island_size
            for size in {count if self.island_size is None else min(count, self.island_size), rest or count}:
                self._check_size(size)

    def _check_size(self, num_nodes: int) -> None:
        """Raise a ValueError if so many nodes, which meet, are too few for the rule, or too many."""
        n, f = -(-num_nodes // (self.bucketing or 1)), self._liars
        of = f"{n} buckets of {num_nodes} nodes" if self.bucketing else f"{n} nodes"
        if self.rule == "trimmed_mean" and 2 * f >= n:
            raise ValueError(f"trim={f} at either end leaves out all values of {of}: give a smaller trim.")
        least = 2 * f + (3 if self.neighbours == "n-f-2" else 1)
        if n < least and (f or self.rule in COUNTING):
            raise ValueError(f"f={f} liars of {of} are too many for {self!r}, which needs {least}: give a smaller f.")
        if self.m is not None and self.m > n:
            raise ValueError(f"m={self.m} is larger than the {of} that meet: give m <= {n}, or None for n - f.")
        if self.rule == "mda" and math.comb(n, f) > rules.MAX_SUBSETS:
            raise ValueError(
                f"rule='mda' would compare the {math.comb(n, f):,} sets of {n - f} of {n} nodes, and at most "
                f"{rules.MAX_SUBSETS:,} are allowed: give a smaller f, or 'multi_krum'."
            )

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        if self.remembers:
            memory.shared["centre"] = values

    def gather(self, codes: Tree, part: Part) -> Tree:
        return part.comm.server_gather(codes) if self.server else super().gather(codes, part)

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        centre = part.flat(memory.shared["centre"]) if self.remembers else None
        result = part.apart(self._of_all(self.gather(x, part), part, centre))
        if self.remembers:
            memory.shared["centre"] = tree.map(torch.clone, result)  # the caller may overwrite it
        return part.comm.server_send(result) if self.server else result

    def of_codes(self, codes: Codes, codec: Codec, like: Tree, part: Part) -> Tree:
        received = gathered_codes(codes, codec, lambda x: self.gather(part.apart(x), part))
        result = self._of_all({name: decode_all(received[name], codec, x) for name, x in like.items()}, part)
        return part.flat(part.comm.server_send(part.apart(result))) if self.server else result

    def aggregate(self, x: Tensor, *, centre: Tensor | None = None, seed: int = 0) -> Tensor:
        """Apply the rule to plain vectors of n nodes, `[n, d]` -> `[d]`.

        Args:
            x: one row for each node.
            centre: the last result of "centred_clipping", `[d]`; None: 0.
            seed: of the order of the nodes in `bucketing`.

        >>> Robust("centred_clipping", tau=1.0).aggregate(torch.tensor([[0.5], [0.7], [60.0]]))
        tensor([0.7333])
        """
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
            raise TypeError(f"x is {check.kind_of(x)}; give a tensor of real numbers, [n, d], a row for each node.")
        if not (centre is None or (isinstance(centre, Tensor) and centre.shape == x.shape[1:])):
            raise TypeError(f"centre={check.kind_of(centre)}; give a tensor [{x.shape[1]}], or None for 0.")
        if self.island_size is not None:
            raise ValueError(f"island_size={self.island_size} has no meaning for one set of vectors: leave it out.")
        self.check(ExchangeFacts(len(x)))
        generator = torch.Generator().manual_seed(check.seed("seed", seed))
        v = torch.zeros_like(x[:1]) if centre is None else centre[None]
        return self._agreed({"": x[None]}, {"": v}, generator)[""][0]

    def _of_all(self, everyone: Tree, part: Part, centre: Tree | None = None) -> Tree:
        """Apply the rule to all nodes or to each island: `[C, K, *]` -> `[C or C K, *]`."""
        groups = self.groups(part)
        generator = None if self.bucketing is None else part.generator("buckets", part.due.step)
        if groups is None:
            return self._agreed(everyone, centre, generator, part.size)
        islands, found = sorted(groups, key=len), list[Tree]()
        for _, some in itertools.groupby(islands, len):  # islands of one size at once
            index = torch.tensor(list(some))
            members = tree.map(lambda x: x[:, placed(index, x.device)].flatten(0, 1), everyone)  # noqa: B023
            found.append(part.apart(self._agreed(members, None, generator, part.size)))
        island_of = {node: i for i, island in enumerate(islands) for node in island}
        here = torch.tensor([island_of[node] for node in part.comm.node_ids.tolist()], dtype=torch.long)
        axis = part.lead - 1
        return part.flat(tree.map(lambda *y: torch.cat(y, axis).index_select(axis, placed(here, y[0].device)), *found))

    def _agreed(self, values: Tree, centre: Tree | None, generator: Any, num_configs: int = 1) -> Tree:
        """Apply the rule to R sets of nodes, `[R, n, *]` -> `[R, *]`."""
        shapes = {name: y.shape[2:] for name, y in values.items()}
        flat = functools.partial(tree.map, lambda y: y.reshape(*y.shape[:2], math.prod(y.shape[2:])))
        x = flat(values)
        if self.clip is not None and (self.rule != "norm_clipping" or self.nnm or self.bucketing):
            x = rules.clipped(x, self._number("clip", x))
        if self.bucketing is not None:
            R, n = next(iter(x.values())).shape[:2]
            orders = torch.stack([torch.randperm(n, generator=generator) for _ in range(R // num_configs)])
            x = rules.in_buckets(x, orders.repeat(num_configs, 1), self.bucketing)
        x = rules.nearest_means(x, self._liars) if self.nnm else x
        if callable(self.rule):
            agreed = self._by_function(self.rule, x, shapes)
        else:
            around = None if centre is None else flat(tree.map(lambda y: y[:, None], centre))
            agreed = RULES[self.rule](self, x, next(iter(x.values())).shape[1] - self._liars, around)
        return {name: y.reshape(len(y), *shapes[name]) for name, y in agreed.items()}

    def _by_function(self, rule: Rule, x: Tree, shapes: Mapping[str, Sequence[int]]) -> Tree:
        """Apply a user's rule to each set of nodes by itself."""
        x = {"": torch.cat([*x.values()], -1)} if self.whole else x
        given = {name: y.reshape(*y.shape[:2], *shapes.get(name, y.shape[2:])) for name, y in x.items()}
        agreed = tree.map(lambda y: torch.cat([rule(one) for one in y.split(1)]), given)
        for y, z in zip(given.values(), agreed.values()):
            if z.shape != y[:, 0].shape:
                raise ValueError(f"rule returned {tree.form(z)} of {tree.form(y)}: return [1, *] of [1, n, *].")
        return dict(zip(shapes, agreed[""].split([*map(math.prod, shapes.values())], -1))) if self.whole else agreed

    def _number(self, name: str, x: Tree) -> Any:
        """Return a setting, one number or `[C]`, so that it goes with numbers of R sets of nodes, `[R, n]`."""
        number, like = getattr(self, name), next(iter(x.values()))
        if isinstance(number, Tensor):
            number = placed(number.reshape(-1, 1), like.device, wider(like.dtype))
            number = number.repeat_interleave(len(like) // len(number), 0)
        return number


# Each rule: (settings, vectors `[R, n, p]`, n - f, the centre) -> `[R, p]`.
RULES: dict[str, Callable[[Any, Tree, int, Any], Tree]] = {
    "mean": lambda how, x, rest, v: by_coordinate(lambda y: y.mean(1), x),
    "median": lambda how, x, rest, v: by_coordinate(rules.median, x),
    "trimmed_mean": lambda how, x, rest, v: by_coordinate(lambda y: rules.trimmed_mean(y, how._liars), x),
    "krum": lambda how, x, rest, v: rules.multi_krum(x, rest - int(how.neighbours[-1]), 1),
    "multi_krum": lambda how, x, rest, v: rules.multi_krum(x, rest - int(how.neighbours[-1]), how.m or rest),
    "mda": lambda how, x, rest, v: rules.mda(x, how._liars),
    "geometric_median": lambda how, x, rest, v: rules.geometric_median(x, how._number("nu", x), how.iterations or 3),
    "centred_clipping": lambda how, x, rest, v: rules.clip_around(x, v, how._number("tau", x), how.iterations or 1),
    "norm_clipping": lambda how, x, rest, v: rules.clip_around(x, None, how._number("clip", x)),
    "sign_majority": lambda how, x, rest, v: by_coordinate(rules.sign_majority, x),
}
