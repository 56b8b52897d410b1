"""Files of runs: write them, read them, and load the models of a finished run with `vecgym.load`.

A file is written by `torch.save` and consists of nested dicts of tensors and plain values, so that
`torch.load(weights_only=True)` reads it without executing anything. Reading checks the CRC of every record, which torch
itself does not. The reader specifies the required names and types, and a run that resumes compares dtypes and shapes.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.collectives.ledger import Ledger
from vecgym.core import check as checks
from vecgym.core import nodes, tree
from vecgym.core.check import kind_of
from vecgym.core.errors import Damaged
from vecgym.core.files import write_atomically
from vecgym.core.nodes import Nodes
from vecgym.core.tree import Tree
from vecgym.records.history import History
from vecgym.records.rows import counted

FORMAT = "vecgym"
VERSION = 3  # of the contents; readers reject all others
FORM: dict[str, Any] = {  # what `load` requires
    "step": int,
    "num_nodes": int,
    "settings": dict,
    "rows": {"length": int, "columns": dict},
    "models": {"params": dict, "buffers": dict, "keys": dict, "extra": dict},
}


@dataclass(frozen=True)
class Saved:
    """The models in a file of `trainer.save` or a checkpoint, with the run's history and settings.

    Attributes:
        step: optimizer steps done.
        num_nodes: K.
        history: see `vecgym.records.history`.
        settings: the arguments of the run, and what was chosen automatically.
        params, buffers: of every node, `[K, *]`, or `[1, *]` if all nodes have the same.
        ledger: what was sent; empty in a file of an earlier version.
        clock: the network and compute of the run as plain values, of an asynchronous one its first bars; may be empty.

    >>> params = {"w": torch.tensor([1.0, 3.0])}
    >>> saved = Saved(10, 2, History(), settings={}, params=params, buffers={}, keys={"w": "w"}, extra={})
    >>> saved, saved.average, saved.node(1)
    (Saved(2 nodes after step 10, 0 rows), {'w': tensor(2.)}, {'w': tensor(3.)})
    """

    step: int
    num_nodes: int
    history: History
    settings: dict[str, Any]
    params: Tree
    buffers: Tree
    keys: dict[str, str]  # key of the state_dict -> name of the parameter or buffer; tied ones have several keys
    extra: dict[str, Any]  # everything else in the state_dict
    averaged: Tree | None = None  # the average, if it is not that of all nodes
    ledger: Ledger = field(default_factory=Ledger)
    clock: dict[str, Any] = field(default_factory=dict)

    @property
    def average(self) -> dict[str, Any]:
        """The run's model, for `model.load_state_dict`: what `fit` returned, the average of the nodes present.

        In an asynchronous run, the server's model. Integers are those of the first node.
        """
        return self._state_dict(self.averaged or nodes.mean({**self.params, **self.buffers}))

    def node(self, node: int) -> dict[str, Any]:
        """Return one node's model, for `model.load_state_dict`."""
        node = checks.index("node", node, self.num_nodes)
        values = {**self.params, **self.buffers}
        return self._state_dict({name: x[node if len(x) > 1 else 0].clone() for name, x in values.items()})

    def __post_init__(self) -> None:
        """Raise an error unless the average and the nodes' models can be formed."""
        values = {**self.params, **self.buffers}
        for name, x in values.items():
            if not isinstance(x, Tensor) or x.dim() == 0 or len(x) not in (1, self.num_nodes):
                raise TypeError(f"{name} is not a tensor with a row for each of {self.num_nodes} nodes, or one")
        self._state_dict(values)
        if self.averaged is not None:
            self._state_dict(self.averaged)

    def _state_dict(self, values: Tree) -> dict[str, Any]:
        return {**{key: values[name] for key, name in self.keys.items()}, **self.extra}

    def __repr__(self) -> str:
        return f"Saved({counted(self.num_nodes, 'node')} after step {self.step}, {counted(len(self.history), 'row')})"


