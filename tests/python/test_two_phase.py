# SPDX-License-Identifier: Apache-2.0
"""The operator in two phases: both together against the whole call in float64, and each alone."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import libattnres
import pytest
import torch
from libattnres import _core, _two_phase_call, _two_phase_ops, reference
from libattnres.backends import native
from programs import run_program
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck

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
        """In one phase, in float64; the prefix as it is now."""
        arguments = self.merge_arguments(site, **{"blocks": self.blocks} | changes)
        del arguments["bank"], arguments["lse"]
        return reference.attn_res(**arguments, num_blocks=self.num_blocks)


def rel_l2(got: torch.Tensor, wanted: torch.Tensor) -> float:
    norm = wanted.norm().item()
    error = (got.double() - wanted).norm().item()
    assert math.isfinite(error)
    return error if norm == 0 else error / norm


def check(case: Case, backend: str, block_write_idx: int = -1, pdl: str = "wait", **changes: Any) -> None:
    """Both phases for every site against float64, with every byte that a call may not write."""
    wanted = {name: memory.clone() for name, memory in case.allocations.items()}
    # A call may write a row that the bank was made of: the other calls still belong to the old one.
    before = case.blocks.clone()
    exact = reference.attn_res_bank(case.blocks, case.num_blocks, case.norm_weights, case.qk_weights)
    bank, lse = case.run_bank(backend=backend, pdl=pdl)
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
        expected = case.whole(site, blocks=before, block_write_idx=block_write_idx, **changes)
        arguments = case.merge_arguments(site, blocks=case.blocks, block_write_idx=block_write_idx, **changes)
        wanted["prefix"][..., : case.hidden_size] = expected.prefix
        wanted["blocks"][..., : case.hidden_size] = expected.blocks
        output = libattnres.attn_res_merge(**arguments, out=case.out, backend=backend, pdl=pdl)
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


# Rows that cancel.

CANCELLING = ("bank_rows", "row_and_prefix", "nearly", "bank_rows_after_large_ones")


def cancelling(kind: str, bank_dtype: torch.dtype) -> Case:
    """Sources of which one is the negative of another, with equal scores."""
    case = Case(num_blocks=2, num_sites=2, num_entries=3, hidden_size=512, bank_dtype=bank_dtype)
    p = reference.updated_prefix(case.prefix, case.delta)
    if kind == "bank_rows":
        case.blocks[:, 1] = -case.blocks[:, 0]
    elif kind == "row_and_prefix":
        case.num_blocks = 1
        case.blocks[:, 0] = -p
    elif kind == "nearly":
        case.num_blocks = 1
        case.blocks[:, 0] = -p * (1 + 2.0**-6)
    else:
        assert kind == "bank_rows_after_large_ones", kind
        case.num_blocks = 4
        case.blocks[:, 2] = 100 * case.blocks[:, 0]
        case.blocks[:, 0] = -case.blocks[:, 1]
        case.blocks[:, 3] = -case.blocks[:, 2]
    # A query of zeros makes every score 0; one that is orthogonal to nothing leaves them nearly so.
    case.qk_weights[0] = 0.0
    case.qk_weights[1] *= 1e-4
    return case


def check_cancelling(kind: str, bank_dtype: torch.dtype, backend: str, **changes: Any) -> None:
    case = cancelling(kind, bank_dtype)
    case.run_bank(backend=backend)
    for site in range(case.num_sites):
        expected = case.whole(site, **changes)
        arguments = case.merge_arguments(site, **changes)
        arguments["prefix"] = case.prefix.clone()
        output = libattnres.attn_res_merge(**arguments, backend=backend)
        assert reference.same_bits(arguments["prefix"], expected.prefix)
        if kind == "row_and_prefix" and site == 0:
            assert expected.output.abs().max() == 0
            assert output.abs().max() == 0
        else:
            assert rel_l2(output, expected.output) <= BOUNDS[torch.bfloat16, bank_dtype]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bank_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", CANCELLING)
@pytest.mark.parametrize("has_output_norm", [True, False])
def test_rows_that_cancel_stay_within_the_bounds(
    has_output_norm: bool, kind: str, bank_dtype: torch.dtype, backend: str
) -> None:
    check_cancelling(kind, bank_dtype, backend, **({} if has_output_norm else {"output_norm_weight": None}))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_large_scores_neither_overflow_nor_lose_a_source(backend: str) -> None:
    case = Case(dtype=torch.float32, bank_dtype=torch.float32)
    case.qk_weights *= 100
    case.run_bank(backend=backend)
    assert case.lse.abs().max() > 120  # exp of which float32 does not have
    for site in range(case.num_sites):
        arguments = case.merge_arguments(site, delta=None)
        output = libattnres.attn_res_merge(**arguments, backend=backend)
        # A score's rounding counts by its size.
        assert rel_l2(output, case.whole(site, delta=None).output) <= 3e-4


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_row_spoils_its_own_token_alone(value: float, backend: str) -> None:
    clean, bad = Case(), Case()
    bad.blocks[2, 1, 7] = value
    outputs = []
    for case in (clean, bad):
        case.run_bank(backend=backend)
        outputs.append(libattnres.attn_res_merge(**case.merge_arguments(), backend=backend))
    others = [0, 1, 3]
    assert reference.same_bits(outputs[0][others], outputs[1][others])
    assert outputs[1][2].isnan().all()


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_sign_of_a_nan_does_not_depend_on_the_call_site(
    backend: str, dtype: torch.dtype, num_blocks: int
) -> None:
    """Kernels take sites two by two and the last alone: in other orders of operands, whose first NaN wins."""
    places = list(itertools.permutations(range(16), 2))
    case = Case(
        num_entries=len(places), num_blocks=num_blocks, hidden_size=16, dtype=dtype, bank_dtype=torch.float32
    )
    for weights in (case.norm_weights, case.qk_weights):
        weights[:] = weights[0].clone()
    for token, (positive, negative) in enumerate(places):
        case.blocks[token, num_blocks - 1, positive] = math.nan
        case.blocks[token, num_blocks - 1, negative] = torch.tensor(math.nan).neg()
    bank, lse = case.run_bank(backend=backend)
    assert bank.isnan().all()
    for site in range(1, case.num_sites):
        assert reference.same_bits(bank[site], bank[0])
        assert reference.same_bits(lse[site], lse[0])


@pytest.mark.parametrize("backend", [None, "torch", "native"])
def test_explanations_are_what_runs(backend: str | None) -> None:
    case = Case()
    before = {name: memory.clone() for name, memory in case.allocations.items()}
    bank = libattnres.explain_bank(
        case.blocks, case.num_blocks, case.norm_weights, case.qk_weights, backend=backend
    )
    merge = libattnres.explain_merge(**case.merge_arguments(), backend=backend)
    for name, memory in case.allocations.items():
        assert reference.same_bits(memory, before[name]), name
    for explanation in (bank, merge):
        assert explanation.source == ("auto" if backend is None else "argument")
        assert explanation.plan is None
        if backend == "native":
            assert explanation.backend is None
            assert explanation.reasons["native"].startswith("native needs CUDA tensors, ")
            continue
        assert explanation.backend == (backend or "host")
        assert explanation.backend not in explanation.reasons
        module = _two_phase_call.load(explanation.backend)
        ran: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(libattnres._two_phase, "_merge_tensors", lambda *arguments: False)
            patch.setattr(module, "bank", lambda call, ran=ran: ran.append("bank"))
            patch.setattr(module, "merge", lambda call, ran=ran: ran.append("merge"))
            case.run_bank(backend=backend)
            libattnres.attn_res_merge(**case.merge_arguments(), backend=backend)
        assert ran == ["bank", "merge"]
    with pytest.raises(ValueError, match=r"^num_blocks: expected 1\.\.8, got 0"):
        libattnres.explain_bank(case.blocks, 0, case.norm_weights, case.qk_weights)


def test_native_refusals_are_told_before_they_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels take beyond a device for them: sizes, and places of 16 bytes."""
    instances = frozenset({(64, 9, 1), (64, 9, 2)})
    monkeypatch.setattr(native, "_instances", lambda: instances)

    def reasons(**sizes: Any) -> tuple[str | None, str | None]:
        case = Case(**sizes)
        bank = _two_phase_call.checked_bank_call(
            case.blocks, 4, case.norm_weights, case.qk_weights, 1e-5, case.bank, case.lse, None, "wait", None
        )
        arguments = case.merge_arguments(0, blocks=None, block_write_idx=-1, eps=1e-5, output_norm_eps=1e-5)
        merge = _two_phase_call.checked_merge_call(**arguments, out=None, pdl="wait", batch_invariant=None)
        return native.refusal_of_phase(bank), native.refusal_of_phase(merge)

    assert reasons() == reasons(prefixes_per_row=2) == (None, None)
    of_bank, of_merge = reasons(padding=3)
    assert of_bank is not None
    assert of_merge is not None
    assert "multiples of 16 bytes" in of_bank
    assert "multiples of 16 bytes" in of_merge
    assert reasons(hidden_size=128) == ("native is compiled for H in [64], got H=128",) * 2
    assert reasons(prefixes_per_row=3) == (None, "native is compiled for B in [1, 2], got B=3")


