# SPDX-License-Identifier: Apache-2.0
"""What a call costs the CPU: the host's clock over many calls that nothing waits for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import libattnres
from libattnres import _core
from libattnres._call import checked_call
from libattnres.cli.workload import Buffers, Shape

__all__ = ["cpu_times"]

CPU_CALLS = 500
"""Launches between two synchronisations: fewer than the queue holds, so that none waits for the GPU."""
CPU_ROUNDS = 20


def cpu_times(device: torch.device, backends: Sequence[str]) -> dict[str, float]:
    """Microseconds of the CPU per call, with the launch, which nothing waits for."""
    buffers = Buffers(Shape(1, 1), 1, device)
    arguments, out = buffers.arguments(0), buffers.out[0]

    def eager(calls: int = CPU_CALLS, **options: Any) -> float:
        return host_us(lambda: libattnres.attn_res(*arguments, **options), calls)

    result = {}
    if "native" in backends:
        result["eager call"] = eager(backend="native")
        result["eager call, out given"] = eager(backend="native", out=out)
        result["eager call, backend not given"] = eager()
        with torch.enable_grad():  # then it is also asked whether an argument requires grad
            result["eager call, grad mode"] = eager(backend="native")
        call = checked_call(*(*arguments, out, "wait")).core_args()
        stream = torch.cuda.current_stream().cuda_stream
        for name, timed in (("C call", _core.time_forward), ("C call, up to the launch", _core.time_plan)):
            seconds = []
            for _ in range(CPU_ROUNDS):
                seconds.append(timed(*call, stream, CPU_CALLS))
                torch.cuda.synchronize()
            result[name] = statistics.median(seconds) * 1e6 / CPU_CALLS
    if "triton" in backends:
        result["eager call, triton"] = eager(backend="triton", out=out)
    if "torch" in backends:
        result["eager call, torch"] = eager(5, backend="torch", out=out)  # dozens of launches each
    result["empty_like alone"] = host_us(lambda: torch.empty_like(out), CPU_CALLS)
    return result


def host_us(call: Callable[[], object], calls: int) -> float:
    """Median time of a call on the host's clock; the device is waited for outside of it."""
    samples = []
    for index in range(CPU_ROUNDS + 2):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - started
        torch.cuda.synchronize()
        if index >= 2:
            samples.append(elapsed * 1e6 / calls)
    return statistics.median(samples)
