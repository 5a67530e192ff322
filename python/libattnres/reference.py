# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of Attention Residuals (arXiv 2603.15031) and the accuracy check against it.

Tests, benchmarks and the command line all judge a backend by :func:`attn_res` and :func:`compare`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

__all__ = [
    "TOLERANCES",
    "Comparison",
    "Result",
    "Tolerance",
    "attn_res",
    "compare",
    "same_bits",
    "updated_prefix",
]

# Float64 elements of one source that a chunk of tokens may hold: 64 MiB.
_CHUNK_ELEMENTS = 1 << 23


class Result(NamedTuple):
    """What one call of the operator leaves behind."""

    output: torch.Tensor
    """``[M, H]`` float64, not rounded to the input dtype."""
    prefix: torch.Tensor
    """``[M, H]`` in the input dtype: the prefix after the update, to the bit."""
    blocks: torch.Tensor
    """``[T, R, H]`` in the input dtype: the bank after the write, to the bit."""


class Tolerance(NamedTuple):
    """Accuracy that an output of one dtype must reach."""

    rel_l2: float
    """Bound of ``|output - reference| / |reference|`` over the whole output."""
    element_relative: float
    """Bound of an element's error as a fraction of the reference element ..."""
    element_rms: float
    """... plus this fraction of the root mean square of its reference row."""


class Comparison(NamedTuple):
    """Verdict of :func:`compare`."""

    rel_l2: float
    """Relative L2 error over the elements that are finite."""
    worst_element: float
    """Largest element error as a fraction of what is allowed; more than 1 fails, ``inf`` when a NaN or
    infinity is not where the reference has one."""
    ok: bool
    """Whether both bounds hold."""


# bfloat16 is the operator's contract; rounding to bfloat16 alone costs 1.7e-3. float16 keeps three more
# bits. float32 and float64 are limited by the order of the sums and by exp of a score.
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.bfloat16: Tolerance(2e-3, 2.0**-8, 2e-3),
    torch.float16: Tolerance(3e-4, 2.0**-10, 3e-4),
    torch.float32: Tolerance(2e-5, 2.0**-20, 2e-5),
    torch.float64: Tolerance(1e-12, 2.0**-48, 1e-12),
}


