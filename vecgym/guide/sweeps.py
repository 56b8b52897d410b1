"""Sweeps: many configurations as one stacked program

`vecgym.sweep` trains every configuration of a grid. C configurations of K nodes become one program of C · K stacked
nodes, whose gradients are computed in one call. Exchanges stay within each configuration, so every curve is that of
`Trainer.fit` for the same configuration alone (to 1e-10 in float64, for every strategy, including your own).

>>> import torch, vecgym
>>> from vecgym.models import Classifier
>>> from vecgym.strategy import DiLoCoStrategy, FedAvgStrategy, LocalAdamStrategy
>>> _ = torch.manual_seed(0)
>>> x = torch.randn(1024, 20)
>>> dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
>>> def model(seed=0):
...     torch.manual_seed(seed)
...     return Classifier(torch.nn.Linear(20, 4))
>>> result = vecgym.sweep(
...     model, dataset, dataset,
...     strategy=lambda H, lr, outer_lr: DiLoCoStrategy("adamw", H=H, lr=lr, outer_lr=outer_lr),
...     grid={"H": [5, 20], "lr": [1e-3, 3e-3], "outer_lr": [0.4, 1.0], "seed": range(3)},
...     num_nodes=8, max_steps=40, batch_size=16, progress=False,
... )
>>> len(result.rows)
24

The model is a function of the seed, so that each seed has its own initial weights. If it is one module, all runs begin with
its weights, and a warning says so: 95 % intervals over such seeds are many times too narrow. In 12 sweeps of a small
network, 2 contained the difference that other initial weights give; with a function of the seed all 12 did.

![Left, validation loss against learning rate and H, 16 cells; right, the loss of the 16 configurations against bytes sent, means and ranges of 4 seeds, with the Pareto front](../../notebooks/figures/sweep.png)

The figure shows 16 configurations of DiLoCo with 4 seeds each, on 8 nodes with non-IID data: 512 nodes in one program.
Along the Pareto front the mean loss over the seeds falls from 1.22 to 1.02 for 10 times the bytes
(`python benchmarks/figures.py --figures sweep`).

## Reading the result

`result.rows` has one dict per configuration, in the order of `itertools.product`: the axes, losses, bytes and status.

>>> list(result.rows[0])[:4], result.rows[0]["status"]
(['H', 'lr', 'outer_lr', 'seed'], 'finished')
>>> best = result.best("val_loss")  # compares means over the seeds; over=None compares single runs
>>> best = result.best("val_loss", where={"H": 20, "lr": lambda lr: lr > 1e-3})  # values, or conditions
>>> best["H"], best["lr"]
(20, 0.003)
>>> len(result.history(0)["train_loss"])  # the whole curve of the first row: the start, and 40 steps
41

`print(result.table())` shows means ± standard deviations over the seeds, and `table(over=None)` every run;
`result.to_pandas()` and `history.to_pandas()` return data frames.
Figures: `plot` draws bands over the seeds, `plot_heatmap(x, y)` two axes, `plot_pareto()` loss against bytes.

>>> figure = result.plot(x="H", column="val_loss", hue="lr")

## Is the difference real?

Configurations of one seed share initial weights, the order of the data, and masks. Effects of a seed that all of
them share cancel in their *differences*, which vary far less than the losses. `compare` takes them seed by seed:

>>> def mlp(seed):
...     torch.manual_seed(seed)
...     return Classifier(torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)))
>>> settings = dict(num_nodes=4, max_steps=60, batch_size=16, progress=False)
>>> rounds = vecgym.sweep(
...     mlp, dataset, dataset, strategy=lambda H: DiLoCoStrategy("adamw", H=H, lr=3e-3),
...     grid={"H": [5, 6, 20], "seed": range(8)}, **settings,
... )
>>> rounds.compare("H")
|  H | val_loss | difference | standard error |      95 % interval | seeds |
|---:|---------:|-----------:|---------------:|-------------------:|------:|
|  5 |   0.3360 |            |                |                    |     8 |
|  6 |   0.3771 |    +0.0411 |         0.0029 | +0.0344 to +0.0478 |     8 |
| 20 |   0.7088 |    +0.3728 |         0.0065 | +0.3574 to +0.3882 |     8 |
<BLANKLINE>
The seeds vary the initial weights, the order of the data, the partition and masks.
H=5, the best, is the smallest that was tried: there may be better values beyond it.
>>> apart = rounds.compare("H", paired=False)  # as if the seeds had nothing in common
>>> [round(row["standard_error"], 4) for row in apart[1:]]
[0.0123, 0.0127]

A standard error that is k times smaller saves k² times the runs. The more alike two configurations are, the more it is:

>>> alike = vecgym.sweep(
...     mlp, dataset, dataset, strategy=lambda strategy: strategy("adamw", H=10, lr=3e-3),
...     grid={"strategy": [FedAvgStrategy, LocalAdamStrategy], "seed": range(8)}, **settings,
... )
>>> paired, apart = (alike.compare("strategy", paired=paired)[1] for paired in (True, False))
>>> apart["standard_error"] / paired["standard_error"] > 50
True
>>> paired["low"] > 0, apart["low"] > 0  # Local Adam is a little worse here: eight pairs show it, two means do not
(True, False)

Below every table and figure stands what the seeds vary: an interval is about that, and about nothing else. The axis need not
be called "seed": `over="trial"` averages and compares over another one.

Each value of the axis is compared at the best of the other axes, such as its own learning rate; with `best=False`, at each
of them. Choosing by the same seeds and the same validation set flatters whatever had more to choose from. `holdout=` sets
seeds apart: the best are chosen by the others, and compared by these.

>>> result.compare("H", holdout=[2])[1]["seeds"]
1

`best` and `compare` say where the best value is at the edge of its axis, beyond which there may be better ones, and that two
seeds are few. The best is the lowest loss and the highest accuracy, here as in `best`, `table` and `plot(best=True)`; of a metric
whose name does not say, give `largest=`. The baseline is the first value, or `baseline=`. A seed that diverged is left out
and counted, and where configurations do not share their seeds, a warning says what was compared instead.
`plot(baseline=)` draws the same differences and intervals:

>>> figure = result.plot(x="lr", hue="H", baseline=5)

For a paper, `table` has LaTeX, with the best in bold:

>>> print(rounds.table("latex", column=["val_loss", "bytes_total"]))
% ± over 8 seeds: standard deviation.
% The seeds vary the initial weights, the order of the data, the partition and masks.
\\begin{tabular}{rrr}
\\toprule
H & validation loss & bytes sent per node \\\\
\\midrule
5 & \\textbf{0.336 $\\pm$ 0.022} & 57.9 kB \\\\
6 & 0.377 $\\pm$ 0.027 & 48.2 kB \\\\
20 & 0.709 $\\pm$ 0.029 & 14.5 kB \\\\
\\bottomrule
\\end{tabular}

## Axes

An axis is one of:

- an argument of `strategy`;
- an argument of `model`, if that is a function (`lambda seed: make_model(seed)`);
- an argument of `train_dataset` or `val_dataset`, if these are functions: a partition of the data, say;
- one of the settings `num_nodes`, `batch_size`, `minibatch_size`, `max_steps`, `num_epochs`, `max_updates`,
  `max_seconds` (both of asynchronous strategies only), `seed`, `shuffle` and `availability`.

Values may be anything: numbers, classes, matrices, selectors. With `samples=50`, points are drawn at random, and an
axis may be a distribution, `vecgym.Uniform(a, b)` or `vecgym.LogUniform(a, b)`:

>>> random_search = vecgym.sweep(
...     model, dataset, dataset, strategy=lambda lr: DiLoCoStrategy("adamw", H=5, lr=lr),
...     grid={"lr": vecgym.LogUniform(1e-4, 1e-1)}, samples=3, num_nodes=4, max_steps=10, progress=False,
... )
>>> all(1e-4 <= row["lr"] <= 1e-1 for row in random_search.rows)
True

A partition by its alpha and the seed, where each of the 8 clients is evaluated on examples of its own:

>>> from vecgym.data import partition_dirichlet
>>> def clients(alpha, seed):
...     partition = partition_dirichlet(dataset.tensors[1], 8, alpha=alpha, min_size=5, seed=seed)
...     return partition.datasets(dataset, held_out=0.2)
>>> unlike = vecgym.sweep(
...     model, clients, clients, strategy=lambda mu: FedAvgStrategy("sgd", H=5, lr=0.2, proximal_mu=mu),
...     grid={"mu": [0.0, 0.1], "alpha": [0.1, 1.0], "seed": range(3)}, num_nodes=8, max_steps=20, progress=False,
... )
>>> unlike.compare("mu", where={"alpha": 0.1}).notes[0]
'The seeds vary the initial weights, the order of the data, the partition and masks.'

## More seeds, and runs from elsewhere

More seeds, or more values of an axis, need not repeat what is done: `resume="sweep.pt"` with a larger grid trains what the
file lacks, and two results are added. The sum is refused where a run would count twice, or more than the axes differs.

>>> fewer = vecgym.sweep(
...     mlp, dataset, dataset, strategy=lambda H: DiLoCoStrategy("adamw", H=H, lr=3e-3),
...     grid={"H": [5, 6, 20], "seed": [8, 9]}, **settings,
... )
>>> (rounds + fewer).compare("H")[1]["seeds"]
10

Fits made one by one are compared by `vecgym.compare`, seed by seed and with the same statistics:

>>> runs = {"FedAvg": [], "DiLoCo": []}
>>> for seed in range(3):
...     trainer = vecgym.Trainer(mlp(seed), dataset, dataset)
...     for name, kind in {"FedAvg": FedAvgStrategy, "DiLoCo": DiLoCoStrategy}.items():
...         _ = trainer.fit(kind("adamw", H=20, lr=3e-3), seed=seed, **settings)
...         runs[name].append(trainer.history)
>>> [(row["run"], row["seeds"]) for row in vecgym.compare(runs)]
[('FedAvg', 3), ('DiLoCo', 3)]

## A tuner asks: any list of configurations

`points=` takes the place of `grid=`: a list of {axis: value}, all with the same axes, becomes one stacked program, whose
rows are in the order of the list.

>>> asked = [{"lr": 1e-3, "H": 5, "seed": 0}, {"lr": 2e-3, "H": 8, "seed": 3}, {"lr": 1e25, "H": 5, "seed": 0}]
>>> result = vecgym.sweep(
...     model, dataset, dataset, strategy=lambda lr, H: DiLoCoStrategy("adamw", H=H, lr=lr), points=asked, **settings
... )
>>> [(row["H"], row["status"]) for row in result.rows]
[(5, 'finished'), (8, 'finished'), (5, 'diverged')]

So a tuner that can ask for many at once has them trained at once. With Optuna (`pip install vecgym[optuna]`), three rounds
of 32 trials; what diverged is a failed trial, which the sampler leaves out:

```python
import optuna
import torch
import vecgym
from vecgym.models import Classifier
from vecgym.strategy import DiLoCoStrategy

torch.manual_seed(0)
x = torch.randn(1024, 20)
dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
model = Classifier(torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)))


def point(trial):
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1e3, log=True),  # the largest diverge
        "outer_lr": trial.suggest_float("outer_lr", 0.1, 2.0),
        "H": trial.suggest_int("H", 2, 20),
    }


study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
for _ in range(3):
    trials = [study.ask() for _ in range(32)]
    result = vecgym.sweep(
        model, dataset, dataset, points=[point(trial) for trial in trials],
        strategy=lambda lr, outer_lr, H: DiLoCoStrategy("sgd", H=H, lr=lr, outer_lr=outer_lr),
        num_nodes=4, max_steps=40, batch_size=16, progress=False,
    )
    for trial, row in zip(trials, result.rows):
        if row["status"] == "finished":
            study.tell(trial, row["val_loss"])
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)

print(study.best_params, study.best_value)
failed = study.get_trials(states=[optuna.trial.TrialState.FAIL])
print(f"{len(study.trials)} trials, of which {len(failed)} failed")
assert len(study.trials) == 96 and failed
```

prints a best loss of 0.0965, and "96 trials, of which 8 failed" (Optuna 5.0).

## What shares a program

Configurations are stacked if they agree in K, batch and minibatch size, number of steps, the form of the examples and the
structure of the model, in whether there is an `availability`, and in whether they keep one copy of the parameters for all nodes, as AllReduce does. `result.explain()` shows the programs. A
program that is too large for memory, or larger than pays off, is cut into several (`chunk_configs`,
`max_memory_bytes`). For strategies with one copy of the parameters that point comes early: from a small MLP on, each configuration of AllReduce is
faster alone.

## Asynchronous strategies

`AsyncStrategy` is swept like all others. It needs `compute=`, and takes `network=`, `max_updates=` and `max_seconds=`, as
`Trainer.fit` does; the last two may be axes. The order of its events depends on network and compute, so with {name: one} it is
trained on each of them, where synchronous strategies are only priced. Rows have the measures of the last update too.
Who is absent may depend on `compute` as well (a `Deadline`): with `availability`, each is trained on each compute.

>>> from vecgym.clock import Compute
>>> from vecgym.strategy import AsyncStrategy, OuterOptimizer
>>> result = vecgym.sweep(
...     model, dataset, dataset, strategy=lambda lr, H: AsyncStrategy("adamw", OuterOptimizer(lr=0.2), H=H, lr=lr),
...     grid={"H": [2, 4], "lr": [1e-3, 3e-3]}, num_nodes=3, max_updates=12, progress=False,
...     compute={"equal": Compute(1.0), "one slow": Compute([1.0, 1.0, 4.0])},
... )
>>> [(row["H"], row["compute"], row["sim_seconds"], row["staleness"]) for row in result.rows[:2]]
[(2, 'equal', 8.0, 2.0), (2, 'one slow', 12.0, 0.0)]

Asynchronous configurations share a stack where the same happens at the same time, that is, where they differ in numbers
such as learning rates: 32 configurations of 16 nodes and 100 updates take 1.8 s together and 9.6 s one by one. Others,
and those of `ADPSGDStrategy`, `HALoSStrategy` and `DecoupledDiLoCoStrategy`, are trained one after the other; `executor=`
spreads these over processes.

## Several processes, several machines

The stacks of a sweep are independent jobs. `executor=` takes any `concurrent.futures.Executor` and has its workers train
them, one stack at a time each. Rows, order, bits and `resume` are those of the sweep in one process; the progress bar
advances by whole stacks. vecgym starts no cluster, and does not shut the executor down.

>>> from concurrent.futures import ProcessPoolExecutor
>>> torch.set_num_threads(1)
>>> settings = dict(strategy=lambda lr: DiLoCoStrategy("adamw", H=5, lr=lr), grid={"lr": [1e-3, 3e-3, 1e-2]})
>>> settings |= dict(num_nodes=4, max_steps=10, chunk_configs=1, device="cpu", progress=False)
>>> with ProcessPoolExecutor(2) as executor:
...     result = vecgym.sweep(model, dataset, dataset, **settings, executor=executor)
>>> result.num_pending, result.rows == vecgym.sweep(model, dataset, dataset, **settings).rows
(0, True)

**How many stacks** does not depend on the executor: `explain()` says how many there are, and `chunk_configs=` makes
more of them, so that no worker is idle. Where several workers share a machine, give `max_memory_bytes=` too: the
default is half of what is free where `sweep` is called, for each stack.

**Threads.** Each worker computes with as many threads as the process that calls `sweep`, on which bits depend
(`torch.set_num_threads`); also with its default dtype, matmul precision and deterministic algorithms. W workers on a
machine of W cores want `torch.set_num_threads(1)` before the sweep. Jobs in threads of one process take turns. Bits are
the same on processors of the same kind.

**Each job receives** the models, strategies and settings that your functions returned, and the data. So
`strategy=` and `model=` may be lambdas, and so may values of an axis. Models, data sets and functions within
strategies must be found where the worker looks: for pickle, at the top of an installed module; Dask and Ray send local
ones too. A large data set is best one that opens its files when it is first read, so that only the path is sent.
`device=None` is the best one where `sweep` is called; each worker should see one GPU (`CUDA_VISIBLE_DEVICES`).

**When something fails.** The first error, of a job or of the executor, is raised, and its cause names the
configurations. Nothing else begins then, and what is under way has 10 seconds to come back. A stack whose worker died is
an error too: vecgym sends nothing again. Dask does so by itself; elsewhere, the file of `resume=`, written by the process
that calls `sweep` whenever a stack ends, has the other stacks, and the same call continues from it (a
`ProcessPoolExecutor` that has lost a worker takes no more jobs: start another one). A worker that dies may have run out
of memory: `max_memory_bytes=` makes stacks smaller.

**Ctrl-C** ends the sweep in the same way. In a terminal the workers of this machine get it too: their stacks end after
the present step, and come back as far as they are. Workers elsewhere train their stack to its end, for nobody.

### concurrent.futures

    torch.set_num_threads(1)
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as executor:
        result = vecgym.sweep(model, dataset, strategy=..., grid=..., num_nodes=8, resume="sweep.pt", executor=executor)

The script does this under `if __name__ == "__main__":`. Workers that are forked (the default on Linux before Python 3.14)
start faster, but survive neither threads nor GPUs: with more than one thread, or on a GPU, they are refused.
For Ctrl-C, add `initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)`: an idle worker dies of it
otherwise, and takes the pool with it.

### Dask

    from distributed import Client
    client = Client("scheduler:8786")  # or Client(LocalCluster(n_workers=8, threads_per_worker=1))
    result = vecgym.sweep(..., executor=client.get_executor())

`client.get_executor(resources={"GPU": 1})` and other options are Dask's. Dask itself runs what a dead worker was doing
on another one, `distributed.scheduler.allowed-failures` times (3).

### MPI

    from mpi4py.futures import MPIPoolExecutor  # mpiexec -n 9 python -m mpi4py.futures script.py
    if __name__ == "__main__":
        with MPIPoolExecutor() as executor:
            result = vecgym.sweep(..., executor=executor)

### Slurm, by submitit

submitit's executor has `submit`, but is no `concurrent.futures.Executor`, and its jobs are no `Future`s. A thread that
waits for each of them makes them such:

    class Slurm(ThreadPoolExecutor):  # max_workers: so many jobs are in the queue at a time
        def __init__(self, folder, max_workers=100, **parameters):
            super().__init__(max_workers)
            self.inner = submitit.AutoExecutor(folder=folder)
            self.inner.update_parameters(**parameters)

        def submit(self, fn, /, *args, **kwargs):
            return super().submit(lambda: self.inner.submit(fn, *args, **kwargs).result())

    with Slurm("logs", slurm_partition="gpu", gpus_per_node=1, timeout_min=240) as executor:
        result = vecgym.sweep(..., executor=executor, resume="sweep.pt")

### Ray

A remote function's reference has a `Future`:

    class Ray(concurrent.futures.Executor):
        def __init__(self, **options):  # such as num_cpus=1, num_gpus=0.5
            self.call = ray.remote(lambda fn, args, kwargs: fn(*args, **kwargs))
            self.call = self.call.options(**options) if options else self.call

        def submit(self, fn, /, *args, **kwargs):
            return self.call.remote(fn, args, kwargs).future()

    ray.init()
    result = vecgym.sweep(..., executor=Ray(num_cpus=1))

One run that is too slow for one process is another matter: its nodes are spread over the processes of `torchrun`, see
`vecgym.guide.processes`; `python benchmarks/torchrun.py` shows what that gains.

## When something goes wrong

- A configuration whose loss becomes NaN or infinite is marked `diverged`, and its curve ends there. Its rows stay in the
  stack, as NaN, and the others continue; a stack in which all have diverged ends.
- Ctrl-C returns the results so far, and a script goes on with them. Look at `status`, which is `interrupted` or `pending`
  then: the last loss of a run that was cut may be the one before its first step. `best` and `compare` leave such runs out.
- `resume="sweep.pt"` keeps results in a file and continues from it. The grid may have grown. Strategies, settings, models,
  initial weights and data must be the same; otherwise the sweep is refused, and the error says what differs. Seed whatever is
  random, for instance with `torch.manual_seed(0)`. `vecgym.guide.checkpoints` says what is compared, and what is not noticed.
- A strategy written for one rank is not saved in the middle of a program: `resume` starts that program again.
- Dropout masks differ from those of the single run, except with `engine="loop"`.

`python benchmarks/sweep.py` measures a sweep against fitting its configurations one after the other. The notebook
`notebooks/2_sweep.ipynb` is a longer example.
"""
