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
from torch import Tensor

from vecgym.core import check

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
    try:
        array = values.detach().double().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values, np.float64)
    except (TypeError, ValueError, NotImplementedError):  # the last one: from a tensor on the meta device
        raise TypeError(f"{name} is {check.kind_of(values)} without numbers; give one for each step, [T].") from None
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


def done(figure: Figure, title: str | None, path: str | os.PathLike[str] | None) -> Figure:
    """Add the title above all panels, and save the figure if a path is given."""
    if title:
        figure.suptitle(title, fontsize=12)
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


def line_styles(values: list[Any]) -> list[dict[str, Any]]:
    """Return a colour and a marker for each value: shades in order if there are more values than colours."""
    if len(values) <= len(COLOURS):
        return [{"color": colour, "marker": marker} for colour, marker in zip(COLOURS, MARKERS)]
    shades = map(to_hex, colormaps["viridis"](np.linspace(0, 0.95, len(values))))
    return [{"color": shade, "marker": MARKERS[i % len(MARKERS)]} for i, shade in enumerate(shades)]


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
