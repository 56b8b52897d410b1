"""vecgym: distributed training of one model on K nodes, simulated as one vectorised PyTorch program."""

from vecgym.errors import VecgymWarning
