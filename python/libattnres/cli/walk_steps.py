# SPDX-License-Identifier: Apache-2.0
"""Steps of the model for ``walk``: their memory, their calls, and the producers between them.

On a GPU each call site has its own prefix, delta, output and weights, and all share one bank, as far as
memory allows: with many tokens the sites use fewer sets of prefix, delta and output in turn, which exceed L2
all the same. With few tokens several steps, each with memory of its own, go into one graph for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import libattnres
from libattnres import timing
from libattnres.cli.workload import Judge
from libattnres.model_walk import EPS, HIDDEN_SIZE, NUM_BANK_ROWS, WalkCall, walk_calls
from libattnres.timing import Launch

__all__ = ["Group", "Implementation", "Walk"]

SITE_BYTES = {"cuda": 8 << 30, "cpu": 1 << 30}
"""What the prefixes, deltas and outputs of all call sites may take."""
MIN_SITES = 4


@dataclass(frozen=True)
class Group:
    """Call sites that do the same."""

    num_blocks: int
    has_delta: bool
    writes: bool
    has_output_norm: bool

    @classmethod
    def of(cls, call: WalkCall) -> Group:
        """The group of a call."""
        return cls(call.num_blocks, call.has_delta, call.block_write_idx >= 0, call.has_output_norm)

    @property
    def variant(self) -> str:
        """In words."""
        parts = ["delta" if self.has_delta else "no delta"]
        parts += ["write"] if self.writes else []
        parts += [] if self.has_output_norm else ["no norm"]
        return ", ".join(parts)


@dataclass(frozen=True)
class Implementation:
    """A backend in one PDL mode."""

    backend: str
    pdl: str | None = None

    @property
    def name(self) -> str:
        """For tables."""
        return " ".join(filter(None, (self.backend, self.pdl)))


class Walk:
    """The memory of one or several steps, and the launches that walk through it."""

    def __init__(
        self,
        num_tokens: int,
        device: torch.device,
        cache_bytes: int,
        seed: int = 0,
        calls: Sequence[WalkCall] | None = None,
    ) -> None:
        self.calls = tuple(walk_calls() if calls is None else calls)
        self.num_tokens = num_tokens
        self.device = device
        T, H, num_calls = num_tokens, HIDDEN_SIZE, len(self.calls)
        row_bytes = 2 * H
        site_bytes = 3 * T * row_bytes
        self.num_sites = min(
            num_calls, max(MIN_SITES, SITE_BYTES["cuda" if timing.is_gpu(device) else "cpu"] // site_bytes)
        )
        footprint = self.num_sites * site_bytes + num_calls * 3 * row_bytes + T * NUM_BANK_ROWS * row_bytes
        self.num_steps = 1
        if timing.is_gpu(device):
            self.num_steps = max(1, math.ceil(timing.CACHE_MULTIPLE * cache_bytes / footprint))
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
            values = torch.empty(*shape, dtype=torch.bfloat16, device=device)
            return values.normal_(shift, scale, generator=generator)

        steps, sites = self.num_steps, self.num_sites
        self.prefix = normal(steps, sites, T, H)
        self.delta = normal(steps, sites, T, H, scale=0.5)
        self.out = normal(steps, sites, T, H)
        self.blocks = torch.full(
            (steps, T, NUM_BANK_ROWS, H), float("nan"), dtype=torch.bfloat16, device=device
        )
        self.norm_weight = normal(steps, num_calls, H, scale=0.1, shift=1.0)
        self.qk_weight = normal(steps, num_calls, H, scale=1.5 * H**-0.5)
        self.output_norm_weight = normal(steps, num_calls, H, scale=0.1, shift=1.0)

    def arguments(self, step: int, index: int) -> tuple[Any, ...]:
        """Positional arguments of ``attn_res`` at a call site."""
        call, site = self.calls[index], index % self.num_sites
        return (
            self.prefix[step, site],
            self.delta[step, site] if call.has_delta else None,
            self.blocks[step],
            self.norm_weight[step, index],
            self.qk_weight[step, index],
            self.output_norm_weight[step, index] if call.has_output_norm else None,
            call.num_blocks,
            call.block_write_idx,
            EPS,
            EPS,
        )

    def operator(self, implementation: Implementation, step: int, index: int) -> Launch:
        """One call."""
        arguments, out = self.arguments(step, index), self.out[step, index % self.num_sites]
        backend, pdl = implementation.backend, implementation.pdl or "wait"
        return lambda: libattnres.attn_res(*arguments, out=out, backend=backend, pdl=pdl)

    def producer(self, step: int, index: int) -> Launch:
        """What stands for the sub-layer before a call: reads the last output, writes delta or prefix."""
        site = index % self.num_sites
        source = self.out[step, (index - 1) % self.num_sites]
        target = (self.delta if self.calls[index].has_delta else self.prefix)[step, site]
        return lambda: torch.mul(source, 0.5, out=target)

    def launches(
        self, implementation: Implementation | None, indices: Sequence[int] | None = None
    ) -> list[Launch]:
        """Producers, and after each its call unless ``implementation`` is None, of all steps in order."""
        work: list[Launch] = []
        for step in range(self.num_steps):
            for index in range(len(self.calls)) if indices is None else indices:
                work.append(self.producer(step, index))
                if implementation is not None:
                    work.append(self.operator(implementation, step, index))
        return work

    def groups(self) -> dict[Group, list[int]]:
        """Indices of the calls of each group."""
        result: dict[Group, list[int]] = {}
        for index, call in enumerate(self.calls):
            result.setdefault(Group.of(call), []).append(index)
        return result

    def check(self, implementation: Implementation) -> tuple[float, list[str]]:
        """Walk through every step, judging the first call of each group in the first one."""
        first = {indices[0] for indices in self.groups().values()}
        worst, errors = 0.0, []
        self.blocks.fill_(float("nan"))
        for step in range(self.num_steps):
            for index, call in enumerate(self.calls):
                self.producer(step, index)()
                run = self.operator(implementation, step, index)
                if step > 0 or index not in first:
                    run()
                    continue
                arguments, out = self.arguments(step, index), self.out[step, index % self.num_sites]
                judge = Judge(arguments)
                # What a call is judged by takes long; nothing of it may still run when the call starts early.
                synchronize(self.device)
                rel_l2, wrong = judge.check(run, lambda a=arguments, o=out: (o, a[0], a[2]))  # type: ignore[misc]
                worst = max(worst, rel_l2)
                errors += [f"{implementation.name}, {call.name}: {error}" for error in wrong]
        return worst, errors


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if timing.is_gpu(device):
        torch.cuda.synchronize(device)
