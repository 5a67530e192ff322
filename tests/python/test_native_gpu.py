# SPDX-License-Identifier: Apache-2.0
"""The native backend on a GPU: right, deterministic, on the right stream, capturable, and never replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libattnres
import pytest
import torch
from libattnres import cli, reference
from libattnres.backends import torch as torch_backend
from libattnres.backends import triton as triton_backend
from programs import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("native_device")]

H = 7168


@pytest.fixture
def only_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other GPU backend that runs fails the test."""

    def wrong_backend(*arguments: Any) -> None:
        raise AssertionError("another backend ran")

    monkeypatch.setattr(triton_backend, "forward", wrong_backend)
    monkeypatch.setattr(torch_backend, "forward", wrong_backend)


def assert_right(case: Any, **options: Any) -> torch.Tensor:
    expected = reference.attn_res(*case.arguments)
    out = torch.full_like(case.prefix, float("nan"))
    output = libattnres.attn_res(*case.arguments, out=out, **options)
    comparison = reference.compare(output, expected.output)
    assert comparison.ok, comparison
    assert reference.same_bits(case.prefix, expected.prefix)
    assert reference.same_bits(case.blocks, expected.blocks)
    return output


@pytest.mark.parametrize("num_tokens", [1, 17, 133, 700])  # one; few; a wave and one; several waves
@pytest.mark.parametrize("num_blocks", [0, 1, 3, 8])
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("has_output_norm", [True, False])
@pytest.mark.parametrize("writes", [False, True])
def test_every_variant_runs_natively_and_is_right(
    num_tokens: int,
    num_blocks: int,
    has_delta: bool,
    has_output_norm: bool,
    writes: bool,
    gpu_case: Callable[..., Any],
    only_native: None,
) -> None:
    case = gpu_case(num_tokens=num_tokens, num_blocks=num_blocks)
    if not has_delta:
        case = case.with_(delta=None)
    if not has_output_norm:
        case = case.with_(output_norm_weight=None)
    if writes:
        case = case.with_(block_write_idx=num_blocks // 2)  # a row that is read: snapshot semantics
    assert libattnres.explain(*case.arguments).backend == "native"
    assert_right(case)


@pytest.mark.slow
def test_verify_quick_passes_for_native(only_native: None, tmp_path: Path) -> None:
    path = tmp_path / "verify.json"
    assert cli.main(["verify", "--backend", "native", "--quick", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert {result["backend"] for result in document["results"]} == {"native"}
    assert all(result["checks"] > 0 for result in document["results"])


@pytest.mark.slow
def test_the_whole_walk_runs_natively(only_native: None, tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    assert cli.main(["demo", "--device", "cuda", "--tokens", "16", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert len(document["calls"]) == 187
    assert {call["backend"] for call in document["calls"]} == {"native"}


def test_an_eager_walk_without_the_reference_runs_natively(only_native: None) -> None:
    """The calls as the model makes them: automatic backend, fresh outputs, plain tensors."""
    from libattnres.cli.demo import Walk
    from libattnres.model_walk import walk_calls

    walk = Walk(16, torch.device("cuda"), seed=0, backend=None)
    with torch.inference_mode():
        for index, call in enumerate(walk_calls()):
            output = libattnres.attn_res(*walk.arguments(index, call))
            assert output.isfinite().all()


@pytest.mark.parametrize("prefixes_per_row", [1, 2])
def test_padded_rows(prefixes_per_row: int, gpu_case: Callable[..., Any], only_native: None) -> None:
    case = gpu_case(num_tokens=34, prefixes_per_row=prefixes_per_row)
    T = 34 // prefixes_per_row
    memory = torch.full((34, H + 24), float("nan"), device="cuda").bfloat16()
    bank = torch.full((T, 9, H + 8), float("nan"), device="cuda").bfloat16()
    prefix, blocks = memory[:, 8 : H + 8], bank[:, :8, :H]
    prefix.copy_(case.prefix)
    blocks.copy_(case.blocks)
    assert_right(case.with_(prefix=prefix, blocks=blocks))
    assert memory[:, :8].isnan().all()
    assert memory[:, H + 8 :].isnan().all()
    assert bank[..., H:].isnan().all()


def test_one_bank_entry_expanded_over_all_tokens(gpu_case: Callable[..., Any], only_native: None) -> None:
    case = gpu_case(num_tokens=33)
    assert_right(case.with_(blocks=case.blocks[:1].expand(33, 8, H)))


# Fallback: each of these is valid, and no native kernel can serve it.


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, `elements` past a 16-byte boundary."""
    memory = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    return memory[elements:].view(tensor.shape).copy_(tensor)


UNSERVED: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "float16": ({"dtype": torch.float16}, lambda case: case, "bfloat16"),
    "float32": ({"dtype": torch.float32}, lambda case: case, "bfloat16"),
    "another H": ({"hidden_size": 1024}, lambda case: case, "H"),
    "three prefixes per bank row": ({"num_tokens": 6, "prefixes_per_row": 3}, lambda case: case, "B"),
    "misaligned prefix": ({}, lambda case: case.with_(prefix=shifted(case.prefix, 1)), "prefix"),
    "misaligned delta": ({}, lambda case: case.with_(delta=shifted(case.delta, 4)), "delta"),
    "misaligned bank": ({}, lambda case: case.with_(blocks=shifted(case.blocks, 1)), "blocks"),
    "misaligned weight": ({}, lambda case: case.with_(qk_weight=shifted(case.qk_weight, 1)), "qk_weight"),
    "misaligned rows": (
        {},
        lambda case: case.with_(prefix=torch.cat([case.prefix, case.delta[:, :1]], 1)[:, :H]),
        "prefix",
    ),
}


@pytest.mark.parametrize("what", UNSERVED)
def test_auto_falls_back_to_triton_and_a_forced_native_raises(
    what: str, gpu_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, change, reason = UNSERVED[what]
    case = change(gpu_case(**options))
    explanation = libattnres.explain(*case.arguments)
    assert reason in explanation.reasons["native"]
    if libattnres.probe().backends["triton"] is not None:
        assert explanation.backend == "torch"
    else:
        assert explanation.backend == "triton"
        monkeypatch.setattr(torch_backend, "forward", lambda *arguments: pytest.fail("torch ran"))
    before = case.clone()
    with pytest.raises(libattnres.UnsupportedError, match=reason):
        libattnres.attn_res(*case.arguments, backend="native")
    assert reference.same_bits(case.prefix, before.prefix)
    assert_right(case)


def test_a_plan_that_is_not_compiled_raises(gpu_case: Callable[..., Any]) -> None:
    case = gpu_case()
    for plan in (
        libattnres.Plan("cluster", cluster_size=5),
        libattnres.Plan("cluster", rows_per_stage=1),
        libattnres.Plan("ring", cluster_size=4),
    ):
        with pytest.raises(libattnres.UnsupportedError, match=r"^plan: expected .*, got 'native': "):
            libattnres.attn_res(*case.arguments, plan=plan)


def test_explain_gives_the_plan_that_was_asked_for(gpu_case: Callable[..., Any]) -> None:
    case = gpu_case(num_tokens=300)
    plan = libattnres.explain(*case.arguments, plan=libattnres.Plan("ring", 2, 1)).plan
    assert plan is not None
    assert (plan["kernel"], plan["rows_per_stage"], plan["ctas_per_sm"]) == ("ring", 2, 1)
    assert plan["grid_size"] <= 300
    automatic = libattnres.explain(*case.arguments)
    assert automatic.source == "auto"
    assert automatic.plan is not None
    assert automatic.plan["num_sources"] == 4


def test_no_tokens_launch_nothing(gpu_case: Callable[..., Any], only_native: None) -> None:
    case = gpu_case(num_tokens=0)
    assert libattnres.explain(*case.arguments).backend == "native"
    output = libattnres.attn_res(*case.arguments)
    assert output.shape == (0, H)
    torch.cuda.synchronize()


# Determinism


@pytest.mark.parametrize("num_blocks", [6, 8])  # 7 and 9 sources
def test_many_runs_give_the_same_bits(num_blocks: int, gpu_case: Callable[..., Any]) -> None:
    case = gpu_case(num_tokens=8192, num_blocks=num_blocks)
    prefix = case.prefix.clone()
    first = libattnres.attn_res(*case.arguments, backend="native").clone()
    for _ in range(20):
        case.prefix.copy_(prefix)
        output = libattnres.attn_res(*case.arguments, backend="native")
        assert reference.same_bits(output, first)


@pytest.mark.parametrize("num_tokens", [5, 700])
def test_pdl_modes_give_the_same_bits(num_tokens: int, gpu_case: Callable[..., Any]) -> None:
    case = gpu_case(num_tokens=num_tokens, block_write_idx=1)
    torch.cuda.synchronize()
    outputs = []
    for pdl in ("wait", "early", "off"):
        copy = case.clone()
        torch.cuda.synchronize()
        outputs.append(libattnres.attn_res(*copy.arguments, backend="native", pdl=pdl))
    assert reference.same_bits(outputs[0], outputs[1])
    assert reference.same_bits(outputs[0], outputs[2])


@pytest.mark.parametrize("pdl", ["wait", "off"])
def test_a_call_sees_what_the_call_before_it_wrote(pdl: str, gpu_case: Callable[..., Any]) -> None:
    """Back to back on one stream, each reading the bank row and the prefix that the last one wrote."""
    case = gpu_case(num_tokens=133, num_blocks=0)
    deltas = [case.delta * scale for scale in (1, -2, 3, -4, 5, -6, 7, -8)]
    expected, got = case.clone(), case.clone()
    outputs = []
    for index, delta in enumerate(deltas):
        outputs.append(
            libattnres.attn_res(
                *got.with_(delta=delta, num_blocks=index, block_write_idx=index).arguments,
                backend="native",
                pdl=pdl,
            )
        )
    for index, delta in enumerate(deltas):
        result = reference.attn_res(
            *expected.with_(delta=delta, num_blocks=index, block_write_idx=index).arguments
        )
        assert reference.compare(outputs[index], result.output).ok
        expected = expected.with_(prefix=result.prefix, blocks=result.blocks)
    assert reference.same_bits(got.prefix, expected.prefix)
    assert reference.same_bits(got.blocks, expected.blocks)


# Streams, graphs, devices


def test_the_call_runs_on_the_current_side_stream_and_does_not_wait(gpu_case: Callable[..., Any]) -> None:
    libattnres.warmup()
    case = gpu_case(num_tokens=64)
    values = case.prefix.clone()
    expected = libattnres.attn_res(*case.clone().arguments, backend="native")
    case.prefix.zero_()
    out = torch.full_like(values, float("nan"))
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        case.prefix.copy_(values)  # only a call ordered after this sees the values
        libattnres.attn_res(*case.arguments, backend="native", out=out)
        done.record()
    assert not done.query()
    stream.synchronize()
    assert reference.same_bits(out, expected)


def test_capture_after_warmup_replays_with_new_inputs(gpu_case: Callable[..., Any]) -> None:
    libattnres.warmup()
    case = gpu_case(num_tokens=40)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = libattnres.attn_res(*case.arguments, backend="native")
    for seed in (1, 2):
        fresh = gpu_case(num_tokens=40, seed=seed)
        for name in ("prefix", "delta", "blocks", "norm_weight", "qk_weight", "output_norm_weight"):
            getattr(case, name).copy_(getattr(fresh, name))
        expected = libattnres.attn_res(*fresh.arguments, backend="native")
        graph.replay()
        torch.cuda.synchronize()
        assert reference.same_bits(output, expected)
        assert reference.same_bits(case.prefix, fresh.prefix)


@pytest.mark.parametrize("warm", [True, False])
def test_the_first_call_of_a_process_may_be_captured(warm: bool) -> None:
    run_program(f"""
import torch, libattnres
from libattnres import reference
H, bf16 = {H}, torch.bfloat16
if {warm}:
    libattnres.warmup()
def tensor(*shape):
    return torch.randn(*shape, device="cuda").to(bf16)
prefix, delta, blocks, weight = tensor(33, H), tensor(33, H), tensor(33, 8, H), tensor(H)
expected = reference.attn_res(prefix, delta, blocks, weight, weight, weight, 8)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    output = libattnres.attn_res(prefix, delta, blocks, weight, weight, weight, 8, backend="native")
graph.replay()
torch.cuda.synchronize()
assert reference.compare(output, expected.output).ok
assert reference.same_bits(prefix, expected.prefix)
""")


def test_import_and_a_cpu_call_make_no_cuda_context() -> None:
    run_program("""
import ctypes, torch, libattnres
weight = torch.ones(64)
libattnres.attn_res(torch.ones(4, 64), None, torch.ones(4, 8, 64), weight, weight, None, 8)
assert not torch.cuda.is_initialized()
cuda = ctypes.CDLL("libcuda.so.1")
flags, active = ctypes.c_uint(), ctypes.c_int()
state = cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
assert state == 3, f"the driver was initialised: {state}"  # CUDA_ERROR_NOT_INITIALIZED
""")


def test_cpu_tensor_among_cuda_tensors_is_refused(gpu_case: Callable[..., Any]) -> None:
    case = gpu_case()
    with pytest.raises(ValueError, match=r"^norm_weight: expected device cuda:0 as prefix has, got cpu"):
        libattnres.attn_res(*case.with_(norm_weight=case.norm_weight.cpu()).arguments)


# torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_equals_eager_natively(mode: str, gpu_case: Callable[..., Any], only_native: None) -> None:
    torch._dynamo.reset()
    case = gpu_case(num_tokens=33)
    weights = case.arguments[3:6]

    def layers(prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = libattnres.attn_res(prefix, delta, blocks, *weights, 3, 3)
        second = libattnres.attn_res(prefix, first * 2, blocks, *weights, 4)
        return first, second

    compiled = torch.compile(layers, fullgraph=True, mode=mode)
    with torch.inference_mode():
        for _ in range(4):  # CUDA graph trees record on the second run and replay after it
            eager, again = case.clone(), case.clone()
            expected = layers(eager.prefix, eager.delta, eager.blocks)
            result = compiled(again.prefix, again.delta, again.blocks)
            for left, right in zip(expected, result, strict=True):
                assert reference.same_bits(left, right)
            assert reference.same_bits(again.prefix, eager.prefix)
            assert reference.same_bits(again.blocks, eager.blocks)


@pytest.mark.slow
def test_opcheck_on_the_gpu(gpu_case: Callable[..., Any]) -> None:
    case = gpu_case(num_blocks=8)
    torch.library.opcheck(
        torch.ops.libattnres.attn_res_.default,
        (case.prefix, case.delta, case.blocks, *case.arguments[3:7], 3),
    )
