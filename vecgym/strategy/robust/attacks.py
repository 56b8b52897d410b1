"""`Corrupted`, the stage in which some nodes lie, and what they may say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.simulation.simulation import Part
from vecgym.strategy.averages import normal
from vecgym.strategy.stages import Average, ExchangeFacts, Memory, Stage

STRENGTHS = {"sign_flip": 1.0, "ipm": 2.0, "alie": 1.5, "alie_minus": None, "gaussian": 1.0, "mimic": None}
WITHOUT = ("sign_flip", "mimic")  # attacks that have no strength


class Corrupted(Stage, batched=("strength",), steady=True):
    """Some nodes send other values than their own.

    A named attack knows the values of the honest nodes that take part: their mean m and their standard deviation s,
    with n - 1 in its denominator, of each coordinate. (Nobody counts bytes of what liars find out.) If no honest node
    takes part, liars send their own values.

    | attack | a liar sends |
    |---|---|
    | "sign_flip" | -m |
    | "ipm" (inner product manipulation) | -strength m; 2 |
    | "alie" (a little is enough) | m + strength s; 1.5 |
    | "alie_minus" | m - strength s; of n nodes with b liars the paper's normal quantile of \
(n - floor(n / 2 + 1)) / (n - b) |
    | "gaussian" | strength times a standard normal number for each coordinate, of each liar its own; 1 |
    | "mimic" | the values of the first honest node |

    A function of one argument, x `[K, *]`, gives the values that nodes would send if they lied, coordinate by
    coordinate or node by node; the default turns the sign of each liar's own values. A function of two, `(x, honest)`,
    gets the values of all nodes that take part, and a mask `[K]`, on the CPU, of those who are honest; it returns
    `[K, *]`, `[1, *]` or `[*]`, of which the liars send theirs. `vecgym.data.flip_labels` is an attack in the data.

    Args:
        inner: the average of the sent values.
        nodes: the ids of the nodes that lie.
        attack: a name, or a function of each tensor.
        strength: the number in the table; None: the one that is given there.

    Raises:
        ValueError, TypeError: unless `nodes` is a list of different ids; for an unknown attack, or a strength of an
            attack that has none; before the first step for a node that the run does not have.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Mean, Robust
    >>> part, values = Part.alone(StackedCollectives(3)), {"w": torch.tensor([1.0, 2.0, 3.0])}
    >>> Corrupted(Mean(), [1], lambda x: -20 * x)(values, part), Corrupted(Mean(), [1], "ipm")(values, part)
    ({'w': tensor([-12.])}, {'w': tensor([0.])})
    >>> Corrupted(Robust("median"), [1], lambda x, honest: 9 * x[honest].max())(values, part)
    {'w': tensor([3.])}

    References: ALIE: Baruch et al., "A Little Is Enough", arXiv 1902.06156; IPM: Xie et al., "Fall of Empires", arXiv
    1903.03936; mimic: Karimireddy et al., arXiv 2006.09365. Signs and numbers: "alie" and the strengths are those of
    github.com/LPD-EPFL/byzfl, "alie_minus" is that of github.com/epfml/byzantine-robust-noniid-optimizer. Deviation:
    "mimic" always copies the honest node with the lowest id.
    """

    def __init__(self, inner: Average, nodes: Sequence[int], attack: Any = torch.neg, strength: Any = None) -> None:
        super().__init__(inner)
        several = isinstance(nodes, (list, tuple, range)) and not any(isinstance(node, Tensor) for node in nodes)
        self.nodes = [check.integer("nodes", x, 0, "the id of a node that lies") for x in (nodes if several else ())]
        if not several or len(set(self.nodes)) != len(nodes):
            raise ValueError(f"nodes={nodes!r} must be a list of different node ids, such as [1].")
        if isinstance(attack, str):
            check.choice("attack", attack, STRENGTHS, "a function of a tensor")
        elif not callable(attack):
            raise TypeError(f"attack={attack!r} must be a function of a tensor, such as lambda x: -20 * x.")
        if strength is not None and (callable(attack) or attack in WITHOUT):
            raise ValueError(f"attack={attack!r} has no strength: leave out strength={strength!r}.")
        self.attack, number = attack, STRENGTHS[attack] if isinstance(attack, str) and strength is None else strength
        self.strength = None if number is None else check.per_node("strength", number, num_nodes=1)

    @property
    def random(self) -> bool:  # type: ignore[override]
        return bool(self.attack == "gaussian")

    def check(self, run: ExchangeFacts) -> None:
        if max(self.nodes, default=0) >= run.num_nodes:
            raise ValueError(f"nodes={self.nodes} of a run of {run.num_nodes} nodes: give ids below {run.num_nodes}.")

    def send(self, x: Tree, part: Part, memory: Memory) -> Tree:
        lies = torch.isin(part.ids, torch.tensor(self.nodes, dtype=torch.long))
        if callable(self.attack) and _arguments(self.attack) < 2:
            false = part.apart(tree.map(self.attack, part.flat(x)))
        elif self.attack == "gaussian":
            noise = {name: normal(y, f"attack {name}", part).expand_as(y) for name, y in part.wide(x).items()}
            false = tree.map(lambda y: part.scaled(self.strength, y), noise)
        else:
            false = self._knowing(part.wide(x), part)

        def sent(true: Tensor, false: Tensor) -> Tensor:
            of_nodes = placed(lies, true.device).reshape(-1, *[1] * (true.dim() - part.lead))
            return torch.where(of_nodes, false, true)

        return tree.map(sent, x, false)

    def _knowing(self, x: Tree, part: Part) -> Tree:
        """Return the liars' values, `[.., 1 or rows, *]`, made of the values of all nodes that take part."""
        honest = torch.tensor([node not in self.nodes for node in part.comm.members or range(part.comm.num_nodes)])
        if not bool(honest.any()) or bool(honest.all()):
            return x
        everyone, axis, attack = part.comm.everyone(x), part.lead - 1, self.attack
        if isinstance(attack, str):
            ids = honest.nonzero()[:, 0]
            return tree.map(lambda y: self._named(y.index_select(axis, placed(ids, y.device)), part, honest), everyone)

        def of_each(y: Tensor) -> Tensor:
            each = [attack(one, honest).expand_as(one) for one in (y if axis else y[None])]
            found = torch.stack(each).index_select(1, placed(part.comm.node_ids, y.device))
            return found if axis else found[0]

        return tree.map(of_each, everyone)

    def _named(self, honest: Tensor, part: Part, who: Tensor) -> Tensor:
        axis, count = part.lead - 1, honest.shape[part.lead - 1]
        if self.attack == "mimic":
            return honest.narrow(axis, 0, 1)
        mean, strength = honest.mean(axis, keepdim=True), self.strength
        if self.attack in ("sign_flip", "ipm"):
            return -part.scaled(strength, mean)
        if strength is None:
            share = (len(who) - (len(who) // 2 + 1)) / count
            strength = NormalDist().inv_cdf(share) if 0 < share < 1 else 0.0
        deviation = part.scaled(strength, honest.std(axis, keepdim=True, correction=min(1, count - 1)))
        return mean + deviation if self.attack == "alie" else mean - deviation


def _arguments(attack: Callable[..., Tensor]) -> int:
    """Count the arguments that a function must get; 1 if it has no signature in Python, as `torch.neg`."""
    try:
        parameters = inspect.signature(attack).parameters.values()
    except (TypeError, ValueError):
        return 1
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
