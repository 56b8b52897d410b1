#!/usr/bin/env bash
# jax 0.10.2 on a CPU: the gradient of a vmapped convolution takes tens of times as long as the vmapped gradient.
#
# Guess before the run: grad and vmap commute, so for a convolution of each example with a kernel of its own both orders
# give the same program, or one as fast; if a vmapped convolution is slow on a CPU, it is slow in both.
# Seen: both give the same gradient. By 8 kernels of 3 x 3 x 16 x 32 (32 images of 14 x 14 each) the gradient of the
# vmapped loss takes 24 times the processor time of the vmapped gradient, which itself takes 3 times as long as one
# convolution for each kernel.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

JAX_PLATFORMS=cpu "$work/env/bin/python" - <<'PYTHON'
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

K = 8
generator = np.random.default_rng(0)
images = jnp.asarray(generator.standard_normal((K, 32, 14, 14, 16), dtype=np.float32))
kernels = jnp.asarray(generator.standard_normal((K, 3, 3, 16, 32), dtype=np.float32))


def loss(kernel, x):
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return (y**2).sum()


def total(kernels, images):
    return jax.vmap(loss)(kernels, images).sum()


def one_by_one(kernels, images):
    return jnp.stack([jax.grad(loss)(kernels[k], images[k]) for k in range(K)])


def measured(function):
    """Its value, and its processor time in ms."""
    call, times = jax.jit(function), []
    value = jax.block_until_ready(call(kernels, images))
    for _ in range(7):
        start = time.process_time()
        jax.block_until_ready(call(kernels, images))
        times.append(1e3 * (time.process_time() - start))
    return value, statistics.median(times)


print("jax", jax.__version__)
(a, vmapped), (b, differentiated), (c, single) = map(measured, (jax.vmap(jax.grad(loss)), jax.grad(total), one_by_one))
print(f"ms: vmap of grad {vmapped:.0f}, grad of vmap {differentiated:.0f}, one convolution for each {single:.0f}")
assert np.allclose(a, b, rtol=1e-4, atol=1e-2 * float(abs(a).mean())), "the gradients differ now"
assert np.allclose(a, c, rtol=1e-4, atol=1e-2 * float(abs(a).mean())), "the check itself is wrong"
assert differentiated > 5 * vmapped, "the order matters less now"
PYTHON
echo "As described."
