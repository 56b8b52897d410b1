"""Shared by all figures: colours, titles, legends, files. Uses matplotlib's object interface, without global state."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from vecgym.core import check

Curves = list[tuple[np.ndarray, np.ndarray]]

# The palette of Okabe and Ito, suitable for colour-blind readers, in order of contrast.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
MAX_RUNS_INSIDE = 5  # in a legend inside the axes: a longer one would hide the curves
LIGHT = 0.35  # opacity of training losses, so that validation losses stand out
MAX_LEGEND = 16  # entries


class NotebookFigure(Figure):
    """A matplotlib `Figure` that notebooks display even if pyplot was never imported.

    >>> NotebookFigure(figsize=(1, 1))._repr_png_()[1:4]
    b'PNG'
    """

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def new_figure(width: float, height: float, columns: int = 1, **settings: Any) -> tuple[NotebookFigure, list[Axes]]:
    """Make a figure with panels side by side."""
    figure = NotebookFigure(figsize=(width, height), dpi=120, layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, **settings)[0])


def vector(name: str, values: Any) -> np.ndarray:
    """Convert one number for each step to an array `[T]`."""
    array = check.real(name, values, "a number for each step, [T]")
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"{name} has shape {list(array.shape)}; give one number for each step, [T].")
    return array


def finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Add title, labels and grid."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def done(figure: Figure, title: str | None, path: str | os.PathLike[str] | None, note: str = "") -> Figure:
    """Add the title above all panels and the note below them, and save the figure if a path is given."""
    if title:
        figure.suptitle(title, fontsize=12)
    if note:
        figure.supxlabel(note, fontsize=8, color="0.35", wrap=True)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def draw_band(axes: Axes, x: Any, low: Any, high: Any, colour: str, **settings: Any) -> None:
    """Fill between two curves."""
    axes.fill_between(x, low, high, color=colour, linewidth=0, **{"alpha": 0.15, **settings})


def span(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest finite entry of each row; nan if there is none."""
    finite = np.where(np.isfinite(values), values, np.nan)
    return np.fmin.reduce(finite, axis=1), np.fmax.reduce(finite, axis=1)


def check_shared(path: Any, title: Any) -> None:
    """Check the arguments that all figures share, before anything is drawn."""
    if path is not None:
        check.path("path", path)
    check.instance("title", title, (str, type(None)), "a str, or None")


def scale_bytes(axes: Axes, sent: Sequence[float], *, logarithmic: bool = True) -> None:
    """Scale an axis of bytes, and label it in kB, MB ...; omit the labels if nothing was sent.

    Args:
        sent: the bytes of the runs on the axis.
        logarithmic: make the axis logarithmic, and linear near 0 if a run sent nothing.
    """
    if not any(sent):
        axes.set_xticks([])
        return
    if logarithmic and all(sent):
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        if high < 100 * low:  # below two powers of ten there would be too few labels
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())  # numbers between the labels would overlap them
    elif logarithmic:
        axes.set_xscale("symlog", linthresh=min(x for x in sent if x > 0))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))


def checked_limits(name: str, value: Any) -> tuple[float, float]:
    """Return the limits of an axis, two numbers of which the first is smaller.

    >>> checked_limits("xlim", (0, 50))
    (0.0, 50.0)
    >>> checked_limits("xlim", (50, 50))
    Traceback (most recent call last):
    ...
    ValueError: xlim=(50, 50) must be two numbers, (first, last), of which the first is smaller.
    """
    pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(map(check.is_finite, value))
    if not pair or value[0] >= value[1]:
        raise ValueError(f"{name}={value!r} must be two numbers, (first, last), of which the first is smaller.")
    return float(value[0]), float(value[1])


def begin_where_curves_differ(axes: Axes, curves: Curves, xlim: tuple[float, float] | None = None) -> None:
    """Fit the vertical axis to what follows the first fifth of the curves, which is much the same in all, or to `xlim`.

    What lies outside is not shown. A logarithmic axis begins where the first curve comes into view.
    """
    first, last = xlim or (None, np.inf)
    shown = [y[(at >= (at[-1] / 5 if first is None else first)) & (at <= last)] for at, y in curves if len(at)]
    finite = np.concatenate([y[np.isfinite(y)] for y in shown]) if shown else np.zeros(0)
    if len(finite) and finite.min() < finite.max():
        (bottom, top), low, high = axes.get_ylim(), finite.min(), finite.max()
        margin = 0.1 * (high - low)
        axes.set_ylim(max(bottom, low - margin, 0.0 if low > 0 else bottom), min(top, high + margin))
    bottom, top = axes.get_ylim()
    places = np.concatenate([at[(y >= bottom) & (y <= top) & (at > 0)] for at, y in curves]) if curves else np.zeros(0)
    if xlim is not None:
        axes.set_xlim(xlim)
    elif axes.get_xscale() == "log" and len(places):
        axes.set_xlim(left=places.min() / 1.2)


def colours_of(values: Sequence[Any], categories: bool) -> list[str]:
    """Return a colour for each value: of up to 20 categories unlike ones, of numbers and of more shades in order.

    >>> colours_of(["a", "b"], categories=True), colours_of([1, 2], categories=False)
    (['#0072B2', '#D55E00'], ['#440154', '#bddf26'])
    """
    if categories and len(values) <= len(COLOURS):
        return list(COLOURS[: len(values)])
    if categories and len(values) <= 20:  # the ten strong ones before the ten pale ones
        tones = colormaps["tab20"](range(20))
        return [to_hex(tone) for tone in (*tones[::2], *tones[1::2])][: len(values)]
    return [to_hex(shade) for shade in colormaps["viridis"](np.linspace(0, 0.9, len(values)))]


def line_styles(values: list[Any]) -> list[dict[str, Any]]:
    """Return a colour and a marker for each value; see `colours_of`."""
    colours = colours_of(values, categories=len(values) == 1 or not all(map(check.is_number, values)))
    return [{"color": colour, "marker": MARKERS[i % len(MARKERS)]} for i, colour in enumerate(colours)]


def legend_hides_a_curve(axes: Axes) -> bool:
    """Whether the legend inside the axes lies on one of their lines."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # a legend has its place then
    box = axes.get_legend().get_window_extent()  # type: ignore[union-attr]
    lines = [line for line in axes.lines if len(line.get_xydata())]  # type: ignore[arg-type]
    paths = [line.get_path().transformed(line.get_transform()) for line in lines]
    return any(path.intersects_bbox(box, filled=False) for path in paths)


def legend_beside(axes: Axes, handles: Sequence[Any], labels: Sequence[str], title: str) -> None:
    """Put a legend to the right of the axes, with at most MAX_LEGEND of the entries."""
    keep = every_few(len(handles))
    axes.legend(
        [handles[i] for i in keep], [labels[i] for i in keep], title=title, frameon=False, loc="center left",
        bbox_to_anchor=(1, 0.5), fontsize=8,
    )  # fmt: skip


def every_few(number: int) -> list[int]:
    """Return at most MAX_LEGEND of `number` indices, evenly spaced, including the first and the last.

    >>> every_few(3), len(every_few(200)), every_few(200)[-1]
    ([0, 1, 2], 16, 199)
    """
    return [round(i) for i in np.linspace(0, number - 1, min(number, MAX_LEGEND))]
