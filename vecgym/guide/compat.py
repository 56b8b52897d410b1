"""Compatibility: scripts for EXO Gym and diloco-sim

## EXO Gym

```bash
vecgym exogym example/nanogpt_train.py --dataset shakespeare --strategy diloco
```

runs a script written for [EXO Gym](https://github.com/exo-explore/gym) unmodified: `import exogym...` finds vecgym's
classes, under EXO Gym's module paths and with its argument names. In a notebook, `vecgym.compat.exogym.install()` does
the same:

>>> import torch
>>> from vecgym.compat import exogym
>>> exogym.install()
>>> from exogym.strategy import FedAvgStrategy
>>> from exogym.strategy.sparta import SparseCommunicator
>>> exogym.uninstall()

EXO Gym's own strategies are translated to vecgym's, which train all nodes at once. Your own classes for one rank
(`self.model.parameters()`, `p.grad`, `all_reduce(p.grad)`, `self.rank == 0`, calls of `torch.distributed`,
communication modules, torch's schedulers) run rank by rank. An option that has no effect here causes a warning that
says why; an unknown one is a `TypeError`. Runs are written to `logs/<run_name>/train.csv` and `validation.csv`, or to
Weights & Biases.

### Where EXO Gym differs

A run does what EXO Gym's documents and arguments say. It does not repeat EXO Gym's results to the last bit: these show
the effects of mistakes, too, and of a data order that never changes. Here is what differs. On macOS, the workers of a
`DataLoader` are new interpreters, which do not know `exogym`: there, put dataset classes into a module that does not
import it.

| EXO Gym (9fa323c) | vecgym |
|---|---|
| does not start on Linux without a GPU, nor without `run_name` | fixed; the default name is the time, to the microsecond |
| on a CPU, DiLoCo's outer parameters are node 0's own tensors: every outer gradient after the first is 0 | fixed |
| `fit` fails at its end for models with integer buffers (batch norm) | fixed: node 0's |
| `autocast=True`, `checkpoint_interval` and `correlation_interval` (without wandb) end in an error | work |
| DiLoCo and FedAvg exchange first after H + 1 steps | after H |
| a single node never takes an outer step | it does (Lookahead) |
| the sampler never reshuffles; a factory's data is always shuffled, whatever `shuffle` says | a new order in each epoch; `shuffle` |
| all nodes are seeded alike: dropout is correlated | each node has its own seed |
| after the first evaluation node 0 stays in `eval()` mode; the average is evaluated on other batches | both in `eval()` mode, on the same examples |
| `FedAvgStrategy(inner_optim=...)`, DeMo's learning rate and `max_norm`, `sparta_interval`, `async_sparta_delay`, `lr=`, `outer_lr=` are ignored | used (the delay is refused rank by rank) |
| the documents' `SPARTAStrategy(compression_method=, quantization_bits=)` is not in the code | works, but for strategies that run rank by rank |
| options that a strategy does not know (`H` or `p` of AllReduce) are stored and ignored | ignored with a warning; unknown ones are refused |
| a warm-up of one step by default: the first learning rate is 0 | the same |
| past `lr_scheduler_kwargs["max_steps"]` the cosine rises again | stays at 10 % |
| islands come from an unseeded generator | seeded |
| DeMo fails on tensors of more than two dimensions; its cosines have the precision of float32 | folds them; that of the parameters |
| `train.csv` has the loss of node 0's last micro-batch, and the next step's learning rate | the mean over the nodes; the step's rate |
| SPARTA sends a mask of one byte per parameter in each step | drawn from a shared seed, no bytes (your own classes: as there) |
| `device`, given to `fit`, is ignored | used |
| `TrainNode` is a process's training loop | can be imported, not made: `trainer.nodes` has the nodes |
| a class of yours that derives from `Strategy` must call `_setup_scheduler()`, or `lr_scheduler` does nothing | called for it |
| `Trainer._build_connection` starts and joins the processes | never called; an override causes a warning |
| `exogym.strategy.dgc`, which an example imports, does not exist | nor here |

With the same batches, and without these mistakes, the results are EXO Gym's: tests compare both, and a loop that
repeats its mistakes too with what its own processes compute.

## diloco-sim

Scripts for [diloco-sim](https://github.com/MattBeton/diloco-sim) run after one additional line, and without processes,
wandb or a GPU:

>>> import vecgym.compat.diloco_sim
>>> vecgym.compat.diloco_sim.install()  # from here on, `import diloco_sim` finds this module

>>> from diloco_sim import DilocoSimulator
>>> _ = torch.manual_seed(0)
>>> x = torch.randn(1024, 20)
>>> dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
>>> simulator = DilocoSimulator(  # or DilocoSimulator(DilocoSimulatorConfig(...))
...     model_cls=torch.nn.Linear, model_kwargs={"in_features": 20, "out_features": 4},
...     loss_fn=torch.nn.functional.cross_entropy, train_dataset=dataset, optimizer_kwargs={"lr": 0.01},
...     num_nodes=4, diloco_interval=5, p_sparta=0.01,
... )
>>> average = simulator.train()

There are hooks, and checkpoints in `save_dir`. The simulator is a `vecgym.Trainer`: `simulator.history`, `simulator.ledger`.
Arguments, defaults and timing are the original's. With the same masks, its trajectories on 2 and 4 processes and those
here differ by at most 5e-16 in float64 (15 steps; outer steps, SPARTA with delays, warm-up, clipping), once two
mistakes of the original are corrected: its outer optimizer never acts, and its queue of delayed values confuses
tensors. The docstring of `vecgym.compat.diloco_sim` has a table of all other differences.

## The documents' features

These are the documents that describe EXO Gym and diloco-sim:

1. "EXO Gym", the short README
2. "ExoGym: Technical Documentation (Simplified)"
3. "ExoGym: Advanced Distributed Training Simulation Framework", the long README
4. "EXO Gym Technical Details"
5. "Distributed Low-Communication (DiLoCo) Training Simulator", the README of diloco-sim

The table lists what they show, with `exogym` read as `vecgym`. The last column names the tests in
`tests/test_documents.py`, without `test_`, or says why there are none.

| document | feature | in vecgym | tests, or why there is none |
|---|---|---|---|
| 1, 3 | devices CPU, CUDA, MPS | `fit(device=...)`; `None` takes the best one present; a missing one is an error | `device`, `the_best_device_present_is_taken` |
| 1, 3 | MPS: CPU for unsupported operations | a setting of torch: `PYTORCH_ENABLE_MPS_FALLBACK=1` before Python starts | vecgym has no part in it |
| 3 | backends gloo, NCCL | not needed in one process; real processes use these two, see `vecgym.guide.processes` | `a_process_for_each_node` |
| 1, 2, 3 | AllReduce, FedAvg, DiLoCo, SPARTA, DeMo | `vecgym.strategy` | `supported_methods` |
| 1, 2, 3 | AllReduce equals DDP | yes, to 1e-12 in float64 | `all_reduce_is_ddp`, `simple_reduce_is_all_reduce` |
| 1, 3 | "Example Usage", "Quick Start": DiLoCo | unchanged | `readme_example`, `simple_diloco_training`, `a_documented_run_is_silent` |
| 1, 3 | `from exogym... import ...` | after `vecgym.compat.exogym.install()`, or with `vecgym` in place of `exogym` | `imports_under_exogyms_own_name` |
| 3 | FedAvg with islands | unchanged | `fedavg_with_islands`, `a_hundred_clients_in_islands_of_ten` |
| 3 | SPARTA at 0.1 % | unchanged | `bandwidth_constrained_sparta` |
| 2 | SPARTA "of important gradients" | `compression_method="topk"`; the paper selects at random | `sparta_can_send_what_matters_most` |
| 3 | random, sequential, partitioned | `index_selector=` | `sparsification_strategies` |
| 1, 3 | DeMo | unchanged | `research_with_demo` |
| 2 | "Basic usage": FedAvg with an `OptimSpec` | unchanged | `basic_usage`, `every_form_of_an_optimizer` |
| 1, 2, 3, 4 | `Trainer`, `LocalTrainer` | one class under both names | `local_trainer_takes_keywords_and_positions` |
| 1, 2, 3, 4 | `TrainNode` | rows of stacked tensors: `trainer.nodes`, `trainer.nodes.module(i)` | `nodes_take_the_place_of_train_nodes`, `every_node_starts_from_the_users_model` |
| 1, 2, 3, 4 | `Strategy` | says what is exchanged, for all nodes at once; or has a `step()` for one rank | `a_strategy_says_what_is_exchanged_and_how_parameters_change`, `custom_strategy` |
| 1, 2, 3, 4 | a process for each node | optional: `backend="processes"` | `a_process_for_each_node` |
| 2 | execution of DDP, FedAvg, DiLoCo | DiLoCo's outer step follows every H steps | `simple_reduce_is_all_reduce`, `fedavg_averages_models_and_no_gradients`, `diloco_has_two_levels` |
| 2 | the original model is updated at the end | it stays unchanged; `fit` returns the average | `fit_returns_the_average_and_leaves_the_model_alone` |
| 4 | a model returns a scalar loss from any batch | the same | `model_contract`, `any_form_of_batch` |
| 1, 2, 4 | one dataset, `DistributedSampler` | the same examples, in a new order in each epoch | `a_dataset_is_dealt_as_by_a_distributed_sampler` |
| 1, 4 | a dataset in memory is copied to each node | it is in memory once | `a_dataset_is_in_memory_once_and_read_lazily` |
| 2, 3, 4 | `dataset_factory(rank, num_nodes, train_dataset)` | the same | `dataset_factory`, `a_factory_is_called_once_for_each_node_with_its_documented_names` |
| 3 | bytes: DDP 1x, DiLoCo 10-100x, SPARTA 10-1000x, DeMo 50-500x | counted in `trainer.ledger`: by payload DeMo's default is 43x, with 64-bit indices; over the link of one of 4 nodes 21x | `communication_reduction` |
| 3 | convergence: 85-100 % of DDP | depends on the task; `vecgym compare` measures it | a claim of the documents' authors |
| 3 | clients with their own data; some at a time | a dataset factory; `participation` | `heterogeneous_data` |
| 3 | hundreds or thousands of participants | 1000 nodes in one program | `a_thousand_participants` |
| 3 | `CommunicateOptimizeStrategy`, communicators | unchanged | `composition` |
| 3 | `log_interval` | the same; the history has every step | `log_interval` |
| 3 | `WandbLogger(project=..., experiment_name=...)`, `CSVLogger` | unchanged, one or a list; wandb without an account writes offline | `logging` |
| 3 | tracked: losses, accuracy, volume and bandwidth, speed, memory, rates | columns of `trainer.history` and of every logger | `tracked_metrics` |
| 3 | device utilization | not measured; see `nvidia-smi`, or wandb's own system metrics | not a property of the simulation |
| 3 | custom logging | a subclass of `Logger`; a list of loggers | `a_logger_of_ones_own_among_several` |
| 3 | failure detection | a loss that is not finite names node and step; history and nodes stay | `a_failure_is_detected_and_leaves_what_there_is` |
| 3 | failure recovery | `save_dir`, `checkpoint_interval`, `resume=True`: the same bits; `trainer.save`, `vecgym.load` | `a_run_recovers_from_its_checkpoints` |
| 3 | `run/mnist.py`, `nanogpt_diloco.py`, `cifar10_comparison.py`, `federated_mnist.py` | `benchmarks/mnist.py`, `shakespeare.py --text FILE`, `cifar10.py`, `federated.py --num-clients 100 --island-size 10` | `example_scripts` |
| 3 | `tutorial_*.py` | the notebooks in `notebooks/` | `.ci/run` executes them |
| 3 | "Strategy Configuration" of DiLoCo; `lr_scheduler="cosine"` | unchanged | `fine_tuned_diloco`, `cosine_schedule` |
| 3 | "Custom Strategy Development" | unchanged, with the methods that it calls; an unknown keyword is an error | `custom_strategy` |
| 3 | `gradient_accumulation=4` | computes the batch in 4 parts: `minibatch_size=batch_size / 4` | `gradient_accumulation`, `gradient_accumulation_refused` |
| 3 | `fit` without `num_nodes`, in two snippets | give it: `num_nodes=4` | `logging`, `memory_limit` |
| 3 | `max_memory_usage=0.8` | fewer nodes in one call, then parts of the batch, until the run fits | `memory_limit` |
| 3 | `compression_method="topk"`, `quantization_bits=8` | unchanged | `bandwidth_optimized_sparta` |
| 3 | H chosen by hardware | unchanged | `hardware_specific_tuning` |
| 1, 2, 3 | arguments by position; defaults | the same; of `FedAvgStrategy` here H is the second, in EXO Gym's code `island_size` | `positions`, `defaults` |
| 3 | `pip install exogym[wandb]`, `[gpt]`, `[demo]`, `[examples]`, `[all]`, `[dev]` | the same extras, and others; GPT and DeMo need no extra package | `installation_extras`, `the_library_needs_its_dependencies_only` |
| 3 | `python -c "from exogym import LocalTrainer ..."` | the same | `the_command_that_checks_the_installation` |
| 3 | Python 3.8 | 3.10 | torch 2.14, the newest tested version, needs it |
| 3 | `black`, `flake8`, `mypy`, `pytest` | `ruff`, `mypy`, `pytest`: `.ci/run` | for developers |
| 3 | links to documentation, forum, papers; what is next | this guide, and docstrings with executed examples | not features |
| 5 | minimal arguments | `vecgym.compat.diloco_sim` | `diloco_sim_minimal_arguments` |
| 5 | the table of arguments | every argument, with its default | `diloco_sim_argument` |
"""
