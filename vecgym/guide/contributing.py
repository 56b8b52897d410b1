"""Contributing: where to add what, and the checks

Read the three files first that README.md names under "Architecture".

## Ideas behind the code

- **The node dimension comes first**, and size 1 means "the same on every node". Hence AllReduce keeps one copy of
  parameters and optimizer state for all nodes and computes one gradient, and DiLoCo keeps one outer copy.
- **State is explicit.** What evolves is a tree of tensors that `init` returns and a tick takes and gives back. A tick
  may overwrite the state that it is given, unless it runs with `pure=True`: then it is a pure function, and gradients with
  respect to learning rates, momenta or anything else flow through whole runs.
- **What was sent is a value, too.** A step returns its `Transfer`s, and the ledger of a run is made of them.
- **Only `vecgym/engine/` calls `vmap`.** Strategies are tensor operations on `[K, *]` trees, and collectives in
  `part.comm`. That is what lets one source run stacked, distributed, swept and differentiated.

## Floors

Packages stand on floors, and import only from below. A test compares this picture with the code:

```text
 9 | cli                                        | commands
 8 | compat                                     | interfaces of other simulators
 7 | sweeps meta                                | stacks of configurations; numbers learned over many runs
 6 | runs                                       | Trainer, processes, checkpoints, rollouts, verification, memory
 5 | clock                                      | seconds on a network, from the ledger
 4 | strategy plot                              | algorithms, a family in a file; figures
 3 | simulation logger                          | timetables, and events that take rows of a state and put them back; logs
 2 | engine availability records                | the gradients of all nodes; who is present; what a run leaves: history, files
 1 | data models collectives compress optim     | batches, networks, exchanges and their ledger, codecs, optimizers
 0 | core guide                                 | trees of tensors, random numbers, nodes, files, errors; the manual
```

## The kernel: a timetable and handlers

`vecgym.simulation` is one loop for every kind of run. A *timetable* says what happens when, and to which rows, in plain
Python, before the first gradient. An *algorithm* has a method for each kind of event. An *event* takes its rows out of
the state, its method changes them, and they are put back:

>>> from vecgym.simulation import Lockstep, Mark, RunFacts
>>> timetable = Lockstep(RunFacts(num_nodes=4, num_steps=4), Mark("meet", 2))
>>> [[event.what for event in events] for events in timetable.ticks()]
[['train'], ['train', 'meet'], ['train'], ['train', 'meet']]

| module | holds |
|---|---|
| `when` | `When`, with `Rounds`, `RoundsOf`, `QSR` and `SyncWeight`: the steps after which something is due |
| `timetable` | `Event`, `Mark`, `Lockstep`: who trains, who meets, who returns, and at which of their own counts; `Scheduled`, `Waves`: events of nodes that do not wait, with `train` where a result is first needed |
| `events` | when nodes meet a server that does not wait: `Rules`, messages on links, one agenda for all of it |
| `state` | `State`: what is each node's `own` and what is `shared`; `StateView`, and how they are put back |
| `simulation` | `run`, the loop; `Simulation`, which takes, calls, puts, and asks for gradients; `Part`, all that a handler sees |
| `plain` | passes and optimizer steps of tensors that stay where they are: their kernels are looked up once |
| `returning` | the parameters with which returning nodes begin, and who sends them |
| `stack` | several groups of configurations as one simulation: a sweep is rows |

Absent nodes are rows that an event does not have; a node that rests is one that `train` does not have; what is late is
an event later in the timetable. Nothing else knows of them. `fit`, `rollout` and estimates of memory are this loop with
different listeners; `verify` goes through two timetables in step. Since it is known beforehand who reads what, workers
read ahead in every kind of run.

## Strategies

Strategies are algorithms of the kernel. `vecgym.strategy.Strategy` has an inner `Optimizer` and `Exchange`s, whose marks
make its timetable; an exchange has stages and an average, which say how nodes agree. They hold settings only, no state and
no counts:

>>> from vecgym.strategy import Exchange, Mean, Outer, Strategy
>>> strategy = Strategy("sgd", [Exchange(Outer(Mean()), every=5)], lr=0.1)
>>> [mark.what for mark in strategy.marks(RunFacts(num_nodes=4, num_steps=10))]
['meet']

| module | holds |
|---|---|
| `base`, `simulated` | `Strategy`, and the arguments that all strategies share; `simulation_of(model, strategy, comm)`, where a strategy, nodes and absences come together |
| `exchange`, `delivery` | `Exchange`: its marks, and of which part of the model; who takes part, what is late, lost or kept, the message under way |
| `stages` | `Average` and `Stage`, the bases; `Memory`, which they remember things in; `Stages`, the walk along them |
| `averages`, `corrections` | `Mean`, `ServerMean`; stages: `Outer`, with its corrections, `Eager`, `Private` |
| `robust` | `Robust` and its rules on whole vectors; the stage `Corrupted` and its attacks |
| `coded` | averages of codes: `Compressed` and `EF21`; `Ring` and others, which encode sums, too |
| `fragments`, `moments` | which parameters are exchanged together; what an inner optimizer keeps of them |
| `penalty` | the stage `MovementPenalty`, and EDiT |
| a file for each algorithm, and for its relatives | settings, an average or a stage if it has one, and handlers where exchanges do not say it all |
| `asynchronous`, `servers` | `EventDriven`, whose rules say when nodes meet a server; how it takes what arrives |
| `per_rank` | strategies written for one rank, and their threads |

Some things are written once for all of them: an interval, a delay, fragments, participation and lost messages are the exchange's;
error feedback is an average's; counts of steps are the event's; learning rates are the optimizer's.

A sweep (`vecgym.simulation.Stack`) is rows. Configurations that differ in numbers only are a group, with one call of each
handler, which sees `[C, K, *]` and `[C, 1, *]`; `batched` in a class names the settings that may differ. The others share
the calls for gradients and local steps.

## The walk of a batch

From `fit` to the recorded loss:

1. `Trainer.fit` (runs) checks the arguments, `Run` prepares the run and listens to the loop, `vecgym.simulation.run`.
2. The timetable says who reads what. `Batches` (data) finds the examples and reads them, in workers if there are any.
3. `Simulation.tick` takes the rows of an event out of the state and calls its handler: `train` of the strategy.
4. That asks `Engine.gradients` for gradients, which are computed for all nodes at once or node by node; then the
   optimizer (optim) for a step.
5. `meet` walks along the exchange's stages: each has its `send`, the average agrees through `part.comm`, and on the way
   back each has its `receive` and its `write`. The ledger (collectives) notes the bytes. A delayed exchange is two events:
   at `agree` the nodes make a message, at `write` they receive and write it.
6. The assigned state is put back, and `Recorder` (runs) makes the row of the history.

All of this, in a step of DiLoCo with an exchange, is in 28 files, which a test counts. `after_step`, limits,
validation and a clock add theirs.

## Where to add what

| what | where | its tests |
|---|---|---|
| a strategy | see `vecgym.guide.writing_a_strategy` | |
| an asynchronous strategy | a file of `vecgym/strategy`: an `EventDriven` with `rules(times)`, `init(run, params)` and a method for each kind of event | `MADE` in `tests/test_scheduled.py`; a twin, as `tests/reference/asynchronous.py` |
| a rule that liars cannot move, an attack | a function of whole vectors in `vecgym/strategy/robust/rules.py`, a row of `RULES` in `vecgym/strategy/robust/average.py`; `STRENGTHS` in `vecgym/strategy/robust/attacks.py` | `NAIVE` and `ATTACKS` in `tests/test_robust.py` |
| an average, a stage | in `vecgym/strategy/averages.py` | `tests/test_average.py`, `tests/test_exchange.py`: alone, in groups, late, of some nodes |
| a codec | a `Codec` in `vecgym/compress`, its name in `METHODS` | `CODECS` in `tests/test_compression.py`, its bound in `tests/test_codecs.py`, its distortion in `benchmarks/compression.py` |
| a topology | a function K → matrix in `vecgym/collectives/topology.py`, its name in `FIXED` of `vecgym/strategy/decentralised/gossip.py` | `tests/test_topology.py`, `CASES` in `tests/test_gossip.py` |
| a selector of coordinates | a `Selector` in `vecgym/strategy/sparta.py` | `SELECTORS` in `tests/test_sparta.py` |
| an optimizer | nothing is needed: any class runs node by node. Elementwise ones run stacked with a formula in `ELEMENTWISE` of `vecgym/optim/formulas.py`; a name in `OPTIMIZERS` of `vecgym/optim/spec.py` | `CASES` in `tests/test_optim.py` |
| a collective | `vecgym/collectives/base.py`, and both backends beside it | `tests/test_collectives.py`, `tests/test_distributed.py` |
| a partition of data | `vecgym/data/partition.py` | `tests/test_partition.py` |
| a logger | a `Logger` in `vecgym/logger.py` | `tests/test_logger.py` |
| a column of the history | `COLUMNS` in `vecgym/records/columns.py` | `tests/test_trainer.py` |
| a plot | a function in a file of `vecgym/plot/` that returns a figure | `tests/test_plot.py`; look at it |
| a benchmark | `benchmarks/NAME.py` that prints a table, says how long it takes, and has `--quick` | `benchmarks/test_benchmarks.py` |
| a surprise about a real library on valid input | `findings/NAME.sh`: the guess before the run, then the run, on pinned public packages in a temporary folder, without vecgym; it fails if the behaviour changes | none: it runs outside of CI |
| a command | `vecgym/cli/NAME.py` with `options(parser)` and `run(args)`, a row in `COMMANDS` | `tests/test_commands.py` |
| a page of this guide | `vecgym/guide/NAME.py`, one docstring; a row in README's table and in `vecgym/guide/__init__.py` | `tests/test_readme.py`, `.ci/docs` |
| a package | on a floor, in `FLOORS` of `tests/test_floors.py` and in the picture above | `tests/test_floors.py`, `tests/test_api.py` |

## Checks

```bash
pip install -e ".[dev]"
pytest                                           # the tests and all examples in docstrings, on all cores
pytest -m slow                                   # what the line above leaves out: long tests, and most cases of tests with many
pytest -m "" tests/test_sweep.py                 # both of one file
pip install -e ".[hf]" && pytest -m hf           # models of transformers, and their page of the guide
pytest -n 0 tests/test_properties.py -k diloco   # what every strategy must do, for some strategies
pytest -n 0 vecgym/strategy/diloco.py            # the examples of one module
pytest benchmarks; .ci/notebooks                 # every benchmark, shortened, and every notebook
.ci/docs site                                    # guide and API as web pages: links, search, three pages in a browser
ruff check . && ruff format --check . && mypy
python -m build && twine check --strict dist/*   # what users install
.ci/run                                          # all of these in a fresh virtual environment, and the wheel in another
.ci/run ends                                     # some tests with the oldest and the newest torch
```

vecgym needs torch 2.6 or later and Python 3.10 or later. `.ci/run` tests everything with torch 2.13.0, and then engine,
collectives, optimizers, ledger, twins, second derivatives and golden traces with 2.6.0 and 2.14.1. If one of these
cannot be installed, it says so. All this runs in one version of Python, the `python3` that it finds; for others there
is only the linter, which refuses syntax that Python 3.10 lacks.

Tests of web pages need a Chromium on the path (Debian's package `chromium`); without one they are skipped, and say so.
`.github/workflows/tests.yml` runs the tests for every pull request, and `.ci/run` after it is merged;
`.github/workflows/pages.yml` publishes the web pages.

Tests have fixed seeds, measure no time, run in any order, and take at most ten minutes on two cores.

Each algorithm has a naive twin in `tests/reference/`, written from the paper without vecgym. The guide is executed too:
its `>>>` examples are doctests, and its `python` blocks, which are whole files, run in `tests/test_readme.py`.
"""
