"""Strategies written for one rank, as EXO Gym's are: `step()` sees one node's model, and talks to the others.

A `RankStrategy`, or a subclass of `Strategy` with a `step`, is such a strategy. Each node gets a copy of it, whose
`model` has the node's slice of the stacked state as its parameters (`p.grad` is set). Each copy has a thread, and they
take turns: one runs up to a collective of this module (`all_reduce`, `broadcast`, `all_gather`), then the next. The
collectives are those of `vecgym.collectives` underneath: same results, same ledger. Exact, slower than `[K, *]`
tensor code, and not differentiable.

Each node has its own states of the global random generators: the nodes begin with equal states, as processes with one
seed do, and no node's draws depend on another's.
"""

from __future__ import annotations

import copy
import enum
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.core import check, rng
from vecgym.core.objects import GENERATORS, PLAIN, generator_state, set_generator_state
from vecgym.core.rng import GlobalStates
from vecgym.core.tree import Tree
from vecgym.optim.schedule import make_schedule
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.base import Strategy


def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """Replace `tensor` by its sum over all nodes, in place, and return it.

    `op` is "sum" or "mean"; or "max", "min" or "product", for which every node receives all values.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy.simulated import simulation_of
    >>> from vecgym.models import Line
    >>> class DDP(RankStrategy):
    ...     def step(self):
    ...         for p in self.model.parameters():
    ...             all_reduce(p.grad, op="mean")
    ...         self.optim.step()
    ...         super().step()
    >>> simulation = simulation_of(Line(), DDP("sgd", lr=0.5), StackedCollectives(2))
    >>> state, _ = simulation.step(simulation.init(), torch.tensor([[1.0], [3.0]]))
    >>> state.params["w"]
    tensor([2., 2.])
    """
    reduce = _REDUCTIONS[check.choice("op", op, _REDUCTIONS)]
    meeting, node = here()
    with torch.no_grad():
        return tensor.copy_(meeting.exchange(node, f"all_reduce {op}", tensor, lambda x: reduce(meeting.comm, x))[0])


_REDUCTIONS: dict[str, Callable[[Collectives, Tensor], Tensor]] = {
    "sum": lambda comm, x: comm.sum(x),
    "mean": lambda comm, x: comm.mean(x),
    "max": lambda comm, x: comm.all_gather(x).amax(1),
    "min": lambda comm, x: comm.all_gather(x).amin(1),
    "product": lambda comm, x: comm.all_gather(x).prod(1),
}


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """Replace `tensor` by that of node `src`, in place, and return it.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy.simulated import simulation_of
    >>> from vecgym.models import Line
    >>> class OfNodeOne(RankStrategy):
    ...     def step(self):
    ...         self.optim.step()
    ...         for p in self.model.parameters():
    ...             broadcast(p, src=1)
    ...         super().step()
    >>> simulation = simulation_of(Line(), OfNodeOne("sgd", lr=0.5), StackedCollectives(2))
    >>> state, _ = simulation.step(simulation.init(), torch.tensor([[1.0], [3.0]]))
    >>> state.params["w"]
    tensor([3., 3.])
    """
    meeting, node = here()
    sent = meeting.exchange(node, f"broadcast from {src}", tensor, lambda x: meeting.comm.broadcast(x, src))
    with torch.no_grad():
        return tensor.copy_(sent[0])


def all_gather(tensor: Tensor) -> Tensor:
    """Return every node's tensor, `[K, *]`.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy.simulated import simulation_of
    >>> from vecgym.models import Line
    >>> class Median(RankStrategy):
    ...     def step(self):
    ...         for p in self.model.parameters():
    ...             p.grad = all_gather(p.grad).median(0).values  # [K, *] -> [*]
    ...         self.optim.step()
    ...         super().step()
    >>> simulation = simulation_of(Line(), Median("sgd", lr=0.5), StackedCollectives(3))
    >>> state, _ = simulation.step(simulation.init(), torch.tensor([[1.0], [3.0], [50.0]]))
    >>> state.params["w"]
    tensor([3., 3., 3.])
    """
    meeting, node = here()
    return meeting.exchange(node, "all_gather", tensor, meeting.comm.all_gather)[0].clone()


def barrier() -> None:
    """Wait for all nodes."""
    meeting, node = here()
    meeting.share(node, "a barrier", None)


