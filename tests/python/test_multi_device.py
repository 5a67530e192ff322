# SPDX-License-Identifier: Apache-2.0
"""More than one GPU. What the host side does for each device is tested without any in tests/cpp."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import libattnres
import pytest
import torch
from libattnres import _core, reference
from programs import run_program

TENSORS = ("prefix", "delta", "blocks", "norm_weight", "qk_weight", "output_norm_weight")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("native_device")]


@pytest.fixture
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def on(case: Any, device: str) -> Any:
    """The same values on another device, or copied where they are there."""
    return case.with_(
        **{
            name: value.to(device, copy=True)
            for name in TENSORS
            if (value := getattr(case, name)) is not None
        }
    )


@pytest.fixture
def all_devices() -> list[int]:
    return list(range(torch.cuda.device_count()))


def test_the_probe_knows_each_device(all_devices: list[int]) -> None:
    probe = libattnres.probe()
    assert [device.index for device in probe.devices] == all_devices
    for index in all_devices:
        found = _core.probe(index)
        properties = torch.cuda.get_device_properties(index)
        assert (found["compute_major"], found["compute_minor"]) == (properties.major, properties.minor)
        assert found["num_sms"] == properties.multi_processor_count
        assert found["device_name"] == properties.name


def test_a_device_that_is_not_there_is_no_crash(all_devices: list[int]) -> None:
    for index in (len(all_devices), 255, 256, 100_000):
        found = _core.probe(index)
        assert not found["native"]
        assert f"no CUDA device {index}" in found["reason"]
        with pytest.raises((ValueError, RuntimeError)):
            libattnres.warmup(index)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("num_tokens", [3, 700])  # cluster kernel; ring kernel, whose limit is raised
@pytest.mark.usefixtures("two_devices")
def test_a_device_that_is_not_current(
    num_tokens: int, all_devices: list[int], gpu_case: Callable[..., Any]
) -> None:
    case = gpu_case(num_tokens=num_tokens, block_write_idx=3)
    expected = reference.attn_res(*case.arguments)
    for current in all_devices:
        for device in all_devices:
            other = on(case, f"cuda:{device}")
            torch.cuda.synchronize(device)
            with torch.cuda.device(current):
                output = libattnres.attn_res(*other.arguments, backend="native")
                assert torch.cuda.current_device() == current
            assert output.device == torch.device("cuda", device)
            assert reference.compare(output.to("cuda:0"), expected.output).ok
            assert reference.same_bits(other.prefix.to("cuda:0"), expected.prefix)
            assert reference.same_bits(other.blocks.to("cuda:0"), expected.blocks)


@pytest.mark.parametrize("name", [*TENSORS, "out"])
@pytest.mark.usefixtures("two_devices")
def test_tensors_on_different_devices_are_refused(name: str, gpu_case: Callable[..., Any]) -> None:
    case = gpu_case(num_tokens=5)
    before = case.clone()
    out = torch.full_like(case.prefix, float("nan"))
    mixed, mixed_out = case, out
    if name == "out":
        mixed_out = out.to("cuda:1")
    else:
        mixed = case.with_(**{name: getattr(case, name).to("cuda:1")})
    culprit = "(delta|blocks)" if name == "prefix" else name  # all others are held against prefix
    for backend in (None, "native", "triton", "torch"):
        with pytest.raises(ValueError, match=rf"^{culprit}: expected device cuda:[01] as prefix has"):
            libattnres.attn_res(*mixed.arguments, out=mixed_out, backend=backend)
    assert mixed_out.isnan().all()
    for tensor in TENSORS:
        assert reference.same_bits(getattr(case, tensor), getattr(before, tensor))


@pytest.mark.usefixtures("two_devices")
def test_side_streams_and_graphs_of_another_device(gpu_case: Callable[..., Any]) -> None:
    case = gpu_case(num_tokens=300)
    expected = libattnres.attn_res(*case.clone().arguments, backend="native")
    other = on(case, "cuda:1")
    start = other.clone()
    out = torch.full_like(other.prefix, float("nan"))
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream), torch.cuda.device(0):  # the tensors decide
            libattnres.attn_res(*other.arguments, out=out, backend="native")
        assert out.isnan().all()
        graph.replay()
        torch.cuda.synchronize()
        assert reference.same_bits(out.to("cuda:0"), expected)
        for name in TENSORS:
            getattr(other, name).copy_(getattr(start, name))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
    assert reference.same_bits(out.to("cuda:0"), expected)


@pytest.mark.usefixtures("two_devices")
def test_threads_on_different_devices(all_devices: list[int], gpu_case: Callable[..., Any]) -> None:
    case = gpu_case(num_tokens=200)
    expected = libattnres.attn_res(*case.clone().arguments, backend="native").cpu()
    cases = [on(case, f"cuda:{device}") for device in all_devices]
    for device in all_devices:
        torch.cuda.synchronize(device)
    errors: list[BaseException] = []

    def work(device: int) -> None:
        try:
            for _ in range(50):
                output = libattnres.attn_res(*cases[device].clone().arguments, backend="native")
                assert reference.same_bits(output.cpu(), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in all_devices * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("warmed", [None, 0, 1])
def test_the_second_device_first(warmed: int | None) -> None:
    """A process that never touches device 0, or warms up one and uses the other."""
    run_program(f"""
import torch, libattnres
from libattnres import reference
H = 7168
if {warmed} is not None:
    libattnres.warmup({warmed})
def tensor(*shape):
    return torch.randn(*shape, device="cuda:1").to(torch.bfloat16)
prefix, delta, blocks, weight = tensor(700, H), tensor(700, H), tensor(700, 8, H), tensor(H)
arguments = (prefix, delta, blocks, weight, weight, weight, 8)
expected = reference.attn_res(*arguments)
torch.cuda.synchronize(1)
output = libattnres.attn_res(*arguments, backend="native")
torch.cuda.synchronize(1)
assert reference.compare(output, expected.output).ok
""")
