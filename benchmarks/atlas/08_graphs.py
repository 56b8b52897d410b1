"""In which order do graphs come at equal bytes on unlike data?

Setting: 8 nodes with unlike data; AdamW, its rate tuned. All average the parameters at 1/4 of a model sent per node
and step: all every 7 steps (a ring all-reduce sends 1.75 models), one peer of an exponential graph or of a random
matching every 4, the 3 neighbours of the exponential graph every 12, the 2 of a ring every 8. The loss is that of the
nodes' mean.
Expected: All-reduce, one peer, matching, exponential, ring, from best to worst; ring minus all-reduce +0.12.
Verdict: ORDER ONLY if the mean losses have this order and the ring's is clearly (two standard errors) above that of
all-reduce, and AGREES if that difference is also within 0.06 to 0.24; DISAGREES if the ring is not clearly above
all-reduce, or a graph is clearly better than the one before it in this order; else UNDECIDED.
"""

from functools import partial

from study import Answer, Study, difference

from vecgym.strategy import FedAvgStrategy, GossipStrategy, Strategy

EVERY = {"all-reduce": 7, "one peer": 4, "matching": 4, "exponential": 12, "ring": 8}  # in the order expected
TOPOLOGY = {
    "one peer": "one_peer_exponential", "matching": "random_matching", "exponential": "exponential", "ring": "ring",
}  # fmt: skip


def averaged(lr: float, graph: str, every: int) -> Strategy:
    if graph == "all-reduce":
        return FedAvgStrategy("adamw", H=every, lr=lr)
    return GossipStrategy(TOPOLOGY[graph], every=every, inner_optim="adamw", lr=lr)


def ask(study: Study) -> Answer:
    arms = {
        graph: study.arm(
            graph, partial(averaged, graph=graph, every=min(every, study.steps)),
            {"lr": [1e-3, 3e-3, 1e-2, 3e-2]}, data="shards", num_nodes=8,
        )
        for graph, every in EVERY.items()
    }  # fmt: skip
    first, *others = arms.values()
    rows = {f"{arm.name} - {first.name}": difference(arm, first) for arm in others}
    ring = rows["ring - all-reduce"]
    steps = [difference(after, before) for before, after in zip([first, *others], others)]
    order = sorted(arms, key=lambda graph: arms[graph].mean())
    why = f"From best to worst: {', '.join(order)}; ring minus all-reduce {ring}."
    if order == list(EVERY) and ring.sign == 1:
        return Answer("AGREES" if 0.06 <= ring.mean <= 0.24 else "ORDER ONLY", why, rows)
    against = ring.sign != 1 or any(step.sign == -1 for step in steps)
    return Answer("DISAGREES" if against else "UNDECIDED", why, rows)
