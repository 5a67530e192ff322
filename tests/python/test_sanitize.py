# SPDX-License-Identifier: Apache-2.0
"""tests/sanitize.py: what it makes of the sanitizers' reports. The texts are of compute-sanitizer 2025."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

RING = "_ZN7attnres19forward_ring_kernelILi7168ELi9ELi3ELi1ELb1ELb1EEEvNS_13ForwardParamsE"
OPCODES = {
    (RING, 0x430): "UBLKCP.S.G",
    (RING, 0x770): "LDS.128",
    (RING, 0x7A0): "LDS.128",
    (RING, 0x900): "STS",
}


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    path = Path(__file__).parent.parent / "sanitize.py"
    spec = importlib.util.spec_from_file_location("sanitize", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sanitize"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def race_report(first: str, *others: str) -> str:
    lines = ["========= COMPUTE-SANITIZER", f"========= Error: Race reported between {first}"]
    lines += [f"=========     and {other}" for other in others]
    return "\n".join(
        [*lines, "========= ", "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"]
    )


def judge(
    sanitize: ModuleType,
    report: str,
    monkeypatch: pytest.MonkeyPatch,
    opcodes: dict[tuple[str, int], str] = OPCODES,
) -> tuple[list[str], int]:
    monkeypatch.setattr(sanitize, "disassemble", lambda library, functions: opcodes)
    errors, set_aside = sanitize.judge_races(report, Path("libattnres.so"))
    return errors, set_aside


def test_a_bulk_copy_and_the_loads_of_its_slot_are_set_aside(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = race_report(
        f"Write access at {RING}+0x430",
        f"Read access at {RING}+0x770 [248 hazards]",
        f"Read access at {RING}+0x7a0 in forward_ring.cuh:301 [1 hazard]",
    )
    assert judge(sanitize, report, monkeypatch) == ([], 2)


def test_a_load_before_the_copy_is_the_same_pair(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = race_report(f"Read access at {RING}+0x770", f"Write access at {RING}+0x430 [8 hazards]")
    assert judge(sanitize, report, monkeypatch) == ([], 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Write access at {}+0x900", "Read access at {}+0x770 [3 hazards]"),  # an ordinary store
        ("Write access at {}+0x900", "Write access at {}+0x430 [3 hazards]"),  # a store into a slot
        ("Write access at {}+0x430", "Write access at {}+0x430 [3 hazards]"),  # two copies
        ("Write access at {}+0x430", "Read access at {}+0x10 [3 hazards]"),  # no such instruction is known
    ],
)
def test_any_other_pair_is_an_error(
    first: str, second: str, sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, set_aside = judge(sanitize, race_report(first.format(RING), second.format(RING)), monkeypatch)
    assert (len(errors), set_aside) == (1, 0)
    assert "3 hazards" in errors[0]


def test_without_machine_code_nothing_is_set_aside(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = race_report(f"Write access at {RING}+0x430", f"Read access at {RING}+0x770 [2 hazards]")
    errors, set_aside = judge(sanitize, report, monkeypatch, {})
    assert (len(errors), set_aside) == (1, 0)


@pytest.mark.parametrize(
    "line",
    [
        "========= Error: Race reported between Write access at an unknown place",
        "========= Error: Potential RAW hazard detected at __shared__ 0x40 in block (0,0,0) :",
        "========= Internal Sanitizer Error: out of memory",
    ],
)
def test_what_is_not_understood_is_an_error(
    line: str, sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, set_aside = judge(sanitize, line, monkeypatch)
    assert (len(errors), set_aside) == (1, 0)


@pytest.mark.parametrize(
    "line",
    [
        "========= Invalid __global__ read of size 16 bytes",
        "========= Uninitialized __global__ memory read of size 16 bytes",
        "========= Barrier error detected. Divergent thread(s) in warp.",
        "========= Program hit cudaErrorIllegalAddress (error 700) on CUDA API call to cudaMemcpy.",
    ],
)
def test_the_other_tools_reports_are_errors(line: str, sanitize: ModuleType) -> None:
    place = f"=========     at {RING}+0x770"
    assert sanitize.parse_reports(f"{line}\n{place}\n") == [
        f"{line.removeprefix('========= ')} | {place.removeprefix('=========').strip()}"
    ]


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("ok       case\n", "no summary line"),  # the tool died
        ("========= ERROR SUMMARY: 0 errors\n", "did not pass"),  # the test never ran
        ("skipped  case\n========= ERROR SUMMARY: 0 errors\n", "did not pass"),
        ("ok       case\n========= ERROR SUMMARY: 3 errors\n", "not understood"),
        ("ok       case\n========= ERROR SUMMARY: 0 errors\n", None),
    ],
)
def test_silence_is_no_success(
    output: str, error: str | None, sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = sanitize.SUMMARY.findall(output)
    monkeypatch.setattr(
        sanitize,
        "run_tool",
        lambda tool, program, case: sanitize.Outcome(
            tool, case, 0.0, 0, int(summary[-1]) if summary else None, [], output=output
        ),
    )
    outcome = sanitize.check_case("memcheck", Path("test"), "case", Path("library"))
    assert outcome.ok is (error is None)
    if error is not None:
        assert error in outcome.errors[0]


def test_every_case_is_a_test_of_the_program(sanitize: ModuleType) -> None:
    source = (sanitize.ROOT / "tests/cpp/test_device_forward.cpp").read_text()
    for cases in sanitize.CASES.values():
        for case in cases:
            assert f"TEST_CASE({case})" in source
