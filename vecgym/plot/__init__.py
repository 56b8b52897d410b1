"""Figures of runs, sweeps, schedules and partitions."""

from vecgym.plot.figures import (
    NotebookFigure,
    default_window,
    pareto_front,
    plot_axis,
    plot_comparison,
    plot_heatmap,
    plot_history,
    plot_pareto,
    plot_partition,
    plot_runs,
    plot_schedule,
    plot_sensitivity,
    smooth,
)

__all__ = [
    "NotebookFigure",
    "default_window",
    "pareto_front",
    "plot_axis",
    "plot_comparison",
    "plot_heatmap",
    "plot_history",
    "plot_pareto",
    "plot_partition",
    "plot_runs",
    "plot_schedule",
    "plot_sensitivity",
    "smooth",
]
