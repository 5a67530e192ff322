# SPDX-License-Identifier: Apache-2.0
"""Tables and plots from JSON, and that the figures of the documentation are those of its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from libattnres import cli
from libattnres.cli import metadata, plots, report, targets

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"


def row(backend: str, us: float, **changes: Any) -> dict[str, Any]:
    return {
        "name": backend,
        "backend": backend,
        "pdl": None,
        "plan_override": None,
        "variant": "common",
        "mode": "cold",
        "tokens": 1024,
        "num_blocks": 8,
        "bytes": 1024 * 12 * 14336,
        "median_us": us,
        "gb_per_s": 1024 * 12 * 14336 / us / 1e3,
        "copy_fraction": 0.96,
        **changes,
    }


@pytest.fixture
def document() -> dict[str, Any]:
    walk_row = {"tokens": 1, "mode": "graph", "producers_us": 300.0, "bytes": 1}
    rows = [
        row("floor", 40.0),
        row("native", 46.0, name="native early", pdl="early"),
        row("native", 48.0, name="native wait", pdl="wait"),
        row("native", 44.0, name="native early ring 3 x 1", pdl="early", plan_override="ring 3 x 1"),
        row("triton", 69.0, name="triton early", pdl="early"),
        row("native", 36.0, name="native early", pdl="early", variant="no delta", bytes=1024 * 10 * 14336),
        row("floor", 1.5, tokens=1),
        row("native", 3.0, name="native early", pdl="early", tokens=1),
        row("floor", 20.0, num_blocks=1),
    ]
    goals = [goal.as_dict() for goal in targets.check_bench(rows)]
    return {
        "command": "bench",
        "metadata": {
            "libattnres": "0.1.0",
            "commit": "0123456789abcdef",
            "date": "2026-01-02T03:04:05+00:00",
            "driver": "580.1",
            "torch": "2.11.0",
            "triton": None,
            "cpu": "a CPU",
        },
        "gpu": {"name": "NVIDIA H200", "num_sms": 132, "l2_bytes": 50 << 20, "sm_clock_mhz": 1980.0},
        "copy_gb_per_s": 4270.4,
        "rows": rows,
        "sm_side": [{"num_blocks": 8, "name": "native early", "us_per_token_and_sm": 2.954}],
        "cpu_us": {"eager call": 5.25},
        "walk": {
            "rows": [
                {**walk_row, "name": "native early", "median_us": 800.0, "net_us": 500.0},
                {**walk_row, "name": "triton early", "median_us": 1500.0, "net_us": 1200.0},
                {**walk_row, "name": "native early two-phase", "median_us": 700.0, "net_us": 400.0}
                | {"two_phase": "on", "bank_passes": 8, "one_phase_ratio": 1.25},
            ],
            "groups": [
                {
                    "tokens": 1,
                    "name": "native early",
                    "num_blocks": 8,
                    "variant": "delta",
                    "calls": 16,
                    "us_per_call": 2.5,
                    "share": 0.08,
                }
            ],
        },
        "targets": goals,
        "two_phase": [
            {"phase": "merge", "tokens": 1024, "num_blocks": None, "sites": None, "name": "native early"}
            | {"median_us": 19.5, "gb_per_s": 3765.2, "floor_ratio": 1.05}
        ],
    }


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        (
            "machine",
            [
                "NVIDIA H200, 132 SMs, L2 50 MiB, SM clock 1980 MHz, driver 580.1, PyTorch 2.11.0, "
                "libattnres 0.1.0 (0123456789ab), plain copy 4270 GB/s, 2026-01-02."
            ],
        ),
        (
            "latency",
            [
                "| blocks | tokens | floor | native early | native wait | triton early | native / floor | "
                "triton / native | GB/s | % of copy |",
                "| 8 | 1 | 1.5 | 3 |  |  | 2 |  | 58720 | 96 |",
                "| 8 | 1024 | 40 | 46 | 48 | 69 | 1.15 | 1.5 | 3830 | 96 |",
                "| 1 | 1024 | 20 |  |  |  |  |  |  |  |",
            ],
        ),
        ("variants", ["| no delta | 8 | 1024 | 36 |  | 46 | 0.783 | 0.833 |"]),
        (
            "kernels",
            ["| 8 | 1 | early | 3 |  |", "| 8 | 1024 | early | 46 | 44 |", "| 8 | 1024 | wait | 48 |  |"],
        ),
        ("sm-side", ["| 8 | native early | 2.95 |"]),
        ("cpu", ["| eager call | 5.25 |"]),
        (
            "walk",
            [
                "| 1 | graph | native early | 800 | 300 | 500 | 2.4 |",
                "| 1 | graph | triton early | 1500 | 300 | 1200 | 1 |",
            ],
        ),
        ("walk-two-phase", ["| 1 | graph | native early two-phase | 8 | 400 | 1.25 |"]),
        ("two-phase", ["| merge | 1024 |  |  | native early | 19.5 | 3765 | 1.05 |"]),
        ("walk-shares", ["| 1 | native early | 8 | delta | 16 | 2.5 | 8 |"]),
        (
            "goals",
            [
                "| T >= 1024 | native / floor | <= 1.05 | 1.150 | T = 1024, 8 blocks | MISSED |",
                "| T >= 1024, 8 blocks | Triton / native | >= 1.4 | 1.500 | T = 1024, 8 blocks | met |",
            ],
        ),
    ],
)
def test_tables_say_what_the_results_say(kind: str, lines: list[str], document: dict[str, Any]) -> None:
    rendered = report.KINDS[kind](document).splitlines()
    for line in lines:
        assert line in rendered


def test_every_other_implementation_stands_beside_ours() -> None:
    rows = [row("native", 40.0), row("torch", 800.0), row("liger", 100.0)]
    columns, (line,) = report.latency_table(rows)
    beside = dict(zip(columns, line, strict=True))
    assert (beside["torch / native"], beside["liger / native"]) == (20.0, 2.5)
    columns, (line,) = report.latency_table([row("host", 50.0), row("torch", 800.0)])
    beside = dict(zip(columns, line, strict=True))
    assert beside["torch / host"] == 16.0
    assert "native / floor" not in beside


def test_results_of_walk_alone_have_its_tables_and_no_others(document: dict[str, Any]) -> None:
    alone = {"command": "walk", "metadata": document["metadata"], **document["walk"]}
    assert report.KINDS["walk"](alone) == report.KINDS["walk"](document)
    for kind in ("latency", "variants", "kernels", "sm-side", "cpu", "goals"):
        assert report.KINDS[kind](alone) == ""


def test_update_fills_the_blocks_and_check_notices_what_is_stale(
    tmp_path: Path, document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "h200.json").write_text(json.dumps(document))
    text = tmp_path / "text.md"
    text.write_text(
        "before\n\n<!-- table cpu h200.json -->\n<!-- end -->\n\nbetween\n\n"
        "<!-- table walk missing.json -->\nold\n<!-- end -->\nafter\n"
    )
    assert cli.main(["report", "--update", str(text), "--check"]) == 1
    assert cli.main(["report", "--update", str(text)]) == 0
    assert text.read_text() == (
        "before\n\n<!-- table cpu h200.json -->\n| what | us |\n| --- | --- |\n| eager call | 5.25 |\n"
        "<!-- end -->\n\nbetween\n\n<!-- table walk missing.json -->\n"
        "Not measured yet: there is no such table in `missing.json`.\n<!-- end -->\nafter\n"
    )
    assert cli.main(["report", "--update", str(text), "--check"]) == 0
    text.write_text(text.read_text().replace("5.25", "4.25"))
    assert cli.main(["report", "--update", str(text), "--check"]) == 1
    assert "not what its JSON says" in capsys.readouterr().out


def test_files_are_printed(
    tmp_path: Path, document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document))
    assert cli.main(["report", str(path)]) == 0
    printed = capsys.readouterr().out
    for kind in report.KINDS:
        assert f"**{kind}**" in printed


@pytest.mark.parametrize(
    ("content", "text"),
    [("[]", "expected what bench, walk or model wrote"), ('{"command": "info"}', "expected what")],
)
def test_other_files_are_refused(
    content: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert cli.main(["report", str(path)]) == 2
    assert text in capsys.readouterr().err
    assert cli.main(["report"]) == 2


def test_the_documentation_shows_what_its_json_says() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    blocks = list(report.BLOCK.finditer(text))
    assert {"machine", "goals", "latency", "walk"} <= {block["kind"] for block in blocks}
    assert report.render(text, DOCUMENT.parent) == text, "run: libattnres report --update docs/performance.md"


def test_the_readme_shows_what_its_json_says() -> None:
    readme = DOCUMENT.parents[1] / "README.md"
    text = readme.read_text(encoding="utf-8")
    assert "| tokens, 8 blocks | floor | native early | native wait |" in text
    assert report.render(text, readme.parent) == text, "run: libattnres report --update README.md"


def test_committed_results_are_of_a_clean_and_known_commit() -> None:
    for path in (DOCUMENT.parent / "performance").glob("*.json"):
        known = json.loads(path.read_text(encoding="utf-8"))["metadata"]
        assert known["commit"], path
        assert not known["commit"].endswith("-dirty"), path


def test_plots_are_written(tmp_path: Path, document: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    written = plots.write(document, tmp_path / "plots")
    assert [path.name for path in written] == ["latency.png", "bandwidth.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in written)
    assert plots.write({"rows": []}, tmp_path) == []


def test_clocks_and_processes_come_from_the_driver_s_tool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in\n--query-gpu*) echo "1980, 1980, 3201, 700.00, [N/A]" ;;\n'
        "*) echo 7; echo 8 ;;\nesac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    class Properties:
        name = "NVIDIA H200"
        multi_processor_count = 132
        total_memory = 1
        L2_cache_size = 2
        uuid = "0"

    monkeypatch.setattr(metadata.torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(metadata.torch.cuda, "is_initialized", lambda: True)
    state = metadata.gpu_state(metadata.torch.device("cuda", 0))
    assert state["sm_clock_mhz"] == 1980
    assert state["memory_clock_mhz"] == 3201
    assert state["temperature_c"] is None
    assert state["other_processes"] == 1
    monkeypatch.setenv("PATH", "")
    state = metadata.gpu_state(metadata.torch.device("cuda", 0))
    assert state["other_processes"] is None
    assert "sm_clock_mhz" not in state
