"""DiLoCo of K nodes in JAX and optax: the program that somebody who knows them would write in place of vecgym.

    PYTHON benchmarks/in_jax.py FORM WORKLOAD FILE H    # an interpreter that has jax and optax; it needs no torch

`against_jax.py` starts it. In FILE are initial parameters, examples, and the order in which they are read at first. A
step of all nodes is vmapped and jitted, with donated buffers. A block is some rounds, each of H steps and an exchange,
in one of the forms:

- steps: one call a step, with a batch from the host;
- rounds: one call for H steps and their exchange, a `lax.scan` over indices of examples that are on the device;
- sweep: one call for all steps of all configurations, a `lax.scan` over batches that are on the device.

The models are those of `workloads.py`. The CNN is not as one would write it first, since XLA is slow at that on a CPU:
each node has a convolution of its own, where vmap makes one of groups of channels; in a scan, where convolutions are
slow, a matrix product takes their place; and a maximum over a reshaped image is the max-pool, since a reduction over
windows has a slow gradient.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, tree
from turns import serve

LR, OUTER_LR = 1e-3, 0.7
BLOCK_S = 0.2  # a block is so long at least
Params = dict[str, Array]

# --------------------------------------------------------------------------------------------------------- models


def linear(p: Params, name: str, x: Array) -> Array:
    y = x @ p[f"{name}.weight"]
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def mlp(p: Params, x: Array) -> Array:
    return linear(p, "net.2", jax.nn.relu(linear(p, "net.0", x)))


def convolution(x: Array, kernel: Array) -> Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


one_by_one = jax.custom_batching.custom_vmap(convolution)


@one_by_one.def_vmap
def convolutions(num_nodes: int, _batched: Any, x: Array, kernel: Array) -> tuple[Array, bool]:
    return jnp.stack([convolution(x[k], kernel[k]) for k in range(num_nodes)]), True


def as_product(x: Array, kernel: Array) -> Array:
    """The same as `convolution`, of the nine pixels around each pixel."""
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    around = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(around, -1) @ kernel.reshape(-1, kernel.shape[-1])


def max_pool(x: Array) -> Array:
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))


def cnn(p: Params, x: Array, convolve: Callable[[Array, Array], Array] = one_by_one) -> Array:
    x = x.transpose(0, 2, 3, 1)
    for name in ("net.0", "net.3"):
        x = jax.nn.relu(max_pool(convolve(x, p[f"{name}.weight"])) + p[f"{name}.bias"])
    return linear(p, "net.9", jax.nn.relu(linear(p, "net.7", x.reshape(len(x), -1))))


def norm(p: Params, name: str, x: Array) -> Array:
    return jax.nn.standardize(x, epsilon=1e-5) * p[f"{name}.weight"]


def gpt(p: Params, tokens: Array, num_layers: int = 2, num_heads: int = 4) -> Array:
    x = p["tokens.weight"][tokens] + p["positions.weight"]
    for block in (f"blocks.{i}." for i in range(num_layers)):
        qkv = jnp.split(linear(p, block + "qkv", norm(p, block + "norm_1", x)), 3, -1)
        q, k, v = (y.reshape(*y.shape[:-1], num_heads, -1) for y in qkv)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(p, block + "project", attended.reshape(x.shape))
        hidden = jax.nn.gelu(linear(p, block + "up", norm(p, block + "norm_2", x)), approximate=False)
        x = x + linear(p, block + "down", hidden)
    return norm(p, "norm", x) @ p["tokens.weight"].T


Model = Callable[[Params, Array], Array]
MODELS: dict[str, Model] = {"tiny": mlp, "mlp": mlp, "cnn": cnn, "gpt": gpt}
IN_A_SCAN: dict[str, Model] = MODELS | {"cnn": partial(cnn, convolve=as_product)}


def from_torch(name: str, x: np.ndarray) -> np.ndarray:
    """Return a parameter with the axes that JAX's programs have: inputs before outputs, channels last."""
    if x.ndim == 4:
        return x.transpose(2, 3, 1, 0)
    if name == "net.7.weight":  # after a convolution: its inputs are channels, height and width in torch
        return x.reshape(-1, 32, 7, 7).transpose(2, 3, 1, 0).reshape(-1, len(x))
    return x.T if x.ndim == 2 and name not in ("tokens.weight", "positions.weight") else x


# -------------------------------------------------------------------------------------------------------- training


class State(NamedTuple):
    params: Any  # [K, ...], as are the moments of AdamW
    moments: Any
    outer: Any
    momentum: Any


def adamw(lr: Any) -> optax.GradientTransformation:
    return optax.adamw(lr, weight_decay=0.01)


def outer_sgd(lr: Any) -> optax.GradientTransformation:
    return optax.sgd(lr, momentum=0.9, nesterov=True)


def begin(params: Params, num_nodes: int) -> State:
    nodes = tree.map(lambda p: jnp.repeat(p[None], num_nodes, 0), params)
    outer = tree.map(jnp.copy, params)  # not the caller's: it is donated
    return State(nodes, jax.vmap(adamw(LR).init)(nodes), outer, outer_sgd(OUTER_LR).init(outer))


def train(model: Model, state: State, batch: tuple[Array, Array], lr: Any = LR) -> tuple[State, Array]:
    """Let each node make a step with its own batch; return the losses, too, `[K]`."""

    def loss(p: Params, x: Array, y: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(p, x), y).mean()

    def total(params: Any) -> tuple[Array, Array]:
        losses = jax.vmap(loss)(params, *batch)
        return losses.sum(), losses

    grads, losses = jax.grad(total, has_aux=True)(state.params)
    updates, moments = jax.vmap(adamw(lr).update)(grads, state.moments, state.params)
    return state._replace(params=optax.apply_updates(state.params, updates), moments=moments), losses


