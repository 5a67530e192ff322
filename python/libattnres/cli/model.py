# SPDX-License-Identifier: Apache-2.0
"""``libattnres model``: what the compiled code should take on a GPU that is not at hand.

A call of at least ``MIN_TOKENS`` tokens is bound by what memory delivers or by what an SM issues:

    memory = (read_cost bytes_read + write_cost bytes_written) / published bandwidth
    sm     = ceil(tokens / SMs) (issue_cost warp_instructions / 4 + exchange_cycles) / clock,
    time   = start + (memory^p + sm^p)^(1/p)

with other exchange_cycles where two thread blocks per SM hide each other's exchanges. The instructions are
counted in the machine code (``libattnres permutations --audit``), an SM having four schedulers of one
instruction a cycle. The constants are fitted to measurements on one GPU, whose own code is
counted for that, and are taken over to the others. A prediction is no measurement.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import libattnres
from libattnres import _core
from libattnres._call import CORE_DTYPES, PDL_MODES
from libattnres.audit import rules as audit
from libattnres.cli.console import Console
from libattnres.cli.permutations import audit_installed
from libattnres.cli.workload import COMMON, ELEMENT_SIZE, SM_SIDE, VARIANTS, Variant
from libattnres.model_walk import EPS, HIDDEN_SIZE, NUM_BANK_ROWS, walk_calls

HELP = "predict the time of every call on Blackwell from machine code, bytes and a measurement elsewhere"

MIN_TOKENS = 256
"""From here on the model is calibrated; below, latency decides."""
SCHEDULERS = 4
SITE_TOKENS = (256, 1024, 8192)
Table = tuple[tuple[str, ...], list[tuple[object, ...]]]
Document = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--measured", type=Path, required=True, metavar="FILE.json", help="of bench --targets on an H200"
    )
    parser.add_argument(
        "--audit", type=Path, metavar="FILE.json", help="of permutations --audit (default: audit now)"
    )


@dataclass(frozen=True)
class Gpu:
    """What is published about a GPU."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    bytes_per_us: float
    cycles_per_us: float

    @property
    def target(self) -> str:
        """The compiled object that runs on it."""
        return "{}{}a".format(*self.compute_capability)


H200 = Gpu("H200", (9, 0), 132, 4.8e6, 1980.0)
# Bandwidth from the data sheets of HGX B200 and B300; SMs and clocks as the driver reports them.
B200 = Gpu("B200", (10, 0), 148, 7.7e6, 1965.0)
B300 = Gpu("B300", (10, 3), 148, 8.0e6, 2032.0)


@dataclass(frozen=True)
class CallShape:
    """A call, as far as its time depends on it."""

    tokens: int
    num_blocks: int
    variant: Variant

    @property
    def rows_read(self) -> float:
        """Rows per token."""
        bank = 0 if self.variant.shares_bank_entry else self.num_blocks / self.variant.prefixes_per_row
        return bank + 1 + self.variant.has_delta

    @property
    def rows_written(self) -> int:
        """Rows per token."""
        return 1 + self.variant.has_delta + self.variant.writes


@dataclass(frozen=True)
class Constants:
    """What is fitted."""

    read_cost: float
    write_cost: float
    floor_start_us: float
    issue_cost: float
    exchange_cycles: float
    exchange_cycles_of_two: float
    """With two thread blocks per SM."""
    power: float
    start_early_us: float
    start_wait_us: float


def memory_us(gpu: Gpu, shape: CallShape, constants: Constants) -> float:
    """Time that memory takes."""
    row = HIDDEN_SIZE * ELEMENT_SIZE * shape.tokens / gpu.bytes_per_us
    return row * (constants.read_cost * shape.rows_read + constants.write_cost * shape.rows_written)


@dataclass(frozen=True)
class Work:
    """What a kernel gives an SM to do."""

    issued: float
    """Warp instructions per token."""
    blocks_per_sm: int


def sm_us(gpu: Gpu, shape: CallShape, work: Work, constants: Constants) -> float:
    """Time that the SMs take."""
    tokens_per_sm = math.ceil(shape.tokens / gpu.num_sms)
    two = work.blocks_per_sm > 1
    exchange = constants.exchange_cycles_of_two if two else constants.exchange_cycles
    cycles = constants.issue_cost * work.issued / SCHEDULERS + exchange
    return tokens_per_sm * cycles / gpu.cycles_per_us


