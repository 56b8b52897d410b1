"""Results: history, metrics, loggers and plots

## History

>>> import torch
>>> from vecgym import CSVLogger, Trainer
>>> from vecgym.models import Classifier
>>> from vecgym.strategy import DiLoCoStrategy
>>> _ = torch.manual_seed(0)
>>> x = torch.randn(1024, 20)
>>> dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
>>> trainer = Trainer(Classifier(torch.nn.Linear(20, 4)), dataset, val_dataset=dataset)
>>> averaged = trainer.fit(DiLoCoStrategy("adamw", H=5, lr=3e-3), num_nodes=8, max_steps=20, val_interval=10)
>>> trainer.history.series("val_loss")[0]  # the steps at which there is a value
[0, 10, 20]
>>> trainer.history["train_loss"][0], len(trainer.history["train_loss"])  # row 0 is the start, before any step
(None, 21)

`trainer.history` records, per step (a row 0 before the first one exists if something is measured there):

- training loss, as a mean and per node; validation loss of the averaged model, as a mean and per node (where nodes may be
  absent, `vecgym.guide.strategies` says of which);
- the model's own metrics, such as accuracy or perplexity;
- inner and outer learning rate;
- bytes sent and received over a node's link, its payload, which papers report (`vecgym.guide.strategies`, "Which bytes"),
  and the bandwidth that the bytes sent imply;
- `epsilon`, the privacy spent, if `vecgym.strategy.Private` counts it;
- at evaluations, the consensus distance before and after the exchange, and memory; with `correlation_interval=`, the
  correlation between nodes;
- steps and examples per second.

`trainer.history.columns` lists the columns, `vecgym.records.columns.COLUMNS` says what each is,
`trainer.history.settings` what the run was given, and `to_pandas()` makes a data frame. `trainer.ledger` has every
collective: its operation, bytes, and the nodes that took part.

## Metrics of a model

If a model has a method `val_metrics(batch)`, validation calls it. (A `loss_fn` returns such a dict itself.) It returns a dict of scalars, which are means over
the batch and include "loss"; if "weight" is among them, they are means over so many tokens, or other units, and are
weighted by it. They become the columns `val_NAME` (averaged model) and `val_NAME_local` (mean of the
nodes). Like the forward pass, it runs for all nodes at once where `vmap` can. Functions of the mean loss go into a
dict `loss_metrics`:

>>> class Accurate(torch.nn.Module):
...     loss_metrics = {"perplexity": torch.exp}
...
...     def __init__(self):
...         super().__init__()
...         self.net = torch.nn.Linear(20, 4)
...
...     def forward(self, batch):
...         x, y = batch
...         return torch.nn.functional.cross_entropy(self.net(x), y)
...
...     def val_metrics(self, batch):
...         x, y = batch
...         return {"loss": self(batch), "accuracy": (self.net(x).argmax(1) == y).float().mean()}
>>> measured = Trainer(Accurate(), dataset, val_dataset=dataset)
>>> averaged = measured.fit(DiLoCoStrategy("adamw", H=5, lr=3e-3), num_nodes=8, max_steps=10)
>>> [name for name in measured.history.columns if name.startswith("val_") and not name.endswith("_local")]
['val_loss', 'val_losses', 'val_accuracy', 'val_perplexity']

`vecgym.models.GPT` reports its perplexity, `vecgym.models.Classifier` its accuracy.

## Loggers

`fit` takes one logger or a list:

>>> import tempfile
>>> from vecgym import TensorBoardLogger, WandbLogger
>>> folder = tempfile.mkdtemp()
>>> loggers = [
...     CSVLogger(f"{folder}/runs/a"),
...     TensorBoardLogger(f"{folder}/tb/a"),
...     WandbLogger(project="research", experiment_name="a", mode="offline", directory=folder),
... ]
>>> averaged = trainer.fit(
...     DiLoCoStrategy("adamw", H=5, lr=3e-3), num_nodes=8, max_steps=20, logger=loggers, log_interval=10
... )

`pip install vecgym[wandb]` and `pip install vecgym[tensorboard]` install what the last two need. Without an account, or
with `mode="offline"`, wandb writes files only. A logger that fails is dropped with a warning, and training continues. A
logger of your own is a subclass of `vecgym.Logger` with `start(settings)`, `log(row)` and `finish()`.

## When a run ends

After `max_steps`, or earlier: at `max_seconds` simulated seconds on a `network=` (`vecgym.guide.clock`), at `max_bytes`
that a node has sent, or when a function of the row says so. So "who is best after equal time" is one argument:

>>> from vecgym.clock import Compute, Network
>>> from vecgym.strategy import AllReduceStrategy
>>> for strategy in AllReduceStrategy("adamw", lr=3e-3), DiLoCoStrategy("adamw", H=20, lr=3e-3):
...     averaged = trainer.fit(
...         strategy, num_nodes=8, max_steps=500, max_seconds=60.0,
...         network=Network("100 Mbit/s", latency="80 ms"), compute=Compute(0.2),
...     )
...     last = trainer.history.rows[-1]
...     print(f"{last['step']} steps, {last['sim_seconds']:.1f} s, {last['bytes_total']:.0f} bytes: {last['val_loss']:.1f}")
46 steps, 60.7 s, 27048 bytes: 1.1
239 steps, 60.1 s, 6468 bytes: 0.3

On a network with such a latency fewer exchanges win, though each step learns less (`python benchmarks/figures.py`, a
somewhat larger network):

![Validation loss of data-parallel training and DiLoCo with H = 5 and 20 in 60 simulated seconds: against steps DDP is the lowest but ends after 46, against seconds H = 20 is](../../notebooks/figures/equal_time.png)

`stop` is early stopping: a function of the row, or an object that remembers.

>>> class Patience:
...     def __init__(self, evaluations):
...         self.evaluations, self.losses = evaluations, []
...
...     def __call__(self, row):
...         if "val_loss" in row:
...             self.losses.append(row["val_loss"])
...         return len(self.losses) > self.evaluations and min(self.losses[-self.evaluations:]) > min(self.losses)
>>> averaged = trainer.fit(
...     DiLoCoStrategy("adamw", H=5, lr=0.3), num_nodes=8, max_steps=500, val_interval=10, stop=Patience(3)
... )
>>> trainer.history.last("step") < 500
True

- The run ends with the first step that reaches a limit (an asynchronous one before the update that would exceed
  `max_seconds`). That step is evaluated, logged and saved as a last one, and `fit` returns its model.
- With `save_dir=`, `resume=True` and a wider limit it goes on, with the bits of a run that never stopped. `max_steps`
  stays what it was, so a cosine is no obstacle; it is cut where the run ends. `stop` sees the earlier rows first.
- On several processes all stop after the same step. `consensus_distance_before` is missing there unless the last step
  was to be evaluated anyway, and in a resumed run that a narrower limit ends at once.
- A logger, or an override of `Trainer.after_step`, may raise StopIteration. A logger gets a row when the next step has
  been taken, and on `backend="processes"` some steps later; `stop` and `after_step` end the run at once.
  (An override is refused with processes that `fit` starts.)

The progress bar shows loss, bytes and steps per second; `progress=False` turns it off. In a notebook `fit(live=True)`
shows a figure of the loss against steps and against bytes below the cell, and draws it anew while the run goes on.
Apart from the first and the last figure, drawing takes at most 5 % of the time.

## Plots

>>> figure = trainer.plot(f"{folder}/run.png", x="bytes")

draws losses, the spread of the nodes and how far they are apart before they exchange, against steps, examples, bytes,
payload or seconds. `vecgym.plot.plot_runs({"a": history, ...})` compares several runs, and `vecgym plot runs/a runs/b`
saved ones. For a slide, say what is to be on it:

>>> from vecgym.plot import plot_runs
>>> from vecgym.strategy import AllReduceStrategy
>>> histories = {"DiLoCo": trainer.history}
>>> averaged = trainer.fit(AllReduceStrategy("adamw", lr=3e-3), num_nodes=8, max_steps=20, val_interval=10)
>>> histories["DDP"] = trainer.history
>>> figure = plot_runs(
...     histories, f"{folder}/slide.png", x="bytes", panels=["loss", "val_accuracy"], xlim=(1e3, 1e5), legend="outside"
... )
>>> [axes.get_title() for axes in figure.axes]
['loss against bytes sent per node', 'validation accuracy']

| argument | what it says |
|---|---|
| `panels` | "loss", or any columns; of a column with a number for each node, the median and the middle 80 % |
| `log_x` | a logarithmic axis: by itself for bytes of several runs, and for simulated seconds if runs differ tenfold |
| `xlim` | where the horizontal axis begins and ends; the vertical one follows |
| `legend` | "inside", or "outside", below the panels |

A panel in which all is zero is left out unless you ask for it. Where there are several runs, the
vertical axis is cut so that the steep first fifth runs off the top. Runs and classes have the colours of categories, numbers (such as `hue="lr"`
in a sweep) those of a scale.

## A page to send

`vecgym report RUN... --output FILE` writes one HTML file about saved runs, to look at, send and keep. It loads nothing and
runs nothing, so it can be opened anywhere.

>>> from vecgym.clock import Compute, Network
>>> from vecgym.cli import main
>>> for H in (5, 10):
...     averaged = trainer.fit(
...         DiLoCoStrategy("adamw", H=H, lr=3e-3), num_nodes=8, max_steps=20, val_interval=10,
...         save_dir=f"{folder}/saved/H={H}", network=Network("100 Mbit/s", "80 ms"), compute=Compute(0.6),
...     )
>>> main(["report", f"{folder}/saved", "--output", f"{folder}/report.html"])  # as `vecgym report ...` does
Report: ...report.html
0

The page has the last results of the runs side by side, the settings in which they differ, and their losses against
steps, bytes and simulated seconds. Then of each run: the last rows of its history, what was sent by operation, when nodes
computed, waited and sent, all settings, and the environment in which it ran:

>>> import re
>>> page = open(f"{folder}/report.html", encoding="utf-8").read()
>>> re.findall("<h[123].*?>(.*?)</h", page)[:8]
['2 runs', 'Settings that differ', 'Figures', 'H=10', 'Last rows', 'What was sent', 'Timeline', 'Environment']
>>> re.findall("<td>(mean)</td><td>(.*?)</td><td>(.*?)</td>", page)  # calls, and in which steps
[('mean', '2', '10 to 20'), ('mean', '4', '5 to 20')]

The bytes of each operation, and the timeline, are in checkpoints and files of `trainer.save`; the file of a `CSVLogger`
alone has the totals.
"""
