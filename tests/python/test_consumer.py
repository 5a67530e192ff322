# SPDX-License-Identifier: Apache-2.0
"""C and C++ programs built against the installed package, a moved copy, a plain install, and the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import libattnres
import pytest
from permutation_table import ROOT

CONSUMER = ROOT / "tests" / "consumer"
EXAMPLES = ROOT / "examples" / "cpp"
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


def package_folder(option: str) -> Path:
    """What the command line says, as a build script would ask."""
    return Path(run(sys.executable, "-m", "libattnres", option).strip())


def find_package(folder: Path, *arguments: str | Path, body: str) -> str:
    """The log of configuring a project of a few lines."""
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.22)\nproject(finder LANGUAGES C)\n{body}\n"
    )
    return run("cmake", "-S", folder, "-B", folder / "build", *arguments)


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
    body = (
        f"find_package(attnres {major}.{int(minor) + 1} CONFIG)\n"
        'message(STATUS "found=${attnres_FOUND}")\n'
        f"find_package(attnres {major}.{minor} CONFIG REQUIRED)\n"
        'message(STATUS "version=${attnres_VERSION}")'
    )
    log = find_package(tmp_path / "refused", f"-Dattnres_ROOT={PACKAGE}", body=body)
    assert "found=0" in log
    assert f"version={libattnres.__version__}" in log


def test_components_can_be_asked_for_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    body = (
        "find_package(attnres CONFIG REQUIRED COMPONENTS headers)\n"
        "if(TARGET attnres::attnres OR NOT TARGET attnres::headers)\n"
        '  message(FATAL_ERROR "headers alone were asked for")\n'
        "endif()\n"
        "find_package(attnres CONFIG REQUIRED COMPONENTS core OPTIONAL_COMPONENTS tensors)\n"
        "if(NOT TARGET attnres::attnres OR attnres_tensors_FOUND)\n"
        '  message(FATAL_ERROR "core was asked for, and there are no tensors")\n'
        "endif()\n"
        "find_package(attnres CONFIG COMPONENTS core tensors)\n"
        'message(STATUS "found=${attnres_FOUND}")'
    )
    log = find_package(tmp_path / "asked", f"-Dattnres_ROOT={PACKAGE}", body=body)
    assert "found=FALSE" in log or "found=0" in log


@pytest.mark.slow
def test_headers_can_be_installed_without_the_library(plain_install: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "headers"
    build = plain_install.parent / "build"
    run("cmake", "--install", build, "--prefix", prefix, "--component", "headers")
    assert not list(prefix.rglob("*.so*"))
    body = (
        "find_package(attnres CONFIG)\n"
        'message(STATUS "core=${attnres_core_FOUND} all=${attnres_FOUND}")\n'
        "find_package(attnres CONFIG REQUIRED COMPONENTS headers)"
    )
    assert "core= " in find_package(tmp_path / "finder", f"-Dattnres_ROOT={prefix}", body=body)


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["OFF", "ON"], ids=["add_subdirectory", "FetchContent"])
def test_a_project_can_contain_the_sources(fetch: str, tmp_path: Path) -> None:
    build = tmp_path / "build"
    options = [f"-DATTNRES_SOURCE={ROOT}", "-DATTNRES_CUDA=OFF", f"-DUSE_FETCH_CONTENT={fetch}"]
    run("cmake", "-S", CONSUMER / "from_source", "-B", build, *options, "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "--build", build, "--parallel", "2")
    assert "100% tests passed" in run("ctest", "--test-dir", build, "--no-tests=error")
    run("cmake", "--install", build, "--prefix", tmp_path / "prefix")
    installed = {path.name for path in (tmp_path / "prefix").rglob("*") if path.is_file()}
    assert installed == {"forward_cpp"}


def test_command_line_names_the_folders_of_a_build(tmp_path: Path) -> None:
    assert (package_folder("--include-dir") / "attnres" / "attnres.h").is_file()
    assert (package_folder("--pkg-config-dir") / "attnres.pc").is_file()
    body = "find_package(attnres CONFIG REQUIRED NO_DEFAULT_PATH)"
    find_package(tmp_path / "finder", f"-Dattnres_DIR={package_folder('--cmake-dir')}", body=body)


def test_command_line_names_the_folders_without_pytorch() -> None:
    program = (
        "import sys\n"
        "from libattnres.cli import main\n"
        "try:\n    main(['--cmake-dir', 'ignored'])\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    assert Path(run(sys.executable, "-c", program).strip()) == package_folder("--cmake-dir")


def test_commands_without_pytorch_say_what_they_need() -> None:
    program = (
        "import sys\nfrom libattnres.cli import main\nsys.modules['torch'] = None\nsys.exit(main(['info']))"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert re.fullmatch(r"libattnres: commands need PyTorch .*\n", result.stderr)


def test_package_is_an_entry_point_for_builds_with_scikit_build_core() -> None:
    for group in ("cmake.prefix", "cmake.root"):
        (point,) = (point for point in metadata.entry_points(group=group) if point.name == "attnres")
        assert point.load() is libattnres


@pytest.mark.slow
@pytest.mark.skipif(util.find_spec("scikit_build_core") is None, reason="no scikit-build-core")
def test_a_project_with_scikit_build_core_finds_the_package_by_itself(tmp_path: Path) -> None:
    for name in ("CMakeLists.txt", "forward.c", "forward.cpp", "load_at_run_time.c"):
        shutil.copy(CONSUMER / name, tmp_path)
    with (tmp_path / "CMakeLists.txt").open("a") as project:
        project.write("install(TARGETS forward_cpp DESTINATION consumer)\n")
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["scikit-build-core"]\nbuild-backend = "scikit_build_core.build"\n'
        '[project]\nname = "consumer"\nversion = "1"\n'
    )
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", tmp_path / "dist", tmp_path)
    assert list((tmp_path / "dist").glob("consumer-1-*.whl"))


def test_examples_build_and_run_without_a_toolkit(tmp_path: Path) -> None:
    build = tmp_path / "build"
    without = "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"
    run("cmake", "-S", EXAMPLES, "-B", build, f"-Dattnres_ROOT={PACKAGE}", without)
    run("cmake", "--build", build)
    assert run(build / "forward_host") == "prefix 1.5000, bank row 3 1.5000, output 1.8750\n"
    assert not (build / "forward_graph").exists()


@pytest.fixture(scope="module")
def graph_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with a CUDA graph, built where there is a toolkit."""
    build = tmp_path_factory.mktemp("examples")
    run("cmake", "-S", EXAMPLES, "-B", build, f"-Dattnres_ROOT={PACKAGE}")
    run("cmake", "--build", build)
    if not (build / "forward_graph").exists():
        pytest.skip("no CUDA toolkit")
    return build / "forward_graph"


