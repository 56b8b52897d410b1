"""Servers that do not wait for all nodes: their updates from movements that arrive one by one.

A `Server` holds the parameters theta and receives the movements Delta_i = start_i - theta_i of the nodes' rounds, each
weighted by w(s) for a staleness of s versions. See `vecgym.strategy.AsyncStrategy`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.devices import readable, spread
from vecgym.core.objects import UNSAID, Strict, altered, declare, shown
from vecgym.core.tree import Tree
from vecgym.optim import Optimizer, OptimSpec
from vecgym.simulation.state import a_kind, check_values
from vecgym.strategy.averages import OUTER_DEFAULTS, outer_spec
from vecgym.strategy.corrections import corrected

StalenessName = Literal["none", "inverse_sqrt"]
SERVERS = "a server such as OuterOptimizer(lr=0.1), DelayedNesterov(lr=0.1) or FedBuff(buffer=10)"
ServerState = dict[str, Any]
Staleness = Callable[[int], Any]  # versions -> the weight of a movement, a number or a tensor


STALENESS: dict[str, Staleness] = {
    "none": lambda staleness: 1.0,
    "inverse_sqrt": lambda staleness: float((1 + staleness) ** -0.5),
}


class Server(Strict, ABC):
    """A server's update from the movements that have arrived. Override `update`, and `init` if it has a state.

    A server holds settings only; its state is nested dicts of tensors `[1, *]`.

    Example: a server that goes the whole way, whatever the staleness.

    >>> class Follow(Server):
    ...     def update(self, params, movement, state, update, inplace=False):
    ...         return tree.map(torch.sub, params, movement), state
    >>> server, params = Follow(), {"w": torch.tensor([5.0])}
    >>> server.of(num_nodes=4).update(params, {"w": torch.tensor([2.0])}, server.init(params), update=0)
    ({'w': tensor([3.])}, {})
    >>> server.batched is None  # in a sweep, its configurations are trained one by one
    True
    """

    # Declared by `class Mine(Server, batched=("lr",))`: arguments that may be `[C]`, one value per configuration of a
    # sweep, with parameters, movements and state `[C, *]`; None: the methods work on one configuration.
    batched: tuple[str, ...] | None = None
    # Movements per update, and their weights; None: the strategy's settings.
    buffer: int | None = None
    staleness: StalenessName | None = None

    def __init_subclass__(cls, batched: Any = UNSAID) -> None:
        super().__init_subclass__()
        declare(cls, batched)
        signature = inspect.signature(cls.update)
        try:
            signature.bind("self", "params", "movement", "state", "update", inplace=True)
        except TypeError:
            form = "update(self, params, movement, state, update, inplace=False)"
            raise TypeError(f"class {cls.__name__}: give {form} instead of update{signature}.") from None

    def check(self, num_nodes: int, num_updates: int) -> None:
        """Raise a ValueError if the server cannot work for this run."""
        return

    def of(self, num_nodes: int) -> Server:
        """Return the server of a run with `num_nodes` nodes, with values for all settings that depend on it."""
        return self

    def init(self, params: Tree) -> ServerState:
        """Return the initial state."""
        return {}

    def start(self, params: Tree, state: ServerState) -> Tree:
        """Return the parameters for nodes that begin a round, from the server's parameters `[1, *]`."""
        return params

    def correct(self, movement: Tree, state: ServerState) -> Tree:
        """Return the correction of a movement `[1, *]` that arrives, before it is weighted."""
        return movement

    @abstractmethod
    def update(
        self, params: Tree, movement: Tree, state: ServerState, update: int, inplace: bool = False
    ) -> tuple[Tree, ServerState]:
        """Return the server's parameters and state after an update.

        Args:
            params: `[1, *]`.
            movement: the mean of the weighted movements, `[1, *]`.
            state: from `init` or the update before.
            update: the index of the update, from 0.
            inplace: whether parameters and state may be overwritten; if not, the result can be differentiated.
        """

    def rate(self, update: int) -> float | Tensor | None:
        """Return the learning rate of an update, if the server has one."""
        return None

    def __repr__(self) -> str:
        return shown(self)


