"""K plain modules trained in a Python loop, in every composition of exchanges: what the library must compute.

It imports nothing from vecgym. Every `Module` here says for itself, from its paper or from the documented rule, what
the nodes exchange and how many bytes a node sends for it, averaged over the nodes. What the library draws at random
(masks, matchings, participants, islands) is given as functions of the step.

`Values` are the parameters, or the gradients, of each node: `values[node][name]`. Steps count from 0.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reference import compression
from tests.reference.demo import dct, fold, inverse_dct, make_chunks, strongest

Values = list[dict[str, Tensor]]
Groups = Sequence[Sequence[int]]

BYTES = 8  # of a value in float64


@dataclass
class World:
    """The state that the exchanges of one run share."""

    num_nodes: int
    num_examples: Sequence[int]  # of each node's shard
    sent: float = 0.0  # bytes in this step, averaged over the nodes
    blur: Callable[[Tensor], Tensor] = lambda x: x  # what rounding could do to an average

    def ring(self, payload: float, sizes: Sequence[int]) -> None:
        """Rings of these sizes reduce a payload: each member of a ring of n sends 2 (n - 1) / n of it."""
        self.sent += payload * sum(n * 2 * (n - 1) / n for n in sizes) / self.num_nodes

    def gather(self, payload: float, sizes: Sequence[int] | None = None) -> None:
        """Every node's payload goes to each other node of its group, of so many."""
        self.sent += payload * sum(n * (n - 1) for n in sizes or [self.num_nodes]) / self.num_nodes

    def average(self, values: Values, members: Sequence[int], weights: Sequence[float]) -> dict[str, Tensor]:
        """sum_k w_k x_k / sum_k w_k over the members."""
        total = sum(weights[k] for k in members)
        sums = {name: torch.stack([weights[k] * values[k][name] for k in members]).sum(0) for name in values[0]}
        return {name: self.blur(x / total) for name, x in sums.items()}

    def plain(self, values: Sequence[Tensor]) -> Tensor:
        """The plain mean of some tensors."""
        return self.blur(sum(values[1:], values[0]) / len(values))

    def weights(self, weighting: str) -> list[float]:
        return [1.0] * self.num_nodes if weighting == "equal" else [float(n) for n in self.num_examples]


def size(values: Values) -> int:
    return sum(x.numel() for x in values[0].values())


def clones(x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in x.items()}


