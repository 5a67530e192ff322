# SPDX-License-Identifier: Apache-2.0
"""Plots of the results of ``bench``; needs matplotlib, which is imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["require", "write"]

COLORS = {"floor": "#888888", "native": "#1b7f4d", "triton": "#c25a00", "torch": "#8a4fb0", "host": "#2266aa"}
STYLES = {"early": "-", "wait": "--", "off": ":"}


def require() -> None:
    """Say what is missing before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            "--plot: expected matplotlib to be installed (pip install libattnres[bench]), got none"
        )


def write(document: dict[str, Any], folder: Path) -> list[Path]:
    """Latency against tokens, and share of the copy bandwidth, one panel per number of blocks.

    Returns
    -------
    list of Path
        The PNG files written.
    """
    require()
    rows = [
        row
        for row in document.get("rows", ())
        if row.get("variant") == "common" and not row.get("plan_override")
    ]
    if not rows:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    known = document.get("gpu") or {}
    where = f"{known.get('name', 'CPU')}, {rows[0]['mode']} L2"
    return [
        panels(
            rows,
            folder / "latency.png",
            "median_us",
            "microseconds per launch",
            f"Latency, {where}",
            log=True,
        ),
        panels(
            [row for row in rows if row["backend"] != "torch"],
            folder / "bandwidth.png",
            "copy_fraction",
            "share of the copy bandwidth",
            f"Bandwidth, {where}",
            log=False,
        ),
    ]


def panels(
    rows: Sequence[dict[str, Any]], path: Path, value: str, label: str, title: str, *, log: bool
) -> Path:
    """One panel per number of blocks, one line per implementation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    block_counts = sorted({row["num_blocks"] for row in rows})
    figure = Figure(figsize=(4.4 * len(block_counts), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(block_counts), squeeze=False, sharey=True)[0]
    for axis, num_blocks in zip(axes, block_counts, strict=True):
        mine = [row for row in rows if row["num_blocks"] == num_blocks]
        for name in dict.fromkeys(row["name"] for row in mine):
            line = sorted((row["tokens"], row[value], row) for row in mine if row["name"] == name)
            backend, pdl = line[0][2]["backend"], line[0][2]["pdl"]
            axis.plot(
                [tokens for tokens, _, _ in line],
                [measured for _, measured, _ in line],
                STYLES.get(pdl, "-.") if backend != "floor" else ":",
                color=COLORS.get(backend),
                marker="o",
                markersize=3,
                label=name,
            )
        axis.set_xscale("log", base=2)
        token_counts = sorted({row["tokens"] for row in mine})
        axis.set_xticks(token_counts, [str(tokens) for tokens in token_counts], rotation=45)
        axis.minorticks_off()
        if log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, None)
        axis.set_title(f"{num_blocks} block{'s' if num_blocks != 1 else ''}")
        axis.set_xlabel("tokens")
        axis.grid(True, which="major", alpha=0.3)
    axes[0].set_ylabel(label)
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    return path
