# SPDX-License-Identifier: Apache-2.0
"""One call of either phase: what Python must check about it, its form for the C ABI, and its dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch

from libattnres import _core
from libattnres._call import (
    CORE_DTYPES,
    PDL_MODES,
    Layout,
    check_memory_is_held,
    check_pdl,
    check_tensor,
    checked_epsilon,
    checked_index,
    describe_shape,
    describe_type,
    known,
    meaningful_stride,
    resolved_batch_invariant,
)
from libattnres._dispatch import (
    AUTO_ORDER,
    BATCH_VARIANT,
    Explanation,
    explain_first,
    load,
    requested_backend,
    run_first,
)

__all__ = [
    "BankCall",
    "MergeCall",
    "bank",
    "check_bank_without_memory",
    "check_merge_without_memory",
    "checked_bank_call",
    "checked_merge_call",
    "explain",
    "merge",
]


@dataclass(frozen=True)
class BankCall:
    """The checked arguments of ``attn_res_bank``."""

    ARGUMENTS: ClassVar[tuple[str, ...]] = ("blocks", "norm_weights", "qk_weights", "bank", "lse")

    blocks: torch.Tensor
    num_blocks: int
    norm_weights: torch.Tensor
    qk_weights: torch.Tensor
    eps: float
    bank: torch.Tensor
    lse: torch.Tensor
    pdl: str
    batch_invariant: bool = False

    @property
    def rows(self) -> torch.Tensor:
        """The argument whose dtype and device are those of the call."""
        return self.blocks

    def core_args(self) -> tuple[int | float, ...]:
        """One value per name of ``_core.BANK_CALL_FIELDS``."""
        blocks, bank = self.blocks, self.bank
        num_bank_tokens, num_bank_rows, hidden_size = blocks.shape
        row_stride = meaningful_stride(blocks, 1, hidden_size)
        token_stride = meaningful_stride(bank, 1, hidden_size)
        return (
            blocks.data_ptr(),
            self.norm_weights.data_ptr(),
            self.qk_weights.data_ptr(),
            bank.data_ptr(),
            self.lse.data_ptr(),
            num_bank_tokens,
            num_bank_rows,
            hidden_size,
            self.num_blocks,
            self.norm_weights.shape[0],
            meaningful_stride(blocks, 0, num_bank_rows * row_stride),
            row_stride,
            meaningful_stride(self.norm_weights, 0, hidden_size),
            meaningful_stride(self.qk_weights, 0, hidden_size),
            meaningful_stride(bank, 0, num_bank_tokens * token_stride),
            token_stride,
            meaningful_stride(self.lse, 0, num_bank_tokens),
            self.eps,
            CORE_DTYPES[blocks.dtype],
            int(bank.dtype is not blocks.dtype),
            PDL_MODES[self.pdl],
            device_index(blocks),
            0,
            0,
            1 if self.batch_invariant else -1,
        )

    def check_memory(self) -> None:
        """Ranges, strides and overlap, judged by the library for every backend alike."""
        check_memory_is_held(self, self.ARGUMENTS)
        self.judge(on_device=False)

    def judge(self, *, on_device: bool) -> None:
        """What the library alone says of it, on the host or for the native kernels."""
        _core.check_bank(*self.core_args(), on_device)

    def run(self, module: ModuleType) -> None:
        """On one backend."""
        module.bank(self)


@dataclass(frozen=True)
class MergeCall:
    """The checked arguments of ``attn_res_merge``."""

    ARGUMENTS: ClassVar[tuple[str, ...]] = (
        "prefix",
        "delta",
        "bank",
        "lse",
        "norm_weight",
        "qk_weight",
        "output_norm_weight",
        "blocks",
        "out",
    )

    prefix: torch.Tensor
    delta: torch.Tensor | None
    bank: torch.Tensor
    lse: torch.Tensor
    norm_weight: torch.Tensor
    qk_weight: torch.Tensor
    output_norm_weight: torch.Tensor | None
    blocks: torch.Tensor | None
    """None where no row is written."""
    block_write_idx: int
    eps: float
    output_norm_eps: float
    out: torch.Tensor
    pdl: str
    batch_invariant: bool = False

    @property
    def rows(self) -> torch.Tensor:
        """The argument whose dtype and device are those of the call."""
        return self.prefix

    def core_args(self) -> tuple[int | float, ...]:
        """One value per name of ``_core.MERGE_CALL_FIELDS``."""
        prefix, delta, blocks, out = self.prefix, self.delta, self.blocks, self.out
        num_tokens, hidden_size = prefix.shape
        num_bank_rows = 0 if blocks is None else blocks.shape[1]
        row_stride = 0 if blocks is None else meaningful_stride(blocks, 1, hidden_size)
        return (
            prefix.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            self.bank.data_ptr(),
            self.lse.data_ptr(),
            self.norm_weight.data_ptr(),
            self.qk_weight.data_ptr(),
            0 if self.output_norm_weight is None else self.output_norm_weight.data_ptr(),
            0 if blocks is None else blocks.data_ptr(),
            out.data_ptr(),
            num_tokens,
            self.bank.shape[0],
            num_bank_rows,
            hidden_size,
            self.block_write_idx,
            meaningful_stride(prefix, 0, hidden_size),
            0 if delta is None else meaningful_stride(delta, 0, hidden_size),
            meaningful_stride(self.bank, 0, hidden_size),
            0 if blocks is None else meaningful_stride(blocks, 0, num_bank_rows * row_stride),
            row_stride,
            meaningful_stride(out, 0, hidden_size),
            self.eps,
            self.output_norm_eps,
            CORE_DTYPES[prefix.dtype],
            int(self.bank.dtype is not prefix.dtype),
            PDL_MODES[self.pdl],
            device_index(prefix),
            *(0, 0, 0, 0, 0),
            0,
            1 if self.batch_invariant else -1,
        )

    def check_memory(self) -> None:
        """Ranges, strides and overlap, judged by the library for every backend alike."""
        check_memory_is_held(self, self.ARGUMENTS)
        self.judge(on_device=False)

    def judge(self, *, on_device: bool) -> None:
        """What the library alone says of it, on the host or for the native kernels."""
        _core.check_merge(*self.core_args(), on_device)

    def run(self, module: ModuleType) -> None:
        """On one backend."""
        module.merge(self)


def device_index(tensor: torch.Tensor) -> int:
    """The ordinal for the C ABI, -1 for none."""
    return -1 if tensor.device.index is None else tensor.device.index


def check_rows_dtype(name: str, tensor: torch.Tensor) -> None:
    """A dtype that the two phases compute."""
    if tensor.dtype not in CORE_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in CORE_DTYPES)
        raise ValueError(f"{name}: expected dtype {names}, got {tensor.dtype}")
    if tensor.shape[-1] < 1:
        raise ValueError(f"{name}: expected H >= 1, got shape {describe_shape(tensor)}")


def check_shape(name: str, tensor: torch.Tensor, *wanted: int) -> None:
    """Sizes one by one, which symbolic ones allow too."""
    if any(size != want for size, want in zip(tensor.shape, wanted, strict=True)):
        raise ValueError(f"{name}: expected shape {list(wanted)}, got {describe_shape(tensor)}")


def check_bank_dtype(name: str, dtype: Any, rows: torch.dtype) -> None:
    """The dtype of the rows that were mixed, or float32."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: expected a torch.dtype, got {describe_type(dtype)}")
    if dtype not in (rows, torch.float32):
        wanted = " or ".join(dict.fromkeys((str(rows), "torch.float32")))
        raise ValueError(f"{name}: expected {wanted}, got {dtype}")


