"""Optimizers on stacked tensors: both bodies against K separate torch optimizers, and all around them."""

import contextlib
import copy
import functools
import io
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vecgym.optim.formulas as formulas
import vecgym.optim.rules as rules
from tests.reference import optimizers as reference
from vecgym.core.devices import spread
from vecgym.core.errors import VecgymWarning
from vecgym.core.tree import leaves, map_leaves
from vecgym.optim import (
    ELEMENTWISE,
    ElementwiseRule,
    FullPrecisionMuon,
    Optimizer,
    OptimSpec,
    PerNodeRule,
    check_max_norm,
    clip_grad_norm,
    ensure_optim_spec,
    optimizers,
)
from vecgym.optim.spec import merge_key, merged_spec

K, STEPS = 3, 12
SHAPES = {"w": (4, 3), "conv": (2, 3, 2, 2), "b": (5,), "scale": ()}

# Every elementwise rule with its options.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    ("sgd", {"lr": 0.1, "weight_decay": 0.1, "maximize": True, "foreach": True}),
    ("adam", {}),
    ("adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    ("adam", {"lr": 0.01, "betas": (0.3, 0.8), "eps": 1e-3, "maximize": True, "weight_decay": 0.1}),
    ("adam", {"lr": 0.01, "fused": False}),
    ("adamw", {}),
    ("adamw", {"lr": 0.01, "weight_decay": 0.3, "amsgrad": True, "maximize": True}),
    ("adamw", {"lr": 0.01, "betas": [0.5, 0.9], "foreach": True}),
    ("rmsprop", {}),
    ("rmsprop", {"lr": 0.01, "alpha": 0.9, "centered": True, "weight_decay": 0.1}),
    ("rmsprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "maximize": True}),
    ("adagrad", {}),
    ("adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1}),
    ("adagrad", {"lr": 0.1, "eps": 1e-4, "maximize": True, "fused": False}),
    ("nadam", {}),
    ("nadam", {"lr": 0.01, "momentum_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("nadam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("radam", {}),
    ("radam", {"lr": 0.01, "betas": (0.8, 0.93), "weight_decay": 0.1}),
    ("radam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("adamax", {}),
    ("adamax", {"lr": 0.01, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    ("adadelta", {}),
    ("adadelta", {"lr": 0.5, "rho": 0.7, "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    ("rprop", {}),
    ("rprop", {"lr": 0.03, "etas": (0.45, 1.3), "step_sizes": (1e-2, 5e-2), "maximize": True}),
    ("lion", {}),
    ("lion", {"lr": 0.03, "betas": (0.8, 0.9), "weight_decay": 0.1, "maximize": True}),
    ("fedadam", {}),
    ("fedadam", {"lr": 0.03, "betas": (0.8, 0.9), "tau": 0.01}),
    ("fedyogi", {"lr": 0.03, "betas": (0.8, 0.9), "tau": 0.01}),
    ("fedadagrad", {"lr": 0.03, "betas": (0.8, 0.9), "tau": 0.01}),
]
ONE_OF_EACH = [next(case for case in reversed(CASES) if case[0] == cls.__name__.lower()) for cls in ELEMENTWISE]
# Hyperparameters that differ per node: nodes 0 and 1 are equal neighbours, so that a run holds two nodes.
PER_NODE: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": (0.0, 0.0, 0.9), "dampening": (0.5, 0.5, 0.1), "weight_decay": (0.1, 0.1, 0.0)},
    "adam": {"betas": [(0.9, 0.9, 0.3), (0.99, 0.99, 0.9)], "weight_decay": (0.0, 0.0, 0.1)},
    "adamw": {"weight_decay": (0.1, 0.1, 0.0), "eps": (1e-8, 1e-8, 1e-2)},
    "rmsprop": {"alpha": (0.9, 0.9, 0.5), "momentum": (0.0, 0.0, 0.9)},
    "adagrad": {"lr_decay": (0.0, 0.0, 0.1), "initial_accumulator_value": (0.0, 0.0, 1.0)},
    "nadam": {"momentum_decay": (0.0, 0.0, 0.1), "betas": [(0.9, 0.9, 0.5), (0.99, 0.99, 0.9)]},
    "radam": {"betas": [(0.9, 0.9, 0.5), (0.999, 0.999, 0.8)]},
    "adamax": {"betas": [(0.9, 0.9, 0.5), (0.99, 0.99, 0.9)], "eps": (1e-8, 1e-8, 1e-2)},
    "adadelta": {"rho": (0.9, 0.9, 0.5), "eps": (1e-6, 1e-6, 1e-2)},
    "rprop": {
        "etas": [(0.5, 0.5, 0.4), (1.2, 1.2, 1.3)],
        "step_sizes": [(1e-6, 1e-6, 1e-2), (50.0, 50.0, 0.1)],
    },
    "lion": {"betas": [(0.9, 0.9, 0.5), (0.99, 0.99, 0.7)], "weight_decay": (0.1, 0.1, 0.0)},
    "fedadam": {"betas": [(0.9, 0.9, 0.5), (0.99, 0.99, 0.7)], "tau": (0.01, 0.01, 0.1)},
    "fedyogi": {"betas": [(0.9, 0.9, 0.5), (0.99, 0.99, 0.7)], "tau": (0.01, 0.01, 0.1)},
    "fedadagrad": {"betas": [(0.9, 0.9, 0.5), (0.99, 0.99, 0.7)], "tau": (0.01, 0.01, 0.1)},
}


def ids(case):
    return f"{case[0]}-{'-'.join(case[1])}"


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_float32():
    """As users have it: where the tensors are float64, nothing between them may become float32."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def draw(seed, num_nodes=K, shapes=SHAPES):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(num_nodes, *shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def gradient(step, num_nodes=K, shapes=SHAPES):
    """Random, with some elements exactly 0 at every step, and some at a few."""
    grads = draw(100 + step, num_nodes, shapes)
    for g in grads.values():
        flat = g.view(num_nodes, -1)
        flat[:, 1:2] = 0.0
        flat[:, 2 + step % 2 : 3 + step % 2] = 0.0
    return grads


def clone(tree):
    return copy.deepcopy(tree)


def separate(spec, params, steps=STEPS, lrs=None, grad=gradient):
    """K models with one torch optimizer each: what every body must equal."""
    num_nodes = next(iter(params.values())).shape[0]
    models = [[(n, nn.Parameter(p[i].clone())) for n, p in params.items()] for i in range(num_nodes)]
    optimizers = [spec.build(model, node=i) for i, model in enumerate(models)]
    for step in range(steps):
        grads = grad(step)
        for i, (model, optimizer) in enumerate(zip(models, optimizers)):
            for name, p in model:
                p.grad = grads[name][i].clone()
            if lrs is not None:
                lr = lrs[step]
                optimizer.param_groups[0]["lr"] = float(lr[i]) if isinstance(lr, torch.Tensor) else lr
            optimizer.step()
    return {name: torch.stack([model[j][1].detach() for model in models]) for j, name in enumerate(params)}


def stacked(spec, params, steps=STEPS, lrs=None, grad=gradient, inplace=True):
    rule = spec.rule()
    params = clone(params)
    # What runs torch's own optimizers node by node follows the default type as they do (ASGD).
    with default_float32() if isinstance(rule, ElementwiseRule) else contextlib.nullcontext():
        state = rule.init(params)
        for step in range(steps):
            lr = None if lrs is None else lrs[step]
            params, state = rule.update(params, grad(step), state, lr=lr, inplace=inplace)
    assert int(state["step"].max()) == steps
    assert state["step"].dtype == torch.int64
    return params, state


def assert_close(a, b, rtol=1e-13, atol=2e-15):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_close(a[name], b[name], rtol, atol)
    else:
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def total(tensors):
    return torch.stack([x.sum() for x in tensors]).sum()


def tensors(values, **options):
    if isinstance(values, list):
        return tuple(tensors(v, **options) for v in values)
    return torch.tensor(values, **options)


# Both bodies and K separate optimizers


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_both_bodies_equal_separate_torch_optimizers(case):
    spec = OptimSpec(case[0], **case[1])
    assert isinstance(spec.rule(), ElementwiseRule)
    reference = separate(spec, draw(0))
    in_place, state = stacked(spec, draw(0))
    pure, pure_state = stacked(spec, draw(0), inplace=False)
    assert_close(in_place, reference)
    assert_close(pure, reference)
    for slot in state.keys() - {"step"}:
        assert_close(state[slot], {n: x.expand_as(state[slot][n]) for n, x in pure_state[slot].items()})
    assert not torch.equal(reference["w"], draw(0)["w"])


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=ids)
def test_scheduled_learning_rate(case, inplace):
    lrs = [0.01 * (1 + step % 3) for step in range(STEPS)]
    spec = OptimSpec(case[0], **case[1])
    assert_close(stacked(spec, draw(0), lrs=lrs, inplace=inplace)[0], separate(spec, draw(0), lrs=lrs))
    as_tensors = [torch.tensor(lr) for lr in lrs]
    assert_close(stacked(spec, draw(0), lrs=as_tensors, inplace=inplace)[0], separate(spec, draw(0), lrs=lrs))


@pytest.mark.parametrize("small_run", [0, 10**9], ids=["runs", "broadcast"])
@pytest.mark.parametrize("name", PER_NODE)
def test_hyperparameters_per_node(name, small_run, monkeypatch):
    monkeypatch.setattr(rules, "_SMALL_RUN", small_run)
    spec = OptimSpec(name, lr=torch.tensor([0.01, 0.01, 0.03]), **{k: tensors(v) for k, v in PER_NODE[name].items()})
    lrs = [torch.tensor([0.01, 0.01, 0.03]) * (1 + step % 3) for step in range(STEPS)]
    for given in (None, lrs):
        reference = separate(spec, draw(0), lrs=given)
        assert_close(stacked(spec, draw(0), lrs=given)[0], reference)
        assert_close(stacked(spec, draw(0), lrs=given, inplace=False)[0], reference)


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, options in PER_NODE.items() for option in options]
)
def test_one_hyperparameter_per_node_among_numbers(name, option):
    """An operation of a tensor and a number rounds nothing to float32 on the way."""
    numbers = {"sgd": {"momentum": 0.9, "dampening": 0.3}, "rmsprop": {"momentum": 0.9}}.get(name, {})
    spec = OptimSpec(name, **{**numbers, "lr": 0.03, option: tensors(PER_NODE[name][option])})
    reference = separate(spec, draw(0))
    assert_close(stacked(spec, draw(0))[0], reference)
    assert_close(stacked(spec, draw(0), inplace=False)[0], reference)


@pytest.mark.parametrize("name", PER_NODE)
def test_hyperparameters_per_node_expand_one_stored_node(name):
    spec = OptimSpec(name, **{k: tensors(v) for k, v in PER_NODE[name].items()})
    one = draw(0, num_nodes=1)
    everywhere = {n: p.expand(K, *p.shape[1:]).clone() for n, p in one.items()}
    same = lambda step: gradient(step, num_nodes=1)  # noqa: E731
    reference = stacked(spec, everywhere, grad=lambda s: {n: g.expand(K, *g.shape[1:]) for n, g in same(s).items()})
    for inplace in (True, False):
        assert_close(stacked(spec, one, grad=same, inplace=inplace)[0], reference[0])


@pytest.mark.parametrize("small_run", [0, 10**9], ids=["runs", "broadcast"])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_nodes_may_have_made_different_numbers_of_steps(case, small_run, monkeypatch):
    """The nodes of three runs of 0, 1 and 7 steps, put into one stack, go on as they would alone."""
    monkeypatch.setattr(rules, "_SMALL_RUN", small_run)
    spec = OptimSpec(case[0], **case[1])
    rule = spec.rule()
    made = [0, 1, 7]
    parts = [stacked(spec, draw(0), steps=n) for n in made]
    params = {name: torch.stack([p[name][i] for i, (p, _) in enumerate(parts)]) for name in SHAPES}
    state: dict[str, Any] = {"step": torch.tensor(made)}
    for slot in parts[0][1]:
        if slot != "step":
            spread = [{n: x.expand(K, *x.shape[1:]) for n, x in s[slot].items()} for _, s in parts]
            state[slot] = {n: torch.stack([s[n][i] for i, s in enumerate(spread)]) for n in SHAPES}
    alone = [stacked(spec, draw(0), steps=n + 6, grad=lambda s, n=n: gradient(s if s < n else s - n)) for n in made]
    expected = {name: torch.stack([p[name][i] for i, (p, _) in enumerate(alone)]) for name in SHAPES}
    for inplace in (True, False):
        p, s = clone(params), clone(state)
        with default_float32():
            for step in range(6):
                p, s = rule.update(p, gradient(step), s, inplace=inplace)
        assert_close(p, expected)
        assert s["step"].tolist() == [n + 6 for n in made]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_float32_stays_float32_and_near_float64(case):
    spec = OptimSpec(case[0], **case[1])
    params = {n: p.float() for n, p in draw(0).items()}
    grad = lambda step: {n: g.float() for n, g in gradient(step).items()}  # noqa: E731
    for inplace in (True, False):
        result, _ = stacked(spec, params, grad=grad, inplace=inplace)
        assert all(p.dtype == torch.float32 for p in result.values())
        expected = separate(spec, {n: p.double() for n, p in params.items()})
        assert_close({n: p.double() for n, p in result.items()}, expected, rtol=1e-4, atol=1e-5)


def test_per_node_constants_keep_their_digits_in_float32():
    """1 - beta2 and 1 - beta2^t are formed in float64: in float32 they would be off by 1e-5 and more."""
    params = {"w": torch.zeros(2, 1, dtype=torch.float32)}
    grads = {"w": torch.ones(2, 1, dtype=torch.float32)}
    for beta2 in (0.9999, torch.tensor([0.9999, 0.9999])):
        rule = OptimSpec("adam", lr=1.0, betas=(torch.tensor(0.9), torch.as_tensor(beta2)), eps=0.0).rule()
        p, _ = rule.update(params, grads, rule.init(params), inplace=False)
        torch.testing.assert_close(p["w"], -torch.ones(2, 1, dtype=torch.float32), rtol=3e-7, atol=0.0)


# One stored node


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=ids)
def test_one_stored_node_stays_one(case, inplace):
    spec = OptimSpec(case[0], **case[1])
    same = lambda step: gradient(step, num_nodes=1)  # noqa: E731
    params, state = stacked(spec, draw(0, num_nodes=1), grad=same, inplace=inplace)
    assert_close(params, separate(spec, draw(0, num_nodes=1), grad=same))
    for x in [*params.values(), *[x for slot in state if slot != "step" for x in state[slot].values()]]:
        assert x.shape[0] == 1


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=ids)
def test_one_stored_node_expands_for_different_gradients(case, inplace):
    spec = OptimSpec(case[0], **case[1])
    one = draw(0, num_nodes=1)
    grad = lambda step: gradient(step, num_nodes=1 if step < 4 else K)  # noqa: E731
    params, _ = stacked(spec, one, grad=grad, inplace=inplace)
    everywhere = {n: p.expand(K, *p.shape[1:]).clone() for n, p in one.items()}
    full = lambda s: {n: g.expand(K, *g.shape[1:]) for n, g in grad(s).items()}  # noqa: E731
    assert_close(params, separate(spec, everywhere, grad=full))
    assert all(p.shape[0] == K for p in params.values())
    if inplace:
        assert all(p.is_contiguous() for p in params.values())


@pytest.mark.parametrize("inplace", [True, False])
def test_parameters_of_one_tree_may_differ_in_their_number_of_nodes(inplace):
    params = {"a": torch.ones(1, 2), "b": torch.ones(K, 2)}
    grads = {"a": torch.ones(1, 2), "b": torch.ones(1, 2)}
    rule = OptimSpec("adamw").rule()
    new, state = rule.update(params, grads, rule.init(params), inplace=inplace)
    assert new["a"].shape == (1, 2)
    assert new["b"].shape == (K, 2)
    assert state["exp_avg"]["b"].shape == (K, 2)


# Strides: torch's fused CPU kernels ignore them


def transposed(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 2 else x


def channels_last(x):
    if x.dim() != 5:
        return x
    return x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def strided(x):
    return torch.stack([x, x + 1e3], dim=-1)[..., 0]


@pytest.mark.parametrize("layout", [transposed, channels_last, strided])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=ids)
def test_strides_of_gradients_and_parameters(case, layout):
    spec = OptimSpec(case[0], **case[1])
    expected = separate(spec, draw(0), steps=4)
    grad = lambda step: {n: layout(g) for n, g in gradient(step).items()}  # noqa: E731
    assert any(not g.is_contiguous() for g in grad(0).values())
    assert_close(stacked(spec, draw(0), steps=4, grad=grad)[0], expected)
    rule = spec.rule()
    params = {n: layout(p) for n, p in draw(0).items()}
    state = rule.init(params)
    for step in range(4):
        params, state = rule.update(params, grad(step), state)
        state = {k: v if k == "step" else {n: layout(x) for n, x in v.items()} for k, v in state.items()}
    assert_close(params, expected)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=ids)
def test_expanded_gradients_and_parameters(case):
    spec = OptimSpec(case[0], **case[1])
    one = draw(0, num_nodes=1)
    expand = lambda tree: {n: x.expand(K, *x.shape[1:]) for n, x in tree.items()}  # noqa: E731

    def grad(step):
        firsts = {n: g.reshape(K, -1)[:, 0] for n, g in gradient(step).items()}
        return {n: g.reshape(K, *[1] * len(SHAPES[n])).expand(K, *SHAPES[n]) for n, g in firsts.items()}

    expected = separate(spec, {n: p.clone() for n, p in expand(one).items()}, steps=4, grad=grad)
    rule = spec.rule()
    params = expand(one)
    state = rule.init(params)
    for step in range(4):
        params, state = rule.update(params, grad(step), state)
    assert_close(params, expected)


# Donation and purity


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=ids)
def test_in_place_overwrites_and_pure_changes_nothing(case):
    rule = OptimSpec(case[0], **case[1]).rule()
    params = draw(0)
    state = rule.init(params)
    params, state = rule.update(params, gradient(0), state)
    new, new_state = rule.update(params, gradient(1), state)
    assert all(new[n].data_ptr() == params[n].data_ptr() for n in params)
    assert all(new_state[s][n].data_ptr() == x.data_ptr() for s in state if s != "step" for n, x in state[s].items())
    assert state["step"].tolist() == [1]

    params, grads, state = new, gradient(2), new_state
    before = clone((params, grads, state))
    result, _ = rule.update(params, grads, state, inplace=False)
    torch.testing.assert_close((params, grads, state), before, rtol=0, atol=0)
    assert not torch.equal(result["w"], params["w"])


def test_a_leaf_that_requires_grad_can_be_stepped_in_place():
    params = {"w": torch.ones(2, 3, requires_grad=True)}
    rule = OptimSpec("sgd", lr=1.0).rule()
    new, _ = rule.update(params, {"w": torch.ones(2, 3)}, rule.init(params))
    assert new["w"] is params["w"]
    assert new["w"].sum().item() == 0


@pytest.mark.parametrize("name", PER_NODE)
def test_state_goes_through_a_checkpoint_with_weights_only(name):
    spec = OptimSpec(name)
    params, state = stacked(spec, draw(0), steps=3)
    file = io.BytesIO()
    torch.save((params, state), file)
    file.seek(0)
    params2, state2 = torch.load(file, weights_only=True)
    rule = spec.rule()
    a, _ = rule.update(params, gradient(3), state)
    b, _ = rule.update(params2, gradient(3), state2)
    assert_close(a, b, rtol=0, atol=0)


def test_steps_are_counted_exactly():
    rule = OptimSpec("adam").rule()
    params = draw(0)
    state = rule.init(params)
    state["step"] += 2**24
    for inplace in (False, True):
        params, state = rule.update(params, gradient(0), state, inplace=inplace)
    assert state["step"].tolist() == [2**24 + 2]


# Differentiation

SMALL = {"w": (2,), "b": ()}
HYPER: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.8, "dampening": 0.2, "weight_decay": 0.1},
    "adam": {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1},
    "adamw": {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1},
    "rmsprop": {"lr": 0.1, "alpha": 0.8, "eps": 1e-2, "weight_decay": 0.1, "momentum": 0.5},
    "adagrad": {
        "lr": 0.1,
        "lr_decay": 0.1,
        "weight_decay": 0.1,
        "initial_accumulator_value": 0.2,
        "eps": 1e-2,
    },
    "nadam": {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1, "momentum_decay": 0.1},
    "radam": {"lr": 0.1, "betas": (0.6, 0.8), "eps": 1e-2, "weight_decay": 0.1},
    "adamax": {"lr": 0.1, "betas": (0.8, 0.7), "eps": 1e-2, "weight_decay": 0.1},
    "adadelta": {"lr": 0.1, "rho": 0.8, "eps": 1e-2, "weight_decay": 0.1},
    "rprop": {"lr": 0.1, "etas": (0.5, 1.2), "step_sizes": (1e-3, 1.0)},
    "lion": {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1},
    "fedadam": {"lr": 0.1, "betas": (0.8, 0.9), "tau": 0.1},
    "fedyogi": {"lr": 0.1, "betas": (0.8, 0.9), "tau": 0.1},
    "fedadagrad": {"lr": 0.1, "betas": (0.8, 0.9), "tau": 0.1},
}
WITHOUT_DERIVATIVE = {
    "rprop": ["step_sizes", "step_sizes"],  # in clamp
    "lion": ["betas", "betas"],  # under the sign
    "fedadagrad": ["betas"],  # without effect
}


def unrolled(name, steps=None, extra=None, zero=False):
    """f(hyperparameters..., params, grads) -> parameters after some steps, and its arguments."""
    steps = steps or (7 if name == "radam" else 4)  # RAdam: its rectified steps too
    kept = ("weight_decay", "initial_accumulator_value") if zero else ()  # else the moments are not exactly 0
    hypers = {key: 0.0 if key in kept else value for key, value in HYPER[name].items()}
    flat = [v for value in hypers.values() for v in (value if isinstance(value, tuple) else (value,))]
    leaves = [torch.tensor(v) for v in flat]
    per_step = [draw(200 + s, num_nodes=2, shapes=SMALL) for s in range(steps)]
    grads = {n: torch.stack([g[n] for g in per_step]) for n in SMALL}
    if zero:
        grads = {n: torch.zeros_like(g) for n, g in grads.items()}
    params = draw(0, num_nodes=2, shapes=SMALL)
    arguments = [*leaves, *params.values(), *grads.values()]

    def f(*arguments):
        it = iter(arguments)
        hyper: dict[str, Any] = {
            key: tuple(next(it) for _ in value) if isinstance(value, tuple) else next(it)
            for key, value in hypers.items()
        }
        p = {n: next(it) for n in SMALL}
        g = {n: next(it) for n in SMALL}
        rule = OptimSpec(name, **hyper, **(extra or {})).rule()
        state = rule.init(p)
        for s in range(steps):
            p, state = rule.update(p, {n: g[n][s] for n in SMALL}, state, inplace=False)
        return torch.cat([x.reshape(-1) for x in p.values()])

    return f, arguments


EXTRA: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in HYPER] + [
    ("adam", {"amsgrad": True, "maximize": True}),
    ("rmsprop", {"centered": True}),
    ("radam", {"decoupled_weight_decay": True}),
    ("nadam", {"decoupled_weight_decay": True}),
]


@pytest.mark.parametrize(("name", "extra"), EXTRA)
def test_derivatives_match_finite_differences(name, extra):
    """Of every hyperparameter, the initial parameters and every gradient, by reverse and forward mode."""
    f, arguments = unrolled(name, extra=extra)
    arguments = [a.requires_grad_() for a in arguments]
    assert torch.autograd.gradcheck(f, arguments, check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("name", HYPER)
def test_second_derivatives_match_finite_differences(name):
    f, arguments = unrolled(name)
    arguments = [a.requires_grad_() for a in arguments]
    assert torch.autograd.gradgradcheck(lambda *a: f(*a).sin().sum(), arguments, fast_mode=True)


def test_every_hyperparameter_has_a_derivative():
    for name in HYPER:
        f, arguments = unrolled(name, extra={"nesterov": False} if name == "sgd" else None)
        loss = f(*[a.requires_grad_() for a in arguments]).sin().sum()
        grads = torch.autograd.grad(loss, arguments, materialize_grads=True)
        names = [key for key, v in HYPER[name].items() for _ in (v if isinstance(v, tuple) else (v,))]
        dead = [key for key, g in zip(names, grads) if (g == 0).all()]
        assert dead == WITHOUT_DERIVATIVE.get(name, []), name


@pytest.mark.parametrize("name", HYPER)
def test_derivatives_through_torch_func(name):
    f, arguments = unrolled(name, steps=3)
    loss = lambda *a: f(*a).sin().sum()  # noqa: E731
    argnums = tuple(range(len(arguments)))
    grads = torch.func.grad(loss, argnums=argnums)(*arguments)
    value = loss(*[a.requires_grad_() for a in arguments])
    expected = torch.autograd.grad(value, arguments, materialize_grads=True)
    assert_close(dict(enumerate(grads)), dict(enumerate(expected)))
    arguments = [a.detach() for a in arguments]
    tangents = tuple(torch.ones_like(a) for a in arguments)
    forward = torch.func.jvp(loss, tuple(arguments), tangents)[1]
    assert_close(forward, total(expected).detach(), rtol=1e-10)


@pytest.mark.parametrize(("name", "extra"), EXTRA)
def test_derivatives_are_finite_where_the_gradient_is_exactly_zero(name, extra):
    f, arguments = unrolled(name, extra=extra, zero=True)
    arguments = [a.requires_grad_() for a in arguments]
    first = torch.autograd.grad(f(*arguments).sin().sum(), arguments, create_graph=True, materialize_grads=True)
    assert all(torch.isfinite(g).all() for g in first)
    second = torch.autograd.grad(total(first), arguments, materialize_grads=True)
    assert all(torch.isfinite(g).all() for g in second)
    detached = tuple(a.detach() for a in arguments)
    forward = torch.func.jvp(f, detached, tuple(torch.ones_like(a) for a in detached))[1]
    assert torch.isfinite(forward).all()


def test_derivative_with_respect_to_one_learning_rate_per_node():
    lr = torch.tensor([0.1, 0.2], requires_grad=True)
    params, grads = draw(0, num_nodes=1), gradient(0, num_nodes=1)
    rule = OptimSpec("sgd", lr=lr).rule()
    new, _ = rule.update(params, grads, rule.init(params), inplace=False)
    (g,) = torch.autograd.grad(total(new.values()), lr)
    assert_close(g, -total(grads.values()).expand(2))
    again, _ = rule.update(params, grads, rule.init(params), lr=2 * lr, inplace=False)
    (g2,) = torch.autograd.grad(total(again.values()), lr)
    assert_close(g2, 2 * g)


def test_first_momentum_buffer_is_not_detached():
    """As torch.optim.SGD(differentiable=True) does: the derivative through the first step would be lost."""
    mu = torch.tensor(0.5, requires_grad=True)
    g = torch.tensor([[2.0]], requires_grad=True)
    rule = OptimSpec("sgd", lr=1.0, momentum=mu).rule()
    params = {"w": torch.zeros(1, 1)}
    state = rule.init(params)
    for _ in range(2):
        params, state = rule.update(params, {"w": g}, state, inplace=False)
    d_mu, d_g = torch.autograd.grad(params["w"].sum(), [mu, g])  # w = -g - (g + mu g)
    assert d_mu.item() == -2.0
    assert d_g.item() == -2.5


@pytest.mark.parametrize("groups", [None, lambda name, p: {"lr": 0.3}])
@pytest.mark.parametrize("where", ["spec", "update"])
def test_in_place_refuses_what_requires_grad(where, groups):
    lr = torch.tensor(0.1, requires_grad=True)
    rule = OptimSpec("sgd", groups, **({"lr": lr} if where == "spec" else {"lr": 0.1})).rule()
    params = draw(0)
    with pytest.raises(ValueError, match=r"lr requires grad.*inplace=False"):
        rule.update(params, gradient(0), rule.init(params), lr=lr if where == "update" else None)


# Parameter groups


def no_decay(name, p):
    return {} if p.dim() >= 2 else {"weight_decay": 0.0, "lr": 0.02}


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_parameter_groups_see_one_nodes_shape(name, inplace):
    seen = {}

    def groups(name, p):
        seen[name] = tuple(p.shape)
        return no_decay(name, p)

    spec = OptimSpec(name, param_groups=groups, lr=0.01, weight_decay=0.3)
    params, _ = stacked(spec, draw(0), inplace=inplace)
    assert seen == SHAPES
    assert list(params) == list(SHAPES)
    one = OptimSpec(name, param_groups=no_decay, lr=0.01, weight_decay=0.3)
    assert [g["weight_decay"] for g in one.build(draw(0).items()).param_groups] == [0.3, 0.0]
    assert_close(params, separate(one, draw(0)))


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_schedule_scales_the_learning_rate_of_every_group(name):
    spec = OptimSpec(name, param_groups=no_decay, lr=0.01)
    params = draw(0)
    rule = spec.rule()
    half, _ = rule.update(clone(params), gradient(0), rule.init(params), lr=0.005)
    expected = OptimSpec(
        name,
        param_groups=lambda n, p: {k: v / 2 if k == "lr" else v for k, v in no_decay(n, p).items()},
        lr=0.005,
    ).rule()
    assert_close(half, expected.update(params, gradient(0), expected.init(params))[0])


def test_the_learning_rate_of_a_group_is_differentiable_again_and_again():
    base = torch.tensor(0.1, requires_grad=True)
    rule = OptimSpec("sgd", lr=base, param_groups=lambda n, p: {"lr": 0.3} if n == "b" else {}).rule()
    params, grads = {"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": torch.ones(1), "b": torch.ones(1)}
    for _ in range(2):
        new, _ = rule.update(params, grads, rule.init(params), lr=2 * base, inplace=False)
        assert_close(torch.autograd.grad(new["a"].sum(), base, retain_graph=True)[0], torch.tensor(-2.0))
        assert_close(torch.autograd.grad(new["b"].sum(), base)[0], torch.tensor(0.0), atol=1e-15)


def test_parameter_groups_may_differ_in_their_state():
    spec = OptimSpec("sgd", lr=0.1, param_groups=lambda n, p: {"momentum": 0.9} if n == "w" else {})
    params, state = stacked(spec, draw(0))
    assert list(state["momentum_buffer"]) == ["w"]
    assert_close(params, separate(spec, draw(0)))
    assert_close(stacked(spec, draw(0), inplace=False)[0], params)


def test_groups_of_small_per_node_runs_are_stepped_once_each():
    spec = OptimSpec(
        "sgd",
        lr=0.1,
        momentum=0.5,
        param_groups=lambda n, p: {} if n == "w" else {"momentum": torch.tensor([0.1, 0.2, 0.3])},
    )
    assert_close(stacked(spec, draw(0))[0], stacked(spec, draw(0), inplace=False)[0])


def test_parameter_group_mistakes():
    with pytest.raises(TypeError, match="param_groups=3 must be a function"):
        OptimSpec("sgd", param_groups=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="returned None; return a dict"):
        OptimSpec("sgd", param_groups=lambda n, p: None).rule().init(draw(0))  # type: ignore
    with pytest.raises(TypeError, match="did you mean 'weight_decay'"):
        OptimSpec("sgd", param_groups=lambda n, p: {"weight_deca": 0}).rule().init(draw(0))
    with pytest.raises(ValueError, match="named_parameters"):
        OptimSpec("sgd", param_groups=no_decay).build(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="positive lr"):
        OptimSpec("sgd", lr=0.0, param_groups=no_decay).rule().init(draw(0))


# One torch optimizer per node


class Lamb(torch.optim.Optimizer):
    """A user's: looks across its parameters, keeps tensors, Python numbers and a number of its own."""

    def __init__(self, params, lr=0.01, beta=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})
        self.num_calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_calls += 1
        for group in self.param_groups:
            total = torch.sqrt(sum((p.grad**2).sum() for p in group["params"]))
            group["largest"] = max(float(total), group.get("largest", 0.0))
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), count=0, decay=1.0, odd=False)
                state["m"].mul_(group["beta"]).add_(p.grad / group["largest"])
                state["fresh"] = state["m"] * 2  # a new tensor every time
                state["count"] += 1
                state["decay"] *= 0.99
                state["odd"] = not state["odd"]
                scale = p.norm() * state["decay"] * (2.0 if state["odd"] else 1.0) / (state["count"] + self.num_calls)
                p.data = p.data * (1 - group["lr"] * group["weight_decay"])
                p.data.add_(state["fresh"], alpha=-group["lr"] * float(scale))


class NotAdam(torch.optim.Adam):
    """A subclass of Adam is not Adam."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm(), alpha=self.param_groups[0]["lr"])


MATRICES = {"w": (4, 3), "v": (3, 5)}
PER_NODE_CASES = [
    (Lamb, {"lr": 0.03, "weight_decay": 0.1}),
    (NotAdam, {"lr": 0.03}),
    (torch.optim.ASGD, {"lr": 0.03}),
    *([(torch.optim.Adafactor, {"lr": 0.03})] if hasattr(torch.optim, "Adafactor") else []),
]


@pytest.mark.parametrize(("cls", "kwargs"), PER_NODE_CASES)
def test_per_node_rule_equals_separate_optimizers(cls, kwargs):
    spec = OptimSpec(cls, **kwargs)
    assert isinstance(spec.rule(), PerNodeRule)
    grad = lambda step: gradient(step, shapes=MATRICES)  # noqa: E731
    params = draw(0, shapes=MATRICES)
    expected = separate(spec, params, grad=grad)
    for inplace in (True, False):
        assert_close(stacked(spec, params, grad=grad, inplace=inplace)[0], expected)
    lrs = [0.01 * (step + 1) for step in range(STEPS)]
    assert_close(stacked(spec, params, grad=grad, lrs=lrs)[0], separate(spec, params, grad=grad, lrs=lrs))
    per_node = [torch.tensor([0.01, 0.02, 0.03]) * lr for lr in lrs]
    expected = separate(spec, params, grad=grad, lrs=per_node)
    assert_close(stacked(spec, params, grad=grad, lrs=per_node)[0], expected)


@pytest.mark.parametrize(("cls", "kwargs"), PER_NODE_CASES)
def test_per_node_rule_resumes_from_its_explicit_state(cls, kwargs):
    spec = OptimSpec(cls, **kwargs)
    grad = lambda step: gradient(step, shapes=MATRICES)  # noqa: E731
    params, state = stacked(spec, draw(0, shapes=MATRICES), steps=5, grad=grad)
    file = io.BytesIO()
    torch.save((params, state), file)
    file.seek(0)
    params, state = torch.load(file, weights_only=True)
    rule = OptimSpec(cls, **kwargs).rule()
    for step in range(5, STEPS):
        params, state = rule.update(params, grad(step), state)
    assert_close(params, stacked(spec, draw(0, shapes=MATRICES), grad=grad)[0], rtol=0, atol=0)


def test_per_node_rule_overwrites_in_place_and_is_pure_otherwise():
    rule = OptimSpec(torch.optim.Adafactor).rule()
    params = draw(0)
    state = rule.init(params)
    params, state = rule.update(params, gradient(0), state)
    new, new_state = rule.update(params, gradient(1), state)
    assert all(new[n].data_ptr() == params[n].data_ptr() for n in params)
    slots = state["tensors"]
    assert all(new_state["tensors"][s][n].data_ptr() == x.data_ptr() for s in slots for n, x in slots[s].items())
    before = clone((new, new_state))
    grads = gradient(2)
    rule.update(new, grads, new_state, inplace=False)
    torch.testing.assert_close((new, new_state), before, rtol=0, atol=0)
    torch.testing.assert_close(grads, gradient(2), rtol=0, atol=0)


def test_per_node_rule_with_values_per_node_and_one_stored_node():
    spec = OptimSpec(Lamb, beta=torch.tensor([0.1, 0.5, 0.9]))
    one = draw(0, num_nodes=1)
    everywhere = {n: p.expand(K, *p.shape[1:]) for n, p in one.items()}
    params, _ = stacked(spec, one)
    assert_close(params, separate(spec, everywhere))
    single, _ = stacked(OptimSpec(Lamb), one, grad=lambda s: gradient(s, num_nodes=1))
    assert all(p.shape[0] == 1 for p in single.values())


def test_per_node_rule_strides():
    spec = OptimSpec(torch.optim.Adafactor)
    grad = lambda s: {n: transposed(g) for n, g in gradient(s).items()}  # noqa: E731
    assert_close(
        stacked(spec, {n: channels_last(p) for n, p in draw(0).items()}, grad=grad)[0],
        separate(spec, draw(0)),
    )


def test_per_node_rule_cannot_be_differentiated():
    rule = OptimSpec(Lamb).rule()
    params = draw(0)
    state = rule.init(params)
    grads = {n: g.requires_grad_() for n, g in gradient(0).items()}
    with pytest.raises(ValueError, match=r"Lamb has no pure body.*use one of SGD, Adam"):
        rule.update(params, grads, state, inplace=False)
    with torch.no_grad():
        rule.update(params, grads, state, inplace=False)

    def through(w):
        return rule.update({**params, "w": w}, gradient(0), state, inplace=False)[0]["w"].sum()

    for transform in (torch.func.grad(through), lambda w: torch.func.jvp(through, (w,), (w,))):
        with pytest.raises(ValueError, match="no pure body"):
            transform(params["w"])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="no pure body"):
        through(torch.autograd.forward_ad.make_dual(params["w"], params["w"]))
    with pytest.raises(ValueError, match="no pure body"):
        rule.update(params, gradient(0), state, lr=torch.tensor(0.1, requires_grad=True))


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ValueError, match=r"LBFGS evaluates the loss again.*use one of SGD"):
        OptimSpec(torch.optim.LBFGS).rule()


def test_state_that_no_checkpoint_can_hold_is_refused():
    class Keeps(torch.optim.SGD):
        def step(self, closure=None):
            self.state[self.param_groups[0]["params"][0]]["history"] = []

    rule = OptimSpec(Keeps).rule()
    with pytest.raises(ValueError, match=r"Keeps keeps a list in state\['w'\]\['history'\]"):
        rule.update(draw(0), gradient(0), rule.init(draw(0)))


@pytest.mark.parametrize(("name", "options", "dtype"), [
    ("sgd", {"lr": 0.1}, torch.bfloat16), ("sgd", {"lr": 0.1}, torch.float16),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.bfloat16), ("adamw", {"lr": 0.1}, torch.bfloat16),
])  # fmt: skip
def test_parameters_of_half_precision_train(name, options, dtype):
    """torch's fused SGD leaves them as they are on a CPU; torch.optim does not take it unless it is told to."""
    lower = lambda tree: {n: x.to(dtype) for n, x in tree.items()}  # noqa: E731
    spec, start, grad = OptimSpec(name, **options), lower(draw(0)), lambda step: lower(gradient(step))
    expected = separate(spec, start, grad=grad)
    found, _ = stacked(spec, start, grad=grad)
    for key, p in found.items():
        assert (p - start[key]).abs().max() > 0.1
        torch.testing.assert_close(p, expected[key], rtol=0.05, atol=0.05)


# Lion and Muon

LAYERS = {"w": (4, 3), "v": (3, 5), "s": (20, 24), "t": (24, 20), "again": (20, 24)}
MUON_CASES: list[dict[str, Any]] = [
    {},
    {"lr": 0.03, "nesterov": False, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": 0.03, "momentum": 0.0, "ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    {"lr": torch.tensor([0.1, 0.2, 0.3]), "momentum": torch.tensor([0.0, 0.5, 0.9])},
    {"weight_decay": torch.tensor([0.1, 0.2, 0.3]), "ns_steps": torch.tensor([2, 5, 1]), "lr": 0.03},
    {"ns_coefficients": (torch.tensor([3.0, 3.4445, 2.0]), -4.7750, 2.0315), "eps": torch.tensor([1e-7, 1e-3, 0.1])},
]


def on_layers(step):
    return gradient(step, shapes=LAYERS)


@pytest.mark.parametrize(("name", "twin", "options"), [
    ("lion", reference.Lion, {"lr": 0.03, "betas": (0.8, 0.9), "weight_decay": 0.1}),
    ("muon", reference.Muon, {"lr": 0.03, "momentum": 0.8, "weight_decay": 0.3, "ns_steps": 4}),
    ("fullprecisionmuon", functools.partial(reference.Muon, rounded=False),
     {"lr": 0.03, "momentum": 0.8, "weight_decay": 0.3, "ns_steps": 4}),
    ("dionmuon", reference.DionMuon, {"lr": 0.03, "momentum": 0.8, "weight_decay": 0.3, "eps": 1e-3}),
    ("dionmuon", lambda *args, full_precision, **more: reference.DionMuon(*args, **{**more, "rounded": False}),
     {"lr": 0.03, "momentum": 0.0, "weight_decay": 0.3, "full_precision": True}),
])  # fmt: skip
def test_lion_and_muon_are_those_of_the_papers(name, twin, options):
    expected = draw(0, shapes=LAYERS)
    models = [[nn.Parameter(p[i]) for p in expected.values()] for i in range(K)]
    optimizers = [twin(model, **options) for model in models]
    for step in range(STEPS):
        for i, optimizer in enumerate(optimizers):
            for name_of, p in zip(LAYERS, models[i]):
                p.grad = on_layers(step)[name_of][i]
            optimizer.step()
    for inplace in (True, False):
        params, _ = stacked(OptimSpec(name, **options), draw(0, shapes=LAYERS), grad=on_layers, inplace=inplace)
        assert_close(params, {n: torch.stack([m[j].detach() for m in models]) for j, n in enumerate(LAYERS)})


@pytest.mark.parametrize("options", MUON_CASES)
def test_muon_equals_torchs_node_by_node(options):
    spec = OptimSpec("muon", **options)
    assert isinstance(spec.rule(), ElementwiseRule)
    if hasattr(torch.optim, "Muon"):
        assert spec.cls is torch.optim.Muon
    expected = separate(spec, draw(0, shapes=LAYERS), grad=on_layers)
    for inplace in (True, False):
        assert_close(stacked(spec, draw(0, shapes=LAYERS), grad=on_layers, inplace=inplace)[0], expected)
    if not isinstance(options.get("lr"), torch.Tensor):
        lrs = [torch.tensor([0.01, 0.02, 0.03]) * (1 + step % 3) for step in range(STEPS)]
        expected = separate(spec, draw(0, shapes=LAYERS), grad=on_layers, lrs=lrs)
        for inplace in (True, False):
            assert_close(stacked(spec, draw(0, shapes=LAYERS), grad=on_layers, lrs=lrs, inplace=inplace)[0], expected)


@pytest.mark.parametrize("options", MUON_CASES)
def test_muon_in_full_precision_is_muon_but_for_its_rounding(options):
    spec = OptimSpec("fullprecisionmuon", **options)
    assert isinstance(spec.rule(), ElementwiseRule)
    expected = separate(spec, draw(0, shapes=LAYERS), grad=on_layers)
    for inplace in (True, False):
        assert_close(stacked(spec, draw(0, shapes=LAYERS), grad=on_layers, inplace=inplace)[0], expected, rtol=1e-9)
    start = draw(0, shapes=LAYERS)
    (rounded, _), (full, _) = (
        stacked(OptimSpec(name, **options), draw(0, shapes=LAYERS), grad=on_layers, steps=1)
        for name in ("muon", "fullprecisionmuon")
    )
    for name in LAYERS:
        gap, update = (full[name] - rounded[name]).norm(), (full[name] - start[name]).norm()
        assert 1e-6 * update < gap < 0.05 * update


def test_muon_takes_nodes_and_equal_layers_together(monkeypatch):
    shapes = []
    newton_schulz = optimizers._newton_schulz

    def counted(u, *rest):
        shapes.append(u.shape)
        return newton_schulz(u, *rest)

    monkeypatch.setattr(optimizers, "_newton_schulz", counted)
    stacked(OptimSpec("muon"), draw(0, shapes=LAYERS), steps=1, grad=on_layers)
    assert [tuple(shape) for shape in shapes] == [(K, 4, 3), (K, 3, 5), (2 * K, 20, 24), (K, 24, 20)]


def test_muon_stored_once_stays_one_and_goes_through_a_checkpoint():
    spec = OptimSpec("muon", lr=0.03)
    same = lambda step: gradient(step, num_nodes=1, shapes=LAYERS)  # noqa: E731
    params, state = stacked(spec, draw(0, num_nodes=1, shapes=LAYERS), steps=5, grad=same)
    assert all(x.shape[0] == 1 for x in [*params.values(), *state["momentum_buffer"].values()])
    file = io.BytesIO()
    torch.save((params, state), file)
    file.seek(0)
    params, state = torch.load(file, weights_only=True)
    rule = spec.rule()
    for step in range(5, STEPS):
        params, state = rule.update(params, same(step), state)
    assert_close(params, stacked(spec, draw(0, num_nodes=1, shapes=LAYERS), grad=same)[0], rtol=0, atol=0)


def smooth_muon(lr, momentum, decay, a, eps, p, g, optim="muon"):
    numbers = {"lr": lr, "momentum": momentum, "weight_decay": decay, "eps": eps, "ns_coefficients": (a, -1.5, 0.5)}
    rule = OptimSpec(optim, **numbers, ns_steps=2).rule()
    params, state = {"w": p}, rule.init({"w": p})
    for step in range(2):
        params, state = rule.update(params, {"w": g[step]}, state, inplace=False)
    return params["w"]


def muon_arguments():
    numbers = [torch.tensor(x, requires_grad=True) for x in (0.1, 0.8, 0.3, 2.0, 1e-2)]
    return [*numbers, torch.randn(2, 3, 2, requires_grad=True), torch.randn(2, 2, 3, 2, requires_grad=True)]


def test_derivatives_of_muon_are_those_of_its_polynomial(monkeypatch):
    """By every number, parameter and gradient: finite differences cannot see through bfloat16, so float64 here."""
    torch.manual_seed(0)
    arguments = muon_arguments()
    (rounded,) = torch.autograd.grad(smooth_muon(*arguments).sin().sum(), arguments[:1], retain_graph=True)
    monkeypatch.setattr(optimizers, "_newton_schulz", optimizers._smooth)
    assert torch.autograd.gradcheck(smooth_muon, arguments, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *a: smooth_muon(*a).sin().sum(), arguments, fast_mode=True)
    (exact,) = torch.autograd.grad(smooth_muon(*arguments).sin().sum(), arguments[:1])
    assert_close(rounded, exact, rtol=0.05)
    grads = torch.func.grad(lambda *a: smooth_muon(*a).sin().sum(), argnums=tuple(range(7)))(*arguments)
    expected = torch.autograd.grad(smooth_muon(*arguments).sin().sum(), arguments)
    assert_close(dict(enumerate(grads)), dict(enumerate(expected)), rtol=1e-10)


def test_derivatives_of_muon_in_full_precision_are_those_of_what_it_computes():
    torch.manual_seed(0)
    in_full = functools.partial(smooth_muon, optim="fullprecisionmuon")
    assert torch.autograd.gradcheck(in_full, muon_arguments(), check_forward_ad=True, fast_mode=True)


def test_the_derivative_of_muon_is_finite_where_the_gradient_is_zero():
    g = torch.zeros(1, 3, 2, requires_grad=True)
    rule = OptimSpec("muon").rule()
    params = {"w": torch.ones(1, 3, 2)}
    new, _ = rule.update(params, {"w": g}, rule.init(params), inplace=False)
    assert torch.isfinite(torch.autograd.grad(new["w"].sum(), g)[0]).all()


def matrices_by_muon(name, p):
    return {} if p.dim() == 2 else {"optim": "adamw", "lr": 3e-3}


@pytest.mark.parametrize(("name", "key"), [("sgd", "momentum"), ("rmsprop", "eps"), ("sgd", "weight_decay")])
def test_what_is_no_number_is_refused_where_torch_takes_it(name, key):
    options: Any = {key: True}
    with pytest.raises(ValueError, match=rf"{key}=True must be a number, such as"):
        OptimSpec(name, **options)


class Careless(torch.optim.Optimizer):
    """Looks at nothing that it is given."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})


@pytest.mark.parametrize("lr", [-0.1, "0.1", True, None])
def test_the_learning_rate_of_any_class_is_a_number(lr):
    with pytest.raises(ValueError, match=r"lr=.* must be a number >= 0: the learning rate"):
        OptimSpec(Careless, lr=lr)


def test_too_few_numbers_are_refused():
    with pytest.raises(ValueError, match=r"Adam refuses {'betas': \(0\.9,\)}"):
        OptimSpec("adam", betas=(0.9,))
    with pytest.raises(ValueError, match=r"betas=\(0\.9, 0\.9, 0\.9\) must be 2 numbers"):
        OptimSpec("adam", betas=(0.9, 0.9, 0.9))


@pytest.mark.parametrize(("right", "wrong"), [({"lr": 1}, {"lr": True}), ({"amsgrad": True}, {"amsgrad": 1})])
def test_what_was_accepted_once_is_not_taken_for_an_equal_value_of_another_type(right, wrong):
    assert OptimSpec("adam", **right).kwargs == wrong
    with pytest.raises((TypeError, ValueError)):
        OptimSpec("adam", **wrong)


@pytest.mark.parametrize("ns_steps", [100, 2**62, 2.5, -1, torch.tensor([5, 100])])
def test_muon_refuses_numbers_of_newton_schulz_steps_that_torch_refuses(ns_steps):
    params = {"w": torch.ones(2, 3, 2)}
    for inplace in (True, False):
        # torch's class looks at the number in its first step; ours, of older versions of torch, when it is made
        with pytest.raises(ValueError, match=r"ns_steps=.* must be an integer from 0 to 99"):  # noqa: PT012
            rule = OptimSpec("muon", lr=0.1, ns_steps=ns_steps).rule()
            rule.update(params, {"w": torch.ones(2, 3, 2)}, rule.init(params), inplace=inplace)


def test_full_precision_muon_checks_its_arguments():
    w = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(TypeError, match="nesterov='no' must be True or False"):
        FullPrecisionMuon([w], nesterov="no")  # type: ignore[arg-type]
    for ns_steps in (100, 2.5, -1, True):
        with pytest.raises(ValueError, match=rf"ns_steps={ns_steps} must be an integer from 0 to 99"):
            FullPrecisionMuon([w], ns_steps=ns_steps)  # type: ignore[arg-type]


def test_muon_refuses_what_is_no_matrix_and_says_what_to_do():
    with pytest.raises(ValueError, match=r"Muon takes matrices, but parameter 'conv' .*\[2, 3, 2, 2\].*param_groups"):
        OptimSpec("muon").rule().init(draw(0))
    with pytest.raises(ValueError, match=r"Adafactor.*does not run stacked"):
        OptimSpec("muon", param_groups=lambda n, p: {"optim": "adafactor"}).rule().init(draw(0))
    with pytest.raises(ValueError, match="lr"):
        OptimSpec("lion", lr=-1.0)
    with pytest.raises(ValueError, match="betas"):
        OptimSpec("lion", betas=(0.9, 1.5))


def test_groups_may_have_another_optimizer():
    spec = OptimSpec("muon", lr=0.02, param_groups=matrices_by_muon)
    expected = separate(spec, draw(0))
    assert_close({"w": expected["w"]}, separate(OptimSpec("muon", lr=0.02), {"w": draw(0)["w"]}))
    assert_close({"b": expected["b"]}, separate(OptimSpec("adamw", lr=3e-3), {"b": draw(0)["b"]}))
    for inplace in (True, False):
        params, state = stacked(spec, draw(0), inplace=inplace)
        assert_close(params, expected)
    assert list(state["momentum_buffer"]) == ["w"]
    assert list(state["exp_avg"]) == ["conv", "b", "scale"]
    rule = spec.rule()
    half, _ = rule.update(draw(0), gradient(0), rule.init(draw(0)), lr=0.01)  # a schedule is everyone's
    assert_close({"b": half["b"]}, stacked(OptimSpec("adamw", lr=1.5e-3), {"b": draw(0)["b"]}, steps=1,
                                           grad=lambda s: {"b": gradient(s)["b"]})[0])  # fmt: skip


@pytest.mark.parametrize("name", ["lion", "muon"])
def test_lion_and_muon_of_several_runs_are_merged(name):
    specs = [OptimSpec(name, lr=0.01, weight_decay=0.1), OptimSpec(name, lr=0.03, weight_decay=0.2)]
    assert merge_key(specs[0]) == merge_key(specs[1])
    merged = merged_spec([specs[0], specs[1], specs[1]])
    params, _ = stacked(merged, draw(0, shapes=LAYERS), grad=on_layers)
    for spec, rows in zip(specs, (slice(0, 1), slice(1, 3))):
        alone = stacked(spec, {n: p[rows] for n, p in draw(0, shapes=LAYERS).items()},
                        grad=lambda s, rows=rows: {n: g[rows] for n, g in on_layers(s).items()})[0]  # fmt: skip
        assert_close({n: p[rows] for n, p in params.items()}, alone)


# The specification


@pytest.mark.parametrize(
    "name",
    ["adam", "AdamW", "SGD", "rmsprop", "adagrad", "nadam", "radam", "adamax", "Adadelta", "rprop", "Lion", "muon"],
)
def test_names(name):
    assert OptimSpec.from_string(name).cls.__name__.lower() == name.lower()
    assert OptimSpec(name, lr=0.5).lr == 0.5


def test_unknown_name_keyword_and_value():
    with pytest.raises(ValueError, match=r"optimizer='adamv' is not known; did you mean 'adam.*'adadelta'"):
        OptimSpec("adamv")
    with pytest.raises(TypeError, match=r"SGD has no argument 'momentun'; did you mean 'momentum'\? It has: lr"):
        OptimSpec("sgd", momentun=0.9)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        OptimSpec("adam", lr=-1.0)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        OptimSpec("adam", lr=torch.tensor([0.1, -1.0]))
    with pytest.raises(ValueError, match="Invalid beta parameter at index 1"):
        OptimSpec("adam", betas=(0.9, torch.tensor([0.5, 1.5])))
    with pytest.raises(ValueError, match="Nesterov"):
        OptimSpec("sgd", nesterov=True)
    with pytest.raises(ValueError, match=r"lr has shape \[2, 2, 2\]"):
        OptimSpec("sgd", lr=torch.ones(2, 2, 2))
    with pytest.raises(TypeError, match="Adam refuses"):
        OptimSpec("adam", betas=torch.tensor([0.9, 0.99]))


def test_repr_equality_replace_and_defaults():
    spec = OptimSpec(torch.optim.AdamW, lr=3e-4)
    assert repr(spec) == "OptimSpec(AdamW, lr=0.0003)"
    assert "param_groups=no_decay" in repr(OptimSpec("sgd", param_groups=no_decay))
    assert spec == OptimSpec("adamw", lr=3e-4)
    assert spec != OptimSpec("adam", lr=3e-4)
    assert spec != spec.replace(lr=1e-3)
    assert spec != "adamw"
    assert OptimSpec("adam", betas=[0.5, 0.9]) == OptimSpec("adam", betas=(0.5, 0.9))
    assert OptimSpec("sgd", lr=torch.tensor([1.0, 2.0])) == OptimSpec("sgd", lr=torch.tensor([1.0, 2.0]))
    assert OptimSpec("sgd", lr=torch.tensor([1.0, 2.0])) != OptimSpec("sgd", lr=torch.tensor([1.0, 3.0]))
    assert spec.replace(weight_decay=0.1).kwargs == {"lr": 3e-4, "weight_decay": 0.1}
    assert spec.replace(param_groups=no_decay).param_groups is no_decay
    assert OptimSpec("adamw").lr == 1e-3
    assert spec.hyper["betas"] == (0.9, 0.999)


def test_build():
    model = nn.Linear(2, 2)
    optimizer = OptimSpec("sgd", lr=torch.tensor(0.5), momentum=0.9).build(model)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert OptimSpec("sgd", lr=torch.tensor([0.1, 0.2])).build(model.parameters(), node=1).defaults["lr"] == 0.2
    with pytest.raises(ValueError, match=r"lr has 2 values.*node=0"):
        OptimSpec("sgd", lr=torch.tensor([0.1, 0.2])).build(model)


def test_ensure_optim_spec():
    adamw = OptimSpec("adamw", lr=0.1)
    assert ensure_optim_spec(adamw) == adamw
    assert ensure_optim_spec(torch.optim.AdamW, lr=0.1) == adamw
    assert ensure_optim_spec("adamw", lr=0.1, weight_decay=None) == adamw
    assert ensure_optim_spec(adamw, lr=0.1) == adamw
    assert ensure_optim_spec(adamw, eps=1e-3) == adamw.replace(eps=1e-3)
    assert ensure_optim_spec(None, default=adamw, lr=0.2) == adamw.replace(lr=0.2)
    with pytest.raises(ValueError, match=r"lr is given twice.*give it once"):
        ensure_optim_spec(adamw, lr=0.2)
    for wrong in (3, torch.optim, nn.Linear, None):
        with pytest.raises(TypeError, match=r"name 'adamw', a class torch.optim.AdamW, or OptimSpec\("):
            ensure_optim_spec(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="give its class, SGD"):
        ensure_optim_spec(torch.optim.SGD(nn.Linear(1, 1).parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["differentiable", "capturable"])
def test_an_option_without_effect_warns(option):
    with pytest.warns(VecgymWarning, match=f"{option}=True .* has no effect"):
        OptimSpec("nadam", param_groups=None, **{option: True}).rule()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OptimSpec("nadam", foreach=True, maximize=True).rule()


def test_mistakes_at_update():
    rule = OptimSpec("adam").rule()
    params = draw(0)
    state = rule.init(params)
    with pytest.raises(ValueError, match=r"same names.*\['w'\]"):
        rule.update(params, {n: g for n, g in gradient(0).items() if n != "w"}, state)
    sgd_state = OptimSpec("sgd").rule().init(params)
    for inplace in (True, False):
        with pytest.raises(ValueError, match=r"no 'exp_avg'.*rule.init"):
            rule.update(params, gradient(0), sgd_state, inplace=inplace)
        with pytest.raises(ValueError, match=r"do not match: \[2, 3\]"):
            rule.update(params, gradient(0, num_nodes=2), state, inplace=inplace)
        with pytest.raises(ValueError, match=r"do not match: \[2, 3\]"):
            rule.update(params, gradient(0), state, lr=torch.tensor([0.1, 0.2]), inplace=inplace)
    with pytest.raises(ValueError, match="view_as_real"):
        rule.init({"w": torch.zeros(1, 2, dtype=torch.complex64)})


def test_no_parameters():
    for inplace in (True, False):
        params, state = OptimSpec("adam").rule().update({}, {}, OptimSpec("adam").rule().init({}), inplace=inplace)
        assert params == {}
        assert state["step"].tolist() == [1]


# Clipping


@pytest.mark.parametrize("inplace", [True, False])
def test_clip_equals_torchs_on_every_node(inplace):
    grads = gradient(0)
    grads["w"][1] *= 1e-3
    for g in grads.values():
        g[1] *= 1e-3
    nodes = [[nn.Parameter(torch.zeros_like(g[i])) for g in grads.values()] for i in range(K)]
    norms = []
    for i, node in enumerate(nodes):
        for p, g in zip(node, grads.values()):
            p.grad = g[i].clone()
        norms.append(nn.utils.clip_grad_norm_(node, 0.7))
    given = clone(grads)
    clipped, norm = clip_grad_norm(given, 0.7, inplace=inplace)
    assert_close(norm, torch.stack(norms))
    for j, name in enumerate(grads):
        assert_close(clipped[name], torch.stack([node[j].grad for node in nodes]))  # type: ignore[misc]
    assert torch.equal(given["conv"], grads["conv"]) != inplace
    per_node, _ = clip_grad_norm(clone(grads), torch.tensor([0.7, 0.7, 0.1]), inplace=inplace)
    assert_close(per_node["conv"][:2], clipped["conv"][:2])
    assert_close(per_node["conv"][2] * 7, clipped["conv"][2], rtol=1e-5)


@pytest.mark.parametrize("inplace", [True, False])
def test_clip_of_mixed_strided_and_expanded_trees(inplace):
    grads = {"one": torch.randn(1, 4), "wide": torch.randn(1, 3).expand(K, 3), "t": torch.randn(5, K).t()}
    plain = {n: g.expand(K, *g.shape[1:]).clone() for n, g in grads.items()}
    expected, norms = clip_grad_norm(plain, 0.5, inplace=False)
    clipped, got = clip_grad_norm(grads, 0.5, inplace=inplace)
    assert_close(got, norms)
    assert_close(clipped, expected)


def test_clip_is_differentiable_and_finite_at_zero():
    grads = [torch.randn(2, 3, requires_grad=True), torch.randn(2, requires_grad=True)]
    f = lambda *g: tuple(clip_grad_norm(dict(zip("ab", g)), 0.5, inplace=False)[0].values())  # noqa: E731
    assert torch.autograd.gradcheck(f, grads, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, grads)
    zero = torch.zeros(2, 3, requires_grad=True)
    clipped, norms = clip_grad_norm({"a": zero}, 1.0, inplace=False)
    (g,) = torch.autograd.grad(clipped["a"].sum() + norms.sum(), zero, create_graph=True)
    assert torch.equal(g, torch.ones(2, 3))
    (g2,) = torch.autograd.grad(g.sum(), zero)
    assert torch.isfinite(g2).all()


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), torch.tensor([1.0, 0.0])])
def test_clip_needs_a_positive_norm(max_norm):
    with pytest.raises(ValueError, match=r"max_norm=.* must be a number in"):
        check_max_norm(max_norm)
    with pytest.raises(ValueError, match=r"max_norm=.* must be a number in"):
        clip_grad_norm({"w": torch.ones(1, 2)}, max_norm)


class Stateful(torch.optim.Optimizer):
    """Its memory lies in its state, its groups and its attributes, some of them made by a step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "pace": 1.0})
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        self.total = getattr(self, "total", 0.0) + self.count
        for group in self.param_groups:
            group["pace"] *= 0.9
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(0.5).add_(p.grad)
                p.data -= group["lr"] * group["pace"] * (m + self.total * 1e-3)


class Remembering(Stateful):
    """It also keeps a list, which nothing sets back: there is a new one at each step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.seen = []

    def step(self, closure=None):
        self.seen.append(len(self.seen))
        assert self.seen == [0]
        super().step()


@pytest.mark.parametrize("cls", [Stateful, Remembering])
def test_a_step_taken_twice_from_one_state_gives_the_same(cls):
    """The optimizers of the nodes are kept from step to step, and begin every step as new."""
    rule = OptimSpec(cls, lr=0.1).rule()
    params = draw(0)
    state = rule.init(params)
    for step in range(3):
        again = rule.update(params, gradient(step), state, inplace=False)
        fresh = OptimSpec(cls, lr=0.1).rule().update(params, gradient(step), state, inplace=False)
        params, state = rule.update(params, gradient(step), state, inplace=False)
        for other in (again, fresh):
            assert_close(other[0], params, rtol=0)
            assert map_leaves(torch.Tensor.tolist, other[1]) == map_leaves(torch.Tensor.tolist, state)
    assert state["attributes"]["optimizer"]["count"].tolist() == [3.0] * K


def test_a_rule_serves_other_parameters_in_turn():
    """The optimizers that are kept are those of the parameters before, and of no others."""
    rule = OptimSpec(Stateful, lr=0.1).rule()
    for name, dtype in [("w", torch.float64), ("v", torch.float64), ("v", torch.float32), ("w", torch.float64)]:
        params, grads = {name: torch.ones(K, 2, dtype=dtype)}, {name: torch.full((K, 2), 0.5, dtype=dtype)}
        found, _ = rule.update(params, grads, rule.init(params), inplace=False)
        fresh = OptimSpec(Stateful, lr=0.1).rule()
        wanted, _ = fresh.update(params, grads, fresh.init(params), inplace=False)
        assert found.keys() == wanted.keys()
        assert torch.equal(found[name], wanted[name])
        assert found[name].dtype == dtype


# ------------------------------------------------------------------------------------------------ Adam by hand


@pytest.mark.parametrize("twice", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("shape", [(), (3,)], ids=["a number", "of each node"])
def test_adams_step_by_hand_is_the_formula(
    shape: tuple[int, ...], twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values to the bit; derivatives of everything, also where the gradient depends on the parameters and v is 0."""

    def derivatives(by_hand: bool) -> list[Tensor]:
        monkeypatch.setattr(formulas, "adam_applies", applies if by_hand else lambda tensors: False)
        generator = torch.Generator().manual_seed(0)
        p, m, v = torch.randn(3, 3, 4, 2, generator=generator, dtype=torch.float64).unbind()
        v.square_()[0, 0] = 0
        m[0, 0] = 0
        moments = [x.requires_grad_() for x in (p, m, v)]
        settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1}
        numbers = {name: torch.full(shape, x, dtype=torch.float64).requires_grad_() for name, x in settings.items()}
        h = SimpleNamespace(**numbers, decoupled_weight_decay=True)
        g = p.sin() * torch.tensor([0.0, 1.0, 1.0, 1.0]).double()[:, None]  # 0 where v and m are
        for t in (1, 2):
            x = functools.partial(spread, like=p)
            p, slots = formulas.adam(p, g, {"exp_avg": m, "exp_avg_sq": v}, t, h, x)
            m, v = slots.values()
            g = p.sin() * g.detach().sign().abs()
        weights = torch.linspace(-1, 1, p.numel(), dtype=torch.float64).view_as(p)
        loss = ((p**3 + m.sin() + v.cos()) * weights).sum()
        inputs = [*moments, *numbers.values()]
        first = torch.autograd.grad(loss, inputs, create_graph=twice)
        if not twice:
            return [p, m, v, *first]
        return [p, m, v, *torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), inputs)]

    applies = formulas.adam_applies
    ours, theirs = derivatives(True), derivatives(False)
    assert "AdamStep" in type(ours[0].grad_fn).__name__
    assert "AdamStep" not in type(theirs[0].grad_fn).__name__
    assert all(torch.equal(a, b) for a, b in zip(ours[:3], theirs[:3]))
    torch.testing.assert_close(ours[3:], theirs[3:], rtol=1e-11, atol=1e-11)


def test_forward_mode_through_one_optimizer_a_node_is_refused_also_without_gradients():
    """`no_grad` ends backward mode alone: a tangent would be lost without a word."""
    rule = OptimSpec(torch.optim.ASGD, lr=0.1).rule()
    params = {"w": torch.ones(2, 3)}
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        grads = {"w": torch.autograd.forward_ad.make_dual(torch.ones(2, 3), torch.ones(2, 3))}
        with pytest.raises(ValueError, match="cannot be differentiated"):
            rule.update(params, grads, rule.init(params), inplace=False)
    with torch.no_grad():  # a tensor that requires grad is as any other there
        rule.update(params, {"w": torch.ones(2, 3, requires_grad=True)}, rule.init(params), inplace=False)


def test_moments_of_a_first_step_do_not_depend_on_its_rate():
    """Nor do second derivatives fail where nothing else is a variable."""
    rule, params = OptimSpec("adam").rule(), {"w": torch.ones(1, 3)}
    rate = torch.tensor(0.1, requires_grad=True)
    _, state = rule.update(params, {"w": torch.ones(1, 3)}, rule.init(params), lr=rate, inplace=False)
    total = state["exp_avg"]["w"].sum() + state["exp_avg_sq"]["w"].sum()
    for again in (False, True):
        [slope] = torch.autograd.grad(total, rate, create_graph=again, retain_graph=True, allow_unused=True)
        assert slope is None or slope == 0


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_of_no_parameters(exact: bool):
    """Such as those of a fragment whose layers are all each node's own."""
    optimizer = Optimizer(OptimSpec("sgd", lr=0.1, momentum=0.9))
    params, state = optimizer.step({}, {}, optimizer.init({}), 0, exact=exact)
    assert params == {}
    assert list(leaves(state)) == []
