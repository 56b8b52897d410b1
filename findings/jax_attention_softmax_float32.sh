#!/usr/bin/env bash
# jax 0.10.2: jax.nn.dot_product_attention of float64 arrays is float64, with the accuracy of float32.
#
# Guess before the run: with jax_enable_x64 and float64 arrays the result is accurate to 1e-15, as jax.nn.softmax is;
# a training in JAX and the same one elsewhere then agree to 1e-9 after some steps.
# Seen: the result has dtype float64, and is off by 1e-7 of the largest value: the softmax is computed in float32,
# whatever the inputs are, which the documentation of the function does not say. Checks of gradients by finite
# differences, and comparisons of implementations in float64, fail for that reason.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

JAX_PLATFORMS=cpu JAX_ENABLE_X64=1 "$work/env/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

generator = np.random.default_rng(0)
q, k, v = (generator.standard_normal((2, 8, 2, 4)) for _ in range(3))  # [batch, time, heads, width]
logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
exps = np.exp(logits - logits.max(-1, keepdims=True))
expected = np.einsum("bnts,bsnh->btnh", exps / exps.sum(-1, keepdims=True), v)


def gap(found):
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


attended = jax.nn.dot_product_attention(*map(jnp.asarray, (q, k, v)))
by_hand = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.asarray(logits)), jnp.asarray(v))
print("jax", jax.__version__, attended.dtype, f"off by {gap(attended):.1e}; jax.nn.softmax by hand {gap(by_hand):.1e}")
assert attended.dtype == by_hand.dtype == jnp.float64, "the dtypes differ now"
assert gap(by_hand) < 1e-14, "the check itself is wrong"
assert 1e-9 < gap(attended) < 1e-5, "the accuracy is another now"
assert "float32" not in (jax.nn.dot_product_attention.__doc__ or ""), "the documentation says so now"
PYTHON
echo "As described."
