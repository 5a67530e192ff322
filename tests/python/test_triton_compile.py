# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for GPUs that need not be there, and the reasons why Triton may not run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from libattnres.backends import triton as backend
from libattnres.backends.triton import CubinVariant

pytest.importorskip("triton")

VARIANTS = list(backend.cubin_variants())


@pytest.fixture(autouse=True)
def fresh_answers() -> Iterator[None]:
    backend.toolchain_reason.cache_clear()
    yield
    backend.toolchain_reason.cache_clear()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def spilled_bytes(ptx: str, compute_capability: int, directory: Path) -> int:
    """Bytes that the assembler bundled with Triton spills."""
    import triton
    from triton.backends.nvidia.compiler import sm_arch_from_capability

    source = directory / "kernel.ptx"
    source.write_text(ptx)
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newest = folder / "ptxas-blackwell"
    assembler = newest if compute_capability >= 100 and newest.exists() else folder / "ptxas"
    target = sm_arch_from_capability(compute_capability)
    report = subprocess.run(
        [assembler, "-v", f"--gpu-name={target}", source, "-o", directory / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    stores = re.findall(r"(\d+) bytes spill stores", report)
    assert len(stores) == 1, report
    return int(stores[0])


@pytest.mark.parametrize("compute_capability", [90, 100, 103])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_cubin_for_each_target(variant: CubinVariant, compute_capability: int, tmp_path: Path) -> None:
    compiled = backend.compile_cubin(compute_capability, variant)
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    ptx = compiled.asm["ptx"]
    assert f".target sm_{compute_capability}" in ptx
    assert compiled.metadata.launch_pdl == (variant.pdl != "off")
    # A Python float must not become a double.
    assert ".f64" not in ptx
    assert compiled.metadata.shared <= 114 << 10
    assert spilled_bytes(ptx, compute_capability, tmp_path) == 0


@pytest.mark.parametrize("num_tokens", [1, 4096])
def test_programmatic_dependent_launch_order(num_tokens: int) -> None:
    def order(pdl: str) -> str:
        """W: wait. T: trigger. r: bank row on its way. l: load. s: store. b: barrier."""
        ptx = backend.compile_cubin(90, CubinVariant(num_tokens=num_tokens, pdl=pdl)).asm["ptx"]
        patterns = {
            "W": "griddepcontrol.wait",
            "T": "griddepcontrol.launch_dependents",
            "r": "cp.async.cg",
            "l": "ld.global",
            "s": "st.global",
            "b": "bar.sync",
        }
        lines = (
            next((key for key, text in patterns.items() if text in line), "") for line in ptx.splitlines()
        )
        return "".join(lines)

    off, wait, early = order("off"), order("wait"), order("early")
    assert "W" not in off
    assert "T" not in off
    # Only the two weights are loaded before the wait: 8192 elements, 256 threads, 8 elements a load.
    assert re.match(r"l{8}W[lr]", wait)
    # Bank rows start before the wait, prefix and delta are loaded and anything is stored after it.
    before, after = early.split("W")
    assert before.count("l") == 8
    assert "r" in before
    assert "s" not in before
    assert "r" not in after
    # Loads that depend on a predecessor are over at the trigger, and behind a barrier.
    for text in (wait, early):
        assert text.count("W") == 1
        assert text.count("T") == 1
        dependent, independent = text.split("T")
        assert "r" not in independent
        assert independent.count("l") == 4  # the output norm's weight
        # prefix, then a barrier, then the bank row, then a barrier, then the trigger
        assert re.search(r"s{4}b+s{4}b$", dependent)


def test_the_aligned_row_is_copied_asynchronously_and_the_odd_one_loads_still() -> None:
    aligned = backend.compile_cubin(90, CubinVariant())
    odd = backend.compile_cubin(90, CubinVariant(aligned=False))
    assert "cp.async.cg" in aligned.asm["ptx"]
    assert "cp.async.cg" not in odd.asm["ptx"]


def test_without_output_norm_its_weight_is_not_read() -> None:
    def loads(has_output_norm: bool) -> int:
        variant = CubinVariant(has_output_norm=has_output_norm)
        ptx: str = backend.compile_cubin(90, variant).asm["ptx"]
        return ptx.count("ld.global")

    assert loads(True) - loads(False) == 4


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("block", [1, 64, 1024, 8192, 16384])
@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10, 227 << 10])
def test_policy_fits_the_device(element_size: int, block: int, shared_memory: int) -> None:
    builds = {
        backend.policy(num_tokens, block, element_size, 132, shared_memory)
        for num_tokens in (1, 2, 16, 66, 67, 128, 132, 133, 1024, 65536)
    }
    assert len(builds) == 2
    # Bits that depend on the number of tokens would come from the number of warps.
    assert len({build.num_warps for build in builds}) == 1
    for build in builds:
        # No column belongs to two warps: 32 lanes of 16 bytes.
        assert build.num_warps == 1 or build.num_warps * 32 * (16 // element_size) <= block
        assert build.stages >= 2
        assert (build.stages - 1) * block * element_size + (1 << 10) <= shared_memory


def test_no_compiler_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert backend.toolchain_reason() == (
        "triton needs a C compiler, and neither gcc nor clang is on PATH and CC is not set"
    )
    backend.toolchain_reason.cache_clear()
    monkeypatch.setenv("CC", "/nonexistent/cc")
    assert backend.toolchain_reason() == (
        "triton needs a C compiler, and CC=/nonexistent/cc is not an executable"
    )


def test_no_python_header_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr("sysconfig.get_paths", lambda **_: {"include": str(tmp_path)})
    assert backend.toolchain_reason() == (
        f"triton needs Python's headers, and {tmp_path}/Python.h does not exist"
    )


def test_an_unwritable_cache_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", sys.executable)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_paths", lambda **_: {"include": str(tmp_path)})
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file / "cache"))
    assert backend.toolchain_reason() == (
        f"triton needs a writable cache, and {file}/cache is not (Not a directory): set TRITON_CACHE_DIR"
    )
    backend.toolchain_reason.cache_clear()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert backend.toolchain_reason() is None


def test_no_triton_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = backend.toolchain_reason()
    assert reason is not None
    assert reason.startswith("triton cannot be imported (ModuleNotFoundError")


def test_cpu_tensors_and_other_dtypes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    blocks = torch.zeros(1, 1, 8)
    assert backend.unsupported(torch.zeros(1, 8), blocks, 1) == (
        "triton needs CUDA tensors, prefix is on cpu"
    )
    assert backend.unsupported(torch.zeros(1, 8, dtype=torch.float64), blocks, 1) == (
        "triton computes bfloat16, float16 and float32, prefix is torch.float64"
    )


def test_importing_the_package_does_not_import_triton() -> None:
    code = "import sys, libattnres.backends.triton, libattnres.reference; assert 'triton' not in sys.modules"
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
