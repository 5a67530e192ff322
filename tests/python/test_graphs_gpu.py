# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: captured cold or warm, on any stream, and replayed with other inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libattnres
import pytest
import torch
from libattnres import reference
from programs import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("native_device")]

H = 7168
TENSORS = ("prefix", "delta", "blocks", "norm_weight", "qk_weight", "output_norm_weight")

PLANS = {
    "automatic": None,
    "ring, 1 row a stage": libattnres.Plan("ring", rows_per_stage=1),
    "ring, 2 rows a stage": libattnres.Plan("ring", rows_per_stage=2),
    "ring, 3 rows a stage": libattnres.Plan("ring", rows_per_stage=3),
    "cluster of 2": libattnres.Plan("cluster", cluster_size=2),
    "cluster of 4": libattnres.Plan("cluster", cluster_size=4),
    "cluster of 7": libattnres.Plan("cluster", cluster_size=7),
}

# A model's step in small: row after row is written, each is read by the next call, and so is the prefix.
STEPS = [(0, 0), (1, -1), (1, 1), (2, 2), (3, -1), (3, 3), (4, 0), (4, -1)]


def walk(case: Any, outs: list[torch.Tensor], **options: Any) -> None:
    for (num_blocks, block_write_idx), out in zip(STEPS, outs, strict=True):
        step = case.with_(num_blocks=num_blocks, block_write_idx=block_write_idx)
        libattnres.attn_res(*step.arguments, out=out, backend="native", **options)


def outputs(case: Any) -> list[torch.Tensor]:
    return [torch.full_like(case.prefix, float("nan")) for _ in STEPS]


def refill(case: Any, values: Any) -> None:
    for name in TENSORS:
        getattr(case, name).copy_(getattr(values, name))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("pdl", ["wait", "off"])
@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_replays_follow_the_inputs(
    num_tokens: int, pdl: str, plan: str, gpu_case: Callable[..., Any]
) -> None:
    """Every replay equals the same calls made eagerly, bit for bit, and replays back to back do not mix."""
    case = gpu_case(num_tokens=num_tokens, num_blocks=0)
    outs = outputs(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        walk(case, outs, pdl=pdl, plan=PLANS[plan])
    assert all(out.isnan().all() for out in outs), "the capture ran something"
    for seed in (1, 2, 3):
        fresh = gpu_case(num_tokens=num_tokens, num_blocks=0, seed=seed)
        refill(case, fresh)
        expected_outs = outputs(fresh)
        for _ in range(3):  # one replay behind the other: the next starts from what the last left
            walk(fresh, expected_outs, pdl="off", plan=PLANS[plan])
            graph.replay()
        torch.cuda.synchronize()
        for out, expected_out in zip(outs, expected_outs, strict=True):
            assert reference.same_bits(out, expected_out)
        assert reference.same_bits(case.prefix, fresh.prefix)
        assert reference.same_bits(case.blocks, fresh.blocks)


@pytest.mark.parametrize("num_tokens", [4, 200])
def test_early_calls_replay_within_their_contract(num_tokens: int, gpu_case: Callable[..., Any]) -> None:
    """Between a call that writes a row and the early one that reads it lies a kernel that waits."""
    case = gpu_case(num_tokens=num_tokens, num_blocks=3)
    writer = case.with_(block_write_idx=3, delta=None)
    reader = case.with_(num_blocks=4)
    producer = torch.empty_like(case.delta)

    def step(first: torch.Tensor, second: torch.Tensor) -> None:
        libattnres.attn_res(*writer.arguments, out=first, backend="native", pdl="early")
        torch.mul(first, 0.5, out=producer)
        libattnres.attn_res(
            *reader.with_(delta=producer).arguments, out=second, backend="native", pdl="early"
        )

    outs, expected_outs = outputs(case)[:2], outputs(case)[:2]
    step(*outputs(case)[:2])
    start = case.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*outs)
    for _ in range(5):
        refill(case, start)
        torch.cuda.synchronize()
        step(*expected_outs)
        torch.cuda.synchronize()
        refill(case, start)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for out, expected_out in zip(outs, expected_outs, strict=True):
            assert reference.same_bits(out, expected_out)


def test_a_graph_remembers_no_stream(gpu_case: Callable[..., Any]) -> None:
    """Warmed up on one stream, captured on a second, replayed on a third."""
    case = gpu_case(num_tokens=30)
    start = case.clone()
    expected = reference.attn_res(*case.arguments)
    warm, capture, replay = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(warm):
        libattnres.attn_res(*case.clone().arguments, backend="native")
    torch.cuda.synchronize()
    out = torch.full_like(case.prefix, float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture):
        libattnres.attn_res(*case.arguments, out=out, backend="native")
    assert out.isnan().all()
    refill(case, start)
    torch.cuda.synchronize()
    with torch.cuda.stream(replay):
        graph.replay()
    replay.synchronize()
    assert reference.compare(out, expected.output).ok
    assert reference.same_bits(case.prefix, expected.prefix)


