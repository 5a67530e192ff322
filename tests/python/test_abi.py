# SPDX-License-Identifier: Apache-2.0
"""The binary interface: nothing of it changes without the version, and programs of an older header run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import interface
import libattnres
import pytest
from permutation_table import ROOT

ABI = ROOT / "tests" / "abi"
PACKAGE = Path(next(iter(libattnres.__path__)))
LIBRARY = PACKAGE / "lib" / "libattnres.so"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def expected_interface() -> list[str]:
    header = interface.read_header((PACKAGE / "include" / "attnres" / "attnres.h").read_text())
    file = ABI / "attnres-{}.{}.txt".format(*header.version)
    assert file.is_file(), f"{file.name}: a new version needs its interface: python tests/abi/interface.py"
    return file.read_text().splitlines()


def expected(*kinds: str) -> list[str]:
    """The lines of some kinds, with the indented lines that belong to them."""
    lines, keep = [], False
    for line in expected_interface():
        keep = keep if line.startswith(" ") else line.split()[0] in kinds
        lines += [line] if keep else []
    assert lines
    return lines


def test_constants_layouts_and_prototypes_change_only_with_the_version() -> None:
    assert interface.describe_header(PACKAGE / "include") == expected("constant", "struct", "function")


def test_exported_symbols_and_their_versions_change_only_with_the_version() -> None:
    assert interface.describe_library(LIBRARY) == expected("symbol")


def test_every_declared_function_has_a_symbol_of_a_version() -> None:
    declared = {re.sub(r"\(.*", "", line).split()[-1] for line in expected("function")}
    symbols = [line.removeprefix("symbol ").split("@@ATTNRES_") for line in expected("symbol")]
    assert {name for name, _ in symbols} == declared
    newest = tuple(int(part) for part in libattnres.__version__.split(".")[:2])
    for name, version in symbols:
        major, minor = version.split(".")
        assert (int(major), int(minor)) <= newest, name


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ("  int32_t num_blocks;", "  int32_t inserted;\n  int32_t num_blocks;", "int32_t inserted"),
        ("  int32_t batch_invariant;", "  int32_t batch_invariant;\n  int64_t appended;", "appended"),
        ("  float eps;", "  double eps;", "double eps"),
        ("  char target[16];", "  char target[32];", "target[32]"),
        ("  int32_t compute_major, compute_minor;", "  int32_t compute_minor, compute_major;", "compute_m"),
        ("ATTNRES_FLOAT16 = 1", "ATTNRES_FLOAT16 = 3", "ATTNRES_FLOAT16 = 3"),
        ("attnres_warmup(int32_t device)", "attnres_warmup(int64_t device)", "int64_t device"),
        ("ATTNRES_API int32_t attnres_version(void);", "", None),
    ],
    ids=["insert", "append", "type", "length", "order", "constant", "parameter", "removal"],
)
def test_a_changed_header_is_noticed(before: str, after: str, difference: str | None, tmp_path: Path) -> None:
    header = (PACKAGE / "include" / "attnres" / "attnres.h").read_text()
    assert before in header
    (tmp_path / "attnres").mkdir()
    (tmp_path / "attnres" / "attnres.h").write_text(header.replace(before, after, 1))
    described = set(interface.describe_header(tmp_path))
    known = set(expected("constant", "struct", "function"))
    assert described != known
    if difference is not None:
        assert any(difference in line for line in described - known)


def test_an_unversioned_or_additional_symbol_is_noticed(tmp_path: Path) -> None:
    source, library = tmp_path / "more.c", tmp_path / "libmore.so"
    source.write_text("int attnres_version(void) { return 0; }\nint attnres_more(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    assert interface.describe_library(library) == ["symbol attnres_more", "symbol attnres_version"]


def build(source: Path, include: Path, program: Path) -> Path:
    """A program for the library of the installed package, with the header of a folder."""
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    libraries = [LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}", "-lm"]
    subprocess.run(
        ["cc", "-std=c99", *warnings, f"-I{include}", source, *libraries, "-o", program], check=True
    )
    return program


@pytest.mark.parametrize(
    "source", [ABI / "older_program.c", ROOT / "tests/consumer/forward.c"], ids=lambda path: path.stem
)
@pytest.mark.parametrize("include", [ABI / "older", PACKAGE / "include"], ids=["older", "today"])
def test_program_with_the_header_runs_with_the_library(source: Path, include: Path, tmp_path: Path) -> None:
    program = build(source, include, tmp_path / "program")
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "matches" in result.stdout


def test_older_header_is_the_interface_of_today_without_its_last_fields() -> None:
    def fields(lines: list[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for line in lines:
            if line.startswith("struct "):
                found[name := line.split()[1].rstrip(":")] = []
            elif line.startswith("  "):
                found[name].append(line)
        return found

    older, today = fields(interface.describe_header(ABI / "older")), fields(expected("struct"))
    assert older.keys() <= today.keys()
    for name, lines in older.items():
        assert lines == today[name][: len(lines)], name
    shorter = {name for name in older if len(older[name]) < len(today[name])}
    assert shorter == {"attnres_forward_args", "attnres_plan_info", "attnres_probe_info"}


def test_program_needs_the_version_of_the_symbols_that_it_calls(tmp_path: Path) -> None:
    program = build(ABI / "older_program.c", ABI / "older", tmp_path / "program")
    listing = subprocess.run(
        ["readelf", "--version-info", "--wide", program], check=True, capture_output=True, text=True
    ).stdout
    needed = re.search(r"File: (libattnres\.so\S*) .*\n.*Name: (ATTNRES_\S+)", listing)
    assert needed is not None, listing
    assert needed[2] == "ATTNRES_0.1"
