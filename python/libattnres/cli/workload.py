# SPDX-License-Identifier: Apache-2.0
"""What ``bench`` runs: shapes, variants of a call, the memory for them, and whether a result is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from libattnres import _core, reference
from libattnres.model_walk import EPS, HIDDEN_SIZE, NUM_BANK_ROWS

__all__ = [
    "COMMON",
    "CPU_CACHE_BYTES",
    "SM_SIDE",
    "VARIANTS",
    "Buffers",
    "Judge",
    "Shape",
    "Variant",
    "chosen_device",
    "refuse_debug_build",
]

ELEMENT_SIZE = 2  # bfloat16
PADDING = 64  # elements between rows: 128 bytes, so that rows still begin a cache line
CPU_CACHE_BYTES = 32 << 20  # a CPU does not say; of GPUs PyTorch knows it
LEAST_PADDING = 8  # 16 bytes, the least that the native kernels take


@dataclass(frozen=True)
class Variant:
    """What a call does, and how its memory lies, apart from its sizes."""

    name: str
    has_delta: bool = True
    has_output_norm: bool = True
    writes: bool = False
    padding: int = 0
    prefixes_per_row: int = 1
    shares_bank_entry: bool = False
    """All tokens read one bank entry (token stride 0), which stays in L2."""


COMMON = Variant("common")
VARIANTS = (
    Variant("no delta", has_delta=False),
    Variant("no norm", has_output_norm=False),
    Variant("write-back", writes=True),
    Variant("padded", padding=PADDING),
    Variant("padded by 16 bytes", padding=LEAST_PADDING),
    Variant("B = 2", prefixes_per_row=2),
)
SM_SIDE = Variant("SM side", shares_bank_entry=True)


@dataclass(frozen=True)
class Shape:
    """One call to measure."""

    num_tokens: int
    """``M``: prefixes."""
    num_blocks: int
    variant: Variant = COMMON
    hidden_size: int = HIDDEN_SIZE

    @property
    def num_bank_tokens(self) -> int:
        """``T``."""
        return self.num_tokens // self.variant.prefixes_per_row

    @property
    def num_bank_rows(self) -> int:
        """``R``: the model's bank, with a row to spare where the row after eight is written."""
        return max(NUM_BANK_ROWS, self.num_blocks + self.variant.writes)

    @property
    def block_write_idx(self) -> int:
        """The row after those that are read, as in the model; -1 for none."""
        return self.num_blocks if self.variant.writes else -1

    @property
    def num_bytes(self) -> int:
        """Bytes that the call must move, weights left out."""
        entries = 1 if self.variant.shares_bank_entry else self.num_bank_tokens
        rows = self.num_tokens * (2 + 2 * self.variant.has_delta)
        rows += entries * self.num_blocks + self.num_bank_tokens * self.variant.writes
        return rows * self.hidden_size * ELEMENT_SIZE

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens": self.num_tokens,
            "num_blocks": self.num_blocks,
            "variant": self.variant.name,
            "bytes": self.num_bytes,
        }


class Buffers:
    """``count`` sets of arguments of a shape. All share the three weights, which therefore stay in L2."""

    def __init__(self, shape: Shape, count: int, device: torch.device, seed: int = 0) -> None:
        self.shape = shape
        self.count = count
        generator = torch.Generator(device).manual_seed(seed)
        H, pad = shape.hidden_size, shape.variant.padding
        M, R = shape.num_tokens, shape.num_bank_rows
        T = 1 if shape.variant.shares_bank_entry else shape.num_bank_tokens

        def normal(*sizes: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
            values = torch.empty(*sizes, dtype=torch.bfloat16, device=device)
            return values.normal_(shift, scale, generator=generator)

        def rows(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            return normal(*sizes, H + pad, scale=scale)[..., :H]

        self.prefix = rows(count, M)
        self.delta = rows(count, M, scale=0.5) if shape.variant.has_delta else None
        # Rows that are not read are allocated, as in the model, but hold whatever was there.
        self.blocks = torch.empty(count, T, R, H + pad, dtype=torch.bfloat16, device=device)[..., :H]
        self.blocks[:, :, : shape.num_blocks].normal_(0.0, 1.0, generator=generator)
        self.out = torch.empty(count, M, H + pad, dtype=torch.bfloat16, device=device)[..., :H]
        self.norm_weight = normal(H, scale=0.1, shift=1.0)
        self.qk_weight = normal(H, scale=1.5 * H**-0.5)
        self.output_norm_weight = normal(H, scale=0.1, shift=1.0) if shape.variant.has_output_norm else None

    def arguments(self, index: int) -> tuple[Any, ...]:
        """Positional arguments of ``attn_res`` for one set."""
        blocks = self.blocks[index]
        if self.shape.variant.shares_bank_entry:
            blocks = blocks.expand(self.shape.num_bank_tokens, -1, -1)
        return (
            self.prefix[index],
            None if self.delta is None else self.delta[index],
            blocks,
            self.norm_weight,
            self.qk_weight,
            self.output_norm_weight,
            self.shape.num_blocks,
            self.shape.block_write_idx,
            EPS,
            EPS,
        )


class Judge:
    """What one set of arguments must become, by the float64 reference, for any number of runs on it."""

    def __init__(self, arguments: tuple[Any, ...], tolerance: reference.Tolerance | None = None) -> None:
        self._arguments = arguments
        self._tolerance = tolerance
        self._prefix = arguments[0].clone()
        self._expected = reference.attn_res(*arguments)

    def restore(self) -> None:
        """Put the prefix back; a bank row that was written before is written again."""
        self._arguments[0].copy_(self._prefix)

    def check(
        self, run: Callable[[], object], result: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> tuple[float, list[str]]:
        """Run once, after :meth:`restore`, and judge the output, prefix and bank of ``result``.

        Returns
        -------
        rel_l2 : float
            Error of the output.
        errors : list of str
            What was wrong; empty when nothing was.
        """
        run()
        output, prefix, blocks = result()
        comparison = reference.compare(output, self._expected.output, tolerance=self._tolerance)
        errors = []
        if not comparison.ok:
            errors.append(
                f"output is off: relative L2 {comparison.rel_l2:.3g}, worst element "
                f"{comparison.worst_element:.3g} of its bound"
            )
        if not reference.same_bits(prefix, self._expected.prefix):
            errors.append("the prefix is not what it must be")
        if not reference.same_bits(blocks, self._expected.blocks):
            errors.append("the bank is not what it must be")
        return comparison.rel_l2, errors


def refuse_debug_build() -> None:
    """Figures of such a build would mislead."""
    if _core.DEBUG_BUILD:
        raise ValueError("libattnres: expected a release build to measure, got one with assertions")


def chosen_device(name: str | None) -> torch.device:
    """The device asked for, or a GPU if there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:(0|[1-9]\d{0,2}))?", name) is None:
        raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {name}")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"--device: expected one that is there, got {name}: PyTorch sees no CUDA device")
    _, _, index = name.partition(":")
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        raise ValueError(f"--device: expected one of the {count} that PyTorch sees, got {name}")
    return torch.device("cuda", int(index or torch.cuda.current_device()))
