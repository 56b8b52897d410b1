"""What each node computes by itself: its loss and its gradient. The only module that calls `vmap`.

Two ways to run the L nodes of this process on the same stacked state, equal up to rounding:

- `vmap`: all nodes in one vectorised call (or in chunks of `chunk_size` nodes, to bound memory);
- `loop`: node after node, for models that `vmap` cannot run, for debugging, and where it is faster.

Either way the nodes can be spread over CPU threads, `node_threads` of them, each of which then uses one thread
inside its operations. Which way is taken is a `Plan`, and `choose_plan` is a deterministic function of the
model and the machine, so that the same script gives the same bits, run after run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from vecgym.core import check, nodes, rng, tree
from vecgym.core.errors import ModelError, warn
from vecgym.core.transforms import plain
from vecgym.core.tree import Tree
from vecgym.engine import hooks
from vecgym.engine.batching_rules import Folding, Observer, TwiceDifferentiable
from vecgym.engine.contract import (
    check_differentiable,
    check_loss,
    check_model,
    check_val_metrics,
    fix,
    offers_metrics,
    shown_batch,
)

T = TypeVar("T")
EngineName = Literal["auto", "vmap", "loop", "fastest"]
ENGINES: tuple[str, ...] = get_args(EngineName)

# Calibrated by benchmarks/step_time.py. Splitting the nodes over threads costs two thread hand-overs and twice
# the Python of one vectorised call: worth it from about this much arithmetic per step and thread.
MIN_FLOP_PER_THREAD = 1e9
# On a CPU, a node with more arithmetic than this in a step is computed faster by itself, within the cache.
MAX_FLOP_IN_STACK = 2e9
# On a CPU, memory for a larger tensor is mapped afresh at every operation (glibc's allocator keeps no more), and the
# page faults cost as much as the arithmetic: so the nodes are taken in chunks whose largest tensor is smaller.
MAX_TENSOR_BYTES = 2**25 - 2**16


class Local(NamedTuple):
    """The result of the nodes' own work.

    >>> local = Local(grads={"w": torch.tensor([[2.0], [4.0]])}, losses=torch.tensor([1.0, 2.0]), buffers={})
    >>> local.grads["w"].mean(0)
    tensor([3.])
    """

    grads: Tree  # [L, *], or [1, *]: the gradient of the mean loss
    losses: Tensor  # [L]
    buffers: Tree  # [1 or L, *]


@dataclass(frozen=True)
class Plan:
    """How the nodes are computed: `engine` "vmap" or "loop", nodes per call, and threads over nodes.

    >>> print(Plan("loop", node_threads=2, reason="asked for"))
    loop, 2 node threads (asked for)
    """

    engine: str
    node_threads: int = 1
    chunk_size: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        threads = f", {self.node_threads} node threads" if self.node_threads > 1 else ""
        chunk = f", chunks of {self.chunk_size}" if self.chunk_size else ""
        return f"{self.engine}{threads}{chunk} ({self.reason})"


@dataclass(frozen=True)
class ModelFacts:
    """What one forward and backward pass of one node shows.

    >>> facts = ModelFacts(unused=frozenset(), mutated=frozenset(), random=True, flop=1000)  # a model with dropout
    >>> facts.random, facts.vmap_error is None
    (True, True)
    """

    unused: frozenset[str]  # parameters that get no gradient: as in torch, they are never updated
    mutated: frozenset[str]  # buffers that a training step changes
    random: bool  # draws random numbers (dropout)
    hooked: bool = False  # has hooks on its gradients
    flop: int = 0  # floating-point operations of one node's forward and backward pass
    largest_bytes: int = 0  # of one node's tensors: parameters, and what its operations give
    vmap_error: Exception | None = None
    vmap_slow: tuple[str, ...] = ()  # operations that vmap runs node by node, serially


class _Skeleton:
    """The model's structure, to be given the tensors of one node, or of all.

    It does what `torch.func.functional_call` does, for a model that is called again and again: where each tensor
    belongs, tied ones to several places, is looked up once. Until then it shares the model's own tensors and never
    uses them. The buffers are returned as the call leaves them, whether it changed them in place or replaced them.
    """

    def __init__(self, model: nn.Module, training: bool) -> None:
        shared = {id(x): x for x in (*model.parameters(), *model.buffers())} | hooks.computed(model)
        self.model = copy.deepcopy(model, shared).train(training)
        names = {id(x): name for name, x in (*model.named_buffers(), *model.named_parameters())}
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in names.values()}
        for module in self.model.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                module.sparse = False  # stacked gradients are dense
            for held in (module._parameters, module._buffers):
                for key, x in held.items():
                    if x is not None:
                        self._places[names[id(x)]].append((held, key))
        self._buffers = [name for name, _ in model.named_buffers()]

    def call(self, params: Tree, buffers: Tree, batch: Any) -> tuple[Tensor, Tree]:
        """The loss, and the buffers after it."""
        return self.call_with_gradient(params, buffers, batch, {})[:2]

    def call_with_gradient(
        self, params: Tree, buffers: Tree, batch: Any, wrt: Tree
    ) -> tuple[Tensor, Tree, tuple[Tensor | None, ...]]:
        """The loss, the buffers after it, and its gradient with respect to each of `wrt`; None: unused."""
        with self._holding({**params, **buffers}):
            loss = self.model(batch)
            # Activation checkpointing runs the model again in the backward pass, which must find these tensors.
            grads = self._gradient_of(loss, wrt) if wrt else ()
            places = {name: self._places[name][0] for name in self._buffers}
            return loss, {name: held[key] for name, (held, key) in places.items()}, grads

    def _gradient_of(self, loss: Any, wrt: Tree) -> tuple[Tensor | None, ...]:
        check_loss(loss, self.model)
        grads = torch.autograd.grad(loss, list(wrt.values()), allow_unused=True)
        # An embedding may give a sparse one, which has no place in stacked storage.
        return tuple(g.to_dense() if g is not None and g.layout == torch.sparse_coo else g for g in grads)

    def measure(self, tensors: Tree, batch: Any) -> Tree:
        """What validation measures: the loss, or all of what the model's own `val_metrics` gives."""
        with self._holding(tensors):
            if not offers_metrics(self.model):
                return {"loss": self.model(batch)}
            found = self.model.val_metrics(batch)  # type: ignore[operator]
            check_val_metrics(found)
            return dict(found)

    @contextlib.contextmanager
    def _holding(self, tensors: Tree) -> Iterator[None]:
        """Hold other tensors for a while."""
        before = [(held, key, held[key]) for name in tensors for held, key in self._places[name]]
        try:
            for name, x in tensors.items():
                for held, key in self._places[name]:
                    held[key] = x
            yield
        finally:
            for held, key, x in before:
                held[key] = x


