"""Memory: how many nodes fit

>>> import torch, vecgym
>>> from vecgym import Trainer
>>> from vecgym.models import Classifier
>>> from vecgym.strategy import DiLoCoStrategy
>>> _ = torch.manual_seed(0)
>>> x = torch.randn(4096, 20)
>>> dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
>>> model, strategy = Classifier(torch.nn.Linear(20, 4)), DiLoCoStrategy("adamw", H=20, lr=3e-3)

>>> estimate = vecgym.estimate_memory(model, strategy, num_nodes=64, batch_size=32, data=dataset)  # trains nothing
>>> estimate.total_bytes > 64 * 84 * 16  # at least 16 bytes for each of the 84 parameters of each node
True

The estimate counts parameters, gradients, optimizer, strategy state, batch and activations, per node and shared.
`print(estimate)` shows them.

>>> trainer = Trainer(model, dataset)
>>> averaged = trainer.fit(strategy, num_nodes=64, batch_size=32, max_steps=20, max_memory_usage=0.8)
>>> trainer.nodes.num_nodes
64

`max_memory_usage` splits a step until it fits into that fraction of the device's memory: first fewer nodes in one call
(`chunk_size`), then parts of the batch (`minibatch_size`). The batch of a model with batch norm is never split, since
that would change its statistics. The choice is the same at every run on a machine with that memory. If nothing fits, a
`MemoryError` says what would.

On CUDA the allocator's peak is measured. On CPU and MPS it is the estimate; `history.settings["memory"]` says which.
To the estimate a quarter is added, and on a CPU half a gigabyte: Python and torch take 300 MB, and glibc keeps freed
memory.

Of activations only those of one chunk are alive at a time. A model may keep fewer, and compute parts of itself again in
the backward pass, with torch's own means:

>>> class Recomputed(torch.nn.Module):
...     def __init__(self, block):
...         super().__init__()
...         self.block = block
...     def forward(self, x):
...         return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
>>> model = vecgym.models.GPT(vocab_size=65, context=32, num_layers=4)
>>> tokens = torch.randint(65, (1000, 33))
>>> text = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
>>> plain = vecgym.estimate_memory(model, strategy, num_nodes=8, batch_size=16, data=text)
>>> model.blocks = torch.nn.ModuleList(Recomputed(block) for block in model.blocks)
>>> recomputed = vecgym.estimate_memory(model, strategy, num_nodes=8, batch_size=16, data=text)
>>> recomputed.parts["activations"].total_bytes < plain.parts["activations"].total_bytes / 2
True

All nodes do so at once, and the gradients are the same bits as without. Eight nodes of a GPT with 8 layers, width 128 and
context 64, 8 texts each, need 142 MB for parameters, gradients and activations in place of 333, and take 1.3 times as
long. An older torch, such as 2.6, cannot do this under vmap: such a model then runs node after node.

## How good the estimate is

It counts tensors: one node, or two and three, take a forward and backward pass, and a cut-down model takes the
strategy's steps, while every tensor that is made or freed is counted. From these it extrapolates linearly.

Measured is the peak of resident memory over that of a process in which two nodes had taken these steps and the data
were there, plus the batch. *In use*: glibc gives freed memory back at once, so this is what tensors and operations
take. *Resident*: glibc as it is, which keeps freed pieces of up to 32 MB, with gaps between them. One thread, AMD EPYC,
2 cores, torch 2.13, a process for each figure; the last three rows are whole fits (`python benchmarks/memory.py`):

| run | K | chunk | estimated MB | in use | ratio | resident | ratio |
|---|--:|--:|--:|--:|--:|--:|--:|
| tiny, allreduce | 5000 | - | 18.3 | 19.0 | 0.96 | 25.1 | 0.73 |
| tiny, diloco | 5000 | - | 84.4 | 85.3 | 0.99 | 104.7 | 0.81 |
| tiny, demo | 5000 | - | 35.0 | 36.1 | 0.97 | 61.4 | 0.57 |
| mlp, allreduce | 64 | - | 10.8 | 11.9 | 0.91 | 14.4 | 0.75 |
| mlp, diloco | 64 | - | 190.1 | 190.0 | 1.00 | 220.4 | 0.86 |
| mlp, demo | 64 | - | 67.7 | 67.5 | 1.00 | 99.6 | 0.68 |
| mlp, allreduce | 64 | 8 | 8.6 | 9.3 | 0.93 | 11.0 | 0.78 |
| mlp, diloco | 64 | 8 | 190.1 | 190.2 | 1.00 | 192.7 | 0.99 |
| mlp, demo | 64 | 8 | 67.7 | 67.5 | 1.00 | 87.9 | 0.77 |
| cnn, allreduce | 16 | - | 86.8 | 88.8 | 0.98 | 160.6 | 0.54 |
| cnn, diloco | 16 | - | 50.4 | 50.5 | 1.00 | 61.6 | 0.82 |
| cnn, demo | 16 | - | 24.0 | 24.0 | 1.00 | 36.9 | 0.65 |
| cnn, allreduce | 64 | 2 | 19.0 | 23.0 | 0.83 | 46.6 | 0.41 |
| cnn, diloco | 64 | 2 | 195.4 | 195.5 | 1.00 | 206.1 | 0.95 |
| cnn, demo | 64 | 2 | 69.7 | 70.0 | 1.00 | 118.8 | 0.59 |
| gpt, allreduce | 16 | - | 79.7 | 79.8 | 1.00 | 118.1 | 0.67 |
| gpt, diloco | 16 | - | 110.3 | 111.1 | 0.99 | 149.3 | 0.74 |
| gpt, demo | 16 | - | 96.2 | 96.4 | 1.00 | 144.2 | 0.67 |
| gpt, allreduce | 64 | 4 | 21.8 | 22.9 | 0.95 | 36.1 | 0.61 |
| gpt, diloco | 64 | 4 | 147.9 | 148.2 | 1.00 | 179.7 | 0.82 |
| gpt, demo | 64 | 4 | 77.9 | 80.8 | 0.96 | 101.0 | 0.77 |
| gpt256, allreduce | 4 | - | 88.6 | 109.0 | 0.81 | 125.6 | 0.71 |
| gpt256, diloco | 4 | - | 328.2 | 328.5 | 1.00 | 377.2 | 0.87 |
| gpt256, demo | 4 | - | 153.5 | 166.5 | 0.92 | 187.2 | 0.82 |
| mlp, diloco, fit | 64 | - | 190.1 | 189.8 | 1.00 | 201.7 | 0.94 |
| cnn, diloco, fit | 16 | - | 50.4 | 50.1 | 1.01 | 64.7 | 0.78 |
| gpt, diloco, fit | 16 | - | 110.3 | 111.5 | 0.99 | 156.0 | 0.71 |

So the estimate is 0.81 to 1.01 of what is in use, and 0.41 to 0.99 of what is resident. What glibc keeps was 260 MB at
most in all that was measured: 2000 nodes of the MLP are estimated as 5.88 GB, and 5.89 GB were resident.

One thing is not in the estimate: before a run, unless `engine="loop"`, two nodes are tried in one call on a whole batch.
Where the run itself then takes node by node, that trial can be the peak: a GPT of 8 layers, width 256 and context 256,
2 nodes, was estimated as 0.66 GB, and 1.32 GB were in use. `engine="loop"` leaves the trial out.

## How many nodes fit on how many GPUs

P parameters of 4 bytes, everything in float32, AdamW (two moments). Each node needs 4 P for its parameters, 4 P for its
gradient, and 8 P for the moments:

| | bytes per node | once per process |
|---|--:|--:|
| AllReduce | 0 | 16 P, gradients in flight 4 P |
| FedAvg, SPARTA | 16 P | the mean: 4 P |
| DiLoCo, Streaming DiLoCo | 16 P | outer parameters, momentum, movement: 12 P |
| eager DiLoCo | 28 P | the mean: 4 P |
| gossip | 16 P + 4 P for the mixed parameters | |
| DeMo | gradient and residual: 8 P | parameters, mean: 8 P |
| SGD in place of AdamW; with momentum | 8 P less; 4 P less | |

Add the activations A of the nodes computed at a time (`chunk_size`; with 1, those of one node). A GPU of 80 GB, 8 of
which stay free, then holds L = (72 GB - 12 P - A) / 16 P nodes of DiLoCo, and K = W L. By this arithmetic, with A = 2,
5, 12 and 12 GB (nothing here was measured):

| DiLoCo, AdamW | 1 GPU | 8 GPUs | 64 GPUs |
|---|--:|--:|--:|
| P = 10 million: 0.16 GB per node | K = 436 | 3488 | 27904 |
| P = 124 million: 2.0 GB per node | K = 33 | 264 | 2112 |
| P = 1.3 billion: 21 GB per node | K = 2 | 16 | 128 |
| P = 2.1 billion: 34 GB per node, the largest | K = 1 | 8 | 64 |

A node is never split over GPUs. Exchanges are joined into messages of 25 MiB. In a round of DiLoCo each process sends
2 (W - 1) / W · 4 P bytes, whatever L is, while the ledger counts what K separate nodes would send.
`vecgym.guide.processes` says how to start such a run.
"""
