r"""Recipes: eleven things that people come for, each in a few lines

Each recipe runs as it stands, after these lines (the last line of "Draw a slide" plots the sweep above it):

>>> import tempfile, torch, vecgym
>>> from vecgym import Trainer
>>> from vecgym.models import Classifier
>>> from vecgym.strategy import AllReduceStrategy, AsyncStrategy, DiLoCoStrategy, FedAvgStrategy
>>> _ = torch.manual_seed(0)
>>> x = torch.randn(1024, 20)
>>> labels = x[:, :4].argmax(1)
>>> dataset = torch.utils.data.TensorDataset(x, labels)
>>> def mlp(seed=0):
...     torch.manual_seed(seed)
...     return Classifier(torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)))
>>> trainer = Trainer(mlp(), dataset, dataset)
>>> folder = tempfile.mkdtemp()

## A model of Hugging Face

Give the module as it is, and a `loss_fn` of module and batch; see `vecgym.guide.hugging_face` for the rest.

```python
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from vecgym import Trainer
from vecgym.strategy import DiLoCoStrategy

tokens = torch.randint(64, (256, 16), generator=torch.Generator().manual_seed(0))
batches = [{"input_ids": row, "labels": row} for row in tokens]
small = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)

trainer = Trainer(GPT2LMHeadModel(small), batches, loss_fn=lambda module, batch: module(**batch).loss)
averaged = trainer.fit(DiLoCoStrategy("adamw", H=5, lr=1e-3), num_nodes=4, max_steps=10, batch_size=4, progress=False)
averaged.save_pretrained("averaged")
```

## Stop early

`stop` is a function of the row, which has the columns of the history. `max_seconds` and `max_bytes` stop, too.

>>> averaged = trainer.fit(
...     DiLoCoStrategy("adamw", H=5, lr=3e-3), num_nodes=4, max_steps=1000, val_interval=10, progress=False,
...     stop=lambda row: row.get("val_loss", 2.0) < 0.5,
... )
>>> trainer.history.last("step") < 1000, trainer.history.last("val_loss") < 0.5
(True, True)

An object with a memory, such as one with patience, is in `vecgym.guide.results`.

## Let Optuna choose

Ask for many trials, train them as one program, and tell what came out. A run that diverged is a failed trial.

```python
import optuna
import torch
import vecgym
from vecgym.models import Line
from vecgym.strategy import DiLoCoStrategy

study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
trials = [study.ask() for _ in range(8)]
result = vecgym.sweep(
    Line(), torch.ones(64), torch.ones(1), strategy=lambda lr: DiLoCoStrategy("sgd", H=5, lr=lr), num_nodes=4,
    points=[{"lr": trial.suggest_float("lr", 1e-2, 1e2, log=True)} for trial in trials], max_steps=60, progress=False,
)
for trial, row in zip(trials, result.rows):
    if row["status"] == "finished":
        study.tell(trial, row["val_loss"])
    else:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
print(study.best_params)
```

## Say whether a difference is real, in LaTeX

Compare seed by seed: configurations of one seed share weights, data and masks. The model is a function of the seed.

>>> result = vecgym.sweep(
...     mlp, dataset, dataset, strategy=lambda H: DiLoCoStrategy("adamw", H=H, lr=3e-3),
...     grid={"H": [5, 20], "seed": range(4)}, num_nodes=4, max_steps=60, batch_size=16, progress=False,
... )
>>> low = result.compare("H")[1]["low"]  # of the 95 % interval of H = 20 minus H = 5
>>> low > 0.3
True
>>> print(result.table("latex", column="val_loss").splitlines()[6])
5 & \textbf{0.339 $\pm$ 0.030} \\

## Draw a slide

Say which panels, which axis and where the legend is. One run is an anecdote: draw a sweep over seeds if you claim something.

>>> from vecgym.plot import plot_runs
>>> histories = {}
>>> for name, strategy in {"DDP": AllReduceStrategy("adamw", lr=3e-3),
...                        "DiLoCo": DiLoCoStrategy("adamw", H=10, lr=3e-3)}.items():
...     averaged = trainer.fit(strategy, num_nodes=4, max_steps=60, val_interval=10, progress=False)
...     histories[name] = trainer.history
>>> figure = plot_runs(histories, f"{folder}/slide.png", x="bytes", panels=["loss"], legend="outside")
>>> figure = result.plot("H", "val_loss", path=f"{folder}/H.png")  # a band over the seeds

## Measure each client on its own data

Give a partition as the validation set, too. Then each client has its own examples, and the history its accuracy.

>>> from vecgym.data import partition_dirichlet
>>> shards = partition_dirichlet(labels, 8, alpha=0.3, min_size=10).datasets(dataset, held_out=0.2)
>>> clients = Trainer(mlp(), shards, shards)
>>> averaged = clients.fit(FedAvgStrategy("sgd", H=5, lr=0.3, participation=0.5), num_nodes=8, max_steps=50, progress=False)
>>> clients.history.last("val_accuracy_each").shape
(8,)
>>> clients.history.last("val_accuracy_lowest_tenth") < clients.history.last("val_accuracy_p50")
True

## Keep layers at home

With `private=` the batch norms stay with their client (FedBN), or the head (FedPer): give patterns of parameters' or
modules' names. Nobody sends them. Here half of the clients have negatives, and no common model fits both halves:

>>> def negatives(client, num_nodes, train):
...     own = slice(None, 768) if train else slice(768, None)
...     images = x[own] * (1 - 2 * (client % 2))
...     return torch.utils.data.TensorDataset(images[client::num_nodes], labels[own][client::num_nodes])
>>> _ = torch.manual_seed(0)
>>> layers = torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
>>> clients, accuracy = Trainer(Classifier(torch.nn.Sequential(*layers)), negatives, negatives), []
>>> for private in [], ["net.0"], ["net.3"]:  # FedAvg, FedBN, FedPer
...     averaged = clients.fit(
...         FedAvgStrategy("sgd", H=5, lr=0.3, private=private), num_nodes=4, max_steps=100, batch_size=16, progress=False
...     )
...     accuracy.append(clients.history.last("val_accuracy_local"))  # of each client's own model, on its own data
>>> [f"{of_own:.2f}" for of_own in accuracy]
['0.39', '0.54', '0.87']

## Share a busy machine

Threads that wait for one another lose most where others want the same cores: use one. Bits depend on the number of threads,
so vecgym does not change it by itself.

>>> torch.set_num_threads(1)
>>> averaged = trainer.fit(DiLoCoStrategy("adamw", H=5, lr=3e-3), num_nodes=4, max_steps=10, progress=False)

## Use a cluster

Any executor takes the stacks of a sweep; `chunk_configs` makes enough of them. With `resume` the call goes on where it
was interrupted. Dask, MPI, Slurm and Ray are in `vecgym.guide.sweeps`, one run on several machines in
`vecgym.guide.processes`.

>>> from concurrent.futures import ProcessPoolExecutor
>>> with ProcessPoolExecutor(2) as executor:
...     result = vecgym.sweep(
...         mlp(), dataset, dataset, strategy=lambda lr: DiLoCoStrategy("adamw", H=5, lr=lr),
...         grid={"lr": [1e-3, 3e-3, 1e-2, 3e-2]}, chunk_configs=2, num_nodes=4, max_steps=10, device="cpu",
...         progress=False, executor=executor, resume=f"{folder}/sweep.pt",
...     )
>>> {row["status"] for row in result.rows}
{'finished'}

## Send a code of your own

A codec says what is sent for a tensor `[L, *]` and what the others make of it. The ledger counts the bytes of the code.

>>> from vecgym.compress import Codec
>>> class Half(Codec):
...     def encode(self, x, draw):
...         return {"values": x.half()}
...     def decode(self, code, like):
...         return code["values"].to(like.dtype)
>>> averaged = trainer.fit(
...     DiLoCoStrategy("adamw", H=5, lr=3e-3, compression=Half()), num_nodes=2, max_steps=5, progress=False
... )
>>> P = sum(p.numel() for p in averaged.parameters())
>>> trainer.ledger.total_payload_bytes == 2 * P
True

## Write a server of your own

A server of an asynchronous run gets the mean movement of the nodes that have arrived. This one goes half of the way:

>>> from vecgym.clock import Compute
>>> from vecgym.core import tree
>>> from vecgym.strategy import Server
>>> class HalfWay(Server):
...     def update(self, params, movement, state, update, inplace=False):
...         return tree.map(lambda p, moved: p - moved / 2, params, movement), state
>>> averaged = trainer.fit(
...     AsyncStrategy("adamw", HalfWay(), H=5, lr=3e-3), num_nodes=4, max_updates=20, compute=Compute([1.0, 1.0, 1.0, 3.0]),
...     progress=False,
... )
>>> trainer.history.last("staleness_max")  # updates that a slow node's movement came late
9
"""
