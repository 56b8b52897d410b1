"""The command `vecgym`, and the text that it trains on."""

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import vecgym.cli.compare as compare
import vecgym.data.text as corpus
from vecgym import History, Trainer
from vecgym.cli import COMMANDS, main
from vecgym.cli.compare import allreduce_bytes, comparison_table
from vecgym.cli.configuration import ENGINES as ENGINE_NAMES
from vecgym.data.text import read_text, split_text, standard_library_text
from vecgym.engine import ENGINES
from vecgym.models import GPT

# Twelve steps of a model of a few hundred parameters.
TINY = [
    "--num-nodes=4", "--steps=12", "--batch-size=2", "--context=8", "--width=8", "--layers=1", "--heads=2", "--H=4",
    "--device=cpu", "--no-progress",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def few_evaluations():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "VAL_SIZE", 8)
        patch.setattr(compare, "NUM_EVALUATIONS", 2)
        yield


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return path


@pytest.fixture
def undrawn(monkeypatch):
    """Figures take longer than these runs."""
    monkeypatch.setattr("vecgym.plot.plot_comparison", lambda *args, **kwargs: None)


def tiny(text_file: Path, output: Path, *more: str) -> list[str]:
    return ["compare", "--text", str(text_file), "--output", str(output), *TINY, *more]


def table_of(printed: str) -> dict[str, list[str]]:
    """The printed table: strategy -> its other cells."""
    table = next(part for part in printed.split("\n\n") if part.startswith("strategy"))
    rows = [re.split(r"  +", line) for line in table.splitlines()[1:]]
    return {row[0]: row[1:] for row in rows}


def read_history(output: Path, name: str) -> list[dict[str, str]]:
    with (output / name / "history.csv").open() as file:
        return list(csv.DictReader(file))


# -------------------------------------------------------------------------------------------------- compare


@pytest.fixture(scope="module")
def compared(text_file, tmp_path_factory):
    """One comparison of all strategies: its output directory and its standard output."""
    output = tmp_path_factory.mktemp("runs") / "made" / "by" / "vecgym"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *args, **_: lines.append(" ".join(map(str, args))))
        code = main(tiny(text_file, output))
    assert code == 0
    return output, "\n".join(lines)


def test_table_says_what_the_histories_say(compared):
    output, printed = compared
    table = table_of(printed)
    assert list(table) == ["allreduce", "fedavg", "diloco"]
    for name, (val_loss, val_loss_of_nodes, *_) in table.items():
        last = read_history(output, name)[-1]
        assert last["step"] == "12"
        assert float(val_loss) == pytest.approx(float(last["val_loss"]), abs=1e-4)
        assert float(val_loss_of_nodes) == pytest.approx(float(last["val_loss_local"]), abs=1e-4)


def test_fedavg_and_diloco_send_H_times_less(compared):
    output, printed = compared
    sent = {name: float(read_history(output, name)[-1]["bytes_total"]) for name in compare.STRATEGIES}
    assert sent["allreduce"] == pytest.approx(4 * sent["fedavg"])
    assert sent["fedavg"] == sent["diloco"] > 0
    assert [row[3] for row in table_of(printed).values()] == ["1x", "4x", "4x"]


def test_closed_form_of_the_bytes_is_what_allreduce_sent(compared, text_file):
    output, _ = compared
    vocab_size = len(set(text_file.read_text()))
    num_params = sum(p.numel() for p in GPT(vocab_size, context=8, num_layers=1, num_heads=2, width=8).parameters())
    sent = float(read_history(output, "allreduce")[-1]["bytes_total"])
    assert allreduce_bytes(num_nodes=4, num_params=num_params, steps=12) == pytest.approx(sent)


def test_all_start_alike_and_learn(compared):
    output, _ = compared
    first = {read_history(output, name)[0]["val_loss"] for name in compare.STRATEGIES}
    assert len(first) == 1
    for name in compare.STRATEGIES:
        assert float(read_history(output, name)[-1]["val_loss"]) < float(first.copy().pop())


