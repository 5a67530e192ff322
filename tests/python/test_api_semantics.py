# SPDX-License-Identifier: Apache-2.0
"""What attn_res computes and writes on CPU tensors, judged by the float64 reference and to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import libattnres
import numpy as np
import pytest
import torch
from libattnres import reference

BACKENDS = ("host", "torch")


def poisoned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, float("nan"))


def assert_right(case: Any, **options: Any) -> torch.Tensor:
    """Run a call and judge output, prefix and bank."""
    expected = reference.attn_res(*case.arguments)
    output = libattnres.attn_res(*case.arguments, **options)
    comparison = reference.compare(output, expected.output)
    assert comparison.ok, comparison
    assert reference.same_bits(case.prefix, expected.prefix)
    assert reference.same_bits(case.blocks, expected.blocks)
    return output


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_blocks", [0, 1, 5, 8])  # N = 1, the exact softmax; odd; all rows
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("has_output_norm", [True, False])
@pytest.mark.parametrize("block_write_idx", [-1, 0, 7])  # none; a row that may be read; the last
def test_every_variant_is_right(
    backend: str,
    num_blocks: int,
    has_delta: bool,
    has_output_norm: bool,
    block_write_idx: int,
    make_case: Callable[..., Any],
) -> None:
    case = make_case(num_blocks=num_blocks, block_write_idx=block_write_idx)
    if not has_delta:
        case = case.with_(delta=None)
    if not has_output_norm:
        case = case.with_(output_norm_weight=None)
    case.blocks[:, num_blocks:] = float("nan")  # must not be read
    assert_right(case, out=poisoned_like(case.prefix), backend=backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype_is_served_automatically(dtype: torch.dtype, make_case: Callable[..., Any]) -> None:
    case = make_case(dtype=dtype, block_write_idx=3)
    explanation = libattnres.explain(*case.arguments)
    assert explanation.backend == ("torch" if dtype is torch.float64 else "host")
    assert_right(case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", [0, 1, 33])  # nothing; one; more than any vector or thread count
def test_token_counts(backend: str, num_tokens: int, make_case: Callable[..., Any]) -> None:
    case = make_case(num_tokens=num_tokens, hidden_size=1000, block_write_idx=3)
    output = assert_right(case, backend=backend)
    assert output.shape == (num_tokens, 1000)
    assert output.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prefixes_per_row", [2, 3, 6])
def test_tokens_that_share_a_bank_entry(
    backend: str, prefixes_per_row: int, make_case: Callable[..., Any]
) -> None:
    assert_right(make_case(num_tokens=6, prefixes_per_row=prefixes_per_row), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bank_entry_expanded_over_tokens_is_read(backend: str, make_case: Callable[..., Any]) -> None:
    case = make_case()
    assert_right(case.with_(blocks=case.blocks[:1].expand(4, 8, 64)), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_rows_leave_the_padding_alone(backend: str, make_case: Callable[..., Any]) -> None:
    case = make_case(block_write_idx=5)
    memory = [torch.full((4, 80), float("nan")).bfloat16() for _ in range(3)]
    bank = torch.full((4, 9, 72), float("nan")).bfloat16()
    prefix, delta, out = (rows[:, 8:72] for rows in memory)
    prefix.copy_(case.prefix)
    delta.copy_(case.delta)
    blocks = bank[:, 1:, 8:]
    blocks.copy_(case.blocks)
    case = case.with_(prefix=prefix, delta=delta, blocks=blocks)
    assert assert_right(case, out=out, backend=backend) is out
    for rows in memory:
        assert rows[:, :8].isnan().all()
        assert rows[:, 72:].isnan().all()
    assert bank[:, 0].isnan().all()
    assert bank[..., :8].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefix_and_bank_may_interleave_in_one_allocation(
    backend: str, make_case: Callable[..., Any]
) -> None:
    case = make_case(block_write_idx=3)
    memory = torch.cat([case.blocks, case.prefix[:, None]], dim=1)
    assert_right(case.with_(prefix=memory[:, 8], blocks=memory[:, :8]), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bank_without_rows(backend: str, make_case: Callable[..., Any]) -> None:
    case = make_case(num_bank_rows=0, num_blocks=0)
    output = assert_right(case.with_(output_norm_weight=None), backend=backend)
    assert torch.equal(output, case.prefix)  # N = 1: the softmax is exactly 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_value_stays_in_its_token(backend: str, value: float, make_case: Callable[..., Any]) -> None:
    case = make_case()
    clean = libattnres.attn_res(*case.clone().arguments, backend=backend)
    case.blocks[2, 1, 7] = value
    output = libattnres.attn_res(*case.arguments, backend=backend)
    assert not output[2].isfinite().all()
    others = [0, 1, 3]
    assert torch.equal(output[others], clean[others])


def test_two_runs_give_the_same_bits(make_case: Callable[..., Any]) -> None:
    case = make_case(num_tokens=65, block_write_idx=2)
    outputs = [libattnres.attn_res(*case.clone().arguments) for _ in range(2)]
    assert reference.same_bits(*outputs)


def test_the_epsilons_are_not_swapped(make_case: Callable[..., Any]) -> None:
    for backend in BACKENDS:
        for eps, output_norm_eps in ((10.0, 1e-5), (1e-5, 10.0)):
            assert_right(make_case(eps=eps, output_norm_eps=output_norm_eps), backend=backend)


def test_out_is_returned_and_defaults_to_a_new_dense_tensor(make_case: Callable[..., Any]) -> None:
    case = make_case()
    out = poisoned_like(case.prefix)
    assert libattnres.attn_res(*case.clone().arguments, out=out) is out
    padded = torch.randn(4, 96).bfloat16()[:, :64]
    output = libattnres.attn_res(*case.with_(prefix=padded).arguments)
    assert output.stride() == (64, 1)
    assert output.untyped_storage().data_ptr() != padded.untyped_storage().data_ptr()


def test_indices_accept_whatever_is_an_integer(make_case: Callable[..., Any]) -> None:
    case = make_case(block_write_idx=4)
    expected = libattnres.attn_res(*case.clone().arguments)
    case = case.with_(num_blocks=np.int64(3), block_write_idx=np.int32(4))
    assert torch.equal(libattnres.attn_res(*case.arguments), expected)


@pytest.mark.parametrize("number", [int, np.float16, np.float32, np.float64, np.int8, Fraction])
def test_every_real_number_is_an_epsilon(number: Any, make_case: Callable[..., Any]) -> None:
    case = make_case()
    expected = libattnres.attn_res(*case.clone().with_(eps=1.0, output_norm_eps=0.0).arguments)
    output = libattnres.attn_res(*case.with_(eps=number(1), output_norm_eps=number(0)).arguments)
    assert torch.equal(output, expected)


def test_strides_of_dimensions_of_one_mean_nothing(make_case: Callable[..., Any]) -> None:
    case = make_case(num_tokens=1)
    odd = case.with_(
        prefix=case.prefix.clone().as_strided((1, 64), (3, 1)),
        blocks=case.blocks.clone().as_strided((1, 8, 64), (5, 64, 1)),
    )
    assert torch.equal(libattnres.attn_res(*odd.arguments), libattnres.attn_res(*case.arguments))


def test_backward_through_an_overwritten_prefix_is_noticed(make_case: Callable[..., Any]) -> None:
    """As for every in-place op of torch, a value saved for backward must not change unnoticed."""
    case = make_case(block_write_idx=3)
    scale = torch.ones(4, 64).bfloat16().requires_grad_()
    loss = (scale * case.prefix).sum()
    with torch.no_grad():
        libattnres.attn_res(*case.arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_not_written_keeps_its_version(make_case: Callable[..., Any]) -> None:
    case = make_case()
    libattnres.attn_res(*case.with_(delta=None).arguments)
    assert (case.prefix._version, case.blocks._version) == (0, 0)
    libattnres.attn_res(*case.arguments)
    assert (case.prefix._version, case.blocks._version) == (1, 0)
    libattnres.attn_res(*case.with_(delta=None, block_write_idx=1).arguments)
    assert (case.prefix._version, case.blocks._version) == (1, 1)


def test_without_the_exchange_api_the_slow_path_gives_the_same_bits(
    make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from libattnres import _api

    case = make_case(block_write_idx=3)
    fast, slow = case.clone(), case.clone()
    expected = libattnres.attn_res(*fast.arguments)
    monkeypatch.setattr(_api, "_forward_tensors", lambda *arguments: False)
    output = libattnres.attn_res(*slow.arguments)
    assert reference.same_bits(output, expected)
    assert reference.same_bits(slow.prefix, fast.prefix)
    assert reference.same_bits(slow.blocks, fast.blocks)


@pytest.mark.skipif(not hasattr(torch._C, "_dlpack_exchange_api"), reason="PyTorch has no exchange API")
def test_plain_tensors_take_the_fast_path(
    make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from libattnres import _api

    def slow_path(*arguments: Any) -> Any:
        raise AssertionError("the slow path was taken")

    monkeypatch.setattr(_api, "eager", slow_path)
    case = make_case(block_write_idx=3)
    padded = torch.randn(4, 96).bfloat16()[:, :64]
    for changed in (
        case,
        case.with_(delta=None, output_norm_weight=None, block_write_idx=-1),
        case.with_(prefix=padded, norm_weight=torch.nn.Parameter(case.norm_weight, requires_grad=False)),
    ):
        libattnres.attn_res(*changed.arguments)
        libattnres.attn_res(*changed.arguments, out=torch.empty_like(case.prefix), pdl="off", backend="host")
