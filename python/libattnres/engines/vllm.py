# SPDX-License-Identifier: Apache-2.0
"""Plugin of vLLM: the Attention Residuals of Kimi K3, and of the models that share its operator.

vLLM loads it by the entry point ``vllm.general_plugins``; ``LIBATTNRES_VLLM=0`` switches it off.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from libattnres.engines.replacement import Engine, Function, install
from libattnres.engines.service import Service

__all__ = ["ENGINE", "register"]

logger = logging.getLogger("vllm.plugins.libattnres")


def attn_res(original: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, whose arguments are ours."""
    service = Service("vLLM", logger, batch_invariant=os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1")

    @functools.wraps(original)
    def attn_res(
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
    ) -> Any:
        arguments = (
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
        )
        output = service.attn_res(*arguments)
        return original(*arguments) if output is None else output

    return attn_res


ENGINE = Engine(
    name="vLLM",
    package="vllm",
    module="vllm.models.kimi_k3.nvidia.ops.attn_res",
    functions=(
        Function(
            "attn_res",
            (
                "prefix",
                "delta",
                "blocks",
                "norm_weight",
                "qk_weight",
                "output_norm_weight",
                "num_blocks",
                "block_write_idx",
                "eps",
                "output_norm_eps",
            ),
            attn_res,
        ),
    ),
    variable="LIBATTNRES_VLLM",
    logger=logger,
)


def register() -> None:
    """Called by vLLM in each of its processes."""
    install(ENGINE)
