"""Rules by which nodes agree on values: means of all or of islands, a server's mean, outer optimizers.

`vecgym.strategy.stages` defines averages and stages. None of them depends on what the values are (parameters, gradients
or moments) or when they are exchanged: an `Exchange` decides both.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vecgym.availability import num_drawn
from vecgym.collectives import StackedCollectives
from vecgym.collectives.topology import Groups, random_islands
from vecgym.compress.codecs import Codec, Codes, gathered_codes
from vecgym.core import check, tree
from vecgym.core.devices import placed, spread
from vecgym.core.objects import altered, same, shown
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec, clip_grad_norm, ensure_optim_spec
from vecgym.optim.formulas import FORMULAS
from vecgym.optim.optimizer import Optimizer
from vecgym.optim.spec import check_lr
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.corrections import CORRECTIONS, Correction, heloco, momentum_of
from vecgym.strategy.stages import Average, ExchangeFacts, Memory, Stage, Stages, chain

Weighting = Literal["equal", "examples"] | Sequence[float]  # of the nodes in a mean

OUTER_DEFAULTS: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # DiLoCo's


# ------------------------------------------------------------------------------------------------------ means


class Reduction(Average, batched=()):
    """An average of the nodes' values, or of codes in their place.

    Attributes:
        linear: whether the result is linear in the values, so that factors of a matrix may be averaged in its place.
        remembers: whether it has a state, which codes do not update.
    """

    linear: bool = False
    remembers: bool = False

    def shares(self, part: Part) -> Tensor | None:
        """Return W `[1 or K, K]`, with which a node's average is sum_k W_ik x_k; None: the plain mean."""
        return None

    def gather(self, codes: Tree, part: Part) -> Tree:
        """Give the codes `[K, ...]` to their readers, `[1, K, ...]`."""
        return part.comm.all_gather(codes, inplace=True)

    def of_codes(self, codes: Codes, codec: Codec, like: Tree, part: Part) -> Tree:
        """Decode and average codes of values like `like`; codes, values and result are `[C K, *]`."""
        received, shares = gathered_codes(codes, codec, lambda x: self.gather(part.apart(x), part)), self.shares(part)
        placed_shares = functools.cache(lambda device: shares if shares is None else placed(shares, device))
        return {name: codec.average(received[name], x, placed_shares(x.device)) for name, x in like.items()}


class Mean(Reduction, batched=()):
    """The mean over all nodes, or over islands of nodes.

    x_i <- sum_k w_k x_k / sum_k w_k over the nodes k of i's island.

    Bytes sent per node: 2 (n - 1) / n times those of the values, in islands of n nodes.

    Args:
        island_size: nodes per island; None: one island of all. The nodes are shuffled (seeded) in each exchange; if
            `island_size` does not divide their number, the last island is smaller.
        weighting: "equal"; "examples": w_k is the number of examples of node k; or w_k itself, one number > 0 for each
            node of the run, such as the tokens of its examples. With "examples", gradients of a loss that has a
            "weight" are weighted by it: by the numbers of tokens in this step's batches, say.

    Raises:
        ValueError: for island_size < 1 or another weighting; before the first step for an island larger than the number
            of nodes that meet, and if the numbers of examples are not known.

    >>> part, values = Part.alone(StackedCollectives(4)), {"w": torch.tensor([1.0, 2.0, 3.0, 6.0])}
    >>> Mean()(values, part)["w"], Mean(island_size=2)(values, part)["w"], Mean(island_size=2).groups(part)
    (tensor([3.]), tensor([1.5000, 1.5000, 4.5000, 4.5000]), [[2, 3], [0, 1]])
    """

    linear = True

    def __init__(self, island_size: int | None = None, weighting: Weighting = "equal") -> None:
        self.island_size = check.optional_integer("island_size", island_size, what="None is one island")
        self.weighting = as_weighting(weighting)

    @property
    def common(self) -> bool:  # type: ignore[override]
        return self.island_size is None

    @property
    def random(self) -> bool:  # type: ignore[override]
        return self.island_size is not None

    steady = common

    def through_server(self) -> Average:
        return ServerMean(self.weighting) if type(self) is Mean and self.common else self  # type: ignore[arg-type]

    def check(self, run: ExchangeFacts) -> None:
        check_weighting(self.weighting, run)
        if self.island_size is not None and self.island_size > run.most:
            raise ValueError(
                f"island_size={self.island_size} is larger than the {run.most} nodes that take part in a round: "
                f"give island_size <= {run.most}, or None for one island of all."
            )

    def groups(self, part: Part) -> Groups | None:
        """Return the islands of this exchange; None: one of all."""
        if self.island_size is None:
            return None
        return random_islands(range(part.comm.num_nodes), self.island_size, part.generator("islands", part.due.step))

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        groups = self.groups(part)
        if self.weighting == "examples" and part.loss_weights is not None:
            shares = relative(part.comm.everyone({"": part.loss_weights})[""], groups)[..., part.comm.node_ids]
            return part.comm.mean(tree.map(lambda y: spread(shares, y) * y, x), groups, inplace=part.inplace)
        return part.comm.mean(x, groups, part.weights(self.weighting), inplace=part.inplace)

    def shares(self, part: Part) -> Tensor | None:
        if self.weighting == "examples" and part.loss_weights is not None:
            raise ValueError(
                'weighting="examples" by the weights of the losses needs gradients that are not compressed: leave out '
                "the codec, or give the weights of the nodes as a list."
            )
        groups, weights, K = self.groups(part), part.weights(self.weighting), part.comm.num_nodes
        if groups is None and weights is None:
            return None
        # The average of the unit vectors, without any communication.
        W = StackedCollectives(K).mean(torch.eye(K, dtype=torch.float64), groups, weights)
        return W[part.comm.node_ids] if len(W) > 1 else W

    def gather(self, codes: Tree, part: Part) -> Tree:
        return part.comm.all_gather(codes, inplace=True, readers=self.groups(part))


