#!/usr/bin/env bash
# torch 2.13.0: within torch.nn.utils.parametrize.cached(), functional_call computes with the weight of the first call,
# whatever parameters it is given, and so does the module itself.
#
# Guess before the run: outside of the block every call uses the parameters that it is given; inside, the second call
# may have the weight of the first.
# Seen: it does, without a word: a weight-normed linear layer, called with parameters times 2 and then times 3, returns
# the second time the weight of the first call with the bias of the second. Then the module, called with its own
# parameters, has the weight of the functional call, too. So a loop over the parameters of several nodes must not be
# within the block.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy==2.2.6

"$work/env/bin/python" - <<'PYTHON'
import torch
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

torch.manual_seed(0)
layer, x = parametrizations.weight_norm(torch.nn.Linear(3, 3)), torch.ones(2, 3)


def scaled(by):
    return {name: p.detach() * by for name, p in layer.named_parameters()}


plain = [functional_call(layer, scaled(by), (x,)) for by in (2, 3)]
own = layer(x)
with parametrize.cached():
    first, second = (functional_call(layer, scaled(by), (x,)) for by in (2, 3))
    own_inside = layer(x)
weight_of_the_first = torch.allclose(second - first, layer.bias)  # 3 b - 2 b, and nothing else
print("outside:", torch.equal(*plain), "inside, second has the first's weight:", weight_of_the_first)
module_too = torch.allclose(first - own_inside, layer.bias)
print("the module has the first call's weight, too:", module_too)
assert torch.equal(first, plain[0])
assert not torch.equal(*plain)
assert weight_of_the_first, "the second call has its own weight now"
assert module_too and not torch.allclose(own_inside, own), "the module has its own weight now"
PYTHON
echo "As described."
