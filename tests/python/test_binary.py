# SPDX-License-Identifier: Apache-2.0
"""What is inside the installed shared libraries: kernels, exported symbols and dependencies."""

from __future__ import annotations

import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import libattnres
import pytest
from libattnres.audit.rules import identify
from libattnres.audit.sass import cuda_tool
from permutation_table import ROOT, TARGETS, everything

PACKAGE = Path(next(iter(libattnres.__path__)))
LIBRARY = PACKAGE / "lib" / "libattnres.so"

# The build says what it was asked for; without that, the default of pyproject.toml.
ASKED_TARGETS = tuple(os.environ.get("ATTNRES_CUDA_TARGETS", ";".join(TARGETS)).split(";"))
needs_kernels = pytest.mark.skipif(
    os.environ.get("ATTNRES_CUDA") == "OFF", reason="the library was built with ATTNRES_CUDA=OFF"
)

ALLOWED_NEEDED = {
    "libattnres.so",
    "libc.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libstdc++.so.6",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def functions() -> dict[str, list[str]]:
    """Symbols of the functions in the binary, by target."""
    found: dict[str, list[str]] = defaultdict(list)
    target = ""
    for line in run(cuda_tool("cuobjdump"), "-res-usage", LIBRARY).splitlines():
        if match := re.search(r"arch = sm_(\w+)", line):
            target = match[1]
        elif match := re.search(r"Function (\S+?):", line):
            found[target].append(match[1])
    return found


@needs_kernels
def test_binary_holds_exactly_the_table_for_every_target(functions: dict[str, list[str]]) -> None:
    assert set(functions) == set(ASKED_TARGETS)
    table = sorted((instance.kernel, instance.arguments) for instance in everything())
    for target in ASKED_TARGETS:
        kernels = [identify(symbol) for symbol in functions[target]]
        assert None not in kernels, "a function that is no kernel"
        assert sorted((kernel.name, kernel.arguments) for kernel in kernels if kernel) == table, target


@needs_kernels
def test_binary_holds_no_ptx() -> None:
    listing = run(cuda_tool("cuobjdump"), "-lelf", "-lptx", LIBRARY)
    assert set(re.findall(r"sm_(\w+)\.cubin", listing)) == set(ASKED_TARGETS)
    assert ".ptx" not in listing


def test_library_exports_exactly_the_c_interface() -> None:
    header = (PACKAGE / "include" / "attnres" / "attnres.h").read_text()
    declared = set(re.findall(r"ATTNRES_API\s[^;(]*?(attnres_\w+)\(", header))
    symbols = run("nm", "--dynamic", "--defined-only", "--format=posix", LIBRARY)
    # An absolute symbol ("A") is the name of a version.
    exported = {line.split("@")[0] for line in symbols.splitlines() if line.split()[1] != "A"}
    assert len(declared) > 10
    assert exported == declared


@pytest.mark.parametrize(
    ("library", "runpath"),
    [(LIBRARY, "$ORIGIN"), (next(PACKAGE.glob("_core*.so"), PACKAGE / "_core.so"), "$ORIGIN/lib")],
    ids=["libattnres", "_core"],
)
def test_library_needs_only_the_system_and_is_relocatable(library: Path, runpath: str) -> None:
    dynamic = run("readelf", "--dynamic", "--wide", library)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert needed <= ALLOWED_NEEDED
    assert re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic) == [runpath]


def test_library_holds_no_path_of_the_build_tree() -> None:
    assert str(ROOT / "build").encode() not in LIBRARY.read_bytes()
