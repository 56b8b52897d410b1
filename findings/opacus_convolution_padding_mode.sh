#!/usr/bin/env bash
# opacus 1.6.0: per-example gradients of a convolution whose padding_mode is not "zeros" are wrong, without a word.
#
# Guess before the run: for every layer of torch.nn that it supports, the mean of the per-example gradients is the gradient
# that autograd gives; if a layer is wrong, it is one with an unusual argument, such as a padding mode.
# Seen: with padding_mode "circular", "reflect" and "replicate" the mean of the per-example gradients of the weight is off
# by a fifth to more than the half of the largest entry, in one, two and three dimensions: they are computed as if the
# input were padded with zeros. DP-SGD trains with these gradients. The bias has right ones, so has padding with "zeros",
# and with grad_sample_mode="functorch" all are right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q opacus==1.6.0 torch==2.13.0 numpy==2.2.6

"$work/env/bin/python" - <<'PYTHON'
import opacus
import torch
from opacus.grad_sample import GradSampleModule
from torch import nn

x = {nn.Conv1d: (3, 2, 6), nn.Conv2d: (3, 2, 6, 6), nn.Conv3d: (3, 2, 6, 6, 6)}


def gaps(layer, functorch):
    """Of the mean of per-example gradients from the gradient, relative to the largest entry: weight, bias."""
    net = GradSampleModule(layer, force_functorch=functorch)
    net(torch.randn(x[type(layer)], generator=torch.Generator().manual_seed(1))).square().flatten(1).sum(1).mean().backward()
    return [float((p.grad_sample.mean(0) - p.grad).abs().max() / p.grad.abs().max()) for p in layer.parameters()]


print("opacus", opacus.__version__, "torch", torch.__version__)
for kind in x:
    for mode in ("zeros", "circular", "reflect", "replicate"):
        torch.manual_seed(0)
        layer = kind(2, 3, 3, padding=1, padding_mode=mode)
        weight, bias = gaps(layer, functorch=False)
        print(f"{kind.__name__}, {mode}: weight off by {weight:.2f}, bias by {bias:.0e}")
        assert bias < 1e-4
        assert weight < 1e-4 if mode == "zeros" else weight > 0.2, "it has changed"
        torch.manual_seed(0)
        assert max(gaps(kind(2, 3, 3, padding=1, padding_mode=mode), functorch=True)) < 1e-4, "the check itself is wrong"
PYTHON
echo "As described."
