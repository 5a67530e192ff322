# SPDX-License-Identifier: Apache-2.0
"""``libattnres certify``: its parts, what its race checks notice, and what its report says."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import libattnres
import pytest
import torch
from libattnres import cli
from libattnres.cli import certify
from libattnres.cli.console import Console
from libattnres.cli.workload import VARIANTS, Shape

PERFORMANCE = Path(__file__).parents[2] / "docs" / "performance"
EXAMPLE = PERFORMANCE / "certify_h200.json"


def test_machine_without_a_supported_gpu_is_refused_clearly(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if any(device.native for device in libattnres.probe().devices):
        pytest.skip("the native backend works here")
    assert cli.main(["certify", "--output", str(tmp_path / "certificate")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("libattnres certify: ")
    assert "expected a GPU of compute capability 9.0" in error
    assert "got none: " in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", certify.PARTS, ids=lambda part: part.command)
def test_parts_are_command_lines_of_the_commands(part: certify.Part) -> None:
    parser = argparse.ArgumentParser()
    import_module(f"libattnres.cli.{part.command}").add_arguments(parser)
    whole, quick = parser.parse_args(part.options), parser.parse_args(part.quick)
    assert whole != quick


def test_part_that_raises_is_a_failure_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr("libattnres.cli.walk.run", broken)
    args = argparse.Namespace(quick=True, seed=3, device=torch.device("cuda:1"), output=tmp_path / "c")
    part = next(part for part in certify.PARTS if part.command == "walk")
    result = certify.run_part(part, args, Console())
    assert not result["passed"]
    assert result["failures"] == ["RuntimeError: cudaErrorIllegalAddress"]
    assert result["command_line"].endswith("--seed 3 --device cuda:1")


# --- race checks, on the host backend ---------------------------------------------------------------


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> certify.RaceChecks:
    on_host(monkeypatch, lambda run, out, prefix: None)
    return certify.RaceChecks(torch.device("cpu"), True, 0)


def on_host(monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    """Let the host backend serve calls to the native one, damaged afterwards."""
    attn_res = libattnres.attn_res
    runs: list[int] = []

    def call(prefix: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        assert options.pop("backend") == "native"
        options.pop("plan", None)
        options.pop("pdl", None)
        out = attn_res(prefix, *arguments, backend="host", **options)
        runs.append(1)
        damage(len(runs), out, prefix)
        return out

    monkeypatch.setattr(libattnres, "attn_res", call)


def test_equal_bits_pass(checks: certify.RaceChecks) -> None:
    for variant in VARIANTS:
        check = checks.repeated(checks.buffers(Shape(4, 2, variant)), "auto", None, "wait")
        assert (check.errors, check.calls) == ((), 8), variant


@pytest.mark.parametrize("what", ["output", "prefix"])
def test_one_other_bit_in_one_run_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(run: int, out: torch.Tensor, prefix: torch.Tensor) -> None:
        if run == 5:
            (out if what == "output" else prefix).view(torch.int16)[-1, -1] ^= 1

    on_host(monkeypatch, flip)
    checks = certify.RaceChecks(torch.device("cpu"), True, 0)
    check = checks.repeated(checks.buffers(Shape(4, 2)), "auto", None, "wait")
    assert check.errors == (f"run 5: the {what} has other bits",)


def test_output_that_is_not_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch, lambda run, out, prefix: out[-1].fill_(float("nan")))
    checks = certify.RaceChecks(torch.device("cpu"), True, 0)
    check = checks.repeated(checks.buffers(Shape(4, 2)), "auto", None, "wait")
    assert check.errors == ("part of the output was not written",)


def test_token_whose_bits_depend_on_its_batch_is_noticed(
    checks: certify.RaceChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify, "LONG_BATCH", 4097)
    assert checks.alone_and_in_a_batch().errors == ()

    def damage(run: int, out: torch.Tensor, prefix: torch.Tensor) -> None:
        if out.shape[0] == 1 and run == 4:  # the whole batch, then token 0, then token 1
            out.view(torch.int16)[0, 0] ^= 1

    monkeypatch.undo()
    monkeypatch.setattr(certify, "LONG_BATCH", 4097)
    on_host(monkeypatch, damage)
    assert checks.alone_and_in_a_batch().errors == ("token 131 has other bits alone",)


# --- report -------------------------------------------------------------------------------------------


@pytest.fixture
def document() -> dict[str, Any]:
    bench = json.loads((PERFORMANCE / "h200.json").read_text())
    verify = json.loads((PERFORMANCE / "verify_h200.json").read_text())
    tuned = {
        "reads": "early",
        "num_blocks": 8,
        "tokens": 64,
        "present": "ring 3 x 1",
        "present_us": 4.5,
        "tuned": "cluster 4",
        "tuned_us": 4.0,
        "gain": 0.125,
    }
    parts = {
        "verify": {**verify, "command_line": "verify --backend native"},
        "races": {"passed": True, "failures": [], "calls": 360, "checks": [{}] * 9},
        "bench": {**bench, "command_line": "bench"},
        "walk": {**bench["walk"], "passed": True, "command_line": "walk"},
        "tune": {
            "passed": True,
            "results": [tuned],
            "plan_file": "libattnres-plan 1\n",
            "command_line": "tune",
        },
    }
    for part in parts.values():
        part["seconds"] = 1.5
    return {
        "command": "certify",
        "metadata": bench["metadata"],
        "quick": False,
        "passed": True,
        "seconds": 10.0,
        "device": "cuda:0",
        "gpu": bench["gpu"],
        "environment": {},
        "parts": parts,
    }


def test_report_has_what_is_needed_to_judge(document: dict[str, Any]) -> None:
    text = certify.markdown(document)
    assert text.startswith("# libattnres certificate\n\n**PASSED** in 10 s on NVIDIA H200, 132 SMs")
    for line in (
        "| races | passed | 1.5 | 360 calls in 9 checks of equal bits |",
        "| tune | passed | 1.5 | 1 calls, 1 with another kernel |",
        "| compute capability | 9.0 |",
        "| compiled object | 90a |",
        "| early | 8 | 64 | ring 3 x 1 | 4.5 | cluster 4 | 4 | +12.5% |",
        "libattnres certify",
        "native / floor",
        "What is wrong",
    ):
        assert (line in text) == (line != "What is wrong"), line


def test_report_says_what_failed(document: dict[str, Any]) -> None:
    document["passed"] = document["parts"]["races"]["passed"] = False
    document["parts"]["races"]["failures"] = ["8192 tokens: run 5: the output has other bits"]
    for name in ("verify", "bench", "walk", "tune"):
        document["parts"][name] = {"passed": False, "failures": ["RuntimeError: lost"], "seconds": 0.1}
    text = certify.markdown(document)
    assert "**FAILED** in" in text
    assert "- races: 8192 tokens: run 5: the output has other bits" in text
    assert "- tune: RuntimeError: lost" in text
    assert "Not tuned." in text


@pytest.mark.skipif(not EXAMPLE.exists(), reason="the example has not been measured yet")
def test_example_in_the_documentation_is_what_its_json_says() -> None:
    document = json.loads(EXAMPLE.read_text())
    assert certify.markdown(document) == EXAMPLE.with_suffix(".md").read_text()


@pytest.mark.gpu
@pytest.mark.slow
def test_quick_certificate_of_this_gpu(tmp_path: Path) -> None:
    if not any(device.native for device in libattnres.probe().devices):
        pytest.skip("no GPU with native kernels")
    output = tmp_path / "folder" / "gpu.0"
    assert cli.main(["certify", "--quick", "--output", str(output)]) == 0
    document = json.loads(Path(f"{output}.json").read_text())
    assert document["passed"]
    assert {"verify", "races", "bench", "walk", "tune"} == set(document["parts"])
    assert all(part["passed"] for part in document["parts"].values())
    assert Path(f"{output}.md").read_text() == certify.markdown(document)
