"""Hooks on gradients have the effect that they have in torch's own loop, or are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from tests.fitting import alone, dataset
from vecgym import Trainer
from vecgym.core.errors import VecgymWarning
from vecgym.engine import Engine
from vecgym.engine.constancy import copied, equal_but_weights
from vecgym.runs.rollout import rollout
from vecgym.strategy import AllReduceStrategy, FedAvgStrategy

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
K, B = 3, 6


class Net(nn.Module):
    """4 -> 5 -> 3; `inside` is applied to the hidden layer."""

    def __init__(self, inside: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.inside = inside

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.second(self.inside(self.first(x))), y)


def normalised(grad: Tensor) -> Tensor:
    return grad / grad.norm()


def hooked_activation(x: Tensor) -> Tensor:
    y = x.tanh()
    if y.requires_grad:  # under vmap it says that it does not
        y.register_hook(normalised)
    return y


def on_module(kind: str, hook: Callable[..., Any]) -> Callable[[Net], Any]:
    return lambda model: getattr(model.second, kind)(hook)


def on_all_modules(kind: str, hook: Callable[..., Any]) -> Callable[[Net], Any]:
    return lambda model: getattr(of_all_modules, kind)(hook)


def first_normalised(module: nn.Module, grads: Any, *_: Any) -> Any:
    return (normalised(grads[0]),) if grads[0] is not None else None


# What registers a hook and gives its handle. Each changes the gradient.
ON_GRADIENTS: dict[str, Callable[[Net], Any]] = {
    "parameter": lambda model: model.first.weight.register_hook(normalised),
    "module": on_module("register_full_backward_hook", first_normalised),
    "module, before": on_module("register_full_backward_pre_hook", first_normalised),
    "all modules": on_all_modules("register_module_full_backward_hook", first_normalised),
    "all modules, before": on_all_modules("register_module_full_backward_pre_hook", first_normalised),
}
FORWARD: dict[str, Callable[[Net], Any]] = {
    "forward": on_module("register_forward_hook", lambda module, x, y: y / y.norm()),
    "forward, before": on_module("register_forward_pre_hook", lambda module, x: (x[0] / x[0].norm(),)),
    "all modules, forward": on_all_modules("register_module_forward_hook", lambda module, x, y: y.sin()),
    "all modules, forward, before": on_all_modules("register_module_forward_pre_hook", lambda module, x: (x[0],)),
}


@contextmanager
def hooked(register: Callable[[Net], Any]) -> Iterator[Net]:
    model = Net()
    handle = register(model)
    try:
        yield model
    finally:
        handle.remove()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(K, B, 4, generator=generator), torch.randint(0, 3, (K, B), generator=generator)


def plain_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of torch's own loop, `[K, *]`."""
    of_nodes = []
    for i in range(K):
        model.zero_grad()
        model(tuple(x[i] for x in batch())).backward()
        of_nodes.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return {name: torch.stack([grads[name] for grads in of_nodes]) for name in of_nodes[0]}


def gradients(model: nn.Module, kind: str, **settings: Any) -> tuple[dict[str, Tensor], str]:
    engine = Engine(model, engine=kind)
    engine.prepare(batch())
    params = {name: p.detach()[None] for name, p in engine.params.items()}
    return engine.gradients(params, {}, batch(), seed=0, step=0, **settings).grads, engine.plan.engine


@pytest.mark.filterwarnings("ignore:vmap cannot run")
@pytest.mark.parametrize("kind", ["loop", "auto"])
@pytest.mark.parametrize("name", [*ON_GRADIENTS, "activation"])
def test_a_hook_on_a_gradient_is_that_of_torchs_own_loop(name: str, kind: str) -> None:
    with hooked(ON_GRADIENTS.get(name, ON_GRADIENTS["parameter"])) as model:
        if name == "activation":
            model = Net(hooked_activation)
        expected = plain_gradients(model)
        found, engine = gradients(model, kind)
        mean, _ = gradients(model, kind, mean=True)
    assert engine == "loop"
    unhooked = plain_gradients(Net())
    assert not torch.allclose(expected["first.weight"], unhooked["first.weight"], rtol=0.1)
    for n, x in expected.items():
        torch.testing.assert_close(found[n], x, rtol=0, atol=0)
        torch.testing.assert_close(mean[n][0], x.mean(0))


