# SPDX-License-Identifier: Apache-2.0
"""``libattnres.array``: the arrays of other libraries, and no import of those or of PyTorch for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import libattnres
import pytest
import torch
from foreign_arrays import OnCuda, ThroughDlpack, ThroughInterface, as_numpy
from libattnres import _array_view, _core, array, reference
from programs import run_program

np = pytest.importorskip("numpy")

H = 64
TENSORS = ("prefix", "delta", "blocks", "norm_weight", "qk_weight", "output_norm_weight")


def wrapped(case: Any, wrap: Callable[[torch.Tensor], Any]) -> Any:
    """The case with its tensors in another library's hands."""
    return case.with_(**{n: wrap(t) for n in TENSORS if (t := getattr(case, n)) is not None})


def assert_runs_like_tensors(case: Any, wrap: Callable[[torch.Tensor], Any], **options: Any) -> None:
    other = case.clone()
    expected = libattnres.attn_res(*other.arguments, backend="host")
    out = torch.full_like(case.prefix, float("nan"))
    wrapped_out = wrap(out)
    assert array.attn_res(*wrapped(case, wrap).arguments, out=wrapped_out, **options) is wrapped_out
    assert reference.same_bits(out, expected)
    assert reference.same_bits(case.prefix, other.prefix)
    assert reference.same_bits(case.blocks, other.blocks)


