# SPDX-License-Identifier: Apache-2.0
"""The goals as data, and how rows are judged by them."""

from __future__ import annotations

from typing import Any

import pytest
from libattnres.cli import targets

MEASURED = [(tokens, blocks) for tokens in targets.TOKENS for blocks in targets.BLOCKS]


def row(backend: str, tokens: int, num_blocks: int, us: float, **changes: Any) -> dict[str, Any]:
    return {
        "name": backend,
        "backend": backend,
        "pdl": "wait",
        "plan_override": None,
        "variant": "common",
        "mode": "cold",
        "tokens": tokens,
        "num_blocks": num_blocks,
        "bytes": tokens * (num_blocks + 4),
        "median_us": us,
        **changes,
    }


def result_of(results: list[targets.GoalResult], name: str, what: str) -> targets.GoalResult:
    (found,) = [result for result in results if (result.name, result.what) == (name, what)]
    return found


@pytest.mark.parametrize(("tokens", "num_blocks"), MEASURED)
def test_every_measured_shape_has_one_bound_by_the_floor(tokens: int, num_blocks: int) -> None:
    goals = [
        goal for goal in targets.LATENCY_GOALS if goal.against == "floor" and goal.covers(tokens, num_blocks)
    ]
    assert len(goals) == 1


@pytest.mark.parametrize("goal", targets.LATENCY_GOALS, ids=lambda goal: f"{goal.name}-{goal.against}")
def test_every_goal_covers_a_measured_shape(goal: targets.Goal) -> None:
    assert any(goal.covers(tokens, num_blocks) for tokens, num_blocks in MEASURED)


def test_the_faster_mode_counts_and_the_worst_shape_decides() -> None:
    rows = [
        row("floor", 1024, 8, 100.0),
        row("native", 1024, 8, 120.0),
        row("native", 1024, 8, 104.0, pdl="early"),
        row("native", 1024, 8, 90.0, plan_override="ring 1 x 2"),  # not what a user gets
        row("triton", 1024, 8, 150.0),
        row("triton", 1024, 8, 145.0, pdl="early"),
        row("floor", 8192, 4, 100.0),
        row("native", 8192, 4, 106.0),
        row("native", 8192, 4, 1.0, mode="hot"),
    ]
    results = targets.check_bench(rows)
    floor = result_of(results, "T >= 1024", "native / floor")
    assert (floor.value, floor.where, floor.met) == (pytest.approx(1.06), "T = 8192, 4 blocks", False)
    triton = result_of(results, "T >= 1024, 8 blocks", "Triton / native")
    assert (triton.value, triton.met) == (pytest.approx(145 / 104), False)
    assert result_of(results, "T = 16, 8 blocks", "native / floor").met is None


@pytest.mark.parametrize(("native", "met"), [(105.0, True), (105.1, False)])
def test_a_bound_includes_its_own_value(native: float, met: bool) -> None:
    rows = [row("floor", 1024, 1, 100.0), row("native", 1024, 1, native)]
    assert result_of(targets.check_bench(rows), "T >= 1024", "native / floor").met is met


def test_shared_rows_are_compared_with_as_many_prefixes() -> None:
    rows = [
        row("native", 2048, 8, 100.0),
        row("native", 2048, 8, 71.0, variant="B = 2"),
        row("native", 1024, 8, 50.0),
        row("native", 1024, 8, 50.0, variant="B = 2"),  # 512 entries: too few to count
    ]
    result = next(goal for goal in targets.check_bench(rows) if goal.name.startswith("B = 2"))
    assert (result.value, result.where, result.met) == (pytest.approx(0.71), "M = 2048", True)


def test_variants_are_judged_by_their_own_bytes() -> None:
    common = row("native", 8192, 8, 120.0, bytes=12)
    slow = row("native", 8192, 8, 107.0, bytes=10, variant="no delta")
    result = next(goal for goal in targets.check_bench([common, slow]) if goal.name.startswith("variants"))
    assert (result.value, result.met) == (pytest.approx(1.07), False)


def test_sm_side_and_cpu_times_are_absolute() -> None:
    sm_side = [
        row("native", 8192, 8, 1.0, us_per_token_and_sm=3.2),
        row("native", 8192, 8, 1.0, us_per_token_and_sm=2.9, pdl="early"),
        row("native", 8192, 4, 1.0, us_per_token_and_sm=1.0, plan_override="ring 1 x 2"),
    ]
    results = targets.check_bench([], sm_side, {"eager call": 6.5, "C call": 1.4})
    assert result_of(results, "SM side, 8 blocks", "us per token and SM").met is True
    # Whichever kernel is best at it.
    assert result_of(results, "SM side, 4 blocks", "us per token and SM").value == 1.0
    assert result_of(targets.check_bench([]), "SM side, 4 blocks", "us per token and SM").met is None
    assert result_of(results, "CPU time, eager call", "us").met is False
    assert result_of(results, "CPU time, C call", "us").met is True


def test_walks_are_compared_net_of_the_producers() -> None:
    rows = [
        {"backend": "native", "mode": "graph", "tokens": 1, "net_us": 100.0},
        {"backend": "native", "mode": "graph", "tokens": 1, "net_us": 90.0},
        {"backend": "triton", "mode": "graph", "tokens": 1, "net_us": 200.0},
        {"backend": "host", "mode": "wall", "tokens": 16, "net_us": 10.0},
        {"backend": "torch", "mode": "wall", "tokens": 16, "net_us": 29.0},
    ]
    results = targets.check_walk(rows)
    one = result_of(results, "walk, T = 1", "Triton / native, net")
    assert (one.value, one.met) == (pytest.approx(200 / 90), True)
    assert result_of(results, "walk, T = 8192", "Triton / native, net").met is None
    assert result_of(results, "walk on the CPU, T = 16", "torch / host, net").met is False
    (cpu_alone,) = targets.check_walk(rows[3:])
    assert cpu_alone.value == pytest.approx(2.9)


def test_results_survive_json_and_are_printed_with_a_verdict() -> None:
    rows = [row("floor", 1, 8, 1.0), row("native", 1, 8, 1.5), row("triton", 1, 8, 3.0)]
    results = targets.check_bench(rows)
    assert [targets.GoalResult.from_dict(result.as_dict()) for result in results] == results
    columns, lines = targets.table(results)
    assert {line[-1] for line in lines} == {"met", "MISSED", "not measured"}
    assert all(len(line) == len(columns) for line in lines)
