"""Figures: what is drawn is what was recorded."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from tests.fitting import dataset, fit
from vecgym import History, Trainer
from vecgym.clock import Compute, Network, price
from vecgym.clock.trace import plot_networks
from vecgym.collectives.ledger import Transfer
from vecgym.data import partition_iid
from vecgym.plot import (
    plot_axis,
    plot_comparison,
    plot_history,
    plot_numbers,
    plot_pareto,
    plot_partition,
    plot_runs,
    plot_sensitivity,
    smooth,
)
from vecgym.plot.style import COLOURS, colours_of, line_styles
from vecgym.records.columns import X_AXES, column_label

STEPS = 40


def make_history(
    every: int = 1, bytes_per_exchange: float = 100.0, shift: float = 0.0, validate: bool = True
) -> History:
    """A run of 4 nodes that exchanges every so many steps and is evaluated every 10."""
    history = History()
    noise = np.random.default_rng(0).normal(size=(STEPS + 1, 4)) * 0.1
    if validate:
        history.append(
            {
                "step": 0,
                "bytes_total": 0.0,
                "bytes_payload_total": 0.0,
                "val_loss": 4.0 + shift,
                "val_losses": np.full(4, 4.0 + shift),
            }
        )
    for step in range(1, STEPS + 1):
        losses = 4 / (1 + 0.1 * step) + shift + noise[step]
        row: dict[str, Any] = {
            "step": step,
            "train_loss": losses.mean(),
            "train_losses": losses,
            "bytes_total": bytes_per_exchange * (step // every),
            "bytes_payload_total": bytes_per_exchange / 2 * (step // every),
        }
        if validate and step % 10 == 0:
            row.update(val_loss=float(losses.mean()), val_losses=losses)
        history.append(row)
    return history


def line_of(axes: Axes, colour: str, marker: bool) -> tuple[np.ndarray, np.ndarray]:
    """The curve in a colour: validation losses have markers, training losses have not."""
    for line in axes.lines:
        if to_hex(line.get_color()).upper() == colour and (line.get_marker() not in ("None", "", None)) == marker:
            return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    raise AssertionError(f"no line in {colour}")


def band_of(axes: Axes) -> tuple[dict[int, float], dict[int, float]]:
    """The band's lower and upper edge, step -> loss."""
    low: dict[int, float] = {}
    high: dict[int, float] = {}
    for x, y in np.asarray(axes.collections[0].get_paths()[0].vertices):
        low[int(x)] = min(low.get(int(x), np.inf), y)
        high[int(x)] = max(high.get(int(x), -np.inf), y)
    return low, high


# ----------------------------------------------------------------------------------------------- comparison


def test_bytes_are_labelled_in_their_unit_and_nothing_else() -> None:
    for spread in (1, 8, 10_000):  # less than one power of ten, less than two, more
        runs = {name: make_history(10, 100.0 * factor) for name, factor in (("a", 1), ("b", spread))}
        figure = plot_comparison(runs)
        figure.canvas.draw()
        axis = figure.axes[1].xaxis
        low, high = axis.get_view_interval()
        labels = [text.get_text() for text, at in zip(axis.get_ticklabels(), axis.get_ticklocs()) if low <= at <= high]
        assert len(labels) >= 2
        assert all(label.endswith("B") for label in labels)
        assert not any(text.get_text() for text in axis.get_ticklabels(minor=True))


def test_both_panels_show_what_was_recorded():
    runs = {"allreduce": make_history(), "fedavg": make_history(every=20, shift=0.5)}
    figure = plot_comparison(runs, loss_label="loss (nats)", title="two runs", window=1)
    by_step, by_bytes = figure.axes
    for colour, history in zip(COLOURS, runs.values()):
        for marker, column in [(False, "train_loss"), (True, "val_loss")]:
            x, y = line_of(by_step, colour, marker)
            np.testing.assert_allclose((x, y), history.series(column))
    # 40 exchanges of allreduce, two of fedavg; nothing at 0 bytes.
    x, y = line_of(by_bytes, COLOURS[0], marker=False)
    np.testing.assert_allclose((x, y), runs["allreduce"].series("train_loss", "bytes_total"))
    x, y = line_of(by_bytes, COLOURS[1], marker=True)
    assert x.tolist() == [100.0, 200.0]
    losses = dict(zip(*runs["fedavg"].series("val_loss")))
    np.testing.assert_allclose(y, [losses[30], losses[40]])  # the last evaluation with that many bytes sent
    assert by_bytes.get_xscale() == "log"
    assert by_step.get_xscale() == "linear"