def between(old: dict[str, Tensor], new: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    return {name: (1 - share) * old[name] + share * new[name] for name in old}


# ------------------------------------------------------------------------------------------------ the exchanges


class Module:
    """One exchange. `mean` is how it averages: `compressed` puts its own in the place."""

    world: World

    def begin(self, world: World, start: dict[str, Tensor]) -> None:
        self.world = world

    def active(self, t: int) -> set[int] | None:
        return None

    def local_gradients(self, grads: Values, params: Values, t: int) -> Values:
        return grads

    def shares_gradients(self, t: int) -> bool:
        """Whether `gradients` exchanges them: then a node without one has what the others have."""
        return False

    def gradients(self, grads: Values, t: int) -> Values:
        return grads

    def parameters(self, params: Values, t: int) -> Values:
        return params

    def mean(self, x: Values, t: int, groups: Groups | None = None, weights: Sequence[float] | None = None) -> Values:
        """The average of each group on its members; who is in none keeps its own."""
        world = self.world
        rings = [list(range(world.num_nodes))] if groups is None else groups
        world.ring(BYTES * size(x), [len(ring) for ring in rings])
        result = [clones(values) for values in x]
        for ring in rings:
            average = world.average(x, ring, weights or [1.0] * world.num_nodes)
            for node in ring:
                result[node] = clones(average)
        return result


class AverageGradients(Module):
    def shares_gradients(self, t: int) -> bool:
        return True

    def gradients(self, grads: Values, t: int) -> Values:
        return self.mean(grads, t)


@dataclass(eq=False)
class Average(Module):
    """The mean of the parameters every H steps."""

    H: int = 1
    participants: Callable[[int], list[int]] | None = None  # of step t's round
    islands: Callable[[int], Groups] | None = None
    weighting: str = "equal"
    server: bool = False  # who sat out begins from the mean too
    share: Sequence[float] | None = None  # in place of H
    coded: bool = False  # `mean` is one of codes

    def active(self, t: int) -> set[int] | None:
        return set(self.participants(t)) if self.participants else None

    def parameters(self, params: Values, t: int) -> Values:
        if self.share is not None:
            share = self.share[t]
            if share == 0:
                return params
            return [between(old, new, share) for old, new in zip(params, self._average(params, t))]
        return self._average(params, t) if (t + 1) % self.H == 0 else params

    def _average(self, params: Values, t: int) -> Values:
        weights = None if self.weighting == "equal" else self.world.weights(self.weighting)
        present = self.participants(t) if self.participants else None
        if self.server and present is not None:
            if self.coded:  # what the server has is what each participant is given
                theta = self.mean(params, t, [present], weights)[present[0]]
                return [clones(theta) for _ in params]
            self.world.sent += BYTES * size(params) * len(present) / self.world.num_nodes
            theta = self.world.average(params, present, self.world.weights(self.weighting))
            return [clones(theta) for _ in params]
        groups = self.islands(t) if self.islands else None if present is None else [present]
        return self.mean(params, t, groups, weights)


@dataclass(eq=False)
class Server(Module):
    """Delta = the participants' mean movement; theta <- a server optimizer's step along it (arXiv 2003.00295)."""

    name: str = "avg"
    lr: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3
    H: int = 1
    participants: Callable[[int], list[int]] | None = None
    weighting: str = "equal"

    def begin(self, world: World, start: dict[str, Tensor]) -> None:
        super().begin(world, start)
        self.theta = clones(start)
        self.m = {name: torch.zeros_like(x) for name, x in start.items()}
        self.v = {name: torch.full_like(x, self.tau**2) for name, x in start.items()}

    def active(self, t: int) -> set[int] | None:
        return set(self.participants(t)) if self.participants else None

    def parameters(self, params: Values, t: int) -> Values:
        if (t + 1) % self.H:
            return params
        present = self.participants(t) if self.participants else list(range(self.world.num_nodes))
        self.world.sent += BYTES * size(params) * len(present) / self.world.num_nodes
        average = self.world.average(params, present, self.world.weights(self.weighting))
        for name, theta in self.theta.items():
            self.theta[name] = theta + self.lr * self._direction(name, average[name] - theta)
        return [clones(self.theta) for _ in params]

    def _direction(self, name: str, delta: Tensor) -> Tensor:
        beta_1, beta_2 = self.betas
        if self.name == "avg":
            return delta
        if self.name == "avgm":
            self.m[name] = beta_1 * self.m[name] + delta
            return self.m[name]
        self.m[name] = beta_1 * self.m[name] + (1 - beta_1) * delta
        v, square = self.v[name], delta * delta
        if self.name == "adagrad":
            v = v + square
        elif self.name == "adam":
            v = beta_2 * v + (1 - beta_2) * square
        elif self.name == "yogi":
            v = torch.where(v > square, v - (1 - beta_2) * square, v + (1 - beta_2) * square * (v < square))
        else:
            raise ValueError(self.name)
        self.v[name] = v
        return self.m[name] / (v.sqrt() + self.tau)


@dataclass(eq=False)
class Proximal(Module):
    """FedProx: mu (theta_i - its start of the round) joins the gradient."""

    mu: float | Sequence[float] = 0.1  # a sequence: of each node
    H: int = 1

    def begin(self, world: World, start: dict[str, Tensor]) -> None:
        super().begin(world, start)
        self.start = [clones(start) for _ in range(world.num_nodes)]

    def local_gradients(self, grads: Values, params: Values, t: int) -> Values:
        mu = [self.mu] * len(grads) if isinstance(self.mu, (int, float)) else self.mu
        return [
            {name: g[name] + mu[i] * (params[i][name] - self.start[i][name]) for name in g} for i, g in enumerate(grads)
        ]

    def parameters(self, params: Values, t: int) -> Values:
        if (t + 1) % self.H == 0:
            self.start = [clones(x) for x in params]
        return params


@dataclass(eq=False)
class DiLoCo(Module):
    """Delta = mean of theta_outer - theta_i is the gradient of an outer optimizer (arXiv 2311.08105)."""

    outer: Callable[[list[Tensor]], Optimizer]
    H: int = 100
    share: Sequence[float] | None = None  # in place of H; with the default outer optimizer only
    share_lr: float = 0.7

    def begin(self, world: World, start: dict[str, Tensor]) -> None:
        super().begin(world, start)
        self.theta = {name: nn.Parameter(x) for name, x in clones(start).items()}
        self.optimizer = self.outer(list(self.theta.values()))
        self.momentum = {name: torch.zeros_like(x) for name, x in start.items()}

    def parameters(self, params: Values, t: int) -> Values:
        if self.share is not None:
            return self._partly(params, t, self.share[t])
        if (t + 1) % self.H:
            return params
        for name, delta in self._delta(params, t).items():
            self.theta[name].grad = delta
        self.optimizer.step()
        return [clones(self.theta) for _ in params]

    def _delta(self, params: Values, t: int) -> dict[str, Tensor]:
        return self.mean([{name: self.theta[name].detach() - x[name] for name in x} for x in params], t)[0]

    def _partly(self, params: Values, t: int, share: float) -> Values:
        """Parameters, outer parameters and momentum go a part of the way of the paper's SGD."""
        if share == 0:
            return params
        theta = clones(self.theta)
        new, momentum = {}, {}
        for name, delta in self._delta(params, t).items():
            momentum[name] = 0.9 * self.momentum[name] + delta
            new[name] = theta[name] - self.share_lr * (delta + 0.9 * momentum[name])
        self.momentum = between(self.momentum, momentum, share)
        self.theta = {name: nn.Parameter(x) for name, x in between(theta, new, share).items()}
        return [between(x, new, share) for x in params]


@dataclass(eq=False)
class Sparse(Module):
    """SPARTA: the mean on the coordinates `mask(t)` of each tensor, every `interval` steps, written `delay` later."""

    mask: Callable[[int], dict[str, Tensor]]
    interval: int = 1
    delay: int = 0
    bits: int | None = None

    def begin(self, world: World, start: dict[str, Tensor]) -> None:
        super().begin(world, start)
        self.under_way: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}

    def parameters(self, params: Values, t: int) -> Values:
        if (t + 1) % self.interval == 0:
            self.under_way[t + self.delay] = self._exchange(params, t)
        params = [clones(x) for x in params]
        for name, (index, mean) in self.under_way.pop(t, {}).items():
            for x in params:
                x[name].view(-1)[index] = mean
        return params

    def _exchange(self, params: Values, t: int) -> dict[str, tuple[Tensor, Tensor]]:
        found = {}
        for name, index in self.mask(t).items():
            values = [x[name].reshape(-1)[index] for x in params]
            if self.bits is None:
                self.world.ring(BYTES * len(index), [self.world.num_nodes])
            else:
                code = compression.quantise(self.bits)
                values = [code(t, name, node, x) if len(x) else x for node, x in enumerate(values)]
                self.world.gather(quantised_bytes(len(index), self.bits))
            found[name] = index, self.world.plain(values)
        return found


