# SPDX-License-Identifier: Apache-2.0
"""``libattnres bench``: is it right, how fast is it, and how far from what the memory allows."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import libattnres
from libattnres import timing
from libattnres.cli import metadata, phases, targets, walk
from libattnres.cli import report as tables
from libattnres.cli.call_cost import cpu_times
from libattnres.cli.competitors import COMPETITORS, Prepared
from libattnres.cli.console import Console
from libattnres.cli.contenders import Contender, backend_contender, find_contenders
from libattnres.cli.workload import (
    COMMON,
    CPU_CACHE_BYTES,
    SM_SIDE,
    VARIANTS,
    Buffers,
    Judge,
    Shape,
    Variant,
    chosen_device,
    refuse_debug_build,
)
from libattnres.timing import Timing

HELP = "latency and bandwidth of every backend beside the floor kernel, after checking that it is right"

DEFAULT_TOKENS = {"cuda": (1, 16, 128, 1024, 8192), "cpu": (1, 16)}
DEFAULT_BLOCKS = (1, 4, 8)
MODES = ("cold", "hot", "events")
BACKENDS = ("native", "triton", "torch", "host")
SM_SIDE_TOKENS = 8192
SM_SIDE_PLANS = (
    ("ring 2 x 2 / 8", libattnres.Plan("ring", rows_per_stage=2, ctas_per_sm=2, rows_in_flight=8)),
)
"""What keeps an SM busiest, which the plan for a GPU that memory holds back does not take."""
VARIANT_TOKENS = (1024, 8192)
"""Of the variants among the project's goals, which are about bandwidth."""
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--tokens", type=int, nargs="+", metavar="M", help="default 1 16 128 1024 8192")
    parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help="bank rows read, default 1 4 8")
    parser.add_argument(
        "--backend", nargs="+", choices=BACKENDS, help="default: every one that works on the device"
    )
    parser.add_argument(
        "--pdl",
        nargs="+",
        choices=("off", "wait", "early"),
        default=["early", "wait"],
        help="programmatic dependent launch, one row each (default: early wait)",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="cold",
        help="cold: graph replay over buffers of more than 3x L2 (default); hot: over one set; "
        "events: single eager launches, as triton.testing.do_bench",
    )
    parser.add_argument("--variants", action="store_true", help="also the calls that are not the common one")
    parser.add_argument("--kernels", action="store_true", help="also every native kernel, forced")
    parser.add_argument("--batch-invariant", action="store_true", help="also the native batch-invariant mode")
    parser.add_argument(
        "--competitors",
        nargs="*",
        choices=[competitor.name for competitor in COMPETITORS],
        help="other packages; default: those that are installed, torch.compile only when named",
    )
    parser.add_argument(
        "--two-phase",
        action="store_true",
        help="instead of whole calls: a bank pass and a merge, each beside what moves the same bytes",
    )
    parser.add_argument(
        "--sites",
        type=int,
        nargs="+",
        metavar="S",
        help="calls that a bank pass serves, with --two-phase (default 24)",
    )
    parser.add_argument("--sm-side", action="store_true", help="time on the SM's side: bank rows in L2")
    parser.add_argument("--cpu", action="store_true", help="time of a call on the CPU")
    parser.add_argument(
        "--targets", action="store_true", help="measure what the project's goals are about, and judge it"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="write PNGs there (needs matplotlib)")
    parser.add_argument("--seed", type=int, default=0, help="of the random values (default 0)")


