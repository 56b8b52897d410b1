"""Performance: what was measured, and how

Figures are for float32 and torch 2.13 on virtual machines with 2 cores of an AMD EPYC that has AVX-512. Alternatives ran in
processes of their own that took turns. The scripts in `benchmarks/` measure your own machine.

## A training step

Milliseconds per training step of all K nodes with DiLoCo (H=20, AdamW), 2 threads. Every alternative ran in a process of
its own, and they took turns; medians of 5 to 9 blocks of 20 steps; other processes used at most 0.05 cores. *loop*
is what one would write instead: K plain modules with fused AdamW, one after the other, in a process that does not import
vecgym. *fit* is a whole `Trainer.fit`, with data, history, ledger and progress bar; *compiled* the same with `compile=True`;
*bare* the step alone. *big* is one model on all K batches at once, the lower bound for AllReduce. *floor* is what the
processor needs at least: the larger of arithmetic at the rate of a large matrix product, and bytes at the bandwidth of a
copy (`python benchmarks/step_time.py --compile`).

| workload | K | loop | fit | faster | compiled | bare | floor | big | fit AllReduce | to big |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
| tiny MLP 16-32-2, batch 8 | 512 | 207 | 2.90 | 71 x | 2.14 | 2.59 | 0.38 | 1.39 | 1.99 | 1.43 |
| MLP 784-128-10, batch 32 | 64 | 39.7 | 18.0 | 2.2 x | 16.3 | 15.2 | 7.76 | 8.36 | 8.90 | 1.06 |
| CNN, 2 convolutions, batch 32 | 16 | 115 | 60.7 | 1.9 x | 85.3 | 63.6 | 17.5 | 80.8 | 86.0 | 1.06 |
| GPT, 2 layers, width 64, context 64, batch 8 | 16 | 156 | 98.1 | 1.6 x | 74.7 | 101 | 28.6 | 92.6 | 87.2 | 0.94 |
| GPT, 4 layers, width 256, context 128, batch 4 | 4 | 400 | 332 | 1.2 x | 338 | 333 | 223 | 352 | 378 | 1.07 |

Ratios move from run to run, since the machine's cores and memory are shared with others that it does not show: a loop over
the MLP takes 34 ms for some seconds, 58 for others. The same day gave 61 to 71 x for the tiny MLP (81 x and 97 x compiled),
2.2 and 4.0 x for the MLP, 1.8 and 1.9 x for the CNN, 1.6 and 1.9 x for the small GPT (2.1 x compiled, both times). Another
day, on another such machine, gave 60 x (116 x), 2.0 and 3.9 x, 1.2 and 1.3 x, 2.0 x (2.4 x), and 1.3 x for the larger GPT
(1.3 x); there the loop over the CNN took 65 ms or 105. Other days gave 72 to 92 x, 2.5 to 3.4 x, 1.6 to 1.8 x and 1.4 to
1.7 x. AllReduce took 1.2 to 2.0 times as long as *big* on the tiny MLP, 1.1 to 1.3 on the MLP, 0.9 to 1.3 elsewhere. A
plain loop beside an idle vecgym engine takes 0.92 to 1.09 times as long as without.

An evaluation computes as many batches in one call as it takes to make the Python of a call small, at most 2 GFLOP, 4 MB
to a tensor, and 32 MB of batches; each batch still has a loss of its own, whatever a model's loss is. Models that draw
random numbers, runs with `exact=True` and the loop take them in turn.

Where it is not fast: 0.5 to 1 ms of a step are spent in Python, so AllReduce takes 1.4 times as long as *big* on the
tiny MLP. Stacking cannot reduce the arithmetic of convolutions, or of a large model. Convolutions run node after node, with
the channels last in memory, which is why they are faster than in the plain loop.

The floor takes arithmetic and memory to be used at the same time, as if AdamW moved its bytes beside the products and not
after them: one after the other, the two take 1.6 floors for the MLP. Nodes in chunks whose optimizer steps right after
their gradients, on two threads, were no faster (25.8 ms in place of 24.1).

`compile=True` pays for the small GPT; in convolutions it is slower than the loop over nodes with the
channels last. Compiling the optimizer's step as well changed nothing for either GPT, and the MLP.

Nodes that may be absent: where all are present it costs nothing (1.00 and 1.01 times as long, DiLoCo and AllReduce, MLP,
K=64). With a tenth absent, a step takes 1.60 and 1.12 times as long as with a tenth fewer nodes
(`python benchmarks/availability.py`).

## Recorded operations of small models

The tables above are older than them. With them, ms per step of the tiny MLP, whole fits in processes that took turns, 2
threads, an Intel Xeon with 2 cores, load by others 0.02 cores, medians of 13 and 43 rounds (`python
benchmarks/step_time.py --workloads tiny`, and with `--nodes 8`; `GOMP_SPINCOUNT=10000`, as vecgym sets it on an idle
machine):

| K | loop | fit, `engine="vmap"` | fit | faster than vmap | faster than the loop |
|--:|--:|--:|--:|--:|--:|
| 512 | 102 | 2.06 | 1.64 | 1.25 x | 62 x |
| 8 | 1.62 | 1.07 | 0.65 | 1.65 x | 2.5 x |

The plain loop takes half as long on this processor as on the one of the tables. Recording the operations and comparing
them takes 11 to 25 ms at the start. The gradients of K = 8 take 0.15 ms in place of 0.50. Small models of all kinds earn
that back in 35 to 100 steps, so runs of fewer than 50 do without (of models with more than 100,000 parameters, fewer than
200): a fit of six steps takes 36 ms in place of 83.

Sweeps of 8 nodes of the tiny MLP, the same machine, medians of three rounds: 600 configurations of 50 steps in 1.91 s
(fitted one by one 33.8 s, from six of them, 17.7 times; a loop by hand 0.55 s), 32 configurations of 300 steps in 0.67 s
(7.1 s, 10.6 times; by hand 0.27 s, so 2.4 times as long; with `engine="vmap"` 0.82 s).

Another day, 2 x AMD EPYC, medians of three to seven rounds with quartiles up to 20 % apart: at K = 512 the loop took 324 ms,
the fit 4.65 with vmap and 3.76 without (1.24 x faster than vmap, 86 x than the loop), at K = 8 5.44, 2.13 and 1.28 (1.66 x and
4.3 x), and a start 56 and 27 ms more. 600 configurations took 3.45 s (68 s, 19.8 times; by hand 1.36 s), 32 of them 1.05 s
(14.2 s, 13.6 times; by hand 0.40 s, so 2.6 times as long). Bare steps of K = 512 took 2.20 ms, so a fit 1.7 times as long; alone
it took 2.1 to 2.4 ms in some minutes and 3.4 to 4.4 in others. Models of more than 200,000 parameters are not written down, and the MLP from 200 steps on only: MLP
2.4 x, CNN 1.7 x, GPTs 1.5 x and 1.2 x faster than the loop.

## What a step records, and an evaluation

Shares of a step of the tiny MLP (DiLoCo, AdamW, H = 20; processor time, one thread, medians of five and three fits, on a busy
2 x AMD EPYC), each part timed by itself, before rows of the history waited for one another:

| K | step, ms | reading its losses | its other columns | ledger | progress bar | learning rates | all after the kernel |
|--:|--:|--:|--:|--:|--:|--:|--:|
| 8 | 0.43 | 7.6 % | 2.1 % | 0.5 % | 0.8 % | 3.1 % | 19 % |
| 512 | 1.93 | 3.6 % | 0.9 % | 0.2 % | 0.4 % | 1.5 % | 8 % |

Reading a loss takes 6 us in a loop and 30 to 40 within a step, whose kernels have filled the caches. So on a CPU, too, up to
32 rows now get their losses together if there is no logger, `after_step` or `stop`; in each step only a sum says whether all
are finite. Fits of K = 8 take 0.91 of the processor time (24 pairs), those of K = 512 0.95 to 1.00, which is within their
spread. No more can be gained there than the shares that are left.

An evaluation of 512 examples in batches of 8 takes 4.3 ms for K = 8 and 39 ms for K = 512, 10 and 20 steps; it was 6.1 and 43
when the batches were read again each time. A loop over raw tensors, all batches in one, takes 0.6 and 33 ms. Of the 4.3 ms,
1.7 are calls of the model, 1.1 sums over batches, 0.3 distances, the rest the joining of batches: recorded operations could save
at most 1.1 ms of them. After a merge all nodes have the same parameters, and one of them is measured for all, besides
their mean, unless the model draws random numbers. FedAvg with H = 10 on digits, an evaluation every 10 steps (processor time,
one thread, medians of five pairs beside two other processes): 1.12 times faster with 8 nodes of 2,400 parameters, 1.44 times
with 64, 1.55 times with 64 of 19,000.

## Compiled, or a list

A list of recorded operations calls each of them from Python; compiled code has fewer of them and a wrapper around all. So
`compile=True` keeps the list where that is as fast: on a CPU, with `engine="auto"`, in steps of less than 30 MFLOP over all
nodes whose list has at most 64 operations. `history.settings["engine_reason"]` says so. Nothing is timed for that.

Steps of whole fits of DiLoCo (AdamW, H = 10), ms of processor time, one thread, a process for each that took turns, medians
of six blocks; 2 x AMD EPYC, beside ten other programs: the ratios hold, the times are for a busy machine. Before the rule,
which would now keep the lists in bold:

| model | K | MFLOP | operations | list | compiled | ratio |
|---|--:|--:|--:|--:|--:|--:|
| tiny MLP | 8 | 0.2 | 37 | **0.61** | 0.82 | 1.34 |
| | 32 | 0.9 | 37 | **0.82** | 1.06 | 1.29 |
| | 128 | 3.5 | 37 | **1.28** | 1.62 | 1.26 |
| | 256 | 7.1 | 37 | **2.29** | 2.56 | 1.12 |
| | 512 | 14 | 37 | **2.84** | 3.12 | 1.10 |
| | 1024 | 28 | 37 | **4.07** | 3.97 | 0.98 |
| a sweep of 32 configurations of it | 8 | 7.1 | 37 | **2.74** | 3.16 | 1.15 |
| of 128 | 8 | 28 | 37 | **4.54** | 4.66 | 1.02 |
| MLP, 16-16-16-16-16-2 | 8 | 0.4 | 64 | **1.46** | 2.15 | 1.47 |
| MLP, 64-128-10 | 8 | 7.3 | 37 | **1.06** | 1.22 | 1.15 |
| | 64 | 58 | 37 | 4.45 | 4.31 | 0.97 |
| MLP, 784-128-10 | 8 | 156 | 37 | 4.84 | 4.75 | 0.98 |
| GPT, 1 layer, width 16 | 4 | 7.1 | 169 | 2.90 | 2.34 | 0.81 |
| GPT, 2 layers, width 32 | 4 | 94 | 274 | 7.85 | 6.40 | 0.82 |

## Against JAX

The same training in JAX 0.10 and optax: a jitted, vmapped step of all nodes and a call for each exchange, or one
`lax.scan` over H steps with all examples on the device. Both sides compute the same losses, to 4e-16 in float64 (the GPT
to 4e-9). ms per step, 2 threads of an AMD EPYC, medians of five rounds with half the interquartile range at most 5 %
(11 % for K = 8), load by others 0.02 cores (`python benchmarks/against_jax.py`):

| | K | vecgym | JAX | JAX, scan | JAX / vecgym | scan / vecgym | scan catches up after, steps |
|---|--:|--:|--:|--:|--:|--:|--:|
| tiny MLP | 512 | 1.71 | 1.91 | 1.62 | 1.12 | 0.95 | 8686 |
| | 8 | 0.53 | 0.13 | 0.05 | 0.25 | 0.09 | 1641 |
| MLP | 64 | 15.5 | 16.7 | 15.3 | 1.07 | 0.98 | 3605 |
| CNN | 16 | 46.8 | 113 | 80.5 | 2.41 | 1.72 | never |
| GPT | 16 | 71.0 | 183 | 130 | 2.58 | 1.83 | never |
| sweep of 32 tiny configurations | 8 | 2.65 | | 0.84 | | 0.32 | 451 |

JAX compiles for 0.8 to 1.8 s first, vecgym starts in 0.02 to 0.09 s: hence the last column. The scan evaluates nothing,
keeps the losses only, and cannot be stopped, logged or resumed midway. A step of vecgym is some 40 calls of kernels and the
Python between them, about 0.5 ms whatever the model; a compiled program has neither. A few tiny nodes, trained for long, are
faster in JAX.

One flat tensor of all parameters would not change that: the sweep of a model whose parameters are a single tensor, so that
optimizer, exchange and put-back are one kernel each, takes 1.00 ms a step beside gradients and evaluations, and 1.06 with
four tensors, of 2.1 ms in all (processor time, one thread, medians of 12 turns).

## A whole run

`Trainer.fit` takes up to 14 % longer than its bare steps, 18 to 34 % in some runs of the MLPs. With epochs of four steps
it takes 0.86 to 1.11 times (tiny) and 0.95 to 1.17 times (MLP) as long as bare steps, which cycle through more batches. A
whole process, from `python` to the end of 420 steps of the MLP on 16 nodes, takes 3.5 s on the quietest machine, of which
importing torch takes 1.3, and 5.5 to 8.3 s on others, where torch takes 1.6 to 2.9; vecgym 0.3 (`python
benchmarks/scaling.py`).

## Thousands of nodes

One thread of an AMD EPYC with 2 cores, torch 2.13; processor time, since other programs ran, the median of two blocks
of 4 steps. DiLoCo with H=4. Memory is the peak of the resident memory above torch and Python, with the evaluation's
distance of the nodes; beside it `estimate_memory`. A process for each row
(`python benchmarks/scaling.py --threads 1 --H 4 --repeats 2`):

| DiLoCo | K | ms per step | us per node | peak MB | estimated MB |
|---|--:|--:|--:|--:|--:|
| tiny MLP | 10 | 1.9 | 187 | 0.25 | 0.18 |
| | 100 | 1.9 | 19 | 2.1 | 1.7 |
| | 1000 | 6.6 | 6.6 | 20 | 17 |
| | 10,000 | 45 | 4.5 | 219 | 169 |
| MLP | 2 | 2.5 | 1270 | 8.8 | 7.9 |
| | 20 | 15 | 762 | 63 | 61 |
| | 200 | 145 | 725 | 594 | 590 |
| | 2000 | 1080 | 541 | 5888 | 5883 |

![Left, processor time of a step against K for two models under DiLoCo and AllReduce; right, memory at the peak, measured and estimated; both grow in proportion to K where K copies of the parameters are kept](../../notebooks/figures/scaling.png)

A sweep of 32 configurations on 8 nodes takes 0.8 to 1.0 s for the tiny MLP, against 8.5 to 9.2 s one after the other: 9 to
11 times faster. For the MLP it takes 6.3 s against 9.1. Configurations of AllReduce for the MLP are trained alone: in stacks
they took 1.6 times as long (`python benchmarks/sweep.py --stacks 1 8`).

A step of Muon on 32 nodes with 8 matrices of 64 x 64 takes 17 ms, one of torch's own node by node 130, on a processor that
has products in bfloat16. Others emulate these: there Muon takes 0.7 to 0.8 s, hardly less than torch's. A step of
`FullPrecisionMuon` takes 37 to 84 ms everywhere (`python benchmarks/optimizers.py`).

## Against EXO Gym

[EXO Gym](https://github.com/exo-explore/gym) at 9fa323c, one process per node. Both ran through their trainers, with
data loading and logging; medians of three runs (`python benchmarks/against_exogym.py --exogym CHECKOUT`).

| workload, K = 16 | first step: EXO Gym | vecgym | ms per step: EXO Gym | vecgym | times faster |
|---|--:|--:|--:|--:|--:|
| MLP | 22.2 s | 1.4 s | 30.2 | 4.3 | 7.0 |
| CNN | 23.5 s | 1.6 s | 116 | 52.2 | 2.2 |
| GPT | 23.9 s | 1.6 s | 132 | 78.8 | 1.7 |

## Exchanges

The share of a step that the exchange takes (H=20, p=0.005; `python benchmarks/strategies.py`):

| | MLP, K=64 | GPT (2 layers), K=16 |
|---|--:|--:|
| FedAvg | 2.9 % | 0.4 % |
| DiLoCo | 5.0 % | 0.5 % |
| SPARTA | 11 % | 1.9 % |
| gossip on a ring | 29 % | 2.9 % |
| DeMo | 76 % | 19 % |

On the MLP, DeMo's exchange is 2.3 times faster than a loop over nodes and parameters, on the GPT 2.4 to 2.7 times.

## Real processes

The MLP's step on 16 nodes, in ms (`python benchmarks/backends.py`):

| | stacked | 2 forked processes | 16 forked processes |
|---|--:|--:|--:|
| DiLoCo | 3.3 | 3.8 | 15 |
| AllReduce | 2.4 | 6.3 | 73 |

Two forked processes start in 0.06 s, two new interpreters in 2.0 s.

One process per node, as one would write it for `torch.distributed`, with plain modules, took 10.7 and 71 ms when vecgym took
5.0 and 2.4, and 22.8 s to the first step where vecgym took 1.4 (`python benchmarks/processes.py`).

Under torchrun, 64 nodes of the MLP on W processes that share the two cores, in ms (`python benchmarks/torchrun.py`):

| | stacked | W = 1 | W = 2 | W = 4 |
|---|--:|--:|--:|--:|
| DiLoCo, H=20 | 20.6 | 21.5 | 20.9 | 23.2 |
| AllReduce | 11.8 | 12.1 | 21.7 | 29.7 |

## On a busy machine

On Linux, torch's threads (GNU's OpenMP) wait for one another in a busy loop of 3 ms by default. When other programs
want the same cores, that keeps the cores from the very threads that they wait for. `import vecgym` therefore shortens
the loop to 0.1 ms (`GOMP_SPINCOUNT=10000`); where the machine is busy already, and on other systems, they sleep at
once (`OMP_WAIT_POLICY=PASSIVE`). If your environment says how threads wait (`OMP_WAIT_POLICY`, `GOMP_SPINCOUNT` or
`KMP_BLOCKTIME`), it stays so. torch reads it when it is imported. Where you import torch first, a run on a busy machine
starts a few idle threads instead: GNU's OpenMP hardly spins in a process that has more threads than there are cores.
How threads wait changes no bit. How many there are does, so vecgym never changes their number by itself: on a busy
machine it warns, once, that `torch.set_num_threads(1)` may be faster.

A step with two threads, in ms, alone and next to two programs that keep both cores busy. Half of the cores is then a
fair share, and twice the time a fair price:

| threads | 512 nodes of the tiny model, AllReduce | 64 nodes of the MLP, DiLoCo |
|---|--:|--:|
| spin for 3 ms, OpenMP's default | 1.2 and 5.7 | 13.2 and 49.0 |
| spin for 0.1 ms, vecgym's default | 1.1 and 4.9 | 13.1 and 30.2 |
| sleep | 2.1 and 3.7 | 14.3 and 31.1 |
| idle threads beside them | 1.8 and 3.3 | 14.6 and 34.1 |

`python benchmarks/busy.py` has more settings. With 8 nodes of the MLP, spinning for 3 ms took up to 45 times as long
next to two busy programs, from run to run, and sleeping at most 2.1 times.

`backend="processes"` starts new interpreters with that setting; forked processes have one thread.

## On real data: Tiny Shakespeare

The setting is nanoGPT's for a CPU: a character-level GPT with 4 layers, 4 heads, width 128, context 64 and no dropout,
12 windows a step for 2000 steps, AdamW with warm-up and cosine decay. nanoGPT reports a validation loss of 1.88 for it.
Two things differ here: the initial matrices are larger (see `vecgym.models.GPT`), and the loss is that of the averaged
model at the end on the whole last tenth of the text, not on a sample of it. Four nodes read 3 windows each, so the same
amount of text goes into every row.

| | K | windows per node | loss on the whole validation part | sent per node | less |
|---|--:|--:|--:|--:|--:|
| one node | 1 | 12 | 1.769 | 0 | - |
| AllReduce | 4 | 3 | 1.769 | 9.65 GB | 1 x |
| FedAvg, H=50 | 4 | 3 | 1.958 | 193 MB | 50 x |
| DiLoCo, H=50 | 4 | 3 | 1.877 | 193 MB | 50 x |
| SPARTA, p=0.005 | 4 | 3 | 1.979 | 48.3 MB | 200 x |
| SPARTA + DiLoCo, p=0.005, H=50 | 4 | 3 | 1.868 | 241 MB | 40 x |
| DeMo | 4 | 3 | 1.814 | 511 MB | 18.9 x |

![Losses of the seven runs, left against optimizer steps, right against bytes sent; one node and AllReduce coincide](../../notebooks/figures/shakespeare.png)

*Sent* is what a node's link carries: DeMo's code goes to each of the three others. This is one seed, and only DeMo's
learning rate was tuned. The markers in the figure are evaluations during the runs, always on the same 96 windows of the
validation part, which is why they differ from the table.
`python benchmarks/shakespeare.py --text FILE` prints the table and draws the figure in about half an hour on one core.

## The field's algorithms on the same text

A smaller GPT (2 layers, width 48, context 32), 4 windows a node and step, 300 steps, H = 15. Each algorithm takes the
best of three learning rates of its inner optimizer (*rate*), by one seed, and is trained with three others: mean and
standard deviation. Outer optimizers are those of the papers, and were not tuned. *Seconds* on a network of 1 Gbit/s and
10 ms, with 50 ms of computing a step, for messages of a model of 100 million parameters, 25 MiB each
(`python benchmarks/zoo.py --text FILE`).

| algorithm | K | rate | validation loss | sent per node | seconds |
|---|--:|--:|--:|--:|--:|
| AllReduce | 4 | 0.02 | 2.289 ± 0.007 | 108 MB | 1573 |
| FedAvg | 4 | 0.006 | 2.426 ± 0.011 | 7.22 MB | 119 |
| DiLoCo | 4 | 0.006 | 2.473 ± 0.019 | 7.22 MB | 119 |
| DiLoCo, mean a round late | 4 | 0.002 | 3.750 ± 0.152 | 7.22 MB | 100 |
| Eager DiLoCo | 4 | 0.006 | 3.057 ± 0.082 | 7.22 MB | 100 |
| Streaming | 4 | 0.006 | 2.432 ± 0.016 | 7.22 MB | 121 |
| Streaming, tau=1 | 4 | 0.006 | 2.424 ± 0.014 | 7.22 MB | 115 |
| Streaming, tau=5 | 4 | 0.006 | 2.433 ± 0.015 | 7.22 MB | 105 |
| Streaming, 4 bits | 4 | 0.006 | 2.434 ± 0.016 | 1.81 MB | 40 |
| SparseLoCo | 4 | 0.006 | 2.477 ± 0.016 | 198 kB | 18 |
| MuLoCo | 4 | 0.02 | 2.329 ± 0.028 | 7.22 MB | 119 |
| DiLoCo, K=1 | 1 | 0.002 | 2.583 ± 0.029 | 0 B | 15 |
| DiLoCo, K=8 | 8 | 0.006 | 2.448 ± 0.015 | 8.43 MB | 146 |
| MuLoCo, K=1 | 1 | 0.005 | 2.532 ± 0.037 | 0 B | 15 |
| MuLoCo, K=8 | 8 | 0.02 | 2.244 ± 0.014 | 8.43 MB | 146 |
| GPA | 4 | 0.02 | 2.306 ± 0.006 | 108 MB | 1573 |
| NoLoCo | 4 | 0.006 | 2.428 ± 0.011 | 9.63 MB | 148 |
| Local Adam | 4 | 0.006 | 2.415 ± 0.009 | 21.7 MB | 328 |
| DES-LOC | 4 | 0.006 | 2.422 ± 0.010 | 10.5 MB | 166 |
| PALSGD | 4 | 0.006 | 2.487 ± 0.014 | 7.22 MB | 119 |
| SPARTA | 4 | 0.006 | 2.458 ± 0.014 | 1.09 MB | 47 |
| SPARTA + DiLoCo | 4 | 0.006 | 2.471 ± 0.018 | 8.31 MB | 151 |
| Gossip, ring | 4 | 0.02 | 2.348 ± 0.004 | 144 MB | 1948 |
| DeMo | 4 | 0.003 | 2.415 ± 0.005 | 10.7 MB | 175 |

With torch's Muon (`muon="torch"`) MuLoCo's rows are 2.279, 2.520 and 2.228.

Rows with other K read the same from each node, so 1/4 and twice the text. Findings of the papers, and whether they
appear in so short a training of so small a model. (The mean of the round before is unstable with DiLoCo's outer
optimizer in rounds as short as these, and the eager updates are less so.)

| finding | difference | here |
|---|--:|--:|
| Streaming about equals DiLoCo | -0.042 ± 0.014 | yes |
| overlap costs little at tau = 1 | -0.008 ± 0.012 | yes |
| overlap costs little at tau = 5 | +0.001 ± 0.013 | yes |
| 4-bit outer gradients lose nothing | +0.002 ± 0.013 | yes |
| eager beats naive delay | -0.693 ± 0.100 | yes |
| MuLoCo degrades less with K (8 against 1) than DiLoCo | -0.152 ± 0.030 | yes |

More comparisons: `benchmarks/mnist.py` and `benchmarks/cifar10.py` on images (MNIST where torchvision has it on disk,
else scikit-learn's digits); `benchmarks/federated.py --num-clients 100 --island-size 10` on islands, partial
participation and server optimizers with heterogeneous data; `benchmarks/diloco_scaling.py` for DiLoCo on 1, 2, 4 and 8 nodes at equal
tokens. All take `--quick`.
"""
