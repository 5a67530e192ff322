# SPDX-License-Identifier: Apache-2.0
"""One call of the operator: what Python must check about it, and its form for the C ABI."""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch.autograd import forward_ad

from libattnres import _core

__all__ = [
    "ARGUMENTS",
    "BATCH_INVARIANT_VARIABLE",
    "PDL_MODES",
    "Call",
    "Plan",
    "check_call_without_memory",
    "checked_call",
    "refuse_grad",
    "refuse_grad_of",
    "refuse_tangents",
    "refuse_tangents_of",
]

ARGUMENTS = ("prefix", "delta", "blocks", "norm_weight", "qk_weight", "output_norm_weight", "out")
"""Names of the tensor arguments."""

BATCH_INVARIANT_VARIABLE = "LIBATTNRES_BATCH_INVARIANT"
PDL_MODES = {"wait": 0, "early": 1, "off": 2}
KERNELS = {None: 0, "ring": 1, "cluster": 2}
CORE_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
DTYPES = (*CORE_DTYPES, torch.float64)


@dataclass(frozen=True)
class Plan:
    """Overrides of the native backend's launch plan; None leaves the choice to the plan.

    A call with a plan runs natively or not at all.

    Parameters
    ----------
    kernel : {"ring", "cluster"}, optional
        The persistent kernel for throughput, or one token per thread-block cluster for latency.
    rows_per_stage : int, optional
        Bank rows per pipeline stage of the ring kernel (NC): 1, 2 or 3.
    ctas_per_sm : int, optional
        Thread blocks per multiprocessor of the ring kernel: 1 or 2.
    cluster_size : int, optional
        Thread blocks per token of the cluster kernel.
    rows_in_flight : int, optional
        Rows that the ring kernel fetches ahead on a multiprocessor at most; at least 2 per thread block, and
        ``rows_per_stage``. It changes no bit of the result.
    """

    kernel: Literal["ring", "cluster"] | None = None
    rows_per_stage: int | None = None
    ctas_per_sm: int | None = None
    cluster_size: int | None = None
    rows_in_flight: int | None = None

    def __post_init__(self) -> None:
        """Refuse what the C ABI has no number for."""
        if self.kernel not in KERNELS:
            raise ValueError(f"plan.kernel: expected 'ring', 'cluster' or None, got {self.kernel!r}")
        for name in ("rows_per_stage", "ctas_per_sm", "cluster_size", "rows_in_flight"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"plan.{name}: expected an int or None, got {describe_type(value)}")
            if value < 1:
                raise ValueError(f"plan.{name}: expected a number >= 1 or None, got {value}")

    def numbers(self) -> list[int]:
        """The overrides as the C ABI counts them, 0 for none."""
        return [
            KERNELS[self.kernel],
            self.rows_per_stage or 0,
            self.ctas_per_sm or 0,
            self.cluster_size or 0,
            self.rows_in_flight or 0,
        ]


_NO_OVERRIDES = Plan().numbers()