@dataclass(eq=False)
class TopKSparse(Module):
    """Each node sends what moved most since it was last sent; a value sent becomes the mean over its senders."""

    fraction: float = 0.005
    bits: int | None = None

    def begin(self, world: World, start: dict[str, Tensor]) -> None:
        super().begin(world, start)
        self.last = clones(start)  # the same on every node

    def parameters(self, params: Values, t: int) -> Values:
        params = [clones(x) for x in params]
        for name, last in self.last.items():
            n, k = last.numel(), compression.count(self.fraction, last.numel())
            self.world.gather(k * BYTES + 4 * k if self.bits is None else quantised_bytes(k, self.bits) + 4 * k)
            heard: dict[int, list[Tensor]] = {}
            for node, x in enumerate(params):
                moved = (x[name] - last).abs().view(n)
                sent = torch.argsort(moved, descending=True, stable=True)[:k]
                values = x[name].view(n)[sent]
                if self.bits is not None and n > 0:
                    values = compression.quantise(self.bits)(t, name, node, values)
                for c, value in zip(sent.tolist(), values):
                    heard.setdefault(c, []).append(value.clone())
            for c, of_senders in heard.items():
                mean = self.world.plain(of_senders)
                last.view(n)[c] = mean
                for x in params:
                    x[name].view(n)[c] = mean
        return params


