"""Asynchronous training: nodes that do not wait for the slowest

When nodes differ in speed, a synchronous algorithm goes at the pace of the slowest. An asynchronous one lets every node
train in rounds of its own, and a server take what arrives:

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

Who meets which version of the server's parameters depends on how long each node computes, `compute=`, and on how long
its messages take, `network=` (nothing, without one). Both are those of `vecgym.guide.clock`: seconds a step, of each
node, constant or drawn.

## The rules

Node i begins a round from the server's parameters of version v. It makes H_i steps of its own inner optimizer, whose
state stays on the node, and sends its movement Delta_i = start_i - theta_i. When that arrives, the server is s versions
further: the *staleness*. Of every `buffer` arrivals the server makes one update of the mean of w(s_i) Delta_i, a new
version. Then the node is sent the server's parameters, and begins again. Arrivals of one time go by the node's id.

- `staleness`: w(s) is 1 ("none"), (1 + s)^(-1/2) ("inverse_sqrt"), or a function of yours.
- `dylu=True`: H_i in proportion to the node's speed, so that rounds take about equally long. `local_steps=[...]` says
  H_i of each node.
- `max_wait`: the first to arrive when nobody waits opens a window of so many seconds. Who arrives in it waits, and all
  of them begin again together when it closes: with `grace="full"` when its time is over or all nodes wait, with
  `grace="until_last"` at the last arrival in it, which only a simulation can know.
- Learning-rate schedules, data and randomness go by the node's own count of steps.

With `max_wait=math.inf` and `buffer=K` this is the synchronous algorithm, bit for bit: DiLoCo's, if the server is its
outer optimizer.

## Servers

| server | update at an arrival | its copies of the parameters |
|---|---|--:|
| `OuterOptimizer(spec)` | any optimizer, with the mean movement of `buffer` arrivals as its gradient | the optimizer's |
| `DelayedNesterov(lr, momentum, buffer, c)` | momentum moves with every N-th arrival; in between the server follows each movement | 2 |
| `FedBuff(buffer, lr)` | the mean of M arrivals, weighted (1 + s)^(-1/2) | 0 |
| `HeLoCo(lr, momentum)` | momentum, a mean of past movements, on movements that are turned where they point against it; nodes begin where it leads | 1 |

An update at every arrival with momentum adds up: rates that suit DiLoCo are about K times too large for
`OuterOptimizer` with `buffer=1`. A server of your own is a subclass of `vecgym.strategy.Server` with one method.

## Two levels, pairs, fragments

- `HALoSStrategy(regions=...)`: nodes send to a server in their region, regions to a global one; `between=` is the
  servers' network. Rows are updates of the global server.
- `ADPSGDStrategy(topology=...)`: no server. A node that ends a step averages with one random neighbour, whatever that
  one is doing. A row is for K steps, of whichever nodes, and what is evaluated is the mean of the nodes.
- `DecoupledDiLoCoStrategy(quorum=..., fragments=...)`: nodes never stop. The server merges each fragment of the model
  when a quorum has sent it. Rows are updates of fragments.

All that follows is true of them as well.

Each has its rules, and how it deviates from its paper, in its docstring.

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

## How long, and what is recorded

A run ends after `max_updates` of the server, `max_seconds` of simulated time, or `max_steps` local steps (the mean over
the nodes), whichever comes first. The history has a row for each update:

>>> trainer.history.rows[4]["sim_seconds"], trainer.history.rows[4]["staleness"], trainer.history.rows[4]["version"]
(10.0, 1.0, 4)

`sim_seconds`, `version`, `num_arrived`, `staleness` (the mean of the update's arrivals) and `staleness_max`,
`local_steps_total`, and `nodes_per_call`, see below. `train_losses` holds the mean loss of each round in the update,
nan for the other nodes. Validation is of the server's model, which `fit` returns and `save` stores, every `val_interval`
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
`sweep` trains configurations of asynchronous strategies one after the other.

One process: real processes (`backend=`, `exact=True`), `verify`, `dry_run`, `estimate_memory` and `compile=True` are
for synchronous strategies, and say so. An asynchronous run is not priced on other networks afterwards, since these
would change the order of its events: train again. Memory: one more copy of the parameters per node than a synchronous
run has, with which its round began, or for `DecoupledDiLoCoStrategy` what it merged last; two more for
`ADPSGDStrategy`, with which the step began and the gradient there.
"""
