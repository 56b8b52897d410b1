"""Checkpoints: save a run, load it, continue it

>>> import tempfile, torch, vecgym
>>> from vecgym import Trainer
>>> from vecgym.models import Classifier
>>> from vecgym.strategy import DiLoCoStrategy
>>> _ = torch.manual_seed(0)
>>> x = torch.randn(1024, 20)
>>> dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
>>> trainer = Trainer(Classifier(torch.nn.Linear(20, 4)), dataset)
>>> folder = tempfile.mkdtemp()

>>> strategy = DiLoCoStrategy("adamw", H=20, lr=3e-3)
>>> averaged = trainer.fit(
...     strategy, num_nodes=8, max_steps=40, save_dir=f"{folder}/run", checkpoint_interval=20, resume=True
... )
>>> trainer.save(f"{folder}/run/final.pt")

>>> saved = vecgym.load(f"{folder}/run/final.pt")  # or a checkpoint
>>> model = Classifier(torch.nn.Linear(20, 4))
>>> model.load_state_dict(saved.average)  # what fit returned; saved.node(3) is the state of one node
<All keys matched successfully>
>>> len(saved.history["train_loss"]), saved.settings["num_nodes"]
(40, 8)

`vecgym.load` needs no class of your script and executes nothing from the file.

## Resuming

With `resume=True`, the same script begins a run, or continues it: from the newest checkpoint in `save_dir`, or from one
given by its path. On a CPU **the rest has the bits that it would have had without the interruption**: parameters,
buffers, optimizers, outer state, residuals, queues, history and ledger, for every strategy and engine, from any step.
Files of `CSVLogger` and `TensorBoardLogger` have no row lost or doubled, and `WandbLogger` continues its run.

- **When.** Checkpoints are written at the start, every `checkpoint_interval` steps, at the end, and on Ctrl-C, but not
  when a run diverges. The last `keep_checkpoints` are kept.
- **Safety.** A file appears completely or not at all, even if the program is killed meanwhile. A damaged, foreign or
  handmade file is reported, and the next older one is used. A pipe or device of that name is never opened. If the
  disk is full, the run warns and continues.
- **What must match.** Strategy, model, K, seed and batch size are checked, and a different one is refused with the
  difference. Other data only causes a warning. More steps are refused only where the learning rates depend on their
  number (`"cosine"`). A new run in the folder of another is refused.
- **One run at a time.** While a run goes on it holds the folder, by a lock on the file `.run.lock`. Another that is begun
  there meanwhile is refused, and told which process holds it. The lock ends with its process, however that ends.
- **What may change.** Engine, chunk and micro-batch size, device and number of processes may change; a warning says
  that the last bits will. Loggers, evaluation, and anything else that does not affect training may change freely.
- **Processes.** The first process writes one file with the state of all nodes. Any number of processes, or none, can
  continue from it: to the bit with `exact=True`, else up to rounding. All processes must see the folder.
- **Strategies for one rank** are saved with everything they hold: optimizers, tensors, generators. What cannot be
  saved, such as an iterator, is named at the start. Counters inside a dataset object are not saved.

## What must be the same in a resumed run

Checkpoints and `sweep(resume=)` compare what a run holds and what it computes.

| what | compared by |
|---|---|
| numbers, and tensors | value; tensors above 1 GiB by evenly spaced parts of 1 GiB in all |
| functions: a model's methods, schedules, `param_groups`, topologies, `collate_fn` | their code, with the defaults, globals, functions and objects that they use |
| packages installed by pip | name |
| random generators | kind, since their state changes with use; torch's also by seed |
| datasets | class, code, length, and the tensors in them; without tensors, in a sweep, also some batches |

Comments, docstrings, line numbers and the place of a file do not matter. The code of functions is not compared between
two versions of Python; a warning says so. Only checkpoints hold the initial weights themselves, so a model may be
initialised differently when a run of `fit` continues.
"""
