"""Writing a strategy: step by step, and the contract

`vecgym.guide.strategies` has a first example. This page is for strategies that are to become part of vecgym, or to run
everywhere that the built-in ones do: on processes, in sweeps, in rollouts and from checkpoints.

## Step by step

1. **Write it** in `vecgym/strategy/NAME.py`: a `CommunicationModule` that says what is exchanged, and a `Strategy` that
   combines it with an inner optimizer, as `vecgym/strategy/diloco.py` does. Check early with `vecgym.verify` that it
   gives the same numbers on real processes.
2. **Document it** in the docstring of the strategy: one line; the update rule in the paper's symbols; what it keeps,
   with shapes; the bytes sent per node and step; the arguments; an example, which the tests execute; the paper, and
   every deviation from it, or "No deviation".
3. **Export it** in `vecgym/strategy/__init__.py`: in `__all__`, and under its theme in the docstring.
4. **Write a naive twin**, `tests/reference/NAME.py`: a loop over K plain modules that follows the paper's pseudo-code and
   imports nothing from vecgym. 50 steps of both must agree to 1e-10 in float64. The comparison is a case in
   `tests/test_twins.py`, or a file of its own such as `tests/test_demo.py`.
5. **Add a row to the catalogue**, `CATALOGUE` in `vecgym/strategy/catalogue.py`: how to make the strategy; and a card to
   `CARDS` in `tests/cards.py`: its twin, its bytes in closed form, its properties. `vecgym verify`, `vecgym compare`, the
   benchmarks, `tests/test_properties.py` and `tests/test_distributed.py` take theirs from there. In `tests/test_properties.py`, add to `ARGUMENTS` a value for each constructor
   argument that changes a run, and to `REFUSED` what cannot work.
6. **Add a case** to `CASES` of `tests/test_sweep.py` (the curve in a stack equals the one alone), and to
   `tests/test_rollout.py` for each number that it takes (the gradient equals finite differences).
7. **Announce it**: a row in the tables of strategies in `README.md` and `vecgym/guide/strategies.py`, and a
   line in `CHANGELOG.md`.
8. **Break the code once**, and watch each of these tests fail.

Tests report what an exported strategy lacks of steps 2, 3 and 5, and of the sweeps in 6. The notebook
`notebooks/5_new_algorithm.ipynb` follows these steps with an example.

## The contract

A module overrides some of these methods. L of the K nodes are in this process. Every tensor is `[L, *]`, or `[1, *]` if
it is the same on every node.

| method of `CommunicationModule` | when | what it may do |
|---|---|---|
| `check(num_nodes, max_steps)` | before the run | raise a `ValueError` for what cannot work, and warn of what has no effect |
| `init(params, ctx)` | once | return the first state, nested dicts of tensors; it may keep `params`, which are a copy |
| `check_present(counts, num_nodes)` | before the first step, with `availability` | raise a ValueError if it cannot work while so many are there |
| `idle(ctx)` | with `availability` | whether nothing is exchanged in this step but gradients; it saves time |
| `active_nodes(ctx)` | each step | list the ids of the nodes that train in this step, perhaps none; None: all |
| `local_gradients(grads, params, state, ctx)` | after the gradients | add to each node's own gradient; no communication |
| `exchange_gradients(grads, state, ctx)` | before clipping and optimizer; refused next to a module with `active_nodes` | anything with `ctx.comm`; return gradients and state |
| `exchange_moments(moments, state, ctx)` | after the optimizer, before the parameters | what it keeps in the shape of the parameters, such as AdamW's `exp_avg`: anything with `ctx.comm`; return moments and state |
| `exchange_parameters(params, state, ctx)` | after the optimizer | anything with `ctx.comm`; return parameters and state |
| `outer_parameters(state)` | with `availability` and `rejoin="shared"` | return the parameters that it keeps once for all, `[1, *]`, from which a node that returns begins; `{}`: it has none |
| `outer_learning_rate(ctx)` | each step | return that of its own optimizer, to be recorded; None: it has none |
| `stack_key()`, `stacked(modules, num_nodes)` | in a sweep | merge the modules of all configurations into one, which is faster; optional |
| `when = Rounds(H)`, an attribute | each step | say when it exchanges, if not at every step: `ctx.exchange`, by which averages such as `Sparse` and `Mix` go, and who takes part, counts by it |
| `mean_gradient = True`, an attribute | each step | declare that only the mean of the gradients is used: one gradient of the mean loss is computed |

A `Strategy` whose model is not the mean of the nodes' parameters overrides `result(state)`: it returns the parameters whose
mean is evaluated, returned and saved, a slow average that it keeps, say.

All but `check` receive a `Context`: `ctx.comm`, the collectives; `ctx.step` of `ctx.max_steps`, from 0; `ctx.lr`, the
inner learning rate of this step, schedule and warm-up included (a number, or a tensor `[]` or `[K]`); `ctx.seed`,
`ctx.num_examples`, `ctx.exchange`, the exchanges of the module so far, `ctx.inplace`, `ctx.rows` and `ctx.exact`. Names and shapes of what a method returns are checked,
and an error says which module returned what.

These rules hold for all methods:

| rule | why | what finds violations |
|---|---|---|
| Other nodes only through `ctx.comm`, the same calls in every process: `mean`, `sum`, `all_gather`, `broadcast`, `permute`, `mix`, and through a server `server_mean`, `server_sum`, `server_gather`, `server_send`; `all_gather(x, readers=...)` where a node reads those of its group or its neighbours only. Never `x.mean(0)`, no rank, device, process, backend | the K nodes may be in several processes | `vecgym.verify`, `tests/test_distributed.py`, `tests/test_floors.py` |
| Take and return `[1, *]` for what all nodes share, and let it broadcast | stored and computed once | `tests/test_properties.py`: "stored once" |
| A state's `[1, *]` is what all nodes have together, a count too: where some are absent it goes on with the others. What each node counts for itself has a row for each, `torch.zeros(len(ctx.node_steps))`, or is `ctx.node_steps` | the steps of the others are not those of who is absent | `tests/test_availability.py` |
| Hyperparameters on `self`, under their own names; what evolves in the state; nothing is assigned after `__init__` | checkpoints, segments of a rollout and stacks hold the state alone; logs the `repr` | "a saved state continues", "every constructor argument" |
| Overwrite what was given only if `ctx.inplace` (what a module keeps needs no clone: the step sees to it) | a differentiable step is pure; any other owns its state | "the pure step equals the donating one" |
| Only tensor operations on what may be differentiated: no `.item()`, no `float()`, no branch on a value | learning rates, momenta and weights may be tensors with gradients | `tests/test_rollout.py` |
| A hyperparameter of each node, `[K]`, through `ctx.own(value)`; `ctx.lr` too | where only some nodes train or are here, their rows | `tests/test_rollout.py` |
| Random numbers from `ctx.generator(purpose, *ids)`, with the step among the ids; those of a node with its id from `ctx.comm.ids` | the same in every process, when resumed, and next to other strategies | "running twice", `tests/test_distributed.py` |
| Hand to a collective what a node would send, in the dtype that it would have; what a shared seed gives is not sent | the ledger counts what is handed over, and the number of bytes must not depend on the values | "bytes equal the closed form" |
| With `ctx.exact`, work node by node where that changes bits: in matrix products over all nodes | the same bits for any number of processes | `vecgym.verify`, "exact" |
| A user's mistake is a `ValueError` or `TypeError` at construction, or in `check`: what was given, what is allowed, the fix | not after an hour | `REFUSED`, `tests/test_bad_input.py` |
"""
