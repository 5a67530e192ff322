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

from collections.abc import Callable
from typing import Any, NamedTuple

from libattnres import _core
from libattnres._array_call import (
    check_first,
    check_like,
    check_memory,
    check_shape,
    check_writable,
    copy_of,
    empty_like,
    epsilon,
    in_jax,
    in_numpy,
    index,
    options,
    places,
    stream_handle,
    stride,
)
from libattnres._array_view import DTYPES, View, is_jax, view_of

__all__ = [
    "Result",
    "attn_res",
    "attn_res_bank",
    "attn_res_functional",
    "attn_res_merge",
    "attn_res_merge_functional",
]


class Result(NamedTuple):
    """What :func:`attn_res_functional` and :func:`attn_res_merge_functional` return."""

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
    num_blocks = index("num_blocks", num_blocks)
    block_write_idx = index("block_write_idx", block_write_idx)
    handle = stream_handle(stream, prefix)
    arrays = _beside_prefix(
        prefix,
        {
            "prefix": prefix,
            "delta": delta,
            "blocks": blocks,
            "norm_weight": norm_weight,
            "qk_weight": qk_weight,
            "output_norm_weight": output_norm_weight,
            "out": out,
        },
        {"prefix": delta is not None, "blocks": block_write_idx != -1, "out": True},
        handle,
    )
    blocks_view = arrays.views["blocks"]
    assert blocks_view is not None
    _call(
        "forward",
        _core.CALL_FIELDS,
        {
            **arrays.fields(),
            "num_bank_tokens": blocks_view.shape[0],
            "num_blocks": num_blocks,
            "block_write_idx": block_write_idx,
            "eps": epsilon("eps", eps),
            "output_norm_eps": epsilon("output_norm_eps", output_norm_eps),
            **options(pdl, batch_invariant),
        },
        handle,
        on_host=blocks_view.device is None,
    )
    return arrays.out


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
    block_write_idx = index("block_write_idx", block_write_idx)
    new_prefix = prefix if delta is None else copy_of("prefix", prefix)
    new_blocks = blocks if block_write_idx == -1 else copy_of("blocks", blocks)
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
        out=empty_like("out", in_numpy("prefix", prefix)),
        stream=stream,
        pdl=pdl,
        batch_invariant=batch_invariant,
    )
    return _result(output, prefix, new_prefix, blocks, new_blocks)


def attn_res_bank(
    blocks: Any,
    num_blocks: int,
    norm_weights: Any,
    qk_weights: Any,
    eps: float = 1e-5,
    *,
    bank: Any = None,
    lse: Any = None,
    bank_dtype: str | None = None,
    stream: Any = None,
    pdl: str = "wait",
    batch_invariant: bool | None = None,
) -> tuple[Any, Any]:
    """:func:`libattnres.attn_res_bank` on arrays.

    Parameters
    ----------
    blocks, num_blocks, norm_weights, qk_weights, eps, pdl, batch_invariant
        As for :func:`libattnres.attn_res_bank`, dtypes and libraries as for :func:`attn_res`.
    bank, lse : array, optional
        ``[S, T, H]`` and ``[S, T]`` in float32, written and returned. By default new arrays of the library of
        ``blocks``, JAX's among them.
    bank_dtype : str, optional
        Of a new ``bank``: ``"float32"``, or by default that of ``blocks``.
    stream : optional
        As for :func:`attn_res`; by default the one that ``blocks`` names.

    Returns
    -------
    tuple of array
        ``bank`` and ``lse``.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, RuntimeError
        As :func:`attn_res` does.
    """
    num_blocks = index("num_blocks", num_blocks)
    handle = stream_handle(stream, blocks)
    first = view_of("blocks", blocks, handle)
    check_first("blocks", first, "[T, R, H]")
    check_memory("blocks", first)
    views = {"blocks": first}
    num_bank_tokens, num_bank_rows, hidden_size = first.shape
    num_sites = 0
    for name, array, like in (
        ("norm_weights", norm_weights, "blocks"),
        ("qk_weights", qk_weights, "norm_weights"),
    ):
        view = views[name] = view_of(name, array, handle)
        check_like(name, view, "[S, H]", "blocks", first)
        num_sites = num_sites if name == "qk_weights" else view.shape[0]
        check_shape(name, view, (num_sites, hidden_size), like)
        check_memory(name, view)
    dtypes = tuple(dict.fromkeys((first.dtype, "float32")))
    if bank_dtype is not None and bank_dtype not in dtypes:
        raise ValueError(f"bank_dtype: expected {' or '.join(map(repr, dtypes))}, got {bank_dtype!r}")
    made = {}
    for name, array, wanted, shape, allowed in (
        ("bank", bank, "[S, T, H]", (num_sites, num_bank_tokens, hidden_size), dtypes),
        ("lse", lse, "[S, T]", (num_sites, num_bank_tokens), ("float32",)),
    ):
        if array is None:
            dtype = "float32" if name == "lse" else bank_dtype
            kind = None if dtype == first.dtype else dtype
            array = empty_like(name, in_numpy("blocks", blocks), shape, kind)
        made[name] = array
        view = views[name] = view_of(name, array, handle)
        if name == "bank" and bank_dtype is not None:
            allowed = (bank_dtype,)
        check_like(name, view, wanted, "blocks", first, allowed)
        check_shape(name, view, shape, "norm_weights and blocks")
        check_memory(name, view)
        check_writable(name, view, array, "without it a new one is returned")
    row_stride = stride(first, 1, hidden_size)
    token_stride = stride(views["bank"], 1, hidden_size)
    _call(
        "bank",
        _core.BANK_CALL_FIELDS,
        {
            **places(dict(views)),
            "num_bank_tokens": num_bank_tokens,
            "num_bank_rows": num_bank_rows,
            "hidden_size": hidden_size,
            "num_blocks": num_blocks,
            "num_sites": num_sites,
            "blocks_token_stride": stride(first, 0, num_bank_rows * row_stride),
            "blocks_row_stride": row_stride,
            "norm_weights_stride": stride(views["norm_weights"], 0, hidden_size),
            "qk_weights_stride": stride(views["qk_weights"], 0, hidden_size),
            "bank_site_stride": stride(views["bank"], 0, num_bank_tokens * token_stride),
            "bank_token_stride": token_stride,
            "lse_stride": stride(views["lse"], 0, num_bank_tokens),
            "eps": epsilon("eps", eps),
            "dtype": DTYPES[first.dtype],
            "float32_bank": int(views["bank"].dtype != first.dtype),
            **options(pdl, batch_invariant),
        },
        handle,
        on_host=first.device is None,
    )
    new = {"bank": bank is None, "lse": lse is None}
    return tuple(in_jax(array) if new[name] and is_jax(blocks) else array for name, array in made.items())


