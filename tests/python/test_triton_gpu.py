# SPDX-License-Identifier: Apache-2.0
"""The Triton backend on a GPU against the float64 reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from calls import Arguments, Call, check, make
from libattnres import reference
from libattnres.backends import triton as backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = Call(hidden_size=7168, num_blocks=8, device="cuda")


def check_gpu(call: Call) -> Arguments:
    assert (
        backend.unsupported(torch.empty(0, call.hidden_size, device=call.device), torch.empty(0), 0) is None
    )
    return check(call, backend.forward)


@pytest.mark.parametrize("num_blocks", range(9))
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("has_output_norm", [False, True])
@pytest.mark.parametrize(
    "num_tokens",
    [
        2,  # latency build
        300,  # throughput build, more than one program per multiprocessor
    ],
)
def test_every_source_count(num_blocks: int, has_delta: bool, has_output_norm: bool, num_tokens: int) -> None:
    check_gpu(
        replace(
            MODEL,
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            has_delta=has_delta,
            has_output_norm=has_output_norm,
            seed=num_blocks,
        )
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 17, 66, 67, 132, 133, 700, 4096])
def test_token_counts(num_tokens: int) -> None:
    check_gpu(replace(MODEL, num_tokens=num_tokens))


@pytest.mark.parametrize("pdl", ["off", "wait", "early"])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 300])
@pytest.mark.parametrize(
    "block_write_idx",
    [
        2,  # a row that is read: the output must be that of the old row
        5,  # the first row that is not
        7,  # the last
    ],
)
def test_write_back(block_write_idx: int, num_tokens: int, has_delta: bool, pdl: str) -> None:
    check_gpu(
        replace(
            MODEL,
            num_tokens=num_tokens,
            num_blocks=5,
            block_write_idx=block_write_idx,
            has_delta=has_delta,
            pdl=pdl,
        )
    )


@pytest.mark.parametrize("prefixes_per_row", [2, 3])
@pytest.mark.parametrize("num_tokens", [6, 600])
def test_prefixes_that_share_a_bank_entry(num_tokens: int, prefixes_per_row: int) -> None:
    check_gpu(replace(MODEL, num_tokens=num_tokens, prefixes_per_row=prefixes_per_row))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("hidden_size", "padding"),
    [
        (7168, 0),
        (7168, 16),  # padded, still vectorised
        (7168, 8),  # rows of 16 bytes but not of 16 elements
        (7168, 3),  # odd: scalar loads
        (1, 0),  # strides of one, which Triton turns into constants
        (64, 0),  # one warp
        (96, 5),
        (4096, 0),  # no mask
        (5120, 0),
        (16384, 0),  # the longest row in registers
        (16400, 0),  # the tiled kernel
        (50000, 1),
    ],
)
@pytest.mark.parametrize("block_write_idx", [-1, 1])
def test_row_lengths_and_strides(
    dtype: torch.dtype, hidden_size: int, padding: int, block_write_idx: int
) -> None:
    if hidden_size == 1 and dtype == torch.float32:
        pytest.skip("the sources of a row of one element can cancel, for which no relative bound allows")
    call = Call(num_tokens=5, num_blocks=4, device="cuda", dtype=dtype, block_write_idx=block_write_idx)
    call = replace(call, hidden_size=hidden_size, padding=padding)
    check_gpu(call)
    check_gpu(replace(call, num_tokens=200))


def test_misaligned_bases() -> None:
    arguments = make(replace(MODEL, num_tokens=40, padding=9))
    for name in ("prefix", "delta", "blocks", "out"):
        tensor = arguments.allocations[name][..., 1:7169]
        tensor.copy_(getattr(arguments, name).clone())
        setattr(arguments, name, tensor)
    expected = arguments.reference()
    arguments.run(backend.forward)
    assert reference.compare(arguments.out, expected.output).ok
    assert reference.same_bits(arguments.prefix, expected.prefix)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [40960, 65536])
def test_offsets_beyond_32_bits(num_tokens: int) -> None:
    check_gpu(replace(MODEL, num_tokens=num_tokens, num_blocks=7, block_write_idx=7))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("hidden_size", [7168, 17000])
def test_a_bad_token_changes_no_other(value: float, hidden_size: int) -> None:
    call = replace(MODEL, num_tokens=150, hidden_size=hidden_size)
    clean = make(call)
    clean.run(backend.forward)
    bad = make(call)
    bad.blocks[77, 3, 11] = value
    expected = bad.reference()
    bad.run(backend.forward)
    assert reference.compare(bad.out, expected.output).ok
    others = [m for m in range(150) if m != 77]
    assert reference.same_bits(bad.out[others], clean.out[others])


def test_prefix_rounding_of_every_bfloat16() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    weight = torch.ones(8192, dtype=torch.bfloat16, device="cuda")
    for shift in (0, 1, 257, 4096, 21000, 32768):
        prefix = bits.view(torch.bfloat16).reshape(8, 8192).clone()
        delta = bits.roll(shift).view(torch.bfloat16).reshape(8, 8192).clone()
        expected = reference.updated_prefix(prefix, delta)
        out = torch.empty_like(prefix)
        blocks = prefix.new_empty(8, 0, 8192)
        backend.forward(prefix, delta, blocks, weight, weight, None, 0, -1, 1e-5, 1e-5, out, "wait")
        finite = ~expected.isnan()
        assert torch.equal(prefix.isnan(), ~finite)
        assert reference.same_bits(prefix[finite], expected[finite])
        assert reference.same_bits(out[finite], expected[finite])


def test_same_bits_on_every_run() -> None:
    call = replace(MODEL, num_tokens=8192)
    first = make(call)
    start = first.prefix.clone()
    first.run(backend.forward)
    out = first.out.clone()
    for _ in range(20):
        first.prefix.copy_(start)
        first.out.fill_(math.nan)
        first.run(backend.forward)
        assert reference.same_bits(first.out, out)


def test_bits_do_not_depend_on_the_number_of_tokens() -> None:
    whole = make(replace(MODEL, num_tokens=300))
    start = whole.prefix.clone()
    whole.run(backend.forward)
    for first, count in ((0, 1), (5, 17), (133, 66), (200, 100)):
        part = slice(first, first + count)
        out = torch.full_like(whole.out[part], math.nan)
        delta = whole.delta
        assert delta is not None
        backend.forward(
            start[part].clone(),
            delta[part],
            whole.blocks[part],
            whole.norm_weight,
            whole.qk_weight,
            whole.output_norm_weight,
            8,
            -1,
            1e-5,
            1e-5,
            out,
            "wait",
        )
        assert reference.same_bits(out, whole.out[part])


def test_no_compilation_across_token_counts_and_indices() -> None:
    from libattnres.backends import _triton_kernels as kernels

    device = torch.cuda.current_device()
    for num_tokens in (2, 400):  # the two builds
        make(replace(MODEL, num_tokens=num_tokens)).run(backend.forward)
    compiled = len(kernels.forward_kernel.device_caches[device][0])
    assert compiled >= 2
    for num_tokens, num_blocks, block_write_idx in (
        (1, 1, -1),
        (3, 0, 0),
        (16, 8, 1),
        (66, 5, 5),
        (67, 7, 7),
        (1000, 1, 1),
        (1024, 3, -1),
    ):
        call = replace(MODEL, num_tokens=num_tokens, num_blocks=num_blocks, block_write_idx=block_write_idx)
        make(call).run(backend.forward)
    assert len(kernels.forward_kernel.device_caches[device][0]) == compiled


@pytest.mark.parametrize("pdl", ["off", "wait"])
@pytest.mark.parametrize("num_tokens", [1, 60, 500])
def test_a_row_written_by_one_call_is_read_by_the_next(num_tokens: int, pdl: str) -> None:
    """Calls back to back, each writing the bank row and the prefix that the next one reads."""
    call = replace(MODEL, num_tokens=num_tokens, num_blocks=0)
    arguments = make(call)
    delta = arguments.delta
    assert delta is not None
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    weights = (arguments.norm_weight, arguments.qk_weight, arguments.output_norm_weight)
    blocks = arguments.blocks.clone()
    prefix = arguments.prefix.clone()
    outs = [torch.full_like(arguments.out, math.nan) for _ in range(8)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for index in range(8):
            backend.forward(prefix, delta, blocks, *weights, index, index, 1e-5, 1e-5, outs[index], pdl)
    stream.synchronize()
    expected_blocks, expected_prefix = arguments.blocks, arguments.prefix
    for index in range(8):
        expected = reference.attn_res(expected_prefix, delta, expected_blocks, *weights, index, index)
        expected_blocks, expected_prefix = expected.blocks, expected.prefix
        assert reference.compare(outs[index], expected.output).ok
    assert reference.same_bits(blocks, expected_blocks)
    assert reference.same_bits(prefix, expected_prefix)


@pytest.mark.parametrize("pdl", ["off", "wait", "early"])
@pytest.mark.parametrize("num_tokens", [4, 200])
def test_graph_replay_follows_the_inputs(num_tokens: int, pdl: str) -> None:
    call = replace(MODEL, num_tokens=num_tokens, pdl=pdl)
    arguments = make(call)
    arguments.run(backend.forward)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            arguments.run(backend.forward)
    arguments.out.fill_(math.nan)
    fresh = make(replace(call, seed=9))
    arguments.prefix.copy_(fresh.prefix)
    arguments.blocks.copy_(fresh.blocks)
    # Each of the three calls in the graph adds delta to the prefix once more.
    expected = arguments.reference()
    for _ in range(2):
        expected = replace(arguments, prefix=expected.prefix).reference()
    graph.replay()
    torch.cuda.synchronize()
    assert reference.same_bits(arguments.prefix, expected.prefix)
    assert reference.compare(arguments.out, expected.output).ok


def test_a_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    with torch.cuda.device(0):
        check_gpu(replace(MODEL, device="cuda:1"))
        assert torch.cuda.current_device() == 0
