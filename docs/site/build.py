# SPDX-License-Identifier: Apache-2.0
"""The documentation as a static site, from docs/, other files of the repository, docstrings and headers.

    python docs/site/build.py OUTPUT

Needs the dependency group ``docs`` and an importable libattnres. Refuses warnings, links that lead nowhere,
and pages that load anything from another site.
"""

from __future__ import annotations

import html
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import libattnres

SITE = Path(__file__).resolve().parent
ROOT = SITE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "abi"))

import interface  # noqa: E402

HEADER = ROOT / "cpp/include/attnres/attnres.h"

# Pages of the site that lie outside docs/.
ELSEWHERE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

# The order of the navigation; a page of docs/ that is not named comes at the end of the first part.
CONTENTS = {
    "Use": ["install", "operator", "two_phase", "backends", "plan", "pdl", "cpp"],
    "Reference": ["python", "c", "hpp"],
    "Evidence": ["performance", "blackwell", "reliability"],
    "Project": ["contributing", "releasing", "changelog"],
}


def contents() -> str:
    """The navigation, hidden at the end of the first page."""
    trees = []
    named = {page for pages in CONTENTS.values() for page in pages}
    others = sorted({page.stem for page in (ROOT / "docs").glob("*.md")} - named)
    for caption, pages in CONTENTS.items():
        pages = pages + others
        others = []
        trees += ["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""]
    return "\n".join(["", *trees])


def is_module(name: str) -> bool:
    """Whether a public name is a module rather than a function or a class."""
    return isinstance(getattr(libattnres, name), type(libattnres))


def python_page() -> str:
    """Docstrings: functions, classes, then modules."""
    names = [name for name in libattnres.__all__ if not name.startswith("__")]
    modules = [name for name in names if is_module(name)]
    classes = [name for name in names if name[0].isupper()]
    functions = sorted({*names} - {*modules, *classes}, key=lambda name: (name != "attn_res", name))
    lines = ["# Python", "", "Everything public of `libattnres`, from its docstrings.", ""]
    lines += ["## Functions", ""]
    for name in functions:
        lines += directive("autofunction", f"libattnres.{name}")
    lines += ["## Classes", ""]
    for name in classes:
        lines += directive("autoclass", f"libattnres.{name}", ":members:")
    for name in modules:
        lines += [f"## Module `{name}`", "", *directive("automodule", f"libattnres.{name}", ":members:")]
    return "\n".join(lines)


def directive(name: str, argument: str, *options: str) -> Iterator[str]:
    """A directive of reStructuredText, as docstrings are."""
    yield from ("```{eval-rst}", f".. {name}:: {argument}")
    yield from (f"   {option}" for option in options)
    yield from ("```", "")


_NAME = re.compile(
    r"`[^`]*`|\b(?:sizeof\(\w+\)|attnres_\w+(?:\([^()]*\))?|(?:LIB)?ATTNRES_\w+\*?|args?->\w+)"
)


def marked_up(comment: str) -> str:
    """A comment of the header as Markdown in one paragraph."""
    text = _NAME.sub(lambda match: f"`{match[0].strip('`')}`", " ".join(comment.split()))
    return re.sub(r"(`[^`]*`)|([<>|])", lambda m: m[1] or html.escape(m[2]).replace("|", "&#124;"), text)


def c_page() -> str:
    """Declarations and comments of attnres.h."""
    header = interface.read_header(HEADER.read_text())
    introduction = header.introduction.split("\n", 2)[2].strip()
    version = ".".join(map(str, header.version))
    lines = ["# C", "", f"`<attnres/attnres.h>` of libattnres {version}, from its comments.", ""]
    lines += ["```", introduction, "```", "", "## Functions", ""]
    for item in (item for item in header.items if item.kind == "functions"):
        *others, last = (member.declaration for member in item.members)
        for declaration in others:
            lines += [f"```{{c:function}} {declaration}", "```", ""]
        lines += [f"```{{c:function}} {last}", marked_up(item.comment), "```", ""]
    lines += ["## Structs", ""]
    for item in (item for item in header.items if item.kind == "struct"):
        lines += [f"```{{c:struct}} {item.name}", marked_up(item.comment), ""]
        lines += ["| field | type | |", "|---|---|---|"]
        for member in item.members:
            kind = re.sub(rf"\s*\b{member.name}\b", "", member.declaration)
            lines.append(f"| `{member.name}` | `{kind}` | {marked_up(member.comment)} |")
        lines += ["```", ""]
    lines += ["## Constants", ""]
    for item in (item for item in header.items if item.kind == "enum"):
        lines += [f"```{{c:enum}} {item.name}", marked_up(item.comment), ""] if item.name else []
        lines += [marked_up(item.comment), ""] if item.comment and not item.name else []
        lines += ["| name | value | |", "|---|---|---|"]
        for member in item.members:
            name, value = member.declaration.split(" = ")
            lines.append(f"| `{name}` | {value} | {marked_up(member.comment)} |")
        lines += ["```", ""] if item.name else [""]
    return "\n".join(lines)


def hpp_page() -> str:
    """The wrapper as it is: it is short, and written to be read."""
    text = HEADER.with_suffix(".hpp").read_text()
    lines = [
        "# C++",
        "",
        "`<attnres/attnres.hpp>`, inline over the [C interface](c.md), whole.",
        "",
    ]
    return "\n".join([*lines, "```cpp", text.split("\n", 2)[2].rstrip(), "```", ""])


_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def with_links_of_the_site(markdown: str, from_root: bool) -> str:
    """Turn links that hold in the repository into links of the site."""

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path:
            return match[0]
        path = path.removeprefix("docs/" if from_root else "../")
        path = ELSEWHERE.get(path, path)
        if (ROOT / "docs" / path).is_file() or path in ELSEWHERE.values():
            # Text that is the file's name says less than the page's title, which comes where there is none.
            text = "" if text.strip("`").endswith(".md") else text
            return f"{image}[{text}]({path}{'#' + anchor if anchor else ''})"
        if (ROOT / path).exists() or (ROOT / "docs" / path).exists():
            return text  # a file or folder of the repository alone
        return match[0]

    code = [match.span() for match in _CODE.finditer(markdown)]
    return _LINK.sub(
        lambda m: m[0] if any(start <= m.start() < end for start, end in code) else link(m), markdown
    )


def prepare(source: Path) -> None:
    """Write every page and what the pages show into a folder."""
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns(SITE.name))
    for page in source.rglob("*.md"):
        # Reports are reached from the pages that speak of them, not from the navigation.
        start = "" if page.parent == source else "---\norphan: true\n---\n\n"
        page.write_text(start + with_links_of_the_site(page.read_text(), from_root=False))
    for path, page in ELSEWHERE.items():
        (source / page).write_text(with_links_of_the_site((ROOT / path).read_text(), from_root=True))
    with (source / "index.md").open("a") as index:
        index.write(contents())
    (source / "python.md").write_text(python_page())
    (source / "c.md").write_text(c_page())
    (source / "hpp.md").write_text(hpp_page())


