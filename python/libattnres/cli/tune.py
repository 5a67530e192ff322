# SPDX-License-Identifier: Apache-2.0
"""``libattnres tune``: measures every kernel on this GPU and writes the plan that follows as a plan file."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import libattnres
from libattnres import timing
from libattnres._records import PlanInfo
from libattnres.cli import metadata
from libattnres.cli.console import Console
from libattnres.cli.plan_search import (
    READS,
    TOLERANCE,
    Candidate,
    Cell,
    Device,
    Row,
    build_rows,
    candidates,
    distinct,
    find_row,
    render,
)
from libattnres.cli.workload import Buffers, Judge, Shape, chosen_device, refuse_debug_build

HELP = "measure every kernel on this GPU and write a plan file for LIBATTNRES_PLAN_FILE"

VARIABLE = "LIBATTNRES_PLAN_FILE"
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096)
BLOCKS = (1, 2, 4, 8)
ROUNDS = 2  # over all kernels of a cell, so that a drifting clock meets each of them
SAMPLES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--device", metavar="cuda:N", help="GPU to measure (default: the current one)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(TOKENS), metavar="M", help="batch sizes to measure"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=list(BLOCKS),
        metavar="N",
        help="bank rows to measure; numbers between take the plan of the next larger one",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("libattnres-plan.txt"),
        metavar="FILE",
        help="plan file to write (default libattnres-plan.txt)",
    )


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Measure, choose, write, and show the gain over the plan in force."""
    refuse_debug_build()
    for name, low, high in (("tokens", 1, 1 << 20), ("blocks", 0, 8)):
        for value in getattr(args, name):
            if not low <= value <= high:
                raise ValueError(f"--{name}: expected {low}..{high}, got {value}")
    device = chosen_device(args.device or "cuda")
    if device.type != "cuda":
        raise ValueError(f"--device: expected a CUDA device, got {args.device}")
    status = next(entry for entry in libattnres.probe().devices if entry.index == device.index)
    if not status.native:
        raise libattnres.UnsupportedError(f"--device: expected one with native kernels, got {status.reason}")
    started = time.monotonic()
    with torch.cuda.device(device):
        times, present = measure(args, device, console)
    rows = build_rows(times, present)
    tuned = Device(status.name, status.compute_capability, status.num_sms)
    text = render(rows, tuned, describe())
    write_text(args.output, text)
    check_accepted(args.output, device)
    seconds = time.monotonic() - started
    results = summarise(times, present, rows)
    report(console, results, status.plan)
    path = args.output.resolve()
    console.line(f"{path}: {len(rows)} rows, {seconds:.0f} s. To use it: export {VARIABLE}={path}")
    return 0, {
        "seconds": round(seconds, 1),
        "tolerance": TOLERANCE,
        "compared_with": status.plan,
        "plan_file": text,
        "results": results,
    }


def measure(
    args: argparse.Namespace, device: torch.device, console: Console
) -> tuple[dict[Cell, dict[Candidate, float]], dict[Cell, Candidate]]:
    """Microseconds of every kernel in every cell, and what the plan in force takes there."""
    shapes = [Shape(M, blocks) for M in sorted(set(args.tokens)) for blocks in sorted(set(args.blocks))]
    cache_bytes = metadata.gpu_state(device)["l2_bytes"]
    times: dict[Cell, dict[Candidate, float]] = {}
    present: dict[Cell, Candidate] = {}
    for shape in console.progress(shapes, len(shapes), "batch sizes"):
        measure_shape(shape, device, cache_bytes, times, present)
    return times, present


def measure_shape(
    shape: Shape,
    device: torch.device,
    cache_bytes: int,
    times: dict[Cell, dict[Candidate, float]],
    present: dict[Cell, Candidate],
) -> None:
    """Both ways to read of one shape; its memory is free again afterwards."""
    sets = timing.num_sets(shape.num_bytes, cache_bytes)
    buffers = Buffers(shape, sets, device)
    arguments = [buffers.arguments(index) for index in range(sets)]
    judge = Judge(arguments[0])
    repeats = timing.repeats(shape.num_bytes, sets)
    for reads, pdl in READS.items():
        cell = Cell(reads, shape.num_blocks + 1, shape.num_bank_tokens)

        def launched(plan: libattnres.Plan | None, pdl: str = pdl) -> PlanInfo | None:
            return libattnres.explain(
                *arguments[0],
                out=buffers.out[0],
                backend="native",
                pdl=pdl,
                plan=plan,
                batch_invariant=False,
            ).plan

        tried, present[cell] = distinct(
            candidates(libattnres.permutations(), shape.hidden_size, cell.num_sources), launched
        )
        times[cell] = measure_cell(tried, buffers, arguments, judge, pdl, repeats)