def check_bank_tensors(
    blocks: torch.Tensor,
    norm_weights: torch.Tensor,
    qk_weights: torch.Tensor,
    bank: torch.Tensor | None,
    lse: torch.Tensor | None,
    bank_dtype: torch.dtype | None,
) -> torch.dtype:
    """Types, ranks, dtypes, devices and shapes; returns the dtype that the bank has or is to have."""
    check_tensor("blocks", blocks, "[T, R, H]")
    check_rows_dtype("blocks", blocks)
    dtype, device = blocks.dtype, blocks.device
    num_bank_tokens, _, hidden_size = blocks.shape
    check_tensor("norm_weights", norm_weights, "[S, H]", dtype, device, "blocks")
    num_sites = norm_weights.shape[0]
    check_shape("norm_weights", norm_weights, num_sites, hidden_size)
    check_tensor("qk_weights", qk_weights, "[S, H]", dtype, device, "blocks")
    check_shape("qk_weights", qk_weights, num_sites, hidden_size)
    if bank_dtype is not None:
        check_bank_dtype("bank_dtype", bank_dtype, dtype)
    if bank is not None:
        check_tensor("bank", bank, "[S, T, H]", None, device, "blocks")
        if bank_dtype not in (None, bank.dtype):
            raise ValueError(f"bank: expected dtype {bank_dtype} as bank_dtype asks, got {bank.dtype}")
        check_shape("bank", bank, num_sites, num_bank_tokens, hidden_size)
        check_bank_dtype("bank", bank.dtype, dtype)
        bank_dtype = bank.dtype
    if lse is not None:
        check_tensor("lse", lse, "[S, T]", None, device, "blocks")
        check_lse(lse)
        check_shape("lse", lse, num_sites, num_bank_tokens)
    return dtype if bank_dtype is None else bank_dtype


