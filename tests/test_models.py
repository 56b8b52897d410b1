"""The GPT of `vecgym compare`."""

import math
from typing import Any

import pytest
import torch
from torch.func import functional_call

from vecgym import Trainer
from vecgym.data import TokenWindows
from vecgym.engine import Engine
from vecgym.models import GPT
from vecgym.strategy import AllReduceStrategy

SIZES = {"vocab_size": 11, "context": 6, "num_layers": 2, "num_heads": 2, "width": 8}


def make_gpt(seed: int = 0, **changes) -> GPT:
    torch.manual_seed(seed)
    return GPT(**{**SIZES, **changes})


def random_tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("changes", [{}, {"num_layers": 3}, {"width": 12, "num_heads": 3}, {"context": 9}])
def test_number_of_parameters_is_the_documented_one(changes):
    s = {**SIZES, **changes}
    C = s["width"]
    expected = s["vocab_size"] * C + s["context"] * C + s["num_layers"] * (12 * C**2 + 2 * C) + C
    assert sum(p.numel() for p in make_gpt(**changes).parameters()) == expected


def test_loss_is_the_cross_entropy_of_the_logits():
    model, tokens, targets = make_gpt(), random_tokens(3, 6), random_tokens(3, 6, seed=2)
    log_p = model.logits(tokens).log_softmax(-1)
    expected = -sum(log_p[b, t, targets[b, t]] for b in range(3) for t in range(6)) / 18
    torch.testing.assert_close(model((tokens, targets)), expected)


def test_is_causal():
    """A later token changes nothing before it, and something from it on."""
    model, tokens = make_gpt(), random_tokens(1, 6)
    changed = tokens.clone()
    changed[0, 3] = (tokens[0, 3] + 1) % SIZES["vocab_size"]
    before, after = model.logits(tokens), model.logits(changed)
    torch.testing.assert_close(before[0, :3], after[0, :3])
    assert ((before - after)[0, 3:].abs().amax(-1) > 1e-4).all()


def test_order_of_tokens_matters():
    """Without positions, the last token would see the ones before it as a set."""
    model = make_gpt()
    one, other = (model.logits(torch.tensor([row]))[0, -1] for row in ([1, 2, 3], [2, 1, 3]))
    assert (one - other).abs().max() > 1e-4


def test_attention_is_the_textbook_formula():
    block: Any = make_gpt().blocks[0].attention
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.view(2, 5, 2, 4) for part in block.qkv(x).chunk(3, dim=-1))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(4)
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    y = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(2, 5, 8)
    torch.testing.assert_close(block(x), block.project(y))


def test_initial_size_of_the_weights():
    """0.02 at width 768, so 0.04 at 192; residual projections smaller by the square root of twice the layers."""
    model = make_gpt(width=192, num_layers=2)
    block: Any = model.blocks[0]
    for layer in (block.up, block.attention.qkv):
        assert layer.weight.std().item() == pytest.approx(0.04, rel=0.02)
    for layer in (block.down, block.attention.project):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.positions.weight.std().item() == pytest.approx(0.04, rel=0.1)
    assert model.logits(random_tokens(4, 6)).std().item() < 1  # so the first loss is close to log(vocab_size)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_vmap_engine_takes_it(dropout):
    model = make_gpt(dropout=dropout)
    tokens = random_tokens(3, 2, 6)  # [nodes, batch, context]
    engine = Engine(model, engine="vmap")
    engine.prepare((tokens, tokens))
    assert engine.facts is not None
    assert engine.facts.vmap_error is None
    assert engine.facts.vmap_slow == ()
    assert engine.facts.random == (dropout > 0)


