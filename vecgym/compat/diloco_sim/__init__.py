"""Run scripts written for diloco-sim (github.com/MattBeton/diloco-sim): `DilocoSimulator(config).train()`.

After `install()`, an unmodified script can `from diloco_sim import DilocoSimulator, DilocoSimulatorConfig`.

Timing is the original's. Before each local step except the first, in this order: SPARTA every `sparta_interval` steps,
the outer step every `diloco_interval`, evaluation every `eval_interval` (also before the first), a checkpoint every
`ckpt_interval` outer steps. Nothing is exchanged after the last step. Where its document and its code differ, this
follows the document. The differences from its code:

| diloco-sim | here |
|---|---|
| the outer optimizer gets no gradients, so that only the nodes' mean is taken (FedAvg) | the outer step; \
`outer_optimizer_kwargs={"lr": 1.0}` gives the mean |
| SPARTA's delayed values go through one queue for all tensors, and end up in the wrong ones | one queue per tensor |
| masks and initial models are drawn without the script's seed, which the processes never see; dropout is the same on \
all nodes | one `seed`; the model is built in the script's process, where `torch.manual_seed` has an effect |
| every epoch has the same order; examples that do not divide by the nodes are dropped | a new order in each epoch, \
the first one that of the original; some examples are repeated so that all nodes have as many |
| `max_minibatch_size`: gradients of the parts are added up, which enlarges the step; the last part's loss is \
reported | their mean; the largest divisor of `batch_size` up to it |
| `eval_iters` are examples (400), shuffled anew | batches (50), the same examples each time |
| node 1 evaluates the average on training batches, which are then lost to training; without `eval_dataset` node 0 \
too | both on `eval_dataset`, or without it on the first training examples, which are still trained on |
| the reported losses are those of node 0 | means over the nodes |
| `cosine_anneal` needs `max_local_step` | anneals over the steps of the run |
| `ckpt_interval` counts local steps; files need wandb, one per node: SAVE_DIR/PROJECT/RUN/NODE/STEP.pt | outer steps; \
the average: SAVE_DIR/STEP.pt |
| `load_model` fails; `model_path` is not read | the nodes start from that file |
| `corr_interval` needs `save_dir`, and logs only to wandb | column "correlation" of `history` |
| wandb is required, and every node starts a run | only with `wandb_project`; one run |
| `train_loss_hook` and `eval_loss_hook` are only in the document | called, in the script's process |
| `devices`: the nodes' GPUs in turn; `port` | the first of `devices`; no port: other values warn |
"""

from vecgym.compat import imports
from vecgym.compat.diloco_sim.config import DilocoSimulatorConfig, EvalStats, TrainStats
from vecgym.compat.diloco_sim.simulator import DilocoSimulator

__all__ = ["DilocoSimulator", "DilocoSimulatorConfig", "EvalStats", "TrainStats", "install"]

# The modules of the original, and the names in them.
_MODULES: dict[str, tuple[type, ...]] = {
    "diloco_sim": (DilocoSimulator, DilocoSimulatorConfig),
    "diloco_sim.diloco": (DilocoSimulator, DilocoSimulatorConfig, TrainStats),
    "diloco_sim.config": (DilocoSimulatorConfig,),
    "diloco_sim.eval": (EvalStats,),
}


def install() -> None:
    """Make `import diloco_sim` find vecgym's classes in this process.

    Raises:
        ImportError: if another diloco_sim has been imported already.

    >>> install()
    >>> from diloco_sim import DilocoSimulator as found
    >>> found is DilocoSimulator
    True
    """
    if not imports.is_installed("diloco_sim"):
        imports.install({path: {cls.__name__: cls for cls in classes} for path, classes in _MODULES.items()}, {})
