"""Checkpoints: save a run from time to time, and resume it as if it had never stopped.

A checkpoint holds everything that evolves: the simulation's state of all nodes, the ledger, the history, the states of
the global random generators. Batches and a model's own random numbers are functions of (seed, step, node), so the step
determines them. The inputs of a run (model, data, strategy, settings) are not saved: pass them again, and they are
checked. All processes of a run must be able to read the folder; the first of them writes.

A run resumes only from checkpoints that have the same `Identity`. It compares:

- Settings: numbers, strings and tensors by value, functions and classes by qualified name, other objects by class and
  attributes, or by `repr`. Learning rates at some steps show what schedules compute.
- The model: its modules, the shapes and dtypes of its parameters and buffers, and the loss of node 0's first batch, by
  the plain module in eval mode. A checkpoint holds that loss at its own parameters, so any initialisation resumes.
- The data: the number of examples, and a digest of the first batch.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import math
import re
import secrets
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from vecgym.clock import Compute, Network
from vecgym.clock.asynchronous import AsyncPlan
from vecgym.clock.trace import MAX_NODES, MAX_STEPS
from vecgym.core import rng, tree
from vecgym.core.devices import placed_as
from vecgym.core.errors import Damaged, warn
from vecgym.core.files import Lock, remove_partial
from vecgym.core.nodes import LOSS_FN, Nodes, widened
from vecgym.core.objects import GENERATORS, PLAIN
from vecgym.core.rng import GlobalStates
from vecgym.core.tree import Tree
from vecgym.data import Batches
from vecgym.engine import Engine
from vecgym.records import runfile
from vecgym.records.runfile import checkpoints_in, step_of
from vecgym.runs.multiprocess import Session
from vecgym.runs.options import FitOptions
from vecgym.runs.recorder import Recorder
from vecgym.simulation import Simulation, State
from vecgym.strategy import Strategy

NAME = "step-{:09d}.pt"
OF_SCHEDULES = (
    'a schedule such as "cosine" is laid out over max_steps: give it a length of its own from the first run on, '
    "lr_scheduler=vecgym.optim.schedule.lambda_cosine(max_steps=1000, cosine_anneal=True), or all max_steps, and stop="
)
LOCK = ".run.lock"  # exists while a run is in progress
FORM: dict[str, Any] = {
    **runfile.FORM,
    "identity": dict,
    "arithmetic": dict,
    "learning_rates": dict,
    "loss": float,
    "state": {"own": dict, "shared": dict, "home": str},
    "ranks": object,
    "ledger": {"kinds": list, "kind_of_entry": Tensor, "step_of_entry": Tensor, "total_bytes": int | float},
    "recorder": {"examples": int, "seconds": int | float},
    "random": list,
}


class Checkpointer:
    """Save a run from time to time, remove old files, and restore the newest. Without a folder nothing is saved.

    A failed write (on a full disk) warns; the run continues, and earlier checkpoints stay.

    Attributes:
        last: the newest checkpoint from which this run can resume; at the start, the one that it does resume from.
        run_id: identifies the run elsewhere, such as in wandb; a resumed run keeps it. "": nothing is saved.
    """

    def __init__(self, options: FitOptions, simulation: Simulation, recorder: Recorder, session: Session) -> None:
        self.options = options
        self.folder = None if options.save_dir is None else Path(options.save_dir)
        self.simulation = simulation
        self.recorder = recorder
        self.session = session
        self.last: Path | None = None
        self.run_id = ""
        self._random: GlobalStates | None = None  # of the checkpoint that the run resumes from
        self._lock = contextlib.ExitStack()  # of the folder, while it is locked

    def start(self) -> State:
        """Take the folder, and return the state to begin with: of the newest intact checkpoint, or the initial one."""
        if self.folder is None and self.options.resume is False:
            return self.simulation.init()
        self.session.first(self._take_folder)
        try:
            self._identity = Identity(self.options, self.simulation, self.recorder.data, self.session)
            state = self.simulation.init()
            if self.options.resume is not False:
                state = self._load(state)
            self.session.first(self._check_folder)
            self.run_id = self.session.first(self._make_run_id)
        except BaseException:
            self.close()
            raise
        return state

    def close(self) -> None:
        """Release the folder for other runs."""
        self._lock.close()

    def begin(self) -> None:
        """Set the global random generators, just before the first step."""
        if self._random is not None:
            self._random.restore()

    def save_if_due(self, state: State, last: bool) -> None:
        """Save at the start, every `checkpoint_interval` steps, and at the end, even of an interrupted run."""
        interval = self.options.checkpoint_interval
        due = state.step == 0 or last or (interval is not None and state.step % interval == 0)
        if self.folder is None or not due:
            return
        self.recorder.flush()
        contents = self._snapshot(state)
        if contents is None:
            return
        path = self.folder / NAME.format(state.step)
        try:
            runfile.write(path, {**contents, **self._identity.record(state)})
        except OSError as error:
            newest = f"the newest checkpoint is {self.last}" if self.last else "this run has no checkpoint"
            warn(f"{path} could not be written: {error}. The run continues; {newest}.")
            return
        self.last = path
        self._remove_old(state.step)

    def _load(self, initial: State) -> State:
        """Restore the newest checkpoint that all processes can read; if the folder has none, return `initial`."""
        paths = self.session.first(self._candidates)
        for path in paths:
            damage = ""
            try:
                contents = self._read(path)
                self._identity.check(contents, path)
                with runfile.naming(path):
                    state = self._restore(contents, initial)
            except Damaged as error:
                damage = str(error)
            damages = [*filter(None, self.session.each(damage))]
            if not damages:
                self._identity.check_loss(contents, state, path)
                self.last, saved_id = path, str(contents["settings"].get("run_id"))
                self.run_id = saved_id if re.fullmatch("[0-9a-f]{16}", saved_id) else ""
                return state
            if path == paths[-1]:
                newer = ", and so are the newer checkpoints" if len(paths) > 1 else ""
                raise Damaged(f"{damages[0].rstrip('.')}{newer}. Give resume=False and another save_dir.")
            if self.session.rank == 0:
                warn(f"{damages[0].rstrip('.')}. Trying the next older checkpoint.")
        return initial

    def _candidates(self) -> list[Path]:
        """Return the checkpoints to resume from, the newest first."""
        resume = self.options.resume
        source = self.folder if isinstance(resume, bool) else Path(resume).absolute()
        assert source is not None
        if not source.is_dir():
            return [source]
        paths = checkpoints_in(source)[::-1]
        if not paths and resume is not True:
            raise ValueError(f"resume={str(resume)!r}: this folder has no checkpoint.")
        return paths

    def _read(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint. One of several processes reads only what it uses, once the first has read all of it."""
        several = self.session.num_processes > 1
        if several:
            self.session.first(lambda: bool(runfile.read(path, FORM)))  # a map would not show that a part is too short
        return runfile.read(path, FORM, mmap=several)

    def _take_folder(self) -> None:
        """Lock the folder until the run ends: two runs at a time would mix their checkpoints."""
        if self.folder is None:
            return
        lock = Lock(self.folder / LOCK)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            holder = lock.take()
        except OSError as error:
            raise ValueError(f"save_dir={str(self.folder)!r} cannot be written to: {error}") from None
        if holder is not None:
            raise ValueError(
                f"save_dir={str(self.folder)!r} is in use by another run: {holder} writes its checkpoints there. Give "
                "another save_dir, or wait until that run has ended."
            )
        self._lock.callback(lock.release)

    def _check_folder(self) -> None:
        """Check, before the first step, that the folder holds no other run's checkpoints."""
        if self.folder is None:
            return
        present = checkpoints_in(self.folder)
        if self.last is not None and self.last.parent == self.folder:
            # Those that resume=True skipped are unreadable, and are overwritten when the run gets there.
            present = [p for p in present if step_of(p) > step_of(self.last) and self.options.resume is not True]
        if present:
            raise ValueError(
                f"save_dir={str(self.folder)!r} already has checkpoints, up to {present[-1].name}, which would be "
                "mixed with those of this run. Fix: resume=True to resume from them, another save_dir, or remove them."
            )
        remove_partial(self.folder, "step*")

    def _make_run_id(self) -> str:
        elsewhere = self.folder is not None and self.last is not None and self.last.parent != self.folder
        return self.run_id if self.run_id and not elsewhere else secrets.token_hex(8)

    def _remove_old(self, step: int) -> None:
        """Remove old checkpoints, but none that is newer than the one just written, which is known to be intact."""
        older = [path for path in checkpoints_in(self.folder or "") if step_of(path) <= step]
        for path in older[: -self.options.keep_checkpoints]:
            with contextlib.suppress(OSError):
                path.unlink()

    # What a checkpoint holds.

    def _snapshot(self, state: State) -> dict[str, Any] | None:
        """Return everything that evolves, to be saved; None except in the first process. All processes call this."""
        result = self.simulation.result(state)
        own = None if result.params is state.params else result.params
        models = {"params": state.params, "buffers": state.buffers}  # which have their own place in a file
        others = {kind: {name: x for name, x in values.items() if name not in models}
                  for kind, values in (("own", state.own), ("shared", state.shared))}  # fmt: skip
        models = models if state.tick else tree.map_leaves(lambda x: x[:1], models)  # all nodes begin alike
        local = {**models, "result": own, **others}
        everyone = self.session.gathered(local)
        random_states = self.session.each(GlobalStates.now().packed())
        if everyone is None:
            return None
        everyone["own"] = widened(everyone.get("own", {}), self.simulation.comm.num_nodes)
        params = {**everyone.pop("params"), **self._frozen()}
        buffers, own, num_nodes = everyone.pop("buffers"), everyone.pop("result"), self.simulation.comm.num_nodes
        saved = Nodes(self.simulation.engine.model, num_nodes, params, buffers, result.members, own, result.trained)
        clock = clock_of(self.recorder.options, self.simulation)
        return {
            **runfile.record(saved, state.step, self.recorder.history, self.recorder.ledger, clock),
            "state": {**everyone, "home": "shared" if state.home is state.shared else "own", **self._pending(state)},
            "ranks": self.simulation.algorithm.hidden_state(),
            "recorder": self.recorder.state(),
            "random": random_states,
        }

    def _restore(self, contents: Mapping[str, Any], template: State) -> State:
        """Resume from a snapshot: restore everything but the random generators, which are set last."""
        comm, engine = self.simulation.comm, self.simulation.engine
        models = contents["models"]
        expected = {"params": {**template.params, **self._frozen()}, "buffers": template.buffers}
        expected = tree.map_leaves(lambda x: x[:1], expected)  # any number of nodes may be in this process
        _check_alike({kind: models[kind] for kind in expected}, expected, comm.num_nodes)
        trained = {name: models["params"][name] for name in template.params}
        saved = runfile.restored({"models": {"params": trained, "buffers": models["buffers"]}, **contents["state"]})
        saved = placed_as(self.session.rows_here(saved), vars(template), engine.device)
        state = _with_models(saved, template, len(comm.node_ids))
        # At the start an optimizer may hold less. Its "numbers" are Python numbers, and may become floats.
        optimizer, started = (x.home.get("optimizer", {}) for x in (state, template))
        started = {slot: x for slot, x in started.items() if slot != "numbers"}
        _check_alike({"optimizer": optimizer}, {"optimizer": started}, len(comm.node_ids), more=True)
        states, rank = runfile.restored(contents["random"]), self.session.rank
        self._random = GlobalStates.unpacked(states[rank] if len(states) == self.session.num_processes else states[0])
        rows = runfile.unpacked_rows(contents["rows"])
        self.recorder.ledger.load(contents["ledger"])
        if contents["ranks"] is not None:
            self.simulation.algorithm.load_hidden_state(runfile.restored(contents["ranks"]))
        for name, p in engine.frozen.items():
            p.copy_(models["params"][name][0])
        self.recorder.load(contents["recorder"], rows)
        if "pending" in saved:
            self.simulation.timetable.resume(contents["step"], saved["pending"])
        return replace(state, tick=contents["step"])

    def _pending(self, state: State) -> dict[str, list[int]]:
        """Return the nodes that have begun and are not computed: from here on a longer run has another timetable."""
        timetable = self.simulation.timetable
        return {"pending": list(timetable.pending(state.tick))} if hasattr(timetable, "pending") else {}

    def _frozen(self) -> dict[str, Tensor]:
        return {name: p[None] for name, p in self.simulation.engine.frozen.items()}