class OuterOptimizer(Server, batched=()):
    """theta <- optimizer(theta, Delta), with the mean movement as the gradient.

    Args:
        outer_optim: "sgd" and `torch.optim.SGD` mean DiLoCo's SGD(lr=0.7, momentum=0.9, nesterov=True); an `OptimSpec`,
            and any other optimizer, keeps its own settings. With an update at every arrival, the momentum of K
            arrivals in a row adds up: smaller rates than DiLoCo's, about 1 / K of them, are usual.
        lr: its learning rate, unless `outer_optim` has one.

    >>> server, params = OuterOptimizer(OptimSpec("sgd", lr=0.5)), {"w": torch.zeros(1)}
    >>> server.update(params, {"w": torch.ones(1)}, server.init(params), update=0)[0], server.rate(0)
    ({'w': tensor([-0.5000])}, 0.5)
    """

    def __init__(
        self, outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None, lr: float | Tensor | None = None
    ) -> None:
        self.optimizer = Optimizer(outer_spec(outer_optim, lr))

    @property
    def outer_optim(self) -> OptimSpec:
        """The class of the server's optimizer, and its hyperparameters."""
        return self.optimizer.spec

    def check(self, num_nodes: int, num_updates: int) -> None:
        self.outer_optim.check_steps(1, num_updates, "server's optimizer")

    def init(self, params: Tree) -> ServerState:
        return self.optimizer.init(params)

    def update(
        self, params: Tree, movement: Tree, state: ServerState, update: int, inplace: bool = False
    ) -> tuple[Tree, ServerState]:
        return self.optimizer.step(params, movement, state, update, inplace=inplace)

    def rate(self, update: int) -> float | Tensor | None:
        return self.outer_optim.at(update).hyper.get("lr")

    def __repr__(self) -> str:
        return shown(self, outer_optim=self.outer_optim)


class FedBuff(OuterOptimizer, batched=("momentum",)):
    """theta <- theta - lr Delta, where Delta is the mean of `buffer` arrivals, each weighted (1 + s)^(-1/2).

    Args:
        buffer: M, the arrivals per update.
        lr, momentum: of the server's SGD.

    >>> FedBuff(buffer=5, lr=0.5)
    FedBuff(buffer=5, lr=0.5)

    Reference: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", arXiv 2106.06639. Deviation:
    no noise is added for privacy. github.com/facebookresearch/FLSim sums the buffer, so that its rates are ours divided
    by `buffer`, and divides the weights by the weight of a usual staleness. The default lr = 1 is ours.
    """

    staleness = "inverse_sqrt"

    def __init__(self, buffer: int = 10, lr: float | Tensor = 1.0, momentum: float | Tensor = 0.0) -> None:
        self.buffer = check.integer("buffer", buffer, what="arrivals per update of the server")
        super().__init__(OptimSpec("sgd", lr=lr, momentum=momentum))
        self.momentum = momentum

    def __repr__(self) -> str:
        return shown(self, lr=self.outer_optim.lr)


class DelayedNesterov(Server, batched=("lr", "momentum", "c")):
    """Nesterov's momentum that moves only with every N-th arrival; in between, the server follows each movement.

    Delta <- Delta + g, with g the movement. At every N-th arrival:
    m <- beta m + Delta / N;  theta <- theta - eta ((1 - c N + c) beta m + g / N);  Delta <- 0;
    at all others theta <- theta - eta (c beta m + g / N).

    State: `momentum` and `buffer`, two copies of the parameters.

    Args:
        lr: eta.
        momentum: beta.
        buffer: N; None: the number of nodes.
        c: in [0, 1 / N], the fraction of the momentum that each arrival in between applies.

    >>> server, params = DelayedNesterov(lr=1.0, momentum=0.5, buffer=2), {"w": torch.zeros(1)}
    >>> state = server.init(params)
    >>> for update in range(2):
    ...     params, state = server.update(params, {"w": torch.ones(1)}, state, update)
    ...     print(params["w"])
    tensor([-0.5000])
    tensor([-1.5000])

    Reference: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, algorithm 3.
    No deviation.
    """

    def __init__(
        self,
        lr: float | Tensor = OUTER_DEFAULTS["lr"],
        momentum: float | Tensor = OUTER_DEFAULTS["momentum"],
        buffer: int | None = None,
        c: float | Tensor = 0.0,
    ) -> None:
        self.lr = one_number("lr", lr, "[0, inf)")
        self.momentum = one_number("momentum", momentum, "[0, 1)")
        self.num_arrivals = check.optional_integer("buffer", buffer, what="None is the number of nodes")
        self.c = one_number("c", c, "[0, 1]", "the fraction of the momentum that each arrival in between applies")
        self._check_c(self.num_arrivals or 1)

    def check(self, num_nodes: int, num_updates: int) -> None:
        self._check_c(self.num_arrivals or num_nodes)

    def rate(self, update: int) -> float | Tensor | None:
        return self.lr

    def of(self, num_nodes: int) -> Server:
        return altered(self, num_arrivals=self.num_arrivals or num_nodes)

    def _check_c(self, number: int) -> None:
        with readable():
            c = float(torch.as_tensor(self.c, dtype=torch.float64).tolist())  # type: ignore[arg-type]  # of one number
        if c * number > 1 + 1e-9:
            raise ValueError(f"c={c:g} must be in [0, 1 / buffer] = [0, {1 / number:g}].")

    def init(self, params: Tree) -> ServerState:
        return {"momentum": tree.map(torch.zeros_like, params), "buffer": tree.map(torch.zeros_like, params)}

    def update(
        self, params: Tree, movement: Tree, state: ServerState, update: int, inplace: bool = False
    ) -> tuple[Tree, ServerState]:
        if self.num_arrivals is None:
            raise ValueError("buffer=None is the number of nodes: call server.of(num_nodes) first.")
        N, beta, c = self.num_arrivals, self.momentum, self.c
        buffer, momentum = tree.map(torch.add, state["buffer"], movement), state["momentum"]
        share = c
        if (update + 1) % N == 0:
            momentum = tree.map(lambda m, d: spread(beta, m) * m + d / N, momentum, buffer)
            buffer, share = tree.map(torch.zeros_like, buffer), 1 - c * N + c
        step = tree.map(lambda m, g: spread(share * beta, m) * m + g / N, momentum, movement)
        stepped = tree.map(lambda p, x: p - spread(self.lr, x) * x, params, step)
        return stepped, {"momentum": momentum, "buffer": buffer}

    def __repr__(self) -> str:
        return shown(self, buffer=self.num_arrivals)


