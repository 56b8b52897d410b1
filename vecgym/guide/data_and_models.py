"""Data and models: what a node trains, and on which examples

## Models

A model is any `torch.nn.Module` that is called as `model(batch)` and returns the mean loss of the batch. The batch has
the form in which the dataset yields its examples.

>>> import torch
>>> class Regression(torch.nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.linear = torch.nn.Linear(20, 1)
...
...     def forward(self, batch):
...         x, y = batch
...         return (self.linear(x).squeeze(-1) - y).square().mean()

Any other module is given with its loss: a function of the module and a batch, which takes the place of `forward`.

>>> def loss_fn(module, batch):
...     x, y = batch
...     return (module(x).squeeze(-1) - y).square().mean()
>>> from vecgym import Trainer
>>> from vecgym.strategy import FedAvgStrategy
>>> x = torch.randn(64, 20)
>>> trainer = Trainer(torch.nn.Linear(20, 1), torch.utils.data.TensorDataset(x, x[:, 0]), loss_fn=loss_fn)
>>> trainer.fit(FedAvgStrategy("sgd", H=5, lr=0.1), num_nodes=4, max_steps=10)
Linear(in_features=20, out_features=1, bias=True)

- It may return a dict, `{"loss": ..., "accuracy": ...}` of scalars, whose other entries validation records
  (`vecgym.guide.results`), which then replace the module's `val_metrics`.
- Where the loss is a mean over something else than examples, such as tokens of which some have the label -100, it says
  over how many: `{"loss": loss, "weight": (labels != -100).sum()}`. The parts of a batch (`gradient_accumulation`,
  `minibatch_size`, `max_memory_usage`) are then weighted by it, so that they give the gradient of the whole batch; so are
  the batches of a validation, for every metric of the dict. A loss of weight 0 counts for nothing, even if its loss is nan.
  Of each node it is the mean over its own tokens. Nodes count alike, as in torch's DDP; `FedAvgStrategy(weighting=...)`
  weights them by their examples, or by numbers of one's own, such as the tokens of each:
  `[(labels[rows] != -100).sum().item() for rows in partition.indices]`.
- It must use the module that it is given, which has the parameters of a node. Parameters have the module's own names,
  and `fit` returns a module of its class.
- `sweep`, `rollout`, `influence`, `vecgym.meta.learn`, `verify` and `estimate_memory` take `loss_fn=` as well, and
  configurations of `vecgym run`, `sweep` and `verify` may have it. A run resumes with a function of the same name, and
  the same loss.
- Models from Hugging Face: `vecgym.guide.hugging_face`.

`vecgym.models.Classifier` wraps a network that returns logits, and `vecgym.models.GPT` is a small nanoGPT.

- Batch norm keeps separate statistics for each node. They are not exchanged during a run, and averaged at its end.
- Dropout differs between nodes and is reproducible: random numbers of torch's, numpy's and Python's global generators
  depend on the run's seed, the step and the node, and these generators are restored. Models that draw from numpy or
  Python (mixup, LayerDrop) take the loop.
- Tied weights stay tied, frozen parameters stay frozen, and parts in eval mode (a frozen batch norm, a teacher) stay in
  it. A model that is itself in eval mode is trained in training mode.
- Weights are tied by one parameter object in several places, `self.dec.weight = self.enc.weight`, or by computing in
  forward, `F.linear(x, self.enc.weight.t())`. Two parameters that share memory (one is made of a view of the other, or
  of its `.data`) are refused, for each node has its own of both. Parts of one tensor that do not overlap are fine.
- What a forward or a loss keeps from step to step (a counter, a hidden state, a running mean) is a buffer, of which each
  node has its own: `self.register_buffer("calls", torch.tensor(0))`, then `self.calls += 1`. In an attribute, a global or
  a generator of its own it is refused, if a later result depends on it; caches and features need not be buffers.
- `fit` returns a new module and leaves yours untouched.
- Where `vmap` runs the model, a parameter to which torch gives no gradient in the first step is assumed never to have one,
  and is not updated. Models that take the loop may use it later.

## Datasets

One dataset is dealt to the nodes exactly as `torch.utils.data.DistributedSampler` does with `set_epoch`. To choose the
examples of each node yourself, pass a factory `(rank, num_nodes, train_dataset) -> Dataset`.

>>> from vecgym.data import partition_dirichlet
>>> from vecgym.models import Classifier
>>> _ = torch.manual_seed(0)
>>> x = torch.randn(1024, 20)
>>> labels = x[:, :4].argmax(1)
>>> dataset = torch.utils.data.TensorDataset(x, labels)
>>> partition = partition_dirichlet(labels, 8, alpha=0.3, min_size=10)  # unlike mixtures of classes, of unlike size
>>> partition.sizes
(114, 112, 73, 171, 113, 32, 321, 88)
>>> partition.counts[0]  # of each class on node 0
tensor([86,  5,  8, 15])
>>> shards = partition.datasets(dataset, held_out=0.2)  # a fifth of each node's examples is to evaluate it on
>>> trainer = Trainer(Classifier(torch.nn.Linear(20, 4)), shards, shards)
>>> averaged = trainer.fit(FedAvgStrategy("sgd", H=5, lr=0.1), num_nodes=8, max_steps=10)

The other partitions are `partition_iid`, `partition_shards` (a few classes on each node), `partition_quantity_skew`, and
`partition_dirichlet(balanced=True)`, where all nodes have equally many examples. `vecgym.plot.plot_partition` draws the
counts of any of them. `flip_labels` gives some nodes false labels: their gradients are honest ones of false data.

**Metrics of each node on its own data.** Where the validation set is a factory, too, such as `shards` above, each node has
one of its own and reads the whole of it, in batches of its own size. `val_loss` and `val_accuracy` are then those of the
run's model over the examples of all, and there are, of every metric:

| column | what it is |
|---|---|
| `val_accuracy_each` | the run's model on each node's own examples, `[K]` |
| `val_accuracy_p10`, `_p50`, `_p90` | percentiles of these over the nodes |
| `val_accuracy_lowest_tenth`, `_highest_tenth` | the mean of a tenth of the nodes, at least one: the worst decile is the lowest of an accuracy, and the highest of a loss |

>>> trainer.history.last("val_accuracy_each").round(2)
array([0.52, 0.77, 0.67, 0.44, 0.78, 0.33, 0.47, 0.78])
>>> [round(trainer.history.last(f"val_accuracy_{name}"), 2) for name in ("lowest_tenth", "p50", "highest_tenth")]
[0.33, 0.59, 0.78]
>>> figure = trainer.plot(panels=["val_accuracy_each", "val_accuracy_lowest_tenth"])  # the nodes' median and middle 80 %

- `TensorDataset`, a `Subset` of it, and datasets with `__getitems__` are read without Python code per example. Others
  go through a `DataLoader` with your `dataloader_kwargs`.
- A batch depends on (seed, step, node) alone, so a run can resume at any step.
- The last batch of an epoch may be smaller, on all nodes alike; `drop_last` drops it.
- A node with a shorter dataset repeats its examples until the longest dataset is through. A node with fewer than
  `batch_size` examples uses all of them as its batch.
- All nodes make the same number of steps, unless some are absent or sampled, have `local_steps=`, or do not wait for the
  others. `fit(availability=LocalSteps(...))` gives unequal steps, or local epochs, in a round of a strategy that exchanges
  parameters. A local epoch has each of the node's examples once.

## Engines

The engine computes the gradients of all nodes.

| `engine=` | how |
|---|---|
| `"auto"` | the default: chooses by a fixed rule, spreads the nodes over CPU threads where that is faster, and takes the operations of small models from a list |
| `"vmap"` | all nodes in one call, or `chunk_size` at a time |
| `"loop"` | one node after the other, for any model |

The rule never measures, so a script gives the same bits at every run on one machine. `history.settings` records the
choice, and the reason (`"engine"` and `"engine_reason"`). Where a node's step on a CPU has much arithmetic in convolutions of images, it takes the loop, and lets the
channels be last in memory, which is a third faster than the order in which they come (`"channels_last"` in the
settings). A model whose results depend on that order, by `as_strided` for instance, keeps the order of its batches.

No engine takes torch's fast form of `nn.TransformerEncoder` for evaluation, whose outputs at masked positions are others:
a model is evaluated in the form in which it is trained. Autocast gives layers and losses the same types on all engines.

With a small model, most of a step is not arithmetic: it is Python, vmap and autograd. So `"auto"` writes down which
operations `vmap` calls, once for each shape of a batch, and then calls these (`"recorded"` in the settings). Every bit
is that of `"vmap"`: gradients, losses, buffers, and the masks of dropout. It does so for at most 100,000 parameters a
node in runs of 50 steps and more, and up to 200,000 in runs of 200 and more, where it saves 4 to 8 %, and only if a forward does the same in every step. To
be sure of that, it reads the code of the forward. A shape that is rare, such as an epoch's last batch, is written down
at its 50th step. `vmap` computes, and the reason is in the settings, for a forward that

- sets attributes, imports, or prints;
- looks at the clock or at the seed;
- reads a tensor's value in Python (`.item()`, `.tolist()`, `.numpy()`);
- reads a list, a dict, a tensor or an object outside the model: pass it in the batch, or make it the model's own.

Functions, modules, and numbers outside the model are fine. They are compared before every step. If one has changed,
such as a global number that a callback sets, `vmap` computes from then on, with the new value.

Where `vmap` cannot run a model, a message names the line of the model, and the loop takes over. The CPU cores then work
on different nodes, if each has 1 GFLOP to do in a step, and unless the model draws random numbers, has hooks, or can write
outside of itself. This happens with LSTMs, random numbers of numpy and Python, Python branches on tensor values, hooks on
gradients, embeddings with `max_norm` or `scale_grad_by_freq`, `torch.autograd.grad` in a forward (`torch.func.grad` can
be in one), and, with an older torch such as 2.6, activation checkpointing. Hooks on `p.grad` are refused.

**Models that choose by data**, such as experts in a loop over those that are hit, dropped layers, or a head for each task,
take the loop, and are trained as by torch. A parameter without a gradient in a step is skipped by that node's optimizer, with
its momentum and decay, and its count of steps does not advance. Where gradients are exchanged, a node without one counts as 0,
and a parameter that nobody has is skipped, as in DDP with `find_unused_parameters=True`. Every parameter with
`requires_grad` is sent. A warning at the end of a run, and `history.settings["without_gradient"]`, name those that never
had a gradient.

`compile=True` compiles the gradients of all nodes with `torch.compile`. That takes 10 to 60 seconds and a C++ compiler;
`history.settings["engine_reason"]` says how long it took, and after how many steps that is earned. The compiled
gradients of the first batch are compared with those of `vmap`. A model that cannot be traced whole, or whose compiled
gradients differ by more than rounding, runs uncompiled, with a warning that says why. If a model, a part, a method or a
`loss_fn` is already compiled by `torch.compile`, the original is trained and returned. `vecgym run` takes it as
`--set compile=True`. On a CPU a model of less than 30 MFLOP in a step of all nodes keeps the recorded list of its
operations, at most 64, which is as fast (`help(vecgym.guide.performance)`); `engine="vmap"` compiles it all the same. The optimizer's
step is not compiled: for the models in `benchmarks/` that gained nothing. On CUDA the compiled gradients are recorded as a
CUDA graph, which one call launches, unless the model changes its buffers; none of this has run on a GPU yet, and
`tests/test_cuda.py` waits for one.

Random numbers of a model are keyed by seed, step and node, but engines and chunk sizes draw them in different orders.
They are reproducible for one engine and chunk size, and differ between them. Models with dropout are not spread over
CPU threads, since all threads share torch's one generator; nor are those whose forward, hooks or loss can write outside of
the model, such as to a dict of features.

## When a run stops

A loss that becomes NaN stops the run and names node and step (`on_divergence`). Ctrl-C ends the run after the current
step. In both cases `trainer.history` and `trainer.nodes` hold the run so far.
"""
