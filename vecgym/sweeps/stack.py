"""Many configurations of K nodes as one stack of C * K nodes, and a training step of all of them.

Gradients are one call for all nodes. What is exchanged is each configuration's own affair: its strategy sees its K
rows and collectives among them, just as it does in a run by itself, so any strategy can be stacked. The inner
optimizer is one update for all neighbours in the stack that share its class, with one hyperparameter per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vecgym.collectives import StackedCollectives
from vecgym.core import nodes, tree
from vecgym.core.tree import Tree
from vecgym.data import EvalBatches
from vecgym.engine import Engine, Local
from vecgym.optim import clip_grad_norm
from vecgym.optim.merge import Key, merge_key, merged_spec, per_row
from vecgym.strategy import CommunicationModule, Context, Strategy
from vecgym.strategy.per_rank import PerRankStrategy, is_per_rank

# A merged exchange holds what would be one row for a configuration, such as outer parameters, once for each node. Of
# small models, whose exchange is Python above all, that is the lesser cost.
MAX_MERGED_ELEMENTS = 1 << 16


class StackMetrics(NamedTuple):
    """What a step observed, of C configurations."""

    losses: Tensor  # [C, K], before the update; nan where a node did not train
    lrs: list[float]
    active: list[list[int] | None]  # the nodes that trained; None: all
    sent_bytes: list[float]  # per node, of each configuration
    distances: list[float] | None  # of the nodes of each configuration to their average, before the exchange


class StackEvaluation(NamedTuple):
    """Mean losses over the validation examples, float64."""

    average: Tensor  # [C]: of the averaged models
    nodes: Tensor  # [C, K]: of each node's own model


@dataclass
class Member:
    """One configuration of a stack.

    Attributes:
        model: its initial parameters and buffers.
        strategy: what its nodes do and exchange.
        seed: of its random numbers.
        comm: the collectives among its own nodes.
        num_examples: of each node's shard.
    """

    model: nn.Module
    strategy: Strategy
    seed: int
    comm: StackedCollectives
    num_examples: tuple[int, ...] | None = None
    limits: tuple[int, ...] | None = None  # of each node, the most examples of a batch that are its own; None: all are

    def __post_init__(self) -> None:
        if is_per_rank(self.strategy):
            self.strategy = PerRankStrategy(self.strategy, self.model)


class Stack:
    """C configurations of K nodes each, trained together.

    A tensor has either one row per configuration, `[C, *]`: the same on its K nodes, or one per node, `[C * K, *]`.
    All parameters have the same kind: `rows` = 1 or K rows per configuration.

    Args:
        members: with the same K; those with equal `optimizer_key` next to one another.
        engine: prepared, of a model that is built like the members'.
        max_steps: the length of the run.
        minibatch_size: examples at a time.

    Two configurations with different learning rates:

    >>> from vecgym.strategy import FedAvgStrategy
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> engine, batch = Engine(Line()), torch.ones(2 * 3, 1)
    >>> _ = engine.prepare(batch)
    >>> members = [Member(Line(), FedAvgStrategy("sgd", lr=lr), 0, StackedCollectives(3)) for lr in (0.1, 0.5)]
    >>> stack = Stack(members, engine, max_steps=1)
    >>> stack.step(batch).losses.shape, stack.params["w"].shape
    (torch.Size([2, 3]), torch.Size([6]))
    >>> stack.own_params(0)["w"], stack.own_params(1)["w"]
    (tensor([0.2000, 0.2000, 0.2000]), tensor([1., 1., 1.]))
    """

    def __init__(
        self, members: Sequence[Member], engine: Engine, *, max_steps: int, minibatch_size: int | None = None
    ) -> None:
        self.members = list(members)
        self.engine = engine
        self.max_steps = max_steps
        self.minibatch_size = minibatch_size
        self.num_nodes = self.members[0].comm.num_nodes  # K
        self.done = 0  # steps
        self.rows = 1
        values = [{**dict(m.model.named_parameters()), **dict(m.model.named_buffers())} for m in self.members]
        self._set_params({n: torch.stack([v[n].detach() for v in values]) for n in engine.params})
        self.buffers = {n: self._start(n, [v[n].detach() for v in values]) for n in engine.buffers}
        self._has_numbers_of_nodes = any(map(self._differs_by_node, range(self.num_configs)))
        self._exchanges_gradients = any(touches_gradients(member.strategy) for member in self.members)
        self.groups = self._formed_groups()
        self.exchanges = self._formed_exchanges()
        for exchange in self.exchanges:
            optimizer, exchange.state = exchange.init(self._part(exchange), self._context(exchange, inplace=False))
            group = next(group for group in self.groups if group.start <= exchange.start < group.stop)
            if group.is_own:
                group.state = optimizer
        for group in self.groups:
            if not group.is_own:
                group.state = group.init(self._part(group))

    @property
    def num_configs(self) -> int:
        return len(self.members)

    def own_params(self, c: int) -> Tree:
        """The parameters of one configuration, `[1 or K, *]`."""
        return self._views[c]

    def own_buffers(self, c: int) -> Tree:
        """The buffers of one configuration, `[1 or K, *]`."""
        first = c * self.num_nodes
        return {n: b[first : first + self.num_nodes] if self._changes(n) else b[:1] for n, b in self.buffers.items()}

    # ------------------------------------------------------------------------------------------- a step

    def step(self, batch: Any, measure_distance: bool = False) -> StackMetrics:
        """One optimizer step of every node.

        Args:
            batch: leaves `[C * K, B, ...]`, the configurations one after the other.
            measure_distance: how far the nodes are apart before they exchange their parameters.
        """
        contexts = [self._context(member) for member in self.members]
        active = [m.strategy.active_nodes(ctx) for m, ctx in zip(self.members, contexts)]
        take = self._full_step if all(chosen is None for chosen in active) else self._partial_step
        with ExitStack() as recordings:
            transfers = [recordings.enter_context(each.comm.ledger.recording()) for each in self.exchanges]
            losses, lrs = take(batch, contexts, active)
            distances = self.consensus_distance() if measure_distance else None
            self._exchange_parameters(contexts)
        self.done += 1
        sent_bytes = [
            float(sum(transfer.sent_bytes for transfer in own))
            for own, exchange in zip(transfers, self.exchanges)
            for _ in range(exchange.size)
        ]
        return StackMetrics(losses.view(self.num_configs, self.num_nodes), lrs, active, sent_bytes, distances)

    def _full_step(
        self, batch: Any, contexts: list[Context], active: list[list[int] | None]
    ) -> tuple[Tensor, list[float]]:
        local = self._gradients(self._wide_params(), self.buffers, batch, range(self.num_configs * self.num_nodes))
        self.buffers = local.buffers
        each = self._exchanged(local.grads, contexts) if self._exchanges_gradients else [local.grads]
        own_gradients = any(x.shape[0] > 1 for g in each for x in g.values())
        if self.rows == 1 and self.num_nodes > 1 and (own_gradients or self._has_numbers_of_nodes):
            self._widen()
        lrs = [0.0] * self.num_configs
        for group in self.groups:
            params = self._part(group)
            if self._exchanges_gradients:
                grads = self._joined(each[group.start : group.stop])
            else:
                grads = group.part(local.grads, self.rows)
            new = group.update(params, grads, contexts, [self.rows] * group.size)
            for name, p in params.items():
                if new[name] is not p:
                    p.copy_(new[name])
            lrs[group.start : group.stop] = group.lrs
        return local.losses, lrs

    def _partial_step(
        self, batch: Any, contexts: list[Context], active: list[list[int] | None]
    ) -> tuple[Tensor, list[float]]:
        """The same where some nodes do not train: the rows of those that do, the others keep their state."""
        self._widen()
        K = self.num_nodes
        own = [torch.arange(K) if chosen is None else torch.tensor(chosen, dtype=torch.long) for chosen in active]
        counts = [len(rows) for rows in own]
        rows = torch.cat([c * K + x for c, x in enumerate(own)])
        if not len(rows):
            losses = next(iter(self.params.values())).new_full((self.num_configs * K,), torch.nan)
            return losses, [_mean(member.strategy.lr(ctx)) for member, ctx in zip(self.members, contexts)]
        everything = (self.params, self.buffers)
        params, buffers = (nodes.take_rows(x, rows) for x in everything)
        batch = tree.map_leaves(lambda x: x[rows.to(x.device)], batch)
        local = self._gradients(params, buffers, batch, rows.tolist())
        parts = [ctx if chosen is None else replace(ctx, rows=x) for ctx, chosen, x in zip(contexts, active, own)]
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        each = []
        for exchange in self.exchanges:
            a, b, ctx = ends[exchange.start], ends[exchange.stop], parts[exchange.start]
            grads = {n: g[a:b] for n, g in local.grads.items()}
            if exchange.size == 1:
                grads = exchange.gradients(grads, {n: p[a:b] for n, p in params.items()}, ctx)
            each.append(nodes.expand(grads, b - a))
        lrs = [0.0] * self.num_configs
        for group in self.groups:
            a, b = ends[group.start], ends[group.stop]
            here = rows[a:b] - group.start * K
            state = group.state
            group.state = nodes.take_rows(state, here)
            mine = [g for e, g in zip(self.exchanges, each) if group.start <= e.start < group.stop]
            grads = {n: torch.cat([g[n] for g in mine]) for n in params}
            new = group.update({n: p[a:b] for n, p in params.items()}, grads, parts, counts[group.start : group.stop])
            group.state = nodes.put_rows(state, here, group.state, group.size * K, inplace=True)
            nodes.put_rows(self._part(group), here, new, group.size * K, inplace=True)
            lrs[group.start : group.stop] = group.lrs
        for name in filter(self._changes, self.buffers):
            self.buffers[name].index_copy_(0, rows.to(self.buffers[name].device), local.buffers[name])
        losses = local.losses.new_full((self.num_configs * K,), torch.nan)
        return losses.index_copy_(0, rows.to(losses.device), local.losses), lrs

    def _gradients(self, params: Tree, buffers: Tree, batch: Any, rows: Sequence[int]) -> Local:
        """Each node's own loss and gradient; of a configuration by itself perhaps that of their mean."""
        K = self.num_nodes
        return self.engine.gradients(
            params,
            buffers,
            batch,
            seed=[self.members[row // K].seed for row in rows],
            step=self.done,
            node_ids=[row % K for row in rows],
            minibatch_size=self.minibatch_size,
            mean=self._takes_mean_gradient,
            limits=self._limits(rows),
        )

    def _limits(self, rows: Sequence[int]) -> list[int] | None:
        each = [member.limits for member in self.members]
        found = [own[row % self.num_nodes] for row in rows if (own := each[row // self.num_nodes]) is not None]
        return found or None

    def _exchanged(self, grads: Tree, contexts: list[Context]) -> list[Tree]:
        """What each configuration's optimizer takes, `[1 or K, *]`."""
        K = 1 if self._takes_mean_gradient else self.num_nodes
        each = [{n: g[c * K : (c + 1) * K] for n, g in grads.items()} for c in range(self.num_configs)]
        for exchange in self.exchanges:
            if exchange.size == 1:
                c = exchange.start
                each[c] = exchange.gradients(each[c], self._part(exchange), contexts[c])
        return each

    def _exchange_parameters(self, contexts: list[Context]) -> None:
        for exchange in self.exchanges:
            if exchange.size > 1:
                self._widen()
            ctx = contexts[exchange.start] if exchange.size == 1 else self._context(exchange)
            params = self._part(exchange)
            shared, changed = exchange.strategy.exchange_parameters(params, exchange.state, ctx)
            exchange.state = nodes.unshared(changed, exchange.state, (params,))
            if any(x.shape[0] > self.rows * exchange.size for x in shared.values()):
                self._widen()
                params = self._part(exchange)
            for name, p in params.items():
                if shared[name] is not p:
                    p.copy_(shared[name])

    def _joined(self, each: list[Tree]) -> Tree:
        """The gradients of a group in one tree, with the rows of its parameters."""
        wide = [nodes.expand(grads, self.rows) for grads in each]
        return {name: torch.cat([grads[name] for grads in wide]) for name in wide[0]} if len(wide) > 1 else wide[0]

    # ------------------------------------------------------------------------------------------- evaluation

    @torch.no_grad()
    def evaluate(self, batches: Sequence[EvalBatches]) -> StackEvaluation:
        """Evaluate in eval mode, each configuration on its own of `batches`; nothing is changed.

        Every batch is one call, for the averaged models and for each node's own.
        """
        C, K = self.num_configs, self.num_nodes
        sets = list({id(each): each for each in batches}.values())
        which = torch.tensor([next(i for i, one in enumerate(sets) if one is each) for each in batches])
        per_node = sets[0].per_node
        same = self.rows == 1 and not any(map(self._changes, self.buffers))
        params = self._models(self.params, per_node, same)
        changing = self._models({n: b for n, b in self.buffers.items() if self._changes(n)}, per_node, same)
        num_average = C * K if per_node else C
        sums, count = torch.zeros(2, C, K, dtype=torch.float64), 0
        for each in zip(*sets):
            batch, size = [one for one, _ in each], each[0][1]
            own_batches = per_node or len(sets) > 1
            here = self._eval_batch(batch, which, per_node, same) if own_batches else batch[0]
            losses = self.engine.losses(params, {**self.buffers, **changing}, here, own_batches=own_batches)
            losses = losses.cpu().double()
            average = losses[:num_average].view(C, -1)
            sums[0] += size * average
            sums[1] += size * (average if same else losses[num_average:].view(C, K))
            count += size
        return StackEvaluation(sums[0].mean(1) / count, sums[1] / count)

    def _models(self, values: Tree, per_node: bool, same: bool) -> Tree:
        """A row for each model to evaluate: the averages `[C, *]` (`per_node`: `[C * K, *]`), then the nodes' own."""
        K, models = self.num_nodes, {}
        for name, x in values.items():
            y = x.unflatten(0, (self.num_configs, -1))  # [C, 1 or K, *]
            numbers = y.is_floating_point() or y.is_complex()
            mean = y.mean(1) if y.shape[1] > 1 and numbers else y[:, 0]
            mean = mean.repeat_interleave(K, 0) if per_node else mean
            own = x if x.shape[0] == self.num_configs * K else x.repeat_interleave(K, 0)
            models[name] = mean if same else torch.cat([mean, own])
        return models

    def _eval_batch(self, batches: list[Any], which: Tensor, per_node: bool, same: bool) -> Any:
        """The batch of each row of `_models`."""
        if per_node:  # [C * K, B, ...] for the averages, and the same for the nodes' own
            chosen = chosen_batches(batches, which)
            return chosen if same else joined_batches([chosen, chosen])
        average = combined(lambda x: torch.stack(list(x))[which.to(x[0].device)], batches)  # [C, B, ...]
        own = tree.map_leaves(lambda x: x.repeat_interleave(self.num_nodes, 0), average)
        return average if same else joined_batches([average, own])

    def _own(self, x: Tensor, members: Tensor) -> Tensor:
        """The rows of some configurations."""
        return x.unflatten(0, (self.num_configs, -1))[members.to(x.device)].flatten(0, 1)

    def consensus_distance(self) -> list[float]:
        """How far each configuration's nodes are apart; see `vecgym.core.nodes.consensus_distance`."""
        return [float(nodes.consensus_distance(own)) for own in self._views]

    # ------------------------------------------------------------------------------------- leaving, saving

    def keep(self, chosen: Sequence[int]) -> None:
        """Go on with some of the configurations only."""
        mine = torch.tensor(list(chosen), dtype=torch.long)
        params = {n: self._own(p, mine) for n, p in self.params.items()}
        self.buffers = {n: self._own(b, mine) if self._changes(n) else b for n, b in self.buffers.items()}
        self.members = [self.members[c] for c in chosen]
        self._set_params(params)
        self.groups = _left(self.groups, chosen, self.members)
        self.exchanges = _left(self.exchanges, chosen, self.members)

    def state(self) -> dict[str, Any]:
        """All that evolves: nested dicts and lists of tensors and numbers."""
        return {
            "done": self.done,
            "params": self.params,
            "buffers": self.buffers,
            "optimizer": [group.state for group in self.groups],
            "exchanges": [exchange.state for exchange in self.exchanges],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.done = state["done"]
        self.rows = next(iter(state["params"].values())).shape[0] // self.num_configs
        self._set_params(state["params"])
        self.buffers = state["buffers"]
        for group, held in zip(self.groups, state["optimizer"]):
            group.state = held
        for exchange, held in zip(self.exchanges, state["exchanges"]):
            exchange.state = held

    @property
    def can_be_saved(self) -> bool:
        """Whether `state` is all: strategies written for one rank keep theirs to themselves."""
        return not any(isinstance(member.strategy, PerRankStrategy) for member in self.members)

    # --------------------------------------------------------------------------------------------- helpers

    def _context(self, member: Member | _Exchange, inplace: bool = True) -> Context:
        return Context(member.comm, self.done, self.max_steps, member.seed, inplace, num_examples=member.num_examples)

    def _set_params(self, params: Tree) -> None:
        self.params = params
        R = self.rows
        self._views = [{n: p[c * R : (c + 1) * R] for n, p in params.items()} for c in range(self.num_configs)]
        self._parts: dict[tuple[int, int], Tree] = {}

    def _part(self, part: _Neighbours) -> Tree:
        """The parameters of some neighbours."""
        place = part.start, part.stop
        if place not in self._parts:
            self._parts[place] = part.part(self.params, self.rows)
        return self._parts[place]

    def _start(self, name: str, values: list[Tensor]) -> Tensor:
        """A buffer that training changes has a row for each node, any other one in all."""
        if not self._changes(name):
            return values[0][None].clone()
        return torch.stack(values).repeat_interleave(self.num_nodes, 0)

    def _changes(self, name: str) -> bool:
        return self.engine.facts is None or name in self.engine.facts.mutated

    def _wide_params(self) -> Tree:
        """`[C * K, *]`, or of a configuration by itself `[1, *]` where all its nodes share them."""
        if self.rows == self.num_nodes or self.num_configs == 1:
            return self.params
        return tree.map(lambda p: p.repeat_interleave(self.num_nodes, 0), self.params)

    @property
    def _takes_mean_gradient(self) -> bool:
        return self.num_configs == 1 and self.rows == 1 and self.members[0].strategy.mean_gradient

    def _differs_by_node(self, c: int) -> bool:
        """Whether the nodes of a configuration differ in a number of their optimizer: then their parameters part."""
        strategy = self.members[c].strategy
        specs = [spec for spec, _, _ in strategy.inner_optim.groups(self._views[c])]
        numbers = [*tree.leaves([spec.kwargs for spec in specs]), strategy.max_norm]
        return any(isinstance(x, Tensor) and x.dim() > 0 and x.shape[-1] > 1 for x in numbers)

    def _widen(self) -> None:
        """From one row per configuration to one per node."""
        if self.rows == self.num_nodes:
            return
        K, self.rows = self.num_nodes, self.num_nodes
        self._set_params({n: p.repeat_interleave(K, 0) for n, p in self.params.items()})
        for group in self.groups:
            group.state = tree.map_leaves(
                lambda x: x.repeat_interleave(K, 0) if x.shape[0] == group.size > 1 else x,  # noqa: B023
                group.state,
            )

    def _formed_groups(self) -> list[_Group]:
        keys = [optimizer_key(member.strategy) or ("own", c) for c, member in enumerate(self.members)]
        return [_Group(a, self.members[a:b]) for a, b in _runs(keys)]

    def _formed_exchanges(self) -> list[_Exchange]:
        size = self.num_nodes * sum(p[0].numel() for p in self.params.values())
        keys = [exchange_key(member.strategy, size) or ("own", c) for c, member in enumerate(self.members)]
        return [_Exchange(a, self.members[a:b]) for a, b in _runs(keys)]


def _runs(keys: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """From where to where neighbours are equal."""
    starts = [c for c in range(len(keys)) if c == 0 or keys[c] != keys[c - 1]]
    return zip(starts, [*starts[1:], len(keys)])


class _Neighbours:
    """Members of a stack, one after the other, that do something together.

    Attributes:
        state: of what they do; tensors have the same number of rows for each member, or one row in all.
    """

    def __init__(self, start: int, members: Sequence[Member]) -> None:
        self.start = start
        self.size = len(members)
        self.stop = start + self.size
        self.state: dict[str, Any] = {}

    def part(self, values: Tree, rows: int) -> Tree:
        """Their `rows` rows each of the values of a whole stack."""
        return {n: x[self.start * rows : self.stop * rows] for n, x in values.items()}

    def state_of(self, inside: Sequence[int]) -> dict[str, Any]:
        """The state of some of them."""
        index = torch.tensor(list(inside), dtype=torch.long)

        def select(x: Tensor) -> Tensor:
            if self.size == 1 or x.shape[0] == 1:
                return x
            return x.unflatten(0, (self.size, -1))[index.to(x.device)].flatten(0, 1)

        return tree.map_leaves(select, self.state)


N = TypeVar("N", bound=_Neighbours)


def _left(parts: Sequence[N], chosen: Sequence[int], members: Sequence[Member]) -> list[N]:
    """What is left of neighbours when only `chosen` stay, which are now `members`."""
    left: list[N] = []
    for part in parts:
        inside = [c - part.start for c in chosen if part.start <= c < part.stop]
        if inside:
            start = left[-1].stop if left else 0
            left.append(type(part)(start, members[start : start + len(inside)]))
            left[-1].state = part.state_of(inside)
    return left


class _Exchange(_Neighbours):
    """Members whose nodes exchange their parameters in one call: one member, or several that are alike."""

    def __init__(self, start: int, members: Sequence[Member]) -> None:
        super().__init__(start, members)
        first = members[0]
        self.strategy, self.comm, self.seed, self.num_examples = (
            first.strategy, first.comm, first.seed, first.num_examples,
        )  # fmt: skip
        if self.size > 1:
            K = first.comm.num_nodes
            self.comm = StackedCollectives(K, self.size, first.comm.ledger)
            columns = zip(*[member.strategy.communication_modules for member in members])
            modules = [column[0].stacked(column, K) for column in columns]
            self.strategy = Strategy(first.strategy.inner_optim, communication_modules=modules)

    def init(self, params: Tree, ctx: Context) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.size > 1:
            params = tree.map(lambda p: p.repeat_interleave(ctx.comm.num_nodes, 0), params)
        return self.strategy.init(params, ctx)

    def gradients(self, grads: Tree, params: Tree, ctx: Context) -> Tree:
        """What is exchanged of one member's gradients, or of those of some of its nodes."""
        modules = self.state if ctx.rows is None else nodes.take_rows(self.state, ctx.rows)
        grads = self.strategy.local_gradients(grads, params, modules, ctx)
        if ctx.rows is None:
            given, before = grads, self.state
            grads, changed = self.strategy.exchange_gradients(given, before, ctx)
            self.state = nodes.unshared(changed, before, (given, grads))
        return grads


class _Group(_Neighbours):
    """Members whose inner optimizers are one update, with a hyperparameter for each row."""

    def __init__(self, start: int, members: Sequence[Member]) -> None:
        super().__init__(start, members)
        self.strategies = [member.strategy for member in members]
        self.is_own = optimizer_key(self.strategies[0]) is None
        self.lrs: list[float] = []
        self._lr_of: tuple[list[float], list[int]] = ([], [])
        self._lr: Any = None  # `per_row` of these
        self._specs: dict[tuple[int, ...], Any] = {}

    def init(self, params: Tree) -> dict[str, Any]:
        return self._rule([1] * self.size).init(params)

    def update(self, params: Tree, grads: Tree, contexts: list[Context], counts: list[int]) -> Tree:
        """Clip, then a step of every configuration's optimizer, which has `counts` rows here."""
        own = contexts[self.start : self.stop]
        if self.is_own:
            params, self.state = self.strategies[0].optimize(params, grads, self.state, own[0])
            self.lrs = [_mean(self.strategies[0].lr(own[0]))]
            return params
        self.lrs = [float(strategy.lr(ctx)) for strategy, ctx in zip(self.strategies, own)]
        if self._lr_of != (self.lrs, counts):  # most often they stay
            self._lr_of, self._lr = (self.lrs, counts), per_row(self.lrs, counts)
        if self.strategies[0].max_norm is not None:
            max_norm = per_row([strategy.max_norm for strategy in self.strategies], counts)
            grads, _ = clip_grad_norm(grads, max_norm)
        params, self.state = self._rule(counts).update(params, grads, self.state, lr=self._lr)
        return params

    def _rule(self, counts: list[int]) -> Any:
        key = tuple(counts)
        if key not in self._specs:
            self._specs = {key: merged_spec([s.inner_optim for s in self.strategies], counts).rule()}
        return self._specs[key]


def _mean(lr: float | Tensor) -> float:
    """Where nodes differ, their mean."""
    return float(lr.double().mean()) if isinstance(lr, Tensor) else float(lr)


def touches_gradients(strategy: Strategy) -> bool:
    """Whether anything is done to gradients between the nodes' own work and the inner optimizer.

    >>> from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy
    >>> touches_gradients(AllReduceStrategy()), touches_gradients(DiLoCoStrategy())
    (True, False)
    """
    names = ("local_gradients", "exchange_gradients")
    usual = all(getattr(type(strategy), name) is getattr(Strategy, name) for name in names)
    modules = strategy.communication_modules
    own = [(type(module), name) for module in modules for name in names]
    return not usual or any(getattr(cls, name) is not getattr(CommunicationModule, name) for cls, name in own)


def combined(fn: Callable[[Sequence[Tensor]], Tensor], trees: Sequence[Any]) -> Any:
    """`fn` of the corresponding tensors of trees of one form."""
    columns = zip(*[list(tree.leaves(x)) for x in trees])
    return tree.map_leaves(lambda _: fn(next(columns)), trees[0])


def joined_batches(batches: Sequence[Any]) -> Any:
    """The batches `[K, B, ...]` of C configurations as one, `[C * K, B, ...]`."""
    return combined(lambda x: torch.cat(list(x)), batches) if len(batches) > 1 else batches[0]


def chosen_batches(batches: Sequence[Any], which: Tensor) -> Any:
    """S different batches `[K, B, ...]` -> that of each configuration, `[C * K, B, ...]`.

    >>> chosen_batches([torch.tensor([[1]]), torch.tensor([[2]])], torch.tensor([0, 1, 1])).T
    tensor([[1, 2, 2]])
    """
    if len(which) == 1:
        return batches[int(which)]
    if len(batches) == 1:
        return tree.map_leaves(lambda x: x.repeat(len(which), *[1] * (x.dim() - 1)), batches[0])
    return combined(lambda x: torch.stack(list(x))[which.to(x[0].device)].flatten(0, 1), batches)


def optimizer_key(strategy: Strategy) -> Key | None:
    """Strategies of equal key can share one update of their inner optimizers; None: this one cannot.

    >>> from vecgym.strategy import FedAvgStrategy
    >>> optimizer_key(FedAvgStrategy("adam", lr=0.1)) == optimizer_key(FedAvgStrategy("adam", lr=0.2, H=5))
    True
    >>> optimizer_key(FedAvgStrategy("adam")) == optimizer_key(FedAvgStrategy("adam", max_norm=1.0))
    False
    """
    usual = type(strategy).optimize is Strategy.optimize and type(strategy).init is Strategy.init
    key = merge_key(strategy.inner_optim)
    if not usual or key is None or (isinstance(strategy.max_norm, Tensor) and strategy.max_norm.dim() > 0):
        return None
    return ("shared", *key, strategy.max_norm is None)


def exchange_key(strategy: Strategy, num_elements: int = 0) -> Key | None:
    """Strategies of equal key can exchange the parameters of their nodes in one call; None: this one cannot.

    Args:
        num_elements: of all nodes of a configuration together.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> exchange_key(DiLoCoStrategy(H=5, outer_lr=0.5)) == exchange_key(DiLoCoStrategy(H=5, outer_lr=0.7))
    True
    >>> exchange_key(DiLoCoStrategy(H=5)) == exchange_key(DiLoCoStrategy(H=6))
    False
    """
    names = ("init", "active_nodes", "local_gradients", "exchange_gradients", "exchange_parameters")
    usual = all(getattr(type(strategy), name) is getattr(Strategy, name) for name in names)
    keys = tuple(module.stack_key() for module in strategy.communication_modules)
    shared = optimizer_key(strategy)
    if not usual or num_elements > MAX_MERGED_ELEMENTS or None in keys or shared is None:
        return None
    return shared, *((type(module).__name__, key) for module, key in zip(strategy.communication_modules, keys))