@dataclass(frozen=True)
class Call:
    """The checked arguments of one call."""

    prefix: torch.Tensor
    delta: torch.Tensor | None
    blocks: torch.Tensor
    norm_weight: torch.Tensor
    qk_weight: torch.Tensor
    output_norm_weight: torch.Tensor | None
    num_blocks: int
    block_write_idx: int
    eps: float
    output_norm_eps: float
    out: torch.Tensor
    pdl: str
    batch_invariant: bool = False

    def core_args(self, plan: Plan | None = None) -> tuple[int | float, ...]:
        """One value per name of ``_core.CALL_FIELDS``; refuses a dtype that the C ABI does not have."""
        return self._core_args(CORE_DTYPES[self.prefix.dtype], 1, plan)

    def check_memory(self) -> None:
        """Ranges, strides and overlap, judged by the library for every backend alike."""
        check_memory_is_held(self, ARGUMENTS)
        if self.prefix.dtype is torch.float64:
            # The library has no float64; the same memory as twice as many float32.
            _core.check(*self._core_args(CORE_DTYPES[torch.float32], 2, None), False)
        else:
            _core.check(*self.core_args(), False)

    def _core_args(self, dtype: int, scale: int, plan: Plan | None) -> tuple[int | float, ...]:
        prefix, delta, blocks, out = self.prefix, self.delta, self.blocks, self.out
        num_tokens, hidden_size = prefix.shape
        num_bank_tokens, num_bank_rows, _ = blocks.shape
        row_stride = meaningful_stride(blocks, 1, hidden_size)
        return (
            prefix.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            blocks.data_ptr(),
            self.norm_weight.data_ptr(),
            self.qk_weight.data_ptr(),
            0 if self.output_norm_weight is None else self.output_norm_weight.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_bank_tokens,
            num_bank_rows,
            hidden_size * scale,
            self.num_blocks,
            self.block_write_idx,
            meaningful_stride(prefix, 0, hidden_size) * scale,
            0 if delta is None else meaningful_stride(delta, 0, hidden_size) * scale,
            meaningful_stride(blocks, 0, num_bank_rows * row_stride) * scale,
            row_stride * scale,
            meaningful_stride(out, 0, hidden_size) * scale,
            self.eps,
            self.output_norm_eps,
            dtype,
            PDL_MODES[self.pdl],
            -1 if prefix.device.index is None else prefix.device.index,
            *(_NO_OVERRIDES if plan is None else plan.numbers()),
            0,
            1 if self.batch_invariant else -1,
        )


def check_memory_is_held(call: object, names: tuple[str, ...]) -> None:
    """Not only an error of its own: the library takes a null pointer for an absent argument."""
    for name in names:
        tensor = getattr(call, name)
        if tensor is not None and tensor.data_ptr() == 0 and tensor.numel() > 0:
            raise ValueError(f"{name}: expected a tensor that holds its memory, got one with none")


def meaningful_stride(tensor: torch.Tensor, dimension: int, dense: int) -> int:
    """The stride, or the dense one where the extent is 0 or 1 and the stride means nothing."""
    return tensor.stride(dimension) if tensor.shape[dimension] > 1 else dense


def describe_type(value: object) -> str:
    """Name of a value's type for a message."""
    return type(value).__name__


def checked_call(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    out: torch.Tensor | None,
    pdl: str,
    batch_invariant: bool | None = None,
) -> Call:
    """Check everything that is wrong for every backend, then allocate ``out`` where there is none.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came. Nothing was written.
    """
    check_tensors(prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out)
    num_blocks = checked_index("num_blocks", num_blocks)
    block_write_idx = checked_index("block_write_idx", block_write_idx)
    eps = checked_epsilon("eps", eps)
    output_norm_eps = checked_epsilon("output_norm_eps", output_norm_eps)
    check_pdl(pdl)
    batch_invariant = resolved_batch_invariant(batch_invariant)
    device = prefix.device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"prefix: expected a CPU or CUDA tensor, got one on {device}")
    if out is None:
        out = torch.empty(tuple(prefix.shape), dtype=prefix.dtype, device=device)
    call = Call(
        prefix,
        delta,
        blocks,
        norm_weight,
        qk_weight,
        output_norm_weight,
        num_blocks,
        block_write_idx,
        eps,
        output_norm_eps,
        out,
        pdl,
        batch_invariant,
    )
    call.check_memory()
    return call


