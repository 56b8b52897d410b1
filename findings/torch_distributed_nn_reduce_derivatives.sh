#!/usr/bin/env bash
# torch 2.13.0: the derivatives of torch.distributed.nn.functional.all_reduce are those of a sum, put through the same
# operation: with PRODUCT and MAX they are wrong, without a word.
#
# Guess before the run: the backward pass applies the forward operation to the gradients of the ranks, which is right for
# a sum and an average, and wrong for a maximum and a product; the functional collectives raise an error for these.
# Seen, gloo, ranks with x = 2 and 3 and the losses y and 10 y of y = all_reduce(x): the derivatives of the sum of the
# losses are 33 and 22 for the product, and 10 and 10 are returned, the product of 1 and 10; for the maximum they are 0 and
# 11, and 10 and 10 are returned. Sum and average are right. The functional collectives raise a RuntimeError for all but
# the sum.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy==2.2.6

cat >"$work/run.py" <<'PYTHON'
import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.nn.functional import all_reduce

dist.init_process_group("gloo")
rank = dist.get_rank()
right = {"sum": [11.0, 11.0], "avg": [5.5, 5.5], "product": [33.0, 22.0], "max": [0.0, 11.0]}
returned = {"sum": 11.0, "avg": 5.5, "product": 10.0, "max": 10.0}
operations = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT, "max": dist.ReduceOp.MAX}
for name, operation in operations.items():
    x = torch.tensor([2.0 + rank], requires_grad=True)
    (10.0**rank * all_reduce(x, operation)).sum().backward()
    print(f"rank {rank}, {name}: derivative {x.grad.item()}, of the sum of the losses {right[name][rank]}")
    assert x.grad.item() == returned[name], "it has changed"
    x = torch.tensor([2.0 + rank], requires_grad=True)
    try:
        functional.all_reduce(x, name, dist.group.WORLD).sum().backward()
        assert name == "sum", "functional collectives have this derivative now"
    except RuntimeError:
        assert name != "sum", "functional collectives have no derivative of a sum now"
dist.barrier()
dist.destroy_process_group()
PYTHON
"$work/env/bin/torchrun" --standalone --nproc-per-node 2 "$work/run.py"
echo "As described."