class MLA(Server, batched=("lr", "momentum")):
    """Momentum look-ahead: a running mean of movements, and a step of the movement and of the momentum.

    m <- mu m + (1 - mu) Delta;  theta <- theta - eta (Delta + mu m).

    State: `momentum`, of the size of the parameters. Equal movements in a row move theta by 1 + mu times each;
    torch's Nesterov, whose momentum is a sum, moves it by 1 / (1 - mu) times.

    Args:
        lr: eta.
        momentum: mu.

    >>> server, params = MLA(lr=1.0, momentum=0.5), {"w": torch.zeros(1)}
    >>> server.update(params, {"w": torch.ones(1)}, server.init(params), update=0)
    ({'w': tensor([-1.2500])}, {'momentum': {'w': tensor([0.5000])}})

    Reference: Ajanthan et al., "Momentum Look-Ahead for Asynchronous Distributed Low-Communication Training",
    openreview 4O8nzTkHPI; the rule and the defaults are those of a third party, github.com/aaasif-isu/panofabric-engine
    (0953c64), panoengine/decentralized/mla.py, where nodes begin from theta, as here. Nodes that begin where the
    momentum leads are `HeLoCo`'s.
    """

    def __init__(self, lr: float | Tensor = 0.1, momentum: float | Tensor = 0.9) -> None:
        self.lr = one_number("lr", lr, "[0, inf)")
        self.momentum = one_number("momentum", momentum, "[0, 1)")

    def rate(self, update: int) -> float | Tensor | None:
        return self.lr

    def init(self, params: Tree) -> ServerState:
        return {"momentum": tree.map(torch.zeros_like, params)}

    def update(
        self, params: Tree, movement: Tree, state: ServerState, update: int, inplace: bool = False
    ) -> tuple[Tree, ServerState]:
        mu = self.momentum
        held = tree.map(lambda m, g: spread(mu, m) * m + spread(1 - mu, g) * g, state["momentum"], movement)
        step = tree.map(lambda g, m: g + spread(mu, m) * m, movement, held)
        return tree.map(lambda p, x: p - spread(self.lr, x) * x, params, step), {"momentum": held}


