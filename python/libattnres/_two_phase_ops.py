# SPDX-License-Identifier: Apache-2.0
"""The two phases as ``torch.ops.libattnres.*``. As with ``attn_res``, there is an op for each combination of
arguments that a call may write, so that a schema states what is written and no more:

========================== ======== ======== ===================================================
op                         prefix   blocks   call
========================== ======== ======== ===================================================
``attn_res_merge``         read     none     no delta, no write
``attn_res_merge_add_``    written  none     delta, no write: the common one
``attn_res_merge_write_``  read     written  no delta, write
``attn_res_merge_``        written  written  any; the declared writes are an upper bound
``attn_res_merge_out_``    written  written  any, into ``out``
========================== ======== ======== ===================================================

``attn_res_bank`` makes ``bank`` and ``lse``, and ``attn_res_bank_out_`` writes them.
"""

from __future__ import annotations

from typing import Any

import torch

from libattnres import _two_phase_call
from libattnres._call import (
    check_batch_invariant,
    check_pdl,
    check_type,
    checked_epsilon,
    checked_index,
    refuse_wide,
)
from libattnres._dispatch import check_backend, requested_backend
from libattnres._ops import any_dtensor, hand_over, register, same_memory
from libattnres._two_phase_call import check_bank_without_memory, check_merge_without_memory

__all__ = ["OPS", "attn_res_bank", "attn_res_merge"]

_BANK = "Tensor blocks, SymInt num_blocks, Tensor norm_weights, Tensor qk_weights"
_MERGE = "Tensor bank, Tensor lse, Tensor norm_weight, Tensor qk_weight, Tensor? output_norm_weight"
_DISPATCH = ", str? backend=None, str pdl='wait', bool? batch_invariant=None"
_OPTIONS = f", float eps=1e-5, float output_norm_eps=1e-5{_DISPATCH}"

SCHEMAS = {
    "attn_res_bank": (
        f"({_BANK}, float eps=1e-5, ScalarType? bank_dtype=None{_DISPATCH}) -> (Tensor bank, Tensor lse)"
    ),
    "attn_res_bank_out_": (
        f"({_BANK}, Tensor(a!) bank, Tensor(b!) lse, float eps=1e-5{_DISPATCH}"
        ", SymInt[]? bank_place=None, SymInt[]? lse_place=None) -> ()"
    ),
    "attn_res_merge": f"(Tensor prefix, {_MERGE}{_OPTIONS}) -> Tensor",
    "attn_res_merge_add_": (
        f"(Tensor(a!) prefix, Tensor delta, {_MERGE}{_OPTIONS}, SymInt[]? prefix_place=None) -> Tensor"
    ),
    "attn_res_merge_write_": (
        f"(Tensor prefix, {_MERGE}, Tensor(a!) blocks, SymInt block_write_idx{_OPTIONS}"
        ", SymInt[]? blocks_place=None) -> Tensor"
    ),
    "attn_res_merge_": (
        f"(Tensor(a!) prefix, Tensor? delta, {_MERGE}, Tensor(b!) blocks, SymInt block_write_idx{_OPTIONS}"
        ", SymInt[]? prefix_place=None, SymInt[]? blocks_place=None) -> Tensor"
    ),
    "attn_res_merge_out_": (
        f"(Tensor(a!) prefix, Tensor? delta, {_MERGE}, Tensor(b!)? blocks, SymInt block_write_idx"
        f", Tensor(c!) out{_OPTIONS}"
        ", SymInt[]? prefix_place=None, SymInt[]? blocks_place=None, SymInt[]? out_place=None) -> ()"
    ),
}
OPS = tuple(SCHEMAS)
"""Names under ``torch.ops.libattnres``."""


def check_tensor_type(name: str, tensor: Any) -> None:
    """Whether it is a tensor, and of a kind that both phases take."""
    check_type(name, tensor)
    refuse_dtensor(name, tensor)


def refuse_dtensor(name: str, tensor: Any) -> None:
    """A merge of shards has no meaning of its own: callers pass what their process has."""
    if any_dtensor(tensor):
        raise TypeError(f"{name}: expected a tensor of this process, got a DTensor; pass {name}.to_local()")


