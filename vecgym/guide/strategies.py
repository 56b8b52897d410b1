"""Strategies: what the nodes exchange, and when

A strategy is an inner optimizer and a list of exchanges. Every node takes its own optimizer step; exchanges of gradients
come before it, and exchanges of parameters and of the optimizer's moments after it.

The examples of this page use 8 nodes and a small classifier:

>>> import torch, vecgym
>>> from vecgym import OptimSpec, Trainer
>>> from vecgym.core import tree
>>> from vecgym.simulation import spread
>>> from vecgym.models import Classifier
>>> from vecgym.strategy import (
...     AllReduceStrategy, Compressed, DiLoCoStrategy, Exchange, Mean, Outer, Sparse, Stage, Strategy, all_reduce, every,
... )
>>> _ = torch.manual_seed(0)
>>> x = torch.randn(1024, 20)
>>> dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
>>> model = Classifier(torch.nn.Linear(20, 4))
>>> trainer = Trainer(model, dataset)

## The built-in strategies

P parameters of b bytes, K nodes, N = K - 1 others; AR = 2 N / K · b · P is what each node sends in a ring all-reduce. A
code (compressed message) goes to each other node. A movement (pseudo-gradient) is a node's change since an exchange.

| strategy | what the nodes exchange | bytes sent per node and step |
|---|---|--:|
| `AllReduceStrategy` (`SimpleReduceStrategy`) | the mean gradient, every step: DDP | AR |
| ... with `average=Ring("bfloat16")`, `QuantisedRing()`, `AllToAll()` | the same as real all-reduces make it: sums of few bits | AR / 2, ≈ AR / 4, ≈ AR / 4 |
| `GPAStrategy` | the mean gradient, every step, at a point near a slow average of the parameters: a smooth DiLoCo | AR |
| `FedAvgStrategy` | the mean of the parameters every H steps, over all nodes or random islands | AR / H |
| ... with `participation=0.1` | each round, a new sample of nodes starts from the server's parameters and sends its own back | b · P / H per participant |
| ... with `server_optim="avgm"`, `"adam"`, `"yogi"` or `"adagrad"` | one step of a server optimizer on the participants' mean movement; `proximal_mu` adds FedProx's term | b · P / H per participant |
| `SCAFFOLDStrategy` | the parameters and the mean gradient of each node's round, through a server: exact for non-IID data, with local steps | 2 b · P / H per participant |
| `MimeStrategy` | the state of the server's optimizer, frozen within a round, and the mean gradient at its parameters; `lite=True` without the correction | 2 b · P / H per participant |
| `FedNovaStrategy` | the nodes' movements, each divided by its amount of work: unequally many local steps, `local_steps=`, momenta, a proximal term | AR / H, and a number |
| `FedDynStrategy` | the mean of the parameters; a linear and a quadratic term in each node's loss: exact for non-IID data | AR / H |
| `ScaffnewStrategy` | the mean of the parameters where a coin says so; a correction of each gradient: the same | p · AR |
| `DiLoCoStrategy` | one step of an outer optimizer on the nodes' mean movement, every H steps | AR / H |
| ... with `compression="topk"`, `"int8"` and others | the movements, compressed, with error feedback | N times the code's / H; `"powersgd"`: 2 N / K times |
| ... with `correction="heloco"` or `"median_norm"` | the movements, turned where they point against the momentum, or shrunk to the median norm | AR / H |
| `EDiTStrategy` | the same, with a small weight for large movements, none for anomalies, and a clip | AR / H |
| `DSMStrategy` | a step by the sign of a momentum of the nodes' mean movement, every H steps | AR / H |
| `LocalAdamStrategy` | the means of the parameters and of Adam's two moments, every H steps | 3 AR / H |
| `DESLOCStrategy` | the same, at different periods, H, Hu = 3 H and Hv = 6 H | 1.5 AR / H |
| `MuLoCoStrategy` | DiLoCo with Muon for hidden matrices and AdamW for all else | AR / H |
| `PALSGDStrategy` | DiLoCo with random steps towards the outer parameters, in place of gradient steps | AR / H |
| `NoLoCoStrategy` | an outer step over random pairs or groups of nodes, every H steps; each node has its own outer state | 2 b · P / H |
| `StreamingDiLoCoStrategy` | DiLoCo's outer step for a fragment of the model at a time, used `delay` steps later, while the nodes keep training | AR / H |
| ... with `bits=4` | the movements as floats of four bits | N P / 2 H |
| `EagerDiLoCoStrategy` | the mean movement, used a round later, and a node's own part of it at once | AR / H |
| `SparseLoCoStrategy` | the k largest movements of each chunk, two bits each and 12 for the place, with error feedback | N k (2 + 12) / 8 per chunk, / H |
| `SPARTAStrategy` | the mean of a random fraction p of the parameters, every step, optionally `delay` steps late; `correct_delay` (LOSCAR) keeps a node's movement since | p · AR |
| ... with `compression_method="topk"`, `quantization_bits=8` | the parameters that moved most, in 8 bits | ≈ 5 N p P |
| `SPARTADiLoCoStrategy` | both | p · AR / `sparta_interval` + AR / H |
| `GossipStrategy` | a weighted mean with the neighbours in a ring, torus, exponential graph, random matching, or any doubly stochastic matrix | degree · b · P / `every` |
| `GradientTrackingStrategy` | the parameters and an estimate of the mean step, with the neighbours: exact for non-IID data | 2 degree · b · P |
| `D2Strategy`, `ExactDiffusionStrategy` | the parameters, corrected by the last movement, with the neighbours: the same at half the bytes, in symmetric graphs | degree · b · P |
| `QGMStrategy` | the parameters, with the neighbours; a momentum of what they then are | degree · b · P |
| `RelaySumStrategy` | sums of all parameters, passed along the links of a tree: exact for non-IID data | AR |
| `MATCHAStrategy` | the parameters, along matchings of the graph that are drawn in each step | 2 b · P Σ p links / K |
| `SGPStrategy` | shares of the parameters and of a weight, along directed links: push-sum | out-degree · b · P |
| `CHOCOStrategy` | codes of the parameters' distance to an estimate that the neighbours have | degree times the code's |
| `DeMoStrategy` | the k strongest cosine components of each chunk of a local momentum, every step; the sign of their mean is the update | N k · (8 + b) per chunk |
| `AsyncStrategy` | each node's movement, at its own time: a server handles it when it arrives, as `OuterOptimizer`, `DelayedNesterov`, `FedBuff`, `MLA` or `HeLoCo`; `dylu`, grace, staleness, `delay_threshold` | b · P / H, and as many received |
| `HALoSStrategy` | the same with a server in each region, and a global one | b · P / H |
| `DecoupledDiLoCoStrategy` | fragments of the model, at each node's own time: a server merges each when a quorum has sent it | b · P / H |
| `ADPSGDStrategy` | the mean with one random neighbour, after each step of a node | 2 b · P |
| `Strategy`, `CommunicateOptimizeStrategy` | the values of its exchanges | as the ledger counts |

The docstring of each strategy has the update rule in the paper's symbols, its state, its bytes, and every deviation from
the paper.

>>> averaged = trainer.fit(DiLoCoStrategy("adamw", H=5, lr=3e-3), num_nodes=8, max_steps=10)
>>> [(transfer.step, transfer.operation) for transfer in trainer.ledger]
[(4, 'mean'), (9, 'mean')]

## Clients with non-IID data

With local steps each node drifts towards the optimum of its own data, and at a constant rate their mean stops away
from the optimum of all. SCAFFOLD corrects each step by the difference between the mean gradient of all nodes and the
node's own, so that theta reaches it, also with sampled clients. Here the loss is the square of the distance from each
node's number times its weight, and the optimum is the weighted mean of 0, 1 and 3.25, which is 2:

>>> from vecgym.strategy import FedAvgStrategy, SCAFFOLDStrategy
>>> class Weighted(torch.nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
...     def forward(self, batch):
...         return (batch[:, 0] * (self.x - batch[:, 1]) ** 2).mean() / 2
>>> clients = [torch.tensor([[weight, x]] * 8).double() for weight, x in ((1.0, 0.0), (3.0, 1.0), (4.0, 3.25))]
>>> unlike = Trainer(Weighted(), lambda rank, num_nodes, train: clients[rank])
>>> for kind in (FedAvgStrategy, SCAFFOLDStrategy):
...     found = unlike.fit(kind("sgd", H=5, lr=0.2), num_nodes=3, max_steps=200, batch_size=8)
...     print(f"{kind.__name__:16} {found.x.item():.6f}")
FedAvgStrategy   1.592450
SCAFFOLDStrategy 2.000000

| nodes | reach the optimum of non-IID data | stop near it |
|---|---|---|
| in rounds | `SCAFFOLDStrategy`, `FedDynStrategy`, `ScaffnewStrategy`; `MimeStrategy` with plain SGD and all nodes | `FedAvgStrategy`, `FedNovaStrategy`, `MimeStrategy(lite=True)`, DiLoCo |
| with neighbours | `GradientTrackingStrategy`, `D2Strategy`, `ExactDiffusionStrategy`, `RelaySumStrategy` | `GossipStrategy`, `QGMStrategy`, `SGPStrategy`, `CHOCOStrategy`, `MATCHAStrategy` |

## Which bytes

There are two counts. They agree on the savings of rarer exchanges, and not on those of a code.

- `ledger.total_bytes` and `total_received_bytes`, and in the history `bytes_total` and `bytes_received_total`: the bytes
  on a node's link, including those that it forwards. Without a server all that is sent is received. Tables, figures,
  sweeps and the clock use this count.
- `ledger.total_payload_bytes`, `bytes_payload_total`: the bytes that a node hands to the collectives. Papers report this
  count: DeMo's 110.32 MB a step, SparseLoCo's factor of 146.

Mean and sum can be taken on the way, so that a link carries at most twice the payload, however many nodes there are. Codes
cannot be added: each goes to each of the others. (PowerSGD's two factors are averaged, as values are.) On 64 nodes, 16,040 parameters in 40 tensors, bytes a step:

>>> from vecgym.strategy import DeMoStrategy
>>> forty = torch.nn.ParameterList(torch.zeros(401) for _ in range(40))
>>> compared = {
...     "DDP": AllReduceStrategy("sgd"), "DiLoCo": DiLoCoStrategy("sgd", H=10),
...     "int8 DiLoCo": DiLoCoStrategy("sgd", H=10, compression="int8"),
...     "DeMo": DeMoStrategy(compression_topk=25, compression_chunk=512),
... }
>>> for name, strategy in compared.items():
...     ledger = vecgym.dry_run(forty, strategy, num_nodes=64, max_steps=10)
...     print(f"{name:12} payload {ledger.total_payload_bytes / 10:8,.0f}  sent {ledger.total_bytes / 10:9,.1f}")
DDP          payload   64,160  sent 126,315.0
DiLoCo       payload    6,416  sent  12,631.5
int8 DiLoCo  payload    1,620  sent 102,060.0
DeMo         payload   12,000  sent 756,000.0

By payload int8 saves three quarters of DiLoCo's bytes. Over a link it takes 8 times as many, and DeMo 6 times as many as
DDP. On fewer than 8 nodes int8 saves there, too: (K - 1) P against 8 (K - 1) / K P. Such an exchange is cheaper with:

- A store, to which each node's code goes up once, and from which the others come down, as on Templar's network:
  `Network(..., all_gather="server")`. A run with that network counts so; `ledger.routed(network.routes)` counts a ledger
  anew. A mean through a server, `all_reduce="server"`, is b up and b down.
- A `ServerMean`: codes go up, and the average comes down.
- Another algorithm. PRIME adds codes of eight bits in a ring, and encodes every partial sum anew (`QuantisedRing`);
  torchft sends such codes to whoever adds them up, and encodes the sums (`AllToAll`). Both take a quarter of float32's
  bytes on any number of nodes, and give other values, since sums are rounded too.

With islands a node's code goes to those of its island, with a graph to its neighbours.

## Which precision

A `Mean` of bfloat16 is summed in float32 and rounded once, and a `Compressed` one has exact sums of codes. No ring does
that: there each partial sum is rounded before it is sent on. Of 256, 1, 1 and 1 in bfloat16 torch's all-reduce on four
gloo processes makes 256 in half of the coordinates and 260 in the others. `Ring("bfloat16")` has these bits:

>>> from vecgym.collectives import StackedCollectives
>>> from vecgym.simulation import Part
>>> from vecgym.strategy import Ring
>>> four, values = Part.alone(StackedCollectives(4)), torch.tensor([256.0, 1.0, 1.0, 1.0]).bfloat16()
>>> values = {"w": values[:, None].expand(4, 8)}
>>> (4 * Mean()(values, four)["w"]).tolist(), (4 * Ring("bfloat16")(values, four)["w"]).tolist()
([[260.0, 260.0, 260.0, 260.0, 260.0, 260.0, 260.0, 260.0]], [[260.0, 260.0, 256.0, 256.0, 256.0, 256.0, 260.0, 260.0]])

**A study of low precision must use it**: one whose subject is the precision of an all-reduce, or which compares codes on
many nodes, gets errors that are too small otherwise. `AllReduceStrategy(average=Ring("bfloat16"))` exchanges gradients
so, `DiLoCoStrategy(average=QuantisedRing())` movements as PRIME does, `DiLoCoStrategy(average=AllToAll())` as torchft.

>>> averaged = trainer.fit(AllReduceStrategy("adamw", lr=3e-3, average=Ring("bfloat16")), num_nodes=8, max_steps=10)

![Error of the mean against 2 to 256 nodes, for bfloat16, int8 and fp8, above of unrelated values, below of values that are alike: encoded once, at every hop, and twice](../../notebooks/figures/rings.png)

*Unrelated* values are normal numbers, as noisy gradients; *alike* are those that differ by a tenth from node to node
(`python benchmarks/rings.py`). Encoded once, the relative error of a mean of unrelated values is that of one code for any
K, 0.0017, 0.010 and 0.026, and encoded twice at most sqrt(2) times that. In a ring it is about sqrt(K / 2) times that: it
grows with K to the power of 0.45, 0.42 and 0.47 from 8 nodes on, to 0.019, 0.084 and 0.31 on 256. (`QuantisedRing` grows
less here, since its 512 segments are so short that many values have a bin for themselves.) Of alike values the errors of
the nodes' own codes cancel, and those of sums do not. In bfloat16 the ring's error is then 7 % on 256 nodes, where one
node's value is no larger than the last digit of the sum. On 8 nodes or fewer a ring's error is at most three times that of
values encoded twice; in float32 it is below 1e-6 on 256.

## What is certain

The source of each rule, the program that it was compared with, and the source of the defaults. *numbers*: the authors'
program was run, and a test compares vecgym with its results (`tests/test_authors.py`, if no other place is named). *read*:
its source was compared by eye. Defaults named *ours* have no source: choose them for your problem.

| algorithm | rule from | code compared | defaults from |
|---|---|---|---|
| `AllReduceStrategy` | arXiv 2006.15704 | torch's DDP: numbers (`tests/test_ddp.py`) | torch |
| ... with `Ring` | gloo/allreduce.cc | torch's all-reduce with gloo: its bits (`tests/test_rings.py`) | no default |
| ... with `QuantisedRing` | the code | PrimeIntellect-ai/prime: numbers | the code |
| ... with `AllToAll` | the code | meta-pytorch/torchft: numbers | the code |
| `GPAStrategy` | 2512.17131; with `decay="code"` the code | facebookresearch/optimizers: numbers | the code; `decay` the paper |
| `FedAvgStrategy` | 1602.05629 | EXO Gym: read | ours: H = 1 |
| ... with `server_optim` | 2003.00295; "avgm" 1909.06335 | none | tau the paper; rates and betas ours |
| ... with `proximal_mu` | 1812.06127 | none | no default |
| `SCAFFOLDStrategy` | 1910.06378, option II; for changing rates ours | alpemreacar/FedDyn: read; it divides by the first rate | ours: H = 100 |
| `MimeStrategy` | 2008.03606; the code | google/fedjax: read | ours: AdamW, H = 100 |
| `FedNovaStrategy` | 2007.07481; for changing rates ours | JYWa/FedNova: read | ours |
| `FedDynStrategy` | 2111.04263 | alpemreacar/FedDyn: read | alpha the code's range; H ours |
| `ScaffnewStrategy` | 2202.09357, algorithm 2 | none was found | ours |
| `DiLoCoStrategy` | 2311.08105 | torchft, EXO Gym, diloco-sim: read | outer optimizer the paper; H = 100 ours |
| ... with `correction="heloco"` | as `HeLoCo`, for nodes that wait: ours | as `HeLoCo` | as `HeLoCo` |
| ... with `correction="median_norm"` | the code; 2603.08163 | tplr-ai/templar: numbers | no default |
| ... with `restart=S` | 2605.28585 | none was found | no default; S = 3 in the paper's figures |
| `EDiTStrategy` | the code; 2412.07210 | intelligent-machine-learning/atorch: read | the code; outer optimizer its docs; H ours |
| `DSMStrategy` | 2411.17866 | shuhuayu/dist-sign-momentum: read | the code; H its examples |
| `LocalAdamStrategy` | 2409.13155 | none | ours |
| `DESLOCStrategy` | 2505.22549 | none | Hu, Hv the paper; H ours |
| `MuLoCoStrategy` | the code; 2505.23725 | bentherien/muloco-1: numbers; facebookresearch/MuLoCo: read | outer optimizer and H the paper, momentum the code; lr, adamw_lr, weight decay, AdamW's betas and which tensors are matrices ours |
| `PALSGDStrategy` | 2504.18454 | none was found | outer optimizer DiLoCo's; p, pull and H ours |
| `NoLoCoStrategy` | 2506.10911 | gensyn-ai/noloco: read | the code; but gamma = 1 ours, the code's is its outer_lr, 0.7 |
| `StreamingDiLoCoStrategy` | 2501.18512 | torchft: its own fixtures (`tests/test_streaming.py`); MaxText: read | the paper; H ours |
| `EagerDiLoCoStrategy` | 2502.12996 | none | outer optimizer DiLoCo's; H ours |
| `SparseLoCoStrategy` | 2508.15706 | tplr-ai/templar: read | the paper and the code |
| `SPARTAStrategy`, `SPARTADiLoCoStrategy` | openreview stFPf3gzq1; `correct_delay` 2605.20866 | EXO Gym, diloco-sim: read | the paper and EXO Gym |
| `GossipStrategy` | 1705.09056 | none | ours |
| `GradientTrackingStrategy` | 1607.03218; `order="adapt_then_combine"` the code | epfml/relaysgd: read | ours |
| `D2Strategy` | 1803.07068; for changing rates the code | epfml/relaysgd: read | ours |
| `ExactDiffusionStrategy` | 1702.05122 | none | ours |
| `QGMStrategy` | 2102.04761, algorithm 1 | epfml/quasi-global-momentum: read | the code |
| `RelaySumStrategy` | 2110.04175 | epfml/relaysgd: read | chain ours |
| `MATCHAStrategy` | 1905.09435 | JYWa/MATCHA: read | budget the code's examples |
| `SGPStrategy` | 1811.10792, algorithm 1 | none | the code's graph, mirrored |
| `CHOCOStrategy` | 1902.00340, algorithm 2; `order="consensus_first"` 1907.09356 | none | consensus the code of the latter; codec ours |
| `DeMoStrategy` | 2411.19870; the code | bloc97/DeMo: read | the code |
| `AsyncStrategy` | 2401.09135 | none | outer optimizer DiLoCo's; H ours |
| ... with `delay_threshold` | 2501.16168 | a simulator of the authors: read | no default |
| ... with `DelayedNesterov` | 2401.09135, algorithm 3 | utnslab/halos: numbers, within HALoS | lr and momentum DiLoCo's; buffer and c the paper |
| ... with `FedBuff` | 2106.06639 | facebookresearch/FLSim: read; it sums the buffer, so its lr is ours / `buffer`, and divides the weights by that of the usual staleness | buffer the paper and FLSim's example; lr = 1 ours (FLSim's 0.001, its example's 0.7) |
| ... with `MLA` | the code; openreview 4O8nzTkHPI | aaasif-isu/panofabric-engine, a third party's: read | the code |
| ... with `HeLoCo` | the code; 2606.00271 | PanocularAI/panofabric-engine: numbers | the code and its example: lr 0.7, momentum 0.9, rho 1 / sqrt(K) |
| `HALoSStrategy` | 2506.04531 | utnslab/halos: numbers | the code's script |
| `ADPSGDStrategy` | 1710.06952 | none | ours |
| `DecoupledDiLoCoStrategy` | 2604.21428 | none | the paper, but for `quorum`, `tokens` and the inner optimizer |

Where a paper and its authors' program differ, the docstring says how. Each strategy is also tested against a plain loop
(`tests/reference/`), which finds errors of the code, and not misreadings of the paper.

## Other names

Algorithms that are settings of these strategies (a test has each, written out in plain loops):

| name | here |
|---|---|
| SlowMo (1910.00643) | `DiLoCoStrategy("sgd", OptimSpec("sgd", lr=alpha, momentum=beta), H)`, for a constant inner rate gamma |
| BMUF (Chen and Huo, 2016) | the same, with lr = zeta and momentum = eta |
| BMUF, Nesterov | the same, with `nesterov=True` |
| Lookahead (1907.08610) | `DiLoCoStrategy(inner, OptimSpec("sgd", lr=alpha), H)` with one node |
| OpenDiLoCo (2407.07852) | DiLoCo with a code of half precision: `Exchange(Outer(Compressed(Mean(), "float16", error_feedback=False)), every=H)` |
| Qsparse-local-SGD (1906.02367) | `DiLoCoStrategy("sgd", OptimSpec("sgd", lr=1.0), H, compression=TopK(fraction))` |
| post-local SGD (1808.07217) | `FedAvgStrategy("sgd", H=lambda step: 1 if step < switch else H)` |

H may be a function, except where each node has rounds of its own (`AsyncStrategy`, `DecoupledDiLoCoStrategy`,
`HALoSStrategy`, and with `local_steps=`): it is given the step at which a round begins, and gives the round's steps.
DES-LOC needs `Hu` and `Hv`, too, then.
It may also be an object of a class below, under "when": `QSR` sees the learning rate, by default the strategy's:

>>> from vecgym.strategy import QSR
>>> strategy = DiLoCoStrategy("adamw", H=QSR(alpha=5e-3, H=2, max_steps=20), lr=3e-3, lr_scheduler="cosine")
>>> averaged = trainer.fit(strategy, num_nodes=8, max_steps=20)
>>> [transfer.step for transfer in trainer.ledger]
[1, 3, 6, 10, 19]

## Composing exchanges

An `Exchange` combines three choices: how nodes agree, when, and on which values. Exchanges can be combined freely. They
act in the order of the list:

>>> composed = Strategy(
...     "adamw", [Exchange(Sparse(0.01, Mean())), Exchange(Mean(island_size=4), every=10)], lr=3e-3
... )
>>> averaged = trainer.fit(composed, num_nodes=8, max_steps=10)

| choice | how it is made |
|---|---|
| how nodes agree on a value | `Mean` (with islands, weights), `ServerMean`, `Mix` (a topology), `Robust` (a median, Krum, centred clipping and other rules that liars cannot move far), `MostMoved` (each node's own choice of coordinates), `NoLoCo` (in pairs), `StrongestCosines` (DeMo's), `Ring`, `QuantisedRing`, `AllToAll` (means whose sums are encoded, too) |
| ... and around one of these | `Outer` (a step of an outer optimizer on the movements), `Eager` (the same, a round late), `Sparse` (some coordinates), `Compressed` (codes, with error feedback, its decay and momentum), `EF21` (codes of what has changed), `Corrupted` (some nodes lie, by a named attack or your own), `Private` (clipped, with the noise of each node or of a server), `MovementPenalty` (large movements weigh less; anomalies are left out) |
| on what | `of="parameters"`, `"gradients"`, `"moments"` (of the inner optimizer), or one of its slots, such as `"exp_avg"` |
| when | `every=` a number of steps, a function that gives the length of each round, or `Rounds`, `RoundsOf`, `LateWindow` (only in the last part of the run), `QSR` (longer rounds at lower learning rates), or weights that can be differentiated (`SyncWeight`) |
| how late | `delay=` steps; `late="value"` overwrites the nodes' values with the result, `late="change"` adds the change; a `SyncWeight` applies either in part |
| which part | `fragments=` cuts the model into parts that are exchanged at different steps of a round; `private=` names layers that stay at home |
| who | `participation=` a fraction of the nodes in each round, as many in each or, with `sampling="bernoulli"`, independently; `resting=`, the rule for the others; `lost=`, the probability that a message is lost |
| what a node keeps | `keep=` the share of its own value |

`every(n, exchange)` lets an exchange count in units of n steps. Methods of `Compressed` are `"topk"`, `"chunktopk"`,
`"randomk"`, `"int8"`, `"int4"`, `"int2"`, `"stat8"`, `"stat4"`, `"stat2"`, `"float32"`, `"bfloat16"`, `"float16"`,
`"float8_e4m3fn"`, `"float8_e5m2"`, `"qsgd"`, `"natural"`, `"ternary"`, `"sign"`, `"powersgd"`, or a codec from `vecgym.compress`, whose page has the bytes and
the error of each. DiLoCo in islands of four, with half of the nodes in each round and 5 % of the coordinates sent:

>>> from vecgym.compress import TopK
>>> exchange = Exchange(Outer(Compressed(Mean(island_size=4), TopK(0.05))), every=5, participation=0.5)
>>> averaged = trainer.fit(Strategy("adamw", [exchange], lr=3e-3), num_nodes=8, max_steps=10)

Differential privacy is three of these: movements are clipped, the server adds noise, and clients are drawn independently.
With `delta=1e-5` (`pip install vecgym[privacy]`) the history has the `epsilon` that this has spent; `vecgym.strategy.Private`
says whom one has to trust, and what is not counted.

>>> from vecgym.strategy import Private, ServerMean
>>> noisy = Private(ServerMean(), clip=0.5, noise=1.0, noise_by="server", nodes=4)  # of 8 clients, 4 are expected
>>> outer = Outer(noisy, OptimSpec("sgd", lr=1.0))
>>> exchange = Exchange(outer, every=5, participation=0.5, sampling="bernoulli")
>>> averaged = trainer.fit(Strategy("sgd", [exchange], lr=0.1), num_nodes=8, max_steps=10)

## Who is there

`fit(..., availability=...)` sets the nodes that are present in each step, for any strategy. They train and exchange among
themselves, and means, graphs, weights and bytes concern only them. The other nodes keep their state, and their losses are
nan. A node's data and random numbers go by its own step count. So does its learning rate, unless nodes are drawn for each
round, or parameters are stored once for all nodes (AllReduce with `rejoin="shared"` or `"neighbour"`, and one rate for
all nodes): then a schedule goes by the run's steps; `help(vecgym.availability)` has the rule. The history has a column `num_present`. At
least one node must be present in every step; this is checked before the first.

| `vecgym.availability` | the nodes that are present |
|---|---|
| `Sampled(0.1, H=10)` | in each round of H steps a sample of the nodes |
| `Dropout(0.3, mean_steps=20)` | nodes fail and come back: in the long run, each is absent for 30 % of the time |
| `Trace(table)` | those of a measured table, a row of truth values for each step |
| `Deadline(2.0, H=10)` | those that compute a round of H steps in 2 seconds by `compute=`; nobody waits for stragglers |
| a function of the step | the ids that it returns |
| `LocalSteps([5, 10], H=10)`, `LocalSteps(epochs=1, H=10)` | all; node i trains in the first n_i steps of a round, or until it has passed over its examples once, and waits for the exchange |

`a & b` is both. With `rejoin=` a returning node begins with its own parameters (`"own"`), with those that the others share
(`"shared"`), or with those of one of them (`"neighbour"`). The others share the model if it is stored once, or the outer
parameters of a strategy such as DiLoCo; else the mean of the nodes that were present in the step before is taken, in an
additional exchange unless they have just averaged. One of them sends it, once. State that a strategy stores once for all
nodes evolves with the nodes that are present. AllReduce only exchanges gradients: a node that returns with its own
parameters stays apart for good, so give `rejoin="shared"`.

**To sample clients, give the strategy `participation=`**: `FedAvgStrategy(participation=0.1)`, or an `Exchange` in any
strategy that you put together. In each round a new sample of the nodes begins with the server's parameters and sends its own
back. `Sampled` is for strategies without that argument, such as `DiLoCoStrategy` or AllReduce, and draws the same nodes: where
both are possible, nodes, data, learning rates, losses, bytes and the run's model are equal (a test compares them). A client
that is drawn again continues its data, at the present rate of the schedule. Both at once are an error.
`Dropout`, `Trace` and `Deadline` model failures, and can be combined with `participation=`, which then samples the nodes
that are present. Both ways use a server, which is cheaper: each participant sends its parameters, and receives those of the
next round. (With `rejoin="own"`, as with `resting="keep"`, there is none, and the nodes that are present average in a ring.)

>>> from vecgym.availability import Dropout
>>> averaged = trainer.fit(DiLoCoStrategy("adamw", H=5, lr=3e-3), num_nodes=8, max_steps=10,
...                        availability=Dropout(0.3, mean_steps=5, rejoin="shared"))

**The evaluated model.** The run's model is the mean of the nodes that were present in the last step, unless the strategy has
another `result(state)`: in an asynchronous one with a server it is the server's. With `participation=` it is the mean of the round's
clients until the server sends its result (with `resting="keep"`, of all clients that have trained so far). Buffers, such
as batch norm's statistics, are means over the nodes that have trained, among those present, or among all if clients are
sampled. There is no other average: the validation loss, the result of `fit`, `save` and checkpoints, `result.model(i)` of a
sweep and the loss of a `rollout` are that model's, and `val_loss_local`, `consensus_distance` and `correlation` are over
the same nodes. `val_losses` has every node, absent ones with their last parameters. If each node has its own validation
set, the model is evaluated on all of them. Layers that stay at home (`private=`) are in it as the mean of the nodes', which
nobody trains: of personal models look at `val_losses`, `val_loss_local` and `val_NAME_local`, each node's own on its own
validation set. The column `num_never_present` counts the nodes that have not been present so
far; a warning before the first step names those that never are.

A run in which some nodes are never present equals one without them, to the bit on a CPU, with their ids as the keys of
random numbers. Absent nodes are not computed. Where nodes exchange gradients and have parameters of their own
(`rejoin="own"`), the mean is rounded in another way. (MATCHA has one graph for all nodes, with the absent ones.) `rollout`
and `verify` take `availability`, too. On real processes an absent
node sends nothing; a node that is present sends its process the state that all nodes store once, which is not counted.
`Exchange(..., lost=0.1)` loses messages, as in DiLoCo's paper.

## Optimizers and learning rates

An optimizer is a name, an `OptimSpec`, or any subclass of `torch.optim.Optimizer`, including your own. SGD, Adam,
AdamW, RMSprop, Adagrad, NAdam, RAdam, Adamax, Adadelta and Rprop update all nodes in one call. Any other class runs
node by node, with the same result as on K machines. `"lion"` and `"muon"`, which torch lacks or has since
2.9, `FullPrecisionMuon` and `DionMuon` update all nodes in one call, too, and so do a server's `"fedadam"`, `"fedyogi"` and `"fedadagrad"`. Muon is for matrices; `param_groups` gives the other parameters another optimizer:

>>> def groups(name, p):
...     return {} if p.dim() == 2 else {"optim": "adamw", "lr": 3e-4}
>>> muon = OptimSpec("muon", lr=0.02, param_groups=groups)
>>> averaged = trainer.fit(AllReduceStrategy(muon), num_nodes=8, max_steps=2)

>>> AllReduceStrategy("adam", lr=1e-3).inner_optim
OptimSpec(Adam, lr=0.001)
>>> AllReduceStrategy(OptimSpec(torch.optim.SGD, lr=0.1, momentum=0.9)).inner_optim
OptimSpec(SGD, lr=0.1, momentum=0.9)

Every strategy takes `lr`, `max_norm`, `lr_scheduler` and `warmup_steps`. `max_norm` clips each node's gradient; where
gradients are averaged, their mean, except in DeMo. SCAFFOLD, Mime, and FedNova with a proximal term refuse it. The scheduler
is `"constant"`, `"cosine"`, `"lambda_cosine"` or a function from the step to a factor.

## A strategy of your own

Most strategies are a new way to agree: an `Average`, which combines the values of all nodes, or a `Stage` around one, which
transforms the values before and the result after it. It gets the values of all nodes, stacked; the event's `part`, with
`part.comm`, the only way to other nodes; and a `memory`, of each node (`memory.own`) and of all together (`memory.shared`).
A node dimension of size 1 means "the same on every node". With this stage a node sends only 8 bits of each change since the
last exchange, and adds the rounding error to the next one:

>>> class EightBits(Stage):
...     def init(self, values, run, memory):  # each node's own state, and the shared one
...         memory.own["error"], memory.shared["last"] = tree.map(torch.zeros_like, values), values
...
...     def send(self, x, part, memory):
...         change = tree.map(lambda x, last, e: x - last + e, x, memory.shared["last"], memory.own["error"])
...         sent = tree.map(lambda x: self.rounded(x, part), change)
...         memory.own["error"] = tree.map(torch.sub, change, sent)
...         return sent
...
...     def receive(self, y, part, memory):  # returns the nodes' new values
...         memory.shared["last"] = tree.map(torch.add, memory.shared["last"], y)
...         return memory.shared["last"]
...
...     def rounded(self, x, part):  # one scale for each node's tensor
...         scale = spread(part.coordinates(x).abs().amax(-1).clamp(min=1e-12) / 127, x)
...         return (x / scale).round() * scale
>>> strategy = Strategy("adamw", [Exchange(EightBits(Mean()), every=5)], lr=3e-3)
>>> averaged = trainer.fit(strategy, num_nodes=8, max_steps=10)
>>> len(trainer.ledger)
2
>>> report = vecgym.verify(strategy, model, dataset, num_nodes=4, num_processes=2, steps=10, dtype=torch.float64)
>>> report.passed  # the same numbers on two real processes
True

The ledger counts the tensors handed to a collective. Here that is 4 bytes per value, since the rounded values are still
floats. When nodes exchange, how late, which part of the model and which nodes are arguments of `Exchange`, so this stage
works in all these ways:

>>> late = Strategy("adamw", [Exchange(EightBits(Mean()), every=5, fragments=2, delay=2)], lr=3e-3)
>>> averaged = trainer.fit(late, num_nodes=8, max_steps=10)

A step with another gradient, or any event that is no exchange, is a method of a `Strategy`. `vecgym.guide.writing_a_strategy`
has an example of each kind, and the contract.

## Written for one rank

A strategy may also be written as in EXO Gym, for a single rank. It then runs on one thread per node, and the threads
meet in the collectives. Results and ledger are the same, but it is slower. The two forms of DDP side by side:

>>> class PerRank(Strategy):  # what one node does
...     def step(self):
...         for p in self.model.parameters():
...             all_reduce(p.grad, op="mean")
...         self.optim.step()
...         super().step()  # advances the learning-rate schedule
>>> native = Strategy("sgd", [Exchange(Mean(), of="gradients")], lr=0.1)  # what all nodes do, on [K, *] tensors
>>> one, other = [
...     trainer.fit(strategy, num_nodes=8, max_steps=10) for strategy in (PerRank("sgd", lr=0.1), native)
... ]
>>> for p, q in zip(one.parameters(), other.parameters()):
...     torch.testing.assert_close(p, q)
"""
