# SPDX-License-Identifier: Apache-2.0
"""``libattnres verify``: every variant of the contract, on every backend that works here, against float64."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import libattnres
from libattnres import reference
from libattnres.cli.console import Console
from libattnres.cli.problem import (
    LAYOUTS,
    NUM_BANK_ROWS,
    Arguments,
    Layout,
    Problem,
    Values,
    Variant,
    random_values,
    variants,
)

HELP = "the whole variant matrix against a float64 reference, for every backend that works here"

MAX_REPORTED_FAILURES = 50


@dataclass(frozen=True)
class Matrix:
    """Sizes over which every variant is run."""

    dtype: torch.dtype
    hidden_size: int
    token_counts: tuple[int, ...]
    num_blocks: tuple[int, ...] = tuple(range(9))


@dataclass
class Tally:
    """What one backend and plan did in one dtype."""

    checks: int = 0
    rel_l2: float = 0.0
    worst_element: float = 0.0
    failures: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--backend", choices=("native", "triton", "torch", "host"), help="this one alone; must work here"
    )
    parser.add_argument("--quick", action="store_true", help="a small part of the matrix")
    parser.add_argument("--seed", type=int, default=0, help="of the random values (default 0)")


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Run the matrix; status 1 when anything was wrong."""
    started = time.monotonic()
    unusable = libattnres.probe().backends
    if args.backend is not None and unusable[args.backend] is not None:
        raise libattnres.UnsupportedError(
            f"--backend: expected one that works here, got {args.backend}: {unusable[args.backend]}"
        )
    names = [args.backend] if args.backend else [name for name, reason in unusable.items() if reason is None]
    tallies: dict[tuple[str, str, str], Tally] = {}
    failures: list[str] = []
    for name in names:
        device = backend_device(name)
        plans: list[tuple[str, libattnres.Plan | None]] = [("auto", None)]
        if name == "native":
            plans += native_plans()
        if args.quick:
            plans = plans[:1] + plans[1::3]
        for matrix in matrices(name, device, args.quick):
            groups = list(problem_groups(matrix))
            description = f"{name} {dtype_name(matrix.dtype)} H={matrix.hidden_size}"
            for group in console.progress(groups, len(groups), description):
                verify_group(name, device, matrix, group, plans, args.seed, tallies, failures)
    failures += missing_plans(tallies)
    seconds = time.monotonic() - started
    report(console, tallies, failures, seconds)
    results = {
        "seconds": round(seconds, 1),
        "passed": not failures,
        "failures": failures[:MAX_REPORTED_FAILURES],
        "num_failures": len(failures),
        "results": [
            {
                "backend": name,
                "plan": plan,
                "dtype": dtype,
                "checks": tally.checks,
                "failures": tally.failures,
                "worst_rel_l2": tally.rel_l2,
                "worst_element": tally.worst_element,
                "refused": dict(tally.refused),
            }
            for (name, plan, dtype), tally in tallies.items()
        ],
        "matrix": {
            name: [
                {
                    "dtype": dtype_name(matrix.dtype),
                    "hidden_size": matrix.hidden_size,
                    "token_counts": matrix.token_counts,
                    "num_blocks": matrix.num_blocks,
                    "layouts": LAYOUTS,
                    "prefixes_per_row": [1, 2],
                }
                for matrix in matrices(name, backend_device(name), args.quick)
            ]
            for name in names
        },
    }
    return int(bool(failures)), results


def backend_device(name: str) -> torch.device:
    """Where a backend is verified."""
    return torch.device("cpu" if name == "host" or not torch.cuda.is_available() else "cuda")


def matrices(name: str, device: torch.device, quick: bool) -> list[Matrix]:
    """The sizes and dtypes for one backend."""
    if quick:
        sizes: tuple[int, ...] = (0, 1, 3)
    elif name == "native":
        # Empty; fewer tokens than one wave; a wave of 132 SMs and one more; several waves, with a tail.
        sizes = (0, 1, 2, 17, 132, 133, 700, 4096)
    elif device.type == "cuda":
        sizes = (0, 1, 2, 17, 133)
    else:
        sizes = (0, 1, 2, 17)
    result = [Matrix(torch.bfloat16, 7168, sizes, (0, 8) if quick else tuple(range(9)))]
    if name == "native":
        return result
    result += [
        Matrix(torch.float16, 1000, (3,), (0, 3, 8)),
        Matrix(torch.float32, 1000, (3,), (0, 3, 8)),
        Matrix(torch.bfloat16, 72, (17,), (0, 3, 8)),
    ]
    if name == "torch":
        result.append(Matrix(torch.float64, 72, (17,), (0, 3, 8)))
    return result


def native_plans() -> list[tuple[str, libattnres.Plan | None]]:
    """Every kernel, NC, residency and cluster size that is compiled in."""
    plans: list[tuple[str, libattnres.Plan | None]] = []
    permutations = libattnres.permutations()
    for rows in sorted({entry["rows_per_stage"] for entry in permutations if entry["kernel"] == "ring"}):
        plans += [
            (f"ring {rows} x {ctas}", libattnres.Plan("ring", rows_per_stage=rows, ctas_per_sm=ctas))
            for ctas in (1, 2)
        ]
    for size in sorted({entry["cluster_size"] for entry in permutations if entry["kernel"] == "cluster"}):
        plans.append((f"cluster {size}", libattnres.Plan("cluster", cluster_size=size)))
    return plans


