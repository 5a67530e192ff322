# SPDX-License-Identifier: Apache-2.0
"""The reference against the equations in plain Python, and the check against known errors."""

from __future__ import annotations

import math

import pytest
import torch
from libattnres import reference

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def scalar_attn_res(
    prefix: list[float],
    rows: list[list[float]],
    query: list[float],
    output_norm_weight: list[float] | None,
    eps: float,
    output_norm_eps: float,
) -> list[float]:
    """One token in Python floats, straight from the equations."""
    sources = [*rows, prefix]
    hidden_size = len(prefix)
    scores = [
        math.fsum(v * q for v, q in zip(row, query, strict=True))
        / math.sqrt(math.fsum(v * v for v in row) / hidden_size + eps)
        for row in sources
    ]
    exps = [math.exp(score - max(scores)) for score in scores]
    weights = [value / math.fsum(exps) for value in exps]
    mixed = [
        math.fsum(weight * row[h] for weight, row in zip(weights, sources, strict=True))
        for h in range(hidden_size)
    ]
    if output_norm_weight is None:
        return mixed
    scale = 1 / math.sqrt(math.fsum(v * v for v in mixed) / hidden_size + output_norm_eps)
    return [v * scale * w for v, w in zip(mixed, output_norm_weight, strict=True)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("has_output_norm", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_bank_tokens", "num_blocks"),
    [
        (3, 3, 4),  # the model's case
        (6, 3, 2),  # two prefixes share a bank entry
        (6, 2, 5),  # three do
        (2, 2, 0),  # one source
    ],
)
def test_reference_equals_the_equations(
    dtype: torch.dtype,
    has_output_norm: bool,
    num_tokens: int,
    num_bank_tokens: int,
    num_blocks: int,
) -> None:
    hidden_size = 24
    prefix = random(num_tokens, hidden_size, dtype=dtype, seed=1)
    delta = random(num_tokens, hidden_size, dtype=dtype, seed=2)
    blocks = random(num_bank_tokens, 5, hidden_size, dtype=dtype, seed=3)
    blocks[:, num_blocks:] = math.nan
    norm_weight = random(hidden_size, dtype=dtype, seed=4)
    qk_weight = random(hidden_size, dtype=dtype, seed=5)
    output_norm_weight = random(hidden_size, dtype=dtype, seed=6) if has_output_norm else None
    result = reference.attn_res(
        prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, num_blocks, -1, 0.1, 0.2
    )
    query = (norm_weight.double() * qk_weight.double()).tolist()
    new_prefix = prefix + delta if dtype == torch.float64 else (prefix.float() + delta.float()).to(dtype)
    assert reference.same_bits(result.prefix, new_prefix)
    assert reference.same_bits(result.blocks, blocks)
    for m in range(num_tokens):
        expected = scalar_attn_res(
            new_prefix[m].tolist(),
            blocks[m // (num_tokens // num_bank_tokens), :num_blocks].tolist(),
            query,
            None if output_norm_weight is None else output_norm_weight.tolist(),
            0.1,
            0.2,
        )
        assert result.output[m].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-13)


def test_inputs_are_not_written_and_the_bank_is_read_before_its_write() -> None:
    prefix, delta = random(4, 16, seed=1), random(4, 16, seed=2)
    blocks = random(4, 3, 16, seed=3)
    weight = random(16, seed=4)
    before = [tensor.clone() for tensor in (prefix, delta, blocks)]
    written = reference.attn_res(prefix, delta, blocks, weight, weight, weight, 3, 1)
    for tensor, copy in zip((prefix, delta, blocks), before, strict=True):
        assert reference.same_bits(tensor, copy)
    unwritten = reference.attn_res(prefix, delta, blocks, weight, weight, weight, 3, -1)
    assert torch.equal(written.output, unwritten.output)
    assert reference.same_bits(written.blocks[:, 1], written.prefix)
    assert reference.same_bits(written.blocks[:, [0, 2]], blocks[:, [0, 2]])
    assert written.prefix.data_ptr() != prefix.data_ptr()
    assert unwritten.blocks.data_ptr() != blocks.data_ptr()


def test_one_source_without_output_norm_is_the_prefix_itself() -> None:
    prefix = random(5, 40)
    blocks = torch.full((5, 2, 40), math.nan, dtype=torch.bfloat16)
    weight = random(40, seed=1)
    result = reference.attn_res(prefix, None, blocks, weight, weight, None, 0)
    assert torch.equal(result.output, prefix.double())
    assert reference.same_bits(result.prefix, prefix)


def test_one_source_has_weight_one_even_when_its_score_is_not_a_number() -> None:
    prefix = random(2, 16)
    prefix[0, 3] = math.inf
    weight = random(16, seed=1)
    result = reference.attn_res(prefix, None, prefix.view(2, 1, 16), weight, weight, None, 0)
    assert torch.equal(result.output, prefix.double())


def test_no_tokens() -> None:
    empty = torch.empty(0, 16, dtype=torch.bfloat16)
    weight = random(16)
    result = reference.attn_res(empty, empty, empty.view(0, 8, 16), weight, weight, weight, 8, 0)
    assert result.output.shape == (0, 16)
    assert result.blocks.shape == (0, 8, 16)
    assert reference.compare(empty, result.output) == reference.Comparison(0.0, 0.0, True)


def test_chunks_of_tokens_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, blocks = random(10, 16, seed=1), random(5, 3, 16, seed=2)
    weight = random(16, seed=3)
    whole = reference.attn_res(prefix, None, blocks, weight, weight, weight, 3)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 3 * 16)
    chunked = reference.attn_res(prefix, None, blocks, weight, weight, weight, 3)
    torch.testing.assert_close(chunked.output, whole.output, rtol=1e-14, atol=1e-14)
    assert reference.compare(chunked.output, whole.output).ok


