# SPDX-License-Identifier: Apache-2.0
"""The C++ backend for CPU tensors: multi-threaded, vectorised, in libattnres itself."""

from __future__ import annotations

import torch

from libattnres import _core
from libattnres._call import CORE_DTYPES, Call
from libattnres._two_phase_call import BankCall, MergeCall

__all__ = ["bank", "forward", "merge", "unsupported", "unsupported_phase"]


def unsupported(prefix: torch.Tensor, blocks: torch.Tensor, num_blocks: int) -> str | None:
    """Why this backend cannot serve such a call, or None."""
    if prefix.device.type != "cpu":
        return f"host needs CPU tensors, prefix is on {prefix.device}"
    if prefix.dtype not in CORE_DTYPES:
        return f"host computes bfloat16, float16 and float32, prefix is {prefix.dtype}"
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
) -> None:
    """Run the operator on the CPU; ``pdl`` has no meaning here."""
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
    )
    _core.forward_host(*call.core_args())


def unsupported_phase(call: BankCall | MergeCall) -> str | None:
    """Why this backend cannot serve one of two phases, or None."""
    if call.rows.device.type != "cpu":
        return f"host needs CPU tensors, {call.ARGUMENTS[0]} is on {call.rows.device}"
    return None


def bank(call: BankCall) -> None:
    """The bank's share of several calls, on the CPU."""
    _core.bank_host(*call.core_args())


def merge(call: MergeCall) -> None:
    """One call from what :func:`bank` left, on the CPU."""
    _core.merge_host(*call.core_args())
