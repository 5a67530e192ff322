# SPDX-License-Identifier: Apache-2.0
"""``libattnres report``: the results of ``bench``, ``walk`` and ``model`` as Markdown, and plots.

A document that shows them holds blocks ``<!-- table KIND FILE.json -->`` ... ``<!-- end -->``, with paths
relative to itself. ``--update`` writes what lies between: the figures of a text are those of its JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from libattnres.cli import model, targets
from libattnres.cli.console import Console

HELP = "results of bench, walk and model as Markdown tables, and plots"

BLOCK = re.compile(r"<!-- table (?P<kind>[\w-]+) (?P<path>\S+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)

Document = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json", help="print their tables")
    parser.add_argument("--update", type=Path, metavar="FILE.md", help="rewrite the tables of a document")
    parser.add_argument(
        "--check", action="store_true", help="with --update: only say whether it is up to date"
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write PNGs there (needs matplotlib)")


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Print, update, plot; status 1 when a document that is only checked is out of date."""
    if not args.files and args.update is None:
        raise ValueError("FILE.json: expected one at least, or --update, got neither")
    for path in args.files:
        document = load(path)
        if document["command"] == "model":
            for kind, table in model.TABLES.items():
                console.line(f"**{kind}**\n\n{markdown(*table(document))}")
            continue
        for kind in KINDS:
            body = KINDS[kind](document)
            if body:
                console.line(f"**{kind}**\n\n{body}")
        if args.plot is not None:
            from libattnres.cli import plots

            for written in plots.write(document, args.plot):
                console.line(f"wrote {written}")
    if args.update is None:
        return 0, {}
    text = args.update.read_text(encoding="utf-8")
    rendered = render(text, args.update.parent)
    current = rendered == text
    if args.check:
        console.line(f"{args.update}: {'up to date' if current else 'not what its JSON says'}")
        return int(not current), {"up_to_date": current}
    if not current:
        args.update.write_text(rendered, encoding="utf-8")
    console.line(f"{args.update}: {'unchanged' if current else 'updated'}")
    return 0, {"up_to_date": True}


