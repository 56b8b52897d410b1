"""The clock, naively: a loop over steps, nodes, layers and messages, and every collective round by round.

A network is a pair of functions `latency(i, j)` seconds and `pace(i, j)` seconds a byte. A message of the queue is
(layers, kind, who, bytes, lag, whether two such are under way at a time); `who` are groups of nodes, in the order of a
ring where that is how they exchange, pairs (sender, receiver), or (up, down) of a server.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

Pair = Callable[[int, int], float]
Message = tuple[Sequence[int], str, Any, float, int, bool]


def slowest(ring: Sequence[int], num_bytes: float, latency: Pair, pace: Pair) -> tuple[float, int]:
    """The seconds of a message over the slowest link of a ring, and the place that this link leads from."""
    took = [latency(i, j) + num_bytes * pace(i, j) for i, j in zip(ring, [*ring[1:], ring[0]])]
    return max(took), took.index(max(took))


def ring_of(nodes: Sequence[int], num_bytes: float, latency: Pair, pace: Pair) -> list[int]:
    """Nearest neighbours, from the best start, and then 2-opt: the ring for messages of this size."""
    rings = []
    for start in nodes:
        ring = [start]
        while len(ring) < len(nodes):
            left = [j for j in nodes if j not in ring]
            ring.append(min(left, key=lambda j: latency(ring[-1], j) + num_bytes * pace(ring[-1], j)))
        rings.append(ring)
    ring = min(rings, key=lambda ring: slowest(ring, num_bytes, latency, pace)[0])
    while True:
        worst, place = slowest(ring, num_bytes, latency, pace)
        ring = ring[place + 1 :] + ring[: place + 1]
        trials = []
        for i in range(1, len(ring)):
            trials += [ring[:i][::-1] + ring[i:], ring[:i] + ring[i:][::-1]]
        best = min(trials, key=lambda ring: slowest(ring, num_bytes, latency, pace)[0])
        if slowest(best, num_bytes, latency, pace)[0] >= worst:
            return ring
        ring = best


def ring_seconds(ring: Sequence[int], num_bytes: float, rounds: int, latency: Pair, pace: Pair) -> float:
    """Each of `rounds` rounds takes as long as the slowest link."""
    seconds = 0.0
    for _ in range(rounds):
        seconds += slowest(ring, num_bytes, latency, pace)[0]
    return seconds


def gloo_phase_seconds(nodes: Sequence[int], num_bytes: float, latency: Pair, pace: Pair) -> float:
    """Reduce-scatter, or all-gather, of gloo's ring: segment after segment, each as slow as its slowest link."""
    n, per_chunk = len(nodes), 2
    while num_bytes > n * per_chunk * 2**20:
        per_chunk += 1
    links = [(nodes[(i + 1) % n], nodes[i]) for i in range(n)]
    sizes = num_bytes / n / per_chunk
    alone = max(latency(i, j) + sizes * pace(j, i) + latency(j, i) for j, i in links)
    sending = max(sizes * pace(j, i) for j, i in links)
    there: list[float] = []
    for segment in range((n - 1) * per_chunk):
        asked = there[segment - 2] if segment > 1 else 0.0  # two are under way
        there.append(max([asked + alone, *(time + sending for time in there[-1:])]))
    return there[-1]


def all_reduce_seconds(algorithm: str, nodes: Sequence[int], num_bytes: float, latency: Pair, pace: Pair) -> float:
    n = len(nodes)
    if algorithm == "ring":
        return ring_seconds(nodes, num_bytes / n, 2 * (n - 1), latency, pace)

    def cost(i: int, j: int, size: float) -> float:
        return latency(nodes[i], nodes[j]) + size * pace(nodes[i], nodes[j])

    seconds = 0.0
    if algorithm == "gloo":
        return 2 * gloo_phase_seconds(nodes, num_bytes, latency, pace)
    if algorithm == "tree":
        distance = 1
        while distance < n:
            senders = [i for i in range(n) if i % (2 * distance) == distance]
            seconds += max(cost(i, i - distance, num_bytes) for i in senders)
            seconds += max(cost(i - distance, i, num_bytes) for i in senders)
            distance *= 2
        return seconds
    core = 1
    while 2 * core <= n:
        core *= 2
    if n > core:
        seconds += max(cost(i, i - core, num_bytes) for i in range(core, n))
        seconds += max(cost(i - core, i, num_bytes) for i in range(core, n))
    distance, size = 1, num_bytes / 2
    while distance < core:
        there = max(cost(i, i ^ distance, size) for i in range(core))
        seconds += there + there
        distance, size = 2 * distance, size / 2
    return seconds