def clock_of(options: FitOptions, simulation: Simulation | None) -> dict[str, Any]:
    """Return what a file says of a run's time, as plain values: the network and compute, with which the ledger can be
    priced; of an asynchronous run, whose events are not in the file, the first bars. Nothing of users' own classes.

    >>> from vecgym.strategy import AllReduceStrategy
    >>> options = FitOptions(AllReduceStrategy(), 2, network=Network(1e9), compute=Compute(0.4))
    >>> clock_of(options, None)["compute"]["seconds"]
    tensor(0.4000, dtype=torch.float64)
    """
    plan = None if simulation is None else simulation.run.schedule
    if isinstance(plan, AsyncPlan):
        bars = [list(bar) for bar in plan.timeline.bars(0, MAX_STEPS) if bar.node < MAX_NODES]
        return {"bars": bars, "summary": repr(plan.timeline), "per_node": vars(plan.timeline.per_node)}
    if type(options.network) is not Network or type(options.compute) is not Compute:
        return {}
    return {"network": vars(options.network), "compute": vars(options.compute)}


def _with_models(saved: dict[str, Any], template: State, num_rows: int) -> State:
    """Return a state of these trees: parameters where they were, and buffers where the template has them."""
    models, own, shared = saved["models"], dict(saved["own"]), dict(saved["shared"])
    (shared if saved["home"] == "shared" else own)["params"] = models["params"]
    for trees, like in ((own, template.own), (shared, template.shared)):
        trees["buffers"] = {name: models["buffers"][name] for name in like["buffers"]}
    return State(0, widened(own, num_rows), shared)


