# SPDX-License-Identifier: Apache-2.0
"""Calls on the arrays of other libraries: what Python must check of them, streams, and new arrays."""

from __future__ import annotations

import numbers
import operator
import sys
from typing import Any

from libattnres._array_view import DTYPES, View, is_jax, type_name

__all__ = [
    "check_first",
    "check_like",
    "check_memory",
    "check_shape",
    "check_writable",
    "copy_of",
    "empty_like",
    "epsilon",
    "in_jax",
    "in_numpy",
    "index",
    "options",
    "places",
    "stream_handle",
    "stride",
]

PDL_MODES = {"wait": 0, "early": 1, "off": 2}
LEGACY_STREAM = 1
"""CUDA's handle of the legacy default stream, in DLPack too."""


# --- arrays ---------------------------------------------------------------------------------------------
# All but what the library judges: ranges, strides, overlap, and whether a kernel takes them.


def check_rank(name: str, view: View, wanted: str) -> None:
    """Whether it has as many dimensions as ``wanted``, such as ``[M, H]``, and the last lies densely."""
    if len(view.shape) != wanted.count(",") + 1:
        raise ValueError(f"{name}: expected shape {wanted}, got {list(view.shape)}")
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        raise ValueError(f"{name}: expected last stride 1, got strides {view.strides}")


def check_first(name: str, view: View, wanted: str) -> None:
    """The array that the others must go with."""
    check_rank(name, view, wanted)
    if view.dtype not in DTYPES:
        raise ValueError(f"{name}: expected dtype {', '.join(DTYPES)}, got {view.dtype}")
    if view.shape[-1] < 1:
        raise ValueError(f"{name}: expected {wanted} with H >= 1, got {list(view.shape)}")


def check_like(
    name: str, view: View, wanted: str, first_name: str, first: View, dtypes: tuple[str, ...] = ()
) -> None:
    """Rank, dtype (that of the first array, or one of others) and device."""
    check_rank(name, view, wanted)
    if view.dtype not in (dtypes or (first.dtype,)):
        expected = " or ".join(dtypes) if dtypes else f"{first.dtype} as {first_name} has"
        raise ValueError(f"{name}: expected dtype {expected}, got {view.dtype}")
    if (view.device is None) != (first.device is None) or (
        view.device != first.device and -1 not in (view.device, first.device)
    ):
        where = ["the host" if one.device is None else f"CUDA device {one.device}" for one in (first, view)]
        raise ValueError(f"{name}: expected an array on {where[0]} as {first_name} is, got one on {where[1]}")


def check_shape(name: str, view: View, wanted: tuple[int, ...], first_name: str) -> None:
    """Sizes that the first array gives."""
    if view.shape != wanted:
        raise ValueError(f"{name}: expected shape {list(wanted)} as {first_name} has, got {list(view.shape)}")


def check_memory(name: str, view: View) -> None:
    """Whether there are elements where it says."""
    if view.pointer == 0 and 0 not in view.shape:
        raise ValueError(f"{name}: expected an array that holds its memory, got one with none")


def check_writable(name: str, view: View, array: Any, instead: str) -> None:
    """For what a call writes."""
    if not view.is_writable:
        raise ValueError(
            f"{name}: expected an array that can be written, as this call does, got a read-only "
            f"{type_name(array)}; {instead}"
        )


def stride(view: View | None, dimension: int, dense: int) -> int:
    """In elements; an extent of 0 or 1 gives it no meaning, and libraries any value."""
    if view is None:
        return 0
    return view.strides[dimension] if view.shape[dimension] > 1 else dense


# --- numbers and options --------------------------------------------------------------------------------


def index(name: str, value: Any) -> int:
    """An int, by the rules of Python."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected an int, got {type_name(value)}")


def epsilon(name: str, value: Any) -> float:
    """A number, whose range the library judges."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a float, got {type_name(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite number >= 0, got one too large for a float") from None


def options(pdl: Any, batch_invariant: Any) -> dict[str, int]:
    """Fields of every call."""
    if not isinstance(pdl, str) or pdl not in PDL_MODES:
        raise ValueError(f"pdl: expected one of {', '.join(map(repr, PDL_MODES))}, got {pdl!r}")
    if batch_invariant is not None and not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant: expected a bool or None, got {type_name(batch_invariant)}")
    return {"pdl": PDL_MODES[pdl], "batch_invariant": {None: 0, True: 1, False: -1}[batch_invariant]}


def places(views: dict[str, View | None]) -> dict[str, int]:
    """Addresses by the arrays' names, and the device of all."""
    return {
        **{name: 0 if view is None else view.pointer for name, view in views.items()},
        "device": max(-1 if view.device is None else view.device for view in views.values() if view),
    }


def stream_handle(stream: Any, array: Any) -> int:
    """Handle of a stream in whatever form it comes; by default the one that an array names."""
    if stream is None:
        interface = getattr(array, "__cuda_array_interface__", None)
        stream = interface.get("stream") if isinstance(interface, dict) else None
        return stream or LEGACY_STREAM
    if hasattr(stream, "__cuda_stream__"):
        stream = stream.__cuda_stream__()[1]
    for attribute in ("ptr", "cuda_stream"):  # of CuPy, of PyTorch
        stream = getattr(stream, attribute, stream)
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise TypeError(f"stream: expected a CUDA stream or its handle, got {type_name(stream)}")
    return operator.index(stream) or LEGACY_STREAM


# --- new arrays -----------------------------------------------------------------------------------------


def empty_like(name: str, array: Any, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> Any:
    """A new dense array of the same library and device, and by default of the same shape and dtype."""
    if is_jax(array):
        raise ValueError(
            f"{name}: expected an array that can be written, because JAX's cannot, got none; "
            "attn_res_functional and attn_res_merge_functional return new arrays"
        )
    if shape is not None and hasattr(array, "new_empty"):  # of PyTorch
        kind = array.dtype if dtype is None else getattr(sys.modules["torch"], dtype)
        return array.new_empty(shape, dtype=kind)
    libraries = [sys.modules.get(base.__module__.partition(".")[0]) for base in type(array).__mro__]
    if hasattr(array, "__array_namespace__"):
        libraries.insert(0, array.__array_namespace__())
    for library in libraries:
        if library is not None and hasattr(library, "empty_like"):
            return (
                library.empty_like(array)
                if shape is None
                else library.empty_like(array, shape=shape, dtype=dtype)
            )
    raise ValueError(f"{name}: expected an array, because {type_name(array)} has no empty_like, got none")


def copy_of(name: str, array: Any) -> Any:
    """A dense copy that can be written; of a JAX array, NumPy's."""
    if is_jax(array):
        return in_numpy(name, array).copy()
    for method in ("copy", "clone"):  # of NumPy and CuPy, of PyTorch
        if hasattr(array, method):
            return getattr(array, method)()
    raise TypeError(f"{name}: expected an array with a copy method, got {type_name(array)}")


def in_numpy(name: str, array: Any) -> Any:
    """NumPy's view of a JAX array in the host's memory; any other array as it is."""
    if not is_jax(array):
        return array
    if any(device.platform != "cpu" for device in array.devices()):
        raise ValueError(
            f"{name}: expected a JAX array in the host's memory, got one on {array.devices()}; "
            "on a GPU JAX calls through its foreign function interface, see examples/jax_ffi"
        )
    import numpy

    return numpy.asarray(array)


def in_jax(array: Any) -> Any:
    """A JAX array with what NumPy's holds."""
    return sys.modules["jax"].numpy.asarray(array)