def attn_res_merge(
    prefix: Any,
    delta: Any,
    bank: Any,
    lse: Any,
    norm_weight: Any,
    qk_weight: Any,
    output_norm_weight: Any,
    blocks: Any = None,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
    *,
    out: Any = None,
    stream: Any = None,
    pdl: str = "wait",
    batch_invariant: bool | None = None,
) -> Any:
    """:func:`libattnres.attn_res_merge` on arrays; ``prefix`` and ``blocks`` are updated in place as it does.

    Parameters
    ----------
    prefix, delta, bank, lse, norm_weight, qk_weight, output_norm_weight, blocks, block_write_idx
        As for :func:`libattnres.attn_res_merge`, as are ``eps`` and ``output_norm_eps``.
    out, stream, pdl, batch_invariant
        As for :func:`attn_res`.

    Returns
    -------
    array
        ``[M, H]``.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, RuntimeError
        As :func:`attn_res` does.
    """
    block_write_idx = index("block_write_idx", block_write_idx)
    if blocks is None and block_write_idx != -1:
        raise ValueError(f"block_write_idx: expected -1 without blocks, got {block_write_idx}")
    handle = stream_handle(stream, prefix)
    arrays = _beside_prefix(
        prefix,
        {
            "prefix": prefix,
            "delta": delta,
            "bank": bank,
            "lse": lse,
            "norm_weight": norm_weight,
            "qk_weight": qk_weight,
            "output_norm_weight": output_norm_weight,
            "blocks": None if block_write_idx == -1 else blocks,
            "out": out,
        },
        {"prefix": delta is not None, "blocks": True, "out": True},
        handle,
    )
    prefix_view, bank_view = arrays.views["prefix"], arrays.views["bank"]
    assert prefix_view is not None
    assert bank_view is not None
    _call(
        "merge",
        _core.MERGE_CALL_FIELDS,
        {
            **arrays.fields(),
            "num_bank_tokens": bank_view.shape[0],
            "bank_stride": stride(bank_view, 0, bank_view.shape[1]),
            "float32_bank": int(bank_view.dtype != prefix_view.dtype),
            "block_write_idx": block_write_idx,
            "eps": epsilon("eps", eps),
            "output_norm_eps": epsilon("output_norm_eps", output_norm_eps),
            **options(pdl, batch_invariant),
        },
        handle,
        on_host=prefix_view.device is None,
    )
    return arrays.out


def attn_res_merge_functional(
    prefix: Any,
    delta: Any,
    bank: Any,
    lse: Any,
    norm_weight: Any,
    qk_weight: Any,
    output_norm_weight: Any,
    blocks: Any = None,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
    *,
    stream: Any = None,
    pdl: str = "wait",
    batch_invariant: bool | None = None,
) -> Result:
    """The same without writing into an argument, as :func:`attn_res_functional` is to :func:`attn_res`.

    Parameters
    ----------
    prefix, delta, bank, lse, norm_weight, qk_weight, output_norm_weight, blocks, block_write_idx
        As for :func:`attn_res_merge`, as are the others.

    Returns
    -------
    Result
        Arrays of the libraries of ``prefix`` and ``blocks``.
    """
    block_write_idx = index("block_write_idx", block_write_idx)
    new_prefix = prefix if delta is None else copy_of("prefix", prefix)
    new_blocks = blocks if block_write_idx == -1 or blocks is None else copy_of("blocks", blocks)
    output = attn_res_merge(
        new_prefix,
        delta,
        bank,
        lse,
        norm_weight,
        qk_weight,
        output_norm_weight,
        new_blocks,
        block_write_idx,
        eps,
        output_norm_eps,
        out=empty_like("out", in_numpy("prefix", prefix)),
        stream=stream,
        pdl=pdl,
        batch_invariant=batch_invariant,
    )
    return _result(output, prefix, new_prefix, blocks, new_blocks)


