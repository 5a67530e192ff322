# SPDX-License-Identifier: Apache-2.0
"""The performance model: what it is fitted to, what it predicts, and what the documentation shows of it."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import libattnres
import pytest
from libattnres import cli
from libattnres.audit import rules as audit
from libattnres.cli import model, report
from libattnres.cli.model import B200, B300, H200, CallShape, Constants, Measured, Work
from libattnres.cli.workload import COMMON, SM_SIDE, VARIANTS
from permutation_table import TARGETS

DOCUMENT = Path(__file__).parents[2] / "docs" / "blackwell.md"
RESULTS = DOCUMENT.parent / "performance" / "blackwell.json"
KNOWN = Constants(1.08, 1.25, 1.5, 1.4, 600.0, 200.0, 4.0, 1.8, 3.2)
NO_NORM = next(variant for variant in VARIANTS if variant.name == "no norm")


def work(shape: CallShape, blocks_per_sm: int = 1) -> Work:
    return Work(3000.0 + 1700.0 * shape.num_blocks, blocks_per_sm)


@pytest.fixture
def measured() -> tuple[list[Measured], list[Measured]]:
    """What a GPU would show that keeps to the model."""
    shapes = [
        CallShape(tokens, num_blocks, COMMON) for tokens in (256, 512, 1024, 8192) for num_blocks in (1, 4, 8)
    ]
    shapes += [CallShape(8192, num_blocks, SM_SIDE) for num_blocks in (1, 4, 8)]
    native = [
        Measured(shape, pdl, model.predict(H200, shape, pdl, done, KNOWN), done)
        for shape in shapes
        for pdl in ("early", "wait")
        for done in (work(shape), work(shape, 2))
    ]
    floor = [
        Measured(shape, "wait", KNOWN.floor_start_us + model.memory_us(H200, shape, KNOWN), Work(0, 1))
        for shape in shapes
        if shape.variant is COMMON
    ]
    return floor, native


def test_rows_are_those_of_the_operator() -> None:
    by_name = {variant.name: variant for variant in VARIANTS}
    for name, read, written in (
        ("no delta", 9, 1),
        ("no norm", 10, 2),
        ("write-back", 10, 3),
        ("B = 2", 6, 2),
    ):
        shape = CallShape(4096, 8, by_name[name])
        assert (shape.rows_read, shape.rows_written) == (read, written), name
    assert CallShape(4096, 8, SM_SIDE).rows_read == 2


def test_calibration_finds_the_constants_behind_the_times(
    measured: tuple[list[Measured], list[Measured]],
) -> None:
    floor, native = measured
    found = model.calibrate(floor, native, H200)
    assert found.read_cost == pytest.approx(KNOWN.read_cost, rel=0.01)
    assert found.write_cost == pytest.approx(KNOWN.write_cost, rel=0.01)
    for row in native:
        assert model.predict(H200, row.shape, row.pdl, row.work, found) == pytest.approx(row.us, rel=0.02)


def test_few_tokens_are_not_calibrated_with(measured: tuple[list[Measured], list[Measured]]) -> None:
    floor, native = measured
    latency = [Measured(CallShape(1, 8, COMMON), "early", 50.0, Work(17000.0, 1))]
    assert model.calibrate(floor, native + latency, H200) == model.calibrate(floor, native, H200)
    with pytest.raises(ValueError, match=r"^--measured: expected rows of at least 256 tokens"):
        model.calibrate(floor, latency, H200)


def test_bandwidth_bounds_what_memory_does_and_issue_what_sms_do() -> None:
    shape = CallShape(8192, 8, COMMON)
    alone = Constants(1, 1, 0, 1, 0, 0, 20, 0, 0)
    memory_bound = model.predict(H200, shape, "early", Work(1.0, 1), alone)
    assert memory_bound == pytest.approx(8192 * 12 * 14336 / 4.8e6)
    sm_bound = model.predict(H200, shape, "early", Work(1e6, 1), alone)
    assert sm_bound == pytest.approx(63 * 250_000 / 1980)
    wait, early = (model.predict(H200, shape, pdl, Work(1.0, 1), KNOWN) for pdl in ("wait", "early"))
    assert wait - early == pytest.approx(KNOWN.start_wait_us - KNOWN.start_early_us)
    one, two = (model.sm_us(H200, shape, Work(1.0, blocks), KNOWN) for blocks in (1, 2))
    assert one - two == pytest.approx(63 * (KNOWN.exchange_cycles - KNOWN.exchange_cycles_of_two) / 1980)


def test_carried_over_is_the_measured_time_less_what_memory_saves() -> None:
    shape = CallShape(128, 8, COMMON)
    fitted = model.Model(KNOWN, {}, [Measured(shape, "early", 7.0, Work(17000.0, 1))])
    saved = model.memory_us(H200, shape, KNOWN) - model.memory_us(B300, shape, KNOWN)
    assert saved > 1
    assert fitted.carried_over(B300, shape, "early") == pytest.approx(7.0 - saved)
    assert fitted.carried_over(B300, shape, "wait") is None


@pytest.mark.skipif(not libattnres.permutations(), reason="built without CUDA")
@pytest.mark.parametrize("gpu", [H200, B200, B300], ids=lambda gpu: gpu.name)
def test_kernels_of_the_plan_are_among_the_compiled_ones(gpu: model.Gpu) -> None:
    compiled = libattnres.permutations()
    for variant in (COMMON, *VARIANTS):
        for num_blocks in range(9):
            shape = CallShape(8192, num_blocks, variant)
            kernel = model.planned_kernel(gpu, shape, "early")
            assert {name: kernel[name] for name in compiled[0]} in compiled
            assert kernel["num_sources"] == num_blocks + 1
            assert kernel["has_output_norm"] == (variant is not NO_NORM)


def test_counts_are_found_by_the_kernel_of_a_plan() -> None:
    def one(kernel: audit.Kernel, instructions: float) -> audit.Audit:
        found = audit.Audit(kernel, "103a", 256, 128, 0, 0, 0, 0, 2)
        found.warp_instructions_per_token = instructions
        return audit.Audit.from_dict(json.loads(json.dumps(found.as_dict())))

    counts = model.counts_of(
        [
            one(audit.Kernel("ring", (7168, 9, 3, 1, 1, 1)), 11.0),
            one(audit.Kernel("cluster", (7168, 9, 7, 1, 0)), 22.0),
        ]
    )
    plan: dict[str, Any] = {
        "kernel": "ring",
        "hidden_size": 7168,
        "num_sources": 9,
        "rows_per_stage": 3,
        "prefixes_per_row": 1,
        "cluster_size": 0,
        "has_output_norm": True,
        "static_common_path": True,
    }
    plan["ctas_per_sm"] = 2
    assert model.work_of(counts, plan, "103a") == Work(11.0, 2)
    plan |= {"kernel": "cluster", "cluster_size": 7, "static_common_path": False, "ctas_per_sm": 0}
    assert model.work_of(counts, plan, "103a") == Work(22.0, 1)


@pytest.mark.parametrize(
    ("content", "text"),
    [('{"command": "walk"}', "expected what bench --targets wrote"), ("[]", "expected what bench")],
)
def test_other_measurements_are_refused(
    content: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert cli.main(["model", "--measured", str(path)]) == 2
    wanted = text if set(libattnres.probe().built_targets) >= {"90a", "100a", "103a"} else "library: expected"
    assert wanted in capsys.readouterr().err


def test_an_audit_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for content in ("[]", '{"command": "permutations", "permutations": []}'):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"^--audit: expected what permutations --audit wrote"):
            model.load_audit(path)


def test_a_library_for_fewer_gpus_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = dataclasses.replace(libattnres.probe(), built_targets=("90a",))
    monkeypatch.setattr(libattnres, "probe", lambda: probe)
    assert cli.main(["model", "--measured", str(tmp_path / "none.json")]) == 2
    assert "library: expected one with kernels for 90a, 100a and 103a, got 90a" in capsys.readouterr().err


# --- documentation --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text()))


def test_calibration_is_within_fifteen_percent(results: dict[str, Any]) -> None:
    assert len(results["errors"]) > 40
    assert {row["tokens"] for row in results["errors"]} >= {256, 1024, 8192}
    for row in results["errors"]:
        assert abs(row["error"]) <= 0.15, row
        assert row["predicted_us"] / row["measured_us"] - 1 == pytest.approx(row["error"])


def test_blackwell_code_issues_no_more_than_hopper_s(results: dict[str, Any]) -> None:
    assert {row["kernel"] for row in results["issued"]} == {"ring", "cluster"}
    for row in results["issued"]:
        assert row["issued"]["100a"] <= row["issued"]["90a"], row
        assert row["issued"]["103a"] <= row["issued"]["90a"], row
    assert {(line[0], line[1]) for line in results["audit"]} == set(product(audit.KINDS, TARGETS))
    assert {line[-1] for line in results["audit"]} == {0}


def test_the_documentation_shows_what_its_json_says() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert {block["kind"] for block in report.BLOCK.finditer(text)} == set(model.TABLES)
    assert report.render(text, DOCUMENT.parent) == text, "run: libattnres report --update docs/blackwell.md"


def test_no_prediction_is_shown_for_a_call_that_published_bandwidth_does_not_allow(
    results: dict[str, Any],
) -> None:
    for site in results["sites"]:
        gpu = {gpu["name"]: gpu for gpu in results["gpus"]}["B300"]
        moved = (
            site["num_blocks"] + 2 + 2 * ("no delta" not in site["variant"]) + ("writes" in site["variant"])
        )
        assert site["us"]["B300"] > site["tokens"] * moved * 14336 / gpu["bytes_per_us"], site