def buckets(sizes: dict[int, float], cap: float, first: float) -> list[tuple[list[int], float]]:
    """(layers, bytes) of each message, last layer first: a message is closed once it is as large as the cap."""
    closed: list[tuple[list[int], float]] = []
    layers: list[int] = []
    for layer in sorted(sizes, reverse=True):
        layers.append(layer)
        size = sum(sizes[x] for x in layers)
        if size >= (cap if closed else first) or layer == min(sizes):
            closed.append((layers, size))
            layers = []
    return closed


def run(
    num_nodes: int,
    compute: Sequence[Sequence[float]],
    shares: Sequence[float],
    steps: Sequence[Sequence[tuple[float, Sequence[Message]]]],
    latency: Pair,
    pace: Pair,
    own_link: tuple[Sequence[float], Sequence[float]] | None,
    overlap: bool,
    all_reduce: str = "ring",
    server: tuple[Sequence[float], float, Sequence[float], Sequence[float]] = ((), 0.0, (), ()),
) -> list[list[float]]:
    """The end of each step on each node, with what it was sent for the next, `[T][K]`.

    Args:
        compute: seconds of each step and node.
        shares: of each layer.
        steps: of each step, (how often they count, messages in the order in which they leave); what counts w times
            delays by that part of what it would delay.
        own_link: seconds a byte of each node's way up and down; None: each pair has a link of its own.
        server: the latency to it of each node, its own seconds a byte, and those of each node's link to it and back.
    """
    K, L = range(num_nodes), len(shares)
    now = [0.0] * num_nodes
    up, down = [0.0] * (num_nodes + 1), [0.0] * (num_nodes + 1)
    needed: dict[tuple[int, int, int], list[float]] = {}  # (step, node, layer) -> when what it needs arrives
    ends = []
    for t, messages in enumerate(steps):
        ready = [[0.0] * L for _ in K]
        for i in K:
            if not overlap:
                for layer in range(L):
                    now[i] = max([now[i], *needed.get((t, i, layer), [])])
            for layer in range(L):
                if overlap:
                    now[i] = max([now[i], *needed.get((t, i, layer), [])])
                now[i] += compute[t][i] / 3 * shares[layer]
            for layer in reversed(range(L)):
                now[i] += compute[t][i] * 2 / 3 * shares[layer]
                ready[i][layer] = now[i]
            if not overlap:
                ready[i] = [now[i]] * L
        for weight, queue in messages:
            before = up[:], down[:]
            threads: dict[Any, list[float]] = {}
            for m, (layers, kind, who, size, lag, two) in enumerate(queue):
                leaves = [max(ready[i][layer] for layer in layers) for i in K]
                if not two or m == 0 or queue[m - 1][2] != who or not queue[m - 1][5]:
                    threads = {}
                if two:
                    arrived = in_two_threads(who, size, leaves, up, down, latency, pace, threads)
                else:
                    arrived = passed(kind, who, size, leaves, up, down, latency, pace, own_link, all_reduce, server)
                for (i, time), layer in itertools.product(arrived.items(), layers):
                    late = leaves[i] + weight * (time - leaves[i])
                    needed.setdefault((t + 1 + (lag if overlap else 0), i, layer), []).append(late)
            for link, old in zip((up, down), before):
                link[:] = [x + weight * (y - x) for x, y in zip(old, link)]
        ends.append([max([now[i], *(x for s in range(L) for x in needed.get((t + 1, i, s), []))]) for i in K])
    return ends