class Engine:
    """Losses and gradients of the L nodes in this process.

    Args:
        model: returns a scalar loss from a batch; only its structure and its frozen parameters are used.
        engine: "vmap", "loop", "auto" (a deterministic rule) or "fastest" (measures when it starts).
        chunk_size: the most nodes in one vectorised call; None: no bound.
        node_threads: CPU threads over nodes; None: the rule decides.
        autocast: run forward passes under `torch.autocast` (bfloat16 on CPU, float16 on CUDA).

    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> engine, batch, params = Engine(Line()), torch.tensor([[1.0], [3.0]]), {"w": torch.zeros(1)}
    >>> engine.prepare(batch).engine, engine.device
    ('vmap', device(type='cpu'))
    >>> local = engine.gradients(params, {}, batch, seed=0, step=0)
    >>> local.losses, local.grads
    (tensor([1., 9.]), {'w': tensor([-2., -6.])})
    >>> engine.losses(params, {}, batch, own_batches=True), engine.loss({"w": torch.ones(())}, {}, batch[1])
    (tensor([1., 9.]), tensor(4.))
    >>> engine.measures(params, {}, batch, own_batches=True)
    {'loss': tensor([1., 9.])}
    >>> engine.close()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        engine: str = "auto",
        chunk_size: int | None = None,
        node_threads: int | None = None,
        autocast: bool = False,
    ) -> None:
        check_settings(engine, chunk_size, node_threads)
        check_model(model)
        self.settings = (engine, chunk_size, node_threads)
        self.autocast = autocast
        self._hooks = hooks.of_parameters(model)
        self._hooked = hooks.on_gradients(model)
        by_node = engine == "loop" or bool(self._hooked)
        self.plan = Plan("loop" if by_node else "vmap", chunk_size=chunk_size, reason="asked for")
        self.facts: ModelFacts | None = None
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        self.buffers = {name: b.detach() for name, b in model.named_buffers()}
        self.model = model
        self._train = [_Skeleton(model, training=True)]
        self._eval = _Skeleton(model, training=False)
        # nn.Embedding with max_norm scales rows of its weight in every forward pass, also in eval mode.
        self._writes_params = any(getattr(module, "max_norm", None) is not None for module in model.modules())
        self._pool: ThreadPoolExecutor | None = None
        self._grads: Tree = {}

    # ------------------------------------------------------------------------------------------- set-up

    def prepare(self, batch: Any, agree: Callable[[ModelFacts], ModelFacts] | None = None) -> Plan:
        """Look at the model on one step's batch `[L, B, ...]`, check it, and settle the plan.

        `agree` makes of what this process has seen what all processes go by.
        """
        num_nodes = next(iter(tree.leaves(batch))).shape[0]
        engine, chunk_size, node_threads = self.settings
        of_one = tree.map_leaves(lambda x: plain(x)[0], batch)
        self.facts = _outside_transforms(lambda: self._examine(of_one, want_vmap=engine != "loop"))
        if agree is not None:
            self.facts = agree(self.facts)
        for name in self.facts.unused:
            self.frozen[name] = self.params.pop(name).detach()
        if engine == "vmap" and self.facts.vmap_error is not None:
            raise self.facts.vmap_error
        plan = choose_plan(self.facts, num_nodes, self.device, torch.get_num_threads(), engine)
        if node_threads is not None:
            plan = replace(plan, node_threads=min(node_threads, num_nodes))
            if node_threads > 1 and (why := self._one_thread()):
                warn(f"node_threads={node_threads} has no effect: the model {why}.")
                plan = replace(plan, node_threads=1)
        if self.facts.vmap_error is not None and engine in ("auto", "fastest"):
            warn(
                f"{str(self.facts.vmap_error).splitlines()[0]} Its nodes are computed one after the other. "
                'engine="loop" chooses that without this warning.'
            )
        self.plan = plan if chunk_size is None else replace(plan, chunk_size=chunk_size)
        if engine == "fastest":
            self.plan = self._measured_plan(batch, num_nodes)
        self._start_threads()
        return self.plan

    def _one_thread(self) -> str:
        """Why the nodes cannot be spread over threads; "" if they can."""
        assert self.facts is not None
        if self.device.type != "cpu":
            return f"runs on {self.device.type}"
        if self.facts.hooked:
            return "has hooks, which are called node after node"
        return "draws random numbers" if self.facts.random else ""

    @property
    def device(self) -> torch.device:
        """Where the model is, and so all that is computed."""
        values = self.params or self.frozen
        return next(iter(values.values())).device if values else torch.device("cpu")

    def close(self) -> None:
        """End the node threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _examine(self, batch: Any, want_vmap: bool) -> ModelFacts:
        """Run one node forward and backward: check what the model returns, and note what it does."""
        params = {name: p.detach().requires_grad_() for name, p in self.params.items()}
        before = {name: b.clone() for name, b in self.buffers.items()}
        with _seeded(0, self.device, active=True), Observer() as observer:
            state = torch.get_rng_state(), _device_rng_state(self.device)
            with self._casting(), _first_call(self.model, batch):
                _, after, grads = self._train[0].call_with_gradient(
                    {**params, **self.frozen}, _clones(before), batch, params
                )
            random = not torch.equal(state[0], torch.get_rng_state())
            random |= not torch.equal(state[1], _device_rng_state(self.device))
        facts = ModelFacts(
            hooked=bool(self._hooked),
            unused=frozenset(name for name, g in zip(params, grads) if g is None),
            mutated=frozenset(n for n, b in after.items() if n not in before or not _same(b, before[n])),
            random=random,
            flop=3 * observer.flop,  # a backward pass costs about two forward passes
            largest_bytes=max(observer.largest_bytes, *(p.numel() * p.element_size() for p in self.params.values())),
        )
        if not want_vmap:
            return facts
        if unsafe := observer.unsafe or (self._hooked and f"{self._hooked}, which sees one node at a time"):
            return replace(facts, vmap_error=_vmap_error(unsafe))
        self.facts = facts
        two = tree.map_leaves(lambda x: torch.stack([x, x]), batch)
        stacked = {name: torch.stack([p, p]) for name, p in self.params.items() if name not in facts.unused}
        wide = {n: torch.stack([b, b]) if n in facts.mutated else b[None] for n, b in before.items()}
        try:
            with warnings.catch_warnings(record=True) as caught, _seeded(0, self.device, active=True):
                warnings.simplefilter("always")
                self._vmap_chunk(0, stacked, wide, two)
        except Exception as error:  # whatever the model's code raises under vmap: the loop can run it
            failure = _vmap_error(_cause(error))
            if self.settings[0] == "vmap":
                raise failure from error
            return replace(facts, vmap_error=failure)
        slow = tuple(str(w.message).split("batching rule for ")[1].split(".")[0] for w in caught
                     if "batching rule for " in str(w.message))  # fmt: skip
        return replace(facts, vmap_slow=tuple(dict.fromkeys(slow)))

    def _start_threads(self) -> None:
        self.close()
        count = self.plan.node_threads
        while len(self._train) < count:  # functional_call changes its module for a while: one for each thread
            self._train.append(_Skeleton(self.model, training=True))
        if count > 1:
            own = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(count, "vecgym-node", initializer=_take_one_thread)
            list(self._pool.map(time.sleep, [0.01] * count))  # start every thread now
            torch.set_num_threads(own)  # set_num_threads in a thread changes the default for later threads too

    def _measured_plan(self, batch: Any, num_nodes: int) -> Plan:
        """The fastest of the possible plans, by two timed calls each."""
        assert self.facts is not None
        engines = ["loop"] if self.facts.vmap_error is not None else ["vmap", "loop"]
        counts = {1} if self._one_thread() else {1, torch.get_num_threads()}
        candidates = [Plan(e, min(t, num_nodes), self.plan.chunk_size) for e in engines for t in sorted(counts)]
        params = {name: p.detach()[None].repeat(num_nodes, *[1] * p.dim()) for name, p in self.params.items()}
        timed = []
        for plan in candidates:
            self.plan = plan
            self._start_threads()
            buffers = {name: b[None] for name, b in self.buffers.items()}
            seconds = []
            for _ in range(3):  # the first warms up
                start = time.perf_counter()
                self.gradients(params, buffers, batch, seed=0, step=0)
                _synchronize(self.device)
                seconds.append(time.perf_counter() - start)
            timed.append(min(seconds[1:]))
        best = min(range(len(timed)), key=timed.__getitem__)
        report = ", ".join(f"{p.engine} x{p.node_threads}: {1e3 * s:.1f} ms" for p, s in zip(candidates, timed))
        return replace(candidates[best], reason=f"fastest measured: {report}")

    # -------------------------------------------------------------------------------------------- training

    def gradients(
        self,
        params: Tree,
        buffers: Tree,
        batch: Any,
        *,
        seed: int | Sequence[int],
        step: int,
        node_ids: Sequence[int] | None = None,
        minibatch_size: int | None = None,
        mean: bool = False,
        differentiable: bool = False,
        limits: Sequence[int] | None = None,
    ) -> Local:
        """Loss and gradient of every node on its own batch; the gradients may be overwritten by the next call.

        Args:
            params: `[L, *]`, or `[1, *]`: the same on every node.
            buffers: likewise; those that training changes may be overwritten, unless `differentiable`.
            batch: leaves `[L, B, ...]`.
            seed, step, node_ids: what dropout is keyed by; one seed for all, or one for each node.
            minibatch_size: examples at a time; the gradients of the parts are averaged by their sizes.
            mean: give only the gradient of the nodes' mean loss, `[1, *]`; `params` must be `[1, *]`.
            differentiable: derivatives can be taken through the result; nothing given is overwritten.
            limits: of each node, how many of the B examples are its own: the first of them; None: all.
        """
        if differentiable:
            check_differentiable(self.model)
        num_nodes, batch_size = _sizes(batch)
        if limits is not None and min(limits) < batch_size:
            return self._limited(
                limits, params, buffers, batch, seed, list(range(num_nodes)) if node_ids is None else node_ids,
                step=step, minibatch_size=minibatch_size, mean=mean, differentiable=differentiable,
            )  # fmt: skip
        keys = _Keys(seed, step, list(range(num_nodes)) if node_ids is None else list(node_ids))
        buffers = self._own_buffers(buffers, num_nodes, differentiable)
        result: Local | None = None
        for start in range(0, batch_size, minibatch_size or batch_size):
            stop = min(batch_size, start + (minibatch_size or batch_size))
            part = batch if stop - start == batch_size else tree.map_leaves(lambda x: x[:, start:stop], batch)  # noqa: B023
            with self._explaining(params, buffers, part, keys.part(start), differentiable):
                local = self._pass(params, buffers, part, keys.part(start), mean, differentiable)
            buffers = local.buffers
            result = _weighted(result, local, (stop - start) / batch_size)
        assert result is not None
        return result

    def _limited(
        self, limits: Sequence[int], params: Tree, buffers: Tree, batch: Any, seed: int | Sequence[int],
        node_ids: Sequence[int], *, mean: bool, **settings: Any,
    ) -> Local:  # fmt: skip
        """`gradients` of nodes whose batches differ in size: those of one size at a time."""
        num_nodes, batch_size = _sizes(batch)
        if any(x.dim() < 2 or x.shape[1] != batch_size for x in tree.leaves(batch)):
            raise ValueError(
                f"a node has {min(limits)} examples, fewer than the {batch_size} of a batch, which cannot be cut: its "
                f"tensors are not all [nodes, {batch_size}, ...]. Give batch_size={min(limits)}, or another collate_fn."
            )
        sizes = [min(limit, batch_size) for limit in limits]
        buffers = self._own_buffers(buffers, num_nodes, settings["differentiable"])
        found: list[tuple[Tensor, Local]] = []
        for size in sorted(set(sizes)):
            rows = torch.tensor([i for i, own in enumerate(sizes) if own == size])
            part = tree.map_leaves(lambda x: x[rows.to(x.device), :size], batch)  # noqa: B023
            local = self.gradients(
                nodes.take_rows(params, rows), nodes.take_rows(buffers, rows), part, mean=mean,
                seed=seed if isinstance(seed, int) else [seed[i] for i in rows.tolist()],
                node_ids=[node_ids[i] for i in rows.tolist()], **settings,
            )  # fmt: skip
            buffers = nodes.put_rows(buffers, rows, local.buffers, num_nodes, inplace=not settings["differentiable"])
            share = len(rows) / num_nodes if mean else 1.0
            found.append((rows, Local(tree.map(lambda g: g * share, local.grads), local.losses, {})))  # noqa: B023
        back = torch.cat([rows for rows, _ in found]).argsort()
        losses = torch.cat([local.losses for _, local in found])[back.to(self.device)]
        each = [local.grads for _, local in found]
        if mean:
            return Local(tree.map(lambda *gs: functools.reduce(torch.add, gs), *each), losses, buffers)
        return Local(tree.map(lambda *gs: torch.cat(gs)[back.to(self.device)], *each), losses, buffers)

    def _pass(self, params: Tree, buffers: Tree, batch: Any, keys: _Keys, mean: bool, differentiable: bool) -> Local:
        num_nodes = len(keys.node_ids)
        if differentiable:
            with sdpa_kernel(SDPBackend.MATH), _seeded(keys.of(0), self.device, self._random):
                return self._pure(tree.map(lambda p: p.expand(num_nodes, *p.shape[1:]), params), buffers, batch, keys)
        chunks = self._chunks(num_nodes, 1 if mean else self.plan.node_threads)
        if mean:
            return self._mean_pass(params, buffers, batch, keys, chunks)
        if len(chunks) == 1 and self.plan.engine == "vmap":
            with _seeded(keys.of(0), self.device, self._random):
                return self._vmap_chunk(0, params, buffers, batch)
        grads = self._gradient_storage(params, num_nodes)
        losses = [torch.empty(0)] * len(chunks)

        def run(index: int, thread: int) -> None:
            a, b = chunks[index]
            part = _rows(params, a, b), _rows(buffers, a, b), tree.map_leaves(lambda x: x[a:b], batch)
            if self.plan.engine == "vmap":
                with _seeded(keys.of(a), self.device, self._random):
                    local = self._vmap_chunk(thread, *part)
                for name, g in local.grads.items():
                    grads[name][a:b].copy_(g)
                losses[index] = local.losses
            else:
                losses[index] = self._loop_chunk(thread, *part, grads, keys, a)

        num_threads = self.plan.node_threads if self._pool is not None else 1
        share = [range(t, len(chunks), num_threads) for t in range(num_threads)]

        def run_share(thread: int) -> None:
            for index in share[thread]:
                run(index, thread)

        if self._pool is None or num_threads == 1:
            run_share(0)
        else:
            list(self._pool.map(run_share, range(len(share))))
        return Local(grads, torch.cat(losses), buffers)

    def _gradient_storage(self, params: Tree, num_nodes: int) -> Tree:
        """Where the parts of the nodes write their gradients, `[L, *]`: that of the step before, if it fits.

        What it held has been used by then. New memory of this size would cost more than the copy into it.
        """

        def storage(name: str, p: Tensor) -> Tensor:
            kept, shape = self._grads.get(name), (num_nodes, *p.shape[1:])
            fits = kept is not None and kept.shape == shape and kept.dtype == p.dtype and kept.device == p.device
            return kept if fits and kept is not None else p.new_empty(shape)

        self._grads = {name: storage(name, p) for name, p in params.items()}
        return dict(self._grads)

    def _chunks(self, num_nodes: int, threads: int) -> list[tuple[int, int]]:
        """Equal parts of the nodes: one for each thread, or more where `chunk_size` bounds them."""
        size = -(-num_nodes // threads)
        if self.plan.chunk_size is not None:
            size = min(size, self.plan.chunk_size)
        return [(a, min(a + size, num_nodes)) for a in range(0, num_nodes, size)]

    def _vmap_chunk(self, thread: int, params: Tree, buffers: Tree, batch: Any) -> Local:
        """All nodes of a chunk in one vectorised call; buffers that change are written in place."""
        size = _sizes(batch)[0]
        leaves = {name: p.detach().expand(size, *p.shape[1:]).requires_grad_() for name, p in params.items()}
        losses, buffers = self._vmapped(thread, leaves, False, buffers, batch)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        return Local(dict(zip(leaves, grads)), losses.detach(), buffers)

    def _mean_pass(self, params: Tree, buffers: Tree, batch: Any, keys: _Keys, chunks: list[tuple[int, int]]) -> Local:
        """The gradient of the mean loss at parameters stored once: the cost of one model on all batches."""
        num_nodes = len(keys.node_ids)
        if self.plan.engine == "loop":
            chunks = [(i, i + 1) for i in range(num_nodes)]
        total: Tree | None = None
        losses = []
        for a, b in chunks:
            leaves = {name: self._leaf(name, p[0]) for name, p in params.items()}
            part = (buffers, batch)
            if b - a < num_nodes:
                part = _rows(buffers, a, b), tree.map_leaves(lambda x: x[a:b], batch)  # noqa: B023
            with _seeded(keys.of(a), self.device, self._random):
                grads, loss = self._mean_chunk(leaves, *part, keys, a)
            total = grads if total is None else tree.map(torch.add, total, grads)
            losses.append(loss)
        assert total is not None
        return Local(tree.map(lambda g: g[None], total), torch.cat(losses), buffers)

    def _mean_chunk(self, leaves: Tree, buffers: Tree, batch: Any, keys: _Keys, first: int) -> tuple[Tree, Tensor]:
        """What a chunk adds to the gradient of the mean of all losses, and its losses."""
        num_nodes = len(keys.node_ids)
        if self.plan.engine == "loop":
            with _naming(f"node {keys.node_ids[first]}, step {keys.step}"):
                loss, grads = self._one(0, leaves, buffers, tree.map_leaves(lambda x: x[0], batch))
            return tree.map(lambda g: g / num_nodes, grads), loss[None]
        losses, _ = self._vmapped(0, leaves, True, buffers, batch)
        share = losses.new_full(losses.shape, 1 / num_nodes)
        found = torch.autograd.grad(losses, list(leaves.values()), share, materialize_grads=True)
        return dict(zip(leaves, found)), losses.detach()

    def _vmapped(
        self,
        thread: int,
        leaves: Tree,
        leaves_shared: bool,
        buffers: Tree,
        batch: Any,
    ) -> tuple[Tensor, Tree]:
        """The losses `[L]`, differentiable in `leaves`: `[L, *]`, or `[*]` if shared; and the buffers after them."""
        own = {name: b for name, b in buffers.items() if self._is_mutated(name)}
        shared = {**self.frozen, **{name: b[0] for name, b in buffers.items() if name not in own}}
        if leaves_shared:
            shared.update(leaves)

        def loss_of_one(p: Tree, b: Tree, rows: Any) -> tuple[Tensor, Tree]:
            loss, after = self._train[thread].call({**shared, **p}, b, rows)
            return loss, {name: after[name] for name in b}

        with Folding(), self._casting():
            losses, after = vmap(loss_of_one, randomness="different")({} if leaves_shared else leaves, own, batch)
        for name, new in after.items():
            if new.data_ptr() != buffers[name].data_ptr():  # replaced by the model, not changed in place
                buffers[name].copy_(new.detach())
        return losses, buffers

    def _loop_chunk(
        self, thread: int, params: Tree, buffers: Tree, batch: Any, grads: Tree, keys: _Keys, first: int
    ) -> Tensor:
        """Node after node, each with its own random key; gradients are written into `grads`."""
        losses = []
        for i in range(_sizes(batch)[0]):
            leaves = {name: self._leaf(name, _row(p, i)) for name, p in params.items()}
            with _seeded(keys.of(first + i), self.device, self._random):
                rows = tree.map_leaves(lambda x: x[i], batch)  # noqa: B023
                with _naming(f"node {keys.node_ids[first + i]}, step {keys.step}"):
                    loss, gradient = self._one(thread, leaves, _rows(buffers, i, i + 1), rows)
            for name, g in gradient.items():
                grads[name][first + i].copy_(g)
            losses.append(loss)
        return torch.stack(losses)

    def _leaf(self, name: str, p: Tensor) -> Tensor:
        """One node's parameter, to take the gradient by; the parameter's hooks get that gradient."""
        leaf = p.detach().requires_grad_()
        for hook in self._hooks.get(name, ()):
            leaf.register_hook(hook)
        return leaf

    def _one(self, thread: int, leaves: Tree, buffers: Tree, batch: Any) -> tuple[Tensor, Tree]:
        """Loss and gradient of one node; its row of the buffers is overwritten."""
        given = tree.map(lambda b: b[0], buffers)
        with self._casting():
            loss, after, grads = self._train[thread].call_with_gradient({**leaves, **self.frozen}, given, batch, leaves)
        for name, new in after.items():
            if self._is_mutated(name) and new.data_ptr() != buffers[name].data_ptr():
                buffers[name][0].copy_(new.detach())
        here = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(leaves.items(), grads)}
        return loss.detach(), here

    def _pure(self, params: Tree, buffers: Tree, batch: Any, keys: _Keys) -> Local:
        """The same as `_vmap_chunk` or `_loop_chunk`, through transforms that can themselves be differentiated."""
        dims = {name: 0 if self._is_mutated(name) else None for name in buffers}
        given = {name: b.clone() if dims[name] == 0 else b[0] for name, b in buffers.items()}

        def loss_of_one(p: Tree, b: Tree, rows: Any) -> tuple[Tensor, Tree]:
            loss, after = self._train[0].call({**p, **self.frozen}, b, rows)
            return loss, {name: after[name] for name in after if dims.get(name) == 0}

        of_one = grad_and_value(loss_of_one, has_aux=True)
        with TwiceDifferentiable(), self._casting():
            if self.plan.engine == "vmap":
                grads, (losses, after) = vmap(of_one, in_dims=(0, dims, 0), randomness="different")(
                    params, given, batch
                )
                return Local(grads, losses, {**buffers, **after})
            found = []
            for i in range(len(keys.node_ids)):
                own = {name: b[i] if dims[name] == 0 else b for name, b in given.items()}
                with _seeded(keys.of(i), self.device, self._random):
                    found.append(of_one(tree.map(lambda p: p[i], params), own, tree.map_leaves(lambda x: x[i], batch)))  # noqa: B023
        each_grads, values = zip(*found)
        each_loss, each_after = zip(*values)
        return Local(_stacked(each_grads), torch.stack(each_loss), {**buffers, **_stacked(each_after)})

    @contextlib.contextmanager
    def _explaining(self, params: Tree, buffers: Tree, batch: Any, keys: _Keys, differentiable: bool) -> Iterator[None]:
        """Raise the model's own error where it has one, and otherwise say what vmap, or a derivative, cannot do."""
        if self.plan.engine == "loop" and not differentiable:
            yield  # node after node: what is raised is the model's own
            return
        try:
            yield
        except Exception as error:
            _check_memory(error)
            given = tree.map_leaves(plain, [params, _clones(buffers), batch])
            _outside_transforms(lambda: self._run_plainly(given[0], given[1], given[2], keys))
            raise (_derivative_error if differentiable else _vmap_error)(_cause(error)) from error

    def _run_plainly(self, params: Tree, buffers: Tree, batch: Any, keys: _Keys) -> None:
        """Node after node, for the error of the first that has one."""
        with torch.enable_grad():
            self._loop_chunk(0, params, buffers, batch, self._gradient_storage(params, len(keys.node_ids)), keys, 0)

    # ------------------------------------------------------------------------------------------ evaluation

    def loss(self, params: Tree, buffers: Tree, batch: Any) -> Tensor:
        """The loss of one model in eval mode, differentiable in everything as often as wanted: a scalar.

        Args:
            params, buffers: of one model, `[*]`.
            batch: an ordinary one.
        """
        with (
            TwiceDifferentiable(), sdpa_kernel(SDPBackend.MATH), _plain_attention(), self._casting(),
            _seeded(rng.key(0, "evaluation", 0), self.device, self._random), _naming("in evaluation"),
        ):  # fmt: skip
            return self._eval.call({**params, **self.frozen}, _clones(buffers), batch)[0]

    def losses(self, params: Tree, buffers: Tree, batch: Any, *, own_batches: bool = False) -> Tensor:
        """The loss of each row of `params` in eval mode, `[L]`; see `measures`."""
        return self.measures(params, buffers, batch, own_batches=own_batches)["loss"]

    @torch.no_grad()
    def measures(self, params: Tree, buffers: Tree, batch: Any, *, own_batches: bool = False) -> Tree:
        """What validation measures of each row of `params` in eval mode, `[L]` each; nothing is changed.

        That is the loss. A model that defines `val_metrics(batch)` is asked for that instead of its forward: a dict of
        scalars, each a mean over the batch, "loss" among them, such as `{"loss": loss, "accuracy": accuracy}`.

        Args:
            params, buffers: `[L, *]` or `[1, *]`.
            batch: one ordinary batch for all, or `[L, B, ...]` with `own_batches`.
        """
        # What a forward pass may change is not the nodes' own: validation has no part in the training.
        buffers = {name: b.clone() if self._is_mutated(name) else b for name, b in buffers.items()}
        params = _clones(params) if self._writes_params else params
        rows = [x.shape[0] for x in tree.leaves([params, buffers])]
        num_nodes = _sizes(batch)[0] if own_batches else max(rows, default=1)
        found = []
        for a, b in self._chunks(num_nodes, 1):
            part = _rows(params, a, b), _rows(buffers, a, b)
            here = tree.map_leaves(lambda x: x[a:b], batch) if own_batches else batch  # noqa: B023
            with _seeded(rng.key(0, "evaluation", a), self.device, self._random):
                found.append(self._chunk_measures(*part, here, own_batches, b - a))
        return {name: torch.cat([each[name] for each in found]) for name in found[0]}

    def _chunk_measures(self, params: Tree, buffers: Tree, batch: Any, own_batches: bool, size: int) -> Tree:
        if self.plan.engine == "vmap":
            return self._vmap_measures(params, buffers, batch, own_batches, size)
        return self._loop_measures(params, buffers, batch, own_batches, size)

    def _vmap_measures(self, params: Tree, buffers: Tree, batch: Any, own_batches: bool, size: int) -> Tree:
        values = {**params, **buffers}
        dims = {name: 0 if x.shape[0] == size and size > 1 else None for name, x in values.items()}
        given = {name: x if dims[name] == 0 else x[0] for name, x in values.items()}

        def of_one(values: Tree, rows: Any) -> Tree:
            return self._eval.measure({**values, **self.frozen}, rows)

        if size == 1:
            with _naming("in validation"):
                one = of_one(given, tree.map_leaves(lambda x: x[0], batch) if own_batches else batch)
            return tree.map(lambda x: x[None], one)
        try:
            with Folding(), self._casting(), _plain_attention():
                return vmap(of_one, in_dims=(dims, 0 if own_batches else None), randomness="different")(given, batch)
        except Exception as error:
            _check_memory(error)
            self._loop_measures(params, _clones(buffers), batch, own_batches, size)  # raises the model's own error
            raise _vmap_error(_cause(error)) from error

    def _loop_measures(self, params: Tree, buffers: Tree, batch: Any, own_batches: bool, size: int) -> Tree:
        found = []
        for i in range(size):
            rows = tree.map_leaves(lambda x: x[i], batch) if own_batches else batch  # noqa: B023
            values = tree.map(lambda x: _row(x, i), {**params, **buffers})  # noqa: B023
            with self._casting(), _naming("in validation"):
                found.append(self._eval.measure({**values, **self.frozen}, rows))
        return _stacked(found)

    # --------------------------------------------------------------------------------------------- helpers

    @property
    def _random(self) -> bool:
        return self.facts is None or self.facts.random

    def _is_mutated(self, name: str) -> bool:
        return self.facts is None or name in self.facts.mutated

    def _own_buffers(self, buffers: Tree, num_nodes: int, differentiable: bool) -> Tree:
        """Give each node its own storage for the buffers that training changes."""

        def own(name: str, b: Tensor) -> Tensor:
            if not self._is_mutated(name) or b.shape[0] == num_nodes > 1:
                return b
            wide = b.expand(num_nodes, *b.shape[1:])
            return wide if differentiable else wide.clone()

        return {name: own(name, b) for name, b in buffers.items()}

    def _casting(self) -> contextlib.AbstractContextManager:
        if not self.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type)


