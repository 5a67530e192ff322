# SPDX-License-Identifier: Apache-2.0
"""Where the elements of another library's array are, by whichever protocol tells."""

from __future__ import annotations

import ctypes
import operator
import sys
from typing import Any, NamedTuple

__all__ = ["DTYPES", "View", "is_jax", "type_name", "view_of"]

DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
"""What the library computes in, and its number for each."""
ELEMENT_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


class View(NamedTuple):
    """Where an array's elements are."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    device: int | None  # CUDA ordinal, -1 for the current one; None for the host
    is_writable: bool
    owner: object  # keeps the memory while this lives


def view_of(name: str, array: Any, stream: int) -> View:
    """Through the first protocol that can describe the array."""
    if isinstance(getattr(array, "__array_interface__", None), dict):
        return _from_interface(name, array, array.__array_interface__, None)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        kind, ordinal = array.__dlpack_device__()
        kind = int(kind)
        if kind not in (*_HOST_KINDS, *_CUDA_KINDS):
            raise ValueError(
                f"{name}: expected an array on the CPU or a CUDA device, got DLPack device {kind}"
            )
        device = ordinal if kind in _CUDA_KINDS else None
        try:
            return _from_dlpack(array, device, stream)
        except Exception as error:
            # bfloat16 of some versions of CuPy, which the other protocol takes
            interface = getattr(array, "__cuda_array_interface__", None)
            if isinstance(interface, dict):
                return _from_interface(name, array, interface, device)
            raise ValueError(
                f"{name}: expected an array that exports its memory, got a {type_name(array)} that says: "
                f"{error}"
            ) from error
    interface = getattr(array, "__cuda_array_interface__", None)
    if isinstance(interface, dict):
        return _from_interface(name, array, interface, -1)
    raise TypeError(
        f"{name}: expected an array with __dlpack__, __cuda_array_interface__ or __array_interface__, "
        f"got {type_name(array)}"
    )


def _from_interface(name: str, array: Any, interface: dict[str, Any], device: int | None) -> View:
    """NumPy's protocol and its sibling for CUDA."""
    try:
        kind = str(interface["typestr"])
        shape = tuple(operator.index(extent) for extent in interface["shape"])
        pointer, is_read_only = interface["data"]
        pointer = operator.index(pointer or 0)
        strides = interface.get("strides")
        if strides is not None:
            strides = tuple(operator.index(stride) for stride in strides)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: expected an array interface with typestr, shape and a pointer in data, got one that "
            f"says: {type(error).__name__}: {error}"
        ) from error
    if min(shape, default=0) < 0 or (strides is not None and len(strides) != len(shape)):
        raise ValueError(f"{name}: expected a shape and as many strides, got {shape} and {strides}")
    if interface.get("mask") is not None:
        raise ValueError(f"{name}: expected an array without a mask, got one with")
    # ml_dtypes' bfloat16 has no code of its own there: two bytes of anything.
    dtype = _INTERFACE_DTYPES.get(kind, kind)
    if kind == "<V2":
        dtype = str(getattr(array, "dtype", kind)).rpartition(".")[2]
    size = ELEMENT_SIZES.get(dtype, 1)
    if strides is not None and any(stride % size for stride in strides):
        raise ValueError(f"{name}: expected strides of whole elements of {size} bytes, got {strides} bytes")
    return View(
        pointer,
        shape,
        _dense_strides(shape) if strides is None else tuple(stride // size for stride in strides),
        dtype,
        device,
        not is_read_only,
        array,
    )


def _from_dlpack(array: Any, device: int | None, stream: int) -> View:
    """The array protocol of everybody else. The capsule stays unconsumed and frees its export itself."""
    options = {} if device is None else {"stream": stream}
    try:
        capsule = array.__dlpack__(**options, max_version=(1, 0))
    except TypeError:  # a producer from before DLPack 1.0
        capsule = array.__dlpack__(**options)
    name = _capsule_name(capsule)
    address = _capsule_pointer(capsule, name)
    is_read_only = is_jax(array)
    if name == b"dltensor_versioned":
        versioned = _VersionedTensor.from_address(address)
        if versioned.major != 1:
            raise BufferError(f"expected DLPack 1, got {versioned.major}")
        tensor = versioned.tensor
        is_read_only = is_read_only or bool(versioned.flags & 1)
    else:
        tensor = _Tensor.from_address(address)
    code = (tensor.code, tensor.bits, tensor.lanes)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _dense_strides(shape)
    return View(
        (tensor.data or 0) + tensor.byte_offset if tensor.data else 0,
        shape,
        strides,
        _DLPACK_DTYPES.get(code, f"DLPack type {code[0]} of {code[1]} bits"),
        device,
        not is_read_only,
        capsule,
    )


_INTERFACE_DTYPES = {"<f2": "float16", "<f4": "float32", "<f8": "float64"}
_HOST_KINDS = (1, 3)  # the CPU, and its memory that CUDA has pinned
_CUDA_KINDS = (2, 13)  # a CUDA device, and managed memory
_DLPACK_DTYPES = {(2, 16, 1): "float16", (2, 32, 1): "float32", (2, 64, 1): "float64", (4, 16, 1): "bfloat16"}


class _Tensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h; a ``DLManagedTensor`` begins with it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _VersionedTensor(ctypes.Structure):
    """``DLManagedTensorVersioned`` of dlpack.h."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
    return tuple(strides)


def is_jax(array: Any) -> bool:
    """Whether it is one of JAX's, which are never written, though DLPack does not say so."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def type_name(value: object) -> str:
    """For a message."""
    return type(value).__name__