def test_figure_and_histories_are_where_it_says(compared):
    output, printed = compared
    assert f"Figure: {output / 'comparison.png'}" in printed
    assert (output / "comparison.png").read_bytes().startswith(b"\x89PNG")
    for name in compare.STRATEGIES:
        assert str(output / name / "history.csv") in printed


def test_of_several_seeds_it_shows_spreads_and_differences(text_file, tmp_path, capsys, undrawn):
    assert main(tiny(text_file, tmp_path, "--strategies", "fedavg", "diloco", "--seed", "3", "--seeds", "2")) == 0
    printed = capsys.readouterr().out
    folders = {"fedavg": ["fedavg", "fedavg-seed-4"], "diloco": ["diloco", "diloco-seed-4"]}
    losses = {}
    for name, of_seeds in folders.items():
        last = [read_history(tmp_path, folder)[-1] for folder in of_seeds]
        losses[name] = [float(row["val_loss"]) for row in last]
        shown = [float(x) for x in table_of(printed)[name][0].split(" ± ")]
        assert shown == pytest.approx([statistics.mean(losses[name]), statistics.stdev(losses[name])], rel=0.05)
    assert '"seed": 4' in (tmp_path / "diloco-seed-4" / "config.json").read_text()
    assert main(tiny(text_file, tmp_path / "alone", "--strategies", "diloco", "--seed", "4")) == 0
    alone, of_four = read_history(tmp_path / "alone", "diloco"), read_history(tmp_path, "diloco-seed-4")
    assert [row["val_loss"] for row in of_four] == [row["val_loss"] for row in alone]
    assert "± over 2 seeds: standard deviation" in printed
    *_, line = [line for line in printed.splitlines() if line.startswith("|")]
    gap = statistics.mean(b - a for a, b in zip(losses["fedavg"], losses["diloco"]))
    assert line.split("|")[1].strip() == "diloco"
    assert float(line.split("|")[3]) == pytest.approx(gap, rel=0.1)


def test_without_allreduce_the_reduction_is_against_its_closed_form(text_file, tmp_path, capsys, undrawn):
    assert main(tiny(text_file, tmp_path, "--strategies", "diloco", "--H", "6")) == 0
    table = table_of(capsys.readouterr().out)
    assert list(table) == ["diloco"]
    assert table["diloco"][3] == "6x"


def test_one_node_sends_nothing(text_file, tmp_path, capsys, undrawn):
    assert main(tiny(text_file, tmp_path, "--strategies", "fedavg", "fedavg", "--num-nodes", "1")) == 0
    table = table_of(capsys.readouterr().out)
    assert table["fedavg"][2:4] == ["0.0 B", "-"]


def test_same_seed_same_numbers(compared, text_file, tmp_path, capsys, undrawn):
    output, _ = compared
    state = torch.get_rng_state()
    main(tiny(text_file, tmp_path / "same", "--strategies", "diloco"))
    assert torch.equal(state, torch.get_rng_state())  # the global random state is left alone
    main(tiny(text_file, tmp_path / "other", "--strategies", "diloco", "--seed", "1"))
    losses = [[row["val_loss"] for row in read_history(at, "diloco")] for at in
              (output, tmp_path / "same", tmp_path / "other")]  # fmt: skip
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_options_reach_the_run(text_file, tmp_path, undrawn):
    main(tiny(text_file, tmp_path, "--strategies", "fedavg", "--engine", "loop", "--lr", "0.125", "--seed", "7"))
    config = (tmp_path / "fedavg" / "config.json").read_text()
    for part in [
        '"engine": "loop"',
        "lr=0.125",
        "every=4",
        '"seed": 7',
        '"num_nodes": 4',
        '"max_steps": 12',
        '"batch_size": 2',
    ]:
        assert part in config


