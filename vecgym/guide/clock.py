"""The clock: how long on your network? Train once, price everywhere

## Which strategy, which H, which bandwidth?

`vecgym price` answers without a run, for a number of parameters or a module (`--model FILE.py:function`). This is a
model of 150 million parameters on 8 nodes, which compute 0.6 s a step and are 80 ms apart, at 100 Mbit/s each:

```bash
vecgym price --parameters 150M --nodes 8 --step-seconds 0.6 --bandwidth "100 Mbit/s" --latency 80ms \\
    --H 100 500 --strategies allreduce diloco streaming-4-bits
```

```text
150,000,000 parameters (600 MB) in 13 layers of width 960, 8 nodes, Network(100 Mbit/s, latency=80 ms), Compute(600
  ms), 100,000 steps

In messages of 26.2 MB:
strategy            H  sent/step  time/step  computing   days  faster  bandwidth for 95 %  H for 95 %
allreduce           -    1.05 GB      108 s      0.6 %    125      1x                none           -
diloco            100    10.5 MB     1.66 s     36.1 %   1.92   64.9x                none       3,358
diloco            500     2.1 MB     812 ms     73.9 %   0.94    133x                none       3,358
streaming-4-bits  100    5.25 MB     875 ms     68.6 %   1.01    123x          261 Mbit/s         871
streaming-4-bits  500    1.05 MB     655 ms     91.6 %  0.758    164x          141 Mbit/s         871
streaming-4-bits: tau = 5 steps, 6 fragments; tau for 95 %: 15 with H = 100, 9 with H = 500
allreduce: No bandwidth is enough for 95 % computing: the latency of 80 ms alone takes 23.1 s of 23.7 s a
  step. Possible remedies: 733 times fewer exchanges, given enough bandwidth; one message per exchange,
  bucket_bytes=math.inf: not enough by itself.
diloco (H = 500): No bandwidth is enough for 95 % computing: the latency of 80 ms alone takes 44 ms of 644 ms
  a step. Possible remedies: 2 times fewer exchanges, given enough bandwidth; one message per exchange,
  bucket_bytes=math.inf: 573 Mbit/s; all_reduce='halving_doubling'; all_reduce='tree'.

In one message per exchange:
strategy            H  sent/step  time/step  computing   days  faster  bandwidth for 95 %  H for 95 %
allreduce           -    1.05 GB     85.7 s      0.7 %   99.2      1x                none           -
diloco            100    10.5 MB     1.45 s     41.3 %   1.68   59.1x         4.12 Gbit/s       2,696
diloco            500     2.1 MB     770 ms     77.9 %  0.891    111x          573 Mbit/s       2,696
streaming-4-bits  100    5.25 MB     875 ms     68.6 %   1.01     98x          261 Mbit/s         871
streaming-4-bits  500    1.05 MB     655 ms     91.6 %  0.758    131x          141 Mbit/s         871
streaming-4-bits: tau = 5 steps, 6 fragments; tau for 95 %: 15 with H = 100, 9 with H = 500
allreduce: No bandwidth is enough for 95 % computing: the latency of 80 ms alone takes 1.12 s of 1.72 s a
  step. Possible remedies: 36 times fewer exchanges, given enough bandwidth.
```

So data-parallel training would take 125 days, DiLoCo with H = 500 less than one. The first table is for messages of 25 MiB,
as `torch.distributed` sends gradients, the second for a single message per exchange. Where no bandwidth is enough, the
reason is below, with remedies. A number of parameters is taken as a transformer, whose layers the first line names. tau is
the steps that an exchange of Streaming DiLoCo may take (`--tau`); the line below the table says which tau would be
enough here. Without `--H` and `--strategies` it compares seven strategies of the catalogue, and `--plot price.png` draws
this:

![Days for 100,000 steps and the part of them that is computing, for data-parallel training, FedAvg, DiLoCo and Streaming DiLoCo with three H, SPARTA and DeMo; in messages of 25 MiB and in one per exchange](../../notebooks/figures/price.png)

From Python:

>>> import math
>>> from vecgym.clock import Compute, Network, price_strategies, required_H
>>> network = Network("100 Mbit/s", latency="80 ms", bucket_bytes=math.inf)
>>> prices = price_strategies("150M", 8, network, Compute(0.6), H=[500], strategies=["allreduce", "diloco"])
>>> [(row["strategy"], round(row["days"], 2), round(row["utilization"], 3)) for row in prices.rows]
[('allreduce', 99.21, 0.007), ('diloco', 0.89, 0.779)]
>>> required_H("150M", "diloco", num_nodes=8, network=network, compute=Compute(0.6), utilization=0.9)
1277

`prices.rows` has the numbers, `prices.plot("price.png")` the figure. The table compares time only. Only a run shows how
much less a step learns with a larger H or tau: the page `vecgym.guide.results` compares strategies at equal times.

## A run that was recorded

A synchronous algorithm computes the same numbers on any network. So a run is trained once, and its ledger, which says
what was sent, is priced afterwards on as many networks as you like:

>>> import torch
>>> from vecgym import Trainer
>>> from vecgym.clock import Compute, Network, price, required_bandwidth
>>> from vecgym.models import Line
>>> from vecgym.strategy import DiLoCoStrategy
>>> trainer = Trainer(Line(), torch.ones(64))
>>> strategy = DiLoCoStrategy("sgd", H=5, lr=0.1)
>>> averaged = trainer.fit(strategy, num_nodes=8, max_steps=20, device="cpu", progress=False)
>>> trainer.timeline(Network("1 Gbit/s", latency="50 ms"), Compute(0.4))
Timeline(20 steps of 8 nodes: 10.8 s, 74.1 % computing)

## Without training

`vecgym.dry_run` makes the exchanges of a run on tensors without values. The model may live on the device "meta":

>>> import vecgym
>>> with torch.device("meta"):
...     model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, dtype=torch.bfloat16) for _ in range(100)))
>>> ledger = vecgym.dry_run(model, DiLoCoStrategy("adamw", H=100), num_nodes=16, max_steps=1000)
>>> compute = Compute.from_flop(6 * 6.7e9 * 2**18, peak_flops=989e12, utilization=0.4)
>>> price(ledger, Network("1 Gbit/s", latency="50 ms"), compute)
Timeline(1000 steps of 16 nodes: 8.33 h, 88.9 % computing)
>>> bandwidth = required_bandwidth(ledger, compute, utilization=0.95, latency="10 ms")
>>> f"{bandwidth / 1e9:.2f} Gbit/s"
'1.58 Gbit/s'

With 100 ms no bandwidth is enough: 100 messages go 30 times to the next node in a ring of 16. A warning says what would
help:

>>> import textwrap
>>> import warnings
>>> with warnings.catch_warnings(record=True) as said:
...     warnings.simplefilter("always")
...     required_bandwidth(ledger, compute, utilization=0.95, latency="100 ms")
inf
>>> print(textwrap.fill(str(said[0].message), 110))
No bandwidth is enough for 95 % computing: the latency of 100 ms alone takes 47.1 min of 8.18 h. Possible
remedies: 3 times fewer exchanges, given enough bandwidth; one message per exchange, bucket_bytes=math.inf:
1.47 Gbit/s; all_reduce='halving_doubling'; all_reduce='tree'.

## Networks

`Network(bandwidth, latency)` takes bits per second and seconds, or texts ("1 Gbit/s", "100 MB/s", "50 ms"): one number
for all links; `[K]`, of each node's link (`up=` and `down=` where they differ); or a matrix `[K, K]`, which
`Network.regions` makes of fast links inside and slow ones between. `all_reduce` and `all_gather` say which algorithm
carries them: "ring", "halving_doubling", "tree" or "server"; means and sums also "gloo", the ring of
`torch.distributed` on CPUs; all-gathers also "direct". "server", and "tree" of all-gathers, change what a node's link
carries, and the bytes of a run with such a network. The latency is one way, half of what a ping takes. The formulas are in `vecgym.clock.cost`.
With a matrix the ring goes from each node on to the nearest, and stretches of it are turned round where that helps
(2-opt): one order for each group of nodes, settled for the median of the messages that it first exchanges. Its slowest
link is not always that of the best order: for 8 places on a map it is 1 % slower, the mean of 200, and 37 % at most;
where both directions of each link are drawn at random, tenfold apart, 23 %.

>>> network = Network.regions([4, 4], inside=("400 Gbit/s", 1e-4), between=("1 Gbit/s", 0.05))
>>> round(network.seconds("mean", 1e9, num_nodes=4), 3), round(network.seconds("mean", 1e9, num_nodes=8), 1)
(0.031, 14.7)

## Messages

Every message pays the latency, so the number of messages in an exchange matters. Its tensors are joined, from the
last parameter on: a message is complete with the tensor that takes it to `Network(bucket_bytes=25 * 2**20)` or beyond.
`math.inf` makes one message of an exchange, the best case; 0 one of each tensor, as EXO Gym, diloco-sim and torchft
send by default. Gradients go as torch's DistributedDataParallel sends them, the first message at 1 MiB: of 75
tensors of 8.1 MB, 20 messages. Each fragment of Streaming DiLoCo has messages of its own.

Messages follow one another, as with NCCL and in synchronous calls. torch's DistributedDataParallel on gloo has two
in flight, which `all_reduce="gloo"` models for gradients. This is 8 nodes' exchange in every step, 100 Mbit/s, 80 ms:

>>> import math
>>> from vecgym.strategy import AllReduceStrategy
>>> with torch.device("meta"):
...     layers = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(2_025_000)) for _ in range(75))
>>> gradients = vecgym.dry_run(layers, AllReduceStrategy("sgd"), num_nodes=8, max_steps=1)
>>> for bucket_bytes in (0, 25 * 2**20, math.inf):
...     price(gradients, Network("100 Mbit/s", "80 ms", bucket_bytes=bucket_bytes), Compute(0.6))
Timeline(1 steps of 8 nodes: 2.82 min, 0.4 % computing)
Timeline(1 steps of 8 nodes: 108 s, 0.6 % computing)
Timeline(1 steps of 8 nodes: 86.8 s, 0.7 % computing)

## Compute

`Compute(0.4)` is seconds per step and node; also `[K]`, for nodes of different speed. `Compute.lognormal(0.4, sigma=0.3)`
draws them anew for each step and node; `Compute.from_flop` computes them; `Compute.measured(history)` takes those of a
recorded run on this machine.

## What overlaps

Within a step, the forward pass takes a third of the time and the backward pass two thirds, layer by layer in the order
of the parameters; each parameter counts as a layer, with a share by its size or by `Compute(shares={name: FLOP})`.

- A gradient leaves as the backward pass of its layer ends. The layer's optimizer step follows at once, so that
  parameters and movements leave then, too.
- What leaves queues on the node's link, in this order: a message once its last gradient is there, and after the message
  before it. A collective takes the links of its participants until its end, in both directions.
- It is needed by the next forward pass of its layer, or, if it is used `lag` steps later, by the one so many steps
  later.
- A collective begins when the last of its participants is there: with islands, of each island; in gossip, each node
  waits for its neighbours only. A message from node to node leaves when its sender is ready and the one before arrived.
- `Compute(..., overlap=False)`: nothing overlaps.

The bytes of a code (top-k, quantised values) are shared among its messages by the parameters' sizes. Transfers of tensors
that are no parameters leave at the end of the backward pass.

Nodes that are absent (`availability`) do not compute: the ledger knows who was there, whatever the run is priced for.

Nodes that sit out a round (`participation`) are counted as computing, and then as waiting until the server has ended
the round, from whose result they begin a later one; nobody waits for them within it. So `seconds` are right where
nodes are equally fast; `utilization` and `per_node` do not distinguish resting from computing.

## Where the time goes

`timeline.seconds`, `.utilization` (the fraction of the time of all nodes, absent ones too, in which they compute),
`.step_seconds` `[T]` and `.per_node`. `timeline.plot()` draws who computed, sent, and waited for whom;
`timeline.save_trace("run.json")` writes it for https://ui.perfetto.dev.

>>> timeline = trainer.timeline(Network("1 Gbit/s", latency="50 ms"), Compute([0.4] * 7 + [0.8]))
>>> round(timeline.utilization, 2), timeline.per_node.waited[-2:]  # of a fast node, and of the slow one
(0.48, tensor([10.8000,  2.8000], dtype=torch.float64))

How often to exchange, if the time for a run is given: as often as it allows.

>>> def seconds(H):
...     ledger = vecgym.dry_run(Line(), DiLoCoStrategy("sgd", H=H), num_nodes=8, max_steps=20)
...     return price(ledger, Network("1 Gbit/s", latency="50 ms"), Compute(0.4)).seconds
>>> next(H for H in range(1, 21) if seconds(H) <= 12)
4

`vecgym.meta.learn` finds the best steps for as many exchanges, `Exchanges(every=4)`. Where nodes are unequally fast, the
time depends on these steps too: price `learned.strategy(max_steps)` in the same way.

## In a run

`fit(..., network=, compute=)` adds the columns `sim_seconds` and `sim_utilization` to the history, for loggers, the
progress bar and `trainer.plot(x="sim_seconds")`. Training does not change by a bit. `vecgym price RUN_FOLDER`
prices the checkpoint of a run from the command line.

>>> averaged = trainer.fit(strategy, num_nodes=8, max_steps=20, device="cpu", progress=False,
...                        network=Network("1 Gbit/s", latency="50 ms"), compute=Compute(0.4))
>>> round(trainer.history["sim_seconds"][-1], 6)
10.8

## How good it is

The closed forms hold to 1e-12, and a naive simulation of every message gives the same. `python benchmarks/network.py`
compares with four gloo processes in network namespaces, whose links tbf limits. Latency is netem's, or, as here, where
the kernel had none, that of a switch in user space. *ping* (ms) and *link* (Mbit/s) are what plain sockets found there.
Seconds of 2 steps of torch's own DistributedDataParallel (DDP) and 6 of DiLoCo, with 4 matrices of 8 MiB, or with 20 MB
in 75 and in 200 tensors and messages of 1 MiB, 19 of each; and of single all-reduces. *ring* and *gloo* are predicted
with that link.

|  | Mbit/s | ms | by | ping | link | ring | gloo | measured | measured / gloo |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|
| DDP | 50 | 0 | tbf | 0.0 | 48 | 17 | 17 | 17 | 1.00 |
| DiLoCo, H=3 | 50 | 0 | tbf | 0.0 | 48 | 17.2 | 17.2 | 17.1 | 0.99 |
| DDP, 75 tensors | 50 | 0 | tbf | 0.0 | 48 | 10.2 | 10.2 | 10.1 | 0.99 |
| DiLoCo, H=3, 75 tensors | 50 | 0 | tbf | 0.0 | 48 | 10.4 | 10.4 | 10.3 | 0.99 |
| DDP, 200 tensors | 50 | 0 | tbf | 0.0 | 48 | 10.2 | 10.2 | 10.1 | 1.00 |
| DiLoCo, H=3, 200 tensors | 50 | 0 | tbf | 0.0 | 48 | 10.4 | 10.4 | 10.3 | 0.99 |
| DDP | 200 | 0 | tbf | 0.0 | 189 | 4.36 | 4.36 | 4.35 | 1.00 |
| DiLoCo, H=3 | 200 | 0 | tbf | 0.0 | 189 | 4.56 | 4.56 | 4.51 | 0.99 |
| DDP, 75 tensors | 200 | 0 | tbf | 0.0 | 189 | 2.64 | 2.64 | 2.63 | 1.00 |
| DiLoCo, H=3, 75 tensors | 200 | 0 | tbf | 0.0 | 189 | 2.84 | 2.84 | 2.81 | 0.99 |
| DDP, 200 tensors | 200 | 0 | tbf | 0.0 | 189 | 2.64 | 2.64 | 2.64 | 1.00 |
| DiLoCo, H=3, 200 tensors | 200 | 0 | tbf | 0.0 | 189 | 2.84 | 2.84 | 2.81 | 0.99 |
| DDP | 1000 | 0 | tbf | 0.1 | 950 | 0.948 | 0.948 | 1.01 | 1.07 |
| DiLoCo, H=3 | 1000 | 0 | tbf | 0.1 | 950 | 1.15 | 1.15 | 1.14 | 1.00 |
| DDP, 75 tensors | 1000 | 0 | tbf | 0.1 | 950 | 0.605 | 0.605 | 0.625 | 1.03 |
| DiLoCo, H=3, 75 tensors | 1000 | 0 | tbf | 0.1 | 950 | 0.805 | 0.805 | 0.807 | 1.00 |
| DDP, 200 tensors | 1000 | 0 | tbf | 0.1 | 950 | 0.605 | 0.605 | 0.633 | 1.05 |
| DiLoCo, H=3, 200 tensors | 1000 | 0 | tbf | 0.1 | 950 | 0.805 | 0.805 | 0.802 | 1.00 |
| DDP | 50 | 20 | switch | 40.5 | 49 | 17.1 | 16.6 | 16.9 | 1.02 |
| DiLoCo, H=3 | 50 | 20 | switch | 40.5 | 49 | 17 | 16.9 | 17 | 1.00 |
| DDP, 75 tensors | 50 | 20 | switch | 40.5 | 49 | 14.5 | 9.92 | 10.5 | 1.06 |
| DiLoCo, H=3, 75 tensors | 50 | 20 | switch | 40.5 | 49 | 14.7 | 16 | 16.8 | 1.05 |
| DDP, 200 tensors | 50 | 20 | switch | 40.5 | 49 | 14.5 | 9.92 | 10.6 | 1.06 |
| DiLoCo, H=3, 200 tensors | 50 | 20 | switch | 40.5 | 49 | 14.7 | 16 | 16.8 | 1.05 |
| DDP | 200 | 20 | switch | 40.4 | 199 | 4.62 | 4.14 | 4.41 | 1.07 |
| DiLoCo, H=3 | 200 | 20 | switch | 40.4 | 199 | 4.58 | 4.5 | 4.61 | 1.02 |
| DDP, 75 tensors | 200 | 20 | switch | 40.4 | 199 | 7.07 | 5.74 | 5.58 | 0.97 |
| DiLoCo, H=3, 75 tensors | 200 | 20 | switch | 40.4 | 199 | 7.27 | 11 | 10.7 | 0.97 |
| DDP, 200 tensors | 200 | 20 | switch | 40.4 | 199 | 7.07 | 5.71 | 5.6 | 0.98 |
| DiLoCo, H=3, 200 tensors | 200 | 20 | switch | 40.4 | 199 | 7.27 | 11 | 10.7 | 0.97 |
| DDP | 1000 | 20 | switch | 40.5 | 1001 | 1.38 | 1.88 | 1.94 | 1.03 |
| DiLoCo, H=3 | 1000 | 20 | switch | 40.5 | 1001 | 1.34 | 2.66 | 2.59 | 0.97 |
| DDP, 75 tensors | 1000 | 20 | switch | 40.5 | 1001 | 5.14 | 5.07 | 5 | 0.99 |
| DiLoCo, H=3, 75 tensors | 1000 | 20 | switch | 40.5 | 1001 | 5.34 | 9.74 | 9.58 | 0.98 |
| DDP, 200 tensors | 1000 | 20 | switch | 40.5 | 1001 | 5.14 | 5.06 | 4.99 | 0.99 |
| DiLoCo, H=3, 200 tensors | 1000 | 20 | switch | 40.5 | 1001 | 5.34 | 9.74 | 9.57 | 0.98 |
| 64 KiB | 50 | 20 | switch | 40.5 | 49 | 0.136 | 0.251 | 0.246 | 0.98 |
| 1 MiB | 50 | 20 | switch | 40.5 | 49 | 0.378 | 0.412 | 0.442 | 1.07 |
| 4 MiB | 50 | 20 | switch | 40.5 | 49 | 1.15 | 1.11 | 1.11 | 1.00 |
| 16 MiB | 50 | 20 | switch | 40.5 | 49 | 4.24 | 4.2 | 4.22 | 1.00 |
| 64 KiB | 200 | 20 | switch | 40.4 | 199 | 0.124 | 0.243 | 0.244 | 1.01 |
| 1 MiB | 200 | 20 | switch | 40.4 | 199 | 0.183 | 0.282 | 0.274 | 0.97 |
| 4 MiB | 200 | 20 | switch | 40.4 | 199 | 0.373 | 0.408 | 0.422 | 1.03 |
| 16 MiB | 200 | 20 | switch | 40.4 | 199 | 1.13 | 1.09 | 1.12 | 1.02 |
| 64 KiB | 1000 | 20 | switch | 40.5 | 1001 | 0.121 | 0.241 | 0.244 | 1.02 |
| 1 MiB | 1000 | 20 | switch | 40.5 | 1001 | 0.133 | 0.248 | 0.245 | 0.99 |
| 4 MiB | 1000 | 20 | switch | 40.5 | 1001 | 0.17 | 0.274 | 0.268 | 0.98 |
| 16 MiB | 1000 | 20 | switch | 40.5 | 1001 | 0.321 | 0.597 | 0.584 | 0.98 |

With 20 ms gloo differs from the textbook ring. Gloo's chunks go in two or more segments, two under way, and the
receiver asks for each: a latency there, one back. Large messages hide some of that beside others' segments, small ones
take twice as long as in a ring. DDP's two messages under way win that back. So price for `torch.distributed` on CPUs
with `all_reduce="gloo"`; without latency the two are equal. (Left out: without latency, single messages of 1 MiB and
more are within 8 %, those of 64 KiB, of which tbf lets 128 KiB pass at once and processes take milliseconds of their
own, are not.)

The figures are medians of 3, on 2 cores of an AMD EPYC that other programs kept busy (load 5 to 12), for which the
benchmark's processes had real-time priority; torch 2.13.

## What it costs

Steps are priced in turn, those without an exchange many at once. Where a step moves all times, of nodes and links, by
the same amount and compute times are constant, all equal steps are one multiplication: 10,000 steps of 64 nodes with an
exchange in each take 0.05 s of a processor then, and 1.1 s where times are drawn anew. A dry run makes equal
exchanges once: 100 billion parameters on 128 nodes for 200 steps take 0.01 s (independent nodes) to 0.05 s (DiLoCo), or
6 s where each step draws coordinates (SPARTA), with 250 MB in all, of which 243 are Python's and torch's own. The
README's `vecgym price` takes 1.9 s beyond torch's import (medians of 3: `python benchmarks/clock.py`).
"""
