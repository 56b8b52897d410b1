"""Mime: local steps that mimic those of a central optimizer, with its state and an estimate of the mean gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec, ensure_optim_spec
from vecgym.optim.formulas import FORMULAS
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import Event, Lockstep, RunFacts, Timetable
from vecgym.simulation.when import When
from vecgym.strategy.averages import Outer, ServerMean, Weighting
from vecgym.strategy.base import InnerOptions, Unpack, takes_options
from vecgym.strategy.exchange import DEFAULT_H
from vecgym.strategy.federated.base import Federated
from vecgym.strategy.servers import one_number


class Surveyed(Lockstep):
    """A timetable in which nodes read all batches of a round at its beginning, and each of them twice in its step.

    >>> from vecgym.simulation.when import Rounds
    >>> for events in Surveyed(Lockstep(RunFacts(num_nodes=2, num_steps=3)), Rounds(2), anchored=True).ticks():
    ...     print([(event.what, event.counts, event.reads) for event in events])
    [('survey', 0, 2), ('anchor', 0, 1), ('train', 0, 1)]
    [('anchor', 1, 1), ('train', 1, 1)]
    [('survey', 2, 1), ('anchor', 2, 1), ('train', 2, 1)]
    """

    reads_ahead = True

    def __init__(self, table: Lockstep, rounds: When, anchored: bool) -> None:
        vars(self).update(vars(table))
        self.rounds, self.anchored = rounds, anchored

    def events(self, step: int) -> list[Event]:
        found = list[Event]()
        for event in super().events(step):
            if event.what == self.train and (step == 0 or self.rounds.due(step - 1)):
                last = next((t for t in range(step, self.length) if self.rounds.due(t)), self.length - 1)
                found.append(event._replace(what="survey", reads=last - step + 1))
            if event.what == self.train and self.anchored:
                found.append(event._replace(what="anchor"))
            found.append(event)
        return found


class MimeStrategy(Federated, batched=(), random=False):
    """Local steps of the server's optimizer, whose state is frozen, with gradients corrected by those at theta.

    In a round the server sends theta and the state s of its optimizer. With c the mean over the participants S of their
    gradients at theta, on all batches of the round, each takes its steps from y_i = theta,
    y_i <- y_i - step(g_i(y_i) - g_i(theta) + c, s),  both g_i on the same batch. Then
    theta <- theta + eta mean_S (y_i - theta);  s <- update(s, c), the state after a step with c at the old theta.

    With SGD of momentum mu: step(g, m) = gamma (mu m + g), m <- mu m + c. Adam's count and bias correction are the
    server's, too: rounds. Lite: y_i <- y_i - step(g_i(y_i), s), and c is for s only. Nodes keep nothing from one round
    to the next, so that clients may take part once only. With plain SGD theta reaches the optimum of non-IID data, as
    in SVRG; lite stops near it. With H = 1, all nodes and eta = 1 both are data-parallel training with that optimizer.

    Cost: three gradients per local step, in lite two; a clock counts local steps only. Batch norm's statistics see all
    of these passes. Memory: theta, s and c, once; the nodes' working copies of s. Bytes sent per participant and round:
    2 b P up, of y_i and its gradients, and down b P for theta, s (b P with a momentum, 2 b P with Adam) and, but in
    lite, b P for c.

    Args:
        inner_optim: SGD, Adam or another elementwise optimizer, AdamW when not given.
        H: local steps per round: a number, or a function of the step at which a round begins.
        participation: the fraction of the nodes, sampled anew for each round (at least one).
        weighting: of the nodes in both means: "equal"; "examples"; or a number for each node.
        server_lr: eta.
        lite: whether to leave out the correction.
        lr, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: for an optimizer that is not elementwise, Rprop, settings of single nodes but lr, and `max_norm`.

    >>> MimeStrategy("sgd", H=5, lr=0.1, lite=True)
    MimeStrategy(OptimSpec(SGD, lr=0.1), Exchange(Outer(ServerMean(), optim=OptimSpec(SGD, lr=1.0)), every=5), \
lite=True)

    Reference: Karimireddy et al., "Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning", arXiv
    2008.03606, and github.com/google/fedjax, algorithms/mime.py, mime_lite.py. Deviations: c is of the batches of the
    round, H of each node, in place of the whole shards (the same if a round is an epoch); nodes have equal weights
    unless `weighting` is given, and each batch counts the same.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = DEFAULT_H,
        participation: float = 1.0,
        *,
        weighting: Weighting = "equal",
        server_lr: float | Tensor = 1.0,
        lite: bool = False,
        **inner: Unpack[InnerOptions],
    ) -> None:
        self.lite = check.flag("lite", lite)
        spec = _of_server(ensure_optim_spec(inner_optim, "adamw", argument="inner_optim"))
        if (max_norm := inner.get("max_norm")) is not None:
            raise ValueError(f"max_norm={max_norm!r}: the mean of clipped gradients is biased: leave it out.")
        how = Outer(ServerMean(weighting), OptimSpec("sgd", lr=one_number("server_lr", server_lr, "[0, inf)")))
        super().__init__(spec, how, H, participation, **inner)

    @property
    def rounds(self) -> When:
        """The ends of the rounds."""
        return self.exchanges[0].times(())[0]

    def timetable(self, run: RunFacts) -> Timetable:
        table: Any = super().timetable(run)
        return Surveyed(table, self.rounds, anchored=not self.lite)

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        state = {"control": tree.map(torch.zeros_like, params), "frozen": self.inner.init(params)}
        return own, {**shared, **state}

    def survey(self, part: Part) -> None:
        """Take the mean gradient at the server's parameters, on all batches of the round."""
        theta, reads = self.outer_parameters(part.shared, list(part.params)), part.event.reads
        total = tree.map(torch.clone, part.gradients(at=theta))
        for _ in range(reads - 1):
            total = tree.map(torch.add, total, part.gradients(at=theta))
        how: Any = self.exchanges[0].how
        weights = part.weights(how.inner.weighting) or (1.0,) * part.comm.num_nodes
        shares = torch.tensor(weights, dtype=torch.float64) / (sum(weights) * reads)

        def mean(x: Tensor) -> Tensor:
            return torch.tensordot(x, placed(shares, x.device, x.dtype), ([1], [0]))

        c = part.apart(tree.map(mean, part.comm.server_gather(total)))
        frozen = {f"{slot}/{name}": x for slot, xs in part.shared["frozen"].items() for name, x in xs.items()}
        if down := frozen if self.lite else {**c, **frozen}:
            part.comm.server_send(down)
        part.shared["control"] = c

    def anchor(self, part: Part) -> None:
        """Take the gradient at the server's parameters, on the batch of the step that follows."""
        theta = self.outer_parameters(part.shared, list(part.params))
        part.memo["anchor"] = tree.map(torch.clone, part.gradients(at=theta))

    def train(self, part: Part) -> None:
        """Take a step with the server's state."""
        grads = part.gradients()
        if not self.lite:
            corrected = lambda g, at, c: g - at + c  # noqa: E731
            grads = tree.map(corrected, grads, part.memo["anchor"], part.shared["control"])
        frozen = {slot: tree.map(torch.clone, part.wide(x)) for slot, x in part.shared["frozen"].items()}
        part.home["optimizer"], part.made = frozen, self.rounds.count(part.tick)
        part.missing = {}  # the server's state concerns every parameter
        part.optimize(grads)
        part.report(part.losses)

    def before_exchange(self, part: Part) -> None:
        """Let the server's optimizer take a step at theta, of which only the state is kept."""
        theta = self.outer_parameters(part.shared, list(part.params))
        held = theta, part.shared["control"], part.shared["frozen"]
        _, part.shared["frozen"] = self.inner.step(*held, part.due.number, 0.0, inplace=False)


def _of_server(spec: OptimSpec) -> OptimSpec:
    """Return an optimizer whose state is that of one server, of one number or moment for each parameter."""
    rule = FORMULAS.get(spec.cls)
    of_nodes = [name for name, x in spec.kwargs.items() if name != "lr" and any(y.dim() for y in tree.leaves(x))]
    if rule is None or rule.of_matrices or spec.cls is torch.optim.Rprop or spec.param_groups or of_nodes:
        raise ValueError(
            f"inner_optim={spec!r}: Mime's server keeps one state of an elementwise optimizer, which no rate changes. "
            'Give "sgd", "adam" or a relative, with equal settings for all nodes and parameters; lr may be [K].'
        )
    return spec
