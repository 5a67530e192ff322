# SPDX-License-Identifier: Apache-2.0
"""A call on tensors that hold memory, past autograd and tracing: what attn_res and the torch ops run."""

from __future__ import annotations

import torch

from libattnres import _core
from libattnres._call import Plan, checked_call
from libattnres._dispatch import run

__all__ = ["eager"]

_empty_like = torch.empty_like
_forward_tensors = _core.forward_tensors

# Without the exchange API (PyTorch < 2.10) forward_tensors answers False and the slow path serves.
_exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
if _exchange_api is not None:
    _core.bind_tensors(torch.Tensor, torch.nn.Parameter, _exchange_api)


def eager(
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
    out: torch.Tensor | None,
    backend: str | None,
    pdl: str,
    plan: Plan | None,
) -> torch.Tensor:
    """Check and run one call; the arguments and errors of :func:`libattnres.attn_res`.

    The fast path serves plain tensors on the native or host backend in one call of ``_core``. What it
    declines, for whatever reason, the slow path checks in full: it either serves the call on another
    backend or says what is wrong.
    """
    if plan is None and isinstance(prefix, torch.Tensor):
        output = _empty_like(prefix) if out is None else out
        if _forward_tensors(
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
            output,
            pdl,
            backend,
        ):
            return output
    call = checked_call(
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
    run(call, backend, plan)
    return call.out
