# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"
"""What moves the rows of a bank pass and does nothing else. Needs Triton: imported where it is measured."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["spread_rows"]


@triton.jit
def spread_rows(
    blocks_ptr,
    bank_ptr,
    hidden_size,
    blocks_token_stride,
    blocks_row_stride,
    bank_site_stride,
    bank_token_stride,
    NUM_ROWS: tl.constexpr,
    NUM_SITES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk of a token: every row is read once, and each call site's row is one of them."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = columns < hidden_size
    from_ptrs = blocks_ptr + token * blocks_token_stride + columns
    to_ptrs = bank_ptr + token * bank_token_stride + columns
    for row in tl.static_range(NUM_ROWS):
        values = tl.load(from_ptrs + row * blocks_row_stride, mask=inside)
        for site in tl.static_range(row, NUM_SITES, NUM_ROWS):
            tl.store(to_ptrs + tl.full((), site, tl.int64) * bank_site_stride, values, mask=inside)