def measure_cell(
    tried: Iterable[Candidate],
    buffers: Buffers,
    arguments: list[tuple[Any, ...]],
    judge: Judge,
    pdl: str,
    repeats: int,
) -> dict[Candidate, float]:
    """The best median of each candidate that can run; one that computes wrong is an error."""
    works = {}
    for candidate in tried:
        plan = candidate.plan()

        def launch(index: int, plan: libattnres.Plan = plan) -> timing.Launch:
            call, out = arguments[index], buffers.out[index]
            return lambda: libattnres.attn_res(*call, out=out, pdl=pdl, plan=plan)

        judge.restore()
        try:
            _, errors = judge.check(launch(0), lambda: (buffers.out[0], arguments[0][0], arguments[0][2]))
        except libattnres.UnsupportedError:
            continue
        if errors:
            raise RuntimeError(f"{candidate}, {buffers.shape.num_tokens} tokens: {errors[0]}")
        works[candidate] = [launch(index) for index in range(buffers.count)] * repeats
    best = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for candidate, work in works.items():
            best[candidate] = min(best[candidate], timing.time_graph(work, max_samples=SAMPLES).median_us)
    return best


def describe() -> list[str]:
    """Where the figures come from, for the head of the file."""
    known = metadata.collect()
    return [
        f"Written by libattnres tune, libattnres {known['libattnres']}, {known['date']}, "
        f"driver {known['driver']}.",
        "Common call (delta and output norm, H = 7168), CUDA graph, cold L2.",
    ]


def write_text(path: Path, text: str) -> None:
    """Replace a file once the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="ascii")
    partial.replace(path)


def check_accepted(path: Path, device: torch.device) -> None:
    """Let the library read the file, in a process of its own since it does so once per process."""
    program = f"import json; from libattnres import _core; print(json.dumps(_core.probe({device.index})))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, VARIABLE: str(path.resolve())},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    info = json.loads(result.stdout)
    if info["plan_error"] or info["plan"] == "built-in":
        raise RuntimeError(
            f"--output: expected a file that the library takes, got {info['plan_error'] or 'another device'}"
        )


def summarise(
    times: dict[Cell, dict[Candidate, float]], present: dict[Cell, Candidate], rows: list[Row]
) -> list[dict[str, Any]]:
    """One entry per cell: what is taken at present, what the new plan takes, and all times."""
    results = []
    for cell in sorted(times, key=lambda cell: (cell.reads, cell.num_sources, cell.entries)):
        old, new = present[cell], find_row(rows, cell).candidate
        results.append(
            {
                "reads": cell.reads,
                "num_blocks": cell.num_sources - 1,
                "tokens": cell.entries,
                "present": str(old),
                "present_us": times[cell][old],
                "tuned": str(new),
                "tuned_us": times[cell][new],
                "gain": times[cell][old] / times[cell][new] - 1,
                "us": {str(candidate): us for candidate, us in times[cell].items()},
            }
        )
    return results


def report(console: Console, results: list[dict[str, Any]], compared_with: str) -> None:
    """Print where the plan changes and by how much."""
    changed = [entry for entry in results if entry["present"] != entry["tuned"]]
    if changed:
        console.table(
            f"where the tuned plan differs from the one in force ({compared_with}), microseconds",
            ("reads", "blocks", "tokens", "in force", "us", "tuned", "us", "gain"),
            [
                (
                    entry["reads"],
                    entry["num_blocks"],
                    entry["tokens"],
                    entry["present"],
                    f"{entry['present_us']:.2f}",
                    entry["tuned"],
                    f"{entry['tuned_us']:.2f}",
                    f"{entry['gain']:+.1%}",
                )
                for entry in changed
            ],
        )
    best = max((entry["gain"] for entry in results), default=0.0)
    console.line(
        f"{len(changed)} of {len(results)} measured calls take another kernel; the largest gain is {best:.1%}"
    )
