# SPDX-License-Identifier: Apache-2.0
"""Steps of the model for ``walk``: their memory, their calls, and the producers between them.

On a GPU each call site has its own prefix, delta, output and weights, and all share one bank, as far as
memory allows: with many tokens the sites use fewer sets of prefix, delta and output in turn, which exceed L2
all the same. With few tokens several steps, each with memory of its own, go into one graph for that.

In two phases a bank pass follows each call that writes a row, as in ``AttnResStack``, and the calls until the
next write are merges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import libattnres
from libattnres import _two_phase_plan, reference, timing
from libattnres.cli.workload import Judge
from libattnres.model_walk import EPS, HIDDEN_SIZE, NUM_BANK_ROWS, WalkCall, walk_calls
from libattnres.nn import MAX_BANK_BYTES
from libattnres.timing import Launch

__all__ = ["BankPass", "Group", "Implementation", "Walk"]

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
    num_merges: int = 0
    """Of a bank pass: the calls that it serves."""

    @classmethod
    def of(cls, call: WalkCall) -> Group:
        """The group of a call."""
        return cls(call.num_blocks, call.has_delta, call.block_write_idx >= 0, call.has_output_norm)

    @property
    def variant(self) -> str:
        """In words."""
        if self.num_merges > 0:
            return f"bank pass for {self.num_merges}"
        parts = ["delta" if self.has_delta else "no delta"]
        parts += ["write"] if self.writes else []
        parts += [] if self.has_output_norm else ["no norm"]
        return ", ".join(parts)


@dataclass(frozen=True)
class Implementation:
    """A backend in one PDL mode, in one phase or in two."""

    backend: str
    pdl: str | None = None
    two_phase: bool | None = False
    """None where it pays."""

    @property
    def name(self) -> str:
        """For tables."""
        phases = {False: None, True: "two-phase", None: "two-phase auto"}[self.two_phase]
        return " ".join(filter(None, (self.backend, self.pdl, phases)))


@dataclass(frozen=True)
class BankPass:
    """One pass over the bank."""

    first: int
    """Index of the first call that it serves."""
    count: int
    """Calls that it serves."""
    num_blocks: int
    follows: int | None
    """Index of the call that it comes right after; None where it comes right before its own first call."""

    @property
    def rows_moved(self) -> int:
        """Rows of ``H`` elements per token that it must read or write."""
        return self.num_blocks + self.count


def bank_passes(
    calls: Sequence[WalkCall], implementation: Implementation, num_tokens: int, device: torch.device
) -> list[BankPass]:
    """Those of one step, in order."""
    passes: list[BankPass] = []
    writes = [index for index, call in enumerate(calls) if call.block_write_idx >= 0]
    for write, last in zip(writes, [*writes[1:], len(calls) - 1], strict=True):
        first = write + 1
        while first <= last and implementation.two_phase is not False:
            # A row of bfloat16 and a logarithm for each call, as AttnResStack does by default.
            count = _two_phase_plan.sites_per_pass(
                last + 1 - first, num_tokens, HIDDEN_SIZE, 2, MAX_BANK_BYTES
            )
            num_blocks = calls[first].num_blocks
            choice = _two_phase_plan.choose(
                num_blocks, num_tokens, count, HIDDEN_SIZE, device, backend=implementation.backend
            )
            if not (implementation.two_phase or choice.two_phase):
                break
            passes.append(BankPass(first, count, num_blocks, write if first == write + 1 else None))
            first += count
    return passes


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
        self._bank: tuple[torch.Tensor, torch.Tensor] | None = None

    def passes(self, implementation: Implementation) -> list[BankPass]:
        """The bank passes of an implementation in each step."""
        return bank_passes(self.calls, implementation, self.num_tokens, self.device)

    def rows_moved(self, implementation: Implementation) -> int:
        """Rows of ``H`` elements per token that its step must read or write, weights left out."""
        passes = self.passes(implementation)
        merged = [self.calls[index] for one in passes for index in range(one.first, one.first + one.count)]
        rows = sum(call.rows_moved for call in self.calls) + sum(one.rows_moved for one in passes)
        return rows - sum(call.num_blocks - 1 for call in merged)

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

    def bank(self, step: int, one: BankPass) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a pass leaves the bank's share of its calls; every pass of a step takes the same memory."""
        if self._bank is None:
            passes = self.passes(Implementation("native", two_phase=True))
            sizes = (self.num_steps, max(other.count for other in passes), self.num_tokens)
            rows = torch.empty(*sizes, HIDDEN_SIZE, dtype=torch.bfloat16, device=self.device)
            self._bank = rows, torch.empty(sizes, device=self.device)
        rows, lse = self._bank
        return rows[step, : one.count], lse[step, : one.count]

    def bank_pass(self, implementation: Implementation, step: int, one: BankPass) -> Launch:
        """One pass over the bank."""
        sites = slice(one.first, one.first + one.count)
        weights = self.norm_weight[step, sites], self.qk_weight[step, sites]
        blocks, (bank, lse) = self.blocks[step], self.bank(step, one)
        backend, pdl = implementation.backend, implementation.pdl or "wait"
        # The kernel right before may have written a row, or read what this overwrites.
        pdl = "wait" if pdl == "early" else pdl
        return lambda: libattnres.attn_res_bank(
            blocks, one.num_blocks, *weights, EPS, bank=bank, lse=lse, backend=backend, pdl=pdl
        )

    def operator(
        self, implementation: Implementation, step: int, index: int, served_by: BankPass | None = None
    ) -> Launch:
        """One call: in one phase, or a merge of what a bank pass left for it."""
        arguments, out = self.arguments(step, index), self.out[step, index % self.num_sites]
        backend, pdl = implementation.backend, implementation.pdl or "wait"
        if served_by is None:
            return lambda: libattnres.attn_res(*arguments, out=out, backend=backend, pdl=pdl)
        prefix, delta, blocks, norm, qk, output_norm, _, block_write_idx, eps, output_norm_eps = arguments
        bank, lse = (tensor[index - served_by.first] for tensor in self.bank(step, served_by))
        if pdl == "early" and served_by.follows is None and index == served_by.first:
            pdl = "wait"
        return lambda: libattnres.attn_res_merge(
            prefix,
            delta,
            bank,
            lse,
            norm,
            qk,
            output_norm,
            None if block_write_idx == -1 else blocks,
            block_write_idx,
            eps,
            output_norm_eps,
            out=out,
            backend=backend,
            pdl=pdl,
        )

    def in_order(
        self, implementation: Implementation, indices: Sequence[int] | None = None
    ) -> list[tuple[int, BankPass | None, list[BankPass], list[BankPass]]]:
        """Calls of a step by index, each with the pass that serves it and those right before and after it.

        Where only some calls are wanted, passes are left out.
        """
        passes = self.passes(implementation)
        served = {one.first + offset: one for one in passes for offset in range(one.count)}
        result = []
        for index in range(len(self.calls)) if indices is None else indices:
            own = [one for one in passes if indices is None and one.first == index and one.follows is None]
            after = [one for one in passes if indices is None and one.follows == index]
            result.append((index, served.get(index), own, after))
        return result

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
            if implementation is None:
                chosen = range(len(self.calls)) if indices is None else indices
                work += [self.producer(step, index) for index in chosen]
                continue
            for index, served_by, before, after in self.in_order(implementation, indices):
                work.append(self.producer(step, index))
                work += [self.bank_pass(implementation, step, one) for one in before]
                work.append(self.operator(implementation, step, index, served_by))
                work += [self.bank_pass(implementation, step, one) for one in after]
        return work

    def pass_launches(self, implementation: Implementation) -> dict[Group, list[Launch]]:
        """The bank passes of all steps, without anything between them, by what they do."""
        result: dict[Group, list[Launch]] = {}
        for one in self.passes(implementation):
            group = Group(one.num_blocks, False, False, False, one.count)
            launches = [self.bank_pass(implementation, step, one) for step in range(self.num_steps)]
            result.setdefault(group, []).extend(launches)
        return result

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
            for index, served_by, before, after in self.in_order(implementation):
                self.producer(step, index)()
                for one in before:
                    self.bank_pass(implementation, step, one)()
                run = self.operator(implementation, step, index, served_by)
                if step > 0 or index not in first:
                    run()
                else:
                    arguments, out = self.arguments(step, index), self.out[step, index % self.num_sites]
                    judge = Judge(arguments, None if served_by is None else reference.TWO_PHASE)
                    # What a call is judged by takes long; nothing of it may still run when the call
                    # starts early.
                    synchronize(self.device)
                    rel_l2, wrong = judge.check(run, lambda a=arguments, o=out: (o, a[0], a[2]))  # type: ignore[misc]
                    worst = max(worst, rel_l2)
                    name = self.calls[index].name
                    errors += [f"{implementation.name}, {name}: {error}" for error in wrong]
                for one in after:
                    self.bank_pass(implementation, step, one)()
        return worst, errors


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if timing.is_gpu(device):
        torch.cuda.synchronize(device)