def predict(gpu: Gpu, shape: CallShape, pdl: str, work: Work, constants: Constants) -> float:
    """Microseconds of a call."""
    start = constants.start_early_us if pdl == "early" else constants.start_wait_us
    memory, sm = memory_us(gpu, shape, constants), sm_us(gpu, shape, work, constants)
    return start + float((memory**constants.power + sm**constants.power) ** (1 / constants.power))


# --- counted instructions ----------------------------------------------------------------------------

Counts = Mapping[tuple[str, tuple[int, ...], str], float]
"""Warp instructions per token by kernel, template arguments and target."""


def counts_of(audits: Iterable[audit.Audit]) -> Counts:
    """From an audit of the machine code."""
    return {
        (one.kernel.name, one.kernel.arguments, one.target): one.warp_instructions_per_token for one in audits
    }


def work_of(counts: Counts, kernel: Mapping[str, Any], target: str) -> Work:
    """What the kernel of a plan does."""
    middle = (
        (kernel["rows_per_stage"], kernel["prefixes_per_row"])
        if kernel["kernel"] == "ring"
        else (kernel["cluster_size"],)
    )
    flags = (int(kernel["has_output_norm"]), int(kernel["static_common_path"]))
    arguments = (kernel["hidden_size"], kernel["num_sources"], *middle, *flags)
    return Work(counts[kernel["kernel"], arguments, target], max(1, kernel["ctas_per_sm"]))


def planned_kernel(gpu: Gpu, shape: CallShape, pdl: str) -> Mapping[str, Any]:
    """The kernel that the plan takes on a GPU that need not be there."""
    H, R, variant = HIDDEN_SIZE, NUM_BANK_ROWS + 1, shape.variant
    far = iter(range(1 << 40, 1 << 48, 1 << 40))  # addresses that do not overlap; nothing is read there
    given = {
        "prefix": next(far),
        "delta": next(far) if variant.has_delta else 0,
        "blocks": next(far),
        "norm_weight": next(far),
        "qk_weight": next(far),
        "output_norm_weight": next(far) if variant.has_output_norm else 0,
        "output": next(far),
        "num_tokens": shape.tokens,
        "num_bank_tokens": shape.tokens // variant.prefixes_per_row,
        "num_bank_rows": R,
        "hidden_size": H,
        "num_blocks": shape.num_blocks,
        "block_write_idx": shape.num_blocks if variant.writes else -1,
        "prefix_stride": H,
        "delta_stride": H,
        "blocks_token_stride": R * H,
        "blocks_row_stride": H,
        "output_stride": H,
        "eps": EPS,
        "output_norm_eps": EPS,
        "dtype": CORE_DTYPES[torch.bfloat16],
        "pdl": PDL_MODES[pdl],
    }
    call = [given.get(name, 0) for name in _core.CALL_FIELDS]
    return _core.plan_for(*call, *gpu.compute_capability, gpu.num_sms)


# --- calibration -------------------------------------------------------------------------------------

BY_NAME = {variant.name: variant for variant in (COMMON, *VARIANTS, SM_SIDE)}


@dataclass(frozen=True)
class Measured:
    """One row of a measurement."""

    shape: CallShape
    pdl: str
    us: float
    work: Work
    of_the_plan: bool = True
    """Otherwise a kernel was forced."""


def measured_rows(bench: Document, counts: Counts, gpu: Gpu) -> tuple[list[Measured], list[Measured]]:
    """Rows of the floor kernel and of the native backend, on the SM side with forced kernels as well."""
    floor, native = [], []
    for row in (*bench["rows"], *bench["sm_side"]):
        forced = bool(row["plan_override"])
        if row["variant"] not in BY_NAME or (forced and row["variant"] != SM_SIDE.name):
            continue
        shape = CallShape(row["tokens"], row["num_blocks"], BY_NAME[row["variant"]])
        if row["backend"] == "floor":
            floor.append(Measured(shape, row["pdl"], row["median_us"], Work(0, 1)))
        elif row["backend"] == "native":
            work = work_of(counts, row["kernel"], gpu.target)
            native.append(Measured(shape, row["pdl"], row["median_us"], work, not forced))
    return floor, native


