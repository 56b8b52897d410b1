"""`vecgym report`: one HTML file about saved runs, which loads nothing and runs nothing."""

from __future__ import annotations

import argparse
import base64
import html
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import vecgym
from vecgym.cli import plot
from vecgym.records.columns import COLUMNS, UPDATE_COLUMNS, X_AXES, column_label

ROWS = 10  # of a history, at its end
BEFORE = 8  # steps that a timeline shows before the first exchange
ONE_SEED = "Each run has one seed: small differences may be chance. vecgym.compare compares runs of several seeds."
SUMMARY = ("train_loss", "val_loss", "bytes_total", "seconds", "sim_seconds")
# A browser then refuses scripts, and whatever is not in the file.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 0 auto; padding: 1rem }
h1, h2, h3 { line-height: 1.2; overflow-wrap: anywhere }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc }
img { width: 100%; min-width: 44rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #999 }
tr + tr td { border-top: 1px solid #eee }
td { overflow-wrap: anywhere; min-width: 5rem }
td:first-child { min-width: 11rem }
.numbers td, .numbers th { text-align: right; white-space: nowrap }
.numbers td:first-child, .numbers th:first-child { text-align: left; min-width: 2rem }
summary { cursor: pointer; margin: .5rem 0 }
footer { margin-top: 3rem; color: #666; font-size: .85rem }
"""


class Html(str):
    """Text that is already HTML: `tag` escapes all other text."""

    __slots__ = ()


def options(parser: argparse.ArgumentParser) -> None:
    """Write one HTML file about one or several saved runs: settings, figures, the last rows of the history, what was
    sent, when nodes computed and waited, and the environment. It needs no other file and no network."""
    parser.epilog = "example: vecgym report runs/a runs/b --output report.html"
    plot.add_options(parser, "vecgym-runs/report.html")


def run(args: argparse.Namespace) -> int:
    from vecgym.core.files import write_atomically

    runs = plot.read_runs(args.runs)
    title = args.title or (f"Run {next(iter(runs))}" if len(runs) == 1 else f"{len(runs)} runs")
    parts = overview({name: history for name, (history, _) in runs.items()}, args.x)
    for i, (name, (history, saved)) in enumerate(runs.items()):
        parts += [tag("h2", name, id=f"run-{i}"), *about(history, saved)]
    with write_atomically(args.output, "w") as file:
        file.write(page(title, parts))
    print(f"Report: {args.output}")
    return 0


# ------------------------------------------------------------------------------------------------------------- parts


def overview(histories: Mapping[str, vecgym.History], x: str) -> list[Html]:
    """Return the parts that compare the runs: results, the settings in which they differ, figures."""
    shown = [name for name in SUMMARY if any(h.last(name) is not None for h in histories.values())]
    rows = []
    for i, (name, h) in enumerate(histories.items()):
        strategy = str(h.settings.get("strategy", "")).partition("(")[0]
        results = [value(column, h.last(column)) for column in shown]
        rows.append([tag("a", name, href=f"#run-{i}"), strategy, h.settings.get("num_nodes"), h.last("step"), *results])
    parts = [table(["run", "strategy", "nodes", "steps", *map(column_label, shown)], rows, numbers=True)]
    if len(histories) > 1:
        parts.append(tag("p", ONE_SEED))
    if differing := list(differences([dict(flat(h.settings)) for h in histories.values()])):
        parts += [tag("h2", "Settings that differ"), table(["setting", *histories], differing)]
    parts.append(tag("h2", "Figures"))
    labelled = {name.replace("$", r"\$"): h for name, h in histories.items()}  # a name is no formula
    for axis in dict.fromkeys([x, "bytes", "sim_seconds"]):
        if axis == x or all(h.last(X_AXES[axis]) for h in histories.values()):
            figure = vecgym.plot.plot_runs(labelled, x=axis)
            parts.append(image(figure, f"The runs against {column_label(X_AXES[axis])}"))
    return parts


def differences(settings: Sequence[Mapping[str, str]]) -> Iterator[list[str]]:
    """Yield the settings that differ, with their values; hyperparameters if all strategies have them.

    >>> list(differences([{"seed": "0", "lr": "0.1"}, {"seed": "0", "lr": "0.2"}]))
    [['lr', '0.1', '0.2']]
    """
    for name in dict.fromkeys(name for of_run in settings for name in of_run):
        values = [of_run.get(name, "") for of_run in settings]
        everywhere = all(name in of_run for of_run in settings) or not name.startswith("hyperparameters.")
        if len(set(values)) > 1 and everywhere and name != "run_id":
            yield [name, *values]


def about(history: vecgym.History, saved: vecgym.Saved | None) -> list[Html]:
    """Return the section about one run."""
    rows = history.rows[-ROWS:]
    columns = [c for c in history.columns if any(isinstance(row.get(c), (int, float)) for row in rows)]
    columns.sort(key=lambda column: column not in ("step", *SUMMARY))  # the others may not fit
    cells = [[value(column, row.get(column)) for column in columns] for row in rows]
    settings = list(flat(history.settings))
    environment = [row for row in settings if row[0].startswith("environment.")]
    return [
        tag("p", tag("code", history.settings.get("strategy", ""))),
        tag("h3", "Last rows"), table(columns, cells, numbers=True),
        tag("h3", "What was sent"), *sent(history, saved),
        *timeline(history, saved),
        tag("h3", "Environment"), table([], [[name.partition(".")[2], text] for name, text in environment]),
        tag("details", tag("summary", "All settings"),
            table(["setting", "value"], [row for row in settings if row not in environment])),
    ]  # fmt: skip


def sent(history: vecgym.History, saved: vecgym.Saved | None) -> list[Html]:
    """Return the ledger by operation, or else the bytes in the history."""
    from vecgym.collectives.ledger import readable_bytes

    if saved is None or not saved.ledger.num_steps:
        why = "Checkpoints, fit(save_dir=), and files of trainer.save have the ledger of all operations."
        return [totals(history, "bytes_total", "bytes_received_total", "bytes_payload_total"), tag("p", why)]
    operations: dict[str, list[Any]] = {}
    for entry in saved.ledger:
        operations.setdefault(entry.operation, []).append(entry)
    rows = []
    for operation, entries in operations.items():
        sizes = dict.fromkeys(readable_bytes(which(e.payload_bytes for e in entries)) for which in (min, max))
        sums = (sum(x) for x in zip(*((e.sent_bytes, e.received_bytes) for e in entries)))
        steps = f"{entries[0].step + 1} to {entries[-1].step + 1}"
        rows.append([operation, len(entries), steps, " to ".join(sizes), *map(readable_bytes, sums)])
    in_all = map(readable_bytes, saved.ledger.totals[:2])
    rows.append(["in all", len(saved.ledger), f"1 to {saved.ledger.num_steps}", "", *in_all])
    head = ["operation", "calls", "steps", "payload of a call", "sent per node", "received per node"]
    return [table(head, rows, numbers=True)]


def timeline(history: vecgym.History, saved: vecgym.Saved | None) -> list[Html]:
    """Return when the nodes computed, waited and sent, if the run had a network."""
    from vecgym.clock.trace import MAX_STEPS, plot_timeline
    from vecgym.clock.units import readable_time

    if history.last("sim_seconds") is None:
        return []
    where = [str(history.settings[name]) for name in ("network", "compute") if name in history.settings]
    parts = [tag("h3", "Timeline"), tag("p", " with ".join(where) or "Messages take no time.")]
    if saved is None or not saved.clock:
        return [*parts, totals(history, "sim_seconds", "sim_utilization")]
    of_run, summary, per_node = timed(saved)
    rows = [
        [name, *(readable_time(float(x)) for x in (seconds.mean(), seconds.min(), seconds.max()))]
        for name, seconds in per_node.items()
    ]
    sends = 0 if saved.ledger.asynchronous else next((entry.step for entry in saved.ledger), 0)
    first = max(0, sends - BEFORE)
    last = min(first + MAX_STEPS, of_run.num_steps)
    return [
        *parts, tag("p", summary),
        table(["per node", "mean", "lowest", "highest"], rows, numbers=True),
        image(plot_timeline(of_run, first=first, last=last), f"What each node did in steps {first + 1} to {last}"),
    ]  # fmt: skip


def timed(saved: vecgym.Saved) -> tuple[Any, str, dict[str, Any]]:
    """Return a timeline to draw, a summary of it, and the seconds of each node."""
    from vecgym.clock import Compute, Network, price
    from vecgym.clock.trace import Bar

    clock = saved.clock
    if "bars" in clock:
        bars = [Bar(*bar) for bar in clock["bars"]]
        drawn = types.SimpleNamespace(num_steps=saved.step, num_nodes=saved.num_nodes, bars=lambda first, last: bars)
        return drawn, clock["summary"], clock["per_node"]
    network = {name: x for name, x in clock["network"].items() if name != "num_nodes"}  # which follows from the others
    compute = {{"seconds": "median"}.get(name, name): x for name, x in clock["compute"].items()}
    priced = price(saved.ledger, Network(**network), Compute.lognormal(**compute))
    return priced, repr(priced), vars(priced.per_node)


def totals(history: vecgym.History, *columns: str) -> Html:
    """Return the last values of those of the columns that were recorded."""
    names = [name for name in columns if history.last(name) is not None]
    return table([], [[COLUMNS[name].meaning.replace("`", ""), value(name, history.last(name))] for name in names])


# -------------------------------------------------------------------------------------------------------------- HTML


def page(title: str, parts: Sequence[Html]) -> str:
    """Return a whole page.

    >>> "<h1>a &lt; b</h1>" in page("a < b", [])
    True
    """
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", title), tag("style", Html(STYLE)),
    ]  # fmt: skip
    written = f"Written by vecgym {vecgym.__version__} on {time.strftime('%Y-%m-%d %H:%M %Z')}."
    body = tag("body", tag("h1", title), *parts, tag("footer", written))
    return "<!doctype html>\n" + tag("html", tag("head", *head), body, lang="en")


def tag(name: str, /, *contents: Any, **attributes: str) -> Html:
    """Return an element of HTML; contents and attributes are escaped, unless they are HTML.

    >>> tag("p", "<script>", tag("b", 1), id="a")
    '<p id="a">&lt;script&gt;<b>1</b></p>'
    """
    inside = "".join(x if isinstance(x, Html) else html.escape(str(x)) for x in contents)
    attributes_text = "".join(f' {key.replace("_", "-")}="{html.escape(text)}"' for key, text in attributes.items())
    return Html(f"<{name}{attributes_text}>" + ("" if name in ("img", "meta") else f"{inside}</{name}>"))


def table(head: Iterable[str], rows: Iterable[Iterable[Any]], numbers: bool = False) -> Html:
    """Return a table that scrolls where it is too wide; a column of the history has its meaning as a tooltip."""
    columns = {**COLUMNS, **UPDATE_COLUMNS}
    cells = [tag("th", name, **({"title": columns[name].meaning} if name in columns else {})) for name in head]
    lines = [tag("tr", *cells)] * bool(cells) + [
        tag("tr", *(tag("td", "" if x is None else x) for x in row)) for row in rows
    ]
    return tag("div", tag("table", *lines), **{"class": "wide numbers" if numbers else "wide"})


def image(figure: Any, about: str) -> Html:
    """Return a figure as a part of the page; on a phone it scrolls, so that it stays readable."""
    source = "data:image/png;base64," + base64.b64encode(figure._repr_png_()).decode()
    return tag("div", tag("img", src=source, alt=about), **{"class": "wide"})


def value(column: str, x: Any) -> Any:
    """Format a number of the history for reading.

    >>> value("bytes_total", 1234567.0), value("val_loss", 0.123456789), value("step", 3)
    ('1.23 MB', '0.123457', 3)
    """
    from vecgym.collectives.ledger import readable_bytes

    if x is not None and column.startswith(("bytes_", "memory_")):
        return readable_bytes(x)
    return f"{x:.6g}" if isinstance(x, float) else x


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings one by one.

    >>> list(flat({"seed": 1, "strategy": {"H": 3}}))
    [('seed', '1'), ('strategy.H', '3')]
    """
    for name, x in settings.items():
        if isinstance(x, (list, tuple)) and any(isinstance(y, Mapping) for y in x):
            x = {f"[{i}]": y for i, y in enumerate(x)}
        if isinstance(x, Mapping):
            yield from flat(x, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(x)