@pytest.mark.parametrize("kind", ["vmap", "loop"])
@pytest.mark.parametrize("name", FORWARD)
def test_forward_hooks_run_under_both_engines(name: str, kind: str) -> None:
    with hooked(FORWARD[name]) as model:
        expected = plain_gradients(model)
        found, engine = gradients(model, kind)
    assert engine == kind
    for n, x in expected.items():
        torch.testing.assert_close(found[n], x)


@pytest.mark.parametrize("name", [*ON_GRADIENTS, "activation"])
def test_vmap_and_derivatives_refuse_hooks_on_gradients(name: str) -> None:
    where = {"parameter": "'first.weight'", "module": "'second'", "module, before": "'second'"}.get(name, "all modules")
    with hooked(ON_GRADIENTS.get(name, lambda model: model.register_forward_hook(lambda *_: None))) as model:
        if name == "activation":
            model, where = Net(hooked_activation), "forward puts a hook"
        with pytest.raises(RuntimeError, match=where) as raised:
            gradients(model, "vmap")
        assert 'engine="loop"' in str(raised.value)
        if name != "activation":  # of which derivatives are right, node after node
            one = tuple(x[0] for x in batch())
            with pytest.raises(ValueError, match=where) as refused:
                rollout(model, FedAvgStrategy("sgd"), [batch()], num_nodes=K, eval_batch=one, engine="loop")
            assert "handle.remove()" in str(refused.value)


@pytest.mark.parametrize("strategy", [alone, lambda: AllReduceStrategy("sgd", lr=0.1)])
def test_fit_keeps_the_hooks_of_parameters(strategy: Callable[[], Any]) -> None:
    """Two steps of two nodes, against torch's own loop."""
    model, twin = Net(), Net()
    for net in (model, twin):
        net.first.weight.register_hook(normalised)
        net.second.bias.register_hook(lambda grad: 2 * grad)
        net.second.bias.register_hook(lambda grad: grad + 1)  # in the order of registration
    x, y = (part.flatten(0, 1)[:8] for part in batch())
    trainer = Trainer(model, torch.utils.data.TensorDataset(x, y))
    with pytest.warns(VecgymWarning, match=r"first\.weight.*register_hook"):
        trainer.fit(strategy(), 2, batch_size=2, shuffle=False, device="cpu", progress=False)
    together = isinstance(strategy(), AllReduceStrategy)
    of_nodes = [copied(twin) for _ in range(2)]
    for step in range(2):
        for node, net in enumerate(of_nodes):
            net.zero_grad()
            rows = slice(4 * step + node, 4 * step + 4, 2)  # as DistributedSampler deals
            net((x[rows], y[rows])).backward()
        both = [list(net.parameters()) for net in of_nodes]
        for p, q in zip(*both):
            assert p.grad is not None
            assert q.grad is not None
            mean = (p.grad + q.grad) / 2
            for own in (p, q):
                own.data -= 0.1 * (mean if together else own.grad)
    for node, net in enumerate(of_nodes):
        for name, p in net.named_parameters():
            torch.testing.assert_close(trainer.nodes.params[name][node], p.detach())


def test_hooks_are_called_node_after_node_in_one_thread() -> None:
    seen: list[float] = []
    model = Net()
    model.first.weight.register_hook(lambda grad: seen.append(float(grad.norm())))
    with pytest.warns(VecgymWarning, match=r"node_threads=2 has no effect: the model has hooks"):
        Engine(model, engine="loop", node_threads=2).prepare(batch())
    seen.clear()
    found, _ = gradients(model, "loop")
    assert seen == [float(grad.norm()) for grad in found["first.weight"]]


