# SPDX-License-Identifier: Apache-2.0
"""Eager PyTorch backend: any float dtype, any device, no compiler."""

from __future__ import annotations

import torch

from libattnres._two_phase_call import BankCall, MergeCall

__all__ = ["bank", "forward", "merge", "unsupported", "unsupported_phase"]


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
        # Bank rows are widened one at a time: the bank may be most of the device's memory.
        scores = [
            score(blocks[:, index].to(accumulate), query, eps).unsqueeze(1).expand(own.shape[:2])
            for index in range(num_blocks)
        ]
        weights = torch.stack([*scores, score(own, query, eps)], dim=-1).softmax(dim=-1)
        mixed = weights[:, :, num_blocks, None] * own
        for index in range(num_blocks):
            row = blocks[:, index].to(accumulate).unsqueeze(1)
            mixed = torch.addcmul(mixed, weights[:, :, index, None], row)
    mixed = output_norm(mixed, output_norm_weight, output_norm_eps)
    out.copy_(mixed.reshape(num_tokens, hidden_size))
    if block_write_idx >= 0:
        blocks[:, block_write_idx].copy_(prefix)


def score(values: torch.Tensor, query: torch.Tensor, eps: float) -> torch.Tensor:
    """Of rows ``[..., H]``. Sums of products rather than a matrix product, which may be TF32's."""
    mean_square = values.square().mean(dim=-1)
    return (values * query).sum(dim=-1) * torch.rsqrt(mean_square + eps)


def output_norm(mixed: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Of rows ``[..., H]``, where there is a weight."""
    if weight is None:
        return mixed
    mean_square = mixed.square().mean(dim=-1, keepdim=True)
    return mixed * torch.rsqrt(mean_square + eps) * weight.to(mixed.dtype)


def unsupported_phase(call: BankCall | MergeCall) -> str | None:
    """Why this backend cannot serve one of two phases: it always can."""
    del call
    return None


def bank(call: BankCall) -> None:
    """The bank's share of several calls, one call site at a time."""
    queries = call.norm_weights.float() * call.qk_weights.float()
    for site, query in enumerate(queries):
        scores = torch.stack(
            [score(call.blocks[:, index].float(), query, call.eps) for index in range(call.num_blocks)],
            dim=-1,
        )
        weights = scores.softmax(dim=-1)
        mixed = weights[:, :1] * call.blocks[:, 0].float()
        for index in range(1, call.num_blocks):
            mixed = torch.addcmul(mixed, weights[:, index, None], call.blocks[:, index].float())
        call.bank[site].copy_(mixed)
        call.lse[site].copy_(scores.logsumexp(dim=-1))


def merge(call: MergeCall) -> None:
    """One call from what :func:`bank` left."""
    prefix = call.prefix
    num_tokens, hidden_size = prefix.shape
    if num_tokens == 0:
        return
    num_bank_tokens = call.bank.shape[0]
    if call.delta is not None:
        prefix.copy_(prefix.float() + call.delta.float())
    own = prefix.float().reshape(num_bank_tokens, -1, hidden_size)
    own_score = score(own, call.norm_weight.float() * call.qk_weight.float(), call.eps)
    lse = call.lse.unsqueeze(1).expand(own.shape[:2])
    weights = torch.stack([lse, own_score], dim=-1).softmax(dim=-1)
    mixed = torch.addcmul(weights[..., :1] * call.bank.float().unsqueeze(1), weights[..., 1:], own)
    mixed = output_norm(mixed, call.output_norm_weight, call.output_norm_eps)
    call.out.copy_(mixed.reshape(num_tokens, hidden_size))
    if call.blocks is not None:
        call.blocks[:, call.block_write_idx].copy_(prefix)
