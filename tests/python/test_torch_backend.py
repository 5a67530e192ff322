# SPDX-License-Identifier: Apache-2.0
"""The eager backend against the float64 reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from calls import Call, check, make
from libattnres import reference
from libattnres.backends import torch as backend

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_blocks", range(9))
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("has_output_norm", [False, True])
def test_every_source_count(
    dtype: torch.dtype, num_blocks: int, has_delta: bool, has_output_norm: bool
) -> None:
    check(
        Call(
            num_blocks=num_blocks,
            has_delta=has_delta,
            has_output_norm=has_output_norm,
            dtype=dtype,
            hidden_size=96,
            padding=5,
            seed=num_blocks,
        ),
        backend.forward,
    )


@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize(
    "block_write_idx",
    [
        1,  # a row that is read: the output must be that of the old row
        4,  # the first row that is not
        7,  # the last
    ],
)
def test_write_back(block_write_idx: int, has_delta: bool) -> None:
    check(Call(block_write_idx=block_write_idx, has_delta=has_delta, padding=8), backend.forward)


@pytest.mark.parametrize("prefixes_per_row", [2, 3])
def test_prefixes_that_share_a_bank_entry(prefixes_per_row: int) -> None:
    check(Call(num_tokens=6, prefixes_per_row=prefixes_per_row, padding=3), backend.forward)


def test_model_row() -> None:
    check(Call(num_tokens=2, hidden_size=7168, num_blocks=8), backend.forward)


def test_no_tokens() -> None:
    check(Call(num_tokens=0, block_write_idx=2), backend.forward)


def test_a_bank_without_rows() -> None:
    check(Call(num_blocks=0, num_bank_rows=0), backend.forward)


def test_one_bank_entry_for_all_through_a_zero_stride() -> None:
    arguments = make(Call(num_tokens=4))
    arguments.blocks = arguments.blocks[:1].expand(4, -1, -1)
    expected = arguments.reference()
    arguments.run(backend.forward)
    assert reference.compare(arguments.out, expected.output).ok


def test_the_two_epsilons_are_not_exchanged() -> None:
    check(Call(eps=3.0, output_norm_eps=0.01), backend.forward)
    check(Call(eps=0.01, output_norm_eps=3.0), backend.forward)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_token_changes_no_other(value: float) -> None:
    call = Call(num_tokens=5)
    clean = make(call)
    clean.run(backend.forward)
    bad = make(call)
    bad.blocks[2, 1, 7] = value
    expected = bad.reference()
    bad.run(backend.forward)
    assert reference.compare(bad.out, expected.output).ok
    others = [0, 1, 3, 4]
    assert reference.same_bits(bad.out[others], clean.out[others])
    assert bad.out[2].isnan().any()


def test_one_source_is_exact() -> None:
    arguments = make(Call(num_blocks=0, has_output_norm=False))
    arguments.run(backend.forward)
    assert reference.same_bits(arguments.out, arguments.prefix)


def test_same_bits_on_every_run() -> None:
    call = Call(num_tokens=17, num_blocks=8, hidden_size=256)
    first = check(call, backend.forward)
    second = check(replace(call), backend.forward)
    assert reference.same_bits(first.out, second.out)


def test_unsupported_gives_a_reason_for_integers_alone() -> None:
    blocks = torch.zeros(1, 1, 8)
    assert backend.unsupported(torch.zeros(1, 8), blocks, 1) is None
    reason = backend.unsupported(torch.zeros(1, 8, dtype=torch.int32), blocks, 1)
    assert reason == "prefix: expected a floating-point dtype, got torch.int32"
