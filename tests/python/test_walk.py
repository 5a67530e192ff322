# SPDX-License-Identifier: Apache-2.0
"""``libattnres walk``, on the CPU at small sizes and against a stand-in for the GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import libattnres
import pytest
import torch
from libattnres import cli, timing
from libattnres.cli import metadata, walk, walk_steps
from libattnres.cli.console import Console
from libattnres.model_walk import walk_calls

CPU = torch.device("cpu")


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> int:
    """A walk that is over soon, with two bank rows."""
    calls = walk_calls()[:27]
    monkeypatch.setattr(walk_steps, "walk_calls", lambda: calls)
    return len(calls)


def test_groups_are_those_of_the_model() -> None:
    groups = walk_steps.Walk(1, CPU, 0).groups()
    assert sum(map(len, groups.values())) == 187
    by_name = {(group.num_blocks, group.variant): len(indices) for group, indices in groups.items()}
    assert by_name[0, "no delta, write"] == 1
    for num_blocks in range(1, 8):
        assert by_name[num_blocks, "delta"] == 22
        assert by_name[num_blocks, "delta, write"] == 1
        assert by_name[num_blocks, "no delta"] == 1
    assert by_name[8, "delta"] == 16
    assert by_name[8, "no delta"] == 1
    assert by_name[8, "delta, no norm"] == 1
    assert len(by_name) == 25


def test_each_call_has_one_producer_that_writes_what_it_reads(few_calls: int) -> None:
    one = walk_steps.Walk(2, CPU, 0)
    launches = one.launches(walk_steps.Implementation("torch"))
    assert len(launches) == 2 * few_calls
    for index, call in enumerate(one.calls):
        arguments = one.arguments(0, index)
        target = arguments[1] if call.has_delta else arguments[0]
        source = one.out[0, index - 1]
        target.zero_()
        launches[2 * index]()
        assert torch.equal(target, source * 0.5)


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_the_bank_is_built_by_the_calls_and_every_group_is_right(few_calls: int, backend: str) -> None:
    one = walk_steps.Walk(2, CPU, 0)
    rel_l2, errors = one.check(walk_steps.Implementation(backend))
    assert errors == []
    assert 0 < rel_l2 < 2e-3
    assert not one.blocks[:, :, :2].isnan().any()
    assert one.blocks[:, :, 2:].isnan().all()


def test_a_wrong_call_is_named(few_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attn_res = libattnres.attn_res
    monkeypatch.setattr(libattnres, "attn_res", lambda *a, **k: attn_res(*a, **k).mul_(1.1))
    _, errors = walk_steps.Walk(1, CPU, 0).check(walk_steps.Implementation("torch"))
    assert errors[0].startswith("torch, layer0.attention: output is off")


def test_few_tokens_take_several_steps_and_many_share_their_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "is_gpu", lambda device: True)
    row = 14336
    one = walk_steps.Walk(1, CPU, 10_000 * row)
    # 187 sites of three rows and three weights, and a bank of eight rows.
    assert (one.num_sites, one.num_steps) == (187, -(-30_000 // (187 * 6 + 8)))
    monkeypatch.setattr(walk_steps, "SITE_BYTES", {"cuda": 50 * 3 * 2 * row})
    shared = walk_steps.Walk(2, CPU, 10 * row)
    assert (shared.num_sites, shared.num_steps) == (50, 1)
    assert shared.arguments(0, 60)[0].data_ptr() == shared.arguments(0, 10)[0].data_ptr()
    assert shared.arguments(0, 60)[3].data_ptr() != shared.arguments(0, 10)[3].data_ptr()


def test_walk_on_the_cpu_writes_json_and_a_table(
    few_calls: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "walk.json"
    threads = torch.get_num_threads()
    assert cli.main(["walk", "--device", "cpu", "--tokens", "1", "--threads", "1", "--json", str(path)]) == 0
    assert torch.get_num_threads() == threads
    document = json.loads(path.read_text())
    assert (document["command"], document["passed"], document["threads"]) == ("walk", True, 1)
    assert [row["backend"] for row in document["rows"]] == ["host", "torch"]
    for row in document["rows"]:
        assert row["mode"] == "wall"
        assert row["net_us"] == pytest.approx(row["median_us"] - row["producers_us"])
        assert row["p20_us"] <= row["median_us"] <= row["p80_us"]
    assert "net" in capsys.readouterr().out


def test_graphs_give_totals_and_shares_that_add_up(few_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which every producer takes 1 us, native calls 2 us and Triton calls 4 us."""
    attn_res = libattnres.attn_res
    spent = [0.0]

    def run(*arguments: Any, backend: str, **options: Any) -> torch.Tensor:
        spent[0] += {"native": 2.0, "triton": 4.0}[backend]
        return attn_res(*arguments, backend="host", **options)

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
    monkeypatch.setattr(timing, "time_wall", replay)
    monkeypatch.setattr(torch, "mul", produce)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(libattnres, "attn_res", run)
    monkeypatch.setattr(metadata, "gpu_state", lambda device: {"l2_bytes": 200 * 14336})
    monkeypatch.setattr(walk, "SHARE_US", 1.0)
    results = walk.measure_graphs([1], ["native", "triton"], ["early"], CPU, Console(), eager=True)
    assert results["failures"] == []
    assert {row["steps_per_sample"] for row in results["rows"]} == {4}
    net = {(row["backend"], row["mode"]): row["net_us"] for row in results["rows"]}
    assert net == {
        ("native", "graph"): pytest.approx(2.0 * few_calls),
        ("triton", "graph"): pytest.approx(4.0 * few_calls),
        ("native", "eager"): pytest.approx(2.0 * few_calls),
        ("triton", "eager"): pytest.approx(4.0 * few_calls),
    }
    native = [group for group in results["groups"] if group["backend"] == "native"]
    assert sum(group["share"] for group in native) == pytest.approx(1.0)
    assert sum(group["calls"] for group in native) == few_calls
    assert all(group["us_per_call"] == pytest.approx(2.0) for group in native)
    walk.report(Console(), results)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tokens", "0"], "--tokens: expected numbers >= 1, got 0"),
        (["--threads", "0"], "--threads: expected a number >= 1, got 0"),
    ],
)
def test_wrong_options_end_with_a_message(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["walk", "--device", "cpu", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.gpu
def test_walk_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "walk.json"
    assert cli.main(["walk", "--tokens", "1", "--eager", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert {row["mode"] for row in document["rows"]} == {"graph", "eager"}
    assert all(row["median_us"] > row["producers_us"] > 0 for row in document["rows"])
