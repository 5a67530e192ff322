# SPDX-License-Identifier: Apache-2.0
"""``libattnres demo``: the 187 calls of one model step, each checked against float64."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

import libattnres
from libattnres import reference
from libattnres.cli.console import Console
from libattnres.model_walk import EPS, HIDDEN_SIZE, NUM_BANK_ROWS, WalkCall, bytes_per_token, walk_calls

HELP = "one model step (187 calls) on the best backend here, each call checked against float64"

DEFAULT_TOKENS = {"cpu": 4, "cuda": 256}
TIMED_WALKS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--tokens", type=int, help="tokens in the step (default 4 on the CPU, 256 on a GPU)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument(
        "--backend",
        choices=("native", "triton", "torch", "host"),
        help="force a backend (default: what each call would take by itself)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random values (default 0)")


@dataclass(frozen=True)
class CallResult:
    """Judgement of one call of the walk."""

    call: WalkCall
    backend: str
    rel_l2: float
    worst_element: float
    errors: tuple[str, ...]


class Walk:
    """The state of a model step: running prefix, uninitialised bank, and random weights and deltas."""

    def __init__(self, num_tokens: int, device: torch.device, seed: int, backend: str | None) -> None:
        self.device = device
        self.backend = backend
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator, device=device)
            return (values * scale + shift).bfloat16()

        M, H = num_tokens, HIDDEN_SIZE
        self.start = normal(M, H)
        # A few sets in turn keep the memory small; which one a call uses differs from call to call.
        self.sub_layer_outputs = [normal(M, H, scale=0.5) for _ in range(5)]
        self.weights = [
            (normal(H, scale=0.1, shift=1), normal(H, scale=1.5 * H**-0.5), normal(H, scale=0.1, shift=1))
            for _ in range(7)
        ]
        self.prefix = torch.empty_like(self.start)
        self.blocks = torch.empty(M, NUM_BANK_ROWS, H, dtype=torch.bfloat16, device=device)
        self.reset()

    def reset(self) -> None:
        """Back to the start of the step; rows of the bank that are not written yet hold NaN."""
        self.prefix.copy_(self.start)
        self.blocks.fill_(float("nan"))

    def arguments(self, index: int, call: WalkCall) -> tuple[Any, ...]:
        """Positional arguments of one call, after the replacement that it may need."""
        sub_layer_output = self.sub_layer_outputs[index % len(self.sub_layer_outputs)]
        norm_weight, qk_weight, output_norm_weight = self.weights[index % len(self.weights)]
        if call.replaces_prefix:
            self.prefix.copy_(sub_layer_output)
        return (
            self.prefix,
            sub_layer_output if call.has_delta else None,
            self.blocks,
            norm_weight,
            qk_weight,
            output_norm_weight if call.has_output_norm else None,
            call.num_blocks,
            call.block_write_idx,
            EPS,
            EPS,
        )

    def check(self, index: int, call: WalkCall) -> CallResult:
        """Run one call on the backend that it is due, and judge it."""
        arguments = self.arguments(index, call)
        expected = reference.attn_res(*arguments)
        explanation = libattnres.explain(*arguments, backend=self.backend)
        if explanation.backend is None:
            raise libattnres.UnsupportedError(f"{call.name}: {explanation.reasons}")
        out = torch.full_like(self.prefix, float("nan"))
        # Forced, so that what runs is what was said.
        libattnres.attn_res(*arguments, out=out, backend=explanation.backend)
        comparison = reference.compare(out, expected.output)
        errors = []
        if not comparison.ok:
            errors.append("output")
        if not reference.same_bits(self.prefix, expected.prefix):
            errors.append("prefix")
        if not reference.same_bits(self.blocks, expected.blocks):
            errors.append("bank")
        return CallResult(
            call, explanation.backend, comparison.rel_l2, comparison.worst_element, tuple(errors)
        )

    def seconds(self) -> float:
        """Wall time of one eager walk without any checking, allocations included."""
        self.reset()
        self.synchronize()
        started = time.perf_counter()
        for index, call in enumerate(walk_calls()):
            libattnres.attn_res(*self.arguments(index, call), backend=self.backend)
        self.synchronize()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Check every call, time the walk, print a summary; status 1 when anything was wrong."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in DEFAULT_TOKENS:
        raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {name}")
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    num_tokens = DEFAULT_TOKENS[device.type] if args.tokens is None else args.tokens
    if num_tokens < 1:
        raise ValueError(f"--tokens: expected a number >= 1, got {num_tokens}")
    calls = walk_calls()
    walk = Walk(num_tokens, device, args.seed, args.backend)
    console.line(
        f"{len(calls)} calls, {num_tokens} tokens, H = {HIDDEN_SIZE}, bfloat16, "
        f"on {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'the CPU'}"
    )
    with torch.inference_mode():
        results = [
            walk.check(index, call)
            for index, call in console.progress(list(enumerate(calls)), len(calls), "checking")
        ]
        times = [walk.seconds() for _ in range(TIMED_WALKS)]
    summarise(console, results)
    wrong = [result for result in results if result.errors]
    for result in wrong:
        console.line(f"WRONG: {result.call.name}: {', '.join(result.errors)}")
    median = statistics.median(times)
    gigabytes = bytes_per_token() * num_tokens / 1e9
    verdict = f"{len(wrong)} calls WRONG" if wrong else f"all {len(results)} calls right"
    console.line(
        f"{verdict}; one eager step takes {median * 1e3:.2f} ms "
        f"({gigabytes:.3f} GB to move, {gigabytes / median:.1f} GB/s, CPU time of the calls included)"
    )
    return int(bool(wrong)), {
        "device": str(device),
        "tokens": num_tokens,
        "passed": not wrong,
        "eager_step_seconds": times,
        "calls": [
            {
                "name": result.call.name,
                "num_blocks": result.call.num_blocks,
                "has_delta": result.call.has_delta,
                "has_output_norm": result.call.has_output_norm,
                "block_write_idx": result.call.block_write_idx,
                "backend": result.backend,
                "rel_l2": result.rel_l2,
                "worst_element": result.worst_element,
                "errors": list(result.errors),
            }
            for result in results
        ],
    }


def summarise(console: Console, results: list[CallResult]) -> None:
    """One line per number of blocks and backend."""
    rows = []
    for num_blocks, backend in sorted({(result.call.num_blocks, result.backend) for result in results}):
        mine = [
            result for result in results if (result.call.num_blocks, result.backend) == (num_blocks, backend)
        ]
        rows.append(
            (
                num_blocks,
                backend,
                len(mine),
                sum(result.call.has_delta for result in mine),
                sum(result.call.block_write_idx >= 0 for result in mine),
                max(result.rel_l2 for result in mine),
                max(result.worst_element for result in mine),
                not any("prefix" in result.errors or "bank" in result.errors for result in mine),
                sum(bool(result.errors) for result in mine),
            )
        )
    console.table(
        "against float64 (worst element as a fraction of its bound)",
        (
            "blocks",
            "backend",
            "calls",
            "with delta",
            "with write",
            "rel. L2",
            "worst element",
            "prefix and bank exact",
            "wrong",
        ),
        rows,
    )
