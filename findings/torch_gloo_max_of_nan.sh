#!/usr/bin/env bash
# torch 2.13.0: with gloo, the maximum of tensors that are nan on one of four ranks is nan in a quarter of its elements.
#
# Guess before the run: the result is nan everywhere if rank 0 has the nan, and nowhere if another rank has it, as for one
# element.
# Seen, 4 ranks: of 64 and of 1,000 elements a quarter is nan, whichever rank has them: the segments of the ring that
# begin at that rank. Of 4 elements two are nan if rank 0 or 1 has them, and none otherwise; of one element the guess is
# right. All ranks have the same result. So a check for nan by a maximum over ranks needs a look at every element.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy==2.2.6

cat >"$work/run.py" <<'PYTHON'
import math

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
expected = {1: [1.0, 0.0, 0.0, 0.0], 4: [0.5, 0.5, 0.0, 0.0], 64: [0.25] * 4, 1000: [0.25] * 4}
for number, shares in expected.items():
    found = []
    for place in range(size):
        x = torch.full((number,), math.nan if rank == place else 1.0)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        found.append(x.isnan().float().mean().item())
    if rank == 0:
        print(f"{number} elements: share of nan if rank 0, 1, 2, 3 has nan: {found}")
    assert found == shares, f"rank {rank}: it has changed"
dist.barrier()
dist.destroy_process_group()
PYTHON
"$work/env/bin/torchrun" --standalone --nproc-per-node 4 "$work/run.py"
echo "As described."