def check_common(backend: str | None, pdl: str, batch_invariant: bool | None) -> None:
    """Judged in the words of the Python functions: the dispatcher has its own."""
    check_pdl(pdl)
    check_batch_invariant(batch_invariant)
    check_backend(backend, None)


def attn_res_bank(
    blocks: torch.Tensor,
    num_blocks: int,
    norm_weights: torch.Tensor,
    qk_weights: torch.Tensor,
    eps: float,
    bank: torch.Tensor | None,
    lse: torch.Tensor | None,
    bank_dtype: torch.dtype | None,
    backend: str | None,
    pdl: str,
    batch_invariant: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the op that writes exactly what this call writes."""
    tensors = {"blocks": blocks, "norm_weights": norm_weights, "qk_weights": qk_weights}
    for name, tensor in (*tensors.items(), ("bank", bank), ("lse", lse)):
        if tensor is not None or name in tensors:
            check_tensor_type(name, tensor)
    num_blocks = checked_index("num_blocks", num_blocks)
    refuse_wide("num_blocks", num_blocks)
    eps = checked_epsilon("eps", eps)
    if bank_dtype is not None:
        _two_phase_call.check_bank_dtype("bank_dtype", bank_dtype, blocks.dtype)
    check_common(backend, pdl, batch_invariant)
    ops = torch.ops.libattnres
    options = (backend, pdl, batch_invariant)
    if bank is None and lse is None:
        made: tuple[torch.Tensor, torch.Tensor] = ops.attn_res_bank(
            blocks, num_blocks, norm_weights, qk_weights, eps, bank_dtype, *options
        )
        return made
    dtype = _two_phase_call.check_bank_tensors(blocks, norm_weights, qk_weights, bank, lse, bank_dtype)
    leading = (norm_weights.shape[0], blocks.shape[0])
    if bank is None:
        bank = blocks.new_empty((*leading, blocks.shape[2]), dtype=dtype)
    if lse is None:
        lse = blocks.new_empty(leading, dtype=torch.float32)
    ops.attn_res_bank_out_(blocks, num_blocks, norm_weights, qk_weights, bank, lse, eps, *options)
    return bank, lse


def attn_res_merge(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    bank: torch.Tensor,
    lse: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    blocks: torch.Tensor | None,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    out: torch.Tensor | None,
    backend: str | None,
    pdl: str,
    batch_invariant: bool | None,
) -> torch.Tensor:
    """Call the op that writes exactly what this call writes."""
    for name, tensor in (
        ("prefix", prefix),
        ("delta", delta),
        ("bank", bank),
        ("lse", lse),
        ("norm_weight", norm_weight),
        ("qk_weight", qk_weight),
        ("output_norm_weight", output_norm_weight),
        ("blocks", blocks),
        ("out", out),
    ):
        if tensor is not None or name in ("prefix", "bank", "lse", "norm_weight", "qk_weight"):
            check_tensor_type(name, tensor)
    block_write_idx = checked_index("block_write_idx", block_write_idx)
    refuse_wide("block_write_idx", block_write_idx)
    eps = checked_epsilon("eps", eps)
    output_norm_eps = checked_epsilon("output_norm_eps", output_norm_eps)
    check_common(backend, pdl, batch_invariant)
    for name, written, other, tensor in (
        ("out", out, "prefix", prefix),
        ("out", out, "delta", delta),
        ("out", out, "bank", bank),
        ("prefix", prefix, "delta", delta),
        ("prefix", None if delta is None else prefix, "bank", bank),
    ):
        if written is not None and written is tensor:
            raise ValueError(
                f"{name}: expected memory that shares no byte with {other}, got overlapping memory"
            )
    if block_write_idx == -1:
        blocks = None  # no part of such a call
    elif blocks is None:
        raise ValueError(f"block_write_idx: expected -1 without blocks, got {block_write_idx}")
    ops = torch.ops.libattnres
    sources = (bank, lse, norm_weight, qk_weight, output_norm_weight)
    options = (eps, output_norm_eps, backend, pdl, batch_invariant)
    if out is not None:
        ops.attn_res_merge_out_(prefix, delta, *sources, blocks, block_write_idx, out, *options)
        return out
    if blocks is None:
        if delta is None:
            output = ops.attn_res_merge(prefix, *sources, *options)
        else:
            output = ops.attn_res_merge_add_(prefix, delta, *sources, *options)
    elif delta is None:
        output = ops.attn_res_merge_write_(prefix, *sources, blocks, block_write_idx, *options)
    else:
        output = ops.attn_res_merge_(prefix, delta, *sources, blocks, block_write_idx, *options)
    return output  # type: ignore[no-any-return]


# The kernels. Each op's arguments are those of the general call, less those that it lacks.


def _bank(named: dict[str, Any]) -> Any:
    bank, lse = named.pop("bank", None), named.pop("lse", None)
    named.setdefault("bank_dtype", None)
    made = _two_phase_call.bank(**named, bank=bank, lse=lse)
    return made if bank is None else None


def _bank_fake(named: dict[str, Any]) -> Any:
    backend = named.pop("backend")
    bank, lse = named.pop("bank", None), named.pop("lse", None)
    named.setdefault("bank_dtype", None)
    made = check_bank_without_memory(**named, bank=bank, lse=lse)
    requested_backend(backend, None)
    return made if bank is None else None


def _bank_through_copies(named: dict[str, Any]) -> None:
    bank, lse = named.pop("bank"), named.pop("lse")
    made = torch.ops.libattnres.attn_res_bank(**named, bank_dtype=bank.dtype)
    bank.copy_(made[0])
    lse.copy_(made[1])


def _complete(named: dict[str, Any]) -> dict[str, Any]:
    return {"delta": None, "blocks": None, "block_write_idx": -1, "out": None} | named


def _merge(named: dict[str, Any]) -> Any:
    named = _complete(named)
    # As in attn_res: inductor may have dropped the copy that kept delta apart from the prefix.
    if named["delta"] is not None and same_memory(named["delta"], named["prefix"]):
        named["delta"] = named["delta"].clone()
    output = _two_phase_call.merge(**named)
    return output if named["out"] is None else None


def _merge_fake(named: dict[str, Any]) -> Any:
    named = _complete(named)
    backend = named.pop("backend")
    output = check_merge_without_memory(**named)
    requested_backend(backend, None)
    return output if named["out"] is None else None


def _merge_through_copies(named: dict[str, Any]) -> Any:
    named = _complete(named)
    prefix, delta, blocks = (named.pop(name) for name in ("prefix", "delta", "blocks"))
    block_write_idx, out = named.pop("block_write_idx"), named.pop("out")
    ops = torch.ops.libattnres
    if delta is None:
        new_prefix = prefix
        output = ops.attn_res_merge(prefix, **named)
    else:
        new_prefix = ops._copy(prefix)
        output = ops.attn_res_merge_add_(new_prefix, delta, **named)
    return hand_over(output, new_prefix, prefix, delta, blocks, block_write_idx, out)


def _by_name(name: str, body: Any) -> Any:
    """A kernel of an op in terms of its arguments by name, without the places."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = getattr(torch.ops.libattnres, name).default._schema.arguments
        values = {argument.name: argument.default_value for argument in arguments}
        values.update(zip(values, args, strict=False))
        values |= kwargs
        return body({key: value for key, value in values.items() if not key.endswith("_place")})

    return kernel


def _register() -> Any:
    library: Any = torch.library.Library("libattnres", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in SCHEMAS.items():
        if "bank" in name:
            operator_name, bodies = "attn_res_bank", (_bank, _bank_fake)
            through_copies: Any = _bank_through_copies
        else:
            operator_name, bodies = "attn_res_merge", (_merge, _merge_fake)
            through_copies = _merge_through_copies
        kernel, fake = (_by_name(name, body) for body in bodies)
        register(library, name, schema, kernel, fake, operator_name, through_copies)
    return library


_library = _register()  # the registrations live as long as this object
