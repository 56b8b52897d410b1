"""At equal bytes, is it better to average a few random coordinates in every step, or all of them at once?

Setting: local AdamW on unlike data, 2 shards a node, 192 steps; in each step one of n coordinates, drawn at random
(SPARTA) or by a partition whose parts have their turns, against all coordinates in the middle of every n steps, n = 12
and 48, a 16th and a fourth of the run; the rate tuned for each arm; equal steps and bytes. SGD in place of AdamW, at
n = 48, is shown beside it and decides nothing: it was added after the first run.
Expected: random coordinates lose, by 0.06 at n = 12 and 0.20 at n = 48; parts in turn lose 0.02 and 0.05.
Verdict: clearly is by two standard errors, and all is at n = 48. If random coordinates are clearly above all at once:
AGREES if parts in turn are clearly above all at once, too, and clearly below random ones; ORDER ONLY if they are only
below random ones; DISAGREES if they are not. If random ones are clearly below all at once: DISAGREES. Else UNDECIDED.
"""

from collections.abc import Callable
from functools import partial

from study import Answer, Difference, Study, difference

from vecgym.strategy import Exchange, Mean, PartitionedSelector, SPARTAStrategy, Strategy


def all_at_once(optimizer: str, n: int, lr: float) -> Strategy:  # a merge after the last step would change no mean
    return Strategy(optimizer, [Exchange(Mean(), every=n, offsets=[max(1, n // 2)])], lr=lr)


def ask(study: Study) -> Answer:
    steps, rows = max(8, study.steps // 16 * 16), dict[str, Difference]()
    for rounds, optimizer in ((16, "adamw"), (4, "adamw"), (4, "sgd")):
        every = max(1, steps // rounds)
        kinds: dict[str, Callable[..., Strategy]] = {
            "all": partial(all_at_once, optimizer, every),
            "random": partial(SPARTAStrategy, 1 / every, optimizer),
            "in turn": partial(SPARTAStrategy, None, optimizer, index_selector=PartitionedSelector(1 / every)),
        }
        label = f"{rounds} rounds" + ", SGD" * (optimizer == "sgd")
        arms = {
            kind: study.arm(
                f"{kind}, n = {every}" + ", SGD" * (optimizer == "sgd"), strategy,
                {"lr": [0.1, 0.2, 0.4] if optimizer == "sgd" else [1e-3, 3e-3, 1e-2, 3e-2]},
                data="shards", max_steps=steps,
            )
            for kind, strategy in kinds.items()
        }  # fmt: skip
        rows |= {
            f"{label}: random - all": difference(arms["random"], arms["all"]),
            f"{label}: in turn - all": difference(arms["in turn"], arms["all"]),
            f"{label}: random - in turn": difference(arms["random"], arms["in turn"]),
        }
    random, turns, between = list(rows.values())[3:6]
    early = rows["16 rounds: random - all"], rows["16 rounds: in turn - all"]
    n = max(1, steps // 16), steps // 4
    why = (
        f"Minus all at once: random coordinates {early[0]} at n = {n[0]} and {random} at n = {n[1]}, parts in turn "
        f"{early[1]} and {turns}. With SGD at n = {n[1]}: {rows['4 rounds, SGD: random - all']} and "
        f"{rows['4 rounds, SGD: in turn - all']}."
    )
    if random.sign != 1:
        return Answer("DISAGREES" if random.sign == -1 else "UNDECIDED", why, rows)
    if between.sign != 1:
        return Answer("DISAGREES", why, rows)
    return Answer("AGREES" if turns.sign == 1 else "ORDER ONLY", why, rows)