class RankStrategy(Strategy):
    """A strategy written for one rank: `step` sees one node's model and its gradients, and talks to the others.

    A subclass overrides `step`. Every node runs it in its own copy of the strategy, which has

    * `model`: the node's model, with its gradients in `p.grad`;
    * `rank`, `num_nodes`, `max_steps`: the node's id, the number of nodes, and the length of the run;
    * `local_step`: the number of steps that the node has done;
    * `optim`: the inner optimizer, built by `_init_node`.

    As in EXO Gym, a subclass of `Strategy` that defines `step` is a rank strategy, too.

    >>> from vecgym.strategy import all_reduce
    >>> class DDP(RankStrategy):
    ...     def step(self):
    ...         for p in self.model.parameters():
    ...             all_reduce(p.grad, op="mean")
    ...         self.optim.step()
    ...         super().step()
    >>> DDP("sgd", lr=0.1)
    DDP(OptimSpec(SGD, lr=0.1))
    >>> one = DDP("sgd", lr=0.1)
    >>> one.max_steps = 10
    >>> one._init_node(nn.Linear(1, 1), rank=0, num_nodes=2)
    >>> state = {**one.state_dict(), "local_step": 3}  # a node's part of a checkpoint
    >>> one.load_state_dict(state)
    >>> one.local_step
    3
    """

    model: nn.Module
    rank: int
    num_nodes: int
    max_steps: int
    local_step: int
    optim: torch.optim.Optimizer

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Initialise the node, once, with its model, and build `self.optim`."""
        self.model, self.rank, self.num_nodes, self.local_step = model, rank, num_nodes, 0
        self.optim = self.inner_optim.build([p for p in model.parameters() if p.requires_grad])
        self._set_lr()

    def step(self) -> None:
        """Train the node with its gradients, `p.grad`. Call this one last: it advances the schedule."""
        self.local_step += 1
        self._set_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the node's state besides the model's parameters, for a checkpoint: plain values and tensors.

        These are the attributes: tensors, numbers, strings, random number generators, whatever has a `state_dict`, as
        modules and optimizers have, and lists, tuples, dicts and objects of these. Classes and functions are not
        saved. A strategy that holds anything else overrides this method and `load_state_dict`.

        Raises:
            TypeError: for something that cannot be saved, naming it.
        """
        return state_of(self, {id(p): name for name, p in self.model.named_parameters()}, self._where)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a value of `state_dict`; called after `_init_node`.

        Raises:
            ValueError: for an optimizer, a module or an object that `step` created and `_init_node` does not.
        """
        check.instance("state", state, Mapping, "the dict that state_dict() returned")
        params = dict(self.model.named_parameters())
        restore(self, state, {**params, **{id(p): p for p in params.values()}}, self._where)

    @property
    def _where(self) -> str:
        return f"{type(self).__name__} of node {self.rank}: self"

    def _set_lr(self) -> None:
        inner = self.inner
        schedule = make_schedule(inner.lr_scheduler, self.max_steps, inner.warmup_steps, inner.cosine_anneal)
        for group in self.optim.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * schedule(self.local_step)


# ------------------------------------------------------------------------------------------- the state of a rank


CONSTANTS = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.dtype,
    torch.device, torch.layout, torch.memory_format, type(Ellipsis),
)  # fmt: skip
NEW: dict[str, Callable[[], Any]] = {"tensor": lambda: None, "list": list, "tuple": list, "dict": dict}


def state_of(x: Any, names: dict[int, str], where: str = "self") -> dict[str, Any]:
    """Return the values of an object's attributes, for a file; see `RankStrategy.state_dict`.

    Args:
        names: id -> name of the objects that are saved elsewhere; the objects in `x` are added.
        where: the name of `x` in errors.

    >>> one, two = types.SimpleNamespace(count=3, values=[torch.ones(2)]), types.SimpleNamespace()
    >>> restore(two, state_of(one, {}), {})
    >>> two
    namespace(count=3, values=[tensor([1., 1.])])
    """
    names[id(x)] = where
    return {name: _saved(y, names, f"{where}.{name}") for name, y in vars(x).items()}


def restore(x: Any, state: Mapping[str, Any], objects: dict[Any, Any], where: str = "self") -> None:
    """Restore an object in place from the `state_of` another one that the same code has created.

    Two attributes that held the same object hold the same object again.

    Args:
        objects: name and id -> object, for the objects that are saved elsewhere; restored objects are added.

    Raises:
        ValueError: if the saved object held an object that has no counterpart in this one.
    """
    _refilled(x, {"is": "object", "keys": list(state), "items": list(state.values())}, objects, where)


def _kind(x: Any) -> str:
    """Return the kind under which an object is saved; "" if it cannot be."""
    if isinstance(x, CONSTANTS):
        return "constant"
    if isinstance(x, Tensor):
        return "tensor"
    if isinstance(x, GENERATORS):
        return "generator"
    if isinstance(x, (nn.Module, torch.optim.Optimizer)):
        return "tensors"
    if isinstance(x, dict) or type(x) in (list, tuple):
        return "dict" if isinstance(x, dict) else type(x).__name__
    if hasattr(x, "load_state_dict"):
        return "state_dict"
    return "object" if hasattr(x, "__dict__") and not isinstance(x, enum.Enum) else ""


def _parts(x: Any) -> dict[Any, Any]:
    """Return the parts of an object, by name, key or index."""
    if isinstance(x, nn.Module):
        return {**dict(x.named_parameters()), **dict(x.named_buffers())}
    if isinstance(x, torch.optim.Optimizer):
        return {"param_groups": x.param_groups, "state": x.state}  # in this order: parameters are the state's keys
    if isinstance(x, (list, tuple)):
        return dict(enumerate(x))
    return x if isinstance(x, dict) else vars(x)


def _place(where: str, kind: str, key: Any, i: int) -> str:
    return f"{where}.{key}" if kind == "object" else f"{where}[{i if isinstance(key, Tensor) else repr(key)}]"


def _saved(x: Any, names: dict[int, str], where: str) -> Any:
    if type(x) in PLAIN:
        return x
    kind = _kind(x)
    if kind == "constant":
        return {"is": kind}
    if id(x) in names:
        return {"is": "same", "as": names[id(x)]}
    names[id(x)] = where
    if kind == "tensor":
        grad = x.grad if x.is_leaf else None
        return {"is": kind, "value": x.detach().contiguous(), "grad": grad, "requires_grad": x.requires_grad}
    if kind == "generator":
        return {"is": kind, "value": generator_state(x)}
    if kind == "state_dict":
        return {"is": kind, "value": x.state_dict()}
    if not kind:
        raise _refusal(x, where)
    parts = _parts(x)
    for key in parts:  # plain, a tuple, or a tensor that is already saved, such as a parameter of the model
        if not isinstance(key, (*PLAIN, tuple)) and not (isinstance(key, Tensor) and id(key) in names):
            raise _refusal(key, f"a key of {where}")
    keys = [_saved(key, names, f"a key of {where}") for key in parts]
    items = [_saved(y, names, _place(where, kind, key, i)) for i, (key, y) in enumerate(parts.items())]
    return {"is": kind, "keys": keys, "items": items}


def _refusal(x: Any, where: str) -> TypeError:
    return TypeError(
        f"{where} is a {type(x).__name__}, which cannot be saved: allowed are tensors, numbers, strings, lists, dicts, "
        "random number generators, whatever has a state_dict, and objects of these. Or give the strategy its own "
        "state_dict() and load_state_dict(state)."
    )


def _restored(x: Any, state: Any, objects: dict[Any, Any], where: str) -> Any:
    """Return the restored object in place of `x`: `x` itself if it has the saved kind, else a new one."""
    if not isinstance(state, dict):
        return state
    kind = state["is"]
    if kind == "same":
        return objects[state["as"]]
    if _kind(x) != kind or (id(x) in objects and kind != "constant"):  # it may already have another place
        if kind not in NEW:
            raise _missing(where)
        x = NEW[kind]()
    if kind == "constant":
        return x
    if kind == "tensor":
        x = _filled(x, state)
    elif kind == "generator":
        set_generator_state(x, state["value"])
    elif kind == "state_dict":
        x.load_state_dict(state["value"])
    else:
        x = _refilled(x, state, objects, where)
    objects[where] = objects[id(x)] = x
    return x


def _refilled(x: Any, state: Mapping[str, Any], objects: dict[Any, Any], where: str) -> Any:
    """Restore the parts of an object, in place where it can be."""
    kind, before = state["is"], dict(_parts(x))
    y: Any = list(x) if kind == "tuple" else x
    objects[where] = objects[id(y)] = y  # it may hold itself
    keys = [_restored(None, key, objects, f"a key of {where}") for key in state["keys"]]
    items = [
        _restored(before.get(key), part, objects, _place(where, kind, key, i))
        for i, (key, part) in enumerate(zip(keys, state["items"]))
    ]
    if kind == "tensors":
        for key, new in zip(keys, items):
            if before.get(key) is not new:
                raise _missing(f"{where}[{key!r}]")
        return x
    if kind in ("list", "tuple"):
        y[:] = items
        return tuple(y) if kind == "tuple" else y
    values = x if kind == "dict" else vars(x)
    values.clear()
    values.update(zip(keys, items))
    return x


def _filled(x: Any, state: Mapping[str, Any]) -> Tensor:
    value = state["value"]
    alike = x is not None and x.shape == value.shape and x.dtype == value.dtype
    with torch.no_grad():
        y: Tensor = x.copy_(value) if alike else value.clone()
    if y.is_leaf:
        y.requires_grad_(state["requires_grad"])
        y.grad = None if state["grad"] is None else state["grad"].to(y.device)
    return y


def _missing(where: str) -> ValueError:
    return ValueError(
        f"{where} of the saved object was created while it ran, and the new object has no counterpart: create it at "
        "the start, in _init_node."
    )


def as_strategy(strategy: Strategy, model: nn.Module) -> Strategy:
    """Return a strategy for all nodes at once: `strategy`, or a wrapper that runs its `step` on each node.

    >>> from vecgym.strategy import AllReduceStrategy
    >>> class Alone(Strategy):
    ...     def step(self):
    ...         self.optim.step()
    >>> [as_strategy(strategy, nn.Linear(1, 1)).pure for strategy in (AllReduceStrategy(), Alone())]
    [True, False]
    """
    return _Ranks(strategy, model) if hasattr(strategy, "step") else strategy


def _copy_for_rank(strategy: Strategy) -> Any:
    """Copy a strategy with a `step`, and give it the members of a `RankStrategy`."""
    rank = copy.deepcopy(strategy)
    if not isinstance(rank, RankStrategy):  # as in EXO Gym: super() then finds these members
        cls = type(rank)
        rank.__class__ = type(cls.__name__, (cls, RankStrategy), {"__module__": cls.__module__})
    return rank


class _Ranks(Strategy):
    """Runs a strategy written for one rank on every node.

    Its state lives in the copies of the user's object and in their optimizers, not in the simulation's state.
    """

    pure = False
    batched = None

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        super().__init__(strategy.inner_optim)
        self.strategy = strategy
        self._model = model
        self._ranks: list[Any] = []
        self._threads: ThreadPoolExecutor | None = None
        self._states: list[GlobalStates] = []
        self._lr: float | Tensor = strategy.inner_optim.lr

    def check(self, num_nodes: int, max_steps: int) -> None:
        self.strategy.check(num_nodes, max_steps)

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        self._ranks = [_copy_for_rank(self.strategy) for _ in range(run.num_nodes)]
        self._states = [GlobalStates.seeded(rng.key(run.seed, "per rank"))] * run.num_nodes

        def start(node: int) -> None:
            rank = self._ranks[node]
            rank.rank, rank.max_steps = node, run.num_steps
            rank._init_node(copy.deepcopy(self._model), node, run.num_nodes)

        try:
            self._run(start, StackedCollectives(run.num_nodes))
        finally:
            self.close()  # between this and the first step the run may be refused
        return {"params": params, "optimizer": {}}, {}

    def _run(self, work: Callable[[int], None], comm: Collectives) -> None:
        """Run `work(node)` for all nodes, on threads that stay until `close`."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(comm.num_nodes, "vecgym-rank")
        run_ranks(work, RankMeeting(comm, self._states), self._threads)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def train(self, part: Part) -> None:
        """Let every rank take its step."""
        name = type(self.strategy).__name__
        if not part.inplace:
            raise ValueError(
                f"{name} overrides step() and cannot be differentiated: write it with exchanges, on [K, *] tensors."
            )
        if len(part.rows) < part.run.num_nodes:
            raise ValueError(
                f"{name} overrides step() and so is written for one rank: all {part.run.num_nodes} nodes must be in "
                "one process."
            )
        params, grads = part.params, part.gradients()

        def step(node: int) -> None:
            own = dict(self._ranks[node].model.named_parameters())
            for name, p in params.items():
                own[name].data = p[node]
                own[name].grad = None if node in part.missing.get(name, ()) else grads[name][node].clone()
            self._ranks[node].step()

        groups = getattr(getattr(self._ranks[0], "optim", None), "param_groups", None)
        self._lr = groups[0]["lr"] if groups else self.inner_optim.lr  # the step's end sets the next one
        self._run(step, part.comm)
        # A rank may have replaced a parameter's data by another tensor instead of writing into it.
        for node, rank in enumerate(self._ranks):
            own = dict(rank.model.named_parameters())
            for name, p in params.items():
                if own[name].data_ptr() != p[node].data_ptr():
                    p[node].copy_(own[name].detach())
        part.params = params
        part.report(part.losses)

    def hidden_state(self) -> list[dict[str, Any]]:
        """Return each copy's state besides the parameters, and its random states, for a checkpoint.

        Raises:
            TypeError: for an object that cannot be saved, naming it.
        """
        return [
            {"held": rank.state_dict(), "random": states.packed()} for rank, states in zip(self._ranks, self._states)
        ]

    def load_hidden_state(self, state: list[dict[str, Any]]) -> None:
        for node, (rank, saved) in enumerate(zip(self._ranks, state)):
            rank.load_state_dict(saved["held"])
            self._states[node] = GlobalStates.unpacked(saved["random"])

    def rates(self, timetable: Any, tick: int, nodes: Sequence[int] | None = None) -> tuple[Any, Any]:
        return self._lr, None


