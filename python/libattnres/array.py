# SPDX-License-Identifier: Apache-2.0
"""``attn_res`` on the arrays of any library, without PyTorch: NumPy, CuPy, JAX and others.

An array is whatever has ``__dlpack__``, ``__cuda_array_interface__`` or ``__array_interface__``. Arrays in
the host's memory run on the host backend, CUDA arrays on the native one; the two other backends need tensors
and :func:`libattnres.attn_res`. Neither PyTorch nor any array library is imported here.

:func:`attn_res` writes into the arrays that it is given, as the operator does, and refuses arrays that are
read-only where it would. :func:`attn_res_functional` returns new ones instead, for libraries whose arrays are
never written, such as JAX, or for callers who want the old values.
"""

from __future__ import annotations

import numbers
import operator
import sys
from typing import Any, NamedTuple

from libattnres import _core
from libattnres._array_view import DTYPES, View, is_jax, type_name, view_of

__all__ = ["Result", "attn_res", "attn_res_functional"]

PDL_MODES = {"wait": 0, "early": 1, "off": 2}
LEGACY_STREAM = 1
"""CUDA's handle of the legacy default stream, in DLPack too."""


class Result(NamedTuple):
    """What :func:`attn_res_functional` returns."""

    output: Any
    """``[M, H]``."""
    prefix: Any
    """``[M, H]``, updated; the argument itself when there is no ``delta``."""
    blocks: Any
    """``[T, R, H]``, with the row written; the argument itself when none is."""


def attn_res(
    prefix: Any,
    delta: Any,
    blocks: Any,
    norm_weight: Any,
    qk_weight: Any,
    output_norm_weight: Any,
    num_blocks: int,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
    *,
    out: Any = None,
    stream: Any = None,
    pdl: str = "wait",
    batch_invariant: bool | None = None,
) -> Any:
    """:func:`libattnres.attn_res` on arrays; ``prefix`` and ``blocks`` are updated in place as it does.

    Parameters
    ----------
    prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, num_blocks, block_write_idx
        As for :func:`libattnres.attn_res`, as are ``eps``, ``output_norm_eps``, ``pdl`` and
        ``batch_invariant``. bfloat16, float16 or float32; NumPy has bfloat16 through ``ml_dtypes``. The
        arrays may come from different libraries.
    out : array, optional
        ``[M, H]``, written and returned. By default a new array of the library of ``prefix``, which must be
        one whose arrays can be written.
    stream : optional
        CUDA stream of the call: its handle, or a stream of CuPy, PyTorch or ``cuda.core``. By default the one
        that ``prefix`` names in ``__cuda_array_interface__`` (in CuPy the current one), else the legacy
        default stream. What the arrays' libraries still compute is waited for on it; the caller orders what
        reads the results on other streams, and keeps the arrays until the call has run.

    Returns
    -------
    array
        ``[M, H]``.

    Raises
    ------
    TypeError, ValueError
        When an argument is wrong, naming it; also when an array that would be written is read-only. Nothing
        was written then.
    UnsupportedError
        When CUDA arrays are not what the native kernels support here. Nothing was written.
    RuntimeError
        When CUDA failed.
    """
    num_blocks = _index("num_blocks", num_blocks)
    block_write_idx = _index("block_write_idx", block_write_idx)
    handle = _stream(stream, prefix)
    writes = {"prefix": delta is not None, "blocks": block_write_idx != -1, "out": True}
    views: dict[str, View | None] = {}
    for name, array, rank in (
        ("prefix", prefix, 2),
        ("delta", delta, 2),
        ("blocks", blocks, 3),
        ("norm_weight", norm_weight, 1),
        ("qk_weight", qk_weight, 1),
        ("output_norm_weight", output_norm_weight, 1),
        ("out", out, 2),
    ):
        if array is None and name in ("delta", "output_norm_weight"):
            views[name] = None
            continue
        if name == "out" and array is None:
            array = out = _empty_like(prefix)  # only now: everything else is right
        view = view_of(name, array, handle)
        _check(name, view, rank, views.get("prefix"))
        if writes.get(name, False) and not view.is_writable:
            raise ValueError(
                f"{name}: expected an array that can be written, as this call does, got a read-only "
                f"{type_name(array)}; attn_res_functional returns new arrays"
            )
        views[name] = view
    _run(views, num_blocks, block_write_idx, eps, output_norm_eps, pdl, batch_invariant, handle)
    return out