def minimise(loss: Callable[[list[float]], float], start: Sequence[float]) -> list[float]:
    """Search along each direction in turn, with steps that shrink."""
    best = list(start)
    lowest = loss(best)
    steps = [max(abs(value), 0.1) / 4 for value in best]
    for _ in range(200):
        for index in range(len(best)):
            for direction in (1, -1):
                tried = best.copy()
                tried[index] += direction * steps[index]
                if (value := loss(tried)) < lowest:
                    best, lowest = tried, value
                    steps[index] *= 1.5
                    break
            else:
                steps[index] *= 0.6
    return best


def calibrate(floor: Sequence[Measured], native: Sequence[Measured], gpu: Gpu) -> Constants:
    """Costs of memory from the floor kernel, everything else from the native backend."""
    floor = [row for row in floor if row.shape.tokens >= MIN_TOKENS]
    native = [row for row in native if row.shape.tokens >= MIN_TOKENS]
    if not floor or not native:
        raise ValueError(f"--measured: expected rows of at least {MIN_TOKENS} tokens, got none")

    def memory_loss(values: list[float]) -> float:
        constants = Constants(values[0], values[1], values[2], 0, 0, 0, 1, 0, 0)
        return sum(((values[2] + memory_us(gpu, row.shape, constants)) / row.us - 1) ** 2 for row in floor)

    read_cost, write_cost, floor_start = minimise(memory_loss, [1.0, 1.0, 1.0])

    def constants_of(values: list[float]) -> Constants:
        return Constants(read_cost, write_cost, floor_start, *values)

    def loss(values: list[float]) -> float:
        if min(values) < 0 or not 1 <= values[3] <= 20:
            return math.inf
        constants = constants_of(values)
        return sum(
            (predict(gpu, row.shape, row.pdl, row.work, constants) / row.us - 1) ** 2 for row in native
        )

    return constants_of(minimise(loss, [1.5, 500.0, 250.0, 4.0, 2.0, 4.0]))


# --- predictions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A figure that others have published for their kernel."""

    gpu: str
    tokens: int
    us: float
    num_blocks: int | None
    has_output_norm: bool = True


PUBLISHED = (
    Published("GB300", 1, 4.16, None),
    Published("GB300", 128, 4.57, None),
    Published("GB300", 1024, 19.05, None),
    Published("GB300", 8192, 141.87, None),
    Published("B300", 1, 8.19, 1),
    Published("B300", 1, 8.22, 4),
    Published("B300", 1, 10.24, 8),
    Published("B300", 1024, 38.98, 8, has_output_norm=False),
)


