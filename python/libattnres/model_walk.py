# SPDX-License-Identifier: Apache-2.0
"""How Kimi K3 calls the operator in one step: 93 layers, a new bank row every 12 of them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "EPS",
    "HIDDEN_SIZE",
    "LAYERS_PER_BLOCK",
    "NUM_BANK_ROWS",
    "NUM_LAYERS",
    "WalkCall",
    "bytes_per_token",
    "walk_calls",
]

NUM_LAYERS = 93
LAYERS_PER_BLOCK = 12
HIDDEN_SIZE = 7168
NUM_BANK_ROWS = 8
EPS = 1e-5
"""Of both norms."""


@dataclass(frozen=True)
class WalkCall:
    """One call of ``attn_res`` in the walk."""

    name: str
    """Where it is: ``layer<l>.attention``, ``layer<l>.mlp`` or ``final``."""
    num_blocks: int
    """Bank rows read."""
    has_delta: bool
    """Whether the last sub-layer's output is added to the prefix."""
    block_write_idx: int
    """Bank row that receives the updated prefix, or -1."""
    has_output_norm: bool
    """Whether the output is normalised."""
    replaces_prefix: bool
    """Whether the last sub-layer's output takes the prefix's place before the call."""

    @property
    def num_sources(self) -> int:
        """``N``: the bank rows read and the prefix."""
        return self.num_blocks + 1

    @property
    def rows_moved(self) -> int:
        """Rows of ``H`` elements per token that the call must read or write, weights left out: the
        bank rows, the prefix, the output, ``delta`` and the prefix's update, the bank row written.
        """
        return self.num_blocks + 2 + 2 * self.has_delta + (self.block_write_idx >= 0)


def walk_calls() -> tuple[WalkCall, ...]:
    """The 187 calls of one step, in order."""
    calls = []
    for layer in range(NUM_LAYERS):
        opens_block = layer % LAYERS_PER_BLOCK == 0
        finished_blocks = -(-layer // LAYERS_PER_BLOCK)
        calls.append(
            WalkCall(
                name=f"layer{layer}.attention",
                num_blocks=finished_blocks,
                has_delta=layer > 0,
                block_write_idx=layer // LAYERS_PER_BLOCK if opens_block else -1,
                has_output_norm=True,
                replaces_prefix=False,
            )
        )
        calls.append(
            WalkCall(
                name=f"layer{layer}.mlp",
                num_blocks=finished_blocks + opens_block,
                has_delta=not opens_block,
                block_write_idx=-1,
                has_output_norm=True,
                replaces_prefix=opens_block,
            )
        )
    calls.append(
        WalkCall(
            name="final",
            num_blocks=NUM_BANK_ROWS,
            has_delta=True,
            block_write_idx=-1,
            has_output_norm=False,
            replaces_prefix=False,
        )
    )
    return tuple(calls)


def bytes_per_token(hidden_size: int = HIDDEN_SIZE, element_size: int = 2) -> int:
    """Bytes the walk must move for each token."""
    return sum(call.rows_moved for call in walk_calls()) * hidden_size * element_size
