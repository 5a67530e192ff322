# SPDX-License-Identifier: Apache-2.0
"""``walk`` and ``bench`` in two phases, and ``explain``, on the CPU and against a stand-in for the GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import libattnres
import pytest
import torch
from libattnres import _core, _two_phase_plan, cli, timing
from libattnres._two_phase_call import BankCall
from libattnres.cli import metadata, phases, report, targets, walk, walk_steps
from libattnres.cli.console import Console
from libattnres.cli.walk_steps import BankPass, Implementation
from libattnres.model_walk import HIDDEN_SIZE, walk_calls

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
ON = Implementation("host", two_phase=True)


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> int:
    """A walk that is over soon, with two bank rows: 25 calls on the first, one of them writes, and two."""
    calls = walk_calls()[:27]
    monkeypatch.setattr(walk_steps, "walk_calls", lambda: calls)
    return len(calls)


# --- walk -----------------------------------------------------------------------------------------------


def test_passes_of_a_step_are_those_of_the_model() -> None:
    passes = walk_steps.bank_passes(walk_calls(), ON, 1, CPU)
    assert [(one.num_blocks, one.count) for one in passes] == [(n, 24) for n in range(1, 8)] + [(8, 18)]
    assert [one.first for one in passes] == [1 + 24 * n for n in range(8)]
    assert all(one.follows == one.first - 1 for one in passes)
    assert walk_steps.bank_passes(walk_calls(), Implementation("host"), 1, CPU) == []
    assert walk_steps.bank_passes(walk_calls(), Implementation("host", two_phase=None), 1, CPU) == []


def test_automatic_passes_follow_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_two_phase_plan, "unmeasured", lambda *arguments: None)
    monkeypatch.setattr(_two_phase_plan, "TABLE", (_two_phase_plan.Row(float("inf"), 5, 20),))
    passes = walk_steps.bank_passes(walk_calls(), Implementation("native", two_phase=None), 1, CUDA)
    assert [(one.num_blocks, one.count) for one in passes] == [(5, 24), (6, 24), (7, 24)]
    one = walk_steps.Walk(1, CPU, 0)
    # 24 calls merge 5 rows where they moved n + 4, and a pass moves n + 24.
    saved = sum(24 * (n + 4) - 24 * 5 - (n + 24) for n in (5, 6, 7))
    auto, plain = Implementation("native", two_phase=None), Implementation("native")
    assert one.rows_moved(plain) - one.rows_moved(auto) == saved
    assert one.rows_moved(plain) == sum(call.rows_moved for call in walk_calls()) == 1554


def test_memory_bounds_the_calls_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk_steps, "MAX_BANK_BYTES", 10 * 3 * (2 * HIDDEN_SIZE + 4))
    passes = walk_steps.bank_passes(walk_calls()[:26], ON, 3, CPU)
    assert passes == [
        BankPass(1, 8, 1, 0),
        BankPass(9, 8, 1, None),
        BankPass(17, 8, 1, None),
        BankPass(25, 1, 2, 24),
    ]


def test_launches_are_producers_calls_and_passes_in_order(
    few_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for name in ("attn_res", "attn_res_bank", "attn_res_merge"):

        def record(*arguments: Any, name: str = name, **options: Any) -> None:
            order.append(f"{name} {options['pdl']}")

        monkeypatch.setattr(libattnres, name, record)
    monkeypatch.setattr(torch, "mul", lambda *arguments, **options: order.append("producer"))
    early = Implementation("native", "early", True)
    one = walk_steps.Walk(1, CPU, 0)
    for launch in one.launches(early):
        launch()
    merges = ["producer", "attn_res_merge early"]
    # The pass may not read early: the kernel right before it wrote a row.
    assert order == [
        "producer",
        "attn_res early",
        "attn_res_bank wait",
        *merges * 24,
        "attn_res_bank wait",
        *merges * 2,
    ]
    order.clear()
    for launch in one.launches(early, [3, 4]):
        launch()
    assert order == merges * 2
    order.clear()
    for launches in one.pass_launches(early).values():
        for launch in launches:
            launch()
    assert order == ["attn_res_bank wait"] * 2
    order.clear()
    monkeypatch.setattr(walk_steps, "MAX_BANK_BYTES", 12 * (2 * HIDDEN_SIZE + 4))
    for launch in walk_steps.Walk(1, CPU, 0).launches(early):
        launch()
    between = order[2 + 1 + 24 :]
    assert between[:4] == ["producer", "attn_res_bank wait", "attn_res_merge wait", "producer"]


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_every_group_is_right_in_two_phases(few_calls: int, backend: str) -> None:
    one = walk_steps.Walk(2, CPU, 0)
    rel_l2, errors = one.check(Implementation(backend, two_phase=True))
    assert errors == []
    assert 0 < rel_l2 < 2.6e-3
    assert not one.blocks[:, :, :2].isnan().any()
    assert one.blocks[:, :, 2:].isnan().all()


def test_a_wrong_merge_is_named(few_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    merge = libattnres.attn_res_merge
    monkeypatch.setattr(libattnres, "attn_res_merge", lambda *a, **k: merge(*a, **k).mul_(1.1))
    _, errors = walk_steps.Walk(1, CPU, 0).check(ON)
    assert errors[0].startswith("host two-phase, layer0.mlp: output is off")


def test_walk_has_both_ways_and_their_ratio(few_calls: int, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "walk.json"
    arguments = ["walk", "--device", "cpu", "--backend", "host", "--tokens", "1", "--two-phase", "on"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    assert "one phase / this" in capsys.readouterr().out
    document = json.loads(path.read_text())
    one, two = document["rows"]
    assert (one["name"], one["two_phase"], one["bank_passes"]) == ("host", "off", 0)
    assert (two["name"], two["two_phase"], two["bank_passes"]) == ("host two-phase", "on", 2)
    assert one["one_phase_ratio"] is None
    if one["net_us"] > 0 and two["net_us"] > 0:
        assert two["one_phase_ratio"] == pytest.approx(one["net_us"] / two["net_us"])
    # 24 calls merge a row where they read one, and two read two; the passes move 1 + 24 and 2 + 2.
    assert two["bytes"] - one["bytes"] == (25 + 4 - 2) * 2 * HIDDEN_SIZE
    line = report.KINDS["walk-two-phase"](document).splitlines()[2]
    assert line.startswith("| 1 | wall | host two-phase | 2 |")


def test_graphs_in_two_phases_give_shares_that_add_up(
    few_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device on which a producer takes 1 us, a call 3, a merge 2 and a pass 10."""
    spent = [0.0]
    costs = {"attn_res": 3.0, "attn_res_bank": 10.0, "attn_res_merge": 2.0}
    calls = {name: getattr(libattnres, name) for name in costs}
    for name, cost in costs.items():

        def run(
            *arguments: Any,
            backend: str,
            cost: float = cost,
            name: str = name,
            **options: Any,
        ) -> Any:
            spent[0] += cost
            return calls[name](*arguments, backend="host", **options)

        monkeypatch.setattr(libattnres, name, run)
    multiply = torch.mul

    def produce(*arguments: Any, **options: Any) -> torch.Tensor:
        spent[0] += 1.0
        return multiply(*arguments, **options)

    def replay(work: list[timing.Launch], **options: Any) -> timing.Timing:
        spent[0] = 0.0
        for launch in work:
            launch()
        each = spent[0] / len(work)
        return timing.Timing(each, each, each, 1, len(work))

    monkeypatch.setattr(timing, "is_gpu", lambda device: True)
    monkeypatch.setattr(timing, "time_graph", replay)
    monkeypatch.setattr(torch, "mul", produce)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(metadata, "gpu_state", lambda device: {"l2_bytes": 200 * 14336})
    monkeypatch.setattr(walk, "SHARE_US", 1.0)
    results = walk.measure_graphs([1], ["native"], ["early"], CPU, Console(), two_phase="on")
    assert results["failures"] == []
    one, two = results["rows"]
    assert one["net_us"] == pytest.approx(3.0 * 27)
    assert two["net_us"] == pytest.approx(3.0 + 2.0 * 26 + 2 * 10.0)
    assert two["one_phase_ratio"] == pytest.approx(81 / 75)
    groups = [group for group in results["groups"] if group["two_phase"] == "on"]
    passes = {group["variant"]: group for group in groups if group["variant"].startswith("bank pass")}
    assert set(passes) == {"bank pass for 24", "bank pass for 2"}
    assert all(group["net_us"] == pytest.approx(10.0) for group in passes.values())
    assert sum(group["net_us"] for group in groups) == pytest.approx(two["net_us"])
    assert sum(group["share"] for group in groups) == pytest.approx(1.0)
    walk.report(Console(), results)


