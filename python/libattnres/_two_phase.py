# SPDX-License-Identifier: Apache-2.0
"""``attn_res_bank`` and ``attn_res_merge``: the operator in two phases."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from libattnres import _core, _two_phase_call, _two_phase_ops
from libattnres._api import (
    _PLAIN_TYPES,
    _dispatch_modes,
    _empty_like,
    _increment_version,
    _is_compiling,
    _is_for_dispatcher,
    _transforms,
)
from libattnres._call import refuse_grad_of, refuse_tangents_of
from libattnres._dispatch import Explanation
from libattnres._two_phase_call import BankCall, MergeCall, checked_bank_call, checked_merge_call

__all__ = ["attn_res_bank", "attn_res_merge", "explain_bank", "explain_merge"]

_merge_tensors = _core.merge_tensors


def attn_res_bank(
    blocks: torch.Tensor,
    num_blocks: int,
    norm_weights: torch.Tensor,
    qk_weights: torch.Tensor,
    eps: float = 1e-5,
    *,
    bank: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    bank_dtype: torch.dtype | None = None,
    backend: str | None = None,
    pdl: str = "wait",
    batch_invariant: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""The bank's share of ``S`` calls of :func:`attn_res` at once: the first of two phases.

    .. math::
        score_{s,i} = \frac{blocks_i \cdot (norm\_weights_s \cdot qk\_weights_s)}
        {\sqrt{mean(blocks_i^2) + eps}}, \quad
        bank_s = \sum_{i < n} softmax(score_s)_i \, blocks_i, \quad
        lse_s = \log \sum_{i < n} e^{score_{s,i}}

    Bank rows change only when one is written, so between two writes this is computed once, and
    :func:`attn_res_merge` makes each call of it and the prefix. Scores and sums are float32.

    Parameters
    ----------
    blocks : torch.Tensor
        ``[T, R, H]``, bfloat16, float16 or float32; rows may be padded. Only rows below ``num_blocks`` are
        read.
    num_blocks : int
        Bank rows read, ``1..min(8, R)``.
    norm_weights, qk_weights : torch.Tensor
        ``[S, H]``, one row for each call site, ``S`` from 1 to 1024; dtype and device of ``blocks``.
    eps : float
        Epsilon of the scores' norm.
    bank : torch.Tensor, optional
        ``[S, T, H]``, written and returned instead of a new tensor; rows may be padded.
    lse : torch.Tensor, optional
        ``[S, T]`` float32, written and returned instead of a new tensor.
    bank_dtype : torch.dtype, optional
        Of a new ``bank``: the dtype of ``blocks``, the default, or ``torch.float32``, which costs more memory
        traffic and keeps rows that cancel each other exact.
    backend, pdl, batch_invariant
        As for :func:`attn_res`. No row of ``blocks`` is read before the kernels ahead on the stream have
        finished, unless ``pdl="early"``.

    Returns
    -------
    tuple of torch.Tensor
        ``bank`` and ``lse``. ``bank[s]`` and ``lse[s]`` are for call site ``s``.

    Raises
    ------
    TypeError, ValueError
        When an argument is wrong, naming it, what was expected and what came. Nothing was written then.
    UnsupportedError
        When the forced backend cannot serve this call here, with the reason. Nothing was written.
    RuntimeError
        When an argument requires grad under grad mode or carries a forward-mode tangent, or CUDA failed.

    Notes
    -----
    Source: Attention Residuals, arXiv 2603.15031.
    """
    run = _two_phase_ops.attn_res_bank
    if not (_is_compiling() or _dispatch_modes() != 0 or _transforms() is not None):
        tensors = {
            "blocks": blocks,
            "norm_weights": norm_weights,
            "qk_weights": qk_weights,
            "bank": bank,
            "lse": lse,
        }
        if torch.is_grad_enabled():
            refuse_grad_of("attn_res_bank", tensors)
        if forward_ad._current_level >= 0:
            refuse_tangents_of("attn_res_bank", tensors)
        if not _is_for_dispatcher(*tensors.values()):
            run = _two_phase_call.bank
    result = run(
        blocks,
        num_blocks,
        norm_weights,
        qk_weights,
        eps,
        bank,
        lse,
        bank_dtype,
        backend,
        pdl,
        batch_invariant,
    )
    if run is _two_phase_call.bank:
        _increment_version(tuple(tensor for tensor in (bank, lse) if tensor is not None))
    return result