def load(path: str | os.PathLike[str]) -> Saved:
    """Load a file of `trainer.save`, or a checkpoint: the average of the nodes, each node's model, the history.

    From a folder of checkpoints, a run's `save_dir`, load the newest one.

    The classes of the script that saved it are not needed, and nothing is executed. Tensors are on the CPU.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is damaged or was not written by vecgym.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from torch import nn
    >>> from vecgym import Trainer
    >>> from vecgym.strategy import FedAvgStrategy
    >>> class Line(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x).square().mean()
    >>> model = Line(1, 1)
    >>> trainer = Trainer(model, torch.arange(8.0)[:, None])
    >>> averaged = trainer.fit(FedAvgStrategy("sgd", lr=0.01), num_nodes=2, batch_size=2, max_steps=2, progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trainer.save(os.path.join(folder, "run.pt"))
    ...     saved = load(os.path.join(folder, "run.pt"))
    >>> model.load_state_dict(saved.average), torch.equal(saved.node(1)["weight"], trainer.nodes.params["weight"][1])
    (<All keys matched successfully>, True)
    >>> saved.step, saved.num_nodes, saved.history["step"]
    (2, 2, [1, 2])
    """
    path = checks.path("path", path)
    path = [path, *checkpoints_in(path)][-1]
    contents = read(path, FORM)
    with naming(path):
        history, ledger = History(contents["settings"], unpacked_rows(contents["rows"])), Ledger()
        if "ledger" in contents:
            ledger.load(contents["ledger"])
        more = {"ledger": ledger, "clock": contents.get("clock", {})}
        return Saved(
            contents["step"], contents["num_nodes"], history, contents["settings"], **contents["models"], **more
        )


def record(saved: Nodes[Any], step: int, history: History, ledger: Ledger, clock: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents for `load`: all nodes' parameters, including frozen ones, and buffers, `[1 or K, *]`."""
    model, params, buffers = saved.model, saved.params, saved.buffers
    is_mean_of_all = saved.members is None and saved.result is None and saved.trained is None
    names = {id(x): name for name, x in [*model.named_parameters(), *model.named_buffers()]}
    state_dict = model.state_dict(keep_vars=True)
    return {
        "step": step,
        "num_nodes": len(saved),
        "settings": {name: _readable(value) for name, value in history.settings.items()},
        "rows": packed_rows(history.rows),
        "ledger": ledger.state(),
        "clock": plain(dict(clock), "clock"),
        "models": {
            "params": {name: compact(params[name]) for name, _ in model.named_parameters()},
            "buffers": {name: compact(buffers[name]) for name, _ in model.named_buffers()},
            "keys": {key: names[id(x)] for key, x in state_dict.items() if id(x) in names},
            "extra": {key: plain(x, key) for key, x in state_dict.items() if id(x) not in names},
            "averaged": None if is_mean_of_all else tree.map(compact, saved.averaged),
        },
    }


# --------------------------------------------------------------------------------------------------- files


def checkpoints_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in a folder, intact or not, in the order of steps. Only regular files count."""
    paths = [path for path in Path(folder).glob("step-*.pt") if re.fullmatch(r"step-[0-9]+\.pt", path.name)]
    return sorted(filter(os.path.isfile, paths), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the number of steps done when a checkpoint was written."""
    return int(checkpoint.stem.removeprefix("step-"))


def write(path: str | os.PathLike[str], contents: Mapping[str, Any]) -> None:
    """Write nested dicts and lists of tensors and plain values. The file appears complete or not at all.

    Raises:
        OSError: if it cannot be written; an existing file at `path` remains.
    """
    marked = plain({**contents, "format": FORMAT, "version": VERSION}, "file")
    with write_atomically(path) as file:
        try:
            torch.save(marked, file)
        except RuntimeError as error:  # torch's writer hides the error of a failed write behind one of its own
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, (OSError, KeyboardInterrupt)):
                cause = cause.__context__
            raise cause or error from None


def read(path: str | os.PathLike[str], required: Mapping[str, Any] | None = None, mmap: bool = False) -> dict[str, Any]:
    """Read a file of `write`, with its tensors on the CPU.

    Args:
        required: the contents: names -> types, nested like the contents.
        mmap: keep a tensor in the file until it is used; the checksums are not verified.

    Raises:
        FileNotFoundError: if there is no such file.
        Damaged: if the file is damaged, was not written by vecgym, or has another version.
    """
    path = checks.path("path", path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}.")
    if not os.path.isfile(path):
        what = "folder without checkpoints; fit(save_dir=) writes them" if path.is_dir() else "pipe, socket or device"
        raise Damaged(f"{path} is not a file, but a {what}.")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = None if mmap else archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of its record {damaged} is wrong")
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # damage causes many kinds of errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Damaged(f"{path} is damaged, or not a file of vecgym: {reason}") from error
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise Damaged(f"{path} is not a file of vecgym, although torch can read it.")
    version = contents.get("version")
    if type(version) is not int or version != VERSION:
        raise Damaged(
            f"{path} has version {version!r}, but this vecgym reads version {VERSION}: use the vecgym that wrote it."
        )
    with naming(path):
        wrong = difference(contents, required or {})
    if wrong:
        raise Damaged(f"{path} does not have the contents that vecgym writes: {wrong}.")
    return contents


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors about the contents of a file into a `Damaged` that names the file.

    >>> with naming("run.pt"):
    ...     {"step": 3}["rows"]
    Traceback (most recent call last):
    ...
    vecgym.core.errors.Damaged: run.pt does not have the contents that vecgym writes: KeyError('rows')
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Damaged(f"{path} does not have the contents that vecgym writes: {error!r}") from error


