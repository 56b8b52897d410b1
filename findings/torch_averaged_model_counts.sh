#!/usr/bin/env bash
# torch 2.13.0: AveragedModel(use_buffers=True) of a model with batch norm fails or stalls at the count of batches with
# the two averages that torch offers as multi_avg_fn.
#
# Guess before the run: the exponential average raises an error, since the count of batches is an integer.
# Seen: the equal average raises. get_swa_multi_avg_fn() ends in a RuntimeError at the second update, "Integer division with
# addcdiv is no longer supported"; get_ema_multi_avg_fn(0.9) truncates: the count stays 1 for ten updates, and is 20 after 30. With
# use_buffers=False, the default, both work, and the count is that of the last update.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy==2.2.6

"$work/env/bin/python" - <<'PYTHON'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

torch.manual_seed(0)


def counts(function, updates, use_buffers=True):
    net = torch.nn.BatchNorm1d(2)
    average = AveragedModel(net, multi_avg_fn=function, use_buffers=use_buffers)
    found = []
    for _ in range(updates):
        net(torch.randn(3, 2))
        average.update_parameters(net)
        found.append(average.module.num_batches_tracked.item())
    return found


ema = counts(get_ema_multi_avg_fn(0.9), 30)
print("exponential:", ema)
assert ema[:10] == [1] * 10, "the count moves at once now"
assert ema[-1] == 20, "the count has another value now"
try:
    counts(get_swa_multi_avg_fn(), 2)
except RuntimeError as error:
    print("equal:", str(error)[:60])
    assert "addcdiv" in str(error), "another error now"
else:
    raise SystemExit("the equal average works now")
for function in (get_swa_multi_avg_fn(), get_ema_multi_avg_fn(0.9)):
    assert counts(function, 30, use_buffers=False) == list(range(1, 31)), "the default has other counts now"
PYTHON
echo "As described."
