# SPDX-License-Identifier: Apache-2.0
"""``libattnres walk``: how long the 187 calls of one model step take, with other kernels between them.

Before each call a small producer kernel, the same for every backend, writes the call's delta (or its prefix,
where there is none) from the output of the call before. Producers alone are measured too, and subtracted.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import libattnres
from libattnres import timing
from libattnres.cli import metadata, targets
from libattnres.cli.console import Console
from libattnres.cli.walk_steps import Group, Implementation, Walk, synchronize
from libattnres.cli.workload import CPU_CACHE_BYTES, chosen_device, refuse_debug_build
from libattnres.model_walk import HIDDEN_SIZE, bytes_per_token, walk_calls
from libattnres.timing import Launch, Timing

HELP = "time of the 187 calls of one model step, with producer kernels between, per backend"

DEFAULT_TOKENS = {"cuda": (1, 16, 128, 1024, 8192), "cpu": (16,)}
PHASES = {False: "off", True: "on", None: "auto"}
"""Options of ``--two-phase``."""
SHARE_US = 300.0
"""What a graph of one group's calls should last at least."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="in the step (default 1 16 128 1024 8192; 16 on the CPU)"
    )
    parser.add_argument(
        "--backend",
        nargs="+",
        choices=("native", "triton", "torch", "host"),
        help="default: native and triton, on the CPU host and torch",
    )
    parser.add_argument(
        "--pdl",
        nargs="+",
        choices=("off", "wait", "early"),
        default=["early", "wait"],
        help="programmatic dependent launch, one row each (default: early wait)",
    )
    parser.add_argument(
        "--two-phase",
        choices=tuple(PHASES.values()),
        default="off",
        help="one row more for each of those: after every bank write one pass over the bank for all calls "
        "until the next, or only where it pays (default: off)",
    )
    parser.add_argument("--eager", action="store_true", help="also without a graph, on the host's clock")
    parser.add_argument("--no-shares", action="store_true", help="leave out the share of each call site")
    parser.add_argument("--threads", type=int, help="of PyTorch and of the host backend, on the CPU")
    parser.add_argument("--targets", action="store_true", help="judge by the project's goals")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--seed", type=int, default=0, help="of the random values (default 0)")


def per_step(measured: Timing, num_launches: int, num_steps: int) -> tuple[float, float, float]:
    """Median, p20 and p80 of one step, from those of one launch."""
    factor = num_launches / num_steps
    return measured.median_us * factor, measured.p20_us * factor, measured.p80_us * factor


