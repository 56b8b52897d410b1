#!/usr/bin/env bash
# flwr 1.42.0: Krum, MultiKrum and Bulyan of flwr.serverapp select clients by rounding errors where these move little, and
# in float16 always the first.
#
# Guess before the run: they compute distances as |x|^2 + |y|^2 - 2 x y in the arrays' own precision, as their source shows.
# In float32 that is noise where clients move less than a thousandth of the weights' norm, as in fine-tuning: a client that
# moves several times as far is then selected about as often as others; flwr.server's Krum, which takes differences, is
# right.
# Seen: of 10 clients two move three times as far. With movements of 3e-5 of the weights, 100,000 of variance 1, one of the
# two is selected in about half of 20 rounds, with 1e-4 in two or three; with 1e-3 in none, but the client is another one
# than by flwr.server in 16. flwr.server selects none of the two. In float16 the squared norm is beyond 65504, all distances are nan (numpy warns of
# an overflow), and client 0 is selected in all rounds, whatever it sent, for movements of a tenth of the weights, too.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q flwr==1.42.0 numpy==2.2.6

FLWR_TELEMETRY_ENABLED=0 PYTHONWARNINGS=ignore "$work/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from flwr.server.strategy.aggregate import aggregate_krum
from flwr.serverapp.strategy.multikrum import select_multikrum

CLIENTS, FAR, SIZE, ROUNDS = 10, 2, 100_000, 20


def which(model, models):
    return next(number for number, one in enumerate(models) if np.array_equal(one, model))


def of_serverapp(models):
    """The client that Krum selects: it calls this function with the contents of the replies."""
    contents = [RecordDict({"arrays": ArrayRecord([model])}) for model in models]
    (content,) = select_multikrum(contents, FAR, num_nodes_to_select=1)
    return which(content["arrays"].to_numpy_ndarrays()[0], models)


def of_server(models):
    return which(aggregate_krum([([model], 1) for model in models], FAR, 0)[0], models)


def rounds(dtype, movement):
    """The clients that both select in each round; clients 0 and 1 move three times as far as the others."""
    for seed in range(ROUNDS):
        draw = np.random.default_rng(seed).standard_normal
        start = draw(SIZE, dtype=np.float32)
        scales = [np.float32(3 * movement if client < FAR else movement) for client in range(CLIENTS)]
        models = [(start + scale * draw(SIZE, dtype=np.float32)).astype(dtype) for scale in scales]
        yield of_serverapp(models), of_server(models)


print("flwr", version("flwr"), "numpy", np.__version__)
for dtype, movement in ((np.float32, 1e-3), (np.float32, 1e-4), (np.float32, 3e-5), (np.float16, 0.1)):
    new, old = map(np.array, zip(*rounds(dtype, movement)))
    far, others = int((new < FAR).sum()), int((new != old).sum())
    print(f"{dtype.__name__}, movements of {movement:.0e}: one of the two in {far} of {ROUNDS} rounds,", end=" ")
    print(f"another client than by flwr.server in {others}; by flwr.server one of the two in {int((old < FAR).sum())}")
    assert (old >= FAR).all(), "the check itself is wrong"
    if dtype is np.float16:
        assert (new == 0).all(), "another client than the first is selected now"
    else:
        assert others > ROUNDS / 4, "both agree now"
        assert movement > 3e-5 or far > 0, "rounding errors do not matter now"
PYTHON
echo "As described."
