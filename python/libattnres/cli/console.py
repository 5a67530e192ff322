# SPDX-License-Identifier: Apache-2.0
"""Tables and progress bars: with ``rich`` where it is installed, plain text otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TypeVar

__all__ = ["Console"]

T = TypeVar("T")


class Console:
    """Where the commands print."""

    def __init__(self) -> None:
        self._rich = find_spec("rich") is not None

    def line(self, text: str = "") -> None:
        """Print one line as it is."""
        print(text, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table; numbers are aligned to the right."""
        cells = [[format_cell(value) for value in row] for row in rows]
        numeric = [
            bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))
        ]
        if self._rich:
            from rich.console import Console as RichConsole
            from rich.table import Table
            from rich.text import Text

            table = Table(title=title, title_justify="left")
            for column, right in zip(columns, numeric, strict=True):
                table.add_column(column, justify="right" if right else "left", overflow="fold")
            for row in cells:
                table.add_row(*(Text(cell) for cell in row))
            RichConsole(width=None if sys.stdout.isatty() else 140).print(table)
            return
        widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
        print(title)
        for row in [list(columns), ["-" * width for width in widths], *cells]:
            print(
                "  ".join(
                    cell.rjust(width) if right else cell.ljust(width)
                    for cell, width, right in zip(row, widths, numeric, strict=True)
                ).rstrip()
            )
        print(flush=True)

    def progress(self, items: Iterable[T], total: int, description: str) -> Iterator[T]:
        """Iterate with a progress bar on standard error."""
        if self._rich and sys.stderr.isatty():
            from rich.console import Console as RichConsole
            from rich.progress import track

            yield from track(items, total=total, description=description, console=RichConsole(stderr=True))
            return
        yield from plain_progress(items, total, description)


def plain_progress(items: Iterable[T], total: int, description: str) -> Iterator[T]:
    """One line, redrawn on a terminal and printed every ten seconds otherwise."""
    terminal = sys.stderr.isatty()
    interval = 0.2 if terminal else 10.0
    started = drawn = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - drawn >= interval or (done == total and terminal):
            drawn = now
            width = 30
            filled = width * done // max(total, 1)
            bar = "#" * filled + "." * (width - filled)
            text = f"{description} [{bar}] {done}/{total} {now - started:.0f} s"
            print(
                f"\r{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True
            )
    if terminal:
        print(file=sys.stderr, flush=True)


def format_cell(value: object) -> str:
    """Text of one cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
