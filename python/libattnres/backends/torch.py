# SPDX-License-Identifier: Apache-2.0
"""Eager PyTorch backend: any float dtype, any device, no compiler."""

from __future__ import annotations

import torch

__all__ = ["forward", "unsupported"]


def unsupported(prefix: torch.Tensor, blocks: torch.Tensor, num_blocks: int) -> str | None:
    """Why this backend cannot serve a call, or None."""
    del blocks, num_blocks
    if not prefix.is_floating_point():
        return f"prefix: expected a floating-point dtype, got {prefix.dtype}"
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
    """Run the operator on validated arguments; writes ``out``, ``prefix`` with a delta, and a bank row.

    Sums and everything after them are float32, or float64 for float64 arguments. Each PyTorch kernel
    waits for the one before it, which is stricter than any ``pdl`` mode.
    """
    del pdl
    num_tokens, hidden_size = prefix.shape
    if num_tokens == 0:
        return
    num_bank_tokens = blocks.shape[0]
    accumulate = torch.float64 if prefix.dtype == torch.float64 else torch.float32
    if delta is not None:
        prefix.copy_(prefix.to(accumulate) + delta.to(accumulate))
    # Prefixes that share a bank entry lie next to each other: [T, B, H].
    own = prefix.to(accumulate).reshape(num_bank_tokens, -1, hidden_size)

    if num_blocks == 0:
        mixed = own
    else:
        query = norm_weight.to(accumulate) * qk_weight.to(accumulate)

        def score(values: torch.Tensor) -> torch.Tensor:
            mean_square = values.square().mean(dim=-1)
            return (values * query).sum(dim=-1) * torch.rsqrt(mean_square + eps)

        # Bank rows are widened one at a time: the bank may be most of the device's memory.
        scores = [
            score(blocks[:, index].to(accumulate)).unsqueeze(1).expand(own.shape[:2])
            for index in range(num_blocks)
        ]
        weights = torch.stack([*scores, score(own)], dim=-1).softmax(dim=-1)
        mixed = weights[:, :, num_blocks, None] * own
        for index in range(num_blocks):
            row = blocks[:, index].to(accumulate).unsqueeze(1)
            mixed = torch.addcmul(mixed, weights[:, :, index, None], row)
    if output_norm_weight is not None:
        mean_square = mixed.square().mean(dim=-1, keepdim=True)
        mixed = mixed * torch.rsqrt(mean_square + output_norm_eps)
        mixed = mixed * output_norm_weight.to(accumulate)
    out.copy_(mixed.reshape(num_tokens, hidden_size))
    if block_write_idx >= 0:
        blocks[:, block_write_idx].copy_(prefix)
