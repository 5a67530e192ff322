# SPDX-License-Identifier: Apache-2.0
"""Builds calls of the operator in hostile memory and checks everything a backend may touch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from libattnres import reference

Forward = Callable[..., None]


@dataclass(frozen=True)
class Call:
    """One variant; ``padding`` elements of NaN lie between the rows of every row array."""

    num_tokens: int = 3
    hidden_size: int = 64
    num_blocks: int = 4
    num_bank_rows: int = 8
    prefixes_per_row: int = 1
    has_delta: bool = True
    has_output_norm: bool = True
    block_write_idx: int = -1
    padding: int = 0
    dtype: torch.dtype = torch.bfloat16
    eps: float = 1e-5
    output_norm_eps: float = 1e-5
    device: str = "cpu"
    pdl: str = "wait"
    seed: int = 0


@dataclass
class Arguments:
    """Tensors of one call; each lies in a wider allocation filled with NaN."""

    call: Call
    prefix: torch.Tensor
    delta: torch.Tensor | None
    blocks: torch.Tensor
    norm_weight: torch.Tensor
    qk_weight: torch.Tensor
    output_norm_weight: torch.Tensor | None
    out: torch.Tensor
    allocations: dict[str, torch.Tensor]

    def run(self, forward: Forward) -> None:
        forward(
            self.prefix,
            self.delta,
            self.blocks,
            self.norm_weight,
            self.qk_weight,
            self.output_norm_weight,
            self.call.num_blocks,
            self.call.block_write_idx,
            self.call.eps,
            self.call.output_norm_eps,
            self.out,
            self.call.pdl,
        )

    def reference(self) -> reference.Result:
        return reference.attn_res(
            self.prefix,
            self.delta,
            self.blocks,
            self.norm_weight,
            self.qk_weight,
            self.output_norm_weight,
            self.call.num_blocks,
            self.call.block_write_idx,
            self.call.eps,
            self.call.output_norm_eps,
        )


def make(call: Call) -> Arguments:
    """Random arguments; bank rows that are not read, the output and all padding are NaN."""
    generator = torch.Generator(device=call.device).manual_seed(call.seed)
    allocations: dict[str, torch.Tensor] = {}

    def rows(name: str, *leading: int) -> torch.Tensor:
        allocation = torch.full(
            (*leading, call.hidden_size + call.padding),
            math.nan,
            dtype=call.dtype,
            device=call.device,
        )
        allocations[name] = allocation
        return allocation[..., : call.hidden_size]

    def fill(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        tensor.normal_(generator=generator).mul_(scale)
        return tensor

    def weight(scale: float) -> torch.Tensor:
        return fill(torch.empty(call.hidden_size, dtype=call.dtype, device=call.device), scale)

    num_bank_tokens = call.num_tokens // call.prefixes_per_row
    prefix = fill(rows("prefix", call.num_tokens), 1.5)
    delta = fill(rows("delta", call.num_tokens), 0.7) if call.has_delta else None
    blocks = rows("blocks", num_bank_tokens, call.num_bank_rows)
    for index in range(call.num_blocks):
        fill(blocks[:, index], 0.5 + 0.3 * index)
    norm_weight = weight(0.3).add_(1.0)
    # Scores of a few units: a softmax that neither is uniform nor picks one row.
    qk_weight = weight(2.0 / math.sqrt(call.hidden_size))
    output_norm_weight = weight(0.2).add_(1.0) if call.has_output_norm else None
    out = rows("out", call.num_tokens)
    return Arguments(
        call,
        prefix,
        delta,
        blocks,
        norm_weight,
        qk_weight,
        output_norm_weight,
        out,
        allocations,
    )


def check(call: Call, forward: Forward) -> Arguments:
    """Run ``forward`` once and hold all memory against the reference; returns the arguments after."""
    arguments = make(call)
    expected = arguments.reference()
    wanted = {name: tensor.clone() for name, tensor in arguments.allocations.items()}
    weights = [
        tensor
        for tensor in (arguments.norm_weight, arguments.qk_weight, arguments.output_norm_weight)
        if tensor is not None
    ]
    weights_before = [tensor.clone() for tensor in weights]

    arguments.run(forward)

    hidden_size = call.hidden_size
    wanted["prefix"][..., :hidden_size] = expected.prefix
    wanted["blocks"][..., :hidden_size] = expected.blocks
    # What the output must be is judged below; everything around it must not have changed.
    wanted["out"][..., :hidden_size] = arguments.out
    for name, allocation in arguments.allocations.items():
        assert reference.same_bits(allocation, wanted[name]), f"{name} differs for {call}"
    for tensor, before in zip(weights, weights_before, strict=True):
        assert reference.same_bits(tensor, before), f"a weight changed for {call}"
    verdict = reference.compare(arguments.out, expected.output)
    assert verdict.ok, f"{verdict} for {call}"
    return arguments
