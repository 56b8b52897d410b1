"""Decoupled DiLoCo: learners that never stop; a server that merges fragments of whoever is there (arXiv 2604.21428).

    each learner i, for ever
        merges what is due (below), takes a step of its own optimizer
        after its own steps t with t mod H = offset_p:   sends Delta_{i,p} = base_{i,p} - theta_{i,p}
    the server, for each fragment p on its own
        collects messages of its current version of p
        closes when `quorum` learners have delivered and then the grace is over, or all K have delivered
            Theta_p = outer_p(Theta_p, merged Delta_p);   version_p + 1;   sends Theta_p to all learners

**Fragments** are lists of names of parameters, each name in exactly one. Fragment p of F is due when own steps mod H
= (p + 1) H // F mod H: the last at H, 2H, ... A learner that has sent p does not send it again before it has merged
a newer version (it leaves out its turn); if a learner's version of p is not the server's, it has come too late: the
server drops its message. So every movement that is merged began from the same Theta_p.

**Merging at the learner** happens between two steps: at the beginning of a step, what has arrived by then, if at
least tau own steps have passed since it sent p (tau overlapped steps), or if it has not sent p since it last merged
it:

    theta_{i,p} = alpha theta_{i,p} + (1 - alpha) Theta_p;   base_{i,p} = Theta_p

alpha = 0, the default, discards what the learner did to p since. Of two versions that have arrived, the newer counts.

**Weights.** w_i = tokens^2 / steps of what the learner did to p from its last merge of p to its message, tokens =
steps * tokens_per_step[i]. The mean is sum w Delta / sum w. merging = "radial", the default, takes it for the names
in `plain` only (embeddings); of every other tensor's movements v it averages lengths and directions apart:

    (sum w |v| / sum w)  unit(sum w unit(v) / sum w),      unit(0) = 0

**Grace.** With the quorum's last message at s, the first one at s_0, wait = s - s_0:

    closes at  s + gamma max(0, tau step - wait - sync)          step, sync: seconds, given

or with the K-th message. gamma = 0: at s, after all arrivals of that time.

Times, links and latencies are those of `asynchronous`; a message of a fragment has its share of num_bytes (by
numbers of elements). At one time: ends of steps, arrivals at the server (both by learner, then fragment), closings
(by fragment; each sends to the learners in their order), arrivals at the learners, begins of steps. With one
fragment, a quorum of all, no network, tau = 0, equal speeds and weights it is DiLoCo; with several, Streaming DiLoCo.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.asynchronous import Arrival, Begins, Links, Network, Node, Params, Update, clone, make_nodes
from tests.reference.common import Batch, OptimizerSpec, Schedule

END, DELIVERED, CLOSE, RECEIVED, BEGIN = range(5)  # in their order at one time

Merging = Literal["mean", "radial"]


@dataclass(frozen=True)
class FragmentUpdate(Update):
    """One update of one fragment. `version` counts the updates of all fragments, `total_steps` all steps ended by then.

    Of its arrivals, `round` counts the learner's messages of this fragment, `loss` and `num_steps` are those of
    the steps since its last merge of the fragment; staleness is 0.
    """

    fragment: int


@dataclass
class Message:
    Delta: Params
    version: int
    losses: list[float]
    round: int


@dataclass
class Copy:
    """A learner's knowledge of one fragment."""

    base: Params  # the server's value that it last merged
    version: int = 0
    losses: list[float] = field(default_factory=list)  # of its steps since
    sent_at: int | None = None  # own step, if it has sent since it last merged
    round: int = 0
    coming: list[tuple[int, Params]] = field(default_factory=list)  # on their way, oldest first
    arrived: tuple[int, Params] | None = None  # not merged yet


@dataclass
class Fragment:
    """The server's side of one fragment."""

    names: list[str]
    offset: int
    share: float
    optimizer: torch.optim.Optimizer
    version: int = 0
    messages: dict[int, tuple[Message, float]] = field(default_factory=dict)  # learner -> message, time


def unit(v: Tensor) -> Tensor:
    return v / v.norm() if v.norm() > 0 else torch.zeros_like(v)


def merged(vectors: list[Tensor], weights: list[float], merging: Merging) -> Tensor:
    if merging == "mean":
        return common.mean(vectors, weights)
    length = common.mean([v.norm() for v in vectors], weights)
    return length * unit(common.mean([unit(v) for v in vectors], weights))


