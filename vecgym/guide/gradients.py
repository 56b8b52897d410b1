"""Gradients: differentiate through whole training runs

A run is a differentiable function of every number that its strategy takes: learning rates (one, one per node `[K]`, or
one per step `[T, 1]`), momenta, betas, weight decay and mixing matrices. It is also differentiable in the initial
parameters, in the batches, and in *how much* the nodes exchange after each step. That is `sync_weight`, a tensor `[T]`
that takes the place of `H`: 0 means no exchange and 1 a full one; in between, state and parameters go part of the way.

## Rollouts

>>> import torch, vecgym
>>> from vecgym.data import Batches
>>> from vecgym.models import Classifier
>>> from vecgym.strategy import DiLoCoStrategy
>>> _ = torch.manual_seed(0)
>>> x = torch.randn(1024, 20)
>>> dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
>>> model = Classifier(torch.nn.Linear(20, 4))

>>> batches = list(Batches(dataset, num_nodes=4, batch_size=16).iterate(0, 20))  # 20 steps of [K, B, ...], as in fit
>>> outer_lr = torch.tensor(0.7, requires_grad=True)
>>> weights = torch.full((20,), 0.2, requires_grad=True)
>>> strategy = DiLoCoStrategy("sgd", lr=0.1, outer_lr=outer_lr, sync_weight=weights)
>>> outcome = vecgym.rollout(model, strategy, batches, num_nodes=4, eval_batch=dataset[:256])
>>> outcome.loss.shape, outcome.losses.shape, outcome.consensus_distance.shape
(torch.Size([]), torch.Size([20, 4]), torch.Size([20]))
>>> by_lr, by_weights = torch.autograd.grad(outcome.loss, [outer_lr, weights])
>>> by_weights.shape
torch.Size([20])

`outcome.loss` is the loss of the average of the nodes on `eval_batch`. The trajectory is that of `Trainer.fit`. In the
tests, gradients equal finite differences to 1e-6 for every strategy and every number. A number without influence has
gradient 0.

- `segments=32` stores the state between 32 parts of the run only, and computes each part again in the backward pass.
- `vecgym.rollout_jvp` is forward mode: the derivative with respect to one number, in constant memory.
- `torch.func.grad`, `hessian` and `jvp` work over `rollout`, and `torch.autograd` can be applied repeatedly.

## Many runs at once

Numbers that are learned on one run do not hold on others. `num_runs=M` trains M runs as one program, as a sweep does, and
`outcome.loss.mean()` is the mean over all of them:

>>> rates = torch.full((8,), 0.1, requires_grad=True)  # a rate for each run
>>> many = vecgym.rollout(
...     model, lambda run: DiLoCoStrategy("sgd", H=5, lr=rates[run]), batches, num_runs=8, num_nodes=4,
...     eval_batch=dataset[:256], seed=range(8))
>>> many.loss.shape, many.losses.shape, torch.autograd.grad(many.loss.mean(), rates)[0].shape
(torch.Size([8]), torch.Size([8, 20, 4]), torch.Size([8]))

`model`, `strategy`, `batches`, `eval_batch`, `params` and `seed` are each one for all runs, a list of M, or a function
of the run. A tensor within a strategy means the same as in one run, one value per node `[K]` or per step `[T, 1]`; a
number for each run is `lr[run]`, one for each step and run `lr[:, run, None]`. Runs whose strategies differ in numbers
only share all calls; those that differ in more share the gradients. On the tiny MLP 16 runs of 8 nodes and 100 steps
took 0.07 (AdamW) and 0.10 (SGD) of the time of 16 calls (`python benchmarks/rollout.py`).

## The worth of each message

`vecgym.influence` leaves out each exchange, each node or each message in turn, all runs as few programs, and says how
much higher the final loss is without it. Here node 3 has wrong labels:

>>> def shards(rank, num_nodes, train):
...     part = slice(rank, None, num_nodes)
...     return torch.utils.data.TensorDataset(x[part], (x[part, :4].argmax(1) + (rank == 3)) % 4)
>>> found = vecgym.influence(
...     model, DiLoCoStrategy("sgd", H=5, lr=0.1), shards, num_nodes=4, max_steps=20, batch_size=16,
...     eval_batch=dataset[:256], of="nodes", seeds=4)
>>> found.values.argmin().item(), bool((found.values[:3] > 0).all()), bool(found.values[3] < 0)
(3, True, True)

- `of="exchanges"` gives `[R]`, `of="messages"` `[R, K]`; over several `seeds` there are standard errors, and what one
  run says of a message need not hold on another.
- `method="derivative"` finds all values by one backward pass. It is exact for small changes only: the rank correlation
  with exact values on a sample is in `found.agreement`, and a low one is a warning. `method="integrated"` adds up to
  the gain of communicating at all.
- `found.thin(n)` is the strategy without the n exchanges that are worth least, for `fit`, `sweep` and `rollout`, and
  `found.plot()` a figure: of messages a heat map, node against step.

On a small MLP (4 nodes, 96 steps, 32 exchanges, 4 seeds), the derivative ranked exchanges as leaving them out does for
DiLoCo with AdamW (0.96), and did not for averages with SGD at 0.5 (0.30, with the warning); messages 0.94 and 0.89. The
22 exchanges that were worth least, left out in 12 unseen runs, lowered DiLoCo's loss of 0.66 by 0.20 +- 0.02, and raised
that of the averages, 0.48, by 0.036 +- 0.004.

Some choices are constants for derivatives: which coordinates a mask or a top-k selects, and the sign in DeMo.
`Compressed` passes derivatives straight through its code. Refused, with an error that says what to do instead:
optimizers that run node by node, strategies written for one rank, models with hooks on gradients, a spectral norm, a
forward that writes to its parameters or activation checkpointing inside, and `p_sparta` as a tensor.

## When to exchange

![Above, the derivative of the final loss by the weight of an exchange at each of 48 steps; below, six exchanges learned over many runs, and the steps between them](../../notebooks/figures/schedule.png)

Above: what an exchange at each step would do to the final loss of a run that exchanges every 8 steps
(`vecgym.plot.plot_sensitivity`). Below: the same number of exchanges, moved by descent on that gradient.
`vecgym.meta.learn` does this for any numbers of a strategy, over many runs or over one (`vecgym.guide.meta`).

## What it costs

In units of the plain steps, for DiLoCo on 8 nodes of the MLP, each in a process of its own (2 threads of a 2-core AMD
EPYC, `python benchmarks/rollout.py`):

| | SGD inside | AdamW inside |
|---|--:|--:|
| loss and gradient, 100 steps | 3.0 times | 6.3 to 9.5 times |
| memory per step | 11 MB | 27 MB |
| loss and gradient, 1000 steps in 32 segments | 4.2 times | 11 times |
| memory of that run | 0.53 GB | 1.3 GB |
| forward mode, for each number | 5 to 7 times | 12 to 15 times |

On the tiny MLP, 1000 steps take 3.1 and 4.9 times as long stored, 4.7 and 6.3 times in segments. On another day
the MLP with AdamW took 6.2 times stored and 8.0 times in segments.

AdamW needs more memory because it has more state. Its backward pass is written by hand; the other optimizers' formulas
leave a tensor behind for each of their operations. About half of the time is the run itself. The first call takes two
seconds more, in which torch imports its compiler.

Known gap: torch 2.6 has no second derivative of `grid_sample`, and the backward pass of a rollout says so.
The notebook `notebooks/3_differentiable_schedules.ipynb` is a longer example.
"""