# ------------------------------------------------------------------------------------------------ the rule


def choose_plan(facts: ModelFacts, num_nodes: int, device: torch.device, num_threads: int, engine: str) -> Plan:
    """How to compute the nodes, from what is known of the model and the machine; nothing is measured.

    1. `loop` where vmap cannot run the model, or would run part of it node by node anyway; and on CPU where each node
       has much arithmetic (`MAX_FLOP_IN_STACK`).
    2. On CPU the nodes are spread over the threads when each gets enough arithmetic
       (`MIN_FLOP_PER_THREAD`), unless the model draws random numbers, whose order threads would mix up.
    3. On CPU `vmap` takes as many nodes at a time as keep its tensors small (`MAX_TENSOR_BYTES`).

    >>> facts = ModelFacts(unused=frozenset(), mutated=frozenset(), random=False, flop=10**9)
    >>> print(choose_plan(facts, num_nodes=8, device=torch.device("cpu"), num_threads=2, engine="auto"))
    vmap, 2 node threads (all nodes in one call; 8 GFLOP a step are worth 2 node threads)
    """
    if engine in ("vmap", "loop"):
        chosen, reason = engine, "asked for"
    elif facts.vmap_error is not None:
        chosen, reason = "loop", "vmap cannot run the model"
    elif facts.vmap_slow:
        chosen, reason = "loop", f"vmap has no fast form of {', '.join(facts.vmap_slow)}"
    elif device.type == "cpu" and facts.flop > MAX_FLOP_IN_STACK:
        chosen, reason = "loop", f"{facts.flop / 1e9:.2g} GFLOP a node and step"
    else:
        chosen, reason = "vmap", "all nodes in one call"
    flop = facts.flop * num_nodes
    threads = min(num_threads, num_nodes)
    if device.type != "cpu" or facts.random or facts.hooked or flop < MIN_FLOP_PER_THREAD * threads:
        threads = 1
    if threads > 1:
        reason += f"; {flop / 1e9:.2g} GFLOP a step are worth {threads} node threads"
    chunk_size = None
    if device.type == "cpu" and chosen == "vmap" and facts.largest_bytes * num_nodes > MAX_TENSOR_BYTES * threads:
        chunk_size = max(1, MAX_TENSOR_BYTES // facts.largest_bytes)
    return Plan(chosen, threads, chunk_size, reason)


def check_settings(engine: str, chunk_size: int | None, node_threads: int | None) -> None:
    """Raise a ValueError for settings of the engine that cannot work.

    >>> check_settings("vmap", chunk_size=0, node_threads=None)
    Traceback (most recent call last):
    ...
    ValueError: chunk_size=0 must be an integer >= 1, or None: None lets vecgym choose.
    """
    check.choice("engine", engine, ENGINES)
    for name, value in (("chunk_size", chunk_size), ("node_threads", node_threads)):
        check.optional_integer(name, value, what="None lets vecgym choose")


def _vmap_error(cause: str) -> RuntimeError:
    """What fails under vmap only, with the way out."""
    return RuntimeError(
        f'vmap cannot run this model: {cause}.\nUse engine="loop" (node after node, any model), or engine="auto", '
        "which falls back to it."
    )


def _derivative_error(cause: str) -> RuntimeError:
    """What to do where a model's gradient has no derivative."""
    return RuntimeError(
        f"the gradient of this model cannot be differentiated: {cause}.\nNo derivatives exist through activation "
        "checkpointing, .item(), or an operation with a backward pass of its own: leave them out of the model. What "
        'branches on values needs engine="loop".'
    )


def _check_memory(error: Exception) -> None:
    """Where the memory was not enough, say what to do."""
    on_device = isinstance(error, torch.OutOfMemoryError)
    if on_device or "allocate memory" in str(error):
        kind = torch.OutOfMemoryError if on_device else RuntimeError
        raise kind(
            f"{_cause(error)}.\nUse a smaller chunk_size (nodes in one call) or minibatch_size (examples at a time)."
        ) from error


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Keep `nn.MultiheadAttention` from a fast form for evaluation that vmap runs node by node."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say of which node, and when, an error of the model is, and in which line of it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"{what}: {type(error).__name__}: {error}{_place(error)}") from error


@contextlib.contextmanager
def _first_call(model: nn.Module, batch: Any) -> Iterator[None]:
    """Say what the model was given, and what it must do, where its first call fails."""
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        way_out = f" {fix(model)}" if isinstance(error, (TypeError, AttributeError, NotImplementedError)) else ""
        raise RuntimeError(
            f"the model fails on its first batch, {shown_batch(batch)}: {type(error).__name__}: {error}{_place(error)}."
            + way_out
        ) from error


def _cause(error: Exception) -> str:
    """What failed in one line, and the line of the model's code that did it."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    text = first_line.split(" (see ")[0].split(". ")[0][:200].rstrip(".")
    if "escaped from inside a function being vmapped" in text:
        text = "something in it runs parts of the model again, as activation checkpointing does"
    return f"{text}{_place(error)}"


def _place(error: Exception) -> str:
    """The line of the model's own code that an error comes from."""
    package = Path(__file__).parent.parent
    own = (str(Path(torch.__file__).parent), str(package / "engine"), str(package / "core"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    return f', at {Path(frames[-1].filename).name}:{frames[-1].lineno}, "{frames[-1].line}"' if frames else ""


# ------------------------------------------------------------------------------------------- small helpers


class _Keys(NamedTuple):
    """What the random numbers of a pass are keyed by."""

    seed: int | Sequence[int]
    step: int
    node_ids: list[int]
    start: int = 0  # first example of the part of the batch

    def part(self, start: int) -> _Keys:
        return self._replace(start=start)

    def of(self, row: int) -> int:
        seed = self.seed[row] if isinstance(self.seed, Sequence) else self.seed
        return rng.key(seed, "model", self.step, self.node_ids[row], self.start)


_GENERATORS = threading.RLock()  # torch's global generators, while a run has seeded them: two runs may share a process


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device, active: bool) -> Iterator[None]:
    """Run with torch's global generators seeded, and put them back; nothing at all unless `active`."""
    if not active:
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with _GENERATORS, torch.random.fork_rng(devices=devices, device_type="cuda"):
        # Not torch.manual_seed, which also seeds what is not used: a hundred times slower, with a traceback for each.
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            getattr(torch, device.type).manual_seed(seed)
        yield


def _outside_transforms(fn: Callable[[], T]) -> T:
    """Call `fn` as if no transform of `torch.func` were around it: they hold for the thread that entered them."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return fn()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


def _take_one_thread() -> None:
    """Let the operations of this thread use it alone: the nodes are spread over threads, not their operations."""
    torch.get_num_threads()  # a thread's first question sets its number, which would undo what was set before
    torch.set_num_threads(1)


def _stacked(trees: Sequence[Tree]) -> Tree:
    return {name: torch.stack([each[name] for each in trees]) for name in trees[0]}


def _device_rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)


def _sizes(batch: Any) -> tuple[int, int]:
    """(L, B) of a batch whose leaves are `[L, B, ...]`."""
    shape = next(iter(tree.leaves(batch))).shape
    return shape[0], shape[1] if len(shape) > 1 else 1


def _row(x: Tensor, i: int) -> Tensor:
    return x[i if x.shape[0] > 1 else 0]


def _rows(values: Tree, a: int, b: int) -> Tree:
    """Nodes a to b; what is the same on every node stays `[1, *]`."""
    return {name: x[a:b] if x.shape[0] > 1 else x for name, x in values.items()}


def _clones(values: Tree) -> Tree:
    return {name: x.clone() for name, x in values.items()}


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


def _weighted(total: Local | None, part: Local, weight: float) -> Local:
    if weight == 1:
        return part
    grads = tree.map(lambda g: g * weight, part.grads)
    losses = part.losses * weight
    if total is None:
        return Local(grads, losses, part.buffers)
    return Local(tree.map(torch.add, total.grads, grads), total.losses + losses, part.buffers)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
