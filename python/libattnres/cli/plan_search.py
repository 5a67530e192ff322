# SPDX-License-Identifier: Apache-2.0
"""From measured kernels to the rows of a plan file; the part of ``tune`` that needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import libattnres
from libattnres._records import Permutation, PlanInfo

__all__ = [
    "DEPTHS",
    "MAX_SOURCES",
    "READS",
    "TOLERANCE",
    "Candidate",
    "Cell",
    "Device",
    "Row",
    "build_rows",
    "candidates",
    "distinct",
    "find_row",
    "render",
]

MAX_SOURCES = 9
READS = {"after_wait": "wait", "early": "early"}
"""When bank rows are read, and the PDL mode to measure it in."""
DEPTHS = (4, 6, 8)
"""Rows in flight per SM that the ring kernel is tried with, beside as many as fit."""
UNLIMITED_ROWS = 1024
"""More than any ring holds: an override of a call cannot say 'as many as fit' otherwise."""
TOLERANCE = 0.02
"""Kernels whose times differ by less than this fraction count as equally fast."""


@dataclass(frozen=True, order=True)
class Candidate:
    """A kernel and its launch, as a plan can name it; 0 where a column is the other kernel's."""

    kernel: str
    rows_per_stage: int = 0
    ctas_per_sm: int = 0
    cluster_size: int = 0
    rows_in_flight: int = 0
    """0 for as many as fit."""

    def plan(self) -> libattnres.Plan:
        """The same as the overrides of a call."""
        if self.kernel == "ring":
            return libattnres.Plan(
                "ring",
                rows_per_stage=self.rows_per_stage,
                ctas_per_sm=self.ctas_per_sm,
                rows_in_flight=self.rows_in_flight or UNLIMITED_ROWS,
            )
        return libattnres.Plan("cluster", cluster_size=self.cluster_size)

    def columns(self) -> str:
        """The same in a row of a plan file."""
        if self.kernel == "ring":
            depth = f" rows_in_flight={self.rows_in_flight}" if self.rows_in_flight else ""
            return f"kernel=ring rows_per_stage={self.rows_per_stage} ctas_per_sm={self.ctas_per_sm}{depth}"
        return f"kernel=cluster cluster_size={self.cluster_size}"

    def __str__(self) -> str:
        """For a table."""
        if self.kernel == "ring":
            depth = f" / {self.rows_in_flight}" if self.rows_in_flight else ""
            return f"ring {self.rows_per_stage} x {self.ctas_per_sm}{depth}"
        return f"cluster {self.cluster_size}"


@dataclass(frozen=True, order=True)
class Cell:
    """Where kernels are compared."""

    reads: str
    num_sources: int
    entries: int
    """``T``."""


@dataclass(frozen=True)
class Row:
    """A row of a plan file."""

    reads: str
    max_sources: int
    max_entries: int | None
    candidate: Candidate

    def __str__(self) -> str:
        """The line of the file."""
        entries = "unlimited" if self.max_entries is None else self.max_entries
        return (
            f"row reads={self.reads} max_sources={self.max_sources} max_entries={entries} "
            f"{self.candidate.columns()}"
        )