class ServerMean(Reduction, batched=(), random=False, steady=True):
    """The mean of the nodes' values at a server, which sends it to all nodes: `[K, *]` -> `[1, *]`.

    Bytes sent per node: those of the values up, and as many down from the server.

    Args:
        weighting: see `Mean`.

    >>> ServerMean()({"w": torch.tensor([1.0, 2.0, 3.0, 6.0])}, Part.alone(StackedCollectives(4)))
    {'w': tensor([3.])}
    """

    linear = True
    served = True  # the result can be sent to nodes that take no part

    def __init__(self, weighting: Weighting = "equal") -> None:
        self.weighting = as_weighting(weighting)

    def check(self, run: ExchangeFacts) -> None:
        check_weighting(self.weighting, run)

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        return part.comm.server_mean(x, range(part.comm.num_nodes), part.weights(self.weighting))

    def shares(self, part: Part) -> Tensor | None:
        weights = part.weights(self.weighting)
        if weights is None:
            return None
        row = torch.tensor([weights], dtype=torch.float64)
        return row / row.sum()

    def gather(self, codes: Tree, part: Part) -> Tree:
        return part.comm.server_gather(codes)

    def of_codes(self, codes: Codes, codec: Codec, like: Tree, part: Part) -> Tree:
        average = super().of_codes(codes, codec, like, part)
        return part.flat(part.comm.server_send(part.apart(average)))


# ------------------------------------------------------------------------------------------------------ stages


