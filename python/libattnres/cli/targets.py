# SPDX-License-Identifier: Apache-2.0
"""The project's own goals on one H200, as data, and whether a set of results meets them.

A goal is a bound on a ratio of two medians of one run: ours to the floor kernel's, which moves the same
bytes and computes nothing, or the Triton backend's to ours. Ours is the native backend with the kernel of its
plan in the PDL mode that is faster, and likewise for Triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BLOCKS",
    "CPU_BOUNDS_US",
    "LATENCY_GOALS",
    "SM_SIDE_BOUNDS_US",
    "TOKENS",
    "WALK_BOUNDS",
    "Goal",
    "GoalResult",
    "check_bench",
    "check_walk",
    "table",
]

TOKENS = (1, 16, 64, 128, 256, 512, 1024, 8192)
BLOCKS = (1, 4, 8)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """A bound that every shape within its range must keep."""

    name: str
    against: str
    """``"floor"``: ours / floor <= bound; ``"triton"``: triton / ours >= bound."""
    bound: float
    min_tokens: int
    max_tokens: float
    blocks: tuple[int, ...]
    """Numbers of blocks it holds for, of those that are measured."""

    def covers(self, tokens: int, num_blocks: int) -> bool:
        """Whether a shape is within its range."""
        return self.min_tokens <= tokens <= self.max_tokens and num_blocks in self.blocks


ANY = tuple(range(9))
FEW = (0, 1, 2, 3)
MANY = (4, 5, 6, 7, 8)
LATENCY_GOALS = (
    Goal("T >= 1024", "floor", 1.05, 1024, math.inf, ANY),
    Goal("T >= 1024, 8 blocks", "triton", 1.40, 1024, math.inf, (8,)),
    Goal("128 <= T < 1024", "floor", 1.10, 128, 1023, ANY),
    Goal("128 <= T < 1024", "triton", 1.35, 128, 1023, ANY),
    Goal("16 < T < 128, >= 4 blocks", "floor", 1.22, 17, 127, MANY),
    Goal("16 < T < 128, < 4 blocks", "floor", 1.40, 17, 127, FEW),
    Goal("16 < T < 128, >= 4 blocks", "triton", 1.90, 17, 127, MANY),
    Goal("T = 16, 8 blocks", "floor", 1.35, 16, 16, (8,)),
    Goal("T = 16, < 8 blocks", "floor", 1.50, 16, 16, ANY[:8]),
    Goal("T = 16, 8 blocks", "triton", 2.30, 16, 16, (8,)),
    Goal("T = 1, 8 blocks", "floor", 1.60, 1, 1, (8,)),
    Goal("T = 1, 4 blocks", "floor", 1.90, 1, 1, (4,)),
    Goal("T = 1, 1 block", "floor", 2.10, 1, 1, (1,)),
    Goal("T = 1, 8 blocks", "triton", 2.80, 1, 1, (8,)),
    Goal("T = 1, 4 blocks", "triton", 2.30, 1, 1, (4,)),
    Goal("T = 1, 1 block", "triton", 1.70, 1, 1, (1,)),
)
SHARED_ROWS_BOUND = 0.72
"""Time of B = 2 over that of as many prefixes at B = 1, for 8 blocks and at least 1024 bank entries."""
SHARED_ROWS_MIN_ENTRIES = 1024
VARIANT_BOUND = 1.05
"""Time per byte of a variant over that of the common path, where bandwidth decides."""
VARIANT_MIN_TOKENS = 1024
SM_SIDE_BOUNDS_US = {8: 3.0, 4: 2.1}
"""Per token and SM, with the bank rows in L2, by the kernel that is best at it."""
WALK_BOUNDS = {1: 2.2, 16: 2.0, 128: 1.6, 8192: 1.38}
"""Triton / ours, net of the producers, by tokens."""
TWO_PHASE_WALK_BOUNDS = {1: 1.1, 16: 1.1, 1024: 1.2, 8192: 1.28}
"""Native in one phase / in two, net of the producers, by tokens."""
CPU_BOUNDS_US = {"eager call": 6.0, "C call": 1.5}
HOST_WALK_TOKENS = 16
HOST_WALK_BOUND = 3.0
"""Eager PyTorch / host backend on the CPU, for a walk of so many tokens."""


@dataclass(frozen=True)
class GoalResult:
    """How one goal came out over all shapes within its range."""

    name: str
    what: str
    bound: float
    at_most: bool
    """Whether the value must not exceed the bound; otherwise it must reach it."""
    value: float | None
    """The worst one; None when nothing within the range was measured."""
    where: str

    @property
    def met(self) -> bool | None:
        """Whether it holds; None when nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> GoalResult:
        """From JSON."""
        return cls(
            document["goal"],
            document["what"],
            document["bound"],
            document["at_most"],
            document["worst"],
            document["where"],
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "goal": self.name,
            "what": self.what,
            "bound": self.bound,
            "at_most": self.at_most,
            "worst": self.value,
            "where": self.where,
            "met": self.met,
        }


