"""Is SparseLoCo at 2 bits better than DiLoCo at full precision?

Setting: 5 and 20 rounds of AdamW; SparseLoCo sends 8 of each 16 x 16 movements (3 %) in 2 bits, with its decay of
0.95; DiLoCo with Nesterov 0.9 and without momentum sends float32. Inner and outer rate tuned for each arm; equal steps
and rounds, so SparseLoCo's payload is a small fraction of DiLoCo's.
Claim: "1-3 % sparsity and 2-bit quantization while outperforming full-precision DiLoCo" (arXiv 2508.15706, abstract),
with 512 million parameters and H of 15, 30, 50 and 100, against DiLoCo with and without Nesterov's momentum.
Verdict: SparseLoCo minus DiLoCo, clear at two standard errors. AGREES if it is clearly negative at both numbers of
rounds against the better of the two DiLoCo arms; ORDER ONLY if it is so against the arm with momentum; DISAGREES if it
is clearly positive against the arm with momentum at either number of rounds; else UNDECIDED.
"""

from functools import partial

from study import Answer, Difference, Study, difference

from vecgym.optim import OptimSpec
from vecgym.strategy import DiLoCoStrategy, SparseLoCoStrategy


def diloco(lr: float, outer_lr: float, momentum: float, H: int) -> DiLoCoStrategy:
    outer = OptimSpec("sgd", lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    return DiLoCoStrategy("adamw", outer, lr=lr, H=H)


def sparse(lr: float, outer_lr: float, H: int) -> SparseLoCoStrategy:
    return SparseLoCoStrategy("adamw", H, k=8, chunk=16, bits=2, outer_lr=outer_lr, lr=lr)


def ask(study: Study) -> Answer:
    rows: dict[str, Difference] = {}
    nesterov, better = [], []
    for rounds in (5, 20):
        H, lr = max(1, study.steps // rounds), [3e-3, 1e-2, 3e-2]
        coded = study.arm(f"{rounds} rounds, 2 bits", partial(sparse, H=H), {"lr": lr, "outer_lr": [0.5, 1.0, 2.0]})
        arms = [
            study.arm(
                f"{rounds} rounds, momentum {momentum}",
                partial(diloco, momentum=momentum, H=H),
                {"lr": lr, "outer_lr": [0.2, 0.4, 0.8]},
            )
            for momentum in (0.0, 0.9)
        ]
        found = [difference(coded, arm) for arm in arms]
        rows |= {f"{rounds} rounds: 2 bits - {of}": row for of, row in zip(("no momentum", "Nesterov"), found)}
        nesterov.append(found[1])
        better.append(found[min((0, 1), key=lambda i: arms[i].mean())])
    few, many = (f"{one} (with Nesterov: {other})" for one, other in zip(better, nesterov))
    why = f"2 bits minus the better DiLoCo: {few} in 5 rounds, {many} in 20."
    if all(row.sign == -1 for row in better):
        return Answer("AGREES", why, rows)
    if all(row.sign == -1 for row in nesterov):
        return Answer("ORDER ONLY", why, rows)
    return Answer("DISAGREES" if any(row.sign == 1 for row in nesterov) else "UNDECIDED", why, rows)
