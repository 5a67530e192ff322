# SPDX-License-Identifier: Apache-2.0
"""Plugin of SGLang: the reads of Kimi K3's snapshot bank.

SGLang loads it by the entry point ``sglang.srt.plugins``; ``LIBATTNRES_SGLANG=0`` switches it off. The reads
that SGLang fuses with a collective are left to it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from libattnres.engines.replacement import Engine, Function, install
from libattnres.engines.service import Service

__all__ = ["ENGINE", "register"]

logger = logging.getLogger("sglang.plugins.libattnres")


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """``AttnResidual.forward``: add, read the bank, norm, and write a row, in one launch but for the add."""
    service = Service("SGLang", logger)

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        prefix_sum: torch.Tensor | None,
        score_proj: Any,
        score_norm: Any,
        out_norm: Any,
        rows: slice | None = None,
        write: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_blocks: int = self.num_valid_blocks
        # The first read of a stack, and one that is an error, are not ours.
        is_ours = num_blocks > 0 and not (rows is None and self.written_on_slice)
        if is_ours and service.serves(hidden_states.device):
            # SGLang keeps the old prefix, so the sum is a tensor of its own, as in its own path.
            prefix = hidden_states if prefix_sum is None else prefix_sum + hidden_states
            output = service.attn_res(
                prefix,
                None,
                self.block_residual if rows is None else self.block_residual[rows],
                score_norm.weight,
                score_proj.weight.view(-1),
                out_norm.weight,
                num_blocks,
                num_blocks if write else -1,
                score_norm.variance_epsilon,
                out_norm.variance_epsilon,
            )
            if output is not None:
                if write:
                    self._count_write(rows)
                return output, prefix
        result: tuple[torch.Tensor, torch.Tensor] = original(
            self, hidden_states, prefix_sum, score_proj, score_norm, out_norm, rows, write
        )
        return result

    return forward


def aggregate_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same read without add, norm and write."""
    service = Service("SGLang", logger)

    @functools.wraps(original)
    def aggregate_stream(
        prefix_sum: torch.Tensor, bank: torch.Tensor, nvb: int, score_proj: Any, score_norm: Any
    ) -> Any:
        output = None
        if nvb > 0:
            output = service.attn_res(
                prefix_sum,
                None,
                bank,
                score_norm.weight,
                score_proj.weight.view(-1),
                None,
                nvb,
                -1,
                score_norm.variance_epsilon,
                0.0,
            )
        return original(prefix_sum, bank, nvb, score_proj, score_norm) if output is None else output

    return aggregate_stream


ENGINE = Engine(
    name="SGLang",
    package="sglang",
    module="sglang.srt.layers.attn_residual",
    functions=(
        Function(
            "AttnResidual.forward",
            (
                "self",
                "hidden_states",
                "prefix_sum",
                "score_proj",
                "score_norm",
                "out_norm",
                "rows",
                "write",
            ),
            forward,
        ),
        Function("AttnResidual._count_write", ("self", "rows"), None),
        Function(
            "aggregate_stream",
            ("prefix_sum", "bank", "nvb", "score_proj", "score_norm"),
            aggregate_stream,
        ),
    ),
    variable="LIBATTNRES_SGLANG",
    logger=logger,
)


def register() -> None:
    """Called by SGLang in each of its processes."""
    install(ENGINE)
