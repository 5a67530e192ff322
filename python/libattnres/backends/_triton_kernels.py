# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"
"""Triton kernels of Attention Residuals (arXiv 2603.15031); imported on first use only.

For each token, one program computes

    p       = prefix + delta                                (one rounding; stored to prefix)
    score_i = (v_i . norm_weight * qk_weight) * rsqrt(mean(v_i^2) + eps),   v = bank rows, then p
    output  = softmax(score) . v, then the output norm      (float32)
    blocks[entry, block_write_idx] = p

`forward_kernel` keeps a row in registers, reads each row once and moves `num_blocks + 2` rows, plus two
with a delta and one with a write. `forward_tiled_kernel` walks rows too long for that in tiles, three
times. A program touches only its own token's memory. A thread loads and stores the same columns of
every array, and no column belongs to two warps, so its stores to `prefix` and to the bank cannot
overtake another thread's loads.

In two phases, `bank_kernel` computes the share of the bank rows for one token and one call site, and
`merge_kernel` the rest of a call:

    lse    = log(sum_i exp(score_i)),   bank = softmax(score) . v,   v = bank rows
    output = (exp(lse) bank + exp(score_p) p) / (exp(lse) + exp(score_p)), then the output norm
"""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    HAS_GRID_DEPENDENCY_CONTROL = True
except ImportError:  # then the launcher compiles with PDL = 0 and nothing below names them
    HAS_GRID_DEPENDENCY_CONTROL = False

LOG2_E = tl.constexpr(1.4426950408889634)

# Whether @triton.jit below makes interpreted functions, which run on CPU tensors.
INTERPRETED = triton.knobs.runtime.interpret

# Values of the kernels' PDL argument.
PDL_OFF = tl.constexpr(0)
PDL_WAIT = tl.constexpr(1)
PDL_EARLY = tl.constexpr(2)


@triton.jit
def _load(pointers, inside, MASKED: tl.constexpr):
    # Rows bypass L1, where the weights should stay: a row is read once.
    if MASKED:
        values = tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        values = tl.load(pointers, cache_modifier=".cg")
    return values


@triton.jit
def _widen(values, CONVERT_BY_HAND: tl.constexpr):
    """To float32. The interpreter gets bfloat16's subnormals wrong, hence by hand there."""
    if CONVERT_BY_HAND and values.dtype == tl.bfloat16:
        result = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        result = values.to(tl.float32)
    return result


@triton.jit
def _load_weight(pointers, inside, MASKED: tl.constexpr, CONVERT_BY_HAND: tl.constexpr):
    values = tl.load(pointers, mask=inside, other=0.0) if MASKED else tl.load(pointers)
    return _widen(values, CONVERT_BY_HAND)


@triton.jit
def _store(pointers, values, inside, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, values, mask=inside)
    else:
        tl.store(pointers, values)


@triton.jit
def _round(values, dtype: tl.constexpr, CONVERT_BY_HAND: tl.constexpr):
    """Float32 to `dtype`, to nearest even. The interpreter truncates to bfloat16, hence by hand there."""
    if CONVERT_BY_HAND and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(values == values, rounded, 0x7FFF)
        result = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = values.to(dtype)
    return result


@triton.jit
def _square_and_dot(values, query):
    """Sums of `values^2` and of `values * query` in one exchange between the warps."""
    return tl.split(tl.sum(tl.join(values * values, values * query), axis=0))


