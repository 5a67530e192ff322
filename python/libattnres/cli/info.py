# SPDX-License-Identifier: Apache-2.0
"""``libattnres info``: versions, devices, and which backends can be used here."""

from __future__ import annotations

import argparse
from typing import Any

import libattnres
from libattnres.cli import metadata
from libattnres.cli.console import Console

VARIABLES = (
    "LIBATTNRES_BACKEND",
    "LIBATTNRES_BATCH_INVARIANT",
    "LIBATTNRES_COMMIT",
    "LIBATTNRES_HOST_TARGET",
    "LIBATTNRES_NUM_THREADS",
    "LIBATTNRES_PLAN_FILE",
    "LIBATTNRES_SGLANG",
    "LIBATTNRES_VLLM",
)

HELP = "versions, devices, and which backends can be used here and why not the others"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""
    del parser


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Print what :func:`libattnres.probe` says; status 1 when a variable has a wrong value."""
    del args
    probe = libattnres.probe()
    known = metadata.collect()
    versions = [
        ("libattnres", known["libattnres"]),
        ("commit", known["commit"]),
        ("compiled for", ", ".join(f"sm_{target}" for target in probe.built_targets) or "no GPU"),
        ("compiled kernels", str(probe.num_permutations)),
        ("torch", f"{known['torch']} (CUDA {known['torch_cuda'] or 'none'})"),
        ("triton", known["triton"] or "not installed"),
        ("NVIDIA driver", known["driver"] or "none"),
        ("CUDA of the driver", known["driver_cuda"] or "none"),
        ("CUDA runtime inside", known["runtime_cuda"] or "none"),
        ("python", known["python"]),
        ("CPU", f"{known['cpu'] or 'unknown'}, {known['cpu_count']} usable"),
    ]
    console.table("versions", ("what", "version"), [(what, value or "unknown") for what, value in versions])
    console.table(
        "CUDA devices",
        ("device", "name", "compute", "SMs", "native", "target or reason", "plan"),
        [
            (
                f"cuda:{device.index}",
                device.name,
                ".".join(map(str, device.compute_capability)),
                device.num_sms,
                device.native,
                device.target if device.native else device.reason,
                device.plan,
            )
            for device in probe.devices
        ]
        or [("none", "", "", "", "", "PyTorch sees no CUDA device", "")],
    )
    console.table(
        "backends",
        ("backend", "usable here", "why not"),
        [(name, reason is None, reason or "") for name, reason in probe.backends.items()],
    )
    variables = metadata.environment()
    if variables:
        console.table(
            "variables",
            ("name", "value", "note"),
            [(name, value, "" if name in VARIABLES else "unknown") for name, value in variables.items()],
        )
    errors = [*filter(None, [probe.plan_error]), *probe.environment_errors]
    for error in errors:
        console.line(f"WRONG: {error}")
    return int(bool(errors)), {"probe": probe.as_dict(), "environment": variables}