def measure_tokens(
    walk: Walk,
    implementations: Sequence[Implementation],
    mode: str,
    shares: bool,
    results: dict[str, Any],
) -> None:
    """Every implementation on one walk; rows, groups, failures and skips are added to ``results``."""

    def time(work: Sequence[Launch], budget_s: float = 0.5) -> Timing:
        if mode == "graph":
            return timing.time_graph(work, budget_s=budget_s)
        return timing.time_wall(work, budget_s=budget_s)

    def blocking(work: list[Launch]) -> list[Launch]:
        """On the host's clock a pass ends when the device has ended."""
        return work if mode == "graph" else [*work, lambda: synchronize(walk.device)]

    def steps_of(work: list[Launch], budget_s: float = 0.5) -> tuple[float, float, float]:
        work = blocking(work)
        return per_step(time(work, budget_s), len(work), walk.num_steps)

    producers = steps_of(walk.launches(None))[0]
    group_producers: dict[Group, float] = {}
    walked: list[Implementation] = []
    for implementation in implementations:
        try:
            rel_l2 = None
            if mode != "eager":  # that comes after the graph of the same walk
                rel_l2, errors = walk.check(implementation)
                results["failures"] += errors
            total, p20, p80 = steps_of(walk.launches(implementation))
            moved = walk.rows_moved(implementation)
            row = {
                "name": implementation.name,
                "backend": implementation.backend,
                "pdl": implementation.pdl,
                "two_phase": PHASES[implementation.two_phase],
                "bank_passes": len(walk.passes(implementation)),
                "tokens": walk.num_tokens,
                "mode": mode,
                "steps_per_sample": walk.num_steps,
                "sites": walk.num_sites,
                "median_us": total,
                "p20_us": p20,
                "p80_us": p80,
                "producers_us": producers,
                "net_us": total - producers,
                "bytes": moved * 2 * HIDDEN_SIZE * walk.num_tokens,
                "worst_rel_l2": rel_l2,
            }
            alone = [other for other in results["rows"] if is_in_one_phase(other, row)]
            # Of the two in this run; None in one phase.
            net, above = total - producers, alone[0]["net_us"] if alone else 0.0
            row["one_phase_ratio"] = above / net if above > 0 and net > 0 else None
            results["rows"].append(row)
            walked.append(implementation)
        except libattnres.UnsupportedError as error:
            results["skipped"].append(f"{implementation.name}, {walk.num_tokens} tokens: {error}")
        except RuntimeError as error:  # out of memory, or a CUDA error: keep what there is
            results["failures"].append(
                f"{implementation.name}, {walk.num_tokens} tokens: {type(error).__name__}: {error}"
            )
    # After all whole steps, which are compared with each other.
    for implementation in walked if shares else ():
        try:
            measured: list[tuple[Group, int, float]] = []
            for group, indices in walk.groups().items():
                repeats = max(1, math.ceil(SHARE_US / (2 * len(indices) * walk.num_steps)))
                if group not in group_producers:
                    group_producers[group] = (
                        steps_of(walk.launches(None, indices) * repeats, 0.1)[0] / repeats
                    )
                whole = steps_of(walk.launches(implementation, indices) * repeats, 0.1)[0] / repeats
                measured.append((group, len(indices), max(0.0, whole - group_producers[group])))
            for group, passes in walk.pass_launches(implementation).items():
                count = len(passes) // walk.num_steps
                repeats = max(1, math.ceil(SHARE_US / (2 * len(passes))))
                measured.append((group, count, steps_of(passes * repeats, 0.1)[0] / repeats))
            results["groups"] += group_rows(walk, implementation, mode, measured)
        except RuntimeError as error:
            results["failures"].append(
                f"{implementation.name}, {walk.num_tokens} tokens: {type(error).__name__}: {error}"
            )