def make_fragments(theta: Params, fragments: Sequence[Sequence[str]], H: int, outer: OptimizerSpec) -> list[Fragment]:
    numel = sum(param.numel() for param in theta.values())
    made = []
    for p, names in enumerate(fragments):
        share = sum(theta[name].numel() for name in names) / numel
        optimizer = common.make_optimizer([theta[name] for name in names], outer)
        made.append(Fragment(list(names), (p + 1) * H // len(fragments) % H, share, optimizer))
    return made


def decoupled(
    model: nn.Module,
    batch: Callable[[int, int], Batch],
    num_nodes: int,
    *,
    num_updates: int,
    fragments: Sequence[Sequence[str]],
    quorum: int,
    step_seconds: Callable[[int, int], float],
    H: int = 24,
    tau: int = 2,
    alpha: float = 0.0,
    gamma: float = 0.0,
    step: float = 0.0,
    sync: float = 0.0,
    tokens_per_step: Sequence[float] | None = None,
    merging: Merging = "radial",
    plain: Sequence[str] = (),
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    outer: OptimizerSpec = (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    network: Network | None = None,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
    begins: Begins | None = None,
) -> list[FragmentUpdate]:
    """Run until the server has taken `num_updates` updates of fragments."""
    learners = make_nodes(model, num_nodes, inner)
    Theta = clone(common.parameters(model))
    server = make_fragments(Theta, fragments, H, outer)
    copies = [[Copy({name: Theta[name].clone() for name in f.names}) for f in server] for _ in learners]
    way: dict[tuple[int, int], list[Message]] = {(i, p): [] for i in range(num_nodes) for p in range(len(server))}
    tokens = tokens_per_step or [1.0] * num_nodes
    links = Links(network or Network(), num_nodes)
    events: list[tuple[float, int, int, int]] = []  # (time, kind, learner or fragment, fragment or version)
    updates: list[FragmentUpdate] = []

    def begin(i: int, time: float) -> None:
        for copy in copies[i]:
            if copy.arrived and (copy.sent_at is None or learners[i].own_step - copy.sent_at >= tau):
                merge(learners[i], copy)
        heapq.heappush(events, (time + step_seconds(i, learners[i].own_step), END, i, 0))

    @torch.no_grad()
    def merge(learner: Node, copy: Copy) -> None:
        assert copy.arrived
        copy.version, copy.base = copy.arrived
        theta = common.parameters(learner.model)
        for name, value in copy.base.items():
            theta[name].copy_(alpha * theta[name] + (1 - alpha) * value)
        copy.arrived, copy.sent_at, copy.losses = None, None, []

    def end(i: int, time: float) -> None:
        learner = learners[i]
        loss = float(common.backward(learner.model, batch(i, learner.own_step)))
        common.clip(learner.model, max_norm)
        common.set_rate(learner.optimizer, schedule, learner.own_step)
        learner.optimizer.step()
        learner.own_step += 1
        for p, copy in enumerate(copies[i]):
            copy.losses.append(loss)
            if learner.own_step % H == server[p].offset and copy.sent_at is None:
                theta = common.parameters(learner.model)
                Delta = {name: copy.base[name] - theta[name].detach() for name in copy.base}
                way[i, p].append(Message(Delta, copy.version, list(copy.losses), copy.round))
                copy.sent_at = learner.own_step
                copy.round += 1
                heapq.heappush(events, (links.upload(i, time, server[p].share), DELIVERED, i, p))

    def deliver(i: int, p: int, time: float) -> None:
        message, fragment = way[i, p].pop(0), server[p]
        if message.version != fragment.version:
            return  # too late
        fragment.messages[i] = (message, time)
        if len(fragment.messages) == quorum:
            wait = time - min(arrived for _, arrived in fragment.messages.values())
            grace = gamma * max(0.0, tau * step - wait - sync)
            heapq.heappush(events, (time + grace, CLOSE, p, fragment.version))
        if len(fragment.messages) == num_nodes:
            heapq.heappush(events, (time, CLOSE, p, fragment.version))

    def close(p: int, time: float) -> None:
        fragment = server[p]
        members = sorted(fragment.messages)
        messages = [fragment.messages[i][0] for i in members]
        weights = [(len(m.losses) * tokens[i]) ** 2 / len(m.losses) for i, m in zip(members, messages)]
        for name in fragment.names:
            how = "mean" if name in plain else merging
            Theta[name].grad = merged([m.Delta[name] for m in messages], weights, how)
        fragment.optimizer.step()
        arrivals = [
            Arrival(i, m.round, 0, w, sum(m.losses) / len(m.losses), len(m.losses), fragment.messages[i][1])
            for i, m, w in zip(members, messages, weights)
        ]
        fragment.version += 1
        fragment.messages = {}
        total_steps = sum(learner.own_step for learner in learners)
        updates.append(FragmentUpdate(time, len(updates) + 1, arrivals, clone(Theta), total_steps, p))
        for i in range(num_nodes):
            copies[i][p].coming.append((fragment.version, {name: Theta[name].clone() for name in fragment.names}))
            heapq.heappush(events, (links.download(i, time, fragment.share), RECEIVED, i, p))

    def begin_or_wait(i: int, time: float) -> None:
        """A learner that is absent merges and begins when it is back."""
        later = time if begins is None else begins(i, time)
        if later > time:
            heapq.heappush(events, (later, BEGIN, i, 0))
        else:
            begin(i, time)

    for i in range(num_nodes):
        begin_or_wait(i, 0.0)
    while len(updates) < num_updates:
        now, kind, who, what = heapq.heappop(events)
        if kind == END:
            end(who, now)
            heapq.heappush(events, (now, BEGIN, who, 0))
        elif kind == DELIVERED:
            deliver(who, what, now)
        elif kind == CLOSE and what == server[who].version:  # else it has been closed already
            close(who, now)
        elif kind == RECEIVED:
            copies[who][what].arrived = copies[who][what].coming.pop(0)
        elif kind == BEGIN:
            begin_or_wait(who, now)

    return updates
