#!/usr/bin/env bash
# torch 2.13.0: a backward pass through the forward-mode derivative of layer norm is silently wrong.
#
# Guess before the run: torch.func.jvp of a function with F.layer_norm can be differentiated again like any other
# function, as the documentation of forward-over-reverse says; a difference to finite differences is our own error.
# Seen: the value of the directional derivative is right. Its gradient by a matrix that makes layer norm's input is off by
# 44 % of the largest entry, where layer norm written by hand agrees with finite differences to 1e-9. No error, no
# warning.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy==2.2.6

"$work/env/bin/python" - <<'PYTHON'
import torch
from torch.func import jvp

generator = torch.Generator().manual_seed(0)
x, v = (torch.randn(3, 5, dtype=torch.float64, generator=generator) for _ in range(2))
given = torch.randn(5, 5, dtype=torch.float64, generator=generator)


def by_hand(y):
    centred = y - y.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def directional(norm, a):
    return jvp(lambda x: norm(x @ a).tanh().square().sum(), (x,), (v,))[1]


def gap(norm):
    """Of the gradient by `a` from central differences, relative to the largest of them."""
    a = given.clone().requires_grad_()
    (slope,) = torch.autograd.grad(directional(norm, a), a)
    differences = torch.empty_like(given)
    for i in range(5):
        for j in range(5):
            step = torch.zeros_like(given)
            step[i, j] = 1e-6
            differences[i, j] = (directional(norm, given + step) - directional(norm, given - step)) / 2e-6
    return ((slope - differences).abs().max() / differences.abs().max()).item()


def torchs(y):
    return torch.nn.functional.layer_norm(y, (5,))


print(torch.__version__, "values", directional(torchs, given).item(), directional(by_hand, given).item())
print("gap of the gradient: by hand", gap(by_hand), "torch's layer norm", gap(torchs))
assert abs(directional(torchs, given) - directional(by_hand, given)) < 1e-10, "the values differ now"
assert gap(by_hand) < 1e-6, "the check itself is wrong"
assert gap(torchs) > 1e-3, "the gradient is right now"
PYTHON
echo "As described."