def attn_res_merge(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    bank: torch.Tensor,
    lse: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    blocks: torch.Tensor | None = None,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    pdl: str = "wait",
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    r"""One call of :func:`attn_res` from what :func:`attn_res_bank` left: the second of two phases.

    .. math::
        p = \mathrm{round}(prefix + delta), \quad
        score_p = \frac{p \cdot (norm\_weight \cdot qk\_weight)}{\sqrt{mean(p^2) + eps}}, \quad
        mixed = \frac{e^{lse} \, bank + e^{score_p} \, p}{e^{lse} + e^{score_p}}

    and output norm, prefix update and write-back as in :func:`attn_res`, the last two exact to the bit.

    Parameters
    ----------
    prefix : torch.Tensor
        ``[M, H]``, running residual of each token, bfloat16, float16 or float32. Updated in place when
        ``delta`` is given.
    delta : torch.Tensor or None
        ``[M, H]``, the last sub-layer's output, added to ``prefix`` with one rounding.
    bank : torch.Tensor
        ``[T, H]``, ``attn_res_bank``'s for this call site, in the dtype of ``prefix`` or float32. ``M`` is a
        multiple of ``T``; token ``m`` reads entry ``m // B`` with ``B = M / T``.
    lse : torch.Tensor
        ``[T]`` float32, ``attn_res_bank``'s for this call site.
    norm_weight, qk_weight : torch.Tensor
        ``[H]``, those of this call site.
    output_norm_weight : torch.Tensor or None
        ``[H]``, weight of the output's RMSNorm; None for no output norm.
    blocks : torch.Tensor, optional
        ``[T, R, H]``, the block bank that receives ``p``. It is not read.
    block_write_idx : int
        Bank row that receives the updated prefix; -1 for none. Needs ``B = 1`` otherwise.
    eps, output_norm_eps : float
        Epsilons of the scores' and of the output's norm.
    out : torch.Tensor, optional
        ``[M, H]``, written and returned instead of a new tensor.
    backend, batch_invariant
        As for :func:`attn_res`.
    pdl : {"wait", "early", "off"}
        As for :func:`attn_res`; with ``"early"`` the caller promises that no kernel that may still be running
        writes ``bank`` or ``lse``.

    Returns
    -------
    torch.Tensor
        ``[M, H]``: ``out``, or a new dense tensor.

    Raises
    ------
    TypeError, ValueError
        When an argument is wrong, naming it, what was expected and what came; also when memory that is
        written overlaps another argument. Nothing was written then.
    UnsupportedError
        When the forced backend cannot serve this call here, with the reason. Nothing was written.
    RuntimeError
        When an argument requires grad under grad mode or carries a forward-mode tangent, or CUDA failed.

    Notes
    -----
    Source: Attention Residuals, arXiv 2603.15031.
    """
    through_op = _is_compiling() or _dispatch_modes() != 0 or _transforms() is not None
    served = False
    output = out
    if not through_op:
        tensors = (prefix, delta, bank, lse, norm_weight, qk_weight, output_norm_weight, blocks, out)
        if torch.is_grad_enabled() and _may_require_grad(tensors):
            refuse_grad_of("attn_res_merge", dict(zip(MergeCall.ARGUMENTS, tensors, strict=True)))
        if forward_ad._current_level >= 0:
            refuse_tangents_of("attn_res_merge", dict(zip(MergeCall.ARGUMENTS, tensors, strict=True)))
        if type(prefix) in _PLAIN_TYPES:
            if output is None:
                output = _empty_like(prefix)
            served = _merge_tensors(
                prefix,
                delta,
                bank,
                lse,
                norm_weight,
                qk_weight,
                output_norm_weight,
                blocks,
                block_write_idx,
                eps,
                output_norm_eps,
                output,
                pdl,
                backend,
                batch_invariant,
            )
        through_op = not served and _is_for_dispatcher(*tensors)
    if not served:
        run = _two_phase_ops.attn_res_merge if through_op else _two_phase_call.merge
        output = run(
            prefix,
            delta,
            bank,
            lse,
            norm_weight,
            qk_weight,
            output_norm_weight,
            blocks,
            block_write_idx,
            eps,
            output_norm_eps,
            out,
            backend,
            pdl,
            batch_invariant,
        )
    if not through_op:
        # What torch's own in-place ops do: a backward that saved the old value then fails instead of lying.
        written = [tensor for tensor in (None if delta is None else prefix, out) if tensor is not None]
        if block_write_idx != -1 and blocks is not None:
            written.append(blocks)
        if written:
            _increment_version(tuple(written))
    return output  # type: ignore[return-value]


def explain_bank(
    blocks: torch.Tensor,
    num_blocks: int,
    norm_weights: torch.Tensor,
    qk_weights: torch.Tensor,
    eps: float = 1e-5,
    *,
    bank: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    bank_dtype: torch.dtype | None = None,
    backend: str | None = None,
    pdl: str = "wait",
    batch_invariant: bool | None = None,
) -> Explanation:
    """Which backend :func:`attn_res_bank` would take, as :func:`libattnres.explain` says of ``attn_res``.

    Nothing is run or written; memory for ``bank`` and ``lse`` that are not given is allocated for the while.

    Parameters
    ----------
    blocks, num_blocks, norm_weights, qk_weights, eps, bank, lse, bank_dtype, backend, pdl, batch_invariant
        As for :func:`attn_res_bank`.

    Returns
    -------
    Explanation
        Backend, what decided, and reasons; its ``plan`` is None.

    Raises
    ------
    TypeError, ValueError
        As :func:`attn_res_bank`, and for DTensors.
    """
    for name, tensor in zip(BankCall.ARGUMENTS, (blocks, norm_weights, qk_weights, bank, lse), strict=True):
        _two_phase_ops.refuse_dtensor(name, tensor)
    call = checked_bank_call(
        blocks, num_blocks, norm_weights, qk_weights, eps, bank, lse, bank_dtype, pdl, batch_invariant
    )
    return _two_phase_call.explain(call, backend)


def explain_merge(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    bank: torch.Tensor,
    lse: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    blocks: torch.Tensor | None = None,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    pdl: str = "wait",
    batch_invariant: bool | None = None,
) -> Explanation:
    """Which backend :func:`attn_res_merge` would take, as :func:`libattnres.explain` says of ``attn_res``.

    Parameters
    ----------
    prefix, delta, bank, lse, norm_weight, qk_weight, output_norm_weight, blocks, block_write_idx
        As for :func:`attn_res_merge`, as are ``eps``, ``output_norm_eps``, ``out``, ``backend``, ``pdl`` and
        ``batch_invariant``.

    Returns
    -------
    Explanation
        Backend, what decided, and reasons; its ``plan`` is None.

    Raises
    ------
    TypeError, ValueError
        As :func:`attn_res_merge`, and for DTensors.
    """
    tensors = (prefix, delta, bank, lse, norm_weight, qk_weight, output_norm_weight, blocks, out)
    for name, tensor in zip(MergeCall.ARGUMENTS, tensors, strict=True):
        _two_phase_ops.refuse_dtensor(name, tensor)
    call = checked_merge_call(
        prefix,
        delta,
        bank,
        lse,
        norm_weight,
        qk_weight,
        output_norm_weight,
        blocks,
        block_write_idx,
        eps,
        output_norm_eps,
        out,
        pdl,
        batch_invariant,
    )
    return _two_phase_call.explain(call, backend)


def _may_require_grad(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Quick and without names; True also when an argument is no tensor."""
    try:
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    except AttributeError:
        return True
    return False
