"""The columns of a history: their meaning, and what recorders, loggers, readers and figures need to know about them.

Declare a new column here, in `COLUMNS`, and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """A column of the history.

    Attributes:
        meaning: a description, with the unit.
        label: the label in figures; "": the name of the column.
        start: the value before the first step; None: it has none.
        per_node: whether it has one number for each node, `[K]`.
        measured: whether it is measured on the machine, so that two otherwise equal runs differ in it.
        swept: whether it is a measure in the rows of a sweep.

    >>> COLUMNS["bytes_total"].label, COLUMNS["bytes_total"].start
    ('bytes sent per node', 0.0)
    """

    meaning: str
    label: str = ""
    start: float | None = None
    per_node: bool = False
    measured: bool = False
    swept: bool = False


EACH = "_each"  # ends the names of columns of the run's model on each node's own examples, such as "val_loss_each"
# In figures, for parts of such names, in this order.
_WORDS = {EACH: " on each node's examples", "_lowest_": ", lowest ", "_highest_": ", highest ",
          "tenth": "tenth of the nodes", "_": " "}  # fmt: skip

# In the order in which they are written. Each metric of a model (see `vecgym.runs.evaluation`) adds two columns:
# `val_NAME`, of the average of the nodes, and `val_NAME_local`, the mean over the nodes. Where nodes have their own
# validation sets, it adds `val_NAME_each`, `_p10`, `_p50`, `_p90`, `_lowest_tenth` and `_highest_tenth`.
COLUMNS = {
    "step": Column("optimizer steps done", label="optimizer steps", start=0),
    "epoch": Column("epochs done: passes over the data", start=0.0),
    "examples": Column("examples seen by all nodes together", label="examples seen by all nodes", start=0),
    "train_loss": Column(
        "mean over the nodes of the loss on their batches, before the step's update", label="training loss", swept=True
    ),
    "lr": Column("inner learning rate of the step; where nodes differ, their mean"),
    "outer_lr": Column("learning rate of the outer or server optimizer, where the strategy has one"),
    "bytes_step": Column(
        "bytes that a node's link has sent in this step alone, regardless of a logger's interval; see "
        "`vecgym.collectives.ledger`",
        start=0.0,
    ),
    "bytes_total": Column(
        "bytes that a node's link has sent since the start, including what it forwards",
        label="bytes sent per node", start=0.0, swept=True,
    ),
    "bytes_received_total": Column("bytes that a node's link has received since the start", start=0.0),
    "bytes_payload_total": Column(
        "bytes that a node has passed to collectives since the start, as papers report them",
        label="payload per node (bytes)", start=0.0,
    ),
    "epsilon": Column(
        "privacy spent so far on each node's data, where the strategy counts it; see `vecgym.strategy.Private`",
        label="epsilon", swept=True,
    ),
    "val_loss": Column(
        "validation loss of the run's model, the average of the nodes present", label="validation loss",
        swept=True,
    ),
    "val_loss_local": Column(
        "mean of the validation losses of the nodes present", label="nodes' validation loss", swept=True
    ),
    "consensus_distance": Column(
        "RMS distance of the present nodes' parameters to their average, after the step",
        label="consensus distance", swept=True,
    ),
    "consensus_distance_before": Column(
        "consensus distance before the step's exchange of parameters", label="consensus distance before the exchange"
    ),
    "num_present": Column("nodes present in the step, if `availability` lets some be absent"),
    "num_never_present": Column("nodes that have not been present in any step so far; averages leave them out"),
    "correlation": Column("mean correlation between the parameters of two nodes"),
    "seconds": Column("seconds since the first step began", label="seconds on this machine", start=0.0, measured=True),
    "steps_per_s": Column("steps per second since the previous row", measured=True),
    "examples_per_s": Column("examples per second of all nodes together, since the previous row", measured=True),
    "bytes_per_s": Column(
        "implied bandwidth, `bytes_step` / seconds of the step as simulated here: the rate at which each node would "
        "have to send to keep pace with this run, if it sent during the whole step",
        measured=True,
    ),
    "memory_bytes": Column(
        "peak memory of the process up to an evaluation: resident or, on CUDA, allocated", measured=True
    ),
    "sim_seconds": Column(
        "seconds until every node has ended the step, on the run's `network`",
        label="simulated seconds", swept=True,
    ),
    "sim_utilization": Column(
        "fraction of `sim_seconds` in which the nodes computed, averaged over the nodes", swept=True
    ),
    "train_losses": Column(
        "each node's training loss; nan where it did not train", label="nodes' training losses", per_node=True
    ),
    "val_losses": Column("each node's validation loss", label="nodes' validation losses", per_node=True),
}  # fmt: skip

# Additional columns of asynchronous runs, whose steps are updates of a server.
UPDATE_COLUMNS = {
    "version": Column("updates that the server has made", label="updates of the server", swept=True),
    "num_arrived": Column("movements that the update combines", swept=True),
    "staleness": Column(
        "versions by which the server was ahead of those from which the movements began: their mean", swept=True
    ),
    "num_dropped": Column("movements since the last update that came too late for any, with a `delay_threshold`"),
    "staleness_max": Column("largest staleness of a movement in the update", swept=True),
    "local_steps_total": Column(
        "local steps of all nodes together in the updates so far", label="local steps of all nodes", swept=True
    ),
    "nodes_per_call": Column("rounds computed in one stacked call, averaged over the calls of the update"),
}

SCALARS = {name: column.meaning for name, column in COLUMNS.items() if not column.per_node}
PER_NODE = {name: column.meaning for name, column in COLUMNS.items() if column.per_node}
MEASURED = tuple(name for name, column in COLUMNS.items() if column.measured)
START = {name: column.start for name, column in COLUMNS.items() if column.start is not None}
INTEGERS = tuple(name for name, start in START.items() if isinstance(start, int))
# The columns of the x axes of figures.
X_AXES = {
    "step": "step", "examples": "examples", "bytes": "bytes_total", "payload": "bytes_payload_total",
    "seconds": "seconds", "sim_seconds": "sim_seconds",
}  # fmt: skip


def is_per_node(name: str) -> bool:
    """Whether a column has one number for each node, `[K]`.

    >>> is_per_node("train_losses"), is_per_node("val_accuracy_each"), is_per_node("val_accuracy")
    (True, True, False)
    """
    return name in PER_NODE or name.endswith(EACH)


LARGER_IS_BETTER = ("accuracy", "precision", "recall", "f1", "auc", "score", "utilization", "correlation")
SMALLER_IS_BETTER = ("loss", "perplexity", "error", "distance", "bytes", "seconds", "bandwidth")


def larger_is_better(name: str) -> bool | None:
    """Whether the largest value of a measure is the best one, to judge by its name; None: the name does not say.

    >>> larger_is_better("val_accuracy_p10"), larger_is_better("val_loss"), larger_is_better("val_reward")
    (True, False, None)
    """
    if any(word in name for word in SMALLER_IS_BETTER):
        return False
    return True if any(word in name for word in LARGER_IS_BETTER) else None


def column_label(name: str) -> str:
    """Return the label of a column in figures.

    >>> column_label("val_loss"), column_label("val_accuracy_lowest_tenth"), column_label("H")
    ('validation loss', 'validation accuracy, lowest tenth of the nodes', 'H')
    """
    columns = {**COLUMNS, **UPDATE_COLUMNS}
    named = name.replace("val_", "validation ", 1) if name.startswith("val_") else name
    for end, words in _WORDS.items() if named != name else ():
        named = named.replace(end, words)
    return (columns[name].label if name in columns else "") or named
