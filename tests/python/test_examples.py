# SPDX-License-Identifier: Apache-2.0
"""The programs in examples/ run, or say what is missing; those in C++ are run by test_consumer.py."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import libattnres
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / example, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def output_of(example: str, *arguments: str) -> str:
    result = run(example, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def needs_jax() -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    names = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert len(names) >= 6
    assert {name for name in names if f'("{name}"' not in source} == set()


def test_quick_start() -> None:
    probe = libattnres.probe()
    backends = ("native",) if probe.backends["native"] is None else ("triton", "torch")
    wanted = {f"[16, 7168] on the {name} backend\n" for name in (backends if probe.devices else ("host",))}
    assert output_of("quick_start.py") in wanted


def test_compiled_model() -> None:
    assert "compiled and eager differ by" in output_of("compiled_model.py", "--compiler", "aot_eager")


@pytest.mark.gpu
def test_compiled_model_with_inductor() -> None:
    assert "compiled and eager differ by" in output_of("compiled_model.py")


def test_cuda_graph_decode_runs_or_says_why_not() -> None:
    result = run("cuda_graph_decode.py")
    reason = libattnres.probe().backends["native"]
    if reason is None:
        assert result.stdout == "64 replays of 49 calls equal the eager ones to the bit\n", result.stderr
    else:
        assert result.stderr == f"this example needs a GPU with native kernels: {reason}\n"
        assert result.returncode == 1


def test_cupy_arrays_are_numpy_s_without_cupy() -> None:
    pytest.importorskip("numpy")
    assert "(16, " in output_of("cupy_arrays.py")


def test_jax_arrays() -> None:
    needs_jax()
    assert "(16, 256) bfloat16 on " in output_of("jax_arrays.py")


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_jax_ffi() -> None:
    needs_jax()
    assert "jitted on " in output_of("jax_ffi/jax_ffi.py")


@pytest.mark.parametrize("example", ["jax_arrays.py", "jax_ffi/jax_ffi.py"])
def test_without_jax_an_example_says_so(example: str) -> None:
    hidden = "import runpy, sys; sys.modules['jax'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", hidden, EXAMPLES / example]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.stderr == "this example needs JAX: pip install jax\n"
    assert result.returncode == 1