class Model:
    """Constants, and the counts that they are applied to."""

    def __init__(self, constants: Constants, counts: Counts, native: Sequence[Measured]) -> None:
        self.constants = constants
        self.counts = counts
        self.native = native

    def predict(self, gpu: Gpu, shape: CallShape, pdl: str) -> float:
        """Microseconds on a GPU with the kernel that its plan takes there."""
        work = work_of(self.counts, planned_kernel(gpu, shape, pdl), gpu.target)
        return predict(gpu, shape, pdl, work, self.constants)

    def carried_over(self, gpu: Gpu, shape: CallShape, pdl: str) -> float | None:
        """For few tokens: what was measured, less what memory took there, plus what it takes on ``gpu``."""
        measured = [row.us for row in self.native if (row.shape, row.pdl) == (shape, pdl) and row.of_the_plan]
        if not measured:
            return None
        faster = memory_us(H200, shape, self.constants) - memory_us(gpu, shape, self.constants)
        return min(measured) - faster

    def errors(self) -> list[dict[str, Any]]:
        """Prediction and measurement for every calibrated row."""
        return [
            {
                "tokens": row.shape.tokens,
                "num_blocks": row.shape.num_blocks,
                "variant": row.shape.variant.name,
                "pdl": row.pdl,
                "forced": not row.of_the_plan,
                "measured_us": row.us,
                "predicted_us": (us := predict(H200, row.shape, row.pdl, row.work, self.constants)),
                "error": us / row.us - 1,
            }
            for row in self.native
            if row.shape.tokens >= MIN_TOKENS
        ]

    def sites(self) -> list[dict[str, Any]]:
        """Each kind of call site of the model's step, on each GPU."""
        kinds: Counter[tuple[int, Variant]] = Counter()
        for call in walk_calls():
            writes = call.block_write_idx >= 0
            name = ", ".join(
                text
                for text, holds in (
                    ("no delta", not call.has_delta),
                    ("writes", writes),
                    ("no norm", not call.has_output_norm),
                )
                if holds
            )
            variant = Variant(name or "common", call.has_delta, call.has_output_norm, writes)
            kinds[call.num_blocks, variant] += 1
        rows = []
        for tokens in SITE_TOKENS:
            for (num_blocks, variant), calls in sorted(
                kinds.items(), key=lambda item: (item[0][0], item[0][1].name)
            ):
                shape = CallShape(tokens, num_blocks, variant)
                rows.append(
                    {
                        "tokens": tokens,
                        "num_blocks": num_blocks,
                        "variant": variant.name,
                        "calls": calls,
                        "us": {gpu.name: self.predict(gpu, shape, "early") for gpu in (H200, B200, B300)},
                        "memory_us": {
                            gpu.name: memory_us(gpu, shape, self.constants) for gpu in (B200, B300)
                        },
                    }
                )
        return rows

    def published(self) -> list[dict[str, Any]]:
        """Beside what others published; where the number of blocks is not stated, for several."""
        rows = []
        for figure in PUBLISHED:
            for num_blocks in (1, 4, 8) if figure.num_blocks is None else (figure.num_blocks,):
                variant = COMMON if figure.has_output_norm else BY_NAME["no norm"]
                shape = CallShape(figure.tokens, num_blocks, variant)
                calibrated = figure.tokens >= MIN_TOKENS
                us = {
                    pdl: self.predict(B300, shape, pdl) if calibrated else self.carried_over(B300, shape, pdl)
                    for pdl in ("early", "wait")
                }
                moved = (shape.rows_read + shape.rows_written) * HIDDEN_SIZE * ELEMENT_SIZE * figure.tokens
                rows.append(
                    {
                        **asdict(figure),
                        "assumed_blocks": num_blocks,
                        "calibrated": calibrated,
                        "predicted_us": us,
                        "bytes_bound_us": moved / B300.bytes_per_us,
                    }
                )
        return rows


