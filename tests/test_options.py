"""The options of a run: written once, flat or in groups, shown and checked alike."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.fitting import dataset
from tests.models import make_model
from vecgym import CSVLogger, Trainer, clock, compress, dry_run, models, sweep
from vecgym.data import partition_dirichlet
from vecgym.meta.learning import LearnOptions, learn
from vecgym.runs.influence import InfluenceOptions, influence
from vecgym.runs.memory import MemoryOptions, estimate_memory
from vecgym.runs.options import FitOptions, JvpOptions, RolloutOptions
from vecgym.runs.rollout import rollout, rollout_jvp
from vecgym.runs.verification import VerifyOptions, verify
from vecgym.strategy import MLA, AllReduceStrategy, AveragingCommunicator, Exchange, Mean
from vecgym.sweeps.options import SweepOptions


def options(**given: Any) -> FitOptions:
    return FitOptions(AllReduceStrategy("sgd", lr=0.1), 4, **given)


def values(given: FitOptions) -> dict[str, Any]:
    return {name: value for name, value in vars(given).items() if name != "strategy"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: options(resume=True), "resume=True needs save_dir"),
        (lambda: options(checkpoint_interval=3), "checkpoint_interval=3 needs save_dir"),
        (lambda: options(num_processes=2), "num_processes=2 with backend='stacked' has no effect"),
        (lambda: options(backend="process"), "did you mean 'processes'"),
        (lambda: options(chunk_size=0), "chunk_size=0 must be an integer >= 1, or None: None lets vecgym choose"),
        (lambda: options(backend="processes", num_processes=3), "num_processes=3 must divide num_nodes=4"),
    ],
)
def test_options_are_checked_where_they_are_made(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_settled_options_can_be_settled_again() -> None:
    given = options(gradient_accumulation=4, save_dir="runs")
    assert (given.minibatch_size, given.gradient_accumulation) == (4, None)
    assert values(replace(given, seed=42)) == values(given)


WITH_OPTIONS: list[tuple[Any, Any]] = [
    (Trainer.fit, FitOptions),
    (sweep, SweepOptions),
    (estimate_memory, MemoryOptions),
    (rollout, RolloutOptions),
    (rollout_jvp, JvpOptions),
    (influence, InfluenceOptions),
    (learn, LearnOptions),
    (verify, VerifyOptions),
]


@pytest.mark.parametrize(("function", "cls"), WITH_OPTIONS, ids=lambda x: x.__name__)
def test_all_options_are_shown_and_documented_once(function: Any, cls: Any) -> None:
    names = [field.name for field in fields(cls)]
    shown = [name for name in inspect.signature(function).parameters if name != "self"]
    assert sorted(shown) == sorted(names)
    section = re.search(r"Args:\n(.*?)\n\n(Returns|Raises)", function.__doc__ or "", re.DOTALL)
    assert section is not None
    documented = ", ".join(re.findall(r"^    (\w[\w, ]*):", section[1], re.MULTILINE)).split(", ")
    assert sorted(documented) == sorted(names)


def test_an_unknown_option_names_the_one_that_was_meant() -> None:
    trainer: Any = Trainer(make_model("MLP"), dataset("MLP"))
    with pytest.raises(TypeError, match=r"fit\(\) has no argument 'batchsize'; did you mean 'batch_size'\?"):
        trainer.fit(AllReduceStrategy(), 2, batchsize=4)
    with pytest.raises(TypeError, match=r"fit\(\): missing a required argument: 'num_nodes'"):
        trainer.fit(AllReduceStrategy())
    with pytest.raises(TypeError, match=r"sweep\(\) has no argument 'max_step'; did you mean 'max_steps'\?"):
        sweep(make_model("MLP"), dataset("MLP"), grid={"lr": [0.1]}, max_step=4)  # type: ignore[call-arg]


class Own(Mean):
    def __init__(self, island: int = 2) -> None:
        super().__init__(island)


@pytest.mark.parametrize(
    ("function", "given", "meant"),
    [
        (Trainer, "val_datset", "val_dataset"), (dry_run, "num_node", "num_nodes"),
        (clock.price, "num_node", "num_nodes"), (clock.Network, "latancy", "latency"),
        (clock.Compute, "overlp", "overlap"), (Exchange, "evry", "every"), (Mean, "island", "island_size"),
        (Own, "islands", "island"), (compress.TopK, "kk", "k"), (MLA, "momentun", "momentum"),
        (AveragingCommunicator, "islands", "island_size"), (CSVLogger, "dir", "directory"),
        (partition_dirichlet, "alph", "alpha"), (models.GPT, "context_size", "context"),
    ],
)  # fmt: skip
def test_a_misspelt_keyword_is_told_the_arguments(function: Any, given: str, meant: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^{function.__name__}(\(\))? has no argument '{given}'; did you mean '{meant}'\?"
    ):
        function(**{given: 1})
    assert "kwargs" not in inspect.signature(function).parameters
