# SPDX-License-Identifier: Apache-2.0
"""PEP 517 backend: scikit-build-core, plus NVIDIA's compiler from PyPI where there is no other.

No setting can express "only when this machine has no nvcc >= 13", hence this file. Run as a program it
prints what a build here requires, one requirement a line, for builds without isolation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from scikit_build_core import build as _skbuild
from scikit_build_core.build import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).resolve().parent))

import find_nvcc

ConfigSettings = Mapping[str, str | list[str]] | None

_OFF = {"OFF", "0", "NO", "FALSE", "N"}


def _wants_cuda(config_settings: ConfigSettings) -> bool:
    setting = (config_settings or {}).get("cmake.define.ATTNRES_CUDA", os.environ.get("ATTNRES_CUDA", "ON"))
    return str(setting).upper() not in _OFF


def _compiler_requirements(config_settings: ConfigSettings) -> list[str]:
    if not _wants_cuda(config_settings) or find_nvcc.system_nvcc() is not None:
        return []
    return [find_nvcc.PYPI_REQUIREMENT]


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    requirements = _skbuild.get_requires_for_build_wheel(config_settings)
    return requirements + _compiler_requirements(config_settings)


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    requirements = _skbuild.get_requires_for_build_editable(config_settings)
    return requirements + _compiler_requirements(config_settings)


if __name__ == "__main__":
    print(*get_requires_for_build_wheel(), sep="\n")
