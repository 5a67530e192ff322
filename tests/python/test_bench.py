# SPDX-License-Identifier: Apache-2.0
"""``libattnres bench``, on the CPU or against a stand-in for the GPU; nothing here is about speed."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import libattnres
import pytest
import torch
from libattnres import _core, cli, reference, timing
from libattnres.cli import (
    bench,
    call_cost,
    competitors,
    contenders,
    metadata,
    plots,
    targets,
    walk_steps,
    workload,
)
from libattnres.cli.workload import COMMON, SM_SIDE, VARIANTS, Buffers, Judge, Shape

CPU = torch.device("cpu")
H = 64


def small(shape: Shape) -> Shape:
    return replace(shape, hidden_size=H)


@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        (COMMON, 6 * (8 + 4)),
        (VARIANTS[0], 6 * (8 + 2)),  # no delta: neither read, nor the prefix written
        (VARIANTS[1], 6 * (8 + 4)),  # no norm
        (VARIANTS[2], 6 * (8 + 5)),  # write-back
        (VARIANTS[3], 6 * (8 + 4)),  # padded
        (VARIANTS[4], 6 * (8 + 4)),  # padded by 16 bytes
        (VARIANTS[5], 3 * 8 + 6 * 4),  # B = 2
        (SM_SIDE, 8 + 6 * 4),
    ],
    ids=lambda value: value.name if isinstance(value, workload.Variant) else "",
)
def test_bytes_are_those_the_operator_must_move(variant: workload.Variant, rows: int) -> None:
    assert Shape(6, 8, variant).num_bytes == rows * 14336


@pytest.mark.parametrize("variant", [COMMON, *VARIANTS, SM_SIDE], ids=lambda variant: variant.name)
@pytest.mark.parametrize("num_blocks", [0, 3, 8])
def test_every_variant_is_a_valid_call_and_the_judge_passes_it(
    variant: workload.Variant, num_blocks: int
) -> None:
    shape = small(Shape(4, num_blocks, variant))
    buffers = Buffers(shape, 2, CPU)
    for index in range(2):
        arguments, out = buffers.arguments(index), buffers.out[index]
        judge = Judge(arguments)
        for _ in range(2):  # a second run finds what the first one found
            judge.restore()
            rel_l2, errors = judge.check(
                lambda arguments=arguments, out=out: libattnres.attn_res(
                    *arguments, out=out, backend="torch"
                ),
                lambda arguments=arguments, out=out: (out, arguments[0], arguments[2]),
            )
            assert errors == []
            assert rel_l2 < 2e-3
    if variant.padding:
        assert buffers.prefix.stride(-2) == H + variant.padding
    if variant.shares_bank_entry:
        assert buffers.arguments(0)[2].stride(0) == 0


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda output, prefix, blocks: output.mul_(1.02), "output is off"),
        (lambda output, prefix, blocks: prefix[0, 0].add_(1), "the prefix is not"),
        (lambda output, prefix, blocks: blocks[0, 7].zero_(), "the bank is not"),
    ],
)
def test_the_judge_notices_damage(damage: Callable[..., Any], text: str) -> None:
    buffers = Buffers(small(Shape(2, 3)), 1, CPU)
    buffers.blocks[:, :, 3:] = 1.0
    arguments, out = buffers.arguments(0), buffers.out[0]

    def run() -> None:
        libattnres.attn_res(*arguments, out=out)
        damage(out, arguments[0], arguments[2])

    _, errors = Judge(arguments).check(run, lambda: (out, arguments[0], arguments[2]))
    assert len(errors) == 1
    assert text in errors[0]


def test_bench_on_the_cpu_writes_json_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    arguments = [
        "bench",
        "--device",
        "cpu",
        "--tokens",
        "2",
        "--blocks",
        "1",
        "--mode",
        "hot",
        "--json",
        str(path),
    ]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "median" in printed
    assert "host" in printed
    document = json.loads(path.read_text())
    assert document["command"] == "bench"
    assert document["passed"]
    assert document["copy_gb_per_s"] > 0
    assert {row["backend"] for row in document["rows"]} == {"host", "torch"}
    for row in document["rows"]:
        assert row["bytes"] == 2 * (1 + 4) * 14336
        assert row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
        assert row["copy_fraction"] == pytest.approx(row["gb_per_s"] / document["copy_gb_per_s"])
        assert row["rel_l2"] < 2e-3
        assert row["correct"]
        assert row["kernel"] is None
        assert row["floor_ratio"] is None
        assert (row["mode"], row["sets"]) == ("hot", 1)


def test_a_wrong_backend_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attn_res = libattnres.attn_res

    def wrong(*arguments: Any, out: torch.Tensor, backend: str, **options: Any) -> torch.Tensor:
        return attn_res(*arguments, out=out, backend=backend, **options).mul_(1.1 if backend == "host" else 1)

    monkeypatch.setattr(libattnres, "attn_res", wrong)
    assert cli.main(["bench", "--device", "cpu", "--tokens", "1", "--blocks", "1", "--mode", "hot"]) == 1
    assert "WRONG: host, 1 tokens, 1 blocks, common: output is off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tokens", "0"], "--tokens: expected numbers >= 1, got 0"),
        (["--blocks", "9"], "--blocks: expected numbers from 0 to 8, got 9"),
        (["--device", "meta"], "--device: expected cpu, cuda or cuda:N, got meta"),
        (["--device", "cuda:x"], "--device: expected cpu, cuda or cuda:N, got cuda:x"),
        (["--device", "cpu:1"], "--device: expected cpu, cuda or cuda:N, got cpu:1"),
        (["--device", "cpu", "--cpu"], "expected a CUDA device"),
        (["--device", "cpu", "--targets"], "expected a CUDA device"),
    ],
)
def test_wrong_options_end_with_a_message(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--device", "cpu", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^--device: expected one that is there, got cuda:0"):
        workload.chosen_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert workload.chosen_device(None) == workload.chosen_device("cuda:1") == torch.device("cuda", 1)
    assert workload.chosen_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"^--device: expected one of the 2 that PyTorch sees, got cuda:2$"):
        workload.chosen_device("cuda:2")


def test_a_debug_build_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_core, "DEBUG_BUILD", True)
    assert cli.main(["bench", "--device", "cpu"]) == 2
    assert cli.main(["walk", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("expected a release build") == 2


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU whose memory is the CPU's and whose backends are all eager PyTorch; launches are noted."""
    noted = SimpleNamespace(backends=[], floors=0, work=[])
    attn_res = libattnres.attn_res

    def run(*arguments: Any, backend: str | None = None, plan: Any = None, **options: Any) -> torch.Tensor:
        noted.backends.append((backend, options.get("pdl"), plan, options.pop("batch_invariant", None)))
        if plan is not None and plan.kernel == "cluster":
            raise libattnres.UnsupportedError("permutation: expected one that is compiled")
        return attn_res(*arguments, backend="torch", **options)

    def floor(*call: Any) -> None:
        assert len(call) == len(_core.CALL_FIELDS) + 1
        noted.floors += 1

    def time(work: list[timing.Launch], **options: Any) -> timing.Timing:
        noted.work.append(len(work))
        work[0]()
        work[-1]()
        return timing.Timing(2.0, 1.0, 3.0, 5, len(work))

    everywhere = replace(libattnres.probe(), backends=dict.fromkeys(("native", "triton", "torch", "host")))
    monkeypatch.setattr(libattnres, "probe", lambda: everywhere)
    monkeypatch.setattr(libattnres, "attn_res", run)
    monkeypatch.setattr(_core, "floor", floor)
    monkeypatch.setattr(_core, "time_forward", lambda *call: 1e-6 * call[-1])
    monkeypatch.setattr(_core, "time_plan", lambda *call: 5e-7 * call[-1])
    monkeypatch.setattr(timing, "time_graph", time)
    monkeypatch.setattr(timing, "is_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(
        metadata, "gpu_state", lambda device: {"name": "fake", "num_sms": 10, "l2_bytes": 10 * 14336}
    )
    monkeypatch.setattr(bench, "COPY_BYTES", {"cuda": 1 << 10})
    monkeypatch.setattr(call_cost, "CPU_CALLS", 2)
    monkeypatch.setattr(call_cost, "CPU_ROUNDS", 1)
    monkeypatch.setattr(
        contenders,
        "native_plans",
        lambda: [
            ("ring 1 x 1", libattnres.Plan("ring", rows_per_stage=1, ctas_per_sm=1)),
            ("cluster 2", libattnres.Plan("cluster", cluster_size=2)),
        ],
    )
    monkeypatch.setattr(contenders, "find", lambda wanted: ([], ["other: other is not installed"]))
    return noted