def attn_res_functional(
    prefix: Any,
    delta: Any,
    blocks: Any,
    norm_weight: Any,
    qk_weight: Any,
    output_norm_weight: Any,
    num_blocks: int,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
    *,
    stream: Any = None,
    pdl: str = "wait",
    batch_invariant: bool | None = None,
) -> Result:
    """The same without writing into an argument; what the call writes is returned in new arrays.

    JAX's arrays must be in the host's memory here. On a GPU, and under ``jax.jit``, JAX calls the library
    through its foreign function interface: ``examples/jax_ffi``.

    Parameters
    ----------
    prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, num_blocks, block_write_idx
        As for :func:`attn_res`, as are the others.

    Returns
    -------
    Result
        Arrays of the libraries of ``prefix`` and ``blocks``.
    """
    block_write_idx = _index("block_write_idx", block_write_idx)
    new_prefix = prefix if delta is None else _copy("prefix", prefix)
    new_blocks = blocks if block_write_idx == -1 else _copy("blocks", blocks)
    output = attn_res(
        new_prefix,
        delta,
        new_blocks,
        norm_weight,
        qk_weight,
        output_norm_weight,
        num_blocks,
        block_write_idx,
        eps,
        output_norm_eps,
        out=_empty_like(_in_numpy("prefix", prefix) if is_jax(prefix) else prefix),
        stream=stream,
        pdl=pdl,
        batch_invariant=batch_invariant,
    )
    if is_jax(prefix):
        output = _in_jax(output)
        new_prefix = prefix if delta is None else _in_jax(new_prefix)
    if is_jax(blocks) and new_blocks is not blocks:
        new_blocks = _in_jax(new_blocks)
    return Result(output, new_prefix, new_blocks)


# --- one call -------------------------------------------------------------------------------------------


def _check(name: str, view: View, rank: int, prefix: View | None) -> None:
    """All but what the library judges: ranges, strides, overlap, and whether a kernel takes them."""
    wanted = {1: "[H]", 2: "[M, H]", 3: "[T, R, H]"}[rank]
    if len(view.shape) != rank:
        raise ValueError(f"{name}: expected shape {wanted}, got {list(view.shape)}")
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        raise ValueError(f"{name}: expected last stride 1, got strides {view.strides}")
    if prefix is None:
        if view.dtype not in DTYPES:
            raise ValueError(f"{name}: expected dtype {', '.join(DTYPES)}, got {view.dtype}")
        if view.shape[1] < 1:
            raise ValueError(f"{name}: expected [M, H] with H >= 1, got {list(view.shape)}")
        return
    if view.dtype != prefix.dtype:
        raise ValueError(f"{name}: expected dtype {prefix.dtype} as prefix has, got {view.dtype}")
    if (view.device is None) != (prefix.device is None) or (
        view.device != prefix.device and -1 not in (view.device, prefix.device)
    ):
        places = ["the host" if one.device is None else f"CUDA device {one.device}" for one in (prefix, view)]
        raise ValueError(f"{name}: expected an array on {places[0]} as prefix is, got one on {places[1]}")
    num_tokens, hidden_size = prefix.shape
    if rank == 3:
        num_bank_tokens = view.shape[0]
        divides = num_tokens % num_bank_tokens == 0 if num_bank_tokens else num_tokens == 0
        if view.shape[2] != hidden_size or not divides:
            raise ValueError(
                f"{name}: expected shape [T, R, {hidden_size}] with T a divisor of the {num_tokens} tokens "
                f"of prefix, got {list(view.shape)}"
            )
    elif view.shape != prefix.shape[2 - rank :]:
        raise ValueError(
            f"{name}: expected shape {list(prefix.shape[2 - rank :])} as prefix has, got {list(view.shape)}"
        )
    if view.pointer == 0 and 0 not in view.shape:
        raise ValueError(f"{name}: expected an array that holds its memory, got one with none")