def is_in_one_phase(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a row is in one phase what another is in two."""
    names = ("backend", "pdl", "tokens", "mode")
    return (
        row["two_phase"] == "off"
        and other["two_phase"] != "off"
        and all(row[name] == other[name] for name in names)
    )


def group_rows(
    walk: Walk, implementation: Implementation, mode: str, measured: Sequence[tuple[Group, int, float]]
) -> list[dict[str, Any]]:
    """Net time of each group of call sites, and its share of their sum."""
    everything = sum(net for _, _, net in measured) or 1.0
    return [
        {
            "name": implementation.name,
            "backend": implementation.backend,
            "pdl": implementation.pdl,
            "two_phase": PHASES[implementation.two_phase],
            "tokens": walk.num_tokens,
            "mode": mode,
            "num_blocks": group.num_blocks,
            "variant": group.variant,
            "calls": calls,
            "net_us": net,
            "us_per_call": net / calls,
            "share": net / everything,
        }
        for group, calls, net in measured
    ]


def measure_graphs(
    tokens: Sequence[int],
    backends: Sequence[str],
    pdl: Sequence[str],
    device: torch.device,
    console: Console,
    *,
    shares: bool = True,
    eager: bool = False,
    two_phase: str = "off",
    seed: int = 0,
) -> dict[str, Any]:
    """Walk at each number of tokens: in a CUDA graph on a GPU, in a plain loop on the CPU."""
    results: dict[str, Any] = {"rows": [], "groups": [], "failures": [], "skipped": []}
    implementations = []
    for backend in backends:
        modes = pdl if backend in ("native", "triton") else (None,)
        for mode in modes:
            implementations.append(Implementation(backend, mode))
            if two_phase != "off":
                implementations.append(Implementation(backend, mode, {"on": True, "auto": None}[two_phase]))
    cache_bytes = metadata.gpu_state(device)["l2_bytes"] if timing.is_gpu(device) else CPU_CACHE_BYTES
    for num_tokens in console.progress(tokens, len(tokens), "walking"):
        try:
            walk = Walk(num_tokens, device, cache_bytes, seed)
            if not timing.is_gpu(device):
                measure_tokens(walk, implementations, "wall", False, results)
                continue
            measure_tokens(walk, implementations, "graph", shares, results)
            if eager:
                measure_tokens(walk, implementations, "eager", False, results)
        except RuntimeError as error:
            results["failures"].append(f"{num_tokens} tokens: {type(error).__name__}: {error}")
    return results


@contextlib.contextmanager
def limited_threads(count: int | None) -> Iterator[None]:
    """Limit the threads of PyTorch and of the host backend; None leaves them."""
    if count is None:
        yield
        return
    before, variable = torch.get_num_threads(), os.environ.get("LIBATTNRES_NUM_THREADS")
    torch.set_num_threads(count)
    os.environ["LIBATTNRES_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        del os.environ["LIBATTNRES_NUM_THREADS"]
        if variable is not None:
            os.environ["LIBATTNRES_NUM_THREADS"] = variable


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Check, measure, print; status 1 when a call was wrong or a goal was missed."""
    refuse_debug_build()
    device = chosen_device(args.device)
    tokens = list(args.tokens or DEFAULT_TOKENS["cuda" if timing.is_gpu(device) else "cpu"])
    for num_tokens in tokens:
        if num_tokens < 1:
            raise ValueError(f"--tokens: expected numbers >= 1, got {num_tokens}")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads: expected a number >= 1, got {args.threads}")
    usable = libattnres.probe().backends
    backends = args.backend or (("native", "triton") if timing.is_gpu(device) else ("host", "torch"))
    unusable = [f"{name}: {usable[name]}" for name in backends if usable[name] is not None]
    with torch.no_grad(), limited_threads(args.threads):
        if timing.is_gpu(device):
            torch.cuda.set_device(device)
        results = measure_graphs(
            tokens,
            [name for name in backends if usable[name] is None],
            args.pdl,
            device,
            console,
            shares=not args.no_shares,
            eager=args.eager,
            two_phase=args.two_phase,
            seed=args.seed,
        )
        results["threads"] = torch.get_num_threads()
    results["skipped"] += unusable
    results |= {
        "device": str(device),
        "gpu": metadata.gpu_state(device) if timing.is_gpu(device) else {},
        "environment": metadata.environment(),
        "bytes_per_token": bytes_per_token(),
        "passed": not results["failures"],
    }
    goals = targets.check_walk(results["rows"]) if args.targets else []
    if args.targets:
        results["targets"] = [goal.as_dict() for goal in goals]
    report(console, results)
    if goals:
        console.table("goals", *targets.table(goals))
    return int(bool(results["failures"]) or any(goal.met is False for goal in goals)), results


def report(console: Console, results: dict[str, Any]) -> None:
    """Totals per backend, then the shares of the call sites."""
    console.table(
        f"one step of {len(walk_calls())} calls, microseconds",
        (
            "tokens",
            "mode",
            "what",
            "total",
            "p20",
            "p80",
            "producers",
            "net",
            "GB/s net",
            "slowest / this",
            "one phase / this",
        ),
        [
            (
                row["tokens"],
                row["mode"],
                row["name"],
                round(row["median_us"], 1),
                round(row["p20_us"], 1),
                round(row["p80_us"], 1),
                round(row["producers_us"], 1),
                round(row["net_us"], 1),
                round(row["bytes"] / row["net_us"] / 1e3) if row["net_us"] > 0 else None,
                slowest(results["rows"], row) / row["net_us"] if row["net_us"] > 0 else None,
                row["one_phase_ratio"],
            )
            for row in results["rows"]
        ],
    )
    for (tokens, name), groups in shares_of(results["groups"]).items():
        console.table(
            f"{tokens} tokens, {name}: net of the producers, by call site",
            ("blocks", "variant", "calls", "us", "us per call", "% of the step"),
            [
                (
                    group["num_blocks"],
                    group["variant"],
                    group["calls"],
                    group["net_us"],
                    group["us_per_call"],
                    100 * group["share"],
                )
                for group in groups
            ],
        )
    for line in results["skipped"]:
        console.line(f"not measured: {line}")
    for line in results["failures"]:
        console.line(f"WRONG: {line}")


def slowest(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> float:
    """Net time of the slowest at the same number of tokens."""
    same = [other for other in rows if (other["tokens"], other["mode"]) == (row["tokens"], row["mode"])]
    return max(float(other["net_us"]) for other in same)


def shares_of(groups: Sequence[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """The groups of each (tokens, implementation)."""
    result: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for group in groups:
        result.setdefault((group["tokens"], group["name"]), []).append(group)
    return result
