"""The local work of the nodes: the loss and gradient of each.

A backend runs the L nodes of this process on the same stacked state; the results are equal up to rounding:

- `vmap`: all nodes in one vectorised call (or in chunks of `chunk_size` nodes, to bound memory);
- `recorded`: the operations of `vmap`, written down, which gives the same bits: for small models, with engine="auto";
- `loop`: node after node, for models that `vmap` cannot run, for debugging, and where it is faster;
- `compiled`: `vmap`, compiled (`compile=True`), if the model can be.

`vmap` and `loop` can be spread over `node_threads` CPU threads, each of which then uses one thread inside its
operations. A `Plan` says how.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vecgym.core import nodes, tree
from vecgym.core.devices import on_host, outside, plain
from vecgym.core.errors import warn
from vecgym.core.tree import Tree
from vecgym.engine import contract, hooks
from vecgym.engine.backend import (
    Compute,
    Keys,
    Local,
    Missing,
    NodeSlice,
    by_batch_size,
    dense,
    in_minibatches,
    joined_missing,
    may_be_nothing,
    rows,
    sizes_of,
    stacked,
    unstacked,
)
from vecgym.engine.compiled import Compiled
from vecgym.engine.contract import WEIGHT
from vecgym.engine.plan import (
    BACKENDS,
    ModelFacts,
    Plan,
    check_settings,
    choose_plan,
    examine,
    keep_memory,
    one_thread,
    settle_threads,
    start_threads,
    stays_listed,
)
from vecgym.engine.recorded import PreparedPass, Recorded
from vecgym.engine.stateless import StatelessModel, TwiceDifferentiable, plain_attention


class Engine:
    """Losses and gradients of the L nodes in this process.

    Args:
        model: returns a scalar loss from a batch; only its structure and its frozen parameters are used.
        engine: "vmap", "loop", or "auto": a deterministic rule.
        chunk_size: maximum number of nodes in one vectorised call; None: no limit.
        node_threads: CPU threads over nodes; None: the rule decides.
        autocast: run forward passes under `torch.autocast` (bfloat16 on CPU, float16 on CUDA).
        compile: compile the gradients of all nodes with `torch.compile`, if possible; see
            `vecgym.engine.compiled`. If not, a warning says why. With "auto" small models keep their list of
            operations; see `vecgym.engine.plan.stays_listed`.

    Attributes:
        plan: how the nodes are computed; `prepare` chooses it, `use` replaces it.
        facts: of the model, as `prepare` observes them; None before.
        params, frozen, buffers: the model's own, `[*]`: trained parameters, other parameters, and buffers.
        device: of the model, and so of everything that is computed.

    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> engine, batch, params = Engine(Line(), engine="vmap"), torch.tensor([[1.0], [3.0]]), {"w": torch.zeros(1)}
    >>> engine.prepare(batch).engine, engine.device, engine.written, engine.chooses, engine.weighted
    ('vmap', device(type='cpu'), frozenset(), False, False)
    >>> local = engine.gradients(params, {}, batch, seed=0, step=0)
    >>> local.losses, local.grads
    (tensor([1., 9.]), {'w': tensor([-2., -6.])})
    >>> engine.measures(params, {}, batch, own_batches=True), engine.loss({"w": torch.ones(())}, {}, batch[1])
    ({'loss': tensor([1., 9.])}, tensor(4.))
    >>> engine.use(Plan("loop", node_threads=2))
    >>> engine.gradients(params, {}, batch, seed=0, step=0).losses
    tensor([1., 9.])
    >>> engine.close()
    >>> engine.release()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        engine: str = "auto",
        chunk_size: int | None = None,
        node_threads: int | None = None,
        autocast: bool = False,
        compile: bool = False,
    ) -> None:
        check_settings(engine, chunk_size, node_threads, compile)
        contract.check_model(model)
        self.settings = (engine, chunk_size, node_threads)
        self.model = model
        self.facts: ModelFacts | None = None
        self.autocast = autocast
        self._stateless = StatelessModel(model, autocast)
        self.device = self._stateless.device
        if self.device.type == "cpu":
            settle_threads()
            keep_memory()
        self.params, self.frozen, self.buffers = self._stateless.params, self._stateless.frozen, self._stateless.buffers
        self._backends = {name: backend(self._stateless) for name, backend in BACKENDS.items()}
        self._compiled = Compiled(self._stateless) if compile else None
        self._recorded = Recorded(self._stateless)
        if self._compiled is not None:
            self._backends["compiled"] = self._compiled
        by_node = engine == "loop" or bool(hooks.on_gradients(model))
        self._validates_alone = False  # node after node, although training is in one call
        self._pool: ThreadPoolExecutor | None = None
        self._grads: Tree = {}
        self.use(Plan("loop" if by_node else "vmap", chunk_size=chunk_size, reason="asked for"))

    # ------------------------------------------------------------------------------------------- set-up

    def prepare(
        self, batch: Any, agree: Callable[[ModelFacts], ModelFacts] | None = None, mean: bool = False,
        num_passes: int | None = None,
    ) -> Plan:  # fmt: skip
        """Examine and check the model on one step's batch `[L, B, ...]`, and choose the plan.

        Args:
            agree: maps this process's facts to facts that all processes use.
            mean: whether the run needs the gradient of the nodes' mean loss.
            num_passes: the number of gradients to compute, without differentiable ones; None: unknown.
        """
        engine = self.settings[0]
        of_one = tree.map_leaves(lambda x: plain(x)[0], batch)
        stacked = None if engine == "loop" else self._backends["vmap"]
        required = engine != "auto"
        facts = outside(lambda: examine(self._stateless, of_one, stacked, required, mean))
        self.facts = facts = facts if agree is None else agree(facts)
        self._stateless.learn(facts.random, facts.mutated, facts.written, facts.unused, facts.host_random)
        if required and facts.vmap_error is not None:
            raise facts.vmap_error
        plan = self._settled(facts, sizes_of(batch)[0], mean)
        compiled, may_stay = self._compiled, functools.partial(stays_listed, facts, sizes_of(batch)[0], self.device)
        if engine == "auto" and plan.engine == "vmap" and num_passes != 0 and (compiled is None or may_stay()):
            plan = self._recorded_plan(batch, plan, mean, num_passes)
        if compiled is not None and plan.engine == "recorded" and may_stay(self._recorded.num_operations):
            plan = replace(plan, reason=f"{plan.reason}: too little work to gain by compile=True")
        elif compiled is not None and facts.vmap_error is None:
            plan = self._tried_plan(compiled, batch, plan, mean)
        why = str(facts.vmap_error).splitlines()[0] if facts.vmap_error else contract.slow_experts(facts.vmap_slow)
        if why and engine == "auto":
            warn(f'{why} Its nodes are computed one after the other. engine="loop" chooses that without this warning.')
        if plan.engine == "loop" and plan.node_threads == 1:  # a later pass may draw where the first one has not
            self._stateless.random, self._stateless.host_random = True, facts.host_random or facts.may_draw
        self.use(plan)
        return self.plan

    def use(self, plan: Plan) -> None:
        """Use this plan from now on."""
        self.close()
        self.plan, self._backend = plan, self._backends[plan.engine]
        self._stateless.serve(plan.node_threads)

    @property
    def weighted(self) -> bool:
        """Whether the model gives the weight of its loss, as far as known."""
        return self._stateless.weighted

    @property
    def written(self) -> Collection[str]:
        """The parameters that the model's forward changes: `gradients` changes them in place in its argument."""
        return self._stateless.written

    @property
    def chooses(self) -> bool:
        """Whether the set of parameters that get a gradient may depend on the data, as far as known."""
        return self.facts is None or self.facts.chooses

    def changes(self, name: str) -> bool:
        """Whether training changes a buffer, as far as known.

        >>> Engine(nn.BatchNorm1d(3)).changes("running_mean")
        True
        """
        return self._stateless.changes(name)

    def close(self) -> None:
        """End the node threads, which start with the first gradients."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def release(self) -> None:
        """Free the memory that is kept between calls."""
        self._grads = {}

    def _settled(self, facts: ModelFacts, num_nodes: int, mean: bool) -> Plan:
        """Return the plan of the rule, with the user's settings."""
        engine, chunk_size, node_threads = self.settings
        plan = choose_plan(facts, num_nodes, self.device, torch.get_num_threads(), engine, mean)
        if node_threads is not None:
            if why := one_thread(facts, self.device) if node_threads > 1 else "":
                warn(f"node_threads={node_threads} has no effect: the model {why}.")
            plan = replace(plan, node_threads=1 if why else min(node_threads, num_nodes))
        return plan if chunk_size is None else replace(plan, chunk_size=chunk_size)

    def _tried_plan(self, compiled: Compiled, batch: Any, plan: Plan, mean: bool) -> Plan:
        """Return `plan` compiled, without node threads, if the model can be."""
        refusal, report = compiled.tried(tree.map_leaves(lambda x: x[: plan.chunk_size], batch), mean, self.autocast)
        if refusal:
            warn(f"compile=True has no effect, the model runs uncompiled: {refusal}.")
            return plan
        return Plan("compiled", chunk_size=plan.chunk_size, reason=report)

    def _recorded_plan(self, batch: Any, plan: Plan, mean: bool, num_passes: int | None) -> Plan:
        """Return `plan` with the operations written down, if that is safe and faster."""
        self._backends["recorded"] = self._recorded = Recorded(self._stateless)
        sizes = {b - a for a, b in plan.chunks(sizes_of(batch)[0], 1 if mean else plan.node_threads)}
        refusal = self._recorded.tried(batch, mean, num_passes, sizes, plan.node_threads)
        if refusal:
            return replace(plan, reason=f"{plan.reason}; operations not written down: {refusal}")
        return replace(plan, engine="recorded", reason=f"{plan.reason}, operations written down")

    # -------------------------------------------------------------------------------------------- training

    def prepared(self, params: Tree, num_nodes: int, mean: bool = False) -> PreparedPass | None:
        """Return the gradients at parameters that stay where they are, for steps that differ in their batches only.

        None: only `gradients` computes them. The model is not computed by a list of operations of all nodes, has
        buffers, draws random numbers, writes to parameters, or gives its loss a weight.

        Args:
            params, mean: see `gradients`.

        >>> from vecgym.models import Line
        >>> engine, batch, params = Engine(Line()), torch.tensor([[1.0], [3.0]]), {"w": torch.zeros(2)}
        >>> engine.prepare(batch).engine
        'recorded'
        >>> engine.prepared(params, num_nodes=2).gradients(batch)
        ({'w': tensor([-2., -6.])}, tensor([1., 9.]))
        """
        model, plan = self._stateless, self.plan
        exotic = self.buffers or model.random or model.written or model.weighted or plan.channels_last
        if plan.engine != "recorded" or exotic or len(plan.chunks(num_nodes, plan.node_threads)) > 1:
            return None
        return PreparedPass(self._recorded, params, num_nodes, mean)

    @plain_attention()
    def gradients(
        self, params: Tree, buffers: Tree, batch: Any, *, seed: int | Sequence[int], step: int | Sequence[int],
        node_ids: Sequence[int] | None = None, minibatch_size: int | None = None, mean: bool = False,
        differentiable: bool = False, limits: Sequence[int] | None = None,
    ) -> Local:  # fmt: skip
        """Compute the loss and gradient of every node on its own batch; the next call may overwrite the gradients.

        Args:
            params: `[L, *]`, or `[1, *]`: the same on every node.
            buffers: likewise; training may overwrite the buffers that it changes, unless `differentiable`.
            batch: leaves `[L, B, ...]`.
            seed, step, node_ids: the keys of dropout; one seed and one step for all, or one for each node.
            minibatch_size: examples at a time; the gradients of the parts are averaged by their sizes, or by the
                weights of their losses.
            mean: compute only the gradient of the nodes' mean loss, `[1, *]`; `params` must be `[1, *]`.
            differentiable: the result can be differentiated; no input is overwritten.
            limits: how many of the B examples are each node's own, from the first; None: all.
        """
        if self.plan.engine == "recorded" and (change := self._recorded.ended):
            self.use(replace(self.plan, engine="vmap", reason=f"all nodes in one call; operations dropped: {change}"))
        if differentiable:
            contract.check_differentiable(self.model, self._stateless.written)
        num_nodes, batch_size = sizes_of(batch)
        seeds = seed if isinstance(seed, Sequence) else [seed] * num_nodes
        steps = step if isinstance(step, Sequence) else [step] * num_nodes
        keys = Keys(seeds, steps, range(num_nodes) if node_ids is None else node_ids)
        part = NodeSlice(params, self._stateless.own_buffers(buffers, num_nodes, differentiable), batch, keys)

        def compute(some: NodeSlice) -> Local:
            with self._explaining(num_nodes, some.keys, differentiable):
                return self._pure(some) if differentiable else self._mean(some) if mean else self._each(some)

        by_minibatches = functools.partial(in_minibatches, size=minibatch_size, compute=compute)
        if mean and self._stateless.weighted:
            by_minibatches = functools.partial(self._mean_weighted, size=minibatch_size, compute=compute)
        if limits is None or min(limits) >= batch_size:
            local = by_minibatches(part)
        else:
            local = by_batch_size(part, limits, by_minibatches, mean, not differentiable, self._stateless.written)
        if self._stateless.weighted:
            buffers = dict(local.buffers)
            return local._replace(weights=buffers.pop(WEIGHT), buffers=buffers)
        return local

    def _pure(self, part: NodeSlice) -> Local:
        with sdpa_kernel(SDPBackend.MATH):
            return self._backend.pure(part._replace(params=nodes.expand(part.params, part.size)))

    def _mean(self, part: NodeSlice) -> Local:
        """Compute the gradient of the mean loss at parameters stored once."""
        pieces = []
        total: Tree = {}
        for a, b in self.plan.chunks(part.size, 1):
            with self.plan.layout():
                for grads, losses in self._backend.mean_gradients(part.nodes(a, b), part.size):
                    for name in list(grads):  # freed one by one
                        total[name] = total.pop(name) + grads.pop(name) if name in total else grads.pop(name)
                    pieces.append(losses)
        total = {name: g[None].to(part.params[name].dtype) for name, g in total.items()}
        grads, missing = dense(total, part.params, 1)
        return Local(grads, torch.cat(pieces), part.buffers, missing)

    def _mean_weighted(self, part: NodeSlice, size: int | None, compute: Compute) -> Local:
        """Compute the gradient of the mean of losses that have weights within the batch of each node.

        The weights of parts of the batch are only known afterwards: therefore each node's gradient is accumulated
        separately, one chunk of nodes at a time. The same applies if a loss may have weight 0, since it could be nan.
        """
        before = {name: b.clone() for name, b in part.buffers.items() if self._stateless.changes(name)}
        if size is None or size >= sizes_of(part.batch)[1]:
            local = in_minibatches(part, None, compute)
            if not on_host(weight := local.buffers[WEIGHT]) or not may_be_nothing(weight):
                return local
            part = part._replace(buffers={**part.buffers, **before})
        total: Tree = {}
        losses, missing = [], []
        for a, b in self.plan.chunks(part.size, 1):
            with self._explaining(part.size, part.keys):
                local = in_minibatches(part.nodes(a, b), size, self._each)
            missing.append((range(a, b), local.missing))
            for name, g in local.grads.items():
                share = g.sum(0, keepdim=True, dtype=tree.wider(g.dtype)) / part.size
                total[name] = total[name] + share if name in total else share
            losses.append(local.losses)
        grads = {name: g.to(part.params[name].dtype) for name, g in total.items()}
        nowhere = [name for name, some in joined_missing(missing).items() if len(some) == part.size]
        return Local(grads, torch.cat(losses), part.buffers, dict.fromkeys(nowhere, frozenset({0})))

    def _each(self, part: NodeSlice) -> Local:
        """Compute the gradient of every node, chunk after chunk and on all node threads."""
        chunks = self.plan.chunks(part.size, self.plan.node_threads)
        if len(chunks) == 1:
            with self.plan.layout():
                return self._backend.gradients(part, lambda: self._gradient_storage(part.params, part.size))
        storage = self._gradient_storage(part.params, part.size)
        losses, missing = [torch.empty(0)] * len(chunks), list[Missing]([{}] * len(chunks))

        def run(thread: int) -> None:
            for index in range(thread, len(chunks), self.plan.node_threads):
                a, b = chunks[index]
                grads = {name: g[a:b] for name, g in storage.items()}
                with self.plan.layout():  # of this thread
                    local = self._backend.gradients(part.nodes(a, b), lambda: grads, thread)  # noqa: B023
                for name, g in local.grads.items():
                    if g is not grads[name]:
                        grads[name].copy_(g)
                losses[index], missing[index] = local.losses, local.missing

        if self._pool is None:  # not started by `use`: a run that fails before its first step has no threads
            self._pool = start_threads(self.plan.node_threads)
        if self._pool is None:
            run(0)
        else:
            states = torch.get_rng_state()
            list(self._pool.map(run, range(self.plan.node_threads)))
            if not self._stateless.random and not torch.equal(states, torch.get_rng_state()):
                contract.warn_of_late_draws()
                self._stateless.random = True
        of_rows = joined_missing((range(a, b), some) for (a, b), some in zip(chunks, missing))
        return Local(storage, torch.cat(losses), part.buffers, of_rows)

    def _gradient_storage(self, params: Tree, num_nodes: int) -> Tree:
        """Return the memory for the nodes' gradients, `[L, *]`: that of the step before, if it fits.

        Its contents are no longer needed. New memory of this size would cost more than the copy into it.
        """

        def storage(name: str, p: Tensor) -> Tensor:
            old, shape = self._grads.get(name), (num_nodes, *p.shape[1:])
            if old is not None and (old.shape, old.dtype, old.device) == (shape, p.dtype, p.device):
                return old
            return p.new_empty(shape)

        self._grads = {name: storage(name, p) for name, p in params.items()}
        return dict(self._grads)

    @contextlib.contextmanager
    def _explaining(self, num_nodes: int, keys: Keys | None = None, differentiable: bool = False) -> Iterator[None]:
        """Add the nodes and the step to an error of the model, or name the operation of torch that fails on it.

        Args:
            keys: of the nodes and the step; None: in validation.
            differentiable: the gradients are differentiated.
        """
        try:
            yield
        except Exception as error:
            loop = self.plan.engine == "loop" and not differentiable
            if loop and keys:  # it has named the node
                raise
            contract.check_memory(error, num_nodes, self.model)
            if differentiable and ("vmap" in str(error) or isinstance(error, RuntimeError)):
                raise contract.derivative_error(contract.cause(error)) from error
            if "vmap" in str(error) and not loop:
                raise contract.vmap_error(contract.cause(error)) from error
            with contract.naming("in validation" if keys is None else keys.named()):
                raise

    # ------------------------------------------------------------------------------------------ evaluation

    @plain_attention()
    def loss(self, params: Tree, buffers: Tree, batch: Any) -> Tensor:
        """Compute the loss of one model in eval mode, a scalar, differentiable to any order in all arguments.

        Args:
            params, buffers: of one model, `[*]`.
            batch: an ordinary batch, `[B, ...]`.
        """
        with (
            TwiceDifferentiable(), sdpa_kernel(SDPBackend.MATH), self._stateless.casting(),
            self._stateless.seeded(0, "evaluation", 0), contract.naming("in evaluation"),
        ):  # fmt: skip
            return self._stateless.eval_loss(params, buffers, batch)

    @torch.no_grad()
    @plain_attention()
    def measures(
        self, params: Tree, buffers: Tree, batch: Any, *, own_batches: bool = False, several: bool = False
    ) -> Tree:
        """Compute the validation metrics of each row of `params` in eval mode, `[L]` each; nothing is changed.

        The only metric is the loss, unless the model defines `val_metrics(batch)`: a dict of scalars, each a mean over
        the batch, "loss" among them, such as `{"loss": loss, "accuracy": accuracy}`. Its "weight" is the number
        of tokens, say, if they are means over these and not over examples.

        Args:
            params, buffers: `[L, *]` or `[1, *]`.
            batch: one ordinary batch for all, or `[L, B, ...]` with `own_batches`.
            several: there are G batches of one size, `[G, B, ...]` or `[L, G, B, ...]`; the metrics are `[L, G]`.
        """
        if not several:
            return self._measured(params, buffers, batch, own_batches)
        try:
            return self._measured(params, buffers, batch, own_batches, several)
        except Exception:  # one by one may work, or else raises the error to show
            self.facts = self.facts and replace(self.facts, at_once=False)
            batches = unstacked(batch, dim=int(own_batches))
            return stacked([self._measured(params, buffers, one, own_batches) for one in batches], dim=1)

    def _measured(self, params: Tree, buffers: Tree, batch: Any, own_batches: bool, several: bool = False) -> Tree:
        measured = functools.partial(self._measured_by, params, buffers, batch, own_batches, several)
        if several or self._validates_alone or self.settings[0] != "auto" or self.plan.engine == "loop":
            return measured(self._validates_alone)
        try:
            return measured(False)
        except Exception as error:  # of vmap, if the loop can
            result = measured(True)
            self._validates_alone = self._stateless.forgets = True
            warn(f"In validation, {str(error).splitlines()[0]} There the nodes are computed one after the other.")
            return result

    def _measured_by(
        self, params: Tree, buffers: Tree, batch: Any, own_batches: bool, several: bool, alone: bool
    ) -> Tree:
        params, buffers = self._stateless.spared(params, buffers)
        sizes = [x.shape[0] for x in tree.leaves([params, buffers])]
        num_nodes = sizes_of(batch)[0] if own_batches else max(sizes, default=1)
        measured = []
        for a, b in self.plan.chunks(num_nodes, 1):
            examples = tree.map_leaves(lambda x: x[a:b], batch) if own_batches else batch  # noqa: B023
            arguments = {**rows(params, a, b), **rows(buffers, a, b)}, examples, own_batches, b - a, several
            backend = self._backends["loop"] if alone or (b - a == 1 and not several) else self._backend
            with self._stateless.seeded(0, "evaluation", a), self.plan.layout(), self._explaining(num_nodes):
                measured.append(backend.measures(*arguments))
        return {name: torch.cat([chunk[name] for chunk in measured]) for name in measured[0]}
