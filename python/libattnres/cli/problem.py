# SPDX-License-Identifier: Apache-2.0
"""Problems for ``verify`` and ``demo``: arguments in guarded memory, run and judged to the last byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

import libattnres
from libattnres import reference

__all__ = [
    "LAYOUTS",
    "NUM_BANK_ROWS",
    "Arguments",
    "Layout",
    "Problem",
    "Values",
    "Variant",
    "Verdict",
    "random_values",
    "variants",
]

Layout = Literal["dense", "padded", "interleaved"]
LAYOUTS: tuple[Layout, ...] = ("dense", "padded", "interleaved")
GUARD_ELEMENTS = 64  # before and after every buffer; keeps 16-byte alignment for every dtype
NUM_BANK_ROWS: dict[Layout, int] = {"dense": 8, "padded": 9, "interleaved": 8}

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# NaNs with a payload that no arithmetic produces.
_POISON = {1: 0x7F, 2: 0x7FA5, 4: 0x7FA57FA5, 8: 0x7FF57FA57FA57FA5}


@dataclass(frozen=True)
class Variant:
    """What a call does, apart from its sizes and memory."""

    num_blocks: int
    has_delta: bool
    has_output_norm: bool
    block_write_idx: int = -1


def variants(num_blocks: tuple[int, ...], num_bank_rows: int, prefixes_per_row: int) -> Iterator[Variant]:
    """Every variant of the contract: delta, output norm, and writes past, inside and beside the rows read."""
    for blocks in num_blocks:
        writes = {-1}
        if prefixes_per_row == 1:
            # The model's next row, and a row that is also read: the snapshot must be what is read.
            writes |= {min(blocks, num_bank_rows - 1), blocks // 2}
        for has_delta in (True, False):
            for has_output_norm in (True, False):
                for write in sorted(writes):
                    yield Variant(blocks, has_delta, has_output_norm, write)


class GuardedBuffer:
    """A strided tensor within an allocation of NaNs, of which no other byte may change."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        empty = 0 in shape
        extent = (
            0 if empty else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        )
        element_size = torch.empty(0, dtype=dtype).element_size()
        self._bits = torch.empty(extent + 2 * GUARD_ELEMENTS, dtype=_INTEGERS[element_size], device=device)
        self._poison = _POISON[element_size]
        self.tensor = torch.as_strided(self._bits.view(dtype), shape, strides, GUARD_ELEMENTS)
        self.poison()

    def poison(self) -> None:
        """Fill tensor, padding and guards with NaN."""
        self._bits.fill_(self._poison)

    def is_poison(self) -> bool:
        """Whether every byte is as :meth:`poison` left it."""
        return bool((self._bits == self._poison).all())

    def save(self) -> torch.Tensor:
        """A copy of every byte."""
        return self._bits.clone()

    def restore(self, saved: torch.Tensor) -> None:
        """Bring back every byte."""
        self._bits.copy_(saved)

    def equals(self, saved: torch.Tensor) -> bool:
        """Whether every byte, guards and padding included, is as it was."""
        return torch.equal(self._bits, saved)