class HeLoCo(MLA, batched=("lr", "momentum", "rho")):
    """Momentum as a running mean of movements; tensors of a movement that point against it are corrected.

    With c = cos(Delta, m) and conf = |Delta| / (|Delta| + 3 |m| + 1e-8), Delta becomes

    c >= 0.2: Delta, unchanged;
    c < 0: Delta - min(0.5 (-c) conf, 0.5) c |Delta| m / |m|;
    between: turned towards m, |Delta| unit((1 - l) Delta / |Delta| + l m / |m|), l = min((1 - c) conf, 1);
    Delta, unchanged, if |Delta| or |m| is below 1e-8. It is weighted by rho when it arrives. Then

    m <- beta m + (1 - beta) Delta;  theta <- theta - eta (Delta + beta m),

    as `MLA`, and a node begins its round at the point to which the momentum leads, theta - eta beta m.

    State: `momentum`, of the size of the parameters. Equal movements in a row move theta by 1 + beta times each;
    torch's Nesterov, whose momentum is a sum, moves it by 1 / (1 - beta) times.

    Args:
        lr: eta.
        momentum: beta.
        rho: the weight of an arrival; None: 1 / sqrt(K), with K the number of nodes.

    >>> server, params = HeLoCo(lr=1.0, momentum=0.5, rho=1.0), {"w": torch.zeros(1, 2)}
    >>> params, state = server.update(params, {"w": torch.tensor([[1.0, 0.0]])}, server.init(params), update=0)
    >>> params["w"], server.start(params, state)["w"]
    (tensor([[-1.2500,  0.0000]]), tensor([[-1.5000,  0.0000]]))
    >>> server.correct({"w": torch.tensor([[0.0, 2.0]])}, state)["w"]
    tensor([[1.6000, 1.2000]])

    Reference: arXiv 2606.00271, and github.com/PanocularAI/panofabric-engine, panoengine/decentralized/heloco.py.
    Deviation: with `buffer` > 1 the server uses the mean of the corrected movements; the code makes one update after
    the other.
    """

    def __init__(
        self,
        lr: float | Tensor = OUTER_DEFAULTS["lr"],
        momentum: float | Tensor = OUTER_DEFAULTS["momentum"],
        rho: float | Tensor | None = None,
    ) -> None:
        super().__init__(lr, momentum)
        self.rho = None if rho is None else one_number("rho", rho, "[0, inf)", "the weight of an arrival")

    def of(self, num_nodes: int) -> Server:
        return altered(self, rho=num_nodes**-0.5 if self.rho is None else self.rho)

    def start(self, params: Tree, state: ServerState) -> Tree:
        return tree.map(lambda p, m: p - spread(self.lr * self.momentum, m) * m, params, state["momentum"])

    def correct(self, movement: Tree, state: ServerState) -> Tree:
        rho = self.rho
        if rho is None:
            raise ValueError("rho=None is 1 / sqrt(nodes): call server.of(num_nodes) first.")
        return tree.map(lambda x, m: spread(rho, x) * corrected(x, m), movement, state["momentum"])


def updated(
    server: Server, params: Tree, movement: Tree, state: ServerState, update: int, inplace: bool = False
) -> tuple[Tree, ServerState]:
    """Return a server's parameters and state after an update, if the parameters have the form of those before.

    >>> follow = OuterOptimizer(OptimSpec("sgd", lr=1.0))
    >>> updated(follow, {"w": torch.ones(1)}, {"w": torch.ones(1)}, follow.init({"w": torch.ones(1)}), 0)[0]
    {'w': tensor([0.])}
    """
    made = server.update(params, movement, state, update, inplace=inplace)
    if not (isinstance(made, tuple) and len(made) == 2):
        raise TypeError(f"{server!r}.update returned {a_kind(made)}; expected a tuple, (parameters, state).")
    num_rows = max(map(len, params.values()), default=1)
    return check_values(made[0], params, num_rows, server, ".update", "parameters"), made[1]


def check_server(name: str, server: Server | None, usual: Server, here: str) -> Server:
    """Return `server` if it makes an update of each arrival, or `usual` for None; `here` says why it must.

    >>> check_server("server", FedBuff(4), OuterOptimizer(), "each makes an update")
    Traceback (most recent call last):
    ...
    ValueError: server=FedBuff(buffer=4) waits for 4 movements, and here each makes an update: give buffer=1, \
or DelayedNesterov, whose momentum waits.
    """
    if server is None:
        return usual
    check.instance(name, server, Server, SERVERS)
    if server.buffer not in (None, 1):
        raise ValueError(
            f"{name}={server!r} waits for {server.buffer} movements, and here {here}: give buffer=1, or "
            "DelayedNesterov, whose momentum waits."
        )
    return server


def one_number(name: str, value: Any, within: str, what: str = "") -> float | Tensor:
    """Return a number, or a tensor with a single number, since there is one server.

    >>> one_number("lr", torch.ones(2), "[0, inf)")
    Traceback (most recent call last):
    ...
    ValueError: lr has shape [2]: there is one server, give one number.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} has shape {list(value.shape)}: there is one server, give one number.")
    number: float | Tensor = check.per_node(name, value, within, what)
    return number.reshape(()) if isinstance(number, Tensor) else number


def check_staleness(value: Any) -> Any:
    """Return a function of the staleness, or the name of one."""
    return value if callable(value) else check.choice("staleness", value, STALENESS, "a function of the staleness")


def weight_of(function: Any, staleness: int) -> Any:
    """Return the weight of a movement, from the name of a function or from a user's function, which is checked.

    >>> weight_of("inverse_sqrt", 3)
    0.5
    >>> weight_of(lambda staleness: "old", 3)
    Traceback (most recent call last):
    ...
    TypeError: staleness(3) returned 'old'; give a function of the staleness that returns a number.
    """
    weight = check.called("staleness", STALENESS[function] if isinstance(function, str) else function, staleness)
    if isinstance(weight, bool) or not isinstance(weight, (int, float, Tensor)):
        raise TypeError(
            f"staleness({staleness}) returned {weight!r}; give a function of the staleness that returns a number."
        )
    return weight
