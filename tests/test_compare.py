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

from vecgym import History, SweepResult, Trainer, VecgymWarning, compare, sweep
from vecgym.models import Classifier
from vecgym.plot import plot_axis, plot_differences, plot_heatmap, plot_pareto
from vecgym.records.rows import averaged, compared, difference, t_quantile
from vecgym.strategy import DiLoCoStrategy, FedAvgStrategy, FedNovaStrategy, Strategy


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
    head, _, base, other = str(result.compare("kind")).partition("\n\n")[0].splitlines()
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
        ({"axis": "lr", "column": "valloss"}, "column='valloss' is not a column; did you mean 'val_loss'"),
        ({"axis": "lr", "column": "sim_seconds"}, "column='sim_seconds' is not a column"),
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


EVERYTHING = "The seeds vary the initial weights, the order of the data, the partition and masks."


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_has_means_and_spreads(result: SweepResult) -> None:
    lines = result.table(column=["val_loss", "bytes_total"]).splitlines()
    assert cells(lines[0]) == ["kind", "lr", "val_loss", "bytes_total"]
    assert lines[-3:] == ["", "± over 5 seeds: standard deviation.", EVERYTHING]
    shown = [cells(line) for line in lines[2:-3]]
    best = result.best()
    for i, (kind, lr, loss, _) in enumerate(shown):
        losses = np.array([row["val_loss"] for row in result.rows[5 * i : 5 * i + 5]])
        is_best = (kind, float(lr)) == (best["kind"].__name__, best["lr"])
        assert (loss[:2] == "**") == (loss[-2:] == "**") == is_best
        mean, spread = map(float, loss.strip("*").split(" ± "))
        assert spread == pytest.approx(losses.std(ddof=1), rel=0.06)
        assert mean == pytest.approx(losses.mean(), abs=spread / 10)
    assert {row[3] for row in shown} == {"1.19 kB"}  # two all-reduces of 99 parameters, whatever the seed
    assert len(result.table(over=None).splitlines()) == 2 + 20 + 2
    assert "±" not in result.table(over=None)
    assert "status" not in lines[0]


def test_a_table_for_latex(result: SweepResult) -> None:
    lines = result.table("latex", column=["val_loss"], where={"lr": 0.01}).splitlines()
    assert lines[:5] == ["% ± over 5 seeds: standard deviation.", f"% {EVERYTHING}", r"\begin{tabular}{rrr}",
                         r"\toprule", r"kind & lr & validation loss \\"]  # fmt: skip
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    rows = lines[6:-2]
    assert len(rows) == 2
    assert all(r" $\pm$ " in line and line.endswith(r" \\") for line in rows)
    assert [r"\textbf{" in line for line in rows].count(True) == 1
    named = run({"a_b": ["50% & #1", "x_y"]}, strategy=lambda a_b: make(FedAvgStrategy))
    text = named.table("latex", column=["val_loss"])
    assert r"a\_b & validation loss \\" in text
    assert r"50\% \& \#1 & " in text
    assert "±" not in text


def test_a_diverged_configuration_is_never_bold(broken: SweepResult) -> None:
    lines = [cells(line) for line in broken.table().splitlines()[:-3]]
    status = lines[0].index("status")
    assert [line[status] for line in lines[2:]] == ["finished", "diverged", "diverged"]
    assert [any("**" in cell for cell in line) for line in lines[2:]] == [True, False, False]


def test_tables_that_are_refused(result: SweepResult) -> None:
    with pytest.raises(
        ValueError, match=r"form='tex' is not known; did you mean 'latex'\? Allowed: 'markdown', 'latex'"
    ):
        result.table("tex")
    with pytest.raises(ValueError, match="column='loss' is not a column"):
        result.table(column=["loss"])
    with pytest.raises(TypeError, match="column is of type int; give a name, or a list of such"):
        result.table(column=5)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------- what a comparison rests on


SEEDS: dict[str, tuple[Any, str]] = {
    "a module": (mlp(0), "all runs begin with those of the one model that was given"),
    "a function of something else": (lambda lr: mlp(0), "model= is a function that does not take the seed"),
    "a function that forgets its seed": (lambda seed: mlp(0), "model= returns the same ones for every seed"),
}


