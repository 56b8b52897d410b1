#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, asked before the first step, changes how
# Adam, ASGD, Rprop and others train afterwards.
#
# Guess before the run: a function that reads a state changes no training; if it does, then that of Adam, whose count of
# steps is 1 too large afterwards, so that its first steps are smaller.
# Seen: it makes a step of gradients that are 0, with a learning rate of 0, to have a state. The weights stay, but the
# optimizer has made a step: Adam's first movement is 0.74 of a learning rate in place of 1, ASGD's first step moves
# nothing, and Rprop, whose steps begin at the learning rate, begins at its smallest one, 1e-6, and has moved 3e-5 after
# ten steps in place of 2.6. SGD with and without momentum, RMSprop and Adagrad train as without the call. So a checkpoint
# at step 0 changes the run that it belongs to, and a run with one differs from a run without.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy==2.2.6

"$work/env/bin/python" - <<'PYTHON'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import ASGD, SGD, Adagrad, Adam, RMSprop, Rprop


def moved(make, ask, steps):
    """The movement of one weight whose gradient is 1 in each step."""
    net = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(net.weight)
    optimizer = make(net.parameters())
    if ask:
        get_optimizer_state_dict(net, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return -net.weight.item()


print(torch.__version__)
found = {}
for name, make in {
    "SGD": lambda p: SGD(p, 0.1), "momentum": lambda p: SGD(p, 0.1, momentum=0.9), "RMSprop": lambda p: RMSprop(p, 0.1),
    "Adagrad": lambda p: Adagrad(p, 0.1), "Adam": lambda p: Adam(p, 0.1), "ASGD": lambda p: ASGD(p, 0.1, lambd=0.0),
    "Rprop": lambda p: Rprop(p, 0.1),
}.items():
    found[name] = [moved(make, ask, steps) for steps in (1, 10) for ask in (False, True)]
    print(name, "moves in 1 step {:.3g}, asked before {:.3g}; in 10 steps {:.3g}, asked {:.3g}".format(*found[name]))
for name in ("SGD", "momentum", "RMSprop", "Adagrad"):
    assert found[name][0] == found[name][1] and found[name][2] == found[name][3], f"{name} differs now"
assert abs(found["Adam"][0] - 0.1) < 1e-6
assert abs(found["Adam"][1] - 0.0744) < 1e-3, "Adam is as without the call now, or something else"
assert found["ASGD"][0] > 0.09
assert found["ASGD"][1] == 0, "ASGD moves in the first step now"
assert found["Rprop"][2] > 1
assert found["Rprop"][3] < 1e-3, "Rprop moves now"
PYTHON
echo "As described."
