# SPDX-License-Identifier: Apache-2.0
"""The operator in two phases on the arrays of other libraries."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import libattnres
import pytest
import torch
from foreign_arrays import OnCuda, ThroughDlpack, ThroughInterface, as_numpy
from libattnres import _core, array, reference
from test_two_phase import Case

np = pytest.importorskip("numpy")

Wrap = Callable[[torch.Tensor], Any]


def bank_arguments(case: Case, wrap: Wrap) -> dict[str, Any]:
    tensors = {"blocks": case.blocks, "norm_weights": case.norm_weights, "qk_weights": case.qk_weights}
    return {name: wrap(tensor) for name, tensor in tensors.items()} | {"num_blocks": case.num_blocks}


def merge_arguments(case: Case, wrap: Wrap, **changes: Any) -> dict[str, Any]:
    arguments = case.merge_arguments(1, blocks=case.blocks, **changes)
    return {n: wrap(v) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}


def assert_same_memory(left: Case, right: Case) -> None:
    for name, memory in left.allocations.items():
        assert reference.same_bits(memory, right.allocations[name]), name


@pytest.mark.parametrize("wrap", [ThroughDlpack, ThroughInterface, lambda tensor: tensor])
@pytest.mark.parametrize(
    ("dtype", "bank_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({"padding": 3}, {"block_write_idx": 4}),
        ({"prefixes_per_row": 2}, {"delta": None, "output_norm_weight": None}),
        ({"num_sites": 2, "num_entries": 1}, {"block_write_idx": 0}),  # strides without a meaning
        ({"num_entries": 0}, {}),
    ],
)
def test_arrays_give_what_tensors_give(
    sizes: dict[str, Any],
    changes: dict[str, Any],
    dtype: torch.dtype,
    bank_dtype: torch.dtype,
    wrap: Wrap,
) -> None:
    ours, expected = (Case(**sizes, dtype=dtype, bank_dtype=bank_dtype) for _ in range(2))
    expected.run_bank(backend="host")
    libattnres.attn_res_merge(
        **expected.merge_arguments(1, blocks=expected.blocks, **changes), out=expected.out, backend="host"
    )
    bank, lse, out = wrap(ours.bank), wrap(ours.lse), wrap(ours.out)
    made = array.attn_res_bank(**bank_arguments(ours, wrap), bank=bank, lse=lse)
    assert made[0] is bank
    assert made[1] is lse
    assert array.attn_res_merge(**merge_arguments(ours, wrap, **changes), out=out) is out
    assert_same_memory(ours, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bank_dtype", [None, "float32"])
@pytest.mark.parametrize("wrap", [as_numpy, lambda tensor: tensor], ids=["numpy", "torch"])
def test_new_arrays_are_of_the_library_of_blocks(
    wrap: Wrap, bank_dtype: str | None, dtype: torch.dtype
) -> None:
    case = Case(dtype=dtype, bank_dtype=dtype)
    wide = dtype if bank_dtype is None else torch.float32
    bank, lse = libattnres.attn_res_bank(
        case.blocks, case.num_blocks, case.norm_weights, case.qk_weights, bank_dtype=wide, backend="host"
    )
    case.bank, case.lse = bank, lse
    before = case.prefix.clone()
    result = array.attn_res_merge_functional(**merge_arguments(case, wrap, block_write_idx=4))
    new_bank, new_lse = array.attn_res_bank(**bank_arguments(case, wrap), bank_dtype=bank_dtype)
    assert reference.same_bits(case.prefix, before)
    output = libattnres.attn_res_merge(**merge_arguments(case, lambda t: t, block_write_idx=4))
    for got, wanted in (
        (new_bank, bank),
        (new_lse, lse),
        (result.output, output),
        (result.prefix, case.prefix),
        (result.blocks, case.blocks),
    ):
        expected = wrap(wanted)
        assert type(got) is type(expected)
        assert got.dtype == expected.dtype
        bits = as_numpy(got) if isinstance(got, torch.Tensor) else got
        assert bits.tobytes() == as_numpy(wanted).tobytes()


def test_functional_copies_only_what_is_written() -> None:
    case = Case(dtype=torch.float32, bank_dtype=torch.float32)
    case.run_bank()
    arguments = merge_arguments(case, as_numpy, delta=None)
    result = array.attn_res_merge_functional(**arguments)
    assert result.prefix is arguments["prefix"]
    assert result.blocks is arguments["blocks"]
    del arguments["blocks"]
    assert array.attn_res_merge_functional(**arguments).blocks is None


@pytest.mark.parametrize("name", ["prefix", "blocks", "out", "bank", "lse"])
def test_read_only_arrays_are_not_written(name: str) -> None:
    case = Case(dtype=torch.float32, bank_dtype=torch.float32)
    phase = array.attn_res_bank if name in ("bank", "lse") else array.attn_res_merge
    if phase is array.attn_res_bank:
        arguments = bank_arguments(case, as_numpy) | {"bank": as_numpy(case.bank), "lse": as_numpy(case.lse)}
    else:
        arguments = merge_arguments(case, as_numpy, block_write_idx=4) | {"out": as_numpy(case.out)}
    arguments[name].flags.writeable = False
    before = {key: value.tobytes() for key, value in arguments.items() if hasattr(value, "tobytes")}
    with pytest.raises(ValueError, match=rf"^{name}: expected an array that can be written, .* read-only"):
        phase(**arguments)
    assert before == {key: value.tobytes() for key, value in arguments.items() if hasattr(value, "tobytes")}


ON_CUDA = OnCuda(torch.zeros(3, 64))


@pytest.mark.parametrize(
    ("changes", "exception", "text"),
    [
        ({"blocks": [1.0]}, TypeError, "blocks: expected an array with __dlpack__"),
        ({"blocks": torch.zeros(4, 64)}, ValueError, "blocks: expected shape [T, R, H], got [4, 64]"),
        ({"blocks": torch.zeros(4, 8, 0)}, ValueError, "blocks: expected [T, R, H] with H >= 1, got"),
        ({"blocks": torch.zeros(4, 8, 64).double()}, ValueError, "blocks: expected dtype bfloat16, fl"),
        ({"num_blocks": 0}, ValueError, "num_blocks: expected 1..8, got 0"),
        ({"num_blocks": 1.0}, TypeError, "num_blocks: expected an int, got float"),
        ({"norm_weights": torch.zeros(64)}, ValueError, "norm_weights: expected shape [S, H], got [64]"),
        ({"norm_weights": torch.zeros(3, 63)}, ValueError, "norm_weights: expected shape [3, 64] as blocks"),
        ({"qk_weights": torch.zeros(2, 64)}, ValueError, "qk_weights: expected shape [3, 64] as norm_w"),
        ({"qk_weights": torch.zeros(3, 64).half()}, ValueError, "qk_weights: expected dtype float32 as bl"),
        ({"qk_weights": ON_CUDA}, ValueError, "qk_weights: expected an array on the host as blocks is"),
        ({"bank": torch.zeros(3, 5, 64)}, ValueError, "bank: expected shape [3, 4, 64] as norm_weights and"),
        ({"bank": torch.zeros(3, 4, 64).half()}, ValueError, "bank: expected dtype float32, got float16"),
        ({"lse": torch.zeros(3, 4).half()}, ValueError, "lse: expected dtype float32, got float16"),
        ({"bank_dtype": "float16"}, ValueError, "bank_dtype: expected 'float32', got 'float16'"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite number >= 0"),
        ({"pdl": "late"}, ValueError, "pdl: expected one of 'wait', 'early', 'off', got 'late'"),
    ],
)
def test_wrong_arguments_of_the_bank(changes: dict[str, Any], exception: type[Exception], text: str) -> None:
    case = Case(dtype=torch.float32, bank_dtype=torch.float32)
    before = Case(dtype=torch.float32, bank_dtype=torch.float32)
    arguments = bank_arguments(case, lambda tensor: tensor) | {"bank": case.bank, "lse": case.lse} | changes
    with pytest.raises(exception, match=re.escape(text)):
        array.attn_res_bank(**arguments)
    assert_same_memory(case, before)


@pytest.mark.parametrize(
    ("changes", "exception", "text"),
    [
        ({"prefix": torch.zeros(4, 0)}, ValueError, "prefix: expected [M, H] with H >= 1, got [4, 0]"),
        ({"bank": torch.zeros(3, 64)}, ValueError, "bank: expected shape [T, 64] with T a divisor of the 4"),
        ({"bank": torch.zeros(4, 64).half()}, ValueError, "bank: expected dtype float32, got float16"),
        ({"bank": None}, TypeError, "bank: expected an array with __dlpack__"),
        ({"lse": torch.zeros(2)}, ValueError, "lse: expected shape [4] as bank has, got [2]"),
        ({"blocks": torch.zeros(2, 8, 64)}, ValueError, "blocks: expected shape [4, 8, 64] as bank has"),
        ({"blocks": None}, ValueError, "block_write_idx: expected -1 without blocks, got 4"),
        ({"block_write_idx": 8}, ValueError, "block_write_idx: expected -1..7, got 8"),
        ({"block_write_idx": 1.0}, TypeError, "block_write_idx: expected an int, got float"),
        ({"qk_weight": torch.zeros(63)}, ValueError, "qk_weight: expected shape [64] as prefix has"),
        ({"output_norm_eps": "1"}, TypeError, "output_norm_eps: expected a float, got str"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant: expected a bool or None, got int"),
    ],
)
def test_wrong_arguments_of_the_merge(changes: dict[str, Any], exception: type[Exception], text: str) -> None:
    case = Case(dtype=torch.float32, bank_dtype=torch.float32)
    before = Case(dtype=torch.float32, bank_dtype=torch.float32)
    arguments = merge_arguments(case, lambda tensor: tensor, block_write_idx=4) | {"out": case.out} | changes
    with pytest.raises(exception, match=re.escape(text)):
        array.attn_res_merge(**arguments)
    assert_same_memory(case, before)


def test_cuda_calls_are_launched_on_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of both launches; on a GPU the next test has them run."""
    launched: list[dict[str, Any]] = []
    for name, fields in (("bank", _core.BANK_CALL_FIELDS), ("merge", _core.MERGE_CALL_FIELDS)):

        def record(*call: Any, fields: tuple[str, ...] = fields) -> None:
            launched.append(dict(zip((*fields, "stream"), call, strict=True)))

        monkeypatch.setattr(_core, name, record)
    case = Case(bank_dtype=torch.float32, padding=8)
    array.attn_res_bank(
        **bank_arguments(case, OnCuda), bank=OnCuda(case.bank), lse=OnCuda(case.lse), stream=7, pdl="early"
    )
    array.attn_res_merge(**merge_arguments(case, OnCuda, block_write_idx=4), out=OnCuda(case.out), stream=8)
    bank, merge = launched
    assert (bank["stream"], bank["pdl"], bank["device"], bank["float32_bank"]) == (7, 1, -1, 1)
    assert (bank["bank"], bank["lse"]) == (case.bank.data_ptr(), case.lse.data_ptr())
    assert (bank["bank_site_stride"], bank["bank_token_stride"], bank["lse_stride"]) == (4 * 72, 72, 4)
    assert (merge["stream"], merge["pdl"], merge["device"], merge["float32_bank"]) == (8, 0, -1, 1)
    assert (merge["bank"], merge["bank_stride"]) == (case.bank[1].data_ptr(), 72)
    assert (merge["blocks_token_stride"], merge["blocks_row_stride"], merge["block_write_idx"]) == (
        576,
        72,
        4,
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("native_device")
@pytest.mark.parametrize("wrap", [ThroughDlpack, OnCuda], ids=["dlpack", "cai"])
def test_cuda_arrays_run_natively(wrap: Wrap) -> None:
    sizes: dict[str, Any] = {"hidden_size": 7168, "num_entries": 33, "device": "cuda"}
    ours, expected = Case(**sizes), Case(**sizes)
    expected.run_bank(backend="native")
    libattnres.attn_res_merge(
        **expected.merge_arguments(1, blocks=expected.blocks, block_write_idx=4),
        out=expected.out,
        backend="native",
    )
    stream = torch.cuda.current_stream()
    array.attn_res_bank(**bank_arguments(ours, wrap), bank=wrap(ours.bank), lse=wrap(ours.lse), stream=stream)
    arguments = merge_arguments(ours, wrap, block_write_idx=4)
    array.attn_res_merge(**arguments, out=wrap(ours.out), stream=stream)
    torch.cuda.synchronize()
    assert_same_memory(ours, expected)


def test_jax_arrays_are_read_and_never_written() -> None:
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]

    def wrap(tensor: torch.Tensor) -> Any:
        return jax.device_put(as_numpy(tensor.clone()), cpu)

    case = Case()
    case.run_bank(backend="host")
    made = array.attn_res_bank(**bank_arguments(case, wrap))
    arguments = merge_arguments(case, wrap, block_write_idx=4)
    with pytest.raises(ValueError, match=r"^prefix: expected an array that can be written, .*functional"):
        array.attn_res_merge(**arguments)
    result = array.attn_res_merge_functional(**arguments)
    output = libattnres.attn_res_merge(**merge_arguments(case, lambda tensor: tensor, block_write_idx=4))
    wanted = (case.bank, case.lse, output, case.prefix, case.blocks)
    for got, expected in zip((*made, *result), wanted, strict=True):
        assert isinstance(got, jax.Array)
        assert np.asarray(got).tobytes() == as_numpy(expected).tobytes()
