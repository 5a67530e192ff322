# SPDX-License-Identifier: Apache-2.0
"""Sphinx's settings for the site; build.py prepares the pages and runs it."""

from __future__ import annotations

import re
from typing import Any

import libattnres
from docutils.nodes import SkipNode
from latex2mathml.converter import convert

project = "libattnres"
author = "The libattnres authors"
release = version = libattnres.__version__
html_title = f"libattnres {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
nitpicky = False

# The headings' anchors are those of the repository's own view of the pages.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 70
python_use_unqualified_type_names = True
napoleon_google_docstring = False
napoleon_use_rtype = False
# Several names that share a description stay one entry.
napoleon_use_param = False

html_theme = "furo"
html_static_path = ["extra.css"]
html_css_files = ["extra.css"]
html_copy_source = False
html_use_index = False
html_domain_indices = False
html_show_sphinx = False
html_show_copyright = False
# Blocks without a language are shown as they are.
highlight_language = "none"
pygments_style = "friendly"
pygments_dark_style = "native"
html_math_renderer = "mathml"


_WORD = re.compile(r"(\\(?:mathrm|text)\{[^}]*\}|\\[A-Za-z]+)|([A-Za-z]{2,}(?:\\_[A-Za-z]+)*)")


def mathml(equation: str, display: str) -> str:
    """MathML, so that nothing is loaded from another site; a name is one symbol and no product of letters."""
    named = _WORD.sub(
        lambda match: match[1] or r"\text{" + match[2].replace(r"\_", "_") + "}", equation.replace("&", "")
    )
    return str(convert(named, display=display))


def visit_block(translator: Any, node: Any) -> None:
    """An equation of its own, a row a line."""
    rows = [row.strip() for row in node.astext().split(r"\\") if row.strip()]
    blocks = "".join(mathml(row, "block") for row in rows)
    translator.body.append(f'<div class="math">{blocks}</div>')
    raise SkipNode


def visit_inline(translator: Any, node: Any) -> None:
    """An equation within a line."""
    translator.body.append(mathml(node.astext(), "inline"))
    raise SkipNode


def keep_colon(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in an attribute's first line for its type."""
    if what in ("attribute", "property") and lines:
        lines[:1] = lines[0].replace(": ", ":\n", 1).split("\n")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", keep_colon, priority=400)  # before napoleon's 500
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
