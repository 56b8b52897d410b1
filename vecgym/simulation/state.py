"""The state of a run, and the rows of an event: taken out on demand, and put back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecgym.collectives.ledger import Transfer
from vecgym.core import check, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree

Index = slice | Tensor | None  # some of the rows; None: all of them
Move = tuple[Tensor, Tensor, Tensor | None]  # a write that is due: to which tensor, from which, and to which rows


@dataclass(frozen=True)
class State:
    """The evolving part of a run, as a value: `vars(state)` is a checkpoint.

    A run that is not differentiated works in place: every tensor keeps its storage for the whole run.

    Attributes:
        tick: number of ticks done.
        own: each node's own state: nested dicts of tensors `[rows, *]`, by name.
        shared: the state that all nodes share, `[1, *]`.

    >>> State(0, own={"params": {"w": torch.zeros(4, 3)}}, shared={}).own["params"]["w"].shape
    torch.Size([4, 3])
    """

    tick: int
    own: dict[str, Any]
    shared: dict[str, Any]

    @property
    def step(self) -> int:
        """Number of ticks done."""
        return self.tick

    @property
    def home(self) -> dict[str, Any]:
        """The tree that holds the parameters, `shared` or `own`.

        >>> State(0, own={}, shared={"params": {}, "optimizer": {}}).home
        {'params': {}, 'optimizer': {}}
        """
        return self.shared if "params" in self.shared else self.own

    @property
    def params(self) -> Tree:
        """The parameters, `[1 or rows, *]`; with a server, the server's."""
        return self.home["params"]

    @property
    def buffers(self) -> Tree:
        """The model's buffers, `[1 or rows, *]`: those that change are each node's own."""
        return {**self.shared.get("buffers", {}), **self.own.get("buffers", {})}


NAMED = {"params": "parameters", "buffers": "buffers"}  # trees whose names are the model's


