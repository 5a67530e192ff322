# SPDX-License-Identifier: Apache-2.0
"""The table ``cuda/instances.cmake`` as Python reads it, independently of CMake's generator."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("90a", "100a", "103a")


@dataclass(frozen=True, order=True)
class Instance:
    """One kernel: its name and template arguments in the order of its declaration."""

    kernel: str
    arguments: tuple[int, ...]


def axes() -> dict[str, list[str]]:
    """The lists of the table by name, without their common prefix."""
    text = re.sub(r"#.*", "", (ROOT / "cuda" / "instances.cmake").read_text())
    return {
        match[1]: [value.strip('"') for value in match[2].split()]
        for match in re.finditer(r"set\(ATTNRES_TABLE_(\w+)\s+([^)]*)\)", text)
    }


def instances() -> set[Instance]:
    """Every instance that the table asks for."""
    table = axes()

    def integers(name: str) -> list[int]:
        return [int(value) for value in table[name]]

    flags = [tuple(int(flag == "true") for flag in pair.split(",")) for pair in table["NORM_AND_STATIC"]]
    hidden_and_sources = list(product(integers("HIDDEN_SIZES"), integers("SOURCES")))
    ring = product(
        hidden_and_sources, integers("RING_ROWS_PER_STAGE"), integers("RING_PREFIXES_PER_ROW"), flags
    )
    cluster = product(hidden_and_sources, integers("CLUSTER_SIZES"), flags)
    return {Instance("ring", (*h_n, nc, b, *pair)) for h_n, nc, b, pair in ring} | {
        Instance("cluster", (*h_n, size, *pair)) for h_n, size, pair in cluster
    }


def floors() -> set[Instance]:
    """The floor kernels that come with the table: one for each H and N."""
    table = axes()
    pairs = product(table["HIDDEN_SIZES"], table["SOURCES"])
    return {Instance("floor", (int(hidden), int(sources))) for hidden, sources in pairs}


def two_phase() -> set[Instance]:
    """The kernels of the two phases that come with the table, their floor kernels among them."""
    table = axes()
    hidden_sizes = [int(value) for value in table["HIDDEN_SIZES"]]
    banks = [int(value == "true") for value in table["FLOAT_BANKS"]]
    flags = [tuple(int(flag == "true") for flag in pair.split(",")) for pair in table["NORM_AND_STATIC"]]
    found = {
        Instance(kernel, (hidden, bank))
        for kernel, hidden, bank in product(("bank", "bank_floor"), hidden_sizes, banks)
    }
    for kernel, axis in (("merge_ring", "RING_PREFIXES_PER_ROW"), ("merge_cluster", "CLUSTER_SIZES")):
        sizes = [int(value) for value in table[axis]]
        found |= {
            Instance(kernel, (hidden, size, bank, *pair))
            for hidden, size, bank, pair in product(hidden_sizes, sizes, banks, flags)
        }
    return found


def everything() -> set[Instance]:
    """Every kernel of the library."""
    return instances() | floors() | two_phase()
