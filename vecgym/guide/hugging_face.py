'''Hugging Face: models of transformers, from tokens in a file to a saved average

`pip install vecgym[hf]`. A model of transformers returns more than its loss and takes its arguments by name, so it is
given with a `loss_fn`; the rest is as for any module. Here a small GPT-2 learns the characters of Python's standard
library on 4 nodes:

```python
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from vecgym import Trainer
from vecgym.data import decode_text, encode_text
from vecgym.data.text import standard_library_text
from vecgym.optim.schedule import lambda_cosine
from vecgym.strategy import DiLoCoStrategy

tokens, vocabulary = encode_text(standard_library_text(200_000))
tokens.numpy().astype(np.uint16).tofile("tokens.bin")


class Windows(torch.utils.data.Dataset):
    """Windows of a file of tokens, as dicts. The labels are the tokens: transformers shifts them."""

    def __init__(self, path, first, last, context=32):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")[first:last]
        self.context = context

    def __len__(self):
        return len(self.tokens) // self.context

    def __getitem__(self, index):
        window = self.tokens[index * self.context : (index + 1) * self.context]
        ids = torch.from_numpy(window.astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def loss_fn(module, batch):
    return {"loss": module(**batch).loss, "weight": (batch["labels"][:, 1:] != -100).sum()}


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=len(vocabulary), n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
)
model = GPT2LMHeadModel(config)
model.loss_metrics = {"perplexity": torch.exp}  # of the mean validation loss
trainer = Trainer(model, Windows("tokens.bin", 0, 180_000), Windows("tokens.bin", 180_000, 200_000), loss_fn=loss_fn)


def fit(max_steps):
    cosine = lambda_cosine(max_steps=60, warmup_steps=10, cosine_anneal=True)
    return trainer.fit(
        DiLoCoStrategy("adamw", H=10, lr=3e-3, max_norm=1.0, lr_scheduler=cosine), num_nodes=4, max_steps=max_steps,
        batch_size=8, gradient_accumulation=2, autocast=True, val_size=128, val_interval=20,
        save_dir="checkpoints", checkpoint_interval=20, resume=True, progress=False,
    )


fit(40)
averaged = fit(60)  # goes on from step 40
steps, perplexities = trainer.history.series("val_perplexity")
print(type(averaged).__name__, dict(zip(steps, [round(x, 1) for x in perplexities])))

averaged.save_pretrained("averaged")
saved = GPT2LMHeadModel.from_pretrained("averaged")
prompt = encode_text("import ", vocabulary)[0][None]
generated = saved.generate(prompt, max_new_tokens=24, do_sample=True, top_k=5)
print(repr(decode_text(generated[0], vocabulary)))
```

It prints, after 60 steps (the digits depend on the processor),

```text
GPT2LMHeadModel {0: 85.4, 20: 40.2, 40: 29.3, 60: 27.0}
'import s etes   sa ee aatea eee'
```

- **A cosine schedule fixes the length of a run.** `lr_scheduler="cosine"` is laid out over `max_steps`, so
  with more steps the rates of the steps already taken would have differed, and the checkpoint is refused. Give the
  cosine its length, as here; beyond it the rate stays at its last value. Or give all steps at once, `max_steps=60`, and
  end earlier with `stop=lambda row: row["step"] == 40`.
- **The result is the module's own class**, with its configuration: `save_pretrained`, `generate` and all else work, and
  tied weights are tied. `trainer.nodes.module(3).save_pretrained(...)` saves one node. `vecgym.load(path).average` has
  the keys of `model.state_dict()`.
- **Batches are dicts** if the dataset yields dicts. All tensors of a batch have the same shape on each node, so pad to
  one length, or cut windows as here. A `loss_fn` returns `module(**batch).loss`, not `module(**batch)`: the logits are
  neither a loss nor a metric.
- **The weight is the number of tokens of which the loss is the mean**: the labels that are not -100, without the first
  of each example, which a causal model does not predict. With it `gradient_accumulation=2` equals the whole batch, and
  `val_loss` the mean over the tokens, however many of them an example has. The nodes count alike, as in torch's DDP.
- **Padding.** With an `attention_mask` in the batch, transformers tests whether it is all ones; `vmap` cannot do that: a
  message says so, and the nodes are computed one after the other. `attn_implementation="eager"`, in the configuration
  or in `from_pretrained`, skips that. A causal model that is padded on the right needs no mask: labels of -100 there
  are enough.
- **Mixtures of experts** compute all experts of a layer by a grouped product, of which `vmap` has no fast form: a message
  says so, and the nodes are computed one after the other. With `experts_implementation="batched_mm"` in
  `from_pretrained`, or `config._experts_implementation`, they run in one call.
- Otherwise GPT-2 and Llama run in one `vmap` for all nodes (`trainer.history.settings["engine"]`). `compile=True`
  compiles Llama; for GPT-2 it reports that a logger of transformers prevents it.
- A pretrained model is `GPT2LMHeadModel.from_pretrained("gpt2")` in place of the one that is made here.
  `vecgym.estimate_memory(model, strategy, 4, 8, dataset, loss_fn=loss_fn)` says what 4 nodes of it take.
- Models with dropout (GPT-2 has 0.1) are in training mode while they train, also from `from_pretrained`, which returns
  them in eval mode. If only a part of the model is in eval mode, that part stays so. The result keeps the modes of your
  model: call `averaged.eval()` before you sample from it.
'''