@triton.jit(do_not_specialize=["num_blocks", "block_write_idx", "prefixes_per_row"])
def forward_kernel(
    prefix_ptr,
    delta_ptr,
    blocks_ptr,
    norm_weight_ptr,
    qk_weight_ptr,
    output_norm_weight_ptr,
    output_ptr,
    prefix_stride,
    delta_stride,
    blocks_token_stride,
    blocks_row_stride,
    output_stride,
    num_blocks,
    block_write_idx,
    prefixes_per_row,
    eps,
    output_norm_eps,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_OUTPUT_NORM: tl.constexpr,
    SHARES_ROWS: tl.constexpr,
    OWN_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    CONVERT_BY_HAND: tl.constexpr,
):
    """One token, its row in registers; `STAGES - 1` bank rows are in flight before one is used.

    `OWN_FIRST` requests prefix and delta before the bank rows: a shorter chain for one token, more
    registers. Neither it nor `STAGES` changes a bit of the result.
    """
    dtype: tl.constexpr = prefix_ptr.dtype.element_ty
    MASKED: tl.constexpr = BLOCK != HIDDEN_SIZE
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN_SIZE
    entry = token // prefixes_per_row if SHARES_ROWS else token
    entry_ptr = blocks_ptr + entry * blocks_token_stride
    own_ptrs = prefix_ptr + token * prefix_stride + columns

    # Weights come from no kernel of this stream's recent past: they may be read before the wait.
    query = _load_weight(norm_weight_ptr + columns, inside, MASKED, CONVERT_BY_HAND)
    query *= _load_weight(qk_weight_ptr + columns, inside, MASKED, CONVERT_BY_HAND)
    query *= LOG2_E
    if PDL == PDL_WAIT:
        gdc_wait()
    if OWN_FIRST and PDL != PDL_EARLY:
        own = _load(own_ptrs, inside, MASKED)
        if HAS_DELTA:
            delta = _load(delta_ptr + token * delta_stride + columns, inside, MASKED)

    maximum = float("-inf")
    total = 0.0
    # Of -0.0, which Triton has no constant for: 0.0 would turn the zeros of a single source positive.
    mixed = tl.full([BLOCK], 0x80000000, tl.uint32).to(tl.float32, bitcast=True)
    for index in tl.range(0, num_blocks, num_stages=STAGES):
        row_ptr = entry_ptr + tl.cast(index, tl.int64) * blocks_row_stride
        values = _widen(_load(row_ptr + columns, inside, MASKED), CONVERT_BY_HAND)
        square, dot = _square_and_dot(values, query)
        score = dot * tl.rsqrt(square / HIDDEN_SIZE + eps)
        new_maximum = tl.maximum(maximum, score)
        scale = tl.exp2(maximum - new_maximum)
        weight = tl.exp2(score - new_maximum)
        maximum = new_maximum
        total = total * scale + weight
        mixed = mixed * scale + values * weight

    if PDL == PDL_EARLY:
        gdc_wait()
    if not OWN_FIRST or PDL == PDL_EARLY:
        own = _load(own_ptrs, inside, MASKED)
        if HAS_DELTA:
            delta = _load(delta_ptr + token * delta_stride + columns, inside, MASKED)
    if HAS_DELTA:
        own = _round(_widen(own, CONVERT_BY_HAND) + _widen(delta, CONVERT_BY_HAND), dtype, CONVERT_BY_HAND)
        _store(own_ptrs, own, inside, MASKED)
    values = _widen(own, CONVERT_BY_HAND)
    square, dot = _square_and_dot(values, query)
    score = dot * tl.rsqrt(square / HIDDEN_SIZE + eps)
    if num_blocks == 0:
        # The weight of a single source is 1, whatever its score.
        score = 0.0
    new_maximum = tl.maximum(maximum, score)
    scale = tl.exp2(maximum - new_maximum)
    weight = tl.exp2(score - new_maximum)
    inverse = 1.0 / (total * scale + weight)
    mixed = mixed * scale + values * weight
    if block_write_idx >= 0:
        # Every source has been summed up, so no thread still reads the row that is overwritten.
        tl.debug_barrier()
        write_ptr = entry_ptr + block_write_idx.to(tl.int64) * blocks_row_stride
        _store(write_ptr + columns, own, inside, MASKED)
        if PDL != PDL_OFF:
            # One thread triggers for its whole program: all stores of the row must be issued.
            tl.debug_barrier()
    if PDL != PDL_OFF:
        # The exchange of the last sums is behind every warp's loads.
        gdc_launch_dependents()

    if HAS_OUTPUT_NORM:
        output_norm_weight = _load_weight(output_norm_weight_ptr + columns, inside, MASKED, CONVERT_BY_HAND)
        mean_square = tl.sum(mixed * mixed, axis=0) * (inverse * inverse) / HIDDEN_SIZE
        mixed = mixed * (inverse * tl.rsqrt(mean_square + output_norm_eps)) * output_norm_weight
    else:
        mixed = mixed * inverse
    output_ptrs = output_ptr + token * output_stride + columns
    _store(output_ptrs, _round(mixed, dtype, CONVERT_BY_HAND), inside, MASKED)