class Bench:
    """Where and how things are measured, and what came of it."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        refuse_debug_build()
        self.args = args
        self.console = console
        self.device = chosen_device(args.device)
        self.kind = "cuda" if timing.is_gpu(self.device) else "cpu"
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)
            self.state = metadata.gpu_state(self.device)
        else:
            self.state = {}
        self.cache_bytes: int = self.state.get("l2_bytes", CPU_CACHE_BYTES)
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.notes: list[str] = []
        self.copy_gb_per_s = timing.copy_bandwidth(self.device, COPY_BYTES[self.kind])
        self.contenders, self.skipped = find_contenders(
            self.device,
            args.backend,
            args.pdl,
            kernels=args.kernels,
            batch_invariant=args.batch_invariant,
            competitors=args.competitors,
        )

    def measure(self, shape: Shape, mode: str, contenders: Sequence[Contender]) -> list[dict[str, Any]]:
        """Check, then time, every contender on one shape."""
        sets = timing.num_sets(shape.num_bytes, self.cache_bytes) if mode == "cold" else 1
        repeats = timing.repeats(shape.num_bytes, sets) if self.kind == "cuda" and mode != "events" else 1
        buffers = Buffers(shape, sets, self.device, self.args.seed)
        judge = Judge(buffers.arguments(0))
        rows = []
        for contender in contenders:
            reason = contender.unsupported(shape)
            if reason is not None:
                self.skip(contender, shape, reason)
                continue
            try:
                judge.restore()
                prepared = [
                    contender.prepare(buffers.arguments(index), buffers.out[index]) for index in range(sets)
                ]
                buffers.out.fill_(float("nan"))
                accuracy = self.check(contender, shape, judge, prepared[0])
                work = [launch.run for launch in prepared] * repeats
                row = self.describe(contender, shape, mode, sets, self.time(work, mode))
                row |= accuracy
                row["kernel"] = contender.launched(buffers.arguments(0), buffers.out[0])
            except libattnres.UnsupportedError as error:
                self.skip(contender, shape, str(error))
                continue
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                if contender.competitor is not None:  # its errors are its own
                    self.skip(contender, shape, what)
                elif isinstance(error, RuntimeError):  # a CUDA error: keep what there is
                    self.failures.append(f"{contender.name}, {label(shape)}: {what}")
                else:
                    raise
                continue
            rows.append(row)
        floor = next((row["median_us"] for row in rows if row["backend"] == "floor"), None)
        for row in rows:
            row["floor_ratio"] = None if floor is None else row["median_us"] / floor
        return rows

    def skip(self, contender: Contender, shape: Shape, reason: str) -> None:
        """Say once why something was not measured."""
        line = f"{contender.name}, {shape.num_blocks} blocks, {shape.variant.name}: {reason}"
        if line not in self.skipped:
            self.skipped.append(line)

    def check(self, contender: Contender, shape: Shape, judge: Judge, prepared: Prepared) -> dict[str, Any]:
        """Accuracy of the results; what is wrong with one of our backends is a failure of the command."""
        if contender.backend == "floor":
            return {"rel_l2": None, "correct": None}
        rel_l2, errors = judge.check(prepared.run, prepared.result)
        where = f"{contender.name}, {label(shape)}"
        if errors and contender.competitor is not None:
            self.notes.append(f"{where}: less accurate than the contract asks ({errors[0]})")
        elif errors:
            self.failures += [f"{where}: {error}" for error in errors]
        return {"rel_l2": rel_l2, "correct": not errors}

    def time(self, work: Sequence[timing.Launch], mode: str) -> Timing:
        """Median and spread of a launch."""
        if self.kind == "cpu":
            return timing.time_wall(work)
        if mode == "events":
            return timing.time_events(work, self.cache_bytes)
        return timing.time_graph(work)

    def describe(
        self, contender: Contender, shape: Shape, mode: str, sets: int, measured: Timing
    ) -> dict[str, Any]:
        """One row of the results."""
        gb_per_s = shape.num_bytes / measured.median_us / 1e3
        return {
            "name": contender.name,
            "backend": contender.backend,
            "pdl": contender.pdl,
            "plan_override": contender.plan,
            **shape.describe(),
            "mode": mode,
            "sets": sets,
            **asdict(measured),
            "gb_per_s": gb_per_s,
            "copy_fraction": gb_per_s / self.copy_gb_per_s,
        }

    def run(self, shapes: Sequence[Shape]) -> None:
        """Measure all shapes."""
        for shape in self.console.progress(shapes, len(shapes), "measuring"):
            try:
                self.rows += self.measure(shape, self.args.mode, self.contenders)
            except RuntimeError as error:  # out of memory, or a CUDA error: keep what there is
                self.failures.append(f"{label(shape)}: {type(error).__name__}: {error}")

    def sm_side(self) -> list[dict[str, Any]]:
        """Long batches whose tokens all read one bank entry: the SM's share of the work."""
        native = [contender for contender in self.contenders if contender.backend == "native"]
        if native:
            native += [
                backend_contender("native", mode, label, plan=plan)
                for mode in self.args.pdl
                for label, plan in SM_SIDE_PLANS
            ]
        rows = []
        for num_blocks in DEFAULT_BLOCKS:
            try:
                rows += self.measure(Shape(SM_SIDE_TOKENS, num_blocks, SM_SIDE), "cold", native)
            except RuntimeError as error:
                self.failures.append(f"SM side, {num_blocks} blocks: {type(error).__name__}: {error}")
        num_sms = self.state["num_sms"]
        for row in rows:
            row["us_per_token_and_sm"] = row["median_us"] * num_sms / row["tokens"]
        return rows


