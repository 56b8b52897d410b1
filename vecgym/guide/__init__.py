"""The guide: the manual of vecgym, one page per module

Read a page with `help(vecgym.guide.sweeps)`, or render all of them and the API as web pages with `.ci/docs site`.

Use:

- `vecgym.guide.strategies`: all strategies, composing exchanges, optimizers
- `vecgym.guide.asynchronous`: nodes that do not wait for the slowest, staleness, servers
- `vecgym.guide.sweeps`: grids, random search, resuming, executors
- `vecgym.guide.gradients`: rollouts, meta-gradients, optimized schedules
- `vecgym.guide.clock`: how long a run takes on your network; dry runs
- `vecgym.guide.processes`: `torch.distributed`, 8 GPUs, several machines, `verify`
- `vecgym.guide.data_and_models`: models, datasets, partitions, engines
- `vecgym.guide.hugging_face`: models of transformers, from tokens in a file to a saved average
- `vecgym.guide.results`: history, metrics, loggers, plots
- `vecgym.guide.checkpoints`: saving, resuming, what a resumed run must share
- `vecgym.guide.memory`: estimates, limits, how many nodes fit
- `vecgym.guide.commands`: the command line
- `vecgym.guide.compat`: EXO Gym and diloco-sim scripts; the features of their documents

Judge:

- `vecgym.guide.performance`: measurements, and how they were made
- `vecgym.guide.limits`: what does not work

Extend:

- `vecgym.guide.writing_a_strategy`: step by step, and the contract
- `vecgym.guide.contributing`: where to add what, checks

>>> import vecgym
>>> vecgym.guide.sweeps.__doc__.splitlines()[0]
'Sweeps: many configurations as one stacked program'
"""

from vecgym.guide import (
    asynchronous,
    checkpoints,
    clock,
    commands,
    compat,
    contributing,
    data_and_models,
    gradients,
    hugging_face,
    limits,
    memory,
    performance,
    processes,
    results,
    strategies,
    sweeps,
    writing_a_strategy,
)

__all__ = [
    "asynchronous",
    "checkpoints",
    "clock",
    "commands",
    "compat",
    "contributing",
    "data_and_models",
    "gradients",
    "hugging_face",
    "limits",
    "memory",
    "performance",
    "processes",
    "results",
    "strategies",
    "sweeps",
    "writing_a_strategy",
]
