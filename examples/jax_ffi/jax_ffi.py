# SPDX-License-Identifier: Apache-2.0
"""The operator within jax.jit, on the CPU and natively on a GPU, in place where JAX allows it.

handler.cpp is the bridge from XLA's calling convention to the C interface; it is compiled here, with any
C++20 compiler and no CUDA toolkit.
"""

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import libattnres.array

try:
    import jax
except ImportError:
    sys.exit("this example needs JAX: pip install jax")
import numpy as np
from jax import numpy as jnp

PACKAGE = Path(next(iter(libattnres.__path__)))
TARGET = "attnres_forward"


def register(folder: Path) -> None:
    """Compile the handlers and make them known to JAX."""
    library = folder / "libattnres_jax.so"
    source = Path(__file__).with_name("handler.cpp")
    includes = [f"-I{PACKAGE / 'include'}", "-isystem", jax.ffi.include_dir()]
    links = [f"-L{PACKAGE / 'lib'}", "-lattnres", f"-Wl,-rpath,{PACKAGE / 'lib'}"]
    command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", *includes, source, *links, "-o", library]
    subprocess.run(command, check=True)
    handlers = ctypes.CDLL(str(library))
    for platform, name in (("cpu", "AttnResForwardHost"), ("CUDA", "AttnResForwardCuda")):
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(getattr(handlers, name)), platform=platform)


def attn_res(
    prefix: jax.Array,
    delta: jax.Array | None,
    blocks: jax.Array,
    norm_weight: jax.Array,
    qk_weight: jax.Array,
    output_norm_weight: jax.Array | None,
    num_blocks: int,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``output``, and the ``prefix`` and ``blocks`` that the call leaves."""
    arguments = [prefix, blocks, norm_weight, qk_weight]
    arguments += [optional for optional in (delta, output_norm_weight) if optional is not None]
    results, aliases = [jax.ShapeDtypeStruct(prefix.shape, prefix.dtype)], {}
    for index, is_written in ((0, delta is not None), (1, block_write_idx >= 0)):
        if is_written:
            aliases[index] = len(results)
            results.append(jax.ShapeDtypeStruct(arguments[index].shape, arguments[index].dtype))
    output, *written = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)(
        *arguments,
        num_blocks=np.int32(num_blocks),
        block_write_idx=np.int32(block_write_idx),
        eps=np.float32(eps),
        output_norm_eps=np.float32(output_norm_eps),
        has_delta=delta is not None,
        has_output_norm=output_norm_weight is not None,
    )
    new_blocks = written.pop() if block_write_idx >= 0 else blocks
    return output, written.pop() if written else prefix, new_blocks


@jax.jit
def step(prefix, delta, blocks, weights):
    """Two calls of a model: the first writes the bank row that the second reads."""
    hidden, prefix, blocks = attn_res(prefix, delta, blocks, *weights, 2, 2)
    output, _, _ = attn_res(prefix, None, blocks, *weights[:2], None, 3)
    return hidden, output, prefix, blocks


with tempfile.TemporaryDirectory() as folder:
    register(Path(folder))
    on_cpu = jax.default_backend() == "cpu"
    M, R, H = 16, 8, 256 if on_cpu else 7168
    keys = iter(jax.random.split(jax.random.key(0), 6))
    shapes = ((M, H), (M, H), (M, R, H), (H,), (H,), (H,))
    prefix, delta, blocks, *weights = (jax.random.normal(next(keys), s, jnp.bfloat16) for s in shapes)
    hidden, output, new_prefix, new_blocks = step(prefix, delta, blocks, weights)

    # The same calls on the host, outside of JAX.
    host = [np.array(one) for one in (prefix, delta, blocks, *weights)]
    first = libattnres.array.attn_res(*host, 2, 2)
    second = libattnres.array.attn_res(host[0], None, host[2], *host[3:5], None, 3)
    for got, wanted in ((new_prefix, host[0]), (new_blocks, host[2])):
        assert np.asarray(got).tobytes() == wanted.tobytes()
    for got, wanted in ((hidden, first), (output, second)):
        got, wanted = np.asarray(got, np.float32), wanted.astype(np.float32)
        assert np.abs(got - wanted).max() <= (0 if on_cpu else 2**-6 * np.abs(wanted).max())
    message = ""
    try:
        jax.block_until_ready(attn_res(prefix, delta, blocks, *weights, R + 1))
    except Exception as error:
        message = str(error)
    assert "num_blocks: expected 0..8, got 9" in message, message
    print(f"jitted on {jax.default_backend()}: {output.shape} {output.dtype}")
