# SPDX-License-Identifier: Apache-2.0
"""A wrong call is an error that names the argument, what was expected and what came; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libattnres
import numpy as np
import pytest
import torch

H = 64
Changes = Callable[[Any], dict[str, Any]]


def overlapping_bank(case: Any) -> dict[str, Any]:
    """A bank whose last row is the prefix."""
    memory = torch.randn(4, 9, H).bfloat16()
    return {"prefix": memory[:, 7], "blocks": memory[:, :8]}


def rows_of(stride: int) -> torch.Tensor:
    """[4, H] with the given row stride."""
    return torch.randn(4 * H).bfloat16().as_strided((4, H), (stride, 1))


def delta_shifted_into_prefix(case: Any) -> dict[str, Any]:
    """A delta that shares all but one row with the prefix."""
    memory = torch.randn(5, H).bfloat16()
    return {"prefix": memory[:4], "delta": memory[1:]}


# name of the test: (exception, start of the message, what to change in a good call)
WRONG: dict[str, tuple[type[Exception], str, Changes]] = {
    # types
    "prefix is a list": (TypeError, "prefix: expected a torch.Tensor, got list", lambda c: {"prefix": [1.0]}),
    "prefix is None": (TypeError, "prefix: expected a torch.Tensor, got None", lambda c: {"prefix": None}),
    "delta is an array": (
        TypeError,
        "delta: expected a torch.Tensor, got ndarray",
        lambda c: {"delta": np.zeros((4, H))},
    ),
    "blocks is None": (TypeError, "blocks: expected a torch.Tensor, got None", lambda c: {"blocks": None}),
    "norm_weight is None": (
        TypeError,
        "norm_weight: expected a torch.Tensor, got None",
        lambda c: {"norm_weight": None},
    ),
    "qk_weight is a float": (
        TypeError,
        "qk_weight: expected a torch.Tensor, got float",
        lambda c: {"qk_weight": 1.0},
    ),
    "num_blocks is a bool": (
        TypeError,
        "num_blocks: expected an int, got bool",
        lambda c: {"num_blocks": True},
    ),
    "num_blocks is a float": (
        TypeError,
        "num_blocks: expected an int, got float",
        lambda c: {"num_blocks": 3.0},
    ),
    "num_blocks is a tensor": (
        TypeError,
        "num_blocks: expected an int, got Tensor",
        lambda c: {"num_blocks": torch.tensor(3)},
    ),
    "num_blocks is None": (
        TypeError,
        "num_blocks: expected an int, got NoneType",
        lambda c: {"num_blocks": None},
    ),
    "block_write_idx is a bool": (
        TypeError,
        "block_write_idx: expected an int, got bool",
        lambda c: {"block_write_idx": False},
    ),
    "eps is a string": (TypeError, "eps: expected a float, got str", lambda c: {"eps": "1e-5"}),
    "output_norm_eps is a bool": (
        TypeError,
        "output_norm_eps: expected a float, got bool",
        lambda c: {"output_norm_eps": True},
    ),
    # ranks and shapes
    "prefix is a vector": (
        ValueError,
        "prefix: expected shape [M, H], got [256]",
        lambda c: {"prefix": c.prefix.flatten()},
    ),
    "prefix has three dimensions": (
        ValueError,
        "prefix: expected shape [M, H], got [1, 4, 64]",
        lambda c: {"prefix": c.prefix[None]},
    ),
    "H is 0": (
        ValueError,
        "prefix: expected [M, H] with H >= 1, got [4, 0]",
        lambda c: {"prefix": c.prefix[:, :0]},
    ),
    "delta has another H": (
        ValueError,
        "delta: expected shape [4, 64] as prefix has, got [4, 32]",
        lambda c: {"delta": c.delta[:, :32]},
    ),
    "delta has fewer tokens": (
        ValueError,
        "delta: expected shape [4, 64] as prefix has, got [3, 64]",
        lambda c: {"delta": c.delta[:3]},
    ),
    "delta is empty rather than None": (
        ValueError,
        "delta: expected shape [4, 64] as prefix has, got [0, 64]",
        lambda c: {"delta": c.delta[:0]},
    ),
    "delta is an empty vector": (
        ValueError,
        "delta: expected shape [M, H], got [0]",
        lambda c: {"delta": torch.empty(0).bfloat16()},
    ),
    "output_norm_weight is empty rather than None": (
        ValueError,
        "output_norm_weight: expected shape [64], got [0]",
        lambda c: {"output_norm_weight": c.norm_weight[:0]},
    ),
    "blocks is a matrix": (
        ValueError,
        "blocks: expected shape [T, R, H], got [4, 64]",
        lambda c: {"blocks": c.blocks[:, 0]},
    ),
    "blocks has another H": (
        ValueError,
        "blocks: expected shape [T, R, 64] as prefix has, got [4, 8, 32]",
        lambda c: {"blocks": c.blocks[..., :32]},
    ),
    "T does not divide M": (
        ValueError,
        "blocks: expected shape [T, R, H] with T a divisor of the 4 tokens of prefix, got [3, 8, 64]",
        lambda c: {"blocks": c.blocks[:3]},
    ),
    "T is 0 for four tokens": (
        ValueError,
        "blocks: expected shape [T, R, H] with T a divisor of the 4 tokens of prefix, got [0, 8, 64]",
        lambda c: {"blocks": c.blocks[:0]},
    ),
    "norm_weight is too long": (
        ValueError,
        "norm_weight: expected shape [64], got [65]",
        lambda c: {"norm_weight": torch.ones(65).bfloat16()},
    ),
    "qk_weight is a row": (
        ValueError,
        "qk_weight: expected shape [H], got [1, 64]",
        lambda c: {"qk_weight": c.qk_weight[None]},
    ),
    # dtypes, layouts, devices
    "integers": (
        ValueError,
        "prefix: expected dtype bfloat16, float16, float32, float64, got torch.int16",
        lambda c: {"prefix": c.prefix.view(torch.int16)},
    ),
    "delta in another dtype": (
        ValueError,
        "delta: expected dtype torch.bfloat16 as prefix has, got torch.float32",
        lambda c: {"delta": c.delta.float()},
    ),
    "blocks in another dtype": (
        ValueError,
        "blocks: expected dtype torch.bfloat16 as prefix has, got torch.float16",
        lambda c: {"blocks": c.blocks.half()},
    ),
    "a weight in another dtype": (
        ValueError,
        "output_norm_weight: expected dtype torch.bfloat16 as prefix has, got torch.float32",
        lambda c: {"output_norm_weight": c.norm_weight.float()},
    ),
    "sparse": (
        ValueError,
        "delta: expected a strided tensor, got torch.sparse_coo",
        lambda c: {"delta": c.delta.to_sparse()},
    ),
    "blocks on another device": (
        ValueError,
        "blocks: expected device cpu as prefix has, got meta",
        lambda c: {"blocks": c.blocks.to("meta")},
    ),
    "a weight on another device": (
        ValueError,
        "qk_weight: expected device cpu as prefix has, got meta",
        lambda c: {"qk_weight": c.qk_weight.to("meta")},
    ),
    # strides
    "columns of prefix are strided": (
        ValueError,
        "prefix: expected last stride 1, got strides (128, 2)",
        lambda c: {"prefix": torch.randn(4, 2 * H).bfloat16()[:, ::2]},
    ),
    "delta is transposed": (
        ValueError,
        "delta: expected last stride 1, got strides (1, 4)",
        lambda c: {"delta": torch.randn(H, 4).bfloat16().T},
    ),
    "blocks are strided in H": (
        ValueError,
        "blocks: expected last stride 1, got strides (1024, 128, 2)",
        lambda c: {"blocks": torch.randn(4, 8, 2 * H).bfloat16()[..., ::2]},
    ),
    "a weight is strided": (
        ValueError,
        "norm_weight: expected last stride 1, got strides (2,)",
        lambda c: {"norm_weight": torch.randn(2 * H).bfloat16()[::2]},
    ),
    "a weight is expanded": (
        ValueError,
        "qk_weight: expected last stride 1, got strides (0,)",
        lambda c: {"qk_weight": torch.ones(1).bfloat16().expand(H)},
    ),
    # ranges
    "num_blocks is negative": (ValueError, "num_blocks: expected 0..8, got -1", lambda c: {"num_blocks": -1}),
    "num_blocks passes R": (
        ValueError,
        "num_blocks: expected 0..2, got 3",
        lambda c: {"blocks": c.blocks[:, :2]},
    ),
    "num_blocks passes 8": (
        ValueError,
        "num_blocks: expected 0..8, got 9",
        lambda c: {"blocks": torch.randn(4, 12, H).bfloat16(), "num_blocks": 9},
    ),
    "num_blocks passes 32 bits": (ValueError, "num_blocks: expected ", lambda c: {"num_blocks": 2**32 + 3}),
    "num_blocks passes 64 bits": (ValueError, "num_blocks: expected ", lambda c: {"num_blocks": 2**70}),
    "block_write_idx is -2": (
        ValueError,
        "block_write_idx: expected -1..7, got -2",
        lambda c: {"block_write_idx": -2},
    ),
    "block_write_idx is R": (
        ValueError,
        "block_write_idx: expected -1..7, got 8",
        lambda c: {"block_write_idx": 8},
    ),
    "a write to a bank entry that tokens share": (
        ValueError,
        "block_write_idx: expected -1 ",
        lambda c: {"blocks": c.blocks[:2], "block_write_idx": 3},
    ),
    "eps is negative": (ValueError, "eps: expected ", lambda c: {"eps": -1e-5}),
    "eps is an int past every float": (
        ValueError,
        "eps: expected a finite number >= 0, got an int of 1329 bits",
        lambda c: {"eps": 10**400},
    ),
    "eps is NaN": (ValueError, "eps: expected ", lambda c: {"eps": float("nan")}),
    "output_norm_eps is infinite": (
        ValueError,
        "output_norm_eps: expected ",
        lambda c: {"output_norm_eps": float("inf")},
    ),
    # memory
    "prefix overlaps itself": (ValueError, "prefix: expected ", lambda c: {"prefix": rows_of(H // 2)}),
    "prefix is one row expanded": (ValueError, "prefix: expected ", lambda c: {"prefix": rows_of(0)}),
    "delta is prefix": (ValueError, "prefix: expected ", lambda c: {"delta": c.prefix}),
    "delta shares rows with prefix": (ValueError, "prefix: expected ", delta_shifted_into_prefix),
    "prefix is a bank row": (ValueError, "prefix: expected ", overlapping_bank),
    "a written bank overlaps itself": (
        ValueError,
        "blocks: expected ",
        lambda c: {"blocks": c.blocks[:1].expand(4, 8, H), "block_write_idx": 0},
    ),
    "a weight lies in the written bank": (
        ValueError,
        "blocks: expected ",
        lambda c: {"norm_weight": c.blocks[0, 5], "block_write_idx": 5},
    ),
    "a weight lies in the written prefix": (
        ValueError,
        "prefix: expected ",
        lambda c: {"qk_weight": c.prefix[2]},
    ),
}


def bytes_of(case: Any) -> dict[str, bytes]:
    """Every byte of the storages behind a call."""
    return {
        name: bytes(value.untyped_storage())
        for name in case.__dataclass_fields__
        if isinstance(value := getattr(case, name), torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
    }


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("what", WRONG)
def test_wrong_argument_is_named_and_nothing_is_written(
    what: str, backend: str | None, make_case: Callable[..., Any]
) -> None:
    exception, text, changes = WRONG[what]
    case = make_case()
    case = case.with_(**changes(case))
    before = bytes_of(case)
    with pytest.raises(exception) as raised:
        libattnres.attn_res(*case.arguments, backend=backend)
    assert str(raised.value).startswith(text), str(raised.value)
    assert ", got " in str(raised.value)
    assert bytes_of(case) == before


@pytest.mark.parametrize("what", WRONG)
def test_explain_refuses_what_attn_res_refuses(what: str, make_case: Callable[..., Any]) -> None:
    exception, text, changes = WRONG[what]
    case = make_case()
    case = case.with_(**changes(case))
    with pytest.raises(exception) as raised:
        libattnres.explain(*case.arguments)
    assert str(raised.value).startswith(text)


TENSORS = ("prefix", "delta", "blocks", "norm_weight", "qk_weight", "output_norm_weight", "out")


def run_with(case: Any, name: str, value: torch.Tensor) -> None:
    """A call with one tensor replaced, which may be ``out``."""
    if name == "out":
        libattnres.attn_res(*case.arguments, out=value)
    else:
        libattnres.attn_res(*case.with_(**{name: value}).arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TENSORS)
def test_a_negative_view_is_refused_rather_than_misread(
    name: str, dtype: torch.dtype, make_case: Callable[..., Any]
) -> None:
    """The imaginary part of a conjugate: memory that holds the values' negatives."""
    case = make_case(dtype=dtype)
    negative = torch._neg_view(case.delta.clone() if name == "out" else getattr(case, name))
    assert negative.is_neg()
    before = bytes_of(case)
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor without the negative bit, got "):
        run_with(case, name, negative)
    assert bytes_of(case) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_whose_storage_was_freed_is_not_taken_for_an_absent_one(
    name: str, dtype: torch.dtype, make_case: Callable[..., Any]
) -> None:
    """As a sharded parameter's is between its uses: shape and strides without memory."""
    case = make_case(dtype=dtype)
    freed = case.delta.clone() if name == "out" else getattr(case, name).clone()
    freed.untyped_storage().resize_(0)
    before = bytes_of(case)
    with pytest.raises(
        ValueError, match=f"^{name}: expected a tensor that holds its memory, got one with none"
    ):
        run_with(case, name, freed)
    assert bytes_of(case) == before


