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
- **Safety.** A file appears completely or not at all, even if the program is killed meanwhile. A damaged or foreign
  file is reported, and the next older one is used; values that somebody has edited are not recognised. A pipe or
  device of that name is never opened. If the disk is full, the run warns and continues.
- **What must match.** Strategy, model, K, seed, batch size, `shuffle`, `autocast`, `collate_fn` and `availability` (with its
  `compute`) are checked, in asynchronous runs also `compute` and `network`; a mismatch is refused, and the error names it.
  Other data of the same length only causes a warning. More steps are refused only where the learning rates
  depend on their number (`"cosine"`): give such a schedule its own length,
  `lr_scheduler=vecgym.optim.schedule.lambda_cosine(max_steps=1000, cosine_anneal=True)`, or give all `max_steps` and
  end earlier (`stop=`, `max_seconds=`, `max_bytes=`). A new run in the folder of another is refused.
- **One run at a time.** A run holds a lock on its folder, the file `.run.lock`. A second run that is started
  there is refused; the error names the process that holds it. The lock always ends with its process. A file
  system without locks gives no protection.
- **What may change.** Engine, chunk and micro-batch size, device and number of processes may change; a warning says
  that the last bits will. Loggers, evaluation, and anything else that does not affect training may change freely.
- **Processes.** The first process writes one file with the state of all nodes. Any number of processes, or none, can
  continue from it: to the bit with `exact=True`, else up to rounding. All processes must see the folder.
- **Strategies for one rank** are saved by `state_dict()`: tensors, plain values, generators and whatever has a
  `state_dict`, in their attributes and in the lists, dicts and objects below; of a module its parameters and buffers.
  What cannot be saved, such as an iterator, is named at the first checkpoint: give the strategy a `state_dict()` and a
  `load_state_dict(state)` of its own. Counters inside a dataset object are not saved.

## What must be the same in a resumed run

Checkpoints and `sweep(resume=)` compare what a run is given, and a little of what it computes.

| what | compared by |
|---|---|
| numbers, texts, tensors in settings and strategies | value |
| functions and classes: schedules, `loss_fn`, `param_groups`, topologies, `collate_fn` | qualified name; schedules also by the learning rates of some steps |
| other objects | class, and what their attributes hold; random generators by kind, torch's also by seed |
| the model | modules, and shapes and dtypes of parameters and buffers; and **its loss**, to 1e-3, or 3e-2 with autocast or 16-bit parameters |
| data | number of examples, and a digest of the first batch |

The loss is that of node 0's first batch, by the plain module in eval mode. Every checkpoint has it at its own
parameters, for one forward pass, so another initialisation, engine or chunk resumes, and a changed model or loss is
found; on another device, a warning says so. A sweep has it once for each distinct model, at its initial weights; its
grid may have grown, and the rows of the file are found by their settings. If the batch is another one, or the model has no
loss in eval mode, it is not compared.

**A changed function that leaves all of these alone is not noticed**: other `param_groups` of the same name, say, or a
layer that only training uses.
"""
