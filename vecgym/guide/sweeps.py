"""Sweeps: many configurations as one stacked program

`vecgym.sweep` trains every configuration of a grid. C configurations of K nodes become one program of C · K stacked
nodes, whose gradients are computed in one call. Exchanges stay within each configuration, so every curve is that of
`Trainer.fit` for the same configuration alone (to 1e-10 in float64, for every strategy, including your own).

>>> import torch, vecgym
>>> from vecgym.models import Classifier
>>> from vecgym.strategy import DiLoCoStrategy
>>> _ = torch.manual_seed(0)
>>> x = torch.randn(1024, 20)
>>> dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
>>> model = Classifier(torch.nn.Linear(20, 4))
>>> result = vecgym.sweep(
...     model, dataset, dataset,
...     strategy=lambda H, lr, outer_lr: DiLoCoStrategy("adamw", H=H, lr=lr, outer_lr=outer_lr),
...     grid={"H": [5, 20], "lr": [1e-3, 3e-3], "outer_lr": [0.4, 1.0], "seed": range(2)},
...     num_nodes=8, max_steps=40, batch_size=16, progress=False,
... )
>>> len(result.rows)
16

![Left, validation loss against learning rate and H, 16 cells; right, the loss of the 16 configurations against bytes sent, means and ranges of 4 seeds, with the Pareto front](../../notebooks/figures/sweep.png)

The figure shows 16 configurations of DiLoCo with 4 seeds each, on 8 nodes with unlike data: 512 nodes in one program.
Along the Pareto front the mean loss over the seeds falls from 1.25 to 1.04 for 10 times the bytes
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

`print(result.table())` shows all rows, `result.to_pandas()` and `history.to_pandas()` return data frames.
Figures: `plot` draws bands over the seeds, `plot_heatmap(x, y)` two axes, `plot_pareto()` loss against bytes.

>>> figure = result.plot(x="H", y="val_loss", hue="lr")

## Axes

An axis is one of:

- an argument of `strategy`;
- an argument of `model`, if that is a function (`lambda seed: make_model(seed)`);
- one of the settings `num_nodes`, `batch_size`, `minibatch_size`, `max_steps`, `num_epochs`, `seed` and `shuffle`.

Values may be anything: numbers, classes, matrices, selectors. With `samples=50`, points are drawn at random, and an
axis may be a distribution, `vecgym.Uniform(a, b)` or `vecgym.LogUniform(a, b)`:

>>> random_search = vecgym.sweep(
...     model, dataset, dataset, strategy=lambda lr: DiLoCoStrategy("adamw", H=5, lr=lr),
...     grid={"lr": vecgym.LogUniform(1e-4, 1e-1)}, samples=3, num_nodes=4, max_steps=10, progress=False,
... )
>>> all(1e-4 <= row["lr"] <= 1e-1 for row in random_search.rows)
True

## What shares a program

Configurations are stacked if they agree in K, batch size, number of steps and the structure of the model, and in
whether they keep one copy of the parameters for all nodes, as AllReduce does. `result.explain()` shows the programs. A
program that is too large for memory, or larger than pays off, is cut into several (`chunk_configs`,
`max_memory_bytes`).

## When something goes wrong

- A configuration whose loss becomes NaN is marked `diverged` and leaves the stack. The others continue.
- Ctrl-C returns the results so far.
- `resume="sweep.pt"` keeps results in a file and continues from it. Grid, strategies, settings, initial weights, data,
  and everything that functions and models compute must be the same; otherwise the sweep is refused, and the error says
  what differs. Seed whatever is random, for instance with `torch.manual_seed(0)`. `vecgym.guide.checkpoints` says
  what is compared.
- A strategy written for one rank is not saved in the middle of a program: `resume` starts that program again.
- Dropout masks differ from those of the single run, except with `engine="loop"`.

`python benchmarks/sweep.py` measures a sweep against fitting its configurations one after the other. The notebook
`notebooks/2_sweep.ipynb` is a longer example.
"""
