# SPDX-License-Identifier: Apache-2.0
"""Variables and plan files that mean harm: an error that names them, and nothing of theirs is run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libattnres
import pytest

VALUES = (
    "__import__('os').abort()",
    "../../../../tmp/evil",
    "/tmp/evil.so",
    "$(touch evil)",
    "`touch evil`;touch evil",
    "%n%n%s%s",
    "\x1b[31mred",
    "\udcff\udcfe",  # bytes that are no UTF-8
    "-1",
    "99999999999999999999",
    "nan",
    " 1",
    "x" * 100_000,
)
"""None is a value of any of the variables."""
PER_CALL = ("LIBATTNRES_BACKEND", "LIBATTNRES_BATCH_INVARIANT", "LIBATTNRES_NUM_THREADS")
"""Asked at every call; the others once per process."""

# Reports in its last line what the call raised, and before it whatever ran, was loaded or started.
PROGRAM = """
import os, sys, torch, libattnres, libattnres.backends.host
seen = []
EVENTS = ("import", "exec", "compile", "ctypes.dlopen", "os.system", "os.exec", "os.posix_spawn",
          "subprocess.Popen", "open")
sys.addaudithook(lambda event, arguments: seen.append((event, repr(arguments))) if event in EVENTS else None)
row = torch.zeros(2, 16, dtype=torch.bfloat16)
try:
    libattnres.attn_res(row.clone(), row, row[:, None].clone(), row[0], row[0], row[0], 1, -1)
    said = "nothing"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
for event, arguments in seen:
    if "evil" in arguments or event not in ("import", "exec", "compile", "open"):
        print("RAN", event, arguments)
print(said.encode("ascii", "backslashreplace").decode()[:400])
"""


def run(environment: dict[str, str], folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize("variable", PER_CALL)
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_wrong_value_is_an_error_that_names_the_variable(
    variable: str,
    value: str,
    make_case: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case()
    before = case.clone()
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{variable}: expected ") as raised:
        libattnres.attn_res(*case.arguments)
    assert type(raised.value) is ValueError  # not one of decoding
    for name in ("prefix", "blocks"):
        assert getattr(case, name).equal(getattr(before, name))


@pytest.mark.parametrize("value", ["avx", "evil.so", VALUES[0], VALUES[7]], ids=range(4))
def test_the_host_target_is_a_name_and_nothing_else(value: str, tmp_path: Path) -> None:
    output = run({"LIBATTNRES_HOST_TARGET": value}, tmp_path)
    assert "RAN" not in output
    assert output.startswith("ValueError: LIBATTNRES_HOST_TARGET: expected one of ")
    assert not list(tmp_path.iterdir())


def test_an_empty_host_target_is_none(tmp_path: Path) -> None:
    assert run({"LIBATTNRES_HOST_TARGET": ""}, tmp_path) == "nothing\n"


@pytest.mark.parametrize("variable", [*PER_CALL, "LIBATTNRES_PLAN_FILE"])
def test_nothing_named_by_a_variable_is_loaded_or_started(variable: str, tmp_path: Path) -> None:
    for name in ("evil.py", "evil.so"):
        (tmp_path / name).write_text("raise SystemExit('ran')\n")
    before = sorted(tmp_path.iterdir())
    for value in ("evil", str(tmp_path / "evil.so")):
        output = run({variable: value, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}, tmp_path)
        assert "RAN" not in output, output
        # The plan is for the native backend, which this call does not reach.
        expected = "nothing" if variable == "LIBATTNRES_PLAN_FILE" else f"ValueError: {variable}: expected "
        assert output.startswith(expected), output
    assert sorted(tmp_path.iterdir()) == before


def test_a_backend_variable_imports_nothing(
    make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module beside the backends, which none of them imports.
    for name in ("..cli.demo", "._triton_kernels", "host.x"):
        monkeypatch.setenv("LIBATTNRES_BACKEND", name)
        before = set(sys.modules)
        with pytest.raises(ValueError, match="LIBATTNRES_BACKEND: expected one of "):
            libattnres.attn_res(*make_case().arguments)
        assert set(sys.modules) == before


@pytest.mark.skipif(not libattnres.permutations(), reason="a library without kernels reads no plan file")
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "expected 'libattnres-plan 1', got an empty file"),
        (b"\x7fELF\x02\x01\x01\x00", "expected ASCII text, got the byte 0x7f"),
        (b"import os\n", "expected 'libattnres-plan 1' first, got 'import os'"),
        (b"libattnres-plan 1\n" * 8000, "expected at most 65536 bytes, got more"),
        (None, "expected a regular file, got a directory"),
    ],
)
def test_a_wrong_plan_file_is_named_and_refused(content: bytes | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "plan"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    program = "import libattnres; print(libattnres.probe().plan_error)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LIBATTNRES_PLAN_FILE": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert expected in result.stdout
    assert str(path) in result.stdout
