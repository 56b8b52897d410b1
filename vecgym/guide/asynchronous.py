"""Asynchronous training: nodes that do not wait for the slowest

When nodes differ in speed, a synchronous algorithm goes at the pace of the slowest. An asynchronous one lets every node
train at its own pace, and a server handles what arrives:

>>> import torch
>>> from vecgym import Trainer
>>> from vecgym.clock import Compute, Network
>>> from vecgym.models import Line
>>> from vecgym.strategy import AsyncStrategy, DelayedNesterov, FedBuff, HeLoCo, OptimSpec, OuterOptimizer
>>> trainer = Trainer(Line(), torch.ones(64))
>>> strategy = AsyncStrategy("sgd", OuterOptimizer(OptimSpec("sgd", lr=0.5)), H=5, lr=0.05)
>>> model = trainer.fit(
...     strategy, num_nodes=4, max_updates=8, compute=Compute([1.0, 1.0, 2.0, 3.0]), device="cpu", progress=False
... )
>>> trainer.timeline()
AsyncTimeline(8 updates by 4 nodes: 15 s, 100.0 % computing)

Which version of the server's parameters a node gets depends on how long each node computes, `compute=`, and how long
its messages take, `network=` (nothing, without one). Both are those of `vecgym.guide.clock`: seconds a step, of each
node, constant or drawn.

## The rules

Node i begins a round from the server's parameters of version v. It makes H_i steps of its own inner optimizer, whose
state stays on the node, and sends its movement Delta_i = start_i - theta_i. When that arrives, the server is s versions
further: the *staleness*. Of every `buffer` arrivals the server makes one update of the mean of w(s_i) Delta_i, a new
version. Then the node is sent the server's parameters, and begins again. Simultaneous arrivals (to 12 digits) go by node id, and
all of them are taken before any of these nodes is sent parameters.

- `staleness`: w(s) is 1 ("none"), (1 + s)^(-1/2) ("inverse_sqrt"), or a function of yours.
- `dylu=True`: H_i in proportion to the node's speed, so that rounds take about equally long. `local_steps=[...]` says
  H_i of each node.
- `max_wait`: a node that arrives while none waits opens a window of so many seconds. Nodes arriving in it wait, and all
  of them begin again together when it closes: with `grace="full"` when its time is over or all nodes wait, with
  `grace="until_last"` at the last arrival in it, which only a simulation can know.
- `delay_threshold=R` (Ringmaster ASGD): movements that are R versions late or more make no update. They are in the
  ledger and in `num_dropped` of the history.
- Learning-rate schedules, data and randomness go by the node's own count of steps.

With `max_wait=math.inf` and `buffer=K` this is the synchronous algorithm, bit for bit: DiLoCo's, if the server is its
outer optimizer.

## Servers

| server | update at an arrival | its copies of the parameters |
|---|---|--:|
| `OuterOptimizer(spec)` | any optimizer, with the mean movement of `buffer` arrivals as its gradient | the optimizer's |
| `DelayedNesterov(lr, momentum, buffer, c)` | momentum moves with every N-th arrival; in between the server follows each movement | 2 |
| `FedBuff(buffer, lr)` | the mean of M arrivals, weighted (1 + s)^(-1/2) | 0 |
| `MLA(lr, momentum)` | momentum, a mean of past movements, added to each of them | 1 |
| `HeLoCo(lr, momentum)` | the same with movements that are turned where they point against the momentum; nodes begin where it leads | 1 |

An update at every arrival with momentum adds up: rates that suit DiLoCo are about K times too large for
`OuterOptimizer` with `buffer=1`. A server of your own is a subclass of `vecgym.strategy.Server` with one method,
`update(params, movement, state, update, inplace=False)`.
Its movement is the mean of w(s_i) (start_i - theta_i), so `params - lr * movement` follows the nodes.

A rule that needs more, such as the parameters that arrive, is a subclass of `AsyncStrategy` with handlers of its own.
FedAsync, theta <- (1 - a) theta + a theta_i with a = 0.6 (1 + s)^(-1/2) (Xie et al., arXiv 1903.03934):

>>> class FedAsync(AsyncStrategy):
...     def arrive(self, part):
...         self.arrived(part)  # counts what is sent
...         part.report(part.own["loss"] / part.event.info.num_steps)
...         part.memo["arrived"] = part.own["local"], 0.6 * (1 + part.event.info.staleness) ** -0.5
...
...     def update(self, part):
...         theta, a = part.memo["arrived"]
...         now = part.shared["params"]
...         part.shared["params"] = {name: (1 - a) * x + a * theta[name] for name, x in now.items()}
>>> averaged = trainer.fit(FedAsync("sgd", H=5, lr=0.1), num_nodes=3, max_updates=12, compute=Compute([1.0, 1.0, 2.0]))

## Two levels, pairs, fragments

- `HALoSStrategy(regions=...)`: nodes send to a server in their region, regions to a global one; `between=` is the
  servers' network. Rows are updates of the global server.
- `ADPSGDStrategy(topology=...)`: no server. A node that ends a step averages with one random neighbour, whatever that
  one is doing. A row is for K steps, of whichever nodes, and what is evaluated is the mean of the nodes.
- `DecoupledDiLoCoStrategy(quorum=..., fragments=...)`: nodes never stop. The server merges each fragment of the model
  when a quorum has sent it. Rows are updates of fragments.

All that follows applies to them, too.

The docstring of each has its rules and its deviations from the paper.

## Nodes that fail and come back

`fit(availability=...)` says who is there, as for synchronous strategies (`vecgym.guide.strategies`). Its step t is the
t-th interval of simulated time, as long as a step of a node takes on average. A node begins no step while it is absent;
one that it has begun before it ends. Back again, it goes on with what it has: in `AsyncStrategy` and `HALoSStrategy` with
its round, in `DecoupledDiLoCoStrategy` after it has merged what the server has sent it. In `ADPSGDStrategy` nobody
averages with a node that is absent. Hence `rejoin="own"`. Without node 0 a quorum of all stands still, and one of three
does not:

>>> from vecgym.strategy import DecoupledDiLoCoStrategy
>>> failing = Trainer(Line(), torch.ones(64))
>>> for quorum in (4, 3):
...     model = failing.fit(
...         DecoupledDiLoCoStrategy("sgd", quorum=quorum, H=2, lr=0.05), 4, max_seconds=20, compute=Compute(1.0),
...         availability=lambda step: [1, 2, 3] if 4 <= step < 20 else [0, 1, 2, 3], device="cpu", progress=False,
...     )
...     print(quorum, failing.history.last("version"))
4 1
3 5

## Goodput

*Goodput* is the part of the time of all nodes, absent ones too, that goes into steps which the evaluated model has
merged: the seconds of these steps, divided by K times the seconds of the run. Of the run above, with a quorum of three:

>>> timeline = failing.timeline()
>>> round(timeline.goodput, 2), round(timeline.utilization, 2)
(0.44, 0.81)

So a node that computes need not help: its work between sending a fragment and merging the server's answer
is overwritten (`alpha=0`). That is here two steps of four, and otherwise at least `overlap` of H steps. With several
fragments, each has messages of its own, and counts by its bytes.

`python benchmarks/goodput.py` measures it on 8 nodes that fail and come back (`Dropout`, absences of 30 s on average, H
= 20 steps of 1 s with sigma 0.1, 10 Gbit/s and 10 ms, 100 million parameters to send), with a small GPT on real text,
until 3200 node-steps are merged. *elastic*: synchronous training that waits for nobody who is absent
(`rejoin="shared"`); *waiting*: the usual one, which stops until all are back, its seconds computed from the table of
who is there, with restarts that are free. Decoupled DiLoCo has 4 fragments and a grace of up to 5 s. Means of 3 seeds,
± the standard deviation; *computing* is `utilization`, *loss* the validation loss after 400 s. AdamW has one learning
rate for all; both DiLoCo have the same outer optimizer, and `AsyncStrategy` takes 1/8 of each movement. No rate was
tuned for failures:

![Left, goodput of seven ways to train against the part of the time that a node is absent, from 0 to 30 %; right, their validation loss after 400 simulated seconds](../../notebooks/figures/goodput.png)

| algorithm | absent | seconds | goodput | computing | loss |
|---|--:|--:|--:|--:|--:|
| AllReduce, elastic | 0 % | 679 ± 1 | 0.59 ± 0.00 | 0.59 | 2.23 ± 0.02 |
| | 10 % | 724 ± 5 | 0.56 ± 0.00 | 0.56 | 2.24 ± 0.02 |
| | 30 % | 857 ± 13 | 0.47 ± 0.01 | 0.47 | 2.28 ± 0.02 |
| AllReduce, waiting | 10 % | 1480 ± 266 | 0.28 ± 0.05 | 0.28 | 2.52 ± 0.23 |
| | 30 % | 8025 ± 667 | 0.05 ± 0.00 | 0.05 | 3.47 ± 1.01 |
| DiLoCo, elastic | 0 % | 427 ± 1 | 0.94 ± 0.00 | 0.94 | 2.39 ± 0.02 |
| | 10 % | 488 ± 20 | 0.84 ± 0.02 | 0.87 | 2.40 ± 0.02 |
| | 30 % | 688 ± 24 | 0.59 ± 0.02 | 0.69 | 2.43 ± 0.03 |
| DiLoCo, waiting | 10 % | 810 ± 142 | 0.51 ± 0.10 | 0.51 | 2.56 ± 0.12 |
| | 30 % | 1894 ± 77 | 0.21 ± 0.01 | 0.21 | 2.69 ± 0.08 |
| `AsyncStrategy` | 0 % | 419 ± 2 | 0.96 ± 0.00 | 0.97 | 2.32 ± 0.02 |
| | 10 % | 469 ± 13 | 0.86 ± 0.02 | 0.88 | 2.34 ± 0.02 |
| | 30 % | 593 ± 22 | 0.68 ± 0.03 | 0.69 | 2.36 ± 0.02 |
| Decoupled DiLoCo, quorum 4 | 0 % | 679 ± 309 | 0.67 ± 0.25 | 1.00 | 2.43 ± 0.04 |
| | 10 % | 1252 ± 78 | 0.32 ± 0.02 | 0.92 | 2.43 ± 0.02 |
| | 30 % | 1433 ± 38 | 0.28 ± 0.01 | 0.71 | 2.47 ± 0.02 |
| Decoupled DiLoCo, quorum 8 | 0 % | 488 ± 18 | 0.83 ± 0.03 | 1.00 | 2.42 ± 0.01 |
| | 10 % | 1159 ± 309 | 0.36 ± 0.09 | 0.91 | 2.46 ± 0.07 |
| | 30 % | 2487 ± 236 | 0.16 ± 0.02 | 0.70 | 2.53 ± 0.07 |

- Nodes of Decoupled DiLoCo compute whenever they are there, and with a quorum of 4 its loss after 400 s hardly depends
  on failures. It is ahead of DiLoCo that waits for all: at 20 % absent, 2.44 ± 0.02 to 2.63 ± 0.09.
- It is not ahead of DiLoCo that does not wait: 2.43 to 2.40 at 10 %, 2.47 to 2.43 at 30 %, differences as large as the
  spread. `AsyncStrategy`, in which each node has rounds of its own and all that arrives is merged, is better than both,
  and its goodput stays next to the part of the nodes that is there.
- Much of what its nodes compute is not merged. Messages are sent after a node's *own* steps, H apart, and nothing
  brings nodes back into step: who was absent for 10 s sends 10 s after the others from then on. Then its message is too
  late, or of the few steps since it merged the others' version. One of 8 equal nodes that was away for half a round
  lowers the goodput from 0.90 to 0.85 for good with a quorum of 4, to 0.55 with one of 8; if it was away for a whole
  round, to neither (no network, one fragment). Jitter does the same, slowly: hence the ± 0.25 without failures.
- AllReduce has the best loss, since its nodes meet in every step. That its goodput is 0.59 where nobody fails is the
  network's doing: with a slower one it has fewer steps in 400 s.

## How long, and what is recorded

A run ends after `max_updates` of the server, `max_seconds` of simulated time, or `max_steps` local steps (the mean over
the nodes), whichever comes first. The history has a row for each update:

>>> trainer.history.rows[4]["sim_seconds"], trainer.history.rows[4]["staleness"], trainer.history.rows[4]["version"]
(10.0, 1.0, 4)

`sim_seconds`, `version`, `num_arrived`, `staleness` (the mean of the update's arrivals) and `staleness_max`,
`local_steps_total`, `num_dropped` with a `delay_threshold`, and `nodes_per_call`, see below. `train_losses` holds the mean loss of each round in the update,
nan for the other nodes. Validation is of the server's model (in AD-PSGD, which has none, of the mean of the nodes), which `fit` returns and `save` stores, every `val_interval`
updates or `val_seconds` of simulated time. `trainer.plot(x="sim_seconds")` draws loss over time; `trainer.timeline().plot()` who did what when. The ledger has
every message, up and down, with its node. Checkpoints resume at any update.

## Late, and together

The order of events does not depend on any number that is trained, so it is known before the first gradient. A node that
begins a round only notes what it starts from. When an arrival needs a movement that is not there, *all* rounds that have
begun and are not computed are computed in one stacked call for each step: `nodes_per_call` says how many that were. The
numbers are those of an event-by-event simulator: `together=False` computes one by one, and gives the same to 1e-12 in
float64, and to the last bit with `engine="loop"`.

Seconds of whole runs, SGD, H = 10, log-normal speeds with s the standard deviation of the logarithm; *plain* is an event
loop without vecgym. One round of each in turns, in processes of their own, 2 threads, 2 cores of an AMD EPYC, load by
others 0.01 cores, torch 2.13 (`python benchmarks/asynchronous.py`):

| workload | nodes per call | together | one by one | plain | one by one / together | plain / together |
|---|--:|--:|--:|--:|--:|--:|
| MLP 32-64-10, K=64, equal speeds | 64.0 | 0.89 | 12.29 | 4.32 | 13.9 | 4.9 |
| MLP 32-64-10, K=64, s=0.5 | 26.7 | 1.03 | 10.41 | 3.46 | 10.1 | 3.3 |
| MLP 32-64-10, K=64, s=1 | 14.5 | 1.28 | 11.60 | 4.56 | 9.1 | 3.6 |
| MLP 784-128-10, K=64, s=0.5 | 25.6 | 0.95 | 5.53 | 2.14 | 5.8 | 2.2 |
| MLP 16-32-2, K=512, s=0.5 | 102.4 | 0.50 | 8.66 | 5.71 | 17.2 | 11.3 |

## The gradient of an asynchronous run

`vecgym.rollout` takes these strategies too; node i takes row i of batch t as its own step t:

>>> import vecgym
>>> discount = torch.tensor(0.5, requires_grad=True)
>>> strategy = AsyncStrategy(
...     "sgd", OuterOptimizer(OptimSpec("sgd", lr=0.5)), H=2, lr=0.1, staleness=lambda s: (1.0 + s) ** -discount
... )
>>> outcome = vecgym.rollout(
...     Line(), strategy, torch.ones(8, 2, 1), num_nodes=2, eval_batch=torch.ones(1), compute=Compute([1.0, 2.0])
... )
>>> torch.autograd.grad(outcome.loss, discount)[0] > 0  # here, a smaller discount would be better
tensor(True)

## Limits

Dropout masks depend on which nodes share a call, so a model with dropout is reproducible for one setting of `together`.
`sweep` stacks configurations of `AsyncStrategy` that differ in numbers only, and trains the others one after the other.

One process: real processes (`backend=`, `exact=True`), `verify`, `dry_run`, `estimate_memory` and `compile=True` are
for synchronous strategies, and say so. An asynchronous run is not priced on other networks afterwards, since these
would change the order of its events: train again. Memory: one more copy of the parameters per node than a synchronous
run has, with which its round began, or for `DecoupledDiLoCoStrategy` what it merged last; two more for
`ADPSGDStrategy`, with which the step began and the gradient there.
"""
