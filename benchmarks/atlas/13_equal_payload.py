"""Which code of the movements is best at equal payload, if fewer bits are sent more often?

Setting: DiLoCo with AdamW inside and SGD outside, 256 steps; b bits a value every 4 b steps: sign every 4 steps, 2 bits
(means of bins) 8, int4 16, int8 32, the largest 1/16 with their places 16, float32 128, each in the middle of its
interval. Codes have error feedback; both rates tuned for each arm. Three codes are tried without, too, at the same
inner rate. Equal payload: the bytes that a node hands to the collectives, but for scales and the means of bins, which
are a tenth of those of 2 bits in the smallest model.
Expected: int4 is best, the largest 1/16 worst; the best is 0.06 below float32. Feedback lowers the loss of int8, int4
and 2 bits by 0, 0.003 and 0.01.
Verdict: clearly is by two standard errors. If the best code is clearly below float32: AGREES if int4 is not clearly
above the best arm, and the largest 1/16 not clearly below the worst; ORDER ONLY if one of these is so; DISAGREES if
neither is. Otherwise DISAGREES if the best code is clearly above float32, UNDECIDED if not. Feedback is not judged.
"""

from functools import partial
from typing import Any

from study import Answer, Study, difference

from vecgym.compress import Quantise, Sign, StatQuantise, TopK
from vecgym.optim import OptimSpec
from vecgym.strategy import Compressed, Exchange, Mean, Outer, Strategy

CODES: dict[str, tuple[Any, int]] = {  # and the bits of a value
    "sign": (Sign(), 1), "2 bits": (StatQuantise(2), 2), "int4": (Quantise(4), 4), "int8": (Quantise(8), 8),
    "top 1/16": (TopK(1 / 16), 4), "float32": (None, 32),
}  # fmt: skip


def diloco(lr: float, outer_lr: float, codec: Any, H: int, feedback: bool = True) -> Strategy:
    average = Mean() if codec is None else Compressed(Mean(), codec, error_feedback=feedback)
    outer = Outer(average, OptimSpec("sgd", lr=outer_lr))
    return Strategy("adamw", [Exchange(outer, every=H, offsets=[max(1, H // 2)])], lr=lr)


def ask(study: Study) -> Answer:
    steps, grid = study.steps if study.quick else 256, {"lr": [3e-3, 1e-2, 3e-2], "outer_lr": [0.5, 1.0, 2.0]}

    def arm(name: str, code: str, grid: Any = grid, **settings: Any) -> Any:
        codec, bits = CODES[code]
        return study.arm(name, partial(diloco, codec=codec, H=max(1, steps * bits // 64), **settings), grid,
                         max_steps=steps)  # fmt: skip

    arms = {code: arm(code, code) for code in CODES}
    rows = {f"{code} - float32": difference(arms[code], arms["float32"]) for code in CODES if code != "float32"}
    for code in ("int8", "int4", "2 bits"):
        same = {**grid, "lr": (arms[code].best["lr"],)}
        rows[f"{code}: feedback - none"] = difference(arms[code], arm(f"{code} without", code, same, feedback=False))
    fed = [str(row) for label, row in rows.items() if "feedback" in label]
    best, worst = min(arms, key=lambda code: arms[code].mean()), max(arms, key=lambda code: arms[code].mean())
    code = min(CODES.keys() - {"float32"}, key=lambda code: arms[code].mean())
    gain = rows[f"{code} - float32"]
    why = (
        f"Best: {best}; worst: {worst}; {code} minus float32: {gain}. Feedback of int8, int4, 2 bits: {', '.join(fed)}."
    )
    if gain.sign != -1:
        return Answer("DISAGREES" if gain.sign == 1 else "UNDECIDED", why, rows)
    right = [difference(arms["int4"], arms[best]).sign != 1, difference(arms["top 1/16"], arms[worst]).sign != -1]
    return Answer(("DISAGREES", "ORDER ONLY", "AGREES")[sum(right)], why, rows)