def test_words_and_units():
    figure = plot_comparison({"allreduce": make_history()}, loss_label="loss (nats)", title="one run")
    by_step, by_bytes = figure.axes
    assert (by_step.get_xlabel(), by_step.get_ylabel()) == ("optimizer steps", "loss (nats)")
    assert by_bytes.get_xlabel() == "bytes sent per node"
    assert by_bytes.xaxis.get_major_formatter()(2.5e6) == "2.5 MB"
    assert figure.get_suptitle() == "one run"
    legend = by_step.get_legend()
    assert legend is not None
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["allreduce", "validation, averaged model", "training (smoothed)"]


def test_runs_differ_in_colour_and_marker():
    figure = plot_comparison({str(i): make_history(shift=0.1 * i) for i in range(9)})
    (legend,) = figure.legends  # beside the panels: so many would hide the curves
    assert figure.axes[0].get_legend() is None
    looks = {(handle.get_color(), handle.get_marker()) for handle in legend.legend_handles[:9]}  # type: ignore[union-attr]
    assert len(looks) >= 7


def test_of_very_many_runs_or_classes_the_legend_names_some() -> None:
    """Evenly spaced, with the first and the last, in the colours of the curves, and says of how many."""
    figure = plot_runs({f"client {i}": make_history(shift=0.01 * i) for i in range(24)})
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert (texts[0], texts[15], texts[16]) == ("client 0", "client 23", "... of 24 runs")
    assert len(texts) < 22
    curves: Any = figure.axes[0].lines
    assert legend.legend_handles[15].get_color() == curves[-1].get_color()  # type: ignore[union-attr]
    labels = torch.arange(400) % 40
    axes: Any = plot_partition(partition_iid(labels, 20)).axes[0]
    found = axes.get_legend()
    assert found.get_title().get_text() == "40 classes"
    assert [text.get_text() for text in found.get_texts()][:: len(found.get_texts()) - 1] == ["39", "0"]
    assert "20 nodes" in axes.figure.get_suptitle()
    rows = [{"H": H, "lr": lr, "val_loss": H * lr, "bytes_total": 1.0 + H} for H in range(20) for lr in (0.1, 0.2)]
    for figure in (plot_axis(rows, "lr", hue="H"), plot_pareto(rows, hue="H")):
        found = figure.axes[0].get_legend()
        assert found is not None
        assert found.get_title().get_text() == "20 values of H"
        assert len(found.get_texts()) == 16


def test_a_run_that_sends_nothing_is_a_horizontal_line():
    silent = make_history(bytes_per_exchange=0.0)
    by_bytes = plot_comparison({"allreduce": make_history(), "alone": silent}).axes[1]
    x, y = line_of(by_bytes, COLOURS[1], marker=False)
    assert len(x) == 0
    assert len(y) == 0
    (level,) = (line for line in by_bytes.lines if line.get_linestyle() == ":")
    np.testing.assert_allclose(np.asarray(level.get_ydata()), [silent.last("val_loss")] * 2)
    assert [text.get_text() for text in by_bytes.texts] == ["alone: sends nothing"]


def test_when_nobody_sends_anything(tmp_path, recwarn):
    runs = {"one": make_history(bytes_per_exchange=0.0), "two": make_history(bytes_per_exchange=0.0, validate=False)}
    figure = plot_comparison(runs, tmp_path / "silent.png")
    assert figure.axes[1].get_xscale() == "linear"
    assert not recwarn.list


def test_a_diverged_run_has_gaps_only_where_it_diverged(tmp_path, recwarn):
    history = make_history()
    for row in history.rows[30:]:
        row.update(train_loss=float("nan"), train_losses=np.full(4, np.inf))
    _, y = line_of(plot_comparison({"run": history}, tmp_path / "x.png", window=1).axes[0], COLOURS[0], marker=False)
    assert np.isfinite(y).tolist() == [True] * 29 + [False] * 11
    plot_history(history, tmp_path / "y.png")
    assert not recwarn.list


# ---------------------------------------------------------------------------------------------- one history


