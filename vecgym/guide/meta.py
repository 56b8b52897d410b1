"""Learned schedules: numbers of a strategy that are learned over many runs

A gradient through one run says how *that* run would have ended better, and most of what it finds holds for no other
(`vecgym.guide.gradients`). `vecgym.meta.learn` follows the gradient of the mean over a distribution of runs, fresh ones in
each step, which train side by side as one program; what it finds is measured on runs that it has never seen.

## A distribution of runs, and numbers

`runs` is a function of a seed: it draws a model and its data. Global random generators have that seed while it runs.

>>> import torch, vecgym
>>> from vecgym.meta import Curve, Exchanges, learn
>>> from vecgym.strategy import DiLoCoStrategy, OptimSpec
>>> def runs(seed):
...     x = torch.randn(640, 10)
...     labels = (x @ torch.randn(10, 4)).argmax(1)  # another task for each seed
...     return torch.nn.Linear(10, 4), torch.utils.data.TensorDataset(x, labels)
>>> def loss_fn(model, batch):
...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

The numbers have names, and the strategy is a function of them:

>>> def strategy_of(n):
...     outer = OptimSpec("sgd", lr=n.outer_lr, momentum=n.momentum, nesterov=True)
...     return DiLoCoStrategy("sgd", outer, lr=n.inner_lr, H=n.when)
>>> numbers = {
...     "inner_lr": Curve(0.05), "outer_lr": Curve(0.7), "momentum": Curve(0.6, within=(0, 1)),
...     "when": Exchanges(every=4),
... }
>>> learned = learn(
...     strategy_of, numbers, runs=runs, loss_fn=loss_fn, num_nodes=2, batch_size=8, max_steps=8, runs_per_step=4,
...     steps=6, device="cpu",
... )
>>> len(learned.rows), learned.rows[0]["estimator"] in ("gradient", "es")
(6, True)

- `Curve` is a number over the run: four knots, linear in between, that cannot leave their interval. It reaches the
  strategy as `[T, 1]`, one for each step. Where a strategy counts exchanges and not steps (the outer rate with a plain
  `H=12`), give it the rows of the exchanges: `outer_lr=n.outer_lr[11::12]`.
- `Exchanges` is when to exchange, for an `H` or a `sync_weight`. Always the same number of whole exchanges, so that bytes
  stay what they are; what is learned is how densely they lie. In the forward pass nothing is relaxed or rounded; in the
  backward pass the derivative is that in the weight of an exchange. The last one follows the last step unless
  `at_end=False`: the loss is that of the mean of the nodes in any case.
- `Mixing` is the matrix of a gossip strategy, one for all steps or one for each: it stays doubly stochastic, and keeps the
  links of the start.
- The loss is that of the mean of the nodes on `val_size` held-out examples; on so many of each node, all weighing the
  same, if `runs` gives a function of the node for validation.
- `max_steps=[48, 96, 192]`: several lengths take turns, and each knot becomes a + b log T.
- `seconds=60` instead of `steps`. With `steps`, a seed gives the same bits. `checkpoint="learned.pt"` can be resumed from,
  and on Ctrl-C the result so far is returned.

Whatever takes derivatives in `vecgym.rollout` can be learned: learning rates, momenta, betas, weight decay, `sync_weight`,
mixing matrices. Integers, the links of a topology, codes and masks cannot.

## Is it any good?

`learned.report()` answers on unseen runs, of the lengths that were learned from, three times as long, and with twice the
nodes: the mean difference of final losses run by run, with its 95 % interval.

>>> report = learned.report(num_runs=4, rivals=["constants"], longer=2, more=None)
>>> [(gain.rival, gain.num_steps) for gain in report.gains]
[('start', 8), ('constants', 8), ('start', 16), ('constants', 16)]

`print(report)` is the table. The rivals are *tuned*: by as many steps of the same learning, on the same runs, with less
freedom. There are constants; constants whose first number falls along a cosine; the same with the rounds of the quadratic
synchronization rule (arXiv 2310.14423); exchanges evenly in a tuned window at the end; and times drawn for each run. All exchange
equally often. A gain over `start` alone says only that the numbers were badly tuned.

>>> strategy = learned.strategy(max_steps=100)  # an ordinary one: fit, sweep, verify, price
>>> model, dataset = runs(0)
>>> trainer = vecgym.Trainer(model, dataset, loss_fn=loss_fn)
>>> averaged = trainer.fit(strategy, num_nodes=2, max_steps=100, batch_size=8, device="cpu", progress=False)
>>> len(list(trainer.ledger))
25

`learned.plot()` draws the curves beside those at the start, and the distances of the exchanges.

Measured with `python benchmarks/meta.py --parts` (a network 10-32-4 on 4 nodes, DiLoCo with AdamW inside, 96 steps with 8
exchanges; 60 seconds of one core, which were 35 to 38 steps of 16 runs, and 43 to 45 for the row of random times, which are
each run's own), everything learned anew with each of three seeds, on 64 unseen runs of each kind. Gains, with the half width
of a 95 % interval:

| gain over | 96 steps | 288 steps | 96 steps, 8 nodes |
|---|--:|--:|--:|
| the numbers at the start | +0.024, +0.028, +0.027 ± 0.004 | +0.010, +0.009, +0.005 ± 0.002 | +0.026, +0.026, +0.023 ± 0.004 |
| tuned constants | +0.0155, +0.0146, +0.0161 ± 0.0028 | +0.0034, +0.0063, +0.0060 ± 0.0025 | +0.011, +0.009, +0.011 ± 0.002 |
| constants, the inner rate along a cosine | +0.011, +0.011, +0.011 ± 0.002 | +0.003, +0.007, +0.007 ± 0.003 | +0.010, +0.009, +0.009 ± 0.002 |
| the same, with QSR's rounds | +0.023, +0.026, +0.026 ± 0.004 | +0.011, +0.012, +0.013 ± 0.003 | +0.024, +0.019, +0.021 ± 0.004 |
| a late window | +0.012, +0.012, +0.013 ± 0.003 | +0.005, +0.009, +0.009 ± 0.003 | +0.008, +0.008, +0.009 ± 0.002 |
| random times | +0.019, +0.020, +0.021 ± 0.005 | +0.008, +0.012, +0.004 ± 0.003 | +0.016, +0.014, +0.016 ± 0.004 |

Numbers learned for 96 steps hold for twice the nodes, but gain little in runs three times as long: add these to the
lengths in `max_steps`.

![The inner rate rises and falls, the outer rate and the momentum peak after two thirds of the run, and the exchanges lie denser in its second half](../../notebooks/figures/meta.png)

All three seeds find the same curves. The inner rate rises to nearly twice its start in the first third of the run, and falls
to 0.6 of it in the second; the outer rate and the momentum peak after two thirds, and fall at the end; the exchanges lie
denser in the second half. Which of the four earns the gain? One of them was left free, the others were tuned constants: the
loss is lower than with constants alone by 0.010 (the inner rate), 0.008 (the outer rate), 0.007 (the momentum) and 0.006
(the times), on the average of the seeds; all four together give 0.015. So *how strongly* to step matters more than *when* to
exchange: alone, the inner rate earns two thirds of the gain, the times two fifths.

A character GPT (2 layers of width 64, 8 nodes, 300 steps with 12 exchanges; `--cases gpt --seconds 900 --rivals constants
--runs 16 --seeds 0`) gets 6 steps of 4 runs in 15 minutes of one core. They lower the loss on 16 unseen runs by
0.036 ± 0.009, from 1.986 at the start to 1.949: both rates rise until two thirds of the run and fall after it, and the
times stay even. The gain over tuned constants, 0.057 ± 0.014, says little, since six steps of tuning have made these
worse than their start (2.007): it takes more than 15 minutes here.

## The estimator

Through smooth runs, the gradient has far less variance than evolution strategies: pairs of runs with all coordinates moved
a little, once in each direction, without a derivative. Where runs are close to chaos (SGD at a rate of 1.0) a
gradient through hundreds of steps explodes, and the pairs still work. `estimator="auto"` measures the variance of both
times their seconds at first, and again every 32 steps of a length, and takes the better one; `learned.rows` has which.
(With `steps` in place of `seconds` it counts nominal seconds, which are reproducible. A single run has no variance: it
is compared with itself at coordinates nearby.) A run without a finite gradient counts as 0, and none for
more than ten times the median; no pair counts for more than the loss of an untrained model.

Variance of the mean over 16 runs of 96 steps, times the seconds of a core that it takes, for rate and times of FedAvg with
SGD on 4 nodes of a network 10-32-4 (`python benchmarks/meta.py --cases estimators`):

| rate | gradient | evolution strategies |
|--:|--:|--:|
| 0.1 | 0.00001 | 0.003 |
| 1.0 | 10^17 | 0.07 |
| 3.0 | 10^66 | 5 |

The notebook `notebooks/9_learning_how_to_communicate.ipynb` is a longer example, with `vecgym.influence`: the worth of each
message.

## One given run

`seeds=[0]` learns from one run, the same in each step; `seeds=[0, 1, 2]` from three. It finds more for these than fresh
runs do, and less for others; `report` says how much.

>>> from vecgym.collectives.topology import ring
>>> from vecgym.meta import Mixing
>>> from vecgym.strategy import GossipStrategy
>>> mixed = learn(
...     lambda n: GossipStrategy(n.W, inner_optim="sgd", lr=0.05), {"W": Mixing(ring(4))}, runs=runs, loss_fn=loss_fn,
...     num_nodes=4, batch_size=8, max_steps=8, seeds=[0], steps=4, device="cpu",
... )
>>> W = mixed.numbers(8).W
>>> bool(mixed.rows[-1]["loss"] < mixed.rows[0]["loss"]), W[0, 2].item(), round(W[0].sum().item(), 6)
(True, 0.0, 1.0)

A budget of bytes or seconds is an `Exchanges(every=H)`: `vecgym.guide.clock` has the H for so many seconds. Measured once
(`python benchmarks/figures.py --figures schedule`: DiLoCo with SGD at a rate of 1.0 on 4 nodes, 6 exchanges in 48 steps,
of one network and its data, in other orders of the batches), the gain over an exchange every 8 steps:

| learned from | in that run | in 64 unseen runs |
|---|--:|--:|
| one run, 60 steps | +0.090 | +0.025 ± 0.006 |
| 16 fresh runs in each of 24 steps | +0.062 | +0.031 ± 0.007 |

Of the gain on unseen runs, 0.022 is that of the start, whose last exchange follows step 44 (`at_end=False`). Learning from
fresh runs adds 0.009 ± 0.005, from one run 0.002 ± 0.005.
"""