def test_graph_example_says_why_it_cannot_run(graph_example: Path) -> None:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([graph_example], capture_output=True, text=True, env=hidden, check=False)
    assert result.returncode == 77, result.stderr
    assert re.fullmatch(r"the native kernels cannot run here: \S.*\n", result.stdout)


@pytest.mark.gpu
@pytest.mark.sm90
def test_graph_example_matches_the_cpu(graph_example: Path) -> None:
    assert "matches the CPU" in run(graph_example)


@pytest.mark.parametrize("name", ["CMakeLists.txt", "forward_host.cpp", "forward_graph.cpp"])
def test_documentation_shows_the_examples_as_they_are(name: str) -> None:
    licence, text = (EXAMPLES / name).read_text().split("\n", 1)
    assert "SPDX-License-Identifier" in licence
    blocks = re.findall(r"^```(?:cmake|cpp)\n(.*?)^```$", (ROOT / "docs/cpp.md").read_text(), re.M | re.S)
    assert text.lstrip("\n") in blocks


@pytest.mark.parametrize("page", ["README.md", "docs/cpp.md"])
def test_first_commands_for_cpp_lead_to_a_program_that_runs(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    commands = re.search(r"^```\n(cmake -S examples/cpp .*?)^```$", text, re.M | re.S)
    assert commands is not None
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "libattnres").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m libattnres "$@"\n')
    (programs / "libattnres").chmod(0o755)
    script = f'set -e; cd "{tmp_path}"; {commands[1]}'
    log = run("sh", "-c", script, PATH=f"{programs}:{os.environ['PATH']}")
    assert "prefix 1.5000, bank row 3 1.5000, output 1.8750" in log


@pytest.mark.parametrize("standard", ["c99", "c11", "c++11", "c++20"])
def test_c_header_is_clean_under_pedantic_warnings(standard: str, tmp_path: Path) -> None:
    compiler, suffix = ("c++", "cpp") if "++" in standard else ("cc", "c")
    source = tmp_path / f"header.{suffix}"
    source.write_text("#include <attnres/attnres.h>\nint main(void) { return attnres_version() == 0; }\n")
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    run(compiler, f"-std={standard}", *warnings, f"-I{PACKAGE / 'include'}", source)