def difference(value: Any, required: Any, where: str = "") -> str:
    """Describe the first of the required contents that is missing, or of another type; "" if there is none.

    Args:
        required: names -> types, nested like the contents; `int` stands for any >= 0.

    >>> difference({"step": -1, "rows": {}}, {"step": int, "rows": dict})
    "['step'] is of type int, -1"
    """
    if isinstance(required, dict) and isinstance(value, dict):
        for name, kind in required.items():
            place = f"{where}[{name!r}]"
            if wrong := difference(value[name], kind, place) if name in value else f"there is no {place}":
                return wrong
        return ""
    kind = dict if isinstance(required, dict) else required
    is_count = kind is not int or (checks.is_integer(value) and value >= 0)
    return "" if isinstance(value, kind) and is_count else f"{where} is {kind_of(value)}, {value!r:.40}"


# -------------------------------------------------------------------------------------------------- contents


def compact(x: Tensor) -> Tensor:
    """Move a tensor to the CPU, without surplus storage; keep one row of an expanded node dimension."""
    x = x.detach()
    if x.dim() > 0 and len(x) > 1 and x.stride(0) == 0 and x.numel():
        x = x[:1]
    x = x.cpu()
    return x.clone() if x.untyped_storage().nbytes() > x.numel() * x.element_size() else x


def plain(value: Any, where: str) -> Any:
    """Convert `value` to plain values and tensors, which a file can hold; `where` names it in an error."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # and subclasses, such as the class of torch.__version__
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, np.ndarray):
        return {"ndarray": torch.from_numpy(value.copy())}
    if isinstance(value, Tensor):
        return compact(value)
    if isinstance(value, dict):
        return {key: plain(x, f"{where}[{key!r}]") for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(x, f"{where}[{i}]") for i, x in enumerate(value))
    raise TypeError(
        f"{where} is of type {type(value).__name__}, which cannot be saved: give tensors, numbers, strings, None, or "
        "lists, tuples and dicts of them."
    )


def restored(value: Any) -> Any:
    """Invert `plain`."""
    if isinstance(value, dict):
        if value.keys() == {"ndarray"}:
            return value["ndarray"].numpy()
        return {key: restored(x) for key, x in value.items()}
    return type(value)(map(restored, value)) if isinstance(value, (list, tuple)) else value


def packed_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pack the rows of a history by columns: as one tensor if all values are numbers or arrays of one kind.

    >>> rows = [{"step": 0}, {"step": 1, "loss": 0.5, "losses": np.ones(2)}]
    >>> unpacked_rows(packed_rows(rows))
    [{'step': 0}, {'step': 1, 'loss': 0.5, 'losses': array([1., 1.])}]
    """
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        index = [i for i, row in enumerate(rows) if name in row]
        columns[name] = {"rows": torch.tensor(index), **_packed([rows[i][name] for i in index], name)}
    return {"length": len(rows), "columns": columns}


def unpacked_rows(contents: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Invert `packed_rows`."""
    rows: list[dict[str, Any]] = [{} for _ in range(contents["length"])]
    for name, column in contents["columns"].items():
        unpacked = {"arrays": lambda x: list(x.numpy()), "numbers": Tensor.tolist, "values": restored}[column["kind"]]
        for i, value in zip(column["rows"].tolist(), unpacked(column["values"])):
            rows[i][name] = value
    return rows


def _packed(values: list[Any], name: str) -> dict[str, Any]:
    first = values[0]
    if all(type(x) is int and abs(x) < 2**63 for x in values):
        return {"kind": "numbers", "values": torch.tensor(values, dtype=torch.int64)}
    if all(isinstance(x, float) for x in values):
        return {"kind": "numbers", "values": torch.tensor(values, dtype=torch.float64)}
    is_uniform = all(isinstance(x, np.ndarray) and (x.dtype, x.shape) == (first.dtype, first.shape) for x in values)
    if is_uniform and first.dtype.kind in "biuf":
        return {"kind": "arrays", "values": torch.from_numpy(np.stack(values))}
    return {"kind": "values", "values": plain(values, f"history[{name!r}]")}


def _readable(value: Any) -> Any:
    """Return a setting as a plain value if possible, otherwise as text."""
    try:
        return plain(value, "")
    except TypeError:
        return str(value)