class Arguments:
    """The tensors of one call in one layout, ready to be loaded with values again and again."""

    def __init__(
        self,
        layout: Layout,
        num_tokens: int,
        prefixes_per_row: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        M, H, R = num_tokens, hidden_size, NUM_BANK_ROWS[layout]
        T = num_tokens // prefixes_per_row
        pad = 0 if layout == "dense" else 8
        self.layout = layout
        self.num_bank_rows = R
        self.prefixes_per_row = prefixes_per_row

        def rows(extra: int) -> GuardedBuffer:
            return GuardedBuffer((M, H), (H + extra * pad, 1), dtype, device)

        self.delta_buffer = rows(1)
        self.out_buffer = rows(3)
        self.delta = self.delta_buffer.tensor
        self.out = self.out_buffer.tensor
        if layout == "interleaved":
            # Prefix and bank rows of a token side by side in one allocation.
            shared = GuardedBuffer((M, R + 1, H), ((R + 1) * H, H, 1), dtype, device)
            self.written = [shared]
            self.prefix, self.blocks = shared.tensor[:, R], shared.tensor[:, :R]
        else:
            prefix = rows(2)
            blocks = GuardedBuffer((T, R, H), (R * (H + pad) + 4 * pad, H + pad, 1), dtype, device)
            self.written = [prefix, blocks]
            self.prefix, self.blocks = prefix.tensor, blocks.tensor


@dataclass(frozen=True)
class Values:
    """Dense random values of the tensors, from which every layout is loaded."""

    prefix: torch.Tensor
    delta: torch.Tensor
    blocks: torch.Tensor
    norm_weight: torch.Tensor
    qk_weight: torch.Tensor
    output_norm_weight: torch.Tensor


def random_values(
    num_tokens: int,
    prefixes_per_row: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Values:
    """Values of the model's scale: scores spread over a few units, so that every source matters."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device=device)
        return (values * scale + shift).to(dtype)

    H = hidden_size
    return Values(
        normal(num_tokens, H),
        normal(num_tokens, H),
        normal(num_tokens // prefixes_per_row, max(NUM_BANK_ROWS.values()), H),
        normal(H, scale=0.1, shift=1.0),
        normal(H, scale=1.5 * H**-0.5),
        normal(H, scale=0.1, shift=1.0),
    )


@dataclass(frozen=True)
class Verdict:
    """Judgement of one call."""

    rel_l2: float
    worst_element: float
    """Largest error as a fraction of its bound."""
    errors: tuple[str, ...]
    """What was wrong; empty when nothing was."""


class Problem:
    """One variant on loaded arguments, with what the call must leave behind."""

    def __init__(
        self, arguments: Arguments, values: Values, variant: Variant, expected: reference.Result
    ) -> None:
        self.arguments = arguments
        self.values = values
        self.variant = variant
        self.expected_output = expected.output
        read = variant.num_blocks
        for buffer in arguments.written:
            buffer.poison()
        arguments.delta_buffer.poison()
        arguments.prefix.copy_(values.prefix)
        arguments.delta.copy_(values.delta)
        arguments.blocks[:, :read].copy_(values.blocks[:, :read])  # the rest stays NaN
        self._before = [buffer.save() for buffer in arguments.written]
        self._delta = arguments.delta_buffer.save()
        if variant.has_delta:
            arguments.prefix.copy_(expected.prefix)
        if variant.block_write_idx >= 0:
            arguments.blocks[:, variant.block_write_idx].copy_(expected.prefix)
        self._after = [buffer.save() for buffer in arguments.written]
        self._weights = [
            weight.clone() for weight in (values.norm_weight, values.qk_weight, values.output_norm_weight)
        ]

    def run(self, backend: str, pdl: str = "wait", plan: libattnres.Plan | None = None) -> None:
        """Run the call once, from the initial state and into poisoned memory."""
        arguments, values, variant = self.arguments, self.values, self.variant
        for buffer, saved in zip(arguments.written, self._before, strict=True):
            buffer.restore(saved)
        arguments.out_buffer.poison()
        if arguments.prefix.is_cuda:
            # The copies above may still run, which `early` may not meet.
            torch.cuda.synchronize(arguments.prefix.device)
        libattnres.attn_res(
            arguments.prefix,
            arguments.delta if variant.has_delta else None,
            arguments.blocks,
            values.norm_weight,
            values.qk_weight,
            values.output_norm_weight if variant.has_output_norm else None,
            variant.num_blocks,
            variant.block_write_idx,
            out=arguments.out,
            backend=backend,
            pdl=pdl,
            plan=plan,
        )

    def judge(self) -> tuple[Verdict, torch.Tensor]:
        """Judge what the last run left behind; also the output, for comparison with the next run."""
        arguments, values = self.arguments, self.values
        errors = []
        output = arguments.out.clone(memory_format=torch.contiguous_format)
        comparison = reference.compare(output, self.expected_output)
        if not comparison.ok:
            errors.append(
                f"output is off: relative L2 {comparison.rel_l2:.3g}, worst element "
                f"{comparison.worst_element:.3g} of its bound"
            )
        arguments.out.view(_INTEGERS[arguments.out.element_size()]).fill_(
            _POISON[arguments.out.element_size()]
        )
        if not arguments.out_buffer.is_poison():
            errors.append("bytes beside the output were written")
        for buffer, saved in zip(arguments.written, self._after, strict=True):
            if not buffer.equals(saved):
                errors.append("prefix, bank or the bytes beside them are not what they must be")
        if not arguments.delta_buffer.equals(self._delta):
            errors.append("delta was written")
        weights = (values.norm_weight, values.qk_weight, values.output_norm_weight)
        if not all(map(torch.equal, weights, self._weights)):
            errors.append("a weight was written")
        return Verdict(comparison.rel_l2, comparison.worst_element, tuple(errors)), output
