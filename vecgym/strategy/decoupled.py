"""Decoupled DiLoCo: nodes that never stop, and a server that merges fragments of a quorum of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vecgym.collectives.base import payload_bytes
from vecgym.collectives.topology import ServerLinks
from vecgym.core import check, nodes
from vecgym.core.devices import placed
from vecgym.core.tree import Tree, wider
from vecgym.optim import OptimSpec
from vecgym.simulation.events import (
    Agenda,
    Arrival,
    Happening,
    Restart,
    Rules,
    StepSeconds,
    Times,
    Traffic,
    Update,
    Wires,
)
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts, Waves
from vecgym.strategy.asynchronous import EventDriven, countable
from vecgym.strategy.base import InnerOptions, Unpack, takes_options
from vecgym.strategy.corrections import nonzero, row_norms
from vecgym.strategy.fragments import Fragments, check_fragments, cut
from vecgym.strategy.servers import OuterOptimizer, Server, check_server, one_number, updated

Merging = Literal["radial", "mean"]


def _uncorrected(server: Server) -> Server:
    overrides = any(getattr(type(server), x) is not getattr(Server, x) for x in ("correct", "start"))
    if overrides or server.staleness is not None:
        raise ValueError(
            f"server={server!r} corrects or weighs each arrival, and here the server sees only merged movements: give "
            "OuterOptimizer or DelayedNesterov."
        )
    return server


class DecoupledDiLoCoStrategy(EventDriven):
    """Nodes train without a pause; a server merges each fragment of the model when enough nodes have sent it.

    The parameters are in F fragments. After a node's own steps t with t mod H = floor((p + 1) H / F) mod H it sends
    Delta_p = base_p - theta_p, with base_p the server's fragment that it merged last, and continues. It sends p again
    only after it has merged a newer version. The server collects the messages of its present version of p, and drops
    later ones. When `quorum` nodes have delivered and the grace is over, or all nodes have delivered, it closes the
    fragment, Theta_p <- server(Theta_p, merged Delta_p), and sends Theta_p to all nodes. Between two steps, and at
    least `overlap` steps after it sent p, a node merges the version that has arrived:
    theta_p <- alpha theta_p + (1 - alpha) Theta_p.

    Weights: w_i = tokens^2 / steps, of the node's steps since it merged p. "mean": sum w Delta / sum w; "radial":
    (sum w |Delta| / sum w) unit(sum w unit(Delta) / sum w) of each tensor, with unit(0) = 0.

    The length of a run is a number of updates of fragments; the server's model is evaluated. A row of the history is
    about the messages in its update: a node's loss is the mean over its steps since it merged the fragment, nan for
    other nodes; `fragment` is the fragment's index. Order, learning rates, data, randomness and the optimizers' states:
    as in `AsyncStrategy`. Bytes: those of the fragment, up per message and down per node and update.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        server: the server of each fragment, as in `AsyncStrategy`; DiLoCo's SGD when not given.
        quorum: the messages that an update needs; None: those of all nodes.
        fragments: F, of about equal size: the largest tensor first, each into the smallest fragment so far; at most the
            number of tensors. Or lists of names, a function, or None, as in `Exchange`.
        H: steps between two messages of a fragment.
        overlap: the least number of steps between a node's message and its merge of the server's answer.
        alpha: in [0, 1], the weight of its own fragment when a node merges; 0: it takes over the server's.
        grace: gamma: the server waits for more messages for gamma max(0, overlap step_seconds - wait - sync_seconds),
            where wait is the time between the first message and the quorum's last; 0: not at all.
        step_seconds, sync_seconds: see `grace`; None: the mean over the nodes' nominal seconds.
        tokens: the tokens of a step, for the weights: one number or `[K]`.
        merging: "radial" or "mean".
        plain: names of tensors that are always averaged by "mean", such as embeddings.
        together: advance all nodes in one call for each step. False: one by one, for tests: the same numbers, to the
            last bit with `engine="loop"`.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`. A schedule is
            as long as the largest number of steps of a node.

    Raises:
        ValueError, TypeError: for invalid arguments.

    >>> from vecgym import Trainer
    >>> from vecgym.clock import Compute
    >>> from vecgym.models import Line
    >>> trainer, strategy = Trainer(Line(), torch.ones(64)), DecoupledDiLoCoStrategy("sgd", quorum=1, H=2, lr=0.1)
    >>> model = trainer.fit(strategy, 2, max_updates=3, compute=Compute([1.0, 3.0]), device="cpu", progress=False)
    >>> [(row["sim_seconds"], row["fragment"], row["local_steps_total"]) for row in trainer.history.rows[1:]]
    [(2.0, 0, 2), (6.0, 0, 8), (10.0, 0, 13)]

    Reference: "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv 2604.21428. Deviations: embeddings are
    not recognised, but named in `plain`; nodes keep their shard of the data.
    """

    nodes_have = "local"
    server: Server

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        server: Server | None = None,
        quorum: int | None = None,
        fragments: Fragments | None = 24,
        grace: float = 0.0,
        *,
        H: int = 24,
        overlap: int = 2,
        alpha: float | Tensor = 0.0,
        step_seconds: float | None = None,
        sync_seconds: float = 0.0,
        tokens: float | Sequence[float] = 1.0,
        merging: Merging = "radial",
        plain: Sequence[str] = (),
        together: bool = True,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, **inner)
        self.server = _uncorrected(check_server("server", server, OuterOptimizer(), "the quorum says how many"))
        self.quorum = check.optional_integer("quorum", quorum, what="None is all nodes")
        self.fragments = check_fragments("fragments", fragments)
        self.grace = check.number("grace", grace, "[0, inf)")
        self.H = countable("H", check.integer("H", H, what="optimizer steps between two messages"))
        self.overlap = check.integer("overlap", overlap, 0, what="optimizer steps")
        self.alpha = one_number("alpha", alpha, "[0, 1]", "the weight of a node's own fragment when it merges")
        self.step_seconds = None if step_seconds is None else check.number("step_seconds", step_seconds, "[0, inf)")
        self.sync_seconds = check.number("sync_seconds", sync_seconds, "[0, inf)")
        self.tokens = tokens
        several = tokens if isinstance(tokens, (list, tuple)) else [tokens]
        self._tokens = [check.number("tokens", x, "(0, inf)", "of a step") for x in several]
        self.merging = check.choice("merging", merging, get_args(Merging))
        if not isinstance(plain, (list, tuple)) or not all(isinstance(name, str) for name in plain):
            raise TypeError(f"plain={plain!r} must be a list of names of parameters.")
        self.plain = tuple(plain)
        self.together = check.flag("together", together)

    def check(self, num_nodes: int, max_steps: int) -> None:
        super().check(num_nodes, max_steps)
        if self.quorum is not None and self.quorum > num_nodes:
            raise ValueError(f"quorum={self.quorum} is more than the {num_nodes} nodes: give at most {num_nodes}.")
        if len(self._tokens) not in (1, num_nodes):
            raise ValueError(f"tokens is for {len(self._tokens)} nodes: give one number, or [{num_nodes}].")

    def fragments_of(self, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """Return the names in each fragment, given the bytes of each parameter.

        >>> DecoupledDiLoCoStrategy(fragments=2).fragments_of({"a": 4, "b": 9, "c": 4})
        (('b',), ('a', 'c'))
        """
        if not isinstance(self.fragments, int):
            return cut(list(sizes), self.fragments)
        parts: list[list[str]] = [[] for _ in range(min(self.fragments, len(sizes)))]
        filled = [0] * len(parts)
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            smallest = filled.index(min(filled))
            parts[smallest].append(name)
            filled[smallest] += sizes[name]
        return tuple(tuple(part) for part in parts)

    def rules(self, times: Times) -> FragmentRules:
        K, sizes, num_bytes = len(times.nominal), times.sizes, sum(times.sizes.values())
        fragments = [[sizes[name] for name in sizes if name in names] for names in self.fragments_of(sizes)]
        step = sum(times.nominal) / K if self.step_seconds is None else self.step_seconds
        return FragmentRules(
            (1,) * K, wires=times.wires([num_bytes]), absences=times.absences, H=self.H,
            shares=tuple(sum(own) / num_bytes for own in fragments),
            messages=tuple(times.num_messages(own) for own in fragments), quorum=self.quorum or K,
            overlap=self.overlap, gamma=self.grace, nominal=step, sync=self.sync_seconds,
            tokens=tuple(self._tokens * (K // len(self._tokens))),
        )  # fmt: skip

    def timetable(self, run: RunFacts) -> Waves:
        return Waves(run.schedule, together=self.together)

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return each node's parameters, `local`, and the versions that it merged last, `base`; and the server's state.

        From its first step on a node also has its losses since it merged each fragment, `[K, F]`. The server has
        a state for each fragment and, as long as they are needed, "sent i.p.n", message n of node i with fragment p,
        and "version p.v".
        """
        own, _ = super().init(run, params)
        fragments = self.fragments_of({name: payload_bytes(p[:1]) for name, p in params.items()})
        init = self.server.of(run.num_nodes).init
        server = {str(p): init({name: params[name] for name in x}) for p, x in enumerate(fragments)}
        return {**own, "local": params, "base": params}, {"params": params, "server": server}

    def server_rate(self, events: Sequence[Happening], num_nodes: int) -> float | Tensor | None:
        return self.server.of(num_nodes).rate(next(event.version for event in events if isinstance(event, Closed)))

    def train(self, part: Part) -> None:
        params, counts = part.own["local"], part.read_at
        part.own["local"] = self.optimized(part, params, part.gradients(at=params), counts)
        assert part.losses is not None
        losses = part.losses[:, None].expand(-1, len(part.shared["server"]))
        part.own["loss"] = part.own["loss"] + losses if "loss" in part.own else losses

    def upload(self, part: Part) -> None:
        """Send a node's movement of a fragment since it merged it."""
        event, own = part.event.info, part.own
        names = self._names(part)
        movement = {name: own["base"][name] - own["local"][name] for name in names}
        loss = own["loss"][:, event.fragment] / event.num_steps
        label = f"sent {event.node}.{event.fragment}.{event.number}"
        part.shared[label] = {"movement": movement, "loss": loss}
        part.memo.setdefault("uploads", []).append((event, names))

    def merge(self, part: Part) -> None:
        """Merge a version of a fragment into a node's parameters, with weight 1 - `alpha`."""
        event, a, local = part.event.info, self.alpha, part.own["local"]
        version = part.shared[f"version {event.fragment}.{event.number}"]
        part.own["local"] = {**local, **{name: a * local[name] + (1 - a) * z for name, z in version.items()}}
        part.own["base"] = {**part.own["base"], **version}
        at = placed(torch.tensor([event.fragment]), part.own["loss"].device)
        part.own["loss"] = part.own["loss"].index_fill(1, at, 0.0)

    def settle(self, part: Part) -> None:
        """Let the server make a new version of a fragment."""
        event, p, shared = part.event.info, str(part.event.info.fragment), part.shared
        labels = [f"sent {arrival.node}.{p}.{arrival.round}" for arrival in event.arrivals]
        messages = [shared[label] for label in labels]
        together = nodes.join_rows([message["movement"] for message in messages])
        how = {name: "mean" if name in self.plain else self.merging for name in together}
        movement = {name: merged(x, event.weights, how[name]) for name, x in together.items()}
        params, state = updated(
            self.server.of(part.run.num_nodes), {name: shared["params"][name] for name in movement}, movement,
            shared["server"][p], event.version, part.inplace,
        )  # fmt: skip
        shared["params"] = {**shared["params"], **params}
        shared["server"] = {**shared["server"], p: state}
        shared[f"version {p}.{event.version + 1}"] = params
        part.report(torch.cat([message["loss"] for message in messages]))
        for label in labels:
            del shared[label]
        for upload, names in sorted(part.memo.get("uploads", [])):  # in the order of time
            self.send(part, "server_gather", ServerLinks(up=(upload.node,), down=()), names)
        for node in range(part.simulation.run.num_nodes):
            self.send(part, "server_send", ServerLinks(up=(), down=(node,)), self._names(part))

    def forget(self, part: Part) -> None:
        """Delete a version or a message that is not needed any more."""
        del part.shared[part.event.info.label]

    def _names(self, part: Part) -> tuple[str, ...]:
        """Return the parameters in the fragment of an event."""
        return self.fragments_of(part.comm.ledger.sizes)[part.event.info.fragment]


def merged(v: Tensor, weights: Sequence[float], merging: str) -> Tensor:
    """Merge one tensor's movements, `[n, *]` -> `[1, *]`.

    >>> v = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    >>> merged(v, [1.0, 1.0], "mean"), merged(v, [1.0, 1.0], "radial")
    (tensor([[1., 2.]]), tensor([[2.1213, 2.1213]]))
    """
    dtype, v = v.dtype, v.to(wider(v.dtype))
    w = torch.tensor(weights, dtype=v.dtype, device=v.device).view(-1, *[1] * (v.dim() - 1)) / sum(weights)
    if merging == "mean":
        return (w * v).sum(0, keepdim=True).to(dtype)
    size = row_norms(v)
    direction = (w * v / nonzero(size)).sum(0, keepdim=True)
    return ((w * size).sum(0, keepdim=True) * direction / nonzero(row_norms(direction))).to(dtype)


# ---------------------------------------------------------------------------------------------- what happens when


class OfFragment(NamedTuple):
    """A node sends its movement of a fragment, or merges a version of the server's before its next step.

    Attributes:
        what: "upload" or "merge".
        number: the index of the node's message, or the version that it merges.
        num_steps: the number of steps in the movement.
    """

    time: float
    what: str
    node: int
    fragment: int
    number: int
    num_steps: int = 0

    @property
    def rows(self) -> tuple[int, ...]:
        return (self.node,)


class Closed(NamedTuple):
    """The server replaces this version of a fragment, using these movements with these weights."""

    time: float
    fragment: int
    version: int
    arrivals: tuple[Arrival, ...]
    weights: tuple[float, ...]
    what: str = "settle"

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(arrival.node for arrival in self.arrivals)


class Forgotten(NamedTuple):
    """An entry of `shared` is not needed any more: a version, or a message that came too late."""

    time: float
    label: str
    what: str = "forget"


ENDED, DELIVERED, CLOSES, RECEIVED, BEGINS = range(5)  # in their order at one time


@dataclass(frozen=True)
class FragmentRules(Rules):
    """The rules by which nodes and the server of fragments work together; `num_steps` is 1 for each node.

    Every step of a node is an `Arrival` at its end and a `Restart` at its start. Events at one time are in this order:
    ends of steps, messages at the server (both by node, then fragment), fragments that close, versions that reach
    nodes, starts of steps.

    Attributes:
        H: steps between two messages of a fragment.
        shares: the fraction of the model's bytes in each fragment.
        messages: the number of messages in which each fragment is sent, one after the other; (): one.
        quorum: the messages that an update needs.
        overlap: the least number of steps between a node's message and its merge of the answer.
        gamma: the grace; and `nominal`, the seconds of a step, and `sync`: see
            `vecgym.strategy.DecoupledDiLoCoStrategy`.
        tokens: the tokens of a step of each node.

    >>> from vecgym.simulation.events import Stop, schedule
    >>> rules = FragmentRules(num_steps=(1, 1), H=1, shares=(1.0,), quorum=1, tokens=(1.0, 1.0))
    >>> events = schedule(rules, lambda node, step: [1.0, 4.0][node], Stop(updates=2))
    >>> [type(event).__name__ for event in events]
    ['Arrival', 'OfFragment', 'Closed', 'Update', 'OfFragment', 'Restart', 'Arrival', 'OfFragment', 'Closed', 'Update']
    """

    H: int = 1
    shares: tuple[float, ...] = ()
    messages: tuple[int, ...] = ()
    quorum: int = 1
    overlap: int = 0
    gamma: float = 0.0
    nominal: float = 0.0
    sync: float = 0.0
    tokens: tuple[float, ...] = ()

    def events(self, step_seconds: StepSeconds) -> Iterator[Happening]:
        return _Run(self, step_seconds).events()

    def arrivals(self, events: Sequence[Happening]) -> tuple[Arrival, ...]:
        return next(event.arrivals for event in events if isinstance(event, Closed))

    def trained(self, events: Sequence[Happening]) -> tuple[Arrival, ...]:
        return tuple(event for event in events if isinstance(event, Arrival))  # fragments share their steps

    def share(self, events: Sequence[Happening]) -> float:
        return self.shares[self.columns(events)["fragment"]]

    def columns(self, events: Sequence[Happening]) -> dict[str, Any]:
        return {"fragment": next(event.fragment for event in events if isinstance(event, Closed))}

    def taken(self, event: Happening, wires: Wires) -> tuple[dict[int, float], dict[int, float]]:
        if isinstance(event, OfFragment) and event.what == "upload":
            return {event.node: wires.sending(event.node, self.shares[event.fragment])}, {}
        if isinstance(event, Closed):
            share = self.shares[event.fragment]
            return {}, {node: wires.receiving(node, share) for node in range(len(self.num_steps))}
        return {}, {}

    def offset(self, fragment: int) -> int:
        """Return the steps of a node, modulo H, after which it sends a fragment."""
        return (fragment + 1) * self.H // len(self.shares) % self.H


@dataclass
class _Copy:
    """A node's side of a fragment."""

    version: int = 0
    merged_at: int = 0  # own step
    sent_at: int | None = None  # own step, if it has sent since it merged
    number: int = 0  # messages so far
    sent: list[Arrival] = field(default_factory=list)  # messages under way, oldest first
    coming: list[int] = field(default_factory=list)  # versions under way, oldest first
    arrived: int | None = None  # a version that is not merged yet


@dataclass
class _Fragment:
    """The server's side of a fragment."""

    version: int = 0
    messages: dict[int, Arrival] = field(default_factory=dict)  # by node
    users: dict[int, int] = field(default_factory=dict)  # version -> nodes that may still merge it


class _Run(Agenda):
    """The agenda of nodes and the server; `who` is a node or a fragment, `what` a fragment or its version."""

    def __init__(self, rules: FragmentRules, step_seconds: StepSeconds) -> None:
        super().__init__()
        self.rules, self.step_seconds = rules, step_seconds
        K, F = len(rules.num_steps), len(rules.shares)
        self.links = Traffic(rules.wires, K)
        self.copies = [[_Copy() for _ in range(F)] for _ in range(K)]
        self.fragments = [_Fragment() for _ in range(F)]
        self.version = 0
        self.steps, self.begins = [0] * K, [0.0] * K
        for node in range(K):
            if rules.absences is None or rules.absences.is_there(node, 0.0):
                self._begin(node, 0.0)
            else:
                self.push(0.0, BEGINS, node)

    def handlers(self) -> list[Callable[[float, int, int], Iterable[Happening]]]:
        return [self._ended, self._delivered, self._closes, self._received, self._begins]

    def _more_latency(self, node: int, p: int) -> float:
        """Return the additional latency of a fragment that is sent in several messages."""
        messages = self.rules.messages
        return (messages[p] - 1) * self.links.wires.latency[node] if messages else 0.0

    def _begin(self, node: int, time: float) -> None:
        self.begins[node] = time
        self.push(time + self.step_seconds(node, self.steps[node]), ENDED, node)

    def _ended(self, time: float, node: int, _: int) -> Iterator[Happening]:
        step, begin = self.steps[node], self.begins[node]
        yield Arrival(time, node, step, 0, 0, step, 1, begin, time)
        self.steps[node] += 1
        for p, copy in enumerate(self.copies[node]):
            if self.steps[node] % self.rules.H == self.rules.offset(p) and copy.sent_at is None:
                first, count = copy.merged_at, self.steps[node] - copy.merged_at
                copy.sent.append(Arrival(time, node, copy.number, copy.version, 0, first, count, begin, time))
                copy.sent_at = self.steps[node]
                there = self.links.up(node, time, self.rules.shares[p]) + self._more_latency(node, p)
                self.push(there, DELIVERED, node, p)
                yield OfFragment(time, "upload", node, p, copy.number, count)
                copy.number += 1
        self.push(time, BEGINS, node)

    def _delivered(self, time: float, node: int, p: int) -> list[Happening]:
        message, fragment, rules = self.copies[node][p].sent.pop(0)._replace(time=time), self.fragments[p], self.rules
        if message.version != fragment.version:  # too late
            return [Forgotten(time, f"sent {node}.{p}.{message.round}")]
        fragment.messages[node] = message
        if len(fragment.messages) == rules.quorum:
            wait = time - min(other.time for other in fragment.messages.values())
            grace = rules.gamma * max(0.0, rules.overlap * rules.nominal - wait - rules.sync)
            self.push(time + grace, CLOSES, p, fragment.version)
        if len(fragment.messages) == len(rules.num_steps):
            self.push(time, CLOSES, p, fragment.version)
        return []

    def _closes(self, time: float, p: int, version: int) -> list[Happening]:
        fragment, rules = self.fragments[p], self.rules
        if version != fragment.version:  # it has been closed already
            return []
        arrivals = tuple(fragment.messages[node] for node in sorted(fragment.messages))
        weights = tuple((x.num_steps * rules.tokens[x.node]) ** 2 / x.num_steps for x in arrivals)
        fragment.version, fragment.messages = version + 1, {}
        fragment.users[version + 1] = len(rules.num_steps)
        self.version += 1
        for node in range(len(rules.num_steps)):
            self.copies[node][p].coming.append(version + 1)
            there = self.links.down(node, time, rules.shares[p]) + self._more_latency(node, p)
            self.push(there, RECEIVED, node, p)
        return [Closed(time, p, version, arrivals, weights), Update(time, self.version, len(arrivals))]

    def _received(self, time: float, node: int, p: int) -> list[Happening]:
        copy = self.copies[node][p]
        older, copy.arrived = copy.arrived, copy.coming.pop(0)
        return [] if older is None else self._released(time, p, older)

    def _begins(self, time: float, node: int, _: int) -> Iterator[Happening]:
        absences = self.rules.absences
        if absences is not None and (back := absences.begins(node, time)) > time:
            self.push(back, BEGINS, node)
            return
        for p, copy in enumerate(self.copies[node]):
            waited = copy.sent_at is None or self.steps[node] - copy.sent_at >= self.rules.overlap
            if copy.arrived is not None and waited:
                yield OfFragment(time, "merge", node, p, copy.arrived)
                yield from self._released(time, p, copy.arrived)
                copy.version, copy.merged_at = copy.arrived, self.steps[node]
                copy.arrived = copy.sent_at = None
        yield Restart(time, (node,), self.version, (time,))
        self._begin(node, time)

    def _released(self, time: float, p: int, version: int) -> list[Happening]:
        """Note that one more node will not merge a version; the last one makes it `Forgotten`."""
        users = self.fragments[p].users
        users[version] -= 1
        if users[version]:
            return []
        del users[version]
        return [Forgotten(time, f"version {p}.{version}")]