def test_progress_bar_unless_told_otherwise(text_file, tmp_path, capsys, undrawn):
    options = tiny(text_file, tmp_path, "--strategies", "allreduce")
    main(options)
    assert "/12" not in capsys.readouterr().err
    main([option for option in options if option != "--no-progress"])
    assert "12/12" in capsys.readouterr().err


def test_defaults_and_quick_fill_in_what_is_not_given(monkeypatch):
    seen: list[argparse.Namespace] = []

    def stop(args, seed):
        seen.append(args)
        raise ValueError("seen enough")

    monkeypatch.setattr(compare, "_trainer", stop)
    for argv in (["compare"], ["compare", "--quick"], ["compare", "--quick", "--steps", "77"]):
        assert main(argv) == 1
    full, quick, mixed = map(vars, seen)
    defaults = {name: row[1] for name, row in compare.OPTIONS.items()}
    quick_ones = {name: row[2] for name, row in compare.OPTIONS.items()}
    assert {name: full[name] for name in defaults} == defaults
    assert {name: quick[name] for name in defaults} == quick_ones
    assert {name: mixed[name] for name in defaults} == {**quick_ones, "steps": 77}
    for settings in (defaults, quick_ones):
        assert settings["steps"] % settings["H"] == 0  # so that the last step ends with an exchange
        assert settings["width"] % settings["heads"] == 0


def test_more_strategies_can_be_compared(text_file: Path, tmp_path: Path) -> None:
    more = [name for name in compare.strategy_names() if name not in compare.STRATEGIES]
    assert main(tiny(text_file, tmp_path, "--strategies", *more)) == 0
    sent = {name: float(read_history(tmp_path, name)[-1]["bytes_total"]) for name in more}
    assert sent["sparta"] < sent["sparta-diloco"] < sent["gossip"]
    assert 0 < sent["demo"] < sent["gossip"]


def test_all_strategies_have_the_same_inner_optimizer():
    args = argparse.Namespace(lr=0.01, steps=100, H=5, outer_lr=0.5, outer_momentum=0.25)
    made = [compare.make_strategy(name, args) for name in compare.STRATEGIES]
    assert len({repr(strategy.inner_optim) for strategy in made}) == 1
    assert {(s.inner.warmup_steps, s.inner.cosine_anneal, s.inner.max_norm) for s in made} == {(5, True, 1.0)}
    assert "SGD, lr=0.5, momentum=0.25, nesterov=True" in repr(made[-1])


# ----------------------------------------------------------------------------------------- interrupts, errors


def test_interrupt_reports_what_has_finished(text_file, tmp_path, monkeypatch, capsys):
    fit = Trainer.fit

    def interrupted(self, strategy, *args, **kwargs):
        if "DiLoCo" in repr(strategy):
            raise KeyboardInterrupt
        return fit(self, strategy, *args, **kwargs)

    monkeypatch.setattr(Trainer, "fit", interrupted)
    assert main(tiny(text_file, tmp_path)) == 130
    printed = capsys.readouterr()
    assert list(table_of(printed.out)) == ["allreduce", "fedavg"]
    assert (tmp_path / "comparison.png").exists()
    assert printed.err == f"\ndiloco stopped early; its history so far is in {tmp_path / 'diloco'}\nInterrupted.\n"