class Links(HTMLParser):
    """What a page points to, what it loads, and what can be pointed to."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for each tag."""
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        for name in ("src", "href"):
            if tag in ("img", "script", "link", "iframe", "source") and name in values:
                self.loaded.append(values[name])


def broken_links(site: Path) -> list[str]:
    """Links of a built site that lead nowhere, and what it would load from elsewhere."""
    pages: dict[Path, Links] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Links()
        pages[path].feed(path.read_text())
    problems = []
    for path, page in pages.items():
        where = path.relative_to(site)
        for target in page.links + page.loaded:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loaded:
                    problems.append(f"{where}: loads {target} from another site")
                continue
            folder = site if parts.path.startswith("/") else path.parent
            file = (folder / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file():
                problems.append(f"{where}: {target} does not exist")
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].ids:
                problems.append(f"{where}: {target} has no such anchor")
    return problems


def build(output: Path) -> int:
    """Build and check the site; the exit status."""
    from sphinx.cmd.build import main as sphinx_build

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        prepare(source)
        options = ["--builder", "html", "--fail-on-warning", "--keep-going", "--quiet", "--fresh-env"]
        cache = ["--doctree-dir", f"{folder}/doctrees", "--conf-dir", str(SITE)]
        shutil.rmtree(output, ignore_errors=True)
        status = sphinx_build([*options, *cache, str(source), str(output)])
    if status != 0:
        return status
    problems = broken_links(output.resolve())
    print("\n".join(problems) or f"{len(list(output.rglob('*.html')))} pages in {output}, every link holds")
    return 1 if problems else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: build.py OUTPUT")
    sys.exit(build(Path(sys.argv[1])))
