# SPDX-License-Identifier: Apache-2.0
"""C and C++ programs built against the installed package, a moved copy of it, and a plain CMake install."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import libattnres
import pytest
from permutation_table import ROOT

CONSUMER = ROOT / "tests" / "consumer"
PACKAGE = Path(next(iter(libattnres.__path__)))


def run(*command: str | Path, **environment: str) -> str:
    # Variables that would let a program find the library, or a toolkit, by another way.
    hidden = {"LD_LIBRARY_PATH", "CPATH", "LIBRARY_PATH", "CMAKE_PREFIX_PATH", "CUDACXX", "CUDA_PATH"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    result = subprocess.run(command, capture_output=True, text=True, env=kept | environment, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def copy_prefix(source: Path, destination: Path) -> Path:
    for folder in ("include", "lib"):
        shutil.copytree(source / folder, destination / folder, symlinks=True)
    return destination


def build_and_run_with_cmake(prefix: Path, build: Path) -> None:
    run("cmake", "-S", CONSUMER, "-B", build, f"-Dattnres_ROOT={prefix}", "-DCMAKE_BUILD_TYPE=Release")
    cache = (build / "CMakeCache.txt").read_text()
    assert f"attnres_DIR:PATH={prefix}/lib" in cache
    assert "CMAKE_CUDA_COMPILER" not in cache
    run("cmake", "--build", build)
    assert "100% tests passed" in run("ctest", "--test-dir", build, "--no-tests=error")


def build_and_run_with_pkg_config(prefix: Path, build: Path) -> None:
    build.mkdir()
    (libdir,) = (path.parent.parent for path in prefix.glob("lib*/**/attnres.pc"))
    flags = run(
        "pkg-config", "--cflags", "--libs", "attnres", PKG_CONFIG_PATH=str(libdir / "pkgconfig")
    ).split()
    rpath = f"-Wl,-rpath,{libdir}"
    for compiler, standard, source in (("cc", "c99", "forward.c"), ("c++", "c++20", "forward.cpp")):
        program = build / source.replace(".", "_")
        run(compiler, f"-std={standard}", CONSUMER / source, *flags, rpath, "-lm", "-o", program)
        assert "matches" in run(program)


@pytest.fixture(scope="module")
def plain_install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host-only `cmake --install`, moved to another folder after it was installed."""
    folder = tmp_path_factory.mktemp("plain")
    run("cmake", "-S", ROOT, "-B", folder / "build", "-DATTNRES_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "--build", folder / "build", "--parallel", "2")
    run("cmake", "--install", folder / "build", "--prefix", folder / "first")
    return (folder / "first").rename(folder / "second")


def test_cmake_projects_build_and_run_against_the_installed_package(tmp_path: Path) -> None:
    build_and_run_with_cmake(PACKAGE, tmp_path / "build")


def test_cmake_projects_build_and_run_against_a_moved_copy(tmp_path: Path) -> None:
    build_and_run_with_cmake(copy_prefix(PACKAGE, tmp_path / "else where"), tmp_path / "build")


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="no pkg-config")
def test_programs_build_and_run_with_pkg_config(tmp_path: Path) -> None:
    build_and_run_with_pkg_config(copy_prefix(PACKAGE, tmp_path / "moved"), tmp_path / "build")


@pytest.mark.slow
def test_programs_build_and_run_against_a_moved_plain_install(plain_install: Path, tmp_path: Path) -> None:
    build_and_run_with_cmake(plain_install, tmp_path / "cmake")
    if shutil.which("pkg-config") is not None:
        build_and_run_with_pkg_config(plain_install, tmp_path / "pkg-config")


@pytest.mark.slow
def test_plain_install_has_a_versioned_library(plain_install: Path) -> None:
    (link,) = plain_install.glob("lib*/**/libattnres.so")
    major, minor, patch = libattnres.__version__.split(".")
    assert link.is_symlink()
    assert link.resolve().name == f"libattnres.so.{major}.{minor}.{patch}"
    assert f"[libattnres.so.{major}.{minor}]" in run("readelf", "--dynamic", link)


def test_another_minor_version_is_refused(tmp_path: Path) -> None:
    major, minor, _ = libattnres.__version__.split(".")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\n"
        "project(refused LANGUAGES C)\n"
        f"find_package(attnres {major}.{int(minor) + 1} CONFIG)\n"
        'message(STATUS "found=${attnres_FOUND}")\n'
        f"find_package(attnres {major}.{minor} CONFIG REQUIRED)\n"
    )
    log = run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-Dattnres_ROOT={PACKAGE}")
    assert "found=0" in log


@pytest.mark.parametrize("standard", ["c99", "c11", "c++11", "c++20"])
def test_c_header_is_clean_under_pedantic_warnings(standard: str, tmp_path: Path) -> None:
    compiler, suffix = ("c++", "cpp") if "++" in standard else ("cc", "c")
    source = tmp_path / f"header.{suffix}"
    source.write_text("#include <attnres/attnres.h>\nint main(void) { return attnres_version() == 0; }\n")
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    run(compiler, f"-std={standard}", *warnings, f"-I{PACKAGE / 'include'}", source)