def test_reference_of_two_phases_is_that_of_one() -> None:
    case = Case(num_blocks=5, prefixes_per_row=2)
    made = reference.attn_res_bank(case.blocks, 5, case.norm_weights, case.qk_weights)
    for site in range(case.num_sites):
        arguments = case.merge_arguments(site, bank=made.bank[site], lse=made.lse[site])
        expected = case.whole(site)
        got = reference.attn_res_merge(**arguments)
        torch.testing.assert_close(got.output, expected.output, rtol=1e-12, atol=1e-13)
        assert reference.same_bits(got.prefix, expected.prefix)
    with pytest.raises(ValueError, match=r"^num_blocks: expected 1\.\.8, got 0"):
        reference.attn_res_bank(case.blocks, 0, case.norm_weights, case.qk_weights)


# What is made where nothing is given, and what is written.


def test_new_tensors_are_dense_and_of_the_dtype_that_was_asked() -> None:
    case = Case(padding=3)
    arguments = (case.blocks, case.num_blocks, case.norm_weights, case.qk_weights)
    case.run_bank()
    bank, lse = libattnres.attn_res_bank(*arguments)
    assert bank.is_contiguous()
    assert reference.same_bits(bank, case.bank)
    assert reference.same_bits(lse, case.lse)
    wide, _ = libattnres.attn_res_bank(*arguments, bank_dtype=torch.float32)
    assert wide.dtype is torch.float32
    assert reference.same_bits(wide.bfloat16(), bank)
    output = libattnres.attn_res_merge(**case.merge_arguments(delta=None))
    assert output.is_contiguous()
    libattnres.attn_res_merge(**case.merge_arguments(delta=None), out=case.out)
    assert reference.same_bits(output, case.out)