def passed(
    kind: str, who: Any, size: float, leaves: Sequence[float], up: list[float], down: list[float],
    latency: Pair, pace: Pair, own_link: tuple[Sequence[float], Sequence[float]] | None, all_reduce: str,
    server: tuple[Sequence[float], float, Sequence[float], Sequence[float]],
) -> dict[int, float]:  # fmt: skip
    """The times at which one message is at each node that it is for; the links are taken as long as it needs."""
    if kind in ("mix", "permute"):
        return neighbours(who, size, leaves, up, down, latency, pace, own_link)
    if kind.startswith("server"):
        return at_server(kind, who, size, leaves, up, down, server)
    arrived = {}
    for group in who:
        if len(group) > 1:
            if kind == "all_gather":
                took = ring_seconds(group, size, len(group) - 1, latency, pace)
            else:
                took = all_reduce_seconds(all_reduce, group, size, latency, pace)
            begin = max(max(leaves[i], up[i], down[i]) for i in group)
            for i in group:
                up[i] = down[i] = arrived[i] = begin + took
    return arrived


def in_two_threads(
    groups: Sequence[Sequence[int]], size: float, leaves: Sequence[float], up: list[float], down: list[float],
    latency: Pair, pace: Pair, threads: dict[Any, list[float]],
) -> dict[int, float]:  # fmt: skip
    """The end of an all-reduce of gloo, of which each group has two threads, one link, and hands them on in order."""
    arrived = {}
    for group in groups:
        if len(group) > 1:
            free = max(max(up[i], down[i]) for i in group)
            one, other, link, handed = threads.get(group, [free, free, free, float("-inf")])
            begin = max([min(one, other), *(leaves[i] for i in group)])
            link = max(link, begin) + all_reduce_seconds("gloo", group, size, lambda i, j: 0.0, pace)
            end = max(begin + all_reduce_seconds("gloo", group, size, latency, pace), link)
            threads[group] = [end, max(one, other), link, max(handed, end)]
            for i in group:
                up[i] = down[i] = arrived[i] = max(handed, end)
    return arrived


def neighbours(
    pairs: Sequence[tuple[int, int]], size: float, leaves: Sequence[float], up: list[float], down: list[float],
    latency: Pair, pace: Pair, own_link: tuple[Sequence[float], Sequence[float]] | None,
) -> dict[int, float]:  # fmt: skip
    """The arrival of each receiver's last message; those of a node go side by side, its next when they are there."""
    begun = {j: max(leaves[j], up[j]) for j, _ in pairs}
    taken_until = {}
    for j in begun:
        mine = [i for sender, i in pairs if sender == j]
        longest = max(size * pace(j, i) for i in mine)
        taken_until[j] = begun[j] + (longest if own_link is None else len(mine) * size * own_link[0][j])
    arrived = {}
    for i in {receiver for _, receiver in pairs}:
        mine = [j for j, receiver in pairs if receiver == i]
        if own_link is None:
            arrived[i] = max(max(begun[j] + latency(j, i), down[i]) + size * pace(j, i) for j in mine)
        else:
            first = max(down[i], min(begun[j] + latency(j, i) for j in mine))
            last = max(taken_until[j] + latency(j, i) for j in mine)
            arrived[i] = max(last, first + len(mine) * size * own_link[1][i])
    for j, time in taken_until.items():
        up[j] = time + max(latency(j, i) for sender, i in pairs if sender == j)
    for i, time in arrived.items():
        down[i] = time
    return arrived


def at_server(
    kind: str, who: tuple[Sequence[int], Sequence[int]], size: float, leaves: Sequence[float], up: list[float],
    down: list[float], server: tuple[Sequence[float], float, Sequence[float], Sequence[float]],
) -> dict[int, float]:  # fmt: skip
    """To the server, and back: every link is taken until the end."""
    latencies, own, ways_up, ways_down = server
    members = sorted({*who[0], *who[1]})
    latency = max(latencies[i] for i in members)
    begin = max([up[-1], down[-1], *(max(leaves[i], up[i], down[i]) for i in members)])
    took = 0.0
    if kind != "server_send":
        took += latency + max([*(size * ways_up[i] for i in members), len(members) * size * own])
    if kind != "server_gather":
        took += latency + max([*(size * ways_down[i] for i in members), len(members) * size * own])
    for i in [*members, -1]:
        up[i] = down[i] = begin + took
    # Nodes that were sent nothing begin their next round from what the server has, too.
    return dict.fromkeys(range(len(leaves)), begin + took) if who[1] else {}
