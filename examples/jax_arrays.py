# SPDX-License-Identifier: Apache-2.0
"""The operator on JAX's arrays in the host's memory, which are never written: new ones are returned.

For a GPU, and within jax.jit, see jax_ffi.
"""

import sys

import libattnres.array

try:
    import jax
except ImportError:
    sys.exit("this example needs JAX: pip install jax")

M, R, H = 16, 8, 256
with jax.default_device(jax.devices("cpu")[0]):
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def random(*shape: int) -> jax.Array:
        """In bfloat16."""
        return jax.random.normal(next(keys), shape, jax.numpy.bfloat16)

    prefix, delta, blocks = random(M, H), random(M, H), random(M, R, H)
    weights = random(H), random(H), random(H)
    result = libattnres.array.attn_res_functional(prefix, delta, blocks, *weights, 3, 3)
    assert (result.prefix == prefix + delta).all()
    assert (result.blocks == blocks.at[:, 3].set(result.prefix)).all()
assert "torch" not in sys.modules
print(f"{result.output.shape} {result.output.dtype} on {result.output.device}")