def worst(
    name: str, what: str, bound: float, values: Iterable[tuple[float, str]], at_most: bool
) -> GoalResult:
    """The value that is furthest on the wrong side decides."""
    ordered = sorted(values, key=lambda item: item[0], reverse=at_most)
    value, where = ordered[0] if ordered else (None, "not measured")
    return GoalResult(name, what, bound, at_most, value, where)


def best_median(rows: Iterable[Row], backend: str) -> float | None:
    """The faster PDL mode of a backend, with the kernel of its own plan."""
    medians = [
        row["median_us"]
        for row in rows
        if row["backend"] == backend and not row.get("plan_override") and row.get("median_us") is not None
    ]
    return min(medians, default=None)


def by_shape(rows: Sequence[Row], variant: str, mode: str = "cold") -> dict[tuple[int, int], list[Row]]:
    """The rows of each (tokens, blocks) of a variant."""
    shapes: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        if row["variant"] == variant and row["mode"] == mode:
            shapes.setdefault((row["tokens"], row["num_blocks"]), []).append(row)
    return shapes


def ratios(rows: Sequence[Row], goal: Goal) -> list[tuple[float, str]]:
    """The ratio of each shape within the goal's range, and where it is."""
    result = []
    for (tokens, num_blocks), shape_rows in by_shape(rows, "common").items():
        ours = best_median(shape_rows, "native")
        other = best_median(shape_rows, goal.against)
        if not goal.covers(tokens, num_blocks) or ours is None or other is None:
            continue
        ratio = ours / other if goal.against == "floor" else other / ours
        result.append((ratio, f"T = {tokens}, {num_blocks} blocks"))
    return result


def check_bench(
    rows: Sequence[Row], sm_side: Sequence[Row] = (), cpu: Mapping[str, float] | None = None
) -> list[GoalResult]:
    """Judge the rows of ``libattnres bench`` (cold L2), its SM-side times and its CPU times."""
    results = []
    for goal in LATENCY_GOALS:
        floor = goal.against == "floor"
        what = "native / floor" if floor else "Triton / native"
        results.append(worst(goal.name, what, goal.bound, ratios(rows, goal), floor))
    results.append(
        worst(
            f"B = 2, 8 blocks, >= {SHARED_ROWS_MIN_ENTRIES} entries",
            "time / time of the same prefixes at B = 1",
            SHARED_ROWS_BOUND,
            shared_rows_ratios(rows),
            True,
        )
    )
    results.append(
        worst(
            f"variants, T >= {VARIANT_MIN_TOKENS}",
            "time per byte / that of the common path",
            VARIANT_BOUND,
            variant_ratios(rows),
            True,
        )
    )
    for num_blocks, bound in SM_SIDE_BOUNDS_US.items():
        values = [
            (row["us_per_token_and_sm"], f"{row['tokens']} tokens, {row['name']}")
            for row in sm_side
            if row["num_blocks"] == num_blocks and row["backend"] == "native"
        ]
        best = [min(values)] if values else []
        results.append(worst(f"SM side, {num_blocks} blocks", "us per token and SM", bound, best, True))
    for name, bound in CPU_BOUNDS_US.items():
        values = [(cpu[name], "")] if cpu is not None and name in cpu else []
        results.append(worst(f"CPU time, {name}", "us", bound, values, True))
    return results


