# SPDX-License-Identifier: Apache-2.0
"""Find the CUDA compiler that builds libattnres.

Shared by the PEP 517 backend (is the compiler from PyPI needed?) and by CMake (which one is it?), so
that both always agree. Standard library only: CMake runs it with whatever Python there is.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MINIMUM_RELEASE = (13, 0)

# The whole toolkit must be pinned together: nvidia-cuda-nvcc alone leaves the headers and the runtime to
# whatever release is newest, and a mixed toolkit does not compile.
PYPI_REQUIREMENT = "cuda-toolkit[nvcc,cccl]==13.0.*"


def _system_candidates() -> Iterator[str]:
    if cudacxx := os.environ.get("CUDACXX"):
        yield cudacxx
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield str(Path(root) / "bin" / "nvcc")
    yield "nvcc"
    yield "/usr/local/cuda/bin/nvcc"


def release(nvcc: str) -> tuple[int, int] | None:
    """The release of a compiler, or None when it does not run."""
    try:
        run = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", run.stdout)
    return (int(match[1]), int(match[2])) if match else None


def system_nvcc() -> str | None:
    """The first compiler of this machine that is new enough."""
    for candidate in _system_candidates():
        path = shutil.which(candidate)
        if path is None:
            continue
        found = release(path)
        if found is not None and found >= MINIMUM_RELEASE:
            return path
    return None


def pypi_nvcc() -> str | None:
    """The compiler of the PyPI package PYPI_REQUIREMENT in this Python's environment."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        nvcc = Path(root) / "cu13" / "bin" / "nvcc"
        if nvcc.is_file():
            return str(nvcc)
    return None


if __name__ == "__main__":
    compiler = system_nvcc() or pypi_nvcc()
    if compiler is None:
        sys.exit(1)
    print(compiler)