def check_lse(lse: torch.Tensor) -> None:
    """Always float32."""
    if lse.dtype is not torch.float32:
        raise ValueError(f"lse: expected dtype torch.float32, got {lse.dtype}")


def check_merge_tensors(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    bank: torch.Tensor,
    lse: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    blocks: torch.Tensor | None,
    block_write_idx: int,
    out: torch.Tensor | None,
) -> None:
    """Types, ranks, dtypes, devices and shapes."""
    check_tensor("prefix", prefix, "[M, H]")
    check_rows_dtype("prefix", prefix)
    dtype, device = prefix.dtype, prefix.device
    num_tokens, hidden_size = prefix.shape
    check_tensor("bank", bank, "[T, H]", None, device)
    check_bank_dtype("bank", bank.dtype, dtype)
    num_bank_tokens = bank.shape[0]
    check_shape("bank", bank, num_bank_tokens, hidden_size)
    if num_bank_tokens != num_tokens and (num_bank_tokens == 0 or num_tokens % num_bank_tokens != 0):
        raise ValueError(
            f"bank: expected shape [T, H] with T a divisor of the {num_tokens} tokens of prefix, "
            f"got {describe_shape(bank)}"
        )
    check_tensor("lse", lse, "[T]", None, device)
    check_lse(lse)
    check_shape("lse", lse, num_bank_tokens)
    for name, rows in (("delta", delta), ("out", out)):
        if rows is not None:
            check_tensor(name, rows, "[M, H]", dtype, device)
            check_shape(name, rows, num_tokens, hidden_size)
    for name, weight in (
        ("norm_weight", norm_weight),
        ("qk_weight", qk_weight),
        ("output_norm_weight", output_norm_weight),
    ):
        if weight is not None or name != "output_norm_weight":
            check_tensor(name, weight, "[H]", dtype, device)
            check_shape(name, weight, hidden_size)  # type: ignore[arg-type]
    if blocks is not None:
        check_tensor("blocks", blocks, "[T, R, H]", dtype, device)
        check_shape("blocks", blocks, num_bank_tokens, blocks.shape[1], hidden_size)
    elif isinstance(block_write_idx, int) and block_write_idx != -1:
        raise ValueError(f"block_write_idx: expected -1 without blocks, got {block_write_idx}")


def check_device(name: str, device: torch.device) -> None:
    """One that a backend runs on."""
    if device.type not in AUTO_ORDER:
        raise ValueError(f"{name}: expected a CPU or CUDA tensor, got one on {device}")


