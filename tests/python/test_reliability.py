# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md: its tables are those of its JSON, and every test that it names exists."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from permutation_table import ROOT

DOCUMENT = ROOT / "docs" / "reliability.md"


@pytest.fixture(scope="module")
def reliability() -> ModuleType:
    return load("reliability", ROOT / "tests" / "reliability.py")


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def known_names() -> set[str]:
    """Files and functions of the tests."""
    names: set[str] = set()
    for path in [p for p in ROOT.glob("tests/**/*") if p.suffix in (".py", ".cpp", ".cu")]:
        names.add(path.name)
        for python, cpp in re.findall(r"^def (test_\w+)|^TEST_CASE\((\w+)", path.read_text(), re.MULTILINE):
            names.add(python or cpp)
    return names


def test_tables_are_those_of_the_json(reliability: ModuleType) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert reliability.render(text, DOCUMENT.parent) == text, "run python tests/reliability.py"


def test_every_test_that_the_document_names_exists() -> None:
    # Only the tables that people write name tests in their last column.
    text = re.sub(r"<!-- table .*?<!-- end -->", "", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    cells = [line.rstrip(" |").rpartition("| ")[2] for line in text.splitlines() if line.startswith("| ")]
    named = {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    assert len(named) > 60
    assert sorted(named - known_names()) == []
    # A row without a test is a claim without one.
    rows = [cell for cell in cells if cell not in ("tests", "noticed by", "must be noticed in")]
    assert [cell for cell in rows if "`" not in cell] == []


def test_each_mutation_still_finds_its_defence_and_its_test() -> None:
    """What the records change moves; a record that finds nothing proves nothing."""
    mutations = load("mutation_records", ROOT / "tests" / "mutations" / "records.py").MUTATIONS
    names = known_names()
    for mutation in mutations:
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation.name
        program, _, case = mutation.test.replace("::", " ").partition(" ")
        assert Path(program).name in names or f"{program.replace('replay_', 'fuzz_')}.cpp" in names, mutation
        # C++ tests are chosen by a part of their names.
        assert any(case in name for name in names), mutation.name


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("// SPDX\n// One thing. And\n// another.\n#include <a.h>\n", "One thing"),
        ("/* SPDX\n * The header in C99: two\n * tokens. */\n\nint main;\n", "The header in C99: two tokens"),
        ("// SPDX\n#include <a.h>\n", ""),
    ],
)
def test_what_a_program_is_for_is_read_from_its_first_comment(
    source: str, sentence: str, reliability: ModuleType
) -> None:
    assert reliability.first_sentence(reliability.leading_comment(source)) == sentence


def test_a_finding_of_the_sanitizer_is_shown(reliability: ModuleType, tmp_path: Path) -> None:
    record: dict[str, Any] = {
        "date": "2026-01-02",
        "device": "Some GPU",
        "driver": "580.1",
        "compute_sanitizer": "Version 2025.3",
        "ok": False,
        "runs": [{"tool": "memcheck", "case": "a case", "reported": 3, "set_aside": 1, "errors": 2}],
    }
    (tmp_path / "sanitizer.json").write_text(json.dumps(record))
    block = "<!-- table sanitizer {}.json -->\n<!-- end -->"
    rendered = reliability.render(block.format("sanitizer"), tmp_path)
    assert "Some GPU, driver 580.1, 2026-01-02. Version 2025.3. NOT CLEAN." in rendered
    assert "| memcheck | a case | 3 | 1 | 2 |" in rendered
    assert "Not recorded yet: there is no `other.json`." in reliability.render(
        block.format("other"), tmp_path
    )


def test_a_list_of_records_is_a_table(reliability: ModuleType) -> None:
    record = {
        "date": "2026-01-02",
        "runs": [
            {"defence": "a | b", "noticed_by": ["x", "y"]},
            {"defence": "c", "seconds": 1.5, "ok": True},
        ],
    }
    assert reliability.entries(record) == (
        "Date 2026-01-02.\n\n"
        "| defence | noticed by | seconds | ok |\n"
        "| --- | --- | --- | --- |\n"
        "| a \\| b | x, y |  |  |\n"
        "| c |  | 1.5 | yes |"
    )
