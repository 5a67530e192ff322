# SPDX-License-Identifier: Apache-2.0
"""``libattnres permutations``: the kernels compiled into the library."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import libattnres
from libattnres.audit import rules as audit
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
    parser.add_argument(
        "--audit",
        action="store_true",
        help="read the machine code of every kernel for every target and check what it promises; needs "
        "no GPU, but cuobjdump and nvdisasm (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)",
    )


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Print the table, or per kernel the values that each axis takes."""
    permutations = libattnres.permutations()
    if args.audit:
        return audit_library(args, console)
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


def audit_installed(console: Console) -> list[audit.Audit]:
    """Audit the library of this package."""
    if not libattnres.permutations():
        raise libattnres.UnsupportedError("library: expected one with kernels, got one built without CUDA")
    # An editable install has several folders, and only one of them holds what was built.
    libraries = [Path(root) / "lib" / "libattnres.so" for root in libattnres.__path__]
    return audit.audit_binary(next(path for path in libraries if path.is_file()), console.progress)


def audit_library(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Print what the machine code is and which rules it breaks; status 1 when it breaks any."""
    audits = audit_installed(console)
    console.table("machine code of the kernels", audit.SUMMARY_COLUMNS, audit.summary(audits))
    if args.all:
        console.table("each kernel", audit.DETAIL_COLUMNS, audit.details(audits))
    broken = [f"{one.kernel} for sm_{one.target}: {problem}" for one in audits for problem in one.problems]
    for problem in broken:
        console.line(f"BROKEN: {problem}")
    console.line(f"{len(audits)} kernels audited, {len(broken)} broken rules")
    return int(bool(broken)), {"problems": broken, "audits": [one.as_dict() for one in audits]}
