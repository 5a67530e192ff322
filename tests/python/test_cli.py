# SPDX-License-Identifier: Apache-2.0
"""The command line, run as users run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libattnres
import pytest
import torch
from libattnres import cli
from libattnres.backends import torch as torch_backend
from libattnres.cli import demo, metadata, verify
from libattnres.cli.console import Console


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "libattnres", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )


def test_info_says_what_works_here_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "info.json"
    result = run("info", "--json", str(path), LIBATTNRES_COMMIT="0123abc")
    assert result.returncode == 0, result.stderr
    for word in (libattnres.__version__, torch.__version__, "native", "triton", "torch", "host"):
        assert word in result.stdout
    document = json.loads(path.read_text())
    assert document["command"] == "info"
    assert document["probe"]["backends"]["host"] is None
    known = document["metadata"]
    assert known["libattnres"] == libattnres.__version__
    assert known["torch"] == torch.__version__
    assert known["commit"] == "0123abc"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", known["date"])
    assert {"devices", "driver", "driver_cuda", "triton", "cpu"} <= set(known)


@pytest.mark.parametrize("everything", [[], ["--all"]])
def test_permutations_lists_what_is_compiled_in(everything: list[str], tmp_path: Path) -> None:
    path = tmp_path / "permutations.json"
    result = run("permutations", *everything, "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert json.loads(path.read_text())["permutations"] == libattnres.permutations()


@pytest.mark.slow
def test_demo_runs_the_whole_walk(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    result = run("demo", "--tokens", "2", "--device", "cpu", "--json", str(path))
    assert result.returncode == 0, result.stderr + result.stdout
    assert "all 187 calls right" in result.stdout
    document = json.loads(path.read_text())
    assert document["passed"]
    assert len(document["calls"]) == 187
    assert {call["backend"] for call in document["calls"]} == {"host"}
    assert sum(call["has_delta"] for call in document["calls"]) == 178
    assert sum(call["block_write_idx"] >= 0 for call in document["calls"]) == 8
    assert max(call["rel_l2"] for call in document["calls"]) <= 2e-3


def corrupt(monkeypatch: pytest.MonkeyPatch, damage: Callable[..., None]) -> None:
    """Let the torch backend damage something after each call that is right."""
    forward = torch_backend.forward

    def wrong(*arguments: Any) -> None:
        forward(*arguments)
        damage(*arguments)

    monkeypatch.setattr(torch_backend, "forward", wrong)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of moments."""
    matrix = verify.Matrix(torch.bfloat16, 72, (0, 17), (0, 2))
    monkeypatch.setattr(verify, "matrices", lambda name, device, quick: [matrix])


def only_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "backend_device", lambda name: torch.device("cpu"))


def test_verify_passes_and_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    only_cpu(monkeypatch)
    path = tmp_path / "verify.json"
    assert cli.main(["verify", "--backend", "torch", "--json", str(path)]) == 0
    assert "all right" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["passed"]
    assert document["num_failures"] == 0
    (result,) = document["results"]
    assert (result["backend"], result["plan"], result["failures"]) == ("torch", "auto", 0)
    assert result["checks"] > 200
    assert 0 < result["worst_rel_l2"] <= 2e-3


def output_off(*arguments: Any) -> None:
    arguments[10].mul_(1.02)


def prefix_off(*arguments: Any) -> None:
    if arguments[0].shape[0] > 0:
        arguments[0][-1, -1] += 1


def padding_written(*arguments: Any) -> None:
    out = arguments[10]
    if out.shape[0] > 1 and out.stride(0) > out.shape[1]:
        out.as_strided((out.shape[0] - 1, out.shape[1] + 1), out.stride())[:, -1] = 0


def guard_written(*arguments: Any) -> None:
    out = arguments[10]
    torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).zero_()


def unwritten_bank_row(*arguments: Any) -> None:
    blocks, num_blocks = arguments[2], arguments[6]
    if blocks.shape[0] > 0:
        blocks[0, num_blocks] = 0


def delta_written(*arguments: Any) -> None:
    if arguments[1] is not None and arguments[1].shape[0] > 0:
        arguments[1][0, 0] += 1


def weight_written(*arguments: Any) -> None:
    arguments[3][5] += 1


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (output_off, "output is off"),
        (prefix_off, "prefix, bank or the bytes beside them"),
        (unwritten_bank_row, "prefix, bank or the bytes beside them"),
        (padding_written, "bytes beside the output were written"),
        (guard_written, "bytes beside the output were written"),
        (delta_written, "delta was written"),
        (weight_written, "a weight was written"),
    ],
)
def test_verify_notices_every_kind_of_damage(
    damage: Callable[..., None],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small(monkeypatch)
    only_cpu(monkeypatch)
    corrupt(monkeypatch, damage)
    assert cli.main(["verify", "--backend", "torch"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG: torch auto bfloat16 H=72" in printed
    assert text in printed.replace("\n", " ")


def test_verify_notices_a_second_run_with_other_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    only_cpu(monkeypatch)
    runs: list[int] = []

    def every_other_time(*arguments: Any) -> None:
        out = arguments[10]
        runs.append(1)
        if len(runs) % 2 and out.shape[0] > 0:
            bits = out.view(torch.int16)
            bits[0, 0] ^= 1  # one unit in the last place, within any tolerance

    corrupt(monkeypatch, every_other_time)
    assert cli.main(["verify", "--backend", "torch"]) == 1
    assert "gave other bits" in capsys.readouterr().out


def test_verify_notices_a_plan_that_was_never_served() -> None:
    tally = verify.Tally()
    tally.refused["no such kernel"] = 3
    (failure,) = verify.missing_plans({("native", "ring 3 x 2", "bfloat16"): tally})
    assert failure == "native ring 3 x 2 bfloat16: served no call: no such kernel"


def test_verify_refuses_a_backend_that_does_not_work_here(capsys: pytest.CaptureFixture[str]) -> None:
    if libattnres.probe().backends["native"] is None:
        pytest.skip("the native backend works here")
    assert cli.main(["verify", "--backend", "native"]) == 2
    assert "--backend: expected one that works here, got native: " in capsys.readouterr().err


def test_demo_notices_a_wrong_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corrupt(monkeypatch, prefix_off)
    first_calls = demo.walk_calls()[:3]
    monkeypatch.setattr(demo, "walk_calls", lambda: first_calls)
    assert cli.main(["demo", "--tokens", "1", "--device", "cpu", "--backend", "torch"]) == 1
    printed = capsys.readouterr().out
    assert "3 calls WRONG" in printed
    assert "WRONG: layer0.attention: prefix" in printed


@pytest.mark.parametrize(
    "arguments", [["demo", "--tokens", "0"], ["demo", "--device", "meta"], ["demo", "--device", "nonsense:x"]]
)
def test_wrong_options_end_with_a_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("libattnres demo: ")
    assert "expected" in error.lower()


def test_usage_error_of_the_parser() -> None:
    assert run("nonsense").returncode == 2
    assert "libattnres" in run("--version").stdout


def test_everything_is_printed_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("libattnres.cli.console.find_spec", lambda name: None)
    console = Console()
    console.table("title", ("name", "count"), [("first", 1), ("second", 22.5)])
    assert list(console.progress(range(3), 3, "working")) == [0, 1, 2]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == ["title", "name    count", "------  -----", "first       1", "second   22.5"]


def test_commit_is_not_taken_from_a_tree_that_merely_contains_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LIBATTNRES_COMMIT", raising=False)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    package = tmp_path / "venv" / "libattnres"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(libattnres, "__file__", str(package / "__init__.py"))
    assert metadata.commit() is None