class StateView:
    """Some rows of trees stored by name: views of all rows and of consecutive rows, copies of others, made on demand.

    - `put_back` stores assigned trees, and removes deleted ones. Tensors may be overwritten, but must then be assigned.
    - A new name is 0 on the other rows.
    - A tree that is assigned to all rows replaces the old one.
    - A tree that is assigned to some rows keeps its other leaves.

    Args:
        whole: the trees `[rows, *]` by name; `put_back` writes to it.
        index: the rows; None: all.
        size: number of all rows.

    >>> whole = {"w": torch.tensor([1.0, 2.0, 3.0])}
    >>> rows = StateView(whole, torch.tensor([0, 2]), size=3)
    >>> rows["w"] = 10 * rows["w"]
    >>> put_back([rows], pure=False)
    >>> whole, "w" in rows, "v" in rows
    ({'w': tensor([10.,  2., 30.])}, True, False)
    """

    handler = "a handler"  # what assigns, for messages
    lead = 1  # dimensions before those of one row
    before: tuple[tuple[int, ...], ...] = ((),)  # those before the one of the rows

    def __init__(self, whole: dict[str, Any], index: Index, size: int) -> None:
        self.whole, self.index, self.size = whole, index, size
        self.num_rows = len(range(size)[index]) if isinstance(index, slice) else size if index is None else len(index)
        self.assigned: dict[str, Any] = {}
        self._taken: dict[str, Any] = {**whole} if index is None else {}
        self._shown = self._taken if self.lead == 1 else {}  # as handlers see them

    def __contains__(self, name: str) -> bool:
        return self.assigned.get(name, self.whole.get(name)) is not None

    def __getitem__(self, name: str) -> Any:
        held = self.assigned if name in self.assigned else self._shown
        value = held[name] if name in held else self.shown(name) if name in self.whole else None
        if value is None:
            raise KeyError(f"no {name!r} here; there are {sorted({*self.whole, *self.assigned})}")
        return value

    flat = __getitem__  # as engine and optimizer take a tree, `[rows, *]`

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name, value)
        self.assigned[name] = value

    def __delitem__(self, name: str) -> None:
        self.assigned[name] = None

    def _check(self, name: str, new: Any) -> None:
        """Raise an error for values of other rows, or of another form than the values that they replace."""
        todo = [(name, new, self.shown(name))]
        if new is None:
            raise TypeError(f"{self.handler} assigned None to {name!r}; expected tensors. To remove a name, use `del`.")
        if name in NAMED and isinstance(new, dict) and new.keys() != todo[0][2].keys():
            odd = ", ".join(sorted(map(str, new.keys() ^ todo[0][2].keys())))
            raise ValueError(f"{self.handler} assigned {NAMED[name]} with other names than the model's: {odd}.")
        for path, x, old in todo:
            if x is old:
                continue
            if isinstance(old, Tensor) or (isinstance(old, dict) and old):
                wanted, what = (Tensor, "a tensor") if isinstance(old, Tensor) else (dict, "a dict of tensors")
                if not isinstance(x, wanted):
                    raise TypeError(f"{self.handler} assigned {a_kind(x)} to {path!r}; expected {what}.")
            if isinstance(x, dict):
                todo += [(f"{path}.{key}", y, old.get(key) if isinstance(old, dict) else None) for key, y in x.items()]
            elif isinstance(x, Tensor):
                like = old if isinstance(old, Tensor) else x
                same = x.shape == like.shape and x.dtype == like.dtype and x.device == like.device
                if not (same and like is old) and not self._fits(x, like):
                    where = "" if x.device == like.device else f" on {like.device}"
                    form = f"{self._form(like.shape[self.lead :])} of {like.dtype}{where}"
                    raise ValueError(f"{self.handler} assigned {path!r} as {tree.form(x)}; expected {form}.")
            elif check.is_number(x):  # it would be the same for all nodes and configurations
                raise TypeError(f"{self.handler} assigned {x!r} to {path!r}; expected a tensor, such as [1, *].")

    def _fits(self, x: Tensor, like: Tensor) -> bool:
        """Whether a tensor may replace another one; if both are the same, whether it may be new."""
        lead, dim = self.lead, x.dim()
        if not dim == like.dim() >= lead or x.dtype != like.dtype or x.device != like.device:
            return False
        if x.shape[: lead - 1] not in self.before or x.shape[lead:] != like.shape[lead:]:
            return False
        if x.shape[lead - 1] in ((1, self.num_rows) if like is x else (1, self.num_rows, like.shape[lead - 1])):
            return True
        # A rollout with K initial parameters has K rows of shared state.
        return like is x and self.index is None and any(x.shape[:1] == y.shape[:1] for y in tree.leaves(self.whole))

    def _form(self, shape: Sequence[int]) -> str:
        rows = "1" if self.num_rows == 1 else f"{self.num_rows} or 1"
        return f"[{', '.join([rows, *map(str, shape)])}]"

    def forget(self) -> None:
        """Read all trees anew on the next access, since some were written to directly."""
        self._taken.clear()

    def of(self, name: str) -> StateView:
        """Return the rows that hold a name; see `SplitView`."""
        return self

    def put_flat(self, name: str, value: Any) -> None:
        """Assign a tree as engine and optimizer return it, `[1 or rows, *]`."""
        self.assigned[name] = value

    def changes(self) -> Iterable[tuple[str, Any]]:
        """Return the assigned trees, `[1 or rows, *]`, by name; None: deleted."""
        return self.assigned.items()

    def taken(self, name: str) -> Any:
        """Return a tree as it was when the event began, `[rows, *]`."""
        if name not in self._taken:
            value, index = self.whole.get(name, {}), self.index
            if index is not None:
                value = tree.map_leaves(
                    lambda x: x[placed(index, x.device) if isinstance(index, Tensor) else index], value
                )
            self._taken[name] = value
        return self._taken[name]

    shown = taken  # in the form in which it is shown to handlers


