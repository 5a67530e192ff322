# SPDX-License-Identifier: Apache-2.0
"""Check finished distributions: names, contents, sizes, metadata, exported symbols, bill of materials.

    python release/check_dist.py dist/*

prints a line for each file and each fault, and fails when there is a fault. Wheels are read and not
installed, so that those of another machine's architecture are checked as well.
"""

from __future__ import annotations

import argparse
import base64
import csv
import email
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "abi"))

import interface  # noqa: E402

MIB = 1 << 20
# The last build and about a third more; an index takes 100 MiB a file. Whoever raises one says why.
LIMITS = {
    "sdist": 1 * MIB,
    "wheel": 11 * MIB,
    "wheel, unpacked": 40 * MIB,
    "host-only wheel": MIB // 2,
    "host-only wheel, unpacked": 3 * MIB // 2,
}

LIBRARY = "libattnres/lib/libattnres.so"
DEVELOPMENT_FILES = {
    LIBRARY,
    "libattnres/py.typed",
    "libattnres/include/attnres/attnres.h",
    "libattnres/include/attnres/attnres.hpp",
    "libattnres/lib/cmake/attnres/attnresConfig.cmake",
    "libattnres/lib/cmake/attnres/attnresConfigVersion.cmake",
    "libattnres/lib/cmake/attnres/attnresTargets.cmake",
    "libattnres/lib/cmake/attnres/attnresTargets-release.cmake",
    "libattnres/lib/pkgconfig/attnres.pc",
}
METADATA_FILES = {
    "METADATA",
    "RECORD",
    "WHEEL",
    "entry_points.txt",
    "licenses/LICENSE",
    "sboms/libattnres.cdx.json",
}
# What a source distribution leaves out of the files that git tracks.
NOT_IN_SDIST = (".ci/", ".github/", "docs/performance/")


def header_version() -> str:
    """The version of the public header, the only place where it is written."""
    header = (ROOT / "cpp/include/attnres/attnres.h").read_text()
    found = [
        re.search(rf"#define ATTNRES_VERSION_{part} (\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")
    ]
    return ".".join(part[1] for part in found if part)


def expected_package_files() -> set[str]:
    """What the package folder of a wheel holds, the extension module aside."""
    sources = {
        str(file.relative_to(ROOT / "python"))
        for pattern in ("*.py", "*.pyi")
        for file in (ROOT / "python").rglob(pattern)
    }
    return DEVELOPMENT_FILES | sources


def expected_symbols() -> set[str]:
    """The exported symbols that the record of this version's interface names."""
    minor = header_version().rpartition(".")[0]
    record = (ROOT / f"tests/abi/attnres-{minor}.txt").read_text().splitlines()
    return {line for line in record if line.startswith("symbol ")}


def has_kernels(library: bytes) -> bool:
    """Whether a library was built with CUDA: nvcc puts device code into a section of its own."""
    return b".nv_fatbin" in library


@dataclass
class Report:
    """What is known of one file, and what is wrong with it."""

    path: Path
    facts: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def expect(self, condition: bool, fault: str) -> None:
        """Note a fault unless the condition holds."""
        if not condition:
            self.faults.append(fault)

    def expect_same(self, what: str, found: set[str], expected: set[str]) -> None:
        """Note what is missing and what nobody asked for."""
        for verb, names in (("missing", expected - found), ("unexpected", found - expected)):
            self.faults.extend(f"{what}: {verb} {name}" for name in sorted(names))

    def expect_size(self, what: str, size: int) -> None:
        """Note a size, and a fault when it is above its limit."""
        self.facts.append(f"{what} {size / MIB:.2f} of {LIMITS[what] / MIB:.1f} MiB")
        self.expect(size <= LIMITS[what], f"{what}: expected at most {LIMITS[what]} bytes, got {size}")


def _check_record(report: Report, wheel: zipfile.ZipFile, record: str) -> None:
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(wheel.read(record).decode()))}
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    report.expect_same("RECORD", set(rows), names)
    for name in names & set(rows) - {record}:
        digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).rstrip(b"=").decode()
        report.expect(rows[name][0] == f"sha256={digest}", f"RECORD: another hash for {name}")