@triton.jit
def _updated_prefix(
    prefix_ptr, delta_ptr, columns, inside, HAS_DELTA: tl.constexpr, CONVERT_BY_HAND: tl.constexpr
):
    own = tl.load(prefix_ptr + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + columns, mask=inside, other=0.0)
        own = _round(
            _widen(own, CONVERT_BY_HAND) + _widen(delta, CONVERT_BY_HAND), own.dtype, CONVERT_BY_HAND
        )
    return own


@triton.jit
def _mixed_tile(
    own,
    row_ptr,
    blocks_row_stride,
    columns,
    inside,
    num_blocks,
    weights,
    sources,
    CONVERT_BY_HAND: tl.constexpr,
):
    """One tile of `softmax(score) . v`."""
    mixed = _widen(own, CONVERT_BY_HAND) * tl.sum(tl.where(sources == num_blocks, weights, 0.0), axis=0)
    for index in tl.range(0, num_blocks):
        pointers = row_ptr + tl.cast(index, tl.int64) * blocks_row_stride + columns
        values = _widen(tl.load(pointers, mask=inside, other=0.0), CONVERT_BY_HAND)
        mixed += values * tl.sum(tl.where(sources == index, weights, 0.0), axis=0)
    return mixed


@triton.jit(do_not_specialize=["num_blocks", "block_write_idx", "prefixes_per_row"])
def forward_tiled_kernel(
    prefix_ptr,
    delta_ptr,
    blocks_ptr,
    norm_weight_ptr,
    qk_weight_ptr,
    output_norm_weight_ptr,
    output_ptr,
    prefix_stride,
    delta_stride,
    blocks_token_stride,
    blocks_row_stride,
    output_stride,
    num_blocks,
    block_write_idx,
    prefixes_per_row,
    eps,
    output_norm_eps,
    HIDDEN_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SOURCES: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_OUTPUT_NORM: tl.constexpr,
    PDL: tl.constexpr,
    CONVERT_BY_HAND: tl.constexpr,
):
    """One token of any length: scores, then the square of the mix, then the mix again and all stores.

    Nothing is stored before the last pass, and there each thread has loaded a column of every array
    before it stores that column. `num_blocks < SOURCES`, a power of two.
    """
    dtype: tl.constexpr = prefix_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    entry_ptr = blocks_ptr + token // prefixes_per_row * blocks_token_stride
    own_ptr = prefix_ptr + token * prefix_stride
    own_delta_ptr = delta_ptr + token * delta_stride
    if PDL != PDL_OFF:
        gdc_wait()

    sources = tl.arange(0, SOURCES)
    scores = tl.full([SOURCES], float("-inf"), tl.float32)
    for index in tl.range(0, num_blocks + 1):
        square = tl.zeros([TILE], tl.float32)
        dot = tl.zeros([TILE], tl.float32)
        for start in tl.range(0, HIDDEN_SIZE, TILE):
            columns = start + tl.arange(0, TILE)
            inside = columns < HIDDEN_SIZE
            query = _widen(tl.load(norm_weight_ptr + columns, mask=inside, other=0.0), CONVERT_BY_HAND)
            query *= _widen(tl.load(qk_weight_ptr + columns, mask=inside, other=0.0), CONVERT_BY_HAND)
            if index == num_blocks:
                own = _updated_prefix(own_ptr, own_delta_ptr, columns, inside, HAS_DELTA, CONVERT_BY_HAND)
                values = _widen(own, CONVERT_BY_HAND)
            else:
                pointers = entry_ptr + tl.cast(index, tl.int64) * blocks_row_stride + columns
                values = _widen(tl.load(pointers, mask=inside, other=0.0), CONVERT_BY_HAND)
            square += values * values
            dot += values * query
        mean_square = tl.sum(square, axis=0) / HIDDEN_SIZE
        score = tl.sum(dot, axis=0) * tl.rsqrt(mean_square + eps)
        scores = tl.where(sources == index, score, scores)
    scores = tl.where(sources <= num_blocks, scores, float("-inf"))
    if num_blocks == 0:
        # The weight of a single source is 1, whatever its score.
        scores = tl.where(sources == 0, 0.0, scores)
    weights = tl.exp2((scores - tl.max(scores, axis=0)) * LOG2_E)
    weights = weights / tl.sum(weights, axis=0)

    norm_scale = 1.0
    if HAS_OUTPUT_NORM:
        square = tl.zeros([TILE], tl.float32)
        for start in tl.range(0, HIDDEN_SIZE, TILE):
            columns = start + tl.arange(0, TILE)
            inside = columns < HIDDEN_SIZE
            own = _updated_prefix(own_ptr, own_delta_ptr, columns, inside, HAS_DELTA, CONVERT_BY_HAND)
            mixed = _mixed_tile(
                own,
                entry_ptr,
                blocks_row_stride,
                columns,
                inside,
                num_blocks,
                weights,
                sources,
                CONVERT_BY_HAND,
            )
            square += mixed * mixed
        norm_scale = tl.rsqrt(tl.sum(square, axis=0) / HIDDEN_SIZE + output_norm_eps)

    for start in tl.range(0, HIDDEN_SIZE, TILE):
        columns = start + tl.arange(0, TILE)
        inside = columns < HIDDEN_SIZE
        own = _updated_prefix(own_ptr, own_delta_ptr, columns, inside, HAS_DELTA, CONVERT_BY_HAND)
        mixed = _mixed_tile(
            own, entry_ptr, blocks_row_stride, columns, inside, num_blocks, weights, sources, CONVERT_BY_HAND
        )
        if HAS_OUTPUT_NORM:
            mixed *= norm_scale
            mixed *= _widen(
                tl.load(output_norm_weight_ptr + columns, mask=inside, other=0.0), CONVERT_BY_HAND
            )
        output = _round(mixed, dtype, CONVERT_BY_HAND)
        tl.store(output_ptr + token * output_stride + columns, output, mask=inside)
        if HAS_DELTA:
            tl.store(own_ptr + columns, own, mask=inside)
        if block_write_idx >= 0:
            write_ptr = entry_ptr + block_write_idx.to(tl.int64) * blocks_row_stride
            tl.store(write_ptr + columns, own, mask=inside)