# --- one call -------------------------------------------------------------------------------------------


class _Arrays(NamedTuple):
    """What is there of a call with a prefix."""

    views: dict[str, View | None]
    out: Any

    def fields(self) -> dict[str, int]:
        """Addresses, sizes and strides."""
        views = {"output" if name == "out" else name: view for name, view in self.views.items()}
        prefix, blocks = views["prefix"], views["blocks"]
        assert prefix is not None
        num_tokens, hidden_size = prefix.shape
        num_bank_rows = 0 if blocks is None else blocks.shape[1]
        row_stride = stride(blocks, 1, hidden_size)
        return {
            **places(views),
            "num_tokens": num_tokens,
            "num_bank_rows": num_bank_rows,
            "hidden_size": hidden_size,
            "prefix_stride": stride(prefix, 0, hidden_size),
            "delta_stride": stride(views["delta"], 0, hidden_size),
            "blocks_token_stride": stride(blocks, 0, num_bank_rows * row_stride),
            "blocks_row_stride": row_stride,
            "output_stride": stride(views["output"], 0, hidden_size),
            "dtype": DTYPES[prefix.dtype],
        }


_SHAPES = {"prefix": "[M, H]", "delta": "[M, H]", "out": "[M, H]", "bank": "[T, H]", "lse": "[T]"}
_SHAPES |= {"blocks": "[T, R, H]", "norm_weight": "[H]", "qk_weight": "[H]", "output_norm_weight": "[H]"}


def _beside_prefix(prefix: Any, arguments: dict[str, Any], writes: dict[str, bool], handle: int) -> _Arrays:
    """The arrays of a call, checked in this order; ``out`` comes last, and is made where there is none."""
    views: dict[str, View | None] = {}
    array: Any = None
    for name, array in arguments.items():
        if array is None and name in ("delta", "output_norm_weight"):
            views[name] = None
            continue
        if array is None and name == "blocks" and "bank" in arguments:
            views[name] = None
            continue
        if array is None and name == "out":
            array = empty_like(name, prefix)  # only now: everything else is right
        view = views[name] = view_of(name, array, handle)
        _check_beside_prefix(name, view, views)
        if writes.get(name, False):
            functional = "attn_res_merge_functional" if "bank" in arguments else "attn_res_functional"
            check_writable(name, view, array, f"{functional} returns new arrays")
    return _Arrays(views, array)


def _check_beside_prefix(name: str, view: View, views: dict[str, View | None]) -> None:
    prefix, wanted = views["prefix"], _SHAPES[name]
    assert prefix is not None
    if name == "prefix":
        check_first(name, view, wanted)
        return
    dtypes = {"lse": ("float32",), "bank": tuple(dict.fromkeys((prefix.dtype, "float32")))}.get(name, ())
    check_like(name, view, wanted, "prefix", prefix, dtypes)
    num_tokens, hidden_size = prefix.shape
    bank = views.get("bank")
    if name in ("blocks", "bank"):
        num_bank_tokens = view.shape[0]
        divides = num_tokens % num_bank_tokens == 0 if num_bank_tokens else num_tokens == 0
        if view.shape[-1] != hidden_size or not divides:
            raise ValueError(
                f"{name}: expected shape {wanted.replace('H', str(hidden_size))} with T a divisor of the "
                f"{num_tokens} tokens of prefix, got {list(view.shape)}"
            )
    if name in ("blocks", "lse") and bank is not None:
        check_shape(name, view, (bank.shape[0], *view.shape[1:]), "bank")
    if name not in ("blocks", "bank", "lse"):
        check_shape(name, view, prefix.shape[-len(view.shape) :], "prefix")
    check_memory(name, view)


def _call(
    name: str, names: tuple[str, ...], fields: dict[str, int | float], handle: int, *, on_host: bool
) -> None:
    """On the host, or on a CUDA stream; fields that are not named are 0."""
    call = [fields.get(field, 0) for field in names]
    run: Callable[..., None] = getattr(_core, f"{name}_host" if on_host else name)
    run(*call) if on_host else run(*call, handle)


# --- arrays of JAX --------------------------------------------------------------------------------------


def _result(output: Any, prefix: Any, new_prefix: Any, blocks: Any, new_blocks: Any) -> Result:
    """Arrays of the callers' libraries."""
    if is_jax(prefix):
        output = in_jax(output)
        new_prefix = new_prefix if new_prefix is prefix else in_jax(new_prefix)
    if is_jax(blocks) and new_blocks is not blocks:
        new_blocks = in_jax(new_blocks)
    return Result(output, new_prefix, new_blocks)