def test_goals_of_two_phases_compare_the_best_of_each() -> None:
    def row(tokens: int, net: float, two_phase: str | None = None, backend: str = "native") -> dict[str, Any]:
        phases = {} if two_phase is None else {"two_phase": two_phase}
        return {"mode": "graph", "tokens": tokens, "net_us": net, "backend": backend, **phases}

    rows = [
        row(1, 110.0),
        row(1, 100.0, "off"),
        row(1, 80.0, "on"),
        row(1, 90.0, "on"),
        row(1, 250.0, None, "triton"),
    ]
    results = {goal.name: goal for goal in targets.check_walk(rows)}
    assert results["two phases, T = 1"].value == pytest.approx(100 / 80)
    assert results["two phases, T = 1"].met is True
    assert results["two phases, T = 8192"].met is None
    assert results["walk, T = 1"].value == pytest.approx(2.5)
    assert not any(goal.name.startswith("two phases") for goal in targets.check_walk(rows[:2]))


# --- bench ----------------------------------------------------------------------------------------------


def test_bench_measures_both_phases(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "bench.json"
    arguments = ["bench", "--two-phase", "--device", "cpu", "--tokens", "2", "--blocks", "3", "--sites", "2"]
    assert cli.main([*arguments, "--mode", "hot", "--json", str(path)]) == 0
    assert "merge" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["rows"] == []
    rows = document["two_phase"]
    assert [(row["phase"], row["backend"]) for row in rows] == [
        ("merge", "host"),
        ("merge", "torch"),
        ("bank", "host"),
        ("bank", "torch"),
    ]
    for row in rows:
        assert row["bytes"] == 2 * 5 * 2 * HIDDEN_SIZE  # 5 rows of 2 tokens, either way
        assert row["correct"]
        assert row["floor_ratio"] is None
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
    assert len(report.KINDS["two-phase"](document).splitlines()) == 6
    assert report.KINDS["latency"](document) == ""


@pytest.mark.parametrize("phase", ["bank", "merge"])
def test_a_wrong_phase_fails_the_command(
    phase: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = getattr(libattnres, f"attn_res_{phase}")

    def wrong(*arguments: Any, backend: str, **options: Any) -> Any:
        result = run(*arguments, backend=backend, **options)
        if backend == "host":
            (result if phase == "merge" else result[0]).mul_(1.1)
        return result

    monkeypatch.setattr(libattnres, f"attn_res_{phase}", wrong)
    arguments = ["--device", "cpu", "--tokens", "1", "--blocks", "2", "--sites", "2", "--mode", "hot"]
    assert cli.main(["bench", "--two-phase", *arguments]) == 1
    printed = capsys.readouterr().out
    assert f"WRONG: {phase}, host, 1 tokens" in printed
    assert "torch, 1 tokens" not in printed


def measure_with(time: Any) -> phases.Measure:
    return phases.Measure(CPU, 1 << 10, 1.0, time, False, 0, hidden_size=64)


def test_a_pass_is_compared_with_the_kernel_that_moves_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of 9 us, of which the kernel that moves its rows takes 6; a copy of as many bytes takes 5."""
    costs = iter([6.0, 5.0, 9.0])

    def time(work: Any) -> timing.Timing:
        cost = next(costs)
        return timing.Timing(cost, cost, cost, 1, 1)

    who = [phases.Contender("floor"), phases.Contender("copy"), phases.Contender("host")]
    rows, failures, skipped = phases.measure_bank(measure_with(time), 4, 3, 5, who)
    assert failures == skipped == []
    assert [row["floor_ratio"] for row in rows] == pytest.approx([1.0, 5 / 6, 9 / 6])
    assert rows[0]["bytes"] == 4 * (3 + 5) * 64 * 2
    monkeypatch.setattr(timing, "is_gpu", lambda device: True)
    assert [one.name for one in phases.contenders(CUDA, ["native", "torch"], ["early", "wait"])] == [
        "floor",
        "copy",
        "native early",
        "native wait",
        "torch",
    ]


def test_a_copy_moves_as_many_bytes() -> None:
    for rows in (torch.randn(100).bfloat16(), torch.randn(10).bfloat16()):  # enough of them, and too few
        assert phases.copy_of_bytes(200, rows)().numel() == 50  # 100 bytes read and as many written


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--sites", "4"], "--sites: expected --two-phase with it, got none"),
        (["--two-phase", "--sites", "0"], "--sites: expected numbers from 1 to 1024, got 0"),
        (["--two-phase", "--variants"], "--two-phase: expected none of --targets"),
        (["--two-phase", "--blocks", "0"], "--blocks: expected numbers from 1 to 8 with --two-phase, got 0"),
    ],
)
def test_wrong_options_end_with_a_message(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--device", "cpu", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.usefixtures("native_device")
@pytest.mark.parametrize("bank_dtype", [torch.bfloat16, torch.float32])
def test_the_floor_of_a_pass_reads_and_writes_its_rows(bank_dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    blocks = torch.full((3, 8, 7176), math.nan, device="cuda").bfloat16()[..., :7168]
    blocks[:, :3].copy_(torch.randint(-8, 9, (3, 3, 7168), generator=generator, device="cuda"))
    weights = torch.ones(5, 7168, device="cuda").bfloat16()
    memory = torch.full((5, 3, 7176), math.nan, device="cuda").to(bank_dtype)
    bank, lse = memory[..., :7168], torch.full((5, 3), math.nan, device="cuda")
    call = BankCall(blocks, 3, weights, weights, 1e-5, bank, lse, "wait")
    _core.bank_floor(*call.core_args(), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    wanted = blocks[:, :3].float().sum(1)  # of few bits, so exact
    assert all(torch.equal(rows.float(), wanted) for rows in bank)
    assert memory[..., 7168:].isnan().all()
    assert not lse.isnan().any()


# --- explain --------------------------------------------------------------------------------------------


def test_explain_says_what_runs_each_call_and_why(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "explain.json"
    arguments = ["explain", "--device", "cpu", "--tokens", "2", "--hidden-size", "64", "--sites", "3"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "attn_res_merge" in printed
    assert "takes one phase: only native kernels gain by it, the rows are on cpu" in printed
    document = json.loads(path.read_text())
    for call in ("attn_res", "attn_res_bank", "attn_res_merge"):
        assert (document[call]["backend"], document[call]["source"]) == ("host", "auto")
        assert document[call]["reasons"]["torch"] == "host comes first"
    assert document["two_phase"]["two_phase"] is False


def test_explain_fails_where_nothing_serves(capsys: Any) -> None:
    arguments = ["explain", "--device", "cpu", "--hidden-size", "64"]
    assert cli.main([*arguments, "--backend", "native"]) == 1
    assert cli.main([*arguments, "--sites", "0"]) == 2
    assert "--sites: expected a number from 1 to 1024, got 0" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.usefixtures("native_device")
def test_both_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    assert cli.main(["bench", "--two-phase", "--tokens", "16", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["two_phase"]
    assert {"floor", "copy", "native"} <= {row["backend"] for row in rows if row["phase"] == "bank"}
    assert all(row["floor_ratio"] > 0 for row in rows)
    path = tmp_path / "walk.json"
    assert cli.main(["walk", "--tokens", "1", "--two-phase", "on", "--json", str(path)]) == 0
    assert any(row["one_phase_ratio"] for row in json.loads(path.read_text())["rows"])