WRONG_OUT: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "not a tensor": (TypeError, "out: expected a torch.Tensor, got int", lambda c: 7),
    "shape": (
        ValueError,
        "out: expected shape [4, 64] as prefix has, got [4, 32]",
        lambda c: c.delta[:, :32],
    ),
    "rank": (ValueError, "out: expected shape [M, H], got [256]", lambda c: c.delta.flatten()),
    "dtype": (ValueError, "out: expected dtype ", lambda c: torch.empty(4, H)),
    "device": (ValueError, "out: expected device ", lambda c: torch.empty(4, H, device="meta").bfloat16()),
    "last stride": (ValueError, "out: expected last stride 1", lambda c: torch.empty(H, 4).bfloat16().T),
    "overlaps itself": (ValueError, "out: expected ", lambda c: rows_of(H // 2)),
    "is prefix": (ValueError, "out: expected ", lambda c: c.prefix),
    "is delta": (ValueError, "out: expected ", lambda c: c.delta),
    "is a bank row": (ValueError, "out: expected ", lambda c: c.blocks[:, 6]),
    "holds a weight": (ValueError, "out: expected ", lambda c: c.norm_weight.expand(4, H)),
}


@pytest.mark.parametrize("what", WRONG_OUT)
def test_wrong_out_is_named_and_nothing_is_written(what: str, make_case: Callable[..., Any]) -> None:
    exception, text, make_out = WRONG_OUT[what]
    case = make_case(block_write_idx=4)
    before = bytes_of(case)
    with pytest.raises(exception) as raised:
        libattnres.attn_res(*case.arguments, out=make_out(case))
    assert str(raised.value).startswith(text), str(raised.value)
    assert bytes_of(case) == before


@pytest.mark.parametrize(
    "name", ["prefix", "delta", "blocks", "norm_weight", "qk_weight", "output_norm_weight", "out"]
)
def test_requires_grad_under_grad_mode_is_an_error_and_never_detached(
    name: str, make_case: Callable[..., Any]
) -> None:
    case = make_case()
    out = torch.empty_like(case.prefix)
    tensor = out if name == "out" else getattr(case, name)
    tensor.requires_grad_()
    before = bytes_of(case)
    with pytest.raises(RuntimeError, match=f"^{name}: expected .* does not require grad.*no_grad"):
        libattnres.attn_res(*case.arguments, out=out)
    assert bytes_of(case) == before
    with torch.no_grad():
        assert libattnres.attn_res(*case.arguments, out=out) is out


def test_parameters_are_served_without_grad(make_case: Callable[..., Any]) -> None:
    case = make_case()
    weights = {name: torch.nn.Parameter(getattr(case, name)) for name in ("norm_weight", "qk_weight")}
    expected = libattnres.attn_res(*case.clone().arguments)
    with torch.inference_mode():
        output = libattnres.attn_res(*case.with_(**weights).arguments)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("pdl", ["", "late", None, 1, True])
def test_unknown_pdl_mode_is_refused(pdl: Any, make_case: Callable[..., Any]) -> None:
    case = make_case()
    before = bytes_of(case)
    with pytest.raises(ValueError, match=r"^pdl: expected one of 'wait', 'early', 'off', got "):
        libattnres.attn_res(*case.arguments, pdl=pdl)
    assert bytes_of(case) == before


@pytest.mark.parametrize("backend", ["cuda", "Native", "", 3])
def test_unknown_backend_is_refused(backend: Any, make_case: Callable[..., Any]) -> None:
    case = make_case()
    before = bytes_of(case)
    with pytest.raises(ValueError, match=r"^backend: expected one of 'auto', .*, got "):
        libattnres.attn_res(*case.arguments, backend=backend)
    assert bytes_of(case) == before


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kernel": "chunk"}, "plan.kernel: expected 'ring', 'cluster' or None, got 'chunk'"),
        ({"rows_per_stage": 0}, "plan.rows_per_stage: expected a number >= 1 or None, got 0"),
        ({"ctas_per_sm": -1}, "plan.ctas_per_sm: expected a number >= 1 or None, got -1"),
        ({"cluster_size": 2.0}, "plan.cluster_size: expected an int or None, got float"),
        ({"cluster_size": True}, "plan.cluster_size: expected an int or None, got bool"),
    ],
)
def test_wrong_plan_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        libattnres.Plan(**changes)
    assert str(raised.value) == text


def test_missing_and_unknown_arguments_are_python_errors(make_case: Callable[..., Any]) -> None:
    case = make_case()
    with pytest.raises(TypeError, match="num_blocks"):
        libattnres.attn_res(*case.arguments[:6])
    with pytest.raises(TypeError, match="stream"):
        libattnres.attn_res(*case.arguments, stream=0)