def test_backward_that_saved_a_written_tensor_notices() -> None:
    case = Case()
    versions = {name: getattr(case, name)._version for name in ("bank", "lse", "prefix", "blocks", "out")}
    case.run_bank()
    libattnres.attn_res_merge(**case.merge_arguments(), out=case.out, blocks=case.blocks, block_write_idx=5)
    for name, version in versions.items():
        assert getattr(case, name)._version > version, name


# The path past Python for plain tensors.

needs_exchange_api = pytest.mark.skipif(
    not hasattr(torch._C, "_dlpack_exchange_api"), reason="PyTorch does not describe tensors in C"
)


def plain(case: Case, **changes: Any) -> tuple[Any, ...]:
    """The positional arguments of ``_core.merge_tensors``."""
    defaults: dict[str, Any] = {"blocks": None, "block_write_idx": -1, "eps": 1e-5, "output_norm_eps": 1e-5}
    defaults |= {"out": case.out, "pdl": "wait", "backend": None, "batch_invariant": None}
    return tuple((case.merge_arguments() | defaults | changes).values())


@needs_exchange_api
@pytest.mark.parametrize("bank_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "changes", [{}, {"delta": None, "output_norm_weight": None}, {"block_write_idx": 6}, {"eps": 0.5}]
)
def test_plain_tensors_take_the_short_path_to_the_same_bits(
    changes: dict[str, Any], bank_dtype: torch.dtype
) -> None:
    short, long = (Case(prefixes_per_row=1, padding=2, bank_dtype=bank_dtype) for _ in range(2))
    for case in (short, long):
        case.run_bank()
    blocks = {"blocks": short.blocks} if "block_write_idx" in changes else {}
    assert _core.merge_tensors(*plain(short, **changes, **blocks))
    blocks = {"blocks": long.blocks} if "block_write_idx" in changes else {}
    arguments = {"eps": 1e-5, "output_norm_eps": 1e-5, "blocks": None, "block_write_idx": -1}
    arguments |= long.merge_arguments() | changes | blocks
    options = {"out": long.out, "backend": None, "pdl": "wait", "batch_invariant": None}
    _two_phase_call.merge(**arguments, **options)
    for name, memory in short.allocations.items():
        assert reference.same_bits(memory, long.allocations[name]), name


