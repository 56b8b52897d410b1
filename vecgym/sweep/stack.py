"""Many configurations of K nodes as one stack of C * K nodes, and a training step of all of them.

Gradients are one call for all nodes. What is exchanged is each configuration's own affair: its strategy sees its K
rows and collectives among them, just as it does in a run by itself, so any strategy can be stacked. The inner
optimizer is one update for all neighbours in the stack that share its class, with one hyperparameter per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vecgym import nodes, tree
from vecgym.collectives import StackedCollectives
from vecgym.data import EvalBatches
from vecgym.local import Engine, Local
from vecgym.optim import OptimSpec, clip_grad_norm
from vecgym.optim.formulas import ELEMENTWISE
from vecgym.strategy import CommunicationModule, Context, Strategy
from vecgym.strategy.per_rank import PerRankStrategy, is_per_rank
from vecgym.tree import Tree

Key = tuple[Any, ...]


class StackMetrics(NamedTuple):
    """What a step observed, of C configurations."""

    losses: Tensor  # [C, K], before the update; nan where a node did not train
    lrs: list[float]
    active: list[list[int] | None]  # the nodes that trained; None: all


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
        modules: the states of its communication modules.
    """

    model: nn.Module
    strategy: Strategy
    seed: int
    comm: StackedCollectives
    num_examples: tuple[int, ...] | None = None
    modules: dict[str, Any] = field(default_factory=dict)

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
        self._exchanges_gradients = any(touches_gradients(member.strategy) for member in self.members)
        self._form_groups()
        for c, member in enumerate(self.members):
            state, member.modules = member.strategy.init(self._views[c], self._context(member, inplace=False))
            group = next(group for group in self.groups if group.start <= c < group.stop)
            if group.is_own:
                group.state = state
        for group in self.groups:
            if not group.is_own:
                group.state = group.init(self._of_group(group, self.params))

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

    def step(self, batch: Any) -> StackMetrics:
        """One optimizer step of every node.

        Args:
            batch: leaves `[C * K, B, ...]`, the configurations one after the other.
        """
        contexts = [self._context(member) for member in self.members]
        for member in self.members:
            member.comm.ledger.begin_step(self.done)
        active = [m.strategy.active_nodes(ctx) for m, ctx in zip(self.members, contexts)]
        take = self._full_step if all(chosen is None for chosen in active) else self._partial_step
        losses, lrs = take(batch, contexts, active)
        self._exchange_parameters(contexts)
        self.done += 1
        return StackMetrics(losses.view(self.num_configs, self.num_nodes), lrs, active)

    def _full_step(
        self, batch: Any, contexts: list[Context], active: list[list[int] | None]
    ) -> tuple[Tensor, list[float]]:
        local = self._gradients(self._wide_params(), self.buffers, batch, range(self.num_configs * self.num_nodes))
        self.buffers = local.buffers
        each = self._exchanged(local.grads, contexts) if self._exchanges_gradients else [local.grads]
        if self.rows == 1 and self.num_nodes > 1 and any(x.shape[0] > 1 for g in each for x in g.values()):
            self._widen()
        lrs = [0.0] * self.num_configs
        for group in self.groups:
            params = self._of_group(group, self.params)
            if self._exchanges_gradients:
                grads = self._joined(each[group.start : group.stop])
            else:
                grads = self._of_group(group, local.grads)
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
        everything = (self.params, self.buffers)
        params, buffers = (nodes.take_rows(x, rows) for x in everything)
        batch = tree.map_leaves(lambda x: x[rows.to(x.device)], batch)
        local = self._gradients(params, buffers, batch, rows.tolist())
        parts = [ctx if chosen is None else replace(ctx, rows=x) for ctx, chosen, x in zip(contexts, active, own)]
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        each = []
        for c, (member, ctx) in enumerate(zip(self.members, parts)):
            a, b = ends[c], ends[c + 1]
            grads = {n: g[a:b] for n, g in local.grads.items()}
            modules = member.modules if ctx.rows is None else nodes.take_rows(member.modules, ctx.rows)
            grads = member.strategy.local_gradients(grads, {n: p[a:b] for n, p in params.items()}, modules, ctx)
            if ctx.rows is None:
                grads, member.modules = member.strategy.exchange_gradients(grads, member.modules, ctx)
            each.append(nodes.expand(grads, b - a))
        lrs = [0.0] * self.num_configs
        for group in self.groups:
            a, b = ends[group.start], ends[group.stop]
            here = rows[a:b] - group.start * K
            state = group.state
            group.state = nodes.take_rows(state, here)
            grads = {n: torch.cat([g[n] for g in each[group.start : group.stop]]) for n in params}
            new = group.update({n: p[a:b] for n, p in params.items()}, grads, parts, counts[group.start : group.stop])
            group.state = nodes.put_rows(state, here, group.state, group.size * K, inplace=True)
            nodes.put_rows(self._of_group(group, self.params), here, new, group.size * K, inplace=True)
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
        )

    def _exchanged(self, grads: Tree, contexts: list[Context]) -> list[Tree]:
        """What each configuration's optimizer takes, `[1 or K, *]`."""
        K = 1 if self._takes_mean_gradient else self.num_nodes
        each = [{n: g[c * K : (c + 1) * K] for n, g in grads.items()} for c in range(self.num_configs)]
        for c, (member, ctx) in enumerate(zip(self.members, contexts)):
            own = member.strategy.local_gradients(each[c], self._views[c], member.modules, ctx)
            each[c], member.modules = member.strategy.exchange_gradients(own, member.modules, ctx)
        return each

    def _exchange_parameters(self, contexts: list[Context]) -> None:
        for c, (member, ctx) in enumerate(zip(self.members, contexts)):
            shared, member.modules = member.strategy.exchange_parameters(self._views[c], member.modules, ctx)
            if any(x.shape[0] > self.rows for x in shared.values()):
                self._widen()
            for name, p in self._views[c].items():
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
        """How far each configuration's nodes are apart; see `vecgym.nodes.consensus_distance`."""
        return [float(nodes.consensus_distance(own)) for own in self._views]

    # ------------------------------------------------------------------------------------- leaving, saving

    def keep(self, chosen: Sequence[int]) -> None:
        """Go on with some of the configurations only."""
        mine = torch.tensor(list(chosen), dtype=torch.long)
        states = {}
        for group in self.groups:
            inside = [c - group.start for c in chosen if group.start <= c < group.stop]
            states[group.key] = group.selected(inside, self.num_nodes)
        params = {n: self._own(p, mine) for n, p in self.params.items()}
        self.buffers = {n: self._own(b, mine) if self._changes(n) else b for n, b in self.buffers.items()}
        self.members = [self.members[c] for c in chosen]
        self._set_params(params)
        self._form_groups()
        for group in self.groups:
            group.state = states[group.key]

    def state(self) -> dict[str, Any]:
        """All that evolves: nested dicts and lists of tensors and numbers."""
        return {
            "done": self.done,
            "params": self.params,
            "buffers": self.buffers,
            "optimizer": [group.state for group in self.groups],
            "modules": [member.modules for member in self.members],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.done = state["done"]
        self.rows = next(iter(state["params"].values())).shape[0] // self.num_configs
        self._set_params(state["params"])
        self.buffers = state["buffers"]
        for group, held in zip(self.groups, state["optimizer"]):
            group.state = held
        for member, modules in zip(self.members, state["modules"]):
            member.modules = modules

    @property
    def can_be_saved(self) -> bool:
        """Whether `state` is all: strategies written for one rank keep theirs to themselves."""
        return not any(isinstance(member.strategy, PerRankStrategy) for member in self.members)

    # --------------------------------------------------------------------------------------------- helpers

    def _context(self, member: Member, inplace: bool = True) -> Context:
        return Context(member.comm, self.done, self.max_steps, member.seed, inplace, member.num_examples)

    def _set_params(self, params: Tree) -> None:
        self.params = params
        R = self.rows
        self._views = [{n: p[c * R : (c + 1) * R] for n, p in params.items()} for c in range(self.num_configs)]

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

    def _form_groups(self) -> None:
        self.groups: list[_Group] = []
        keys = [optimizer_key(member.strategy) or ("own", id(member)) for member in self.members]
        start = 0
        for c in range(1, len(keys) + 1):
            if c == len(keys) or keys[c] != keys[start]:
                self.groups.append(_Group(start, [m.strategy for m in self.members[start:c]], keys[start]))
                start = c

    def _of_group(self, group: _Group, values: Tree) -> Tree:
        return {n: x[group.start * self.rows : group.stop * self.rows] for n, x in values.items()}


class _Group:
    """Neighbours in a stack whose inner optimizers are one update, with a hyperparameter for each row."""

    def __init__(self, start: int, strategies: list[Strategy], key: Key) -> None:
        self.start = start
        self.size = len(strategies)
        self.stop = start + self.size
        self.strategies = strategies
        self.key = key
        self.is_own = key[0] == "own"
        self.state: dict[str, Any] = {}
        self.lrs: list[float] = []
        self._specs: dict[tuple[int, ...], Any] = {}

    def init(self, params: Tree) -> dict[str, Any]:
        return self._rule([1] * self.size).init(params)

    def update(self, params: Tree, grads: Tree, contexts: list[Context], counts: list[int]) -> Tree:
        """Clip, then a step of every configuration's optimizer, which has `counts` rows here."""
        own = contexts[self.start : self.stop]
        if self.is_own:
            params, self.state = self.strategies[0].optimize(params, grads, self.state, own[0])
            self.lrs = [float(self.strategies[0].lr(own[0]))]
            return params
        self.lrs = [float(strategy.lr(ctx)) for strategy, ctx in zip(self.strategies, own)]
        if self.strategies[0].max_norm is not None:
            max_norm = per_row([strategy.max_norm for strategy in self.strategies], counts)
            grads, _ = clip_grad_norm(grads, max_norm)
        params, self.state = self._rule(counts).update(params, grads, self.state, lr=per_row(self.lrs, counts))
        return params

    def selected(self, inside: list[int], num_nodes: int) -> dict[str, Any]:
        """The state of some of its configurations."""
        index = torch.tensor(inside, dtype=torch.long)

        def select(x: Tensor) -> Tensor:
            if self.size == 1 or x.shape[0] == 1:
                return x
            return x.unflatten(0, (self.size, -1))[index.to(x.device)].flatten(0, 1)

        return tree.map_leaves(select, self.state)

    def _rule(self, counts: list[int]) -> Any:
        key = tuple(counts)
        if key not in self._specs:
            self._specs = {key: merged_spec([s.inner_optim for s in self.strategies], counts).rule()}
        return self._specs[key]


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
    spec = strategy.inner_optim
    usual = type(strategy).optimize is Strategy.optimize and type(strategy).init is Strategy.init
    scalars = [*tree.leaves([spec.kwargs, strategy.max_norm])]
    if not usual or spec.cls not in ELEMENTWISE or any(x.dim() > 0 or x.requires_grad for x in scalars):
        return None
    fixed = tuple(sorted((key, repr(value)) for key, value in spec.hyper.items() if not _is_number(value)))
    groups = None if spec.param_groups is None else id(spec.param_groups)
    return ("shared", spec.cls.__name__, groups, fixed, strategy.max_norm is None)


def merged_spec(specs: Sequence[OptimSpec], counts: Sequence[int]) -> OptimSpec:
    """One spec whose hyperparameters have a value for each row, where the given ones differ.

    >>> merged_spec([OptimSpec("sgd", lr=0.5, momentum=0.9), OptimSpec("sgd", lr=0.25, momentum=0.9)], [1, 2])
    OptimSpec(SGD, lr=tensor([0.5000, 0.2500, 0.2500], dtype=torch.float64), momentum=0.9)
    """
    keys = list(dict.fromkeys(key for spec in specs for key in spec.kwargs))
    values = {key: per_row([spec.hyper[key] for spec in specs], counts) for key in keys}
    return OptimSpec(specs[0].cls, param_groups=specs[0].param_groups, **values)


def per_row(values: Sequence[Any], counts: Sequence[int]) -> Any:
    """A value for each row, `[sum of counts]`, from one for each configuration; equal ones stay as they are.

    >>> per_row([(0.9, 0.5), (0.9, 0.25)], [1, 1])
    (0.9, tensor([0.5000, 0.2500], dtype=torch.float64))
    """
    if isinstance(values[0], tuple):
        return tuple(per_row(part, counts) for part in zip(*values))
    plain = [x.item() if isinstance(x, Tensor) else x for x in values]
    if all(x == plain[0] for x in plain):
        return plain[0]
    return torch.tensor(plain, dtype=torch.float64).repeat_interleave(torch.tensor(list(counts)))


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)