def test_hooks_that_have_nothing_to_run_on_are_refused() -> None:
    model = Net()
    handle = model.first.bias.register_post_accumulate_grad_hook(lambda p: None)
    for make in (lambda: Engine(model), lambda: Trainer(model, dataset("MLP"))):
        with pytest.raises(ValueError, match=r"'first\.bias'.*register_post_accumulate_grad_hook") as raised:
            make()
        assert "register_hook(lambda grad" in str(raised.value)
    handle.remove()
    Engine(model)
    torch.autograd.graph.register_multi_grad_hook([model.first.bias], lambda grads: None)
    with pytest.raises(ValueError, match=r"'first\.bias'.*register_multi_grad_hook"):
        Engine(model)


def test_functions_that_hold_the_models_own_parameters_are_refused() -> None:
    """They would see the initial values for ever."""

    def decay(model: Net) -> None:
        model.first.weight.register_hook(lambda grad: grad + 0.1 * model.first.weight)

    def method(model: Net) -> None:
        model.first.weight.register_hook(model.first.forward)

    def forward(model: Net) -> None:
        model.second.register_forward_hook(lambda module, x, y: y + model.second.bias)

    def attribute(model: Net) -> None:
        bias = model.first.bias
        model.inside = lambda x: x + bias

    def default(model: Net) -> None:
        model.first.weight.register_hook(lambda grad, w=model.first.weight: grad + 0.1 * w)

    def keyword(model: Net) -> None:
        model.first.weight.register_hook(lambda grad, *, of=model.second: grad + of.weight.mean())

    def global_module(model: Net) -> None:
        globals()["HELD"] = model
        model.first.weight.register_hook(lambda grad: grad + HELD.first.weight)  # type: ignore[name-defined]  # noqa: F821

    def decorated(model: Net) -> None:
        model.first.weight.register_hook(torch.no_grad()(lambda grad: grad + model.first.weight))

    class Decay:
        def __init__(self, p: Tensor) -> None:
            self.p = p

        def __call__(self, grad: Tensor) -> Tensor:
            return grad + 0.1 * self.p

    def object_of(model: Net) -> None:
        model.first.weight.register_hook(Decay(model.first.weight))

    def partial(model: Net) -> None:
        model.first.weight.register_hook(functools.partial(torch.add, model.first.weight))

    for change, where in (
        (object_of, "hook of parameter 'first.weight'"),
        (partial, "hook of parameter 'first.weight'"),
        (decorated, "hook of parameter 'first.weight'"),
        (default, "hook of parameter 'first.weight'"),
        (keyword, "hook of parameter 'first.weight'"),
        (global_module, "hook of parameter 'first.weight'"),
        (decay, "hook of parameter 'first.weight'"),
        (method, "hook of parameter 'first.weight'"),
        (forward, "hook of module 'second'"),
        (attribute, "'inside' of the model"),
    ):
        model = Net()
        change(model)
        with pytest.raises(ValueError, match=where):
            Engine(model)
    model = Net()
    mask = torch.ones(5, 4)
    model.first.weight.register_hook(lambda grad: grad * mask)
    model.second.register_forward_hook(lambda module, x, y: y + module.bias)
    Engine(model)


def test_models_with_different_hooks_are_not_one_stack() -> None:
    a, b = Net(), Net()
    assert equal_but_weights(a, b)
    b.first.weight.register_hook(normalised)
    assert not equal_but_weights(a, b)


def test_hooks_that_pickle_leaves_out_are_refused_for_processes() -> None:
    for name in ("parameter", "all modules"):
        with hooked(ON_GRADIENTS[name]) as model, pytest.raises(ValueError, match=r'backend="distributed"'):
            Trainer(model, dataset("MLP")).fit(alone(), 2, backend="processes", num_processes=2, progress=False)