@needs_exchange_api
@pytest.mark.parametrize(
    "changes",
    [
        lambda c: {"prefix": c.prefix.float()},
        lambda c: {"bank": c.bank[0].half()},
        lambda c: {"bank": c.bank[0, :3]},
        lambda c: {"bank": c.bank[0, :, :32]},
        lambda c: {"lse": c.lse[0].double()},
        lambda c: {"lse": c.lse[0, :2]},
        lambda c: {"delta": c.delta[:2]},
        lambda c: {"qk_weight": c.qk_weights[0, :8]},
        lambda c: {"block_write_idx": 3},
        lambda c: {"blocks": c.blocks[:2], "block_write_idx": 3},
        lambda c: {"blocks": c.blocks, "block_write_idx": 8},
        lambda c: {"block_write_idx": True},
        lambda c: {"eps": -1.0},
        lambda c: {"out": c.prefix},
        lambda c: {"out": c.out[:, :32]},
        lambda c: {"pdl": "late"},
        lambda c: {"backend": "torch"},
        lambda c: {"backend": "native"},
        lambda c: {"batch_invariant": 1},
    ],
)
def test_the_short_path_leaves_what_it_cannot_serve(changes: Callable[[Case], dict[str, Any]]) -> None:
    case = Case()
    case.run_bank()
    before = {name: memory.clone() for name, memory in case.allocations.items()}
    assert not _core.merge_tensors(*plain(case, **changes(case)))
    for name, memory in case.allocations.items():
        assert reference.same_bits(memory, before[name]), name


# Refusals.

MERGE_ERRORS: dict[str, tuple[type[Exception], str, Callable[[Case], dict[str, Any]]]] = {
    "prefix_type": (TypeError, "prefix: expected a torch.Tensor, got int", lambda c: {"prefix": 1}),
    "prefix_dtype": (
        ValueError,
        "prefix: expected dtype bfloat16, float16, float32, got torch.float64",
        lambda c: {"prefix": c.prefix.double()},
    ),
    "bank_dtype": (
        ValueError,
        "bank: expected torch.bfloat16 or torch.float32, got torch.float16",
        lambda c: {"bank": c.bank[0].half()},
    ),
    "bank_shape": (
        ValueError,
        "bank: expected shape [T, H] with T a divisor of the 4 tokens of prefix, got [3, 64]",
        lambda c: {"bank": c.bank[0, :3]},
    ),
    "bank_rank": (ValueError, "bank: expected shape [T, H], got [3, 4, 64]", lambda c: {"bank": c.bank}),
    "lse_dtype": (
        ValueError,
        "lse: expected dtype torch.float32, got torch.bfloat16",
        lambda c: {"lse": c.lse[0].bfloat16()},
    ),
    "lse_shape": (ValueError, "lse: expected shape [4], got [3]", lambda c: {"lse": c.lse[0, :3]}),
    "delta_shape": (
        ValueError,
        "delta: expected shape [4, 64], got [2, 64]",
        lambda c: {"delta": c.delta[:2]},
    ),
    "weight": (
        ValueError,
        "qk_weight: expected shape [64], got [32]",
        lambda c: {"qk_weight": c.qk_weights[0, :32]},
    ),
    "no_blocks": (
        ValueError,
        "block_write_idx: expected -1 without blocks, got 2",
        lambda c: {"block_write_idx": 2},
    ),
    "write_index": (
        ValueError,
        "block_write_idx: expected -1..7, got 8",
        lambda c: {"blocks": c.blocks, "block_write_idx": 8},
    ),
    "blocks_shape": (
        ValueError,
        "blocks: expected shape [4, 8, 64], got [3, 8, 64]",
        lambda c: {"blocks": c.blocks[:3], "block_write_idx": 2},
    ),
    "out_is_prefix": (
        ValueError,
        "out: expected memory that shares no byte with prefix, got overlapping memory",
        lambda c: {"out": c.prefix},
    ),
    "prefix_is_bank": (
        ValueError,
        "prefix: expected memory that shares no byte with bank, got overlapping memory",
        lambda c: {"prefix": c.bank[0]},
    ),
    "eps": (ValueError, "eps: expected a finite number >= 0, got -1.0", lambda c: {"eps": -1.0}),
    "pdl": (ValueError, "pdl: expected one of 'wait', 'early', 'off', got 'late'", lambda c: {"pdl": "late"}),
    "backend": (ValueError, "backend: expected one of", lambda c: {"backend": "cuda"}),
    "native_on_cpu": (
        libattnres.UnsupportedError,
        "backend: expected a backend that can serve this call, got 'native': native needs CUDA tensors, "
        "prefix is on cpu",
        lambda c: {"backend": "native"},
    ),
    "torch_batch_invariant": (
        libattnres.UnsupportedError,
        "backend: expected a backend that can serve this call, got 'torch': torch cannot be batch-invariant",
        lambda c: {"backend": "torch", "batch_invariant": True},
    ),
}