def test_history_shows_the_spread_of_the_nodes():
    history = make_history()
    axes = plot_history(history, window=1).axes[0]
    each = history.node_array("train_losses")
    low, high = band_of(axes)
    np.testing.assert_allclose([low[step] for step in range(1, STEPS + 1)], each.min(1))
    np.testing.assert_allclose([high[step] for step in range(1, STEPS + 1)], each.max(1))
    bars: Any = axes.collections[1]
    val = history.node_array("val_losses")
    np.testing.assert_allclose(
        [segment[:, 1] for segment in bars.get_segments()], np.stack([val.min(1), val.max(1)], 1)
    )
    np.testing.assert_allclose(line_of(axes, COLOURS[0], marker=False), history.series("train_loss"))
    np.testing.assert_allclose(line_of(axes, COLOURS[1], marker=True), history.series("val_loss"))


def test_history_leaves_out_nodes_that_did_not_train():
    history = make_history(validate=False)
    for row in history.rows:
        row["train_losses"][0] = np.nan
    low, high = band_of(plot_history(history, window=1).axes[0])
    each = history.node_array("train_losses")[:, 1:]
    np.testing.assert_allclose([low[step] for step in range(1, STEPS + 1)], each.min(1))
    np.testing.assert_allclose([high[step] for step in range(1, STEPS + 1)], each.max(1))


# ------------------------------------------------------------------------------------------------- smoothing


@pytest.mark.parametrize("window", [1, 2, 3, 5, 50])
def test_smooth_is_the_mean_of_the_neighbours(window):
    x = np.random.default_rng(0).normal(size=(12, 2))
    before, after = (window - 1) // 2, window // 2
    expected = [x[max(0, i - before) : i + min(after, i) + 1].mean(0) for i in range(12)]
    np.testing.assert_allclose(smooth(x, window), expected)


def test_smooth_leaves_out_what_is_not_finite():
    np.testing.assert_allclose(smooth([np.nan, np.nan, np.nan, 1.0, np.inf, 3.0], 3), [np.nan, np.nan, 1, 1, 2, 3])


# ------------------------------------------------------------------------------------------ files, notebooks


def test_files_are_written_and_directories_made(tmp_path):
    figure = plot_comparison({"run": make_history()}, tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(figure, Figure)
    plot_history(make_history(), tmp_path / "figure.pdf")
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_pyplot_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now fails
    assert plot_history(make_history())._repr_png_()  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------- errors


def test_refuses_what_cannot_be_drawn(tmp_path):
    with pytest.raises(ValueError, match="there is no history to plot"):
        plot_comparison({})
    with pytest.raises(TypeError, match=r"histories\['run'\] is of type dict; give a History"):
        plot_comparison({"run": {}})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"histories\['run'\] has no step to plot: train"):
        plot_comparison({"run": History()})
    with pytest.raises(ValueError, match="has no step"):
        plot_history(History())
    with pytest.raises(ValueError, match="Format 'gibberish' is not supported"):
        plot_history(make_history(), tmp_path / "figure.gibberish")


# -------------------------------------------------------------------------------------------------- rollouts


def test_sensitivity_shows_each_step_and_where_the_run_exchanges() -> None:
    axes = plot_sensitivity(torch.tensor([-0.5, 0.25, -0.125]), schedule=[0, 1, 1]).axes[0]
    patches: Any = axes.patches
    bars = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in patches}
    assert bars == {1: -0.5, 2: 0.25, 3: -0.125}
    colours = {round(b.get_x() + b.get_width() / 2): to_hex(b.get_facecolor()).upper() for b in patches}
    assert colours[1] == colours[3] == COLOURS[0] != colours[2]
    marks = next(line for line in axes.lines if line.get_label() == "exchanges of the run")
    assert list(np.asarray(marks.get_xdata())) == [2, 3]
    with pytest.raises(ValueError, match="gradient has 2 steps and schedule 3"):
        plot_sensitivity([1, 2], schedule=[0, 1, 1])
    with pytest.raises(ValueError, match=r"gradient has shape \[2, 2\]"):
        plot_sensitivity(np.ones((2, 2)))