def test_interrupt_before_anything_has_finished(text_file, tmp_path, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", interrupted)
    assert main(tiny(text_file, tmp_path)) == 130
    printed = capsys.readouterr()
    assert "strategy" not in printed.out
    assert "allreduce stopped early" in printed.err
    monkeypatch.setattr(compare, "_trainer", interrupted)
    assert main(tiny(text_file, tmp_path)) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_divergence_reports_what_has_finished(text_file, tmp_path, capsys, undrawn):
    assert main(tiny(text_file, tmp_path, "--outer-lr", "1e30")) == 1
    printed = capsys.readouterr()
    assert list(table_of(printed.out)) == ["allreduce", "fedavg"]
    early, error = printed.err.strip().splitlines()
    assert early == f"diloco stopped early; its history so far is in {tmp_path / 'diloco'}"
    assert error.startswith("vecgym compare: error: the loss of ")
    assert len(read_history(tmp_path, "diloco")) > 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--heads", "3"], "num_heads=3 must divide width=8: give one of [1, 2, 4, 8]."),
        (["--device", "abacus"], "device='abacus' is not available; present: "),
        (["--text", "no-such-file"], "text file no-such-file cannot be read: No such file or directory."),
        (["--context", "3000"], "too few for one window with context=3000"),
    ],
)
def test_mistakes_are_one_line(text_file, tmp_path, capsys, more, message):
    assert main(tiny(text_file, tmp_path, *more)) == 1
    error = capsys.readouterr().err
    assert error.startswith("vecgym compare: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_output_that_is_a_file(text_file, capsys):
    assert main(tiny(text_file, text_file)) == 1
    assert str(text_file) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compare", "--strategies", "fedprox"], "'fedprox' (choose from "),
        (["compare", "--strategies", "fedprox"], "diloco"),
        (["compare", "--strategies"], "--strategies: expected at least one argument"),
        (["compare", "--engine", "steam"], "vmap"),
        (["compare", "--steps", "0"], "--steps: '0' is not a whole number >= 1"),
        (["compare", "--num-nodes", "2.5"], "--num-nodes: '2.5' is not a whole number >= 1"),
        (["compare", "--lr", "-1"], "--lr: '-1' is not a number > 0"),
        (["compare", "--lr", "nan"], "--lr: 'nan' is not a number > 0"),
        (["compare", "--lr", "fast"], "--lr: 'fast' is not a number > 0"),
        (["compare", "--seed", "x"], "--seed: invalid int value: 'x'"),
        (["compare", "--widht", "3"], "there is no option --widht 3; see vecgym compare --help"),
        (["compare", "--step", "3"], "there is no option --step 3"),
        (["compare", "--widht", "3"], "[--width N]"),
        (["comparison"], "'comparison' (choose from "),
    ],
)
def test_usage_errors_exit_with_2(capsys, argv, message):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- info, help, start


def test_info(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    facts = [torch.__version__, sys.version.split()[0], "cpu", f"{torch.get_num_threads()} of torch", *ENGINES]
    for part in facts:
        assert part in printed


def test_names_that_are_written_twice_agree():
    """The command line names the engines itself, because their home imports torch."""
    assert ENGINE_NAMES == ENGINES


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert "compare" in shown
    assert "example: vecgym compare" in shown


@pytest.mark.parametrize("argv", [["--help"], ["compare", "--help"], ["info", "--help"], ["--version"]])
def test_help_exits_with_0(capsys, argv):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 0
    assert "vecgym" in capsys.readouterr().out


WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}


def in_a_process(code: str, **environment: str) -> str:
    """The output of `code` in a new Python, where only `environment` may say how threads wait."""
    command = [sys.executable, "-c", code]
    environment = {**{name: value for name, value in os.environ.items() if name not in WAITING}, **environment}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def test_help_imports_nothing_heavy():
    code = f"""if True:
        import sys
        from vecgym.cli import COMMANDS, main
        for argv in (["--help"], ["--version"], *([name, "--help"] for name in {list(COMMANDS)})):
            try:
                main(argv)
            except SystemExit as end:
                assert end.code == 0, argv
        found = [name for name in ("torch", "numpy", "matplotlib", "tqdm") if name in sys.modules]
        assert not found, found
    """
    in_a_process(code)


def test_a_price_imports_no_compiler():
    """It takes more than a second, and so would the price without it."""
    code = """if True:
        import sys
        from vecgym.cli import main
        asked = ["--nodes", "4", "--step-seconds", "0.6", "--bandwidth", "1e8", "--latency", "1ms", "--H", "20"]
        main(["price", "--parameters", "1M", *asked])
        assert not {"torch._dynamo", "sympy"} & set(sys.modules)
    """
    in_a_process(code)