def _check_alike(values: Any, template: Any, num_nodes: int, *, more: bool = False) -> None:
    """Raise a ValueError unless the tensors have the names, dtypes and shapes of the template's, with 1 row or all.

    Args:
        more: allow others beside them.
    """
    saved, expected = (
        {tree.path_name(path): _form(x, num_nodes) for path, x in tree.flatten(nested) if isinstance(x, Tensor)}
        for nested in (values, template)
    )
    if wrong := differences({name: x for name, x in saved.items() if name in expected or not more}, expected):
        raise ValueError(wrong[0])


def _form(x: Tensor, num_nodes: int) -> str:
    """Describe a tensor; one of K rows as if it had a single one."""
    shape = [1, *x.shape[1:]] if x.dim() > 0 and len(x) == num_nodes else [*x.shape]
    dense = x.layout is torch.strided and not x.is_meta
    return f"{x.dtype} {shape}" if dense else f"{x.dtype} {shape}, {x.layout}, {x.device}"


# ------------------------------------------------------------------------------------ what makes a run itself


VERSION = 8  # of the description of a run; earlier versions describe it differently
NOTHING = "nothing"
MAX_LINES = 6  # differences in a message
SAMPLES = 64  # steps at which learning rates are compared
TOLERANCE, OF_LOW_PRECISION = 1e-3, 3e-2  # of a loss, relative
FIRST_BATCH = "first batch of the training data"
LONG = 32  # entries; longer containers become a checksum
LONG_TEXT = 200  # characters; longer texts do too
MAX_DEPTH = 16