@dataclass(frozen=True)
class Device:
    """The GPU that a plan is for."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int


Times = Mapping[Cell, Mapping[Candidate, float]]


def candidates(permutations: Iterable[Permutation], hidden_size: int, num_sources: int) -> list[Candidate]:
    """Every kernel that is compiled for such a call with one prefix per bank entry.

    Residencies are tried up to two; the library refuses those that a kernel cannot have.
    """
    found = set()
    for entry in permutations:
        if (entry["hidden_size"], entry["num_sources"], entry["prefixes_per_row"]) != (
            hidden_size,
            num_sources,
            1,
        ):
            continue
        if entry["kernel"] == "ring":
            rows = entry["rows_per_stage"]
            found |= {
                Candidate("ring", rows, ctas, rows_in_flight=depth)
                for ctas in (1, 2)
                for depth in (0, *DEPTHS)
                if depth == 0 or depth >= max(2, rows) * ctas
            }
        else:
            found.add(Candidate("cluster", cluster_size=entry["cluster_size"]))
    return sorted(found)


def distinct(
    found: Iterable[Candidate], launched: Callable[[libattnres.Plan | None], PlanInfo | None]
) -> tuple[list[Candidate], Candidate]:
    """One candidate for each different launch, and the one that the plan in force takes.

    Parameters
    ----------
    found : iterable
        In ascending order, so that of equal launches the one with as many rows as fit is kept.
    launched : callable
        What the library would launch under an override, or under none; None when it cannot.
    """
    by_launch: dict[tuple[object, ...], Candidate] = {}
    for candidate in found:
        info = launched(candidate.plan())
        if info is not None:
            by_launch.setdefault(launch_of(info), candidate)
    present = launched(None)
    if present is None:
        raise libattnres.UnsupportedError("native: expected a plan for a call of this size, got none")
    taken = Candidate(
        present["kernel"],
        present["rows_per_stage"],
        present["ctas_per_sm"],
        present["cluster_size"],
        present["ring_rows"] * present["ctas_per_sm"],
    )
    taken = by_launch.setdefault(launch_of(present), taken)
    return sorted(by_launch.values()), taken


def launch_of(info: PlanInfo) -> tuple[object, ...]:
    """What tells one launch from another."""
    return (
        info["kernel"],
        info["rows_per_stage"],
        info["ctas_per_sm"],
        info["cluster_size"],
        info["ring_rows"],
    )


def build_rows(times: Times, present: Mapping[Cell, Candidate], tolerance: float = TOLERANCE) -> list[Row]:
    """The shortest plan whose kernel is within ``tolerance`` of the fastest in every cell.

    Where several are, the one that the plan at present takes is kept. Between two measured sizes with
    different kernels the change is at their geometric mean. Sources that were not measured take the rows of
    the next larger number that was.

    Parameters
    ----------
    times : mapping
        Microseconds of each candidate in each cell; each cell has the same cells beside it in the other
        dimensions.
    present : mapping
        What the plan takes in each cell at present.
    tolerance : float
        See above.
    """
    if not times:
        raise ValueError("times: expected at least one cell, got none")
    rows: list[Row] = []
    for reads in READS:
        columns: list[tuple[int, list[tuple[int | None, Candidate]]]] = []
        for num_sources in sorted({cell.num_sources for cell in times if cell.reads == reads}):
            cells = sorted(cell for cell in times if cell.reads == reads and cell.num_sources == num_sources)
            column = build_column(cells, times, present, tolerance)
            if columns and columns[-1][1] == column:
                columns.pop()
            columns.append((num_sources, column))
        if columns:
            columns[-1] = (MAX_SOURCES, columns[-1][1])
        rows += [
            Row(reads, num_sources, max_entries, candidate)
            for num_sources, column in columns
            for max_entries, candidate in column
        ]
    # What no row above serves: several prefixes per bank entry, which the cluster kernel does not have.
    largest = max(times, key=lambda cell: (cell.entries, cell.num_sources, cell.reads))
    rings = [candidate for candidate in times[largest] if candidate.kernel == "ring"]
    if not rings:
        raise ValueError("times: expected a ring kernel among the candidates, got none")
    last = rows[-1].candidate
    if last.kernel != "ring":
        last = min(rings, key=lambda candidate: times[largest][candidate])
    rows.append(Row("any", MAX_SOURCES, None, last))
    return rows


def build_column(
    cells: Sequence[Cell], times: Times, present: Mapping[Cell, Candidate], tolerance: float
) -> list[tuple[int | None, Candidate]]:
    """(Up to how many entries, kernel), for ascending cells that differ in their entries alone."""
    runs: list[list[Cell]] = []
    shared: list[set[Candidate]] = []
    for cell in cells:
        best = min(times[cell].values())
        good = {candidate for candidate, us in times[cell].items() if us <= best * (1 + tolerance)}
        if runs and shared[-1] & good:
            runs[-1].append(cell)
            shared[-1] &= good
        else:
            runs.append([cell])
            shared.append(good)

    def preference(candidate: Candidate, run: Sequence[Cell]) -> tuple[int, float, Candidate]:
        kept = sum(present.get(cell) == candidate for cell in run)
        slowdown = sum(times[cell][candidate] / min(times[cell].values()) for cell in run)
        return -kept, slowdown, candidate

    column: list[tuple[int | None, Candidate]] = []
    for index, (run, good) in enumerate(zip(runs, shared, strict=True)):
        chosen = min(good, key=lambda candidate: preference(candidate, run))
        bound: int | None = None
        if index + 1 < len(runs):
            bound = math.isqrt(run[-1].entries * runs[index + 1][0].entries)
        if column and column[-1][1] == chosen:
            column.pop()
        column.append((bound, chosen))
    return column


def find_row(rows: Iterable[Row], cell: Cell) -> Row:
    """The row that the library takes for a cell with one prefix per bank entry."""
    for row in rows:
        if (
            row.reads in ("any", cell.reads)
            and cell.num_sources <= row.max_sources
            and (row.max_entries is None or cell.entries <= row.max_entries)
        ):
            return row
    raise ValueError(f"rows: expected one for every cell, got none for {cell}")


def render(rows: Iterable[Row], device: Device, comments: Iterable[str] = ()) -> str:
    """The text of a plan file."""
    major, minor = device.compute_capability
    # The file is ASCII; a name that is not cannot be matched.
    name = f" name={device.name}" if device.name.isascii() and device.name.isprintable() else ""
    lines = [
        "libattnres-plan 1",
        *(f"# {comment}" for comment in comments),
        f"device compute_capability={major}.{minor} num_sms={device.num_sms}{name}",
        *map(str, rows),
    ]
    return "\n".join(lines) + "\n"
