# SPDX-License-Identifier: Apache-2.0
"""From measured kernels to a plan file, and that the library takes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libattnres
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libattnres import _core, cli
from libattnres._call import checked_call
from libattnres.cli import plan_search, tune
from libattnres.cli.console import Console
from libattnres.cli.plan_search import Candidate, Cell, Device, Row, build_rows, find_row, render

RING1, RING2, RING3 = Candidate("ring", 1, 1), Candidate("ring", 2, 2), Candidate("ring", 3, 1)
CLUSTER4, CLUSTER7 = Candidate("cluster", cluster_size=4), Candidate("cluster", cluster_size=7)
H200 = Device("NVIDIA H200", (9, 0), 132)


def column(
    *cells: tuple[int, dict[Candidate, float]], reads: str = "after_wait", num_sources: int = 9
) -> dict[Cell, dict[Candidate, float]]:
    return {Cell(reads, num_sources, entries): us for entries, us in cells}


def permutation(**changes: Any) -> Any:
    return {
        "kernel": "ring",
        "hidden_size": 7168,
        "num_sources": 9,
        "rows_per_stage": 2,
        "prefixes_per_row": 1,
        "cluster_size": 0,
        "has_output_norm": True,
        "static_common_path": True,
        **changes,
    }


def test_candidates_are_what_is_compiled_for_the_call() -> None:
    compiled = [
        permutation(),
        permutation(static_common_path=False),
        permutation(rows_per_stage=3),
        permutation(rows_per_stage=1, prefixes_per_row=2),
        permutation(rows_per_stage=1, num_sources=8),
        permutation(rows_per_stage=1, hidden_size=4096),
        permutation(kernel="cluster", rows_per_stage=0, cluster_size=7),
    ]
    assert plan_search.candidates(compiled, 7168, 9) == [
        CLUSTER7,
        *(Candidate("ring", 2, 1, rows_in_flight=rows) for rows in (0, 4, 6, 8)),
        *(Candidate("ring", 2, 2, rows_in_flight=rows) for rows in (0, 4, 6, 8)),
        *(Candidate("ring", 3, 1, rows_in_flight=rows) for rows in (0, 4, 6, 8)),
        *(Candidate("ring", 3, 2, rows_in_flight=rows) for rows in (0, 6, 8)),
    ]
    assert plan_search.candidates(compiled, 7168, 2) == []


def test_equal_launches_are_measured_once() -> None:
    def launched(plan: libattnres.Plan | None, fits: int = 5) -> Any:
        plan = plan or libattnres.Plan("ring", rows_per_stage=2, ctas_per_sm=1, rows_in_flight=3)
        if plan.kernel == "cluster":
            shape = {"rows_per_stage": 0, "ctas_per_sm": 0, "ring_rows": 0, "cluster_size": plan.cluster_size}
            return permutation(kernel="cluster", **shape)
        if plan.ctas_per_sm == 2:
            return None  # not compiled
        rows = min(fits, plan.rows_in_flight or fits)
        return permutation(rows_per_stage=plan.rows_per_stage, ctas_per_sm=1, ring_rows=rows)

    deep = Candidate("ring", 2, 1)
    four = Candidate("ring", 2, 1, rows_in_flight=4)
    six = Candidate("ring", 2, 1, rows_in_flight=6)
    present = Candidate("ring", 2, 1, rows_in_flight=3)
    # Six rows do not fit, so that launch is the one with as many as fit.
    assert plan_search.distinct([CLUSTER4, deep, four, six, RING2], launched) == (
        [CLUSTER4, deep, present, four],
        present,
    )
    assert plan_search.distinct([deep, four], lambda plan: launched(plan, 3)) == ([deep], deep)
    with pytest.raises(libattnres.UnsupportedError):
        plan_search.distinct([], lambda _: None)


def test_the_fastest_of_each_size_is_taken_and_sizes_between_are_split() -> None:
    times = column(
        (1, {CLUSTER7: 2.0, CLUSTER4: 3.0, RING2: 6.0}),
        (16, {CLUSTER7: 4.0, CLUSTER4: 3.0, RING2: 6.0}),
        (64, {CLUSTER7: 9.0, CLUSTER4: 8.0, RING2: 6.0}),
        (256, {CLUSTER7: 30.0, CLUSTER4: 20.0, RING2: 10.0}),
    )
    assert build_rows(times, {}) == [
        Row("after_wait", 9, 4, CLUSTER7),
        Row("after_wait", 9, 32, CLUSTER4),
        Row("after_wait", 9, None, RING2),
        Row("any", 9, None, RING2),
    ]


def test_neighbours_share_a_kernel_that_is_nearly_as_fast_in_each() -> None:
    times = column(
        (1, {CLUSTER7: 2.00, CLUSTER4: 2.02, RING2: 9.0}),
        (2, {CLUSTER7: 2.05, CLUSTER4: 2.02, RING2: 9.0}),
        (4, {CLUSTER7: 3.00, CLUSTER4: 2.02, RING2: 2.1}),
    )
    assert build_rows(times, {})[:1] == [Row("after_wait", 9, None, CLUSTER4)]


def test_the_present_kernel_is_kept_where_it_is_as_good() -> None:
    times = column(
        (1, {CLUSTER7: 2.0, CLUSTER4: 2.03, RING2: 9.0}),
        (2, {CLUSTER7: 2.0, CLUSTER4: 2.03, RING2: 9.0}),
    )
    present = dict.fromkeys(times, CLUSTER4)
    assert build_rows(times, present)[0].candidate == CLUSTER4
    assert build_rows(times, present, tolerance=0.01)[0].candidate == CLUSTER7
    assert build_rows(times, {})[0].candidate == CLUSTER7


def test_equal_columns_become_one_and_the_last_reaches_nine_sources() -> None:
    few = {RING2: 2.0, RING3: 3.0}
    many = {RING2: 3.0, RING3: 2.0}
    times = {
        **column((1, few), num_sources=2),
        **column((1, few), num_sources=3),
        **column((1, many), num_sources=5),
        **column((1, many), reads="early", num_sources=5),
    }
    assert build_rows(times, {}) == [
        Row("after_wait", 3, None, RING2),
        Row("after_wait", 9, None, RING3),
        Row("early", 9, None, RING3),
        Row("any", 9, None, RING3),
    ]


def test_calls_that_a_cluster_cannot_serve_get_the_best_ring_kernel() -> None:
    times = column((1, {CLUSTER7: 2.0, RING1: 9.0, RING2: 5.0}))
    assert build_rows(times, {})[-1] == Row("any", 9, None, RING2)
    with pytest.raises(ValueError, match="expected a ring kernel"):
        build_rows(column((1, {CLUSTER7: 2.0})), {})
    with pytest.raises(ValueError, match="expected at least one cell"):
        build_rows({}, {})


KERNELS = (RING1, RING2, RING3, CLUSTER4, CLUSTER7)


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(list(plan_search.READS)), st.sampled_from([2, 5, 9]), st.integers(1, 5000)),
        st.lists(st.floats(1.0, 3.0), min_size=len(KERNELS), max_size=len(KERNELS)),
        min_size=1,
        max_size=30,
    )
)
def test_every_measured_call_gets_a_kernel_within_the_tolerance(
    measured: dict[tuple[str, int, int], list[float]],
) -> None:
    times = {Cell(*key): dict(zip(KERNELS, values, strict=True)) for key, values in measured.items()}
    rows = build_rows(times, {})
    for cell, us in times.items():
        assert us[find_row(rows, cell).candidate] <= 1.02 * min(us.values())
    last = rows[-1]
    assert (last.reads, last.max_sources, last.max_entries) == ("any", 9, None)
    assert last.candidate.kernel == "ring"


def test_text_of_a_plan_file() -> None:
    rows = [Row("after_wait", 5, 24, CLUSTER4), Row("any", 9, None, RING2)]
    assert render(rows, H200, ["When and where."]) == (
        "libattnres-plan 1\n"
        "# When and where.\n"
        "device compute_capability=9.0 num_sms=132 name=NVIDIA H200\n"
        "row reads=after_wait max_sources=5 max_entries=24 kernel=cluster cluster_size=4\n"
        "row reads=any max_sources=9 max_entries=unlimited kernel=ring rows_per_stage=2 ctas_per_sm=2\n"
    )
    assert "name" not in render(rows, Device("H200\n", (9, 0), 132))


def test_report_says_what_changes(capsys: pytest.CaptureFixture[str]) -> None:
    times = column((1, {CLUSTER7: 2.0, RING2: 3.0}), (512, {CLUSTER7: 40.0, RING2: 20.0}))
    present = dict.fromkeys(times, RING2)
    results = tune.summarise(times, present, build_rows(times, present))
    assert [(entry["tokens"], entry["tuned"], entry["gain"]) for entry in results] == [
        (1, "cluster 7", 0.5),
        (512, "ring 2 x 2", 0.0),
    ]
    tune.report(Console(), results, "built-in")
    text = capsys.readouterr().out
    assert "1 of 2 measured calls take another kernel; the largest gain is 50.0%" in text
    assert "+50.0%" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens: expected 1"),
        (["--blocks", "9"], "--blocks: expected 0..8, got 9"),
        (["--device", "cpu"], "--device: expected a CUDA device, got cpu"),
    ],
)
def test_wrong_options_end_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


# With the native kernels

PLAN_PROGRAM = """
import json, sys
from libattnres import _core
try:
    print(json.dumps(_core.plan_for(*json.loads(sys.argv[1]))))
