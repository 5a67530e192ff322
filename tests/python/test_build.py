# SPDX-License-Identifier: Apache-2.0
"""The build's own logic: which CUDA compiler it takes, and what it generates from the table."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from permutation_table import ROOT, Instance, instances

CMAKE_FOLDER = ROOT / "cpp" / "cmake"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CMAKE_FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_nvcc(folder: Path, release: str) -> Path:
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """find_nvcc on a machine without any CUDA toolkit."""
    for variable in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "ATTNRES_CUDA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    find_nvcc = load("find_nvcc")
    which = find_nvcc.shutil.which
    monkeypatch.setattr(
        find_nvcc.shutil, "which", lambda name: None if name.startswith("/usr/local/") else which(name)
    )
    monkeypatch.setitem(sys.modules, "find_nvcc", find_nvcc)
    monkeypatch.chdir(ROOT)
    return find_nvcc


def test_compiler_comes_from_pypi_when_the_machine_has_none(no_toolkit: ModuleType) -> None:
    assert no_toolkit.system_nvcc() is None
    for hook in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
        assert "cuda-toolkit[nvcc,cccl]==13.0.*" in getattr(load("build_backend"), hook)()


def test_compiler_on_path_is_taken_and_nothing_is_required(no_toolkit: ModuleType, tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path / "bin", "13.1")
    assert no_toolkit.system_nvcc() == str(nvcc)
    requirements = load("build_backend").get_requires_for_build_wheel()
    assert not [requirement for requirement in requirements if "cuda" in requirement]


def test_too_old_compiler_is_passed_over(no_toolkit: ModuleType, tmp_path: Path) -> None:
    fake_nvcc(tmp_path / "bin", "12.9")
    assert no_toolkit.system_nvcc() is None
    assert no_toolkit.PYPI_REQUIREMENT in load("build_backend").get_requires_for_build_wheel()


def test_cudacxx_comes_before_path(
    no_toolkit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path / "bin", "13.0")
    named = fake_nvcc(tmp_path / "named", "13.2")
    monkeypatch.setenv("CUDACXX", str(named))
    assert no_toolkit.system_nvcc() == str(named)


def test_host_only_build_requires_no_compiler(
    no_toolkit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = load("build_backend")
    off = {"cmake.define.ATTNRES_CUDA": "OFF"}
    assert no_toolkit.PYPI_REQUIREMENT not in backend.get_requires_for_build_wheel(off)
    monkeypatch.setenv("ATTNRES_CUDA", "off")
    assert no_toolkit.PYPI_REQUIREMENT not in backend.get_requires_for_build_wheel()


def generate(output: Path, **options: str) -> subprocess.CompletedProcess[str]:
    """Run the generator as CMake's configure step does, with no compiler."""
    settings = {"ATTNRES_CUDA_TARGETS": "90a;100a;103a", "ATTNRES_HIDDEN_SIZES": "7168"} | options
    script = output.parent / "generate.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.28)\n"
        f'include("{ROOT}/cuda/instances.cmake")\n'
        f'include("{CMAKE_FOLDER}/GenerateInstances.cmake")\n'
        f'attnres_generate_instances("{output}" sources)\n'
    )
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    return subprocess.run(["cmake", *definitions, "-P", script], capture_output=True, text=True, check=False)


def parse(text: str, ring: str, cluster: str) -> list[Instance]:
    """The instances on lines that look like `<ring>(arguments)`, in any bracket."""
    found = []
    for line in text.splitlines():
        for kernel, prefix in (("ring", ring), ("cluster", cluster)):
            if line.startswith(prefix):
                arguments = line[len(prefix) + 1 :].rstrip(">;)").split(", ")
                numbers = {"true": 1, "false": 0}
                found.append(Instance(kernel, tuple(int(numbers.get(word, word)) for word in arguments)))
    return found


def test_every_line_of_the_table_is_instantiated_and_registered_once(tmp_path: Path) -> None:
    output = tmp_path / "generated"
    assert generate(output).returncode == 0
    sources = "".join(file.read_text() for file in output.glob("*.cu"))
    prefix = "template struct attnres::"
    instantiated = parse(sources, f"{prefix}RingInstance", f"{prefix}ClusterInstance")
    registered = parse((output / "registry.inc").read_text(), "ATTNRES_RING", "ATTNRES_CLUSTER")
    assert len(instantiated) == len(registered) == len(instances())
    assert set(instantiated) == set(registered) == instances()
    assert (output / "built_targets.inc").read_text() == '"90a;100a;103a"\n'


def test_configuring_again_rewrites_nothing(tmp_path: Path) -> None:
    output = tmp_path / "generated"
    generate(output)
    before = {file: file.stat().st_mtime_ns for file in output.iterdir()}
    assert generate(output).returncode == 0
    assert before == {file: file.stat().st_mtime_ns for file in output.iterdir()}


@pytest.mark.parametrize(
    ("option", "value"), [("ATTNRES_CUDA_TARGETS", "90a;80"), ("ATTNRES_HIDDEN_SIZES", "7168;4096")]
)
def test_unknown_target_or_hidden_size_is_an_error(option: str, value: str, tmp_path: Path) -> None:
    result = generate(tmp_path / "generated", **{option: value})
    assert result.returncode != 0
    assert f"{option}: expected" in result.stderr
    assert f'got "{value.split(";")[1]}"' in " ".join(result.stderr.split())
    assert not list(tmp_path.glob("generated/*.cu"))
