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
    "Bank",
    "Comparison",
    "Result",
    "Tolerance",
    "attn_res",
    "attn_res_bank",
    "attn_res_merge",
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


class Bank(NamedTuple):
    """What the first of two phases leaves for the second."""

    bank: torch.Tensor
    """``[S, T, H]`` float64, the bank's weighted mean for each call site, not rounded."""
    lse: torch.Tensor
    """``[S, T]`` float64, the logarithm of the sum of the exponentials of the bank's scores."""


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


TWO_PHASE = Tolerance(2.6e-3, 2.0**-8, 2e-2)
"""Of bfloat16 outputs in two phases with a bfloat16 bank, which is rounded once more: by up to 2^-9 of a bank
element, which may be several times as large as a row is on average."""


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
    prefixes_per_row = _prefixes_per_row("blocks", num_tokens, num_bank_tokens)
    if not 0 <= num_blocks <= num_bank_rows:
        raise ValueError(f"num_blocks: expected 0..{num_bank_rows}, got {num_blocks}")
    _check_write(block_write_idx, num_bank_rows, prefixes_per_row)

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
        output[start:stop] = _normed(mixed, output_norm_weight, output_norm_eps)
    return Result(output, new_prefix, _written(blocks, block_write_idx, new_prefix))


def attn_res_bank(
    blocks: torch.Tensor,
    num_blocks: int,
    norm_weights: torch.Tensor,
    qk_weights: torch.Tensor,
    eps: float = 1e-5,
) -> Bank:
    r"""The bank's share of ``S`` calls of :func:`attn_res`, in float64: the first of two phases.

    A call's softmax splits into the sources that are known before the call, the bank rows, and the one that
    is not, the prefix. With :math:`Z = \sum_{i < n} e^{score_i}` over the bank,

    .. math::
        \sum_{i \le n} softmax(score)_i v_i =
        \frac{Z \cdot bank + e^{score_p} p}{Z + e^{score_p}}, \quad
        bank = \frac{1}{Z} \sum_{i < n} e^{score_i} v_i, \quad lse = \log Z

    ``bank`` and ``lse`` depend on the bank and the call site's weights alone, and :func:`attn_res_merge` does
    the rest. Both are free of overflow: ``bank`` is a mean of the rows, and ``lse`` is as large as a score.

    Parameters
    ----------
    blocks : torch.Tensor
        ``[T, R, H]``, any float dtype, device and strides; so are the others.
    num_blocks : int
        Bank rows read, ``1..R``.
    norm_weights, qk_weights : torch.Tensor
        ``[S, H]``, one row for each call site.
    eps : float
        Epsilon of the scores' norm.

    Raises
    ------
    ValueError
        When ``num_blocks`` does not belong to the bank.
    """
    num_bank_tokens, num_bank_rows, hidden_size = blocks.shape
    if not 1 <= num_blocks <= num_bank_rows:
        raise ValueError(f"num_blocks: expected 1..{num_bank_rows}, got {num_blocks}")
    queries = norm_weights.double() * qk_weights.double()
    num_sites = queries.shape[0]
    options = {"dtype": torch.float64, "device": blocks.device}
    bank = torch.empty(num_sites, num_bank_tokens, hidden_size, **options)  # type: ignore[call-overload]
    lse = torch.empty(num_sites, num_bank_tokens, **options)  # type: ignore[call-overload]
    chunk = max(1, _CHUNK_ELEMENTS // max(1, hidden_size * num_blocks))
    for start in range(0, num_bank_tokens, chunk):
        rows = blocks[start : start + chunk, :num_blocks].double()
        scale = torch.rsqrt(rows.square().mean(dim=-1) + eps)
        for site in range(num_sites):
            scores = (rows @ queries[site]) * scale
            weights = scores.softmax(dim=-1)
            bank[site, start : start + chunk] = (weights.unsqueeze(-1) * rows).sum(dim=1)
            lse[site, start : start + chunk] = scores.logsumexp(dim=-1)
    return Bank(bank, lse)


def attn_res_merge(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    bank: torch.Tensor,
    lse: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    blocks: torch.Tensor | None = None,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
) -> Result:
    r"""One call from what :func:`attn_res_bank` left, in float64; no argument is written.

    .. math::
        p = \mathrm{round}(prefix + delta), \quad
        score_p = \frac{p \cdot (norm\_weight \cdot qk\_weight)}{\sqrt{mean(p^2) + eps}}, \quad
        mixed = \frac{e^{lse} bank + e^{score_p} p}{e^{lse} + e^{score_p}}

    With the exact ``bank`` and ``lse`` of one call site, ``mixed`` is that of :func:`attn_res`, see there;
    so are the output norm, the prefix and the row that is written.

    Parameters
    ----------
    prefix : torch.Tensor
        ``[M, H]``, any float dtype, device and strides; so are the others.
    delta : torch.Tensor, optional
        ``[M, H]``, added to ``prefix`` with one rounding.
    bank, lse : torch.Tensor
        ``[T, H]`` and ``[T]``, of one call site; ``M`` is a multiple of ``T``, and token ``m`` reads entry
        ``m // (M / T)``.
    norm_weight, qk_weight : torch.Tensor
        ``[H]``, of the same call site.
    output_norm_weight : torch.Tensor, optional
        ``[H]``; none for no output norm.
    blocks : torch.Tensor, optional
        ``[T, R, H]``, the bank that receives ``p``; needed for that alone.
    block_write_idx : int
        Bank row that receives ``p``; -1 for none.
    eps, output_norm_eps : float
        Epsilons of the scores' and of the output's norm.

    Raises
    ------
    ValueError
        When the shapes or indices do not belong together.
    """
    num_tokens, hidden_size = prefix.shape
    num_bank_tokens = bank.shape[0]
    prefixes_per_row = _prefixes_per_row("bank", num_tokens, num_bank_tokens)
    if blocks is None:
        blocks = prefix.new_empty(num_bank_tokens, 0, hidden_size)
    _check_write(block_write_idx, blocks.shape[1], prefixes_per_row)
    new_prefix = updated_prefix(prefix, delta)
    output = torch.empty(num_tokens, hidden_size, dtype=torch.float64, device=prefix.device)
    query = norm_weight.double() * qk_weight.double()
    chunk = max(1, _CHUNK_ELEMENTS // max(1, hidden_size))
    for start in range(0, num_tokens, chunk):
        stop = min(start + chunk, num_tokens)
        entries = torch.arange(start, stop, device=bank.device) // prefixes_per_row
        own = new_prefix[start:stop].double()
        score = (own @ query) * torch.rsqrt(own.square().mean(dim=1) + eps)
        weights = torch.stack([lse[entries].double(), score], dim=1).softmax(dim=1)
        mixed = weights[:, :1] * bank.index_select(0, entries).double() + weights[:, 1:] * own
        output[start:stop] = _normed(mixed, output_norm_weight, output_norm_eps)
    return Result(output, new_prefix, _written(blocks, block_write_idx, new_prefix))


def _prefixes_per_row(name: str, num_tokens: int, num_bank_tokens: int) -> int:
    if num_bank_tokens == 0:
        if num_tokens != 0:
            raise ValueError(f"{name}: expected a bank entry for {num_tokens} tokens, got none")
        return 1
    if num_tokens % num_bank_tokens != 0:
        raise ValueError(f"prefix: expected a multiple of {num_bank_tokens} tokens, got {num_tokens}")
    return num_tokens // num_bank_tokens


def _check_write(block_write_idx: int, num_bank_rows: int, prefixes_per_row: int) -> None:
    if not -1 <= block_write_idx < num_bank_rows:
        raise ValueError(f"block_write_idx: expected -1..{num_bank_rows - 1}, got {block_write_idx}")
    if block_write_idx >= 0 and prefixes_per_row > 1:
        raise ValueError(
            f"block_write_idx: expected -1 with {prefixes_per_row} tokens per bank entry, "
            f"got {block_write_idx}"
        )


def _normed(mixed: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return mixed
    mean_square = mixed.square().mean(dim=1, keepdim=True)
    return mixed * torch.rsqrt(mean_square + eps) * weight.double()


def _written(blocks: torch.Tensor, block_write_idx: int, new_prefix: torch.Tensor) -> torch.Tensor:
    new_blocks = blocks.clone(memory_format=torch.contiguous_format)
    if block_write_idx >= 0:
        new_blocks[:, block_write_idx] = new_prefix
    return new_blocks


def compare(
    output: torch.Tensor,
    reference_output: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    tolerance: Tolerance | None = None,
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
    tolerance : Tolerance, optional
        Another one than :data:`TOLERANCES` has for the dtype.
    """
    if output.shape != reference_output.shape:
        raise ValueError(f"output: expected shape {tuple(reference_output.shape)}, got {tuple(output.shape)}")
    dtype = output.dtype if dtype is None else dtype
    if dtype not in TOLERANCES:
        raise TypeError(f"dtype: expected one of {[str(key) for key in TOLERANCES]}, got {dtype}")
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
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
