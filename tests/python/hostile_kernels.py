# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"
"""A call's neighbours on its stream, doing what programmatic dependent launch allows at the worst time.

Import only where there is a GPU with Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

SLEEP_NANOSECONDS = 100_000
"""Far longer than the launches and the calls that must, or must not, wait for it."""

NUM_PROGRAMS = 8
"""Few, so that what is launched early finds multiprocessors of its own."""

_PLUG_CYCLES = 5_000_000  # 3 ms: longer than the host takes to enqueue a test's kernels


@triton.jit(do_not_specialize=["num_tokens"])  # one build for all
def _late_copy(
    source_ptr,
    destination_ptr,
    source_stride,
    destination_stride,
    num_tokens,
    hidden_size,
    WAITS: tl.constexpr,
    NANOSECONDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if WAITS:
        gdc_wait()
    gdc_launch_dependents()
    start = globaltimer()
    now = start
    while now - start < NANOSECONDS:
        now = globaltimer()
    # Zero, but only the clock knows: no access may move above the sleep.
    late = (now < start).to(tl.int64)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        source = source_ptr + late + token.to(tl.int64) * source_stride
        destination = destination_ptr + late + token.to(tl.int64) * destination_stride
        for first in range(0, hidden_size, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < hidden_size
            values = tl.load(source + columns, mask=inside, cache_modifier=".cg")
            tl.store(destination + columns, values, mask=inside)


def late_copy(
    source: torch.Tensor,
    destination: torch.Tensor,
    *,
    waits: bool = True,
    nanoseconds: int = SLEEP_NANOSECONDS,
) -> None:
    """Wait for the kernels ahead, let those behind start, sleep, and only then copy rows ``[M, H]``.

    Copying into an argument of the next call makes a writer that the call must wait for, copying out of one
    a reader that it must not overtake. Without ``waits`` the kernel reads what those ahead may yet write.
    """
    num_tokens, hidden_size = destination.shape
    _late_copy[(NUM_PROGRAMS,)](
        source.view(torch.int16),
        destination.view(torch.int16),
        source.stride(0),
        destination.stride(0),
        num_tokens,
        hidden_size,
        WAITS=waits,
        NANOSECONDS=nanoseconds,
        BLOCK=1024,
        num_warps=4,
        launch_pdl=True,
    )


def plug() -> None:
    """Hold the stream until the host has enqueued what follows, so that only the GPU decides when it runs."""
    torch.cuda._sleep(_PLUG_CYCLES)


def illegal_access() -> None:
    """Read far outside of all memory, which costs this process its CUDA context."""
    rows = torch.zeros(16, device="cuda", dtype=torch.int16)
    far = 1 << 30  # elements from row to row, and a thousand rows
    _late_copy[(NUM_PROGRAMS,)](rows, rows, far, far, 1000, 16, WAITS=True, NANOSECONDS=0, BLOCK=1024)