# --- on the host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        ThroughDlpack,
        lambda tensor: ThroughDlpack(tensor, old=True),
        lambda tensor: ThroughDlpack(tensor, kind=(3, 0)),  # pinned memory
        ThroughInterface,
        lambda tensor: tensor,
    ],
    ids=["DLPack", "DLPack of old", "pinned", "array interface", "tensor"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_protocol_gives_what_tensors_give(
    dtype: torch.dtype, wrap: Any, make_case: Callable[..., Any]
) -> None:
    assert_runs_like_tensors(make_case(dtype=dtype, block_write_idx=3), wrap)
    assert_runs_like_tensors(make_case(dtype=dtype, delta=None, output_norm_weight=None), wrap)
    assert_runs_like_tensors(make_case(dtype=dtype, num_tokens=6, prefixes_per_row=2), wrap)
    assert_runs_like_tensors(make_case(dtype=dtype, num_tokens=1, block_write_idx=0), wrap)
    assert_runs_like_tensors(make_case(dtype=dtype, num_tokens=0), wrap)


@pytest.mark.parametrize("wrap", [ThroughDlpack, ThroughInterface])
def test_padded_rows_and_offsets_are_followed(wrap: Any, make_case: Callable[..., Any]) -> None:
    case = make_case(num_tokens=5, block_write_idx=3)
    wide = {
        name: torch.full((*getattr(case, name).shape[:-1], H + 8), float("nan")).bfloat16()
        for name in TENSORS
    }
    for name, tensor in wide.items():
        tensor[..., 3 : 3 + H] = getattr(case, name)
    assert_runs_like_tensors(case.with_(**{n: t[..., 3 : 3 + H] for n, t in wide.items()}), wrap)
    for name, tensor in wide.items():
        assert tensor[..., :3].isnan().all(), name
        assert tensor[..., 3 + H :].isnan().all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numpy_arrays_in_place_and_functional(dtype: torch.dtype, make_case: Callable[..., Any]) -> None:
    case = make_case(dtype=dtype, block_write_idx=3)
    expected = case.clone()
    output = libattnres.attn_res(*expected.arguments, backend="host")
    arrays = wrapped(case, as_numpy)
    before = [getattr(arrays, name).tobytes() for name in TENSORS]
    result = array.attn_res_functional(*arrays.arguments)
    assert [getattr(arrays, name).tobytes() for name in TENSORS] == before
    in_place = array.attn_res(*arrays.arguments)
    for got, wanted in (
        (result.output, output),
        (result.prefix, expected.prefix),
        (result.blocks, expected.blocks),
        (in_place, output),
        (arrays.prefix, expected.prefix),
        (arrays.blocks, expected.blocks),
    ):
        assert type(got) is np.ndarray
        assert got.dtype == as_numpy(wanted).dtype
        assert got.tobytes() == as_numpy(wanted).tobytes()


def test_functional_copies_only_what_is_written(make_case: Callable[..., Any]) -> None:
    arrays = wrapped(make_case(dtype=torch.float32, delta=None), as_numpy)
    result = array.attn_res_functional(*arrays.arguments)
    assert result.prefix is arrays.prefix
    assert result.blocks is arrays.blocks
    tensors = make_case(dtype=torch.float32)
    result = array.attn_res_functional(*tensors.arguments)
    assert isinstance(result.prefix, torch.Tensor)
    assert result.prefix is not tensors.prefix
    assert result.blocks is tensors.blocks


class WithByteOffset(ThroughDlpack):
    """Of a library that gives the start of an allocation, and how far the array is into it."""

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.tensor.__dlpack__()
        name = _array_view._capsule_name(capsule)
        assert name == b"dltensor"
        exported = _array_view._Tensor.from_address(_array_view._capsule_pointer(capsule, name))
        exported.data, exported.byte_offset = exported.data - 64, 64
        return capsule


def test_byte_offsets_are_added(make_case: Callable[..., Any]) -> None:
    assert_runs_like_tensors(make_case(block_write_idx=3), WithByteOffset)


def test_dlpack_says_what_is_read_only(make_case: Callable[..., Any]) -> None:
    case = make_case(dtype=torch.float32)
    locked = as_numpy(case.prefix)
    locked.flags.writeable = False
    if not hasattr(locked, "__array_namespace__"):
        pytest.skip("this NumPy does not export read-only arrays")
    prefix: Any = ThroughDlpack(locked)
    with pytest.raises(ValueError, match=r"^prefix: expected an array that can be written, .* ThroughDlpack"):
        array.attn_res(prefix, *case.arguments[1:], out=torch.empty_like(case.prefix))
    out = torch.full_like(case.prefix, float("nan"))
    array.attn_res(prefix, None, *case.arguments[2:], out=out)
    assert reference.same_bits(out, libattnres.attn_res(*case.with_(delta=None).arguments, backend="host"))


@pytest.mark.parametrize("name", ["prefix", "blocks", "out"])
def test_read_only_arrays_are_not_written(name: str, make_case: Callable[..., Any]) -> None:
    case = wrapped(make_case(dtype=torch.float32, block_write_idx=3), as_numpy)
    arguments = {**{n: getattr(case, n) for n in case.__dataclass_fields__}, "out": case.prefix.copy()}
    arguments[name].flags.writeable = False
    before = {n: a.tobytes() for n, a in arguments.items() if hasattr(a, "tobytes")}
    with pytest.raises(
        ValueError, match=rf"^{name}: expected an array that can be written, .* read-only nda"
    ):
        array.attn_res(**arguments)
    assert before == {n: a.tobytes() for n, a in arguments.items() if hasattr(a, "tobytes")}
    if name != "out":
        arguments.pop("out")
        array.attn_res_functional(**arguments)


def test_what_is_only_read_may_be_read_only(make_case: Callable[..., Any]) -> None:
    case = make_case(dtype=torch.float32, delta=None)
    assert_runs_like_tensors(case, lambda tensor: ThroughInterface(tensor, data=(tensor.data_ptr(), False)))
    arrays = wrapped(case, as_numpy)
    for name in TENSORS:
        if getattr(arrays, name) is not None:
            getattr(arrays, name).flags.writeable = False
    assert np.isfinite(array.attn_res(*arrays.arguments)).all()


# --- wrong arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "exception", "text"),
    [
        (
            {"prefix": [1.0]},
            TypeError,
            "prefix: expected an array with __dlpack__, __cuda_array_interface__ or",
        ),
        ({"prefix": ThroughDlpack(torch.zeros(4, H))}, ValueError, "out: expected an array, because Through"),
        ({"eps": 10**400}, ValueError, "eps: expected a finite number >= 0, got one too large for a float"),
        ({"blocks": 3}, TypeError, "blocks: expected an array with __dlpack__, __cuda_array_interface__ or"),
        ({"norm_weight": None}, TypeError, "norm_weight: expected an array with __dlpack__"),
        ({"prefix": torch.zeros(4, H).double()}, ValueError, "prefix: expected dtype bfloat16, float16, flo"),
        ({"prefix": torch.zeros(4, H).int()}, ValueError, "got DLPack type 0 of 32 bits"),
        ({"prefix": torch.zeros(H)}, ValueError, r"prefix: expected shape \[M, H\], got \[64\]"),
        ({"prefix": torch.zeros(4, 0)}, ValueError, r"prefix: expected \[M, H\] with H >= 1, got \[4, 0\]"),
        ({"delta": torch.zeros(5, H)}, ValueError, r"delta: expected shape \[4, 64\] as prefix has, got"),
        ({"delta": torch.zeros(4, H).half()}, ValueError, "delta: expected dtype float32 as prefix has"),
        ({"qk_weight": torch.zeros(H - 1)}, ValueError, r"qk_weight: expected shape \[64\] as prefix has"),
        ({"blocks": torch.zeros(3, 8, H)}, ValueError, r"blocks: expected shape \[T, R, 64\] with T a divi"),
        ({"blocks": torch.zeros(0, 8, H)}, ValueError, "with T a divisor of the 4 tokens of prefix, got"),
        ({"delta": torch.zeros(H, 4).T}, ValueError, r"delta: expected last stride 1, got strides \(1, 4\)"),
        ({"num_blocks": 9}, ValueError, r"num_blocks: expected 0\.\.8, got 9"),
        ({"num_blocks": True}, TypeError, "num_blocks: expected an int, got bool"),
        ({"block_write_idx": 1.0}, TypeError, "block_write_idx: expected an int, got float"),
        ({"block_write_idx": torch.zeros(2)}, TypeError, "block_write_idx: expected an int, got Tensor"),
        ({"eps": "1"}, TypeError, "eps: expected a float, got str"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite number >= 0"),
        ({"pdl": "late"}, ValueError, "pdl: expected one of 'wait', 'early', 'off', got 'late'"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant: expected a bool or None, got int"),
        ({"stream": "s"}, TypeError, "stream: expected a CUDA stream or its handle, got str"),
        (
            {"delta": OnCuda(torch.zeros(4, H))},
            ValueError,
            "delta: expected an array on the host as prefix is, got one on CUDA device -1",
        ),
        (
            {"delta": ThroughDlpack(torch.zeros(4, H), kind=(10, 0))},
            ValueError,
            "delta: expected an array on the CPU or a CUDA device, got DLPack device 10",
        ),
        (
            {"delta": torch.zeros(4, H).requires_grad_()},
            ValueError,
            "delta: expected an array that exports its memory, got a Tensor that says: ",
        ),
        (
            {"delta": ThroughInterface(torch.zeros(4, H), data=(0, False))},
            ValueError,
            "delta: expected an array that holds its memory, got one with none",
        ),
        (
            {"delta": ThroughInterface(torch.zeros(4, H), strides=(255, 4))},
            ValueError,
            "delta: expected strides of whole elements of 4 bytes, got (255, 4) bytes",
        ),
        (
            {"delta": ThroughInterface(torch.zeros(4, H), strides=(4,))},
            ValueError,
            "delta: expected a shape and as many strides, got (4, 64) and (4,)",
        ),
        (
            {"delta": ThroughInterface(torch.zeros(4, H), data=None)},
            ValueError,
            "delta: expected an array interface with typestr, shape and a pointer in data, got one that says",
        ),
        (
            {"delta": OnCuda(torch.zeros(4, H), mask=OnCuda(torch.zeros(4, H)))},
            ValueError,
            "delta: expected an array without a mask, got one with",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    changes: dict[str, Any], exception: type[Exception], text: str, make_case: Callable[..., Any]
) -> None:
    case = make_case(dtype=torch.float32, block_write_idx=3)
    before = case.clone()
    arguments = {n: getattr(case, n) for n in case.__dataclass_fields__} | changes
    pattern = text if "\\" in text else re.escape(text)
    with pytest.raises(exception, match=pattern):
        array.attn_res(**arguments)
    for name in TENSORS:
        assert reference.same_bits(getattr(case, name), getattr(before, name))


def test_overlap_is_refused(make_case: Callable[..., Any]) -> None:
    case = make_case(dtype=torch.float32)
    with pytest.raises(ValueError, match="shares no byte"):
        array.attn_res(*case.arguments, out=case.prefix)


# --- CUDA -----------------------------------------------------------------------------------------------


class Stream:
    """As cuda.core has it."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 77)


class CupyStream:
    ptr = 78


@pytest.mark.parametrize(
    ("stream", "of_prefix", "handle"),
    [
        (None, {}, 1),
        (None, {"stream": 2}, 2),
        (Stream(), {"stream": 2}, 77),
        (CupyStream(), {}, 78),
        (79, {}, 79),
        (0, {}, 1),
    ],
)
def test_a_cuda_call_is_launched_on_its_stream(
    stream: Any, of_prefix: dict[str, int], handle: int, make_case: Callable[..., Any], monkeypatch: Any
) -> None:
    """The arguments of the launch; on a GPU the next test has it run."""
    launched: list[dict[str, Any]] = []

    def forward(*call: Any) -> None:
        launched.append(dict(zip((*_core.CALL_FIELDS, "stream"), call, strict=True)))

    monkeypatch.setattr(_core, "forward", forward)
    case = make_case(block_write_idx=3)
    arrays = wrapped(case, OnCuda).with_(prefix=OnCuda(case.prefix, **of_prefix))
    out = torch.empty_like(case.prefix)
    array.attn_res(*arrays.arguments, out=OnCuda(out), stream=stream, pdl="early", batch_invariant=True)
    (call,) = launched
    assert call["stream"] == handle
    assert (call["output"], call["blocks"]) == (out.data_ptr(), case.blocks.data_ptr())
    assert (call["device"], call["pdl"], call["batch_invariant"], call["block_write_idx"]) == (-1, 1, 1, 3)
    assert (call["blocks_token_stride"], call["blocks_row_stride"], call["hidden_size"]) == (8 * H, H, H)


@pytest.mark.gpu
@pytest.mark.usefixtures("native_device")
@pytest.mark.parametrize(
    "wrap", [lambda tensor: tensor, ThroughDlpack, OnCuda], ids=["tensor", "dlpack", "cai"]
)
@pytest.mark.parametrize("on_side_stream", [False, True])
def test_cuda_arrays_run_natively(on_side_stream: bool, wrap: Any, gpu_case: Callable[..., Any]) -> None:
    case = gpu_case(num_tokens=33, block_write_idx=3)
    expected = case.clone()
    output = libattnres.attn_res(*expected.arguments, backend="native")
    out = torch.full_like(case.prefix, float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    array.attn_res(*wrapped(case, wrap).arguments, out=wrap(out), stream=stream)
    torch.cuda.synchronize()
    for got, wanted in ((out, output), (case.prefix, expected.prefix), (case.blocks, expected.blocks)):
        assert reference.same_bits(got, wanted)


@pytest.mark.gpu
@pytest.mark.usefixtures("native_device")
def test_cuda_arrays_that_no_kernel_takes_are_unsupported(gpu_case: Callable[..., Any]) -> None:
    case = gpu_case(hidden_size=64)
    before = case.clone()
    with pytest.raises(libattnres.UnsupportedError, match="hidden_size"):
        array.attn_res(*case.arguments)
    assert reference.same_bits(case.prefix, before.prefix)


@pytest.mark.gpu
@pytest.mark.usefixtures("native_device")
def test_cupy_arrays_run_on_cupy_s_stream(gpu_case: Callable[..., Any]) -> None:
    cupy = pytest.importorskip("cupy")
    case = gpu_case(num_tokens=33, block_write_idx=3)
    expected = case.clone()
    output = libattnres.attn_res(*expected.arguments, backend="native")
    torch.cuda.synchronize()
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    arrays = wrapped(case, lambda tensor: cupy.from_dlpack(tensor.view(torch.int16)).view(bfloat16))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        result = array.attn_res_functional(*arrays.arguments)
        in_place = array.attn_res(*arrays.arguments)
        stream.synchronize()
    for got, wanted in (
        (result.output, output),
        (result.blocks, expected.blocks),
        (in_place, output),
        (arrays.prefix, expected.prefix),
    ):
        assert cupy.asnumpy(got).tobytes() == as_numpy(wanted.cpu()).tobytes()


# --- JAX ------------------------------------------------------------------------------------------------


def test_jax_arrays_are_read_and_never_written(make_case: Callable[..., Any]) -> None:
    jax = pytest.importorskip("jax")
    case = make_case(block_write_idx=3)
    expected = case.clone()
    output = libattnres.attn_res(*expected.arguments, backend="host")
    cpu = jax.devices("cpu")[0]
    arrays = wrapped(case, lambda tensor: jax.device_put(as_numpy(tensor.clone()), cpu))
    reads = {"delta": None, "block_write_idx": -1}
    for name, changes in (("out", reads), ("prefix", {}), ("blocks", {"delta": None})):
        changed = arrays.with_(**changes)
        out = None if name == "out" else as_numpy(torch.empty_like(case.prefix))
        with pytest.raises(
            ValueError, match=rf"^{name}: expected an array that can be written, .*functional"
        ):
            array.attn_res(*changed.arguments, out=out)
    result = array.attn_res_functional(*arrays.arguments)
    for got, wanted in zip(result, (output, expected.prefix, expected.blocks), strict=True):
        assert isinstance(got, jax.Array)
        assert np.asarray(got).tobytes() == as_numpy(wanted).tobytes()
    for name in TENSORS:
        assert np.asarray(getattr(arrays, name)).tobytes() == as_numpy(getattr(case, name)).tobytes()
    read = arrays.with_(**reads)
    out = as_numpy(torch.empty_like(case.prefix))
    array.attn_res(*read.arguments, out=out)
    assert np.asarray(array.attn_res_functional(*read.arguments).output).tobytes() == out.tobytes()


# --- imports --------------------------------------------------------------------------------------------


def test_a_call_imports_neither_torch_nor_an_array_library() -> None:
    program = """
import sys
import numpy as np
before = set(sys.modules)
import libattnres.array
rng = np.random.default_rng(0)
prefix, delta, blocks = (rng.standard_normal(shape, np.float32) for shape in ((4, 64), (4, 64), (4, 8, 64)))
weights = rng.standard_normal((3, 64), np.float32)
p = prefix + delta
output = libattnres.array.attn_res(prefix, delta, blocks, *weights, 3, 3)
new = {name.partition('.')[0] for name in set(sys.modules) - before}
assert not new & {'torch', 'triton', 'jax', 'cupy', 'vllm', 'sglang', 'ml_dtypes'}, new
assert 'torch' not in sys.modules
assert (prefix == p).all() and (blocks[:, 3] == p).all()
sources = np.concatenate([blocks[:, :3], p[:, None]], 1).astype(np.float64)
scores = (sources * weights[0] * weights[1]).sum(2) / np.sqrt((sources ** 2).mean(2) + 1e-5)
attention = np.exp(scores - scores.max(1, keepdims=True))
mixed = ((attention / attention.sum(1, keepdims=True))[:, :, None] * sources).sum(1)
wanted = mixed / np.sqrt((mixed ** 2).mean(1, keepdims=True) + 1e-5) * weights[2]
assert np.abs(output - wanted).max() < 1e-4
import libattnres
assert libattnres.probe().backends['host'] is None
assert 'torch' in sys.modules
print('fine')
"""
    assert run_program(program).strip() == "fine"
