# SPDX-License-Identifier: Apache-2.0
"""The timing module: arithmetic, and in which order it drives CUDA. No test depends on any speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from libattnres import timing


class FakeDevice:
    """Stands for ``torch.cuda``: a clock that launches advance, and a log of what was asked of it."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.log: list[str] = []
        self.capturing: list[timing.Launch] | None = None

    def launch(self, name: str, ms: float) -> timing.Launch:
        def run() -> None:
            if self.capturing is not None:
                self.capturing.append(run)
                return
            self.log.append(name)
            self.now_ms += ms

        return run

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                pass

            def synchronize(self) -> None:
                device.log.append("synchronize")

            def __enter__(self) -> Stream:
                return self

            def __exit__(self, *error: object) -> None:
                pass

        class Graph:
            def capture_begin(self) -> None:
                device.log.append("begin")
                device.capturing = []

            def capture_end(self) -> None:
                device.log.append("end")
                self.work, device.capturing = device.capturing or [], None

            def replay(self) -> None:
                for run in self.work:
                    run()

            def reset(self) -> None:
                device.log.append("reset")

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.now_ms

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        for name, value in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "Event": Event,
            "stream": lambda stream: stream,
            "current_stream": Stream,
            "synchronize": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    fake.install(monkeypatch)
    return fake


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [
        ([5.0], 0.2, 5.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([0.0, 10.0], 0.2, 2.0),
        ([4.0, 1.0, 2.0, 3.0], 0.5, 2.5),
    ],
)
def test_quantile_interpolates_between_sorted_values(
    values: list[float], fraction: float, expected: float
) -> None:
    assert timing.quantile(values, fraction) == pytest.approx(expected)


def test_quantile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="values: expected at least one"):
        timing.quantile([], 0.5)


def test_summary_divides_each_sample_by_its_launches() -> None:
    summary = timing.summarize([100.0, 300.0, 200.0, 500.0, 400.0], 10)
    assert summary == timing.Timing(
        pytest.approx(30.0), pytest.approx(18.0), pytest.approx(42.0), samples=5, launches=10
    )


@pytest.mark.parametrize(
    ("bytes_per_set", "cache", "expected"),
    [(100, 1000, 30), (101, 1000, 30), (99, 1000, 31), (10**9, 1000, 2), (0, 10, 30)],
)
def test_sets_together_exceed_three_caches(bytes_per_set: int, cache: int, expected: int) -> None:
    assert timing.num_sets(bytes_per_set, cache) == expected


@pytest.mark.parametrize("bytes_per_launch", [86016, 1376256, 1409286144])  # 1, 16 and 8192 tokens
@pytest.mark.parametrize("sets", [1, 2, 1831])
def test_a_sample_lasts_a_millisecond_even_at_the_speed_of_the_memory(
    bytes_per_launch: int, sets: int
) -> None:
    fastest_us = max(timing.EXPECTED_FLOOR_US, bytes_per_launch / timing.EXPECTED_BYTES_PER_US)
    count = timing.repeats(bytes_per_launch, sets)
    assert count * sets * fastest_us >= timing.REPLAY_US
    assert count == 1 or (count - 1) * sets * fastest_us < timing.REPLAY_US


def test_graph_runs_the_first_launch_before_the_capture_and_measures_replays(device: FakeDevice) -> None:
    work = [device.launch("a", 0.001), device.launch("b", 0.003)]
    measured = timing.time_graph(work, max_samples=7, budget_s=100.0)
    assert device.log[:4] == ["a", "synchronize", "begin", "end"]
    assert device.log[4:-1] == ["a", "b"] * (2 + 1 + 7)  # warm-up, estimate, samples
    assert device.log[-1] == "reset"
    assert measured == timing.Timing(
        pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0), samples=7, launches=2
    )


def test_slow_graphs_are_replayed_less_often_but_five_times(device: FakeDevice) -> None:
    assert timing.time_graph([device.launch("a", 100.0)], max_samples=20, budget_s=0.8).samples == 8
    assert timing.time_graph([device.launch("a", 900.0)], max_samples=20, budget_s=0.8).samples == 5


def test_a_launch_that_fails_ends_the_capture_and_is_what_is_raised(device: FakeDevice) -> None:
    calls: list[int] = []

    def fails_when_captured() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise NotImplementedError("cannot be captured")

    with pytest.raises(NotImplementedError, match="cannot be captured"):
        timing.capture([fails_when_captured])
    assert device.log == ["synchronize", "begin", "end"]
    assert device.capturing is None


def test_events_leave_out_the_overwriting_of_the_cache(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scratch:
        zero_ = staticmethod(device.launch("zero", 5.0))

    monkeypatch.setattr(torch, "empty", lambda *size, **options: Scratch())
    work = [device.launch("a", 0.001), device.launch("b", 0.003)]
    measured = timing.time_events(work, 1 << 20, max_samples=6, budget_s=100.0)
    assert device.log == ["a", "zero", "a", *["zero", "a", "zero", "b"] * 3]
    assert (measured.samples, measured.launches) == (6, 1)
    assert measured.median_us == pytest.approx(2.0)


def test_wall_clock_goes_through_all_launches_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    ran: list[str] = []

    def launch(name: str, seconds: float) -> timing.Launch:
        def run() -> None:
            ran.append(name)
            clock[0] += seconds

        return run

    measured = timing.time_wall([launch("a", 1e-3), launch("b", 3e-3)], max_samples=4, budget_s=1.0)
    assert ran == ["a", "b"] * (1 + 1 + 4)
    assert measured.median_us == pytest.approx(2000.0)
    assert (measured.samples, measured.launches) == (4, 2)


def test_copy_bandwidth_counts_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def two_microseconds(work: Any) -> timing.Timing:
        for launch in work:
            launch()
        seen.append(len(work))
        return timing.Timing(2.0, 2.0, 2.0, 1, 1)

    monkeypatch.setattr(timing, "time_wall", two_microseconds)
    assert timing.copy_bandwidth(torch.device("cpu"), 1000) == pytest.approx(1.0)
    assert seen == [2]


@pytest.mark.gpu
def test_graph_on_a_gpu_agrees_with_a_long_copy() -> None:
    source = torch.zeros(1 << 28, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    measured = timing.time_graph([lambda: target.copy_(source)] * 2)
    assert measured.launches == 2
    assert measured.p20_us <= measured.median_us <= measured.p80_us
    assert timing.copy_bandwidth(torch.device("cuda"), 1 << 28) > 0