class Private(Stage, batched=(), random=True, steady=True):
    """Each node's values are clipped to a 2-norm, and Gaussian noise hides what a single node has sent.

    Over all tensors together, with clip(x) = x min(1, clip / |x|) and xi ~ N(0, 1) in each coordinate:

    - `noise_by="nodes"`: each node sends clip(x_i) + noise clip xi_i. The mean over n nodes has noise of standard
      deviation noise clip / sqrt(n). Nobody is trusted, neither the server nor the network: this is local privacy.
    - `noise_by="server"`: sum_i clip(x_i) / n + noise clip / n xi: DP-FedAvg, with a fixed n. The server is trusted,
      which sees what each node sends; its results are private, and so are parameters that follow from these alone.
      This noise is smaller than the other by sqrt(n), and so is the protection. (Nodes that add a share of it each,
      noise / sqrt(n), under a sum that nobody can take apart, have distributed privacy: the same numbers.)

    For movements and gradients: `Outer(Private(Mean(), clip=1.0, noise=0.1))`. The noise comes from the run's seed, and
    that of a node is keyed by it, so it is the same in every process. A round without any node adds noise, too, if
    it is the server's. Bytes: those of `inner`.

    With `delta`, the history's column `epsilon`, in rows with an evaluation, is the privacy that the server's results
    so far have spent on all data of a node, by the Renyi accountant of `dp-accounting`. The sampling of the exchange
    makes it smaller, and says what is compared:

    | `sampling` | two runs | noise in units of what a node can change |
    |---|---|---|
    | "bernoulli" | with and without the node | noise: the sum changes by at most clip |
    | "fixed" | with this node, or another in its place | noise / 2: the sum changes by up to 2 clip |

    It counts what this stage sends, not `correct="median_norm"` around it, say, nor the nodes' models within a round.

    Args:
        inner: the average of the sent values; with the server's noise a plain mean of all, `Mean()` or `ServerMean()`.
        clip: > 0, the largest 2-norm of a node's message.
        noise: >= 0, in units of `clip`.
        noise_by: who adds noise: "nodes", or the "server".
        nodes: n; None: as many as take part, if that is the same number in each exchange. With sampling="bernoulli" it
            is the expected number.
        delta: in (0, 1); None: no epsilon. `pip install vecgym[privacy]`.

    Raises:
        ValueError: for values outside these ranges; for a server's noise around another average; for `nodes` or
            `delta` without a server's noise; before the first step if n is not known, and for a delta with absences.
        ImportError: before the first step, for a delta without the package.

    >>> part, values = Part.alone(StackedCollectives(2)), {"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}
    >>> Private(Mean(), clip=1.0, noise=0.0)(values, part)
    {'w': tensor([[0.4500, 0.6000]])}
    >>> Private(Mean(), clip=1.0, noise=0.0, noise_by="server", nodes=4)(values, part)  # 4 were expected
    {'w': tensor([[0.2250, 0.3000]])}

    References: McMahan et al., "Learning Differentially Private Recurrent Language Models", arXiv 1710.06963, algorithm
    1 with equal weights, flat clipping and the estimator of a fixed denominator; `noise_by="nodes"` is not theirs.
    Deviation: 1e-6 is added to a norm, as torch does. Epsilon with sampling: Mironov et al., arXiv 1908.10530; Wang et
    al., arXiv 1808.00087.
    """

    def __init__(
        self, inner: Average, clip: float, noise: float, *, noise_by: str = "nodes", nodes: float | None = None,
        delta: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(inner)
        self.clip = check.number("clip", clip, "(0, inf)", "the largest 2-norm of a node's message")
        self.noise = check.number("noise", noise, "[0, inf)", "its standard deviation in units of clip")
        self.noise_by = check.choice("noise_by", noise_by, ("nodes", "server"))
        self.nodes = None if nodes is None else check.number("nodes", nodes, "(0, inf)", "of which a sum is the mean")
        self.delta = None if delta is None else check.number("delta", delta, "(0, 1)", "None: no epsilon is computed")
        if self.alone and inner not in (Mean(), ServerMean()):
            raise ValueError(
                f"the server adds noise to a plain mean of all, not {inner!r}: give Mean() or ServerMean()."
            )
        if not self.alone and not (nodes is None and delta is None):
            raise ValueError(f'nodes={nodes} and delta={delta} are for noise_by="server": give it, or leave them out.')

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return self.noise_by == "server"

    def check(self, run: ExchangeFacts) -> None:
        if self.alone and self.nodes is None and (run.sampling != "fixed" or run.fewest != run.most):
            raise ValueError(
                f"{self!r}: the number of nodes differs from exchange to exchange, and a sum is divided by one that is "
                f"fixed in advance: give the expected one, nodes={run.fraction * run.num_nodes:g}."
            )
        if self.delta is not None:
            _accountants()
            if run.presence is not None:
                raise ValueError(f"{self!r}: epsilon is not known with absences: give participation, or no delta.")

    def send(self, x: Tree, part: Part, memory: Memory) -> Tree:
        clipped, _ = clip_grad_norm(part.flat(x), self.clip, inplace=False)
        blurred = self._blurred_once if self.alone else self._blurred
        return {name: blurred(y, name, part) for name, y in part.apart(clipped).items()}

    def _blurred_once(self, x: Tensor, name: str, part: Part) -> Tensor:
        """Scale and blur the messages so that their mean is the server's result; without any, return its noise."""
        lead, number = part.lead, part.comm.num_nodes
        n = self.nodes or number
        xi = torch.randn(x.shape[lead:], generator=part.generator(f"private {name}", part.due.step), dtype=x.dtype)
        noise = self.noise * self.clip / n * placed(xi, x.device)
        if part.event.rows == ():
            return noise.expand(*x.shape[: lead - 1], 1, *x.shape[lead:])
        return number / n * x + noise

    def _blurred(self, x: Tensor, name: str, part: Part) -> Tensor:
        return x if self.noise == 0 else x + self.noise * self.clip * normal(x, f"private {name}", part)

    def epsilon(self, run: ExchangeFacts, number: int) -> float | None:
        if self.delta is None or number == 0:
            return None if self.delta is None else 0.0
        drawn = num_drawn(run.fraction, run.num_nodes) if run.sampling == "fixed" else run.fraction
        return _spent(self.noise, self.delta, number, drawn, run.num_nodes) if self.noise else math.inf


def _accountants() -> Any:
    """Import `dp_accounting`."""
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise ImportError("delta needs the package dp-accounting: pip install vecgym[privacy]") from error


@functools.lru_cache(maxsize=1024)
def _spent(noise: float, delta: float, number: int, drawn: float, num_nodes: int) -> float:
    """Return the epsilon of so many sums of clipped messages with Gaussian noise.

    Args:
        noise: its standard deviation in units of the clipping norm.
        number: of the sums.
        drawn: an int, the nodes in each, drawn from all; else the probability of each node.
    """
    dp, fixed = _accountants(), isinstance(drawn, int)
    relation = dp.NeighboringRelation.REPLACE_ONE if fixed else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    gauss = dp.GaussianDpEvent(noise / 2 if fixed else noise)  # a message in place of another moves the sum by 2 clip
    sampled = dp.SampledWithoutReplacementDpEvent if fixed else dp.PoissonSampledDpEvent
    accountant = importlib.import_module("dp_accounting.rdp").RdpAccountant(neighboring_relation=relation)
    accountant.compose(sampled(num_nodes, drawn, gauss) if fixed else sampled(drawn, gauss), number)
    return float(accountant.get_epsilon(delta))


def normal(x: Tensor, purpose: str, part: Part) -> Tensor:
    """Draw a standard normal number for each coordinate of each node, `[rows, *]`, from values `[.., rows, *]`."""
    shape = x.shape[part.lead :]
    drawn = [
        torch.randn(shape, generator=part.generator(purpose, part.due.step, node), dtype=x.dtype) for node in part.nodes
    ]
    return placed(torch.stack(drawn) if drawn else torch.zeros(0, *shape, dtype=x.dtype), x.device)


# ---------------------------------------------------------------------------------------------------- outer steps


class Outer(Stage):
    """DiLoCo: the average movement of the nodes since the last exchange is the gradient of an outer optimizer.

    Delta = inner_i(theta_outer - theta_i);  theta_outer <- optim(theta_outer, Delta);  theta_i <- theta_outer.

    SGD with momentum mu, nesterov and the rate eta is m <- mu m + Delta; theta_outer <- theta_outer - eta (Delta + mu
    m). If the average differs between nodes (islands), each node has its own outer parameters and momentum.

    Rates `[T, 1]`, one per exchange, are indexed by the number of the exchange, `part.due.number`; an optimizer with a
    step count, such as Adam, counts exchanges. With a `SyncWeight` the number is the step, and the optimizer's count is
    the sum of the weights so far.

    State: `params`, the outer parameters, and `outer`, the optimizer's: stored once, `[1, *]`, or per node.
    Bytes: those of `inner`; "median_norm" adds one number per tensor and node, in an all-gather.

    Args:
        inner: the average of the movements.
        optim: None, "sgd" and `torch.optim.SGD` mean DiLoCo's SGD(lr=0.7, momentum=0.9, nesterov=True); an `OptimSpec`,
            and any other optimizer, keeps its own settings.
        correct: a correction of the movements before they are averaged: "heloco" turns those that point against the
            outer momentum; "median_norm" shrinks each tensor of a node's movement to the median of the nodes' norms; or
            a function of the movements, the outer optimizer's state and the `Part`; None: no correction.
        restart: S: m <- 0 after every S outer steps; all else stays. With 1 each step is the first one's, SGD without
            momentum at eta, or at (1 + mu) eta with nesterov. None: never.

    Raises:
        ValueError: for an `inner` that has outer parameters, too; for "heloco" and `restart` with another optimizer
            than SGD with momentum and without dampening; for "median_norm" with an average that differs between nodes.

    >>> outer, part = Outer(Mean()), Part.alone(StackedCollectives(2))
    >>> memory = outer.memory({"w": torch.zeros(1)}, part)
    >>> outer({"w": torch.tensor([1.0, 3.0])}, part, memory)["w"]  # 0.7 (2 + 0.9 * 2), on both nodes
    tensor([2.6600])
    >>> Outer(Mean(2), OptimSpec("sgd", lr=1.0)), Outer(Mean(), "sgd", correct="median_norm")
    (Outer(Mean(island_size=2), optim=OptimSpec(SGD, lr=1.0)), Outer(Mean(), correct='median_norm'))

    References: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.
    HeLoCo, arXiv 2606.00271, where a server that does not wait corrects each movement when it arrives: here all arrive
    together, and are averaged without a weight. The median norm: Covenant-72B, arXiv 2603.08163, and
    github.com/tplr-ai/templar, src/tplr/compress.py, which shrinks what it has decoded: here it is shrunk before.
    Restarts: Topollai et al., "Outer-Momentum Restarting in High-Dimensional Two-Phase Optimization", arXiv 2605.28585,
    with S = 3 in its figures. Its momentum is a mean: a rate nu there is eta = nu (1 - mu) here.
    """

    def __init__(
        self, inner: Average, optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None, *,
        correct: str | Correction | None = None, restart: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(inner)
        self.optim = Optimizer(outer_spec(optim))
        self._equal_rates = not self.optim.per_node  # before merging, after which `[C]` would look like `[K]`
        self.correct = correct
        if correct is not None and not callable(correct):
            check.choice("correct", correct, CORRECTIONS, "a function, or None")
        self.restart = check.optional_integer("restart", restart, what="outer steps with one momentum; None: all")
        self._check_inner()
        Stages(self).check_common()

    def _check_inner(self) -> None:
        for inner in chain(self.inner):
            if isinstance(inner, (Outer, NoLoCo)):  # both would store outer parameters under one name
                name = type(self).__name__
                raise ValueError(f"{name} around {inner!r}: one outer step within another. Give each its own exchange.")
        if self.correct == "heloco":
            momentum_of(self.optim.spec)
        if self.restart is not None:
            momentum_of(self.optim.spec, f"restart={self.restart}")

    def check_common(self, common: bool) -> None:
        if self.correct == "median_norm" and not common:
            raise ValueError(
                f'correct="median_norm" takes the median over all nodes, and in {self.inner!r} not all agree: leave '
                "out islands and participation."
            )

    @property
    def common(self) -> bool:  # type: ignore[override]
        return self._equal_rates

    @property
    def batched(self) -> tuple[str, ...] | None:  # type: ignore[override]
        rule = FORMULAS.get(self.optim.spec.cls)
        elementwise = rule is not None and not rule.of_matrices and self.optim.spec.param_groups is None
        return ("restart",) if elementwise and self.correct is None else None

    @property
    def partial(self) -> bool:  # type: ignore[override]
        return self.restart is None

    @property
    def random(self) -> bool:  # type: ignore[override]
        return callable(self.correct)

    @property
    def steady(self) -> bool:  # type: ignore[override]
        return not callable(self.correct)

    def check(self, run: ExchangeFacts) -> None:
        self.optim.check(run.num_nodes, run.num_exchanges, "outer optimizer")

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> Tree:
        memory.home["params"], memory.home["outer"] = values, self.optim.init(values)
        return tree.map(torch.zeros_like, values)

    def send(self, x: Tree, part: Part, memory: Memory) -> Tree:
        moved = tree.map(torch.sub, memory.home["params"], x)
        if self.correct is None:
            return moved
        return _same_names("correct", self._correction(moved, memory.home["outer"], part), moved)

    def receive(self, y: Tree, part: Part, memory: Memory, lr: Any = None) -> Tree:
        home, optim, number, made = memory.home, self.optim, part.due.number, part.due.made
        if made is not None:  # a partial exchange advances the count by its weight; rates are indexed by exchange
            spec = optim.spec.at(number)
            optim = optim if spec is optim.spec else Optimizer(spec)
        count = number if made is None else made
        before, still = (home["params"], home["outer"]), memory.notes.get("still")
        after = optim.step(
            before[0], y if memory.common else part.wide(y), before[1], count, lr,
            inplace=memory.inplace and still is None, nodes=None if memory.common or part.size > 1 else part.nodes,
            exact=part.exact,
        )  # fmt: skip
        after = after if still is None else tuple(_unless(still, *each) for each in zip(before, after))
        home["params"], home["outer"] = after
        if self.restart is not None:
            ends: Any = (count + 1) % self.restart == 0  # `[C]` if it differs between configurations
            if isinstance(ends, Tensor):
                home["outer"] = tree.map_leaves(lambda m: m.masked_fill(spread(ends, m) != 0, 0.0), home["outer"])
            elif ends:
                home["outer"] = tree.map_leaves(torch.zeros_like, home["outer"])
        return home["params"]

    def rate(self, number: int) -> Any:
        return self.optim.lr(number, max_steps=0)

    @property
    def _correction(self) -> Correction:
        if self.correct == "heloco":
            return functools.partial(heloco, momentum=momentum_of(self.optim.spec))
        return CORRECTIONS[self.correct] if isinstance(self.correct, str) else self.correct  # type: ignore[return-value]

    def __repr__(self) -> str:
        usual = same(self.optim.spec, outer_spec(None))
        return shown(self, optim=None if usual else self.optim.spec)


class Eager(Outer):
    """An outer step with the other nodes' movements of the last round, and a node's own of this one.

    Delta~_i(t) = inner_j(Delta_j(t - 1)) + (Delta_i(t) - Delta_i(t - 1)) / K;  Delta(-1) = 0;
    theta_outer,i <- optim_i(theta_outer,i, Delta~_i(t));  theta_i <- theta_outer,i.

    So the exchange of a round may last as long as the next round, which is its `lag`. Nodes have different outer
    parameters. With one node this is DiLoCo. The exchange of the last round is lost.

    State, per node: `params`, the outer parameters; `outer`, the optimizer's; `others`, the contribution of the other
    nodes to the next step, inner_j(Delta_j) - Delta_i / K. Bytes: those of `inner`.

    Args:
        inner: the average of the movements; `Mean()` in the paper.
        optim: see `Outer`.

    >>> eager, part = Eager(Mean(), OptimSpec("sgd", lr=1.0)), Part.alone(StackedCollectives(2))
    >>> memory = eager.memory({"w": torch.zeros(1)}, part)
    >>> params = eager({"w": torch.tensor([1.0, 3.0])}, part, memory)
    >>> params["w"]  # half of each node's own movement; the other half of the other's comes later
    tensor([0.5000, 1.5000])
    >>> eager(params, part, memory)["w"]  # nothing moved since: all nodes have the mean of all movements
    tensor([2., 2.])

    Reference: Kale et al., "Eager Updates For Overlapped Communication and Computation in DiLoCo", arXiv 2502.12996.
    No deviation.
    """

    common = False
    overlaps = True
    batched, steady = Outer.batched, Outer.steady

    def __init__(self, inner: Average, optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None) -> None:
        super().__init__(inner, optim)

    @property
    def random(self) -> bool:  # type: ignore[override]
        return any(stage.random for stage in chain(self.inner))

    def check(self, run: ExchangeFacts) -> None:
        super().check(run)
        Stages(self.inner).check(run)

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> Tree:
        nothing = super().init(values, run, memory)
        memory.own["others"] = nothing
        Stages(self.inner).init(nothing, run, memory)
        return nothing

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        moved, K = self.send(x, part, memory), part.comm.num_nodes
        mean = Stages(self.inner)(moved, altered(part, inplace=False), memory)
        delta = tree.map(lambda others, own: others + own / K, memory.own["others"], moved)
        memory.own["others"] = tree.map(lambda of_all, own: of_all - own / K, mean, moved)
        return delta


class NoLoCo(Average, batched=("lr", "momentum", "gamma")):
    """An outer step of each node with a small group of nodes, drawn at random for each exchange.

    With Delta_j = theta_j - phi_j, in groups of n nodes:
    delta_i <- mu delta_i + (eta / n) sum_group Delta_j - gamma (phi_i - mean_group phi);
    phi_i <- phi_i + delta_i;  theta_i <- phi_i.

    State, each node's own: `params` (phi) and `momentum` (delta).

    Bytes sent per node and exchange: Delta and phi in a ring of n nodes, 4 (n - 1) / n b P: 2 b P in pairs.

    Args:
        group_size: n. If it does not divide K, the last group is smaller; with n >= K there is one group.
        lr: eta, one for all or one for each node.
        momentum: mu, likewise.
        gamma: how far a node goes to the mean phi of its group, likewise.

    Raises:
        ValueError: for group_size < 1, lr or gamma < 0, a momentum outside [0, 1); before the first step for a group of
            more nodes than there are.

    >>> average, part = NoLoCo(lr=0.5), Part.alone(StackedCollectives(2))
    >>> memory = average.memory({"w": torch.tensor([2.0])}, part)
    >>> average({"w": torch.tensor([3.0, 5.0])}, part, memory)["w"]  # 2, the mean phi, + 0.5 (1 + 3) / 2
    tensor([3., 3.])

    Reference: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", arXiv
    2506.10911, and github.com/gensyn-ai/noloco, src/noloco/sparse_optimizer_c.py, whose gamma is its outer learning
    rate. Deviations: the movement is counted upwards, Delta = theta - phi, so that its term has a plus; gamma is 1
    unless it is given, in the middle of the paper's bounds (for pairs and mu = 0.5: 0.5 and 1.5); a node that is left
    alone in its group uses its own movement.
    """

    common = False

    def __init__(
        self, group_size: int = 2, lr: float | Tensor = 0.7, momentum: float | Tensor = 0.5,
        gamma: float | Tensor = 1.0,
    ) -> None:  # fmt: skip
        self.group_size = check.integer("group_size", group_size, what="the nodes that take an outer step together")
        self.lr = check.per_node("lr", lr, "[0, inf)", "of the outer steps")
        self.momentum = check.per_node("momentum", momentum, "[0, 1)", "of the outer steps")
        self.gamma = check.per_node("gamma", gamma, "[0, inf)", "how far a node goes to the mean of its group")

    def check(self, run: ExchangeFacts) -> None:
        for name in ("lr", "momentum", "gamma"):
            check.per_node(name, getattr(self, name), num_nodes=run.num_nodes)
        if self.group_size > max(2, run.num_nodes):  # pairs are the default, also in a run of one node
            raise ValueError(
                f"group_size={self.group_size} is larger than the {run.num_nodes} nodes: give group_size <= "
                f"{run.num_nodes}, which is one group of all."
            )

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        memory.own["params"], memory.own["momentum"] = values, tree.map(torch.zeros_like, values)

    def agree(self, x: Tree, part: Part, memory: Memory) -> Any:
        part = altered(part, inplace=False)
        mean = Mean(self.group_size if self.group_size < part.comm.num_nodes else None)
        moved = tree.map(torch.sub, x, memory.own["params"])
        # Both means are over the same groups, which the step draws.
        return {"moved": mean.agree(moved, part, memory), "middle": mean.agree(memory.own["params"], part, memory)}

    def receive(self, y: Any, part: Part, memory: Memory) -> Tree:
        mu, eta, gamma = (functools.partial(part.scaled, number) for number in (self.momentum, self.lr, self.gamma))

        def faster(delta: Tensor, movement: Tensor, phi: Tensor, mean: Tensor) -> Tensor:
            return mu(delta) + eta(movement) - gamma(phi - mean)

        phi = memory.own["params"]
        memory.own["momentum"] = tree.map(faster, memory.own["momentum"], y["moved"], phi, y["middle"])
        memory.own["params"] = tree.map(torch.add, phi, memory.own["momentum"])
        return memory.own["params"]

    def rate(self, number: int) -> Any:
        return self.lr


# ------------------------------------------------------------------------------------------------------ small parts


def outer_spec(
    optim: str | OptimSpec | type[torch.optim.Optimizer] | None, outer_lr: Any = None, usual: Any = OUTER_DEFAULTS["lr"]
) -> OptimSpec:
    """Return the outer optimizer: DiLoCo's for None, "sgd" and `torch.optim.SGD`, at the `usual` rate if none is given.

    >>> outer_spec("sgd", outer_lr=0.5), outer_spec(OptimSpec("sgd", lr=0.1))
    (OptimSpec(SGD, lr=0.5, momentum=0.9, nesterov=True), OptimSpec(SGD, lr=0.1))
    """
    if outer_lr is not None:
        check_lr("outer_lr", outer_lr)
    if optim is None or optim is torch.optim.SGD or (isinstance(optim, str) and optim.lower() == "sgd"):
        lr = usual if outer_lr is None else outer_lr
        return OptimSpec(torch.optim.SGD, **{**OUTER_DEFAULTS, "lr": lr})
    return ensure_optim_spec(optim, argument="outer_optim", lr=outer_lr)


def _unless(still: Tree, old: Any, new: Any) -> Any:
    """Return the values `new`, by name within nested dicts, but the `old` ones of the parameters that are `still`.

    >>> _unless({"w": torch.tensor([True])}, {"buffer": {"w": torch.zeros(1)}}, {"buffer": {"w": torch.ones(1)}})
    {'buffer': {'w': tensor([0.])}}
    """
    if not isinstance(new, dict):
        return new
    both = {name: x for name, x in new.items() if name in still and isinstance(old.get(name), Tensor)}
    kept = {name: torch.where(spread(still[name], x) > 0, old[name], x) for name, x in both.items()}
    return {name: kept[name] if name in kept else _unless(still, old.get(name, {}), x) for name, x in new.items()}


def _same_names(name: str, new: Any, old: Tree) -> Tree:
    """Check that a user's function returned a dict with the names that it was given."""
    if not isinstance(new, Mapping) or new.keys() != old.keys():
        raise TypeError(f"{name} returned {new!r:.60}; return a dict of tensors with the names that it was given.")
    return dict(new)


def as_weighting(weighting: Weighting) -> str | tuple[float, ...]:
    """Return the weighting of the nodes in a mean: a name, or one number per node.

    >>> as_weighting("examples"), as_weighting([30, 10])
    ('examples', (30.0, 10.0))
    >>> as_weighting("example")
    Traceback (most recent call last):
    ...
    ValueError: weighting='example' is not known; did you mean 'examples'? Allowed: 'equal', 'examples', a list of a \
number > 0 for each node.
    """
    if not isinstance(weighting, (list, tuple, Tensor)):
        return check.choice("weighting", weighting, ("equal", "examples"), "a list of a number > 0 for each node")
    numbers = weighting.tolist() if isinstance(weighting, Tensor) else weighting
    return tuple(float(check.number(f"weighting[{node}]", w, "(0, inf)")) for node, w in enumerate(numbers))


def relative(weights: Tensor, groups: Groups | None) -> Tensor:
    """Return the weights `[.., K]` relative to the mean of each node's island; 1 in one that weighs nothing.

    >>> relative(torch.tensor([1.0, 3.0, 0.0, 0.0]), [[0, 1], [2, 3]])
    tensor([0.5000, 1.5000, 1.0000, 1.0000])
    """
    shares = torch.ones_like(weights)
    for group in map(list, groups or [range(weights.shape[-1])]):
        mean = weights[..., group].mean(-1, keepdim=True)
        shares[..., group] = torch.where(mean > 0, weights[..., group] / mean, shares[..., group])
    return shares


def check_weighting(weighting: str | Sequence[float], run: RunFacts) -> None:
    """Raise a ValueError if the weights of a mean are not known."""
    if weighting == "examples" and run.num_examples is None:
        raise ValueError('weighting="examples" needs the number of examples of each node: RunFacts(num_examples=...).')
    if not isinstance(weighting, str):
        check.fits("weighting has numbers for", len(weighting), run.num_nodes, "one for each")
