# SPDX-License-Identifier: Apache-2.0
"""Where two phases are faster than one: the only place that says so.

A bank pass over ``num_blocks`` rows serves ``num_sites`` calls of ``num_tokens`` tokens. The table is for
native kernels; the first row that holds the tokens counts. By rows moved a pass of ``S`` calls pays where
``S > n / (n - 2)``, but where the bank stays in L2 from call to call, reading it again costs less than that.

On an H200 (``docs/performance/two_phase_walk_h200.json``, ``two_phase_walk_all_h200.json``) up to 32 tokens a
step is bound by latency, and passes after every write win 1.14 to 1.44. At 64 tokens two phases take over
from three bank rows on, at 128 from five, at 256 from six, and in long batches from three: there a pass over
one or two rows never pays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from libattnres._call import resolved_batch_invariant
from libattnres._dispatch import requested_backend
from libattnres.backends import native

__all__ = ["Choice", "choose", "sites_per_pass"]


class Row(NamedTuple):
    """What a pass must serve at least, for batches of up to so many tokens."""

    max_tokens: float
    min_blocks: int
    min_sites: int


TABLE = (
    Row(48, 1, 16),
    Row(96, 3, 16),
    Row(192, 5, 16),
    Row(384, 6, 16),
    Row(math.inf, 3, 8),
)


MAX_SITES = 1024
"""What a pass serves at most."""


class Choice(NamedTuple):
    """Whether calls run in two phases, and why."""

    two_phase: bool
    reason: str


def choose(
    num_blocks: int,
    num_tokens: int | torch.SymInt,
    num_sites: int,
    hidden_size: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    batch_invariant: bool | None = None,
) -> Choice:
    """The automatic choice for ``num_sites`` calls that read the same ``num_blocks`` bank rows.

    Parameters
    ----------
    num_blocks, num_tokens, num_sites, hidden_size : int
        ``n``, ``T``, ``S`` and ``H``.
    device, dtype
        Of the rows.
    backend, batch_invariant
        As for :func:`libattnres.attn_res`.
    """
    reason = unmeasured(hidden_size, device, dtype, backend, batch_invariant)
    if reason is not None:
        return Choice(False, reason)
    row = next(row for row in TABLE if row.max_tokens == math.inf or num_tokens <= row.max_tokens)
    if num_blocks < row.min_blocks:
        return Choice(False, f"{num_blocks} bank rows are read, it pays from {row.min_blocks} on")
    if num_sites < row.min_sites:
        return Choice(False, f"{num_sites} calls read the same rows, it pays from {row.min_sites} on")
    return Choice(True, f"{num_sites} calls read the same {num_blocks} bank rows")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def unmeasured(
    hidden_size: int,
    device: torch.device,
    dtype: torch.dtype,
    backend: str | None,
    batch_invariant: bool | None,
) -> str | None:
    """Why the table, which is for native kernels, does not speak of such calls, or None."""
    if resolved_batch_invariant(batch_invariant):
        return "the choice depends on the batch, on which no bit may depend"
    if device.type != "cuda":
        return f"only native kernels gain by it, the rows are on {device.type}"
    forced, _ = requested_backend(backend, None)  # which heeds LIBATTNRES_BACKEND
    if forced not in (None, "native"):
        return f"only native kernels gain by it, the backend is {forced}"
    if dtype != torch.bfloat16:
        return f"only native kernels gain by it, the rows are {dtype}"
    reason = native.device_reason(-1 if device.index is None else device.index)
    if reason is None and hidden_size not in native.hidden_sizes():
        reason = f"none is compiled for H={hidden_size}"
    return None if reason is None else f"only native kernels gain by it: {reason}"


def sites_per_pass(
    num_sites: int,
    num_tokens: int | torch.SymInt,
    hidden_size: int,
    element_size: int,
    max_bytes: int | None,
) -> int:
    """How many calls one pass serves so that what it leaves takes no more memory: equal shares."""
    passes = max(1, -(-num_sites // MAX_SITES))
    # By comparisons alone: under torch.compile the tokens may be symbolic.
    while max_bytes is not None and passes < num_sites:
        share = -(-num_sites // passes)
        if num_tokens * (share * (hidden_size * element_size + 4)) <= max_bytes:
            break
        passes += 1
    return -(-num_sites // passes)
