# SPDX-License-Identifier: Apache-2.0
"""``libattnres permutations``: the kernels compiled into the library."""

from __future__ import annotations

import argparse
from typing import Any

import libattnres
from libattnres.cli.console import Console

HELP = "the kernels compiled into the library"

AXES = (
    "hidden_size",
    "num_sources",
    "rows_per_stage",
    "prefixes_per_row",
    "cluster_size",
    "has_output_norm",
    "static_common_path",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--all", action="store_true", help="one line per kernel instead of a summary")


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Print the table, or per kernel the values that each axis takes."""
    permutations = libattnres.permutations()
    targets = ", ".join(f"sm_{target}" for target in libattnres.probe().built_targets) or "no GPU"
    title = f"{len(permutations)} kernels for each of: {targets}"
    if args.all:
        console.table(
            title,
            ("kernel", *AXES),
            [[str(value) for value in permutation.values()] for permutation in permutations],
        )
    else:
        rows = []
        for kernel in ("ring", "cluster"):
            mine = [permutation for permutation in permutations if permutation["kernel"] == kernel]
            values = {
                axis: sorted({int(permutation[axis]) for permutation in mine})  # type: ignore[literal-required]
                for axis in AXES
            }
            rows.append((kernel, str(len(mine)), *(" ".join(map(str, values[axis])) for axis in AXES)))
        console.table(title, ("kernel", "count", *AXES), rows)
    return 0, {"permutations": permutations}
