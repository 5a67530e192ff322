# SPDX-License-Identifier: Apache-2.0
"""What a C program relies on, as text: declarations, layouts as compiled, symbols of the library.

    python tests/abi/interface.py > tests/abi/attnres-X.Y.txt     # of the installed package

writes what ``tests/python/test_abi.py`` expects of version X.Y. The documentation's page of the C interface
is made from the same reading of the header.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Member:
    """A field, an enumerator, or a function, and the comment that belongs to it."""

    declaration: str
    comment: str

    @property
    def name(self) -> str:
        """The name that is declared: before the parameters, the array's length or the value."""
        match = re.search(r"(\w+)\s*(?:\(.*\)|\[\w+\]|= *-?\w+)?$", self.declaration)
        assert match is not None, self.declaration
        return match[1]


@dataclass
class Item:
    """One declaration at file scope; functions that share a comment are one item."""

    kind: str  # "struct", "enum" or "functions"
    name: str  # empty for an enum without one, and for functions
    comment: str
    members: list[Member] = field(default_factory=list)


@dataclass
class Header:
    """A header in the order of its text."""

    introduction: str
    version: tuple[int, int, int]
    items: list[Item]


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _declaration(text: str) -> str:
    return re.sub(r"\s*([\[(])\s*", r"\1", _one_line(text))


def _comment(text: str) -> str:
    """The text of a block comment, with its line breaks and its indentation."""
    lines = [re.sub(r"^\s*\*(?!/) ?", "", line).rstrip() for line in text[2:-2].strip().split("\n")]
    return "\n".join(lines).strip()


def _members(body: str, separator: str) -> Iterator[Member]:
    """Declarations of a body; a comment belongs to what it follows on a line, or else to what it precedes."""
    above = ""
    last: Member | None = None
    token = re.compile(rf"(\s*)(/\*.*?\*/|[^{separator}/]+{separator}?)", re.DOTALL)
    for space, text in token.findall(body.strip()):
        if text.startswith("/*"):
            if last is not None and "\n" not in space:
                last.comment = _one_line(_comment(text))
            else:
                above = _one_line(_comment(text))
        elif text.strip(f" \n{separator}"):
            if last is not None:
                yield last
            last = Member(_declaration(text.rstrip(f" \n{separator}")), above)
            above = ""
    if last is not None:
        yield last


_ITEM = re.compile(
    r"(?P<comment>/\*.*?\*/)"
    r"|typedef struct (?P<struct>\w+) \{(?P<fields>.*?)\n\} \w+;"
    r"|(?:typedef )?enum (?P<enum>\w*) ?\{(?P<enumerators>.*?)\}[^;{}]*;"
    r"|^ATTNRES_API (?P<function>[^;]*);",
    re.DOTALL | re.MULTILINE,
)


def read_header(text: str) -> Header:
    """Take a header apart. It is our own header, so that its style may be relied on."""
    version = [
        re.search(rf"#define ATTNRES_VERSION_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")
    ]
    major, minor, patch = (int(match[1]) for match in version if match)
    introduction = ""
    items: list[Item] = []
    comment, end = "", 0
    for match in _ITEM.finditer(text):
        adjacent = text[end : match.start()].strip() == "" and "\n\n" not in text[end : match.start()]
        end = match.end()
        if match["comment"]:
            comment = _comment(match["comment"])
            introduction = introduction or comment
            continue
        comment = comment if adjacent else ""
        if match["struct"]:
            fields = list(_fields(match["fields"]))
            items.append(Item("struct", match["struct"], comment, fields))
        elif match["enumerators"]:
            items.append(Item("enum", match["enum"], comment, list(_members(match["enumerators"], ","))))
        else:
            function = Member(_declaration(match["function"]), "")
            if adjacent and not comment and items and items[-1].kind == "functions":
                items[-1].members.append(function)
            else:
                items.append(Item("functions", "", comment, [function]))
        comment = ""
    return Header(introduction, (major, minor, patch), items)


def _fields(body: str) -> Iterator[Member]:
    for member in _members(body, ";"):
        first, *others = (part.strip() for part in member.declaration.split(","))
        yield Member(first, member.comment)
        for other in others:
            yield Member(f"{first.split()[0]} {other}", member.comment)


def _layout_program(header: Header) -> str:
    lines = ["#include <attnres/attnres.h>", "#include <stdio.h>", "int main(void) {"]
    for item in header.items:
        if item.kind == "enum":
            for member in item.members:
                lines.append(f'  printf("constant {member.name} = %d\\n", (int){member.name});')
        elif item.kind == "struct":
            lines.append(
                f'  printf("struct {item.name}: %zu bytes, aligned to %zu\\n", sizeof({item.name}),'
                f" offsetof(struct {{ char c; {item.name} s; }}, s));"
            )
            for member in item.members:
                where = f"offsetof({item.name}, {member.name}), sizeof((({item.name}*)0)->{member.name})"
                lines.append(f'  printf("  %zu, %zu bytes: {member.declaration}\\n", {where});')
    return "\n".join([*lines, "  return 0;", "}", ""])


def describe_header(include: Path) -> list[str]:
    """Constants, layouts and prototypes of ``attnres/attnres.h`` in a folder; needs a C compiler."""
    header = read_header((include / "attnres" / "attnres.h").read_text())
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "layout.c"), Path(folder, "layout")
        source.write_text(_layout_program(header))
        subprocess.run(["cc", "-std=c99", f"-I{include}", source, "-o", program], check=True)
        lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    functions = (member for item in header.items if item.kind == "functions" for member in item.members)
    return lines + [f"function {function.declaration}" for function in functions]


def describe_library(library: Path) -> list[str]:
    """The symbols that a shared library exports, each with its version."""
    command = ["nm", "--dynamic", "--defined-only", "--with-symbol-versions", "--format=posix", str(library)]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [f"symbol {line.split()[0]}" for line in sorted(symbols.splitlines()) if line.split()[1] != "A"]


if __name__ == "__main__":
    import libattnres

    PACKAGE = Path(next(iter(libattnres.__path__)))
    described = describe_header(PACKAGE / "include") + describe_library(PACKAGE / "lib" / "libattnres.so")
    sys.stdout.write("\n".join(described) + "\n")
