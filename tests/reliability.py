#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reliability.md, from the JSON files in docs/reliability.

    python tests/reliability.py            write them
    python tests/reliability.py --check    only say whether they are what the files say
    python tests/reliability.py --count    first count the tests and write docs/reliability/tests.json

Counting collects the Python tests with pytest and runs none, so it needs an installed libattnres. The C++
tests are counted in their source.
"""

from __future__ import annotations

import argparse
import ast
import collections
import datetime
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from libattnres.cli.report import BLOCK, markdown

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "reliability.md"

Record = dict[str, Any]


class Collector:
    """A pytest plugin that keeps what was collected."""

    def __init__(self) -> None:
        self.tests: dict[str, set[str]] = collections.defaultdict(set)
        self.cases: collections.Counter[str] = collections.Counter()
        self.gpu: collections.Counter[str] = collections.Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            name = item.path.name
            self.tests[name].add(item.nodeid.partition("[")[0])
            self.cases[name] += 1
            self.gpu[name] += item.get_closest_marker("gpu") is not None


def count_tests() -> Record:
    """What there is to run, by file."""
    collector = Collector()
    arguments = ["--collect-only", "-qq", "-p", "no:cacheprovider", str(ROOT / "tests" / "python")]
    if pytest.main(arguments, plugins=[collector]) != pytest.ExitCode.OK:
        raise RuntimeError("pytest could not collect the tests")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "python": [
            {
                "file": path.name,
                "what": first_sentence(ast.get_docstring(ast.parse(path.read_text())) or ""),
                "tests": len(collector.tests[path.name]),
                "cases": collector.cases[path.name],
                "gpu_cases": collector.gpu[path.name],
            }
            for path in sorted((ROOT / "tests" / "python").glob("test_*.py"))
        ],
        "cpp": [
            {
                "file": path.name,
                "what": first_sentence(leading_comment(path.read_text())),
                "tests": len(re.findall(r"^TEST_CASE\(", path.read_text(), re.MULTILINE)) or 1,
            }
            for path in sorted((ROOT / "tests" / "cpp").glob("test_*.c*"))
        ],
        "fuzz": [
            {
                "file": path.name,
                "what": first_sentence(leading_comment(path.read_text()).removeprefix("Fuzz target: ")),
                "inputs": len(list((path.parent / "corpus" / path.stem.removeprefix("fuzz_")).iterdir())),
            }
            for path in sorted((ROOT / "tests" / "fuzz").glob("fuzz_*.cpp"))
        ],
    }


def leading_comment(source: str) -> str:
    """The comment below the licence line, without its marks."""
    lines = []
    for line in source.splitlines()[1:]:
        if not line.startswith(("//", " *")):
            break
        lines.append(line.lstrip("/ *").rstrip("/ *"))
    return " ".join(lines)


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a word."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\w)\.(?: |$)", paragraph)[0].rstrip(".")


def totals(record: Record) -> str:
    """All of it in a sentence."""
    tests = sum(entry["tests"] for entry in record["python"])
    cases = sum(entry["cases"] for entry in record["python"])
    on_gpu = sum(entry["gpu_cases"] for entry in record["python"])
    cpp = sum(entry["tests"] for entry in record["cpp"])
    inputs = sum(entry["inputs"] for entry in record["fuzz"])
    parts = (
        f"{tests} Python tests in {len(record['python'])} files, run as {cases} cases",
        f"{on_gpu} of those need a GPU",
        f"{cpp} C++ tests in {len(record['cpp'])} programs",
        f"{inputs} inputs in the corpora of {len(record['fuzz'])} fuzz targets",
    )
    return f"Counted on {record['date']}: {'; '.join(parts)}."


def python_tests(record: Record) -> str:
    """Every file of Python tests."""
    return markdown(
        ["file", "what", "tests", "cases", "for a GPU"],
        [
            [f"`{entry['file']}`", entry["what"], entry["tests"], entry["cases"], entry["gpu_cases"]]
            for entry in record["python"]
        ],
    )


def cpp_tests(record: Record) -> str:
    """Every C++ test program and fuzz target."""
    rows = [[f"`{entry['file']}`", entry["what"], entry["tests"]] for entry in record["cpp"]]
    rows += [[f"`{entry['file']}`", entry["what"], f"{entry['inputs']} inputs"] for entry in record["fuzz"]]
    return markdown(["file", "what", "tests"], rows)


def sanitizer(record: Record) -> str:
    """What compute-sanitizer said."""
    table = markdown(
        ["tool", "program", "reported", "set aside", "errors"],
        [
            [run["tool"], run["case"], run["reported"], run["set_aside"], run["errors"]]
            for run in record["runs"]
        ],
    )
    verdict = "Nothing is left unexplained." if record["ok"] else "NOT CLEAN."
    where = f"{record['device']}, driver {record['driver']}, {record['date']}"
    return f"{where}. {record['compute_sanitizer']}. {verdict}\n\n{table}"


def entries(record: Record) -> str:
    """A record ``{"date": ..., ..., "runs": [{"column": value, ...}, ...]}``, whatever its list is called."""
    rows = next(value for value in record.values() if isinstance(value, list))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    about = ", ".join(f"{key.replace('_', ' ')} {text}" for key, text in record.items() if text is not rows)
    table = markdown(
        [column.replace("_", " ") for column in columns],
        [[inline(row.get(column)) for column in columns] for row in rows],
    )
    return f"{about[:1].upper()}{about[1:]}.\n\n{table}" if about else table


def inline(value: object) -> object:
    """What fits into a cell of a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return value.replace("|", "\\|").replace("\n", " ") if isinstance(value, str) else value


KINDS: dict[str, Callable[[Record], str]] = {
    "totals": totals,
    "python-tests": python_tests,
    "cpp-tests": cpp_tests,
    "sanitizer": sanitizer,
    "entries": entries,
}


def render(text: str, folder: Path) -> str:
    """The text with each of its blocks filled from its file, or saying that there is none."""

    def fill(match: re.Match[str]) -> str:
        kind, name = match["kind"], match["path"]
        path = folder / name
        body = f"Not recorded yet: there is no `{name}`."
        if path.exists():
            body = KINDS[kind](json.loads(path.read_text(encoding="utf-8")))
        return f"<!-- table {kind} {name} -->\n{body}\n<!-- end -->"

    return BLOCK.sub(fill, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count if asked to, then write or check."""
    parser = argparse.ArgumentParser(description="the tables of docs/reliability.md")
    parser.add_argument("--count", action="store_true", help="count the tests first")
    parser.add_argument("--check", action="store_true", help="only say whether the tables are up to date")
    options = parser.parse_args(arguments)
    if options.count:
        path = DOCUMENT.parent / "reliability" / "tests.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(count_tests(), indent=2) + "\n", encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    rendered = render(text, DOCUMENT.parent)
    current = rendered == text
    if options.check:
        print(f"{DOCUMENT}: {'up to date' if current else 'not what its JSON says'}")
        return int(not current)
    DOCUMENT.write_text(rendered, encoding="utf-8")
    print(f"{DOCUMENT}: {'unchanged' if current else 'updated'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
