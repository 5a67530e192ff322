# SPDX-License-Identifier: Apache-2.0
"""What can run on this machine: ``probe``, ``warmup`` and ``permutations``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from libattnres import _core
from libattnres._call import checked_call, resolved_batch_invariant
from libattnres._dispatch import requested_backend
from libattnres._records import Permutation

__all__ = ["DeviceStatus", "Probe", "permutations", "probe", "warmup"]


@dataclass(frozen=True)
class DeviceStatus:
    """A CUDA device as the native backend sees it."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    native: bool
    """Whether the native kernels run there."""
    target: str
    """Compiled target that would run, such as ``"90a"``; empty without one."""
    reason: str
    """Why the native kernels do not run there; empty when they do."""
    plan: str
    """Where their plan comes from: ``"built-in"``, or a file and line; empty when they do not run."""


@dataclass(frozen=True)
class Probe:
    """Answer of :func:`probe`."""

    version: str
    """Of libattnres."""
    built_targets: tuple[str, ...]
    """GPU targets that the library was compiled for."""
    num_permutations: int
    """Compiled kernels."""
    driver_version: int
    """As ``cudaDriverGetVersion``: 13000 for 13.0; 0 without a driver."""
    runtime_version: int
    """Of the CUDA runtime inside the library; 0 without CUDA."""
    devices: tuple[DeviceStatus, ...]
    """The CUDA devices that PyTorch sees."""
    plan_error: str
    """What is wrong with the file of ``LIBATTNRES_PLAN_FILE``; empty when nothing is, or there is none."""
    environment_errors: tuple[str, ...]
    """What is wrong with other variables, in the words of the error that a call raises which heeds them."""
    backends: dict[str, str | None]
    """For each backend None when it can be used here, or why not."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def probe() -> Probe:
    """Which backends can be used on this machine, and why the others cannot.

    Never fails for want of a GPU, a driver or a compiler. It may start the CUDA driver, which processes
    that fork later should not do; importing libattnres does not.

    Returns
    -------
    Probe
        Versions, devices and, per backend, None or the reason.
    """
    num_devices = torch.cuda.device_count() if torch.version.cuda is not None else 0
    first = _core.probe(0)
    devices = tuple(device_status(index) for index in range(num_devices))
    native: str | None = first["reason"] or "no CUDA device"
    if any(device.native for device in devices):
        native = first["plan_error"] or None
    elif torch.version.cuda is None and not first["reason"]:
        native = "this PyTorch was built without CUDA"
    return Probe(
        version=_core.version(),
        built_targets=tuple(filter(None, first["built_targets"].split(";"))),
        num_permutations=_core.num_permutations(),
        driver_version=first["driver_version"],
        runtime_version=first["runtime_version"],
        devices=devices,
        plan_error=first["plan_error"],
        environment_errors=environment_errors(),
        backends={
            "native": native,
            "triton": triton_reason(num_devices),
            "torch": None,
            "host": None,
        },
    )


def device_status(index: int) -> DeviceStatus:
    """The native backend's view of one device."""
    info = _core.probe(index)
    return DeviceStatus(
        index=index,
        name=info["device_name"],
        compute_capability=(info["compute_major"], info["compute_minor"]),
        num_sms=info["num_sms"],
        native=info["native"],
        target=info["target"],
        reason=info["reason"],
        plan=info["plan"],
    )


def environment_errors() -> tuple[str, ...]:
    """What calls would say of ``LIBATTNRES_BACKEND`` and the like."""
    checks: tuple[Callable[[], object], ...] = (
        lambda: requested_backend(None, None),
        lambda: resolved_batch_invariant(None),
        call_on_host,
    )
    errors = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            errors.append(str(error))
    return tuple(errors)


def call_on_host() -> None:
    """The smallest call of the host backend, which heeds variables of its own."""
    blocks = torch.ones(1, 1, 1, dtype=torch.float32, device="cpu")
    prefix, weight = blocks[0].clone(), blocks[0, 0]
    call = checked_call(
        prefix, None, blocks, weight, weight, None, 1, -1, 1e-5, 1e-5, None, "wait", batch_invariant=False
    )
    _core.forward_host(*call.core_args())


def triton_reason(num_devices: int) -> str | None:
    """Why the Triton backend cannot be used, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if num_devices == 0:
        return "no CUDA device that PyTorch can use"
    from libattnres.backends import triton

    return triton.toolchain_reason()


def warmup(device: int | str | torch.device | None = None) -> None:
    """Load the native kernels of a CUDA device, so that a first call may be captured into a CUDA graph.

    Parameters
    ----------
    device : int, str or torch.device, optional
        CUDA device; PyTorch's current one by default.

    Raises
    ------
    UnsupportedError
        When the native kernels do not run there, with the reason.
    """
    _core.warmup(device_index(device))


def device_index(device: int | str | torch.device | None) -> int:
    """Ordinal of a CUDA device."""
    if isinstance(device, int) and not isinstance(device, bool):
        if device < 0:
            raise ValueError(f"device: expected a number >= 0, got {device}")
        return device
    if device is not None:
        if not isinstance(device, (str, torch.device)):
            raise TypeError(f"device: expected an int, str or torch.device, got {type(device).__name__}")
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device: expected a CUDA device, got {device}")
        if device.index is not None:
            return device.index
    if torch.version.cuda is None or torch.cuda.device_count() == 0:
        return -1  # the library says what is missing
    return torch.cuda.current_device()


def permutations() -> list[Permutation]:
    """The native kernels compiled into the library, one dict per template permutation.

    Returns
    -------
    list of dict
        ``kernel`` ("ring" or "cluster"), ``hidden_size``, ``num_sources`` (``num_blocks + 1``),
        ``rows_per_stage``, ``prefixes_per_row``, ``cluster_size``, ``has_output_norm``,
        ``static_common_path``. The same for each compiled GPU target.
    """
    return _core.permutations()