def bank(
    blocks: torch.Tensor,
    num_blocks: int,
    norm_weights: torch.Tensor,
    qk_weights: torch.Tensor,
    eps: float,
    bank: torch.Tensor | None,
    lse: torch.Tensor | None,
    bank_dtype: torch.dtype | None,
    backend: str | None,
    pdl: str,
    batch_invariant: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check and run one call on tensors that hold memory, past autograd and tracing."""
    call = checked_bank_call(
        blocks, num_blocks, norm_weights, qk_weights, eps, bank, lse, bank_dtype, pdl, batch_invariant
    )
    run(call, backend)
    return call.bank, call.lse


def checked_bank_call(
    blocks: torch.Tensor,
    num_blocks: int,
    norm_weights: torch.Tensor,
    qk_weights: torch.Tensor,
    eps: float,
    bank: torch.Tensor | None,
    lse: torch.Tensor | None,
    bank_dtype: torch.dtype | None,
    pdl: str,
    batch_invariant: bool | None,
) -> BankCall:
    """Everything that is wrong about a call whatever backend it runs on; makes what is not given."""
    dtype = check_bank_tensors(blocks, norm_weights, qk_weights, bank, lse, bank_dtype)
    num_blocks = checked_index("num_blocks", num_blocks)
    eps = checked_epsilon("eps", eps)
    check_pdl(pdl)
    batch_invariant = resolved_batch_invariant(batch_invariant)
    check_device("blocks", blocks.device)
    leading = (norm_weights.shape[0], blocks.shape[0])
    if bank is None:
        bank = torch.empty(*leading, blocks.shape[2], dtype=dtype, device=blocks.device)
    if lse is None:
        lse = torch.empty(*leading, dtype=torch.float32, device=blocks.device)
    call = BankCall(blocks, num_blocks, norm_weights, qk_weights, eps, bank, lse, pdl, batch_invariant)
    call.check_memory()
    return call


def merge(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    bank: torch.Tensor,
    lse: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    blocks: torch.Tensor | None,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    out: torch.Tensor | None,
    backend: str | None,
    pdl: str,
    batch_invariant: bool | None,
) -> torch.Tensor:
    """Check and run one call on tensors that hold memory, past autograd and tracing."""
    call = checked_merge_call(
        prefix,
        delta,
        bank,
        lse,
        norm_weight,
        qk_weight,
        output_norm_weight,
        blocks,
        block_write_idx,
        eps,
        output_norm_eps,
        out,
        pdl,
        batch_invariant,
    )
    run(call, backend)
    return call.out


def checked_merge_call(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    bank: torch.Tensor,
    lse: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    blocks: torch.Tensor | None,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    out: torch.Tensor | None,
    pdl: str,
    batch_invariant: bool | None,
) -> MergeCall:
    """Everything that is wrong about a call whatever backend it runs on; makes an ``out`` not given."""
    block_write_idx = checked_index("block_write_idx", block_write_idx)
    check_merge_tensors(
        prefix,
        delta,
        bank,
        lse,
        norm_weight,
        qk_weight,
        output_norm_weight,
        blocks,
        block_write_idx,
        out,
    )
    eps = checked_epsilon("eps", eps)
    output_norm_eps = checked_epsilon("output_norm_eps", output_norm_eps)
    check_pdl(pdl)
    batch_invariant = resolved_batch_invariant(batch_invariant)
    check_device("prefix", prefix.device)
    if out is None:
        out = torch.empty(tuple(prefix.shape), dtype=prefix.dtype, device=prefix.device)
    call = MergeCall(
        prefix,
        delta,
        bank,
        lse,
        norm_weight,
        qk_weight,
        output_norm_weight,
        None if block_write_idx == -1 else blocks,
        block_write_idx,
        eps,
        output_norm_eps,
        out,
        pdl,
        batch_invariant,
    )
    call.check_memory()
    return call


def unsupported(name: str, call: BankCall | MergeCall) -> str | None:
    """Why a backend cannot serve a call, as far as its module can tell before trying, or None."""
    if call.batch_invariant and name in BATCH_VARIANT:
        return BATCH_VARIANT[name]
    module: Any = load(name)
    reason: str | None = module.unsupported_phase(call)
    return reason


def run(call: BankCall | MergeCall, backend: str | None) -> None:
    """Run a checked call on the backend it is due, as ``attn_res`` is."""
    forced, source = requested_backend(backend, None)

    def forward(name: str) -> None:
        module: Any = load(name)
        call.run(module)

    order = AUTO_ORDER[call.rows.device.type]
    run_first(order, forced, source, lambda name: unsupported(name, call), forward)


def explain(call: BankCall | MergeCall, backend: str | None) -> Explanation:
    """The choice that :func:`run` would make, and why not the others. Runs nothing."""
    forced, source = requested_backend(backend, None)

    def refusal(name: str) -> str | None:
        reason = unsupported(name, call)
        # Without tokens nothing is launched, so there is no kernel that could refuse.
        if reason is not None or name != "native" or call.rows.numel() == 0:
            return reason
        module: Any = load(name)
        found: str | None = module.refusal_of_phase(call)
        return found

    chosen, reasons = explain_first(call.rows.device.type, forced, source, refusal)
    return Explanation(chosen, source, reasons, None)


def check_bank_without_memory(
    blocks: torch.Tensor,
    num_blocks: int,
    norm_weights: torch.Tensor,
    qk_weights: torch.Tensor,
    eps: float,
    bank: torch.Tensor | None,
    lse: torch.Tensor | None,
    bank_dtype: torch.dtype | None,
    pdl: str,
    batch_invariant: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`bank` refuses, for fake tensors: all but overlap of one argument with another.

    Returns ``bank`` and ``lse``, those given or fake ones.
    """
    dtype = check_bank_tensors(blocks, norm_weights, qk_weights, bank, lse, bank_dtype)
    leading = (norm_weights.shape[0], blocks.shape[0])
    if bank is None:
        bank = blocks.new_empty((*leading, blocks.shape[2]), dtype=dtype)
    if lse is None:
        lse = blocks.new_empty(leading, dtype=torch.float32)
    numbers = [known(checked_index("num_blocks", num_blocks)), known(checked_epsilon("eps", eps))]
    check_pdl(pdl)
    batch_invariant = resolved_batch_invariant(batch_invariant)
    layouts = layouts_of(blocks, norm_weights, qk_weights, bank, lse)
    if layouts is not None and None not in numbers:
        rows: Any = layouts[0]
        rest: Any = layouts[1:]
        call: Any = BankCall
        call(rows, numbers[0], *rest[:2], numbers[1], *rest[2:], pdl, batch_invariant).check_memory()
    return bank, lse


def check_merge_without_memory(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    bank: torch.Tensor,
    lse: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    blocks: torch.Tensor | None,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    out: torch.Tensor | None,
    pdl: str,
    batch_invariant: bool | None,
) -> torch.Tensor:
    """What :func:`merge` refuses, for fake tensors; returns ``out``, the one given or a fake one."""
    block_write_idx = checked_index("block_write_idx", block_write_idx)
    tensors = (prefix, delta, bank, lse, norm_weight, qk_weight, output_norm_weight, blocks)
    check_merge_tensors(*tensors, block_write_idx, out)
    if out is None:
        out = prefix.new_empty(prefix.shape)
    numbers = [
        known(block_write_idx),
        known(checked_epsilon("eps", eps)),
        known(checked_epsilon("output_norm_eps", output_norm_eps)),
    ]
    check_pdl(pdl)
    batch_invariant = resolved_batch_invariant(batch_invariant)
    layouts = layouts_of(*tensors[:7], None if numbers[0] == -1 else blocks, out)
    if layouts is not None and None not in numbers:
        call: Any = MergeCall
        call(*layouts[:8], *numbers, layouts[8], pdl, batch_invariant).check_memory()
    return out


def layouts_of(*tensors: torch.Tensor | None) -> list[Layout | None] | None:
    """Stands for tensors without memory, apart from each other; None where a size has no example."""
    layouts: list[Layout | None] = []
    for position, tensor in enumerate(tensors, start=1):
        if tensor is None:
            layouts.append(None)
            continue
        shape, strides = tuple(map(known, tensor.shape)), tuple(map(known, tensor.stride()))
        if None in (*shape, *strides):
            return None
        # Sixteen of these stay below the 63 bits of an address.
        layouts.append(Layout(shape, strides, tensor.dtype, tensor.device, position << 58))  # type: ignore[arg-type]
    return layouts