def test_each_backend_and_mode_is_forced_in_the_same_graph_structure(
    fake_gpu: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    arguments = ["--tokens", "1", "--blocks", "2", "--kernels", "--batch-invariant", "--json", str(path)]
    assert cli.main(["bench", "--device", "cpu", *arguments]) == 0
    document = json.loads(path.read_text())
    assert [row["name"] for row in document["rows"]] == [
        "floor",
        "native early",
        "native wait",
        "native early batch-invariant",
        "native early ring 1 x 1",
        "native wait batch-invariant",
        "native wait ring 1 x 1",
        "triton early",
        "triton wait",
        "torch",
    ]
    assert set(fake_gpu.backends) >= {
        ("native", "early", None, None),
        ("native", "wait", None, True),
        ("native", "early", libattnres.Plan("ring", rows_per_stage=1, ctas_per_sm=1), None),
        ("triton", "wait", None, None),
    }
    # 6 rows a launch, three times 10 rows of cache: 5 sets, then as often as a millisecond asks for.
    assert {row["sets"] for row in document["rows"]} == {5}
    assert set(fake_gpu.work[1:]) == {5 * timing.repeats(6 * 14336, 5)}
    assert fake_gpu.floors == 2
    assert {row["floor_ratio"] for row in document["rows"]} == {1.0}
    printed = capsys.readouterr().out
    assert "not measured: native early cluster 2, 2 blocks, common: permutation: expected one" in printed
    assert "not measured: other: other is not installed" in printed


def test_targets_measure_everything_that_the_goals_are_about(
    fake_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(targets, "TOKENS", (1, 2))
    monkeypatch.setattr(targets, "BLOCKS", (8,))
    monkeypatch.setattr(targets, "WALK_BOUNDS", {1: 2.2})
    monkeypatch.setattr(targets, "VARIANT_MIN_TOKENS", 2)
    monkeypatch.setattr(targets, "SHARED_ROWS_MIN_ENTRIES", 2)
    monkeypatch.setattr(bench, "VARIANT_TOKENS", (2,))
    monkeypatch.setattr(bench, "SM_SIDE_TOKENS", 4)
    first_calls = walk_steps.walk_calls()[:3]
    monkeypatch.setattr(walk_steps, "walk_calls", lambda: first_calls)
    path = tmp_path / "targets.json"
    assert cli.main(["bench", "--device", "cpu", "--targets", "--json", str(path)]) == 1  # all take as long
    document = json.loads(path.read_text())
    assert document["passed"], document["failures"]
    assert {row["variant"] for row in document["rows"]} == {"common", *(variant.name for variant in VARIANTS)}
    assert {row["us_per_token_and_sm"] for row in document["sm_side"]} == {2.0 * 10 / 4}
    assert document["cpu_us"]["C call"] == pytest.approx(1.0)
    assert document["cpu_us"]["eager call"] > 0
    assert {row["backend"] for row in document["walk"]["rows"]} == {"native", "triton"}
    judged = {goal["goal"]: goal["met"] for goal in document["targets"]}
    assert judged["T = 1, 8 blocks"] is not None
    assert judged["B = 2, 8 blocks, >= 2 entries"] is False
    assert judged["CPU time, C call"] is True
    assert judged["walk, T = 1"] is not None


def test_targets_are_about_a_cold_cache(
    fake_gpu: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--device", "cpu", "--targets", "--mode", "hot"]) == 2
    assert "--targets: expected --mode cold" in capsys.readouterr().err


def test_an_error_of_the_device_keeps_what_was_measured(
    fake_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = libattnres.attn_res

    def failing(*arguments: Any, backend: str | None = None, **options: Any) -> torch.Tensor:
        if backend == "triton":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return run(*arguments, backend=backend, **options)

    monkeypatch.setattr(libattnres, "attn_res", failing)
    path = tmp_path / "bench.json"
    assert cli.main(["bench", "--device", "cpu", "--tokens", "1", "--blocks", "2", "--json", str(path)]) == 1
    document = json.loads(path.read_text())
    assert {row["backend"] for row in document["rows"]} == {"floor", "native", "torch"}
    assert len(document["failures"]) == 2
    assert "illegal memory access" in document["failures"][0]


def foreign_module(name: str) -> Any:
    """What a package offers, written here from its documented signature."""

    def mix(sources: torch.Tensor, query: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        blocks = sources.transpose(0, 1)
        result = reference.attn_res(
            sources[-1], None, blocks, weight, query, None, sources.shape[0] - 1, eps=eps
        )
        return result.output.to(sources.dtype)

    def attn_res(*arguments: Any) -> torch.Tensor:
        assert len(arguments) == 10
        return libattnres.attn_res(*arguments, backend="torch")

    return {
        "vllm": SimpleNamespace(attn_res=attn_res),
        "fla": SimpleNamespace(
            fused_attnres=lambda query, residuals, weight, eps: mix(residuals, query, weight, eps)
        ),
        "liger": SimpleNamespace(
            attn_res_forward=lambda blocks, query, weight, eps: (
                mix(blocks, query, weight, eps),
                None,
                None,
                None,
            )
        ),
        "torch.compile": torch,
    }[name]


@pytest.mark.parametrize("competitor", competitors.COMPETITORS, ids=lambda competitor: competitor.name)
@pytest.mark.parametrize("variant", [COMMON, VARIANTS[0], VARIANTS[1]], ids=lambda variant: variant.name)
def test_adapters_do_what_one_call_does(
    competitor: competitors.Competitor, variant: workload.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    shape = small(Shape(4, 3, variant))
    assert competitor.unsupported(shape) is None
    buffers = Buffers(shape, 1, CPU)
    judge = Judge(buffers.arguments(0))
    prepared = competitor.load(foreign_module(competitor.name))(*buffers.arguments(0))
    rel_l2, errors = judge.check(prepared.run, prepared.result)
    # Plain PyTorch rounds the mix to bfloat16 before it is normalised.
    assert rel_l2 < 4e-3
    assert [error for error in errors if not error.startswith("output is off")] == []


def test_adapters_say_what_they_cannot_run() -> None:
    by_name = {competitor.name: competitor for competitor in competitors.COMPETITORS}
    writing, padded, shared = (Shape(4, 3, VARIANTS[index]) for index in (2, 3, 5))
    assert by_name["vllm"].unsupported(writing) is None
    assert by_name["vllm"].unsupported(shared) == "has one bank entry per token"
    assert by_name["fla"].unsupported(padded) == "has no variant 'padded'"
    assert by_name["liger"].unsupported(writing) == "has no variant 'write-back'"


def test_missing_and_broken_packages_are_skipped_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = types.ModuleType("fla")
    broken.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "fla", broken)
    monkeypatch.setitem(sys.modules, "vllm", None)
    found, skipped = competitors.find(["vllm", "fla", "torch.compile"])
    assert [competitor.name for competitor, _ in found] == ["torch.compile"]
    assert skipped[0].startswith("vllm: ")
    assert skipped[1].startswith("fla: fla.ops.attnres.fused: ModuleNotFoundError")


def test_torch_compile_is_measured_only_when_it_is_named() -> None:
    found, skipped = competitors.find(None)
    names = [competitor.name for competitor, _ in found] + [line.partition(":")[0] for line in skipped]
    assert "torch.compile" not in names
    assert set(names) == {"vllm", "fla", "liger"}


def test_plot_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert cli.main(["bench", "--device", "cpu", "--plot", str(tmp_path)]) == 2
    assert "--plot: expected matplotlib to be installed" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["cold", "hot", "events"])
def test_bench_on_a_gpu(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    arguments = ["--tokens", "1", "32", "--blocks", "0", "3", "--mode", mode, "--variants"]
    assert cli.main(["bench", *arguments, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    for row in document["rows"]:
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert row["gb_per_s"] < 3 * document["copy_gb_per_s"] or mode == "hot"
    if libattnres.probe().backends["native"] is None:
        assert {"floor", "native"} <= {row["backend"] for row in document["rows"]}
