"""The columns of a history: their meaning, and what recorders, loggers, readers and figures must know of them.

A new column is declared here, in `COLUMNS`, and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """A column of the history.

    Attributes:
        meaning: what it is, with its unit.
        label: in figures; "": its name.
        start: its value before the first step; None: it has none.
        per_node: one number for each node, `[K]`, instead of a single one.
        measured: depends on the machine and the moment: two otherwise equal runs differ in it.
        swept: a measure of the runs of a sweep, in their rows.

    >>> COLUMNS["bytes_total"].label, COLUMNS["bytes_total"].start
    ('bytes sent per node', 0.0)
    """

    meaning: str
    label: str = ""
    start: float | None = None
    per_node: bool = False
    measured: bool = False
    swept: bool = False


# In the order in which they are written. In addition there are, for each metric that a model offers (see
# `vecgym.runs.evaluation`), `val_NAME` of the average of the nodes and `val_NAME_local`, the mean of the nodes'.
COLUMNS = {
    "step": Column("optimizer steps done", label="optimizer steps", start=0),
    "epoch": Column("passes over the data done", start=0.0),
    "examples": Column("examples seen by all nodes together", label="examples seen by all nodes", start=0),
    "train_loss": Column(
        "mean over the nodes of the loss on their batches, before the step's update", label="training loss", swept=True
    ),
    "lr": Column("inner learning rate of the step; where nodes differ, their mean"),
    "outer_lr": Column("learning rate of the outer or server optimizer, where the strategy has one"),
    "bytes_step": Column(
        "bytes that a node's link has sent in this step alone, whatever the interval of a logger; see "
        "`vecgym.collectives.ledger`",
        start=0.0,
    ),
    "bytes_total": Column(
        "bytes that a node's link has sent since the start, with what it forwards",
        label="bytes sent per node", start=0.0, swept=True,
    ),
    "bytes_received_total": Column("bytes that a node's link has received since the start", start=0.0),
    "bytes_payload_total": Column(
        "bytes that a node has handed to collectives since the start, what papers report",
        label="payload per node (bytes)", start=0.0,
    ),
    "val_loss": Column(
        "validation loss of the run's model: the average of the nodes that are there", label="validation loss",
        swept=True,
    ),
    "val_loss_local": Column(
        "mean over the nodes that are there of each one's validation loss", label="nodes' validation loss", swept=True
    ),
    "consensus_distance": Column(
        "root mean square distance to their average of the parameters of the nodes that are there, after the step",
        label="consensus distance", swept=True,
    ),
    "consensus_distance_before": Column("the same before the step's exchange of parameters"),
    "num_present": Column("nodes that were there in the step, where `availability` lets some be absent"),
    "num_never_present": Column("nodes that have not been there in any step so far; no average counts them"),
    "correlation": Column("mean correlation between the parameters of two nodes"),
    "seconds": Column("since the start of the first step", label="seconds of simulation", start=0.0, measured=True),
    "steps_per_s": Column("steps per second since the row before", measured=True),
    "examples_per_s": Column("examples per second of all nodes together, since the row before", measured=True),
    "bytes_per_s": Column(
        "implied bandwidth: `bytes_step` / seconds of the step, as simulated here: the rate at which each node would "
        "have to send to keep pace with this run, if it sent during the whole step",
        measured=True,
    ),
    "memory_bytes": Column(
        "the most memory of the process up to an evaluation: resident, or on CUDA allocated", measured=True
    ),
    "sim_seconds": Column(
        "seconds until every node has ended the step, on the `network` given",
        label="seconds on the network", swept=True,
    ),
    "sim_utilization": Column("the part of them in which the nodes computed, their mean"),
    "train_losses": Column("each node's training loss; nan where it did not train", per_node=True),
    "val_losses": Column("each node's validation loss", per_node=True),
}  # fmt: skip

# Of asynchronous runs, whose steps are updates of a server, in addition.
OF_UPDATES = {
    "version": Column("updates that the server has made", label="updates of the server", swept=True),
    "num_arrived": Column("movements in the update", swept=True),
    "staleness": Column(
        "how many versions the server was ahead of those from which they began, their mean", swept=True
    ),
    "staleness_max": Column("the most of them", swept=True),
    "local_steps_total": Column(
        "local steps in the updates so far, of all nodes together", label="local steps of all nodes", swept=True
    ),
    "nodes_per_call": Column("rounds computed in one stacked call, the mean over the calls of the update"),
}

SCALARS = {name: column.meaning for name, column in COLUMNS.items() if not column.per_node}
PER_NODE = {name: column.meaning for name, column in COLUMNS.items() if column.per_node}
MEASURED = tuple(name for name, column in COLUMNS.items() if column.measured)
START = {name: column.start for name, column in COLUMNS.items() if column.start is not None}
INTEGERS = tuple(name for name, start in START.items() if isinstance(start, int))
# The x axes of figures, and their columns.
X_AXES = {
    "step": "step", "examples": "examples", "bytes": "bytes_total", "payload": "bytes_payload_total",
    "seconds": "seconds", "sim_seconds": "sim_seconds",
}  # fmt: skip


def column_label(name: str) -> str:
    """Return the label of a column in figures.

    >>> column_label("val_loss"), column_label("H")
    ('validation loss', 'H')
    """
    known = {**COLUMNS, **OF_UPDATES}
    return (known[name].label if name in known else "") or name