@dataclass(frozen=True)
class Group:
    """Problems that share sizes, and so values and memory."""

    num_tokens: int
    prefixes_per_row: int
    num_blocks: tuple[int, ...]


def problem_groups(matrix: Matrix) -> Iterator[Group]:
    """One group per size and number of blocks."""
    for num_tokens in matrix.token_counts:
        for prefixes_per_row in (1, 2):
            for num_blocks in matrix.num_blocks:
                tokens = num_tokens + num_tokens % prefixes_per_row
                yield Group(tokens, prefixes_per_row, (num_blocks,))


def verify_group(
    name: str,
    device: torch.device,
    matrix: Matrix,
    group: Group,
    plans: list[tuple[str, libattnres.Plan | None]],
    seed: int,
    tallies: dict[tuple[str, str, str], Tally],
    failures: list[str],
) -> None:
    """Run every variant, layout and plan of a group."""
    sizes = (group.num_tokens, group.prefixes_per_row, matrix.hidden_size)
    values = random_values(*sizes, matrix.dtype, device, seed)
    references: dict[tuple[int, bool, bool], reference.Result] = {}
    for layout in group_layouts(group):
        arguments = Arguments(layout, *sizes, matrix.dtype, device)
        for variant in variants(group.num_blocks, NUM_BANK_ROWS[layout], group.prefixes_per_row):
            key = (variant.num_blocks, variant.has_delta, variant.has_output_norm)
            if key not in references:
                references[key] = reference_of(values, variant)
            problem = Problem(arguments, values, variant, references[key])
            for index, (label, plan) in enumerate(plans):
                tally = tallies.setdefault((name, label, dtype_name(matrix.dtype)), Tally())
                try:
                    errors = verify_problem(problem, name, plan, ("early", "off", "wait")[index % 3], tally)
                except libattnres.UnsupportedError as error:
                    if plan is None:
                        errors = [f"refused: {error}"]
                    else:
                        tally.refused[str(error)] += 1
                        continue
                tally.failures += bool(errors)
                where = f"{name} {label} {dtype_name(matrix.dtype)} H={matrix.hidden_size} {group} {layout}"
                failures += [f"{where} {variant}: {error}" for error in errors]


def group_layouts(group: Group) -> tuple[Layout, ...]:
    """Interleaved memory needs a bank entry per token, and is worth its time on moderate sizes."""
    if group.prefixes_per_row == 1 and 0 < group.num_tokens <= 1000:
        return LAYOUTS
    return ("dense", "padded")


def reference_of(values: Values, variant: Variant) -> reference.Result:
    """Float64 output and exact prefix; the bank written is the prefix again."""
    return reference.attn_res(
        values.prefix,
        values.delta if variant.has_delta else None,
        values.blocks[:, : variant.num_blocks],
        values.norm_weight,
        values.qk_weight,
        values.output_norm_weight if variant.has_output_norm else None,
        variant.num_blocks,
    )


def verify_problem(
    problem: Problem, name: str, plan: libattnres.Plan | None, pdl: str, tally: Tally
) -> list[str]:
    """Run a problem twice: the bits must be the same.

    A forced plan must give the same bits in every PDL mode; the automatic plan depends on the mode.
    """
    first_pdl = pdl if plan is None else "wait"
    problem.run(name, first_pdl, plan)
    verdict, first = problem.judge()
    errors = [f"pdl={first_pdl}: {error}" for error in verdict.errors]
    problem.run(name, pdl, plan)
    again, second = problem.judge()
    errors += [f"second run, pdl={pdl}: {error}" for error in again.errors]
    if not reference.same_bits(first, second):
        errors.append(f"the second run (pdl={pdl}) gave other bits")
    tally.checks += 2
    tally.rel_l2 = max(tally.rel_l2, verdict.rel_l2, again.rel_l2)
    tally.worst_element = max(tally.worst_element, verdict.worst_element, again.worst_element)
    return errors


def missing_plans(tallies: dict[tuple[str, str, str], Tally]) -> list[str]:
    """A plan that refused every call has shown nothing."""
    return [
        f"{name} {plan} {dtype}: served no call: {', '.join(tally.refused)}"
        for (name, plan, dtype), tally in tallies.items()
        if tally.checks == 0
    ]


def report(
    console: Console,
    tallies: dict[tuple[str, str, str], Tally],
    failures: list[str],
    seconds: float,
) -> None:
    """Print the summary and the first failures."""
    console.table(
        "against float64 (worst element as a fraction of its bound)",
        ("backend", "plan", "dtype", "checks", "refused", "rel. L2", "worst element", "wrong"),
        [
            (
                name,
                plan,
                dtype,
                tally.checks,
                sum(tally.refused.values()),
                tally.rel_l2,
                tally.worst_element,
                tally.failures,
            )
            for (name, plan, dtype), tally in tallies.items()
        ],
    )
    for failure in failures[:MAX_REPORTED_FAILURES]:
        console.line(f"WRONG: {failure}")
    checks = sum(tally.checks for tally in tallies.values())
    verdict = f"{len(failures)} WRONG" if failures else "all right"
    console.line(f"{checks} checked calls, {verdict}, {seconds:.0f} s")


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
