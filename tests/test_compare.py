"""Differences over seeds: `SweepResult.compare`, its bands in figures, and tables of means and spreads."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from vecgym import SweepResult, VecgymWarning, sweep
from vecgym.models import Classifier
from vecgym.plot import plot_differences
from vecgym.records.rows import averaged, compared, difference, t_quantile
from vecgym.strategy import DiLoCoStrategy, FedAvgStrategy, Strategy


def make(kind: type[Strategy], lr: float = 0.01) -> Strategy:
    return kind("adamw", H=4, lr=lr)  # type: ignore[call-arg]


def mlp(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = Classifier(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 2
    return model


def run(grid: Mapping[str, Any], **settings: Any) -> SweepResult:
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    common = {"num_nodes": 4, "max_steps": 8, "batch_size": 8, "device": "cpu", "progress": False}
    given: Any = {"strategy": make, **common, **settings}
    return sweep(mlp if "seed" in grid else mlp(0), data, data, grid=grid, **given)


@pytest.fixture(scope="module")
def result() -> SweepResult:
    return run({"kind": [FedAvgStrategy, DiLoCoStrategy], "lr": [0.003, 0.01], "seed": range(5)})


@pytest.fixture(scope="module")
def broken() -> SweepResult:
    """Of which one value diverges, and so does one seed of another."""
    found = run({"lr": [0.01, 0.02, 1e30], "seed": range(4)}, strategy=lambda lr: make(FedAvgStrategy, lr))
    found._runner.curves[5].status = "diverged"  # lr=0.02, seed 1
    return found


# ------------------------------------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize(
    ("degrees", "expected"),  # from tables of Student's distribution
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (9, 2.26216),
        (30, 2.04227),
        (120, 1.97993),
        (1e6, 1.95997),
    ],
)
def test_quantiles_are_those_of_the_tables(degrees: float, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=6e-6 if degrees > 1 else 6e-5)


def test_quantiles_and_intervals_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1.0, 1.3, 2.5, 7.9, 55.5, 4321.0):
        assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-10)
    draws = random.Random(0)
    a, b = ({seed: draws.gauss(0, scale) for seed in range(size)} for scale, size in ((1.0, 5), (3.0, 8)))
    welch = stats.ttest_ind([*a.values()], [*b.values()], equal_var=False)
    found = difference(a, b, paired=False)
    assert found.difference / found.standard_error == pytest.approx(welch.statistic)
    interval = welch.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    b = {seed: b[seed] for seed in a}
    paired = stats.ttest_rel([*a.values()], [*b.values()])
    found, interval = difference(a, b), paired.confidence_interval()
    assert found.difference / found.standard_error == pytest.approx(paired.statistic)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.seeds == 5


def test_the_interval_has_the_difference_in_it_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0)
    seeds, gaps = draws.normal(size=(1000, 4)) * 10, draws.normal(0.5, 1.0, size=(1000, 4))
    intervals = [difference(dict(enumerate(s + g)), dict(enumerate(s))) for s, g in zip(seeds, gaps)]
    assert 0.93 < np.mean([x.low < 0.5 < x.high for x in intervals]) < 0.97


def test_few_seeds_and_equal_runs() -> None:
    one = difference({0: 2.0}, {0: 1.5})
    assert (one.difference, one.seeds) == (0.5, 1)
    assert all(math.isnan(x) for x in (one.standard_error, one.low, one.high))
    assert difference({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0}) == (1.0, 0.0, 1.0, 1.0, 2, 0)
    assert difference({0: 2.0, 1: 2.0}, {0: 1.0, 1: 1.0}, paired=False)[:4] == (1.0, 0.0, 1.0, 1.0)


# ----------------------------------------------------------------------------------------------- compare


def test_it_is_the_paired_difference_of_the_best(result: SweepResult) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base, other = result.compare("kind")
    losses = {}
    for name, kind in (("base", FedAvgStrategy), ("other", DiLoCoStrategy)):
        best = result.best(where={"kind": kind})
        rows = [row for row in result.rows if row["kind"] is kind and row["lr"] == best["lr"]]
        losses[name] = np.array([row["val_loss"] for row in rows])
    assert (base["kind"], base["lr"], base["difference"], base["seeds"]) == ("FedAvgStrategy", 0.01, None, 5)
    assert base["val_loss"] == pytest.approx(losses["base"].mean())
    gaps = losses["other"] - losses["base"]
    assert (other["kind"], other["seeds"], other["left_out"]) == ("DiLoCoStrategy", 5, 0)
    assert other["difference"] == pytest.approx(gaps.mean())
    assert other["standard_error"] == pytest.approx(gaps.std(ddof=1) / math.sqrt(5))
    assert other["high"] - other["difference"] == pytest.approx(2.776445 * other["standard_error"])
    assert other["difference"] - other["low"] == pytest.approx(2.776445 * other["standard_error"])


def test_pairs_tell_apart_what_means_do_not() -> None:
    result = run({"lr": [0.01, 0.0105], "seed": range(6)}, strategy=lambda lr: make(FedAvgStrategy, lr))
    paired, apart = (result.compare("lr", paired=paired)[1] for paired in (True, False))
    assert paired["difference"] == pytest.approx(apart["difference"])
    assert paired["standard_error"] < apart["standard_error"] / 10
    assert not paired["low"] < 0 < paired["high"]
    assert apart["low"] < 0 < apart["high"]


def test_at_each_value_of_the_other_axes(result: SweepResult) -> None:
    rows = result.compare("kind", "train_loss", baseline=DiLoCoStrategy, best=False)
    assert [(row["kind"], row["lr"], row["difference"] is None) for row in rows] == [
        ("FedAvgStrategy", 0.003, False), ("FedAvgStrategy", 0.01, False),
        ("DiLoCoStrategy", 0.003, True), ("DiLoCoStrategy", 0.01, True),
    ]  # fmt: skip
    own = result.compare("kind", "train_loss", baseline="DiLoCoStrategy", where={"lr": 0.003})
    assert rows[0] == own[0]
    assert rows[0]["difference"] == pytest.approx(rows[0]["train_loss"] - rows[2]["train_loss"])


def test_a_baseline_may_be_any_object_or_its_label() -> None:
    rules = [lambda: 0.003, lambda: 0.01, lambda: 0.02]
    result = run({"rule": rules, "seed": [0, 1]}, strategy=lambda rule: make(FedAvgStrategy, rule()))
    for baseline in (rules[1], "lambda 2"):
        rows = result.compare("rule", baseline=baseline)
        assert [row["difference"] is None for row in rows] == [False, True, False]
    assert [row["difference"] is None for row in result.compare("rule")] == [True, False, False]


def test_it_prints_as_a_table(result: SweepResult) -> None:
    row = result.compare("kind")[1]
    head, _, base, other = str(result.compare("kind")).splitlines()
    names = ["kind", "lr", "val_loss", "difference", "standard error", "95 % interval", "seeds"]
    assert [cell.strip() for cell in head.strip("|").split("|")] == names
    assert base.split("|")[4].strip() == ""
    cells = [cell.strip() for cell in other.strip("|").split("|")]
    assert cells[0] == "DiLoCoStrategy"
    assert float(cells[3]) == pytest.approx(row["difference"], abs=row["standard_error"])
    assert cells[3][0] in "+-"
    assert [float(x) for x in cells[5].split(" to ")] == pytest.approx([row["low"], row["high"]], rel=0.1)
    assert cells[6] == "5"


def test_seeds_that_are_not_shared_are_said() -> None:
    rows = [
        {"H": H, "seed": seed, "val_loss": H + seed + 0.1 * H * seed}
        for H, seeds in ((1, (0, 1, 2)), (2, (1, 2, 3)), (3, (7, 8))) for seed in seeds
    ]  # fmt: skip
    with pytest.warns(VecgymWarning) as caught:
        _, some, none = compared(rows, "H", "val_loss", 1, over="seed")
    some_, none_ = (str(warning.message) for warning in caught)
    assert "H=2 has 3 seeds and the baseline 3, of which they share 2: only these are compared" in some_
    assert "H=3 has 2 seeds and the baseline 3, of which they share 0: the difference is not paired" in none_
    assert "Give both the same seeds" in none_
    assert (some["seeds"], none["seeds"]) == (2, 2)
    assert some["difference"] == pytest.approx(1 + 0.15)
    assert none["difference"] == pytest.approx(3 + 7.5 + 0.3 * 7.5 - (1 + 1 + 0.1))
    assert none["standard_error"] > 0.5


def test_diverged_runs_are_left_out_and_said(broken: SweepResult) -> None:
    with pytest.warns(VecgymWarning) as caught:
        base, some, none = broken.compare("lr")
    assert [str(warning.message).split(", in which")[0] for warning in caught] == [
        "lr=0.02 is compared without 1 of 4 seeds", "lr=1e+30 is compared without 4 of 4 seeds",
    ]  # fmt: skip
    rows = broken.rows
    assert (base["seeds"], some["seeds"], some["left_out"], none["seeds"], none["left_out"]) == (4, 3, 1, 0, 4)
    assert some["difference"] == pytest.approx(
        np.mean([rows[4 + i]["val_loss"] - rows[i]["val_loss"] for i in (0, 2, 3)])
    )
    assert math.isnan(none["difference"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = str(broken.compare("lr"))
    assert "3 (1 left out)" in text
    assert "0 (4 left out)" in text
    assert "+nan" not in text


def test_a_configuration_with_a_diverged_seed_is_not_the_best() -> None:
    rows = [
        {"kind": kind, "lr": lr, "seed": seed, "val_loss": lr, "status": "finished"}
        for kind in "ab" for lr in (0.1, 0.2) for seed in (0, 1)
    ]  # fmt: skip
    rows[5]["status"] = "diverged"  # b, lr=0.1, although it has a number from before
    assert [row["lr"] for row in compared(rows, "kind", "val_loss", "a", over="seed")] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axis": "lrs"}, "axis='lrs' is not known; did you mean 'lr'"),
        ({"axis": "lr", "metric": "valloss"}, "metric='valloss' is not a column; did you mean 'val_loss'"),
        ({"axis": "lr", "metric": "sim_seconds"}, "metric='sim_seconds' is not a column"),
        ({"axis": "lr", "baseline": 0.5}, "baseline=0.5 is not a value of 'lr', which has 0.003, 0.01"),
        (
            {"axis": "kind", "baseline": Strategy},
            "baseline='Strategy' is not a value of 'kind', which has FedAvgStrategy,",
        ),
        ({"axis": "seed"}, r"over='seed' is not an axis besides 'seed': .*grid\[\"seed\"\]=range\(5\)"),
        ({"axis": "lr", "over": None}, "over=None is not an axis"),
        ({"axis": "lr", "over": "sed"}, "over='sed' is not known; did you mean 'seed'"),
        ({"axis": "lr", "where": {"lr": 7}}, "there is no row where lr is 7"),
    ],
)
def test_what_cannot_be_compared(result: SweepResult, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        result.compare(**given)
    with pytest.raises(TypeError, match="best='no' must be True or False"):
        result.compare("lr", best="no")  # type: ignore[arg-type]


def test_without_seeds_or_numbers() -> None:
    alone = run({"lr": [0.01, 0.02]}, strategy=lambda lr: make(FedAvgStrategy, lr))
    with pytest.raises(ValueError, match="over='seed' is not an axis besides 'lr': compare needs several runs"):
        alone.compare("lr")
    planned = run({"lr": [0.01], "seed": [0, 1]}, strategy=lambda lr: make(FedAvgStrategy, lr), dry_run=True)
    with pytest.raises(ValueError, match="no configuration that finished has a number as 'val_loss'"):
        planned.compare("lr")


def test_what_a_run_took_is_no_axis() -> None:
    rows = [
        {"lr": lr, "seed": seed, "status": "finished", "val_loss": lr + seed, "sim_seconds": 3.0 + seed,
         "sim_utilization": 0.5 + 0.1 * seed} for lr in (0.1, 0.2) for seed in (0, 1)
    ]  # fmt: skip
    assert [row["sim_utilization"] for row in averaged(rows, "seed")] == [0.55, 0.55]
    assert [row["seeds"] for row in compared(rows, "lr", "sim_seconds", 0.1, over="seed")] == [2, 2]


# ------------------------------------------------------------------------------------------------ figures


def test_the_bands_of_the_figure_are_the_intervals(result: SweepResult) -> None:
    axes: Any = result.plot("lr", hue="kind", baseline=FedAvgStrategy).axes[0]
    base, other = axes.lines[:2]
    assert base.get_ydata().tolist() == [0.0, 0.0]
    rows = [result.compare("kind", where={"lr": lr})[1] for lr in (0.003, 0.01)]
    assert other.get_ydata().tolist() == pytest.approx([row["difference"] for row in rows])
    [band] = axes.collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert max(ends) == pytest.approx(max(row["high"] for row in rows))
    assert min(ends) == pytest.approx(min(row["low"] for row in rows))
    title = axes.figure.get_suptitle()
    assert title == (
        "validation loss less that of kind = FedAvgStrategy at the same seed,\nmean and 95 % interval over 5 seeds"
    )


def test_without_hue_the_baseline_is_a_value_of_x(result: SweepResult) -> None:
    axes: Any = result.plot("lr", baseline=0.01, where={"kind": DiLoCoStrategy}).axes[0]
    gap = result.compare("lr", baseline=0.01, where={"kind": DiLoCoStrategy})[0]["difference"]
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([gap, 0.0])


def test_what_has_no_differences_is_refused(result: SweepResult) -> None:
    for given, message in (
        ({"x": "lr", "baseline": 7}, "baseline=7 is not a value of 'lr', which has 0.003, 0.01"),
        ({"x": "lr", "hue": "kinds", "baseline": 7}, "hue='kinds' is not known; did you mean 'kind'"),
        ({"x": "lr", "hue": "kind", "over": None, "baseline": FedAvgStrategy}, "over=None is not an axis besides"),
        ({"x": "seed", "hue": "kind", "baseline": FedAvgStrategy}, "over='seed' is not an axis besides x and hue"),
    ):
        with pytest.raises(ValueError, match=message):
            result.plot(**given)
    with pytest.raises(ValueError, match=r"baseline=3 is not a value of 'lr', which has 0\.1"):
        plot_differences([{"lr": 0.1, "seed": 0, "val_loss": 1.0}], "lr", baseline=3)


# ------------------------------------------------------------------------------------------------- tables


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_has_means_and_spreads(result: SweepResult) -> None:
    lines = result.table(columns=["val_loss", "bytes_total"]).splitlines()
    assert cells(lines[0]) == ["kind", "lr", "val_loss", "bytes_total"]
    assert lines[-2:] == ["", "± over 5 seeds: standard deviation"]
    shown = [cells(line) for line in lines[2:-2]]
    best = result.best()
    for i, (kind, lr, loss, _) in enumerate(shown):
        losses = np.array([row["val_loss"] for row in result.rows[5 * i : 5 * i + 5]])
        is_best = (kind, float(lr)) == (best["kind"].__name__, best["lr"])
        assert (loss[:2] == "**") == (loss[-2:] == "**") == is_best
        mean, spread = map(float, loss.strip("*").split(" ± "))
        assert spread == pytest.approx(losses.std(ddof=1), rel=0.06)
        assert mean == pytest.approx(losses.mean(), abs=spread / 10)
    assert {row[3] for row in shown} == {"1.19 kB"}  # two all-reduces of 99 parameters, whatever the seed
    assert len(result.table(over=None).splitlines()) == 2 + 20
    assert "±" not in result.table(over=None)
    assert "status" not in lines[0]


def test_a_table_for_latex(result: SweepResult) -> None:
    lines = result.table("latex", columns=["val_loss"], where={"lr": 0.01}).splitlines()
    assert lines[:4] == ["% ± over 5 seeds: standard deviation", r"\begin{tabular}{rrr}", r"\toprule",
                         r"kind & lr & validation loss \\"]  # fmt: skip
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    rows = lines[5:-2]
    assert len(rows) == 2
    assert all(r" $\pm$ " in line and line.endswith(r" \\") for line in rows)
    assert [r"\textbf{" in line for line in rows].count(True) == 1
    named = run({"a_b": ["50% & #1", "x_y"]}, strategy=lambda a_b: make(FedAvgStrategy))
    text = named.table("latex", columns=["val_loss"])
    assert r"a\_b & validation loss \\" in text
    assert r"50\% \& \#1 & " in text
    assert "±" not in text


def test_a_diverged_configuration_is_never_bold(broken: SweepResult) -> None:
    lines = [cells(line) for line in broken.table().splitlines()[:-2]]
    status = lines[0].index("status")
    assert [line[status] for line in lines[2:]] == ["finished", "diverged", "diverged"]
    assert [any("**" in cell for cell in line) for line in lines[2:]] == [True, False, False]


def test_tables_that_are_refused(result: SweepResult) -> None:
    with pytest.raises(
        ValueError, match=r"form='tex' is not known; did you mean 'latex'\? Allowed: 'markdown', 'latex'"
    ):
        result.table("tex")
    with pytest.raises(ValueError, match="columns='loss' is not a column"):
        result.table(columns=["loss"])
    with pytest.raises(TypeError, match="columns is of type int; give a list of names"):
        result.table(columns=5)  # type: ignore[arg-type]
