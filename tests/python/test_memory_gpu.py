# SPDX-License-Identifier: Apache-2.0
"""Memory, streams and threads on a GPU: which bytes a call touches, and what others may do at the time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import libattnres
import pytest
import torch
from calls import Call, check
from libattnres import reference
from libattnres.backends import native
from programs import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("native_device")]

H = 7168
MODEL = Call(hidden_size=H, num_blocks=7, device="cuda")
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
every_plan = pytest.mark.parametrize("plan", PLANS)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


# Large banks: offsets that 32 bits cannot hold, in bytes, in elements and beyond the sign.


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ring, 1 row a stage", "ring, 3 rows a stage", "cluster of 4"])
@pytest.mark.parametrize("num_tokens", [40960, 65536])
def test_offsets_beyond_32_bits(num_tokens: int, plan: str) -> None:
    """Every unread row is NaN, and so is the memory between the rows of the padded bank."""
    padding = 8 if num_tokens == 40960 else 0

    def forward(*arguments: Any) -> None:
        native.forward(*arguments, PLANS[plan])

    check(
        replace(MODEL, num_tokens=num_tokens, num_blocks=7, block_write_idx=7, padding=padding),
        forward,
    )


# Bytes around the buffers.

GUARD = 4112  # bytes before, between and after the buffers, whose bases are multiples of 16 and no more


class Arena:
    """One allocation that holds the buffers of a case and guards of 0xff bytes, which are NaN as bfloat16."""

    def __init__(self, case: Any, padding: int) -> None:
        shapes = {name: tensor.shape for name in TENSORS if (tensor := getattr(case, name)) is not None} | {
            "out": case.prefix.shape
        }
        self.places: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        offset = GUARD // 2  # in elements from here on
        for name, shape in shapes.items():
            strides = [1]
            for size in reversed(shape[1:]):
                strides.insert(0, strides[0] * size + (padding if strides == [1] else 0))
            self.places[name] = (offset, tuple(shape), tuple(strides))
            offset += shape[0] * strides[0] if len(shape) > 1 else shape[0]
            offset = (offset + 7) // 8 * 8 + GUARD // 2
        self.memory = torch.full((offset * 2,), 0xFF, dtype=torch.uint8, device=case.prefix.device)
        for name in shapes:
            if name != "out":
                self.view(name).copy_(getattr(case, name))
        self.case = case.with_(**{name: self.view(name) for name in shapes if name != "out"})

    def view(self, name: str) -> torch.Tensor:
        offset, shape, strides = self.places[name]
        return self.memory.view(torch.bfloat16).as_strided(shape, strides, offset)


@every_plan
@pytest.mark.parametrize("num_blocks", [0, 3, 8])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 33, 301])
def test_no_byte_around_a_buffer_changes(
    num_tokens: int, writes: bool, num_blocks: int, plan: str, gpu_case: Callable[..., Any]
) -> None:
    case = gpu_case(num_tokens=num_tokens, num_blocks=num_blocks)
    if writes:
        case = case.with_(block_write_idx=num_blocks // 2)
    expected = reference.attn_res(*case.arguments)
    for padding in (0, 24):
        arena = Arena(case, padding)
        wanted = arena.memory.clone()
        out = arena.view("out")
        libattnres.attn_res(*arena.case.arguments, out=out, plan=PLANS[plan], backend="native")
        assert reference.compare(out, expected.output).ok
        # The memory as it must be now: the new values in their places and every other byte as it was.
        after, arena.memory = arena.memory, wanted
        arena.view("prefix").copy_(expected.prefix)
        arena.view("blocks").copy_(expected.blocks)
        arena.view("out").copy_(out)
        assert torch.equal(after, wanted)


@every_plan
def test_what_may_not_be_read_has_no_effect(plan: str, gpu_case: Callable[..., Any]) -> None:
    """The same bits whatever lies in unread bank rows, between rows, around buffers and in the output."""
    case = gpu_case(num_tokens=140, num_blocks=4)
    results = []
    for filling in (0xFF, 0x00, 0x7F):  # NaN, zero, and a NaN of other bits
        arena = Arena(case, padding=8)
        values = {name: arena.view(name).clone() for name in TENSORS}
        arena.memory.fill_(filling)
        for name, value in values.items():
            if name == "blocks":
                arena.view(name)[:, :4].copy_(value[:, :4])
            else:
                arena.view(name).copy_(value)
        out = arena.view("out")
        libattnres.attn_res(*arena.case.arguments, out=out, plan=PLANS[plan], backend="native")
        results.append((out.clone(), arena.view("prefix").clone()))
    for out, prefix in results[1:]:
        assert reference.same_bits(out, results[0][0])
        assert reference.same_bits(prefix, results[0][1])


# Errors of others, and no memory.


@pytest.fixture
def no_memory() -> Iterator[Callable[[int], None]]:
    """Takes what PyTorch still has in blocks of so many bytes, and lets it ask for no more."""
    taken: list[torch.Tensor] = []

    def exhaust(num_bytes: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-9)
        try:
            while True:
                taken.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass

    yield exhaust
    taken.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_no_memory_for_the_output_raises_and_writes_nothing(
    backend: str, gpu_case: Callable[..., Any], no_memory: Callable[[int], None]
) -> None:
    if (reason := libattnres.probe().backends[backend]) is not None:
        pytest.skip(reason)
    case = gpu_case(num_tokens=3000, block_write_idx=3)
    before = case.clone()
    out = torch.empty_like(case.prefix)
    no_memory(out.nbytes)
    with pytest.raises(torch.OutOfMemoryError):
        libattnres.attn_res(*case.arguments, backend=backend)
    torch.cuda.synchronize()
    torch.cuda.set_per_process_memory_fraction(1.0)
    for name in TENSORS:
        assert reference.same_bits(getattr(case, name), getattr(before, name)), name
    # And the next call is none the worse for it.
    expected = reference.attn_res(*before.arguments)
    libattnres.attn_res(*case.arguments, out=out, backend=backend)
    assert reference.compare(out, expected.output).ok
    assert reference.same_bits(case.prefix, expected.prefix)
    assert reference.same_bits(case.blocks, expected.blocks)


def test_a_call_with_an_output_allocates_nothing(gpu_case: Callable[..., Any]) -> None:
    case = gpu_case(num_tokens=300)
    out = torch.empty_like(case.prefix)

    def allocated() -> tuple[int, int]:
        for pdl in ("wait", "early", "off"):
            libattnres.attn_res(*case.arguments, out=out, backend="native", pdl=pdl)
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.mem_get_info()[0]

    allocated()  # loads the kernels
    # Another process may allocate meanwhile, but not every time.
    assert any(allocated() == allocated() for _ in range(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "name"),
    [
        ("hostile_kernels.illegal_access()", "cudaErrorIllegalAddress"),
        ("torch.take(prefix, torch.full((4,), 1 << 40, device='cuda'))", "cudaErrorAssert"),
    ],
)
def test_a_kernel_that_failed_before_is_named_as_the_cause(failure: str, name: str) -> None:
    """The context is lost to everybody then: the call must say whose fault it is not, nor hang or crash."""
    if (reason := libattnres.probe().backends["triton"]) is not None:
        pytest.skip(reason)
    printed = run_program(f"""