def test_learned_matrices_beside_curves() -> None:
    several = torch.stack([torch.eye(3), torch.full((3, 3), 1 / 3)])
    lr, one, mean, *_ = plot_numbers({"lr": [0.1, 0.2]}, matrices={"W": torch.eye(3), "each": several}).axes
    assert [axes.get_title() for axes in (lr, one, mean)] == ["lr", "W", "each, mean of 2"]
    assert np.array_equal(np.asarray(one.images[0].get_array()), np.eye(3))
    assert np.allclose(np.asarray(mean.images[0].get_array()), several.mean(0))
    with pytest.raises(ValueError, match=r"W has shape \[3\]; give a mixing matrix, \[K, K\] or \[T, K, K\]"):
        plot_numbers({}, matrices={"W": torch.ones(3)})


# ---------------------------------------------------------------------------------------------- plot_runs


def legend_of(axes: Axes) -> Legend:
    """The legend inside the axes, or else that outside, where there was no room for it."""
    legend = axes.get_legend() or next(iter(axes.figure.legends), None)
    assert legend is not None
    return legend


def measured(every: int = 1, num_nodes: int = 4) -> History:
    """`make_history` with the other axes, and distances at the evaluations."""
    history = make_history(every)
    for row in history.rows:
        row.update(examples=16 * row["step"], seconds=0.25 * row["step"], sim_seconds=2.5 * row["step"])
        if "train_losses" in row:
            row["train_losses"] = np.linspace(0.9, 1.1, num_nodes) * row["train_loss"]
        if row["step"] and "val_loss" in row:
            row["consensus_distance"] = 1 / row["step"]
    return history


@pytest.mark.parametrize("x", X_AXES)
def test_runs_against_every_axis(x: str) -> None:
    one, other = measured(), measured(every=5)
    figure = plot_runs({"one": one, "other": other}, x=x, window=1, title="two runs")
    losses, distances = figure.axes
    column = X_AXES[x]
    assert losses.get_xlabel() == distances.get_xlabel() == column_label(column) != column
    assert losses.get_xscale() == distances.get_xscale() == ("log" if x in ("bytes", "payload") else "linear")
    assert figure.get_suptitle() == "two runs"
    for history, colour in ((one, COLOURS[0]), (other, COLOURS[1])):
        expected = dict(zip(*history.series("val_loss", column)))
        if x in ("bytes", "payload"):
            expected.pop(0.0)
        found = line_of(losses, colour, marker=True)
        assert dict(zip(found[0], found[1])) == pytest.approx(expected)
        found = line_of(distances, colour, marker=True)
        assert found[0].tolist() == history.series("consensus_distance", column)[0]
        assert found[1].tolist() == pytest.approx(history.series("consensus_distance")[1])
    texts = [text.get_text() for text in legend_of(losses).get_texts()]
    assert texts == [
        "one", "other", "validation, averaged model", "training (smoothed)", "training, lowest to highest node"
    ]  # fmt: skip


@pytest.mark.parametrize(("num_nodes", "edges"), [(4, (0.9, 1.1)), (21, (0.92, 1.08))])
def test_the_band_of_many_nodes_is_between_percentiles(num_nodes: int, edges: tuple[float, float]) -> None:
    history = measured(num_nodes=num_nodes)
    axes = plot_runs({"one": history}, window=1).axes[0]
    low, high = band_of(axes)
    for step, loss in zip(*history.series("train_loss")):
        assert (low[step], high[step]) == pytest.approx((edges[0] * loss, edges[1] * loss))
    last = legend_of(axes).get_texts()[-1].get_text()
    assert ("10 % to 90 %" in last) == (num_nodes == 21)


def test_runs_without_distances_or_nodes_have_one_panel() -> None:
    history = History()
    for step in range(1, 4):
        history.append({"step": step, "train_loss": 1 / step, "bytes_total": 0.0})
    figure = plot_runs({"silent": history}, x="bytes")
    assert len(figure.axes) == 1
    assert "silent: sends nothing" in [text.get_text() for text in figure.axes[0].texts]
    allowed = "Allowed: 'step', 'examples', 'bytes', 'payload', 'seconds'"
    with pytest.raises(ValueError, match=rf"x='epochs' is not known.* {allowed}"):
        plot_runs({"silent": history}, x="epochs")


def titles(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes]


