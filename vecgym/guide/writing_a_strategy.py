"""Writing a strategy: where to write it, by example, and the contract

`vecgym.guide.strategies` lists the parts that there are, and composes them. This page is for a new part, which runs
wherever the built-in ones do: on processes, in sweeps, in rollouts and from checkpoints.

## Where do I write it?

Take the first row that is enough:

| new | write | as in |
|---|---|---|
| a combination | an expression: `Strategy("adamw", [Exchange(Outer(Mean()), every=100)])` is DiLoCo | `DiLoCoStrategy` |
| when nodes exchange, which of them, how late, in which fragments | nothing: these are arguments of `Exchange`, for every average | `StreamingDiLoCoStrategy` |
| a code for the values, or a choice of coordinates | a `Codec` for `Compressed`, a `Selector` for `Sparse` | `TopK`, `RandomSelector` |
| how the values of all nodes become one | an `Average` | `Robust`, `Mix` |
| a transformation of a node's values before they are sent, or of the result | a `Stage` around any average | `Private`, `Outer` |
| a step of another kind, or an event that is no exchange | a `Strategy` with handlers | `PALSGDStrategy` |

All see the same three things. `x` holds the values of all nodes, by name: tensors `[K, *]`, or `[1, *]` where they are the same
on every node. `part` is the event: the nodes that take part, and `part.comm`, the only way to other nodes. `memory` lasts
from one exchange to the next: `memory.own` of each node, `memory.shared` of all together.

## An average

The nodes vote on the sign of each value. With `of="gradients"`, this is signSGD by majority vote (arXiv 1810.05291):

>>> import torch, vecgym
>>> from vecgym.collectives import StackedCollectives
>>> from vecgym.core import tree
>>> from vecgym.models import Line
>>> from vecgym.simulation import Mark, Part
>>> from vecgym.strategy import Average, Exchange, Mean, Stage, Strategy
>>> class Vote(Average, batched=(), random=False):
...     def agree(self, x, part, memory):  # [K, *] -> [1, *]
...         return tree.map(torch.sign, part.comm.sum(tree.map(torch.sign, x)))

Try it by hand before any run. `Part.alone` is the event of an exchange, without a simulation:

>>> three, x = Part.alone(StackedCollectives(3)), {"w": torch.tensor([-9.0, 1.0, 2.0])}
>>> Vote()(x, three), Mean()(x, three)  # the liar is outvoted
({'w': tensor([1.])}, {'w': tensor([-2.])})

`mean`, `sum`, `broadcast` and `server_mean` of `[K, *]` are `[1, *]`; in islands a mean is `[K, *]`, and so are `permute` and
`mix`. `all_gather` gives `[1, K, *]`: the values of all nodes, of which a function f of dimension 1 makes an average with
`part.apart(tree.map(f, part.comm.all_gather(x)))`, in a stack of configurations too.

The class says how sweeps may train it. `batched` names the arguments that may differ within a stack of configurations, here
none; `random=False` says that nothing is drawn, so that seeds share a stack. A class that says neither is right in sweeps,
and slower. `steady=True` says that all exchanges among the same nodes send the same, whatever the values, the step and H: a
dry run then makes one of them for all. `vecgym.verify` checks the three promises.

## A stage

Elastic averaging (EASGD, arXiv 1412.6651): each node moves towards a center, and the center towards the mean of the nodes.

>>> class Elastic(Stage, batched=("alpha", "beta"), random=False):
...     def __init__(self, inner, alpha=0.1, beta=0.9):
...         super().__init__(inner)
...         self.alpha, self.beta = alpha, beta
...     def init(self, values, run, memory):  # before the first exchange
...         memory.home["center"] = values
...     def receive(self, y, part, memory):  # once: y is the mean that `inner` has taken
...         center = memory.home["center"]
...         memory.home["center"] = tree.map(lambda c, m: c + part.scaled(self.beta, m - c), center, y)
...         return center
...     def write(self, y, x, part, memory):  # each node: x is its values, y the result of `receive`
...         return tree.map(lambda c, v: v + part.scaled(self.alpha, c - v), y, x)
>>> how = Elastic(Mean(), alpha=0.5)
>>> memory = how.memory({"w": torch.zeros(1)}, three)  # before the first exchange, from all initial values `[1, *]`
>>> how(x, three, memory), memory.shared  # the nodes go half of the way to 0, and the center 0.9 of the way to -2
({'w': tensor([-4.5000,  0.5000,  1.0000])}, {'center': {'w': tensor([-1.8000])}})

A stage that changes what is sent has a `send`, too: `vecgym.guide.strategies` has one of 8 bits. `receive` and `write` are
two methods since their times differ. With a `delay`, what all share changes once, when the result arrives, and each node
writes over the values that it holds by then. So late fragments need no further line in the class:

>>> late = Exchange(Elastic(Mean()), every=10, delay=2, fragments=3)

The result of a stage with a `write` differs between nodes for every stage around it: an `Outer` around an `Elastic` keeps K
outer states, an `Elastic` around an `Outer` one. `memory.home["params"]` is a reserved name: a node that returns with
`rejoin="shared"` begins from parameters that are kept there once for all.

## A strategy

All else is an event of your own: a mark says when, and the method of that name handles it. Here every second step enters a
slow average of each node's parameters, and the mean of these averages is the run's model:

>>> class Slow(Strategy, batched=("decay",), random=False):
...     def __init__(self, inner_optim=None, exchanges=(), decay=0.9, **inner):
...         super().__init__(inner_optim, exchanges, **inner)
...         self.decay = decay
...     def marks(self, run):  # what is due, and when
...         return [*super().marks(run), Mark("remember", 2)]
...     def init(self, run, params):  # what each node has of its own, and what all share
...         own, shared = super().init(run, params)
...         return {**own, "slow": params}, shared
...     def remember(self, part):  # the handler: assign what changes
...         slow, decay = part.own["slow"], self.decay
...         part.own["slow"] = tree.map(lambda s, x: x + part.each(decay, s) * (s - x), slow, part.params)
...     def result(self, state):
...         return state.own["slow"]
>>> strategy = Slow("sgd", [Exchange(Elastic(Mean()), every=2)], lr=0.1)
>>> report = vecgym.verify(strategy, Line(), torch.ones(64), num_nodes=4, num_processes=2, steps=4, dtype=torch.float64)
>>> report.passed  # the same numbers on two real processes
True

## Step by step into vecgym

1. **Write it** in `vecgym/strategy/NAME.py`. `vecgym.verify` says early whether processes and stacks give the same numbers;
   whether these are the paper's, only the twin of step 3 shows.
2. **Document it**: one line; the update rule in the paper's symbols; what it keeps, with shapes; the bytes sent per node and
   step; the arguments; an executed example; the paper, and every deviation from it, or "No deviation". **Export it** in
   `vecgym/strategy/__init__.py`: in `__all__`, and under its theme in the docstring.
3. **Write a naive twin**, `tests/reference/NAME.py`: a loop over K plain modules that follows the paper's pseudo-code and
   imports nothing from vecgym. 50 steps of both agree to 1e-10 in float64, in `tests/test_twins.py` or a file of its own.
4. **Add it to the tables**: a row of `CATALOGUE` in `vecgym/strategy/catalogue.py`; in `CARDS` of `tests/cards.py` its twin,
   bytes in closed form and properties; in `tests/test_properties.py` a value of each constructor argument, `ARGUMENTS`, and
   what cannot work, `REFUSED`; `CASES` of `tests/test_sweep.py`; `tests/test_rollout.py`, for each number that it takes.
5. **Announce it** in the table of `vecgym/guide/strategies.py` and in `CHANGELOG.md`.
6. **Break the code once**, and watch each of these tests fail. `notebooks/5_new_algorithm.ipynb` is an example.

## The contract

| method of `Strategy` | when | what it does |
|---|---|---|
| `check(num_nodes, max_steps)` | before the run | raise a `ValueError` if the strategy cannot work; warn of settings without effect |
| `marks(run)`, `who_trains(run)`, `timetable(run)` | before the run | list the events besides training: `Mark(what, when, lag, who, of, always)`, handled by the method with the name `what`; return a function (step, present nodes) → the nodes that train; all events, if these two are not enough |
| `init(run, params)` | once | return each node's own state and the shared state: trees of tensors `[1, *]`, by name |
| `train(part)`, `train_jointly(part)` | each step | gradients and the optimizer's step of each node by itself; with an exchange in between. `train_method = "local"` names another method |
| `rejoin(part)` | when nodes return | set the parameters with which they begin |
| `result(state)` | where the model is asked for | return the parameters whose mean is evaluated, returned and saved |
| `rates(timetable, tick, nodes)` | each step | return the inner and the outer learning rate, to be recorded |

| method of `Average` or `Stage` | when | what it does |
|---|---|---|
| `check(run)` | before the run | raise a `ValueError`; `run.fewest` and `run.most` are the numbers of nodes that may take part |
| `init(values, run, memory)` | once | fill the memory with initial trees, `[1, *]`; return the initial values of later stages, if they differ |
| `send(x, part, memory)` of a stage | when the nodes exchange | return the values to send, made of x |
| `agree(x, part, memory)` of an average | when the nodes exchange | return the agreed values |
| `receive(y, part, memory)` | once, when the result is used | update the memory, and return the result, made of the agreed values |
| `write(y, x, part, memory)` | for each node, when it uses the result | return the new values of nodes that hold x; y, if it is not overridden |
| `read(x, part, memory)` | with `late="change"`, and on the way to an inner stage's `write` | return the part of x that `write` writes to: override both if that is not all of x |
| `within(part, memory)` | before an inner stage is called | return the memory of the inner stages |
| `memory(values, part)` | by hand | return the memory before the first exchange, of initial values `[1, *]` |

`memory.home` is `memory.shared` if the result is the same on all nodes (`memory.common`), else `memory.own`; `memory.notes`
last from `send` to `write`; `memory.inplace` is as `part.inplace`. `common = False` in a class says that its result differs
from node to node. With a `delay`, the way back is late up to and including the first stage with a `receive`; what is inside of
that stage goes all the way back at sending. A stage with an `agree` ends the walk: it calls `self.send` and `inner` itself.

| of a `Part` | meaning |
|---|---|
| `part.params`, `part.own["name"]`, `part.shared["name"]`, `part.home` | in handlers: the parameters; what each node has, `[rows, *]`; what all share, `[1, *]`; the one of the two that holds parameters and optimizer. Assign, or `del` |
| `part.gradients(at, mean)`, `part.losses`, `part.loss_weights`, `part.missing` | the gradients on the next batch, at the parameters or elsewhere; their losses, and the weights of these, if the model gives any; parameters on which the loss of some rows does not depend, which `optimize` skips |
| `part.optimize(grads, lr)`, `part.lr`, `part.report(losses)` | the inner optimizer's step; its rate; the losses for the history |
| `part.comm`, `part.generator(purpose, *ids)` | the collectives among these nodes; random numbers that are the same in every process |
| `part.due` | `part.due.number` counts the exchanges, and all that changes from one to the next goes by it; `part.due.step` is the step after which it is due, in a late `write` that of sending, and in `every(n, ..)` the index of the n steps |
| `part.each(number, like)`, `part.scaled(number, x)`, `part.here(number)`, `part.weights(weighting)` | a setting, a number or `[K]`, shaped to multiply a tensor of these nodes; the product; its values here; the nodes' weights in a mean |
| `part.nodes`, `part.ids`, `part.rows`, `part.size` | the nodes in this process, a list and a tensor; their rows; the number C of configurations, 1 except in a stack |
| `part.coordinates(x)`, `part.wide(values)`, `part.flat(values)`, `part.apart(values)`, `part.lead` | `[.., rows, n]`; `[.., rows, *]` of `[.., 1, *]`; `[C rows, *]` of `[C, rows, *]`, and back; the dimensions before a parameter's |
| `part.inplace`, `part.exact` | whether values may be overwritten, if they are assigned afterwards; whether bits may not depend on the other nodes in this process |
| `part.tick`, `part.counts`, `part.made`, `part.event`, `part.memo` | steps of the run; what data and rates go by; the optimizer's steps; the event; what handlers keep within a step |
| `part.run`, `part.algorithm`, `Part.alone(comm)` | what was known before the run; the settings; a part to try things by hand |

| rule for all of them | why | what finds violations |
|---|---|---|
| Other nodes only through `comm`, the same calls in every process: `mean`, `sum`, `all_gather`, `broadcast`, `permute`, `mix`, `server_mean`, `server_sum`, `server_gather`, `server_send`; `all_gather(x, readers=...)` where a node reads some others only. Never `x.mean(0)`, no rank, device, process, backend. The rows in a process may be none: `[0, *]` | the K nodes may be in several processes | `vecgym.verify`, `tests/test_distributed.py`, `tests/test_floors.py` |
| What is the same on all nodes is `[1, *]`, and is kept in `shared` | stored and computed once; it goes on with those who are present | `tests/test_properties.py`: "stored once" |
| Settings on `self`, under their own names; what evolves in the state; nothing is assigned after `__init__`. No counts in the state: they are the event's | checkpoints, segments of a rollout and stacks hold the state alone; logs the `repr` | "a saved state continues", "every constructor argument" |
| The timetable depends on no trained number | what each node reads, and who meets, is known in advance | |
| Overwrite what was given only if `inplace`, and assign it afterwards | a differentiable step is pure | "the pure step equals the donating one" |
| Only tensor operations on what may be differentiated: no `.item()`, no `float()`, no branch on a value | learning rates, momenta and weights may be tensors with gradients | `tests/test_rollout.py` |
| A setting of each node, `[K]`, through `part.each` or `part.scaled` | where only some nodes train or are here, their rows | `tests/test_rollout.py` |
| Random numbers from `generator(purpose, *ids)`, with the step among the ids; those of a node with its id | the same in every process, when resumed, and next to other strategies | "running twice", `tests/test_distributed.py` |
| Hand to a collective what a node would send, in the dtype that it would have; what a shared seed gives is not sent | the ledger counts what is handed over; bytes must not depend on the values | "bytes equal the closed form" |
| With `exact`, work node by node where that changes bits: in matrix products over all nodes | the same bits for any number of processes | `vecgym.verify`, "exact" |
| A user's mistake is a `ValueError` or `TypeError` at construction, or in `check`: what was given, what is allowed, the fix | not after an hour | `REFUSED`, `tests/test_bad_input.py` |

What a stack requires: for C configurations in one call own tensors are `[C, K, *]`, shared ones `[C, 1, *]`, and a `batched`
setting is `[C]`. Multiply by it through `part.scaled` or `part.each`. Reduce and index over named dimensions only:
`part.coordinates(x)`, or `part.flat(values)` and back with `part.apart(values)`. Seeds share a stack only where nothing is drawn.
"""
