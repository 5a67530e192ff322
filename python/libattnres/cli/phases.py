# SPDX-License-Identifier: Apache-2.0
"""``bench --two-phase``: a bank pass and a merge, each beside what moves the same bytes and no more.

The floor of a merge is the floor kernel with one bank row: prefix, delta and a row are read, prefix and
output written. A bank pass reads ``n`` rows of a token and writes ``S``, and its floor kernel does just that.
Beside it stands a copy on the device of as many bytes, half of them reads: memory is quicker at that mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import libattnres
from libattnres import _core, reference, timing
from libattnres._call import checked_call
from libattnres._two_phase_call import BankCall
from libattnres.cli.workload import ELEMENT_SIZE, Buffers, Judge, Shape
from libattnres.model_walk import EPS, HIDDEN_SIZE, NUM_BANK_ROWS
from libattnres.timing import Launch, Timing

__all__ = [
    "DEFAULT_BLOCKS",
    "DEFAULT_SITES",
    "Contender",
    "Measure",
    "contenders",
    "measure_bank",
    "measure_merge",
    "table",
]

DEFAULT_BLOCKS = 8
DEFAULT_SITES = 24
"""Calls of the model from one bank write to the next."""
FLOORS = ("floor", "copy")

Row = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """A backend in one PDL mode, or a floor."""

    backend: str
    pdl: str | None = None

    @property
    def name(self) -> str:
        """For tables."""
        return " ".join(filter(None, (self.backend, self.pdl)))


@dataclass(frozen=True)
class Measure:
    """How everything is measured."""

    device: torch.device
    cache_bytes: int
    copy_gb_per_s: float
    time: Callable[[Sequence[Launch]], Timing]
    is_cold: bool
    seed: int
    hidden_size: int = HIDDEN_SIZE

    def sets(self, num_bytes: int) -> tuple[int, int]:
        """Sets of buffers that are used in turn, and how often all of them in a sample."""
        count = timing.num_sets(num_bytes, self.cache_bytes) if self.is_cold else 1
        return count, timing.repeats(num_bytes, count) if timing.is_gpu(self.device) else 1


def contenders(device: torch.device, backends: Sequence[str], pdl: Sequence[str]) -> list[Contender]:
    """Floors first, where there are any; then backends."""
    floors = [Contender(name) for name in FLOORS] if timing.is_gpu(device) else []
    with_modes = [
        Contender(backend, mode)
        for backend in backends
        for mode in (pdl if backend in ("native", "triton") else (None,))
    ]
    return floors + with_modes


def measure_merge(
    measure: Measure, num_tokens: int, who: Sequence[Contender]
) -> tuple[list[Row], list[str], list[str]]:
    """A merge with delta and output norm; rows, failures, and what was not measured."""
    shape = Shape(num_tokens, DEFAULT_BLOCKS, hidden_size=measure.hidden_size)
    num_bytes = 5 * num_tokens * measure.hidden_size * ELEMENT_SIZE
    count, repeats = measure.sets(num_bytes)
    buffers = Buffers(shape, count, measure.device, measure.seed)
    made = [
        libattnres.attn_res_bank(
            buffers.blocks[index],
            shape.num_blocks,
            buffers.norm_weight[None],
            buffers.qk_weight[None],
            EPS,
            backend="torch",
        )
        for index in range(count)
    ]
    judge = Judge(buffers.arguments(0), reference.TWO_PHASE)

    def launch(one: Contender, index: int) -> Launch:
        prefix, delta, _, norm, qk, output_norm, _, _, eps, output_norm_eps = buffers.arguments(index)
        bank, lse = made[index][0][0], made[index][1][0]
        out = buffers.out[index]
        if one.backend == "floor":
            call = checked_call(
                prefix, delta, bank[:, None], norm, qk, output_norm, 1, -1, eps, output_norm_eps, out, "wait"
            ).core_args()
            return lambda: _core.floor(*call, torch.cuda.current_stream().cuda_stream)
        options: dict[str, Any] = {"out": out, "backend": one.backend, "pdl": one.pdl or "wait"}
        return lambda: libattnres.attn_res_merge(
            prefix, delta, bank, lse, norm, qk, output_norm, None, -1, eps, output_norm_eps, **options
        )

    def check(run: Launch) -> tuple[float, list[str]]:
        judge.restore()
        if timing.is_gpu(measure.device):
            torch.cuda.synchronize(measure.device)
        prefix, _, blocks, *_ = buffers.arguments(0)
        return judge.check(run, lambda: (buffers.out[0], prefix, blocks))

    described = {"phase": "merge", "tokens": num_tokens, "num_blocks": None, "sites": None}
    wanted = [one for one in who if one.backend != "copy"]
    return measure_all(measure, wanted, described, num_bytes, (count, repeats), launch, check)


def measure_bank(
    measure: Measure, num_tokens: int, num_blocks: int, num_sites: int, who: Sequence[Contender]
) -> tuple[list[Row], list[str], list[str]]:
    """A bank pass; rows, failures, and what was not measured."""
    T, H = num_tokens, measure.hidden_size
    num_bytes = (num_blocks + num_sites) * T * H * ELEMENT_SIZE
    count, repeats = measure.sets(num_bytes)
    generator = torch.Generator(measure.device).manual_seed(measure.seed)

    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        values = torch.empty(*shape, dtype=torch.bfloat16, device=measure.device)
        return values.normal_(shift, scale, generator=generator)

    # The rows beyond those that are read are allocated, as in the model.
    blocks = torch.empty(count, T, NUM_BANK_ROWS, H, dtype=torch.bfloat16, device=measure.device)
    blocks[:, :, :num_blocks].normal_(generator=generator)
    norm_weights = normal(num_sites, H, scale=0.1, shift=1.0)
    qk_weights = normal(num_sites, H, scale=1.5 * H**-0.5)
    bank = normal(count, num_sites, T, H)
    lse = torch.empty(count, num_sites, T, device=measure.device)

    def launch(one: Contender, index: int) -> Launch:
        if one.backend == "floor":
            call = BankCall(
                blocks[index], num_blocks, norm_weights, qk_weights, EPS, bank[index], lse[index], "wait"
            ).core_args()
            return lambda: _core.bank_floor(*call, torch.cuda.current_stream().cuda_stream)
        if one.backend == "copy":
            return copy_of_bytes(num_bytes, bank[(index + 1) % count])
        weights = norm_weights, qk_weights
        options: dict[str, Any] = {"bank": bank[index], "lse": lse[index], "backend": one.backend}
        return lambda: libattnres.attn_res_bank(
            blocks[index], num_blocks, *weights, EPS, pdl=one.pdl or "wait", **options
        )

    checked = torch.arange(0, T, max(1, T // 64), device=measure.device)
    exact = reference.attn_res_bank(blocks[0, checked], num_blocks, norm_weights, qk_weights, EPS)

    def check(run: Launch) -> tuple[float, list[str]]:
        bank[0].fill_(float("nan"))
        lse[0].fill_(float("nan"))
        if timing.is_gpu(measure.device):
            torch.cuda.synchronize(measure.device)
        run()
        verdict = reference.compare(bank[0][:, checked].flatten(0, 1), exact.bank.flatten(0, 1))
        errors = [] if verdict.ok else [f"bank is off: relative L2 {verdict.rel_l2:.3g}"]
        off = (lse[0][:, checked].double() - exact.lse).abs().max().item()
        if not off <= 1e-4 or not bool(bank[0].isfinite().all()):
            errors.append(f"lse is off by {off:.3g}, or bank is not all written")
        return verdict.rel_l2, errors

    described = {"phase": "bank", "tokens": T, "num_blocks": num_blocks, "sites": num_sites}
    return measure_all(measure, who, described, num_bytes, (count, repeats), launch, check)


def measure_all(
    measure: Measure,
    who: Sequence[Contender],
    described: Row,
    num_bytes: int,
    sets: tuple[int, int],
    launch: Callable[[Contender, int], Launch],
    check: Callable[[Launch], tuple[float, list[str]]],
) -> tuple[list[Row], list[str], list[str]]:
    """Check, then time, every contender on the same memory."""
    rows: list[Row] = []
    failures, skipped = [], []
    count, repeats = sets
    where = ", ".join(f"{value} {name}" for name, value in described.items() if name != "phase" and value)
    for one in who:
        try:
            work = [launch(one, index) for index in range(count)]
            rel_l2, errors = (None, []) if one.backend in FLOORS else check(work[0])
            failures += [f"{described['phase']}, {one.name}, {where}: {error}" for error in errors]
            measured = measure.time(work * repeats)
        except (libattnres.UnsupportedError, ImportError) as error:
            skipped.append(f"{described['phase']}, {one.name}: {error}")
            continue
        except RuntimeError as error:  # out of memory, or a CUDA error: keep what there is
            failures.append(f"{described['phase']}, {one.name}, {where}: {type(error).__name__}: {error}")
            continue
        gb_per_s = num_bytes / measured.median_us / 1e3
        rows.append(
            {
                "name": one.name,
                "backend": one.backend,
                "pdl": one.pdl,
                **described,
                "bytes": num_bytes,
                "sets": count,
                **asdict(measured),
                "gb_per_s": gb_per_s,
                "copy_fraction": gb_per_s / measure.copy_gb_per_s,
                "rel_l2": rel_l2,
                "correct": None if rel_l2 is None else not errors,
            }
        )
    floor = next((row["median_us"] for row in rows if row["backend"] == "floor"), None)
    for row in rows:
        row["floor_ratio"] = None if floor is None else row["median_us"] / floor
    return rows, failures, skipped


def copy_of_bytes(num_bytes: int, rows: torch.Tensor) -> Launch:
    """A copy on the device that moves so many, half of them reads; of rows where there are enough."""
    count = num_bytes // (2 * ELEMENT_SIZE)
    source = rows.view(-1)[:count] if rows.numel() >= count else rows.new_ones(count)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Columns and rows for printing."""
    columns = ("phase", "tokens", "blocks", "sites", "what", "median us", "p20", "p80", "GB/s", "of a copy")
    return (*columns, "/ floor", "rel. L2"), [
        (
            row["phase"],
            row["tokens"],
            row["num_blocks"],
            row["sites"],
            row["name"],
            row["median_us"],
            row["p20_us"],
            row["p80_us"],
            round(row["gb_per_s"]),
            row["copy_fraction"],
            row["floor_ratio"],
            row["rel_l2"],
        )
        for row in rows
    ]
