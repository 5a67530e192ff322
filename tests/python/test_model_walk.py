# SPDX-License-Identifier: Apache-2.0
"""The calls of one model step: how many of each kind, in which order, and what they move."""

from __future__ import annotations

from collections import Counter

import pytest
from libattnres.model_walk import NUM_BANK_ROWS, WalkCall, bytes_per_token, walk_calls

CALLS = walk_calls()


def test_counts_of_the_whole_walk() -> None:
    assert len(CALLS) == 187
    assert sum(call.has_delta for call in CALLS) == 178
    assert sum(call.block_write_idx >= 0 for call in CALLS) == 8
    assert sum(call.has_output_norm for call in CALLS) == 186
    assert sum(call.num_sources for call in CALLS) / len(CALLS) == pytest.approx(5.36, abs=5e-3)
    assert bytes_per_token() / 1e6 == pytest.approx(22.28, abs=5e-3)


def variants(num_blocks: int) -> Counter[tuple[bool, bool, bool]]:
    """How many calls with ``num_blocks`` have (delta, write, output norm)."""
    return Counter(
        (call.has_delta, call.block_write_idx >= 0, call.has_output_norm)
        for call in CALLS
        if call.num_blocks == num_blocks
    )


def test_zero_blocks_occurs_once() -> None:
    assert variants(0) == {(False, True, True): 1}


@pytest.mark.parametrize("num_blocks", range(1, 8))
def test_one_to_seven_blocks(num_blocks: int) -> None:
    assert variants(num_blocks) == {
        (True, False, True): 22,
        (True, True, True): 1,
        (False, False, True): 1,
    }


def test_eight_blocks() -> None:
    assert variants(8) == {
        (True, False, True): 16,
        (False, False, True): 1,
        (True, False, False): 1,
    }


def test_each_bank_row_is_written_once_and_before_it_is_read() -> None:
    written: list[int] = []
    for call in CALLS:
        assert call.num_blocks <= len(written)
        if call.block_write_idx >= 0:
            assert call.block_write_idx == len(written)
            written.append(call.block_write_idx)
    assert written == list(range(NUM_BANK_ROWS))


def test_prefix_is_replaced_after_the_attention_that_wrote_a_row() -> None:
    assert [index for index, call in enumerate(CALLS) if call.replaces_prefix] == [
        index + 1 for index, call in enumerate(CALLS) if call.block_write_idx >= 0
    ]
    assert all(not call.has_delta for call in CALLS if call.replaces_prefix)


def test_names_follow_the_layers() -> None:
    assert len({call.name for call in CALLS}) == 187
    assert (CALLS[0].name, CALLS[1].name) == ("layer0.attention", "layer0.mlp")
    assert CALLS[-1] == WalkCall("final", 8, True, -1, False, False)
