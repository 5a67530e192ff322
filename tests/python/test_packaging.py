# SPDX-License-Identifier: Apache-2.0
"""What is said in several places agrees, and the installed distribution holds what it should."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import metadata

import check_dist
import libattnres
import pytest
from permutation_table import ROOT, Instance, axes, instances

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERSION = metadata.version("libattnres")


def test_header_library_package_and_changelog_have_one_version() -> None:
    header = (ROOT / "cpp/include/attnres/attnres.h").read_text()
    parts = [re.search(rf"ATTNRES_VERSION_{part} (\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    changelog = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changelog is not None
    assert ".".join(part[1] for part in parts if part) == VERSION
    assert libattnres.__version__ == VERSION
    assert changelog[1] == VERSION


def test_version_is_written_in_the_header_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]


@pytest.mark.skipif(os.environ.get("ATTNRES_CUDA") == "OFF", reason="built with ATTNRES_CUDA=OFF")
def test_library_registers_exactly_the_table() -> None:
    registered = [
        Instance(
            p["kernel"],
            (
                p["hidden_size"],
                p["num_sources"],
                *(
                    [p["rows_per_stage"], p["prefixes_per_row"]]
                    if p["kernel"] == "ring"
                    else [p["cluster_size"]]
                ),
                int(p["has_output_norm"]),
                int(p["static_common_path"]),
            ),
        )
        for p in libattnres.permutations()
    ]
    assert len(registered) == len(set(registered))
    assert set(registered) == instances()


def test_readme_names_the_table() -> None:
    readme = (ROOT / "README.md").read_text()
    table = axes()
    rows = dict(re.findall(r"^\| (H|N|NC|B|CLUSTER) \| ([\d, ]+?) \|", readme, re.MULTILINE))
    assert {name: values.split(", ") for name, values in rows.items()} == {
        "H": table["HIDDEN_SIZES"],
        "N": table["SOURCES"],
        "NC": table["RING_ROWS_PER_STAGE"],
        "B": table["RING_PREFIXES_PER_ROW"],
        "CLUSTER": table["CLUSTER_SIZES"],
    }
    count = re.search(r"(\d+) kernels per target", readme)
    assert count is not None
    assert int(count[1]) == len(instances())


def test_distribution_holds_the_package_the_library_and_its_development_files() -> None:
    files = {str(file) for file in metadata.files("libattnres") or []}
    inside = {file for file in files if file.startswith("libattnres/") and "__pycache__" not in file}
    modules = {file for file in inside if re.fullmatch(r"libattnres/_core\.[\w.-]+\.so", file)}
    assert len(modules) == 1
    assert inside - modules == check_dist.expected_package_files()
    assert any(file.endswith("licenses/LICENSE") for file in files)


def test_installed_size_is_within_its_limit() -> None:
    files = [file for file in metadata.files("libattnres") or [] if "__pycache__" not in str(file)]
    kind = "wheel" if libattnres.permutations() else "host-only wheel"
    assert sum(file.size or 0 for file in files) <= check_dist.LIMITS[f"{kind}, unpacked"]


def test_bill_of_materials_names_what_is_inside_the_binaries() -> None:
    (file,) = (file for file in metadata.files("libattnres") or [] if file.match("*.dist-info/sboms/*"))
    sbom = json.loads(file.read_text())
    assert sbom["metadata"]["component"]["purl"] == f"pkg:pypi/libattnres@{VERSION}"
    has_kernels = bool(libattnres.permutations())
    components = {part["name"] for part in sbom["components"]}
    assert components == {"pybind11"} | ({"cudart_static"} if has_kernels else set())
    references = {part["bom-ref"] for part in sbom["components"]}
    assert {name for entry in sbom["dependencies"] for name in entry["dependsOn"]} == references
    properties = {entry["name"]: entry["value"] for entry in sbom["metadata"]["properties"]}
    assert (properties["libattnres:cuda-targets"] == "none") is not has_kernels


def test_command_line_is_an_entry_point() -> None:
    (script,) = (
        point for point in metadata.entry_points(group="console_scripts") if point.name == "libattnres"
    )
    assert script.value == "libattnres.cli:main"
    assert callable(script.load())