def measure_phases(bench: Bench) -> list[dict[str, Any]]:
    """Rows of ``--two-phase``; failures and skips are the bench's."""
    args = bench.args
    measure = phases.Measure(
        bench.device,
        bench.cache_bytes,
        bench.copy_gb_per_s,
        lambda work: bench.time(work, args.mode),
        args.mode == "cold",
        args.seed,
    )
    backends = dict.fromkeys(one.backend for one in bench.contenders if one.backend in BACKENDS)
    who = phases.contenders(bench.device, list(backends), args.pdl)
    work: list[tuple[int, int, int] | tuple[int]] = []
    for tokens in args.tokens or DEFAULT_TOKENS[bench.kind]:
        work.append((tokens,))
        for num_blocks in args.blocks or (phases.DEFAULT_BLOCKS,):
            work += [(tokens, num_blocks, sites) for sites in args.sites or (phases.DEFAULT_SITES,)]
    rows = []
    for sizes in bench.console.progress(work, len(work), "measuring"):
        try:
            if len(sizes) == 1:
                measured = phases.measure_merge(measure, *sizes, who)
            else:
                measured = phases.measure_bank(measure, *sizes, who)
        except RuntimeError as error:  # out of memory, or a CUDA error: keep what there is
            bench.failures.append(f"two phases, {sizes}: {type(error).__name__}: {error}")
            continue
        rows += measured[0]
        bench.failures += measured[1]
        bench.skipped += [line for line in measured[2] if line not in bench.skipped]
    return rows