@pytest.mark.parametrize(
    ("load", "environment", "seen"),
    [
        (0.0, {}, "{'GOMP_SPINCOUNT': '10000'}\n{}\n"),
        (-1.0, {}, "{'GOMP_SPINCOUNT': '10000'}\n{}\n"),
        (1e6, {}, "{'OMP_WAIT_POLICY': 'PASSIVE'}\n{}\n"),
        (1e6, {"OMP_WAIT_POLICY": "ACTIVE"}, "{'OMP_WAIT_POLICY': 'ACTIVE'}\n{}\n"),
        (1e6, {"GOMP_SPINCOUNT": "9"}, "{'GOMP_SPINCOUNT': '9'}\n{}\n"),
    ],
)
def test_threads_wait_for_a_short_time_or_sleep_unless_the_user_says_otherwise(load, environment, seen):
    """vecgym says so before torch, which reads it once, is loaded; and not any more afterwards."""
    code = f"""if True:
        import importlib, os
        def told():
            if {load} < 0:
                raise OSError("unobtainable")
            return {load}, 0.0, 0.0

        os.getloadavg = told
        import vecgym
        said = lambda: {{name: x for name, x in os.environ.items() if name in {WAITING}}}
        print(said())
        import torch
        for name in said():
            del os.environ[name]
        importlib.reload(vecgym)
        print(said())
    """
    assert in_a_process(code, **environment) == seen


def test_threads_sleep_where_torch_was_loaded_first():
    """On a busy machine, more threads than it has cores have the same effect; they are started once."""
    code = """if True:
        import threading, torch, warnings
        from pathlib import Path
        torch.set_num_threads(2)
        from vecgym.engine import Engine, plan
        from vecgym.models import Line
        count = lambda: sum("vecgym-idle" == thread.name for thread in threading.enumerate())
        plan.programs_running = lambda: 1
        threads = lambda: len(list(Path("/proc/self/task").iterdir())) if Path("/proc").exists() else 10**6
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Engine(Line())
            before = count()
            plan.programs_running = lambda: 1 + 10**6
            for _ in range(2):
                Engine(Line())
        print(before, count(), torch.get_num_threads(), threads() > torch.multiprocessing.cpu_count())
        print([str(w.message).split(",")[0] for w in caught])
    """
    said = "['the machine is busy: 1000000 other threads want its"
    sleeping, warned = in_a_process(code).splitlines()
    assert (sleeping, warned[: len(said)]) == ("0 1 2 True", said)
    assert in_a_process(code, OMP_WAIT_POLICY="ACTIVE").startswith("0 0 2")


def test_what_the_system_tells_of_other_programs(monkeypatch):
    from vecgym.engine import plan

    for text, found in (("2.62 1.4 0.6 4/136 7168\n", 3), ("9.0 1.4 0.6 1/136 7168\n", 1), ("unknown", 0)):
        monkeypatch.setattr(plan.Path, "read_text", lambda path, text=text: text)
        assert plan.programs_running() == found