def test_the_distances_are_those_before_the_exchange_unless_all_are_zero() -> None:
    history = measured()
    for row in history.rows:
        if "consensus_distance" in row:
            row.update(consensus_distance=0.0, consensus_distance_before=2 / row["step"])
    loss, before = "loss against optimizer steps", "consensus distance before the exchange"
    figure = plot_runs({"one": history, "other": measured(every=5)})
    assert titles(figure) == [loss, before]
    assert line_of(figure.axes[1], COLOURS[0], marker=True)[1].tolist() == pytest.approx([0.2, 0.1, 2 / 30, 0.05])
    assert len(figure.axes[1].lines) == 1  # the other has none of that name
    for row in history.rows:
        row.update(consensus_distance_before=0.0)
    assert titles(plot_runs({"one": history})) == [loss]
    assert titles(plot_runs({"one": history}, panels=[before := "consensus_distance_before"])) != [before]  # as asked


def test_panels_are_the_loss_and_columns() -> None:
    one, other = measured(num_nodes=21), measured(every=5)
    for row in one.rows[10:]:
        row["val_accuracy"] = row["step"] / STEPS
    runs, panels = {"one": one, "other": other}, ["val_accuracy", "train_losses", "loss"]
    figure = plot_runs(runs, panels=panels, x="seconds", legend="inside")
    assert titles(figure) == ["validation accuracy", "nodes' training losses", "loss against seconds on this machine"]
    accuracy, nodes, _ = figure.axes
    assert len(accuracy.lines) == 1
    np.testing.assert_allclose(line_of(accuracy, COLOURS[0], True), one.series("val_accuracy", "seconds"))
    x, medians = line_of(nodes, COLOURS[0], True)
    np.testing.assert_allclose((x, medians), one.series("train_loss", "seconds"))  # even steps from 0.9 to 1.1
    edges = np.asarray(nodes.collections[0].get_paths()[0].vertices)[:, 1]
    assert (edges.min(), edges.max()) == pytest.approx((0.92 * min(medians), 1.08 * max(medians)))
    texts = [text.get_text() for text in legend_of(accuracy).get_texts()]
    assert texts[:2] == ["one", "other"]
    assert texts[-1] == "10 % to 90 % of the nodes"
    texts = [text.get_text() for text in legend_of(plot_runs({"one": one}, panels=["val_loss"]).axes[0]).get_texts()]
    assert texts == ["one"]  # there is neither a training loss nor a band


def test_simulated_seconds_are_logarithmic_where_runs_differ_tenfold() -> None:
    fast, slow = measured(), measured()
    for row in slow.rows:
        row["sim_seconds"] *= 10
    runs = {"fast": fast, "slow": slow}
    assert plot_runs(runs, x="sim_seconds").axes[0].get_xscale() == "linear"  # exactly ten times
    for row in slow.rows:
        row["sim_seconds"] *= 1.01
    figure = plot_runs(runs, x="sim_seconds")
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "log"]
    assert figure.axes[0].get_title() == "loss against simulated seconds"
    figure.canvas.draw()  # a point at 0 seconds is no part of it
    for x, log_x, expected in (("sim_seconds", False, "linear"), ("bytes", False, "linear"), ("step", True, "log")):
        assert plot_runs(runs, x=x, log_x=log_x).axes[0].get_xscale() == expected


def test_axes_begin_where_curves_differ() -> None:
    """After the first fifth: 4 / (1 + 0.1 step) is 4 at first, 2.2 after 8 steps, and 0.8 in the end."""
    runs = {"one": make_history(), "other": make_history(shift=0.1)}
    low, high = plot_runs(runs, window=1).axes[0].get_ylim()
    assert 2.2 < high < 2.7
    assert low < 0.8
    assert plot_comparison(runs, window=1).axes[0].get_ylim()[1] < 2.7
    assert plot_runs({"one": make_history()}, window=1).axes[0].get_ylim()[1] > 4  # of one run all is shown
    by_bytes = plot_runs(runs, x="bytes", window=1).axes[0]
    assert 100 < by_bytes.get_xlim()[0] < 700  # not where the curves are out of sight, after the first exchange
    axes = plot_runs(runs, window=1, xlim=(30, 40)).axes[0]
    assert axes.get_xlim() == (30, 40)
    assert axes.get_ylim()[1] < 1.6  # about 1 at step 30