def test_calls_of_a_forked_capture_are_recorded(gpu_case: Callable[..., Any]) -> None:
    """Two side streams within one capture."""
    cases = [gpu_case(num_tokens=50, seed=seed) for seed in (1, 2)]
    fresh = [case.clone() for case in cases]
    outs = [torch.full_like(case.prefix, float("nan")) for case in cases]
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        for side, case, out in zip(sides, cases, outs, strict=True):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                libattnres.attn_res(*case.arguments, out=out, backend="native")
        for side in sides:
            current.wait_stream(side)
    assert all(out.isnan().all() for out in outs)
    graph.replay()
    torch.cuda.synchronize()
    for case, out in zip(fresh, outs, strict=True):
        expected = libattnres.attn_res(*case.arguments, backend="native")
        assert reference.same_bits(out, expected)


# Cold: a process whose first call is captured. Each way to capture, and each thing that might be loaded late.

COLD = """
import torch, libattnres
from libattnres import reference
H = 7168
def tensor(*shape):
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)
if {warm}:
    libattnres.warmup()
prefix, delta, blocks, weight = tensor({tokens}, H), tensor({tokens}, H), tensor({tokens}, 8, H), tensor(H)
arguments = (prefix, delta, blocks, weight, weight, weight, {num_blocks}, {write})
expected = reference.attn_res(*arguments)
out = torch.full_like(prefix, float("nan"))
stream = torch.cuda.Stream()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream, capture_error_mode="{mode}"):
    libattnres.attn_res(*arguments, out=out, backend="native", pdl="{pdl}")
assert out.isnan().all(), "the capture ran something"
graph.replay()
torch.cuda.synchronize()
assert reference.compare(out, expected.output).ok
assert reference.same_bits(prefix, expected.prefix)
assert reference.same_bits(blocks, expected.blocks)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "num_blocks", "write", "pdl", "mode"),
    [
        (3, 8, -1, "wait", "global"),  # cluster kernel
        (700, 8, 2, "wait", "global"),  # ring kernel: its shared-memory limit is raised within the capture
        (700, 3, -1, "early", "thread_local"),
        (700, 8, -1, "off", "relaxed"),
    ],
)
def test_a_cold_capture_records_the_call(
    tokens: int, num_blocks: int, write: int, pdl: str, mode: str
) -> None:
    run_program(
        COLD.format(warm=False, tokens=tokens, num_blocks=num_blocks, write=write, pdl=pdl, mode=mode)
    )


@pytest.mark.slow
def test_a_capture_after_warmup_records_the_call() -> None:
    run_program(COLD.format(warm=True, tokens=700, num_blocks=8, write=2, pdl="wait", mode="global"))


@pytest.mark.slow
def test_warmup_and_probe_may_be_called_within_a_capture() -> None:
    """Neither belongs to what is captured, and neither breaks it."""
    run_program("""
import torch, libattnres
value = torch.zeros(8, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="global"):
    value.add_(1.0)
    assert libattnres.probe().backends["native"] is None
    libattnres.warmup()
graph.replay()
torch.cuda.synchronize()
assert (value == 1.0).all()
""")


@pytest.mark.slow
def test_a_capture_that_someone_broke_is_an_error_and_is_forgotten() -> None:
    """CUDA refuses the launch: the call says so, has written nothing, and the next one works."""
    printed = run_program("""
import torch, libattnres
from libattnres import reference
H = 7168
def tensor(*shape):
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)
prefix, delta, blocks, weight = tensor(33, H), tensor(33, H), tensor(33, 8, H), tensor(H)
arguments = (prefix, delta, blocks, weight, weight, weight, 8)
expected, before = reference.attn_res(*arguments), prefix.clone()
out, stream, graph = torch.full_like(prefix, float("nan")), torch.cuda.Stream(), torch.cuda.CUDAGraph()
libattnres.warmup()
torch.cuda.synchronize()
with torch.cuda.stream(stream):
    graph.capture_begin()
    try:
        stream.synchronize()  # not allowed: the capture is void from here on
    except RuntimeError:
        pass
    try:
        libattnres.attn_res(*arguments, out=out, backend="native")
    except RuntimeError as error:
        print("call:", error)
    try:
        graph.capture_end()
    except RuntimeError:
        print("the capture is void")
torch.cuda.synchronize()
assert out.isnan().all()
assert reference.same_bits(prefix, before)
libattnres.attn_res(*arguments, out=out, backend="native")
torch.cuda.synchronize()
assert reference.compare(out, expected.output).ok
assert reference.same_bits(prefix, expected.prefix)
""")
    assert "call: cudaLaunchKernelExC: cudaErrorStreamCaptureInvalidated" in printed
    assert "the capture is void" in printed
