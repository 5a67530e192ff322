# SPDX-License-Identifier: Apache-2.0
"""The operator on CuPy's arrays and its current stream, or on NumPy's without a GPU. No PyTorch."""

import sys

import libattnres.array
import numpy as np

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception as error:
    print(f"without CuPy ({error}), on NumPy: float32 in the host's memory")
    xp, dtype, H = np, np.float32, 256
else:
    import ml_dtypes

    dtype, H = ml_dtypes.bfloat16, 7168  # what the native kernels take

M, R = 16, 8
rng = np.random.default_rng(0)


def random(*shape: int):
    """An array of the library at hand."""
    return xp.asarray(rng.standard_normal(shape, np.float32).astype(dtype))


def same(left, right) -> bool:
    """Whether two arrays are the same, bit for bit."""
    return bool((left.view(np.uint8) == right.view(np.uint8)).all())


prefix, delta, blocks = random(M, H), random(M, H), random(M, R, H)
weights = random(H), random(H), random(H)
before = prefix.copy()

# The functional form returns new arrays; the other writes prefix and blocks[:, 3].
result = libattnres.array.attn_res_functional(prefix, delta, blocks, *weights, 3, 3)
assert same(prefix, before)
output = libattnres.array.attn_res(prefix, delta, blocks, *weights, 3, 3)
for got, wanted in ((prefix, result.prefix), (blocks[:, 3], prefix), (output, result.output)):
    assert same(got, wanted)
assert "torch" not in sys.modules
print(f"{output.shape} {output.dtype} of {type(output).__module__}")