def test_as_a_program(text_file, tmp_path):
    """`python -m vecgym` in a directory of its own, with the default output directory."""
    options = tiny(text_file, tmp_path, "--strategies", "diloco", "--steps", "4", "--batch-size", "16")
    at = options.index("--output")
    del options[at : at + 2]
    command = [sys.executable, "-m", "vecgym", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": ""}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert list(table_of(done.stdout)) == ["diloco"]
    assert (tmp_path / "vecgym-runs" / "compare" / "comparison.png").exists()
    assert (tmp_path / "vecgym-runs" / "compare" / "diloco" / "history.csv").exists()


# --------------------------------------------------------------------------------------------------- the table


def test_table_is_aligned():
    from vecgym import History

    history, longer = History(), History()
    history.append({"val_loss": 1.23456, "val_loss_local": 1.5, "bytes_total": 2.5e9, "seconds": 123.45})
    longer.append({"val_loss": 1.0, "val_loss_local": 1.5, "bytes_total": 2.5e9, "seconds": 1.0})
    lines = comparison_table({"a": {0: history}, "longer": {0: longer}}, 1e10).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["a", "1.2346", "1.5000", "2.5", "GB", "4x", "123.5"]


# ---------------------------------------------------------------------------------------------------- the text


def test_standard_library_is_a_million_characters_of_ascii():
    text = standard_library_text()
    assert text.isascii()
    assert 900_000 < len(text) <= 1_000_000
    assert text == standard_library_text()
    assert standard_library_text(500) == text[:500]
    assert list(corpus.MODULES) == sorted(corpus.MODULES)
    assert not [name for name in corpus.MODULES if not corpus._source(name)]


def test_missing_modules_are_left_out(monkeypatch):
    monkeypatch.setattr(corpus, "MODULES", ("no_such_module", "bisect", "sys", "marshal"))
    import bisect

    assert bisect.__doc__ is not None
    assert bisect.__doc__ in standard_library_text()
    monkeypatch.setattr(corpus, "MODULES", ("no_such_module", "sys"))
    with pytest.raises(ValueError, match="vecgym compare --text FILE"):
        standard_library_text()


def test_text_comes_through_the_loader_as_in_a_zip(tmp_path, monkeypatch):
    import zipfile

    with zipfile.ZipFile(tmp_path / "library.zip", "w") as archive:
        archive.writestr("zipped_module.py", "# naïve prose\n")
    monkeypatch.syspath_prepend(str(tmp_path / "library.zip"))
    monkeypatch.setattr(corpus, "MODULES", ("zipped_module",))
    assert standard_library_text() == "# nave prose\n"
    assert "zipped_module" not in sys.modules


def test_a_broken_module_is_left_out(monkeypatch):
    broken = types.ModuleType("broken")
    broken.__spec__ = None
    monkeypatch.setitem(sys.modules, "broken", broken)
    assert corpus._source("broken") == ""


def test_read_text(tmp_path):
    file = tmp_path / "text"
    file.write_text("äöü€" * 300, encoding="utf-8")
    assert read_text(file) == "äöü€" * 300
    for content, message in [
        (b"", "has 0 characters"),
        (b" \n" * 2000, "has 0 characters"),
        (b"abc" * 2000 + b"\xff", "is not UTF-8 text: byte 6000"),
        (b"abc\0" * 2000, "it contains null characters"),
        (b"abc", "has 3 characters; at least 1000 are needed"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_text(file)
    with pytest.raises(ValueError, match="is not a file, but a folder"):
        read_text(tmp_path)


@pytest.mark.parametrize("length", [100, 101, 1234, 10_000])
def test_split_is_a_partition_in_order(length):
    text = "".join(map(chr, range(length)))
    train, val = split_text(text)
    assert sorted(train + val) == list(text)
    assert list(train) == sorted(train)
    assert list(val) == sorted(val)
    assert len(val) / length == pytest.approx(0.1, abs=0.06)


def test_it_says_why_diloco_is_behind_in_a_short_run():
    def runs(**losses):
        found = {name: {0: History()} for name in losses}
        for name, loss in losses.items():
            found[name][0].append({"step": 1, "val_loss": loss})
        return found

    behind = runs(allreduce=1.0, fedavg=2.0, diloco=2.5)
    assert compare.why_behind(behind, 20).startswith("diloco is behind fedavg: its outer momentum builds up from")
    assert "and this run has 20. With the default settings, 35, it is ahead" in compare.why_behind(behind, 20)
    for others, exchanges in ((behind, 35), (runs(fedavg=2.0, diloco=1.9), 20), (runs(fedavg=2.0), 20), ({}, 20)):
        assert compare.why_behind(others, exchanges) == ""