@triton.jit(
    do_not_specialize=["num_blocks", "num_sites", "lse_stride"], do_not_specialize_on_alignment=["lse_ptr"]
)
def bank_kernel(
    blocks_ptr,
    norm_weights_ptr,
    qk_weights_ptr,
    bank_ptr,
    lse_ptr,
    blocks_token_stride,
    blocks_row_stride,
    norm_weights_stride,
    qk_weights_stride,
    bank_site_stride,
    bank_token_stride,
    lse_stride,
    num_blocks,
    num_sites,
    eps,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    CONVERT_BY_HAND: tl.constexpr,
):
    """One token and call site. The programs of a token are neighbours, so that its rows come from memory once
    and from the cache for the other call sites.
    """
    MASKED: tl.constexpr = BLOCK != HIDDEN_SIZE
    program = tl.program_id(0)
    site = (program % num_sites).to(tl.int64)
    token = (program // num_sites).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN_SIZE
    entry_ptr = blocks_ptr + token * blocks_token_stride

    query = _load_weight(
        norm_weights_ptr + site * norm_weights_stride + columns, inside, MASKED, CONVERT_BY_HAND
    )
    query *= _load_weight(
        qk_weights_ptr + site * qk_weights_stride + columns, inside, MASKED, CONVERT_BY_HAND
    )
    query *= LOG2_E
    if PDL == PDL_WAIT:
        gdc_wait()

    maximum = float("-inf")
    total = 0.0
    mixed = tl.full([BLOCK], 0x80000000, tl.uint32).to(tl.float32, bitcast=True)  # -0.0, as above
    for index in tl.range(0, num_blocks, num_stages=STAGES):
        row_ptr = entry_ptr + tl.cast(index, tl.int64) * blocks_row_stride
        values = _widen(_load(row_ptr + columns, inside, MASKED), CONVERT_BY_HAND)
        square, dot = _square_and_dot(values, query)
        score = dot * tl.rsqrt(square / HIDDEN_SIZE + eps)
        new_maximum = tl.maximum(maximum, score)
        scale = tl.exp2(maximum - new_maximum)
        weight = tl.exp2(score - new_maximum)
        maximum = new_maximum
        total = total * scale + weight
        mixed = mixed * scale + values * weight

    if PDL == PDL_EARLY:
        # A kernel ahead may still read the bank of the time before.
        gdc_wait()
    if PDL != PDL_OFF:
        gdc_launch_dependents()
    bank_ptrs = bank_ptr + site * bank_site_stride + token * bank_token_stride + columns
    mean = _round(mixed * (1.0 / total), bank_ptr.dtype.element_ty, CONVERT_BY_HAND)
    _store(bank_ptrs, mean, inside, MASKED)
    tl.store(lse_ptr + site * lse_stride + token, (maximum + tl.log2(total)) / LOG2_E)


@triton.jit(
    do_not_specialize=["block_write_idx", "prefixes_per_row"], do_not_specialize_on_alignment=["lse_ptr"]
)
def merge_kernel(
    prefix_ptr,
    delta_ptr,
    bank_ptr,
    lse_ptr,
    norm_weight_ptr,
    qk_weight_ptr,
    output_norm_weight_ptr,
    blocks_ptr,
    output_ptr,
    prefix_stride,
    delta_stride,
    bank_stride,
    blocks_token_stride,
    blocks_row_stride,
    output_stride,
    block_write_idx,
    prefixes_per_row,
    eps,
    output_norm_eps,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_OUTPUT_NORM: tl.constexpr,
    SHARES_ROWS: tl.constexpr,
    PDL: tl.constexpr,
    CONVERT_BY_HAND: tl.constexpr,
):
    """One token. The square of the mix is summed up after mixing, so rows that cancel cost no accuracy."""
    dtype: tl.constexpr = prefix_ptr.dtype.element_ty
    MASKED: tl.constexpr = BLOCK != HIDDEN_SIZE
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN_SIZE
    entry = token // prefixes_per_row if SHARES_ROWS else token
    own_ptrs = prefix_ptr + token * prefix_stride + columns

    query = _load_weight(norm_weight_ptr + columns, inside, MASKED, CONVERT_BY_HAND)
    query *= _load_weight(qk_weight_ptr + columns, inside, MASKED, CONVERT_BY_HAND)
    query *= LOG2_E
    if PDL == PDL_WAIT:
        gdc_wait()
    bank = _load(bank_ptr + entry * bank_stride + columns, inside, MASKED)
    lse = tl.load(lse_ptr + entry) * LOG2_E
    if PDL == PDL_EARLY:
        gdc_wait()
    own = _load(own_ptrs, inside, MASKED)
    if HAS_DELTA:
        delta = _load(delta_ptr + token * delta_stride + columns, inside, MASKED)
        own = _round(_widen(own, CONVERT_BY_HAND) + _widen(delta, CONVERT_BY_HAND), dtype, CONVERT_BY_HAND)
        _store(own_ptrs, own, inside, MASKED)
    values = _widen(own, CONVERT_BY_HAND)
    square, dot = _square_and_dot(values, query)
    score = dot * tl.rsqrt(square / HIDDEN_SIZE + eps)
    maximum = tl.maximum(lse, score)
    scale = tl.exp2(lse - maximum)
    weight = tl.exp2(score - maximum)
    inverse = 1.0 / (scale + weight)
    mixed = _widen(bank, CONVERT_BY_HAND) * scale + values * weight
    if block_write_idx >= 0:
        write_ptr = blocks_ptr + entry * blocks_token_stride
        write_ptr += block_write_idx.to(tl.int64) * blocks_row_stride
        _store(write_ptr + columns, own, inside, MASKED)
        if PDL != PDL_OFF:
            # One thread triggers for its whole program: all stores of the row must be issued.
            tl.debug_barrier()
    if PDL != PDL_OFF:
        gdc_launch_dependents()

    if HAS_OUTPUT_NORM:
        output_norm_weight = _load_weight(output_norm_weight_ptr + columns, inside, MASKED, CONVERT_BY_HAND)
        mean_square = tl.sum(mixed * mixed, axis=0) * (inverse * inverse) / HIDDEN_SIZE
        mixed = mixed * (inverse * tl.rsqrt(mean_square + output_norm_eps)) * output_norm_weight
    else:
        mixed = mixed * inverse
    output_ptrs = output_ptr + token * output_stride + columns
    _store(output_ptrs, _round(mixed, dtype, CONVERT_BY_HAND), inside, MASKED)
