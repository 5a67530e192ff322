# SPDX-License-Identifier: Apache-2.0
"""What every JSON file of the command line says about where its figures come from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import libattnres

__all__ = ["collect", "commit", "environment", "gpu_state", "kernel_driver", "package_version", "write_json"]


def write_json(path: Path, command: str, results: dict[str, Any]) -> None:
    """Write ``{"command", "metadata", ...results}``, replacing the file only once it is complete."""
    document = {"command": command, "metadata": collect(), **results}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def collect() -> dict[str, Any]:
    """Device, driver, versions, commit and date."""
    probe = libattnres.probe()
    return {
        "libattnres": probe.version,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "devices": [
            {
                "name": device.name,
                "compute_capability": ".".join(map(str, device.compute_capability)),
                "num_sms": device.num_sms,
                "target": device.target,
            }
            for device in probe.devices
        ],
        "driver": kernel_driver(),
        "driver_cuda": cuda_version(probe.driver_version),
        "runtime_cuda": cuda_version(probe.runtime_version),
        "built_targets": list(probe.built_targets),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": package_version("triton"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)),
    }


def gpu_state(device: torch.device) -> dict[str, Any]:
    """What a measurement on a CUDA device depends on: its L2 size, clocks, power and other processes."""
    properties = torch.cuda.get_device_properties(device)
    name = f"GPU-{getattr(properties, 'uuid', '')}"
    queried = nvidia_smi("--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu", name)
    names = ("sm_clock_mhz", "max_sm_clock_mhz", "memory_clock_mhz", "power_limit_w", "temperature_c")
    values = queried[0].split(", ") if queried else []
    # In a container this process may be listed under another id, or not at all.
    processes = nvidia_smi("--query-compute-apps=pid", name)
    own = int(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return {
        "name": properties.name,
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        **{name: number(value) for name, value in zip(names, values, strict=False)},
        "other_processes": None if processes is None else max(0, len(processes) - own),
    }


def environment() -> dict[str, str]:
    """The variables of this library that are set."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("LIBATTNRES_")}


def nvidia_smi(query: str, device: str) -> list[str] | None:
    """Lines of a query, or None where the tool is missing or refuses."""
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", device],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def number(text: str) -> float | None:
    """A number, or None for "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return None


def cuda_version(number: int) -> str | None:
    """``"13.0"`` for 13000; None for 0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def package_version(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def kernel_driver() -> str | None:
    """Version of the NVIDIA kernel driver, such as ``"580.95.05"``."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def cpu_name() -> str | None:
    """Model name of the first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or None
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else None


def commit() -> str | None:
    """``LIBATTNRES_COMMIT``, or the commit of the source tree that this package was imported from."""
    given = os.environ.get("LIBATTNRES_COMMIT")
    if given:
        return given
    folder = Path(libattnres.__file__).resolve().parent
    if not any((parent / ".git").exists() for parent in folder.parents):
        return None
    try:
        tracked = subprocess.run(
            ["git", "ls-files", "--error-unmatch", Path(libattnres.__file__).name],
            cwd=folder,
            capture_output=True,
            timeout=10,
            check=False,
        )
        if tracked.returncode != 0:  # an environment that merely lies inside some work tree
            return None
        head = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() or None
