# SPDX-License-Identifier: Apache-2.0
"""The dicts that ``_core`` returns: the result structs of ``attnres/attnres.h``."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["Permutation", "PlanInfo", "ProbeInfo"]


class ProbeInfo(TypedDict):
    """``attnres_probe_info``."""

    native: bool
    device: int
    compute_major: int
    compute_minor: int
    num_sms: int
    driver_version: int
    runtime_version: int
    device_name: str
    target: str
    built_targets: str
    reason: str
    plan: str
    plan_error: str


class Permutation(TypedDict):
    """``attnres_permutation``: one compiled kernel."""

    kernel: str
    hidden_size: int
    num_sources: int
    rows_per_stage: int
    prefixes_per_row: int
    cluster_size: int
    has_output_norm: bool
    static_common_path: bool


class PlanInfo(Permutation):
    """``attnres_plan_info``: the kernel and launch of one call."""

    ctas_per_sm: int
    grid_size: int
    block_size: int
    shared_memory_bytes: int
    ring_rows: int