_here = threading.local()  # .node and .meeting of the thread


class RankMeeting:
    """A meeting point of the nodes' threads. One runs at a time, node 0 first; the last one to arrive computes for all.

    Args:
        comm: the collectives to carry out.
        states: the states of the global random generators, one per node; updated when a node passes on its turn.
    """

    def __init__(self, comm: Collectives, states: list[GlobalStates]) -> None:
        self.comm = comm
        self.num_nodes = comm.num_nodes
        self.states = states
        self._turns = [threading.Semaphore(int(node == 0)) for node in range(self.num_nodes)]
        self._failed = False
        self._given: list[Any] = [None] * self.num_nodes
        self._result: Any = None

    def exchange(self, node: int, operation: str, value: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Stack the nodes' values, `[K, *]`, and return the result of `compute` on them."""
        what = f"{operation} of shape {list(value.shape)}"
        return self._meet(node, what, value.detach(), lambda given: compute(torch.stack(list(given))))

    def share(self, node: int, operation: str, value: Any) -> list[Any]:
        """Return every node's value, in node order, without a record in the ledger."""
        return self._meet(node, operation, value, list)

    def wait(self, node: int) -> None:
        """Wait for a turn."""
        self._turns[node].acquire()
        if self._failed:
            raise _AnotherFailed
        self.states[node].restore()

    def pass_on(self, node: int) -> None:
        """Give the turn to the next node."""
        self.states[node] = GlobalStates.now()
        self._turns[(node + 1) % self.num_nodes].release()

    def abort(self) -> None:
        """Release all threads: none must wait for one that has failed."""
        self._failed = True
        for turn in self._turns:
            turn.release()

    def _meet(self, node: int, operation: str, value: Any, compute: Callable[[Sequence[Any]], Any]) -> Any:
        self._given[node] = (operation, value)
        if node == self.num_nodes - 1:
            self._result = self._computed(compute)
        self.pass_on(node)
        self.wait(node)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def _computed(self, compute: Callable[[Sequence[Any]], Any]) -> Any:
        places: dict[str, int] = {}
        for node, (operation, _) in enumerate(self._given):
            places.setdefault(operation, node)
        if len(places) > 1:
            which = ", ".join(f"node {node} in {operation}" for operation, node in places.items())
            return RuntimeError(
                f"the nodes are not at the same place: {which}. Every node must call the same collectives in the "
                "same order."
            )
        try:
            return compute([x for _, x in self._given])
        except Exception as error:  # raised in every thread
            return error


class _AnotherFailed(Exception):
    """Ends a thread whose meeting another node's error has aborted."""


def run_ranks(work: Callable[[int], None], meeting: RankMeeting, threads: Executor) -> None:
    """Run `work(node)` for all nodes, in one thread each, taking turns; raise the first error of a node.

    The global random states are restored afterwards.
    """

    def run(node: int) -> BaseException | None:
        _here.meeting, _here.node = meeting, node
        try:
            meeting.wait(node)
            work(node)
            meeting.share(node, "the end of its work", None)  # none may still wait in a collective
            meeting.pass_on(node)
        except BaseException as error:
            meeting.abort()
            return error
        finally:
            del _here.meeting, _here.node
        return None

    before = GlobalStates.now()
    try:
        errors = list(threads.map(run, range(meeting.num_nodes)))
    finally:
        before.restore()
    for node, error in enumerate(errors):
        if error is not None and not isinstance(error, _AnotherFailed):
            raise RuntimeError(f"node {node}: {type(error).__name__}: {error}") from error


def here() -> tuple[RankMeeting, int]:
    """Return the meeting and the node of the calling thread."""
    if not is_rank():
        raise RuntimeError("all_reduce, broadcast and all_gather of a rank work inside Strategy.step() only.")
    return _here.meeting, _here.node


def is_rank() -> bool:
    """Whether this thread is a node's."""
    return hasattr(_here, "meeting")