@dataclass(eq=False)
class Gossip(Module):
    """theta_i <- sum_j W_ij theta_j every `every` steps; W = matrix(exchange, step)."""

    matrix: Callable[[int, int], Tensor]
    every: int = 1

    def parameters(self, params: Values, t: int) -> Values:
        if (t + 1) % self.every:
            return params
        W, K = self.matrix(t // self.every, t), self.world.num_nodes
        links = sum(1 for i in range(K) for j in range(K) if i != j and W[i, j] != 0)
        self.world.sent += BYTES * size(params) * links / K
        zero = {name: torch.zeros_like(x) for name, x in params[0].items()}
        mixed = [clones(zero) for _ in range(K)]
        for i in range(K):
            for j in range(K):
                for name, x in params[j].items():
                    mixed[i][name] += float(W[i, j]) * x
        return mixed


@dataclass(eq=False)
class DeMo(Module):
    """The strongest cosine components of a momentum of the gradients (arXiv 2411.19870, algorithm 1)."""

    decay: float = 0.999
    k: int = 32
    chunk: int = 64

    def begin(self, world: World, start: dict[str, Tensor]) -> None:
        super().begin(world, start)
        self.deltas = [{name: torch.zeros_like(x) for name, x in start.items()} for _ in range(world.num_nodes)]

    def shares_gradients(self, t: int) -> bool:
        return True

    def gradients(self, grads: Values, t: int) -> Values:
        decoded = self._decoded(grads)
        return [clones(decoded) for _ in grads]

    def _decoded(self, grads: Values) -> dict[str, Tensor]:
        result = {}
        for name, first in grads[0].items():
            if first.numel() == 0:
                result[name] = first
                continue
            shape, flats = fold(first.shape), []
            for delta, g in zip(self.deltas, grads):
                delta[name] = self.decay * delta[name] + g[name]
                flats.append(delta[name].view(shape))
            decoded = torch.zeros(shape, dtype=first.dtype)
            for piece in make_chunks(shape, self.chunk):
                decoded[piece] = self._piece(flats, piece)
            result[name] = decoded.view(first.shape)
        return result

    def _piece(self, flats: list[Tensor], piece: Any) -> Tensor:
        """The mean of what is sent of one chunk; it is taken away from each momentum."""
        total = torch.zeros_like(flats[0][piece])
        senders = torch.zeros_like(total)
        for delta in flats:
            X = dct(delta[piece])
            sent = strongest(X, self.k)
            q = torch.where(sent, X, 0.0)
            delta[piece] -= inverse_dct(self.world.blur(q))
            total += q
            senders += sent
        self.world.gather(min(self.k, total.numel()) * (8 + BYTES))
        return inverse_dct(self.world.blur(total / senders.clamp(min=1)))


# ---------------------------------------------------------------------------------------------- around an exchange


@dataclass(eq=False)
class Every(Module):
    """The module at every n-th step; inside, time counts in exchanges. Who trains, what is added locally: each step."""

    n: int
    module: Module

    def begin(self, world: World, start: dict[str, Tensor]) -> None:
        self.module.begin(world, start)

    def active(self, t: int) -> set[int] | None:
        return self.module.active(t // self.n)

    def local_gradients(self, grads: Values, params: Values, t: int) -> Values:
        return self.module.local_gradients(grads, params, t // self.n)

    def shares_gradients(self, t: int) -> bool:
        return (t + 1) % self.n == 0 and self.module.shares_gradients(t // self.n)

    def gradients(self, grads: Values, t: int) -> Values:
        return self.module.gradients(grads, t // self.n) if (t + 1) % self.n == 0 else grads

    def parameters(self, params: Values, t: int) -> Values:
        return self.module.parameters(params, t // self.n) if (t + 1) % self.n == 0 else params


@dataclass(eq=False)
class Delayed(Module):
    """The change that the module makes to the parameters, d steps later."""

    d: int
    module: Module

    def begin(self, world: World, start: dict[str, Tensor]) -> None:
        self.module.begin(world, start)
        self.under_way: dict[int, Values] = {}

    def active(self, t: int) -> set[int] | None:
        return self.module.active(t)

    def local_gradients(self, grads: Values, params: Values, t: int) -> Values:
        return self.module.local_gradients(grads, params, t)

    def gradients(self, grads: Values, t: int) -> Values:
        return self.module.gradients(grads, t)

    def parameters(self, params: Values, t: int) -> Values:
        new = self.module.parameters([clones(x) for x in params], t)
        self.under_way[t + self.d] = [{name: y[name] - x[name] for name in x} for x, y in zip(params, new)]
        due = self.under_way.pop(t, None)
        if due is None:
            return params
        return [{name: x[name] + change[name] for name in x} for x, change in zip(params, due)]


class Compressed(Module):
    """Every average that the module takes is one of codes, with error feedback; `reference`: of what moved since."""

    def __init__(
        self,
        module: Module,
        code: Callable[[str], compression.Codec],  # of "gradients" or "parameters"
        code_bytes: Callable[[int], float],
        error_feedback: bool,
        reference: bool,
    ) -> None:
        self.module, self.code, self.code_bytes = module, code, code_bytes
        self.error_feedback, self.with_reference = error_feedback, reference
        module.mean = self._mean  # type: ignore[method-assign]
        if isinstance(module, Average):
            module.coded = True
        self.phase = "parameters"

    def begin(self, world: World, start: dict[str, Tensor]) -> None:
        super().begin(world, start)
        self.module.begin(world, start)
        self.residuals = {
            phase: [{name: torch.zeros_like(x) for name, x in start.items()} for _ in range(world.num_nodes)]
            for phase in ("gradients", "parameters")
        }
        # Movements are compared with the last mean movement, and before the first there was none.
        values = self.with_reference and isinstance(self.module, Average)
        self.reference = clones(start) if values else {n: torch.zeros_like(x) for n, x in start.items()}

    def shares_gradients(self, t: int) -> bool:
        return self.module.shares_gradients(t)

    def gradients(self, grads: Values, t: int) -> Values:
        self.phase = "gradients"
        return self.module.gradients(grads, t)

    def parameters(self, params: Values, t: int) -> Values:
        self.phase = "parameters"
        return self.module.parameters(params, t)

    def local_gradients(self, grads: Values, params: Values, t: int) -> Values:
        return self.module.local_gradients(grads, params, t)

    def active(self, t: int) -> set[int] | None:
        return self.module.active(t)

    def _mean(self, x: Values, t: int, groups: Groups | None = None, weights: Sequence[float] | None = None) -> Values:
        uses_reference = self.with_reference and self.phase == "parameters"
        r = self.reference if uses_reference else {name: torch.zeros_like(y) for name, y in x[0].items()}
        residuals, code = self.residuals[self.phase], self.code(self.phase)
        rings = [list(range(len(x)))] if groups is None else groups
        sent: Values = [{} for _ in x]
        for node in [node for ring in rings for node in ring]:
            for name, y in x[node].items():
                p = y - r[name] + residuals[node][name]
                sent[node][name] = code(t, name, node, p)
                if self.error_feedback:
                    residuals[node][name] = p - sent[node][name]
        for y in x[0].values():
            if isinstance(self.module, Average) and self.module.server:  # to which each participant sends its own
                self.world.sent += self.code_bytes(y.numel()) * len(rings[0]) / len(x)
            else:
                self.world.gather(self.code_bytes(y.numel()), [len(ring) for ring in rings])
        result = [clones(y) for y in x]
        for ring in rings:
            total = sum((weights or [1.0] * len(x))[k] for k in ring)
            for name in r:
                total_sent = sum((weights[k] if weights else 1.0) * sent[k][name] for k in ring)
                average = self.world.blur(r[name] + total_sent / total)
                for node in ring:
                    result[node][name] = average.clone()
        if uses_reference:
            self.reference = clones(result[rings[0][0]])
        return result


def quantised_bytes(n: int, bits: int) -> int:
    return (n if bits == 8 else math.ceil(n / 2)) + 4


# ---------------------------------------------------------------------------------------------------- the training


class Whose(NamedTuple):
    """The nodes whose parameters, and whose buffers, the run's model has the mean of."""

    parameters: list[int]
    buffers: list[int]


@dataclass
class Plan:
    """One run.

    Attributes:
        model: is copied.
        batches: `batches[step][node]`, by the node's own steps.
        parts: how a batch is cut into micro-batches: a function batch -> [(part, its share, its first example)].
        modules: what is exchanged, in order.
        optimizer: (node, named parameters) -> the inner optimizer.
        rates: (step, node) -> the factor of every learning rate of that optimizer, in units of what it was made with.
        max_norm: of each node; None: no clipping.
        sign: DeMo's own optimizer: the gradients are clipped and scaled by rate(step, node) before they are exchanged,
            and the sign of what comes back is what the optimizer takes.
        observe: called with the number of steps done, the models, and of which the run's model is made.
        blur: what rounding could do to an average.
        drawing: (the node's own step, node, first example) -> a context in which the model draws its random numbers.
    """

    model: nn.Module
    batches: Sequence[Sequence[Any]]
    num_examples: Sequence[int]
    modules: Sequence[Module]
    optimizer: Callable[[int, dict[str, Tensor]], Optimizer]
    rates: Callable[[int, int], float]
    parts: Callable[[Any], list[tuple[Any, float, int]]]
    max_norm: Sequence[float] | None = None
    sign: Callable[[int, int], float] | None = None
    observe: Callable[[int, list[nn.Module], Whose], None] = lambda step, models, whose: None
    blur: Callable[[Tensor], Tensor] = lambda x: x
    drawing: Callable[[int, int, int], AbstractContextManager[None]] = lambda step, node, first: nullcontext()


@dataclass
class Result:
    """The remains of a run."""

    models: list[nn.Module]
    losses: list[list[float]] = field(default_factory=list)  # [steps][K]; nan where a node did not train
    sent: list[float] = field(default_factory=list)  # [steps]: bytes per node
    whose: Whose = field(default_factory=lambda: Whose([], []))


def train(plan: Plan) -> Result:
    """The loop: gradients, exchange, clipping, optimizers, exchange."""
    num_nodes = len(plan.batches[0])
    models = [copy.deepcopy(plan.model) for _ in range(num_nodes)]  # each part in its mode
    thetas = [trained(model) for model in models]
    optimizers = [plan.optimizer(node, theta) for node, theta in enumerate(thetas)]
    bases = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    world, result = World(num_nodes, plan.num_examples, blur=plan.blur), Result(models)
    for module in plan.modules:
        module.begin(world, clones(thetas[0]))
    made = [0] * num_nodes
    result.whose = Whose(list(range(num_nodes)), list(range(num_nodes)))
    plan.observe(0, models, result.whose)
    for t in range(len(plan.batches)):
        world.sent = 0.0
        present = active(plan.modules, t, num_nodes)
        losses = [math.nan] * num_nodes
        for node in present:
            parts = plan.parts(plan.batches[made[node]][node])
            losses[node] = backward(models[node], parts, partial(plan.drawing, made[node], node))
            made[node] += 1
        exchange_gradients(plan, thetas, present, t)
        for node in present:
            if plan.max_norm is not None and plan.sign is None:
                nn.utils.clip_grad_norm_(thetas[node].values(), plan.max_norm[node])
            for group, base in zip(optimizers[node].param_groups, bases[node]):
                group["lr"] = base * plan.rates(t, node)
            optimizers[node].step()
        exchange_parameters(plan, thetas, t)
        result.whose = whose(plan.modules, present, made)
        result.losses.append(losses)
        result.sent.append(world.sent)
        plan.observe(t + 1, models, result.whose)
    return result


def whose(modules: Sequence[Module], present: list[int], made: list[int]) -> Whose:
    """Of all, if a server tells those who sit out; else of those who have trained."""
    everyone = list(range(len(made)))
    if len(present) == len(everyone):
        return Whose(everyone, [node for node in everyone if made[node]])
    trained = [node for node in everyone if made[node]]
    if not all(served(module) for module in modules if module.active(0) is not None):
        return Whose(trained, trained)
    return Whose(everyone, trained)


def served(module: Any) -> bool:
    """Whether a server sends to those who sit out."""
    while hasattr(module, "module"):
        module = module.module
    return isinstance(module, Server) or module.server


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def active(modules: Sequence[Module], t: int, num_nodes: int) -> list[int]:
    """The nodes that every module lets train."""
    present = set(range(num_nodes))
    for module in modules:
        chosen = module.active(t)
        present &= present if chosen is None else chosen
    return sorted(present)


def backward(
    model: nn.Module, parts: list[tuple[Any, float, int]], drawing: Callable[[int], AbstractContextManager[None]]
) -> float:
    """Leave the gradient of the mean loss in `.grad`; None where it depends on a parameter in no part."""
    model.zero_grad()
    total = 0.0
    for batch, share, first in parts:
        with drawing(first):
            loss = model(batch)
        if share == 0:  # a mean over nothing, which is nan, counts as 0, as its gradient does
            params = [p for p in model.parameters() if p.requires_grad]
            used = [p for p, g in zip(params, torch.autograd.grad(loss, params, allow_unused=True)) if g is not None]
            loss = sum((0 * p.sum() for p in used), torch.zeros(()).double())
        loss = loss * share
        loss.backward()
        total += float(loss.detach())
    return total


@torch.no_grad()
def exchange_gradients(plan: Plan, thetas: list[dict[str, Tensor]], present: list[int], t: int) -> None:
    """The terms that the modules add to each node's gradient, and the gradients they exchange if all nodes train."""
    zeros = [{name: torch.zeros_like(p) for name, p in theta.items()} for theta in thetas]
    having = [{name for name, p in theta.items() if p.grad is not None} for theta in thetas]
    if any(isinstance(module, Proximal) for module in plan.modules):  # whose term depends on every parameter
        having = [set(theta) for theta in thetas]
    grads: Values = [
        {name: zero[name] if p.grad is None else p.grad.clone() for name, p in theta.items()}
        for theta, zero in zip(thetas, zeros)
    ]
    for module in plan.modules:
        grads = module.local_gradients(grads, [clones(theta) for theta in thetas], t)
    if plan.sign is not None:
        for node, g in enumerate(grads):
            factor = plan.sign(t, node)
            if plan.max_norm is not None:
                norm = math.sqrt(sum(float((x * x).sum()) for x in g.values()))
                factor *= min(1.0, plan.max_norm[node] / (norm + 1e-6))
            grads[node] = {name: factor * x for name, x in g.items()}
    if len(present) == len(thetas):
        for module in plan.modules:
            grads = module.gradients(grads, t)
        if any(module.shares_gradients(t) for module in plan.modules):
            having = [set().union(*having)] * len(thetas)
    for node in present:
        for name, p in thetas[node].items():
            p.grad = grads[node][name].sign() if plan.sign is not None else grads[node][name].clone()
            if name not in having[node]:  # torch's optimizers and its clipping leave it out
                p.grad = None


@torch.no_grad()
def exchange_parameters(plan: Plan, thetas: list[dict[str, Tensor]], t: int) -> None:
    values: Values = [clones(theta) for theta in thetas]
    for module in plan.modules:
        values = module.parameters(values, t)
    for theta, new in zip(thetas, values):
        for name, p in theta.items():
            p.copy_(new[name])