def chosen_shapes(args: argparse.Namespace, kind: str) -> list[Shape]:
    """Tokens x blocks, with the variants where they are asked for."""
    tokens = args.tokens or (targets.TOKENS if args.targets else DEFAULT_TOKENS[kind])
    blocks = args.blocks or (targets.BLOCKS if args.targets else DEFAULT_BLOCKS)
    for name, values, low, high in (("tokens", tokens, 1, None), ("blocks", blocks, 0, 8)):
        for value in values:
            if value < low or (high is not None and value > high):
                wanted = f"numbers >= {low}" if high is None else f"numbers from {low} to {high}"
                raise ValueError(f"--{name}: expected {wanted}, got {value}")
    wanted_variants: tuple[Variant, ...] = (COMMON, *VARIANTS) if args.variants else (COMMON,)
    shapes = [
        Shape(M, N, variant)
        for variant in wanted_variants
        for N in blocks
        for M in tokens
        if M % variant.prefixes_per_row == 0
    ]
    if args.targets:
        shapes += [Shape(M, 8, variant) for variant in VARIANTS for M in VARIANT_TOKENS]
        # As many bank entries as the goal for shared rows begins with.
        M = 2 * targets.SHARED_ROWS_MIN_ENTRIES
        shared = next(variant for variant in VARIANTS if variant.prefixes_per_row > 1)
        shapes += [Shape(M, 8), Shape(M, 8, shared)]
    return list(dict.fromkeys(shapes))


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Measure, print, judge; status 1 when a result was wrong or a goal was missed."""
    started = time.monotonic()
    if args.plot is not None:
        from libattnres.cli import plots

        plots.require()
    with torch.no_grad():
        bench = Bench(args, console)
        if bench.kind != "cuda" and (args.sm_side or args.cpu or args.targets):
            raise ValueError("--sm-side, --cpu, --targets: expected a CUDA device, got none")
        if args.targets and args.mode != "cold":
            raise ValueError(f"--targets: expected --mode cold, which they are about, got {args.mode}")
        if args.two_phase and (args.targets or args.sm_side or args.cpu or args.variants or args.kernels):
            raise ValueError("--two-phase: expected none of --targets --sm-side --cpu --variants --kernels")
        if args.sites is not None and not args.two_phase:
            raise ValueError("--sites: expected --two-phase with it, got none")
        for sites in args.sites or ():
            if not 1 <= sites <= 1024:
                raise ValueError(f"--sites: expected numbers from 1 to 1024, got {sites}")
        if args.two_phase and any(not 1 <= blocks <= 8 for blocks in args.blocks or ()):
            raise ValueError(
                f"--blocks: expected numbers from 1 to 8 with --two-phase, got {min(args.blocks)}"
            )
        announce(bench)
        shapes = chosen_shapes(args, bench.kind)
        if not args.two_phase:
            bench.run(shapes)
        results: dict[str, Any] = {
            "device": str(bench.device),
            "gpu": bench.state,
            "cache_bytes": bench.cache_bytes,
            "copy_gb_per_s": bench.copy_gb_per_s,
            "mode": args.mode,
            "seed": args.seed,
            "environment": metadata.environment(),
            "rows": bench.rows,
        }
        if args.two_phase:
            results["two_phase"] = measure_phases(bench)
        measured = {contender.backend for contender in bench.contenders}
        if args.sm_side or args.targets:
            results["sm_side"] = bench.sm_side()
        if args.cpu or args.targets:
            results["cpu_us"] = cpu_times(bench.device, sorted(measured))
        if args.targets:
            backends = [name for name in ("native", "triton") if name in measured]
            results["walk"] = walk.measure_graphs(
                list(targets.WALK_BOUNDS), backends, args.pdl, bench.device, console, shares=False
            )
            goals = targets.check_bench(bench.rows, results["sm_side"], results["cpu_us"])
            goals += targets.check_walk(results["walk"]["rows"])
            results["targets"] = [goal.as_dict() for goal in goals]
    results |= {
        "failures": bench.failures,
        "skipped": bench.skipped,
        "notes": bench.notes,
        "passed": not bench.failures,
        "seconds": round(time.monotonic() - started, 1),
    }
    report(console, results)
    if args.plot is not None:
        for path in plots.write(results, args.plot):
            console.line(f"wrote {path}")
    missed = any(goal["met"] is False for goal in results.get("targets", ()))
    return int(bool(bench.failures) or missed), results


def announce(bench: Bench) -> None:
    """What is measured, where, and what may disturb it."""
    where = bench.state.get("name", "the CPU")
    bench.console.line(
        f"{where}: a plain copy moves {bench.copy_gb_per_s:.0f} GB/s; "
        f"cache {bench.cache_bytes / 2**20:.0f} MiB; "
        f"{', '.join(contender.name for contender in bench.contenders)}"
    )
    if bench.state.get("other_processes"):
        bench.console.line(f"WARNING: {bench.state['other_processes']} other processes use this GPU")


def label(shape: Shape) -> str:
    """A shape in words."""
    return f"{shape.num_tokens} tokens, {shape.num_blocks} blocks, {shape.variant.name}"


def report(console: Console, results: dict[str, Any]) -> None:
    """Print every table that the results have something for."""
    rows = results["rows"]
    if "two_phase" in results:
        console.table(
            f"two phases, microseconds per launch, {results['mode']} L2", *phases.table(results["two_phase"])
        )
        report_problems(console, results, len(results["two_phase"]))
        return
    console.table(
        f"microseconds per launch, {results['mode']} L2",
        (
            "variant",
            "tokens",
            "blocks",
            "what",
            "median",
            "p20",
            "p80",
            "GB/s",
            "% of copy",
            "x floor",
            "rel. L2",
        ),
        [
            (
                row["variant"],
                row["tokens"],
                row["num_blocks"],
                row["name"],
                row["median_us"],
                row["p20_us"],
                row["p80_us"],
                round(row["gb_per_s"]),
                round(100 * row["copy_fraction"]),
                row["floor_ratio"],
                row["rel_l2"],
            )
            for row in rows
        ],
    )
    console.table("median microseconds, common path", *tables.latency_table(rows))
    for title, (columns, lines) in (
        ("other calls beside the common path, median microseconds", tables.variant_table(rows)),
        ("forced kernels, median microseconds", tables.kernel_table(rows)),
    ):
        if lines:
            console.table(title, columns, lines)
    if results.get("sm_side"):
        console.table(
            "SM side: microseconds per token and SM, bank rows in L2",
            ("blocks", "what", "us"),
            [(row["num_blocks"], row["name"], row["us_per_token_and_sm"]) for row in results["sm_side"]],
        )
    if results.get("cpu_us"):
        console.table("microseconds of the CPU per call", ("what", "us"), list(results["cpu_us"].items()))
    if results.get("walk"):
        walk.report(console, results["walk"])
    if results.get("targets"):
        goals = [targets.GoalResult.from_dict(goal) for goal in results["targets"]]
        console.table("goals", *targets.table(goals))
    report_problems(console, results, len(rows))


def report_problems(console: Console, results: dict[str, Any], count: int) -> None:
    """What was not measured, what was not right, and how much was."""
    for line in results["skipped"]:
        console.line(f"not measured: {line}")
    for line in results["notes"]:
        console.line(f"note: {line}")
    for line in results["failures"]:
        console.line(f"WRONG: {line}")
    console.line(f"{count} measurements in {results['seconds']:.0f} s")
