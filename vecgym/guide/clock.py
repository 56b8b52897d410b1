"""The clock: how long on your network? Train once, price everywhere

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
Timeline(1000 steps of 16 nodes: 8.74 h, 84.6 % computing)
>>> bandwidth = required_bandwidth(ledger, compute, utilization=0.95, latency="10 ms")
>>> f"{bandwidth / 1e9:.2f} Gbit/s"
'2.06 Gbit/s'

With 50 ms no bandwidth is enough: 200 messages, one for each parameter, go 30 times to the next node in a ring of 16.
With `all_reduce="halving_doubling"` they go 8 times.

>>> required_bandwidth(ledger, compute, utilization=0.95, latency="50 ms")
inf

## Networks

`Network(bandwidth, latency)` takes bits per second and seconds, or texts ("1 Gbit/s", "100 MB/s", "50 ms"): one number
for all links; `[K]`, of each node's link (`up=` and `down=` where they differ); or a matrix `[K, K]`, which
`Network.regions` makes of fast links inside and slow ones between. `all_reduce` and `all_gather` say which algorithm
carries them: "ring", "halving_doubling", "tree" or "server"; means and sums also "gloo", the ring of
`torch.distributed` on CPUs. The latency is one way, half of what a ping takes. The formulas are in `vecgym.clock.cost`.
With a matrix the ring takes the best order that is found: exactly up to 9 nodes, by a heuristic above.

>>> network = Network.regions([4, 4], inside=("400 Gbit/s", 1e-4), between=("1 Gbit/s", 0.05))
>>> round(network.seconds("mean", 1e9, num_nodes=4), 3), round(network.seconds("mean", 1e9, num_nodes=8), 1)
(0.031, 14.7)

## Compute

`Compute(0.4)` is seconds per step and node; also `[K]`, for nodes of different speed. `Compute.lognormal(0.4, sigma=0.3)`
draws them anew for each step and node; `Compute.from_flop` computes them; `Compute.measured(history)` takes those of a
recorded run on this machine.

## What overlaps

Within a step, the forward pass takes a third of the time and the backward pass two thirds, layer by layer in the order
of the parameters; each parameter counts as a layer, with a share by its size or by `Compute(shares={name: FLOP})`.

- A gradient leaves as the backward pass of its layer ends. The layer's optimizer step follows at once, so that
  parameters and movements leave then, too.
- What leaves queues on the node's link, in this order, one message for each parameter. A collective takes the links of
  its participants until its end, in both directions.
- It is needed by the next forward pass of its layer, or, if it is used `lag` steps later, by the one so many steps
  later.
- A collective begins when the last of its participants is there: with islands, of each island; in gossip, each node
  waits for its neighbours only. A message from node to node leaves when its sender is ready.
- `Compute(..., overlap=False)`: nothing overlaps.

What a code sends (top-k, quantised values) is shared among its messages by the parameters' sizes. Transfers of tensors
that are no parameters leave at the end of the backward pass.

Nodes that sit out a round (`participation`) are counted as computing, and then as waiting until the server has ended
the round, from whose result they begin a later one; nobody waits for them within it. So `seconds` are right where
nodes are equally fast; `utilization` and `per_node` do not tell resting from computing.

## Where the time goes

`timeline.seconds`, `.utilization` (computed / (computed + waited), the mean of the nodes), `.step_seconds` `[T]` and
`.per_node`. `timeline.plot()` draws who computed, sent, and waited for whom; `timeline.save_trace("run.json")` writes it
for https://ui.perfetto.dev.

>>> timeline = trainer.timeline(Network("1 Gbit/s", latency="50 ms"), Compute([0.4] * 7 + [0.8]))
>>> round(timeline.utilization, 2), timeline.per_node.waited[-2:]  # of a fast node, and of the slow one
(0.48, tensor([10.8000,  2.8000], dtype=torch.float64))

`vecgym.optimize_schedule(..., budget_seconds=60.0, network=..., compute=...)` looks for the best steps to exchange at
within that time.

## In a run

`fit(..., network=, compute=)` adds the columns `sim_seconds` and `sim_utilization` to the history, for loggers, the
progress bar and `trainer.plot(x="sim_seconds")`. What is trained does not change by a bit. `vecgym price RUN_FOLDER`
prices the checkpoint of a run from the command line.

>>> averaged = trainer.fit(strategy, num_nodes=8, max_steps=20, device="cpu", progress=False,
...                        network=Network("1 Gbit/s", latency="50 ms"), compute=Compute(0.4))
>>> round(trainer.history["sim_seconds"][-1], 6)
10.8

## How good it is

The closed forms hold to 1e-12, and a naive simulation of every message gives the same. `python benchmarks/network.py`
compares with four gloo processes in network namespaces, whose links `tc` shapes.
"""