def meet(state: State, outer_lr: Any = OUTER_LR) -> State:
    """Step by the mean movement of the nodes, and hand the result to all of them."""
    movement = tree.map(lambda outer, p: outer - p.mean(0), state.outer, state.params)
    updates, momentum = outer_sgd(outer_lr).update(movement, state.momentum)
    outer = optax.apply_updates(state.outer, updates)
    params = tree.map(lambda p, outer: jnp.broadcast_to(outer, p.shape), state.params, outer)
    return state._replace(params=params, outer=outer, momentum=momentum)


class Steps:
    """One call for a step, with a batch from the host, and one for an exchange."""

    def __init__(self, name: str, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y
        self.train = jax.jit(partial(train, MODELS[name]), donate_argnums=0)
        self.meet = jax.jit(meet, donate_argnums=0)

    def __call__(self, state: State, order: np.ndarray) -> tuple[State, np.ndarray]:
        """A round with the examples `order`, `[H, K, B]`; return the losses, `[H, K]`."""
        losses = []
        for indices in order:
            state, loss = self.train(state, (self.x[indices], self.y[indices]))
            losses.append(loss)
        return self.meet(state), np.stack(jax.device_get(losses))


class Rounds:
    """One call for a round; all examples are on the device."""

    def __init__(self, name: str, x: np.ndarray, y: np.ndarray) -> None:
        def round_(state: State, order: Array, x: Array, y: Array) -> tuple[State, Array]:
            def step(state: State, indices: Array) -> tuple[State, Array]:
                return train(IN_A_SCAN[name], state, (x[indices], y[indices]))

            state, losses = lax.scan(step, state, order)
            return meet(state), losses

        self.x, self.y = jax.device_put((x, y))
        self.round = jax.jit(round_, donate_argnums=0)

    def __call__(self, state: State, order: np.ndarray) -> tuple[State, np.ndarray]:
        state, losses = self.round(state, order, self.x, self.y)
        return state, np.asarray(losses)


def sweep(params: Params, configs: dict[str, Array], x: Array, y: Array) -> Array:
    """Train every configuration on the batches `[T, seeds, K, B, ...]`; return the losses `[C, T, K]`."""

    def run(config: dict[str, Array]) -> Array:
        def step(state: State, now: Any) -> tuple[State, Array]:
            number, x, y = now
            state, losses = train(mlp, state, (x[config["seed"]], y[config["seed"]]), config["lr"])
            met = meet(state, config["outer_lr"])
            return tree.map(partial(jnp.where, number % config["H"] == 0), met, state), losses

        return lax.scan(step, begin(params, x.shape[2]), (1 + jnp.arange(len(x)), x, y))[1]

    return jax.vmap(run)(configs)


# ----------------------------------------------------------------------------------------- in a process of its own


def orders(num_examples: int, first: np.ndarray, H: int) -> Iterator[np.ndarray]:
    """Yield the examples of each round, `[H, K, B]`: those given `[T, K, B]`, then others, drawn anew in each pass."""
    yield from first.reshape(-1, H, *first.shape[1:])
    generator, drawn = np.random.default_rng(0), np.empty(0, first.dtype)
    while True:
        while len(drawn) < H * first[0].size:
            drawn = np.concatenate([drawn, generator.permutation(num_examples).astype(first.dtype)])
        now, drawn = np.split(drawn, [H * first[0].size])
        yield now.reshape(H, *first.shape[1:])


def serve_fit(form: Callable[..., Any], name: str, given: Any, params: Params, H: int) -> None:
    x, y, first = given["x"], given["y"], given["order"]
    train, order = form(name, x, y), orders(len(x), first, H)
    state = begin(params, first.shape[1])
    losses: list[float] = []

    def round_s() -> float:
        nonlocal state, losses
        start = time.perf_counter()
        state, found = train(state, next(order))
        jax.block_until_ready(state)
        losses += found.mean(1).tolist()
        return time.perf_counter() - start

    def work() -> dict[str, float]:
        seconds = [round_s()]
        while sum(seconds) < BLOCK_S:
            seconds.append(round_s())
        return {"seconds": sum(seconds) / len(seconds) / H}

    first_s, *_, last_s = [round_s() for _ in range(len(first) // H)]
    compile_s = first_s - last_s
    serve(work, jax=jax.__version__, optax=optax.__version__, losses=losses, compile_s=compile_s)


def serve_sweep(given: Any, params: Params) -> None:
    x, y = jnp.asarray(given["x"][given["order"]]), jnp.asarray(given["y"][given["order"]])  # [T, seeds, K, B, ...]
    configs = {axis: jnp.asarray(given[axis]) for axis in ("H", "lr", "outer_lr", "seed")}
    run, compared = jax.jit(sweep), int(given["compared"])

    def work() -> dict[str, Any]:
        start = time.perf_counter()
        losses = np.asarray(run(params, configs, x, y))
        return {"seconds": (time.perf_counter() - start) / len(x), "losses": losses[:, compared - 1].mean(1).tolist()}

    first, second = work(), work()
    compile_s = (first["seconds"] - second["seconds"]) * len(x)
    serve(work, jax=jax.__version__, optax=optax.__version__, losses=first["losses"], compile_s=compile_s)


def main() -> None:
    form, name, file, H = sys.argv[1:]
    given = np.load(file)
    named = {key.removeprefix("param "): given[key] for key in given if key.startswith("param ")}
    params = {key: jnp.asarray(from_torch(key, p)) for key, p in named.items()}
    if form == "sweep":
        serve_sweep(given, params)
    else:
        serve_fit({"steps": Steps, "rounds": Rounds}[form], name, given, params, int(H))


if __name__ == "__main__":
    main()
