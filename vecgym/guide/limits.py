"""Limits: what vecgym does not do, or does not do well

## Time and scale

- Seconds on a network are computed from what was sent (`vecgym.guide.clock`). In the model nothing is lost or sent
  again, links have no other traffic, and headers take nothing.
- A node is never split over devices, and all nodes of a process are in its memory at once.
- Python takes 0.5 to 1 ms of a step. AllReduce takes 1.4 times as long as one big batch on the tiny MLP, 1.1 times
  on the MLP. Stacking cannot reduce the arithmetic of convolutions, or of a large model: see
  `vecgym.guide.performance`.
- A mean of bfloat16 or float16 is summed in float32 and rounded once. Rings round at every hop, and their errors grow with
  the number of nodes: give `average=Ring("bfloat16")` where that matters. See `vecgym.guide.strategies`.
- Processes are tested with gloo on CPUs, and have never been run on GPUs.
- Asynchronous strategies are for runs in one process.

## Models

- `vmap` has no fast form of some operations (LSTMs, Python branches on tensor values; activation checkpointing with an
  older torch, such as 2.6). Such models run node by node; with much arithmetic in a step, the CPU cores work on different
  nodes.
- Models with hooks on gradients run node by node. They cannot be rolled out, and hooks on `p.grad` are refused.
- Embeddings with `max_norm` or `scale_grad_by_freq` run node by node, because vmap would compute them wrongly.
- Random numbers of a model, such as dropout, are keyed by seed, step and node, but engines and chunk sizes draw them in
  different orders. They are reproducible for one engine and chunk size, and differ between them. Such models are not
  spread over CPU threads, since all threads share torch's one generator.
- Where `vmap` runs a model, a parameter to which torch gives no gradient in the first step is assumed never to have one, and
  is not updated. Models that take the loop may use it later.
- Batch-norm statistics are not exchanged during a run. They are averaged at its end.

## Sweeps and rollouts

- Dropout masks of a sweep differ from those of the single run, except with `engine="loop"`. Everything else is the same
  up to rounding.
- A strategy written for one rank is not saved in the middle of a stack: `resume` starts that stack again.
- torch 2.6 has no second derivative of `grid_sample`, and says so in the backward pass of a rollout.

## Versions

All tests run with one version of torch and one version of Python; some of them also run with the oldest and the newest
supported torch: see `vecgym.guide.contributing`.
"""