class Labelled:
    """The entries of rows whose names begin with a label, by the rest of the name.

    >>> rows = {"0.0/params": 1}
    >>> held = Labelled(rows, "0.0/")
    >>> held["outer"] = 2
    >>> held["params"], "params" in held, held.get("momentum"), rows
    (1, True, None, {'0.0/params': 1, '0.0/outer': 2})
    """

    def __init__(self, rows: Any, label: str) -> None:
        self.rows, self.label = rows, label

    def __contains__(self, name: str) -> bool:
        return self.label + name in self.rows

    def __getitem__(self, name: str) -> Any:
        return self.rows[self.label + name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.rows[self.label + name] = value

    def __delitem__(self, name: str) -> None:
        del self.rows[self.label + name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401


class GroupView(StateView):
    """Some rows of C configurations: trees are read and assigned as `[C, K or 1, *]`, as views of `[rows, *]`.

    Args:
        num_configs: C.
        num_rows: of each configuration.

    >>> whole = {"w": torch.tensor([1.0, 2.0, 10.0, 20.0])}
    >>> rows = GroupView(whole, None, 4, num_configs=2, num_rows=2)
    >>> rows["w"]
    tensor([[ 1.,  2.],
            [10., 20.]])
    >>> rows["w"] = rows["w"].mean(1, keepdim=True)
    >>> put_back([rows], pure=False)
    >>> whole["w"]
    tensor([ 1.5000,  1.5000, 15.0000, 15.0000])
    """

    lead = 2

    def __init__(self, whole: dict[str, Any], index: Index, size: int, num_configs: int, num_rows: int) -> None:
        super().__init__(whole, index, size)
        self.num_configs, self.num_rows, self.before = num_configs, num_rows, ((1,), (num_configs,))
        self._apart_of: dict[int, Tensor] = {}  # by the id of a tensor that was taken or put: as it is shown
        self._flat_of: dict[int, Tensor] = {}  # the inverse, so that nothing is copied onto itself

    def _form(self, shape: Sequence[int]) -> str:
        return f"[{self.num_configs}, {super()._form(shape)[1:]}"

    def shown(self, name: str) -> Any:
        return tree.map_leaves(self._apart, self.taken(name))

    def flat(self, name: str) -> Any:
        return tree.map_leaves(self._flat, self.assigned[name]) if name in self.assigned else self.taken(name)

    def put_flat(self, name: str, value: Any) -> None:
        self.assigned[name] = tree.map_leaves(self._apart, value)

    def changes(self) -> Iterable[tuple[str, Any]]:
        return tree.map_leaves(self._flat, self.assigned).items()

    def _apart(self, x: Tensor) -> Tensor:
        """Return `[rows, *]` as `[C, K, *]`."""
        if id(x) not in self._apart_of:
            self._apart_of[id(x)] = view = x.unflatten(0, (self.num_configs, -1))
            self._flat_of[id(view)] = x
        return self._apart_of[id(x)]

    def _flat(self, x: Tensor) -> Tensor:
        """Return a tensor `[1 or C, K or 1, *]` as `[rows, *]`."""
        if id(x) in self._flat_of:
            return self._flat_of[id(x)]
        if x.dim() < 2 or len(x) not in (1, self.num_configs):
            raise ValueError(
                f"{tree.form(x)} was assigned to a group of {self.num_configs} configurations: give "
                f"[{self.num_configs}, {self.num_rows} or 1, *]."
            )
        return x.expand(self.num_configs, self.num_rows if x.shape[1] == 1 else -1, *x.shape[2:]).flatten(0, 1)


class SplitView:
    """The rows of a group, if all groups have some trees in common: each name is in one of two views.

    Args:
        common: the rows of trees of all groups.
        names: the names of these trees.
        others: the rows of the group's own trees.

    >>> common = StateView({"w": torch.zeros(3)}, slice(1, 3), 3)
    >>> own = SplitView(common, {"w"}, StateView({"v": torch.ones(2)}, None, 2))
    >>> own["w"].shape, own["v"].shape, "u" in own
    (torch.Size([2]), torch.Size([2]), False)
    """

    def __init__(self, common: StateView, names: Collection[str], others: StateView) -> None:
        self.common, self.names, self.others = common, names, others

    @property
    def handler(self) -> str:
        """The handler that assigns, for messages."""
        return self.common.handler

    @handler.setter
    def handler(self, name: str) -> None:
        self.common.handler = self.others.handler = name

    def of(self, name: str) -> StateView:
        """Return the rows that hold a name."""
        return self.common if name in self.names else self.others

    def __contains__(self, name: str) -> bool:
        return name in self.of(name)

    def __getitem__(self, name: str) -> Any:
        return self.of(name)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.of(name)[name] = value

    def __delitem__(self, name: str) -> None:
        del self.of(name)[name]

    def flat(self, name: str) -> Any:
        """Return a tree as engine and optimizer take it, `[rows, *]`."""
        return self.of(name).flat(name)

    def put_flat(self, name: str, value: Any) -> None:
        """Assign a tree as engine and optimizer return it, `[1 or rows, *]`."""
        self.of(name).put_flat(name, value)


def put_back(parts: list[StateView], *, pure: bool) -> None:
    """Store the assigned values in the trees.

    In place, unless `pure`: each tensor keeps its storage and is written to, and an assigned tensor that is already in
    the tree is not copied. A tensor that is both read and written is cloned first, so that names never share memory.
    """
    moves: list[Move] = []
    for rows in parts:
        for name, new in rows.changes():
            if new is None:
                rows.whole.pop(name, None)
            else:
                rows.whole[name] = _put(rows, rows.whole.get(name), new, rows.taken(name), pure, moves)
    if not moves:
        return
    targets, new, _ = zip(*moves)
    written = set(tree.places(targets))
    sources = [x.clone() if place in written else x for x, place in zip(new, tree.places(new))]
    for (target, _, index), source in zip(moves, sources):
        target.copy_(source) if index is None else target.index_copy_(0, placed(index, target.device), source)


def _put(rows: StateView, whole: Any, new: Any, old: Any, pure: bool, moves: list[Move]) -> Any:
    """Return the whole tree with the new rows; append to `moves` what is to be copied into it."""
    gathered = isinstance(rows.index, Tensor)
    if new is old and not gathered:  # these are the state's own tensors, as below
        return whole
    if isinstance(new, dict):
        whole, old = whole or {}, old or {}
        put = {} if rows.index is None else {**whole}
        for name, x in new.items():
            same = x is old.get(name) and not gathered
            put[name] = whole.get(name) if same else _put(rows, whole.get(name), x, old.get(name), pure, moves)
        return put
    if not isinstance(new, Tensor):
        return new
    same = isinstance(whole, Tensor) and whole.shape[1:] == new.shape[1:] and whole.dtype == new.dtype
    if whole is not None and rows.index is not None and not (same and new.shape[0] in (1, old.shape[0])):
        form = f"{tree.form(old)}" if isinstance(old, Tensor) else f"a {type(old).__name__}"
        raise ValueError(f"{tree.form(new)} was assigned in place of {form}: these rows need the same form, or [1, *].")
    if not same:
        return _new_name(rows, new)
    if rows.index is None and new.shape[0] not in (1, whole.shape[0]):
        return new.clone()
    wide = new if new.shape == old.shape else new.expand(old.shape)
    if pure:
        index = _indices(rows)
        return wide if index is None else whole.index_copy(0, placed(index, wide.device), wide)
    moves.append((whole, wide, rows.index) if isinstance(rows.index, Tensor) else (old, wide, None))
    return whole


def _new_name(rows: StateView, new: Tensor) -> Tensor:
    """Return a tensor of all rows that is 0 except on these."""
    index = _indices(rows)
    if index is None:
        return new.expand(max(len(new), rows.size), *new.shape[1:]).clone()
    wide = new.expand(len(index), *new.shape[1:])
    return new.new_zeros((rows.size, *new.shape[1:])).index_copy(0, placed(index, new.device), wide)


def _indices(rows: StateView) -> Tensor | None:
    """Return the indices of the rows; None: all."""
    return torch.arange(rows.size)[rows.index] if isinstance(rows.index, slice) else rows.index


def check_values(
    new: Any, old: Tree, num_rows: int, who: object, hook: str = "", what: str = "values", lead: int = 1
) -> Tree:
    """Return the values of a user's code, if they have the names and shapes of the given ones, or `[.., 1, *]`.

    Args:
        new, old: the returned and the given values.
        num_rows: the number of nodes here.
        who, hook: the user's code, for messages: the `repr` of an object, and the name of its method, ".mine".
        what: a word for the values, for messages.
        lead: dimensions before those of a parameter.

    >>> check_values({}, {"w": torch.zeros(2, 3)}, 2, int)
    Traceback (most recent call last):
    ...
    ValueError: <class 'int'> returned values without w; expected the names it was given: w.
    """
    if new is old:
        return old
    if not isinstance(new, dict):
        raise TypeError(f"{who!r}{hook} returned {a_kind(new)} as {what}; expected a dict, name -> tensor.")
    if new.keys() != old.keys():
        odd = "without" if (missing := old.keys() - new.keys()) else "with unknown"
        names = ", ".join(sorted(map(str, missing or new.keys() - old.keys())))
        raise ValueError(
            f"{who!r}{hook} returned {what} {odd} {names}; expected the names it was given: {', '.join(old)}."
        )
    for name, x in new.items():
        y = old[name]
        if x is y:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{who!r}{hook} returned {a_kind(x)} for {name!r} of the {what}; expected tensors.")
        if x.shape[lead:] != y.shape[lead:] or x.dim() != y.dim() or x.shape[lead - 1] not in (1, num_rows):
            shape = [f"1 or {num_rows}" if num_rows > 1 else "1", *map(str, y.shape[lead:])]
            raise ValueError(
                f"{who!r}{hook} returned {name!r} of the {what} in shape {list(x.shape)}; expected "
                f"[{', '.join(shape)}]: the nodes first, or 1 for what is the same on all."
            )
    return new


def a_kind(value: Any) -> str:
    """Describe a value that a user's code has returned, for a message.

    >>> a_kind(None), a_kind([])
    ('None', 'a list')
    """
    return "None" if value is None else f"a {type(value).__name__}"


class Result(NamedTuple):
    """The run's model: the mean of parameters and buffers over its members.

    Attributes:
        params: `[1 or L, *]`; see `vecgym.strategy.Strategy.result`.
        members: the nodes whose parameters are averaged, ascending; None: all.
        trained: the nodes whose buffers are averaged, if these are not the members.

    >>> Result({}).members is None, Result({}, (0, 2)).of_buffers, Result({}, (0, 2), (0, 1)).of_buffers
    (True, (0, 2), (0, 1))
    >>> Result({}, (0, 2), (0, 1)).of_local
    (0,)
    """

    params: Tree
    members: tuple[int, ...] | None = None
    trained: tuple[int, ...] | None = None

    @property
    def of_buffers(self) -> tuple[int, ...] | None:
        """The nodes whose buffers are averaged for the run's model; None: all."""
        return self.members if self.trained is None else self.trained

    @property
    def of_local(self) -> tuple[int, ...] | None:
        """The members that have trained, whose own models `val_loss_local` evaluates; None: all nodes."""
        if self.members is None or self.trained is None:
            return self.of_buffers
        trained = set(self.trained)
        return tuple(node for node in self.members if node in trained) or self.members


class Metrics(NamedTuple):
    """The measurements of a step.

    >>> import torch
    >>> Metrics(losses=torch.tensor([1.0, 3.0]), lr=0.1).losses.mean()
    tensor(2.)
    """

    losses: Tensor  # [L], before the update; nan where a node did not train
    lr: float | Tensor
    active: list[int] | None = None  # the nodes that trained; None: all
    outer_lr: float | Tensor | None = None  # of the strategy's outer optimizer, if it has one
    transfers: tuple[Transfer, ...] = ()  # of the step, in order