class Identity:
    """The identity of a run: only a run with the same identity may resume from its checkpoints.

    Args:
        options: of the run, described as they are before its first step.
        simulation, train, session: of the run.

    Attributes:
        required: what must be the same: name -> plain value.
        arithmetic: what may differ, which changes the last bits or more: name -> plain value.
    """

    def __init__(self, options: FitOptions, simulation: Simulation, train: Batches, session: Session) -> None:
        self.strategy = options.strategy  # as the user passed it
        self.simulation, self.session = simulation, session
        first = train.batch(0)
        self.batch = tree.map_leaves(lambda x: x[:1].clone(), first)  # of node 0, in the first process
        rows = ([x[i] for x in tree.leaves(first)] for i in range(len(simulation.here)))
        self.required = _required(options, simulation, train)
        self.arithmetic = {
            **_arithmetic(options, simulation, session),
            FIRST_BATCH: digest(torch.tensor(session.joined([int(digest(row), 16) for row in rows]))),
        }

    def record(self, state: State) -> dict[str, Any]:
        """Return the identity to be saved, with the loss at a state's parameters; the first process calls this."""
        return {
            "identity": self.required,
            "arithmetic": self.arithmetic,
            "learning_rates": self._learning_rates(sampled(self.simulation.timetable.max_steps, SAMPLES)),
            "loss": self._loss(state),
        }

    def check(self, contents: Mapping[str, Any], path: Path) -> None:
        """Raise a ValueError if a file belongs to another run; warn if the run will not have the same bits."""
        check_noted(contents["identity"], path)
        with runfile.naming(path):
            rates = contents["learning_rates"]
            differing = differences(contents["identity"], self.required) or self._different_rates(rates)
            changed = differences(contents["arithmetic"], self.arithmetic)
        if differing:
            raise another_run(path, differing)
        unit, length = "updates" if self.strategy.asynchronous else "steps", self.simulation.timetable.length
        if contents["step"] > length:
            raise ValueError(f"{path} already has {contents['step']} {unit}, more than max_{unit}={length}: give more.")
        if changed:
            warn(
                f"The run resumed from {path} will not have the bits of an uninterrupted one:\n  "
                + "\n  ".join(changed)
            )

    def check_loss(self, contents: Mapping[str, Any], state: State, path: Path) -> None:
        """Raise a ValueError if the model, with a file's parameters, does not have the file's loss.

        Other data cannot be compared. On another device a model may draw other random numbers, so this only warns.
        """
        if contents["arithmetic"][FIRST_BATCH] != self.arithmetic[FIRST_BATCH]:
            return
        loss = self.session.first(lambda: self._loss(state))
        engine = self.simulation.engine
        is_low = engine.autocast or any(p.element_size() < 4 for p in engine.params.values())
        what = "loss of node 0's first batch at the saved parameters"
        differing = differences({what: contents["loss"]}, {what: loss}, OF_LOW_PRECISION if is_low else TOLERANCE)
        if differing and contents["arithmetic"]["device"] == self.arithmetic["device"]:
            raise another_run(path, differing)
        if differing:
            warn(f"{path} may belong to another run:\n  {differing[0]}")

    def _loss(self, state: State) -> float:
        params, buffers = (tree.map(lambda x: x[:1], values) for values in (state.params, state.buffers))
        return eval_loss(self.simulation.engine, params, buffers, self.batch)

    def _different_rates(self, saved: Mapping[int, list[float]]) -> list[str]:
        """Return the first difference between the learning rates of the saved run and of this one, in lines."""
        rates = self._learning_rates(step for step in saved if step < self.simulation.timetable.max_steps)
        lines = differences(in_words({step: saved[step] for step in rates}), in_words(rates))[:1]
        return [*lines, OF_SCHEDULES] if lines else []

    def _learning_rates(self, steps: Iterable[int]) -> dict[int, list[float]]:
        return learning_rates(self.strategy, self.simulation.timetable.max_steps, steps)


