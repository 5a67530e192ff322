# SPDX-License-Identifier: Apache-2.0
"""What is inside the installed shared libraries: kernels, exported symbols and dependencies."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import libattnres
import pytest
from permutation_table import ROOT, TARGETS, Instance, floors, instances

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


@dataclass(frozen=True)
class Usage:
    """What one kernel takes, in bytes where it is not registers."""

    registers: int
    stack: int
    local: int


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def cuda_tool(name: str) -> str:
    """A tool of the CUDA toolkit: from PyPI, where the test requirements put it, else from PATH."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (tool := Path(root) / "cu13" / "bin" / name).is_file():
            return str(tool)
    tool_on_path = shutil.which(name)
    assert tool_on_path is not None, f"{name} is a test requirement, but is not installed"
    return tool_on_path


@pytest.fixture(scope="module")
def kernels() -> dict[str, dict[Instance, Usage]]:
    """Resource usage by target and instance, read from the binary."""
    found: dict[str, dict[Instance, Usage]] = defaultdict(dict)
    target, instance = "", None
    for line in run(cuda_tool("cuobjdump"), "-res-usage", LIBRARY).splitlines():
        if match := re.search(r"arch = sm_(\w+)", line):
            target = match[1]
        elif match := re.search(r"Function \w*?(ring|cluster|floor)_kernelI((?:L[ib]\d+E)+)E", line):
            arguments = tuple(int(value) for value in re.findall(r"L[ib](\d+)E", match[2]))
            instance = Instance(match[1], arguments)
        elif (match := re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", line)) and instance is not None:
            assert instance not in found[target], f"{instance} is in the binary twice for {target}"
            found[target][instance] = Usage(*(int(value) for value in match.groups()))
            instance = None
    return found


@needs_kernels
def test_binary_holds_exactly_the_table_for_every_target(kernels: dict[str, dict[Instance, Usage]]) -> None:
    assert set(kernels) == set(ASKED_TARGETS)
    for target in ASKED_TARGETS:
        assert set(kernels[target]) == instances() | floors(), target


@needs_kernels
def test_no_kernel_spills_or_uses_local_memory(kernels: dict[str, dict[Instance, Usage]]) -> None:
    offenders = [
        (target, instance, usage)
        for target, usages in kernels.items()
        for instance, usage in usages.items()
        if usage.stack or usage.local
    ]
    assert kernels
    assert not offenders


@needs_kernels
def test_binary_holds_no_ptx_and_no_other_kernel() -> None:
    listing = run(cuda_tool("cuobjdump"), "-lelf", "-lptx", LIBRARY)
    assert set(re.findall(r"sm_(\w+)\.cubin", listing)) == set(ASKED_TARGETS)
    assert ".ptx" not in listing
    functions = re.findall(r"Function (\S+?):", run(cuda_tool("cuobjdump"), "-res-usage", LIBRARY))
    assert all(re.search(r"(forward_ring|forward_cluster|floor)_kernelI", function) for function in functions)


def test_library_exports_exactly_the_c_interface() -> None:
    header = (PACKAGE / "include" / "attnres" / "attnres.h").read_text()
    declared = set(re.findall(r"ATTNRES_API\s[^;(]*?(attnres_\w+)\(", header))
    symbols = run("nm", "--dynamic", "--defined-only", "--format=posix", LIBRARY)
    exported = {line.split()[0] for line in symbols.splitlines()}
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
