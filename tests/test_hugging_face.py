"""Small models of transformers, built from their configurations; `pytest -m hf` runs this."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from vecgym import Trainer, load, sweep, verify
from vecgym.optim.schedule import lambda_cosine
from vecgym.strategy import DiLoCoStrategy, FedAvgStrategy

pytestmark = pytest.mark.hf
MISSING = "transformers is missing: pip install vecgym[hf]"
VOCABULARY, CONTEXT = 32, 12
SETTINGS: dict[str, Any] = {"batch_size": 4, "device": "cpu", "progress": False}


class Windows(Dataset[Any]):
    """Windows of a file of tokens; every other one ends in padding, as its mask says."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self) -> int:
        return len(self.tokens) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.tokens[index * CONTEXT : (index + 1) * CONTEXT].astype(np.int64))
        mask = torch.ones_like(ids)
        mask[CONTEXT - 3 :] = index % 2
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def loss_fn(module: Any, batch: Any) -> dict[str, Tensor]:
    return {"loss": module(**batch).loss, "weight": (batch["labels"][:, 1:] != -100).sum()}


def make(name: str) -> Any:
    transformers = pytest.importorskip("transformers", reason=MISSING)
    torch.manual_seed(0)
    if name == "GPT-2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, attn_implementation="eager",
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def data(tmp_path: Path) -> Windows:
    rng = np.random.default_rng(0)
    rng.integers(VOCABULARY, size=48 * CONTEXT).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    return Windows(tmp_path / "tokens.bin")


MODELS = pytest.mark.parametrize("name", ["GPT-2", "Llama"])


@MODELS
def test_a_run_is_that_of_plain_modules(name: str, data: Windows) -> None:
    """FedAvg by hand, all nodes in one vmap; to 1e-6, since transformers takes the loss of float64 in float32."""
    model = make(name).double()
    trainer = Trainer(model, data, data, loss_fn=loss_fn)
    averaged = trainer.fit(FedAvgStrategy("sgd", H=2, lr=0.1), 3, max_steps=4, shuffle=False, **SETTINGS)
    assert trainer.history.settings["engine"] in ("recorded", "vmap")
    assert type(averaged) is type(model)
    nodes = [copy.deepcopy(model).train() for _ in range(3)]
    losses = []
    for step in range(4):
        for i, node in enumerate(nodes):
            rows = [data[3 * (4 * step + j) + i] for j in range(4)]
            loss = node(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for p in node.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        if step % 2:
            mean = average(nodes)
            for node in nodes:
                node.load_state_dict(mean)
    np.testing.assert_allclose(trainer.history.node_array().flatten(), losses, rtol=1e-6)
    for name_of, value in average(nodes).items():
        torch.testing.assert_close(averaged.state_dict()[name_of], value, rtol=1e-6, atol=1e-8)


def average(nodes: list[nn.Module]) -> dict[str, Tensor]:
    states = [node.state_dict() for node in nodes]
    return {key: torch.stack([state[key] for state in states]).mean(0) for key in states[0]}


@MODELS
def test_autocast_accumulation_checkpoints_and_the_saved_average(name: str, data: Windows, tmp_path: Path) -> None:
    def fit(max_steps: int, cosine: Any, folder: str, resume: bool = True) -> tuple[Trainer, Any]:
        strategy = DiLoCoStrategy("adamw", H=2, lr=1e-2, warmup_steps=0, lr_scheduler=cosine)
        trainer = Trainer(make(name), data, data, loss_fn=loss_fn)
        return trainer, trainer.fit(
            strategy, 2, max_steps=max_steps, autocast=True, gradient_accumulation=2, save_dir=tmp_path / folder,
            resume=resume, **SETTINGS,
        )  # fmt: skip

    cosine = lambda_cosine(max_steps=6, warmup_steps=1, cosine_anneal=True)
    fit(4, cosine, "a")
    resumed, averaged = fit(6, cosine, "a")
    whole, _ = fit(6, cosine, "b", resume=False)
    assert resumed.history["train_loss"] == whole.history["train_loss"]
    assert resumed.history.last("val_loss") < resumed.history.series("val_loss")[1][0]
    fit(4, "cosine", "c")
    with pytest.raises(ValueError, match=r'learning rate of step(?s:.*)"cosine" is laid out over max_steps'):
        fit(6, "cosine", "c")

    averaged.save_pretrained(tmp_path / "saved")
    saved = type(averaged).from_pretrained(tmp_path / "saved").eval()
    prompt = data[0]["input_ids"][None, :4]
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    generated = saved.generate(prompt, **asked)
    assert generated.shape == (1, 10)
    assert torch.equal(generated, averaged.eval().generate(prompt, **asked))
    torch.manual_seed(1)
    assert saved.generate(prompt, **{**asked, "do_sample": True}).shape == (1, 10)
    [*_, last] = sorted((tmp_path / "a").glob("*.pt"))
    make(name).load_state_dict(load(last).average)


@MODELS
def test_sweeps_processes_and_verification(name: str, data: Windows) -> None:
    task: dict[str, Any] = {"max_steps": 2, **SETTINGS}
    result = sweep(make(name), data, data, grid={"lr": [0.01, 0.1]}, num_nodes=2, loss_fn=loss_fn,
                   strategy=lambda lr: DiLoCoStrategy("sgd", H=2, lr=lr), **task)  # fmt: skip
    strategy = DiLoCoStrategy("sgd", H=2, lr=0.1)
    backends: list[dict[str, Any]] = [{}, {"backend": "processes", "num_processes": 2}]
    for backend in backends:
        trainer = Trainer(make(name), data, data, loss_fn=loss_fn)
        trainer.fit(strategy, 2, **task, **backend)
        assert trainer.history.last("val_loss") == pytest.approx(result.rows[1]["val_loss"], rel=1e-5)
    assert verify(strategy, make(name), data, num_nodes=2, steps=2, loss_fn=loss_fn).passed


def test_the_whole_output_is_no_loss(data: Windows) -> None:
    """It has the logits, too; what it lacks is said, and what to do where there is no loss_fn."""
    strategy = DiLoCoStrategy("sgd", H=2, lr=0.1)
    trainer = Trainer(make("GPT-2"), data, loss_fn=lambda module, batch: module(**batch))
    with pytest.raises(ValueError, match=r"loss_fn\(module, batch\) returned float32 .* as 'logits'"):
        trainer.fit(strategy, 2, max_steps=2, **SETTINGS)
    with pytest.raises((ValueError, RuntimeError), match=r"return module\(\*\*batch\).loss"):
        Trainer(make("GPT-2"), data).fit(strategy, 2, max_steps=2, **SETTINGS)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_experts_that_vmap_runs_node_by_node_are_told_with_the_fix(experts: str) -> None:
    transformers = pytest.importorskip("transformers", reason=MISSING)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, max_position_embeddings=CONTEXT, attn_implementation="eager",
    )  # fmt: skip
    config._experts_implementation = experts
    trainer = Trainer(
        transformers.MixtralForCausalLM(config), torch.zeros(8, CONTEXT, dtype=torch.long),
        loss_fn=lambda module, ids: module(input_ids=ids, labels=ids).loss,
    )  # fmt: skip
    told = pytest.warns(match='no fast form of the grouped product.*experts_implementation="batched_mm"')
    with told if experts == "grouped_mm" else contextlib.nullcontext():
        trainer.fit(FedAvgStrategy("sgd", H=2, lr=0.1), 2, max_steps=2, **SETTINGS)
    assert trainer.history.settings["engine"] == ("loop" if experts == "grouped_mm" else "vmap")
