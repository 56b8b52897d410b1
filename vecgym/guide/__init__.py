"""The guide: training on many nodes, simulated as one program

vecgym trains one model on K nodes, in one process. A model is a module that returns the mean loss of a batch; a strategy
says what its K copies exchange, and when:

>>> import torch
>>> from vecgym import Trainer
>>> from vecgym.models import Classifier
>>> from vecgym.strategy import DiLoCoStrategy
>>> x = torch.randn(1024, 20)
>>> dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
>>> trainer = Trainer(Classifier(torch.nn.Linear(20, 4)), dataset, val_dataset=dataset)
>>> averaged = trainer.fit(
...     DiLoCoStrategy("adamw", H=10, lr=0.01), num_nodes=8, max_steps=50, batch_size=16, device="cpu", progress=False
... )
>>> trainer.ledger  # all that was sent
Ledger(5 collectives, 2,940 bytes sent per node)

Strategies differ in the loss that they reach, and in the bytes that this takes:

![Loss of a small GPT on 8 nodes under five strategies, left against optimizer steps, right against bytes sent](../../notebooks/figures/compare.png)

The pages follow in an order to be read. Each is the docstring of a module, `help(vecgym.guide.sweeps)` say, and
`.ci/docs site` renders them and the reference as web pages.

Use:

- `vecgym.guide.recipes`: eleven things that people come for, each in a few lines
- `vecgym.guide.strategies`: all strategies, composing exchanges, optimizers
- `vecgym.guide.data_and_models`: models, datasets, partitions, engines
- `vecgym.guide.hugging_face`: models of transformers, from tokens in a file to a saved average
- `vecgym.guide.results`: history, metrics, loggers, plots
- `vecgym.guide.clock`: how long a run takes on your network; dry runs
- `vecgym.guide.sweeps`: grids, random search, resuming, executors
- `vecgym.guide.checkpoints`: saving, resuming, what a resumed run must share
- `vecgym.guide.memory`: estimates, limits, how many nodes fit
- `vecgym.guide.asynchronous`: nodes that do not wait for the slowest, staleness, servers
- `vecgym.guide.gradients`: rollouts, meta-gradients, the worth of each exchange
- `vecgym.guide.meta`: numbers and schedules learned over many runs, and what they are worth on others
- `vecgym.guide.processes`: `torch.distributed`, 8 GPUs, several machines, `verify`
- `vecgym.guide.commands`: the command line
- `vecgym.guide.compat`: EXO Gym and diloco-sim scripts; the features of their documents

Judge:

- `vecgym.guide.performance`: measurements, and how they were made
- `vecgym.guide.limits`: what does not work
- `vecgym.guide.what_holds`: published findings tried here, and an atlas of what only many runs show
- `vecgym.guide.real_systems`: where a port to real libraries goes wrong

Extend:

- `vecgym.guide.writing_a_strategy`: an average, a stage, a strategy of your own; the contract
- `vecgym.guide.contributing`: where to add what, checks
"""

import importlib
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = sorted(page.name for page in pkgutil.iter_modules(__path__))

for name in __all__:
    importlib.import_module(f"{__name__}.{name}")
del name

if TYPE_CHECKING:  # type checkers do not run the loop

    def __getattr__(name: str) -> ModuleType: ...
