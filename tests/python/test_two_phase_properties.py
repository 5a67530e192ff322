# SPDX-License-Identifier: Apache-2.0
"""Calls that Hypothesis draws, in two phases against the float64 reference of one.

With a float32 bank nothing but float32 arithmetic lies between the phases, so the bounds of one phase hold.
"""

from __future__ import annotations

import libattnres
import pytest
import torch
from libattnres import reference
from programs import run_program

pytest.importorskip("hypothesis")
from hypothesis import given
from test_properties import (
    EXAMPLES,
    SPACES,
    Drawn,
    Space,
    assert_output,
    assert_same,
    calls,
    copied,
    on_gpu,
    profile,
)

BFLOAT16_BANK = 2.6e-3
NUM_SITES = 3


def run(drawn: Drawn, space: Space, bank_dtype: torch.dtype | None) -> torch.Tensor:
    """Both phases; every call site has the weights of the one call."""
    bank, lse = libattnres.attn_res_bank(
        drawn.blocks,
        drawn.num_blocks,
        drawn.norm_weight.expand(NUM_SITES, -1),
        drawn.qk_weight.expand(NUM_SITES, -1),
        drawn.eps,
        bank_dtype=bank_dtype,
        backend=space.backend,
    )
    for site in range(1, NUM_SITES):
        assert reference.same_bits(bank[site], bank[0]), f"{drawn.what}: one call site, other bits"
        assert reference.same_bits(lse[site], lse[0]), f"{drawn.what}: one call site, other bits"
    output = libattnres.attn_res_merge(
        drawn.prefix,
        drawn.delta,
        bank[NUM_SITES - 1],
        lse[NUM_SITES - 1],
        drawn.norm_weight,
        drawn.qk_weight,
        drawn.output_norm_weight,
        drawn.blocks,
        drawn.block_write_idx,
        drawn.eps,
        drawn.output_norm_eps,
        out=drawn.out,
        backend=space.backend,
    )
    assert drawn.out is None or output is drawn.out
    return output


def check_call(drawn: Drawn, space: Space) -> None:
    """One call against the reference, every byte of every allocation, and a second run."""
    expected = reference.attn_res(*drawn.arguments)
    before, again, wanted, narrow = (copied(drawn) for _ in range(4))
    output = run(drawn, space, torch.float32)
    wanted.prefix.copy_(expected.prefix)
    if drawn.block_write_idx >= 0:
        wanted.blocks[:, drawn.block_write_idx].copy_(expected.prefix)
    if wanted.out is not None:
        wanted.out.copy_(output)  # judged below
    for got, right in zip(drawn.allocations, wanted.allocations, strict=True):
        assert_same(got, right, drawn.what)
    assert_output(before, output, expected)
    assert reference.same_bits(run(again, space, torch.float32), output), f"{drawn.what}: other bits"

    output = run(narrow, space, None)
    assert_same(narrow.prefix, expected.prefix, drawn.what)
    few_units = drawn.qk_weight.abs().max() < 20 / drawn.prefix.shape[1]
    if drawn.what.endswith("bfloat16 apart plain") and output.numel() >= 500 and few_units:
        error = (output.double() - expected.output).norm() / expected.output.norm()
        assert error <= BFLOAT16_BANK, f"{drawn.what}: {error}"


def check_calls(name: str, examples: int) -> None:
    space = SPACES[name]
    drawn_calls = calls(space).filter(
        lambda drawn: drawn.num_blocks > 0 and drawn.prefix.dtype is not torch.float64
    )

    @profile(examples)
    @given(drawn=drawn_calls)
    def property_holds(drawn: Drawn) -> None:
        check_call(drawn, space)

    property_holds()


@pytest.mark.parametrize(("name", "examples"), [("host", 120), ("torch", 50)])
def test_every_call_is_right_in_two_phases(name: str, examples: int) -> None:
    check_calls(name, examples)


def test_every_call_is_right_in_two_phases_interpreted() -> None:
    pytest.importorskip("triton")
    examples = EXAMPLES or 15
    run_program(
        f"import test_two_phase_properties as t; t.check_calls('triton_interpreted', {examples})",
        TRITON_INTERPRET="1",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["native", "triton", "torch_on_gpu"])
def test_every_call_is_right_in_two_phases_on_the_gpu(name: str) -> None:
    on_gpu(name)
    check_calls(name, 60)