def seeded(model: Any, **settings: Any) -> SweepResult:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    common = {"num_nodes": 2, "max_steps": 4, "batch_size": 8, "device": "cpu", "progress": False}
    given: Any = {"grid": {"lr": [0.1, 0.2], "seed": range(3)}, **common, **settings}
    return sweep(model, data, data, strategy=lambda lr: make(FedAvgStrategy, lr), **given)


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_that_leave_the_weights_alone_are_told(name: str) -> None:
    model, why = SEEDS[name]
    with pytest.warns(VecgymWarning, match=rf"do not vary the initial weights: {why}.*model=lambda seed: make\(seed\)"):
        found = seeded(model)
    note = "The seeds vary the order of the data, the partition and masks; they do not vary the initial weights."
    assert found.table().splitlines()[-1] == note
    assert found.compare("lr").notes[0] == note
    assert str(found.compare("lr")).partition("\n\n")[2].splitlines()[0] == note
    figures: list[Any] = [found.plot("lr"), found.plot("lr", baseline=0.1), found.plot_pareto()]
    figures.append(found.plot_heatmap("lr", "seed"))
    assert [" ".join(figure.get_supxlabel().split()) for figure in figures] == [note] * 4


def test_seeds_that_vary_everything_or_nothing_random_are_not_told() -> None:
    assert EVERYTHING in seeded(mlp).table()
    zeros = mlp(0)
    for p in zeros.parameters():
        p.data.zero_()
    seeded(zeros)  # nothing random in these weights
    seeded(mlp(0), points=[{"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 1}], grid=None)  # no two seeds of one point
    seeded(mlp(0), grid={"lr": [0.1, 0.2]}, seed=3)
    still = seeded(mlp, shuffle=False).table().splitlines()[-1]
    assert still.endswith("initial weights and masks; they do not vary the order of the data or the partition.")
    trials = seeded(lambda trial: mlp(trial), grid={"lr": [0.1], "trial": range(3)})
    line = trials.table(over="trial").splitlines()[-1]
    assert line.startswith("The trials vary the initial weights; they do not vary the order of the data,")


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """... of many initial weights, if the seeds vary these; and seldom where all runs begin with one model's."""
    x = torch.randn(1024, 20, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :4].argmax(1))

    def net(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Classifier(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4)))

    def gap(model: Any, seeds: Any) -> Any:
        found = sweep(
            model, data, data, strategy=lambda H: DiLoCoStrategy("adamw", H=H, lr=3e-3), num_nodes=4, max_steps=60,
            grid={"H": [5, 20], "seed": seeds}, batch_size=16, device="cpu", progress=False,
        )  # fmt: skip
        return found.compare("H")[1]

    truth = gap(net, range(100))["difference"]
    varied = [gap(net, range(1000 + 5 * i, 1005 + 5 * i)) for i in range(40)]
    inside = sum(row["low"] <= truth <= row["high"] for row in varied)
    assert 34 <= inside <= 40, "38 are expected, and fewer than 34 in 1 of 70 such tests"
    with pytest.warns(VecgymWarning, match="do not vary the initial weights"):
        fixed = [gap(net(100 + i), range(1000 + 5 * i, 1005 + 5 * i)) for i in range(12)]
    assert sum(row["low"] <= truth <= row["high"] for row in fixed) <= 6


LOSSES = {0.1: (3.0, 1.0, 3.1), 0.2: (2.0, 2.1, 2.0), 0.3: (4.0, 4.0, 4.0)}  # H=1; H=2: 1 more, and 0.1 at seed 0


def told(result: SweepResult) -> SweepResult:
    """The losses of a sweep are made up: by lr, for three seeds."""
    for curve, config in zip(result._runner.curves.values(), result._runner.configs):
        H, lr, seed = (config.point[name] for name in ("H", "lr", "seed"))
        curve.last["val_loss"] = LOSSES[lr][seed] + (H == 2) * (1 + 0.1 * (seed == 0))
    return result


@pytest.fixture(scope="module")
def made_up() -> SweepResult:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    return told(sweep(
        mlp, data, data, strategy=lambda H, lr: DiLoCoStrategy("sgd", H=H, lr=lr), num_nodes=2, max_steps=2,
        grid={"H": [1, 2], "lr": list(LOSSES), "seed": range(3)}, batch_size=8, device="cpu", progress=False,
    ))  # fmt: skip


def test_seeds_set_apart_compare_what_the_others_chose(made_up: SweepResult) -> None:
    together = made_up.compare("H")
    assert [row["lr"] for row in together] == [0.2, 0.2]  # 2.03, of three seeds
    assert "chosen by the same seeds and validation set" in together.notes[-1]
    apart = made_up.compare("H", holdout=[1])
    assert [row["lr"] for row in apart] == [0.2, 0.2]
    assert [row["val_loss"] for row in apart] == pytest.approx([2.1, 3.1])  # of seed 1 alone
    lucky = made_up.compare("H", holdout=(0, 2))  # seed 1 chooses lr=0.1
    assert [row["lr"] for row in lucky] == [0.1, 0.1]
    assert [row["val_loss"] for row in lucky] == pytest.approx([3.05, 4.1])
    assert (lucky[1]["difference"], lucky[1]["seeds"]) == (pytest.approx(1.05), 2)
    assert not any("chosen by the same" in note for note in lucky.notes)
    assert "2 seeds are few: give 5 or more." in lucky.notes


def test_the_best_at_the_edge_of_an_axis_and_few_seeds_are_told(made_up: SweepResult) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made_up.best()["lr"] == 0.2
    edge = "lr=0.1, the best{}, is the smallest that was tried: there may be better values beyond it."
    assert edge.format(" for H=1 and H=2") in made_up.compare("H", holdout=[0, 2]).notes
    assert edge.format("") in made_up.compare("lr", where={"seed": 1}).notes
    assert not any("lr=" in note for note in made_up.compare("H").notes)
    with pytest.warns(VecgymWarning, match=r"^lr=0\.1, the best, is the smallest .* flatters, as it was chosen"):
        made_up.best(over=None)
    with pytest.warns(VecgymWarning, match=r"^2 seeds are few: give 5 or more"):
        made_up.best(where={"seed": lambda seed: seed != 1})


@pytest.mark.parametrize(
    ("holdout", "kind", "message"),
    [
        ([7], ValueError, "holdout has 7, which is not a value of 'seed': there are 0, 1 and 2"),
        ([0, 1, 2], ValueError, "holdout has 3 of 3 seeds: set some apart, and leave some"),
        ([], ValueError, "holdout has 0 of 3 seeds"),
        (2, TypeError, r"holdout is of type int; give a list of values of 'seed': \[1, 2\]"),
        (torch.tensor(1), TypeError, "holdout is of type Tensor; give a list of values"),
    ],
)
def test_seeds_that_cannot_be_set_apart(
    made_up: SweepResult, holdout: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        made_up.compare("H", holdout=holdout)
    with pytest.raises(ValueError, match="leave out best=False"):
        made_up.compare("H", holdout=[1], best=False)


def test_a_column_has_one_name(made_up: SweepResult) -> None:
    """Other names are refused, with a list of all."""
    rows: Any = made_up.rows
    calls: list[tuple[Any, str, dict[str, Any]]] = [
        (made_up.compare, "metric", {"axis": "H"}), (made_up.table, "columns", {}), (made_up.plot, "y", {"x": "H"}),
        (made_up.plot_heatmap, "value", {"x": "H", "y": "lr"}), (made_up.plot_pareto, "y", {}),
        (plot_axis, "y", {"rows": rows, "x": "H"}), (plot_pareto, "y", {"rows": rows}),
        (plot_differences, "y", {"rows": rows, "x": "H", "baseline": 1}),
        (plot_heatmap, "value", {"rows": rows, "x": "H", "y": "lr"}),
    ]  # fmt: skip
    for call, old, given in calls:
        with pytest.raises(TypeError, match=f"argument '{old}'.*column"):
            call(**given, **{old: "val_loss"})
        call(**given, column="val_loss")
    assert made_up.table(column="val_loss") == made_up.table(column=["val_loss"])


# ---------------------------------------------------------------------------------------- separate runs


def fitted(kind: type[Strategy], seed: int, model: nn.Module | None = None) -> History:
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    trainer = Trainer(mlp(seed) if model is None else model, data, data)
    trainer.fit(make(kind), 4, max_steps=8, batch_size=8, device="cpu", progress=False, seed=seed)
    return trainer.history


def test_separate_runs_are_compared_as_those_of_a_sweep(result: SweepResult) -> None:
    runs = {kind.__name__: [fitted(kind, seed) for seed in range(5)] for kind in (FedAvgStrategy, DiLoCoStrategy)}
    of_sweep = result.compare("kind", where={"lr": 0.01})
    for given in (runs, {name: (result.history(i) for i in range(first, first + 5)) for name, first in
                         (("FedAvgStrategy", 5), ("DiLoCoStrategy", 15))}):  # fmt: skip
        for row, expected in zip(compare(given), of_sweep, strict=True):
            assert row["run"] == expected["kind"]
            for name in ("val_loss", "difference", "standard_error", "low", "high", "seeds"):
                if expected[name] is not None:
                    assert row[name] == pytest.approx(expected[name], rel=1e-3), name
    assert compare(runs).notes == ["The seeds vary the initial weights, the order of the data and masks."]
    other = compare(runs, "val_accuracy", baseline="DiLoCoStrategy", paired=False)
    assert [row["difference"] is None for row in other] == [False, True]


def test_what_separate_runs_must_have() -> None:
    def of(loss: float, seed: Any = 0, **settings: Any) -> History:
        return History({"seed": seed, **settings}, [{"step": 0, "val_loss": 3.0 + loss}, {"step": 2, "val_loss": loss}])

    two = [of(1.0), of(2.0, 1)]
    refused: list[tuple[Any, type[Exception], str]] = [
        ([of(1.0)], TypeError, "runs is of type list; give histories by name"),
        ({"a": two}, ValueError, "runs has 1 name; compare needs two"),
        ({"a": two, "b": of(1.0)}, TypeError, r"runs\['b'\] is of type History; give a list"),
        ({"a": two, "b": torch.tensor(1.0)}, TypeError, r"runs\['b'\] is of type Tensor; give a list"),
        ({"a": two, "b": [1.0]}, TypeError, r"runs\['b'\]\[0\] is of type float; give"),
        ({"a": two, "b": []}, ValueError, r"runs\['b'\] has the seeds \[\]; give one history for each"),
        ({"a": two, "b": [of(1.0), of(2.0)]}, ValueError, r"runs\['b'\] has the seeds \[0, 0\]"),
        ({"a": two, "b": [of(1.0, None)]}, ValueError, r"runs\['b'\] has the seeds \[None\]"),
    ]
    for given, kind, message in refused:
        with pytest.raises(kind, match=message):
            compare(given)
    with pytest.raises(ValueError, match="column='val_los' is not a column; did you mean 'val_loss'"):
        compare({"a": two, "b": two}, "val_los")
    with pytest.raises(ValueError, match="baseline='c' is not known"):
        compare({"a": two, "b": two}, baseline="c")
    with pytest.warns(VecgymWarning, match="the runs of 'b' differ in num_nodes, not only in their seeds"):
        compare({"a": two, "b": [of(1.0, num_nodes=2), of(2.0, 1, num_nodes=4)]})
    with pytest.warns(VecgymWarning, match="not vary the initial weights: .* the same validation loss"):
        compare({"a": [of(0.0), of(0.0, 1)], "b": [of(1.0), of(1.0, 1)]})
    broken = of(1.0, 1)
    broken.append({"step": 3, "train_loss": math.nan})
    with pytest.warns(VecgymWarning, match="b is compared without 1 of 2 seeds|b.* without 1 of 2"):
        assert compare({"a": two, "b": [of(2.5), broken]})[1]["difference"] == 1.5


def test_a_run_in_whose_last_step_nobody_trained_has_not_diverged() -> None:
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
    data, runs = TensorDataset(x, x[:, :3].argmax(1)), dict[str, list[History]]()
    for lr in (0.1, 0.2):
        strategy = FedNovaStrategy("sgd", local_steps=[1, 3], participation=0.5, lr=lr)
        for seed in (0, 1):  # in the second round only node 0 takes part, which rests after its first step
            trainer = Trainer(mlp(seed), data, data)
            trainer.fit(strategy, 2, max_steps=6, batch_size=8, device="cpu", progress=False, seed=seed)
            assert math.isnan(trainer.history["train_loss"][-1])
            runs.setdefault(str(lr), []).append(trainer.history)
    assert [row["seeds"] for row in compare(runs)] == [2, 2]
