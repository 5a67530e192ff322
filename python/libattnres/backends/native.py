# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels compiled into libattnres."""

from __future__ import annotations

from functools import cache

import torch

from libattnres import _core
from libattnres._call import Call, Plan
from libattnres._records import PlanInfo
from libattnres._two_phase_call import BankCall, MergeCall

__all__ = [
    "bank",
    "device_reason",
    "forward",
    "hidden_sizes",
    "merge",
    "plan",
    "refusal_of_phase",
    "unsupported",
    "unsupported_phase",
]

_ALIGNMENT = 16  # bytes, of bulk copies


_device_reasons: dict[int, str | None] = {}


def device_reason(device: int) -> str | None:
    """Why no kernel runs on a CUDA device, or None; asked of the CUDA runtime once per device.

    Only what may pass, such as want of memory for a kernel that is there, is asked again each time.
    """
    try:
        return _device_reasons[device]
    except KeyError:
        info = _core.probe(device)
    reason = None if info["native"] else info["reason"]
    if info["native"] or not info["target"]:
        _device_reasons[device] = reason
    return reason


@cache
def _instances() -> frozenset[tuple[int, int, int]]:
    """The compiled (H, N, B)."""
    return frozenset(
        (entry["hidden_size"], entry["num_sources"], entry["prefixes_per_row"])
        for entry in _core.permutations()
    )


def hidden_sizes() -> frozenset[int]:
    """The compiled H."""
    return frozenset(hidden_size for hidden_size, _, _ in _instances())


def unsupported(prefix: torch.Tensor, blocks: torch.Tensor, num_blocks: int) -> str | None:
    """Why this backend cannot serve such a call here, or None.

    What depends on the remaining arguments is left to :func:`forward` and :func:`plan`, which raise
    ``UnsupportedError`` before anything is written.
    """
    if prefix.device.type != "cuda":
        return f"native needs CUDA tensors, prefix is on {prefix.device}"
    if prefix.dtype is not torch.bfloat16:
        return f"native computes bfloat16, prefix is {prefix.dtype}"
    reason = device_reason(prefix.device.index)
    if reason is not None:
        return reason
    num_tokens, hidden_size = prefix.shape
    num_bank_tokens = blocks.shape[0]
    prefixes_per_row = num_tokens // num_bank_tokens if num_bank_tokens > 0 and num_tokens > 0 else 1
    instances = _instances()
    if (hidden_size, num_blocks + 1, prefixes_per_row) not in instances:
        sizes = sorted(hidden_sizes())
        shared = sorted({entry[2] for entry in instances})
        return (
            f"native is compiled for H in {sizes}, num_blocks in 0..8 and B in {shared}, "
            f"got H={hidden_size}, num_blocks={num_blocks}, B={prefixes_per_row}"
        )
    for name, tensor in (("prefix", prefix), ("blocks", blocks)):
        if name == "blocks" and tensor.numel() == 0:
            continue
        if tensor.data_ptr() % _ALIGNMENT != 0:
            return f"native needs {name} at a multiple of {_ALIGNMENT} bytes"
        for dimension in range(tensor.dim() - 1):
            stride = tensor.stride(dimension) * tensor.element_size()
            if tensor.shape[dimension] > 1 and stride % _ALIGNMENT != 0:
                return (
                    f"native needs strides of {name} that are multiples of {_ALIGNMENT} bytes, got {stride}"
                )
    return None


def forward(
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
    plan: Plan | None = None,
    batch_invariant: bool = False,
) -> None:
    """Launch on the current stream of the tensors' device; asynchronous."""
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
    _core.forward(*call.core_args(plan), current_stream(prefix.device))


def plan(call: Call, overrides: Plan | None = None) -> PlanInfo:
    """What :func:`forward` would launch; raises ``UnsupportedError`` when it would."""
    return _core.plan(*call.core_args(overrides))


def current_stream(device: torch.device) -> int:
    """Handle of PyTorch's current stream."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def unsupported_phase(call: BankCall | MergeCall) -> str | None:
    """Why this backend cannot serve one of two phases, or None.

    What the kernels are compiled for, and which alignment they need, is left to the library, which refuses
    before anything is written.
    """
    rows, name = call.rows, call.ARGUMENTS[0]
    if rows.device.type != "cuda":
        return f"native needs CUDA tensors, {name} is on {rows.device}"
    if rows.dtype is not torch.bfloat16:
        return f"native computes bfloat16, {name} is {rows.dtype}"
    return device_reason(rows.device.index)


def refusal_of_phase(call: BankCall | MergeCall) -> str | None:
    """Why a launch of a call that :func:`unsupported_phase` has nothing against would be refused, or None."""
    try:
        call.judge(on_device=True)
    except _core.UnsupportedError as error:
        return str(error)
    hidden_size = call.rows.shape[-1]
    if hidden_size not in hidden_sizes():
        return f"native is compiled for H in {sorted(hidden_sizes())}, got H={hidden_size}"
    shared = {prefixes_per_row for _, _, prefixes_per_row in _instances()}
    prefixes_per_row = 1 if isinstance(call, BankCall) else call.prefix.shape[0] // call.bank.shape[0]
    if prefixes_per_row not in shared:
        return f"native is compiled for B in {sorted(shared)}, got B={prefixes_per_row}"
    return None


def bank(call: BankCall) -> None:
    """Launch the bank's share of several calls on the current stream of the tensors' device."""
    _core.bank(*call.core_args(), current_stream(call.blocks.device))


def merge(call: MergeCall) -> None:
    """Launch one call from what :func:`bank` left on the current stream of the tensors' device."""
    _core.merge(*call.core_args(), current_stream(call.prefix.device))
