#!/usr/bin/env bash
# torch 2.13.0: autocast does not reach a convolution under vmap.
#
# Guess before the run: torch.vmap of a module gives the dtype that the module gives on each slice, under autocast too.
# Seen: a convolution, bfloat16 on a slice, is float32 under torch.vmap, whether its weights are mapped or not, and so is a
# linear layer with a bias; a linear layer without one is bfloat16. Memory and time of a vmapped model under autocast are
# those of float32, without a word.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy==2.2.6

"$work/env/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F

x, weight = torch.randn(3, 2, 1, 5, 5), torch.randn(3, 1, 1, 3, 3)
conv, linear, without = torch.nn.Conv2d(1, 1, 3), torch.nn.Linear(5, 5), torch.nn.Linear(5, 5, bias=False)
with torch.autocast("cpu"):
    plain = [conv(x[0]).dtype, F.conv2d(x[0], weight[0]).dtype, linear(x[0]).dtype, without(x[0]).dtype]
    vmapped = [
        torch.vmap(conv)(x).dtype, torch.vmap(F.conv2d)(x, weight).dtype, torch.vmap(linear)(x).dtype,
        torch.vmap(without)(x).dtype,
    ]
print(torch.__version__, "convolution, of its own weights, linear, without bias: plain", plain, "vmap", vmapped)
assert plain == [torch.bfloat16] * 4, "plain calls differ now"
assert vmapped == [torch.float32] * 3 + [torch.bfloat16], "vmap differs now"
PYTHON
echo "As described."