@dataclass(frozen=True)
class Layout:
    """Stands in a :class:`Call` for a tensor without memory: its sizes, at an address of its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    address: int

    def stride(self, dimension: int) -> int:
        """As of a tensor."""
        return self.strides[dimension]

    def data_ptr(self) -> int:
        """As of a tensor; no other layout is near."""
        return self.address


def check_call_without_memory(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    out: torch.Tensor,
    pdl: str,
    batch_invariant: bool | None,
) -> None:
    """What :func:`checked_call` refuses, for fake tensors: all but overlap of one argument with another.

    A symbolic size counts as what it is in the example at hand, which guards nothing: the call that runs
    is checked again. Where one has no example (it depends on data), sizes and numbers are left to the run.
    """
    tensors = (prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out)
    check_tensors(*tensors)
    values = [
        known(checked_index("num_blocks", num_blocks)),
        known(checked_index("block_write_idx", block_write_idx)),
        known(checked_epsilon("eps", eps)),
        known(checked_epsilon("output_norm_eps", output_norm_eps)),
    ]
    check_pdl(pdl)
    batch_invariant = resolved_batch_invariant(batch_invariant)
    layouts: list[Layout | None] = []
    for position, tensor in enumerate(tensors, start=1):
        if tensor is None:
            layouts.append(None)
            continue
        shape, strides = tuple(map(known, tensor.shape)), tuple(map(known, tensor.stride()))
        values += [*shape, *strides]
        # Eight of these stay below the 63 bits of an address.
        layouts.append(Layout(shape, strides, tensor.dtype, tensor.device, position << 59))  # type: ignore[arg-type]
    if None not in values:
        arguments: list[Any] = [*layouts[:6], *values[:4], layouts[6], pdl, batch_invariant]
        Call(*arguments).check_memory()


def known(value: Any) -> int | float | None:
    """A number, or what a symbolic one is in the example that is traced; None when it has no example."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        value = value.node.hint
    return value if isinstance(value, (int, float)) else None


def check_tensors(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Types, ranks, dtypes, devices and shapes; works on fake tensors and symbolic shapes too."""
    check_tensor("prefix", prefix, "[M, H]")
    dtype, device = prefix.dtype, prefix.device
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise ValueError(f"prefix: expected dtype {names}, got {dtype}")
    num_tokens, hidden_size = prefix.shape
    if hidden_size < 1:
        raise ValueError(f"prefix: expected [M, H] with H >= 1, got {describe_shape(prefix)}")

    check_tensor("blocks", blocks, "[T, R, H]", dtype, device)
    num_bank_tokens = blocks.shape[0]
    if blocks.shape[2] != hidden_size:
        raise ValueError(
            f"blocks: expected shape [T, R, {hidden_size}] as prefix has, got {describe_shape(blocks)}"
        )
    if num_bank_tokens != num_tokens and (num_bank_tokens == 0 or num_tokens % num_bank_tokens != 0):
        raise ValueError(
            f"blocks: expected shape [T, R, H] with T a divisor of the {num_tokens} tokens of prefix, "
            f"got {describe_shape(blocks)}"
        )
    for name, rows in (("delta", delta), ("out", out)):
        if rows is None:
            continue
        check_tensor(name, rows, "[M, H]", dtype, device)
        if rows.shape[0] != num_tokens or rows.shape[1] != hidden_size:
            raise ValueError(
                f"{name}: expected shape [{num_tokens}, {hidden_size}] as prefix has, "
                f"got {describe_shape(rows)}"
            )
    weights = [("norm_weight", norm_weight), ("qk_weight", qk_weight)]
    if output_norm_weight is not None:
        weights.append(("output_norm_weight", output_norm_weight))
    for name, weight in weights:
        check_tensor(name, weight, "[H]", dtype, device)
        if weight.shape[0] != hidden_size:
            raise ValueError(f"{name}: expected shape [{hidden_size}], got {describe_shape(weight)}")


def check_tensor(
    name: str,
    tensor: Any,
    shape: str,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    like: str = "prefix",
) -> None:
    """A strided tensor of the rank of ``shape``, last stride 1, with the dtype and device of ``like``."""
    check_type(name, tensor)
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: expected a strided tensor, got {tensor.layout}")
    rank = shape.count(",") + 1
    if tensor.dim() != rank:
        raise ValueError(f"{name}: expected shape {shape}, got {describe_shape(tensor)}")
    if dtype is not None and tensor.dtype is not dtype:
        raise ValueError(f"{name}: expected dtype {dtype} as {like} has, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device} as {like} has, got {tensor.device}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected last stride 1, got strides {tuple(tensor.stride())}")
    if tensor.is_neg():
        raise ValueError(f"{name}: expected a tensor without the negative bit, got one with it")


def check_type(name: str, tensor: Any) -> None:
    """A tensor at all."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {describe_type(tensor)}")