def shared_rows_ratios(rows: Sequence[Row]) -> list[tuple[float, str]]:
    """Time of B = 2 over the time of as many prefixes that each have an entry of their own."""
    common = by_shape(rows, "common")
    result = []
    for (tokens, num_blocks), shape_rows in by_shape(rows, "B = 2").items():
        if num_blocks != 8 or tokens // 2 < SHARED_ROWS_MIN_ENTRIES:
            continue
        shared = best_median(shape_rows, "native")
        apart = best_median(common.get((tokens, num_blocks), []), "native")
        if shared is not None and apart is not None:
            result.append((shared / apart, f"M = {tokens}"))
    return result


def variant_ratios(rows: Sequence[Row]) -> list[tuple[float, str]]:
    """Time per byte of each variant over that of the common path of the same shape."""
    common = by_shape(rows, "common")
    result = []
    for variant in sorted({row["variant"] for row in rows} - {"common"}):
        for (tokens, num_blocks), shape_rows in by_shape(rows, variant).items():
            ours = best_median(shape_rows, "native")
            base_rows = common.get((tokens, num_blocks), [])
            base = best_median(base_rows, "native")
            if tokens < VARIANT_MIN_TOKENS or ours is None or base is None:
                continue
            ratio = (ours / shape_rows[0]["bytes"]) / (base / base_rows[0]["bytes"])
            result.append((ratio, f"{variant}, T = {tokens}, {num_blocks} blocks"))
    return result


def check_walk(rows: Sequence[Row]) -> list[GoalResult]:
    """Judge the rows of ``libattnres walk``."""
    results = []
    wall = [row for row in rows if row["mode"] == "wall" and row["tokens"] == HOST_WALK_TOKENS]
    graph = [row for row in rows if row["mode"] == "graph"]
    for tokens, bound in WALK_BOUNDS.items() if graph or not wall else ():
        at = [row for row in graph if row["tokens"] == tokens]
        values = ratio_of_best(at, "triton", "native")
        results.append(worst(f"walk, T = {tokens}", "Triton / native, net", bound, values, False))
    two_phase = [row for row in graph if row["backend"] == "native" and phases_of(row) != "off"]
    for tokens, bound in TWO_PHASE_WALK_BOUNDS.items() if two_phase else ():
        # Of the best row of each, which is what a user compares.
        both = [row for row in graph if row["backend"] == "native" and row["tokens"] == tokens]
        one, two = (
            min((row["net_us"] for row in both if (phases_of(row) == "off") is is_one), default=None)
            for is_one in (True, False)
        )
        values = [(one / two, "")] if one is not None and two is not None and two > 0 else []
        results.append(worst(f"two phases, T = {tokens}", "one phase / two, net", bound, values, False))
    if wall:
        values = ratio_of_best(wall, "torch", "host")
        results.append(
            worst(
                f"walk on the CPU, T = {HOST_WALK_TOKENS}",
                "torch / host, net",
                HOST_WALK_BOUND,
                values,
                False,
            )
        )
    return results


def phases_of(row: Row) -> str:
    """``off``, ``on`` or ``auto``; results from before there were two phases do not say."""
    return str(row.get("two_phase", "off"))


def ratio_of_best(rows: Sequence[Row], slower: str, faster: str) -> list[tuple[float, str]]:
    """Net time of the best row of one backend over that of another, in one phase."""
    net = {
        name: min(
            (row["net_us"] for row in rows if row["backend"] == name and phases_of(row) == "off"),
            default=None,
        )
        for name in (slower, faster)
    }
    above, below = net[slower], net[faster]
    if above is None or below is None or below <= 0:
        return []
    return [(above / below, "")]


def table(results: Sequence[GoalResult]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Columns and rows for printing."""
    verdict = {True: "met", False: "MISSED", None: "not measured"}
    return ("goal", "what", "bound", "worst", "where", ""), [
        (
            result.name,
            result.what,
            f"{'<=' if result.at_most else '>='} {result.bound:g}",
            "" if result.value is None else f"{result.value:.3f}",
            result.where,
            verdict[result.met],
        )
        for result in results
    ]
