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
`print(estimate)` shows them. A model that is larger than this machine, on the device "meta" say, is estimated from its
shapes alone, without batch and activations, and the table says so:

>>> with torch.device("meta"):
...     large = torch.nn.Linear(50_000, 50_000)
>>> estimate = vecgym.estimate_memory(large, strategy, num_nodes=8)
>>> round(estimate.parts["parameters"].total_bytes / 1e9)  # GB
80

>>> trainer = Trainer(model, dataset)
>>> averaged = trainer.fit(strategy, num_nodes=64, batch_size=32, max_steps=20, max_memory_usage=0.8)
>>> trainer.nodes.num_nodes
64

`max_memory_usage` splits a step until it fits into that fraction of the device's memory: first fewer nodes in one call
(`chunk_size`), then parts of the batch (`minibatch_size`). The batch of a model with batch norm is never split, since
that would change its statistics. Parts are weighted by their examples; a loss that is a mean over tokens says how many
there are, as `"weight"` (`vecgym.guide.data_and_models`). The choice is the same at every run on a machine with that memory. If nothing fits, a
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

It counts tensors while each that is made or freed is watched. One node, or two and three, take a forward and backward
pass, which is extrapolated linearly to the nodes computed at a time. The strategy's steps, an exchange included, are
taken by all K nodes, with tensors that have shapes and no values: so nothing is extrapolated there.

Measured is the peak of resident memory over that of a process in which two nodes had taken these steps and the data
were there, plus the batch. *In use*: glibc gives freed memory back at once, so this is what tensors and operations
take. *Resident*: glibc as it is, which keeps freed pieces of up to 32 MB, with gaps between them. One thread, AMD EPYC,
2 cores, torch 2.13, a process for each figure; the last row is a whole fit (`python benchmarks/memory.py` has more):

| run | K | chunk | estimated MB | in use | ratio | resident | ratio |
|---|--:|--:|--:|--:|--:|--:|--:|
| tiny, allreduce | 5000 | - | 18.3 | 19.3 | 0.95 | 31.2 | 0.59 |
| tiny, diloco | 5000 | - | 72.2 | 73.4 | 0.98 | 94.9 | 0.76 |
| tiny, demo | 5000 | - | 35.0 | 36.3 | 0.97 | 64.9 | 0.54 |
| mlp, allreduce | 64 | 8 | 8.6 | 9.2 | 0.93 | 11.1 | 0.77 |
| mlp, diloco | 64 | 8 | 190.1 | 190.1 | 1.00 | 218.9 | 0.87 |
| mlp, demo | 64 | 8 | 67.6 | 67.7 | 1.00 | 89.0 | 0.76 |
| cnn, allreduce | 16 | - | 86.8 | 88.9 | 0.98 | 181.1 | 0.48 |
| cnn, diloco | 16 | - | 50.4 | 50.5 | 1.00 | 67.4 | 0.75 |
| cnn, demo | 16 | - | 24.0 | 24.1 | 1.00 | 36.9 | 0.65 |
| gpt, allreduce | 64 | 4 | 21.8 | 22.7 | 0.96 | 35.5 | 0.62 |
| gpt, diloco | 64 | 4 | 147.9 | 148.3 | 1.00 | 175.2 | 0.84 |
| gpt, demo | 64 | 4 | 77.9 | 80.8 | 0.96 | 100.7 | 0.77 |
| gpt256, allreduce | 4 | - | 88.6 | 121.8 | 0.73 | 139.1 | 0.64 |
| gpt256, diloco | 4 | - | 328.2 | 328.8 | 1.00 | 337.3 | 0.97 |
| gpt256, demo | 4 | - | 153.5 | 166.8 | 0.92 | 187.9 | 0.82 |
| mlp, diloco, fit | 64 | - | 164.1 | 163.9 | 1.00 | 203.4 | 0.81 |

So the estimate is 0.92 to 1.00 of what is in use, but for one row, and 0.48 to 0.97 of the resident memory. The memory that glibc
keeps was 260 MB at most in all that was measured: 2000 nodes of the MLP were estimated as 5.88 GB, and 5.89 GB were
resident.

One thing is not in the estimate: before a run, unless `engine="loop"`, two nodes are tried in one call on a whole batch.
Where the run itself then takes node by node, that trial can be the peak, as in the row of gpt256 with AllReduce. A GPT of
8 layers, width 256 and context 256, 2 nodes, was estimated as 0.66 GB, and 1.32 GB were in use. `engine="loop"` leaves
the trial out.

## How many nodes fit on how many GPUs

P parameters of 4 bytes, everything in float32, AdamW (two moments). Each node needs 4 P for its parameters, 4 P for its
gradient, and 8 P for the moments. Where nodes are computed in chunks, gradients stay in memory during an exchange, which
writes new parameters beside them:

| | bytes per node | once per process |
|---|--:|--:|
| AllReduce | 0 | 16 P, gradients in flight 4 P |
| FedAvg, SPARTA | 16 P | the mean: 4 P |
| DiLoCo, Streaming DiLoCo | 16 P; in chunks 20 P | outer parameters, momentum, movement: 12 P |
| eager DiLoCo | 28 P; in an exchange 8 to 13 P more | the mean: 4 P |
| gossip | 16 P, and the mixed values of one parameter at a time | |
| DeMo | gradient and residual: 8 P | parameters, mean: 8 P |
| SGD in place of AdamW; with momentum | 8 P less; 4 P less | |

Add the activations A of the nodes computed at a time (`chunk_size`; with 1, those of one node). A GPU of 80 GB, 8 of
which stay free, then holds L = (72 GB - 12 P - A) / 20 P nodes of DiLoCo, and K = W L. By this arithmetic, with A = 2,
5, 12 and 12 GB (nothing here was measured):

| DiLoCo, AdamW | 1 GPU | 8 GPUs | 64 GPUs |
|---|--:|--:|--:|
| P = 10 million: 0.2 GB per node | K = 349 | 2792 | 22336 |
| P = 124 million: 2.5 GB per node | K = 26 | 208 | 1664 |
| P = 1.3 billion: 26 GB per node | K = 1 | 8 | 64 |
| P = 1.8 billion: 36 GB per node, the largest | K = 1 | 8 | 64 |

A node is never split over GPUs. Exchanges are joined into messages of 25 MiB. In a round of DiLoCo each process sends
2 (W - 1) / W · 4 P bytes, whatever L is, while the ledger counts what K separate nodes would send.
`vecgym.guide.processes` says how to start such a run.
"""
