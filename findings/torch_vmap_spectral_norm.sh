#!/usr/bin/env bash
# torch 2.13.0: a model with spectral norm runs under vmap in eval mode only.
#
# Guess before the run: with parameters and buffers from stack_module_state it works in both modes, and equals a loop.
# Seen: in training mode a RuntimeError, "Batching rule not implemented for aten::div.out", from the power iteration, which
# normalises with an out= argument; in eval mode the results are those of a loop.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy==2.2.6

"$work/env/bin/python" - <<'PYTHON'
import copy

import torch
from torch.func import functional_call, stack_module_state
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(0)
nets, x = [torch.nn.Sequential(spectral_norm(torch.nn.Linear(3, 3))) for _ in range(3)], torch.ones(2, 3)
base = copy.deepcopy(nets[0])


def together(training):
    for net in (*nets, base):
        net.train(training)
    state = stack_module_state(nets)
    return torch.vmap(lambda params, buffers: functional_call(base, (params, buffers), (x,)))(*state)


print("eval:", gap := float((together(False) - torch.stack([net(x) for net in nets])).detach().abs().max()))
assert gap < 1e-6
try:
    together(True)
except RuntimeError as error:
    print("train:", str(error)[:60])
    assert "div.out" in str(error), "another error now"
else:
    raise SystemExit("it works in training mode now")
PYTHON
echo "As described."
