"""Processes: the same strategies on torch.distributed

A strategy does not know where its nodes are. The same run can be spread over W processes of `torch.distributed`, each
of which holds L = K / W stacked nodes. They communicate by gloo between CPUs and by NCCL between GPUs.

>>> import torch, vecgym
>>> from vecgym import Trainer
>>> from vecgym.models import Classifier
>>> from vecgym.strategy import Average, DiLoCoStrategy, Exchange, Strategy
>>> _ = torch.manual_seed(0)
>>> x = torch.randn(1024, 20)
>>> dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
>>> model = Classifier(torch.nn.Linear(20, 4))
>>> trainer = Trainer(model, dataset)
>>> averaged = trainer.fit(
...     DiLoCoStrategy("adamw", H=20, lr=3e-3), 16, max_steps=40, backend="processes", num_processes=4
... )
>>> len(trainer.nodes), len(trainer.history)
(16, 40)

This starts the processes for one run, from a script or a notebook cell. There is no port to choose and no environment
variable to set. W = K is the usual one process per node. History, loggers, ledger, evaluation, `trainer.nodes` and the
returned average are the same as ever, up to rounding. With `exact=True`, on a CPU, they are the same to the last bit,
whatever W is.

- **On Linux without a GPU**, processes are forked. They know everything that a notebook has defined, and each has one
  thread.
- **With a GPU, and on macOS**, they are new interpreters. A script then needs `if __name__ == "__main__":` around what
  it does. They are sent the model, the data and the strategy, of which each has a copy of its own. With cloudpickle
  (`pip install vecgym[processes]`) these may be defined anywhere: in a notebook cell, in a function, as a lambda.
  Without it, they must be defined at the top level of a module (write the cell to a file with `%%writefile`); the error
  names the offender.
- **A process that raises or dies** ends the run with one `vecgym.ProcessError`, which names the process, its nodes and,
  if it raised, the place in its code. A loss that is not finite is a `DivergenceError`, as in one process, and a
  ValueError, TypeError or FileNotFoundError before the first row stays one. No process is left behind, logged rows
  stay, and `trainer.history` has them.
- **A process that hangs** is noticed when no process has exchanged anything and no row has come for `timeout_s`. The
  error names the process that the others wait for, but not where it is: set a shorter `timeout_s`, and look with a
  debugger such as py-spy. `vecgym verify` says which exchanges differ between the processes.
- **Ctrl-C** ends the run after a whole step, and a second one at once. The processes ignore it; the one that started
  them passes it on.
- **Not supported**: strategies written for one rank, asynchronous ones, hooks on gradients, and derivatives through a
  run. An override of `Trainer.after_step` is refused, and `trainer.state` is None. Dropout masks differ from those of a
  single process, unless `engine="loop"` or `exact=True` is set; these key the masks by node.

## 8 GPUs, and several machines

`torchrun` starts a script in each of W processes. `backend="distributed"` uses its process group, or one that already
exists. This is a complete `train.py`:

```python
# train.py
import torch
from vecgym import CSVLogger, Trainer
from vecgym.models import GPT
from vecgym.data import TokenWindows
from vecgym.strategy import DiLoCoStrategy


def main():
    torch.manual_seed(0)
    model = GPT(vocab_size=64, context=32, num_layers=2, num_heads=2, width=32)
    data = TokenWindows(torch.randint(64, (20_000,)), context=32)
    trainer = Trainer(model, data)
    trainer.fit(
        DiLoCoStrategy("adamw", H=10, lr=1e-3), num_nodes=16, max_steps=20, batch_size=4, backend="distributed",
        logger=CSVLogger("runs/diloco"), save_dir="run",  # the whole run, at its end: vecgym.load("run/step-000000020.pt")
    )


if __name__ == "__main__":
    main()
```

On 8 GPUs of one host, with K / 8 nodes on each:

```bash
torchrun --standalone --nproc-per-node 8 train.py
```

On 8 hosts with 8 GPUs each, run on every host:

```bash
torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id run train.py
```

GPUs are assigned in turn, rank 0 logs, and every rank returns the same average; `trainer.nodes` holds the nodes of the
process itself. On one host, `backend="processes", num_processes=8` does the same from a notebook, or from a script that
continues with `trainer.nodes` of all nodes. Prefer `torchrun` for several hosts, for schedulers, and for definitions
that new interpreters cannot import. With any other backend, `fit` and `sweep` refuse to run under `torchrun`, where
each process would train the whole run.

This is tested with gloo on CPUs. It has never been run on GPUs.

## verify: are the numbers the same?

![Largest relative difference of a parameter between stacked and real processes, at each of 60 steps: 0 in exact mode, below 1e-15 else; of a wrong strategy above 0.1 from its first exchange on](../../notebooks/figures/equivalence.png)

`vecgym.verify` trains the stacked form and real processes in step, and compares them after each step. The wrong
strategy in the figure averages with torch instead of `part.comm`, and so reaches only the nodes of its own process
(`python benchmarks/figures.py --figures equivalence`).

```bash
vecgym verify --strategy diloco --num-processes 4
```

```text
diloco: passed
DiLoCoStrategy(OptimSpec(AdamW, lr=0.01), Exchange(Outer(Mean()), every=3), max_norm=1.0)
4 nodes in 4 processes, 20 steps, torch.float64
        params   buffers  losses   optimizer  strategy  ledger_bytes  bound
exact   0        0        0        0          0         0             0      pass
native  7.1e-16  0        3.2e-16  2.5e-15    7e-16     0             1e-12  pass
stack   8.2e-16  0        3.1e-16  1.7e-15    8.2e-16   0             1e-12  pass
```

Two checks are on processes: *exact* gathers the tensors of all nodes in one place for every collective, *native* adds up as
`torch.distributed` does. The third, *stack*, trains the strategy, one with other numbers and one with another seed together,
as a sweep does, and each alone. Differences in *native* and *stack* are relative to the largest value of each tensor, and
the bound is 1e-12 in float64, 1e-5 in float32. State that a strategy keeps, such as a residual, is often a small difference
of nearly equal parameters and carries their rounding: it is measured against the parameter that it belongs to.

Where *exact* passes and *native* fails, no rule is broken: `torch.distributed` adds up in another order, and a value that
is rounded, ranked or compared can fall to the other side. float64 makes it rare. In *stack* a rate is a tensor, which can
have the same effect. With an `availability`, the configurations of a stack are groups of one, as in a sweep: what a class
promises is then not tried.

`ledger_bytes` compares the two ledgers. That `torch.distributed` is handed what they count, that AllReduce is torch's
`DistributedDataParallel`, and that compiled gradients are those of `vmap`, is proven for vecgym's strategies by its tests.

Use it on your own strategy, in Python or as a command for a function in a file that returns a strategy, or a dict as
for `vecgym run`:

>>> class Plain(Average):
...     def agree(self, x, part, memory):
...         return part.comm.mean(x)
>>> strategy = Strategy("adamw", [Exchange(Plain())], lr=3e-3)
>>> report = vecgym.verify(strategy, model, dataset, num_nodes=4, num_processes=2, steps=10, dtype=torch.float64)
>>> report.passed
True

```bash
vecgym verify experiment.py:diloco --num-nodes 4 --num-processes 2
```

A failure names the first step, tensor and node that differ, and which rules of the contract
(`vecgym.guide.writing_a_strategy`) to read; see `report.checks[0].finding`. With `x.mean(0, keepdim=True)` of each tensor
in place of `part.comm.mean`:

```text
exact: step 0, params first.weight of node 0: differs by 0.039. Read: Other nodes only through `comm`; Random numbers from
`generator(purpose, *ids)`, with the step among the ids; what evolves in the state; nothing is assigned after `__init__`.
```

If processes do not call the same collectives, the error says which process called what at which step.

`vecgym.guide.memory` says how many nodes fit on how many GPUs.
"""