def _run(
    views: dict[str, View | None],
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    pdl: str,
    batch_invariant: bool | None,
    stream: int,
) -> None:
    prefix, blocks, out, delta = views["prefix"], views["blocks"], views["out"], views["delta"]
    assert prefix is not None
    assert blocks is not None
    assert out is not None
    if not isinstance(pdl, str) or pdl not in PDL_MODES:
        raise ValueError(f"pdl: expected one of {', '.join(map(repr, PDL_MODES))}, got {pdl!r}")
    if batch_invariant is not None and not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant: expected a bool or None, got {type_name(batch_invariant)}")

    def stride(view: View, dimension: int, dense: int) -> int:
        # An extent of 0 or 1 gives the stride no meaning, and libraries any value.
        return view.strides[dimension] if view.shape[dimension] > 1 else dense

    num_tokens, hidden_size = prefix.shape
    row_stride = stride(blocks, 1, hidden_size)
    fields: dict[str, int | float] = {
        **{name: 0 if view is None else view.pointer for name, view in views.items() if name != "out"},
        "output": out.pointer,
        "num_tokens": num_tokens,
        "num_bank_tokens": blocks.shape[0],
        "num_bank_rows": blocks.shape[1],
        "hidden_size": hidden_size,
        "num_blocks": num_blocks,
        "block_write_idx": block_write_idx,
        "prefix_stride": stride(prefix, 0, hidden_size),
        "delta_stride": 0 if delta is None else stride(delta, 0, hidden_size),
        "blocks_token_stride": stride(blocks, 0, blocks.shape[1] * row_stride),
        "blocks_row_stride": row_stride,
        "output_stride": stride(out, 0, hidden_size),
        "eps": _epsilon("eps", eps),
        "output_norm_eps": _epsilon("output_norm_eps", output_norm_eps),
        "dtype": DTYPES[prefix.dtype],
        "pdl": PDL_MODES[pdl],
        "device": max(-1 if view.device is None else view.device for view in views.values() if view),
        "batch_invariant": {None: 0, True: 1, False: -1}[batch_invariant],
    }
    call = [fields.get(name, 0) for name in _core.CALL_FIELDS]
    if prefix.device is None:
        _core.forward_host(*call)
    else:
        _core.forward(*call, stream)


def _index(name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected an int, got {type_name(value)}")


def _epsilon(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a float, got {type_name(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite number >= 0, got one too large for a float") from None


def _stream(stream: Any, prefix: Any) -> int:
    """Handle of a stream in whatever form it comes."""
    if stream is None:
        interface = getattr(prefix, "__cuda_array_interface__", None)
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


def _empty_like(array: Any) -> Any:
    """A new dense array of the same library, shape, dtype and device."""
    if is_jax(array):
        raise ValueError(
            "out: expected an array that can be written, because JAX's cannot, got none; "
            "attn_res_functional returns new arrays"
        )
    libraries = [sys.modules.get(base.__module__.partition(".")[0]) for base in type(array).__mro__]
    if hasattr(array, "__array_namespace__"):
        libraries.insert(0, array.__array_namespace__())
    for library in libraries:
        if library is not None and hasattr(library, "empty_like"):
            return library.empty_like(array)
    raise ValueError(f"out: expected an array, because {type_name(array)} has no empty_like, got none")


def _copy(name: str, array: Any) -> Any:
    """A dense copy that can be written; of a JAX array, NumPy's."""
    if is_jax(array):
        return _in_numpy(name, array).copy()
    for method in ("copy", "clone"):  # of NumPy and CuPy, of PyTorch
        if hasattr(array, method):
            return getattr(array, method)()
    raise TypeError(f"{name}: expected an array with a copy method, got {type_name(array)}")


def _in_numpy(name: str, array: Any) -> Any:
    """NumPy's view of a JAX array in the host's memory."""
    if any(device.platform != "cpu" for device in array.devices()):
        raise ValueError(
            f"{name}: expected a JAX array in the host's memory, got one on {array.devices()}; "
            "on a GPU JAX calls through its foreign function interface, see examples/jax_ffi"
        )
    import numpy

    return numpy.asarray(array)


def _in_jax(array: Any) -> Any:
    return sys.modules["jax"].numpy.asarray(array)
