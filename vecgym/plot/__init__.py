"""Figures of runs, sweeps, schedules and partitions."""

from vecgym.plot.runs import default_window, plot_comparison, plot_history, plot_runs, smooth
from vecgym.plot.schedules import (
    plot_influence,
    plot_numbers,
    plot_partition,
    plot_sensitivity,
)
from vecgym.plot.style import NotebookFigure
from vecgym.plot.sweeps import pareto_front, plot_axis, plot_differences, plot_heatmap, plot_pareto

__all__ = [
    "NotebookFigure", "default_window", "pareto_front", "plot_axis", "plot_comparison", "plot_differences",
    "plot_heatmap", "plot_history", "plot_influence", "plot_numbers", "plot_pareto", "plot_partition", "plot_runs",
    "plot_sensitivity", "smooth",
]  # fmt: skip