BANK_ERRORS: dict[str, tuple[type[Exception], str, Callable[[Case], dict[str, Any]]]] = {
    "num_blocks": (ValueError, "num_blocks: expected 1..8, got 0", lambda c: {"num_blocks": 0}),
    "num_blocks_type": (TypeError, "num_blocks: expected an int, got bool", lambda c: {"num_blocks": True}),
    "no_sites": (
        ValueError,
        "num_sites: expected 1..1024, got 0",
        lambda c: {"norm_weights": c.norm_weights[:0], "qk_weights": c.qk_weights[:0]},
    ),
    "sites_disagree": (
        ValueError,
        "qk_weights: expected shape [3, 64], got [2, 64]",
        lambda c: {"qk_weights": c.qk_weights[:2]},
    ),
    "weights_dtype": (
        ValueError,
        "norm_weights: expected dtype torch.bfloat16 as blocks has, got torch.float32",
        lambda c: {"norm_weights": c.norm_weights.float()},
    ),
    "bank_dtype": (
        ValueError,
        "bank_dtype: expected torch.bfloat16 or torch.float32, got torch.float16",
        lambda c: {"bank_dtype": torch.float16},
    ),
    "bank_shape": (
        ValueError,
        "bank: expected shape [3, 4, 64], got [2, 4, 64]",
        lambda c: {"bank": c.bank[:2]},
    ),
    "bank_disagrees": (
        ValueError,
        "bank: expected dtype torch.float32",
        lambda c: {"bank": c.bank, "bank_dtype": torch.float32},
    ),
    "lse_shape": (ValueError, "lse: expected shape [3, 4], got [3, 3]", lambda c: {"lse": c.lse[:, :3]}),
    "bank_in_blocks": (
        ValueError,
        "bank: expected memory that shares no byte with blocks, got overlapping memory",
        lambda c: {"bank": c.blocks[:, :3].transpose(0, 1)},
    ),
    "batch_invariant": (
        TypeError,
        "batch_invariant: expected a bool or None, got int",
        lambda c: {"batch_invariant": 1},
    ),
}


def bank_arguments(case: Case) -> dict[str, Any]:
    return {
        "blocks": case.blocks,
        "num_blocks": case.num_blocks,
        "norm_weights": case.norm_weights,
        "qk_weights": case.qk_weights,
    }


def expect_refusal(function: Callable[..., Any], arguments: Any, case: Case, error: Any, text: str) -> None:
    """Also that nothing was written."""
    before = {name: memory.clone() for name, memory in case.allocations.items()}
    with pytest.raises(error) as raised:
        function(**arguments)
    assert str(raised.value).startswith(text)
    for name, memory in case.allocations.items():
        assert reference.same_bits(memory, before[name]), name


