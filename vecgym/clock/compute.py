"""Compute times of the nodes: the seconds of each step of each node."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.clock.units import numbers, readable_span, readable_time, step_seconds
from vecgym.clock.units import seconds as in_seconds
from vecgym.core import check, rng
from vecgym.core.errors import warn
from vecgym.core.objects import altered
from vecgym.records.history import History

BLOCK = 1024  # steps whose random numbers are drawn together
FORWARD = 1 / 3  # of a step's time; the backward pass takes the rest


class Compute:
    """The seconds that a node takes for a step: forward pass, backward pass and optimizer.

    The forward pass takes a third of them, the backward pass two thirds, layer by layer in the order of the parameters.

    Args:
        seconds: of a step: a number (or a text such as "400 ms"), or `[K]`, one for each node.
        overlap: whether nodes compute while they send. If not, everything is sent after the backward pass, and the next
            step begins once everything has arrived, even what is needed only later.
        shares: how a step's time is divided among the parameters, in any unit, such as {name of a parameter: FLOP}.
            Parameters that are not named take no time. None: in proportion to their bytes.

    Raises:
        ValueError, TypeError: for values that are not allowed.

    >>> Compute(0.4), Compute([0.4, 0.4, 1.2]), Compute("400 ms", overlap=False)
    (Compute(400 ms), Compute([3] of 400 ms to 1.2 s), Compute(400 ms, overlap=False))
    >>> Compute([0.4, 0.4, 1.2]).num_nodes, Compute(0.4).num_nodes
    (3, None)
    >>> Compute([0.4, 1.2]).of_steps(3, num_nodes=2)
    tensor([[0.4000, 1.2000],
            [0.4000, 1.2000],
            [0.4000, 1.2000]], dtype=torch.float64)
    """

    @check.strict
    def __init__(self, seconds: Any, *, overlap: bool = True, shares: Mapping[str, float] | None = None) -> None:
        self.seconds = numbers("seconds", seconds, step_seconds)
        self.overlap = check.flag("overlap", overlap)
        self.shares = None if shares is None else _checked_shares(shares)
        self.sigma = 0.0
        self.seed = 0

    @classmethod
    def lognormal(cls, median: Any, sigma: float, seed: int = 0, **options: Any) -> Compute:
        """Draw the time of each step and node independently: `median` * exp(sigma z) with z ~ N(0, 1).

        The mean is exp(sigma^2 / 2) times the median. Step t of node i takes the same time in every run with this seed,
        however many steps the run has.

        Args:
            median: seconds, a number or `[K]`.
            sigma: standard deviation of the logarithm: with 0.3, one step in six exceeds 1.35 times the median.
            seed: of the random numbers.
            options: `overlap`, `shares`.

        >>> Compute.lognormal(0.4, sigma=0.3).of_steps(2, num_nodes=2)
        tensor([[0.2706, 0.4371],
                [0.7427, 0.5323]], dtype=torch.float64)
        """
        median = numbers("median", median, step_seconds)
        sigma = check.number("sigma", sigma, "[0, 100]", "the standard deviation of the logarithm")
        return altered(cls(0.0, **options), seconds=median, sigma=sigma, seed=check.seed("seed", seed))

    @classmethod
    def from_flop(
        cls, flop: float | Mapping[str, float], peak_flops: float, utilization: float = 0.4, **options: Any
    ) -> Compute:
        """Compute the seconds of a step as flop / (utilization * peak_flops).

        Args:
            flop: floating point operations of a step of one node: about 6 N D for N parameters and D tokens, forward
                and backward. Or those of each parameter, {name: FLOP}: the total time is that of their sum, and each
                parameter takes its share.
            peak_flops: peak floating point operations per second of a node: a number or `[K]`.
            utilization: the fraction of the peak that is reached, in (0, 1] ("MFU").
            options: `overlap`, `shares`.

        >>> Compute.from_flop(6 * 1e9 * 2**20, peak_flops=989e12, utilization=0.4)  # 1 B parameters, 1 M tokens
        Compute(15.9 s)
        """
        if isinstance(flop, Mapping):
            options = {"shares": flop, **options}
            flop = sum(_checked_shares(flop, "flop").values())
        flop = check.number("flop", flop, "(0, inf)", "floating point operations of a step of one node")
        utilization = check.number("utilization", utilization, "(0, 1]", "the fraction of peak_flops that is reached")
        peak = numbers("peak_flops", peak_flops, partial(check.number, within="(0, inf)", what="a number or [K]"))
        return altered(cls(0.0, **options), seconds=numbers("seconds", flop / (utilization * peak), in_seconds))

    @classmethod
    def measured(cls, history: Any, *, nodes_at_once: int | None = None, **options: Any) -> Compute:
        """Take the median seconds of a step from a run recorded on this machine.

        Args:
            history: of a `Trainer`, or a list of seconds, one for each step.
            nodes_at_once: how many nodes this machine computed at a time; the measured time is divided by it. Default:
                all nodes of the run, `history.settings["num_nodes"]`; for a list, 1.
            options: `overlap`, `shares`.

        >>> Compute.measured([0.5, 0.4, 0.41])
        Compute(410 ms)
        """
        if isinstance(history, (list, tuple, np.ndarray)):
            values = [check.number(f"history[{i}]", x, "[0, inf)", "seconds of a step") for i, x in enumerate(history)]
            step_seconds, nodes = np.array(values), 1
        else:
            check.instance("history", history, History, "trainer.history, or a list of seconds")
            times = history["seconds"] if len(history) else []
            step_seconds = np.diff(np.asarray(times, dtype=np.float64))
            nodes = history.settings.get("num_nodes", 1)
        step_seconds = step_seconds[np.isfinite(step_seconds)]
        if len(step_seconds) == 0:
            raise ValueError("the history has too few steps to measure: train at least two, or give Compute(seconds).")
        count = nodes if nodes_at_once is None else check.integer("nodes_at_once", nodes_at_once)
        seconds = numbers("seconds", float(np.median(step_seconds)) / count, in_seconds)
        return altered(cls(0.0, **options), seconds=seconds)  # no mistake in a unit

    @property
    def num_nodes(self) -> int | None:
        """K if there is a time for each node; None if it fits any number of nodes."""
        return len(self.seconds) if self.seconds.dim() else None

    def check(self, num_nodes: int) -> None:
        """Raise a ValueError unless it fits this number of nodes.

        >>> Compute([0.4, 1.2]).check(3)
        Traceback (most recent call last):
        ...
        ValueError: Compute has seconds for 2 nodes and the run has 3: give one number, or [3].
        """
        check.fits("Compute has seconds for", self.num_nodes, num_nodes, f"one number, or [{num_nodes}]")

    def of_steps(self, num_steps: int, num_nodes: int) -> Tensor:
        """Return the seconds of the first `num_steps` steps of each node, `[T, K]`."""
        num_steps, num_nodes = check.integer("num_steps", num_steps, 0), check.integer("num_nodes", num_nodes)
        self.check(num_nodes)
        steady = self.seconds.expand(num_steps, num_nodes)
        if self.sigma == 0 or num_steps == 0:
            return steady
        blocks = range((num_steps + BLOCK - 1) // BLOCK)
        draws = [torch.cat([self.drawn(node, block) for block in blocks])[:num_steps] for node in range(num_nodes)]
        return steady * (self.sigma * torch.stack(draws, 1)).exp()

    def drawn(self, node: int, block: int) -> Tensor:
        """Return the standard normal random numbers of a block of 1024 steps of a node.

        >>> Compute.lognormal(0.4, sigma=0.3).drawn(node=0, block=0).shape
        torch.Size([1024])
        """
        node, block = check.integer("node", node, 0), check.integer("block", block, 0)
        generator = rng.generator(self.seed, "compute", node, block)
        return torch.randn(BLOCK, dtype=torch.float64, generator=generator)

    def shares_of(self, sizes: Mapping[str, float]) -> Tensor:
        """Return the fraction of a step's time that each of these parameters takes, `[L]`, summing to 1.

        >>> Compute(1.0).shares_of({"a": 300, "b": 100}), Compute(1.0, shares={"b": 5}).shares_of({"a": 300, "b": 100})
        (tensor([0.7500, 0.2500], dtype=torch.float64), tensor([0., 1.], dtype=torch.float64))
        """
        check.instance("sizes", sizes, Mapping, "{name: bytes} of the parameters")
        weights = sizes if self.shares is None else {name: self.shares.get(name, 0.0) for name in sizes}
        values = torch.tensor(
            [check.number(f"sizes[{name!r}]", x, "[0, inf)") for name, x in weights.items()], dtype=torch.float64
        )
        if float(values.sum()) <= 0:
            if self.shares is not None:
                warn(f"none of the parameters is in shares, which has {', '.join(list(self.shares)[:5])}: using sizes.")
                return Compute(self.seconds).shares_of(sizes)
            values = torch.ones_like(values)
        return values / values.sum()

    def __repr__(self) -> str:
        parts = [readable_span(self.seconds, readable_time)]
        parts += [f"sigma={self.sigma:g}", f"seed={self.seed}"] if self.sigma else []
        parts += [] if self.overlap else ["overlap=False"]
        parts += [] if self.shares is None else [f"shares of {len(self.shares)} parameters"]
        return f"Compute({', '.join(parts)})"


def _checked_shares(shares: Any, name: str = "shares") -> dict[str, float]:
    if not isinstance(shares, Mapping) or not all(isinstance(key, str) for key in shares):
        raise TypeError(f"{name} is {check.kind_of(shares)}; give a dict, {{name of a parameter: FLOP}}.")
    return {key: float(check.number(f"{name}[{key!r}]", x, "[0, inf)")) for key, x in shares.items()}