import os, sys, hostile_kernels, torch, libattnres
H = {H}
libattnres.warmup()
def tensor(*shape):
    return torch.ones(*shape, device="cuda", dtype=torch.bfloat16)
prefix, delta, blocks, weight, out = tensor(9, H), tensor(9, H), tensor(9, 8, H), tensor(H), tensor(9, H)
def call():
    libattnres.attn_res(prefix, delta, blocks, weight, weight, weight, 8, out=out, backend="native")
call()
torch.cuda.synchronize()
try:
    {failure}
    torch.cuda.synchronize()
except RuntimeError as error:
    print("earlier:", type(error).__name__)
for _ in range(2):
    try:
        call()
    except RuntimeError as error:
        print("call:", type(error).__name__, error)
sys.stdout.flush()
os._exit(0)  # nothing on the GPU can be cleaned up any more
""")
    lines = printed.splitlines()
    assert any(line.startswith("earlier:") for line in lines), printed
    calls = [line for line in lines if line.startswith("call: RuntimeError")]
    assert len(calls) == 2, printed
    for line in calls:
        assert name in line
        assert "left by earlier work on this device" in line


def loaded_runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that PyTorch loaded; libattnres has one of its own."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcudart.so" in line}
    return ctypes.CDLL(paths.pop()) if paths else None


def test_an_error_code_that_someone_left_behind_is_not_this_calls(gpu_case: Callable[..., Any]) -> None:
    runtime = loaded_runtime()
    if runtime is None:
        pytest.skip("this PyTorch has no shared CUDA runtime")
    case = gpu_case(num_tokens=20)
    expected = reference.attn_res(*case.arguments)
    torch.cuda.synchronize()
    assert runtime.cudaSetDevice(4096) == 101  # cudaErrorInvalidDevice
    try:
        output = libattnres.attn_res(*case.arguments, backend="native", out=torch.empty_like(case.prefix))
        # Nor is it taken away from whom it belongs to.
        assert runtime.cudaPeekAtLastError() == 101
    finally:
        runtime.cudaGetLastError()
    assert reference.compare(output, expected.output).ok


# Streams and threads.

NUM_STREAMS = 8


def test_several_streams_at_once(gpu_case: Callable[..., Any]) -> None:
    """Different calls, more blocks than the device holds, each in the order of its own stream only."""
    cases = [
        gpu_case(num_tokens=tokens, num_blocks=blocks, block_write_idx=write, seed=tokens)
        for tokens, blocks, write in (
            (1, 8, -1),
            (7, 3, 3),
            (133, 8, 2),
            (300, 0, 0),
            (700, 5, -1),
            (64, 1, 7),
            (2000, 7, -1),
            (16, 4, 4),
        )
    ]
    steps, delta_scale = 10, 0.25

    def step(case: Any, outs: list[torch.Tensor], index: int) -> None:
        libattnres.attn_res(*case.arguments, out=outs[index], backend="native")

    def outputs(case: Any) -> list[torch.Tensor]:
        return [torch.full_like(case.prefix, float("nan")) for _ in range(steps)]

    for case in cases:
        case.delta.mul_(delta_scale)
    expected = []
    for case in (case.clone() for case in cases):
        outs = outputs(case)
        for index in range(steps):
            step(case, outs, index)
            torch.cuda.synchronize()
        expected.append((case, outs))
    for _ in range(5):
        fresh = [(case.clone(), outputs(case)) for case in cases]
        streams = [torch.cuda.Stream(priority=-(index % 2)) for index in range(NUM_STREAMS)]
        torch.cuda.synchronize()
        for index in range(steps):
            for stream, (case, outs) in zip(streams, fresh, strict=True):
                with torch.cuda.stream(stream):
                    step(case, outs, index)
        torch.cuda.synchronize()
        for (case, outs), (expected_case, expected_outs) in zip(fresh, expected, strict=True):
            assert reference.same_bits(case.prefix, expected_case.prefix)
            assert reference.same_bits(case.blocks, expected_case.blocks)
            for out, expected_out in zip(outs, expected_outs, strict=True):
                assert reference.same_bits(out, expected_out)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work`` in threads that start together; the first exception of any is raised."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def body(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("shares_stream", [False, True])
def test_several_host_threads(shares_stream: bool, gpu_case: Callable[..., Any]) -> None:
    cases = [
        gpu_case(num_tokens=17 * (index + 1), num_blocks=index % 9, seed=index)
        for index in range(NUM_STREAMS)
    ]
    expected = []
    for case in cases:
        fresh = case.clone()
        expected.append((fresh, libattnres.attn_res(*fresh.arguments, backend="native")))
    torch.cuda.synchronize()
    shared = torch.cuda.Stream()

    def work(index: int) -> None:
        stream = shared if shares_stream else torch.cuda.Stream()
        expected_case, expected_out = expected[index]
        with torch.cuda.stream(stream):
            for _ in range(100):
                fresh = cases[index].clone()
                output = libattnres.attn_res(*fresh.arguments, backend="native")
                wrong = (bits(output) != bits(expected_out)).any()
                wrong |= (bits(fresh.prefix) != bits(expected_case.prefix)).any()
                assert not wrong.item()

    in_threads(NUM_STREAMS, work)


def test_errors_belong_to_the_thread_that_made_them(gpu_case: Callable[..., Any]) -> None:
    """Half of the threads make calls that are refused, the other half must never hear of it."""
    case = gpu_case(num_tokens=5)
    torch.cuda.synchronize()

    def work(index: int) -> None:
        for _ in range(200):
            fresh = case.clone()
            if index % 2 == 0:
                libattnres.attn_res(*fresh.arguments, backend="native")
                continue
            with pytest.raises(libattnres.UnsupportedError, match=r"cluster_size|compiled"):
                libattnres.attn_res(*fresh.arguments, plan=libattnres.Plan("cluster", cluster_size=5))

    in_threads(NUM_STREAMS, work)
    torch.cuda.synchronize()


@pytest.mark.slow
def test_the_first_calls_of_a_process_may_come_from_many_threads() -> None:
    """Probe, kernel loading and attributes happen once, whoever comes first."""
    run_program(f"""
import torch, libattnres
from libattnres import reference
from test_memory_gpu import in_threads
H = {H}
def tensor(*shape):
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)
weight = tensor(H)
calls = [(tensor(300, H), tensor(300, H), tensor(300, 8, H), weight, weight, weight, 8) for _ in range(16)]
expected = [reference.attn_res(*call).output for call in calls]
torch.cuda.synchronize()
outputs = [None] * 16
def work(index):
    with torch.cuda.stream(torch.cuda.Stream()):
        outputs[index] = libattnres.attn_res(*calls[index], backend="native")
in_threads(16, work)
torch.cuda.synchronize()
for output, wanted in zip(outputs, expected):
    assert reference.compare(output, wanted).ok
""")