def test_nan_in_one_token_stays_there() -> None:
    prefix, blocks = random(4, 16, seed=1), random(4, 2, 16, seed=2)
    weight = random(16, seed=3)
    blocks[2, 1, 5] = math.nan
    output = reference.attn_res(prefix, None, blocks, weight, weight, weight, 2).output
    assert output.isnan().any(dim=1).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 2, 1, -1), "prefix: expected a multiple of 2 tokens, got 5"),
        ((4, 0, 1, -1), "blocks: expected a bank entry for 4 tokens, got none"),
        ((4, 4, 4, -1), "num_blocks: expected 0..3, got 4"),
        ((4, 4, 1, 3), "block_write_idx: expected -1..2, got 3"),
        ((4, 2, 1, 0), "block_write_idx: expected -1 with 2 tokens per bank entry, got 0"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple[int, int, int, int], message: str) -> None:
    num_tokens, num_bank_tokens, num_blocks, block_write_idx = arguments
    weight = random(8)
    with pytest.raises(ValueError, match=message):
        reference.attn_res(
            random(num_tokens, 8),
            None,
            random(num_bank_tokens, 3, 8),
            weight,
            weight,
            None,
            num_blocks,
            block_write_idx,
        )


@pytest.mark.parametrize("dtype", FLOATS)
def test_correct_rounding_passes_and_lost_bits_fail(dtype: torch.dtype) -> None:
    wanted = random(64, 256, dtype=torch.float64)
    assert reference.compare(wanted.to(dtype), wanted).ok
    # For the 16-bit dtypes this is two bits fewer than they have.
    coarse = 16 * reference.TOLERANCES[dtype].rel_l2
    scale = torch.exp2(torch.floor(torch.log2(wanted.abs()))) * coarse
    assert not reference.compare((torch.round(wanted / scale) * scale).to(dtype), wanted).ok


def test_one_wrong_element_in_a_large_output_fails() -> None:
    wanted = random(512, 512, dtype=torch.float64)
    output = wanted.to(torch.bfloat16)
    output[7, 9] += 0.05
    verdict = reference.compare(output, wanted)
    assert verdict.rel_l2 <= 2e-3
    assert verdict.worst_element > 1
    assert not verdict.ok


def test_nan_and_infinity_must_be_where_the_reference_has_them() -> None:
    wanted = random(4, 8, dtype=torch.float64)
    wanted[1, 2], wanted[2, 3] = math.nan, math.inf
    output = wanted.float()
    assert reference.compare(output, wanted).ok
    output[0, 0] = math.nan
    assert reference.compare(output, wanted).worst_element == math.inf
    output = wanted.float()
    output[1, 2] = 0.0
    assert not reference.compare(output, wanted).ok
    output = wanted.float()
    output[2, 3] = -math.inf
    assert not reference.compare(output, wanted).ok


def test_an_all_zero_reference_demands_zeros() -> None:
    wanted = torch.zeros(2, 8, dtype=torch.float64)
    assert reference.compare(torch.zeros(2, 8), wanted).ok
    assert not reference.compare(torch.full((2, 8), 1e-30), wanted).ok


def test_compare_refuses_what_it_cannot_judge() -> None:
    wanted = torch.zeros(2, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="output: expected shape"):
        reference.compare(torch.zeros(2, 7), wanted)
    with pytest.raises(TypeError, match="dtype: expected one of"):
        reference.compare(torch.zeros(2, 8, dtype=torch.int32), wanted)


def test_same_bits_tells_zeros_apart_and_nans_together() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert reference.same_bits(nan, nan.clone())
    assert not reference.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not reference.same_bits(torch.zeros(2), torch.zeros(3))
    assert not reference.same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