@pytest.mark.parametrize(("seconds", "some"), [(1.0, {"4", "5"}), (1e-3, {"0.1", "0.01"})])
def test_seconds_on_networks_are_numbers(seconds: float, some: set[str]) -> None:
    steps = [[Transfer("mean", 10**6 if seconds == 1.0 else 10**5, 2)]] * 3
    priced = {bandwidth: price(steps, Network(bandwidth), Compute(seconds)) for bandwidth in (1e7, 1e8, 1e9)}
    axis = plot_networks({0.0: priced}).axes[0].yaxis
    axis.figure.canvas.draw()
    labels = [tick.get_text() for which in ("major", "minor") for tick in axis.get_ticklabels(which=which)]
    assert some <= set(labels)
    assert not [label for label in labels if "$" in label]


def test_the_legend_is_where_it_was_asked_for() -> None:
    few, many = {"a": make_history()}, {str(i): make_history() for i in range(4)}
    for runs, legend, outside in ((few, None, 0), (few, "outside", 1), (many, None, 1), (many, "inside", 0)):
        figure = plot_runs(runs, legend=legend)
        assert len(figure.legends) == outside
        assert (figure.axes[0].get_legend() is None) == bool(outside)


def test_a_legend_hides_no_curve() -> None:
    """A legend that is asked for may: losses that are everywhere leave no room for it inside."""
    run = History()
    for step in range(1, 400):
        run.append({"step": step, "train_loss": 1.0, "val_loss": 1 + (step % 40) / 10})
    assert [len(plot_runs({"a": run}, legend=legend).legends) for legend in (None, "inside")] == [1, 0]


def test_refuses_what_no_figure_of_runs_can_show() -> None:
    runs = {"one": make_history()}
    with pytest.raises(ValueError, match=r"x='sim_seconds' was not recorded: .* fit\(network=, compute=\)"):
        plot_runs(runs, x="sim_seconds")
    with pytest.raises(ValueError, match=r"panels='val_los' is not known.* did you mean 'val_loss'"):
        plot_runs(runs, panels=["loss", "val_los"])
    with pytest.raises(TypeError, match=r"panels='loss' must be a list of names"):
        plot_runs(runs, panels="loss")
    with pytest.raises(TypeError, match=r"panels=\[\] must be a list"):
        plot_runs(runs, panels=[])
    with pytest.raises(ValueError, match=r"xlim=\(5, 1\) must be two numbers"):
        plot_runs(runs, xlim=(5, 1))
    with pytest.raises(ValueError, match=r"xlim=\(1000, 2000\) is beyond the runs, which end at"):
        plot_runs(runs, xlim=(1000, 2000))
    with pytest.raises(ValueError, match=r"xlim=\(0, 20\) begins at 0 on a logarithmic axis"):
        plot_runs(runs, xlim=(0, 20), log_x=True)
    with pytest.raises(ValueError, match=r"legend='below' is not known.*'inside', 'outside'"):
        plot_runs(runs, legend="below")
    with pytest.raises(TypeError, match=r"log_x=1 must be True or False"):
        plot_runs(runs, log_x=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"plot_runs\(\) has no argument 'xlog'"):
        plot_runs(runs, xlog=True)  # type: ignore[call-arg]


def test_categories_have_colours_of_their_own_and_numbers_shades() -> None:
    names, numbers = line_styles(["a", "b", True]), line_styles([0.1, 0.2, 0.4])
    assert [look["color"] for look in names] == list(COLOURS[:3])
    shades = [look["color"] for look in numbers]
    assert shades[0] == line_styles(list(range(30)))[0]["color"]  # a scale has the same ends however many there are
    assert not set(shades) & set(COLOURS)
    for number in (8, 20):
        assert len({look["color"] for look in line_styles([f"client {i}" for i in range(number)])}) == number
    axes = plot_partition(partition_iid(torch.arange(100) % 10, 5)).axes[0]
    assert len({to_hex(bars[0].get_facecolor()) for bars in axes.containers}) == 10
    assert colours_of(range(10), categories=True) != colours_of(range(10), categories=False)


def test_trainer_plot(tmp_path: Any) -> None:
    trainer, _ = fit("MLP", "DiLoCo", max_steps=3, val=dataset("MLP", 8))
    assert titles(trainer.plot(panels=["val_loss"])) == ["validation loss"]
    figure = trainer.plot(tmp_path / "made" / "run.png", x="seconds", title="a run")
    assert (tmp_path / "made" / "run.png").read_bytes().startswith(b"\x89PNG")
    assert figure.axes[0].get_xlabel() == "seconds on this machine"
    with pytest.raises(ValueError, match="has no step to plot"):
        Trainer(trainer.model, dataset("MLP")).plot()