def another_run(path: Path, differing: list[str]) -> ValueError:
    return ValueError(
        f"{path} belongs to another run:\n  " + "\n  ".join(differing) + "\n"
        "Use what it was saved with, or start anew with resume=False and another save_dir."
    )


def _required(options: FitOptions, simulation: Simulation, train: Batches) -> dict[str, Any]:
    settings = ("seed", "batch_size", "shuffle", "autocast")
    inputs = {"collate_fn": (options.dataloader_kwargs or {}).get("collate_fn")}
    if options.strategy.asynchronous:  # the order of its events depends on them
        inputs |= {"compute": options.compute, "network": options.network}
    if options.availability is not None:  # it may depend on how long the nodes compute
        inputs |= {"availability": options.availability, "compute": options.compute}
    return {
        "description": VERSION,
        "num_nodes": simulation.comm.num_nodes,
        **{name: getattr(options, name) for name in settings},
        **settings_of(options.strategy, "strategy"),
        **of_model(simulation.engine.model, simulation.engine.params),
        "examples of each node": str(list(simulation.run.num_examples or ())),
        "steps per epoch": train.steps_per_epoch,
        **dict(item for name, value in inputs.items() for item in settings_of(value, name).items()),
    }


def _arithmetic(options: FitOptions, simulation: Simulation, session: Session) -> dict[str, Any]:
    plan = simulation.engine.plan
    return {
        "device": simulation.engine.device.type,
        "engine": "vmap" if plan.engine == "recorded" else plan.engine,  # the same bits
        "chunk_size": plan.chunk_size,
        "node_threads": plan.node_threads,
        **({"channels_last": True} if plan.channels_last else {}),
        "minibatch_size": options.minibatch_size,
        "exact": options.exact,
        **({} if options.exact else {"num_processes": session.num_processes}),
        "torch": str(torch.__version__),
    }


def check_noted(saved: Mapping[str, Any], where: Any) -> None:
    """Raise a ValueError unless the description of a saved run has the current version."""
    if saved.get("description") != VERSION:
        raise ValueError(
            f"{where} was written by another version of vecgym, which describes runs differently: they "
            "cannot be compared. Give another path to start anew, or resume with that version of vecgym."
        )


