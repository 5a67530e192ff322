# SPDX-License-Identifier: Apache-2.0
"""A call on tensors that hold memory, past autograd and tracing: what the torch ops run, and attn_res
when ``_core.forward_tensors`` declines.
"""

from __future__ import annotations

import torch

from libattnres import _core
from libattnres._call import Plan, checked_call
from libattnres._dispatch import run

__all__ = ["eager"]

# Only PyTorch's own exchange API (>= 2.10): other packages are known to put theirs on older releases.
# Without it _core.forward_tensors answers False and eager() serves.
if hasattr(torch._C, "_dlpack_exchange_api"):
    _core.bind_tensors(torch.Tensor, torch.nn.Parameter, torch.Tensor.__dlpack_c_exchange_api__)


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
    batch_invariant: bool | None,
) -> torch.Tensor:
    """Check and run one call; the arguments and errors of :func:`libattnres.attn_res`.

    Either the call is served, or what is wrong with it is said, in full.
    """
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
        batch_invariant,
    )
    run(call, backend, plan)
    return call.out