def updated_prefix(prefix: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """``p = round(float(prefix) + float(delta))`` in a new dense tensor; a copy without ``delta``.

    Parameters
    ----------
    prefix : torch.Tensor
        ``[M, H]``, any float dtype.
    delta : torch.Tensor, optional
        ``[M, H]``, the same dtype.
    """
    if delta is None:
        return prefix.clone(memory_format=torch.contiguous_format)
    if prefix.dtype == torch.float64:
        return prefix + delta
    return (prefix.float() + delta.float()).to(prefix.dtype).contiguous()


def attn_res(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    num_blocks: int,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
) -> Result:
    r"""Attention Residuals in float64; no argument is written.

    .. math::
        p = \mathrm{round}(prefix + delta), \quad v_i = blocks_i, \quad v_n = p \\
        score_i = \frac{v_i \cdot (norm\_weight \cdot qk\_weight)}{\sqrt{mean(v_i^2) + eps}}, \quad
        mixed = \sum_i softmax(score)_i v_i \\
        output = mixed \quad\text{or}\quad
        \frac{mixed}{\sqrt{mean(mixed^2) + output\_norm\_eps}} \cdot output\_norm\_weight

    Parameters
    ----------
    prefix : torch.Tensor
        ``[M, H]``, any float dtype, device and strides; so are the others.
    delta : torch.Tensor, optional
        ``[M, H]``, added to ``prefix`` with one rounding.
    blocks : torch.Tensor
        ``[T, R, H]``; ``M`` is a multiple of ``T`` and token ``m`` reads entry ``m // (M / T)``. Rows
        from ``num_blocks`` on are never used.
    norm_weight, qk_weight : torch.Tensor
        ``[H]``.
    output_norm_weight : torch.Tensor, optional
        ``[H]``; none for no output norm.
    num_blocks : int
        Bank rows read, ``0..R``.
    block_write_idx : int
        Bank row that receives ``p``; -1 for none.
    eps, output_norm_eps : float
        Epsilons of the scores' and of the output's norm.

    Returns
    -------
    Result
        Float64 output, and the prefix and bank after the call in their own dtype. Works through the
        tokens in chunks: beyond the results it needs a few hundred MiB.

    Raises
    ------
    ValueError
        When the shapes or indices do not belong together.
    """
    num_tokens, hidden_size = prefix.shape
    num_bank_tokens, num_bank_rows, _ = blocks.shape
    if num_bank_tokens == 0:
        if num_tokens != 0:
            raise ValueError(f"blocks: expected a bank entry for {num_tokens} tokens, got none")
        prefixes_per_row = 1
    elif num_tokens % num_bank_tokens != 0:
        raise ValueError(f"prefix: expected a multiple of {num_bank_tokens} tokens, got {num_tokens}")
    else:
        prefixes_per_row = num_tokens // num_bank_tokens
    if not 0 <= num_blocks <= num_bank_rows:
        raise ValueError(f"num_blocks: expected 0..{num_bank_rows}, got {num_blocks}")
    if not -1 <= block_write_idx < num_bank_rows:
        raise ValueError(f"block_write_idx: expected -1..{num_bank_rows - 1}, got {block_write_idx}")
    if block_write_idx >= 0 and prefixes_per_row > 1:
        raise ValueError(
            f"block_write_idx: expected -1 with {prefixes_per_row} tokens per bank entry, "
            f"got {block_write_idx}"
        )

    new_prefix = updated_prefix(prefix, delta)
    output = torch.empty(num_tokens, hidden_size, dtype=torch.float64, device=prefix.device)
    query = norm_weight.double() * qk_weight.double()
    chunk = max(1, _CHUNK_ELEMENTS // max(1, hidden_size))
    for start in range(0, num_tokens, chunk):
        stop = min(start + chunk, num_tokens)
        entries = torch.arange(start, stop, device=blocks.device) // prefixes_per_row

        def source(
            index: int, start: int = start, stop: int = stop, entries: torch.Tensor = entries
        ) -> torch.Tensor:
            if index == num_blocks:
                return new_prefix[start:stop].double()
            if prefixes_per_row == 1:
                return blocks[start:stop, index].double()
            return blocks[:, index].index_select(0, entries).double()

        if num_blocks == 0:
            # The softmax of one score is 1, whatever the score.
            mixed = source(0)
        else:
            scores = []
            for index in range(num_blocks + 1):
                values = source(index)
                mean_square = values.square().mean(dim=1)
                scores.append((values @ query) * torch.rsqrt(mean_square + eps))
            weights = torch.stack(scores, dim=1).softmax(dim=1)
            mixed = weights[:, :1] * source(0)
            for index in range(1, num_blocks + 1):
                mixed += weights[:, index, None] * source(index)
        if output_norm_weight is not None:
            mean_square = mixed.square().mean(dim=1, keepdim=True)
            mixed = mixed * torch.rsqrt(mean_square + output_norm_eps) * output_norm_weight.double()
        output[start:stop] = mixed

    new_blocks = blocks.clone(memory_format=torch.contiguous_format)
    if block_write_idx >= 0:
        new_blocks[:, block_write_idx] = new_prefix
    return Result(output, new_prefix, new_blocks)


def compare(
    output: torch.Tensor, reference_output: torch.Tensor, dtype: torch.dtype | None = None
) -> Comparison:
    """Judge ``output`` against the float64 ``reference_output`` of :func:`attn_res`.

    The bounds of :data:`TOLERANCES` must hold: the relative L2 error over all elements, and for each
    element ``|output - reference| <= element_relative * |reference| + element_rms * rms(its reference
    row)``. NaNs and infinities must be exactly where the reference, rounded to ``dtype``, has them.

    Parameters
    ----------
    output : torch.Tensor
        ``[M, H]``, what a backend computed.
    reference_output : torch.Tensor
        ``[M, H]`` float64, on any device.
    dtype : torch.dtype, optional
        The dtype whose tolerance applies; that of ``output`` by default.
    """
    if output.shape != reference_output.shape:
        raise ValueError(f"output: expected shape {tuple(reference_output.shape)}, got {tuple(output.shape)}")
    dtype = output.dtype if dtype is None else dtype
    if dtype not in TOLERANCES:
        raise TypeError(f"dtype: expected one of {[str(key) for key in TOLERANCES]}, got {dtype}")
    tolerance = TOLERANCES[dtype]
    num_tokens, hidden_size = output.shape
    chunk = max(1, _CHUNK_ELEMENTS // max(1, hidden_size))
    error_squares = 0.0
    reference_squares = 0.0
    worst_element = 0.0
    for start in range(0, num_tokens, chunk):
        wanted = reference_output[start : start + chunk].double()
        got = output[start : start + chunk].to(wanted.device).double()
        rounded = wanted.to(dtype).double()
        finite = torch.isfinite(rounded)
        if not torch.equal(
            torch.nan_to_num(rounded.masked_fill(finite, 0.0), nan=7.0),
            torch.nan_to_num(got.masked_fill(torch.isfinite(got), 0.0), nan=7.0),
        ):
            worst_element = math.inf
            finite = finite & torch.isfinite(got)
        wanted = wanted.masked_fill(~finite, 0.0)
        error = (got.masked_fill(~finite, 0.0) - wanted).abs()
        row_rms = wanted.square().mean(dim=1, keepdim=True).sqrt()
        bound = tolerance.element_relative * wanted.abs() + tolerance.element_rms * row_rms
        # 0 / 0 is an exact zero in a row of zeros; anything else over 0 is wrong.
        ratio = torch.where(error == 0, 0.0, error / bound)
        if ratio.numel() > 0:
            worst_element = max(worst_element, float(ratio.max()))
        error_squares += float(error.square().sum())
        reference_squares += float(wanted.square().sum())
    if error_squares == 0.0:
        rel_l2 = 0.0
    elif reference_squares == 0.0:
        rel_l2 = math.inf
    else:
        rel_l2 = math.sqrt(error_squares / reference_squares)
    return Comparison(rel_l2, worst_element, rel_l2 <= tolerance.rel_l2 and worst_element <= 1.0)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether shape, dtype and all bits agree: NaN equals the same NaN, and -0 is not 0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.contiguous().view(integer), right.to(left.device).contiguous().view(integer))