def differences(saved: Mapping[str, Any], here: Mapping[str, Any], tolerance: float = 0.0) -> list[str]:
    """Return the differences between plain values, one per line: 1 is not 1.0, and nan is nan.

    Args:
        tolerance: relative, if the numbers are losses. If the saved one is nan, there is none to compare with.

    >>> differences({"seed": 1, "strategy.H": 3}, {"seed": 1, "strategy.H": 5})
    ['strategy.H: saved 3, given 5']
    >>> differences({"loss": 2.0, "other": math.nan}, {"loss": 2.001, "other": 2.0}, TOLERANCE)
    []
    """

    def same(a: Any, b: Any) -> bool:
        if tolerance and type(a) is type(b) is float:
            return math.isnan(a) or math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-6)
        return repr(a) == repr(b)

    pairs = {name: (saved.get(name, NOTHING), here.get(name, NOTHING)) for name in {**saved, **here}}
    lines = [f"{name}: saved {a}, given {b}" for name, (a, b) in pairs.items() if not same(a, b)]
    more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return lines[:MAX_LINES] + more


# ------------------------------------------------------------------------------------------------- what is computed


def sampled(num_steps: int, number: int) -> list[int]:
    """Return the first steps, and others spaced evenly up to the last.

    >>> sampled(100, 4)
    [0, 25, 50, 74, 99]
    """
    steps = {*range(number // 4), *(round(i * (num_steps - 1) / number) for i in range(number + 1))}
    return sorted(step for step in steps if 0 <= step < num_steps)


def learning_rates(strategy: Strategy, num_steps: int, steps: Iterable[int]) -> dict[int, list[float]]:
    """Return the inner learning rate at some steps, or that of each node; nothing if the optimizer has none.

    >>> from vecgym.strategy import FedAvgStrategy
    >>> learning_rates(FedAvgStrategy("sgd", lr=0.5, warmup_steps=2), 10, [0, 1, 2])
    {0: [0.0], 1: [0.25], 2: [0.5]}
    """
    rates = {}
    with contextlib.suppress(AttributeError):
        for step in steps:
            lr = strategy.inner.lr(step, num_steps)
            rates[step] = torch.as_tensor(lr, dtype=torch.float64).detach().reshape(-1).tolist()
    return rates


def in_words(rates: Mapping[int, list[float]]) -> dict[str, str]:
    """Return learning rates as plain values by name, to nine digits.

    >>> in_words({3: [0.1, 0.2]})
    {'learning rate of step 3': '0.1, 0.2'}
    """
    return {f"learning rate of step {step}": ", ".join(f"{lr:.9g}" for lr in lrs) for step, lrs in rates.items()}


def eval_loss(engine: Engine, params: Tree, buffers: Tree, batch: Any) -> float:
    """Return the loss of one node, everything `[1, *]`, by the plain module in eval mode; nan if that fails.

    >>> from vecgym.models import Line
    >>> eval_loss(Engine(Line()), {"w": torch.tensor([1.0])}, {}, torch.tensor([[3.0]]))
    4.0
    """
    with rng.private(0):
        try:
            return float(engine.measures(params, buffers, batch, own_batches=True)["loss"])
        except Exception:  # a model may support training only: then its loss is not compared
            return math.nan


# ----------------------------------------------------------------------------------------------------------- settings


def of_model(model: nn.Module, trained: Collection[str], name: str = "model") -> dict[str, Any]:
    """Describe a model without the values of its tensors: name -> plain value.

    >>> of_model(nn.Linear(1, 2, bias=False), ["weight"])["model, parameter weight"]
    'float32 [2, 1]'
    """
    forms = {f"parameter {n}": tree.form(p) + ("" if n in trained else ", not trained")
             for n, p in model.named_parameters()}  # fmt: skip
    forms |= {f"buffer {n}": tree.form(b) for n, b in model.named_buffers()}
    forms_of_loss = settings_of(vars(model).get(LOSS_FN), f"{name}, loss_fn") if LOSS_FN in vars(model) else {}
    return {**settings_of(model, name), **forms_of_loss, **{f"{name}, {which}": form for which, form in forms.items()}}


def settings_of(x: Any, name: str, visited: dict[int, Any] | None = None, depth: int = 0) -> dict[str, Any]:
    """Describe an object's contents: name -> plain value, independent of addresses and of the order of names.

    >>> class Spec:
    ...     def __init__(self):
    ...         self.H, self.lr = 3, [0.1, None]
    >>> settings_of(Spec(), "spec")
    {'spec': 'Spec', 'spec.H': 3, 'spec.lr': 'list of 2', 'spec.lr[0]': 0.1, 'spec.lr[1]': None}
    >>> settings_of(torch.zeros(2), "x") == settings_of(torch.ones(2), "x")
    False
    """
    visited = {} if visited is None else visited  # id -> the object, kept alive so that no other gets its id
    what, contents = _described(x)
    if contents and (id(x) in visited or depth > MAX_DEPTH):
        return {name: "see above"}
    visited[id(x)] = x
    is_long = len(contents) > LONG
    inner: dict[str, Any] = {}
    for part, value in contents.items():
        inner |= settings_of(value, part if is_long else name + part, visited, depth + 1)
    if not hasattr(x, "__dict__"):  # sharing a list or having an equal one makes no difference
        del visited[id(x)]
    if is_long:
        return {name: f"{what} with checksum {_hashed(repr(sorted(inner.items())).encode())}"}
    return {name: what, **inner}


def _described(x: Any) -> tuple[Any, dict[str, Any]]:
    """Return an object as a plain value, and its contents by the ends of their names."""
    kind = type(x).__name__
    if isinstance(x, str) and len(x) > LONG_TEXT:
        return f"text of {len(x)} characters with checksum {_hashed(x.encode())}", {}
    if type(x) in PLAIN:
        return x, {}
    if isinstance(x, (Tensor, np.ndarray, np.generic)):
        return _tensor_text(x), {}
    if isinstance(x, GENERATORS):  # whose state changes with every use
        return kind + (f" of seed {x.initial_seed()}" if isinstance(x, torch.Generator) else ""), {}
    if isinstance(x, nn.Module):
        return (f"{kind}({x.extra_repr()})" if x.extra_repr() else kind), _named(dict(x.named_children()))
    if isinstance(x, Dataset):
        return kind + (f" of {len(x)}" if hasattr(x, "__len__") else ""), {}
    if isinstance(x, (Mapping, list, tuple, deque)):
        entries = x.items() if isinstance(x, Mapping) else enumerate(x)
        return f"{kind} of {len(x)}", {f"[{key!r}]": value for key, value in entries}
    if isinstance(x, (set, frozenset)):
        return f"{kind} of {sorted(map(repr, x))}", {}
    if isinstance(x, functools.partial):
        return kind, {".func": x.func, ".args": x.args, ".keywords": x.keywords}
    if (called := getattr(x, "__qualname__", None)) is not None:
        return called, ({".self": x.__self__} if isinstance(x, types.MethodType) else {})
    if isinstance(x, PurePath):  # files may move
        return x.name, {}
    if hasattr(x, "__dict__") and not isinstance(x, (enum.Enum, types.ModuleType)):
        return kind, _named({key: value for key, value in vars(x).items() if not _is_private(x, key, value)})
    return re.sub(r" at 0x[0-9a-f]+", "", repr(x)), {}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f".{key}": value for key, value in sorted(values.items())}


def _is_private(x: Any, key: str, value: Any) -> bool:
    """Whether an attribute is an implementation detail of a library's object, not a setting."""
    return key.startswith("_") and any(type(y).__module__.startswith(("vecgym.", "torch.")) for y in (x, value))


def _tensor_text(x: Any) -> str:
    form = tree.form(x)
    if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_meta):
        return form
    return f"{x.item()}, {form}" if math.prod(x.shape) == 1 else f"{form} with checksum {digest(x)}"


def digest(values: Any) -> str:
    """Return a checksum of all tensors, or arrays, in nested dicts, lists and tuples.

    >>> digest(torch.ones(2)) == digest([torch.ones(2)]), digest(torch.ones(2)) == digest(torch.zeros(2))
    (True, False)
    """
    return _hashed(*map(_bytes_of, [values] if isinstance(values, np.ndarray) else tree.leaves(values)))


def _bytes_of(x: Any) -> Any:
    if isinstance(x, Tensor):
        x = x.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _hashed(*parts: Any) -> str:
    checksum = hashlib.blake2b(digest_size=7)
    for part in parts:
        checksum.update(part)
    return checksum.hexdigest()