@pytest.mark.parametrize("what", MERGE_ERRORS)
def test_merge_refuses_before_it_writes(what: str) -> None:
    error, text, changes = MERGE_ERRORS[what]
    case = Case()
    arguments = case.merge_arguments() | changes(case)
    expect_refusal(libattnres.attn_res_merge, arguments, case, error, text)


@pytest.mark.parametrize("what", BANK_ERRORS)
def test_bank_refuses_before_it_writes(what: str) -> None:
    error, text, changes = BANK_ERRORS[what]
    case = Case()
    expect_refusal(libattnres.attn_res_bank, bank_arguments(case) | changes(case), case, error, text)


# Only where it runs can be told whether memory overlaps and whether a backend can serve.
RUN_ONLY = ("out_is_prefix", "prefix_is_bank", "bank_in_blocks", "native_on_cpu", "torch_batch_invariant")


@pytest.mark.parametrize(
    ("phase", "what"),
    [("merge", what) for what in MERGE_ERRORS if what not in RUN_ONLY]
    + [("bank", what) for what in BANK_ERRORS if what not in RUN_ONLY],
)
def test_fake_tensors_get_the_errors_of_real_ones(phase: str, what: str) -> None:
    error, text, changes = (MERGE_ERRORS if phase == "merge" else BANK_ERRORS)[what]
    case = Case()
    arguments = (case.merge_arguments() if phase == "merge" else bank_arguments(case)) | changes(case)
    function = libattnres.attn_res_merge if phase == "merge" else libattnres.attn_res_bank
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        with pytest.raises(error) as raised:
            function(**fakes)
    assert str(raised.value).startswith(text)


# The torch ops.


def op_arguments(name: str, case: Case) -> tuple[Any, ...]:
    """Arguments of an op that make it write all that its schema says."""
    if name.startswith("attn_res_bank"):
        outputs = (case.bank, case.lse) if name.endswith("_") else ()
        return (*bank_arguments(case).values(), *outputs)
    prefix, delta, *sources = case.merge_arguments().values()
    write = (case.blocks, 5)
    return {
        "attn_res_merge": (prefix, *sources),
        "attn_res_merge_add_": (prefix, delta, *sources),
        "attn_res_merge_write_": (prefix, *sources, *write),
        "attn_res_merge_": (prefix, delta, *sources, *write),
        "attn_res_merge_out_": (prefix, delta, *sources, *write, case.out),
    }[name]


@pytest.fixture
def ready() -> Case:
    case = Case()
    case.run_bank()
    case.blocks[:, case.num_blocks :] = 0  # a NaN is not equal to itself
    case.out.zero_()
    return case


@pytest.mark.parametrize("name", _two_phase_ops.OPS)
def test_opcheck(name: str, ready: Case) -> None:
    opcheck(getattr(ops, name).default, op_arguments(name, ready))


