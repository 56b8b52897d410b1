"""Writing a strategy: step by step, and the contract

`vecgym.guide.strategies` has a first example. This page is for strategies that are to become part of vecgym, or to run
everywhere that the built-in ones do: on processes, in sweeps, in rollouts and from checkpoints.

## What a strategy is

A strategy is settings, and either an expression of exchanges or marks and handlers. Choose the first of these that is
enough:

1. **An expression.** `Strategy("adamw", [Exchange(Outer(Mean()), every=100)])` is DiLoCo. A named strategy is a
   signature, a docstring and such an expression, as in `vecgym/strategy/diloco.py`.
2. **An average of your own** in such an expression, as in `vecgym/strategy/averages.py`.
3. **Marks and handlers of your own**, as in `PALSGDStrategy` (`vecgym/strategy/diloco.py`): the timetable marks what
   happens in which steps, and a method of the same name handles it.

Elastic averaging (EASGD, arXiv 1412.6651) is of the third kind. Every H steps each node moves towards a center, and the
center towards the mean of the nodes:

>>> import torch, vecgym
>>> from vecgym.core import tree
>>> from vecgym.models import Line
>>> from vecgym.simulation import Mark
>>> from vecgym.strategy import Strategy
>>> class EASGD(Strategy, batched=("alpha", "beta"), random=False):  # what may differ within a stack
...     def __init__(self, inner_optim=None, H=10, alpha=0.1, beta=0.9, **inner):
...         super().__init__(inner_optim, **inner)
...         self.H, self.alpha, self.beta = H, alpha, beta
...
...     def marks(self, run):  # what is due, and when
...         return [Mark("pull", self.H)]
...
...     def init(self, run, params):  # what evolves: of each node, and of all together
...         own, shared = super().init(run, params)
...         return own, {**shared, "center": params}
...
...     def pull(self, part):  # the handler
...         params, center = part.params, part.shared["center"]
...         mean = part.comm.mean(params)
...         part.params = tree.map(lambda x, c: x - part.each(self.alpha, x) * (x - c), params, center)
...         part.shared["center"] = tree.map(lambda c, m: c + part.each(self.beta, c) * (m - c), center, mean)
>>> strategy = EASGD("sgd", H=2, lr=0.1)
>>> report = vecgym.verify(strategy, Line(), torch.ones(64), num_nodes=4, num_processes=2, steps=4, dtype=torch.float64)
>>> report.passed  # the same numbers on two real processes
True
>>> found = vecgym.sweep(
...     Line(), torch.ones(64), strategy=lambda alpha: EASGD("sgd", H=2, alpha=alpha, lr=0.1),
...     grid={"alpha": [0.0, 0.5]}, num_nodes=4, max_steps=4, batch_size=2, device="cpu", progress=False,
... )
>>> [row["status"] for row in found.rows]  # both in one stack
['finished', 'finished']

## Step by step

1. **Write it** in `vecgym/strategy/NAME.py`. Check early with `vecgym.verify` that it gives the same numbers on real
   processes. (Whether these are the paper's numbers, only the twin of step 4 shows.)
2. **Document it** in the docstring of the strategy: one line; the update rule in the paper's symbols; what it keeps,
   with shapes; the bytes sent per node and step; the arguments; an example, which the tests execute; the paper, and
   every deviation from it, or "No deviation".
3. **Export it** in `vecgym/strategy/__init__.py`: in `__all__`, and under its theme in the docstring.
4. **Write a naive twin**, `tests/reference/NAME.py`: a loop over K plain modules that follows the paper's pseudo-code and
   imports nothing from vecgym. 50 steps of both must agree to 1e-10 in float64. The comparison is a case in
   `tests/test_twins.py`, or a file of its own such as `tests/test_demo.py`.
5. **Add a row to the catalogue**, `CATALOGUE` in `vecgym/strategy/catalogue.py`: how to make the strategy; and a card to
   `CARDS` in `tests/cards.py`: its twin, its bytes in closed form, its properties. `vecgym verify`, `vecgym compare`, the
   benchmarks, `tests/test_properties.py` and `tests/test_distributed.py` take theirs from there. In
   `tests/test_properties.py`, add to `ARGUMENTS` a value for each constructor argument that changes a run, and to
   `REFUSED` what cannot work.
6. **Add a case** to `CASES` of `tests/test_sweep.py` (the curve in a stack equals the one alone), and to
   `tests/test_rollout.py` for each number that it takes (the gradient equals finite differences).
7. **Announce it**: a row in the table of strategies in `vecgym/guide/strategies.py`, and a
   line in `CHANGELOG.md`.
8. **Break the code once**, and watch each of these tests fail.

Tests report what an exported strategy lacks of steps 2, 3 and 5, and of the sweeps in 6. The notebook
`notebooks/5_new_algorithm.ipynb` follows these steps with an example.

## The contract

A subclass of `Strategy` overrides some of these:

| method of `Strategy` | when | what it does |
|---|---|---|
| `check(num_nodes, max_steps)` | before the run | raise a `ValueError` for what cannot work, and warn of what has no effect |
| `marks(run)` | before the run | list what is due in which steps, and for whom: `Mark(what, when, lag, who, of)` |
| `trains(run)` | before the run | say who trains in a step, as a function (step, present nodes) → some of them; None: all |
| `timetable(run)` | before the run | return all events of the run, if `marks` and `trains` are not enough |
| `init(run, params)` | once | return what each node has of its own, and what all share: trees of tensors `[1, *]`, by name |
| `train(part)` | each step | gradients and the optimizer's step of nodes that train each by itself |
| `train_jointly(part)` | each step, in place of `train` if it is overridden, or if an exchange is of gradients | the same, where something is exchanged in between |
| `training` | before the run | the name of the method that trains, where it is none of these two: `training = "local"` |
| `rejoin(part)` | where nodes return | what they begin with |
| `result(state)` | where the model is asked for | return the parameters whose mean is evaluated, returned and saved: those of the nodes, if it is not overridden; or a slow average, say |
| `rates(timetable, tick, nodes)` | each step | return the inner and the outer learning rate, to be recorded |

`run` is a `RunFacts`: the number of nodes and steps, the seed, who is present when, the examples of each node, the names of
the parameters. All else is a handler, a method with the name of a mark. It gets a `Part`, the rows of the nodes that the
event is for:

| of a `Part` | what it is |
|---|---|
| `part.params` | the parameters of these nodes, `[rows, *]`, or `[1, *]` where all share them; assign to it |
| `part.own["name"]`, `part.shared["name"]` | what each of these nodes has of its own, `[rows, *]`, and what all share, `[1, *]`; assign, or `del` |
| `part.home` | the one of the two that holds parameters and optimizer |
| `part.gradients(at, mean)` | the gradients on the next batch, at the parameters or elsewhere; `part.losses` has the losses |
| `part.optimize(grads, lr)` | the inner optimizer's step of these nodes |
| `part.missing` | parameters on which the loss of some rows does not depend, and these rows: their gradients are 0, and `optimize` skips them, as torch skips a `grad` that is None |
| `part.report(losses)` | the losses of these nodes, for the row of the history |
| `part.comm` | the collectives among these nodes, the only way to other nodes |
| `part.lr` | the inner learning rate of the next step, schedule included |
| `part.counts`, `part.made`, `part.tick` | what data and rates go by; the optimizer's steps that were made; the steps of the run |
| `part.event` | the event: `part.event.info` is a `Due(number, step, of)`, with the number of times that it was due before |
| `part.rows`, `part.nodes` | the rows of these nodes, and their ids, in this process |
| `part.each(number, like)` | a setting, a number or one for each node, shaped to multiply a tensor of these nodes |
| `part.generator(purpose, *ids)` | random numbers that are the same in every process |
| `part.inplace` | whether what was given may be overwritten, if it is assigned afterwards |
| `part.size` | the number C of configurations; 1 except in a stack |
| `part.memo` | what handlers keep within a step |
| `part.run`, `part.algorithm` | what was known before the run; the settings of these nodes |

An `Average` has settings, too. It is the end of a list of stages: `Outer(Private(Mean(), 1.0, 0.1))` are two, and an
average. A `Stage` is given the average that it is around, `inner`. They override some of these:

| method | when | what it does |
|---|---|---|
| `check(run)` | before the run | raise a `ValueError`; `run.fewest` and `run.most` are the numbers of nodes that may take part |
| `init(values, run, memory)` | once | remember what it begins with, `[1, *]`; return what later stages begin with, if it is another |
| `send(x, part, memory)` of a `Stage` | when the nodes exchange | return what is sent of x |
| `agree(x, part, memory)` of an `Average` | when the nodes exchange | return what comes of what all send |
| `receive(y, part, memory)` | once for each exchange: at once, or `delay` steps later | change what is remembered, such as outer parameters, and return what becomes of the result |
| `write(y, x, part, memory)` | when a node goes on with it | return what a node goes on with that holds x; y, if it is not overridden |

`memory.own`, of each node, and `memory.shared`, of all, are what it remembers, by name: assign, or `del`; `memory.home` is
the one of the two to which the result belongs; `memory.notes` are kept from `send` to `write`, the same on all nodes. What
is under way is kept with the state, so that a resumed run goes on with it. `part.due.number` counts the exchanges, by which
everything goes that changes from one to the next, and `part.due.step` is the step after which nodes exchanged.
`common = False` says that the result is not the same on all nodes.

These rules hold for handlers and averages:

| rule | why | what finds violations |
|---|---|---|
| Other nodes only through `comm`, the same calls in every process: `mean`, `sum`, `all_gather`, `broadcast`, `permute`, `mix`, and through a server `server_mean`, `server_sum`, `server_gather`, `server_send`; `all_gather(x, readers=...)` where a node reads those of its group or its neighbours only. Never `x.mean(0)`, no rank, device, process, backend. The rows in a process may be none: `[0, *]` | the K nodes may be in several processes | `vecgym.verify`, `tests/test_distributed.py`, `tests/test_floors.py` |
| What is the same on all nodes is `[1, *]`, and is kept in `shared` | stored and computed once; it goes on with those who are present | `tests/test_properties.py`: "stored once" |
| Settings on `self`, under their own names; what evolves in the state; nothing is assigned after `__init__`. No counts in the state: they are the event's | checkpoints, segments of a rollout and stacks hold the state alone; logs the `repr` | "a saved state continues", "every constructor argument" |
| The timetable depends on no trained number | what each node reads, and who meets, is known in advance | |
| Overwrite what was given only if `inplace`, and assign it afterwards | a differentiable step is pure | "the pure step equals the donating one" |
| Only tensor operations on what may be differentiated: no `.item()`, no `float()`, no branch on a value | learning rates, momenta and weights may be tensors with gradients | `tests/test_rollout.py` |
| A setting of each node, `[K]`, through `part.each` or `part.scaled` | where only some nodes train or are here, their rows | `tests/test_rollout.py` |
| Random numbers from `generator(purpose, *ids)`, with the step among the ids; those of a node with its id | the same in every process, when resumed, and next to other strategies | "running twice", `tests/test_distributed.py` |
| Hand to a collective what a node would send, in the dtype that it would have; what a shared seed gives is not sent | the ledger counts what is handed over, and the number of bytes must not depend on the values | "bytes equal the closed form" |
| With `exact`, work node by node where that changes bits: in matrix products over all nodes (`part.exact`) | the same bits for any number of processes | `vecgym.verify`, "exact" |
| A user's mistake is a `ValueError` or `TypeError` at construction, or in `check`: what was given, what is allowed, the fix | not after an hour | `REFUSED`, `tests/test_bad_input.py` |

## What a stack requires

In a sweep, configurations that differ in numbers only are one group, with one call of each handler for all of them. Own
tensors are then `[C, K, *]`, shared ones `[C, 1, *]`, and a setting in which they differ is `[C]`. Code that is written for
`[K, *]` and `[1, *]` works on them, too, under these conditions:

- Name the constructor arguments that may differ: `class EASGD(Strategy, batched=("alpha", "beta"))`, likewise of an average.
  All others must be equal, or it is another group. A class with methods of its own that says nothing is for one
  configuration: it is then trained with the others, and has handlers called for itself: right, and slower.
- Configurations of different seeds are one group, too, if nothing draws random numbers: `random=False`. What has methods of
  its own is taken to draw some, unless it says that it does not.
- Multiply by a setting through `part.each(number, like)`, `part.scaled(number, x)` or `vecgym.simulation.spread`.
- Reduce and index over named dimensions only: `part.coordinates(x)` is `[.., K, n]`, `part.flat(x)` is `[C K, *]` and
  `part.apart` leads back, `part.lead` counts the dimensions before those of a parameter.

`tests/test_sweep.py` compares every strategy in a stack with itself alone.
"""