def describe_shape(tensor: torch.Tensor) -> str:
    """``[4, 7168]``."""
    return str(list(tensor.shape))


def checked_index(name: str, value: Any) -> int:
    """An int, or what converts to one without loss; not a bool. Symbolic ints pass as they are."""
    if type(value) is int:
        return value
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {describe_type(value)}")
    return operator.index(value)


def refuse_wide(name: str, index: int) -> None:
    """What no op takes; while a graph is traced, its compiler says so."""
    if not torch.compiler.is_compiling() and isinstance(index, int) and index.bit_length() > 63:
        raise ValueError(f"{name}: expected a 64-bit integer, got {index}")


def checked_epsilon(name: str, value: Any) -> float:
    """A real number, also NumPy's; whether it is finite and not negative is for the library."""
    if type(value) is float or isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            bits = int(cast(Any, value)).bit_length()
            raise ValueError(f"{name}: expected a finite number >= 0, got an int of {bits} bits") from None
    raise TypeError(f"{name}: expected a float, got {describe_type(value)}")


def check_pdl(pdl: Any) -> None:
    """One of the modes of the PDL contract."""
    if not isinstance(pdl, str) or pdl not in PDL_MODES:
        raise ValueError(f"pdl: expected one of {', '.join(map(repr, PDL_MODES))}, got {pdl!r}")


def check_batch_invariant(batch_invariant: Any) -> None:
    """A bool, or None for the environment."""
    if batch_invariant is not None and not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant: expected a bool or None, got {describe_type(batch_invariant)}")


def resolved_batch_invariant(batch_invariant: Any) -> bool:
    """The argument, else the environment, else no. The library reads the variable in the same way."""
    check_batch_invariant(batch_invariant)
    if batch_invariant is not None:
        return cast(bool, batch_invariant)
    text = os.environ.get(BATCH_INVARIANT_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{BATCH_INVARIANT_VARIABLE}: expected 0 or 1, got {text!r}")
    return text == "1"


def refuse_grad(
    prefix: object,
    delta: object,
    blocks: object,
    norm_weight: object,
    qk_weight: object,
    output_norm_weight: object,
    out: object,
) -> None:
    """Raise when an argument requires grad; for use under grad mode."""
    tensors = (prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out)
    refuse_grad_of("attn_res", dict(zip(ARGUMENTS, tensors, strict=True)))


def refuse_grad_of(operator_name: str, arguments: Mapping[str, object]) -> None:
    """The same for any operator and its arguments by name."""
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"{name}: expected a tensor that does not require grad, because {operator_name} has no "
                f"backward, got requires_grad=True; call it under torch.no_grad() or "
                f"torch.inference_mode()"
            )


def refuse_tangents(
    prefix: object,
    delta: object,
    blocks: object,
    norm_weight: object,
    qk_weight: object,
    output_norm_weight: object,
    out: object,
) -> None:
    """Raise when an argument is a dual tensor of forward-mode AD; for use inside a dual level."""
    tensors = (prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out)
    refuse_tangents_of("attn_res", dict(zip(ARGUMENTS, tensors, strict=True)))


def refuse_tangents_of(operator_name: str, arguments: Mapping[str, object]) -> None:
    """The same for any operator and its arguments by name."""
    unpack_dual: Any = forward_ad.unpack_dual
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor) and unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{name}: expected a tensor without a tangent, because {operator_name} has no derivative, "
                f"got a dual tensor of forward-mode AD"
            )
