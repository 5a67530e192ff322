# SPDX-License-Identifier: Apache-2.0
"""``libattnres explain``: what would run a call here, in one phase or in two, and why not something else."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import libattnres
from libattnres import _two_phase_plan
from libattnres._dispatch import BACKENDS, Explanation
from libattnres.cli.console import Console
from libattnres.cli.workload import chosen_device
from libattnres.model_walk import HIDDEN_SIZE, NUM_BANK_ROWS
from libattnres.nn import MAX_BANK_BYTES

HELP = "what would run a call here, in one phase or two, and why not something else"

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--tokens", type=int, default=16, help="default 16")
    parser.add_argument("--blocks", type=int, default=NUM_BANK_ROWS, help="bank rows read, default 8")
    parser.add_argument("--sites", type=int, default=24, help="calls until the next bank write, default 24")
    parser.add_argument("--hidden-size", type=int, default=HIDDEN_SIZE, help="default 7168")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="default bfloat16")
    parser.add_argument("--backend", choices=(*BACKENDS, "auto"), help="force one")
    parser.add_argument("--batch-invariant", action="store_true", help="ask for batch-invariant calls")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")


def run(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Print it; status 1 when nothing can serve one of the calls."""
    limits = {"tokens": (1, None), "blocks": (1, 8), "sites": (1, 1024), "hidden_size": (1, None)}
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if value < low or (high is not None and value > high):
            wanted = f"a number >= {low}" if high is None else f"a number from {low} to {high}"
            raise ValueError(f"--{name.replace('_', '-')}: expected {wanted}, got {value}")
    device, dtype = chosen_device(args.device), DTYPES[args.dtype]
    T, S, H = args.tokens, args.sites, args.hidden_size

    def rows(*leading: int) -> torch.Tensor:
        return torch.empty(*leading, H, dtype=dtype, device=device)

    prefix, delta, weight = rows(T), rows(T), rows()
    options: dict[str, Any] = {"backend": args.backend, "batch_invariant": args.batch_invariant or None}
    blocks = rows(T, max(NUM_BANK_ROWS, args.blocks))
    one_phase = libattnres.explain(prefix, delta, blocks, weight, weight, weight, args.blocks, **options)
    bank = libattnres.explain_bank(blocks, args.blocks, rows(S), rows(S), **options)
    lse = torch.empty(T, device=device)
    merge = libattnres.explain_merge(prefix, delta, rows(T), lse, weight, weight, weight, **options)
    calls = {"attn_res": one_phase, "attn_res_bank": bank, "attn_res_merge": merge}
    sites = _two_phase_plan.sites_per_pass(S, T, H, dtype.itemsize, MAX_BANK_BYTES)
    choice = _two_phase_plan.choose(
        args.blocks, T, sites, H, device, dtype, args.backend, options["batch_invariant"]
    )
    report(console, args, calls, choice)
    results = {name: explanation.as_dict() for name, explanation in calls.items()}
    results["two_phase"] = choice._asdict()
    return int(any(explanation.backend is None for explanation in calls.values())), results


def report(
    console: Console,
    args: argparse.Namespace,
    calls: dict[str, Explanation],
    choice: _two_phase_plan.Choice,
) -> None:
    """One line for each backend of each call, and what the choice of phases rests on."""
    lines = []
    for name, explanation in calls.items():
        plan = "" if explanation.plan is None else ", ".join(f"{k} {v}" for k, v in explanation.plan.items())
        why = f"decided by {explanation.source}" + (f"; {plan}" if plan else "")
        if explanation.backend is not None:
            lines.append((name, explanation.backend, "yes", why))
        lines += [(name, backend, "no", reason) for backend, reason in explanation.reasons.items()]
    console.table(
        f"{args.tokens} tokens, {args.blocks} bank rows, H = {args.hidden_size}, {args.dtype}",
        ("call", "backend", "runs", "why"),
        lines,
    )
    what = "two phases" if choice.two_phase else "one phase"
    console.line(f"a model with {args.sites} calls until the next bank write takes {what}: {choice.reason}")