def test_opcheck_of_an_output_without_blocks(ready: Case) -> None:
    arguments = list(op_arguments("attn_res_merge_out_", ready))
    arguments[1], arguments[7], arguments[8] = None, None, -1
    opcheck(ops.attn_res_merge_out_.default, tuple(arguments))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("attn_res_bank", set()),
        ("attn_res_bank_out_", {"bank", "lse"}),
        ("attn_res_merge", set()),
        ("attn_res_merge_add_", {"prefix"}),
        ("attn_res_merge_write_", {"blocks"}),
        ("attn_res_merge_", {"prefix", "blocks"}),
        ("attn_res_merge_out_", {"prefix", "blocks", "out"}),
    ],
)
def test_schema_says_what_is_written(name: str, written: set[str], ready: Case) -> None:
    schema = getattr(ops, name).default._schema
    declared = {
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    assert declared == written
    if "bank" in name:
        ready.bank.zero_()
        ready.lse.zero_()
    arguments = op_arguments(name, ready)
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
    getattr(ops, name)(*arguments)
    names = [argument.name for argument in schema.arguments]
    changed = {
        name
        for name, value, old in zip(names, arguments, before, strict=False)
        if isinstance(value, torch.Tensor) and not reference.same_bits(value, old)
    }
    assert changed == written


def grad(function: Callable[..., torch.Tensor], value: torch.Tensor) -> Any:
    return torch.func.grad(function)(value)


def backward(function: Callable[..., torch.Tensor], value: torch.Tensor) -> Any:
    return function(value.clone().requires_grad_())


def dual_without_grad(function: Callable[..., torch.Tensor], value: torch.Tensor) -> Any:
    with torch.no_grad(), forward_ad.dual_level():
        return function(forward_ad.make_dual(value, torch.ones_like(value)))


@pytest.mark.parametrize("derive", [grad, backward, dual_without_grad])
@pytest.mark.parametrize("phase", ["bank", "merge"])
def test_derivatives_are_refused_rather_than_dropped(phase: str, derive: Callable[..., Any]) -> None:
    case = Case(dtype=torch.float32, bank_dtype=torch.float32)
    case.run_bank()
    name, value = ("blocks", case.blocks) if phase == "bank" else ("bank", case.bank[0])

    def call(changed: torch.Tensor) -> torch.Tensor:
        if phase == "bank":
            return libattnres.attn_res_bank(**bank_arguments(case) | {name: changed})[0].sum()
        return libattnres.attn_res_merge(**case.merge_arguments(delta=None) | {name: changed}).sum()

    with pytest.raises(
        RuntimeError, match=f"^{name}: expected a tensor .*because attn_res_{phase} has no (back|deriv)"
    ):
        derive(call, value)


@pytest.mark.parametrize("inference", [False, True])
def test_compiled_calls_write_what_eager_ones_do(inference: bool) -> None:
    """A graph of both phases whose writes go to a slice of one allocation."""

    def both(memory: torch.Tensor, delta: torch.Tensor, norm: torch.Tensor, qk: torch.Tensor) -> torch.Tensor:
        blocks, prefix = memory[:, :8], memory[:, 8]
        bank, lse = libattnres.attn_res_bank(blocks, 4, norm, qk)
        first = libattnres.attn_res_merge(prefix, delta, bank[0], lse[0], norm[0], qk[0], None)
        second = libattnres.attn_res_merge(
            prefix, delta, bank[1], lse[1], norm[1], qk[1], norm[0], blocks, 4, out=torch.empty_like(first)
        )
        return first + second

    torch.manual_seed(0)
    memory, delta = torch.randn(6, 9, 64).bfloat16(), torch.randn(6, 64).bfloat16()
    norm, qk = torch.ones(2, 64).bfloat16(), torch.randn(2, 64).bfloat16() / 8
    with torch.inference_mode(inference):
        eager, traced = memory.clone(), memory.clone()
        expected = both(eager, delta, norm, qk)
        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        assert reference.same_bits(compiled(traced, delta, norm, qk), expected)
        assert reference.same_bits(traced, eager)
        # Rows at an offset in their storage, for which traces have another way.
        eager, traced = memory.clone(), memory.clone()
        expected = both(eager[2:], delta[2:], norm, qk)
        assert reference.same_bits(compiled(traced[2:], delta[2:], norm, qk), expected)
        assert reference.same_bits(traced, eager)


# The Triton kernels, through Triton's interpreter: whether it interprets is decided on import.

INTERPRETED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "common": ({"num_blocks": 8}, {}),
    "one_row": ({"num_blocks": 1}, {}),
    "no_delta": ({}, {"delta": None}),
    "no_norm": ({"num_sites": 1}, {"output_norm_weight": None}),
    "write": ({"padding": 3}, {"block_write_idx": 4}),
    "write_without_delta": ({}, {"block_write_idx": 0, "delta": None}),
    "shared": ({"prefixes_per_row": 3, "num_entries": 2, "padding": 7}, {}),
    "masked": ({"hidden_size": 33, "padding": 2}, {}),
    "single_element": ({"hidden_size": 1}, {}),
    "model_row": ({"hidden_size": 7168, "num_blocks": 8, "num_entries": 1, "num_sites": 2}, {}),
    "float32_bank": ({"bank_dtype": torch.float32}, {}),
    "float16": ({"dtype": torch.float16, "bank_dtype": torch.float16}, {}),
    "float32": ({"dtype": torch.float32, "bank_dtype": torch.float32, "hidden_size": 96}, {}),
    "no_tokens": ({"num_entries": 0}, {}),
}