def test_all_nodes_at_once_equal_one_model_after_another():
    model = make_gpt().double()
    tokens, targets = random_tokens(3, 2, 6), random_tokens(3, 2, 6, seed=2)
    engine = Engine(model, engine="vmap")
    engine.prepare((tokens, targets))
    stacked = {name: torch.stack([p.detach() * (1 + 0.1 * i) for i in range(3)]) for name, p in engine.params.items()}
    found = engine.gradients(stacked, {}, (tokens, targets), seed=0, step=0)
    for i in range(3):
        own = {name: p[i].clone().requires_grad_() for name, p in stacked.items()}
        loss = functional_call(model, own, ((tokens[i], targets[i]),))
        torch.testing.assert_close(found.losses[i], loss.detach())
        for name, g in zip(own, torch.autograd.grad(loss, list(own.values()))):
            torch.testing.assert_close(found.grads[name][i], g)


def test_learns_and_continues_a_periodic_text():
    text = torch.tensor([0, 1, 2, 3, 4] * 20)
    trainer = Trainer(make_gpt(), TokenWindows(text, 6))
    strategy = AllReduceStrategy("adamw", lr=1e-2)
    trained = trainer.fit(strategy, 2, max_steps=80, batch_size=8, progress=False, device="cpu")
    assert isinstance(trained, GPT)
    assert trainer.history["train_loss"][-1] < 0.1
    start = torch.tensor([[2, 3], [4, 0]])
    expected = torch.tensor([[2, 3, 4, 0, 1, 2, 3, 4, 0, 1], [4, 0, 1, 2, 3, 4, 0, 1, 2, 3]])
    assert torch.equal(trained.generate(start, 8, temperature=0), expected)
    assert torch.equal(trained.generate(start, 8, top_k=1), expected)


def test_generate_samples_from_the_softmax():
    model, start = make_gpt(), torch.tensor([[1, 5, 3]]).repeat(20_000, 1)
    expected = (model.logits(start[:1])[0, -1] / 0.5).softmax(-1)
    drawn = model.generate(start, 1, temperature=0.5, generator=torch.Generator().manual_seed(0))[:, -1]
    frequencies = drawn.bincount(minlength=11) / len(drawn)
    torch.testing.assert_close(frequencies, expected.detach(), atol=0.015, rtol=0)


def test_generate_top_k_takes_only_the_most_likely():
    model, start = make_gpt(), torch.tensor([[1, 5, 3]]).repeat(500, 1)
    best = set(model.logits(start[:1])[0, -1].topk(2).indices.tolist())
    assert set(model.generate(start, 1, top_k=2)[:, -1].tolist()) == best


def test_generate_is_reproducible_and_changes_nothing():
    model = make_gpt(dropout=0.5).train()
    start = random_tokens(2, 9)  # longer than the context: only its end is looked at
    state = torch.get_rng_state()
    one, other, different = (
        model.generate(start, 10, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(one, other)
    assert not torch.equal(one, different)
    assert torch.equal(one[:, :9], start)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be an integer >= 1"),
        ({"context": 2.5}, "context=2.5 must be"),
        ({"num_layers": True}, "num_layers=True must be"),
        ({"num_heads": 3}, r"num_heads=3 must divide width=8: give one of \[1, 2, 4, 8\]"),
        ({"dropout": 1.0}, "dropout=1.0 must be a number in"),
        ({"dropout": -0.1}, "dropout=-0.1 must be a number in"),
    ],
)
def test_constructor_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        make_gpt(**changes)


def test_calls_refuse():
    model = make_gpt()
    with pytest.raises(ValueError, match="tokens has 7 positions, but context=6: give at most 6"):
        model.logits(random_tokens(1, 7))
    with pytest.raises(ValueError, match=r"tokens has shape \[3\]"):
        model.generate(random_tokens(3), 1)
    with pytest.raises(ValueError, match="tokens has shape"):
        model.generate(random_tokens(1, 0), 1)
    with pytest.raises(ValueError, match=r"temperature=-1 must be a number >= 0"):
        model.generate(random_tokens(1, 3), 1, temperature=-1)
    with pytest.raises(ValueError, match="top_k=0 must be an integer >= 1"):
        model.generate(random_tokens(1, 3), 1, top_k=0)
