"""Commands: the command line

| command | what it does |
|---|---|
| `vecgym compare` | trains a small GPT with several strategies, and compares them |
| `vecgym run` | trains from a configuration: a function in a file |
| `vecgym sweep` | runs a sweep from a configuration |
| `vecgym plot` | draws saved runs |
| `vecgym report` | writes a page about saved runs: one HTML file |
| `vecgym price` | tells how long strategies, or a recorded run, take on your network |
| `vecgym verify` | compares strategies with themselves on real processes |
| `vecgym exogym` | runs a script written for EXO Gym |
| `vecgym info` | shows versions, devices, threads and engines; of saved runs, the settings, the engine and why it was chosen |

Each has `--help`, which does not load torch and so comes at once.

## Configurations

A configuration is a function in a file. It returns a dict with `model`, `train_dataset`, `val_dataset`, `loss_fn`
and the arguments of `Trainer.fit`:

```python
# experiment.py
import torch
from vecgym.models import Classifier
from vecgym.strategy import DiLoCoStrategy


def diloco(H=20, lr=3e-3):
    torch.manual_seed(0)
    x = torch.randn(4096, 20)
    dataset = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    return {
        "model": Classifier(torch.nn.Linear(20, 4)), "train_dataset": dataset, "val_dataset": dataset,
        "strategy": DiLoCoStrategy("adamw", H=H, lr=lr), "num_nodes": 16, "max_steps": 500,
    }
```

```bash
vecgym run experiment.py:diloco --output runs/diloco-20
vecgym run experiment.py:diloco --set H=50 max_steps=1000 max_bytes=1e6 --output runs/diloco-50
vecgym plot runs/diloco-20 runs/diloco-50 --x bytes --output both.png
vecgym report runs/diloco-20 runs/diloco-50 --output both.html
```

`--set` passes an argument to the function, or else replaces an item of the dict that it returns. In the same way,
`vecgym sweep FILE.py:function` takes the arguments of `vecgym.sweep`; it writes rows, figures, and which configurations
shared a program. `vecgym verify FILE.py:function` compares the strategy that the function returns with itself on
processes. `run` and `sweep` replace earlier results only with `--overwrite`; `compare`,
`plot` and `report` always do.

`vecgym compare --seeds 3` trains each strategy with three seeds. Losses are then means ± over 3 seeds (the standard
deviation), and a second table has the differences to the first strategy, seed by seed, with their 95 % intervals.

`vecgym plot` and `vecgym report` take the folders of `vecgym run`, a `CSVLogger` and `fit(save_dir=)`, checkpoints and
files of `trainer.save`; a folder without a run stands for those in it. The content of a report is described in `vecgym.guide.results`.
The folder of `vecgym run` has a history, but no ledger. For a report with a timeline, and for `vecgym price`, save the run
too: `--set save_dir=runs/diloco-20/saved`.

## Threads

vecgym says how torch's threads wait for work, so that they do not keep the cores from other programs. If your
environment has `OMP_WAIT_POLICY`, `GOMP_SPINCOUNT` or `KMP_BLOCKTIME`, it stays as it is. `vecgym.guide.performance`
has measurements.

## Exit codes

| code | meaning |
|--:|---|
| 0 | done |
| 1 | an error: one line on stderr, with the line of your code that it came through; `--traceback` shows all of it; or `verify` found a difference |
| 2 | an invalid command line |
| 130 | interrupted with Ctrl-C |
"""