def run_interpreted() -> dict[str, str]:
    """Every case's failure on the Triton backend, or an empty text; where TRITON_INTERPRET is set."""
    failures = {}
    for name in (*INTERPRETED, *CANCELLING):
        try:
            if name in INTERPRETED:
                sizes, changes = INTERPRETED[name]
                check(Case(**sizes), "triton", **changes)
            else:
                check_cancelling(name, torch.bfloat16, "triton")
            failures[name] = ""
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
    long = Case(hidden_size=20000, num_entries=1)
    try:
        long.run_bank(backend="triton")
    except libattnres.UnsupportedError as error:
        failures["long_rows"] = str(error)
    return failures


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    pytest.importorskip("triton")
    code = "import json, test_two_phase as t; print(json.dumps(t.run_interpreted()))"
    output = run_program(code, TRITON_INTERPRET="1")
    failures: dict[str, str] = json.loads(output.splitlines()[-1])
    return failures


@pytest.mark.parametrize("name", [*INTERPRETED, *CANCELLING])
def test_triton_interpreted(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


def test_triton_says_which_rows_are_too_long(interpreted: dict[str, str]) -> None:
    assert interpreted["long_rows"].endswith("triton computes two phases for H up to 16384, got H=20000")


# On a GPU.


def needs_backend(backend: str) -> None:
    reason = libattnres.probe().backends[backend]
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", ["wait", "early", "off"])
@pytest.mark.parametrize("num_entries", [1, 5, 70])
@pytest.mark.parametrize("num_blocks", [1, 3, 8])
@pytest.mark.parametrize("backend", ["native", "triton", "torch"])
def test_both_phases_match_the_whole_call_on_a_gpu(
    backend: str, num_blocks: int, num_entries: int, pdl: str
) -> None:
    needs_backend(backend)
    sizes = {"num_blocks": num_blocks, "num_entries": num_entries, "hidden_size": 7168, "padding": 8}
    check(Case(**sizes, num_sites=5, device="cuda"), backend, pdl=pdl)
    check(Case(**sizes, num_sites=2, device="cuda"), backend, pdl=pdl, block_write_idx=4)
    check(Case(**sizes, device="cuda"), backend, pdl=pdl, delta=None, output_norm_weight=None)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("name", INTERPRETED)
def test_every_kind_of_call_on_a_gpu(name: str, backend: str) -> None:
    needs_backend(backend)
    sizes, changes = INTERPRETED[name]
    check(Case(**sizes, device="cuda"), backend, **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("bank_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_graph_of_both_phases_gives_the_bits_of_eager_calls(backend: str, bank_dtype: torch.dtype) -> None:
    needs_backend(backend)
    case = Case(num_entries=40, hidden_size=7168, num_blocks=5, bank_dtype=bank_dtype, device="cuda")
    start = case.prefix.clone()

    def step() -> list[torch.Tensor]:
        case.prefix.copy_(start)
        case.run_bank(backend=backend)
        return [
            libattnres.attn_res_merge(**case.merge_arguments(site), backend=backend)
            for site in range(case.num_sites)
        ]

    expected = [output.clone() for output in step()]
    prefix = case.prefix.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for _ in range(2):
        case.bank.fill_(math.nan)
        case.lse.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        for output, wanted in zip(outputs, expected, strict=True):
            assert reference.same_bits(output, wanted)
        assert reference.same_bits(case.prefix, prefix)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_batch_invariant_tokens_do_not_depend_on_their_batch(backend: str) -> None:
    needs_backend(backend)
    case = Case(num_entries=67, hidden_size=7168, num_blocks=6, device="cuda")
    options = {"backend": backend, "batch_invariant": True}
    case.run_bank(**options)
    arguments = case.merge_arguments(1, delta=None)
    whole = libattnres.attn_res_merge(**arguments, **options)
    for start, stop in ((0, 1), (3, 10), (40, 67)):
        some = slice(start, stop)
        bank, lse = libattnres.attn_res_bank(
            case.blocks[some], case.num_blocks, case.norm_weights, case.qk_weights, **options
        )
        assert reference.same_bits(bank, case.bank[:, some])
        assert reference.same_bits(lse, case.lse[:, some])
        part = arguments | {"prefix": case.prefix[some], "bank": bank[1], "lse": lse[1]}
        assert reference.same_bits(libattnres.attn_res_merge(**part, **options), whole[some])