def walk_check(bench: Document, sites: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The whole step on the measured GPU, which nothing was fitted to."""
    rows = []
    for tokens in SITE_TOKENS:
        measured = [
            row["net_us"]
            for row in bench.get("walk", {}).get("rows", ())
            if row["backend"] == "native" and row["tokens"] == tokens and row["pdl"] == "early"
        ]
        if measured:
            predicted = sum(site["calls"] * site["us"]["H200"] for site in sites if site["tokens"] == tokens)
            rows.append({"tokens": tokens, "measured_us": measured[0], "predicted_us": predicted})
    return rows


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Calibrate, predict, print; status 1 where the calibration is off by more than it may be."""
    missing = {gpu.target for gpu in (H200, B200, B300)} - set(libattnres.probe().built_targets)
    if missing:
        built = ", ".join(libattnres.probe().built_targets) or "one built without CUDA"
        raise libattnres.UnsupportedError(
            f"library: expected one with kernels for 90a, 100a and 103a, got {built}"
        )
    bench = json.loads(args.measured.read_text(encoding="utf-8"))
    if not isinstance(bench, dict) or bench.get("command") != "bench" or not bench.get("sm_side"):
        raise ValueError(f"--measured: expected what bench --targets wrote, got {args.measured}")
    if bench["metadata"]["devices"][0]["name"] != "NVIDIA H200":
        raise ValueError("--measured: expected measurements on an NVIDIA H200, got another device's")
    audits = audit_installed(console) if args.audit is None else load_audit(args.audit)
    counts = counts_of(audits)
    floor, native = measured_rows(bench, counts, H200)
    model = Model(calibrate(floor, native, H200), counts, native)
    sites = model.sites()
    results: dict[str, Any] = {
        "measured": bench["metadata"],
        "gpus": [asdict(gpu) | {"target": gpu.target} for gpu in (H200, B200, B300)],
        "constants": asdict(model.constants),
        "errors": model.errors(),
        "walk": walk_check(bench, sites),
        "sites": sites,
        "published": model.published(),
        "issued": issued_rows(audits),
        "audit": [list(row) for row in audit.summary(audits)],
    }
    for name, table in TABLES.items():
        console.table(name, *table(results))
    worst = max(abs(row["error"]) for row in results["errors"])
    console.line(f"largest calibration error {100 * worst:.1f} %, allowed {100 * MAX_ERROR:.0f} %")
    return int(worst > MAX_ERROR), results


MAX_ERROR = 0.15


def load_audit(path: Path) -> list[audit.Audit]:
    """What ``permutations --audit`` wrote."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not document.get("audits"):
        raise ValueError(f"--audit: expected what permutations --audit wrote with --json, got {path}")
    return [audit.Audit.from_dict(one) for one in document["audits"]]


def issued_rows(audits: Sequence[audit.Audit]) -> list[dict[str, Any]]:
    """Instructions per token of the common path's ring and cluster kernels, by target."""
    rows: dict[tuple[str, int, int], dict[str, Any]] = {}
    for one in audits:
        kernel = one.kernel
        if kernel.name not in ("ring", "cluster") or not kernel.static_common_path or kernel.prefixes != 1:
            continue
        key = (kernel.name, kernel.num_sources, kernel.arguments[2])
        row = rows.setdefault(
            key, {"kernel": key[0], "num_sources": key[1], "size": key[2], "issued": {}, "registers": {}}
        )
        row["issued"][one.target] = one.warp_instructions_per_token
        row["registers"][one.target] = one.registers
    return [rows[key] for key in sorted(rows)]


# --- tables ------------------------------------------------------------------------------------------


def gpu_table(document: Document) -> Table:
    """What is taken as published."""
    return ("GPU", "object", "SMs", "TB/s", "SM clock, MHz", "GB/s per SM"), [
        (
            gpu["name"],
            gpu["target"],
            gpu["num_sms"],
            f"{gpu['bytes_per_us'] / 1e6:.1f}",
            f"{gpu['cycles_per_us']:.0f}",
            f"{gpu['bytes_per_us'] / 1e3 / gpu['num_sms']:.0f}",
        )
        for gpu in document["gpus"]
    ]


MEANINGS = {
    "read_cost": "published time per byte read",
    "write_cost": "published time per byte written",
    "floor_start_us": "start of the floor kernel, us",
    "issue_cost": "cycles per instruction of a scheduler",
    "exchange_cycles": "cycles per token beside them, one block per SM",
    "exchange_cycles_of_two": "the same, two blocks per SM",
    "power": "p",
    "start_early_us": "start with early reads, us",
    "start_wait_us": "start without, us",
}


def constants_table(document: Document) -> Table:
    """What was fitted."""
    return ("constant", "what", "value"), [
        (name, MEANINGS[name], f"{value:.3g}") for name, value in document["constants"].items()
    ]


def error_table(document: Document) -> Table:
    """Prediction and measurement side by side, per shape."""
    shapes: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in document["errors"]:
        name = row["variant"] + (", two blocks per SM" if row["forced"] else "")
        shapes.setdefault((name, row["num_blocks"], row["tokens"]), {})[row["pdl"]] = row
    lines: list[tuple[object, ...]] = []
    for shape in sorted(shapes, key=lambda shape: (shape[0] != "common", *shape)):
        line: list[object] = list(shape)
        for pdl in ("early", "wait"):
            row = shapes[shape].get(pdl)
            line += (
                ["", "", ""]
                if row is None
                else [
                    f"{row['measured_us']:.1f}",
                    f"{row['predicted_us']:.1f}",
                    f"{100 * row['error']:+.1f} %",
                ]
            )
        lines.append(tuple(line))
    columns = ("variant", "blocks", "tokens", "early us", "model", "error", "wait us", "model", "error")
    return columns, lines


def summary_table(document: Document) -> Table:
    """How far off the calibration is."""
    errors = sorted(abs(row["error"]) for row in document["errors"])
    lines: list[tuple[object, ...]] = [
        (
            f"calibration, {len(errors)} calls",
            f"{100 * errors[len(errors) // 2]:.1f} %",
            f"{100 * errors[-1]:.1f} %",
        )
    ]
    for row in document["walk"]:
        error = f"{100 * (row['predicted_us'] / row['measured_us'] - 1):+.1f} %"
        lines.append((f"187 calls of {row['tokens']} tokens, not fitted to", error, error))
    return ("what", "median error", "largest error"), lines


def site_table(document: Document) -> Table:
    """Call sites on each GPU; all predictions."""
    lines: list[tuple[object, ...]] = []
    for tokens in dict.fromkeys(site["tokens"] for site in document["sites"]):
        mine = [site for site in document["sites"] if site["tokens"] == tokens]
        for site in mine:
            us = site["us"]
            lines.append(
                (
                    tokens,
                    site["num_blocks"],
                    site["variant"],
                    site["calls"],
                    *(f"{us[name]:.1f}" for name in ("H200", "B200", "B300")),
                    f"{site['memory_us']['B300']:.1f}",
                    f"{us['H200'] / us['B300']:.2f}",
                )
            )
        totals = {
            name: sum(site["calls"] * site["us"][name] for site in mine) for name in ("H200", "B200", "B300")
        }
        lines.append(
            (
                tokens,
                "all",
                "one step",
                sum(site["calls"] for site in mine),
                *(f"{total:.0f}" for total in totals.values()),
                f"{sum(site['calls'] * site['memory_us']['B300'] for site in mine):.0f}",
                f"{totals['H200'] / totals['B300']:.2f}",
            )
        )
    columns = ("tokens", "blocks", "call", "calls", "H200 us", "B200 us", "B300 us",
               "of which memory", "H200 / B300")  # fmt: skip
    return columns, lines


def published_table(document: Document) -> Table:
    """Predictions beside published figures."""
    lines: list[tuple[object, ...]] = []
    for row in document["published"]:
        early, wait = row["predicted_us"]["early"], row["predicted_us"]["wait"]
        possible = row["bytes_bound_us"] <= row["us"]
        lines.append(
            (
                row["gpu"],
                row["tokens"],
                row["assumed_blocks"]
                if row["num_blocks"] is not None
                else f"{row['assumed_blocks']}, assumed",
                "" if row["has_output_norm"] else "no norm",
                f"{row['us']:.2f}",
                *("" if us is None else f"{us:.2f}" for us in (early, wait)),
                *(
                    "" if us is None else f"{row['us'] / us:.2f}" if possible else "not so many bytes"
                    for us in (early, wait)
                ),
                "model" if row["calibrated"] else "carried over",
            )
        )
    columns = ("GPU", "tokens", "blocks", "call", "published us", "early us", "wait us",
               "published / early", "published / wait", "how")  # fmt: skip
    return columns, lines


def issued_table(document: Document) -> Table:
    """Instructions per token."""
    targets = ("90a", "100a", "103a")
    lines: list[tuple[object, ...]] = []
    for row in document["issued"]:
        issued = [row["issued"].get(target) for target in targets]
        lines.append(
            (
                row["kernel"],
                row["num_sources"],
                f"{'NC' if row['kernel'] == 'ring' else 'C'} = {row['size']}",
                *("" if value is None else f"{value:.0f}" for value in issued),
                f"{issued[1] / issued[0]:.2f}" if issued[0] and issued[1] else "",
                "/".join(str(row["registers"].get(target, "")) for target in targets),
            )
        )
    columns = ("kernel", "N", "", *(f"sm_{target}" for target in targets), "100a / 90a", "registers")
    return columns, lines


def audit_table(document: Document) -> Table:
    """Ranges over all permutations."""
    return audit.SUMMARY_COLUMNS, [tuple(row) for row in document["audit"]]


TABLES: dict[str, Callable[[Document], Table]] = {
    "model-audit": audit_table,
    "model-issued": issued_table,
    "model-gpus": gpu_table,
    "model-constants": constants_table,
    "model-summary": summary_table,
    "model-errors": error_table,
    "model-sites": site_table,
    "model-published": published_table,
}
