"""Decoupled DiLoCo: learners that never stop, and a server that merges fragments of whoever is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from vecgym.core import check
from vecgym.optim import OptimSpec
from vecgym.strategy.asynchronous import EventDriven, countable
from vecgym.strategy.inner import InnerOptions, takes_options
from vecgym.strategy.servers import OuterOptimizer, Server, one_number

if TYPE_CHECKING:
    from typing_extensions import Unpack

Merging = Literal["radial", "mean"]


class DecoupledDiLoCoStrategy(EventDriven):
    """Learners train without a pause; a server merges each fragment of the model when enough of them have sent it.

    The parameters are in F fragments. After a node's own steps t with t mod H = floor((p + 1) H / F) mod H it sends
    Delta_p = base_p - theta_p, with base_p the server's fragment that it has merged last, and goes on. It sends p
    again only after it has merged a newer version. The server collects the messages of its present version of p; later
    ones are dropped. It closes when `quorum` nodes have delivered and then the grace is over, or all have:
    Theta_p <- server(Theta_p, merged Delta_p), and sends Theta_p to all. A node merges what has arrived between two of
    its steps, at least `overlap` steps after it sent p: theta_p <- alpha theta_p + (1 - alpha) Theta_p.

    Weights: w_i = tokens^2 / steps of what the node did to p since it merged it. "mean": sum w Delta / sum w; "radial":
    (sum w |Delta| / sum w) unit(sum w unit(Delta) / sum w) of each tensor, with unit(0) = 0.

    A run is measured in updates of fragments; what is evaluated is the server's model. A row of the history is of the
    messages in its update: a node's loss is the mean over its steps since it merged the fragment, nan for those that
    are not in it; `fragment` says which one. Order, learning rates, data, randomness and the optimizers' states: as in
    `AsyncStrategy`. Bytes: those of the fragment, up per message and down per node and update.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        server: of each fragment by itself, as in `AsyncStrategy`; DiLoCo's SGD when not given.
        quorum: messages after which an update may be made; None: all nodes.
        fragments: F, of about equal size: the largest tensor first, each into the smallest fragment so far; no more
            than there are tensors. Or lists of the parameters' names, each name in one.
        H: steps between two messages of a fragment.
        overlap: steps for which a node goes on at least before it merges what it gets for a message.
        alpha: in [0, 1], how much of its own fragment a node keeps; 0: nothing.
        grace: gamma: the server waits for others for gamma max(0, overlap step_seconds - wait - sync_seconds), where
            wait is the time between the first message and the quorum's last; 0: not at all.
        step_seconds, sync_seconds: in it; None: the mean over the nodes' nominal seconds.
        tokens: of a step, for the weights: one number or `[K]`.
        merging: "radial" or "mean".
        plain: names of tensors that are averaged by "mean" in any case, such as embeddings.
        together: advance all nodes in one call for each step. False: one by one, for proof: the same numbers, to the
            last bit with `engine="loop"`.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`. A schedule is
            as long as the most steps that a node makes.

    Raises:
        ValueError, TypeError: saying what is allowed.

    >>> from vecgym import Trainer
    >>> from vecgym.clock import Compute
    >>> from vecgym.models import Line
    >>> trainer, strategy = Trainer(Line(), torch.ones(64)), DecoupledDiLoCoStrategy("sgd", quorum=1, H=2, lr=0.1)
    >>> model = trainer.fit(strategy, 2, max_updates=3, compute=Compute([1.0, 3.0]), device="cpu", progress=False)
    >>> [(row["sim_seconds"], row["fragment"], row["local_steps_total"]) for row in trainer.history.rows[1:]]
    [(2.0, 0, 2), (6.0, 0, 8), (10.0, 0, 13)]

    Reference: "Decoupled DiLoCo", arXiv 2604.21428. Deviations: embeddings are not found but named, in `plain`; nodes
    keep their shard of the data.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        server: Server | None = None,
        quorum: int | None = None,
        fragments: int | Sequence[Sequence[str]] = 24,
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
        self.server = _of_fragments(server)
        self.quorum = check.optional_integer("quorum", quorum, what="None is all nodes")
        self.fragments = _fragments(fragments)
        self.grace = check.number("grace", grace, "[0, inf)")
        self.H = countable("H", check.integer("H", H, what="optimizer steps between two messages"))
        self.overlap = check.integer("overlap", overlap, 0, what="optimizer steps")
        self.alpha = one_number("alpha", alpha, "[0, 1]", "how much of its own a node keeps")
        self.step_seconds = None if step_seconds is None else check.number("step_seconds", step_seconds, "[0, inf)")
        self.sync_seconds = check.number("sync_seconds", sync_seconds, "[0, inf)")
        self.tokens = tokens
        self._tokens = [check.number("tokens", x, "(0, inf)", "of a step") for x in _listed(tokens)]
        check.choice("merging", merging, get_args(Merging))
        self.merging: Merging = merging
        self.plain = _names("plain", plain)
        self.together = check.flag("together", together)

    def check(self, num_nodes: int, max_steps: int) -> None:
        """Raise a ValueError if the strategy cannot work for this run."""
        self.check_rounds(None, num_nodes)
        if self.quorum is not None and self.quorum > num_nodes:
            raise ValueError(f"quorum={self.quorum} is more than the nodes: give at most {num_nodes}.")
        if len(self._tokens) not in (1, num_nodes):
            raise ValueError(
                f"tokens is for {len(self._tokens)} nodes and the run has {num_nodes}: give [{num_nodes}]."
            )

    def check_updates(self, num_nodes: int, num_updates: int) -> None:
        self.server.check(num_nodes, num_updates)

    def server_of(self, num_nodes: int) -> Server:
        return self.server.of(num_nodes)

    def tokens_of(self, num_nodes: int) -> list[float]:
        """Return the tokens of a step of each node.

        >>> DecoupledDiLoCoStrategy(tokens=4096.0).tokens_of(2)
        [4096.0, 4096.0]
        """
        num_nodes = check.integer("num_nodes", num_nodes)
        return self._tokens if len(self._tokens) == num_nodes else self._tokens * num_nodes

    def fragments_of(self, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """Return the names in each fragment, of parameters of so many bytes.

        >>> DecoupledDiLoCoStrategy(fragments=2).fragments_of({"a": 4, "b": 9, "c": 4})
        (('b',), ('a', 'c'))
        """
        if not isinstance(self.fragments, int):
            if sorted(name for names in self.fragments for name in names) != sorted(sizes):
                raise ValueError(f"fragments={self.fragments} must hold each parameter once: {', '.join(sizes)}.")
            return self.fragments
        parts: list[list[str]] = [[] for _ in range(min(self.fragments, len(sizes)))]
        filled = [0] * len(parts)
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            smallest = filled.index(min(filled))
            parts[smallest].append(name)
            filled[smallest] += sizes[name]
        return tuple(tuple(part) for part in parts)


def merged(v: Tensor, weights: Sequence[float], merging: Merging) -> Tensor:
    """Merge one tensor's movements, `[n, *]` -> `[1, *]`.

    >>> v = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    >>> merged(v, [1.0, 1.0], "mean"), merged(v, [1.0, 1.0], "radial")
    (tensor([[1., 2.]]), tensor([[2.1213, 2.1213]]))
    """
    w = torch.tensor(weights, dtype=v.dtype, device=v.device).view(-1, *[1] * (v.dim() - 1)) / sum(weights)
    if merging == "mean":
        return (w * v).sum(0, keepdim=True)
    size = _lengths(v)
    direction = (w * v / torch.where(size > 0, size, 1.0)).sum(0, keepdim=True)
    length = _lengths(direction)
    return (w * size).sum(0, keepdim=True) * direction / torch.where(length > 0, length, 1.0)


def _lengths(v: Tensor) -> Tensor:
    """The 2-norm of each row, `[n, 1, ...]`; its derivative at 0 is 0."""
    square = (v * v).flatten(1).sum(1).view(-1, *[1] * (v.dim() - 1)) if v.dim() > 1 else v * v
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)


def _of_fragments(given: Server | None) -> Server:
    if given is None:
        return OuterOptimizer()
    server: Server = check.instance("server", given, Server, "a server such as OuterOptimizer(lr=0.7)")
    if server.buffer not in (None, 1) or server.staleness is not None:
        raise ValueError(f"server={server!r} has a buffer of its own, and here the quorum says how many.")
    if any(getattr(type(server), x) is not getattr(Server, x) for x in ("correct", "start")):
        raise ValueError(
            f"server={server!r} corrects each arrival, and here only what is merged is seen: give OuterOptimizer."
        )
    return server


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _fragments(given: Any) -> int | tuple[tuple[str, ...], ...]:
    if isinstance(given, int) and not isinstance(given, bool):
        return check.integer("fragments", given, what="or lists of names of parameters")
    if not isinstance(given, (list, tuple)) or not given:
        raise TypeError(f"fragments={given!r} must be a number, or lists of names of parameters.")
    return tuple(_names("fragments", names) for names in given)


def _names(name: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(x, str) for x in given):
        raise TypeError(f"{name}: {given!r} must be a list of names of parameters.")
    return tuple(given)