except ValueError as error:
    print(json.dumps(str(error)))
"""


def plan_with_file(path: Path | str, arguments: list[Any]) -> Any:
    """What a process of its own plans, or its ValueError."""
    result = subprocess.run(
        [sys.executable, "-c", PLAN_PROGRAM, json.dumps(arguments)],
        env={**os.environ, "LIBATTNRES_PLAN_FILE": str(path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(result.stdout)


def kernel_of(plan: Any) -> Candidate:
    """A launch without the depth of its ring."""
    return Candidate(plan["kernel"], plan["rows_per_stage"], plan["ctas_per_sm"], plan["cluster_size"])


@pytest.fixture
def native_target() -> tuple[int, int]:
    """Compute capability of a GPU that the library was built for."""
    if not libattnres.permutations():
        pytest.skip("built without CUDA")
    target = libattnres.probe().built_targets[0].removesuffix("a")
    return int(target[:-1]), int(target[-1])


def test_the_library_takes_the_plan_of_a_file(
    native_target: tuple[int, int], make_case: Callable[..., Any], tmp_path: Path
) -> None:
    call = checked_call(*make_case(num_tokens=30, hidden_size=7168).arguments, None, "early")
    path = tmp_path / "plan.txt"
    rows = [Row("early", 4, 30, RING1), Row("early", 9, None, CLUSTER4), Row("any", 9, None, RING3)]
    path.write_text(render(rows, Device("a GPU", native_target, 100)))
    arguments = [*call.core_args(), *native_target, 100]
    builtin = plan_with_file("", arguments)
    assert kernel_of(plan_with_file(path, arguments)) == RING1
    more = list(arguments)
    more[_core.CALL_FIELDS.index("num_blocks")] = 4
    assert kernel_of(plan_with_file(path, more)) == CLUSTER4
    # Another GPU keeps the built-in plan, and a batch-invariant call its kernel.
    assert plan_with_file(path, [*arguments[:-1], 101])["kernel"] == builtin["kernel"]
    invariant = checked_call(*make_case(num_tokens=30, hidden_size=7168).arguments, None, "early", True)
    plan = plan_with_file(path, [*invariant.core_args(), *native_target, 100])
    assert (plan["kernel"], plan["rows_per_stage"]) == ("ring", 2)


def test_a_wrong_file_makes_native_calls_fail(
    native_target: tuple[int, int], make_case: Callable[..., Any], tmp_path: Path
) -> None:
    call = checked_call(*make_case(hidden_size=7168).arguments, None, "wait")
    arguments = [*call.core_args(), *native_target, 132]
    path = tmp_path / "plan.txt"
    path.write_text(render([Row("any", 9, None, Candidate("ring", 9, 1))], H200))
    assert plan_with_file(path, arguments) == (
        f"LIBATTNRES_PLAN_FILE: {path}, line 3: expected a kernel that is compiled for 1 sources, "
        "got kernel=ring rows_per_stage=9"
    )
    assert plan_with_file(tmp_path, arguments).endswith("expected a regular file, got a directory")
    path.write_bytes(os.urandom(5000))
    assert plan_with_file(path, arguments).startswith(f"LIBATTNRES_PLAN_FILE: {path}")
    program = "import libattnres; print(libattnres.probe().backends['native'])"
    info = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LIBATTNRES_PLAN_FILE": str(tmp_path / "none.txt")},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    probe = libattnres.probe()
    if any(device.native for device in probe.devices):
        assert "No such file" in info.stdout
    else:
        assert info.stdout.strip() == probe.backends["native"]


@pytest.mark.gpu
def test_tune_writes_a_file_that_the_library_takes(tmp_path: Path) -> None:
    reason = libattnres.probe().backends["native"]
    if reason is not None:
        pytest.skip(reason)
    path, document = tmp_path / "plan.txt", tmp_path / "tune.json"
    status = cli.main(
        ["tune", "--tokens", "1", "200", "--blocks", "8", "--output", str(path), "--json", str(document)]
    )
    assert status == 0
    results = json.loads(document.read_text())
    assert results["plan_file"] == path.read_text()
    assert len(results["results"]) == 4
    for entry in results["results"]:
        assert entry["tuned_us"] <= 1.02 * min(entry["us"].values())