def _check_sbom(report: Report, text: bytes, *, has_kernels: bool) -> None:
    sbom = json.loads(text)
    root = sbom["metadata"]["component"]
    report.expect(sbom["bomFormat"] == "CycloneDX", "SBOM: not CycloneDX")
    report.expect(
        (root["name"], root["version"]) == ("libattnres", header_version()), "SBOM: of another version"
    )
    components = {part["name"]: part["version"] for part in sbom["components"]}
    report.expect_same("SBOM", set(components), {"pybind11"} | ({"cudart_static"} if has_kernels else set()))
    report.expect(all(components.values()), "SBOM: a component without version")


def _check_metadata(report: Report, text: bytes) -> None:
    metadata = email.message_from_bytes(text)
    expected = {
        "Name": "libattnres",
        "Version": header_version(),
        "License-Expression": "Apache-2.0",
        "Requires-Python": ">=3.10",
        "Description-Content-Type": "text/markdown",
    }
    for name, value in expected.items():
        report.expect(metadata[name] == value, f"METADATA: {name}: expected {value}, got {metadata[name]}")


def check_wheel(path: Path) -> Report:
    """Check a wheel, with kernels or without."""
    report = Report(path)
    pattern = r"libattnres-(?P<version>[^-]+)-cp(?P<python>\d+)-cp(?P=python)-(?P<platform>[\w.]+)\.whl"
    name = re.fullmatch(pattern, path.name)
    if name is None:
        report.faults.append("not the name of a wheel of this project")
        return report
    machine = "aarch64" if name["platform"].endswith("aarch64") else "x86_64"
    report.expect(name["version"] == header_version(), f"name: expected version {header_version()}")
    with zipfile.ZipFile(path) as wheel:
        files = {file for file in wheel.namelist() if not file.endswith("/")}
        info = f"libattnres-{name['version']}.dist-info/"
        inside = {file for file in files if not file.startswith(info)}
        report.expect_same("dist-info", {file.removeprefix(info) for file in files - inside}, METADATA_FILES)
        module = f"libattnres/_core.cpython-{name['python']}-{machine}-linux-gnu.so"
        report.expect_same("contents", inside, expected_package_files() | {module})
        if report.faults:
            return report
        _check_record(report, wheel, info + "RECORD")
        _check_metadata(report, wheel.read(info + "METADATA"))
        kernels = has_kernels(wheel.read(LIBRARY))
        _check_sbom(report, wheel.read(info + "sboms/libattnres.cdx.json"), has_kernels=kernels)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(wheel.extract(LIBRARY, folder))
            report.expect_same("symbols", set(interface.describe_library(file)), expected_symbols())
        kind = "wheel" if kernels else "host-only wheel"
        report.expect_size(kind, path.stat().st_size)
        report.expect_size(f"{kind}, unpacked", sum(entry.file_size for entry in wheel.infolist()))
    return report


def check_sdist(path: Path) -> Report:
    """Check a source distribution against what git tracks."""
    report = Report(path)
    report.expect_size("sdist", path.stat().st_size)
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        report.expect(all(member.isfile() or member.isdir() for member in members), "holds links or devices")
        found = {member.name.partition("/")[2] for member in members if member.isfile()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    expected = {file for file in tracked.splitlines() if not file.startswith(NOT_IN_SDIST)}
    report.expect_same("contents", found, expected | {"PKG-INFO"})
    report.facts.append(f"{len(found)} files")
    return report


def check(path: Path) -> Report:
    """Check one distribution."""
    return check_wheel(path) if path.suffix == ".whl" else check_sdist(path)


def main() -> int:
    """Check the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path)
    reports = [check(file) for file in parser.parse_args().files]
    for report in reports:
        print(f"{report.path.name}: {', '.join(report.facts)}")
        for fault in report.faults:
            print(f"  {fault}")
    return 1 if any(report.faults for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
