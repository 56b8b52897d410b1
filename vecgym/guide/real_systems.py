"""From the simulator to the real thing: where a port goes wrong

A strategy that was found here is trained there, with `torch.distributed` and the libraries on top of it. This page lists
behaviour that breaks a port silently, or nearly so. Every row was run on a CPU with gloo: torch 2.13,
others in the version that the row names. `tests/test_real_systems.py` runs the rows of torch without vecgym; where the
column "here" is empty, vecgym has nothing of the kind.

## Collectives of torch.distributed

| real library | behaviour | here |
|---|---|---|
| gloo, `all_reduce(op=AVG)` of integers | a RuntimeError; of float16, a sum that overflows is inf, although the mean would fit | `Mean` of 60000 and 60000 in float16 is 60000 (`Ring("float16")` gives inf); values that are exchanged are never integers, and the mean model has the first node's counts |
| gloo, a sum of bfloat16 | each hop of the ring rounds the partial sum: 256 + 1 + 1 + 1 is 256 in some segments and 260 in others, the same on all ranks | `Ring("bfloat16")` has these bits; `Mean` rounds once: 260 everywhere |
| gloo, a sum of float32 | the same bits on all ranks, but neither those of `x0 + x1 + x2 + x3` nor of `stack.sum(0)` | `Ring("float32")` has these bits; a `Mean` equals them up to rounding, and `verify` says how far |
| gloo, a sum of booleans | a byte of K, which is no valid boolean: `torch.equal` says True, `view(uint8)` says K | |
| gloo, `MAX` with tensors of nan on one of 4 ranks | a quarter of a large result is nan, whichever rank has them: the segments of the ring that begin there. Of one element, the result is nan if rank 0 has it, and otherwise it is lost | a nan reaches every mean, and a loss of nan ends a run (`on_divergence`) |
| gloo, `reduce(dst=0)` | leaves partial sums in the tensors of all other ranks | |
| gloo, a tensor with strides | is summed as if it were contiguous: one rank's column-major matrix is mixed with the rows of the others, and a column `x[:, 0]` is not summed, but the values that follow it in memory | strides do not matter |
| `torch.distributed._functional_collectives.all_reduce` | carries gradients: the derivative of the sum over ranks of their losses; `dist.all_reduce(w)` in place under `no_grad` changes a tensor that the graph has saved, and the backward pass uses the new value | `rollout` differentiates exchanges |

## DDP, and averagers

| real library | behaviour | here |
|---|---|---|
| DDP, buckets | 40 layers of 1 MiB are one bucket in the first pass, and from the second on rebuilt ones of 1, 25 and 14 MiB: a hook that counts or measures must not trust its first call. With `find_unused_parameters=True` they are 14, 25 and 1 MiB in each pass | `Network(bucket_bytes=)` prices the rebuilt ones |
| DDP, `gradient_as_bucket_view=True` | `p.grad`, kept for later, is overwritten from the second pass on | gradients of `part.gradients()` are overwritten by its next call, too, as its docstring says |
| DDP, a hook in place of none | plain DDP, `allreduce_hook` and the mean of the stacked gradients differ in their last bits with 3 ranks | equal to 1e-12 in float64 (`tests/test_ddp.py`) |
| `PeriodicModelAverager` | averages parameters with a gradient only: a layer that is not used stays apart. After `zero_grad()` there are none, and it raises a ValueError | all parameters; `private=["1.*"]` keeps a layer apart |
| `PeriodicModelAverager` of period 4, and `HierarchicalModelAverager` | the first averages in calls 1, 5, 9; with `warmup_steps=3` in calls 4, 8, 12. The second, with the same warm-up, in calls 5, 9, 13 | exchanges after steps H, 2 H, 3 H; `Exchange(..., every=4, offsets=[1])` has them after 1, 5, 9 |
| PowerSGD | where a weight starts at 0, as one of LoRA's two does, the gradient of the other is 0, a basis of it does not exist, and it is nan from the first compressed step on. `orthogonalization_epsilon=1e-8` prevents it | `compress.PowerSGD` sends zeros as zeros and draws a direction that died out anew |
| accelerate 1.15, `LocalSGD` | averages parameters only: the statistics of batch norm, and momentum, stay apart | likewise; batch norm is averaged at the end of a run |

## Optimizers, and states

| real library | behaviour | here |
|---|---|---|
| `load_state_dict` of an optimizer | shares tensors with the state that was given: of two copies on one machine the first one's next step changes the second one's moments. Give it a `deepcopy` | states are copied |
| `get_optimizer_state_dict` of `torch.distributed.checkpoint`, before the first step | makes a step of gradients 0 to have a state: Adam's first movement is then 0.74 of a learning rate, ASGD's first step moves nothing, and Rprop begins with steps of 1e-6. A run with a checkpoint at step 0 differs from one without | a checkpoint at step 0 changes nothing |
| `AveragedModel` with `use_buffers=True` | averages counts of batches as integers: after four steps the count is 1 | the mean takes the first node's |
| Muon of torch, and of optax 0.2.8 | torch scales by sqrt(max(1, rows / columns)), optax by sqrt(max(1, columns / rows)), for kernels that are transposed. A weight kept in torch's shape of 128 x 64 makes steps of ratio sqrt(2), of 64 x 128 of 1 / sqrt(2); a transposed one the same | `OptimSpec("muon")` is torch's; a rate of its own for a layer, `param_groups`, makes up for the factor |
| AMSGrad of torch, and of optax 0.2.8 | torch takes the largest moment and corrects its bias afterwards, optax the largest corrected one: after a large first gradient torch is 2.3 times as far | torch's |
| `vector_to_parameters` | the parameters are views of the vector: models that were set from one mean share its memory, and a step of one moves all | |
| `DataLoader` | takes a number from the global generator even with `shuffle=False`: models made before and after it differ. With a `generator=` of its own it does not | order and dropout are keyed by seed, step and node: no global generator moves |
| activation checkpoints under `functional_call` | recompute the block with the module's own weights, so gradients at other weights are wrong without a word; within `torch.func.grad` it is a RuntimeError | such models are computed node by node where `vmap` cannot run them, with the node's weights |
| a row of a stack, `x[3]` | has all of its memory: `copy.deepcopy` and `torch.save` copy 100 rows for one. `x[3].clone()` does not | |
| `torch.randn(4, n)` | has the numbers of four calls of `torch.randn(n)` for n of 16 and 32, but not of 8, 20, 24 or 40 | random numbers are those of the node, however many nodes are computed together |

## Other libraries

| real library | behaviour | here |
|---|---|---|
| flwr 1.42, `FedAvg` of `flwr.server.strategy` | weights that are integers become 0: it scales in place. With `inplace=False` it gives 15.0, in float64, for 10 and 20 | |
| flwr 1.42, `Krum`, `MultiKrum` and `Bulyan` of `flwr.serverapp` | take distances as x² + y² - 2xy in the arrays' precision: movements far below the weights are lost in rounding, so average in float64. `flwr.server` takes differences | distances in float64 |
| flwr-datasets 0.6.1, `IidPartitioner` | does not shuffle: data sorted by label give each node one label | `partition_iid` shuffles, by its `seed`; `Partition(torch.arange(n).chunk(K))` does not |
| byzfl 0.0.11, `Krum` | counts n - f - 1 neighbours, the paper n - f - 2 | both, `neighbours=` |
| byzfl 0.0.11, `GeometricMedian` | makes three iterations from 0: of 1000, 1000, 1000, 1000, 1100 it returns 1001.4 | the same by default; `iterations=100` converges |
| peft 0.21, the mean of two LoRA adapters | averages A and B apart: two adapters that add the same can have a mean that adds 0 | the same for A and B as parameters: merge the products |
| JAX 0.10, `psum` under `vmap` | rounds every addition in bfloat16: 256 + 1 + 1 + 1 is 256, while `jnp.sum`, and `psum` of real devices under `shard_map`, give 260 | `Mean` gives 260; `Ring("bfloat16")` rounds at each hop |
| opacus 1.6, a convolution with a `padding_mode` other than zeros | per-example gradients of its weight are those of padding by zeros: their mean is off by a fifth to more than half of the largest entry. With `grad_sample_mode="functorch"` they are right | gradients are autograd's |
| dp-accounting 0.6, batches of a fixed size | have 1.7 times the epsilon of Poisson sampling (100 of 10,000, noise 1, 1000 steps, delta 1e-5), where the noise is in units of the most that one example can change. That is twice the clipping norm if an example is replaced, not added: the same noise then has 10 times the epsilon | `Private` has both, by the exchange's `sampling=` |

Sources: torch 2.13, `torch/distributed/algorithms/model_averaging`, `ddp_comm_hooks/powerSGD_hook.py`,
`torch/csrc/distributed/c10d/reducer.cpp`, `distributed/checkpoint/state_dict.py`, `_functional_collectives.py`,
`optim/adam.py`, `_muon.py`, `swa_utils.py`, `nn/utils/convert_parameters.py`, `utils/checkpoint.py`,
`utils/data/dataloader.py`; gloo's `allreduce.cc`; the packages of the versions above, from the Python Package Index.
"""
