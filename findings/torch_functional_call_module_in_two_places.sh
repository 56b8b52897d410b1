#!/usr/bin/env bash
# torch 2.13.0: functional_call does not put back the parameters of a module object that stands in two places of a model.
#
# Guess before the run: the module is as before after the call, since functional_call replaces its parameters for the
# call alone; one activation object used twice in an nn.Sequential is a common way to write a model.
# Seen: that module keeps the tensor of the call in place of its Parameter, without an error. The model computes with the
# call's value afterwards, and an optimizer made before the call trains a Parameter that no module has any more. After
# torch.func.grad the tensor that stays belongs to a transform that has ended.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy==2.2.6

"$work/env/bin/python" - <<'PYTHON'
import torch
from torch import nn


def kept(twice):
    """Whether the model has its own parameters after a call with others."""
    act = nn.PReLU()
    net = nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act if twice else nn.PReLU())
    before = list(net.parameters())
    others = {name: p.detach() + 1.0 for name, p in net.named_parameters()}
    torch.func.functional_call(net, others, (torch.ones(1, 2),))
    print("two places" if twice else "two modules", "-> the activation's weight is", act.weight)
    same = all(p is q for p, q in zip(before, net.parameters()))
    assert same or (act.weight == others["1.weight"]).all(), "it has another value now"
    optimizer = torch.optim.SGD(before, lr=1.0)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert same or before[2].grad is None, "the optimizer's parameter is trained now"
    if not same:
        torch.func.grad(lambda params: torch.func.functional_call(net, params, (torch.ones(1, 2),)).sum())(others)
        assert torch._C._functorch.is_gradtrackingtensor(act.weight), "no tensor of a transform stays now"
    return same


print(torch.__version__)
assert kept(twice=False), "a plain model differs now"
assert not kept(twice=True), "the parameter is put back now"
PYTHON
echo "As described."
