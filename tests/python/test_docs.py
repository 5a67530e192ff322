# SPDX-License-Identifier: Apache-2.0
"""The documentation: links of the repository's pages, and the pages that the site makes from the sources."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import interface
import libattnres
import pytest
from permutation_table import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def without_code(markdown: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]+`", "", markdown, flags=re.MULTILINE | re.DOTALL)


def anchors(markdown: str) -> set[str]:
    """The anchors of a page's headings, as repositories show them."""
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site_build", ROOT / "docs" / "site" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_to_a_file_and_to_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{page.name}: {target}"


def test_c_reference_has_every_declaration_of_the_header(site: ModuleType) -> None:
    page = site.c_page()
    header = interface.read_header((ROOT / "cpp/include/attnres/attnres.h").read_text())
    names = {member.name for item in header.items for member in item.members}
    assert len(names) > 60
    assert {name for name in names if not re.search(rf"\b{name}\b", page)} == set()
    assert "the caller promises that no kernel that may still be running" in page


def test_python_reference_has_every_public_name(site: ModuleType) -> None:
    page = site.python_page()
    public = {name for name in libattnres.__all__ if not name.startswith("__")}
    assert set(re.findall(r"^\.\. auto\w+:: libattnres\.(\w+)$", page, re.MULTILINE)) == public


def test_every_page_is_in_the_navigation_once(site: ModuleType) -> None:
    listed = re.findall(r"^[\w-]+$", site.contents(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= set(listed)


def test_links_of_the_repository_become_links_of_the_site(site: ModuleType) -> None:
    text = (
        "[docs/plan.md](docs/plan.md), [rules](CONTRIBUTING.md#commits), [law](LICENSE), `[x](docs/plan.md)`"
    )
    expected = "[](plan.md), [rules](contributing.md#commits), law, `[x](docs/plan.md)`"
    assert site.with_links_of_the_site(text, from_root=True) == expected


def test_links_that_lead_nowhere_are_found(site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<h1 id="top">x</h1><a href="#top">a</a><a href="bad.html">b</a>')
    (tmp_path / "bad.html").write_text(
        '<a href="good.html#top">a</a><a href="none.html">b</a><a href="good.html#none">c</a>'
        '<a href="https://example.org">d</a><script src="https://example.org/x.js"></script>'
    )
    assert site.broken_links(tmp_path) == [
        "bad.html: none.html does not exist",
        "bad.html: good.html#none has no such anchor",
        "bad.html: loads https://example.org/x.js from another site",
    ]
