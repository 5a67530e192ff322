# SPDX-License-Identifier: Apache-2.0
"""How long a launch takes: replays of a CUDA graph, CUDA events, or the host's clock.

A launch is a callable without arguments. Work is a sequence of launches that cost the same but use other
memory: measured in turn, they find a cold cache when their memory exceeds it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "Launch",
    "Timing",
    "capture",
    "copy_bandwidth",
    "is_gpu",
    "num_sets",
    "quantile",
    "repeats",
    "summarize",
    "time_events",
    "time_graph",
    "time_wall",
]

Launch = Callable[[], object]

CACHE_MULTIPLE = 3
"""Sets of buffers used in turn together exceed the cache this many times."""
REPLAY_US = 1000.0
"""What one sample should last at least, so that launching a graph costs less than a percent."""
EXPECTED_BYTES_PER_US = 4.0e6
"""Speed at which a launch is expected to move its bytes; it decides how many fill a sample."""
EXPECTED_FLOOR_US = 1.5
MIN_SAMPLES = 5


@dataclass(frozen=True)
class Timing:
    """Microseconds per launch over the samples of one measurement."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    launches: int
    """Launches in one sample."""


def is_gpu(device: torch.device) -> bool:
    """Whether launches there are asynchronous and graphs can be captured."""
    return device.type == "cuda"


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the two nearest values."""
    if not values:
        raise ValueError("values: expected at least one, got none")
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(samples_us: Sequence[float], launches: int) -> Timing:
    """Median and spread, from the duration of each sample of ``launches`` launches."""
    each = [sample / launches for sample in samples_us]
    return Timing(quantile(each, 0.5), quantile(each, 0.2), quantile(each, 0.8), len(each), launches)


def num_sets(bytes_per_set: int, cache_bytes: int) -> int:
    """Sets of buffers that, used in turn, are never found in the cache."""
    return max(2, math.ceil(CACHE_MULTIPLE * cache_bytes / max(bytes_per_set, 1)))


def repeats(bytes_per_launch: int, sets: int) -> int:
    """How often all sets are gone through in a sample; the same for everything that is compared."""
    expected_us = max(EXPECTED_FLOOR_US, bytes_per_launch / EXPECTED_BYTES_PER_US)
    return max(1, math.ceil(REPLAY_US / (sets * expected_us)))


def capture(work: Sequence[Launch]) -> torch.cuda.CUDAGraph:
    """Capture every launch, in order, on a stream of its own; the first one is run once before."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work[0]()  # compiles and loads what a capture may not
        stream.synchronize()
        graph.capture_begin()
        try:
            for launch in work:
                launch()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is void already
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def time_graph(work: Sequence[Launch], *, max_samples: int = 20, budget_s: float = 0.5) -> Timing:
    """Replay a CUDA graph of all launches; a sample is one replay.

    Parameters
    ----------
    work : sequence of callables
        Captured in this order.
    max_samples : int
        Replays that are measured.
    budget_s : float
        Fewer are, but at least five, where that many would take longer.
    """
    graph = capture(work)
    try:
        for _ in range(2):  # the first one uploads the graph
            graph.replay()
        (once,) = elapsed_us([graph.replay])
        count = sample_count(once, max_samples, budget_s)
        return summarize(elapsed_us([graph.replay] * count), len(work))
    finally:
        torch.cuda.synchronize()
        graph.reset()


def time_events(
    work: Sequence[Launch], cache_bytes: int, *, max_samples: int = 100, budget_s: float = 0.3
) -> Timing:
    """Events around single eager launches after the cache was overwritten, as ``triton.testing.do_bench``.

    What the host needs to issue a launch is part of it where the overwriting does not hide it.
    """
    scratch = torch.empty(max(4 * cache_bytes, 256 << 20), dtype=torch.int8, device="cuda")
    work[0]()
    (once,) = elapsed_us([work[0]], scratch.zero_)
    count = sample_count(once, max_samples, budget_s)
    return summarize(elapsed_us([work[i % len(work)] for i in range(count)], scratch.zero_), 1)


def elapsed_us(launches: Sequence[Launch], between: Launch | None = None) -> list[float]:
    """Device time of each launch; ``between`` runs before each and is not measured."""
    pairs = []
    for launch in launches:
        if between is not None:
            between()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        launch()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def time_wall(work: Sequence[Launch], *, max_samples: int = 20, budget_s: float = 0.5) -> Timing:
    """Go through all launches on the host's clock; a sample is one pass. For launches that block."""

    def one_pass() -> float:
        started = time.perf_counter()
        for launch in work:
            launch()
        return (time.perf_counter() - started) * 1e6

    one_pass()
    count = sample_count(one_pass(), max_samples, budget_s)
    return summarize([one_pass() for _ in range(count)], len(work))


def sample_count(sample_us: float, max_samples: int, budget_s: float) -> int:
    """Samples that fit into the budget."""
    fitting = int(budget_s * 1e6 / max(sample_us, 1.0))
    return max(min(MIN_SAMPLES, max_samples), min(max_samples, fitting))


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """GB/s, read plus written, of a plain copy of ``size`` bytes between two buffers of a device."""
    work = []
    for _ in range(2):
        source = torch.zeros(size // 4, device=device)
        work.append(copy_launch(torch.empty_like(source), source))
    timing = time_graph(work) if is_gpu(device) else time_wall(work)
    return 2 * size / timing.median_us / 1e3


def copy_launch(target: torch.Tensor, source: torch.Tensor) -> Launch:
    """One copy by a kernel: in a graph ``Tensor.copy_`` would be a memcpy node, which is slower."""
    return lambda: torch.mul(source, 1.0, out=target)
