"""The slow tests: of the many cases of a test the repetitions of others, and long ones.

`pytest` runs the others, with every strategy and every property among them; `pytest -m slow` runs these, and
`pytest -m "" FILE` both. A test may also carry the mark itself. Of the remaining cases of a test with `MANY` or more,
one in `SHARE` runs: others in each test, so that together they take every strategy, codec and model.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import pytest

COLLECTED = pytest.StashKey[set[str]]()  # files
NAMED = pytest.StashKey[set[int]]()  # rows of `SLOW` that name a case that was collected

# Strategies of the table in tests/test_properties.py that are a row of the catalogue with other settings.
VARIANTS = (
    "(fedavg-participation-kept|fedprox|fedavg-participants|fedavg-weighted|fedavg-server-participation|scaffold-participation|"
    "mime-lite|fednova-participation|feddyn-participation|diloco-lookahead|"
    "diloco-heloco|diloco-median-norm|averaging-|sparta-partitioned|sparta-int4|sparta-topk|sparta-diloco-rare|"
    "gossip-one-peer|gossip-exponential|fedavg-growing|diloco-growing|diloco-scheduled|allreduce-(int8|sign)|fedavg-powersgd|"
    "fedavg-randomk|demo-momentum).*"
)

MANY, SHARE = 4, 8
WHOLE = {"test_api", "test_documents", "test_floors", "test_readme"}  # each of whose cases is a thing of its own

# File and test (a part of its name): which of its cases, a regular expression of the whole id.
SLOW = [
    ("test_absent_apart", "every_strategy", ".*"),
    ("test_absent_apart", "rates_of_nodes", ""),
    ("test_absent_apart", "a_fit_on_processes", ".*-4"),
    ("test_async_more", "decoupled_is_its_twin", ".*-[015-9]"),
    ("test_async_more", "halos_is_its_twin", ".*-([0-46-9]|1.)"),
    ("test_async_more", "ad_psgd_is_its_twin", ".*[2-7].*"),
    ("test_async_more", "resumed_run", "CNN.*|MLP-(halos|ad_psgd)"),
    ("test_async_more", "derivatives", "adamw"),
    ("test_async_more", "together", "loop.*|.*-loop"),
    ("test_asynchronous", "twins", ".*-[1-9]-.*"),
    ("test_asynchronous", "together", ".*(loop|adamw).*"),
    ("test_availability", "never_there", ".*(taken out|shared).*|" + VARIANTS),
    ("test_average", "real_processes", ".*(codes|late|islands).*"),
    ("test_checkpoint", "every_strategy", VARIANTS),
    ("test_checkpoint", "what_processes_save", "AdamW"),
    ("test_checkpoint", "begun_together", ".*"),
    ("test_checkpoint", "lock_of_a_killed", "False"),
    ("test_checkpoint", "made_by_hand", "no .*|.* of another type"),
    ("test_cli", "as_a_program", ""),
    ("test_clock", "naive_simulation", "[2-9]-.*"),
    ("test_clock", "stragglers|priced_together", ""),
    ("test_cli", "threads_wait|threads_sleep", ".*"),
    ("test_codecs", "mean_of_many|without_chance|fed_back", ".*(heavy tails|one of many|equal).*"),
    ("test_compare", "interval_has", ""),
    ("test_compiled", "more_often_than|more_models|a_difference_between|compile_anew", ""),
    ("test_compiled", "traced", "(CNN|DictBatch|Dropout|WithFrozen|Quadratic)"),
    ("test_compiled", "a_fit|a_sweep", "|strategy1"),
    ("test_compression", "exchanges_equal_their_twins", ".*(K5|K1|forget).*|allreduce-.*"),
    ("test_contract", "never_overwritten", ".*-2"),
    ("test_dct", "inference_mode", ""),
    ("test_decentralised", "a_change_of_the_rate", ".*"),
    ("test_decentralised", "with_absent_nodes", "exact diffusion|gradient tracking, combine then adapt"),
    ("test_decentralised", "push_stops|all_matchings_stop", ""),
    ("test_decentralised", "choco_stops", ".*"),
    ("test_decentralised", "quasi_global_momentum_stops", ".*False"),
    ("test_decentralised", "unbiased_reach_the_optimum_of_unlike", "exact diffusion.*|.*one peer.*"),
    ("test_demo", "equals_its_twin", ".*(GPT|CNN|LSTM|one-of-each).*"),
    ("test_design", "forward_mode|second_derivatives", "GPT.*"),
    ("test_documents", "checks_the_installation", ""),
    ("test_engine", "threads_agree", "GPT.*"),
    ("test_family", "twin", ".*(GPT|loop).*"),
    ("test_fuzz", "configurations|rows|asynchronous_runs|relations|odd_models", "[1-9]"),
    ("test_fuzz_hostile", "a_share", ".*[1-3]"),
    ("test_fuzz_hostile", "every_public_callable", ""),
    ("test_golden", "the_traces", "[2-6]"),
    ("test_gossip", "equals_its_twin", ".*-(8|4|1)-.*|.*loop"),
    ("test_gossip", "derivatives_by_the_matrix", ".*inner1"),
    ("test_dry_run", "hundred_billion", "allreduce"),
    ("test_launch", "notebook|without_cloudpickle", ""),
    ("test_launch", "that_of_one_process", "CNN-.*"),
    ("test_launch", "order_of_ranks", "spawn"),
    ("test_live", "drawn_anew|ipython_is_not", ""),
    ("test_mime", "do_not_move_the_optimum", "own"),
    ("test_memory", "the_peak", "GPT.*|.*minibatches of chunks"),
    ("test_model_errors", "compiled_models_train", ".*"),
    ("test_no_waits", "no_model_waits", ".*GPT"),
    ("test_no_waits", "no_optimizer|no_option", "minibatch_size|limits|.*(nesterov|amsgrad|centered).*"),
    (
        "test_no_waits",
        "a_step_waits|paths_of_a_device",
        "[^-]* .*|powersgd|sign|randomk|natural|late|weights|liars|codes",
    ),
    (
        "test_no_waits",
        "a_run_waits",
        "fedavg-.*|sparta-diloco|gossip-matching|des-loc|streaming-4-bits|palsgd|noloco|eager",
    ),
    ("test_optim", "differences", ".*(amsgrad|nesterov|radam-extra|adamax|nadam).*"),
    ("test_price", "command_prints|of_a_long_run|no_H_is_enough|the_guide_shows|one_node_sends", ""),
    ("test_price", "hides_an_exchange|H_that_is_needed|odd_models", "160|1|5|streaming-.*|diloco-0.3|model[13]"),
    ("test_properties", "", VARIANTS),
    ("test_properties", "same_bits|saved_state", ".*Dropout-.*"),
    ("test_properties", "pure_step", ".*(Dropout|CNN)"),
    ("test_properties", "permuting", ".*-[58]"),
    ("test_properties", "a_value_for_each", ".*loop, exact"),
    ("test_readme", "code_blocks_run", "README"),
    ("test_report", "a_run_with_a_ledger", "folder|saved"),
    ("test_report", "a_file_has_the_network", "compute0-network0|compute1-network1"),
    ("test_rollout", "segments", "(1|6)-.*"),
    ("test_rollout", "finite_differences", ".*(of-each-step|adam).*"),
    ("test_sparta", "twin", ".*loop|.*-[135]-.*"),
    ("test_sweep", "interrupted_and_resumed", "(20|40|11)-.*"),
    ("test_sweep", "what_it_is_alone", ".*[ ,].*"),
    ("test_ddp", "distributed_data_parallel", ".*-4"),
    ("test_timeline", "no_bandwidth", "100.*"),
    ("test_twins", "accumulated|few_nodes", ".*(GPT|CNN|LSTM|-loop).*"),
    ("test_twins", "chunks_and_threads", "vmap"),
    ("test_twins", "every_strategy_equals", ".*loop|.*-CNN-.*"),
]


def slow_rows(file: str, test: str, case: str) -> set[int]:
    """Return which rows of `SLOW` name one case of a test; `case` is its id, "" where the test has only one."""
    return {
        row for row, (where, name, cases) in enumerate(SLOW)
        if where == file and re.search(name, test) and re.fullmatch(cases, case)
    }  # fmt: skip


def thinned(file: str, test: str, cases: Sequence[str]) -> set[str]:
    """Return which of the cases of a test run only with the slow ones.

    >>> cases = [f"case {i}" for i in range(9)]
    >>> sorted(set(cases) - thinned("test_sweep", "test_b", cases)), thinned("test_sweep", "test_b", cases[:3])
    (['case 0', 'case 8'], set())
    """
    if len(cases) < MANY or file in WHOLE:
        return set()
    first = zlib.crc32(test.encode()) % min(SHARE, len(cases))
    return set(cases) - set(cases[first::SHARE])
