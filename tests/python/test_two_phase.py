# SPDX-License-Identifier: Apache-2.0
"""The operator in two phases: both together against the whole call in float64, and each alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import libattnres
import pytest
import torch
from libattnres import reference

ops = torch.ops.libattnres

# Of the whole call, by the dtype of the rows and of the bank.
BOUNDS = {
    (torch.bfloat16, torch.bfloat16): 2.6e-3,
    (torch.bfloat16, torch.float32): 2e-3,
    (torch.float16, torch.float16): 4e-4,
    (torch.float16, torch.float32): 3e-4,
    (torch.float32, torch.float32): 2e-5,
}
CPU_BACKENDS = ("host", "torch")


@dataclass
class Case:
    """Everything that S calls on one bank read; every row array lies in memory that is NaN around it."""

    num_sites: int = 3
    num_entries: int = 4
    prefixes_per_row: int = 1
    num_bank_rows: int = 8
    num_blocks: int = 4
    hidden_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    bank_dtype: torch.dtype = torch.bfloat16
    padding: int = 0
    device: str = "cpu"
    seed: int = 0
    allocations: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        num_tokens, H = self.num_entries * self.prefixes_per_row, self.hidden_size

        def rows(name: str, *leading: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            memory = torch.full((*leading, H + self.padding), math.nan, dtype=dtype, device=self.device)
            self.allocations[name] = memory
            return memory[..., :H]

        def normal(tensor: torch.Tensor, scale: float, mean: float = 0.0) -> torch.Tensor:
            return tensor.normal_(mean, scale, generator=generator)

        self.blocks = rows("blocks", self.num_entries, self.num_bank_rows)
        for index in range(self.num_blocks):
            normal(self.blocks[:, index], 0.5 + 0.3 * index)
        self.norm_weights = normal(rows("norm_weights", self.num_sites), 0.3, 1.0)
        self.qk_weights = normal(rows("qk_weights", self.num_sites), 2.0 / math.sqrt(H))
        self.output_norm_weight = normal(torch.empty(H, dtype=self.dtype, device=self.device), 0.2, 1.0)
        self.prefix = normal(rows("prefix", num_tokens), 1.5)
        self.delta = normal(rows("delta", num_tokens), 0.7)
        self.out = rows("out", num_tokens)
        self.bank = rows("bank", self.num_sites, self.num_entries, dtype=self.bank_dtype)
        self.lse = torch.full((self.num_sites, self.num_entries), math.nan, device=self.device)
        self.allocations["lse"] = self.lse

    def run_bank(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = (self.blocks, self.num_blocks, self.norm_weights, self.qk_weights)
        return libattnres.attn_res_bank(*arguments, bank=self.bank, lse=self.lse, **options)

    def merge_arguments(self, site: int = 0, **changes: Any) -> dict[str, Any]:
        return {
            "prefix": self.prefix,
            "delta": self.delta,
            "bank": self.bank[site],
            "lse": self.lse[site],
            "norm_weight": self.norm_weights[site],
            "qk_weight": self.qk_weights[site],
            "output_norm_weight": self.output_norm_weight,
        } | changes

    def whole(self, site: int, **changes: Any) -> reference.Result:
        arguments = self.merge_arguments(site, blocks=self.blocks, **changes)
        del arguments["bank"], arguments["lse"]
        return reference.attn_res(**arguments, num_blocks=self.num_blocks)


def rel_l2(got: torch.Tensor, wanted: torch.Tensor) -> float:
    norm = wanted.norm().item()
    error = (got.double() - wanted).norm().item()
    assert math.isfinite(error)
    return error if norm == 0 else error / norm


def check(case: Case, backend: str, block_write_idx: int = -1, **changes: Any) -> None:
    """Both phases for every site against float64, with every byte that a call may not write."""
    wanted = {name: memory.clone() for name, memory in case.allocations.items()}
    exact = reference.attn_res_bank(case.blocks, case.num_blocks, case.norm_weights, case.qk_weights)
    bank, lse = case.run_bank(backend=backend)
    assert bank is case.bank
    assert lse is case.lse
    wanted["bank"][..., : case.hidden_size] = bank
    wanted["lse"] = lse.clone()
    for name, memory in case.allocations.items():
        assert reference.same_bits(memory, wanted[name]), name
    verdict = reference.compare(bank.flatten(0, 1), exact.bank.flatten(0, 1))
    assert verdict.ok, verdict
    torch.testing.assert_close(lse.double(), exact.lse, rtol=2e-6, atol=1e-5)
    for site in range(case.num_sites):
        expected = case.whole(site, block_write_idx=block_write_idx, **changes)
        arguments = case.merge_arguments(site, blocks=case.blocks, block_write_idx=block_write_idx, **changes)
        wanted["prefix"][..., : case.hidden_size] = expected.prefix
        wanted["blocks"][..., : case.hidden_size] = expected.blocks
        output = libattnres.attn_res_merge(**arguments, out=case.out, backend=backend)
        assert output is case.out
        wanted["out"][..., : case.hidden_size] = output
        for name, memory in case.allocations.items():
            assert reference.same_bits(memory, wanted[name]), name
        assert rel_l2(output, expected.output) <= BOUNDS[case.dtype, case.bank_dtype]


DTYPES = [*BOUNDS]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("dtype", "bank_dtype"), DTYPES)
@pytest.mark.parametrize("num_blocks", [1, 2, 5, 8])
def test_both_phases_match_the_whole_call(
    num_blocks: int, dtype: torch.dtype, bank_dtype: torch.dtype, backend: str
) -> None:
    check(Case(num_blocks=num_blocks, dtype=dtype, bank_dtype=bank_dtype, hidden_size=200), backend)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({"padding": 7, "hidden_size": 33}, {}),
        ({"hidden_size": 1}, {}),
        ({"prefixes_per_row": 3, "padding": 5}, {}),
        ({"num_sites": 1, "num_entries": 1}, {}),
        ({}, {"delta": None}),
        ({}, {"output_norm_weight": None}),
        ({"padding": 3}, {"block_write_idx": 4}),
        ({}, {"block_write_idx": 7, "delta": None}),
        ({"hidden_size": 7168, "num_blocks": 8, "num_entries": 2, "num_sites": 4}, {}),
        ({"num_entries": 40, "hidden_size": 1024, "num_sites": 5}, {}),  # several threads
    ],
)
def test_every_kind_of_call(sizes: dict[str, Any], changes: dict[str, Any], backend: str) -> None:
    for bank_dtype in (torch.bfloat16, torch.float32):
        check(Case(**sizes, bank_dtype=bank_dtype), backend, **changes)