def load(path: Path) -> Document:
    """Results as a command wrote them."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("command") not in ("bench", "walk", "model"):
        raise ValueError(f"{path}: expected what bench, walk or model wrote with --json, got something else")
    return document


def render(text: str, folder: Path) -> str:
    """The text with each of its blocks filled from its file, or saying that there is none yet."""

    def fill(match: re.Match[str]) -> str:
        kind, name = match["kind"], match["path"]
        table = model.TABLES.get(kind)
        if table is None and kind not in KINDS:
            known = ", ".join((*KINDS, *model.TABLES))
            raise ValueError(f"table {kind}: expected one of {known}, got {kind}")
        path = folder / name
        body = ""
        if path.exists():
            document = load(path)
            body = KINDS[kind](document) if table is None else markdown(*table(document))
        body = body or f"Not measured yet: there is no such table in `{name}`."
        return f"<!-- table {kind} {name} -->\n{body}\n<!-- end -->"

    return BLOCK.sub(fill, text)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; empty without rows."""
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *[[cell(value) for value in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(value: object) -> str:
    """Numbers with three digits, at least."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


COPY_SLACK = 1.05


def copy_bounds(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the plain copy of a run is the bound it is meant to be: nothing was much faster than it."""
    return all(row.get("copy_fraction", 0.0) <= COPY_SLACK for row in rows)


def machine(document: Document) -> str:
    """Where, with what and when."""
    known, gpu = document["metadata"], document.get("gpu") or {}
    parts = [
        gpu.get("name") or known.get("cpu") or "unknown",
        f"{gpu['num_sms']} SMs" if gpu.get("num_sms") else None,
        f"L2 {gpu['l2_bytes'] / 2**20:.0f} MiB" if gpu.get("l2_bytes") else None,
        f"SM clock {gpu['sm_clock_mhz']:.0f} MHz" if gpu.get("sm_clock_mhz") else None,
        f"driver {known['driver']}" if known.get("driver") else None,
        f"PyTorch {known['torch']}",
        f"Triton {known['triton']}" if known.get("triton") else None,
        f"libattnres {known['libattnres']} ({(known.get('commit') or 'unknown commit')[:12]})",
        f"plain copy {document['copy_gb_per_s']:.0f} GB/s"
        if document.get("copy_gb_per_s") and copy_bounds(document.get("rows", ()))
        else None,
        known["date"][:10],
    ]
    return ", ".join(filter(None, parts)) + "."


def shapes(rows: Sequence[dict[str, Any]]) -> list[tuple[tuple[int, int], list[dict[str, Any]]]]:
    """Rows by (blocks, tokens), most blocks first."""
    result: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        result.setdefault((-row["num_blocks"], row["tokens"]), []).append(row)
    return [((-blocks, tokens), result[blocks, tokens]) for blocks, tokens in sorted(result)]


Table = tuple[tuple[str, ...], list[tuple[object, ...]]]
"""Columns and rows, for the console and for Markdown."""


def plain(rows: Sequence[dict[str, Any]], variant: str) -> list[dict[str, Any]]:
    """Rows of a variant, with the kernel of the plan."""
    return [row for row in rows if not row["plan_override"] and row["variant"] == variant]


def ratio(above: float | None, below: float | None) -> float | None:
    """None where one of them was not measured."""
    return None if above is None or below is None else above / below


def latency_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Every implementation on the common path, and its time over that of the native or host backend."""
    rows = plain(rows, "common")
    names = tuple(dict.fromkeys(row["name"] for row in rows))
    backends = tuple(dict.fromkeys(row["backend"] for row in rows))
    base = "host" if "host" in backends else "native"
    others = [name for name in backends if name not in (base, "floor")]
    lines: list[tuple[object, ...]] = []
    for (num_blocks, tokens), mine in shapes(rows):
        by_name = {row["name"]: row["median_us"] for row in mine}
        ours, floor = (targets.best_median(mine, name) for name in (base, "floor"))
        best = next((row for row in mine if row["backend"] == base and row["median_us"] == ours), None)
        lines.append(
            (
                num_blocks,
                tokens,
                *(by_name.get(name) for name in names),
                *([ratio(ours, floor)] if base == "native" else []),
                *(ratio(targets.best_median(mine, name), ours) for name in others),
                None if best is None else round(best["gb_per_s"]),
                None if best is None else round(100 * best["copy_fraction"]),
            )
        )
    columns = (
        "blocks",
        "tokens",
        *names,
        *(["native / floor"] if base == "native" else []),
        *(f"{name} / {base}" for name in others),
        "GB/s",
        "% of copy",
    )
    if not copy_bounds(rows):
        return columns[:-1], [line[:-1] for line in lines]
    return columns, lines


def headline_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Every implementation, the native one in each PDL mode, for the most bank rows that were measured."""
    rows = plain(rows, "common")
    most = max((row["num_blocks"] for row in rows), default=0)
    rows = [row for row in rows if row["num_blocks"] == most]
    native = tuple(dict.fromkeys(row["name"] for row in rows if row["backend"] == "native"))
    others = dict.fromkeys(row["backend"] for row in rows if row["backend"] not in ("floor", "native"))
    lines: list[tuple[object, ...]] = []
    for (_, tokens), mine in shapes(rows):
        by_name = {row["name"]: row["median_us"] for row in mine}
        best = {name: targets.best_median(mine, name) for name in ("floor", *others)}
        lines.append(
            (tokens, best["floor"], *(by_name.get(name) for name in native), *(best[name] for name in others))
        )
    return (f"tokens, {most} blocks", "floor", *native, *others), lines


def variant_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The native backend's other calls beside its common one."""
    common = dict(shapes(plain(rows, "common")))
    lines: list[tuple[object, ...]] = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        if variant == "common":
            continue
        for shape, mine in shapes(plain(rows, variant)):
            ours, floor = targets.best_median(mine, "native"), targets.best_median(mine, "floor")
            if ours is None:
                continue
            base = common.get(shape, [])
            base_us = targets.best_median(base, "native")
            bytes_ratio = mine[0]["bytes"] / base[0]["bytes"] if base else None
            lines.append(
                (variant, *shape, ours, ratio(ours, floor), base_us, ratio(ours, base_us), bytes_ratio)
            )
    columns = (
        "variant",
        "blocks",
        "tokens",
        "native",
        "native / floor",
        "common",
        "time ratio",
        "bytes ratio",
    )
    return columns, lines


def kernel_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Every override of the plan beside the plan's own choice, in each PDL mode."""
    native = [row for row in rows if row["backend"] == "native" and row["variant"] == "common"]
    plans = tuple(dict.fromkeys(row["plan_override"] for row in native if row["plan_override"]))
    lines: list[tuple[object, ...]] = []
    for (num_blocks, tokens), mine in shapes(native if plans else []):
        for pdl in dict.fromkeys(row["pdl"] for row in mine):
            by_plan = {row["plan_override"]: row["median_us"] for row in mine if row["pdl"] == pdl}
            lines.append((num_blocks, tokens, pdl, by_plan.get(None), *(by_plan.get(plan) for plan in plans)))
    return ("blocks", "tokens", "pdl", "the plan's", *plans), lines


def bench_rows(document: Document) -> list[dict[str, Any]]:
    """The measurements of a document of ``bench``."""
    return list(document["rows"]) if document["command"] == "bench" else []


def latency(document: Document) -> str:
    """The common path."""
    return markdown(*latency_table(bench_rows(document)))


def headline(document: Document) -> str:
    """The common path in few words."""
    return markdown(*headline_table(bench_rows(document)))


def variants(document: Document) -> str:
    """The other calls."""
    return markdown(*variant_table(bench_rows(document)))


def kernels(document: Document) -> str:
    """Overrides of the plan."""
    return markdown(*kernel_table(bench_rows(document)))


def sm_side(document: Document) -> str:
    """Microseconds per token and SM with the bank rows in L2."""
    return markdown(
        ["blocks", "what", "us per token and SM"],
        [[row["num_blocks"], row["name"], row["us_per_token_and_sm"]] for row in document.get("sm_side", ())],
    )


def cpu(document: Document) -> str:
    """Time of a call on the CPU."""
    return markdown(["what", "us"], [[what, us] for what, us in document.get("cpu_us", {}).items()])


def walk_part(document: Document) -> Document:
    """The walk of either command's results."""
    part = document if document["command"] == "walk" else document.get("walk", {})
    return dict(part)


def walk(document: Document) -> str:
    """Totals of a step."""
    rows = walk_part(document).get("rows", ())
    lines = []
    for row in rows:
        slowest = max(
            other["net_us"]
            for other in rows
            if (other["tokens"], other["mode"]) == (row["tokens"], row["mode"])
        )
        net = row["net_us"]
        lines.append(
            [
                row["tokens"],
                row["mode"],
                row["name"],
                row["median_us"],
                row["producers_us"],
                net,
                slowest / net if net > 0 else None,
            ]
        )
    return markdown(["tokens", "mode", "what", "total us", "producers us", "net us", "slowest / this"], lines)


def walk_two_phase(document: Document) -> str:
    """A step in two phases beside the same in one, of the same run."""
    rows = [row for row in walk_part(document).get("rows", ()) if row.get("one_phase_ratio") is not None]
    columns = ["tokens", "mode", "what", "bank passes", "net us", "one phase / this"]
    names = ("tokens", "mode", "name", "bank_passes", "net_us", "one_phase_ratio")
    return markdown(columns, [[row[name] for name in names] for row in rows])


def two_phase(document: Document) -> str:
    """A bank pass and a merge beside their floors."""
    columns = ["phase", "tokens", "blocks", "sites", "what", "us", "GB/s", "/ floor"]
    names = ("phase", "tokens", "num_blocks", "sites", "name", "median_us", "gb_per_s", "floor_ratio")
    return markdown(columns, [[row[name] for name in names] for row in document.get("two_phase", ())])


def walk_shares(document: Document) -> str:
    """Where the time of a step goes."""
    return markdown(
        ["tokens", "what", "blocks", "variant", "calls", "us per call", "% of the step"],
        [
            [
                row["tokens"],
                row["name"],
                row["num_blocks"],
                row["variant"],
                row["calls"],
                row["us_per_call"],
                100 * row["share"],
            ]
            for row in walk_part(document).get("groups", ())
        ],
    )


def goals(document: Document) -> str:
    """How the goals came out."""
    results = [targets.GoalResult.from_dict(goal) for goal in document.get("targets", ())]
    return markdown(*targets.table(results))


KINDS: dict[str, Callable[[Document], str]] = {
    "machine": machine,
    "goals": goals,
    "latency": latency,
    "headline": headline,
    "variants": variants,
    "kernels": kernels,
    "sm-side": sm_side,
    "cpu": cpu,
    "walk": walk,
    "walk-two-phase": walk_two_phase,
    "two-phase": two_phase,
    "walk-shares": walk_shares,
}
