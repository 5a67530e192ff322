# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on CPU tensors, through Triton's interpreter.

Triton decides on import whether it interprets, so the cases run in a child process that imports this
file with TRITON_INTERPRET=1; the test process itself stays as it was.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calls import Call, check, make
from libattnres import reference

pytest.importorskip("triton")

CASES = {
    # Row kernel, one call of each kind.
    "common": Call(num_blocks=8),
    "no_delta": Call(has_delta=False),
    "no_norm": Call(has_output_norm=False),
    "no_delta_no_norm": Call(has_delta=False, has_output_norm=False, num_blocks=1),
    "one_source": Call(num_blocks=0),
    "one_source_no_norm": Call(num_blocks=0, has_output_norm=False),
    "bank_without_rows": Call(num_blocks=0, num_bank_rows=0),
    "float16": Call(dtype=torch.float16, num_blocks=5),
    "float32": Call(dtype=torch.float32, num_blocks=5),
    "write_of_a_row_that_is_read": Call(block_write_idx=1),
    "write_of_the_next_row": Call(block_write_idx=4, padding=8),
    "write_without_delta": Call(block_write_idx=7, has_delta=False),
    "write_with_one_source": Call(num_blocks=0, block_write_idx=0),
    "two_prefixes_per_entry": Call(num_tokens=6, prefixes_per_row=2),
    "three_prefixes_per_entry": Call(num_tokens=6, prefixes_per_row=3, padding=7),
    "many_tokens": Call(num_tokens=17, hidden_size=32, num_blocks=2),
    "no_tokens": Call(num_tokens=0, block_write_idx=0),
    # H that is not a power of two is masked; odd strides are not vectorised.
    "masked": Call(hidden_size=96, padding=5),
    "odd": Call(hidden_size=33, padding=2, block_write_idx=2),
    "single_element": Call(hidden_size=1),
    "model_row": Call(num_tokens=1, hidden_size=7168, num_blocks=8),
    # The epsilons are not exchanged.
    "large_eps": Call(eps=3.0, output_norm_eps=0.01),
    "large_output_norm_eps": Call(eps=0.01, output_norm_eps=3.0),
    # Rows too long for registers: the tiled kernel.
    "tiled": Call(num_tokens=2, hidden_size=20000, num_blocks=3, block_write_idx=1, padding=3),
    "tiled_no_delta_no_norm": Call(
        num_tokens=2, hidden_size=16385, num_blocks=8, has_delta=False, has_output_norm=False
    ),
    "tiled_one_source": Call(num_tokens=2, hidden_size=17000, num_blocks=0),
    "tiled_shared": Call(num_tokens=2, hidden_size=17000, num_blocks=2, prefixes_per_row=2),
    "tiled_float32": Call(num_tokens=1, hidden_size=17000, num_blocks=4, dtype=torch.float32),
}


def bad_token(hidden_size: int, value: float) -> None:
    """A NaN or infinity spoils its own token as the reference says, and no other."""
    from libattnres.backends import triton as backend

    call = Call(num_tokens=4, hidden_size=hidden_size, num_blocks=3)
    clean = make(call)
    clean.run(backend.forward)
    bad = make(call)
    bad.blocks[2, 1, 7] = value
    expected = bad.reference()
    bad.run(backend.forward)
    assert reference.compare(bad.out, expected.output).ok
    others = [0, 1, 3]
    assert reference.same_bits(bad.out[others], clean.out[others])
    assert bad.out[2].isnan().any()


def bad_single_source() -> None:
    """With one source the weight is 1, even when its score is NaN."""
    from libattnres.backends import triton as backend

    arguments = make(Call(num_blocks=0, has_delta=False, has_output_norm=False))
    arguments.prefix[1, 3] = math.inf
    arguments.prefix[2, :2] = torch.tensor([-0.0, 0.0])
    arguments.run(backend.forward)
    assert reference.same_bits(arguments.out, arguments.prefix)


def rounding_ties() -> None:
    """The update of the prefix rounds to nearest even, also for subnormals, infinities and NaN."""
    from libattnres.backends import triton as backend

    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    prefix = bits.view(torch.bfloat16).reshape(64, 1024).clone()
    delta = bits.roll(257).view(torch.bfloat16).reshape(64, 1024).clone()
    expected = reference.updated_prefix(prefix, delta)
    weight = torch.ones(1024, dtype=torch.bfloat16)
    out = torch.empty_like(prefix)
    backend.forward(
        prefix, delta, prefix.new_empty(64, 0, 1024), weight, weight, None, 0, -1, 1e-5, 1e-5, out, "wait"
    )
    finite = ~expected.isnan()
    assert torch.equal(prefix.isnan(), ~finite)
    assert reference.same_bits(prefix[finite], expected[finite])


def shared_entry_through_a_zero_stride() -> None:
    from libattnres.backends import triton as backend

    arguments = make(Call(num_tokens=4))
    arguments.blocks = arguments.blocks[:1].expand(4, -1, -1)
    expected = arguments.reference()
    arguments.run(backend.forward)
    assert reference.compare(arguments.out, expected.output).ok


def supported() -> None:
    from libattnres.backends import triton as backend

    blocks = torch.zeros(1, 1, 8)
    assert backend.unsupported(torch.zeros(1, 8), blocks, 1) is None
    reason = backend.unsupported(torch.zeros(1, 8, dtype=torch.float64), blocks, 1)
    assert reason == "triton computes bfloat16, float16 and float32, prefix is torch.float64"


OTHERS: dict[str, Callable[[], None]] = {
    "nan": lambda: bad_token(64, math.nan),
    "infinity": lambda: bad_token(64, math.inf),
    "tiled_nan": lambda: bad_token(17000, math.nan),
    "bad_single_source": bad_single_source,
    "rounding_ties": rounding_ties,
    "shared_entry": shared_entry_through_a_zero_stride,
    "supported": supported,
}


def run_all() -> dict[str, str]:
    """Every case's failure, or an empty text."""
    from libattnres.backends import _triton_kernels as kernels
    from libattnres.backends import triton as backend

    assert kernels.INTERPRETED
    failures = {}
    for name in (*CASES, *OTHERS):
        try:
            if name in CASES:
                check(CASES[name], backend.forward)
            else:
                OTHERS[name]()
            failures[name] = ""
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
    return failures


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    code = "import json, test_triton_interpreter as t; print(json.dumps(t.run_all()))"
    path = [str(Path(__file__).parent), *sys.path]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stderr
    result: dict[str, str] = json.loads(child.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    assert failures[name] == ""
